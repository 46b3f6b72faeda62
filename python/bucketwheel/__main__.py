"""``python -m bucketwheel``: commands about the installation, about runs that failed, checkpoints and memory."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from bucketwheel.tools import checkpoint, doctor, flight, plan

_BROKEN_PIPE = 141  # the exit status of a command that SIGPIPE ends


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bucketwheel", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    doctor.add_arguments(commands.add_parser("doctor", help="what is there, what is missing, what to do about it"))
    flight.add_arguments(commands.add_parser("flight", help="who stopped first, by what ranks wrote to BW_TRACE_DIR"))
    checkpoint.add_arguments(commands.add_parser("checkpoint", help="what a checkpoint holds, and whether it is whole"))
    plan.add_arguments(commands.add_parser("plan", help="how much memory a recorded step needs, by policy"))
    options = parser.parse_args(arguments)
    tools = {"checkpoint": checkpoint, "doctor": doctor, "flight": flight, "plan": plan}
    try:
        status = tools[options.command].main(options)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader, `head` say, has ended
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the exit flushes what is left
        return _BROKEN_PIPE
    return status


if __name__ == "__main__":
    sys.exit(main())
