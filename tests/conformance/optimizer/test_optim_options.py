"""Hyperparameters, hooks and closures as in torch; options, layouts and what ranks must have in common."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import lr_scheduler

from bucketwheel.comm.backends import LocalWorld
from bucketwheel.comm.communicator import Communicator
from bucketwheel.optim.sharded_adamw import ShardedAdamW
from bucketwheel.testing import assert_bitwise_equal
from tests.conformance.optimizer.updates import SCHEDULERS, named, two_rates
from tests.support.optim_twins import (
    TINY,
    WORLDS,
    dyadic,
    joined_states,
    loss_of,
    make_params,
    on_ranks,
    run_local,
    share,
)
from tests.support.requirements import slow_case

# How far parameters may be from torch's after 100 steps (rtol, atol). Its fused kernel rounds in our order: the row's
# numbers, of which a tenth is used. foreach adds every product up in another order; measured: 1.8 times the row's.
FROM_TORCH = {"fused": (1e-6, 1e-8), "foreach": (4e-6, 1e-7)}


@pytest.mark.parametrize("world", [None, slow_case(1), 2, 3, slow_case(4)])
def test_100_steps_stay_with_torch(world: int | None) -> None:
    """N1 of the optimizer's test rows; sums and means are exact at every world, so only the step itself can deviate."""
    size = world or 1

    def gradients(params: list[Parameter], step: int, rank: int) -> list[Tensor]:
        generator = torch.Generator().manual_seed(1000 * step + rank)
        return [torch.randn(p.shape, generator=generator).mul(1024).round().div(1024) * size for p in params]

    def body(comm: Communicator | None) -> tuple[list[Tensor], dict[str, Any]]:
        params = make_params()
        opt = ShardedAdamW(params, lr=0.01, weight_decay=0.1, process_group=comm, **TINY)
        for step in range(100):
            loss_of(params, gradients(params, step, comm.rank if comm else 0)).backward()
            opt.step()
            opt.zero_grad()
        return [p.detach().clone() for p in params], opt.state_dict()

    ranks = on_ranks(world, body)
    states = joined_states([saved for _, saved in ranks], make_params())
    for stock, (rtol, atol) in FROM_TORCH.items():
        reference = make_params()
        theirs = torch.optim.AdamW(reference, lr=0.01, weight_decay=0.1, **{stock: True})
        for step in range(100):
            everyone = [gradients(reference, step, rank) for rank in range(size)]
            for p, *grads in zip(reference, *everyone, strict=True):
                p.grad = torch.zeros_like(p).copy_(torch.stack(grads).sum(0) / size)
            theirs.step()
        for params, _ in ranks:
            for p, q in zip(params, reference, strict=True):
                torch.testing.assert_close(p, q.detach(), rtol=rtol, atol=atol, msg=lambda m, s=stock: f"{s}: {m}")
        for state, q in zip(states, reference, strict=True):
            expected = theirs.state[q]
            assert float(state["step"]) == float(expected["step"]) == 100
            for name in ("exp_avg", "exp_avg_sq"):
                torch.testing.assert_close(state[name], expected[name], rtol=1e-6, atol=1e-8)


# --- layout
# --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("granularity, unit", [("row", None), (8, 8), (5, 5), (1, 1)])
@pytest.mark.parametrize("world", WORLDS)
def test_shard_boundaries_respect_the_granularity(world: int, granularity: int | str, unit: int | None) -> None:
    shapes = [(7, 24), (300,), (33, 40), (5, 3, 8)]

    def body(comm: Communicator) -> dict[str, Any]:
        torch.manual_seed(0)
        params = [Parameter(torch.randn(shape)) for shape in shapes]
        groups = [{"params": params, "granularity": granularity}]
        opt = ShardedAdamW(groups, process_group=comm, bucket_cap_mb=1e-3)
        loss_of(params, share(dyadic(params, 0), comm.rank, comm.size)).backward()
        opt.step()
        return opt.state_dict()["state"]

    states = run_local(world, body)
    cuts = 0
    for index, shape in enumerate(shapes):
        numel = torch.Size(shape).numel()
        step = unit or (torch.empty(shape).stride(0) if len(shape) > 1 else 1)
        ranges = sorted(tuple(r) for state in states for r in state[index].get("ranges", [(0, numel)]))
        assert sum(end - begin for begin, end in ranges) == numel
        for begin, end in ranges:
            assert begin % step == 0 and (end % step == 0 or end == numel), (shape, ranges)
            cuts += end != numel
    assert cuts > 0 or world == 1


