"""What bench_gpu.py compares as a whole: ours and torch's optimizer on equal parameters, and on a GPT's training step."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from gpt_systems import BETAS, EPS, LR, MAX_NORM, WEIGHT_DECAY, Gpt, GptConfig
from gpu_timing import random
from torch import Tensor, nn

import bucketwheel as bw
from tests.gpu.device import DEVICE

__all__ = ["GPT_MEDIUM", "GPT_TINY", "OptimizerPair", "TrainingStep"]

GPT_MEDIUM = GptConfig(layers=24, width=1024, heads=16, context=512, vocabulary=50257)
GPT_TINY = GptConfig(layers=2, width=32, heads=2, context=8, vocabulary=97)
_OPTIONS: dict[str, Any] = {"lr": LR, "betas": BETAS, "eps": EPS, "weight_decay": WEIGHT_DECAY}


class OptimizerPair:
    """ShardedAdamW in one process and torch's fused AdamW over parameters of the same sizes, with gradients that stay."""

    def __init__(self, numels: Sequence[int], dtype: torch.dtype) -> None:
        self._params = [[nn.Parameter(random(n, dtype)) for n in numels] for _ in range(2)]
        self._grads = [[random(n, dtype, scale=1e-2) for n in numels] for _ in range(2)]
        self.ours = bw.ShardedAdamW(self._params[0], **_OPTIONS)
        self.torchs = torch.optim.AdamW(self._params[1], fused=True, **_OPTIONS)
        self.numel = sum(numels)
        self.step_bytes = 28 * self.numel
        self.refresh()

    def refresh(self) -> None:
        """Gradients as after a backward: other tensor objects, the same memory."""
        for params, grads in zip(self._params, self._grads, strict=True):
            for p, g in zip(params, grads, strict=True):
                p.grad = g.detach()

    def ours_clip_and_step(self) -> None:
        self.ours.clip_grad_norm_(MAX_NORM)
        self.ours.step()

    def torchs_clip_and_step(self) -> None:
        nn.utils.clip_grad_norm_(self._params[1], MAX_NORM)
        self.torchs.step()

    def close(self) -> None:
        self.ours.close()


class TrainingStep:
    """One GPT with one optimizer. ``weights``: "float32, autocast" or "bfloat16" (ours then keeps float32 masters, torch none)."""

    def __init__(self, name: str, weights: str, config: GptConfig, batch: int) -> None:
        self._autocasts = weights != "bfloat16"
        dtype = torch.float32 if self._autocasts else torch.bfloat16
        self._model = Gpt(config).to(DEVICE.tensors, dtype)  # seeds itself: every one starts equal
        self._ours = name == "ours"
        params = list(self._model.parameters())
        self._optimizer: Any = (
            bw.ShardedAdamW(params, **_OPTIONS) if self._ours else torch.optim.AdamW(params, fused=True, **_OPTIONS)
        )
        generator = torch.Generator().manual_seed(0)
        tokens = torch.randint(config.vocabulary, (batch, config.context + 1), generator=generator)
        self._tokens = tokens.to(DEVICE.tensors)
        self.numel = sum(p.numel() for p in params)
        self.optimizer_bytes = self.numel * (dtype.itemsize + 28)  # of ours: the norm's pass, and configuration A or C

    def _autocast(self) -> AbstractContextManager[Any]:
        return torch.autocast(DEVICE.tensors.type, torch.bfloat16) if self._autocasts else nullcontext()

    def backward(self) -> Tensor:
        with self._autocast():
            loss = self._model(self._tokens)
        loss.backward()
        return loss.detach()

    def finish(self) -> None:
        if self._ours:
            self._optimizer.clip_grad_norm_(MAX_NORM)
        else:
            nn.utils.clip_grad_norm_(self._model.parameters(), MAX_NORM)
        self._optimizer.step()
        self._optimizer.zero_grad()

    def step(self) -> Tensor:
        loss = self.backward()
        self.finish()
        return loss

    def close(self) -> None:
        if self._ours:
            self._optimizer.close()
