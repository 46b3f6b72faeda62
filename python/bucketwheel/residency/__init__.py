"""Gathering of parameters: when all-gathers of parameters start, and what waits for them.

Uses `comm`, `layout` and below. Start with `gathers.py`, the all-gathers of a step. `absent_param.py` is a parameter that is not
gathered yet. `module_hooks.py` makes modules wait for their parameters, `unit_hooks.py` reports the units of a sharded model
that run, and `demand_order.py` computes, in pure code, the order in which buckets are gathered."""
