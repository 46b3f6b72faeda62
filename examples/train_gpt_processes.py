"""How train_gpt.py measures memory: a system trains in a fresh process, and the process that started it watches.

Memory is the anonymous and shared part of the proportional set size (PSS): a page that k processes share counts 1/k in
each, so the sum over the ranks is right. Pages of program files do not count.

malloc keeps freed memory. In one process a system would take what another has freed, and look smaller than it is. By
default malloc also keeps what a system itself has freed, and its peak would tell about malloc: FSDP2, which allocates and
frees whole blocks, would look larger than DDP. So while memory is watched, tensors of 1 MiB and more have pages of their
own, which go back to the system at once. Afterwards, while steps are timed, malloc keeps all: no system pays for pages.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch.distributed as dist

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # malloc.h of glibc
EVERY_S = 0.02  # between two looks, which take 20 to 60 ms for a gigabyte
PR_SET_PDEATHSIG = 1  # linux/prctl.h


def memory_bytes(pid: int) -> int:
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return 1024 * sum(int(line.split()[1]) for line in lines if line.startswith(("Pss_Anon:", "Pss_Shmem:")))


def in_fresh_process(job: Callable[..., Any], *args: object) -> tuple[Any, int]:
    """What ``job(*args, mark)`` returns in a process of its own, and by how many bytes the memory of all ranks' processes
    grew at the peak. Collective, on one host; rank 0 watches, and the others return 0 bytes.

    The job calls ``mark()`` twice, on all ranks: before it takes memory, and when memory need no longer be watched.
    """
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=child, args=(there, job, args), daemon=True)
    process.start()
    there.close()
    try:
        here.recv()
        pids = all_pids(process.pid)
        watched = pids if os.environ.get("RANK", "0") == "0" else []
        begin = peak = sum(map(memory_bytes, watched))
        here.send(None)
        while not here.poll(EVERY_S):
            peak = max(peak, sum(map(memory_bytes, watched)))
        here.recv()
        here.send(None)
        result = here.recv()
    except (EOFError, OSError):
        process.join()
        sys.exit(f"the process that trained {args[0]} on rank {os.environ.get('RANK', '0')} ended: {process.exitcode}")
    process.join()
    return result, peak - begin


def all_pids(pid: int) -> list[int]:
    """The process of each rank."""
    if not dist.is_initialized():
        return [pid]
    pids: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(pids, pid)
    return pids


def child(there: Connection, job: Callable[..., Any], args: tuple) -> None:
    libc = ctypes.CDLL(None)
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # if torchrun ends the rank, this process ends too
    thresholds = iter([(1 << 20, 128 << 10), (32 << 20, 2**31 - 1)])  # glibc's largest

    def mark() -> None:
        there.send(None)
        there.recv()
        for option, size_bytes in zip((M_MMAP_THRESHOLD, M_TRIM_THRESHOLD), next(thresholds), strict=True):
            libc.mallopt(option, size_bytes)
        if dist.is_initialized():
            dist.barrier()  # no rank unmaps shared memory while another rank is still watched

    join_ranks(str(args[0]))
    there.send(job(*args, mark))
    if dist.is_initialized():
        dist.destroy_process_group()


def join_ranks(name: str) -> None:
    """Make a process group of the processes that train this system, by the store of torchrun."""
    if "RANK" in os.environ:
        rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), world, is_master=False)
        dist.init_process_group("gloo", store=dist.PrefixStore(name, store), rank=rank, world_size=world)
