"""The code of a documentation page, run as one script on two ranks.

    python -m tests.support.pages docs/quickstart.md

The ```python blocks of a page run in order, in one namespace. ``<!-- run ... -->`` comments are code that a reader does not
see. A ```{.python .norun} block, which needs what a test has not (several GPUs, another library), is compiled only.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import tempfile
import textwrap
from pathlib import Path
from typing import Any
from unittest import mock

import torch.distributed as dist

from bucketwheel import testing

ROOT = Path(__file__).resolve().parents[2]
_CODE = re.compile(r"^ *<!-- run\n(?P<hidden>.*?)^ *-->|^ *```(?P<info>[^\n]*)\n(?P<shown>.*?)^ *```", re.M | re.S)


def python_blocks(page: Path) -> list[tuple[str, bool]]:
    """Source of each block, padded so that line numbers are those of the page; whether it is run."""
    text, found = page.read_text(), []
    for match in _CODE.finditer(text):
        info = "python" if match["hidden"] is not None else match["info"]
        if not re.match(r"python|{ *\.python", info):
            continue
        group = "hidden" if match["hidden"] is not None else "shown"
        source = "\n" * text.count("\n", 0, match.start(group)) + textwrap.dedent(match[group])
        found.append((source, ".norun" not in info))
    return found


def shell_lines(page: Path) -> list[str]:
    """Commands of ```sh and ```console blocks, continued lines joined."""
    blocks = [m["shown"] for m in _CODE.finditer(page.read_text()) if re.match(r"sh|console|bash", m["info"] or "")]
    lines = "\n".join(map(textwrap.dedent, blocks)).replace("\\\n", " ").splitlines()
    return [line.removeprefix("$ ").partition(" #")[0].strip() for line in lines if line.strip()]


def words(page: Path) -> int:
    """Words of a page without code blocks and the bars of tables."""
    text = re.sub(r"^ *```.*?^ *```|<!--.*?-->", "", page.read_text(), flags=re.M | re.S)
    return len(text.replace("|", " ").split())


def run_page(rank: int, world: int, page: Path, folder: Path) -> dict[str, Any]:
    """Runs in a rank whose process group has been made: a page that makes one, or ends it, does nothing by that."""
    names: dict[str, Any] = {"__name__": "__main__"}
    with contextlib.ExitStack() as undo:
        undo.callback(os.chdir, os.getcwd())
        undo.enter_context(mock.patch.object(sys, "path", list(sys.path)))
        os.chdir(folder)
        ranks = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
        undo.enter_context(mock.patch.dict(os.environ, ranks))
        for name in ("init_process_group", "destroy_process_group"):
            undo.enter_context(mock.patch.object(dist, name, lambda *args, **options: None))
        for source, runs in python_blocks(page):
            code = compile(source, page.name, "exec")
            if runs:
                exec(code, names)
    return names


def _run(rank: int, world: int, page: Path, folder: Path) -> None:
    run_page(rank, world, page, folder)


if __name__ == "__main__":
    for name in sys.argv[1:]:
        with tempfile.TemporaryDirectory() as folder:
            testing.run_ranks(_run, 2, Path(name).resolve(), Path(folder), timeout_s=120)
        print(f"{name}: {words(Path(name))} words, {len(python_blocks(Path(name)))} blocks of Python")
