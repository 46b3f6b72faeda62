"""Masters: the float32 weights of bfloat16 and float16 parameters, and how they follow what others write to those.

A weight is kept as a float32 ``master_param``, of which the parameter is the rounding, or as a ``remainder``: the 16 bits
that a bfloat16 parameter lacks ([Note: split master] in csrc/kernels/float16.h). Outside (`state_dict`) it is always
a ``master_param``, so that either kind loads what the other one saved.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = [
    "follow_param",
    "forget_master",
    "has_master",
    "join_master",
    "load_master",
    "master_of",
    "split_master",
    "take_param",
]


def has_master(state: dict[str, Tensor]) -> bool:
    return "master_param" in state or "remainder" in state


def split_master(master: Tensor) -> tuple[Tensor, Tensor]:
    """A float32 as a bfloat16 (halves away from zero) and its lower 16 bits (int16). Every NaN becomes one."""
    bits = torch.where(master.isnan(), 0x7FC00000, master.view(torch.int32))
    high = (bits >> 16) + ((bits >> 15) & 1)
    low = ((bits & 0xFFFF) ^ 0x8000) - 0x8000  # as a signed number: the cast to int16 then changes nothing
    return high.to(torch.int16).view(torch.bfloat16), low.to(torch.int16)


def join_master(param: Tensor, remainder: Tensor) -> Tensor:
    """The float32 of which `split_master` made the two. A remainder that ``param`` cannot have counts as 0."""
    low = remainder.to(torch.int32) & 0xFFFF
    joined = (((param.view(torch.int16).to(torch.int32) - (low >> 15)) << 16) | low).view(torch.float32)
    # Not where the remainder is left over from another value: below 0 there is nothing that rounds to 0, and a NaN rounds
    # to no infinity. A parameter that is 0 is 0.
    fits = _same_bits(split_master(joined)[0], param) & (param != 0)
    return torch.where(fits, joined, param.to(torch.float32))


def _same_bits(a: Tensor, b: Tensor) -> Tensor:
    return a.view(torch.int16) == b.view(torch.int16)


def follow_param(param: Tensor, state: dict[str, Tensor]) -> None:
    """Takes ``param``, which somebody may have written to, into its master.

    A master that rounds to the parameter as it is stays: it knows more digits of the same value. Any other one becomes the
    parameter's value. A remainder stays, so the weight is within half a bfloat16 unit of what was written: which
    elements were written to cannot be known. It becomes 0 where the parameter is 0, or cannot have it.
    """
    if "master_param" in state:
        master = state["master_param"]
        is_rounded = _same_bits(master.to(param.dtype), param)
        if param.dtype == torch.bfloat16:
            is_rounded |= _same_bits(split_master(master)[0], param)  # saved by an optimizer that keeps remainders
        master.copy_(torch.where(is_rounded, master, param.to(master.dtype)))
    elif "remainder" in state:
        remainder = state["remainder"]
        remainder.copy_(split_master(join_master(param, remainder))[1])


def take_param(param: Tensor, state: dict[str, Tensor]) -> None:
    """As `follow_param`, but a remainder goes: an element whose master does not round to it is the weight as it is."""
    if "remainder" in state:
        state["remainder"].zero_()
    else:
        follow_param(param, state)


def master_of(param: Tensor, state: dict[str, Tensor]) -> Tensor | None:
    """The float32 weight, in memory of its own; None for a parameter that is its own weight."""
    if "master_param" in state:
        return state["master_param"].clone()
    return join_master(param, state["remainder"]) if "remainder" in state else None


def forget_master(param: Tensor, state: dict[str, Tensor]) -> None:
    """Makes ``param`` itself the weight."""
    if "master_param" in state:
        state["master_param"].copy_(param)
    elif "remainder" in state:
        state["remainder"].zero_()


def load_master(param: Tensor, state: dict[str, Tensor], master: Tensor) -> None:
    """Makes ``master`` the weight. `follow_param` compares it with the parameter afterwards.

    A remainder cannot hold a tie of which ``param`` is the lower neighbour, where the master's kind of rounding (to even)
    differs from its own: it then holds the next float32 below.
    """
    if "master_param" in state:
        state["master_param"].copy_(master)
    elif "remainder" in state:
        high, low = split_master(master)
        rounded_down = ~_same_bits(high, param) & _same_bits(master.to(param.dtype), param)
        state["remainder"].copy_(torch.where(rounded_down, 0x7FFF, low))
