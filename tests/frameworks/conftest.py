"""Two ranks for all frameworks: their imports take seconds, and nothing of them stays in the ranks of other tests."""

import importlib

import pytest

from bucketwheel.native.modules import native
from tests.support.ranks import RankPool

# What torchrun tells all its processes; `training.join` adds what differs.
ENV = {
    "LOCAL_WORLD_SIZE": "2",
    "WORLD_SIZE": "2",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",  # nobody listens: the process group is there already
    "TORCHELASTIC_RUN_ID": "tests",
    "ACCELERATE_USE_CPU": "true",
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
}


def import_all(rank: int, world: int) -> None:
    """Once, and not within the time limit of a training: on a busy machine it may take half a minute."""
    for name in ("accelerate", "lightning.fabric", "lightning.pytorch", "peft", "transformers.trainer"):
        importlib.import_module(name)


@pytest.fixture(scope="package")
def ranks():
    native()  # built here if need be, not within the ranks' time limits
    with RankPool(2, env=ENV) as pool:
        pool.run(import_all, timeout_s=200)
        yield pool
