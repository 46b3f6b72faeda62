"""Rendezvous: rounds of one value from every rank to all, through a torch Store."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from bucketwheel.comm import patience
from bucketwheel.comm.background import _threads
from bucketwheel.comm.rendezvous import Rendezvous
from bucketwheel.errors import CommError, CommTimeout
from bucketwheel.testing import run_threads
from tests.support.requirements import slow_case


def stores(kind: str, tmp_path) -> dist.Store:
    return dist.HashStore() if kind == "hash" else dist.FileStore(str(tmp_path / "store"))


kinds = pytest.mark.parametrize("kind", ["hash", "file"])


@kinds
def test_everybody_gets_everybodys_value(kind, tmp_path):
    store = stores(kind, tmp_path)

    def rounds(rank: int, _: int) -> list[list[object]]:
        rendezvous = Rendezvous(dist.PrefixStore("one", store), rank, 3, 20)
        return [rendezvous.exchange([rank, number, "x" * number]) for number in range(4)]

    for got in run_threads(rounds, 3, timeout_s=40):
        assert got == [[[rank, number, "x" * number] for rank in range(3)] for number in range(4)]
    left = dist.PrefixStore("one", store)
    assert left.check(["4/all"]) and not left.check(["3/all"]), "rounds leave one key behind"
    assert not any(left.check([f"{number}/{rank}"]) for number in range(1, 5) for rank in range(3))


def test_parts_do_not_hear_each_other_and_have_ids_of_their_own():
    store = dist.HashStore()

    def rounds(rank: int, _: int) -> tuple[list[object], list[str]]:
        rendezvous = Rendezvous(store, rank, 4, 20)
        part = rendezvous.part(f"part {rank % 2}", rank // 2, 2)
        heard = [*rendezvous.exchange(rank), *part.exchange(rank), *rendezvous.exchange(-rank)]
        return heard, [rendezvous.id, part.id, rendezvous.id]

    everyone = run_threads(rounds, 4, timeout_s=40)
    for rank, (heard, _) in enumerate(everyone):
        assert heard == [0, 1, 2, 3, rank % 2, rank % 2 + 2, 0, -1, -2, -3]
    assert len({one for _, ids in everyone for one in ids}) == 3 and all(ids[0] == ids[2] for _, ids in everyone)
    assert len(everyone[0][1][0]) == 16


@pytest.mark.parametrize("kind", ["hash", slow_case("file")])
@pytest.mark.parametrize("late", [0, 2])
def test_all_ranks_have_one_outcome_of_a_round(late, kind, tmp_path):
    """Also one that comes as the others go."""
    store = stores(kind, tmp_path)

    def body(number: int, rank: int) -> str:
        if rank == late:
            # The waits of files end at whole seconds. Who awaits rank 0 alone awaits it 1.5 s longer.
            time.sleep((0.2 if late else 1.7) + number * (0.05 if kind == "hash" else 0.2))
        try:
            return str(Rendezvous(dist.PrefixStore(str(number), store), rank, 3, 0.3).exchange(rank))
        except CommTimeout as error:
            return str(error)

    outcomes = run_threads(lambda rank, _: [body(number, rank) for number in range(4)], 3, timeout_s=60)
    here = [outcomes[rank] for rank in range(3) if rank != late]
    assert here[0] == here[1]
    for mine, theirs in zip(outcomes[late], here[0], strict=True):
        assert mine == theirs if theirs == "[0, 1, 2]" else f"gave up after 0.3 s, before rank {late}" in mine
    assert any(f"within 0.3 s: ranks [{late}] have not arrived" in one for one in here[0])


@pytest.mark.parametrize("late", [0, 2])
def test_who_has_not_come_is_named_on_stderr(late, monkeypatch, capsys):
    """By the first of those that wait, and again after twice the time."""
    monkeypatch.setattr(patience, "PATIENCE", replace(patience.PATIENCE, report_s=0.2))
    store = dist.HashStore()

    def body(rank: int, _: int) -> None:
        rendezvous = Rendezvous(store, rank, 3, 20)
        rendezvous.exchange(rank)
        time.sleep(0.6 if rank == late else 0.0)
        rendezvous.exchange(rank)

    run_threads(body, 3, timeout_s=40)
    said = f"[bucketwheel] rank {min({0, 1, 2} - {late})} has waited {{}} s for ranks [{late}] to make a communicator "
    said += "(ShardedAdamW, sync_module, Communicator); it gives up after 20 s\n"
    # A busy machine is later, and says 0.8 too.
    assert capsys.readouterr().err.startswith(said.format(0.2) + said.format(0.4))


def test_failures_and_differences_are_told_to_all():
    store = dist.HashStore()

    def fail() -> None:
        raise OSError("no socket")

    def body(rank: int, _: int) -> str:
        rendezvous = Rendezvous(store, rank, 3, 20)
        failures = rendezvous.outcome(rendezvous.attempt(fail if rank == 1 else lambda: None))[0]
        assert rendezvous.outcome("") == ("", [None] * 3)
        with pytest.raises(ZeroDivisionError):  # a bug is not an outcome
            rendezvous.attempt(lambda: 1 / 0)
        assert rendezvous.attempt(lambda: (_ for _ in ()).throw(CommError("x"))) == "CommError: x"
        return failures

    assert run_threads(body, 3, timeout_s=40) == ["\n  rank 1: OSError: no socket"] * 3


def test_ranks_that_have_met_are_not_missed_in_the_next_round():
    """That begins just before the time limit, where one of them is held up for a moment."""
    store = dist.HashStore()

    def body(rank: int, _: int) -> list[object]:
        rendezvous = Rendezvous(store, rank, 3, 20)
        rendezvous.exchange("met")
        rendezvous.deadline = time.monotonic() + 0.1
        time.sleep(0.6 if rank == 1 else 0.0)
        return rendezvous.exchange(rank)

    assert run_threads(body, 3, timeout_s=40) == [[0, 1, 2]] * 3


def test_an_attempt_that_is_given_up_is_told_to_all():
    """Though that is later than the time limit."""
    store = dist.HashStore()
    held = threading.Event()

    def body(rank: int, _: int) -> str:
        rendezvous = Rendezvous(store, rank, 2, 0.3)
        hang = lambda: rendezvous.ask(lambda _: held.wait(30), late="held up")  # noqa: E731
        try:
            return rendezvous.outcome(rendezvous.attempt(hang if rank == 1 else lambda: None))[0]
        finally:
            held.set()

    told = "\n  rank 1: CommTimeout: the communicator was not made within 0.3 s: held up"
    assert run_threads(body, 2, timeout_s=40) == [told] * 2


@pytest.mark.parametrize(
    ("agent_store", "lives", "met"),
    [
        # torchrun gives restarted processes the same Store, where one rank of the ended ones had got further than another.
        ("True", [("0", 0), ("0", 1), ("0", 0), ("1", 0), ("1", 1)], [(3, 4)]),
        # It counts restarts for each agent, and gives all a new Store where TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1.
        ("False", [("2", 0), ("0", 1)], [(0, 1)]),
    ],
)
def test_processes_meet_those_of_their_own_life(agent_store, lives, met, monkeypatch):
    store = dist.HashStore()
    monkeypatch.setattr(dist.distributed_c10d, "_get_process_group_store", lambda group: store)
    monkeypatch.setattr(dist, "get_world_size", lambda group: 2)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", agent_store)
    found = []
    for number, (life, rank) in enumerate(lives):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", life)
        monkeypatch.setattr(dist, "get_rank", lambda group, rank=rank: rank)
        found.append(Rendezvous.of_group(object(), 20))
        found[-1].store.set("who", str(number))
    for one, other in met:
        assert found[one].store.get("who") == found[other].store.get("who") == str(other).encode()
    assert agent_store == "False" or found[1].store.get("who") == b"1"


def comes(group: Any, timeout_s: float) -> str:
    try:
        return f"met {Rendezvous.of_group(group, timeout_s).exchange(group.rank)}"
    except CommTimeout as error:
        return str(error)


def test_a_rank_that_has_missed_calls_is_told_of_each_and_then_meets_the_others(monkeypatch):
    """It came late, or its calls failed before they came: that is no wait on either side."""
    store = dist.HashStore()
    groups = [SimpleNamespace(rank=rank, store=dist.PrefixStore("", store)) for rank in range(3)]
    monkeypatch.setattr(dist.distributed_c10d, "_get_process_group_store", lambda group: group.store)
    monkeypatch.setattr(dist, "get_rank", lambda group: group.rank)
    monkeypatch.setattr(dist, "get_world_size", lambda group: 3)
    together = threading.Barrier(3)

    def body(rank: int, _: int) -> list[str]:
        group: Any = groups[rank]
        said = [] if rank == 1 else [comes(group, 0.3) for _ in range(2)]
        together.wait(30)
        begin = time.monotonic()
        said += [comes(group, 20) for _ in range(2)] if rank == 1 else []
        assert time.monotonic() - begin < 10
        return [*said, comes(group, 20), comes(group, 20)]

    for rank, said in enumerate(run_threads(body, 3, timeout_s=60)):
        assert said[-2:] == ["met [0, 1, 2]"] * 2 and len(said) == 4
        missing = "gave up after 0.3 s, before rank 1 arrived" if rank == 1 else "ranks [1] have not arrived"
        assert all(missing in one for one in said[:-2]), said


def test_a_round_that_has_failed_is_the_last(monkeypatch):
    """On all ranks: nobody waits in a later one again."""
    monkeypatch.setattr(patience, "PATIENCE", replace(patience.PATIENCE, store_s=1.0))
    rendezvous = Rendezvous(dist.HashStore(), 0, 2, 1.0)
    comes_not = pytest.raises(CommTimeout, match=r"ranks \[1\] have not arrived")
    with comes_not:
        rendezvous.exchange(0)
    begin = time.monotonic()
    with comes_not:
        rendezvous.outcome(rendezvous.attempt(lambda: rendezvous.exchange(0)))
    assert time.monotonic() - begin < 1.0


class Deaf:
    """A Store that does not come back from a call, until it is told to: as one behind a cut link."""

    def __init__(self, call: str) -> None:
        self.store, self.call, self.answers = dist.HashStore(), call, threading.Event()

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            if name == self.call:
                self.answers.wait()
            return getattr(self.store, name)(*args)

        return call


def ends_soon() -> bool:
    """Whether no thread of a rendezvous is left."""
    until = time.monotonic() + 10
    while (alive := [one for one in list(_threads) if one.is_alive()]) and time.monotonic() < until:
        time.sleep(0.01)
    return not alive


@pytest.mark.parametrize(
    ("rank", "call"), [(1, "set"), (0, "check"), (1, "check"), (0, "compare_set"), (0, "delete_key")]
)
def test_a_store_that_does_not_answer_is_not_waited_for(rank, call, monkeypatch):
    monkeypatch.setattr(patience, "PATIENCE", replace(patience.PATIENCE, store_s=0.2))
    store: Any = Deaf(call)
    if call == "delete_key":  # which comes after the others have
        for key, value in (("1/1", "1"), ("1/all", "[0, 1]")):
            store.store.set(key, value)
    begin = time.monotonic()
    with pytest.raises(CommTimeout, match="within 0.2 s: the Store does not answer"):
        Rendezvous(store, rank, 2, 0.2).exchange(rank)
    assert time.monotonic() - begin < 10
    store.answers.set()
    assert ends_soon()


def test_ctrl_c_is_heard_while_the_store_does_not_answer():
    store: Any = Deaf("set")
    begin = time.monotonic()
    interrupt = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
    interrupt.start()
    with pytest.raises(KeyboardInterrupt):
        Rendezvous(store, 1, 2, 60).exchange(1)
    store.answers.set()
    assert ends_soon()  # and does not wait for the others either
    assert time.monotonic() - begin < 20
