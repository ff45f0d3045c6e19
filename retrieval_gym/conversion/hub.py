"""Tables of passages and questions, in files or of the library ``datasets``, as a collection."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from retrieval_gym.conversion.collection import Collection, add_id, drop_shared, question_record
from retrieval_gym.conversion.tables import DELIMITERS, RECORDS, read_table, suffix
from retrieval_gym.datasets.readers import Record, get_field, get_key, get_text

CORPUS_COLUMNS = {"id": "id", "title": "title", "text": "text"}
QUESTION_COLUMNS = {name: name for name in ("id", "question", "gold_ids", "answers", "pool_ids")}
Rows = Iterable[tuple[str, Record]]  # with where each stands
HUB_SPLITS = {"train": "train", "validation": "dev", "valid": "dev", "dev": "dev", "test": "test"}


def from_hf(
    source: str,
    columns: Mapping[str, str],
    *,
    config: str | None = None,
    part: str | None = None,
    questions: str | None = None,
    question_columns: Mapping[str, str] | None = None,
    question_config: str | None = None,
    split: str = "",
) -> Collection:
    """Read passages, and questions where there are some.

    Args:
        source: a file (csv, tsv, json, jsonl, parquet), or what the library ``datasets`` (extra ``data``) reads: an
            arrow file, a folder of files or one that ``save_to_disk`` wrote, a Hub id.
        columns: the columns of ``id``, ``title`` and ``text``, where they have other names; without a column of ids
            passages are numbered, and ``title`` may be missing.
        config: configuration of the dataset, where it has several.
        part: its split that holds the passages, where it has several.
        questions: the same of the questions. Their splits train, validation and test are written as such; one of any
            other name serves every split, or is ``split``.
        question_columns: the columns of ``id``, ``question``, ``gold_ids``, ``answers`` and ``pool_ids``. An id, or an
            answer, that is no list is one. A question whose gold is not among the passages, or not in its pool, whose
            pool is not among the passages, or that alone has no pool is left out and counted.
        question_config: configuration of ``questions``, where it has several.
        split: what the questions are, where they have one split.

    Raises:
        ImportError: when ``datasets`` is not installed.
        FileNotFoundError: when the source can neither be found nor fetched.
        ValueError: when the source cannot be read, a column is missing or malformed, an id occurs twice, or a
            configuration or split must be named, or means nothing.
    """
    names = _columns(columns, CORPUS_COLUMNS, "--columns")
    collection = Collection([])
    places: dict[str, str] = {}
    for where, row in _only_split(source, config, part):
        empty_cell = names["text"] in row and row[names["text"]] is None
        text = "" if empty_cell else get_field(row, names["text"], str, where)
        title = get_field(row, names["title"], str, where, default="")
        if not f"{title}{text}".strip():
            collection.dropped["passages with neither title nor text"] += 1
            continue
        key = str(len(collection.passages))
        if "id" in columns or names["id"] in row:
            key = get_key(row.get(names["id"]), names["id"], where)
        add_id(places, key, "passage", where)
        collection.passages.append({"id": key, "title": title, "text": text})
    if questions is None:
        return collection
    asked = _columns(question_columns or {}, QUESTION_COLUMNS, "--question-columns")
    parts = _open(questions, question_config, "--question-config")
    for name, rows in parts.items():
        target = split if split and len(parts) == 1 else HUB_SPLITS.get(name, "" if len(parts) == 1 else None)
        if target is None:
            collection.dropped[f"splits of other names than {', '.join(HUB_SPLITS)}: {name}"] += 1
            continue
        collection.questions.setdefault(target, []).extend(_questions(rows, asked, places, collection.dropped))
    drop_shared(collection)
    return collection


def _questions(rows: Rows, columns: Mapping[str, str], passages: Container[str], dropped: Counter[str]) -> list[Record]:
    """Return the questions of one split that can be asked of ``passages``; count the others."""
    kept: list[Record] = []
    places: dict[str, str] = {}
    for number, (where, row) in enumerate(rows):
        key = str(number)
        if columns["id"] in row:
            key = get_key(row[columns["id"]], columns["id"], where)
        add_id(places, key, "question", where)
        gold = _keys(row, columns["gold_ids"], where)
        pool = _keys(row, columns["pool_ids"], where) if row.get(columns["pool_ids"]) is not None else []
        if not gold:
            dropped["questions without gold"] += 1
        elif not all(each in passages for each in gold):
            dropped["questions with gold that is not among the passages"] += 1
        elif not all(each in passages for each in pool):
            dropped["questions with a pool that is not among the passages"] += 1
        elif pool and not set(pool).issuperset(gold):
            dropped["questions with gold that is not in their pool"] += 1
        else:
            answers = _answers(row, columns["answers"], where)
            text = get_text(row, columns["question"], where)
            kept.append(question_record(key, text, gold, answers, True, pool or None))
    pooled = [record for record in kept if "pool_ids" in record]
    if pooled and len(pooled) < len(kept):
        dropped["questions without a pool, where others have one"] += len(kept) - len(pooled)
        return pooled
    return kept


def _columns(given: Mapping[str, str], known: Mapping[str, str], flag: str) -> dict[str, str]:
    unknown = sorted(given.keys() - known.keys())
    if unknown:
        raise ValueError(f"{flag} {unknown[0]}={given[unknown[0]]}: it names the columns of {', '.join(known)}")
    return {**known, **given}


def _keys(row: Record, name: str, where: str) -> list[str]:
    """Return the ids in a column, each once."""
    if name not in row:
        raise ValueError(f"{where}: there is no column {name!r}; it has {', '.join(map(repr, row))}")
    return list(dict.fromkeys(get_key(each, name, where) for each in _listed(row[name])))


def _answers(row: Record, name: str, where: str) -> list[str]:
    """Return the answers in a column, which may be missing; tables hold some of them as numbers."""
    answers = [answer for answer in _listed(row.get(name)) if answer is not None]
    wrong = [answer for answer in answers if isinstance(answer, bool) or not isinstance(answer, (str, int, float))]
    if wrong:
        raise ValueError(f"{where}: field {name!r} must hold strings, got {wrong[0]!r:.80}")
    return [str(answer) for answer in answers]


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [] if value is None else [value]


def _only_split(source: str, config: str | None, part: str | None) -> Rows:
    parts = _open(source, config, "--config")
    if part is None and len(parts) > 1:
        raise ValueError(f"{source} has the splits {', '.join(parts)}: name that of the passages, with --hf-split")
    name = part or next(iter(parts))
    if name not in parts:
        raise ValueError(f"{source} has no split {name!r}: choose one of {', '.join(parts)}")
    return parts[name]


def _open(source: str, config: str | None, flag: str) -> dict[str, Rows]:
    """Return the splits of a source; a file is the split train, as the library ``datasets`` calls it."""
    path = Path(source)
    if config is not None and (path.is_file() or _is_saved(path)):
        raise ValueError(f"{flag} {config} would do nothing, as {source} has no configurations: leave it out")
    if path.is_file() and suffix(path) != ".arrow":
        if suffix(path) not in (*DELIMITERS, *RECORDS):
            raise ValueError(
                f"cannot tell the format of {path}: name it {', '.join((*DELIMITERS, *RECORDS))} or .arrow"
            )
        return {"train": read_table(path)}
    return {name: _rows(rows, f"{source}, {name}") for name, rows in _open_library(source, config).items()}


def _is_saved(path: Path) -> bool:
    """Say whether ``save_to_disk`` wrote a folder."""
    return any((path / name).is_file() for name in ("dataset_dict.json", "state.json"))


def _open_library(source: str, config: str | None) -> dict[str, Iterable[Record]]:
    """Return the splits that the library ``datasets`` finds, without a copy in its own cache."""
    try:
        import datasets
    except ImportError as error:
        raise ImportError("--from hf needs datasets: pip install 'retrieval-gym[data]'") from error
    path = Path(source)
    datasets.utils.logging.set_verbosity(datasets.utils.logging.CRITICAL)  # what it logs is raised too
    try:
        if path.is_file():
            found = datasets.load_dataset("arrow", data_files=str(path), streaming=True)
        elif _is_saved(path):
            found = datasets.load_from_disk(str(path))
        else:
            found = datasets.load_dataset(source, config, streaming=True)
    except Exception as error:  # the libraries below, and so their errors, differ between versions
        if path.exists():
            raise ValueError(f"{source} cannot be read as a dataset: {_detail(error)}") from error
        raise FileNotFoundError(
            f"{source} cannot be opened: no such file or folder, and as a Hub id: {_detail(error)}"
        ) from error
    return dict(found) if isinstance(found, dict) else {"train": found}


def _rows(rows: Iterable[Record], place: str) -> Iterator[tuple[str, Record]]:
    iterator, number = iter(rows), 0
    while True:
        number += 1
        try:
            row = next(iterator)
        except StopIteration:
            return
        except Exception as error:  # as in _open_library
            raise ValueError(f"{place}, row {number} cannot be read: {_detail(error)}") from error
        yield f"{place}, row {number}", row


def _detail(error: Exception) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__
