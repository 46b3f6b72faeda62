"""The short examples run and come to the results they print. The main job has its own test (test_train_gpt.py)."""

import re

import pytest

from tests.support.example_runs import EXAMPLES, run_example


def output_of(name: str, ranks: int) -> str:
    code, output = run_example(name, ranks)
    assert code == 0, output
    return output


@pytest.mark.slow
def test_gather_while_computing():
    output = output_of("gather_while_computing.py", 3)
    found = re.search(r"sum (\d+), expected (\d+)", output)
    assert found is not None and found[1] == found[2], output


def test_collectives_agree_with_the_whole_computation():
    found = re.findall(
        r"rank (\d) on cpu: the largest relative difference is ([\d.e+-]+)", output_of("collectives.py", 2)
    )
    assert sorted(rank for rank, _ in found) == ["0", "1"] and all(float(d) < 1e-5 for _, d in found), found


@pytest.mark.slow
def test_zero1_by_hand_learns():
    losses = [float(loss) for loss in re.findall(r"loss (\S+)", output_of("zero1_by_hand.py", 2))]
    assert len(losses) == 6 and losses[-1] < 0.5 * losses[0], losses


def test_fused_clip_step_agrees_with_torch():
    output = output_of("fused_clip_step.py", 0)
    difference = re.search(r"largest difference of a parameter is (\S+)", output)
    assert difference is not None and float(difference[1]) < 1e-5, output
    ours, peers = re.search(r"bucketwheel (\S+), torch (\S+)\n", output).groups()
    assert float(ours) < 1e-12 and float(ours) < float(peers), output


@pytest.mark.slow  # tests/conformance/test_fsdp2.py trains beside torch's memory
def test_fsdp2_learns_in_a_planned_pool():
    output = output_of("fsdp2_pool.py", 2)
    found = re.findall(r"step (\d+) loss (\S+): ([\d,]+) bytes", output)
    assert [step for step, *_ in found] == ["0", "1", "19"] and float(found[2][1]) < 0.6 * float(found[0][1]), output
    traced, planned, last = (int(nbytes.replace(",", "")) for *_, nbytes in found)
    assert planned == last < traced and "the load is" in output, output


def test_sharded_params_learn_generate_and_load():
    output = output_of("sharded_params.py", 2)
    losses = re.findall(r"rank \d: loss (\S+) to (\S+), 32 of 32 right, generated \[(.+?)\]", output)
    assert all(float(last) < 0.1 * float(first) for first, last, _ in losses), output
    assert sorted(text for *_, text in losses) == ["0, 3, 18, 29, 20, 7, 6, 1", "1, 8, 11, 26, 5, 28, 15, 14"], output
    found = re.findall(r"the next loss is ([\d.e-]+), from the checkpoint ([\d.e-]+)", output)
    assert len(found) == 2 and all(one == other for one, other in found), output
    assert "5 units over 2 ranks" in output and "divergences: 0" in output, output


@pytest.mark.slow
def test_hsdp_has_the_same_bits_with_and_without_sharded_parameters():
    output = output_of("hsdp.py", 4)
    found = re.findall(r"rank \d: loss (\S+) to (\S+), states 4\.\d bytes a parameter", output)
    assert len(found) == 4 and all(float(last) < 0.1 * float(first) for first, last in found), output
    assert output.count("losses are equal: True, parameters are equal: True") == 4, output


@pytest.mark.slow
def test_torch_pipelining_agrees_with_one_process():
    output = output_of("torch_pipelining.py", 4)
    losses = [float(loss) for loss in re.findall(r"loss (\d+\.\d+)", output)]
    assert len(losses) == 4 and losses[-1] < 0.1 * losses[0], output
    differences = re.findall(r"parameters differ from one process by ([\d.e+-]+) at most", output)
    assert len(differences) == 4 and all(float(difference) < 1e-5 for difference in differences), output


def losses_in(text: str) -> list[float]:
    return [float(loss) for loss in text.split(", ")]


