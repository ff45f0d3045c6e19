"""Metrics of rankings and of picked sets, as pure functions on arrays, and their bootstrap intervals.

Every metric takes canonical passage ids (``canonical_ids``), so that passages with the same title and text are one, and
gold ids as ``RetrievalDataset.gold`` gives them: int64 ``(N, G)``, distinct in a row, at least one a row, padded with
-1. Rankings and picked sets are int64 ``(N, K)``, -1 past the end. Every metric returns float64 ``(N,)`` in [0, 1].
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int64]
Floats = NDArray[np.float64]

_CHUNK = 2**22  # numbers drawn at once by the bootstrap: 32 MB


def canonical_ids(ids: Ids, canonical: Ids) -> Ids:
    """Replace each id by ``canonical[id]`` (``Corpus.canonical``); -1 stays."""
    return np.where(ids >= 0, canonical[ids], -1)


def _found(ids: Ids, gold: Ids) -> NDArray[np.int64]:
    """Count the gold passages among ``ids``, int64 ``(N,)``."""
    return ((gold[:, :, None] == ids[:, None, :]) & (gold >= 0)[:, :, None]).any(axis=2).sum(axis=1)


def _distinct(ids: Ids) -> NDArray[np.int64]:
    """Count the distinct passages of each row, int64 ``(N,)``."""
    ordered = np.sort(ids, axis=1)
    new = np.ones(ids.shape, bool)
    new[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
    return (new & (ordered >= 0)).sum(axis=1)


def _gold_sizes(gold: Ids) -> NDArray[np.int64]:
    sizes = (gold >= 0).sum(axis=1)
    if (sizes == 0).any():
        raise ValueError(f"row {int(np.argmin(sizes))} has no gold passage: leave the question out")
    return sizes


def _top(ranking: Ids, k: int) -> Ids:
    if not 1 <= k <= ranking.shape[1]:
        raise ValueError(f"k is {k}: the ranking has {ranking.shape[1]} places, k must be from 1 to that")
    return ranking[:, :k]


def complete_at_k(ranking: Ids, gold: Ids, k: int) -> Floats:
    """Say whether every gold passage is among the first ``k`` (the papers' C@k)."""
    return (_found(_top(ranking, k), gold) == _gold_sizes(gold)).astype(np.float64)


def recall_at_k(ranking: Ids, gold: Ids, k: int) -> Floats:
    """Return the share of the gold passages that are among the first ``k``."""
    return _found(_top(ranking, k), gold) / _gold_sizes(gold)


def any_at_k(ranking: Ids, gold: Ids, k: int) -> Floats:
    """Say whether at least one gold passage is among the first ``k``."""
    _gold_sizes(gold)
    return (_found(_top(ranking, k), gold) > 0).astype(np.float64)


def support_precision(picked: Ids, gold: Ids) -> Floats:
    """Return the share of the distinct picked passages that are gold; 0 where nothing is picked."""
    _gold_sizes(gold)
    return _found(picked, gold) / np.maximum(_distinct(picked), 1)


def support_recall(picked: Ids, gold: Ids) -> Floats:
    """Return the share of the gold passages that are picked."""
    return _found(picked, gold) / _gold_sizes(gold)


def support_f1(picked: Ids, gold: Ids) -> Floats:
    """Return the harmonic mean of ``support_precision`` and ``support_recall``; 0 where no gold is picked."""
    return 2 * _found(picked, gold) / (_distinct(picked) + _gold_sizes(gold))


def support_em(picked: Ids, gold: Ids) -> Floats:
    """Say whether the set of picked passages is exactly the set of gold passages."""
    found, sizes = _found(picked, gold), _gold_sizes(gold)
    return ((found == sizes) & (_distinct(picked) == sizes)).astype(np.float64)


def all_gold_picked(picked: Ids, gold: Ids) -> Floats:
    """Say whether every gold passage is picked, whatever else is (the released Q-RAG code calls this EM)."""
    return (_found(picked, gold) == _gold_sizes(gold)).astype(np.float64)


def _bootstrap_means(values: Floats, samples: int, seed: int) -> Floats:
    """Return the means of ``samples`` resamples with replacement, float64 ``(samples,)``.

    A resample is told by how often it draws each distinct value, which is multinomial: the same distribution as drawing
    questions one by one, and far cheaper while there are few distinct values, as metrics have.
    """
    values = np.asarray(values, np.float64)
    if values.ndim != 1 or len(values) == 0 or not np.isfinite(values).all():
        raise ValueError(f"the bootstrap needs one finite number a question, got {values.dtype} {values.shape}")
    if samples < 1:
        raise ValueError(f"samples is {samples}: draw at least 1")
    count = len(values)
    distinct, counts = np.unique(values, return_counts=True)
    rng = np.random.default_rng(seed)
    few = 8 * len(distinct) <= count
    size = max(1, _CHUNK // (len(distinct) if few else count))
    means = np.empty(samples)
    for start in range(0, samples, size):
        part = means[start : start + size]
        if few:
            part[:] = rng.multinomial(count, counts / count, size=len(part)) @ distinct / count
        else:
            part[:] = values[rng.integers(count, size=(len(part), count))].mean(axis=1)
    return means


def bootstrap_interval(
    values: Floats, *, confidence: float = 0.95, samples: int = 10_000, seed: int = 0
) -> tuple[float, float, float]:
    """Return the mean over questions and its percentile bootstrap interval (Efron 1979).

    Args:
        values: one number a question, ``(N,)``.
        confidence: coverage of the interval, between 0 and 1.
        samples: number of resamples.
        seed: of the resampling; the same seed gives the same interval.

    Returns:
        Mean, lower end, upper end.

    Raises:
        ValueError: when there is no value, one is not finite, or ``confidence`` or ``samples`` is out of range.
    """
    if not 0 < confidence < 1:
        raise ValueError(f"confidence is {confidence}: it must lie between 0 and 1")
    means = _bootstrap_means(values, samples, seed)
    low, high = np.quantile(means, [(1 - confidence) / 2, (1 + confidence) / 2])
    return float(np.mean(values)), float(low), float(high)


def paired_bootstrap(
    before: Floats, after: Floats, *, confidence: float = 0.95, samples: int = 10_000, seed: int = 0
) -> tuple[float, float, float, float]:
    """Compare two systems on the same questions.

    Args:
        before: one number a question, ``(N,)``.
        after: the other system's numbers for the same questions, ``(N,)``.
        confidence: coverage of the interval, between 0 and 1.
        samples: number of resamples.
        seed: of the resampling.

    Returns:
        Mean difference (after - before), lower and upper end of its percentile bootstrap interval, and the two-sided p:
        twice the smaller share of resamples on one side of 0, never below 2 / (samples + 1).

    Raises:
        ValueError: when the lengths differ, or as in ``bootstrap_interval``.
    """
    before, after = np.asarray(before, np.float64), np.asarray(after, np.float64)
    if before.shape != after.shape:
        raise ValueError(f"{before.shape} numbers before and {after.shape} after: both need one a question")
    difference, low, high = bootstrap_interval(after - before, confidence=confidence, samples=samples, seed=seed)
    means = _bootstrap_means(after - before, samples, seed)
    smaller = min(int((means <= 0).sum()), int((means >= 0).sum()))
    return difference, low, high, min(1.0, 2 * (smaller + 1) / (samples + 1))
