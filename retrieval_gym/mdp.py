"""The one transition function of multi-step retrieval, on batched numpy arrays.

States, actions and transitions follow Q-RAG (section 3): the state is the question and the passages picked so far, an
action picks one more passage, transitions are deterministic and the horizon is finite.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from retrieval_gym.datasets.base import RetrievalDataset

Ids = NDArray[np.int64]
Bools = NDArray[np.bool_]

# A state holds one slot a step, and a step past the last candidate picks nothing. The bound does not depend on the
# pool, as a step too many is legal, but keeps a slip of the keyboard from asking for gigabytes.
MAX_STEPS = 1_000


@dataclass(frozen=True)
class States:
    """A batch of B states with a budget of T steps.

    Attributes:
        question: index of the question in its dataset, int64 ``(B,)``.
        pool: candidates as corpus ids in document order, padded with -1, int64 ``(B, P)``; None is the whole corpus.
        picked: corpus ids in pick order, -1 past the end, int64 ``(B, T)``.
        steps_left: int64 ``(B,)``.
    """

    question: Ids
    pool: Ids | None
    picked: Ids
    steps_left: Ids

    def __len__(self) -> int:
        return len(self.question)

    def __getitem__(self, rows: NDArray | slice | list[int]) -> States:
        """Return the states of these rows."""
        pool = None if self.pool is None else self.pool[rows]
        return States(self.question[rows], pool, self.picked[rows], self.steps_left[rows])

    def distinct(self) -> tuple[Ids, Ids]:
        """Find equal states, told by question and picks.

        Returns:
            Rows of the distinct states int64 ``(N,)``, and for each state its place among them, int64 ``(B,)``.
        """
        keys = np.concatenate([self.question[:, None], self.picked], axis=1)
        _, first, inverse = np.unique(keys, axis=0, return_index=True, return_inverse=True)
        return first, inverse.reshape(-1)

    @property
    def count(self) -> Ids:
        """Number of passages picked so far, int64 ``(B,)``."""
        return (self.picked >= 0).sum(axis=1)


def concatenate(parts: Sequence[States]) -> States:
    """Stack batches of states that share the width of their pools and their budget."""
    pools = [part.pool for part in parts if part.pool is not None]
    return States(
        np.concatenate([part.question for part in parts]),
        np.concatenate(pools) if pools else None,
        np.concatenate([part.picked for part in parts]),
        np.concatenate([part.steps_left for part in parts]),
    )


def check_max_steps(max_steps: object, name: str = "max_steps") -> int:
    """Return a budget of steps as an int.

    Raises:
        ValueError: when it is no whole number from 1 to ``MAX_STEPS``; the message calls it ``name``.
    """
    whole = isinstance(max_steps, (int, np.integer)) and not isinstance(max_steps, bool)
    if not whole or not 1 <= max_steps <= MAX_STEPS:  # type: ignore[operator]
        raise ValueError(f"{name} must be a whole number from 1 to {MAX_STEPS}, got {max_steps!r}")
    return int(max_steps)  # type: ignore[call-overload]


def initial_states(questions: Ids, pool: Ids | None, max_steps: int) -> States:
    """Return the first states of episodes about ``questions``: nothing picked, ``max_steps`` steps left."""
    size = len(questions)
    picked = np.full((size, max_steps), -1, np.int64)
    return States(np.asarray(questions, np.int64), pool, picked, np.full(size, max_steps, np.int64))


def pad_pools(pools: list[Ids], width: int) -> Ids:
    """Stack pools of different sizes into int64 ``(B, width)``, padded with -1."""
    table = np.full((len(pools), width), -1, np.int64)
    for row, pool in zip(table, pools, strict=True):
        row[: len(pool)] = pool
    return table


def dataset_states(dataset: RetrievalDataset, questions: Ids, max_steps: int) -> States:
    """Return the first states of ``questions`` with their pools, as the scorer plays them."""
    pools = [dataset.pool(int(i)) for i in questions]
    if any(pool is None for pool in pools):
        return initial_states(questions, None, max_steps)
    kept = [pool for pool in pools if pool is not None]
    return initial_states(questions, pad_pools(kept, max(map(len, kept))), max_steps)


def action_ids(states: States, actions: Ids) -> Ids:
    """Translate actions (positions in the pool, or corpus ids) to corpus ids, int64 ``(B,)``; padding gives -1."""
    if states.pool is None:
        return actions
    return states.pool[np.arange(len(actions)), actions]


def action_mask(states: States, num_passages: int) -> Bools:
    """Say which actions pick something: bool ``(B, P)`` for pools, ``(B, num_passages)`` for the whole corpus."""
    if states.pool is None:
        rows, columns = np.nonzero(states.picked >= 0)
        mask = np.ones((len(states), num_passages), bool)
        mask[rows, states.picked[rows, columns]] = False
        return mask
    mask = states.pool >= 0
    for picked in states.picked.T:
        if (picked >= 0).any():
            mask &= states.pool != picked[:, None]
    return mask


def is_legal(states: States, ids: Ids) -> Bools:
    """Say which picks add a passage: an id (not padding) that was not picked before, bool ``(B,)``."""
    return (ids >= 0) & ~(states.picked == ids[:, None]).any(axis=1)


def advance(states: States, picks: Ids, count: Ids) -> None:
    """Take a step in place: every transition is this one.

    Args:
        states: the states, each with a step left.
        picks: legal corpus ids, or -1, which uses the step and picks nothing; int64 ``(B,)``.
        count: ``states.count``.
    """
    # The slot past the last pick is free and holds -1, which is what picking nothing leaves there.
    states.picked[np.arange(len(picks)), count] = picks
    np.subtract(states.steps_left, 1, out=states.steps_left)


def step(states: States, ids: Ids) -> States:
    """Pick one passage a row and return the next states.

    A pick that is not legal (-1 or picked before) uses a step and picks nothing. ``states`` is left unchanged.

    Args:
        states: the states before, each with a step left.
        ids: corpus ids to pick, int64 ``(B,)``.
    """
    after = replace(states, picked=states.picked.copy(), steps_left=states.steps_left.copy())
    advance(after, np.where(is_legal(states, ids), ids, -1), states.count)
    return after


def found_gold(states: States, dataset: RetrievalDataset) -> Bools:
    """Say which gold passages, or text-identical copies, are picked: bool ``(B, max_gold)``, False past the end."""
    gold = dataset.gold[states.question]
    picked = np.where(states.picked >= 0, dataset.corpus.canonical[states.picked], -2)  # -2 equals no padding
    return (gold[:, :, None] == picked[:, None, :]).any(axis=2)


def is_gold(question: Ids, ids: Ids, dataset: RetrievalDataset) -> Bools:
    """Say which gold passage of its question each id is, or a copy of: bool ``(B, max_gold)``; -1 is none."""
    canonical = np.where(ids >= 0, dataset.corpus.canonical[ids], -2)  # -2 equals no padding
    return dataset.gold[question] == canonical[:, None]


def is_complete(states: States, dataset: RetrievalDataset) -> Bools:
    """Say whether every gold passage is picked, bool ``(B,)``."""
    return np.all(found_gold(states, dataset) | (dataset.gold[states.question] < 0), axis=1)
