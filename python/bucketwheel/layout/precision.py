"""Precision: in which dtypes the gradients, states and weights of parameters are kept. Options in, dtypes out.

float64 parameters are float64 throughout, whatever the options say of the others.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

import torch

PARAM_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
MASTER_WEIGHTS = ("auto", "fp32", "bf16_remainder", "none")
_HALVES = (torch.bfloat16, torch.float16)
_TAKEN = {
    "state_dtype": (torch.float32, torch.bfloat16),
    "reduce_dtype": (torch.float32, torch.bfloat16, torch.float16),
    "accum_dtype": (torch.float32, torch.bfloat16),
}


def norm_dtype_of(dtypes: Iterable[torch.dtype]) -> torch.dtype:
    """Of the norm of gradients of parameters of ``dtypes``, and of the clip coefficient."""
    return torch.float64 if torch.float64 in dtypes else torch.float32


@dataclass(frozen=True)
class Precision:
    """The options of `ShardedAdamW` that say how precise it is; None: the default of each parameter's dtype."""

    master_weights: str = "auto"
    state_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    accum_dtype: torch.dtype | None = None
    amsgrad: bool = False

    def expect_fits(self, dtypes: Collection[torch.dtype]) -> None:
        """ValueError naming the option that parameters of ``dtypes`` (all of an optimizer's) cannot have."""
        if self.master_weights not in MASTER_WEIGHTS:
            raise ValueError(f"master_weights={self.master_weights!r}: expected {', '.join(map(repr, MASTER_WEIGHTS))}")
        of = f"the parameters are {' and '.join(sorted(map(str, dtypes)))}"
        for name, taken in _TAKEN.items():
            asked = getattr(self, name)
            if asked is None or asked in taken or (asked == torch.float64 and set(dtypes) <= {torch.float64}):
                continue
            if asked == torch.float64:
                raise ValueError(f"{name}=torch.float64 is for float64 parameters only, but {of}")
            raise ValueError(f"{name} is {asked!r}, expected None or one of {', '.join(map(str, taken))}")
        has_others = dtypes and (torch.float16 in dtypes or torch.bfloat16 not in dtypes)
        if self.master_weights == "bf16_remainder" and has_others:
            raise ValueError(
                f"master_weights='bf16_remainder' is for bfloat16 parameters, but {of}: a remainder completes a "
                "bfloat16 to a float32; use master_weights='auto'"
            )

    def wire_of(self, dtype: torch.dtype) -> torch.dtype:
        """Of the buckets in which gradients of parameters of ``dtype`` are reduced."""
        if dtype == torch.float64:
            return dtype
        return self.reduce_dtype or (torch.float32 if dtype == torch.float16 else dtype)

    def accum_of(self, dtype: torch.dtype) -> torch.dtype:
        """Of the gradient shard."""
        return torch.float64 if dtype == torch.float64 else self.accum_dtype or torch.float32

    def kept_of(self, dtype: torch.dtype) -> dict[str, torch.dtype]:
        """What is kept for each element beside the parameter and its gradient, as the kernel takes it."""
        moments = torch.float64 if dtype == torch.float64 else self.state_dtype or torch.float32
        kept = {"exp_avg": moments, "exp_avg_sq": moments}
        if self.amsgrad:
            kept["max_exp_avg_sq"] = moments
        if dtype in _HALVES and self.master_weights != "none":
            if self.master_weights == "bf16_remainder":
                kept["remainder"] = torch.int16
            else:
                kept["master_param"] = torch.float32
        return kept
