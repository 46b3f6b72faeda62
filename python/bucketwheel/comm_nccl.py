"""How the ranks of the nccl backend get connected: a unique id goes through a `Meeting`, and so does the outcome."""

from __future__ import annotations

import contextlib
import json
import os
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from . import agreement, comm_shm, nccl
from ._build import native
from .device import torch_device
from .errors import CommError, DeviceError
from .meeting import Meeting
from .pool import Pool

__all__ = ["NcclChoices", "borrow", "features", "make", "pair", "split"]

_CHECK_S = 1.0  # how long a rank whose peers have failed may go on waiting for what they call
_LAUNCH_ORDER = "NCCL_LAUNCH_ORDER_IMPLICIT"
_POLICIES = {"default": 0, "efficiency": 1, "zero": 2}


def _claim_launch_order() -> bool:
    """Whether NCCL starts the kernels of several communicators in the order of the calls. It reads the variable once, at
    its first launch: called when this module is imported, which may be too late."""
    if _LAUNCH_ORDER in os.environ:
        return os.environ[_LAUNCH_ORDER] == "1"
    os.environ[_LAUNCH_ORDER] = "1"
    return not (dist.is_available() and dist.is_initialized() and "nccl" in str(dist.get_backend_config()))


_is_launch_order_kept = _claim_launch_order()


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
        found = nccl.info()
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
                f"{nccl.version_text(found.version)} with registered={self.registered}"
            )
        if self.registered and not found.features["windows"]:
            raise ValueError(
                f"registered=True needs NCCL 2.27 or newer with windows; this is {nccl.version_text(found.version)} ({found.path})"
            )
        return config, net_name


class _Check:
    """Debug (``BW_COMM_CHECK=1``): compares every operation of a communicator between the ranks, through the Store."""

    def __init__(self, meeting: Meeting, peers: Any) -> None:
        self._store, self._rank, self._size = meeting.store, meeting.rank, meeting.size
        self._timeout_s, self._peers = meeting.timeout_s, peers

    def __call__(self, comm: str, seq: int, text: str) -> str:
        keys = [f"check/{comm}/{seq}/{rank}" for rank in range(self._size)]
        self._store.set(keys[self._rank], text)
        begin = time.monotonic()
        while left_s := max(begin + self._timeout_s - time.monotonic(), 0):
            try:
                self._store.wait(keys, timedelta(seconds=min(left_s, _CHECK_S)))
                break
            except RuntimeError:  # DistStoreError, but of a FileStore
                if trouble := self._peers.trouble():
                    return f"this rank called {text}, and others will not: {trouble}"
        missing = [rank for rank, key in enumerate(keys) if not self._store.check([key])]
        if missing:
            return f"this rank called {text}; ranks {missing} called nothing for {self._timeout_s} s"
        texts = [self._store.get(key).decode() for key in keys]
        if seq > 1:  # whoever has come here has read what was there before
            self._store.delete_key(f"check/{comm}/{seq - 1}/{self._rank}")
        if len(set(texts)) == 1:
            return ""
        return "ranks called different operations:" + "".join(f"\n  rank {r}: {one}" for r, one in enumerate(texts))


def _options(
    choices: NcclChoices, device: int, meeting: Meeting | None, peers: Any = None, *, serialises: bool = False
) -> Any:
    config, net_name = choices.config()
    pool = Pool(device=torch_device(device))
    checks = os.environ.get("BW_COMM_CHECK") == "1"
    check = _Check(meeting, peers) if checks and meeting is not None else None
    return native().NcclOptions(config, net_name, choices.registered, pool._native, serialises, check)


def _make_peers(meeting: Meeting | None, name: str, timeout_s: float) -> Any:
    """What the ranks know of each other: by shared memory where they share a host, else through the Store and gloo."""
    if meeting is None or meeting.size == 1:
        return native().peers_of(native().LocalWorld(1).join(0, name, timeout_s))
    try:
        return native().peers_of(comm_shm.connect(meeting, name, timeout_s))
    except comm_shm.NotOneHost:
        return agreement.make_peers(meeting, name, timeout_s)


@contextlib.contextmanager
def _peers_to_keep(meeting: Meeting | None, name: str, timeout_s: float) -> Iterator[Any]:
    """New peers, that are left again when what is made of them fails."""
    peers = _make_peers(meeting, name, timeout_s)
    try:
        yield peers
    except BaseException:
        peers.leave(0.0)
        raise


def make(meeting: Meeting | None, device: int, name: str, timeout_s: float, choices: NcclChoices) -> Any:
    """The native communicator of the ranks that meet (None: of this process alone)."""

    def one(peers: Any, unique_id: bytes, options: Any, left_s: float) -> list[Any]:
        return [native().make_nccl_comm(peers, device, unique_id, options, left_s)]

    unique_id, _ = _agree_on_nccl(meeting, choices, has_order=True)
    return _make(meeting, device, name, timeout_s, choices, one, unique_id)[0]


def pair(
    meeting: Meeting | None, device: int, name: str, timeout_s: float, choices: NcclChoices
) -> tuple[list[Any], bool]:
    """Two native communicators, for all-gathers and for reduce-scatters, that share what they know of their peers; and
    whether they overlap. They do on all ranks or on none: a rank that takes turns with one that does not may deadlock."""

    def two(peers: Any, unique_id: bytes, options: Any, left_s: float) -> list[Any]:
        return list(native().make_nccl_pair(peers, device, unique_id, options, left_s))

    unique_id, without_order = _agree_on_nccl(meeting, choices, has_order=_is_launch_order_kept)
    if without_order:
        warnings.warn(
            f"{_LAUNCH_ORDER} was not 1 on ranks {without_order} when NCCL may first have launched, so all-gathers and "
            "reduce-scatters take turns on all ranks instead of overlapping; import bucketwheel before "
            "torch.distributed.init_process_group, or set it to 1",
            stacklevel=3,
        )
    natives = _make(meeting, device, name, timeout_s, choices, two, unique_id, serialises=bool(without_order))
    return natives, not without_order


