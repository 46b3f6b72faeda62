"""Scripts run by sharded ranks and by their twins: the local optimizer (same bits) and `torch.optim.AdamW` (tolerance).

A *script* is a function of a `Run`. It says what a training loop does, in the words of the optimizer's methods and of
``p.grad``; every rank runs it with gradients of its own whose mean is the twins' gradient. Gradients are *dyadic*
(small integers / 16), so that every order of summation is exact and results can be compared bit for bit.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from bucketwheel.checkpoint import TensorShard
from bucketwheel.comm.backends import LocalWorld
from bucketwheel.comm.communicator import Communicator
from bucketwheel.optim.sharded_adamw import ShardedAdamW
from bucketwheel.testing import run_threads
from tests.support.cores import one_core

SHAPES = [(5, 7), (3,), (), (64, 33), (0,), (1, 1), (257,), (4, 3, 2, 2), (40, 6)]
WORLDS = [1, 2, 3, 4]


TINY = {"bucket_cap_mb": 1e-4}  # most parameters in a bucket of their own, large ones in many


def make_params(dtype: torch.dtype = torch.float32, seed: int = 0) -> list[Parameter]:
    """Dense parameters of every kind: scalar, empty, channels-last, transposed."""
    generator = torch.Generator().manual_seed(seed)
    tensors = [torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES]
    tensors[7] = tensors[7].to(memory_format=torch.channels_last)
    tensors[8] = tensors[8].t()
    return [Parameter(t) for t in tensors]


def dyadic(params: Sequence[Tensor], seed: int) -> list[Tensor]:
    """Small integers / 16, a multiple of 1/16 whose sums over a few ranks are exact in float32 and bfloat16."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(-8, 9, p.shape, generator=generator).to(p.dtype) / 16 for p in params]


def loss_of(params: Sequence[Tensor], grads: Sequence[Tensor], used: Callable[[int], bool] = lambda i: True) -> Tensor:
    """A loss whose gradient of params[i] is grads[i] exactly."""
    terms = ((p * g).sum().float() for i, (p, g) in enumerate(zip(params, grads, strict=True)) if used(i))
    return sum(terms, torch.zeros(()))


def share(grads: list[Tensor], rank: int, world: int) -> list[Tensor]:
    """This rank's gradients: they differ between ranks and average to ``grads`` exactly."""
    return [g + (2 * rank - (world - 1)) / 16 for g in grads]


def run_local(
    world: int, fn: Callable[..., Any], *args: Any, timeout_s: float = 60, device: str | None = None
) -> list[Any]:
    """fn(comm, *args) on ``world`` ranks that are threads."""
    local = LocalWorld(world)

    def body(rank: int, _: int) -> Any:
        with Communicator(local.rank(rank), backend="local", timeout_s=timeout_s / 2, device=device) as comm:
            return fn(comm, *args)

    with one_core():
        return run_threads(body, world, timeout_s=timeout_s)


def on_ranks(world: int | None, fn: Callable[[Communicator | None], Any]) -> list[Any]:
    """`run_local`; None: fn(None) in this thread, for the local engine."""
    return [fn(None)] if world is None else run_local(world, fn)


class TorchTwin(torch.optim.AdamW):
    """`torch.optim.AdamW` with the methods of `ShardedAdamW` that scripts call."""

    def no_sync(self) -> contextlib.nullcontext[None]:
        return contextlib.nullcontext()

    def grad_sync(self, parameters: Collection[Parameter] | None = None) -> None: ...

    def param_sync(self, parameters: Collection[Parameter] | None = None) -> None: ...

    def clip_grads_with_norm_(
        self, max_norm: float, total_norm: float | Tensor, *, parameters: Collection[Parameter] | None = None
    ) -> None:
        chosen = [p for group in self.param_groups for p in group["params"]] if parameters is None else parameters
        torch.nn.utils.clip_grads_with_norm_(chosen, max_norm, torch.as_tensor(total_norm).reshape(()))

    def clip_grad_norm_(
        self,
        max_norm: float,
        norm_type: float = 2.0,
        *,
        parameters: Collection[Parameter] | None = None,
        **options: Any,
    ) -> Tensor:
        chosen = [p for group in self.param_groups for p in group["params"]] if parameters is None else parameters
        not_empty = [p for p in chosen if p.numel()]  # torch has no inf norm of nothing
        return torch.nn.utils.clip_grad_norm_(not_empty, max_norm, norm_type, **options)

    def full_grad(self, param: Parameter) -> Tensor | None:
        return None if param.grad is None else param.grad.to(torch.promote_types(param.dtype, torch.float32))

    def close(self) -> None: ...


