"""The tokens of a dataset: each question and passage tokenised once, and states joined from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from retrieval_gym import mdp
from retrieval_gym.nn.encoder import TextEncoder, Tokens

if TYPE_CHECKING:
    from retrieval_gym.datasets.base import RetrievalDataset

Order = Literal["pick", "document"]


class TokenStore:
    """Tokenises when first needed, and never again.

    Args:
        dataset: whose questions and passages.
        encoder: whose tokenizer, prompts and special tokens.
        question_tokens: cut questions after so many tokens; None does not.
        passage_tokens: cut passages after so many tokens, alone and inside a state; None does not.
        order: picked passages stand in a state in the order of ``"pick"`` or of the ``"document"``.

    Attributes:
        truncated: number of questions, passages and states that were cut.
        encoded: number of states that ``embed`` put through an encoder.

    Raises:
        ValueError: when ``order`` is unknown.
    """

    def __init__(
        self,
        dataset: RetrievalDataset,
        encoder: TextEncoder,
        *,
        question_tokens: int | None = 64,
        passage_tokens: int | None = None,
        order: Order = "pick",
    ) -> None:
        if order not in ("pick", "document"):
            raise ValueError(f"unknown order {order!r}: choose pick or document")
        self.dataset, self.order = dataset, order
        self.truncated = self.encoded = 0
        self._encoder = encoder
        self._limits = {"question": question_tokens, "passage": passage_tokens}
        self._questions: dict[int, Tokens] = {}
        self._passages: dict[int, Tokens] = {}  # as they stand in a state
        self._openings: dict[int, Tokens] = {}  # as they stand behind the passage prompt

    def distinct(self, states: mdp.States) -> tuple[list[Tokens], NDArray[np.int64]]:
        """Return one input a distinct text, and for each state its place among them, int64 ``(B,)``."""
        listed = replace(states, picked=self._listed(states))
        first, inverse = listed.distinct()
        return self.states(states[first]), inverse

    def embed(self, states: mdp.States, encoder: TextEncoder, token_budget: int | None = None) -> Tensor:
        """Return the vectors of B states, ``(B, D)`` on the encoder's device; those of equal text are encoded once.

        Args:
            states: what to embed.
            encoder: with the tokenizer, prompts and special tokens of this store's own.
            token_budget: most tokens in one forward pass; see ``TextEncoder.embed``.
        """
        sequences, inverse = self.distinct(states)
        self.encoded += len(sequences)
        vectors = encoder.embed(sequences, token_budget=token_budget)
        return vectors[torch.from_numpy(inverse).to(vectors.device)]

    def _listed(self, states: mdp.States) -> NDArray[np.int64]:
        """Picked passages in the order of the state's text, int64 ``(B, T)``."""
        if self.order == "pick":
            return states.picked
        place = pool_positions(states) if states.pool is not None else states.picked
        place = np.where(states.picked >= 0, place, np.iinfo(np.int64).max)
        return np.take_along_axis(states.picked, np.argsort(place, axis=1, kind="stable"), axis=1)

    def states(self, states: mdp.States) -> list[Tokens]:
        """Return one whole input a state: the question, then the picked passages."""
        picked = self._listed(states)
        self._learn_questions(states.question)
        self._learn_passages(picked[picked >= 0])
        before = self._encoder.truncated
        sequences = [
            self._encoder.sequence([self._questions[question], *(self._passages[i] for i in row if i >= 0)], "query")
            for question, row in zip(states.question.tolist(), picked.tolist(), strict=True)
        ]
        self.truncated += self._encoder.truncated - before
        return sequences

    def actions(self, ids: Sequence[int]) -> list[Tokens]:
        """Return one whole input a passage."""
        missing = [i for i in dict.fromkeys(ids) if i not in self._openings]
        if missing:
            texts = self.dataset.corpus.texts(missing)
            tokens = self._cut(texts, "passage", opens="passage", count=True)
            self._openings.update(zip(missing, tokens, strict=True))
        return [self._encoder.sequence([self._openings[i]], "passage") for i in ids]

    def _learn_questions(self, indices: NDArray[np.int64]) -> None:
        missing = [i for i in np.unique(indices).tolist() if i not in self._questions]
        if missing:
            texts = [self.dataset.questions[i].text for i in missing]
            self._questions.update(zip(missing, self._cut(texts, "question", opens="query", count=True), strict=True))

    def _learn_passages(self, ids: NDArray[np.int64]) -> None:
        missing = [i for i in np.unique(ids).tolist() if i not in self._passages]
        if missing:
            # A passage that is cut is counted where it is an action.
            tokens = self._cut(self.dataset.corpus.texts(missing), "passage", opens=None, count=False)
            self._passages.update(zip(missing, tokens, strict=True))

    def _cut(
        self,
        texts: list[str],
        what: Literal["question", "passage"],
        *,
        opens: Literal["query", "passage"] | None,
        count: bool,
    ) -> list[Tokens]:
        before = self._encoder.truncated
        tokens = self._encoder.tokenize(texts, self._limits[what], opens=opens)
        if count:
            self.truncated += self._encoder.truncated - before
        return tokens


def pool_positions(states: mdp.States) -> NDArray[np.int64]:
    """Position in its pool of each picked passage, -1 where nothing is picked, int64 ``(B, T)``."""
    assert states.pool is not None
    places = np.full(states.picked.shape, -1, np.int64)
    for i, column in enumerate(states.picked.T):
        if (column >= 0).any():
            places[:, i] = np.where(column >= 0, (states.pool == column[:, None]).argmax(axis=1), -1)
    return places
