"""Ranks that die, hang, stop or raise in the middle of a training: what the others see, and what is left behind.

Times are compared between processes: `time.monotonic` is one clock for the whole machine.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from bucketwheel.comm.communicator import Communicator
from bucketwheel.errors import CommError, CommTimeout, PeerError
from bucketwheel.optim.sharded_adamw import ShardedAdamW
from bucketwheel.testing import assert_bitwise_equal, run_ranks
from tests.support.optim_twins import dyadic, loss_of, make_params, run_local, share
from tests.support.requirements import slow_case

SEEN_WITHIN_S = 2.0


class _Act(torch.autograd.Function):
    """Does something in the middle of backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, act: Callable[[], None]) -> Tensor:
        ctx.act = act
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        ctx.act()
        return grad, None


def loss_with(params: list[Parameter], grads: list[Tensor], act: Callable[[], None]) -> Tensor:
    """A loss whose backward calls ``act`` after the last two parameters have their gradients and before the rest."""
    early = _Act.apply(loss_of(params[:-2], grads[:-2]), act)
    late = loss_of(params[-2:], grads[-2:])  # autograd runs what was made last first
    return early + late


def make_run(comm: Communicator | None, **options: Any) -> tuple[list[Parameter], ShardedAdamW]:
    params = make_params()
    return params, ShardedAdamW(params, lr=0.01, process_group=comm, bucket_cap_mb=1e-3, **options)


def train_step(params: list[Parameter], opt: ShardedAdamW, step: int, rank: int, world: int) -> None:
    loss_of(params, share(dyadic(params, step), rank, world)).backward()
    opt.clip_grad_norm_(0.5)
    opt.step()
    opt.zero_grad()


# --- death ------------------------------------------------------------------------------------------------------------


def die(directory: str) -> None:
    Path(directory, "died").write_text(str(time.monotonic()))
    os.kill(os.getpid(), signal.SIGKILL)


def train_until_a_rank_dies(rank: int, world: int, where: str, directory: str) -> tuple[int, float, str]:
    """The rank that the survivor's error names, when it came, and its message."""
    comm = Communicator(timeout_s=60)
    assert own_traces() or rank == world - 1  # that one only calls, from sockets without names
    params, opt = make_run(comm, overlap_param_sync=where == "step")
    victim = world - 1
    for step in range(3):
        train_step(params, opt, step, rank, world)
    try:
        if rank == victim:
            if where == "backward":
                loss_with(params, dyadic(params, 3), lambda: die(directory)).backward()
            loss_of(params, dyadic(params, 3)).backward()
            if where == "step":
                # The window is closed, the update begins: the others wait for this rank's parameters.
                opt._engine._assembly.rows.step = lambda *_: die(directory)  # type: ignore[method-assign,union-attr]
                opt.clip_grad_norm_(0.5)
                opt.step()
            die(directory)
        if where == "idle" and rank == 0:
            while not Path(directory, "died").exists():
                time.sleep(0.01)
            time.sleep(3.0)  # longer than any detection, without a call
            Path(directory, "called").write_text(str(time.monotonic()))
        while True:
            train_step(params, opt, step, rank, world)
    except PeerError as error:
        seen = time.monotonic()
        for call in (opt.step, opt.grad_sync, lambda: opt.clip_grad_norm_(1.0)):
            began = time.monotonic()
            with pytest.raises(PeerError):
                call()
            assert time.monotonic() - began < 1.0
        opt.zero_grad()
        values = None
        if where == "step":  # what the gathers were to bring is nowhere
            with pytest.raises(PeerError):
                [p.detach() for p in params]
        else:
            values = [p.detach().clone() for p in params]
        with pytest.raises(PeerError):
            opt.close()
        opt.close()
        after = [p.detach() for p in params]  # in memory of their own
        assert_bitwise_equal(after, after if values is None else values)
        comm.close()
        loss_of(params, dyadic(params, 0)).backward()  # no hook is left
        assert all(type(p.grad) is Tensor for p in params)
        return error.rank, seen, str(error)


def survive_a_rank_that_dies(rank: int, world: int, where: str, directory: str) -> tuple[int, float, str]:
    result = train_until_a_rank_dies(rank, world, where, directory)
    gc.collect()
    assert not own_traces()
    return result


def own_traces() -> set[str]:
    """The abstract sockets and memory files of bucketwheel that this process has open."""
    links = set()
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            links.add(os.readlink(f"/proc/self/fd/{fd}"))
    sockets = [line.split() for line in Path("/proc/net/unix").read_text().splitlines() if "@bucketwheel" in line]
    return {s[-1] for s in sockets if f"socket:[{s[6]}]" in links} | {link for link in links if "memfd:" in link}


