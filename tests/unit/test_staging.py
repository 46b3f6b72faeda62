"""Staging: one thread reads chunks in their order while another is about to write to them."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from bucketwheel import CheckpointError
from bucketwheel.checkpoint import staging as module
from bucketwheel.checkpoint.staging import LiveTensor, Staging, Watched
from bucketwheel.layout.masters import split_master

CHUNK = 64  # bytes: 16 float32
LIMIT_S = 30


def make(chunks: int, held: int, params: int = 1) -> tuple[Staging, list[LiveTensor], list[Tensor]]:
    """``params`` of ``chunks`` each; memory for ``held`` chunks beside the reader's."""
    staging = Staging((held + 1) * CHUNK, CHUNK, torch.device("cpu"))
    tensors = [torch.arange(16.0 * chunks) + 1000 * i for i in range(params)]
    live = [LiveTensor(staging, i, [t], t.dtype, Watched(f"tensor {i}", t)) for i, t in enumerate(tensors)]
    return staging, live, tensors


def values(pieces: Iterator[Tensor]) -> list[float]:
    return [x for piece in pieces for x in piece.view(torch.float32).tolist()]


def overwrite(tensor: Tensor) -> None:
    tensor.data.fill_(-1.0)  # without a new version, as the kernel does


def test_chunks_are_read_from_where_they_lie() -> None:
    staging, (live,), (tensor,) = make(3, 1)
    pieces = list(live.chunks())
    assert [piece.data_ptr() for piece in pieces] == [tensor.data_ptr() + CHUNK * i for i in range(3)]
    assert staging.written_bytes == tensor.nbytes and staging.stats.peak_staging_bytes == 0
    staging.before_write(None)
    assert staging.stats.staged_bytes == 0


def test_what_is_about_to_be_written_is_staged_and_nothing_else() -> None:
    staging, live, tensors = make(3, 6, params=2)
    before = [t.tolist() for t in tensors]
    first = live[0].chunks()
    assert next(first).view(torch.float32).tolist() == before[0][:16]
    next(first)  # so the first is in the file, and the second is being read
    third = threading.Thread(target=staging.before_write, args=([0],))
    third.start()
    third.join(0.2)
    assert third.is_alive()  # it waits for the second, and has staged the third
    assert next(first).view(torch.float32).tolist() == before[0][32:]
    third.join(LIMIT_S)
    assert not third.is_alive()
    overwrite(tensors[0])
    assert list(first) == []
    assert staging.stats.staged_bytes == CHUNK and staging.stats.waits == 1 and staging.stats.waited_s > 0.1
    staging.before_write([1])
    overwrite(tensors[1])
    assert values(live[1].chunks()) == before[1]
    assert staging.stats.staged_bytes == 4 * CHUNK


@pytest.mark.parametrize("is_staged", [False, True])
def test_a_write_by_others_fails_the_save_and_not_the_step(is_staged: bool) -> None:
    staging, live, tensors = make(3, 6)
    first = live[0].chunks()
    if not is_staged:
        next(first)  # is being read
    tensors[0].add_(1)
    if is_staged:
        staging.before_write(None)
    with pytest.raises(CheckpointError, match="tensor 0 was modified"):
        list(first)


def test_a_master_is_joined_in_small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """What that takes for a moment is a fraction of the chunk."""
    real, joined = module.value_of, []
    monkeypatch.setattr(module, "value_of", lambda views: joined.append(views[0].numel()) or real(views))
    master = torch.randn(300, 301)
    param, remainder = (half.t() for half in split_master(master))
    chunk_bytes = master.nbytes
    staging = Staging(4 * chunk_bytes, chunk_bytes, torch.device("cpu"))
    live = LiveTensor(staging, 0, [param, remainder], torch.float32, Watched("master", param))
    (found,) = live.chunks()
    assert torch.equal(found.view(torch.float32).view(301, 300), master.t())
    assert sum(joined) == master.numel() and max(joined) <= master.numel() // 16


