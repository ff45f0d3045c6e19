"""Rewards with a model in the loop: a reader's F1 at the end of an episode, a cross-encoder's score at every pick.

Such a reward is what a model says, not the game's score: it pays for passages that the model likes, gold or not, and a
model can be wrong or be played. Report the game's own figures (``retrieval_gym evaluate``) beside it.
"""

from __future__ import annotations

from functools import lru_cache, partial
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from retrieval_gym import mdp
from retrieval_gym.answers import accepted_answers, score_answer
from retrieval_gym.readers.base import CachedReader, Reader
from retrieval_gym.readers.names import check_model_name, check_reader_name, make_reader, read_api_key

if TYPE_CHECKING:
    from retrieval_gym.datasets.base import RetrievalDataset
    from retrieval_gym.nn.reward_models import RewardModel

Floats = NDArray[np.float64]

MODELS_KEPT = 4


class AnswerReward:
    """Pays at the end of an episode the reader's F1 on the passages picked, in pick order, else 0.

    An episode ends with its budget or, where ``stop_when_complete``, at the pick that finds the last gold passage. The
    last step pays whatever its own action did, also where that picked nothing. All rows of a batch that end in one step
    are one call of the reader, and a question with the same passages in the same order is read once.

    Args:
        reader: who answers; a ``CachedReader`` is taken as it is, so that several rewards can share one.
        stop_when_complete: as in the environment that it is a reward of.
    """

    def __init__(self, reader: Reader, *, stop_when_complete: bool = True) -> None:
        self.reader = reader if isinstance(reader, CachedReader) else CachedReader(reader)
        self.stop_when_complete = stop_when_complete
        self._checked: RetrievalDataset | None = None

    def __call__(self, states: mdp.States, picks: NDArray[np.int64], dataset: RetrievalDataset) -> Floats:
        """Return float64 ``(B,)``; see ``retrieval_gym.rewards``.

        Raises:
            ValueError: when a question of the dataset has no answer, or the reader does not return one string each.
        """
        if dataset is not self._checked:
            _check_answers(dataset)
            self._checked = dataset
        after = mdp.step(states, picks)
        ended = after.steps_left == 0
        if self.stop_when_complete:
            complete_before, complete_after = mdp.is_complete(states, dataset), mdp.is_complete(after, dataset)
            ended = (ended | complete_after) & ~complete_before  # each episode is paid for once
        rows = np.flatnonzero(ended)
        values = np.zeros(len(states))
        if len(rows):
            asked = [dataset.questions[i] for i in after.question[rows].tolist()]
            passages = [dataset.corpus.texts(picked[picked >= 0]) for picked in after.picked[rows]]
            answers = self.reader([question.text for question in asked], passages)
            golds = [accepted_answers(question.answers) for question in asked]
            values[rows] = [score_answer(*pair)[1] for pair in zip(answers, golds, strict=True)]
        return values


class RewardModelReward:
    """Pays each pick what a reward model says of it, given the question and the passages picked before.

    An action that picks nothing pays 0.

    Args:
        model: a ``retrieval_gym.nn.reward_models.RewardModel``. Rewards below 0 make doing nothing worth while.
        name: of the model, in error messages.
    """

    def __init__(self, model: RewardModel, name: str = "the reward model") -> None:
        self.model, self.name = model, name

    def __call__(self, states: mdp.States, picks: NDArray[np.int64], dataset: RetrievalDataset) -> Floats:
        """Return float64 ``(B,)``; see ``retrieval_gym.rewards``.

        Raises:
            ValueError: when the model returns anything but one finite number a passage.
        """
        from retrieval_gym.nn.reward_models import TextRewards

        if not (picks >= 0).any():
            return np.zeros(len(states))
        return TextRewards(self.model, dataset, self.name)(states, picks[:, None])[:, 0]


def answer_reward(name: str, *, stop_when_complete: bool = True) -> AnswerReward:
    """Return the reward ``"answer:NAME"``.

    Args:
        name: of a reader, see ``readers.make_reader``; the model of an endpoint stands behind ``#``, and its key, where
            it wants one, in the environment variable ``RETRIEVAL_GYM_API_KEY``. It is loaded when it is first asked,
            once a process.
        stop_when_complete: as in the environment.

    Raises:
        ValueError, FileNotFoundError: when no reader can have such a name.
    """
    check_reader_name(name)
    return AnswerReward(_shared_reader(name), stop_when_complete=stop_when_complete)


def reranker_reward(name: str, *, stop_when_complete: bool = True) -> RewardModelReward:
    """Return the reward ``"reranker:NAME"``: a cross-encoder's score of the pick, a sigmoid from 0 to 1.

    Logits would be below 0 for most passages, where an action that picks nothing pays 0.

    Args:
        name: Hub id or folder, see ``nn.reward_models.Reranker``. It is loaded when it is first asked, once a process.
        stop_when_complete: has no bearing on a reward of single picks.

    Raises:
        FileNotFoundError: when it can only be a folder, and there is none.
    """
    check_model_name(name, "reranker")
    return RewardModelReward(partial(_ask_reranker, name), f"reranker:{name}")


@lru_cache(maxsize=MODELS_KEPT)
def _shared_reader(name: str) -> CachedReader:
    """Return the reader of this name that all environments of a process share, with what it has answered."""
    return CachedReader(partial(_ask_reader, name))


def _ask_reader(name: str, questions: list[str], passages: list[list[str]]) -> list[str]:
    return list(_loaded_reader(name)(questions, passages))


@lru_cache(maxsize=MODELS_KEPT)
def _loaded_reader(name: str) -> Reader:
    return make_reader(name, api_key=read_api_key())


def _ask_reranker(name: str, questions: list[str], histories: list[list[str]], passages: list[str]) -> Floats:
    return np.asarray(_loaded_reranker(name)(questions, histories, passages), np.float64)


@lru_cache(maxsize=MODELS_KEPT)
def _loaded_reranker(name: str) -> RewardModel:
    from retrieval_gym.nn.reward_models import Reranker
    from retrieval_gym.nn.run import resolve_device

    return Reranker(name, device=resolve_device("auto"), output="sigmoid")


def _check_answers(dataset: RetrievalDataset) -> None:
    without = [question.id for question in dataset.questions if not accepted_answers(question.answers)]
    if without:
        raise ValueError(
            f"the reward 'answer' needs an answer to every question, and {len(without)} of {len(dataset)} of "
            f"{dataset.name}, split {dataset.split}, have none, {without[0]!r} first: leave them out with "
            "dataset.select(...), or choose another reward"
        )
