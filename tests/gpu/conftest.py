"""Tests in this folder need a CUDA device: elsewhere they are skipped, or fail where BW_REQUIRE names gpu.

With ``BW_GPU_SIMULATE=1`` and no GPU they run on the simulated device, at small sizes.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from bucketwheel._build import native
from tests.gpu.device import DEVICE, need_device


def pytest_runtest_setup(item: pytest.Item) -> None:
    need_device()


@pytest.fixture(autouse=True, scope="session")
def _device() -> Iterator[None]:
    with DEVICE.opened():
        yield


@pytest.fixture(autouse=True)
def _no_faults_left(_device: None) -> Iterator[None]:
    yield
    native().clear_cuda_faults()
