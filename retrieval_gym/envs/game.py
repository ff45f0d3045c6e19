"""The rules of the game and what a player sees of it, for a batch of episodes.

The single environment is a batch of one, the vector environment a batch of many: everything that the two must agree on
is here, and every transition comes from ``retrieval_gym.mdp``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
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
        self._reward = get_reward(reward, stop_when_complete=bool(stop_when_complete))
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
            ValueError: when the reward function does not return one finite number a row.
        """
        before = episodes.states
        ids = mdp.action_ids(before, actions)
        legal = mdp.is_legal(before, ids)
        picks = np.where(legal, ids, -1)
        rewards = np.asarray(self._reward(before, picks, self.dataset), np.float64)
        if rewards.shape != legal.shape:
            raise ValueError(f"the reward function returned shape {rewards.shape} for {len(legal)} states")
        if not np.isfinite(rewards).all():
            bad = rewards[~np.isfinite(rewards)][0]
            raise ValueError(f"the reward function returned {bad}: every reward must be a finite number")
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
        return after, rewards, self.has_ended(after)

    def has_ended(self, episodes: Episodes) -> Bools:
        """Say which episodes are over, bool ``(B,)``."""
        over = episodes.states.steps_left == 0
        return over | episodes.complete if self.stop_when_complete else over

    @cached_property
    def _identity(self) -> dict[str, Any]:
        """What saved episodes must share with the game that goes on with them."""
        return {
            "budget": self.max_steps,
            "number of questions": len(self.dataset),
            "fingerprint": self.dataset.fingerprint,
        }

    def save(self, episodes: Episodes) -> dict[str, Any]:
        """Return episodes as plain numbers and lists, for ``restore``."""
        states = episodes.states
        saved = {
            "of": dict(self._identity),
            "question": states.question.tolist(),
            "picked": episodes.picked.tolist(),
            "steps_left": states.steps_left.tolist(),
            "invalid_action": episodes.invalid_action.tolist(),
        }
        if self.in_pools and self._pools is None:
            assert states.pool is not None
            saved["pool"] = states.pool.tolist()
        return saved

    def restore(self, saved: Mapping[str, Any], rows: int) -> Episodes:
        """Return the ``rows`` episodes that ``save`` returned.

        Raises:
            ValueError: when they are of another dataset or budget, or are not what ``save`` returns.
        """
        pool_saved = self.in_pools and self._pools is None
        check_keys(
            saved, ("of", "question", "picked", "steps_left", "invalid_action") + ("pool",) * pool_saved, "episodes"
        )
        for name, here in self._identity.items():
            there = saved["of"].get(name) if isinstance(saved["of"], Mapping) else None
            if there != here:
                raise ValueError(
                    f"the saved episodes have {name} {there}, here is {here}: go on with the dataset and the budget "
                    "that they were saved with"
                )
        questions = _whole_numbers(saved, "question", (rows,), 0, len(self.dataset) - 1)
        picked = _whole_numbers(saved, "picked", (rows, self.max_steps), -1, self.num_actions - 1)
        steps_left = _whole_numbers(saved, "steps_left", (rows,), 0, self.max_steps)
        invalid_action = check_bools(saved["invalid_action"], "invalid_action", rows)
        pool = None if pool_saved else self._draw_pools([], questions)
        if pool_saved:
            pool = _whole_numbers(saved, "pool", (rows, self.num_actions), -1, len(self.dataset.corpus) - 1)
        states = mdp.initial_states(questions, pool, self.max_steps)
        for actions in picked.T:
            states = mdp.step(states, np.where(actions >= 0, mdp.action_ids(states, actions), -1))
        # The picks of an episode are distinct candidates, stand first in their row, and each took a step.
        played = ((states.picked >= 0) == (picked >= 0)).all(axis=1) & (states.count <= self.max_steps - steps_left)
        if not played.all():
            row = int(played.argmin())
            raise ValueError(
                f"the saved episodes have picks {picked[row].tolist()} with {steps_left[row]} steps left in row {row}, "
                "which no episode has: the state is damaged, take another"
            )
        states = replace(states, steps_left=steps_left)
        found = mdp.found_gold(states, self.dataset).sum(axis=1)
        texts = passages = None
        if self._texts:
            texts = _object_array([self.dataset.questions[i].text for i in questions.tolist()])
            passages = _object_array([tuple(self.dataset.corpus.texts(row[row >= 0])) for row in states.picked])
        return Episodes(
            states=states,
            picked=picked,
            invalid_action=invalid_action,
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


def check_options(options: object) -> None:
    """Raise a TypeError unless the options of ``reset`` are a mapping or None."""
    if options is not None and not isinstance(options, Mapping):
        raise TypeError(f"options must be a dictionary such as {{'question': 0}} or None, got {options!r}")


def check_keys(saved: object, keys: Iterable[str], name: str) -> None:
    """Raise a ValueError unless ``saved`` is a mapping with these keys."""
    missing = [key for key in keys if not isinstance(saved, Mapping) or key not in saved]
    if missing:
        raise ValueError(f"{name} of the saved state lacks {missing[0]!r}: give what get_state() returned")


def check_bools(values: Any, name: str, rows: int) -> Bools:
    """Return saved values as bool ``(rows,)``.

    Raises:
        ValueError: when they are anything else.
    """
    if not isinstance(values, list) or len(values) != rows or not all(isinstance(value, bool) for value in values):
        raise ValueError(f"{name!r} of the saved state must be {rows} bools, got {values!r:.80}")
    return np.array(values, bool)


def _whole_numbers(saved: Mapping[str, Any], name: str, shape: tuple[int, ...], low: int, high: int) -> Ids:
    try:
        values = np.array(saved[name])
    except ValueError as error:
        raise ValueError(f"{name!r} of the saved state is no array of shape {shape}: {error}") from error
    if values.shape != shape or values.dtype.kind not in "iu":
        raise ValueError(f"{name!r} of the saved state must be whole numbers of shape {shape}, got {saved[name]!r:.80}")
    outside = (values < low) | (values > high)
    if outside.any():
        raise ValueError(f"{name!r} of the saved state must lie between {low} and {high}, got {values[outside][0]}")
    return values.astype(np.int64)


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
