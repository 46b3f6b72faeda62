"""A training job for tests of checkpoints: a model with every kind of parameter, frozen and tied ones, and a buffer."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint import DefaultSavePlanner, Metadata
from torch.nn import Parameter

from bucketwheel.optim.sharded_adamw import ShardedAdamW
from tests.support.optim_twins import TINY, dyadic, loss_of, make_params, share

FP32, BF16 = torch.float32, torch.bfloat16
KINDS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16, master": {"dtype": BF16, "master_weights": "fp32"},
    "bf16, remainder": {"dtype": BF16, "master_weights": "bf16_remainder"},
    "amsgrad": {"amsgrad": True},
    "bf16 states": {"dtype": BF16, "state_dtype": BF16},
}


class Model(nn.Module):
    """``seed``: of the values; models of other seeds differ in every tensor."""

    def __init__(self, dtype: torch.dtype = FP32, seed: int = 0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        large = Parameter(torch.randn(96, 65, generator=generator).to(dtype))
        self.weights = nn.ParameterList([*make_params(dtype, seed), large])
        self.frozen = Parameter(torch.full((6, 2), 3.0 + seed, dtype=dtype), requires_grad=False)
        self.tied = self.weights[0]
        self.register_buffer("mean", torch.arange(5.0) + seed)
        self.register_buffer("batches", torch.tensor(seed))


class Job:
    """``groups``: the arguments of the optimizer that say which ranks there are; ``rank`` and ``world``: of all of them;
    ``frozen``: a weight that is."""

    def __init__(
        self,
        groups: dict[str, Any],
        rank: int = 0,
        world: int = 1,
        *,
        dtype: torch.dtype = FP32,
        seed: int = 0,
        cut: str = "row",
        frozen: int | None = None,
        **options: Any,
    ) -> None:
        self.rank, self.world = rank, world
        self.model = Model(dtype, seed)
        if frozen is not None:
            self.model.weights[frozen].requires_grad_(False)
        named = [(name, p) for name, p in self.model.named_parameters()]
        halves = [{"params": named[:4], "granularity": cut}, {"params": named[4:], "lr": 0.05, "granularity": cut}]
        self.opt = ShardedAdamW(halves, lr=0.1, **groups, **{**TINY, **options})

    @property
    def params(self) -> list[Parameter]:
        return list(self.model.weights)

    def backward(self, seed: int) -> None:
        grads = dyadic(self.params, seed)
        loss_of(self.params, share(grads, self.rank, self.world)).backward()

    def steps(self, *seeds: int) -> None:
        for seed in seeds:
            self.backward(seed)
            self.opt.step()
            self.opt.zero_grad()

    def values(self) -> dict[str, Any]:
        """All that a checkpoint has, on every rank. Collective."""
        states = {i: self.opt.full_state(p) for i, p in enumerate(self.params)}
        rates = [group["lr"] for group in self.opt.param_groups]
        return {"model": _copies(self.model.state_dict()), "states": states, "rates": rates}


def of(comm: Any, **options: Any) -> Job:
    """``comm``: a communicator, or None for this process alone."""
    rank, world = (0, 1) if comm is None else (comm.rank, comm.size)
    return Job({"process_group": comm}, rank, world, **options)


def _copies(tensors: dict[str, Any]) -> dict[str, Any]:
    return {name: t.detach().clone() if isinstance(t, Tensor) else t for name, t in tensors.items()}


def sizes_of(folder: Any) -> Sequence[int]:
    """Of the data files of a checkpoint."""
    return [path.stat().st_size for path in sorted(folder.glob("data-*/*"))]


def save_parts(states: Sequence[dict[str, Any]], writer: Any) -> None:
    """What `dcp.save` does in as many processes."""
    planners = [DefaultSavePlanner() for _ in states]
    for rank, (planner, state) in enumerate(zip(planners, states, strict=True)):
        planner.set_up_planner(state, is_coordinator=rank == 0)
    plans, metadata = planners[0].create_global_plan([planner.create_local_plan() for planner in planners])
    writer.set_up_storage_writer(True)
    finished = [planner.finish_plan(plan) for planner, plan in zip(planners, plans, strict=True)]
    plans = writer.prepare_global_plan(finished)
    results = [writer.write_data(plan, planner).value() for planner, plan in zip(planners, plans, strict=True)]
    writer.finish(metadata, results)


def pickled(folder: Path) -> Metadata:
    return pickle.loads((folder / ".metadata").read_bytes())


class Calls:
    """Its pickle calls a function."""

    def __init__(self, *call: Any) -> None:
        self.call = call

    def __reduce__(self) -> Any:
        return self.call[0], self.call[1:]


def damage(folder: Path, of: bytes) -> None:
    """Flip one bit of the data file where these bytes are."""
    (path,) = folder.glob("data-*/*.distcp")
    content = bytearray(path.read_bytes())
    content[content.index(of)] ^= 4
    path.write_bytes(content)
