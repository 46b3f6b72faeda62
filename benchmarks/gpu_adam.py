"""Adam configurations of benchmarks/README.md on a GPU: tensors, our step through the optimizer's table, torch's steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from gpu_timing import random
from torch import Tensor

from bucketwheel.kernels import ops
from bucketwheel.kernels.adam_rows import AdamRows
from tests.gpu.device import DEVICE

__all__ = ["CONFIGS", "FOR_LOOP", "Config", "Tensors", "omitted_peers", "peers_of"]

F32, BF16 = torch.float32, torch.bfloat16
FUSED, FOREACH, FOR_LOOP = "torch fused", "torch foreach", "torch for-loop"
LR, BETAS, EPS, WEIGHT_DECAY = 1e-3, (0.9, 0.999), 1e-8, 0.1


@dataclass(frozen=True)
class Config:
    """``weight``: where the weight is kept: "param", "master" or "remainder". ``bytes_per``: read and written per element."""

    name: str
    p: torch.dtype
    g: torch.dtype
    state: torch.dtype
    weight: str
    bytes_per: int


CONFIGS = [
    Config("A", F32, F32, F32, "param", 28),
    Config("C", BF16, BF16, F32, "master", 30),
    Config("D", BF16, F32, F32, "master", 32),
    Config("E", BF16, BF16, F32, "remainder", 26),
    Config("F", BF16, BF16, BF16, "remainder", 18),
    Config("G", F32, F32, BF16, "param", 20),
    Config("H", BF16, BF16, BF16, "param", 14),
]


@dataclass
class Tensors:
    """Lists of one entry a parameter. ``offset``: elements by which each tensor begins beside a 512-byte boundary."""

    config: Config
    p: list[Tensor]
    g: list[Tensor]
    m: list[Tensor]
    v: list[Tensor]
    master: list[Tensor] = field(default_factory=list)
    remainder: list[Tensor] = field(default_factory=list)

    @staticmethod
    def make(config: Config, numels: Sequence[int], *, offset: int = 0) -> Tensors:
        def new(dtype: torch.dtype, scale: float = 1.0, positive: bool = False) -> list[Tensor]:
            return [random(n + offset, dtype, scale=scale, positive=positive)[offset:] for n in numels]

        made = Tensors(
            config, new(config.p), new(config.g, 1e-2), new(config.state, 1e-2), new(config.state, 1e-4, True)
        )
        if config.weight == "master":
            made.master = [p.float() for p in made.p]
        if config.weight == "remainder":
            made.remainder = [torch.randint(-(2**15), 2**15, (n,), dtype=torch.int16, device=p.device) for n, p in
                              zip(numels, made.p, strict=True)]  # fmt: skip
        return made

    @property
    def numel(self) -> int:
        return sum(p.numel() for p in self.p)

    @property
    def size_bytes(self) -> int:
        return self.config.bytes_per * self.numel

    def ours(self) -> Callable[[], None]:
        """The step as the optimizer does it: a table that is made once."""
        steps = torch.zeros(len(self.p), dtype=torch.int64, device=DEVICE.tensors)
        rows = AdamRows(steps, 0, resync=True)
        kept = {"exp_avg": self.m, "exp_avg_sq": self.v, "master_param": self.master, "remainder": self.remainder}
        for i, (p, g) in enumerate(zip(self.p, self.g, strict=True)):
            rows.add(i, 0, p, g, {name: tensors[i] for name, tensors in kept.items() if tensors})
        flags = dict.fromkeys(("maximize", "amsgrad", "capturable", "differentiable"), False)
        groups = [{"lr": LR, "betas": BETAS, "eps": EPS, "weight_decay": WEIGHT_DECAY, **flags}]
        used = [True] * len(self.p)

        def step() -> None:
            rows.begin_step(groups, used, None)
            rows.step()

        return step

    def by_op(self) -> Callable[[], None]:
        """The same by `ops.adam_step`: the table is made and uploaded in every call."""

        def step() -> None:
            ops.adam_step(
                self.p, self.g, self.m, self.v, 10, lr=LR, betas=BETAS, eps=EPS, weight_decay=WEIGHT_DECAY,
                master_params=self.master or None, remainders=self.remainder or None,
                on_external_update="resync",
            )  # fmt: skip

        return step


def fused(p: list[Tensor], g: list[Tensor], m: list[Tensor], v: list[Tensor]) -> Callable[[], None]:
    """torch's fused kernel on the same tensors, with the counting of its step tensors, as torch.optim.AdamW does it."""
    steps = [torch.zeros((), device=DEVICE.tensors) for _ in p]

    def step() -> None:
        torch._foreach_add_(steps, 1)
        torch._fused_adamw_(
            p, g, m, v, [], steps, lr=LR, beta1=BETAS[0], beta2=BETAS[1], weight_decay=WEIGHT_DECAY, eps=EPS,
            amsgrad=False, maximize=False,
        )  # fmt: skip

    return step


def by_class(p: list[Tensor], g: list[Tensor], *, foreach: bool) -> Callable[[], None]:
    """The step of torch.optim.AdamW without its fused kernel; it has states of its own."""
    params = [torch.nn.Parameter(x) for x in p]
    for param, grad in zip(params, g, strict=True):
        param.grad = grad
    return torch.optim.AdamW(params, lr=LR, betas=BETAS, eps=EPS, weight_decay=WEIGHT_DECAY, foreach=foreach).step


def with_casts(tensors: Tensors, grads: list[Tensor], step_masters: Callable[[], None]) -> Callable[[], None]:
    """What torch needs for float32 masters: gradients widened into ``grads``, the masters' step, parameters rounded."""

    def step() -> None:
        if grads is not tensors.g:
            torch._foreach_copy_(grads, tensors.g)
        step_masters()
        torch._foreach_copy_(tensors.p, tensors.master)

    return step


def peers_of(tensors: Tensors) -> dict[str, Callable[[], None]]:
    """torch's ways to do the same, by name."""
    config = tensors.config
    if config.weight == "remainder":
        return {}
    has_masters = config.weight == "master"
    p = tensors.master if has_masters else tensors.p
    g = [x.float() for x in tensors.g] if has_masters and config.g != F32 else tensors.g
    peers = {FUSED: fused(p, g, tensors.m, tensors.v)}
    if has_masters or config.state == config.p:
        peers |= {FOREACH: by_class(p, g, foreach=True), FOR_LOOP: by_class(p, g, foreach=False)}
    if has_masters:
        return {f"{name} + casts": with_casts(tensors, g, step) for name, step in peers.items()}
    return peers


def omitted_peers(config: Config) -> dict[str, str]:
    """Why torch's other ways are not among `peers_of`, by name."""
    if config.weight == "remainder":
        return dict.fromkeys([FUSED, FOREACH, FOR_LOOP], "torch keeps no remainders")
    if config.weight == "param" and config.state != config.p:
        return dict.fromkeys([FOREACH, FOR_LOOP], "torch's states have the parameter's dtype")
    return {}
