"""What is in the sdist and in the wheels made from it, and that they work: installed where nothing of this tree is seen.

Needs the package index, for setuptools and, with BW_AOT, pybind11 and ninja.
"""

from __future__ import annotations

import re
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests.support.packages import ROOT, copy_tree, make_sdist, plain_environment, run
from tests.support.requirements import need_nvcc

pytestmark = [pytest.mark.slow, pytest.mark.timeout_s(900)]

NO_PROMISE = (
    "array-bounds|restrict|maybe-uninitialized"  # gcc is wrong about these now and then, as in cmake/CMakePresets.json
)
PACKAGE = ROOT / "python" / "bucketwheel"
JUNK = ("csrc/base/error.h~", "csrc/base/.error.h.swp", "csrc/module.o", "csrc/#error.h#")
JUNK += ("python/bucketwheel/_cpu.so", "python/bucketwheel/__pycache__/errors.cpython-311.pyc", "tests/test_junk.py")


def sources() -> set[str]:
    return {str(path.relative_to(ROOT)) for path in (ROOT / "csrc").rglob("*") if path.is_file()}


def modules() -> set[str]:
    found = [path for path in PACKAGE.rglob("*") if path.suffix in (".py", ".pyi") or path.name == "py.typed"]
    return {str(path.relative_to(PACKAGE)) for path in found}


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a tree in which somebody has worked."""
    folder = tmp_path_factory.mktemp("sdist")
    tree = copy_tree(folder / "tree")
    for name in JUNK:
        (tree / name).parent.mkdir(exist_ok=True)
        (tree / name).write_text("junk")
    return make_sdist(tree, folder)


def test_the_sdist(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames() if not archive.getmember(name).isdir()}
    wanted = sources() | {f"python/bucketwheel/{name}" for name in modules()} | {"python/bucketwheel_command.py"}
    wanted |= set("pyproject.toml setup.py build_backend.py MANIFEST.in constraints.txt PKG-INFO setup.cfg".split())
    wanted |= {"README.md", "LICENSE", "CHANGELOG.md"}
    assert {name for name in names if ".egg-info/" not in name} == wanted
    assert {"csrc/sources_cuda.txt", "python/bucketwheel/py.typed", "python/bucketwheel/native/core.pyi"} <= names


def make_wheel(sdist: Path, folder: Path, aot: str) -> Path:
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder), str(sdist)]
    run(command, cwd=folder, BW_AOT=aot, BW_CUDA_ARCH_LIST="9.0", timeout_s=800)
    (wheel,) = folder.glob("*.whl")
    return wheel


def install(wheel: Path, folder: Path) -> Path:
    """A new environment that sees torch, pybind11 and ninja of this one, but neither its bucketwheel nor the tree."""
    run([sys.executable, "-m", "venv", "--without-pip", str(folder / "venv")], cwd=folder)
    python = folder / "venv" / "bin" / "python"
    site = Path(
        run([str(python), "-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])"], cwd=folder).strip()
    )
    run([sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(site), str(wheel)], cwd=folder)
    finders = "import sys; sys.meta_path[:] = [f for f in sys.meta_path if '__editable__' not in type(f).__module__ + repr(f)]"
    (site / "others.pth").write_text(f"{sysconfig.get_paths()['purelib']}\n{finders}\n")
    return python


OP = """
import sys, torch, bucketwheel as bw
from bucketwheel.native import modules as _build
from bucketwheel.native.toolchain import CPU, CUDA
assert bw.__file__.startswith(sys.prefix), bw.__file__
assert bw.l2_norm([torch.full((4,), 3.0)]).item() == 6.0
print(_build.find(CPU).origin)
if "cuda" in sys.argv: print(_build.find(CUDA).origin, _build.cuda().api is not None)
"""


@pytest.mark.parametrize("aot", ["", "cpu", "cuda"])
def test_a_wheel_from_the_sdist(sdist: Path, tmp_path: Path, aot: str) -> None:
    if aot == "cuda":
        need_nvcc()
    wheel = make_wheel(sdist, tmp_path, aot)
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
        licenses = [name for name in archive.namelist() if name.endswith("licenses/LICENSE")]
        wheel_tags = re.findall(
            r"^Tag: (.*)$", archive.read(next(n for n in archive.namelist() if n.endswith("/WHEEL"))).decode(), re.M
        )
    wanted = {f"bucketwheel/{name}" for name in modules()} | {f"bucketwheel/_{name}" for name in sources()}
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    built = {"": [], "cpu": ["_cpu"], "cuda": ["_cpu", "_cuda"]}[aot]
    wanted |= {"bucketwheel_command.py"} | {
        f"bucketwheel/_native/{name}{end}" for name in built for end in (suffix, ".json")
    }
    assert names == wanted and len(licenses) == 1
    abi = f"cp{sys.version_info.major}{sys.version_info.minor}"
    assert all(tag.startswith(f"{abi}-{abi}" if aot else "py3-none-any") for tag in wheel_tags) and wheel_tags

    python = install(wheel, tmp_path)
    cache = tmp_path / "cache"
    changes = {
        "BW_CACHE_DIR": str(cache),
        "LC_ALL": "C",
        **({"BW_JIT": "0", "CXX": "no-such-c++", "NVCC": "no-such-nvcc"} if aot else {}),
    }
    out = run([str(python), "-c", OP, aot], cwd=tmp_path, **changes)
    assert out.split() == {"": ["cached"], "cpu": ["installed"], "cuda": ["installed", "installed", "True"]}[aot]
    assert cache.exists() == (not aot)
    if not aot:  # all is compiled here, bindings too, with every warning that csrc/sources.txt asks for
        (log,) = cache.glob("builds/*/build.log")
        assert " -c bindings/module.cpp " in log.read_text()
        warnings = [line for line in log.read_text().splitlines() if " warning: " in line]
        assert [line for line in warnings if not re.search(rf"\[-W({NO_PROMISE})", line)] == []


def test_an_editable_install_compiles_nothing_ahead(tmp_path: Path) -> None:
    tree = copy_tree(tmp_path / "tree")
    command = [sys.executable, "-m", "pip", "install", "--no-deps", "--target", str(tmp_path), "--editable", str(tree)]
    done = subprocess.run(
        command, check=False, env=plain_environment(BW_AOT="cpu"), capture_output=True, text=True, timeout=500
    )
    assert done.returncode != 0 and "BW_AOT=cpu compiles nothing in an editable install" in done.stdout + done.stderr
