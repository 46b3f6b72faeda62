"""What the native module binds (csrc/bindings). Built by `bucketwheel._build`, which `native()` returns."""

from typing import Any

def __getattr__(name: str) -> Any: ...
