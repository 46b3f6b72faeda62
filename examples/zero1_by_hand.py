"""Sharded optimizer states (ZeRO-1) from low-level operations: reduce-scatter, norm, all-reduce, Adam step, all-gather.

torchrun --nproc-per-node 2 examples/zero1_by_hand.py
"""

import math

import torch
import torch.distributed as dist

import bucketwheel as bw


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    model = torch.nn.Sequential(torch.nn.Linear(32, 256), torch.nn.GELU(), torch.nn.Linear(256, 1))
    with bw.Communicator(name="zero1") as comm:
        # Parameters and gradients become views of two flat buffers. All ranks can read this memory of each other.
        numel = math.ceil(sum(p.numel() for p in model.parameters()) / comm.size) * comm.size
        params, grads = (comm.pool.empty(numel, torch.float32).zero_() for _ in range(2))
        begin = 0
        for p in model.parameters():
            params[begin : begin + p.numel()] = p.detach().flatten()
            p.data = params[begin : begin + p.numel()].view_as(p)
            p.grad = grads[begin : begin + p.numel()].view_as(p)
            begin += p.numel()
        comm.broadcast(params).wait()  # all ranks start from the weights of rank 0
        param_shard, grad_shard = (flat.view(comm.size, -1)[comm.rank] for flat in (params, grads))
        exp_avg, exp_avg_sq = torch.zeros_like(param_shard), torch.zeros_like(param_shard)

        data = torch.Generator().manual_seed(comm.rank)
        for step in range(1, 201):
            grads.zero_()
            x = torch.randn(256, 32, generator=data)
            loss = (model(x) - x.sin().sum(1, keepdim=True)).square().mean()
            loss.backward()
            bw.reduce_scatter(grad_shard, grads, comm).wait()  # sums; grad_scale divides them by the world size
            totals = torch.stack([bw.l2_norm([grad_shard]) ** 2, loss.detach().double()])
            comm.all_reduce(totals).wait()
            norm = totals[0].sqrt().item() / comm.size
            scale = min(1.0, 1.0 / (norm + 1e-6)) / comm.size
            bw.adam_step([param_shard], [grad_shard], [exp_avg], [exp_avg_sq], step, lr=3e-3, grad_scale=scale)
            bw.all_gather(params, param_shard, comm).wait()
            if comm.rank == 0 and (step == 1 or step % 40 == 0):
                print(f"step {step:3} loss {totals[1].item() / comm.size:.3f} gradient norm {norm:.2f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
