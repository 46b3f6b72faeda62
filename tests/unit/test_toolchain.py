"""The list of sources, the build key, nvcc, and which GPU architectures a build is for."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from bucketwheel.errors import BuildError
from bucketwheel.native import compile, toolchain
from bucketwheel.native.toolchain import CPU, CUDA, Source, Toolchain

CSRC = Path(__file__).resolve().parents[2] / "csrc"


@pytest.fixture(autouse=True)
def no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("BW_CUDA_ARCH_LIST", "TORCH_CUDA_ARCH_LIST", "NVCC", "CUDA_HOME"):
        monkeypatch.delenv(name, raising=False)


def write(root: Path, **files: str) -> None:
    for name, text in files.items():
        path = root / name.replace("__", "/").replace("_dot_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def test_lines_give_sources_and_flags(tmp_path: Path) -> None:
    write(tmp_path, a_dot_cpp="", simd__b_dot_cpp="")
    text = "# a comment\nflags: -O3 '-DNAME=a b'\nflags: -Wall\nlink: -shared # one more\n\n"
    text += "a.cpp -DA\nsimd/b.cpp only=x86_64 only=riscv64 -mavx2\n"
    (tmp_path / "sources.txt").write_text(text)
    recipe = toolchain.read_recipe(tmp_path, "x86_64")
    assert recipe.flags == ("-O3", "-DNAME=a b", "-Wall") and recipe.link_flags == ("-shared",)
    assert recipe.sources == (Source("a.cpp", ("-DA",)), Source("simd/b.cpp", ("-mavx2",)))
    assert toolchain.read_recipe(tmp_path, "riscv64") == recipe
    assert toolchain.read_recipe(tmp_path, "aarch64").sources == recipe.sources[:1]


def test_every_source_file_is_listed() -> None:
    listed: list[str] = []
    for module in (CPU, CUDA):
        found = [source.path for source in toolchain.read_recipe(CSRC, "x86_64", module).sources]
        others = [source.path for source in toolchain.read_recipe(CSRC, "aarch64", module).sources]
        listed += found + [path for path in others if path not in found]
    present = [path for path in CSRC.rglob("*") if path.suffix in (".cpp", ".cu")]
    assert sorted(listed) == sorted(str(path.relative_to(CSRC)) for path in present)


def test_cuda_files_have_flags_and_a_compiler_of_their_own(tmp_path: Path) -> None:
    write(tmp_path, a_dot_cu="", b_dot_cpp="")
    (tmp_path / "sources_cuda.txt").write_text("nvcc: -O3 -fmad=false\nflags: -O2\nlink: -shared\na.cu -DA\nb.cpp\n")
    recipe = toolchain.read_recipe(tmp_path, module=CUDA)
    tools = Toolchain(("g++",), ("/include",), "g++ 12", ("nvcc", "-gencode=x"), "nvcc 13")
    cu, cpp = (compile.command(recipe, tools, source, out=Path("out.o")) for source in recipe.sources)
    assert " ".join(cu) == "nvcc -gencode=x -O3 -fmad=false -DA -I. -c a.cu -o out.o"
    assert " ".join(cpp) == "g++ -O2 -I. -isystem /include -c b.cpp -o out.o"


def test_the_key_holds_what_made_the_binary(tmp_path: Path) -> None:
    write(tmp_path, a_dot_cu="", b_dot_cpp="")
    (tmp_path / "sources_cuda.txt").write_text("nvcc: -O3\nflags: -O2\nlink: -shared\na.cu\nb.cpp\n")
    recipe = toolchain.read_recipe(tmp_path, module=CUDA)
    tools = Toolchain(("g++",), (), "g++ 12", ("nvcc", "-gencode=x"), "nvcc 13")
    changes = [{"sources": recipe.sources[:1]}, {"flags": ()}, {"link_flags": ()}, {"nvcc_flags": ()}]
    others = [(replace(recipe, **change), tools) for change in changes]
    others += [(recipe, replace(tools, **change)) for change in ({"identity": "g++ 13"}, {"nvcc_identity": "nvcc 14"})]
    assert len({toolchain.build_key(*one) for one in [(recipe, tools), *others]}) == 1 + len(others)
    by_another_path = replace(tools, cxx=("/usr/bin/g++",), nvcc=("/usr/bin/nvcc", "-gencode=x"))
    assert toolchain.build_key(recipe, by_another_path) == toolchain.build_key(recipe, tools)


# ---- what a compiler is ----------------------------------------------------------------------------------------------

# It answers as g++ does, and as ccache: by its name, here of its target, and in the caller's language.
COMPILER = """#!/bin/sh
case " $* " in
  *" --version "*) echo "${0##*/} (Debian) 12.2.0 $LC_ALL";;
  *" -dumpmachine "*) case "$0" in *arm-*) echo arm-linux;; *) echo x86_64-linux;; esac;;
