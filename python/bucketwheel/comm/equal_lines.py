"""Lines of text that all ranks must have alike."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence

from bucketwheel.comm.replicas import REPLICAS_MARK, Reducer


def expect_equal_lines(comm: Reducer, lines: Sequence[str], remedy: str = "") -> None:
    """RuntimeError on every rank, with the first of ``lines`` that is not the same on all. Collective."""
    payload = b"".join([struct.pack("<q", len(lines)), *(digest_of(line.encode()) for line in lines)])
    everyone = comm.exchange(payload[: comm.max_payload_bytes // 8 * 8])
    if len(set(everyone)) == 1:
        return
    if any(other.startswith(REPLICAS_MARK) for other in everyone):
        raise RuntimeError("some ranks of the process_group pass a replicate_group, but this rank does not")
    fewest = min(struct.unpack_from("<q", other)[0] for other in everyone)
    by_line = enumerate(zip(*(by_eight(other)[1:] for other in everyone), strict=False))
    at = next((i for i, digests in by_line if len(set(digests)) > 1), fewest)
    mine = lines[at] if at < len(lines) else "nothing more"
    said = [str(one, "utf-8", "ignore") for one in comm.exchange(mine.encode()[: comm.max_payload_bytes])]
    other = next((rank for rank, one in enumerate(said) if one != said[0]), 0)  # 0: they differ behind what is sent
    raise RuntimeError(f"ranks disagree on their setup: rank 0 has {said[0]}; rank {other} has {said[other]}{remedy}")


def by_eight(payload: bytes) -> list[bytes]:
    return [payload[at : at + 8] for at in range(0, len(payload), 8)]


def digest_of(data: bytes | memoryview) -> bytes:
    return hashlib.blake2b(data, digest_size=8).digest()
