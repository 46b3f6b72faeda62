"""tests/tidy.py would say so if there were something. Over the whole tree it is run by `make tidy`."""

from __future__ import annotations

import pytest

from bucketwheel.native.toolchain import CPU, CUDA, read_recipe
from tests import tidy
from tests.native.objects import toolchain
from tests.support.requirements import need_clang_tidy

FAULT = """#include <string>
#include <utility>

namespace {
[[maybe_unused]] size_t taken_length(std::string text) {
  const std::string taken = std::move(text);
  return taken.size() + text.size();
}
}  // namespace
"""
MENDED = FAULT.replace(" + text.size()", "")


def test_every_source_but_those_of_nvcc_is_read() -> None:
    read = [path for unit in tidy.units() for path in unit.paths]
    listed = [source.path for module in (CPU, CUDA) for source in read_recipe(tidy.CSRC, module=module).sources]
    built = [tidy.CSRC / path for path in listed if path.endswith(".cpp")]
    assert sorted(read) == sorted([*built, *tidy.NATIVE.rglob("*.cpp")])


@pytest.mark.slow
@pytest.mark.timeout_s(300)
def test_a_fault_is_found_and_what_was_clean_is_not_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    tool = need_clang_tidy()
    folder = tidy.OUT / "fault"  # below the repository, whose .clang-tidy counts
    monkeypatch.setattr(tidy, "OUT", folder)
    source = folder / "fault.cpp"
    unit = tidy.Unit((source,), (*toolchain().cxx, "-std=c++20"))
    tidy.write_compiles([unit])
    for stale in folder.glob("*.clean"):
        stale.unlink()

    source.write_text(FAULT)
    for _ in range(2):
        assert "bugprone-use-after-move" in tidy.findings(tool, "", unit)
    source.write_text(MENDED)
    assert tidy.findings(tool, "", unit) == ""
    assert tidy.findings("/no/such/tool", "", unit) == ""
    source.write_text(FAULT)
    assert tidy.findings(tool, "", unit) != ""
