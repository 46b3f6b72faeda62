"""Read a Megatron torch_dist checkpoint (optimizer: fully_reshardable) into bucketwheel. This run uses a file with the same
keys, without Megatron, and trains on: torchrun --nproc-per-node 2 examples/from_megatron.py"""

import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import bucketwheel as bw

MOMENTS = ("exp_avg", "exp_avg_sq")


def from_torch_dist(folder, model, optimizer, megatron_name, step):
    """``megatron_name(name)``: Megatron's name of parameter ``name``, which must have the same shape there. ``step``: see
    the folder's common.pt. Collective."""
    name_of = {p: name for name, p in model.named_parameters()}
    params = [p for group in optimizer.param_groups for p in group["params"]]

    def read(what):
        keys = [f"optimizer.state.{what}.{megatron_name(name_of[p])}" for p in params]
        found = {key: torch.empty(p.shape) for key, p in zip(keys, params, strict=True)}
        dcp.load(found, checkpoint_id=folder, no_dist=True)
        return [found[key] for key in keys]

    weights, full = read("fp32_param"), None
    for p, weight in zip(params, weights, strict=True):  # on every rank
        p.detach().copy_(weight)
    groups = optimizer.state_dict()["param_groups"]  # hyperparameters stay those of `optimizer`
    if dist.get_rank() == 0:  # the states go out from rank 0
        parts, done = {"master_param": weights, **{key: read(key) for key in MOMENTS}}, torch.tensor(float(step))
        state = {i: {"step": done, **{key: part[i] for key, part in parts.items()}} for i in range(len(params))}
        full = {"state": state, "param_groups": groups}
    optimizer.load_full_state_dict(full)


def train(model, optimizer):
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        (loss := (model(torch.eye(16)) - 1).square().mean()).backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    dist.init_process_group("gloo")
    theirs, model = torch.nn.RMSNorm(16), torch.nn.RMSNorm(16)
    adamw = torch.optim.AdamW(theirs.parameters(), lr=0.1)
    train(theirs, adamw)
    part = {"fp32_param": theirs.weight.detach(), **adamw.state[theirs.weight]}
    saved = {f"optimizer.state.{key}.decoder.weight": value for key, value in part.items()}
    with tempfile.TemporaryDirectory() as folder, bw.ShardedAdamW(model.parameters(), lr=0.1) as optimizer:
        dcp.save(saved, checkpoint_id=folder, no_dist=True)  # each rank has a folder of its own here
        from_torch_dist(folder, model, optimizer, lambda name: f"decoder.{name}", step=3)
        losses = train(theirs, adamw), train(model, optimizer)
        print(f"rank {dist.get_rank()}: AdamW {losses[0]}, ShardedAdamW {losses[1]}", flush=True)
    dist.destroy_process_group()
