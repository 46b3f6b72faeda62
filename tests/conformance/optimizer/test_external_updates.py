"""S11: what `step` does where a parameter was written to since the last one, for each ``on_external_update``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from bucketwheel.comm.communicator import Communicator
from bucketwheel.optim.sharded_adamw import ShardedAdamW
from tests.support.bits import assert_bitwise_equal
from tests.support.optim_twins import TINY, Run, dyadic, make_params, on_ranks, run_local

pytestmark = pytest.mark.dist


def run_of(comm: Communicator | None, dtype: torch.dtype, **options: Any) -> Run:
    params = make_params(dtype)
    named = [(f"weight{i}", p) for i, p in enumerate(params)]
    opt = ShardedAdamW(named, 0.01, process_group=comm, **(TINY if comm else {}), **options)
    run = Run(opt, params, comm.rank if comm else 0, comm.size if comm else 1)
    run.backward(0)
    run.step()
    return run


@pytest.mark.parametrize("world", [None, 2])
def test_a_reloaded_parameter_is_the_weight(world: int | None) -> None:
    """A remainder that was kept would be part of it."""

    def body(comm: Communicator | None) -> None:
        run = run_of(comm, torch.bfloat16, master_weights="bf16_remainder")
        run.params[3].data.fill_(2.0)
        run.opt.reload_master_params()
        saved = run.opt.state_dict()["state"][3]["master_param"]
        assert bool((getattr(saved, "piece", saved) == 2.0).all())
        run.opt.close()

    on_ranks(world, body)


def test_a_parameter_of_another_dtype_or_shape_is_named() -> None:
    run = run_of(None, torch.float32)
    run.backward(1)
    for other, match in ((run.params[3].data.bfloat16(), "is torch.bfloat16"), (torch.zeros(3), r"is .*\(3,\)")):
        run.params[3].data = other
        with pytest.raises(RuntimeError, match=f"'weight3' was torch.float32.*{match}"):
            run.opt.step()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("world", [None, 2])
def test_what_is_clamped_or_half_loaded_is_the_weight(world: int | None, dtype: torch.dtype) -> None:
    """As of `torch.optim.AdamW` over float32 masters that follow by hand: through ``p.data``, which raises no version."""

    def edit(params: Sequence[Tensor], step: int) -> None:
        for p in params:
            p.data.clamp_(-0.25, 0.25)
        params[3].data[step * 10 :, step:].fill_(step / 8)

    def body(comm: Communicator | None) -> list[Tensor]:
        run = run_of(comm, dtype)
        for step in range(1, 4):
            edit(run.params, step)
            run.backward(step)
            run.step()
        return [p.detach().clone() for p in run.params]

    shown = [p.detach() for p in make_params(dtype)]
    masters = [Parameter(p.float()) for p in shown]
    theirs = torch.optim.AdamW(masters, 0.01)
    for step in range(4):
        if step:
            edit(shown, step)
        for p, master, grad in zip(shown, masters, dyadic(masters, step), strict=True):
            master.data = torch.where(master.to(dtype) == p, master.detach(), p.float())
            master.grad = grad
        theirs.step()
        shown = [master.detach().to(dtype) for master in masters]
    for values in on_ranks(world, body):
        torch.testing.assert_close(values, shown, rtol=torch.finfo(dtype).eps, atol=1e-6)


def written_by_collectives(rank: int, world: int, how: str) -> None:
    """Rank 0 alone loads, and broadcasts; then the ranks average what each has added. No call of c10d raises a version, so
    that "error" takes it as "resync" does."""
    params = make_params(torch.bfloat16)[:7]
    named = [(f"weight{i}", p) for i, p in enumerate(params)]
    opt = ShardedAdamW(named, 0.0, weight_decay=0.0, on_external_update=how, **TINY)
    for collective in ("broadcast", "all_reduce"):
        before = [p.detach().clone() for p in params]
        for p in params:
            if collective == "broadcast":
                if rank == 0:
                    p.data.mul_(-2.0)
                dist.broadcast(p.data, 0)
            else:
                p.data.add_(rank + 1)
                with torch.no_grad():
                    dist.all_reduce(p)
        written = [p.detach().clone() for p in params]
        sum(p.sum() for p in params).backward()
        opt.step()
        opt.zero_grad()
        assert_bitwise_equal([p.detach() for p in params], before if how == "ignore" else written)
    opt.close()


@pytest.mark.parametrize("how", ["resync", "ignore", "error"])
def test_collectives_write_to_parameters(rank_pool: Any, how: str) -> None:
    rank_pool(2).run(written_by_collectives, how, timeout_s=30)


@pytest.mark.parametrize("how", ["resync", "ignore", "error"])
def test_a_parameter_that_cannot_come_back_is_refused_on_all_ranks(how: str) -> None:
    """One rank has converted a parameter, and replaced another one: nobody steps, and once it is put right all do."""

    def body(comm: Communicator) -> list[Any]:
        run = run_of(comm, torch.float32, on_external_update=how)
        before = [p.detach().clone() for p in run.params]
        run.backward(1)
        if comm.rank == 1:
            run.params[0].data = run.params[0].data.clone()
            run.params[3].data = run.params[3].data.bfloat16()
            with pytest.raises(RuntimeError, match="parameter 'weight3' was torch.float32"):
                run.opt.reload_master_params()  # local
        text = "parameter 'weight3' was torch.float32.*is torch.bfloat16.*by rank: step, refused"
        with pytest.raises(RuntimeError, match=("^" if comm.rank == 1 else "^rank 1: ") + text):
            run.opt.step()
        if comm.rank == 1:
            run.params[3].data = before[3].clone()
        assert_bitwise_equal([p.detach() for p in run.params], before)
        if how == "error":
            with pytest.raises(RuntimeError, match="'weight0' was modified on rank 1"):
                run.opt.step()
            run.opt.reload_master_params()
        run.opt.step()
        assert not run.opt._engine._edits.find().moved, "all are in flat memory again"
        values = [p.detach().clone() for p in run.params]
        run.opt.close()
        return values

    def undisturbed(comm: Communicator) -> list[Any]:
        run = run_of(comm, torch.float32)
        run.backward(1)
        run.opt.step()
        return [p.detach() for p in run.params]

    expected = run_local(2, undisturbed)
    for values in run_local(2, body):
        assert_bitwise_equal(values, expected[0])


@pytest.mark.parametrize("how", ["step", "reload", "save"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_memory_that_is_held_is_not_written_to(dtype: torch.dtype, how: str) -> None:
    """Issue 44. One rank exchanges memory: whatever binds it again leaves its holders what they have, or says who holds more."""

    def body(comm: Communicator, is_moved: bool) -> list[Any]:
        run = run_of(comm, dtype)
        flat, kept, texts = run.opt._engine.spaces[0].whole, None, 0
        act = {"step": run.opt.step, "reload": run.opt.reload_master_params, "save": run.opt._engine.bind_moved}[how]
        for moment in range(3) if is_moved and comm.rank == 1 else ():
            before = [p.detach().clone() for p in run.params]
            place, old, other = flat.flat.data_ptr(), run.params[3].data[5:], run.params[1].data
            run.params[3].data = run.params[3].data.clone()
            if moment == 0:  # nobody holds what it had
                del old
            elif moment == 1 and how != "step":
                with pytest.raises(
                    RuntimeError, match="'weight3' new memory .* another tensor uses the memory of 'weight1', which"
                ):
                    act()
                texts += 1
            del other
            run.opt._engine.bind_moved() if how == "step" else act()
            assert (flat.flat.data_ptr() == place) is (moment == 0)
            assert_bitwise_equal([p.detach() for p in run.params], before)
            if moment:
                run.params[3].data.mul_(1.0)
                kept = (old, before[3][5:])
        run.backward(1)
        run.step()
        if kept is not None:
            assert_bitwise_equal([kept[0]], [kept[1]])
        run.backward(2)
        run.step()
        values = [p.detach().clone() for p in run.params]
        run.opt.close()
        if kept is not None:
            assert_bitwise_equal([kept[0]], [kept[1]])
        return values

    expected = run_local(2, lambda comm: body(comm, False))[0]
    for values in run_local(2, lambda comm: body(comm, True)):
        assert_bitwise_equal(values, expected)


@pytest.mark.parametrize("world", [None, 2])
def test_parameters_of_one_optimizer_exchange_their_memory(world: int | None) -> None:
    """Issue 44. And two that share it afterwards would be set apart, over several ranks, as where an optimizer is made."""

    def body(comm: Communicator | None) -> list[Any]:
        params = [Parameter(torch.full((3, 4), float(i))) for i in range(3)]
        params[2].data = params[2].data.t().contiguous().t()
        opt = ShardedAdamW([(f"weight{i}", p) for i, p in enumerate(params)], 0.1, process_group=comm)
        a, b, c = params
        for step in range(3):
            sum((p * (i + 1 + step)).sum() for i, p in enumerate(params)).backward()
            a.data, b.data, c.data = b.data, c.data, a.data
            opt.step()
            opt.zero_grad()
        values = [p.detach().clone() for p in params]
        a.data = b.data
        if comm:
            with pytest.raises(RuntimeError, match=r"'weight[01]' shares memory with 'weight[01]'"):
                opt.step()
            a.data = a.data.clone()
        opt.step()
        opt.close()
        return values

    expected = body(None)
    for values in on_ranks(world, body):
        assert_bitwise_equal(values, expected)


def test_a_parameter_that_was_moved_to_shared_memory_trains_on() -> None:
    """torch moves the storage then, which is that of our own view of the flat buffer too."""

    def body(comm: Communicator, is_moved: bool) -> list[Any]:
        run = run_of(comm, torch.float32)
        if is_moved:
            run.params[3].share_memory_()
            assert run.opt._engine._edits.find().moved == {3}
        run.backward(1)
        run.step()
        assert not run.opt._engine._edits.find().moved, "all are in flat memory again"
        if is_moved:
            run.params[3].share_memory_()
        run.opt.close()
        return [p.detach() for p in run.params]

    expected = run_local(2, lambda comm: body(comm, False))[0]
    for values in run_local(2, lambda comm: body(comm, True)):
        assert_bitwise_equal(values, expected)
