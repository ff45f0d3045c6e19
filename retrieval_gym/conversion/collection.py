"""A corpus and questions as they are written: a folder in the layout of ``datasets/jsonl.py``."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from retrieval_gym.datasets.readers import Record
from retrieval_gym.files import writing
from retrieval_gym.validation import plain_question


@dataclass
class Collection:
    """A corpus and questions as they are written.

    Attributes:
        passages: records ``{id, title, text}``.
        questions: records of each split; the split ``""`` is ``questions.jsonl``, which serves every split.
        dropped: what was left out, reason to count.
    """

    passages: list[Record]
    questions: dict[str, list[Record]] = field(default_factory=dict)
    dropped: Counter[str] = field(default_factory=Counter)

    @property
    def most_gold(self) -> int:
        """Largest number of gold passages of a question; 0 without questions."""
        return max((len(record["gold_ids"]) for asked in self.questions.values() for record in asked), default=0)


def question_record(
    key: str, text: str, gold: Sequence[str], answers: Sequence[str], ordered: bool, pool: Sequence[str] | None = None
) -> Record:
    """Return a question as one line of ``questions.jsonl`` holds it; what is empty or the default is left out."""
    record: Record = {"id": key, "question": text, "gold_ids": list(gold)}
    if answers:
        record["answers"] = list(answers)
    if pool is not None:
        record["pool_ids"] = list(pool)
    return record if ordered else {**record, "ordered": False}


def add_id(places: dict[str, str], key: str, what: str, where: str) -> None:
    """Note where an id stands.

    Args:
        places: where each id stands; the new one is added.
        key: the id.
        what: what it names, for the message.
        where: where it stands.

    Raises:
        ValueError: when it stands elsewhere already.
    """
    if key in places:
        raise ValueError(f"{where}: {what} id {key!r} occurs twice, first at {places[key]}: make ids unique")
    places[key] = where


def drop_shared(collection: Collection) -> None:
    """Leave questions that several splits ask in one of them: in test rather than dev, in dev rather than train."""
    kept: set[str] = set()
    for split in sorted(collection.questions, key=("test", "dev", "train", "").index):
        records = collection.questions[split]
        own = [record for record in records if plain_question(record["question"]) not in kept]
        if len(own) < len(records):
            collection.dropped[f"questions of {split} that another split asks too"] += len(records) - len(own)
        collection.questions[split] = own
        kept.update(plain_question(record["question"]) for record in own)


def write_collection(collection: Collection, target: str | Path) -> list[str]:
    """Write a new folder of ``corpus.jsonl`` and ``questions_{split}.jsonl``, or nothing at all; return their names.

    Raises:
        ValueError: when there is no passage, a split has no question, or the target holds something already.
        OSError: when the folder cannot be written.
    """
    if not collection.passages:
        raise ValueError(f"no passage is left to write (dropped: {dict(collection.dropped) or 'none'})")
    path = Path(target)
    if path.exists() and not (path.is_dir() and not any(path.iterdir())):
        raise ValueError(f"{target} is there already: name a new folder, or an empty one")
    empty = [split for split, records in collection.questions.items() if not records]
    if empty:
        raise ValueError(f"no question of {empty[0] or 'the questions'} is left (dropped: {dict(collection.dropped)})")
    files = {"corpus.jsonl": collection.passages}
    for split, records in collection.questions.items():
        files[f"questions_{split}.jsonl" if split else "questions.jsonl"] = records
    with writing(target):
        path.parent.mkdir(parents=True, exist_ok=True)
        new = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
        try:
            for name, records in files.items():
                _write_jsonl(new / name, records)
            new.chmod(0o777 & ~_umask())
            if path.exists():
                path.rmdir()
            os.rename(new, path)
        finally:
            shutil.rmtree(new, ignore_errors=True)
    return list(files)


def _write_jsonl(path: Path, records: Iterable[Record]) -> None:
    with open(path, "w", encoding="utf-8", newline="\n") as file:
        for record in records:
            file.write(json.dumps(record, ensure_ascii=False) + "\n")
        file.flush()
        os.fsync(file.fileno())


def _umask() -> int:
    """Return the process's mask, which ``mkdtemp`` does not look at."""
    mask = os.umask(0)
    os.umask(mask)
    return mask
