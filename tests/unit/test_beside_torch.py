"""The set-up of `make`, with the real Makefile and pip, an environment of its own, and packages that are names and versions."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import zipfile
from pathlib import Path

import pytest

from tests import beside_torch
from tests.support.packages import ROOT, plain_environment
from tests.support.requirements import slow_case

pytestmark = pytest.mark.timeout_s(300)

PINS = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().split() if "==" in line)
CUDA_13 = ("nvidia-nccl-cu13==2.29.7; platform_system == 'Linux'",)
CUDA_12 = ("nvidia-nccl-cu12==2.27.5; platform_system == 'Linux' and platform_machine != 'none'",)
CPU = ("nvidia-nccl-cu13==2.29.7; platform_system == 'Windows'",)
# Stands for setuptools, which would be fetched: the package with its real requirements, and nothing in it.
BACKEND = """
import json, zipfile
def build_editable(folder, config_settings=None, metadata_directory=None):
    name = "bucketwheel-0.1.0-py3-none-any.whl"
    with zipfile.ZipFile(f"{folder}/{name}", "w") as wheel:
        for path, text in json.load(open("wheel.json")).items():
            wheel.writestr(path, text)
    return name
"""


def wheel_files(
    name: str, version: str, requires: tuple[str, ...] = (), extras: tuple[str, ...] = ()
) -> dict[str, str]:
    info = f"{name.replace('-', '_')}-{version}.dist-info"
    head = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    lines = [f"Provides-Extra: {extra}" for extra in extras] + [f"Requires-Dist: {one}" for one in requires]
    tag = "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    return {
        f"{info}/METADATA": "\n".join([head, *lines, ""]).replace("\n\n", "\n"),
        f"{info}/WHEEL": tag,
        f"{info}/RECORD": "",
    }


def make_wheel(folder: Path, name: str, version: str, requires: tuple[str, ...] = ()) -> Path:
    path = folder / f"{name.replace('-', '_')}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        for place, text in wheel_files(name, version, requires).items():
            wheel.writestr(place, text)
    return path


class Tree:
    """A copy of what the set-up reads, and an index of placeholders."""

    def __init__(self, root: Path) -> None:
        self.root, self.index = root / "tree", root / "index"
        self.index.mkdir(parents=True)
        (self.root / "tests").mkdir(parents=True)
        (self.root / "csrc").mkdir()
        for name in ("Makefile", "constraints.txt", "build_backend.py", "setup.py", "tests/beside_torch.py"):
            shutil.copy(ROOT / name, self.root / name)
        (self.root / "build_backend.py").write_text(BACKEND)
        (self.root / "pyproject.toml").write_text(
            '[build-system]\nrequires = []\nbuild-backend = "build_backend"\nbackend-path = ["."]\n'
        )
        needs, extras = self.read_project()
        of_extras = [
            f'{one}{" and" if ";" in one else ";"} extra == "{extra}"' for extra in extras for one in extras[extra]
        ]
        files = wheel_files("bucketwheel", "0.1.0", (*needs, *of_extras), tuple(extras))
        files |= {"bucketwheel/__init__.py": "", "bucketwheel/native/modules.py": "def native(): pass"}
        (self.root / "wheel.json").write_text(json.dumps(files))
        for requirement in {*needs, *(one for extra in extras.values() for one in extra)}:
            name = beside_torch.name_of(requirement)
            if name not in ("torch", "bucketwheel") and not name.startswith("nvidia"):
                make_wheel(self.index, name, PINS.get(name, "99.0"))
        for name, version in (("cu12", "2.27.5"), ("cu13", "2.29.7"), ("cu13", PINS["nvidia-nccl-cu13"])):
            make_wheel(self.index, f"nvidia-nccl-{name}", version)
        make_wheel(self.index, "nvidia-nccl-cu13", "2.99.0")
        # What pip would rather take: newer, and content with the pinned NCCL.
        make_wheel(self.index, "torch", "2.99.0", (f"nvidia-nccl-cu13=={PINS['nvidia-nccl-cu13']}",))

    @staticmethod
    def read_project() -> tuple[list[str], dict[str, list[str]]]:
        try:
            import tomllib
        except ImportError:  # Python 3.10
            from pip._vendor import tomli as tomllib
        project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
        return project["dependencies"], project["optional-dependencies"]

    def setup(self, *words: str, status: int = 0) -> str:
        """What `make setup` says."""
        changes = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(self.index), "PIP_CONFIG_FILE": os.devnull}
        environment = plain_environment(**changes, PIP_DISABLE_PIP_VERSION_CHECK="1")
        for name in ("TORCH", "PYTHON", "MAKEFLAGS", "MFLAGS", "MAKEOVERRIDES", "MAKELEVEL"):  # of `make test`
            environment.pop(name, None)
        done = subprocess.run(
            ["make", "setup", *words],
            cwd=self.root,
            env=environment,
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )
        assert done.returncode == status, done.stdout + done.stderr
        return done.stdout + done.stderr

    def versions(self) -> dict[str, str]:
        """Of torch and NCCL."""
        found = [
            path.name.removesuffix(".dist-info").rsplit("-", 1) for path in self.root.glob(".venv/lib/*/*/*.dist-info")
        ]
        return {name: version for name, version in found if name.startswith(("torch", "nvidia"))}


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path)


@pytest.mark.parametrize(
    ("requires", "nccl"),
    [
        slow_case(CPU, {"nvidia_nccl_cu13": PINS["nvidia-nccl-cu13"]}),
        (CUDA_13, {"nvidia_nccl_cu13": "2.29.7"}),
        slow_case(CUDA_12, {"nvidia_nccl_cu12": "2.27.5"}),
    ],
    ids=["CPU", "CUDA 13", "CUDA 12"],
)
def test_torch_and_its_nccl_stay(tree: Tree, requires: tuple[str, ...], nccl: dict[str, str]) -> None:
    version = PINS["torch"] + ("+cpu" if requires is CPU else "")
    make_wheel(tree.index, "torch", version, requires)
    tree.setup()
    assert tree.versions() == {"torch": version, **nccl}
    (tree.root / ".venv" / "constraints.txt").write_text("torch==2.0.0\n")  # as if pip had replaced it
    command = [str(tree.root / ".venv" / "bin" / "python"), "tests/beside_torch.py", ".venv/constraints.txt", "--check"]
    done = subprocess.run(command, cwd=tree.root, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1 and f"pip has replaced it by {version}" in done.stderr


def test_constraints() -> None:
    pins = "# versions\ntorch==2.13.0\nnvidia-nccl-cu13==2.30.7\nruff==0.17.6\n"
    assert beside_torch.constraints(pins, "2.12.0+cpu", has_nccl=False) == (
        "torch==2.12.0+cpu\nnvidia-nccl-cu13==2.30.7\nruff==0.17.6\n"
    )
    assert beside_torch.constraints(pins, "2.12.0", has_nccl=True) == "torch==2.12.0\nruff==0.17.6\n"
