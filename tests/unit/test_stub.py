"""python/bucketwheel/native/core.pyi says what the native module binds: every name, argument and type, and nothing else."""

from __future__ import annotations

import pytest

from bucketwheel.native.modules import native
from tests.stub import STUB, differences, names_in


def test_the_stub_is_what_the_module_binds() -> None:
    found = differences(STUB.read_text(), native())
    assert not found, "write it anew with `python tests/stub.py && ruff format python`:\n" + "\n".join(found)


@pytest.mark.parametrize(
    ("old", "new", "where"),
    [
        ("def fold(", "def unfold(", ["fold", "unfold"]),
        ("def look(self) ->", "def look(self, again: bool) ->", ["Tie.look"]),
        ("def holds(self, tensor:", "def holds(self, array:", ["Pool.holds"]),
        ("stages_inputs: bool = False", "stages_inputs: bool", ["LocalWorld.__init__"]),
        ("def holds(self, tensor: Any) -> bool", "def holds(self, tensor: str) -> bool", ["Pool.holds"]),
        ("def holds(self, tensor: Any) -> bool", "def holds(self, tensor: Any) -> list[str]", ["Pool.holds"]),
        ("stages_inputs: bool = False", "stages_inputs: bool = True", ["LocalWorld.__init__"]),
        ("MAX_PAYLOAD_BYTES: int\n", "MAX_PAYLOAD_BYTES: str\n", ["MAX_PAYLOAD_BYTES"]),
        ("MAX_PAYLOAD_BYTES: int\n", "", ["MAX_PAYLOAD_BYTES"]),
        ("class ShardSink(ReduceSink):", "class ShardSink:", ["ShardSink"]),
        ("    @staticmethod\n    def max_spans", "    def max_spans", ["ShardAccumulatorCuda.max_spans"]),
        ("    offset_bytes: int\n", "    def offset_bytes(self) -> int: ...\n", ["Lease.offset_bytes"]),
    ],
)
def test_differences_are_found(old: str, new: str, where: list[str]) -> None:
    stub = STUB.read_text()
    assert stub.count(old) == 1
    found = differences(stub.replace(old, new), native())
    assert [text.split(":")[0] for text in found] == where


def test_arguments_are_seen() -> None:
    names = names_in("class A:\n    def f(self, a: int, /, b: int = 1, *, c: int, d: int = 2) -> None: ...\nX: int")
    declared = "def f(self, a: int, /, b: int=1, *, c: int, d: int=2) -> None:\n    ..."
    assert names == {"A": "class ", "A.f": declared, "X": "X: int"}
