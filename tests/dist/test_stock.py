"""Stock torch code on the gradients of the real sharded optimizer: what it computes and leaves is what it does unsharded.

Gradients are dyadic and their norms exact, so everything is compared bit for bit.
"""

from __future__ import annotations

import gc
import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from optim_twins import dyadic, loss_of, run_local, share
from torch import Tensor, nn
from torch.nn import Parameter
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, clip_grads_with_norm_, get_total_norm

from bucketwheel.comm import Communicator
from bucketwheel.errors import ShardedGradError
from bucketwheel.grad import ShardedGrad
from bucketwheel.optim import ShardedAdamW
from bucketwheel.testing import assert_bitwise_equal

FOREACH = [True, False, None]
SHAPES = [(5, 7), (3,), (), (33, 12), (1, 1), (257,), (4, 3, 2, 2)]  # torch refuses the inf norm of an empty tensor


def make_params() -> list[Parameter]:
    generator = torch.Generator().manual_seed(1)
    return [Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]


class Run:
    """One rank of a training: its optimizer, its backward, and what a flow has to say about it."""

    def __init__(self, comm: Communicator | None, **options: Any) -> None:
        self.comm = comm
        self.rank, self.world = (comm.rank, comm.size) if comm else (0, 1)
        self.params = make_params()
        self.opt = ShardedAdamW(
            self.params, lr=0.01, weight_decay=0.1, process_group=comm, bucket_cap_mb=1e-3, **options
        )
        self.seen: list[Any] = []
        self.step = 0

    def loss(self, used: Callable[[int], bool] = lambda i: True) -> Tensor:
        return loss_of(self.params, share(dyadic(self.params, self.step), self.rank, self.world), used)

    @property
    def grads(self) -> list[Tensor]:
        return [p.grad for p in self.params if p.grad is not None]

    def result(self) -> Any:
        return self.seen, [p.detach().clone() for p in self.params], self.opt.state_dict()["state"][0]["step"]


Flow = Callable[[Run], None]


def run_flow(comm: Communicator | None, flow: Flow, steps: int = 3, **options: Any) -> Any:
    run = Run(comm, **options)
    for run.step in range(steps):
        flow(run)
        run.opt.zero_grad()
    return run.result()


def expect_equal_to_unsharded(flow: Flow, worlds: tuple[int, ...] = (1, 2, 4), **options: Any) -> Any:
    expected = run_flow(None, flow)
    for world in worlds:
        for rank, result in enumerate(run_local(world, lambda comm: run_flow(comm, flow, **options))):
            assert_bitwise_equal(result, expected, f"rank {rank} of {world}: ")
    return expected


# --- clipping ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("norm_type", [2.0, math.inf, 1.0])
@pytest.mark.parametrize("foreach", FOREACH)
def test_clip_grad_norm(norm_type: float, foreach: bool | None) -> None:
    def flow(run: Run) -> None:
        run.loss().backward()
        run.seen.append(clip_grad_norm_(run.params, 0.25, norm_type, foreach=foreach))
        run.opt.step()

    norms, _, _ = expect_equal_to_unsharded(flow)
    assert all(norm > 0.25 for norm in norms)


@pytest.mark.parametrize("foreach", FOREACH)
def test_total_norm_then_clip_with_it(foreach: bool | None) -> None:
    def flow(run: Run) -> None:
        run.loss().backward()
        norm = get_total_norm(run.grads, foreach=foreach)
        clip_grads_with_norm_(run.params, 0.5, norm, foreach=foreach)
        run.seen += [norm, run.opt.local_grad_norm() < 0.5 + 1e-6]
        run.opt.step()

    expect_equal_to_unsharded(flow)


