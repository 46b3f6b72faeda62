"""How the native modules come to be: found, or compiled once into a cache, and loaded.

Uses the standard library, `errors` and `_version`: setup.py imports this room without torch.
Start with `modules.py` (find or build), then `toolchain.py` (which compiler), `compile.py`, `progress.py`, `cache.py` and
`env.py` (every BW_ variable that Python reads). `core.pyi` lists what the CPU module binds.
"""
