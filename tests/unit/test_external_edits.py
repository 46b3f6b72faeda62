"""External edits, alone: which parameters were written to or moved, and what the option makes of that."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.nn import Parameter

from bucketwheel.layout.flat_params import ParamInfo
from bucketwheel.optim.external_edits import Edits, ExternalEdits


def watched(policy: str) -> tuple[list[Parameter], ExternalEdits]:
    """Four parameters."""
    params = [Parameter(torch.ones(3)) for _ in range(4)]
    infos = [ParamInfo(i, f"p{i}", p, 0, "element", p.dtype, p.stride(), p.device) for i, p in enumerate(params)]
    edits = ExternalEdits(policy)
    edits.add(infos[:2])
    edits.add(infos[2:])
    return params, edits


POLICIES = ["resync", "error", "ignore"]


@pytest.mark.parametrize("policy", POLICIES)
def test_what_was_written_and_what_was_moved(policy: str) -> None:
    params, edits = watched(policy)
    is_strict = policy == "error"
    nothing = Edits(frozenset(), -1, False)
    assert edits.find() == nothing
    with torch.no_grad():
        params[1].mul_(2)
    assert edits.find() == replace(nothing, refused=1 if is_strict else -1)
    edits.note_written()
    assert edits.find() == nothing
    kept, params[3].data = params[3].data, torch.zeros(3)
    moved = replace(nothing, moved=frozenset({3}), refused=3 if is_strict else -1)
    assert edits.find() == moved
    edits.note_written()
    assert edits.find() == moved
    params[3].data = kept
    edits.note_written()
    assert edits.find() == nothing


@pytest.mark.parametrize("policy", POLICIES)
def test_a_loaded_state_is_followed_and_no_edit(policy: str) -> None:
    params, edits = watched(policy)
    edits.expect_loaded_model()
    loaded = Edits(frozenset(), -1, policy == "ignore")
    with torch.no_grad():
        params[1].mul_(2)
    assert edits.find() == loaded
    params[2].data = torch.zeros(3)
    assert edits.find().refused == (2 if policy == "error" else -1), "moved all the same"
    edits.note_written()
    edits.note_bound()
    assert edits.find() == Edits(frozenset(), -1, False)
