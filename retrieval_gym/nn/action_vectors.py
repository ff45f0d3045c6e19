"""Vectors of passages as actions: each distinct text is embedded once, when first needed or from a table on disk."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from retrieval_gym.datasets import RetrievalDataset
from retrieval_gym.datasets.background_pools import DocumentDataset
from retrieval_gym.nn.encoder import TextEncoder
from retrieval_gym.nn.tokens import TokenStore
from retrieval_gym.progress import Progress

MANY = 1_024  # passages embedded at once that take long enough for a progress bar


class ActionVectors:
    """E_a of a corpus, computed when first needed and kept until ``clear``; position-free.

    A text has one vector, wherever it stands: in copies, and in the corpora of other datasets (see ``over``). Memory:
    4 D bytes a distinct text, which a table on disk only maps.

    Args:
        encoder: the action encoder, read at every call.
        store: the tokens of the corpus.
        vectors: float32 ``(U, D)``, the vectors of the corpus's U distinct texts in the order of their first ids,
            where they are known.
    """

    def __init__(self, encoder: TextEncoder, store: TokenStore, vectors: NDArray[np.float32] | None = None) -> None:
        self._encoder = encoder
        self._store = store
        self._first = store.dataset.corpus.first_copies
        distinct, self._rows = np.unique(self._first, return_inverse=True)
        self._table = _Table(
            torch.empty(len(distinct), encoder.dim, device=encoder.device)
            if vectors is None
            else torch.from_numpy(np.asarray(vectors)).to(encoder.device),
            np.full(len(distinct), vectors is not None),
        )

    def __len__(self) -> int:
        """Return the number of passages."""
        return len(self._first)

    def clear(self) -> None:
        """Forget every vector: call it when the weights have changed."""
        self._table.known[:] = False

    def over(self, store: TokenStore) -> ActionVectors:
        """Return the vectors of another dataset's corpus: a text that both corpora hold is embedded once.

        Args:
            store: the tokens of that dataset, made by the same Q.
        """
        table = self._table
        if table.texts is None:
            distinct = np.unique(self._first)
            table.texts = dict(zip(self._store.dataset.corpus.texts(distinct), range(len(distinct)), strict=True))
        other = object.__new__(ActionVectors)
        other._encoder, other._store, other._table = self._encoder, store, table
        other._first = store.dataset.corpus.first_copies
        distinct, inverse = np.unique(other._first, return_inverse=True)
        texts = table.texts
        rows = [texts.setdefault(text, len(texts)) for text in store.dataset.corpus.texts(distinct)]
        other._rows = np.array(rows, np.int64)[inverse]
        table.grow(len(texts))
        return other

    @torch.no_grad()
    def __call__(self, ids: NDArray[np.int64]) -> Tensor:
        """Return the vectors of these ids (padding -1 gives an arbitrary one), ``ids.shape + (D,)``."""
        ids = np.maximum(ids, 0)
        rows, table = self._rows[ids], self._table
        unknown = ~table.known[rows]
        if unknown.any():
            missing, where = np.unique(rows[unknown], return_index=True)
            passages = self._first[ids[unknown][where]].tolist()
            with Progress("embedding passages", len(passages), "texts", shown=len(passages) > MANY) as progress:
                vectors = self._encoder.embed(self._store.actions(passages), told=progress.update)
            table.vectors[torch.from_numpy(missing)] = vectors
            table.known[missing] = True
        return table.vectors[torch.from_numpy(rows).to(table.vectors.device)]

    def distinct(self) -> Tensor | None:
        """Return the vectors of all distinct texts, ``(U, D)``, by row (see ``rows``); None where some are unknown."""
        return self._table.vectors if self._table.known.all() else None

    def rows(self, ids: NDArray[np.int64]) -> Tensor:
        """Return where in ``distinct`` these ids stand (padding -1 anywhere), int64, same shape."""
        return torch.from_numpy(self._rows[np.maximum(ids, 0)])

    def whole(self) -> Tensor:
        """Return the vectors of the whole corpus, ``(N, D)``."""
        return self(np.arange(len(self), dtype=np.int64))


@dataclass
class _Table:
    """Vectors by row, which of them are known, and the row of each text once several corpora share them."""

    vectors: Tensor
    known: NDArray[np.bool_]
    texts: dict[str, int] | None = None

    def grow(self, size: int) -> None:
        """Add rows that are not known yet up to this number."""
        new = size - len(self.known)
        if new:
            self.vectors = torch.cat([self.vectors, self.vectors.new_empty(new, self.vectors.shape[1])])
            self.known = np.concatenate([self.known, np.zeros(new, bool)])


def worth_a_table(dataset: RetrievalDataset, documents: int) -> bool:
    """Say whether to embed everything that can be picked at once, and to keep it on disk.

    It is so for a whole corpus, and for long documents, which share one background, when those that are read are
    together at least as long as it; of shorter ones and of other pools, what they hold is embedded when first needed.

    Args:
        dataset: what can be picked.
        documents: how many pools are read.
    """
    if dataset.pools is None:
        return True
    if not isinstance(dataset, DocumentDataset):
        return False
    return documents * dataset.max_pool >= len(np.unique(dataset.corpus.first_copies))