esac
"""


@pytest.fixture
def compilers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with g++-12, links to it, a copy of it, and others."""
    texts = {
        "g++-12": COMPILER,
        "copies/g++": COMPILER,
        "wrapper": COMPILER + "# adds -O0\n",
        "ccache": '#!/bin/sh\nexec "$@"\n',
    }
    texts |= {"newer": COMPILER.replace("12.2", "12.3")}
    for name, text in texts.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    for link in ("g++", "links/c++", "arm-g++"):
        (tmp_path / link).parent.mkdir(exist_ok=True)
        (tmp_path / link).symlink_to(tmp_path / "g++-12")
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    return tmp_path


def test_a_compiler_is_what_it_is_whatever_path_leads_to_it(compilers: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    at = str(compilers)
    same = [("g++",), ("g++-12",), (f"{at}/g++",), (f"{at}/links/c++",), (f"{at}/copies/g++",)]
    identity = toolchain.identify(same[0])
    assert {toolchain.identify(command) for command in same} == {identity}
    assert at not in identity and "12.2.0" in identity and "x86_64-linux" in identity
    monkeypatch.setenv("LC_ALL", "de_DE.UTF-8")
    assert toolchain.identify(same[0]) == identity
    others = [("wrapper",), ("newer",), ("arm-g++",), ("g++", "-O1"), ("g++", "-m32"), ("ccache", "g++")]
    assert len({identity, *map(toolchain.identify, others)}) == 1 + len(others)
    assert toolchain.identify((f"{at}/ccache", f"{at}/links/c++")) == toolchain.identify(("ccache", "g++"))
    monkeypatch.setenv("CXX", "g++ -O1")
    first = toolchain.find_toolchain()
    monkeypatch.setenv("CXX", f"{at}/links/c++ -O1")
    second = toolchain.find_toolchain()
    assert first.identity == second.identity and first.cxx != second.cxx


def test_clang_tells_where_it_is_and_that_is_no_part_of_it(compilers: Path) -> None:
    says = "Debian clang version 14.0.6\nTarget: x86_64-pc-linux-gnu\nThread model: posix\nInstalledDir: $(dirname $0)"
    (compilers / "g++-12").write_text(f'#!/bin/sh\n[ "$1" = --version ] && echo "{says}"\n')
    identity = toolchain.identify(("g++",))
    assert toolchain.identify((str(compilers / "links" / "c++"),)) == identity
    assert "clang version 14.0.6" in identity and "Installed" not in identity


def test_a_program_that_does_not_answer_is_named(compilers: Path) -> None:
    (compilers / "g++-12").write_text("#!/bin/sh\nexit 1\n")
    with pytest.raises(BuildError, match=r"g\+\+ cannot be run"):
        toolchain.identify(("g++",))
    # -dumpmachine is not needed.
    (compilers / "g++-12").write_text('#!/bin/sh\n[ "$1" = --version ] && echo nvc++ 25\n')
    assert "nvc++ 25" in toolchain.identify(("g++",))


# ---- nvcc ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "flags"),
    [
        ("9.0", ["90,code=sm_90"]),
        ("8.0;9.0+PTX", ["80,code=sm_80", "90,code=sm_90", "90,code=compute_90"]),
        ("9.0a, 8.0", ["80,code=sm_80", "90a,code=sm_90a"]),
        ("sm_90;90;9.0", ["90,code=sm_90"]),
        ("12.0f+PTX", ["120f,code=sm_120f", "120f,code=compute_120f"]),
    ],
)
def test_arch_lists(text: str, flags: list[str]) -> None:
    assert list(toolchain.parse_archs(text, "X").flags) == [f"-gencode=arch=compute_{flag}" for flag in flags]


@pytest.mark.parametrize("text", ["Hopper", "9.0;", "9.0+ptxas"])
def test_what_is_no_architecture_names_the_variable(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", text)
    with pytest.raises(BuildError, match="TORCH_CUDA_ARCH_LIST='.*is not an architecture") as caught:
        toolchain.choose_archs([])
    assert "BW_CUDA_ARCH_LIST='9.0'" in str(caught.value)


def test_who_chooses_architectures(monkeypatch: pytest.MonkeyPatch) -> None:
    def choice() -> str:
        return str(toolchain.choose_archs([(9, 0), (8, 6), (9, 0)]))

    assert str(toolchain.choose_archs([])) == "9.0" and "the default" in toolchain.choose_archs([]).origin
    assert choice() == "8.6;9.0"
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "8.0+PTX")
    assert choice() == "8.0+PTX"
    monkeypatch.setenv("BW_CUDA_ARCH_LIST", "10.0")
    assert choice() == "10.0"


