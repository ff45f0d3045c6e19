"""What a generative reader is asked, and what counts as its answer. Both are ours."""

from __future__ import annotations

import re
from collections.abc import Sequence

WITH_PASSAGES = "Answer the question from the passages below; where they do not tell, from what you know."
WITHOUT_PASSAGES = "Answer the question from what you know."
FORM = "Give the answer alone, as short as possible: a name, a date, a number, yes or no."

_THOUGHT = re.compile(r"\A\s*<think>.*?(</think>|\Z)", re.DOTALL)


def prompt(question: str, passages: Sequence[str]) -> str:
    """Return the one message that asks a question, with its passages numbered in the order given.

    Args:
        question: the question.
        passages: title and text of each; none asks for what the reader knows by itself.
    """
    task = f"{WITH_PASSAGES if passages else WITHOUT_PASSAGES} {FORM}"
    numbered = [f"[{number}] {passage}" for number, passage in enumerate(passages, start=1)]
    return "\n\n".join([task, *numbered, f"Question: {question}\nAnswer:"])


def clean_answer(text: str) -> str:
    """Return what was said without the thoughts that some models put before it, and without white space around it.

    Halves of surrogate pairs, which no UTF-8 file can hold, become question marks.
    """
    return _THOUGHT.sub("", text).strip().encode("utf-8", "replace").decode()
