"""The main job saves and resumes: on as many ranks bit for bit, on others to 1e-5."""

import importlib
import shutil
import sys
from pathlib import Path

import pytest
import torch

import bucketwheel as bw
from tests.support.example_runs import EXAMPLES, run_example

# 7 sequences divide evenly among no two or three ranks.
TINY = (
    "--layers 2 --width 32 --heads 2 --context 32 --batch 7 --steps 24 --lr 3e-3 --warmup 2 --evaluate-every 8 "
    "--evaluate-batches 2 --text-bytes 300000 --save checkpoint --every 3 --resume"
).split()
# The example, with something before each step.
SCRIPT = """
import os, signal, sys, time
from pathlib import Path
sys.path.insert(0, {examples!r})
import train_gpt
train, rank, world = train_gpt.train_step, train_gpt.rank, train_gpt.world

def train_step(run, text, step, config):
{before}
    return train(run, text, step, config)

train_gpt.train_step = train_step
sys.exit(train_gpt.main())
"""
# A rank dies, as for want of memory.
DIES = """
    if step == 13 and rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
"""


def script(folder: Path, before: str) -> str:
    path = folder / "script.py"
    path.write_text(SCRIPT.format(examples=str(EXAMPLES), before=before))
    return str(path)


@pytest.fixture(name="train_gpt", scope="module")
def example():
    """The module. It draws with matplotlib."""
    pytest.importorskip("matplotlib").use("agg")
    if str(EXAMPLES) not in sys.path:
        sys.path.append(str(EXAMPLES))
    return importlib.import_module("train_gpt")


@pytest.fixture(scope="module")
def outcome(train_gpt):
    """Extra and parameters of the checkpoint in a folder."""

    def load(folder: Path) -> tuple[dict, dict]:
        model = train_gpt.Gpt(train_gpt.Config(layers=2, width=32, heads=2, context=32))
        return bw.checkpoint.load(folder, model), model.state_dict()

    return load


@pytest.fixture(scope="module")
def straight(tmp_path_factory, outcome):
    """What a training on two ranks that nothing stops comes to."""
    folder = tmp_path_factory.mktemp("straight")
    code, output = run_example("train_gpt.py", 2, *TINY, directory=folder)
    assert code == 0, output
    assert "resumed" not in output and "for 8 save(s)" in output, output
    return *outcome(folder / "checkpoint"), folder


@pytest.fixture(scope="module")
def killed(tmp_path_factory, outcome):
    """The folder of a training whose rank 1 of two was killed when 13 steps were done."""
    folder = tmp_path_factory.mktemp("killed")
    code, output = run_example(script(folder, DIES), 2, *TINY, directory=folder)
    assert code != 0 and "step 8: " in output and "step 16: " not in output, output
    extra, _ = outcome(folder / "checkpoint")
    assert 9 <= extra["step"] <= 12 and extra["step"] % 3 == 0, extra
    return folder


def expect_close(found: dict, expected: dict) -> None:
    assert found["step"] == expected["step"] == 24
    assert found["losses"] == pytest.approx(expected["losses"], rel=1e-5)
    assert [step for step, _ in found["validation"]] == [step for step, _ in expected["validation"]]
    losses = [[loss for _, loss in extra["validation"]] for extra in (found, expected)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("zero3", [[], ["--zero3"]], ids=["whole", "sharded"])
@pytest.mark.parametrize("ranks", range(4))
def test_a_killed_training_resumes_on_any_number_of_ranks(straight, killed, outcome, tmp_path, ranks, zero3):
    shutil.copytree(killed / "checkpoint", tmp_path / "checkpoint")
    begin = outcome(tmp_path / "checkpoint")[0]["step"]
    code, output = run_example("train_gpt.py", ranks, *TINY, *zero3, directory=tmp_path)
    assert code == 0, output
    assert f"resumed at step {begin} from checkpoint" in output, output
    (extra, params), (expected, expected_params, _) = outcome(tmp_path / "checkpoint"), straight
    expect_close(extra, expected)
    if ranks == 2:
        assert extra == expected
        assert all(torch.equal(params[name], expected_params[name]) for name in expected_params)


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_a_batch_is_the_same_on_any_number_of_ranks(train_gpt, monkeypatch, world):
    config = train_gpt.Config(batch=7, context=8)
    text = torch.arange(200, dtype=torch.uint8)
    whole = train_gpt.draw_batch(text, config, 5, 1)
    parts, weights = [], []
    monkeypatch.setattr(train_gpt, "world", lambda: world)
    for rank in range(world):
        monkeypatch.setattr(train_gpt, "rank", lambda rank=rank: rank)
        parts.append(train_gpt.draw_batch(text, config, 5, 1))
        weights.append(train_gpt.weight_of(parts[-1][0], config))
    for index in range(2):
        assert torch.equal(torch.cat([part[index] for part in parts]), whole[index])
    means = [part[0].double().mean().item() for part in parts]
    mean = sum(mean * weight for mean, weight in zip(means, weights, strict=True)) / world
    assert mean == pytest.approx(whole[0].double().mean().item(), rel=1e-12)
    assert not torch.equal(whole[0], train_gpt.draw_batch(text, config, 5, 2)[0])
