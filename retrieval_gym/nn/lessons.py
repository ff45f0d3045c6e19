"""What a query encoder learns from in one go, and how far that is: it may stop between two batches and go on."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from retrieval_gym import mdp
from retrieval_gym.mdp import Ids
from retrieval_gym.nn.checkpoint import generator_state, set_generator_state


@dataclass(frozen=True)
class Examples:
    """B states to learn from: their positives ``(B,)`` and candidates for negatives ``(B, C)``, padded with -1."""

    states: mdp.States
    positives: Ids
    candidates: Ids

    def __len__(self) -> int:
        return len(self.states)

    def __getitem__(self, rows: Ids) -> Examples:
        """Return these rows."""
        return Examples(self.states[rows], self.positives[rows], self.candidates[rows])

    def __add__(self, other: Examples) -> Examples:
        """Return these and then those of ``other``."""
        return Examples(
            mdp.concatenate([self.states, other.states]),
            np.concatenate([self.positives, other.positives]),
            np.concatenate([self.candidates, other.candidates]),
        )


@dataclass
class Lesson:
    """B examples that are learned once each, in random order.

    Attributes:
        examples: what is learned.
        rng: draws the negatives.
        order: rows of the examples, int64 ``(B,)``.
        seconds: what ``walk``, ``mine`` and ``learn`` took.
        reached: how many states the walk before it reached, None where there was none.
        learned: how many examples are behind.
        losses: of each of these.
        firsts: whether the positive of each was ranked first in its list.
        norms: of each update's gradient.
    """

    examples: Examples
    rng: np.random.Generator
    order: Ids
    seconds: dict[str, float] = field(default_factory=lambda: {"walk": 0.0, "mine": 0.0, "learn": 0.0})
    reached: int | None = None
    learned: int = 0
    losses: list[float] = field(default_factory=list)
    firsts: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)

    @classmethod
    def begin(cls, examples: Examples, rng: np.random.Generator) -> Lesson:
        """Return a lesson of which nothing is learned yet, in an order by ``rng``."""
        return cls(examples, rng, rng.permutation(len(examples)))

    def next_batch(self, size: int) -> Examples:
        """Return the ``size`` examples that come next, at the end fewer."""
        return self.examples[self.order[self.learned : self.learned + size]]

    def note(self, losses: list[float], firsts: list[float], norm: float, seconds: float) -> None:
        """Write down that a batch was learned."""
        self.learned += len(losses)
        self.losses += losses
        self.firsts += firsts
        self.norms.append(norm)
        self.seconds["learn"] += seconds

    def state_dict(self) -> dict[str, Any]:
        """Return all of it as a checkpoint can hold it."""
        states = self.examples.states
        arrays = {
            "question": states.question, "pool": states.pool, "picked": states.picked, "steps_left": states.steps_left,
            "positives": self.examples.positives, "candidates": self.examples.candidates, "order": self.order,
        }  # fmt: skip
        return {
            "arrays": {name: torch.from_numpy(array) for name, array in arrays.items() if array is not None},
            "rng": generator_state(self.rng),
            "noted": {
                name: getattr(self, name) for name in ("seconds", "reached", "learned", "losses", "firsts", "norms")
            },
        }

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> Lesson:
        """Return the lesson that ``state_dict`` was taken of."""
        arrays = {name: tensor.cpu().numpy() for name, tensor in state["arrays"].items()}
        states = mdp.States(arrays["question"], arrays.get("pool"), arrays["picked"], arrays["steps_left"])
        examples = Examples(states, arrays["positives"], arrays["candidates"])
        rng = np.random.default_rng()
        set_generator_state(rng, state["rng"])
        return cls(examples, rng, arrays["order"], **state["noted"])
