"""What the native module costs before anything is trained: a cold build, and importing it where it is built.

    python benchmarks/bench_build.py [--quick] [--json PATH]

`cold build`: the CPU module into an empty cache, by all cores; the limit is 45 s. `import`: how much longer a new process
lives that imports bucketwheel and loads the native module, which is there, than one that imports torch alone; each sample
is the difference of two that run one after the other, the limit 100 ms.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [path for path in map(str, (ROOT / "python",)) if path not in sys.path]

from harness import Results, Timing, measure, parse_args  # noqa: E402

BUILD_LIMIT_S, IMPORT_LIMIT_S = 45.0, 0.1
LOAD = "import torch, bucketwheel; from bucketwheel.native.modules import native; native()"


def run(code: str, **env: str) -> None:
    path = os.pathsep.join(filter(None, [str(ROOT / "python"), os.environ.get("PYTHONPATH", "")]))
    subprocess.run(
        [sys.executable, "-c", code],
        check=True,
        env={**os.environ, "PYTHONPATH": path, **env},
        stderr=subprocess.DEVNULL,
        timeout=900,
    )


def cold_build() -> tuple[float, float]:
    """Seconds, and seconds of all processors."""
    with tempfile.TemporaryDirectory() as folder:
        before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
        run(LOAD, BW_CACHE_DIR=folder)
        wall_s, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
        if not list(Path(folder).glob("*/_cpu*.so")):
            raise RuntimeError("nothing was built")
    return wall_s, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    args = parse_args(__doc__)
    results = Results("build", args.json)
    run(LOAD)  # is there from now on, and in the file cache
    times = measure({"torch": lambda: run("import torch"), "both": lambda: run(LOAD)}, repeats=7 if args.quick else 21)
    added = times["both"].minus(times["torch"])
    results.add("import", added, limit_s=IMPORT_LIMIT_S, torch_s=times["torch"].median_s)
    builds = [cold_build() for _ in range(1 if args.quick else 3)]
    wall = Timing(tuple(wall_s for wall_s, _ in builds))
    cpu = Timing(tuple(cpu_s for _, cpu_s in builds))
    results.add("cold build", wall, limit_s=BUILD_LIMIT_S, cpu_s=cpu.median_s)
    results.print_table()


if __name__ == "__main__":
    main()
