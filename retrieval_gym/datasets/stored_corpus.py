"""A corpus that stays on disk: an Arrow file that is mapped into memory, written once, and what is asked of it most."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from hashlib import blake2b, sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from retrieval_gym.datasets.base import Corpus, Ids, passage_bytes
from retrieval_gym.files import write_text, writing

if TYPE_CHECKING:
    import pyarrow

COLUMNS = ("key", "title", "text")
# A batch ends after so many passages or characters: Arrow maps whole batches, writing holds one.
_BATCH_PASSAGES, _BATCH_CHARACTERS = 4096, 2**24


class StoredCorpus(Corpus):
    """The corpus in a folder that ``write_stored_corpus`` wrote; passages are read where they are asked for.

    Args:
        folder: the folder.

    Raises:
        ValueError: when the folder does not hold a whole corpus.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        try:
            self.about = json.loads((self.folder / "about.json").read_text(encoding="utf-8"))
            table = _map(self.folder / "passages.arrow")
            key, title, text = (ArrowStrings(table.column(name)) for name in COLUMNS)
            self._hashes = np.load(self.folder / "key_hashes.npy", mmap_mode="r")
            self._order = np.load(self.folder / "key_order.npy", mmap_mode="r")
            # A plain array, as callers expect one, whose pages are the file's.
            self._first_copies: Ids = np.asarray(np.load(self.folder / "first_copies.npy", mmap_mode="r"))
            rows = {len(key), len(self._hashes), len(self._order), len(self._first_copies), self.about["passages"]}
            if len(rows) > 1:
                raise ValueError(f"its files hold {sorted(rows)} passages")
        except (OSError, EOFError, ValueError, KeyError, TypeError) as error:  # Arrow raises ValueErrors
            raise ValueError(f"{self.folder} holds no whole corpus ({error}): delete it, it is written anew") from error
        super().__init__(title, text, key)

    def __reduce__(self) -> tuple[type[StoredCorpus], tuple[Path]]:
        return StoredCorpus, (self.folder,)

    @cached_property
    def ids(self) -> Mapping[str, int]:
        """Corpus id of each key, looked up on disk."""
        return _KeyIndex(self.keys, self._hashes, self._order)

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of the content, as of any corpus with these passages."""
        return self.about["fingerprint"]

    @cached_property
    def first_copies(self) -> Ids:
        """For each id the lowest id of a passage with the same title and text, int64 of shape ``(len(self),)``."""
        return self._first_copies


class ArrowStrings(Sequence[str]):
    """A column of an Arrow table as a sequence of strings, each made when it is asked for."""

    def __init__(self, column: pyarrow.ChunkedArray) -> None:
        self._column = column

    def __len__(self) -> int:
        return len(self._column)

    def __getitem__(self, index):  # type: ignore[no-untyped-def, override]
        """Return one string, or a list for a slice."""
        if isinstance(index, slice):
            return [self._column[i].as_py() for i in range(*index.indices(len(self)))]
        return self._column[int(index)].as_py()

    def __iter__(self) -> Iterator[str]:
        for chunk in self._column.chunks:
            yield from chunk.to_pylist()


class _KeyIndex(Mapping[str, int]):
    """Position of each key, by binary search among their sorted hashes."""

    def __init__(self, keys: Sequence[str], hashes: NDArray[np.uint64], order: Ids) -> None:
        self._keys, self._hashes, self._order = keys, hashes, order

    def __len__(self) -> int:
        return len(self._keys)

    def __iter__(self) -> Iterator[str]:
        return iter(self._keys)

    def __getitem__(self, key: str) -> int:
        if isinstance(key, str):
            (wanted,) = np.frombuffer(_key_hash(key), np.uint64)
            first, last = (np.searchsorted(self._hashes, wanted, side) for side in ("left", "right"))
            for place in self._order[first:last].tolist():  # several where hashes collide
                if self._keys[place] == key:
                    return place
        raise KeyError(key)


def write_stored_corpus(
    folder: Path, passages: Iterable[tuple[str, str, str]], facts: Callable[[], Mapping[str, Any]] = dict
) -> str | None:
    """Write a corpus so that ``folder`` is whole or not there; no two writers may do it at once.

    Args:
        folder: to be made; what another writer left half done beside it is removed.
        passages: key, title and text of each; read once, never held together.
        facts: returns what ``StoredCorpus.about`` shall hold beside the number of passages and the fingerprint; called
            after the last passage.

    Returns:
        A key that occurs twice, where there is one; no folder is made then.

    Raises:
        ValueError: when there is no passage.
        OSError: when the folder cannot be written.
    """
    unfinished = folder.with_name(f"{folder.name}.tmp")
    with writing(folder):
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
    try:
        hashes = _Hashes()
        _write_arrow(unfinished / "passages.arrow", hashes.over(passages))
        if not hashes.passages:
            raise ValueError("the corpus is empty: give it at least one passage")
        key_hashes = np.frombuffer(hashes.keys, np.uint64)
        order = np.argsort(key_hashes, kind="stable")
        key_hashes = key_hashes[order]
        twice = _key_twice(ArrowStrings(_map(unfinished / "passages.arrow").column("key")), key_hashes, order)
        if twice is not None:
            return twice
        with writing(folder):
            np.save(unfinished / "key_hashes.npy", key_hashes)
            np.save(unfinished / "key_order.npy", order)
            np.save(unfinished / "first_copies.npy", _first_equal(hashes.contents))
            about = {"passages": hashes.passages, "fingerprint": hashes.fingerprint.hexdigest(), **facts()}
            write_text(unfinished / "about.json", json.dumps(about, indent=2) + "\n")
            unfinished.rename(folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return None


class _Hashes:
    """What is worked out of passages while they pass by.

    Attributes:
        passages: their number.
        keys: 8 bytes a key.
        contents: 16 bytes a passage, of title and text.
        fingerprint: the corpus's, so far.
    """

    def __init__(self) -> None:
        self.passages = 0
        self.keys, self.contents = bytearray(), bytearray()
        self.fingerprint = sha256()

    def over(self, passages: Iterable[tuple[str, str, str]]) -> Iterator[tuple[str, str, str]]:
        for key, title, text in passages:
            content = passage_bytes(title, text)
            self.passages += 1
            self.keys += _key_hash(key)
            self.contents += blake2b(content, digest_size=16).digest()
            self.fingerprint.update(content)
            yield key, title, text


def _key_hash(key: str) -> bytes:
    return blake2b(key.encode("utf-8", "surrogatepass"), digest_size=8).digest()


def _key_twice(keys: Sequence[str], hashes: NDArray[np.uint64], order: Ids) -> str | None:
    """Return a key that occurs twice among those with equal (sorted) hashes."""
    equal = np.flatnonzero(hashes[1:] == hashes[:-1])
    places = np.unique(np.concatenate([order[equal], order[equal + 1]]))
    seen: set[str] = set()
    for key in (keys[place] for place in places.tolist()):
        if key in seen:
            return key
        seen.add(key)
    return None


def _first_equal(contents: bytearray) -> Ids:
    """Return for each passage the first with equal 16 bytes, int64 ``(n,)``."""
    halves = np.frombuffer(contents, np.uint64).reshape(-1, 2)
    order = np.lexsort((halves[:, 1], halves[:, 0]))  # stable: equal ones stay in their order
    halves = halves[order]
    new = np.ones(len(order), bool)
    new[1:] = (halves[1:] != halves[:-1]).any(axis=1)
    first = np.empty(len(order), np.int64)
    first[order] = order[new][np.cumsum(new) - 1]
    return first


def _write_arrow(path: Path, passages: Iterable[tuple[str, str, str]]) -> None:
    import pyarrow

    schema = pyarrow.schema([(name, pyarrow.large_string()) for name in COLUMNS])
    with writing(path), pyarrow.OSFile(str(path), "wb") as file, pyarrow.ipc.new_file(file, schema) as writer:
        for batch in _batches(passages):
            columns = [pyarrow.array(column, pyarrow.large_string()) for column in zip(*batch, strict=True)]
            writer.write_batch(pyarrow.record_batch(columns, schema=schema))


def _batches(passages: Iterable[tuple[str, str, str]]) -> Iterator[list[tuple[str, str, str]]]:
    batch: list[tuple[str, str, str]] = []
    characters = 0
    for passage in passages:
        batch.append(passage)
        characters += len(passage[2])
        if len(batch) == _BATCH_PASSAGES or characters >= _BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _map(path: Path) -> pyarrow.Table:
    import pyarrow

    with pyarrow.memory_map(str(path)) as file:
        return pyarrow.ipc.open_file(file).read_all()
