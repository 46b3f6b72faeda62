"""200 saves into one folder, each killed at a random moment: the newest complete checkpoint loads every time."""

from __future__ import annotations

import collections
import multiprocessing
import os
import random
import signal
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from bucketwheel.checkpoint import Reader, Writer
from bucketwheel.checkpoint.format import METADATA

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")
FAST, ALL = 10, 200
TIMEOUT_S = 60


def state_of(number: int) -> dict[str, Any]:
    return {"step": torch.tensor(number), "x": torch.full((1 << 18,), number), "y": torch.full((999,), number)}


def save_until_killed(folder: str, number: int, done: Connection) -> None:
    while True:
        dcp.save(state_of(number), storage_writer=Writer(folder))
        done.send(number)
        number += 1


def fork_savers(folder: str, orders: Connection, done: Connection) -> None:
    """In a process that has imported everything: so a saver is there at once. Ends when the other side does."""
    dcp.save(state_of(0), storage_writer=Writer(folder))
    done.send(0)
    while True:
        try:
            number = orders.recv()
        except EOFError:
            return
        pid = os.fork()
        if pid == 0:
            try:
                save_until_killed(folder, number, done)
            finally:
                os._exit(1)
        orders.send(pid)
        orders.send(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))


def received(connection: Connection) -> Any:
    assert connection.poll(TIMEOUT_S), f"nothing came in {TIMEOUT_S} s"
    return connection.recv()


def phase_of(folder: Path) -> str:
    """What a killed save has left behind."""
    names = {path.name for path in folder.iterdir()}
    if ".saving" in names:
        return "data"
    if f"{METADATA}.tmp" in names:
        return "metadata"
    data = [name for name in names if name.startswith("data-")]
    return "between" if len(data) > 1 or any(name.startswith(".discarded") for name in names) else "none"


@pytest.mark.timeout_s(600)
@pytest.mark.parametrize("kills", [FAST, pytest.param(ALL, marks=pytest.mark.slow)])
def test_the_newest_complete_checkpoint_loads(tmp_path: Path, kills: int) -> None:
    context = multiprocessing.get_context("spawn")
    orders, theirs = context.Pipe()
    done, their_done = context.Pipe(duplex=False)
    savers = context.Process(target=fork_savers, args=(str(tmp_path), theirs, their_done), daemon=True)
    savers.start()
    theirs.close()
    chance = random.Random(kills)
    phases: collections.Counter[str] = collections.Counter()
    try:
        complete = received(done)
        last_s = 0.05
        for _ in range(kills):
            begin = time.monotonic()
            orders.send(complete + 1)
            pid = received(orders)
            if done.poll(chance.uniform(0.0, 2.0) * last_s):  # killed in its first save, or after it in a later one
                last_s = min(max(time.monotonic() - begin, 0.01), 0.5)
                time.sleep(chance.uniform(0.0, 1.0) * last_s)
            os.kill(pid, signal.SIGKILL)
            assert received(orders) == -signal.SIGKILL
            while done.poll():
                complete = done.recv()
            phases[phase_of(tmp_path)] += 1
            found = {name: torch.zeros_like(value) for name, value in state_of(0).items()}
            dcp.load(found, storage_reader=Reader(tmp_path))
            newest = int(found["step"])
            assert newest in (complete, complete + 1)  # the one after may be complete, and not told
            for name, value in state_of(newest).items():
                assert torch.equal(found[name], value), name
            complete = newest
    finally:
        orders.close()
        savers.join(TIMEOUT_S)
        savers.kill()
    assert phases["data"] > kills // 10 and (kills == FAST or len(phases) >= 3)  # saves were interrupted
    dcp.save(state_of(complete), storage_writer=Writer(tmp_path))  # what they left behind goes
    names = sorted(path.name for path in tmp_path.iterdir())
    assert len(names) == 2 and names[0] == METADATA and names[1].startswith("data-")
