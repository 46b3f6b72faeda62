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