def test_it_describes_itself() -> None:
    def body(comm: Communicator) -> tuple[str, dict[str, int]]:
        opt = ShardedAdamW(named(make_params()), process_group=comm, bucket_cap_mb=3e-3)
        before = opt.memory_summary()
        loss_of(list(opt.param_groups[0]["params"]), dyadic(make_params(), 0)).backward()
        opt.step()
        after = opt.memory_summary()
        passing = ("pool", "buckets_peak")
        assert {k: v for k, v in after.items() if k not in passing} == {
            k: v for k, v in before.items() if k not in passing
        }
        return opt.describe(), after

    numel = sum(p.numel() for p in make_params())
    texts, memories = zip(*run_local(2, body), strict=True)
    assert texts[0] == texts[1]
    assert len(re.findall(r"(?m)^ +\d+  float32 +0\.00\d +\d+ +\d+\.\d %", texts[0])) > 1
    for memory in memories:
        assert 4 * numel <= memory["params"] <= 8 * numel
        assert memory["grads"] == memory["params"] // 2 and memory["states"] == memory["params"]
        assert memory["pool"] >= 0
    local = ShardedAdamW(make_params())
    assert "local" in local.describe()
    expected = {"params": 4 * numel, "grads": 0, "states": 8 * numel, "pool": 0}
    assert {name: local.memory_summary()[name] for name in expected} == expected


