"""A byte-level GPT and the training systems that bench_optim.py compares on it.

Every system trains its own copy of the model with AdamW and gradient clipping, data parallel over two CPU ranks,
through the same five phases: zero_grad, forward, backward, clip, step. `step` ends when the parameters are ready for
any reader, so a system that gathers them in the background pays for it here.
"""

from __future__ import annotations

import ctypes
import importlib.util
import math
import mmap
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as functional
from harness import load_native
from torch import Tensor, nn

LR, WEIGHT_DECAY, BETAS, EPS, MAX_NORM = 1e-3, 0.1, (0.9, 0.999), 1e-8, 1.0


@dataclass(frozen=True)
class GptConfig:
    layers: int = 11
    width: int = 512
    heads: int = 8
    context: int = 64
    vocabulary: int = 256


class Block(nn.Module):
    def __init__(self, config: GptConfig) -> None:
        super().__init__()
        width = config.width
        self.heads = config.heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, -1)
        )
        x = x + self.out(functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class Gpt(nn.Module):
    """tokens [batch, length] int64 -> mean next-byte loss, a scalar."""

    def __init__(self, config: GptConfig) -> None:
        super().__init__()
        torch.manual_seed(1234)  # every copy, on every rank, starts from the same parameters
        self.token = nn.Embedding(config.vocabulary, config.width)
        self.position = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        x = self.token(inputs) + self.position.weight[: inputs.shape[1]]
        for block in self.blocks:
            x = block(x)
        return functional.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


def token_batches(rank: int, config: GptConfig, count: int) -> list[Tensor]:
    """`count` batches of 1 x (context + 1) tokens, different on every rank, with something to learn (short repeats)."""
    generator = torch.Generator().manual_seed(rank)
    motif = torch.randint(config.vocabulary, (count, 8), generator=generator)
    return list(motif.repeat(1, config.context // 8 + 1)[:, None, : config.context + 1])


class System:
    """One way to train. Subclasses replace what differs from plain single-process training."""

    def __init__(self, config: GptConfig) -> None:
        self.model = Gpt(config)
        self.runner: Callable[[Tensor], Tensor] = self.model
        self.optimizer: Any = None

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def clip(self) -> None:
        nn.utils.clip_grad_norm_(self.model.parameters(), MAX_NORM)

    def step(self) -> None:
        self.optimizer.step()

    def full_parameters(self) -> Tensor:
        """All parameters as one flat tensor, equal on all ranks. Collective for systems that shard them."""
        return torch.cat([p.detach().flatten() for p in self.model.parameters()])

    def close(self) -> None:
        pass

    def train_step(self, tokens: Tensor, mark: Callable[[str], None] = lambda phase: None) -> Tensor:
        """One step; `mark(phase)` is called at the end of each phase. Returns the detached loss of this rank."""
        self.zero_grad()
        mark("zero_grad")
        loss = self.runner(tokens)
        mark("forward")
        self.backward(loss)
        mark("backward")
        self.clip()
        mark("clip")
        self.step()
        mark("step")
        return loss.detach()


class Plain(System):
    """Forward and backward alone: what every system's step time is compared with."""

    def zero_grad(self) -> None:
        for parameter in self.model.parameters():
            parameter.grad = None

    def clip(self) -> None:
        pass

    def step(self) -> None:
        pass


def adamw(parameters: Any) -> torch.optim.AdamW:
    return torch.optim.AdamW(parameters, lr=LR, betas=BETAS, eps=EPS, weight_decay=WEIGHT_DECAY, fused=True)


class Ddp(System):
    """DistributedDataParallel(gradient_as_bucket_view=True) + fused AdamW."""

    def __init__(self, config: GptConfig) -> None:
        super().__init__(config)
        self.runner = nn.parallel.DistributedDataParallel(self.model, gradient_as_bucket_view=True)
        self.optimizer = self.make_optimizer()

    def make_optimizer(self) -> Any:
        return adamw(self.model.parameters())


class DdpKeep(Ddp):
    """The same with zero_grad(set_to_none=False): autograd adds into the bucket views."""

    def zero_grad(self) -> None:
        self.optimizer.zero_grad(set_to_none=False)


class Zero(Ddp):
    """DDP + ZeroRedundancyOptimizer with fused AdamW: states sharded, gradients not."""

    as_bucket_view = False

    def make_optimizer(self) -> Any:
        from torch.distributed.optim import ZeroRedundancyOptimizer

        return ZeroRedundancyOptimizer(
            self.model.parameters(),
            optimizer_class=torch.optim.AdamW,
            parameters_as_bucket_view=self.as_bucket_view,
            lr=LR,
            betas=BETAS,
            eps=EPS,
            weight_decay=WEIGHT_DECAY,
            fused=True,
        )


class ZeroView(Zero):
    """The same with parameters_as_bucket_view=True: one broadcast per bucket instead of one per parameter."""

    as_bucket_view = True


class Fsdp2(System):
    """fully_shard on every block and the root + AdamW: parameters, gradients and states sharded."""

    reshard: bool | None = None

    def __init__(self, config: GptConfig) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        super().__init__(config)
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for block in self.model.blocks:
            fully_shard(block, mesh=mesh, reshard_after_forward=self.reshard)
        fully_shard(self.model, mesh=mesh, reshard_after_forward=self.reshard)
        self.optimizer = adamw(self.model.parameters())

    def full_parameters(self) -> Tensor:
        return torch.cat([p.full_tensor().detach().flatten() for p in self.model.parameters()])  # type: ignore[operator]


class Fsdp2Keep(Fsdp2):
    """The same with reshard_after_forward=False: no second all-gather in backward, more memory."""

    reshard = False


class DeepSpeed(System):
    """DeepSpeed ZeRO-1: states sharded; clips inside its step."""

    stage = 1

    def __init__(self, config: GptConfig) -> None:
        os.environ["DS_ACCELERATOR"] = "cpu"
        import deepspeed
        import deepspeed.ops

        super().__init__(config)
        # Its shared-memory extension serves inference only and takes a minute to compile.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        os.environ |= {"RANK": str(dist.get_rank()), "LOCAL_RANK": str(dist.get_rank()), "WORLD_SIZE": "2"}
        settings = {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_clipping": MAX_NORM,
            "zero_optimization": {"stage": self.stage},
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
        }
        optimizer = adamw(self.model.parameters())
        self.engine = deepspeed.initialize(
            model=self.model, optimizer=optimizer, config=settings, dist_init_required=False
        )[0]
        self.runner = self.engine

    def zero_grad(self) -> None:
        pass  # part of the engine's step

    def backward(self, loss: Tensor) -> None:
        self.engine.backward(loss)

    def clip(self) -> None:
        pass  # part of the engine's step

    def step(self) -> None:
        self.engine.step()


class DeepSpeed2(DeepSpeed):
    """DeepSpeed ZeRO-2: gradients and states sharded."""

    stage = 2


class Ours(System):
    """bucketwheel.ShardedAdamW: gradients and states sharded."""

    def __init__(self, config: GptConfig) -> None:
        from bucketwheel import ShardedAdamW

        super().__init__(config)
        self.optimizer = ShardedAdamW(self.model.parameters(), lr=LR, betas=BETAS, eps=EPS, weight_decay=WEIGHT_DECAY)

    def clip(self) -> None:
        self.optimizer.clip_grad_norm_(MAX_NORM)

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.param_sync()

    def close(self) -> None:
        self.optimizer.close()


class AdamScalars(ctypes.Structure):
    """struct AdamScalars of bare_loops.cpp."""

    _fields_ = [
        (name, ctypes.c_float)
        for name in ("lr", "beta1", "beta2", "eps", "weight_decay", "correction1", "correction2_sqrt", "grad_factor")
    ]

    @classmethod
    def at_step(cls, step: int, grad_factor: float) -> AdamScalars:
        correction1, correction2 = 1 - BETAS[0] ** step, 1 - BETAS[1] ** step
        return cls(LR, *BETAS, EPS, WEIGHT_DECAY, correction1, math.sqrt(correction2), grad_factor)


def pointer(tensor: Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr())


class Bare(System):
    """The same bytes moved by the loops of bare_loops.cpp: the limit, not an optimizer. Two ranks, fp32."""

    def __init__(self, config: GptConfig) -> None:
        super().__init__(config)
        self.rank = dist.get_rank()
        self.parameters = list(self.model.parameters())
        self.half = -(-sum(p.numel() for p in self.parameters) // 32) * 16
        self.control, self.grads, self.flat = self._map_shared()
        offset = 0
        for parameter in self.parameters:
            view = self.flat[self.rank][offset : offset + parameter.numel()].view_as(parameter)
            parameter.data = view.copy_(parameter.detach())
            offset += parameter.numel()
        self.m, self.v = torch.zeros(self.half), torch.zeros(self.half)
        self.numels = (ctypes.c_int64 * len(self.parameters))(*(p.numel() for p in self.parameters))
        self.loops = load_native("bare_loops.cpp")
        self.loops.bare_exchange_and_step.restype = ctypes.c_double
        self.steps = 0
        dist.barrier()  # both have filled their parameters before either copies into the other's

    def _map_shared(self) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        """A control page, then per rank a flat gradient buffer and a flat parameter buffer of 2 x half floats."""
        region_bytes = -(-8 * self.half // 4096) * 4096
        size_bytes = 4096 + 4 * region_bytes
        path: list[Any] = [None]
        if self.rank == 0:
            fd, path[0] = tempfile.mkstemp(prefix="bw-bench-", dir="/dev/shm")
            os.ftruncate(fd, size_bytes)
        dist.broadcast_object_list(path)
        if self.rank != 0:
            fd = os.open(path[0], os.O_RDWR)
        shared = torch.frombuffer(mmap.mmap(fd, size_bytes), dtype=torch.float32)
        os.close(fd)
        dist.barrier()
        if self.rank == 0:
            os.unlink(path[0])
        regions = [shared[(4096 + i * region_bytes) // 4 :][: 2 * self.half] for i in range(4)]
        return shared[:1024], regions[:2], regions[2:]

    def zero_grad(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None

    def clip(self) -> None:
        grads = [p.grad for p in self.parameters]
        sources = (ctypes.c_void_p * len(grads))(*(g.data_ptr() for g in grads if g is not None))
        self.loops.bare_pack(pointer(self.grads[self.rank]), sources, self.numels, ctypes.c_int64(len(grads)))

    def step(self) -> None:
        self.steps += 1
        mine = slice(self.rank * self.half, (self.rank + 1) * self.half)
        peer = 1 - self.rank
        self.loops.bare_exchange_and_step(
            pointer(self.control),
            self.rank,
            *(
                pointer(t[mine])
                for t in (self.grads[self.rank], self.grads[peer], self.flat[self.rank], self.flat[peer])
            ),
            pointer(self.m),
            pointer(self.v),
            ctypes.c_int64(self.half),
            ctypes.byref(AdamScalars.at_step(self.steps, 0.5)),
            ctypes.c_double(MAX_NORM),
        )


SYSTEMS: dict[str, type[System]] = {
    "ours": Ours,
    "ddp": Ddp,
    "ddp keep": DdpKeep,
    "zero": Zero,
    "zero view": ZeroView,
    "fsdp2": Fsdp2,
    "fsdp2 keep": Fsdp2Keep,
    "deepspeed 1": DeepSpeed,
    "deepspeed 2": DeepSpeed2,
    "bare loops": Bare,
    "plain": Plain,
}
PEERS = (
    "ddp",
    "ddp keep",
    "zero",
    "zero view",
    "fsdp2",
    "fsdp2 keep",
    *(["deepspeed 1", "deepspeed 2"] if importlib.util.find_spec("deepspeed") else []),
)


def build(name: str, config: GptConfig) -> System:
    """Build one system; raises RuntimeError that says what is missing when it cannot be imported here."""
    try:
        return SYSTEMS[name](config)
    except ImportError as error:
        raise RuntimeError(f"system {name!r} cannot run here: {error}; leave it out with --systems") from error
