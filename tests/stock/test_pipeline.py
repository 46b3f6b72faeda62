"""Pipeline schedules: two stages on two data-parallel ranks each (four threads), by GPipe and by 1F1B.

The first stage reduces while its last backward runs; the second one, which others wait for, after it.
"""

from __future__ import annotations

import contextlib
import queue
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import pipelining

from bucketwheel.comm.communicator import Communicator
from bucketwheel.optim.sharded_adamw import ShardedAdamW
from bucketwheel.testing import RankPool, assert_bitwise_equal
from tests.support.optim_twins import TINY, Run, make_params, run_local
from tests.support.replica_ranks import with_replicas

MICRO, ROWS, WIDTH, DATA_RANKS = 4, 2, 6, 2
Event = tuple[str, int]  # "B begins" or "B ends" and the micro-batch, or "launch" and the bucket


def order_of(schedule: str, stage: int) -> list[tuple[str, int]]:
    """Forwards and backwards of a stage."""
    ahead = MICRO if schedule == "GPipe" else 2 - stage
    rest = [(kind, m) for back in range(MICRO) for kind, m in (("B", back), ("F", back + ahead)) if m < MICRO]
    return [("F", m) for m in range(ahead)] + rest


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


class Stage:
    """One rank: its model, its optimizer, and queues to the rank of the same data in the other stage."""

    def __init__(
        self, stage: int, model: nn.Module, opt: Any, mail: list[queue.Queue[Tensor]], events: list[Any]
    ) -> None:
        self.stage, self.model, self.opt = stage, model, opt
        self.inbox, self.outbox = mail[stage], mail[1 - stage]
        self.events = events
        self.held: dict[int, tuple[Tensor, Tensor]] = {}

    def forward(self, m: int, x: Tensor) -> None:
        if self.stage == 1:
            x = self.inbox.get(timeout=20).requires_grad_()
        out = self.model(x)
        self.held[m] = x, out
        if self.stage == 0:
            self.outbox.put(out.detach())

    def backward(self, m: int) -> None:
        x, out = self.held.pop(m)
        grad = self.inbox.get(timeout=20) if self.stage == 0 else None
        self.events.append(("B begins", m))
        (loss_of(out) if self.stage == 1 else out).backward(grad)
        self.events.append(("B ends", m))
        if self.stage == 1:
            assert x.grad is not None
            self.outbox.put(x.grad)

    def train(self, schedule: str, data: Tensor) -> None:
        for kind, m in order_of(schedule, self.stage):
            reduces = self.stage == 0 and kind == "B" and m == MICRO - 1
            with contextlib.nullcontext() if reduces else self.opt.no_sync():
                self.forward(m, data[m]) if kind == "F" else self.backward(m)


def pipeline(schedule: str, steps: int, starts: str, **options: Any) -> list[Any]:
    """(parameters, events of every step) of ranks 2 * stage + data rank."""
    mail = [[queue.Queue[Tensor]() for _ in range(2)] for _ in range(DATA_RANKS)]

    def body(rank: int, data: Communicator, across: Communicator) -> tuple[list[Tensor], list[list[Event]]]:
        stage = across.rank
        model = make_stages()[stage]
        opt = ShardedAdamW(model.parameters(), lr=0.05, process_group=data, **TINY, **options)
        events: list[Event] = []
        issue = data._reduce_scatter_into
        data._reduce_scatter_into = lambda *a, **k: events.append(("launch", 0)) or issue(*a, **k)  # type: ignore[method-assign]
        one = Stage(stage, model, opt, mail[data.rank], events)
        every = []
        for step in range(steps):
            opt.param_sync(model.parameters())  # a schedule's param_sync_func
            one.train(schedule, batch(step, data.rank))
            if starts == "own":
                opt.grad_sync(model.parameters())  # a schedule's grad_sync_func
                events.append(("started", 0))
            else:
                opt.grad_sync()
            opt.step()
            opt.zero_grad()
            every.append(list(events))
            events.clear()
        opt.param_sync()
        out = [p.detach().clone() for p in model.parameters()]
        opt.close()
        return out, every

    return with_replicas(DATA_RANKS, 2, body)


def in_one_process(steps: int) -> list[list[Tensor]]:
    """Parameters by stage. Gradients are added up as the pipelines do."""
    stages = make_stages()
    whole = nn.Sequential(*stages)
    opt = ShardedAdamW(whole.parameters(), lr=0.05)
    for step in range(steps):
        sums = [torch.zeros_like(p) for p in whole.parameters()]
        for rank in range(DATA_RANKS):
            for micro in batch(step, rank):
                loss_of(whole(micro)).backward()
            sums = [total + p.grad for total, p in zip(sums, whole.parameters(), strict=True)]  # type: ignore[operator]
            opt.zero_grad()
        for p, total in zip(whole.parameters(), sums, strict=True):
            p.grad = total / DATA_RANKS
        opt.step()
        opt.zero_grad()
    return [[p.detach() for p in stage.parameters()] for stage in stages]


@pytest.mark.parametrize(
    "starts, options",
    [("own", {}), ("waits", {}), ("own", {"overlap_param_sync": True}), ("own", {"overlap_grad_sync": False})],
    ids=str,
)
def test_the_bits_of_one_process(starts: str, options: dict[str, Any]) -> None:
    expected = in_one_process(4)
    for schedule in ("GPipe", "1F1B"):
        for rank, (params, _) in enumerate(pipeline(schedule, 4, starts, **options)):
            assert_bitwise_equal(params, expected[rank // 2], f"rank {rank}")


@pytest.mark.parametrize("schedule", ["GPipe", "1F1B"])
def test_the_first_stage_reduces_during_its_last_backward_and_the_other_after_it(schedule: str) -> None:
    for rank, (_, every) in enumerate(pipeline(schedule, 3, "own")):
        for events in every[1:]:
            launches = [i for i, (what, _) in enumerate(events) if what == "launch"]
            begins, ends = events.index(("B begins", MICRO - 1)), events.index(("B ends", MICRO - 1))
            started = events.index(("started", 0))
            assert len(launches) >= 4, "a bucket for each parameter"
            if rank < DATA_RANKS:
                assert all(begins < i < ends for i in launches), events
            else:
                assert all(ends < i < started for i in launches), events


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
        issue = opt._engine.comm._reduce_scatter_into
        opt._engine.comm._reduce_scatter_into = lambda *a, **k: launches.append(1) or issue(*a, **k)
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


def launched_by(run: Run, comm: Communicator) -> Callable[[Callable[[], Any]], int]:
    """How many buckets a call launches."""
    count = [0]
    issue = comm._reduce_scatter_into

    def counting(*args: Any, **kwargs: Any) -> Any:
        count[0] += 1
        return issue(*args, **kwargs)

    comm._reduce_scatter_into = counting  # type: ignore[method-assign]

    def launched(call: Callable[[], Any]) -> int:
        before = count[0]
        call()
        return count[0] - before

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
                with pytest.raises(RuntimeError, match="leave that first"), opt.no_sync():
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
        launched = launched_by(run, comm)
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
