"""bw.checkpoint.save and async_save: the values of the call, within a bound; a save that fails leaves the one before."""

from __future__ import annotations

import errno
import gc
import io
import os
import subprocess
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import bucketwheel as bw
from bucketwheel import CheckpointError, checkpoint
from bucketwheel.checkpoint import everyone, saving
from bucketwheel.checkpoint.staging import Staging
from bucketwheel.checkpoint.writer import DataFile
from bucketwheel.torch_internals import store_of
from tests.support import checkpoint_jobs as jobs
from tests.support.bits import assert_bitwise_equal
from tests.support.checkpoint_jobs import KINDS, Job, Model
from tests.support.optim_twins import on_ranks, run_local

LEAST = 16 << 10  # bytes of staging memory
LIMIT_S = 60


@pytest.fixture
def slow_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    write = DataFile._write

    def slowly(self: DataFile, data: memoryview) -> None:
        time.sleep(0.002)
        write(self, data)

    monkeypatch.setattr(DataFile, "_write", slowly)


@pytest.fixture
def late_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is read until steps of this rank have staged everything, or one waits with its staging memory used up."""
    read = Staging.read

    def late(self: Staging, chunk: Any) -> Iterator[Any]:
        until = time.monotonic() + LIMIT_S
        while self._of_param and not self.stats.waits and time.monotonic() < until:
            time.sleep(0.001)
        yield from read(self, chunk)

    monkeypatch.setattr(Staging, "read", late)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Nothing is written until it is set."""
    event = threading.Event()
    write = DataFile._write

    def when_open(self: DataFile, data: memoryview) -> None:
        assert event.wait(LIMIT_S)
        write(self, data)

    monkeypatch.setattr(DataFile, "_write", when_open)
    yield event
    event.set()


def loaded(folder: Path, **options: Any) -> Job:
    job = jobs.of(None, seed=9, **options)
    checkpoint.load(folder, job.model, job.opt)
    return job


def ends(pending: saving.PendingSave) -> saving.SaveStats:
    pending.wait(LIMIT_S)
    written, of = pending.progress()
    assert pending.done() and written == of > 0
    return pending.stats


# ---- the values of the call


