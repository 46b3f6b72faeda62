"""Parameters whose gather runs: whatever reads one sees the values of the last step."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.nn.utils import parameters_to_vector
from torch.optim.swa_utils import AveragedModel

from bucketwheel.comm.communicator import Communicator
from bucketwheel.optim.sharded_adamw import ShardedAdamW
from bucketwheel.residency.absent_param import AbsentParam
from tests.support.bits import assert_bitwise_equal
from tests.support.late_gathers import delay_gathers, pending, start_at
from tests.support.optim_twins import dyadic, loss_of, run_local, share

LATE = {"bucket_cap_mb": 1e-4, "overlap_param_sync": True}


class Trained:
    """A model, and an optimizer whose gathers are late; `step` leaves every parameter pending."""

    def __init__(self, comm: Communicator, *, expects_pending: bool = True, **options: Any) -> None:
        self.model = nn.Sequential(nn.Linear(6, 7), nn.Linear(7, 5), nn.LayerNorm(5))
        self.params = list(self.model.parameters())
        start_at(self.params)
        self.opt = ShardedAdamW(self.params, lr=0.1, process_group=comm, **{**LATE, **options})
        self.late = delay_gathers(self.opt)
        self.comm = comm
        self.steps = 0
        self.pending_after_step = len(self.params) if expects_pending else 0

    def step(self) -> None:
        self.steps += 1
        grads = share(dyadic(self.params, self.steps), self.comm.rank, self.comm.size)
        loss_of(self.params, grads).backward()
        self.opt.step()
        assert len(pending(self.opt)) == self.pending_after_step
        self.opt.zero_grad()


def saved(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    return torch.load(io.BytesIO(file.getvalue()), weights_only=False)


def averaged(t: Trained) -> list[Tensor]:
    average = AveragedModel(t.model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5))
    average.update_parameters(t.model)
    return list(average.module.parameters())


def moved(params: list[Parameter]) -> list[Tensor]:
    average = [torch.zeros(p.shape) for p in params]
    torch._foreach_lerp_(average, params, 0.5)
    return average


READS: dict[str, Callable[[Trained], Any]] = {
    "detach": lambda t: [p.detach() + 0 for p in t.params],
    "data": lambda t: [p.data + 0 for p in t.params],
    "arithmetic": lambda t: [2 * p for p in t.params],
    "index": lambda t: [p[0] for p in t.params],
    "out=": lambda t: [torch.add(torch.zeros_like(p), p.detach(), out=torch.empty(p.shape)) for p in t.params],
    "numpy": lambda t: [torch.from_numpy(p.detach().numpy() + 0) for p in t.params],
    "tolist": lambda t: [torch.tensor(p.tolist()) for p in t.params],
    "format": lambda t: [f"{p.sum():.9f}" for p in t.params],
    "address": lambda t: [
        np.ctypeslib.as_array((np.ctypeslib.ctypes.c_float * p.numel()).from_address(p.data_ptr())).tolist()
        for p in t.params
    ],
    "dlpack": lambda t: [torch.from_dlpack(p.detach()) + 0 for p in t.params],
    "vector": lambda t: parameters_to_vector(t.params),
    "foreach": lambda t: moved(t.params),
    "moving average": averaged,
    "deepcopy": lambda t: [copy.deepcopy(p) for p in t.params],
    "deepcopy of the model": lambda t: list(copy.deepcopy(t.model).parameters()),
    "save the model": lambda t: list(saved(t.model).parameters()),
    "state_dict": lambda t: list(copy.deepcopy(t.model.state_dict()).values()),
    "evaluation": lambda t: t.model.eval()(torch.ones(2, 6)),
    "forward without hooks": lambda t: t.model.forward(torch.ones(2, 6)),
    "functional_call": lambda t: torch.func.functional_call(t.model, {"0.bias": torch.ones(7)}, (torch.ones(2, 6),)),
    "a custom function": lambda t: [Doubled.apply(p) for p in t.params],
    "a custom operator": lambda t: [twice(p) for p in t.params],
    "a tensor subclass": lambda t: [torch.add(torch.ones(p.shape).as_subclass(Labelled), p) for p in t.params],
    "a parametrization": lambda t: [
        torch.nn.utils.parametrizations.weight_norm(copy.deepcopy(t.model[0])).weight + 0,  # type: ignore[arg-type]
        t.params[2] + 0,
    ],
}


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad * 2


@torch.library.custom_op("bucketwheel_tests::twice", mutates_args=())
def twice(x: Tensor) -> Tensor:
    return x * 2


class Labelled(Tensor):
    pass


def tensors_in(value: Any) -> list[Any]:
    if isinstance(value, (list, tuple)):
        return [one for part in value for one in tensors_in(part)]
    return [value.detach().as_subclass(Tensor).clone() if isinstance(value, Tensor) else value]


def read_all(comm: Communicator) -> None:
    t = Trained(comm)
    for name, read in READS.items():
        t.step()
        early = tensors_in(read(t))
        t.opt.param_sync()
        assert not pending(t.opt)
        late = tensors_in(read(t))
        texts = [one for one in early if not isinstance(one, Tensor)]
        assert texts == [one for one in late if not isinstance(one, Tensor)], name
        kept = [[one for one in found if isinstance(one, Tensor)] for found in (early, late)]
        assert_bitwise_equal(*kept, f"{name} on rank {comm.rank} of {comm.size}")
    t.opt.close()


def test_whatever_reads_a_parameter_sees_the_last_step() -> None:
    """Evaluation, `state_dict`, moving averages, direct reads."""
    run_local(2, read_all)


WRITES: dict[str, Callable[[Parameter], Any]] = {
    "clamp": lambda p: p.data.clamp_(-0.1, 0.1),
    "assign": lambda p: torch.no_grad()(p.copy_)(torch.full_like(p, 0.25)),
    "replace": lambda p: setattr(p, "data", torch.full(p.shape, 0.5)),
    "scale": lambda p: torch.no_grad()(lambda: p.mul_(2).add_(1))(),
    "load": lambda p: nn.ParameterList([p]).load_state_dict({"0": p.detach() + 0.125}),
}


def write_all(comm: Communicator, overlaps: bool) -> list[Tensor]:
    t = Trained(comm, overlap_param_sync=overlaps, expects_pending=overlaps)
    seen = []
    for name, write in WRITES.items():
        t.step()
        for p in t.params:
            write(p)
        written = [p.detach().clone() for p in t.params]
        t.opt.param_sync()
        assert_bitwise_equal([p.detach() for p in t.params], written, f"a gather came after what {name} wrote")
        seen += written
    t.step()
    seen += [p.detach().clone() for p in t.params]  # stepped from what was written last
    t.opt.close()
    return seen


def test_what_is_written_to_a_parameter_stays() -> None:
    assert_bitwise_equal(run_local(2, write_all, True), run_local(2, write_all, False))


def look_without_reading(comm: Communicator) -> None:
    """Nobody waits for what shows no values."""
    t = Trained(comm)
    hashes = [hash(p) for p in t.params]
    t.step()
    t.params[0].register_hook(lambda grad: grad).remove()
    look = lambda p: (p.shape, p.dtype, p.device, p.layout, p.ndim, p.numel(), p.stride(), p.is_leaf, p.grad_fn)  # noqa: E731
    seen = [(look(p), p._version)[0] for p in t.params]
    for p in t.params:
        p.requires_grad_(False).requires_grad = True
        p.grad = None
        del p.grad
        assert p.grad is None and p.requires_grad and isinstance(p, Parameter) and p in t.opt.state
    assert hashes == [hash(p) for p in t.params] and sum(p.numel() for p in t.model.parameters()) > 0
    t.opt.zero_grad()
    assert len(pending(t.opt)) == len(t.params)  # nobody waited
    t.opt.param_sync()
    assert seen == [look(p) for p in t.params]
    assert all(type(p) is Parameter and not p.__dict__ for p in t.params)
    t.opt.close()


def copy_and_forget(comm: Communicator) -> None:
    """No copy is pending, and `close` leaves nothing that is."""
    t = Trained(comm)
    t.step()
    p = t.params[0]
    for made in (copy.deepcopy(t.params[1]), pickle.loads(pickle.dumps(t.params[2])), type(p)(torch.ones(2), False)):
        assert type(made) is Parameter and not made.__dict__
    assert type(p) is AbsentParam
    early = pickle.dumps(p)
    assert early == pickle.dumps(p) and b"arrival" not in early  # nothing of the gather goes with it
    t.step()
    t.opt.close()
    assert all(type(p) is Parameter and not p.__dict__ for p in t.params)
    values = [p.detach().clone() for p in t.params]
    del t.opt
    assert_bitwise_equal([p.detach() for p in t.params], values)


def drop_the_optimizer(comm: Communicator) -> list[Tensor]:
    """Parameters arrive after it has gone."""
    t = Trained(comm)
    t.step()
    del t.opt, t.late
    assert all(type(p) is AbsentParam for p in t.params)
    return [p.detach().clone() for p in t.params]


class Tagged(Parameter):
    pass


def train_another_class(comm: Communicator) -> None:
    """Such a parameter arrives within `step`."""
    params = [Parameter(torch.ones(300)), Tagged(torch.ones(300)), torch.ones(300).requires_grad_()]
    opt = ShardedAdamW(params, lr=0.1, process_group=comm, **LATE)  # type: ignore[arg-type]
    delay_gathers(opt)
    loss_of(params, share(dyadic(params, 1), comm.rank, comm.size)).backward()
    opt.step()
    assert [type(p) for p in params] == [AbsentParam, Tagged, Tensor]
    first = [p.data.clone() for p in params]
    opt.param_sync()
    assert_bitwise_equal([p.data for p in params], first)
    opt.close()


class Holder:
    def __init__(self, param: Parameter) -> None:
        self.param = param


def doubled(holder: Holder) -> Tensor:
    """A torch function whose argument does not show what is in it."""
    if torch.overrides.has_torch_function_unary(holder.param):
        return torch.overrides.handle_torch_function(doubled, (holder.param,), holder)  # type: ignore[no-any-return]
    return holder.param.detach() * 2


def read_unseen(comm: Communicator) -> None:
    """Where a parameter cannot be seen, all arrive."""
    t = Trained(comm)
    t.step()
    early = [doubled(Holder(p)) for p in t.params]
    assert not pending(t.opt)
    assert_bitwise_equal(early, [2 * p.detach() for p in t.params])
    t.opt.close()


BODIES = [look_without_reading, copy_and_forget, drop_the_optimizer, train_another_class, read_unseen]


@pytest.mark.parametrize("body", BODIES)
def test_on_two_ranks(body: Callable[[Communicator], Any]) -> None:
    first, second = run_local(2, body)
    assert_bitwise_equal(first, second)


def test_a_wait_of_another_thread_leaves_the_gathers_of_a_step_to_it() -> None:
    """It comes while the step has started its first gather."""

    def body(comm: Communicator) -> None:
        t = Trained(comm, expects_pending=False, overlap_param_sync=False)
        engine: Any = t.opt._engine
        steps, found = engine._assembly.steps, []  # type: ignore[var-annotated]

        def run(step: Any, begun: Any, order: Any, used: bytes, running: Any) -> None:
            for number in order:
                steps.run(step, begun, [number], used, running)
                found.append(running[-1][0])
                if len(found) == 1:
                    t.opt.param_sync()

        engine._assembly = replace(engine._assembly, steps=SimpleNamespace(run=run))
        t.step()
        assert len(found) > 1 and all(handle._is_over for handle in found)

    run_local(2, body)
