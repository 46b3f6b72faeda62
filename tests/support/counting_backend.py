"""torch.compile in tests: a backend that counts what is compiled and runs it as it is, so that there is no other rounding;
and where ranks that are threads cannot compile."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

# Without any code of ours: tracing there makes torch call a guard of the device that went with the earlier thread.
compiles_in_threads = pytest.mark.skipif(
    torch.version.cuda is not None and torch.cuda.device_count() == 0 and torch.__version__ < (2, 13),
    reason="torch built for CUDA, before 2.13 (seen with 2.10 and 2.11), without a GPU: the process crashes when a thread "
    "compiles after another one that has compiled has ended",
)


class CountingBackend:
    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        self.graphs += 1
        return graph.forward
