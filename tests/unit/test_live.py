"""Live boxes: views of a parameter's part and of its states, and how they are cut."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from bucketwheel.checkpoint.live import PARAM, live_boxes, split_views, value_of
from bucketwheel.layout.masters import join_master, split_master
from bucketwheel.testing import assert_bitwise_equal
from tests.support.checkpoint_jobs import KINDS, of
from tests.support.optim_twins import on_ranks

SHAPES = [(), (0,), (1,), (7,), (5, 7), (1, 9), (4, 3, 2, 2), (3, 1, 5)]


def layouts(shape: tuple[int, ...]) -> list[Tensor]:
    values = torch.arange(float(torch.Size(shape).numel())).view(shape)
    kinds = [values.permute(order).contiguous() for order in itertools.permutations(range(len(shape)))]
    orders = itertools.permutations(range(len(shape)))
    return [
        kind.permute(sorted(range(len(order)), key=order.__getitem__))
        for kind, order in zip(kinds, orders, strict=True)
    ]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("most", [1, 2, 5, 100])
def test_parts_are_bounded_and_in_row_major_order(shape: tuple[int, ...], most: int) -> None:
    for tensor in layouts(shape):
        parts = list(split_views([tensor, -tensor], most))
        assert all(first.numel() <= most for first, _ in parts)
        assert_bitwise_equal(torch.cat([first.reshape(-1) for first, _ in parts]), tensor.reshape(-1))
        assert_bitwise_equal(torch.cat([second.reshape(-1) for _, second in parts]), -tensor.reshape(-1))
        assert all(first.numel() == 0 or first._is_view() for first, _ in parts) or len(parts) == 1


def test_parts_of_contiguous_tensors_are_contiguous_and_full() -> None:
    parts = list(split_views([torch.zeros(5, 7)], 10))
    assert [part.numel() for (part,) in parts] == [10, 10, 10, 5]
    assert all(part.is_contiguous() for (part,) in parts)


@pytest.mark.parametrize("kind", KINDS)
def test_the_boxes_of_all_ranks_are_the_whole(kind: str) -> None:
    def boxes(comm: object) -> object:
        job = of(comm, **KINDS[kind])
        job.steps(1)
        engine = job.opt._engine
        found = []
        for info in engine.infos:
            names = [PARAM, *("master_param" if name == "remainder" else name for name in engine.states[info.index])]
            live = live_boxes(engine, info)
            found.append([(one.box, {name: value_of(one.of(name)).clone() for name in names}) for one in live])
        wholes = [{PARAM: info.param.detach().clone(), **job.opt.full_state(info.param)} for info in engine.infos]
        job.opt.close()
        return found, wholes

    ranks = on_ranks(3, boxes)
    for index, whole in enumerate(ranks[0][1]):
        del whole["step"]
        joined = {name: torch.full_like(tensor, torch.nan) for name, tensor in whole.items()}
        for found, _ in ranks:
            for box, values in found[index]:
                for name, value in values.items():
                    target = joined[name]
                    for dim, (offset, size) in enumerate(zip(box.offsets, box.sizes, strict=True)):
                        target = target.narrow(dim, offset, size)
                    target.copy_(value)
        assert_bitwise_equal(joined, whole)


def test_a_master_is_joined_of_the_parameter_and_its_remainder() -> None:
    master = torch.randn(50)
    param, remainder = split_master(master)
    assert_bitwise_equal(value_of([param, remainder]), join_master(param, remainder))
    assert_bitwise_equal(value_of([param, remainder]), master)
