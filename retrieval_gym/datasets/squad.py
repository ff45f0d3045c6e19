"""Files in SQuAD's format: paragraphs of articles, and questions about each (Rajpurkar et al. 2016)."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from retrieval_gym.datasets.base import Passage, Question
from retrieval_gym.datasets.readers import get_field, get_key, get_text
from retrieval_gym.datasets.sources import cache_folder

SQUAD = {"train": ("train-v1.1.json", "train-v2.0.json"), "dev": ("dev-v1.1.json", "dev-v2.0.json")}
SQUAD_HOMEPAGE = "https://rajpurkar.github.io/SQuAD-explorer"


def find_squad(split: str, path: str | Path | None) -> Path:
    """Return the file of a split: ``path``, or what lies in it or in the folders that data are looked for in.

    Raises:
        FileNotFoundError: when it is nowhere; the message names every place searched.
    """
    data = os.environ.get("RETRIEVAL_GYM_DATA")
    folders = [*([Path(data).expanduser() / "squad"] if data else []), cache_folder() / "squad"]
    if path is not None:
        if Path(path).is_file():
            return Path(path)
        folders = [Path(path)]
    for file in (folder / name for folder in folders for name in SQUAD.get(split, ())):
        if file.is_file():
            return file
    searched = [str(folder) if folder.exists() else f"{folder} (absent)" for folder in folders]
    if path is None and not data:
        searched.insert(0, "$RETRIEVAL_GYM_DATA (not set)")
    names = " or ".join(SQUAD.get(split, ())) or f"a {split} file"
    raise FileNotFoundError(
        f"squad/{names} was not found; searched: {'; '.join(searched)}. Get it from {SQUAD_HOMEPAGE} and put it into "
        f"DIR/squad with RETRIEVAL_GYM_DATA=DIR, or give a file in SQuAD's format as path= (no labelled test split is "
        "published)."
    )


def read_squad(file: Path) -> tuple[list[Passage], dict[int, list[int]], list[Question], int]:
    """Return the distinct paragraphs, each one's article (paragraphs by number), the questions, and how many lack one.

    Raises:
        ValueError: when the file is not JSON or has another layout; the message says where.
    """
    try:
        content = json.loads(file.read_text(encoding="utf-8-sig"))
    except ValueError as error:
        raise ValueError(f"{file}: not JSON in UTF-8 ({error}): give a file in SQuAD's format") from error
    if not isinstance(content, dict):
        raise ValueError(f"{file}: must be a JSON object with 'data', a list of articles, got {type(content).__name__}")
    index: dict[Passage, int] = {}
    articles: dict[int, list[int]] = {}
    questions: dict[str, Question] = {}
    unanswered = 0
    for a, article in enumerate(_records(content, "data", str(file)), start=1):
        here = f"{file}, article {a}"
        title, own = get_field(article, "title", str, here, ""), list[int]()
        for p, paragraph in enumerate(_records(article, "paragraphs", here), start=1):
            where = f"{here}, paragraph {p}"
            number = index.setdefault(
                Passage(title.replace("_", " "), get_text(paragraph, "context", where)), len(index)
            )
            if number not in articles:
                own.append(number)
                articles[number] = own
            for asked in _records(paragraph, "qas", where):
                key = get_key(asked.get("id"), "id", where)
                answers = [get_text(each, "text", where) for each in _records(asked, "answers", where)]
                if get_field(asked, "is_impossible", bool, where, False) or not answers:
                    unanswered += 1
                    continue
                if key in questions:
                    raise ValueError(f"{where}: question id {key!r} occurs twice: ids must be unique")
                text = get_text(asked, "question", where).strip()
                questions[key] = Question(key, text, (number,), tuple(dict.fromkeys(answers)))
    if not questions:
        raise ValueError(f"{file} holds no question with an answer ({unanswered} without)")
    return list(index), articles, list(questions.values()), unanswered


def _records(record: dict[str, Any], name: str, where: str) -> list[dict[str, Any]]:
    values = get_field(record, name, list, where)
    for value in values:
        if not isinstance(value, dict):
            raise ValueError(f"{where}: field {name!r} must hold objects, got {value!r:.80}")
    return values
