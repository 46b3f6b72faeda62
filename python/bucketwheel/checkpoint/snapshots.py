"""Snapshots: two copies of each rank's shard in host memory, on the rank and on the next one, which repeat every step.

| thread | work |
|---|---|
| the training, in `step` | copies the inputs of the kernel into a record; waits while ``every`` rounds are not done |
| the snapshots' thread, one *round* a step | sends the record to the next rank, receives one, replays older ones in both copies |

A rank needs a copy of its own shard too: after an error its live memory may be in the middle of a step, or ahead of the copy of
a lost rank.

[Note: the step that all can go back to] A replay cannot be undone, so a copy replays a record only when both copies of every
shard have it. Round t comes after this rank has begun step t. At that time all ranks have done step t - 1, in which they waited
for the end of their round t - 1 - every. So round t may replay the records up to t - 1 - every. Later records stay in slots: at
most 2 * every + 1 records of the rank itself (with the one that `step` writes), and every + 2 of the rank before.
"""

from __future__ import annotations

import atexit
import collections
import os
import secrets
import threading
import time
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bucketwheel.checkpoint.live import ShardedOptimizer, engine_of, exchange
from bucketwheel.checkpoint.neighbours import Neighbours
from bucketwheel.checkpoint.replay import ShardCopy, ShardLayout
from bucketwheel.checkpoint.restore import restore_from
from bucketwheel.checkpoint.snapshot_files import SnapshotFile, open_snapshots, private_folder, remove_other_runs
from bucketwheel.comm import background
from bucketwheel.device import buffer_of, stream_of
from bucketwheel.errors import ClosedError, CommTimeout, expect_int, failing_together
from bucketwheel.layout.shard_memory import StepInputs


class _Round(NamedTuple):
    """The last one has neither base nor record."""

    step: int
    has_base: bool = False  # the whole shard, as it was before the record
    has_record: bool = False
    ready: Any = None  # CUDA: the event after which the record is filled


