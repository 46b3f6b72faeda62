"""Adam rows: what the fused Adam kernel works on, with the step count and the gradient factor of every parameter.

A row is a contiguous piece of one parameter with its gradient and states; a parameter may have several rows, or none on
this rank. Step counts, use and gradient factors are kept per parameter and spread over the rows at each step.
On CUDA they are in device memory, so that nothing waits for the device. A step that is captured in a CUDA graph reads
step counts, factors and learning rates that are tensors on the device anew in each replay; which parameters are used
is part of the graph.
"""

from __future__ import annotations

import array
import struct
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from bucketwheel.device import CPU, Uploads, index_of, torch_device
from bucketwheel.errors import CaptureError
from bucketwheel.native import core


def expect_uniform_flags(param_groups: Sequence[dict[str, Any]]) -> None:
    """ValueError for flags that the kernel takes once for all groups and that differ between them."""
    for key in ("maximize", "amsgrad", "capturable", "differentiable", "decoupled_weight_decay"):
        given = [group.get(key, key == "decoupled_weight_decay") for group in param_groups]
        if len(set(map(bool, given))) > 1:
            raise ValueError(f"{key} must be the same in all parameter groups, got {given}")


def _native_options(param_groups: Sequence[dict[str, Any]], amsgrad: bool, resync: bool) -> core.AdamOptions:
    """The flags that all groups share, as the kernel takes them. ValueError if ``amsgrad``, as which the rows were made,
    is another one now."""
    expect_uniform_flags(param_groups)
    first = param_groups[0] if param_groups else {"amsgrad": amsgrad, "maximize": False}  # then nothing is stepped
    if bool(first["amsgrad"]) != amsgrad:
        raise ValueError(
            f"amsgrad was {amsgrad} when the optimizer was made and is {first['amsgrad']} in its groups now; "
            "make a new optimizer to change it"
        )
    return core.AdamOptions(bool(first.get("decoupled_weight_decay", True)), bool(first["maximize"]), resync=resync)


# States of an entry of `GradFactors` in device memory, as csrc/window/grad_table.h has them.
_ONE, _SCALED, _STALE = range(3)
_SCALED_IS_STALE = bytes([_ONE, _STALE, _STALE]).ljust(256, b"\0")
_STALE_IS_ONE = bytes([_ONE, _SCALED, _ONE]).ljust(256, b"\0")
_IS_STALE = bytes([0, 0, 1]).ljust(256, b"\0")


