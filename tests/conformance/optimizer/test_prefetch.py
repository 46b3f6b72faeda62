"""Forwards while parameters are gathered: never a stale weight, in the order in which forward needs them."""

from __future__ import annotations

import contextlib
import copy
import io
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bucketwheel.comm.communicator import Communicator
from bucketwheel.optim.sharded_adamw import ShardedAdamW
from tests.support.bits import assert_bitwise_equal
from tests.support.late_gathers import delay_gathers, pending, start_at
from tests.support.optim_twins import run_local

WIDTH = 6


class Wandering(nn.Module):
    """Registered in another order than it runs; skips, repeats and shares modules, and uses their weights by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.sometimes = nn.Linear(WIDTH, WIDTH)
        self.twice = nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.only_weight = nn.Linear(WIDTH, WIDTH)  # never called
        self.first = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
        self.tied = nn.Linear(WIDTH, WIDTH)
        self.tied.weight = self.last.weight

    def forward(self, x: Tensor, path: int) -> Tensor:
        x = self.first(x) * self.scale
        if path % 3 == 1:
            x = self.sometimes(x)
        x = F.linear(x, self.only_weight.weight) + self.last.bias
        x = self.twice(torch.tanh(self.twice(x)))
        if path % 2:
            x = self.tied(x)
        return self.last(self.norm(x))


def make(comm: Communicator, model: nn.Module, overlaps: bool) -> ShardedAdamW:
    start_at(model.parameters())
    opt = ShardedAdamW(model.parameters(), lr=0.05, bucket_cap_mb=1e-4, process_group=comm, overlap_param_sync=overlaps)
    delay_gathers(opt)
    return opt


def inputs(rank: int, step: int) -> Tensor:
    return torch.sin(torch.arange(2.0 * WIDTH).view(2, WIDTH) + 7 * rank + step)


def train(
    comm: Communicator,
    overlaps: bool,
    attach: Callable[[ShardedAdamW, nn.Module], object] | None,
    model_of: Callable[[], nn.Module] = Wandering,
    steps: int = 9,
) -> list[Tensor]:
    """The outputs of all forwards, each rank on a path of its own, with evaluations between."""
    model = model_of()
    opt = make(comm, model, overlaps)
    if attach is not None:
        attach(opt, model)
    seen = []
    for step in range(steps):
        out = model(inputs(comm.rank, step), step + comm.rank)
        out.square().sum().backward()
        seen.append(out.detach())
        opt.step()
        assert (not overlaps) or pending(opt)
        opt.zero_grad()
        if step % 3 == 2:
            model.eval()
            with torch.inference_mode() if step % 2 else torch.no_grad():
                seen.append(model(inputs(99, step), step).clone())
            model.train()
    opt.close()
    return [*seen, *(p.detach() for p in model.parameters())]


def attach_model(opt: ShardedAdamW, model: nn.Module) -> None:
    opt.prefetch_params(model)


def attach_a_part(opt: ShardedAdamW, model: nn.Module) -> None:
    opt.prefetch_params(model.get_submodule("first"))
    opt.prefetch_params(model.get_submodule("twice"))


def attach_on_one_rank(opt: ShardedAdamW, model: nn.Module) -> None:
    engine: Any = opt._engine
    if engine.comm.rank == 0:
        opt.prefetch_params(model)


ATTACH = [None, attach_model, attach_a_part, attach_on_one_rank]


def test_no_forward_sees_a_stale_weight() -> None:
    """Modules in another order, skipped, used twice, and weights used by other modules."""
    expected = run_local(2, train, False, None)
    for attach in ATTACH:
        assert_bitwise_equal(run_local(2, train, True, attach), expected, f"{attach}")


# --- order ------------------------------------------------------------------------------------------------------------


class Three(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.b, self.c, self.a, self.unused = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.order = "abc"
        self.fails = False

    def forward(self, x: Tensor) -> Tensor:
        for name in self.order:
            if self.fails and name == "b":
                raise KeyError("in forward")
            x = torch.tanh(self.get_submodule(name)(x))
        return x


@contextlib.contextmanager
def three(comm: Communicator, watches: bool = True) -> Iterator[tuple[Three, ShardedAdamW, Callable[[], str]]]:
    """A model, its optimizer, and a step that returns in which order it gathered."""
    model = Three()
    opt = make(comm, model, True)
    late = delay_gathers(opt)
    if watches:
        opt.prefetch_params(model)
    names = {p.data_ptr(): name[0] for name, p in model.named_parameters()}

    def step() -> str:
        opt.step()
        opt.zero_grad()
        order = "".join(names[address] for address in late.started)
        late.started.clear()
        return order

    yield model, opt, step
    opt.close()


def learn(comm: Communicator, watcher: int) -> list[str]:
    orders = []
    with three(comm, watches=comm.rank >= watcher) as (model, _, step):
        if comm.rank > watcher:
            model.order = "bca"
        for number in range(1, 10):
            if number == 5:
                model.order = "cab"  # learnt at step 8
            if number != 2 or comm.rank == watcher:  # a rank need not call the model at all
                model(inputs(comm.rank, number)).sum().backward()
            orders.append(step())
    return orders


@pytest.mark.parametrize(("world", "watcher"), [(1, 0), (2, 0), (3, 1)])
def test_buckets_are_gathered_in_the_order_of_forward(world: int, watcher: int) -> None:
    orders = run_local(world, learn, watcher)
    assert all(ranks == orders[0] for ranks in orders)
    assert [order.replace("u", "") for order in orders[0]] == ["abc"] * 7 + ["cab"] * 2


def wait_in_turn(comm: Communicator) -> list[str]:
    """Which parameters were still on their way when each module began."""
    with three(comm) as (model, opt, step):
        seen: list[str] = []
        letter = {index: name[0] for index, (name, _) in enumerate(model.named_parameters())}
        for number in range(2):
            if number:
                for module in (model.a, model.b, model.c):
                    module.register_forward_pre_hook(
                        lambda *_: seen.append("".join(sorted(letter[i] for i in pending(opt))))
                    )
            model(inputs(comm.rank, number)).sum().backward()
            step()
        seen.clear()
        model(inputs(0, 0))
    return seen


def test_each_module_waits_for_its_own_parameters() -> None:
    assert run_local(2, wait_in_turn) == [["bc", "c", ""]] * 2


# --- ends -------------------------------------------------------------------------------------------------------------


def fail_in_forward(comm: Communicator, overlaps: bool) -> list[Tensor]:
    model = Three()
    opt = make(comm, model, overlaps)
    opt.prefetch_params(model)
    seen = []
    for step in range(5):
        model.fails = step in (0, 2, 3) and comm.rank == 0
        with contextlib.suppress(KeyError):
            out = model(inputs(comm.rank, step))
            seen.append(out.detach())
            out.sum().backward()
        assert torch.overrides._len_torch_function_stack() == 0
        opt.step()  # the other rank has a gradient
        opt.zero_grad()
    opt.close()
    return [*seen, *(p.detach() for p in model.parameters())]


def test_an_exception_in_forward_leaves_nothing_behind() -> None:
    assert_bitwise_equal(run_local(2, fail_in_forward, True), run_local(2, fail_in_forward, False))


def step_without_forward(comm: Communicator, overlaps: bool) -> list[Tensor]:
    """Gradients by hand, and a graph made before the step: nobody reads a parameter between two steps."""
    model = Three()
    opt = make(comm, model, overlaps)
    opt.prefetch_params(model)
    loss = sum(p.sum() for p in model.parameters())
    for step in range(4):
        if step % 2:
            for p in model.parameters():
                p.grad = torch.full(p.shape, float(step))
        else:
            loss.backward(retain_graph=True)  # type: ignore[union-attr]
        opt.step()
        engine: Any = opt._engine
        assert not overlaps or len(pending(opt)) == 4 == len(engine._gathers.running)  # none of an older step
        opt.zero_grad()
    opt.close()
    return [p.detach() for p in model.parameters()]


def test_a_step_waits_for_what_nobody_has_read() -> None:
    assert_bitwise_equal(run_local(2, step_without_forward, True), run_local(2, step_without_forward, False))


def count_hooks(model: nn.Module) -> int:
    return sum(len(m._forward_pre_hooks) + len(m._state_dict_pre_hooks) for m in model.modules())


def detach_and_close(comm: Communicator) -> None:
    with three(comm) as (model, opt, step):
        attached = count_hooks(model)
        assert attached
        detach = opt.prefetch_params(model)
        assert count_hooks(model) == 2 * attached
        model(inputs(0, 0)).sum().backward()
        step()
        detach()
        assert count_hooks(model) == attached and not pending(opt)
        detach()
        file = io.BytesIO()
        torch.save(model, file)
        loaded = torch.load(io.BytesIO(file.getvalue()), weights_only=False)
        for copied in (copy.deepcopy(model), loaded):  # with hooks, which mean nothing there
            assert_bitwise_equal(copied(inputs(0, 1)), model(inputs(0, 1)))
    assert count_hooks(model) == 0
    opt = make(comm, model, False)
    opt.prefetch_params(model)()
    assert count_hooks(model) == 0, "nothing overlaps"
    opt.close()


def test_hooks_go_with_detach_and_close() -> None:
    run_local(2, detach_and_close)
