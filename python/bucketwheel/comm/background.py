"""Threads of ours beside the caller's, and their end with the process."""

from __future__ import annotations

import atexit
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

from bucketwheel.comm import patience

_threads: weakref.WeakSet[threading.Thread] = weakref.WeakSet()


def start(run: Callable[..., None], *args: Any) -> None:
    """A thread that the end of the process waits for, a little."""
    thread = threading.Thread(target=run, args=args, name=f"bw{run.__name__}", daemon=True)
    _threads.add(thread)
    thread.start()


@atexit.register
def _join_threads() -> None:
    """Runs after communicators have been closed: what is registered first runs last."""
    until = time.monotonic() + patience.PATIENCE.exit_s
    for thread in list(_threads):
        if thread.is_alive():  # or not yet: nobody can wait for it then
            thread.join(max(until - time.monotonic(), 0.0))
