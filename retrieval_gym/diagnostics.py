"""State mismatch: how often the states that a chain reaches hold wrong passages, and what these cost it.

A chain retriever that was trained on clean histories meets, in use, the passages that it picked itself. The on-policy
paper ("Retrieving from Your Own Mistakes") measures the gap on the states that still miss a gold passage: the share of
them that hold a wrong one, the success of the next step by number of wrong passages, and the same success once the
wrong passages are deleted.

    chains = greedy_chain(retriever, dataset, questions, steps=4)
    own = reach("mine", chains, dataset)
    fixed = reached_states(chains, dataset)
    asked = [ask(name, each, fixed, dataset) for name, each in (("mine", retriever), ("other", other))]
    print(MismatchReport(dataset, (own,), "mine", fixed, tuple(asked)).table())
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from retrieval_gym import mdp
from retrieval_gym.chains import Chains, Searcher
from retrieval_gym.datasets.base import RetrievalDataset
from retrieval_gym.metrics import canonical_ids
from retrieval_gym.ranking import Ids, Retriever

Bools = NDArray[np.bool_]

DEPTH = 100  # of every search, as in ``greedy_chain``: a retriever that breaks ties its own way then picks the same


@dataclass(frozen=True, eq=False)
class Walk:
    """The picks of N chains of up to S steps, each of which adds up to W passages.

    Attributes:
        questions: indices of the questions, int64 ``(N,)``.
        picked: corpus ids by step, padded with -1, int64 ``(N, S, W)``.
        taken: how many steps each chain took, one that added nothing included, int64 ``(N,)``.
    """

    questions: Ids
    picked: Ids
    taken: Ids

    def __len__(self) -> int:
        """Return the number of chains."""
        return len(self.questions)


@dataclass(frozen=True, eq=False)
class StateSet:
    """N states that still miss a gold passage.

    Attributes:
        states: the states.
        step: the step that comes next, counted from 1, int64 ``(N,)``.
        wrong: how many of the picked passages are neither gold nor a copy of gold, int64 ``(N,)``.
    """

    states: mdp.States
    step: Ids
    wrong: Ids

    def __len__(self) -> int:
        """Return the number of states."""
        return len(self.step)

    def __getitem__(self, rows: NDArray | slice) -> StateSet:
        """Return the states of these rows."""
        return StateSet(self.states[rows], self.step[rows], self.wrong[rows])


@dataclass(frozen=True, eq=False)
class Reached:
    """The states of one system's own chains that still miss gold, and what its next step made of them.

    Attributes:
        name: the system's name in tables.
        walk: its chains.
        visits: one state a step taken, step by step; a state from which a step added nothing stands there again.
        success: whether the step taken from each found a missing gold passage, bool ``(N,)``.
    """

    name: str
    walk: Walk
    visits: StateSet
    success: Bools

    def distinct(self) -> tuple[StateSet, Bools]:
        """Return the states that differ in question or picks, in order of their first visit, and its success."""
        first = np.sort(self.visits.states.distinct()[0])
        return self.visits[first], self.success[first]


@dataclass(frozen=True, eq=False)
class Asked:
    """What one system does on a fixed set of N states, M of which hold wrong passages.

    Attributes:
        name: the system's name in tables.
        success: whether its next step finds a missing gold passage, bool ``(N,)``.
        deleted: the same of the M states once their wrong passages are deleted, as ``deleted_success`` returns it; None
            for a log, which cannot be asked.
    """

    name: str
    success: Bools
    deleted: tuple[Bools, Bools] | None


def reach(name: str, chains: Chains | Walk, dataset: RetrievalDataset) -> Reached:
    """Return the states of these chains that still miss a gold passage.

    Args:
        name: of the system, for tables.
        chains: what it picked. Of ``Chains`` every step counts, since they never stop early.
        dataset: what was asked and picked.
    """
    if isinstance(chains, Chains):
        taken = np.full(len(chains), chains.picked.shape[1], np.int64)
        chains = Walk(chains.questions, chains.picked[:, :, None], taken)
    size, steps_most, width = chains.picked.shape
    flat, column_step = chains.picked.reshape(size, -1), np.repeat(np.arange(steps_most), width)
    initial = mdp.dataset_states(dataset, chains.questions, flat.shape[1])
    states, steps, success = [], [], []
    for step in range(steps_most):
        before = replace(
            initial,
            picked=_compact(np.where(column_step < step, flat, -1)),
            steps_left=np.full(size, steps_most - step, np.int64),
        )
        rows = np.flatnonzero((chains.taken > step) & ~mdp.is_complete(before, dataset))
        states.append(before[rows])
        steps.append(np.full(len(rows), step + 1, np.int64))
        success.append(_finds_missing(states[-1], chains.picked[rows, step], dataset))
    together = mdp.concatenate(states)
    visits = StateSet(together, np.concatenate(steps), _is_wrong(together, dataset).sum(axis=1))
    return Reached(name, chains, visits, np.concatenate(success))


def reached_states(chains: Chains | Walk, dataset: RetrievalDataset) -> StateSet:
    """Return the distinct states of these chains, of every step, that still miss a gold passage."""
    return reach("", chains, dataset).distinct()[0]


def delete_wrong(states: mdp.States, dataset: RetrievalDataset) -> mdp.States:
    """Return the states without their wrong passages.

    All else stays: question, pool, the order of the picks that are left, and ``steps_left``. A retriever that searches
    with these states may pick what was deleted again; ``deleted_success`` keeps it out.
    """
    return replace(states, picked=_compact(np.where(_is_wrong(states, dataset), -1, states.picked)))


def next_step_success(
    retriever: Retriever, states: mdp.States, dataset: RetrievalDataset, batch_size: int = 256
) -> Bools:
    """Say whether the passage that the retriever picks next is a missing gold one, or a copy of one, bool ``(B,)``.

    The pick is the one that ``greedy_chain`` makes in each of the B states.

    Raises:
        ValueError: when ``batch_size`` is below 1, or the retriever breaks its contract.
    """
    success = np.zeros(len(states), bool)
    for rows, found in _search(retriever, states, dataset, batch_size):
        success[rows] = _finds_missing(states[rows], found[:, :1], dataset)
    return success


def deleted_success(
    retriever: Retriever, states: mdp.States, dataset: RetrievalDataset, batch_size: int = 256
) -> tuple[Bools, Bools]:
    """Say what ``next_step_success`` says, of B states whose wrong passages are deleted.

    A chain that ends in wrong passages, once they are deleted, is the state from which the first of them was picked,
    and a deterministic retriever picks it again: such a state could never succeed. What was deleted therefore stays out
    of the candidates, as every passage that a chain has picked does, and leaves the query alone.

    Returns:
        Success where deleted passages stay out of the candidates, and where they may be picked again, which is no
        success; both bool ``(B,)``.

    Raises:
        ValueError: as ``next_step_success``.
    """
    without = delete_wrong(states, dataset)
    kept_out, free = np.zeros(len(states), bool), np.zeros(len(states), bool)
    for rows, found in _search(retriever, without, dataset, batch_size):
        held = (found >= 0) & (found[:, :, None] == states.picked[rows][:, None, :]).any(axis=2)
        first = held.argmin(axis=1)[:, None]
        kept_out[rows] = _finds_missing(without[rows], np.take_along_axis(found, first, axis=1), dataset)
        free[rows] = _finds_missing(without[rows], found[:, :1], dataset)
    return kept_out, free


def _search(
    retriever: Retriever, states: mdp.States, dataset: RetrievalDataset, batch_size: int
) -> Iterator[tuple[Ids, Ids]]:
    """Yield rows of ``states``, int64 ``(b,)``, and what a search found for each, best first, int64 ``(b, depth)``."""
    if batch_size < 1:
        raise ValueError(f"batch_size is {batch_size}: ask about at least 1 state at once")
    # So deep that something is left behind all that a state has picked.
    search = Searcher(retriever, max(DEPTH, states.picked.shape[1] + 1), len(dataset.corpus))
    order = np.argsort(states.question, kind="stable")  # an encoder embeds equal states of one batch once
    for start in range(0, len(states), batch_size):
        rows = order[start : start + batch_size]
        yield rows, search(states[rows])[0]


def ask(
    name: str,
    retriever: Retriever,
    fixed: StateSet,
    dataset: RetrievalDataset,
    *,
    batch_size: int = 256,
    success: Bools | None = None,
) -> Asked:
    """Let a retriever pick next in each of a fixed set of states, and again where wrong passages can be deleted.

    Args:
        name: of the retriever, for tables.
        retriever: who picks.
        fixed: N states.
        dataset: what is asked and picked.
        batch_size: how many states are searched at once.
        success: of its next steps, bool ``(N,)``, where it is known; by default the retriever is asked.

    Raises:
        ValueError: as ``next_step_success``.
    """
    if success is None:
        success = next_step_success(retriever, fixed.states, dataset, batch_size)
    return Asked(name, success, deleted_success(retriever, fixed.states[fixed.wrong > 0], dataset, batch_size))


def _compact(picked: Ids) -> Ids:
    """Move the picks of each row to the left, in their order."""
    return np.take_along_axis(picked, np.argsort(picked < 0, axis=1, kind="stable"), axis=1)


def _is_wrong(states: mdp.States, dataset: RetrievalDataset) -> Bools:
    """Say which picks are neither gold nor a copy of gold, bool ``(B, T)``."""
    gold = dataset.gold[states.question]
    picked = canonical_ids(states.picked, dataset.corpus.canonical)
    return (picked >= 0) & ~(picked[:, :, None] == gold[:, None, :]).any(axis=2)


def _finds_missing(states: mdp.States, picks: Ids, dataset: RetrievalDataset) -> Bools:
    """Say whether any of the picks, int64 ``(B, W)`` padded with -1, is missing gold or a copy of it, bool ``(B,)``."""
    gold = dataset.gold[states.question]
    missing = np.where(mdp.found_gold(states, dataset) | (gold < 0), -2, gold)  # -2 equals no padding
    picks = canonical_ids(picks, dataset.corpus.canonical)
    return (missing[:, :, None] == picks[:, None, :]).any(axis=(1, 2))
