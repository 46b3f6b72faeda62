"""Gather two tensors in one operation while the rank computes something else.

torchrun --nproc-per-node 2 examples/gather_while_computing.py

The tensors lie in the communicator's pool, so the ranks read each other's memory directly; tensors from elsewhere work
too, through a staging copy.
"""

import torch
import torch.distributed as dist

import bucketwheel as bw

ROWS, COLUMNS = 1024, 256


def main() -> None:
    dist.init_process_group("gloo")
    with bw.Communicator(name="example") as comm:
        numel = comm.size * ROWS * COLUMNS
        weights_lease = comm.pool.acquire("weights", 4 * numel)
        scales_lease = comm.pool.acquire("scales", 2 * comm.size * ROWS)
        weights = weights_lease.tensor(torch.float32, (comm.size, ROWS, COLUMNS))
        scales = scales_lease.tensor(torch.bfloat16, (comm.size, ROWS))
        weights[comm.rank] = comm.rank + 1
        scales[comm.rank] = 0.5

        # In place: each rank's input is its own part of the output. Both tensors go in one launch.
        handle = bw.all_gather([weights, scales], [weights[comm.rank], scales[comm.rank]], comm)
        meanwhile = torch.ones(512, 512) @ torch.ones(512, 512)
        handle.wait()

        total = (weights * scales.unsqueeze(2)).sum().item()
        expected = 0.5 * ROWS * COLUMNS * comm.size * (comm.size + 1) / 2
        if comm.rank == 0:
            print(
                f"{handle.nbytes / 1e6:.1f} MB gathered; sum {total:.0f}, expected {expected:.0f}; computed {meanwhile[0, 0]:.0f}"
            )
        # Whoever gets these bytes next waits for the operation first.
        weights_lease.release(after=handle)
        scales_lease.release(after=handle)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
