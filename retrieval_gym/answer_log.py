"""A file of answers that grows line by line, survives an interruption, and says what it is of."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from io import FileIO
from pathlib import Path
from typing import Any

from retrieval_gym.files import lock, writing

HEADER = "answers_of"


class AnswerLog:
    """Answers to a set of questions, one JSON object a line behind a header that says what they depend on.

    Args:
        path: the file; one that is there goes on. An incomplete last line, as a kill leaves it, is cut off. A new one
            gets the header with the first answer, and is not there without any; so is one that holds no answer.
        of: everything that the answers depend on, JSON-able.

    Attributes:
        path: the file.
        answers: the answers so far, by index of the question.

    Raises:
        BlockingIOError: when another process writes the file.
        ValueError: when the file is no file of answers, is one of something else, or is damaged; nothing is written.
        OSError: when it cannot be written.
    """

    def __init__(self, path: str | Path, of: Mapping[str, Any]) -> None:
        self.path = Path(path)
        self.answers: dict[int, str] = {}
        self._passages: dict[int, list[str]] = {}
        self._lock_path = self.path.with_name(f"{self.path.name}.lock")
        try:
            self._lock = lock(self._lock_path, wait=False)
        except BlockingIOError as error:
            raise BlockingIOError(
                f"another process writes {path}: wait until it has ended, or choose another --out"
            ) from error
        try:
            self._header = _line({HEADER: of})
            self._file = self._open()
        except BaseException:
            self._release()
            raise

    def _open(self) -> FileIO | None:
        """Return the file that is there, cut to its whole lines; None where there is none yet."""
        self._size = 0  # of what is whole
        if not self.path.exists():
            return None
        data = self.path.read_bytes()
        whole = data[: data.rfind(b"\n") + 1]
        if not whole and not self._header.startswith(data):
            raise ValueError(f"{self.path} is no file of answers: choose another --out")
        if whole:
            self._read(whole, json.loads(self._header)[HEADER])
        self._size = len(whole) if self.answers else 0
        if len(whole) < len(data):
            print(f"{self.path}: the last line is incomplete and is asked again", file=sys.stderr)
        with writing(self.path):
            file = FileIO(self.path, "a")
            file.truncate(self._size)
        return file

    def _read(self, data: bytes, of: Mapping[str, Any]) -> None:
        first, *lines = data.splitlines()
        try:
            there = dict(json.loads(first)[HEADER])
        except (ValueError, LookupError, TypeError, RecursionError) as error:
            raise ValueError(f"{self.path} is no file of answers: choose another --out") from error
        if not lines:  # nothing of it would be lost, or mixed with something else
            return
        for key in [*of, *there]:
            if there.get(key) != of.get(key):
                raise ValueError(
                    f"{self.path} holds answers of something else: {key} is {_shown(there.get(key))} there and "
                    f"{_shown(of.get(key))} here; choose another --out, or ask as it was begun"
                )
        for number, line in enumerate(lines, start=2):
            try:
                record = json.loads(line)
                index, passages, answer = record["index"], record["passages"], record["answer"]
            except (ValueError, LookupError, TypeError, RecursionError) as error:
                raise ValueError(f"{self.path}, line {number}: damaged ({line[:60]!r}): remove the line") from error
            if type(index) is not int or not isinstance(passages, list) or not isinstance(answer, str):
                raise ValueError(f"{self.path}, line {number}: damaged ({line[:60]!r}): remove the line")
            if index in self.answers:
                raise ValueError(f"{self.path}, line {number}: question {index} occurs twice: keep one line of it")
            self.answers[index], self._passages[index] = answer, passages

    def check_passages(self, index: int, passages: Sequence[str]) -> None:
        """Refuse passages that are not those which a question's answer was read from; a new question takes any.

        Raises:
            ValueError: when they differ.
        """
        before = self._passages.get(index)
        if before is not None and before != list(passages):
            raise ValueError(
                f"{self.path}: question {index} was answered from the passages {_shown(before)}, and now they are "
                f"{_shown(list(passages))}: the retriever or the data have changed; choose another --out"
            )

    def append(self, index: int, answer: str, passages: Sequence[str], **more: Any) -> None:
        """Write one answer, in one piece.

        Args:
            index: of the question in its dataset.
            answer: to it.
            passages: keys of what was read.
            more: what else stands in the line, JSON-able.

        Raises:
            OSError: when it cannot be written; the file is as it was.
        """
        line = _line({"index": index, **more, "passages": list(passages), "answer": answer})
        rest = memoryview(line if self._size else self._header + line)
        with writing(self.path):
            if self._file is None:
                self._file = FileIO(self.path, "a")
            end = self._size + len(rest)
            try:
                while rest:
                    rest = rest[self._file.write(rest) :]
            except OSError:
                self._file.truncate(self._size)
                raise
        self._size = end
        self.answers[index], self._passages[index] = answer, list(passages)

    def close(self) -> None:
        """Close the file, which others may then go on with."""
        if self._file is not None:
            self._file.close()
            if not self._size:
                self.path.unlink(missing_ok=True)
        self._release()

    def _release(self) -> None:
        self._lock_path.unlink(missing_ok=True)
        if self._lock is not None:
            self._lock.close()

    def __enter__(self) -> AnswerLog:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _line(record: Mapping[str, Any]) -> bytes:
    return (json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n").encode()


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 120 else f"{text[:117]}..."
