"""bfloat16 parameters with fp32 masters, dtypes mixed, and parameters that somebody else writes to between steps."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from bucketwheel.comm.communicator import Communicator
from bucketwheel.optim.sharded_adamw import ShardedAdamW
from bucketwheel.testing import assert_bitwise_equal
from tests.support.optim_twins import (
    TINY,
    WORLDS,
    dyadic,
    in_memory_order,
    joined_states,
    loss_of,
    make_params,
    on_ranks,
    run_local,
    share,
)


def optimizer(run_params: list[Parameter], comm: Communicator | None, **options) -> ShardedAdamW:
    return ShardedAdamW(run_params, lr=0.01, weight_decay=0.1, process_group=comm, **{**TINY, **options})


def step_once(opt: ShardedAdamW, params: list[Parameter], seed: int, comm: Communicator | None) -> None:
    rank, world = (comm.rank, comm.size) if comm else (0, 1)
    loss_of(params, share(dyadic(params, seed), rank, world)).backward()
    opt.step()
    opt.zero_grad()


def expect_masters_round_to_parameters(opt: ShardedAdamW, params: list[Parameter]) -> int:
    """This rank's part; returns how many elements that are."""
    count = 0
    saved = opt.state_dict()["state"]
    for i, p in enumerate(params):
        flat = in_memory_order(p.detach(), p)
        at = 0
        for begin, end in saved[i].get("ranges", [(0, p.numel())]):
            master = (
                in_memory_order(saved[i]["master_param"], p) if "ranges" not in saved[i] else saved[i]["master_param"]
            )
            assert_bitwise_equal(master[at : at + end - begin].to(torch.bfloat16), flat[begin:end], f"parameter {i}")
            at += end - begin
            count += end - begin
    return count


@pytest.mark.parametrize("world", [None, *WORLDS])
def test_parameters_are_their_masters_rounded_after_every_step(world: int | None) -> None:
    """N5 of the optimizer's test rows; remainders: test_optim_masters.py."""

    def body(comm: Communicator | None) -> int:
        params = make_params(torch.bfloat16)
        opt = optimizer(params, comm)
        for seed in range(5):
            step_once(opt, params, seed, comm)
            count = expect_masters_round_to_parameters(opt, params)
        return count

    counts = run_local(world, body) if world else [body(None)]
    assert sum(counts) == sum(p.numel() for p in make_params())


@pytest.mark.parametrize("master_weights", ["auto", "bf16_remainder", "none"])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_updates_below_the_precision_of_a_parameter_accumulate(world: int, master_weights: str) -> None:
    """N6 of the optimizer's test rows. Without a master they are lost, as docs/numerics.md says."""

    def body(comm: Communicator) -> Tensor:
        param = Parameter(torch.ones(300, dtype=torch.bfloat16))
        opt = ShardedAdamW(
            [param], lr=1e-4, weight_decay=0.0, process_group=comm, master_weights=master_weights, **TINY
        )
        for step in range(60):
            param.sum().backward()
            opt.step()
            opt.zero_grad()
            if step == 10:
                assert (param == 1.0).all(), "one update is far below the distance of bfloat16 numbers"
        return param.detach().clone()

    for param in run_local(world, body):
        if master_weights == "none":
            assert (param == 1.0).all()
            continue
        assert (param < 1.0).all()
        torch.testing.assert_close(param.float(), torch.full((300,), 1 - 60e-4), atol=4e-3, rtol=0)


