"""Where each element of a parameter lies: in its bucket, in the shard of a rank, in a master copy.

Uses `pool` and below. Start with `packing.py`, which decides it in pure code from sizes; `flat_params.py` moves the
parameters there, `shards.py` is what one rank owns, `precision.py` and `masters.py` say in which dtypes.
"""

from bucketwheel.layout.packing import Packing, PackItem, pack

__all__ = ["PackItem", "Packing", "pack"]
