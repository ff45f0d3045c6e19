"""Text that hides what a question needs: sentences of books, or generated ones, and how many tokens each has."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from retrieval_gym.datasets.sources import cache_folder
from retrieval_gym.datasets.synthetic.world import generate_world

Ids = NDArray[np.int64]

# Wordpieces of bert-base-uncased (the default encoder's tokenizer) in a hundred words and punctuation marks, measured
# once: docs/long_documents.md has the command.
BOOK_RATIO = 106
GENERATED_RATIO = 142
STORY_RATIO = 102  # bAbI's; a sentence of six words and marks counts 6

NUM_ENTITIES = 20_000  # articles in the world whose sentences are the generated background
FOLDERS = {"train": "train", "dev": "eval", "test": "eval"}

_WORD = re.compile(r"\w+|[^\w\s]")
_PARAGRAPHS = re.compile(r"\n\s*\n")
_END = re.compile(r"[.!?]+[\"'”’)\]_]*(?=\s+[\"'“‘(\[_]*[A-Z0-9])")
_HEADING = re.compile(r"(?:chapter|volume|book|part)\s+\S+\W*", re.IGNORECASE)
_ABBREVIATION = re.compile(r"(?:\b(?:Mr|Mrs|Ms|Messrs|Dr|St|Col|Capt|Gen|Lieut|Rev|Hon|Esq|vol|No)|\b[A-Z])\.$")


@dataclass(frozen=True, eq=False)
class Background:
    """Sentences in the order of their texts.

    Attributes:
        sentences: none of them empty; a long one is in parts.
        tokens: how many tokens each has, int64 ``(len(sentences),)``.
        source: where they come from, for people.
        licence: under which terms.
        counter: how the tokens were counted.
    """

    sentences: Sequence[str]
    tokens: Ids
    source: str
    licence: str
    counter: TokenCounter


@dataclass(frozen=True)
class TokenCounter:
    """Counts the tokens of texts, without special tokens.

    Attributes:
        ratio: tokens in a hundred words and punctuation marks; what is counted is that share of them, rounded, and at
            least 1.
        tokenizer: a ``tokenizer.json`` or a folder that holds one, which counts exactly instead; needs the package
            ``tokenizers`` (extra ``agents``).
    """

    ratio: int
    tokenizer: str | None = None

    def __call__(self, texts: Iterable[str]) -> Ids:
        """Return the number of tokens of each text, int64.

        Raises:
            FileNotFoundError: when there is no such tokenizer.
            ImportError: when ``tokenizers`` is not installed.
        """
        if self.tokenizer is None:
            words = np.array([len(_WORD.findall(text)) for text in texts], np.int64)
            return np.maximum(1, (words * self.ratio + 50) // 100)
        encoded = _tokenizer(self.tokenizer).encode_batch(list(texts), add_special_tokens=False)
        return np.maximum(1, np.array([len(each.ids) for each in encoded], np.int64))

    def as_ratio(self, ratio: int) -> TokenCounter:
        """Return the counter of texts of another kind: the same tokenizer, or another ratio."""
        return replace(self, ratio=ratio)

    def __str__(self) -> str:
        return f"counted by {self.tokenizer}" if self.tokenizer else f"{self.ratio / 100:.2f} tokens a word or mark"


def check_count(name: str, value: object, low: int, high: int) -> int:
    """Return an argument as an int.

    Raises:
        ValueError: when it is no whole number from ``low`` to ``high``.
    """
    whole = isinstance(value, (int, np.integer)) and not isinstance(value, bool)
    if not whole or not low <= value <= high:  # type: ignore[operator]
        raise ValueError(f"{name}={value!r}: give a whole number from {low:,} to {high:,}")
    return int(value)  # type: ignore[call-overload]


def load_background(
    name: str, split: str = "train", seed: int = 0, max_tokens: int = 64, tokenizer: str | None = None
) -> Background:
    """Load the background of a split.

    Args:
        name: ``"generated"``: the sentences of ``NUM_ENTITIES`` articles of the synthetic world, whose splits share no
            name; ``"books"``: the texts in ``$RETRIEVAL_GYM_DATA/books/`` or the cache's ``books/``; or a path.
            Train reads the folder ``train``, dev and test read ``eval``, so that they share no book. A path may also
            be one text file, or a folder of text files (``.txt``) without these folders, which serve every split.
            Files follow one another by name.
        split: ``"train"``, ``"dev"`` or ``"test"``.
        seed: of the generated text.
        max_tokens: a sentence of more tokens is halved, between words, until no part has more.
        tokenizer: see ``TokenCounter``; by default tokens are estimated as ``BOOK_RATIO`` or ``GENERATED_RATIO``.

    Raises:
        FileNotFoundError: when the texts are nowhere; the message names every place searched.
        ValueError: when a text is not UTF-8 or the texts hold no sentence.
    """
    files = () if name == "generated" else tuple(_book_files(name, split))
    stamps = tuple((str(file), file.stat().st_mtime_ns) for file in files)
    return _load(name, split, seed, max_tokens, tokenizer, stamps)


def split_sentences(text: str) -> Iterator[str]:
    """Yield the sentences of running text on one line each, in order.

    Paragraphs end at blank lines, sentences at ``.``, ``!`` or ``?`` with any closing quotes, before white space and a
    capital letter or digit; initials and common titles (``Mr.``) end none. Headings are left out: what has no small
    letter, and the likes of ``Chapter 1``.
    """
    for paragraph in _PARAGRAPHS.split(text):
        line = " ".join(paragraph.split())
        start = 0
        for end in (match.end() for match in _END.finditer(line)):
            if not _ABBREVIATION.search(line, max(start, end - 8), end):
                yield from _prose(line[start:end])
                start = end
        yield from _prose(line[start:])


def _prose(piece: str) -> Iterator[str]:
    piece = piece.strip()
    if any(map(str.islower, piece)) and not _HEADING.fullmatch(piece):
        yield piece


@lru_cache(maxsize=8)
def _load(
    name: str,
    split: str,
    seed: int,
    max_tokens: int,
    tokenizer: str | None,
    stamps: tuple[tuple[str, int], ...],
) -> Background:
    """Return a background; the times of its files are part of the key, so that a changed file is read again."""
    if name == "generated":
        world = generate_world(NUM_ENTITIES, split, seed)
        texts, licence = [entity.text for entity in world.entities], "MIT"
        source = f"generated (seed {seed}, {split} world of {NUM_ENTITIES:,} articles)"
        counter = TokenCounter(GENERATED_RATIO, tokenizer)
    else:
        files = [Path(file) for file, _ in stamps]
        texts, licence = [_read(file) for file in files], "that of the texts"
        source = f"{', '.join(file.name for file in files)} in {files[0].parent}"
        counter = TokenCounter(BOOK_RATIO, tokenizer)
    sentences = [sentence for text in texts for sentence in split_sentences(text)]
    if not sentences:
        raise ValueError(f"{source} holds no sentence: give running text with small letters")
    sentences, tokens = cut_long(sentences, counter, max_tokens)
    return Background(tuple(sentences), tokens, source, licence, counter)


def cut_long(sentences: Sequence[str], counter: TokenCounter, max_tokens: int) -> tuple[list[str], Ids]:
    """Halve, between words, what has more than ``max_tokens`` tokens until nothing has; a single word stays whole.

    Returns:
        All sentences in order, and the tokens of each, int64.
    """
    parts, tokens = list(sentences), counter(sentences)
    while True:
        halves: list[str] = []
        for part, size in zip(parts, tokens.tolist(), strict=True):
            words = part.split() if size > max_tokens else []
            middle = len(words) // 2
            halves += [" ".join(words[:middle]), " ".join(words[middle:])] if middle else [part]
        if len(halves) == len(parts):
            return parts, tokens
        parts, tokens = halves, counter(halves)


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{file}: not UTF-8 ({error}): convert the file to UTF-8") from error


def _book_files(name: str, split: str) -> list[Path]:
    searched = []
    for base in _places(name):
        if base.is_file():
            return [base]
        halves = any((base / folder).is_dir() for folder in set(FOLDERS.values()))
        folder = base / FOLDERS[split] if halves else base
        if name == "books" and not halves:
            folder = base / FOLDERS[split]  # the named collection never serves one book to two splits
        if files := sorted(folder.glob("*.txt")):
            return files
        searched.append(f"{folder} (no .txt file)" if folder.is_dir() else f"{folder} (absent)")
    if name == "books" and not os.environ.get("RETRIEVAL_GYM_DATA"):
        searched.insert(0, "$RETRIEVAL_GYM_DATA (not set)")
    raise FileNotFoundError(
        f"no background text for {split}; searched: {'; '.join(searched)}. Put plain texts of public-domain books, "
        f"such as Project Gutenberg's, into DIR/books/train/*.txt and DIR/books/eval/*.txt and set "
        "RETRIEVAL_GYM_DATA=DIR, give a path, or take 'generated', which needs no file."
    )


def _places(name: str) -> list[Path]:
    if name != "books":
        return [Path(name).expanduser()]
    data = os.environ.get("RETRIEVAL_GYM_DATA")
    return [*([Path(data).expanduser() / "books"] if data else []), cache_folder() / "books"]


@lru_cache(maxsize=2)
def _tokenizer(path: str):  # type: ignore[no-untyped-def]
    file = Path(path).expanduser()
    file = file / "tokenizer.json" if file.is_dir() else file
    if not file.is_file():
        raise FileNotFoundError(f"tokenizer={path!r}: {file} is absent; give a tokenizer.json or the folder of a model")
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise ImportError(f"tokenizer={path!r} needs pip install 'retrieval-gym[agents]'") from error
    tokenizer = Tokenizer.from_file(str(file))
    tokenizer.no_truncation()  # some models' files cut at their longest input
    tokenizer.no_padding()
    return tokenizer
