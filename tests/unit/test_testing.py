"""The runners report what went wrong on each rank, keep their deadlines and leave nothing behind."""

import atexit
import gc
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from bucketwheel.testing import RankFailed, RankPool, assert_bitwise_equal, run_ranks, run_threads

started = pytest.param(False, id="started", marks=pytest.mark.slow)
both_ways = pytest.mark.parametrize("forked", [started, pytest.param(True, id="forked")])


def all_reduce_rank(rank, world_size, offset):
    value = torch.tensor([rank + offset])
    dist.all_reduce(value)
    return rank, world_size, int(value)


def identity_of(rank, world_size):
    return os.getpid(), torch.rand(3)


def raise_on_rank(rank, world_size, bad):
    if rank == bad:
        raise ValueError(f"planted on {rank}")
    return rank


def planted_wait(seconds):
    time.sleep(seconds)


def hang_on_rank(rank, world_size, bad):
    if rank == bad:
        planted_wait(300)
    return rank


def die_on_rank(rank, world_size, bad, signum):
    if rank == bad:
        os.kill(os.getpid(), signum)
        planted_wait(300)
    return "alive"


def start_a_child_and_hang(rank, world_size, directory):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
    Path(directory, f"child-{rank}").write_text(str(child.pid))
    planted_wait(300)


def exit_badly(rank, world_size):
    atexit.register(os._exit, 7)


def leave_work(rank, world_size, file):
    def say_later():
        time.sleep(0.3)
        file.write_text("thread ")

    atexit.register(lambda: file.write_text(file.read_text() + "atexit"))
    threading.Thread(target=say_later).start()


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def wait_until(condition, timeout_s=20.0) -> bool:
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


@both_ways
def test_results_come_by_rank_with_a_process_group(forked):
    expected = [(rank, 3, 33) for rank in range(3)]
    assert run_ranks(all_reduce_rank, 3, 10, forked=forked) == expected


def test_a_failing_rank_is_reported_with_its_traceback_and_the_others_results():
    with pytest.raises(RankFailed, match="planted on 1") as caught:
        run_ranks(raise_on_rank, 3, 1, forked=True)
    assert list(caught.value.failures) == [1]
    assert "raise_on_rank" in caught.value.failures[1]  # the traceback, not only the message
    assert caught.value.results == {0: 0, 2: 2}


def test_a_hanging_rank_is_killed_at_the_deadline_and_its_stack_shown():
    with RankPool(2, backend=None, forked=True) as pool:
        pids = [pid for pid, _ in pool.run(identity_of)]
        with pytest.raises(RankFailed, match=r"within 1 s(.|\n)*planted_wait") as caught:
            pool.run(hang_on_rank, 1, timeout_s=1)
        assert caught.value.results == {0: 0}
        assert not any(map(is_alive, pids))
        assert pool.run(raise_on_rank, -1) == [0, 1]  # the pool has started new ranks


@both_ways
@pytest.mark.timeout_s(300)
def test_deaths(forked):
    assert run_ranks(die_on_rank, 3, 1, signal.SIGKILL, expect_dead={1}, forked=forked) == ["alive", None, "alive"]
    with pytest.raises(RankFailed, match="rank 1/2: died: SIGKILL"):
        run_ranks(die_on_rank, 2, 1, signal.SIGKILL, backend=None, forked=forked)
    with pytest.raises(RankFailed, match=r"rank 0/2: died: SIGSEGV(.|\n)*die_on_rank"):
        run_ranks(die_on_rank, 2, 0, signal.SIGSEGV, backend=None, forked=forked)
    with pytest.raises(RankFailed, match="expected to die"):
        run_ranks(raise_on_rank, 2, -1, backend=None, expect_dead={0}, forked=forked)
    with pytest.raises(RankFailed, match="exit code 7"), RankPool(1, backend=None, forked=forked) as pool:
        pool.run(exit_badly)


@both_ways
def test_a_rank_ends_with_its_threads_and_then_with_what_it_has_registered(forked, tmp_path):
    run_ranks(leave_work, 1, tmp_path / "said", backend=None, forked=forked)
    assert (tmp_path / "said").read_text() == "thread atexit"


def test_the_pool_reuses_its_processes_with_one_seed_until_one_dies():
    with RankPool(2, backend=None, forked=True) as pool:
        first, second = pool.run(identity_of), pool.run(identity_of)
        assert [pid for pid, _ in first] == [pid for pid, _ in second]
        assert_bitwise_equal([rand for _, rand in second], [rand for _, rand in first])
        assert pool.run(die_on_rank, 1, signal.SIGKILL, expect_dead={1}) == ["alive", None]
        third = pool.run(identity_of)
        assert not {pid for pid, _ in first} & {pid for pid, _ in third}


