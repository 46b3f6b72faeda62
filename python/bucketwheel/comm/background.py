"""Threads of ours beside the caller's, and their end with the process.

A thread that needs the GIL when the interpreter has gone, to come back from gloo or a Store, or to free what it holds, would
end the process by SIGABRT: [Note: threads at exit], csrc/base/terminate.h.
"""

from __future__ import annotations

import atexit
import sys
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

__all__ = ["start"]

_EXIT_S = 2.0  # how long the end of the process waits for threads

_threads: dict[threading.Thread, weakref.WeakMethod[Callable[[], None]] | None] = {}


def start(run: Callable[..., None], *args: Any, hurry: Callable[[], None] | None = None) -> None:
    """A thread that the end of the process waits for, a little. ``hurry``: a method, called then if its object is still
    there, that ends what the thread waits for."""
    thread = threading.Thread(target=run, args=args, name=f"bw{run.__name__}", daemon=True)
    for ended in [other for other in list(_threads) if _has_ended(other)]:
        _threads.pop(ended, None)
    _threads[thread] = None if hurry is None else weakref.WeakMethod(hurry)
    try:
        thread.start()
    except RuntimeError:  # the system has no more threads
        del _threads[thread]
        raise


def _has_ended(thread: threading.Thread) -> bool:
    """Not so one that Ctrl-C has kept from starting, nor one that is just starting: it has an ident and is not alive yet."""
    return thread.ident is not None and not thread.is_alive() and thread not in threading.enumerate()


@atexit.register
def _join_threads() -> None:
    """Runs after communicators have been closed: what is registered first runs last."""
    until = time.monotonic() + _EXIT_S
    try:
        for thread, its_hurry in list(_threads.items()):
            if not thread.is_alive():  # or not yet: nobody can wait for it then
                continue
            if its_hurry is not None and (hurry := its_hurry()) is not None:
                hurry()
            thread.join(max(until - time.monotonic(), 0.0))
    finally:  # Ctrl-C ends the waiting
        native = sys.modules.get("bucketwheel._cpu")
        left = [thread.ident for thread in list(_threads) if thread.is_alive()]
        if native is not None and left:
            native.let_sleep_at_terminate(left)
