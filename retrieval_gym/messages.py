"""What a program says when it ends early: one line, of what went wrong and what to do."""

from __future__ import annotations

import os
import sys

LONGEST_MESSAGE = 1_000  # characters: an id or a path of one's own can be a megabyte


def is_out_of_memory(error: BaseException) -> bool:
    """Say whether memory ran out; torch raises a RuntimeError that says so."""
    words = ("out of memory", "can't allocate memory")
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError) and any(each in str(error) for each in words)
    )


def error_message(error: Exception) -> str:
    """Return what an error says, with the file and a remedy where Python names these only in its own way."""
    if isinstance(error, UnicodeEncodeError):
        character = error.object[error.start]
        return f"cannot write {character!a} as {error.encoding}: set PYTHONIOENCODING=utf-8"
    if isinstance(error, OSError) and error.strerror:
        if error.filename is None:  # one of ours: str(error) would put the error's number in front
            return error.strerror
        return f"cannot open {error.filename}: {error.strerror}; check the path and its permissions"
    return str(error) or ("out of memory" if isinstance(error, MemoryError) else type(error).__name__)


def one_line(message: str) -> str:
    """Put a message on one line, and cut the middle out of one that nobody would read."""
    line = " ".join(message.split())
    half = LONGEST_MESSAGE // 2
    return line if len(line) <= LONGEST_MESSAGE else f"{line[:half]} [...] {line[-half:]}"


def drop_output() -> None:
    """Send what stdout cannot take nowhere; Python would try to write it once more at exit, and complain."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
