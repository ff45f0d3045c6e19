"""Episodes under way, as arrays with one row an episode, and the two ways in which their values are handed out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from retrieval_gym import mdp
from retrieval_gym.mdp import Bools, Ids


class Layout(NamedTuple):
    """How wide the rows of a game's episodes are.

    Attributes:
        max_steps: the budget T.
        candidates: positions P of the largest pool; 0 when the whole corpus can be picked.
        max_gold: gold passages of the question that has most.
        texts: whether the texts of question and picks are kept.
    """

    max_steps: int
    candidates: int
    max_gold: int
    texts: bool


class Episodes:
    """B episodes under way, whose arrays change in place.

    Beside the states stands what follows from them and would be slow to work out anew at each step. All of it lies in
    three tables, so that an episode begins, moves and is copied with one assignment each; the attributes are views of
    their columns.

    Args:
        layout: the columns.
        numbers: int64 ``(B, 4 + 2 * T + P)``.
        flags: bool ``(B, 2 + max_gold + P)``.
        texts: object array ``(B, 2)``, or None.

    Attributes:
        states: the states; ``picked`` holds corpus ids.
        picked: the same picks as actions, int64 ``(B, T)``, -1 past the end.
        count: number of picks, int64 ``(B,)``.
        mask: which actions pick a passage, bool ``(B, P)``; None when the whole corpus can be picked.
        found: which gold passages are picked, bool ``(B, max_gold)``.
        gold_found: number of them, int64 ``(B,)``.
        complete: whether that is all, bool ``(B,)``.
        invalid_action: whether the last action picked nothing, bool ``(B,)``.
        questions: the questions' texts, an object array ``(B,)`` of str; None when ids are observed.
        passages: the picked passages' texts, an object array ``(B,)`` of tuples; None when ids are observed.
    """

    def __init__(self, layout: Layout, numbers: Ids, flags: Bools, texts: NDArray[np.object_] | None) -> None:
        steps, gold, in_pools = layout.max_steps, layout.max_gold, layout.candidates > 0
        self.layout, self.numbers, self.flags, self.texts = layout, numbers, flags, texts
        self.count, self.gold_found = numbers[:, 2], numbers[:, 3]
        self.picked = numbers[:, 4 + steps : 4 + 2 * steps]
        self.states = mdp.States(
            question=numbers[:, 0],
            pool=numbers[:, 4 + 2 * steps :] if in_pools else None,
            picked=numbers[:, 4 : 4 + steps],
            steps_left=numbers[:, 1],
        )
        self.complete, self.invalid_action = flags[:, 0], flags[:, 1]
        self.found = flags[:, 2 : 2 + gold]
        self.mask = flags[:, 2 + gold :] if in_pools else None
        self.questions: NDArray[np.object_] | None = None if texts is None else texts[:, 0]
        self.passages: NDArray[np.object_] | None = None if texts is None else texts[:, 1]

    @classmethod
    def empty(cls, layout: Layout, size: int) -> Episodes:
        """Return room for ``size`` episodes."""
        return cls(
            layout,
            np.empty((size, 4 + 2 * layout.max_steps + layout.candidates), np.int64),
            np.empty((size, 2 + layout.max_gold + layout.candidates), bool),
            np.empty((size, 2), object) if layout.texts else None,
        )

    @classmethod
    def fresh(cls, layout: Layout, questions: Ids, pool: Ids | None) -> Episodes:
        """Return episodes about ``questions``, int64 ``(B,)``, that begin, without their texts.

        Args:
            layout: of the game.
            questions: what is asked.
            pool: candidates, int64 ``(B, P)``; None is the whole corpus.
        """
        episodes = cls.empty(layout, len(questions))
        episodes.numbers.fill(-1)
        episodes.flags.fill(False)
        episodes.states.question[:], episodes.states.steps_left[:] = questions, layout.max_steps
        episodes.count[:] = episodes.gold_found[:] = 0
        if pool is not None and episodes.states.pool is not None and episodes.mask is not None:
            episodes.states.pool[:] = pool
            episodes.mask[:] = pool >= 0
        return episodes

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, rows: NDArray) -> Episodes:
        """Return a copy of these rows."""
        texts = None if self.texts is None else self.texts[rows]
        return Episodes(self.layout, self.numbers[rows], self.flags[rows], texts)

    def put(self, rows: NDArray, other: Episodes) -> None:
        """Overwrite these rows with ``other``, of the same game."""
        self.numbers[rows], self.flags[rows] = other.numbers, other.flags
        if self.texts is not None:
            self.texts[rows] = other.texts


def copy_states(states: mdp.States) -> mdp.States:
    """Return states that share no memory with ``states``."""
    return states[np.arange(len(states))]


def split_observations(batch: Mapping[str, Iterable]) -> list[dict[str, Any]]:
    """Return one observation dictionary a row of a batch, as ``Game.observations`` returns it."""
    rows = zip(batch["picked"], batch["question"], batch["steps_left"], strict=True)
    split = [
        {"picked": picked, "question": question, "steps_left": steps_left} for picked, question, steps_left in rows
    ]
    if "passages" in batch:
        for observation, passages in zip(split, batch["passages"], strict=True):
            observation["passages"] = passages
    return split


def single_info(batch: Mapping[str, NDArray]) -> dict[str, Any]:
    """Return the info of a batch of one: numbers as Python's own, rows as arrays that share no memory with it."""
    return {key: values[0].copy() if values.ndim > 1 else values[0].item() for key, values in batch.items()}
