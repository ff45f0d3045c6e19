"""Multi-step retrieval as a Gymnasium environment, one episode at a time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

from retrieval_gym import mdp
from retrieval_gym.datasets import RetrievalDataset
from retrieval_gym.envs.episodes import Episodes, copy_states, single_info, split_observations
from retrieval_gym.envs.game import Game
from retrieval_gym.rendering import budget_line, ending_lines, pick_lines, question_line, transcript, use_colour
from retrieval_gym.rewards import Reward


class ChainRetrievalEnv(gym.Env[dict[str, Any], np.int64]):
    """Pick, one at a time, the passages that together answer a question.

    ## Description
    A question needs one or more gold passages. The player sees the question and the passages picked so far, and picks
    one more from the question's own candidates (*pool*) or from a whole corpus (*corpus*), until every gold passage is
    found or the budget is spent. What to look for second often stands in the passage found first. States, actions and
    the sparse reward follow Q-RAG (section 3).

    ## Action Space
    `Discrete(n)`. With pools, `n` is the size of the dataset's largest pool and action `a` picks the passage at
    position `a` of the question's pool, in document order. Without, `n` is the number of passages of the corpus and
    the action is the passage's id.

    An action that picks nothing new (a passage picked before, or a position past the end of a smaller pool) is
    invalid but defined: it uses a step, leaves the picks as they are, pays nothing (but for `"answer:READER"`,
    which pays at the end of an episode whatever its last action was) and sets `info["invalid_action"]`.
    An action outside the space raises a `ValueError`.

    ## Observation Space
    A `Dict`. `observation="text"` (default):

    | key | space | value |
    |---|---|---|
    | `question` | `Utf8Text()` | the question |
    | `passages` | `Sequence(Utf8Text())` | title and text of the picked passages, in pick order |
    | `picked` | `Box(-1, n - 1, (max_steps,), int64)` | the picks as actions, in pick order, -1 past the end |
    | `steps_left` | `Discrete(max_steps + 1)` | steps left in the budget |

    `observation="ids"` leaves out `passages`, and `question` is `Discrete(number of questions)`, its index: for
    learners that look embeddings up. The candidates are not part of the observation: with pools their ids are in
    `info["candidates"]`, and `env.get_wrapper_attr("dataset").corpus` has the texts. The wrapper `CandidateTexts`
    adds the texts to the observation.

    ## Starting State
    A question drawn uniformly from the split, nothing picked, `max_steps` steps left.
    `reset(options={"question": i})` asks question `i` instead and draws none. Where documents are made on demand
    (BabiLong, NIAH, RulerQA), each episode mixes its own from the generator, after the question.

    ## Rewards
    - `"complete"` (default): 1 at the pick that finds the last missing gold passage, else 0.
    - `"recall"`: each gold passage found pays its share, so that the return is the recall.
    - `"gold"`: each gold passage found pays 1.
    - `"complete_with_length_penalty"`: `0.5 + 0.5 * |gold| / |picked|` at the pick that finds the last one.
    - `"reranker:PATH"`, `"answer:READER"`: what a cross-encoder or a reader says, see `docs/answers.md`; not the game's
      score.
    - any function `f(states, picks, dataset) -> float64 (B,)`, see `retrieval_gym.rewards`.

    Gold passages count in any order. A passage with the same title and text as a gold passage counts as that passage,
    except in documents made on demand, where a passage is told by its position.

    ## Episode End
    - Termination: every gold passage is found (only with `stop_when_complete=True`).
    - Termination: the budget of `max_steps` is spent. The steps left are part of the state, so this is no truncation.

    `truncated` is always False. A step after the end raises `gymnasium.error.ResetNeeded`.

    ## Information
    `reset` and `step` return the same keys:

    | key | type | value |
    |---|---|---|
    | `question_index` | int | index of the question in `dataset.questions` |
    | `gold_found` | int | gold passages picked so far |
    | `complete` | bool | whether that is all of them |
    | `invalid_action` | bool | whether the last action picked nothing |
    | `candidates` | int64 `(n,)` | with pools: corpus ids of the candidates, padded with -1 |
    | `action_mask` | int8 `(n,)` | with pools: 1 where the action picks a passage |

    `env.action_space.sample(info["action_mask"])` draws a valid action. `gold_found` and `complete` are for logging:
    a player that reads them sees the answer. For a whole corpus no mask is built unless `action_masks()` is called.

    ## Arguments
    ```python
    import gymnasium as gym
    import retrieval_gym
    env = gym.make("ChainRetrieval-MuSiQue-v0", split="dev", max_steps=4)
    ```

    - `dataset`: a name for `load_dataset`, or a `RetrievalDataset`.
    - `split="train"`, `path=None`: which part of the data, and where it is; both passed to `load_dataset` and
      without effect on a `RetrievalDataset` (a `path` for one is an error).
    - `max_steps=4`: the budget T.
    - `reward="complete"`: see Rewards.
    - `observation="text"`: or `"ids"`.
    - `stop_when_complete=True`: False always plays the whole budget, as evaluation does.
    - `render_mode=None`: `"ansi"` returns the transcript as text; `"human"` prints it while the episode runs.
    - `allow_unreachable=False`: whether questions with more gold passages than `max_steps` are allowed.
    - `dataset_options`: everything else goes to `load_dataset`.

    ## Raises
    `ValueError` when an argument is out of range or unknown, or a question has more gold passages than `max_steps`;
    `FileNotFoundError` when the data are nowhere.

    ## References
    Q-RAG: Long Context Multi-Step Retrieval via Value-Based Embedder Training.

    ## Version History
    * v0: initial version
    """

    metadata = {"render_modes": ["human", "ansi"], "render_fps": 4}

    def __init__(
        self,
        dataset: str | RetrievalDataset,
        split: str = "train",
        path: str | Path | None = None,
        max_steps: int = 4,
        reward: str | Reward = "complete",
        observation: str = "text",
        stop_when_complete: bool = True,
        render_mode: str | None = None,
        allow_unreachable: bool = False,
        **dataset_options: Any,
    ) -> None:
        if render_mode is not None and render_mode not in self.metadata["render_modes"]:
            raise ValueError(f"unknown render_mode {render_mode!r}: choose one of human, ansi, or None")
        self._game = Game(
            dataset, split, path, max_steps, reward, observation, stop_when_complete, allow_unreachable, dataset_options
        )
        self.render_mode = render_mode
        self.action_space = self._game.action_space
        self.observation_space = self._game.observation_space
        self._episode: Episodes | None = None
        self._ended = False

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
        """A copy of the state as a batch of one, which is what a retriever searches from."""
        return copy_states(self._current().states)

    def _current(self) -> Episodes:
        if self._episode is None:
            raise gym.error.ResetNeeded("no episode has begun: call reset() first")
        return self._episode

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Begin an episode; ``options={"question": i}`` asks question ``i``.

        Raises:
            TypeError: when ``options`` is no dictionary.
            ValueError: when ``options`` holds anything else or ``i`` is no index of a question.
        """
        questions = self._game.question_option(options, 1)
        super().reset(seed=seed)
        if questions is None:
            questions = self._game.questions_of(np.array([self.np_random.random()]))
        self._episode = self._game.start(questions, self._game.draw_pools([self.np_random], questions))
        self._ended = False
        if self.render_mode == "human":
            question = int(self._episode.states.question[0])
            print(question_line(self.dataset, question, use_colour()), flush=True)
        return self._observe()

    def step(self, action: np.int64 | int) -> tuple[dict[str, Any], float, bool, bool, dict[str, Any]]:
        """Pick one passage.

        Raises:
            ValueError: when ``action`` is outside the action space.
            gymnasium.error.ResetNeeded: when no episode is under way.
        """
        episode = self._current()
        if self._ended:
            raise gym.error.ResetNeeded("the episode has ended: call reset() before the next step()")
        if not self.action_space.contains(action):
            raise ValueError(f"action {action!r} is outside {self.action_space}: take a whole number inside it")
        rewards, ended = self._game.step(episode, np.array([action], np.int64))
        self._ended = bool(ended[0])
        if self.render_mode == "human":
            self._print_step(episode)
        observation, info = self._observe()
        return observation, float(rewards[0]), self._ended, False, info

    def _observe(self) -> tuple[dict[str, Any], dict[str, Any]]:
        episode = self._current()
        return split_observations(self._game.observations(episode))[0], single_info(self._game.infos(episode))

    def action_masks(self) -> NDArray[np.bool_]:
        """Say which actions pick a passage, bool ``(n,)``: the mask that sb3-contrib asks for."""
        return self._game.action_masks(self._current())[0]

    def render(self) -> str | None:  # type: ignore[override]
        """Return (``"ansi"``) or print (``"human"``) the transcript of the episode so far."""
        if self.render_mode is None:
            gym.logger.warn('render() does nothing without a render mode: pass render_mode="ansi" or "human"')
            return None
        episode = self._current()
        human = self.render_mode == "human"
        text = transcript(episode.states, episode.picked[0], self.dataset, self._ended, colour=human and use_colour())
        if human:
            print(text, flush=True)
            return None
        return text

    def _print_step(self, episode: Episodes) -> None:
        colour = use_colour()
        if episode.invalid_action[0]:
            print(f"   - invalid action, nothing picked\n{budget_line(episode.states)}", flush=True)
        else:
            print(pick_lines(episode.states, episode.picked[0], self.dataset, colour)[-1], flush=True)
        if self._ended:
            print("\n".join(ending_lines(episode.states, self.dataset, colour)), flush=True)
