"""The examples from_*.py read and write checkpoints of other systems."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import bucketwheel as bw
from tests.support.example_runs import EXAMPLES

F32, BF16 = torch.float32, torch.bfloat16
MOMENTS = ("exp_avg", "exp_avg_sq")


def example(name: str) -> Any:
    """The module of an example."""
    if str(EXAMPLES) not in sys.path:
        sys.path.append(str(EXAMPLES))
    return importlib.import_module(name)


def make_model(dtype: torch.dtype = F32) -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(7, 5), nn.LayerNorm(5), nn.Linear(5, 3, bias=False)).to(dtype)


def made(dtype: torch.dtype = F32, groups: int = 2) -> tuple[nn.Sequential, bw.ShardedAdamW]:
    """Ours, untrained; two groups have the parameters in another order than the model."""
    model = make_model(dtype)
    named = list(model.named_parameters())
    given = [{"params": named[2:]}, {"params": named[:2], "weight_decay": 0.0}] if groups == 2 else [{"params": named}]
    return model, bw.ShardedAdamW(given, lr=1e-2, bucket_cap_mb=0.001)


def train(model: nn.Module, optimizer: Any, steps: range) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(step)  # equal on all ranks: the mean over them is each one's gradient
        dtype = next(model.parameters()).dtype
        model(torch.randn(4, 7, generator=generator).to(dtype)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def trained_by_torch() -> tuple[dict[str, dict[str, Tensor]], int]:
    """Of each parameter, by name: its weight and moments after three steps of torch's AdamW."""
    model, steps = make_model(), 3
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    train(model, optimizer, range(steps))
    found = {}
    for name, p in model.named_parameters():
        state = optimizer.state[p]
        found[name] = {"fp32": p.detach().clone(), **{what: state[what].clone() for what in MOMENTS}}
    return found, steps


def expect_whole(model: nn.Module, optimizer: bw.ShardedAdamW, saved: dict[str, dict[str, Tensor]], step: int) -> None:
    """Bit for bit what was saved, on all ranks."""
    full = optimizer.full_state_dict(None, model=model)["state"]
    for name, p in model.named_parameters():
        entry, wanted = full[name], saved[name]
        assert float(entry["step"]) == step
        assert torch.equal(p, wanted["fp32"].to(p.dtype)), name
        assert torch.equal(entry.get("master_param", p), wanted["fp32"]), name
        for what in MOMENTS:
            assert torch.equal(entry[what], wanted[what]), (name, what)


# --- DeepSpeed --------------------------------------------------------------------------------------------------------


def write_universal(folder: Path, saved: dict[str, dict[str, Tensor]], step: int, stage: int) -> None:
    """As ds_to_universal.py leaves it: ZeRO-1 and 2 write dicts and step.pt, ZeRO-3 flat tensors alone."""
    for name, values in saved.items():
        place = folder / "zero" / name
        place.mkdir(parents=True)
        for what, value in values.items():
            torch.save({"cat_dim": 0, "param": value} if stage < 3 else value.flatten(), place / f"{what}.pt")
        if stage < 3:
            torch.save(step, place / "step.pt")


def convert_deepspeed(rank: int, world: int, folder: Path, dtype: torch.dtype, stage: int) -> None:
    code = example("from_deepspeed")
    saved, step = trained_by_torch()
    if rank == 0:
        write_universal(folder, saved, step, stage)
    dist.barrier()
    model, optimizer = made(dtype)
    code.from_deepspeed(folder, model, optimizer, step=step if stage == 3 else None)
    expect_whole(model, optimizer, saved, step)

    train(model, optimizer, range(step, step + 2))
    code.to_deepspeed(folder, model, optimizer)
    dist.barrier()
    full = optimizer.full_state_dict(None, model=model)["state"]
    for name, p in model.named_parameters():
        for what in ("fp32", *MOMENTS):
            written = torch.load(folder / "zero" / name / f"{what}.pt", weights_only=True)
            assert isinstance(written, dict) == (stage < 3)
            value = written["param"] if stage < 3 else written.view(p.shape)
            assert stage == 3 or written["cat_dim"] == 0
            wanted = full[name][what] if what != "fp32" else full[name].get("master_param", p.detach())
            assert torch.equal(value, wanted), (name, what)
    assert stage == 3 or torch.load(folder / "zero" / "0.weight" / "step.pt") == step + 2
    optimizer.close()


