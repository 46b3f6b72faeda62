"""Run ranks in tests, and compare tensors bit for bit.

`run_ranks` starts fresh processes for one call, `RankPool` keeps them for many calls, `run_threads` makes ranks of this
process's threads. All three return one result per rank or raise `RankFailed` with the traceback of every failed rank;
none of them waits past its deadline and no rank outlives its runner, not even when the runner is killed (Linux).

Functions given to processes are pickled by name: top-level functions of an importable module or of the main script.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import functools
import gc
import multiprocessing.connection
import multiprocessing.spawn
import os
import pickle
import queue
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Collection
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from bucketwheel import _fork_server
from bucketwheel._bitwise import assert_bitwise_equal
from bucketwheel._fork_server import ForkedProcess

__all__ = ["RankFailed", "RankPool", "assert_bitwise_equal", "run_ranks", "run_threads"]

# Python, torch and the rendezvous; generous, because a busy machine starts many ranks at once.
_START_TIMEOUT_S = 120.0
# How long the others may still run once a rank has failed: they mostly wait for the failed one.
_GRACE_S = 5.0
# How long an orderly exit may take: tearing down torch is seconds of work on a busy machine.
_EXIT_TIMEOUT_S = 30.0
_POLL_S = 0.02
_PR_SET_PDEATHSIG = 1


class RankFailed(RuntimeError):
    """Some ranks raised, died or hung. ``failures`` maps each of them to its story, ``results`` the others to theirs."""

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
    expect_dead: Collection[int] = (),
    forked: bool = False,
) -> list[Any]:
    """Run ``fn(rank, world_size, *args)`` in ``world_size`` fresh processes; return the results by rank.

    ``backend`` names the default process group each rank finds initialised (None: none). ``timeout_s`` bounds ``fn``,
    without the start of the processes. ``forked``: see `RankPool`. Ranks in ``expect_dead`` must die (their result is None); the others go on.
    """
    with RankPool(world_size, backend=backend, env=env, forked=forked) as pool:
        return pool.run(fn, *args, timeout_s=timeout_s, expect_dead=expect_dead)


@dataclass
class _Rank:
    process: subprocess.Popen[bytes] | ForkedProcess
    connection: multiprocessing.connection.Connection
    stacks: Path  # faulthandler writes here, on a crash and on SIGUSR1

    def end_of(self, seconds: float) -> int | None:
        """The exit code, None when still alive after ``seconds``."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.process.wait(seconds)
        return None

    def kill(self) -> None:
        # The rank leads its own process group: what it started goes with it.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.connection.close()

    def dump_stacks(self) -> str:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGUSR1)
            time.sleep(0.3)
        return self.stacks.read_text(errors="replace").strip() or "(no Python stacks)"

    def obituary(self) -> str:
        code = self.process.wait()
        cause = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        return f"died: {cause}\n{self.stacks.read_text(errors='replace')}"