@pytest.mark.parametrize(("where", "world"), [("backward", 3), ("step", 2), ("idle", 3)])
def test_a_killed_rank_is_named_on_every_other(where: str, world: int, tmp_path: Path) -> None:
    shm = set(os.listdir("/dev/shm"))
    results = run_ranks(
        survive_a_rank_that_dies, world, where, str(tmp_path), timeout_s=60, expect_dead=[world - 1], forked=True
    )
    assert results[-1] is None
    died = float((tmp_path / "died").read_text())
    for rank, (named, seen, message) in enumerate(results[:-1]):
        assert named == world - 1 and f"[bucketwheel rank {rank}/{world}" in message
        since = float((tmp_path / "called").read_text()) if where == "idle" and rank == 0 else died
        assert 0 <= seen - since < SEEN_WITHIN_S, f"rank {rank}: {message}"
    # Others may make files there, but not with such names; everything else has ended with its processes.
    assert not [name for name in set(os.listdir("/dev/shm")) - shm if "bucketwheel" in name or "bw" in name]


# --- the end of the interpreter
# -----------------------------------------------------------------------------------------

SCRIPT = """
import os, signal, sys, time
import torch, torch.distributed as dist
from bucketwheel.comm.communicator import Communicator
from bucketwheel.errors import CommTimeout, PeerError
from tests.faults.test_failures import make_run, train_step

rank, store, mode = int(sys.argv[1]), sys.argv[2], sys.argv[3]
dist.init_process_group("gloo", "file://" + store, world_size=2, rank=rank)
params, opt = make_run(Communicator(timeout_s=5.0 if mode == "timeout" else 60.0), overlap_param_sync=True)
train_step(params, opt, 0, rank, 2)
if rank == 1 and mode == "timeout":
    time.sleep(60)
if rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
try:
    for step in range(1, 1000):
        train_step(params, opt, step, rank, 2)
except (CommTimeout if mode == "timeout" else PeerError) as error:
    if mode == "uncaught":
        raise
    print("caught", type(error).__name__, flush=True)
"""


@pytest.mark.parametrize(
    ("mode", "code", "said"),
    [
        ("peer", 0, "caught PeerError"),
        slow_case("timeout", 0, "caught CommTimeout"),
        pytest.param("uncaught", 1, "", marks=pytest.mark.slow),
    ],
)
def test_the_interpreter_exits_after_a_failure(mode: str, code: int, said: str, tmp_path: Path) -> None:
    env = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, "-c", SCRIPT]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(tmp_path / "store"), mode],
            env=env,
            cwd=Path(__file__).resolve().parents[2],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        output, errors = ranks[0].communicate(timeout=100)
        assert ranks[0].returncode == code, errors
        assert said in output
        assert "PeerError" in errors if mode == "uncaught" else "Traceback" not in errors, errors
        assert "Fatal" not in errors
    finally:
        for process in ranks:
            process.kill()
            process.communicate()


# --- hangs, exceptions, miscounted calls
# --------------------------------------------------------------------------------


def train_until_a_rank_hangs(rank: int, world: int, where: str) -> str:
    comm = Communicator(timeout_s=1.0, name=f"hangs in {where}")
    params, opt = make_run(comm)
    train_step(params, opt, 0, rank, world)
    if rank == 1:
        time.sleep(4.0)
        with pytest.raises(CommError):  # the others have given up
            train_step(params, opt, 1, rank, world)
        return ""
    began = time.monotonic()
    loss_of(params, dyadic(params, 1)).backward()
    with pytest.raises(CommTimeout) as caught:
        opt.clip_grad_norm_(1.0) if where == "clip" else opt.step()
    assert 0.9 < time.monotonic() - began < 3.0
    return str(caught.value)


@pytest.mark.parametrize("where", ["step", "clip"])
def test_a_rank_that_stops_calling_is_a_timeout_on_the_others(where: str, rank_pool: Any) -> None:
    """S16 of the optimizer's test rows. The user's timeout is that of the communicator."""
    message = rank_pool(2).run(train_until_a_rank_hangs, where, timeout_s=40)[0]
    assert message.startswith(f"[bucketwheel rank 0/2 comm 'hangs in {where}' seq")
    assert "Not arrived: rank 1" in message


