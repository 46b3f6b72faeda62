"""What collectives are given, as native code takes it: tensors, handles, time limits, and what a reduction does."""

from __future__ import annotations

import math
import numbers
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from bucketwheel.comm.communicator import Communicator

Tensors = torch.Tensor | Sequence[torch.Tensor]
_HALF_DTYPES = frozenset({torch.bfloat16, torch.float16})
_INTEGER_DTYPES = frozenset({torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8})
_NATIVE_DTYPES = _HALF_DTYPES | _INTEGER_DTYPES | {torch.float32, torch.float64}


@dataclass(frozen=True)
class PreMulSum:
    """The reduction ``factor * (sum of the inputs)``, for the ``op`` of `reduce_scatter`; the factor is the same on all
    ranks.

    The backends ``shm``, ``local`` and ``c10d`` multiply the float32 sum by the factor rounded to float32 (float64 for
    float64 tensors), before the one rounding to the tensors' dtype. NCCL multiplies each input first, in the tensors'
    dtype.

    Raises:
        ValueError: the factor is not finite.
        TypeError: it is not a number of Python's or numpy's.
    """

    factor: float

    def __post_init__(self) -> None:
        if not isinstance(self.factor, numbers.Real):
            raise TypeError(f"the factor of PreMulSum is {self.factor!r}, expected a number")
        if not math.isfinite(self.factor):
            raise ValueError(f"the factor of PreMulSum is {self.factor!r}, expected a finite number")


def native_op_of(op: Any) -> str | float:
    """Its name, or the factor of `PreMulSum`. TypeError for what is no reduction; native code raises ValueError for one that
    we do not have."""
    if isinstance(op, str):
        return op
    if isinstance(op, PreMulSum):
        return float(op.factor)
    if dist.is_available():
        factor = None
        if isinstance(op, dist.ReduceOp) and not isinstance(op, dist.ReduceOp.RedOpType):
            op, factor = op.__getstate__()  # type: ignore[attr-defined]
        if isinstance(op, dist.ReduceOp.RedOpType):
            return op.name.lower() if factor is None else float(PreMulSum(float(factor)).factor)
    raise TypeError(f"op is {op!r}, expected 'sum', 'avg', a PreMulSum or one of torch.distributed.ReduceOp")


_has_warned = False


def listed(tensors: Tensors, name: str) -> list[torch.Tensor]:
    """A list as it is: to be read only."""
    if isinstance(tensors, list):
        return tensors
    if isinstance(tensors, torch.Tensor):
        return [tensors]
    if isinstance(tensors, str) or not isinstance(tensors, Iterable):
        raise TypeError(f"{name} is {tensors!r}, expected a tensor or a list of tensors")
    return list(tensors)


def as_moved(tensor: Any, name: str) -> Any:
    """A tensor of a dtype that native code does not know as bytes: what is only moved needs no more. Anything else as it
    is."""
    if not isinstance(tensor, torch.Tensor) or tensor.dtype in _NATIVE_DTYPES or tensor.layout != torch.strided:
        return tensor
    if tensor.is_nested or tensor.is_quantized:
        return tensor
    if not tensor.is_contiguous():
        raise ValueError(f"{name} is not contiguous: shape {list(tensor.shape)}, strides {list(tensor.stride())}")
    if tensor.is_conj() or tensor.is_neg():
        raise TypeError(
            f"{name}: a {tensor.dtype} tensor is a conjugate or negative view, whose memory holds other values: pass "
            "resolve_conj().resolve_neg()"
        )
    return tensor.detach().view(-1).view(torch.uint8)


def natives_of(after: Iterable[Any]) -> list[Any]:
    """Those of the handles."""
    try:
        return [handle._native for handle in after]
    except (TypeError, AttributeError):
        raise TypeError(f"after is {after!r}, expected a list of handles") from None


def seconds_of(timeout: float | timedelta | None, name: str = "timeout") -> float | None:
    """TypeError unless it is a number of seconds, a timedelta or None."""
    if isinstance(timeout, timedelta):
        return timeout.total_seconds()
    if timeout is not None and not isinstance(timeout, numbers.Real):
        raise TypeError(f"{name} is {timeout!r}, expected seconds, a timedelta or None")
    return None if timeout is None else float(timeout)


def payload_of(payload: bytes | bytearray | memoryview) -> bytes:
    if not isinstance(payload, (bytes, bytearray, memoryview)):
        raise TypeError(f"payload is {payload!r}, expected bytes")
    return bytes(payload)


def warn_of_rounded_average(comm: Communicator, tensors: Sequence[Any]) -> None:
    """Once in a process."""
    global _has_warned
    is_exact = comm.size & (comm.size - 1) == 0
    if is_exact or comm.backend != "nccl" or _has_warned:
        return
    rounded = {tensor.dtype for tensor in tensors if isinstance(tensor, torch.Tensor)} & _HALF_DTYPES
    if rounded:
        warnings.warn(
            f"op='avg' of {' and '.join(sorted(map(str, rounded)))} on {comm.size} ranks: NCCL multiplies by 1/{comm.size} "
            "rounded to that dtype, so all averages are off by the same factor, up to 0.2 %. op='sum' is exact in that",
            stacklevel=3,
        )
        _has_warned = True
