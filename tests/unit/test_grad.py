"""The placeholder in ``p.grad`` does to its owner what stock code does to plain gradients, and refuses the rest.

`PlainOwner` is the reference: a world of one rank that keeps the gradients as plain tensors. Every comparison is
bitwise between a model whose gradients it holds and a twin with ordinary gradients, unless the test says why not.
"""

import copy
import gc
import io
import pickle
import threading
import warnings
import weakref

import numpy as np
import pytest
import torch
import torch.distributed as dist
from bucketwheel import grad as grad_module
from bucketwheel.errors import ShardedGradError
from bucketwheel.grad import ShardedGrad
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, clip_grads_with_norm_, get_total_norm

FOREACH = [True, False, None]


class PlainOwner:
    """Holds gradients of one rank as plain tensors, and records the calls that it gets."""

    def __init__(self, params: list[nn.Parameter]):
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
            placeholder.reject_reducer_view()
            self.grads[index] = param.grad
            param.grad = placeholder

    def accumulate(self, index, grad):
        self.calls.append(("accumulate", index))
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


class OwnerSGD(torch.optim.Optimizer):
    """The least optimizer that steps gradients which an owner holds."""

    steps_sharded_grads = True

    def __init__(self, params: list[nn.Parameter], owner: PlainOwner, lr: float):
        super().__init__(params, {"lr": lr, "foreach": True})
        self.owner = owner

    @torch.no_grad()
    def step(self, closure=None):
        for i, p in enumerate(self.param_groups[0]["params"]):
            if p.grad is not None:
                p.add_(self.owner.grads[i], alpha=-self.param_groups[0]["lr"])


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


# --- clipping ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("norm_type", [2.0, float("inf"), 1.0, 3])
@pytest.mark.parametrize("foreach", FOREACH)
def test_clip_grad_norm_equals_plain(foreach, norm_type, dtype):
    # torch itself refuses the inf norm of an empty tensor
    plain, sharded, owner = make_twins(dtype, empty=norm_type != float("inf"))
    for max_norm in (0.5, 1e6, 0.1):
        want = clip_grad_norm_(plain, max_norm, norm_type, foreach=foreach)
        got = clip_grad_norm_(sharded, max_norm, norm_type, foreach=foreach)
        assert_same_bits(got, want)
        assert_same_grads(owner, plain)
    assert float(want) > 0


@pytest.mark.parametrize("foreach", FOREACH)
def test_total_norm_and_clip_with_norm_equal_plain(foreach):
    plain, sharded, owner = make_twins()
    want = get_total_norm([p.grad for p in plain], foreach=foreach)
    got = get_total_norm([p.grad for p in sharded], foreach=foreach)
    assert_same_bits(got, want)
    clip_grads_with_norm_(plain, 0.25, want * 2, foreach=foreach)
    clip_grads_with_norm_(sharded, 0.25, got * 2, foreach=foreach)
    assert_same_grads(owner, plain)


@pytest.mark.parametrize("foreach", FOREACH)
def test_clip_grad_value_equals_plain(foreach):
    plain, sharded, owner = make_twins()
    with torch.no_grad():
        plain[0].grad[0, 0] = float("nan")
        owner.grads[0][0, 0] = float("nan")
    clip_grad_value_(plain, 0.75, foreach=foreach)
    clip_grad_value_(sharded, 0.75, foreach=foreach)
    assert_same_grads(owner, plain)
    assert float(plain[4].grad.abs().max()) == 0.75


def test_nonfinite_norm_raises_as_torch_does():
    _, sharded, owner = make_twins()
    owner.grads[1][2] = float("inf")
    with pytest.raises(RuntimeError, match="non-finite"):
        clip_grad_norm_(sharded, 1.0, error_if_nonfinite=True)


@pytest.mark.parametrize("foreach", [True, None])
def test_clipping_is_one_collective_call(foreach):
    _, sharded, owner = make_twins()
    clip_grad_norm_(sharded, 0.5, foreach=foreach)
    assert names_of(owner) == ["norms", "scale"]
    assert owner.calls[0][1] == owner.calls[1][1] == tuple(range(len(sharded)))


