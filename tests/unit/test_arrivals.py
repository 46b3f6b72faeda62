"""Arrivals: which gradients are done with in native code, which go to Python, and that it makes no difference.

[Note: quick arrival], csrc/bindings/schedule_py.h. In these tests all parameters lie in one bucket, so the first
gradient of a window always goes to Python: it opens the window and the bucket's memory.
"""

from __future__ import annotations

import functools
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
from bucketwheel.testing import assert_bitwise_equal
from tests.support.optim_twins import dyadic, loss_of, make_params, run_local

SHAPE = (6, 4)
FIRST, ODD = 0, 1  # the parameter whose gradient opens the window, and the one with the unusual gradient


class Rank:
    """An optimizer of one rank. ``calls``: the parameters whose gradients went to Python."""

    def __init__(self, comm: Communicator, params: list[Parameter], *, is_slow: bool = False, **options: Any) -> None:
        self.params = params
        self.opt = ShardedAdamW(params, lr=0.01, process_group=comm, bucket_cap_mb=64, **options)
        self.sync = self.opt._engine.grads  # type: ignore[union-attr]
        self.calls: list[int] = []
        on_gradient = self.sync.on_gradient

        def counted(index: int, param: Tensor) -> None:
            self.calls.append(index)
            on_gradient(index, param)

        self.sync.on_gradient = counted  # type: ignore[method-assign]
        if is_slow:
            self.sync._arrivals = NeverEnabled(self.sync._arrivals)

    def backward(self, index: int, grad: Tensor | None = None) -> None:
        """A gradient of one parameter, dyadic unless it is given."""
        param = self.params[index]
        (param * (dyadic(self.params, 7)[index] if grad is None else grad)).sum().backward()

    def open(self) -> None:
        self.backward(FIRST)
        assert self.calls == [FIRST]
        self.calls.clear()


class NeverEnabled:
    """Native arrivals that leave every gradient to Python."""

    def __init__(self, arrivals: Any) -> None:
        self._arrivals = arrivals

    def enable(self, blocked: bytes, launch: bool) -> None: ...

    def __getattr__(self, name: str) -> Any:
        return getattr(self._arrivals, name)


