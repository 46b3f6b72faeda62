"""``bucketwheel plan TRACE``."""

from __future__ import annotations

import json
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from bucketwheel.__main__ import main
from bucketwheel.errors import BudgetTooSmall
from bucketwheel.pool.placement import place
from bucketwheel.pool.policies import POLICIES
from bucketwheel.pool.pool import Pool
from bucketwheel.pool.trace import Trace
from bucketwheel.tools import plan, tetris
from tests.unit.tiny_allocator import TinyAllocator

Run = Callable[..., Any]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """The command's output, of --json its value; the text of the error where ``status`` is 1."""

    def run(*arguments: object, status: int = 0) -> Any:
        assert main(["plan", *map(str, arguments)]) == status
        out, err = capsys.readouterr()
        assert bool(err) == bool(status)
        return err if status else json.loads(out) if "--json" in arguments else out

    return run


@pytest.fixture
def table(tmp_path: Path) -> Path:
    """Six units, whose weights are live two by two, and their gradients. Then a ring: in a step two keys of three."""
    rows = [f"weight/{unit},{1000 * (unit + 1)},{unit},{unit + 2}" for unit in range(6)]
    rows += [f"grad/{unit},5000,{12 - unit},{14 - unit}" for unit in range(6)]
    rows += ["empty,0,3,4", *(f"ring/{key},9000,2{start},2{stop}" for key, start, stop in ("a01", "a23", "b02", "c13"))]
    path = tmp_path / "units.csv"
    path.write_text("\n".join(["key,nbytes,start,stop", *rows, ""]))
    return path


def recorded(path: Path) -> tuple[Pool, Trace]:
    """A step of a pool, saved."""
    pool = Pool("host", align_bytes=64)
    with pool.trace("train") as trace:
        for unit in range(6):
            with pool.acquire(f"weight/{unit}", 1000 * (unit + 1)), pool.acquire("scratch", 700):
                unnamed = pool.empty((9,), torch.float32)
                grad = pool.acquire(f"grad/{unit}", 3000)
                del unnamed
            grad.release()
    trace.save(path)
    return pool, trace


def test_a_step_of_a_pool(run: Run, tmp_path: Path) -> None:
    """The command finds what `Pool.plan` does."""
    path = tmp_path / "train.jsonl"
    pool, trace = recorded(path)
    for slack, options in (({}, []), ({"grad": 2, "weight": 1}, ["--slack", "grad=2", "--slack", "weight=1"])):
        expected = pool.plan(trace, slack=slack)
        found = run(path, "--json", "--policy", "place", *options)
        assert found["policies"]["place"]["total_bytes"] == expected.total_bytes
        assert found["offsets"] == expected.placement.offsets
        assert found["load_bytes"] == expected.load_bytes
    assert (found["trace"], found["keys"], found["lifetimes"], found["unnamed_bytes"]) == ("train", 13, 18, 64)
    pool.adopt(expected)  # no place, nor a turn in the order, for the unnamed lease
    assert pool.explain() == expected.explain() and "slot_coloring: " in pool.explain()
    with pytest.raises(BudgetTooSmall):
        pool.plan(trace, max_bytes=1)
    text = run(path)
    assert "0.0001 MiB at once of unnamed leases" in text
    assert any("weight/5  test_plan_command.py:" in line for line in text.split("\n"))


