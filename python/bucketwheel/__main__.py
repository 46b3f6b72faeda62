"""Commands for the installation, failed runs, checkpoints, memory plans and built modules."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence

from bucketwheel._version import __version__

# Each is a module in tools/, imported when it is called: usage and --version come without torch.
_COMMANDS = {
    "doctor": "lists what the native modules need, and a remedy for each problem",
    "flight": "names the rank that stopped first, from the files in BW_TRACE_DIR",
    "checkpoint": "lists the content of a checkpoint and compares its checksums",
    "plan": "compares the memory that a recorded step needs under several policies",
    "cache": "lists or removes built native modules",
}
_BROKEN_PIPE = 141  # the exit status of a command that SIGPIPE ends


def main(arguments: Sequence[str] | None = None) -> int:
    words = sys.argv[1:] if arguments is None else arguments
    parser = argparse.ArgumentParser(prog="bucketwheel", description=__doc__)
    parser.add_argument("--version", action="version", version=f"bucketwheel {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    parsers = {name: commands.add_parser(name, help=says, description=says) for name, says in _COMMANDS.items()}
    try:
        if called := next((word for word in words if word in _COMMANDS), None):
            tool = importlib.import_module(f"bucketwheel.tools.{called}")
            tool.add_arguments(parsers[called])
        options = parser.parse_args(words)
        status: int = tool.main(options)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader, `head` say, has ended
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the exit flushes what is left
        return _BROKEN_PIPE
    except ImportError as error:
        if (error.name or "").partition(".")[0] != "torch":
            raise
        why = f"torch cannot be imported: {error}\nInstall torch 2.10 or later for {sys.executable}"
        print(f"bucketwheel {called}: {why}", file=sys.stderr)
        return 2
    return status


if __name__ == "__main__":
    sys.exit(main())
