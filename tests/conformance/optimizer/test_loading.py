"""bw.checkpoint.load: what any number of ranks has saved, on any other, bitwise; all of it or nothing."""

from __future__ import annotations

import copy
import os
import shutil
import threading
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

from bucketwheel import CheckpointError, checkpoint
from bucketwheel.checkpoint.loading import _Checkpoint
from bucketwheel.checkpoint.reader import Reader
from bucketwheel.optim.local_engine import LocalEngine
from bucketwheel.testing import RankFailed
from tests.support import checkpoint_jobs as jobs
from tests.support.bits import assert_bitwise_equal
from tests.support.checkpoint_jobs import KINDS, Job, Model
from tests.support.optim_twins import on_ranks
from tests.support.replica_ranks import with_replicas

EXTRA = {"epoch": 3, "order": [2, 0, 1], "rng": torch.arange(4), "name": "run", "rates": (0.1, None)}


def save_after_two(job: Job, folder: Path) -> dict[str, Any]:
    job.steps(1, 2)
    checkpoint.save(folder, job.model, job.opt, EXTRA)
    return job.values()


def three_more(job: Job) -> dict[str, Any]:
    job.steps(3, 4, 5)
    return job.values()


def saved_by(world: int | None, folder: Path, **options: Any) -> tuple[Any, Any]:
    """What was saved, and the same after three steps more."""

    def train(comm: Any) -> tuple[Any, Any]:
        job = jobs.of(comm, **options)
        return save_after_two(job, folder), three_more(job)

    return on_ranks(world, train)[0]


def loaded_by(world: int | None, folder: Path, then: Callable[[Job], Any] = three_more, **options: Any) -> list[Any]:
    """By a job that has values of its own, and states, of every rank."""

    def train(comm: Any) -> Any:
        job = jobs.of(comm, seed=9, **options)
        job.steps(7)
        extra = checkpoint.load(folder, job.model, job.opt)
        loaded = job.values()
        return extra, loaded, then(job)

    return on_ranks(world, train)


def test_replicas_write_once(tmp_path: Path) -> None:
    def train(rank: int, shard: Any, replicate: Any) -> Any:
        job = Job({"process_group": shard, "replicate_group": replicate}, rank, 4)
        return save_after_two(job, tmp_path), three_more(job)

    saved, went_on = with_replicas(2, 2, train)[0]
    sizes = jobs.sizes_of(tmp_path)
    assert len(sizes) == 4 and min(sizes) > 10_000, sizes  # spread over the replicas too
    for extra, loaded, then in loaded_by(3, tmp_path):
        assert_bitwise_equal(extra, EXTRA)
        assert_bitwise_equal(loaded, saved)
        assert_bitwise_equal(then, went_on)


# ---- from and to stock torch


@pytest.mark.parametrize("kind", ["fp32", "bf16, master"])
def test_stock_loads_what_was_saved_and_saves_what_is_loaded(kind: str, tmp_path: Path) -> None:
    ours, stocks = tmp_path / "ours", tmp_path / "stocks"
    saved, went_on = saved_by(3, ours, **KINDS[kind])
    job = jobs.of(None, seed=9, **KINDS[kind])
    job.steps(7)
    state = {"model": job.model.state_dict(), "optim": job.opt.state_dict(), "extra": None}
    dcp.load(state, checkpoint_id=ours)
    job.model.load_state_dict(state["model"])
    job.opt.load_state_dict(state["optim"])
    assert_bitwise_equal(job.values(), saved)
    assert_bitwise_equal(state["extra"], EXTRA)
    dcp.save({"model": job.model.state_dict(), "optim": job.opt.state_dict()}, checkpoint_id=stocks)
    for world in (None, 2):
        for extra, loaded, then in loaded_by(world, stocks, **KINDS[kind]):
            assert extra is None
            assert_bitwise_equal(loaded, saved)
            assert_bitwise_equal(then, went_on)


