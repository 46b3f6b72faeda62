"""What `make gpu` runs, on the simulated device at small sizes: so that this code is known to work before it meets a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.gpu import run_all
from tests.support.requirements import slow_case

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

import gpu_timing  # noqa: E402

TIMEOUT_S = 200.0

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU: `make gpu` runs these parts as they are"),
    pytest.mark.timeout_s(TIMEOUT_S + 60),
]


def output_of(*argv: str, **variables: str) -> str:
    """The output of a part, which must succeed."""
    environment = {
        **run_all.environment(),
        "BW_GPU_SIMULATE": "1",
        "BW_REQUIRE": "",
        "OMP_NUM_THREADS": "1",
        "BW_CACHE_DIR": os.environ.get("BW_CACHE_DIR", ""),
        **variables,
    }
    environment.pop("PYTEST_ADDOPTS", None)  # of the run that this is part of
    if not environment["BW_CACHE_DIR"]:
        del environment["BW_CACHE_DIR"]  # the native module is where this process has it
    done = subprocess.run(
        [sys.executable, *argv],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, f"{argv} ended with {done.returncode}\n{done.stdout[-6000:]}\n{done.stderr[-3000:]}"
    return done.stdout


PARTS = (
    *("kernels", slow_case("optim,graphs"), slow_case("ordering"), slow_case("nccl one")),
    *(
        slow_case("nccl two"),
        slow_case("nccl two conformance"),
        slow_case("nccl multi"),
        slow_case("nccl multi conformance"),
    ),
)


@pytest.mark.parametrize("parts", PARTS)
def test_the_tests(parts: str) -> None:
    """Ordering alone: all pools of its process are poisoned. Those of NCCL as each part has it, over the fake."""
    chosen = [part for part in run_all.all_parts() if part.name in parts.split(",")]
    variables = dict(chosen[0].variables)
    assert len(chosen) == len(parts.split(","))
    words = [word for part in chosen for word in part.argv[part.argv.index("-ra") + 1 :]]
    out = output_of("-m", "pytest", "-q", "-ra", "-p", "no:cacheprovider", *words, **variables)
    last = out.strip().splitlines()[-1]
    assert " passed" in last, out[-2000:]
    assert "failed" not in last
    assert "BW_POOL_POISON" not in out


@pytest.mark.slow
def test_the_sanitizers_cases() -> None:
    """Those of racecheck are the first of memcheck's."""
    out = output_of("tests/gpu/sanitizer_cases.py", "memcheck")
    ran = json.loads(out.strip().splitlines()[-2])
    assert ran["cases"] == ran["of"] > 100
    assert not ran["left_out"]


def test_the_benchmarks() -> None:
    """Every section writes its lines to standard output, as `make gpu` reads them."""
    out = output_of("benchmarks/bench_gpu.py", "--section", "all", "--quick", "--json", "/dev/stdout")
    printed = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
    lines = [line for line in printed if "omitted" not in line]
    omitted = {line["config"]: line["omitted"] for line in printed if "omitted" in line}
    assert not any(config[0] in "ACDH" for config in omitted), omitted
    of = lambda section: [line for line in lines if line["bench"] == section and "ceiling" not in line["config"]]  # noqa: E731
    assert {line["config"] for line in of("adam")} >= set("ACDEFGH")
    for section, least in (("adam", 24), ("norm", 26), ("layouts", 12), ("host", 4), ("gpt", 8), ("nccl", 8)):
        assert len(of(section)) >= least, section
        assert all(line["ms"] > 0 for line in of(section))
    for line in lines:
        assert line["peer"] is None or line["ratio"] == pytest.approx(line["peer_ms"] / line["ms"], rel=1e-2), line
    by_config = {line["config"]: line for line in lines}
    assert by_config["host time, 300 parameters"]["launches"] <= 8
    for dtype in ("float32", "bfloat16"):  # only the sharded gradients have their sums of squares already
        assert by_config[f"clip {dtype}"]["kernels"]["launch_sumsq"] == 1
        assert by_config[f"clip {dtype}, sharded"]["kernels"] == {"launch_param_sums": 1, "launch_clip": 1}


class Clocks:
    """A device and a host with a clock each: what a launch costs them is given."""

    is_simulated = True

    def __init__(self) -> None:
        self.host_s = 100.0
        self.device_s = 0.0
        self.holds_s: list[float] = []

    def launch(self, host_s: float, device_s: float) -> None:
        self.host_s += host_s
        self.device_s = max(self.device_s, self.host_s) + device_s

    def hold(self, seconds: float) -> None:
        self.holds_s.append(seconds)
        self.launch(0.0, seconds)

    def mark(self) -> float:
        return max(self.device_s, self.host_s)

    def between_s(self, start: float, end: float) -> float:
        return end - start

    def synchronize(self) -> None:
        self.host_s = max(self.host_s, self.device_s)


def test_the_hold_is_as_long_as_the_host_needs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """One launch, 100, and 100 that take the host longer than any hold: those are told apart from the device's time."""
    clocks = Clocks()
    monkeypatch.setattr(gpu_timing, "DEVICE", clocks)
    monkeypatch.setattr(gpu_timing.time, "perf_counter", lambda: clocks.host_s)
    bench = gpu_timing.Bench("any", quick=False, path=tmp_path / "lines", deadline_s=60.0)

    def launching(count: int, host_s: float) -> Callable[[], None]:
        return lambda: [clocks.launch(host_s, 1e-6) for _ in range(count)][0]

    timings = bench.measure({"one": launching(1, 1e-5), "many": launching(100, 5e-5), "slow": launching(100, 1e-3)})
    assert timings["one"].median_s == pytest.approx(1e-6)
    assert timings["many"].median_s == pytest.approx(1e-4)
    assert [timing.host_bound for timing in timings.values()] == [False, False, True]
    assert sorted(set(clocks.holds_s)) == pytest.approx([1e-3, 7.5e-3, 0.05])

    bench.add("both", 1, timings["slow"], peer="many", peer_timing=timings["many"])
    bench.add("both", 1, timings["many"], peer="slow", peer_timing=timings["slow"])
    bench.add("alone", 1, timings["one"])
    lines = [json.loads(line) for line in (tmp_path / "lines").read_text().splitlines()]
    found = [(line.get("host_bound"), line.get("peer_host_bound")) for line in lines]
    assert found == [(True, None), (None, True), (None, None)]
