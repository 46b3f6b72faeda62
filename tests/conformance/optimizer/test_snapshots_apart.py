"""Snapshots of ranks that are processes: the neighbour's copies, and what they are for: ranks and jobs that are lost."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import time
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import bucketwheel as bw
from bucketwheel.checkpoint.snapshots import Snapshots
from tests.conformance.optimizer.test_snapshots import BF16, F32, Loop, add_group, eventful_step, write_state
from tests.support.bits import assert_bitwise_equal
from tests.support.ranks import run_ranks
from tests.support.requirements import slow_case


class Apart(Loop):
    """One rank of the default process group."""

    def __init__(self, dtype: torch.dtype = F32, **options: Any) -> None:
        super().__init__(None, dtype, **options)
        self.rank, self.world = dist.get_rank(), dist.get_world_size()


def followed(rank: int, world: int) -> None:
    """Rank 0 alone writes to its shard from outside."""
    loop = Apart(BF16, state_dtype=BF16, amsgrad=True)
    with Snapshots(loop.opt, every=2) as snapshots:
        assert snapshots.world == world
        for seed in range(100):
            eventful_step(loop, seed)
            if seed in (37, 50) and rank == 0:  # at 37 `verify` follows
                write_state(loop)
            if seed % 30 == 7:
                snapshots.verify()
            if seed == 90:
                add_group(loop)
        assert snapshots.verify() == 91
        assert snapshots.stats["rebases"] == (3 if rank == 0 else 2), "verify has all ranks send theirs"
        kept = snapshots._kept
        assert kept.layout.rank == (rank - 1) % world
        if rank == 0:  # the neighbour keeps another one's values
            kept.layout.mirror.tensors(kept.shard)["0.exp_avg"][0] += 1
        with pytest.raises(
            RuntimeError, match=rf"0.exp_avg of rank {world - 1}'s shard at step 91, in the copy on rank 0"
        ):
            snapshots.verify()
    loop.opt.close()


@pytest.mark.parametrize("world", [slow_case(2), 3])
def test_a_neighbour_has_the_bits_of_the_shard(world: int) -> None:
    run_ranks(followed, world, timeout_s=90)


def failing(rank: int, world: int) -> None:
    loop = Apart()
    snapshots = Snapshots(loop.opt)
    fail_from(3, snapshots, OSError("no more memory")) if rank == 1 else None
    with pytest.warns(UserWarning, match=rf"snapshots stopped at step \d: {'no more memory' if rank == 1 else ''}"):
        loop.steps(*range(9))
    with warnings.catch_warnings(action="error"):
        loop.steps(9)
    with pytest.raises(RuntimeError, match="the snapshots have ended: "):
        snapshots.verify()
    snapshots.close()
    loop.opt.close()


def fail_from(step: int, snapshots: Snapshots, error: BaseException | None) -> None:
    """The thread fails, or does nothing more."""
    do: Any = snapshots._do

    def fail(a_round: Any) -> None:
        if a_round.step < step:
            do(a_round)
        elif error is not None:
            raise error
        else:
            time.sleep(60)

    snapshots._do = fail  # type: ignore[method-assign]


def test_what_the_thread_of_a_rank_fails_with_is_told_and_all_train_on() -> None:
    run_ranks(failing, 2, timeout_s=60)


def without_room(rank: int, world: int, folder: str) -> None:
    """Here the training would wait for who waits for the neighbour."""
    loop = Apart(timeout_s=10)
    with pytest.MonkeyPatch.context() as monkeypatch:
        full = mock.Mock(side_effect=OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
        monkeypatch.setattr(os, "posix_fallocate", full) if rank == 1 else None
        with pytest.raises((RuntimeError, ValueError), match=f"No space left.*{folder}" if rank == 1 else "have ended"):
            Snapshots(loop.opt, directory=folder)
    assert not list(Path(folder).glob(f"*-{(rank - 1) % world}.snapshot*")), "what there was room for is given back"
    loop.steps(0, 1)
    with Snapshots(loop.opt, directory=folder, first_step=2) as snapshots:
        loop.steps(2)
        assert snapshots.verify() == 3
    loop.opt.close()


@pytest.mark.parametrize("world", [2, slow_case(3)])
def test_a_first_copy_without_room_fails_at_once_on_all(world: int, tmp_path: Path) -> None:
    run_ranks(without_room, world, str(tmp_path / "f"), timeout_s=60)
    assert not os.listdir(tmp_path / "f")


# ---- a rank is lost, the others go on


def train(loop: Loop, steps: range) -> None:
    for seed in steps:
        loop.backward(seed, lambda i, s=seed: (i + s) % 5 > 0)
        loop.opt.clip_grad_norm_(0.25)
        loop.opt.step()
        loop.opt.zero_grad()


def values(loop: Loop) -> list[torch.Tensor]:
    return [p.detach().clone() for p in loop.params]


def reference(rank: int, world: int, steps: int) -> list[torch.Tensor]:
    loop = Apart(BF16)
    train(loop, range(steps))
    loop.opt.close()
    return values(loop)


def join(store: str, rank: int, world: int) -> None:
    dist.init_process_group("gloo", f"file://{store}", timedelta(seconds=60), world, rank)


def survives(rank: int, world: int, folder: str, lost: int, dies_at: int, moment: str) -> Any:
    """Rank ``lost`` is killed; the last process, which waits meanwhile, takes its place."""
    steps = 12
    kept = None
    if rank < world - 1:
        join(f"{folder}/first", rank, world - 1)
        loop = Apart(BF16, timeout_s=20)
        snapshots = Snapshots(loop.opt, every=2)
        with contextlib.suppress(bw.Error):
            if moment == "behind" and rank == lost:  # no other rank may go on to what its neighbour will never have
                fail_from(dies_at - 1, snapshots, None)
            train(loop, range(dies_at))
            if rank == lost:
                time.sleep(0.3 if moment == "behind" else 0.0)
                if moment == "step":
                    loop.opt._engine.step_observers.append(lambda _: os.kill(os.getpid(), signal.SIGKILL))
                    train(loop, range(dies_at, steps))
                os.kill(os.getpid(), signal.SIGKILL)
            train(loop, range(dies_at, steps))
            raise AssertionError("nobody has told that a rank was lost")
        snapshots.stop()
        with contextlib.suppress(bw.Error):
            loop.opt.close()
        dist.destroy_process_group()
        kept = snapshots
        Path(folder, f"lost-{rank}").touch()
    else:
        until = time.monotonic() + 40
        while len(list(Path(folder).glob("lost-*"))) < world - 2 and time.monotonic() < until:
            time.sleep(0.02)
    place = lost if rank == world - 1 else rank
    if moment == "renumbered":  # each rank takes the shard of another one
        place = (place + 1) % (world - 1)
    join(f"{folder}/second", place, world - 1)
    fresh = Apart(BF16)
    for p in fresh.params:
        p.data.fill_(float(place))
    step = Snapshots.restore(fresh.opt, kept)
    with Snapshots(fresh.opt, every=1, first_step=step) as again:
        train(fresh, range(step, steps))
        assert again.verify() == steps
    if kept is not None:
        kept.close()
    fresh.opt.close()
    return step, values(fresh)


@pytest.mark.parametrize(
    "world, lost, moment",
    [
        (2, 0, "backward"),
        (3, 1, "step"),
        (3, 2, "renumbered"),
        slow_case(2, 1, "step"),
        slow_case(5, 1, "behind"),
    ],
)
def test_survivors_go_on_with_a_replacement(world: int, lost: int, moment: str, tmp_path: Path) -> None:
    results = run_ranks(
        survives, world + 1, str(tmp_path), lost, 7, moment, timeout_s=90, backend=None, expect_dead=[lost]
    )
    expected = run_ranks(reference, world, 12, timeout_s=60)
    found = [result for result in results if result is not None]
    assert len(found) == world
    assert len({step for step, _ in found}) == 1
    assert 7 - 1 - 2 <= found[0][0] <= 8, "steps done, less those on their way"
    for _, mine in found:
        assert_bitwise_equal(mine, expected[0])


# ---- all ranks are lost


def killed(rank: int, world: int, folder: str) -> None:
    loop = Apart(BF16)
    Snapshots(loop.opt, every=2, directory=folder)
    until = 7 if rank == world - 1 else 30
    with contextlib.suppress(bw.Error):  # of the last one's death
        train(loop, range(until))
    os.kill(os.getpid(), signal.SIGKILL)


def resumed(rank: int, world: int, folder: str, steps: int) -> Any:
    loop = Apart(BF16)
    step = Snapshots.restore(loop.opt, folder)
    snapshots = Snapshots(loop.opt, directory=folder, first_step=step)
    train(loop, range(step, steps))
    assert snapshots.verify() == max(step, steps)
    assert len({name.split("-")[2] for name in os.listdir(folder)}) == 1, "those of the run before are gone"
    snapshots.close()
    loop.opt.close()
    return step, values(loop)


@pytest.mark.parametrize("world", [slow_case(1), slow_case(2), 3])
def test_a_job_that_was_killed_goes_on_from_files(world: int, tmp_path: Path) -> None:
    folder = tmp_path / "a" / "b"
    run_ranks(killed, world, str(folder), timeout_s=60, expect_dead=range(world))
    results = run_ranks(resumed, world, str(folder), 12, timeout_s=60)
    expected = run_ranks(reference, world, 12, timeout_s=60)
    assert len({step for step, _ in results}) == 1
    assert 7 - 1 - 2 <= results[0][0] <= 8
    for _, mine in results:
        assert_bitwise_equal(mine, expected[0])
    assert not list(folder.iterdir()), "close() has removed them"


def of_a_group(rank: int, world: int) -> None:
    """The optimizer is of some of the ranks alone."""
    groups = [dist.new_group([0]), dist.new_group([1, 2])]
    loop = Apart(process_group=groups[min(rank, 1)])
    with Snapshots(loop.opt) as snapshots:
        assert (snapshots.rank, snapshots.world) == ((0, 1) if rank == 0 else (rank - 1, 2))
        train(loop, range(5))
        assert snapshots.verify() == 5
    loop.opt.close()


def test_the_ranks_of_a_group_are_each_others_neighbours() -> None:
    run_ranks(of_a_group, 3, timeout_s=60)


def left_open(rank: int, world: int) -> None:
    loop = Apart()
    snapshots = Snapshots(loop.opt)
    train(loop, range(3))
    assert snapshots.verify() == 3
    train(loop, range(3, 5))


def test_a_process_ends_with_its_snapshots_open() -> None:
    """The runner fails for a rank that does not exit, or not with code 0."""
    run_ranks(left_open, 2, timeout_s=60, forked=False)
