#!/usr/bin/env python3
"""Every kernel and variant once at small sizes, for compute-sanitizer: ``sanitizer_cases.py memcheck|racecheck``.

The tool looks for the errors; results are compared with the CPU's too. Each tensor is an allocation of its own (torch's
caching is off), so that one element too far is seen. ``racecheck`` runs what has shared memory. The first cases are
every kernel and each kind of weight once; the others follow until --seconds are over. The last line says how many were
left out: it is a failure if those that every run needs are among them, or, for ``memcheck``, more than half of all. A
case that is not over in time ends the process, with the stack of every thread.
"""

from __future__ import annotations

import argparse
import faulthandler
import itertools
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"  # before torch

import torch  # noqa: E402
from torch import Tensor  # noqa: E402

import bucketwheel as bw  # noqa: E402
from bucketwheel.comm.backends import LocalWorld  # noqa: E402
from bucketwheel.comm.communicator import Communicator  # noqa: E402
from bucketwheel.kernels import ops  # noqa: E402
from bucketwheel.native import core  # noqa: E402
from bucketwheel.testing import run_threads  # noqa: E402
from tests.gpu.device import DEVICE  # noqa: E402
from tests.gpu.local_ranks import in_world, on_cpu_ranks  # noqa: E402
from tests.gpu.test_kernels import moved, on_cpu, on_device  # noqa: E402
from tests.gpu.test_optim import assert_equal, trained  # noqa: E402
from tests.support.adam_cases import KINDS, assert_same, make, run_op  # noqa: E402
from tests.support.reference import Adam, bits  # noqa: E402
from tests.support.reference_rows import Rounding  # noqa: E402

F32, BF16, F16, F64 = torch.float32, torch.bfloat16, torch.float16, torch.float64
SIZES = [1, 523, 8197]
NORM_SIZES = [3, 1027, 32771]
CASE_S = 15.0
STRIDE = 7  # no divisor of the variants in a row: 4 of each kind
Case = Callable[[], None]


def adam_case(kind: tuple[Any, ...], amsgrad: bool, is_random: bool) -> None:
    """One variant, at three sizes in one launch; the tensors of the second share no alignment."""
    rows = [make(kind, numel, amsgrad, seed=numel) for numel in SIZES]
    theirs = [on_device(row, -1 if i == 1 else 0) for i, row in enumerate(rows)]
    args = Adam(step=3, lr=1e-2, weight_decay=0.1, beta2=0.99, decoupled=not is_random, maximize=is_random)
    rounding = Rounding(is_random, seed=5)
    run_op(theirs, args, rounding)
    with DEVICE.cpu():
        run_op(rows, args, rounding)
    for row, other in zip(rows, theirs, strict=True):
        assert_same(on_cpu(other), row, kind)


def random(numel: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed)).to(dtype)


def norm_case(dtype: torch.dtype) -> None:
    """Sums of squares and their fold, of tensors that start anywhere."""
    tensors = [random(numel, dtype) for numel in NORM_SIZES]
    got = ops.l2_norm([moved(x, i) for i, x in enumerate(tensors)], per_tensor=True)
    with DEVICE.cpu():
        expected = ops.l2_norm(tensors, per_tensor=True)
    assert torch.equal(DEVICE.get(got), expected)


def long_fold_case() -> None:
    """More chunks than a group of the fold has, and many rows."""
    tensors = [random(70 * 32768 + 5, BF16), *(random(64, BF16, i) for i in range(300))]
    got = ops.l2_norm([DEVICE.put(x) for x in tensors])
    with DEVICE.cpu():
        expected = ops.l2_norm(tensors)
    assert torch.equal(DEVICE.get(got), expected)


def copy_case(dtype: torch.dtype, to: torch.dtype) -> None:
    inputs = [random(numel, dtype) for numel in SIZES]
    got = [torch.empty(x.numel(), dtype=to, device=DEVICE.tensors) for x in inputs]
    core.copy_all(got, [moved(x, i) for i, x in enumerate(inputs)])
    expected = [torch.empty(x.numel(), dtype=to) for x in inputs]
    with DEVICE.cpu():
        core.copy_all(expected, inputs)
    for a, b in zip(got, expected, strict=True):
        assert torch.equal(bits(DEVICE.get(a)), bits(b))


def training_case(world: int, dtype: torch.dtype) -> None:
    """Accumulate, parameter sums, clip and Adam, as ShardedAdamW calls them; world 0: without a communicator."""
    expected = on_cpu_ranks(world, lambda rank, comm: trained(comm, torch.device("cpu"), dtype, "own", steps=2))
    got = in_world(world, lambda rank, comm: trained(comm, DEVICE.tensors, dtype, "own", steps=2))
    for ours, theirs in zip(got, expected, strict=True):
        assert_equal(ours, theirs)


def rank_sums_case() -> None:
    by_rank = random(3 * 301, F64).view(3, 301)
    got = torch.empty(301, dtype=F64, device=DEVICE.tensors)
    core.rank_sums_cuda(0, DEVICE.put(by_rank), got)
    assert torch.equal(DEVICE.get(got), by_rank[0] + by_rank[1] + by_rank[2])


