"""python/bucketwheel/native/core.pyi says what the native module binds: every name, argument and type, and nothing else."""

from __future__ import annotations

from bucketwheel.native.modules import native
from tests.stub import STUB, differences


def test_the_stub_is_what_the_module_binds() -> None:
    found = differences(STUB.read_text(), native())
    assert not found, "write it anew with `python tests/stub.py && ruff format python`:\n" + "\n".join(found)


def test_a_difference_is_found() -> None:
    stub = STUB.read_text().replace("stages_inputs: bool = False", "stages_inputs: bool = True")
    assert [text.split(":")[0] for text in differences(stub, native())] == ["LocalWorld.__init__"]
