"""ShardedAdamW on CUDA, simulated: the same bits as on the CPU at world sizes 1 to 4, and nothing that waits or allocates."""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

import bucketwheel as bw
from bucketwheel.comm.communicator import Communicator
from tests.support.bits import assert_bitwise_equal
from tests.support.optim_twins import run_local
from tests.support.simulated_cuda import Calls, posing

_seeding = threading.Lock()  # the ranks are threads: torch's random state is theirs together


def model_of(dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.nn.Sequential:
    with _seeding:
        torch.manual_seed(seed)
        model = torch.nn.Sequential(
            torch.nn.Linear(37, 64), torch.nn.GELU(), torch.nn.LayerNorm(64), torch.nn.Linear(64, 5, bias=False)
        )
    return model.to(dtype)


def batch(rank: int, step: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(8, 37, generator=torch.Generator().manual_seed(100 * rank + step)).to(dtype)


def in_world(world: int, poses: bool, body: Callable[[int, Communicator], Any], **kwargs: Any) -> list[Any]:
    """``body(rank, communicator)`` on ``world`` threads; on the simulated device or on the CPU."""
    with posing(**kwargs) if poses else contextlib.nullcontext():
        return run_local(world, lambda comm: body(comm.rank, comm), timeout_s=40, device="cuda" if poses else None)


CLIPS = {"own": (0.3, 2.0), "inf": (0.05, float("inf")), "three": (0.3, 3.0)}  # limits, orders


def trained(rank: int, comm: Communicator | None, dtype: torch.dtype, clip: str, **options: Any) -> list[torch.Tensor]:
    """What three steps leave: norms, parameters and states."""
    model = model_of(dtype, seed=rank if options.get("broadcast_params", True) else 0)
    if comm is not None:
        options = {"process_group": comm, "bucket_cap_mb": 0.004, **options}
    opt = bw.ShardedAdamW(model.parameters(), lr=1e-2, weight_decay=0.1, **options)
    out = []
    if options.get("overlap_param_sync"):
        opt.prefetch_params(model)
    for step in range(3):
        for micro in range(2):
            model(batch(rank, 2 * step + micro, dtype)).square().mean().backward()
            if step == 1 and micro == 0:
                opt.grad_sync()  # a second window adds to the shards
        if clip == "stock":
            out.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3).clone())
        elif clip in CLIPS:
            out.append(opt.clip_grad_norm_(*CLIPS[clip]).clone())
        opt.step()
        opt.zero_grad()
    opt.param_sync()
    out += [p.detach().clone() for p in model.parameters()]
    saved = opt.state_dict()["state"]
    parts = [saved[i][name] for i in sorted(saved) for name in sorted(saved[i])]
    out += [getattr(part, "piece", part) for part in parts]
    opt.close()
    return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_other_norms_agree_with_the_cpu(dtype: torch.dtype) -> None:
    body = lambda rank, comm: trained(rank, comm, dtype, "three")  # noqa: E731
    for rank, (got, expected) in enumerate(zip(in_world(2, True, body), in_world(2, False, body), strict=True)):
        for a, b in zip(got, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7, msg=f"rank {rank}")


def test_backward_and_step_neither_wait_nor_allocate_in_one_process() -> None:
    with posing():
        model = model_of()
        opt = bw.ShardedAdamW(model.parameters(), lr=1e-2)
        for step in range(5):
            calls = Calls()
            model(batch(0, step, torch.float32)).square().mean().backward()
            opt.clip_grads_with_norm_(0.3, opt.local_grad_norm()) if step == 3 else opt.clip_grad_norm_(0.3)
            opt.step()
            opt.zero_grad()
            if step >= 2:
                calls.expect_free_running()
        assert calls.since()["launch_adam"] == 1
        assert calls.since()["launch_clip"] == 1
        opt.close()


@pytest.mark.parametrize("world", [2, 4])
def test_backward_and_step_neither_wait_nor_allocate_with_ranks(world: int) -> None:
    """Counted over all ranks at once, between barriers: the counters are the process's.

    How many events are in use at once depends on how the ranks' calls fall between each other: a few are spare.
    """
    barrier = threading.Barrier(world, timeout=20)
    counted: list[dict[str, int]] = []

    def body(rank: int, comm: Communicator) -> None:
        model = model_of()
        opt = bw.ShardedAdamW(model.parameters(), lr=1e-2, process_group=comm, bucket_cap_mb=0.004)
        for step in range(6):
            if step == 4:
                spare = [comm.stream.record() for _ in range(4)]
                barrier.wait()
                del spare
            barrier.wait()
            calls = Calls()
            barrier.wait()
            model(batch(rank, step, torch.float32)).square().mean().backward()
            opt.clip_grad_norm_(0.3)
            opt.step()
            opt.zero_grad()
            barrier.wait()
            if step >= 4 and rank == 0:
                calls.expect_free_running()
                counted.append(calls.since())
            barrier.wait()
        opt.close()

    in_world(world, True, body)
    assert len(counted) == 2
    assert counted[0]["launch_accumulate"] >= world
    assert counted[0]["launch_clip"] == world


