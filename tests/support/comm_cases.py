"""Collectives on one rank, checked bit for bit against numpy, and the places where tests run them: every backend.

Every rank can make every rank's data, so it knows what it must receive. A backend enters `ON_PROCESSES` or
`ON_THREADS`, and has all the tests that take the fixture ``run``.

[Note: the bits of a sum] Our backends and the fake NCCL add in rank order, in float32 (float64), and round once. NCCL adds
in an order of its own, in the tensors' dtype. A sum of two is one addition, correctly rounded in any order and in
float32 too: so it has these bits in every dtype. A factor is in the tensors' dtype there too, and may be fused with the
addition: only powers of two keep the bits, and only of values that are far from the smallest ones. `expect_sum` asks for
the bits where they are promised, and for a result within the roundings where they are not.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from bucketwheel.comm.backends import LocalWorld
from bucketwheel.comm.communicator import Communicator
from bucketwheel.comm.handle import wait_all
from bucketwheel.device import torch_device
from bucketwheel.kernels.ops import PreMulSum, all_gather, reduce_scatter
from bucketwheel.native import core
from bucketwheel.testing import run_threads
from tests.support import simulated_nccl
from tests.support.bits import assert_bitwise_equal
from tests.support.reference import from_bf16, to_bf16
from tests.support.requirements import slow_case
from tests.support.simulated_cuda import posing

TIMEOUT_S = 30.0

# (dtype, elements of the shard)
Spec = tuple[torch.dtype, int]
MEMORIES = ["foreign", "pool", "offset", "in_place", "in_place_pool", "by_rank"]


@functools.cache
def _values() -> torch.Tensor:
    """Values whose sums depend on the order of the additions and on every rounding."""
    generator = torch.Generator().manual_seed(1)
    return torch.randn(1 << 18, generator=generator) * torch.exp(4 * torch.randn(1 << 18, generator=generator))


def data_of(rank: int, spec: Spec, index: int, numel: int) -> torch.Tensor:
    """What rank ``rank`` puts into tensor ``index`` of a call."""
    start = (7919 * rank + 104_729 * index) % 50_000
    values = _values()
    if start + numel > values.numel():
        values = values.repeat((start + numel) // values.numel() + 1)
    values = values[start : start + numel]
    if spec[0].is_floating_point:
        return values.to(spec[0])
    return (values * 1000).to(torch.int64).to(spec[0])


def expected_gather(world: int, spec: Spec, index: int) -> torch.Tensor:
    return torch.cat([data_of(rank, spec, index, spec[1]) for rank in range(world)])


def expected_reduce(
    rank: int, world: int, spec: Spec, index: int, op: str | PreMulSum = "sum", *, backend: str = ""
) -> torch.Tensor:
    """The sum in rank order, in float32 (float64), rounded once. NCCL multiplies before it adds, by a factor in the
    tensors' dtype."""
    dtype, numel = spec
    parts = [data_of(r, spec, index, world * numel)[rank * numel : (rank + 1) * numel] for r in range(world)]
    if not dtype.is_floating_point:
        return torch.stack([part.to(torch.int64) for part in parts]).sum(0).to(dtype)  # modulo its range
    arrays = [_widened(part) for part in parts]
    with np.errstate(over="ignore", invalid="ignore"):  # infinities are values like others
        if isinstance(op, PreMulSum) and backend == "nccl":
            factor = _widened(torch.tensor([op.factor], dtype=torch.float64).to(dtype))[0]
            arrays = [array * factor for array in arrays]
        total = arrays[0].copy()
        for array in arrays[1:]:
            total = total + array
        if op == "avg":
            total = total / total.dtype.type(world)
        elif isinstance(op, PreMulSum) and backend != "nccl":
            total = total * total.dtype.type(op.factor)
        if dtype == torch.bfloat16:
            return torch.from_numpy(to_bf16(total).view(np.int16)).view(torch.bfloat16)
        return torch.from_numpy(total.astype(np.float16) if dtype == torch.float16 else total)


def are_our_sums(comm: Communicator) -> bool:
    """Whether the sums are made by our code or the fake's, so that they have the bits of `expected_reduce`."""
    return comm.backend != "nccl" or core.is_posing()


def expect_sum(
    comm: Communicator, got: torch.Tensor, spec: Spec, index: int, op: str | PreMulSum = "sum", name: str = ""
) -> None:
    """Where [Note: the bits of a sum] promises them, the bits; with a factor, or of many, see `expect_near` too."""
    has_bits = are_our_sums(comm) or (op == "sum" and comm.size <= 2)
    if op != "sum" or not has_bits:
        expect_near(comm, got, spec, index, op, name)
    if has_bits:
        wanted = expected_reduce(comm.rank, comm.size, spec, index, op, backend=comm.backend)
        assert_bitwise_equal(got, wanted, name)


