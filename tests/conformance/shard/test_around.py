"""What users do around a sharded model: other optimizers, groups, compilers, calls of submodules, writes; results are those of whole
parameters, or a named error."""

from __future__ import annotations

import copy
from collections import OrderedDict
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import bucketwheel as bw
from bucketwheel.comm.communicator import Communicator
from tests.conformance.shard.test_cases import Chain, block_loss, plain
from tests.support.optim_twins import run_local
from tests.support.shard_models import Block, Gpt, lm_loss
from tests.support.shard_twins import expect_twins, steps, whole_params


@pytest.mark.parametrize("world", [1, 2, 3])
def test_an_optimizer_of_torch_steps_local_shards(world: int) -> None:
    """With equal data on all ranks, momentum on the shards is momentum on the whole."""

    def train(model: nn.Module, params: Any) -> torch.optim.Optimizer:
        opt = torch.optim.SGD(params, lr=0.1, momentum=0.9)
        for step in range(4):
            for micro in range(2):
                lm_loss(model, 2 * step + micro).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            opt.step()
            opt.zero_grad()
        return opt

    made = Gpt()
    twin = copy.deepcopy(made)
    train(twin, twin.parameters())

    def body(comm: Communicator, models: list[Any]) -> None:
        model = bw.shard(models[comm.rank], (Block,), group=comm)
        shards = bw.local_shards(model)
        assert all(p.dim() == 1 and p.is_leaf for p in shards)
        assert sum(p.numel() for p in shards) < sum(p.numel() for p in model.parameters()) / comm.size * 1.5
        opt = train(model, shards)
        for ours, theirs in zip(whole_params(model), twin.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
        before = whole_params(model)
        with pytest.raises(RuntimeError, match="SGD lacks .* parameters of bw.local_shards"):
            torch.optim.SGD(shards[:2], lr=0.1).step()
        assert all(map(torch.equal, before, whole_params(model)))
        bw.local_shards(model)  # replaces the ones before
        with pytest.raises(bw.ClosedError, match="replaced"):
            opt.step()

    run_local(world, body, [copy.deepcopy(made) for _ in range(world)])
    with pytest.raises(ValueError, match="no sharded parameter"):
        bw.local_shards(Gpt())


def test_evaluation_in_inference_mode_and_with_frozen_models() -> None:
    def script(model: Any, opt: Any, rank: int) -> list[Any]:
        seen = []
        for step in range(4):
            with torch.inference_mode():
                seen.append(lm_loss(model, 50 + step).item())
            seen += steps(lm_loss, 1)(model, opt, rank)
            model.to("cpu")
            model.to(torch.float32)
        return seen

    counts = expect_twins(Gpt, (Block,), script)
    assert counts["divergences"] == 0
    model = bw.shard(Gpt().requires_grad_(False), (Block,), group=bw.LocalWorld(1).rank(0))
    for step in range(4):  # with gradients enabled
        lm_loss(model, step)
    counts = model.residency_counts()
    assert counts["live"] == 0 and counts["planned"] > 0 and counts["divergences"] == 0


def test_groups_of_parameters_leave_the_order_of_buckets_to_the_units() -> None:
    def body(comm: Communicator, models: list[Any]) -> list[tuple[int, int]]:
        found = []
        for split in (lambda p: True, lambda p: p.dim() > 1, lambda p: p.dim() < 2):
            model = bw.shard(copy.deepcopy(models[comm.rank]), (Block,), group=comm)
            params = list(model.parameters())
            groups = [{"params": [p for p in params if split(p) == first]} for first in (True, False)]
            with bw.ShardedAdamW([g for g in groups if g["params"]], lr=1e-2) as opt:
                steps(lm_loss, 2)(model, opt, comm.rank)
                memory = opt.memory_summary()
                found.append((memory["planned"], memory["buckets_peak"]))
        return found

    found = run_local(2, body, [Gpt(blocks=8) for _ in range(2)])[0]
    assert len(set(found)) == 1, found


@pytest.mark.parametrize("how", ["blocks", "model"])
def test_compiled(how: str) -> None:
    made = Gpt()

    def losses(model: Any) -> list[float]:
        if how == "blocks":
            for block in model.blocks:
                block.compile(backend="aot_eager")
        called = torch.compile(model, backend="aot_eager") if how == "model" else model
        with bw.ShardedAdamW(model.parameters(), lr=1e-2, process_group=group) as opt:
            seen = []
            for step in range(4):
                loss = lm_loss(called, step)
                loss.backward()
                opt.step()
                opt.zero_grad()
                seen.append(loss.item())
        return seen

    group: Any = bw.LocalWorld(1).rank(0)
    whole = losses(copy.deepcopy(made))
    group = None
    assert losses(bw.shard(made, (Block,), group=bw.LocalWorld(1).rank(0))) == whole


def test_submodules_called_by_themselves_with_evaluations_between() -> None:
    def script(model: Any, opt: Any, rank: int) -> list[Any]:
        seen = []
        for step in range(5):
            x = torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(step))
            y = model.blocks[2](model.blocks[0](x))
            with torch.no_grad():
                seen.append(model.blocks[1](model.blocks[0](x)).sum().item())
            y.square().mean().backward()
            opt.step()
            opt.zero_grad()
        return seen

    expect_twins(lambda: Chain(plain), (Block,), script)


