"""Random backwards beside torch's: nested, reentrant, failing, within torch.autograd.grad(), inside no_sync(), with hooks of
users that fail or drop gradients, and p.grad edited in between. Gradients are small integers, so sums have one value."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils.checkpoint import checkpoint

from bucketwheel.comm.communicator import Communicator
from bucketwheel.optim.sharded_adamw import ShardedAdamW
from tests.support.bits import assert_bitwise_equal
from tests.support.nodes import Node, Stop, stop
from tests.support.optim_twins import TorchTwin, run_local
from tests.support.simulated_cuda import posing

COUNT, STEPS = 4, 12
Op = tuple[Any, ...]  # its kind and what it is about


class Side:
    """Ours or torch's. ``hooks``: of users, after accumulation; they are there before the optimizer."""

    def __init__(self, make: Callable[[list[Parameter]], Any]) -> None:
        self.params = [Parameter(torch.zeros(6, 4)) for _ in range(COUNT)]
        self.hooks: dict[int, Callable[[Tensor], None]] = {}
        for index, param in enumerate(self.params):
            param.register_post_accumulate_grad_hook(lambda p, i=index: self.hooks[i](p) if i in self.hooks else None)
        self.opt = make(self.params)

    def loss(self, indices: list[int], factor: float, *, reentrant: bool = False) -> Tensor:
        x = torch.ones(2, requires_grad=True)
        forward = lambda x: sum((self.params[i] * factor * x.mean()).sum() for i in indices)  # noqa: E731
        found: Tensor = checkpoint(forward, x, use_reentrant=True) if reentrant else forward(x)
        return found

    def play(self, op: Op) -> None:
        kind, indices, index, factor, *inner = op
        param = self.params[index]
        getattr(self, f"_{kind}")(param, index, indices, factor, *inner)

    # ---- without another one inside

    def _backward(self, _: Parameter, index: int, indices: list[int], factor: float) -> None:
        self.loss(indices, factor).backward()

    def _reentrant(self, _: Parameter, index: int, indices: list[int], factor: float) -> None:
        losses = [self.loss(some, factor, reentrant=True) for some in (indices, [index])]
        (losses[0] + losses[1] + self.loss(indices, 1.0)).backward()

    def _retain(self, _: Parameter, index: int, indices: list[int], factor: float) -> None:
        loss = self.loss(indices, factor)
        loss.backward(retain_graph=True)
        loss.backward()

    def _inputs(self, param: Parameter, index: int, indices: list[int], factor: float) -> None:
        self.loss(sorted({*indices, index}), factor).backward(inputs=[param])

    def _create(self, _: Parameter, index: int, indices: list[int], factor: float) -> None:
        params = [self.params[i] for i in indices]
        grads = torch.autograd.grad(self.loss(indices, factor), params, create_graph=True)
        penalty = sum((grad.sum() * p).sum() for grad, p in zip(grads, params, strict=True))
        (self.loss([index], factor) + penalty).backward()

    def _no_gradient(self, param: Parameter, index: int, indices: list[int], factor: float) -> None:
        Node.apply(param, "none", None).sum().backward()

    def _fails(self, _: Parameter, index: int, indices: list[int], factor: float) -> None:
        last = Node.apply(self.params[(index + 1) % COUNT], "fails", None).sum()
        with contextlib.suppress(Stop):
            (self.loss([index], factor) + last).backward()

    def _hook_fails(self, param: Parameter, index: int, indices: list[int], factor: float) -> None:
        if factor > 5:
            hook = param.register_hook(stop)
        elif factor > 2:
            hook = param.register_post_accumulate_grad_hook(stop)
        else:
            self.hooks[index], hook = stop, contextlib.ExitStack()  # type: ignore[assignment]
        with contextlib.suppress(Stop):
            self.loss([index], factor).backward()
        self.hooks.pop(index, None)
        hook.close() if isinstance(hook, contextlib.ExitStack) else hook.remove()

    def _hook_drops(self, _: Parameter, index: int, indices: list[int], factor: float) -> None:
        self.hooks[index] = lambda p: setattr(p, "grad", None)
        try:
            self.loss(indices, factor).backward()
        finally:
            del self.hooks[index]

    def _edit(self, param: Parameter, index: int, indices: list[int], factor: float) -> None:
        if factor <= 2:
            param.grad = torch.full((6, 4), factor)
        elif factor <= 4:
            param.grad = None
        elif param.grad is not None:
            param.grad.mul_(2.0) if factor <= 6 else param.grad.zero_()

    def _zero_grad(self, _: Parameter, index: int, indices: list[int], factor: float) -> None:
        self.opt.zero_grad(set_to_none=factor > 4)

    def _grad_sync(self, *_: Any) -> None:
        if isinstance(self.opt, ShardedAdamW):
            self.opt.grad_sync()

    # ---- with another one inside

    def _no_sync(self, _: Parameter, index: int, indices: list[int], factor: float, inner: Op) -> None:
        with self.opt.no_sync():
            self.play(inner)

    def _nested(self, param: Parameter, index: int, indices: list[int], factor: float, inner: Op) -> None:
        node = Node.apply(param, "", lambda: self.play(inner))
        ((node * factor).sum() + self.loss(indices, factor)).backward()

    def _grad(self, _: Parameter, index: int, indices: list[int], factor: float, inner: Op) -> None:
        z = torch.ones(1, requires_grad=True)
        loss = Node.apply(z, "", lambda: self.play(inner)).sum() + self.loss(indices, factor)
        torch.autograd.grad(loss, [*(self.params[i] for i in indices), z])

    def _in_hook(self, param: Parameter, index: int, indices: list[int], factor: float, inner: Op) -> None:
        def act(_: Tensor) -> None:
            hook.remove()
            with torch.enable_grad():
                self.play(inner)

        hook = param.register_hook(act)
        try:
            self.loss(indices, factor).backward()
        finally:
            hook.remove()

    def _late_hook(self, _: Parameter, index: int, indices: list[int], factor: float, inner: Op) -> None:
        hooks = [self.params[i].register_post_accumulate_grad_hook(lambda p: None) for i in indices]
        try:
            self.play(inner)
        finally:
            for hook in hooks:
                hook.remove()


