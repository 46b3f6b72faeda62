"""Fused kernels over lists of tensors, on the CPU and on CUDA: the Adam step and the L2 norm.

Uses `comm` and below. Start with `ops.py`, the functions for users. `adam_rows.py` is the table of the optimizer: one row for
each piece of a parameter that the kernel updates."""

from bucketwheel.kernels.ops import adam_step, l2_norm

__all__ = ["adam_step", "l2_norm"]