@pytest.mark.parametrize("reduce_dtype", [None, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("world", WORLDS)
def test_both_dtypes_in_one_optimizer(world: int, reduce_dtype: torch.dtype | None) -> None:
    def body(comm: Communicator | None) -> list[Tensor]:
        params = [p for pair in zip(make_params(), make_params(torch.bfloat16, 1), strict=True) for p in pair]
        opt = optimizer(params, comm, reduce_dtype=reduce_dtype if comm else None)
        for seed in range(3):
            step_once(opt, params, seed, comm)
        return [p.detach().clone() for p in params]

    expected = body(None)
    for params in run_local(world, body):
        assert_bitwise_equal(params, expected)


@pytest.mark.parametrize("world", [2, 4])
def test_reduce_dtype_float32_adds_what_bfloat16_cannot_hold(world: int) -> None:
    """N13 of the optimizer's test rows. Accumulation over two backwards in a bucket: 1 + 1/256 needs nine bits."""

    def body(comm: Communicator, reduce_dtype: torch.dtype | None) -> Tensor:
        param = Parameter(torch.zeros(70, dtype=torch.bfloat16))
        opt = ShardedAdamW([param], process_group=comm, reduce_dtype=reduce_dtype, overlap_grad_sync=False)
        param.sum().backward()
        (param / 256).sum().backward()
        return opt.full_grad(param)

    for whole in run_local(world, body, torch.float32):
        assert_bitwise_equal(whole, torch.full((70,), 1 + 1 / 256))
    for whole in run_local(world, body, None):
        assert_bitwise_equal(whole, torch.ones(70))


# --- edits by others
# -----------------------------------------------------------------------------------------------------


def load_state_dict(params: list[Parameter]) -> None:
    model = torch.nn.ParameterList(params)
    model.load_state_dict({str(i): p.detach() * 0.5 + 1 for i, p in enumerate(params)})


def in_place(params: list[Parameter]) -> None:
    with torch.no_grad():
        for p in params:
            p.clamp_(-0.25, 0.25)


def other_data(params: list[Parameter]) -> None:
    for p in params:
        p.data = p.data * 0.5


def other_strides(params: list[Parameter]) -> None:
    params[0].data = params[0].data.t().contiguous().t() * 0.5
    params[3].data = params[3].data.t().contiguous().t() * 0.5
    params[7].data = params[7].data.contiguous() * 0.5


def converted_and_back(params: list[Parameter]) -> None:
    model = torch.nn.ParameterList(params)
    dtype = params[0].dtype
    model.to(torch.float64).to(dtype)


@pytest.mark.parametrize(
    "edit", [load_state_dict, in_place, other_data, other_strides, converted_and_back], ids=lambda f: f.__name__
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_edits_between_steps_are_followed(dtype: torch.dtype, edit: Callable[[list[Parameter]], None]) -> None:
    """Reference: a new optimizer on the edited values, with the states of the old one.

    Masters keep the digits of the elements that the edit has not changed.
    """

    def body(comm: Communicator | None, place: str) -> list[Tensor]:
        params = make_params(dtype)
        opt = optimizer(params, comm)
        step_once(opt, params, 0, comm)
        if place == "before backward":
            edit(params)
        rank, world = (comm.rank, comm.size) if comm else (0, 1)
        loss_of(params, share(dyadic(params, 1), rank, world)).backward()
        if place == "before step":
            opt.grad_sync()
            edit(params)
        opt.step()
        opt.zero_grad()
        step_once(opt, params, 2, comm)
        return [p.detach().clone() for p in params]

    reference = make_params(dtype)
    old = optimizer(reference, None)
    step_once(old, reference, 0, None)
    edit(reference)
    edited = make_params(dtype)
    for p, q in zip(edited, reference, strict=True):
        p.data.copy_(q.data)
    new = optimizer(edited, None)
    new.load_state_dict(old.state_dict())
    for seed in (1, 2):
        step_once(new, edited, seed, None)
    expected = [p.detach() for p in edited]
    for place in ("before backward", "before step") if edit is not converted_and_back else ("before backward",):
        for world in (1, 2, 3):
            for params in run_local(world, body, place):
                assert_bitwise_equal(params, expected, f"{place}, world {world}")
        if edit is not other_strides:
            assert_bitwise_equal(body(None, place), expected, place)


@pytest.mark.parametrize("world", [None, 1, 2])
def test_a_converted_model_is_an_error_that_names_the_parameter(world: int | None) -> None:
    def body(comm: Communicator | None) -> None:
        params = make_params()
        opt = ShardedAdamW([(f"layer.{i}", p) for i, p in enumerate(params)], process_group=comm, **TINY)
        step_once(opt, params, 0, comm)
        params[3].data = params[3].data.to(torch.bfloat16)
        with pytest.raises(RuntimeError, match="'layer.3' was torch.float32.*is torch.bfloat16"):
            opt.step()
        params[3].data = torch.zeros(3)
        with pytest.raises(RuntimeError, match=r"'layer.3' was .*\(64, 33\).* is .*\(3,\)"):
            opt.step()
        params[3].data = make_params()[3].detach()
        step_once(opt, params, 1, comm)

    on_ranks(world, body)


@pytest.mark.parametrize("overlap_param_sync", [False, True])
@pytest.mark.parametrize("world", [None, 1, 2])
def test_a_step_between_forward_and_backward_is_seen_by_autograd(world: int | None, overlap_param_sync: bool) -> None:
    def body(comm: Communicator | None) -> None:
        params = make_params()
        opt = optimizer(params, comm, overlap_param_sync=overlap_param_sync)
        used, unused = params[0], params[3]
        used.sum().backward()
        stale, fine = used.square().sum(), unused.square().sum()
        opt.step()
        fine.backward()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            stale.backward()

    on_ranks(world, body)


def test_values_of_rank_0_are_seen_by_autograd() -> None:
    def body(comm: Communicator) -> None:
        param = Parameter(torch.full((5,), float(comm.rank)))
        stale = param.square().sum()
        ShardedAdamW([param], process_group=comm)
        assert (param == 0).all()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            stale.backward()

    run_local(2, body)


@pytest.mark.parametrize("world", [2, 3])
def test_without_broadcast_every_rank_trains_its_shards_of_its_own_values(world: int) -> None:
    def body(comm: Communicator) -> tuple[list[Tensor], dict]:
        params = make_params(torch.bfloat16, seed=0 if comm.rank == 0 else 1)
        opt = optimizer(params, comm, broadcast_params=False)
        before = [p.detach().clone() for p in params]
        expect_masters_round_to_parameters(opt, params)
        step_once(opt, params, 0, comm)
        assert any(not torch.equal(p, b) for p, b in zip(params, before, strict=True))
        return [p.detach().clone() for p in params], opt.state_dict()

    ranks = run_local(world, body)
    for params, _ in ranks:
        assert_bitwise_equal(params, ranks[0][0])
    joined_states([saved for _, saved in ranks], make_params())
