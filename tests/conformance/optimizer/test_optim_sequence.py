"""What a window costs: reductions and agreements, counted. Their order: native/test_schedule.cpp; the results: test_suite.py."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from bucketwheel.comm.communicator import Communicator
from bucketwheel.optim.sharded_adamw import ShardedAdamW
from tests.conformance.optimizer import updates
from tests.support.late_gathers import gathered_by
from tests.support.optim_twins import TINY, Run, make_params, run_local


@dataclass
class Record:
    """What a rank issues, in order."""

    # ("reduce", bucket, whether its late round) or ("gather", elements, of a shard, dtype)
    collectives: list[tuple[Any, ...]] = field(default_factory=list)
    agreements: list[str] = field(default_factory=list)  # what the ranks met for


@contextlib.contextmanager
def recorded(opt: ShardedAdamW, comm: Communicator) -> Iterator[Record]:
    """Writes down what the optimizer does inside."""
    record = Record()
    engine: Any = opt._engine
    steps, gathered, exchange = engine._assembly.steps, gathered_by(engine), comm._exchange

    class Steps:
        def run(self, step: Any, begun: Any, order: Sequence[int], used: bytes, running: list[Any]) -> None:
            steps.run(step, begun, order, used, running)
            for _, number in running:
                full, own = gathered[number]
                record.collectives.append(("gather", full.numel(), own.numel(), full.dtype))

    def reduced(bucket: int, late: bool, _: int) -> None:
        record.collectives.append(("reduce", bucket, late))

    def exchanged(payload: bytes) -> list[bytes]:
        why, is_reason, _ = payload[:40].partition(b":")
        record.agreements.append(why.decode() if is_reason and why.isascii() else "numbers")
        return exchange(payload)

    engine.grads._native.observe(reduced)
    engine._assembly = replace(engine._assembly, steps=Steps())
    comm._exchange = exchanged
    yield record
    engine.grads._native.observe(lambda *_: None)
    engine._assembly = replace(engine._assembly, steps=steps)
    comm._exchange = exchange


def train(comm: Communicator, script: Callable[[Run], None], options: dict[str, Any]) -> Record:
    params = make_params()
    opt: Any = ShardedAdamW(params, process_group=comm, **options)
    with recorded(opt, comm) as record:
        script(Run(opt, params, comm.rank, comm.size))
    opt.close()
    return record


@pytest.mark.parametrize("world", [2, 3])
def test_what_each_window_costs(world: int) -> None:
    def body(comm: Communicator) -> None:
        params = make_params()
        opt = ShardedAdamW(params, process_group=comm, **TINY)
        with recorded(opt, comm) as record:
            count_windows(Run(opt, params, comm.rank, comm.size), record)

    run_local(world, body)


def count_windows(run: Run, record: Record) -> None:
    made: Any = run.opt._engine._assembly.buckets
    buckets = list(range(len(made)))
    with_3 = [bucket.grads.index for bucket in made if 3 in bucket.grads.params]

    def count(act: Callable[[], Any]) -> list[int]:
        """The buckets that are reduced meanwhile."""
        before = len(record.collectives)
        act()
        return [bucket for operation, bucket, *_ in record.collectives[before:] if operation == "reduce"]

    for _ in range(2):
        with run.opt.no_sync():
            assert count(lambda: run.backward(0)) == [] and record.agreements == []
        assert count(lambda: run.backward(1)) == buckets
        assert count(run.step) == [] and record.agreements == ["step"]
        record.agreements.clear()

    def twice() -> None:  # between once and as often as backward
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

    run.backward(0)  # one rank's late gradient costs all ranks one more round, of its buckets
    if run.rank == run.world - 1:
        run.backward(1, used=[3], on=[run.rank])
    assert count(run.step) == with_3 and record.agreements == ["step"]


def test_a_static_graph_agrees_once() -> None:
    """And then never again; the sequence stays what it was."""
    script = updates.ranks_that_use_other_parameters_every_step_alike
    results = run_local(3, train, script, {**TINY, "static_graph": True})
    assert all(result == results[0] for result in results)
    asked = [what for what in results[0].agreements if what != "numbers"]
    assert len(asked) == 1, asked
