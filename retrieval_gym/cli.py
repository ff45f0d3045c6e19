"""The ``retrieval_gym`` command line: one module in ``commands`` a subcommand."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module

COMMANDS = ("datasets", "play", "evaluate")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand and return its exit status; bad input or a missing extra prints one line and returns 2."""
    parser = argparse.ArgumentParser(
        prog="retrieval_gym", description="Multi-step retrieval as reinforcement learning."
    )
    subparsers = parser.add_subparsers(dest="command", required=True)
    for name in COMMANDS:
        import_module(f"retrieval_gym.commands.{name}").add_parser(subparsers)
    args = parser.parse_args(argv)
    try:
        return args.run(args)
    except (ValueError, FileNotFoundError, ImportError) as error:
        print(f"retrieval_gym {args.command}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
