"""Nothing grows over many steps, and nothing depends on fresh memory or on when streams run."""

from __future__ import annotations

import gc
import os
import random
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from optim_twins import dyadic, loss_of, make_params, run_local, share

from bucketwheel.comm import Communicator
from bucketwheel.optim import ShardedAdamW


@pytest.fixture(autouse=True)
def cheap_collections() -> Iterator[None]:
    """What the run has made before is not looked at."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


STEPS = 500
WARM_UP = 120


def rss_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize("world", [1, 2])
def test_500_steps_without_growth(world: int) -> None:
    """G20 of the optimizer's test rows. Every kind of step there is, in random order; ranks use different parameters."""

    def body(comm: Communicator) -> dict[str, list[int]]:
        params = make_params(torch.bfloat16)[:4] + make_params(seed=1)[4:]
        opt = ShardedAdamW(params, process_group=comm, bucket_cap_mb=2e-3)
        held = [dyadic(params, seed) for seed in range(4)]
        seen: dict[str, list[int]] = {}
        for step in range(STEPS):
            same = random.Random(step)
            own = random.Random(f"{step} {comm.rank}")
            for micro in range(1 + same.randrange(3)):
                if same.random() < 0.3:
                    with opt.no_sync():
                        loss_of(params, held[(step + micro) % 4], lambda i, own=own: own.random() < 0.7).backward()
                else:
                    loss_of(params, held[(step + micro) % 4], lambda i, own=own: own.random() < 0.7).backward()
                if same.random() < 0.2:
                    opt.grad_sync()
                elif same.random() < 0.1:
                    opt.grad_sync()
                    opt.zero_grad()
            if same.random() < 0.5:
                opt.clip_grad_norm_(0.5)
            opt.step()
            opt.zero_grad()
            if step % 10 == 0 and same.random() < 0.5:
                opt.state_dict()
            if step >= WARM_UP and step % 40 == 0 and comm.rank == 0:
                stats = comm.pool.stats()
                gc.collect()
                for name, value in {
                    "reserved bytes": stats.reserved_bytes,
                    "high water": stats.high_water_bytes,
                    "live leases": stats.live_leases,
                    "slabs": stats.slabs,
                    "dropped leases": stats.dropped_leases,
                    "objects": len(gc.get_objects()),
                    "threads": threading.active_count(),
                    "native threads": len(os.listdir("/proc/self/task")),
                    "files": len(os.listdir("/proc/self/fd")),
                    "resident bytes": rss_bytes(),
                }.items():
                    seen.setdefault(name, []).append(value)
        comm.pool.check()
        return seen

    seen = run_local(world, body, timeout_s=100)[0]
    print({name: (values[0], values[-1]) for name, values in seen.items()})
    for name in ("reserved bytes", "slabs", "threads", "native threads", "files", "dropped leases"):
        assert len(set(seen[name])) == 1, (name, seen[name])
    assert seen["live leases"][-1] <= max(seen["live leases"][:3]), seen["live leases"]
    assert seen["high water"][-1] <= seen["high water"][0] * 1.5, seen["high water"]
    assert seen["objects"][-1] <= min(seen["objects"][:3]) + 300, seen[
        "objects"
    ]  # the other rank is somewhere in its step
    assert seen["resident bytes"][-1] <= max(seen["resident bytes"][:3]) + (4 << 20), seen["resident bytes"]


@pytest.mark.parametrize("world", [2])
def test_optimizers_come_and_go_without_growth(world: int) -> None:
    def body(comm: Communicator) -> list[tuple[int, int]]:
        seen = []
        for round_ in range(16):
            params = make_params()
            opt = ShardedAdamW(params, process_group=comm, bucket_cap_mb=1e-3)
            loss_of(params, share(dyadic(params, 0), comm.rank, comm.size)).backward()
            opt.step()
            if round_ % 2:
                opt.close()
            del opt, params
            gc.collect()
            seen.append((comm.pool.stats().live_leases, comm.pool.stats().reserved_bytes))
        return seen

    for seen in run_local(world, body):
        assert {leases for leases, _ in seen} == {0} and len({reserved for _, reserved in seen}) == 1, seen


@pytest.mark.slow
@pytest.mark.timeout_s(580)
@pytest.mark.parametrize("seed", [1, 2])
def test_poisoned_memory_and_fuzzed_streams_change_nothing(seed: int) -> None:
    """G19 of the optimizer's test rows: the bitwise tests again where freed bucket memory is NaN and streams run at random times."""
    here = Path(__file__).parent
    tests = [f"{here}/{name}" for name in ("test_optim.py", "test_optim_semantics.py", "test_optim_divergence.py")]
    env = {**os.environ, "BW_POOL_POISON": "1", "BW_HOST_STREAM_FUZZ": str(seed)}
    command = [sys.executable, "-m", "pytest", "-q", "--no-header", "-p", "no:cacheprovider", "-x", *tests]
    done = subprocess.run(command, check=False, env=env, capture_output=True, text=True, timeout=560)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert "passed" in done.stdout


@pytest.mark.timeout_s(60)
def test_poisoned_memory_and_fuzzed_streams_change_nothing_in_short() -> None:
    here = Path(__file__).parent
    env = {**os.environ, "BW_POOL_POISON": "1", "BW_HOST_STREAM_FUZZ": "3"}
    some = "grad_sync_mixed or used_on_one_rank or zero_grad_to_zero_between or grad_taken_away_and"
    command = [sys.executable, "-m", "pytest", "-q", "--no-header", "-p", "no:cacheprovider", "-k", some]
    done = subprocess.run(
        [*command, f"{here}/test_optim_semantics.py"], check=False, env=env, capture_output=True, text=True, timeout=55
    )
    assert done.returncode == 0 and "4 passed" in done.stdout, done.stdout[-4000:] + done.stderr[-2000:]
