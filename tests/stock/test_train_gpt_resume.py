"""The main job saves and resumes: on as many ranks bit for bit, on others to 1e-5; where ranks die, leave and join."""

import contextlib
import importlib
import io
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import groupby
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import bucketwheel as bw
from tests.support.example_runs import EXAMPLES, example_env, run_example
from tests.support.requirements import slow_case

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
# Says which step comes next on how many ranks, and waits at some until the test has ended or started an agent.
WAITS = """
    if rank() == 0:
        with open("log", "a") as log:
            log.write(f"{world()} {step}\\n")
    awaited = {(2, 8): Path("one_has_left"), (1, 16): Path("one_has_joined")}.get((world(), step))
    until = time.monotonic() + 90
    while awaited and not awaited.exists():
        if time.monotonic() > until:
            sys.exit(f"no {awaited}")
        time.sleep(0.02)
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


@pytest.mark.parametrize("ranks", [2, slow_case(0), slow_case(1), slow_case(3)])
def test_a_killed_training_resumes_on_any_number_of_ranks(straight, killed, outcome, tmp_path, ranks):
    shutil.copytree(killed / "checkpoint", tmp_path / "checkpoint")
    begin = outcome(tmp_path / "checkpoint")[0]["step"]
    code, output = run_example("train_gpt.py", ranks, *TINY, directory=tmp_path)
    assert code == 0, output
    assert f"resumed at step {begin} from checkpoint" in output, output
    (extra, params), (expected, expected_params, _) = outcome(tmp_path / "checkpoint"), straight
    expect_close(extra, expected)
    if ranks == 2:
        assert extra == expected
        assert all(torch.equal(params[name], expected_params[name]) for name in expected_params)


@pytest.mark.slow
def test_nothing_is_done_where_all_steps_are(straight, tmp_path):
    shutil.copytree(straight[2] / "checkpoint", tmp_path / "checkpoint")
    before = (tmp_path / "checkpoint" / ".metadata").stat()
    code, output = run_example("train_gpt.py", 0, *TINY, directory=tmp_path)
    assert code == 0 and "resumed at step 24" in output and "step 24: " not in output, output
    after = (tmp_path / "checkpoint" / ".metadata").stat()
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_what_is_random_resumes_too(tmp_path, dtype):
    """In one go: `make demo` shows it so."""
    flags = [*(flag for flag in TINY if flag != "--resume"), "--dtype", dtype, "--dropout", "0.2", "--check-resume"]
    code, output = run_example("train_gpt.py", 2, *flags, directory=tmp_path)
    assert code == 0 and "resumed at step 21, again trained to step 24: loss" in output, output
    assert "the same bits" in output, output


class Agent:
    """One torchrun with one rank, of a job of one to three."""

    def __init__(self, folder: Path, name: str, port: int, is_host: bool) -> None:
        conf = f"is_host={int(is_host)},last_call_timeout=8,join_timeout=100,keep_alive_interval=1,read_timeout=60"
        flags = f"--nnodes 1:3 --nproc-per-node 1 --max-restarts 3 --local-addr 127.0.0.1 --rdzv-id {folder.name}"
        flags += f" --rdzv-backend c10d --rdzv-endpoint localhost:{port} --rdzv-conf {conf}"
        # Else an agent that comes later waits for ever for an address that torch 2.13 tells in the first round alone.
        env = {**example_env(), "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        self.output = folder / f"{name}.txt"
        with self.output.open("w") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "torch.distributed.run", *flags.split(), str(folder / "script.py"), *TINY],
                cwd=folder,
                env=env,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def kill(self) -> None:
        """As if its host were gone: its rank too, which has a session of its own."""
        own = str(self.process.pid)
        children = Path(f"/proc/{own}/task/{own}/children")
        ranks = [int(pid) for pid in children.read_text().split()] if children.exists() else []
        self.process.kill()
        for pid in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait(timeout=20)


def await_that(is_so: Callable[[], bool], agents: list[Agent], timeout_s: float) -> None:
    until = time.monotonic() + timeout_s
    while not is_so():
        outputs = "\n".join(f"{agent.output.name}:\n{agent.output.read_text()}" for agent in agents)
        assert time.monotonic() < until, f"not within {timeout_s} s:\n{outputs}"
        assert not agents[0].process.poll(), outputs
        time.sleep(0.05)


@pytest.mark.slow
@pytest.mark.timeout_s(400)
def test_agents_leave_and_join(straight, outcome, tmp_path):
    script(tmp_path, WAITS)
    log = tmp_path / "log"
    log.touch()
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    agents = [Agent(tmp_path, f"agent{i}", port, is_host=i == 0) for i in range(2)]
    try:
        await_that(lambda: "2 8\n" in log.read_text(), agents, 120)
        agents[1].kill()
        (tmp_path / "one_has_left").touch()
        await_that(lambda: "1 16\n" in log.read_text(), agents, 120)
        agents.append(Agent(tmp_path, "agent2", port, is_host=False))
        await_that(lambda: [agents[index].process.poll() for index in (0, 2)] == [0, 0], agents, 120)
    finally:
        for agent in agents:
            agent.kill()
    worlds = [tuple(map(int, line.split())) for line in log.read_text().splitlines()]
    assert [world for world, _ in groupby(worlds, lambda entry: entry[0])] == [2, 1, 2], worlds
    begins = [next(steps)[1] for _, steps in groupby(worlds, lambda entry: entry[0])]
    assert begins[0] == 0 and 3 <= begins[1] <= 6 and 12 <= begins[2] <= 15, worlds
    expect_close(outcome(tmp_path / "checkpoint")[0], straight[0])


@pytest.mark.parametrize(
    ("flags", "env", "message"),
    [
        (["--resume"], {}, "--every, --resume and --check-resume need --save DIR"),
        (["--every", "3"], {}, "--every, --resume and --check-resume need --save DIR"),
        (["--save", "x", "--check-resume"], {}, "--check-resume needs a save before the end: --every 0, --steps 64"),
        (["--save", "x", "--resume", "--compare", "ddp"], {}, "of the peers nothing is saved"),
        (["--batch", "2"], {"WORLD_SIZE": "3"}, "--batch 2: each of 3 ranks needs a sequence at least"),
    ],
)
def test_flags_that_do_not_go_together(train_gpt, monkeypatch, capsys, flags, env, message):
    monkeypatch.setattr(sys, "argv", ["train_gpt.py", *flags])
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit):
        train_gpt.Config.from_command_line()
    assert message in capsys.readouterr().err


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


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class SlowSave:
    """1 MB a second."""

    def __init__(self, seconds: float) -> None:
        self.begin, self.seconds = time.monotonic(), seconds
        self.stats = SimpleNamespace(waited_s=0.25)

    def done(self) -> bool:
        return time.monotonic() - self.begin >= self.seconds

    def progress(self) -> tuple[int, int]:
        return min(int(1e6 * (time.monotonic() - self.begin)), int(1e6 * self.seconds)), int(1e6 * self.seconds)

    def wait(self) -> None:
        assert self.done()


@pytest.mark.parametrize(
    ("seconds", "stream", "shown"), [(1.5, Terminal, True), (0.3, Terminal, False), (1.5, io.StringIO, False)]
)
def test_a_bar_where_a_save_takes_more_than_a_second(train_gpt, tmp_path, monkeypatch, seconds, stream, shown):
    checkpoints = train_gpt.Checkpoints(str(tmp_path), every=0)
    monkeypatch.setattr(sys, "stderr", stream())
    checkpoints.pending = SlowSave(seconds)
    checkpoints.finish_save()
    text = sys.stderr.getvalue()
    assert ("saving" in text and "1.50M" in text) if shown else not text, text
    assert checkpoints.pending is None and checkpoints.stalled_s >= seconds + 0.25 - 0.01
    (tmp_path / "gone").symlink_to("none")  # as what rank 0 removes after the commit
    assert "for 1 save(s)" in checkpoints.summary()
