"""How far a command is, on stderr."""

from __future__ import annotations

import sys
import time
from importlib.util import find_spec
from types import TracebackType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from retrieval_gym import mdp
    from retrieval_gym.ranking import Ids, Retriever, Scores

SECONDS_BETWEEN_LINES = 5.0


class Progress:
    """One bar in a terminal; else a plain line every few seconds, and a last one where there was any before.

    Args:
        name: of what goes on.
        total: how much there is to do, None where nobody knows.
        unit: of these, in the plural.
        done: how much was done before.
        shown: False shows nothing.
    """

    def __init__(self, name: str, total: int | None, unit: str, done: int = 0, *, shown: bool = True) -> None:
        self.name, self.total, self.unit, self.done = name, total, unit, done
        self._shown, self._told, self._lines = shown, time.monotonic(), 0
        self._bar: Any = None
        if shown and sys.stderr.isatty() and find_spec("tqdm") is not None:  # an extra's
            from tqdm import tqdm

            self._bar = tqdm(total=total, initial=done, unit=f" {unit}", desc=name, dynamic_ncols=True, leave=False)

    def update(self, count: int = 1) -> None:
        """Say that so many more are done."""
        self.done += count
        if self._bar is not None:
            self._bar.update(count)
            return
        due = time.monotonic() - self._told > SECONDS_BETWEEN_LINES or (self._lines and self.done == self.total)
        if self._shown and due:
            self._told = time.monotonic()
            self._lines += 1
            done = str(self.done) if self.total is None else f"{self.done} of {self.total}"
            print(f"{self.name}: {done} {self.unit}", file=sys.stderr, flush=True)

    def __enter__(self) -> Progress:
        """Return itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the bar."""
        if self._bar is not None:
            self._bar.close()


class Watched:
    """A retriever whose searches are counted.

    Args:
        retriever: who searches.
        progress: is told of each state that was searched with.
    """

    def __init__(self, retriever: Retriever, progress: Progress) -> None:
        self._retriever, self._progress = retriever, progress

    def search(self, states: mdp.States, k: int) -> tuple[Ids, Scores]:
        """Return what the retriever finds; see ``ranking.Retriever.search``."""
        found = self._retriever.search(states, k)
        self._progress.update(len(states))
        return found
