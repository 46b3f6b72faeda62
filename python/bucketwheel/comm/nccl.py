"""How the ranks of the nccl backend get connected: a unique id goes through a `Rendezvous`, and so does the outcome."""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist

from bucketwheel.comm import nccl_library, patience, shm
from bucketwheel.comm import peers as agreement
from bucketwheel.comm.rendezvous import Rendezvous, has_keys, undo
from bucketwheel.device import torch_device
from bucketwheel.errors import CommError, DeviceError, Error
from bucketwheel.native import core, env
from bucketwheel.pool.pool import Pool

_PAUSE_S = 0.01
_LAUNCH_ORDER = "NCCL_LAUNCH_ORDER_IMPLICIT"
_POLICIES = {"default": 0, "efficiency": 1, "zero": 2}


def _claim_launch_order() -> bool:
    """Whether NCCL starts the kernels of several communicators in the order of the calls. It reads the variable once, at
    its first launch: called when this module is imported, which may be too late."""
    if _LAUNCH_ORDER in os.environ:
        return os.environ[_LAUNCH_ORDER] == "1"
    os.environ[_LAUNCH_ORDER] = "1"
    # A group that has gone, or is somebody else's, has needed CUDA.
    groups = dist.distributed_c10d._world.pg_map if dist.is_available() else ()
    return not (torch.cuda.is_initialized() or any("nccl" in str(dist.get_backend_config(group)) for group in groups))


_is_launch_order_kept = _claim_launch_order()


def is_launch_order_kept() -> bool:
    """Whether NCCL starts the kernels of several communicators in the order of the calls, in this process."""
    return _is_launch_order_kept


@dataclass(frozen=True)
class NcclChoices:
    """What can be chosen of an NCCL communicator: see `Communicator`."""

    max_ctas: int | None = None
    cta_policy: str | None = None
    registered: bool = False

    def native(self, device: int, *, serialises: bool = False) -> Any:
        """The native options. ValueError for what this NCCL cannot do."""
        found = nccl_library.info()
        if re.fullmatch(r"\s*(0[xX])?0+\s*", os.environ.get("NCCL_COMM_BLOCKING", "")):
            raise ValueError(
                "NCCL_COMM_BLOCKING=0 is not supported: calls of NCCL must end before they return; unset it"
            )
        policy = None if self.cta_policy is None else _POLICIES.get(self.cta_policy)
        if self.cta_policy is not None and policy is None:
            raise ValueError(f"cta_policy must be one of {sorted(_POLICIES)}, got {self.cta_policy!r}")
        if self.cta_policy == "zero" and not (self.registered and found.features["zero_cta"]):
            raise ValueError(
                "cta_policy='zero' needs registered=True and NCCL 2.28 or newer; this is "
                f"{nccl_library.version_text(found.version)} with registered={self.registered}"
            )
        if self.registered and not found.features["windows"]:
            raise ValueError(
                "registered=True needs NCCL 2.27 or newer with windows; this is "
                f"{nccl_library.version_text(found.version)} ({found.path})"
            )
        pool = Pool(device=torch_device(device))
        return core.NcclOptions(self.max_ctas, policy, self.registered, pool._native, serialises)


@dataclass(frozen=True)
class NcclSetup:
    """What a communicator is made of. ``rendezvous``: of its ranks."""

    rendezvous: Rendezvous
    device: int
    name: str
    timeout_s: float
    choices: NcclChoices = NcclChoices()


