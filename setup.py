"""What pyproject.toml cannot say: csrc/ travels inside the package, and BW_AOT compiles it at install.

Nothing here imports torch or needs it, so `pip install .` works under build isolation.
"""

import importlib
import os
import shutil
import sys
import types
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
AOT = os.environ.get("BW_AOT", "")
if AOT not in ("", "cpu", "cuda"):
    raise SystemExit(f"BW_AOT={AOT!r} is not known; at install 'cpu' can be compiled, or 'cuda', which includes it")


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
        shutil.rmtree(package / "_csrc", ignore_errors=True)
        shutil.copytree(ROOT / "csrc", package / "_csrc", ignore=shutil.ignore_patterns(".*", "*~", "#*"))
        shutil.rmtree(package / "_native", ignore_errors=True)
        if AOT:
            build = native_build()
            modules = (build.CPU, build.CUDA) if AOT == "cuda" else (build.CPU,)
            build.build_into(package / "_native", modules)


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


setup(cmdclass={"build_py": BuildPackage}, distclass=NativeDistribution)
