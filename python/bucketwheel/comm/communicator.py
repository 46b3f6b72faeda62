"""`Communicator`: a group of ranks and how they reach each other."""

from __future__ import annotations

import atexit
import contextlib
import functools
import itertools
import json
import secrets
import time
import weakref
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from bucketwheel.comm import nccl, patience
from bucketwheel.comm.arguments import (
    as_moved,
    native_op_of,
    natives_of,
    payload_of,
    seconds_of,
    warn_of_rounded_average,
)
from bucketwheel.comm.backends import LocalRank, RankGroup, agreed_name, expect_group
from bucketwheel.comm.handle import Handle
from bucketwheel.comm.nccl import NcclChoices, NcclSetup
from bucketwheel.device import CPU, device_index, device_named, native_stream, torch_device
from bucketwheel.errors import Error, expect_int
from bucketwheel.native import core
from bucketwheel.native.modules import native
from bucketwheel.pool.plan import Plan
from bucketwheel.pool.pool import Pool
from bucketwheel.torch_internals import increment_version, keep_out_of_graphs, timeout_of

_USUAL_S = 600.0  # where no process group has a timeout
_LONGEST_S = 365.0 * 86_400.0  # as in the bindings' expect_timeout


_numbers = itertools.count()
_open_communicators: weakref.WeakValueDictionary[int, Communicator] = weakref.WeakValueDictionary()


