"""Episodes as plain numbers and lists, and back: what a checkpoint holds of an environment."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from retrieval_gym import mdp
from retrieval_gym.envs.episodes import Episodes
from retrieval_gym.envs.game import Game
from retrieval_gym.mdp import Bools, Ids


def _identity(game: Game) -> dict[str, Any]:
    """What saved episodes must share with the game that goes on with them."""
    return {
        "budget": game.max_steps,
        "number of questions": len(game.dataset),
        "fingerprint": game.dataset.fingerprint,
    }


def save_episodes(game: Game, episodes: Episodes) -> dict[str, Any]:
    """Return episodes as plain numbers and lists, for ``restore_episodes``."""
    states = episodes.states
    saved = {
        "of": _identity(game),
        "question": states.question.tolist(),
        "picked": episodes.picked.tolist(),
        "steps_left": states.steps_left.tolist(),
        "invalid_action": episodes.invalid_action.tolist(),
    }
    if game.mixes_pools:
        assert states.pool is not None
        saved["pool"] = states.pool.tolist()
    return saved


def restore_episodes(game: Game, saved: Mapping[str, Any], rows: int) -> Episodes:
    """Return the ``rows`` episodes that ``save_episodes`` returned.

    Raises:
        ValueError: when they are of another dataset or budget, or are not what ``save_episodes`` returns.
    """
    keys = ("of", "question", "picked", "steps_left", "invalid_action")
    check_keys(saved, keys + ("pool",) * game.mixes_pools, "episodes")
    for name, here in _identity(game).items():
        there = saved["of"].get(name) if isinstance(saved["of"], Mapping) else None
        if there != here:
            raise ValueError(
                f"the saved episodes have {name} {there}, here is {here}: go on with the dataset and the budget "
                "that they were saved with"
            )
    questions = _whole_numbers(saved, "question", (rows,), 0, len(game.dataset) - 1)
    picked = _whole_numbers(saved, "picked", (rows, game.max_steps), -1, game.num_actions - 1)
    steps_left = _whole_numbers(saved, "steps_left", (rows,), 0, game.max_steps)
    invalid_action = check_bools(saved["invalid_action"], "invalid_action", rows)
    if game.mixes_pools:
        pool: Ids | None = _whole_numbers(saved, "pool", (rows, game.num_actions), -1, len(game.dataset.corpus) - 1)
    else:
        pool = game.draw_pools([], questions)
    states = mdp.initial_states(questions, pool, game.max_steps)
    for actions in picked.T:
        states = mdp.step(states, np.where(actions >= 0, mdp.action_ids(states, actions), -1))
    # The picks of an episode are distinct candidates, stand first in their row, and each took a step.
    played = ((states.picked >= 0) == (picked >= 0)).all(axis=1) & (states.count <= game.max_steps - steps_left)
    if not played.all():
        row = int(played.argmin())
        raise ValueError(
            f"the saved episodes have picks {picked[row].tolist()} with {steps_left[row]} steps left in row {row}, "
            "which no episode has: the state is damaged, take another"
        )
    return game.at(replace(states, steps_left=steps_left), picked, invalid_action)


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
