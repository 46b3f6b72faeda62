"""The console script ``bucketwheel``. It is beside the package, which asks for it: imported first, it keeps torch out."""

from bucketwheel.__main__ import main

__all__ = ["main"]
