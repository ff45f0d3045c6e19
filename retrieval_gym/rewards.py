"""Reward functions by name: ``f(states before, picks, dataset) -> float64 (B,)``.

``picks`` are corpus ids, -1 where the action picked nothing. A reward of an episode is the sum over its steps. Rewards
by a model have a name of two parts, ``"reranker:PATH"`` or ``"answer:READER"``; see ``model_rewards``.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from retrieval_gym import mdp

if TYPE_CHECKING:
    from retrieval_gym.datasets.base import RetrievalDataset

Reward = Callable[[mdp.States, NDArray[np.int64], "RetrievalDataset"], NDArray[np.float64]]


def _found(
    states: mdp.States, picks: NDArray[np.int64], dataset: RetrievalDataset
) -> tuple[NDArray[np.bool_], NDArray[np.bool_], NDArray[np.bool_]]:
    """Say which gold is found before and after the picks, and which places hold any; each bool ``(B, max_gold)``."""
    gold = dataset.gold[states.question]
    before = mdp.found_gold(states, dataset)
    picked = np.where(picks >= 0, dataset.corpus.canonical[picks], -2)  # -2 equals no gold, nor its padding
    return before, before | (gold == picked[:, None]), gold >= 0


def complete(states: mdp.States, picks: NDArray[np.int64], dataset: RetrievalDataset) -> NDArray[np.float64]:
    """Pay 1 at the pick that finds the last missing gold passage, else 0 (Q-RAG, section 3)."""
    before, after, gold = _found(states, picks, dataset)
    return ((after == gold).all(axis=1) & (before != gold).any(axis=1)).astype(np.float64)


def recall(states: mdp.States, picks: NDArray[np.int64], dataset: RetrievalDataset) -> NDArray[np.float64]:
    """Pay each new gold passage its share, so that an episode's return is its recall."""
    before, after, gold = _found(states, picks, dataset)
    return (after & ~before).sum(axis=1) / gold.sum(axis=1)


def gold(states: mdp.States, picks: NDArray[np.int64], dataset: RetrievalDataset) -> NDArray[np.float64]:
    """Pay 1 for each new gold passage, whatever the number of hops."""
    before, after, _ = _found(states, picks, dataset)
    return (after & ~before).sum(axis=1).astype(np.float64)


def complete_with_length_penalty(
    states: mdp.States, picks: NDArray[np.int64], dataset: RetrievalDataset
) -> NDArray[np.float64]:
    """Pay ``0.5 + 0.5 * |gold| / |picked|`` at the pick that finds the last gold passage (the released Q-RAG code)."""
    gold = (dataset.gold[states.question] >= 0).sum(axis=1)
    return complete(states, picks, dataset) * (0.5 + 0.5 * gold / (states.count + 1))


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
