"""The runners report what went wrong on each rank, keep their deadlines and leave nothing behind."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from bucketwheel import _fork_server
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


def wait_for_peers_after(rank, world_size, bad):
    if rank == bad:
        raise ValueError("planted")
    planted_wait(300)


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


def write_then_hang(rank, world_size, directory):
    Path(directory, str(rank)).write_text("here")
    planted_wait(300 if rank == 1 else 0)
    return rank


def start_a_child_and_hang(rank, world_size, directory):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
    Path(directory, "child").write_text(str(child.pid))
    planted_wait(300)


def exit_badly(rank, world_size):
    import atexit

    atexit.register(os._exit, 7)


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
@pytest.mark.parametrize("world_size", [1, 3])
def test_results_come_by_rank_with_a_process_group(world_size, forked):
    total = sum(range(world_size)) + 10 * world_size
    assert run_ranks(all_reduce_rank, world_size, 10, forked=forked) == [
        (r, world_size, total) for r in range(world_size)
    ]


def test_a_failing_rank_is_reported_with_its_traceback_and_the_others_results():
    with pytest.raises(RankFailed, match="planted on 1") as caught:
        run_ranks(raise_on_rank, 3, 1, forked=True)
    assert list(caught.value.failures) == [1]
    assert "raise_on_rank" in caught.value.failures[1]  # the traceback, not only the message
    assert caught.value.results == {0: 0, 2: 2}


def test_ranks_waiting_for_a_failed_one_are_killed_after_a_grace():
    start = time.monotonic()
    with pytest.raises(RankFailed, match="after rank 0 had failed") as caught:
        run_ranks(wait_for_peers_after, 2, 0, timeout_s=200, backend=None, forked=True)
    assert time.monotonic() - start < 60
    assert sorted(caught.value.failures) == [0, 1]


@both_ways
def test_a_hanging_rank_is_killed_at_the_deadline_and_its_stack_shown(forked):
    with RankPool(2, backend=None, forked=forked) as pool:
        pids = [pid for pid, _ in pool.run(identity_of)]
        start = time.monotonic()
        with pytest.raises(RankFailed, match=r"within 1 s(.|\n)*planted_wait") as caught:
            pool.run(hang_on_rank, 1, timeout_s=1)
        assert time.monotonic() - start < 15
        assert caught.value.results == {0: 0}
        assert not any(map(is_alive, pids))
        assert pool.run(raise_on_rank, -1) == [0, 1]  # the pool has started new ranks


def test_survivors_of_an_expected_death_return_their_results():
    assert run_ranks(die_on_rank, 3, 1, signal.SIGKILL, expect_dead={1}, forked=True) == ["alive", None, "alive"]


@both_ways
def test_an_unexpected_death_names_the_signal_and_shows_the_stack_of_a_crash(forked):
    with pytest.raises(RankFailed, match="rank 1/2: died: SIGKILL"):
        run_ranks(die_on_rank, 2, 1, signal.SIGKILL, backend=None, forked=forked)
    with pytest.raises(RankFailed, match=r"rank 0/2: died: SIGSEGV(.|\n)*die_on_rank"):
        run_ranks(die_on_rank, 2, 0, signal.SIGSEGV, backend=None, forked=forked)


def test_a_rank_that_should_have_died_but_did_not_fails():
    with pytest.raises(RankFailed, match="expected to die"):
        run_ranks(raise_on_rank, 2, -1, backend=None, expect_dead={0}, forked=True)


def test_the_pool_reuses_its_processes_with_one_seed_and_can_kill_a_rank(tmp_path):
    with RankPool(2, backend=None, forked=True) as pool:
        first, second = pool.run(identity_of), pool.run(identity_of)
        assert [pid for pid, _ in first] == [pid for pid, _ in second]
        assert_bitwise_equal([rand for _, rand in second], [rand for _, rand in first])
        pool.submit(write_then_hang, str(tmp_path))
        with pytest.raises(ValueError, match="already"):
            pool.submit(identity_of)
        assert wait_until((tmp_path / "1").exists)
        pool.kill(1)
        assert pool.collect(timeout_s=20, expect_dead={1}) == [0, None]
        third = pool.run(identity_of)
        assert not {pid for pid, _ in first} & {pid for pid, _ in third}


@both_ways
def test_nothing_is_left_behind_not_even_what_a_rank_started(tmp_path, monkeypatch, forked):
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    with pytest.raises(RankFailed):
        run_ranks(start_a_child_and_hang, 1, str(tmp_path), timeout_s=5, backend=None, forked=forked)
    child = int((tmp_path / "child").read_text())
    assert wait_until(lambda: not is_alive(child))
    assert list(temporary.iterdir()) == []


@both_ways
@pytest.mark.skipif(sys.platform != "linux", reason="the death signal of a parent is Linux's")
def test_ranks_die_with_a_killed_runner(tmp_path, forked):
    code = (
        f"import sys; sys.path[:] = {sys.path!r}; from bucketwheel.testing import run_ranks; "
        f"from {__name__} import write_pid_and_hang as hang; run_ranks(hang, 2, {str(tmp_path)!r}, backend=None, forked={forked})"
    )
    temporary = tmp_path.parent / "temporary"  # a killed runner cannot remove its folder
    temporary.mkdir(exist_ok=True)
    runner = subprocess.Popen([sys.executable, "-c", code], env={**os.environ, "TMPDIR": str(temporary)})
    try:
        assert wait_until(lambda: len(list(tmp_path.iterdir())) == 2, 60)
    finally:
        runner.kill()
        runner.wait(10)
    pids = [int(path.name) for path in tmp_path.iterdir()]
    assert wait_until(lambda: not any(map(is_alive, pids)))


def what_it_is(rank, world_size):
    return os.getppid(), os.environ.get("BW_PLANTED"), os.environ.get("PLANTED"), torch.get_num_threads(), os.getsid(0)


def test_forked_ranks_have_their_own_environment_and_a_common_parent(monkeypatch):
    """Unless it has what was read before they were forked: then they are started."""
    monkeypatch.setenv("PYTEST_PLANTED", "here")
    monkeypatch.delenv("OMP_NUM_THREADS")  # as in a script of somebody else
    monkeypatch.setattr(_fork_server, "_servers", {})
    first = run_ranks(what_it_is, 2, backend=None, env={"BW_PLANTED": "one"}, forked=True)
    second = run_ranks(what_it_is, 1, backend=None, env={"BW_PLANTED": "other"}, forked=True)
    started = run_ranks(what_it_is, 1, backend=None, env={"PLANTED": "other"}, forked=True)
    threads = {count for *_, count, _ in [*first, *second, *started]}
    assert {parent for parent, *_ in first + second} == {first[0][0]} != {os.getpid()}
    assert [planted for _, planted, *_ in first + second] == ["one", "one", "other"]
    assert threads == {1}
    assert started[0][:3] == (os.getpid(), None, "other")
    sessions = [session for *_, session in first]
    assert len({*sessions, os.getsid(0)}) == 3


def test_where_the_fork_server_dies_its_ranks_are_dead_and_the_next_ones_have_another(monkeypatch):
    monkeypatch.setattr(_fork_server, "_servers", {})  # the other tests' one has their ranks
    with RankPool(2, backend=None, forked=True) as pool:
        server = pool.run(what_it_is)[0][0]
        with pytest.raises(RankFailed, match="SIGKILL"):
            pool.run(kill_the_parent)
        assert pool.run(what_it_is)[0][0] not in (server, os.getpid())


def kill_the_parent(rank, world_size):
    if rank == 0:
        os.kill(os.getppid(), signal.SIGKILL)
    planted_wait(300)


def write_pid_and_hang(rank, world_size, directory):
    Path(directory, str(os.getpid())).touch()
    planted_wait(300)


@both_ways
def test_a_rank_that_exits_badly_fails_the_close(forked):
    with pytest.raises(RankFailed, match="exit code 7"), RankPool(1, backend=None, forked=forked) as pool:
        pool.run(exit_badly)


@pytest.mark.slow
def test_a_function_of_the_main_script_runs(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        f"import sys; sys.path[:] = {sys.path!r}\n"
        "from bucketwheel.testing import run_ranks\n"
        "def double(rank, world_size): return 2 * rank\n"
        "if __name__ == '__main__': print(run_ranks(double, 2, backend=None))\n"
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.strip() == "[0, 2]", done.stderr


def test_threads_return_results_and_report_failures_and_hangs():
    barrier = threading.Barrier(3)

    def meet(rank, world_size):
        barrier.wait(10)
        return rank * world_size

    assert run_threads(meet, 3) == [0, 3, 6]
    with pytest.raises(RankFailed, match="planted on 1") as caught:
        run_threads(raise_on_rank, 2, 1)
    assert caught.value.results == {0: 0}
    release = threading.Event()
    try:
        with pytest.raises(RankFailed, match="planted_thread_wait"):
            run_threads(planted_thread_wait, 2, release, timeout_s=0.2)
    finally:
        release.set()


def test_threads_are_not_the_first_to_call_the_functions_of_mkl():
    with mock.patch.object(torch, "exp", wraps=torch.exp) as called:
        assert run_threads(lambda rank, world_size: called.call_count, 2) == [1, 1]


def planted_thread_wait(rank, world_size, release):
    release.wait(30)


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
    with pytest.raises(AssertionError, match=r"weights: 2 of 12 .* first at \[1, 2\] \(flat 6\).*difference 3"):
        assert_bitwise_equal(actual, expected, "weights")


def test_differences_show_both_values_in_decimal_and_hex():
    one = torch.tensor([0.0, 1.0])
    with pytest.raises(AssertionError, match=r"1\.0000001\d* \(0x3f800001\), expected 1\.0 \(0x3f800000\)"):
        assert_bitwise_equal(torch.nextafter(one, torch.tensor([0.0, 2.0])), one)


@pytest.mark.parametrize(
    ("actual", "expected", "message"),
    [
        (torch.tensor([-0.0]), torch.tensor([0.0]), "0x80000000"),
        (torch.tensor(float("nan")), torch.tensor(1.0), r"first at \[\]"),
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


@contextlib.contextmanager
def forks(monkeypatch):
    """What forks off a server of its own, which imports nothing."""
    monkeypatch.setattr(_fork_server, "_servers", {})
    monkeypatch.setattr(_fork_server, "_IMPORTED", ())
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield lambda code, **more: _fork_server.fork(code, theirs.fileno(), {**_fork_server.default_env(), **more})
        _fork_server._end_server()


def test_a_forked_process_is_not_taken_for_an_earlier_one_of_its_number(monkeypatch):
    """Numbers of processes come again."""
    with forks(monkeypatch) as fork:
        first = fork("pass")
        assert first.wait(60) == 0
        server = first._server
        again = json.dumps({"pid": first.pid}).encode()
        with mock.patch.object(server, "_socket", mock.Mock(recv=lambda size: again)):
            assert server._read() == {"pid": first.pid}
        assert server.code_of(first.pid) is None


def test_a_forked_process_is_not_taken_for_one_whose_fork_was_interrupted(monkeypatch):
    with forks(monkeypatch) as fork:
        assert fork("raise SystemExit(3)").wait(60) == 3
        server = _fork_server._servers[os.getpid()]
        with mock.patch.object(server, "_read", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
            fork("raise SystemExit(4)")
        assert fork("raise SystemExit(5)").wait(60) == 5


def test_a_forked_process_leads_its_session_once_it_is_known(monkeypatch):
    """Who is told of it may end it, and all that it starts, at once."""
    with forks(monkeypatch) as fork:
        for _ in range(20):
            process = fork("import time; time.sleep(300)")
            os.killpg(process.pid, signal.SIGKILL)
            assert process.wait(20) == -signal.SIGKILL


def test_a_process_that_dies_before_it_has_answered_is_one_that_has_ended(monkeypatch):
    with forks(monkeypatch) as fork:
        assert fork("pass").wait(60) == 0
        server = _fork_server._servers[os.getpid()]
        read = server._read
        with mock.patch.object(server, "_read", lambda: news if "code" in (news := read()) else {}):
            assert fork("raise SystemExit(3)").wait(60) == 3


def test_an_exit_code_is_known_after_the_fork_server_has_gone(monkeypatch):
    with forks(monkeypatch) as fork:
        running, ended = fork("import time; time.sleep(300)"), fork("raise SystemExit(3)")
        try:
            ended._server.await_news(60)
            _fork_server._end_server()
            assert (ended.wait(20), running.wait(20)) == (3, -signal.SIGKILL)
        finally:
            os.killpg(running.pid, signal.SIGKILL)


def test_an_environment_larger_than_a_message_is_not_sent(monkeypatch):
    with forks(monkeypatch) as fork:
        assert fork("pass", **{f"BW_{i}": 50_000 * "x" for i in range(3)}) is None
        assert fork("pass").wait(60) == 0


@pytest.mark.slow
def test_the_fork_server_has_ended_with_its_process(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        f"import atexit, os, sys; sys.path[:] = {sys.path!r}\n"
        "if __name__ == '__main__':\n"
        "    servers = []\n"
        "    atexit.register(lambda: print([os.path.exists(f'/proc/{server}') for server in servers]))  # runs last\n"
        "    from bucketwheel.testing import run_ranks\n"
        f"    from {__name__} import what_it_is\n"
        "    servers.append(run_ranks(what_it_is, 1, backend=None, forked=True)[0][0])\n"
        "    assert servers[0] != os.getpid() and os.path.exists(f'/proc/{servers[0]}')\n"
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.strip() == "[False]", done.stderr
