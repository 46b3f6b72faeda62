"""The list of sources, and which files an object depends on."""

from __future__ import annotations

from pathlib import Path

import pytest

from bucketwheel import _toolchain
from bucketwheel._toolchain import Source

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


def test_every_source_file_is_listed() -> None:
    listed = {source.path for source in _toolchain.read_recipe(CSRC, "x86_64").sources}
    listed |= {source.path for source in _toolchain.read_recipe(CSRC, "aarch64").sources}
    assert listed == {str(path.relative_to(CSRC)) for path in CSRC.rglob("*.cpp")}


def test_an_object_depends_on_what_its_source_includes(tmp_path: Path) -> None:
    write(tmp_path, a__a_dot_cpp='#include "one.h"\n  #  include "b/two.h"\n#include <vector>\n')
    write(tmp_path, a__one_dot_h='#include "b/two.h"\n', b__two_dot_h='#include <b/three.h>\n#include "a/one.h"\n')
    write(tmp_path, b__three_dot_h="", b__other_dot_h="")
    names = [str(path.relative_to(tmp_path)) for path in _toolchain._closure(tmp_path, "a/a.cpp")]
    assert sorted(names) == ["a/a.cpp", "a/one.h", "b/three.h", "b/two.h"]
    write(tmp_path, a__one_dot_h="#include NAMED_BY_A_MACRO\n")
    assert len(_toolchain._closure(tmp_path, "a/a.cpp")) == 5


def test_the_digest_sees_renames_and_moved_bytes(tmp_path: Path) -> None:
    digests = set()
    for files in ({"a": "12", "b": "3"}, {"a": "1", "b": "23"}, {"a": "12", "c": "3"}):
        folder = tmp_path / str(len(digests))
        write(folder, **files)
        digests.add(_toolchain.sources_digest(folder))
    assert len(digests) == 3
