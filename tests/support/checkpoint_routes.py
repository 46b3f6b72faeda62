"""Routes: the ways by which a model and its optimizer are saved and loaded. And a run that takes them."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict as torch_states
from torch.distributed.checkpoint.state_dict import StateDictOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.nn import Parameter
from torch.utils._pytree import tree_map_only

import bucketwheel as bw
from bucketwheel.checkpoint import TensorShard
from bucketwheel.comm.backends import LocalWorld
from tests.support import checkpoint_jobs
from tests.support.bits import assert_bitwise_equal
from tests.support.optim_twins import dyadic, loss_of, make_params, share

KINDS = {**checkpoint_jobs.KINDS, "bf16 states": {"state_dtype": torch.bfloat16}}  # beside fp32 parameters
CUTS: dict[str, dict[str, Any]] = {"rows": {}, "elements": {"granularity": "element"}}


# --- a run -------------------------------------------------------------------------------------------------------------


def two_groups(params: list[Parameter]) -> list[dict[str, Any]]:
    half = len(params) // 2
    return [{"params": params[:half], "lr": 0.05}, {"params": params[half:], "weight_decay": 0.0}]


def one_each(params: list[Parameter]) -> list[dict[str, Any]]:
    return [{"params": [p], "lr": 0.01 * (i + 1)} for i, p in enumerate(params)]


class Training:
    """A model, its optimizer, and gradients that are the same whatever the number of ranks."""

    def __init__(
        self,
        kind: str,
        cut: str = "rows",
        *,
        group: Any = None,
        params: list[Parameter] | None = None,
        seed: int = 0,
        bucket_cap_mb: float = 1e-3,
        grouping: Callable[[list[Parameter]], list[dict[str, Any]]] | None = None,
        **groups: Any,
    ) -> None:
        options = dict(KINDS[kind])
        self.group = group  # of all ranks that train it
        self.rank, self.world = (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))
        dtype = options.pop("dtype", torch.float32)
        self.params = make_params(dtype, seed) if params is None else params
        self.model = nn.Module()
        for i, p in enumerate(self.params):
            self.model.register_parameter(f"p{i}", p)
        grouping = grouping or (one_each if kind == "amsgrad" else two_groups)
        given = [{**group, **CUTS[cut]} for group in grouping(self.params)]
        alone = {"process_group": LocalWorld(1).rank(0)} if group is None else {"process_group": group}
        self.opt = bw.ShardedAdamW(
            given, lr=0.01, weight_decay=0.1, bucket_cap_mb=bucket_cap_mb, **options, **(groups or alone)
        )

    def backward(self, seed: int) -> None:
        grads = share(dyadic(self.params, seed), self.rank, self.world)
        loss_of(self.params, grads, lambda i: (i + seed) % 4 > 0).backward()

    def steps(self, *seeds: int) -> None:
        for seed in seeds:
            self.backward(seed)
            self.opt.step()
            self.opt.zero_grad()
            self.opt.param_groups[0]["lr"] *= 0.5

    def left(self) -> tuple[list[Tensor], dict[str, Any]]:
        self.opt.param_sync()
        return [p.detach().clone() for p in self.params], self.opt.state_dict()

    def expect(self, expected: tuple[list[Tensor], dict[str, Any]], what: str) -> None:
        """``expected``: what a run alone has left."""
        values, saved = self.left()
        assert_bitwise_equal(values, expected[0], f"{what}: parameters")
        assert saved["state"].keys() == expected[1]["state"].keys()
        for i, entry in saved["state"].items():
            whole = expected[1]["state"][i]
            own = {
                name: value.new_empty(value.shape).copy_(whole[name]) if isinstance(value, TensorShard) else whole[name]
                for name, value in entry.items()
            }
            assert_bitwise_equal(entry, own, f"{what}: parameter {i}")
        rates = [[group["lr"] for group in one["param_groups"]] for one in (saved, expected[1])]
        assert rates[0] == rates[1], f"{what}: rates {rates}"


BEFORE, AFTER = (0, 1, 2), (3, 4, 5)


@functools.cache
def uninterrupted(kind: str) -> tuple[list[Tensor], dict[str, Any]]:
    run = Training(kind)
    run.steps(*BEFORE, *AFTER)
    return run.left()


# --- routes ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Route:
    """``save`` may return what waits for it; until that is called the run goes on. ``where`` is a path that is not there yet."""

    save: Callable[[Training, Path], Any]
    load: Callable[[Training, Path], None]


def both(run: Training) -> dict[str, Any]:
    return {"model": run.model.state_dict(), "optim": run.opt.state_dict()}


def set_both(run: Training, state: dict[str, Any]) -> None:
    """Changes nothing in ``state``."""
    given = copy.deepcopy(state["optim"])
    run.model.load_state_dict(state["model"])
    run.opt.load_state_dict(state["optim"])
    assert_bitwise_equal(state["optim"]["state"], given["state"])
    assert state["optim"]["param_groups"] == given["param_groups"]


def dcp_save(run: Training, where: Path) -> None:
    dcp.save(both(run), checkpoint_id=where, process_group=run.group, no_dist=run.group is None)


def async_save(run: Training, where: Path, kind: AsyncCheckpointerType) -> Callable[[], Any]:
    """A process writes by our writer, which is pickled for it."""
    writer = bw.checkpoint.Writer(where, sync=False) if kind is AsyncCheckpointerType.PROCESS else None
    found = dcp.async_save(
        both(run), checkpoint_id=where, storage_writer=writer, process_group=run.group, async_checkpointer_type=kind
    )
    assert isinstance(found, Future)
    return functools.partial(found.result, timeout=60)


def dcp_load(run: Training, where: Path) -> None:
    state = both(run)
    dcp.load(state, checkpoint_id=where, process_group=run.group, no_dist=run.group is None)
    set_both(run, state)


def save_by_writer(run: Training, where: Path) -> None:
    dcp.save(both(run), storage_writer=bw.checkpoint.Writer(where, sync=False), process_group=run.group)


def load_by_reader(run: Training, where: Path) -> None:
    state = both(run)
    dcp.load(state, storage_reader=bw.checkpoint.Reader(where), process_group=run.group)
    set_both(run, state)


def our_save(run: Training, where: Path) -> None:
    bw.checkpoint.save(where, run.model, run.opt)


def our_async_save(run: Training, where: Path) -> Callable[[], Any]:
    return bw.checkpoint.async_save(where, run.model, run.opt).wait


def our_load(run: Training, where: Path) -> None:
    bw.checkpoint.load(where, run.model, run.opt)


def get(run: Training, options: StateDictOptions) -> dict[str, Any]:
    model, optim = torch_states.get_state_dict(run.model, run.opt, options=options)
    return {"model": model, "optim": optim}


def put(run: Training, state: dict[str, Any], options: StateDictOptions) -> None:
    torch_states.set_model_state_dict(run.model, state["model"], options=options)
    torch_states.set_optimizer_state_dict(run.model, run.opt, state["optim"], options=options)


def by_names(**options: Any) -> Route:
    """`get_state_dict`, and `set_model_state_dict` and `set_optimizer_state_dict`."""
    chosen = StateDictOptions(**options)

    def save(run: Training, where: Path) -> None:
        dcp.save(get(run, chosen), checkpoint_id=where, process_group=run.group)

    def load(run: Training, where: Path) -> None:
        state = get(run, chosen)
        dcp.load(state, checkpoint_id=where, process_group=run.group)
        put(run, state, chosen)

    return Route(save, load)


def whole_by_names(is_on_one: bool) -> Route:
    """The same with whole states, in a file that rank 0 writes; ``is_on_one``: which only it has."""

    def save(run: Training, where: Path) -> None:
        state = get(run, StateDictOptions(full_state_dict=True, cpu_offload=is_on_one))
        assert is_on_one is False or run.rank == 0 or state == {"model": {}, "optim": {}}
        if run.rank == 0:
            torch.save(state, where)
        dist.barrier(run.group)

    def load(run: Training, where: Path) -> None:
        broadcasts = is_on_one and run.world == dist.get_world_size()  # torch does it over all ranks there are
        has_it = run.rank == 0 or not broadcasts
        state = torch.load(where, weights_only=True) if has_it else {"model": {}, "optim": {}}
        if broadcasts:  # of which torch loses the strides
            state = tree_map_only(Tensor, Tensor.contiguous, state)
        put(run, state, StateDictOptions(full_state_dict=True, broadcast_from_rank0=broadcasts))

    return Route(save, load)


def save_whole(run: Training, where: Path) -> None:
    state = {"model": run.model.state_dict(), "optim": run.opt.full_state_dict(0, chunk_bytes=1000)}
    if run.rank == 0:
        torch.save(state, where)
    dist.barrier(run.group)


def load_whole(run: Training, where: Path) -> None:
    state = torch.load(where, weights_only=True)
    run.model.load_state_dict(state["model"])
    run.opt.load_full_state_dict(state["optim"] if run.rank == 0 else None, 0, chunk_bytes=1000)


ROUTES = {
    "dcp.save": Route(dcp_save, dcp_load),
    "Writer, Reader": Route(save_by_writer, load_by_reader),
    "get_state_dict": by_names(),
    "get_state_dict, flattened": by_names(flatten_optimizer_state_dict=True),
    "get_state_dict, on the CPU": by_names(cpu_offload=True),
    "get_state_dict, whole": whole_by_names(False),
    "get_state_dict, whole on one": whole_by_names(True),
    "full_state_dict": Route(save_whole, load_whole),
    "bw.checkpoint.save": Route(our_save, our_load),
    # The last three, so that what they save is written while the run goes on.
    "async_save, process": Route(functools.partial(async_save, kind=AsyncCheckpointerType.PROCESS), dcp_load),
    "bw.checkpoint.async_save": Route(our_async_save, our_load),
    "async_save, thread": Route(functools.partial(async_save, kind=AsyncCheckpointerType.THREAD), dcp_load),
}
