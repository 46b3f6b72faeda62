"""What `ShardedAdamW` refuses: options, parameters, what ranks must have in common, and steps that cannot be made."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import Parameter

from bucketwheel.comm.backends import LocalWorld
from bucketwheel.comm.communicator import Communicator
from bucketwheel.optim.sharded_adamw import ShardedAdamW
from bucketwheel.optim.trained_params import Hyperparameters
from tests.conformance.optimizer.updates import named
from tests.support.bits import assert_bitwise_equal
from tests.support.optim_twins import dyadic, loss_of, make_params, on_ranks, run_local


@pytest.mark.parametrize(
    "options, match",
    [
        ({"lr": -1.0}, "Invalid learning rate: -1.0"),
        ({"lr": torch.ones(2)}, "Tensor lr must be 1-element"),
        ({"eps": -1e-8}, "Invalid epsilon value"),
        ({"betas": (1.0, 0.9)}, "Invalid beta parameter at index 0"),
        ({"betas": (0.9, -0.1)}, "Invalid beta parameter at index 1"),
        ({"weight_decay": -0.1}, "Invalid weight_decay value"),
        ({"differentiable": True}, "differentiable"),
        ({"max_inflight_buckets": 0}, "max_inflight_buckets"),
        ({"bucket_cap_mb": 0}, "bucket_cap_mb"),
        ({"master_weights": "bf16"}, "master_weights='bf16': expected 'auto', 'fp32', 'bf16_remainder', 'none'"),
        ({"master_weights": "bf16_remainder"}, "bfloat16 parameters, but the parameters are torch.float32"),
        (
            {"state_dtype": torch.float16},
            "state_dtype is torch.float16, expected None or one of torch.float32, torch.bfloat16",
        ),
        ({"on_external_update": "follow"}, "on_external_update must be 'resync', 'error' or 'ignore', got 'follow'"),
    ],
)
def test_bad_options_are_value_errors(options: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        ShardedAdamW(make_params(), **options)


def with_grad_dtype(dtype: torch.dtype) -> Parameter:
    param = Parameter(torch.zeros(3))
    param.grad_dtype = dtype
    return param


@pytest.mark.parametrize("world", [None, 2])
def test_bad_parameters_are_named_and_nothing_moves(world: int | None) -> None:
    def body(comm: Communicator | None) -> None:
        gaps = "'bad' .*gaps or overlaps"
        bad: list[tuple[Any, type[Exception], str]] = [
            (Parameter(torch.zeros(3, dtype=torch.float8_e4m3fn)), ValueError, "'bad' is torch.float8_e4m3fn"),
            (Parameter(torch.zeros(3, dtype=torch.complex64)), ValueError, "'bad' is torch.complex64"),
            (Parameter(torch.zeros(3, device="meta")), ValueError, "'bad' is torch.float32 on meta"),
            (Parameter(torch.zeros(2, 2).to_sparse()), TypeError, "'bad' .*sparse"),
            (Parameter(torch.zeros(1).expand(5)), ValueError, gaps),
            (Parameter(torch.zeros(8).as_strided((3, 4), (2, 1))), ValueError, gaps),  # rows overlap
        ]
        if comm:
            bad.append((Parameter(torch.zeros(4, 4, dtype=torch.bfloat16)[:, ::2]), ValueError, gaps))
            bad.append(
                (with_grad_dtype(torch.float64), ValueError, "'bad' is torch.float32 and has grad_dtype=.*float64")
            )
        good = make_params()
        pointers = [p.data_ptr() for p in good]
        for param, error, match in bad:
            with pytest.raises(error, match=match):
                ShardedAdamW([*named(good), ("bad", param)], process_group=comm)
        for flag, value in (("maximize", True), ("amsgrad", True), ("decoupled_weight_decay", False)):
            with pytest.raises(ValueError, match=f"{flag} must be the same in all parameter groups"):
                ShardedAdamW([{"params": good[:3], flag: value}, {"params": good[3:]}], process_group=comm)
        for params, kind, match in (
            ([{"params": good, "granularity": 1}], ValueError, "granularity.*'element' or None, got 1"),
            (good[0], TypeError, "iterable"),
            ([], ValueError, "empty parameter list"),
        ):
            with pytest.raises(kind, match=match):
                ShardedAdamW(params, process_group=comm)
        assert [p.data_ptr() for p in good] == pointers
        assert all(not p._post_accumulate_grad_hooks for p in good)
        ShardedAdamW(good, process_group=comm).step()  # nothing is left behind that would be in the way

    on_ranks(world, body)


# ---- keys of a group (issue 44)

OPTION, MISSPELT = r"is an option for all groups: pass it to ShardedAdamW", "is unknown: did you mean"
REFUSED = {
    **dict.fromkeys(["process_group", "master_weights", "reduce_dtype", "bucket_cap_mb", "timeout_s"], OPTION),
    **{"weigth_decay": f"{MISSPELT} 'weight_decay'", "weight-decay": MISSPELT, "weightdecay": MISSPELT},
    **{"decouple_weight_decay": MISSPELT, "maximise": MISSPELT, "amsgradd": MISSPELT, "master_weight": MISSPELT},
    **dict.fromkeys(["capturable", "differentiable"], "the constructor has False"),
}


def keys_of_torch() -> set[str]:
    """What its optimizers and schedulers put into groups."""
    made: list[Callable[[Any], Any]] = [
        lambda opt: torch.optim.lr_scheduler.OneCycleLR(opt, 0.1, total_steps=9),
        lambda opt: torch.optim.lr_scheduler.CyclicLR(opt, 0.01, 0.1, cycle_momentum="momentum" in opt.defaults),
        lambda opt: torch.optim.swa_utils.SWALR(opt, 0.1),
    ]
    keys: set[str] = set()
    for kind in vars(torch.optim).values():
        if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer:
            for make in made:
                opt = kind([zeros(2, 2)])
                with contextlib.suppress(ValueError):  # without momentum
                    make(opt)
                keys |= opt.param_groups[0].keys()
    return keys - {"params"}


@pytest.mark.parametrize("world", [None, 2])
def test_keys_that_look_like_an_option_are_refused_and_others_are_kept(world: int | None) -> None:
    own = {
        key: None for key in {"layer", "lr_scale", "name", *keys_of_torch()} - ShardedAdamW([zeros(1)]).defaults.keys()
    }
    assert {"initial_lr", "swa_lr", "max_lr", "max_momentum", "nesterov", "etas", "rho"} <= own.keys()

    def body(comm: Communicator | None) -> None:
        opt = ShardedAdamW([{"params": [zeros(3)], **own, 7: "x"}], process_group=comm)
        for key, match in REFUSED.items():
            for make in (lambda group: ShardedAdamW([group]), opt.add_param_group):
                with pytest.raises(ValueError, match=f"a parameter group has '?{key}.*{match}"):
                    make({"params": [zeros(3)], key: True})
        assert len(opt.param_groups) == 1 and opt.param_groups[0].keys() >= own.keys()
        saved = opt.state_dict()
        saved["param_groups"][0]["weigth_decay"] = 0.1  # as torch: it is somebody's checkpoint
        opt.load_state_dict(saved)
        assert opt.param_groups[0]["weigth_decay"] == 0.1
        opt.step()
        with pytest.raises(RuntimeError, match="was called a second time; make a new optimizer"):
            opt.__init__([zeros(3)], process_group=comm)  # type: ignore[misc]
        opt.step()
        opt.close()

    on_ranks(world, body)


# ---- steps


@pytest.mark.parametrize(
    "name, bad, match", [("lr", None, "NoneType"), ("amsgrad", True, "amsgrad was False when")], ids=["lr", "amsgrad"]
)
@pytest.mark.parametrize("world", [None, 2])
def test_a_step_that_fails_changes_nothing(world: int | None, name: str, bad: Any, match: str) -> None:
    def body(comm: Communicator | None) -> None:
        params = make_params()
        opt = ShardedAdamW(params, process_group=comm)
        loss_of(params, dyadic(params, 0)).backward()
        before = [p.detach().clone() for p in params]
        good, opt.param_groups[0][name] = opt.param_groups[0][name], bad
        with pytest.raises((RuntimeError, TypeError, ValueError), match=match):
            opt.step()
        assert_bitwise_equal([p.detach() for p in params], before)
        assert all(int(opt.state[p]["step"]) == 0 for p in params)
        opt.param_groups[0][name] = good
        opt.step()
        assert int(opt.state[params[0]]["step"]) == 1
        opt.close()

    on_ranks(world, body)


def test_numbers_that_are_written_to_in_place_are_compared() -> None:
    decay = torch.tensor(0.1)
    group = ShardedAdamW(make_params(), betas=[0.9, 0.99], weight_decay=decay).param_groups[0]  # type: ignore[arg-type]
    hyperparameters = Hyperparameters()
    digests = [hyperparameters.facts([group]).digest]
    group["betas"][0] = 0.5
    digests.append(hyperparameters.facts([group]).digest)
    decay.fill_(0.9)
    digests.append(hyperparameters.facts([group]).digest)
    assert len(set(digests)) == 3 and hyperparameters.facts([group]).digest == digests[-1]


@pytest.mark.parametrize("world", [None, 2])
def test_sparse_gradients_are_refused(world: int | None) -> None:
    def body(comm: Communicator | None) -> None:
        embedding = torch.nn.Embedding(5, 3, sparse=True)
        opt = ShardedAdamW([("table", embedding.weight)], process_group=comm)
        with pytest.raises(RuntimeError, match="sparse gradients are not supported.*'table'" if comm else "sparse"):
            embedding(torch.tensor([1, 2])).sum().backward()
            opt.step()
        embedding.weight.grad = None
        opt.step()

    on_ranks(world, body)


def test_norms_and_parameters_that_clipping_refuses() -> None:
    params = make_params()
    opt = ShardedAdamW(params)
    with pytest.raises(ValueError, match=r"one element, got shape \(2,\)"):
        opt.clip_grads_with_norm_(1.0, torch.ones(2))
    with pytest.raises(ValueError, match="not trained by this optimizer"):
        opt.clip_grads_with_norm_(1.0, 1.0, parameters=[Parameter(torch.ones(1))])
    loss_of(params, dyadic(params, 0)).backward()
    opt.clip_grad_norm_(0.5)
    loss_of(params, dyadic(params, 1)).backward()
    with pytest.raises(RuntimeError, match="group 0 parameter 0.*changed after clip_grad_norm_"):
        opt.step()  # the local optimizer clips last
    assert_bitwise_equal([p.detach() for p in params], [p.detach() for p in make_params()])


# ---- ranks


def zeros(*shape: int, **options: Any) -> Parameter:
    return Parameter(torch.zeros(shape, **options))


Params = list[tuple[str, Parameter]]
# What rank 1 does differently with its parameters; or which option it has.
DIFFERENT: dict[str, tuple[Callable[[Params], Any] | dict[str, Any], str]] = {
    "shape": (lambda ps: [ps[0], ("layer.1", zeros(8)), ps[2]], r"parameter 1: 'layer.1' \((7|8),\)"),
    "order": (lambda ps: [ps[0], ps[2], ps[1]], r"parameter 1: 'layer.[12]'"),
    "dtype": (lambda ps: [*ps[:2], ("layer.2", zeros(2, 5, dtype=torch.bfloat16))], r"parameter 2: 'layer.2'.*torch."),
    "strides": (lambda ps: [("layer.0", Parameter(zeros(3, 4).t())), *ps[1:]], r"parameter 0: 'layer.0'.*strides"),
    "frozen": (
        lambda ps: [*ps[:2], (ps[2][0], ps[2][1].requires_grad_(False))],
        "rank 0 has parameter 2: 'layer.2' .*; rank 1 has nothing more",
    ),
    "one is missing": (
        lambda ps: [ps[0], ps[2]],
        "rank 0 has parameter 1: 'layer.1' .*; rank 1 has .* 'layer.2'",
    ),
    "one more": (
        lambda ps: [*ps, ("new", zeros(9))],
        "rank 0 has nothing more; rank 1 has parameter 3: 'new'",
    ),
    "groups": (
        lambda ps: [{"params": ps[:1]}, {"params": ps[1:]}],
        "rank 0 has parameter 0: .* group 0, .*; rank 1 has parameter group 1",
    ),
    "granularity": (lambda ps: [{"params": ps, "granularity": "element"}], r"parameter 0.*granularity"),
    "lr": ({"lr": 0.1}, r"parameter group 0: lr 0\.(001|1)"),
    "bucket": ({"bucket_cap_mb": 1.0}, r"options.*bucket_cap_bytes"),
    "maximize": ({"maximize": True}, r"parameter group 0.*maximize (True|False)"),
    "master_weights": ({"master_weights": "none"}, "master_weights"),
    "state_dtype": ({"state_dtype": torch.bfloat16}, "state_dtype"),
    "amsgrad": ({"amsgrad": True}, "amsgrad"),
    "decoupled_weight_decay": ({"decoupled_weight_decay": False}, "decoupled_weight_decay"),
}


@pytest.mark.parametrize("what", DIFFERENT)
def test_ranks_that_disagree_raise_naming_the_first_difference(what: str) -> None:
    change, match = DIFFERENT[what]

    def body(comm: Communicator) -> None:
        params: Any = named([zeros(4, 3), zeros(7), zeros(2, 5)])
        options = change if comm.rank == 1 and isinstance(change, dict) else {}
        if comm.rank == 1 and callable(change):
            params = change(params)
        with pytest.raises(RuntimeError, match=f"ranks disagree on .*{match}"):
            ShardedAdamW(params, process_group=comm, **options)
        ShardedAdamW(make_params(), process_group=comm).step()  # the communicator is as good as before

    run_local(3, body)


def test_a_communicator_and_a_parameter_serve_one_optimizer() -> None:
    """A later optimizer takes parameters over, a group that is added does not."""
    others = LocalWorld(2)

    def body(comm: Communicator) -> None:
        params = make_params()
        first = ShardedAdamW(params, process_group=comm)
        with pytest.raises(ValueError, match="communicator .* belongs to another optimizer"):
            ShardedAdamW([zeros(3)], process_group=comm)
        with Communicator(others.rank(comm.rank), timeout_s=20) as other:
            with ShardedAdamW([zeros(3)], process_group=other) as second:
                with pytest.raises(ValueError, match="parameter 'group 1 parameter 0' belongs to another optimizer"):
                    second.add_param_group({"params": params[:1]})
            first.step()
            second, third = ShardedAdamW(params, process_group=other), ShardedAdamW([zeros(3)], process_group=comm)
            second.step()
            third.step()

    run_local(2, body)


@pytest.mark.parametrize("is_debugging", [False, True])
def test_learning_rates_of_a_static_graph_are_compared_to_debug(
    monkeypatch: pytest.MonkeyPatch, is_debugging: bool
) -> None:
    monkeypatch.setenv("BW_DEBUG", str(int(is_debugging)))

    def body(comm: Communicator) -> None:
        params = make_params()
        opt = ShardedAdamW(params, 0.1, process_group=comm, static_graph=True)
        for _ in range(2):
            loss_of(params, dyadic(params, 1)).backward()
            opt.step()
            opt.zero_grad()
        loss_of(params, dyadic(params, 1)).backward()
        before = [p.detach().clone() for p in params]
        if comm.rank == 1:
            opt.param_groups[0]["lr"] = 0.2
        if is_debugging:
            with pytest.raises(
                RuntimeError, match=r"rank 0 has parameter group 0: lr 0\.1.*; rank 1 has parameter group 0: lr 0\.2"
            ):
                opt.step()
            assert_bitwise_equal([p.detach() for p in params], before)
            opt.param_groups[0]["lr"] = 0.1
        opt.step()
        farthest = max(float((p.detach() - b).abs().max()) for p, b in zip(params, before, strict=True) if p.numel())
        assert (farthest > 0.15) != is_debugging, "0.1 a step, and 0.2 where rank 1 has taken its own"
        opt.close()

    run_local(2, body)
