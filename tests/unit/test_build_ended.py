"""Builds that are ended, by their time limit or Ctrl-C: no compiler runs on."""

from __future__ import annotations

import signal
import threading
from pathlib import Path

import pytest

from bucketwheel.native import compile
from tests.unit.test_build import wait_until, without
from tests.unit.tiny_tree import LOAD, TinyTree


@pytest.fixture
def tree(tmp_path: Path) -> TinyTree:
    return TinyTree(tmp_path)


@pytest.mark.parametrize("ninja", [True, False])
def test_a_compiler_that_hangs_is_ended(tree: TinyTree, ninja: bool) -> None:
    tree.make_compiler(before="sleep 300")
    hide, changes = without(tree, ninja)
    message = tree.error(hide + LOAD, BW_BUILD_TIMEOUT="1", **changes)
    assert "stopped after 1 s (BW_BUILD_TIMEOUT)" in message
    wait_until(lambda: not processes_of(tree), "no compiler is left")


@pytest.mark.parametrize("ninja", [True, False])
def test_the_time_limit_is_for_the_whole_build(tree: TinyTree, ninja: bool) -> None:
    """No compile takes as long as that, but they and the link do."""
    tree.make_compiler(before="sleep 2")
    hide, changes = without(tree, ninja)
    assert "stopped after 3 s (BW_BUILD_TIMEOUT)" in tree.error(hide + LOAD, BW_BUILD_TIMEOUT="3", **changes)


@pytest.mark.parametrize("ninja", [True, False])
def test_ctrl_c_ends_a_build_and_its_compilers(tree: TinyTree, ninja: bool) -> None:
    tree.hold_compiler()
    hide, changes = without(tree, ninja)
    heard = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    builder = tree.start(heard + hide + LOAD, **changes)
    try:
        wait_until(tree.compiled, "the first compile")
        builder.send_signal(signal.SIGINT)
        _, err = builder.communicate(timeout=30)
        assert err.rstrip().endswith("KeyboardInterrupt"), err
        wait_until(lambda: not processes_of(tree), "no compiler is left")
        assert list((tree.cache / "tmp").iterdir()) == []
    finally:
        tree.release_compiler()


# Ctrl-C between the start of a process and where it is known.
INTERRUPTED_AT_A_START = """
import os, signal, time
from bucketwheel.native import compile as _compile
signal.signal(signal.SIGINT, signal.default_int_handler)
start, interrupts = _compile._start, [signal.SIGINT]
def interrupted(*args):
    process = start(*args)
    while interrupts and "-c" not in args[0]:  # ninja, or without it the link
        os.kill(os.getpid(), interrupts.pop())
        time.sleep(0.5)
    return process
_compile._start = interrupted
"""


@pytest.mark.parametrize("ninja", [True, False])
def test_ctrl_c_at_the_start_of_a_process(tree: TinyTree, ninja: bool) -> None:
    held = f"while [ ! -e {tree.gate} ]; do sleep 0.05; done"
    tree.make_compiler(before=f'case " $* " in *" -c "*) ;; *) {held};; esac')  # the link
    hide, changes = without(tree, ninja)
    builder = tree.start(INTERRUPTED_AT_A_START + hide + LOAD, **changes)
    try:
        _, err = builder.communicate(timeout=60)
        assert err.rstrip().endswith("KeyboardInterrupt"), err
        wait_until(lambda: not processes_of(tree), "no compiler is left")
    finally:
        tree.release_compiler()


def test_a_second_ctrl_c_ends_the_patience_with_compilers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that ignores SIGTERM."""
    calls = compile._Calls(60.0)
    script = f"trap '' TERM; echo > {tmp_path}/started; sleep 60 & wait"
    thread = threading.Thread(target=calls.run, args=(["sh", "-c", script], tmp_path))
    thread.start()
    wait_until((tmp_path / "started").exists, "the compiler has started")
    monkeypatch.setattr(compile, "_PAUSE_S", _Interrupt())
    with pytest.raises(KeyboardInterrupt):
        calls.end()
    thread.join(30)
    assert not thread.is_alive()


class _Interrupt:
    """How long to sleep: Ctrl-C comes then."""

    def __float__(self) -> float:
        raise KeyboardInterrupt

    __index__ = __float__


def processes_of(tree: TinyTree) -> list[str]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if str(tree.compiler) in command:
            found.append(command)
    return found
