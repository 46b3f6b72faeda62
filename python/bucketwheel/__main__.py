"""Commands about the installation, about runs that failed, checkpoints, memory plans and built modules."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence

from bucketwheel._version import __version__

# Each is a module in tools/, imported when it is called: usage and --version come without torch.
_COMMANDS = {
    "doctor": "what is there, what is missing, what to do about it",
    "flight": "which rank stopped first, by what ranks wrote to BW_TRACE_DIR",
    "checkpoint": "what a checkpoint holds, and whether it is whole",
    "plan": "how much memory a recorded step needs, by policy",
    "cache": "the native modules that were built, and how to remove them",
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
