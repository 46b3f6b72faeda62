"""What a sharded model may do: each case gives the bits of the same model with whole parameters, or a named error on all ranks."""

from __future__ import annotations

import contextlib
import copy
import gc
import importlib
import re
import time
import weakref
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import bucketwheel as bw
from bucketwheel.comm.communicator import Communicator
from bucketwheel.shard.module import runtime_of
from bucketwheel.testing import run_threads
from tests.support.cores import BUSY
from tests.support.optim_twins import run_local
from tests.support.shard_models import Block, Gpt, lm_loss, tokens_of
from tests.support.shard_twins import expect_twins, steps, whole_params

SHAPE = (2, 5)


def block_loss(model: nn.Module, seed: int, d: int = 16) -> Tensor:
    x = torch.randn(*SHAPE, d, generator=torch.Generator().manual_seed(seed))
    return model(x).square().mean()


class Chain(nn.Module):
    """Calls its blocks as ``call`` says."""

    def __init__(self, call: Any, blocks: int = 4, d: int = 16) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(d) for _ in range(blocks))
        self.scale = nn.Parameter(torch.ones(d))
        self.call = call

    def forward(self, x: Tensor) -> Tensor:
        return self.call(self.blocks, x) * self.scale


def plain(blocks: Any, x: Tensor) -> Tensor:
    for block in blocks:
        x = block(x)
    return x


def reentrant(blocks: Any, x: Tensor) -> Tensor:
    x = x.requires_grad_()
    for block in blocks:
        x = checkpoint(block, x, use_reentrant=True)
    return x


def non_reentrant(blocks: Any, x: Tensor) -> Tensor:
    for block in blocks:
        x = checkpoint(block, x, use_reentrant=False)
    return x


def in_segments(blocks: Any, x: Tensor) -> Tensor:
    return checkpoint_sequential(list(blocks), 2, x, use_reentrant=False)


def in_reentrant_segments(blocks: Any, x: Tensor) -> Tensor:
    return checkpoint_sequential(list(blocks), 2, x.requires_grad_(), use_reentrant=True)


def twice(blocks: Any, x: Tensor) -> Tensor:
    return plain([*blocks, blocks[0], blocks[1]], x)


def backwards(blocks: Any, x: Tensor) -> Tensor:
    return plain(reversed(list(blocks)), x)


def by_data(blocks: Any, x: Tensor) -> Tensor:
    at = int(x.abs().sum() * 1000) % len(blocks)
    return plain([*blocks[at:], *blocks[:at]], x)


def viewed(blocks: Any, x: Tensor) -> Tensor:
    for block in blocks:
        x = block(x).view(-1).view(x.shape)
        x.mul_(0.5)
    return x


def one_inside(blocks: Any, x: Tensor) -> Tensor:
    return plain(blocks, x)


CALLS = [plain, reentrant, non_reentrant, in_segments, in_reentrant_segments, twice, backwards, viewed]


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__name__)
def test_orders_of_blocks(call: Any, reshard: bool, world: int) -> None:
    counts = expect_twins(lambda: Chain(call), (Block,), steps(block_loss), world, reshard=reshard)
    assert counts["divergences"] == 0 and counts["wasted"] == 0


@pytest.mark.parametrize("call", [reentrant, non_reentrant, in_segments, in_reentrant_segments, plain])
@pytest.mark.parametrize(("reshard", "most"), [(True, 2), (False, 1)])
def test_gathers_of_a_unit_in_a_step(call: Any, reshard: bool, most: int) -> None:
    seen: list[dict[str, int]] = []

    def script(model: Any, opt: Any, rank: int) -> list[Any]:
        for step in range(3):
            block_loss(model, step).backward()
            if hasattr(model, "plan_report"):
                seen.append(model.residency_counts()["step_gathers"])
            opt.step()
            opt.zero_grad()
        return []

    expect_twins(lambda: Chain(call), (Block,), script, 2, reshard=reshard)
    for of_step in seen:
        assert of_step.pop("root") == 1
    last = seen[-1]
    assert all(1 <= count <= most for count in last.values()), last
    if reshard and call is plain:  # the last block's backward is next after its forward
        assert sorted(last.values()) == [1, 2, 2, 2]


def test_an_order_that_the_data_decide_is_served_and_counted() -> None:
    with pytest.warns(UserWarning, match="another order than in the recorded step"):
        counts = expect_twins(lambda: Chain(by_data), (Block,), lambda m, o, _: steps(block_loss, 6)(m, o, 0), 2)
    assert counts["divergences"] > 0


