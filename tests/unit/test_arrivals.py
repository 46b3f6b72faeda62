"""Arrivals: which gradients are done with in native code and which go to Python. Their values: conformance/optimizer.

[Note: quick arrival], csrc/bindings/schedule_py.h. In these tests all parameters lie in one bucket, so the first
gradient of a window always goes to Python: it opens the window and the bucket's memory.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from bucketwheel.comm.communicator import Communicator
from bucketwheel.optim.sharded_adamw import ShardedAdamW
from tests.support.bits import assert_bitwise_equal
from tests.support.optim_twins import dyadic, loss_of, make_params, run_local

FIRST, ODD = 0, 1  # the parameter whose gradient opens the window, and the one with the unusual gradient


class Rank:
    """An optimizer of one rank. ``calls``: the parameters whose gradients went to Python."""

    def __init__(self, comm: Communicator, params: list[Parameter], **options: Any) -> None:
        self.params = params
        self.opt = ShardedAdamW(params, lr=0.01, process_group=comm, bucket_cap_mb=64, **options)
        self.sync = self.opt._engine.grads  # type: ignore[union-attr]
        self.calls: list[int] = []
        on_gradient = self.sync.on_gradient

        def counted(index: int, param: Tensor) -> None:
            self.calls.append(index)
            on_gradient(index, param)

        self.sync.on_gradient = counted  # type: ignore[method-assign]

    def backward(self, index: int) -> None:
        """A dyadic gradient of one parameter."""
        (self.params[index] * dyadic(self.params, 7)[index]).sum().backward()


def small_params() -> list[Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [Parameter(torch.randn((6, 4), generator=generator)) for _ in range(4)]


def alone(body: Callable[[Communicator], None]) -> None:
    run_local(1, body)


@pytest.mark.parametrize(
    "dtype, reduce_dtype",
    [
        (torch.float32, None),
        (torch.float64, None),
        (torch.float32, torch.bfloat16),
        (torch.bfloat16, None),
        (torch.bfloat16, torch.float32),
        (torch.float16, None),
        (torch.float16, torch.float16),
    ],
    ids=str,
)
def test_usual_gradients_go_without_python(dtype: torch.dtype, reduce_dtype: torch.dtype | None) -> None:
    """Of a scalar, of a parameter without elements, channels-last and transposed ones, too."""

    def body(comm: Communicator) -> None:
        rank = Rank(comm, make_params(dtype), reduce_dtype=reduce_dtype)
        for step in range(3):
            loss_of(rank.params, dyadic(rank.params, step)).backward()
            assert len(rank.calls) == 1, f"parameters {rank.calls} of step {step} went to Python"
            rank.calls.clear()
            rank.opt.step()
            rank.opt.zero_grad()

    alone(body)


class _Subclass(Tensor):
    pass


class _GiveZeros(torch.autograd.Function):
    """Its gradient is zeros that have no memory."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return torch._efficientzerotensor((6, 4))


@pytest.mark.parametrize("kind", ["a subclass", "zeros without memory"])
def test_an_unusual_gradient_goes_to_python(kind: str) -> None:
    """And has its value. Strides, dtypes and what is scaled, replaced or assigned: scripts of conformance/optimizer."""

    def body(comm: Communicator) -> None:
        rank = Rank(comm, small_params())
        rank.backward(FIRST)
        rank.calls.clear()
        expected = torch.zeros(6, 4)
        if kind == "a subclass":  # backward adds to it in place
            assigned = dyadic(rank.params, 3)[ODD]
            expected = assigned + dyadic(rank.params, 7)[ODD]
            rank.params[ODD].grad = assigned.as_subclass(_Subclass)
            rank.backward(ODD)
        else:
            _GiveZeros.apply(rank.params[ODD]).backward()
        rank.backward(2)
        assert rank.calls == [ODD], "only the unusual one went to Python"
        assert_bitwise_equal(rank.opt.full_grad(rank.params[ODD]), expected)

    alone(body)


@pytest.mark.parametrize("where", ["on_gradient", "launch_ready"])
def test_an_error_inside_comes_out_of_backward(where: str) -> None:
    def body(comm: Communicator) -> None:
        rank = Rank(comm, small_params())
        error = KeyError("a bug")

        def fail(*_: Any) -> None:
            raise error

        setattr(rank.sync, where, fail)
        with pytest.raises(KeyError) as caught:
            for index in range(4):
                rank.backward(index)
        assert caught.value is error

    alone(body)


@pytest.mark.parametrize("how", ["collected", "closed"])
def test_a_hook_that_outlives_its_optimizer_does_nothing(how: str) -> None:
    """In the middle of a window: the buckets' memory may be somebody else's by now."""

    def body(comm: Communicator) -> None:
        rank = Rank(comm, small_params())
        params, arrivals = rank.params, rank.sync._arrivals
        hook, alive = arrivals.hook(ODD), weakref.ref(rank.sync)
        rank.backward(FIRST)
        if how == "closed":
            rank.opt.close()
        del rank
        gc.collect()
        assert alive() is None
        grad = params[ODD].grad = dyadic(params, 3)[ODD]
        hook(params[ODD])
        assert params[ODD].grad is grad, "it stays a plain tensor"
        comm.pool.check()

    alone(body)