class _Check:
    """Debug (``BW_COMM_CHECK=1``): compares every operation of a communicator between the ranks, through the Store."""

    def __init__(self, rendezvous: Rendezvous, peers: Any) -> None:
        self._store, self._rank, self._size = rendezvous.store, rendezvous.rank, rendezvous.size
        self._timeout_s, self._peers = rendezvous.timeout_s, peers

    def __call__(self, comm: str, seq: int, text: str) -> str:
        """How the ranks differ, or why that cannot be known; empty where they agree."""
        try:
            return self._compare(comm, seq, text)
        except RuntimeError as error:  # the Store has gone, perhaps with a rank: the peers know that a little later
            until = time.monotonic() + patience.PATIENCE.peer_s
            while not (trouble := self._peers.trouble()) and time.monotonic() < until:
                time.sleep(_PAUSE_S)
            return f"this rank called {text}, but could not read the calls of other ranks: {trouble or error}"

    def _compare(self, comm: str, seq: int, text: str) -> str:
        keys = [f"check/{comm}/{seq}/{rank}" for rank in range(self._size)]
        self._store.set(keys[self._rank], text)
        until = time.monotonic() + self._timeout_s
        while not has_keys(self._store, keys, max(min(until - time.monotonic(), patience.PATIENCE.peer_s), 0.0)):
            # The others' texts may have come meanwhile, and say more than that a peer has seen how they differ.
            if (trouble := self._peers.trouble()) and not self._store.check(keys):
                return f"this rank called {text}, but other ranks cannot: {trouble}"
            if time.monotonic() >= until:
                missing = [rank for rank, key in enumerate(keys) if not self._store.check([key])]
                return f"this rank called {text}; ranks {missing} made no call within {self._timeout_s} s"
        texts = [self._store.get(key).decode() for key in keys]
        if seq > 1:  # whoever has come here has read what was there before
            self._store.delete_key(f"check/{comm}/{seq - 1}/{self._rank}")
        if len(set(texts)) == 1:
            return ""
        return core.mismatch_text(texts)


@contextlib.contextmanager
def _peers_to_keep(setup: NcclSetup) -> Iterator[Any]:
    """What the ranks know of each other: by shared memory where they share a host, else through the Store and gloo. Left
    again when what is made of it fails."""
    rendezvous, name, timeout_s = setup.rendezvous, setup.name, setup.timeout_s

    def leave(peers: Any, _: BaseException) -> None:
        peers.leave(0.0)

    try:
        alone = core.LocalWorld(1).join(0, name, timeout_s) if rendezvous.size == 1 else None
        peers = core.peers_of(alone or shm.connect(rendezvous, name, timeout_s))
    except shm.CannotShare:
        peers, _ = _on_all_ranks(setup, lambda: agreement.make_peers(rendezvous, name, timeout_s), leave)
    try:
        yield peers
    except BaseException:
        peers.leave(0.0)
        raise


def make(setup: NcclSetup) -> Any:
    """The native communicator of the ranks that meet."""
    unique_id, _ = _agree_on_nccl(setup, has_order=True)
    with _peers_to_keep(setup) as peers:
        options = _agreed_options(setup, peers)

        def one() -> Any:
            return core.make_nccl_comm(peers, setup.device, unique_id, options, setup.rendezvous.left_s)

        return _on_all_ranks(setup, one, undo)[0]


def pair(setup: NcclSetup) -> tuple[tuple[Any, Any], bool]:
    """Two native communicators, for all-gathers and for reduce-scatters, that share what they know of their peers; and
    whether they overlap. They do on all ranks or on none: a rank that takes turns with one that does not may deadlock."""
    unique_id, without_order = _agree_on_nccl(setup, has_order=_is_launch_order_kept)
    if without_order:
        warnings.warn(
            f"{_LAUNCH_ORDER} was not 1 on ranks {without_order} when NCCL may first have launched, so all-gathers "
            "and reduce-scatters take turns on all ranks instead of overlapping; import bucketwheel before CUDA is "
            "used and before torch.distributed.init_process_group, or set it to 1",
            stacklevel=3,
        )
    with _peers_to_keep(setup) as peers:
        options = _agreed_options(setup, peers, serialises=bool(without_order))

        def two() -> Any:
            return core.make_nccl_pair(peers, setup.device, unique_id, options, setup.rendezvous.left_s)

        def undo_both(comms: Any, error: BaseException) -> None:
            for comm in comms:
                undo(comm, error)

        shares = os.environ.get("NCCL_COMM_SPLIT_SHARE_RESOURCES", "0") not in ("", "0")  # NCCL heeds it before options
        return _on_all_ranks(setup, two, undo_both)[0], not (without_order or shares)


def split(parent: Any, setup: NcclSetup, color: int, key: int) -> Any:
    """The native communicator of this rank's part of ``parent``. A rank without a part takes part in the call."""
    with _peers_to_keep(setup) as peers:
        options = _agreed_options(setup, peers)
        return _on_all_ranks(setup, lambda: parent.split(peers, color, key, options, setup.timeout_s), undo)[0]


