"""What an optimizer is given: the checks of its arguments, and the parameters and communicator that come out of them."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from bucketwheel.comm.communicator import Communicator
from bucketwheel.device import CPU, device_index
from bucketwheel.errors import expect_int, expect_number
from bucketwheel.kernels.adam_rows import expect_uniform_flags
from bucketwheel.layout.flat_params import ParamInfo, expect_apart
from bucketwheel.layout.leased_params import home_of, plain_params
from bucketwheel.layout.precision import PARAM_DTYPES, Precision

_MISSPELT = 0.86  # how much of two keys is the same, at least, where one of them is the other, misspelt


def expect_hyperparameters(
    lr: float | Tensor, betas: tuple[float, float], eps: float, weight_decay: float, differentiable: bool
) -> None:
    """torch.optim.AdamW's own checks and texts."""
    if isinstance(lr, Tensor) and lr.numel() != 1:
        raise ValueError("Tensor lr must be 1-element")
    for name, value, what in (
        ("lr", lr, "learning rate"),
        ("eps", eps, "epsilon value"),
        ("weight_decay", weight_decay, "weight_decay value"),
    ):
        expect_number(value, name)
        if not 0.0 <= value:
            raise ValueError(f"Invalid {what}: {value}")
    if not isinstance(betas, Sequence) or len(betas) != 2:
        raise TypeError(f"betas is {betas!r}, expected two numbers")
    for i, beta in enumerate(betas):
        expect_number(beta, f"betas[{i}]")
        if not 0.0 <= beta < 1.0:
            raise ValueError(f"Invalid beta parameter at index {i}: {beta}")
    if differentiable:
        raise ValueError("differentiable=True: a fused sharded step cannot be differentiated")


def expect_group_keys(group: dict[str, Any], read: Mapping[str, Any], options: Collection[str]) -> None:
    """ValueError for keys that look like an option and would do nothing: ``options`` of the constructor, which are for all
    groups, and misspelt ones. Other keys are the user's own. ``read``: what a group may have, with the constructor's values.
    """
    for key in ("capturable", "differentiable"):
        if bool(group.get(key, read[key])) != bool(read[key]):
            raise ValueError(f"a parameter group has {key}={group[key]!r}, the constructor has {read[key]!r}")
    for key in (key for key in group if isinstance(key, str) and key not in read):
        if key in options:
            raise ValueError(
                f"a parameter group has {key!r}, which is an option for all groups: pass it to ShardedAdamW(...)"
            )
        # Short keys and those with a digit (``beta1``) are names of their own.
        is_name = len(key) < 5 or any(map(str.isdigit, key))
        if not is_name and (known := difflib.get_close_matches(key, (*read, *options), 1, _MISSPELT)):
            raise ValueError(
                f"a parameter group has {key!r}, which is unknown: did you mean {known[0]!r}? Rename a key of your own"
            )


