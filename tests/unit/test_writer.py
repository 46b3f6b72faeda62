"""`Writer`: what is on disk is stock's format, with checksums, written in chunks, and committed by a rename."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import functools
import os
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import MetadataIndex

from bucketwheel.checkpoint import Writer, writer
from bucketwheel.checkpoint.format import METADATA
from bucketwheel.checkpoint.writer import DataFile, envelope_of
from bucketwheel.native import core

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")
DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.uint8, torch.bool, torch.complex64]
DTYPES += [torch.float8_e4m3fn]


def values(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def some_state() -> dict[str, Any]:
    return {
        "matrix": values(300, 70),
        "transposed": values(40, 30).t(),
        "rows of a larger one": values(40, 30)[3:17, ::2],
        "scalar": torch.tensor(3.0),
        "empty": torch.empty(0, 4),
        "half": values(7).bfloat16(),
        "group": {"lr": 0.1, "betas": (0.9, 0.99), "name": "decay"},
    }


def blank(state: dict[str, Any]) -> dict[str, Any]:
    return {
        name: torch.full_like(value, 9) if isinstance(value, torch.Tensor) else dict.fromkeys(value, 0)
        for name, value in state.items()
    }


def assert_equal(found: dict[str, Any], state: dict[str, Any]) -> None:
    for name, value in state.items():
        assert torch.equal(found[name], value) if isinstance(value, torch.Tensor) else found[name] == value, name


def save(folder: Path, state: dict[str, Any], **options: Any) -> None:
    dcp.save(state, storage_writer=Writer(folder, **options))


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (0,), (3, 5), (2, 0, 3)])
def test_the_envelope_is_that_of_torch_save(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = torch.zeros(shape, dtype=dtype)
    before, behind = envelope_of(dtype, shape)
    loaded = torch.load(BytesIO(before + bytes(tensor.nbytes) + behind), weights_only=True)
    assert loaded.dtype == dtype and torch.equal(loaded, tensor)


class Pieces:
    """Bytes that come in pieces of 1, 2, 3, ..."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.dtype, self.shape = tensor.dtype, tensor.shape
        self.bytes = tensor.reshape(-1).view(torch.uint8)

    def chunks(self) -> Iterator[torch.Tensor]:
        begin, size = 0, 1
        while begin < self.bytes.numel():
            yield self.bytes[begin : begin + size]
            begin, size = begin + size, size + 1


@pytest.mark.parametrize("kind", ["tensor", "strided", "pieces", "negative", "bytes"])
def test_each_chunk_has_its_checksum(tmp_path: Path, kind: str) -> None:
    whole = values(3, 5000)
    strided = torch.stack([whole, whole], -1)[..., 0]
    content = whole.numpy().tobytes()
    negative = torch.complex(whole, -whole).conj().imag
    data = {
        "tensor": whole,
        "strided": strided,
        "pieces": Pieces(whole),
        "negative": negative,
        "bytes": BytesIO(content),
    }
    file = DataFile(tmp_path / "f", chunk_bytes=4096)
    first = file.add(MetadataIndex("first", [0]), values(3))
    result = file.add(MetadataIndex("x", [0, 0]), data[kind])
    file.close()
    stored, written = result.storage_data, (tmp_path / "f").read_bytes()
    assert (stored.path, stored.offset, len(written)) == ("f", first.size_in_bytes, stored.offset + stored.length)
    blob, sums = written[stored.offset :], stored.sums
    assert blob[sums.begin :][: sums.nbytes] == content
    expected = [core.crc32c(content[at : at + 4096]) for at in range(0, len(content), 4096)]
    assert [int.from_bytes(sums.chunks[i : i + 4], "little") for i in range(0, len(sums.chunks), 4)] == expected
    assert sums.envelope == core.crc32c(blob[: sums.begin] + blob[sums.begin + sums.nbytes :])
    if kind != "bytes":
        assert torch.equal(torch.load(BytesIO(blob), weights_only=True), whole)


def refuse_the_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a file system without O_DIRECT does."""
    real = fcntl.fcntl

    def refusing(file: Any, command: int, flags: int = 0) -> int:
        if command == fcntl.F_SETFL and flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "refused")
        return real(file, command, flags)

    monkeypatch.setattr(writer.fcntl, "fcntl", refusing)


def refuse_a_write(number: int, monkeypatch: pytest.MonkeyPatch, error: int = errno.EINVAL) -> None:
    """As a disk of larger sectors does; EFAULT: memory of a device's driver."""
    real, calls = os.writev, iter(range(10**6))

    def refusing(descriptor: int, parts: list[memoryview]) -> int:
        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT and next(calls) >= number:
            raise OSError(error, "refused")
        return real(descriptor, parts)

    monkeypatch.setattr(os, "writev", refusing)


