"""tests/tidy.py would say so if there were something. Over the whole tree it is run by `make tidy`."""

from __future__ import annotations

import pytest
from native.objects import toolchain

from tests import tidy
from tests.requirements import need_clang_tidy

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