class Leaks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(16, 16)

    def forward(self) -> Tensor:
        return self.lin.weight.t()


def test_sync_module_of_a_sharded_model() -> None:
    """Before the optimizer and after it: it has the buffers, and parameters that are not sharded."""

    def body(comm: Communicator) -> list[Any]:
        torch.manual_seed(comm.rank)
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
        model[2].requires_grad_(False)  # else the optimizer makes it equal
        bw.shard(model, (nn.BatchNorm1d,), group=comm, ignored=[model[2]])
        first = bw.sync_module(model, process_group=comm)
        opt = bw.ShardedAdamW(model.parameters(), process_group=comm)
        with bw.sync_module(model, buffers="forward", process_group=comm):
            for step in range(3):
                x = torch.randn(8, 4, generator=torch.Generator().manual_seed(10 * step + comm.rank))
                model(x).square().mean().backward()
                opt.step()
                opt.zero_grad()
            with torch.no_grad():
                model.eval()(x)
        first.close()
        opt.close()
        return [*whole_params(model), *(buffer.clone() for buffer in model.buffers())]

    ours, theirs = run_local(2, body)
    assert all(map(torch.equal, ours, theirs)) and int(ours[-1]) == 3


class UsesOutside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.leaks = Leaks()

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.leaks()


def test_memory_of_parameters_out_of_forward_is_refused() -> None:
    model = bw.shard(UsesOutside(), (Leaks,), group=bw.LocalWorld(1).rank(0))
    for way in (torch.enable_grad, torch.no_grad, torch.inference_mode):
        with way(), pytest.raises(bw.ShardedParamError, match="returns memory of its own parameters"):
            block_loss(model, 0)


