"""Masters, remainders and neither: what each saves and loads from the others, from torch, and after edits."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from bucketwheel.comm.communicator import Communicator
from bucketwheel.layout.masters import split_master
from bucketwheel.optim.sharded_adamw import ShardedAdamW
from bucketwheel.testing import assert_bitwise_equal
from tests.support.optim_twins import TINY, dyadic, joined_states, loss_of, make_params, run_local, share

F32, BF16, F16, F64 = torch.float32, torch.bfloat16, torch.float16, torch.float64
Saved = dict[str, Any]


def make(params: list[Parameter], comm: Communicator | None, **options: Any) -> ShardedAdamW:
    return ShardedAdamW(params, lr=0.01, weight_decay=0.1, process_group=comm, **{**TINY, **options})


def steps(opt: Any, params: list[Parameter], seeds: range, comm: Communicator | None = None) -> None:
    rank, world = (comm.rank, comm.size) if comm else (0, 1)
    for seed in seeds:
        loss_of(params, share(dyadic(params, seed), rank, world)).backward()
        opt.step()
        opt.zero_grad()


def copies(params: list[Parameter]) -> list[Parameter]:
    fresh = make_params(params[0].dtype, seed=3)
    for p, value in zip(fresh, params, strict=True):
        p.data.copy_(value.data)
    return fresh


def in_ranks(world: int | None, body: Callable[[Communicator | None], Any]) -> list[Any]:
    return run_local(world, body) if world else [body(None)]


def masters(saved: list[Saved]) -> list[Tensor]:
    return [state["master_param"] for state in joined_states(saved, make_params())]


@pytest.mark.parametrize("world", [None, 2, 3])
def test_n5_a_remainder_is_the_master_bit_for_bit(world: int | None) -> None:
    """The trained weights are the same float32; the parameters are too, but where a rounding is a tie."""

    def body(comm: Communicator | None) -> tuple[list[Saved], list[list[Tensor]]]:
        saved, values = [], []
        for master_weights in ("fp32", "bf16_remainder"):
            params = make_params(BF16)
            opt = make(params, comm, master_weights=master_weights)
            steps(opt, params, range(6), comm)
            saved.append(opt.state_dict())
            values.append([p.detach().clone() for p in params])
            opt.close()
        return saved, values

    ranks = in_ranks(world, body)
    kept, split = ([saved[i] for saved, _ in ranks] for i in (0, 1))
    assert_bitwise_equal(masters(split), masters(kept))
    for _, values in ranks:
        assert_bitwise_equal(values[0], [m.to(BF16) for m in masters(kept)])
        assert_bitwise_equal(values[1], [split_master(m.contiguous())[0] for m in masters(kept)])


MODES = ["fp32", "bf16_remainder"]


@pytest.mark.parametrize("first", MODES)
@pytest.mark.parametrize("second", MODES)
@pytest.mark.parametrize("world", [None, 2])
def test_either_kind_of_master_goes_on_from_the_other(world: int | None, first: str, second: str) -> None:
    """Reference: the first one goes on itself."""

    def body(comm: Communicator | None) -> tuple[Saved, Saved]:
        params = make_params(BF16)
        opt = make(params, comm, master_weights=first, amsgrad=True)
        steps(opt, params, range(3), comm)
        saved, middle = copy.deepcopy(opt.state_dict()), copies(params)
        steps(opt, params, range(3, 6), comm)
        expected = opt.state_dict()
        opt.close()
        other = make(middle, comm, master_weights=second, amsgrad=True)
        other.load_state_dict(saved)
        assert_bitwise_equal(other.state_dict()["state"], saved["state"], "saved as it was loaded")
        steps(other, middle, range(3, 6), comm)
        return expected, other.state_dict()

    for expected, got in in_ranks(world, body):
        assert_bitwise_equal(got["state"], expected["state"])


@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
@pytest.mark.parametrize("world", [None, 2])
def test_without_masters_one_is_ignored_and_none_is_saved(world: int | None, dtype: torch.dtype) -> None:
    def body(comm: Communicator | None) -> tuple[Saved, list[Tensor]]:
        params = make_params(dtype)
        opt = make(params, comm)
        steps(opt, params, range(2), comm)
        saved, plain = opt.state_dict(), copies(params)
        opt.close()
        none = make(plain, comm, master_weights="none")
        none.load_state_dict(saved)
        before = [p.detach().clone() for p in plain]
        mine = none.state_dict()["state"]
        assert all("master_param" not in entry for entry in mine.values())
        assert_bitwise_equal(mine[3]["exp_avg"], saved["state"][3]["exp_avg"])
        for group in none.param_groups:
            group["lr"] = 0.0
        steps(none, plain, range(2, 3), comm)
        assert_bitwise_equal([p.detach() for p in plain], before, "a step of length 0 from the parameters")
        # And back: a dict without masters takes them from the parameters.
        none_saved = none.state_dict()
        again = copies(plain)
        none.close()
        kept = make(again, comm, master_weights="bf16_remainder" if dtype == BF16 else "fp32")
        steps(kept, again, range(2), comm)
        with torch.no_grad():
            for p, value in zip(again, before, strict=True):
                p.copy_(value)
        kept.load_state_dict(none_saved)
        for group in kept.param_groups:
            group["lr"] = 0.0
        steps(kept, again, range(2, 3), comm)
        return kept.state_dict(), [p.detach().float() for p in again]

    ranks = in_ranks(world, body)
    assert_bitwise_equal(masters([saved for saved, _ in ranks]), ranks[0][1])


@pytest.mark.parametrize("dtype", [F32, F64], ids=str)
def test_torch_goes_on_from_our_amsgrad(dtype: torch.dtype) -> None:
    params = make_params(dtype)
    opt = make(params, None, amsgrad=True)
    steps(opt, params, range(3))
    theirs = copies(params)
    stock = torch.optim.AdamW(theirs)
    stock.load_state_dict(opt.state_dict())
    assert stock.param_groups[0]["amsgrad"] is True
    assert all("max_exp_avg_sq" in stock.state[p] for p in theirs)
    steps(opt, params, range(3, 6))
    steps(stock, theirs, range(3, 6))
    tolerance = {"rtol": 2e-6, "atol": 1e-7} if dtype == F32 else {"rtol": 1e-13, "atol": 1e-15}
    torch.testing.assert_close([p.detach() for p in theirs], [p.detach() for p in params], **tolerance)


# --- edits by others
