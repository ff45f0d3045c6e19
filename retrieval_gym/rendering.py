"""The transcript that a person reads: the question, each pick marked right or wrong, what was missed, the score."""

from __future__ import annotations

import os
import sys
from typing import TextIO

import numpy as np

from retrieval_gym import mdp
from retrieval_gym.datasets import RetrievalDataset

SNIPPET = 90
_BOLD, _GREEN, _RED, _YELLOW = "1", "32", "31", "33"


def use_colour(stream: TextIO | None = None) -> bool:
    """Say whether a stream (standard output by default) shows colour: a terminal, and ``NO_COLOR`` is not set."""
    stream = sys.stdout if stream is None else stream
    return stream.isatty() and not os.environ.get("NO_COLOR")


def snippet(dataset: RetrievalDataset, passage: int, width: int = SNIPPET) -> str:
    """Return title and text of a passage on one line of at most ``width`` characters."""
    title, text = dataset.corpus[passage].title, dataset.corpus[passage].text
    line = " ".join((f"{title}: {text}" if title else text).split())
    return line if len(line) <= width else line[: width - 3].rstrip() + "..."


def question_line(dataset: RetrievalDataset, question: int, colour: bool = False) -> str:
    """Return the line that asks a question."""
    return _paint(f"Question {question}: {' '.join(dataset.questions[question].text.split())}", _BOLD, colour)


def pick_lines(states: mdp.States, actions: np.ndarray, dataset: RetrievalDataset, colour: bool = False) -> list[str]:
    """Return one line a pick: its number, the action in brackets, ``gold``, ``copy`` or ``wrong``, the passage.

    ``copy`` marks a passage that reads the same as one picked before and so adds nothing.

    Args:
        states: one state.
        actions: the picks as actions, int64 ``(T,)``, -1 past the end.
        dataset: the states' dataset.
        colour: whether to use ANSI colours.
    """
    canonical = dataset.corpus.canonical
    gold = set(dataset.gold[states.question[0]].tolist())
    seen: set[int] = set()
    lines = []
    for number, (passage, action) in enumerate(zip(states.picked[0].tolist(), actions.tolist(), strict=True), 1):
        if passage < 0:
            break
        key = int(canonical[passage])
        mark, code = ("copy", _YELLOW) if key in seen else ("gold", _GREEN) if key in gold else ("wrong", _RED)
        seen.add(key)
        lines.append(f"{number:3d}. {_paint(f'{mark:5s}', code, colour)} [{action}] {snippet(dataset, passage)}")
    return lines


def ending_lines(states: mdp.States, dataset: RetrievalDataset, colour: bool = False) -> list[str]:
    """Return the gold passages that were missed and the score of one finished episode."""
    row = int(states.question[0])
    gold = dataset.gold[row][dataset.gold[row] >= 0]
    found = mdp.found_gold(states, dataset)[0, : len(gold)]
    lines = [
        f"     {_paint('missed', _YELLOW, colour)} {snippet(dataset, passage)}" for passage in gold[~found].tolist()
    ]
    score = f"{found.sum()} of {len(gold)} gold passages in {states.count[0]} picks"
    verdict, code = ("Complete", _GREEN) if found.all() else ("Incomplete", _RED)
    return [*lines, f"{_paint(verdict, code, colour)}: {score}."]


def budget_line(states: mdp.States) -> str:
    """Return how much of one state's budget is left, and how much went to invalid actions."""
    left, total = int(states.steps_left[0]), states.picked.shape[1]
    invalid = total - left - int(states.count[0])
    return f"     {left} of {total} steps left" + (f", {invalid} spent on invalid actions" if invalid else "")


def transcript(
    states: mdp.States, actions: np.ndarray, dataset: RetrievalDataset, ended: bool, colour: bool = False
) -> str:
    """Return the whole episode so far; arguments as ``pick_lines``, ``ended`` adds what was missed and the score."""
    lines = [question_line(dataset, int(states.question[0]), colour), *pick_lines(states, actions, dataset, colour)]
    lines.append(budget_line(states))
    return "\n".join(lines + (ending_lines(states, dataset, colour) if ended else []))


def _paint(text: str, code: str, colour: bool) -> str:
    return f"\x1b[{code}m{text}\x1b[0m" if colour else text
