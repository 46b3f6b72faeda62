"""What an optimizer says of itself: its table, its bytes, and the warning of padding."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch.nn import Parameter

from bucketwheel.comm.communicator import Communicator
from bucketwheel.optim.sharded_adamw import ShardedAdamW
from tests.support.optim_twins import dyadic, loss_of, run_local, share
from tests.support.replica_ranks import with_replicas

pytestmark = pytest.mark.dist


def named() -> list[tuple[str, Parameter]]:
    """Sixteen layers of 64 x 64 in bfloat16, each with a float32 norm."""
    found = []
    for i in range(16):
        found.append((f"layers.{i}.weight", Parameter(torch.zeros(64, 64, dtype=torch.bfloat16))))
        found.append((f"layers.{i}.norm", Parameter(torch.zeros(60))))
    return found


TABLE = """\
sharded over 2 ranks (local)
parameters: bfloat16, float32; reduce_dtype=float32; master_weights='bf16_remainder'; amsgrad
overlap_param_sync=True, max_inflight_buckets=3, buckets of 128.00 KiB
bucket     wire    MiB  params  padding  cuts  shard bytes  from, to
     0  float32  0.125       8    0.0 %  rows       65,536  layers.15.weight, layers.8.weight
     1  float32  0.004      16    6.2 %  rows        2,048  layers.15.norm, layers.0.norm
     2  float32  0.125       8    0.0 %  rows       65,536  layers.7.weight, layers.0.weight
total: 32 parameters, 32 in one box a rank, 66,496 elements, 0.1 % padding, 3 buckets
expected peak of a rank: 984.00 KiB (params 132.00 KiB, grads 130.00 KiB, states 454.00 KiB, buckets 260.00 KiB, autograd 8.00 KiB); buckets by plan: 260.00 KiB, load 260.00 KiB"""


def test_the_table_of_a_sharded_optimizer() -> None:
    def body(comm: Communicator) -> str:
        opt = ShardedAdamW(
            named(),
            amsgrad=True,
            process_group=comm,
            bucket_cap_mb=1 / 8,
            reduce_dtype=torch.float32,
            master_weights="bf16_remainder",
            overlap_param_sync=True,
            max_inflight_buckets=3,
        )
        text = opt.describe()
        params = opt.param_groups[0]["params"]
        for _ in range(2):
            loss_of(params, share(dyadic(params, 0), comm.rank, comm.size)).backward()
            opt.step()
            opt.zero_grad()
        assert opt.describe() == text, "nothing in it changes"
        opt.close()
        return text

    for text in run_local(2, body):
        assert text == TABLE


@pytest.mark.parametrize("granularity, cuts", [(None, "rows"), ("row", "rows"), ("element", "elements")])
def test_buckets_with_element_cuts_are_named(granularity: Any, cuts: str) -> None:
    """Matrices with rows of 96, one of them transposed, and a vector that pushes them off the boundaries of four shards."""

    def body(comm: Communicator) -> list[str]:
        weights = [torch.zeros(40, 96), torch.zeros(100), torch.zeros(96, 40).t(), torch.zeros(400, 96)]
        params = [(f"p{i}", Parameter(weight)) for i, weight in enumerate(weights)]
        group = {"params": params} if granularity is None else {"params": params, "granularity": granularity}
        opt = ShardedAdamW([group], process_group=comm, bucket_cap_mb=0.15)
        lines = opt.describe().splitlines()
        opt.close()
        return lines

    for lines in run_local(4, body):
        head = next(i for i, line in enumerate(lines) if line.startswith("bucket"))
        column = lines[head].split().index("cuts") + 1  # "0.0 %" is two
        found = {line.split()[column] for line in lines[head + 1 : -2]}
        in_one_box = int(re.findall(r"4 parameters, (\d) in one box a rank", lines[-2])[0])
        assert (found == {"rows"}, in_one_box == 4) == (cuts == "rows", cuts == "rows") and cuts in found, lines


def test_the_table_with_replicas_and_of_one_process() -> None:
    def body(rank: int, shard: Communicator, replicate: Communicator) -> str:
        groups: dict[str, Any] = {"process_group": shard, "replicate_group": replicate}
        opt = ShardedAdamW(named(), **groups, gradient_average=False, static_graph=True)
        text = opt.describe()
        opt.close()
        return text

    texts = with_replicas(2, 3, body)
    assert len(set(texts)) == 1
    lines = texts[0].splitlines()
    assert lines[0] == "sharded over 2 ranks (local), replicated 3 times (local)"
    assert lines[2] == "gradient_average=False, static_graph=True, max_inflight_buckets=2, buckets of 16.00 MiB"
    assert "partial_sums 131.00 KiB" in lines[-1]  # 128 and 2 KiB, rounded up to threes and to 512 bytes

    local = ShardedAdamW(named(), state_dtype=torch.bfloat16)
    lines = local.describe().splitlines()
    assert lines[0] == "local: one process, 32 parameters, nothing is sharded"
    assert lines[1] == "parameters: bfloat16, float32; state_dtype=bfloat16"
    assert lines[3].split()[:5] == ["bfloat16", "16", "65,536", "131,072", "524,288"]
    assert lines[3].endswith("  layers.0.weight, layers.15.weight")
    assert lines[4].split() == ["float32", "16", "960", "3,840", "3,840", "layers.0.norm,", "layers.15.norm"]
    assert f"({2 * (131072 + 3840) + 524288 + 3840:,} bytes" in lines[5]


def test_the_summary_of_one_process_is_that_of_its_tensors() -> None:
    params = named()
    opt = ShardedAdamW(params, amsgrad=True)
    found = opt.memory_summary()
    numel, halves = 16 * 4096 + 16 * 60, 16 * 4096
    moments = dict.fromkeys(("exp_avg", "exp_avg_sq", "max_exp_avg_sq"), 4 * numel)
    states = {"states": 12 * numel + 4 * halves, **moments, "master_param": 4 * halves}
    expected = {"params": 2 * halves + 4 * 960, **states, "bookkeeping": 8 * 32}
    assert {name: nbytes for name, nbytes in found.items() if nbytes} == expected
    params[0][1].float().sum().backward()
    assert opt.memory_summary()["grads"] == 2 * 4096
