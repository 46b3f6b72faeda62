"""What `make gpu` runs, on the simulated device at small sizes: so that this code is known to work before it meets a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.gpu import run_all
from tests.support.requirements import slow_case

ROOT = Path(__file__).resolve().parents[2]
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


SLOW = ["pool_plan", "optim,graphs", "shard", "checkpoint", "ordering", "nccl one", "nccl two", "nccl two conformance"]
SLOW += ["nccl multi", "nccl multi conformance"]


@pytest.mark.parametrize("parts", ["kernels", *map(slow_case, SLOW)])
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


@pytest.mark.slow
def test_the_benchmarks() -> None:
    """Every section writes its lines to standard output, as `make gpu` reads them."""
    out = output_of("benchmarks/bench_gpu.py", "--section", "all", "--quick", "--json", "/dev/stdout")
    printed = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
    lines = [line for line in printed if "omitted" not in line]
    omitted = {line["config"]: line["omitted"] for line in printed if "omitted" in line}
    assert not any(config[0] in "ACDH" for config in omitted), omitted
    of = lambda section: [line for line in lines if line["bench"] == section and "ceiling" not in line["config"]]  # noqa: E731
    for section, least in (
        ("adam", 24),
        ("norm", 26),
        ("layouts", 12),
        ("host", 17),
        ("sweep", 10),
        ("gpt", 8),
        ("nccl", 8),
        ("shard", 20),
    ):
        assert len(of(section)) >= least, section
        assert all(line["ms"] > 0 for line in of(section))
    by_config = {line["config"]: line for line in lines}
    assert by_config["host time, 300 parameters"]["launches"] <= 8
    for dtype in ("float32", "bfloat16"):  # only the sharded gradients have their sums of squares already
        assert by_config[f"clip {dtype}"]["kernels"]["launch_sumsq"] == 1
        assert by_config[f"clip {dtype}, sharded"]["kernels"] == {"launch_param_sums": 1, "launch_clip": 1}
    for backend, copies in (("local", 1), ("nccl", 0)):  # a gather is one copy, or NCCL's, and nothing beside it
        done = by_config[f"layer, host time, unshard, {backend}"]["done"]
        assert done["operations"] == {} and done["calls"].get("memcpy_async", 0) == copies
        assert not any(call.startswith("launch_") for call in done["calls"])
