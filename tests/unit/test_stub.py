"""python/bucketwheel/native/core.pyi says what the native module binds: every name, argument and type, and nothing else."""

from __future__ import annotations

from bucketwheel.native.modules import native
from tests.stub import STUB, differences


def test_the_stub_is_what_the_module_binds() -> None:
    found = differences(STUB.read_text(), native())
    assert not found, "write it anew with `python tests/stub.py && ruff format python`:\n" + "\n".join(found)


def test_a_difference_is_found() -> None:
    stub = STUB.read_text()
    old = "def holds(self, tensor: Any) -> bool"
    assert stub.count(old) == 1
    found = differences(stub.replace(old, "def holds(self, tensor: Any) -> list[str]"), native())
    assert [text.split(":")[0] for text in found] == ["Pool.holds"]
