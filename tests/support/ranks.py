"""Rank processes that are there at once and serve many calls.

They are forked off a server that has imported torch, which takes seconds. A forked rank shares torch's memory with the server:
measure memory with `bucketwheel.testing.run_ranks`. It keeps the deadline, kills hung ranks with what they have started, and
shows the traceback of every failed rank.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import functools
import gc
import multiprocessing.connection
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from bucketwheel import testing
from bucketwheel.testing import RankFailed

START_TIMEOUT_S = 120.0
GRACE_S = 5.0  # for the others once a rank has failed
# The fork server imports these. The first optimizer of a process imports torch._dynamo, which takes as long as torch; the
# last imports what most ranks do.
PRELOADED = ["torch._dynamo", "tests.faults.plans"]
READ_LATE = ("BW_", "GLOO_", "NCCL_", "PYTEST_")  # variables that a forked process can follow


def is_followed(names: Collection[str]) -> bool:
    return all(name.startswith(READ_LATE) for name in names)


def run_ranks(fn: Callable[..., Any], world_size: int, *args: Any, timeout_s: float = 60, **options: Any) -> list[Any]:
    """One call on new ranks; the options are those of `RankPool` and ``expect_dead``."""
    expect_dead = options.pop("expect_dead", ())
    with RankPool(world_size, **options) as pool:
        return pool.run(fn, *args, timeout_s=timeout_s, expect_dead=expect_dead)


class RankPool:
    """``world_size`` ranks. A failed run or a death ends them; the next run starts new ones. They are fresh processes where
    ``forked`` is false or ``env`` has variables that a forked process could not follow."""

    def __init__(
        self, world_size: int, *, backend: str | None = "gloo", env: Mapping[str, str] = {}, forked: bool = True
    ) -> None:
        self.world_size, self._backend, self._env = world_size, backend, dict(env)
        self._forked = forked and is_followed(self._env)
        self._ranks: list[_Rank] = []

    def __enter__(self) -> RankPool:  # noqa: PYI034 (typing.Self is newer than Python 3.10)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self.close()
        finally:
            self._stop()

    def run(
        self, fn: Callable[..., Any], *args: Any, timeout_s: float = 60, expect_dead: Collection[int] = ()
    ) -> list[Any]:
        """``fn(rank, world_size, *args)`` of every rank. Ranks in ``expect_dead`` must die (their result is None)."""
        call = pickle.dumps((fn, args))
        try:
            if not self._ranks:
                self._folder = tempfile.TemporaryDirectory(prefix="bw-ranks-")
                for rank in range(self.world_size):
                    self._ranks.append(_Rank(self, rank, self._folder.name))
                self._gather(START_TIMEOUT_S, ())
            for rank in self._ranks:
                with contextlib.suppress(OSError):  # it has died since the last run, which is found below
                    rank.connection.send((list(sys.path), call))
            results = self._gather(timeout_s, expect_dead)
        except BaseException:  # an interrupt must not leave ranks behind
            self._stop()
            raise
        if expect_dead:
            self._stop()
        return [results.get(rank) for rank in range(self.world_size)]

    def close(self) -> None:
        for rank in self._ranks:
            with contextlib.suppress(OSError):
                rank.connection.send(None)
        ends = [rank.end(30.0) for rank in self._ranks]
        failures = {index: end for index, end in enumerate(ends) if self._ranks[index].process.exitcode != 0}
        self._stop()
        if failures:
            raise RankFailed(failures, {}, self.world_size)

    def _gather(self, timeout_s: float, expect_dead: Collection[int]) -> dict[int, Any]:
        """One message per rank: results by rank, without those that were to die; or `RankFailed`."""
        results: dict[int, Any] = {}
        failures: dict[int, str] = {}
        waiting = dict(enumerate(self._ranks))
        deadline, why = time.monotonic() + timeout_s, f"did not finish within {timeout_s:g} s"
        while waiting:
            multiprocessing.connection.wait([rank.connection for rank in waiting.values()], timeout=0.02)
            for index, rank in list(waiting.items()):
                # A process that a dead rank forked may hold the connection open: look at the rank itself too.
                if not rank.connection.poll() and rank.process.is_alive():
                    continue
                del waiting[index]
                is_ok, result = rank.answer()
                if index in expect_dead:
                    is_ok, result = is_ok is None, "returned, though it was expected to die" if is_ok else result
                elif is_ok:
                    results[index] = result
                if not is_ok:
                    failures[index] = result
                    deadline = min(deadline, time.monotonic() + GRACE_S)
            if waiting and time.monotonic() >= deadline:
                why = f"still running {GRACE_S:g} s after rank {[*failures][0]} had failed" if failures else why
                failures |= {index: f"{why}\n{rank.end(0.0)}" for index, rank in waiting.items()}
                break
        if failures:
            raise RankFailed(failures, results, self.world_size)
        return results

    def _stop(self) -> None:
        for rank in self._ranks:
            rank.kill()
            rank.connection.close()
        if self._ranks:
            self._folder.cleanup()
        self._ranks.clear()


class _Rank(testing._Rank):
    def __init__(self, pool: RankPool, rank: int, folder: str) -> None:
        self.stacks = Path(folder, f"stacks-{rank}")  # faulthandler writes here on a crash
        self.stacks.touch()
        self.connection, theirs = multiprocessing.Pipe()
        setup = (str(self.stacks), pool._backend, f"file://{folder}/store", pool.world_size, rank)
        with theirs:
            env = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **os.environ, **pool._env}
            self.process = start_process(_rank_main, theirs, *setup, env=env, forked=pool._forked)

    def answer(self) -> tuple[bool | None, Any]:
        """True and the result; False and a traceback if the rank raised; None and an obituary if it is dead."""
        with contextlib.suppress(EOFError, OSError):
            if self.connection.poll():
                return pickle.loads(self.connection.recv_bytes())
        return None, self.end(GRACE_S)

    def end(self, timeout_s: float) -> str:
        """An obituary. A rank that does not end in time is made to show its stacks."""
        self.process.join(timeout_s)
        if self.process.exitcode is None:
            os.kill(self.process.pid, signal.SIGABRT)
            self.process.join(GRACE_S)
        code = self.process.exitcode or 0
        cause = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        return f"died: {cause}\n{self.stacks.read_text(errors='replace')}"


def start_process(target: Callable[..., Any], *args: Any, env: Mapping[str, str], forked: bool) -> Any:
    """A process that runs ``target(*args)`` with the environment ``env``, leads a session and dies with its runner."""
    context: Any = multiprocessing.get_context("forkserver" if forked else "spawn")
    if forked:
        context.set_forkserver_preload(PRELOADED)
    process = context.Process(target=_process_main, args=(target, args, dict(env), os.getpid(), forked))
    with contextlib.nullcontext() if forked else mock.patch.dict(os.environ, env):
        process.start()
    return process


def _process_main(
    target: Callable[..., Any], args: tuple[Any, ...], env: dict[str, str], runner: int, forked: bool
) -> None:
    gc.freeze()  # neither look through what the server has imported nor copy the pages it is in
    server: Any = sys.modules.get("multiprocessing.forkserver")
    if server is not None and server._forkserver._forkserver_alive_fd is not None:
        # The server lives while anybody has this, and the ranks while the server does: it is to be the runner alone.
        os.close(server._forkserver._forkserver_alive_fd)
        server._forkserver._forkserver_alive_fd = None
    os.setsid()
    asked_for = os.environ.get("NCCL_LAUNCH_ORDER_IMPLICIT")  # set by the import of bucketwheel
    os.environ.clear()
    os.environ.update({**({"NCCL_LAUNCH_ORDER_IMPLICIT": asked_for} if asked_for else {}), **env})
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if not os.path.exists(f"/proc/{runner}"):  # it died before the line above
        os._exit(1)
    target(*args)
    if forked:  # it does not take its interpreter apart: that would copy all pages of torch that it shares, for 0.3 s
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        ctypes.CDLL(None).fflush(None)  # C's streams; multiprocessing flushes Python's


def _rank_main(connection: Any, stacks: str, backend: str | None, store: str, world_size: int, rank: int) -> None:
    """Join the group, say so, then run the calls that come until the runner says stop."""
    file = open(stacks, "w")  # noqa: SIM115 (faulthandler needs it for the whole life)
    faulthandler.enable(file)

    def send(answer: tuple[bool, Any]) -> None:  # torch's way of `Connection.send` would share the memory of tensors
        connection.send_bytes(pickle.dumps(answer))

    if backend is None:
        send((True, None))
    else:
        limit = timedelta(seconds=START_TIMEOUT_S)
        testing._answer(send, functools.partial(dist.init_process_group, backend, store, limit, world_size, rank))
    is_first = True
    while (message := connection.recv()) is not None:
        testing._answer(send, functools.partial(_call, rank, world_size, is_first, *message))
        is_first = False
        gc.collect()
    if backend is not None and dist.is_initialized():  # a test may have destroyed it
        dist.destroy_process_group()


def _call(rank: int, world_size: int, is_first: bool, path: list[str], call: bytes) -> Any:
    sys.path[:] = path
    fn, args = pickle.loads(call)
    if is_first:  # what imports leave stays: to look through all of torch takes 0.1 s each time
        gc.collect()
        gc.freeze()  # before there is anything of a call's, which may end in a later one
    torch.manual_seed(0)
    return fn(rank, world_size, *args)
