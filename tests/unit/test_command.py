"""``bucketwheel`` and ``python -m bucketwheel``: what comes without torch, and what a program that imports bucketwheel gets."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from bucketwheel import __version__
from bucketwheel.__main__ import _COMMANDS

SOURCES = Path(__file__).resolve().parents[2] / "python"
SCRIPT = ["-c", "import sys; from bucketwheel_command import main; sys.exit(main())"]  # as pip writes it
# Raises on an import of torch.
WITHOUT_TORCH = "import sys; sys.modules['torch'] = None"


def run(folder: Path, *words: str, first: str = "") -> tuple[int, str]:
    """The status of a Python that runs ``first`` before anything else, and all that it says."""
    (folder / "sitecustomize.py").write_text(first)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), str(SOURCES)])}
    done = subprocess.run(
        [sys.executable, *words], env=environment, cwd=folder, capture_output=True, text=True, timeout=100, check=False
    )
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize("program", [SCRIPT, ["-m", "bucketwheel"]], ids=["script", "-m"])
def test_usage_and_version_come_without_torch(program: list[str], tmp_path: Path) -> None:
    assert run(tmp_path, *program, "--version", first=WITHOUT_TORCH) == (0, f"bucketwheel {__version__}\n")
    usage = f"usage: bucketwheel [-h] [--version] {{{','.join(_COMMANDS)}}} ...\n"
    status, text = run(tmp_path, *program, first=WITHOUT_TORCH)
    assert status == 2 and text.startswith(usage)
    for words in (["--help"], ["plan", "--help"], ["doctor", "--help"], ["cache", "clear", "--help"]):
        status, text = run(tmp_path, *program, *words, first=WITHOUT_TORCH)
        assert status == 0 and text.startswith("usage: bucketwheel "), text
    status, text = run(tmp_path, *program, "doctor", first=WITHOUT_TORCH)
    assert status == 2 and text.startswith("bucketwheel doctor: torch cannot be imported: ")
    assert f"Install torch 2.10 or later for {sys.executable}" in text


def test_a_command_with_torch(tmp_path: Path) -> None:
    status, text = run(tmp_path, "-m", "bucketwheel", "checkpoint", str(tmp_path))
    assert status == 1 and text.startswith("damaged: ")


def test_programs_of_others_have_every_name(tmp_path: Path) -> None:
    """Also one whose package imports bucketwheel while Python looks for what -m names."""
    trainer = tmp_path / "trainer"
    trainer.mkdir()
    says = "import bucketwheel as bw; print(bw.Pool.__name__)"
    (trainer / "__init__.py").write_text(says)
    (trainer / "__main__.py").touch()
    (tmp_path / "bucketwheel_trainer.py").write_text(says)
    for words in (["-m", "trainer", "bucketwheel"], ["-m", "bucketwheel_trainer"], ["-c", says, "bucketwheel"]):
        assert run(tmp_path, *words) == (0, "Pool\n")


def test_a_program_that_imports_the_command_has_every_name(tmp_path: Path) -> None:
    says = "import sys, bucketwheel_command; assert 'torch' not in sys.modules; import bucketwheel as bw; print(bw.Pool.__name__)"
    assert run(tmp_path, "-c", says) == (0, "Pool\n")
