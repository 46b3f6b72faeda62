"""`Communicator`: a group of ranks and how they reach each other."""

from __future__ import annotations

import atexit
import contextlib
import itertools
import os
import secrets
import socket
import struct
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from bucketwheel._build import native
from bucketwheel.device import CPU, device_index, torch_device
from bucketwheel.errors import CommError
from bucketwheel.handle import Handle
from bucketwheel.pool import Pool

__all__ = ["Communicator", "LocalRank", "LocalWorld"]

_CREDENTIALS = struct.Struct("iii")  # SO_PEERCRED: pid, uid, gid
_HELLO = struct.Struct("<i16s")  # rank, nonce of the rank that is called
_EXIT_GRACE_S = 2.0
_HELLO_TIMEOUT_S = 1.0

_numbers = itertools.count()
_open_communicators: weakref.WeakSet[Communicator] = weakref.WeakSet()


@dataclass(frozen=True)
class LocalRank:
    """One rank of a `LocalWorld`; pass it to `Communicator` as the group."""

    world: LocalWorld
    rank: int


class LocalWorld:
    """Ranks that are threads of this process.

    >>> world = LocalWorld(4)
    >>> comm = Communicator(world.rank(2))  # in the thread that is rank 2

    Each rank is taken once. ``stages_inputs`` sends tensors through the staging buffers, as between processes (for
    tests).
    """

    def __init__(self, size: int, *, stages_inputs: bool = False) -> None:
        self._native = native().LocalWorld(size, stages_inputs)

    @property
    def size(self) -> int:
        return self._native.world

    def rank(self, rank: int) -> LocalRank:
        """The group argument of the communicator of ``rank``."""
        if not 0 <= rank < self.size:
            raise ValueError(f"rank {rank} is not in a world of {self.size}")
        return LocalRank(self, rank)


class Communicator:
    """A group of ranks that run the same collectives in the same order.

    Args:
        group: a torch ``ProcessGroup`` (only used to get to know each other), a `LocalRank`, or None: the default
            process group if there is one, else a world of one rank.
        backend: ``"shm"``, processes of one host that share memory; ``"local"``, threads of one process; ``"auto"``,
            ``"local"`` for a `LocalRank` and a world of one, else ``"shm"``. Whether all ranks share a host is found
            by trying, and all ranks come to the same result.
        timeout_s: how long an operation waits for its peers, from when the stream reaches it, before it raises
            `CommTimeout`. Also bounds the making of the communicator.
        name: shown in messages; the same on all ranks.
        device: of the tensors, as torch names it; None: the CPU. ``"local"`` is there for CUDA too: the ranks share one
            device, and run their backward in their own threads (``torch.autograd.set_multithreading_enabled(False)``).

    Making one is collective. Raises `ValueError` for bad arguments, `NotImplementedError` when the ranks do not share
    a host.

    An operation that fails (`PeerError`: a peer died or left, `CommTimeout`, `MismatchError`: ranks called different
    operations, or an `abort`) fails the communicator: every later call raises the same error. Bad arguments do not.
    Not usable in a forked child. Thread-safe; the order of the calls is the order of the operations.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | LocalRank | None = None,
        backend: str = "auto",
        *,
        timeout_s: float = 600.0,
        name: str | None = None,
        device: torch.device | str | int | None = None,
    ) -> None:
        if backend not in ("auto", "shm", "local"):
            raise ValueError(f"backend must be 'auto', 'shm' or 'local', got {backend!r}")
        if not timeout_s > 0:
            raise ValueError(f"timeout_s must be positive, got {timeout_s!r}")
        if isinstance(group, LocalRank) or (group is None and not _has_default_group()):
            self._native = _make_alone_or_local(group, backend, timeout_s, name, device_index(device))
        else:
            self._native = _make_of_group(group, backend, timeout_s, name, device_index(device))
        self._pool = Pool.of(self._native.pool)
        _open_communicators.add(self)

    @property
    def rank(self) -> int:
        return self._native.rank

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self._native.world

    @property
    def name(self) -> str:
        return self._native.name

    @property
    def backend(self) -> str:
        """``"shm"`` or ``"local"``."""
        return self._native.backend

    @property
    def device(self) -> int:
        """The index of the CUDA device of its tensors, or -1."""
        return int(self._native.device)

    @property
    def pool(self) -> Pool:
        """Memory that peers read without a staging copy: the place for the inputs of collectives."""
        return self._pool

    @property
    def stream(self) -> Any:
        """The native stream that operations run on unless told otherwise."""
        return self._native.stream

    @property
    def max_payload_bytes(self) -> int:
        """Most bytes that `post` takes."""
        return native().MAX_PAYLOAD_BYTES

    def post(self, payload: bytes) -> None:
        """Give this rank's payload of one round of agreement between the hosts; lengths may differ between ranks.

        Beside the stream: neither waits for operations nor holds them up. `ValueError` when too long, or when the
        round before has not been collected.
        """
        self._native.post(bytes(payload))

    def collect(self, timeout: float | None = None) -> list[bytes]:
        """Block until all ranks have posted; their payloads by rank.

        Fails like an operation. `CommTimeout` after ``timeout`` seconds if given, which leaves the round open.
        """
        return self._native.collect(timeout)

    def exchange(self, payload: bytes) -> list[bytes]:
        """`post` and `collect`. Ctrl-C ends the wait, and aborts: the peers will find this rank at no later round."""
        self._native.post(bytes(payload))
        try:
            return self._native.collect()
        except CommError:
            raise
        except BaseException as error:  # raised by a signal handler
            self.abort(f"{type(error).__name__} while it waited for the others")
            raise

    def all_gather_into(self, full: torch.Tensor, shard: torch.Tensor, *, after: Sequence[Handle] = ()) -> Handle:
        """`all_gather` of one tensor that does not tell autograd about the write: for buffers that nobody saves."""
        return Handle(self._native.all_gather([full], [shard], after=_natives(after)), self)

    def broadcast_into(self, tensor: torch.Tensor, root: int, *, after: Sequence[Handle] = ()) -> Handle:
        """Make ``tensor`` (contiguous) what it is on rank ``root``. Does not tell autograd about the write."""
        return Handle(self._native.broadcast(tensor, root, after=_natives(after)), self)

    def reduce_scatter_into(self, full: torch.Tensor, sink: Any, *, after: Sequence[Handle] = ()) -> Handle:
        """Sum ``full`` over the ranks and feed this rank's part to ``sink`` (a native ``ReduceSink``), in fp32 blocks."""
        return Handle(self._native.reduce_scatter_to_sink(full, sink, after=_natives(after)), self)

    def abort(self, why: str) -> None:
        """Fail the communicator on every rank: their next wait raises `CommError` with ``why``. Never blocks."""
        self._native.abort(why)

    def close(self, timeout: float | None = None) -> None:
        """Wait for the operations in flight and say goodbye to the peers. Later calls raise `ClosedError`. Idempotent.

        Operations that still run after ``timeout`` seconds fail. Results that are complete stay valid, and so do
        leases of the pool.
        """
        self._native.close(timeout)

    def __enter__(self) -> Communicator:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if kind is not None:
            self.abort(f"{kind.__name__}: {error}")
        self.close()

    def __repr__(self) -> str:
        return f"Communicator({self.name!r}, rank {self.rank}/{self.size}, {self.backend})"