ALONE = ["backward"] * 4
ALONE += "reentrant retain inputs create no_gradient fails hook_fails hook_drops edit zero_grad grad_sync".split()
AROUND = ["no_sync", "nested", "grad", "grad", "in_hook", "late_hook"]
IN_BACKWARD = ["backward", "retain", "inputs", "create", "fails", "hook_fails"]  # where p.grad may be of two backwards


def drawn(rng: random.Random, kinds: list[str]) -> Op:
    kind, indices = rng.choice(kinds), sorted(rng.sample(range(COUNT), rng.randint(1, COUNT)))
    one: Op = (kind, indices, rng.randrange(COUNT), float(rng.randint(1, 8)))
    if kind not in AROUND:
        return one
    outside = kind in ("no_sync", "late_hook")
    within = ALONE[:-1] if outside else IN_BACKWARD
    return (*one, drawn(rng, [*within, "nested", "grad"] if outside else within))


def played(seed: int, comm: Communicator) -> None:
    rng, small = random.Random(seed), {"bucket_cap_mb": 1e-4} if seed % 2 else {}
    ours = Side(lambda params: ShardedAdamW(params, process_group=comm, **small))
    theirs = Side(lambda params: TorchTwin(params))
    if seed % 3:  # from here on it is known that gradients repeat
        for _ in range(2):
            ours.loss([*range(COUNT)], 1.0).backward()
        ours.opt.grad_sync()
        ours.opt.zero_grad()
    script: list[Op] = []
    for _ in range(STEPS):
        script.append(drawn(rng, ALONE + AROUND))
        for side in (ours, theirs):
            side.play(script[-1])
        if rng.random() < 0.3:
            found = [ours.opt.full_grad(param) for param in ours.params]
            assert_bitwise_equal(found, [param.grad for param in theirs.params], f"seed {seed}, {script}")
            assert ours.opt._engine.grads.memory()["held"] == 0
            script.append(("asked for",))
    ours.opt.zero_grad()
    ours.opt.close()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("device", "seeds"), [(None, 400), ("cuda", 120)])
def test_gradients_are_torchs(device: str | None, seeds: int) -> None:
    def body(comm: Communicator) -> None:
        for seed in range(seeds):
            played(seed, comm)

    with posing() if device else contextlib.nullcontext():
        run_local(1, body, device=device, timeout_s=200)