@pytest.mark.parametrize("ending", ["timeout", "killed runner"])
def test_nothing_is_left_behind_not_even_what_a_rank_started(tmp_path, ending):
    code = f"import sys; sys.path[:] = {sys.path!r}\nfrom bucketwheel.testing import RankPool\n"
    code += f"from {__name__} import start_a_child_and_hang as hang\n"
    limit_s = 3 if ending == "timeout" else 100
    code += f"RankPool(2, backend=None, forked=True).run(hang, {str(tmp_path)!r}, timeout_s={limit_s})"
    # The fork server has a socket in its temporary folder: 107 bytes, of which `tmp_path` takes most.
    with tempfile.TemporaryDirectory(prefix="bw-") as temporary:
        runner = subprocess.Popen([sys.executable, "-c", code], env={**os.environ, "TMPDIR": temporary})
        if ending == "killed runner":
            assert wait_until(lambda: len(list(tmp_path.iterdir())) == 2, 100)
            runner.kill()
        runner.wait(100)
        if ending == "timeout":  # a killed runner cannot remove its folder, nor end what its ranks have started
            left = {path.name for path in Path(temporary).iterdir()}
            assert not {name for name in left if not name.startswith("torchinductor_")}, left  # torch's, of its import
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

    def meet(rank, world_size):
        barrier.wait(10)
        return rank * world_size

    assert run_threads(meet, 3) == [0, 3, 6]
    with pytest.raises(RankFailed, match="planted on 1") as caught:
        run_threads(raise_on_rank, 2, 1)
    assert caught.value.results == {0: 0}
    try:
        with pytest.raises(RankFailed, match="planted_thread_wait"):
            run_threads(planted_thread_wait, 2, release, timeout_s=0.2)
    finally:
        release.set()
    with mock.patch.object(torch, "exp", wraps=torch.exp) as called:  # by the runner, before there are threads
        assert run_threads(lambda rank, world_size: called.call_count, 2) == [1, 1]


def planted_thread_wait(rank, world_size, release):
    release.wait(30)


def test_no_collection_while_python_looks_at_the_stacks_of_threads():
    """One that gives up the GIL may hang beside a thread that begins or ends (python/cpython#106883)."""
    release, collects = threading.Event(), []
    frames = sys._current_frames
    with mock.patch.object(sys, "_current_frames", lambda: collects.append(gc.isenabled()) or frames()):
        run_threads(raise_on_rank, 2, -1)
        assert collects == [], "nobody hangs"
        try:
            with pytest.raises(RankFailed, match="planted_thread_wait"):
                run_threads(planted_thread_wait, 2, release, timeout_s=0.2)
        finally:
            release.set()
    assert collects == [False]
    assert gc.isenabled()


def test_equal_bits_pass():
    quiet, other = torch.tensor([0x7FC00000, 0x7FC00001], dtype=torch.int32).view(torch.float32)
    assert_bitwise_equal(quiet, other)  # NaNs of different payload
    assert_bitwise_equal({"a": [1.5, torch.arange(6.0).view(2, 3).t()]}, {"a": [1.5, torch.arange(6.0).view(2, 3).t()]})
    assert_bitwise_equal(torch.empty(0, 3), torch.empty(0, 3))
    assert_bitwise_equal(torch.tensor([True, False]), torch.tensor([True, False]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64])
def test_the_first_difference_is_shown(dtype):
    expected = torch.zeros(3, 4, dtype=dtype)
    actual = expected.clone()
    actual[1, 2] = 2
    actual[2, 0] = -3
    with pytest.raises(AssertionError, match=r"weights: 2 of 12 .* first at \[1, 2\].*difference 3"):
        assert_bitwise_equal(actual, expected, "weights")


@pytest.mark.parametrize(
    ("actual", "expected", "message"),
    [
        (torch.tensor([-0.0]), torch.tensor([0.0]), "0x80000000"),
        (torch.tensor(float("nan")), torch.tensor(1.0), r"first at \[\]"),
        (torch.tensor([float("inf")]), torch.tensor([1.0]), r"0x7f800000\), expected 1\.0 \(0x3f800000\)"),
        (torch.zeros(3), torch.zeros(3, dtype=torch.float64), "float32.*float64"),
        (torch.zeros(3), torch.zeros(1, 3), r"\(3,\).*\(1, 3\)"),
        ({"a": 1}, {"b": 1}, "keys"),
        ({"a": [1, 2]}, {"a": [1, 3]}, r"\['a'\]\[1\]"),
        ([1], [1, 2], "length"),
    ],
)
def test_every_kind_of_difference_is_an_error(actual, expected, message):
    with pytest.raises(AssertionError, match=message):
        assert_bitwise_equal(actual, expected)
