"""A corpus out of its files: held in memory where it is small, else written once to an Arrow file in the cache."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path

from retrieval_gym.datasets.base import Corpus
from retrieval_gym.datasets.sources import cache_folder
from retrieval_gym.datasets.stored_corpus import StoredCorpus, write_stored_corpus
from retrieval_gym.files import lock

# (where it stands, key, title, text) of each passage.
Rows = Iterator[tuple[str, str, str, str]]

_FORMAT = 1  # of the stored corpora; another one is written anew
_DEFAULT_MAX_SIZE = 512 * 2**20
_UNPACKED = {".gz": 4, ".parquet": 4}  # about how much longer the text is than the file


def corpus_of_files(files: Sequence[Path], rows: Callable[[], Rows], *, drop_blank: bool) -> tuple[Corpus, int]:
    """Return the corpus in ``files``.

    Where they hold more than ``$RETRIEVAL_GYM_IN_MEMORY_MAX_SIZE`` bytes (512 MiB; packed text counts fourfold) and
    pyarrow is installed, passages stay on disk: they are written once, to an Arrow file in the cache's folder
    ``corpora``, which is found again until a file changes (its path, size or time).

    Args:
        files: what ``rows`` reads.
        rows: reads the passages anew at each call.
        drop_blank: whether passages with neither title nor text are left out, not refused.

    Returns:
        The corpus, and the number of passages that were left out.

    Raises:
        ValueError: when a passage is malformed, blank and not to be dropped, or has the id of another, or when none is
            left; the message says where it stands.
        OSError: when the Arrow file cannot be written.
    """
    size = sum(file.stat().st_size * _UNPACKED.get(file.suffix, 1) for file in files)
    reading = _Reading(files, rows, drop_blank)
    if size > _max_size():
        if find_spec("pyarrow") is not None:
            return _stored(reading, size)
        print(
            f"retrieval_gym: {files[0]} (about {size >> 20} MiB) is held in memory; with "
            "pip install 'retrieval-gym[data]' it stays on disk",
            file=sys.stderr,
        )
    return reading.in_memory(), reading.dropped


def _max_size() -> int:
    value = os.environ.get("RETRIEVAL_GYM_IN_MEMORY_MAX_SIZE") or str(_DEFAULT_MAX_SIZE)
    if not value.isdecimal():
        raise ValueError(f"RETRIEVAL_GYM_IN_MEMORY_MAX_SIZE is {value!r}: give a whole number of bytes")
    return int(value)


class _Reading:
    """Passages as their files give them, checked; ``dropped`` counts those left out so far."""

    def __init__(self, files: Sequence[Path], rows: Callable[[], Rows], drop_blank: bool) -> None:
        self.files, self.drop_blank = files, drop_blank
        self.dropped = 0
        self._rows = rows

    def passages(self) -> Iterator[tuple[str, str, str]]:
        self.dropped, kept = 0, False
        for where, key, title, text in self._rows():
            if title.strip() or text.strip():
                kept = True
                yield key, title, text
            elif self.drop_blank:
                self.dropped += 1
            else:
                raise ValueError(f"{where}: passage {key!r} has neither title nor text: remove it")
        if not kept:
            raise ValueError(f"{self.files[0]}: no passage has a title or a text")

    def in_memory(self) -> Corpus:
        titles: list[str] = []
        texts: list[str] = []
        keys: dict[str, None] = {}
        for key, title, text in self.passages():
            if key in keys:
                raise self.twice(key)
            keys[key] = None
            titles.append(title)
            texts.append(text)
        return Corpus(titles, texts, list(keys))

    def twice(self, key: str) -> ValueError:
        """Say where a key stands that occurs twice."""
        first, second, *_ = (where for where, each, *text in self._rows() if each == key and "".join(text).strip())
        return ValueError(f"{second}: passage id {key!r} occurs twice, first at {first}: make ids unique")


def _stored(reading: _Reading, size: int) -> tuple[Corpus, int]:
    stats = [(str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns) for file in reading.files]
    name = sha256(json.dumps([_FORMAT, reading.drop_blank, stats]).encode()).hexdigest()[:16]
    folder = cache_folder() / "corpora" / f"{reading.files[0].name.split('.')[0]}-{name}"
    if not folder.is_dir():
        _write(folder, reading, size)
    corpus = StoredCorpus(folder)
    return corpus, corpus.about["dropped"]


def _write(folder: Path, reading: _Reading, size: int) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    with lock(folder.with_name(f"{folder.name}.lock"), wait=True) or nullcontext():
        if folder.is_dir():  # another process wrote it meanwhile
            return
        print(f"retrieval_gym: writing {reading.files[0]} (about {size >> 20} MiB) to {folder}, once", file=sys.stderr)
        twice = write_stored_corpus(folder, reading.passages(), lambda: {"dropped": reading.dropped})
    if twice is not None:
        raise reading.twice(twice)