@dataclass(frozen=True)
class OptimizerOptions:
    """What ranks must have alike, as `ShardedAdamW` takes it; `expect_equal_layout` compares its text.

    ValueError for options that are wrong whatever the parameters are.
    """

    precision: Precision
    bucket_cap_mb: float | None
    max_inflight_buckets: int
    gradient_average: bool = True  # a description names those that have another value than here
    broadcast_params: bool = True
    overlap_grad_sync: bool = True
    overlap_param_sync: bool = False
    static_graph: bool = False
    capturable: bool = False
    on_external_update: str = "resync"
    full_state_dict: bool = False

    def __post_init__(self) -> None:
        if self.capturable and not self.static_graph:
            raise ValueError("capturable=True needs static_graph=True: the graph fixes which parameters are used")
        if self.on_external_update not in ("resync", "error", "ignore"):
            raise ValueError(
                f"on_external_update must be 'resync', 'error' or 'ignore', got {self.on_external_update!r}"
            )
        expect_int(self.max_inflight_buckets, "max_inflight_buckets")
        if self.bucket_cap_mb is not None:
            expect_number(self.bucket_cap_mb, "bucket_cap_mb")
        if self.max_inflight_buckets < 1 or (self.bucket_cap_mb is not None and self.bucket_cap_mb <= 0):
            raise ValueError(
                f"max_inflight_buckets must be >= 1 and bucket_cap_mb > 0, got {self.max_inflight_buckets} and "
                f"{self.bucket_cap_mb}"
            )

    def bucket_cap_bytes(self, device: int, grad_bytes: int) -> int:
        """``grad_bytes``: of all gradients on a rank. docs/memory.md says why the default is as it is."""
        if self.bucket_cap_mb is not None:
            return int(self.bucket_cap_mb * 2**20)
        return 16 * 2**20 if device == CPU else min(max(grad_bytes // 16, 16 * 2**20), 128 * 2**20)

    def expect_capturable_on(self, device: torch.device, comm: Communicator | None) -> None:
        """ValueError unless steps over ``comm`` (None: of one process) can be captured, if that is asked for."""
        if not self.capturable:
            return
        if device_index(device) == CPU:
            raise ValueError(f"capturable=True is for parameters on CUDA, but they are on {device}")
        if comm is not None and comm.backend != "nccl":
            raise ValueError(
                "capturable=True needs a communicator with backend 'nccl', whose operations can be captured in a CUDA "
                f"graph; this one has backend {comm.backend!r}"
            )
        if comm is not None and self.overlap_param_sync:
            raise ValueError(
                "capturable=True and overlap_param_sync=True exclude each other: a replay cannot wait for "
                "gathers of the step before it"
            )


def _params_in(param_groups: Sequence[dict[str, Any]]) -> Iterator[tuple[int, str, bool, Parameter]]:
    """Yields each parameter with its group, its name, and whether it has one: else the name says where it is."""
    for g, group in enumerate(param_groups):
        names = group.get("param_names") or ()
        if len(names) != len(group["params"]):  # or parameters were put there by hand
            names = [""] * len(group["params"])
        for i, (name, param) in enumerate(zip(names, group["params"], strict=True)):
            yield g, name or f"group {g} parameter {i}", bool(name), param


def frozen_in(param_groups: Sequence[dict[str, Any]]) -> list[tuple[str, Tensor]]:
    """Returns the frozen parameters of the groups, by name."""
    return [(name, param) for _, name, _, param in _params_in(param_groups) if not param.requires_grad]


def collect_params(param_groups: Sequence[dict[str, Any]], known: Collection[Tensor] = ()) -> list[ParamInfo]:
    """The trainable parameters of all groups that are not ``known``, in order; their indices go on behind those.

    ValueError or TypeError naming the first that cannot be trained.
    """
    infos: list[ParamInfo] = []
    devices = {param.device for param in known}
    first: dict[Tensor, str] = {}
    for g, name, is_named, param in _params_in(param_groups):
        if not param.requires_grad or param in known:
            continue
        if param in first:
            raise ValueError(f"parameter {name!r} was passed twice, first as {first[param]!r}; pass it once")
        first[param] = name
        is_sharded = home_of(param) is not None
        if not is_sharded and (type(param.data) is not Tensor or param.layout != torch.strided):
            hint = "; ShardedAdamW shards parameters itself: remove fully_shard and distribute_tensor, or pass p.to_local()"
            raise TypeError(
                f"parameter {name!r} is a {type(param.data).__name__} ({param.layout}); plain tensors only"
                f"{hint if hasattr(param, 'to_local') else ''}"
            )
        if not is_sharded and param.is_neg():
            raise ValueError(
                f"parameter {name!r} is a negative view (is_neg()), whose memory has the opposite sign; "
                "give it memory of its own, p.data = p.data.resolve_neg()"
            )
        if param.device.type not in ("cpu", "cuda") or param.dtype not in PARAM_DTYPES:
            raise ValueError(
                f"parameter {name!r} is {param.dtype} on {param.device}; float32, bfloat16, float16 and "
                "float64 on cpu and cuda are supported"
            )
        devices.add(param.device)
        if len(devices) > 1:
            another = next(iter(devices - {param.device}))
            raise ValueError(f"parameter {name!r} is on {param.device}, others on {another}; move all to one device")
        if param.grad_dtype not in (None, param.dtype):
            raise ValueError(
                f"parameter {name!r} is {param.dtype} and has grad_dtype={param.grad_dtype}, so its placeholder "
                "cannot be its p.grad; set p.grad_dtype = None, which lets gradients have any dtype (accum_dtype "
                "is the dtype of their sums)"
            )
        granularity = param_groups[g].get("granularity")
        if granularity not in ("row", "element", None):
            raise ValueError(
                f"granularity of the group of {name!r} must be 'row', 'element' or None, got {granularity!r}"
            )
        index = len(known) + len(infos)
        kind = (param.dtype, param.stride(), param.device)
        infos.append(ParamInfo(index, name, param, g, granularity, *kind, is_named))
    others = [*frozen_in(param_groups), *(("a parameter given before", p) for p in known)]
    expect_apart(plain_params(infos), [(name, param) for name, param in others if home_of(param) is None])
    expect_uniform_flags(param_groups)
    return infos


def group_texts(param_groups: Sequence[dict[str, Any]]) -> list[str]:
    """What ranks must have in common of their groups, for comparison and for messages."""
    return [
        f"lr {float(g['lr'])}, betas {tuple(map(float, g['betas']))}, eps {float(g['eps'])}, weight_decay "
        f"{float(g['weight_decay'])}, maximize {bool(g['maximize'])}, amsgrad {bool(g['amsgrad'])}, "
        f"decoupled_weight_decay {bool(g['decoupled_weight_decay'])}"
        for g in param_groups
    ]


def of_sharded(
    infos: Sequence[ParamInfo], groups: tuple[Any, Any], options: OptimizerOptions, timeout_s: float | None = None
) -> tuple[Communicator, Communicator | None] | None:
    """The communicators of the model that `bucketwheel.shard` has made of some of the parameters; None: it has of none.

    ValueError where ``groups`` are others, and for options without effect.
    """
    homes = [home_of(info.param) for info in infos]
    by = list(dict.fromkeys(home.sharded_by for home in homes if home is not None and home.sharded_by is not None))
    if not by:
        return None
    if len(by) > 1:
        raise ValueError("the parameters belong to several models that bw.shard sharded; make an optimizer for each")
    found = by[0]
    known = ((None, found.comm, *found.groups[:1]), (None, found.replicate, *found.groups[1:]))
    if any(all(group is not one for one in ones) for group, ones in zip(groups, known, strict=True)):
        raise ValueError(
            "sharded parameters have the process_group and replicate_group of bw.shard: do not pass others"
        )
    if timeout_s is not None:
        raise ValueError(
            f"timeout_s={timeout_s} has no effect: the time limit is that of the process group of bw.shard"
        )
    for info, home in zip(infos, homes, strict=True):
        if home is not None and info.granularity is not None:
            raise ValueError(f"granularity={info.granularity!r} has no effect on {info.name!r}: bw.shard has cut it")
    if options.capturable:
        raise ValueError("capturable=True does not support sharded parameters: their gathers are not captured")
    if all(home is not None for home in homes):
        given = {"bucket_cap_mb": options.bucket_cap_mb, "overlap_param_sync": options.overlap_param_sync or None}
        for name, value in given.items():
            if value is not None:
                raise ValueError(f"{name}={value} has no effect: all parameters are sharded by bw.shard, unit by unit")
    return found.comm, found.replicate
