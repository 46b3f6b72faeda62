"""bfloat16 parameters with fp32 masters, dtypes mixed, and parameters that somebody else writes to between steps."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from bucketwheel.comm.communicator import Communicator
from bucketwheel.optim.sharded_adamw import ShardedAdamW
from bucketwheel.testing import assert_bitwise_equal
from tests.support.optim_twins import (
    TINY,
    dyadic,
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


# --- edits by others
# -----------------------------------------------------------------------------------------------------


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
        step_once(opt, params, 0, comm)
        assert any(not torch.equal(p, b) for p, b in zip(params, before, strict=True))
        return [p.detach().clone() for p in params], opt.state_dict()

    ranks = run_local(world, body)
    for params, _ in ranks:
        assert_bitwise_equal(params, ranks[0][0])
    joined_states([saved for _, saved in ranks], make_params())