def test_single_norms_equal_plain_and_may_be_written_to():
    plain, sharded, owner = make_twins()
    for p, q in zip(plain, sharded, strict=True):
        for norm in (
            lambda g: g.norm(),
            lambda g: g.norm(1),
            lambda g: g.detach().data.norm(2),
            lambda g: torch.linalg.norm(g),
            lambda g: torch.linalg.vector_norm(g, 3),
            lambda g: torch.linalg.vector_norm(g, 2, dim=tuple(range(g.dim()))),
        ):
            assert_same_bits(norm(q.grad), norm(p.grad))
    assert q.grad.norm(dtype=torch.float64).dtype == torch.float64
    kept = torch.tensor([2.0, 3.0])
    owner.norms = lambda indices, ord: kept
    for norm in torch._foreach_norm([sharded[0].grad, sharded[1].grad]):
        norm.mul_(0)
    owner.norms = lambda indices, ord: kept[:1]
    sharded[0].grad.norm().mul_(0)
    assert kept.tolist() == [2.0, 3.0]
    with pytest.raises(ShardedGradError, match="'p0'"):
        torch.linalg.vector_norm(sharded[0].grad, 2, dim=1)


# --- loss scaling -----------------------------------------------------------------------------------------------------


def test_stock_grad_scaler_equals_plain():
    plain, sharded = make_params(), make_params()
    owner = PlainOwner(sharded)
    sgd, owner_sgd = torch.optim.SGD(plain, lr=0.01), OwnerSGD(sharded, owner, lr=0.01)
    scalers = [torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2) for _ in range(2)]
    scales = []
    for step in range(6):
        before = [p.detach().clone() for p in sharded]
        owner.calls.clear()
        for params, optimizer, scaler in ((plain, sgd, scalers[0]), (sharded, owner_sgd, scalers[1])):
            loss = sum((p.square() * 3).sum() for p in params)
            if step == 2:
                loss = loss + params[1][3] * float("inf")
            scaler.scale(loss).backward()
            if step % 2:
                scaler.unscale_(optimizer)
                clip_grad_norm_(params, 1.0)
                with pytest.raises(RuntimeError, match="already been called"):
                    scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        assert names_of(owner).count("unscale") == 1
        assert scalers[0].get_scale() == scalers[1].get_scale()
        scales.append(scalers[1].get_scale())
        for p, q, old in zip(plain, sharded, before, strict=True):
            assert_same_bits(q.data, p.data)
            assert torch.equal(q, old) == (step == 2 or not q.numel())
    assert scales == [8.0, 16.0, 8.0, 8.0, 16.0, 16.0]


# --- accumulation, zeroing, scaling -----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_later_backwards_accumulate_and_the_hook_sees_the_placeholder(dtype):
    plain, sharded, owner = make_twins(dtype)
    for scale in (0.5, 3.0):
        backward(plain, scale)
        backward(sharded, scale)
    assert_same_grads(owner, plain)
    for i in range(len(sharded)):
        calls = [call for call in owner.calls if call[1] == i]
        assert calls == [("accumulate", i), ("hook", i, True)] * 2


def test_assigned_gradients_replace_the_placeholder():
    plain, sharded, owner = make_twins()
    for params in (plain, sharded):
        params[0].grad = torch.full_like(params[0], 2.0)
        params[1].grad = None
        backward(params)
    assert_same_grads(owner, plain)
    assert all(p.grad is g for p, g in zip(sharded, owner.placeholders, strict=True))


