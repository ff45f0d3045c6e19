"""Q(s, a) = <E_s(s), E_a(a, i)>: two text encoders whose inner product is an action value (Q-RAG, section 3.2)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from retrieval_gym import mdp
from retrieval_gym.datasets import RetrievalDataset
from retrieval_gym.nn.encoder import TextEncoder
from retrieval_gym.nn.rotary import Positions, candidate_positions, rotate


@dataclass(frozen=True)
class QConfig:
    """What changes a Q besides its encoders' weights.

    Attributes:
        positions: how a passage's place in its document enters E_a; pools only.
        order: whether the state lists passages in pick order or in document order.
        question_tokens: longest question, in tokens.
        passage_tokens: longest passage, in tokens, as an action and inside a state.
        delta: distance between the intervals of relative positions.
        span: range of relative positions inside an interval.
        halves: rotate each half of the vector on its own, so that each half gives a Q of its own.
    """

    positions: Positions = "none"
    order: Literal["pick", "document"] = "pick"
    question_tokens: int = 64
    passage_tokens: int = 110
    delta: float = 10.0
    span: float = 9.0
    halves: bool = False


class TokenStore:
    """The tokens of a dataset's questions and passages, each tokenised once, when first needed."""

    def __init__(self, dataset: RetrievalDataset, encoder: TextEncoder, config: QConfig) -> None:
        self.dataset = dataset
        self.config = config
        self._encoder = encoder
        self._passages: dict[int, NDArray[np.int32]] = {}
        self._questions: dict[int, NDArray[np.int32]] = {}

    def passages(self, ids: Sequence[int]) -> list[NDArray[np.int32]]:
        """Return the content tokens of these passages."""
        missing = [i for i in dict.fromkeys(ids) if i not in self._passages]
        if missing:
            tokens = self._encoder.tokenize(self.dataset.corpus.texts(missing), self.config.passage_tokens)
            self._passages.update(zip(missing, tokens, strict=True))
        return [self._passages[i] for i in ids]

    def questions(self, indices: Sequence[int]) -> list[NDArray[np.int32]]:
        """Return the content tokens of these questions."""
        missing = [i for i in dict.fromkeys(indices) if i not in self._questions]
        if missing:
            texts = [self.dataset.questions[i].text for i in missing]
            self._questions.update(
                zip(missing, self._encoder.tokenize(texts, self.config.question_tokens), strict=True)
            )
        return [self._questions[i] for i in indices]

    def states(self, states: mdp.States) -> list[NDArray[np.int32]]:
        """Return one full token sequence a state: the question, then the picked passages."""
        picked = states.picked
        if self.config.order == "document":
            places = pool_positions(states) if states.pool is not None else picked
            order = np.argsort(np.where(picked >= 0, places, np.iinfo(np.int64).max), axis=1, kind="stable")
            picked = np.take_along_axis(picked, order, axis=1)
        self.passages(picked[picked >= 0].tolist())
        questions = self.questions(states.question.tolist())
        return [
            self._encoder.sequence([question, *(self._passages[i] for i in row if i >= 0)], "query")
            for question, row in zip(questions, picked.tolist(), strict=True)
        ]

    def actions(self, ids: Sequence[int]) -> list[NDArray[np.int32]]:
        """Return one full token sequence a passage."""
        return [self._encoder.sequence([tokens], "passage") for tokens in self.passages(ids)]


class ActionVectors:
    """E_a of a corpus, computed when first needed and kept until ``clear``; position-free.

    Args:
        encoder: the action encoder, read at every call.
        store: the tokens of the corpus.
    """

    def __init__(self, encoder: TextEncoder, store: TokenStore) -> None:
        self._encoder = encoder
        self._store = store
        self._canonical = store.dataset.corpus.canonical
        size = len(store.dataset.corpus)
        self._known = np.zeros(size, bool)
        self._vectors = torch.empty(size, encoder.dim, device=encoder.device)

    def clear(self) -> None:
        """Forget every vector: call it when the weights have changed."""
        self._known[:] = False

    @torch.no_grad()
    def __call__(self, ids: NDArray[np.int64]) -> Tensor:
        """Return the vectors of these ids (padding -1 gives an arbitrary one), ``ids.shape + (D,)``."""
        ids = self._canonical[np.maximum(ids, 0)]
        missing = np.unique(ids[~self._known[ids]])
        if len(missing):
            self._vectors[torch.from_numpy(missing)] = self._encoder.embed(self._store.actions(missing.tolist()))
            self._known[missing] = True
        return self._vectors[torch.from_numpy(ids).to(self._vectors.device)]

    def whole(self) -> Tensor:
        """Return the vectors of the whole corpus, ``(N, D)``."""
        return self(np.arange(len(self._known), dtype=np.int64))


