"""Episodes under way, as arrays with one row an episode, and the two ways in which their values are handed out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from retrieval_gym import mdp
from retrieval_gym.mdp import Bools, Ids


@dataclass(frozen=True)
class Episodes:
    """B episodes under way, whose arrays change in place.

    Beside the states stands what follows from them and would be slow to work out anew at each step.

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

    states: mdp.States
    picked: Ids
    count: Ids
    mask: Bools | None
    found: Bools
    gold_found: Ids
    complete: Bools
    invalid_action: Bools
    questions: NDArray[np.object_] | None
    passages: NDArray[np.object_] | None

    def __len__(self) -> int:
        return len(self.states)

    def __getitem__(self, rows: NDArray) -> Episodes:
        """Return a copy of these rows."""
        return Episodes(
            self.states[rows],
            self.picked[rows],
            self.count[rows],
            None if self.mask is None else self.mask[rows],
            self.found[rows],
            self.gold_found[rows],
            self.complete[rows],
            self.invalid_action[rows],
            None if self.questions is None else self.questions[rows],
            None if self.passages is None else self.passages[rows],
        )

    def _arrays(self) -> list[NDArray]:
        states = self.states
        arrays = [
            states.question, states.pool, states.picked, states.steps_left, self.picked, self.count, self.mask,
            self.found, self.gold_found, self.complete, self.invalid_action, self.questions, self.passages,
        ]  # fmt: skip
        return [array for array in arrays if array is not None]

    def put(self, rows: NDArray, other: Episodes) -> None:
        """Overwrite these rows with ``other``, of the same game."""
        for mine, theirs in zip(self._arrays(), other._arrays(), strict=True):
            mine[rows] = theirs


def copy_states(states: mdp.States) -> mdp.States:
    """Return states that share no memory with ``states``."""
    return states[np.arange(len(states))]


def split_observations(batch: Mapping[str, Iterable]) -> list[dict[str, Any]]:
    """Return one observation dictionary a row of a batch, whose values are equally long."""
    keys = tuple(batch)
    return [dict(zip(keys, values)) for values in zip(*batch.values())]  # noqa: B905 - a third faster


def single_info(batch: Mapping[str, NDArray]) -> dict[str, Any]:
    """Return the info of a batch of one: numbers as Python's own, rows as arrays that share no memory with it."""
    return {key: values[0].copy() if values.ndim > 1 else values[0].item() for key, values in batch.items()}


def spread_infos(batch: Mapping[str, NDArray], rows: Bools | None = None) -> dict[str, NDArray]:
    """Return the infos of a vector environment: 0 outside ``rows``, a mask (all when None), and it as ``_key``.

    Args:
        batch: infos of all episodes; the result shares no memory with them.
        rows: the episodes that have an info, bool ``(B,)``.
    """
    masks = np.empty((len(batch), len(next(iter(batch.values())))), bool)
    masks[:] = True if rows is None else rows
    spread: dict[str, NDArray] = {}
    for (key, values), mask in zip(batch.items(), masks, strict=True):
        spread[key] = values.copy() if rows is None else values * (rows if values.ndim == 1 else rows[:, None])
        spread[f"_{key}"] = mask
    return spread
