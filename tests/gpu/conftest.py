"""Tests in this folder need a CUDA device: elsewhere they are skipped, or fail where BW_REQUIRE names gpu."""

from __future__ import annotations

import pytest
import torch

from tests.requirements import unmet


def pytest_runtest_setup(item: pytest.Item) -> None:
    if not torch.cuda.is_available():
        built = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built without CUDA"
        unmet("gpu", f"torch {torch.__version__}, {built}, sees no CUDA device")
