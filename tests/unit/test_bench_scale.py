"""The benchmark of large worlds measures what it says."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def bench_scale(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    spec = importlib.util.spec_from_file_location("bench_scale", BENCHMARKS / "bench_scale.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "bench_scale", module)
    spec.loader.exec_module(module)
    return module


def test_every_rank_has_its_share_and_keeps_no_more_in_a_larger_world(bench_scale: ModuleType) -> None:
    numels = bench_scale.llama_7b()[:12]
    found = {world: bench_scale.measure_rank(numels, world, world - 1, 1) for world in (512, 4096)}
    for world, one in found.items():
        assert one["params"] == 12 and one["buckets"] == -(-sum(numels) // (16 << 20))
        assert one["shard_numel"] * world == sum(numels) + one["padding"]
        assert all(len(samples) == 1 for samples in one["samples"].values())
        assert 1000 * one["buckets"] < one["python_bytes"] <= one["python_peak_bytes"] < 100_000 * one["buckets"]
        assert one["native_bytes"] is None or one["native_bytes"] > 1000 * one["segments"]
    assert found[4096]["python_bytes"] < 1.2 * found[512]["python_bytes"]
