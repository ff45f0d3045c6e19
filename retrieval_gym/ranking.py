"""What a retriever is, and the one rule by which passages are ranked."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from retrieval_gym import mdp

Ids = NDArray[np.int64]
Scores = NDArray[np.float32]

SCORE_DECIMALS = 6
CELLS = 2**20  # numbers a retriever holds at once: bounds memory, and stays near the cache (6 times faster than 2**24)


@runtime_checkable
class Retriever(Protocol):
    """Anything that answers ``search``: a random player, BM25, a service or a trained agent."""

    def search(self, states: mdp.States, k: int) -> tuple[Ids, Scores]:
        """Return the ``k`` best next passages of each state.

        Args:
            states: B states; where ``states.pool`` is not None only its members may be returned.
            k: how many passages to return.

        Returns:
            Corpus ids int64 ``(B, k)`` and scores float32 ``(B, k)``, best first, passages already picked excluded,
            -1 and -inf past the end.
        """
        ...


def round_scores(scores: NDArray[np.floating]) -> NDArray[np.float64]:
    """Round scores to 1e-6, below which they depend on batch size and hardware; float64, same shape."""
    return np.asarray(np.round(np.asarray(scores, np.float64), SCORE_DECIMALS), np.float64)


def top_k(scores: NDArray[np.floating], ids: Ids, k: int) -> tuple[Ids, Scores]:
    """Return the ``k`` best passages of each row; scores equal after rounding to 1e-6 go to the lowest id.

    Args:
        scores: ``(B, N)``; -inf leaves a passage out.
        ids: corpus ids, distinct within a row, int64 ``(N,)`` or ``(B, N)``; -1 is padding.
        k: at least 1; may exceed N.

    Returns:
        Ids int64 ``(B, k)`` and their scores float32 ``(B, k)``, best first, -1 and -inf past the end.

    Raises:
        ValueError: when ``k`` is below 1, the shapes do not fit or a score is NaN.
    """
    if k < 1:
        raise ValueError(f"k is {k}: ask for at least 1 passage")
    if scores.ndim != 2 or ids.shape not in (scores.shape, scores.shape[1:]):
        raise ValueError(f"scores of shape {scores.shape} need ids of the same or one row's shape, got {ids.shape}")
    keys = round_scores(scores)
    if np.isnan(keys).any():
        raise ValueError(f"{int(np.isnan(keys).sum())} of {keys.size} scores are NaN: check the retriever's inputs")
    size, width = scores.shape
    ascending = bool((np.diff(ids, axis=-1) > 0).all())
    ids = np.broadcast_to(ids, scores.shape)
    if not ascending:
        order = np.argsort(ids, axis=1, kind="stable")
        ids, scores = np.take_along_axis(ids, order, axis=1), np.take_along_axis(scores, order, axis=1)
        keys = np.take_along_axis(keys, order, axis=1)
    keys = np.where(ids >= 0, keys, -np.inf)
    kept = min(k, width)
    if 0 < kept < width:
        # Whole rows are partitioned first: sorting them would cost far more. Of the ties at the bound the leftmost
        # columns, which hold the lowest ids, fill the room that is left.
        bound = np.partition(keys, width - kept, axis=1)[:, width - kept, None]
        above, tied = keys > bound, keys == bound
        room = kept - above.sum(axis=1, keepdims=True)
        columns = np.nonzero(above | (tied & (np.cumsum(tied, axis=1) <= room)))[1].reshape(size, kept)
    else:
        columns = np.broadcast_to(np.arange(kept), (size, kept))
    keys = np.take_along_axis(keys, columns, axis=1)
    order = np.argsort(-keys, axis=1, kind="stable")
    columns, keys = np.take_along_axis(columns, order, axis=1), np.take_along_axis(keys, order, axis=1)
    found = keys > -np.inf
    best_ids, best_scores = np.full((size, k), -1, np.int64), np.full((size, k), -np.inf, np.float32)
    best_ids[:, :kept] = np.where(found, np.take_along_axis(ids, columns, axis=1), -1)
    best_scores[:, :kept] = np.where(found, np.take_along_axis(scores, columns, axis=1), -np.inf)
    return best_ids, best_scores


def rank(states: mdp.States, scores: NDArray[np.floating], k: int) -> tuple[Ids, Scores]:
    """Return what ``Retriever.search`` returns, from a score for every candidate.

    Args:
        states: B states.
        scores: ``(B, P)``, one score a place in the pool, or ``(B, number of passages)`` where there is no pool.
        k: how many passages to return.

    Raises:
        ValueError: when the shapes do not fit or a score is NaN.
    """
    width = scores.shape[-1] if states.pool is None else states.pool.shape[1]
    if scores.shape != (len(states), width):
        raise ValueError(f"scores have shape {scores.shape}: give {(len(states), width)}, one score a candidate")
    ids = np.arange(width, dtype=np.int64) if states.pool is None else states.pool
    return top_k(np.where(mdp.action_mask(states, width), scores, -np.inf), ids, k)
