"""The training systems with sharded parameters (ZeRO-3) that bench_shard.py compares; models and phases are those of
gpt_systems.py. All have a block of the GPT as their unit, gather it before its forward and again before its backward, and
keep what is in no block (embeddings, last norm, head) from the begin of forward to the end of backward.
"""

from __future__ import annotations

import ctypes
import itertools
from typing import Any

import torch
from gpt_systems import (
    BETAS,
    EPS,
    LR,
    MAX_NORM,
    WEIGHT_DECAY,
    AdamScalars,
    Bare,
    Block,
    Ddp,
    Fsdp2,
    GptConfig,
    Ours,
    System,
    pointer,
)
from torch import Tensor


class Shard(System):
    """bucketwheel.shard(units=(Block,), prefetch=1) + ShardedAdamW."""

    def __init__(self, config: GptConfig) -> None:
        import bucketwheel as bw

        super().__init__(config)
        self.model: Any = bw.shard(self.model, (Block,), prefetch=1)
        self.optimizer = bw.ShardedAdamW(
            self.model.parameters(), lr=LR, betas=BETAS, eps=EPS, weight_decay=WEIGHT_DECAY
        )

    def clip(self) -> None:
        self.optimizer.clip_grad_norm_(MAX_NORM)

    def full_parameters(self) -> Tensor:
        with self.model.full_params():
            return super().full_parameters()

    def close(self) -> None:
        self.optimizer.close()


class Fsdp2Tuned(Fsdp2):
    """`Fsdp2` with the options that make it faster on the CPU, of those that need no more memory than prefetch=1 of ours.

    By default FSDP2 prefetches a block in backward and none in forward, and on the CPU it waits for each gather as soon as it
    has started it. Here gloo's thread gathers the next block while this one computes, in forward too. Gradients are summed, and
    this rank's part is divided, in the place of ReduceOp.AVG. (A separate process group for reduce-scatter changed nothing.)
    """

    def __init__(self, config: GptConfig) -> None:
        super().__init__(config)
        order: list[Any] = [self.model, *self.model.blocks]
        for one, following in itertools.pairwise(order):
            one.set_modules_to_forward_prefetch([following])
        for one in order:
            one.set_force_sum_reduction_for_comms(True)
        order[0]._set_unshard_async_op(True)


class BareShard(Bare):
    """The same bytes moved by the loops of bare_loops.cpp: the limit, not an optimizer. Two ranks, fp32.

    Each rank has flat parameters of which it owns a half of every block. Before the forward of a block, and again before
    its backward, the peer's half is copied to its place; the own half lies there. Gradients of a block are packed, and let go,
    when the backward of the next one begins. Clip and step are one call for all blocks.
    """

    def __init__(self, config: GptConfig) -> None:
        super().__init__(config)
        model = self.model
        groups = [[model.token, model.position], *([block] for block in model.blocks), [model.norm, model.head]]
        self.units = [[p for module in group for p in module.parameters()] for group in groups]
        ends = list(itertools.accumulate(sum(p.numel() for p in unit) for unit in self.units))
        self.begins = [0, *ends[:-1]]
        cuts = [(begin, begin + (end - begin) // 32 * 16, end) for begin, end in zip(self.begins, ends, strict=True)]
        own, self.others = ([cut[rank : rank + 2] for cut in cuts] for rank in (self.rank, 1 - self.rank))
        self.own_begins = (ctypes.c_int64 * len(own))(*(begin for begin, _ in own))
        self.own_numels = (ctypes.c_int64 * len(own))(*(end - begin for begin, end in own))
        self.m, self.v = (torch.zeros(sum(self.own_numels)) for _ in range(2))
        self.unit_numels = [(ctypes.c_int64 * len(unit))(*(p.numel() for p in unit)) for unit in self.units]
        self.loops.bare_step_parts.restype = ctypes.c_double
        model.register_forward_pre_hook(lambda *_: self.gather(0, len(self.units) - 1))
        for number, block in enumerate(model.blocks, start=1):
            block.register_forward_pre_hook(lambda *_, number=number: self.gather(number))
            block.register_forward_hook(lambda _, __, output, number=number: self.hook_backward(number, output))

    def gather(self, *units: int) -> None:
        for begin, end in (self.others[unit] for unit in units):
            theirs, here = (self.flat[rank].data_ptr() + 4 * begin for rank in (1 - self.rank, self.rank))
            ctypes.memmove(here, theirs, 4 * (end - begin))

    def hook_backward(self, unit: int, output: Tensor) -> None:
        output.grad_fn.register_prehook(lambda _: self.before_backward(unit))  # type: ignore[union-attr]

    def before_backward(self, unit: int) -> None:
        self.pack(unit + 1)
        self.gather(unit)

    def pack(self, unit: int) -> None:
        into = ctypes.c_void_p(self.grads[self.rank].data_ptr() + 4 * self.begins[unit])
        grads = [p.grad for p in self.units[unit]]
        sources = (ctypes.c_void_p * len(grads))(*(g.data_ptr() for g in grads if g is not None))
        self.loops.bare_pack(into, sources, self.unit_numels[unit], ctypes.c_int64(len(grads)))
        for parameter in self.units[unit]:
            parameter.grad = None

    def clip(self) -> None:
        self.pack(1)
        self.pack(0)

    def step(self) -> None:
        self.steps += 1
        peer = 1 - self.rank
        self.loops.bare_step_parts(
            pointer(self.control),
            self.rank,
            *(pointer(t) for t in (self.grads[self.rank], self.grads[peer], self.flat[self.rank], self.m, self.v)),
            self.own_begins,
            self.own_numels,
            ctypes.c_int64(len(self.own_numels)),
            ctypes.byref(AdamScalars.at_step(self.steps, 0.5)),
            ctypes.c_double(MAX_NORM),
        )

    def full_parameters(self) -> Tensor:
        self.gather(*range(len(self.units)))
        return super().full_parameters()


SYSTEMS: dict[str, type[System]] = {
    "ours": Shard,
    "fsdp2": Fsdp2,
    "fsdp2 tuned": Fsdp2Tuned,
    "bare loops": BareShard,
    "ddp": Ddp,
    "zero2": Ours,
}
FSDP2 = {  # its configurations; blocks have reshard_after_forward=True, the root False, in each
    "fsdp2": "its defaults: prefetch in backward, gathers that are waited for at once",
    "fsdp2 tuned": "set_modules_to_forward_prefetch([next]), _set_unshard_async_op, set_force_sum_reduction_for_comms",
}