# --- what is refused
# -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options, match",
    [
        ({"lr": -1.0}, "Invalid learning rate: -1.0"),
        ({"lr": torch.ones(2)}, "Tensor lr must be 1-element"),
        ({"eps": -1e-8}, "Invalid epsilon value"),
        ({"betas": (1.0, 0.9)}, "Invalid beta parameter at index 0"),
        ({"betas": (0.9, -0.1)}, "Invalid beta parameter at index 1"),
        ({"weight_decay": -0.1}, "Invalid weight_decay value"),
        ({"differentiable": True}, "differentiable"),
        ({"max_inflight_buckets": 0}, "max_inflight_buckets"),
        ({"bucket_cap_mb": 0}, "bucket_cap_mb"),
        ({"master_weights": "bf16"}, "master_weights='bf16': one of 'auto', 'fp32', 'bf16_remainder', 'none'"),
        ({"master_weights": "bf16_remainder"}, "bfloat16 parameters, the parameters are torch.float32"),
        ({"state_dtype": torch.float16}, "state_dtype=torch.float16: None or one of torch.float32, torch.bfloat16"),
        ({"state_dtype": torch.float64}, "state_dtype=torch.float64 is for float64 parameters alone"),
        ({"reduce_dtype": torch.int32}, "reduce_dtype=torch.int32: None or one of"),
        ({"reduce_dtype": torch.float64}, "reduce_dtype=torch.float64 is for float64 parameters alone"),
        ({"accum_dtype": torch.float16}, "accum_dtype=torch.float16: None or one of"),
    ],
)
def test_bad_options_are_value_errors(options: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        ShardedAdamW(make_params(), **options)


def test_bad_parameters_are_named_and_nothing_moves() -> None:
    def body(comm: Communicator | None) -> None:
        good = make_params()
        pointers = [p.data_ptr() for p in good]
        for bad, error, match in [
            (Parameter(torch.zeros(3, dtype=torch.float8_e4m3fn)), ValueError, "'bad' is torch.float8_e4m3fn"),
            (Parameter(torch.zeros(3, dtype=torch.complex64)), ValueError, "'bad' is torch.complex64"),
            (Parameter(torch.zeros(3, device="meta")), ValueError, "'bad' is torch.float32 on meta"),
            (Parameter(torch.zeros(2, 2).to_sparse()), TypeError, "'bad' .*sparse"),
        ]:
            with pytest.raises(error, match=match):
                ShardedAdamW([*named(good), ("bad", bad)], process_group=comm)
        if comm:
            gaps = Parameter(torch.zeros(4, 4, dtype=torch.bfloat16)[:, ::2])  # in a flat buffer of its own
            for bad in (gaps, Parameter(torch.zeros(1).expand(5))):
                with pytest.raises(ValueError, match="'bad' .*gaps or overlaps"):
                    ShardedAdamW([*named(good), ("bad", bad)], process_group=comm)
        with pytest.raises(ValueError, match="granularity.*'column'"):
            ShardedAdamW([{"params": good, "granularity": "column"}], process_group=comm)
        with pytest.raises(ValueError, match="maximize must be the same"):
            ShardedAdamW([{"params": good[:3], "maximize": True}, {"params": good[3:]}], process_group=comm)
        with pytest.raises(TypeError):
            ShardedAdamW(good[0], process_group=comm)
        with pytest.raises(ValueError, match="empty parameter list"):
            ShardedAdamW([], process_group=comm)
        assert [p.data_ptr() for p in good] == pointers
        assert all(not p._post_accumulate_grad_hooks for p in good)
        ShardedAdamW(good, process_group=comm).step()  # nothing is left behind that would be in the way

    body(None)
    run_local(2, body)


@pytest.mark.parametrize("world", [None, 2])
def test_a_step_that_fails_counts_no_step(world: int | None) -> None:
    def body(comm: Communicator | None) -> None:
        params = make_params()
        opt = ShardedAdamW(params, process_group=comm)
        loss_of(params, dyadic(params, 0)).backward()
        rate, opt.param_groups[0]["lr"] = opt.param_groups[0]["lr"], None
        with pytest.raises(TypeError):
            opt.step()
        assert int(opt.state[params[0]]["step"]) == 0
        opt.param_groups[0]["lr"] = rate
        opt.step()
        assert int(opt.state[params[0]]["step"]) == 1
        opt.close()

    run_local(world, body) if world else body(None)


def test_a_rate_that_was_loaded_is_not_the_dicts() -> None:
    params = make_params()
    opt = ShardedAdamW(params, lr=torch.tensor(0.5))
    saved = opt.state_dict()
    other = ShardedAdamW(make_params(), lr=torch.tensor(0.25))
    other.load_state_dict(saved)
    other.param_groups[0]["lr"].fill_(0.125)
    assert float(saved["param_groups"][0]["lr"]) == 0.5


def test_a_constructor_that_failed_keeps_nothing() -> None:
    def body(comm: Communicator) -> None:
        params = make_params()
        try:
            ShardedAdamW(params[: 3 + comm.rank], process_group=comm)
        except RuntimeError:  # whose traceback keeps what was made alive
            ShardedAdamW(params, process_group=comm).close()

    run_local(2, body)


def test_sparse_gradients_are_refused_by_the_step() -> None:
    embedding = torch.nn.Embedding(5, 3, sparse=True)
    opt = ShardedAdamW(embedding.parameters())
    embedding(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(RuntimeError, match="sparse"):
        opt.step()


def test_sparse_gradients_are_refused_by_the_hook() -> None:
    def body(comm: Communicator) -> None:
        embedding = torch.nn.Embedding(5, 3, sparse=True)
        opt = ShardedAdamW([("table", embedding.weight)], process_group=comm)
        with pytest.raises(RuntimeError, match="sparse gradients are not supported.*'table'"):
            embedding(torch.tensor([1, 2])).sum().backward()
        embedding.weight.grad = None
        opt.step()

    run_local(2, body)


DIFFERENT: dict[str, dict[str, Any]] = {
    "lr": {"lr": 0.1},
    "bucket": {"bucket_cap_mb": 1.0},
    "maximize": {"maximize": True},
    "master_weights": {"master_weights": "none"},
    "state_dtype": {"state_dtype": torch.bfloat16},
    "amsgrad": {"amsgrad": True},
    "decoupled_weight_decay": {"decoupled_weight_decay": False},
}


def differing(rank: int, what: str) -> tuple[list[Any], dict[str, Any]]:
    """What rank 1 does differently."""
    params = named([Parameter(torch.zeros(shape)) for shape in [(4, 3), (7,), (2, 5)]])
    options: dict[str, Any] = {}
    if rank == 1:
        if what == "shape":
            params[1] = ("layer.1", Parameter(torch.zeros(8)))
        elif what == "order":
            params[1], params[2] = params[2], params[1]
        elif what == "dtype":
            params[2] = ("layer.2", Parameter(torch.zeros(2, 5, dtype=torch.bfloat16)))
        elif what == "strides":
            params[0] = ("layer.0", Parameter(torch.zeros(3, 4).t()))
        elif what == "frozen":
            params[2][1].requires_grad_(False)
        elif what == "groups":
            return [{"params": params[:1]}, {"params": params[1:]}], options
        elif what == "granularity":
            return [{"params": params, "granularity": 2}], options
        else:
            options = DIFFERENT[what]
    return params, options


@pytest.mark.parametrize(
    "what, match",
    [
        ("shape", r"parameter 1: 'layer.1' \((7|8),\)"),
        ("order", r"parameter 1: 'layer.[12]'"),
        ("dtype", r"parameter 2: 'layer.2'.*torch.(float32|bfloat16)"),
        ("strides", r"parameter 0: 'layer.0'.*strides"),
        ("frozen", r"numbers .*\(1, 3\), \(1, 2\)"),
        ("groups", r"numbers .*\(1, 3\), \(2, 3\)"),
        ("granularity", r"parameter 0.*granularity"),
        ("lr", r"parameter group 0: lr 0\.(001|1)"),
        ("bucket", r"options.*bucket_cap_bytes"),
        ("maximize", r"parameter group 0.*maximize (True|False)"),
        *((name, name) for name in ("master_weights", "state_dtype", "amsgrad", "decoupled_weight_decay")),
    ],
)
@pytest.mark.parametrize("world", [2, 3])
def test_ranks_that_disagree_raise_naming_the_first_difference(world: int, what: str, match: str) -> None:
    """S15 of the optimizer's test rows."""

    def body(comm: Communicator) -> None:
        params, options = differing(comm.rank, what)
        with pytest.raises(RuntimeError, match=f"ranks disagree on .*{match}"):
            ShardedAdamW(params, process_group=comm, **options)
        ShardedAdamW(make_params(), process_group=comm).step()  # the communicator is as good as before

    run_local(world, body)


def test_a_communicator_and_a_parameter_serve_one_optimizer() -> None:
    """S14 of the optimizer's test rows."""

    others = [LocalWorld(2) for _ in range(2)]

    def body(comm: Communicator) -> None:
        params = make_params()
        first = ShardedAdamW(params, process_group=comm)
        with pytest.raises(ValueError, match="communicator .* belongs to another optimizer"):
            ShardedAdamW([Parameter(torch.zeros(3))], process_group=comm)
        with Communicator(others[0].rank(comm.rank), timeout_s=20) as other:
            with pytest.raises(ValueError, match="parameter .*0'? belongs to another"):
                ShardedAdamW(params, process_group=other)
            first.close()
            second = ShardedAdamW(params, process_group=other)
            third = ShardedAdamW([Parameter(torch.zeros(3))], process_group=comm)
            second.step()
            third.step()

    run_local(2, body)


# --- schedulers: more of them in the suite


STEPS = 4
RESUMED: dict[str, Callable[..., Any]] = {
    "LambdaLR": lambda opt, last: lr_scheduler.LambdaLR(
        opt, [lambda step: 1 / (1 + step), lambda step: 0.5**step], last_epoch=last
    ),
    "CosineAnnealingLR": lambda opt, last: lr_scheduler.CosineAnnealingLR(opt, T_max=4, last_epoch=last),
    "OneCycleLR": lambda opt, last: lr_scheduler.OneCycleLR(
        opt, max_lr=[0.1, 0.05], total_steps=STEPS + 2, last_epoch=last
    ),
    "CyclicLR": lambda opt, last: lr_scheduler.CyclicLR(
        opt, 0.01, 0.05, step_size_up=2, base_momentum=0.7, max_momentum=0.95, last_epoch=last
    ),
}


@pytest.mark.parametrize("by", ["state_dict", "initial_lr"])
@pytest.mark.parametrize("name", ["LambdaLR", "CosineAnnealingLR", "OneCycleLR", "CyclicLR"])
@pytest.mark.parametrize("world", [None, 2])
def test_s9_training_with_a_scheduler_is_resumed(world: int | None, name: str, by: str) -> None:
    """The scheduler by its own state, or made with ``last_epoch``, for which groups must have kept ``initial_lr``."""

    def body(comm: Communicator | None) -> None:
        rank, size = (comm.rank, comm.size) if comm else (0, 1)

        def go_on(params: list[Parameter], opt: ShardedAdamW, scheduler: Any, steps: range) -> list[Any]:
            seen = []
            for step in steps:
                loss_of(params, share(dyadic(params, step), rank, size)).backward()
                opt.step()
                opt.zero_grad()
                scheduler.step()
                seen += [(float(g["lr"]), *map(float, g["betas"]), g["weight_decay"]) for g in opt.param_groups]
            return seen

        def values(params: list[Parameter]) -> list[Tensor]:
            return [p.detach().clone() for p in params]

        params = make_params()
        opt = ShardedAdamW(two_rates(params), process_group=comm)
        scheduler = SCHEDULERS[name](opt)
        go_on(params, opt, scheduler, range(STEPS // 2))
        saved = copy.deepcopy((opt.state_dict(), scheduler.state_dict()))
        middle = values(params)
        expected = go_on(params, opt, scheduler, range(STEPS // 2, STEPS)), values(params)
        opt.close()

        again = [Parameter(p) for p in middle]
        other = ShardedAdamW(two_rates(again), lr=1.0, process_group=comm)
        if by == "state_dict":
            scheduler = SCHEDULERS[name](other)
            scheduler.load_state_dict(saved[1])
            other.load_state_dict(saved[0])
        else:
            other.load_state_dict(saved[0])
            assert [group["initial_lr"] for group in other.param_groups] == [
                group["initial_lr"] for group in saved[0]["param_groups"]
            ]
            before = [float(group["lr"]) for group in other.param_groups]
            scheduler = RESUMED[name](other, STEPS // 2 - 1)  # steps once, to where it was
            assert [float(g["lr"]) for g in other.param_groups] == pytest.approx(before, rel=1e-12)
            for group, kept in zip(other.param_groups, saved[0]["param_groups"], strict=True):
                group["lr"] = kept["lr"]
        seen = go_on(again, other, scheduler, range(STEPS // 2, STEPS))
        if by == "state_dict":
            assert seen == expected[0]
            assert_bitwise_equal(values(again), expected[1])
        else:  # torch computes the rates another way, and rounds them otherwise
            for mine, theirs in zip(seen, expected[0], strict=True):
                assert mine == pytest.approx(theirs, rel=1e-9)
            torch.testing.assert_close(values(again), expected[1], rtol=1e-6, atol=1e-7)

    on_ranks(world, body)


@pytest.mark.parametrize("is_debugging", [False, True])
def test_learning_rates_of_ranks_are_compared_to_debug(monkeypatch: pytest.MonkeyPatch, is_debugging: bool) -> None:
    monkeypatch.setenv("BW_DEBUG", str(int(is_debugging)))

    def body(comm: Communicator) -> None:
        params = make_params()
        opt = ShardedAdamW(params, 0.1, process_group=comm)
        loss_of(params, dyadic(params, 1)).backward()
        before = [p.detach().clone() for p in params]
        if comm.rank == 1:
            opt.param_groups[0]["lr"] = 0.2
        if is_debugging:
            with pytest.raises(RuntimeError, match=r"ranks disagree on parameter group 0: lr 0\.[12]"):
                opt.step()
            assert_bitwise_equal([p.detach() for p in params], before)
            opt.param_groups[0]["lr"] = 0.1 if comm.rank == 0 else None
            with pytest.raises(RuntimeError, match="refused" if comm.rank == 1 else "^rank 1: .*refused"):
                opt.step()
            opt.param_groups[0]["lr"] = 0.1
        opt.step()
        farthest = max(float((p.detach() - b).abs().max()) for p, b in zip(params, before, strict=True) if p.numel())
        assert (farthest > 0.15) != is_debugging, "0.1 a step, and 0.2 where rank 1 has taken its own"
        opt.close()

    run_local(2, body)
