"""Code that tests run in a process of its own."""

from __future__ import annotations

import sys
import time

import pytest

from tests.support.forked_code import run_in_child


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_child_that_raises_or_hangs_fails() -> None:
    run_in_child(lambda: None)
    with pytest.raises(AssertionError):
        run_in_child(lambda: sys.exit(0))
    with pytest.raises(AssertionError, match=r"not over after 0\.2 s"):
        run_in_child(lambda: time.sleep(60), timeout_s=0.2)
