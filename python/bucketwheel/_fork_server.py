"""A process that has imported torch and forks ranks of it, so that a rank is there at once instead of after seconds.

The module is both sides: imported, what asks (`fork`); run as a script, the server. The script imports nothing of
bucketwheel, so its children do that themselves, under their own environment. A child goes on behind the server's loop
and ends as a script does, with everything that an interpreter does at its end.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from typing import Any, NoReturn

_MAX_MESSAGE_BYTES = 1 << 17
_POLL_S = 0.05
# What a child may have otherwise than the server: read by what it imports or calls itself.
_OWN_VARIABLES = ("BW_", "GLOO_", "NCCL_", "PYTEST_")
# Not with this file's folder in the path, whose modules are no top-level ones.
_SCRIPT = "import sys; del sys.path[0]; import runpy; runpy.run_path(sys.argv[1], run_name='__main__')"

# The third is what the first optimizer of a process imports, any of torch's: as long as torch itself takes.
_IMPORTED = ("torch", "torch.distributed", "torch._dynamo", "numpy")

_servers: dict[int, _Server] = {}  # by the process that asks: a forked one has its own
_lock = threading.Lock()


class ForkedProcess:
    """What `subprocess.Popen` has, of a child of the server: ``pid``, ``poll``, ``wait`` and ``send_signal``."""

    def __init__(self, server: _Server, pid: int) -> None:
        self._server = server
        self.pid = pid

    def poll(self) -> int | None:
        """The exit code, minus the signal's number after one; None while the process runs."""
        return self._server.code_of(self.pid)

    def wait(self, timeout: float | None = None) -> int:
        deadline = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if deadline is not None and time.monotonic() >= deadline:
                raise subprocess.TimeoutExpired(f"forked process {self.pid}", timeout or 0.0)
            self._server.await_news(_POLL_S)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)


def fork(code: str, fd: int, env: dict[str, str]) -> ForkedProcess | None:
    """A process with torch imported that runs ``code`` as its script, where ``fd`` is the descriptor of that number here.

    It has the environment ``env`` and this process's ``sys.path``, leads a session of its own, and its parent is the
    process ``server`` (``server`` and ``fd`` are names in ``code``). None if ``env`` has what only a process that
    starts with it can follow, or more than a message holds.
    """
    with _lock:
        server = _servers.get(os.getpid())
        is_alive = server is not None and server.is_alive()
        base = server.env if server is not None and is_alive else default_env()
        if any(base.get(v) != env.get(v) and not v.startswith(_OWN_VARIABLES) for v in base.keys() | env.keys()):
            return None
        if server is None or not is_alive:
            server = _servers[os.getpid()] = _Server(base)
        return server.fork(code, fd, env)


def default_env() -> dict[str, str]:
    """Of rank processes: this process's, with one thread for each rank unless it says more."""
    return {"OMP_NUM_THREADS": "1", **os.environ}


@atexit.register
def _end_server() -> None:
    if (server := _servers.pop(os.getpid(), None)) is not None:
        server.end()


class _Server:
    """One server and its children, as the process that asks sees them. Thread-safe."""

    def __init__(self, env: dict[str, str]) -> None:
        self.env = env
        self._lock = threading.Lock()
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._codes: dict[int, int] = {}
        self._asked = 0  # how often
        with theirs:
            setup = json.dumps({"fd": theirs.fileno(), "parent": os.getpid(), "path": sys.path, "imported": _IMPORTED})
            self._process = subprocess.Popen(
                [sys.executable, "-c", _SCRIPT, __file__, setup],
                env=env,
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # not interrupted with the process that asks
            )

    def end(self) -> None:
        self._socket.shutdown(socket.SHUT_WR)  # it then leaves, and ranks die with it
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(5.0)

    def is_alive(self) -> bool:
        return self._process.poll() is None

    def fork(self, code: str, fd: int, env: dict[str, str]) -> ForkedProcess | None:
        with self._lock:
            self._asked = number = self._asked + 1
            call = {"code": code, "env": env, "path": sys.path, "number": number}
            request = json.dumps(call).encode()
            if len(request) > _MAX_MESSAGE_BYTES:
                return None
            socket.send_fds(self._socket, [request], [fd])
            while (news := self._read()).get("number") != number:  # perhaps the answer to one that was interrupted
                pass
        return ForkedProcess(self, news["pid"])

    def code_of(self, pid: int) -> int | None:
        with self._lock:
            self._read_all()
            return self._codes.get(pid, None if self.is_alive() else -signal.SIGKILL)

    def await_news(self, seconds: float) -> None:
        """Returns once there may be some."""
        _has_message(self._socket, seconds)

    def _read_all(self) -> None:
        with contextlib.suppress(ConnectionError):  # the server is gone: `is_alive` says so
            while _has_message(self._socket, 0.0):
                self._read()

    def _read(self) -> dict[str, int]:
        """One message: a child was forked; or one has ended, which is kept."""
        message = self._socket.recv(_MAX_MESSAGE_BYTES)
        if not message:
            raise ConnectionError(f"the fork server ended with {self._process.wait()}")
        news: dict[str, int] = json.loads(message)
        if "code" in news:
            self._codes[news["pid"]] = news["code"]
        else:
            self._codes.pop(news["pid"], None)  # of an earlier process of that number
        return news


def _has_message(connection: socket.socket, seconds: float) -> bool:
    """Waits for one so long."""
    poll = select.poll()  # descriptors may be past what select() takes
    poll.register(connection, select.POLLIN)
    return bool(poll.poll(1000 * seconds))


# --- the server -------------------------------------------------------------------------------------------------------


def _serve(connection: socket.socket, parent: int) -> dict[str, Any]:
    """Forks until nobody asks any more; returns in each child, with what it is to run."""
    children: dict[int, int] = {}  # with the number of the call
    while os.getppid() == parent:
        if _has_message(connection, _POLL_S):
            request, fds, _, _ = socket.recv_fds(connection, _MAX_MESSAGE_BYTES, 1)
            if not request:
                break
            call, server = json.loads(request), os.getpid()
            child = os.fork()
            if child == 0:
                os.setsid()  # before the answer: who has it may end the group
                connection.send(json.dumps({"pid": os.getpid(), "number": call["number"]}).encode())
                connection.close()
                return {**call, "fd": fds[0], "server": server}
            os.close(fds[0])
            children[child] = call["number"]
        for child in list(children):
            pid, status = os.waitpid(child, os.WNOHANG)
            if pid:  # perhaps before it has answered
                news = {"pid": pid, "number": children.pop(pid), "code": os.waitstatus_to_exitcode(status)}
                connection.send(json.dumps(news).encode())
    _leave()


def _leave() -> NoReturn:
    os._exit(0)  # nothing here is to be done at exit


def _main(setup: dict[str, Any]) -> dict[str, Any]:
    sys.path[:] = setup["path"]
    for name in setup["imported"]:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    gc.freeze()  # children neither look through all of that nor copy the pages it is in
    with contextlib.suppress(ConnectionError):
        call = _serve(socket.socket(fileno=setup["fd"]), setup["parent"])
        os.environ.clear()
        os.environ.update(call["env"])
        sys.path[:] = call["path"]
        return call
    _leave()


if __name__ == "__main__":
    _call = _main(json.loads(sys.argv[2]))
    exec(_call["code"], {"__name__": "__main__", "fd": _call["fd"], "server": _call["server"]})
