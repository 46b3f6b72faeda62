"""The forward order: learnt by one rank or more, the same on all."""

from __future__ import annotations

import random

from bucketwheel.forward_order import ForwardOrder


def step(ranks: list[ForwardOrder], max_bytes: int = 1 << 20) -> tuple[list[list[int]], int]:
    """A step of all ranks; the orders, and how many rounds of exchange it took."""
    rounds: list[list[bytes]] = []
    answers: list[list[bytes]] = []
    sent: list[bytes] = []

    def collect(payload: bytes) -> list[bytes]:
        assert len(payload) <= max_bytes
        sent.append(payload)
        return [payload]

    for rank in ranks:  # what each would send
        sent = []
        copied = ForwardOrder(rank._params_of_bucket)
        copied.__dict__.update({**rank.__dict__, "buckets": list(rank.buckets)})
        copied.next_step(collect, max_bytes)
        rounds.append(sent)
    assert len({len(one) for one in rounds}) == 1  # the same calls on all ranks
    answers = [list(one) for one in zip(*rounds, strict=True)]
    orders = []
    for rank in ranks:
        left = iter(answers)
        orders.append(list(rank.next_step(lambda _, left=left: next(left), max_bytes)))
    return orders, len(answers)


def needs(order: ForwardOrder, params: list[int]) -> None:
    order.begin_forward()
    for param in params:
        order.note(param)


BUCKETS = [{0, 1}, {1, 2}, {3}, {4}]


def test_until_something_is_seen_the_last_bucket_comes_first() -> None:
    ranks = [ForwardOrder(BUCKETS) for _ in range(3)]
    for _ in range(5):
        assert step(ranks)[0] == [[3, 2, 1, 0]] * 3


def test_the_lowest_rank_that_saw_a_forward_decides() -> None:
    ranks = [ForwardOrder(BUCKETS) for _ in range(3)]
    needs(ranks[1], [2, 3, 0])
    needs(ranks[2], [0, 1])
    assert step(ranks)[0] == [[1, 2, 0, 3]] * 3  # bucket 3 was not needed: behind the others
    assert step(ranks)[0] == [[1, 2, 0, 3]] * 3  # kept


def test_ranks_agree_at_powers_of_two() -> None:
    ranks = [ForwardOrder(BUCKETS) for _ in range(2)]
    exchanged = []
    for number in range(1, 18):
        needs(ranks[0], [number % 5])
        assert ranks[0].is_watching == (number in (1, 2, 4, 8, 16))
        orders, rounds = step(ranks)
        assert orders[0] == orders[1]
        exchanged += [number] if rounds else []
    assert exchanged == [1, 2, 4, 8, 16]


def test_what_is_noted_before_a_forward_does_not_count() -> None:
    ranks = [ForwardOrder(BUCKETS)]
    ranks[0].note(0)
    needs(ranks[0], [4, 4, 3])
    needs(ranks[0], [0])  # a second model
    assert step(ranks)[0] == [[3, 2, 0, 1]]


def test_long_orders_go_in_several_rounds() -> None:
    numbers = random.Random(0).sample(range(50), 50)
    ranks = [ForwardOrder([{i} for i in range(50)]) for _ in range(2)]
    needs(ranks[1], numbers)
    orders, rounds = step(ranks, max_bytes=64)
    assert orders == [numbers] * 2 and rounds == 4


def test_nothing_to_train() -> None:
    assert step([ForwardOrder([]), ForwardOrder([])]) == ([[], []], 0)