@pytest.mark.parametrize("flatten", [False, True])
def test_loads_names_of_a_torch_optimizer(flatten: bool, tmp_path: Path) -> None:
    """The model has names that torch's functions leave out."""
    model = nn.Sequential(checkpoint_wrapper(Model()))
    named = [p for p in model.parameters() if p.requires_grad]
    twin = torch.optim.AdamW([{"params": named[:5]}, {"params": named[5:], "lr": 0.05}], lr=0.2)
    for p in named:
        p.grad = torch.full_like(p, 0.5)
    twin.step()
    found = get_optimizer_state_dict(model, twin, options=StateDictOptions(flatten_optimizer_state_dict=flatten))
    dcp.save({"model": model.state_dict(), "optim": found}, checkpoint_id=tmp_path)

    def load(comm: Any) -> Any:
        other = nn.Sequential(checkpoint_wrapper(Model(seed=5)))
        trained = [p for p in other.parameters() if p.requires_grad]
        groups = [{"params": trained[:5][::-1]}, {"params": trained[5:], "lr": 0.01}]  # names count, and not the order
        opt = jobs.ShardedAdamW(groups, process_group=comm)
        checkpoint.load(tmp_path, other, opt)
        states = [opt.full_state(p) for p in trained]
        return other.state_dict(), states, [group["lr"] for group in opt.param_groups]

    for tensors, states, rates in on_ranks(2, load):
        assert_bitwise_equal(dict(tensors), dict(model.state_dict()))
        assert_bitwise_equal(states, [dict(twin.state[p]) for p in named])
        assert rates == [0.2, 0.05]


