"""The geometry of several encoders' query embeddings beside each other; ``geometry`` defines every figure."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np

from retrieval_gym.ceilings import count_candidates
from retrieval_gym.datasets.base import RetrievalDataset
from retrieval_gym.evaluation import CONFIDENCE, SAMPLES
from retrieval_gym.geometry import (
    Classes,
    Cloud,
    anisotropy,
    dispersion,
    effective_rank,
    intra_class_distances,
    nearest_rows,
    overlap,
    separation,
)
from retrieval_gym.mismatch import Estimate, estimate
from retrieval_gym.protocol import align, describe_questions, protocol_lines
from retrieval_gym.ranking import Ids

Figure: TypeAlias = "Estimate | float | None"

LABELS = {
    "norm": "norm",
    "intra_class_variance": "intra-class variance",
    "intra_class_variance_difference": "minus {}'s",
    "dispersion": "cluster dispersion",
    "separation": "separation",
    "anisotropy": "anisotropy",
    "effective_rank": "effective rank",
    "drift": "drift from {}",
    "passage_overlap": "passage overlap with {}",
    "query_overlap": "query overlap with {}",
}


@dataclass(frozen=True, eq=False)
class GeometryReport:
    """The geometry of one or several encoders' query embeddings; ``geometry`` defines each figure.

    Attributes:
        dataset: what is asked and picked.
        questions: indices of the questions, int64 ``(N,)``, N at least 3.
        clouds: one for each system, the reference first.
        classes: of the questions.
        sample_seed: of the sample of questions, None where all or the caller's own were asked.

    Raises:
        ValueError: when there are fewer than 3 questions, or clouds differ in shape or fit the classes badly.
    """

    dataset: RetrievalDataset
    questions: Ids
    clouds: tuple[Cloud, ...]
    classes: Classes
    sample_seed: int | None = None

    def __post_init__(self) -> None:
        """Check that everything is about the same questions."""
        size, first = len(self.questions), self.clouds[0]
        if size < 3:
            raise ValueError(f"{size} questions make no cloud: ask at least 3")
        labels, classes = self.classes.labels, len(self.classes.names)
        if labels.shape != (size,) or set(labels.tolist()) - {-1} != set(range(classes)):
            raise ValueError(
                f"labels {labels.shape} of {classes} classes: give each of {size} questions one from 0 to "
                f"{classes - 1} or -1, and every class a question"
            )
        for cloud in self.clouds:
            if cloud.vectors.shape != (size, first.vectors.shape[1]):
                raise ValueError(
                    f"{cloud.name} has embeddings {cloud.vectors.shape} and the reference {first.name} "
                    f"{first.vectors.shape} of {size} questions: compare encoders with one dimension on the same ones"
                )
            if cloud.passages.shape != first.passages.shape:
                raise ValueError(
                    f"{cloud.name} has {cloud.passages.shape[1]} passages a question and the reference {first.name} "
                    f"{first.passages.shape[1]}: search for as many"
                )

    @property
    def reference(self) -> Cloud:
        """What the others are compared with."""
        return self.clouds[0]

    @property
    def neighbours(self) -> tuple[int, int]:
        """How many passages and how many questions are a neighbourhood."""
        k = self.reference.passages.shape[1]
        return k, min(k, len(self.questions) - 1)

    @cached_property
    def figures(self) -> dict[str, dict[str, Figure]]:
        """System, measure: an estimate where it is a mean over questions, else a number; None where it is undefined.

        The reference has no figure that compares it with itself.
        """
        return {cloud.name: self._figures(cloud) for cloud in self.clouds}

    def _figures(self, cloud: Cloud) -> dict[str, Figure]:
        directions, labels, reference = cloud.directions, self.classes.labels, self.reference
        asked, classed = self.questions, self.questions[labels >= 0]
        distances = intra_class_distances(directions, labels)
        figures: dict[str, Figure] = {
            "norm": estimate(np.linalg.norm(cloud.vectors, axis=1), asked),
            "intra_class_variance": estimate(distances, classed),
            "dispersion": dispersion(directions, labels),
            "separation": separation(directions, labels),
            "anisotropy": anisotropy(directions),
            "effective_rank": effective_rank(directions),
        }
        if cloud is reference:
            return figures
        before = intra_class_distances(reference.directions, labels)
        passages, questions = self.neighbours
        many = count_candidates(self.dataset, asked) > passages
        near = nearest_rows(reference.directions, questions), nearest_rows(directions, questions)
        return figures | {
            "intra_class_variance_difference": estimate(distances - before, classed),
            "drift": estimate(1 - (directions * reference.directions).sum(axis=1), asked),
            "passage_overlap": estimate(overlap(reference.passages[many], cloud.passages[many]), asked[many]),
            "query_overlap": estimate(overlap(*near), asked),
        }

    @property
    def protocol(self) -> dict[str, Any]:
        """Every assumption behind the figures, JSON-able."""
        passages, questions = self.neighbours
        return describe_questions(self.dataset, self.questions, self.sample_seed) | {
            "embeddings": f"of the questions alone, {self.reference.vectors.shape[1]} dimensions, at length 1 but for "
            "the norm",
            "reference": self.reference.name,
            "classes": self.classes.rule,
            "neighbourhoods": f"the {passages} best passages by the system's own search, of the questions with more "
            f"candidates, and the {questions} nearest questions by cosine; ties by lowest id after rounding to 1e-6",
            "intervals": f"{CONFIDENCE:.0%} percentile bootstrap over questions, {SAMPLES:,} resamples, centroids and "
            "neighbourhoods kept; differences are paired by question",
        }

    def to_json(self) -> dict[str, Any]:
        """Return protocol and figures as one dict that strict JSON can hold."""
        systems = [
            {"name": name} | {key: asdict(f) if isinstance(f, Estimate) else f for key, f in figures.items()}
            for name, figures in self.figures.items()
        ]
        return {"protocol": self.protocol, "class_names": list(self.classes.names), "systems": systems}

    def table(self) -> str:
        """Return a plain-text table with the assumptions above it."""
        rows = [["measure", *self.figures]]
        for key, label in LABELS.items():
            if any(key in figures for figures in self.figures.values()):
                sign = "+" if key.endswith("difference") else ""
                cells = [_text(figures[key], sign) if key in figures else "" for figures in self.figures.values()]
                rows.append([label.format(self.reference.name), *cells])
        lead = "Mean [interval] number of questions; figures without an interval are of the whole cloud"
        return "\n".join([*protocol_lines(self.protocol), "", lead, "", *align(rows)])


def _text(figure: Figure, sign: str) -> str:
    if isinstance(figure, Estimate):
        return figure.text(sign)
    return "-" if figure is None else f"{figure:.3f}"
