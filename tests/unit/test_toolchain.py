"""The list of sources, and which files an object depends on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from bucketwheel.native import compile
from bucketwheel.native import toolchain as _toolchain
from bucketwheel.native.toolchain import Source, Toolchain

CSRC = Path(__file__).resolve().parents[2] / "csrc"


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
    recipe = _toolchain.read_recipe(tmp_path, "x86_64")
    assert recipe.flags == ("-O3", "-DNAME=a b", "-Wall") and recipe.link_flags == ("-shared",)
    assert recipe.sources == (Source("a.cpp", ("-DA",)), Source("simd/b.cpp", ("-mavx2",)))
    assert _toolchain.read_recipe(tmp_path, "riscv64") == recipe
    assert _toolchain.read_recipe(tmp_path, "aarch64").sources == recipe.sources[:1]


def test_an_unknown_source_names_the_line(tmp_path: Path) -> None:
    (tmp_path / "sources.txt").write_text("\ngone.cpp\n")
    with pytest.raises(ValueError, match=r"sources\.txt:2: no such source: 'gone\.cpp'"):
        _toolchain.read_recipe(tmp_path)


def test_a_source_listed_twice_names_the_line(tmp_path: Path) -> None:
    write(tmp_path, a_dot_cpp="")
    (tmp_path / "sources.txt").write_text("a.cpp\n\na.cpp -O1\n")
    with pytest.raises(ValueError, match=r"sources\.txt:3: listed twice: 'a\.cpp'"):
        _toolchain.read_recipe(tmp_path)


def test_every_source_file_is_listed() -> None:
    listed: list[str] = []
    for module in (_toolchain.CPU, _toolchain.CUDA):
        found = [source.path for source in _toolchain.read_recipe(CSRC, "x86_64", module).sources]
        others = [source.path for source in _toolchain.read_recipe(CSRC, "aarch64", module).sources]
        listed += found + [path for path in others if path not in found]
    present = [path for path in CSRC.rglob("*") if path.suffix in (".cpp", ".cu")]
    assert sorted(listed) == sorted(str(path.relative_to(CSRC)) for path in present)


def test_cuda_files_have_flags_and_a_compiler_of_their_own(tmp_path: Path) -> None:
    write(tmp_path, a_dot_cu="", b_dot_cpp="")
    (tmp_path / "sources_cuda.txt").write_text("nvcc: -O3 -fmad=false\nflags: -O2\nlink: -shared\na.cu -DA\nb.cpp\n")
    recipe = _toolchain.read_recipe(tmp_path, module=_toolchain.CUDA)
    toolchain = Toolchain(("g++",), ("/include",), "g++ 12", ("nvcc", "-gencode=x"), "nvcc 13")
    cu, cpp = (compile.command(recipe, toolchain, source, out=Path("out.o")) for source in recipe.sources)
    assert " ".join(cu) == "nvcc -gencode=x -O3 -fmad=false -DA -I. -c a.cu -o out.o"
    assert " ".join(cpp) == "g++ -O2 -I. -isystem /include -c b.cpp -o out.o"


def test_neighbours_of_a_folder_are_compiled_as_one(tmp_path: Path) -> None:
    names = [
        "z.cpp",
        "y.cpp",
        *(f"a/{number}.cpp" for number in range(9)),
        "a/fast.cpp",
        "a/last.cpp",
        "b/0.cpp",
        "b/1.cpp",
    ]
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("")
    (tmp_path / "sources.txt").write_text("\n".join(names).replace("fast.cpp", "fast.cpp -O3"))
    recipe = _toolchain.read_recipe(tmp_path)
    units = compile.units(recipe)
    assert [source for unit in units for source in unit] == list(recipe.sources)
    assert [len(unit) for unit in units] == [1, 1, 7, 2, 1, 1, 2]

    toolchain = Toolchain(("g++",), ("/include",), "g++ 12")
    command = compile.command(recipe, toolchain, *units[3], out=Path("out.o"))
    assert " ".join(command) == "g++ -I. -isystem /include -include a/7.cpp -c a/8.cpp -o out.o"
    keys = {compile.object_key(recipe, toolchain, *unit) for unit in units}
    assert len(keys) == len(units)
    for number in (7, 8):
        (tmp_path / f"a/{number}.cpp").write_text("int edited;")
        changed = {compile.object_key(recipe, toolchain, *unit) for unit in units}
        assert len(keys & changed) == len(units) - 1
        keys = changed


def test_the_key_of_an_object_holds_what_made_it(tmp_path: Path) -> None:
    write(tmp_path, a_dot_cu="", b_dot_cpp="")
    (tmp_path / "sources_cuda.txt").write_text("nvcc: -O3\nflags: -O2\na.cu\nb.cpp\n")
    recipe = _toolchain.read_recipe(tmp_path, module=_toolchain.CUDA)
    toolchain = Toolchain(("g++",), (), "g++ 12", ("nvcc", "-gencode=x"), "nvcc 13")

    def keys(recipe: _toolchain.Recipe, toolchain: Toolchain) -> list[str]:
        return [compile.object_key(recipe, toolchain, source) for source in recipe.sources]

    cu, cpp = keys(recipe, toolchain)
    others = [(recipe, replace(toolchain, nvcc=("nvcc", "-gencode=y"))), (replace(recipe, nvcc_flags=()), toolchain)]
    others.append((recipe, replace(toolchain, nvcc_identity="nvcc 14")))
    for other in others:
        assert keys(*other)[0] != cu and keys(*other)[1] == cpp
        assert _toolchain.build_key(*other) != _toolchain.build_key(recipe, toolchain)
    assert keys(replace(recipe, flags=()), toolchain)[0] == cu
    changed = keys(recipe, replace(toolchain, identity="g++ 13"))  # nvcc's host compiler too
    assert changed[0] != cu and changed[1] != cpp


def test_an_object_depends_on_what_its_source_includes(tmp_path: Path) -> None:
    write(tmp_path, a__a_dot_cpp='#include "one.h"\n  #  include "b/two.h"\n#include <vector>\n')
    write(tmp_path, a__one_dot_h='#include "b/two.h"\n', b__two_dot_h='#include <b/three.h>\n#include "a/one.h"\n')
    write(tmp_path, b__three_dot_h="", b__other_dot_h="")
    names = [str(path.relative_to(tmp_path)) for path in compile.closure(tmp_path, "a/a.cpp")]
    assert sorted(names) == ["a/a.cpp", "a/one.h", "b/three.h", "b/two.h"]
    write(tmp_path, a__one_dot_h="#include NAMED_BY_A_MACRO\n")
    assert len(compile.closure(tmp_path, "a/a.cpp")) == 5


def test_the_digest_sees_renames_and_moved_bytes(tmp_path: Path) -> None:
    digests = set()
    for files in ({"a": "12", "b": "3"}, {"a": "1", "b": "23"}, {"a": "12", "c": "3"}):
        folder = tmp_path / str(len(digests))
        write(folder, **files)
        digests.add(_toolchain.sources_digest(folder))
    assert len(digests) == 3
