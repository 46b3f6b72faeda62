"""full_state_dict and load_full_state_dict: whole states on one rank or in a file, to and from torch, in chunks."""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import Parameter

from bucketwheel.checkpoint import TensorShard
from bucketwheel.comm.communicator import Communicator
from bucketwheel.optim.sharded_adamw import ShardedAdamW
from tests.conformance.optimizer.test_optim_state import copies, make, steps, values
from tests.support.bits import assert_bitwise_equal
from tests.support.optim_twins import TINY, make_params, on_ranks, run_local
from tests.support.replica_ranks import with_replicas

BF16, F32 = torch.bfloat16, torch.float32
PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {"dtype": F32, "granularity": "row"},
    "amsgrad": {"dtype": F32, "granularity": "element", "amsgrad": True},
    "bf16, master": {"dtype": BF16, "granularity": "element"},
    "bf16, remainder": {"dtype": BF16, "granularity": "row", "master_weights": "bf16_remainder"},
    "bf16 states": {"dtype": F32, "granularity": "row", "state_dtype": BF16},
    "bf16, remainder, elements": {"dtype": BF16, "granularity": "element", "master_weights": "bf16_remainder"},
}
WORLDS = [None, 1, 2, 3]
FEW = [*((world, "bf16, remainder") for world in (None, 1, 2, 4)), *((3, precision) for precision in PRECISIONS)]


def made(precision: str, comm: Any, seed: int = 0, **more: Any) -> tuple[ShardedAdamW, list[Parameter]]:
    options = {**PRECISIONS[precision], **more}
    params = make_params(options.pop("dtype"), seed)
    cut = {"granularity": options.pop("granularity")}
    groups = [{"params": params[:4], "weight_decay": 0.0, **cut}, {"params": params[4:], "lr": 0.03, **cut}]
    return ShardedAdamW(groups, lr=0.01, weight_decay=0.1, process_group=comm, **{**TINY, **options}), params


def alone(precision: str, count: int) -> tuple[dict[str, Any], list[Parameter]]:
    """What one process has after ``count`` steps with the mean gradients: the same bits."""
    opt, params = made(precision, None)
    steps(opt, params, range(count))
    return opt.state_dict(), params


def rank_of(comm: Communicator | None) -> int:
    return comm.rank if comm else 0


@pytest.mark.parametrize("world, precision", FEW)
def test_it_is_the_state_of_one_process(world: int | None, precision: str, tmp_path: Path) -> None:
    expected, _ = alone(precision, 3)
    last = (world or 1) - 1

    def body(comm: Communicator | None) -> None:
        opt, params = made(precision, comm)
        steps(opt, params, range(3), comm)
        for dst in (0, last):
            saved = opt.full_state_dict(dst, chunk_bytes=100)
            assert bool(saved) == (rank_of(comm) == dst)
            if saved:
                assert_bitwise_equal(saved["state"], expected["state"])
                assert [g["params"] for g in saved["param_groups"]] == [[0, 1, 2, 3], [4, 5, 6, 7, 8]]
                assert saved["param_groups"][1]["lr"] == 0.03
        assert_bitwise_equal(opt.full_state_dict(None)["state"], expected["state"], "on every rank")
        opt.param_groups[1]["of a user"] = [torch.tensor([0.5, 2.0])]
        assert opt.full_state_dict(last, path=tmp_path / "full.pt", chunk_bytes=100) == {}
        read = torch.load(tmp_path / "full.pt", weights_only=True)
        assert_bitwise_equal(read["state"], expected["state"])
        assert read["param_groups"][0]["weight_decay"] == 0.0
        assert read["param_groups"][1]["of a user"][0].tolist() == [0.5, 2.0]
        assert os.listdir(tmp_path) == ["full.pt"]
        if precision.startswith("bf16, "):
            found = opt.full_state_dict(None, masters=False)["state"][3]
            assert found.keys() == {"step", "exp_avg", "exp_avg_sq"}

    on_ranks(world, body)