def expect_near(
    comm: Communicator, got: torch.Tensor, spec: Spec, index: int, op: str | PreMulSum, name: str = ""
) -> None:
    """Within the roundings of the factor, the products and the additions in the tensors' dtype, values near the end of
    its range aside."""
    dtype, numel = spec
    begin = comm.rank * numel
    parts = torch.stack([data_of(r, spec, index, comm.size * numel)[begin : begin + numel] for r in range(comm.size)])
    factor = {"sum": 1.0, "avg": 1 / comm.size}[op] if isinstance(op, str) else op.factor
    sizes = parts.double().abs().sum(0)
    limits = torch.finfo(dtype)
    is_sure = sizes * max(1.0, abs(factor)) < limits.max / 2
    least = limits.tiny * limits.eps
    most = (comm.size + 1) * (limits.eps * abs(factor) * sizes + least * max(1.0, abs(factor)))
    off = (got.cpu().double() - factor * parts.double().sum(0)).abs()
    is_far = is_sure & ~(off <= most)
    assert not is_far.any(), f"{name}: {int(is_far.sum())} of {numel} are further off than {comm.size + 1} roundings"


def _widened(tensor: torch.Tensor) -> np.ndarray:
    if tensor.dtype == torch.bfloat16:
        return from_bf16(tensor.view(torch.int16).numpy().view(np.uint16))
    return tensor.numpy().astype(np.float32) if tensor.dtype == torch.float16 else tensor.numpy()


# ---- tensors of a communicator's device


def on_device(comm: Communicator, tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch_device(comm.device), copy=True)


