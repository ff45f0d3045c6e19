"""A dataset of the library ``datasets``, from files or from the Hub, as a collection."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from retrieval_gym.conversion.collection import Collection, drop_shared, question_record
from retrieval_gym.datasets.readers import Record, get_field, get_key, get_text

CORPUS_COLUMNS = {"id": "id", "title": "title", "text": "text"}
QUESTION_COLUMNS = {name: name for name in ("id", "question", "gold_ids", "answers", "pool_ids")}
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
    """Read passages, and questions where there are some, with the library ``datasets`` (extra ``data``).

    Args:
        source: a file (csv, tsv, json, jsonl, parquet, arrow), a folder of such files or one that ``save_to_disk``
            wrote, or a Hub id.
        columns: the columns of ``id``, ``title`` and ``text``, where they have other names; without a column of ids
            passages are numbered, and ``title`` may be missing.
        config: configuration of the dataset, where it has several.
        part: its split that holds the passages, where it has several.
        questions: the same of the questions. Their splits train, validation and test are written as such; one of any
            other name serves every split, or is ``split``.
        question_columns: the columns of ``id``, ``question``, ``gold_ids``, ``answers`` and ``pool_ids``. An id, or an
            answer, that is no list is one.
        question_config: configuration of ``questions``, where it has several.
        split: what the questions are, where they have one split.

    Raises:
        ImportError: when ``datasets`` is not installed.
        FileNotFoundError: when the source can neither be found nor fetched.
        ValueError: when a column is missing or malformed, or a configuration or split must be named.
    """
    names = _columns(columns, CORPUS_COLUMNS, "--columns")
    collection = Collection([])
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
        collection.passages.append({"id": key, "title": title, "text": text})
    if questions is None:
        return collection
    asked = _columns(question_columns or {}, QUESTION_COLUMNS, "--question-columns")
    known = {record["id"] for record in collection.passages}
    parts = _open_hf(questions, question_config)
    for name, rows in parts.items():
        target = split if split and len(parts) == 1 else HUB_SPLITS.get(name, "" if len(parts) == 1 else None)
        if target is None:
            collection.dropped[f"splits of other names than {', '.join(HUB_SPLITS)}: {name}"] += 1
            continue
        kept = collection.questions.setdefault(target, [])
        for number, (where, row) in enumerate(_rows(rows, f"{questions}, {name}")):
            key = str(number)
            if asked["id"] in row:
                key = get_key(row[asked["id"]], asked["id"], where)
            gold = _keys(row, asked["gold_ids"], where)
            pool = _keys(row, asked["pool_ids"], where) if row.get(asked["pool_ids"]) is not None else None
            if not gold:
                collection.dropped["questions without gold"] += 1
            elif not known.issuperset(gold):
                collection.dropped["questions with gold that is not among the passages"] += 1
            else:
                answers = row.get(asked["answers"])
                answers = [answers] if isinstance(answers, str) else [str(answer) for answer in answers or []]
                text = get_text(row, asked["question"], where)
                kept.append(question_record(key, text, list(dict.fromkeys(gold)), answers, True, pool))
    drop_shared(collection)
    return collection


def _columns(given: Mapping[str, str], known: Mapping[str, str], flag: str) -> dict[str, str]:
    unknown = sorted(given.keys() - known.keys())
    if unknown:
        raise ValueError(f"{flag} {unknown[0]}={given[unknown[0]]}: it names the columns of {', '.join(known)}")
    return {**known, **given}


def _keys(row: Record, name: str, where: str) -> list[str]:
    value = row.get(name)
    if name not in row:
        raise ValueError(f"{where}: there is no column {name!r}; it has {', '.join(map(repr, row))}")
    values = value if isinstance(value, list) else [] if value is None else [value]
    return [get_key(each, name, where) for each in values]


def _only_split(source: str, config: str | None, part: str | None) -> Iterator[tuple[str, Record]]:
    parts = _open_hf(source, config)
    if part is None and len(parts) > 1:
        raise ValueError(f"{source} has the splits {', '.join(parts)}: name that of the passages, with --hf-split")
    name = part or next(iter(parts))
    if name not in parts:
        raise ValueError(f"{source} has no split {name!r}: choose one of {', '.join(parts)}")
    return _rows(parts[name], f"{source}, {name}")


def _rows(rows: Iterable[Record], place: str) -> Iterator[tuple[str, Record]]:
    for number, row in enumerate(rows, start=1):
        yield f"{place}, row {number}", row


def _open_hf(source: str, config: str | None) -> dict[str, Iterable[Record]]:
    """Return the splits of a dataset, without a copy in the library's own cache."""
    try:
        import datasets
    except ImportError as error:
        raise ImportError("--from hf needs datasets: pip install 'retrieval-gym[data]'") from error
    path = Path(source)
    builders = {
        ".csv": "csv",
        ".tsv": "csv",
        ".json": "json",
        ".jsonl": "json",
        ".parquet": "parquet",
        ".arrow": "arrow",
    }
    try:
        if path.is_file():
            suffix = Path(path.name.removesuffix(".gz")).suffix
            if suffix not in builders:
                raise ValueError(f"cannot tell the format of {path}: name it {', '.join(builders)}")
            options = {"delimiter": "\t"} if suffix == ".tsv" else {}
            found = datasets.load_dataset(builders[suffix], data_files=str(path), streaming=True, **options)
        elif (path / "dataset_dict.json").is_file() or (path / "state.json").is_file():
            found = datasets.load_from_disk(str(path))
        else:
            found = datasets.load_dataset(source, config, streaming=True)
    except ValueError:
        raise
    except Exception as error:  # the libraries below, and so their errors, differ between versions
        detail = " ".join(str(error).split())[:200] or type(error).__name__
        raise FileNotFoundError(
            f"{source} cannot be opened: no such file or folder, and as a Hub id: {detail}"
        ) from error
    return dict(found) if isinstance(found, dict) else {"train": found}