def test_capturable_needs_cuda_and_a_static_graph() -> None:
    with pytest.raises(ValueError, match="static_graph=True"):
        bw.ShardedAdamW(model_of().parameters(), capturable=True)
    with pytest.raises(ValueError, match="on CUDA, but they are on cpu"):
        bw.ShardedAdamW(model_of().parameters(), capturable=True, static_graph=True)


@pytest.mark.parametrize("has_it", [True, False])
def test_capturable_lets_autograd_replace_stale_streams(has_it: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Issue 44."""
    given: list[bool] = []
    if has_it:
        monkeypatch.setattr(torch.autograd.graph, "set_override_stale_capture_stream", given.append, raising=False)
    else:
        monkeypatch.delattr(torch.autograd.graph, "set_override_stale_capture_stream", raising=False)
    with posing(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        bw.ShardedAdamW(model_of().parameters(), static_graph=True)
        assert not given and not caught
        bw.ShardedAdamW(model_of().parameters(), capturable=True, static_graph=True)
    assert given == [True] * has_it
    assert [each.filename for each in caught] == [__file__] * (not has_it)
    assert all("A capture of backward fails if" in str(each.message) for each in caught)


def test_a_static_graph_refuses_another_set_of_gradients() -> None:
    model = model_of()
    opt = bw.ShardedAdamW(list(model.named_parameters()), static_graph=True)
    model(batch(0, 0, torch.float32)).square().mean().backward()
    opt.step()
    next(model.parameters()).grad = None
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(RuntimeError, match="'0.weight' has no gradient in this step"):
        opt.step()
    for p, old in zip(model.parameters(), before, strict=True):
        assert torch.equal(p, old)


def test_state_moves_between_cpu_and_cuda() -> None:
    """A checkpoint of either loads into the other, and both go on with the same bits."""

    def steps(model: torch.nn.Module, opt: Any, first: int, count: int) -> None:
        for step in range(first, first + count):
            model(batch(0, step, torch.bfloat16)).square().mean().backward()
            opt.step()
            opt.zero_grad()

    model = model_of(torch.bfloat16)
    opt = bw.ShardedAdamW(model.parameters(), lr=1e-2)
    steps(model, opt, 0, 2)
    weights, saved = {k: v.clone() for k, v in model.state_dict().items()}, opt.state_dict()
    steps(model, opt, 2, 2)
    with posing():
        other = model_of(torch.bfloat16, seed=5)
        resumed = bw.ShardedAdamW(other.parameters(), lr=1e-2)
        other.load_state_dict(weights)
        resumed.load_state_dict(saved)
        steps(other, resumed, 2, 2)
        for a, b in zip(other.parameters(), model.parameters(), strict=True):
            assert torch.equal(a, b)
        back = resumed.state_dict()
        resumed.close()
    ours = opt.state_dict()["state"]
    for i, entry in back["state"].items():
        for name, value in entry.items():
            assert torch.equal(value, ours[i][name]), name


def test_a_factor_is_reset_beside_others_that_stay() -> None:
    """All gradients are clipped by norm, then one by value, which takes its factor: the CPU's bits."""

    def clipped(rank: int, comm: Communicator) -> list[torch.Tensor]:
        model = model_of()
        params = list(model.parameters())
        opt = bw.ShardedAdamW(params, lr=1e-2, process_group=comm)
        for step in range(2):
            model(batch(rank, step, torch.float32)).square().mean().backward()
            opt.clip_grad_norm_(0.3)
            torch.nn.utils.clip_grad_value_(params[:1], 1e-3)
            opt.step()
            opt.zero_grad()
        out = [p.detach().clone() for p in params]
        opt.close()
        return out

    assert_bitwise_equal(in_world(2, True, clipped), in_world(2, False, clipped))


def test_the_devices_of_parameters_and_communicator_must_agree() -> None:
    def body(rank: int, comm: Communicator) -> None:
        model = model_of()
        with posing(), pytest.raises(ValueError, match="communicator 'local' is for cpu"):
            bw.ShardedAdamW(model.parameters(), process_group=comm)

    in_world(1, False, body)
