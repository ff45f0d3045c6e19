"""What stands above every table of figures: which questions were asked of what, and every other assumption."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from retrieval_gym.ceilings import count_candidates
from retrieval_gym.datasets.base import RetrievalDataset

Ids = NDArray[np.int64]


def describe_questions(dataset: RetrievalDataset, questions: Ids, sample_seed: int | None = None) -> dict[str, Any]:
    """Say what was asked and what could be picked, JSON-able.

    Args:
        dataset: what is asked and picked.
        questions: indices of the questions, int64 ``(N,)``.
        sample_seed: of the random sample that they are, None where they are all or the caller's own choice.
    """
    sizes = count_candidates(dataset, questions)
    pool = f"{sizes.min()} to {sizes.max()}" if sizes.min() < sizes.max() else f"{sizes[0]}"
    whole = all(dataset.pool(int(i)) is None for i in questions)
    asked = f"{len(questions)} of {len(dataset)}"
    copies = int((dataset.corpus.canonical != np.arange(len(dataset.corpus))).sum())
    return {
        "dataset": dataset.name,
        "split": dataset.split,
        "source": dataset.source,
        "questions": asked if sample_seed is None else f"{asked}, a random sample with seed {sample_seed}",
        "dropped": dict(dataset.dropped),
        "candidates": f"{pool} passages, " + ("the whole corpus" if whole else "each question's own pool"),
        "copies": f"{copies} passages repeat the title and text of another and count as the same one",
    }


def protocol_lines(protocol: Mapping[str, Any]) -> list[str]:
    """Return one line an assumption, those that are empty left out."""
    return [f"{key.replace('_', ' ')}: {_plain(value)}" for key, value in protocol.items() if value]


def _plain(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key}: {item}" for key, item in value.items())
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def align(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lay rows of cells out in columns, two spaces apart."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
