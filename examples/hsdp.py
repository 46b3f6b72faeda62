"""HSDP: shard within groups of 2 ranks, replicate across the groups: torchrun --nproc-per-node 4 examples/hsdp.py

On a cluster each group is a host: only the shards of the gradients cross the slow network between hosts.
"""

import torch
import torch.distributed as dist
from torch import nn

import bucketwheel as bw


class Block(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + nn.functional.gelu(super().forward(x))


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[Block(32, 32) for _ in range(3)], nn.Linear(32, 1))


def train(model: nn.Module, optimizer: bw.ShardedAdamW) -> list[float]:
    data, losses = torch.Generator().manual_seed(dist.get_rank()), []
    for _ in range(60):
        x = torch.randn(64, 32, generator=data)
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        loss.backward()
        optimizer.clip_grad_norm_(1.0)  # the norm over all ranks
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def main() -> None:
    dist.init_process_group("gloo")
    rank, mesh = dist.get_rank(), dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    shard, replicate = mesh["shard"].get_group(), mesh["replicate"].get_group()

    model = make_model()  # gradients and states in shards, parameters not
    optimizer = bw.ShardedAdamW(model.parameters(), lr=1e-2, process_group=shard, replicate_group=replicate)
    losses = train(model, optimizer)
    states = optimizer.memory_summary()["states"] / sum(p.numel() for p in model.parameters())
    print(f"rank {rank}: loss {losses[0]:.2f} to {losses[-1]:.2f}, states {states:.1f} bytes a parameter", flush=True)
    optimizer.close()

    # Parameters in shards too. The results have the same bits.
    sharded = bw.shard(make_model(), units=(Block,), group=shard, replicate=replicate)
    optimizer = bw.ShardedAdamW(sharded.parameters(), lr=1e-2)
    same_losses = train(sharded, optimizer) == losses
    with sharded.full_params():
        same = all(torch.equal(p, q) for p, q in zip(sharded.parameters(), model.parameters(), strict=True))
    print(f"rank {rank}: losses are equal: {same_losses}, parameters are equal: {same}", flush=True)
    optimizer.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