class RankPool:
    """``world_size`` rank processes reused by many runs; start and ``import torch`` are paid once.

    Each run begins with the same torch seed and a garbage collection. A failed run or a death ends the processes; the
    next run starts new ones. ``run`` is ``submit`` and ``collect``; between these two, ``kill`` ends a rank.

    ``forked``: the processes are forked off one that has imported torch, which saves that time, instead of started from
    nothing; not where ``env`` or `os.environ` have what such a process could not follow. Not for measuring memory,
    which is shared then.
    """

    def __init__(
        self,
        world_size: int,
        *,
        backend: str | None = "gloo",
        env: dict[str, str] | None = None,
        forked: bool = False,
    ) -> None:
        if world_size < 1:
            raise ValueError(f"world_size must be at least 1, got {world_size}")
        self.world_size = world_size
        self._backend = backend
        self._forked = forked and sys.platform == "linux"
        self._env = dict(env or {})
        self._ranks: list[_Rank] = []
        self._directory: Path | None = None
        self._is_running = False

    def __enter__(self) -> RankPool:  # noqa: PYI034 (typing.Self is newer than Python 3.10)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            self._stop()

    def run(self, fn: Callable[..., Any], *args: Any, timeout_s: float = 60, expect_dead: Collection[int] = ()) -> list:
        """Run ``fn(rank, world_size, *args)`` on every rank; the arguments are those of `run_ranks`."""
        self.submit(fn, *args)
        return self.collect(timeout_s=timeout_s, expect_dead=expect_dead)

    def submit(self, fn: Callable[..., Any], *args: Any) -> None:
        """Start ``fn`` on every rank and return."""
        if self._is_running:
            raise ValueError("the pool is running a function already; collect() its results first")
        call = pickle.dumps((fn, args))
        main = getattr(sys.modules["__main__"], "__file__", None) if fn.__module__ == "__main__" else None
        if not self._ranks:
            self._start()
        for rank in self._ranks:
            rank.connection.send((list(sys.path), main, call))
        self._is_running = True

    def collect(self, *, timeout_s: float = 60, expect_dead: Collection[int] = ()) -> list:
        """Wait for the submitted function and return its results by rank."""
        if not self._is_running:
            raise ValueError("nothing was submitted")
        self._is_running = False
        try:
            results, failures, dead = self._gather(timeout_s, expect_dead)
        except BaseException:  # an interrupt must not leave ranks behind
            self._stop()
            raise
        if failures or dead:
            self._stop()
        if failures:
            raise RankFailed(failures, results, self.world_size)
        return [results.get(rank) for rank in range(self.world_size)]

    def kill(self, rank: int) -> None:
        """SIGKILL one rank of the running function and what it started."""
        os.killpg(self._ranks[rank].process.pid, signal.SIGKILL)

    def close(self) -> None:
        """End the ranks in an orderly way. Raises `RankFailed` when one does not exit, or not with code 0."""
        if self._is_running:
            self._stop()
            return
        failures = {}
        for rank in self._ranks:
            with contextlib.suppress(OSError):
                rank.connection.send(None)
        for index, rank in enumerate(self._ranks):
            code = rank.end_of(_EXIT_TIMEOUT_S)
            if code is None:
                failures[index] = (
                    f"did not exit within {_EXIT_TIMEOUT_S:g} s after its last function\n{rank.dump_stacks()}"
                )
            elif code != 0:
                failures[index] = rank.obituary()
        self._stop()
        if failures:
            raise RankFailed(failures, {}, self.world_size)

    def _start(self) -> None:
        self._directory = Path(tempfile.mkdtemp(prefix="bw-ranks-"))
        env = {**_fork_server.default_env(), **self._env}
        if sys.platform == "linux":  # gloo otherwise resolves the host name, which need not work
            env.setdefault("GLOO_SOCKET_IFNAME", "lo")
        try:
            for index in range(self.world_size):
                self._ranks.append(self._start_rank(index, self._directory, env))
            _, failures, dead = self._gather(_START_TIMEOUT_S, ())
        except BaseException:
            self._stop()
            raise
        if failures or dead:
            self._stop()
            raise RankFailed(failures, {}, self.world_size)

    def _start_rank(self, index: int, directory: Path, env: dict[str, str]) -> _Rank:
        ours, theirs = socket.socketpair()
        stacks = directory / f"stacks-{index}"
        stacks.touch()
        setup = (index, self.world_size, str(directory), self._backend)
        code = f"import bucketwheel.testing as t; t._rank_main(fd, server, *{setup!r})"
        with theirs:
            forked = _fork_server.fork(code, theirs.fileno(), env) if self._forked else None
            process = forked or subprocess.Popen(
                [
                    sys.executable,
                    "-c",
                    f"import sys; sys.path[:] = {sys.path!r}; fd, server = {theirs.fileno()}, {os.getpid()}; {code}",
                ],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env=env,
                start_new_session=True,
            )
        return _Rank(process, multiprocessing.connection.Connection(ours.detach()), stacks)

    def _gather(self, timeout_s: float, expect_dead: Collection[int]) -> tuple[dict, dict, set]:
        """Wait for one message per rank. Returns results and failures by rank, and the ranks that are no more."""
        results: dict[int, Any] = {}
        failures: dict[int, str] = {}
        dead: set[int] = set()
        by_connection = {rank.connection: index for index, rank in enumerate(self._ranks)}
        deadline = time.monotonic() + timeout_s
        waited_for = f"did not finish within {timeout_s:g} s; killed"
        while by_connection:
            readable = multiprocessing.connection.wait(list(by_connection), timeout=_POLL_S)
            # A process that a dead rank forked may hold the connection open: look at the rank itself too.
            ready = [c for c, i in by_connection.items() if c in readable or self._ranks[i].process.poll() is not None]
            for connection in ready:
                index = by_connection.pop(connection)
                story = self._receive(index, expect_dead, results, dead)
                if story is not None:
                    failures[index] = story
                    if deadline > time.monotonic() + _GRACE_S:
                        deadline = time.monotonic() + _GRACE_S
                        waited_for = f"still running {_GRACE_S:g} s after rank {index} had failed; killed"
            if by_connection and time.monotonic() >= deadline:
                for index in by_connection.values():
                    failures[index] = f"{waited_for}\n{self._ranks[index].dump_stacks()}"
                    dead.add(index)
                break
        return results, failures, dead

    def _receive(self, index: int, expect_dead: Collection[int], results: dict[int, Any], dead: set[int]) -> str | None:
        """Take one rank's message (or its death); return its story if it failed."""
        rank = self._ranks[index]
        try:
            if not rank.connection.poll() and rank.process.poll() is not None:
                raise EOFError
            is_ok, payload = pickle.loads(rank.connection.recv_bytes())
        except (EOFError, OSError):
            dead.add(index)
            rank.end_of(_GRACE_S)
            return None if index in expect_dead else rank.obituary()
        if is_ok and index in expect_dead:
            return "returned, though it was expected to die"
        if is_ok:
            results[index] = payload
            return None
        return str(payload)

    def _stop(self) -> None:
        for rank in self._ranks:
            rank.kill()
        self._ranks = []
        self._is_running = False
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)
            self._directory = None


