"""Run ranks in tests, and compare tensors bit for bit.

`run_ranks` starts fresh processes for one call, `RankPool` keeps them for many calls, `run_threads` makes ranks of this
process's threads. All return one result per rank or raise `RankFailed` with the traceback of every failed rank. None waits
past its deadline, and no rank outlives its runner, not even one that is killed (Linux).

Functions for processes are pickled by name: they are at the top level of an importable module or of the main script, which
needs ``if __name__ == "__main__":`` around what only the first process is to do, as with `multiprocessing`.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import functools
import gc
import multiprocessing
import multiprocessing.connection
import multiprocessing.util
import os
import pickle
import queue
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any
from unittest import mock

__all__ = ["RankFailed", "RankPool", "assert_bitwise_equal", "run_ranks", "run_threads"]

_START_TIMEOUT_S = 120.0  # Python, torch and the rendezvous, on a busy machine
_GRACE_S = 5.0  # for the others once a rank has failed: they mostly wait for it
_EXIT_TIMEOUT_S = 30.0  # tearing down torch is seconds of work on a busy machine
_POLL_S = 0.02
_PR_SET_PDEATHSIG = 1
# What the fork server imports. The first optimizer of a process imports the third, which takes as long as torch.
_PRELOADED = ["torch", "torch.distributed", "torch._dynamo", "numpy"]
_ASKED_FOR_AT_IMPORT = "NCCL_LAUNCH_ORDER_IMPLICIT"  # by bucketwheel, which a forked process has imported
_READ_LATE = ("BW_", "GLOO_", "NCCL_", "PYTEST_")  # variables that a forked process can follow


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
    without the start of the processes. ``forked``: see `RankPool`. Ranks in ``expect_dead`` must die (their result is
    None); the others go on.
    """
    with RankPool(world_size, backend=backend, env=env, forked=forked) as pool:
        return pool.run(fn, *args, timeout_s=timeout_s, expect_dead=expect_dead)


@dataclass
class _Rank:
    process: BaseProcess
    connection: multiprocessing.connection.Connection
    stacks: Path  # faulthandler writes here, on a crash and on SIGUSR1

    def answer(self) -> tuple[bool | None, Any]:
        """Whether it returned, and what; False with its traceback if it raised, None with an obituary if it is dead."""
        with contextlib.suppress(EOFError, OSError):
            if self.connection.poll():
                answer: tuple[bool, Any] = pickle.loads(self.connection.recv_bytes())
                return answer
        self.process.join(_GRACE_S)
        return None, self.obituary()

    def kill(self) -> None:
        # The rank leads its own process group: what it started goes with it.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid or 0, signal.SIGKILL)
        self.process.kill()  # it may not lead one yet
        self.process.join()
        self.connection.close()

    def dump_stacks(self) -> str:
        if self.process.is_alive():
            os.kill(self.process.pid or 0, signal.SIGUSR1)
            time.sleep(0.3)
        return self.stacks.read_text(errors="replace").strip() or "(no Python stacks)"

    def obituary(self) -> str:
        code = self.process.exitcode or 0
        cause = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        return f"died: {cause}\n{self.stacks.read_text(errors='replace')}"


