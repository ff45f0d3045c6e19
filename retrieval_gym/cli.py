"""The ``retrieval_gym`` command line: one module in ``commands`` a subcommand."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import NoReturn

from retrieval_gym import __version__

COMMANDS = (
    "datasets", "play", "evaluate", "diagnose", "stopping", "geometry", "answer", "report", "validate", "convert",
    "embed", "search", "export",
)  # fmt: skip
NAMES = {  # arguments that name a file, a folder or a model, as people know them
    "path": "--path", "run_folder": "the folder of a run", "encoder": "--encoder", "source": "SOURCE",
    "target": "TARGET", "runs": "the folder of a run", "cache_dir": "--cache-dir", "chains": "--chains",
    "questions": "--questions", "reader": "--reader", "retriever": "--retriever",
}  # fmt: skip
OUT_OF_MEMORY = ("out of memory", "can't allocate memory")  # how torch, which raises RuntimeError, says so
LONGEST_MESSAGE = 1_000  # characters: an id or a path of one's own can be a megabyte


class _Parser(argparse.ArgumentParser):
    """Says what is wrong with the arguments in one line, like every other error."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{_one_line(f'{self.prog}: {message}')}; see {self.prog} --help\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand and return its exit status; bad input or a missing extra prints one line and returns 2."""
    name = "retrieval_gym"
    try:
        args = _parse(argv)
        name = f"retrieval_gym {args.command}"
        status: int = args.run(args)
        if sys.stdout is not None:  # None when it was closed before the start
            sys.stdout.flush()
        return status
    except BrokenPipeError:  # the reader, such as head, has seen enough
        _drop_output()
        return 1
    except (ValueError, OSError, ImportError, MemoryError) as error:
        print(_one_line(f"{name}: {_message(error)}"), file=sys.stderr)
        if isinstance(error, OSError):
            _drop_output()
        return 2
    except RuntimeError as error:
        if not any(words in str(error) for words in OUT_OF_MEMORY):
            raise
        print(f"{name}: out of memory; take a smaller --batch-size, or --limit what is asked", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
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


def _message(error: Exception) -> str:
    """Return what an error says, with the file and a remedy where Python names these only in its own way."""
    if isinstance(error, UnicodeEncodeError):
        character = error.object[error.start]
        return f"cannot write {character!a} as {error.encoding}: set PYTHONIOENCODING=utf-8"
    if isinstance(error, OSError) and error.strerror:
        if error.filename is None:  # one of ours: str(error) would put the error's number in front
            return error.strerror
        return f"cannot open {error.filename}: {error.strerror}; check the path and its permissions"
    return str(error) or ("out of memory" if isinstance(error, MemoryError) else type(error).__name__)


def _one_line(message: str) -> str:
    """Put a message on one line, and cut the middle out of one that nobody would read."""
    line = " ".join(message.split())
    half = LONGEST_MESSAGE // 2
    return line if len(line) <= LONGEST_MESSAGE else f"{line[:half]} [...] {line[-half:]}"


def _drop_output() -> None:
    """Send what stdout cannot take nowhere; Python would try to write it once more at exit, and complain."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    sys.exit(main())
