"""The names of `bw.checkpoint`: they are listed, and type checkers see the signatures behind them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from bucketwheel import checkpoint

ROOT = Path(__file__).resolve().parents[2]
CALLS = """
import bucketwheel as bw

bw.checkpoint.save("folder", extra={})
bw.checkpoint.save(3, "x", lost=1)
bw.checkpoint.lost
"""


def test_dir_lists_what_there_is() -> None:
    assert dir(checkpoint) == sorted(checkpoint.__all__)
    assert all(hasattr(checkpoint, name) for name in dir(checkpoint))
    with pytest.raises(AttributeError, match="has no attribute 'lost'"):
        checkpoint.lost  # noqa: B018


@pytest.mark.slow
def test_a_type_checker_sees_the_signatures(tmp_path: Path) -> None:
    pytest.importorskip("mypy", reason="mypy is not installed")
    (tmp_path / "calls.py").write_text(CALLS)
    command = [sys.executable, "-m", "mypy", "--cache-dir", str(tmp_path / "cache"), str(tmp_path / "calls.py")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=110, check=False)
    found = [line.split(": error: ")[1] for line in done.stdout.splitlines() if ": error: " in line]
    assert len(found) == 4, done.stdout
    assert 'Unexpected keyword argument "lost" for "save"' in found[0]
    assert 'Argument 1 to "save" has incompatible type "int"' in found[1]
    assert 'Module has no attribute "lost"' in found[3]
