"""Traces that others have written: memory snapshots of torch, and lists of intervals.

`from_snapshot` reads what ``torch.cuda.memory._dump_snapshot`` has written, `from_csv` a table of intervals. Both raise
ValueError, naming the file and the record, for what is not as it should be.
"""

from __future__ import annotations

import csv
import itertools
import pickle
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import NoneType
from typing import Any

from bucketwheel.pool.placement import PlanKey
from bucketwheel.pool.trace import HEADER, Lifetimes, Trace, TraceEvent, plan_key

# What else one may have at hand, by how it begins. torch.save has written zip files since torch 1.6.
_SNAPSHOT = "expected a file of torch.cuda.memory._dump_snapshot(file)"
_FORMATS = {
    (b"\x1f\x8b",): "a gzip file: unpack it first (gunzip)",
    (b"PK\x03\x04", b"\x80\x02\x8a\nl\xfc\x9cF"): f"a file of torch.save, or a zip file: {_SNAPSHOT}",
    (b"<",): f"HTML, such as a page of memory_viz: {_SNAPSHOT}",
    (b"{", b"["): f"JSON but not of Trace.save, which begins with {HEADER!r}; from torch: {_SNAPSHOT}",
}
_MOST_BYTES = 2**44  # of one key: the sum of half a million such keys fits in 64 bits


def first_byte(path: str | Path) -> bytes:
    """Of a trace, a snapshot or a table. ValueError naming the format of another file, if it is a common one."""
    with open(path, "rb") as file:
        begin = file.read(64)
    for magic, what in _FORMATS.items():
        if begin.lstrip().startswith(magic) and HEADER.encode() not in begin:
            raise ValueError(f"{path}: this is {what}")
    return begin[:1]


# --- torch's snapshots ------------------------------------------------------------------------------------------------