@dataclass
class Run:
    """What a script sees of its rank. ``rank`` is 0 and ``world`` 1 for the twins."""

    opt: Any
    params: list[Parameter]
    rank: int = 0
    world: int = 1
    seen: list[Any] = field(default_factory=list)
    clips: bool = False
    clips_by_torch: bool = False  # `clip` is torch.nn.utils.clip_grad_norm_, not the optimizer's method
    is_reference: bool = False  # a twin that others are compared with: it need not be interrupted
    make_optimizer: Callable[[list[Parameter]], Any] | None = None  # another like ``opt``, for other parameters

    @property
    def is_ours(self) -> bool:
        return isinstance(self.opt, ShardedAdamW)

    def restart(self, seed: int = 11) -> None:
        """As a new process begins: other values in parameters of its own, and a new optimizer for them."""
        assert self.make_optimizer is not None
        self.opt.close()
        generator = torch.Generator().manual_seed(seed)
        fresh = [torch.randn(p.shape, generator=generator).to(p.dtype) for p in self.params]
        self.params = [
            Parameter(torch.empty_strided(p.shape, p.stride(), dtype=p.dtype).copy_(f), p.requires_grad)
            for p, f in zip(self.params, fresh, strict=True)
        ]
        self.opt = self.make_optimizer(self.params)

    def loss(self, seed: int, used: Collection[int] | None = None, on: Collection[int] | None = None) -> Tensor:
        """A loss whose mean gradient over the ranks is ``dyadic(params, seed)`` for the parameters ``used`` (None:
        all).

        ``on``: only these ranks have it (of those there are; else rank 0), with that much larger gradients.
        """
        grads = share(dyadic(self.params, seed), self.rank, self.world)
        if on is not None:
            ranks = [r for r in on if r < self.world] or [0]
            grads = [g * (self.world / len(ranks)) for g in dyadic(self.params, seed)]
            if self.rank not in ranks:
                return torch.zeros((), requires_grad=True)
        return loss_of(self.params, grads, lambda i: used is None or i in used)

    def backward(self, seed: int, used: Collection[int] | None = None, on: Collection[int] | None = None) -> None:
        self.loss(seed, used, on).backward()

    def step(self) -> None:
        """The end of a usual iteration."""
        self.opt.step()
        self.opt.zero_grad()

    def clip(self, max_norm: float, norm_type: float = 2.0, **options: Any) -> None:
        self.clips = True
        clip = (
            functools.partial(TorchTwin.clip_grad_norm_, self.opt) if self.clips_by_torch else self.opt.clip_grad_norm_
        )
        self.see(clip(max_norm, norm_type, **options))

    def see(self, value: Any) -> None:
        """Records a value that the twins must see too."""
        self.seen.append(value.detach().clone() if isinstance(value, Tensor) else value)

    def see_grads(self) -> None:
        for p in self.params:
            self.see(self.opt.full_grad(p))


@dataclass
class Outcome:
    """Everything that a script leaves: whole tensors, joined over the ranks."""

    params: list[Tensor]
    states: list[dict[str, Tensor]]
    seen: list[Any]
    clips: bool  # then 1/world and the clip factor are rounded together, and only powers of two agree bitwise


Make = Callable[[list[Parameter]], Any]  # what to give an optimizer for the parameters


def joined_states(saved: Sequence[dict[str, Any]], params: Sequence[Tensor]) -> list[dict[str, Tensor]]:
    """The ranks' state_dicts put together: whole tensors of the parameters' shapes. Every element must come exactly once."""
    whole = []
    for index, param in enumerate(params):
        entries = [one["state"][index] for one in saved]
        joined: dict[str, Tensor] = {"step": entries[0]["step"]}
        assert all(torch.equal(entry["step"], joined["step"]) for entry in entries), "ranks count steps differently"
        for name in entries[0].keys() - {"step"}:
            flat = torch.full((param.numel(),), float("nan"), dtype=entries[0][name].dtype)
            covered = torch.zeros(param.numel(), dtype=torch.int64)
            for entry in entries:
                value, ranges = entry[name], [(0, param.numel())]
                if isinstance(value, TensorShard):
                    piece, ranges = value.piece, list(value.ranges)
                else:
                    piece = in_memory_order(value, param)
                at = 0
                for begin, end in ranges:
                    flat[begin:end] = piece[at : at + end - begin]
                    covered[begin:end] += 1
                    at += end - begin
                assert at == piece.numel()
            assert (covered == 1).all(), f"{name} of parameter {index} is not covered once: {covered}"
            joined[name] = flat.as_strided(param.shape, param.stride())
        whole.append(joined)
    return whole


def in_memory_order(tensor: Tensor, like: Tensor) -> Tensor:
    laid_out = torch.empty_strided(like.shape, like.stride(), dtype=tensor.dtype).copy_(tensor)
    return laid_out.as_strided((like.numel(),), (1,))


def assert_as_torch(outcome: Outcome, expected: Outcome, rtol: float = 2e-6, atol: float = 1e-7) -> None:
    for i, (p, q) in enumerate(zip(outcome.params, expected.params, strict=True)):
        torch.testing.assert_close(
            p, q.to(p.dtype), rtol=rtol, atol=atol, equal_nan=True, msg=lambda m, i=i: f"parameter {i}: {m}"
        )
    for i, (state, theirs) in enumerate(zip(outcome.states, expected.states, strict=True)):
        for name in {"step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"} & state.keys() & theirs.keys():
            torch.testing.assert_close(
                state[name],
                theirs[name].to(state[name].dtype),
                rtol=rtol,
                atol=atol,
                equal_nan=True,
                msg=lambda m, i=i, n=name: f"{n} of {i}: {m}",
            )
    assert len(outcome.seen) == len(expected.seen)
    for i, (mine, theirs) in enumerate(zip(outcome.seen, expected.seen, strict=True)):
        if isinstance(mine, Tensor):
            torch.testing.assert_close(
                mine, theirs.to(mine.dtype), rtol=rtol, atol=atol, equal_nan=True, msg=lambda m, i=i: f"seen {i}: {m}"
            )
        else:
            assert mine == theirs, f"seen {i}: {mine!r}, torch {theirs!r}"
