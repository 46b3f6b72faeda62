"""``bucketwheel flight DIR``: compares the flight rings that ranks have written to BW_TRACE_DIR, and says which rank
stopped first, and at which operation.

Ranks are compared by the numbers of their operations, never by time: the clocks of hosts differ. Exit status: 0 no rank is
to blame; 1 a rank is, or a file cannot be read; 2 there is no ring in the folder. `read` looks, `judge` decides.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# The words of the reasons (csrc/comm).
_GONE = re.compile(r"rank (\d+)(?: \([^()]*\))? (?:died|has closed the communicator|closed while)")
_ABORTED = re.compile(r"aborted by rank (\d+)")
_FAILED_FIRST = re.compile(r"rank (\d+) failed first")
_NOT_CALLED = re.compile(r"rank (\d+) \([^()]*has not called ([^,()]+?)(?: again)?, [^()]*\)")
_NOT_ARRIVED = re.compile(r"Not arrived: (.*?)(?:\. Unknown|$)", re.MULTILINE)
_CALL = re.compile(r"^  rank (\d+): (?!\(has not arrived\))(.*)$", re.MULTILINE)
_DIFFERENT = "ranks called different operations"
_NOT_NOTICED = "(not noticed yet)"  # by the rank itself: its watchdog has written the ring
_PREFIX = re.compile(r"\[bucketwheel rank \d+/\d+ comm '.*?' seq \d+\] ", re.DOTALL)


@dataclass(frozen=True)
class Ring:
    """One rank's file; csrc/comm/flight.h has the format."""

    facts: Mapping[str, Any]
    operations: Mapping[int, Mapping[str, Any]]  # by number

    @property
    def reason(self) -> str:
        return str(self.facts["reason"])

    @property
    def position(self) -> int:
        """The operation that the rank was in or had still to begin. One of a CUDA graph holds no rank up."""
        unfinished = [seq for seq, op in self.operations.items() if op["state"] not in ("done", "captured")]
        return min(unfinished, default=max(self.operations, default=0) + 1)

    def progress(self, seq: int) -> int:
        """With operation ``seq``: not called, called, begun, finished."""
        op = self.operations.get(seq)
        return 3 if self.position > seq else 0 if op is None else 1 + (op["started_s"] > 0)

    def call(self, seq: int) -> str:
        op = self.operations[seq]
        return f"{op['kind']} of {op['tensors']} tensor{'s' * (op['tensors'] != 1)}, {op['bytes']} bytes"

    def line(self) -> str:
        """Where the rank was, and why it wrote."""
        seq = self.position
        state = ("had not called", "had not begun", "in", "")[self.progress(seq)]
        call = f" ({self.call(seq)})" if seq in self.operations else ""
        reason = _PREFIX.sub("", self.reason).split("\n")[0][:90]
        return f"{self.facts['host']}:{self.facts['pid']}  {state} {seq}{call} | {reason}"


@dataclass(frozen=True)
class Verdict:
    """``culprits``: the ranks that stopped first, at operation ``stopped_at``; ``why`` is empty where there are none."""

    rings: Mapping[int, Ring]  # of one communicator, by rank
    stopped_at: int
    mismatch: Mapping[str, list[int]]  # where ranks called different operations: the ranks by call
    culprits: list[int]
    why: str

    def __str__(self) -> str:
        facts = next(iter(self.rings.values())).facts
        lines = [f"communicator '{facts['comm']}' ({facts['id']}), {facts['world']} ranks, {facts['backend']}"]
        for rank in range(facts["world"]):
            lines.append(f"  rank {rank}  {self.rings[rank].line() if rank in self.rings else 'wrote nothing'}")
        lines += [f"  => {call}: ranks {ranks}" for call, ranks in self.mismatch.items()]
        who = f"ranks {self.culprits} stopped first" if self.why else "no rank stopped before the others"
        return "\n".join([*lines, f"  => {who}, at operation {self.stopped_at}{': ' * bool(self.why)}{self.why}", ""])


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=Path, metavar="DIR", help="the folder in BW_TRACE_DIR")


def main(options: argparse.Namespace) -> int:
    rings, broken = read(options.folder)
    if not rings and not broken:
        print(f"no flight ring (COMM-ID-rankN.json) in {options.folder}", file=sys.stderr)
        return 2
    unread = {int(rank) for line in broken for rank in re.findall(r"-rank(\d+)\.json cannot", line)}
    verdicts = judge(rings, unread)
    print("\n".join([*broken, *map(str, verdicts)]))
    return 1 if broken or any(verdict.culprits for verdict in verdicts) else 0


