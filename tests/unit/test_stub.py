"""python/bucketwheel/native/core.pyi says what the native module binds: every name, argument and type, and nothing else."""

from __future__ import annotations

import pytest

from bucketwheel.native.modules import native
from tests.stub import STUB, differences


def test_the_stub_is_what_the_module_binds() -> None:
    found = differences(STUB.read_text(), native())
    assert not found, "write it anew with `python tests/stub.py && ruff format python`:\n" + "\n".join(found)


@pytest.mark.parametrize(
    ("old", "new", "where"),
    [
        ("data_ptr: Final[int]", "data_ptr: int", ["Lease.data_ptr"]),
        ("def fold(", "def unfold(", ["fold", "unfold"]),
        ("def holds(self, tensor: Any) -> bool", "def holds(self, tensor: Any) -> list[str]", ["Pool.holds"]),
        ("stages_inputs: bool = False", "stages_inputs: bool = True", ["LocalWorld.__init__"]),
        ("class ShardSink(ReduceSink):", "class ShardSink:", ["ShardSink"]),
    ],
)
def test_differences_are_found(old: str, new: str, where: list[str]) -> None:
    stub = STUB.read_text()
    assert stub.count(old) == 1
    found = differences(stub.replace(old, new), native())
    assert [text.split(":")[0] for text in found] == where
