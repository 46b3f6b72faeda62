"""What a parameter's hook and a bucket cost the host during backward: part of bench_optim.py, and of bench_gpu.py's `host`.

One rank, one thread; a Function gives the gradients, so that backward does nothing else. The peer is torch's backward of
the same kind with an empty hook in C on every parameter: where gradients accumulate, it adds to the ``.grad`` that is
there. Both are processor time of the process, since hooks of a GPU's gradients run in a thread of autograd (beside the busy
thread: wall time). A bucket's time is the slope between the rows of one and of many buckets. `issue`: a prepared
reduce-scatter of as many elements, whatever thread works for it. Counted in passes that are not timed:

- entries: how often a backward enters Python in the package; other_entries: elsewhere, beside the Function. What Python
  builds anew for each bucket is built there, so entries and calls of a bucket stand for it, and 0 entries for none;
- calls: how many functions of the package run in Python then, entered or called by each other;
- kept: how many Python objects more there are after a step than before.
"""

from __future__ import annotations

import collections
import contextlib
import gc
import re
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from clip_step import Inject
from gpt_systems import LR, MAX_NORM
from harness import Rank, Results, Timing, run_ranks
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import bucketwheel as bw
from bucketwheel.comm.backends import LocalWorld
from bucketwheel.comm.collectives import ReduceScatterRequest
from bucketwheel.comm.communicator import Communicator
from bucketwheel.testing import run_threads

PEER = "torch, empty hook in C"
NUMEL = 64
MANY = 0.002  # bucket_cap_mb by which 300 parameters have 33 buckets
PACKAGE = str(Path(bw.__file__).parent)
WARM_UP = 5


@dataclass(frozen=True)
class Row:
    """``way``: what comes before the backward that is measured, or around the model."""

    name: str
    count: int = 1000
    way: str = ""
    cap_mb: float | None = None
    dtype: torch.dtype = torch.float32
    replicas: int = 1


ONE, BUCKETS = Row("one bucket", count=300), Row("33 buckets", count=300, cap_mb=MANY)
BUSY = Row("plain, beside a busy thread", way="busy")
ROWS = [
    Row("plain"),
    ONE,
    BUCKETS,
    Row("second micro-batch", way="accumulate"),
    Row("grad_sync each micro-batch", way="grad_sync"),
    Row("after no_sync", way="no_sync"),
    Row("zero_grad(set_to_none=False)", way="zero"),
    Row("inside DistributedDataParallel", way="ddp"),
    Row("GradScaler", way="scaler"),
    Row("bf16 with fp32 masters", dtype=torch.bfloat16),
    Row("HSDP, 2 replicas", replicas=2),
    BUSY,
]
ACCUMULATE = ("accumulate", "grad_sync", "no_sync")


@dataclass(frozen=True)
class Where:
    """A communicator of one rank. ``tensors``: the device of tensors; ``device``: as communicators take it. All of a
    device's work is done when ``synchronize`` returns; ``works``: it is done at all, so that results are right."""

    comm: Communicator
    tensors: torch.device = torch.device("cpu")
    device: str | None = None
    synchronize: Callable[[], None] = lambda: None
    works: bool = True


class Given(nn.Module):
    """Each parameter gets a given gradient."""

    def __init__(self, row: Row, device: torch.device) -> None:
        super().__init__()
        seeded = torch.Generator().manual_seed(0)
        self.weights, self.grads = nn.ParameterList(), []
        for _ in range(row.count):
            self.weights.append(nn.Parameter(torch.randn(NUMEL, generator=seeded).to(device, row.dtype)))
            self.grads.append(torch.randn(NUMEL, generator=seeded).to(device, row.dtype))

    def forward(self) -> Tensor:
        loss: Tensor = Inject.apply(self.grads, *self.weights)
        return loss


class Peer:
    """torch alone; and the steps around backward, which `Ours` shares."""

    def __init__(self, row: Row, where: Where, replicate: Communicator | None = None) -> None:
        self.row, self.where = row, where
        model = Given(row, where.tensors)
        self.parameters = list(model.parameters())
        self.optimizer = self.make_optimizer(replicate)
        self.runner: nn.Module = DistributedDataParallel(model) if row.way == "ddp" else model
        self.scaler = torch.amp.GradScaler(where.tensors.type, enabled=row.way == "scaler")

    def make_optimizer(self, replicate: Communicator | None) -> Any:
        for parameter in self.parameters:
            parameter.register_post_accumulate_grad_hook(collections.deque(maxlen=1).append)
        return torch.optim.SGD(self.parameters)  # for zero_grad

    def loss(self) -> Tensor:
        """All that comes before the backward that is measured."""
        self.optimizer.zero_grad(set_to_none=self.row.way != "zero")
        if self.row.way in ACCUMULATE:
            self.first_micro_batch()
        loss: Tensor = self.scaler.scale(self.runner())
        return loss

    def first_micro_batch(self) -> None:
        self.runner().backward()

    def finish(self) -> None: ...


