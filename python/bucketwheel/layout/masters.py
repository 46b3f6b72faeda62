"""Masters: the float32 weights of bfloat16 and float16 parameters, and how they follow what others write to those.

The kernel does that at every step ("resync"); here is the same where masters are made, loaded and compared.

A weight is kept as a float32 ``master_param``, of which the parameter is the rounding, or as a ``remainder``: the 16 bits
that a bfloat16 parameter lacks ([Note: split master] in csrc/kernels/float16.h). Outside (`state_dict`) it is always
a ``master_param``, so that either kind loads what the other one saved.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor


def saved_names(states: Iterable[str]) -> list[str]:
    """What is saved of the states of these names: a remainder as the master that it makes with its parameter."""
    return ["master_param" if name == "remainder" else name for name in states]


def moments_of(states: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """All but the master: what is zero before the first step."""
    return {name: state for name, state in states.items() if name not in ("master_param", "remainder")}


def split_master(master: Tensor) -> tuple[Tensor, Tensor]:
    """A float32 as a bfloat16 (halves away from zero) and its lower 16 bits (int16). Every NaN becomes one."""
    bits = torch.where(master.isnan(), 0x7FC00000, master.view(torch.int32))
    high = (bits >> 16) + ((bits >> 15) & 1)
    low = ((bits & 0xFFFF) ^ 0x8000) - 0x8000  # as a signed number: the cast to int16 then changes nothing
    return high.to(torch.int16).view(torch.bfloat16), low.to(torch.int16)


def join_master(param: Tensor, remainder: Tensor) -> Tensor:
    """The float32 of which `split_master` made the two; ``param`` where it cannot have this remainder."""
    low = remainder.to(torch.int32) & 0xFFFF
    joined = (((param.view(torch.int16).to(torch.int32) - (low >> 15)) << 16) | low).view(torch.float32)
    # Left over from another value beside 0 and infinity: below 0 there is nothing that rounds to 0.
    return torch.where(joined.isnan(), param.to(torch.float32), joined)


def _same_bits(a: Tensor, b: Tensor) -> Tensor:
    return a.view(torch.int16) == b.view(torch.int16)


def is_rounded(param: Tensor, master: Tensor) -> Tensor:
    """Returns of each element whether ``param`` is what ``master`` rounds to."""
    is_same = _same_bits(master.to(param.dtype), param) | (param.isnan() & master.isnan())
    if param.dtype == torch.bfloat16:
        is_same |= _same_bits(split_master(master)[0], param)  # saved by an optimizer that keeps remainders
    return is_same


def follow_param(param: Tensor, state: dict[str, Tensor]) -> None:
    """Takes ``param``, which somebody may have written to, into its ``master_param``.

    A master that rounds to the parameter as it is stays: it knows more digits of the same value. Any other one becomes the
    parameter's value.
    """
    if "master_param" in state:
        master = state["master_param"]
        master.copy_(torch.where(is_rounded(param, master), master, param.to(master.dtype)))


def take_param(param: Tensor, state: dict[str, Tensor]) -> None:
    """As `follow_param`; and a remainder goes, since which elements were written to cannot be known."""
    if "remainder" in state:
        state["remainder"].zero_()
    else:
        follow_param(param, state)


def master_of(param: Tensor, state: dict[str, Tensor]) -> Tensor | None:
    """The float32 weight, in memory of its own; None for a parameter that is its own weight."""
    if "master_param" in state:
        return state["master_param"].clone()
    return join_master(param, state["remainder"]) if "remainder" in state else None


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
