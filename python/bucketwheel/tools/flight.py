"""``python -m bucketwheel flight DIR``: compares the flight rings that ranks have written to BW_TRACE_DIR, and says who
stopped first, at which operation, and who was late.

Ranks are compared by the numbers of their operations, never by time: the clocks of hosts differ. Exit status: 0 nobody is
to blame; 1 somebody is, or a file cannot be read; 2 there is no such directory, or no ring in it. `read` looks, `judge`
decides, `render` prints.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["Ring", "Verdict", "add_arguments", "judge", "main", "read", "render"]

# What the reasons say of ranks (csrc/comm).
_GONE = re.compile(r"rank (\d+)(?: \([^()]*\))? (?:died|has closed the communicator|closed while)")
_ABORTED = re.compile(r"aborted by rank (\d+)")
_FAILED_FIRST = re.compile(r"rank (\d+) failed first")
_NOT_CALLED = re.compile(r"rank (\d+) \([^()]*has not called ([^,()]+?)(?: again)?, [^()]*\)")
_NOT_ARRIVED = re.compile(r"Not arrived: (.*?)(?:\. Unknown|$)", re.MULTILINE)
_CALL = re.compile(r"^  rank (\d+): (?!\(has not arrived\))(.*)$", re.MULTILINE)
_DIFFERENT = "ranks called different operations"
_NOT_NOTICED = "(not noticed yet)"  # by the rank itself: its watchdog has written the ring
_PREFIX = re.compile(r"\[bucketwheel rank \d+/\d+ comm '.*?' seq \d+\] ", re.DOTALL)
_FILE = re.compile(r"(.*)-rank(\d+)\.json")
_REASON_WIDTH = 90


@dataclass(frozen=True)
class Ring:
    """What one rank of one communicator has written; csrc/comm/flight.h has the format of both."""

    facts: Mapping[str, Any]
    operations: Mapping[int, Mapping[str, Any]]  # by number

    @property
    def reason(self) -> str:
        return str(self.facts["reason"])

    @property
    def position(self) -> int:
        """The operation that the rank was in or had still to begin. One of a CUDA graph holds nobody up."""
        unfinished = [seq for seq, op in self.operations.items() if op["state"] not in ("done", "captured")]
        return min(unfinished, default=max(self.operations, default=0) + 1)

    def progress(self, seq: int) -> int:
        """With operation ``seq``: not called, called, begun, finished."""
        op = self.operations.get(seq)
        return 3 if self.position > seq else 0 if op is None else 1 + (op["started_s"] is not None)

    def call(self, seq: int) -> str:
        op = self.operations[seq]
        return f"{op['kind']} of {op['tensors']} tensor{'s' * (op['tensors'] != 1)}, {op['bytes']} bytes"

    def line(self) -> str:
        """Who the rank is, where it was and for how long, and why it wrote."""
        seq, where = self.position, f"had not called {self.position}"
        if (op := self.operations.get(seq)) is not None:
            is_begun = op["started_s"] is not None
            until = self.facts["now_s"] if op["finished_s"] is None else op["finished_s"]
            seconds = until - op["started_s" if is_begun else "issued_s"]
            where = f"{'in' if is_begun else 'had not begun'} {seq} ({self.call(seq)}) for {seconds:.1f} s"
        reason = _PREFIX.sub("", self.reason).split("\n")[0]
        short = reason if len(reason) <= _REASON_WIDTH else reason[: _REASON_WIDTH - 3] + "..."
        return f"{self.facts['host']}:{self.facts['pid']}  {where} | {short}"


# Of one communicator: "comm", "id", "world", "backend"; "ranks", a line on each rank that has written; "missing", the
# ranks without a file; "stopped_at", the first operation that not all have finished, or that differs; "mismatch", the
# ranks by what they called, where that differs; "late"; "culprits", who stopped first, and "why". All are values of JSON.
Verdict = dict[str, Any]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("directory", help="the folder that BW_TRACE_DIR named")
    parser.add_argument("--json", action="store_true", help="one object of JSON instead of text")


def main(options: argparse.Namespace) -> int:
    folder = Path(options.directory)
    rings, broken = read(folder)
    if not rings and not broken:
        why = f"no flight ring (COMM-ID-rankN.json) in {folder}" if folder.is_dir() else f"{folder} is not a directory"
        print(why, file=sys.stderr)
        return 2
    verdicts = judge(rings, broken)
    status = 1 if broken or any(verdict["culprits"] for verdict in verdicts) else 0
    found = {"status": status, "broken": broken, "communicators": verdicts}
    print(json.dumps(found) if options.json else render(verdicts, broken))
    return status


def read(folder: Path) -> tuple[list[Ring], dict[str, str]]:
    """The rings in ``folder``, and by name of file what is wrong with those that are none."""
    rings, broken = [], {}
    for path in sorted(folder.glob("*-rank*.json")):
        try:
            found = json.loads(path.read_text(errors="replace"))
            if not 0 <= found["rank"] < found["world"]:
                raise ValueError(f"rank {found['rank']} in a world of {found['world']}")
            rings.append(Ring(found, {op["seq"]: op for op in found["operations"]}))
        except (OSError, ValueError, KeyError, TypeError) as error:
            broken[path.name] = f"{type(error).__name__}: {error}"
    return rings, broken


def judge(rings: Iterable[Ring], broken: Iterable[str] = ()) -> list[Verdict]:
    """One verdict for each communicator, by name and then by time. The ranks of ``broken`` files have written something: they
    are not missing."""
    groups: dict[tuple[str, str], dict[int, Ring]] = {}
    for ring in sorted(rings, key=lambda ring: (ring.facts["comm"], ring.facts["written_at"])):
        groups.setdefault((ring.facts["comm"], ring.facts["id"]), {})[ring.facts["rank"]] = ring
    unreadable = {(found[1].rpartition("-")[2], int(found[2])) for found in map(_FILE.fullmatch, broken) if found}
    return [
        _judge_one(dict(sorted(group.items())), {rank for of, rank in unreadable if of == id})
        for (_, id), group in groups.items()
    ]


def _judge_one(rings: Mapping[int, Ring], unreadable: set[int]) -> Verdict:
    facts = next(iter(rings.values())).facts
    missing = sorted(set(range(facts["world"])) - set(rings) - unreadable)
    stopped_at, mismatch = _first_mismatch(rings)
    if not mismatch:
        stopped_at = min(ring.position for ring in rings.values())
    late = [] if mismatch else _late_at(rings, stopped_at)
    # Best evidence first: who was seen to die explains who came late, not the other way round.
    evidence = {
        "called something else than most": _minority(mismatch),
        **_not_called(rings),
        "died or left": sorted({*missing, *_named(_GONE, rings)}),
        "aborted": sorted(_named(_ABORTED, rings)),
        "failed": _failed_first(rings),
        "late": late,
    }
    why = next((kind for kind, ranks in evidence.items() if ranks), "")
    return {
        **{name: facts[name] for name in ("comm", "id", "world", "backend")},
        "ranks": {rank: ring.line() for rank, ring in rings.items()},
        "missing": missing,
        "stopped_at": stopped_at,
        "mismatch": mismatch,
        "late": late,
        "culprits": evidence.get(why, []),
        "why": why,
    }


def _named(pattern: re.Pattern[str], rings: Mapping[int, Ring]) -> set[int]:
    return {int(rank) for ring in rings.values() for rank in pattern.findall(ring.reason)}


def _not_called(rings: Mapping[int, Ring]) -> dict[str, list[int]]:
    """The ranks that others have waited for in vain, by what these had called."""
    found = {pair for ring in rings.values() for pair in _NOT_CALLED.findall(ring.reason)}
    return {f"had not called {call}": sorted(int(rank) for rank, of in found if of == call) for _, call in found}


def _failed_first(rings: Mapping[int, Ring]) -> list[int]:
    """The rank that failed first, as the others were told; without that the lowest that failed by itself. A timeout is
    no failure of the rank that has it."""
    noticed = [rank for rank, ring in rings.items() if _NOT_NOTICED not in ring.reason]
    told = sorted(_named(_FAILED_FIRST, rings)) or noticed
    return [rank for rank in told[:1] if rank in rings and "timeout" not in rings[rank].reason]


def _first_mismatch(rings: Mapping[int, Ring]) -> tuple[int, dict[str, list[int]]]:
    """The first operation that ranks called differently: its number, and the ranks by call.

    A rank that was told of it has all calls in its reason, with what a ring does not hold (dtypes, roots).
    """
    told = [ring for ring in rings.values() if _DIFFERENT in ring.reason and _NOT_NOTICED not in ring.reason]
    calls: list[tuple[int, Sequence[tuple[Any, str]]]] = [(ring.position, _CALL.findall(ring.reason)) for ring in told]
    for seq in sorted({seq for ring in rings.values() for seq in ring.operations}):
        calls.append((seq, [(rank, ring.call(seq)) for rank, ring in rings.items() if seq in ring.operations]))
    for seq, made in calls:
        by_call: dict[str, list[int]] = {}
        for rank, call in made:
            by_call.setdefault(call, []).append(int(rank))
        if len(by_call) > 1:
            return seq, by_call
    return 0, {}


def _minority(calls: Mapping[str, list[int]]) -> list[int]:
    """Everybody but the most; everybody where no call has the most."""
    sizes = sorted((len(ranks) for ranks in calls.values()), reverse=True)
    most = sizes[0] if sizes and sizes[0] > sizes[1] else None
    return sorted(rank for ranks in calls.values() if len(ranks) != most for rank in ranks)


def _late_at(rings: Mapping[int, Ring], seq: int) -> list[int]:
    """Who came last to operation ``seq``: whom the reasons say to be missing, else those that had come less far with it."""
    texts = [text for ring in rings.values() for text in _NOT_ARRIVED.findall(ring.reason)]
    absent = {int(rank) for text in texts for rank in re.findall(r"rank (\d+)", text)}
    progress = {rank: ring.progress(seq) for rank, ring in rings.items()}
    return sorted(absent) or [rank for rank in rings if progress[rank] < max(progress.values())]


def render(verdicts: Iterable[Verdict], broken: Mapping[str, str]) -> str:
    """One line for each rank, and below each communicator who stopped first."""
    lines = [f"{name} cannot be read: {why}" for name, why in broken.items()]
    for verdict in verdicts:
        lines.append(
            f"\ncommunicator '{verdict['comm']}' ({verdict['id']}), {verdict['world']} ranks, {verdict['backend']}"
        )
        for rank in range(verdict["world"]):
            nothing = "wrote nothing" if rank in verdict["missing"] else "cannot be read"
            lines.append(f"  rank {rank}  {verdict['ranks'].get(rank, nothing)}")
        lines += [f"  => {call}: ranks {ranks}" for call, ranks in verdict["mismatch"].items()]
        who = f"ranks {verdict['culprits']} stopped first" if verdict["why"] else "nobody stopped before the others"
        lines.append(f"  => {who}, at operation {verdict['stopped_at']}{': ' * bool(verdict['why'])}{verdict['why']}")
    return "\n".join(lines).lstrip("\n")