class GradFactors:
    """What each gradient is still to be multiplied by, beside the average: float64, one a parameter, 1 at first.

    On the CPU the host knows all factors: they are in ``table``. On CUDA a factor is the product of the number there, which
    ranks can compare, and an entry in device memory, for what only the device knows (a clip coefficient, a loss scale).
    `vector` moves what the host knows to the device. Nothing here waits for the device.
    """

    def __init__(self, table: core.GradTable, device: int) -> None:
        self.table = table
        self._ones = array.array("d", [1.0] * len(table.sums)).tobytes()
        self._device = device
        is_on_host = device == CPU
        self._entries = (
            None if is_on_host else torch.ones(len(table.sums), dtype=torch.float64, device=torch_device(device))
        )
        self._uploads = Uploads(device)
        # CUDA graphs. None until something is captured; then the id of the capture in which all entries were last set to 1,
        # or 0 if that was outside of a capture. The host knows the entries in that capture only: a replay may change them.
        self._ones_in: int | None = None

    @property
    def nbytes(self) -> int:
        return 0 if self._entries is None else self._entries.nbytes

    @property
    def may_be_replayed(self) -> bool:
        """Whether there has been a capture in a CUDA graph, whose replays change factors behind the host's back."""
        return self._ones_in is not None

    @property
    def are_unsure(self) -> bool:
        """Whether a replay may have changed what the host knows of the entries."""
        return self._ones_in is not None and (self._ones_in == 0 or core.capture_id(self._device) != self._ones_in)

    def carry_over(self, old: GradFactors, indices: Sequence[int]) -> None:
        """The first factors, and all else in the table, are those of ``indices`` in ``old``."""
        self.table.carry_over(old.table, indices)
        if self._entries is not None and old._entries is not None:
            places = torch.tensor(indices, dtype=torch.int64, device=self._entries.device)
            self._entries[: len(indices)].copy_(old._entries[places])

    def __getitem__(self, index: int) -> float | Tensor:
        """0-d on the device where that knows more than the host."""
        known = self._known(index)
        return self._entries[index] * known if self._entries is not None and self._counts(index) else known

    def is_known(self, index: int, factor: float) -> bool:
        """Whether the host knows that a factor is ``factor``."""
        return self._known(index) == factor and not self._counts(index)

    def _counts(self, index: int) -> bool:
        """Whether an entry may differ from 1 and is to be used."""
        state = self.table.entries[index]
        return state == _SCALED or (state == _ONE and self.are_unsure)

    def _known(self, index: int) -> float:
        (known,) = struct.unpack_from("d", self.table.factors, 8 * index)
        return known

    # --- changes -----------------------------------------------------------------------------------------------------

    def reset_all(self) -> None:
        """Nothing is pending for any parameter."""
        self.table.factors = self._ones
        if self._entries is None:
            return
        capture = core.capture_id(self._device)
        if capture or self.may_be_replayed:  # in the graph too, which a replay finds as the last one left it
            self._ones_in = capture
            self.table.may_be_replayed = True
            self._entries.fill_(1.0)
            self.table.entries = bytes(len(self._entries))
        else:
            self.table.entries = self.table.entries.translate(_SCALED_IS_STALE)

    def scale(self, indices: Sequence[int], factor: float | Tensor) -> None:
        """Multiplies factors by a number, or by a tensor of one element, which stays where it is if that is the device."""
        if self._entries is None or not isinstance(factor, Tensor) or index_of(factor) != self._device:
            self.table.scale(indices, float(factor))
            return
        self._apply_resets()
        times = factor.detach().to(torch.float64).reshape(())
        if len(indices) < len(self._entries):
            times = torch.where(self._uploads.mask("scale", len(self._entries), indices).bool(), times, 1.0)
        self._entries.mul_(times)
        self.table.scale(indices, None)

    def clip(
        self,
        indices: Sequence[int],
        sums: Tensor,
        average: float,
        max_norm: float | None,
        norm: Tensor,
        param_norms: Tensor | None = None,
    ) -> None:
        """CUDA: the norm of the gradients ``indices`` into ``norm`` [1], of all into ``param_norms`` [parameters], from ``sums``
        of squares; multiplies the factors of ``indices`` by the clip coefficient where ``max_norm`` is given."""
        assert self._entries is not None
        table = self.table
        resets = self._all_are_stale and not self.known
        if resets:  # by the kernel
            table.entries = table.entries.translate(_STALE_IS_ONE)
        else:
            self._move_known()
        chosen = self._uploads.mask("chosen", len(self._entries), indices)
        core.clip_cuda(
            self._device,
            sums,
            self._entries,
            chosen,
            average,
            max_norm,
            norm=norm,
            param_norms=param_norms,
            resets=resets,
        )
        if max_norm is not None:
            table.scale(indices, None)

    def _apply_resets(self) -> None:
        """All at once: one operation, however many parameters were clipped."""
        entries = self.table.entries
        if _STALE not in entries:
            return
        assert self._entries is not None
        if self._all_are_stale:
            self._entries.fill_(1.0)
        else:
            is_stale = self._uploads.get("reset", torch.uint8, entries.translate(_IS_STALE)).bool()
            self._entries.copy_(torch.where(is_stale, 1.0, self._entries))
        self.table.entries = entries.translate(_STALE_IS_ONE)

    @property
    def _all_are_stale(self) -> bool:
        """Whether all entries that are not 1 are to be."""
        entries = self.table.entries
        return _STALE in entries and _SCALED not in entries and not self.may_be_replayed

    @property
    def known(self) -> bytes:
        """What the host knows of the factors: doubles; empty if all are 1."""
        known = self.table.factors
        return b"" if known == self._ones else known

    def vector(self) -> Tensor:
        """All factors, as the Adam kernel takes them: float64 [parameters], where the parameters are."""
        if self._entries is None:
            own, nothing = bytearray(self.table.factors), torch.empty(0, dtype=torch.float64, device="cpu")
            return torch.frombuffer(own, dtype=torch.float64) if own else nothing
        self._move_known()
        return self._entries

    def _move_known(self) -> None:
        """Moves what the host knows to the device."""
        self._apply_resets()
        if known := self.known:
            assert self._entries is not None
            self._entries.mul_(self._uploads.get("factors", torch.float64, known))
            self.table.scale([i for i, factor in enumerate(memoryview(known).cast("d")) if factor != 1.0], None)
            self.table.factors = self._ones


