"""BM25 as a retriever: the library bm25s weighs the terms, this module scores states with them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from retrieval_gym import mdp
from retrieval_gym.ranking import CELLS, Ids, Scores, rank

if TYPE_CHECKING:
    from retrieval_gym.datasets.base import RetrievalDataset

QUERIES = ("state", "question")


def gather(offsets: Ids, rows: Ids) -> tuple[Ids, Ids]:
    """Return, for the chosen rows of a ragged array, whose entry each is (a position in ``rows``) and where it lies."""
    starts, lengths = offsets[rows], offsets[rows + 1] - offsets[rows]
    ends = np.cumsum(lengths)
    owners = np.repeat(np.arange(len(rows)), lengths)
    return owners, np.arange(len(owners)) + np.repeat(starts - ends + lengths, lengths)


def _ragged(rows: Sequence[Sequence[int]]) -> tuple[Ids, NDArray[np.int64]]:
    """Flatten rows of term ids to offsets ``(len(rows) + 1,)`` and terms."""
    offsets = np.concatenate([[0], np.cumsum([len(row) for row in rows])]).astype(np.int64)
    return offsets, np.fromiter((term for row in rows for term in row), np.int64, int(offsets[-1]))


class BM25Retriever:
    """BM25 over the corpus (Lucene's form), with English stop words removed and no stemming.

    Term statistics are those of the whole corpus in pools too. A term counts as often as it stands in the query.

    Args:
        dataset: what is asked and picked.
        query: ``"state"`` searches with the question and the picked passages' titles and texts, ``"question"`` with
            the question alone at every step.
        k1: term saturation.
        b: length normalisation.

    Raises:
        ValueError: when ``query`` is unknown or no passage holds a single term.
        ImportError: when bm25s is not installed.
    """

    def __init__(self, dataset: RetrievalDataset, query: str = "state", *, k1: float = 1.5, b: float = 0.75) -> None:
        try:
            import bm25s
        except ImportError as error:
            raise ImportError("BM25 needs the package bm25s: pip install 'retrieval-gym[bm25]'") from error
        if query not in QUERIES:
            raise ValueError(f"unknown BM25 query {query!r}: choose one of {', '.join(QUERIES)}")
        self.query = query
        corpus = dataset.corpus
        tokens = bm25s.tokenize(corpus.texts(range(len(corpus))), show_progress=False)
        vocabulary = dict(tokens.vocab)  # index() below adds a term to tokens.vocab
        if not any(tokens.ids):
            raise ValueError(f"dataset {dataset.name!r}: no passage holds a term that BM25 can index")
        index = bm25s.BM25(k1=k1, b=b)
        index.index(tokens, show_progress=False)
        self._num_passages, self._num_terms = len(corpus), len(vocabulary)
        self._passage_offsets, self._passage_terms = _ragged(tokens.ids)
        words = bm25s.tokenize([q.text for q in dataset.questions], return_ids=False, show_progress=False)
        known = [[vocabulary[word] for word in row if word in vocabulary] for row in words]
        self._question_offsets, self._question_terms = _ragged(known)

        # The weights stand by term, as bm25s keeps them, for whole-corpus search, and by passage for pools.
        self._by_term_offsets = index.scores["indptr"].astype(np.int64)
        self._by_term_passages, self._by_term_weights = index.scores["indices"], index.scores["data"]
        order = np.argsort(self._by_term_passages, kind="stable")
        terms = np.repeat(np.arange(self._num_terms), np.diff(self._by_term_offsets))
        counts = np.bincount(self._by_term_passages, minlength=len(corpus))
        self._by_passage_offsets = np.concatenate([[0], np.cumsum(counts)])
        self._by_passage_terms, self._by_passage_weights = terms[order], self._by_term_weights[order]

    def search(self, states: mdp.States, k: int) -> tuple[Ids, Scores]:
        """Return the ``k`` passages of highest BM25 score; see ``Retriever.search``."""
        width = self._num_passages
        if states.pool is not None:
            width = states.pool.shape[1] * (1 + len(self._by_passage_terms) // self._num_passages)
        rows = max(1, CELLS // max(width, self._num_terms))
        parts = [states[start : start + rows] for start in range(0, len(states), rows)]
        ranked = [rank(part, self._scores(part), k) for part in parts]
        return np.concatenate([ids for ids, _ in ranked]), np.concatenate([scores for _, scores in ranked])

    def _scores(self, states: mdp.States) -> NDArray[np.float64]:
        query = self._query_terms(states)
        return self._corpus_scores(query) if states.pool is None else self._pool_scores(query, states.pool)

    def _query_terms(self, states: mdp.States) -> NDArray[np.int64]:
        """Count each term of each state's query, int64 ``(B, terms)``."""
        rows, positions = gather(self._question_offsets, states.question)
        terms = self._question_terms[positions]
        if self.query == "state":
            holders, columns = np.nonzero(states.picked >= 0)
            owners, positions = gather(self._passage_offsets, states.picked[holders, columns])
            rows = np.concatenate([rows, holders[owners]])
            terms = np.concatenate([terms, self._passage_terms[positions]])
        size = len(states)
        return np.bincount(rows * self._num_terms + terms, minlength=size * self._num_terms).reshape(size, -1)

    def _pool_scores(self, query: NDArray[np.int64], pool: Ids) -> NDArray[np.float64]:
        rows, columns = np.nonzero(pool >= 0)
        owners, positions = gather(self._by_passage_offsets, pool[rows, columns])
        weights = query[rows[owners], self._by_passage_terms[positions]] * self._by_passage_weights[positions]
        scores = np.zeros(pool.shape)
        scores[rows, columns] = np.bincount(owners, weights, minlength=len(rows))
        return scores

    def _corpus_scores(self, query: NDArray[np.int64]) -> NDArray[np.float64]:
        scores = np.empty((len(query), self._num_passages))
        for row, counts in zip(scores, query, strict=True):  # one row at a time: its postings can be millions
            terms = np.flatnonzero(counts)
            owners, positions = gather(self._by_term_offsets, terms)
            weights = counts[terms][owners] * self._by_term_weights[positions]
            row[:] = np.bincount(self._by_term_passages[positions], weights, minlength=self._num_passages)
        return scores
