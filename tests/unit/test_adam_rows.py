"""The factors of gradients: on the device they are what they are on the host, in graphs too. The rows:
tests/unit/test_adam_table.py."""

from __future__ import annotations

import random
import struct
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from bucketwheel.device import CPU
from bucketwheel.kernels.adam_rows import GradFactors
from bucketwheel.native import core
from tests.support.simulated_cuda import Graph, posing

COUNT = 5


def made(count: int, device: int) -> GradFactors:
    return GradFactors(core.GradTable(device, count), device)


def changed(factors: GradFactors, seed: int, device: torch.device | None = None) -> list[float]:
    """The factors after a number of changes, by what `vector` and every single one say, which is asked now and then."""
    rng = random.Random(seed)
    expected = [1.0] * COUNT
    for _ in range(30):
        indices = sorted(rng.sample(range(COUNT), rng.choice([1, 2, COUNT])))
        factor = rng.choice([0.5, 2.0, 4.0])
        what = rng.choice(["scale", "scale by a tensor", "set", "reset all", "ask", "carry over"])
        if what.startswith("scale"):
            factors.scale(indices, torch.tensor([factor], dtype=torch.float32) if "tensor" in what else factor)
            expected = [value * (factor if i in indices else 1.0) for i, value in enumerate(expected)]
        elif what == "set":
            factors.table.set_factor(indices[0], factor)
            expected[indices[0]] = factor
        elif what == "reset all":
            factors.reset_all()
            expected = [1.0] * COUNT
        elif what == "ask":
            assert factors.vector().tolist() == expected
        else:
            old, factors = factors, made(COUNT, factors._device)
            factors.carry_over(old, range(COUNT))
        assert [float(factors[i]) for i in range(COUNT)] == expected, what
        assert all(expected[i] == 0.5 for i in range(COUNT) if factors.is_known(i, 0.5))
    return factors.vector().tolist()


@pytest.mark.parametrize("seed", range(8))
def test_a_device_has_the_factors_of_the_host(seed: int) -> None:
    expected = changed(made(COUNT, CPU), seed)
    with posing():
        assert changed(made(COUNT, 0), seed) == expected


@pytest.mark.parametrize("is_on_cuda", [False, True])
def test_ranks_compare_what_the_host_knows(is_on_cuda: bool) -> None:
    with posing() if is_on_cuda else nullcontext():
        factors = made(2, 0 if is_on_cuda else CPU)
        assert factors.known == b""
        factors.scale([1], 0.5)
        known = factors.known
        assert struct.unpack("2d", known) == (1.0, 0.5)
        assert factors.vector().tolist() == [1.0, 0.5]
        assert factors.known == (b"" if is_on_cuda else known), "the device has them now"


def test_factors_are_reset_in_every_replay() -> None:
    """A capture resets all, then scales; what is found before a replay counts for nothing."""
    with posing() as library:
        factors: Any = made(2, 0)
        graph = Graph(library)
        with graph:
            factors.reset_all()
            assert not factors.are_unsure
            factors.scale([0], torch.tensor(0.5))
        assert factors.may_be_replayed and factors.are_unsure, "a replay may have changed them"
        assert not factors.is_known(1, 1.0)
        factors.reset_all()
        assert factors.vector().tolist() == [1.0, 1.0]
