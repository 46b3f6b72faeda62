"""Scripts: what is updated, and by how much. Hyperparameters, groups, schedulers, norms and clipping, gradient scalers."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import lr_scheduler, swa_utils

from tests.conformance.optimizer.scripts import DISTRIBUTIONS, ON_CPU, PRECISIONS, SHARDED, WIDE, script
from tests.support.optim_twins import Run, make_params

ANY = tuple(DISTRIBUTIONS)
EXACT = ("fp32", "fp32, bf16 states", "fp64")
NOT_DOUBLE = tuple(name for name in PRECISIONS if name != "fp64")  # torch computes in float32 with a rate in float32
SINGLE = EXACT[:2]  # in float64 the last bit shows in which order factors were multiplied

# ---- hyperparameters and groups


def plain_steps(run: Run) -> None:
    for step in range(4):
        run.backward(step)
        run.step()


def smaller_and_smaller(run: Run) -> None:
    """Gradients that get smaller, for amsgrad."""
    for step in range(8):
        run.backward(step if step < 5 else step - 5)
        if step > 5:
            torch._foreach_mul_([p.grad for p in run.params], 0.25)
        run.step()


def own_options(params: list[Parameter]) -> list[dict[str, Any]]:
    return [
        {"params": params[:3], "lr": 0.03, "weight_decay": 0.0},
        {"params": []},
        {"params": params[3:5], "betas": (0.5, 0.8), "eps": 1e-3},
        {"params": params[5:], "weight_decay": 0.3},
    ]


def named(params: list[Parameter]) -> list[tuple[str, Parameter]]:
    return [(f"layer.{i}", p) for i, p in enumerate(params)]


def variant(name: str, of: Callable[[Run], None], **where: Any) -> None:
    """The same script with other options or parameters, by a name of its own."""

    def play(run: Run) -> None:
        of(run)

    play.__name__ = name
    script(**where)(play)


variant("defaults", plain_steps, options={}, distributions=ANY)
variant("named_parameters", plain_steps, make=named, options={"lr": 0.1})
variant("groups_of_their_own", plain_steps, make=own_options, options={"lr": 0.01, "betas": (0.8, 0.95)})
variant(
    "a_rate_that_is_a_tensor",
    plain_steps,
    options={"lr": torch.tensor(0.02), "foreach": False},
    backends=ON_CPU,
    precisions=NOT_DOUBLE,
)
variant("rate_0", plain_steps, options={"lr": 0.0, "weight_decay": 0.5})
variant("betas_0", plain_steps, options={"lr": 0.01, "betas": (0.0, 0.0), "eps": 1e-2, "weight_decay": 0.0})
variant("eps_0", plain_steps, options={"lr": 0.01, "eps": 0.0}, precisions=("fp32", "bf16", "fp64"))
variant("adam", plain_steps, options={"lr": 0.01, "decoupled_weight_decay": False, "weight_decay": 0.1})
variant("amsgrad", smaller_and_smaller, options={"lr": 0.01, "amsgrad": True}, precisions=WIDE)
variant("maximize", plain_steps, make=own_options, options={"lr": 0.01, "maximize": True})
variant(
    "all_options_at_once",
    smaller_and_smaller,
    options={"lr": 0.01, "amsgrad": True, "decoupled_weight_decay": False, "maximize": True, "weight_decay": 0.3},
    precisions=WIDE,
)


def summed(run: Run) -> None:
    for step in range(3):
        (run.loss(step) / run.world).backward()
        run.step()


variant("summed_gradients", summed, options={"gradient_average": False}, worlds=(2, 4), torch=False)


def of(*shapes: tuple[int, ...]) -> Callable[[torch.dtype], list[Parameter]]:
    def make(dtype: torch.dtype) -> list[Parameter]:
        generator = torch.Generator().manual_seed(11)
        return [Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes]

    return make


def group_for_each(params: list[Parameter]) -> list[dict[str, Any]]:
    return [{"params": [p], "lr": 0.01 * (i + 1), "weight_decay": 0.1 * i} for i, p in enumerate(params)]


def dense_in_any_order(dtype: torch.dtype) -> list[Parameter]:
    """Every order of dimensions; some share no memory with anything although they are views."""
    generator = torch.Generator().manual_seed(3)
    made = [
        torch.randn((4, 3, 5, 2), generator=generator).to(memory_format=torch.channels_last),
        torch.randn((2, 3, 2, 5, 2), generator=generator).to(memory_format=torch.channels_last_3d),
        torch.randn((3, 4, 5), generator=generator).permute(1, 2, 0),
        torch.randn((4, 1, 6), generator=generator).transpose(0, 2),
        torch.randn(40, generator=generator)[8:32].view(4, 6),  # a part of something else
        torch.randn((6, 5), generator=generator).as_strided((1, 30), (77, 1)),  # any stride, of a dimension of one
    ]
    return [Parameter(t.to(dtype)) for t in made]


def misaligned(dtype: torch.dtype) -> list[Parameter]:
    """Sizes around vectors and shards, one element off."""
    sizes = [0, 1, 3, 31, 32, 33, 127, 128, 129, 4097]
    flat = torch.randn(sum(sizes) + 2, generator=torch.Generator().manual_seed(5)).to(dtype)
    begins = [1 + sum(sizes[:i]) for i in range(len(sizes))]
    return [Parameter(flat[at : at + numel]) for at, numel in zip(begins, sizes, strict=True)]


def steps_and_a_reload(run: Run) -> None:
    strides = [p.stride() for p in run.params]
    for step in range(3):
        run.backward(step)
        run.step()
    saved = run.opt.state_dict()
    if run.opt.param_groups[0].get("granularity") == "row":
        for p, state in zip(run.params, saved["state"].values(), strict=True):
            ranges = getattr(state["exp_avg"], "ranges", ())
            assert all(end % p.stride(0) == 0 for ends in ranges for end in ends), "a row is cut"
    run.opt.load_state_dict(saved)
    run.backward(3)
    run.clip(1e9)
    run.opt.step()
    assert [p.stride() for p in run.params] == strides


ODD: dict[str, tuple[Callable[[torch.dtype], list[Parameter]], Callable[[list[Parameter]], Any]]] = {
    "one_element": (of((1,)), list),
    "fewer_elements_than_ranks": (of((1,), (2,), (3,), ()), list),
    "a_group_on_one_rank_alone": (of((1,), (40,), (2,)), group_for_each),
    "a_group_for_each": (of((5,), (3, 3), (), (129,), (1, 1)), group_for_each),
    "no_elements": (of((0,), (4,), (3, 0), (0, 5)), group_for_each),
    "dense_parameters_in_any_order": (dense_in_any_order, list),
    "misaligned_parameters": (misaligned, list),
    "matrices_cut_by_rows": (of((48, 64), (64,), (96, 64), (200,)), list),
    "matrices_cut_anywhere": (
        of((48, 64), (64,), (96, 64), (200,)),
        lambda p: [{"params": p, "granularity": "element"}],
    ),
    "shards_of_whole_rows": (of((7, 24), (33, 40), (5, 3, 8)), lambda p: [{"params": p, "granularity": "row"}]),
}
for odd_name, (odd_params, odd_groups) in ODD.items():
    variant(odd_name, steps_and_a_reload, params=odd_params, make=odd_groups, clips=True)


def all_dtypes(_: torch.dtype) -> list[Parameter]:
    """Interleaved. float64 parameters stay float64 throughout, whatever the options say of the others."""
    dtypes = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
    return [p for i, dtype in enumerate(dtypes) for p in make_params(dtype, seed=i)][::-2]


variant("all_dtypes", plain_steps, params=all_dtypes, torch=False, precisions=("fp32, bf16 states", "bf16, no master"))


# ---- schedulers

SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "LambdaLR": lambda opt: lr_scheduler.LambdaLR(opt, [lambda step: 1 / (1 + step), lambda step: 0.5**step]),
    "MultiplicativeLR": lambda opt: lr_scheduler.MultiplicativeLR(opt, lambda step: 0.75),
    "StepLR": lambda opt: lr_scheduler.StepLR(opt, 2, gamma=0.5),
    "MultiStepLR": lambda opt: lr_scheduler.MultiStepLR(opt, [1, 3], gamma=0.5),
    "ConstantLR": lambda opt: lr_scheduler.ConstantLR(opt, 0.25, total_iters=2),
    "LinearLR": lambda opt: lr_scheduler.LinearLR(opt, 0.25, total_iters=3),
    "ExponentialLR": lambda opt: lr_scheduler.ExponentialLR(opt, 0.5),
    "PolynomialLR": lambda opt: lr_scheduler.PolynomialLR(opt, total_iters=4, power=2.0),
    "CosineAnnealingLR": lambda opt: lr_scheduler.CosineAnnealingLR(opt, T_max=4),
    "CosineAnnealingWarmRestarts": lambda opt: lr_scheduler.CosineAnnealingWarmRestarts(opt, T_0=2),
    "OneCycleLR": lambda opt: lr_scheduler.OneCycleLR(opt, max_lr=[0.1, 0.05], total_steps=6),  # betas too
    "CyclicLR": lambda opt: lr_scheduler.CyclicLR(
        opt, 0.01, 0.05, step_size_up=2, cycle_momentum=True, base_momentum=0.7, max_momentum=0.95
    ),
    "ReduceLROnPlateau": lambda opt: lr_scheduler.ReduceLROnPlateau(opt, factor=0.5, patience=0, threshold=0.0),
    "SequentialLR": lambda opt: lr_scheduler.SequentialLR(
        opt, [lr_scheduler.LinearLR(opt, 0.1, total_iters=2), lr_scheduler.ExponentialLR(opt, 0.9)], [2]
    ),
    "ChainedScheduler": lambda opt: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(opt, 0.5, total_iters=2), lr_scheduler.ExponentialLR(opt, 0.75)], optimizer=opt
    ),
    "SWALR": lambda opt: swa_utils.SWALR(opt, swa_lr=[0.001, 0.002], anneal_epochs=3),
}


def two_rates(params: list[Parameter]) -> list[dict[str, Any]]:
    return [
        {"params": params[:4], "lr": 0.02, "weight_decay": 0.0},
        {"params": params[4:], "lr": 0.05, "weight_decay": 0.3},
    ]


def two_tensor_rates(params: list[Parameter]) -> list[dict[str, Any]]:
    return [{**group, "lr": torch.tensor(group["lr"])} for group in two_rates(params)]


def every_scheduler(run: Run) -> None:
    for name, make in SCHEDULERS.items():
        for group, rate in zip(run.opt.param_groups, (0.02, 0.05), strict=True):
            group.pop("initial_lr", None)
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate
            group["betas"] = (0.9, 0.999)
        scheduler = make(run.opt)
        before = str(run.opt.param_groups[0]["lr"])
        rates = set()
        for step in range(4):
            run.backward(step, used=[1, 2, 5, 6])
            run.step()
            scheduler.step(*([4.0 + step] if name == "ReduceLROnPlateau" else []))
            run.see([(float(g["lr"]), *map(float, g["betas"]), g["weight_decay"]) for g in run.opt.param_groups])
            rates.add(str(run.opt.param_groups[0]["lr"]))
        assert len(rates | {before}) > 1, f"{name} has changed nothing"


variant("every_scheduler_of_numbers", every_scheduler, make=two_rates)
variant("every_scheduler_of_tensors", every_scheduler, make=two_tensor_rates, backends=ON_CPU, precisions=NOT_DOUBLE)

# ---- norms and clipping


@script(clips=True, backends=ON_CPU, precisions=EXACT)  # CUDA adds the powers of a norm of order 1 in another order
def norms_of_every_order(run: Run) -> None:
    for step, order in enumerate([2.0, math.inf, 1.0, 0.0, -math.inf]):
        run.backward(step, used=[0, 2, 3, 6, 7, 8])
        run.clip(0.5, order)
        run.see_grads()
        run.step()


@script(clips=True, precisions=SINGLE)
def clip_twice(run: Run) -> None:
    for step in range(3):
        run.backward(step)
        run.clip(1.0)
        run.clip(0.5, math.inf)
        run.clip(1e6)
        run.see_grads()
        run.step()


@script(clips=True, precisions=SINGLE)
def clip_some(run: Run) -> None:
    for step in range(3):
        run.backward(step, used=[i for i in range(9) if i != 6])
        run.clip(0.5, parameters=[run.params[i] for i in (3, 8, 6)])
        run.clip(0.125, math.inf, parameters=[run.params[0]])
        run.step()


@script(clips=True, alone=False)
def clip_between_backwards(run: Run) -> None:
    """The local optimizer clips last, and says so."""
    for step in range(3):
        run.backward(step)
        run.clip(0.5)
        run.backward(step + 10, used=[0, 3, 8])
        run.clip(0.5)
        run.see_grads()
        run.step()


@script(clips=True, alone=False)
def clip_to_nothing(run: Run) -> None:
    run.backward(0)
    run.clip(0.0)
    run.see_grads()
    run.step()
    run.backward(1)
    run.clip(0.0, parameters=[run.params[3]])
    run.backward(2, used=[3, 6])
    run.see_grads()
    run.step()


@script(clips=True)
def clip_zeros_and_nothing(run: Run) -> None:
    run.clip(0.5)
    for p in run.params:
        p.grad = torch.zeros_like(p)
    run.clip(0.5)
    run.see_grads()
    run.step()
    run.clip(0.5)
    run.step()


@script(clips=True, alone=False, backends=SHARDED)
def clip_by_torch(run: Run) -> None:
    """torch's function on placeholders, of all and of some, once and again."""
    run.clips_by_torch = True
    for step in range(3):
        run.backward(step, used=[0, 2, 3, 6, 7, 8])
        run.clip(1.0)
        run.clip(0.5, math.inf, parameters=[run.params[i] for i in (0, 3, 8)])
        run.see_grads()
        run.backward(step + 10, used=[0, 3, 8])
        run.clip(0.25, 1.0)
        run.step()


