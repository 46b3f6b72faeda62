"""``python -m bucketwheel flight DIR``: compares the flight rings that ranks have written to BW_TRACE_DIR and says who
stopped first.

Ranks are compared by the numbers of their operations and by how long each was in one: the clocks of hosts differ. Exit
status: 0 all agree; 1 somebody is to blame, or a file cannot be read; 2 there is no such directory, or no ring in it.
`read` looks, `judge` decides, `render` prints.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["Operation", "Ring", "Verdict", "add_arguments", "judge", "main", "read", "render"]


@dataclass(frozen=True)
class Operation:
    """One operation of a rank, as far as the rank had come with it when it wrote its ring."""

    seq: int
    kind: str
    tensors: int
    size_bytes: int
    state: str  # issued, running, done, failed, captured
    is_begun: bool
    seconds: float  # since it began (since it was called, if it has not begun), until its end or the writing

    @property
    def call(self) -> str:
        return f"{self.kind} of {self.tensors} tensor{'' if self.tensors == 1 else 's'}, {self.size_bytes} bytes"


@dataclass(frozen=True)
class Ring:
    """What one rank of one communicator has written."""

    file: str  # its name up to the rank, which is the communicator's
    comm: str
    id: str  # tells communicators of one name apart, also those of one process
    world: int
    backend: str
    rank: int
    host: str
    pid: int
    written_s: float  # since 1970
    reason: str
    operations: Mapping[int, Operation]  # by seq
    idle_s: float | None  # since the last operation was over; None: there was none

    @property
    def finished(self) -> int:
        """The last operation that was over; 0 if the ring has none."""
        return max((seq for seq, op in self.operations.items() if op.state in _OVER), default=0)

    @property
    def position(self) -> int:
        """The operation that the rank was in or had still to begin. One of a CUDA graph holds nobody up."""
        unfinished = [seq for seq, op in self.operations.items() if op.state not in _OVER]
        return min(unfinished, default=max(self.operations, default=0) + 1)

    @property
    def text(self) -> str:
        """The reason, without the words that name the rank and the communicator."""
        return _PREFIX.sub("", self.reason)


@dataclass(frozen=True)
class Verdict:
    """What is known of one communicator. Lists of ranks are ascending."""

    comm: str
    id: str
    world: int
    rings: Mapping[int, Ring]  # by rank
    missing: list[int]  # ranks without a file
    mismatch: Mapping[str, list[int]]  # of the first operation that differs: the ranks by what they called; else empty
    stopped_at: int  # the first operation that not all have finished (of a mismatch: that differs)
    late: list[int]  # ranks that came to it last, or not at all
    waiting: list[int]  # ranks that were in it meanwhile
    origin: int | None  # the rank whose failure the others were told of
    culprits: list[int]
    lines: list[str] = field(default_factory=list)


_OVER = ("done", "captured")
_PREFIX = re.compile(r"\[bucketwheel rank \d+/\d+ comm '.*?' seq \d+\] ", re.DOTALL)
_NOT_NOTICED = "(not noticed yet)"
# What the reasons say of ranks (csrc/comm).
_GONE = re.compile(r"rank (\d+)(?: \([^()]*\))? (?:died|has closed the communicator|closed while)")
_ABORTED = re.compile(r"aborted by rank (\d+)")
_FAILED_FIRST = re.compile(r"rank (\d+) failed first")
_DIFFERENT, _ABSENT = "ranks called different operations", "(has not arrived)"
_CALL = re.compile(r"^  rank (\d+): (.*)$", re.MULTILINE)
_NOT_ARRIVED = re.compile(r"Not arrived: (.*?)(?:\. Unknown|$)", re.MULTILINE)
_FILE = re.compile(r"(.*)-rank(\d+)\.json")
# Of two ranks that failed together one came late if it was there for less than this part of the other's time; shorter
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
        communicators = [_object_of(verdict) for verdict in verdicts]
        print(json.dumps({"status": status, "broken": broken, "communicators": communicators}))
    else:
        print(render(verdicts, broken))
    return status


# ---- reading ---------------------------------------------------------------------------------------------------------


def read(folder: Path) -> tuple[list[Ring], dict[str, str]]:
    """The rings in ``folder``, and by name of file what is wrong with those that are none."""
    rings, broken = [], {}
    for path in sorted(folder.glob("*.json")):
        if name := _FILE.fullmatch(path.name):
            try:
                rings.append(_ring_of(name[1], json.loads(path.read_text(errors="replace"))))
            except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
                broken[path.name] = f"{type(error).__name__}: {error}"
    return rings, broken


def _ring_of(file: str, found: Any) -> Ring:
    now_s = float(found["now_s"])
    operations = [_operation_of(entry, now_s) for entry in found["operations"]]
    ends = [float(entry["finished_s"]) for entry in found["operations"] if entry["finished_s"] is not None]
    rank, world = int(found["rank"]), int(found["world"])
    if not 0 <= rank < world:
        raise ValueError(f"rank {rank} in a world of {world}")
    return Ring(
        file=file,
        comm=str(found["comm"]),
        id=str(found["id"]),
        world=world,
        backend=str(found["backend"]),
        rank=rank,
        host=str(found["host"]),
        pid=int(found["pid"]),
        written_s=float(found["written_at"]),
        reason=str(found["reason"]),
        operations={op.seq: op for op in operations},
        idle_s=max(0.0, now_s - max(ends)) if ends else None,
    )


def _operation_of(entry: Any, now_s: float) -> Operation:
    began = entry["issued_s"] if entry["started_s"] is None else entry["started_s"]
    ended = now_s if entry["finished_s"] is None else entry["finished_s"]
    return Operation(
        seq=int(entry["seq"]),
        kind=str(entry["kind"]),
        tensors=int(entry["tensors"]),
        size_bytes=int(entry["bytes"]),
        state=str(entry["state"]),
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
    unreadable = {(found[1], int(found[2])) for found in map(_FILE.fullmatch, broken) if found}
    verdicts = []
    for (_, _, world), group in sorted(groups.items(), key=_name_and_time):
        file = next(iter(group.values())).file
        missing = [rank for rank in range(world) if rank not in group and (file, rank) not in unreadable]
        verdicts.append(_judge_one(dict(sorted(group.items())), missing))
    return verdicts


def _name_and_time(of_group: tuple[tuple[str, str, int], Mapping[int, Ring]]) -> tuple[str, float]:
    (comm, _, _), group = of_group
    return comm, max(ring.written_s for ring in group.values())


def _judge_one(rings: Mapping[int, Ring], missing: list[int]) -> Verdict:
    first = next(iter(rings.values()))
    seq, mismatch = _first_mismatch(rings)
    if not mismatch:
        seq = min(ring.position for ring in rings.values())
    late, waiting = ([], []) if mismatch else _late_at(rings, seq)
    gone = {int(rank) for ring in rings.values() for rank in _GONE.findall(ring.reason)} & set(range(first.world))
    aborted = sorted({int(rank) for ring in rings.values() for rank in _ABORTED.findall(ring.reason)})
    origin = _origin(rings, aborted)
    is_timeout = origin is None or origin not in rings or "timeout" in rings[origin].reason
    # Best evidence first: who was seen to die explains who came late, not the other way round.
    failed = [] if is_timeout or origin is None else [origin]
    evidence = [_minority(mismatch), sorted({*missing, *gone}), aborted, failed, late]
    culprits = next((ranks for ranks in evidence if ranks), [])
    verdict = Verdict(first.comm, first.id, first.world, rings, missing, mismatch, seq, late, waiting, origin, culprits)
    verdict.lines.extend(_story(verdict, sorted(gone)))
    return verdict


def _first_mismatch(rings: Mapping[int, Ring]) -> tuple[int, dict[str, list[int]]]:
    """The first operation that ranks called differently: its number, and the ranks by call.

    A rank that was told of it has all calls in its reason, with what a ring does not hold (dtypes, roots).
    """
    for ring in rings.values():
        if _DIFFERENT in ring.reason and _NOT_NOTICED not in ring.reason:
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


def _late_at(rings: Mapping[int, Ring], seq: int) -> tuple[list[int], list[int]]:
    """Who came last to operation ``seq``, which not all have finished, and who was in it meanwhile."""
    progress = {rank: _progress(ring, seq) for rank, ring in rings.items()}
    most = max(progress.values())
    late = [rank for rank in rings if progress[rank] < most]
    inside = {rank: rings[rank].operations[seq].seconds for rank in rings if seq in rings[rank].operations}
    if not late and most in (_CALLED, _BEGUN):
        longest = max(inside.values())
        if longest >= _LEAST_WAIT_S:
            late = [rank for rank, seconds in inside.items() if seconds < _LATE_PART * longest]
    if not late and most == _NOT_CALLED:  # it was a round of agreement, say: only the reasons know
        named = {
            int(rank)
            for ring in rings.values()
            for text in _NOT_ARRIVED.findall(ring.reason)
            for rank in re.findall(r"rank (\d+)", text)
        }
        late = sorted(named & set(rings))
    return late, [rank for rank in inside if rank not in late and progress[rank] in (_CALLED, _BEGUN)]


_NOT_CALLED, _CALLED, _BEGUN, _FINISHED = range(4)


def _progress(ring: Ring, seq: int) -> int:
    if ring.position > seq:
        return _FINISHED
    if seq not in ring.operations:
        return _NOT_CALLED
    return _BEGUN if ring.operations[seq].is_begun else _CALLED


def _origin(rings: Mapping[int, Ring], aborted: Sequence[int]) -> int | None:
    """The rank that failed first, as the others were told; without that the lowest that failed by itself."""
    told = [int(rank) for ring in rings.values() for rank in _FAILED_FIRST.findall(ring.reason)]
    by_themselves = [rank for rank, ring in rings.items() if _NOT_NOTICED not in ring.reason]
    return next(iter([*aborted, *told, *by_themselves]), None)


def _story(verdict: Verdict, gone: Sequence[int]) -> list[str]:
    """The verdict in sentences."""
    seq, rings = verdict.stopped_at, verdict.rings
    lines = []
    if verdict.mismatch:
        calls = "; ".join(f"{call} on {ranks_text(ranks)}" for call, ranks in verdict.mismatch.items())
        lines.append(f"operation {seq} is not the same on all ranks: {calls}")
    for rank in verdict.missing:
        lines.append(f"rank {rank} wrote nothing: {'it died or left, say the others' if rank in gone else 'killed?'}")
    if seen := [rank for rank in gone if rank in rings]:
        lines.append(f"{ranks_text(seen)} died or left, say the others")
    if verdict.late:
        did = _what_the_late_did(verdict)
        lines.append(f"{ranks_text(verdict.late)} stopped first: {did}")
    if verdict.waiting and not verdict.mismatch:
        ops = [rings[rank].operations[seq] for rank in verdict.waiting]
        longest = max(op.seconds for op in ops)
        verb = "waited" if verdict.late or verdict.missing else "was" if len(ops) == 1 else "were"
        lines.append(
            f"{ranks_text(verdict.waiting)} {verb} in operation {seq} ({ops[0].call}) for up to {longest:.1f} s"
        )
    if not lines:
        lines.append(f"all ranks agree: operation {seq - 1} is the last that was over, and nobody had begun another")
    if verdict.origin is not None:
        own = [rings[verdict.origin].text] if verdict.origin in rings else []
        told = [ring.text for ring in rings.values() if re.search(rf"\brank {verdict.origin}\b", ring.text)]
        lines.append(f"the failure began on rank {verdict.origin}: {next(iter([*own, *told]), '(no reason)')}")
    return lines


def _what_the_late_did(verdict: Verdict) -> str:
    seq = verdict.stopped_at
    progress = {_progress(verdict.rings[rank], seq) for rank in verdict.late}
    if progress == {_BEGUN} and all(_progress(ring, seq) <= _BEGUN for ring in verdict.rings.values()):
        return f"came to operation {seq} long after the others"
    if progress == {_BEGUN}:
        return f"in operation {seq}, which others had finished"
    if progress == {_CALLED}:
        return f"operation {seq} was called, and its stream had not come to it"
    if not verdict.waiting and all(_progress(ring, seq) == _NOT_CALLED for ring in verdict.rings.values()):
        return f"behind operation {seq - 1}, and not in a later operation: the others name it"
    return f"had not called operation {seq}"


# ---- printing --------------------------------------------------------------------------------------------------------


def ranks_text(ranks: Sequence[int]) -> str:
    """ "rank 3", "ranks 0-2, 5"."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    texts = [str(first) if first == last else f"{first}-{last}" for first, last in runs]
    return f"rank{'' if len(ranks) == 1 else 's'} {', '.join(texts)}"


