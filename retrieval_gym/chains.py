"""How a retriever is played (greedy chains, beams, single searches), and the final ranking.

A chain searches, picks the best passage, searches again with it in the state, and so on until its budget is used up.
The final ranking puts the picked passages first and all others behind them by their best score in any search.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from retrieval_gym import mdp
from retrieval_gym.metrics import canonical_ids
from retrieval_gym.ranking import Ids, Retriever, Scores, round_scores, top_k

if TYPE_CHECKING:
    from retrieval_gym.datasets.base import RetrievalDataset

__all__ = [
    "BEAMS",
    "SEARCHES",
    "Chains",
    "beam_chain",
    "final_ranking",
    "greedy_chain",
    "single_search",
    "stop_by_threshold",
]

BEAMS = 4  # the on-policy paper's number
MOST_CANDIDATES = 2**24  # in the pools of one batch, whatever its size in questions: a long document has half a million

# What a walk over one batch returns: picked, scores, step_ids, step_scores and searches of ``Chains``.
Walked: TypeAlias = "tuple[Ids, Scores, Ids, Scores, Ids]"


@dataclass(frozen=True)
class Chains:
    """N chains of T picks, from S steps of search (S = 1 for a single search, else T).

    Attributes:
        questions: indices of the questions, int64 ``(N,)``.
        picked: corpus ids in pick order, -1 where the pool had run out, int64 ``(N, T)``.
        scores: the score of each pick when it was made (its Q-value; in a greedy chain the largest of that step),
            float32 ``(N, T)``; -inf where nothing was picked.
        step_ids: what each step's searches found, best first, int64 ``(N, S, depth)``, -1 past the end. A passage that
            several beams found stands there once, with its best score.
        step_scores: float32 ``(N, S, depth)``, -inf past the end.
        searches: how many states were searched with for each question, int64 ``(N,)``.
        seconds: time spent in ``search`` for all questions together.
    """

    questions: Ids
    picked: Ids
    scores: Scores
    step_ids: Ids
    step_scores: Scores
    searches: Ids
    seconds: float

    def __len__(self) -> int:
        """Return the number of chains."""
        return len(self.questions)


def greedy_chain(
    retriever: Retriever,
    dataset: RetrievalDataset,
    questions: Ids,
    steps: int,
    *,
    batch_size: int = 256,
    depth: int = 100,
) -> Chains:
    """Pick the best passage ``steps`` times for each question, always to the end of the budget.

    Args:
        retriever: who ranks the candidates.
        dataset: what is asked and picked.
        questions: indices of the questions, int64 ``(N,)``.
        steps: the budget T.
        batch_size: how many questions are searched at once.
        depth: how many passages each search returns; the final ranking is exact down to this rank.

    Raises:
        ValueError: when there is no question, a number is below 1, or the retriever breaks its contract.
    """
    return _play(_greedy, retriever, dataset, questions, steps, batch_size, depth)


def single_search(
    retriever: Retriever,
    dataset: RetrievalDataset,
    questions: Ids,
    steps: int,
    *,
    batch_size: int = 256,
    depth: int = 100,
) -> Chains:
    """Search once with the question alone and pick the first ``steps`` passages; arguments as in ``greedy_chain``."""
    return _play(_single, retriever, dataset, questions, steps, batch_size, max(depth, steps))


def beam_chain(
    retriever: Retriever,
    dataset: RetrievalDataset,
    questions: Ids,
    steps: int,
    beams: int = BEAMS,
    *,
    batch_size: int = 256,
    depth: int = 100,
) -> Chains:
    """Search ``steps`` times with the ``beams`` best chains of each question, and return the best one at the end.

    Each step searches with every chain kept, 1 + 4 + 4 + 4 = 13 searches for 4 beams and 4 steps, all of them in one
    call of ``search`` for a batch. Every passage found makes a longer chain. Chains that hold the same set of passages
    (text-identical copies count as one) are one chain, of which the better scored order stays, and the best ``beams``
    chains go on. With one beam this is ``greedy_chain``.

    The score of a chain is the sum of its picks' scores as the retriever returned them, each rounded to 1e-6. The paper
    that uses beams as a baseline, on-policy training for multi-hop retrieval, does not say how it scores them; this is
    our choice. Where scores are log-probabilities it is the log-probability of the chain; where they are similarities
    or BM25 scores, how well the passages fit the states that they were picked in; where they are Q-values, what all
    picks promised, which is no return, since each Q counts the picks after it too. All chains of a question are equally
    long when they are compared. Of equal scores, the chain of the lowest ids goes first, compared in pick order.

    A chain that finds nothing more is given up while another one of its question goes on. Where none does, the budget
    is spent without a pick, as in a greedy chain.

    Args:
        retriever: who ranks the candidates.
        dataset: what is asked and picked.
        questions: indices of the questions, int64 ``(N,)``.
        steps: the budget T.
        beams: how many chains of a question are kept at each step.
        batch_size: how many questions are played at once, up to ``beams`` states each.
        depth: how many passages each search returns; the final ranking is exact down to this rank, the chains kept
            where the passages of each search make at least ``beams`` different sets.

    Raises:
        ValueError: when there is no question, a number is below 1, or the retriever breaks its contract.
    """
    if beams < 1:
        raise ValueError(f"beams is {beams}: keep at least 1 chain")
    walk = partial(_beam, beams=beams, canonical=dataset.corpus.canonical)
    return _play(walk, retriever, dataset, questions, steps, batch_size, depth)


SEARCHES: dict[str, Callable[..., Chains]] = {"greedy": greedy_chain, "single": single_search, "beam": beam_chain}


class Searcher:
    """Asks a retriever, refuses what breaks its contract, and adds up the time."""

    def __init__(self, retriever: Retriever, depth: int, num_passages: int) -> None:
        self.retriever, self.depth, self.num_passages = retriever, depth, num_passages
        self.seconds = 0.0

    def __call__(self, states: mdp.States) -> tuple[Ids, Scores]:
        began = time.perf_counter()
        pair = self.retriever.search(states, self.depth)
        self.seconds += time.perf_counter() - began
        found, values = check_search(pair, states, self.depth, self.num_passages)
        return top_k(values, found, self.depth)  # the same tie rule for every retriever


def _play(
    walk: Callable[[Searcher, mdp.States], Walked],
    retriever: Retriever,
    dataset: RetrievalDataset,
    questions: Ids,
    steps: int,
    size: int,
    depth: int,
) -> Chains:
    if len(questions) == 0 or min(steps, size, depth) < 1:
        raise ValueError(
            f"{len(questions)} questions, {steps} steps, batch size {size}, depth {depth}: each must be at least 1"
        )
    search = Searcher(retriever, depth, len(dataset.corpus))
    size = max(1, min(size, MOST_CANDIDATES // (dataset.max_pool or 1)))
    starts = range(0, len(questions), size)
    parts = [walk(search, mdp.dataset_states(dataset, questions[i : i + size], steps)) for i in starts]
    picked, scores, step_ids, step_scores, searches = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    questions = np.asarray(questions, np.int64)
    return Chains(questions, picked, scores, step_ids, step_scores, searches, search.seconds)


def _greedy(search: Searcher, states: mdp.States) -> Walked:
    size, steps = states.picked.shape
    found = []
    for _ in range(steps):
        found.append(search(states))
        states = mdp.step(states, found[-1][0][:, 0])
    ids, scores = (np.stack(arrays, axis=1) for arrays in zip(*found, strict=True))
    return ids[:, :, 0], scores[:, :, 0], ids, scores, np.full(size, steps, np.int64)


def _single(search: Searcher, states: mdp.States) -> Walked:
    size, steps = states.picked.shape
    ids, scores = search(states)
    return ids[:, :steps], scores[:, :steps], ids[:, None], scores[:, None], np.ones(size, np.int64)


def _beam(search: Searcher, states: mdp.States, beams: int, canonical: Ids) -> Walked:
    size, steps = states.picked.shape
    rows = np.arange(size)[:, None]
    # One row a question, one column a chain, columns in the order of their picks: the first of equal scores wins. The
    # score of a chain that is not there is -inf; of the others, row by row, come the states.
    picks, scores = np.full((size, 1, steps), -1, np.int64), np.full((size, 1, steps), -np.inf, np.float32)
    totals = np.zeros((size, 1))
    searches = np.zeros(size, np.int64)
    found = []
    for i in range(steps):
        there = totals > -np.inf
        searches += there.sum(axis=1)
        ids = np.full((*there.shape, search.depth), -1, np.int64)
        values: Scores = np.full(ids.shape, -np.inf, np.float32)
        ids[there], values[there] = search(states)

        longer = round_scores(totals[:, :, None] + round_scores(values))
        over = (ids < 0).all(axis=(1, 2))
        longer[over, :, 0] = totals[over]  # nothing is left to pick, so the chains stay as they are
        members = np.repeat(picks[:, :, None], search.depth, axis=2)
        members[..., i] = ids

        ids, values = ids.reshape(size, -1), values.reshape(size, -1)
        found.append(_best_of_each(ids, values, search.depth))
        sets = _as_sets(members.reshape(size, -1, steps), canonical)
        kept, totals = _best_sets(sets, longer.reshape(size, -1), beams)
        parents = kept // search.depth
        order = np.lexsort((ids[rows, kept], parents, totals == -np.inf), axis=1)
        kept, totals, parents = kept[rows, order], totals[rows, order], parents[rows, order]

        picks, scores = picks[rows, parents], scores[rows, parents]
        picks[..., i], scores[..., i] = ids[rows, kept], values[rows, kept]
        places = np.cumsum(there).reshape(there.shape) - 1
        there = totals > -np.inf
        states = mdp.step(states[places[rows, parents][there]], picks[..., i][there])
    best = totals.argmax(axis=1)[:, None]
    step_ids, step_scores = (np.stack(arrays, axis=1) for arrays in zip(*found, strict=True))
    return picks[rows, best][:, 0], scores[rows, best][:, 0], step_ids, step_scores, searches


def _as_sets(picks: Ids, canonical: Ids) -> Ids:
    """Write picks, int64 ``(..., T)``, in a form that is the same for all that hold the same set of texts."""
    members = np.sort(canonical_ids(picks, canonical), axis=-1)
    members[..., 1:][members[..., 1:] == members[..., :-1]] = -1
    return np.sort(members, axis=-1)


def _best_sets(sets: Ids, totals: NDArray[np.float64], count: int) -> tuple[Ids, NDArray[np.float64]]:
    """Choose the best ``count`` chains of each row that hold different sets; the first of equal scores.

    Args:
        sets: int64 ``(N, M, T)``; see ``_as_sets``.
        totals: the chains' scores, float64 ``(N, M)``; -inf leaves a chain out.
        count: how many; at most M are chosen.

    Returns:
        Columns int64 ``(N, count)`` and their scores, best first, -inf past the end.
    """
    rows, totals = np.arange(len(totals)), totals.copy()
    kept, scores = [], []
    for _ in range(min(count, totals.shape[1])):
        best = totals.argmax(axis=1)
        kept.append(best)
        scores.append(totals[rows, best])
        totals[(sets == sets[rows, best][:, None]).all(axis=2)] = -np.inf
    return np.stack(kept, axis=1), np.stack(scores, axis=1)


def check_search(found: Any, states: mdp.States, k: int, num_passages: int) -> tuple[Ids, Scores]:
    """Return what a retriever found as arrays.

    Args:
        found: what ``Retriever.search`` returned.
        states: what was searched with.
        k: how many passages were asked for.
        num_passages: of the corpus.

    Raises:
        ValueError: when it is not what ``Retriever.search`` promises.
    """
    if not isinstance(found, tuple | list) or len(found) != 2:
        what = f"{len(found)} values" if isinstance(found, tuple | list) else type(found).__name__
        raise ValueError(f"search returned {what}: Retriever.search returns a pair of arrays, ids and scores")
    ids, scores = np.asarray(found[0]), np.asarray(found[1])
    shape = (len(states), k)
    if ids.shape != shape or scores.shape != shape:
        raise ValueError(f"search returned ids {ids.shape} and scores {scores.shape}: both must have shape {shape}")
    if ids.dtype != np.int64:
        raise ValueError(f"search returned ids of type {ids.dtype}: they must be int64")
    if scores.dtype.kind not in "fiu":
        raise ValueError(f"search returned scores of type {scores.dtype}: they must be float32")
    large = np.abs(scores.astype(np.float64)) > np.finfo(np.float32).max
    if (large & (scores != -np.inf)).any():
        raise ValueError("search returned a score of inf or beyond float32: give finite ones, or -inf for no passage")
    if ids.min() < -1 or ids.max() >= num_passages:
        raise ValueError(f"search returned ids from {ids.min()} to {ids.max()}: the corpus has {num_passages} passages")
    ordered = np.sort(ids, axis=1)
    if ((ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)).any():
        raise ValueError("search returned a passage twice for one state: ids must be distinct within a row")
    rows = np.arange(len(states))[:, None] * num_passages
    keys = (rows + ids)[ids >= 0]
    if np.isin(keys, (rows + states.picked)[states.picked >= 0]).any():
        raise ValueError("search returned a passage that is already picked: exclude states.picked")
    if states.pool is not None and not np.isin(keys, (rows + states.pool)[states.pool >= 0]).all():
        raise ValueError("search returned a passage from outside the question's pool: restrict it to states.pool")
    return ids, scores


def _best_of_each(ids: Ids, scores: Scores, k: int) -> tuple[Ids, Scores]:
    """Return the ``k`` best passages of each row as ``top_k`` does, where an id may stand in a row more than once."""
    order = np.lexsort((-scores, ids), axis=1)  # the first entry of each id carries its best score
    ids, scores = np.take_along_axis(ids, order, axis=1), np.take_along_axis(scores, order, axis=1)
    ids[:, 1:][ids[:, 1:] == ids[:, :-1]] = -1
    return top_k(scores, ids, k)


def final_ranking(chains: Chains, k: int) -> Ids:
    """Rank the picked passages first, in pick order, then all others by their best score in any search.

    Scores equal after rounding to 1e-6 go to the lowest id.

    Args:
        chains: N chains.
        k: how many passages to rank, at most the chains' depth.

    Returns:
        Corpus ids int64 ``(N, k)``, -1 past the end.

    Raises:
        ValueError: when ``k`` is below 1 or exceeds the depth of the searches.
    """
    depth = chains.step_ids.shape[2]
    if not 1 <= k <= depth:
        raise ValueError(f"k is {k}: it must be from 1 to the depth of the searches, {depth}")
    ids = chains.step_ids.reshape(len(chains), -1)
    for picked in chains.picked.T:
        ids = np.where(ids == picked[:, None], -1, ids)
    others, _ = _best_of_each(ids, chains.step_scores.reshape(len(chains), -1), k)
    ranking = np.concatenate([chains.picked, others], axis=1)
    return np.take_along_axis(ranking, np.argsort(ranking < 0, axis=1, kind="stable"), axis=1)[:, :k]


def stop_by_threshold(chains: Chains, threshold: float) -> Ids:
    """Return how many picks each chain keeps when it stops before the first pick whose score is below ``threshold``.

    The score of a greedy pick is the largest Q-value of its step, so this is Q-RAG's early stopping. int64 ``(N,)``.
    """
    return np.logical_and.accumulate(chains.scores >= threshold, axis=1).sum(axis=1)
