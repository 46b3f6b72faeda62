"""The main job, tiny, started as a user starts it."""

import re
from pathlib import Path

import pytest

from tests.support.example_runs import run_example
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
    resume = ("--save", "checkpoint", "--every", "6", "--check-resume")
    code, output = launch(tmp_path, ranks, "--zero3", "--compare", "ddp,fsdp2", "--plot", "curves.png", *resume)
    assert code == 0 and "the same bits" in output, output
    check_table(output, runs=4)
    differences = re.findall(r"\w+: largest relative difference of a training loss: (\S+) at step", output)
    assert len(differences) == 3 and all(float(difference) <= 1e-5 for difference in differences), output
    assert float(differences[0]) == 0, output  # sharded and whole parameters
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    share = 1 / max(ranks, 1)
    params, grads, states = (numbers_in_row(output, label) for label in MEMORY[:3])
    assert params[1] == params[2] and all(0 < params[i] <= 1.1 * share * params[2] for i in (0, 3)), output
    for zero3, ours, ddp, fsdp2 in (grads, states):
        assert 0 < zero3 == ours <= 1.1 * share * ddp and 0 < fsdp2 <= 1.1 * share * ddp, output
    zero3, ours, ddp, _ = numbers_in_row(output, "rest at the peak")  # the same model's activations
    assert abs(ours - ddp) <= 0.3 * ddp and abs(zero3 - ddp) <= 0.3 * ddp, output
    assert "\r" not in output and "step 8: fsdp2 loss" in output, output  # stderr is no terminal


@pytest.mark.slow
def test_bf16_parameters_train(tmp_path):
    code, output = launch(tmp_path, 2, "--dtype", "bf16")
    assert code == 0, output
    check_table(output, runs=1)
    assert not list(tmp_path.glob("*.png"))


@pytest.mark.slow
def test_a_loss_that_does_not_fall_is_an_error(tmp_path):
    code, output = launch(tmp_path, 0, "--lr", "0")
    assert code == 1, output
    assert "FAILED: the validation loss of bucketwheel did not fall" in output
