"""What the optimizer is given: parameters that share memory, no process group, another order, frozen ones that differ."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import Parameter

import bucketwheel as bw
from bucketwheel.comm.communicator import Communicator
from bucketwheel.optim.sharded_adamw import ShardedAdamW
from tests.support.bits import assert_bitwise_equal
from tests.support.optim_twins import on_ranks

pytestmark = pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate parameters")


class Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6, bias=False), nn.Linear(6, 6, bias=False)
        self.base = nn.Linear(4, 4).requires_grad_(False)


def tied_by_data(model: Tiny) -> Any:
    model.second.weight.data = model.first.weight.data
    return model.named_parameters()


def over_slices(model: Tiny, first: slice, second: slice) -> Any:
    memory = torch.zeros(10)
    return [Parameter(memory[first]), Parameter(memory[second])]


def tied_to_frozen(model: Tiny) -> Any:
    model.base.weight.data = model.first.weight.data[1:3]
    return list(model.parameters())


TIES: dict[str, tuple[Callable[[Tiny], Any], str]] = {
    "by .data": (tied_by_data, "'second.weight' shares memory with 'first.weight'"),
    "overlapping slices": (
        lambda model: over_slices(model, slice(4, 10), slice(0, 5)),
        "'group 0 parameter 0' shares memory with 'group 0 parameter 1'",
    ),
    "one inside another": (lambda model: over_slices(model, slice(0, 10), slice(2, 4)), "parameter 1' shares memory"),
    "a frozen one": (tied_to_frozen, "'group 0 parameter 2' shares memory with 'group 0 parameter 0'"),
    "given twice": (lambda model: [*model.parameters(), model.first.weight], "parameter 4' was passed twice"),
}


@pytest.mark.parametrize("world", [None, 2])
@pytest.mark.parametrize("tie", TIES)
def test_parameters_that_share_memory_are_refused_by_name(tie: str, world: int | None) -> None:
    """Issue 30: they were moved apart, without a word."""
    make, match = TIES[tie]

    def body(comm: Communicator | None) -> None:
        model = Tiny()
        given = make(model)
        places = [p.data_ptr() for p in model.parameters()]
        with pytest.raises(ValueError, match=match):
            ShardedAdamW(given, process_group=comm)
        assert [p.data_ptr() for p in model.parameters()] == places
        if comm is None:  # memory is not moved, so a group that is added may share what is there
            late = ShardedAdamW([model.first.weight])
            with pytest.raises(ValueError, match="shares memory with 'a parameter given before'"):
                late.add_param_group({"params": [Parameter(model.first.weight.data[2:])]})
        ShardedAdamW(over_slices(model, slice(0, 5), slice(5, 10)), process_group=comm).step()  # apart in one memory
        model.second.weight = model.first.weight
        ShardedAdamW(model.first.parameters(), process_group=comm and comm.split(0)).step()

    on_ranks(world, body)


def test_a_launched_process_without_a_group_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Issue 30: under torchrun each rank trained for itself."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    weight = Parameter(torch.ones(3))
    for make in (lambda: ShardedAdamW([weight]), lambda: Communicator()):
        with pytest.raises(RuntimeError, match=r"WORLD_SIZE=2 .*init_process_group\(\) first.*LocalWorld\(1\)"):
            make()
    alone = bw.LocalWorld(1).rank(0)
    ShardedAdamW([weight], process_group=alone).step()
    Communicator(alone).close()
    for single in ("1", "", "?"):
        monkeypatch.setenv("WORLD_SIZE", single)
        ShardedAdamW([weight]).step()


# ---- what ranks have differently


def layers(seed: int, order: tuple[int, ...] = (0, 1, 2), dtype: torch.dtype = torch.float32) -> list[Parameter]:
    """Weights that differ and biases that do not, in this order."""
    generator = torch.Generator().manual_seed(seed)
    weights = [Parameter(torch.randn(700, generator=generator).to(dtype)) for _ in order]
    return [weights[i] for i in order] + [Parameter(torch.zeros(700).to(dtype)) for _ in order]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("world", [2, 3])
def test_unnamed_parameters_in_another_order_are_refused_on_all_ranks(world: int, dtype: torch.dtype) -> None:
    """Issue 30: rank 0's values went into other layers of the last rank. Ranks may have other values."""
    match = f"rank {world - 1} passed .*rank 0's 'group . parameter 0' as 'group . parameter 1', .*named_parameters"

    def body(comm: Communicator) -> None:
        assert comm is not None
        is_last = comm.rank == comm.size - 1
        params = layers(0, (2, 0, 1) if is_last else (0, 1, 2), dtype)
        before = [p.detach().clone() for p in params]
        with pytest.raises(RuntimeError, match=match):
            ShardedAdamW(params, process_group=comm)
        opt = ShardedAdamW([Parameter(torch.ones(1))], process_group=comm)
        with pytest.raises(RuntimeError, match=match):
            opt.add_param_group({"params": params})
        opt.close()
        assert_bitwise_equal([p.detach() for p in params], before)
        seeded = layers(comm.rank, dtype=dtype)
        ShardedAdamW(seeded, process_group=comm).step()
        assert_bitwise_equal([p.detach() for p in seeded], [p.detach() for p in layers(0, dtype=dtype)])

    on_ranks(world, body)


@pytest.mark.parametrize("seeds", [(0, 0), (0, 1)])
@pytest.mark.parametrize("is_named", [True, False])
def test_frozen_parameters_that_differ_are_warned_of(is_named: bool, seeds: tuple[int, int]) -> None:
    expected = "'base.weight', 'base.bias'" if is_named else "'group 0 parameter 2', 'group 0 parameter 3'"
    models = [(torch.manual_seed(seed), Tiny())[1] for seed in seeds]

    def body(comm: Communicator) -> None:
        model = models[comm.rank]
        ShardedAdamW(model.named_parameters() if is_named else model.parameters(), process_group=comm).step()

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        on_ranks(2, body)
    said = [str(warning.message) for warning in caught if "sync_module" in str(warning.message)]
    assert len(said) == 2 * (seeds != (0, 0))
    assert all(f"differ between ranks: {expected}. " in text for text in said)
    assert all(warning.filename == __file__ for warning in caught)
