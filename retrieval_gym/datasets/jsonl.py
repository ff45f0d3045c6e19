"""A folder of your own: ``corpus.jsonl`` and ``questions.jsonl``."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np

from retrieval_gym.datasets.base import Corpus, Ids, Question, RetrievalDataset
from retrieval_gym.datasets.corpus_files import Rows, corpus_of_files
from retrieval_gym.datasets.readers import Record, get_field, get_key, get_strings, get_text, read_jsonl


def load_custom(split: str = "train", path: str | Path | None = None, form: str | None = None) -> RetrievalDataset:
    """Load the questions and the corpus in a folder.

    Each file is one JSON object a line, plain or ``.gz``; fields other than these are ignored:

    - ``corpus.jsonl``: ``id``, ``text`` and optionally ``title``.
    - the questions: ``id``, ``question``, ``gold_ids`` (in chain order) and optionally ``answers`` (strings),
      ``pool_ids`` (the question's own candidates in document order; they include the gold) and ``ordered`` (whether
      the order of ``gold_ids`` means anything; true when left out).

    Ids are strings; an integer counts as its decimal string. The questions of a split stand in
    ``questions_{split}.jsonl``, else in ``{split}.jsonl``. ``questions.jsonl`` serves every split of a folder in which
    no split has such a file, so that no split stands in for another unsaid.

    Args:
        split: ``"train"``, ``"dev"`` or ``"test"``.
        path: the folder.
        form: ``"pool"`` (each question picks from its ``pool_ids``) or ``"corpus"`` (from the whole corpus); by
            default ``"pool"`` when the questions have ``pool_ids``.

    Raises:
        FileNotFoundError: when the folder or a file is missing.
        ValueError: when ``path`` is not given, ``form`` is unknown or some questions lack ``pool_ids``, or the data are
            malformed; the message names file, line and value.
    """
    if form not in (None, "pool", "corpus"):
        raise ValueError(f"unknown form {form!r}: choose 'pool' or 'corpus'")
    if path is None:
        raise ValueError("the dataset 'custom' needs path=: a folder with corpus.jsonl and questions.jsonl")
    folder = Path(path)
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder} is not a folder: give one that holds corpus.jsonl and questions.jsonl")
    corpus_file = corpus_path(folder)
    corpus = read_corpus(corpus_file)
    file = _questions_path(folder, split)
    questions, pools = read_questions(file, corpus, corpus_file)
    with_pool = [pool is not None for pool in pools]
    if form == "pool" or (form is None and any(with_pool)):
        if not all(with_pool):
            bare = questions[with_pool.index(False)].id
            raise ValueError(f"{file}: question {bare!r} has no pool_ids: add it, or use form='corpus'")
        form = "pool"
    return RetrievalDataset(
        name="custom",
        split=split,
        corpus=corpus,
        questions=questions,
        pools=[pool for pool in pools if pool is not None] if form == "pool" else None,
        source=str(file),
    )


def corpus_path(path: str | Path) -> Path:
    """Return the corpus file that ``path`` is, or that stands in the folder ``path``.

    Raises:
        FileNotFoundError: when there is none.
    """
    path = Path(path)
    if path.is_file():
        return path
    file = _plain_or_gz(path / "corpus.jsonl")
    if file is None:
        raise FileNotFoundError(
            f"no corpus at {path}: give a corpus.jsonl (or .gz) of id, title and text, or its folder"
        )
    return file


def questions_beside(corpus_file: Path, name: str, split: str) -> Path | None:
    """Return ``{name}_{split}.jsonl`` (or ``.gz``) from the corpus's folder, or None when there is none."""
    return _plain_or_gz(corpus_file.parent / f"{name}_{split}.jsonl")


def read_corpus(path: str | Path) -> Corpus:
    """Read passages ``{id, title?, text}``, one a line; many of them stay on disk, see ``corpus_of_files``.

    Raises:
        FileNotFoundError: when there is no such file.
        ValueError: when it is empty, a field is missing or wrong, an id occurs twice or a passage has no words.
    """
    path = Path(path)

    def rows() -> Rows:
        for where, record in read_jsonl(path):
            key, title = get_key(record.get("id"), "id", where), get_field(record, "title", str, where, default="")
            yield where, key, title, get_field(record, "text", str, where)

    corpus, _ = corpus_of_files([path], rows, drop_blank=False)
    return corpus


