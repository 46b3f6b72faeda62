"""HSDP: states sharded over rows and replicated over columns leave the bits of sharding over all ranks. Ranks are threads."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from bucketwheel.comm.backends import LocalWorld
from bucketwheel.comm.communicator import Communicator
from bucketwheel.comm.replicas import Replicas
from bucketwheel.errors import CommError, PeerError
from bucketwheel.optim.sharded_adamw import ShardedAdamW
from bucketwheel.testing import assert_bitwise_equal, run_threads
from tests.support.optim_twins import TINY, Run, dyadic, loss_of, make_params
from tests.support.replica_ranks import SHAPES, assert_equal_ranks, on_flat, run_with_replicas, windows, with_replicas
from tests.support.simulated_cuda import posing

OPTIONS: list[dict[str, Any]] = [
    TINY,
    {"bucket_cap_mb": 3e-3, "overlap_param_sync": True, "max_inflight_buckets": 1},
    {**TINY, "overlap_grad_sync": False, "gradient_average": False},
]


@pytest.mark.parametrize(
    ("shape", "options"), [*((shape, TINY) for shape in SHAPES), *(((2, 2), one) for one in OPTIONS[1:])], ids=str
)
def test_the_bits_of_all_ranks_in_one_group(shape: tuple[int, int], options: dict[str, Any]) -> None:
    shards, replicas = shape
    expected = on_flat(shards * replicas, windows, **options)
    assert_equal_ranks(run_with_replicas(shards, replicas, windows, **options), expected, shards)


def test_bfloat16_is_not_rounded_on_its_way() -> None:
    """Sums of bfloat16 gradients need more digits than bfloat16 has; parts travel in fp32."""

    def script(run: Run) -> None:
        for seed in range(3):
            grads = [g + (300 + run.rank) / 16 * (g > 0) for g in dyadic([p.float() for p in run.params], seed)]
            loss_of(run.params, [g.to(torch.bfloat16) for g in grads]).backward()
            run.clip(0.5)
            run.step()

    options: dict[str, Any] = {**TINY, "dtype": torch.bfloat16}
    assert_equal_ranks(run_with_replicas(2, 2, script, **options), on_flat(4, script, **options), 2, torch.bfloat16)


def test_float64_stays_float64() -> None:
    """A third of a gradient has no end: float32 anywhere on the way would show."""

    def script(run: Run) -> None:
        for seed in range(3):
            loss_of(
                run.params, [g / 3 if run.rank == 0 else torch.zeros_like(g) for g in dyadic(run.params, seed)]
            ).backward()
            run.see_grads()
            run.clip(0.5)
            run.step()

    options: dict[str, Any] = {**TINY, "dtype": torch.float64}
    expected = on_flat(4, script, **options)
    for rank, (params, seen, _) in enumerate(run_with_replicas(2, 2, script, **options)):
        assert_bitwise_equal(params, expected[0][0], f"parameters of rank {rank}")
        assert_bitwise_equal(seen, expected[0][1], f"what rank {rank} saw")


def test_buckets_leave_during_backward() -> None:
    """All three operations of a bucket are issued from the hooks, in bucket order, on every rank."""

    def body(rank: int, shard: Communicator, replicate: Communicator) -> tuple[list[str], int]:
        params = make_params(seed=rank)
        opt = ShardedAdamW(params, process_group=shard, replicate_group=replicate, **TINY)
        run = Run(opt, params, rank, 4)
        run.backward(0)
        run.step()
        log: list[str] = []
        for comm, method in ((shard, "reduce_scatter_into"), (replicate, "all_gather_to_sink")):
            issue = getattr(comm, method)
            setattr(comm, method, lambda *a, issue=issue, method=method, **k: log.append(method) or issue(*a, **k))
        run.backward(1)
        during = list(log)
        opt.grad_sync()
        return during, len(log) - len(during)

    for during, after in with_replicas(2, 2, body):
        assert len(during) >= 20 and during == ["reduce_scatter_into", "all_gather_to_sink"] * (len(during) // 2)
        assert after <= 2, "only buckets of padding and parameters without elements are left"


# --- agreement --------------------------------------------------------------------------------------------------------


def test_replicas_with_other_layouts_are_refused_on_every_rank() -> None:
    def body(rank: int, shard: Communicator, replicate: Communicator) -> str:
        params = make_params()
        with pytest.raises(RuntimeError, match="ranks disagree") as raised:
            lr = 0.1 if replicate.rank else 0.2
            ShardedAdamW(params, lr=lr, process_group=shard, replicate_group=replicate)
        return str(raised.value)

    assert all("lr 0." in message for message in with_replicas(2, 2, body))


@pytest.mark.parametrize("poses", [False, True])
def test_what_one_rank_says_is_not_finite_all_skip(poses: bool) -> None:
    """``found_inf`` comes in on one rank alone: what another optimizer's gradients were."""

    def body(rank: int, shard: Communicator, replicate: Communicator) -> float:
        params = make_params(seed=rank)
        opt = ShardedAdamW(params, process_group=shard, replicate_group=replicate)
        Run(opt, params, rank, 4).backward(0)
        found = torch.tensor(float(rank == 3))
        grads = [p.grad for p in params]
        torch._amp_foreach_non_finite_check_and_unscale_(grads, found, torch.tensor(0.5))
        opt.close()
        return found.item()

    if poses:
        with posing():
            assert with_replicas(2, 2, body, device="cuda") == [1.0] * 4
    else:
        assert with_replicas(2, 2, body) == [1.0] * 4


