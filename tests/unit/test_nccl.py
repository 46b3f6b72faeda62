"""The NCCL that is found, how, and what is said where it cannot be used. The real library loads without a GPU."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from bucketwheel.comm import nccl_library
from tests.support import simulated_nccl
from tests.support.forked_code import run_code
from tests.support.requirements import need_nccl, slow_case

pytestmark = pytest.mark.timeout_s(300)
LIBRARY = "lib/libnccl.so.2"
IMPORT = "from bucketwheel.comm import nccl_library as nccl; info = nccl.info(); "
PRINT = IMPORT + "print(info.found, info.path, info.version, sep='|')"
NCCL_API = Path(__file__).resolve().parents[2] / "csrc" / "comm" / "nccl" / "api.h"


def run(code: str, **changes: str | None) -> subprocess.CompletedProcess[str]:
    """A process with no NCCL settings but ``changes``."""
    kept = {name: value for name, value in os.environ.items() if name != "BW_NCCL_LIB"}
    return run_code(code, {**kept, **{k: v for k, v in changes.items() if v is not None}})


def found_by(code: str = PRINT, **changes: str | None) -> list[str]:
    done = run(code, **changes)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip().split("|")


def error_of(code: str = PRINT, **changes: str | None) -> str:
    done = run(code, **changes)
    assert done.returncode == 1, (done.stdout, done.stderr)
    return done.stderr.strip().splitlines()[-1]


@pytest.fixture
def folder() -> Path:
    return need_nccl()


@pytest.fixture
def nothing_loaded() -> None:
    """A CUDA build of torch has loaded its NCCL by the time that it is imported."""
    if "/libnccl.so" in Path("/proc/self/maps").read_text():
        pytest.skip("torch has loaded an NCCL, which comes before all other places")


@pytest.fixture
def not_nccl(tmp_path: Path) -> Path:
    """A library named like NCCL, without any of its functions."""
    (tmp_path / "empty.cpp").write_text("int nothing;\n")
    path = tmp_path / "libnccl.so.2"
    compiler = os.environ.get("CXX", "c++").split()
    argv = [*compiler, "-shared", "-fPIC", str(tmp_path / "empty.cpp"), "-Wl,-soname,libnccl.so.2", "-o", str(path)]
    subprocess.run(argv, check=True, timeout=100)
    return path


SINCE = {"windows": 22700, "zero_cta": 22800, "symmetric_avg": 23000}


def version_of(folder: Path) -> int:
    """What its header says: torch may have brought it, by a package of any name."""
    found = re.search(r"#define NCCL_VERSION_CODE (\d+)", (folder / "include" / "nccl.h").read_text())
    assert found
    return int(found[1])


def test_the_real_library_answers(folder: Path) -> None:
    code = (
        "from bucketwheel.comm import nccl_library as nccl; info = nccl.info(); ids = [nccl.unique_id() for _ in range(3)];"
        "assert len(set(ids)) == 3 and all(len(one) == 128 for one in ids);"
        "print(info.version, sorted(k for k, there in info.features.items() if there), sep='|')"
    )
    version, features = found_by(code, BW_NCCL_LIB=str(folder / LIBRARY))
    assert int(version) == version_of(folder)
    assert features == str(sorted(name for name, since in SINCE.items() if version_of(folder) >= since))


def test_versions_are_told_as_nccl_tells_them() -> None:
    assert nccl_library.version_text(22809) == "2.28.9"
    assert nccl_library.version_text(23007) == "2.30.7"


@pytest.mark.usefixtures("nothing_loaded")
@pytest.mark.parametrize("how", ["a Python package", "loaded already", "BW_NCCL_LIB", "the system"])
def test_where_it_is_found(folder: Path, tmp_path: Path, how: str) -> None:
    """What is loaded already comes before packages, the variable before that, and the system last."""
    assert str(folder / "lib") in nccl_library.folders()
    package, other = folder / LIBRARY, tmp_path / "libnccl.so.2"
    shutil.copy(package, other)
    load = "import ctypes; ctypes.CDLL({!r})".format
    without = f"from bucketwheel.comm import nccl_library as nccl; nccl.folders = lambda: [{str(tmp_path / 'none')!r}]"
    code, changes, path = {
        "a Python package": ("", {}, package),
        "loaded already": (load(str(other)), {}, other),
        "BW_NCCL_LIB": (load(str(package)), {"BW_NCCL_LIB": str(other)}, other),
        "the system": (without, {"LD_LIBRARY_PATH": str(folder / "lib")}, package),
    }[how]
    found, where, version = found_by(f"{code}\n{PRINT}", **changes)
    assert (found, where, int(version)) == (how, str(path), version_of(folder))


ONE = """
extern "C" int a_function_of_nccl() { return VERSION; }
"""
OTHER = """
extern "C" int a_function_of_nccl();
extern "C" int ncclGetVersion(int* version) { *version = a_function_of_nccl(); return 0; }
"""


def compile_version(folder: Path, version: int) -> Path:
    """A library with NCCL's functions, whose version is told by a function that it finds by name. In two sources, so that
    no compiler sees what that one returns."""
    folder.mkdir()
    required = re.search(r"define BW_NCCL_REQUIRED(.*?)\n\n", NCCL_API.read_text(), re.DOTALL)
    symbols = set(re.findall(r"\bnccl[A-Z]\w+", required[1] if required else "")) - {"ncclGetVersion"}
    assert len(symbols) > 10
    stubs = "".join(f'extern "C" int {symbol}() {{ return 0; }}\n' for symbol in sorted(symbols))
    (folder / "one.cpp").write_text(ONE)
    (folder / "other.cpp").write_text(OTHER + stubs)
    path = folder / "libnccl.so.2"
    compiler = os.environ.get("CXX", "c++").split()
    sources = [str(folder / name) for name in ("one.cpp", "other.cpp")]
    argv = [*compiler, "-shared", "-fPIC", f"-DVERSION={version}", *sources, "-Wl,-soname,libnccl.so.2"]
    subprocess.run([*argv, "-o", str(path)], check=True, timeout=100)
    return path


def test_what_the_variable_names_finds_its_own_functions_first(tmp_path: Path) -> None:
    """Another NCCL whose functions everybody sees is loaded already. Without RTLD_DEEPBIND the named one would call them."""
    loaded, named = (compile_version(tmp_path / str(version), version) for version in (22800, 22900))
    load = f"import ctypes; ctypes.CDLL({str(loaded)!r}, mode=ctypes.RTLD_GLOBAL)"
    plain = (
        f"{load}; version = ctypes.c_int(); ctypes.CDLL({str(named)!r}).ncclGetVersion(ctypes.byref(version));"
        "print(version.value)"
    )
    assert found_by(plain) == ["22800"], "the libraries do not meet: this test would show nothing"
    assert found_by(f"{load}; {PRINT}", BW_NCCL_LIB=str(named)) == ["BW_NCCL_LIB", str(named), "22900"]


@pytest.mark.usefixtures("nothing_loaded")
def test_none_anywhere(tmp_path: Path) -> None:
    code = f"from bucketwheel.comm import nccl_library as nccl; nccl.folders = lambda: [{str(tmp_path)!r}]; {PRINT}"
    if (done := run(code)).returncode == 0:
        pytest.skip(f"the system has an NCCL: {done.stdout}")
    error = error_of(code)
    assert error.startswith("bucketwheel.errors.DeviceError: NCCL: no libnccl.so.2 is loaded, and none was found in ")
    assert str(tmp_path) in error
    assert "install the package nvidia-nccl-cu13" in error


def test_a_bad_path_is_named(tmp_path: Path) -> None:
    error = error_of(BW_NCCL_LIB="libnccl.so.2")
    assert error == "ValueError: environment variable BW_NCCL_LIB='libnccl.so.2': expected an absolute path"
    path = tmp_path / "libnccl.so.2"
    error = error_of(BW_NCCL_LIB=str(path))
    assert error.startswith(f"bucketwheel.errors.DeviceError: NCCL: {path} (BW_NCCL_LIB) cannot be used: ")
    assert "No such file" in error and "BW_NCCL_LIB to the absolute path" in error


@pytest.mark.usefixtures("nothing_loaded")
def test_a_library_that_is_not_nccl_is_refused(not_nccl: Path) -> None:
    """Also where a package holds it: what is there and cannot be used is not passed over in silence."""
    for error in (
        error_of(BW_NCCL_LIB=str(not_nccl)),
        error_of(
            f"from bucketwheel.comm import nccl_library as nccl; nccl.folders = lambda: [{str(not_nccl.parent)!r}]; {PRINT}"
        ),
    ):
        assert f"NCCL: {not_nccl} (" in error
        assert "it has no ncclGetVersion, ncclGetUniqueId, " in error
        assert "ncclRedOpDestroy" in error
        assert "ncclMemAlloc" not in error  # optional


# ---- the fake --------------------------------------------------------------------------------------------------------

FEATURES = IMPORT + "print(*sorted(k for k, there in info.features.items() if there))"
OF_VERSION = {"22799": "windows", "22800": "windows zero_cta", "23000": "symmetric_avg windows zero_cta"}


@pytest.mark.parametrize("version", [slow_case("22799"), "22800", slow_case("23000")])
def test_features_follow_the_version(version: str) -> None:
    env = {"BW_NCCL_LIB": str(simulated_nccl.build()), "FAKE_NCCL_VERSION": version}
    assert found_by(FEATURES, **env) == [OF_VERSION[version]]


@pytest.mark.slow  # compiles the fake once more
def test_features_need_their_functions() -> None:
    """A version may promise what a build of it does not have."""
    path = str(simulated_nccl.build("_WITHOUT_OPTIONAL"))
    assert found_by(FEATURES, BW_NCCL_LIB=path, FAKE_NCCL_VERSION="23000") == [""]


def test_an_old_library_is_refused() -> None:
    path = str(simulated_nccl.build())
    error = error_of(BW_NCCL_LIB=path, FAKE_NCCL_VERSION="22609")
    assert error.startswith(
        f"bucketwheel.errors.DeviceError: NCCL: {path} (BW_NCCL_LIB) cannot be used: it is version 2.26.9, "
        "expected 2.27.0 or newer; "
    )


@pytest.mark.slow  # compiles the fake once more
def test_a_missing_function_is_named() -> None:
    path = str(simulated_nccl.build("_WITHOUT_ALL_GATHER"))
    error = error_of(BW_NCCL_LIB=path)
    assert f"NCCL: {path} (BW_NCCL_LIB) cannot be used: it has no ncclAllGather; " in error
    # The version is looked at first: an old library may lack many.
    assert "it is version 2.18.3" in error_of(BW_NCCL_LIB=path, FAKE_NCCL_VERSION="21803")


def test_a_failed_call_says_what_nccl_says() -> None:
    code = (
        "from tests.support import simulated_nccl; script = simulated_nccl.install()\n"
        "from bucketwheel.comm import nccl_library as nccl\n"
        "script.fake_nccl_fail(b'ncclGetUniqueId', 1, 3); nccl.unique_id()"
    )
    error = error_of(code)
    assert error == (
        "bucketwheel.errors.CommError: ncclGetUniqueId: 3 internal error; the script lets ncclGetUniqueId fail"
    )
