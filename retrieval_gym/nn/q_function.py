"""Q(s, a) = <E_s(s), E_a(a, i)>: two text encoders whose inner product is an action value (Q-RAG, section 3.2)."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from retrieval_gym import mdp
from retrieval_gym.datasets import Corpus, RetrievalDataset
from retrieval_gym.datasets.background_pools import DocumentDataset
from retrieval_gym.nn.action_vectors import ActionVectors
from retrieval_gym.nn.embeddings import EmbeddingTable
from retrieval_gym.nn.encoder import TextEncoder
from retrieval_gym.nn.rotary import Positions, RelativeProducts, candidate_positions, rotate, rotated_products
from retrieval_gym.nn.run import Run
from retrieval_gym.nn.scoring import available, soft_value
from retrieval_gym.nn.tokens import Order, TokenStore, pool_positions
from retrieval_gym.ranking import CELLS, Ids, Scores, rank

LONG = 512  # candidates of a document from which on a series is faster than turning each of them,
WIDE = 100.0  # and the span up to which it is: a series needs more terms the further positions run
NUMBERS = 2**20  # coordinates of candidates that are rotated at once: bounds memory, and stays near the cache


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

        The background and stories of long documents are embedded at once as well where ``cache_dir`` is given: one
        table on disk serves every question and every ``context_tokens``.

        Args:
            store: the tokens of the dataset.
            cache_dir: where embeddings of a whole corpus, or of what documents are made of, are kept; None is nowhere.
        """
        dataset = store.dataset
        documents = isinstance(dataset, DocumentDataset)
        if dataset.pools is not None and not (documents and cache_dir is not None):
            return ActionVectors(self.action_encoder, store)
        distinct = np.unique(dataset.corpus.first_copies)
        table = EmbeddingTable.build(
            self.action_encoder,
            _passages(dataset.corpus, distinct) if documents else dataset.corpus,
            max_tokens=self.config.passage_tokens,
            cache_dir=cache_dir,
            progress=True,
        )
        vectors = table.vectors if len(table) == len(distinct) else table.vectors[distinct]
        return ActionVectors(self.action_encoder, store, vectors)

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
        return self._positions(*self._document(states), 0, states.pool.shape[1])

    def _document(self, states: mdp.States) -> tuple[Tensor, Tensor]:
        """Places of the picked passages in their documents ``(B, T)``, and the documents' lengths ``(B,)``."""
        assert states.pool is not None
        device = self.action_encoder.device
        length = torch.from_numpy((states.pool >= 0).sum(axis=1)).to(device)
        return torch.from_numpy(pool_positions(states)).to(device), length

    def _positions(self, picked: Tensor, length: Tensor, start: int, width: int) -> Tensor | None:
        config = self.config
        return candidate_positions(
            config.positions, picked, length, width, start=start, delta=config.delta, span=config.span
        )

    def place(self, vectors: Tensor, positions: Tensor | None) -> Tensor:
        """E_a(a, i) from E_a(a): rotate by the position, if any."""
        return vectors if positions is None else rotate(vectors, positions, halves=self.config.halves)

    def products(self, embedded: Tensor, states: mdp.States, vectors: ActionVectors) -> Tensor:
        """<E_s, E_a> of every candidate (pools) or every passage (corpora), ``(B, P)``, available or not.

        Candidates are looked up and multiplied ``NUMBERS`` coordinates at a time, so that without gradients
        memory does not grow with B * P * D, which for a document of a million candidates is gigabytes a question.
        """
        if states.pool is None:
            if self.config.positions != "none":
                self.positions(states)  # refuses
            return embedded @ vectors.whole().T
        size, width = states.pool.shape
        document = None if self.config.positions == "none" else self._document(states)
        # One array for all blocks: small ones kept between large ones that are freed would break up the heap.
        products = embedded.new_empty(size, width)
        if document is not None and self._in_series(embedded, width):
            for row, (query, picked, length) in enumerate(zip(embedded, *document, strict=True)):
                series = RelativeProducts(
                    query,
                    picked,
                    int(length),
                    delta=self.config.delta,
                    span=self.config.span,
                    halves=self.config.halves,
                )
                _multiply(series, states.pool[row], vectors, products[row])
            return products
        step = max(1, NUMBERS // max(1, size * embedded.shape[1]))
        for start in range(0, width, step):
            ids = states.pool[:, start : start + step]
            positions = None if document is None else self._positions(*document, start, ids.shape[1])
            products[:, start : start + step] = self._inner_products(embedded, vectors(ids), positions)
        return products

    def _in_series(self, embedded: Tensor, width: int) -> bool:
        """Say whether the products with so many candidates are cheaper as series than by turning each of them."""
        plain = not embedded.requires_grad and embedded.device.type == "cpu" and self.config.positions == "relative"
        return plain and width >= LONG and self.config.span <= WIDE

    def _inner_products(self, embedded: Tensor, vectors: Tensor, positions: Tensor | None) -> Tensor:
        """<E_s, E_a> of some candidates ``(B, n)``, from their vectors without position, ``(B, n, D)``."""
        if positions is None:
            return torch.einsum("bd,bpd->bp", embedded, vectors)
        return rotated_products(embedded, vectors, positions, halves=self.config.halves)

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


def _multiply(series: RelativeProducts, pool: NDArray[np.int64], vectors: ActionVectors, products: Tensor) -> None:
    """Write a query's products with the candidates of its document into ``products``, ``(P,)``, block by block.

    Where there are more of them than distinct vectors in all intervals, these are multiplied once and looked up.
    """
    intervals, terms, dim = series.shape
    distinct = vectors.distinct()
    once = None if distinct is None or len(distinct) * intervals >= len(pool) else series.terms_of(distinct)
    step = max(1, NUMBERS // (dim if once is None else terms))
    for start in range(0, len(pool), step):
        ids = pool[start : start + step]
        block = series(vectors(ids), start) if once is None else series.from_terms(once, vectors.rows(ids), start)
        products[start : start + step] = block


def _passages(corpus: Corpus, ids: NDArray[np.int64]) -> Corpus:
    """Return the corpus of these passages alone."""
    passages = [corpus[i] for i in ids.tolist()]
    return Corpus([p.title for p in passages], [p.text for p in passages], merge_duplicates=False)


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

    Besides the pools of a batch, which the caller holds, and the vectors of the distinct texts, 4 D bytes each, a
    search in pools holds some tens of bytes a candidate of one question, or of ``CELLS`` candidates where that is more.

    Args:
        q: the action values.
        dataset: what is asked.
        cache_dir: where embeddings of a whole corpus, or of what long documents are made of, are kept; None is nowhere.
        shared: vectors of another dataset by the same action encoder; texts of pools that it knows are not embedded
            again.
    """

    def __init__(
        self,
        q: QFunction,
        dataset: RetrievalDataset,
        cache_dir: str | Path | None = None,
        shared: ActionVectors | None = None,
    ) -> None:
        self.q = q
        self.store = q.store(dataset)
        if shared is None or dataset.pools is None:
            self.vectors = q.action_vectors(self.store, cache_dir)
        else:
            self.vectors = shared.over(self.store)

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
        # States over a whole corpus are multiplied with it once, all together.
        step = max(1, len(states)) if states.pool is None else max(1, CELLS // states.pool.shape[1])
        found = []
        for start in range(0, max(1, len(states)), step):
            rows = slice(start, start + step)
            values = self.q.values(embedded[rows], states[rows], self.vectors)
            found.append(rank(states[rows], values.float().cpu().numpy(), k))
        ids, scores = zip(*found, strict=True)
        return np.concatenate(ids), np.concatenate(scores)
