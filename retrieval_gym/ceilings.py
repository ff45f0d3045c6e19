"""The best value that each metric can take where the budget or the rank cannot reach every gold passage."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from retrieval_gym.datasets.base import RetrievalDataset

Ids = NDArray[np.int64]
Floats = NDArray[np.float64]


def metric_ceilings(
    dataset: RetrievalDataset, questions: Ids, steps: int, ks: Sequence[int], *, stopped: bool = False
) -> dict[str, Floats]:
    """Return the largest value of each metric on each question that any choice of passages reaches.

    Metrics that can always be 1 or have no bound may be left out.

    Args:
        dataset: what is asked and picked.
        questions: indices of the questions, int64 ``(N,)``.
        steps: the budget T, spent to the end.
        ks: ranks at which rankings are scored.
        stopped: whether to add the metrics of chains that may stop early.

    Returns:
        One float64 ``(N,)`` array a metric.
    """
    sizes = (dataset.gold[questions] >= 0).sum(axis=1)
    reached, wrong = np.minimum(sizes, steps), _fewest_wrong(dataset, questions, steps)
    fits = (sizes <= steps).astype(np.float64)
    ceilings = {f"complete@{k}": (sizes <= k).astype(np.float64) for k in ks}
    ceilings |= {f"recall@{k}": np.minimum(sizes, k) / sizes for k in ks}
    ceilings |= {
        "support_precision": reached / (reached + wrong),
        "support_recall": reached / sizes,
        "support_f1": 2 * reached / (reached + wrong + sizes),
        "support_em": fits * (wrong == 0),
        "all_gold_picked": fits,
        "episodic_return": fits,
    }
    if stopped:
        ceilings |= {
            "stopped_support_recall": reached / sizes,
            "stopped_support_f1": 2 * reached / (reached + sizes),
            "stopped_support_em": fits,
            "stopped_all_gold_picked": fits,
        }
    return ceilings


def count_candidates(dataset: RetrievalDataset, questions: Ids) -> Ids:
    """Count what each question can pick from, int64 ``(N,)``."""
    pools = [dataset.pool(int(i)) for i in questions]
    return np.array([len(dataset.corpus) if pool is None else len(pool) for pool in pools], np.int64)


def _fewest_wrong(dataset: RetrievalDataset, questions: Ids, steps: int) -> Ids:
    """Count the distinct passages that are not gold in the best picked set of ``steps``, int64 ``(N,)``.

    Once every gold passage is picked, only their copies cost nothing; after them come the wrong passages that have the
    most copies.
    """
    canonical = dataset.corpus.canonical
    everywhere = np.bincount(canonical, minlength=len(canonical))
    most_copied = np.argsort(-everywhere, kind="stable")[:steps]
    fewest = np.zeros(len(questions), np.int64)
    for row, i in enumerate(questions):
        pool, gold = dataset.pool(int(i)), dataset.gold[i][dataset.gold[i] >= 0]
        if pool is None:
            ids, counts = most_copied, everywhere[most_copied]
            left = min(steps, len(canonical)) - everywhere[gold].sum()
        else:
            ids, counts = np.unique(canonical[pool], return_counts=True)
            left = min(steps, len(pool)) - counts[np.isin(ids, gold)].sum()
        if left > 0 and len(gold) <= steps:
            others = np.sort(counts[~np.isin(ids, gold)])[::-1]
            fewest[row] = 1 + np.searchsorted(np.cumsum(others), left)
    return fewest