def test_what_runs_where() -> None:
    for text, (major, minor), runs in (
        *(("9.0", (9, 0), True), ("8.0", (8, 6), True), ("8.6", (8, 0), False), ("8.0", (9, 0), False)),
        *(("8.0+PTX", (9, 0), True), ("9.0+PTX", (8, 0), False), ("9.0a", (9, 0), True), ("9.0a+PTX", (10, 0), False)),
        *(("10.0a", (10, 3), False), ("10.0f", (10, 3), True)),
    ):
        assert toolchain.parse_archs(text, "X").covers((major, minor)) is runs, (text, major, minor)


def test_devices_are_those_of_the_driver(tmp_path: Path) -> None:
    source = tmp_path / "driver.c"
    source.write_text(
        "int cuInit(unsigned flags) { return 0; }\n"
        "int cuDeviceGetCount(int* count) { *count = 2; return 0; }\n"
        "int cuDeviceGetAttribute(int* value, int number, int device) {\n"
        "  *value = number == 75 ? 8 + device : number == 76 ? 6 * (1 - device) : -1; return 0; }\n"
    )
    library = tmp_path / "libdriver.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source], check=True, timeout=60)
    assert toolchain.visible_devices(str(library)) == [(8, 6), (9, 0)]
    assert toolchain.visible_devices(str(tmp_path / "gone.so")) == []


def test_where_nvcc_is_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("named", "home/bin", "path"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "nvcc").touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "path"))
    assert toolchain.find_nvcc() == (str(tmp_path / "path" / "nvcc"),)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "home"))
    assert toolchain.find_nvcc() == (str(tmp_path / "home" / "bin" / "nvcc"),)
    monkeypatch.setenv("NVCC", f"{tmp_path}/named/nvcc --threads=2")
    assert toolchain.find_nvcc() == (f"{tmp_path}/named/nvcc", "--threads=2")
    monkeypatch.setenv("NVCC", "no-such-nvcc")
    with pytest.raises(BuildError, match="NVCC='no-such-nvcc' is not a program"):
        toolchain.find_nvcc()


@pytest.mark.parametrize(("cxx", "ccbin"), [("c++", ["-ccbin", "c++"]), ("env c++ -g -O1", ["-ccbin", "c++"])])
def test_the_compiler_is_nvccs_host_compiler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cxx: str, ccbin: list[str]
) -> None:
    nvcc = tmp_path / "nvcc"
    nvcc.write_text("#!/bin/sh\necho release 13.0\n")
    nvcc.chmod(0o755)
    monkeypatch.setenv("NVCC", str(nvcc))
    monkeypatch.setenv("CXX", cxx)
    monkeypatch.setenv("BW_CUDA_ARCH_LIST", "9.0")
    gencode = "-gencode=arch=compute_90,code=sm_90"
    plain = toolchain.find_cuda_toolchain()
    assert list(plain.nvcc) == [str(nvcc), *ccbin, gencode]
    assert str(plain.archs) == "9.0" and plain.archs.origin == "BW_CUDA_ARCH_LIST"
    monkeypatch.setenv("NVCC_CCBIN", "clang++")
    chosen = toolchain.find_cuda_toolchain()
    assert list(chosen.nvcc) == [str(nvcc), gencode] and chosen.nvcc_identity != plain.nvcc_identity


def test_nvcc_is_what_it_is_too(compilers: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def identity(**changes: str) -> str:
        for name, value in {"NVCC": "wrapper", "NVCC_CCBIN": "", "BW_CUDA_ARCH_LIST": "9.0", **changes}.items():
            monkeypatch.setenv(name, value)
        found = toolchain.find_cuda_toolchain()
        assert str(compilers) not in found.nvcc_identity
        return found.nvcc_identity

    monkeypatch.setenv("CXX", "g++")
    (compilers / "links" / "nvcc").symlink_to(compilers / "wrapper")
    plain, with_host = identity(), identity(NVCC_CCBIN=str(compilers / "links" / "c++"))
    assert identity(NVCC=str(compilers / "links" / "nvcc")) == plain and identity(NVCC_CCBIN="g++") == with_host
    others = [identity(NVCC_CCBIN="newer"), identity(BW_CUDA_ARCH_LIST="8.0"), identity(NVCC="newer")]
    assert len({plain, with_host, *others, identity(NVCC="wrapper --threads=2")}) == 6
