"""``TopKCandidates``: a retriever's best passages as the action set."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from gymnasium.utils import RecordConstructorArgs
from numpy.typing import NDArray

from retrieval_gym import mdp
from retrieval_gym.ranking import Retriever
from retrieval_gym.retrieval import make_retriever


class TopKCandidates(gym.Wrapper, RecordConstructorArgs):
    """Let a player choose among the ``k`` passages that a retriever finds for the state, so that any corpus fits.

    At every state the retriever searches, and action ``j`` of ``Discrete(k)`` picks its ``j``-th best passage. What
    ``j`` means changes from state to state, so the observation stays as it is: ``observation["picked"]`` goes on
    holding the actions of the wrapped environment, corpus ids over a corpus.

    A gold passage outside the ``k`` cannot be picked in that state; a later search may find it. ``info`` says how often
    that is so, and both counts, like ``gold_found``, are for logging: a player that reads them sees the answer.

    | key | type | value |
    |---|---|---|
    | `candidates` | int64 `(k,)` | corpus ids, best first, -1 past the end |
    | `action_mask` | int8 `(k,)` | 1 where the action picks a passage |
    | `gold_in_reach` | int | missing gold passages that an action of this state picks |
    | `gold_out_of_reach` | int | missing gold passages that no action of this state picks |

    The list is shorter than ``k`` only where fewer passages are left; actions past its end are invalid, use a step and
    pick nothing. A retriever that finds fewer is filled up with the candidates of lowest id that it left out: all of
    them tie at -inf. With pools, which may be long documents, the retriever ranks the question's own pool.

    Args:
        env: a ``ChainRetrievalEnv`` over a corpus or with pools, wrapped or not; wrappers that observe candidates come
            outside this one.
        k: number of actions.
        retriever: made for the environment's own dataset, or a name for ``retrieval_gym.retrieval.make_retriever``,
            such as ``"bm25"``.

    Raises:
        ValueError: when a wrapper inside observes candidates, ``k`` is not from 1 to the environment's number of
            actions, the retriever was made for another dataset or has no ``search``, the name is unknown, or, in an
            episode, the retriever returns what can't be picked.
        ImportError: when a package that the named retriever needs is not installed.
    """

    def __init__(self, env: gym.Env, k: int, retriever: Retriever | str) -> None:
        RecordConstructorArgs.__init__(self, k=k, retriever=retriever, _disable_deepcopy=True)
        gym.Wrapper.__init__(self, env)
        for name in ("top_k", "observes_candidates"):
            if env.has_wrapper_attr(name) and env.get_wrapper_attr(name):
                raise ValueError(
                    f"{env} observes other candidates or chooses among them: wrap in TopKCandidates once, and first"
                )
        self._dataset = env.get_wrapper_attr("dataset")
        most = len(self._dataset.corpus) if self._dataset.max_pool is None else self._dataset.max_pool
        if isinstance(k, bool) or not isinstance(k, (int, np.integer)) or not 1 <= k <= most:
            raise ValueError(f"k must be a whole number from 1 to {most}, the number of actions of {env}, got {k!r}")
        self.top_k = int(k)
        self.retriever = make_retriever(retriever, self._dataset) if isinstance(retriever, str) else retriever
        if not callable(getattr(self.retriever, "search", None)):
            raise ValueError(f"the retriever is a {type(retriever).__name__}, which has no method search(states, k)")
        made_for = getattr(self.retriever, "dataset", self._dataset)
        if made_for is not self._dataset and made_for.fingerprint != self._dataset.fingerprint:
            raise ValueError(
                f"the retriever was made for {made_for.name!r}, split {made_for.split!r}, but the environment asks "
                f"{self._dataset.name!r}, split {self._dataset.split!r}: make one for env.get_wrapper_attr('dataset')"
            )
        self.action_space = spaces.Discrete(self.top_k)
        self._states: mdp.States | None = None
        self._ids = np.full(self.top_k, -1, np.int64)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Begin an episode and search."""
        observation, info = self.env.reset(seed=seed, options=options)
        return observation, self._search(info)

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Pick the passage at this place of the list and search again.

        Raises:
            ValueError: when ``action`` is outside the action space.
            gymnasium.error.ResetNeeded: when no episode is under way.
        """
        states = self._current()
        if not self.action_space.contains(action):
            raise ValueError(f"action {action!r} is outside {self.action_space}: take a whole number inside it")
        observation, reward, terminated, truncated, info = self.env.step(self._inner_action(states, self._ids[action]))
        return observation, reward, terminated, truncated, self._search(info)

    def action_masks(self) -> NDArray[np.bool_]:
        """Say which actions pick a passage, bool ``(k,)``: the mask that sb3-contrib asks for."""
        self._current()
        return self._ids >= 0

    def _current(self) -> mdp.States:
        if self._states is None:
            raise gym.error.ResetNeeded("no episode has begun: call reset() first")
        return self._states

    def _inner_action(self, states: mdp.States, passage: np.int64) -> np.int64:
        if passage < 0:  # fewer than k passages are left, so one of the inner actions picks nothing either
            return states.picked[0, 0] if states.pool is None else mdp.action_mask(states, 0)[0].argmin()
        return passage if states.pool is None else (states.pool[0] == passage).argmax()

    def _search(self, info: dict[str, Any]) -> dict[str, Any]:
        states: mdp.States = self.env.get_wrapper_attr("states")
        ids = self._checked(states, np.asarray(self.retriever.search(states, self.top_k)[0]))
        self._states, self._ids = states, self._filled(states, ids)
        canonical, gold = self._dataset.corpus.canonical, self._dataset.gold[states.question]
        missing = gold[(gold >= 0) & ~mdp.found_gold(states, self._dataset)]
        in_reach = int(np.isin(missing, canonical[self._ids[self._ids >= 0]]).sum())
        return {
            **info,
            "candidates": self._ids.copy(),
            "action_mask": self.action_masks().astype(np.int8),
            "gold_in_reach": in_reach,
            "gold_out_of_reach": len(missing) - in_reach,
        }

    def _checked(self, states: mdp.States, ids: NDArray) -> NDArray[np.int64]:
        """Return the found ids alone, int64 ``(at most k,)``."""
        if ids.shape != (1, self.top_k) or ids.dtype.kind not in "iu":
            raise ValueError(
                f"the retriever returned {ids.dtype} of shape {ids.shape} for one state and k={self.top_k}: it must "
                f"return whole numbers of shape {(1, self.top_k)}, -1 past the end"
            )
        found = ids[0][ids[0] >= 0].astype(np.int64)
        allowed = found < len(self._dataset.corpus) if states.pool is None else np.isin(found, states.pool)
        bad = found[~allowed | np.isin(found, states.picked)]
        if len(bad):
            raise ValueError(
                f"the retriever returned passage {bad[0]} for question {states.question[0]}, which is picked already "
                "or is no candidate: search() must leave such passages out"
            )
        if len(np.unique(found)) < len(found):
            raise ValueError(f"the retriever returned a passage twice for question {states.question[0]}: {found}")
        return found

    def _filled(self, states: mdp.States, found: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return int64 ``(k,)``: what was found, then the lowest ids that can be picked, then -1."""
        ids = np.full(self.top_k, -1, np.int64)
        ids[: len(found)] = found
        if len(found) < self.top_k:
            mask = mdp.action_mask(states, len(self._dataset.corpus))[0]
            legal = np.flatnonzero(mask) if states.pool is None else np.sort(states.pool[0][mask])
            rest = np.setdiff1d(legal, found)[: self.top_k - len(found)]
            ids[len(found) : len(found) + len(rest)] = rest
        return ids
