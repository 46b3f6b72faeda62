"""What is gathered when, where it lies, and what a step costs."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bucketwheel as bw
from bucketwheel.comm.communicator import Communicator
from bucketwheel.shard.module import runtime_of
from tests.support.optim_twins import run_local
from tests.support.ranks import RankPool
from tests.support.shard_models import Block, Gpt, lm_loss
from tests.support.shard_twins import expect_twins, steps, whole_params


def made(
    comm: Communicator, model: nn.Module | None = None, optim: dict[str, Any] | None = None, **options: Any
) -> tuple[Any, Any]:
    model = bw.shard(Gpt() if model is None else model, (Block,), group=comm, **options)
    return model, bw.ShardedAdamW(model.parameters(), lr=1e-2, **(optim or {}))


def train(model: Any, opt: Any, count: int, seed: int = 0) -> None:
    for step in range(count):
        lm_loss(model, seed + step).backward()
        opt.step()
        opt.zero_grad()


def test_a_unit_that_is_gathered_ahead_keeps_its_place_until_it_is_used() -> None:
    def body(comm: Communicator) -> None:
        model, opt = made(comm, prefetch=1)
        train(model, opt, 2)
        native = runtime_of(model).native
        with model.full_params():
            values = [p.detach().clone() for p in model.blocks[2].parameters()]
        ahead: list[int] = []

        def in_second(*_: Any) -> None:
            assert native.is_in_flight(3) and not native.is_here(3)
            ahead.append(native.memory(3).data_ptr())
            assert type(model.blocks[2].up.weight) is not nn.Parameter  # nobody has waited for it

        def in_third(*_: Any) -> None:
            assert native.is_here(3) and not native.is_in_flight(3) and native.is_in_flight(4)
            assert native.memory(3).data_ptr() == ahead[0]
            ours = list(model.blocks[2].parameters())
            end = ahead[0] + native.memory(3).nbytes
            for p, q in zip(ours, values, strict=True):
                assert torch.equal(p, q) and ahead[0] <= p.data_ptr() < end

        model.blocks[1].register_forward_pre_hook(in_second)
        model.blocks[2].register_forward_pre_hook(in_third)
        lm_loss(model, 5).backward()
        assert len(ahead) == 1

    run_local(2, body)


class Skips(Gpt):
    skips = False

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.emb(tokens)
        for block in self.blocks[: 2 if self.skips else 4]:
            x = block(x)
        return self.head(self.ln(x))


def test_a_unit_that_is_gathered_ahead_and_never_used_ends_safely_and_is_counted() -> None:
    def script(model: Any, opt: Any, rank: int) -> list[Any]:
        seen = []
        for step in range(6):
            model.skips = step == 3
            seen += steps(lm_loss, 1)(model, opt, rank)
        return seen

    with pytest.warns(UserWarning, match="another order"):
        counts = expect_twins(Skips, (Block,), script)
    assert counts["wasted"] == 1 and counts["wasted_bytes"] > 0 and counts["live"] == 0


def test_pointers_are_those_of_the_gathered_bytes_before_anything_reads_them() -> None:
    def body(comm: Communicator) -> None:
        model, opt = made(comm)
        native, block = runtime_of(model).native, model.blocks[1]
        for name in (block, "blocks.1", model):  # the last: the root
            handle = model.unshard(name)
            assert isinstance(handle, bw.Handle)
            unit = 0 if name is model else 2
            begin, size = native.memory(unit).data_ptr(), native.memory(unit).nbytes
            params = [model.emb.weight] if name is model else list(block.parameters())
            assert all(begin <= p.data_ptr() < begin + size and type(p) is nn.Parameter for p in params)
            handle.wait()
            assert all(p.isfinite().all() for p in params)
        with pytest.raises(ValueError, match="is not a unit"):
            model.unshard("blocks.9")
        train(model, opt, 1)
        assert not native.is_here(2)
        model.unshard_all()
        before = model.residency_counts()["gathers"]
        with torch.no_grad():
            for _ in range(5):
                model(torch.zeros(1, 3, dtype=torch.int64))
        assert model.residency_counts()["gathers"] == before
        train(model, opt, 1)
        with pytest.raises(bw.ShardedParamError):
            block.up.weight.sum()

    run_local(2, body)


@pytest.mark.parametrize(
    "options", [{}, {"prefetch": 2}, {"reshard": {Block: False}}, {"reshard": {"blocks.1": False}}]
)
def test_a_thousand_planned_steps_cost_no_memory(options: Any) -> None:
    def body(comm: Communicator) -> None:
        # No bucket of gradients waits: the bound of max_inflight_buckets is a soft one.
        model, opt = made(comm, Gpt(8, 3), {"max_inflight_buckets": 8}, **options)
        train(model, opt, 3)
        gc.collect()
        pool, before = comm.gathers.pool.stats(), model.residency_counts()
        for step in range(1000):
            lm_loss(model, step % 7).backward()
            opt.step()
            opt.zero_grad()
        after, counts = comm.gathers.pool.stats(), model.residency_counts()
        for what in ("allocations", "acquires", "reserved_bytes", "host_waits", "live_bytes", "high_water_bytes"):
            assert getattr(after, what) == getattr(pool, what), what
        assert counts["peak"] == before["peak"] and counts["divergences"] == counts["wasted"] == counts["side"] == 0

    run_local(2, body)


def _train_gpt(rank: int, world: int) -> list[Tensor]:
    torch.manual_seed(0)
    model = bw.shard(Gpt(), (Block,), prefetch=1)
    opt = bw.ShardedAdamW(model.parameters(), lr=1e-2)
    for step in range(5):
        train(model, opt, 1, step)
        with torch.no_grad():
            model(torch.zeros(1, 3, dtype=torch.int64))
    return whole_params(model)


def test_results_do_not_depend_on_poisoned_memory(rank_pool: Any) -> None:
    """What a unit has left becomes NaN."""
    plain = rank_pool(2).run(_train_gpt)[0]
    with RankPool(2, env={"BW_POOL_POISON": "1"}) as poisoned:
        for ours, theirs in zip(poisoned.run(_train_gpt)[0], plain, strict=True):
            assert torch.equal(ours, theirs) and ours.isfinite().all()


def test_the_report_has_units_order_plan_and_peaks() -> None:
    def body(comm: Communicator) -> None:
        model, opt = made(comm)
        assert "no plan yet" in model.plan_report()
        train(model, opt, 2)
        with torch.no_grad():
            model(torch.zeros(1, 3, dtype=torch.int64))
        with torch.no_grad(), model.regime("generate"):
            model(torch.zeros(1, 3, dtype=torch.int64))
        text = model.plan_report()
        for part in (
            "5 units over 2 ranks",
            "blocks.3: 6 parameters",
            "order of 'train'",
            "order of 'eval'",
            "order of 'generate'",
        ):
            assert part in text, text
        assert "+root +blocks.0 +blocks.1 +blocks.2 +blocks.3 -root -blocks.3 -blocks.2 -blocks.1 -blocks.0 end" in text

    run_local(2, body)


def test_a_regime_has_its_own_record() -> None:
    class Two(Gpt):
        way = 1

        def forward(self, tokens: Tensor) -> Tensor:
            x = self.emb(tokens)
            for block in list(self.blocks)[:: self.way]:
                x = block(x)
            return self.head(self.ln(x))

    def body(comm: Communicator) -> None:
        model, opt = made(comm, Two())
        for step in range(4):
            model.way = 1
            train(model, opt, 1, step)
            model.way = -1
            with torch.no_grad(), model.regime("reversed"):
                model(torch.zeros(1, 3, dtype=torch.int64))
        counts = model.residency_counts()
        assert counts["divergences"] == 0 and counts["wasted"] == 0

    run_local(2, body)


def test_an_engine_and_a_model_that_end_give_their_memory_back() -> None:
    def body(comm: Communicator) -> None:
        live = comm.gathers.pool.stats().live_bytes
        model, opt = made(comm)
        train(model, opt, 3)
        opt.close()
        again = bw.ShardedAdamW(model.parameters(), lr=1e-2)
        train(model, again, 2)
        again.close()
        assert whole_params(model)[0].isfinite().all()
        del model, opt, again
        for _ in range(100):
            gc.collect()
            if comm.gathers.pool.stats().live_bytes == live:
                break
        assert comm.gathers.pool.stats().live_bytes == live

    run_local(1, body)


def test_models_can_be_copied_before_and_not_after() -> None:
    model = Gpt()
    copied = copy.deepcopy(model)
    bw.shard(copied, (Block,), group=bw.LocalWorld(1).rank(0))
    with pytest.raises(TypeError, match="cannot be copied"):
        copy.deepcopy(copied)
    assert isinstance(copied, Gpt) and type(copied).__name__ == "ShardedGpt"


def test_a_graph_of_the_first_step_that_has_no_backward_is_freed() -> None:
    model, opt = made(bw.Communicator(bw.LocalWorld(1).rank(0)))
    seen: list[Any] = []

    class Mark: ...

    def note(module: nn.Module, args: Any, out: Tensor) -> None:
        out.grad_fn.metadata["mark"] = mark = Mark()
        seen.append(weakref.ref(mark))

    model.blocks[1].register_forward_hook(note)
    loss = lm_loss(model, 0)
    assert seen[0]() is not None
    del loss
    assert seen[0]() is None
    train(model, opt, 2)


def test_profilers_see_gathers_and_reductions_by_name() -> None:
    model, opt = made(bw.Communicator(bw.LocalWorld(1).rank(0)))
    train(model, opt, 2)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        train(model, opt, 1)
    names = {event.key for event in profile.key_averages()}
    assert {f"bucketwheel.gather {way} of blocks.{i}" for way in ("forward", "backward") for i in range(4)} < names
    assert {f"bucketwheel.reduce bucket {i}" for i in range(5)} < names
