"""Datasets that this package loads (BEIR, HotpotQA, 2WikiMultihopQA, MuSiQue), as a collection."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from retrieval_gym.conversion.collection import Collection, drop_shared, question_record
from retrieval_gym.datasets.base import Passage, RetrievalDataset
from retrieval_gym.datasets.load import SPLITS, load_dataset
from retrieval_gym.datasets.sources import find_local

POOLED = ("hotpotqa", "musique", "2wiki")


def from_datasets(name: str, source: str | Path, splits: Sequence[str] = (), form: str | None = None) -> Collection:
    """Read a dataset that this package loads: ``beir``, ``hotpotqa``, ``musique`` or ``2wiki``.

    Passages equal in title and text become one where the splits do not share a corpus. Ids of passages are the source's
    own for ``beir``, else numbers.

    Args:
        name: the dataset's name.
        source: its folder, or the file of one split.
        splits: which; by default those that are there. A file needs one named.
        form: of the pooled datasets: ``"pool"``, the default, keeps each question's paragraphs as ``pool_ids``;
            ``"corpus"`` does not, and keeps the paragraphs of questions that are left out.

    Raises:
        FileNotFoundError: when there is no such folder or no split in it.
        ValueError: when an argument means nothing, or the data are malformed.
    """
    path = Path(source)
    if not path.exists():
        raise FileNotFoundError(f"{source} is not there: give the folder or file of {name}")
    if form is not None and name not in POOLED:
        raise ValueError(f"form={form!r} is for {', '.join(POOLED)}: {name} has no pools")
    if path.is_file() and len(splits) != 1:
        raise ValueError(f"{source} is the file of one split: name it, with --split dev, say")
    chosen = list(splits) or [split for split in SPLITS if _is_there(name, split, path)]
    if not chosen:
        chosen = ["train"]  # to be told what was looked for
    options = {"form": form or "pool"} if name in POOLED else {}
    parts = {split: load_dataset(name, split, path, **options) for split in chosen}
    return _join(parts)


def _is_there(name: str, split: str, path: Path) -> bool:
    if name in POOLED:
        return find_local(name, split, path) is not None
    return any((path / f"{stem}.tsv{end}").is_file() for stem in (f"qrels/{split}", split) for end in ("", ".gz"))


def _join(parts: Mapping[str, RetrievalDataset]) -> Collection:
    """Put splits over one corpus, that of them all."""
    first = next(iter(parts.values())).corpus
    shared = all(part.corpus.fingerprint == first.fingerprint for part in parts.values())
    index: dict[Passage, int] = {}
    places: dict[str, Sequence[int]] = {}
    for split, part in parts.items():
        places[split] = (
            range(len(first)) if shared else [index.setdefault(passage, len(index)) for passage in part.corpus]
        )
    keys = list(first.keys) if shared else [str(i) for i in range(len(index))]
    collection = Collection([])
    blank = set()
    for key, passage in zip(keys, first if shared else index, strict=True):
        if str(passage).strip():
            collection.passages.append({"id": key, "title": passage.title, "text": passage.text})
        else:
            blank.add(key)
            collection.dropped["passages with neither title nor text"] += 1
    for split, part in parts.items():
        for reason, count in part.dropped.items():
            what = "" if reason.startswith(("judgments ", "passages ")) else "questions "
            collection.dropped[f"{what}{reason}, {split}"] += count
        ids = [keys[place] for place in places[split]]
        asked = collection.questions.setdefault(split, [])
        for row, question in enumerate(part.questions):
            gold = [ids[i] for i in question.gold]
            if blank.intersection(gold):
                collection.dropped[f"questions whose gold has neither title nor text, {split}"] += 1
                continue
            pool = None if part.pools is None else [ids[i] for i in part.pools[row].tolist() if ids[i] not in blank]
            asked.append(question_record(question.id, question.text, gold, question.answers, question.ordered, pool))
            if question.grades:
                collection.dropped[f"grades of questions, since gold has none here, {split}"] += 1
    drop_shared(collection)
    return collection
