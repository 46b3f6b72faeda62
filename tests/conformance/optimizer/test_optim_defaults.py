"""torch's defaults of dtype and device: what the library makes for itself does not follow them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

import bucketwheel as bw
from tests.conformance.optimizer.test_optim_compiled import Model, by_every_method, by_stock_code, usual
from tests.support.bits import assert_bitwise_equal


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


DEFAULTS: dict[str, Callable[[], Any]] = {
    "device": lambda: torch.device("meta"),  # stands for one that is not the parameters', set_default_device too
    "bfloat16": lambda: default_dtype(torch.bfloat16),
    "float64": lambda: default_dtype(torch.float64),
}


def clipped_by_a_number(opt: bw.ShardedAdamW, model: Model, x: Tensor) -> Tensor:
    model(x).square().sum().backward()
    opt.clip_grads_with_norm_(0.1, 0.7)
    seen = opt.full_grad(model.head.weight)
    assert seen is not None
    opt.clip_grad_norm_(0.5, norm_type=1.0)
    opt.step()
    opt.zero_grad()
    return seen.clone()


def life(make: Callable[[], bw.Communicator | None], dtype: torch.dtype) -> Callable[[], list[Any]]:
    """Everything of an optimizer, its communicator too. The model and its inputs are made before."""
    torch.manual_seed(0)
    model, x = Model().to(dtype), torch.randn(2, 4, dtype=dtype)
    late = torch.nn.Parameter(torch.ones(3, dtype=dtype))

    def run() -> list[Any]:
        comm = make()
        opt = bw.ShardedAdamW(model.parameters(), lr=0.05, process_group=comm, amsgrad=True, bucket_cap_mb=1e-4)
        seen = [loop(opt, model, x) for loop in (usual, by_stock_code, by_every_method, clipped_by_a_number)]
        opt.load_state_dict(opt.state_dict())
        opt.add_param_group({"params": [late]})
        (late * 2).sum().backward()
        usual(opt, model, x)
        opt.reload_master_params()
        opt.describe(), opt.memory_summary()
        opt.close()
        if comm is not None:
            full = x.new_empty(comm.size * x.numel())
            bw.all_gather(full, x.flatten(), comm).wait()
            seen += [full, bw.l2_norm([x.float()], per_tensor=True)]
            comm.close()
        return [*(value.detach() for value in seen), *(p.detach() for p in [*model.parameters(), late])]

    return run


def expect_alike(make: Callable[[], bw.Communicator | None]) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        expected = life(make, dtype)()
        for name, defaults in DEFAULTS.items():
            run = life(make, dtype)
            with defaults():
                found = run()
            assert_bitwise_equal(found, expected, f"{name}, {dtype}")


def on_ranks(rank: int, world: int, backend: str | None) -> None:
    expect_alike(lambda: bw.Communicator(backend=backend, timeout_s=30) if backend else None)


@pytest.mark.parametrize("backend", [None, "shm", "c10d"])
def test_defaults_change_nothing(backend: str | None, rank_pool: Any) -> None:
    rank_pool(2).run(on_ranks, backend, timeout_s=90) if backend else on_ranks(0, 1, None)
