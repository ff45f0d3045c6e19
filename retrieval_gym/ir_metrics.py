"""Metrics of rankings from ``ir_measures`` (MacAvaney et al., ECIR 2022), by question, and runs as TREC files.

Relevance is the dataset's: ``Question.gold`` with its grades. Passages equal in title and text are one passage: any
copy of a gold passage counts as it, and a later copy keeps its place in the ranking and gains nothing, as in
``metrics.recall_at_k``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from retrieval_gym.files import write_text
from retrieval_gym.metrics import canonical_ids

if TYPE_CHECKING:
    from retrieval_gym.datasets.base import RetrievalDataset

Ids = NDArray[np.int64]
Floats = NDArray[np.float64]

# Those that depend on nothing but the relevant passages and their places down to a rank: passages judged as not
# relevant are not kept, so measures that tell them from unjudged ones would be wrong.
SUPPORTED = ("nDCG", "R", "RR", "AP", "P", "Success")
PARAMETERS = {"cutoff", "rel"}


def parse_measures(names: Sequence[str]) -> dict[str, Any]:
    """Return the ``ir_measures`` measure of each name, such as ``nDCG@10``, ``R@20``, ``RR@10`` or ``AP(rel=2)@100``.

    Raises:
        ImportError: when ``ir_measures`` (extra ``ir``) is not installed.
        ValueError: when a name is unknown, its measure not one of ``SUPPORTED``, or it has no rank from 1.
    """
    ir_measures = _library()
    measures = {}
    for name in names:
        try:
            measure = ir_measures.parse_measure(name)
        except (NameError, ValueError, AssertionError) as error:  # what the library raises for names and parameters
            raise ValueError(f"unknown measure {name!r} ({error}): {_remedy()}") from error
        if measure.NAME not in SUPPORTED or measure.params.keys() - PARAMETERS:
            raise ValueError(f"measure {name!r} is not supported: {_remedy()}")
        if measure.params.get("cutoff", 0) < 1 or measure.params.get("rel", 1) < 1:
            raise ValueError(f"measure {name!r} needs a rank from 1, and rel from 1 if any: {_remedy()}")
        measures[name] = measure
    return measures


def measured_depth(names: Sequence[str]) -> int:
    """Return how deep a ranking must be for these measures, 0 for none; errors as in ``parse_measures``."""
    return max((measure["cutoff"] for measure in parse_measures(names).values()), default=0) if names else 0


def score_measures(names: Sequence[str], ranking: Ids, dataset: RetrievalDataset, questions: Ids) -> dict[str, Floats]:
    """Score rankings with ``ir_measures``.

    Args:
        names: measures in the library's notation, see ``parse_measures``.
        ranking: corpus ids, best first, int64 ``(N, K)``, -1 past the end; a row of -1 alone scores 0.
        dataset: whose gold and grades count.
        questions: indices of the questions, int64 ``(N,)``.

    Returns:
        One float64 ``(N,)`` array a name, in the order of ``names``.

    Raises:
        ImportError: when ``ir_measures`` (extra ``ir``) is not installed.
        ValueError: as in ``parse_measures``, when a measure looks deeper than the ranking is, or when ``ranking`` and
            ``questions`` do not fit.
    """
    measures = parse_measures(names)
    if ranking.ndim != 2 or len(ranking) != len(questions):
        raise ValueError(f"{len(questions)} questions and a ranking of shape {ranking.shape}: give one row a question")
    depth = ranking.shape[1]
    for name, measure in measures.items():
        if measure["cutoff"] > depth:
            raise ValueError(f"measure {name!r} looks deeper than the ranking, which has {depth} places")
    run = _run_of(canonical_ids(ranking, dataset.corpus.canonical))
    qrels = {
        str(row): {str(passage): grade for passage, grade in zip(gold, grades, strict=True) if grade}
        for row, (gold, grades) in enumerate(
            zip(dataset.gold[questions].tolist(), dataset.grades[questions].tolist(), strict=True)
        )
    }
    values = {measure: np.zeros(len(questions)) for measure in measures.values()}
    for metric in _library().iter_calc(list(values), qrels, run):
        values[metric.measure][int(metric.query_id)] = metric.value
    return {name: values[measure].copy() for name, measure in measures.items()}


def ideal_ranking(dataset: RetrievalDataset, questions: Ids, depth: int) -> Ids:
    """Return the gold of each question by descending grade, int64 ``(N, depth)``, -1 past the end; none is better."""
    gold, grades = dataset.gold[questions], dataset.grades[questions]
    order = np.argsort(-grades, axis=1, kind="stable")[:, :depth]
    ranking = np.full((len(questions), depth), -1, np.int64)
    ranking[:, : order.shape[1]] = np.take_along_axis(gold, order, axis=1)
    return ranking


def write_run(path: str | Path, ranking: Ids, dataset: RetrievalDataset, questions: Ids, tag: str) -> None:
    """Write rankings as a TREC run: ``qid Q0 docid rank score tag``, one line a passage.

    Scores fall by 1 from place to place, so every scorer keeps the order. Ids are the source's keys. A scorer that
    reads the file takes text-identical passages for different ones; without any, it gives the figures of
    ``score_measures``. A question whose ranking is empty has no line.

    Args:
        path: the file.
        ranking: corpus ids, best first, int64 ``(N, K)``, -1 past the end.
        dataset: what was asked and ranked.
        questions: indices of the questions, int64 ``(N,)``.
        tag: the run's name; blanks in it become ``_``.

    Raises:
        ValueError: when a key is empty or has white space, or two questions have the same id.
        OSError: when the file cannot be written.
    """
    keys, depth, name = dataset.corpus.keys, ranking.shape[1], "_".join(tag.split()) or "run"
    lines: list[str] = []
    seen: set[str] = set()
    for row, question in zip(ranking.tolist(), questions.tolist(), strict=True):
        key = _column(dataset.questions[question].id, "question")
        if key in seen:
            raise ValueError(f"two questions have the id {key!r}: a TREC run cannot tell them apart; make ids unique")
        seen.add(key)
        ranked = [_column(keys[passage], "passage") for passage in row if passage >= 0]
        lines += [f"{key} Q0 {passage} {i + 1} {depth - i} {name}\n" for i, passage in enumerate(ranked)]
    write_text(path, "".join(lines))


def _run_of(ranking: Ids) -> Mapping[str, Mapping[str, float]]:
    """Return canonical rankings as ``ir_measures`` takes them: row to passage to score."""
    run = {}
    for row, passages in enumerate(ranking.tolist()):
        scores: dict[str, float] = {}
        for place, passage in enumerate(passages):
            if passage >= 0:
                key = str(passage)
                # A copy of what stands further up takes a name that no passage has.
                scores[key if key not in scores else f"copy at {place}"] = float(len(passages) - place)
        run[str(row)] = scores
    return {row: scores for row, scores in run.items() if scores}


def _column(key: str, kind: str) -> str:
    if not key or key.split() != [key]:
        raise ValueError(
            f"{kind} id {key!r} does not fit into a TREC run, whose columns are split at blanks: use ids without any"
        )
    return key


def _library() -> Any:
    try:
        import ir_measures
    except ImportError as error:
        raise ImportError("measures need ir_measures: pip install 'retrieval-gym[ir]'") from error
    return ir_measures


def _remedy() -> str:
    return f"use {', '.join(SUPPORTED[:-1])} or {SUPPORTED[-1]} with a rank, such as nDCG@10 or AP(rel=2)@100"
