"""The placeholder as an object: what it refuses and leaves unchanged, its lifetime, copies of models, and DDP."""

import copy
import gc
import io
import pickle
import weakref

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_

from bucketwheel.errors import ShardedGradError
from bucketwheel.grads import placeholder as grad_module
from bucketwheel.grads.placeholder import ShardedGrad
from tests.support.grad_twins import (
    PlainOwner,
    assert_same_bits,
    backward,
    make_params,
    make_twins,
    names_of,
)

# --- refusals ---------------------------------------------------------------------------------------------------------

READS = {
    "item": lambda g: g.sum().item(),
    "tensor item": lambda g: g.item(),
    "numpy": lambda g: g.numpy(),
    "asarray": np.asarray,
    "tolist": lambda g: g.tolist(),
    "data_ptr": lambda g: g.data_ptr(),
    "storage": lambda g: g.untyped_storage(),
    "typed storage": lambda g: g.storage(),
    "dlpack": torch.from_dlpack,
    "share_memory_": lambda g: g.share_memory_(),
    "deepcopy": copy.deepcopy,
    "copy": copy.copy,
    "pickle": pickle.dumps,
    "save": lambda g: torch.save(g, io.BytesIO()),
    "bool": bool,
    "float": float,
    "clone": lambda g: g.clone(),
    "to": lambda g: g.to(torch.float64),
    "index": lambda g: g[0],
    "set index": lambda g: g.__setitem__(0, 1.0),
    "iterate": list,
    "view": lambda g: g.view(-1),
    "isnan": lambda g: torch.isnan(g).any(),
    "out of place": lambda g: g * 2,
    "copy_": lambda g: g.copy_(torch.ones(5, 3)),
    "copy from": lambda g: torch.ones(5, 3).copy_(g),
    "mul out": lambda g: torch.mul(g, 2.0, out=torch.ones(5, 3)),
    "mask": lambda g: g.mul_(torch.ones(5, 3)),
    "masks": lambda g: torch._foreach_mul_([g, torch.ones(2)], [torch.ones(5, 3), torch.ones(2)]),
    "broadcast add": lambda g: g.add_(1.0),
    "row add": lambda g: g.add_(torch.ones(3)),
    "complex add": lambda g: g.add_(torch.ones(5, 3, dtype=torch.complex64)),
    "add sharded": lambda g: g.add_(g),
    "add to plain": lambda g: torch.ones(5, 3).add_(g),
    "mul plain": lambda g: torch.ones(5, 3).mul_(g),
    "foreach plain": lambda g: torch._foreach_mul_([torch.ones(5, 3)], [g]),
    "as found_inf": lambda g: torch._amp_foreach_non_finite_check_and_unscale_([torch.ones(2)], g, torch.ones(1)),
    "complex factor": lambda g: g.mul_(torch.tensor(1j)),
    "lerp": lambda g: torch.ones(5, 3).lerp_(g, 0.5),
    "format": lambda g: f"{g:.3f}",
    "set data": lambda g: setattr(g, "data", torch.ones(5, 3)),
    "norm of rows": lambda g: g.norm(dim=0),
    "norm keepdim": lambda g: torch.linalg.vector_norm(g, keepdim=True),
}


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_reading_values_raises_naming_the_parameter(read):
    _, sharded, owner = make_twins()
    before = {i: g.clone() for i, g in owner.grads.items()}
    with pytest.raises(ShardedGradError, match=r"gradient of 'p0'.*full_grad\(p\)"):
        read(sharded[0].grad)
    assert type(sharded[0].grad) is ShardedGrad and not owner.calls
    for i, old in before.items():
        assert_same_bits(owner.grads[i], old)


IN_PLACE = r"full_grad\(p\) returns them\. p\.grad\.mul_\(s\) and p\.grad /= n work in place, at no cost"


@pytest.mark.parametrize(
    ("call", "remedy"),
    [
        (Tensor.half, "^to needs"),
        (lambda grad: grad.tolist(), "^Tensor.tolist needs"),
        (lambda grad: torch._foreach_mul_([grad], torch.ones(1, 1, 1)), "^_foreach_mul_.*'p0'"),
        (lambda grad: grad / 8, IN_PLACE),
        (lambda grad: grad * torch.tensor(0.5), IN_PLACE),
        (lambda grad: -grad, IN_PLACE),
        (lambda grad: grad.clone(), IN_PLACE),
        (lambda grad: torch._foreach_mul([grad], 0.5), IN_PLACE),
        (lambda grad: torch._foreach_div([grad], 2.0), IN_PLACE),
        (lambda grad: grad + torch.ones(5, 3), r"p\.grad\.add_\(x, alpha=a\) works in place.*create_graph"),
        (lambda grad: grad - torch.ones(5, 3), r"p\.grad\.add_\(x, alpha=a\) works in place"),
        (lambda grad: grad.clamp(-1, 1), r"p\.grad\.clamp_\(low, high\) works with two numbers"),
        (lambda grad: torch.clip(grad, max=1), r"p\.grad\.clamp_\(low, high\) works with two numbers"),
        (lambda grad: grad.clamp_(-torch.ones(5, 3)), r"p\.grad\.clamp_\(low, high\) works with two numbers"),
        (lambda grad: grad.mul_(torch.ones(5, 3)), r"full_grad\(p\) returns them\.$"),
    ],
)
def test_the_error_says_what_was_called_and_what_works_in_place(call, remedy):
    """Issue 44: where only a factor or bounds are wanted, no values are."""
    _, sharded, owner = make_twins()
    with pytest.raises(ShardedGradError, match=remedy):
        call(sharded[0].grad)
    assert not owner.calls


