"""Sharded parameters (ZeRO-3) in a small training, saved and loaded: torchrun --nproc-per-node 2 examples/sharded_params.py"""

import contextlib
import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

import bucketwheel as bw

TOKENS, WIDTH, STEPS = 32, 64, 60
NEXT = (5 * torch.arange(TOKENS) + 3) % TOKENS  # the model learns which token follows each token


def make() -> tuple[nn.Module, bw.ShardedAdamW]:
    blocks = [nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(4)]
    model = nn.Sequential(nn.Embedding(TOKENS, WIDTH), *blocks, nn.Linear(WIDTH, TOKENS))
    bw.shard(model, units=blocks)  # gathers a block when it computes; all other parameters are the root unit
    return model, bw.ShardedAdamW(model.parameters(), lr=3e-3)  # uses the process group of bw.shard


def train_step(model: nn.Module, optimizer: bw.ShardedAdamW, step: int) -> float:
    batches = torch.randint(TOKENS, (2, 32), generator=torch.Generator().manual_seed(2 * step + rank))
    for micro, tokens in enumerate(batches):
        with model.no_sync() if micro == 0 else contextlib.nullcontext():  # the second backward reduces the sum
            loss = nn.functional.cross_entropy(model(tokens), NEXT[tokens])
            (loss / 2).backward()
    optimizer.clip_grad_norm_(1.0)
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


dist.init_process_group("gloo")
rank, (model, optimizer) = dist.get_rank(), make()
losses = [train_step(model, optimizer, step) for step in range(STEPS)]
with torch.no_grad():
    right = int((model(torch.arange(TOKENS)).argmax(1) == NEXT).sum())
    model.unshard_all()  # keeps all units until the next step, so that no token needs a gather
    text = [rank]
    while len(text) < 8:
        text.append(model(torch.tensor(text[-1:])).argmax().item())
print(f"rank {rank}: loss {losses[0]:.3f} to {losses[-1]:.3f}, {right} of {TOKENS} right, generated {text}", flush=True)
with tempfile.TemporaryDirectory() as own:
    dist.broadcast_object_list(folder := [own])  # all ranks use the folder of rank 0
    dcp.save({"model": model.state_dict(), "optim": optimizer.state_dict()}, checkpoint_id=folder[0])
    other, other_optimizer = make()
    dcp.load(state := {"model": other.state_dict(), "optim": other_optimizer.state_dict()}, checkpoint_id=folder[0])
    dist.barrier()  # rank 0 removes the folder afterwards
other.load_state_dict(state["model"])
other_optimizer.load_state_dict(state["optim"])
found = [train_step(*each, STEPS) for each in ((model, optimizer), (other, other_optimizer))]
print(f"rank {rank}: the next loss is {found[0]!r}, from the checkpoint {found[1]!r}", flush=True)
if rank == 0:
    print(model.plan_report(), flush=True)
for each in (optimizer, other_optimizer):
    each.close()
dist.destroy_process_group()