def _natives(handles: Sequence[Handle]) -> list[Any]:
    return [handle._native for handle in handles]


def _has_default_group() -> bool:
    return dist.is_available() and dist.is_initialized()


def _make_alone_or_local(group: LocalRank | None, backend: str, timeout_s: float, name: str | None, device: int) -> Any:
    if device != CPU and backend == "shm":
        raise ValueError("backend 'shm' is for CPU tensors")
    if group is None and backend == "shm":
        return native().make_shm_comm(0, [-1], [os.getpid()], name or _default_name("shm"), timeout_s)
    if backend == "shm":
        raise ValueError("backend 'shm' takes a process group, got a LocalRank")
    place = group if group is not None else LocalWorld(1).rank(0)
    if device != CPU:
        pool = Pool(device=torch_device(device))
        return place.world._native.join_cuda(place.rank, name or "local", timeout_s, pool._native)
    return place.world._native.join(place.rank, name or "local", timeout_s)


def _default_name(backend: str) -> str:
    return f"{backend}{next(_numbers)}"


def _make_of_group(
    group: dist.ProcessGroup | None, backend: str, timeout_s: float, name: str | None, device: int
) -> Any:
    if group is not None and not isinstance(group, dist.ProcessGroup):
        raise TypeError(f"group must be a torch ProcessGroup, a LocalRank or None, got {type(group).__name__}")
    if backend == "local":
        raise ValueError("backend 'local' takes a rank of a LocalWorld as its group")
    if dist.get_world_size(group) == 1:
        return _make_alone_or_local(None, backend, timeout_s, name, device)
    if device != CPU:
        raise NotImplementedError(
            "CUDA tensors over a process group need the nccl backend, which is not implemented yet"
        )
    return _Meeting(group, timeout_s, name or "").native_comm()


