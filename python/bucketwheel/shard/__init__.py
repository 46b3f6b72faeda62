"""Sharded parameters (ZeRO-3): each rank keeps a part of every parameter, and units of parameters are gathered while they are
needed.

Uses `residency`, `checkpoint` and below, never `optim`: an optimizer finds the shards through `layout.leased_params`. Start
with `module.py`. `units.py` decides which parameters form a unit, `runtime.py` acts when the forward or backward of a unit
begins or ends, and `report.py` makes the text of `plan_report`."""
