"""``CandidateTexts``: the candidates' texts as part of the observation."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from gymnasium.utils import RecordConstructorArgs
from numpy.typing import NDArray

from retrieval_gym.spaces import Utf8Text
from retrieval_gym.wrappers.candidates import num_candidates


class CandidateTexts(gym.Wrapper, RecordConstructorArgs):
    """Add the candidates to the observation, for players that read: a language model, or a person.

    ``observation["candidates"]`` is a tuple with title and text of each candidate, in the order of
    ``info["candidates"]``, so that action ``a`` picks ``observation["candidates"][a]``. Padding is left out. A pool's
    passages stay in the tuple after they are picked; the list of ``TopKCandidates`` changes from state to state.

    Args:
        env: a ``ChainRetrievalEnv`` with pools, or ``TopKCandidates``, wrapped or not.

    Raises:
        ValueError: when the environment lists no candidates: a whole corpus is too large to observe.
    """

    observes_candidates = True

    def __init__(self, env: gym.Env) -> None:
        RecordConstructorArgs.__init__(self)
        gym.Wrapper.__init__(self, env)
        self._corpus = env.get_wrapper_attr("dataset").corpus
        if num_candidates(env) is None:
            raise ValueError(
                f"CandidateTexts needs questions with pools, but {env} picks from a whole corpus of "
                f"{len(self._corpus)} passages: use an environment with pools, or wrap it in TopKCandidates first"
            )
        if not isinstance(env.observation_space, spaces.Dict):
            raise ValueError(f"CandidateTexts needs a Dict observation, got {env.observation_space}")
        self.observation_space = spaces.Dict(
            {**env.observation_space.spaces, "candidates": spaces.Sequence(Utf8Text())}
        )
        self._ids = np.zeros(0, np.int64)
        self._candidates: tuple[str, ...] = ()

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Begin an episode."""
        observation, info = self.env.reset(seed=seed, options=options)
        return {**observation, "candidates": self._look_up(info["candidates"])}, info

    def step(self, action: Any) -> tuple[dict[str, Any], Any, bool, bool, dict[str, Any]]:
        """Pick one passage."""
        observation, reward, terminated, truncated, info = self.env.step(action)
        candidates = self._look_up(info["candidates"])
        return {**observation, "candidates": candidates}, reward, terminated, truncated, info

    def _look_up(self, ids: NDArray[np.int64]) -> tuple[str, ...]:
        if not np.array_equal(ids, self._ids):
            self._ids, self._candidates = ids.copy(), tuple(self._corpus.texts(ids[ids >= 0]))
        return self._candidates
