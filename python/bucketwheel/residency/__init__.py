"""How parameters come back: the all-gathers that `step` starts, and who waits for them.

Uses `grads` and below. Start with `gathers.py`; `absent_param.py` is a parameter that is still coming, `module_hooks.py`
makes modules wait for theirs, `demand_order.py` decides, in pure code, in which order buckets are gathered.
"""