@pytest.mark.timeout_s(900)
def test_a_checkpoint_resumes_on_another_number_of_ranks(tmp_path):
    runs = [("two_then_one", 2, 4), ("two_then_one", 1, 4), ("one", 1, 8)]
    found = {}
    for folder, ranks, steps in runs:
        code, output = run_example(
            "elastic_resume.py", ranks, "--folder", folder, "--steps", str(steps), directory=tmp_path
        )
        assert code == 0, output
        found.setdefault(folder, []).extend(re.findall(r"begin after step \d+|step \d+ loss \S+", output))
    assert found["two_then_one"].pop(5) == "begin after step 4", found
    last = {name: losses_in(", ".join(line.split()[-1] for line in lines[1:])) for name, lines in found.items()}
    assert len(last["one"]) == 8 and last["two_then_one"] == pytest.approx(last["one"], rel=1e-5), last


@pytest.mark.slow  # test_checkpoint_guides.py converts and compares all states
@pytest.mark.parametrize("system", ["fsdp2", "deepspeed", "megatron"])
def test_a_checkpoint_of_another_system_trains_on_as_there(system):
    output = output_of(f"from_{system}.py", 2)
    if system == "deepspeed":
        theirs, ours = (
            re.findall(rf"rank 0 step [345]: {name} loss (\S+)", output) for name in ("AdamW", "ShardedAdamW")
        )
        pairs = [(list(map(float, theirs)), list(map(float, ours)))]
    else:
        found = re.findall(r"(?:FSDP2|AdamW) \[(.*?)\], (?:bucketwheel|ShardedAdamW) \[(.*?)\]", output)
        pairs = [tuple(map(losses_in, pair)) for pair in found]
    assert pairs, output
    for expected, losses in pairs:
        assert len(losses) == 3 and losses == pytest.approx(expected, rel=1e-5), output


@pytest.mark.slow  # tests/frameworks trains and resumes in both
@pytest.mark.parametrize("name", ["hf_accelerate.py", "hf_trainer.py"])
def test_hugging_face_trains_on_as_if_it_had_not_stopped(name, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    code, output = run_example(name, 2, directory=tmp_path)
    assert code == 0, output
    found = re.findall(r"unbroken \[(.*?)\], resumed \[(.*?)\]", output)
    assert len(found) == 2, output
    for unbroken, resumed in found:
        assert len(losses_in(resumed)) >= 4 and resumed == unbroken, output


WITH_EVENTS = """
import os, runpy, sys, torch
from bucketwheel.native import core
events, backward = [], torch.Tensor.backward

class Window(core.Window):
    def __init__(self, *args):
        super().__init__(*args)
        self.observe(lambda *_: events.append("launch "))

def ran(*args, **options):
    events.append("begin ")
    backward(*args, **options)
    events.append("end ")

core.Window, torch.Tensor.backward = Window, ran
runpy.run_path(sys.argv[1], run_name="__main__")
print(f"events of {os.environ['RANK']}: {''.join(events)}", flush=True)
"""


@pytest.mark.slow
def test_pipelines_agree_with_the_whole_model_and_reduce_when_they_say(tmp_path):
    (tmp_path / "with_events.py").write_text(WITH_EVENTS)
    code, output = run_example(str(tmp_path / "with_events.py"), 4, str(EXAMPLES / "pipeline.py"))
    assert code == 0, output
    found = re.findall(r"(GPipe|1F1B) on rank (\d): parameters differ by ([\d.e+-]+) at most", output)
    assert len({(schedule, rank) for schedule, rank, _ in found}) == 8, output
    assert all(float(difference) < 1e-5 for *_, difference in found), output
    events = dict(re.findall(r"events of (\d): (.*)", output))
    assert len(events) == 4, output
    for rank, text in events.items():
        # 10 steps in one process, then 10 of each schedule, of 4 backwards and a bucket. The first stage reduces while
        # its last backward runs, the second one when all have ended.
        last = "begin launch end " if int(rank) < 2 else "begin end launch "
        assert text.strip() == ("begin end " * 10 + ("begin end " * 3 + last) * 20).strip(), rank
