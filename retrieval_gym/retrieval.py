"""Retrievers, the chains they walk, and the final ranking.

A chain searches, picks the best passage, searches again with it in the state, and so on until its budget is used up.
The final ranking puts the picked passages first and all others behind them by their best score at any step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from retrieval_gym import mdp
from retrieval_gym.bm25 import BM25Retriever
from retrieval_gym.ranking import CELLS, Ids, Retriever, Scores, rank, round_scores, top_k

if TYPE_CHECKING:
    from retrieval_gym.datasets.base import RetrievalDataset

__all__ = [
    "BM25Retriever",
    "Chains",
    "OracleRetriever",
    "RandomRetriever",
    "Retriever",
    "final_ranking",
    "greedy_chain",
    "make_retriever",
    "rank",
    "round_scores",
    "single_search",
    "stop_by_threshold",
    "top_k",
]

RETRIEVERS = ("random", "bm25", "oracle", "dense")


def _mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Scramble 64-bit numbers (the finaliser of SplitMix64, Steele et al. 2014)."""
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


class RandomRetriever:
    """Ranks candidates uniformly at random, always the same way for the same seed, question and picks.

    Scores are whole numbers below 2**24, exact in float32, so that rounding makes no ties.

    Args:
        dataset: what is asked and picked.
        seed: any integer.
    """

    def __init__(self, dataset: RetrievalDataset, seed: int = 0) -> None:
        self._num_passages = len(dataset.corpus)
        self._seed = _mix(np.array([seed % 2**64], np.uint64))

    def search(self, states: mdp.States, k: int) -> tuple[Ids, Scores]:
        """Return ``k`` candidates in random order; see ``Retriever.search``."""
        keys = _mix(self._seed ^ states.question.astype(np.uint64))
        for column in states.picked.T:
            keys = _mix(keys ^ (column + 1).astype(np.uint64))
        corpus = np.arange(self._num_passages, dtype=np.int64)
        rows = max(1, CELLS // (self._num_passages if states.pool is None else states.pool.shape[1]))
        ranked = []
        for start in range(0, len(states), rows):
            part = states[start : start + rows]
            candidates = corpus if part.pool is None else part.pool
            numbers = _mix(keys[start : start + rows, None] ^ _mix(candidates.astype(np.uint64)))
            ranked.append(rank(part, (numbers >> np.uint64(40)).astype(np.float32), k))
        return np.concatenate([ids for ids, _ in ranked]), np.concatenate([scores for _, scores in ranked])


class OracleRetriever:
    """Ranks the missing gold passages first, in chain order, and all else behind them with score 0.

    It reads the answers: it bounds what any chain can reach and proves the scorer, nothing more.

    Args:
        dataset: what is asked and picked.
    """

    def __init__(self, dataset: RetrievalDataset) -> None:
        self.dataset = dataset

    def search(self, states: mdp.States, k: int) -> tuple[Ids, Scores]:
        """Return the missing gold passages, then other candidates by id; see ``Retriever.search``."""
        canonical, gold = self.dataset.corpus.canonical, self.dataset.gold[states.question]
        missing = np.where(mdp.found_gold(states, self.dataset), -1, gold)
        ids = states.pool
        if ids is None:
            # Behind the gold passages stand the lowest ids, so these and the gold ones are all that can be returned.
            low = min(len(canonical), k + states.picked.shape[1] + gold.shape[1])
            ids = np.concatenate([np.broadcast_to(np.arange(low), (len(states), low)), gold], axis=1)
            ids[:, low:][gold < low] = -1
        scores = np.zeros(ids.shape, np.float32)
        matches = missing[:, :, None] == np.where(ids >= 0, canonical[ids], -2)[:, None, :]
        rows, chain = np.nonzero(matches.any(axis=2))
        scores[rows, matches.argmax(axis=2)[rows, chain]] = gold.shape[1] - chain
        if states.pool is None:
            scores[(ids[:, :, None] == states.picked[:, None, :]).any(axis=2)] = -np.inf
            return top_k(scores, ids, k)
        return rank(states, scores, k)


def make_retriever(
    name: str,
    dataset: RetrievalDataset,
    *,
    seed: int = 0,
    query: str = "state",
    encoder: str | Path | None = None,
    device: str = "auto",
    layers: Sequence[int] | None = None,
    max_passage_tokens: int | None = None,
    cache_dir: str | Path | None = None,
) -> Retriever:
    """Return a retriever by name.

    Args:
        name: ``"random"``, ``"bm25"``, ``"oracle"``, ``"dense"``, ``"run:FOLDER"`` (the folder of a finished run of
            ``agents/pqn.py``), or ``"package.module:factory"``, called with the dataset.
        dataset: what is asked and picked.
        seed: of the random retriever.
        query: of BM25: ``"state"`` or ``"question"``.
        encoder: of the dense retriever: a Hub id or a directory; by default the package's default encoder.
        device: of the dense retriever.
        layers: which transformer layers of the encoder to keep; all by default.
        max_passage_tokens: where the dense retriever cuts a passage; the encoder's own limit by default.
        cache_dir: where the dense retriever keeps the corpus embeddings; nowhere by default.

    Raises:
        ValueError: when the name is unknown, cannot be imported, or the factory returns no retriever.
        ImportError: when a package that the retriever needs is not installed.
    """
    if name == "random":
        return RandomRetriever(dataset, seed)
    if name == "bm25":
        return BM25Retriever(dataset, query)
    if name == "oracle":
        return OracleRetriever(dataset)
    if name == "dense":
        from retrieval_gym.nn.dense import DenseRetriever
        from retrieval_gym.nn.encoder import TextEncoder
        from retrieval_gym.nn.model_files import DEFAULT_MODEL
        from retrieval_gym.nn.run import resolve_device

        name_or_path = DEFAULT_MODEL if encoder is None else str(encoder)
        model = TextEncoder.load(name_or_path, device=resolve_device(device), layers=layers)
        return DenseRetriever(dataset, model, max_passage_tokens=max_passage_tokens, cache_dir=cache_dir)
    if name.startswith("run:"):
        from retrieval_gym.nn.q_function import QRetriever, load_q
        from retrieval_gym.nn.run import resolve_device

        return QRetriever(load_q(name.removeprefix("run:"), resolve_device(device)), dataset, cache_dir)
    retriever = _import_factory(name)(dataset)
    if not callable(getattr(retriever, "search", None)):
        raise ValueError(f"{name} returned {type(retriever).__name__}, which has no method search(states, k)")
    return retriever


def _import_factory(name: str) -> Callable[[RetrievalDataset], Any]:
    module, colon, attribute = name.partition(":")
    if not colon:
        raise ValueError(
            f"unknown retriever {name!r}: choose one of {', '.join(RETRIEVERS)}, run:FOLDER or package.module:factory"
        )
    try:
        found = import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise  # the module is there; something that it imports is not
        raise ValueError(f"retriever {name!r}: no module {module!r} on the import path") from error
    if not callable(getattr(found, attribute, None)):
        raise ValueError(f"retriever {name!r}: module {module!r} has no callable {attribute!r}")
    return getattr(found, attribute)


@dataclass(frozen=True)
class Chains:
    """N chains of T picks, from S searches each (S = T for greedy chains, 1 for a single search).

    Attributes:
        questions: indices of the questions, int64 ``(N,)``.
        picked: corpus ids in pick order, -1 where the pool had run out, int64 ``(N, T)``.
        scores: the score of each pick when it was made (its Q-value, the largest of that step), float32 ``(N, T)``;
            -inf where nothing was picked.
        step_ids: what each search returned, int64 ``(N, S, depth)``, -1 past the end.
        step_scores: float32 ``(N, S, depth)``, -inf past the end.
        seconds: time spent in ``search`` for all questions together.
    """

    questions: Ids
    picked: Ids
    scores: Scores
    step_ids: Ids
    step_scores: Scores
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
    return _play(retriever, dataset, questions, steps, steps, batch_size, depth)


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
    return _play(retriever, dataset, questions, steps, 1, batch_size, max(depth, steps))


def _play(
    retriever: Retriever, dataset: RetrievalDataset, questions: Ids, steps: int, searches: int, size: int, depth: int
) -> Chains:
    if len(questions) == 0 or min(steps, size, depth) < 1:
        raise ValueError(
            f"{len(questions)} questions, {steps} steps, batch size {size}, depth {depth}: each must be at least 1"
        )
    shape = (len(questions), searches, depth)
    step_ids, step_scores = np.empty(shape, np.int64), np.empty(shape, np.float32)
    picked = np.full((len(questions), steps), -1, np.int64)
    scores = np.full((len(questions), steps), -np.inf, np.float32)
    seconds = 0.0
    for start in range(0, len(questions), size):
        rows = slice(start, start + size)
        states = mdp.dataset_states(dataset, questions[rows], steps)
        for i in range(searches):
            began = time.perf_counter()
            found, values = retriever.search(states, depth)
            seconds += time.perf_counter() - began
            found, values = np.asarray(found), np.asarray(values)
            _check_search(states, found, values, depth, len(dataset.corpus))
            found, values = top_k(values, found, depth)  # the same tie rule for every retriever
            step_ids[rows, i], step_scores[rows, i] = found, values
            if searches == steps:
                picked[rows, i], scores[rows, i] = found[:, 0], values[:, 0]
                states = mdp.step(states, found[:, 0])
    if searches != steps:
        picked[:], scores[:] = step_ids[:, 0, :steps], step_scores[:, 0, :steps]
    return Chains(np.asarray(questions, np.int64), picked, scores, step_ids, step_scores, seconds)


def _check_search(states: mdp.States, ids: Ids, scores: Scores, k: int, num_passages: int) -> None:
    """Raise ValueError when what a retriever returned is not what ``Retriever.search`` promises."""
    shape = (len(states), k)
    if ids.shape != shape or scores.shape != shape:
        raise ValueError(f"search returned ids {ids.shape} and scores {scores.shape}: both must have shape {shape}")
    if ids.dtype != np.int64:
        raise ValueError(f"search returned ids of type {ids.dtype}: they must be int64")
    if ids.min() < -1 or ids.max() >= num_passages:
        raise ValueError(f"search returned ids from {ids.min()} to {ids.max()}: the corpus has {num_passages} passages")
    rows = np.arange(len(states))[:, None] * num_passages
    keys = (rows + ids)[ids >= 0]
    if len(np.unique(keys)) != len(keys):
        raise ValueError("search returned a passage twice for one state: ids must be distinct within a row")
    if np.isin(keys, (rows + states.picked)[states.picked >= 0]).any():
        raise ValueError("search returned a passage that is already picked: exclude states.picked")
    if states.pool is not None and not np.isin(keys, (rows + states.pool)[states.pool >= 0]).all():
        raise ValueError("search returned a passage from outside the question's pool: restrict it to states.pool")


def final_ranking(chains: Chains, k: int) -> Ids:
    """Rank the picked passages first, in pick order, then all others by their best score at any step.

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
    keys = round_scores(chains.step_scores.reshape(len(chains), -1))
    for picked in chains.picked.T:
        ids = np.where(ids == picked[:, None], -1, ids)
    # Sorted by id and score, the first entry of each id carries its best score.
    order = np.lexsort((-keys, ids), axis=1)
    ids, keys = np.take_along_axis(ids, order, axis=1), np.take_along_axis(keys, order, axis=1)
    ids[:, 1:][ids[:, 1:] == ids[:, :-1]] = -1
    keys[ids < 0] = -np.inf
    order = np.argsort(-keys, axis=1, kind="stable")
    ranking = np.concatenate([chains.picked, np.take_along_axis(ids, order, axis=1)], axis=1)
    return np.take_along_axis(ranking, np.argsort(ranking < 0, axis=1, kind="stable"), axis=1)[:, :k]


def stop_by_threshold(chains: Chains, threshold: float) -> Ids:
    """Return how many picks each chain keeps when it stops before the first pick whose score is below ``threshold``.

    The score of a pick is the largest Q-value of its step, so this is Q-RAG's early stopping. int64 ``(N,)``.
    """
    return np.logical_and.accumulate(chains.scores >= threshold, axis=1).sum(axis=1)