class AdamRows:
    """The native table of rows and the per-parameter scalars around it. ``steps``: int64, one a parameter, where the
    parameters are; counted up here.

    bfloat16 second moments are rounded stochastically. ``amsgrad``: what the groups must say. ``resync``: masters follow
    what others have written to their parameters.
    """

    def __init__(self, steps: Tensor, device: int = CPU, *, amsgrad: bool = False, resync: bool = False) -> None:
        self.table: Any = core.AdamTable() if device == CPU else core.AdamCudaTable(device)
        self.steps = steps
        self._device = device
        self._amsgrad = amsgrad
        self._resync = resync
        self._param_of_row: list[int] = []
        self._param_index: Tensor | None = None  # CPU: `_param_of_row` as a tensor; None after a row was added
        self.begun: tuple[Any, ...] = ()  # CPU: groups and arguments of the step that has begun
        self._lr: list[Tensor | None] = []  # CUDA: of each group, read when the step runs

    def add(
        self, param: int, group: int, p: Tensor, g: Tensor | None, state: Mapping[str, Tensor], *, param_begin: int = 0
    ) -> int:
        """Adds a row and returns its number. Rows of parameters without elements are legal.

        ``state``: "exp_avg" and "exp_avg_sq", and, where there are such, "max_exp_avg_sq", "master_param", "remainder".
        ``param_begin``: the place of the row's first element in its parameter, in memory order (stochastic rounding
        depends on it, so that a result does not depend on how the parameter is cut).
        """
        self._param_of_row.append(param)
        self._param_index = None
        return self.table.add(
            p,
            g,
            state["exp_avg"],
            state["exp_avg_sq"],
            state.get("master_param"),
            group,
            max_exp_avg_sq=state.get("max_exp_avg_sq"),
            remainder=state.get("remainder"),
            param=param,
            param_begin=param_begin,
        )

    def begin_step(
        self,
        param_groups: Sequence[dict[str, Any]],
        used: Sequence[bool] | bytes,
        factors: Tensor | None = None,
        average: float = 1.0,
    ) -> None:
        """Counts a step for the parameters ``used`` and fixes the scalars of this step; on CUDA it enqueues both.

        ``factors`` (`GradFactors.vector`; None: all 1) are folded into the gradients with ``average``.
        """
        options = _native_options(param_groups, self._amsgrad, self._resync)
        self._lr = [self._lr_on_device(group["lr"]) for group in param_groups]
        groups = []
        for group, lr in zip(param_groups, self._lr, strict=True):  # may raise: before steps count
            hyper = (group["lr"] if lr is None else 0.0, *group["betas"], group["eps"], group["weight_decay"])
            groups.append(core.AdamGroup(*map(float, hyper)))
        if self._device != CPU:
            lrs = self._lr if any(lr is not None for lr in self._lr) else None
            arguments = core.AdamArguments(self.steps, average, options, used=bytes(used), factors=factors, lr=lrs)
            self.table.begin(groups, arguments)
            return
        core.use_torch_threads(torch.get_num_threads())
        if self._param_index is None:
            self._param_index = torch.tensor(self._param_of_row, dtype=torch.int64, device="cpu")
        nothing = torch.empty(0, dtype=torch.uint8, device="cpu")
        is_used = torch.frombuffer(bytearray(used), dtype=torch.uint8) if used else nothing
        self.steps += is_used
        of_params = torch.ones(len(is_used), dtype=torch.float64, device="cpu") if factors is None else factors
        spread = (self.steps, is_used, of_params * average)
        steps, used_rows, row_factors = (tensor[self._param_index] for tensor in spread)
        self.begun = (groups, core.AdamArguments(steps, 1.0, options, used=used_rows, factors=row_factors))

    def step(self, first_row: int = 0, last_row: int = -1) -> None:
        """Updates the rows [first_row, last_row) (to the end by default) with the scalars of `begin_step`; on CUDA it
        enqueues that."""
        self.table.step(*self.begun, first_row, last_row)

    def _lr_on_device(self, lr: float | Tensor) -> Tensor | None:
        """A learning rate that the device reads, as float32; None where it is a plain number (or a CPU tensor)."""
        if self._device == CPU or not isinstance(lr, Tensor):
            return None
        if index_of(lr) != CPU:
            return lr.detach().to(torch.float32).reshape(1)
        if core.is_capturing(self._device):
            raise CaptureError(
                "a learning rate is a tensor on the CPU, which replays of a CUDA graph would not read again: pass a "
                "tensor on the parameters' device, lr=torch.tensor(1e-3, device='cuda'), or a float, which is constant "
                "in the graph"
            )
        return None