class RankPool:
    """``world_size`` rank processes reused by many runs; start and ``import torch`` are paid once.

    Each run begins with the same torch seed and a garbage collection. A failed run or a death ends the processes; the
    next run starts new ones.

    ``forked``: the processes are forked off a server that has imported torch, so that a rank is there at once instead of
    after seconds; unless ``env`` has what such a process could not follow. When a forked rank ends, threads
    are joined and the `atexit` functions that it registered run, but modules are not taken apart. Not for measuring memory,
    which is shared then.
    """

    def __init__(
        self,
        world_size: int,
        *,
        backend: str | None = "gloo",
        env: Mapping[str, str] | None = None,
        forked: bool = False,
    ) -> None:
        if world_size < 1:
            raise ValueError(f"world_size must be at least 1, got {world_size}")
        self.world_size = world_size
        self._backend = backend
        self._env = dict(env or {})
        self._forked = forked and all(name.startswith(_READ_LATE) for name in self._env)
        self._ranks: list[_Rank] = []
        self._directory: tempfile.TemporaryDirectory[str] | None = None  # while there are ranks
        # If nobody stops this pool, its end does, or that of the process: before multiprocessing waits for the ranks.
        multiprocessing.util.Finalize(self, _kill_all, (self._ranks,), exitpriority=1)

    def __enter__(self) -> RankPool:  # noqa: PYI034 (typing.Self is newer than Python 3.10)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            self._stop()

    def run(self, fn: Callable[..., Any], *args: Any, timeout_s: float = 60, expect_dead: Collection[int] = ()) -> list:
        """Run ``fn(rank, world_size, *args)`` on every rank; the arguments are those of `run_ranks`."""
        call = pickle.dumps((fn, args))
        if not self._ranks:
            self._start()
        try:
            for rank in self._ranks:
                with contextlib.suppress(OSError):  # it has died since the last run, which is found below
                    rank.connection.send((list(sys.path), call))
            results = self._gather(timeout_s, expect_dead)
        except BaseException:  # an interrupt must not leave ranks behind
            self._stop()
            raise
        if len(results) < self.world_size:
            self._stop()
        return [results.get(rank) for rank in range(self.world_size)]

    def close(self) -> None:
        """End the ranks in an orderly way. Raises `RankFailed` when one does not exit, or not with code 0."""
        failures = {}
        for rank in self._ranks:
            with contextlib.suppress(OSError):
                rank.connection.send(None)
        for index, rank in enumerate(self._ranks):
            rank.process.join(_EXIT_TIMEOUT_S)
            if rank.process.exitcode is None:
                failures[index] = f"did not exit within {_EXIT_TIMEOUT_S:g} s\n{rank.dump_stacks()}"
            elif rank.process.exitcode != 0:
                failures[index] = rank.obituary()
        self._stop()
        if failures:
            raise RankFailed(failures, {}, self.world_size)

    def _start(self) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="bw-ranks-")
        env = {"OMP_NUM_THREADS": "1", **os.environ, **self._env}
        if sys.platform == "linux":  # gloo otherwise resolves the host name, which need not work
            env.setdefault("GLOO_SOCKET_IFNAME", "lo")
        try:
            for index in range(self.world_size):
                stacks = Path(self._directory.name, f"stacks-{index}")
                stacks.touch()
                ours, theirs = multiprocessing.Pipe()
                setup = (theirs, index, self.world_size, self._directory.name, self._backend)
                with theirs:
                    process = start_process(_rank_main, *setup, env=env, forked=self._forked)
                self._ranks.append(_Rank(process, ours, stacks))
            self._gather(_START_TIMEOUT_S, ())
        except BaseException:
            self._stop()
            raise

    def _gather(self, timeout_s: float, expect_dead: Collection[int]) -> dict[int, Any]:
        """Wait for one message per rank. Returns results by rank, without those that were to die; or raises `RankFailed`."""
        results: dict[int, Any] = {}
        failures: dict[int, str] = {}
        waiting = dict(enumerate(self._ranks))
        deadline = time.monotonic() + timeout_s
        waited_for = f"did not finish within {timeout_s:g} s; killed"
        while waiting:
            multiprocessing.connection.wait([rank.connection for rank in waiting.values()], timeout=_POLL_S)
            for index, rank in list(waiting.items()):
                # A process that a dead rank forked may hold the connection open: look at the rank itself too.
                if not rank.connection.poll() and rank.process.is_alive():
                    continue
                del waiting[index]
                is_ok, result = rank.answer()
                if is_ok is None and index in expect_dead:
                    continue
                if is_ok and index not in expect_dead:
                    results[index] = result
                    continue
                failures[index] = "returned, though it was expected to die" if is_ok else result
                if deadline > time.monotonic() + _GRACE_S:
                    deadline = time.monotonic() + _GRACE_S
                    waited_for = f"still running {_GRACE_S:g} s after rank {index} had failed; killed"
            if waiting and time.monotonic() >= deadline:
                failures.update({index: f"{waited_for}\n{rank.dump_stacks()}" for index, rank in waiting.items()})
                break
        if failures:
            raise RankFailed(failures, results, self.world_size)
        return results

    def _stop(self) -> None:
        _kill_all(self._ranks)
        if self._directory is not None:
            self._directory.cleanup()
            self._directory = None


def _kill_all(ranks: list[_Rank]) -> None:
    for rank in ranks:
        rank.kill()
    ranks.clear()


def start_process(target: Callable[..., Any], *args: Any, env: Mapping[str, str], forked: bool) -> BaseProcess:
    """A process that runs ``target(*args)`` with the environment ``env``, as `_run_as_script` says."""
    context: Any = multiprocessing.get_context("forkserver" if forked else "spawn")
    at_start = env
    if forked:
        context.set_forkserver_preload(_PRELOADED)
        # torch in the server, and what is forked off it, has as many threads as the server's environment says.
        at_start = {} if "OMP_NUM_THREADS" in os.environ else {"OMP_NUM_THREADS": env.get("OMP_NUM_THREADS", "1")}
    process: BaseProcess = context.Process(target=_run_as_script, args=(target, args, dict(env), os.getpid(), forked))
    with mock.patch.dict(os.environ, at_start) if at_start else contextlib.nullcontext():
        process.start()
    return process


def _run_as_script(
    target: Callable[..., Any], args: tuple[Any, ...], env: dict[str, str], runner: int, forked: bool
) -> None:
    """It leads a session of its own and dies with its runner (Linux). At the end threads are joined, `atexit`'s functions
    run and streams are flushed. A spawned process then takes its interpreter apart. A forked one does not: it shares the
    pages of torch with the server, and would copy them all to free what is in them, which takes 0.3 s."""
    gc.freeze()  # neither look through what the server has imported nor copy the pages it is in
    server: Any = sys.modules.get("multiprocessing.forkserver")
    if server is not None and server._forkserver._forkserver_alive_fd is not None:
        # The server lives while anybody has this, and the ranks while the server does: it is to be the runner alone.
        os.close(server._forkserver._forkserver_alive_fd)
        server._forkserver._forkserver_alive_fd = None
    os.setsid()
    asked_for = {name: value for name, value in os.environ.items() if name == _ASKED_FOR_AT_IMPORT}
    os.environ.clear()
    os.environ.update({**asked_for, **env})
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if not os.path.exists(f"/proc/{runner}"):  # it died before the line above
            os._exit(1)
    target(*args)
    if not forked:
        ctypes.pythonapi.Py_Exit(0)
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    ctypes.CDLL(None).fflush(None)  # C's streams; multiprocessing flushes Python's


