"""What the sections of bench_gpu.py share: device time of interleaved cases, the ceilings of this run, and JSON lines.

A sample is the time between two events in the stream. The stream is held up before the first one, 1.5 times as long as
the host needs for the case (at least 1 ms, at most 50), so that the host is ahead and what it needs to launch is not
counted (the section `host` counts that alone). Where the host needed longer than the hold all the same, in half of the
samples, the line has `host_bound: true` (`peer_host_bound` for the peer): that time may be the host's. A result is the
median of its samples, with spread = (75th - 25th percentile) / median; `of_copy` is its rate over the rate of a 4 GB
copy in the same run, counting what must be read and written; `ratio` is peer / ours, so more than 1 means that ours is
faster.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [path for path in map(str, (ROOT, ROOT / "tests", ROOT / "python")) if path not in sys.path]

import torch  # noqa: E402
from harness import Timing, commit, machine, rotation  # noqa: E402
from torch import Tensor  # noqa: E402

from tests.gpu.device import DEVICE  # noqa: E402

__all__ = ["Bench", "DeviceTiming", "random"]

REPEATS = 30
WARM_UP = 3
LEAST_HOLD_S, MOST_HOLD_S = 0.001, 0.05
HOLD_OF_HOST = 1.5
COPY_BYTES = 4 << 30


def random(numel: int, dtype: torch.dtype, *, scale: float = 1.0, positive: bool = False) -> Tensor:
    """Normal random numbers on the device; never zeros, which can be faster than data."""
    tensor = torch.empty(numel, dtype=dtype, device=DEVICE.tensors).normal_(0.0, scale)
    return tensor.abs_() if positive else tensor


@dataclass(frozen=True)
class DeviceTiming(Timing):
    """``host_bound``: the host was not ahead of the device."""

    host_bound: bool = False


class Bench:
    """One section: measures, and writes its lines as they come."""

    def __init__(self, section: str, *, quick: bool, path: Path | None, deadline_s: float) -> None:
        self.section = section
        self.quick = quick
        self._path = path
        self._end = time.monotonic() + deadline_s
        self._facts = {"commit": commit(), "machine": _machine()}
        self.copy_gbps = 0.0

    def time_left(self) -> float:
        return self._end - time.monotonic()

    def size(self, full: int, quick: int) -> int:
        return quick if self.quick else full

    # ---- measuring

    def measure(
        self,
        cases: Mapping[str, Callable[[], object]],
        *,
        repeats: int = REPEATS,
        before: Callable[[str], object] | None = None,
    ) -> dict[str, DeviceTiming]:
        """Device time of the cases, interleaved; ``before(name)`` runs before each sample, not counted.

        Fewer repeats, but at least 5, when the section's time is almost over.
        """
        prepare = before or (lambda name: None)
        repeats = self.size(repeats, 2)
        for _ in range(self.size(WARM_UP, 1)):
            for name, call in cases.items():
                prepare(name)
                call()
        holds_s = {name: self._hold_s(name, call, prepare) for name, call in cases.items()}
        samples: dict[str, list[float]] = {name: [] for name in cases}
        behind = dict.fromkeys(cases, 0)  # samples in which the host needed longer than the hold
        for repeat in range(repeats):
            if repeat >= 5 and self.time_left() < 2.0:
                break
            marks = {}
            hosts_s = {}
            for name in rotation(list(cases), repeat):
                prepare(name)
                begin = time.perf_counter()
                held = DEVICE.mark()
                DEVICE.hold(holds_s[name])
                start = DEVICE.mark()
                cases[name]()
                marks[name] = (held, start, DEVICE.mark())
                hosts_s[name] = time.perf_counter() - begin
            DEVICE.synchronize()
            for name, (held, start, end) in marks.items():
                samples[name].append(DEVICE.between_s(start, end))
                behind[name] += hosts_s[name] > DEVICE.between_s(held, start)
        return {
            name: DeviceTiming(tuple(values), host_bound=2 * behind[name] >= len(values))
            for name, values in samples.items()
        }

    def _hold_s(self, name: str, call: Callable[[], object], prepare: Callable[[str], object]) -> float:
        """How long to hold the stream up for one call: the host's time for it, measured on an idle device, and a half more."""
        prepare(name)
        DEVICE.synchronize()
        begin = time.perf_counter()
        call()
        host_s = time.perf_counter() - begin
        DEVICE.synchronize()
        return min(max(LEAST_HOLD_S, HOLD_OF_HOST * host_s), MOST_HOLD_S)

    def ceilings(self) -> None:
        """Copy, read-modify-write and read-only rates: what the other lines are compared with."""
        numel = self.size(COPY_BYTES, 1 << 20) // 4
        source, target = random(numel, torch.float32), torch.empty(numel, device=DEVICE.tensors)
        cases = {
            "copy_": lambda: target.copy_(source),
            "add_ in place": lambda: source.add_(1e-6),
            "sum": source.sum,
        }
        timings = self.measure(cases)
        self.copy_gbps = 8 * numel / timings["copy_"].median_s / 1e9
        for name, per_element in (("copy_", 8), ("add_ in place", 8), ("sum", 4)):
            self.add(f"ceiling {name}", numel, timings[name], size_bytes=per_element * numel)

    # ---- results

    def omit(self, config: str, reason: str) -> None:
        """A line for what was not measured."""
        self._write({"bench": self.section, "config": config, "omitted": reason, **self._facts})

    def add(
        self,
        config: str,
        numel: int,
        ours: Timing | None,
        *,
        size_bytes: int | None = None,
        peer: str | None = None,
        peer_timing: Timing | None = None,
        **more: Any,
    ) -> None:
        """One line. ``size_bytes``: what must be read and written."""
        ours_s = ours.median_s if ours else None
        peer_s = peer_timing.median_s if peer_timing else None
        gbps = size_bytes / ours_s / 1e9 if size_bytes and ours_s else None
        line = {
            "bench": self.section,
            "config": config,
            "numel": numel,
            "ms": _rounded(ours_s, 1e3),
            "spread": _rounded(ours.spread if ours else None),
            "gbps": _rounded(gbps),
            "of_copy": _rounded(gbps / self.copy_gbps if gbps and self.copy_gbps else None),
            "peer": peer,
            "peer_ms": _rounded(peer_s, 1e3),
            "peer_spread": _rounded(peer_timing.spread if peer_timing else None),
            "ratio": _rounded(peer_s / ours_s if peer_s is not None and ours_s else None),
            "samples": len(ours.samples_s) if ours else None,
            **_host_bound(ours, peer_timing),
            **more,
            **self._facts,
        }
        self._write(line)

    def _write(self, line: Mapping[str, Any]) -> None:
        text = json.dumps(line)
        if self._path is None:
            print(_row(line), flush=True)
        elif str(self._path) in ("-", "/dev/stdout"):  # not opened: that file's position is not that of our own output
            print(text, flush=True)
        else:
            with self._path.open("a") as out:
                out.write(text + "\n")
            print(_row(line), flush=True)

    def add_peers(self, config: str, numel: int, timings: Mapping[str, Timing], size_bytes: int, **more: Any) -> None:
        """A line for "ours" against each other case."""
        peers = [name for name in timings if name != "ours"]
        for peer in peers or [None]:
            timing = timings[peer] if peer is not None else None
            self.add(config, numel, timings["ours"], size_bytes=size_bytes, peer=peer, peer_timing=timing, **more)


def _machine() -> str:
    return machine() if DEVICE.is_simulated else f"{torch.cuda.get_device_name()}, torch {torch.__version__}"


def _host_bound(ours: Timing | None, peer: Timing | None) -> dict[str, bool]:
    pairs = (("host_bound", ours), ("peer_host_bound", peer))
    return {name: True for name, timing in pairs if isinstance(timing, DeviceTiming) and timing.host_bound}


def _rounded(value: float | None, scale: float = 1.0) -> float | None:
    return None if value is None else float(f"{value * scale:.4g}")


def _row(line: Mapping[str, Any]) -> str:
    shown = (
        "bench",
        "config",
        "numel",
        "ms",
        "spread",
        "gbps",
        "of_copy",
        "peer",
        "peer_ms",
        "ratio",
        "host_bound",
        "omitted",
    )
    return "  ".join(f"{name}={line[name]}" for name in shown if line.get(name) is not None)
