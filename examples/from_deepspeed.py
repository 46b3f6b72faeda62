"""Read a DeepSpeed ZeRO checkpoint that DeepSpeed's ds_to_universal.py has converted, and write values back. This run uses
files of that layout, without DeepSpeed, and trains on: torchrun --nproc-per-node 2 examples/from_deepspeed.py"""

import tempfile
from pathlib import Path

import torch
import torch.distributed as dist

import bucketwheel as bw


def read(file):
    found = torch.load(file, map_location="cpu", weights_only=True)
    return found["param"] if isinstance(found, dict) else found  # ZeRO-1 and 2 write dicts, ZeRO-3 flat tensors


def from_deepspeed(folder, model, optimizer, step=None):
    """Collective. ``step``: for folders without step.pt, as older versions and some of ZeRO-3 write them."""
    name_of, state = {p: name for name, p in model.named_parameters()}, {}
    for number, p in enumerate(p for group in optimizer.param_groups for p in group["params"]):
        place = Path(folder) / "zero" / name_of[p]
        weight = read(place / "fp32.pt").view(p.shape)
        p.detach().copy_(weight)  # on every rank; the states go out from rank 0
        if dist.get_rank() == 0:
            done = torch.tensor(float(read(place / "step.pt") if step is None else step))
            moments = {key: read(place / f"{key}.pt").view(p.shape) for key in ("exp_avg", "exp_avg_sq")}
            state[number] = {"step": done, "master_param": weight, **moments}
    groups = optimizer.state_dict()["param_groups"]  # hyperparameters stay those of `optimizer`
    optimizer.load_full_state_dict({"state": state, "param_groups": groups} if state else None)


def to_deepspeed(folder, model, optimizer):
    """Replace the values in a universal checkpoint of this model that DeepSpeed has made, at any step. Collective."""
    for name, entry in optimizer.full_state_dict(model=model).get("state", {}).items():  # rank 0 has them
        weight, place = entry.get("master_param", model.get_parameter(name)), Path(folder) / "zero" / name
        for file, value in [("fp32", weight), *((key, entry[key]) for key in ("exp_avg", "exp_avg_sq"))]:
            old, new = torch.load(place / f"{file}.pt", weights_only=True), value.detach().float().cpu()
            torch.save({**old, "param": new} if isinstance(old, dict) else new.flatten(), place / f"{file}.pt")
        if (place / "step.pt").exists():
            torch.save(int(entry["step"]), place / "step.pt")


if __name__ == "__main__":
    dist.init_process_group("gloo")
    theirs, model = torch.nn.RMSNorm(16), torch.nn.RMSNorm(16)
    adamw = torch.optim.AdamW(theirs.parameters(), lr=0.1)
    with tempfile.TemporaryDirectory() as folder, bw.ShardedAdamW(model.parameters(), lr=0.1) as optimizer:
        for step in range(6):
            if step == 3:  # each rank writes a folder of its own here, which is not needed with a real checkpoint
                (place := Path(folder) / "zero" / "weight").mkdir(parents=True)
                for key, value in {"fp32": theirs.weight.detach(), **adamw.state[theirs.weight]}.items():
                    torch.save(value.flatten(), place / f"{key}.pt")
                from_deepspeed(folder, model, optimizer)
            for net, opt in [(theirs, adamw), (model, optimizer)][: 1 if step < 3 else 2]:
                opt.zero_grad()
                (loss := (net(torch.eye(16)) - 1).square().mean()).backward()
                opt.step()
                print(f"rank {dist.get_rank()} step {step}: {type(opt).__name__} loss {loss.item()}", flush=True)
    dist.destroy_process_group()
