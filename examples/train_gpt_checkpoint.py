"""How train_gpt.py saves and resumes: `bw.checkpoint` and what the training adds to it, which is little.

A checkpoint has the parameters, the optimizer's states, the scheduler's, how many steps are done, and the losses so far.
Batches and dropout follow from the step. The ranks share the folder, and any number of ranks may resume from it.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
import torch.distributed.checkpoint  # noqa: F401 (takes a second, which the first save would wait for)
from tqdm import tqdm

import bucketwheel as bw

if TYPE_CHECKING:
    from train_gpt import Run

    from bucketwheel.checkpoint.saving import PendingSave


class Checkpoints:
    """The checkpoint in ``folder``: each save replaces the last one, whole or not at all. All methods but `summary` are
    collective.
    """

    def __init__(self, folder: str, every: int) -> None:
        self.folder = Path(folder)
        self.every = every
        self.step = 0  # of the last save, or of what was restored
        self.pending: PendingSave | None = None  # from start_save to finish_save
        self.saves = 0
        self.stalled_s = 0.0  # how long the training has waited for saves

    def save_if_due(self, run: Run, step: int) -> None:
        if self.every and step % self.every == 0 and step > self.step:
            self.start_save(run, step)

    def start_save(self, run: Run, step: int) -> None:
        """Save the run as it is after ``step`` steps, while it trains on."""
        self.finish_save()
        begin = time.perf_counter()
        extra = {"step": step, "schedule": run.schedule.state_dict()}
        extra |= {"losses": run.record.losses, "validation": run.record.validation}
        self.pending = bw.checkpoint.async_save(str(self.folder), run.model, run.optimizer, extra)
        self.stalled_s += time.perf_counter() - begin
        self.step = step

    def finish_save(self) -> None:
        """Wait until the save is on disk; with a bar where stderr is a terminal and that takes more than a second."""
        if self.pending is None:
            return
        begin = time.perf_counter()
        silent = True if dist.is_initialized() and dist.get_rank() else None
        with tqdm(desc="saving", total=1, unit="B", unit_scale=True, delay=1, disable=silent, leave=False) as bar:
            while not self.pending.done():
                written, bar.total = self.pending.progress()
                bar.update(written - bar.n)
                time.sleep(0.01)
        self.pending.wait()
        self.saves += 1
        self.stalled_s += time.perf_counter() - begin + self.pending.stats.waited_s  # the latter in steps
        self.pending = None

    def restore(self, run: Run) -> int:
        """How many steps are done: 0, and nothing is changed, where the folder has no checkpoint."""
        seen = torch.tensor(int((self.folder / ".metadata").is_file()))
        if dist.is_initialized():
            dist.all_reduce(seen)
        if seen == 0:
            return 0
        extra = bw.checkpoint.load(str(self.folder), run.model, run.optimizer)
        run.schedule.load_state_dict(extra["schedule"])
        run.record.losses, run.record.validation = extra["losses"], extra["validation"]
        self.step = extra["step"]
        return self.step

    def summary(self) -> str:
        return f"training waited {self.stalled_s:.3f} s for {self.saves} save(s) in {self.folder}"
