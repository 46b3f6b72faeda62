"""What every test gets: a time limit, one torch thread, and child processes that find the package and the tests.

Markers
    slow            left out of `make test`
    dist            starts ranks
    timeout_s(n)    ends the whole run with a dump of all threads when the test takes longer than n seconds (default
    300); fixtures have longer, for whichever comes first builds what others find built
"""

from __future__ import annotations

import faulthandler
import gc
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import cores

ROOT = Path(__file__).resolve().parents[1]
pytest_plugins = ["tests.support.rank_pools", "tests.support.scheduling"]
DEFAULT_TIMEOUT_S = 300.0
SETUP_TIMEOUT_S = 400.0
LONG = (
    "tests/native/",
    "tests/frameworks/",
    *(
        f"tests/unit/test_{name}.py"
        for name in ("packages", "wheel", "gpu_parts", "testing", "doctor", "nccl", "build", "float16")
    ),
    *(f"tests/faults/test_{name}.py" for name in ("lifecycle", "faults", "faults_apart")),
    *(f"tests/stock/test_{name}.py" for name in ("train_gpt", "train_gpt_resume", "examples")),
    *(f"tests/conformance/optimizer/test_{name}.py" for name in ("optim_growth", "suite")),
    *(f"tests/conformance/collectives/test_nccl_{name}.py" for name in ("making", "lifetime")),
    "tests/test_layering.py",
)

_real_stderr = pytest.StashKey[int]()
_known_modules = pytest.StashKey[int]()

# Before anything imports torch, here and in child processes: two cores are shared by all ranks of a test.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# A shell ignores interrupts in what it starts in the background; so would ranks, and the tests that interrupt them.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
_PATHS = [str(ROOT / "python"), str(ROOT)]
os.environ["PYTHONPATH"] = os.pathsep.join([*_PATHS, *filter(None, [os.environ.get("PYTHONPATH")])])


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "slow: takes long or needs a package index; left out of `make test`")
    config.addinivalue_line("markers", "dist: starts ranks")
    config.addinivalue_line("markers", "timeout_s(n): time limit in seconds, 300 unless given")
    cores.is_one = config.getoption("markexpr") == "not slow"
    # Output is not captured at this point; in a test, file descriptor 2 is a temporary file that dies with the run.
    config.stash[_real_stderr] = os.dup(2)


def limit_s_of(item: pytest.Item) -> float:
    marker = item.get_closest_marker("timeout_s")
    return float(marker.args[0]) if marker else DEFAULT_TIMEOUT_S


def end_run_after(item: pytest.Item, limit_s: float) -> None:
    # A native wait holds no GIL to interrupt it by: the only sure way out is to end the process.
    faulthandler.dump_traceback_later(limit_s, exit=True, file=item.config.stash[_real_stderr])


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    if len(sys.modules) != item.config.stash.get(_known_modules, 0):
        # What imports leave stays. To look through all of torch takes 0.1 s, and many tests collect.
        item.config.stash[_known_modules] = len(sys.modules)
        gc.collect()
        gc.freeze()
    end_run_after(item, max(limit_s_of(item), SETUP_TIMEOUT_S))
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> None:
    end_run_after(item, limit_s_of(item))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What takes long comes first: at the end no worker is left alone with it."""
    items.sort(key=lambda item: not item.nodeid.startswith(LONG))  # the rest stays in order


@pytest.fixture
def restore_threads() -> Iterator[None]:
    """torch computes with as many threads afterwards as before."""
    import torch

    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
