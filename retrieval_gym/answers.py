"""How good an answer is: exact match and F1 after SQuAD's normalisation.

The rules are those of the official evaluation scripts (Rajpurkar et al. 2016, v1.1; 2018, v2.0, for texts of which the
normalisation leaves nothing).
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalize_answer(text: str) -> str:
    """Return a text in lower case, without ASCII punctuation and English articles, words one space apart."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def exact_match(answer: str, gold: str) -> float:
    """Return 1 where both read the same after normalisation, else 0."""
    return float(normalize_answer(answer) == normalize_answer(gold))


def f1(answer: str, gold: str) -> float:
    """Return the harmonic mean of precision and recall of the words of ``answer``, counted with multiplicity.

    Where the normalisation leaves nothing of one of them, it is 1 if it leaves nothing of the other, else 0 (v2.0).
    """
    words, gold_words = normalize_answer(answer).split(), normalize_answer(gold).split()
    if not words or not gold_words:
        return float(words == gold_words)
    common = (Counter(words) & Counter(gold_words)).total()
    return 2 * common / (len(words) + len(gold_words))


def score_answer(answer: str, golds: Sequence[str]) -> tuple[float, float]:
    """Return exact match and F1, each the best over the accepted answers.

    An accepted answer of which the normalisation leaves nothing counts only where there is no other (v2.0).

    Raises:
        ValueError: when there is no accepted answer.
    """
    if not golds:
        raise ValueError("there is no accepted answer to compare with: leave such questions out")
    kept = [gold for gold in golds if normalize_answer(gold)] or list(golds)
    return max(exact_match(answer, gold) for gold in kept), max(f1(answer, gold) for gold in kept)


def accepted_answers(answers: Sequence[str]) -> tuple[str, ...]:
    """Return the answers that are not blank."""
    return tuple(answer for answer in answers if answer.strip())