def _place_text(ring: Ring, rings: Iterable[Ring]) -> str:
    """What the rank was in, or had not begun, and for how long."""
    seq = ring.position
    op = ring.operations.get(seq)
    if op is not None:
        return f"{'in' if op.is_begun else 'had not begun'} {seq} ({op.call}) for {op.seconds:.1f} s"
    calls = (f" ({other.operations[seq].call})" for other in rings if seq in other.operations)
    idle = "" if ring.idle_s is None else f", idle for {ring.idle_s:.1f} s"
    return f"had not called {seq}{next(calls, '')}{idle}"


def render(verdicts: Sequence[Verdict], broken: Mapping[str, str]) -> str:
    """One line for each rank, and below each communicator what follows from them."""
    lines = [f"{name} cannot be read: {why}" for name, why in broken.items()]
    for verdict in verdicts:
        backend = next(iter(verdict.rings.values())).backend
        is_alone = [other.comm for other in verdicts].count(verdict.comm) == 1
        name = f"'{verdict.comm}'" if is_alone else f"'{verdict.comm}' ({verdict.id})"
        lines += ["", f"communicator {name}, {verdict.world} ranks, {backend}"]
        rows = []
        for rank in range(verdict.world):
            ring = verdict.rings.get(rank)
            if ring is None:
                rows.append((f"rank {rank}", "", "", "wrote nothing" if rank in verdict.missing else "cannot be read"))
                continue
            text = ring.text.split("\n")[0]
            text = text if len(text) <= _REASON_WIDTH else text[: _REASON_WIDTH - 3] + "..."
            place = _place_text(ring, verdict.rings.values())
            rows.append((f"rank {rank}", f"{ring.host}:{ring.pid}", f"finished {ring.finished}", f"{place} | {text}"))
        widths = [max(len(row[i]) for row in rows) for i in range(3)]
        for row in rows:
            lines.append("  " + "  ".join([*(row[i].ljust(widths[i]) for i in range(3)), row[3]]).rstrip())
        lines += ["  => " + line.replace("\n", "\n     ") for line in verdict.lines]
        culprits = ranks_text(verdict.culprits) if verdict.culprits else "nobody"
        lines.append(f"  => look at {culprits}")
    return "\n".join(lines).lstrip("\n")


def _object_of(verdict: Verdict) -> dict[str, Any]:
    def rank_object(ring: Ring) -> dict[str, Any]:
        op = ring.operations.get(ring.position)
        at: dict[str, Any] = {
            "seq": ring.position,
            "kind": None,
            "tensors": None,
            "bytes": None,
            "state": "not called",
            "seconds": None,
        }
        if op is not None:
            at.update(kind=op.kind, tensors=op.tensors, bytes=op.size_bytes, state=op.state, seconds=op.seconds)
        who = {"rank": ring.rank, "host": ring.host, "pid": ring.pid, "backend": ring.backend}
        return {**who, "finished": ring.finished, "at": at, "idle_s": ring.idle_s, "reason": ring.reason}

    return {
        "comm": verdict.comm,
        "id": verdict.id,
        "world": verdict.world,
        "ranks": [rank_object(ring) for ring in verdict.rings.values()],
        "missing": verdict.missing,
        "mismatch": [{"call": call, "ranks": ranks} for call, ranks in verdict.mismatch.items()],
        "stopped_at": verdict.stopped_at,
        "late": verdict.late,
        "waiting": verdict.waiting,
        "origin": verdict.origin,
        "culprits": verdict.culprits,
        "verdict": verdict.lines,
    }
