"""How processes end that have, or had, NCCL communicators: with exit code 0, and soon."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.support import simulated_nccl

pytestmark = pytest.mark.dist
ROOT = Path(__file__).resolve().parents[3]
EXIT_S = 1.5  # a rank that waits for another in vain sleeps for 2 seconds each time

# Forks the ranks, which then end as any process does: that takes no time for imports.
TEMPLATE = """
import contextlib, os, socket, sys, time
from unittest import mock
import torch, torch.distributed as dist
from bucketwheel.comm import peers
from bucketwheel.comm import shm
from bucketwheel.native.modules import native
from bucketwheel.native import core
from bucketwheel.comm.communicator import Communicator
from bucketwheel.kernels.ops import all_gather
from tests.support import simulated_nccl

begins = []

def slept_s(process="self"):
    # Up to some constant: how long its main thread has neither run nor wanted to, which a busy machine hardly changes.
    with open(f"/proc/{process}/schedstat") as file:
        ran_ns, queued_ns, _ = map(int, file.read().split())
    return time.monotonic() - (ran_ns + queued_ns) / 1e9

class SlowToGo:
    def __del__(self, sleep=time.sleep):
        sleep(0.5)

def run(rank, port, apart):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE="2")
    simulated_nccl.install()
    core.set_posing(True)
    dist.init_process_group("gloo")
    with contextlib.ExitStack() as stack:
        if apart:
            stack.enter_context(mock.patch.object(shm, "connect", side_effect=shm.NotOneHost("apart")))
        case(rank)
    begins.append(slept_s())

def start(rank, port, apart):
    if (child := os.fork()) == 0:
        run(rank, port, apart)
        os.write(reports[1], f"{os.getpid()} {begins[0]} ".encode())
    return child

native()
for apart in APART * REPEATS:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    reports = os.pipe()
    children = []
    for rank in range(2):
        children.append(start(rank, port, apart))
        if children[-1] == 0:
            break
    if 0 in children:
        break
    codes, ends = {}, {}
    for _ in children:
        over = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT).si_pid
        ends[over] = slept_s(over)  # it can be asked for as long as nobody has taken its exit code
        codes[over] = os.waitstatus_to_exitcode(os.waitpid(over, 0)[1])
    words = os.read(reports[0], 1000).split()
    slept = [ends[int(child)] - float(begin) for child, begin in zip(words[::2], words[1::2])]
    print(*codes.values(), *(round(one_s, 2) for one_s in slept), flush=True)
"""


def ends(case: str, *, apart: list[bool], repeats: int) -> list[tuple[list[int], list[float]]]:
    """Exit codes of the two ranks that run ``case``, and how long their main threads slept after that, of each repetition."""
    env = {**os.environ, "BW_NCCL_LIB": str(simulated_nccl.build())}
    head = f"APART, REPEATS = {apart}, {repeats}\ndef case(rank):\n{textwrap.indent(textwrap.dedent(case), '    ')}\n"
    done = subprocess.run(
        [sys.executable, "-c", head + TEMPLATE],
        check=False,
        capture_output=True,
        text=True,
        timeout=100,
        env=env,
        cwd=ROOT,
    )
    rows = [line.split() for line in done.stdout.splitlines()]
    assert (done.returncode, len(rows)) == (0, len(apart) * repeats), done.stdout + done.stderr
    return [([int(code) for code in row[:2]], [float(slept_s) for slept_s in row[2:]]) for row in rows]


@pytest.mark.slow
def test_processes_that_have_closed_end_well():
    """While the interpreter goes, which takes a while here, nothing of ours may ask for its lock."""
    case = """
    global last
    last = SlowToGo()
    comm = Communicator(backend="nccl", device="cuda", timeout_s=20)
    all_gather(torch.empty(6), torch.ones(3), comm).synchronize()
    comm.exchange(b"")
    if rank == 1:
        end = peers._Ring.end
        peers._Ring.end = lambda *args: (time.sleep(0.2), end(*args))
    comm.close()
    dist.destroy_process_group()
    """
    found = ends(case, apart=[True], repeats=10)
    assert [codes for codes, _ in found] == [[0, 0]] * 10


def test_processes_that_do_not_close_end_well_and_soon():
    """Whatever the addresses of what they have left open are: weak sets went by these."""
    case = """
    global comms, handles, kept
    kept = [object() for _ in range(rank * 1000)]
    comms = [Communicator.pair(timeout_s=20) for _ in range(3)]
    comms += [[Communicator(backend="nccl", device="cuda", timeout_s=20)] for _ in range(3)]
    handles = [all_gather(torch.empty(6), torch.ones(3), comm) for several in comms for comm in several]
    comms[0][0].exchange(b"")
    """
    for codes, times in ends(case, apart=[False, True], repeats=2):
        assert codes == [0, 0] and max(times) < EXIT_S, (codes, times)
