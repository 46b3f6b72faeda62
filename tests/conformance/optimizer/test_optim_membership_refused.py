"""What cannot be taken in is refused, on all ranks where one has it, and leaves everything as it was."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import Parameter

from bucketwheel.comm.communicator import Communicator
from bucketwheel.optim.sharded_adamw import ShardedAdamW
from tests.support.optim_twins import TINY, Run, dyadic, make_params, run_local

pytestmark = pytest.mark.dist


BAD: list[tuple[Callable[[list[Parameter]], Any], type[Exception], str]] = [
    (lambda p: {"params": [Parameter(torch.zeros(3, dtype=torch.complex64))]}, ValueError, "complex64"),
    (lambda p: {"params": [p[0]]}, ValueError, "more than one parameter group"),
    (lambda p: {"params": [p[5]], "maximize": True}, ValueError, "maximize must be the same"),
    (lambda p: {"params": [Parameter(torch.zeros(3).expand(4, 3))]}, ValueError, "gaps or overlaps"),
]


@pytest.mark.parametrize(("group", "error", "match"), BAD)
@pytest.mark.parametrize("world", [None, 2])
def test_a_group_that_is_refused_leaves_everything_as_it_was(
    world: int | None, group: Callable[[list[Parameter]], Any], error: type[Exception], match: str
) -> None:
    def body(comm: Communicator | None) -> None:
        params = make_params()
        opt = ShardedAdamW(params[:4], process_group=comm, **(TINY if comm else {}))
        run = Run(opt, params, comm.rank if comm else 0, comm.size if comm else 1)
        run.backward(0, used={0, 1})
        with pytest.raises(error, match=match):
            opt.add_param_group(group(params))
        assert len(opt.param_groups) == 1
        run.step()
        assert [int(opt.state[p]["step"]) for p in params[:4]] == [1, 1, 0, 0]
        opt.close()

    run_local(world, body) if world else body(None)


def test_ranks_that_add_different_groups_raise_on_all() -> None:
    def body(comm: Communicator) -> None:
        params = make_params()
        opt = ShardedAdamW(params[:4], process_group=comm, **TINY)
        with pytest.raises(RuntimeError, match="ranks disagree on parameter 4"):
            opt.add_param_group({"params": params[4:6] if comm.rank else params[6:8]})
        with pytest.raises(RuntimeError, match="ranks did different things with their gradients: .*add_param_group"):
            opt.step() if comm.rank else opt.add_param_group({"params": params[4:]})
        assert len(opt.param_groups) == 1
        run = Run(opt, params, comm.rank, comm.size)
        run.backward(0, used={0, 1})
        run.step()
        opt.close()

    run_local(2, body)


def test_torch_clips_no_gradient_that_nobody_has_reduced() -> None:
    """The first gradient of a parameter that was frozen is this rank's own until a method of the optimizer takes it in."""

    def body(comm: Communicator) -> torch.Tensor:
        params = make_params()
        params[3].requires_grad_(False)
        opt = ShardedAdamW(params, process_group=comm, **TINY)
        run = Run(opt, params, comm.rank, comm.size)
        params[3].requires_grad_(True)
        run.backward(0)
        with pytest.raises(RuntimeError, match=r"shape \(64, 33\) was frozen .* call optimizer.grad_sync\(\)"):
            torch.nn.utils.clip_grad_norm_(params, 1.0)
        opt.grad_sync()
        norm = torch.nn.utils.clip_grad_norm_([p for p in params if p.numel()], 1.0)
        opt.step()
        opt.close()
        return norm

    want = torch.cat([g.flatten() for g in dyadic(make_params(), 0)]).norm()
    for norm in run_local(2, body):
        torch.testing.assert_close(norm, want)


@pytest.mark.parametrize("has_it", [(0, 1), (0,)])
@pytest.mark.parametrize("stock", ["clip", "unscale"])
def test_stock_code_on_new_gradients_alone_is_refused_on_all_ranks(stock: str, has_it: tuple[int, ...]) -> None:
    """Also where one rank has none of them, and goes on to step."""

    def body(comm: Communicator) -> None:
        params = make_params()
        head, others = params[3], [p for i, p in enumerate(params) if i != 3]
        head.requires_grad_(False)
        opt = ShardedAdamW(params, process_group=comm, **TINY)
        for p in others:
            p.requires_grad_(False)
        head.requires_grad_(True)
        if comm.rank in has_it:
            (head * 2.0).sum().backward()
            (head * 1.0).sum().backward()  # adds to it
            assert type(head.grad) is not torch.Tensor
            with pytest.raises(RuntimeError, match=r"shape \(64, 33\) was frozen .* call optimizer.grad_sync"):
                if stock == "clip":
                    torch.nn.utils.clip_grad_norm_(params, 1.0)
                else:
                    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
                    scaler.scale(torch.zeros(()))
                    scaler.unscale_(opt)
        else:
            with pytest.raises(RuntimeError, match=r"^rank \d: .* was frozen .*by rank: .*refused"):
                opt.grad_sync()
        opt.grad_sync()
        grad = opt.full_grad(head)
        assert grad is not None and bool((grad == 3.0 * len(has_it) / 2).all())
        opt.step()
        opt.close()

    run_local(2, body)


@pytest.mark.parametrize("how", ["add", "unfreeze"])
def test_nothing_is_taken_in_inside_no_sync(how: str) -> None:
    def body(comm: Communicator) -> None:
        params = make_params()
        params[3].requires_grad_(False)
        opt = ShardedAdamW(params[:6], process_group=comm, **TINY)
        run = Run(opt, params, comm.rank, comm.size)
        with opt.no_sync():
            run.backward(0, used={0, 1})
            params[3].requires_grad_(how == "unfreeze")
            with pytest.raises(RuntimeError, match=r"inside no_sync\(\)"):
                opt.add_param_group({"params": params[6:]}) if how == "add" else opt.grad_sync()
        assert len(opt.param_groups) == 1
        run.backward(1, used={0, 1})
        run.step()
        assert int(opt.state[params[0]]["step"]) == 1
        opt.close()

    run_local(2, body)