def poison(run: Run, bad: float, column: int) -> None:
    if run.rank == run.world - 1:
        poisoned = torch.zeros_like(run.params[3])
        poisoned[5, column] = bad
        (run.params[3] * poisoned).sum().backward()


@script(clips=True, alone=False)
def inf_and_nan_in_one_element(run: Run) -> None:
    for step, bad in enumerate([math.inf, math.nan, -math.inf]):
        run.backward(step)
        poison(run, bad, step)
        run.clip(0.5, 2.0 if step != 2 else math.inf)
        run.see_grads()
        run.opt.zero_grad(set_to_none=step != 1)  # NaN factors must not stay behind
    run.backward(9, used=[0, 3])
    run.step()


@script(worlds=(1, 2, 4), precisions=(*EXACT, "bf16"))
def what_is_not_finite_stays_in_its_element(run: Run) -> None:
    """1e30 overflows the second moment, so nothing is added to the weight."""
    special = torch.tensor([0.0, -0.0, 1e-40, -1e-45, 1e30, -1e30, math.inf, -math.inf, math.nan])
    for step in range(3):
        run.backward(step)
        if run.rank == run.world - 1:
            factors = torch.zeros(257)
            factors[7 : 7 + 20 * len(special) : 20] = special * run.world
            (run.params[6] * factors.to(run.params[6].dtype)).sum().backward()
        run.see_grads()
        run.step()


