"""Step buckets cut from spaces, for every rank of a world: their parts, rows and sums of squares have each element once."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from bucketwheel.device import CPU
from bucketwheel.kernels.adam_rows import AdamRows
from bucketwheel.layout.flat_params import ParamInfo
from bucketwheel.layout.precision import Precision
from bucketwheel.layout.shards import Space
from bucketwheel.optim.step_buckets import Cut, cut_buckets
from bucketwheel.pool.pool import Pool
from tests.support.optim_twins import make_params
from tests.support.simulated_cuda import posing

BUCKET_CAP_BYTES = 400


class Recorder(AdamRows):
    """Rows that remember the memory they were given: (parameter, its first element there, values, gradient)."""

    def add(self, param: int, group: int, p: Any, g: Any, *states: Any, **options: Any) -> int:
        number = super().add(param, group, p, g, *states, **options)
        self.seen = [*getattr(self, "seen", []), (param, options["param_begin"], p, g)]
        assert number == len(self.seen) - 1
        return number


def infos() -> list[ParamInfo]:
    """Parameters of two dtypes in turn."""
    params = [two[i % 2] for i, two in enumerate(zip(make_params(), make_params(torch.bfloat16), strict=True))]
    return [ParamInfo(i, str(i), p, 0, 1, p.dtype, p.stride(), torch.device("cpu")) for i, p in enumerate(params)]


def spaces_of(rank: int, world: int, device: str = "cpu") -> list[Space]:
    every = infos()
    pool = Pool(device=device)
    return [
        Space(
            [info for info in every if info.dtype == dtype],
            rank=rank,
            world=world,
            precision=Precision(),
            bucket_cap_bytes=BUCKET_CAP_BYTES,
            param_pool=pool,
            state_pool=pool,
        )
        for dtype in (torch.float32, torch.bfloat16)
    ]


def cuts(world: int) -> Iterator[tuple[list[Space], Recorder, Cut]]:
    for rank in range(world):
        spaces = spaces_of(rank, world)
        rows = Recorder(torch.zeros(len(infos()), dtype=torch.int64))
        yield spaces, rows, cut_buckets(spaces, rank, CPU, rows)


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_every_element_has_one_row_in_the_world(world: int) -> None:
    times = [torch.zeros(info.param.numel(), dtype=torch.int64) for info in infos()]
    for _, rows, cut in cuts(world):
        for bucket in cut.buckets:
            for param, begin, values, _ in rows.seen[bucket.first_row : bucket.last_row]:
                assert param in bucket.grads.parts
                assert is_within(values, bucket.own) and is_within(bucket.own, bucket.full)
                times[param][begin : begin + values.numel()] += 1
        ends = [0, *(bucket.last_row for bucket in cut.buckets)]
        assert [bucket.first_row for bucket in cut.buckets] == ends[:-1] and ends[-1] == len(rows.seen)
    assert all((count == 1).all() for count in times)


def is_within(part: torch.Tensor, whole: torch.Tensor) -> bool:
    begin = part.data_ptr() - whole.data_ptr()
    return part.dtype == whole.dtype and 0 <= begin <= whole.nbytes - part.nbytes


@pytest.mark.parametrize("world", [1, 3])
def test_ranks_have_the_same_buckets(world: int) -> None:
    for number, of_ranks in enumerate(zip(*(cut.buckets for *_, cut in cuts(world)), strict=True)):
        first = of_ranks[0]
        assert first.grads.index == number
        for bucket in of_ranks:
            assert bucket.grads.parts == first.grads.parts
            assert (bucket.grads.numel, bucket.grads.dtype) == (first.grads.numel, first.grads.dtype)
            assert bucket.full.numel() == bucket.grads.numel == world * bucket.own.numel()


@pytest.mark.parametrize("world", [1, 2])
def test_buckets_of_all_dtypes_are_in_one_order(world: int) -> None:
    """That in which they fill when the last parameter's gradient comes first."""
    for spaces, _, cut in cuts(world):
        lowest = [min(bucket.grads.parts, default=len(infos()) - 1) for bucket in cut.buckets]
        assert lowest == sorted(lowest, reverse=True)
        assert len(list(itertools.groupby(bucket.full.dtype for bucket in cut.buckets))) >= 4, "they take turns"
        assert len(cut.buckets) == sum(len(space.packing.buckets) for space in spaces) > 8


@pytest.mark.parametrize("poses", [False, True])
def test_pieces_find_their_sums_of_squares(poses: bool) -> None:
    """Each `ShardPiece.row` is the place of that piece's sum, on CUDA in `row_sums`, where no two pieces share one."""
    with posing() if poses else nullcontext():
        spaces = spaces_of(1, 2, "cuda" if poses else "cpu")
        steps = torch.zeros(len(infos()), dtype=torch.int64)
        cut = cut_buckets(spaces, 1, 0 if poses else CPU, AdamRows(steps, 0 if poses else CPU))
        pieces = [piece for index in range(len(infos())) for piece in cut.pieces[index]]
        for number, piece in enumerate(pieces):
            piece.grad.fill_(number)
        for space in spaces:
            for index in space.indices:
                held = sum(piece.grad.numel() for piece in cut.pieces[index])
                assert held == sum(segment.numel for segment in space.owned(index))
        assert [float(piece.grad.sum()) for piece in pieces] == [n * p.grad.numel() for n, p in enumerate(pieces)]
        places = [(0 if poses else id(piece.accumulator), piece.row) for piece in pieces]
        assert len(set(places)) == len(places)
        if not poses:
            assert cut.row_sums is None
            return
        assert cut.row_sums is not None
        assert cut.row_sums.dtype == torch.float64 and not cut.row_sums.any()
        assert max(piece.row for piece in pieces) < cut.row_sums.numel()
