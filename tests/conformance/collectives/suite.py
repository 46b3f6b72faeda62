"""The conformance suite of collectives: what must hold on every backend, in memory of every kind, with any number of ranks.

Each case is a function of the communicator, which may have run operations before. test_conformance.py runs all of
them over every backend that needs no GPU, with one to four ranks and a communicator for each; on a GPU
tests/gpu/test_nccl_ranks.py runs the same over NCCL with two.
"""

from __future__ import annotations

from collections.abc import Callable

from bucketwheel.comm.communicator import Communicator
from tests.conformance.collectives import data as conformance_data
from tests.conformance.collectives import order as conformance_order
from tests.conformance.collectives import requests as conformance_requests

Case = Callable[[Communicator], None]

CASES: tuple[Case, ...] = (*conformance_data.CASES, *conformance_requests.CASES, *conformance_order.CASES)
# The communicator is closed or has failed behind these.
ENDS: tuple[Case, ...] = conformance_order.ENDS
# For backends whose operations can be captured.
GRAPHS: tuple[Case, ...] = conformance_order.GRAPHS
