"""A narrow Llama with torch's FSDP2. The flat buffers of its collectives come from a bucketwheel pool with planned addresses.

torchrun --nproc-per-node 2 examples/fsdp2_pool.py
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import bucketwheel as bw

WIDTH, HIDDEN, KV, VOCABULARY, LAYERS = 128, 448, 32, 4008, 8  # 1/32 of the width of Llama 3 8B, 8 of its 32 layers


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        sizes = {"q": (WIDTH, WIDTH), "k": (WIDTH, KV), "v": (WIDTH, KV), "o": (WIDTH, WIDTH)}
        sizes |= {"gate": (WIDTH, HIDDEN), "up": (WIDTH, HIDDEN), "down": (HIDDEN, WIDTH)}
        self.linear = nn.ModuleDict({name: nn.Linear(*size, bias=False) for name, size in sizes.items()})
        self.norms = nn.ModuleList(nn.RMSNorm(WIDTH) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = {name: self.linear[name](self.norms[0](x)).unflatten(-1, (-1, 16)).transpose(1, 2) for name in "qkv"}
        attended = nn.functional.scaled_dot_product_attention(*heads.values(), is_causal=True, enable_gqa=True)
        x = x + self.linear["o"](attended.transpose(1, 2).flatten(2))
        y = self.norms[1](x)
        return x + self.linear["down"](nn.functional.silu(self.linear["gate"](y)) * self.linear["up"](y))


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), *[Block() for _ in range(LAYERS)])
    model.append(nn.RMSNorm(WIDTH)).append(nn.Linear(WIDTH, VOCABULARY, bias=False))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    for module in (*model[:-2], list(model[-2:]), model):
        fully_shard(module, mesh=mesh, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    # The buffers are small, so the pool allocates small slabs. Step 0 is traced; later steps follow the plan made from it.
    with bw.pool_for_fsdp2(model, bw.Pool(min_slab_bytes=4096)) as pooled:
        for step in range(20):
            tokens = torch.randint(VOCABULARY // 40, (4, 32), generator=torch.Generator().manual_seed(step % 2))
            loss = nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1).float(), tokens[:, 1:].flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if dist.get_rank() == 0 and step in (0, 1, 19):
                nbytes = pooled.pool.stats().reserved_bytes
                print(f"step {step} loss {loss.item():.3f}: {nbytes:,} bytes")
        if dist.get_rank() == 0:
            print(pooled.pool.explain())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
