"""One pool of rank processes per world size, shared by all tests of a run; and `run`, cases on every backend."""

import contextlib
import functools

import pytest
from comm_cases import EVERYWHERE, ON_PROCESSES, ON_THREADS

from bucketwheel._build import native
from bucketwheel.testing import RankPool
from tests import simulated_cuda, simulated_nccl


@pytest.fixture(scope="session")
def rank_pool():
    """``rank_pool(world_size)`` returns that `RankPool`; its ranks have a gloo process group."""
    native()  # built here if need be: in ranks the time limits of the tests would end the build, each time
    env = {"BW_NCCL_LIB": str(simulated_nccl.build())}  # read once in each process, whatever it runs first
    simulated_cuda.build()
    with contextlib.ExitStack() as stack:
        pools: dict[int, RankPool] = {}

        def pool_of(world_size: int) -> RankPool:
            if world_size not in pools:
                pools[world_size] = stack.enter_context(RankPool(world_size, env=env, forked=True))
            return pools[world_size]

        yield pool_of


@pytest.fixture(params=EVERYWHERE)
def run(request, rank_pool):
    """``run(case, *args)`` runs ``case(comm, *args)`` on all ranks of one backend and returns the results."""
    backend, world = request.param.split()
    if backend in ON_PROCESSES:
        return functools.partial(rank_pool(int(world)).run, ON_PROCESSES[backend])
    return functools.partial(ON_THREADS[backend], int(world))