@pytest.mark.parametrize(("world", "kind"), [(None, "fp32"), (2, "fp32"), (2, "bf16, master")])
def test_what_a_load_reads(world: int | None, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank opens each file once, and nothing is read but to be checked and to be loaded; no parameter is copied. A new
    optimizer's moments are checked while they are loaded."""
    saved_by(world, tmp_path, **KINDS[kind])
    items = checkpoint.Reader(tmp_path).description.items
    moments = sum(s.sums.nbytes for index, s in items.items() if "exp_avg" in index.fqn)
    read, opened, read_file, open_file = [], [], os.preadv, os.open
    monkeypatch.setattr(os, "preadv", lambda *args: read.append(read_file(*args)) or read[-1])
    monkeypatch.setattr(os, "open", lambda *args: opened.append((threading.get_ident(), args[0])) or open_file(*args))
    if world is None:
        monkeypatch.setattr(LocalEngine, "values_of", None)

    def load(comm: Any, is_new: bool) -> None:
        job = jobs.of(comm, seed=9, **KINDS[kind])
        if not is_new:
            job.steps(7)
        checkpoint.load(tmp_path, job.model, job.opt)

    on_ranks(world, lambda comm: load(comm, is_new=True))
    assert len(opened) == len(set(opened)) > 0
    by_new = sum(read)
    on_ranks(world, lambda comm: load(comm, is_new=False))
    assert sum(read) - 2 * by_new == moments
    if world is None:
        assert moments < by_new <= 2 * sum(jobs.sizes_of(tmp_path)) - moments


# ---- parts, and what does not fit


def test_tied_weights_are_written_once_and_load_untied(tmp_path: Path) -> None:
    job = jobs.of(None)
    checkpoint.save(tmp_path, job.model)
    state = {"tied": torch.zeros(5, 7), "weights.0": torch.zeros(5, 7)}
    dcp.load({"model": state}, checkpoint_id=tmp_path)
    assert_bitwise_equal(list(state.values()), [job.params[0].detach()] * 2)
    items = checkpoint.Reader(tmp_path).description.items
    places = {index.fqn: (stored.path, stored.offset) for index, stored in items.items()}
    assert places["model.tied"] == places["model.weights.0"] != places["model.weights.1"]
    untied = Model(seed=4)
    untied.tied = nn.Parameter(torch.zeros(5, 7))
    checkpoint.load(tmp_path, untied)
    assert_bitwise_equal(dict(untied.state_dict()), dict(job.model.state_dict()))


@pytest.mark.parametrize("world", [None, 2])
def test_the_state_of_a_frozen_parameter_is_saved_again(world: int | None, tmp_path: Path) -> None:
    def freeze_and_save(comm: Any) -> None:
        job = jobs.of(comm)
        job.steps(1, 2)
        checkpoint.save(tmp_path / "all", job.model, job.opt)
        saved = job.values()
        job.opt.close()
        frozen = jobs.of(comm, seed=9, frozen=3)
        checkpoint.load(tmp_path / "all", frozen.model, frozen.opt)
        shown = frozen.opt.state_dict()["state"]
        assert_bitwise_equal(shown[4], saved["states"][3])  # behind `Model.frozen`
        (entry,) = frozen.opt._trained.loaded.values()
        entry["step"] = 2  # a number, as in states of older torch
        checkpoint.save(tmp_path / "again", frozen.model, frozen.opt)
        frozen.opt.close()
        again = jobs.of(comm, seed=9)
        checkpoint.load(tmp_path / "again", again.model, again.opt)
        assert_bitwise_equal(again.values(), saved)

    on_ranks(world, freeze_and_save)


def test_a_model_alone_is_saved_and_loaded_by_all_of_torchs_ranks(rank_pool: Any, tmp_path: Path) -> None:
    for loaded in rank_pool(2).run(_model_alone, str(tmp_path)):
        assert_bitwise_equal(loaded, dict(Model().state_dict()))
    assert len(jobs.sizes_of(tmp_path)) == 2


def _model_alone(rank: int, world: int, folder: str) -> Any:
    checkpoint.save(folder, Model())
    other = Model(seed=2)
    checkpoint.load(folder, other)
    unlike = Model(seed=2)
    if rank == 1:
        other_shape(unlike)
    with pytest.raises(ValueError, match=r"'model\.mean' has shape"):
        checkpoint.load(folder, unlike)
    assert_bitwise_equal(list(unlike.parameters()), list(Model(seed=2).parameters()))
    return dict(other.state_dict())


def test_dtypes_and_masters_are_those_of_the_loading_job(tmp_path: Path) -> None:
    saved, went_on = saved_by(2, tmp_path, **KINDS["bf16, master"])
    for kind in ("bf16, master", "bf16, remainder"):  # which is shown as a master
        for _, loaded, then in loaded_by(2, tmp_path, **KINDS[kind], on_external_update="error"):  # a load is no edit
            assert_bitwise_equal(loaded, saved)
            assert_bitwise_equal(then, went_on)
    for _, loaded, _ in loaded_by(3, tmp_path, lambda job: None):  # fp32, which is its own weight
        for i, state in saved["states"].items():
            state.pop("master_param", None)
            assert_bitwise_equal(loaded["states"][i], state)
        assert_bitwise_equal(loaded["model"]["weights.3"], saved["model"]["weights.3"].float())


class Counting(nn.Linear):
    state: Any = None

    def get_extra_state(self) -> Any:
        return self.state

    def set_extra_state(self, state: Any) -> None:
        self.state = state


def other_shape(model: Model) -> None:
    model.mean = torch.zeros(6)


def more_state(model: Model) -> None:
    model.inner = Counting(2, 2).requires_grad_(False)
    model.inner.state = {"calls": 1}


def more_names(model: Model) -> None:
    model.register_buffer("new", torch.zeros(1))
    del model.batches


@pytest.mark.parametrize(
    ("change", "options", "error"),
    [
        (other_shape, {}, r"'model\.mean' has shape \(5,\) in .* and \(6,\) here"),
        (more_names, {}, r"checkpoint lacks 'model\.new', the model lacks 'model\.batches'"),
        (
            more_state,
            {},
            r"checkpoint lacks .*'model\.inner\.bias', 'model\.inner\._extra_state', the model lacks nothing",
        ),
        (None, {"amsgrad": True}, "amsgrad=False"),
    ],
)
@pytest.mark.parametrize("world", [None, 2])
def test_what_does_not_fit_changes_nothing(
    change: Any, options: dict[str, Any], error: str, world: int | None, tmp_path: Path
) -> None:
    saved_by(2, tmp_path)

    def load(comm: Any) -> None:
        job = jobs.of(comm, seed=9, **options)
        job.steps(7)
        if change and job.rank == job.world - 1:  # one rank alone
            change(job.model)
        before = job.values()
        with pytest.raises(ValueError, match=error):
            checkpoint.load(tmp_path, job.model, job.opt)
        assert_bitwise_equal(job.values(), before)

    on_ranks(world, load)


@pytest.mark.parametrize("item", ["optim.state.3.exp_avg", "model.frozen", "extra"])
@pytest.mark.parametrize("before", ["stepped", "new", "edited"])
def test_a_damaged_file_changes_nothing_on_any_rank(item: str, before: str, tmp_path: Path) -> None:
    """Moments of a new optimizer are read before all is checked; they are zeros again. Not so what somebody wrote there."""
    saved_by(2, tmp_path)
    (stored, *_) = [s for index, s in checkpoint.Reader(tmp_path).description.items.items() if index.fqn == item]
    content = bytearray((tmp_path / stored.path).read_bytes())
    content[stored.offset + stored.sums.begin + stored.sums.nbytes // 2] ^= 1
    (tmp_path / stored.path).write_bytes(content)

    def load(comm: Any) -> str:
        job = jobs.of(comm, seed=9)
        if before == "stepped":
            job.steps(7)
        elif before == "edited":
            for state in job.opt.state.values():
                state["exp_avg_sq"].fill_(2.0)
        values = job.values()
        with pytest.raises((CheckpointError, ValueError), match="damaged") as raised:
            checkpoint.load(tmp_path, job.model, job.opt)
        assert_bitwise_equal(job.values(), values)
        return str(raised.value)

    assert all(item in text for text in on_ranks(3, load))


def test_no_checkpoint_and_gradients_that_are_pending(tmp_path: Path) -> None:
    job = jobs.of(None)
    with pytest.raises(CheckpointError, match="not a checkpoint"):
        checkpoint.load(tmp_path, job.model, job.opt)
    checkpoint.save(tmp_path, job.model)
    with pytest.raises(ValueError, match="holds no optimizer: expected .* found 'model' at the top"):
        checkpoint.load(tmp_path, job.model, job.opt)
    dcp.save(dict(job.model.state_dict()), checkpoint_id=tmp_path)
    with pytest.raises(
        ValueError, match=r"no model: expected \{'model': .* found 'batches', .* at the top.*checkpoint\.load"
    ):
        checkpoint.load(tmp_path, job.model)
    (tmp_path / ".metadata").unlink()
    with pytest.raises(CheckpointError, match=r"The data lacks its hidden file \.metadata, which `cp -r FOLDER/\*`"):
        checkpoint.load(tmp_path, job.model)
    with pytest.raises(TypeError, match="expected a ShardedAdamW"):
        checkpoint.load(tmp_path, job.model, torch.optim.AdamW(job.params))
    saved_by(2, tmp_path)

    def load(comm: Any) -> None:
        other = jobs.of(comm)
        other.backward(1)
        with pytest.raises(RuntimeError, match="gradients are pending"):
            checkpoint.load(tmp_path, other.model, other.opt)
        other.opt.step()
        checkpoint.load(tmp_path, other.model, other.opt)  # the step has used them (issue 44)
        other.opt.zero_grad()

    for world in (None, 2):
        on_ranks(world, load)


# ---- what a loop may have done before


@pytest.mark.parametrize("how", ["ours", "stock", "stock, flat outside"])
def test_extra_state_of_modules_and_groups_that_hold_more_than_numbers(how: str, tmp_path: Path) -> None:
    def job(rate: float) -> tuple[nn.Module, Any]:
        model = nn.Sequential(Counting(3, 2), nn.ReLU(), Counting(2, 2))
        return model, jobs.ShardedAdamW(model.parameters(), lr=torch.tensor(rate), process_group=None)

    model, opt = job(0.25)
    schedule = opt.param_groups[0]["schedule"] = {"warmup": 10, "of": [torch.ones(2), 3]}
    model[0].state = {"calls": 7, "history": [torch.arange(3), {"scale": 0.5}], "shape": (1, 2)}
    model[2].state = torch.arange(4)
    saved = {"model": model.state_dict(), "optim": opt.state_dict()}
    if how == "ours":
        checkpoint.save(tmp_path, model, opt)
    else:
        outside = {f"{part}.{key}": value for part, of in saved.items() for key, value in of.items()}
        dcp.save(outside if "flat" in how else saved, checkpoint_id=tmp_path)
    other, other_opt = job(0.5)
    other[2].state = torch.zeros(0)
    checkpoint.load(tmp_path, other, other_opt)
    assert_bitwise_equal([other[0].state, other[2].state], [model[0].state, model[2].state])
    assert_bitwise_equal(other_opt.param_groups[0]["lr"], torch.tensor(0.25))
    assert_bitwise_equal(other_opt.param_groups[0]["schedule"], schedule)


# What an entry for each leaf does not say (issue 44): empty containers, other kinds, keys that are no strings.
ODD = {
    "empty": {},
    "inner": {"a": {}, "b": [], "c": [torch.ones(2), {}], "d": ({}, [])},
    "ordered": OrderedDict(b=torch.arange(3), a=OrderedDict()),
    "numbers": {0: "a", 7: {1: torch.ones(1)}, True: None, (1, 2): 3},
    "dots": {"a.b": {"c.": 1, "": [1, torch.ones(1)]}},
    "list": [],
    "tuple": (OrderedDict(a=1), [torch.zeros(2)]),
}


@pytest.mark.parametrize("world", [None, 2])
@pytest.mark.parametrize("name", ODD)
def test_what_is_saved_comes_back_equal(name: str, world: int | None, tmp_path: Path) -> None:
    odd = ODD[name]

    def with_state(job: Job, state: Any) -> Job:
        job.model.inner = Counting(2, 2).requires_grad_(False)
        job.model.inner.state = state
        return job

    def train(comm: Any) -> None:
        job = with_state(jobs.of(comm), odd)
        job.opt.param_groups[1]["own"] = odd
        job.steps(1)
        checkpoint.save(tmp_path, job.model, job.opt, odd)
        job.opt.close()
        other = with_state(jobs.of(comm, seed=9), {"other": 1})
        extra = checkpoint.load(tmp_path, other.model, other.opt)
        for found in (extra, other.model.inner.state, other.opt.param_groups[1]["own"]):
            assert_bitwise_equal(found, odd)
            assert repr(found) == repr(odd)  # kinds of mappings, and their order
        assert_bitwise_equal(other.opt.param_groups[0]["lr"], 0.1)

    on_ranks(world, train)
    # Stock reads it into what is alike.
    state = {"model": with_state(jobs.of(None, seed=9), copy.deepcopy(odd)).model.state_dict(), "extra": None}
    dcp.load(state, checkpoint_id=tmp_path)
    assert repr(state["extra"]) == repr(odd)


@pytest.mark.parametrize("world", [None, 2])
@pytest.mark.parametrize("when", ["before the save", "before the load"])
def test_parameters_that_were_moved(when: str, world: int | None, tmp_path: Path) -> None:
    def train(comm: Any) -> Any:
        job = jobs.of(comm)
        job.steps(1)
        if when == "before the save":
            for p in job.params:
                p.data = (p.data * 2).contiguous()  # other memory, and other strides
        shown = {name: t.clone() for name, t in job.model.state_dict().items()}
        checkpoint.save(tmp_path, job.model, job.opt)
        job.steps(2)
        went_on = job.values()
        job.opt.close()
        other = jobs.of(comm, seed=9)
        if when == "before the load":
            for p in other.params:
                p.data = p.data * 0
        checkpoint.load(tmp_path, other.model, other.opt)
        assert_bitwise_equal(dict(other.model.state_dict()), shown)
        other.steps(2)
        assert_bitwise_equal(other.values(), went_on)

    on_ranks(world, train)


# ---- models that load themselves


def load_its_own_way(model: Any, how: str) -> None:
    """Gives it a ``state_dict`` or a loading that does more than copy its tensors by their names."""
    model.loads = 0

    def note(*_: Any) -> None:
        model.loads += 1
        if how == "fails":
            raise RuntimeError("this model cannot be loaded")

    def resize(state: dict[str, Any], prefix: str, *others: Any) -> None:
        model.mean.resize_(state[prefix + "mean"].shape)
        nn.Module._load_from_state_dict(model, state, prefix, *others)
        note()

    def rebind(state: dict[str, Any], prefix: str, *others: Any) -> None:
        model.mean = state[prefix + "mean"].clone()
        note()
        nn.Module._load_from_state_dict(model, state, prefix, *others)

    def copies(_: Any, state: dict[str, Any], *others: Any) -> None:
        state.update({key: value.detach().double() for key, value in state.items() if value.is_floating_point()})

    if how == "copies":
        model.register_state_dict_post_hook(copies)
    elif how == "pre hook":
        model.register_load_state_dict_pre_hook(note)
    elif how in ("resizes", "rebinds"):
        model._load_from_state_dict = resize if how == "resizes" else rebind
    else:
        model.register_load_state_dict_post_hook(note)


@pytest.mark.parametrize("kind", ["fp32", "bf16, remainder"])
@pytest.mark.parametrize("how", ["copies", "pre hook", "post hook", "resizes", "rebinds"])
@pytest.mark.parametrize("world", [None, 2])
def test_a_model_that_loads_its_own_way(world: int | None, how: str, kind: str, tmp_path: Path) -> None:
    """Weights stayed random, and hooks did not run (issue 44). If it fails on one rank all is as it was."""

    def train(comm: Any) -> None:
        job = jobs.of(comm, **KINDS[kind])
        load_its_own_way(job.model, how)
        saved = save_after_two(job, tmp_path)
        for outcome in ("fails", how):
            job.opt.close()
            job = jobs.of(comm, seed=9, **KINDS[kind], on_external_update="error" if outcome == "fails" else "resync")
            if kind == "fp32":  # else moments are zeros
                job.steps(7)
            here = outcome if job.rank == job.world - 1 else how
            load_its_own_way(job.model, here)
            job.model.mean = torch.zeros(9 if here == "resizes" else 5)
            before = job.values()
            if outcome == "fails":
                with pytest.raises((RuntimeError, ValueError), match="this model cannot be loaded"):
                    checkpoint.load(tmp_path, job.model, job.opt)
                assert_bitwise_equal(job.values(), before)
                job.steps(8)
            else:
                checkpoint.load(tmp_path, job.model, job.opt)
                assert_bitwise_equal(job.values(), saved)
                assert job.model.loads == (how != "copies")

    on_ranks(world, train)


def test_a_lazy_model_and_a_model_on_meta(tmp_path: Path) -> None:
    model, lazy = nn.Sequential(nn.Linear(3, 2)), nn.Sequential(nn.LazyLinear(2))
    checkpoint.save(tmp_path, model)
    checkpoint.load(tmp_path, lazy)
    assert_bitwise_equal(dict(lazy.state_dict()), dict(model.state_dict()))
    for call in (checkpoint.load, checkpoint.save):
        with pytest.raises(
            TypeError, match=r"'model\.0\.weight' .* on the meta device, without values: call model\.to_empty"
        ):
            call(tmp_path, model.to("meta"))


# ---- what else a stranger meets


def test_names_with_a_prefix_say_how_to_load_them(tmp_path: Path) -> None:
    model, other = nn.Linear(3, 2), nn.Linear(3, 2)
    app = nn.ModuleDict({"app": nn.ModuleDict({"model": model})})
    for name, outer in (("_orig_mod", nn.ModuleDict({"_orig_mod": model})), ("app.model", app)):
        checkpoint.save(tmp_path, outer)
        with pytest.raises(
            ValueError, match=rf"checkpoint begin with '{name}\.': load the checkpoint into torch\.nn\."
        ) as raised:
            checkpoint.load(tmp_path, other)
        inside = str(raised.value).rpartition("load the checkpoint into ")[2]
        checkpoint.load(tmp_path, eval(inside, {"torch": torch, "model": other}))
        assert_bitwise_equal(other.weight, model.weight)
        checkpoint.save(tmp_path, other)
        with pytest.raises(ValueError, match=rf"model adds '{name}\.' to all names: load into model\.{name}$"):
            checkpoint.load(tmp_path, outer)


@pytest.mark.parametrize("has_names", [False, True])
def test_parameter_groups_that_differ_are_named_before_shapes(has_names: bool, tmp_path: Path) -> None:
    model = nn.Linear(64, 3)
    pairs = [*model.named_parameters()] if has_names else [*model.parameters()]
    with jobs.ShardedAdamW([{"params": [pair]} for pair in pairs[::-1]]) as opt:
        model(torch.ones(64)).sum().backward()
        opt.step()
        opt.zero_grad()
        checkpoint.save(tmp_path, model, opt)
    with jobs.ShardedAdamW(pairs) as opt:
        with pytest.raises(ValueError, match="a different number of parameter groups: 2, this optimizer has 1"):
            checkpoint.load(tmp_path, model, opt)
        assert not opt.state[model.weight]["exp_avg"].any()


def load_a_part(rank: int, world: int, folder: str) -> None:
    """A new head, a part that was added, and one that is gone."""
    model = nn.ModuleDict({"body": nn.Linear(4, 4), "head": nn.Linear(4, 2), "gone": nn.Linear(1, 1)})
    checkpoint.save(folder, model)
    other = nn.ModuleDict({"body": nn.Linear(4, 4), "head": nn.Linear(4, 3), "lora": nn.Linear(4, 1)})
    opt = jobs.ShardedAdamW(other.parameters(), lr=0.0)
    expected = {**copy.deepcopy(other).state_dict(), **model["body"].state_dict(prefix="body.")}
    with pytest.raises(
        ValueError, match=r"To load the tensors that fit: .*DefaultLoadPlanner\(allow_partial_load=True"
    ):
        checkpoint.load(folder, other)
    tensors = {name: t for name, t in other.state_dict().items() if not name.startswith("head.")}
    dcp.load({"model": tensors}, checkpoint_id=folder, planner=dcp.DefaultLoadPlanner(allow_partial_load=True))
    other.load_state_dict(tensors, False)
    other["body"](torch.zeros(4)).sum().backward()
    opt.step()  # goes on from what was loaded, by 0
    opt.close()
    assert_bitwise_equal(dict(other.state_dict()), expected)


@pytest.mark.parametrize("world", [1, 2])
def test_a_part_is_loaded_by_torch(world: int, rank_pool: Any, tmp_path: Path) -> None:
    """By the call that the message names."""
    rank_pool(world).run(load_a_part, str(tmp_path))


@pytest.mark.parametrize("when", ["before data is read", "after one rank has read"])
@pytest.mark.parametrize("world", [None, 2])
def test_a_load_that_a_save_overtakes_tries_again(
    world: int | None, when: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved_by(world, tmp_path / "here")
    expected = saved_by(world, tmp_path / "newer", seed=3)
    plan, tries, meet = _Checkpoint._plan, list[int](), threading.Barrier(world or 1, timeout=60)

    def overtaken(self: _Checkpoint, *args: Any) -> Any:
        tries.append(rank := self._engine.ranks[0])
        if tries.count(rank) > 1:
            return plan(self, *args)
        assert when.startswith("after") or self.reader.description  # before the save
        found = plan(self, *args) if rank == 0 and when.startswith("after") else None
        meet.wait()
        if rank == 0:
            gone = list((tmp_path / "here").glob("data-*"))
            shutil.copytree(tmp_path / "newer", tmp_path / "here", dirs_exist_ok=True)
            for folder in gone:
                shutil.rmtree(folder)
        meet.wait()
        return found or plan(self, *args)

    monkeypatch.setattr(_Checkpoint, "_plan", overtaken)
    for _, *loaded in loaded_by(world, tmp_path / "here"):
        assert_bitwise_equal(tuple(loaded), expected)
    assert sorted(tries) == sorted([*range(world or 1)] * 2)
    monkeypatch.setattr(Reader, "is_replaced", lambda self: True)
    with pytest.raises((CheckpointError, RankFailed), match="another save replaced"):
        loaded_by(world, tmp_path / "here")
    assert len(tries) == (2 + 5) * (world or 1)
