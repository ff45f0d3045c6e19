"""An agent's script as a program: its flags checked as values, its errors and its end by a signal as one line."""

from __future__ import annotations

import io
import os
import re
import shlex
import signal
import sys
from collections.abc import Callable
from contextlib import redirect_stderr
from pathlib import Path
from types import FrameType, UnionType
from typing import Any, Literal, NoReturn, TypeVar, Union, get_args, get_origin, get_type_hints

from retrieval_gym.messages import drop_output, error_message, is_out_of_memory, one_line

Args = TypeVar("Args")

LARGEST_COUNT = 10**12  # more is a slip; it also keeps products of counts within what arrays take
GO_ON = "go on with the same command"  # until there is a run
_go_on = GO_ON


class _Terminated(KeyboardInterrupt):
    """SIGTERM, which ends a script as Ctrl-C does."""


def tell_in_one_line(name: str) -> None:
    """From here on, print what ends the script as one line where a user can mend it; a fault of ours keeps its trace.

    It is for what ``run_script`` does not see: imports that are missing, or that Ctrl-C interrupts.

    Args:
        name: of the script.
    """

    def tell(kind: type[BaseException], error: BaseException, trace: Any) -> None:
        line = _line(name, error)
        if line is None:
            sys.__excepthook__(kind, error, trace)
        else:
            print(line, file=sys.stderr)

    sys.excepthook = tell


def tell_resume(directory: Path) -> None:
    """Print what goes on with a run that was stopped; it is said again where the script is interrupted."""
    global _go_on
    _go_on = f"go on with {shlex.join([shown_path(sys.executable), sys.argv[0], '--resume', str(directory)])}"
    print(f"where it is stopped, {_go_on}")


def shown_path(path: str | Path) -> str:
    """Return a path as it is typed where the script runs: relative below the working directory."""
    return os.path.relpath(path) if str(path).startswith(os.getcwd() + os.sep) else str(path)


def run_script(name: str, parse: Callable[[], Args], main: Callable[[Args], object]) -> None:
    """Read the command line and run; what a user can mend ends in one line on stderr.

    Args:
        name: of the script.
        parse: reads the command line with tyro or argparse; its result is checked with ``check_values``.
        main: runs with what ``parse`` returned.

    Raises:
        SystemExit: with that line, which gives the status 1; with 2 where the command line cannot be read, 130 after
            Ctrl-C and 143 after SIGTERM, as a shell counts them.
    """
    global _go_on
    _go_on = GO_ON
    before = signal.signal(signal.SIGTERM, _terminate)
    try:
        main(_parsed(name, parse))
        if sys.stdout is not None:  # None when it was closed before the start
            sys.stdout.flush()
    except KeyboardInterrupt as error:
        print(_line(name, error), file=sys.stderr)
        sys.exit(128 + (signal.SIGTERM if isinstance(error, _Terminated) else signal.SIGINT))
    except Exception as error:
        line = _line(name, error)
        if line is None:
            raise
        if isinstance(error, OSError):
            drop_output()
        sys.exit(line)
    finally:
        signal.signal(signal.SIGTERM, before)


def check_values(args: Any) -> None:
    """Refuse values that no flag gives, as a damaged ``config.json`` does, empty names, and counts beyond all use.

    Args:
        args: a dataclass.

    Raises:
        ValueError: for the first of them.
    """
    for name, hint in get_type_hints(type(args)).items():
        value = getattr(args, name)
        if not _fits(value, hint):
            raise ValueError(
                f"{name} is {value!r:.80}, which is not {_name_of(hint)}: restore config.json, or start a new run"
            )
        if value == "":
            raise ValueError(f"{name} is empty: give it a value; is a variable of the shell unset?")
        for text in value if isinstance(value, tuple) else (value,):
            if isinstance(text, str) and not text.isascii() and re.search("[\ud800-\udfff]", text):
                raise ValueError(f"{name} is {text!a:.80}, which is not UTF-8: rename the file or folder")
        if type(value) is int and value > LARGEST_COUNT:
            raise ValueError(f"{name} is {value!s:.30}: it must be at most {LARGEST_COUNT:,}")


def _terminate(number: int, frame: FrameType | None) -> NoReturn:
    raise _Terminated


def _parsed(name: str, parse: Callable[[], Args]) -> Args:
    said = io.StringIO()
    try:
        with redirect_stderr(said):
            args = parse()
    except SystemExit as stop:
        if stop.code:  # not after --help
            print(one_line(f"{name}: {_refusal(said.getvalue())}"), file=sys.stderr)
        raise
    check_values(args)
    sys.stderr.write(said.getvalue())
    return args


def _refusal(text: str) -> str:
    """Return what tyro says in a box below a title, or argparse below its usage, as one line."""
    rows = [row.strip("│╭╮╰╯ ") for row in re.sub(r"\x1b\[[\d;]*m", "", text).splitlines()[1:]]
    # Rules part what is wrong, a flag that may be meant, and where help is.
    parts = re.split(r"^[─-]+$", "\n".join(rows), flags=re.MULTILINE)
    reason = " ".join(next(part for part in parts if part.strip()).split())
    reason = reason.rpartition(f"{Path(sys.argv[0]).name}: error: ")[2].rstrip(".")
    meant = re.search(r"Perhaps you meant:\s+(--[\w-]+)", "\n".join(rows))
    return f"{reason}{f', perhaps you meant {meant[1]}' if meant else ''}; see {sys.argv[0]} --help"


def _line(name: str, error: BaseException) -> str | None:
    """Return the line for an error that a user can mend, None for any other."""
    if isinstance(error, KeyboardInterrupt):
        how = "terminated" if isinstance(error, _Terminated) else "interrupted"
        return f"{name}: {how}; {_go_on}"
    if is_out_of_memory(error):
        detail = f" ({str(error).splitlines()[0]})" if str(error) else ""
        return one_line(f"{name}: out of memory{detail}: ask for less at once, such as smaller batches")
    if isinstance(error, OSError) and error.filename is None and error.strerror == os.strerror(error.errno or 0):
        return f"{name}: cannot print: {error.strerror}; look where the output is sent, and {_go_on}"
    if isinstance(error, (ValueError, OSError, ImportError, FloatingPointError)):
        return one_line(f"{name}: {error_message(error)}")
    return None


def _fits(value: Any, hint: Any) -> bool:
    """Say whether a value is of the type that a field of a script's arguments is declared with."""
    options = get_args(hint)
    if get_origin(hint) is Literal:
        return any(value == option and type(value) is type(option) for option in options)
    if get_origin(hint) in (Union, UnionType):
        return any(_fits(value, option) for option in options)
    if get_origin(hint) is tuple:
        if type(value) is not tuple or (options[-1] is not Ellipsis and len(value) != len(options)):
            return False
        items = options[:1] * len(value) if options[-1] is Ellipsis else options
        return all(_fits(item, option) for item, option in zip(value, items, strict=True))
    return type(value) in (int, float) if hint is float else type(value) is hint


def _name_of(hint: Any) -> str:
    return hint.__name__ if isinstance(hint, type) and not get_args(hint) else str(hint).replace("typing.", "")