class Communicator:
    """A group of ranks that run the same collectives in the same order.

    Args:
        group: a torch ``ProcessGroup`` (only used to get to know each other), a `LocalRank`, or None: the default
            process group if there is one, else a world of one rank.
        backend: ``"shm"``, processes of one host that share memory; ``"local"``, threads of one process; ``"nccl"``,
            CUDA tensors of processes on any number of hosts, each with a GPU; ``"c10d"``, CPU tensors of processes on any
            hosts, over a process group of torch's that is this communicator's alone: of the backend that ``group`` has
            for the CPU if it was registered with torch, else gloo; ``"auto"``, ``"local"`` for a `LocalRank` and a
            world of one, ``"nccl"`` on CUDA, and on the CPU ``"shm"``, or ``"c10d"`` where not all ranks can share
            memory. That is found by trying, and all ranks come to the same result.
        timeout_s: how long an operation waits for its peers, from when the stream reaches it, before it raises
            `CommTimeout`; a year at most. None: the timeout of ``group`` (``init_process_group(timeout=...)``), 600 where it
            has none. Also bounds the making of the communicator; who has not come by then is named some seconds later.
            After 10, 20, 40 s of any wait a line on stderr names those that are missing.
        name: shown in messages; the same on all ranks.
        device: of the tensors, as torch names it; None: the CPU. ``"local"`` is there for CUDA too: the ranks share one
            device, and run their backward in their own threads (``torch.autograd.set_multithreading_enabled(False)``).
        max_ctas, cta_policy: NCCL's (ncclConfig_t): most blocks of a kernel; ``"default"``, ``"efficiency"`` or ``"zero"``
            (all-gathers by the copy engines; needs ``registered``). Its other settings are NCCL's own environment
            variables (``NCCL_NET``, ``NCCL_MIN_CTAS``, ``NCCL_IB_TC``, ...). ``NCCL_COMM_BLOCKING=0`` is refused: a call of
            NCCL ends before it returns, and one that hangs is left behind in its thread at the time limit.
        registered: `pool` is memory that NCCL can register (`register_pool`). NCCL 2.27 or newer.

    Making one is collective. Raises `ValueError` for bad arguments, `BuildError` when CUDA is asked for and its module
    neither is there nor can be built, `DeviceError` when there is no NCCL to use, `CommError` or `CommTimeout` when it
    cannot be made on all ranks (``"shm"``: also when they cannot share memory). NCCL's communicators have the
    library that torch loaded, or the one that ``BW_NCCL_LIB`` names; calls of torch's own NCCL process groups must come
    from the same thread as ours, in the same order on all ranks.

    An operation that fails (`PeerError`: a peer died or left, `CommTimeout`, `MismatchError`: ranks called different
    operations, or an `abort`) fails the communicator: every later call raises the same error, whose attributes
    (`CommError`) tell what failed. Bad arguments do not. Not usable in a forked child. Thread-safe; the order of the
    calls is the order of the operations.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | LocalRank | None = None,
        backend: str = "auto",
        *,
        timeout_s: float | None = None,
        name: str | None = None,
        device: torch.device | str | int | None = None,
        max_ctas: int | None = None,
        cta_policy: str | None = None,
        registered: bool = False,
    ) -> None:
        _expect_arguments(group, backend, timeout_s, name, device)
        native()  # a first use builds it, before the others' time runs
        index = device_index(device)
        timeout_s = _limit_s(timeout_s, group, backend, index)
        choices = NcclChoices(max_ctas, cta_policy, registered)
        ranks = RankGroup.of(group, backend, timeout_s)
        self._finish(ranks.make(index, name, choices), ranks, choices)

    def _finish(self, native_comm: Any, ranks: RankGroup, choices: NcclChoices) -> Communicator:
        self._native = native_comm
        self._natives = (native_comm,)
        self._exchange = native_comm.exchange
        native_comm.report_after(patience.PATIENCE.report_s)
        self._ranks = ranks
        self._choices = choices
        self._gathers: Communicator | None = None
        self._has_reduces = True
        self._overlaps = False
        self._pool = Pool._of(native_comm.pool, is_cache=not choices.registered)
        _open_communicators[next(_numbers)] = self
        _close_all_at_exit()
        keep_out_of_graphs()
        return self

    @classmethod
    def pair(
        cls,
        group: dist.ProcessGroup | None = None,
        *,
        device: torch.device | str | int = "cuda",
        timeout_s: float | None = None,
        name: str | None = None,
        max_ctas: int | None = None,
        cta_policy: str | None = None,
        registered: bool = False,
    ) -> tuple[Communicator, Communicator]:
        """Two NCCL communicators over the same ranks: one for all-gathers, one for reduce-scatters, which then overlap.

        NCCL runs the operations of one communicator one after the other, whatever streams they are in. The two share
        agreement (`post`, `collect`); a failure of one is one of both. Their names end in ``/ag`` and ``/rs``.
        Every rank issues the operations of both in one order. ``max_ctas`` small enough for both kernels to be on the
        device (8 and 16, say) lets them run at once.

        Where NCCL may have launched before bucketwheel was imported, without ``NCCL_LAUNCH_ORDER_IMPLICIT=1``, this
        warns, and the operations of the two take turns. So they do, which ``features["overlap"]`` tells, where
        ``NCCL_COMM_SPLIT_SHARE_RESOURCES=1`` has NCCL share the resources of what is split.
        """
        _expect_arguments(group, "nccl", timeout_s, name, device)
        index = device_index(device)
        timeout_s = _limit_s(timeout_s, group, "nccl", index)
        choices = NcclChoices(max_ctas, cta_policy, registered)
        ranks = RankGroup.of(group, "nccl", timeout_s)
        assert ranks.rendezvous is not None
        agreed = agreed_name(ranks.rendezvous, name)
        natives, overlaps = nccl.pair(NcclSetup(ranks.rendezvous, index, agreed, timeout_s, choices))
        gathers, reduces = (cls.__new__(cls)._finish(one, ranks, choices) for one in natives)
        reduces._gathers = gathers
        gathers._has_reduces = False
        gathers._overlaps = reduces._overlaps = overlaps
        return gathers, reduces

    def split(self, color: int, key: int = 0, *, name: str | None = None) -> Communicator | None:
        """A communicator of the ranks that give the same ``color``; None where it is negative. Collective.

        New ranks are in the order of ``key``, then of the old ones. Device, options and time limit are this one's, and so is
        the backend; ``"auto"`` looks anew, since of hosts apart those of one may share memory. Nothing else is shared.
        """
        color, key = expect_int(color, "color", "a number"), expect_int(key, "key", "a number")
        _expect_name(name)
        number = next(self._ranks.splits)
        token = secrets.token_hex(8)
        everyone = [json.loads(other) for other in self.exchange(json.dumps([color, key, token]).encode())]
        members = sorted((theirs[1], rank) for rank, theirs in enumerate(everyone) if theirs[0] == color)
        ranks = [rank for _, rank in members]
        part = self._ranks.part(self, ranks if color >= 0 else [], f"{number}/{color}", everyone[ranks[0]][2])
        name = name or f"{self.name}.{number}.{color}"
        if self.backend == "nccl":
            made = self._split_nccl(part, color, ranks.index(self.rank), name)
        else:
            with self._aborting_when_interrupted("split"):
                made = part.make(self.device, name, self._choices) if part is not None else None
        return None if part is None else type(self).__new__(type(self))._finish(made, part, self._choices)

    def _split_nccl(self, part: RankGroup | None, color: int, key: int, name: str) -> Any:
        timeout_s = self._ranks.timeout_s
        try:
            if part is None or part.rendezvous is None:  # takes part in the call of the others
                return self._native.split(None, color, key, self._choices.native(self.device), timeout_s)
            setup = NcclSetup(part.rendezvous, self.device, name, timeout_s, self._choices)
            return nccl.split(self._native, setup, color, key)
        except BaseException as error:  # ranks of any color may wait for this one inside NCCL
            self.abort(f"split: {type(error).__name__}: {error}")
            raise

    @property
    def rank(self) -> int:
        """This rank's number in the communicator, from 0."""
        return self._native.rank

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self._native.world

    @property
    def name(self) -> str:
        """What messages and flight rings call it; the same on all ranks."""
        return self._native.name

    @property
    def backend(self) -> str:
        """``"shm"``, ``"local"``, ``"nccl"`` or ``"c10d"``."""
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
    def features(self) -> dict[str, Any]:
        """What this communicator does. Of NCCL: its version (``"nccl"``), whether it made windows of the pool's memory
        (``"windows"``; 2.28.9 does so between hosts too), whether all-gathers may use the copy engines
        (``"copy_engines"``), whether averages of what lies in the pool are made in float32, not in the dtype of the tensors
        (``"symmetric_avg"``), whether it overlaps with the other of its pair (``"overlap"``). Of a pair, all-gathers are
        those of `gathers`, and averages those of the other one. Between hosts the second and third are not certain."""
        if self.backend != "nccl":
            return {}
        has_gathers = self._gathers is None
        return nccl.features(
            self._native, self._choices, has_gathers=has_gathers, has_reduces=self._has_reduces, overlaps=self._overlaps
        )

    def register_pool(self) -> int:
        """Make registered memory of what the pool got from the system since the last time; how many slabs NCCL accepted.

        Collective, and only for ``registered=True``: all ranks must have made the same acquires in one order, and every
        tensor of an operation must lie at the same place on all ranks (``BW_COMM_CHECK=1`` verifies that).
        """
        if not self._choices.registered:
            return 0
        with self._aborting_when_interrupted("register_pool"):
            return int(self._native.register_pool())

    @property
    def timeout_s(self) -> float:
        """How long an operation waits for its peers, in seconds."""
        return self._ranks.timeout_s

    @property
    def stream(self) -> Any:
        """The native stream that operations run on unless told otherwise."""
        return self._native.stream

    @property
    def gathers(self) -> Communicator:
        """Where this rank's all-gathers and broadcasts overlap its reduce-scatters: the other of a pair, else this one."""
        return self if self._gathers is None else self._gathers

    @property
    def is_registered(self) -> bool:
        """Whether the pool's memory is for `register_pool`: then all ranks must acquire in one order."""
        return self._choices.registered

    @property
    def max_payload_bytes(self) -> int:
        """Most bytes that `post` takes."""
        return core.MAX_PAYLOAD_BYTES

    def post(self, payload: bytes) -> None:
        """Give this rank's payload of one round of agreement between the hosts; lengths may differ between ranks.

        Beside the stream: neither waits for operations nor holds them up. `ValueError` when too long, or when the
        round before has not been collected.
        """
        self._native.post(payload if type(payload) is bytes else payload_of(payload))

    def collect(self, timeout: float | timedelta | None = None) -> list[bytes]:
        """Block until all ranks have posted; their payloads by rank.

        Fails like an operation. `CommTimeout` after ``timeout`` seconds if given, which leaves the round open.
        """
        return self._native.collect(None if timeout is None else seconds_of(timeout))

    def exchange(self, payload: bytes) -> list[bytes]:
        """`post` and `collect`. Ctrl-C ends the wait, and aborts: the peers will find this rank at no later round."""
        return self._native.exchange(payload if type(payload) is bytes else payload_of(payload))

    @contextlib.contextmanager
    def _aborting_when_interrupted(self, where: str) -> Iterator[None]:
        """What a signal handler raises ends a wait: the peers will not find this rank where they wait for it."""
        try:
            yield
        except (Error, ValueError):
            raise
        except BaseException as error:
            self.abort(f"{type(error).__name__} in {where}, while it waited for the others")
            raise

    # --- collectives of one tensor; those of lists are `all_gather` and `reduce_scatter` -------------------------------

    def all_reduce(
        self,
        tensor: torch.Tensor,
        op: Any = "sum",
        *,
        stream: Any = None,
        after: Sequence[Handle] = (),
        timing: bool = False,
    ) -> Handle:
        """Make ``tensor`` on every rank the sum of all ranks' (``op``: as in `reduce_scatter`), in place. Collective.

        Order and rounding of the sums are those of `reduce_scatter`; all ranks get the same bits. So do dtypes, streams,
        ordering and errors, except that it counts as up to three operations: `Handle.seq` is that of the last, and a
        `MismatchError` calls them by their names.

        Args:
            tensor: contiguous, of any shape, on the communicator's device.
        """
        native_op = native_op_of(op)
        if native_op == "avg":
            warn_of_rounded_average(self, [tensor])
        native_stream_or_none = None if stream is None else native_stream(stream)
        handle = self._native.all_reduce(tensor, native_op, native_stream_or_none, natives_of(after), not not timing)
        increment_version([tensor])
        return Handle(handle, self)

    def broadcast(
        self,
        tensor: torch.Tensor,
        src: int = 0,
        *,
        stream: Any = None,
        after: Sequence[Handle] = (),
        timing: bool = False,
    ) -> Handle:
        """Make ``tensor`` on every rank what it is on rank ``src`` of this communicator, in place. Collective; one operation,
        in `gathers`. Streams, ordering and errors are as in `all_gather`.

        Args:
            tensor: contiguous, of any shape and dtype, on the communicator's device.
        """
        comm = self.gathers
        root = expect_int(src, "src", f"a rank, 0 to {self.size - 1}")
        options = (root, None if stream is None else native_stream(stream), natives_of(after), not not timing)
        try:
            handle = comm._native.broadcast(tensor, *options)
        except TypeError:
            handle = comm._native.broadcast(as_moved(tensor, "tensor"), *options)
        increment_version([tensor])
        return Handle(handle, comm)

    def barrier(self, timeout: float | timedelta | None = None) -> Handle:
        """Block the host until every rank has called this, and what it has enqueued before is done: on the CPU the operations
        of this communicator, on CUDA what is in torch's current stream too. Collective; one operation, whose handle is
        returned when it is over. `CommTimeout` after ``timeout`` (seconds), which leaves it running.
        """
        seconds = seconds_of(timeout)  # before anything is enqueued
        if seconds is not None and not seconds >= 0:
            raise ValueError(f"timeout must be at least 0 seconds, got {timeout!r}")
        flags = torch.empty(self.size, dtype=torch.uint8, device=torch_device(self.device))
        with core.PublicCall(self._natives, "Communicator.barrier"):
            return Handle(self._native.all_gather([flags], [flags[self.rank : self.rank + 1]]), self).synchronize(
                seconds
            )

    # --- what the optimizer uses: nothing here tells autograd about a write -------------------------------------------

    def _all_gather_into(self, full: torch.Tensor, shard: torch.Tensor) -> Handle:
        """`all_gather` of one tensor, in `gathers`."""
        comm = self.gathers
        return Handle(comm._native.all_gather([full], [shard]), comm)

    # --- as a `Reducer` (comm/replicas.py) without replicas ----------------------------------------------------------

    @property
    def _replicate(self) -> Communicator | None:
        return None

    def _reducers(self) -> tuple[list[Any], Any, bool, bool]:
        return [self._native], None, False, False

    def _plan_sums(self, shards: Sequence[tuple[int, torch.dtype]], limit: int) -> Plan:
        """Sums are whole after one operation."""
        return Plan.of_turns("sums", [], [])

    def _release(self) -> None:
        """The communicator stays open."""

    # --- its end -----------------------------------------------------------------------------------------------------

    def abort(self, reason: str) -> None:
        """Fail the communicator on every rank: the next wait raises with ``reason``, `CommError` here and on the others
        `PeerError` with this rank. Never blocks."""
        self._native.abort(str(reason))

    def close(self, timeout: float | timedelta | None = None) -> None:
        """Wait for the operations in flight and say goodbye to the peers. Later calls raise `ClosedError`. Idempotent.

        Operations that still run after ``timeout`` seconds fail. Results that are complete stay valid, and so do
        leases of the pool. CUDA graphs that contain operations of an NCCL communicator go first: NCCL waits for them.
        Peers that are still behind get all that they need of this rank.
        """
        self._native.close(seconds_of(timeout))

    def __enter__(self) -> Communicator:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if kind is not None:
            self.abort(f"{kind.__name__}: {error}")
        self.close()

    def __repr__(self) -> str:
        return f"Communicator({self.name!r}, rank {self.rank}/{self.size}, {self.backend})"


