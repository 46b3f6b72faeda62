"""Where the ranks run that are threads of one interpreter: in `make test` on one core, in `make test-all` on all of them.

They hold the GIL in turn, and torch hands it over with each of its operations. From core to core that takes a third of
the processors' time. Which bits come out is the same; what may come at the same time is for `make test-all`, for ranks
that are processes, and for the native tests.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

# What a test allows for time that it promises, over the promise: other workers of pytest-xdist have the cores too.
BUSY = 4.0 if int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")) > 1 else 1.0

is_one = False  # `tests/conftest.py` decides


@contextlib.contextmanager
def one_core() -> Iterator[None]:
    """Threads that are started meanwhile stay on it. Which core it is depends on the worker of pytest-xdist."""
    if not (is_one and hasattr(os, "sched_setaffinity")):
        yield
        return
    allowed = os.sched_getaffinity(0)
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    os.sched_setaffinity(0, {sorted(allowed)[worker % len(allowed)]})
    try:
        yield
    finally:
        os.sched_setaffinity(0, allowed)
