"""How the ranks of the nccl backend get connected: a unique id goes through a `Rendezvous`, and so does the outcome."""

from __future__ import annotations

import contextlib
import json
import os
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
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

__all__ = ["Making", "NcclChoices", "features", "is_launch_order_kept", "make", "pair", "split"]

_PAUSE_S = 0.01
_LAUNCH_ORDER = nccl_library.LAUNCH_ORDER
_POLICIES = {"default": 0, "efficiency": 1, "zero": 2}


def _claim_launch_order() -> bool:
    """Whether NCCL starts the kernels of several communicators in the order of the calls. It reads the variable once, at
    its first launch: called when this module is imported, which may be too late."""
    if _LAUNCH_ORDER in os.environ:
        return os.environ[_LAUNCH_ORDER] == "1"
    os.environ[_LAUNCH_ORDER] = "1"
    return not (torch.cuda.is_initialized() or _has_nccl_group())


def _has_nccl_group() -> bool:
    """One that has gone, or is somebody else's, has needed CUDA."""
    if not dist.is_available():
        return False
    return any("nccl" in str(dist.get_backend_config(group)) for group in dist.distributed_c10d._world.pg_map)


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
    options: Mapping[str, Any] = field(default_factory=dict)

    def config(self) -> tuple[dict[str, int], str]:
        """The ints of ncclConfig_t, and the name of the network. ValueError for what this NCCL cannot do."""
        rest = dict(self.options)
        net_name = str(rest.pop("net_name", ""))
        found = nccl_library.info()
        config = {name: int(value) for name, value in rest.items()}
        if self.max_ctas is not None:
            config["max_ctas"] = self.max_ctas
        if self.cta_policy is not None:
            if self.cta_policy not in _POLICIES:
                raise ValueError(f"cta_policy must be one of {sorted(_POLICIES)}, got {self.cta_policy!r}")
            config["cta_policy"] = _POLICIES[self.cta_policy]
        if self.cta_policy == "zero" and not (self.registered and found.features["zero_cta"]):
            raise ValueError(
                "cta_policy='zero' needs registered=True and NCCL 2.28 or newer; this is "
                f"{nccl_library.version_text(found.version)} with registered={self.registered}"
            )
        if self.registered and not found.features["windows"]:
            raise ValueError(
                f"registered=True needs NCCL 2.27 or newer with windows; this is {nccl_library.version_text(found.version)} ({found.path})"
            )
        return config, net_name


@dataclass(frozen=True)
class Making:
    """Who is to be connected, and how. ``rendezvous``: of the ranks of the new communicator; None: this process alone."""

    rendezvous: Rendezvous | None
    device: int
    name: str
    timeout_s: float
    choices: NcclChoices = NcclChoices()

    @property
    def rank(self) -> int:
        return 0 if self.rendezvous is None else self.rendezvous.rank

    @property
    def prefix(self) -> str:
        """What messages begin with."""
        world = 1 if self.rendezvous is None else self.rendezvous.size
        return f"[bucketwheel rank {self.rank}/{world} comm '{self.name}' seq 0] "

    def options(self, *, serialises: bool = False) -> Any:
        config, net_name = self.choices.config()
        pool = Pool(device=torch_device(self.device))
        return core.NcclOptions(config, net_name, self.choices.registered, pool._native, serialises)


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
            return f"this rank called {text}, and cannot ask what others did: {trouble or error}"

    def _compare(self, comm: str, seq: int, text: str) -> str:
        keys = [f"check/{comm}/{seq}/{rank}" for rank in range(self._size)]
        self._store.set(keys[self._rank], text)
        until = time.monotonic() + self._timeout_s
        while not has_keys(self._store, keys, max(min(until - time.monotonic(), patience.PATIENCE.peer_s), 0.0)):
            # The others' texts may have come meanwhile, and say more than that a peer has seen how they differ.
            if (trouble := self._peers.trouble()) and not self._store.check(keys):
                return f"this rank called {text}, and others will not: {trouble}"
            if time.monotonic() >= until:
                missing = [rank for rank, key in enumerate(keys) if not self._store.check([key])]
                return f"this rank called {text}; ranks {missing} called nothing for {self._timeout_s} s"
        texts = [self._store.get(key).decode() for key in keys]
        if seq > 1:  # whoever has come here has read what was there before
            self._store.delete_key(f"check/{comm}/{seq - 1}/{self._rank}")
        if len(set(texts)) == 1:
            return ""
        return core.mismatch_text(texts)


