"""The errors as Python values: what they derive from, what they carry, and that copies and pickles carry it too."""

from __future__ import annotations

import copy
import pickle
import signal
from typing import Any

import pytest
import torch

import bucketwheel
from bucketwheel import errors
from bucketwheel.comm.communicator import Communicator
from bucketwheel.errors import ClosedError, CommError, CommTimeout, Error, MismatchError, PeerError
from bucketwheel.kernels.ops import all_gather

FACTS: dict[str, Any] = {
    "op": "all_gather",
    "seq": 7,
    "rank": 3,
    "nccl_code": 6,
    "last_error": "no route",
    "reason": "why",
}
KINDS = [name for name in errors.__all__ if isinstance(getattr(errors, name), type)]
COMM_ERRORS = (CommError, PeerError, CommTimeout, MismatchError, ClosedError)


def test_all_have_one_root() -> None:
    for name in KINDS:
        kind = getattr(errors, name)
        assert issubclass(kind, Error) and issubclass(kind, RuntimeError), name
    for kind in COMM_ERRORS:
        assert issubclass(kind, CommError)
    assert issubclass(CommTimeout, TimeoutError)


def test_other_optimizers_are_named_with_what_to_use() -> None:
    """issue 44"""
    by_hand = "bw.reduce_scatter and bw.all_gather, as in examples/zero1_by_hand.py$"
    wanted = {
        name: f": bw has Adam and AdamW .*; use torch.optim.SGD with .* {by_hand}" for name in ("SGD", "ShardedSGD")
    }
    wanted |= {
        name: f": bw has Adam and AdamW .*; use {name} with .* {by_hand}" for name in ("Lion", "LAMB", "AdamW8bit")
    }
    wanted |= {name: ": use bw.ShardedAdamW.*" for name in ("AdamW", "Adam", "ShardedAdam", "ShardedAdamw")}
    wanted |= {name: "$" for name in ("nothing", "Sharded", "__path_hooks__", "missing_name")}
    for name, says in wanted.items():
        with pytest.raises(AttributeError, match=f"^module 'bucketwheel' has no attribute '{name}'{says}"):
            getattr(bucketwheel, name)
    assert not hasattr(bucketwheel, "SGD") and "SGD" not in dir(bucketwheel)
    with pytest.raises(ImportError, match="cannot import name 'SGD'"):
        exec("from bucketwheel import SGD")


def test_what_is_not_known_has_its_default() -> None:
    unknown = {"op": "", "seq": 0, "rank": -1, "nccl_code": None, "last_error": "", "reason": "what happened"}
    for kind in COMM_ERRORS:
        error = kind("what happened")
        assert (str(error), error.args) == ("what happened", ("what happened",))
        assert vars(error) == (unknown | {"last_seqs": ()} if kind is CommTimeout else unknown)


@pytest.mark.parametrize("again", [copy.deepcopy, lambda error: pickle.loads(pickle.dumps(error))])
def test_copies_and_pickles_carry_everything(again: Any) -> None:
    for kind in (getattr(errors, name) for name in KINDS):
        facts = FACTS if issubclass(kind, CommError) else {}
        facts = facts | {"last_seqs": (7, None, 6)} if kind is CommTimeout else facts
        error = again(kind("what happened", **facts))
        assert type(error) is kind and str(error) == "what happened"
        assert vars(error) == facts


def interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def test_an_interrupt_during_a_call_that_fails_is_not_lost() -> None:
    """Making the error runs Python code, and so the handler of a signal that came meanwhile."""
    with Communicator(backend="local") as comm:
        comm.stream.pause(0.5)
        handle = all_gather(torch.empty(4), torch.ones(4), comm)
        before = signal.signal(signal.SIGALRM, interrupt)
        try:
            signal.setitimer(signal.ITIMER_REAL, 0.05)
            with pytest.raises(KeyboardInterrupt):
                handle.synchronize(0.2)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
        handle.synchronize()