@pytest.mark.parametrize("world, precision", FEW)
def test_every_rank_goes_on_from_it(world: int | None, precision: str, tmp_path: Path) -> None:
    """As the run that was not stopped, whichever rank has it, and in whatever kind of dict. The dict stays what it was."""
    saved, middle = alone(precision, 3)
    expected, ends = alone(precision, 6)
    torch.save(saved, tmp_path / "full.pt")
    last = (world or 1) - 1

    def body(comm: Communicator | None) -> None:
        strided = copy.deepcopy(saved)
        for entry in strided["state"].values():  # another memory order than the parameter's
            for name, value in entry.items():
                entry[name] = value.t().contiguous().t() if value.dim() == 2 else value.contiguous()
        for given, src in ((saved, 0), (strided, last), (tmp_path / "full.pt", 0), (saved, None)):
            opt, params = made(precision, comm, seed=5)
            for p, value in zip(params, middle, strict=True):
                p.data.copy_(value.data)
            has = src is None or rank_of(comm) == src
            before = copy.deepcopy(given)
            opt.load_full_state_dict(given if has else None, src, chunk_bytes=100)
            if isinstance(given, dict):
                assert_bitwise_equal(given["state"], before["state"])
                assert given["param_groups"] == before["param_groups"]
            assert_bitwise_equal(opt.full_state_dict(None)["state"], saved["state"], "saved as it was loaded")
            steps(opt, params, range(3, 6), comm)
            assert_bitwise_equal(opt.full_state_dict(None)["state"], expected["state"])
            assert_bitwise_equal(values(params), values(ends))
            opt.close()

    on_ranks(world, body)


@pytest.mark.parametrize("world, precision", FEW)
def test_state_dict_is_whole_on_rank_0_where_that_is_asked_for(
    world: int | None, precision: str, tmp_path: Path
) -> None:
    """Issue 44: frameworks save rank 0's, and load it on all ranks."""
    saved, expected = alone(precision, 3)[0], alone(precision, 6)[0]

    def body(comm: Communicator | None) -> None:
        opt, params = made(precision, comm, full_state_dict=True)
        first = opt.state_dict()
        assert is_part(first) == ((world or 1) > 1), "before the first step there is nothing to gather"
        opt.load_state_dict(first)  # as Accelerate does
        steps(opt, params, range(3), comm)
        found = opt.state_dict()
        if rank_of(comm) == 0:
            assert_bitwise_equal(found["state"], saved["state"])
            torch.save(found, tmp_path / "full.pt")
        assert is_part(found) == (rank_of(comm) > 0)
        opt.load_state_dict(found)
        opt.reset_state()
        opt.load_state_dict(torch.load(tmp_path / "full.pt", weights_only=True))
        steps(opt, params, range(3, 6), comm)
        assert_bitwise_equal(opt.full_state_dict(None)["state"], expected["state"])

    on_ranks(world, body)


def is_part(saved: dict[str, Any]) -> bool:
    return any(isinstance(value, TensorShard) for entry in saved["state"].values() for value in entry.values())


@pytest.mark.parametrize("amsgrad", [False, True])
@pytest.mark.parametrize("world", WORLDS)
def test_torch_goes_on_from_ours_and_we_from_torchs(world: int | None, amsgrad: bool) -> None:
    tolerance = {"rtol": 2e-6, "atol": 1e-7}

    def body(comm: Communicator | None) -> None:
        params = make_params()
        opt = make(params, comm, amsgrad=amsgrad)
        steps(opt, params, range(3), comm)
        theirs = copies(params)
        stock = torch.optim.AdamW([{"params": theirs[:4]}, {"params": theirs[4:]}])
        stock.load_state_dict(opt.full_state_dict(None))
        assert stock.param_groups[1]["lr"] == 0.03 and stock.param_groups[0]["amsgrad"] == amsgrad
        assert all(state["step"].dtype == F32 and state["step"].dim() == 0 for state in stock.state.values())
        steps(opt, params, range(3, 6), comm)
        steps(stock, theirs, range(3, 6))
        torch.testing.assert_close(values(theirs), values(params), **tolerance)
        opt.close()
        params = copies(theirs)
        opt = make(params, comm, amsgrad=amsgrad)
        opt.load_full_state_dict(stock.state_dict() if rank_of(comm) == 0 else None)
        steps(opt, params, range(6, 9), comm)
        steps(stock, theirs, range(6, 9))
        torch.testing.assert_close(values(params), values(theirs), **tolerance)

    on_ranks(world, body)


