"""Bytes a parameter on each rank: what five ways to train with AdamW take, by the number of ranks.

    python examples/memory_formula.py            # a table for the GPT of `make demo`

All numbers are fp32 (4 bytes), and AdamW keeps two states a parameter. The formula counts what is held because of the
training system. It leaves out what is the same for all systems (activations, the gradient that autograd is at) and what
differs by machine (memory of gloo or NCCL, padding, what pools round up, buckets beyond two where a peer is slow).

| system                  | parameters | gradients | states | buffers                                             |
|-------------------------|------------|-----------|--------|-----------------------------------------------------|
| DDP                     | 4          | 4         | 8      | 0: gradients lie in the buckets (as bucket views)   |
| ZeroRedundancyOptimizer | 4          | 4         | 8 / R  | 0: parameters and gradients lie in the buckets      |
| FSDP2                   | 4 / R      | 4 / R     | 8 / R  | 4 blocks and the root                               |
| bw.ShardedAdamW         | 4          | 4 / R     | 8 / R  | 2 buckets                                           |
| bw.shard                | 4 / R      | 4 / R     | 8 / R  | 4 blocks, and the root twice                        |

FSDP2 holds, in the backward of a block, that block's whole parameters and whole gradients, the gathered parameters of the
next block, and the input of the last block's reduce-scatter. bw.shard has places for the whole parameters of two blocks and
the root, and gradient buckets for two blocks and the root. Without ``gradient_as_bucket_view=True`` DDP takes 4 bytes
more. One rank shards nothing and needs no buffers: 16 bytes in each row.
"""

from __future__ import annotations

from dataclasses import dataclass

SYSTEMS = ("ddp", "zero", "fsdp2", "bw.ShardedAdamW", "bw.shard")
PARTS = ("parameters", "gradients", "optimizer states", "buffers")


@dataclass(frozen=True)
class Sizes:
    """Elements of a model."""

    parameters: int
    block: int  # of one block, which is a unit of FSDP2 and bw.shard
    root: int  # of what is in no block


GPT_OF_DEMO = Sizes(parameters=85_301_760, block=7_087_872, root=247_296)


def bytes_per_parameter(
    system: str, ranks: int, sizes: Sizes, *, bucket_bytes: int = 16 << 20, bucket_view: bool = True
) -> dict[str, float]:
    """Bytes of each of `PARTS` on a rank, divided by the parameters of the whole model.

    ``bucket_bytes`` is the size of a bucket of bw.ShardedAdamW; its default is that of the CPU. ``bucket_view`` is DDP's
    ``gradient_as_bucket_view``. Raises ValueError for another system, or less than one rank.
    """
    if system not in SYSTEMS or ranks < 1:
        raise ValueError(f"system {system!r} on {ranks} ranks: expected one of {SYSTEMS} on 1 or more")
    root, block = (4 * elements / sizes.parameters for elements in (sizes.root, sizes.block))
    copies = 0 if bucket_view or ranks == 1 else 4
    params, grads, states, buffers = {
        "ddp": (4, 4, 8, copies),
        "zero": (4, 4, 8 / ranks, copies),
        "fsdp2": (4 / ranks, 4 / ranks, 8 / ranks, 4 * block + root),
        "bw.ShardedAdamW": (4, 4 / ranks, 8 / ranks, 2 * bucket_bytes / sizes.parameters),
        "bw.shard": (4 / ranks, 4 / ranks, 8 / ranks, 4 * block + 2 * root),
    }[system]
    return dict(zip(PARTS, (params, grads, states, 0 if ranks == 1 else buffers), strict=True))


def main() -> None:
    print(f"{'ranks':>5}" + "".join(f"{system:>17}" for system in SYSTEMS))
    for ranks in (2**power for power in range(10)):
        sums = [sum(bytes_per_parameter(system, ranks, GPT_OF_DEMO).values()) for system in SYSTEMS]
        print(f"{ranks:>5}" + "".join(f"{total:>17.2f}" for total in sums))


if __name__ == "__main__":
    main()
