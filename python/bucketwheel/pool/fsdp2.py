"""pool_for_fsdp2: makes torch's FSDP2 take its flat buffers from a pool.

>>> for block in model.blocks:
...     fully_shard(block)
>>> fully_shard(model)
>>> pooled = bw.pool_for_fsdp2(model)  # then train as before
>>> pooled.close()  # FSDP2 uses torch's memory again

[Note: FSDP2's buffers] A *unit* is the parameters that FSDP2 gathers together. FSDP2 calls `allocate` of the objects that
`set_custom_all_gather` and `set_custom_reduce_scatter` take, for three buffers:

| buffer | allocated by | dropped | memory |
|---|---|---|---|
| flat output of the all-gather | the all-gather's object | after it is copied out to the parameters | the pool's |
| flat input of the reduce-scatter | the other object, first | when a later unit is reduced, or backward ends | the pool's |
| its output | the same object, next | it is the gradient, or becomes one | torch's |

A buffer's lease ends with its last reference. On CUDA its bytes then count as used until the work that is in the stream of its
`allocate` at that time is done, and the next owner's stream waits for that. This is enough, because before FSDP2 drops a buffer

- that stream waits for the last use: the copy out of a gather, or the reduction of a reduce-scatter;
- or, if a gather is dropped that nobody waited for, the compute stream waits for it. FSDP2 allocates buffers in the compute
  stream, and in streams that wait for it at the next forward. Other streams would not wait: nothing else may use the pool.
"""

from __future__ import annotations

import contextlib
import math
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from bucketwheel import torch_internals
from bucketwheel.device import CPU, device_index
from bucketwheel.errors import KeyBusy, SeveralParamGroups
from bucketwheel.pool.pool import Pool
from bucketwheel.pool.trace import Trace


class _Planner:
    """Traces the first step of a model, and gives its pool the plan as the next one begins.

    A step begins with a forward's gather while no lease of the pool is live, and ends where the next one begins, if a gradient
    was reduced in it. Where none was, as in evaluations, the unit that has begun it begins anew.
    """

    def __init__(self, pool: Pool, is_wanted: bool) -> None:
        self._pool = pool
        self._is_done = not is_wanted  # the pool has its plan, or gets none
        self._recording = contextlib.ExitStack()  # closed when it is done
        self._trace = Trace("fsdp2")
        self._first: object = None  # who has made the first gather of the trace; None before it
        self._has_reduced = False  # whether the trace has reduced a gradient

    def reduces(self) -> None:
        self._has_reduced = self._first is not None

    def gathers(self, unit: object, in_backward: bool) -> None:
        if self._is_done or in_backward or self._pool.stats().live_leases:
            return
        if not self._has_reduced:
            if self._first in (None, unit):  # what has reduced nothing was no step: forget it
                self._recording.close()
                self._first = unit
                self._trace = self._recording.enter_context(self._pool.trace("fsdp2"))
            return
        self.stop()
        if self._pool.current_regime:  # it has another plan
            return
        plan = self._pool.plan(self._trace)
        self._pool.trim()  # once: the host waits for the last uses of what the plan replaces
        self._pool.adopt(plan)

    def stop(self) -> None:
        self._is_done = True
        self._recording.close()


class _Communication:
    """One kind of communication of one unit, as torch's `Comm`: the communication that was there, with our memory."""

    def __init__(self, pool: Pool, planner: _Planner, key: str, before: Any) -> None:
        self.before = before
        self._pool = pool
        self._planner = planner
        self._key = key
        # gloo's threads let go of tensors some time after the call, and a buffer would end at any time. They work on this one,
        # which holds no lease: FSDP2 holds the buffer until the call is over. From the allocation to the call.
        self._lent: Tensor | None = None

    def __call__(self, *, output_tensor: Tensor, input_tensor: Tensor, **options: Any) -> Any:
        lent, self._lent = self._lent, None
        return self.before(
            output_tensor=_without_lease(output_tensor, lent),
            input_tensor=_without_lease(input_tensor, lent),
            **options,
        )

    def _empty(self, size: Sequence[int], dtype: torch.dtype, number: int) -> Tensor:
        """Of any dtype. A unit that runs again while its last buffer is held takes the next key."""
        nbytes = math.prod(map(int, size)) * dtype.itemsize
        while True:
            try:
                lease = self._pool.acquire(f"{self._key}/{number}", nbytes)
            except KeyBusy:
                number += 2
            else:
                break
        lease.leave_to_owners()
        if self._pool.device == CPU:
            self._lent = lease.lend()
        return lease.tensor(torch.uint8, nbytes).view(dtype)


def _without_lease(tensor: Tensor, lent: Tensor | None) -> Tensor:
    """The same bytes in ``lent``, if they are there."""
    if lent is None or not lent.data_ptr() <= tensor.data_ptr() < lent.data_ptr() + lent.nbytes:
        return tensor
    return lent[tensor.data_ptr() - lent.data_ptr() :][: tensor.nbytes].view(tensor.dtype)


class _Gather(_Communication):
    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        # Two keys: were it one, its bytes would have to be free of others both in the forward and in the backward.
        in_backward = torch._C._current_graph_task_id() != -1
        self._planner.gathers(self, in_backward)
        return self._empty(size, dtype, int(in_backward))


