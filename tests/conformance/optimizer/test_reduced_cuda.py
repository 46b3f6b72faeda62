"""On the device: a factor that is reset beside others that stay; sums of squares, once a window, of one size for any world."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import bucketwheel as bw
from bucketwheel.comm.communicator import Communicator
from bucketwheel.testing import assert_bitwise_equal
from tests.conformance.optimizer.test_optim_cuda import batch, in_world, model_of


def test_a_factor_is_reset_beside_others_that_stay() -> None:
    """All gradients are clipped by norm, then one by value, which takes its factor: the CPU's bits."""

    def clipped(rank: int, comm: Communicator) -> list[torch.Tensor]:
        model = model_of()
        params = list(model.parameters())
        opt = bw.ShardedAdamW(params, lr=1e-2, process_group=comm)
        for step in range(2):
            model(batch(rank, step, torch.float32)).square().mean().backward()
            opt.clip_grad_norm_(0.3)
            torch.nn.utils.clip_grad_value_(params[:1], 1e-3)
            opt.step()
            opt.zero_grad()
        out = [p.detach().clone() for p in params]
        opt.close()
        return out

    assert_bitwise_equal(in_world(2, True, clipped), in_world(2, False, clipped))


def noted(comm: Communicator, said: list[str]) -> None:
    """Notes from now on what ``comm`` gathers of all ranks, in each way in which sums of squares travel."""

    def noting(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            said.append(name)
            return real(*args, **kwargs)

        return call

    for name in ("exchange", "_all_gather_into"):
        setattr(comm, name, noting(name, getattr(comm, name)))


def kept_bytes(reduced: Any) -> int:
    """Of all memory that its tensors hold, shared or not."""
    return sum(t.untyped_storage().nbytes() for t in vars(reduced).values() if isinstance(t, torch.Tensor))


@pytest.mark.parametrize("world", [1, 3])
def test_sums_of_squares_do_not_grow_with_the_world(world: int) -> None:
    """What ranks say of them goes once it is added up; what is kept is counted, and serves every later norm of the window."""

    def norms(rank: int, comm: Communicator, gathers: str) -> list[torch.Tensor]:
        model = model_of()
        params = list(model.parameters())
        opt = bw.ShardedAdamW(params, lr=1e-2, process_group=comm)
        reduced = opt._engine.reduced
        said: list[str] = []
        noted(reduced.comm, said)
        at_rest, counted = kept_bytes(reduced), opt.memory_summary()["bookkeeping"]
        out = []
        for step in range(2):
            model(batch(rank, step, torch.float32)).square().mean().backward()
            assert kept_bytes(reduced) == at_rest
            assert opt.memory_summary()["bookkeeping"] == counted
            said.clear()
            out.append(opt.clip_grad_norm_(0.3).clone())
            assert said == ["exchange", gathers]  # the first: ranks agree on the call, as on each
            assert kept_bytes(reduced) - at_rest == 8 * len(params)
            assert opt.memory_summary()["bookkeeping"] - counted == 8 * len(params)
            said.clear()
            out.append(opt.clip_grad_norm_(0.1).clone())
            assert said == ["exchange"]
            opt.step()
            opt.zero_grad()
        opt.close()
        return out

    expected = in_world(world, False, lambda rank, comm: norms(rank, comm, "exchange"))
    got = in_world(world, True, lambda rank, comm: norms(rank, comm, "_all_gather_into"))
    assert_bitwise_equal(got, expected)