def wait_until_interrupted(rank: int, world: int) -> None:
    comm = Communicator(timeout_s=60)
    params, opt = make_run(comm)
    train_step(params, opt, 0, rank, world)
    if rank == 0:
        loss_of(params, dyadic(params, 1)).backward()
        main = threading.main_thread().ident
        assert main is not None
        threading.Timer(0.5, lambda: signal.pthread_kill(main, signal.SIGINT)).start()
        began = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            opt.step()
        assert time.monotonic() - began < 2.0
    else:
        time.sleep(5.0)
        with pytest.raises(CommError, match="KeyboardInterrupt"):
            train_step(params, opt, 1, rank, world)


def test_ctrl_c_ends_a_wait(rank_pool: Any) -> None:
    rank_pool(2).run(wait_until_interrupted, timeout_s=40)


def test_an_exception_in_a_closure_reaches_all_ranks_through_the_communicator() -> None:
    caught: dict[int, str] = {}

    def body(comm: Communicator) -> None:
        params, opt = make_run(comm)
        train_step(params, opt, 0, comm.rank, comm.size)

        def closure() -> Tensor:
            if comm.rank == 1:
                raise ArithmeticError("no loss today")
            loss = loss_of(params, dyadic(params, 1))
            loss.backward()
            return loss

        began = time.monotonic()
        try:
            opt.step(closure)
        except CommError as error:
            caught[comm.rank] = str(error)
            assert time.monotonic() - began < SEEN_WITHIN_S
        except ArithmeticError:
            if comm.rank != 1:
                raise
            comm.abort("ArithmeticError: no loss today")

    run_local(3, body)
    assert caught.keys() == {0, 2}
    assert all("aborted by rank 1: ArithmeticError: no loss today" in text for text in caught.values())


@pytest.mark.parametrize("instead", ["clip_grad_norm_", "grad_sync", "close", "full_grad"])
def test_one_step_too_many_is_found(instead: str) -> None:
    """S16 of the optimizer's test rows."""

    def body(comm: Communicator) -> list[Tensor]:
        params, opt = make_run(comm)
        train_step(params, opt, 0, comm.rank, comm.size)
        values = [p.detach().clone() for p in params]
        calls: dict[str, Callable[[], Any]] = {
            "clip_grad_norm_": lambda: opt.clip_grad_norm_(1.0),
            "grad_sync": opt.grad_sync,
            "close": opt.close,
            "full_grad": lambda: opt.full_grad(params[0]),
        }
        with pytest.raises(RuntimeError, match="by rank.*step"):
            opt.step() if comm.rank == 0 else calls[instead]()
        assert_bitwise_equal([p.detach() for p in params], values)
        return values

    results = run_local(2, body)
    assert_bitwise_equal(results[1], results[0])


# --- a backward that is interrupted, and training that goes on
# ----------------------------------------------------------


def _interrupt() -> None:
    raise KeyboardInterrupt


def train_with_interrupts(comm: Communicator | None, interrupted: Callable[[int, int], bool], **options: Any) -> Any:
    rank, world = (comm.rank, comm.size) if comm else (0, 1)
    params, opt = make_run(comm, **options)
    for step in range(6):
        grads = share(dyadic(params, step), rank, world)
        if interrupted(rank, step):
            with pytest.raises(KeyboardInterrupt):
                loss_with(params, grads, _interrupt).backward()
            opt.zero_grad()
        train_step(params, opt, step, rank, world)
    return [p.detach().clone() for p in params]


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("world", [1, 2, 4])
def test_an_interrupted_backward_can_be_repeated(world: int, overlap: bool) -> None:
    expected = train_with_interrupts(None, lambda rank, step: False)
    run = lambda comm: train_with_interrupts(comm, lambda r, step: step % 2 == 1, overlap_grad_sync=overlap)  # noqa: E731
    for params in run_local(world, run):
        assert_bitwise_equal(params, expected)


def test_one_rank_cannot_take_back_what_it_has_sent() -> None:
    """Its gradients are in the sums of the others: they are told, and after zero_grad() on all ranks all can repeat."""
    expected = train_with_interrupts(None, lambda rank, step: False)

    def body(comm: Communicator) -> Any:
        params, opt = make_run(comm)
        for step in range(6):
            if step == 2:
                grads = share(dyadic(params, step), comm.rank, comm.size)
                if comm.rank == 1:
                    with pytest.raises(KeyboardInterrupt):
                        loss_with(params, grads, _interrupt).backward()
                    opt.zero_grad()
                loss_of(params, grads).backward()
                with pytest.raises(RuntimeError, match="some ranks replaced or dropped the gradients of"):
                    opt.step()
                opt.zero_grad()
            train_step(params, opt, step, comm.rank, comm.size)
        return [p.detach().clone() for p in params]

    for params in run_local(2, body):
        assert_bitwise_equal(params, expected)
