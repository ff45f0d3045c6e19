"""Reward functions by name: ``f(states before, picks, dataset) -> float64 (B,)``.

``picks`` are corpus ids, -1 where the action picked nothing. A reward of an episode is the sum over its steps. Rewards
by a model have a name of two parts, ``"reranker:PATH"`` or ``"answer:READER"``; see ``model_rewards``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from retrieval_gym import mdp

if TYPE_CHECKING:
    from retrieval_gym.datasets.base import RetrievalDataset

Reward = Callable[[mdp.States, NDArray[np.int64], "RetrievalDataset"], NDArray[np.float64]]


Counts = NDArray[np.int64]


@dataclass(frozen=True)
class GoldReward:
    """A reward that depends on numbers of passages alone: who plays the game has them already.

    Attributes:
        pay: ``f(before, after, gold, picked) -> (B,)``; each argument is int64 ``(B,)``: gold passages found before and
            after the pick, gold passages of the question, passages picked before.
    """

    pay: Callable[[Counts, Counts, Counts, Counts], NDArray]

    def __call__(self, states: mdp.States, picks: NDArray[np.int64], dataset: RetrievalDataset) -> NDArray[np.float64]:
        """Return the reward of each pick, float64 ``(B,)``."""
        found = mdp.found_gold(states, dataset)
        after = found | mdp.is_gold(states.question, picks, dataset)
        gold = dataset.num_gold[states.question]
        return self.pay(found.sum(axis=1), after.sum(axis=1), gold, states.count).astype(np.float64)


def _complete(before: Counts, after: Counts, gold: Counts, picked: Counts) -> NDArray[np.bool_]:
    return (after == gold) & (before < gold)


complete = GoldReward(_complete)
"""Pay 1 at the pick that finds the last missing gold passage, else 0 (Q-RAG, section 3)."""

recall = GoldReward(lambda before, after, gold, picked: (after - before) / gold)
"""Pay each new gold passage its share, so that an episode's return is its recall."""

gold = GoldReward(lambda before, after, gold, picked: after - before)
"""Pay 1 for each new gold passage, whatever the number of hops."""

complete_with_length_penalty = GoldReward(
    lambda before, after, gold, picked: _complete(before, after, gold, picked) * (0.5 + 0.5 * gold / (picked + 1))
)
"""Pay ``0.5 + 0.5 * |gold| / |picked|`` at the pick that finds the last gold passage (the released Q-RAG code)."""

REWARDS: dict[str, Reward] = {
    "complete": complete,
    "recall": recall,
    "gold": gold,
    "complete_with_length_penalty": complete_with_length_penalty,
}


# What makes a reward by a model out of the second part of its name; imported when asked for, never by this module.
MODEL_REWARDS = {
    "answer": "retrieval_gym.model_rewards:answer_reward",
    "reranker": "retrieval_gym.model_rewards:reranker_reward",
}


def get_reward(reward: str | Reward, *, stop_when_complete: bool = True) -> Reward:
    """Return the reward function of this name, or the function itself.

    Args:
        reward: one of ``REWARDS``, ``"reranker:PATH"``, ``"answer:READER"`` or a function.
        stop_when_complete: whether an episode ends at the last gold passage, which tells a reward of the end of an
            episode when it is.

    Raises:
        ValueError: when it is neither a known name nor a function, or what a model's name says cannot be.
        FileNotFoundError: when a model's name can only be a folder, and there is none.
    """
    if callable(reward):
        return reward
    kind, _, name = reward.partition(":") if isinstance(reward, str) else ("", "", "")
    if name and kind in MODEL_REWARDS:
        module, _, factory = MODEL_REWARDS[kind].partition(":")
        return getattr(import_module(module), factory)(name, stop_when_complete=stop_when_complete)
    if not isinstance(reward, str) or reward not in REWARDS:
        named = ", ".join([*sorted(REWARDS), "reranker:PATH", "answer:READER"])
        raise ValueError(f"unknown reward {reward!r}: choose one of {named} or pass a function")
    return REWARDS[reward]