class _PlainUnpickler(pickle.Unpickler):
    """A snapshot has dicts, lists, tuples, texts and numbers, for which a pickle needs no names of Python."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"it names {module}.{name}, which a snapshot cannot contain: no code was run")


def from_snapshot(path: str | Path, device: int | None = None) -> Trace:
    """What torch's caching allocator did on one device. The key ``block/7`` is the eighth block that is met.

    - An ``alloc`` is an acquire. ``free_requested`` is the release: from there on no code uses the block, and a pool
      hands its bytes on under a fence. ``free_completed``, for which torch waits, depends on when events were queried.
      It counts where the snapshot has no request: ``skip_actions``, or the trace begins between the two.
    - A block that is freed but was not allocated before, or is in the segments only, was live at the begin.
    - Sizes are as asked for. Uses by other streams (``record_stream``) are not in a snapshot.
    - ``where`` is the innermost frame of Python outside of torch, else the innermost frame.

    ``device``: None is the only one with events; ValueError if there are several, or none.
    """
    with open(path, "rb") as file:
        try:
            found = _PlainUnpickler(file).load()
        except Exception as error:  # noqa: BLE001 (a damaged pickle may raise anything)
            raise ValueError(f"{path}: not the pickle of a memory snapshot: {error}") from None
    traces, segments = (_field(found, name, list, str(path)) for name in ("device_traces", "segments"))
    busy = [index for index, entries in enumerate(traces) if entries]
    if device is None and len(busy) == 1:
        device = busy[0]
    if not busy:
        raise ValueError(f"{path}: no device has events: torch.cuda.memory._record_memory_history() was not called")
    if device not in busy:
        which = "several devices have events" if device is None else f"device {device} has no events"
        raise ValueError(f"{path}: {which}: choose one of {busy} with --device")
    blocks = _Blocks()
    for at, entry in enumerate(traces[device]):
        blocks.take(entry, f"{path}, entry {at} of device {device}")
    for at, segment in enumerate(segments):
        place = f"{path}, segment {at}"
        if _field(segment, "device", int, place) == device:
            blocks.take_segment(segment, place)
    return Trace(Path(path).name, blocks.at_begin + blocks.events)


def _field(of: Any, name: str, type_: type, place: str) -> Any:
    value = of.get(name) if isinstance(of, dict) else None
    if type(value) is not type_:
        shown = str(value) if isinstance(value, (str, int, float, NoneType)) else type(value).__name__  # may be huge
        raise ValueError(f"{place}: {name} is {shown[:80]!r}, expected {type_.__name__}")
    return value


@dataclass
class _Blocks:
    """Makes events of the entries of one device."""

    at_begin: list[TraceEvent] = field(default_factory=list)  # acquires of what was live before the first entry
    events: list[TraceEvent] = field(default_factory=list)
    live: dict[int, TraceEvent] = field(default_factory=dict)  # the acquire, by address
    requested: set[int] = field(default_factory=set)  # addresses that were freed: completed is what comes after that
    streams: dict[int, int] = field(default_factory=dict)
    leases: int = 0

    def take(self, entry: Any, place: str) -> None:
        action = _field(entry, "action", str, place)
        if action not in ("alloc", "free_requested", "free_completed"):
            return  # about a segment, or none of its bytes
        address, stream = (_field(entry, name, int, place) for name in ("addr", "stream"))
        if action == "alloc":
            if address in self.live:
                raise ValueError(f"{place}: alloc at {address:#x}, but {self.live[address].key} there is not freed")
            self.events.append(self._acquire(address, "size", stream, entry, place))
        elif action == "free_requested" or address in self.live or address not in self.requested:
            if address not in self.live:
                self.at_begin.append(self._acquire(address, "size", stream, entry, place))
            acquire = self.live.pop(address)
            self.events.append(replace(acquire, kind="release", stream=self._stream(stream), where=""))
            self.requested.add(address)

    def take_segment(self, segment: Any, place: str) -> None:
        """Those of its blocks that are live, though no entry is about them, were so all the time."""
        address, stream = (_field(segment, name, int, place) for name in ("address", "stream"))
        for block in _field(segment, "blocks", list, place):
            if _field(block, "state", str, place) == "active_allocated" and address not in self.live:
                self.at_begin.append(self._acquire(address, "requested_size", stream, block, place))
            address += _field(block, "size", int, place)

    def _acquire(self, address: int, size: str, stream: int, entry: Any, place: str) -> TraceEvent:
        nbytes = _field(entry, size, int, place)
        if not 0 <= nbytes <= _MOST_BYTES:
            raise ValueError(f"{place}: {size} is {nbytes}")
        number, self.leases = self.leases, self.leases + 1
        acquire = TraceEvent("acquire", number, f"block/{number}", nbytes, self._stream(stream), _where(entry, place))
        self.live[address] = acquire
        return acquire

    def _stream(self, stream: int) -> int:
        return self.streams.setdefault(stream, len(self.streams))


def _where(entry: Any, place: str) -> str:
    frames = _field(entry, "frames", list, place) if "frames" in entry else []
    names = (_field(frame, "filename", str, place) for frame in frames)
    own = (at for at, name in enumerate(names) if name.endswith(".py") and "/torch/" not in name)
    if (at := next(own, 0)) >= len(frames):
        return ""
    return f"{frames[at]['filename'].rpartition('/')[2]}:{frames[at].get('line')} in {frames[at].get('name')}"


# --- lists of intervals -----------------------------------------------------------------------------------------------

_COLUMNS = ("key", "nbytes", "start", "stop")
_OPTIONAL = ("role", "unit", "position", "dtype")
_TEXTS = ("key", "role", "dtype")


def from_csv(path: str | Path) -> Lifetimes:
    """A table with the columns key, nbytes, start and stop: a row for each interval, half-open, in steps.

    Columns role, unit, position and dtype say what policies may go by; what has no column is read from the key, as in
    `Trace.lifetimes`. They and nbytes are equal in all rows of a key. Records are numbered from 1, the header.
    """
    sizes: dict[str, int] = {}
    keys: dict[str, PlanKey] = {}
    rows: dict[str, list[tuple[int, int, int]]] = {}  # start, stop and the number of the record
    for number, row in _rows(path):
        place, key, nbytes, start, stop = f"{path}, record {number}", *(row[name] for name in _COLUMNS)
        if nbytes > _MOST_BYTES or start >= stop:
            raise ValueError(f"{place}: {nbytes} bytes in steps {start, stop} of key {key!r}")
        of = keys[key] if key in keys else plan_key(key, len(keys))
        of = of._replace(**{name: row[name] for name in _OPTIONAL if name in row})
        if (sizes.setdefault(key, nbytes), keys.setdefault(key, of)) != (nbytes, of):
            before = f"{sizes[key]} and {tuple(keys[key])}"
            raise ValueError(f"{place}: {nbytes} bytes and {tuple(of)}; key {key!r} had {before}")
        rows.setdefault(key, []).append((start, stop, number))
    for key, found in rows.items():
        found.sort()
        for one, other in itertools.pairwise(found):
            if other[0] < one[1]:
                place = f"{path}, record {other[2]}"
                raise ValueError(f"{place}: steps {other[:2]} of key {key!r} overlap {one[:2]} of record {one[2]}")
    intervals = {key: [(start, stop) for start, stop, _ in found] for key, found in rows.items()}
    steps = max((found[-1][1] for found in intervals.values()), default=0)
    return Lifetimes(sizes, intervals, keys, steps)


def _rows(path: str | Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """With the number of the record. Columns that are not known are left out."""
    number = 1
    try:
        with open(path, encoding="utf-8-sig", newline="") as file:
            table = csv.reader(file, strict=True)
            header = next(table, [])
            if missing := [name for name in _COLUMNS if name not in header]:
                raise ValueError(f"no column {', '.join(missing)} in {str(header)[:200]}")
            for number in itertools.count(2):
                if (row := next(table, None)) is None:
                    return
                if len(row) != len(header):
                    raise ValueError(f"{len(row)} values for {len(header)} columns")
                named = {name: text for name, text in zip(header, row, strict=True) if name in _COLUMNS + _OPTIONAL}
                yield number, {name: text if name in _TEXTS else _number(text, name) for name, text in named.items()}
    except (csv.Error, ValueError) as error:
        raise ValueError(f"{path}, record {number}: {error}") from None


def _number(text: str, name: str) -> int:
    if not re.fullmatch(r"[0-9]{1,19}", text):
        raise ValueError(f"{name} is {text[:80]!r}, expected a number")
    return int(text)
