"""Tests in this folder need a CUDA device: elsewhere they are skipped, or fail where BW_REQUIRE names gpu.

With ``BW_GPU_SIMULATE=1`` and no GPU they run on the simulated device, at small sizes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.gpu.device import DEVICE, Tell, need_device
from tests.support.counted_cuda import clear_cuda_faults


def pytest_runtest_setup(item: pytest.Item) -> None:
    need_device()


@pytest.fixture(autouse=True, scope="session")
def _device() -> Iterator[None]:
    with DEVICE.opened():
        yield


@pytest.fixture
def tell(capsys: pytest.CaptureFixture[str]) -> Tell:
    """A line of the part's results."""

    def write(case: str, **facts: Any) -> None:
        with capsys.disabled():
            print("\n" + json.dumps({"case": case, **facts}))

    return write


@pytest.fixture(autouse=True)
def _no_faults_left(_device: None) -> Iterator[None]:
    yield
    clear_cuda_faults()