def _rank_main(
    connection: multiprocessing.connection.Connection, rank: int, world_size: int, directory: str, backend: str | None
) -> None:
    """The life of a rank process: join the group, say so, then run what comes until the runner says stop."""
    stacks = open(f"{directory}/stacks-{rank}", "w")  # noqa: SIM115 (faulthandler needs it for the whole life)
    faulthandler.enable(stacks)
    faulthandler.register(signal.SIGUSR1, stacks)
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


def _call(rank: int, world_size: int, is_first: bool, path: list[str], call: bytes) -> Any:
    sys.path[:] = path
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
        torch.exp(torch.ones(1, dtype=torch.float32, device="cpu"))
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
    hung = {rank: thread.ident or 0 for rank, thread in enumerate(threads) if thread.is_alive()}
    stacks = _stacks_of_threads() if hung else {}
    for rank, ident in hung.items():
        failures[rank] = f"did not finish in time; left behind\n{stacks.get(ident, '')}"
    if failures:
        raise RankFailed(dict(failures), dict(results), world_size)
    return [results[rank] for rank in range(world_size)]


def _stacks_of_threads() -> dict[int, str]:
    """The stack of every thread as text, by `threading.get_ident`. In Python 3.11 before 3.11.12, a garbage collection
    inside of `sys._current_frames` that gives up the GIL hangs if another thread begins or ends just then
    (python/cpython#106883)."""
    collects = gc.isenabled()
    gc.disable()
    try:
        frames = sys._current_frames()
    finally:
        if collects:
            gc.enable()
    return {ident: "".join(traceback.format_stack(frame)) for ident, frame in frames.items()}


def assert_bitwise_equal(actual: Any, expected: Any, name: str = "") -> None:
    """Raise AssertionError unless both hold the same bits: tensors, arrays, numbers, or lists, tuples and dicts of
    them.

    Shape and dtype must be equal. +0 differs from -0; any NaN equals any NaN. The message gives the number of differing
    elements and the first of them, in decimal and in hex.
    """
    label = name or "value"
    if isinstance(expected, dict) and isinstance(actual, dict):
        if actual.keys() != expected.keys():
            raise AssertionError(f"{label}: keys are {list(actual)}, expected {list(expected)}")
        for key in expected:
            assert_bitwise_equal(actual[key], expected[key], f"{name}[{key!r}]")
    elif isinstance(expected, (list, tuple)) and isinstance(actual, (list, tuple)):
        if len(actual) != len(expected):
            raise AssertionError(f"{label}: length is {len(actual)}, expected {len(expected)}")
        for index in range(len(expected)):
            assert_bitwise_equal(actual[index], expected[index], f"{name}[{index}]")
    elif isinstance(expected, (str, bytes, type(None))):
        if actual != expected:
            raise AssertionError(f"{label}: actual {actual!r}, expected {expected!r}")
    elif hasattr(expected, "piece") and hasattr(actual, "piece"):  # `TensorShard`
        assert_bitwise_equal(actual.ranges, expected.ranges, f"{name}.ranges")
        _assert_equal_bits(actual.piece, expected.piece, label)
    else:
        _assert_equal_bits(actual, expected, label)


def _assert_equal_bits(actual: Any, expected: Any, label: str) -> None:
    import torch

    a, e = (torch.as_tensor(x).detach().cpu().contiguous() for x in (actual, expected))
    if a.dtype != e.dtype or a.shape != e.shape:
        found, wanted = (f"{x.dtype} {tuple(x.shape)}" for x in (a, e))
        raise AssertionError(f"{label}: actual is {found}, expected {wanted}")
    if a.is_complex():
        a, e = torch.view_as_real(a), torch.view_as_real(e)
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    differs = a.view(bits) != e.view(bits)
    if a.is_floating_point():
        differs &= ~(a.isnan() & e.isnan())
    if not differs.any():
        return
    first = tuple(differs.nonzero()[0].tolist())
    digits = 2 * a.element_size()
    shown = [f"{x[first].item()!r} (0x{int(x.view(bits)[first]) & ((1 << 4 * digits) - 1):0{digits}x})" for x in (a, e)]
    raise AssertionError(
        f"{label}: {int(differs.sum())} of {a.numel()} elements differ, the first at {list(first)}: "
        f"actual {shown[0]}, expected {shown[1]}, {a.dtype}; "
        f"largest difference {(a.double() - e.double()).abs().nan_to_num().max():.3g}"
    )
