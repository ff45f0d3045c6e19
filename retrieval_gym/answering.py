"""Ask a reader about what was retrieved, keep its answers as they come, and score them by hops."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from retrieval_gym.answer_log import AnswerLog
from retrieval_gym.answers import accepted_answers, score_answer
from retrieval_gym.datasets.base import RetrievalDataset
from retrieval_gym.evaluation import CONFIDENCE, SAMPLES
from retrieval_gym.metrics import bootstrap_interval
from retrieval_gym.progress import Progress
from retrieval_gym.protocol import align, protocol_lines
from retrieval_gym.readers.base import Reader, answers_as_they_come

Ids = NDArray[np.int64]
Floats = NDArray[np.float64]


def answerable(dataset: RetrievalDataset) -> Ids:
    """Return the questions with an accepted answer that is not blank, int64 ``(N,)``.

    Raises:
        ValueError: when there is none.
    """
    kept = [i for i, question in enumerate(dataset.questions) if accepted_answers(question.answers)]
    if not kept:
        raise ValueError(
            f"none of the {len(dataset)} questions of {dataset.name}, split {dataset.split}, has an answer: answers "
            "cannot be scored; name an environment or a split with answers"
        )
    return np.array(kept, np.int64)


def ask(
    reader: Reader,
    dataset: RetrievalDataset,
    questions: Ids,
    passages: Sequence[Sequence[int]],
    log: AnswerLog,
    name: str,
) -> None:
    """Ask what a file of answers still lacks, and write each answer to it when it comes.

    Args:
        reader: who answers.
        dataset: what is asked.
        questions: indices of the questions, int64 ``(N,)``.
        passages: for each the corpus ids of what is read, in order.
        log: where answers go, and which of them are there.
        name: of the run, for the progress.

    Raises:
        ValueError, OSError: what the reader raises; the answers so far are in the file.
    """
    rows = [row for row, i in enumerate(questions.tolist()) if i not in log.answers]
    asked = [dataset.questions[int(questions[row])] for row in rows]
    texts = [dataset.corpus.texts(passages[row]) for row in rows]
    keys = dataset.corpus.keys
    answers = answers_as_they_come(reader, [question.text for question in asked], texts)
    with Progress(name, len(questions), "answers", len(questions) - len(rows)) as progress, closing(answers):
        for place, answer in answers:
            question, row = asked[place], rows[place]
            golds = accepted_answers(question.answers)
            em, f1 = score_answer(answer, golds)
            read = [keys[p] for p in passages[row]]
            log.append(
                int(questions[row]),
                answer,
                read,
                id=question.id,
                question=question.text,
                hops=question.hops,
                answers=list(golds),
                em=em,
                f1=f1,
            )
            progress.update()


@dataclass(frozen=True, eq=False)
class AnswerReport:
    """What readers answered to N questions, and how good that was.

    Attributes:
        dataset: what was asked.
        questions: indices of the questions, int64 ``(N,)``.
        answers: for each column of the table N answers, by its name.
        more: further metrics of the first column alone, float64 ``(N,)`` each, by name.
        protocol: every assumption, JSON-able.
    """

    dataset: RetrievalDataset
    questions: Ids
    answers: Mapping[str, Sequence[str]]
    more: Mapping[str, Floats]
    protocol: Mapping[str, Any]

    @cached_property
    def metrics(self) -> dict[str, dict[str, Floats]]:
        """Float64 ``(N,)`` by metric and column."""
        golds = [accepted_answers(self.dataset.questions[i].answers) for i in self.questions.tolist()]
        table: dict[str, dict[str, Floats]] = {"em": {}, "f1": {}}
        for name, given in self.answers.items():
            scores = np.array([score_answer(*pair) for pair in zip(given, golds, strict=True)], np.float64)
            table["em"][name], table["f1"][name] = scores.T
        first = next(iter(self.answers))
        return table | {metric: {first: values} for metric, values in self.more.items()}

    @cached_property
    def groups(self) -> dict[str, NDArray[np.bool_]]:
        """Rows of all questions and of each number of hops, bool ``(N,)``."""
        hops = self.dataset.hops[self.questions]
        found = np.unique(hops)
        return {"all": np.ones(len(hops), bool)} | ({str(n): hops == n for n in found} if len(found) > 1 else {})

    @cached_property
    def summary(self) -> dict[str, dict[str, dict[str, dict[str, float | int]]]]:
        """Mean, interval and number of questions by metric, group and column."""
        table: dict[str, dict[str, dict[str, dict[str, float | int]]]] = {}
        for metric, columns in self.metrics.items():
            for group, rows in self.groups.items():
                cells = table.setdefault(metric, {}).setdefault(group, {})
                for name, values in columns.items():
                    mean, low, high = bootstrap_interval(values[rows], confidence=CONFIDENCE, samples=SAMPLES)
                    cells[name] = {"mean": mean, "low": low, "high": high, "questions": int(rows.sum())}
        return table

    @cached_property
    def blank(self) -> dict[str, int]:
        """How many answers of each column are empty."""
        return {name: sum(not answer.strip() for answer in given) for name, given in self.answers.items()}

    def to_json(self) -> dict[str, Any]:
        """Return protocol, metrics and numbers of empty answers as one dict that strict JSON can hold."""
        return {"protocol": dict(self.protocol), "metrics": self.summary, "empty_answers": self.blank}

    def table(self) -> str:
        """Return a plain-text table, the assumptions above it."""
        rows = [["metric", "hops", "questions", *self.answers]]
        for metric, groups in self.summary.items():
            for group, cells in groups.items():
                size = str(int(self.groups[group].sum()))
                row = [metric if group == "all" else "", group, size]
                for name in self.answers:
                    cell = cells.get(name)
                    row.append("" if cell is None else f"{cell['mean']:.3f} [{cell['low']:.3f}, {cell['high']:.3f}]")
                rows.append(row)
        lines = [*protocol_lines(self.protocol), "", *align(rows)]
        lines += [f"{name}: {n} of {len(self.questions)} answers are empty" for name, n in self.blank.items() if n]
        return "\n".join(lines)
