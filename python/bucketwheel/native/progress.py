"""What a build tells while it runs: a line every 10 s, of the builder and of those who wait for it alike.

Each reads from the log of the build how far ninja is, which goes on without its builder: [Note: a builder that is killed].
"""

from __future__ import annotations

import re
import time
from pathlib import Path

from bucketwheel.native.toolchain import Module, say

REPORT_S = 10.0
# Begins ninja's line for each file that it has made: how many are made, of how many.
_DONE = re.compile(r"^\[(\d+)/(\d+)", re.MULTILINE)


class Progress:
    """Of the build of ``module`` that writes to ``log``, in a build folder with build.ninja."""

    def __init__(self, module: Module, log: Path, folder: Path) -> None:
        self._module, self._log, self._ninja = module, log, folder / "build.ninja"
        self._start = time.monotonic()
        self._next_s = REPORT_S

    def show(self, by: str = "") -> None:
        """If it is time. ``by``: who builds, where that is another process. To be called several times a second."""
        elapsed_s = time.monotonic() - self._start
        if elapsed_s < self._next_s:
            return
        done, total = self._files()
        title, usual = self._module.title, self._module.usual_time and f" (usually {self._module.usual_time})"
        say(f"{title}, being built{by and f' by {by}'}: {done} of {total} files in {elapsed_s:.0f} s{usual}")
        self._next_s += REPORT_S

    def _files(self) -> tuple[int, int]:
        """How many are made, and of how many."""
        try:
            if found := _DONE.findall(self._log.read_text(errors="replace")):
                return int(found[-1][0]), int(found[-1][1])
            return 0, max(self._ninja.read_text().count("\nbuild "), 1)
        except OSError:  # the builder has not come so far
            return 0, 1