class _Scatter(_Communication):
    """[Note: FSDP2's buffers] Were the two told apart wrongly, a gradient would lie in the pool, and keep its bytes."""

    # The input, while it is alive: its output has not been asked for. A backward that fails between the two drops it.
    _input: weakref.ref[Tensor] | None = None

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        self._planner.reduces()
        if self._input is not None and self._input() is not None:
            self._input = None
            return self.before.allocate(size, dtype=dtype, device=device)
        made = self._empty(size, dtype, 0)
        self._input = weakref.ref(made)
        return made

    def __call__(self, **options: Any) -> Any:
        self._input = None
        return super().__call__(**options)


class FSDP2Pool(contextlib.AbstractContextManager["FSDP2Pool"]):
    """The connection between FSDP2 and a pool that `pool_for_fsdp2` returns. As a context manager it closes itself.

    Attributes:
        pool: The pool with the buffers.
        units: Names of the units, the modules whose parameters FSDP2 gathers together. Keys of the pool have the number of the
            unit: ``gather/3/0`` in the forward of ``units[3]``, ``gather/3/1`` in its backward, and ``scatter/3/0``. If the
            unit still holds an earlier buffer of the kind, the last number is larger by 2 for each."""

    def __init__(self, pool: Pool, units: dict[str, Any], plan: bool) -> None:
        self.pool = pool
        self._planner = _Planner(pool, plan)
        self.units = tuple(units)
        self._modules = tuple(units.values())
        for unit, module in enumerate(self._modules):
            (group,) = torch_internals.fsdp2_groups(module)
            module.set_custom_all_gather(_Gather(pool, self._planner, f"gather/{unit}", group._all_gather_comm))
            module.set_custom_reduce_scatter(
                _Scatter(pool, self._planner, f"scatter/{unit}", group._reduce_scatter_comm)
            )

    def close(self) -> None:
        """Makes FSDP2 use torch's memory again, from the next buffer on. Local; further calls do nothing."""
        self._planner.stop()
        for module in self._modules:
            for group in torch_internals.fsdp2_groups(module):
                if isinstance(group._all_gather_comm, _Gather):
                    module.set_custom_all_gather(group._all_gather_comm.before)
                if isinstance(group._reduce_scatter_comm, _Scatter):
                    module.set_custom_reduce_scatter(group._reduce_scatter_comm.before)
        self._modules = ()

    def __exit__(self, *_: object) -> None:
        self.close()


def pool_for_fsdp2(model: nn.Module, pool: Pool | None = None, *, plan: bool = True) -> FSDP2Pool:
    """Makes FSDP2 take the flat buffers of the model's all-gathers and reduce-scatters from a pool. Local.

    Call it after the last `fully_shard`. It does not communicate, so you need not call it on all ranks. Results have the same
    bits. The parameters that FSDP2 copies out of a gather, and gradients, stay in torch's memory (docs/pool.md).

    Args:
        model: An `FSDPModule`, or a module that contains some.
        pool: A pool on the device of the model that nothing else uses. None makes one with the defaults of `Pool`.
        plan: Trace the first step, and from the second step on give each buffer a fixed address by a plan (`Pool.adopt`).
            Buffers that differ from the first step get other memory; they are counted, and the first one warns. No plan is
            made while the pool has another plan or leases of others.

    Returns:
        The connection. Its ``close()`` makes FSDP2 use torch's memory again.

    Raises:
        SeveralParamGroups: A module has several parameter groups, which torch does not support with custom communication.
            Nothing is installed.
        ValueError: The model has no FSDP2 module with parameters, the pool is on another device, or other code allocates the
            buffers of a module (``set_custom_all_gather``, ``set_allocate_memory_from_process_group_for_comm``,
            ``set_symm_mem_for_comm``). Nothing is installed."""
    units = _units_of(model)
    devices = {torch_internals.fsdp2_groups(module)[0].device for module in units.values()}
    if not devices:
        raise ValueError(f"the model ({type(model).__name__}) has no FSDP2 module with parameters: call fully_shard")
    if pool is None:
        pool = Pool(device=next(iter(devices)))
    if {device_index(device) for device in devices} != {pool.device}:
        found = ", ".join(sorted(map(str, devices)))
        raise ValueError(f"the pool is on device {pool.device} (-1: the CPU), the model on {found}")
    return FSDP2Pool(pool, units, plan)


def _units_of(model: nn.Module) -> dict[str, Any]:
    """The modules whose parameters FSDP2 gathers together, by name; of one `fully_shard` of several modules the first."""
    from torch.distributed.fsdp import FSDPModule  # importing it takes a second

    units: dict[str, Any] = {}
    seen = set()
    for name, module in model.named_modules():
        groups = torch_internals.fsdp2_groups(module) if isinstance(module, FSDPModule) else []
        if not groups or id(groups[0]) in seen:
            continue
        seen.add(id(groups[0]))
        if len(groups) > 1:
            raise SeveralParamGroups(
                f"module {name!r} has {len(groups)} parameter groups (shard_placement_fn returns meshes): torch does "
                "not support custom communications for it; call fully_shard on its submodules, or drop pool_for_fsdp2"
            )
        for comm in (groups[0]._all_gather_comm, groups[0]._reduce_scatter_comm):
            if not type(comm).__name__.startswith("Default"):
                raise ValueError(
                    f"module {name!r} has its buffers from {type(comm).__name__} already: do not call "
                    "set_custom_all_gather, set_custom_reduce_scatter, set_allocate_memory_from_process_group_for_comm or "
                    "set_symm_mem_for_comm, or close the earlier pool"
                )
        units[name] = module
    return units
