"""Files that are whole or not there: nobody ever reads half of one."""

from __future__ import annotations

import os
import secrets
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO


def write_atomically(path: str | Path, write: Callable[[IO[bytes]], None], *, keep_previous: bool = False) -> None:
    """Write a file so that its name always stands for a whole one.

    Args:
        path: the file; where it is a symbolic link, the file that this leads to, unless ``keep_previous``.
        write: writes the content to a binary file.
        keep_previous: whether to keep the file that stood there as ``{stem}.previous{suffix}``; such a file has one
            writer at a time, which owns ``{name}.tmp`` beside it.

    Raises:
        OSError: when the file cannot be written; it names the path.
    """
    path = Path(path)
    # One writer overwrites what it left when it was killed; several need names that collide with nothing.
    target = path if keep_previous else Path(os.path.realpath(path))
    new = target.with_name(f"{target.name}.tmp" if keep_previous else f"{target.name}.{secrets.token_hex(8)}.tmp")
    with writing(path):
        try:
            with open(new, "wb") as file:
                write(file)
                file.flush()
                os.fsync(file.fileno())
            if keep_previous and target.exists():
                _replace_and_keep(target, new)
            else:
                os.replace(new, target)
        except BaseException:
            new.unlink(missing_ok=True)
            raise
        _sync_folder(target.parent)


def lock(path: str | Path, *, wait: bool) -> IO[str] | None:
    """Keep other processes from the same lock until the returned file is closed, where the system can (else None).

    Args:
        path: the lock's own file, made where it is missing.
        wait: whether to wait for another process that holds the lock.

    Raises:
        BlockingIOError: when another process holds it and ``wait`` is False.
        OSError: when the file cannot be made.
    """
    if sys.platform == "win32":
        return None
    import fcntl

    with writing(path):
        file = open(path, "w")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BaseException:
        file.close()
        raise
    return file


@contextmanager
def writing(path: str | Path) -> Iterator[None]:
    """Turn an OSError while writing into one that names the path and the remedy.

    Raises:
        OSError: of the same kind and number, with one line as its message.
    """
    try:
        yield
    except OSError as error:
        message = f"cannot write {path}: {error.strerror or error}; free some space or choose a folder you can write to"
        raise OSError(error.errno, message) from error


def _replace_and_keep(path: Path, new: Path) -> None:
    """Put ``new`` in the place of ``path``, whose file becomes the previous one."""
    # The old file gets its second name before it loses the first, and the older one goes last of all: should the old
    # file be damaged, the older one stays until the new one is in place.
    previous = path.with_name(f"{path.stem}.previous{path.suffix}")
    old = path.with_name(f"{previous.name}.tmp")
    old.unlink(missing_ok=True)
    _link_or_copy(path, old)
    os.replace(new, path)
    os.replace(old, previous)


def _link_or_copy(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:  # a file system without hard links
        shutil.copyfile(source, target)
        with open(target, "rb+") as file:
            os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    if os.name == "nt":  # Windows cannot open a folder
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_text(path: str | Path, text: str) -> None:
    """Write a UTF-8 text file atomically.

    Raises:
        FileNotFoundError: when its folder does not exist.
        OSError: when it cannot be written.
    """
    path = Path(path)
    if not path.parent.is_dir():
        raise FileNotFoundError(f"cannot write {path}: there is no folder {path.parent}; make it first")
    write_atomically(path, lambda file: _write(file, text))


def _write(file: IO[bytes], text: str) -> None:
    file.write(text.encode())
