"""Every configuration of the Adam kernel, bit for bit against the slow version, however it is cut, and what it is for."""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from bucketwheel.native import core
from tests.support.adam_cases import BF16, F16, F32, F64, KINDS, assert_same, ids, make, run_op, run_table
from tests.support.reference import Adam, bits
from tests.support.reference_rows import Rounding, Row, philox, step_row

CHUNK = 8192  # AdamTable::kChunkNumel


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
    core.use_torch_threads(1)


MODES = [
    (Adam(step=3, lr=1e-2, weight_decay=0.1, grad_scale=0.37, beta2=0.99), Rounding(seed=5, resync=True)),
    (
        Adam(step=1, lr=1e-2, weight_decay=0.1, decoupled=False),
        Rounding(seed=2**63 + 7, param=3, resync=True),
    ),
    (Adam(step=2**33 + 1, lr=1e-2, weight_decay=0.1, maximize=True, beta2=0.99), Rounding(False, param=2**30 - 1)),
    (Adam(step=7, lr=1e-2, decoupled=False, weight_decay=0.1, beta2=0.99), Rounding(False, seed=1)),
]


@pytest.mark.parametrize("kind", KINDS, ids=ids)
def test_every_configuration_bit_for_bit(kind: tuple[str, torch.dtype, torch.dtype, torch.dtype]) -> None:
    numel = 331 if kind[1] == F64 else 1203
    for amsgrad, (args, rounding) in itertools.product((False, True), MODES):
        row = make(kind, numel, amsgrad)
        for step in (args.step, args.step + 1):
            now = Adam(**{**vars(args), "step": step})
            with np.errstate(all="ignore"):
                expected = step_row(row, now, rounding)
            assert not torch.equal(bits(expected.v), bits(row.v))
            run_op([row], now, rounding)
            assert_same(row, expected, (amsgrad, now, rounding))


SIZES = [0, 1, 2, 7, 8, 9, 63, 64, 65, 255, 256, 257, 511, 513, 1025, CHUNK - 1, CHUNK + 1]


@pytest.mark.parametrize(
    "kind",
    [
        ("param", BF16, BF16, BF16),
        ("remainder", BF16, BF16, BF16),
        ("param", BF16, F32, F32),
        ("master", BF16, BF16, F32),
        ("master", F16, F16, F32),
    ],
    ids=ids,
)
def test_every_size_and_every_place_in_the_parameter(kind) -> None:
    args = Adam(step=2, lr=1e-2, weight_decay=0.1)
    for numel, begin in itertools.product(SIZES, (0, 3, 8, 2**34 + 5)):
        row = make(kind, numel, amsgrad=False, seed=numel)
        rounding = Rounding(seed=9, param=11, begin=begin, resync=True)
        with np.errstate(all="ignore"):
            expected = step_row(row, args, rounding)
        run_table([(row, 11, begin)], args, rounding)
        assert_same(row, expected, (numel, begin))


@pytest.mark.parametrize("kind", KINDS, ids=ids)
def test_shards_threads_and_alignment_do_not_change_a_bit(kind) -> None:
    """Cut 1, 2, 3 and 7 ways at any element, from memory that starts anywhere."""
    numel, args = 2 * CHUNK + 1234, Adam(step=4, lr=1e-2, weight_decay=0.1, grad_scale=0.5)
    rounding = Rounding(seed=77, param=2, resync=True)
    whole = make(kind, numel, amsgrad=True)
    expected = whole.clone()
    run_op([expected], args, rounding)
    assert not torch.equal(expected.p, whole.p)
    rng = np.random.default_rng(1)
    for world, offset, threads in ((1, 1, 2), (2, 0, 1), (3, 5, 2), (7, 3, 3)):
        cuts = [0, *sorted(rng.integers(0, numel, world - 1).tolist()), numel]
        moved = Row(*(None if x is None else torch.empty(numel + 8, dtype=x.dtype)[offset : offset + numel].copy_(x)
                      for x in whole.tensors()))  # fmt: skip
        core.use_torch_threads(threads)
        run_table([(moved.slice(a, b), 2, a) for a, b in itertools.pairwise(cuts)], args, rounding)
        assert_same(moved, expected, (world, offset))