def read_questions(
    path: str | Path,
    corpus: Corpus,
    corpus_file: str | Path,
    ordered: Callable[[Record], bool] = lambda record: True,
) -> tuple[list[Question], list[Ids | None]]:
    """Read questions ``{id, question, gold_ids, answers?, pool_ids?, ordered?}``, one a line.

    Args:
        path: the file.
        corpus: the passages that the ids name.
        corpus_file: where the corpus was read, for messages.
        ordered: tells of a record without the field ``ordered`` whether the order of its gold means anything.

    Returns:
        The questions, and for each its pool as int64 corpus ids, or None when it has no ``pool_ids``.

    Raises:
        FileNotFoundError: when there is no such file.
        ValueError: when the file is empty, a field is missing or wrong, an id occurs twice or is not in the corpus, or
            a gold passage is missing from the pool.
    """
    questions: list[Question] = []
    pools: list[Ids | None] = []
    lines: dict[str, str] = {}
    for where, record in read_jsonl(path):
        key = get_key(record.get("id"), "id", where)
        if key in lines:
            raise ValueError(f"{where}: question id {key!r} occurs twice, first at {lines[key]}: make ids unique")
        lines[key] = where
        gold = _corpus_ids(record, "gold_ids", where, corpus, corpus_file)
        pool = None
        if record.get("pool_ids") is not None:
            pool = _corpus_ids(record, "pool_ids", where, corpus, corpus_file)
            outside = set(gold).difference(pool)
            if outside:
                raise ValueError(f"{where}: gold id {corpus.keys[min(outside)]!r} is not in pool_ids: add it there")
        questions.append(
            Question(
                id=key,
                text=get_text(record, "question", where),
                gold=gold,
                answers=tuple(get_strings(record, "answers", where, default=[])),
                ordered=get_field(record, "ordered", bool, where, default=ordered(record)),
            )
        )
        pools.append(None if pool is None else np.array(pool, np.int64))
    return questions, pools


def _corpus_ids(record: Record, name: str, where: str, corpus: Corpus, corpus_file: str | Path) -> tuple[int, ...]:
    keys = [get_key(value, name, where) for value in get_field(record, name, list, where)]
    if not keys:
        raise ValueError(f"{where}: field {name!r} is empty: name at least one passage, or remove the question")
    for key in keys:
        if key not in corpus.ids:
            raise ValueError(f"{where}: {name} {key!r} is not in {corpus_file}: add that passage or correct the id")
    if len(set(keys)) < len(keys):
        raise ValueError(f"{where}: {name} {_twice(keys)!r} occurs twice: name each passage once")
    return tuple(corpus.ids[key] for key in keys)


def _twice(keys: Iterable[str]) -> str:
    seen: set[str] = set()
    return next(key for key in keys if key in seen or seen.add(key))  # type: ignore[func-returns-value]


def _questions_path(folder: Path, split: str) -> Path:
    names = {each: (f"questions_{each}.jsonl", f"{each}.jsonl") for each in ("train", "dev", "test")}
    for name in names[split]:
        if file := _plain_or_gz(folder / name):
            return file
    others = [file for each in names for name in names[each] if (file := _plain_or_gz(folder / name))]
    file = _plain_or_gz(folder / "questions.jsonl")
    if file is not None and not others:
        return file
    detail = f"; questions.jsonl is not read because {others[0].name} gives a split of its own" if file else ""
    raise FileNotFoundError(
        f"no questions for split {split!r} in {folder}: looked for {' and '.join(names[split])} (or .gz)"
        f"{detail or ' and questions.jsonl'}"
    )


def _plain_or_gz(file: Path) -> Path | None:
    for candidate in (file, file.with_name(file.name + ".gz")):
        if candidate.is_file():
            return candidate
    return None
