"""States and settings follow the names of parameters, by every way of loading; where names differ nothing is loaded."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

from bucketwheel import checkpoint
from bucketwheel.optim.sharded_adamw import ShardedAdamW
from tests.support.bits import assert_bitwise_equal
from tests.support.checkpoint_jobs import KINDS
from tests.support.optim_twins import on_ranks

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")


class Named:
    """``names``: of layers of one shape, in the order in which they are defined; ``prefix``: before them in the groups."""

    def __init__(
        self, comm: Any, kind: str, names: str = "qkv", how: str = "", prefix: str = "", cut: Any = None
    ) -> None:
        options = dict(KINDS[kind])
        dtype = options.pop("dtype", torch.float32)
        self.model = nn.ModuleDict({name: nn.Linear(16, 16, dtype=dtype) for name in names})
        self.model["frozen"] = nn.Linear(6, 6, bias=False, dtype=dtype).requires_grad_(False)
        self.model["k"].requires_grad_(how != "k is frozen")
        for p in self.model.parameters():
            nn.init.constant_(p, 0.25)  # on all ranks
        named = [(prefix + name, p) for name, p in self.model.named_parameters()]
        split = [[one for one in named if one[1].dim() == dim] for dim in (2, 1)]
        turn = -1 if how == "reversed" else 1
        groups = [{"params": split[0][::turn], "weight_decay": 0.5}, {"params": split[1][::turn], "lr": 0.05}]
        groups = [{**group, "granularity": cut} for group in groups]
        self.opt = ShardedAdamW(groups[::-1] if how == "exchanged" else groups, process_group=comm, **options)

    def step(self) -> None:
        named = sorted(self.model.named_parameters())
        sum((p.float() * (i + 1) / 16).sum() for i, (_, p) in enumerate(named)).backward()
        self.opt.step()
        self.opt.zero_grad()

    def by_name(self) -> Any:
        groups = {p: (g["lr"], g["weight_decay"]) for g in self.opt.param_groups for p in g["params"]}
        named = dict(self.model.named_parameters())
        states = {name: self.opt.full_state(p) for name, p in named.items() if p.requires_grad}
        return states, {name: groups[p] for name, p in named.items()}


def dcp_load(b: Named, folder: Path) -> None:
    state = {"optim": b.opt.state_dict()}
    dcp.load(state, checkpoint_id=folder)
    b.opt.load_state_dict(state["optim"])


def save_torchs_names(a: Named, folder: Path) -> Path:
    state = {"model": a.model.state_dict(), "optim": get_optimizer_state_dict(a.model, a.opt)}
    dcp.save(state, checkpoint_id=folder)
    return folder


# How states are taken out of one job, and how they are brought into another.
SAVE = lambda a, folder: checkpoint.save(folder, a.model, a.opt) or folder  # noqa: E731
LOAD = lambda b, folder: checkpoint.load(folder, b.model, b.opt)  # noqa: E731
LOAD_FULL = lambda b, saved: b.opt.load_full_state_dict(saved, None)  # noqa: E731
ROUTES: dict[str, Any] = {
    "checkpoint": (SAVE, LOAD),
    "full": (lambda a, _: a.opt.full_state_dict(None), LOAD_FULL),
    "full, names": (lambda a, _: a.opt.full_state_dict(None, model=a.model), LOAD_FULL),
    "load_state_dict": (lambda a, _: a.opt.full_state_dict(None), lambda b, saved: b.opt.load_state_dict(saved)),
    "set_optimizer_state_dict": (
        lambda a, _: get_optimizer_state_dict(a.model, a.opt),
        lambda b, saved: set_optimizer_state_dict(b.model, b.opt, saved),
    ),
    "dcp.load": (SAVE, dcp_load),
    "torch's names": (save_torchs_names, LOAD),
}
# dcp.load has no states to read those of other numbers into, and torch leaves out those of frozen parameters.
OTHERS = [{"names": "vqk"}, {"how": "reversed"}, {"how": "exchanged", "prefix": "app.model."}]
OTHERS += [{"how": "reversed", "prefix": "_orig_mod."}, {"names": "vqk", "how": "k is frozen"}]
COUNTS = {"dcp.load": 1, "set_optimizer_state_dict": 4}


@pytest.mark.parametrize("kind", ["fp32", "bf16, master"])
@pytest.mark.parametrize(("world", "route"), [*((None, route) for route in ROUTES), *((2, of) for of in [*ROUTES][:4])])
def test_states_and_settings_follow_names(world: int | None, route: str, kind: str, tmp_path: Path) -> None:
    """Equal shapes took each other's moments, in silence (issue 44)."""
    take, give = ROUTES[route]

    def train(comm: Any) -> None:
        job = Named(comm, kind)
        job.step()
        expected, saved = job.by_name(), take(job, tmp_path)
        for options in OTHERS[: COUNTS.get(route)]:
            job.opt.close()
            job = Named(comm, kind, **options)
            give(job, copy.deepcopy(saved))
            job.model["k"].requires_grad_(True)
            assert_bitwise_equal(job.by_name(), expected, f"{route}, {options}")

    on_ranks(world, train)


def test_a_part_of_one_parameter_is_not_taken_for_that_of_another(tmp_path: Path) -> None:
    """dcp.load reads into the places of numbers, which ranks have divided otherwise."""

    def train(comm: Any) -> None:
        job = Named(comm, "fp32", cut="element")
        job.step()
        SAVE(job, tmp_path)
        job.opt.close()
        job = Named(comm, "fp32", "vqk", cut="element")
        with pytest.raises(ValueError, match=r"in the place of '\w\.weight'"):
            dcp_load(job, tmp_path)
        assert not any(state["exp_avg"].any() for state in job.by_name()[0].values())

    on_ranks(2, train)


@pytest.mark.parametrize("world", [None, 2])
@pytest.mark.parametrize("route", ["checkpoint", "full", "load_state_dict"])
def test_other_names_are_refused(world: int | None, route: str, tmp_path: Path) -> None:
    """Unless one side has none: then parameters go by position, as with torch."""
    take, give = ROUTES[route]

    def train(comm: Any) -> None:
        job = Named(comm, "fp32")
        job.step()
        saved, expected = take(job, tmp_path), job.by_name()
        job.opt.close()
        job = Named(comm, "fp32")
        job.opt.param_groups[1]["param_names"][2] = "renamed"
        with pytest.raises(ValueError, match="parameter group 1 .*'renamed' is only in this group"):
            give(job, copy.deepcopy(saved))
        assert not any(state["exp_avg"].any() for state in job.by_name()[0].values())
        for group in job.opt.param_groups:
            del group["param_names"]
        give(job, copy.deepcopy(saved))
        assert_bitwise_equal(job.by_name(), expected)

    on_ranks(world, train)
