"""The wheel as `pip install .` makes it from a checkout, and that it needs torch and its own requirements alone."""

from __future__ import annotations

import re
import sys
import zipfile
from importlib import metadata
from pathlib import Path

import pytest

from bucketwheel.native import modules
from bucketwheel.native.toolchain import CPU
from tests.support.packages import ROOT, copy_tree, run

pytestmark = [pytest.mark.dist, pytest.mark.timeout_s(300)]


def build_wheel(tree: Path, folder: Path) -> Path:
    """In the tree, as pip does; with this environment's setuptools where it has a new one, else that of the package index."""
    try:
        is_here = int(metadata.version("setuptools").partition(".")[0]) >= 77
    except metadata.PackageNotFoundError:
        is_here = False
    isolation = ["--no-build-isolation"] if is_here else []
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", *isolation, "--wheel-dir", str(folder)]
    folder.mkdir()
    run([*command, str(tree)], cwd=tree, TMPDIR=str(folder))
    assert not [*folder.glob("bucketwheel-build-*")]
    (wheel,) = folder.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Of one tree: with modules that are removed before the second is built. The tree is as it was."""
    folder = tmp_path_factory.mktemp("wheels")
    tree = copy_tree(folder / "tree")
    added = [tree / "python" / "bucketwheel" / "gone.py", tree / "csrc" / "gone.h"]
    for path in added:
        path.write_text("")
    before = {path.name for path in tree.iterdir()}
    first = build_wheel(tree, folder / "first")
    for path in added:
        path.unlink()
    second = build_wheel(tree, folder / "second")
    assert {path.name for path in tree.iterdir()} - {"__pycache__"} == before  # Python's own, and git ignores it
    return first, second


def test_a_removed_module_is_not_in_the_next_wheel(wheels: tuple[Path, Path]) -> None:
    names = [set(zipfile.ZipFile(wheel).namelist()) for wheel in wheels]
    assert names[0] - names[1] == {"bucketwheel/gone.py", "bucketwheel/_csrc/gone.h"} and names[1] < names[0]


# ---- torch and the wheel alone (issue 44) ----------------------------------------------------------------------------

MORE = """
import importlib.util, sys
folder = sys.argv[1]
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 1)).to(torch.{dtype})
bw.sync_module(model)

def train(steps):
    for _ in range(steps):
        model(torch.randn(16, 8, generator=data).to(torch.{dtype})).square().mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, norm_type=3.0)
        optimizer.step()
        optimizer.zero_grad()

with bw.ShardedAdamW(model.named_parameters(), lr=1e-2) as optimizer:
    train(3)
    bw.checkpoint.save(f"{{folder}}/both", model, optimizer, {{"step": 3}})
    bw.checkpoint.async_save(f"{{folder}}/async", model, optimizer).wait()
bw.checkpoint.save(f"{{folder}}/model", model)
try:  # an error travels too
    bw.checkpoint.save(f"{{folder}}/x", model, extra={{"open": open(__file__)}} if rank == 0 else None)
except Exception as error:
    assert rank == 0 or "rank 0" in str(error), error
else:
    raise AssertionError("a file has been saved")
with bw.ShardedAdamW(model.named_parameters(), lr=1e-2) as optimizer:
    assert bw.checkpoint.load(f"{{folder}}/both", model, optimizer)["step"] == 3
    with bw.Snapshots(optimizer, every=2) as snapshots:
        train(5)
        snapshots.verify()
        bw.Snapshots.restore(optimizer, snapshots)
    optimizer.load_full_state_dict(optimizer.full_state_dict())
bw.checkpoint.load(f"{{folder}}/model", model)
apart = bw.Communicator(backend="c10d") if rank >= 0 and dist.is_initialized() else None
with bw.ShardedAdamW(model.named_parameters(), process_group=apart) as optimizer:
    train(1)
assert importlib.util.find_spec("numpy") is None
print(f"rank {{rank}} is well")
"""


@pytest.fixture(scope="module")
def bare_python(wheels: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of an environment with the wheel and what it requires, which is linked from this one."""
    folder = tmp_path_factory.mktemp("bare")
    run([sys.executable, "-m", "venv", "--without-pip", "venv"], cwd=folder)
    (site,) = folder.glob("venv/lib/python*/site-packages")
    with zipfile.ZipFile(wheels[1]) as archive:
        archive.extractall(site)
    (about,) = metadata.distributions(path=[str(site)])
    wanted, done = list(about.requires or ()), {"bucketwheel"}
    while wanted:
        requirement = wanted.pop()
        name = re.match(r"[\w.-]+", requirement)[0]
        if "extra ==" in requirement or name in done:
            continue
        done.add(name)
        try:
            about = metadata.distribution(name)
        except metadata.PackageNotFoundError:  # for another Python or platform
            continue
        wanted += about.requires or ()
        for top in {path.parts[0] for path in about.files} - {"..", "__pycache__"}:
            if not (site / top).exists():
                (site / top).symlink_to(about.locate_file(top))
    return folder / "venv" / "bin" / "python"


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_the_package_needs_no_numpy(bare_python: Path, tmp_path: Path, ranks: int) -> None:
    """README's example, BatchNorm, a save, a resume and Snapshots."""
    (twenty,) = re.findall(
        r"^```python\n(import os.*?)^```", (ROOT / "README.md").read_text(), re.DOTALL | re.MULTILINE
    )
    (tmp_path / "twenty.py").write_text(twenty + MORE.format(dtype="bfloat16" if ranks == 1 else "float32"))
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"] if ranks == 2 else []
    changes = {"OMP_NUM_THREADS": "1", "BW_NATIVE_DIR": str(modules.locate(CPU).parent)}
    out = run([str(bare_python), *launch, "twenty.py", str(tmp_path)], cwd=tmp_path, timeout_s=200, **changes)
    assert "step 180 loss" in out and all(f"rank {rank} is well" in out for rank in range(ranks))
