"""Pipeline schedules of torch: two stages on two data-parallel ranks each; and `grad_sync(parameters)`, which starts reductions.

The first stage reduces while its last backward runs, the second one after it: stock/test_examples.py.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import pipelining

from bucketwheel.comm.communicator import Communicator
from bucketwheel.optim.sharded_adamw import ShardedAdamW
from tests.support.bits import assert_bitwise_equal
from tests.support.optim_twins import TINY, Run, make_params, run_local
from tests.support.ranks import RankPool

MICRO, ROWS, WIDTH, DATA_RANKS = 4, 2, 6, 2


def make_stages() -> list[nn.Sequential]:
    generator = torch.Generator().manual_seed(3)
    stages = [nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, out)) for out in (5, 3)]
    stages[1][0] = nn.Linear(5, 8)
    for stage in stages:
        for p in stage.parameters():
            p.data = torch.randint(-4, 5, p.shape, generator=generator) / 4
    return stages


def batch(step: int, data_rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * step + data_rank)
    return torch.randint(-4, 5, (MICRO, ROWS, WIDTH), generator=generator) / 4


def loss_of(out: Tensor) -> Tensor:
    return (out * torch.tensor([1.0, -2.0, 0.5])).sum() / (MICRO * ROWS)


# --- torch.distributed.pipelining -------------------------------------------------------------------------------------


def run_schedule(rank: int, schedule: str, ours: bool) -> list[Tensor]:
    """Parameters after three steps, on ranks 2 * stage + data rank."""
    stage, data_rank = divmod(rank, DATA_RANKS)
    data = [dist.new_group([0, 1]), dist.new_group([2, 3])][stage]
    across = [dist.new_group([0, 2]), dist.new_group([1, 3])][data_rank]
    model = make_stages()[stage]
    opt: Any = torch.optim.AdamW(model.parameters(), lr=0.05)
    launches: list[int] = []
    if ours:
        opt = ShardedAdamW(model.parameters(), lr=0.05, process_group=data, timeout_s=20, **TINY)
        opt._engine.grads._native.observe(lambda *_: launches.append(1))
    pipe = pipelining.PipelineStage(model, stage, 2, torch.device("cpu"), group=across)
    made = getattr(pipelining, f"Schedule{schedule}")(pipe, MICRO, loss_fn=lambda out, target: loss_of(out + target))
    for step in range(3):
        x = batch(step, data_rank).flatten(0, 1)
        with opt.no_sync() if ours else contextlib.nullcontext():
            made.step(target=x[:, :3]) if stage else made.step(x)
        if ours:
            assert len(launches) == 4 * step
            opt.grad_sync(model.parameters())
            assert len(launches) == 4 * step + 4, "a bucket for each parameter"
        else:  # DDP's reducer fails in GPipe, by an assertion of its own (torch 2.13)
            for p in model.parameters():
                assert p.grad is not None
                dist.all_reduce(p.grad.div_(DATA_RANKS), group=data)
        opt.step()
        opt.zero_grad()
    return [p.detach() for p in model.parameters()]


def train_by_torchs_schedules(rank: int, world: int, schedule: str) -> None:
    ours, stock = run_schedule(rank, schedule, True), run_schedule(rank, schedule, False)
    torch.testing.assert_close(ours, stock, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("schedule", ["GPipe", "1F1B"])
def test_torchs_own_schedules(rank_pool: Callable[[int], RankPool], schedule: str) -> None:
    """They train as with torch's optimizer (issue 44)."""
    rank_pool(4).run(train_by_torchs_schedules, schedule, timeout_s=120)


# --- grad_sync(parameters) --------------------------------------------------------------------------------------------


def launched_by(run: Run) -> Callable[[Callable[[], Any]], int]:
    """How many buckets a call launches."""
    buckets: list[int] = []
    run.opt._engine.grads._native.observe(lambda bucket, *_: buckets.append(bucket))

    def launched(call: Callable[[], Any]) -> int:
        before = len(buckets)
        call()
        return len(buckets) - before

    return launched


def test_starting_is_local_and_in_order() -> None:
    """Ranks may start different parameters, or nothing, and gradients that come after all are late ones."""

    def play(opt: Any, run: Run) -> None:
        for step in range(3):
            with opt.no_sync():
                run.backward(10 * step)
                run.backward(10 * step + 1)
            if run.world > 1 and run.rank != 1:
                opt.grad_sync(run.params[4:] if run.rank else run.params)
                with pytest.raises(RuntimeError, match="leave no_sync"), opt.no_sync():
                    opt.grad_sync(run.params)
            if step == 1:
                run.backward(10 * step + 2, used=[0, 3])  # late where it was started
            run.clip(0.5)
            run.step()

    params = make_params()
    expected = Run(ShardedAdamW(params, lr=0.1), params)
    play(expected.opt, expected)

    def body(comm: Communicator) -> tuple[list[Tensor], list[Tensor]]:
        mine = make_params()
        run = Run(ShardedAdamW(mine, lr=0.1, process_group=comm, **TINY), mine, comm.rank, comm.size)
        play(run.opt, run)
        return [p.detach() for p in mine], run.seen

    for got, seen in run_local(4, body):
        assert_bitwise_equal(got, [p.detach() for p in params])
        assert_bitwise_equal(seen, expected.seen)


def test_it_starts_what_is_complete_and_nothing_where_there_is_no_gradient() -> None:
    def body(comm: Communicator) -> None:
        params = make_params()
        opt = ShardedAdamW(params, process_group=comm, **TINY)
        run = Run(opt, params, comm.rank, comm.size)
        launched = launched_by(run)
        assert launched(lambda: opt.grad_sync(params)) == 0, "no gradient: perhaps on no rank"
        with opt.no_sync():
            assert launched(lambda: run.backward(0)) == 0
        assert launched(lambda: opt.grad_sync(params[:-1])) == 0, "the first bucket holds the last parameter"
        some = launched(lambda: opt.grad_sync(params[-1:]))
        assert some > 10
        assert launched(lambda: opt.grad_sync(params)) == 0
        assert launched(opt.grad_sync) == 0, "all of them have gone"
        assert launched(lambda: run.backward(1)) == some
        run.step()
        with opt.no_sync():
            run.backward(2, used=[0])
        assert launched(lambda: opt.grad_sync(params)) == some, "the others have none in this window"
        with pytest.raises(ValueError, match="not trained by this optimizer"):
            opt.grad_sync([nn.Parameter(torch.ones(1))])
        run.step()
        opt.close()

    run_local(2, body)