def _make(
    meeting: Meeting | None,
    device: int,
    name: str,
    timeout_s: float,
    choices: NcclChoices,
    make: Callable[[Any, bytes, Any, float], list[Any]],
    unique_id: bytes,
    *,
    serialises: bool = False,
) -> list[Any]:
    with _peers_to_keep(meeting, name, timeout_s) as peers:
        options = _options(choices, device, meeting, peers, serialises=serialises)
        if meeting is None:
            return make(peers, unique_id, options, timeout_s)
        left_s = max(meeting.deadline - time.monotonic(), 0.1)
        return _all_or_none(meeting, lambda: make(peers, unique_id, options, left_s))


def _all_or_none(meeting: Meeting, make: Callable[[], list[Any]]) -> list[Any]:
    """The communicators that ``make`` returns, if it works on all ranks; CommError on every rank otherwise."""
    made: list[Any] = []
    failures = meeting.failures(meeting.attempt(lambda: made.extend(make())))
    if failures:
        for comm in made:
            if comm is not None:
                comm.abort("another rank could not make its part")
                comm.close(0.0)
        raise CommError(f"the NCCL communicator could not be made on all ranks{failures}")
    return made


def _agree_on_nccl(meeting: Meeting | None, choices: NcclChoices, *, has_order: bool) -> tuple[bytes, list[int]]:
    """Rank 0's unique id, once all ranks have an NCCL of one version and want the same, and the ranks without
    ``has_order``. Raises on every rank."""
    if meeting is None:
        return nccl.unique_id(), [] if has_order else [0]
    facts: dict[str, Any] = {"has_order": has_order}

    def look() -> None:
        facts["version"] = nccl.info().version
        if meeting.rank == 0:
            facts["id"] = nccl.unique_id().hex()

    error = meeting.attempt(look)
    everyone = meeting.exchange({**facts, "error": error, "choices": json.dumps(asdict(choices), default=str)})
    failed = "".join(f"\n  rank {rank}: {one['error']}" for rank, one in enumerate(everyone) if one["error"])
    if failed:
        raise DeviceError(f"NCCL cannot be used on all ranks{failed}")
    versions = [one["version"] for one in everyone]
    if len(set(versions)) > 1:
        texts = [nccl.version_text(version) for version in versions]
        raise DeviceError(f"ranks have different versions of NCCL: {texts} by rank; set BW_NCCL_LIB to one for all")
    wanted = [one["choices"] for one in everyone]
    if len(set(wanted)) > 1:
        raise ValueError(f"ranks gave different options to one communicator: {wanted}")
    return bytes.fromhex(everyone[0]["id"]), [rank for rank, one in enumerate(everyone) if not one["has_order"]]


def split(
    parent: Any,
    meeting: Meeting | None,
    colour: int,
    key: int,
    name: str,
    device: int,
    timeout_s: float,
    choices: NcclChoices,
) -> Any:
    """The native communicator of this rank's part of ``parent``; ``meeting`` is that part's, None for no part."""
    if colour < 0:
        options = _options(choices, device, None)
        parent.split(None, colour, key, options, timeout_s)
        return None
    with _peers_to_keep(meeting, name, timeout_s) as peers:
        options = _options(choices, device, meeting, peers)
        make = lambda: [parent.split(peers, colour, key, options, timeout_s)]  # noqa: E731
        return make()[0] if meeting is None else _all_or_none(meeting, make)[0]


def borrow(meeting: Meeting, group: dist.ProcessGroup, device: int, name: str, timeout_s: float) -> Any:
    """A native communicator around the one that ``group`` has for the device."""
    backend: Any = group._get_backend(torch_device(device))
    failures = meeting.failures(meeting.attempt(nccl.info) or _why_not_to_borrow(backend, device))
    if failures:
        raise ValueError(f"the process group has no NCCL communicator that can be borrowed{failures}")
    with _peers_to_keep(meeting, name, timeout_s) as peers:
        options = _options(NcclChoices(), device, meeting, peers)
        make = lambda: [native().borrow_nccl_comm(peers, device, backend._comm_ptr(), options)]  # noqa: E731
        return _all_or_none(meeting, make)[0]


def _why_not_to_borrow(backend: Any, device: int) -> str:
    """A communicator is a pointer into the library that made it: no other copy of NCCL can use it."""
    if not hasattr(backend, "_comm_ptr"):
        return f"there is none on {torch_device(device)}: {backend}"
    found, of_torch = nccl.info(), nccl.version_of_torch()
    if found.found != "loaded already":
        remedy = "; unset it" if found.found == "BW_NCCL_LIB" else ""
        return (
            f"bucketwheel uses {found.path} ({found.found}), which need not be the copy that torch has loaded{remedy}"
        )
    if of_torch not in (None, nccl.version_text(found.version)):
        return f"torch has NCCL {of_torch}, and bucketwheel {nccl.version_text(found.version)} ({found.path})"
    return ""


def features(comm: Any, choices: NcclChoices, *, has_gathers: bool, overlaps: bool) -> dict[str, Any]:
    """``has_gathers``: all-gathers run here; ``overlaps``: with the other of a pair."""
    found = nccl.info()
    has_windows = bool(comm.has_windows)
    return {
        "nccl": nccl.version_text(found.version),
        "windows": has_windows,
        "copy_engines": has_gathers and has_windows and choices.cta_policy == "zero",
        "symmetric_avg": has_windows and found.features["symmetric_avg"],
        "overlap": overlaps,
    }
