"""Runs a function on several ranks of this machine, for scripts and tests.

`run_ranks` starts new processes, `run_threads` uses threads of this process."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import pickle
import queue
import signal
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import Pipe, get_context
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

__all__ = ["RankFailed", "run_ranks", "run_threads"]

_START_TIMEOUT_S = 120.0  # Python, torch and the rendezvous, on a busy machine
_GRACE_S = 5.0  # for the other ranks once one has failed: they mostly wait for it
_EXIT_TIMEOUT_S = 30.0  # tearing down torch is seconds of work on a busy machine


class RankFailed(RuntimeError):
    """Raised by `run_ranks` and `run_threads` if ranks raised, died or hung. The message has the traceback or stack of each.

    Attributes:
        failures: The text of each failed rank, by rank: its traceback, or how it died and its stacks.
        results: The result of each other rank, by rank."""

    def __init__(self, failures: dict[int, str], results: dict[int, Any], world_size: int) -> None:
        self.failures = dict(sorted(failures.items()))
        self.results = results
        stories = "\n".join(f"--- rank {rank}/{world_size}: {story.rstrip()}" for rank, story in self.failures.items())
        super().__init__(f"{len(failures)} of {world_size} ranks failed\n{stories}")


def run_ranks(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout_s: float = 60,
    backend: str | None = "gloo",
    env: dict[str, str] | None = None,
) -> list[Any]:
    """Calls ``fn(rank, world_size, *args)`` in new processes, one for each rank, and returns their results by rank.

    The function and its arguments are pickled, so ``fn`` is a top-level function of an importable module or of the main
    script. As with `multiprocessing`, the main script needs ``if __name__ == "__main__":`` around the code that only the first
    process runs. When the call returns or raises, no process is left. On Linux the processes also end if the caller is killed.

    Args:
        fn: The function of each rank.
        world_size: Number of ranks.
        *args: Further arguments of ``fn``.
        timeout_s: Limit of ``fn`` in seconds, without the start and the end of the processes.
        backend: Backend of the default process group that each rank finds initialised. None means no process group.
        env: Variables that are added to the environment of the ranks.

    Raises:
        RankFailed: A rank raised, died or did not end in time."""
    # Without the second gloo resolves the host name, which need not work.
    env = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **os.environ, **(env or {})}
    call = pickle.dumps((fn, args))
    ranks: list[_Rank] = []
    with tempfile.TemporaryDirectory(prefix="bw-ranks-") as folder:
        try:
            with mock.patch.dict(os.environ, env):
                for rank in range(world_size):
                    ranks.append(_Rank(folder, rank, call, timeout_s, backend, f"file://{folder}/store", world_size))
            results, failures = _answers(dict(enumerate(ranks)), _START_TIMEOUT_S + timeout_s + _GRACE_S)
            for one in ranks:
                one.connection.close()  # the rank may end
            ends = {rank: one.end() for rank, one in enumerate(ranks) if not failures}
            failures |= {rank: end for rank, end in ends.items() if end}
        finally:  # an interrupt, too, leaves no rank behind
            for one in ranks:
                one.kill()
    if failures:
        raise RankFailed(failures, results, world_size)
    return [results[rank] for rank in range(world_size)]


class _Rank:
    def __init__(self, folder: str, rank: int, *setup: Any) -> None:
        self.stacks = Path(folder, f"stacks-{rank}")  # faulthandler writes here when the rank crashes or is late
        self.stacks.touch()
        self.connection, theirs = Pipe()
        args = (theirs, str(self.stacks), os.getpid(), *setup, rank)
        self.process = get_context("spawn").Process(target=_rank_main, args=args)
        with theirs:
            self.process.start()

    def answer(self) -> tuple[bool, Any]:
        """True and the result, or False and a traceback or an obituary."""
        with contextlib.suppress(EOFError, OSError):
            if self.connection.poll():
                return pickle.loads(self.connection.recv_bytes())  # torch's way of `recv` would share memory
        return False, self.end() or "died: exit code 0"

    def end(self) -> str:
        """Wait for the end of the process. An obituary, or nothing if it ended well."""
        self.process.join(_EXIT_TIMEOUT_S + _GRACE_S)
        code = self.process.exitcode
        return "" if code == 0 else f"died: exit code {code}\n{self.stacks.read_text(errors='replace')}"

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid or 0, signal.SIGKILL)  # it leads a group: processes that it started go with it
        self.process.kill()  # it may not lead one yet
        self.process.join()


def _answers(waiting: dict[int, _Rank], limit_s: float) -> tuple[dict[int, Any], dict[int, Any]]:
    """Results and failures, by rank."""
    answers: dict[bool, dict[int, Any]] = {True: {}, False: {}}
    deadline = time.monotonic() + limit_s
    while waiting:
        wait([rank.connection for rank in waiting.values()], timeout=0.02)
        for index, rank in list(waiting.items()):
            if time.monotonic() >= deadline:
                os.kill(rank.process.pid or 0, signal.SIGABRT)  # it writes its stacks
            # A process that a dead rank forked may hold the connection open: look at the rank itself too.
            elif not rank.connection.poll() and rank.process.is_alive():
                continue
            del waiting[index]
            is_ok, result = rank.answer()
            answers[is_ok][index] = result
        if answers[False]:
            deadline = min(deadline, time.monotonic() + _GRACE_S)
    return answers[True], answers[False]


def _rank_main(runner: Connection, stacks: str, pid: int, call: bytes, timeout_s: float, *group: Any) -> None:
    """Run the call in a session of its own, and stay until the runner has all results. Dies with its runner (Linux)."""
    os.setsid()
    backend, store, world_size, rank = group
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if not os.path.exists(f"/proc/{pid}"):  # it died before the line above
        os._exit(1)
    file = open(stacks, "w")  # noqa: SIM115 (faulthandler needs it for the whole life)
    faulthandler.enable(file)

    def run() -> Any:
        faulthandler.dump_traceback_later(_START_TIMEOUT_S, exit=True, file=file)
        if backend is not None:
            # A file store, unlike a TCP store, does not die with one of the ranks.
            dist.init_process_group(backend, store, timedelta(seconds=_START_TIMEOUT_S), world_size, rank)
        fn, args = pickle.loads(call)
        torch.manual_seed(0)
        faulthandler.dump_traceback_later(timeout_s, exit=True, file=file)
        return fn(rank, world_size, *args)

    _answer(lambda answer: runner.send_bytes(pickle.dumps(answer)), run)
    faulthandler.cancel_dump_traceback_later()
    runner.poll(None)  # until the runner has closed it
    faulthandler.dump_traceback_later(_EXIT_TIMEOUT_S, exit=True, file=file)
    if backend is not None and dist.is_initialized():  # ``fn`` may have destroyed it
        dist.destroy_process_group()


def _answer(send: Callable[[tuple[bool, Any]], None], run: Callable[[], Any]) -> None:
    try:
        send((True, run()))
    except BaseException:  # noqa: BLE001 (all of it is the runner's to report)
        send((False, traceback.format_exc()))


def run_threads(fn: Callable[..., Any], world_size: int, *args: Any, timeout_s: float = 60) -> list[Any]:
    """Calls ``fn(rank, world_size, *args)`` in threads of this process, one for each rank, and returns their results by rank.

    A thread cannot be killed. A thread that hangs is reported with its stack, and stays as a daemon thread.

    Args:
        fn: The function of each rank.
        world_size: Number of ranks.
        *args: Further arguments of ``fn``.
        timeout_s: Limit in seconds.

    Raises:
        RankFailed: A rank raised or did not end in time."""
    # The vector functions of MKL (exp, log, tanh, ...), when a process calls them for the first time and several threads
    # do it at once, may do that one call with its lowest accuracy: results are off by 1e-4.
    torch.exp(torch.ones(1, dtype=torch.float32, device="cpu"))
    answers: dict[bool, dict[int, Any]] = {True: {}, False: {}}
    over: queue.SimpleQueue[tuple[int, bool, Any]] = queue.SimpleQueue()

    def body(rank: int) -> None:
        _answer(lambda answer: over.put((rank, *answer)), lambda: fn(rank, world_size, *args))

    threads = {r: threading.Thread(target=body, args=(r,), name=f"rank {r}", daemon=True) for r in range(world_size)}
    for thread in threads.values():
        thread.start()
    deadline = time.monotonic() + timeout_s
    with contextlib.suppress(queue.Empty):
        while threads:  # a queue: to look again and again takes the GIL from the ranks each time
            rank, is_ok, result = over.get(timeout=max(deadline - time.monotonic(), 0.0))
            threads.pop(rank).join()
            answers[is_ok][rank] = result
            if not is_ok:
                deadline = min(deadline, time.monotonic() + _GRACE_S)
    if threads:
        with tempfile.TemporaryFile("w+") as file:
            faulthandler.dump_traceback(file)  # `sys._current_frames` may hang in Python 3.11 (python/cpython#106883)
            file.seek(0)
            stacks = file.read()
        answers[False] |= {r: f"hangs; left behind as {t.ident:#018x} of\n{stacks}" for r, t in threads.items()}
    if answers[False]:
        raise RankFailed(answers[False], answers[True], world_size)
    return [answers[True][rank] for rank in range(world_size)]