def wired(rows: list[list[int]], columns: list[list[int]], body: Callable[..., Any]) -> list[Any]:
    """``body(shard, replicate)`` with these ranks as groups, in their order."""
    row_worlds, column_worlds = [LocalWorld(len(g)) for g in rows], [LocalWorld(len(g)) for g in columns]

    def of(rank: int, groups: list[list[int]], worlds: list[LocalWorld]) -> Communicator:
        at = next(i for i, group in enumerate(groups) if rank in group)
        return Communicator(worlds[at].rank(groups[at].index(rank)), timeout_s=10)

    world = sum(map(len, rows))
    return run_threads(
        lambda rank, _: body(of(rank, rows, row_worlds), of(rank, columns, column_worlds)), world, timeout_s=30
    )


UNEQUAL_GROUPS = {
    "columns are rows": ([[0, 1], [2, 3]], [[0, 1], [2, 3]]),
    "other places": ([[0, 1], [2, 3]], [[0, 3], [1, 2]]),
    "other order of a column": ([[0, 1], [2, 3]], [[0, 2], [3, 1]]),
    "unequal rows": ([[0, 1, 2], [3, 4]], [[0, 3], [1, 4], [2]]),
    "twisted columns": ([[0, 1], [2, 3], [4, 5], [6, 7]], [[0, 2], [1, 5], [4, 6], [3, 7]]),
    "a column more": ([[0, 1], [2, 3]], [[0, 2], [1], [3]]),
}


@pytest.mark.parametrize("case", UNEQUAL_GROUPS)
def test_what_is_does_not_fit_is_refused_on_every_rank(case: str) -> None:
    def body(shard: Communicator, replicate: Communicator) -> str:
        param = torch.nn.Parameter(torch.ones(3))
        try:
            with pytest.raises(ValueError, match="do not fit") as raised:
                ShardedAdamW([param], process_group=shard, replicate_group=replicate)
            return str(raised.value)
        finally:
            shard.close()
            replicate.close()

    for message in wired(*UNEQUAL_GROUPS[case], body):
        assert "rank r * S + s" in message


def test_a_replicate_group_on_some_ranks_is_refused_on_every_rank() -> None:
    """Those that share no group with the odd rank learn of it when others go."""

    def body(rank: int, shard: Communicator, replicate: Communicator) -> str:
        groups = {"process_group": shard} if rank == 1 else {"process_group": shard, "replicate_group": replicate}
        with pytest.raises((ValueError, RuntimeError, PeerError)) as raised:
            ShardedAdamW([torch.nn.Parameter(torch.ones(3))], **groups)
        return str(raised.value)

    began = time.monotonic()
    messages = with_replicas(2, 2, body, timeout_s=60)
    assert time.monotonic() - began < 15
    assert "this one does not" in messages[1]
    assert "1 ranks of the process_group of rank 0 have a replicate_group" in messages[0]


def test_registered_memory_is_refused() -> None:
    class Registered:
        is_registered, name = True, "x"

    with pytest.raises(ValueError, match="registered=True"):
        Replicas(Registered(), Registered())  # type: ignore[arg-type]


def test_a_replicate_group_alone_is_refused() -> None:
    with Communicator(LocalWorld(1).rank(0)) as comm:
        with pytest.raises(ValueError, match="needs a process_group"):
            ShardedAdamW([torch.nn.Parameter(torch.ones(3))], replicate_group=comm)


# --- beside their steps ----------------------------------------------------------------------------------


def test_a_failure_reaches_the_ranks_that_share_no_group_with_it() -> None:
    """Well before the time limit, and though nobody closes anything: who notices tells its other group."""
    everyone = threading.Barrier(6, timeout=15)

    def body(rank: int, shard: Communicator, replicate: Communicator) -> str:
        params = make_params()
        opt = ShardedAdamW(params, process_group=shard, replicate_group=replicate, **TINY)
        run = Run(opt, params, rank, 6)
        run.backward(0)
        run.step()
        opt.param_sync()
        everyone.wait()
        message = ""
        if rank == 0:
            shard.abort("on fire")
        else:
            with pytest.raises(PeerError) as raised:
                run.backward(1)
                run.step()
            message = str(raised.value)
        everyone.wait()
        return message

    messages = with_replicas(2, 3, body, timeout_s=60)
    assert "on fire" in messages[1] and all("on fire" in message for message in messages[1:])


def test_whoever_passes_a_failure_of_a_peer_on_it_stays_one() -> None:
    """The call that it ends comes before the watchdog."""
    everyone = threading.Barrier(4, timeout=15)

    def body(rank: int, shard: Communicator, replicate: Communicator) -> None:
        replicas = Replicas(shard, replicate)
        everyone.wait()
        if rank == 3:
            shard.abort("on fire")
        elif rank == 2:
            with pytest.raises(PeerError, match="on fire"):
                replicas.exchange(b"")
            with pytest.raises(PeerError, match="on fire"):
                replicate.exchange(b"")
        everyone.wait()

    with_replicas(2, 2, body)


