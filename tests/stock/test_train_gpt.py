"""The main job, tiny, started as a user starts it."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

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


def check_table(output: str, runs: int) -> None:
    for label in ("tokens/s", "step, ms", "forward", "backward", "optimizer"):
        cells = numbers_in_row(output, label)
        assert len(cells) == runs and all(cell > 0 for cell in cells), output
    forward, backward, exposed, update, step = (
        numbers_in_row(output, label)[0]
        for label in ("forward", "backward", "exposed communication", "optimizer", "step, ms")
    )
    # Medians of parts and whole need not add up exactly.
    assert 0.5 * step < forward + backward + exposed + update < 1.5 * step, output
    first, last = (numbers_in_row(output, f"validation loss, {which}") for which in ("first", "last"))
    assert all(end < begin for begin, end in zip(first, last, strict=True))


@pytest.mark.parametrize("ranks", [slow_case(0), 2])
def test_training_agrees_with_the_peer_and_draws_both_curves(tmp_path, ranks):
    code, output = launch(tmp_path, ranks, "--compare", "ddp", "--plot", "curves.png")
    assert code == 0, output
    check_table(output, runs=2)
    difference = re.search(r"largest relative difference of a training loss: (\S+) at step", output)
    assert difference is not None and float(difference[1]) <= 1e-5, output
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    states, peer_states = numbers_in_row(output, "states")
    gradients, peer_gradients = numbers_in_row(output, "grads")
    share = 1 / max(ranks, 1)
    assert states <= 1.1 * share * peer_states, output
    assert gradients <= 1.1 * share * peer_gradients, output


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
