"""What tests of several ranks need is built first."""

import pytest


@pytest.fixture(scope="session", autouse=True)
def _built(nccl_env: dict[str, str]) -> None:
    """Time limits of tests are for running."""
