"""The ``retrieval_gym`` command line: one module in ``commands`` a subcommand."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import NoReturn

from retrieval_gym import __version__
from retrieval_gym.messages import drop_output, error_message, is_out_of_memory, one_line
from retrieval_gym.threads import let_threads_sleep

COMMANDS = (
    "datasets", "play", "evaluate", "diagnose", "stopping", "geometry", "answer", "report", "validate", "convert",
    "embed", "search", "export",
)  # fmt: skip
NAMES = {  # arguments that name a file, a folder or a model, as people know them
    "path": "--path", "run_folder": "the folder of a run", "encoder": "--encoder", "source": "SOURCE",
    "target": "TARGET", "runs": "the folder of a run", "cache_dir": "--cache-dir", "chains": "--chains",
    "questions": "--questions", "reader": "--reader", "retriever": "--retriever",
}  # fmt: skip


class _Parser(argparse.ArgumentParser):
    """Says what is wrong with the arguments in one line, like every other error."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{one_line(f'{self.prog}: {message}')}; see {self.prog} --help\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand and return its exit status; bad input or a missing extra prints one line and returns 2."""
    name, cached = "retrieval_gym", False
    let_threads_sleep()
    try:
        args = _parse(argv)
        name, cached = f"retrieval_gym {args.command}", getattr(args, "cache_dir", None) is not None
        status: int = args.run(args)
        if sys.stdout is not None:  # None when it was closed before the start
            sys.stdout.flush()
        return status
    except BrokenPipeError:  # the reader, such as head, has seen enough
        drop_output()
        return 1
    except (ValueError, OSError, ImportError, MemoryError) as error:
        print(one_line(f"{name}: {error_message(error)}"), file=sys.stderr)
        if isinstance(error, OSError):
            drop_output()
        return 2
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        print(f"{name}: out of memory; take a smaller --batch-size, or --limit what is asked", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        kept = "; the same command goes on with what --cache-dir holds" if cached else ""
        print(f"{name}: interrupted{kept}", file=sys.stderr)
        return 130


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line.

    Raises:
        ValueError: when an argument is empty, as an unset variable of the shell leaves it: the name of no file, it
            would count as the working directory.
    """
    parser = _Parser(prog="retrieval_gym", description="Multi-step retrieval as reinforcement learning.")
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    subparsers = parser.add_subparsers(dest="command", required=True)
    for command in COMMANDS:
        import_module(f"retrieval_gym.commands.{command}").add_parser(subparsers)
    args = parser.parse_args(argv)
    for name, value in vars(args).items():
        if name in NAMES and (value == "" or (isinstance(value, list) and "" in value)):
            raise ValueError(f"{NAMES[name]} is empty: give it a value; is a variable of the shell unset?")
    return args


if __name__ == "__main__":
    sys.exit(main())
