"""Training states and negatives for a query encoder over frozen passages, in whole-array numpy."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from retrieval_gym import mdp
from retrieval_gym.mdp import Ids

if TYPE_CHECKING:
    from retrieval_gym.datasets.base import RetrievalDataset


def gold_states(dataset: RetrievalDataset, max_steps: int) -> mdp.States:
    """Return the gold histories: of each question the states with the first 0 to n - 1 passages of its gold chain.

    Args:
        dataset: what is asked; the gold of a question without an order is taken as it is stored.
        max_steps: the budget T.

    Raises:
        ValueError: when a question has more gold passages than steps.
    """
    if dataset.max_gold > max_steps:
        raise ValueError(f"a question has {dataset.max_gold} gold passages: raise max_steps={max_steps}")
    chains = np.full(dataset.gold.shape, -1, np.int64)
    canonical = dataset.corpus.canonical
    for row, question in zip(chains, dataset.questions, strict=True):
        # The ids themselves, of which a pool may hold copies, not their canonical ones; of copies the first counts.
        first = {canonical[i]: i for i in reversed(question.gold)}
        own = [first[i] for i in dict.fromkeys(canonical[list(question.gold)].tolist())]
        row[: len(own)] = own
    fresh = mdp.dataset_states(dataset, np.arange(len(dataset)), max_steps)
    parts = []
    for found in range(dataset.max_gold):
        rows = np.flatnonzero(chains[:, found] >= 0)
        states = fresh[rows]
        for column in chains[rows, :found].T:
            states = mdp.step(states, column)
        parts.append(states)
    return mdp.concatenate(parts)


def room_for_wrong(states: mdp.States) -> Ids:
    """Return how many wrong passages each state can take and still lie before a step, int64 ``(B,)``."""
    return np.maximum(states.picked.shape[1] - 1 - states.count, 0)


def noise_states(states: mdp.States, wrong: Ids, rng: np.random.Generator) -> mdp.States:
    """Insert wrong passages into histories: how many, which and where is uniformly random.

    Each state gets at least one, as long as it has room and candidates; its own passages keep their order.

    Args:
        states: B histories.
        wrong: the passages to draw from, int64 ``(B, C)``, padded with -1.
        rng: where the draws come from.
    """
    size, budget = states.picked.shape
    room = room_for_wrong(states)
    number = np.where(room > 0, rng.integers(1, np.maximum(room, 1) + 1), 0)
    drawn = draw(wrong, budget, rng)
    drawn[np.arange(budget) >= number[:, None]] = -1
    items = np.concatenate([states.picked, drawn], axis=1)
    # Sorted keys for the own passages and free ones for the inserted make every interleaving equally likely.
    keys = np.where(items >= 0, rng.random(items.shape), np.inf)
    keys[:, :budget].sort(axis=1)
    order = np.argsort(keys, axis=1, kind="stable")[:, :budget]
    picked = np.take_along_axis(items, order, axis=1)
    taken = (picked >= 0).sum(axis=1)
    return mdp.States(states.question, states.pool, picked, np.full(size, budget) - taken)


def allowed_negatives(states: mdp.States, ids: Ids, dataset: RetrievalDataset) -> Ids:
    """Return those of the candidates that may stand beside a positive, int64 ``(B, C)``, -1 in place of the others.

    Left out are all gold passages, found or missing, what the state has picked, copies of either in title and text, and
    all but the first of candidates that are copies of each other.

    Args:
        states: B states.
        ids: corpus ids, int64 ``(B, C)``, padded with -1.
        dataset: what is asked and picked.
    """
    canonical = dataset.corpus.canonical
    keys = np.where(ids >= 0, canonical[ids], -1)
    order = np.lexsort((ids, keys), axis=1)
    ids, keys = np.take_along_axis(ids, order, axis=1), np.take_along_axis(keys, order, axis=1)
    banned = keys < 0
    banned[:, 1:] |= keys[:, 1:] == keys[:, :-1]
    picked = np.where(states.picked >= 0, canonical[states.picked], -1)
    for column in np.concatenate([dataset.gold[states.question], picked], axis=1).T:
        banned |= keys == column[:, None]
    return np.where(banned, -1, ids)


def draw(candidates: Ids, count: int, rng: np.random.Generator) -> Ids:
    """Draw ``count`` candidates a row, uniformly and without repetition, int64 ``(B, count)``; -1 where there are none.

    Args:
        candidates: int64 ``(B, C)``, padded with -1.
        count: how many.
        rng: where the draws come from.
    """
    keys = np.where(candidates >= 0, rng.random(candidates.shape), np.inf)
    order = np.argsort(keys, axis=1, kind="stable")[:, :count]
    drawn = np.take_along_axis(candidates, order, axis=1)
    return np.pad(drawn, ((0, 0), (0, count - drawn.shape[1])), constant_values=-1)


def spread(size: int, count: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """Return ``count`` of ``size`` rows, int64: each equally often, and a random choice for what is left over."""
    rest = rng.choice(size, count % size, replace=False)
    return np.concatenate([np.tile(np.arange(size), count // size), rest])
