"""Searches that are written down while a command runs, so that the same command goes on where it was stopped."""

from __future__ import annotations

import hashlib
import shutil
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any
from zipfile import BadZipFile

import numpy as np

from retrieval_gym import mdp
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

    def keep(self, name: str, retriever: Retriever) -> Retriever:
        """Return the retriever, whose searches are kept under a name from now on."""
        if self._folder is None:
            return retriever
        return KeptSearches(retriever, self._folder / hashlib.sha256(name.encode()).hexdigest()[:16], name)

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
    """A retriever whose searches are files: what was searched before is read, each batch whole or not at all.

    The first search that is found there is made once more. Where it finds something else, the retriever has changed,
    and all that was kept is dropped.

    Args:
        retriever: who searches.
        folder: of the files, made where it is missing.
        name: of the retriever, for what is told on stderr.

    Attributes:
        kept_seconds: how long the searches took that were read, in the process that made them.
    """

    def __init__(self, retriever: Retriever, folder: Path, name: str) -> None:
        self._retriever, self._folder, self._name = retriever, folder, name
        self._checked = False
        self._kept = dict.fromkeys(COUNTERS, 0)
        self.kept_seconds = 0.0

    def __getattr__(self, name: str) -> Any:
        """Return what else the retriever offers; its counters include the searches that were read."""
        value = getattr(self._retriever, name)
        return value + self._kept[name] if name in COUNTERS else value

    def search(self, states: mdp.States, k: int) -> tuple[Ids, Scores]:
        """Return what the retriever finds or found; see ``ranking.Retriever.search``."""
        path = self._folder / f"{_key(states, k)}.npz"
        kept = _read(path)
        if kept is None:
            return self._search(states, k, path)
        if not self._checked:
            self._checked = True
            found = self._retriever.search(states, k)
            if not _same(found, (kept["ids"], kept["scores"])):
                print(f"{self._name} finds other passages than before: all is searched anew", file=sys.stderr)
                shutil.rmtree(self._folder)
            else:
                print(f"{self._name}: goes on with the searches that were kept", file=sys.stderr)
            return found
        self.kept_seconds += float(kept["seconds"])
        for counter, count in zip(COUNTERS, kept["counted"].tolist(), strict=True):
            self._kept[counter] += count
        return kept["ids"], kept["scores"]

    def _search(self, states: mdp.States, k: int, path: Path) -> tuple[Ids, Scores]:
        before, began = self._count(), time.perf_counter()
        found = self._retriever.search(states, k)
        seconds = np.float64(time.perf_counter() - began)
        if isinstance(found, tuple) and len(found) == 2:  # what is no such pair, whoever plays refuses
            arrays = {"ids": found[0], "scores": found[1], "seconds": seconds, "counted": self._count() - before}
            with writing(path):
                path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, lambda file: np.savez_compressed(file, **arrays))
        return found

    def _count(self) -> Ids:
        return np.array([getattr(self._retriever, name, 0) for name in COUNTERS], np.int64)


def _key(states: mdp.States, k: int) -> str:
    """Return what tells one batch of states, searched ``k`` deep, from all others."""
    digest = hashlib.sha256(f"{k} {len(states)}".encode())
    for array in (states.question, states.picked, states.steps_left, states.pool):
        if array is not None:
            digest.update(f"{array.shape}".encode())
            digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()


def _read(path: Path) -> dict[str, np.ndarray] | None:
    """Return the arrays of a file; None where there is none, or it is damaged."""
    try:
        with np.load(path) as file:
            return {name: file[name] for name in ("ids", "scores", "seconds", "counted")}
    except FileNotFoundError:
        return None
    except (BadZipFile, ValueError, KeyError, EOFError) as error:
        print(f"{path} is damaged ({error}): its states are searched again", file=sys.stderr)
        return None


def _same(found: tuple[Ids, Scores], kept: tuple[Ids, Scores]) -> bool:
    """Say whether two searches found the same passages with the same scores."""
    return np.array_equal(found[0], kept[0]) and np.allclose(found[1], kept[1], rtol=SAME, atol=SAME)
