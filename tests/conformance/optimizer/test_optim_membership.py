"""Groups that are added and parameters that are unfrozen, beside the suite's scripts: what is refused, and on all ranks."""

from __future__ import annotations

import pytest
import torch
from torch.nn import Parameter

from bucketwheel.checkpoint import TensorShard
from bucketwheel.comm.communicator import Communicator
from bucketwheel.optim.sharded_adamw import ShardedAdamW
from tests.support.bits import assert_bitwise_equal
from tests.support.optim_twins import TINY, Run, make_params, run_local

pytestmark = pytest.mark.dist


def test_ranks_that_add_different_groups_raise_on_all() -> None:
    def body(comm: Communicator) -> None:
        params = make_params()
        opt = ShardedAdamW(params[:4], process_group=comm, **TINY)
        with pytest.raises(RuntimeError, match="ranks disagree on .* has parameter 4"):
            opt.add_param_group({"params": params[4:6] if comm.rank else params[6:8]})
        late = Parameter(torch.full((5,), float(comm.rank)))
        opt.add_param_group({"params": [late]})
        assert not late.any(), "new parameters are those of rank 0"
        with pytest.raises(RuntimeError, match="ranks made different optimizer calls: .*add_param_group"):
            opt.step() if comm.rank else opt.add_param_group({"params": params[4:]})
        assert len(opt.param_groups) == 2
        run = Run(opt, params, comm.rank, comm.size)
        run.backward(0, used={0, 1})
        run.step()
        opt.close()

    run_local(2, body)


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
            with pytest.raises(
                RuntimeError, match=r"shape \(64, 33\) is new in param_groups or was frozen .* call optimizer.grad_sync"
            ):
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


def test_states_of_frozen_parameters_wait_for_them() -> None:
    def train(opt: ShardedAdamW, params: list[Parameter], seed: int) -> None:
        run = Run(opt, params)
        run.backward(seed)
        run.step()

    whole = make_params()
    opt = ShardedAdamW(whole)
    train(opt, whole, 0)
    saved, values = opt.state_dict(), [p.detach().clone() for p in whole]
    train(opt, whole, 1)

    def body(comm: Communicator | None) -> None:
        params = [Parameter(value.clone(), i != 3) for i, value in enumerate(values)]
        again = ShardedAdamW(params, process_group=comm)
        again.load_state_dict(saved)
        params[3].requires_grad_(True)
        train(again, params, 1)
        assert_bitwise_equal([p.detach() for p in params], [p.detach() for p in whole])
        assert int(again.state[params[3]]["step"]) == 2

    body(None)
    run_local(1, body)
    frozen = ShardedAdamW([Parameter(values[3].clone(), False), Parameter(torch.zeros(1))])
    for name, other, match in (
        (
            "exp_avg",
            TensorShard(torch.zeros(1), (64, 33), (33, 1), [(0, 1)], (0, 2)),
            r"a rank's part of a parameter of shape \(64, 33\) that is frozen now",
        ),
        ("step", None, r"shape \(64, 33\) that is frozen now has no 'step'"),
        ("exp_avg_sq", None, r"shape \(64, 33\) that is frozen now has no 'exp_avg_sq'"),
        ("exp_avg", torch.zeros(3), r"frozen now has shape \(3,\), the parameter \(64, 33\)"),
    ):
        bad = {
            "state": {0: {**saved["state"][3], name: other}},
            "param_groups": frozen.state_dict()["param_groups"],
        }
        with pytest.raises(ValueError, match=match):
            frozen.load_state_dict(bad)


def test_parameters_that_come_and_go_leave_nothing() -> None:
    """Their memory, hooks and buckets; another optimizer may have those that are gone."""

    def body(comm: Communicator) -> None:
        stays, first = Parameter(torch.zeros(5)), Parameter(torch.ones(300))
        opt = ShardedAdamW([stays, first], process_group=comm, **TINY)
        params = opt.param_groups[0]["params"]
        seen = []
        for step in range(6):
            sum(p.sum() for p in params).backward()
            opt.step()
            opt.zero_grad()
            seen.append(
                (comm.pool.stats().live_leases, comm.pool.stats().reserved_bytes, len(opt._engine._assembly.buckets))
            )
            gone, params[1] = params[1], Parameter(torch.full((300,), float(step)))
            opt.state.pop(gone)
        assert len(set(seen[1:])) == 1 and seen[1][2] == seen[0][2], seen
        assert seen[1][1] <= 2 * seen[0][1], "the first flat memory, of the one that stays, and that of the new one"
        opt.step()
        assert not first._post_accumulate_grad_hooks and len(opt.state) == 2
        assert first.data_ptr() != params[1].data_ptr() and float(first.detach().max()) < 1.0
        torch.optim.AdamW([first]).step()
        opt.close()

    run_local(2, body)
