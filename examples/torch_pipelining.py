"""Pipeline and data parallelism by torch.distributed.pipelining: torchrun --nproc-per-node 4 examples/torch_pipelining.py

Ranks 0 and 1 run the first stage, ranks 2 and 3 the second. Each stage has a ShardedAdamW over its two ranks.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

import bucketwheel as bw

STEPS, MICRO_BATCHES, BATCH, WIDTH = 40, 4, 32, 16


def make_stages() -> list[nn.Module]:
    torch.manual_seed(0)
    first = nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU())
    return [first, nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 1))]


def batch_of(step: int, data_rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(2 * step + data_rank))
    return x, x.sum(1, keepdim=True)


def train_whole_model() -> list[torch.Tensor]:
    """The same training in one process."""
    model = nn.Sequential(*make_stages())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(STEPS):
        x, target = (torch.cat(both) for both in zip(batch_of(step, 0), batch_of(step, 1), strict=True))
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), target).backward()
        optimizer.step()
    return [p.detach() for p in model.parameters()]


dist.init_process_group("gloo")
mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("stage", "data"))
index, data_rank = mesh.get_coordinate()
model = make_stages()[index]
stage = PipelineStage(model, index, 2, torch.device("cpu"), group=mesh["stage"].get_group())  # no DDP around the model
schedule = Schedule1F1B(stage, MICRO_BATCHES, loss_fn=nn.functional.mse_loss)
optimizer = bw.ShardedAdamW(model.parameters(), lr=1e-2, process_group=mesh["data"].get_group())
for step in range(STEPS):
    x, target = batch_of(step, data_rank)
    losses: list[torch.Tensor] = []
    with optimizer.no_sync():  # the schedule runs all backwards and then divides the gradients by their number
        schedule.step(x) if index == 0 else schedule.step(target=target, losses=losses)
    optimizer.grad_sync(model.parameters())  # starts the reductions, while earlier stages still compute
    optimizer.step()
    optimizer.zero_grad()
    if losses and data_rank == 0 and step % 13 == 0:
        print(f"step {step} loss {torch.stack(losses).mean():.3f}", flush=True)
expected = train_whole_model()[:2] if index == 0 else train_whole_model()[2:]
difference = max(float((p.detach() - q).abs().max()) for p, q in zip(model.parameters(), expected, strict=True))
print(f"rank {dist.get_rank()}: parameters differ from one process by {difference:.1e} at most", flush=True)
optimizer.close()
dist.destroy_process_group()
