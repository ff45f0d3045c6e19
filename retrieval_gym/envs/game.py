"""The rules of the game and what a player sees of it, for a batch of episodes.

The single environment is a batch of one, the vector environment a batch of many: everything that the two must agree on
is here, and every transition comes from ``retrieval_gym.mdp``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from retrieval_gym import mdp
from retrieval_gym.datasets import RetrievalDataset, load_dataset
from retrieval_gym.mdp import Bools, Ids
from retrieval_gym.rewards import Reward, get_reward
from retrieval_gym.spaces import Utf8Text

OBSERVATIONS = ("text", "ids")


@dataclass(frozen=True)
class Episodes:
    """B episodes under way.

    Attributes:
        states: the states; ``picked`` holds corpus ids.
        picked: the same picks as actions, int64 ``(B, T)``, -1 past the end.
        invalid_action: whether the last action picked nothing, bool ``(B,)``.
        gold_found: number of gold passages picked, int64 ``(B,)``.
        complete: whether all of them are, bool ``(B,)``.
        questions: the questions' texts, an object array ``(B,)`` of str; None when ids are observed.
        passages: the picked passages' texts, an object array ``(B,)`` of tuples; None when ids are observed.
    """

    states: mdp.States
    picked: Ids
    invalid_action: Bools
    gold_found: Ids
    complete: Bools
    questions: NDArray[np.object_] | None
    passages: NDArray[np.object_] | None

    def __len__(self) -> int:
        return len(self.states)

    def __getitem__(self, rows: NDArray) -> Episodes:
        """Return a copy of these rows."""
        return Episodes(
            self.states[rows],
            self.picked[rows],
            self.invalid_action[rows],
            self.gold_found[rows],
            self.complete[rows],
            None if self.questions is None else self.questions[rows],
            None if self.passages is None else self.passages[rows],
        )

    def put(self, rows: NDArray, other: Episodes) -> None:
        """Overwrite these rows in place."""
        self.states.question[rows] = other.states.question
        self.states.picked[rows] = other.states.picked
        self.states.steps_left[rows] = other.states.steps_left
        self.picked[rows] = other.picked
        self.invalid_action[rows] = other.invalid_action
        self.gold_found[rows] = other.gold_found
        self.complete[rows] = other.complete
        if self.states.pool is not None and other.states.pool is not None:
            self.states.pool[rows] = other.states.pool
        if self.questions is not None and self.passages is not None:
            self.questions[rows] = other.questions
            self.passages[rows] = other.passages


class Game:
    """Dataset, budget, reward and views; ``ChainRetrievalEnv`` documents the arguments.

    Attributes:
        dataset: what is asked and what can be picked.
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
        self._reward = get_reward(reward)
        self.dataset = _resolve_dataset(dataset, split, path, dataset_options)
        self.stop_when_complete = bool(stop_when_complete)
        self._num_gold = (self.dataset.gold >= 0).sum(axis=1)
        if not allow_unreachable:
            self._check_reachable()
        self._texts = observation == "text"
        self._pools = self._pool_table()
        max_pool = self.dataset.max_pool
        self.in_pools = max_pool is not None
        self.num_actions = len(self.dataset.corpus) if max_pool is None else max_pool
        self.action_space = spaces.Discrete(self.num_actions)
        self.observation_space = self._observation_space()

    def _check_reachable(self) -> None:
        most = int(self._num_gold.argmax())
        if self._num_gold[most] > self.max_steps:
            raise ValueError(
                f"question {self.dataset.questions[most].id!r} has {self._num_gold[most]} gold passages, but an "
                f"episode has max_steps={self.max_steps}: raise max_steps to {self._num_gold[most]}, or pass "
                "allow_unreachable=True to keep questions that cannot be completed"
            )

    def _pool_table(self) -> Ids | None:
        """All pools in one array, unless the dataset has none or makes a pool anew for each episode."""
        pools, width = self.dataset.pools, self.dataset.max_pool
        if pools is None or width is None or type(self.dataset).pool is not RetrievalDataset.pool:
            return None
        return mdp.pad_pools(list(pools), width)

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
            ValueError: when the value is no index of a question or another option is given.
        """
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

    def start(self, rngs: list[np.random.Generator], questions: Ids | None = None) -> Episodes:
        """Begin one episode for each generator, about ``questions`` or about ones drawn uniformly.

        A row's question, and its pool where the dataset makes it anew, come from the row's own generator.
        """
        size = len(rngs)
        if questions is None:
            # One float a row: several times faster than Generator.integers, and u * n < n holds for every u < 1.
            uniform = np.fromiter((rng.random() for rng in rngs), np.float64, size)
            questions = (uniform * len(self.dataset)).astype(np.int64)
        texts = passages = None
        if self._texts:
            texts = _object_array([self.dataset.questions[i].text for i in questions.tolist()])
            passages = _object_array([()] * size)
        return Episodes(
            states=mdp.initial_states(questions, self._draw_pools(rngs, questions), self.max_steps),
            picked=np.full((size, self.max_steps), -1, np.int64),
            invalid_action=np.zeros(size, bool),
            gold_found=np.zeros(size, np.int64),
            complete=np.zeros(size, bool),
            questions=texts,
            passages=passages,
        )

    def _draw_pools(self, rngs: list[np.random.Generator], questions: Ids) -> Ids | None:
        if self._pools is not None:
            return self._pools[questions]
        if not self.in_pools:
            return None
        drawn = [self.dataset.pool(i, rng) for i, rng in zip(questions.tolist(), rngs, strict=True)]
        return mdp.pad_pools([pool for pool in drawn if pool is not None], self.num_actions)

    def check_actions(self, actions: NDArray, space: spaces.Space) -> None:
        """Raise a ValueError that names the first action outside ``space``, whose rows have ``num_actions`` actions."""
        outside = (actions < 0) | (actions >= self.num_actions)
        if outside.any():
            raise ValueError(f"action {actions[outside][0]} is outside {space}: take 0 to {self.num_actions - 1}")

    def step(self, episodes: Episodes, actions: Ids) -> tuple[Episodes, NDArray[np.float64], Bools]:
        """Take one action a row.

        Args:
            episodes: none of which has ended; left unchanged, though the result shares their questions and pools.
            actions: int64 ``(B,)``, inside the action space.

        Returns:
            The episodes after the step, the rewards float64 ``(B,)`` and whether each episode has ended, bool ``(B,)``.

        Raises:
            ValueError: when the reward function does not return one number a row.
        """
        before = episodes.states
        ids = mdp.action_ids(before, actions)
        legal = mdp.is_legal(before, ids)
        picks = np.where(legal, ids, -1)
        rewards = np.asarray(self._reward(before, picks, self.dataset), np.float64)
        if rewards.shape != legal.shape:
            raise ValueError(f"the reward function returned shape {rewards.shape} for {len(legal)} states")
        states = mdp.step(before, picks)
        rows = np.flatnonzero(legal)
        picked = episodes.picked.copy()
        picked[rows, before.count[rows]] = actions[rows]
        gold_found = mdp.found_gold(states, self.dataset).sum(axis=1)
        complete = gold_found == self._num_gold[states.question]
        passages = episodes.passages
        if passages is not None:
            passages = passages.copy()
            for row, text in zip(rows.tolist(), self.dataset.corpus.texts(picks[rows]), strict=True):
                passages[row] += (text,)
        after = Episodes(states, picked, ~legal, gold_found, complete, episodes.questions, passages)
        ended = states.steps_left == 0
        if self.stop_when_complete:
            ended |= complete
        return after, rewards, ended

    def save(self, episodes: Episodes) -> dict[str, Any]:
        """Return episodes as plain numbers and lists, for ``restore``."""
        states = episodes.states
        saved = {
            "question": states.question.tolist(),
            "picked": episodes.picked.tolist(),
            "steps_left": states.steps_left.tolist(),
            "invalid_action": episodes.invalid_action.tolist(),
        }
        if self.in_pools and self._pools is None:
            assert states.pool is not None
            saved["pool"] = states.pool.tolist()
        return saved

    def restore(self, saved: Mapping[str, Any]) -> Episodes:
        """Return the episodes that ``save`` returned.

        Raises:
            ValueError: when they are of another dataset or budget.
        """
        questions, picked = np.array(saved["question"], np.int64), np.array(saved["picked"], np.int64)
        if (
            picked.shape[1] != self.max_steps
            or questions.max() >= len(self.dataset)
            or picked.max() >= self.num_actions
        ):
            raise ValueError(
                f"the saved episodes have budget {picked.shape[1]}, questions up to {questions.max()} and actions "
                f"up to {picked.max()}; here are {self.max_steps}, {len(self.dataset) - 1} and {self.num_actions - 1}: "
                "go on with the dataset and the budget that they were saved with"
            )
        pool = np.array(saved["pool"], np.int64) if "pool" in saved else self._draw_pools([], questions)
        states = mdp.initial_states(questions, pool, self.max_steps)
        ids = picked if pool is None else np.take_along_axis(pool, np.maximum(picked, 0), axis=1)
        states.picked[:] = np.where(picked >= 0, ids, -1)
        states.steps_left[:] = saved["steps_left"]
        found = mdp.found_gold(states, self.dataset).sum(axis=1)
        texts = passages = None
        if self._texts:
            texts = _object_array([self.dataset.questions[i].text for i in questions.tolist()])
            passages = _object_array([tuple(self.dataset.corpus.texts(row[row >= 0])) for row in states.picked])
        return Episodes(
            states=states,
            picked=picked,
            invalid_action=np.array(saved["invalid_action"], bool),
            gold_found=found,
            complete=found == self._num_gold[questions],
            questions=texts,
            passages=passages,
        )

    def observations(self, episodes: Episodes) -> dict[str, Any]:
        """Return one batch of observations, an element of the batched observation space, sharing no memory."""
        states = episodes.states
        steps_left = states.steps_left.copy()
        if episodes.questions is None or episodes.passages is None:
            return {"picked": episodes.picked.copy(), "question": states.question.copy(), "steps_left": steps_left}
        return {
            "passages": tuple(episodes.passages.tolist()),
            "picked": episodes.picked.copy(),
            "question": tuple(episodes.questions.tolist()),
            "steps_left": steps_left,
        }

    def infos(self, episodes: Episodes) -> dict[str, NDArray]:
        """Return the values of ``info``, one row an episode, sharing no memory."""
        states = episodes.states
        infos: dict[str, NDArray] = {
            "question_index": states.question.copy(),
            "gold_found": episodes.gold_found.copy(),
            "complete": episodes.complete.copy(),
            "invalid_action": episodes.invalid_action.copy(),
        }
        if states.pool is not None:
            infos["candidates"] = states.pool.copy()
            infos["action_mask"] = self.action_masks(episodes).view(np.int8)
        return infos

    def action_masks(self, episodes: Episodes) -> Bools:
        """Say which actions pick a passage, bool ``(B, num_actions)``."""
        return mdp.action_mask(episodes.states, self.num_actions)


def split_observations(batch: Mapping[str, Iterable]) -> list[dict[str, Any]]:
    """Return one observation dictionary a row of a batch."""
    return [dict(zip(batch, values, strict=True)) for values in zip(*batch.values(), strict=True)]


def single_info(batch: Mapping[str, NDArray]) -> dict[str, Any]:
    """Return the info of a batch of one: numbers as Python's own, rows as arrays."""
    return {key: values[0] if values.ndim > 1 else values[0].item() for key, values in batch.items()}


def copy_states(states: mdp.States) -> mdp.States:
    """Return states that share no memory with ``states``."""
    return states[np.arange(len(states))]


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
