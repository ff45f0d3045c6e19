"""The random generators of a vector environment's rows, and uniform draws from them in stock."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from gymnasium.utils import seeding
from numpy.typing import NDArray

STOCK = 128  # draws fetched from a generator at once


class RowDraws:
    """One generator a row, made from fresh entropy where none was seeded.

    A call to a generator costs more than a step of a row, so draws are fetched in stock. Nobody sees a difference:
    a generator that is looked at has been put back to where single draws would have left it.

    Args:
        rows: their number.
    """

    def __init__(self, rows: int) -> None:
        self._generators: list[np.random.Generator | None] = [None] * rows
        self._seeds = [-1] * rows
        self._stock = np.empty((rows, STOCK))
        self._used = np.full(rows, STOCK)
        self._sure = 0  # draws that every row has in stock at least
        self._lent = False

    def seed(self, row: int, seed: int | None) -> None:
        """Begin a row's generator anew; None takes fresh entropy."""
        self._generators[row], self._seeds[row] = seeding.np_random(seed)
        self._empty(row)

    def restore(self, generators: Sequence[np.random.Generator]) -> None:
        """Take these generators, whose seeds are not known."""
        self._generators[:], self._seeds[:] = generators, [-1] * len(generators)
        self._empty(slice(None))

    @property
    def seeds(self) -> tuple[int, ...]:
        """The seed of each row, -1 where it is not known."""
        for row in range(len(self._seeds)):
            self._made(row)
        return tuple(self._seeds)

    def generators(self, rows: NDArray[np.intp]) -> list[np.random.Generator]:
        """Return the generators of these rows, to draw from until the next call of any method."""
        return [self._settled(row) for row in rows.tolist()]

    def lend(self) -> tuple[np.random.Generator, ...]:
        """Return all generators, to draw from at any time: from now on nothing is fetched in stock."""
        self._lent = True
        return tuple(self.generators(np.arange(len(self._generators))))

    def uniform(self, rows: NDArray[np.intp]) -> NDArray[np.float64]:
        """Draw one number in [0, 1) from the generator of each of these rows, float64 ``(len(rows),)``."""
        if self._lent:
            return np.array([generator.random() for generator in self.generators(rows)])
        if self._sure == 0:
            self._fetch()
        self._sure -= 1
        used = self._used[rows]
        self._used[rows] = used + 1
        return self._stock[rows, used]

    def _fetch(self) -> None:
        """Fill the stock of every row that has less than half of it left."""
        for row in np.flatnonzero(self._used > STOCK // 2).tolist():
            used, generator = self._used[row], self._made(row)
            self._stock[row] = np.concatenate([self._stock[row, used:], generator.random(used)])
            self._used[row] = 0
        self._sure = STOCK // 2

    def _empty(self, rows: int | slice) -> None:
        self._used[rows] = STOCK
        self._sure = 0

    def _made(self, row: int) -> np.random.Generator:
        if self._generators[row] is None:
            self.seed(row, None)
        generator = self._generators[row]
        assert generator is not None
        return generator

    def _settled(self, row: int) -> np.random.Generator:
        generator, left = self._made(row), STOCK - int(self._used[row])
        if left:
            bits = generator.bit_generator
            assert isinstance(bits, np.random.PCG64)
            before = bits.state
            bits.advance(-left)
            # advance() forgets a half of 64 bits that a 32-bit draw has left for the next one.
            bits.state = {**before, "state": bits.state["state"]}
            self._empty(row)
        return generator
