"""What tests/faults/test_lifecycle.py starts: whole processes that train and end, as users' scripts do.

    python -m torch.distributed.run ... tests/support/lifecycle.py train BACKEND FOLDER     # resumes; see `train`
    python tests/support/lifecycle.py exits BACKEND NAME ...                                # of `EXITS`, over any backend
    python tests/support/lifecycle.py workers BACKEND CONTEXT ...                           # two ranks that load data
    python tests/support/lifecycle.py starts BACKEND METHOD ...                             # two ranks by torch.multiprocessing

Answers are lines of JSON.
"""

from __future__ import annotations

import importlib
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from bucketwheel import ShardedAdamW
from bucketwheel.comm import patience
from bucketwheel.comm.communicator import Communicator
from bucketwheel.errors import PeerError
from bucketwheel.kernels.ops import all_gather, reduce_scatter
from bucketwheel.native import core
from tests.support.cores import BUSY

STEPS = 8
KILLED_AT = 5  # the step in which the last rank dies, once
WORLD = 2
EXIT_S = 60.0  # a rank may take, then it is killed: some seconds alone, eight times as long on a machine that is full
kept: list[Any] = []  # until the interpreter ends


def make_model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(40, 30), nn.ReLU(), nn.Linear(30, 3))


class Rows(Dataset[Tensor]):
    """Of one rank."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def __len__(self) -> int:
        return STEPS * 4

    def __getitem__(self, index: int) -> Tensor:
        return torch.randn(40, generator=torch.Generator().manual_seed(100 * self.rank + index))


def step(model: nn.Module, opt: Any, rows: Tensor) -> float:
    loss = model(rows).square().mean()
    opt.zero_grad()
    loss.backward()
    opt.clip_grad_norm_(0.5)
    opt.step()
    return loss.item()


def parameters(model: nn.Module) -> list[list[float]]:
    return [p.detach().flatten().tolist() for p in model.parameters()]


# -------------------------------------------------------------------------------------------------------------- elastic


def train(rank: int, world: int, backend: str, folder: Path, dies: bool) -> list[list[float]]:
    """From the last step that all ranks have saved. With ``dies`` the last rank is killed, unless it has been before."""
    model = make_model()
    data = list(DataLoader(Rows(rank), batch_size=4))
    with Communicator(backend=backend, timeout_s=30) as comm:
        opt = ShardedAdamW(model.parameters(), lr=1e-2, process_group=comm)
        saved = [int(path.suffix[1:]) for path in folder.glob(f"{rank}.*")]
        begin = min(int(one) for one in comm.exchange(str(max(saved, default=0)).encode()))
        if begin:
            state = torch.load(folder / f"{rank}.{begin}")
            model.load_state_dict(state["model"])
            opt.load_state_dict(state["opt"])
        for number in range(begin, STEPS):
            if dies and rank == world - 1 and number == KILLED_AT and not saved:
                os.kill(os.getpid(), signal.SIGKILL)
            step(model, opt, data[number])
            torch.save({"model": model.state_dict(), "opt": opt.state_dict()}, folder / f"saving {rank}")
            os.replace(folder / f"saving {rank}", folder / f"{rank}.{number + 1}")
        opt.close()
    return parameters(model)


# ----------------------------------------------------------------------------------------------------------------- ends


def big(comm: Communicator) -> tuple[Tensor, Tensor]:
    return torch.ones(comm.size << 20), torch.ones(1 << 20)


def in_flight(comm: Communicator) -> None:
    full, shard = big(comm)
    kept.extend([all_gather(full, shard, comm), reduce_scatter(shard, full, comm)])


def never_met(comm: Communicator) -> None:
    """Its peer does not come: the peer ends first, or at the same time."""
    full, shard = big(comm)
    if comm.rank == 0:
        kept.append(all_gather(full, shard, comm))


def exits_inside(comm: Communicator) -> None:
    in_flight(comm)
    sys.exit(0)


def raises(comm: Communicator) -> None:
    full, shard = big(comm)
    if comm.rank == 1:
        raise RuntimeError("the data ran out")
    try:
        all_gather(full, shard, comm).wait()
    except PeerError as error:
        assert error.rank == 1, error
        return
    raise AssertionError("it was not told")


def peer_dies(comm: Communicator) -> None:
    """With parameters in flight."""
    model = make_model()
    opt = ShardedAdamW(model.parameters(), process_group=comm, overlap_param_sync=True)
    rows = torch.ones(2, 40)
    step(model, opt, rows)
    if comm.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    kept.extend([model, opt, comm])
    try:
        while True:
            step(model, opt, rows)
    except PeerError as error:
        assert error.rank == 1, error


def params_in_flight(comm: Communicator) -> None:
    model = make_model()
    opt = ShardedAdamW(model.parameters(), process_group=comm, overlap_param_sync=True)
    model(torch.ones(2, 40)).sum().backward()
    opt.step()
    kept.extend([model, opt, comm])


def group_goes_first(comm: Communicator) -> None:
    """Nothing of ours needs the process group once it is made."""
    model = make_model()
    opt = ShardedAdamW(model.parameters(), process_group=comm)
    rows = torch.ones(2, 40)
    step(model, opt, rows)
    dist.destroy_process_group()
    step(model, opt, rows)
    opt.close()
    comm.close()


def group_goes_last(comm: Communicator) -> None:
    model = make_model()
    with ShardedAdamW(model.parameters(), process_group=comm) as opt:
        step(model, opt, torch.ones(2, 40))
    comm.close()
    dist.destroy_process_group()


EXITS: dict[str, Callable[[Communicator], None]] = {
    function.__name__: function
    for function in (
        in_flight,
        never_met,
        exits_inside,
        raises,
        peer_dies,
        params_in_flight,
        group_goes_first,
        group_goes_last,
    )
}


def make_comm(backend: str) -> Communicator:
    if backend != "nccl":
        return Communicator(backend=backend, timeout_s=60)
    importlib.import_module("tests.support.simulated_nccl").install()
    core.set_posing(True)
    return Communicator(backend="nccl", device="cuda", timeout_s=60)


def exits(backend: str, names: list[str]) -> None:
    """For each the ranks' exit codes, and what they wrote to stderr."""
    if backend == "nccl":  # compiled here, so that `EXIT_S` counts the ranks' time only
        for support in ("simulated_nccl", "simulated_cuda", "counted_cuda"):
            importlib.import_module(f"tests.support.{support}").build()
    for name in names:

        def end(rank: int, folder: str, function: Callable[[Communicator], None] = EXITS[name]) -> None:
            os.dup2(os.open(f"{folder}/{rank}", os.O_CREAT | os.O_WRONLY), 2)
            join(rank, folder)
            function(make_comm(backend))

        folder = tempfile.mkdtemp()
        codes = fork_ranks(end, folder, EXIT_S)
        if codes is None:
            return
        texts = [Path(f"{folder}/{rank}").read_text() for rank in range(WORLD)]
        shutil.rmtree(folder)
        print(json.dumps([name, codes, texts]), flush=True)


