"""HSDP: gradients and states are sharded over one group of ranks and replicated over another.

A rank's *shard group* are the ranks among which its gradients and states are sharded; its *replicas* are the ranks of
other shard groups that own the same shard. A bucket is reduced in three operations, [Note: reducing with replicas]:

1. reduce-scatter over the shard group: the *partial sum* of this rank's shard, in fp32 (fp64 of fp64), into a buffer
   of its own;
2. reduce-scatter over the R replicas, in place: each sums an R-th of the shard;
3. all-gather over the replicas, in place. Its sink is the gradient shard, which takes the whole sum and its norm.

Every element is summed by one rank, in rank order, and the replicas receive its bits, so replicas stay bitwise equal
whatever order NCCL adds in. Adding up gathered partial sums on every rank would save an operation, but each rank would
receive R - 1 of them instead of 2 (R - 1) / R: as much for two replicas, more for every other number.
Partial sums travel in fp32 although buckets may have 16 bits: gradients are rounded, sums are not.

What hosts agree on is exchanged within the shard group and then among the replicas.
"""

from __future__ import annotations

import collections
import contextlib
import hashlib
import json
import secrets
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import torch
from torch import Tensor

from bucketwheel.comm import nccl
from bucketwheel.comm.collectives import reduce_scatter
from bucketwheel.comm.communicator import Communicator
from bucketwheel.comm.handle import Handle, wait_all
from bucketwheel.device import CPU, torch_device
from bucketwheel.errors import Error
from bucketwheel.native import core
from bucketwheel.pool.pool import Lease, Pool
from bucketwheel.pool.slots import Slot, Slots, plan_slots


class Reducer(Protocol):
    """All ranks over which gradients are summed: a `Communicator`, or with `Replicas` the ranks of two of them."""

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def device(self) -> int: ...
    @property
    def sees_peers(self) -> bool: ...
    @property
    def is_registered(self) -> bool: ...
    @property
    def max_payload_bytes(self) -> int: ...
    @property
    def pool(self) -> Pool:
        """Where the buckets of `_reduce_scatter_into` lie."""

    @property
    def _natives(self) -> tuple[Any, ...]:
        """Of the communicators, for `core.PublicCall`."""

    @property
    def _replicate(self) -> Communicator | None:
        """The communicator of the replicas, beside the one that gradients are sharded over."""

    @property
    def _partial_bytes(self) -> int:
        """Memory for partial sums."""

    def exchange(self, payload: bytes) -> list[bytes]: ...
    def broadcast(self, tensor: Tensor, src: int = 0) -> Handle: ...
    def _reduce_scatter_into(self, full: Tensor, sink: Any) -> Handle: ...
    def _prepare_sums(self, buckets: Iterable[tuple[Any, int, torch.dtype]], limit: int) -> None:
        """Make memory for the partial sums of ``limit`` buckets at once. ``buckets``, in the order of their launches: what
        `_reduce_scatter_into` will be given as ``sink``, the elements of a shard, and the dtype."""

    def _begin_capture(self) -> None:
        """The next bucket belongs to another CUDA graph, or to none: it waits for no operation of those before."""

    def _release(self) -> None:
        """Give the memory of partial sums back. From now on the communicators fail apart again."""

    def abort(self, reason: str) -> None: ...


