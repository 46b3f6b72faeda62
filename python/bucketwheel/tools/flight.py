"""``python -m bucketwheel flight DIR``: compares the flight rings that ranks have written to BW_TRACE_DIR, and says who
stopped first, at which operation, and who was late.

Ranks are compared by the numbers of their operations and by how long each was in one: the clocks of hosts differ. Exit
status: 0 nobody is to blame; 1 somebody is, or a file cannot be read; 2 there is no such directory, or no ring in it.
`read` looks, `judge` decides, `render` prints.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

__all__ = ["Operation", "Ring", "Verdict", "add_arguments", "judge", "main", "read", "render"]


@dataclass(frozen=True)
class Operation:
    """One operation of a rank, as far as the rank had come with it when it wrote its ring."""

    seq: int
    call: str  # "all_gather of 2 tensors, 96 bytes"
    is_over: bool  # an operation of a CUDA graph holds nobody up
    is_begun: bool
    seconds: float  # since it began (since it was called, if it has not begun), until its end or the writing


@dataclass(frozen=True)
class Ring:
    """What one rank of one communicator has written."""

    comm: str
    id: str  # tells communicators of one name apart, also those of one process
    world: int
    backend: str
    rank: int
    place: str  # host:pid
    written_s: float  # since 1970
    reason: str
    operations: Mapping[int, Operation]  # by seq

    @property
    def position(self) -> int:
        """The operation that the rank was in or had still to begin."""
        unfinished = [seq for seq, op in self.operations.items() if not op.is_over]
        return min(unfinished, default=max(self.operations, default=0) + 1)

    @property
    def has_noticed(self) -> bool:
        """The rank itself has seen the failure; else its watchdog has written the ring."""
        return "(not noticed yet)" not in self.reason

    @property
    def where(self) -> str:
        op = self.operations.get(self.position)
        if op is None:
            return f"had not called {self.position}"
        return f"{'in' if op.is_begun else 'had not begun'} {op.seq} ({op.call}) for {op.seconds:.1f} s"


@dataclass(frozen=True)
class Verdict:
    """What is known of one communicator. Lists of ranks are ascending."""

    comm: str
    id: str
    world: int
    rings: Mapping[int, Ring]  # by rank
    missing: list[int]  # ranks without a file
    stopped_at: int  # the first operation that not all have finished, or that differs
    mismatch: Mapping[str, list[int]]  # the ranks by what they called, where that differs; else empty
    late: list[int]  # ranks that came to it last, or not at all
    culprits: list[int]  # who stopped first
    why: str  # and how


# What the reasons say of ranks (csrc/comm).
_GONE = re.compile(r"rank (\d+)(?: \([^()]*\))? (?:died|has closed the communicator|closed while)")
_ABORTED = re.compile(r"aborted by rank (\d+)")
_FAILED_FIRST = re.compile(r"rank (\d+) failed first")
_DIFFERENT, _ABSENT = "ranks called different operations", "(has not arrived)"
_CALL = re.compile(r"^  rank (\d+): (.*)$", re.MULTILINE)
_NOT_ARRIVED = re.compile(r"Not arrived: (.*?)(?:\. Unknown|$)", re.MULTILINE)
_PREFIX = re.compile(r"\[bucketwheel rank \d+/\d+ comm '.*?' seq \d+\] ", re.DOTALL)
_FILE = re.compile(r"(.*)-rank(\d+)\.json")
# Of ranks that failed together one came late if it was there for less than this part of the longest time; shorter
# waits than a tenth of a second say nothing.
_LATE_PART, _LEAST_WAIT_S = 0.5, 0.1
_REASON_WIDTH = 90


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("directory", help="the folder that BW_TRACE_DIR named")
    parser.add_argument("--json", action="store_true", help="one object of JSON instead of text")


def main(options: argparse.Namespace) -> int:
    folder = Path(options.directory)
    if not folder.is_dir():
        print(f"{folder} is not a directory", file=sys.stderr)
        return 2
    rings, broken = read(folder)
    if not rings and not broken:
        print(f"no flight ring (COMM-ID-rankN.json) in {folder}", file=sys.stderr)
        return 2
    verdicts = judge(rings, broken)
    status = 1 if broken or any(verdict.culprits for verdict in verdicts) else 0
    if options.json:
        print(json.dumps({"status": status, "broken": broken, "communicators": [asdict(one) for one in verdicts]}))
    else:
        print(render(verdicts, broken))
    return status


# ---- reading ---------------------------------------------------------------------------------------------------------


def read(folder: Path) -> tuple[list[Ring], dict[str, str]]:
    """The rings in ``folder``, and by name of file what is wrong with those that are none."""
    rings, broken = [], {}
    for path in sorted(folder.glob("*.json")):
        if _FILE.fullmatch(path.name):
            try:
                rings.append(_ring_of(json.loads(path.read_text(errors="replace"))))
            except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
                broken[path.name] = f"{type(error).__name__}: {error}"
    return rings, broken


def _ring_of(found: Any) -> Ring:
    operations = [_operation_of(entry, float(found["now_s"])) for entry in found["operations"]]
    rank, world = int(found["rank"]), int(found["world"])
    if not 0 <= rank < world:
        raise ValueError(f"rank {rank} in a world of {world}")
    return Ring(
        comm=str(found["comm"]),
        id=str(found["id"]),
        world=world,
        backend=str(found["backend"]),
        rank=rank,
        place=f"{found['host']}:{found['pid']}",
        written_s=float(found["written_at"]),
        reason=str(found["reason"]),
        operations={op.seq: op for op in operations},
    )


def _operation_of(entry: Any, now_s: float) -> Operation:
    began = entry["issued_s"] if entry["started_s"] is None else entry["started_s"]
    ended = now_s if entry["finished_s"] is None else entry["finished_s"]
    tensors = int(entry["tensors"])
    return Operation(
        seq=int(entry["seq"]),
        call=f"{entry['kind']} of {tensors} tensor{'' if tensors == 1 else 's'}, {entry['bytes']} bytes",
        is_over=entry["state"] in ("done", "captured"),
        is_begun=entry["started_s"] is not None,
        seconds=max(0.0, float(ended) - float(began)),
    )


# ---- judging ---------------------------------------------------------------------------------------------------------


def judge(rings: Iterable[Ring], broken: Iterable[str] = ()) -> list[Verdict]:
    """One verdict for each communicator; of those of one name the last to be written comes last. The ranks of ``broken``
    files have written something: they are not missing."""
    groups: dict[tuple[str, str, int], dict[int, Ring]] = {}
    for ring in rings:
        groups.setdefault((ring.comm, ring.id, ring.world), {})[ring.rank] = ring
    unreadable = {(found[1].rpartition("-")[2], int(found[2])) for found in map(_FILE.fullmatch, broken) if found}
    verdicts = []
    for (_, id, world), group in groups.items():
        missing = [rank for rank in range(world) if rank not in group and (id, rank) not in unreadable]
        verdicts.append(_judge_one(dict(sorted(group.items())), missing))
    return sorted(verdicts, key=lambda one: (one.comm, max(ring.written_s for ring in one.rings.values())))


def _judge_one(rings: Mapping[int, Ring], missing: list[int]) -> Verdict:
    first = next(iter(rings.values()))
    seq, mismatch = _first_mismatch(rings)
    if not mismatch:
        seq = min(ring.position for ring in rings.values())
    late = [] if mismatch else _late_at(rings, seq)
    gone = _named(_GONE, rings) & set(range(first.world))
    # Best evidence first: who was seen to die explains who came late, not the other way round.
    evidence = {
        "called something else than most": _minority(mismatch),
        "died or left": sorted({*missing, *gone}),
        "aborted": sorted(_named(_ABORTED, rings)),
        "failed": _failed_first(rings),
        "late": late,
    }
    why = next((kind for kind, ranks in evidence.items() if ranks), "")
    culprits = evidence.get(why, [])
    return Verdict(first.comm, first.id, first.world, rings, missing, seq, mismatch, late, culprits, why)


def _named(pattern: re.Pattern[str], rings: Mapping[int, Ring]) -> set[int]:
    return {int(rank) for ring in rings.values() for rank in pattern.findall(ring.reason)}


def _failed_first(rings: Mapping[int, Ring]) -> list[int]:
    """The rank that failed first, as the others were told; without that the lowest that failed by itself. A timeout is
    no failure of the rank that has it."""
    told = sorted(_named(_FAILED_FIRST, rings)) or [rank for rank, ring in rings.items() if ring.has_noticed]
    return [rank for rank in told[:1] if rank in rings and "timeout" not in rings[rank].reason]


def _first_mismatch(rings: Mapping[int, Ring]) -> tuple[int, dict[str, list[int]]]:
    """The first operation that ranks called differently: its number, and the ranks by call.

    A rank that was told of it has all calls in its reason, with what a ring does not hold (dtypes, roots).
    """
    for ring in rings.values():
        if _DIFFERENT in ring.reason and ring.has_noticed:
            listed = _CALL.findall(ring.reason)
            calls = {call: [int(r) for r, other in listed if other == call] for _, call in listed if call != _ABSENT}
            if len(calls) > 1:
                return ring.position, calls
    for seq in sorted({seq for ring in rings.values() for seq in ring.operations}):
        calls = {}
        for rank, ring in rings.items():
            if seq in ring.operations:
                calls.setdefault(ring.operations[seq].call, []).append(rank)
        if len(calls) > 1:
            return seq, calls
    return 0, {}


def _minority(calls: Mapping[str, list[int]]) -> list[int]:
    """Everybody but the most; everybody where no call has the most."""
    if not calls:
        return []
    sizes = sorted((len(ranks) for ranks in calls.values()), reverse=True)
    most = sizes[0] if sizes[0] > sizes[1] else None
    return sorted(rank for ranks in calls.values() if len(ranks) != most for rank in ranks)


def _late_at(rings: Mapping[int, Ring], seq: int) -> list[int]:
    """Who came last to operation ``seq``, which not all have finished."""
    progress = {rank: _progress(ring, seq) for rank, ring in rings.items()}
    most = max(progress.values())
    late = [rank for rank in rings if progress[rank] < most]
    if not late and most == _NOT_CALLED:  # a round of agreement: only the reasons know
        named = {
            int(r) for ring in rings.values() for text in _NOT_ARRIVED.findall(ring.reason) for r in _ranks_in(text)
        }
        return sorted(named & set(rings))
    if not late and most != _FINISHED:
        inside = {rank: ring.operations[seq].seconds for rank, ring in rings.items()}
        longest = max(inside.values())
        late = [rank for rank, s in inside.items() if longest >= _LEAST_WAIT_S and s < _LATE_PART * longest]
    return late


def _ranks_in(text: str) -> list[str]:
    return re.findall(r"rank (\d+)", text)


_NOT_CALLED, _CALLED, _BEGUN, _FINISHED = range(4)


def _progress(ring: Ring, seq: int) -> int:
    if ring.position > seq:
        return _FINISHED
    if seq not in ring.operations:
        return _NOT_CALLED
    return _BEGUN if ring.operations[seq].is_begun else _CALLED


# ---- printing --------------------------------------------------------------------------------------------------------


def render(verdicts: Sequence[Verdict], broken: Mapping[str, str]) -> str:
    """One line for each rank, and below each communicator who stopped first."""
    lines = [f"{name} cannot be read: {why}" for name, why in broken.items()]
    for verdict in verdicts:
        backend = next(iter(verdict.rings.values())).backend
        lines += ["", f"communicator '{verdict.comm}' ({verdict.id}), {verdict.world} ranks, {backend}"]
        for rank in range(verdict.world):
            ring = verdict.rings.get(rank)
            if ring is None:
                lines.append(f"  rank {rank}  {'wrote nothing' if rank in verdict.missing else 'cannot be read'}")
            else:
                reason = _PREFIX.sub("", ring.reason).split("\n")[0]
                short = reason if len(reason) <= _REASON_WIDTH else reason[: _REASON_WIDTH - 3] + "..."
                lines.append(f"  rank {rank}  {ring.place}  {ring.where} | {short}")
        lines += [f"  => {call}: ranks {ranks}" for call, ranks in verdict.mismatch.items()]
        if verdict.culprits:
            lines.append(
                f"  => ranks {verdict.culprits} stopped first, at operation {verdict.stopped_at}: {verdict.why}"
            )
        else:
            lines.append(f"  => nobody stopped before the others, at operation {verdict.stopped_at}")
    return "\n".join(lines).lstrip("\n")
