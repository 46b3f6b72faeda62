"""bucketwheel: sharded data-parallel training for PyTorch.

Importing compiles nothing; the native module builds itself at first use.
"""

__version__ = "0.1.0"