def test_a_table_against_all_policies(run: Run, table: Path) -> None:
    found = run(table, "--json", "--align", 256, "--policy", "slot_coloring")
    _, lifetimes, *_ = plan.read(table)
    sizes = {**lifetimes.sizes, "empty": 1}  # it has an address of its own
    ours = place(sizes, lifetimes.intervals, align=256)
    assert ours.total_bytes == 3 * 9216 and ours.load_bytes == 2 * 9216
    assert list(found["policies"]) == ["place", *POLICIES]
    for name, row in found["policies"].items():
        rule = {"place": place, **POLICIES}[name]
        expected = rule(sizes, lifetimes.intervals, keys=lifetimes.keys, align=256)
        if expected is None:
            assert row == {"none": "cannot hold these sizes"}
            continue
        assert row["total_bytes"] == expected.total_bytes and row["proven_optimal"] == expected.proven_optimal
        assert row["over_load"] == pytest.approx(expected.total_bytes / ours.load_bytes - 1)
        assert row["saved_bytes"] == expected.total_bytes - ours.total_bytes
        if name == "slot_coloring":
            assert found["offsets"] == expected.offsets
    assert {"none"} in map(set, found["policies"].values())
    assert found["load_bytes"] == ours.load_bytes and found["align"] == 256
    live = {key for key, of in lifetimes.intervals.items() if any(a <= found["peak"]["event"] < b for a, b in of)}
    assert set(found["peak"]["keys"]) == live
    assert sum(-(-nbytes // 256) * 256 for nbytes in found["peak"]["keys"].values()) == ours.load_bytes


def test_a_snapshot(run: Run, tmp_path: Path) -> None:
    device = TinyAllocator(device=1, devices=2)
    blocks = [
        device.alloc(1000 * size, frames=[{"filename": "/code/a.py", "line": size, "name": "f"}])
        for size in range(1, 30)
    ]
    for block in blocks:
        device.free(block)
    path = tmp_path / "snapshot.pickle"
    path.write_bytes(pickle.dumps(device.snapshot()))
    found = run(path, "--json")
    assert {name: row.get("none") for name, row in found["policies"].items() if name != "place"} == {
        **dict.fromkeys(("double_buffer", "fixed_pool", "max_pool", "slot_coloring"), "needs roles"),
        "best_fit": None,
    }
    assert found["policies"]["place"]["total_bytes"] == found["load_bytes"]
    text = run(path, "--device", 1)
    assert f"{29_000 / 2**20:.4f}  block/28  a.py:29 in f\n" in text
    assert f"{sum(range(1, 10)) * 1000 / 2**20:.4f}  in 9 more" in text
    assert "device 0 has no events: choose one of [1]" in run(path, "--device", 0, status=1)


BAD = {
    "no file": (["missing.csv"], "missing.csv"),
    "no trace": (["empty"], "empty, record 1: no column key"),
    "torch.save": (
        ["saved.pt"],
        "saved.pt: this is a file of torch.save, or a zip file: expected a file of torch.cuda.memory._dump_snap",
    ),
    "a pickle": (["pickle"], "pickle: not the pickle of a memory snapshot"),
    "policy": (["units.csv", "--policy", "nix"], "policy 'nix': unknown; there are place, double_buffer, "),
    "refused": (["units.csv", "--policy", "double_buffer"], "policy 'double_buffer': cannot hold these sizes"),
    "slack": (["units.csv", "--slack", "grad"], "--slack is 'grad', expected ROLE=N"),
    "role": (["units.csv", "--slack", "nix=1"], "slack of 1 for 'nix'; the roles are weight, grad, empty, ring"),
}


def test_what_cannot_be(run: Run, table: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(table.parent)
    Path("empty").touch()
    torch.save({"segments": []}, "saved.pt")
    Path("pickle").write_bytes(b"\x80\x04cos\nsystem\n.")
    for arguments, message in BAD.values():
        assert message in run(*arguments, status=1)


# --- the Tetris view --------------------------------------------------------------------------------------------------


def test_a_drawing(run: Run, table: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed: pip install bucketwheel[plot]")
    path = table.with_suffix(".png")
    run(table, "--plot", path, "--policy", "best_fit")
    name, lifetimes, align, _ = plan.read(table)
    replay = plan.replay(name, lifetimes, align)
    figure = tetris.drawn(replay, "best_fit")
    figure.savefig(table.with_name("again.png"), dpi=150)
    assert path.read_bytes() == table.with_name("again.png").read_bytes() and path.read_bytes().startswith(
        b"\x89PNG\r\n"
    )
    (alone,) = tetris.drawn(replay, "place").axes
    assert [axes.get_title().partition(",")[0] for axes in (*figure.axes, alone)] == [
        f"{policy}: {replay.placement(policy).total_bytes / 2**20:.2f} MiB" for policy in ("place", "best_fit", "place")
    ]
    axes = figure.axes[1]
    boxes = {of.get_label(): [path.get_extents().bounds for path in of.get_paths()] for of in axes.collections}
    offsets = replay.placement("best_fit").offsets
    assert list(boxes) == ["weight", "grad", "empty", "ring"]
    assert boxes["weight"] == [
        (unit, offsets[f"weight/{unit}"] / 2**20, 2, -(-1000 * (unit + 1) // 512) * 512 / 2**20) for unit in range(6)
    ]
    assert len(boxes["grad"]) == 6 and len(boxes["ring"]) == 4 and boxes["empty"][0][3] == 512 / 2**20
    (line,), (peak,) = axes.lines, axes.patches
    assert line.get_ydata()[0] == replay.plan.load_bytes / 2**20
    assert (peak.get_x(), peak.get_width()) == (replay.plan.peak()[0], 1)


def test_large_rectangles_have_their_keys(run: Run, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed: pip install bucketwheel[plot]")
    path = tmp_path / "few.csv"
    path.write_text("key,nbytes,start,stop\nwide,90000,0,90\nupright,900000,90,94\nsmall,512,94,95\n")
    name, lifetimes, align, _ = plan.read(path)
    (axes,) = tetris.drawn(plan.replay(name, lifetimes, align), "place").axes
    assert {text.get_text(): text.get_rotation() for text in axes.texts} == {"wide": 0, "upright": 90}


def test_the_help_has_the_policies(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan._POLICIES.split(", ") == ["place", *POLICIES]
    with pytest.raises(SystemExit):
        main(["plan", "--help"])
    assert "best_fit" in capsys.readouterr().out


def test_nothing_to_draw_with(run: Run, table: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    path = table.with_suffix(".png")
    assert "pip install 'bucketwheel[plot]'" in run(table, "--plot", path, status=1)
    assert not path.exists()
