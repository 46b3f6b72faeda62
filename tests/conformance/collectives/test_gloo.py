"""Messages over gloo: waiting for one ends when the rank that sends it dies, though it is half read."""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta

import pytest
import torch

from bucketwheel.comm import gloo
from bucketwheel.comm.rendezvous import Rendezvous
from bucketwheel.testing import RankPool
from tests.support.failure_cases import SOON_S

pytestmark = pytest.mark.dist
NUMEL = 64 << 20  # bytes; more than sockets hold
LIMIT = timedelta(seconds=20)


def dies_while_it_sends(rank: int, size: int) -> tuple[float, list[int]]:
    rendezvous = Rendezvous.of_group(None, 30.0)
    pids = rendezvous.exchange(os.getpid())
    group = gloo.connect(rendezvous, "messages")
    data = torch.full((NUMEL,), rank + 1, dtype=torch.uint8)
    whole, half_read = torch.zeros_like(data), torch.zeros_like(data)
    if rank == 1:
        sent = [gloo.send(group, one, 0, 1) for one in (data, None, data)]
        sent[0].wait(LIMIT)
        time.sleep(LIMIT.total_seconds())
    messages = [gloo.receive(group, whole, 1, 1), gloo.receive(group, None, 1, 1), gloo.receive(group, half_read, 1, 1)]
    assert messages[0].wait(LIMIT) and messages[1].wait(LIMIT)
    until = time.monotonic() + LIMIT.total_seconds()
    while half_read[0] == 0 and time.monotonic() < until:
        pass
    os.kill(pids[1], signal.SIGKILL)
    begin = time.monotonic()
    with pytest.raises(RuntimeError, match="losed by peer|reset by peer"):
        messages[2].wait(LIMIT)
    return time.monotonic() - begin, [int(one) for one in (whole.sum(dtype=torch.int64), half_read[0], half_read[-1])]


def test_a_rank_that_dies_while_it_sends():
    with RankPool(2, forked=True) as pool:
        took_s, (total, first, last) = pool.run(dies_while_it_sends, expect_dead=[1])[0]
    assert total == 2 * NUMEL, "a message that came before is whole"
    assert (first, last) == (2, 0), "it was half read"
    assert took_s < SOON_S
