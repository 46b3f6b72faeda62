"""How pytest-xdist shares the tests out among its workers."""

from __future__ import annotations

import zlib
from typing import Any

import pytest


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """A file is one worker's, and so are all of tests/frameworks: their imports are paid once. But the runs of
    test_native.py are shared out by how the C++ tests are compiled: together they take half an hour. So are those of the
    optimizer's suite, in four parts.
    """
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            name, _, case = nodeid.partition("[")
            if nodeid.startswith("tests/frameworks/"):
                return "tests/frameworks/"
            if name == "tests/native/test_native.py::test_native":
                return name + next((preset for preset in ("thread", "address") if preset in case.split("-")[1]), "")
            if name.startswith("tests/native/test_native.py::"):
                return name
            suite = "tests/conformance/optimizer/test_suite.py::"
            if nodeid.startswith(suite):
                return f"{suite}{zlib.crc32(nodeid.encode()) % 4}"
            return super()._split_scope(nodeid)

        def _reschedule(self, node: Any) -> None:
            # A worker starts a test only when it knows the next one, or that there is none. After a crash, xdist queues all
            # files of the lost worker, also those it had finished. A worker that gets one of these gets no test, and if all
            # do, the run hangs: so each is given files until it has two tests.
            if node not in self.registered_collections:
                return  # it still collects; xdist comes back when it has
            super()._reschedule(node)
            while not node.shutting_down and self._pending_of(self.assigned_work[node]) < 2:
                super()._reschedule(node)

    return Scheduling(config, log) if config.getoption("dist") == "loadfile" else None
