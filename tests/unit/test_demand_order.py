"""The forward order: learnt by one rank or more, the same on all."""

from __future__ import annotations

import random
import threading

from bucketwheel.residency.demand_order import DemandOrder
from bucketwheel.testing import run_threads


def step(ranks: list[DemandOrder], max_bytes: int = 1 << 20) -> tuple[list[list[int]], list[list[bytes]]]:
    """A step of all ranks, which are threads; the orders, and the payloads of each exchange by rank."""
    sent: list[list[bytes]] = [[] for _ in ranks]
    barrier = threading.Barrier(len(ranks), timeout=10)

    def body(rank: int, _: int) -> list[int]:
        def exchange(payload: bytes) -> list[bytes]:
            assert len(payload) <= max_bytes
            sent[rank].append(payload)
            barrier.wait()
            answers = [payloads[-1] for payloads in sent]
            barrier.wait()
            return answers

        return list(ranks[rank].next_step(rank, exchange, max_bytes))

    orders = run_threads(body, len(ranks), timeout_s=20)
    return orders, [list(payloads) for payloads in zip(*sent, strict=True)]


def needs(order: DemandOrder, params: list[int]) -> None:
    order.begin_forward()
    for param in params:
        order.note(param)


BUCKETS = [{0, 1}, {1, 2}, {3}, {4}]


def test_the_lowest_rank_that_saw_a_forward_decides() -> None:
    ranks = [DemandOrder(BUCKETS) for _ in range(3)]
    needs(ranks[1], [2, 3, 0])
    needs(ranks[2], [0, 1])
    assert step(ranks)[0] == [[1, 2, 0, 3]] * 3  # bucket 3 was not needed: behind the others
    assert step(ranks)[0] == [[1, 2, 0, 3]] * 3  # kept


def test_ranks_agree_at_powers_of_two() -> None:
    ranks = [DemandOrder(BUCKETS) for _ in range(2)]
    exchanged = []
    for number in range(1, 18):
        needs(ranks[0], [number % 5])
        assert ranks[0].is_watching == (number in (1, 2, 4, 8, 16))
        orders, rounds = step(ranks)
        assert orders[0] == orders[1]
        exchanged += [number] if rounds else []
    assert exchanged == [1, 2, 4, 8, 16]


def test_long_orders_go_in_several_rounds() -> None:
    numbers = random.Random(0).sample(range(50), 50)
    ranks = [DemandOrder([{i} for i in range(50)]) for _ in range(2)]
    needs(ranks[1], numbers)
    orders, rounds = step(ranks, max_bytes=64)
    assert orders == [numbers] * 2 and len(rounds) == 1 + 4


def test_one_rank_sends_its_order() -> None:
    ranks = [DemandOrder([{i} for i in range(402)]) for _ in range(5)]
    for rank in ranks[2:]:
        needs(rank, [7])
    _, (first, second) = step(ranks)
    assert first == [b"", b"", b"\1", b"\1", b"\1"]
    assert [len(payload) for payload in second] == [0, 0, 4 * 402, 0, 0]
