"""``DenseRetriever``: the state as one text, its vector against those of the passages."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from retrieval_gym import mdp
from retrieval_gym.nn.embeddings import EmbeddingTable
from retrieval_gym.nn.encoder import TextEncoder, Tokens
from retrieval_gym.nn.index import ExactIndex
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
        token_budget: most tokens in one forward pass.
        progress: show a progress bar while passages are embedded.

    Attributes:
        encoder_calls: number of states encoded.
        truncated: number of texts that were cut: passages, questions and states.

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
        token_budget: int = 8192,
        progress: bool = False,
    ) -> None:
        if order not in ("pick", "document"):
            raise ValueError(f"unknown order {order!r}: choose pick or document")
        self.dataset, self.encoder, self.order = dataset, encoder, order
        self.max_passage_tokens, self.max_question_tokens = max_passage_tokens, max_question_tokens
        self.token_budget = token_budget
        self.encoder_calls = self.truncated = 0
        if vectors is None:
            table = EmbeddingTable.build(
                encoder,
                dataset.corpus,
                max_tokens=max_passage_tokens,
                cache_dir=cache_dir,
                progress=progress,
                token_budget=token_budget,
            )
            vectors, self.truncated = table.vectors, table.truncated
        shape = (len(dataset.corpus), encoder.dim)
        if tuple(vectors.shape) != shape:
            raise ValueError(f"vectors have shape {tuple(vectors.shape)}: the corpus and the encoder need {shape}")
        self._index = ExactIndex(vectors, backend, encoder.device)
        self._questions: dict[int, Tokens] = {}
        self._passages: dict[int, Tokens] = {}

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
        picked = self._in_order(states)
        keys = np.concatenate([states.question[:, None], picked], axis=1)
        distinct, inverse = np.unique(keys, axis=0, return_inverse=True)
        self._tokenize(distinct)
        before = self.encoder.truncated
        sequences = [
            self.encoder.sequence([self._questions[row[0]], *(self._passages[i] for i in row[1:] if i >= 0)], "query")
            for row in distinct.tolist()
        ]
        self.truncated += self.encoder.truncated - before
        self.encoder_calls += len(distinct)
        was_training = self.encoder.training
        self.encoder.eval()
        vectors = self.encoder.embed(sequences, token_budget=self.token_budget)
        self.encoder.train(was_training)
        return vectors[torch.from_numpy(inverse.reshape(-1)).to(vectors.device)]

    def _in_order(self, states: mdp.States) -> Ids:
        if self.order == "pick":
            return states.picked
        place = states.picked
        if states.pool is not None:
            place = (states.pool[:, None, :] == states.picked[:, :, None]).argmax(axis=2)
        place = np.where(states.picked >= 0, place, np.iinfo(np.int64).max)
        return np.take_along_axis(states.picked, np.argsort(place, axis=1, kind="stable"), axis=1)

    def _tokenize(self, keys: NDArray[np.int64]) -> None:
        """Tokenise the questions (first column) and passages (the others) that were not met before."""
        new = [i for i in np.unique(keys[:, 0]).tolist() if i not in self._questions]
        if new:
            before = self.encoder.truncated
            texts = [self.dataset.questions[i].text for i in new]
            tokens = self.encoder.tokenize(texts, self.max_question_tokens, opens="query")
            self._questions.update(zip(new, tokens, strict=True))
            self.truncated += self.encoder.truncated - before
        new = [i for i in np.unique(keys[:, 1:]).tolist() if i >= 0 and i not in self._passages]
        if new:
            # That a passage is cut was counted when the table was built.
            tokens = self.encoder.tokenize(self.dataset.corpus.texts(new), self.max_passage_tokens)
            self._passages.update(zip(new, tokens, strict=True))
