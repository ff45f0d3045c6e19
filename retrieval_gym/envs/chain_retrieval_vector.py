"""Many episodes of multi-step retrieval at once, in whole-array operations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.utils import seeding
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space
from numpy.typing import NDArray

from retrieval_gym import mdp
from retrieval_gym.datasets import RetrievalDataset
from retrieval_gym.envs.chain_retrieval import ChainRetrievalEnv
from retrieval_gym.envs.draws import RowDraws
from retrieval_gym.envs.episodes import Episodes, copy_states, split_observations
from retrieval_gym.envs.game import Game, check_options
from retrieval_gym.envs.saving import check_bools, check_keys, restore_episodes, save_episodes
from retrieval_gym.mdp import Bools, Ids
from retrieval_gym.rendering import transcript, use_colour
from retrieval_gym.rewards import Reward


class ChainRetrievalVectorEnv(VectorEnv[dict[str, Any], NDArray[np.int64], NDArray]):
    """``num_envs`` episodes of ``ChainRetrievalEnv``, stepped together; ``gym.make_vec`` makes this one.

    It returns what ``gymnasium.vector.SyncVectorEnv`` over as many single environments returns, dtypes and info masks
    included, and is many times faster. Differences: the questions of single rows can be chosen,
    ``reset(options={"question": array})`` with one index a row; ``reset`` leaves the ``options`` it is given as they
    were; all actions are checked before any row moves.

    Args:
        num_envs: number of rows.
        autoreset_mode: what follows an episode's end, as in Gymnasium. SAME_STEP (default) resets within the step that
            ends an episode and gives the last observation and info in ``infos["final_obs"]`` and
            ``infos["final_info"]``; NEXT_STEP spends the following step on the reset, which wastes one row in
            ``max_steps + 1``; DISABLED waits for ``reset(options={"reset_mask": bool array})``.
        dataset: this and all further arguments are those of ``ChainRetrievalEnv``.

    Attributes:
        num_envs: number of rows.
        single_observation_space: of one row.
        single_action_space: of one row.

    Raises:
        ValueError: when an argument is out of range or unknown.
        FileNotFoundError: when the data are nowhere.
    """

    metadata: dict[str, Any] = dict(ChainRetrievalEnv.metadata)

    def __init__(
        self,
        num_envs: int,
        dataset: str | RetrievalDataset,
        split: str = "train",
        path: str | Path | None = None,
        max_steps: int = 4,
        reward: str | Reward = "complete",
        observation: str = "text",
        stop_when_complete: bool = True,
        render_mode: str | None = None,
        allow_unreachable: bool = False,
        autoreset_mode: str | AutoresetMode = AutoresetMode.SAME_STEP,
        **dataset_options: Any,
    ) -> None:
        if isinstance(num_envs, bool) or not isinstance(num_envs, (int, np.integer)) or num_envs < 1:
            raise ValueError(f"num_envs must be a whole number of at least 1, got {num_envs!r}")
        if render_mode is not None and render_mode not in self.metadata["render_modes"]:
            raise ValueError(f"unknown render_mode {render_mode!r}: choose one of human, ansi, or None")
        self.autoreset_mode = AutoresetMode(autoreset_mode)
        self.metadata = {**self.metadata, "autoreset_mode": self.autoreset_mode}
        self._game = Game(
            dataset, split, path, max_steps, reward, observation, stop_when_complete, allow_unreachable, dataset_options
        )
        self.num_envs = int(num_envs)
        self.render_mode = render_mode
        self.single_action_space = self._game.action_space
        self.single_observation_space = self._game.observation_space
        self.action_space = batch_space(self.single_action_space, self.num_envs)
        self.observation_space = batch_space(self.single_observation_space, self.num_envs)
        self._draws = RowDraws(self.num_envs)
        self._episodes: Episodes | None = None
        self._info_views: dict[str, NDArray] = {}  # of the episodes, which change in place
        self._ended = np.zeros(self.num_envs, bool)

    @property
    def dataset(self) -> RetrievalDataset:
        """What is asked and what can be picked."""
        return self._game.dataset

    @property
    def max_steps(self) -> int:
        """The budget T of an episode."""
        return self._game.max_steps

    @property
    def states(self) -> mdp.States:
        """A copy of all rows' states, which is what a retriever searches from."""
        return copy_states(self._current().states)

    @property  # type: ignore[misc]
    def np_random(self) -> tuple[np.random.Generator, ...]:  # type: ignore[override]
        """The rows' random generators."""
        return self._draws.lend()

    @property
    def np_random_seed(self) -> tuple[int, ...]:  # type: ignore[override]
        """The seeds of the rows' random generators."""
        return self._draws.seeds

    def _next_questions(self, rows: NDArray[np.intp], questions: Ids | None) -> tuple[Ids, Ids | None]:
        """Draw what begins in these rows, each from its own generator: questions where none are given, and pools."""
        game = self._game
        rngs = self._draws.generators(rows) if game.mixes_pools else []
        if questions is None:
            drawn = np.array([rng.random() for rng in rngs]) if rngs else self._draws.uniform(rows)
            questions = game.questions_of(drawn)
        return questions, game.draw_pools(rngs, questions) if game.mixes_pools else None

    def _current(self) -> Episodes:
        if self._episodes is None:
            raise gym.error.ResetNeeded("no episode has begun: call reset() first")
        return self._episodes

    def _play(self, episodes: Episodes) -> None:
        self._episodes, self._info_views = episodes, self._game.infos(episodes)

    def reset(
        self, *, seed: int | Sequence[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Begin an episode in every row, or in those of ``options["reset_mask"]``.

        Args:
            seed: an int seeds row i with ``seed + i``; a list has one seed, or None, a row; None continues each row's
                generator.
            options: ``"question"``, the index of a question for all rows or an array with one a row;
                ``"reset_mask"``, bool ``(num_envs,)``, the rows to reset (the others' infos read 0).

        Returns:
            The observations of all rows, and the infos of those that were reset.

        Raises:
            TypeError: when ``options`` is no dictionary.
            ValueError: when an option, a seed or the number of seeds is wrong.
        """
        check_options(options)
        options = dict(options or {})
        rows = self._rows_to_reset(options.pop("reset_mask", None))
        questions = self._game.question_option(options, self.num_envs)
        seeds = self._row_seeds(seed)
        for row in rows.tolist():
            row_seed = seeds[row]
            if row_seed is not None:
                self._draws.seed(row, row_seed)
        fresh = self._game.start(*self._next_questions(rows, None if questions is None else questions[rows]))
        if self._episodes is None:
            self._play(fresh)
        else:
            self._episodes.put(rows, fresh)
        self._ended[rows] = False
        if self.render_mode == "human":
            self.render()
        reset = np.zeros(self.num_envs, bool)
        reset[rows] = True
        return self._game.observations(self._current()), self._infos(reset)

    def _row_seeds(self, seed: int | Sequence[int | None] | None) -> Sequence[int | None]:
        if seed is None:
            return [None] * self.num_envs
        seeds = range(int(seed), int(seed) + self.num_envs) if isinstance(seed, (int, np.integer)) else seed
        if not isinstance(seeds, (Sequence, np.ndarray)) or isinstance(seeds, str):
            raise ValueError(f"seed must be a whole number, a list of one a row, or None, got {seed!r}")
        if len(seeds) != self.num_envs:
            raise ValueError(f"a list of seeds needs one a row: num_envs is {self.num_envs}, got {len(seeds)} seeds")
        for each in seeds:
            if each is not None and (not isinstance(each, (int, np.integer)) or each < 0):
                raise ValueError(f"seed must hold whole numbers of at least 0, or None, got {each!r}")
        return seeds

    def _rows_to_reset(self, mask: Any) -> NDArray[np.int64]:
        if mask is None:
            return np.arange(self.num_envs)
        if not isinstance(mask, np.ndarray) or mask.dtype != np.bool_ or mask.shape != (self.num_envs,):
            raise ValueError(f"options['reset_mask'] must be a bool array of shape ({self.num_envs},), got {mask!r}")
        if not mask.any():
            raise ValueError("options['reset_mask'] selects no row: set it True where an episode shall begin")
        if self._episodes is None and not mask.all():
            raise gym.error.ResetNeeded("the first reset() must begin an episode in every row: leave 'reset_mask' out")
        return np.flatnonzero(mask)

    def step(
        self, actions: NDArray[np.int64]
    ) -> tuple[dict[str, Any], NDArray[np.float64], NDArray[np.bool_], NDArray[np.bool_], dict[str, Any]]:
        """Take one action a row.

        Args:
            actions: whole numbers ``(num_envs,)``; in NEXT_STEP mode those of rows that reset are not looked at.

        Returns:
            Observations, rewards float64, terminations bool, truncations bool (all False), each one a row, and infos.

        Raises:
            ValueError: when an action is outside the action space.
            gymnasium.error.ResetNeeded: before the first reset, or when an ended row was not reset in DISABLED mode.
        """
        episodes = self._current()
        actions = np.asarray(actions)
        if actions.dtype.kind not in "iu" or actions.shape != (self.num_envs,):
            raise ValueError(f"actions must be {self.num_envs} whole numbers, got {actions!r}")
        restart = self._ended.nonzero()[0]
        if not len(restart):
            self._game.check_actions(actions, self.single_action_space)
            rewards, ended = self._game.step(episodes, actions.astype(np.int64))
        elif self.autoreset_mode == AutoresetMode.NEXT_STEP:
            rewards, ended = self._step_or_restart(episodes, actions, restart)
        else:
            raise gym.error.ResetNeeded(
                f"the episodes of rows {restart.tolist()[:8]} have ended: reset them with options['reset_mask']"
            )
        if self.render_mode == "human":
            self._ended = ended
            self.render()
        infos: dict[str, Any] = {}
        if self.autoreset_mode == AutoresetMode.SAME_STEP:
            rows = ended.nonzero()[0]
            if len(rows):
                infos = self._restart(rows, ended)
            self._ended = np.zeros(self.num_envs, bool)
        else:
            self._ended = ended.copy()
        infos |= self._infos(None)
        return self._game.observations(episodes), rewards, ended, np.zeros(self.num_envs, bool), infos

    def lookahead(self, actions: NDArray[np.int64]) -> tuple[mdp.States, NDArray[np.float64], NDArray[np.bool_]]:
        """Say what each of several actions would lead to, as ``step`` would; no episode moves.

        Args:
            actions: whole numbers ``(num_envs, n)``.

        Returns:
            The states that would follow, row by row ``(num_envs * n,)``; rewards float64 ``(num_envs, n)``; and whether
            the episode would end, bool ``(num_envs, n)``.

        Raises:
            ValueError: when an action is outside the action space.
            gymnasium.error.ResetNeeded: before the first reset, or when a row has ended and was not reset.
        """
        episodes, actions = self._current(), np.asarray(actions)
        if actions.dtype.kind not in "iu" or actions.ndim != 2 or len(actions) != self.num_envs:
            raise ValueError(f"actions must be whole numbers of shape ({self.num_envs}, n), got {actions!r}")
        if self._ended.any():
            raise gym.error.ResetNeeded(f"the episodes of rows {np.flatnonzero(self._ended).tolist()[:8]} have ended")
        self._game.check_actions(actions, self.single_action_space)
        rows = np.repeat(np.arange(self.num_envs), actions.shape[1])
        after = episodes[rows]
        rewards, ended = self._game.step(after, actions.astype(np.int64).ravel())
        return after.states, rewards.reshape(actions.shape), ended.reshape(actions.shape)

    def _step_or_restart(
        self, episodes: Episodes, actions: NDArray, restart: NDArray[np.int64]
    ) -> tuple[NDArray[np.float64], Bools]:
        """Begin an episode in the rows ``restart`` and step the others."""
        rewards, ended = np.zeros(self.num_envs), np.zeros(self.num_envs, bool)
        rows = np.flatnonzero(~self._ended)
        if len(rows):
            self._game.check_actions(actions[rows], self.single_action_space)
            stepped = episodes[rows]
            rewards[rows], ended[rows] = self._game.step(stepped, actions[rows].astype(np.int64))
            episodes.put(rows, stepped)
        self._game.restart(episodes, restart, *self._next_questions(restart, None))
        return rewards, ended

    def _restart(self, rows: NDArray[np.intp], ended: Bools) -> dict[str, Any]:
        """Begin an episode in ``rows``, where ``ended`` is True; return their last observations and infos."""
        episodes = self._current()
        last = split_observations(self._game.observations(episodes, rows))
        final_obs = np.empty(self.num_envs, object)  # all None
        final_obs[rows] = np.fromiter(last, object, len(last))
        final_info = self._infos(ended)
        self._game.restart(episodes, rows, *self._next_questions(rows, None))
        return {
            "final_obs": final_obs,
            "_final_obs": ended.copy(),
            "final_info": final_info,
            "_final_info": ended.copy(),
        }

    def _infos(self, rows: Bools | None) -> dict[str, NDArray]:
        """Return the infos of a vector environment: 0 outside ``rows``, a mask (all when None), and it as ``_key``."""
        masks = np.empty((len(self._info_views), self.num_envs), bool)
        masks[:] = True if rows is None else rows
        others = None if rows is None else (~rows).nonzero()[0]
        infos: dict[str, NDArray] = {}
        for (key, values), mask in zip(self._info_views.items(), masks, strict=True):
            infos[key] = values.copy()
            if others is not None:
                infos[key][others] = 0
            infos[f"_{key}"] = mask
        return infos

    def get_state(self) -> dict[str, Any]:
        """Return what ``set_state`` needs to go on from here: plain numbers, strings, lists and dictionaries."""
        return {
            "episodes": save_episodes(self._game, self._current()),
            "ended": self._ended.tolist(),
            "generators": [
                _stringify(rng.bit_generator.state) for rng in self._draws.generators(np.arange(self.num_envs))
            ],
        }

    def set_state(self, state: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Go on from what ``get_state`` of an environment with the same arguments returned.

        Returns:
            The observations and infos that the environment had returned last, without those of ended episodes.

        Raises:
            ValueError: when the state has another number of rows, is of another dataset or budget, or is not what
                ``get_state`` returns; the environment is left as it was.
        """
        check_keys(state, ("episodes", "ended", "generators"), "the whole")
        if len(state["ended"]) != self.num_envs:
            raise ValueError(f"the state has {len(state['ended'])} rows and num_envs is {self.num_envs}: make it equal")
        ended = check_bools(state["ended"], "ended", self.num_envs)
        if len(state["generators"]) != self.num_envs:
            raise ValueError(f"the state has {len(state['generators'])} generators for {self.num_envs} rows")
        generators = [_generator(saved) for saved in state["generators"]]
        episodes = restore_episodes(self._game, state["episodes"], self.num_envs)
        wrong = np.flatnonzero(ended != self._game.has_ended(episodes))
        if len(wrong):
            raise ValueError(
                f"'ended' of the saved state is {ended[wrong[0]]} in row {wrong[0]}, against its episode: go on with "
                "the stop_when_complete that it was saved with"
            )
        self._play(episodes)
        self._ended = ended
        self._draws.restore(generators)
        return self._game.observations(episodes), self._infos(None)

    def action_masks(self) -> NDArray[np.bool_]:
        """Say which actions pick a passage, bool ``(num_envs, n)``."""
        return self._game.action_masks(self._current())

    def render(self) -> tuple[str, ...] | None:  # type: ignore[override]
        """Return (``"ansi"``) or print (``"human"``) one transcript a row."""
        if self.render_mode is None:
            gym.logger.warn('render() does nothing without a render mode: pass render_mode="ansi" or "human"')
            return None
        episodes = self._current()
        human = self.render_mode == "human"
        texts = tuple(
            transcript(episodes.states[[row]], episodes.picked[row], self.dataset, ended, human and use_colour())
            for row, ended in enumerate(self._ended.tolist())
        )
        if human:
            print("\n\n".join(texts), flush=True)
            return None
        return texts


def _stringify(state: Any) -> Any:
    """Write a generator's 128-bit integers as strings, which every file format holds."""
    if isinstance(state, Mapping):
        return {key: _stringify(value) for key, value in state.items()}
    return f"{state:d}" if isinstance(state, int) else state


def _generator(saved: Any) -> np.random.Generator:
    """Return the generator whose state was saved."""
    generator, _ = seeding.np_random(0)
    try:
        generator.bit_generator.state = _unstringify(saved)
    except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
        raise ValueError(f"'generators' of the saved state holds no generator's state, got {saved!r:.80}") from error
    return generator


def _unstringify(state: Any) -> Any:
    if isinstance(state, Mapping):
        return {key: _unstringify(value) for key, value in state.items()}
    return int(state) if state.isdecimal() else state