class Ours(Peer):
    def make_optimizer(self, replicate: Communicator | None) -> Any:
        groups = {"process_group": self.where.comm, "replicate_group": replicate}
        return bw.ShardedAdamW(self.parameters, lr=LR, bucket_cap_mb=self.row.cap_mb, **groups)  # type: ignore[arg-type]

    def first_micro_batch(self) -> None:
        with self.optimizer.no_sync() if self.row.way == "no_sync" else contextlib.nullcontext():
            self.runner().backward()
        if self.row.way == "grad_sync":
            self.optimizer.grad_sync()

    def finish(self) -> None:
        if self.row.way == "grad_sync":
            self.optimizer.grad_sync()
        self.scaler.unscale_(self.optimizer)
        self.optimizer.clip_grad_norm_(MAX_NORM)
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def buckets(self) -> int:
        found = re.search(r"(\d+) buckets?$", self.optimizer.describe(), re.MULTILINE)
        assert found is not None
        return int(found[1])


class Entries:
    """Counts calls of Python in the thread that runs a backward."""

    def __init__(self) -> None:
        self.entries = self.other_entries = self.calls = self._depth = 0

    def profile(self, frame: Any, event: str, arg: Any) -> None:
        if event == "call":
            is_ours = frame.f_code.co_filename.startswith(PACKAGE)
            self.calls += is_ours
            if not self._depth and not frame.f_code.co_filename.endswith("torch/autograd/function.py"):
                self.entries += is_ours
                self.other_entries += not is_ours
            self._depth += 1
        elif event == "return":
            self._depth = max(self._depth - 1, 0)  # frames that were there before return too

    def count(self, loss: Tensor) -> dict[str, int]:
        """Of its backward. A hook of the loss runs in the thread of the others, where the next backward is to `end` this."""
        loss.register_hook(lambda grad: sys.setprofile(self.profile))
        loss.backward()
        found = {"entries": self.entries, "other_entries": self.other_entries, "calls": self.calls}
        sys.setprofile(None)
        return found

    def end(self, loss: Tensor) -> None:
        loss.register_hook(lambda grad: sys.setprofile(None))
        loss.backward()


@dataclass(frozen=True)
class Found:
    """Of one row: the time of a backward, ours and the peer's, of our whole step, and what was counted."""

    row: Row
    ours: Timing
    peer: Timing
    step: Timing
    buckets: int
    counts: dict[str, float]

    @property
    def hooks(self) -> Timing:
        return self.ours.minus(self.peer)

    def facts(self) -> dict[str, float]:
        us = 1e6 / self.row.count
        times = {
            "us_a_parameter": us * self.hooks.median_s,
            "torch_us_a_parameter": us * self.peer.median_s,
            "step_ms": 1e3 * self.step.median_s,
        }
        return {name: round(value, 2) for name, value in (times | self.counts).items()}


def bucket_facts(found: list[Found]) -> dict[str, float]:
    """Of one bucket: the slope between the rows of one and of many."""
    one, many = (next(each for each in found if each.row == row) for row in (ONE, BUCKETS))
    more = {
        "us_a_bucket": 1e6 * (many.hooks.median_s - one.hooks.median_s),
        **{name: many.counts[name] - one.counts[name] for name in ("entries", "calls")},
    }
    return {name: round(value / (many.buckets - one.buckets), 2) for name, value in more.items()}


@contextlib.contextmanager
def busy_thread() -> Iterator[None]:
    """Inside, a thread takes the GIL again and again, as that of a loader with pin_memory does."""
    ends = threading.Event()

    def work() -> None:
        while not ends.wait(1e-4):
            sum(range(200))

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ends.set()
        thread.join(60)


def measure_row(row: Row, where: Where, repeats: int, steps: int) -> Found:
    if row.replicas == 1:
        return _measure(row, where, None, threading.Barrier(1), 0, repeats, steps)
    turns, columns = threading.Barrier(row.replicas), LocalWorld(row.replicas)

    def body(rank: int, world: int) -> Found:
        with (
            Communicator(LocalWorld(1).rank(0), name="row", device=where.device) as shard,
            Communicator(columns.rank(rank), name="column", device=where.device) as replicate,
        ):
            here = replace(where, comm=shard)
            return _measure(row, here, replicate, turns, rank, repeats, steps)

    found: Found = run_threads(body, row.replicas, timeout_s=300)[0]
    return found


