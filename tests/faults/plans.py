"""Random faults: a plan of what happens to which rank when, and the life of a rank under it.

The ranks run the same random operations, train, and have slabs come and go. At a random point one of them is killed,
stopped, late, or raises. Every rank then says which error it got and when, how long it took to close, what it still held
of the system at the end, and whether ranks that were left could go on in a new communicator. `expect` holds that against
the plan.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from bucketwheel.comm.communicator import Communicator
from bucketwheel.errors import CommError, CommTimeout, Error, PeerError
from bucketwheel.kernels.ops import all_gather, reduce_scatter
from bucketwheel.optim.sharded_adamw import ShardedAdamW
from bucketwheel.shard.module import shard
from tests.support.comm_cases import check_usable
from tests.support.cores import BUSY
from tests.support.held import held, still_held
from tests.support.optim_twins import dyadic, loss_of, make_params, share
from tests.support.shard_models import Block, Gpt, lm_loss

TIMEOUT_S = 2.0  # of operations
JOIN_S = 30.0  # of process groups: processes start meanwhile
CALLS = 24
# From when a rank waits for one that is gone until it knows; a busy machine takes part of it.
SOON_S = 2.0 * BUSY
# From when ranks meet until one that has not come is named: rank 0 is awaited longest.
NAMED_S = TIMEOUT_S + 4.0
# Until a rank has closed, whatever state the others are in.
CLOSED_S = TIMEOUT_S + SOON_S
CHURNED_SLABS = 300  # more than the socket of a rank that does not read takes messages
ACTIONS = ("kill", "stop", "late", "too late", "raise", "abort", "close", "exit")
# By a timer, wherever the rank is then: while the communicator is made, in a call, between two.
ACTIONS += ("kill at a time", "stop at a time", "raise at a time")


@dataclass(frozen=True)
class Plan:
    seed: int
    backend: str
    world: int
    victim: int
    action: str
    at: int  # before which call
    delay_s: float  # "... at a time", "late"
    in_flight: bool  # its last operation is not waited for before it acts
    trains: bool  # beside the operations
    churns: bool  # where the victim acts the others make many slabs and give them back
    folder: str

    @classmethod
    def random(cls, seed: int, folder: str) -> Plan:
        chance = random.Random(seed)
        world = chance.randint(2, 4)
        return cls(
            seed=seed,
            backend=chance.choice(["shm", "shm", "c10d"]),
            world=world,
            victim=chance.randrange(world),
            action=chance.choice(ACTIONS),
            at=chance.randrange(1, CALLS),
            delay_s=chance.uniform(0.0, 0.3),
            in_flight=chance.random() < 0.5,
            trains=chance.random() < 0.5,
            churns=chance.random() < 0.5,
            folder=folder,
        )

    @property
    def dies(self) -> bool:
        return self.does in ("kill", "exit")

    @property
    def is_timed(self) -> bool:
        return self.action.endswith("at a time")

    @property
    def does(self) -> str:
        return self.action.removesuffix(" at a time")

    @property
    def goes_on(self) -> bool:
        """Nobody gets an error."""
        return self.action == "late"


class Oops(Exception):
    """What a rank raises that is none of ours."""


@dataclass
class Story:
    """What a rank has to tell."""

    kind: str = ""  # of the error
    text: str = ""
    rank: int | None = None
    at_s: float = 0.0  # when it came
    acted_s: float = 0.0
    churned_s: float = 0.0  # when it was through with that
    closed_s: float = 0.0  # how long that took
    left: str = ""  # what it still held
    went_on: bool = False


def join(plan: Plan, name: str, rank: int, world: int) -> None:
    store = dist.FileStore(f"{plan.folder}/{name}", world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=JOIN_S))


def warm_up(rank: int, world: int) -> None:
    """What the first of everything leaves for good: thread pools, and what torch makes once."""
    for backend in ("shm", "c10d"):
        with Communicator(backend=backend, timeout_s=JOIN_S) as comm:
            check_usable(comm)
            opt = ShardedAdamW(make_params(), lr=0.01, process_group=comm)
            opt.close()


def live(rank: int, world: int, plan: Plan) -> Story:
    story = Story()
    Path(plan.folder, f"pid{rank}").write_text(str(os.getpid()))
    join(plan, "first", rank, world)
    warm_up(rank, world)
    before = held()
    try:
        _run(rank, plan, story)
    except (Error, Oops) as error:
        story.at_s = story.at_s or time.monotonic()  # the latter where there was no communicator
        story.kind, story.text = type(error).__name__, str(error)
        story.rank = getattr(error, "rank", None)
        error.__traceback__ = None  # it holds what the frames held
    _wake_the_stopped(rank, plan)
    # torch keeps what a backward that failed had ready to run, and so its graph, until the next backward of the thread.
    torch.ones(1, requires_grad=True).sum().backward()
    story.left = still_held(before)
    dist.destroy_process_group()
    ranks = [other for other in range(world) if not (plan.dies and other == plan.victim)]
    join(plan, "second", ranks.index(rank), len(ranks))
    with Communicator(backend=plan.backend, timeout_s=JOIN_S) as comm:
        check_usable(comm)
        story.went_on = True
    dist.destroy_process_group()
    return story


def _run(rank: int, plan: Plan, story: Story) -> None:
    chance = random.Random(plan.seed + 1)  # the same on all ranks
    act = _action_of(plan, story) if rank == plan.victim else None
    was_hit = threading.Event()
    signal.signal(signal.SIGALRM, functools.partial(_raise_oops, was_hit))
    if act and plan.is_timed:
        threading.Timer(plan.delay_s, act).start()
    with _closing(plan, story) as (comm, train):
        for number in range(CALLS):
            if act and number == plan.at and not plan.is_timed:
                if plan.in_flight:
                    call(comm, random.Random(number), is_waited=False)
                act(comm)
                if plan.in_flight:
                    comm.exchange(b"")
            elif number == plan.at:
                if plan.churns:
                    _churn(comm, story, CHURNED_SLABS)
                if plan.in_flight:
                    call(comm, random.Random(number), is_waited=True)
                    comm.exchange(b"")
            if train is not None and number % 3 == 0:
                train(number)
            else:
                call(comm, chance, is_waited=True)
        if plan.is_timed:  # the others are still there when it comes
            while not was_hit.is_set():
                comm.exchange(b"")
                if plan.churns:
                    _churn(comm, story, CHURNED_SLABS // 10)
                time.sleep(0.01)
            raise Oops("by a signal")  # which came where Python only prints what is raised


def _raise_oops(was_hit: threading.Event, *_: object) -> None:
    was_hit.set()
    raise Oops("by a signal")


@contextlib.contextmanager
def _closing(plan: Plan, story: Story) -> Iterator[tuple[Communicator, Callable[[int], None] | None]]:
    comm = Communicator(backend=plan.backend, timeout_s=TIMEOUT_S, name="faulty")
    try:
        with comm:
            try:
                yield from _training(plan, comm)
            finally:
                story.at_s = time.monotonic()
    finally:
        story.closed_s = time.monotonic() - story.at_s


def _training(plan: Plan, comm: Communicator) -> Iterator[tuple[Communicator, Callable[[int], None] | None]]:
    if not plan.trains:
        yield comm, None
        return
    if plan.seed % 2:  # with sharded parameters
        model = shard(Gpt(), (Block,), group=comm, prefetch=plan.seed // 2 % 3)
        opt = ShardedAdamW(model.parameters(), lr=0.01)
    else:
        params = make_params()
        opt = ShardedAdamW(params, lr=0.01, process_group=comm, bucket_cap_mb=1e-3)

    def train(step: int) -> None:
        if plan.seed % 2:
            lm_loss(model, step).backward()
        else:
            loss_of(params, share(dyadic(params, step), comm.rank, comm.size)).backward()
        opt.clip_grad_norm_(0.5)
        opt.step()
        opt.zero_grad()

    yield comm, train
    opt.close()  # where an exception ends the block, the communicator aborts instead


def _churn(comm: Communicator, story: Story, slabs: int) -> None:
    leases = [comm.pool.acquire("", 9 << 20) for _ in range(slabs)]
    for lease in leases:
        lease.release()
    comm.pool.trim()
    story.churned_s = time.monotonic()


def call(comm: Communicator, chance: random.Random, *, is_waited: bool) -> None:
    what = chance.choice(["all_gather", "reduce_scatter", "broadcast", "exchange", "pooled"])
    numel = chance.choice([0, 1, 1000, 300_000])
    if what == "exchange":
        comm.exchange(bytes(numel % 5000))
        return
    if what == "all_gather":
        handle = all_gather(torch.empty(comm.size * numel), torch.ones(numel), comm)
    elif what == "reduce_scatter":
        handle = reduce_scatter(torch.empty(numel), torch.ones(comm.size * numel), comm)
    elif what == "broadcast":
        handle = comm.broadcast(torch.ones(numel), chance.randrange(comm.size))
    else:
        lease = comm.pool.acquire("", 4 * comm.size * 1000)
        full = lease.tensor(torch.float32, (comm.size * 1000,))
        handle = all_gather(full, full[comm.rank * 1000 : (comm.rank + 1) * 1000], comm)
        lease.release(handle)
    if is_waited:
        handle.wait()


def _action_of(plan: Plan, story: Story) -> Callable[..., None]:
    def act(comm: Communicator | None = None) -> None:
        story.acted_s = time.monotonic()
        Path(plan.folder, "acted").write_text(str(story.acted_s))
        if plan.does == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif plan.action == "exit":
            ctypes.CDLL(None)._exit(0)  # as a rank that ends without a word
        elif plan.does == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif plan.action == "late":
            time.sleep(plan.delay_s)
        elif plan.action == "too late":
            time.sleep(TIMEOUT_S + 1.5)
        elif plan.action == "raise":
            raise Oops("in the loop")
        elif plan.action == "raise at a time":
            os.kill(os.getpid(), signal.SIGALRM)  # as Ctrl-C: its handler raises in the main thread
        elif comm is not None and plan.action == "abort":
            comm.abort("no more")
        elif comm is not None and plan.action == "close":
            comm.close(0.5)

    return act


def _wake_the_stopped(rank: int, plan: Plan) -> None:
    if plan.does == "stop" and rank != plan.victim:
        os.kill(int(Path(plan.folder, f"pid{plan.victim}").read_text()), signal.SIGCONT)


# ---- what must have happened


def expect(plan: Plan, stories: list[Story | None]) -> None:
    acted = Path(plan.folder, "acted")
    acted_s = float(acted.read_text()) if acted.exists() else 0.0
    for rank, story in enumerate(stories):
        where = f"{plan}\nrank {rank}: {story}"
        if plan.dies and rank == plan.victim:
            assert story is None, where
            continue
        assert story is not None, where
        assert not story.left, where
        assert story.went_on, where
        if plan.does != "stop" or rank != plan.victim:  # that one may have been stopped in it
            assert story.closed_s < CLOSED_S, where
        if plan.goes_on:
            assert story.kind == "", where
        elif rank == plan.victim:
            assert story.kind in _OWN_ERRORS[plan.action], where
        else:
            _expect_survivor(plan, story, max(acted_s, story.churned_s), where)


# What the victim itself may get: it finds that the others have given up, or that it has left.
_OWN_ERRORS = {
    "raise": {"Oops"},
    "abort": {"CommError"},
    "close": {"ClosedError"},
    "stop": {"CommTimeout", "PeerError"},
    "stop at a time": {"CommTimeout", "PeerError", "CommError"},  # the last while ranks met
    "raise at a time": {"Oops"},
    "too late": {"CommTimeout", "PeerError"},
}


def _expect_survivor(plan: Plan, story: Story, acted_s: float, where: str) -> None:
    took_s = story.at_s - acted_s
    if plan.is_timed and "was not made" in story.text:
        assert story.kind in (CommTimeout.__name__, CommError.__name__), where  # it happened while ranks met
        assert took_s < NAMED_S + SOON_S, where
    elif plan.does in ("stop", "too late"):
        # Its own limit, and for ranks that share no memory the answers of the others.
        assert story.kind == CommTimeout.__name__, where
        assert f"rank {plan.victim}" in story.text, where
        assert took_s < TIMEOUT_S + 3.0 + SOON_S, where
    else:
        assert (story.kind, story.rank) == (PeerError.__name__, plan.victim), where
        assert took_s < SOON_S + 1.0, where
        words = {"raise": "Oops", "abort": "no more", "close": "closed"}.get(plan.does, "died")
        assert words in story.text, where