def _agreed_options(setup: NcclSetup, peers: Any, *, serialises: bool = False) -> Any:
    """The native options, on all ranks or on none: whoever went on alone would wait for the others inside NCCL. All check
    what they call if one is told to."""
    checks: list[bool] = []

    def prepare() -> Any:
        checks.append(env.flag("BW_COMM_CHECK"))
        return setup.choices.native(setup.device, serialises=serialises)

    options, everyone = _on_all_ranks(setup, prepare, note=checks)
    if any(map(any, everyone)):
        options.set_check(_Check(setup.rendezvous, peers))
    return options


def _on_all_ranks(
    setup: NcclSetup,
    step: Callable[[], Any],
    undo: Callable[[Any, BaseException], None] | None = None,
    note: Any = None,
) -> tuple[Any, list[Any]]:
    """What ``step`` returns, and everybody's ``note``, once it has worked on all ranks. Else ``undo`` gets what it has
    returned here, and CommError is raised, with what NCCL said on this rank; on a rank whose device, build or arguments it
    was, that error."""
    rendezvous = setup.rendezvous
    made: list[Any] = []
    own: list[Exception] = []

    def attempt() -> None:
        try:
            made.append(step())
        except (ValueError, Error) as error:
            own.append(error)
            raise

    try:
        failures, notes = rendezvous.outcome(rendezvous.attempt(attempt), note)
        if own and not isinstance(own[0], CommError):
            raise own[0]
        if failures:
            facts = {name: getattr(own[0], name) for name in ("nccl_code", "last_error")} if own else {}
            reason = f"the NCCL communicator could not be made on all ranks{failures}"
            prefix = f"[bucketwheel rank {rendezvous.rank}/{rendezvous.size} comm '{setup.name}' seq 0] "
            raise CommError(prefix + reason, reason=reason, rank=rendezvous.rank if own else -1, **facts)
    except BaseException as error:
        if made and undo is not None:
            undo(made[0], error)
        raise
    return made[0], notes


def _agree_on_nccl(setup: NcclSetup, *, has_order: bool) -> tuple[bytes, list[int]]:
    """Rank 0's unique id, once all ranks have an NCCL of one version and want the same, and the ranks without
    ``has_order``. Raises on every rank."""
    rendezvous = setup.rendezvous
    facts: dict[str, Any] = {"has_order": has_order}

    def look() -> None:
        facts["version"] = nccl_library.info().version
        if rendezvous.rank == 0:
            facts["id"] = nccl_library.unique_id().hex()

    error = rendezvous.attempt(look)
    everyone = rendezvous.exchange({**facts, "error": error, "choices": json.dumps(asdict(setup.choices), default=str)})
    failed = "".join(f"\n  rank {rank}: {one['error']}" for rank, one in enumerate(everyone) if one["error"])
    if failed:
        raise DeviceError(f"some ranks cannot use NCCL{failed}")
    versions = [one["version"] for one in everyone]
    if len(set(versions)) > 1:
        texts = [nccl_library.version_text(version) for version in versions]
        raise DeviceError(f"ranks have different versions of NCCL: {texts} (by rank); set BW_NCCL_LIB to one")
    wanted = [one["choices"] for one in everyone]
    if len(set(wanted)) > 1:
        raise ValueError(f"ranks gave different options to one communicator: {wanted}")
    return bytes.fromhex(everyone[0]["id"]), [rank for rank, one in enumerate(everyone) if not one["has_order"]]


def features(
    comm: Any, choices: NcclChoices, *, has_gathers: bool, has_reduces: bool, overlaps: bool
) -> dict[str, Any]:
    """``has_gathers``, ``has_reduces``: these run here; ``overlaps``: with the other of a pair."""
    found = nccl_library.info()
    has_windows = bool(comm.has_windows)
    return {
        "nccl": nccl_library.version_text(found.version),
        "windows": has_windows,
        "copy_engines": has_gathers and has_windows and choices.cta_policy == "zero",
        "symmetric_avg": has_reduces and has_windows and found.features["symmetric_avg"],
        "overlap": overlaps,
    }
