"""External edits, alone: which parameters were written to or moved, and what the option makes of that."""

from __future__ import annotations

from itertools import compress

import pytest
import torch
from torch.autograd.graph import increment_version
from torch.nn import Parameter

from bucketwheel.layout.flat_params import ParamInfo
from bucketwheel.optim.external_edits import ExternalEdits


def watched(policy: str, *, chunks: int = 1) -> tuple[list[Parameter], ExternalEdits]:
    """Four parameters; ``chunks`` of them share a version counter."""
    params = [Parameter(part) for part in torch.ones(3 * chunks).chunk(chunks)]
    params += [Parameter(torch.ones(3)) for _ in range(4 - chunks)]
    infos = [ParamInfo(i, f"p{i}", p, 0, 1, p.dtype, p.stride(), p.device) for i, p in enumerate(params)]
    edits = ExternalEdits(policy)
    edits.add(infos[:2])
    edits.add(infos[2:])
    return params, edits


@pytest.mark.parametrize(
    ("policy", "followed", "refused"), [("resync", {1, 3}, -1), ("error", {1, 3}, 1), ("ignore", set(), -1)]
)
def test_what_was_written_and_what_was_moved(policy: str, followed: set[int], refused: int) -> None:
    params, edits = watched(policy)
    assert edits.find() == ExternalEdits(policy).find()
    with torch.no_grad():
        params[1].mul_(2)
    kept, params[3].data = params[3].data, torch.zeros(3)
    found = edits.find()
    assert (found.moved, found.followed, found.refused) == ({3}, followed, refused)
    edits.note_written()
    assert edits.find().moved == {3}
    params[3].data = kept
    edits.note_written()
    assert not edits.find().followed and not edits.find().moved


@pytest.mark.parametrize("policy", ["resync", "error", "ignore"])
def test_a_loaded_state_is_followed_and_no_edit(policy: str) -> None:
    params, edits = watched(policy)
    edits.expect_loaded_model()
    assert edits.find().followed == {0, 1, 2, 3} and edits.find().refused == -1
    params[2].data = torch.zeros(3)
    assert edits.find().refused == (2 if policy == "error" else -1), "moved all the same"
    edits.note_written()
    edits.note_bound()
    assert edits.find() == ExternalEdits(policy).find()


@pytest.mark.parametrize("chunks", [1, 3])
def test_no_step_is_taken_for_an_edit(chunks: int) -> None:
    params, edits = watched("error", chunks=chunks)
    for used in (b"\1\1\1\1", b"\1\1\1\1", b"\1\0\0\1", b"\1\0\0\1", b"\0\1\1\0", b"\1\1\1\1"):
        found = edits.find()
        assert found == ExternalEdits("error").find()
        increment_version(list(compress(params, used)))
        edits.note_step(found, used)
    with torch.no_grad():
        params[3].mul_(2)
    assert edits.find().refused == 3