def small_params(dtype: torch.dtype = torch.float32) -> list[Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [Parameter(torch.randn(SHAPE, generator=generator).to(dtype)) for _ in range(4)]


def alone(body: Callable[[Communicator], Any]) -> Any:
    return run_local(1, body)[0]


# --- what goes without Python ----------------------------------------------------------------------------------------


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
    """Of a scalar, of a parameter without elements, channels-last and transposed ones, too; bits as by Python."""

    def train(comm: Communicator, is_slow: bool) -> list[Any]:
        rank = Rank(comm, make_params(dtype), is_slow=is_slow, reduce_dtype=reduce_dtype)
        seen: list[Any] = []
        for step in range(3):
            loss_of(rank.params, dyadic(rank.params, step)).backward()
            if is_slow:
                assert sorted(rank.calls) == list(range(len(rank.params)))
            else:
                assert len(rank.calls) == 1, f"parameters {rank.calls} of step {step} went to Python"
            rank.calls.clear()
            seen += [rank.opt.full_grad(p) for p in rank.params]
            rank.opt.step()
            rank.opt.zero_grad()
        return [*seen, *(p.detach().clone() for p in rank.params)]

    assert_bitwise_equal(alone(lambda comm: train(comm, False)), alone(lambda comm: train(comm, True)))


# --- what goes to Python ---------------------------------------------------------------------------------------------


class _Subclass(Tensor):
    pass


def _assigned(make: Callable[[Tensor], Tensor], rank: Rank) -> None:
    """Something unusual is in p.grad, and backward adds to it in place."""
    rank.params[ODD].grad = make(dyadic(rank.params, 3)[ODD])
    rank.backward(ODD)


def _of_another_dtype(rank: Rank) -> None:
    rank.params[ODD].grad_dtype = None
    _assigned(lambda g: g.double(), rank)


def _zeros_without_memory(rank: Rank) -> None:
    class Give(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.sum()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
            return torch._efficientzerotensor(SHAPE)

    Give.apply(rank.params[ODD]).backward()


def _read_by_a_reducer(rank: Rank) -> None:
    """DDP has read the placeholder and will write it back."""
    rank.sync._placeholders[ODD].give_to_reducer()
    rank.backward(ODD)


def _scaled(rank: Rank) -> None:
    """What arrives after a factor was multiplied in is divided by it."""
    rank.params[FIRST].grad.mul_(0.5)
    rank.backward(ODD)


def _replaced(rank: Rank) -> None:
    rank.backward(ODD)
    rank.calls.clear()
    rank.params[ODD].grad = None
    rank.backward(ODD)


UNUSUAL: dict[str, Callable[[Rank], None]] = {
    "other strides": functools.partial(_assigned, lambda g: g.t().contiguous().t()),
    "gaps": functools.partial(_assigned, lambda g: torch.stack([g, g], dim=-1)[..., 1]),
    "another dtype": _of_another_dtype,
    "negated when read": functools.partial(_assigned, lambda g: torch._neg_view(g.neg())),
    "a subclass": functools.partial(_assigned, lambda g: g.as_subclass(_Subclass)),
    "zeros without memory": _zeros_without_memory,
    "read by a reducer": _read_by_a_reducer,
    "scaled before": _scaled,
    "replaced": _replaced,
}


@pytest.mark.parametrize("name", UNUSUAL)
def test_an_unusual_gradient_goes_to_python(name: str) -> None:
    """And has the value that it has where all go there."""

    def train(comm: Communicator, is_slow: bool) -> list[Tensor | None]:
        rank = Rank(comm, small_params(), is_slow=is_slow)
        rank.open()
        UNUSUAL[name](rank)
        assert ODD in rank.calls
        rank.calls.clear()
        rank.backward(2)
        assert rank.calls == ([2] if is_slow or name == "scaled before" else []), "only the unusual one went to Python"
        assert all(
            p.grad is placeholder for p, placeholder in zip(rank.params[:3], rank.sync._placeholders, strict=False)
        )
        seen = [rank.opt.full_grad(p) for p in rank.params]
        rank.opt.step()
        return [*seen, *(p.detach().clone() for p in rank.params)]

    quick, slow = (alone(lambda comm, is_slow=is_slow: train(comm, is_slow)) for is_slow in (False, True))
    assert_bitwise_equal(quick, slow)
    grads = dyadic(small_params(), 3), dyadic(small_params(), 7)
    expected = {"zeros without memory": torch.zeros(SHAPE)}
    for usual in ("read by a reducer", "scaled before", "replaced"):
        expected[usual] = grads[1][ODD]
    assert_bitwise_equal(quick[ODD], expected.get(name, grads[0][ODD] + grads[1][ODD]))


def test_in_no_sync_nothing_goes_anywhere_and_what_is_kept_goes_through_python() -> None:
    def body(comm: Communicator) -> None:
        rank = Rank(comm, small_params())
        with rank.opt.no_sync():
            rank.backward(FIRST)
            rank.backward(ODD)
            assert type(rank.params[ODD].grad) is Tensor
        assert rank.calls == [] and not rank.sync._is_open, "nothing was reduced or packed"
        rank.backward(2)  # opens the window, while two are kept
        rank.backward(3)
        rank.backward(ODD)  # goes on top of what is kept, by the placeholder
        assert rank.calls == [2, 3]
        grads = dyadic(rank.params, 7)
        for p, grad in zip(rank.params, [grads[0], 2 * grads[1], *grads[2:]], strict=True):
            assert_bitwise_equal(rank.opt.full_grad(p), grad)
        rank.opt.step()
        rank.opt.zero_grad()
        rank.calls.clear()
        rank.open()
        rank.backward(ODD)
        assert rank.calls == [], "the next window is a usual one again"

    alone(body)


# --- errors, and the end ---------------------------------------------------------------------------------------------


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
        rank.open()
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
