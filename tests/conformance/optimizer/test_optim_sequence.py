"""One sequence of collectives on every rank, recorded, whatever ranks do with their graphs. The results: test_suite.py."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from torch import Tensor

from bucketwheel.comm.communicator import Communicator
from bucketwheel.optim.sharded_adamw import ShardedAdamW
from tests.conformance.optimizer import divergence, gradients, updates
from tests.support.optim_twins import TINY, Run, make_params, run_local
from tests.support.requirements import slow_case


@dataclass
class Record:
    """What a rank issues, in order."""

    collectives: list[tuple[Any, ...]] = field(default_factory=list)  # operation, bucket, numel, dtype
    agreements: list[str] = field(default_factory=list)  # what the ranks met for

    def rounds(self) -> list[list[int]]:
        """The buckets that were reduced between the gathers of two steps."""
        out: list[list[int]] = [[]]
        for operation, bucket, *_ in self.collectives:
            if operation == "reduce":
                out[-1].append(bucket)
            elif out[-1]:
                out.append([])
        return [buckets for buckets in out if buckets]


@contextlib.contextmanager
def recorded(opt: ShardedAdamW, comm: Communicator) -> Iterator[Record]:
    """Writes down what the optimizer does inside."""
    record = Record()
    engine: Any = opt._engine
    bucket_of = {id(bucket.grads.sink): bucket.grads.index for bucket in engine._assembly.buckets}
    reduce, gather, exchange = comm._reduce_scatter_into, comm._all_gather_into, comm.exchange

    def reduce_scatter_into(full: Tensor, sink: Any, **options: Any) -> Any:
        record.collectives.append(("reduce", bucket_of[id(sink)], full.numel(), full.dtype))
        return reduce(full, sink, **options)

    def all_gather_into(full: Tensor, shard: Tensor, **options: Any) -> Any:
        record.collectives.append(("gather", full.numel(), shard.numel(), full.dtype))
        return gather(full, shard, **options)

    def exchanged(payload: bytes) -> list[bytes]:
        why, is_reason, _ = payload[:40].partition(b":")
        record.agreements.append(why.decode() if is_reason and why.isascii() else "numbers")
        return exchange(payload)

    comm._reduce_scatter_into = reduce_scatter_into  # type: ignore[method-assign]
    comm._all_gather_into = all_gather_into  # type: ignore[method-assign]
    comm.exchange = exchanged  # type: ignore[method-assign]
    yield record
    del comm._reduce_scatter_into, comm._all_gather_into, comm.exchange  # those of the class again


Result = tuple[Record, int]  # what was issued, and how many buckets there are


def train(comm: Communicator, script: Callable[[Run], None], options: dict[str, Any]) -> Result:
    params = make_params()
    opt: Any = ShardedAdamW(params, process_group=comm, **options)
    with recorded(opt, comm) as record:
        script(Run(opt, params, comm.rank, comm.size))
    buckets = len(opt._engine._assembly.buckets)
    opt.close()
    return record, buckets


def expect_one_sequence(results: list[Result], script: Callable[[Run], None], *, overlap: bool = True) -> None:
    """Equal lists; every window is all buckets in order and once more, in order, those with late gradients.

    With ``overlap`` the first bucket goes as soon as it is full, so what comes twice comes too late for it.
    """
    (record, buckets), *others = results
    for rank, (other, _) in enumerate(others, 1):
        assert other == record, f"rank {rank}"
    assert record.rounds(), "nothing was reduced"
    for reduced in record.rounds():
        first, late = reduced[:buckets], reduced[buckets:]
        assert first == list(range(buckets))
        assert late == sorted(set(late)), "a late round is one more for some"
    if overlap:
        has_late = [len(reduced) > buckets for reduced in record.rounds()]
        assert any(has_late) == (script in WITH_LATE_ROUNDS), has_late


WITH_LATE_ROUNDS = [
    gradients.backwards_without_no_sync,
    divergence.reentrant_checkpoints_on_some_ranks,
    divergence.late_on_one_rank,
    divergence.exception_in_backward_and_all_repeat,
    divergence.no_sync_on_some_ranks_and_late_on_others,
]
RECORDED = [
    *WITH_LATE_ROUNDS,
    divergence.branches_that_alternate_between_ranks,
    divergence.opposite_orders,
    divergence.no_backward_at_all_on_most_ranks,
    divergence.weights_in_three_places_on_one_rank,
    divergence.backward_in_another_thread,
    divergence.exception_in_forward_on_one_rank,
    divergence.exception_in_backward_on_one_rank,
]


@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "no overlap"])
@pytest.mark.parametrize("world", [slow_case(2), 3, slow_case(4)])
@pytest.mark.parametrize("script", RECORDED, ids=lambda script: script.__name__)
def test_one_sequence_on_every_rank(script: Callable[[Run], None], world: int, overlap: bool) -> None:
    """G3, G6 to G10 and G17 of the optimizer's test rows."""
    options = {**TINY, "overlap_grad_sync": overlap}
    results = run_local(world, train, script, options)
    expect_one_sequence(results, script, overlap=overlap)


