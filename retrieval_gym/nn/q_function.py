"""Q(s, a) = <E_s(s), E_a(a, i)>: two text encoders whose inner product is an action value (Q-RAG, section 3.2)."""

from __future__ import annotations

from dataclasses import dataclass, fields
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
from retrieval_gym.nn.run import Run
from retrieval_gym.nn.scoring import available, soft_value
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
        dueling: Q = v(E_s) + <E_s, E_a> - alpha log sum_a exp(<E_s, E_a> / alpha), with a learned linear v: the inner
            products say how actions compare, v how good the state is.
    """

    positions: Positions = "none"
    order: Order = "pick"
    question_tokens: int = 64
    passage_tokens: int = 110
    delta: float = 10.0
    span: float = 9.0
    halves: bool = False
    dueling: bool = False


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
        self._first = store.dataset.corpus.first_copies
        size = len(store.dataset.corpus)
        self._known = np.full(size, vectors is not None)
        if vectors is None:
            self._vectors = torch.empty(size, encoder.dim, device=encoder.device)
        else:
            self._vectors = torch.from_numpy(np.array(vectors)).to(encoder.device)

    def __len__(self) -> int:
        """Return the number of passages."""
        return len(self._known)

    def clear(self) -> None:
        """Forget every vector: call it when the weights have changed."""
        self._known[:] = False

    @torch.no_grad()
    def __call__(self, ids: NDArray[np.int64]) -> Tensor:
        """Return the vectors of these ids (padding -1 gives an arbitrary one), ``ids.shape + (D,)``."""
        ids = self._first[np.maximum(ids, 0)]
        missing = np.unique(ids[~self._known[ids]])
        if len(missing):
            self._vectors[torch.from_numpy(missing)] = self._encoder.embed(self._store.actions(missing.tolist()))
            self._known[missing] = True
        return self._vectors[torch.from_numpy(ids).to(self._vectors.device)]

    def whole(self) -> Tensor:
        """Return the vectors of the whole corpus, ``(N, D)``."""
        return self(np.arange(len(self._known), dtype=np.int64))


class QFunction(nn.Module):
    """The two encoders of one Q. Give the same encoder twice to share its weights.

    Attributes:
        value: v of the dueling form, linear in the state's vector, 0 at first; None in the plain form.
        alpha: temperature of the dueling form's normaliser, a scalar that ``state_dict`` holds.
    """

    def __init__(self, state_encoder: TextEncoder, action_encoder: TextEncoder, config: QConfig) -> None:
        super().__init__()
        self.state_encoder = state_encoder
        self.action_encoder = action_encoder
        self.config = config
        self.value: nn.Linear | None = None
        if config.dueling:
            self.value = nn.Linear(state_encoder.dim, 1, device=state_encoder.device)
            nn.init.zeros_(self.value.weight)
            nn.init.zeros_(self.value.bias)
        self.alpha: Tensor
        self.register_buffer("alpha", torch.zeros((), device=state_encoder.device))

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
        return store.embed(states, self.state_encoder)

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

    def products(self, embedded: Tensor, states: mdp.States, vectors: ActionVectors) -> Tensor:
        """<E_s, E_a> of every candidate (pools) or every passage (corpora), ``(B, P)``, available or not."""
        positions = self.positions(states)
        if states.pool is None:
            return embedded @ vectors.whole().T
        return torch.einsum("bd,bpd->bp", embedded, self.place(vectors(states.pool), positions))

    def baseline(self, embedded: Tensor, products: Tensor, mask: Tensor) -> Tensor:
        """What the dueling form adds to the inner products of a state, ``(B,)``; 0 in the plain form.

        Args:
            embedded: E_s, ``(B, D)``.
            products: ``(B, P)``.
            mask: True where the action can be picked, bool ``(B, P)``.
        """
        if self.value is None:
            return torch.zeros_like(products[:, 0])
        return self.value(embedded)[:, 0] - soft_value(available(products, mask), float(self.alpha))

    def values(self, embedded: Tensor, states: mdp.States, vectors: ActionVectors) -> Tensor:
        """Q of every candidate (pools) or every passage (corpora), ``(B, P)``; -inf where it cannot be picked."""
        products, mask = self.products(embedded, states, vectors), self.mask(states, vectors)
        return available(products + self.baseline(embedded, products, mask)[:, None], mask)

    def mask(self, states: mdp.States, vectors: ActionVectors) -> Tensor:
        """Say which actions can be picked, bool ``(B, P)``."""
        return torch.from_numpy(mdp.action_mask(states, len(vectors))).to(self.state_encoder.device)

    def store(self, dataset: RetrievalDataset) -> TokenStore:
        """Return the tokens of a dataset, cut and ordered as this Q reads them."""
        return TokenStore(
            dataset,
            self.state_encoder,
            question_tokens=self.config.question_tokens,
            passage_tokens=self.config.passage_tokens,
            order=self.config.order,
        )


def load_q(directory: str | Path, device: str | torch.device = "cpu") -> QFunction:
    """Load the Q of a finished run, as its report scored it.

    Args:
        directory: a run folder of ``agents/pqn.py``.
        device: where it runs.

    Raises:
        FileNotFoundError: when there is no such folder, or the run has not finished.
        ValueError: when the folder is not that of such a run.
    """
    run = Run.open(directory)
    names = [field.name for field in fields(QConfig)]
    missing = [name for name in (*names, "autocast") if name not in run.config]
    if missing:
        raise ValueError(f"{directory} is no run of pqn.py: its configuration has no {missing[0]!r}")
    encoders = []
    for name in ("state_encoder", "action_encoder"):
        if not (run.directory / name).is_dir():
            raise FileNotFoundError(f"{run.directory} has no {name}: finish the run first, with --resume")
        path = run.directory / name
        encoders.append(TextEncoder.load(path, device=device, autocast=run.config["autocast"]))
    q = QFunction(encoders[0], encoders[1], QConfig(**{name: run.config[name] for name in names}))
    q.load_state_dict(run.load("best", map_location=device)["q"], strict=False)
    return q.eval()


class QRetriever:
    """A Q played greedily: the ``Retriever`` of a trained agent.

    Args:
        q: the action values.
        dataset: what is asked.
        cache_dir: where embeddings of a whole corpus are kept; None is nowhere.
    """

    def __init__(self, q: QFunction, dataset: RetrievalDataset, cache_dir: str | Path | None = None) -> None:
        self.q = q
        self.store = q.store(dataset)
        self.vectors = q.action_vectors(self.store, cache_dir)

    @property
    def encoder_calls(self) -> int:
        """Number of states encoded; equal ones of one search are encoded once."""
        return self.store.encoded

    @property
    def truncated(self) -> int:
        """Number of questions, passages and states that were cut to fit."""
        return self.store.truncated

    @torch.inference_mode()
    def encode_states(self, states: mdp.States) -> Tensor:
        """Return E_s of B states, float32 ``(B, D)``."""
        return self.q.embed_states(states, self.store).float()

    @torch.inference_mode()
    def search(self, states: mdp.States, k: int) -> tuple[Ids, Scores]:
        """Return the ``k`` best passages of each state and their Q; see ``ranking.Retriever.search``."""
        embedded = self.q.embed_states(states, self.store)
        return rank(states, self.q.values(embedded, states, self.vectors).float().cpu().numpy(), k)
