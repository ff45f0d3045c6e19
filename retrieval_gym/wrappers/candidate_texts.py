"""``CandidateTexts``: the candidates' texts as part of the observation."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from gymnasium.utils import RecordConstructorArgs

from retrieval_gym.spaces import Utf8Text


class CandidateTexts(gym.Wrapper, RecordConstructorArgs):
    """Add the candidates to the observation, for players that read: a language model, or a person.

    ``observation["candidates"]`` is a tuple with title and text of each candidate, in pool order, so that action ``a``
    picks ``observation["candidates"][a]``. Padding is left out. Passages stay in the tuple after they are picked.

    Args:
        env: a ``ChainRetrievalEnv`` with pools, wrapped or not.

    Raises:
        ValueError: when the questions have no pools: a whole corpus is too large to observe.
    """

    def __init__(self, env: gym.Env) -> None:
        RecordConstructorArgs.__init__(self)
        gym.Wrapper.__init__(self, env)
        self._corpus = env.get_wrapper_attr("dataset").corpus
        if env.get_wrapper_attr("dataset").max_pool is None:
            raise ValueError(
                f"CandidateTexts needs questions with pools, but {env} picks from a whole corpus of "
                f"{len(self._corpus)} passages: use an environment with pools"
            )
        if not isinstance(env.observation_space, spaces.Dict):
            raise ValueError(f"CandidateTexts needs a Dict observation, got {env.observation_space}")
        self.observation_space = spaces.Dict(
            {**env.observation_space.spaces, "candidates": spaces.Sequence(Utf8Text())}
        )
        self._candidates: tuple[str, ...] = ()

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Begin an episode and look its candidates up."""
        observation, info = self.env.reset(seed=seed, options=options)
        candidates: np.ndarray = info["candidates"]
        self._candidates = tuple(self._corpus.texts(candidates[candidates >= 0]))
        return {**observation, "candidates": self._candidates}, info

    def step(self, action: Any) -> tuple[dict[str, Any], Any, bool, bool, dict[str, Any]]:
        """Pick one passage."""
        observation, reward, terminated, truncated, info = self.env.step(action)
        return {**observation, "candidates": self._candidates}, reward, terminated, truncated, info