def test_replicas_have_it_too() -> None:
    """Of 2 x 2 ranks any one can have it, and give it."""
    expected, _ = alone("fp32", 3)

    def body(rank: int, shard: Communicator, replicate: Communicator) -> None:
        opt, _ = made("fp32", shard, replicate_group=replicate)
        opt.load_full_state_dict(expected if rank == 3 else None, 3, chunk_bytes=100)
        assert_bitwise_equal(opt.full_state_dict(None)["state"], expected["state"])
        saved = opt.full_state_dict(2, chunk_bytes=100)
        assert_bitwise_equal(saved.get("state"), expected["state"] if rank == 2 else None)

    with_replicas(2, 2, body)


# ---- names, and parameters that are frozen


def named(comm: Communicator | None, **options: Any) -> tuple[torch.nn.Module, ShardedAdamW]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Linear(5, 3))
    model[0].bias.requires_grad_(options.pop("trains_all", True))
    return model, ShardedAdamW(model.named_parameters(), lr=0.01, process_group=comm, **{**TINY, **options})


def train(model: torch.nn.Module, opt: ShardedAdamW) -> None:
    model(torch.ones(2, 6)).sum().backward()
    opt.step()
    opt.zero_grad()


@pytest.mark.parametrize("world", [None, 2])
def test_parameters_go_by_name(world: int | None) -> None:
    def body(comm: Communicator | None) -> None:
        model, opt = named(comm)
        train(model, opt)
        numbered = opt.full_state_dict(None)
        saved = opt.full_state_dict(None, model=torch.nn.Sequential(model)[0])
        names = [name for name, _ in model.named_parameters()]
        assert list(saved["state"]) == names == saved["param_groups"][0]["params"]
        saved["param_groups"][0]["lr"] = 0.5
        saved["param_groups"][0]["params"].reverse()
        opt.close()
        _, fresh = named(comm)
        fresh.load_full_state_dict(saved if rank_of(comm) == 0 else None)
        assert_bitwise_equal(fresh.full_state_dict(None)["state"], numbered["state"])
        assert fresh.param_groups[0]["lr"] == 0.5

    on_ranks(world, body)


@pytest.mark.parametrize("world", [None, 2])
@pytest.mark.parametrize("src", [0, None])
def test_the_state_of_a_frozen_parameter_waits_for_it(world: int | None, src: int | None) -> None:
    def body(comm: Communicator | None) -> None:
        model, opt = named(comm)
        train(model, opt)
        saved = opt.full_state_dict(None)
        opt.close()
        other, fresh = named(comm, trains_all=False)
        fresh.load_full_state_dict(saved if src is None or rank_of(comm) == src else None, src, chunk_bytes=8)
        assert sorted(fresh.full_state_dict(None)["state"]) == [0, 2, 3]
        other[0].bias.requires_grad_(True)
        assert_bitwise_equal(fresh.full_state_dict(None)["state"], saved["state"])

    on_ranks(world, body)


# ---- what is refused


class Shard(torch.Tensor):
    pass


def after(change: Callable[[Any], object]) -> Callable[[Any], Any]:
    """Gives the state that ``change`` was made to."""

    def give(saved: Any) -> Any:
        change(saved)
        return saved

    return give


def exchanged(value: Any) -> Callable[[Any], Any]:
    return after(lambda saved: saved["state"][3].update(exp_avg=value))


