"""``python -m bucketwheel``: commands about the installation."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from bucketwheel import doctor


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bucketwheel", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    doctor.add_arguments(commands.add_parser("doctor", help="what is there, what is missing, what to do about it"))
    return doctor.main(parser.parse_args(arguments))


if __name__ == "__main__":
    sys.exit(main())