class _Meeting:
    """How the ranks of a process group get connected: who is where goes through the group, the rest over Unix sockets.

    Names in the abstract namespace are random and end with their socket. Each end checks the other's credentials, so
    that the process at the other end is the one that the group speaks of. All ranks come to the same result: what
    fails on one is told to all through the group.
    """

    def __init__(self, group: dist.ProcessGroup | None, timeout_s: float, name: str) -> None:
        self.group = group
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        self.timeout_s = timeout_s
        self.deadline = time.monotonic() + timeout_s
        self.name = name
        self.nonce = secrets.token_bytes(16)
        self.peers: list[dict[str, Any]] = []
        self.sockets: dict[int, socket.socket] = {}

    def native_comm(self) -> Any:
        with contextlib.ExitStack() as stack:
            stack.callback(self._close_sockets)
            listener = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            address = f"\0bucketwheel-{secrets.token_hex(16)}"
            listener.bind(address)
            listener.listen(self.size)
            me = {"address": address, "nonce": self.nonce, "pid": os.getpid(), "uid": os.getuid(), "name": self.name}
            me["default_name"] = _default_name("shm")
            self.peers = self._all_gather(me)
            self._expect_equal_names()
            # Connecting needs no accept() on the other side: a listening socket queues it.
            self._agree(self._attempt(self._call_lower_ranks))
            self._agree(self._attempt(self._accept_higher_ranks, listener))
            comm: list[Any] = []
            failure = self._attempt(lambda: comm.append(self._make()))
            try:
                self._agree(failure, CommError)
            except BaseException:
                for made in comm:
                    made.close(0.0)
                raise
            return comm[0]

    def _close_sockets(self) -> None:
        for call in self.sockets.values():
            call.close()

    def _make(self) -> Any:
        name = self.peers[0]["name"] or self.peers[0]["default_name"]
        fds = [self.sockets[r].detach() if r != self.rank else -1 for r in range(self.size)]
        self.sockets.clear()
        pids = [peer["pid"] for peer in self.peers]
        return native().make_shm_comm(self.rank, fds, pids, name, self.timeout_s)

    def _all_gather(self, mine: Any) -> list[Any]:
        everyone: list[Any] = [None] * self.size
        dist.all_gather_object(everyone, mine, group=self.group)
        return everyone

    def _expect_equal_names(self) -> None:
        names = [peer["name"] for peer in self.peers]
        if len(set(names)) != 1:
            raise ValueError(f"ranks gave different names to one communicator: {names}")

    @staticmethod
    def _attempt(step: Any, *args: Any) -> str:
        """What went wrong in ``step``; empty if nothing did."""
        try:
            step(*args)
        except (OSError, CommError) as error:
            return f"{type(error).__name__}: {error}"
        return ""

    def _agree(self, failure: str, raises: type[Exception] = NotImplementedError) -> None:
        failures = {rank: text for rank, text in enumerate(self._all_gather(failure)) if text}
        if failures:
            listed = "".join(f"\n  rank {rank}: {text}" for rank, text in failures.items())
            if raises is NotImplementedError:
                raise NotImplementedError(
                    "the ranks do not all share a host (or its network and process namespaces), which backend 'shm' needs; "
                    f"the c10d backend, for any process group, comes later{listed}"
                )
            raise raises(f"the communicator could not be made on all ranks{listed}")

    def _call_lower_ranks(self) -> None:
        for rank in range(self.rank):
            peer = self.peers[rank]
            call = self.sockets[rank] = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            call.settimeout(max(self.deadline - time.monotonic(), 0.001))
            call.connect(peer["address"])
            if not self._is_peer(call, peer):
                raise ConnectionRefusedError(
                    f"the socket of rank {rank} belongs to another process than pid {peer['pid']}"
                )
            call.send(_HELLO.pack(self.rank, peer["nonce"]))

    def _accept_higher_ranks(self, listener: socket.socket) -> None:
        while len(self.sockets) < self.size - 1:
            listener.settimeout(max(self.deadline - time.monotonic(), 0.001))
            call, _ = listener.accept()
            call.settimeout(_HELLO_TIMEOUT_S)  # a peer sends its hello before anybody accepts
            rank = self._caller(call)
            if rank is None:
                call.close()  # some other process of this host
            else:
                self.sockets[rank] = call

    def _caller(self, call: socket.socket) -> int | None:
        try:
            hello = call.recv(_HELLO.size)
        except OSError:
            return None
        if len(hello) != _HELLO.size:
            return None
        rank, nonce = _HELLO.unpack(hello)
        is_expected = self.rank < rank < self.size and rank not in self.sockets and nonce == self.nonce
        return rank if is_expected and self._is_peer(call, self.peers[rank]) else None

    @staticmethod
    def _is_peer(call: socket.socket, peer: dict[str, Any]) -> bool:
        pid, uid, _ = _CREDENTIALS.unpack(call.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
        return pid == peer["pid"] and uid == peer["uid"] == os.getuid()


def _close_all() -> None:
    """Ends what is in flight before the interpreter goes: what operations keep alive may need it to be freed."""
    for communicator in list(_open_communicators):
        communicator.close(_EXIT_GRACE_S)


atexit.register(_close_all)
