"""The doctor: what it sees in trees that are well, incomplete or broken, and its exit status."""

from __future__ import annotations

import json
import os
import platform
from pathlib import Path
from typing import Any

import pytest
import torch

from bucketwheel.errors import BuildError, DeviceError
from bucketwheel.tools import doctor
from tests.unit.tiny_tree import TinyTree

H200 = [("NVIDIA H200", (9, 0))]


@pytest.fixture
def tree(tmp_path: Path) -> TinyTree:
    tree = TinyTree(tmp_path)
    tree.add_cuda()
    return tree


def run(tree: TinyTree, *arguments: str, status: int, driver: str = "no driver here", **changes: str | None) -> str:
    """What a doctor says that must end with ``status``, and nvidia-smi to it."""
    script = tree.root / "driver" / "nvidia-smi"
    script.parent.mkdir(exist_ok=True)
    script.write_text(f"#!/bin/sh\necho '{driver}'\n")
    script.chmod(0o755)
    code = f"import sys; from bucketwheel.__main__ import main; sys.exit(main(['doctor', *{arguments!r}]))"
    path = {"PATH": f"{tree.root / 'driver'}:{os.environ['PATH']}", "CUDA_VISIBLE_DEVICES": ""}
    process = tree.start(code, **{**path, **changes})
    out, err = process.communicate(timeout=250)
    assert process.returncode == status, (out, err)
    return out


def test_nothing_is_built_unless_asked(tree: TinyTree) -> None:
    text = run(tree, status=0)
    assert "CPU module   not built yet" in text and "CUDA module  not built yet" in text and "all well" in text
    assert tree.compiled() == tree.nvcc_calls() == []
    of_torch = f"CUDA {torch.version.cuda}, NCCL" if torch.version.cuda else "without CUDA"
    assert f"torch        {torch.__version__}, {of_torch}" in text and f"BW_CACHE_DIR={tree.cache}" in text
    assert f"compiler     {tree.compiler}" in text and len(text.splitlines()) < 25
    found = json.loads(run(tree, "--json", status=0))
    assert (
        found["compiler"].startswith(f"{tree.compiler}: c++ (") and found["nvcc"] == f"{tree.nvcc}: nvcc: release 13.0"
    )
    assert found["system"] == platform.platform() and f"CXX={tree.compiler}" in found["environment"]
    text = run(tree, status=0, NVCC="no-such-nvcc")
    assert "nvcc         none, and not needed here" in text and "CUDA module  none, and not needed here" in text
    assert "broken: the native module is not built yet, and BW_JIT=0" in run(tree, status=2, BW_JIT="0")


@pytest.mark.slow
def test_build(tree: TinyTree) -> None:
    text = run(tree, "--build", "cpu", "--build", "cuda", status=1, driver="NVIDIA H200, 8.0")
    assert "2.28.9, the system (/tiny/libnccl.so.2)" in text and len(tree.compiled()) == 4
    for kind in ("cpu", "cuda"):
        assert f"{kind.upper()} module".ljust(13) + f"cached ({tree.entries(kind)[0]}" in text
    assert "warning: the CUDA module is for GPU architectures 9.0, which do not run on NVIDIA H200 (8.0): set" in text
    tree.write("base/second.cpp", "#error not today\n")
    text = run(tree, "--build", "cpu", status=2)
    assert "broken: bucketwheel needs its native module: compiling" in text and text.splitlines()[-1] == "broken"
    text = run(tree, status=1, driver="NVIDIA H200, 9.0", NVCC="no-such-nvcc")
    assert "warning: there are GPUs, but: bucketwheel needs its CUDA module" in text


def examined(monkeypatch: pytest.MonkeyPatch, gpus: list[Any], **errors: Exception) -> tuple[str, str, str]:
    """The CUDA module, NCCL, and all problems, where these looks fail."""

    def fail(error: Exception) -> None:
        raise error

    looks = {"_module": lambda module, *_: f"cached ({module.kind})", "_nccl": lambda: "2.28.9", "_cache": lambda: "/c"}
    looks |= {name: lambda *_, error=error: fail(error) for name, error in errors.items()}
    for name, look in looks.items():
        monkeypatch.setattr(doctor, name, look)
    monkeypatch.setattr(doctor, "_gpus", lambda: gpus)
    facts, broken, concerns = doctor.examine()
    return facts["CUDA module"], facts.get("NCCL", ""), " | ".join([*broken, *concerns])


def test_what_only_gpus_need_reads_as_no_fault_where_there_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.delenv("BW_NCCL_LIB", raising=False)
    none = DeviceError("NCCL: none was found")
    assert examined(monkeypatch, H200) == ("cached (cuda)", "2.28.9", "")
    assert examined(monkeypatch, [], _nccl=none) == ("cached (cuda)", "none, and not needed here", "")  # (issue 44)
    assert examined(monkeypatch, H200, _nccl=none)[1:] == ("missing: none was found", "NCCL: none was found")
    monkeypatch.setenv("BW_NCCL_LIB", "/x")
    assert examined(monkeypatch, [], _nccl=none)[2] == "NCCL: none was found"
    monkeypatch.setenv("BW_TYPO", "1")
    assert (
        "BW_TYPO is set, but bucketwheel has no such variable" in examined(monkeypatch, [], _cache=BuildError("no"))[2]
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "torch sees none" in examined(monkeypatch, H200)[2]
    monkeypatch.setattr(torch.version, "cuda", None)
    assert "is built without CUDA" in examined(monkeypatch, H200)[2]
    monkeypatch.setattr(doctor, "_DLPACK", "no_such_attribute")
    assert "install torch 2.10 or later" in examined(monkeypatch, [])[2]