@pytest.mark.parametrize(
    "give, expected",
    [
        (after(lambda saved: saved["state"][8].pop("exp_avg_sq")), "has no 'exp_avg_sq'"),
        (exchanged(torch.zeros(33, 64)), r"'exp_avg' of .* has shape \(33, 64\), the parameter \(64, 33\)"),
        (exchanged(1.5), "'exp_avg' of .* is a float, not a tensor"),
        (exchanged(torch.zeros(64, 33).as_subclass(Shard)), "is a Shard, but load_full_state_dict takes whole tensors"),
        (after(lambda saved: [group.update(amsgrad=True) for group in saved["param_groups"]]), "amsgrad=True"),
        (after(lambda saved: saved["param_groups"].pop()), "different number of parameter groups"),
        (lambda saved: {}, "has no 'state'"),
        (lambda saved: {"param_groups.x.lr": 0.1}, "It is flattened: make it without flatten_optimizer_state_dict"),
        (lambda saved: None, "rank 1 must pass the dict"),
        (lambda saved: [saved], "takes a dict, a path or None, got list"),
        (lambda saved: "/nowhere/full.pt", "No such file"),
    ],
)
def test_all_ranks_refuse_what_one_cannot_load(give: Any, expected: str) -> None:
    saved, _ = alone("fp32", 2)

    def body(comm: Communicator) -> None:
        opt, params = made("fp32", comm)
        steps(opt, params, range(1), comm)
        before, groups = opt.full_state_dict(None), copy.deepcopy(opt.state_dict()["param_groups"])
        given = give(copy.deepcopy(saved)) if comm.rank == 1 else None
        with pytest.raises(Exception, match=expected) as raised:
            opt.load_full_state_dict(given, 1)
        assert comm.rank == 1 or raised.type in (ValueError, KeyError)
        assert_bitwise_equal(opt.full_state_dict(None)["state"], before["state"], "nothing has changed")
        assert opt.state_dict()["param_groups"] == groups
        steps(opt, params, range(1, 2), comm)

    run_local(2, body)


@pytest.mark.parametrize(
    "call", ["another dst", "no such rank", "a path for all", "no chunk", "no folder", "other model"]
)
def test_all_ranks_refuse_what_cannot_be_saved(call: str, tmp_path: Path) -> None:
    def body(comm: Communicator) -> None:
        opt, params = made("fp32", comm)
        given, expected = {
            "another dst": ({"dst": comm.rank}, "ranks made different optimizer calls.*dst=0.*dst=1"),
            "no such rank": ({"dst": 2}, "the rank is 2, expected 0 to 1"),
            "a path for all": ({"dst": None, "path": tmp_path / "x"}, "path= needs dst="),
            "no chunk": ({"chunk_bytes": 0}, "chunk_bytes must be at least 1"),
            "no folder": ({"path": tmp_path / "none" / "x"}, "none|parent"),
            "other model": ({"model": torch.nn.Linear(1, 1)}, "is not in the model"),
        }[call]
        with pytest.raises((ValueError, OSError, RuntimeError), match=re.compile(expected, re.DOTALL)):
            opt.full_state_dict(**given)
        assert not os.listdir(tmp_path)
        steps(opt, params, range(1), comm)

    run_local(2, body)


def test_a_file_that_cannot_be_finished_is_an_error_everywhere(tmp_path: Path, monkeypatch: Any) -> None:
    (tmp_path / "full.pt").write_bytes(b"before")
    monkeypatch.setattr(os, "fsync", lambda number: os.write(99999, b""))

    def body(comm: Communicator) -> None:
        opt, _ = made("fp32", comm)
        with pytest.raises((OSError, ValueError), match="Bad file descriptor"):
            opt.full_state_dict(path=tmp_path / "full.pt")
        assert os.listdir(tmp_path) == ["full.pt"] and (tmp_path / "full.pt").read_bytes() == b"before"

    run_local(2, body)