class Snapshots:
    """Keeps two copies of each rank's parameters, master weights and optimizer states in host memory: on the rank and on the next
    rank. Collective, as are `verify`, `close` and `restore`.

    The copies follow the training: each step is repeated on the CPU, with the same bits. `ShardedAdamW.step` copies its
    gradient shard into a *record*; a thread sends the record to the next rank and repeats the step. After a failure, `restore`
    sets all ranks back to one step, at most ``every + 1`` steps ago. If two neighbouring ranks or a host with its files are
    lost, load a checkpoint. If there are no other processes (one rank, or ranks that are threads), a rank keeps both copies.

    The copies do not have the model's buffers, frozen parameters, ``param_groups``, schedulers, random states and the position
    in the data. If other code writes to parameters or states (``load_state_dict``, a moving average), torch's version counters
    show the write, and the next step sends the whole shard again. After a write that does not change a version counter
    (``p.data.clamp_()``, NumPy, a collective), call `rebase` on all ranks. If a rank is lost before all ranks have received
    such a change, `restore` raises ValueError.

    Host memory of a rank, in records and mirrors. A record is a gradient shard (float32 as a rule) and 9 bytes for each
    parameter tensor. A mirror is the rank's part of parameters, masters and states, and 8 bytes for each parameter tensor.

    | copy | mirrors | records |
    |---|---|---|
    | of the rank itself (pinned memory on CUDA) | 1 | 2 every + 1 |
    | of the rank before | 1; with ``directory`` 2 | every + 2 |

    While a whole shard is received, the old and the new copy of the rank before exist at the same time. `verify` needs two
    more mirrors, `restore` one more, or three from files.

    If the thread fails, or a step waits for other ranks longer than ``timeout_s``, the snapshots end with a warning and the
    training goes on. As a context manager the object calls `close`, or `stop` if the block raises.

    Args:
        optimizer: A `ShardedAdamW` without ``capturable=True``, because replays of CUDA graphs do not call ``step()``.
        every: Number of records that may be on their way to the next rank, at least 1. A step waits if there are as many. The
            same on all ranks.
        directory: A folder for the copies of other ranks' shards, as files that outlive the process. `restore` reads them,
            `close` removes them. Use a folder in memory (tmpfs), such as ``/dev/shm/me-run1``, on each host, for this job
            alone: the constructor removes files of other jobs. The folder is made with mode 0700, and other users must not
            have access.
        first_step: Number of steps before this object, as `restore` returned it. The same on all ranks.
        timeout_s: Seconds that ranks wait for each other, also in a step.

    Attributes:
        stats: ``"rebases"`` counts the times that a whole shard was sent again; ``"waited_s"`` is the time that steps have
            waited, in seconds.
        rank (int): The rank of this process.
        world (int): Number of ranks.

    Raises:
        ValueError: A bad argument, arguments that differ between ranks, or an error on another rank. The message has its text.
        TypeError: An argument of the wrong type.
        PermissionError: Other users have access to the folder.
        RuntimeError: The first copies could not be made, for example because the folder has no room.
        CommTimeout: Another rank did not receive the first copies within ``timeout_s``."""

    def __init__(
        self,
        optimizer: ShardedOptimizer,
        *,
        every: int = 1,
        directory: str | os.PathLike[str] | None = None,
        first_step: int = 0,
        timeout_s: float = 300.0,
    ) -> None:
        engine_of(optimizer)  # TypeError
        self._optimizer, self._engine = optimizer, optimizer._engine
        self.rank, self.world = self._engine.ranks
        with failing_together(self._engine.expect_done_by_all, "Snapshots"):
            self._every, self._step = expect_int(every, "every"), expect_int(first_step, "first_step")
            if self._every < 1 or self._step < 0:
                raise ValueError(f"every must be at least 1 and first_step at least 0, got {every} and {first_step}")
            if any(group["capturable"] for group in optimizer.param_groups):
                raise ValueError("Snapshots does not allow capturable=True: replays of a CUDA graph do not call step()")
            self._folder = None if directory is None else private_folder(directory)
        said = exchange(self._engine, [secrets.token_hex(8), self._every, self._step])
        given = [one[1:] for one in said]
        if any(one != given[0] for one in given):
            raise ValueError(f"Snapshots: every and first_step must be the same on all ranks, got {given} (by rank)")
        self._run = said[0][0]
        self._timeout_s = timeout_s
        self._link = Neighbours(self._engine)
        self.stats: dict[str, float] = {"rebases": 0, "waited_s": 0.0}
        self._versions: list[int] | None = None  # after the last step; None: in a step, one has failed, or `rebase`
        self._own: ShardCopy | None = None  # the training writes its records, the thread does the rest
        # The thread's; others use them when it has no rounds or has ended.
        self._kept: ShardCopy | None = None  # of the shard of the rank before
        self._file: SnapshotFile | None = None  # in which it lies, with `directory`
        self._changed = threading.Condition()  # guards the two that follow
        self._rounds: collections.deque[_Round] = collections.deque()  # not done; the thread is at the first
        self._over: BaseException | None = None  # why the snapshots have ended
        self._thread_ended = threading.Event()
        background.start(self._follow)
        atexit.register(self.stop)  # before threads are joined: what is registered later runs first
        try:
            with failing_together(self._engine.expect_done_by_all, "Snapshots"):
                self._send_base()
            if self._folder is not None:
                remove_other_runs(self._folder, self._run)
        except BaseException:
            self.stop()
            self.close()
            raise
        self._engine.step_observers.append(self._observe)

    # --- the training's thread ---------------------------------------------------------------------------------------

    def _observe(self, given: StepInputs) -> Callable[[], None] | None:
        """In each step, before the kernel. Returns what the engine calls after it."""
        has_base = self._versions != self._versions_now()
        try:
            if has_base:
                self._begin()
            began = time.monotonic()
            self._wait(lambda: len(self._rounds) < self._every)
            self.stats["waited_s"] += time.monotonic() - began
        except RuntimeError as error:  # the training goes on
            self._end(error)
            warnings.warn(f"snapshots stopped at step {self._step}: {self._over}", stacklevel=3)
            self.stop()
            return None
        assert self._own is not None
        self._versions = None
        with torch.no_grad():
            self._own.record(self._step + 1).fill(self._memory, given)
        self._step += 1
        stream = stream_of(self._memory.steps.device)
        self._put(_Round(self._step, has_base, True, None if stream is None else stream.record_event()))
        return self._note_versions

    def _note_versions(self) -> None:
        self._versions = self._versions_now()

    def _versions_now(self) -> list[int]:
        """They change when others than the kernel write to the shard, or when its parameters change."""
        with torch._C.DisableTorchFunctionSubclass():  # which would wait for parameters that are being gathered
            versions = [tensor._version for tensor in self._memory.written]
            if self.world == 1:
                versions += [tensor.data_ptr() for tensor in self._memory.written]
        return [id(self._engine.infos), *versions]

    def rebase(self) -> None:
        """Makes the next step send the whole shard. Local, but all ranks must call it. Needed after writes that do not change a
        version counter."""
        self._versions = None

    def _begin(self) -> None:
        """Copies the shard, as it is, into the rank's own copy."""
        self.stats["rebases"] += self._own is not None
        self._wait(lambda: not self._rounds)
        self._infos = self._engine.infos  # kept alive: `_versions_now` has its id
        self._memory = self._engine.shard_memory()
        layout = ShardLayout.of(self._memory, len(self._optimizer.param_groups), self.rank, self.world)
        if self._own is None or layout.text != self._own.layout.text:
            self._own = ShardCopy(layout, self._optimizer, 1, 2 * self._every + 1, is_pinned=self._memory.steps.is_cuda)
        self._own.begin(self._step, lambda mirror: layout.read(self._memory, mirror))
        self._note_versions()

    def _send_base(self) -> None:
        self._begin()
        self._put(_Round(self._step, has_base=True))
        self._wait(lambda: not self._rounds)

    def _put(self, given: _Round) -> None:
        with self._changed:
            self._rounds.append(given)
            self._changed.notify_all()

    def _wait(self, condition: Callable[[], bool]) -> None:
        """RuntimeError if the snapshots have ended; CommTimeout."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._over or condition(), self._timeout_s):
                raise CommTimeout(f"the other ranks have not received the snapshot within {self._timeout_s:g} s")
            if self._over is not None:
                raise RuntimeError(f"the snapshots have ended: {self._over}") from self._over

    # --- the thread --------------------------------------------------------------------------------------------------

    def _follow(self) -> None:
        try:
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: self._rounds or self._over)
                    if self._over is not None:
                        return
                given = self._rounds[0]
                self._do(given)
                with self._changed:
                    self._rounds.popleft()
                    self._changed.notify_all()
                if not given.has_base and not given.has_record:
                    return
        except BaseException as error:  # noqa: BLE001 (the training hears of it)
            self._end(error)
            self._link.give_up()  # the neighbours do not wait for what will not come
        finally:
            self._thread_ended.set()

    def _do(self, given: _Round) -> None:
        own, link = self._own, self._link
        assert own is not None
        text = own.layout.text.encode() if given.has_base else b""
        mine = [torch.tensor([len(text), given.has_record], dtype=torch.int64, device="cpu")]
        if given.has_base:
            mine += [torch.frombuffer(bytearray(text), dtype=torch.uint8), own.shard]
        if given.has_record:
            if given.ready is not None:
                given.ready.synchronize()  # not the training's thread
            own.keep(given.step)
            mine.append(own.record(given.step).memory)
        for tensor in mine:
            link.send(tensor, link.next)
        self._receive(given.step, lambda memory: link.receive(memory, link.previous))
        link.finish()
        for copy in filter(None, (own, self._kept)):
            copy.advance(given.step - 1 - self._every)

    def _receive(self, step: int, receive: Callable[[Tensor], Tensor]) -> None:
        """What the rank before sends in its round of a step."""
        length, has_record = receive(torch.empty(2, dtype=torch.int64, device="cpu")).tolist()
        if length:
            text = receive(torch.empty(length, dtype=torch.uint8, device="cpu"))
            self._replace_kept(ShardLayout(bytes(buffer_of(text)).decode()), step - has_record, receive)
        if has_record:
            assert self._kept is not None
            receive(self._kept.record(step).memory)
            self._kept.keep(step)

    def _replace_kept(self, layout: ShardLayout, step: int, receive: Callable[[Tensor], Tensor]) -> None:
        """A new copy, which replaces the last one when it is complete."""
        slots, file = self._every + 2, None
        if self._folder is None:
            kept = ShardCopy(layout, self._optimizer, 1, slots)
        else:
            about = {"layout": layout.text, "slots": slots}
            file = SnapshotFile(self._folder, self._run, layout.rank, about, ShardCopy.nbytes_of(layout, 2, slots))
            kept = ShardCopy(layout, self._optimizer, 2, slots, file.memory)
        self._file = file  # removes the last one too, whose name is the same
        kept.begin(step, receive)
        if file is not None:
            file.publish()
        self._kept = kept

    # --- what users call ---------------------------------------------------------------------------------------------

    def verify(self) -> int:
        """Compares both copies of every shard with the shard, bit for bit, and returns the step. Collective; waits for the
        thread.

        Raises:
            RuntimeError: A copy differs. All ranks raise it, and the message names the tensors. Or this rank's snapshots have
                ended.
            ValueError: The snapshots of another rank have ended.
            CommTimeout: Another rank did not receive the copies within ``timeout_s``."""
        self._engine.param_sync()
        is_edited = any(exchange(self._engine, self._versions != self._versions_now()))
        with failing_together(self._engine.expect_done_by_all, "Snapshots.verify"):
            if is_edited:
                self._send_base()
            self._wait(lambda: not self._rounds)
        own, kept, link = self._own, self._kept, self._link
        assert own is not None and kept is not None
        live = torch.empty_like(own.shard)
        own.layout.read(self._memory, live)
        link.send(live, link.next)
        theirs = link.receive(torch.empty_like(kept.shard), link.previous)
        link.finish()
        problems = []
        for copy, shard in ((own, live), (kept, theirs)):
            copy.advance(self._step)
            what = f"of rank {copy.layout.rank}'s shard at step {self._step}, in the copy on rank {self.rank}"
            problems += [f"{name} {what}" for name in copy.layout.mirror.unequal(copy.shard, shard)]
        problems = [problem for found in exchange(self._engine, problems) for problem in found]
        if problems:
            raise RuntimeError(f"a snapshot differs from the shard: {'; '.join(problems)}")
        return self._step

    def stop(self) -> None:
        """Ends the thread at once and keeps the copies for `restore`. Local. Call it after errors such as `PeerError`."""
        self._end(ClosedError("close() or stop() was called"))
        atexit.unregister(self.stop)
        self._engine.step_observers = [other for other in self._engine.step_observers if other != self._observe]
        if not self._thread_ended.is_set():
            self._link.give_up()
        self._thread_ended.wait(self._timeout_s)
        self._link.release()

    def _end(self, why: BaseException) -> None:
        with self._changed:
            self._over = self._over or why
            self._changed.notify_all()

    def close(self) -> None:
        """Ends the thread after the other ranks have received all records, and removes the copies and their files.

        Collective. Local after `stop`, or if the snapshots have failed. Further calls do nothing."""
        if self._over is None:
            self._put(_Round(self._step))
            self._thread_ended.wait(self._timeout_s)
        self.stop()
        if self._file is not None:
            self._file.remove()
        self._own = self._kept = self._file = None

    def __enter__(self) -> Snapshots:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """`close`; after an exception `stop`, so that the copies can be restored."""
        (self.close if kind is None else self.stop)()

    # --- going back --------------------------------------------------------------------------------------------------

    @staticmethod
    def restore(optimizer: ShardedOptimizer, source: Snapshots | str | os.PathLike[str] | None) -> int:
        """Sets a new optimizer and its parameters to the newest step of which every shard has a copy, and returns the step.
        Collective.

        The optimizer has as many ranks as before, and the same parameters and options. Hyperparameters stay those of the new
        optimizer. Set schedulers and the position in the data to the step.

        Args:
            optimizer: A new `ShardedAdamW`.
            source: The snapshots of this process, which the call stops; None on a rank that replaces a lost one; or the
                ``directory`` with the files of processes that have all ended.

        Returns:
            Number of steps that were done, for ``first_step``.

        Raises:
            ValueError: No rank has a copy of some shard, or the copies do not fit the optimizer. All ranks raise it, and
                nothing has changed.
            PermissionError: Other users have access to the folder."""
        engine_of(optimizer)  # TypeError
        copies: list[tuple[str, ShardCopy]] = []
        with failing_together(optimizer._engine.expect_done_by_all, "Snapshots.restore"):
            if isinstance(source, Snapshots):
                source.stop()
                copies = [(source._run, copy) for copy in (source._own, source._kept) if copy is not None]
            elif source is not None:
                for about, memory in open_snapshots(private_folder(source)):
                    layout = ShardLayout(about["layout"])
                    copies.append((about["run"], ShardCopy(layout, optimizer, 2, about["slots"], memory)))
        return restore_from(optimizer, copies)
