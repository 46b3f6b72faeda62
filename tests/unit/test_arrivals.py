"""Arrivals: gradients go into their buckets without Python, and what is rare through it. Their values in all else:
conformance/optimizer.

[Note: hooks], csrc/bindings/window_py.h. On CUDA a bucket holds references until it is full: [Note: packed in its stream],
csrc/window/window.h.
"""

from __future__ import annotations

import contextlib
import gc
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import Parameter

import bucketwheel as bw
from bucketwheel.comm.communicator import Communicator
from bucketwheel.errors import CaptureError, CommTimeout, PeerError
from bucketwheel.native import core
from bucketwheel.optim.sharded_adamw import ShardedAdamW
from tests.support.bits import assert_bitwise_equal
from tests.support.nodes import Node, Stop, stop
from tests.support.optim_twins import dyadic, loss_of, make_params, run_local
from tests.support.simulated_cuda import Calls, Graph, load, posing

PACKAGE = str(Path(bw.__file__).parent)
FIRST, ODD = 0, 1  # the parameter whose gradient opens the window, and the one with the unusual gradient
DEVICES = pytest.mark.parametrize("device", [None, "cuda"])


@contextlib.contextmanager
def entered() -> Iterator[list[str]]:
    """The functions of bucketwheel's Python that this thread enters inside."""
    found: list[str] = []

    def note(frame: Any, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            found.append(frame.f_code.co_qualname)

    sys.setprofile(note)
    try:
        yield found
    finally:
        sys.setprofile(None)


class Rank:
    """An optimizer, with all parameters in one bucket."""

    def __init__(self, comm: Communicator, params: list[Parameter], **options: Any) -> None:
        self.params = params
        self.opt = ShardedAdamW(params, lr=0.01, process_group=comm, **{"bucket_cap_mb": 64, **options})
        self.sync = self.opt._engine.grads  # type: ignore[union-attr]
        self.calls: list[str] = []  # what Python was entered in backwards

    def backward(self, *indices: int) -> None:
        """Dyadic gradients of some parameters, in one backward."""
        grads = dyadic(self.params, 7)
        loss = loss_of(self.params, grads, lambda i: i in indices)
        with entered() as calls:
            loss.backward()
        self.calls += calls

    def give(self, index: int, grad: Tensor) -> None:
        """A gradient as it is."""
        with entered() as calls:
            _Give.apply(self.params[index], grad).backward()
        self.calls += calls

    def expect_no_calls(self, where: str) -> None:
        assert self.calls == [], f"{where}: backward has entered {self.calls}"


class _Give(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, grad: Tensor) -> Tensor:
        ctx.grad = grad
        return x.sum()

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return ctx.grad.detach(), None  # an object that nobody else has: autograd does not copy it


def small_params(count: int = 4) -> list[Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [Parameter(torch.randn((6, 4), generator=generator)) for _ in range(count)]


def alone(body: Callable[[Communicator], None], device: str | None = None) -> None:
    with posing() if device else contextlib.nullcontext():
        run_local(1, body, device=device)


# ---- without Python


def plain(rank: Rank, backward: Callable[[], None]) -> None:
    backward()


def second_micro_batch(rank: Rank, backward: Callable[[], None]) -> None:
    backward()
    backward()


def grad_sync_after_each(rank: Rank, backward: Callable[[], None]) -> None:
    for _ in range(2):
        backward()
        rank.opt.grad_sync()


def after_no_sync(rank: Rank, backward: Callable[[], None]) -> None:
    with rank.opt.no_sync():
        backward()
    backward()


@DEVICES
@pytest.mark.parametrize("how", [plain, second_micro_batch, grad_sync_after_each, after_no_sync])
def test_a_backward_enters_no_python(how: Callable[..., None], device: str | None) -> None:
    """From the second step on; of a scalar, a parameter without elements, channels-last and transposed ones, too."""

    def body(comm: Communicator) -> None:
        for bucket_cap_mb in (64, 1e-3):
            rank = Rank(comm, make_params(), bucket_cap_mb=bucket_cap_mb)
            for step in range(3):
                how(rank, lambda rank=rank: rank.backward(*range(len(rank.params))))
                if step:
                    rank.expect_no_calls(f"step {step}")
                rank.calls.clear()
                rank.opt.step()
                rank.opt.zero_grad()
            rank.opt.close()

    alone(body, device)


@DEVICES
@pytest.mark.parametrize(
    ("dtype", "reduce_dtype"),
    [
        (torch.float64, None),
        (torch.float32, torch.bfloat16),
        (torch.bfloat16, None),
        (torch.bfloat16, torch.float32),
        (torch.float16, None),
        (torch.float16, torch.float16),
    ],
    ids=str,
)
def test_no_dtype_needs_python(dtype: torch.dtype, reduce_dtype: torch.dtype | None, device: str | None) -> None:
    def body(comm: Communicator) -> None:
        rank = Rank(comm, make_params(dtype), reduce_dtype=reduce_dtype)
        for step in range(2):
            rank.backward(*range(len(rank.params)))
            rank.expect_no_calls(f"step {step}")
            rank.opt.step()
            rank.opt.zero_grad()
        rank.opt.close()

    alone(body, device)


class _Subclass(Tensor):
    pass


@DEVICES
@pytest.mark.parametrize("kind", ["a subclass", "zeros without memory"])
def test_an_unusual_gradient_goes_to_python(kind: str, device: str | None) -> None:
    """And has its value. Strides, dtypes and what is scaled, replaced or assigned: scripts of conformance/optimizer."""

    def body(comm: Communicator) -> None:
        rank = Rank(comm, small_params())
        rank.backward(FIRST)
        rank.calls.clear()
        expected = torch.zeros(6, 4)
        if kind == "a subclass":  # backward adds to it in place
            assigned = dyadic(rank.params, 3)[ODD]
            expected = assigned + dyadic(rank.params, 7)[ODD]
            rank.params[ODD].grad = assigned.as_subclass(_Subclass)
            rank.backward(ODD)
        else:
            rank.give(ODD, torch._efficientzerotensor((6, 4)))
        assert "GradWindow.as_plain" in rank.calls
        rank.calls.clear()
        rank.backward(2)
        rank.expect_no_calls("the next one")
        assert_bitwise_equal(rank.opt.full_grad(rank.params[ODD]), expected)

    alone(body, device)


# ---- errors


def test_an_error_of_python_comes_out_of_backward() -> None:
    def body(comm: Communicator) -> None:
        rank = Rank(comm, small_params())
        error = KeyError("a bug")

        def fail(*_: Any) -> None:
            raise error

        rank.sync.as_plain = fail  # type: ignore[method-assign]
        with pytest.raises(KeyError) as caught:
            rank.give(ODD, torch._efficientzerotensor((6, 4)))
        assert caught.value is error

    alone(body)


def test_a_peer_error_of_a_launch_comes_out_of_backward() -> None:
    """With its attributes."""

    def body(comm: Communicator) -> None:
        rank = Rank(comm, small_params())
        comm.exchange(b"")
        if comm.rank == 1:
            comm.abort("on fire")
            return
        with pytest.raises(PeerError, match="on fire"):
            comm.exchange(b"")
        with pytest.raises(PeerError, match="on fire") as caught:
            rank.backward(*range(4))
        assert caught.value.rank == 1 and "on fire" in caught.value.reason != str(caught.value)

    run_local(2, body)


def test_a_timeout_of_a_launch_comes_out_of_backward() -> None:
    """Rank 1 runs no backward; after the first bucket of rank 0 has waited for it in vain, the second is not launched."""
    is_over = threading.Event()

    def body(comm: Communicator) -> None:
        rank = Rank(comm, small_params(2), bucket_cap_mb=1e-5)
        comm.exchange(b"")
        if comm.rank == 1:
            assert is_over.wait(20)
            return
        rank.backward(1)
        time.sleep(2.2)
        with pytest.raises(CommTimeout) as caught:
            rank.backward(0)
        assert caught.value.op == "reduce_scatter" and caught.value.seq > 0
        is_over.set()

    run_local(2, body, timeout_s=4.0)


def test_a_capture_error_comes_out_of_backward() -> None:
    """A bucket that was begun outside of the capture is full inside."""

    def body(comm: Communicator) -> None:
        rank = Rank(comm, small_params())
        rank.backward(0)
        with contextlib.suppress(RuntimeError), Graph(load()[1]):
            with pytest.raises(CaptureError):
                rank.backward(1, 2, 3)
        rank.opt.zero_grad()

    alone(body, "cuda")


# ---- lives


@DEVICES
@pytest.mark.parametrize("how", ["collected", "closed"])
def test_a_hook_that_outlives_its_optimizer_does_nothing(how: str, device: str | None) -> None:
    """In the middle of a window: the buckets' memory may be somebody else's by now."""

    def body(comm: Communicator) -> None:
        rank = Rank(comm, small_params())
        params, hook, alive = rank.params, rank.sync._native.hook(ODD), weakref.ref(rank.sync)
        rank.backward(FIRST)
        if how == "closed":
            rank.opt.close()
        del rank
        gc.collect()
        assert alive() is None
        grad = params[ODD].grad = dyadic(params, 3)[ODD]
        hook(params[ODD])
        assert params[ODD].grad is grad, "it stays a plain tensor"
        comm.pool.check()

    alone(body, device)


@DEVICES
def test_steps_leave_no_objects(device: str | None) -> None:
    def body(comm: Communicator) -> None:
        rank = Rank(comm, make_params(), bucket_cap_mb=1e-3)
        seen = []
        for step in range(24):
            second_micro_batch(rank, lambda: rank.backward(*range(len(rank.params))))
            rank.opt.step()
            rank.opt.zero_grad()
            rank.calls.clear()
            if step >= 8:
                gc.collect()
                seen.append(len(gc.get_objects()))
        assert max(seen) <= min(seen) + 5, seen  # the list of them grows, too
        rank.opt.close()

    alone(body, device)


@pytest.mark.parametrize("closes", ["grad_sync", "clip_grad_norm_"])
def test_threads_may_run_backward_while_another_closes(closes: str) -> None:
    """Of different parameters: no gradient is lost, whichever window it comes into."""
    rounds, backwards = 200, 3

    def body(comm: Communicator) -> None:
        rank = Rank(comm, small_params(8), bucket_cap_mb=1e-3)
        for _ in range(2):  # repeats are known of
            rank.backward(*range(8))
        rank.opt.zero_grad()
        close = rank.opt.grad_sync if closes == "grad_sync" else lambda: rank.opt.clip_grad_norm_(float("inf"))
        grads = dyadic(rank.params, 7)
        begin = threading.Barrier(3)
        failed: list[BaseException] = []

        def run(part: Sequence[int] | None) -> None:
            try:
                for _ in range(rounds):
                    begin.wait(20)
                    for _ in range(backwards):
                        if part is None:
                            close()
                        else:
                            loss_of(rank.params, grads, lambda i: i in part).backward()
                    begin.wait(20)
                    if part is None:
                        for param, grad in zip(rank.params, grads, strict=True):
                            assert_bitwise_equal(rank.opt.full_grad(param), backwards * grad)
                        rank.opt.zero_grad()
                    begin.wait(20)
            except BaseException as error:  # noqa: BLE001 (raised in the thread of the test)
                failed.append(error)
                begin.abort()

        threads = [threading.Thread(target=run, args=(part,)) for part in (range(4), range(4, 8), None)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        for error in failed:
            if not isinstance(error, threading.BrokenBarrierError):
                raise error
        rank.opt.close()

    alone(body)


# ---- backwards from which no gradient comes


def autograd_grad(rank: Rank) -> None:
    found = torch.autograd.grad(loss_of(rank.params, dyadic(rank.params, 8)), rank.params)
    assert_bitwise_equal(list(found), dyadic(rank.params, 8))


def no_gradient(rank: Rank) -> None:
    sum(Node.apply(param, "none", None).sum() for param in rank.params).backward()


def failing_hook(rank: Rank) -> None:
    """It comes behind ours."""
    handle = rank.params[ODD].register_hook(stop)
    with pytest.raises(Stop):
        loss_of(rank.params, dyadic(rank.params, 8), lambda i: i == ODD).backward()
    handle.remove()


@DEVICES
@pytest.mark.parametrize("where", ["behind a micro-batch", "behind no_sync"])
@pytest.mark.parametrize("between", [autograd_grad, no_gradient, failing_hook])
def test_what_there_is_stays(between: Callable[[Rank], None], where: str, device: str | None) -> None:
    """In the middle of an accumulation; and p.grad is a placeholder again."""

    def body(comm: Communicator) -> None:
        rank = Rank(comm, small_params())
        know_repeats(rank)
        with rank.opt.no_sync() if where == "behind no_sync" else contextlib.nullcontext():
            rank.backward(*range(4))
        before = [param.grad for param in rank.params]
        between(rank)
        assert all(param.grad is grad for param, grad in zip(rank.params, before, strict=True)), "another p.grad"
        rank.backward(*range(4))
        for param, grad in zip(rank.params, dyadic(rank.params, 7), strict=True):
            assert_bitwise_equal(rank.opt.full_grad(param), 2 * grad)
        between(rank)
        for param in rank.params:
            param.grad = None
        rank.backward(*range(4))
        assert_bitwise_equal(rank.opt.full_grad(rank.params[ODD]), dyadic(rank.params, 7)[ODD])

    alone(body, device)


def know_repeats(rank: Rank) -> None:
    for _ in range(2):
        rank.backward(*range(len(rank.params)))
    rank.opt.grad_sync()
    rank.opt.zero_grad()


@DEVICES
@pytest.mark.parametrize("inner", ["none", "no_sync"])
def test_a_backward_within_autograd_grad(inner: str, device: str | None) -> None:
    def script(params: list[Parameter], no_sync: Callable[[], Any]) -> None:
        def act() -> None:
            if inner == "none":
                Node.apply(params[ODD], "none", None).sum().backward()
            else:
                with no_sync():
                    (2 * params[ODD]).sum().backward()

        sum(param.sum() for param in params).backward()
        z = torch.ones(1, requires_grad=True)
        loss = sum(((7 * param).sum() for param in params), Node.apply(z, "", act).sum())
        torch.autograd.grad(loss, [*params, z])
        (4 * params[ODD]).sum().backward()

    def body(comm: Communicator) -> None:
        rank, theirs = Rank(comm, small_params()), small_params()
        know_repeats(rank)
        script(rank.params, rank.opt.no_sync)
        script(theirs, contextlib.nullcontext)
        for ours, param in zip(rank.params, theirs, strict=True):
            assert_bitwise_equal(rank.opt.full_grad(ours), param.grad)

    alone(body, device)


@DEVICES
def test_others_hooks_see_what_there_is(device: str | None) -> None:
    """In every micro-batch: hooks after accumulation that were there before ours, and hooks of gradients that came later."""

    def halve(param: Tensor) -> None:
        assert param.grad is not None
        param.grad.mul_(0.5)

    def clamp(param: Tensor) -> None:
        assert param.grad is not None
        param.grad.clamp_(max=3.0)

    def body(comm: Communicator) -> None:
        edits: list[Callable[[Tensor], None]] = []

        def edit(param: Tensor) -> None:
            for one in edits:
                one(param)

        ours, theirs = small_params(), small_params()
        for param in (*ours, *theirs):
            param.register_post_accumulate_grad_hook(edit)
        rank = Rank(comm, ours)
        know_repeats(rank)

        def train(params: list[Parameter]) -> None:
            for factor in (2, 4):
                sum((factor * param).sum() for param in params).backward()

        edits.append(halve)
        for _ in range(2):
            for params in (ours, theirs):
                train(params)
            for own, param in zip(ours, theirs, strict=True):
                assert_bitwise_equal(rank.opt.full_grad(own), param.grad)
                param.grad = None
            rank.opt.zero_grad()
        edits[:] = [clamp]
        with pytest.raises(bw.ShardedGradError):
            train(ours)
        edits.clear()
        rank.opt.zero_grad()
        for params in (ours, theirs):
            params[ODD].register_hook(lambda grad, p=params[ODD]: grad if p.grad is None else 10 * grad)
            train(params)
        assert_bitwise_equal(rank.opt.full_grad(ours[ODD]), theirs[ODD].grad)

    alone(body, device)


@DEVICES
def test_negative_numbers_stay_negative(device: str | None) -> None:
    """Gradients that torch holds as views with another sign: of one element, and of several."""

    def body(comm: Communicator) -> None:
        for shape in ((1,), (4,)):
            rank = Rank(comm, [Parameter(torch.zeros(shape)) for _ in range(2)])
            grad = torch.arange(1.0, 1 + shape[0])
            rank.give(ODD, torch.complex(torch.zeros(shape), grad).conj().imag)
            rank.params[FIRST].grad = torch._neg_view(grad.clone())
            loss_of(rank.params, [grad / 2, grad], lambda i: i == FIRST).backward()
            for index, expected in ((ODD, -grad), (FIRST, -grad / 2)):
                assert_bitwise_equal(rank.opt.full_grad(rank.params[index]), expected)
            rank.opt.close()

    alone(body, device)


# ---- what a bucket holds, on CUDA


def test_a_tensor_that_is_written_again_is_added_up() -> None:
    """As the static outputs of CUDA graphs are: what is held is packed before the next backward."""

    def body(comm: Communicator) -> None:
        rank = Rank(comm, small_params())
        static, total = torch.zeros(6, 4), torch.zeros(6, 4)
        for micro in range(3):
            static.copy_(dyadic(rank.params, micro)[ODD])
            total += static
            rank.give(ODD, static)
        static.fill_(99.0)
        rank.backward(0, 2, 3)
        assert rank.sync.memory()["held_peak"] > 0, "none was held"
        assert_bitwise_equal(rank.opt.full_grad(rank.params[ODD]), total)

    alone(body, "cuda")


def test_little_is_held_and_nothing_after_backward() -> None:
    """A view that keeps more than twice its bytes alive, and a gradient above 16 MiB, are packed at once."""

    def body(comm: Communicator) -> None:
        for numel, storage, is_held in ((1000, 1000, True), (1000, 2000, True), (1000, 2001, False)):
            rank = Rank(comm, [Parameter(torch.zeros(numel)) for _ in range(2)])
            rank.give(0, torch.ones(storage)[:numel])
            found = rank.sync.memory()
            assert (found["held"], found["held_peak"]) == (0, 4 * numel * is_held), storage
            rank.opt.close()
        for numel in (1 << 22, (1 << 22) + 1):
            rank = Rank(comm, [Parameter(torch.zeros(numel)), Parameter(torch.zeros(1))])
            rank.give(0, torch.ones(numel))
            found = rank.sync.memory()
            assert (found["held"], found["held_peak"]) == (0, (4 << 22) * (numel == 1 << 22)), numel
            rank.opt.close()

    alone(body, "cuda")


def test_what_is_held_is_dropped_behind_its_pack_in_the_stream_it_came_in() -> None:
    """The stream is paused while the bucket is packed: until then nothing may have the memory of the gradients."""

    def body(comm: Communicator) -> None:
        rank = Rank(comm, small_params())
        grads: list[StorageWeakRef] = []
        for param in rank.params:
            param.register_hook(lambda grad: grads.append(StorageWeakRef(grad.untyped_storage())))
        stream = core.Stream("of the gradients", 0)
        core.set_posed_stream(stream.cuda_stream)
        try:
            stream.pause(0.3)
            calls = Calls()
            rank.backward(*range(4))
            made = calls.since()
            assert made["launch_copy"] == 1 and not any(grad.expired() for grad in grads)
            stream.synchronize()
            comm.exchange(b"")  # comes back with the GIL: [Note: dropped without the GIL], csrc/bindings/dlpack.h
            assert len(grads) == 4 and all(grad.expired() for grad in grads)
            rank.opt.step()
            stream.synchronize()
        finally:
            core.set_posed_stream(0)

    alone(body, "cuda")


def test_nothing_is_held_after_a_backward_that_failed() -> None:
    def body(comm: Communicator) -> None:
        rank = Rank(comm, small_params())
        static = dyadic(rank.params, 3)[ODD].clone()
        kept = static.clone()
        early = Node.apply(rank.params[FIRST], "fails", None).sum()
        with pytest.raises(Stop):
            (early + _Give.apply(rank.params[ODD], static)).backward()
        found = rank.sync.memory()
        assert (found["held"], found["held_peak"]) == (0, static.nbytes)
        static.fill_(99.0)
        rank.backward(FIRST, 2, 3)
        assert_bitwise_equal(rank.opt.full_grad(rank.params[ODD]), kept)

    alone(body, "cuda")


def test_what_is_held_is_replaced() -> None:
    """After its bucket has gone, by a gradient that is not held, in a backward of its own within the first."""

    def body(comm: Communicator) -> None:
        rank = Rank(comm, small_params())
        grads = dyadic(rank.params, 3)
        know_repeats(rank)
        rank.backward(*range(4))

        def replace() -> None:
            assert rank.sync.memory()["held"] > 0
            rank.params[ODD].grad = None
            rank.give(ODD, torch.stack([grads[2]] * 3)[1])

        early = Node.apply(rank.params[FIRST], "none", replace).sum()
        (early + _Give.apply(rank.params[ODD], grads[ODD])).backward()
        assert rank.sync.memory()["held"] == 0
        assert_bitwise_equal(rank.opt.full_grad(rank.params[ODD]), grads[2])

    alone(body, "cuda")


def test_what_a_hook_brings_at_the_end_of_a_backward_is_not_held() -> None:
    """One that was registered after ours, which is called again behind it."""

    def body(comm: Communicator) -> None:
        rank = Rank(comm, small_params())
        grads = dyadic(rank.params, 3)
        static = grads[ODD].clone()
        rank.params[ODD].register_post_accumulate_grad_hook(lambda param: None)
        (_Give.apply(rank.params[FIRST], grads[FIRST]) + _Give.apply(rank.params[ODD], static)).backward()
        assert rank.sync.memory()["held"] == 0
        static.fill_(99.0)
        rank.backward(2, 3)
        assert_bitwise_equal(rank.opt.full_grad(rank.params[ODD]), grads[ODD])

    alone(body, "cuda")
