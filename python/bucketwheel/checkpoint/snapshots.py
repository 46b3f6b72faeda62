"""Snapshots: each rank's shard is kept on the host twice, by the rank and by its neighbour, and follows every step by replay.

| who | does in a step |
|---|---|
| the rank, in `step` | copies its gradient shard, with what else the kernel gets, into one of ``every`` host buffers |
| its sender thread | keeps the record for the copy of its own, sends it to the next rank, waits for the answer |
| its receiver thread | keeps the record of the rank before, answers |
| both | replay older records, `ShardCopy.advance` |

[Note: the step that all can go back to] Copies cannot be taken back, so none may be ahead of what another one will have.
A rank that begins step t has a record of step t - 1 in a buffer; that one was free, so the record of step t - 1 - every
has been answered. A rank whose sender is done with step t has seen the gradients of all ranks in it, so all have begun
it: it may replay up to step t - 1 - every, which all copies of all shards will reach. Records behind that wait in
slots. The rank before may be ahead by as many records as there are buffers on both sides, so it has 2 * every + 2 slots.
"""

from __future__ import annotations

import atexit
import collections
import contextlib
import json
import operator
import os
import secrets
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bucketwheel.checkpoint.neighbours import Neighbours
from bucketwheel.checkpoint.replay import Record, ShardCopy, ShardLayout, digests, read_shard
from bucketwheel.checkpoint.restore import restore_from
from bucketwheel.checkpoint.snapshot_files import FILE_NAME, SnapshotFile, file_name, open_snapshots, private_folder
from bucketwheel.comm import background
from bucketwheel.device import stream_of
from bucketwheel.errors import ClosedError, CommTimeout, expect_int
from bucketwheel.layout.shard_memory import StepInputs

__all__ = ["Snapshots"]

_BASE, _STEP, _END = 0, 1, 2  # what a message is: [kind, step, bytes of a layout's text]
_version_of = operator.attrgetter("_version")
_live: weakref.WeakSet[Snapshots] = weakref.WeakSet()


class _Message(NamedTuple):
    kind: int
    step: int
    memory: Tensor | None = None
    layout: ShardLayout | None = None  # of a base
    buffer: Record | None = None  # of a step: whose memory it is
    ready: Any = None  # CUDA: the event after which ``memory`` is filled


