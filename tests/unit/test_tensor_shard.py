"""TensorShard: a rank's part of a tensor answers what is right of a part, and refuses what is not."""

from __future__ import annotations

import copy
import io
import pickle
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor

from bucketwheel.checkpoint import TensorShard

WHOLE = torch.arange(24, dtype=torch.float32).view(4, 6)


def shard_of(whole: Tensor, *ranges: tuple[int, int]) -> TensorShard:
    flat = whole.as_strided((whole.numel(),), (1,))
    piece = torch.cat([flat[begin:end] for begin, end in ranges]) if ranges else flat[:0].clone()
    return TensorShard(piece, whole.shape, whole.stride(), ranges, (1, 3), "w")


@pytest.mark.parametrize("whole", [WHOLE, WHOLE.t(), WHOLE.view(2, 3, 2, 2).to(memory_format=torch.channels_last)])
def test_boxes_show_the_elements_of_the_whole(whole: Tensor) -> None:
    shard = shard_of(whole, (2, 5), (11, 24))
    seen = 0
    for box in shard.boxes:
        there = whole
        for dim, (offset, size) in enumerate(zip(box.offsets, box.sizes, strict=True)):
            there = there.narrow(dim, offset, size)
        assert torch.equal(shard.view_of(box), there)
        seen += there.numel()
    assert seen == 16
    empty = shard._like(torch.zeros(16))
    empty.copy_(whole)
    assert torch.equal(empty, shard)


def test_copies_are_parts_too_with_memory_of_their_own() -> None:
    shard = shard_of(WHOLE, (3, 9))
    file = io.BytesIO()
    torch.save({"w": shard}, file)
    copies = [
        copy.deepcopy(shard),
        shard.clone(),
        torch.load(io.BytesIO(file.getvalue()), weights_only=True)["w"],
        shard.new_empty(shard.size()).copy_(shard),
    ]
    for other in copies:
        assert torch.equal(other, shard)
        assert (other.part, other.param_name, other.stride()) == ((1, 3), "w", (6, 1))
        other.piece.zero_()
        assert not torch.equal(other, shard)
    assert shard.to(torch.float64).piece.dtype == torch.float64
    assert shard.cpu() is shard
    assert not torch.equal(shard, shard_of(WHOLE, (4, 10)))


@pytest.mark.parametrize(
    "use",
    [
        lambda shard: shard + 1,
        lambda shard: torch.ones(4, 6) * shard,
        lambda shard: torch.ones(4, 6).copy_(shard),
        lambda shard: torch._foreach_add([shard], 1.0),
        lambda shard: shard[0],
        lambda shard: shard.sum(),
        lambda shard: shard.numpy(),
        lambda shard: shard.tolist(),
        lambda shard: shard.zero_(),
        lambda shard: shard.view(-1),
    ],
)
def test_what_needs_the_whole_is_refused_by_name(use: Any) -> None:
    with pytest.raises(RuntimeError, match=r"all of 'w', but this is rank 1's part of 3.*full_state_dict\(\)"):
        use(shard_of(WHOLE, (0, 6)))


def test_it_takes_only_what_is_of_its_elements() -> None:
    shard = shard_of(WHOLE, (0, 6))
    with pytest.raises(RuntimeError, match=r"needs a tensor of its shape, got \(6, 4\)"):
        shard.copy_(WHOLE.t())
    with pytest.raises(RuntimeError, match="hold different elements"):
        shard.copy_(shard_of(WHOLE, (6, 12)))
    with pytest.raises(ValueError, match=r"shape \(5,\), expected the 6 elements"):
        TensorShard(torch.zeros(5), (4, 6), (6, 1), [(0, 6)], (0, 1))


def test_a_process_that_loads_a_shard_needs_no_native_code() -> None:
    """The one of `async_save` writes files, nothing else."""
    code = (
        "import pickle, sys\n"
        "given = pickle.load(sys.stdin.buffer)\n"
        "assert given.piece.tolist() == [3.0, 4.0], given\n"
        "assert 'bucketwheel._cpu' not in sys.modules, 'native code is loaded'\n"
    )
    given = TensorShard(torch.tensor([3.0, 4.0]), (2,), (1,), [(0, 2)], (0, 1))
    subprocess.run([sys.executable, "-c", code], input=pickle.dumps(given), check=True, timeout=120)
