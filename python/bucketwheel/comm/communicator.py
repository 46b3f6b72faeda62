"""`Communicator`: a group of ranks that run collectives together."""

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
    """A group of ranks that run the same collectives in the same order. The constructor is collective.

    The backend decides how data moves between the ranks:

    - ``"shm"``: CPU tensors; the ranks are processes of one host and share memory.
    - ``"c10d"``: CPU tensors; the ranks are processes of any hosts. Data moves over a torch process group that belongs to this
      communicator alone. Its backend is the CPU backend of ``group`` if that one was registered with torch, else gloo.
    - ``"nccl"``: CUDA tensors; the ranks are processes of any hosts, each with a GPU.
    - ``"local"``: the ranks are threads of one process, or there is one rank. With CUDA tensors all ranks share one device;
      run backward in the threads themselves (``torch.autograd.set_multithreading_enabled(False)``).
    - ``"auto"``: ``"local"`` for a `LocalRank` and for one rank. Otherwise ``"nccl"`` on CUDA, and ``"shm"`` on the CPU, or
      ``"c10d"`` if the ranks cannot share memory. The ranks try this, and all choose the same backend.

    If an operation fails, the communicator fails: each later call raises the same error, whose attributes say what failed (see
    `CommError`). The errors are `PeerError` (another rank died, left or aborted), `CommTimeout`, `MismatchError` (the ranks
    called different operations) and `CommError` after `abort`. Bad arguments do not fail the communicator.

    A communicator can be used from several threads; operations run in the order of the calls. It cannot be used in a forked
    child process. As a context manager it closes at the end of the block, and aborts first if an exception leaves the block.

    With ``"nccl"``, the library is the one that torch has loaded, or the file that ``BW_NCCL_LIB`` names. If you use torch's
    NCCL process groups too, call both from the same thread and in the same order on all ranks. Other settings of NCCL are its
    own environment variables (``NCCL_NET``, ``NCCL_MIN_CTAS``, ``NCCL_IB_TC``, ...). A call of NCCL that hangs stays behind in
    its own thread after the time limit.

    Args:
        group: The ranks: a torch ``ProcessGroup`` or a `LocalRank`. A process group is used to connect the ranks only. None
            means the default process group if there is one, else one rank.
        backend: ``"auto"``, ``"shm"``, ``"c10d"``, ``"nccl"`` or ``"local"``, see above.
        timeout_s: Seconds, or a timedelta, that an operation waits for the other ranks, counted from when the stream reaches
            it, before it raises `CommTimeout`. At most a year. None means the timeout of the process group, or 600 without
            one. It also limits the constructor; the error then names the missing ranks, some seconds after the limit. A rank
            that waits prints a line on stderr after 10, 20, 40 s and so on, which names the missing ranks.
        name: A name for messages, the same on all ranks. None means that rank 0 chooses one.
        device: The device of the tensors, as torch names it. None means the CPU.
        max_ctas: NCCL only: the most blocks (CTAs) of a kernel, as ``maxCTAs`` of ``ncclConfig_t``. None means NCCL's default.
        cta_policy: NCCL only: ``"default"``, ``"efficiency"`` or ``"zero"``, as ``CTAPolicy`` of ``ncclConfig_t``. ``"zero"``
            lets copy engines run all-gathers, and needs ``registered=True`` and NCCL 2.28 or newer.
        registered: NCCL only: `pool` has memory that NCCL can register, see `register_pool`. Needs NCCL 2.27 or newer.

    Raises:
        ValueError: A bad argument, different names on the ranks, or ``NCCL_COMM_BLOCKING=0``, which is not supported.
        TypeError: An argument of the wrong type.
        RuntimeError: ``WORLD_SIZE`` says that there are other ranks, but there is no process group.
        BuildError: The native module for CUDA is missing and cannot be built.
        DeviceError: There is no NCCL library.
        CommError: The ranks cannot connect, or cannot share memory as ``"shm"`` needs.
        CommTimeout: A rank has not made the communicator within ``timeout_s``."""

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
        """Makes two NCCL communicators over the same ranks, whose operations can overlap. Collective.

        The first is for all-gathers, the second for reduce-scatters. NCCL runs the operations of one communicator one after
        the other, in whatever streams they are. The two communicators share `post` and `collect`, and if one fails, both fail.
        All ranks must issue the operations of both in one order. For both kernels to run at once, set ``max_ctas`` so low that
        both fit on the device, for example 8 or 16. Arguments are those of `Communicator`.

        If NCCL may have launched work before bucketwheel was imported, and ``NCCL_LAUNCH_ORDER_IMPLICIT`` is not 1, the call
        warns and the operations of the two do not overlap. They do not overlap with ``NCCL_COMM_SPLIT_SHARE_RESOURCES=1``
        either. ``features["overlap"]`` tells.

        Returns:
            The communicator for all-gathers, whose name ends in ``/ag``, and the one for reduce-scatters, ``/rs``."""
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
        """Makes a communicator of the ranks that pass the same ``color``. Collective over all ranks of this communicator.

        Device, options, time limit and backend are those of this communicator; ``"auto"`` chooses again for the new ranks.
        Nothing else is shared.

        Args:
            color: An int. A negative color makes no communicator for this rank.
            key: New ranks are ordered by ``key``, then by their rank in this communicator.
            name: A name for messages. None means a name made from this communicator's.

        Returns:
            The new communicator, or None if ``color`` is negative."""
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
        """The communicator's name in messages and in the files of ``BW_TRACE_DIR``, the same on all ranks."""
        return self._native.name

    @property
    def backend(self) -> str:
        """``"shm"``, ``"local"``, ``"nccl"`` or ``"c10d"``."""
        return self._native.backend

    @property
    def device(self) -> int:
        """Index of the CUDA device of the tensors, or -1 for the CPU."""
        return int(self._native.device)

    @property
    def pool(self) -> Pool:
        """The pool for inputs of collectives. Other ranks read its memory without a staging copy."""
        return self._pool

    @property
    def features(self) -> dict[str, Any]:
        """Features of NCCL that this communicator uses; {} with other backends.

        - ``"nccl"``: version of the library
        - ``"windows"``: NCCL has registered the pool's memory as windows (between hosts too with 2.28.9)
        - ``"copy_engines"``: all-gathers may run on copy engines
        - ``"symmetric_avg"``: averages of tensors in the pool are computed in float32, not in the tensors' dtype
        - ``"overlap"``: operations overlap with those of the other communicator of the pair

        In a pair, ``"copy_engines"`` applies to the first communicator and ``"symmetric_avg"`` to the second. Between hosts
        NCCL may decide against these two."""
        if self.backend != "nccl":
            return {}
        has_gathers = self._gathers is None
        return nccl.features(
            self._native, self._choices, has_gathers=has_gathers, has_reduces=self._has_reduces, overlaps=self._overlaps
        )

    def register_pool(self) -> int:
        """Registers with NCCL the memory that the pool has got from the system since the last call. Collective.

        All ranks must have made the same acquires in the same order, and each tensor of an operation must have the same offset
        on all ranks (``BW_COMM_CHECK=1`` checks this). Without ``registered=True`` the call does nothing.

        Returns:
            Number of slabs that NCCL has registered."""
        if not self._choices.registered:
            return 0
        with self._aborting_when_interrupted("register_pool"):
            return int(self._native.register_pool())

    @property
    def timeout_s(self) -> float:
        """Seconds that an operation waits for the other ranks."""
        return self._ranks.timeout_s

    @property
    def stream(self) -> Any:
        """The native stream in which operations run, unless a call names another one."""
        return self._native.stream

    @property
    def gathers(self) -> Communicator:
        """The communicator that runs this rank's all-gathers and broadcasts: the first of a pair, else this one."""
        return self if self._gathers is None else self._gathers

    @property
    def is_registered(self) -> bool:
        """True if the pool's memory is for `register_pool`. All ranks must then acquire in the same order."""
        return self._choices.registered

    @property
    def max_payload_bytes(self) -> int:
        """Maximum length of a payload of `post`."""
        return core.MAX_PAYLOAD_BYTES

    def post(self, payload: bytes) -> None:
        """Sends this rank's payload of one exchange of messages. Local; never blocks. Call `collect` next.

        The host exchanges messages beside the operations on tensors: neither waits for the other. Lengths may differ between
        ranks.

        Args:
            payload: Bytes, at most `max_payload_bytes`.

        Raises:
            ValueError: The payload is too long, or this rank has not collected the payloads of the previous exchange."""
        self._native.post(payload if type(payload) is bytes else payload_of(payload))

    def collect(self, timeout: float | timedelta | None = None) -> list[bytes]:
        """Blocks the host until all ranks have called `post`, and returns their payloads by rank. Collective.

        Args:
            timeout: Seconds, or a timedelta. None means that only ``timeout_s`` of the communicator limits the wait.

        Raises:
            CommTimeout: Not all ranks have called `post` within ``timeout``. You may call `collect` again.
            CommError: The communicator has failed."""
        return self._native.collect(None if timeout is None else seconds_of(timeout))

    def exchange(self, payload: bytes) -> list[bytes]:
        """Calls `post` and `collect`. Collective. If Ctrl-C interrupts the wait, the communicator aborts, so that the other ranks
        raise."""
        return self._native.exchange(payload if type(payload) is bytes else payload_of(payload))

    @contextlib.contextmanager
    def _aborting_when_interrupted(self, where: str) -> Iterator[None]:
        """What a signal handler raises ends a wait: the peers will not find this rank where they wait for it."""
        try:
            yield
        except (Error, ValueError):
            raise
        except BaseException as error:
            self.abort(f"{type(error).__name__} in {where}, while this rank waited for the others")
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
        """Replaces ``tensor`` on all ranks by the sum over the ranks, in place. Collective.

        All ranks get the same bits. Dtypes, ``op``, the order and rounding of sums, streams, ordering and errors are those of
        `reduce_scatter`. The call issues up to three operations: `Handle.seq` is the number of the last one, and a
        `MismatchError` names them.

        Args:
            tensor: Contiguous, of any shape, on the communicator's device.
            op: As in `reduce_scatter`.
            stream: As in `all_gather`.
            after: As in `all_gather`.
            timing: As in `all_gather`."""
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
        """Replaces ``tensor`` on all ranks by that of rank ``src``, in place. Collective.

        The call is one operation of `gathers`. Streams, ordering and errors are those of `all_gather`.

        Args:
            tensor: Contiguous, of any shape and dtype, on the communicator's device.
            src: A rank of this communicator.
            stream: As in `all_gather`.
            after: As in `all_gather`.
            timing: As in `all_gather`."""
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
        """Blocks the host until all ranks have called it and their earlier work is done. Collective.

        Earlier work means the operations of this communicator, and on CUDA also the work in torch's current stream. The call
        is one operation, and returns its handle.

        Args:
            timeout: Seconds, or a timedelta. None means that only ``timeout_s`` of the communicator limits the wait.

        Raises:
            CommTimeout: The barrier is not over after ``timeout``. The operation continues.
            ValueError: ``timeout`` is negative."""
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
        """Fails the communicator on all ranks. Local; never blocks.

        The next wait raises ``reason``: `CommError` on this rank, and on the others `PeerError` with this rank's number."""
        self._native.abort(str(reason))

    def close(self, timeout: float | timedelta | None = None) -> None:
        """Waits for the operations in flight and leaves the communicator. All ranks call it; further calls do nothing.

        Other calls after it raise `ClosedError`. Results that are complete stay valid, and so do leases of the pool. Ranks
        that are still behind get all data that they need from this rank. With NCCL, delete CUDA graphs that contain operations
        of the communicator first, because NCCL waits for them.

        Args:
            timeout: Seconds, or a timedelta. Operations that still run after it fail. None means that only ``timeout_s``
                limits the wait."""
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