class Tied(nn.Module):
    """Two blocks have one weight, and one of them another's bias."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(16) for _ in range(3))
        self.blocks[2].up.weight = self.blocks[0].up.weight
        self.blocks[1].ln.bias = self.blocks[0].ln.bias

    def forward(self, x: Tensor) -> Tensor:
        return plain(self.blocks, x)


def test_tied_parameters_in_different_units() -> None:
    expect_twins(Tied, (Block,), steps(block_loss, clip=0.1), 3)


@dataclass
class Both:
    first: Tensor
    rest: list[Tensor]


class Packs(Block):
    """Returns ``kind`` of containers."""

    def __init__(self, d: int, kind: str) -> None:
        super().__init__(d)
        self.kind = kind

    def forward(self, x: Any) -> Any:
        x = x if isinstance(x, Tensor) else x.first if isinstance(x, Both) else x["x"] if isinstance(x, dict) else x[0]
        y = super().forward(x)
        return {
            "tuple": (y, None, 3),
            "dict": {"x": y, "n": "text"},
            "dataclass": Both(y, [y * 2]),
            "opaque": Opaque(y),
        }[self.kind]


class Opaque:
    def __init__(self, x: Tensor) -> None:
        self.x = x

    def __getitem__(self, _: int) -> Tensor:
        return self.x


class Unpacks(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Packs(16, kind) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        out = plain(self.blocks, x)
        return out.first if isinstance(out, Both) else out["x"] if isinstance(out, dict) else out[0]


@pytest.mark.parametrize("kind", ["tuple", "dict", "dataclass", "opaque"])
def test_containers_out_of_forward(kind: str) -> None:
    expect_twins(lambda: Unpacks(kind), (Packs,), steps(block_loss))


class Calls(nn.Module):
    """A unit whose forward calls another in the middle."""

    def __init__(self, other: list[nn.Module]) -> None:
        super().__init__()
        self.a, self.b, self.other = nn.Linear(16, 16), nn.Linear(16, 16), other

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(plain(self.other, torch.tanh(self.a(x)))))


class Nest(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(16) for _ in range(3))
        self.outer = Calls(list(self.blocks))

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(x)


def test_a_unit_that_calls_others() -> None:
    expect_twins(Nest, (Block, Calls), steps(block_loss))


def test_evaluation_and_generation_inside_of_the_loop() -> None:
    def script(model: Any, opt: Any, rank: int) -> list[Any]:
        seen = []
        for step in range(4):
            loss = lm_loss(model, step)
            with torch.no_grad():  # between forward and backward
                seen.append(lm_loss(model, 50 + step).item())
            loss.backward()
            opt.step()
            opt.zero_grad()
            model.eval()
            tokens = tokens_of(step)
            with torch.no_grad():
                for _ in range(3):
                    tokens = torch.cat([tokens, model(tokens)[:, -1:].argmax(-1)], 1)
            model.train()
            seen += [loss.item(), tokens.tolist()]
        return seen

    counts = expect_twins(Gpt, (Block,), script)
    assert counts["divergences"] == 0


def test_two_models_on_one_pool_and_one_deleted_mid_run() -> None:
    def body(comm: Communicator) -> None:
        models = [bw.shard(Gpt(), (Block,), group=comm) for _ in range(2)]
        opts = [bw.ShardedAdamW(models[0].parameters(), lr=1e-2)]
        loss = lm_loss(models[0], 0) + lm_loss(models[1], 1)
        graph = lm_loss(models[1], 2)
        loss.backward()
        opts[0].step()
        del loss
        runtime = weakref.ref(runtime_of(models.pop()))
        graph.backward()
        del graph
        deadline = time.monotonic() + 10
        while runtime() is not None and time.monotonic() < deadline:
            gc.collect()  # does nothing while another thread collects
            time.sleep(0.01)
        assert runtime() is None
        lm_loss(models[0], 3).backward()
        opts[0].step()
        opts[0].close()

    run_local(2, body)


def test_an_exception_mid_step_and_the_next_step_works() -> None:
    class Fails(nn.Module):
        fails = False

        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Block(16) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            x = self.blocks[0](x)
            if self.fails == "forward":
                raise KeyError("mid forward")
            x = self.blocks[1](x)
            if self.fails == "backward":
                x.register_hook(lambda _: 1 / 0)
            return self.blocks[2](x)

    def script(model: Any, opt: Any, rank: int) -> list[Any]:
        seen = []
        for step in range(5):
            model.fails = {1: "forward", 3: "backward"}.get(step, False)
            try:
                loss = block_loss(model, step)
                loss.backward()
            except (KeyError, ZeroDivisionError):
                opt.zero_grad()
                continue
            opt.step()
            opt.zero_grad()
            seen.append(loss.item())
        return seen

    expect_twins(Fails, (Block,), script)


def test_parameters_edited_between_forward_and_backward_raise_as_with_torch() -> None:
    def body(comm: Communicator) -> None:
        model = bw.shard(Gpt(), (Block,), group=comm)
        loss = lm_loss(model, 0)
        with pytest.raises(bw.ShardedParamError, match="full_params"), torch.no_grad():
            model.blocks[1].up.weight.mul_(2)
        with torch.no_grad(), model.full_params():
            model.blocks[1].up.weight.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        lm_loss(model, 0).backward()

    run_local(2, body)


class Rows(nn.Module):
    """Parameters of one row, of one element, and of none."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Row()
        self.empty = nn.Parameter(torch.empty(0, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.block(x) + self.empty.sum()


class Row(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.row, self.one = nn.Linear(16, 1), nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.row(x) * self.one


@pytest.mark.parametrize("world", [2, 3, 4])
def test_empty_shards(world: int) -> None:
    def script(model: Any, opt: Any, rank: int) -> list[Any]:
        seen = steps(block_loss, 2)(model, opt, rank)
        state = opt.state_dict()
        opt.load_state_dict(state)
        model.load_state_dict(model.state_dict())
        full = opt.full_state_dict()
        seen.append([full["state"][i]["exp_avg"].tolist() for i in full.get("state", {})])
        return seen + steps(block_loss, 2)(model, opt, rank)

    expect_twins(Rows, (Row,), script, world)


def freeze(model: Chain) -> Chain:
    for block in (model.blocks[0], model.blocks[2]):
        block.requires_grad_(False)
    model.blocks[1].ln.requires_grad_(False)
    return model


@pytest.mark.parametrize("call", [plain, reentrant, non_reentrant], ids=lambda call: call.__name__)
def test_frozen_units_have_no_gradient_side(call: Any) -> None:
    def script(model: Any, opt: Any, rank: int) -> list[Any]:
        numel = sum(p.numel() for p in model.parameters() if p.requires_grad)
        assert opt.memory_summary()["grads"] < 4 * numel / 2 + 4 * 64 * 40
        return steps(block_loss)(model, opt, rank)

    expect_twins(lambda: freeze(Chain(call)), (Block,), script)


@pytest.mark.parametrize("optim", [{}, {"static_graph": True}])
def test_micro_batches(optim: Any) -> None:
    def script(model: Any, opt: Any, rank: int) -> list[Any]:
        seen = []
        for step in range(3):
            with opt.no_sync():
                lm_loss(model, 10 * step + rank).backward()
            lm_loss(model, 10 * step + rank + 3).backward()
            if not optim:
                opt.grad_sync()
                lm_loss(model, 10 * step + rank + 5).backward()
            seen.append(float(opt.clip_grad_norm_(0.5)))
            opt.step()
            opt.zero_grad()
        return seen

    expect_twins(Gpt, (Block,), script, optim=optim)


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Half() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return plain(self.blocks, x)


class Half(nn.Module):
    """A norm in float32 within a block of bfloat16, and a float64 scale."""

    def __init__(self) -> None:
        super().__init__()
        self.ln, self.lin = nn.LayerNorm(16), nn.Linear(16, 16, dtype=torch.bfloat16)
        self.scale = nn.Parameter(torch.ones(16, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.lin(self.ln(x).bfloat16()).float() * self.scale.float()


def test_mixed_dtypes_of_a_unit() -> None:
    expect_twins(Mixed, (Half,), steps(block_loss))


class Unused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.unused = nn.ModuleList(Block(16) for _ in range(2)), Block(16)

    def forward(self, x: Tensor) -> Tensor:
        return plain(self.blocks, x)


def test_a_unit_that_never_runs() -> None:
    counts = expect_twins(Unused, (Block,), steps(block_loss))
    assert counts["gathers"]["unused"] == 0


@pytest.mark.parametrize("is_planned", [False, True])
def test_a_unit_that_some_ranks_run_alone_raises_on_all(is_planned: bool) -> None:
    def body(comm: Communicator) -> None:
        skips: list[int] = []
        model = bw.shard(
            Chain(lambda blocks, x: plain([b for i, b in enumerate(blocks) if i not in skips], x)), (Block,), group=comm
        )
        opt = bw.ShardedAdamW(model.parameters(), lr=1e-2)
        for step in range(2 * is_planned):
            block_loss(model, step).backward()
            opt.step()
            opt.zero_grad()
        if comm.rank == 1:
            skips.append(2)
        begin = time.monotonic()
        with pytest.raises((RuntimeError, bw.CommError), match="different|unit"):
            block_loss(model, 0).backward()
            opt.step()
        assert time.monotonic() - begin < 2 * BUSY
        skips.clear()
        if not is_planned:  # gathers ahead have been issued on both ranks else: the communicator has failed
            opt.zero_grad()
            block_loss(model, 5).backward()
            opt.step()

    run_local(2, body)


@pytest.mark.parametrize("alone", ["forward without gradients of unit 'root'", "full_params"])
def test_a_rank_that_evaluates_alone_and_one_that_trains_name_their_calls(alone: str) -> None:
    importlib.import_module("torch._dynamo")  # the first optimizer of a process does, which takes seconds
    local = bw.LocalWorld(2)

    def body(rank: int, _: int) -> str:
        with Communicator(local.rank(rank), backend="local", timeout_s=5) as comm:
            model = bw.shard(Chain(plain), (Block,), group=comm)
            opt = bw.ShardedAdamW(model.parameters(), lr=1e-2)
            for step in range(2):
                block_loss(model, step).backward()
                opt.step()
                opt.zero_grad()
            with pytest.raises(bw.CommTimeout) as caught:
                if rank == 0:
                    with model.full_params() if alone == "full_params" else torch.no_grad():
                        block_loss(model, 0)
                block_loss(model, 0)
            with contextlib.suppress(bw.CommError):
                opt.close()
            return str(caught.value)

    trains = "forward of unit 'root'"
    of_rank = (
        rf"timeout in {alone} \(.*rank 1 .*is in {trains}, has not called {alone}",
        rf"timeout in {trains} \(.*rank 0 .*is in {alone}, has not called {trains}",
    )
    for text in run_threads(body, 2, timeout_s=60):  # both have that of the rank that was first
        assert any(re.search(pattern, text) for pattern in of_rank), text


def test_full_params_on_one_rank_while_the_others_step_is_the_same_error_on_all() -> None:
    def body(comm: Communicator) -> None:
        model = bw.shard(Chain(plain), (Block,), group=comm)
        opt = bw.ShardedAdamW(model.parameters(), lr=1e-2)
        for step in range(3):
            block_loss(model, step).backward()
            with contextlib.ExitStack() as stack:
                if step == 2:
                    stack.enter_context(pytest.raises(RuntimeError, match="unshard of unit 'root', step .by rank"))
                    stack.enter_context(model.full_params() if comm.rank == 0 else contextlib.nullcontext())
                opt.step()
            opt.zero_grad()
        assert not runtime_of(model).is_held

    run_local(2, body)


def test_options_without_effect_and_trees_that_cannot_be_sharded() -> None:
    group = lambda: bw.LocalWorld(1).rank(0)  # noqa: E731
    refused: list[tuple[Any, dict[str, Any], str]] = [
        (Gpt(), {"units": (nn.Conv2d,)}, "no such module"),
        (Gpt(), {"units": (Block, nn.LayerNorm)}, "lies inside unit"),
        (Gpt(), {"units": ("blocks.0",)}, "expected classes"),
        (Gpt(), {"units": (Gpt,)}, "the model itself"),
        (Gpt(), {"units": (), "reshard": False}, "no effect"),
        (Gpt(), {"units": (Block,), "reshard": {"blocks.9": True}}, "not a unit"),
        (Gpt(), {"units": (Block,), "param_dtype": torch.float32}, "no effect"),
        (Gpt(), {"units": (Block,), "prefetch": -1}, "at least 0"),
        (Gpt(), {"units": (Block,), "ignored": [nn.Linear(2, 2)]}, "no effect"),
        (nn.ReLU(), {}, "no parameters"),
        (Gpt().requires_grad_(False), {"units": (Block,), "reduce_dtype": torch.float32}, "no effect"),
    ]
    for model, options, text in refused:
        with pytest.raises((ValueError, TypeError), match=text):
            bw.shard(model, group=group(), **options)
        assert isinstance(next(iter(model.parameters()), torch.ones(1)).sum(), Tensor)
    model = bw.shard(Gpt(), (Block,), group=group())
    with pytest.raises(ValueError, match="sharded already"):
        bw.shard(model, (Block,), group=group())
    for name, value in (("bucket_cap_mb", 1), ("overlap_param_sync", True), ("timeout_s", 5)):
        with pytest.raises(ValueError, match="no effect"):
            bw.ShardedAdamW(model.parameters(), **{name: value})
    for moves in (model.double, lambda: model.to("meta"), lambda: copy.deepcopy(model)):
        with pytest.raises((bw.ShardedParamError, TypeError)):
            moves()
    tokens = tokens_of(0)
    assert model(tokens).shape == (2, 5, 11)


def test_parameters_of_an_optimizer_are_refused_on_all_ranks() -> None:
    """A rank may have collected the optimizer."""

    def body(comm: Communicator) -> None:
        model = Gpt()
        opt: Any = bw.ShardedAdamW(model.parameters(), process_group=comm)
        if comm.rank == 1:
            opt = None
            gc.collect()
        with pytest.raises(ValueError, match=r"parameter .*has an optimizer already: close\(\) it on all ranks"):
            bw.shard(model, (Block,), group=comm)
        comm.barrier()
        del opt
        gc.collect()
        bw.shard(model, (Block,), group=comm)
        lm_loss(model, 0).backward()

    run_local(2, body)


def test_parameters_that_come_later_are_trained_whole() -> None:
    def script(model: Any, opt: Any, rank: int) -> list[Any]:
        seen = steps(block_loss, 2)(model, opt, rank)
        torch.manual_seed(7)
        model.blocks[0].up.register_parameter("extra", nn.Parameter(torch.randn(16)))
        model.blocks[0].up.register_forward_hook(lambda m, _, out: out * m.extra.sum())
        opt.add_param_group({"params": [model.blocks[0].up.extra]})
        return seen + steps(block_loss, 2)(model, opt, rank)

    expect_twins(lambda: Chain(plain), (Block,), script)


def test_some_parameters_stay_whole() -> None:
    expect_twins(lambda: Chain(plain), (Block,), steps(block_loss), ignored=[])
    made = Chain(plain)

    def body(comm: Communicator, models: list[Any], is_sharded: bool) -> list[Tensor]:
        model = models[comm.rank]
        if is_sharded:
            bw.shard(model, (Block,), group=comm, ignored=[model.blocks[1], model.scale])
        with bw.ShardedAdamW(model.parameters(), lr=1e-2, process_group=None if is_sharded else comm) as opt:
            steps(block_loss)(model, opt, comm.rank)
            return whole_params(model)

    found = [run_local(2, body, [copy.deepcopy(made) for _ in range(2)], is_sharded) for is_sharded in (True, False)]
    for ours, theirs in zip(found[0][0], found[1][0], strict=True):
        assert torch.equal(ours, theirs)


def test_creating_a_graph_of_gradients_is_refused_outside_of_full_params() -> None:
    model = bw.shard(Gpt(), (Block,), group=bw.LocalWorld(1).rank(0))
    loss = lm_loss(model, 0)
    with pytest.raises(bw.ShardedParamError, match="create_graph"):
        loss.backward(create_graph=True)
    model.zero_grad()
    with model.full_params():
        lm_loss(model, 0).backward(create_graph=True)


def test_two_backwards_through_one_graph() -> None:
    def script(model: Any, opt: Any, rank: int) -> list[Any]:
        seen = []
        for step in range(4):
            loss = lm_loss(model, step + rank)
            loss.backward(retain_graph=True)
            (loss * 2).backward()
            opt.step()
            opt.zero_grad()
            seen.append(loss.item())
        return seen

    expect_twins(Gpt, (Block,), script)


def test_gradients_of_inputs_by_autograd_grad() -> None:
    def script(model: Any, opt: Any, rank: int) -> list[Any]:
        seen = []
        for step in range(3):
            x = torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(step)).requires_grad_()
            (grad,) = torch.autograd.grad(model(x).sum(), x)
            seen.append(grad.tolist())
            block_loss(model, step).backward()
            opt.step()
            opt.zero_grad()
        return seen

    expect_twins(lambda: Chain(plain), (Block,), script)
