"""Retrievers by name, and those that need no library of their own."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
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
    "OracleRetriever",
    "RandomRetriever",
    "Retriever",
    "make_retriever",
    "rank",
    "round_scores",
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
        name: ``"random"``, ``"bm25"``, ``"oracle"``, ``"dense"``, ``"run:FOLDER"`` (the folder of an agent's finished
            run), or ``"package.module:factory"``, called with the dataset.
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
        return DenseRetriever(dataset, model, max_passage_tokens=max_passage_tokens, cache_dir=cache_dir, progress=True)
    if name.startswith("run:"):
        from retrieval_gym.nn.run import resolve_device
        from retrieval_gym.nn.trained import load_run

        return load_run(name.removeprefix("run:"), dataset, device=resolve_device(device), cache_dir=cache_dir)
    remedy = f"choose one of {', '.join(RETRIEVERS)}, dense:ENCODER, run:FOLDER or package.module:factory"
    retriever = import_callable(name, "retriever", remedy)(dataset)
    if not callable(getattr(retriever, "search", None)):
        raise ValueError(f"{name} returned {type(retriever).__name__}, which has no method search(states, k)")
    return retriever


def import_callable(name: str, what: str, remedy: str) -> Callable[..., Any]:
    """Import ``package.module:name``, looked for in the working directory too, as ``python -m`` would.

    Args:
        name: what to import.
        what: what it shall be, for error messages.
        remedy: what to give instead, for the error message where ``name`` is of another form.

    Raises:
        ValueError: when there is no such module, or no such callable in it.
    """
    module, _, attribute = name.partition(":")
    if not module or not attribute:
        raise ValueError(f"unknown {what} {name!r}: {remedy}")
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        found = import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise  # the module is there; something that it imports is not
        raise ValueError(f"{what} {name!r}: no module {module!r} on the import path") from error
    if not callable(getattr(found, attribute, None)):
        raise ValueError(f"{what} {name!r}: module {module!r} has no callable {attribute!r}")
    return getattr(found, attribute)
