"""bucketwheel: sharded data-parallel training for PyTorch.

Importing compiles nothing; the native module builds itself at first use.
"""

from bucketwheel._version import __version__

__all__ = ["__version__"]
