"""The CPU module by the names that it binds: `core.Window` is the class of csrc/bindings/window_py.h.

The first use of a name finds or builds the module (`modules.native`). `core.pyi` beside this file is what type checkers and
editors read; `python tests/stub.py` writes it.
"""

from typing import Any

from bucketwheel.native import modules


def __getattr__(name: str) -> Any:
    if name.startswith("__"):  # what Python asks of any module builds nothing
        raise AttributeError(name)
    value = getattr(modules.native(), name)
    globals()[name] = value
    return value
