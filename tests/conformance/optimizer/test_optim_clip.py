"""clip_grad_norm_ on shards against `torch.nn.utils.clip_grad_norm_` on the whole gradients, in float64: rows A1 to A5
of the semantics, for the optimizer's method and for torch's function on placeholders.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_, get_total_norm

from bucketwheel.comm.communicator import Communicator
from bucketwheel.optim.sharded_adamw import ShardedAdamW
from bucketwheel.testing import assert_bitwise_equal
from tests.support.optim_twins import (
    OPTIONS,
    TINY,
    WORLDS,
    Run,
    Script,
    assert_as_torch,
    dyadic,
    loss_of,
    make_params,
    outcome_of_local,
    outcome_of_torch,
    outcomes_of_ranks,
    over_worlds,
    run_local,
    share,
)

ORDERS = [2.0, math.inf, 1.0, 3.0, 0.0]


def norms_of_every_order(run: Run) -> None:
    for step, order in enumerate(ORDERS):
        run.backward(step, used=[0, 2, 3, 6, 7, 8])
        run.clip(0.5, order)
        run.see_grads()
        run.step()


def clip_twice(run: Run) -> None:
    for step in range(3):
        run.backward(step)
        run.clip(1.0)
        run.clip(0.5, math.inf)
        run.clip(1e6)
        run.clip(0.25, 1.0)
        run.see_grads()
        run.step()


def clip_some(run: Run) -> None:
    for step in range(3):
        run.backward(step, used=[i for i in range(9) if i != 6])
        run.clip(0.5, parameters=[run.params[i] for i in (3, 8, 6)])
        run.clip(0.125, 1.0, parameters=[run.params[0]])
        run.see_grads()
        run.step()


def clip_between_backwards(run: Run) -> None:
    for step in range(3):
        run.backward(step)
        run.clip(0.5)
        run.backward(step + 10, used=[0, 3, 8])
        run.clip(0.5)
        run.see_grads()
        run.step()


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


def clip_zeros_and_nothing(run: Run) -> None:
    run.clip(0.5)
    for p in run.params:
        p.grad = torch.zeros_like(p)
    run.clip(0.5)
    run.see_grads()
    run.step()
    run.clip(0.5)
    run.step()


def inf_and_nan_in_one_element(run: Run) -> None:
    for step, bad in enumerate([math.inf, math.nan, -math.inf]):
        run.backward(step)
        if run.rank == run.world - 1:
            poison = torch.zeros_like(run.params[3])
            poison[5, step] = bad
            (run.params[3] * poison).sum().backward()
        run.clip(0.5, 2.0 if step != 2 else math.inf)
        run.see_grads()
        run.opt.zero_grad(set_to_none=step != 1)  # NaN factors must not stay behind
    run.backward(9, used=[0, 3])
    run.step()


def by_torch(script: Script) -> Script:
    def stock(run: Run) -> None:
        run.clips_by_torch = True
        script(run)

    return stock


@pytest.mark.parametrize("clips", ["by method", "by torch"])
@pytest.mark.parametrize(
    "script",
    [
        norms_of_every_order,  # A1, A5: some are not used
        clip_twice,  # A3
        clip_some,  # A3
        clip_between_backwards,
        clip_to_nothing,  # A2
        clip_zeros_and_nothing,  # A2
        inf_and_nan_in_one_element,  # A2
    ],
    ids=lambda script: script.__name__,
)
@over_worlds(2)
def test_clipping_does_what_torch_does(worlds: list[int], script: Script, clips: str) -> None:
    how = by_torch(script) if clips == "by torch" else script
    expected = outcome_of_torch(script, dtype=torch.float64, lr=0.01)  # torch loses digits of norms in fp32
    # The local optimizer clips last, and says so; its gradients are plain tensors, on which torch's function is torch's own.
    if clips == "by method" and script not in (clip_between_backwards, clip_to_nothing):
        assert_as_torch(outcome_of_local(how, lr=0.01), expected)
    for world in worlds:
        for options in OPTIONS if world == 2 else OPTIONS[:1]:
            ranks = outcomes_of_ranks(world, how, lr=0.01, **options)
            for outcome in ranks:
                assert_bitwise_equal(outcome.seen, ranks[0].seen)
                assert_as_torch(outcome, expected)


Clip = Callable[..., Tensor]
CLIPS: dict[str, Clip] = {
    "by method": lambda opt, params, *limit, **options: opt.clip_grad_norm_(*limit, parameters=params, **options),
    "by torch": lambda opt, params, *limit, **options: clip_grad_norm_(params, *limit, **options),
}


# A4
@pytest.mark.parametrize("world", [None, 1, 2, 3, 4])
@pytest.mark.parametrize("bad", [math.inf, math.nan])
@pytest.mark.parametrize("clip", CLIPS.values(), ids=CLIPS)
def test_a_nonfinite_norm_raises_on_every_rank_and_clips_nothing(world: int | None, bad: float, clip: Clip) -> None:
    def body(comm: Communicator | None) -> list[Tensor]:
        rank, size = (comm.rank, comm.size) if comm else (0, 1)
        params = make_params()
        opt = ShardedAdamW(params, lr=0.01, process_group=comm, **TINY)
        not_empty = [p for p in params if p.numel()]
        grads = dyadic(params, 0)
        if rank == size - 1:
            grads[6][200] = bad
        loss_of(params, grads).backward()
        for norm_type in (2.0, 1.0, math.inf, 3.0):
            with pytest.raises(RuntimeError, match="non-finite"):
                clip(opt, not_empty, 0.5, norm_type, error_if_nonfinite=True)
        assert not math.isfinite(opt.local_grad_norm())
        whole = opt.full_grad(params[0])
        assert_bitwise_equal(whole, dyadic(params, 0)[0])  # all ranks have the same
        opt.zero_grad()
        loss_of(params, share(dyadic(params, 1), rank, size)).backward()
        clip(opt, not_empty, 1e6, error_if_nonfinite=True)
        opt.step()
        return [p.detach().clone() for p in params]

    expected = body(None)
    for params in run_local(world, body) if world else []:
        if world == 3:
            torch.testing.assert_close(params, expected, rtol=1e-5, atol=1e-7)
        else:
            assert_bitwise_equal(params, expected)


# A1, A5
@pytest.mark.parametrize("norm_type", [2.0, 1.0, math.inf, 3.0])
@pytest.mark.parametrize("clip", CLIPS.values(), ids=CLIPS)
def test_the_norm_has_the_same_bits_on_all_ranks_of_all_worlds(norm_type: float, clip: Clip) -> None:
    """A parameter that is used in three places counts once, one that is not used does not count."""

    def body(comm: Communicator | None) -> Tensor:
        rank, size = (comm.rank, comm.size) if comm else (0, 1)
        params = [p for p in make_params() if p.numel()]
        opt = ShardedAdamW(params, process_group=comm, **TINY)
        grads = share(dyadic(params, 0), rank, size)
        tied = sum((params[3] * g).sum() for g in share(dyadic([params[3]] * 2, 1), rank, size))
        (loss_of(params, grads, lambda i: i != 5) + tied).backward()
        norm = clip(opt, params, 1e6, norm_type)
        assert opt.full_grad(params[5]) is None
        return norm.clone()

    params = [p for p in make_params() if p.numel()]
    whole = [g.double() for i, g in enumerate(dyadic(params, 0)) if i != 5]
    whole[3] += sum(g.double() for g in dyadic([params[3]] * 2, 1))
    exact = get_total_norm(whole, norm_type)
    first = run_local(1, body)[0]
    torch.testing.assert_close(first.double(), exact, rtol=1e-6, atol=0)
    torch.testing.assert_close(body(None), first, rtol=1e-6, atol=0)
    for world in (2, 3, 4):
        norms = run_local(world, body)
        assert_bitwise_equal(norms, [norms[0]] * world)
        if norm_type == 3.0 or world == 3:  # neither cubes of sums nor thirds are exact
            torch.testing.assert_close(norms[0], first, rtol=3e-7, atol=0)
        else:
            assert_bitwise_equal(norms[0], first)


# A3
@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("clip", CLIPS.values(), ids=CLIPS)
def test_parameters_that_are_not_clipped_keep_their_bits(world: int, clip: Clip) -> None:
    def body(comm: Communicator) -> None:
        params = make_params()
        opt = ShardedAdamW(params, process_group=comm, **TINY)
        loss_of(params, share(dyadic(params, 0), comm.rank, comm.size)).backward()
        before = [opt.full_grad(p).clone() for p in params]
        norm = clip(opt, [params[3], params[8]], 1e-3)
        chosen = torch.cat([before[i].flatten() for i in (3, 8)])
        torch.testing.assert_close(norm, torch.linalg.vector_norm(chosen), rtol=1e-6, atol=0)
        assert norm.dtype == torch.float32 and norm.shape == ()
        for i, p in enumerate(params):
            if i in (3, 8):
                torch.testing.assert_close(opt.full_grad(p), before[i] * (1e-3 / (norm + 1e-6)), rtol=1e-6, atol=0)
            else:
                assert_bitwise_equal(opt.full_grad(p), before[i])
        with pytest.raises(ValueError, match=r"shape \(2,\)"):
            opt.clip_grad_norm_(1.0, parameters=[torch.nn.Parameter(torch.zeros(2))])
        assert opt.clip_grad_norm_(1.0, parameters=[]) == 0.0

    run_local(world, body)


def test_the_local_optimizer_refuses_gradients_that_change_after_clipping() -> None:
    params = make_params()
    opt = ShardedAdamW(params)
    loss_of(params, dyadic(params, 0)).backward()
    opt.clip_grad_norm_(0.5)
    loss_of(params, dyadic(params, 1)).backward()
    with pytest.raises(RuntimeError, match="group 0 parameter 0.*changed after clip_grad_norm_"):
        opt.step()
    assert_bitwise_equal([p.detach() for p in params], [p.detach() for p in make_params()])
