"""Train, save, and resume on another number of ranks. Each run trains 10 more steps from the checkpoint of the last run:

    torchrun --nproc-per-node 2 examples/elastic_resume.py --folder run
    torchrun --nproc-per-node 1 examples/elastic_resume.py --folder run

Losses do not depend on the number of ranks: the samples of a step follow from its number, and each rank takes its part.
"""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import bucketwheel as bw

BATCH = 12  # samples of a step, of all ranks together; a number of ranks must divide it


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, default=Path("elastic_run"), help="all ranks see the same folder")
    parser.add_argument("--steps", type=int, default=10)
    options = parser.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 1))
    with bw.ShardedAdamW(model.named_parameters(), lr=1e-2) as optimizer:
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.98)
        first = 0
        if (options.folder / ".metadata").exists():  # the last file of a save: its checkpoint is complete
            extra = bw.checkpoint.load(options.folder, model, optimizer)
            scheduler.load_state_dict(extra["scheduler"])
            first = extra["step"]
        if rank == 0:
            print(f"{world} rank(s) begin after step {first}", flush=True)

        for step in range(first, first + options.steps):
            samples = torch.randn(BATCH, 16, generator=torch.Generator().manual_seed(step))
            part = samples.chunk(world)[rank]
            loss = (model(part) - part.sum(1, keepdim=True)).square().mean()
            loss.backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            mean = loss.detach() / world
            dist.all_reduce(mean)
            if rank == 0:
                print(f"step {step + 1} loss {mean.item():.6f}", flush=True)

        extra = {"step": first + options.steps, "scheduler": scheduler.state_dict()}
        bw.checkpoint.save(options.folder, model, optimizer, extra)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
