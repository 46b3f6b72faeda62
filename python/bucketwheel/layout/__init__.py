"""Memory of parameters: where each element lies in its bucket, in the shard of a rank, and in a master weight.

Uses `pool` and below. Start with `packing.py`, pure code that computes places from sizes. `flat_params.py` moves parameters to
their places, and `leased_params.py` does so while they are gathered. `shard_store.py` is the memory that one rank owns.
`precision.py` and `masters.py` decide the dtypes."""

from bucketwheel.layout.packing import Packing, PackItem, pack

__all__ = ["PackItem", "Packing", "pack"]