@pytest.mark.parametrize("device", [None, "cuda"])
def test_a_failure_reaches_ranks_that_wait_in_their_other_group(device: str | None) -> None:
    """Rank 3 fails in its shard group and is gone; nobody waits in that, and each waits for the next."""
    everyone = threading.Barrier(4, timeout=15)

    def body(rank: int, shard: Communicator, replicate: Communicator) -> tuple[str, str]:
        replicas = Replicas(shard, replicate)
        everyone.wait()
        if rank == 3:
            shard.abort("on fire")
        waited_for = {0: replicas.shard, 1: replicas.replicate, 2: replicas.replicate, 3: None}[rank]
        begin = time.monotonic()
        if waited_for is not None:
            with pytest.raises(PeerError, match="on fire"):
                waited_for.exchange(b"")
            assert time.monotonic() - begin < 5
        everyone.wait()
        time.sleep(0.4)  # the watchdog looks
        errors = []
        for comm in (shard, replicate):
            with pytest.raises(CommError, match="on fire") as caught:
                comm.exchange(b"")
            errors.append(type(caught.value).__name__)
        return tuple(errors)

    with posing() if device else contextlib.nullcontext():
        kinds = with_replicas(2, 2, body, device=device)
    assert kinds == [("PeerError", "PeerError")] * 3 + [("CommError", "CommError")]


def test_a_communicator_that_is_closed_fails_nobody() -> None:
    def body(rank: int, shard: Communicator, replicate: Communicator) -> Replicas:
        replicas = Replicas(shard, replicate)
        time.sleep(0.1 * rank)
        shard.close()
        time.sleep(0.4)  # the watchdog looks
        replicate.exchange(b"")
        return replicas

    with_replicas(2, 2, body)


@pytest.mark.parametrize("is_refused", [False, True])
def test_groups_of_a_closed_optimizer_fail_alone(is_refused: bool) -> None:
    """Though it, or the traceback of what refused it, is still there."""

    def body(rank: int, shard: Communicator, replicate: Communicator) -> object:
        params = make_params()
        groups = {"process_group": shard, "replicate_group": replicate}
        kept: object
        if is_refused:
            with pytest.raises(RuntimeError, match="ranks disagree") as raised:
                ShardedAdamW(params, lr=0.1 * (rank + 1), **groups)
            kept = raised
        else:
            opt = kept = ShardedAdamW(params, **groups)
            opt.close()
        replicate.exchange(b"")
        shard.exchange(b"")
        shard.abort("on fire")
        time.sleep(0.4)  # the watchdog looks
        assert replicate.exchange(b"") == [b""] * 2
        return kept

    with_replicas(2, 2, body)


def test_a_state_dict_loads_on_any_replica() -> None:
    saved_by: dict[int, dict[str, Any]] = {}

    def body(rank: int, shard: Communicator, replicate: Communicator) -> tuple[list[Tensor], list[Tensor]]:
        out = []
        for resumes in (False, True):
            params = make_params()
            opt = ShardedAdamW(params, lr=0.1, process_group=shard, replicate_group=replicate, **TINY)
            run = Run(opt, params, rank, 4)
            run.backward(0)
            run.step()
            if resumes:
                opt.load_state_dict(saved_by[(rank + 2) % 4])  # the other replica's
            saved_by[rank] = opt.state_dict()
            run.backward(1)
            run.step()
            out.append([p.detach().clone() for p in params])
            opt.close()
            shard.exchange(b"")
            replicate.exchange(b"")
        return out[0], out[1]

    ranks = with_replicas(2, 2, body)
    assert_bitwise_equal(saved_by[0], saved_by[2])
    assert_bitwise_equal(saved_by[1], saved_by[3])
    for once, again in ranks:
        assert_bitwise_equal(again, once)


def test_it_describes_itself_and_counts_its_memory() -> None:
    def body(rank: int, shard: Communicator, replicate: Communicator) -> tuple[str, int, int]:
        params = make_params()
        groups = {"process_group": shard, "replicate_group": replicate}
        opt = ShardedAdamW(params, **groups, bucket_cap_mb=0.01)
        Run(opt, params, rank, 4).backward(0)
        opt.step()
        found = opt.memory_summary()
        reserved = [comm.pool.stats().reserved_bytes for comm in (shard, replicate)]
        assert reserved[1] > 0, "part buffers"
        with pytest.raises(ValueError, match="belongs to another optimizer"):
            ShardedAdamW([torch.nn.Parameter(torch.ones(3))], **groups)
        described = opt.describe()
        opt.close()
        ShardedAdamW(params, **groups).close()  # the groups are free again
        return described, found["pool"] + found["params"], sum(reserved)

    for described, found, reserved in with_replicas(2, 2, body):
        assert found == reserved
        assert described.startswith("sharded over 2 ranks (local), replicated 2 times (local)\n")