@pytest.mark.parametrize(("dtype", "stage", "world"), [(F32, 2, 2), (BF16, 3, 2), (BF16, 1, 1)], ids=str)
def test_a_universal_checkpoint_of_deepspeed(
    rank_pool: Any, dtype: torch.dtype, stage: int, world: int, tmp_path: Path
) -> None:
    rank_pool(world).run(convert_deepspeed, tmp_path, dtype, stage, timeout_s=60)


# --- Megatron ---------------------------------------------------------------------------------------------------------


def convert_megatron(rank: int, world: int, folder: Path, dtype: torch.dtype) -> None:
    code = example("from_megatron")
    saved, step = trained_by_torch()
    keys = {"fp32": "fp32_param", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}
    theirs = {
        f"optimizer.state.{keys[what]}.decoder.{name}": value
        for name, values in saved.items()
        for what, value in values.items()
    }
    dcp.save(theirs, checkpoint_id=folder)
    model, optimizer = made(dtype)
    code.from_torch_dist(folder, model, optimizer, lambda name: f"decoder.{name}", step)
    expect_whole(model, optimizer, saved, step)
    optimizer.close()


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_a_torch_dist_checkpoint_of_megatron(rank_pool: Any, dtype: torch.dtype, tmp_path: Path) -> None:
    rank_pool(2).run(convert_megatron, tmp_path, dtype, timeout_s=60)


# --- FSDP2 ------------------------------------------------------------------------------------------------------------


def under_fsdp2() -> tuple[nn.Module, torch.optim.AdamW]:
    model = make_model()
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def whole_of_fsdp2(model: nn.Module, optimizer: torch.optim.AdamW) -> dict[str, dict[str, Tensor]]:
    weights, states = get_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True))
    found = {
        name: {"fp32": w, **{what: states["state"][name][what] for what in MOMENTS}} for name, w in weights.items()
    }
    every = [found]
    dist.broadcast_object_list(every)  # rank 0 alone has it
    return every[0]


def save_with_fsdp2(rank: int, world: int, folder: Path) -> dict[str, dict[str, Tensor]]:
    model, optimizer = under_fsdp2()
    train(model, optimizer, range(3))
    weights, states = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": states}, checkpoint_id=folder)
    return whole_of_fsdp2(model, optimizer)


def load_and_save(
    rank: int, world: int, folder: Path, back: Path, saved: dict[str, dict[str, Tensor]], groups: int
) -> Any:
    code = example("from_fsdp2")
    model, optimizer = made(groups=groups)
    code.from_fsdp2(folder, model, optimizer)
    expect_whole(model, optimizer, saved, 3)
    train(model, optimizer, range(3, 5))
    code.to_fsdp2(back, model, optimizer)
    full = optimizer.full_state_dict(None, model=model)["state"]
    optimizer.close()
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    return {name: {"fp32": p, **{what: full[name][what] for what in MOMENTS}} for name, p in weights.items()}


def load_with_fsdp2(rank: int, world: int, folder: Path) -> dict[str, dict[str, Tensor]]:
    """All that stock code asks for, ``param_groups`` too."""
    model, optimizer = under_fsdp2()
    weights, states = get_state_dict(model, optimizer)
    dcp.load({"model": weights, "optimizer": states}, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=states)
    return whole_of_fsdp2(model, optimizer)


@pytest.mark.parametrize("groups", [1, 2])
def test_fsdp2_and_back_at_other_world_sizes(rank_pool: Any, groups: int, tmp_path: Path) -> None:
    there, back = tmp_path / "there", tmp_path / "back"
    saved = rank_pool(2).run(save_with_fsdp2, there, timeout_s=60)[0]
    ours = rank_pool(3).run(load_and_save, there, back, saved, groups, timeout_s=60)[0]
    assert ours.keys() == saved.keys()
    assert not any(torch.equal(saved[name][what], value) for name in ours for what, value in ours[name].items())
    if groups == 1:
        theirs = rank_pool(2).run(load_with_fsdp2, back, timeout_s=60)[0]
        assert all(torch.equal(theirs[name][what], value) for name in ours for what, value in ours[name].items())