@pytest.mark.parametrize("error", [None, RuntimeError("no device")])
def test_a_copy_that_fails_ends_the_wait_for_it(error: Exception | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file waits for the chunk that the step copies. An edit fails the save alone, anything else the step too."""
    staging, (live,), (tensor,) = make(1, 6)
    found: list[BaseException] = []

    def read() -> None:
        try:
            list(live.chunks())
        except Exception as error:
            found.append(error)

    reader = threading.Thread(target=read, daemon=True)

    def value_of(views: tuple[Tensor, ...]) -> Tensor:
        reader.start()
        while not staging._changed._waiters:  # type: ignore[attr-defined]
            time.sleep(0.001)
        if error is not None:
            raise error
        return views[0]

    monkeypatch.setattr(module, "value_of", value_of)
    tensor.add_(1)
    with pytest.raises(RuntimeError, match="no device") if error else contextlib.nullcontext():
        staging.before_write(None)
    reader.join(LIMIT_S)
    assert not reader.is_alive()
    assert [type(one) for one in found] == [CheckpointError if error is None else RuntimeError]


def test_a_save_that_has_ended_holds_nobody_up() -> None:
    staging, live, _ = make(5, 1)
    waiting = threading.Thread(target=staging.before_write, args=(None,))
    waiting.start()
    waiting.join(0.1)
    assert waiting.is_alive()
    staging.end(OSError("disk full"))
    waiting.join(LIMIT_S)
    assert not waiting.is_alive()
    staging.before_write([0])
    with pytest.raises(OSError, match="disk full"):
        list(live[0].chunks())


# ---- CUDA, by recording what is asked of the streams


class FakeStream:
    def __init__(self, name: str, said: list[str]) -> None:
        self.name, self.said, self.events = name, said, 0

    def wait_stream(self, other: FakeStream) -> None:
        self.said.append(f"{self.name} waits for {other.name}")

    def wait_event(self, event: FakeEvent) -> None:
        self.said.append(f"{self.name} waits for {event.name}")

    def record_event(self) -> FakeEvent:
        self.events += 1
        self.said.append(f"copy {self.events} in {self.name}")
        return FakeEvent(f"copy {self.events}", self.said)


class FakeEvent:
    def __init__(self, name: str, said: list[str]) -> None:
        self.name, self.said = name, said

    def synchronize(self) -> None:
        self.said.append(f"the host waits for {self.name}")


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was asked, in order, where tensors on the CPU pose as tensors on a device."""
    said: list[str] = []
    current = FakeStream("training", said)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: FakeStream("side", said))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    new = lambda self, nbytes: torch.empty(nbytes, dtype=torch.uint8)  # noqa: E731 (not pinned)
    monkeypatch.setattr(Staging, "_new_memory", new)
    monkeypatch.setattr(module._Chunk, "is_in_place", False)
    return said


def test_a_step_waits_in_its_stream_and_the_file_on_the_host(said: list[str]) -> None:
    device = torch.device("cuda", 0)
    on_device = Staging(6 * CHUNK, CHUNK, device)
    tensor = torch.arange(48.0)
    live = LiveTensor(on_device, 0, [tensor], tensor.dtype, Watched("tensor", tensor))
    pieces = live.chunks()
    found = next(pieces).view(torch.float32).tolist()
    assert said == ["side waits for training", "copy 1 in side", "the host waits for copy 1"]
    said.clear()
    on_device.before_write([0])  # of the first nothing is needed but that its copy comes before the kernel
    staged = ["side waits for training", "copy {0} in side", "training waits for copy {0}"]
    ordered = [line.format(copy) for copy in (2, 3) for line in staged]
    assert said == [*ordered, "training waits for copy 1"]
    said.clear()
    overwrite(tensor)
    found += values(pieces)
    assert said == ["the host waits for copy 3", "the host waits for copy 2"]
    assert found == list(range(48))
