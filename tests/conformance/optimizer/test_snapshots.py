"""Snapshots: the copies of a shard have its bits, whatever a training loop does. Ranks are threads, each keeps its own."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import Parameter

from bucketwheel.checkpoint.replay import Record
from bucketwheel.checkpoint.snapshots import Snapshots
from bucketwheel.comm.backends import LocalWorld
from bucketwheel.comm.communicator import Communicator
from bucketwheel.optim.sharded_adamw import ShardedAdamW
from tests.support.bits import assert_bitwise_equal
from tests.support.optim_twins import TINY, dyadic, loss_of, make_params, on_ranks, share
from tests.support.replica_ranks import with_replicas
from tests.support.requirements import slow_case
from tests.support.simulated_cuda import posing

BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
PRECISIONS: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
    "fp32": (F32, {}),
    "fp64": (F64, {}),
    "amsgrad, maximize": (F32, {"amsgrad": True, "maximize": True}),
    "bf16": (BF16, {}),
    "bf16, remainder": (BF16, {"master_weights": "bf16_remainder", "amsgrad": True}),
    "bf16, no master": (BF16, {"master_weights": "none", "decoupled_weight_decay": False}),
    "bf16 states": (BF16, {"state_dtype": BF16, "amsgrad": True}),
    "fp32, bf16 states and shard": (F32, {"state_dtype": BF16, "accum_dtype": BF16}),
    "fp16": (F16, {"reduce_dtype": F32}),
}


class Loop:
    """One rank of a training loop."""

    def __init__(self, comm: Communicator | None, dtype: torch.dtype = F32, **options: Any) -> None:
        self.rank, self.world = (comm.rank, comm.size) if comm else (0, 1)
        self.params = make_params(dtype)
        groups = [{"params": self.params[:4], "weight_decay": 0.1}, {"params": self.params[4:], "lr": 0.03}]
        self.opt = ShardedAdamW(groups, lr=0.01, **{"process_group": comm, **TINY, **options})

    def backward(self, seed: int, used: Callable[[int], bool] = lambda i: True) -> None:
        loss_of(self.params, share(dyadic(self.params, seed), self.rank, self.world), used).backward()

    def steps(self, *seeds: int) -> None:
        for seed in seeds:
            self.backward(seed, lambda i, s=seed: (i + s) % 4 > 0)
            self.opt.step()
            self.opt.zero_grad()


def eventful_step(loop: Loop, seed: int) -> None:
    """Unused parameters, accumulation, clipping of all or some, loss scales, a step that is skipped, one without gradients,
    changed hyperparameters, a frozen parameter."""
    opt, params = loop.opt, loop.params
    params[5].requires_grad_(seed % 20 < 10)
    if seed % 7 == 3:
        with opt.no_sync():
            loop.backward(seed + 500)
    loop.backward(seed, lambda i: (i + seed) % 5 > 0)
    if seed % 7 == 5:
        opt.grad_sync()
        loop.backward(seed + 700)
    if seed % 3 == 0:
        opt.clip_grad_norm_(0.25)
    elif seed % 3 == 1:
        torch.nn.utils.clip_grad_norm_(params[:3], 0.125)
    if seed % 11 == 4:  # as GradScaler does where it found an inf
        opt.zero_grad()
        return
    if seed % 13 == 6:
        opt.zero_grad()
    for group in opt.param_groups:
        group["lr"] *= 0.99
    opt.param_groups[1]["betas"] = (0.9 - seed / 1000, 0.99)
    opt.param_groups[0]["weight_decay"] = seed / 500
    opt.step()
    opt.zero_grad()


WORLDS = (None, 1, 2, 3)
# Each precision at two of the worlds, at one of them by default, and each world with nearly half of the precisions.
PAIRS = [
    case(name, WORLDS[(i + k) % 4])
    for i, name in enumerate(PRECISIONS)
    for case, k in ((pytest.param, 0), (slow_case, 2))
]


@pytest.mark.parametrize("name, world", PAIRS)
def test_a_hundred_steps_replayed_have_the_bits_of_the_shard(name: str, world: int | None) -> None:
    dtype, options = PRECISIONS[name]

    def body(comm: Communicator | None) -> None:
        loop = Loop(comm, dtype, **options)
        with Snapshots(loop.opt, every=1 + loop.world // 2) as snapshots:
            for seed in range(100):
                eventful_step(loop, seed)
                if seed == 50:
                    snapshots.verify()
            assert snapshots.verify() == 91, "of 100, 9 were skipped"
            assert snapshots.stats["rebases"] == 0

    on_ranks(world, body)


# ---- changes from outside


def load_model(loop: Loop) -> None:
    for p, other in zip(loop.params, make_params(loop.params[0].dtype, seed=5), strict=True):
        p.detach().copy_(other.detach())


def move(loop: Loop) -> None:
    loop.params[3].data = loop.params[3].data * 2


def exchange(loop: Loop) -> None:
    loop.kept = loop.params[3].data  # the shard moves, away from what somebody holds (issue 44)
    move(loop)


def load_optimizer(loop: Loop) -> None:
    saved = loop.opt.state_dict()
    loop.steps(30)
    loop.opt.load_state_dict(saved)


def exchange_entry(loop: Loop) -> None:
    loop.opt.state[loop.params[3]]["exp_avg"] = torch.ones(loop.params[3].shape)


def write_state(loop: Loop) -> None:
    for state in loop.opt.state.values():
        state["exp_avg"].mul_(0.5)


def add_group(loop: Loop) -> None:
    loop.params += [Parameter(torch.ones(70, 3, dtype=loop.params[0].dtype))]
    loop.opt.add_param_group({"params": loop.params[-1:], "lr": 0.5})


def leave_group(loop: Loop) -> None:
    del loop.opt.param_groups[0]["params"][1]


EDITS: list[Callable[[Loop], Any]] = [
    load_model,
    move,
    exchange,
    load_optimizer,
    exchange_entry,
    write_state,
    add_group,
]
EDITS += [leave_group, lambda loop: loop.opt.reset_state(), lambda loop: loop.opt.reset_state(loop.params[:2])]


@pytest.mark.parametrize("world, dtype", [(None, BF16), (2, F32), (2, BF16)], ids=str)
@pytest.mark.parametrize("edit", EDITS)
def test_a_change_from_outside_is_sent(edit: Callable[[Loop], Any], dtype: torch.dtype, world: int | None) -> None:
    def body(comm: Communicator | None) -> None:
        loop = Loop(comm, dtype, overlap_param_sync=world is not None)
        with Snapshots(loop.opt, every=2) as snapshots:
            loop.steps(0, 1, 2)
            loop.opt.param_sync()
            edit(loop)
            loop.steps(3, 4, 5, 6)
            snapshots.verify()
            assert snapshots.stats["rebases"] == 1
            loop.steps(7)
            loop.opt.param_sync()
            edit(loop) if edit not in (add_group, leave_group) else None
            snapshots.verify()
            loop.steps(8, 9)
            snapshots.verify()

    on_ranks(world, body)


@pytest.mark.parametrize("world", [None, 2])
def test_a_write_without_a_version_is_found_by_verify_and_sent_on_demand(world: int | None) -> None:
    def body(comm: Communicator | None) -> None:
        loop = Loop(comm)
        with Snapshots(loop.opt) as snapshots:
            loop.steps(0)
            for p in loop.params:
                p.data.mul_(2)
            loop.steps(1)
            with pytest.raises(
                RuntimeError, match="from the shard: 0.param of rank 0's shard at step 2, in the copy on rank 0"
            ):
                snapshots.verify()
            snapshots.rebase()
            assert snapshots.verify() == 2
            loop.params[0].data.mul_(2)
            snapshots.rebase()
            loop.steps(2)
            assert snapshots.verify() == 3

    on_ranks(world, body)


@pytest.mark.parametrize("world, overlaps", [(None, False), (2, False), (2, True)])
def test_a_hook_behind_the_step_that_writes_is_followed(world: int | None, overlaps: bool) -> None:
    """Hooks that were there before the snapshots run before any of theirs would."""

    def body(comm: Communicator | None) -> None:
        loop = Loop(comm, overlap_param_sync=overlaps)

        @torch.no_grad()
        def clamp(*_: object) -> None:
            for p in loop.params:
                p.clamp_(-0.25, 0.25)

        loop.opt.register_step_post_hook(clamp)
        with Snapshots(loop.opt) as snapshots:
            loop.steps(0, 1, 2)
            snapshots.verify()
            assert snapshots.stats["rebases"] == 3

    on_ranks(world, body)


@pytest.mark.parametrize("world", [None, 2])
def test_a_move_behind_another_one_is_sent(world: int | None) -> None:
    """After the first the parameter's place in flat memory is described by another tensor."""

    def body(comm: Communicator | None) -> None:
        loop = Loop(comm)
        with Snapshots(loop.opt) as snapshots:
            loop.params[3].share_memory_()
            loop.steps(0, 1)
            move(loop)
            loop.steps(2)
            assert snapshots.verify() == 3

    on_ranks(world, body)


