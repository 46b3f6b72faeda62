"""A reference owner of placeholders: a world of one rank that keeps the gradients as plain tensors, and twin models."""

import weakref

import torch
from torch import Tensor, nn

from bucketwheel.grads.placeholder import ShardedGrad
from bucketwheel.optim.foreign_steps import refuse_foreign_steps


class PlainOwner:
    """Holds gradients of one rank as plain tensors, and records the calls that it gets."""

    def __init__(self, params: list[nn.Parameter]):
        refuse_foreign_steps()
        self.grads: dict[int, Tensor] = {}
        self.calls: list[tuple] = []
        self.placeholders = [ShardedGrad(p, self, i, f"p{i}") for i, p in enumerate(params)]
        self_ref = weakref.ref(self)
        for i, p in enumerate(params):
            p.register_post_accumulate_grad_hook(lambda p, i=i: self_ref() and self_ref().take(p, i))

    def take(self, param: Tensor, index: int) -> None:
        placeholder = self.placeholders[index]
        self.calls.append(("hook", index, param.grad is placeholder))
        if param.grad is not placeholder:
            placeholder.reject_reducer_view(param.grad)
            self.grads[index] = param.grad
            param.grad = placeholder

    def accumulate(self, index, grad):
        self.calls.append(("accumulate", index))
        held = self.grads[index]
        assert type(grad) is Tensor and grad.shape == held.shape and grad.dtype == held.dtype
        self.grads[index].add_(grad)

    def norms(self, indices, ord):
        self.calls.append(("norms", tuple(indices), ord))
        return torch.stack([torch.linalg.vector_norm(self.grads[i], ord) for i in indices])

    def scale(self, indices, factor):
        self.calls.append(("scale", tuple(indices), factor))
        for i in indices:
            self.grads[i].mul_(factor)

    def unscale(self, indices, found_inf, inv_scale):
        self.calls.append(("unscale", tuple(indices)))
        grads = [self.grads[i] for i in indices]
        torch._amp_foreach_non_finite_check_and_unscale_(grads, found_inf, inv_scale)

    def clamp(self, indices, low, high):
        self.calls.append(("clamp", tuple(indices), low, high))
        for i in indices:
            self.grads[i].clamp_(low, high)

    def zero(self, indices):
        self.calls.append(("zero", tuple(indices)))
        for i in indices:
            self.grads[i].zero_()


def make_params(dtype: torch.dtype = torch.float32, empty: bool = True) -> list[nn.Parameter]:
    """Parameters of all layouts: contiguous, 0-d, one element, transposed, channels_last, and empty on request."""
    rng = torch.Generator().manual_seed(7)
    values = [torch.randn(shape, generator=rng).to(dtype) for shape in [(5, 3), (7,), (), (1,), (2, 3, 4, 5)]]
    values.append(torch.randn((6, 4), generator=rng).to(dtype).t())
    values[4] = values[4].to(memory_format=torch.channels_last)
    if empty:
        values.append(torch.empty((0, 4), dtype=dtype))
    return [nn.Parameter(v) for v in values]


def backward(params: list[nn.Parameter], scale: float = 1.0) -> None:
    (sum((p.square() * 3).sum() for p in params) * scale).backward()


def make_twins(dtype: torch.dtype = torch.float32, empty: bool = True):
    """Return (plain parameters, sharded parameters, owner) after one backward of both."""
    plain, sharded = make_params(dtype, empty), make_params(dtype, empty)
    owner = PlainOwner(sharded)
    backward(plain)
    backward(sharded)
    assert all(p.grad is g for p, g in zip(sharded, owner.placeholders, strict=True))
    owner.calls.clear()
    return plain, sharded, owner


def assert_same_bits(got: Tensor, want: Tensor) -> None:
    assert type(got) is Tensor and got.dtype == want.dtype and got.shape == want.shape
    got_bits, want_bits = (t.detach().contiguous().reshape(-1).view(torch.uint8) for t in (got, want))
    assert torch.equal(got_bits, want_bits), (got, want)


def assert_same_grads(owner: PlainOwner, plain: list[nn.Parameter]) -> None:
    for i, p in enumerate(plain):
        assert_same_bits(owner.grads[i], p.grad)


def names_of(owner: PlainOwner) -> list[str]:
    return [call[0] for call in owner.calls]
