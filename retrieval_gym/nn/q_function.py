"""Q(s, a) = <E_s(s), E_a(a, i)>: two text encoders whose inner product is an action value (Q-RAG, section 3.2)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from retrieval_gym import mdp
from retrieval_gym.datasets import RetrievalDataset
from retrieval_gym.nn.embeddings import EmbeddingTable
from retrieval_gym.nn.encoder import TextEncoder
from retrieval_gym.nn.rotary import Positions, candidate_positions, rotate
from retrieval_gym.nn.tokens import Order, TokenStore, pool_positions
from retrieval_gym.ranking import Ids, Scores, rank


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
        affine: learn a scale and an offset, Q = scale <E_s, E_a> + offset, so that unit vectors can express any value.
    """

    positions: Positions = "none"
    order: Order = "pick"
    question_tokens: int = 64
    passage_tokens: int = 110
    delta: float = 10.0
    span: float = 9.0
    halves: bool = False
    affine: bool = False


class ActionVectors:
    """E_a of a corpus, computed when first needed and kept until ``clear``; position-free.

    Args:
        encoder: the action encoder, read at every call.
        store: the tokens of the corpus.
        vectors: float32 ``(N, D)``, the vectors of the whole corpus where they are known.
    """

    def __init__(self, encoder: TextEncoder, store: TokenStore, vectors: NDArray[np.float32] | None = None) -> None:
        self._encoder = encoder
        self._store = store
        self._canonical = store.dataset.corpus.canonical
        size = len(store.dataset.corpus)
        self._known = np.full(size, vectors is not None)
        if vectors is None:
            self._vectors = torch.empty(size, encoder.dim, device=encoder.device)
        else:
            self._vectors = torch.from_numpy(np.array(vectors)).to(encoder.device)

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
        self.scale = nn.Parameter(torch.ones(()), requires_grad=config.affine)
        self.offset = nn.Parameter(torch.zeros(()), requires_grad=config.affine)

    def action_vectors(self, store: TokenStore, cache_dir: str | Path | None = None) -> ActionVectors:
        """Return E_a of a dataset's corpus: of pools when first needed, of a whole corpus at once, with a progress bar.

        Args:
            store: the tokens of the dataset.
            cache_dir: where embeddings of a whole corpus are kept; None is nowhere.
        """
        if store.dataset.pools is not None:
            return ActionVectors(self.action_encoder, store)
        table = EmbeddingTable.build(
            self.action_encoder,
            store.dataset.corpus,
            max_tokens=self.config.passage_tokens,
            cache_dir=cache_dir,
            progress=True,
        )
        return ActionVectors(self.action_encoder, store, table.vectors)

    def embed_states(self, states: mdp.States, store: TokenStore) -> Tensor:
        """E_s of each state, ``(B, D)``; differentiable when gradients are enabled. Equal states are embedded once."""
        first, inverse = states.distinct()
        embedded = self.state_encoder.embed(store.states(states[first]))
        return embedded[torch.from_numpy(inverse).to(embedded.device)]

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
            return self.calibrate(embedded @ vectors.whole().T)
        placed = self.place(vectors(states.pool), self.positions(states))
        return self.calibrate(torch.einsum("bd,bpd->bp", embedded, placed))

    def calibrate(self, products: Tensor, parts: int = 1) -> Tensor:
        """Q from inner products; of each of ``parts`` the share that they add up to Q with."""
        return self.scale * products + self.offset / parts

    def store(self, dataset: RetrievalDataset) -> TokenStore:
        """Return the tokens of a dataset, cut and ordered as this Q reads them."""
        return TokenStore(
            dataset,
            self.state_encoder,
            question_tokens=self.config.question_tokens,
            passage_tokens=self.config.passage_tokens,
            order=self.config.order,
        )


class QRetriever:
    """A Q played greedily: the ``Retriever`` of a trained agent.

    Args:
        q: the action values.
        dataset: what is asked.
        cache_dir: where embeddings of a whole corpus are kept; None is nowhere.

    Attributes:
        encoder_calls: number of states encoded.
    """

    def __init__(self, q: QFunction, dataset: RetrievalDataset, cache_dir: str | Path | None = None) -> None:
        self.q = q
        self.store = q.store(dataset)
        self.vectors = q.action_vectors(self.store, cache_dir)
        self.encoder_calls = 0

    @torch.inference_mode()
    def search(self, states: mdp.States, k: int) -> tuple[Ids, Scores]:
        """Return the ``k`` best passages of each state and their Q; see ``ranking.Retriever.search``."""
        self.encoder_calls += len(states)
        embedded = self.q.embed_states(states, self.store)
        return rank(states, self.q.values(embedded, states, self.vectors).float().cpu().numpy(), k)
