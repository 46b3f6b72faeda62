"""Take over: an optimizer closes those whose parameters it trains from now on."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from bucketwheel.comm.replicas import Reducer
from bucketwheel.errors import Error
from bucketwheel.layout.flat_params import ParamInfo
from bucketwheel.layout.owners import owner_of


def take_over(infos: Sequence[ParamInfo], comm: Reducer | None) -> None:
    """Closes the live optimizers that train one of ``infos``, which another one is to train. Collective over its ranks ``comm``
    (None: there is this one), some of which may have no such optimizer any more.

    ValueError on all, and nothing is closed, where one of them has gradients that no step has used.
    """
    # Of each earlier engine the first parameter, and the engines in one order on all ranks.
    first = {owner: info for info in reversed(infos) if (owner := owner_of(info.param)) is not None}
    problem = ""
    for engine, info in first.items():
        if (pending := engine.first_pending()) is not None:
            problem = (
                f"parameter {info.name!r} belongs to another optimizer, which this one would replace, but no step has "
                f"used the gradient of {pending.name!r}; call its step(), zero_grad() (or the model's) or close() on all ranks"
            )
    said = f"{[info.index for info in first.values()]}:{problem}".encode()
    everyone = [said] if comm is None else comm.exchange(said[: comm.max_payload_bytes])
    for rank, other in enumerate(everyone):
        if found := str(other.partition(b":")[2], "utf-8", "ignore"):
            raise ValueError(f"on rank {rank}, {found}")
    for engine, info in first.items():
        why = f"a later optimizer for parameter {info.name!r} has replaced this one: use the later one"
        is_agreed = comm is not None and len(set(everyone)) == 1 and engine.ranks[1] == len(everyone)
        with contextlib.suppress(Error):  # of a communicator that has failed: all is released
            engine.close(why, is_agreed=is_agreed)