def _make_peers(making: Making) -> Any:
    """What the ranks know of each other: by shared memory where they share a host, else through the Store and gloo."""
    rendezvous, name, timeout_s = making.rendezvous, making.name, making.timeout_s
    if rendezvous is None or rendezvous.size == 1:
        return core.peers_of(core.LocalWorld(1).join(0, name, timeout_s))
    try:
        return core.peers_of(shm.connect(rendezvous, name, timeout_s))
    except shm.CannotShare:
        pass
    made: list[Any] = []
    try:
        _on_all_ranks(making, lambda: made.append(agreement.make_peers(rendezvous, name, timeout_s)))
    except BaseException:
        for peers in made:
            peers.leave(0.0)
        raise
    return made[0]


@contextlib.contextmanager
def _peers_to_keep(making: Making) -> Iterator[Any]:
    """New peers, that are left again when what is made of them fails."""
    peers = _make_peers(making)
    try:
        yield peers
    except BaseException:
        peers.leave(0.0)
        raise


def make(making: Making) -> Any:
    """The native communicator of the ranks that meet."""
    unique_id, _ = _agree_on_nccl(making, has_order=True)
    with _peers_to_keep(making) as peers:
        options = _agreed_options(making, peers)

        def one(left_s: float) -> list[Any]:
            return [core.make_nccl_comm(peers, making.device, unique_id, options, left_s)]

        return _all_or_none(making, one)[0]


def pair(making: Making) -> tuple[list[Any], bool]:
    """Two native communicators, for all-gathers and for reduce-scatters, that share what they know of their peers; and
    whether they overlap. They do on all ranks or on none: a rank that takes turns with one that does not may deadlock."""
    unique_id, without_order = _agree_on_nccl(making, has_order=_is_launch_order_kept)
    if without_order:
        warnings.warn(
            f"{_LAUNCH_ORDER} was not 1 on ranks {without_order} when NCCL may first have launched, so all-gathers and "
            "reduce-scatters take turns on all ranks instead of overlapping; import bucketwheel before CUDA is used and "
            "before torch.distributed.init_process_group, or set it to 1",
            stacklevel=3,
        )
    with _peers_to_keep(making) as peers:
        options = _agreed_options(making, peers, serialises=bool(without_order))

        def two(left_s: float) -> list[Any]:
            return list(core.make_nccl_pair(peers, making.device, unique_id, options, left_s))

        shares = os.environ.get("NCCL_COMM_SPLIT_SHARE_RESOURCES", "0") not in ("", "0")  # NCCL heeds it before options
        return _all_or_none(making, two), not (without_order or shares)


def _agreed_options(making: Making, peers: Any, *, serialises: bool = False) -> Any:
    """The native options, on all ranks or on none: whoever went on alone would wait for the others inside NCCL. All check
    what they call if one is told to."""
    if making.rendezvous is None:
        return making.options(serialises=serialises)
    made: list[Any] = []
    checks: list[bool] = []

    def prepare() -> None:
        checks.append(env.flag("BW_COMM_CHECK"))
        made.append(making.options(serialises=serialises))

    if any(map(any, _on_all_ranks(making, prepare, checks))):
        made[0].set_check(_Check(making.rendezvous, peers))
    return made[0]