def fork_ranks(run: Callable[[int, str], None], folder: str, limit_s: float) -> list[int] | None:
    """From here, where no thread of ours runs. Their exit codes, where killed after the limit; nothing in a rank, which is
    to return, so that it ends as interpreters do."""
    importlib.import_module("torch._dynamo")  # once: any optimizer of torch's does, which takes seconds
    children = {}
    for rank in range(WORLD):
        pid = os.fork()
        if pid == 0:
            run(rank, folder)
            return None
        children[pid] = rank
    codes = [0] * WORLD
    deadline = time.monotonic() + limit_s
    while children:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid:
            codes[children.pop(pid)] = os.waitstatus_to_exitcode(status)
        elif time.monotonic() > deadline:
            for late in children:
                os.kill(late, signal.SIGKILL)
            deadline += limit_s
        else:
            time.sleep(0.01)
    return codes


def join(rank: int, folder: str) -> None:
    store = dist.FileStore(f"{folder}/store", WORLD)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD)


# --------------------------------------------------------------------------------------------------------------- loading


def load(rank: int, backend: str, context: str | None) -> list[Any]:
    """Losses and parameters of a training whose rows come from two other processes, or (no context) from this one."""
    options: dict[str, Any] = {"num_workers": 2, "multiprocessing_context": context} if context else {}
    model = make_model()
    losses = []
    with (
        Communicator(backend=backend, timeout_s=60) as comm,
        ShardedAdamW(model.parameters(), process_group=comm) as opt,
    ):
        for rows in DataLoader(Rows(rank), batch_size=4, **options):
            losses.append(step(model, opt, rows))
    return [losses, parameters(model)]


def workers(backend: str, contexts: list[str]) -> None:
    """The answer of each rank in turn: what `load` returns for no context and for each of ``contexts``."""

    def answer(rank: int, folder: str) -> None:
        join(rank, folder)
        answers = [load(rank, backend, context) for context in [None, *contexts]]
        Path(f"{folder}/answer {rank}").write_text(json.dumps(answers))

    folder = tempfile.mkdtemp()
    codes = fork_ranks(answer, folder, 5 * EXIT_S)
    if codes is not None:
        assert codes == [0] * WORLD, codes
        print_answers(folder)


def print_answers(folder: str) -> None:
    for rank in range(WORLD):
        print(Path(f"{folder}/answer {rank}").read_text(), flush=True)
    shutil.rmtree(folder)


def started(rank: int, folder: str, backend: str) -> None:
    join(rank, folder)
    Path(f"{folder}/answer {rank}").write_text(json.dumps(load(rank, backend, None)))


def starts(backend: str, methods: list[str]) -> None:
    """By each method, in this process, which has the library but has not used it. The answer of each rank in turn."""
    for method in methods:
        folder = tempfile.mkdtemp()
        torch.multiprocessing.start_processes(started, args=(folder, backend), nprocs=WORLD, start_method=method)
        print_answers(folder)


def main(what: str, backend: str, *rest: str) -> None:
    patience.PATIENCE = replace(patience.PATIENCE, exit_s=patience.PATIENCE.exit_s * BUSY)
    if what == "train":
        dist.init_process_group("gloo")
        answer = train(dist.get_rank(), dist.get_world_size(), backend, Path(rest[0]), dies=True)
        (Path(rest[0]) / f"answer {dist.get_rank()}").write_text(json.dumps(answer))
        dist.destroy_process_group()
    elif what == "exits":
        exits(backend, list(rest))
    elif what == "workers":
        workers(backend, list(rest))
    elif what == "starts":
        starts(backend, list(rest))


if __name__ == "__main__":
    main(*sys.argv[1:])
