"""``python -m bucketwheel checkpoint DIR``."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from bucketwheel.__main__ import main
from tests.unit.test_format import OF_TORCH_2_15
from tests.unit.test_writer import save, some_state, values

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")


def test_what_it_holds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(tmp_path, some_state())
    assert main(["checkpoint", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert re.split(r"\s{2,}", lines[0]) == ["name", "dtype", "shape", "boxes", "bytes"]
    rows = {line.split("  ")[0]: re.split(r"\s{2,}", line)[1:] for line in lines[1:-2]}
    assert rows["matrix"] == ["float32", "[300, 70]", "1", "84000"] and rows["scalar"] == ["float32", "[]", "1", "4"]
    assert rows["half"] == ["bfloat16", "[7]", "1", "14"] and rows["group.lr"] == ["object"]
    assert lines[-2].startswith("6 tensors in 6 boxes, 3 objects, ") and lines[-2].endswith(" bytes in 1 file")
    assert re.fullmatch(r"written by 1 rank; checksums of \d+ bytes agree", lines[-1])


def test_one_of_torchs_and_a_damaged_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoint", str(OF_TORCH_2_15)]) == 0
    assert "written by another writer than bucketwheel's: it has no checksums" in capsys.readouterr().out
    x = values(500)
    save(tmp_path, {"x": x})
    (file,) = tmp_path.glob("data-*/*")
    file.write_bytes(file.read_bytes().replace(x[100:102].numpy().tobytes(), bytes(8)))
    assert main(["checkpoint", str(tmp_path), "--quick"]) == 0
    assert "checksums not compared" in capsys.readouterr().out
    assert main(["checkpoint", str(tmp_path)]) == 1
    found = capsys.readouterr()
    assert re.match(r"damaged: .*__0_0.distcp is damaged: the bytes of 'x' at .* do not match", found.err)
    assert "agree" not in found.out


def test_the_reader_of_a_command_may_stop(tmp_path: Path) -> None:
    """As in ``| head`` (issue 44)."""
    save(tmp_path, {"x": torch.zeros(3)})
    reads, writes = os.pipe()
    os.close(reads)
    argv = [sys.executable, "-m", "bucketwheel", "checkpoint", str(tmp_path)]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    found = subprocess.run(argv, check=False, stdout=writes, stderr=subprocess.PIPE, text=True, env=env, timeout=120)
    os.close(writes)
    assert (found.returncode, found.stderr) == (141, "")