def test_norms_at_world_three() -> None:
    """A third is not dyadic: the norms agree to rounding, and are the same bits on every rank."""

    def flow(run: Run) -> None:
        run.loss().backward()
        run.seen += [get_total_norm(run.grads, ord) for ord in (2.0, 1.0, math.inf, 3.0)]
        clip_grad_norm_(run.params, 0.25)
        run.opt.step()

    expected, expected_params, _ = run_flow(None, flow)
    results = run_local(3, lambda comm: run_flow(comm, flow))
    for seen, params, _ in results:
        assert_bitwise_equal((seen, params), results[0][:2])
        torch.testing.assert_close(seen, expected, rtol=3e-7, atol=0)
        torch.testing.assert_close(params, expected_params, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("foreach", FOREACH)
def test_clip_grad_value(foreach: bool | None) -> None:
    def flow(run: Run) -> None:
        run.loss().backward()
        clip_grad_value_(run.params, 0.25, foreach=foreach)
        run.opt.step()

    expect_equal_to_unsharded(flow, worlds=(1, 2, 3, 4))


def test_clipping_a_part_and_clipping_twice() -> None:
    def flow(run: Run) -> None:
        run.loss().backward()
        run.seen.append(clip_grad_norm_(run.params[:3], 0.5))
        run.seen.append(clip_grad_norm_(run.params[3:], 1e6))
        run.opt.step()

    expect_equal_to_unsharded(flow)


def test_error_if_nonfinite_raises_on_every_rank() -> None:
    def body(comm: Communicator) -> None:
        run = Run(comm)
        before = [p.detach().clone() for p in run.params]
        loss = run.loss()
        if comm.rank == comm.size - 1:
            loss = loss + run.params[5][3] * math.inf
        loss.backward()
        for clip in (clip_grad_norm_, lambda ps, c, **kw: run.opt.clip_grad_norm_(c, **kw)):
            with pytest.raises(RuntimeError, match="non-finite"):
                clip(run.params, 1.0, error_if_nonfinite=True)
        assert_bitwise_equal([p.detach() for p in run.params], before)

    run_local(3, body)


# --- loss scaling -----------------------------------------------------------------------------------------------------


def scaler_step(run: Run, scaler: torch.amp.GradScaler, how: str) -> None:
    loss = run.loss()
    if run.step == 2:
        # One element of one parameter, on the last rank; its part of the shards lies on the first, because it is flat memory
        # order that is sharded.
        loss = loss + (run.params[0][0, 0] * math.inf if run.rank == run.world - 1 else 0.0)
    before = [p.detach().clone() for p in run.params]
    scaler.scale(loss).backward()
    if how != "step":
        scaler.unscale_(run.opt)
        with pytest.raises(RuntimeError, match="already been called"):
            scaler.unscale_(run.opt)
    if how == "clip":
        run.seen.append(clip_grad_norm_(run.params, 0.25))
    if how == "own clip":
        run.seen.append(run.opt.clip_grad_norm_(0.25))
    scaler.step(run.opt)
    scaler.update()
    is_skipped = scaler.is_enabled() and run.step == 2
    run.seen.append(scaler.get_scale())
    for p, old in zip(run.params, before, strict=True):
        assert torch.equal(p, old) == is_skipped


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


# --- accumulation, zeroing, scaling, reading --------------------------------------------------------------------------


def test_accumulation_through_the_placeholder() -> None:
    def flow(run: Run) -> None:
        for part in range(3):
            (run.loss() / 4).backward()
            assert part or run.comm is None or all(type(g) is ShardedGrad for g in run.grads)
        run.opt.step()

    expect_equal_to_unsharded(flow, worlds=(1, 2, 3, 4))


@pytest.mark.parametrize("overlap", [True, False])
def test_accumulation_goes_on_after_clipping_and_stepping(overlap: bool) -> None:
    """Without zero_grad, a later backward adds to what clipping has left."""

    def flow(run: Run) -> None:
        run.loss().backward()
        for p in run.params:
            p.grad *= 0.5
        run.loss().backward()
        run.opt.step()
        run.loss().backward()
        run.seen.append(get_total_norm(run.grads))
        for p in run.params:
            p.grad /= 4
        run.opt.step()

    expect_equal_to_unsharded(flow, overlap_grad_sync=overlap)


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("how", ["optimizer", "module", "foreach"])
def test_zero_grad(set_to_none: bool, how: str) -> None:
    def flow(run: Run) -> None:
        def zero() -> None:
            if how == "optimizer":
                run.opt.zero_grad(set_to_none)
            elif how == "module":
                nn.ParameterList(run.params).zero_grad(set_to_none)
            elif set_to_none:
                for p in run.params:
                    p.grad = None
            else:
                torch._foreach_zero_(run.grads)

        run.loss().backward()  # dropped before it is reduced
        zero()
        run.loss(lambda i: i != 3).backward()
        run.opt.step()
        run.seen.append([p.grad is None for p in run.params])
        zero()  # dropped after
        run.opt.step()  # zero gradients decay and step; none do not
        run.seen.append(run.opt.local_grad_norm())

    seen, _, _ = expect_equal_to_unsharded(flow, worlds=(1, 2, 3, 4))
    assert seen[0] == [set_to_none and i == 3 for i in range(len(SHAPES))]


def test_manual_scaling() -> None:
    def flow(run: Run) -> None:
        run.loss().backward()
        for p in run.params:
            factor = torch.tensor(0.5)
            p.grad.mul_(factor)
            factor.fill_(100.0)
            p.grad.data.div_(4)
        torch._foreach_mul_(run.grads, 2.0)
        torch._foreach_mul_(run.grads, [2.0**i for i in range(len(run.grads))])
        run.seen.append(get_total_norm(run.grads))
        run.opt.step()

    expect_equal_to_unsharded(flow)


def test_reading_values_is_refused_and_nothing_changes() -> None:
    def flow(run: Run) -> None:
        run.loss().backward()
        if run.comm is not None:
            for read in (lambda g: g.sum().item(), lambda g: g.numpy(), lambda g: g.clone(), lambda g: g[0]):
                with pytest.raises(ShardedGradError, match=r"'group 0 parameter 3'.*optimizer\.full_grad\(p\)"):
                    read(run.params[3].grad)
        run.opt.step()

    expect_equal_to_unsharded(flow)


def test_a_stock_optimizer_is_refused() -> None:
    def flow(run: Run) -> None:
        run.loss().backward()
        if run.comm is not None:
            before = [p.detach().clone() for p in run.params]
            for other in (torch.optim.AdamW, torch.optim.SGD):
                with pytest.raises(ShardedGradError, match=rf"{other.__name__}\.step.*optimizer that holds it"):
                    other(run.params, lr=1.0).step()
            assert_bitwise_equal([p.detach() for p in run.params], before)
        run.opt.step()

    expect_equal_to_unsharded(flow)


# --- ranks that use different parameters --------------------------------------------------------------------------------


def used_by(rank: int) -> Callable[[int], bool]:
    return lambda i: i != rank


STOCK = {
    "clip": lambda run: clip_grad_norm_(run.params, 0.25),
    "clip, one by one": lambda run: clip_grad_norm_(run.params, 0.25, foreach=False),
    "clip values": lambda run: clip_grad_value_(run.params, 0.25),
}


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("stock", STOCK.values(), ids=STOCK)
def test_divergent_ranks_are_told_to_sync_first(world: int, stock: Callable[[Run], Any]) -> None:
    def body(comm: Communicator) -> list[Tensor]:
        run = Run(comm)
        run.loss(used_by(comm.rank)).backward()
        with pytest.raises(RuntimeError, match=r"call optimizer\.grad_sync\(\) first"):
            stock(run)
        run.opt.zero_grad()
        for run.step in range(2):
            run.loss(used_by(comm.rank)).backward()
            run.opt.grad_sync()
            stock(run)
            run.opt.step()
            run.opt.zero_grad()
        return [p.detach().clone() for p in run.params]

    results = run_local(world, body)
    for params in results:
        assert_bitwise_equal(params, results[0])


def test_one_more_parameter_on_one_rank_is_found_one_by_one() -> None:
    """The list of one rank begins with the whole list of the other, so only the last question has no counterpart."""

    def body(comm: Communicator) -> None:
        run = Run(comm)
        run.loss(lambda i: i < len(SHAPES) - 1 + comm.rank).backward()
        with pytest.raises(RuntimeError, match=r"call optimizer\.grad_sync\(\) first"):
            clip_grad_norm_(run.params, 0.25, foreach=False)
        clip_grad_norm_(run.params, 0.25, foreach=False)  # the window is closed now, so all can list all
        run.opt.step()

    run_local(2, body)


def test_gradients_left_in_no_sync_are_not_taken_for_reduced_ones() -> None:
    """A parameter used in the first micro-batch only: stock clipping after the last must count its reduced gradient."""

    def flow(run: Run) -> None:
        with run.opt.no_sync():
            run.loss().backward()
        run.loss(lambda i: i % 2 == 0).backward()
        run.seen.append(clip_grad_norm_(run.params, 0.25))
        run.opt.step()

    expect_equal_to_unsharded(flow)


@pytest.mark.parametrize("overlap", [True, False])
def test_stock_code_on_gradients_kept_from_no_sync(overlap: bool) -> None:
    """They are not reduced yet, and nobody outside can tell."""

    def flow(run: Run) -> None:
        for part in range(3):
            with run.opt.no_sync():
                (run.loss(lambda i, part=part: i != part) / 2).backward()  # type: ignore[misc]
                assert all(type(g) is Tensor for i, g in enumerate(run.grads) if i != part)
            assert run.comm is None or all(type(g) is ShardedGrad for g in run.grads)
            for p in run.params:
                p.grad = p.grad.mul_(0.5) if p.grad is not None else None
        run.params[4].grad.zero_()
        run.params[5].grad = None
        run.params[6].grad = torch.full_like(run.params[6], 0.25)
        if run.step:
            run.loss(lambda i: i % 2 == 0).backward()
        run.seen.append(clip_grad_norm_(run.params, 0.25))
        run.opt.step()
        if run.step:
            with run.opt.no_sync():  # adds to what the shards hold
                run.loss().backward()
            run.seen.append(get_total_norm(run.grads))
            run.opt.step()

    expect_equal_to_unsharded(flow, overlap_grad_sync=overlap)


def test_grad_scaler_on_gradients_kept_from_no_sync() -> None:
    def flow(run: Run) -> None:
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        with run.opt.no_sync():
            scaler.scale(run.loss()).backward()
        scaler.scale(run.loss(lambda i: i % 2 == 0)).backward()
        scaler.step(run.opt)
        scaler.update()

    expect_equal_to_unsharded(flow)


# --- processes ----------------------------------------------------------------------------------------------------------


def _clip_flow(run: Run) -> None:
    run.loss().backward()
    run.seen.append(clip_grad_norm_(run.params, 0.25))
    run.opt.step()


def _scaler_flow(run: Run) -> None:
    if run.step == 0:
        run.scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)  # type: ignore[attr-defined]
    scaler_step(run, run.scaler, "clip")  # type: ignore[attr-defined]