def filled(comm: Communicator, numel: int, value: float = math.nan, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Poisoned unless there is a value."""
    return torch.full((numel,), value, dtype=dtype, device=torch_device(comm.device))


class Memory:
    """Makes the tensors of one rank in one kind of memory, and gives the leases back."""

    def __init__(self, comm: Communicator, kind: str) -> None:
        self.comm = comm
        self.device = torch_device(comm.device)
        self.kind = kind if kind != "by_rank" else MEMORIES[comm.rank % 3]
        self.leases: list[Any] = []

    def tensor(self, dtype: torch.dtype, numel: int) -> torch.Tensor:
        if self.kind in ("pool", "in_place_pool"):
            lease = self.comm.pool.acquire("", numel * dtype.itemsize)
            self.leases.append(lease)
            return lease.tensor(dtype, (numel,))
        if self.kind == "offset":  # not aligned to more than an element
            return torch.empty(numel + 3, dtype=dtype, device=self.device)[3:]
        return torch.empty(numel, dtype=dtype, device=self.device)

    def pair(self, dtype: torch.dtype, numel: int) -> tuple[torch.Tensor, torch.Tensor]:
        """A full buffer and a shard of ``numel`` elements."""
        full = self.tensor(dtype, self.comm.size * numel)
        if self.kind.startswith("in_place"):
            return full, full[self.comm.rank * numel : (self.comm.rank + 1) * numel]
        return full, self.tensor(dtype, numel)

    def release(self) -> None:
        for lease in self.leases:
            lease.release()


@contextlib.contextmanager
def memory_of(comm: Communicator, kind: str) -> Iterator[Memory]:
    memory = Memory(comm, kind)
    yield memory
    memory.release()


def check_all_gather(comm: Communicator, specs: Sequence[Spec], kind: str) -> None:
    with memory_of(comm, kind) as memory:
        pairs = [memory.pair(*spec) for spec in specs]
        for index, (spec, (full, shard)) in enumerate(zip(specs, pairs, strict=True)):
            full.zero_()
            shard.copy_(data_of(comm.rank, spec, index, spec[1]))
        handle = all_gather([full for full, _ in pairs], [shard for _, shard in pairs], comm)
        assert handle.synchronize().query()
        for index, (spec, (full, shard)) in enumerate(zip(specs, pairs, strict=True)):
            assert_bitwise_equal(full, expected_gather(comm.size, spec, index), f"{kind} output {index} of {spec}")
            assert_bitwise_equal(shard, data_of(comm.rank, spec, index, spec[1]), f"{kind} input {index} of {spec}")


def check_reduce_scatter(comm: Communicator, specs: Sequence[Spec], kind: str, op: str | PreMulSum = "sum") -> None:
    with memory_of(comm, kind) as memory:
        pairs = [memory.pair(*spec) for spec in specs]
        for index, (spec, (full, shard)) in enumerate(zip(specs, pairs, strict=True)):
            shard.zero_()
            full.copy_(data_of(comm.rank, spec, index, comm.size * spec[1]))
        handle = reduce_scatter([shard for _, shard in pairs], [full for full, _ in pairs], comm, op=op)
        assert handle.synchronize().query()
        for index, (spec, (_, shard)) in enumerate(zip(specs, pairs, strict=True)):
            expect_sum(comm, shard, spec, index, op, f"{kind} {op} output {index} of {spec}")


def check_broadcast(comm: Communicator, specs: Sequence[Spec], kind: str, root: int) -> None:
    """One after the other, waited for together."""
    with memory_of(comm, kind) as memory:
        tensors = [memory.tensor(*spec) for spec in specs]
        for index, (spec, tensor) in enumerate(zip(specs, tensors, strict=True)):
            tensor.copy_(data_of(comm.rank, spec, index, spec[1]))
        wait_all([comm.broadcast(tensor, root) for tensor in tensors])
        for index, (spec, tensor) in enumerate(zip(specs, tensors, strict=True)):
            assert_bitwise_equal(tensor, data_of(root, spec, index, spec[1]), f"{kind} {index} of {spec} from {root}")


def check_usable(comm: Communicator) -> None:
    """The communicator works."""
    check_all_gather(comm, [(torch.float32, 5)], "foreign")
    check_reduce_scatter(comm, [(torch.float32, 5)], "pool")
    assert comm.exchange(bytes([comm.rank])) == [bytes([rank]) for rank in range(comm.size)]


# ---- where cases run


def on_shm(rank: int, world: int, case: Callable[..., Any], *args: Any) -> Any:
    """For `RankPool.run`: ``case(comm, *args)`` on a fresh shm communicator."""
    with Communicator(backend="shm", timeout_s=TIMEOUT_S, name=case.__name__) as comm:
        assert (comm.rank, comm.size) == (rank, world)
        return case(comm, *args)


def on_c10d(rank: int, world: int, case: Callable[..., Any], *args: Any) -> Any:
    """For `RankPool.run`: the same over a gloo group."""
    with Communicator(backend="c10d", timeout_s=TIMEOUT_S, name=case.__name__) as comm:
        assert (comm.rank, comm.size, comm.backend) == (rank, world, "c10d")
        return case(comm, *args)


def on_nccl(rank: int, world: int, case: Callable[..., Any], *args: Any) -> Any:
    """For `RankPool.run`: the same over the fake NCCL, on a simulated CUDA device."""
    simulated_nccl.install()
    with (
        posing(),
        Communicator(backend="nccl", timeout_s=TIMEOUT_S, name=case.__name__, device="cuda") as comm,
    ):
        assert (comm.rank, comm.size, comm.backend) == (rank, world, "nccl")
        return case(comm, *args)


def run_local(
    world: int, case: Callable[..., Any], *args: Any, stages_inputs: bool = False, device: str | None = None
) -> list[Any]:
    """``case(comm, *args)`` on threads of this process."""
    place = LocalWorld(world, stages_inputs=stages_inputs)

    def body(rank: int, _: int) -> Any:
        with Communicator(place.rank(rank), timeout_s=TIMEOUT_S, name=case.__name__, device=device) as comm:
            return case(comm, *args)

    return run_threads(body, world, timeout_s=2 * TIMEOUT_S)


def run_staged(world: int, case: Callable[..., Any], *args: Any) -> list[Any]:
    """``case(comm, *args)`` on threads that send everything through staging buffers, as between processes."""
    return run_local(world, case, *args, stages_inputs=True)


def run_cuda(world: int, case: Callable[..., Any], *args: Any) -> list[Any]:
    """``case(comm, *args)`` on threads that share a simulated CUDA device."""
    with posing():
        return run_local(world, case, *args, device="cuda")


# By backend: what a rank of a `RankPool` runs; what runs threads of this process.
ON_PROCESSES: dict[str, Callable[..., Any]] = {"shm": on_shm, "c10d": on_c10d, "nccl": on_nccl}
ON_THREADS: dict[str, Callable[..., list[Any]]] = {"local": run_local, "staged": run_staged, "cuda": run_cuda}
_BACKENDS = (*ON_PROCESSES, *ON_THREADS)

# Where a test runs that takes long, or whose subject does not change with the number of ranks: `@in_few_places`.
FEW = [*(f"{backend} 3" for backend in _BACKENDS), "shm 2", "shm 4"]
# What the fixture `run` (dist/conftest.py) takes, all of it unless the test says otherwise.
EVERYWHERE = [
    (str if f"{backend} {world}" in (*FEW, "nccl 1", "local 1") else slow_case)(f"{backend} {world}")
    for backend in _BACKENDS
    for world in (1, 2, 3, 4)
]
in_few_places = pytest.mark.parametrize("run", FEW, indirect=True)