class Replicas:
    """The `Reducer` of HSDP: ``rank`` is ``replicate.rank * shard.size + shard.rank``.

    Made by all its ranks together. ValueError on every rank unless each shard group meets each group of replicas in
    exactly one rank, which has the same number in its shard group as its replicas have in theirs, and the other way
    round. Until `_release`, a failure of one of the two communicators fails the other.
    """

    def __init__(self, shard: Communicator, replicate: Communicator) -> None:
        for comm in (shard, replicate):
            if comm.is_registered:
                raise ValueError(
                    f"communicator {comm.name!r} has registered=True, which does not go with replicate_group: partial "
                    "sums are in plain memory; make it without"
                )
        self.shard = shard
        self._natives = (*shard._natives, *replicate._natives)
        self._replicate = replicate
        self.size = shard.size * replicate.size
        self.rank = replicate.rank * shard.size + shard.rank
        self.device = shard.device
        self.is_registered = False
        # Where partial sums are by plan, by the sink of their bucket. Made by _prepare_sums, until _free_sums.
        self._slots: Slots | None = None
        self._partials: dict[Any, _Partial] = {}
        # Leases of those that found no slot, and the last operation that uses each. Until that is ordered.
        self._on_side: list[tuple[Lease, Handle]] = []
        # Reductions whose second or third operation is not issued, in the order of the buckets.
        self._waiting: collections.deque[ReplicaReduction] = collections.deque()
        self._last: Handle | None = None  # the last operation issued, for _takes_turns; None in a new graph
        # On one CUDA device that ranks share, issuing behind an operation waits until all ranks have issued that one:
        # a hook must not, for they may be waiting for this rank.
        self._defers = any(comm.backend == "local" and comm.device != CPU for comm in (shard, replicate))
        self._tie: Any = None  # core.Tie from the end of the checks until _release
        with self._failing_as_one():
            # NCCL may start the kernels of the two in another order than that of the calls on some rank.
            self._takes_turns = not self._expect_equal_groups()
        self._tie = core.Tie(shard._native, replicate._native)  # [Note: failing together], csrc/comm/peers/tie.h

    # --- that the two groups fit -------------------------------------------------------------------------------------

    def _expect_equal_groups(self) -> bool:
        """Three rounds: what ranks say of themselves, within and then between shard groups; what they find wrong; and
        the ValueError. Whether NCCL starts kernels in the order of the calls on all ranks."""
        table, problem = self._gather_table()
        self._raise_if_any(self._exchange_verdicts(table, problem))
        return all(has_order for group in table for _, has_order in group)

    def _gather_table(self) -> tuple[_Table, str]:
        """What the ranks of all shard groups say, by shard group, and what this rank finds wrong with it."""
        shard, replicate = self.shard, self._replicate
        has_order = nccl.is_launch_order_kept() or "nccl" not in (shard.backend, replicate.backend)
        mine = [secrets.token_hex(8), has_order]
        said = shard.exchange(REPLICAS_MARK + json.dumps(mine).encode())
        group = [json.loads(one[len(REPLICAS_MARK) :]) for one in said if one.startswith(REPLICAS_MARK)]
        replicas = [json.loads(one) for one in self._among_replicas(json.dumps([mine, group]).encode())]
        table = [of_peer for _, of_peer in replicas]
        return table, self._problem(table, [of_peer for of_peer, _ in replicas])

    def _exchange_verdicts(self, table: _Table, problem: str) -> list[tuple[str, str]]:
        """Of every rank what it found wrong, and a digest of its table: equal tables are of one set of ranks."""
        mine = (problem, hashlib.sha256(json.dumps(table).encode()).hexdigest())
        payload = json.dumps(mine).encode()
        try:
            is_whole = len(table[self._replicate.rank]) == self.shard.size
            # Where ranks of the shard group pass no replicate_group, they do not take part in this round.
            verdicts = self.shard.exchange(payload) if is_whole else [payload]
            return [json.loads(one) for one in self._spread(verdicts)]
        except Error:  # others have raised, and have closed their communicators
            if not problem:
                raise
            return [mine]

    def _raise_if_any(self, everyone: Sequence[tuple[str, str]]) -> None:
        problems = [found for found, _ in everyone if found]
        if not problems and len({digest for _, digest in everyone}) > 1:
            problems.append("ranks of one process_group have replicas in different ones")
        if problems:
            raise ValueError(
                f"process_group and replicate_group do not fit: {problems[0]}. With S ranks to shard over and R "
                "replicas, rank r * S + s is rank s of the process_group [r * S, ..., r * S + S - 1] and rank r of "
                "the replicate_group [s, S + s, ..., (R - 1) * S + s]"
            )

    def _problem(self, table: _Table, replicas: list[Any]) -> str:
        """What this rank finds wrong with the ``table``, in which the ``replicas`` are entries; empty if nothing is. Whether
        all ranks have the same table is seen by `_exchange_verdicts`."""
        s, r = self.shard.rank, self._replicate.rank
        for number, group in enumerate(table):
            if len(group) != self.shard.size:
                return (
                    f"where rank {r} of a replicate_group shards over {self.shard.size} ranks, {len(group)} ranks of "
                    f"the process_group of rank {number} have a replicate_group"
                )
        tokens = {token for group in table for token, _ in group}
        if [group[s] for group in table] != replicas or len(tokens) != self.size:
            return f"the replicas of rank {s} of a process_group are not all rank {s} of others"
        return ""

    # --- as one communicator would -----------------------------------------------------------------------------------

    @property
    def sees_peers(self) -> bool:
        return self.shard.sees_peers and self._replicate.sees_peers

    @property
    def pool(self) -> Pool:
        """Where the shard group reads buckets from."""
        return self.shard.pool

    @property
    def max_payload_bytes(self) -> int:
        return self.shard.max_payload_bytes

    def exchange(self, payload: bytes) -> list[bytes]:
        """`Communicator.exchange`, of all ranks of both groups."""
        with self._failing_as_one():
            return self._spread(self.shard.exchange(payload))

    def _spread(self, group: list[bytes]) -> list[bytes]:
        """The payloads of all shard groups by rank, from those of this one."""
        packed = b"".join(_LENGTH.pack(len(one)) + one for one in group)
        return [payload for other in self._among_replicas(packed) for payload in _unpacked(other)]

    def _among_replicas(self, payload: bytes) -> list[bytes]:
        """Everyone's of the replicas, of any length: in as many rounds as the longest takes."""
        most = self._replicate.max_payload_bytes - _LENGTH.size
        first = self._replicate.exchange(_LENGTH.pack(len(payload)) + payload[:most])
        sizes = [_LENGTH.unpack_from(other)[0] for other in first]
        everyone = [bytearray(other[_LENGTH.size :]) for other in first]
        for begin in range(most, max(sizes), most):
            for own, other in zip(everyone, self._replicate.exchange(payload[begin : begin + most]), strict=True):
                own += other
        return [bytes(own) for own in everyone]

    def broadcast(self, tensor: Tensor, src: int = 0) -> Handle:
        """Makes ``tensor`` on every rank what it is on rank ``src``."""
        group, of_group = divmod(src, self.shard.size)
        self.shard.broadcast(tensor, of_group).wait()  # in every shard group; then that of ``src`` is everybody's
        return self._replicate.broadcast(tensor, group)

    def abort(self, reason: str) -> None:
        """Fails both communicators, and so, rank by rank, those of all ranks."""
        self.shard.abort(reason)
        self._replicate.abort(reason)

    @contextlib.contextmanager
    def _failing_as_one(self) -> Iterator[None]:
        """Tells the ranks of the other communicator at once of a failure, before the watchdog looks."""
        try:
            yield
        except ValueError:
            raise
        except BaseException as error:
            if (tie := self._tie) is not None:
                tie.look()  # what a peer has failed is a PeerError in both, and not an abort of this rank's
            self.abort(f"{type(error).__name__} in the other group of replicate_group: {error}")
            raise

    # --- reducing ----------------------------------------------------------------------------------------------------

    def _prepare_sums(self, buckets: Iterable[tuple[Any, int, torch.dtype]], limit: int) -> None:
        if self._slots is not None:
            self._free_sums()
            self._replicate.pool.trim()  # slots of other sizes come
        # Sums are in float32, or in float64.
        kinds = [(sink, numel, torch.promote_types(dtype, torch.float32)) for sink, numel, dtype in buckets]
        sizes = [self._padded(numel) * dtype.itemsize for _, numel, dtype in kinds]
        turns = [(number, min(number + limit, len(sizes))) for number in range(len(sizes))]
        self._slots = Slots.leased(plan_slots("sums", sizes, turns), self._replicate.pool)
        for number, (sink, numel, dtype) in enumerate(kinds):
            self._partials[sink] = self._partial_in(self._slots.slot(number), numel, dtype)

    def _partial_in(self, memory: Lease | Slot, numel: int, dtype: torch.dtype) -> _Partial:
        full = memory.tensor(dtype, (self._padded(numel),))
        return _Partial(memory, full, numel, _storing_sink(full.narrow(0, 0, numel), self.device))

    def _padded(self, numel: int) -> int:
        """The elements of a shard and padding: a multiple of the replicas."""
        return -(-numel // self._replicate.size) * self._replicate.size

    def _take_partial(self, sink: Any) -> tuple[_Partial, Handle | None]:
        """Where the sums of the bucket with this ``sink`` go, and what the reduce-scatter waits for; this thread does not."""
        self._advance()
        self._free_side()
        partial, slots = self._partials[sink], self._slots
        assert slots is not None and isinstance(partial.memory, Slot)
        last = partial.memory.last_use()
        if partial.memory.is_free and (last is None or not self._defers or last.is_ordered()):
            partial.memory.take()
            return partial, last
        pool, full = self._replicate.pool, partial.full
        pool.reserve(full.nbytes, slab_bytes=max(slots.sizes))
        return self._partial_in(pool.acquire("", full.nbytes), partial.numel, full.dtype), None

    def _give_partial(self, partial: _Partial, last: Handle) -> None:
        """``last``: the last operation that reads or writes it."""
        if isinstance(partial.memory, Slot):
            partial.memory.release(after=last)
        else:  # somebody else would wait for the peers
            self._on_side.append((partial.memory, last))

    def _free_side(self) -> None:
        for lease, last in self._on_side:
            if last.is_ordered():
                lease.release(after=last)
        self._on_side = [one for one in self._on_side if one[0].is_live]

    def _reduce_scatter_into(self, full: Tensor, sink: Any) -> ReplicaReduction:
        """Sums ``full`` over all ranks and feeds this rank's part to ``sink``; [Note: reducing with replicas]."""
        partial, used_by = self._take_partial(sink)
        last = self._last if self._takes_turns else None
        after = [handle for handle in (used_by, last) if handle is not None]
        with self._failing_as_one():
            first = self.shard._reduce_scatter_into(full, partial.sink, after=after)
            reduction = ReplicaReduction(self, first, partial, sink)
            self._waiting.append(reduction)
            self._advance()
        return reduction

    def _advance(self, until: ReplicaReduction | None = None) -> None:
        """Issues what can be, and, by waiting where it must, all of ``until``; in the order of the buckets."""
        while self._waiting:
            reduction = self._waiting[0]
            if self._defers and not reduction.steps[-1].is_ordered():
                if until is None or until.is_issued:
                    return
                reduction.steps[-1].wait()
            reduction._issue_next()
            if reduction.is_issued:
                self._last = reduction.steps[-1]
                self._waiting.popleft()

    @property
    def _partial_bytes(self) -> int:
        planned = 0 if self._slots is None else self._slots.plan.total_bytes
        return planned + sum(lease.nbytes for lease, _ in self._on_side)

    def _begin_capture(self) -> None:
        """[Note: captured windows]"""
        self._last = None
        if self._slots is not None:
            self._slots.forget()

    def _free_sums(self) -> None:
        """What is not issued to the end never will be; but operations that are issued own what they write, to their end."""
        self._free_side()
        if self._slots is not None:
            self._slots.release()
        self._slots = None
        self._partials.clear()
        self._waiting.clear()
        self._on_side.clear()

    def _release(self) -> None:
        """Local."""
        self._free_sums()
        self._tie = None


_Table = list[list[list[Any]]]  # by shard group, by rank of it: a token of the rank's own, and whether it has order


@dataclass
class _Partial:
    """Memory for a partial sum of ``numel`` elements: as a padded tensor, and what stores the sum there."""

    memory: Lease | Slot
    full: Tensor
    numel: int
    sink: Any


def reducer_of(shard: Communicator, replicate: Communicator | None) -> Reducer:
    """All ranks of both; ``shard`` itself where no rank has replicas. Collective."""
    if replicate is None:
        return shard
    replicas = Replicas(shard, replicate)  # checks the groups, of one replica too
    return shard if replicate.size == 1 else replicas


class ReplicaReduction(Handle):
    """The handle of one bucket's three operations, and its way from one to the next."""

    __slots__ = ("_replicas", "_partial", "_sink", "steps")

    def __init__(self, replicas: Replicas, first: Handle, partial: _Partial, sink: Any) -> None:
        super().__init__(first._native, replicas.shard)  # `event`: when the bucket's memory is nobody's any more
        self.steps = [first]
        self._replicas = replicas
        self._partial = partial
        self._sink = sink

    @property
    def is_issued(self) -> bool:
        return len(self.steps) == 3

    def _issue_next(self) -> None:
        replicate, partial = self._replicas._replicate, self._partial
        full = partial.full
        after = [self.steps[-1]]  # in: the sums are there; out: `_give_partial`, which the next bucket there waits for
        if len(self.steps) == 1:
            own = full.narrow(0, replicate.rank * (full.numel() // replicate.size), full.numel() // replicate.size)
            self.steps.append(reduce_scatter([own], [full], replicate, after=after))
        else:
            self.steps.append(replicate._all_gather_to_sink(full, self._sink, partial.numel, after=after))
            self._replicas._give_partial(partial, self.steps[-1])

    def wait(self, stream: Any = None, *, timeout: float | timedelta | None = None) -> ReplicaReduction:
        """`Handle.wait`, of all three."""
        if timeout is not None:
            self.synchronize(timeout)
        with self._replicas._failing_as_one():
            self._replicas._advance(self)
            wait_all(self.steps, stream)
        return self

    def synchronize(self, timeout: float | timedelta | None = None) -> ReplicaReduction:
        """`Handle.synchronize`, of all three, each within ``timeout``."""
        with self._replicas._failing_as_one() if timeout is None else contextlib.nullcontext():
            self._replicas._advance(self)
            for step in self.steps:
                step.synchronize(timeout)
        return self

    def query(self) -> bool:
        """`Handle.query`, of all three."""
        self._replicas._advance()
        return self.is_issued and all(step.query() for step in self.steps)

    def is_ordered(self) -> bool:
        """`Handle.is_ordered`, of all three."""
        self._replicas._advance()
        return self.is_issued and self.steps[-1].is_ordered()

    def await_order(self, timeout: float) -> bool:
        """`Handle.await_order`, where nothing is deferred; else at once."""
        return self.steps[-1].await_order(timeout) if self.is_issued else self.is_ordered()


REPLICAS_MARK = b"replicate_group:"  # begins the first payload that ranks with replicas exchange
_LENGTH = struct.Struct("<q")


def _unpacked(packed: bytes) -> list[bytes]:
    found, at = [], 0
    while at < len(packed):
        begin = at + _LENGTH.size
        at = begin + _LENGTH.unpack_from(packed, at)[0]
        found.append(packed[begin:at])
    return found


def _storing_sink(to: Tensor, device: int) -> Any:
    """Stores the sums of a reduce-scatter in ``to``."""
    if device == CPU:
        return core.StoringSink(to)
    sums = torch.zeros(core.ShardAccumulatorCuda.max_spans(0), dtype=torch.float64, device=torch_device(device))
    return core.ShardAccumulatorCuda(to, [], sums)