def write_little(monkeypatch: pytest.MonkeyPatch) -> None:
    """The system may write less than it is asked to."""

    def little(descriptor: int, parts: list[memoryview]) -> int:
        is_direct = fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT
        return os.write(descriptor, next(part for part in parts if part)[: 1 << 16 if is_direct else 9999])

    monkeypatch.setattr(os, "writev", little)


SYSTEMS: dict[str, Any] = {
    "takes all": lambda monkeypatch: None,
    "without O_DIRECT": refuse_the_flag,
    "refuses the first write": functools.partial(refuse_a_write, 0),
    "refuses the third write": functools.partial(refuse_a_write, 2),
    "refuses memory": functools.partial(refuse_a_write, 1, error=errno.EFAULT),
    "writes little": write_little,
}


@pytest.mark.parametrize("buffer_bytes", [4096, 1 << 16, writer.BUFFER_BYTES])
@pytest.mark.parametrize("system", SYSTEMS)
def test_bytes_are_the_same_past_the_page_cache_and_through_it(
    system: str, buffer_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    SYSTEMS[system](monkeypatch)
    large = writer._IN_PLACE_BYTES
    memory = torch.randint(256, (3 << 20,), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    page = -memory.data_ptr() % 4096
    sizes = [0, 1, 4095, 4096, 4097, large - 1, large, large + 1, large + 4096, (1 << 20) + 5, 2 << 20]
    boxes = [memory[page + odd :][:size] for odd in (0, 1, 512) for size in sizes]
    file = DataFile(tmp_path / "f", chunk_bytes=100_000, buffer_bytes=buffer_bytes)
    results = [file.add(MetadataIndex(str(i)), box) for i, box in enumerate(boxes)]
    objects = [b"x" * 9, b""]
    results += [file.add(MetadataIndex("object"), BytesIO(data)) for data in objects]
    file.close()
    content = (tmp_path / "f").read_bytes()
    end = 0
    for item, stored in zip([*boxes, *objects], [result.storage_data for result in results], strict=True):
        found = content[stored.offset :][: stored.length]
        is_box = isinstance(item, torch.Tensor)
        before, behind = envelope_of(item.dtype, tuple(item.shape)) if is_box else (b"", b"")
        data = item.numpy().tobytes() if is_box else item
        assert found == before + data + behind
        assert stored.sums.chunks == b"".join(
            core.crc32c(data[at : at + 100_000]).to_bytes(4, "little") for at in range(0, len(data), 100_000)
        )
        assert content[end : stored.offset].strip(b"\0") == b"" and stored.offset - end < 4096
        end = stored.offset + stored.length
    assert end == len(content) == file.size


def test_large_data_is_written_from_where_it_lies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Past the page cache: whole pages, but for the end of the file."""
    real, written = os.writev, []
    copied = mock.Mock(wraps=ctypes.memmove)
    monkeypatch.setattr(writer.ctypes, "memmove", copied)

    def recording(descriptor: int, parts: list[memoryview]) -> int:
        written.append((fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT, [len(part) for part in parts]))
        return real(descriptor, parts)

    monkeypatch.setattr(os, "writev", recording)
    memory = torch.zeros(3 << 20, dtype=torch.uint8)
    file = DataFile(tmp_path / "f")
    for size in (5, 2 << 20, (1 << 20) + 77):
        file.add(MetadataIndex("x"), memory[-memory.data_ptr() % 4096 :][:size])
    if not file._is_direct:
        pytest.skip(f"the file system of {tmp_path} has no O_DIRECT")
    file.close()
    assert [(bool(flag), lengths) for flag, lengths in written] == [
        (True, [4096, 2 << 20]),
        (True, [4096, 1 << 20]),
        (False, [file.size % 4096]),
    ]
    assert sum(call.args[2] for call in copied.mock_calls) < 3 * 4096
    assert not DataFile(tmp_path / "later", sync=False)._is_direct


def test_what_has_no_bytes_is_refused(tmp_path: Path) -> None:
    file = DataFile(tmp_path / "f")
    for tensor in (torch.eye(3).to_sparse(), torch.empty(3, device="meta")):
        with pytest.raises(TypeError, match="has no bytes to save"):
            file.add(MetadataIndex("x"), tensor)
    file.discard()


def test_the_space_of_a_failed_save_is_free_though_somebody_has_the_file(tmp_path: Path) -> None:
    """A process that was forked meanwhile has."""
    file = DataFile(tmp_path / "f")
    file.add(MetadataIndex("x"), torch.zeros(2 * writer.BUFFER_BYTES, dtype=torch.uint8))
    held = os.dup(file._file.fileno())
    assert os.fstat(held).st_size > 0
    file.discard()
    assert os.fstat(held).st_size == 0 and not list(tmp_path.iterdir())
    os.close(held)


def test_everything_is_on_disk_before_the_commit(tmp_path: Path) -> None:
    """The data file, the names of it, of its folder, the metadata; then the name of the metadata."""
    order: list[str] = []
    fsync, replace = os.fsync, Path.replace

    def flushed(descriptor: int) -> None:
        order.append(os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}")))
        fsync(descriptor)

    def replaced(path: Path, target: Path) -> Path:
        order.append("commit")
        return replace(path, target)

    with mock.patch.object(os, "fsync", flushed), mock.patch.object(Path, "replace", replaced):
        save(tmp_path / "c", {"x": values(5)})
        assert order == ["__0_0.distcp", ".saving", "c", ".metadata.tmp", "commit", "c"]
        order.clear()
        save(tmp_path / "c", {"x": values(5)}, sync=False)
        assert order == ["commit"]


@pytest.mark.parametrize("where", ["data", "metadata"])
def test_a_failed_save_leaves_the_last_one_and_no_data(where: str, tmp_path: Path) -> None:
    state = {"x": values(50), "y": values(60)}
    save(tmp_path, state)
    before = files(tmp_path)
    real = DataFile.add
    error = OSError(28, "No space left on device")

    def full(file: DataFile, index: MetadataIndex, data: Any) -> Any:
        if index.fqn == "y":
            raise error
        return real(file, index, data)

    patches = {"data": (DataFile, "add", full), "metadata": (Path, "write_bytes", mock.Mock(side_effect=error))}
    with mock.patch.object(*patches[where]), pytest.raises(CheckpointException, match="No space left"):
        save(tmp_path, {"x": values(50, seed=1), "y": values(60)})
    assert files(tmp_path) == before
    found = blank(state)
    dcp.load(found, storage_reader=dcp.FileSystemReader(tmp_path))
    assert_equal(found, state)
    save(tmp_path, state)
    assert len(files(tmp_path)) == 2 and not (tmp_path / ".saving").exists()


def test_a_commit_that_has_taken_effect_is_one_whatever_it_says(tmp_path: Path) -> None:
    replace = Path.replace

    def interrupted(path: Path, target: Path) -> None:
        replace(path, target)
        raise KeyboardInterrupt

    for patched in (replace, interrupted):
        state = {"x": values(50, seed=int(patched is interrupted))}
        with mock.patch.object(Path, "replace", patched), contextlib.suppress(CheckpointException):
            save(tmp_path, state)
    found = blank(state)
    dcp.load(found, storage_reader=dcp.FileSystemReader(tmp_path))
    assert_equal(found, state)


def test_a_file_of_somebody_else_stops_the_commit(tmp_path: Path) -> None:
    real = writer.publish

    def disturbed(folder: Path, *args: Any, **options: Any) -> None:
        (folder / ".saving" / "__7_0.distcp").write_bytes(b"late")
        real(folder, *args, **options)

    with (
        mock.patch.object(writer, "publish", disturbed),
        pytest.raises(CheckpointException, match="another save may write"),
    ):
        save(tmp_path, {"x": values(5)})
    assert not (tmp_path / METADATA).exists()


def test_a_file_that_its_rank_takes_away_stops_the_commit(tmp_path: Path) -> None:
    """As long as `.saving` has that name; its sync may take long."""
    sync, state = writer.sync_path, {"x": values(50)}

    def slowly(path: Path) -> None:
        if path.name == ".saving":
            next(path.iterdir()).unlink()
        sync(path)

    save(tmp_path, state)
    with (
        mock.patch.object(writer, "sync_path", slowly),
        pytest.raises(CheckpointException, match="has files of {} bytes"),
    ):
        save(tmp_path, {"x": values(60)})
    found = blank(state)
    dcp.load(found, storage_reader=dcp.FileSystemReader(tmp_path))
    assert_equal(found, state)


def test_plans_that_the_planner_caches(tmp_path: Path) -> None:
    """The second save uses the first one's plan, with what the first save put into it."""
    for seed in (0, 1):
        state = {"x": values(50, seed=seed)}
        dcp.save(state, storage_writer=Writer(tmp_path), planner=dcp.DefaultSavePlanner(enable_plan_caching=True))
        found = blank(state)
        dcp.load(found, storage_reader=dcp.FileSystemReader(tmp_path))
        assert_equal(found, state)


@pytest.mark.parametrize(
    ("options", "message"), [({"chunk_bytes": 100}, "at least 4096"), ({"chunk_bytes": 1.5}, "int")]
)
def test_arguments(options: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        Writer("x", **options)


def test_one_metadata_for_all_ranks(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="use_collectives=False"):
        dcp.save({"x": values(3)}, storage_writer=Writer(tmp_path), use_collectives=False)