def _all_or_none(making: Making, make: Callable[[float], list[Any]]) -> list[Any]:
    """The communicators that ``make(seconds left)`` returns, if it works on all ranks; an error on every rank otherwise."""
    rendezvous = making.rendezvous
    if rendezvous is None:
        with _named(making):
            return make(making.timeout_s)
    made: list[Any] = []
    try:
        _on_all_ranks(making, lambda: made.extend(make(rendezvous.left_s)))
    except BaseException as error:
        undo(made, error)
        raise
    return made


@contextlib.contextmanager
def _named(making: Making) -> Iterator[None]:
    """Errors say of which communicator they are, and that they are this rank's."""
    try:
        yield
    except CommError as error:
        if str(error).startswith(making.prefix):
            raise
        facts = {**vars(error), "rank": making.rank, "reason": str(error)}
        raise type(error)(making.prefix + str(error), **facts) from error


def _on_all_ranks(making: Making, step: Callable[[], Any], note: Any = None) -> list[Any]:
    """Everybody's ``note``, after a ``step`` that has worked on all ranks. Else CommError, with what NCCL said on this
    rank; on a rank whose device, build or arguments it was, that error."""
    rendezvous = making.rendezvous
    assert rendezvous is not None
    own: list[Exception] = []

    def attempt() -> None:
        try:
            step()
        except (ValueError, Error) as error:
            own.append(error)
            raise

    failures, notes = rendezvous.outcome(rendezvous.attempt(attempt), note)
    if own and not isinstance(own[0], CommError):
        raise own[0]
    if failures:
        facts = {"rank": making.rank, **_of_nccl(own[0])} if own else {}
        reason = f"the NCCL communicator could not be made on all ranks{failures}"
        raise CommError(making.prefix + reason, reason=reason, **facts)
    return notes


def _of_nccl(error: Exception) -> dict[str, Any]:
    return {name: getattr(error, name) for name in ("nccl_code", "last_error")}


def _agree_on_nccl(making: Making, *, has_order: bool) -> tuple[bytes, list[int]]:
    """Rank 0's unique id, once all ranks have an NCCL of one version and want the same, and the ranks without
    ``has_order``. Raises on every rank."""
    rendezvous = making.rendezvous
    if rendezvous is None:
        return nccl_library.unique_id(), [] if has_order else [0]
    facts: dict[str, Any] = {"has_order": has_order}

    def look() -> None:
        facts["version"] = nccl_library.info().version
        if rendezvous.rank == 0:
            facts["id"] = nccl_library.unique_id().hex()

    error = rendezvous.attempt(look)
    everyone = rendezvous.exchange(
        {**facts, "error": error, "choices": json.dumps(asdict(making.choices), default=str)}
    )
    failed = "".join(f"\n  rank {rank}: {one['error']}" for rank, one in enumerate(everyone) if one["error"])
    if failed:
        raise DeviceError(f"NCCL cannot be used on all ranks{failed}")
    versions = [one["version"] for one in everyone]
    if len(set(versions)) > 1:
        texts = [nccl_library.version_text(version) for version in versions]
        raise DeviceError(f"ranks have different versions of NCCL: {texts} by rank; set BW_NCCL_LIB to one for all")
    wanted = [one["choices"] for one in everyone]
    if len(set(wanted)) > 1:
        raise ValueError(f"ranks gave different options to one communicator: {wanted}")
    return bytes.fromhex(everyone[0]["id"]), [rank for rank, one in enumerate(everyone) if not one["has_order"]]


def split(parent: Any, making: Making, color: int, key: int) -> Any:
    """The native communicator of this rank's part of ``parent``; None for a ``color`` < 0, with a making of nobody."""
    if color < 0:
        return parent.split(None, color, key, making.options(), making.timeout_s)
    with _peers_to_keep(making) as peers:
        options = _agreed_options(making, peers)
        return _all_or_none(making, lambda _: [parent.split(peers, color, key, options, making.timeout_s)])[0]


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