def read(folder: Path) -> tuple[list[Ring], list[str]]:
    """The rings in ``folder``, and a line for each file that is none."""
    rings, broken = [], []
    for path in sorted(folder.glob("*-rank*.json")):
        try:
            found = json.loads(path.read_text(errors="replace"))
            facts = {
                key: found[key]
                for key in ("comm", "id", "rank", "world", "backend", "host", "pid", "reason", "written_at")
            }
            rings.append(Ring(facts, {op["seq"]: op for op in found["operations"]}))
        except (OSError, ValueError, KeyError, TypeError) as error:
            broken.append(f"{path.name} cannot be read: {type(error).__name__}: {error}")
    return rings, broken


def judge(rings: Iterable[Ring], unread: Collection[int] = ()) -> list[Verdict]:
    """One verdict for each communicator, by name and then by time. ``unread``: ranks whose files cannot be read."""
    groups: dict[tuple[str, str], dict[int, Ring]] = {}
    for ring in sorted(rings, key=lambda ring: (ring.facts["comm"], ring.facts["written_at"])):
        groups.setdefault((ring.facts["comm"], ring.facts["id"]), {})[ring.facts["rank"]] = ring
    return [_judge_one(dict(sorted(group.items())), unread) for group in groups.values()]


def _judge_one(rings: Mapping[int, Ring], unread: Collection[int]) -> Verdict:
    world = next(iter(rings.values())).facts["world"]
    stopped_at, mismatch = _first_mismatch(rings)
    stopped_at = stopped_at or min(ring.position for ring in rings.values())

    def named(pattern: re.Pattern[str]) -> set[int]:
        return {int(rank) for ring in rings.values() for rank in pattern.findall(ring.reason)}

    sizes = sorted(map(len, mismatch.values()))
    most = sizes[-1] if len(sizes) > 1 and sizes[-1] > sizes[-2] else None  # None: no call has the most ranks
    waited = {pair for ring in rings.values() for pair in _NOT_CALLED.findall(ring.reason)}
    # The rank that failed first, as others were told; else the lowest that failed by itself, but for a timeout.
    first = sorted(named(_FAILED_FIRST)) or [rank for rank, ring in rings.items() if _NOT_NOTICED not in ring.reason]
    absent = {
        int(rank)
        for ring in rings.values()
        for text in _NOT_ARRIVED.findall(ring.reason)
        for rank in re.findall(r"rank (\d+)", text)
    }
    progress = {rank: ring.progress(stopped_at) for rank, ring in rings.items()}
    # Best evidence first: a death explains why ranks came late, not the other way round.
    evidence = {
        "called another operation than most ranks": [
            rank for ranks in mismatch.values() if len(ranks) != most for rank in ranks
        ],
        **{f"had not called {call}": [int(rank) for rank, of in waited if of == call] for _, call in waited},
        "died or left": {*range(world)} - {*rings, *unread} | named(_GONE),
        "aborted": named(_ABORTED),
        "failed": [rank for rank in first[:1] if rank in rings and "timeout" not in rings[rank].reason],
        "late": absent or [rank for rank in rings if progress[rank] < max(progress.values())],
    }
    why = next((kind for kind, ranks in evidence.items() if ranks), "")
    return Verdict(rings, stopped_at, mismatch, sorted(evidence.get(why, ())), why)


def _first_mismatch(rings: Mapping[int, Ring]) -> tuple[int, dict[str, list[int]]]:
    """The first operation that ranks called differently: its number, and the ranks by call.

    A rank that was told of it has all calls in its reason, with what a ring does not hold (dtypes, roots).
    """
    told = [ring for ring in rings.values() if _DIFFERENT in ring.reason and _NOT_NOTICED not in ring.reason]
    calls = [(ring.position, [(int(rank), call) for rank, call in _CALL.findall(ring.reason)]) for ring in told]
    for seq in sorted({seq for ring in rings.values() for seq in ring.operations}):
        calls.append((seq, [(rank, ring.call(seq)) for rank, ring in rings.items() if seq in ring.operations]))
    for seq, made in calls:
        if len({call for _, call in made}) > 1:
            return seq, {call: [rank for rank, of in made if of == call] for _, call in made}
    return 0, {}
