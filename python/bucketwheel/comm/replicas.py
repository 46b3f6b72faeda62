"""HSDP: gradients and states are sharded over one group of ranks and replicated over another.

A rank's *shard group* are the ranks among which its gradients and states are sharded; its *replicas* are the ranks of
other shard groups that own the same shard. A bucket is reduced in three operations: [Note: reducing with replicas],
csrc/window/reductions.h.

What hosts agree on is exchanged within the shard group and then among the replicas.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import secrets
import struct
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from bucketwheel.comm import nccl
from bucketwheel.comm.communicator import Communicator
from bucketwheel.comm.handle import Handle
from bucketwheel.device import CPU
from bucketwheel.errors import Error
from bucketwheel.native import core
from bucketwheel.pool.plan import Plan
from bucketwheel.pool.pool import Pool


class Reducer(Protocol):
    """All ranks over which gradients are summed: a `Communicator`, or with `Replicas` the ranks of two of them."""

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def device(self) -> int: ...
    @property
    def is_registered(self) -> bool: ...
    @property
    def max_payload_bytes(self) -> int: ...
    @property
    def pool(self) -> Pool:
        """Where buckets lie, if they are not on the side in registered memory."""

    @property
    def _natives(self) -> tuple[Any, ...]:
        """Of the communicators, for `core.PublicCall`."""

    @property
    def _replicate(self) -> Communicator | None:
        """The communicator of the replicas, beside the one that gradients are sharded over."""

    def exchange(self, payload: bytes) -> list[bytes]: ...

    def _exchange(self, payload: bytes) -> list[bytes]:
        """The same, of bytes alone."""

    def broadcast(self, tensor: Tensor, src: int = 0) -> Handle: ...
    def _reducers(self) -> tuple[list[Any], Any, bool, bool]:
        """Native ``Reducers``, as `core.Window` takes them: communicators, their ``Tie``, defers, takes_turns."""

    def _plan_sums(self, shards: Sequence[tuple[int, torch.dtype]], limit: int) -> Plan:
        """Where the partial sums of ``limit`` buckets lie at once. ``shards``: elements of a shard and dtype of each bucket,
        in the order of their launches."""

    def _release(self) -> None:
        """From now on the communicators fail apart again."""

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
                    f"communicator {comm.name!r} has registered=True, which replicate_group does not support: partial "
                    "sums are in plain memory; make it with registered=False"
                )
        self.shard = shard
        self._natives = (*shard._natives, *replicate._natives)
        self._replicate = replicate
        self.size = shard.size * replicate.size
        self.rank = replicate.rank * shard.size + shard.rank
        self.device = shard.device
        self.is_registered = False
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
            problems.append("ranks of one process_group have replicas in different process_groups")
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
                    f"rank {r} of a replicate_group has a process_group of {self.shard.size} ranks, but the "
                    f"process_group of rank {number} has {len(group)} ranks with a replicate_group"
                )
        tokens = {token for group in table for token, _ in group}
        if [group[s] for group in table] != replicas or len(tokens) != self.size:
            return f"rank {s} of a process_group has replicas that are not rank {s} of theirs"
        return ""

    # --- as one communicator would -----------------------------------------------------------------------------------

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

    _exchange = exchange  # as a `Reducer`

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
            self.abort(f"{type(error).__name__} in the other group (process_group or replicate_group): {error}")
            raise

    # --- reducing ----------------------------------------------------------------------------------------------------

    def _reducers(self) -> tuple[list[Any], Any, bool, bool]:
        replicate = self._replicate
        comms = [self.shard._native, replicate._native, replicate.gathers._native]
        return comms, self._tie, self._defers, self._takes_turns

    def _plan_sums(self, shards: Sequence[tuple[int, torch.dtype]], limit: int) -> Plan:
        """Sums are in float32, or in float64."""
        ranks = self._replicate.size
        sizes = [-(-numel // ranks) * ranks * max(dtype.itemsize, 4) for numel, dtype in shards]
        return Plan.of_turns("sums", sizes, [(i, min(i + limit, len(sizes))) for i in range(len(sizes))])

    def _release(self) -> None:
        """Local."""
        self._tie = None


_Table = list[list[list[Any]]]  # by shard group, by rank of it: a token of the rank's own, and whether it has order


def reducer_of(shard: Communicator, replicate: Communicator | None) -> Reducer:
    """All ranks of both; ``shard`` itself where no rank has replicas. Collective."""
    if replicate is None:
        return shard
    replicas = Replicas(shard, replicate)  # checks the groups, of one replica too
    return shard if replicate.size == 1 else replicas


REPLICAS_MARK = b"replicate_group:"  # begins the first payload that ranks with replicas exchange
_LENGTH = struct.Struct("<q")


def _unpacked(packed: bytes) -> list[bytes]:
    found, at = [], 0
    while at < len(packed):
        begin = at + _LENGTH.size
        at = begin + _LENGTH.unpack_from(packed, at)[0]
        found.append(packed[begin:at])
    return found
