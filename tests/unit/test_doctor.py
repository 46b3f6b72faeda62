"""The doctor: what it sees in trees that are well, incomplete or broken, and its exit status."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from bucketwheel.errors import DeviceError
from bucketwheel.tools import doctor
from tests.unit.tiny_tree import TinyTree

H200 = {"name": "NVIDIA H200", "capability": [9, 0]}


@pytest.fixture
def tree(tmp_path: Path) -> TinyTree:
    tree = TinyTree(tmp_path)
    tree.add_cuda()
    put_driver(tree, "no driver here")
    return tree


def put_driver(tree: TinyTree, line: str) -> None:
    """What nvidia-smi says to the doctors, whatever machine this is."""
    script = tree.root / "driver" / "nvidia-smi"
    script.parent.mkdir(exist_ok=True)
    script.write_text(f"#!/bin/sh\necho '{line}'\n")
    script.chmod(0o755)


def run(tree: TinyTree, *arguments: str, status: int, **changes: str | None) -> Any:
    """The answer of a doctor that must end with ``status``: an object with --json, else text."""
    code = f"import sys; from bucketwheel.__main__ import main; sys.exit(main(['doctor', *{arguments!r}]))"
    driver = {"PATH": f"{tree.root / 'driver'}:{os.environ['PATH']}", "CUDA_VISIBLE_DEVICES": ""}
    process = tree.start(code, **{**driver, **changes})
    out, err = process.communicate(timeout=100)
    assert process.returncode == status, (out, err)
    return json.loads(out) if "--json" in arguments else out


# ---- trees -----------------------------------------------------------------------------------------------------------


def test_nothing_is_built_unless_asked(tree: TinyTree) -> None:
    found = run(tree, "--json", status=0)
    assert found["modules"]["cpu"]["state"] == found["modules"]["cuda"]["state"] == "missing"
    assert found["modules"]["cuda"]["archs"] == "9.0"
    assert tree.compiled() == tree.nvcc_calls() == []
    assert found["errors"] == found["warnings"] == [] and found["status"] == 0
    assert found["torch"] == {"version": torch.__version__, "cuda": torch.version.cuda, "dlpack": True}
    assert found["python"]["path"] == sys.executable
    assert found["tools"]["nvcc"] == f"nvcc: release 13.0 ({tree.nvcc})"
    assert str(tree.compiler) in found["tools"]["compiler"]
    assert found["environment"]["BW_CACHE_DIR"] == str(tree.cache) and "PATH" not in found["environment"]


def test_build(tree: TinyTree) -> None:
    found = run(tree, "--json", "--build", "cpu", "--build", "cuda", status=0)
    for kind in ("cpu", "cuda"):
        module = found["modules"][kind]
        (entry,) = tree.entries(kind)
        assert module["state"] == "cached" and module["path"].startswith(f"{entry}/_{kind}.")
        assert entry.name in found["cache"]["entries"]
    text = run(tree, "--build", "cpu", status=0)
    assert "all well" in text and "    cpu          state cached, path" in text and tree.entries()[0].name in text
    assert "    path         /tiny/libnccl.so.2" in text and "    version      2.28.9" in text
    assert len(tree.compiled()) == 4


def test_a_broken_build_is_status_2(tree: TinyTree) -> None:
    tree.write("base/second.cpp", "#error not today\n")
    text = run(tree, "--build", "cpu", status=2)
    assert "broken: bucketwheel needs its native module: compiling" in text and "not today" in text
    assert text.endswith("broken\n")


def test_a_gpu_without_nvcc_is_a_warning(tree: TinyTree) -> None:
    put_driver(tree, "NVIDIA H200, 9.0")
    found = run(tree, "--json", status=1, NVCC="no-such-nvcc")
    assert found["gpus"] == {"devices": [H200], "torch_sees_them": False}
    assert any(text.startswith("there are GPUs, but: bucketwheel needs its CUDA module") for text in found["warnings"])


@pytest.mark.slow
def test_a_build_that_is_forbidden_or_cannot_be_kept(tree: TinyTree) -> None:
    assert "BW_JIT=0" in run(tree, "--json", status=2, BW_JIT="0")["errors"][0]
    (tree.root / "file").touch()  # stands for a read-only file system: permissions do not stop root
    found = run(tree, "--json", status=2, BW_CACHE_DIR=str(tree.root / "file" / "cache"))
    assert "the cache cannot be written" in found["errors"][0] and "BW_CACHE_DIR" in found["warnings"][0]


# ---- judging ---------------------------------------------------------------------------------------------------------


def well(**changes: Any) -> doctor.Facts:
    cuda = {"state": "cached", "path": "/cache/_cuda.so", "archs": "9.0"}
    return {
        "torch": {"version": "2.13.0", "cuda": "13.0", "dlpack": True},
        "tools": {"ninja": "/usr/bin/ninja"},
        "gpus": {"devices": [H200], "torch_sees_them": True},
        "modules": {"cpu": {"state": "cached", "path": "/cache/_cpu.so"}, "cuda": cuda},
        "cache": {"path": "/cache", "writable": True, "network": False, "entries": []},
        "environment": {},
        "nccl": {"torch": "2.28.9", "path": "/nccl", "found": "loaded already", "version": 22809, "features": {}},
        **changes,
    }


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"gpus": {"devices": [{**H200, "capability": [8, 0]}], "torch_sees_them": True}}, "do not run on NVIDIA H200"),
        ({"gpus": {"devices": [H200], "torch_sees_them": False}}, "torch sees none"),
        ({"torch": {"version": "2.13.0+cpu", "cuda": None, "dlpack": True}}, "is built without CUDA"),
        ({"cache": {**well()["cache"], "network": True}}, "network file system"),
        ({"cache": {**well()["cache"], "writable": False}}, "cannot be written: name another"),
        ({"cache": {"path": None, "error": "the cache folder /tmp/x cannot be used"}}, "cannot be used"),
        ({"nccl": {"torch": "2.28.9", "error": "NCCL: none was found"}}, "none was found"),
    ],
)
def test_warnings(changes: dict[str, Any], says: str) -> None:
    assert doctor.judge(well(), ["cpu", "cuda"]) == ([], [])
    errors, concerns = doctor.judge(well(**changes))
    assert errors == [] and len(concerns) == 1 and says in concerns[0]


def test_a_missing_nccl_matters_only_where_it_is_needed() -> None:
    """With GPUs and a torch for them, or where the user named one."""
    no_nccl = {"torch": None, "error": "NCCL: none was found"}
    on_cpu = well(gpus={"devices": [], "torch_sees_them": False}, nccl=no_nccl)
    assert doctor.judge(on_cpu) == ([], [])
    assert doctor.judge({**on_cpu, "environment": {"BW_NCCL_LIB": "/x"}}) == ([], ["NCCL: none was found"])
    assert doctor.judge(well(nccl={"torch": "2.28.9", "unknown": "until the native module is built"})) == ([], [])


def test_what_only_gpus_need_reads_as_no_fault_where_there_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:  # (issue 44)
        raise DeviceError("NCCL: none was found")

    monkeypatch.setattr(doctor.nccl_library, "info", fail)
    monkeypatch.setenv("NVCC", "no-such-nvcc")
    monkeypatch.delenv("BW_NCCL_LIB", raising=False)
    for devices, words in (([], "none, and not needed here"), ([H200], "missing: ")):
        monkeypatch.setattr(doctor, "_gpus", lambda devices=devices: {"devices": devices, "torch_sees_them": False})
        monkeypatch.setattr(doctor.torch.version, "cuda", "13.0" if devices else None)
        found = doctor.facts()
        text = doctor.render({**found, "status": 0, "errors": [], "warnings": []})
        assert f"    nvcc         {words}" in text
        assert ("    cuda         state unavailable, and not needed here" in text) == (not devices)
        assert ("    found        none, and not needed here" in text) == ("NCCL: none" not in text) == (not devices)
    monkeypatch.setenv("BW_NCCL_LIB", "/x")
    assert "error" in doctor.facts()["nccl"]


def test_what_is_broken() -> None:
    errors, _ = doctor.judge(well(torch={"version": "2.9.0", "cuda": "12.8", "dlpack": False}))
    assert errors == ["torch 2.9.0 has no DLPack exchange API: install torch 2.10 or later"]
    missing = {"cpu": {"state": "missing"}, "cuda": {"state": "missing"}}
    errors, _ = doctor.judge(well(modules=missing, tools={"ninja": "missing: ninja is not installed"}))
    assert errors == ["the native module is not built yet, and ninja is not installed: pip install ninja"]