def test_manual_accumulation_and_scaling_equal_plain():
    plain, sharded, owner = make_twins()
    for params in (plain, sharded):
        for p in params:
            factor = torch.tensor(0.75)
            p.grad.mul_(0.3)
            p.grad.mul_(factor)
            factor.fill_(100.0)
            p.grad /= 4
            p.grad *= torch.tensor(2, dtype=torch.int64)
            p.grad.data.mul_(1.5)
            p.grad.add_(p.detach(), alpha=0.5)  # exact: torch may fuse alpha into the sum
            p.grad += p.detach().double()
            p.grad.clamp_(max=2.0).clamp_min_(-1.0)
        torch._foreach_mul_([p.grad for p in params], [0.5 + i for i in range(len(params))])
        torch._foreach_div_([p.grad for p in params], 8.0)
        torch._foreach_mul_([p.grad for p in params], [torch.tensor(0.1 * (i + 1)) for i in range(len(params))])
        torch._foreach_mul_([p.grad for p in params], torch.tensor(0.7))
    assert_same_grads(owner, plain)
    assert all(p.grad is g for p, g in zip(sharded, owner.placeholders, strict=True))


def test_division_multiplies_by_the_double_reciprocal():
    plain, sharded, owner = make_twins()
    plain[0].grad.div_(3)
    sharded[0].grad.div_(3)
    assert owner.calls == [("scale", (0,), 1.0 / 3.0)]
    # two roundings instead of one
    torch.testing.assert_close(owner.grads[0], plain[0].grad, rtol=2**-22, atol=0)
    sharded[0].grad.div_(0.0)
    sharded[0].grad.div_(-0.0)
    assert [call[2] for call in owner.calls[1:]] == [float("inf"), float("-inf")]


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("how", ["optimizer", "foreach", "module"])
def test_zero_grad(how, set_to_none):
    plain, sharded, owner = make_twins()
    for params in (plain, sharded):
        if how == "module":
            nn.ParameterList(params).zero_grad(set_to_none)
        else:
            torch.optim.SGD(params, lr=1.0, foreach=how == "foreach").zero_grad(set_to_none)
        backward(params)
    assert names_of(owner).count("zero") == (0 if set_to_none else 1 if how == "foreach" else len(sharded))
    assert_same_grads(owner, plain)


def test_zero_in_other_words():
    _, sharded, owner = make_twins()
    for i, zero in enumerate([lambda g: g.zero_(), lambda g: g.__setitem__(..., 0.0), lambda g: g.fill_(0)]):
        zero(sharded[i].grad)
        assert not owner.grads[i].any()
    with pytest.raises(ShardedGradError, match="aten.fill_"):
        sharded[3].grad.fill_(1.0)


def test_backward_in_anomaly_mode_and_in_another_thread():
    plain, sharded, owner = make_twins()
    with torch.autograd.set_detect_anomaly(True):
        backward(plain)
        backward(sharded)
    backward(plain)
    thread = threading.Thread(target=backward, args=(sharded,))
    thread.start()
    thread.join(timeout=60)
    assert not thread.is_alive()
    assert_same_grads(owner, plain)