def train_all(rank: int, world: int) -> list[Result]:
    with Communicator(timeout_s=20) as comm:
        return [train(comm, script, {"bucket_cap_mb": 1e-3}) for script in RECORDED]


@pytest.mark.parametrize("world", [2, 3, slow_case(4)])
def test_one_sequence_over_processes(world: int, rank_pool: Any) -> None:
    everyone = rank_pool(world).run(train_all, timeout_s=90)
    for script, results in zip(RECORDED, zip(*everyone, strict=True), strict=True):
        expect_one_sequence(list(results), script)


# --- how many ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world", [2, 3])
def test_what_each_window_costs(world: int) -> None:
    """G2, G3, G10 and G21 of the rows: reductions and agreements, counted."""

    def body(comm: Communicator) -> None:
        params = make_params()
        opt = ShardedAdamW(params, process_group=comm, **TINY)
        with recorded(opt, comm) as record:
            count_windows(Run(opt, params, comm.rank, comm.size), record)

    run_local(world, body)


def count_windows(run: Run, record: Record) -> None:
    made: Any = run.opt._engine._assembly.buckets
    buckets = list(range(len(made)))
    with_3 = [bucket.grads.index for bucket in made if 3 in bucket.grads.parts]

    def count(act: Callable[[], Any]) -> list[int]:
        """The buckets that are reduced meanwhile."""
        before = len(record.collectives)
        act()
        return [bucket for operation, bucket, *_ in record.collectives[before:] if operation == "reduce"]

    for _ in range(2):  # G2
        with run.opt.no_sync():
            assert count(lambda: run.backward(0)) == [] and record.agreements == []
        assert count(lambda: run.backward(1)) == buckets
        assert count(run.step) == [] and record.agreements == ["step"], "G21: one agreement"
        record.agreements.clear()

    def twice() -> None:  # G3: between once and as often as backward
        run.backward(0)
        run.backward(1)

    for _ in range(2):  # whatever came before, so that a training that is resumed has the same bits
        assert count(twice) == buckets and count(run.step) == buckets
    for _ in range(2):
        run.backward(0)
        run.step()
    record.agreements.clear()

    for _ in range(2):  # a norm closes the window, adds the ranks' sums of squares, and step has to ask again
        run.backward(0)
        assert record.agreements == []
        assert count(lambda: run.opt.clip_grad_norm_(0.5)) == [] and record.agreements == ["norm", "numbers"]
        assert count(run.step) == [] and record.agreements == ["norm", "numbers", "step"]
        record.agreements.clear()

    run.backward(0)  # G10: one rank's late gradient costs all ranks one more round, of its buckets
    if run.rank == run.world - 1:
        run.backward(1, used=[3], on=[run.rank])
    assert count(run.step) == with_3 and record.agreements == ["step"]


@pytest.mark.parametrize("world", [2, 3, slow_case(4)])
def test_a_static_graph_agrees_once(world: int) -> None:
    """G21: and then never again; the sequence stays what it was."""
    script = updates.ranks_that_use_other_parameters_every_step_alike
    results = run_local(world, train, script, {**TINY, "static_graph": True})
    assert all(result == results[0] for result in results)
    asked = [what for what in results[0][0].agreements if what != "numbers"]
    assert len(asked) == 1, asked