class QFunction(nn.Module):
    """The two encoders of one Q. Give the same encoder twice to share its weights."""

    def __init__(self, state_encoder: TextEncoder, action_encoder: TextEncoder, config: QConfig) -> None:
        super().__init__()
        self.state_encoder = state_encoder
        self.action_encoder = action_encoder
        self.config = config

    def embed_states(self, states: mdp.States, store: TokenStore) -> Tensor:
        """E_s of each state, ``(B, D)``; differentiable when gradients are enabled."""
        return self.state_encoder.embed(store.states(states))

    def embed_actions(self, ids: NDArray[np.int64], store: TokenStore) -> Tensor:
        """E_a of each passage without its position, ``(B, D)``; differentiable when gradients are enabled."""
        return self.action_encoder.embed(store.actions(ids.tolist()))

    def positions(self, states: mdp.States) -> Tensor | None:
        """Positions of all candidates, ``(B, P)`` or ``(1, P)``; None when they play no part.

        Raises:
            ValueError: when positions are asked for but the whole corpus is the action set.
        """
        if self.config.positions == "none":
            return None
        if states.pool is None:
            raise ValueError(
                f"positions={self.config.positions!r} need a document: a corpus has no order; use positions='none'"
            )
        device = self.action_encoder.device
        length = torch.from_numpy((states.pool >= 0).sum(axis=1)).to(device)
        picked = torch.from_numpy(pool_positions(states)).to(device)
        return candidate_positions(
            self.config.positions, picked, length, states.pool.shape[1], delta=self.config.delta, span=self.config.span
        )

    def place(self, vectors: Tensor, positions: Tensor | None) -> Tensor:
        """E_a(a, i) from E_a(a): rotate by the position, if any."""
        return vectors if positions is None else rotate(vectors, positions, halves=self.config.halves)

    def values(self, embedded: Tensor, states: mdp.States, vectors: ActionVectors) -> Tensor:
        """Q of every candidate (pools) or every passage (corpora), ``(B, P)``, before any masking."""
        if states.pool is None:
            return embedded @ vectors.whole().T
        placed = self.place(vectors(states.pool), self.positions(states))
        return torch.einsum("bd,bpd->bp", embedded, placed)


def pool_positions(states: mdp.States) -> NDArray[np.int64]:
    """Position in its pool of each picked passage, -1 where nothing is picked, int64 ``(B, T)``."""
    assert states.pool is not None
    places = [(states.pool == column[:, None]).argmax(axis=1) for column in states.picked.T]
    return np.where(states.picked >= 0, np.stack(places, axis=1), -1)


class QRetriever:
    """A Q played greedily: the ``Retriever`` of a trained agent.

    Args:
        q: the action values.
        dataset: what is asked.
    """

    def __init__(self, q: QFunction, dataset: RetrievalDataset) -> None:
        self.q = q
        self.store = TokenStore(dataset, q.state_encoder, q.config)
        self.vectors = ActionVectors(q.action_encoder, self.store)

    @torch.inference_mode()
    def search(self, states: mdp.States, k: int) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Return the k best passages of each state and their Q; see ``retrieval_gym.retrieval.Retriever``."""
        from retrieval_gym.retrieval import top_k

        q = self.q.values(self.q.embed_states(states, self.store), states, self.vectors).float().cpu().numpy()
        mask = mdp.action_mask(states, len(self.store.dataset.corpus))
        ids = states.pool if states.pool is not None else np.arange(q.shape[1], dtype=np.int64)[None]
        return top_k(np.where(mask, q, -np.inf), np.broadcast_to(ids, q.shape), k)
