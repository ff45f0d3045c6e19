"""Checks a folder in the layout of ``datasets/jsonl.py`` and names every line at fault, instead of the first alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from retrieval_gym.datasets.base import Passage
from retrieval_gym.datasets.load import SPLITS
from retrieval_gym.datasets.readers import (
    Record,
    get_field,
    get_key,
    get_strings,
    get_text,
    parse_line,
    read_lines,
)
from retrieval_gym.progress import Progress
from retrieval_gym.validation_report import CHECKS, FileSummary, Finding, Place, Report

MAX_WORDS, MAX_CHARACTERS = 200, 2000  # beyond what the default encoder reads of a passage, 256 tokens
TOKEN_BATCH = 1024
REPLACEMENT = "\ufffd".encode()  # what a decoder puts where it could not read a byte
BYTE_ORDER_MARK = b"\xef\xbb\xbf"


def plain_question(text: str) -> str:
    """Return the form in which two questions are the same: whatever their white space and case."""
    return " ".join(text.split()).casefold()


def validate(
    folder: str | Path,
    *,
    steps: int = 4,
    max_words: int = MAX_WORDS,
    max_characters: int = MAX_CHARACTERS,
    count_tokens: Callable[[Sequence[str]], Sequence[int]] | None = None,
    max_tokens: int | None = None,
    show: int = 5,
    progress: bool = False,
) -> Report:
    """Check a folder with ``corpus.jsonl`` and questions; see ``datasets.jsonl.load_custom`` for the layout.

    A folder without errors loads in every split that it has.

    Args:
        folder: what to check.
        steps: picks a question, at least as many as its gold passages.
        max_words: words of title and text that a passage may have.
        max_characters: characters of both, which also bounds scripts without spaces.
        count_tokens: the number of tokens of each of N texts, title and text on two lines; None counts none.
        max_tokens: with ``count_tokens``, tokens that a passage may have.
        show: how many places to keep for each check.
        progress: show on stderr how many lines are read.

    Raises:
        FileNotFoundError: when there is no such folder.
    """
    path = Path(folder)
    if not path.is_dir():
        raise FileNotFoundError(f"{folder} is not a folder: give one that holds corpus.jsonl and questions.jsonl")
    checker = _Checker(path, Report(str(folder), steps), show, progress)
    return checker.run(max_words, max_characters, count_tokens, max_tokens)


class _Checker:
    """Reads the files of one folder, one after the other, and fills in a report."""

    def __init__(self, folder: Path, report: Report, show: int, progress: bool) -> None:
        self.folder, self.report, self.show, self.progress = folder, report, show, progress
        self.findings: dict[str, Finding] = {}
        self.passages: dict[str, int] = {}  # id to the lowest line of the same text
        self.questions: dict[str, tuple[str, int]] = {}  # text to split and place of its first question

    def add(self, check: str, file: Path, line: int | None, detail: str) -> None:
        finding = self.findings.setdefault(check, Finding(check))
        finding.count += 1
        if len(finding.first) < self.show:
            finding.first.append(Place(file.name, line, detail))

    def run(
        self,
        max_words: int,
        max_characters: int,
        count_tokens: Callable[[Sequence[str]], Sequence[int]] | None,
        max_tokens: int | None,
    ) -> Report:
        corpus = _first_file(self.folder, ["corpus.jsonl"])
        if corpus is None:
            self.add(
                "file", self.folder / "corpus.jsonl", None, "is missing: it holds id, title and text of each passage"
            )
        else:
            self.check_corpus(corpus, max_words, max_characters, count_tokens, max_tokens)
        by_split = {
            split: file
            for split in SPLITS
            if (file := _first_file(self.folder, [f"questions_{split}.jsonl", f"{split}.jsonl"]))
        }
        if not by_split:
            every = _first_file(self.folder, ["questions.jsonl"])
            if every is None:
                self.add("no questions", self.folder / "questions.jsonl", None, "is missing")
            else:
                self.add("one split", every, None, "is asked in train, dev and test alike")
                by_split = {"all": every}
        for split, file in by_split.items():
            self.check_questions(split, file)
        read = {file.name for file in by_split.values()}
        for file in sorted([*self.folder.glob("questions*.jsonl"), *self.folder.glob("questions*.jsonl.gz")]):
            if file.name not in read:
                self.add("unread file", file, None, f"is not read; {', '.join(sorted(read))} are")
        order = list(CHECKS)
        self.report.findings = sorted(self.findings.values(), key=lambda finding: order.index(finding.check))
        return self.report

    def watched(self, file: Path) -> Iterator[bytes]:
        with Progress(file.name, None, "lines", shown=self.progress) as progress:
            for line in read_lines(file):
                yield line
                progress.update()

    def records(self, file: Path, split: str) -> Iterator[tuple[int, Record]]:
        """Yield the objects that can be read, with their lines; keep account of the others."""
        summary = FileSummary(file.name, split)
        self.report.files.append(summary)
        number, blank = 0, True
        try:
            for number, line in enumerate(self.watched(file), start=1):
                if number == 1 and line.startswith(BYTE_ORDER_MARK):
                    summary.notes["UTF-8 with a byte order mark"] = None
                if line.endswith(b"\r\n"):
                    summary.notes["Windows line ends"] = None
                where = f"{file}, line {number}"
                try:
                    record = parse_line(line, where)
                except ValueError as error:
                    blank = False
                    if isinstance(error.__cause__, UnicodeDecodeError):
                        summary.notes["not UTF-8"] = None
                    self.add("line", file, number, _bare(error, where))
                    continue
                if record is None:
                    continue
                blank = False
                if REPLACEMENT in line or b"\\ufffd" in line.lower():
                    self.add("damaged text", file, number, "holds U+FFFD")
                summary.records += 1
                yield number, record
        except (ValueError, OSError) as error:
            self.add("file", file, None, f"stops after line {number}: {error}")
            return
        if blank:
            self.add("file", file, None, "is empty: it needs one JSON object a line")

    def read(self, file: Path, line: int, reader: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Return what a reader of ``datasets.readers`` gets out of a record, or None where it finds a fault."""
        where = f"{file}, line {line}"
        try:
            return reader(*args, where=where, **kwargs)
        except ValueError as error:
            self.add("field", file, line, _bare(error, where))
            return None

    def check_corpus(
        self,
        file: Path,
        max_words: int,
        max_characters: int,
        count_tokens: Callable[[Sequence[str]], Sequence[int]] | None,
        max_tokens: int | None,
    ) -> None:
        ids: dict[str, int] = {}
        texts: dict[tuple[str, str], int] = {}
        words, characters, tokens = Counter[int](), Counter[int](), Counter[int]()
        waiting: list[tuple[int, str]] = []

        def count() -> None:
            if count_tokens is not None and waiting:
                for (line, _), size in zip(waiting, count_tokens([text for _, text in waiting]), strict=True):
                    tokens[size] += 1
                    if max_tokens is not None and size > max_tokens:
                        self.add("long passage", file, line, f"has {size:,} tokens, over {max_tokens:,}")
            waiting.clear()

        for line, record in self.records(file, ""):
            key = self.read(file, line, get_key, record.get("id"), "id")
            title = self.read(file, line, get_field, record, "title", str, default="")
            body = self.read(file, line, get_field, record, "text", str)
            if key is not None:
                if key in ids:
                    self.add("duplicate passage id", file, line, f"{_short(key)}, first in line {ids[key]}")
                ids.setdefault(key, line)
            if key is not None:
                self.passages.setdefault(key, line)
            if title is None or body is None:
                continue
            if not body.strip():
                check = "no text" if title.strip() else "empty passage"
                self.add(check, file, line, f"passage {_short(key)}")
            first = texts.setdefault((title, body), line)
            if first != line:
                self.add("identical passages", file, line, f"passage {_short(key)} reads like line {first}")
                if key is not None and self.passages[key] == line:
                    self.passages[key] = first
            text = str(Passage(title, body))
            sizes = len(text.split()), len(text)
            words[sizes[0]] += 1
            characters[sizes[1]] += 1
            if sizes[0] > max_words or sizes[1] > max_characters:
                detail = f"has {sizes[0]:,} words and {sizes[1]:,} characters, over {max_words:,} or {max_characters:,}"
                self.add("long passage", file, line, detail)
            elif count_tokens is not None:
                waiting.append((line, text))
                if len(waiting) == TOKEN_BATCH:
                    count()
        count()
        for name, sizes_of in (("words", words), ("characters", characters), ("tokens", tokens)):
            if sizes_of:
                self.report.lengths[name] = _median(sizes_of), max(sizes_of)

    def check_questions(self, split: str, file: Path) -> None:
        ids: dict[str, int] = {}
        bare: list[tuple[int, str]] = []
        with_pool = 0
        sizes = self.report.gold.setdefault(split, Counter())
        for line, record in self.records(file, split):
            key = self.read(file, line, get_key, record.get("id"), "id")
            if key is not None:
                if key in ids:
                    self.add("duplicate question id", file, line, f"{_short(key)}, first in line {ids[key]}")
                ids.setdefault(key, line)
            text = self.read(file, line, get_text, record, "question")
            if text is not None:
                self.check_text(split, file, line, text)
            self.read(file, line, get_strings, record, "answers", default=[])
            self.read(file, line, get_field, record, "ordered", bool, default=True)
            gold = self.check_ids(file, line, record, "gold_ids", "missing gold")
            if gold:
                size = len({self.passages.get(each, each) for each in gold})
                sizes[size] += 1
                if size > self.report.steps:
                    self.add("gold beyond budget", file, line, f"{size} gold passages, {self.report.steps} steps")
            if record.get("pool_ids") is None:
                bare.append((line, f"question {_short(key)}"))
                continue
            with_pool += 1
            pool = self.check_ids(file, line, record, "pool_ids", "field")
            outside = [each for each in gold if each not in set(pool)] if pool else []
            if outside:
                self.add("gold outside pool", file, line, f"{_short(outside[0])} of question {_short(key)}")
        if with_pool:
            for line, detail in bare:
                self.add("missing pool", file, line, detail)

    def check_text(self, split: str, file: Path, line: int, text: str) -> None:
        before = self.questions.setdefault(plain_question(text), (split, line))
        if before == (split, line):
            return
        if before[0] == split:
            self.add("duplicate question", file, line, f"{_short(text)}, first in line {before[1]}")
        else:
            self.add("shared question", file, line, f"{_short(text)} is in {before[0]} too, line {before[1]}")

    def check_ids(self, file: Path, line: int, record: Record, name: str, missing: str) -> list[str]:
        """Return a list of passage ids, [] where there is none; ``missing`` is the check that then fails."""
        if record.get(name) in (None, []):
            self.add(missing, file, line, f"field {name!r} is missing or empty: name at least one passage")
            return []
        values = self.read(file, line, get_field, record, name, list) or []
        read = [self.read(file, line, get_key, value, name) for value in values]
        keys = [key for key in read if key is not None]
        unknown = [key for key in keys if key not in self.passages]
        if unknown:
            more = f" and {len(unknown) - 1} more" if len(unknown) > 1 else ""
            self.add("unknown passage", file, line, f"{name} {_short(unknown[0])}{more}")
        twice = [key for key, count in Counter(keys).items() if count > 1]
        if twice:
            self.add("repeated id", file, line, f"{name} {_short(twice[0])}")
        return keys


def _first_file(folder: Path, names: Sequence[str]) -> Path | None:
    files = (folder / each for name in names for each in (name, f"{name}.gz"))
    return next((file for file in files if file.is_file()), None)


def _short(text: str | None) -> str:
    shown = repr(text)
    return shown if len(shown) <= 80 else f"{shown[:77]}..."


def _bare(error: ValueError, where: str) -> str:
    """Return a message without the place that it starts with."""
    return str(error).removeprefix(where).lstrip(":, ")


def _median(counts: Counter[int]) -> int:
    half, seen = sum(counts.values()) / 2, 0
    for size in sorted(counts):
        seen += counts[size]
        if seen >= half:
            break
    return size
