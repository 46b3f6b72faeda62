"""What a script of the optimizer's conformance suite says of itself: where it may run, and what it is given."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn import Parameter

from tests.support.optim_twins import TINY, Make, Run, make_params

F32, BF16, F16, F64 = torch.float32, torch.bfloat16, torch.float16, torch.float64

PRECISIONS: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
    "fp32": (F32, {}),
    "fp32, bf16 states": (F32, {"state_dtype": BF16, "amsgrad": True}),
    "fp32, narrow sums": (F32, {"reduce_dtype": BF16, "accum_dtype": BF16, "decoupled_weight_decay": False}),
    "bf16": (BF16, {}),
    "bf16, remainder": (BF16, {"master_weights": "bf16_remainder", "state_dtype": BF16, "reduce_dtype": F32}),
    "bf16, no master": (BF16, {"master_weights": "none"}),
    "fp16": (F16, {"amsgrad": True}),
    "fp64": (F64, {"maximize": True}),
}
# Where a factor is no power of two, a sum that is rounded to 16 bits afterwards has other bits than one that was before.
WIDE = tuple(name for name in PRECISIONS if name != "fp32, narrow sums")
DISTRIBUTIONS: dict[str, dict[str, Any]] = {
    "tiny buckets": TINY,
    "late parameters": {"bucket_cap_mb": 3e-3, "overlap_param_sync": True},
    "no overlap": {"overlap_grad_sync": False},
    "one bucket in flight": {"bucket_cap_mb": 1e-3, "max_inflight_buckets": 1},
    "static graph": {**TINY, "static_graph": True},
}
ANY_GRAPH = tuple(name for name in DISTRIBUTIONS if name != "static graph")
# Where ranks are, and how many there may be. "one": no group; "replicas": rows of ranks, each with the whole model.
BACKENDS: dict[str, tuple[int, ...]] = {
    "local": (1, 2, 3, 4),
    "shm": (2, 3, 4),
    "c10d": (2, 3, 4),
    "cuda": (1, 2, 3, 4),
    "one on cuda": (1,),
    "nccl": (2, 3, 4),
    "replicas": (2, 3, 4),
    "replicas on cuda": (2, 4),
    "replicas over gloo": (4,),
}
SHARDED = tuple(name for name in BACKENDS if name != "one on cuda")
ON_CPU = ("local", "shm", "c10d", "replicas", "replicas over gloo")
SHARDS = {2: 1, 3: 1, 4: 2}  # of that many ranks with replicas, how many share a model


@dataclass(frozen=True, order=True)
class Setting:
    backend: str
    world: int
    precision: str
    distribution: str

    def __str__(self) -> str:
        return f"{self.backend} {self.world}, {self.precision}, {self.distribution}"


@dataclass(frozen=True)
class Script:
    """A script, and where it may run."""

    play: Callable[[Run], None]
    make: Make = list  # what the optimizer is given
    params: Callable[[torch.dtype], list[Parameter]] = make_params
    options: Mapping[str, Any] = field(default_factory=lambda: {"lr": 0.01, "weight_decay": 0.1})
    clips: bool = False  # by factors that are no powers of two: at world 3 within a tolerance
    alone: bool = True  # one process may do it; else the ranks are compared with torch in float64
    torch: bool = True  # torch.optim.AdamW may do it
    backends: Sequence[str] = tuple(BACKENDS)
    worlds: Sequence[int] = (1, 2, 3, 4)
    precisions: Sequence[str] = tuple(PRECISIONS)
    distributions: Sequence[str] = ANY_GRAPH

    @property
    def name(self) -> str:
        return self.play.__name__

    def settings(self) -> list[Setting]:
        found = []
        chosen = itertools.product(self.backends, self.worlds, self.precisions, self.distributions)
        for setting in itertools.starmap(Setting, chosen):
            is_exact = not self.clips or (
                setting.precision in WIDE and (setting.world != 3 or setting.precision in ("fp32", "fp64"))
            )
            # Without a group every distribution is the same; of a group of one too.
            is_new = setting.backend != "one on cuda" or (self.alone and setting.distribution == "tiny buckets")
            is_known = self.alone or setting.precision == "fp32"
            if setting.world in BACKENDS[setting.backend] and is_exact and is_new and is_known:
                found.append(setting)
        return found


SCRIPTS: dict[str, Script] = {}


def script(**where: Any) -> Callable[[Callable[[Run], None]], Callable[[Run], None]]:
    """Enters a function into the suite; ``where``: fields of `Script`."""

    def enter(play: Callable[[Run], None]) -> Callable[[Run], None]:
        assert play.__name__ not in SCRIPTS, play.__name__
        SCRIPTS[play.__name__] = Script(play, **where)
        return play

    return enter
