"""What stock code does to placeholders in ``p.grad``, the owner does to the gradients.

Every comparison is bitwise between a model whose gradients a `PlainOwner` holds and a twin with ordinary gradients,
unless the test says why not.
"""

import warnings

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_

from bucketwheel.errors import ShardedGradError
from tests.support.grad_twins import (
    PlainOwner,
    assert_same_bits,
    assert_same_grads,
    make_twins,
    names_of,
)

# --- clipping ---------------------------------------------------------------------------------------------------------


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
            torch.linalg.norm,
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


# --- accumulation, zeroing, scaling -----------------------------------------------------------------------------------


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
            p.grad.clamp_(max=2.0).clamp_min_(-1.0).clamp_max_(1.5)
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


def test_zero_in_other_words():
    _, sharded, owner = make_twins()
    for i, zero in enumerate([lambda g: g.zero_(), lambda g: g.__setitem__(..., 0.0), lambda g: g.fill_(0)]):
        zero(sharded[i].grad)
        assert not owner.grads[i].any()
    with pytest.raises(ShardedGradError, match="^fill_ needs"):
        sharded[3].grad.fill_(1.0)


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
