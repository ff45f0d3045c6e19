"""The ``retrieval_gym`` command line: one module in ``commands`` a subcommand."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import import_module

from retrieval_gym import __version__

COMMANDS = (
    "datasets", "play", "evaluate", "diagnose", "stopping", "geometry", "answer", "report", "validate", "convert",
    "embed", "search", "export",
)  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand and return its exit status; bad input or a missing extra prints one line and returns 2."""
    parser = argparse.ArgumentParser(
        prog="retrieval_gym", description="Multi-step retrieval as reinforcement learning."
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    subparsers = parser.add_subparsers(dest="command", required=True)
    for name in COMMANDS:
        import_module(f"retrieval_gym.commands.{name}").add_parser(subparsers)
    args = parser.parse_args(argv)
    try:
        status: int = args.run(args)
        if sys.stdout is not None:  # None when it was closed before the start
            sys.stdout.flush()
        return status
    except BrokenPipeError:  # the reader, such as head, has seen enough
        _drop_output()
        return 1
    except (ValueError, OSError, ImportError, MemoryError) as error:
        message = str(error) or ("out of memory" if isinstance(error, MemoryError) else type(error).__name__)
        print(f"retrieval_gym {args.command}: {message}", file=sys.stderr)
        if isinstance(error, OSError):
            _drop_output()
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


def _drop_output() -> None:
    """Send what stdout cannot take nowhere; Python would try to write it once more at exit, and complain."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    sys.exit(main())
