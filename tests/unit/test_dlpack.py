"""Tensors whose memory is not what torch says they hold, at every door to native code: refused by name, nothing changed."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from bucketwheel.comm.arguments import as_moved
from bucketwheel.comm.backends import LocalWorld
from bucketwheel.comm.collectives import AllGatherRequest, ReduceScatterRequest, all_gather, reduce_scatter
from bucketwheel.comm.communicator import Communicator
from bucketwheel.kernels.ops import adam_step, l2_norm
from bucketwheel.optim.sharded_adamw import ShardedAdamW

N = 4


def ones() -> torch.Tensor:
    return torch.ones(N)


def imaginary() -> torch.Tensor:
    """The one kind that public functions make: of one element, any other has gaps."""
    return torch.complex(torch.zeros(1), torch.ones(1)).conj().imag


class Wrapper(torch.Tensor):
    """As DTensor: no memory of its own."""

    @staticmethod
    def __new__(cls, of: torch.Tensor) -> Wrapper:
        return torch.Tensor._make_wrapper_subclass(cls, of.shape, dtype=of.dtype)  # type: ignore[attr-defined]

    def to_local(self) -> None: ...

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert function == torch.ops.aten.detach.default, "nobody reads it"
        return Wrapper(args[0])


def without_storage() -> torch.Tensor:
    tensor = ones()
    tensor.untyped_storage().resize_(0)
    return tensor


def fake() -> torch.Tensor:
    with FakeTensorMode():
        return torch.ones(N)


def nested() -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.nested.nested_tensor([torch.ones(2), torch.ones(2)])


# What makes it, and what the error says.
ODD: dict[str, tuple[Callable[[], torch.Tensor], str]] = {
    "negative": (lambda: torch._neg_view(ones()), "negative view"),
    "imaginary": (imaginary, "negative view"),
    "negative view of a view": (lambda: torch._neg_view(torch.ones(2 * N))[N:].detach(), "negative view"),
    "zeros of autograd": (lambda: torch._efficientzerotensor(N), "no memory"),
    "expanded": (lambda: torch.ones(1).expand(N), "overlaps itself|not contiguous|strides"),
    "sparse": (lambda: ones().to_sparse(), "no strided memory"),
    "meta": (lambda: torch.ones(N, device="meta"), "meta"),
    "mkldnn": (lambda: ones().to_mkldnn(), "no strided memory"),
    "functional": (lambda: torch._to_functional_tensor(ones()), "no memory"),
    "wrapper": (lambda: Wrapper(ones()), "no memory"),
    "without storage": (without_storage, "no memory"),
    "fake": (fake, "no memory"),
    "nested": (nested, "no strided memory"),
}


def like(odd: torch.Tensor) -> torch.Tensor:
    return torch.full((1 if odd.layout == torch.strided and not odd.is_nested and odd.numel() == 1 else N,), 3.0)


def adam_with(place: int) -> Callable[[Communicator, torch.Tensor], Any]:
    def call(comm: Communicator, odd: torch.Tensor) -> None:
        lists = [[like(odd)] for _ in range(4)]
        lists[place] = [odd]
        adam_step(lists[0], lists[1], lists[2], lists[3], 1, lr=0.1)

    return call


# What the error calls the tensor; the call.
DOORS: dict[str, tuple[str, Callable[[Communicator, torch.Tensor], Any]]] = {
    "gathered": ("inputs[0]", lambda comm, odd: all_gather(like(odd), odd, comm)),
    "gathered into": ("outputs[0]", lambda comm, odd: all_gather(odd, like(odd), comm)),
    "reduced": ("inputs[0]", lambda comm, odd: reduce_scatter(like(odd), odd, comm)),
    "reduced into": ("outputs[0]", lambda comm, odd: reduce_scatter(odd, like(odd), comm)),
    "of a request": ("inputs[0]", lambda comm, odd: AllGatherRequest(like(odd), odd, comm)),
    "of a reducing request": ("outputs[0]", lambda comm, odd: ReduceScatterRequest(odd, like(odd), comm)),
    "reduced in place": ("tensor", lambda comm, odd: comm.all_reduce(odd)),
    "broadcast": ("tensor", lambda comm, odd: comm.broadcast(odd)),
    "looked for": ("tensor", lambda comm, odd: comm.pool.holds(odd)),
    "measured": ("tensors[0]", lambda comm, odd: l2_norm([odd])),
    **{name: (f"{name}[0]", adam_with(i)) for i, name in enumerate(("params", "grads", "exp_avgs", "exp_avg_sqs"))},
}


@pytest.fixture
def comm() -> Iterator[Communicator]:
    with Communicator(LocalWorld(1).rank(0)) as made:
        yield made


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ODD)
def test_odd_tensors_are_refused_by_name(comm: Communicator, kind: str) -> None:
    make, text = ODD[kind]
    for door, (name, call) in DOORS.items():
        seq = all_gather([], [], comm).wait().seq
        with pytest.raises((TypeError, ValueError), match=text) as raised:
            call(comm, make())
        assert name in str(raised.value) or "a tensor on meta" in str(raised.value), f"{door}: {raised.value}"
        assert all_gather([], [], comm).wait().seq == seq + 1, f"{door} has enqueued something"


def test_conjugate_views_are_not_moved_as_bytes(comm: Communicator) -> None:
    for odd in (torch.ones(N, dtype=torch.complex64).conj(), torch._neg_view(torch.ones(N, dtype=torch.complex64))):
        with pytest.raises(TypeError, match="conjugate or negative view"):
            as_moved(odd, "tensor")
        with pytest.raises(TypeError, match="conjugate or negative view"):
            all_gather(torch.zeros(N, dtype=torch.complex64), odd, comm)


def test_transforms_of_torch_func_are_refused() -> None:
    for transform in (torch.func.vmap, torch.func.grad, torch.func.functionalize):
        with pytest.raises(TypeError, match=r"tensors\[0\].*has no"):
            transform(lambda x: l2_norm([x]))(torch.ones(3, N))


def test_a_copy_on_write_is_written_alone(comm: Communicator) -> None:
    given = ones()
    for make in (lambda: torch._lazy_clone(given), lambda: given):
        written, other = make(), torch._lazy_clone(given)
        all_gather(written, torch.full((N,), 3.0), comm).wait()
        assert written.tolist() == [3.0] * N and other.tolist() == [1.0] * N


def test_a_negative_parameter_is_refused() -> None:
    with pytest.raises(ValueError, match="'group 0 parameter 0' is a negative view"):
        ShardedAdamW([torch.nn.Parameter(torch._neg_view(ones()))])
    with pytest.raises(
        TypeError, match="is a Wrapper .*plain tensors only; .* remove fully_shard .* or pass p.to_local"
    ):
        ShardedAdamW([torch.nn.Parameter(Wrapper(ones()))])