def check(peer: Peer, ours: Ours) -> None:
    """RuntimeError unless both have the same gradients of the first and the last parameter."""
    for system in (peer, ours):
        system.loss().backward()
    for index in (0, -1):
        got, want = ours.optimizer.full_grad(ours.parameters[index]), peer.parameters[index].grad
        if want is None or not torch.allclose(got, want.float(), rtol=1e-5):
            raise RuntimeError(f"{ours.row.name}: the gradient of parameter {index} differs from torch's")
    ours.finish()


def _measure(
    row: Row,
    where: Where,
    replicate: Communicator | None,
    turns: threading.Barrier,
    rank: int,
    repeats: int,
    steps: int,
) -> Found:
    """Ranks that are threads run their backwards one after the other, so that the time of one is its own."""
    warnings.filterwarnings("ignore", message=".*DistributedDataParallel|a gradient came after its bucket")
    systems = {"peer": Peer(row, where), "ours": Ours(row, where, replicate)}
    now = time.perf_counter if row.way == "busy" else time.process_time
    samples: dict[str, list[float]] = {"peer": [], "ours": [], "step": []}

    def step(name: str, backward: Callable[[Tensor], Any]) -> Any:
        begin, result = now(), None
        loss = systems[name].loss()
        where.synchronize()
        for turn in range(turns.parties):
            turns.wait(60)
            if turn == rank:
                start = now()
                result = backward(loss)
                samples[name].append(now() - start)
        turns.wait(60)
        systems[name].finish()
        where.synchronize()
        if name == "ours":
            samples["step"].append(now() - begin)
        return result

    if where.works:
        check(systems["peer"], systems["ours"])  # type: ignore[arg-type]
    gc.collect()
    gc.disable()
    with busy_thread() if row.way == "busy" else contextlib.nullcontext():
        for _ in range(WARM_UP + repeats):
            for name in systems:
                step(name, Tensor.backward)
    timings = {name: Timing(tuple(values[WARM_UP:])) for name, values in samples.items()}
    entries = Entries()
    counts = step("ours", entries.count)
    step("ours", entries.end)
    gc.collect()
    before = len(gc.get_objects())
    for _ in range(steps):
        step("ours", Tensor.backward)
    gc.collect()
    kept = (len(gc.get_objects()) - before) / steps / turns.parties
    gc.enable()
    ours = systems["ours"]
    assert isinstance(ours, Ours)
    buckets = ours.buckets()
    ours.optimizer.close()
    return Found(row, timings["ours"], timings["peer"], timings["step"], buckets, counts | {"kept": kept})


def issue(where: Where, repeats: int, count: int = 33) -> Timing:
    """A prepared reduce-scatter of a bucket of `BUCKETS`, ``count`` of them one after the other."""
    numel = NUMEL * BUCKETS.count // count
    full, shard = (where.comm.pool.acquire("", 4 * numel).tensor(torch.float32, (numel,)) for _ in range(2))
    request = ReduceScatterRequest([shard], [full], where.comm)
    samples = []
    for _ in range(WARM_UP + repeats):
        where.synchronize()
        begin = time.process_time()
        handles = [request.start() for _ in range(count)]
        samples.append((time.process_time() - begin) / count)
        for handle in handles:
            handle.wait()
    return Timing(tuple(samples[WARM_UP:]))


def job(rank: Rank, repeats: int, steps: int) -> tuple[list[Found], Timing]:
    with Communicator(LocalWorld(1).rank(0)) as comm:
        return [measure_row(row, Where(comm), repeats, steps) for row in ROWS], issue(Where(comm), repeats)


def run(results: Results, *, repeats: int, steps: int) -> None:
    """Adds a line for each row and one for the issue of a bucket, and prints what they have beside times. ``steps``: in
    how many objects are counted."""
    found, issued = run_ranks(1, job, repeats, steps).values[0]
    lines = [(f"hooks, {one.row.name}", one.ours, one.peer, one.facts()) for one in found]
    lines.append(("hooks, issue of a bucket", issued, None, bucket_facts(found)))
    for name, ours, peer, facts in lines:
        results.add(name, ours, peer=PEER if peer else None, peer_timing=peer, **facts)
        print(f"{name:36s} " + "  ".join(f"{fact} {value:.6g}" for fact, value in facts.items()))