@script(clips=True, worlds=(1, 2, 4), precisions=("fp32", "bf16"))
def a_norm_of_nan_spoils_what_it_clips(run: Run) -> None:
    run.backward(0)
    poison(run, math.nan, 3)
    run.see(run.opt.clip_grad_norm_(1e6, parameters=[run.params[0]]))
    run.step()
    run.backward(1)
    poison(run, math.nan, 3)
    run.see(run.opt.clip_grad_norm_(0.5, parameters=run.params[2:5]))
    run.step()


@script(clips=True)
def a_norm_that_is_not_finite_may_be_an_error(run: Run) -> None:
    """On every rank; and nothing is clipped. By the method, and by torch's function."""
    for step, bad in enumerate([math.inf, math.nan]):
        run.clips_by_torch = step == 1
        run.backward(step)
        poison(run, bad, 1)
        for order in (2.0, math.inf):
            with pytest.raises(RuntimeError, match="non-finite"):
                run.clip(0.5, order, error_if_nonfinite=True)
        run.see(run.opt.full_grad(run.params[0]))
        run.opt.zero_grad()
    run.clips_by_torch = False
    run.backward(9)
    run.clip(1e6, error_if_nonfinite=True)
    run.step()


@script(clips=True, precisions=SINGLE)
def clip_with_given_norms(run: Run) -> None:
    """Numbers and tensors, below and above the limit, of all and of some, on top of each other; and what is no norm."""
    run.clips = True
    for step, norm in enumerate([4.0, 0.125, torch.tensor(2.0), torch.tensor([8.0]), torch.tensor(3.0).double()]):
        run.backward(step, used=[i for i in range(9) if i != 6])
        run.opt.clip_grads_with_norm_(1.0, norm)
        run.opt.clip_grads_with_norm_(0.5, norm, parameters=[run.params[i] for i in (3, 6, 8)])
        run.see_grads()
        run.clip(0.25)
        run.step()
    for step, (max_norm, norm) in enumerate([(0.0, 2.0), (1.0, math.inf), (1.0, 0.0), (1.0, math.nan)]):
        run.backward(step)
        run.opt.clip_grads_with_norm_(max_norm, norm)
        run.step()


@script(backends=SHARDED, precisions=EXACT)
def scaled_losses(run: Run) -> None:
    """By a GradScaler: a step that overflows on one rank is skipped on all, and the scale falls."""
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
    for step in range(6):
        scaler.scale(run.loss(step)).backward()
        if step == 2:
            poison(run, math.inf, 0)
        if step % 2:
            scaler.unscale_(run.opt)
        scaler.step(run.opt)
        scaler.update()
        run.see(scaler.get_scale())
        run.opt.zero_grad()


# ---- static graphs


@script(clips=True, distributions=("static graph",))
def ranks_that_use_other_parameters_every_step_alike(run: Run) -> None:
    """Accumulation, clipping, and a second step."""
    for step in range(4):
        with run.opt.no_sync():
            run.backward(10 * step, used={0, 3}, on=[0, 2])
        run.backward(10 * step + 1, used={0, 3}, on=[0, 2])
        run.backward(10 * step + 2, used={3, 6, 7}, on=[1, 3])
        if step % 2:
            run.clip(0.5)
        run.see_grads()
        run.opt.step()
        run.step()