@pytest.mark.parametrize("world", [None, 2, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_steps_right_after_the_call_do_not_change_what_is_saved(
    kind: str, world: int | None, late_reads: None, tmp_path: Path
) -> None:
    def train(comm: Any) -> Any:
        job = jobs.of(comm, **KINDS[kind])
        job.steps(1, 2)
        saved = job.values()
        pending = checkpoint.async_save(tmp_path, job.model, job.opt, staging_bytes=LEAST)
        assert not pending.done()
        job.steps(3)
        job.model.mean += 1  # as BatchNorm does
        job.steps(4)
        stats = ends(pending)
        job.model.mean -= 1
        after = job.values()
        return saved, after, stats

    ranks = on_ranks(world, train)
    saved, after, _ = ranks[0]
    job = loaded(tmp_path, **KINDS[kind])
    assert_bitwise_equal(job.values(), saved)
    job.steps(3, 4)
    assert_bitwise_equal(job.values(), after)
    for _, _, stats in ranks:
        assert 0 < stats.peak_staging_bytes <= LEAST and stats.staged_bytes > 0
    assert any(stats.waits and stats.waited_s > 0 for _, _, stats in ranks)


def test_nothing_is_staged_that_was_written_in_time(tmp_path: Path) -> None:
    job = jobs.of(None)
    job.steps(1)
    pending = checkpoint.async_save(tmp_path, job.model, job.opt)
    pending.wait(LIMIT_S)
    job.steps(2)
    assert pending.stats.waits == pending.stats.staged_bytes == 0
    engine = weakref.ref(job.opt._engine)
    assert not engine().write_observers
    del job
    gc.collect()
    assert engine() is None and pending.done(), "who keeps the handle keeps the states"


def test_what_a_graph_may_write_to_is_in_the_file_when_the_call_returns(slow_disk: None, tmp_path: Path) -> None:
    job = jobs.of(None)
    job.opt.param_groups[0]["capturable"] = True  # as it is of one that is made so, on CUDA
    pending = checkpoint.async_save(tmp_path, job.model, job.opt)
    written, of = pending.progress()
    assert written == of > 0


def new_group(job: Job) -> None:
    job.opt.add_param_group({"params": [("new", torch.nn.Parameter(torch.ones(3)))]})


def load_other(job: Job) -> None:
    state = job.opt.state_dict()
    for entry in state["state"].values():
        for value in entry.values():
            getattr(value, "piece", value).zero_()
    job.opt.load_state_dict(state)


def load_whole(job: Job) -> None:
    whole = job.opt.full_state_dict(None)
    for entry in whole["state"].values():
        entry["exp_avg"].zero_()
    job.opt.load_full_state_dict(whole, None)


def move(job: Job) -> None:
    for p in job.params:
        p.data = torch.zeros_like(p)
    job.steps(3)


def assign(job: Job) -> None:
    for p in job.params:
        job.opt.state[p]["exp_avg"] = torch.zeros_like(p)
    job.steps(3)


OTHERS: dict[str, Callable[[Job], Any]] = {
    "add_param_group": new_group,
    "load_state_dict": load_other,
    "load_full_state_dict": load_whole,
    "reset_state": lambda job: job.opt.reset_state(),
    "moved parameters": move,
    "assigned states": assign,
    "close": lambda job: job.opt.close(),
}


@pytest.mark.parametrize("world", [None, 2])
@pytest.mark.parametrize("what", OTHERS)
def test_other_writes_of_the_optimizer_stage_too(
    what: str, world: int | None, gate: threading.Event, tmp_path: Path
) -> None:
    barrier = threading.Barrier(world or 1)

    def train(comm: Any) -> Any:
        job = jobs.of(comm)
        job.steps(1, 2)
        saved = job.values()
        pending = checkpoint.async_save(tmp_path, job.model, job.opt)
        OTHERS[what](job)
        barrier.wait(LIMIT_S)
        gate.set()
        assert ends(pending).staged_bytes > 0
        return saved

    saved = on_ranks(world, train)[0]
    assert_bitwise_equal(loaded(tmp_path).values(), saved)


@pytest.mark.parametrize("world", [None, 3])
def test_a_second_save_waits_for_the_first_and_a_load_for_both(
    world: int | None, slow_disk: None, tmp_path: Path
) -> None:
    def train(comm: Any) -> None:
        job = jobs.of(comm)
        job.steps(1)
        first = checkpoint.async_save(tmp_path, job.model, job.opt)
        job.steps(2)
        saved = job.values()
        second = checkpoint.async_save(tmp_path, job.model, job.opt)
        assert first.done()
        job.steps(3)
        checkpoint.load(tmp_path, job.model, job.opt)
        assert second.done()
        assert_bitwise_equal(job.values(), saved)

    on_ranks(world, train)


def test_a_save_of_another_optimizer_into_the_folder_waits_for_the_first(slow_disk: None, tmp_path: Path) -> None:
    first, second = jobs.of(None), jobs.of(None, seed=5)
    pending = checkpoint.async_save(tmp_path, first.model, first.opt)
    another = checkpoint.async_save(os.path.relpath(tmp_path), second.model, second.opt)
    assert pending.done()
    ends(another)
    assert_bitwise_equal(loaded(tmp_path).values(), second.values())


# ---- writes by others


@torch.no_grad()
def edit_param(job: Job) -> None:
    job.params[3].add_(1)


@torch.no_grad()
def edit_frozen(job: Job) -> None:
    job.model.frozen.fill_(0)


def edit_state(job: Job) -> None:
    job.opt.state[job.params[3]]["exp_avg"].zero_()


EDITS = {
    "parameter 'weights.3'": edit_param,
    "'model.frozen'": edit_frozen,
    "the state 'exp_avg' of parameter 'weights": edit_state,
}


@pytest.mark.parametrize("world", [None, 2])
@pytest.mark.parametrize("name", EDITS)
def test_a_write_by_others_fails_the_save_by_name(
    name: str, world: int | None, gate: threading.Event, tmp_path: Path
) -> None:
    barrier = threading.Barrier(world or 1)

    def train(comm: Any) -> Any:
        job = jobs.of(comm)
        gate.set()
        checkpoint.save(tmp_path, job.model, job.opt)
        saved = job.values()
        barrier.wait(LIMIT_S)
        gate.clear()
        job.steps(1)
        pending = checkpoint.async_save(tmp_path, job.model, job.opt, staging_bytes=LEAST)
        EDITS[name](job)
        barrier.wait(LIMIT_S)
        gate.set()
        with pytest.raises(CheckpointError, match=f"{name}.* modified outside the optimizer"):
            pending.wait(LIMIT_S)
        job.steps(2)
        return saved

    ranks = run_local(2, train) if world else [train(None)]
    assert_bitwise_equal(loaded(tmp_path).values(), ranks[0])


def test_a_buffer_that_does_not_fit_must_not_be_edited(gate: threading.Event, tmp_path: Path) -> None:
    model = Model()
    model.register_buffer("table", torch.zeros(LEAST))
    pending = checkpoint.async_save(tmp_path, model, staging_bytes=LEAST)
    model.table += 1
    gate.set()
    with pytest.raises(CheckpointError, match="'model.table'"):
        pending.wait(LIMIT_S)


def test_a_save_in_inference_mode(tmp_path: Path) -> None:
    """As from a hook of a validation loop. What is made there, copies too, has no version."""
    model = Model()
    with torch.inference_mode():
        model.register_buffer("mean", torch.ones(3))
        model.register_buffer("table", torch.ones(LEAST))
        checkpoint.save(tmp_path, model, staging_bytes=LEAST)
    found = Model()
    for name in ("mean", "table"):
        found.register_buffer(name, torch.zeros_like(model.get_buffer(name)))
    checkpoint.load(tmp_path, found)
    assert_bitwise_equal(list(found.state_dict().values()), list(model.state_dict().values()))


# ---- failures


def fail_on(rank: int, monkeypatch: pytest.MonkeyPatch, owner: Any, method: str, when: Callable[..., bool]) -> None:
    found = getattr(owner, method)

    def failing(self: Any, *args: Any, **options: Any) -> Any:
        if when(self, rank, *args):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return found(self, *args, **options)

    monkeypatch.setattr(owner, method, failing)


# Where, and when.
FAILURES: dict[str, tuple[Any, str, Callable[..., bool]]] = {
    "a full disk": (
        DataFile,
        "_write",
        lambda file, rank, *_: file.path.name == f"__{rank}_0.distcp" and file.size > 8000,
    ),
    "the commit": (Path, "replace", lambda path, rank, *_: path.name == ".metadata.tmp"),
}


@pytest.mark.parametrize(("what", "rank"), [("a full disk", 0), ("a full disk", 1), ("the commit", 0)])
def test_what_fails_on_one_rank_fails_on_all(
    what: str, rank: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In time; the checkpoint before stays, and the next save works."""
    ready = threading.Barrier(2)
    error = f"has failed on rank {rank}.*No space left"

    def train(comm: Any) -> None:
        job = jobs.of(comm)
        checkpoint.save(tmp_path, job.model, job.opt)
        saved = job.values()
        job.steps(1)
        if ready.wait(LIMIT_S) == 0:
            fail_on(rank, monkeypatch, *FAILURES[what])
        ready.wait(LIMIT_S)
        pending = checkpoint.async_save(tmp_path, job.model, job.opt, staging_bytes=LEAST)
        job.steps(2)  # which does not wait for what will never be written
        with pytest.raises(CheckpointError, match=error):
            pending.wait(LIMIT_S)
        if ready.wait(LIMIT_S) == 0:
            assert_bitwise_equal(loaded(tmp_path).values(), saved)
            monkeypatch.undo()
        ready.wait(LIMIT_S)
        checkpoint.save(tmp_path, job.model, job.opt)
        now = job.values()
        if ready.wait(LIMIT_S) == 0:
            assert_bitwise_equal(loaded(tmp_path).values(), now)

    run_local(2, train, timeout_s=2 * LIMIT_S)


def test_a_rank_that_has_nothing_to_write(rank_pool: Any, tmp_path: Path) -> None:
    rank_pool(2).run(_extra_alone, str(tmp_path))
    assert len(jobs.sizes_of(tmp_path)) == 1


def _extra_alone(rank: int, world: int, folder: str) -> None:
    for epoch in (1, 2):
        checkpoint.save(folder, extra={"epoch": epoch})
    assert checkpoint.load(folder) == {"epoch": 2}


def test_the_store_has_no_more_keys_after_saves(rank_pool: Any, tmp_path: Path) -> None:
    before, after = rank_pool(2).run(_keys_of_saves, str(tmp_path))[0]
    assert before == after


def _keys_of_saves(rank: int, world: int, folder: str) -> tuple[int, int]:
    job = Job({"process_group": dist.group.WORLD}, rank, world)
    found = []
    for _ in range(3):
        checkpoint.save(folder, job.model, job.opt)
        dist.barrier()
        found.append(store_of(None).num_keys())
        dist.barrier()
    job.opt.close()
    return found[1], found[2]


def test_a_failure_that_nobody_asks_for_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = jobs.of(None)
    fail_on(0, monkeypatch, *FAILURES["a full disk"])
    assert checkpoint.async_save(tmp_path, job.model, job.opt)._ended.wait(LIMIT_S)
    monkeypatch.undo()
    with pytest.warns(RuntimeWarning, match="has failed on rank 0.*No space left"):
        checkpoint.save(tmp_path, job.model, job.opt)
    assert not saving._running


def test_a_file_that_cannot_be_made_is_an_error_at_the_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fail_on(1, monkeypatch, DataFile, "__init__", lambda file, rank, path, *_: path.name == f"__{rank}_0.distcp")

    def train(comm: Any) -> None:
        job = jobs.of(comm)
        with pytest.raises(OSError if comm.rank == 1 else ValueError, match="No space left"):
            checkpoint.async_save(tmp_path, job.model, job.opt)
        job.steps(1)

    run_local(2, train)


def test_a_rank_that_writes_nothing_for_the_time_limit_is_waited_for_no_longer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, free = DataFile._write, threading.Event()

    def stuck(self: DataFile, data: memoryview) -> None:
        assert "__1_" not in self.path.name or free.wait(LIMIT_S)
        write(self, data)

    monkeypatch.setattr(DataFile, "_write", stuck)

    everyone_of = saving.everyone_of

    def hurried(engine: Any) -> Any:
        found = everyone_of(engine)
        return replace(found, timeout_s=found.timeout_s / 60)  # of the communicator's 30 s

    monkeypatch.setattr(saving, "everyone_of", hurried)
    monkeypatch.setattr(everyone, "_LEAVE_S", 0.1)

    def train(comm: Any) -> None:
        job = jobs.of(comm)
        began = time.monotonic()
        pending = checkpoint.async_save(tmp_path, job.model, job.opt)
        with pytest.raises(
            CheckpointError, match=r"no rank wrote data in 0\.5 s, while this one waited for the other ranks' data"
        ):
            pending.wait(LIMIT_S)
        assert time.monotonic() - began < 20
        if comm.rank == 0:
            free.set()

    run_local(2, train)


# ---- arguments, and the end of the process


def test_bad_arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = jobs.of(None)
    monkeypatch.chdir(tmp_path)
    for use in (checkpoint.save, checkpoint.load, lambda url, *_: checkpoint.Writer(url)):
        with pytest.raises(ValueError, match="s3://bucket/run is a URL"):
            use("s3://bucket/run", job.model, job.opt)
    with pytest.raises(ValueError, match="staging_bytes is 100"):
        checkpoint.save(tmp_path, job.model, job.opt, staging_bytes=100)
    for odd, name in (
        ({"object": Job}, r"extra\['object'\] is of type type"),
        ((3, [np.ones(2)]), r"\[1\]\[0\] is of type numpy.ndarray"),
    ):
        with pytest.raises(
            TypeError, match=rf"{name}, which .* refuses: give tensors.* torch\.from_numpy\(x\)"
        ) as refused:
            checkpoint.save(tmp_path, job.model, job.opt, odd)
        assert "\033" not in str(refused.value)
    with pytest.raises(TypeError, match="expected a ShardedAdamW"):
        checkpoint.save(tmp_path, job.model, torch.optim.AdamW(job.params))
    with pytest.raises(ValueError, match="nothing to save"):
        checkpoint.save(tmp_path)
    job.model.sparse = torch.nn.Parameter(torch.eye(3).to_sparse(), requires_grad=False)
    with pytest.raises(TypeError, match=r"'model\.sparse'"):
        checkpoint.save(tmp_path, job.model, job.opt)
    del job.model.sparse
    job.model.register_state_dict_post_hook(lambda module, state, prefix, _: state.update({f"{prefix}version": 3}))
    with pytest.raises(TypeError, match="'version' of the model is a int, expected"):
        checkpoint.save(tmp_path, job.model)
    assert not list(tmp_path.iterdir()) and not saving._running


# ---- numbers, paths and folders of other jobs (issue 44)


def with_numpy(job: Job) -> dict[str, Any]:
    """Hyperparameters as ``np.cos`` makes them. Returns an ``extra``."""
    first, second = job.opt.param_groups
    first.update(
        lr=np.float64(0.25), betas=tuple(np.array([0.5, 0.75])), eps=np.float32(0.5), initial_lr=np.float64(2.0)
    )
    second.update(weight_decay=np.float32(0.125), own={"at": [np.int64(3)]})
    return {"step": np.int64(7), "best": (np.float32(0.5), np.bool_(True)), np.int64(2): np.arange(3)[1]}


@pytest.mark.parametrize("world", [None, 2])
@pytest.mark.parametrize("kind", ["fp32", "bf16, master"])
def test_numbers_of_numpy_are_numbers(kind: str, world: int | None, tmp_path: Path) -> None:
    wanted = (
        {"lr": 0.25, "betas": (0.5, 0.75), "eps": 0.5, "initial_lr": 2.0},
        {"weight_decay": 0.125, "own": {"at": [3]}},
    )

    def expect_plain(groups: Any) -> None:
        torch.save(groups, content := io.BytesIO())
        content.seek(0)
        for found, of in zip(torch.load(content, weights_only=True), wanted, strict=True):
            assert_bitwise_equal({key: found[key] for key in of}, of)

    def train(comm: Any) -> None:
        job = jobs.of(comm, **KINDS[kind])
        extra = with_numpy(job)
        job.steps(1, 2)
        expect_plain(job.opt.state_dict()["param_groups"])
        job.opt.full_state_dict(0, path=tmp_path / "full.pt")
        if job.rank == 0:
            expect_plain(torch.load(tmp_path / "full.pt", weights_only=True)["param_groups"])
        checkpoint.save(tmp_path, job.model, job.opt, extra)
        saved = {**job.values(), "rates": [0.25, 0.05]}
        job.opt.close()
        other = jobs.of(comm, seed=9, **KINDS[kind])
        found = checkpoint.load(tmp_path, other.model, other.opt)
        assert_bitwise_equal(found, {"step": 7, "best": (0.5, True), 2: 1})
        expect_plain([{**group, "params": []} for group in other.opt.param_groups])
        assert_bitwise_equal(other.values(), saved)

    on_ranks(world, train)


def test_stock_saves_numbers_of_numpy_that_our_reader_takes(tmp_path: Path) -> None:
    job = jobs.of(None)
    with_numpy(job)
    dcp.save({"optim": job.opt.state_dict()}, checkpoint_id=tmp_path)
    state = {"optim": jobs.of(None, seed=9).opt.state_dict()}
    dcp.load(state, storage_reader=checkpoint.Reader(tmp_path))
    assert state["optim"]["param_groups"][0]["lr"] == 0.25


def test_a_relative_path_is_that_of_the_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = jobs.of(None)
    monkeypatch.chdir(tmp_path)
    write, at_work = DataFile._write, threading.Event()
    monkeypatch.setattr(DataFile, "_write", lambda *args: at_work.wait(LIMIT_S) and write(*args))
    pending = checkpoint.async_save("run", job.model, job.opt)
    writer, reader = checkpoint.Writer("stock"), checkpoint.Reader("run")
    snapshots = bw.Snapshots(job.opt, directory="copies")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    at_work.set()
    pending.wait(LIMIT_S)
    dcp.save({"x": torch.ones(3)}, storage_writer=writer)
    new_group(job)  # the copies go to another file
    job.steps(1)
    snapshots.verify()
    snapshots.close()
    assert reader.verify() > 0 and not list(Path().iterdir())
    assert_bitwise_equal(loaded(tmp_path / "run").values(), jobs.of(None).values())


@pytest.mark.parametrize("has_model", [True, False])
def test_a_folder_with_a_checkpoint_of_other_parameters(has_model: bool, tmp_path: Path) -> None:
    """Two data-parallel groups that save into one folder, each by its rank 0."""

    def stage(width: int) -> tuple[Any, Any]:
        model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, width))
        return model if has_model else None, jobs.ShardedAdamW(model.parameters(), process_group=None)

    first, second = stage(2), stage(5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        checkpoint.save(tmp_path, *first)
    name = "'model.1.weight'" if has_model else "'optim.state.2.exp_avg'"
    with pytest.warns(
        UserWarning, match=rf"other parameters in .* {name} has shape \(2, 2\) there and \(5, 2\) here.* a folder"
    ):
        checkpoint.save(tmp_path, *second)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        checkpoint.save(tmp_path, *second)  # told once
        checkpoint.save(tmp_path / "its own", *second)


def test_the_end_of_the_process_waits_for_the_save(tmp_path: Path) -> None:
    code = f"""
import time
from bucketwheel import checkpoint
from bucketwheel.checkpoint.writer import DataFile
from tests.support import checkpoint_jobs as jobs
write = DataFile._write
DataFile._write = lambda self, data: (time.sleep(0.003), write(self, data))
job = jobs.of(None)
checkpoint.async_save({str(tmp_path)!r}, job.model, job.opt)
job.steps(1)
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=2 * LIMIT_S)
    assert_bitwise_equal(loaded(tmp_path).values(), jobs.of(None).values())
