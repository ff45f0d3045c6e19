"""Segments of experience from a vector environment, and the states that follow them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from retrieval_gym import mdp


def states_from(obs: Mapping[str, Any], info: Mapping[str, Any]) -> mdp.States:
    """Turn what a vector environment with ``observation="ids"`` returned into states.

    Args:
        obs: ``question`` ``(B,)``, ``picked`` ``(B, T)`` as actions, ``steps_left`` ``(B,)``.
        info: ``candidates`` ``(B, P)`` where questions have pools; absent where the corpus is the action set.
    """
    pool, picked = info.get("candidates"), obs["picked"]
    if pool is not None:
        picked = np.where(picked >= 0, np.take_along_axis(pool, np.maximum(picked, 0), axis=1), -1)
    return mdp.States(obs["question"], pool, picked, obs["steps_left"])


@dataclass
class Rollout:
    """T steps of B environments that reset themselves in the same step (``AutoresetMode.SAME_STEP``)."""

    states: list[mdp.States] = field(default_factory=list)
    actions: list[NDArray[np.int64]] = field(default_factory=list)
    rewards: list[NDArray[np.float64]] = field(default_factory=list)
    dones: list[NDArray[np.bool_]] = field(default_factory=list)

    def add(
        self,
        states: mdp.States,
        actions: NDArray[np.int64],
        rewards: NDArray[np.float64],
        dones: NDArray[np.bool_],
    ) -> None:
        """Append one step: the states acted in, the actions, and what came of them, each ``(B,)``."""
        self.states.append(states)
        self.actions.append(actions)
        self.rewards.append(rewards)
        self.dones.append(dones)

    def picks(self) -> NDArray[np.int64]:
        """Corpus ids of all actions, step by step, int64 ``(T * B,)``."""
        return np.concatenate([mdp.action_ids(s, a) for s, a in zip(self.states, self.actions, strict=True)])

    def successors(self, last: mdp.States) -> tuple[mdp.States, NDArray[np.int64]]:
        """States that follow the steps which ended no episode: the states that are worth a value.

        Args:
            last: the states after the last step.

        Returns:
            The states, and the flat index ``t * B + b`` of the step before each.
        """
        following = mdp.concatenate([*self.states[1:], last])
        rows = np.flatnonzero(~np.concatenate(self.dones))
        return following[rows], rows


@dataclass(frozen=True)
class Lookahead:
    """K actions that were looked ahead to and not taken.

    Attributes:
        rows: flat index ``t * B + b`` of the state that each was tried in, int64 ``(K,)``.
        actions: int64 ``(K,)``.
        rewards: float64 ``(K,)``.
        dones: whether the episode would end, bool ``(K,)``.
        following: the K states that would follow.
    """

    rows: NDArray[np.int64]
    actions: NDArray[np.int64]
    rewards: NDArray[np.float64]
    dones: NDArray[np.bool_]
    following: mdp.States

    @classmethod
    def of(cls, envs: Any, actions: NDArray[np.int64], left: NDArray[np.bool_], step: int) -> Lookahead:
        """Look ahead from the current states of a vector environment.

        Args:
            envs: a ``ChainRetrievalVectorEnv``.
            actions: int64 ``(B, n)``.
            left: which of them are available, bool ``(B, n)``; the others are left out.
            step: how many steps of the segment have been played.
        """
        following, rewards, dones = envs.lookahead(actions)
        rows, _ = np.nonzero(left)
        return cls(step * len(actions) + rows, actions[left], rewards[left], dones[left], following[left.ravel()])

    @classmethod
    def concatenate(cls, parts: list[Lookahead]) -> Lookahead:
        """Stack what was tried at several steps."""
        return cls(
            rows=np.concatenate([part.rows for part in parts]),
            actions=np.concatenate([part.actions for part in parts]),
            rewards=np.concatenate([part.rewards for part in parts]),
            dones=np.concatenate([part.dones for part in parts]),
            following=mdp.concatenate([part.following for part in parts]),
        )
