"""Sharded parameters (ZeRO-3): every rank keeps a part of each, and the whole is gathered, unit by unit, while it is needed.

Uses `residency`, `checkpoint` and below, never `optim`: an optimizer finds the shards by `layout.leased_params`. Start with
`module.py`; `units.py` says which parameters come and go together, `runtime.py` what happens at a boundary, `report.py` is
the text of `plan_report`.
"""