def _divergent_flow(run: Run) -> None:
    for p in run.params:
        p.grad = None
    run.loss(used_by(run.rank)).backward()
    with pytest.raises(RuntimeError, match=r"call optimizer\.grad_sync\(\) first"):
        clip_grad_norm_(run.params, 0.25)
    run.opt.step()


def _refusal_flow(run: Run) -> None:
    run.loss().backward()
    with pytest.raises(ShardedGradError, match=r"full_grad"):
        run.params[0].grad.sum().item()
    with pytest.raises(ShardedGradError, match=r"optimizer that holds it"):
        torch.optim.SGD(run.params, lr=1.0).step()
    run.opt.step()


DDP_OPTIONS: list[dict[str, Any]] = [{}, {"find_unused_parameters": True}, {"static_graph": True}]


class Branches(nn.Module):
    """One branch runs, or both."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.left, self.right = nn.Linear(3, 8), nn.Linear(8, 2), nn.Linear(8, 2)

    def forward(self, x: Tensor, runs_left: bool = True, runs_right: bool = True) -> Tensor:
        hidden = torch.tanh(self.first(x))
        branches = [branch(hidden) for branch, runs in ((self.left, runs_left), (self.right, runs_right)) if runs]
        return torch.stack(branches).sum(0)


def train_branches(wrap: Callable[[nn.Module], Any], rank: int, diverges: bool, is_first: bool) -> list[Tensor]:
    model = Branches()
    wrapped = wrap(model) if is_first else None
    opt = ShardedAdamW(model.parameters(), lr=0.01, process_group=Communicator(timeout_s=40))
    wrapped = wrapped or wrap(model)
    for step in range(4):
        for micro in range(2):
            x = torch.full((4, 3), 0.25 * step - rank + micro)
            is_left = (rank + step + micro) % 3 == 0
            wrapped(x, is_left or not diverges, not is_left or not diverges).square().sum().backward()
        opt.clip_grad_norm_(0.5)
        opt.step()
        opt.zero_grad()
    opt.close()
    return [p.detach().clone() for p in model.parameters()]


def train_under_ddp(rank: int, world: int) -> int:
    """Under DDP everything is what it is without; returns how many warnings there were."""
    found = 0
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for options in DDP_OPTIONS:
            diverges = "find_unused_parameters" in options
            for is_first in (True, False):
                wrap = lambda model: DistributedDataParallel(model, **options)  # noqa: E731,B023
                actual = train_branches(wrap, rank, diverges, is_first)
                assert_bitwise_equal(
                    actual, train_branches(lambda model: model, rank, diverges, is_first), f"{options}"
                )
        found = len([w for w in caught if "wrapped in DistributedDataParallel" in str(w.message)])
    everyone: list[Any] = [None] * world
    dist.all_gather_object(everyone, actual)
    assert_bitwise_equal(everyone[0], everyone[1])
    return found


def refuse_ddp_that_replaces_gradients(rank: int, world: int) -> None:
    model = Branches()
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
    opt = ShardedAdamW(model.parameters(), lr=0.01, process_group=Communicator(timeout_s=40))
    before = [p.detach().clone() for p in model.parameters()]
    wrapped(torch.ones(4, 3)).sum().backward()
    refused = pytest.raises(ShardedGradError, match=r"gradient_as_bucket_view=True\) replaced the gradient")
    with refused:
        opt.step()
    with refused:
        opt.clip_grad_norm_(1.0)
    with refused:
        wrapped(torch.ones(4, 3)).sum().backward()
    assert_bitwise_equal([p.detach() for p in model.parameters()], before)
    opt.zero_grad()
    del wrapped  # without the wrapper training goes on
    gc.collect()
    model(torch.ones(4, 3)).sum().backward()
    opt.step()
    assert not torch.equal(model.first.weight, before[0])
    opt.close()


def test_a_ddp_wrapper_changes_nothing_and_is_called_redundant_once(rank_pool: Any) -> None:
    assert rank_pool(2).run(train_under_ddp, timeout_s=60) == [1, 1]


def test_ddp_with_gradients_as_bucket_views_is_refused(rank_pool: Any) -> None:
    rank_pool(2).run(refuse_ddp_that_replaces_gradients, timeout_s=60)


def flows_of_a_process(rank: int, world: int) -> list[Any]:
    with Communicator(timeout_s=30) as comm:
        assert comm.backend == "shm"
        return [run_flow(comm, flow, steps=4) for flow in (_clip_flow, _scaler_flow, _refusal_flow, _divergent_flow)]


def test_over_processes(rank_pool: Any) -> None:
    results = rank_pool(2).run(flows_of_a_process, timeout_s=60)
    expected = [run_flow(None, flow, steps=4) for flow in (_clip_flow, _scaler_flow)]
    assert_bitwise_equal(results[0][:2], expected)
    assert_bitwise_equal(results[1], results[0])
