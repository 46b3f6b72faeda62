"""Read a checkpoint of FSDP2 and torch.optim.AdamW (torch.distributed.checkpoint) into bucketwheel, and write one back.

torchrun --nproc-per-node 2 examples/from_fsdp2.py
"""

import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import bucketwheel as bw


def from_fsdp2(folder, model, optimizer):
    """Load a folder of ``dcp.save({"model": ..., "optimizer": ...})`` with the dicts of ``get_state_dict``. Collective."""
    weights, states = get_state_dict(model, optimizer)
    wanted = {"model": weights, "optimizer": {"state": states["state"]}}  # hyperparameters stay those of `optimizer`
    dcp.load(wanted, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=states)


def to_fsdp2(folder, model, optimizer):
    """Save such a folder. To load it, param_groups there must have the same parameters as here. Collective."""
    weights, states = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": states}, checkpoint_id=folder)


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 1))


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> float:
    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(dist.get_rank()))
    loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    theirs = fully_shard(make_model(), mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    adamw = torch.optim.AdamW(theirs.parameters(), lr=1e-2)
    model = make_model()
    with tempfile.TemporaryDirectory() as own, bw.ShardedAdamW(model.parameters(), lr=1e-2) as optimizer:
        dist.broadcast_object_list(folder := [own])  # all use rank 0's
        first = [train_step(theirs, adamw) for _ in range(3)]
        to_fsdp2(f"{folder[0]}/fsdp2", theirs, adamw)  # the stock calls: they save any optimizer
        from_fsdp2(f"{folder[0]}/fsdp2", model, optimizer)
        losses = [[train_step(*each) for _ in range(3)] for each in ((theirs, adamw), (model, optimizer))]
        print(f"rank {dist.get_rank()}: first {first}, then FSDP2 {losses[0]}, bucketwheel {losses[1]}", flush=True)
        dist.barrier()  # before rank 0 removes the folder
    dist.destroy_process_group()