class Snapshots:
    """Keeps a copy of every rank's parameters, masters and optimizer states in host memory of that rank and of the next one,
    and brings them up to date by replaying each step on the CPU: bit for bit what the rank has.

    A step pays for a copy of its gradient shard; threads do the rest. Of these gradient shards ``every`` are in buffers at
    most, so the neighbour's copy can be brought to within ``every`` steps of the rank's; a step waits only where all
    buffers are in use (`stats`). Without other processes (one rank, or ranks that are threads) a rank keeps its own alone.

    Not part of it: buffers of the model, parameters that are not trained, ``param_groups`` and schedulers, RNG, data order.
    A write to parameters or states from outside (``load_state_dict``, a moving average) shows in torch's version counters;
    the next step then sends the whole shard again (``stats["rebases"]``). After one that raises no version (``p.data``,
    numpy, a collective) call `rebase` on all ranks.

    Collective: the constructor, `verify`, `close`, `restore`, `load`. Host memory of a rank: docs/checkpoints.md.

    Args:
        optimizer: a `ShardedAdamW`, not ``capturable``: replays of CUDA graphs do not pass `step`.
        every: how many steps may be on their way, at least 1.
        directory: keeps the copies in files there, which outlive the process: `load` reads them, `close` removes them. A
            folder of this user alone (it is made, mode 0700), of memory such as ``/dev/shm/me/run1``: writes to a disk
            would be slow. Several hosts: a path that each has for itself.
        first_step: the number of steps that have been done before: what `restore` or `load` has returned. It and ``every`` are
            the same on all ranks.
        timeout_s: how long ranks wait for each other, in a step too, before the snapshots end with a warning. The training
            goes on.

    Raises:
        ValueError, TypeError: bad arguments. PermissionError: the folder is not this user's alone.
    """

    def __init__(
        self,
        optimizer: Any,
        *,
        every: int = 1,
        directory: str | os.PathLike[str] | None = None,
        first_step: int = 0,
        timeout_s: float = 300.0,
    ) -> None:
        self._optimizer, self._engine = optimizer, optimizer._engine
        self._every, self._timeout_s = every, timeout_s
        self._folder: Path | None = None
        with _failing_together(self._engine, "Snapshots"):
            if expect_int(every, "every") < 1 or expect_int(first_step, "first_step") < 0:
                raise ValueError(f"every must be at least 1 and first_step at least 0, got {every} and {first_step}")
            if any(group["capturable"] for group in optimizer.param_groups):
                raise ValueError("Snapshots cannot follow capturable=True: replays of a CUDA graph do not pass step()")
            if directory is not None:
                self._folder = private_folder(directory)
        reducer = self._reducer = getattr(self._engine, "reducer", None)
        self.rank: int = 0 if reducer is None else reducer.rank
        self.world: int = 1 if reducer is None else reducer.size
        said = self._exchange([secrets.token_hex(8), int(every), int(first_step)])
        for name, given in (("every", [one[1] for one in said]), ("first_step", [one[2] for one in said])):
            if len(set(given)) > 1:
                raise ValueError(f"Snapshots: {name} must be the same on all ranks, which gave {given}")
        self._run = said[0][0]
        is_apart = self.world > 1 and self._engine.comm.backend != "local"
        self._neighbours = Neighbours(reducer, timeout_s) if is_apart else None
        self.stats: dict[str, float] = {"steps": 0, "rebases": 0, "waits": 0, "waited_s": 0.0, "sent_bytes": 0}
        self._changed = threading.Condition()  # of what follows, which threads share
        self._queue: collections.deque[_Message] = collections.deque()
        self._busy = False  # the sender works on a message
        self._handled = first_step  # the last step that the neighbour has answered
        self._failure: BaseException | None = None  # of a thread; nothing is sent from then on
        self._ended = False  # by `close` or `stop`
        self._copies: dict[int, ShardCopy] = {}  # by the rank whose shard it is
        self._files: dict[int, SnapshotFile] = {}
        # The trainer's alone:
        self._step = first_step
        self._versions: list[int] | None = None  # after the last step; None: in a step, or one has failed
        self._layout: ShardLayout | None = None  # None: of no base yet
        self._free: list[Record] = []  # shared too
        self._has_warned = False
        self._threads = [threading.Event(), threading.Event()] if is_apart else [threading.Event()]
        for run, ended in zip((self._send_all, self._receive_all), self._threads, strict=False):
            background.start(self._running, run, ended)
        _live.add(self)
        try:
            self._send_base()
            self._remove_older_files()
        except BaseException:
            self.stop()
            raise
        self._note_versions()
        self._engine.step_observers.append(self._observe)

    # --- the training's thread ---------------------------------------------------------------------------------------

    def _observe(self, given: StepInputs) -> Callable[[], None] | None:
        """In each step, before the kernel. Returns what is to be called behind it."""
        if self._ended or self._failure is not None:
            self._warn()
            return None
        if self._versions is None or self._versions != self._versions_now():
            try:
                self.rebase()
            except (RuntimeError, CommTimeout) as error:
                self._fail(error)
                self._warn()
                return None
        self._versions = None
        buffer = self._free_buffer()
        if buffer is None:
            return None
        try:
            with torch.no_grad():
                buffer.fill(self._memory, given)
        except BaseException:  # of hyperparameters that the kernel would not take either
            self._free.append(buffer)
            raise
        self._step += 1
        stream = stream_of(self._memory.steps.device)
        ready = None if stream is None else stream.record_event()
        self._put(_Message(_STEP, self._step, buffer.memory, buffer=buffer, ready=ready))
        self.stats["steps"] += 1
        return self._note_versions

    def _note_versions(self) -> None:
        self._versions = self._versions_now()

    def _versions_now(self) -> list[int]:
        """What changes when somebody else than the kernel writes to the shard, or its parameters are others."""
        with torch._C.DisableTorchFunctionSubclass():  # a parameter that is being gathered would be waited for
            versions = list(map(_version_of, self._memory.written))
            if self._reducer is None:
                versions += [tensor.data_ptr() for tensor in self._memory.written]
        return [id(self._engine.infos), *versions]

    def rebase(self) -> None:
        """Sends the whole shard again, as it is. Local, to be called by all ranks: after writes that raise no version."""
        self._send_base()
        self.stats["rebases"] += 1
        self._note_versions()

    def _send_base(self) -> None:
        self._infos = self._engine.infos  # kept alive: `_versions_now` has its id
        self._memory = self._engine.shard_memory()
        layout = ShardLayout.of(self._memory, len(self._optimizer.param_groups), self.rank, self.world)
        if self._layout is None or layout.text != self._layout.text:
            self._flush()
            free = [Record(layout, self._memory.steps.is_cuda) for _ in range(self._every)]
            self._layout, self._free = layout, free
        shard = torch.empty(layout.mirror.nbytes, dtype=torch.uint8, device="cpu")
        read_shard(self._memory, layout.mirror.tensors(shard))
        self._put(_Message(_BASE, self._step, shard, layout))

    def _put(self, message: _Message) -> None:
        with self._changed:
            self._queue.append(message)
            self._changed.notify_all()

    def _free_buffer(self) -> Record | None:
        """None where the snapshots have failed."""
        with self._changed:
            if not self._free and self._failure is None:
                began = time.monotonic()
                if not self._changed.wait_for(lambda: self._free or self._failure or self._ended, self._timeout_s):
                    self._fail(CommTimeout(f"the neighbour has taken no gradients for {self._timeout_s:g} s"))
                self.stats["waits"] += 1
                self.stats["waited_s"] += time.monotonic() - began
            if self._failure is None and not self._ended:
                return self._free.pop()
            self._warn()
            return None

    def _warn(self) -> None:
        if not self._has_warned and not self._ended:
            self._has_warned = True
            warnings.warn(f"snapshots end at step {self._step}: {self._failure}", stacklevel=3)

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            self._failure = self._failure or error
            self._changed.notify_all()

    def _flush(self) -> None:
        """Waits until the neighbour has all that was sent so far. The error of a thread if it has none, CommTimeout."""
        with self._changed:
            idle = self._changed.wait_for(lambda: self._failure or not (self._queue or self._busy), self._timeout_s)
            if self._failure is not None:
                raise RuntimeError(f"the snapshots have ended: {self._failure}") from self._failure
            if not idle:
                raise CommTimeout(f"the neighbour has not taken the snapshot within {self._timeout_s:g} s")

    # --- the threads -------------------------------------------------------------------------------------------------

    def _running(self, run: Any, ended: threading.Event) -> None:
        try:
            run()
        except BaseException as error:  # noqa: BLE001 (the training hears of it)
            self._fail(error)
        finally:
            ended.set()

    def _send_all(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue or self._ended or self._failure)
                if self._failure is not None or not self._queue:
                    return
                message, self._busy = self._queue.popleft(), True
            if message.ready is not None:
                message.ready.synchronize()  # not the training's thread
            if message.kind == _BASE:
                self._begin(self.rank, message, self._every + 2)
            elif message.kind == _STEP:
                self._take(self.rank, message.step, lambda slot, given=message.memory: slot.copy_(given))
            if self._neighbours is not None:
                self._send(message)
            with self._changed:
                if message.kind != _END:
                    self._handled = message.step
                if message.buffer is not None:
                    self._free.append(message.buffer)
                self._busy = False
                self._changed.notify_all()
            if message.kind == _END:
                return
            self._advance(self.rank)

    def _send(self, message: _Message) -> None:
        assert self._neighbours is not None
        link, text = self._neighbours, message.layout.text.encode() if message.layout is not None else b""
        link.send(torch.tensor([message.kind, message.step, len(text)], dtype=torch.int64, device="cpu"), link.next)
        if text:
            link.send(torch.frombuffer(bytearray(text), dtype=torch.uint8), link.next)
        if message.memory is not None:
            link.send(message.memory, link.next)
            link.await_answer(link.next)
            self.stats["sent_bytes"] += message.memory.numel()

    def _receive_all(self) -> None:
        link = self._neighbours
        assert link is not None
        owner = link.previous
        while True:
            kind, step, length = link.receive(torch.empty(3, dtype=torch.int64, device="cpu"), owner).tolist()
            if kind == _END:
                return
            if kind == _BASE:
                text = (
                    link.receive(torch.empty(length, dtype=torch.uint8, device="cpu"), owner).numpy().tobytes().decode()
                )
                layout = ShardLayout(text)
                shard = link.receive(torch.empty(layout.mirror.nbytes, dtype=torch.uint8, device="cpu"), owner)
                self._begin(owner, _Message(_BASE, step, shard, layout), 2 * self._every + 2)
            else:
                self._take(owner, step, lambda slot: link.receive(slot, owner))
            link.answer(owner)
            self._advance(owner)

    def _begin(self, owner: int, base: _Message, slots: int) -> None:
        """A new copy of a shard takes the place of the one so far when it is complete."""
        assert base.layout is not None and base.memory is not None
        mirrors = 1 if self._folder is None else 2
        nbytes = ShardCopy.nbytes_of(base.layout, mirrors, slots)
        file = None
        if self._folder is None:
            memory = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        else:
            about = {"run": self._run, "layout": base.layout.text, "mirrors": mirrors, "slots": slots}
            file = SnapshotFile(self._folder, file_name(self._run, owner, self.rank), about, nbytes)
            memory = file.memory
        copy = ShardCopy(base.layout, memory, mirrors, slots)
        copy.begin(base.step, base.memory)
        if file is not None:
            file.publish()
            self._files[owner] = file
        self._copies[owner] = copy

    def _take(self, owner: int, step: int, fill: Any) -> None:
        copy = self._copies[owner]
        while not copy.has_room_for(step):  # by the note above there is room once this rank's sender has come as far
            self._advance(owner)
            with self._changed:
                if self._failure is not None or self._ended:
                    raise ClosedError("the snapshots have ended")
                if not copy.has_room_for(step):
                    self._changed.wait(0.1)
        copy.take(step, fill)

    def _advance(self, owner: int) -> None:
        copy = self._copies[owner]
        with copy.lock:
            copy.advance(self._handled - 1 - self._every)

    # --- what users ask ----------------------------------------------------------------------------------------------

    @property
    def last_step(self) -> int:
        """The newest step that this rank's neighbour has all of. Local. All ranks can go back to the lowest of theirs."""
        return self._handled

    def _exchange(self, mine: Any) -> list[Any]:
        if self._reducer is None:
            return [mine]
        return [json.loads(other) for other in self._reducer.exchange(json.dumps(mine).encode())]

    def verify(self) -> int:
        """Compares the copies of this rank's shard, its own and the neighbour's, with what it has, bit for bit; returns the
        step. Waits for all that is on its way. Collective; RuntimeError on all ranks that names what differs."""
        self._engine.param_sync()
        error = None
        try:
            if self._ended:
                raise RuntimeError("the snapshots have ended: close() or stop() was called")
            if self._versions != self._versions_now():
                self.rebase()
            self._flush()
        except (RuntimeError, CommTimeout) as found:
            error = str(found)
        self._expect_none(self._exchange(error))
        kept = {}
        for owner, copy in self._copies.items():
            with copy.lock:
                copy.advance(self._step)
                kept[str(owner)] = digests(copy.shard())
        assert self._layout is not None
        live = self._layout.mirror.tensors(torch.empty(self._layout.mirror.nbytes, dtype=torch.uint8, device="cpu"))
        read_shard(self._memory, live)
        mine = digests(live)
        problems = [
            f"{name} of rank {self.rank}'s shard at step {self._step}, as rank {keeper} keeps it"
            for keeper, copies in enumerate(self._exchange(kept))
            for name, found in copies.get(str(self.rank), mine).items()
            if found != mine[name]
        ]
        self._expect_none(self._exchange(problems[0] if problems else None), "a snapshot differs from the shard: ")
        return self._step

    @staticmethod
    def _expect_none(problems: list[str | None], what: str = "") -> None:
        if any(problems):
            raise RuntimeError(what + "; ".join(sorted({problem for problem in problems if problem})))

    def stop(self) -> None:
        """Ends the threads at once and keeps the copies, for `restore`. Local; after an error such as `PeerError`."""
        self._end(0.0)

    def close(self) -> None:
        """Ends the threads once the neighbours have what was sent, and drops the copies and their files. Collective; after
        `stop`, or if the snapshots have failed, local. Idempotent."""
        if not self._ended and self._failure is None:
            self._put(_Message(_END, self._step))
            self._end(self._timeout_s)
        self._end(0.0)
        for file in self._files.values():
            file.remove()
        self._copies.clear()
        self._files.clear()

    def _end(self, wait_s: float) -> None:
        until = time.monotonic() + wait_s
        for ended in self._threads if wait_s else ():
            ended.wait(max(until - time.monotonic(), 0.0))
        with self._changed:
            if self._ended:
                return
            self._ended = True
            self._changed.notify_all()
        with contextlib.suppress(ValueError):
            self._engine.step_observers.remove(self._observe)
        if self._neighbours is not None:
            if not all(ended.is_set() for ended in self._threads):
                self._neighbours.give_up()
            for ended in self._threads:
                ended.wait(10.0)
            self._neighbours.release()
        else:
            self._threads[0].wait(10.0)

    def __enter__(self) -> Snapshots:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """`close`; with an exception on its way `stop`, so that the copies can be restored."""
        if kind is None:
            self.close()
        else:
            self.stop()

    # --- going back --------------------------------------------------------------------------------------------------

    @staticmethod
    def restore(optimizer: Any, kept: Snapshots | None, *, timeout_s: float = 300.0) -> int:
        """Sets a new optimizer and its parameters to the newest step that all shards are kept of; returns the step.
        Collective for the ranks of ``optimizer``, as many as there were.

        ``kept``: what a survivor has, which is stopped; None on a rank that takes a lost one's place. Learning rates are those of
        the new optimizer: set schedulers, and the order of the data, to the step.

        ValueError on all ranks, and nothing has changed, if a shard is kept by nobody: two neighbours were lost.
        """
        if kept is not None:
            kept.stop()
        copies = [] if kept is None else [(kept._run, copy) for copy in kept._copies.values()]
        return restore_from(optimizer, copies, timeout_s)

    @staticmethod
    def load(directory: str | os.PathLike[str], optimizer: Any, *, timeout_s: float = 300.0) -> int:
        """`restore` from the files that processes have left in ``directory``, all of which have ended. Collective.

        ValueError on all ranks that says which shard is missing; PermissionError for a folder or file of somebody else.
        """
        folder, copies = Path(directory), []
        with _failing_together(optimizer._engine, "Snapshots.load"):
            for _, about, memory in open_snapshots(folder) if folder.exists() else ():
                copy = ShardCopy(ShardLayout(about["layout"]), memory, about["mirrors"], about["slots"])
                copies.append((about["run"], copy))
        return restore_from(optimizer, copies, timeout_s)

    def _remove_older_files(self) -> None:
        """Of other runs, once those of this one are complete everywhere. Collective where there is a folder."""
        if not any(self._exchange(self._folder is not None)):
            return
        with _failing_together(self._engine, "Snapshots"):
            self._flush()
        for path in self._folder.iterdir() if self._folder is not None else ():
            named = FILE_NAME.fullmatch(path.name)
            if named and named["run"] != self._run and int(named["keeper"]) % self.world == self.rank:
                path.unlink(missing_ok=True)


@contextlib.contextmanager
def _failing_together(engine: Any, what: str) -> Iterator[None]:
    """What fails here on one rank fails on all. Collective."""
    error = None
    try:
        yield
    except Exception as found:  # noqa: BLE001 (whatever it is, the other ranks hear of it)
        error = found
    engine.expect_done_by_all(what, error)


@atexit.register
def _stop_all() -> None:
    """Before threads are joined: what is registered later runs first."""
    for snapshots in list(_live):
        snapshots.stop()
