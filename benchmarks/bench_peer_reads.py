"""Whether tensors of torch's own memory would travel faster if peers read them where they are (process_vm_readv).

    python benchmarks/bench_peer_reads.py [--quick] [--json PATH]

Two ranks, float32, sizes of the full buffer. Ours: all-gather and reduce-scatter of `shm`, through staging buffers, and, as
gradients are reduced, packing into the pool and the reduce-scatter from there; whole operations. Peer: the reads alone,
without any order between the ranks, straight into the output, or into a block of the cache that is added from there:
less than an operation would cost. A ratio below 1 means that reading would win.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from typing import Any

import torch
from harness import Rank, Results, Timing, measure, parse_args, run_ranks, slowest

from bucketwheel.comm.communicator import Communicator
from bucketwheel.kernels.ops import all_gather, reduce_scatter
from bucketwheel.native import core

MIB = 1 << 20
SIZES = {"1 MiB": (MIB, 40), "16 MiB": (16 * MIB, 4), "64 MiB": (64 * MIB, 2)}
BLOCK_BYTES = 256 << 10  # of what is read and then added: it stays in a core's cache
_PR_SET_PTRACER, _PTRACER_ANY = 0x59616D61, ctypes.c_ulong(-1)  # <linux/prctl.h>; without it only root may read


class _Span(ctypes.Structure):
    """struct iovec of <sys/uio.h>."""

    _fields_ = (("begin", ctypes.c_void_p), ("size_bytes", ctypes.c_size_t))


_libc = ctypes.CDLL(None, use_errno=True)
_libc.process_vm_readv.restype = ctypes.c_ssize_t


def read(pid: int, target: int, source: int, size_bytes: int) -> None:
    ours, theirs = _Span(target, size_bytes), _Span(source, size_bytes)
    got = _libc.process_vm_readv(pid, ctypes.byref(ours), 1, ctypes.byref(theirs), 1, 0)
    if got != size_bytes:
        raise OSError(
            ctypes.get_errno(), f"process_vm_readv: {got} of {size_bytes} bytes, {os.strerror(ctypes.get_errno())}"
        )


def cases_of(comm: Communicator, size_bytes: int) -> dict[str, Callable[[], object]]:
    numel, half = size_bytes // 4, size_bytes // 8
    full, shard = torch.empty(numel), torch.full((half,), float(comm.rank + 1))
    source, out = torch.full((numel,), float(comm.rank + 1)), torch.empty(half)
    own, other = comm.rank, 1 - comm.rank
    block = torch.empty(BLOCK_BYTES // 4)
    mine = f"{os.getpid()} {shard.data_ptr()} {source.data_ptr()}".encode()
    pid, their_shard, their_source = map(int, comm.exchange(mine)[other].split())

    def gather_by_reads() -> None:
        full[own * half : (own + 1) * half].copy_(shard)
        read(pid, full.data_ptr() + other * half * 4, their_shard, half * 4)

    def reduce_by_reads() -> None:
        first = own * half
        for begin in range(0, half, block.numel()):
            some = min(block.numel(), half - begin)
            read(pid, block.data_ptr(), their_source + (first + begin) * 4, some * 4)
            torch.add(source[first + begin : first + begin + some], block[:some], out=out[begin : begin + some])

    packed = comm.pool.acquire("packed", size_bytes).tensor(torch.float32, (numel,))

    def pack_and_reduce() -> None:
        core.copy_all([packed], [source])
        reduce_scatter(out, packed, comm).wait()

    cases = {
        "all-gather": lambda: all_gather(full, shard, comm).wait(),
        "reduce-scatter": lambda: reduce_scatter(out, source, comm).wait(),
        "pack + reduce-scatter": pack_and_reduce,
        "all-gather by reads": gather_by_reads,
        "reduce-scatter by reads": reduce_by_reads,
    }
    gathered = torch.tensor([1.0, 2.0]).repeat_interleave(half)
    for case, call in cases.items():
        full.zero_(), out.zero_(), packed.zero_()
        comm.exchange(b"")
        call()
        if not (torch.equal(full, gathered) if "gather" in case else bool((out == 3.0).all())):
            raise RuntimeError(f"{case}: the result is wrong")
    comm.exchange(b"")  # nobody reads here any more
    return cases


def measure_rank(rank: Rank, sizes: list[str], repeats: int) -> dict[str, dict[str, Timing]]:
    _libc.prctl(_PR_SET_PTRACER, _PTRACER_ANY, 0, 0, 0)
    out = {}
    with Communicator(backend="shm") as comm:
        comm.exchange(b"")  # all may be read
        for name in sizes:
            size_bytes, inner = SIZES[name]
            cases = cases_of(comm, size_bytes)
            out[name] = measure(cases, repeats=repeats, inner=inner, before=lambda _: comm.exchange(b""))
            comm.exchange(b"")  # nobody reads any more
            del cases
            comm.pool.trim()
    return out


def main() -> None:
    args: Any = parse_args(__doc__)
    results = Results("peer_reads", args.json)
    sizes = ["16 MiB"] if args.quick else list(SIZES)
    by_rank = run_ranks(2, measure_rank, sizes, 7 if args.quick else 21).values
    for name in sizes:
        timings = {case: slowest([each[name][case] for each in by_rank]) for case in by_rank[0][name]}
        for case in ("all-gather", "reduce-scatter", "pack + reduce-scatter"):
            by_reads = timings[f"{case.removeprefix('pack + ')} by reads"]
            results.add(f"{name} {case}", timings[case], peer="process_vm_readv", peer_timing=by_reads)
    results.print_table()


if __name__ == "__main__":
    main()