def _rank_main(fd: int, parent: int, rank: int, world_size: int, directory: str, backend: str | None) -> None:
    """The life of a rank process: join the group, say so, then run what comes until the runner says stop."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it died before the line above
            os._exit(1)
    stacks = open(f"{directory}/stacks-{rank}", "w")  # noqa: SIM115 (faulthandler needs it for the whole life)
    faulthandler.enable(stacks)
    faulthandler.register(signal.SIGUSR1, stacks)
    os.set_inheritable(fd, False)
    connection = multiprocessing.connection.Connection(fd)
    _answer(connection, functools.partial(_join_group, rank, world_size, directory, backend))
    is_first = True
    while True:
        try:
            message = connection.recv()
        except EOFError:
            os._exit(1)
        if message is None:
            break
        _answer(connection, functools.partial(_call, rank, world_size, is_first, *message))
        is_first = False
        gc.collect()
    if backend is not None:
        import torch.distributed as dist

        if dist.is_initialized():  # a test may have destroyed it
            dist.destroy_process_group()


def _join_group(rank: int, world_size: int, directory: str, backend: str | None) -> None:
    if backend is None:
        return
    import torch.distributed as dist

    # A file store, unlike a TCP store, does not die with one of the ranks.
    store = f"file://{directory}/store"
    dist.init_process_group(backend, store, timedelta(seconds=_START_TIMEOUT_S), world_size, rank)


def _call(rank: int, world_size: int, is_first: bool, path: list[str], main: str | None, call: bytes) -> Any:
    multiprocessing.spawn.prepare({"sys_path": path} | ({"init_main_from_path": main} if main else {}))
    fn, args = pickle.loads(call)
    if is_first:  # what imports leave stays: to look through all of torch takes 0.1 s each time
        gc.collect()
        gc.freeze()  # before there is anything of a call's, which may end in a later one
    if "torch" in sys.modules:
        import torch

        torch.manual_seed(0)
    return fn(rank, world_size, *args)


def _answer(connection: multiprocessing.connection.Connection, run: Callable[[], Any]) -> None:
    try:
        message = pickle.dumps((True, run()))
    except BaseException:  # noqa: BLE001 (all of it is the runner's to report)
        message = pickle.dumps((False, traceback.format_exc()))
    connection.send_bytes(message)


def run_threads(fn: Callable[..., Any], world_size: int, *args: Any, timeout_s: float = 60) -> list[Any]:
    """Run ``fn(rank, world_size, *args)`` in ``world_size`` threads of this process; return the results by rank.

    A thread cannot be killed: one that hangs is reported with its stack and left behind as a daemon.
    """
    if "torch" in sys.modules:
        import torch

        # The vector functions of MKL (exp, log, tanh, ...), when a process calls them for the first time and several
        # threads do it at once, may do that one call with its lowest accuracy: results are off by 1e-4.
        torch.exp(torch.ones(1))
    results: dict[int, Any] = {}
    failures: dict[int, str] = {}
    over: queue.SimpleQueue[int] = queue.SimpleQueue()

    def body(rank: int) -> None:
        try:
            results[rank] = fn(rank, world_size, *args)
        except BaseException:  # noqa: BLE001 (all of it is the runner's to report)
            failures[rank] = traceback.format_exc()
        over.put(rank)

    threads = [threading.Thread(target=body, args=(r,), name=f"rank {r}", daemon=True) for r in range(world_size)]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + timeout_s
    with contextlib.suppress(queue.Empty):
        for _ in threads:  # not by looking again and again: that takes the GIL from them each time
            over.get(timeout=max(deadline - time.monotonic(), 0.0))
            if failures:
                deadline = min(deadline, time.monotonic() + _GRACE_S)
        for thread in threads:
            thread.join(max(deadline - time.monotonic(), 0.0))
    frames = sys._current_frames()
    hung = {}
    for rank, thread in enumerate(threads):
        if thread.is_alive():
            frame = frames.get(thread.ident or 0)
            hung[rank] = f"did not finish in time; left behind\n{''.join(traceback.format_stack(frame))}"
    if failures or hung:
        raise RankFailed({**failures, **hung}, dict(results), world_size)
    return [results[rank] for rank in range(world_size)]
