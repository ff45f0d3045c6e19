"""The rules of the game and what a player sees of it, for a batch of episodes.

The single environment is a batch of one, the vector environment a batch of many: everything that the two must agree on
is here, and every transition comes from ``retrieval_gym.mdp``.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from retrieval_gym import mdp
from retrieval_gym.datasets import RetrievalDataset, load_dataset
from retrieval_gym.envs.episodes import Episodes, Layout, copy_states
from retrieval_gym.mdp import Bools, Ids
from retrieval_gym.rewards import GoldReward, Reward, get_reward
from retrieval_gym.spaces import Utf8Text

OBSERVATIONS = ("text", "ids")


class Game:
    """Dataset, budget, reward and views; ``ChainRetrievalEnv`` documents the arguments.

    Attributes:
        dataset: what is asked and what can be picked.
        mixes_pools: whether the dataset makes a question's own candidates anew for each episode.
        num_actions: positions in the largest pool, or passages of the corpus.
        observation_space: of one episode.
        action_space: of one episode.
    """

    def __init__(
        self,
        dataset: str | RetrievalDataset,
        split: str,
        path: str | Path | None,
        max_steps: int,
        reward: str | Reward,
        observation: str,
        stop_when_complete: bool,
        allow_unreachable: bool,
        dataset_options: Mapping[str, Any],
    ) -> None:
        self.max_steps = mdp.check_max_steps(max_steps)
        if observation not in OBSERVATIONS:
            raise ValueError(f"unknown observation {observation!r}: choose one of {', '.join(OBSERVATIONS)}")
        for name, flag in (("stop_when_complete", stop_when_complete), ("allow_unreachable", allow_unreachable)):
            if not isinstance(flag, (bool, np.bool_)):
                raise ValueError(f"{name} must be True or False, got {flag!r}")
        self._reward = get_reward(reward, stop_when_complete=bool(stop_when_complete))
        self.dataset = _resolve_dataset(dataset, split, path, dataset_options)
        self.stop_when_complete = bool(stop_when_complete)
        if not allow_unreachable:
            self._check_reachable()
        max_pool = self.dataset.max_pool
        self.num_actions = len(self.dataset.corpus) if max_pool is None else max_pool
        self._texts = observation == "text"
        self._layout = Layout(self.max_steps, max_pool or 0, self.dataset.max_gold, self._texts)
        self.mixes_pools = max_pool is not None and type(self.dataset).pool is not RetrievalDataset.pool
        self._first = None if self.mixes_pools else self._first_episodes()
        self.action_space = spaces.Discrete(self.num_actions)
        self.observation_space = self._observation_space()

    def _check_reachable(self) -> None:
        num_gold = self.dataset.num_gold
        most = int(num_gold.argmax())
        if num_gold[most] > self.max_steps:
            raise ValueError(
                f"question {self.dataset.questions[most].id!r} has {num_gold[most]} gold passages, but an "
                f"episode has max_steps={self.max_steps}: raise max_steps to {num_gold[most]}, or pass "
                "allow_unreachable=True to keep questions that cannot be completed"
            )

    def _first_episodes(self) -> Episodes:
        """Return the episode of each question as it begins, of which others are copies."""
        pools = self.dataset.pools
        table = None if pools is None else mdp.pad_pools(list(pools), self.num_actions)
        return Episodes.fresh(self._layout._replace(texts=False), np.arange(len(self.dataset)), table)

    def _observation_space(self) -> spaces.Dict:
        parts: dict[str, spaces.Space] = {
            "picked": spaces.Box(-1, self.num_actions - 1, (self.max_steps,), np.int64),
            "steps_left": spaces.Discrete(self.max_steps + 1),
        }
        if self._texts:
            parts |= {"passages": spaces.Sequence(Utf8Text()), "question": Utf8Text()}
        else:
            parts["question"] = spaces.Discrete(len(self.dataset))
        return spaces.Dict(parts)

    def question_option(self, options: Mapping[str, Any] | None, rows: int) -> Ids | None:
        """Read ``options["question"]``, one index or one a row: int64 ``(rows,)``, or None when it is not given.

        Raises:
            TypeError: when ``options`` is no mapping.
            ValueError: when the value is no index of a question or another option is given.
        """
        check_options(options)
        unknown = sorted(set(options or ()) - {"question"})
        if unknown:
            raise ValueError(f"unknown reset option {unknown[0]!r}: the environment takes 'question'")
        if not options:
            return None
        value = np.asarray(options["question"])
        if value.dtype.kind not in "iu" or value.shape not in {(), (rows,)}:
            per_row = "" if rows == 1 else f" or an array of {rows} of them"
            raise ValueError(
                f"options['question'] must be the index of a question{per_row}, got {options['question']!r}"
            )
        outside = (value < 0) | (value >= len(self.dataset))
        if outside.any():
            raise ValueError(
                f"options['question'] must lie between 0 and {len(self.dataset) - 1}, got {value[outside].flat[0]}"
            )
        return np.broadcast_to(value, (rows,)).astype(np.int64)

    def start(self, questions: Ids, pool: Ids | None) -> Episodes:
        """Begin one episode for each question, with these candidates; see ``restart``."""
        episodes = Episodes.empty(self._layout, len(questions))
        self.restart(episodes, slice(None), questions, pool)
        return episodes

    def restart(self, episodes: Episodes, rows: NDArray[np.intp] | slice, questions: Ids, pool: Ids | None) -> None:
        """Begin an episode in these rows, in place.

        Args:
            episodes: of this game.
            rows: B of them.
            questions: what is asked, int64 ``(B,)``.
            pool: candidates as ``draw_pools`` returns them; looked at where the dataset makes them anew.
        """
        if self._first is None:
            first = Episodes.fresh(self._layout, questions, pool)
            episodes.numbers[rows], episodes.flags[rows] = first.numbers, first.flags
        else:
            episodes.numbers[rows] = self._first.numbers.take(questions, axis=0)
            episodes.flags[rows] = self._first.flags.take(questions, axis=0)
        if episodes.questions is not None and episodes.passages is not None:
            episodes.questions[rows] = self._question_texts(questions)
            episodes.passages[rows] = _object_array([()] * len(questions))

    def questions_of(self, uniform: NDArray[np.float64]) -> Ids:
        """Return the question that each number drawn uniformly from [0, 1) stands for, int64 ``(B,)``."""
        # Several times faster than Generator.integers, and u * n < n holds for every u < 1.
        return (uniform * len(self.dataset)).astype(np.int64)

    def at(self, states: mdp.States, picked: Ids, invalid_action: Bools) -> Episodes:
        """Return the episodes that stand at ``states``, everything else worked out from them.

        Args:
            states: B states.
            picked: their picks as actions, int64 ``(B, T)``.
            invalid_action: whether the last action picked nothing, bool ``(B,)``.
        """
        episodes = Episodes.fresh(self._layout, states.question, states.pool)
        episodes.states.picked[:], episodes.states.steps_left[:] = states.picked, states.steps_left
        episodes.picked[:], episodes.count[:] = picked, states.count
        episodes.found[:] = mdp.found_gold(states, self.dataset)
        episodes.gold_found[:] = episodes.found.sum(axis=1)
        episodes.complete[:] = episodes.gold_found == self.dataset.num_gold[states.question]
        episodes.invalid_action[:] = invalid_action
        if episodes.mask is not None:
            episodes.mask[:] = mdp.action_mask(states, self.num_actions)
        if episodes.questions is not None and episodes.passages is not None:
            episodes.questions[:] = self._question_texts(states.question)
            texts = [tuple(self.dataset.corpus.texts(row[row >= 0])) for row in states.picked]
            episodes.passages[:] = _object_array(texts)
        return episodes

    def _question_texts(self, questions: Ids) -> NDArray[np.object_]:
        return _object_array([self.dataset.questions[i].text for i in questions.tolist()])

    def draw_pools(self, rngs: list[np.random.Generator], questions: Ids) -> Ids | None:
        """Return the pools of ``questions``, int64 ``(B, P)`` padded with -1; None is the whole corpus.

        ``rngs``, one a question, mix the pools of a dataset that makes them anew, and are not looked at otherwise.
        """
        if self._first is not None:
            pool = self._first.states.pool
            return None if pool is None else pool.take(questions, axis=0)
        drawn = [self.dataset.pool(i, rng) for i, rng in zip(questions.tolist(), rngs, strict=True)]
        return mdp.pad_pools([pool for pool in drawn if pool is not None], self.num_actions)

    def check_actions(self, actions: NDArray, space: spaces.Space) -> None:
        """Raise a ValueError that names the first action outside ``space``, whose rows have ``num_actions`` actions."""
        unsigned = actions.astype(np.uint64)  # negative ones become the largest
        if unsigned.size and unsigned.max() >= self.num_actions:
            action = actions[unsigned >= self.num_actions][0]
            raise ValueError(f"action {action} is outside {space}: take 0 to {self.num_actions - 1}")

    def step(self, episodes: Episodes, actions: Ids) -> tuple[NDArray[np.float64], Bools]:
        """Take one action a row; the episodes change in place, unless an error is raised.

        Args:
            episodes: none of which has ended.
            actions: int64 ``(B,)``, inside the action space.

        Returns:
            The rewards float64 ``(B,)`` and whether each episode has ended, bool ``(B,)``.

        Raises:
            ValueError: when the reward function does not return one finite number a row.
        """
        states, rows = episodes.states, np.arange(len(actions))
        ids = mdp.action_ids(states, actions)
        legal = mdp.is_legal(states, ids) if episodes.mask is None else episodes.mask[rows, actions]
        picks = np.where(legal, ids, -1)
        found = episodes.found | mdp.is_gold(states.question, picks, self.dataset)
        gold_found, num_gold = found.sum(axis=1), self.dataset.num_gold[states.question]
        if isinstance(self._reward, GoldReward):
            rewards = self._reward.pay(episodes.gold_found, gold_found, num_gold, episodes.count).astype(np.float64)
        else:
            rewards = self._checked_reward(states, picks)

        mdp.advance(states, picks, episodes.count)
        episodes.picked[rows, episodes.count] = np.where(legal, actions, -1)
        if episodes.mask is not None:
            episodes.mask[rows, actions] = False
        if episodes.passages is not None:
            for row in np.flatnonzero(legal).tolist():
                episodes.passages[row] += (str(self.dataset.corpus[int(picks[row])]),)
        np.add(episodes.count, legal, out=episodes.count)
        np.logical_not(legal, out=episodes.invalid_action)
        np.equal(gold_found, num_gold, out=episodes.complete)
        episodes.found[:], episodes.gold_found[:] = found, gold_found
        return rewards, self.has_ended(episodes)

    def _checked_reward(self, states: mdp.States, picks: Ids) -> NDArray[np.float64]:
        rewards = np.asarray(self._reward(copy_states(states), picks, self.dataset), np.float64)
        if rewards.shape != picks.shape:
            raise ValueError(f"the reward function returned shape {rewards.shape} for {len(picks)} states")
        if not np.isfinite(rewards).all():
            bad = rewards[~np.isfinite(rewards)][0]
            raise ValueError(f"the reward function returned {bad}: every reward must be a finite number")
        return rewards

    def has_ended(self, episodes: Episodes) -> Bools:
        """Say which episodes are over, bool ``(B,)``."""
        over = episodes.states.steps_left == 0
        return over | episodes.complete if self.stop_when_complete else over

    def observations(self, episodes: Episodes, rows: NDArray | None = None) -> dict[str, Any]:
        """Return one batch of observations, an element of the batched observation space, sharing no memory.

        Args:
            episodes: what is observed.
            rows: which of them; None is all.
        """
        states = episodes.states

        def taken(values: NDArray) -> NDArray:
            return values.copy() if rows is None else values[rows]

        if episodes.questions is None or episodes.passages is None:
            return {
                "picked": taken(episodes.picked),
                "question": taken(states.question),
                "steps_left": taken(states.steps_left),
            }
        return {
            "passages": tuple(taken(episodes.passages).tolist()),
            "picked": taken(episodes.picked),
            "question": tuple(taken(episodes.questions).tolist()),
            "steps_left": taken(states.steps_left),
        }

    def infos(self, episodes: Episodes) -> dict[str, NDArray]:
        """Return the values of ``info``, one row an episode: views of ``episodes``, which change with it."""
        infos: dict[str, NDArray] = {
            "question_index": episodes.states.question,
            "gold_found": episodes.gold_found,
            "complete": episodes.complete,
            "invalid_action": episodes.invalid_action,
        }
        if episodes.states.pool is not None and episodes.mask is not None:
            infos["candidates"] = episodes.states.pool
            infos["action_mask"] = episodes.mask.view(np.int8)
        return infos

    def action_masks(self, episodes: Episodes) -> Bools:
        """Say which actions pick a passage, bool ``(B, num_actions)``, sharing no memory."""
        if episodes.mask is not None:
            return episodes.mask.copy()
        return mdp.action_mask(episodes.states, self.num_actions)


def check_options(options: object) -> None:
    """Raise a TypeError unless the options of ``reset`` are a mapping or None."""
    if options is not None and not isinstance(options, Mapping):
        raise TypeError(f"options must be a dictionary such as {{'question': 0}} or None, got {options!r}")


def _object_array(values: list[Any]) -> NDArray[np.object_]:
    return np.fromiter(values, object, len(values))


def _resolve_dataset(
    dataset: str | RetrievalDataset, split: str, path: str | Path | None, options: Mapping[str, Any]
) -> RetrievalDataset:
    if isinstance(dataset, RetrievalDataset):
        given = ["path"] * (path is not None) + sorted(options)
        if given:
            raise ValueError(f"{given[0]!r} is an option of load_dataset, but dataset is already a RetrievalDataset")
        return dataset
    if not isinstance(dataset, str):
        raise ValueError(f"dataset must be a name that load_dataset takes or a RetrievalDataset, got {dataset!r}")
    return load_dataset(dataset, split, path, **options)
