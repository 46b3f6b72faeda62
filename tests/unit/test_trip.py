"""One gradient's trip: the Python functions that a steady step enters lie in the files of tests/trip.txt, and in all of them."""

from __future__ import annotations

import contextlib
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import bucketwheel as bw
from bucketwheel.comm.communicator import Communicator
from tests.support.simulated_nccl import simulated

pytestmark = pytest.mark.dist

PACKAGE = Path(bw.__file__).resolve().parent
# The last one where a rank is ahead of the others, and takes more memory.
ON_CUDA = {f"python/bucketwheel/{stem}" for stem in ("device", "grads/graph_capture", "pool/pool")}
TRIP = Path(__file__).resolve().parents[1] / "trip.txt"


def stems() -> list[str]:
    return [line for line in TRIP.read_text().split("\n") if line and not line.startswith("#")]


def entered(rank: int, world: int, backend: str) -> set[str]:
    """The stems of this package whose functions a steady step enters, in any thread."""
    found: set[str] = set()

    def note(frame: Any, event: str, _: object) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(PACKAGE):
            found.add(f"python/bucketwheel/{path.relative_to(PACKAGE).with_suffix('')}")

    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4)))
    is_on_cuda = backend == "nccl"
    with (
        simulated() if is_on_cuda else contextlib.nullcontext(),
        Communicator(backend=backend, device="cuda" if is_on_cuda else None, name="trip", timeout_s=60) as comm,
    ):
        opt = bw.ShardedAdamW(model.parameters(), process_group=comm, bucket_cap_mb=0.02)
        threading.setprofile(note)  # of threads that begin from now on
        for step in range(6):
            if step == 4:
                sys.setprofile(note)
            model(torch.ones(8, 64)).square().mean().backward()
            opt.clip_grad_norm_(1.0)
            opt.step()
            opt.zero_grad()
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]
        buckets = len(opt._engine._assembly.buckets)  # type: ignore[union-attr]
        opt.close()
    assert buckets > 3
    return found


@pytest.mark.parametrize("backend", ["shm", "nccl"])
def test_a_steady_step_enters_the_listed_files(backend: str, rank_pool: Any) -> None:
    """On simulated CUDA over the fake NCCL too, with those of the device and of captures."""
    listed = {stem for stem in stems() if stem.startswith("python/")}
    for found in rank_pool(2).run(entered, backend):
        assert listed <= found <= listed | (ON_CUDA if backend == "nccl" else set())
    assert len(listed) <= 10


def test_the_listed_files_exist() -> None:
    root = TRIP.parents[1]
    missing = [stem for stem in stems() if not list(root.glob(f"{stem}.*"))]
    assert not missing
    assert len(stems()) == len(set(stems()))
