"""One pool of rank processes per world size, shared by all tests of a run; and `run`, cases on every backend."""

import contextlib
import functools
import os
import signal
from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist

from bucketwheel.native.modules import native
from tests.support import simulated_cuda, simulated_nccl
from tests.support.comm_cases import EVERYWHERE, ON_PROCESSES, ON_THREADS
from tests.support.ranks import RankPool


@pytest.fixture(scope="session")
def nccl_env():
    """What makes NCCL the simulated one. All is built here if need be: time limits of tests are for running."""
    native()
    simulated_cuda.build()
    return {"BW_NCCL_LIB": str(simulated_nccl.build())}


class _Pool(RankPool):
    """gloo's threads look for work 100 times a second. So process groups that a test has made end with it, and between
    runs the ranks are stopped: some 50 idle ones took a twentieth of the time of all tests."""

    def run(self, fn: Callable[..., Any], *args: Any, **limits: Any) -> list[Any]:
        self._signal(signal.SIGCONT)
        try:
            return super().run(_leave_no_groups, fn, *args, **limits)
        finally:
            self._signal(signal.SIGSTOP)

    def close(self) -> None:
        self._signal(signal.SIGCONT)
        super().close()

    def _signal(self, number: signal.Signals) -> None:
        for rank in self._ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(rank.process.pid, number)


def _leave_no_groups(rank: int, size: int, fn: Callable[..., Any], *args: Any) -> Any:
    try:
        return fn(rank, size, *args)
    finally:
        for group in set(dist.distributed_c10d._world.pg_map) - {dist.group.WORLD}:
            dist.destroy_process_group(group)


@pytest.fixture(scope="session")
def rank_pool(nccl_env):
    """``rank_pool(world_size)`` returns that `RankPool`; its ranks have a gloo process group."""
    with contextlib.ExitStack() as stack:
        pools: dict[int, RankPool] = {}

        def pool_of(world_size: int) -> RankPool:
            if world_size not in pools:
                pools[world_size] = stack.enter_context(_Pool(world_size, env=nccl_env))
            return pools[world_size]

        yield pool_of


@pytest.fixture(params=EVERYWHERE)
def run(request, rank_pool):
    """``run(case, *args)`` runs ``case(comm, *args)`` on all ranks of one backend and returns the results."""
    backend, world = request.param.split()
    if backend in ON_PROCESSES:
        return functools.partial(rank_pool(int(world)).run, ON_PROCESSES[backend])
    return functools.partial(ON_THREADS[backend], int(world))