OPTIMIZERS = {
    "sgd": lambda ps, **kw: torch.optim.SGD(ps, lr=0.1, momentum=0.9, weight_decay=0.1, **kw),
    "adamw": lambda ps, **kw: torch.optim.AdamW(ps, lr=0.1, weight_decay=0.1, **kw),
}


@pytest.mark.parametrize("mode", [{"foreach": True}, {"foreach": False}, {"fused": True}])
@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_a_stock_optimizer_is_refused_before_it_changes_anything(make, mode):
    _, sharded, owner = make_twins(empty=False)
    optimizer = make(sharded, **mode)
    before = [p.detach().clone() for p in sharded]
    with pytest.raises(ShardedGradError, match=rf"{type(optimizer).__name__}\.step .*'p0'.*of its ShardedAdamW"):
        optimizer.step()
    assert not optimizer.state
    for p, old in zip(sharded, before, strict=True):
        assert_same_bits(p.data, old)


# --- the object -------------------------------------------------------------------------------------------------------


def test_it_has_the_metadata_of_its_parameter():
    for p in (*make_params(), *make_params(torch.bfloat16)):
        owner = PlainOwner([p])
        g = owner.placeholders[0]
        assert (g.shape, g.stride(), g.dtype, g.device, g.layout) == (p.shape, p.stride(), p.dtype, p.device, p.layout)
        assert not g.requires_grad and g.grad_fn is None and not g.is_sparse and g.owner is owner
        p.grad = g
        assert p.grad is g and g.detach() is g and g.data is g and g.requires_grad_(False) is g
        assert g.cpu() is g and g.to(p.dtype) is g
        assert g.detach_() is g


def test_an_alias_from_native_code_is_the_same_gradient():
    _, sharded, owner = make_twins()
    alias = torch._C.TensorBase.detach(sharded[4].grad)
    assert alias is not sharded[4].grad and alias.stride() == sharded[4].stride()
    assert repr(alias) == f"{sharded[4].grad}" == "ShardedGrad('p4', (2, 3, 4, 5), torch.float32, device='cpu')"
    for g in (sharded[4].grad, alias):
        with pytest.raises(RuntimeError):
            torch._C.TensorBase.data_ptr(g)
    alias.mul_(2.0)
    assert owner.calls == [("scale", (4,), 2.0)]


def test_models_can_be_copied_saved_and_converted():
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    owner = PlainOwner(list(model.parameters()))
    model(torch.randn(5, 3)).square().sum().backward()
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(copy.deepcopy(model)))):
        for p, q in zip(model.parameters(), other.parameters(), strict=True):
            assert torch.equal(p, q) and q.grad is None
    model.to(torch.float32).cpu()
    assert all(p.grad is g for p, g in zip(model.parameters(), owner.placeholders, strict=True))
    with pytest.raises(ShardedGradError, match=r"'p0'.*zero_grad\(\)"):
        model.to(torch.bfloat16)


def test_an_owner_that_is_gone_is_named_and_nothing_leaks():
    plain, sharded, owner = make_twins()
    gone = weakref.ref(owner)
    grads = [weakref.ref(g) for g in owner.placeholders]
    del owner
    gc.collect()
    assert gone() is None
    assert "optimizer gone" in repr(sharded[0].grad)
    before = sharded[0].detach().clone()
    for use in (lambda: clip_grad_norm_(sharded, 1.0), lambda: sharded[0].grad.mul_(2), lambda: backward(sharded)):
        with pytest.raises(ShardedGradError, match=r"'p\d' is gone; set p.grad = None"):
            use()
    assert_same_bits(sharded[0].data, before)
    for p in sharded:
        p.grad = None
    gc.collect()
    assert not any(g() for g in grads)
    backward(sharded)
    assert_same_bits(sharded[0].grad, plain[0].grad)


def test_without_the_private_list_of_torch_only_speed_is_lost(monkeypatch):
    _, sharded, owner = make_twins()
    monkeypatch.delattr(torch.utils._foreach_utils, "_foreach_supported_types")
    grad_module._register_with_torch.__wrapped__()
    clip_grad_norm_(sharded, 1.0, foreach=False)
    assert names_of(owner) == ["norms"] * len(sharded) + ["scale"] * len(sharded)


def test_other_reductions_are_refused():
    """By hand, and by DDP with a communication hook, which would reduce zeros. DDP itself: tests/stock/test_ddp_wrapper.py."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        _, sharded, _ = make_twins()
        with pytest.raises(ShardedGradError, match=r"c10d.*'p0'.*The optimizer reduces it"):
            dist.all_reduce(sharded[0].grad)
        model = nn.Linear(3, 4)
        owner = PlainOwner(list(model.parameters()))
        wrapped = DistributedDataParallel(model)
        wrapped.register_comm_hook(None, lambda state, bucket: torch.futures.Future())
        with pytest.raises(ShardedGradError, match=r"^copy_ .*'p\d'"):
            wrapped(torch.ones(5, 3)).sum().backward()
        assert owner.grads
    finally:
        dist.destroy_process_group()
