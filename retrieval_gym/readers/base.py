"""What a reader is, how it is asked, and a reader that remembers."""

from __future__ import annotations

import hashlib
from collections.abc import Generator, Iterable, Sequence
from itertools import islice
from typing import Any, Protocol


class Reader(Protocol):
    """Any callable that answers questions from passages: a function will do.

    A reader that also has ``stream(questions, passages)``, an iterator over pairs of a question's place and its answer
    in any order, is asked by that where answers are kept as they come.
    """

    def __call__(self, questions: list[str], passages: list[list[str]], /) -> Sequence[str]:
        """Return one answer a question.

        Args:
            questions: N questions.
            passages: for each what may be read, title and text of a passage in one string, in a fixed order; none
                where the reader shall answer from what it knows.
        """
        ...


def answers_as_they_come(
    reader: Reader, questions: Sequence[str], passages: Sequence[Sequence[str]], size: int = 32
) -> Generator[tuple[int, str], None, None]:
    """Yield each question's place and answer as soon as it is there.

    Args:
        reader: who answers.
        questions: N questions.
        passages: for each what may be read.
        size: how many questions are asked at once where the reader has no ``stream``.

    Raises:
        ValueError: when the reader does not return one string a question.
    """
    asked, given = list(questions), [list(each) for each in passages]
    if hasattr(reader, "stream"):
        yield from reader.stream(asked, given)
        return
    for start in range(0, len(asked), size):
        part = slice(start, start + size)
        yield from enumerate(check_answers(reader(asked[part], given[part]), len(asked[part])), start)


def collect(pairs: Iterable[tuple[int, str]], size: int) -> list[str]:
    """Put the answers of a stream into the order of their ``size`` questions."""
    answers = dict(pairs)
    return [answers[i] for i in range(size)]


def check_answers(answers: Any, size: int) -> list[str]:
    """Return what a reader gave as a list.

    Raises:
        ValueError: when it is not one string a question.
    """
    if not isinstance(answers, Sequence) or isinstance(answers, str):
        raise ValueError(f"the reader returned {type(answers).__name__}: it must return one string a question")
    if len(answers) != size:
        raise ValueError(f"the reader returned {len(answers)} answers to {size} questions: it must return one each")
    wrong = [answer for answer in answers if not isinstance(answer, str)]
    if wrong:
        raise ValueError(f"the reader returned {wrong[0]!r:.80} as an answer: it must be a string")
    return list(answers)


class CachedReader:
    """A reader that is asked once for each question with its passages in their order.

    Args:
        reader: who answers what is new, in one call a batch.
        cache_size: most answers kept; the oldest go first.

    Attributes:
        asked: how many questions went to the reader.
    """

    def __init__(self, reader: Reader, cache_size: int = 1_000_000) -> None:
        self.reader, self._cache_size = reader, cache_size
        self._cache: dict[bytes, str] = {}
        self.asked = 0

    def __call__(self, questions: list[str], passages: list[list[str]]) -> list[str]:
        """Return one answer a question; see ``Reader``."""
        keys = [_digest(question, *each) for question, each in zip(questions, passages, strict=True)]
        new = {key: place for place, key in enumerate(keys) if key not in self._cache}
        known = {key: self._cache[key] for key in keys if key not in new}
        if new:
            rows = list(new.values())
            answers = self.reader([questions[i] for i in rows], [list(passages[i]) for i in rows])
            known |= zip(new, check_answers(answers, len(rows)), strict=True)
            self.asked += len(rows)
            self._cache |= {key: known[key] for key in new}
            for key in list(islice(self._cache, max(0, len(self._cache) - self._cache_size))):
                del self._cache[key]
        return [known[key] for key in keys]


def _digest(*texts: str) -> bytes:
    digest = hashlib.blake2b(digest_size=16)
    for text in texts:
        data = text.encode("utf-8", "surrogatepass")
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
    return digest.digest()
