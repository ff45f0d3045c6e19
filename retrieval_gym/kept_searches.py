"""Searches that are written down while a command runs, so that the same command goes on where it was stopped."""

from __future__ import annotations

import hashlib
import io
import shutil
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import numpy as np

from retrieval_gym import mdp
from retrieval_gym.chains import check_search
from retrieval_gym.datasets.base import RetrievalDataset
from retrieval_gym.files import write_atomically, writing
from retrieval_gym.ranking import Ids, Retriever, Scores

COUNTERS = ("encoder_calls", "truncated")  # what retrievers count, where they do
SAME = 1e-5  # scores that differ by less come from the same weights


class SearchLog:
    """The searches of one command, kept in a folder until it ends well.

    Args:
        folder: where they are kept, of this command alone; None keeps nothing.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder

    def keep(self, name: str, retriever: Retriever, dataset: RetrievalDataset) -> Retriever:
        """Return the retriever, whose searches are kept under its name and that of the dataset from now on.

        Args:
            name: of the retriever.
            retriever: who searches; where it finds something else in equal states, what is kept cannot stand for it.
            dataset: what it searches.
        """
        if self._folder is None:
            return retriever
        part = hashlib.sha256(f"{dataset.fingerprint} {name}".encode()).hexdigest()[:32]
        return KeptSearches(retriever, self._folder / part, name, len(dataset.corpus))

    def __enter__(self) -> SearchLog:
        """Return itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Remove what nobody needs any more, unless the command was stopped."""
        if kind is None and self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)


class KeptSearches:
    """A retriever whose searches are files: what an earlier process searched is read, each batch whole or not at all.

    Two of them are made once more, the first of fresh states and the first of states with picks. Where one finds
    something else, the retriever has changed, and all that was kept is dropped.

    Args:
        retriever: who searches.
        folder: of the files, made where it is missing.
        name: of the retriever, for what is told on stderr.
        num_passages: of the corpus.

    Attributes:
        kept_seconds: how long the searches took that were read, in the process that made them.
    """

    def __init__(self, retriever: Retriever, folder: Path, name: str, num_passages: int) -> None:
        self._retriever, self._folder, self._name, self._num_passages = retriever, folder, name, num_passages
        self._before = {path.stem for path in folder.glob("*.search")}
        self._unchecked = {False, True}
        self._kept = dict.fromkeys(COUNTERS, 0)
        self.kept_seconds = 0.0
        if self._before:
            print(f"{name}: goes on with the searches that were kept", file=sys.stderr)

    def __getattr__(self, name: str) -> Any:
        """Return what else the retriever offers; its counters include the searches that were read."""
        value = getattr(self._retriever, name)
        return value + self._kept[name] if name in COUNTERS and isinstance(value, int) else value

    def search(self, states: mdp.States, k: int) -> tuple[Ids, Scores]:
        """Return what the retriever finds or found; see ``ranking.Retriever.search``."""
        key = _key(states, k)
        path = self._folder / f"{key}.search"
        kept = _read(path) if key in self._before else None
        if kept is None:
            return self._search(states, k, path)
        picked = bool(states.count.any())
        if picked in self._unchecked:
            self._unchecked.remove(picked)
            found = self._retriever.search(states, k)
            if not _same(found, kept):
                print(f"{self._name} finds other passages than before: all is searched anew", file=sys.stderr)
                self._before.clear()
                shutil.rmtree(self._folder)
            return found
        self.kept_seconds += float(kept["seconds"])
        for counter, count in zip(COUNTERS, kept["counted"].tolist(), strict=True):
            self._kept[counter] += count
        return kept["ids"], kept["scores"]

    def _search(self, states: mdp.States, k: int, path: Path) -> tuple[Ids, Scores]:
        before, began = self._count(), time.perf_counter()
        found = self._retriever.search(states, k)
        seconds = np.float64(time.perf_counter() - began)
        ids, scores = check_search(found, states, k, self._num_passages)
        file = io.BytesIO()
        np.savez_compressed(file, ids=ids, scores=scores, seconds=seconds, counted=self._count() - before)
        content = file.getvalue()

        def write(target: IO[bytes]) -> None:
            target.write(hashlib.sha256(content).digest() + content)

        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, write)
        return found

    def _count(self) -> Ids:
        counts = [getattr(self._retriever, name, 0) for name in COUNTERS]
        return np.array([count if isinstance(count, int) else 0 for count in counts], np.int64)


def _read(path: Path) -> dict[str, np.ndarray] | None:
    """Return the arrays of a file; None where there is none any more, or it is damaged."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return None
    digest, content = content[:32], content[32:]
    if hashlib.sha256(content).digest() != digest:
        print(f"{path} is damaged: its states are searched again", file=sys.stderr)
        return None
    with np.load(io.BytesIO(content)) as file:
        return dict(file)


def _key(states: mdp.States, k: int) -> str:
    """Return what tells one batch of states, searched ``k`` deep, from all others."""
    digest = hashlib.sha256(f"{k} {len(states)}".encode())
    for array in (states.question, states.picked, states.steps_left, states.pool):
        if array is not None:
            digest.update(f"{array.shape}".encode())
            digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()


def _same(found: tuple[Ids, Scores], kept: dict[str, np.ndarray]) -> bool:
    """Say whether two searches found the same passages with the same scores."""
    return np.array_equal(found[0], kept["ids"]) and np.allclose(found[1], kept["scores"], rtol=SAME, atol=SAME)