class Features(nn.Module):
    """A root layer before the blocks, which a test may freeze."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 16)
        self.blocks = nn.ModuleList(Block(16) for _ in range(3))
        self.last = nn.Linear(16, 16)

    def encode(self, x: Tensor) -> Tensor:
        return plain(self.blocks, self.first(x))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.encode(x))


@pytest.mark.parametrize("how", ["two by method", "grad, then backward", "features later"])
def test_backwards_that_need_the_root_again(how: str) -> None:
    def script(model: Any, opt: Any, rank: int) -> list[Any]:
        seen = []
        kept: list[Tensor] = []
        handle = model.blocks[-1].register_forward_hook(lambda m, a, out: kept.append(out))
        for step in range(4):
            x = torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(step)).requires_grad_()
            if how == "two by method":
                losses = [model.encode(x * k).square().mean() for k in (1, 2)]
                with opt.no_sync():
                    losses[0].backward()
                losses[1].backward()
            elif how == "grad, then backward":
                loss = model.encode(x).square().mean()
                seen.append(torch.autograd.grad(loss, x, retain_graph=True)[0].sum().item())
                loss.backward()
            else:
                loss = model(x).square().mean()
                with opt.no_sync():
                    loss.backward(retain_graph=True)
                kept[-1].square().mean().backward()
            opt.step()
            opt.zero_grad()
            seen.append([p.grad is None for p in model.parameters()])
        handle.remove()
        return seen

    expect_twins(Features, (Block,), script)


def test_writes_where_they_are_lost_raise_and_in_full_params_count() -> None:
    def body(comm: Communicator) -> None:
        model = bw.shard(Gpt(), (Block,), group=comm, param_dtype=torch.bfloat16)
        opt = bw.ShardedAdamW(model.parameters(), lr=0.0, weight_decay=0.0)
        lm_loss(model, 0).backward()
        opt.step()
        opt.zero_grad()
        param = model.blocks[0].up.weight
        with model.full_params(), torch.no_grad():
            param.data = torch.full(param.shape, 0.5, dtype=torch.bfloat16)
            nn.utils.vector_to_parameters(torch.full((16,), 0.25, dtype=torch.bfloat16), [model.ln.weight])
        state = model.state_dict()
        assert (state["blocks.0.up.weight"].piece == 0.5).all() and (state["ln.weight"].piece == 0.25).all()
        with model.full_params():
            assert (param == 0.5).all() and (model.ln.weight == 0.25).all()
            part = model.blocks[0].state_dict()
        assert (part["up.weight"] == 0.5).all()
        with pytest.raises(bw.ShardedParamError, match="another dtype or shape"), model.full_params():
            param.data = torch.zeros(3, dtype=torch.bfloat16)
        lm_loss(model, 1).backward()
        opt.step()
        opt.zero_grad()
        model.unshard_all()
        model.blocks[1].load_state_dict(Block(16).state_dict())  # whole, by one module
        model.unshard_all()
        with torch.no_grad():
            model.blocks[1].up.weight.mul_(2)
        with pytest.raises(bw.ShardedParamError, match="was written to while it was gathered"):
            lm_loss(model, 1).backward()
            opt.step()

    run_local(2, body)


def test_a_backward_outside_of_full_params_needs_them_by_name() -> None:
    model = bw.shard(Gpt(), (Block,), group=bw.LocalWorld(1).rank(0))
    with model.full_params():
        loss = sum((p.flatten() ** 2).sum() for p in model.parameters())
    with pytest.raises(bw.ShardedParamError, match="full_params"):
        loss.backward()
    model.zero_grad()
    with model.full_params():
        sum((p**2).sum() for p in model.parameters()).backward()
        assert model.emb.weight.grad is not None


class TakesDict(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = Block(16)
        self.notes = Notes()

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        seen: list[Tensor] = []
        assert self.notes(self.block(batch["x"]), seen) is None
        return seen[0]


class Notes(Block):
    def __init__(self) -> None:
        super().__init__(16)

    def forward(self, x: Tensor, seen: list[Tensor]) -> None:  # type: ignore[override]
        seen.append(super().forward(x))


def dict_loss(model: Any, seed: int) -> Tensor:
    batch = OrderedDict(x=torch.randn(2, 3, 16, generator=torch.Generator().manual_seed(seed)))
    loss = model(batch).square().mean()
    assert batch["x"].dtype == torch.float32
    return loss


def test_a_unit_may_return_nothing_and_write_to_a_list() -> None:
    counts = expect_twins(TakesDict, (Block,), steps(dict_loss))
    assert counts["divergences"] == 0


def test_a_cast_leaves_the_dicts_of_the_caller_as_they_are() -> None:
    model = bw.shard(TakesDict(), (Block,), group=bw.LocalWorld(1).rank(0), param_dtype=torch.bfloat16)
    opt = bw.ShardedAdamW(model.parameters(), lr=1e-2)
    model.block.register_forward_hook(lambda m, args, out: seen.append(args[0].dtype))
    seen: list[torch.dtype] = []
    for step in range(2):
        dict_loss(model, step).backward()
        opt.step()
        opt.zero_grad()
    assert seen == [torch.bfloat16] * 2


def test_an_average_of_whole_parameters_follows_in_full_params() -> None:
    def script(model: Any, opt: Any, rank: int) -> list[Any]:
        average = AveragedModel(
            Gpt(), multi_avg_fn=get_ema_multi_avg_fn(0.9)
        )  # its first values are those of the first update
        for step in range(3):
            steps(lm_loss, step)(model, opt, rank)
            with model.full_params() if hasattr(model, "full_params") else nullcontext():
                average.update_parameters(model)
        return [p.sum().item() for p in average.parameters()]

    expect_twins(Gpt, (Block,), script)


def test_an_interrupted_forward_leaves_no_hooks_of_saved_tensors() -> None:
    model = bw.shard(Gpt(), (Block,), group=bw.LocalWorld(1).rank(0))
    opt = bw.ShardedAdamW(model.parameters(), lr=1e-2)

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    hook = model.blocks[1].up.register_forward_hook(interrupt)
    top = torch._C._autograd._top_saved_tensors_default_hooks
    with pytest.raises(KeyboardInterrupt):
        lm_loss(model, 0)
    assert top(False) is not None  # of the first step, which saves by name
    hook.remove()
    opt.step()
    assert top(False) is None
    lm_loss(model, 0).backward()


def test_a_full_state_dict_of_torch_s_helper_is_refused_outside_of_full_params() -> None:
    model = bw.shard(Gpt(), (Block,), group=bw.LocalWorld(1).rank(0))
    options = StateDictOptions(full_state_dict=True)
    with pytest.raises(ValueError, match="full_params"):
        get_model_state_dict(model, options=options)
    with model.full_params():
        whole = get_model_state_dict(model, options=options)
    assert whole["blocks.0.up.weight"].shape == model.blocks[0].up.weight.shape


def test_an_evaluation_between_steps_of_units_that_stay_leaves_the_plan_alone() -> None:
    model = bw.shard(Gpt(16, 8, 999), (Block,), group=bw.LocalWorld(1).rank(0), reshard=False)
    opt = bw.ShardedAdamW(model.parameters(), lr=1e-2)
    for step in range(6):
        lm_loss(model, step).backward()
        opt.step()
        opt.zero_grad()
        with torch.no_grad():
            lm_loss(model, step)
    assert model.residency_counts()["side_peak"] == 0


def test_a_backward_that_enters_a_unit_by_no_output_raises_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BW_DEBUG", "1")
    model = bw.shard(Gpt(), (Block,), group=bw.LocalWorld(1).rank(0))
    opt = bw.ShardedAdamW(model.parameters(), lr=1e-2)
    kept: list[Tensor] = []
    model.blocks[1].up.register_forward_hook(lambda m, a, out: kept.append(out))
    for step in range(3):
        loss = lm_loss(model, step)
        loss.backward(retain_graph=step == 2)
        if step == 2:
            with pytest.raises(bw.ShardedParamError, match="does not pass through an output"):
                kept[-1].sum().backward()
        opt.step()
        opt.zero_grad()
