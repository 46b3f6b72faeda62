"""``bucketwheel checkpoint DIR``: what a checkpoint holds, and whether it is whole. Needs no GPU and no other rank.

Exit status: 0 it is whole (of another writer's checkpoint, which has no checksums: as far as sizes and names show); 1 it is
damaged, incomplete or none. `report` looks and writes.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

from bucketwheel.errors import CheckpointError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=Path, metavar="DIR", help="the folder of the checkpoint")
    parser.add_argument("--quick", action="store_true", help="do not read the data: names, shapes and sizes only")


def main(options: argparse.Namespace) -> int:
    try:
        for line in report(options.folder, verify=not options.quick):
            print(line)
    except CheckpointError as error:
        print(f"damaged: {error}", file=sys.stderr)
        return 1
    return 0


def report(folder: Path, *, verify: bool) -> Iterator[str]:
    """Line by line, the verdict last. Raises `CheckpointError` where it is not whole."""
    # Here: doctor also runs where the rest cannot be imported.
    from torch.distributed.checkpoint.metadata import BytesStorageMetadata

    from bucketwheel.checkpoint import Reader

    reader = Reader(folder)
    found = reader.description
    rows = [("name", "dtype", "shape", "boxes", "bytes")]
    for name, entry in found.metadata.state_dict_metadata.items():
        if isinstance(entry, BytesStorageMetadata):
            rows.append((name, "object", "", "", ""))
        else:
            dtype = entry.properties.dtype
            nbytes = entry.size.numel() * dtype.itemsize
            rows.append((name, str(dtype)[6:], str(list(entry.size)), str(len(entry.chunks)), str(nbytes)))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for name, kind, shape, count, size in rows:
        left = f"{name:{widths[0]}}  {kind:{widths[1]}}  {shape:{widths[2]}}"
        yield f"{left}  {count:>{widths[3]}}  {size:>{widths[4]}}".rstrip()
    objects = sum(row[1] == "object" for row in rows)
    stored = found.items.values()
    files = len({one.path for one in stored})
    yield (
        f"{len(rows) - 1 - objects} tensors in {len(stored) - objects} boxes, {objects} objects, "
        f"{sum(one.length for one in stored)} bytes in {files} file{'s' * (files != 1)}"
    )
    if not found.world:
        yield "written by another writer than bucketwheel's: it has no checksums; names, shapes and sizes fit"
    else:
        compared = f"checksums of {reader.verify()} bytes agree" if verify else "checksums not compared (--quick)"
        yield f"written by {found.world} rank{'s' * (found.world != 1)}; {compared}"
    reader.close()
