"""What torch's own code does with the states: it is right, or refused by name. And when they may be saved."""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.distributed.checkpoint import HuggingFaceStorageWriter, _async_process_executor
from torch.distributed.checkpoint import state_dict as torch_states
from torch.distributed.checkpoint.state_dict import StateDictOptions
from torch.nn import Parameter

import bucketwheel as bw
from bucketwheel.checkpoint import TensorShard, tensor_shard
from tests.support.bits import assert_bitwise_equal
from tests.support.checkpoint_routes import AFTER, BEFORE, ROUTES, Training, both, set_both, uninterrupted


def matrices() -> list[Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [Parameter(torch.randn(shape, generator=generator)) for shape in ((64, 33), (5, 7), (4, 3, 2))]


def moments(run: Training) -> dict[str, Any]:
    state = run.opt.state_dict()["state"]
    return {f"{i}.{name}": entry[name] for i, entry in state.items() for name in ("exp_avg", "exp_avg_sq")}


def expect_refusal(call: Callable[[], Any], *words: str) -> None:
    """By all ranks, with the words of the one that refuses."""
    with pytest.raises(BaseException) as found:  # torch's CheckpointException is no Exception
        call()
    for word in words:
        assert word in str(found.value), found.value


# --- half checkpoints (issue 44) ------------------------------------------------------------------------------------------


def pickling(rank: int, size: int, directory: str) -> None:
    run = Training("fp32", group=dist.group.WORLD)
    run.steps(0)
    tensor_shard.warn_of_part.cache_clear()  # once in a process
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for number, route in enumerate(ROUTES.values()):
            waiting = route.save(run, Path(directory, str(number)))
            run.steps(number)
            waiting() if waiting else None
        with bw.Snapshots(run.opt, every=1):
            run.steps(1)
        copy.deepcopy(run.opt.state_dict())
        assert not [one for one in told if "pickled" in str(one.message)]
        torch.save(run.opt.state_dict(), io.BytesIO())
        pickle.dumps(run.opt.state_dict())
        pickle.dumps(dict(run.opt.state))
    text, shown = [str(one.message) for one in told if "pickled" in str(one.message)]
    assert "is one rank's part, from optimizer.state" in shown
    assert (
        f"rank {rank}'s part of 2" in text and "bw.checkpoint.save(folder, model" in text and "full_state_dict=" in text
    )
    _async_process_executor._CHECKPOINT_PROCESS = None


def test_pickling_a_part_warns_once_and_saving_all_parts_does_not(rank_pool: Any, tmp_path: Path) -> None:
    rank_pool(2).run(pickling, str(tmp_path), timeout_s=120)


def by_other_routes(rank: int, size: int, directory: str) -> None:
    given: dict[str, Any] = {"group": dist.group.WORLD, "process_group": None, "full_state_dict": True}
    run = Training("fp32", **given)
    run.steps(*BEFORE)
    for number, name in enumerate(("get_state_dict", "get_state_dict, whole", "bw.checkpoint.save")):
        ROUTES[name].save(run, Path(directory, str(number)))
        other = Training("fp32", **given, seed=5)
        ROUTES[name].load(other, Path(directory, str(number)))
        other.steps(*AFTER)
        other.opt.param_sync()
        assert_bitwise_equal([p.detach() for p in other.params], uninterrupted("fp32")[0], name)
        other.opt.close()
    expect_refusal(lambda: dcp.save(both(run), checkpoint_id=directory + "/mixed"), "validate")


def test_full_state_dict_changes_no_other_route(rank_pool: Any, tmp_path: Path) -> None:
    """Where torch saves from all ranks by ``optimizer.state_dict()``, it refuses one that has all, beside parts of it."""
    rank_pool(2).run(by_other_routes, str(tmp_path), timeout_s=120)


# --- writers and readers ------------------------------------------------------------------------------------------------


def with_safetensors(rank: int, size: int, cut: str, is_distributed: bool, directory: str) -> dict[str, Any]:
    whole_rows = lambda params: [{"params": params, "granularity": "row"}]  # noqa: E731 (whatever padding that takes)
    run = Training("fp32", cut, group=dist.group.WORLD, params=matrices(), grouping=whole_rows, bucket_cap_mb=1.0)
    run.steps(0, 1)
    writer = HuggingFaceStorageWriter(directory, save_distributed=is_distributed, enable_consolidation=is_distributed)
    save = lambda: dcp.save(moments(run), storage_writer=writer)  # noqa: E731
    if cut == "rows" and is_distributed:
        save()
    elif is_distributed:
        expect_refusal(save, "keeps one box per tensor", "of '0.exp_avg'", "full_state_dict()")
    else:
        expect_refusal(save, "writes one file, but", "full_state_dict()")
    return run.opt.full_state_dict()


def test_a_hugging_face_writer_with_one_box_of_each_tensor(rank_pool: Any, tmp_path: Path) -> None:
    expected = rank_pool(2).run(with_safetensors, "rows", True, str(tmp_path))[0]
    (file,) = tmp_path.glob("*.safetensors")
    saved = load_file(file)
    for i, entry in expected["state"].items():
        for name in ("exp_avg", "exp_avg_sq"):
            assert entry[name].any()
            assert_bitwise_equal(saved[f"{i}.{name}"], entry[name], f"{name} of {i}")


@pytest.mark.parametrize(("cut", "is_distributed"), [("elements", True), ("rows", False)])
def test_a_hugging_face_writer_that_would_lose_some(
    rank_pool: Any, cut: str, is_distributed: bool, tmp_path: Path
) -> None:
    rank_pool(2).run(with_safetensors, cut, is_distributed, str(tmp_path))
    assert not list(tmp_path.rglob("*.safetensors"))


def with_shown_state(rank: int, size: int, directory: str) -> None:
    run = Training("fp32", group=dist.group.WORLD, params=matrices())
    shown = {f"{i}": run.opt.state[p]["exp_avg"] for i, p in enumerate(run.params)}
    words = ("this rank's part", "save optimizer.state_dict()")
    expect_refusal(lambda: dcp.save(shown, checkpoint_id=directory), *words)
    expect_refusal(lambda: dcp.async_save(shown, checkpoint_id=directory), *words)
    writer = dcp.FileSystemWriter(directory)
    expect_refusal(lambda: dcp.async_save(shown, storage_writer=writer).result(), *words)


def test_parts_that_are_shown_are_not_saved(rank_pool: Any, tmp_path: Path) -> None:
    rank_pool(2).run(with_shown_state, str(tmp_path))


def with_the_stager_of_a_writer(rank: int, size: int, directory: str) -> None:
    """torch makes a plain tensor for a scalar there, on all ranks. A group without parameters is saved too."""
    grouping = lambda params: [{"params": params}, {"params": []}]  # noqa: E731
    run = Training("fp32", group=dist.group.WORLD, params=matrices(), grouping=grouping)
    run.steps(0, 1)
    state = both(run)
    dcp.async_save(state, storage_writer=dcp.FileSystemWriter(directory)).result(timeout=60)
    run.steps(2)
    loaded = both(run)
    dcp.load(loaded, checkpoint_id=directory)
    assert_bitwise_equal(loaded, state)
    set_both(run, loaded)
    assert_bitwise_equal(both(run), state)
    scalar = Training("fp32", group=dist.group.WORLD, params=[Parameter(torch.ones(()))])
    writer = dcp.FileSystemWriter(directory + "/scalar")
    expect_refusal(lambda: dcp.async_save(both(scalar), storage_writer=writer), "DefaultStager")


def test_a_writer_that_stages_by_itself(rank_pool: Any, tmp_path: Path) -> None:
    rank_pool(2).run(with_the_stager_of_a_writer, str(tmp_path))


# --- whole states by torch's functions ----------------------------------------------------------------------------------


def with_whole_states(rank: int, size: int) -> None:
    run = Training("bf16, remainder", group=dist.group.WORLD)
    run.steps(0, 1)
    expected = run.opt.full_state_dict(None, model=run.model)
    flat = torch_states.get_optimizer_state_dict(
        run.model, run.opt, options=StateDictOptions(full_state_dict=True, flatten_optimizer_state_dict=True)
    )
    assert_bitwise_equal(flat["state.p3.exp_avg"], expected["state"]["p3"]["exp_avg"])
    # What torch sends of a transposed parameter is garbled there, whoever made it.
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    put = lambda: torch_states.set_optimizer_state_dict(run.model, run.opt, expected, options=options)  # noqa: E731
    expect_refusal(put, "has strides", "load_full_state_dict")


def test_whole_states(rank_pool: Any) -> None:
    rank_pool(2).run(with_whole_states)


# --- when, and of what --------------------------------------------------------------------------------------------------


def by_one_alone(rank: int, size: int) -> list[str]:
    run = Training("bf16, master", group=dist.group.WORLD)
    run.steps(0)
    found = []
    if rank == 1:  # what had to wait for the other would wait for a barrier that it is in
        parts = [run.opt.state_dict(), torch_states.get_optimizer_state_dict(run.model, run.opt)]
        found = [type(entry["exp_avg"]).__name__ for part in parts for entry in part["state"].values()]
    dist.barrier()
    return found


def test_a_state_dict_needs_no_other_rank(rank_pool: Any) -> None:
    assert rank_pool(2).run(by_one_alone)[1] == [TensorShard.__name__] * 18


def at_any_moment(rank: int, size: int, directory: str, route: str) -> None:
    """Before the first step, after a step that was skipped, and while gradients add up, which are not saved."""
    run = Training("fp32", group=dist.group.WORLD)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)

    def skipped() -> None:
        scaler.scale(run.params[3].sum() * float("inf")).backward()
        scaler.step(run.opt)
        scaler.update()
        run.opt.zero_grad()

    def adding_up() -> None:
        with run.opt.no_sync():
            run.backward(3)

    for moment, before in (("first", lambda: None), ("skipped", skipped), ("adding up", adding_up)):
        before()
        expected = copy.deepcopy(both(run))
        wait = ROUTES[route].save(run, Path(directory, moment))
        if wait is not None:
            wait()
        if moment == "adding up":
            expect_refusal(lambda: run.opt.load_state_dict(run.opt.state_dict()), "gradients are pending")
        run.opt.zero_grad()
        other = Training("fp32", group=dist.group.WORLD, seed=1)
        other.steps(7)
        ROUTES[route].load(other, Path(directory, moment))
        assert_bitwise_equal(both(other), expected, moment)
        run.steps(0)
        other.steps(0)
        assert_bitwise_equal(both(other), both(run), moment)
        other.opt.close()


@pytest.mark.parametrize("route", ["dcp.save", "get_state_dict", "async_save, thread", "bw.checkpoint.async_save"])
def test_at_any_moment(rank_pool: Any, route: str, tmp_path: Path) -> None:
    rank_pool(2).run(at_any_moment, str(tmp_path), route)
