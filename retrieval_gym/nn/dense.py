"""``DenseRetriever``: the state as one text, its vector against those of the passages."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from retrieval_gym import mdp
from retrieval_gym.nn.embeddings import EmbeddingTable
from retrieval_gym.nn.encoder import TextEncoder
from retrieval_gym.nn.index import ExactIndex
from retrieval_gym.nn.tokens import TokenStore
from retrieval_gym.ranking import Ids, Scores, rank

if TYPE_CHECKING:
    from retrieval_gym.datasets.base import RetrievalDataset


class DenseRetriever:
    """Scores a passage by the inner product of its vector and the state's.

    The state's text is the question and the picked passages, encoded as a query; passages are encoded as passages.

    Args:
        dataset: what is asked and picked.
        encoder: embeds states, and passages unless ``vectors`` are given.
        max_passage_tokens: cut passages after so many tokens, alone and inside a state; None does not.
        max_question_tokens: cut questions after so many tokens; None does not.
        order: picked passages stand in the state in the order of ``"pick"`` or of the ``"document"``.
        cache_dir: where embedding tables are kept; None is nowhere.
        vectors: float ``(N, D)``, the passages' vectors where they are known.
        backend: of the search over a whole corpus, ``"torch"`` or ``"faiss"``.
        token_budget: most tokens in one forward pass; see ``TextEncoder.embed``.
        progress: show a progress bar while passages are embedded.

    Raises:
        ValueError: when ``order`` is unknown, or the vectors do not fit the corpus and the encoder.
    """

    def __init__(
        self,
        dataset: RetrievalDataset,
        encoder: TextEncoder,
        *,
        max_passage_tokens: int | None = None,
        max_question_tokens: int | None = 64,
        order: Literal["pick", "document"] = "pick",
        cache_dir: str | Path | None = None,
        vectors: torch.Tensor | NDArray[np.floating] | None = None,
        backend: Literal["torch", "faiss"] = "torch",
        token_budget: int | None = None,
        progress: bool = False,
    ) -> None:
        self.dataset, self.encoder = dataset, encoder
        self.token_budget = token_budget
        self._table_truncated = 0
        self._tokens = TokenStore(
            dataset, encoder, question_tokens=max_question_tokens, passage_tokens=max_passage_tokens, order=order
        )
        if vectors is None:
            table = EmbeddingTable.build(
                encoder,
                dataset.corpus,
                max_tokens=max_passage_tokens,
                cache_dir=cache_dir,
                progress=progress,
                token_budget=token_budget,
            )
            vectors, self._table_truncated = table.vectors, table.truncated
        shape = (len(dataset.corpus), encoder.dim)
        if tuple(vectors.shape) != shape:
            raise ValueError(f"vectors have shape {tuple(vectors.shape)}: the corpus and the encoder need {shape}")
        self._index = ExactIndex(vectors, backend, encoder.device)

    @property
    def encoder_calls(self) -> int:
        """Number of states encoded; equal ones of one search are encoded once."""
        return self._tokens.encoded

    @property
    def truncated(self) -> int:
        """Number of texts that were cut: passages, questions and states."""
        return self._table_truncated + self._tokens.truncated

    @torch.inference_mode()
    def search(self, states: mdp.States, k: int) -> tuple[Ids, Scores]:
        """Return the ``k`` best next passages of each state; see ``ranking.Retriever.search``."""
        queries = self.encode_states(states)
        if states.pool is None:
            ids, scores = self._index.search(queries, k, states.picked)
            return ids.cpu().numpy(), scores.cpu().numpy()
        pool = torch.from_numpy(states.pool).to(self.encoder.device)
        rows = max(1, 2**24 // (pool.shape[1] * self.encoder.dim))
        parts = [
            torch.einsum("bd,bpd->bp", query, self._index.vectors[part.clamp(min=0)])
            for query, part in zip(queries.split(rows), pool.split(rows), strict=True)
        ]
        return rank(states, torch.cat(parts).cpu().numpy(), k)

    @torch.inference_mode()
    def encode_states(self, states: mdp.States) -> torch.Tensor:
        """Return the vectors of B states, float32 ``(B, D)`` on the encoder's device; equal states are encoded once."""
        was_training = self.encoder.training
        self.encoder.eval()
        vectors = self._tokens.embed(states, self.encoder, self.token_budget)
        self.encoder.train(was_training)
        return vectors
