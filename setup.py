"""What pyproject.toml cannot say: csrc/ travels inside the package, and BW_AOT compiles it at install.

Nothing here imports torch or needs it, so `pip install .` works under build isolation.
"""

import atexit
import importlib
import os
import re
import shutil
import sys
import tempfile
import types
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.build import build
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
AOT = os.environ.get("BW_AOT", "")
if AOT not in ("", "cpu", "cuda"):
    raise SystemExit(f"BW_AOT={AOT!r} is not known; at install 'cpu' can be compiled, or 'cuda', which includes it")


class Build(build):
    """Builds in a new folder. setuptools would take ./build, where modules that were deleted since lie from earlier builds,
    and put all of it into the wheel."""

    def initialize_options(self) -> None:
        super().initialize_options()
        self.build_base = tempfile.mkdtemp(prefix="bucketwheel-build-")
        atexit.register(remove, Path(self.build_base))


def remove(folder: Path) -> None:
    """Unless it has the log of a native build that has failed."""
    if not any(folder.rglob("native_build.log")):
        shutil.rmtree(folder)


class BuildPackage(build_py):
    """Copies csrc/ to bucketwheel/_csrc; an editable install reads csrc/ where it is."""

    def run(self) -> None:
        if self.editable_mode and AOT:
            raise SystemExit(
                f"BW_AOT={AOT} compiles nothing in an editable install, whose modules are built at first use from the "
                "sources as they are then: unset BW_AOT, or install without --editable"
            )
        super().run()
        if self.editable_mode:
            return
        package = Path(self.build_lib, "bucketwheel")
        shutil.copytree(ROOT / "csrc", package / "_csrc", ignore=shutil.ignore_patterns(".*", "*~", "#*"))
        if AOT:
            native = native_build()
            modules = (native.CPU, native.CUDA) if AOT == "cuda" else (native.CPU,)
            native.build_into(package / "_native", modules)


def native_build() -> types.ModuleType:
    """`bucketwheel.native.modules` without the package around it, whose import needs torch."""
    package = types.ModuleType("bucketwheel")
    package.__path__ = [str(ROOT / "python" / "bucketwheel")]
    sys.modules["bucketwheel"] = package
    return importlib.import_module("bucketwheel.native.modules")


class NativeDistribution(Distribution):
    """With BW_AOT the wheel is for one Python and one platform."""

    def has_ext_modules(self) -> bool:
        return bool(AOT)


def long_description() -> str:
    """README.md for a package index, which has neither its pages nor its picture."""
    source = "https://github.com/bucketwheel/bucketwheel"
    text = (ROOT / "README.md").read_text()
    text = re.sub(r"!\[([^]]*)\]\((?!http)", rf"![\1]({source}/raw/main/", text)
    return re.sub(r"(?<!\!)\[([^]]*)\]\((?!http)", rf"[\1]({source}/blob/main/", text)


setup(
    cmdclass={"build": Build, "build_py": BuildPackage},
    distclass=NativeDistribution,
    long_description=long_description(),
    long_description_content_type="text/markdown",
)
