"""torch.amp.GradScaler, unmodified, on the gradients of the sharded optimizer."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from optim_twins import dyadic, loss_of, run_local, share
from stock_flows import scaler_step, Run, expect_equal_to_unsharded, run_flow
from torch import Tensor
from torch.nn import Parameter
from torch.nn.utils import clip_grad_norm_

from bucketwheel.comm import Communicator
from bucketwheel.optim import ShardedAdamW
from bucketwheel.testing import assert_bitwise_equal


@pytest.mark.parametrize("how", ["step", "unscale", "clip", "own clip"])
def test_grad_scaler(how: str) -> None:
    def flow(comm: Communicator | None) -> Any:
        run = Run(comm)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
        states = []
        for run.step in range(5):
            scaler_step(run, scaler, how)
            run.opt.zero_grad()
            states.append([t.clone() for t in run.opt._engine.states[0].values()])
        assert_bitwise_equal(states[2], states[1])
        return run.result()

    expected = flow(None)
    scales = [seen for seen in expected[0] if not isinstance(seen, Tensor)]
    assert scales == [8.0, 16.0, 8.0, 8.0, 16.0] and expected[2] == 4
    for world in (1, 2, 4):
        for rank, result in enumerate(run_local(world, flow)):
            assert_bitwise_equal(result, expected, f"rank {rank} of {world}: ")


def test_grad_scaler_disabled() -> None:
    def flow(run: Run) -> None:
        scaler = torch.amp.GradScaler("cpu", enabled=False)
        scaler.scale(run.loss()).backward()
        scaler.unscale_(run.opt)
        scaler.step(run.opt)
        scaler.update()

    def plain(run: Run) -> None:
        run.loss().backward()
        run.opt.step()

    assert_bitwise_equal(expect_equal_to_unsharded(flow, (2,)), run_flow(None, plain))


def test_grad_scaler_with_parameters_of_two_dtypes() -> None:
    """The scaler makes one call per dtype, and each gradient is unscaled once."""

    def flow(comm: Communicator | None) -> Any:
        rank, world = (comm.rank, comm.size) if comm else (0, 1)
        params = [Parameter(torch.ones(6, 5)), Parameter(torch.ones(9, dtype=torch.bfloat16)), Parameter(torch.ones(4))]
        opt = ShardedAdamW(params, lr=0.1, process_group=comm)
        scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
        scaler.scale(loss_of(params, share(dyadic(params, 0), rank, world))).backward()
        scaler.unscale_(opt)
        grads = [opt.full_grad(p).float() for p in params]
        scaler.step(opt)
        return grads, [p.detach() for p in params]

    expected = flow(None)
    for world in (2, 4):
        for result in run_local(world, flow):
            assert_bitwise_equal(result, expected)


def test_grad_scaler_on_gradients_kept_from_no_sync() -> None:
    def flow(run: Run) -> None:
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        with run.opt.no_sync():
            scaler.scale(run.loss()).backward()
        scaler.scale(run.loss(lambda i: i % 2 == 0)).backward()
        scaler.step(run.opt)
        scaler.update()

    expect_equal_to_unsharded(flow)