def test_a_step_that_fails_is_followed_by_a_whole_shard(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = Loop(None)
    with Snapshots(loop.opt) as snapshots:
        loop.steps(0)
        loop.opt.param_groups[0]["betas"] = (0.9, "?")
        with pytest.raises((TypeError, ValueError)):
            loop.steps(1)
        loop.opt.param_groups[0]["betas"] = (0.9, 0.99)
        loop.steps(2)
        snapshots.verify()
        assert snapshots.stats["rebases"] == 1


# ---- what else may happen


def gate_rounds(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Steps are taken over once it is set."""
    do, gate = Snapshots._do, threading.Event()
    monkeypatch.setattr(
        Snapshots, "_do", lambda self, a_round: (not a_round.has_record or gate.wait(60)) and do(self, a_round)
    )
    return gate


@pytest.mark.parametrize("world", [None, 1])
def test_steps_of_the_device_are_replayed_on_the_cpu(world: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulated; what poses as a device does so in all threads, so the rounds wait until nothing does."""
    gate = gate_rounds(monkeypatch)
    with posing():
        comm = None if world is None else Communicator(LocalWorld(1).rank(0), backend="local", device="cuda")
        loop = Loop(comm, BF16, state_dtype=BF16)
        snapshots = Snapshots(loop.opt, every=20)
        for seed in range(20):
            eventful_step(loop, seed)
    gate.set()
    with snapshots:
        assert snapshots.verify() == 18
        assert snapshots.stats["rebases"] == 0
    if comm is not None:
        with posing():
            loop.opt.close()
            comm.close()


def test_a_step_waits_where_as_many_as_may_be_are_on_their_way(monkeypatch: pytest.MonkeyPatch) -> None:
    gate, loop = gate_rounds(monkeypatch), Loop(None)
    with Snapshots(loop.opt, every=3) as snapshots:
        loop.steps(0, 1, 2)
        assert snapshots.stats["waited_s"] < 0.05
        threading.Timer(0.2, gate.set).start()
        loop.steps(3)
        assert snapshots.stats["waited_s"] > 0.05
        assert snapshots.verify() == 4


def test_closed_or_stopped_they_cost_nothing_and_leave_no_thread() -> None:
    loop = Loop(None)
    for end in (Snapshots.close, Snapshots.stop):
        snapshots = Snapshots(loop.opt)
        loop.steps(0)
        end(snapshots)
        assert snapshots._thread_ended.is_set()
        assert not loop.opt._engine.step_observers
        assert not loop.opt._optimizer_step_post_hooks
        loop.steps(1)
        assert snapshots._step == 1
        snapshots.close()
        with pytest.raises(RuntimeError, match=r"the snapshots have ended: close\(\) or stop\(\) was called"):
            snapshots.verify()


def test_bad_arguments() -> None:
    loop = Loop(None)
    for bad in ({"every": 0}, {"every": 1.5}, {"first_step": -1}):
        with pytest.raises((ValueError, TypeError), match="every|first_step"):
            Snapshots(loop.opt, **bad)
    for call in (Snapshots, lambda optimizer: Snapshots.restore(optimizer, None)):
        with pytest.raises(TypeError, match="optimizer is AdamW, expected a ShardedAdamW"):
            call(torch.optim.AdamW(loop.params))
    loop.opt.param_groups[0]["capturable"] = True
    with pytest.raises(ValueError, match="capturable"):
        Snapshots(loop.opt)


def test_what_fails_on_one_rank_fails_on_all(tmp_path: Path) -> None:
    def body(comm: Communicator) -> None:
        loop, folder = Loop(comm), tmp_path / str(comm.rank)
        folder.mkdir(0o755 if comm.rank else 0o700)
        kind = PermissionError if comm.rank else ValueError
        with pytest.raises(kind, match="must belong to this user"):
            Snapshots(loop.opt, directory=folder)
        with pytest.raises(kind, match="must belong to this user"):
            Snapshots.restore(loop.opt, folder)
        for nothing in (folder / "none", None):
            with pytest.raises(ValueError, match="no rank has a snapshot. Load a checkpoint instead"):
                Snapshots.restore(loop.opt, nothing)
        for name in ("every", "first_step"):
            with pytest.raises(ValueError, match=r"first_step must be the same on all ranks, got \[\[1, [01]\], "):
                Snapshots(loop.opt, **{name: 1 + comm.rank})
        assert not loop.opt._engine.step_observers
        with Snapshots(loop.opt) as snapshots:
            loop.steps(0, 1)
            assert snapshots.verify() == 2

    on_ranks(2, body)


def test_a_first_copy_that_is_not_taken_fails_on_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing older is removed then."""
    (tmp_path / "f").mkdir(0o700)
    older = tmp_path / "f" / f"bucketwheel-2-{'0' * 16}-0.snapshot"
    older.touch()
    do = Snapshots._do

    def fail(self: Snapshots, a_round: Any) -> bool:
        if self.rank == 1:
            raise OSError("no more memory")
        return do(self, a_round)

    monkeypatch.setattr(Snapshots, "_do", fail)

    def body(comm: Communicator) -> None:
        loop = Loop(comm)
        with pytest.raises(RuntimeError if comm.rank else ValueError, match="no more memory"):
            Snapshots(loop.opt, directory=tmp_path / "f")
        assert not loop.opt._engine.step_observers
        assert older.exists()

    on_ranks(2, body)


def test_a_step_that_has_waited_too_long_ends_them(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = Loop(None)
    with Snapshots(loop.opt, timeout_s=0.2) as snapshots:
        gate = gate_rounds(monkeypatch)
        loop.steps(0)
        add_group(loop)
        with pytest.warns(
            UserWarning, match="snapshots stopped at step 1: the other ranks have not received the snapshot within"
        ):
            loop.steps(1)
        gate.set()
        loop.steps(2)
        assert snapshots._step == 1


# ---- going back


@pytest.mark.parametrize("name, world", PAIRS)
def test_a_new_optimizer_goes_on_from_them(name: str, world: int | None, tmp_path: Path) -> None:
    """As if nothing had happened."""
    dtype, options = PRECISIONS[name]
    folder = tmp_path / "snapshots"

    def body(comm: Communicator | None) -> None:
        loop = Loop(comm, dtype, **options)
        snapshots = Snapshots(loop.opt, every=2, directory=folder)
        loop.steps(*range(7))
        assert snapshots.verify() == 7
        loop.steps(7)
        snapshots._wait(lambda: not snapshots._rounds)
        if comm is not None:
            comm.exchange(b"all have")
        snapshots.stop()
        loop.steps(8, 9)
        expected = [p.detach().clone() for p in loop.params], loop.opt.state_dict()["state"]
        loop.opt.close()
        for source in (snapshots, folder):
            fresh = Loop(comm, dtype, **options)
            for p in fresh.params:
                p.data.zero_()
            assert Snapshots.restore(fresh.opt, source) == 8
            with Snapshots(fresh.opt, first_step=8) as again:
                fresh.steps(8, 9)
                assert again.verify() == 10
            assert_bitwise_equal([p.detach() for p in fresh.params], expected[0])
            mine = fresh.opt.state_dict()["state"]
            assert_bitwise_equal({i: plain(s) for i, s in mine.items()}, {i: plain(s) for i, s in expected[1].items()})
            fresh.opt.close()
        snapshots.close()
        if comm is not None:
            comm.exchange(b"all are done")
        assert not list(folder.iterdir())

    on_ranks(world, body)


def plain(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {name: getattr(value, "piece", value) for name, value in state.items()}


# ---- a replay that is cut short


@pytest.mark.parametrize("torn", ["own", "first mirror", "second mirror"])
def test_a_torn_copy_is_known_as_such(torn: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a process that is killed in a replay leaves it: there is another one."""
    loop, replay = Loop(None), Record.replay
    snapshots = Snapshots(loop.opt, directory=tmp_path / "f")
    loop.steps(0, 1)
    snapshots._wait(lambda: not snapshots._rounds)
    replays = iter(["own", "first mirror", "second mirror"])

    def tear(self: Record, rows: Any) -> None:
        replay(self, rows)
        if next(replays) == torn:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Record, "replay", tear)
        loop.steps(2)
        snapshots._thread_ended.wait(20)
    for source in (snapshots, tmp_path / "f"):
        fresh, again = Loop(None), Loop(None)
        step = Snapshots.restore(fresh.opt, source)
        assert step == 3
        again.steps(*range(step))
        assert_bitwise_equal([p.detach() for p in fresh.params], [p.detach() for p in again.params])


@pytest.mark.parametrize("shard, replicate", [(2, 2), (1, 2)])
def test_replicas_keep_a_copy_each(shard: int, replicate: int) -> None:
    def body(rank: int, shards: Communicator, replicas: Communicator) -> None:
        loop = Loop(shards, BF16, replicate_group=replicas)
        with Snapshots(loop.opt, every=2) as snapshots:
            loop.rank, loop.world = snapshots.rank, snapshots.world
            assert (loop.rank, loop.world) == (rank, shard * replicate)
            for seed in range(12):
                eventful_step(loop, seed)
            assert snapshots.verify() == 11, "of 12, 1 was skipped"
        loop.opt.close()

    with_replicas(shard, replicate, body)
