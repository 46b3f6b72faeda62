"""Parameters of a sharded model outside of training: whole, saved and loaded."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

import bucketwheel as bw
from bucketwheel.checkpoint.tensor_shard import TensorShard
from bucketwheel.comm.communicator import Communicator
from bucketwheel.residency.absent_param import AbsentParam
from tests.support.optim_twins import run_local
from tests.support.shard_models import Block, Gpt, lm_loss
from tests.support.shard_twins import steps, whole_params


def sharded(comm: Communicator, model: nn.Module | None = None, **options: Any) -> Any:
    return bw.shard(Gpt() if model is None else model, (Block,), group=comm, **options)


def trained(comm: Communicator, count: int = 2, model: nn.Module | None = None, **options: Any) -> tuple[Any, Any]:
    """A sharded model, after so many steps."""
    model = sharded(comm, model, **options)
    opt = bw.ShardedAdamW(model.parameters(), lr=1e-2)
    steps(lm_loss, count)(model, opt, comm.rank)
    return model, opt


# Whatever needs values of a parameter, and what needs none.
READS: dict[str, Any] = {
    "sum": lambda p: p.sum(),
    "norm": lambda p: torch.linalg.vector_norm(p),
    "add": lambda p: p + 1,
    "in place": lambda p: p.mul_(2),
    "zero_": lambda p: p.zero_(),
    "fill_": lambda p: p.fill_(0),
    "item": lambda p: p.view(-1)[0].item(),
    "index": lambda p: p[0],
    "tolist": lambda p: p.tolist(),
    "numpy": lambda p: p.numpy(),
    "clone": lambda p: p.clone(),
    "data": lambda p: p.data,
    "view": lambda p: p.view(-1),
    "transpose": lambda p: p.t(),
    "to": lambda p: p.to(torch.float64),
    "matmul": lambda p: torch.ones(3, len(p)) @ p,
    "foreach": lambda p: torch._foreach_add([p], 1.0),
    "equal": lambda p: torch.equal(p, p),
    "data_ptr": lambda p: p.data_ptr(),
    "storage": lambda p: p.untyped_storage(),
    "dlpack": lambda p: p.__dlpack__(),
    "deepcopy": copy.deepcopy,
    "iterate": lambda p: list(p),
    "bool": lambda p: bool(p.view(-1)[0]),
    "functional": lambda p: torch.nn.functional.linear(torch.ones(2, p.shape[-1]), p),
    "copy_ from": lambda p: torch.empty(p.shape).copy_(p),
    "init": lambda p: torch.nn.init.normal_(p),
    "flatten": lambda p: torch.nn.utils.parameters_to_vector([p]),
    "assign data": lambda p: setattr(p, "data", torch.zeros(p.shape)),
}


def test_an_absent_parameter_answers_its_shape_and_raises_on_its_values() -> None:
    def body(comm: Communicator) -> None:
        model, opt = trained(comm)
        param, shape = model.blocks[0].up.weight, (32, 16)

        def expect_absent() -> None:
            assert (param.shape, param.numel(), param.dtype, param.device.type) == (shape, 512, torch.float32, "cpu")
            assert param.requires_grad and param.is_leaf and param.dim() == 2 and param.stride() == (16, 1)
            assert (
                type(param) is AbsentParam and isinstance(param, nn.Parameter) and len(list(model.parameters())) == 27
            )
            assert "not gathered" in repr(param)
            for name, read in READS.items():
                with pytest.raises(bw.ShardedParamError, match="full_params"), torch.no_grad():
                    read(param)
                    raise AssertionError(name)

        expect_absent()
        loss = lm_loss(model, 0)
        expect_absent()  # between forward and backward
        loss.backward()
        expect_absent()
        opt.step()
        with torch.no_grad():
            model(torch.zeros(1, 3, dtype=torch.int64))
        expect_absent()
        with model.full_params():
            assert type(param) is nn.Parameter and param.sum().isfinite()
        expect_absent()

    run_local(2, body)


def test_edits_inside_of_full_params_count() -> None:
    def body(comm: Communicator, make: Any) -> list[Tensor]:
        model = make(comm)
        opt = bw.ShardedAdamW(
            model.parameters(), lr=1e-2, process_group=None if hasattr(model, "full_params") else comm
        )
        steps(lm_loss, 2)(model, opt, comm.rank)
        if hasattr(model, "full_params"):
            with model.full_params(), torch.no_grad():
                nn.init.constant_(model.blocks[1].up.weight, 0.01)
        else:
            nn.init.constant_(model.blocks[1].up.weight, 0.01)
        steps(lm_loss, 2)(model, opt, comm.rank)
        return whole_params(model)

    made = Gpt()
    ours = run_local(3, body, lambda comm: sharded(comm, copy.deepcopy(made)))
    theirs = run_local(3, body, lambda comm: copy.deepcopy(made))
    assert all(torch.equal(a, b) for a, b in zip(ours[0], theirs[0], strict=True))


def test_state_dict_has_parts_and_loads_parts_and_wholes() -> None:
    made = Gpt()

    def body(comm: Communicator) -> None:
        model, opt = trained(comm, model=copy.deepcopy(made))
        lm_loss(model, 0)  # the root is gathered, and a step may follow
        opt.zero_grad()
        saved = model.state_dict()
        assert all(
            isinstance(value, TensorShard) and value.shape == made.state_dict()[k].shape for k, value in saved.items()
        )
        with model.full_params():
            whole = model.state_dict()
        assert all(type(value) is Tensor for value in whole.values())
        before = whole_params(model)
        with model.full_params(), torch.no_grad():
            for p in model.parameters():
                p.zero_()
        model.load_state_dict(saved)
        assert all(torch.equal(a, b) for a, b in zip(whole_params(model), before, strict=True))
        model.load_state_dict(made.state_dict())
        assert all(torch.equal(a, b) for a, b in zip(whole_params(model), made.parameters(), strict=True))
        model.load_state_dict(whole)
        assert all(torch.equal(a, b) for a, b in zip(whole_params(model), before, strict=True))
        with pytest.raises(RuntimeError, match="size mismatch"):
            model.load_state_dict({**whole, "emb.weight": torch.zeros(3, 3)})

    run_local(3, body)


FOLDER_WORLDS = [(2, 3), (3, 2), (2, 1), (1, 2)]


@pytest.mark.parametrize("worlds", FOLDER_WORLDS)
@pytest.mark.parametrize("kinds", [(True, True), (True, False), (False, True)], ids=lambda k: f"{k}")
def test_checkpoints_load_at_any_world_size_sharded_or_not(
    tmp_path: Path, worlds: tuple[int, int], kinds: tuple[bool, bool]
) -> None:
    made = Gpt()

    def make(comm: Communicator, is_sharded: bool) -> tuple[Any, Any]:
        model: Any = copy.deepcopy(made)
        if is_sharded:
            sharded(comm, model)
        group = None if is_sharded else comm
        return model, bw.ShardedAdamW(model.parameters(), lr=1e-2, process_group=group)

    def save(comm: Communicator) -> tuple[list[Tensor], Any]:
        model, opt = make(comm, kinds[0])
        steps(lm_loss, 3)(model, opt, 0)
        bw.checkpoint.save(str(tmp_path / "saved"), model, opt)
        full = opt.full_state_dict(dst=None)
        return whole_params(model), full

    def load(comm: Communicator) -> tuple[list[Tensor], Any]:
        model, opt = make(comm, kinds[1])
        with torch.no_grad():
            bw.checkpoint.load(str(tmp_path / "saved"), model, opt)
        found = whole_params(model), opt.full_state_dict(dst=None)
        steps(lm_loss, 1)(model, opt, 0)
        return found

    params, state = run_local(worlds[0], save)[0]
    for loaded, of in run_local(worlds[1], load):
        assert all(torch.equal(a, b) for a, b in zip(loaded, params, strict=True))
        for index, entry in state["state"].items():
            assert all(torch.equal(entry[name], of["state"][index][name]) for name in entry)


def _save_by_torch(rank: int, world: int, folder: str) -> list[Tensor]:
    torch.manual_seed(0)
    model, opt = trained(bw.Communicator(), model=Gpt())
    dcp.save({"model": model.state_dict(), "optim": opt.state_dict()}, checkpoint_id=folder)
    return whole_params(model)


def _load_by_torch(rank: int, world: int, folder: str) -> list[Tensor]:
    model = bw.shard(Gpt(), (Block,))
    opt = bw.ShardedAdamW(model.parameters(), lr=1e-2)
    state = {"model": model.state_dict(), "optim": opt.state_dict()}
    dcp.load(state, checkpoint_id=folder)
    model.load_state_dict(state["model"])
    opt.load_state_dict(state["optim"])
    return whole_params(model)


def test_torch_saves_and_loads_at_another_world_size(tmp_path: Path, rank_pool: Any) -> None:
    saved = rank_pool(2).run(_save_by_torch, str(tmp_path))[0]
    for loaded in rank_pool(3).run(_load_by_torch, str(tmp_path)):
        assert all(torch.equal(a, b) for a, b in zip(loaded, saved, strict=True))


@pytest.mark.parametrize("world", [1, 2])
def test_a_wider_dtype_stays_beside_the_parameters(world: int) -> None:
    """``param_dtype`` is the model in bfloat16 with float32 masters, from the first step on."""
    made = Gpt()

    def body(comm: Communicator) -> None:
        model = sharded(comm, copy.deepcopy(made), param_dtype=torch.bfloat16, output_dtype=torch.float32)
        opt = bw.ShardedAdamW(model.parameters(), lr=1e-2)
        twin = copy.deepcopy(made).bfloat16()
        masters = {p: q.detach().clone() for p, q in zip(twin.parameters(), made.parameters(), strict=True)}
        whole = bw.ShardedAdamW(twin.parameters(), lr=1e-2, process_group=comm.split(0))
        state = whole.state_dict()["state"]
        for p in twin.parameters():
            whole.state[p]["master_param"] = masters[p]
        del state
        for step in range(3):
            ours = lm_loss(model, step)
            theirs = lm_loss(lambda x: twin(x).float(), step)  # type: ignore[arg-type]
            assert ours.dtype == torch.float32 and ours.item() == theirs.item()
            ours.backward()
            theirs.backward()
            opt.step()
            whole.step()
            opt.zero_grad()
            whole.zero_grad()
        assert all(p.dtype == torch.bfloat16 for p in model.parameters())
        assert all(value.dtype == torch.float32 for value in model.state_dict().values())
        assert all(torch.equal(a, b) for a, b in zip(whole_params(model), twin.parameters(), strict=True))
        for bad in ("none", "bf16_remainder"):
            opt.close()
            with pytest.raises(ValueError, match="param_dtype"):
                bw.ShardedAdamW(model.parameters(), master_weights=bad)
        whole.close()

    run_local(world, body)


def test_reduce_dtype_is_the_wire() -> None:
    def body(comm: Communicator) -> list[Tensor]:
        model = sharded(comm, copy.deepcopy(made), reduce_dtype=torch.bfloat16)
        opt = bw.ShardedAdamW(model.parameters(), lr=1e-2)
        steps(lm_loss, 2)(model, opt, comm.rank)
        with pytest.raises(ValueError, match="reduce_dtype"):
            bw.ShardedAdamW(model.parameters(), lr=1e-2, reduce_dtype=torch.float16)
        return whole_params(model)

    def twin(comm: Communicator) -> list[Tensor]:
        model = copy.deepcopy(made)
        with bw.ShardedAdamW(model.parameters(), lr=1e-2, process_group=comm, reduce_dtype=torch.bfloat16) as opt:
            steps(lm_loss, 2)(model, opt, comm.rank)
            return whole_params(model)

    made = Gpt()
    assert all(torch.equal(a, b) for a, b in zip(run_local(2, body)[0], run_local(2, twin)[0], strict=True))