def in_turn(world: int, device: str | None, body: Callable[[list[Communicator]], list[Tensor]]) -> list[Tensor]:
    """``body`` with the communicators of all ranks, in one thread: the tool does not come to an end where several launch."""
    places = LocalWorld(world)
    comms = run_threads(lambda rank, _: Communicator(places.rank(rank), device=device), world, timeout_s=CASE_S)
    try:
        return [DEVICE.get(x) for x in body(comms)]
    finally:
        run_threads(lambda rank, _: comms[rank].close(5.0), world, timeout_s=CASE_S)


def reduce_case(world: int, dtype: torch.dtype) -> None:
    """Sums of all ranks, stored as they are and added to a gradient shard with its sums of squares."""

    def reduced(device: torch.device, comms: list[Communicator]) -> list[Tensor]:
        fulls = [[random(numel * world, dtype, rank).to(device, copy=True) for numel in SIZES] for rank in range(world)]
        outputs = [[torch.empty(numel, dtype=dtype, device=device) for numel in SIZES] for _ in comms]
        handles = [bw.reduce_scatter(*one) for one in zip(outputs, fulls, comms, strict=True)]
        shards = [torch.ones(numel, device=device) for numel in SIZES for _ in comms]
        for index, shard in enumerate(shards):
            size, rank = divmod(index, world)
            sink = sink_of(shard)
            sink.start(True)
            handles.append(comms[rank]._native.reduce_scatter_to_sink(fulls[rank][size], sink))
        for handle in handles:
            handle.wait()
        return [*itertools.chain(*outputs), *shards]

    with DEVICE.cpu():
        expected = in_turn(world, None, partial(reduced, torch.device("cpu")))
    for a, b in zip(in_turn(world, "cuda", partial(reduced, DEVICE.tensors)), expected, strict=True):
        assert torch.equal(bits(a), bits(b))


def sink_of(shard: Tensor) -> Any:
    half = shard.numel() // 2
    segments = [(0, half), (half, shard.numel() - half)]
    if core.is_posing() or shard.is_cuda:
        sums = torch.zeros(core.ShardAccumulatorCuda.max_spans(2), dtype=torch.float64, device=shard.device)
        return core.ShardAccumulatorCuda(shard, segments, sums)
    return core.ShardAccumulator(shard, segments)


def needed_cases(tool: str) -> Iterator[tuple[str, Case]]:
    """Every kernel, and each kind of weight."""
    for dtype in (F32, BF16, F16, F64):
        yield f"norm {dtype}", partial(norm_case, dtype)
    for weight, kind in {kind[0]: kind for kind in reversed(KINDS)}.items():
        yield f"adam {weight}, amsgrad, random", partial(adam_case, kind, True, True)
    yield "long fold", long_fold_case
    yield "rank sums", rank_sums_case
    if tool == "memcheck":
        for dtype, to in itertools.product((F32, BF16, F16), repeat=2):
            yield f"copy {dtype} to {to}", partial(copy_case, dtype, to)
    yield "reduce 2 ranks", partial(reduce_case, 2, F32)
    yield "reduce 4 ranks", partial(reduce_case, 4, BF16)
    for world, dtype in itertools.product((0, 1), (F32, BF16)):
        yield f"train {world} ranks {dtype}", partial(training_case, world, dtype)


def more_cases(tool: str) -> list[tuple[str, Case]]:
    """The other variants of Adam; any first half has all sorts of them, for the order spreads them."""
    if tool == "racecheck":
        return []
    variants = list(itertools.product(KINDS, (False, True), (False, True)))
    return [
        (f"adam {kind} {amsgrad} {is_random}", partial(adam_case, kind, amsgrad, is_random))
        for kind, amsgrad, is_random in (variant for first in range(STRIDE) for variant in variants[first::STRIDE])
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tool", choices=("memcheck", "racecheck"))
    parser.add_argument("--seconds", type=float, default=38.0, help="start no case after that (default 38)")
    options = parser.parse_args()
    start = time.monotonic()
    needed = list(needed_cases(options.tool))
    todo = needed + more_cases(options.tool)
    done = 0
    with DEVICE.opened():
        for name, case in todo:
            if time.monotonic() - start > options.seconds:
                break
            print(f"[{time.monotonic() - start:5.1f} s] {name}", flush=True)
            faulthandler.dump_traceback_later(CASE_S, exit=True)
            case()
            DEVICE.synchronize()
            faulthandler.cancel_dump_traceback_later()
            done += 1
    left = [name for name, _ in todo[done:]]
    print(json.dumps({"cases": done, "of": len(todo), "left_out": left}))
    print(f"{done} of {len(todo)} cases in {time.monotonic() - start:.1f} s, {len(left)} left out")
    return 0 if done >= max(len(needed), len(todo) / 2) else 1


if __name__ == "__main__":
    sys.exit(main())
