"""Arguments of the wrong type: a TypeError or ValueError that names the argument, and never pybind11's list of signatures."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import bucketwheel as bw
from bucketwheel.comm.arguments import native_op_of, seconds_of


class Thing:
    def __repr__(self) -> str:
        return "<thing>"


def ones() -> torch.Tensor:
    return torch.ones(4)


def new_comm() -> bw.Communicator:
    return bw.Communicator(bw.LocalWorld(1).rank(0))


def gather() -> bw.Handle:
    return bw.all_gather([], [], new_comm(), timing=True)


NUMBERS = ("0.5", None, (1, 2), [1], Thing(), torch.ones(2))
INTS = ("1", 1.5, (1, 2), None, Thing())
LISTS: tuple[Any, ...] = ("ab", 3, None, Thing())
TENSORS = ("x", 3, None, [1.0], Thing())
SHAPES = ("x", None, 1.5, [1.5], Thing(), torch.float32)
DTYPES = ("float32", None, Thing(), float)
STREAMS = ("s", 3, Thing())
OPS = (3, None, Thing(), ["sum"], torch.ones(1))
GROUPS = ("gloo", [0, 1], 3, Thing())
COMMS = (dist.group, "gloo", None, 3, [0], bw.Pool())
HANDLES = ("x", 3, [3], Thing())
TIMES = ("5", [1], Thing(), torch.ones(2))
ISSUE = {"stream": STREAMS, "after": HANDLES}
PAIR = {"outputs": LISTS, "inputs": LISTS, "comm": COMMS}
LEASE = {"shape": SHAPES, "dtype": DTYPES}
ADAM = {name: [ones()] for name in ("params", "grads", "exp_avgs", "exp_avg_sqs")}
WEIGHTS = {"params": [nn.Parameter(ones())]}

# What is called, its good arguments, and by argument what it must not be.
CALLS: list[tuple[str, Callable[[], Any], dict[str, Any], dict[str, Any]]] = [
    ("all_gather", lambda: bw.all_gather, {"outputs": [], "inputs": []}, {**PAIR, **ISSUE}),
    ("reduce_scatter", lambda: bw.reduce_scatter, {"outputs": [], "inputs": []}, {**PAIR, **ISSUE, "op": OPS}),
    ("average", lambda: bw.reduce_scatter, {"outputs": [], "inputs": [], "op": "avg"}, {"comm": COMMS}),
    ("AllGatherRequest", lambda: bw.AllGatherRequest, {"outputs": [], "inputs": []}, PAIR),
    ("ReduceScatterRequest", lambda: bw.ReduceScatterRequest, {"outputs": [], "inputs": []}, {**PAIR, "op": OPS}),
    ("start", lambda: bw.AllGatherRequest([], [], new_comm()).start, {}, ISSUE),
    ("all_reduce", lambda: new_comm().all_reduce, {"tensor": ones()}, {"tensor": TENSORS, "op": OPS, **ISSUE}),
    ("broadcast", lambda: new_comm().broadcast, {"tensor": ones()}, {"tensor": TENSORS, "src": INTS, **ISSUE}),
    ("barrier", lambda: new_comm().barrier, {}, {"timeout": TIMES}),
    ("exchange", lambda: new_comm().exchange, {}, {"payload": ("x", 3, None)}),
    ("post", lambda: new_comm().post, {}, {"payload": ("x", 3, None)}),
    ("collect", lambda: new_comm().collect, {}, {"timeout": TIMES}),
    ("close", lambda: new_comm().close, {}, {"timeout": TIMES}),
    ("split", lambda: new_comm().split, {"color": 0}, {"color": INTS, "key": INTS, "name": (3, Thing())}),
    (
        "Communicator",
        lambda: bw.Communicator,
        {},
        {"group": GROUPS, "timeout_s": TIMES, "name": (3,), "device": ("x", 1.5), "options": ("x", 3)},
    ),
    ("LocalWorld", lambda: bw.LocalWorld, {}, {"size": INTS}),
    ("LocalWorld.rank", lambda: bw.LocalWorld(1).rank, {}, {"rank": INTS}),
    ("wait", lambda: gather().wait, {}, {"stream": (*STREAMS, timedelta(1)), "timeout": TIMES}),
    ("synchronize", lambda: gather().synchronize, {}, {"timeout": TIMES}),
    ("elapsed_time", lambda: gather().wait().elapsed_time, {}, {"later": ("x", None)}),
    ("wait_all", lambda: bw.wait_all, {}, {"handles": ("x", 3, [3], None)}),
    ("PreMulSum", lambda: bw.PreMulSum, {}, {"factor": NUMBERS}),
    (
        "Pool",
        lambda: bw.Pool,
        {},
        {"upstream": (3,), "align_bytes": INTS, "min_slab_bytes": INTS, "device": ("x", 1.5)},
    ),
    (
        "acquire",
        lambda: bw.Pool().acquire,
        {"key": "", "nbytes": 4},
        {"key": (3, None), "nbytes": INTS, "stream": STREAMS},
    ),
    ("empty", lambda: bw.Pool().empty, {"shape": 4, "dtype": torch.float32}, LEASE),
    ("holds", lambda: bw.Pool().holds, {}, {"tensor": TENSORS}),
    (
        "tensor",
        lambda: bw.Pool().acquire("", 16).tensor,
        {"shape": 4, "dtype": torch.float32},
        {**LEASE, "offset_bytes": INTS},
    ),
    ("release", lambda: bw.Pool().acquire("", 16).release, {}, {"after": HANDLES}),
    ("l2_norm", lambda: bw.l2_norm, {}, {"tensors": (*LISTS, ones(), torch.ones(2, 2), iter([ones()]), {"a": 1}, [3])}),
    (
        "adam_step",
        lambda: bw.adam_step,
        {**ADAM, "steps": 1, "lr": 0.1},
        {
            **dict.fromkeys(ADAM, (*LISTS, ones(), iter([ones()]))),
            **dict.fromkeys(("lr", "eps", "weight_decay", "grad_scale"), NUMBERS),
            **dict.fromkeys(("max_exp_avg_sqs", "master_params", "remainders"), ("ab", ones(), 3)),
            **{"betas": ("ab", 0.9, None, (1,), ("a", "b")), "noop": ("x", True, 3), "seed": INTS},
            **{"steps": ("1", 1.5, None, ["1"]), "param_ids": ("x", 3, [1.5]), "state_rounding": (3, "up")},
        },
    ),
    (
        "ShardedAdamW",
        lambda: bw.ShardedAdamW,
        {**WEIGHTS},
        {
            **dict.fromkeys(("lr", "eps", "weight_decay"), NUMBERS[:-1]),
            **{"betas": ("ab", 0.9, None, (1,), ("a", "b")), "process_group": GROUPS, "replicate_group": GROUPS},
            **{"bucket_cap_mb": ("x", (1,)), "max_inflight_buckets": INTS, "on_external_update": (3, None)},
        },
    ),
    ("full_grad", lambda: bw.ShardedAdamW([nn.Parameter(ones())]).full_grad, {}, {"param": ("x", 3, None)}),
    (
        "pack",
        lambda: bw.pack,
        {"items": [bw.PackItem(4)], "world": 1, "bucket_numel": 16},
        {"items": ([3],), "world": INTS},
    ),
]


@pytest.mark.parametrize(("name", "function", "good", "wrong"), CALLS, ids=[call[0] for call in CALLS])
def test_an_argument_of_the_wrong_type_is_named(
    name: str, function: Callable[[], Any], good: dict[str, Any], wrong: dict[str, Any]
) -> None:
    for argument, values in wrong.items():
        for value in values:
            with pytest.raises((TypeError, ValueError)) as raised:
                arguments = {"comm": new_comm(), **good} if "comm" in wrong else good
                function()(**{**arguments, argument: value})
            text = str(raised.value)
            assert argument in text and "incompatible" not in text, f"{name}({argument}={value!r}): {text}"


def test_what_helps_is_said() -> None:
    mesh = type("DeviceMesh", (), {"get_group": lambda self: None})()
    for call, text in (
        (lambda: bw.ShardedAdamW([nn.Parameter(ones())], process_group=mesh), r"mesh.get_group\(\)"),
        (lambda: bw.ShardedAdamW([nn.Parameter(ones())], process_group=[0, 1]), "new_group"),
        (lambda: bw.Communicator("gloo"), "group must be a torch ProcessGroup, a LocalRank or None, got str 'gloo'"),
        (lambda: bw.Pool().acquire("k", (4, 4)), r"nbytes is \(4, 4\), .*Pool.empty takes a shape"),
        (lambda: bw.all_gather(ones(), ones(), None), r"expected a bucketwheel.Communicator"),
        (lambda: bw.l2_norm(ones()), "tensors is a Tensor, expected a list of tensors"),
        (lambda: bw.adam_step(**ADAM, steps=1, lr="0.5"), "lr is '0.5', expected a number"),
    ):
        with pytest.raises(TypeError, match=text):
            call()


def test_reductions_have_torchs_names_too() -> None:
    ops = dist.ReduceOp
    assert [native_op_of(op) for op in (ops.SUM, ops(ops.SUM), ops.AVG, "avg")] == ["sum", "sum", "avg", "avg"]
    half = torch.tensor(0.5)
    premultiplied = [dist._make_nccl_premul_sum(factor) for factor in (0.5, half)]  # type: ignore[attr-defined]
    assert [native_op_of(op) for op in (*premultiplied, bw.PreMulSum(0.5))] == [0.5] * 3
    comm = new_comm()
    for op in (ops.MAX, ops.PREMUL_SUM, "max"):
        with pytest.raises(ValueError, match="is not supported: 'sum', 'avg' and PreMulSum are"):
            comm.all_reduce(ones(), op)


@pytest.mark.parametrize("timeout", ["5", -1, float("nan"), timedelta(seconds=-1)])
def test_a_barrier_of_a_wrong_timeout_enqueues_nothing(timeout: Any) -> None:
    comm = new_comm()
    before = comm.barrier().seq
    with pytest.raises((TypeError, ValueError), match=r"timeout (is|must be at least 0 seconds)"):
        comm.barrier(timeout)
    assert comm.barrier(60).seq == before + 1


def test_seconds() -> None:
    assert [seconds_of(one) for one in (None, 2, 0.5, timedelta(milliseconds=1500))] == [None, 2.0, 0.5, 1.5]
