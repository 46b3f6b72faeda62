"""Collectives from research code: layers whose weights are sharded, gathered one ahead of the computation.

torchrun --nproc-per-node 2 examples/collectives.py      # on GPUs where every rank has one, else on the CPU

Two buffers take the weights in turns: while layer i computes from one, layer i + 1 is gathered into the other. A request
is checked once and started in every step.
"""

import os

import torch
import torch.distributed as dist

import bucketwheel as bw

LAYERS, WIDTH = 6, 512


def main() -> None:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    device = "cuda" if torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]) else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        gathers, reduces = bw.Communicator.pair(name="example")  # an all-gather and a reduce-scatter run at once
    else:
        gathers = reduces = bw.Communicator(name="example")

    torch.manual_seed(0)
    weights = [torch.randn(WIDTH, WIDTH) / WIDTH**0.5 for _ in range(LAYERS)]
    inputs = torch.randn(64, WIDTH)
    shards = [w.chunk(world)[rank].to(device) for w in weights]
    leases = [gathers.pool.acquire(f"weights {i}", 4 * WIDTH**2) for i in range(2)]
    buffers = [lease.tensor(torch.float32, (WIDTH, WIDTH)) for lease in leases]
    layers = [bw.AllGatherRequest(buffers[i % 2], shards[i], gathers) for i in range(LAYERS)]

    x = (inputs * (rank + 1)).to(device)  # every rank its own batch
    coming = layers[0].start()
    for i in range(LAYERS):
        coming.wait()  # CUDA: the current stream waits, not the host
        if i + 1 < LAYERS:
            coming = layers[i + 1].start()  # behind what the current stream does with that buffer
        x = torch.relu(x @ buffers[i % 2].T)

    products = [x.T @ x, x.T.abs() @ x.abs()]  # one operation: summed over the ranks, and this rank gets its rows
    sums = [product.new_empty(WIDTH // world, WIDTH) for product in products]
    bw.reduce_scatter(sums, products, reduces, after=[coming]).wait()

    y = inputs.clone()
    for w in weights:
        y = torch.relu(y @ w.T)
    expected = (y.T @ y).chunk(world)[rank] * sum((r + 1) ** 2 for r in range(world))
    difference = max(float((s.cpu() - expected).abs().max() / expected.abs().max()) for s in sums)
    print(f"rank {rank} on {device}: the largest relative difference is {difference:.1e}")
    gathers.close()
    reduces.close()
    dist.destroy_process_group()


main()