def test_create_graph_and_sparse_gradients_are_refused():
    _, sharded, owner = make_twins()
    before = owner.grads[0].clone()
    with pytest.raises(ShardedGradError, match="create_graph"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of a reference cycle
        sharded[0].square().sum().backward(create_graph=True)
    assert_same_bits(owner.grads[0], before)
    table = nn.Embedding(4, 2, sparse=True)
    table_owner = PlainOwner([table.weight])
    table.weight.grad = table_owner.placeholders[0]
    with pytest.raises(ShardedGradError, match="'p0' is sparse"):
        table(torch.tensor([1])).sum().backward()


# --- refusals ---------------------------------------------------------------------------------------------------------

READS = {
    "item": lambda g: g.sum().item(),
    "tensor item": lambda g: g.item(),
    "numpy": lambda g: g.numpy(),
    "asarray": lambda g: np.asarray(g),
    "tolist": lambda g: g.tolist(),
    "data_ptr": lambda g: g.data_ptr(),
    "storage": lambda g: g.untyped_storage(),
    "typed storage": lambda g: g.storage(),
    "dlpack": lambda g: torch.from_dlpack(g),
    "share_memory_": lambda g: g.share_memory_(),
    "deepcopy": lambda g: copy.deepcopy(g),
    "copy": lambda g: copy.copy(g),
    "pickle": lambda g: pickle.dumps(g),
    "save": lambda g: torch.save(g, io.BytesIO()),
    "bool": lambda g: bool(g),
    "float": lambda g: float(g),
    "clone": lambda g: g.clone(),
    "to": lambda g: g.to(torch.float64),
    "index": lambda g: g[0],
    "set index": lambda g: g.__setitem__(0, 1.0),
    "iterate": lambda g: list(g),
    "view": lambda g: g.view(-1),
    "isnan": lambda g: torch.isnan(g).any(),
    "out of place": lambda g: g * 2,
    "copy_": lambda g: g.copy_(torch.ones(5, 3)),
    "copy from": lambda g: torch.ones(5, 3).copy_(g),
    "mul out": lambda g: torch.mul(g, 2.0, out=torch.ones(5, 3)),
    "mask": lambda g: g.mul_(torch.ones(5, 3)),
    "masks": lambda g: torch._foreach_mul_([g, torch.ones(2)], [torch.ones(5, 3), torch.ones(2)]),
    "broadcast add": lambda g: g.add_(1.0),
    "add to plain": lambda g: torch.ones(5, 3).add_(g),
    "mul plain": lambda g: torch.ones(5, 3).mul_(g),
    "foreach plain": lambda g: torch._foreach_mul_([torch.ones(5, 3)], [g]),
    "as found_inf": lambda g: torch._amp_foreach_non_finite_check_and_unscale_([torch.ones(2)], g, torch.ones(1)),
    "complex factor": lambda g: g.mul_(torch.tensor(1j)),
    "lerp": lambda g: torch.ones(5, 3).lerp_(g, 0.5),
    "format": lambda g: f"{g:.3f}",
    "set data": lambda g: setattr(g, "data", torch.ones(5, 3)),
    "norm of rows": lambda g: g.norm(dim=0),
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


OPTIMIZERS = {
    "sgd": lambda ps, **kw: torch.optim.SGD(ps, lr=0.1, momentum=0.9, weight_decay=0.1, **kw),
    "plain sgd": lambda ps, **kw: torch.optim.SGD(ps, lr=0.1, **kw),
    "adamw": lambda ps, **kw: torch.optim.AdamW(ps, lr=0.1, weight_decay=0.1, **kw),
    "adam": lambda ps, **kw: torch.optim.Adam(ps, lr=0.1, weight_decay=0.1, **kw),
}


@pytest.mark.parametrize("mode", [{"foreach": True}, {"foreach": False}, {"fused": True}])
@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_a_stock_optimizer_is_refused_before_it_changes_anything(make, mode):
    _, sharded, owner = make_twins(empty=False)
    optimizer = make(sharded, **mode)
    before = [p.detach().clone() for p in sharded]

    def closure():
        optimizer.zero_grad()
        backward(sharded)

    for step in (optimizer.step, lambda: optimizer.step(closure), lambda: optimizer.step(closure=closure)):
        with pytest.raises(
            ShardedGradError, match=rf"{type(optimizer).__name__}\.step .*'p0'.*optimizer that holds it"
        ):
            step()
        assert not optimizer.state
        for p in sharded:
            p.grad = None  # the closure makes them
    backward(sharded)
    for p, old in zip(sharded, before, strict=True):
        assert_same_bits(p.data, old)


def test_stock_optimizers_on_their_own_parameters_step_as_ever():
    make_twins()  # the guard is registered now
    (p,) = make_params()[:1]
    optimizer = torch.optim.LBFGS([p], lr=0.1)

    def closure():
        optimizer.zero_grad()
        loss = p.square().sum()
        loss.backward()
        return loss

    before = p.detach().clone()
    assert optimizer.step(closure).item() == float(before.square().sum())
    assert not torch.equal(p, before)


@pytest.mark.parametrize("native", ["_fused_adamw_", "_fused_sgd_"])
def test_native_steps_are_refused_even_without_the_optimizer_class(native):
    _, sharded, _ = make_twins()
    p, before = sharded[0], sharded[0].detach().clone()
    state = [torch.zeros_like(p)]
    with pytest.raises(ShardedGradError, match=rf"{native}.*'p0'"), torch.no_grad():
        if native == "_fused_adamw_":
            torch._fused_adamw_(
                [p], [p.grad], state, state, [], [torch.tensor(1.0)], amsgrad=False, lr=0.1, beta1=0.9, beta2=0.99,
                weight_decay=0.1, eps=1e-8, maximize=False,
            )  # fmt: skip
        else:
            torch._fused_sgd_(
                [p], [p.grad], [], weight_decay=0.1, momentum=0.0, lr=0.1, dampening=0.0, nesterov=False,
                maximize=False, is_first_step=True,
            )  # fmt: skip
    assert_same_bits(p.data, before)


# --- mixed lists ------------------------------------------------------------------------------------------------------


def test_mixed_lists_are_split_by_owner_and_put_back_in_order():
    plain, first, first_owner = make_twins()
    _, second, second_owner = make_twins()
    reference = [plain[0].grad.clone() for _ in range(5)]
    extra = [g.clone() for g in reference[:2]]
    mixed = [extra[0], first[0].grad, second[0].grad, extra[1], first[0].grad]
    # each of the five is scaled on its own, so the twice-listed one goes last
    reference[4] = reference[1]
    for got, want in zip(torch._foreach_norm(mixed), torch._foreach_norm(reference), strict=True):
        assert_same_bits(got, want)
    assert first_owner.calls == [("norms", (0, 0), 2.0)] and second_owner.calls == [("norms", (0,), 2.0)]
    for op in (
        lambda gs: torch._foreach_mul_(gs, 0.3),
        lambda gs: torch._foreach_mul_(gs, torch.tensor(1.7)),
        lambda gs: torch._foreach_mul_(gs, [0.5, 2.0, 3.0, 1.5, 1.25]),
        lambda gs: torch._foreach_clamp_min_(gs, -1.0),
        lambda gs: torch._foreach_clamp_max_(gs, 0.5),
    ):
        op(mixed)
        op(reference)
        for got, want in zip(
            [extra[0], first_owner.grads[0], second_owner.grads[0], extra[1]], reference[:4], strict=True
        ):
            assert_same_bits(got, want)
    torch._foreach_zero_(mixed)
    assert not any(g.any() for g in (*extra, first_owner.grads[0], second_owner.grads[0]))


@pytest.mark.parametrize("where", [None, "plain", "first", "second"])
def test_unscale_of_mixed_lists_finds_inf_anywhere(where):
    plain, first, first_owner = make_twins()
    _, second, second_owner = make_twins()
    holders = {"plain": plain[0].grad, "first": first_owner.grads[0], "second": second_owner.grads[0]}
    want = {name: g * 0.25 for name, g in holders.items()}
    if where:
        holders[where][1, 1] = want[where][1, 1] = float("inf")
    found_inf = torch.zeros(1)
    mixed = [first[0].grad, plain[0].grad, second[0].grad]
    torch._amp_foreach_non_finite_check_and_unscale_(mixed, found_inf, torch.full((1,), 0.25))
    assert found_inf.item() == (where is not None)
    for name, g in holders.items():
        assert_same_bits(g, want[name])
    assert names_of(first_owner) == names_of(second_owner) == ["unscale"]


def test_clipping_a_model_of_mixed_dtypes_and_plain_parameters():
    torch.manual_seed(0)
    twins = []
    for _ in range(2):
        params = [*make_params(), *make_params(torch.bfloat16), *make_params()]
        twins.append(params)
    plain, sharded = twins
    owner = PlainOwner(sharded[: len(sharded) * 2 // 3])
    backward(plain)
    backward(sharded)
    assert_same_bits(clip_grad_norm_(sharded, 0.5), clip_grad_norm_(plain, 0.5))
    for i, p in enumerate(plain):
        assert_same_bits(owner.grads.get(i, sharded[i].grad), p.grad)


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


def test_repr_and_format():
    owner = PlainOwner(make_params())
    text = "ShardedGrad('p0', (5, 3), torch.float32, device='cpu')"
    assert repr(owner.placeholders[0]) == str(owner.placeholders[0]) == f"{owner.placeholders[0]}" == text
    assert f"{owner.placeholders[2]}" == "ShardedGrad('p2', (), torch.float32, device='cpu')"
    assert not owner.calls


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


def test_errors_of_the_owner_pass_through():
    _, sharded, owner = make_twins()

    def fail(*args):
        raise ConnectionError("peer 3 died")

    owner.norms = fail
    with pytest.raises(ConnectionError, match="peer 3 died"):
        clip_grad_norm_(sharded, 1.0)


def test_without_the_private_list_of_torch_only_speed_is_lost(monkeypatch):
    _, sharded, owner = make_twins()
    monkeypatch.delattr(torch.utils._foreach_utils, "_foreach_supported_types")
    monkeypatch.setattr(grad_module, "register_optimizer_step_pre_hook", lambda hook: None)
    grad_module._register_with_torch.__wrapped__()
    clip_grad_norm_(sharded, 1.0, foreach=False)
    assert names_of(owner) == ["norms"] * len(sharded) + ["scale"] * len(sharded)


# --- under DistributedDataParallel ------------------------------------------------------------------------------------


@pytest.fixture
def world_of_one():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def make_models():
    models = []
    for _ in range(2):
        torch.manual_seed(3)
        models.append(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)))
    return models


@pytest.mark.parametrize("options", [{}, {"static_graph": True}, {"find_unused_parameters": True}])
def test_a_ddp_wrapper_leaves_the_gradients_to_the_owner(world_of_one, options):
    plain, sharded = make_models()
    owner = PlainOwner(list(sharded.parameters()))
    grad_module._warn_of_reducer.cache_clear()
    with pytest.warns(UserWarning, match="wrapped in DistributedDataParallel") as caught:
        wrapped = DistributedDataParallel(sharded, **options)
        for step in range(3):
            x = torch.full((5, 3), 0.5 + step)
            wrapped(x).square().sum().backward()
            plain(x).square().sum().backward()
    assert len([w for w in caught if "bucketwheel" in str(w.message)]) == 1
    assert_same_grads(owner, list(plain.parameters()))
    assert all(p.grad is g for p, g in zip(sharded.parameters(), owner.placeholders, strict=True))


def test_ddp_that_replaces_gradients_is_refused_at_the_next_backward(world_of_one):
    _, sharded = make_models()
    owner = PlainOwner(list(sharded.parameters()))
    wrapped = DistributedDataParallel(sharded, gradient_as_bucket_view=True)
    wrapped(torch.ones(5, 3)).sum().backward()
    with pytest.raises(ShardedGradError, match=r"gradient_as_bucket_view=True\) replaced the gradient of 'p\d'"):
        wrapped(torch.ones(5, 3)).sum().backward()
    assert owner.grads


def test_ddp_with_a_communication_hook_is_refused(world_of_one):
    _, sharded = make_models()
    owner = PlainOwner(list(sharded.parameters()))
    wrapped = DistributedDataParallel(sharded)
    wrapped.register_comm_hook(None, lambda state, bucket: torch.futures.Future())
    with pytest.raises(ShardedGradError, match=r"aten\.copy_.*'p\d'"):
        wrapped(torch.ones(5, 3)).sum().backward()
    assert owner.grads


def test_reducing_a_placeholder_by_hand_is_refused(world_of_one):
    _, sharded, _ = make_twins()
    with pytest.raises(ShardedGradError, match=r"c10d.*'p0'.*the optimizer reduces it"):
        dist.all_reduce(sharded[0].grad)
