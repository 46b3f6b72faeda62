"""The runners report what went wrong on each rank, keep their deadlines and leave nothing behind."""

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from bucketwheel import testing
from bucketwheel.testing import RankFailed, run_threads
from tests.support import ranks
from tests.support.bits import assert_bitwise_equal
from tests.support.requirements import slow_case

both = pytest.mark.parametrize("run", [testing.run_ranks, ranks.run_ranks], ids=["fresh", "forked"])


def all_reduce_rank(rank, world_size, offset):
    value = torch.tensor([rank + offset])
    dist.all_reduce(value)
    return rank, world_size, int(value)


def planted_wait(seconds):
    time.sleep(seconds)


def misbehaves(rank, world_size, how):
    if rank == 1:
        if how == "raises":
            raise ValueError("planted")
        elif how == "crashes":
            os.kill(os.getpid(), signal.SIGSEGV)
        planted_wait(0.0 if how == "returns" else 300.0)
    return os.getpid()


def start_a_child_and_hang(rank, world_size, directory):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
    Path(directory, f"child-{rank}").write_text(str(child.pid))
    planted_wait(300)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until(condition, timeout_s=20.0) -> bool:
    deadline = time.monotonic() + timeout_s
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return condition()


@both
def test_results_come_by_rank_with_a_process_group(run):
    assert run(all_reduce_rank, 3, 10) == [(rank, 3, 33) for rank in range(3)]


SAYS = {
    "raises": r"(.|\n)*in misbehaves(.|\n)*planted",
    "hangs": r"(.|\n)*planted_wait",
    "crashes": r"died: (.|\n)*Segmentation fault(.|\n)*misbehaves",
}


@pytest.mark.parametrize(
    ("run", "how"),
    [
        *((ranks.run_ranks, how) for how in SAYS),
        (testing.run_ranks, "raises"),
        *(slow_case(testing.run_ranks, how) for how in ("hangs", "crashes")),
    ],
)
def test_a_failed_rank_is_reported_and_the_others_results(run, how):
    with pytest.raises(RankFailed, match=f"rank 1/2: {SAYS[how]}") as caught:
        run(misbehaves, 2, how, timeout_s=2.0, backend=None)
    assert list(caught.value.failures) == [1] and list(caught.value.results) == [0]
    assert wait_until(lambda: not is_alive(caught.value.results[0]))


def test_a_pool_keeps_its_ranks_until_one_dies():
    with ranks.RankPool(2, backend=None) as pool:
        first = pool.run(misbehaves, "returns")
        assert pool.run(misbehaves, "returns") == first
        assert pool.run(misbehaves, "crashes", expect_dead={1}) == [first[0], None]
        assert not set(pool.run(misbehaves, "returns")) & set(first)
        with pytest.raises(RankFailed, match="expected to die"):
            pool.run(misbehaves, "returns", expect_dead={1})


@pytest.mark.parametrize(
    ("module", "ending"),
    [("bucketwheel.testing", "timeout"), ("bucketwheel.testing", "killed"), slow_case("tests.support.ranks", "killed")],
)
def test_nothing_is_left_behind_not_even_what_a_rank_started(tmp_path, module, ending):
    code = f"import sys; sys.path[:] = {sys.path!r}\nfrom {module} import run_ranks\n"
    code += f"from {__name__} import start_a_child_and_hang as hang\nif __name__ == '__main__':\n"
    code += f"    run_ranks(hang, 2, {str(tmp_path)!r}, backend=None, timeout_s={2 if ending == 'timeout' else 100})"
    # The fork server has a socket in its temporary folder: 107 bytes, of which `tmp_path` takes most.
    with tempfile.TemporaryDirectory(prefix="bw-") as temporary:
        runner = subprocess.Popen([sys.executable, "-c", code], env={**os.environ, "TMPDIR": temporary})
        assert wait_until(lambda: len(list(tmp_path.iterdir())) == 2, 100)
        if ending == "killed":
            runner.kill()
        runner.wait(100)
        if ending == "timeout":  # a killed runner cannot remove its folder, nor end what its ranks have started
            assert not list(Path(temporary).glob("bw-ranks-*"))
            children = [int(path.read_text()) for path in tmp_path.iterdir()]
            assert wait_until(lambda: not any(map(is_alive, children)))
        assert wait_until(lambda: not processes_with(temporary))


def processes_with(word):
    """Ranks and the fork server have the environment of the runner."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            is_rank = b"multiprocessing" in (path.parent / "cmdline").read_bytes()
            found += [path] if is_rank and word in path.read_text(errors="replace") else []
        except OSError:
            continue
    return found


def test_threads_return_results_and_report_failures_and_hangs():
    barrier, release = threading.Barrier(3), threading.Event()

    def meets(rank, world_size, how):
        barrier.wait(10)
        if rank == 1 and how == "raises":
            raise ValueError("planted")
        if rank == 1 and how == "hangs":
            planted_thread_wait(release)
        return rank * world_size

    assert run_threads(meets, 3, "returns") == [0, 3, 6]
    for how, says in (
        ("raises", "rank 1/3: .*(.|\n)*planted"),
        ("hangs", r"rank 1/3: hangs(.|\n)*planted_thread_wait"),
    ):
        with pytest.raises(RankFailed, match=says) as caught:
            run_threads(meets, 3, how, timeout_s=0.5)
        assert caught.value.results == {0: 0, 2: 6} and list(caught.value.failures) == [1]
    release.set()


def planted_thread_wait(release):
    release.wait(30)


def test_bits():
    quiet, other = torch.tensor([0x7FC00000, 0x7FC00001], dtype=torch.int32).view(torch.float32)
    assert_bitwise_equal({"a": [1.5, quiet, torch.empty(0, 3)]}, {"a": [1.5, other, torch.empty(0, 3)]})
    for actual, expected, message in (
        (torch.tensor([0.0, -0.0]), torch.zeros(2), r"value: 1 of 2 elements differ, the first at \[1\]: actual -0.0"),
        (torch.zeros(3), torch.zeros(3, dtype=torch.float64), "float32.*float64"),
        (torch.zeros(3), torch.zeros(1, 3), r"\(3,\).*\(1, 3\)"),
    ):
        with pytest.raises(AssertionError, match=message):
            assert_bitwise_equal(actual, expected)