def _expect_arguments(
    group: Any, backend: str, timeout_s: Any, name: str | None, device: torch.device | str | int | None
) -> None:
    if backend not in ("auto", "shm", "local", "nccl", "c10d"):
        raise ValueError(f"backend must be 'auto', 'shm', 'local', 'nccl' or 'c10d', got {backend!r}")
    seconds = seconds_of(timeout_s, "timeout_s")
    if seconds is not None and not seconds > 0:
        raise ValueError(f"timeout_s must be positive, got {timeout_s!r}")
    if isinstance(group, LocalRank) and backend in ("shm", "nccl", "c10d"):
        raise ValueError(f"backend {backend!r} takes a process group, got a LocalRank")
    expect_group(group, "group")
    _expect_name(name)
    if backend in ("shm", "c10d") and device is not None and device_named(device).type != "cpu":
        raise ValueError(f"backend {backend!r} is for CPU tensors, not device {str(device)!r}")


def _limit_s(asked: float | timedelta | None, group: Any, backend: str, device: int) -> float:
    """The time limit, of what clocks, sockets and torch take. ValueError for NCCL without a GPU."""
    if backend == "nccl" and device == CPU:
        raise ValueError("backend 'nccl' is for CUDA tensors: pass device='cuda'")
    if asked is None and not isinstance(group, LocalRank) and dist.is_available() and dist.is_initialized():
        asked = timeout_of(group, torch_device(device))
    seconds = seconds_of(asked)
    return min(_USUAL_S if seconds is None else seconds, _LONGEST_S)


def _expect_name(name: str | None) -> None:
    if name is not None and not isinstance(name, str):
        raise TypeError(f"name is {name!r}, expected a string or None")


def _close_all() -> None:
    """Ends what is in flight before the interpreter goes: what operations keep alive may need it to be freed.

    Ctrl-C ends the waiting, not the closing.
    """
    with contextlib.ExitStack() as stack:
        stack.callback(core.stop_freeing)
        stack.callback(_close_open, 0.0)
        _close_open(patience.PATIENCE.exit_s)


def _close_open(grace_s: float) -> None:
    """In the order of the making, the same on all ranks: the end of an NCCL communicator waits for that of the others'."""
    until = time.monotonic() + grace_s
    for _, communicator in sorted(_open_communicators.items()):
        with contextlib.suppress(Error):  # one that has failed must not keep the others open
            communicator.close(max(until - time.monotonic(), 0.0))


@functools.cache
def _close_all_at_exit() -> None:
    atexit.register(_close_all)