def test_philox_gives_the_published_vectors() -> None:
    """kat_vectors of Random123; the kernels agree with this version in the tests above."""
    ones = 0xFFFFFFFF
    pi = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0)
    for rounds, counter, key, expected in (
        (7, (0, 0, 0, 0), (0, 0), (0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48)),
        (7, (ones,) * 4, (ones,) * 2, (0x5207DDC2, 0x45165E59, 0x4D8EE751, 0x8C52F662)),
        (7, *pi, (0x4DFCCABA, 0x190A87F0, 0xC47362BA, 0xB6B5242A)),
        (10, (0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        (10, (ones,) * 4, (ones,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (10, *pi, (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)),
    ):
        assert philox(key, counter, rounds) == expected


def test_random_bits_differ_by_all_that_they_depend_on() -> None:
    def after(step: int = 2, seed: int = 0, param: int = 0, begin: int = 0) -> torch.Tensor:
        row = Row(*(torch.full((4096,), x, dtype=BF16) for x in (1.0, 0.3, 0.0, 1.0)))
        args = Adam(step=step, lr=0.1, weight_decay=0.0)
        run_table([(row, param, begin)], args, Rounding(seed=seed))
        up = row.v.float() > row.v.float().mean()
        assert 0.02 < up.float().mean() < 0.98
        return up

    base = after()
    for other in (after(step=3), after(seed=1), after(seed=2**32), after(param=1), after(begin=8), after(begin=2**35)):
        agree, a, b = ((base == other).float().mean(), base.float().mean(), other.float().mean())
        assert abs(agree - (a * b + (1 - a) * (1 - b))) < 5 * 0.5 / 64
    assert torch.equal(after(begin=8)[:-8], base[8:])


def test_stochastic_rounding_is_unbiased_and_takes_neighbours_only() -> None:
    seeds, numel = 4096, 64
    start = make(("param", BF16, BF16, BF16), numel, amsgrad=False, seed=3)
    args = Adam(step=2, lr=1e-2, weight_decay=0.1)
    exact = Row(*(x.float() for x in start.tensors()[:4]))
    run_op([exact], args)
    total, want = torch.zeros(numel, dtype=F64), exact.v
    low, high = ((want.view(torch.int32) & -65536) + more for more in (0, 65536))
    floor, ceil = low.view(F32), high.view(F32)
    for seed in range(seeds):
        row = start.clone()
        run_op([row], args, Rounding(seed=seed))
        got = row.v.float()
        assert (torch.where(floor == want, got == want, (got == floor) | (got == ceil))).all()
        total += got.double()
    ulp = ceil.double() - floor.double()
    share = (want.double() - floor.double()) / ulp
    sigma = ulp * (share * (1 - share)).sqrt() / math.sqrt(seeds)
    assert ((total / seeds - want.double()).abs() <= 4 * sigma + 1e-12 * want.abs()).all()
    assert (sigma > 0).sum() > numel // 2


def decay(rounding: Rounding) -> float:
    """What is left of v after 1000 steps with zero gradients."""
    zero = torch.zeros(4096, dtype=BF16)
    row = Row(zero.clone(), zero.clone(), zero.clone(), torch.full((4096,), 0.37, dtype=BF16))
    for t in range(1, 1001):
        run_op([row], Adam(step=t, lr=0.0), rounding)
    return row.v.float().mean().item() / float(torch.tensor(0.37, dtype=BF16))


@pytest.mark.filterwarnings("ignore:bfloat16 exp_avg_sq")
def test_bfloat16_v_decays_only_if_rounded_stochastically() -> None:
    exact = 0.999**1000
    assert abs(decay(Rounding()) / exact - 1) < 0.01
    assert decay(Rounding(stochastic=False)) == 1.0


def test_lists_may_mix_kinds() -> None:
    kinds = [kind for kind in KINDS if kind[0] == "param"] + [KINDS[-2], KINDS[20]]
    rows = [make(kind, 100 + i, amsgrad=i % 2 == 0, seed=i) for i, kind in enumerate(kinds)]
    alone = [row.clone() for row in rows]
    args = Adam(step=2, weight_decay=0.1)
    run_op(rows, args, Rounding(), param_ids=None)
    for index, (row, one) in enumerate(zip(rows, alone, strict=True)):
        run_op([one], args, Rounding(param=index))
        assert_same(row, one, kinds[index])


def test_every_written_tensor_has_a_new_version() -> None:
    for kind in (KINDS[0], ("master", BF16, BF16, F32), ("remainder", BF16, BF16, BF16)):
        row = make(kind, 50, amsgrad=True)
        before = [None if x is None else x._version for x in row.tensors()]
        run_op([row], Adam())
        for name, x, version in zip("pgmvxwr", row.tensors(), before, strict=True):
            assert x is None or x._version == version + (name != "g")


def test_nearest_v_is_warned_about_once() -> None:
    def rows(dtype: torch.dtype) -> list[Row]:
        return [Row(torch.ones(4), torch.ones(4), torch.zeros(4, dtype=dtype), torch.zeros(4, dtype=dtype))]

    nearest = Rounding(stochastic=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run_op(rows(BF16), Adam(beta2=0.99321), Rounding())
        run_op(rows(F32), Adam(beta2=0.99987), nearest)
        run_op(rows(BF16), Adam(beta2=0.99), nearest)
        for _ in range(2):  # as an error: each time
            with pytest.raises(UserWarning, match=r"never decays at beta2=0.99987"):
                run_op(rows(BF16), Adam(beta2=0.99987), nearest)
    with pytest.warns(UserWarning, match=r"never decays at beta2=0.99986"):
        run_op(rows(BF16), Adam(beta2=0.99986), nearest)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run_op(rows(BF16), Adam(beta2=0.99986), nearest)
