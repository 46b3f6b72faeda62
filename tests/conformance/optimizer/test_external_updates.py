"""S11: what `step` does where a parameter was written to since the last one, for each ``on_external_update``."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import Parameter

from bucketwheel.comm.communicator import Communicator
from bucketwheel.optim.sharded_adamw import ShardedAdamW
from bucketwheel.testing import assert_bitwise_equal
from tests.support.optim_twins import TINY, Run, make_params, on_ranks, run_local

pytestmark = pytest.mark.dist

WORLDS = [None, 1, 2, 3]


def run_of(comm: Communicator | None, dtype: torch.dtype, **options: Any) -> Run:
    params = make_params(dtype)
    named = [(f"weight{i}", p) for i, p in enumerate(params)]
    opt = ShardedAdamW(named, 0.01, process_group=comm, **(TINY if comm else {}), **options)
    run = Run(opt, params, comm.rank if comm else 0, comm.size if comm else 1)
    run.backward(0)
    run.step()
    return run


def behind_the_version(params: list[Parameter]) -> None:
    params[3].data.mul_(2)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("how", ["resync", "ignore", "error"])
def test_edits_that_nobody_sees_are_taken_when_told(how: str, world: int | None) -> None:
    """``p.data`` has a version of its own. Untold, the master wins; told, the step goes on from the new value."""

    def body(comm: Communicator | None) -> None:
        ends = []
        for tells in (False, True):
            run = run_of(comm, torch.bfloat16, on_external_update=how)
            was = run.params[3].detach().clone()
            behind_the_version(run.params)
            if tells:
                run.opt.reload_master_params()
            run.backward(1)
            run.step()
            ends.append(torch.linalg.vector_norm((run.params[3].detach() - was).float()).item())
            run.opt.close()
        untold, told = ends
        assert untold < 0.2 * told, "the step is small, what was written is not"

    on_ranks(world, body)


@pytest.mark.parametrize("world", WORLDS)
def test_loading_a_checkpoint_is_no_edit(world: int | None) -> None:
    """Model and optimizer may be loaded in any order, whatever ``on_external_update`` says."""

    def body(comm: Communicator | None) -> None:
        run = run_of(comm, torch.bfloat16, on_external_update="error")
        saved = run.opt.state_dict(), {str(i): p.detach().clone() for i, p in enumerate(run.params)}
        run.backward(1)
        run.step()
        run.opt.load_state_dict(saved[0])
        torch.nn.ParameterList(run.params).load_state_dict(saved[1])
        run.backward(1)
        run.step()
        run.opt.close()

    on_ranks(world, body)


@pytest.mark.parametrize("world", WORLDS)
def test_a_reloaded_parameter_is_the_weight(world: int | None) -> None:
    """A remainder that was kept would be part of it."""

    def body(comm: Communicator | None) -> None:
        run = run_of(comm, torch.bfloat16, master_weights="bf16_remainder")
        run.params[3].data.fill_(2.0)
        run.opt.reload_master_params()
        saved = run.opt.state_dict()["state"][3]["master_param"]
        assert bool((saved == 2.0).all())
        run.opt.close()

    on_ranks(world, body)


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


@pytest.mark.parametrize("world", [1, 2])
def test_a_parameter_that_was_moved_to_shared_memory_trains_on(world: int) -> None:
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

    expected = run_local(world, lambda comm: body(comm, False))[0]
    for values in run_local(world, lambda comm: body(comm, True)):
        assert_bitwise_equal(values, expected)


def test_another_word_is_refused() -> None:
    with pytest.raises(ValueError, match="on_external_update must be 'resync', 'error' or 'ignore', got 'follow'"):
        ShardedAdamW(make_params(), on_external_update="follow")
