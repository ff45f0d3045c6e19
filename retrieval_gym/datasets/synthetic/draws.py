"""Integer draws that are the same under every numpy version and on every machine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import numpy as np

T = TypeVar("T")


class Draws:
    """A stream of integers from ``PCG64.random_raw``.

    numpy promises stable bit streams but may change what ``Generator.integers`` and ``permutation`` make of them, so
    worlds draw through this class. Numbers are ``raw * n >> 64``: integer arithmetic alone, with a bias below
    ``n / 2**64``.

    Args:
        key: non-negative integers; streams with different keys are independent.
    """

    def __init__(self, *key: int) -> None:
        self._bits = np.random.PCG64(np.random.SeedSequence(key))
        self._raw: list[int] = []

    def below(self, n: int) -> int:
        """Return an integer from 0 to ``n - 1``."""
        if not self._raw:
            self._raw = self._bits.random_raw(4096).tolist()
        return self._raw.pop() * n >> 64

    def choice(self, items: Sequence[T]) -> T:
        """Return one of the items."""
        return items[self.below(len(items))]

    def sample(self, items: Sequence[T], k: int) -> list[T]:
        """Return ``k`` distinct items, or all when there are fewer, in random order."""
        rest = list(items)
        for i in range(min(k, len(rest))):
            j = i + self.below(len(rest) - i)
            rest[i], rest[j] = rest[j], rest[i]
        return rest[:k]

    def shuffled(self, items: Sequence[T]) -> list[T]:
        """Return the items in random order."""
        return self.sample(items, len(items))

    def sample_below(self, n: int, k: int) -> list[int]:
        """Return ``k`` distinct integers below ``n``, in random order (Floyd's algorithm: memory grows with ``k``)."""
        chosen: dict[int, None] = {}
        for top in range(n - k, n):
            number = self.below(top + 1)
            chosen[top if number in chosen else number] = None
        return self.shuffled(list(chosen))
