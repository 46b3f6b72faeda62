"""The main job, tiny, started as a user starts it."""

import importlib
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.support.example_runs import EXAMPLES, run_example
from tests.support.requirements import slow_case

TINY = (
    "--layers 2 --width 32 --heads 2 --context 32 --batch 4 --steps 24 --lr 3e-3 --warmup 2 --evaluate-every 8 "
    "--evaluate-batches 2 --text-bytes 300000"
).split()


def launch(directory: Path, ranks: int, *flags: str) -> tuple[int, str]:
    """Exit code and output of the example, tiny."""
    return run_example("train_gpt.py", ranks, *TINY, *flags, directory=directory)


def numbers_in_row(output: str, label: str) -> list[float]:
    row = re.search(rf"^ *{label} +([-\d][^a-z\n]*)$", output, re.MULTILINE)
    assert row is not None, f"no row {label!r} in:\n{output}"
    return [float(cell.replace(",", "")) for cell in row[1].split() if cell != "-"]


MEMORY = ("parameters", "gradients", "optimizer states", "communication buffers", "rest at the peak")


def check_table(output: str, runs: int) -> None:
    phases = ["forward and backward", "communication" if runs > 1 else "gather of parameters", "clip", "optimizer"]
    for label in ("tokens/s", "step, ms", "forward and backward", "clip", "optimizer"):
        cells = numbers_in_row(output, label)
        assert len(cells) == runs and all(cell > 0 for cell in cells), output
    step, *parts = (numbers_in_row(output, label)[0] for label in ("step, ms", *phases))
    assert abs(step - sum(parts)) < 0.3, output
    total, *parts = (numbers_in_row(output, label)[0] for label in ("MB per rank at the peak", *MEMORY))
    assert abs(total - sum(parts)) < 0.03, output
    first, last = (numbers_in_row(output, f"validation loss, {which}") for which in ("first", "last"))
    assert all(end < begin for begin, end in zip(first, last, strict=True))


@pytest.mark.parametrize("ranks", [slow_case(0), 2])
def test_training_agrees_with_the_peers_and_draws_them(tmp_path, ranks):
    code, output = launch(tmp_path, ranks, "--compare", "ddp,fsdp2", "--plot", "curves.png")
    assert code == 0, output
    check_table(output, runs=3)
    differences = re.findall(r"(ddp|fsdp2): largest relative difference of a training loss: (\S+) at step", output)
    assert len(differences) == 2 and all(float(difference) <= 1e-5 for _, difference in differences), output
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    share = 1 / max(ranks, 1)
    params, grads, states = (numbers_in_row(output, label) for label in MEMORY[:3])
    assert params[0] == params[1] and params[2] <= 1.1 * share * params[1], output
    for ours, ddp, fsdp2 in (grads, states):
        assert 0 < ours <= 1.1 * share * ddp and 0 < fsdp2 <= 1.1 * share * ddp, output
    ours, ddp, _ = numbers_in_row(output, "rest at the peak")  # the same model's activations
    assert abs(ours - ddp) <= 0.3 * ddp, output
    assert "\r" not in output and "step 8: fsdp2 loss" in output, output  # stderr is no terminal


@pytest.fixture
def report(monkeypatch):
    pytest.importorskip("matplotlib").use("agg")
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return importlib.import_module("train_gpt_report")


def test_the_peak_of_a_step_is_what_it_allocates_at_once(report):
    memory = {"grads": 4000}
    for grads_are_kept, rest in ((True, 12_000_000), (False, 11_996_000)):
        with report.peak_of_step(memory, grads_are_kept):
            kept = torch.empty(1_000_000)
            other = torch.empty(2_000_000)
            del other
            del kept
        assert 0 <= memory["rest"] - rest < 10_000  # the profiler's own


def test_the_panels_stack_to_their_sums(report, tmp_path):
    def run(name: str, scale: float) -> SimpleNamespace:
        seconds = {"forward and backward": 0.2 * scale, "clip": 0.01, "optimizer": 0.02, "gather of parameters": 0.03}
        memory = {"params": 1e6, "grads": 2e6, "states": 3e6, "rest": scale * 1e6}
        losses = [2.0, 1.0 * scale]
        return SimpleNamespace(name=name, memory=memory, seconds=[seconds] * 6, losses=losses, validation=[(0, 2.0)])

    figure = report.draw([run("ours", 1), run("ddp", 2), run("fsdp2", 3)], [0.1], str(tmp_path / "panels.png"))
    panels = {axes.get_title(): axes for axes in figure.axes}
    tops = {title: [patch.get_y() + patch.get_height() for patch in axes.patches] for title, axes in panels.items()}
    assert tops["memory of a rank at its peak"][-3:] == pytest.approx([7, 8, 9])
    assert tops["time of a step (medians)"][:3] == pytest.approx([100] * 3)  # the plain model
    assert tops["time of a step (medians)"][-3:] == pytest.approx([260, 460, 660])
    difference = panels[""]
    assert difference.get_yscale() == "log"
    drawn = [
        list(line.get_ydata()) for line in difference.lines if len(line.get_ydata()) == 2 and line.get_marker() == "."
    ]
    assert drawn == [pytest.approx([report.LEAST, 0.5]), pytest.approx([report.LEAST, 0.5])]


@pytest.mark.slow
def test_bf16_parameters_train(tmp_path):
    code, output = launch(tmp_path, 2, "--dtype", "bf16")
    assert code == 0, output
    check_table(output, runs=1)
    assert not list(tmp_path.glob("*.png"))


def test_a_loss_that_does_not_fall_is_an_error(tmp_path):
    code, output = launch(tmp_path, 0, "--lr", "0")
    assert code == 1, output
    assert "FAILED: the validation loss of bucketwheel did not fall" in output


def test_a_missing_extra_is_named():
    script = str(EXAMPLES / "train_gpt.py")
    code = f"import sys, runpy; sys.modules['tqdm'] = None; runpy.run_path({script!r}, run_name='__main__')"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 1
    assert "pip install 'bucketwheel[demo]'" in done.stderr
