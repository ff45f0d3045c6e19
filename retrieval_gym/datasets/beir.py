"""Test collections in BEIR's layout: SciFact, MS MARCO, any folder (Thakur et al., 2021, https://arxiv.org/abs/2104.08663).

One search finds what a question needs, so a question has one hop however many passages are relevant; they have no order
and are graded.
"""

from __future__ import annotations

import gzip
import re
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

from retrieval_gym.datasets.base import Corpus, Question, RetrievalDataset
from retrieval_gym.datasets.corpus_files import Rows, corpus_of_files
from retrieval_gym.datasets.readers import get_field, get_key, get_text, read_records
from retrieval_gym.datasets.sources import SOURCES, SPLITS, find, report_dropped

HEADER = ["query-id", "corpus-id", "score"]

Qrels = dict[str, dict[str, int]]  # question to passage to grade


def load_scifact(split: str = "train", path: str | Path | None = None) -> RetrievalDataset:
    """Load SciFact: scientific claims and the abstracts that they cite (Wadden et al., 2020; in BEIR's form).

    BEIR publishes train (809 claims) and test (300, the original dev set); ``dev`` needs a ``qrels/dev.tsv`` of your
    own. Files are read as in ``load_beir``.

    Args:
        split: ``"train"``, ``"dev"`` or ``"test"``.
        path: the only folder to look at, that of the files or one that holds it as ``scifact``; by default
            ``$RETRIEVAL_GYM_DATA``, the cache and the Hub are searched.

    Raises:
        ValueError: when the data are malformed or no question is left.
        FileNotFoundError: when the data are nowhere.
    """
    return _load_source("scifact", split, path)


def load_msmarco(split: str = "train", path: str | Path | None = None) -> RetrievalDataset:
    """Load MS MARCO passage retrieval (Bajaj et al., 2016; in BEIR's form): 8.8 million passages, kept on disk.

    ``dev`` is the official small dev set of 6,980 questions, ``test`` the graded 43 of TREC Deep Learning 2019.

    Args:
        split: ``"train"``, ``"dev"`` or ``"test"``.
        path: as in ``load_scifact``, with ``msmarco``.

    Raises:
        ValueError: when the data are malformed or no question is left.
        FileNotFoundError: when the data are nowhere.
    """
    return _load_source("msmarco", split, path)


def load_beir(split: str = "train", path: str | Path | None = None) -> RetrievalDataset:
    """Load a folder in BEIR's layout; the dataset has the folder's name.

    - ``corpus.jsonl``: ``_id``, ``text`` and optionally ``title``. A passage with neither is left out.
    - ``queries.jsonl``: ``_id``, ``text``.
    - ``qrels/{split}.tsv``: question, passage and grade between tabs, under the header ``query-id corpus-id score`` or
      without one; or TREC's four columns, ``question 0 passage grade`` between blanks.

    Each may be ``.gz``. The layout of BEIR's repositories on the Hub reads too: ``corpus/*.parquet``,
    ``queries/*.parquet`` and ``{split}.tsv`` in one folder.

    Passages of grade 1 and more are gold. A question without any in this split is left out, and so is a judgment whose
    question or passage is not there; all are counted in ``dropped`` and reported on stderr.

    Args:
        split: ``"train"``, ``"dev"`` or ``"test"``; no other split's qrels stand in for it.
        path: the folder.

    Raises:
        ValueError: when ``path`` is not given, the data are malformed (the message names file and line) or no question
            is left.
        FileNotFoundError: when the folder or a file is missing; the message names the splits that are there.
    """
    if path is None:
        raise ValueError("the dataset 'beir' needs path=: a folder with corpus.jsonl, queries.jsonl and qrels/")
    folder = _folder(path)
    return _read(folder.resolve().name, split, _qrels_file(folder, split), *_texts_files(folder), place=str(folder))


def _load_source(name: str, split: str, path: str | Path | None) -> RetrievalDataset:
    licence = SOURCES[name].licence
    if path is not None:
        folder = _folder(path)
        folder = folder / name if (folder / name).is_dir() else folder
        qrels = _qrels_file(folder, split)
        return _read(name, split, qrels, *_texts_files(folder), place=str(folder), licence=licence)
    found = find(name, split)
    (qrels,) = found.files
    if found.place.startswith("hf://"):
        texts = find(f"{name}_texts", "corpus", siblings=True, hub_only=True).siblings
        files = texts["corpus"], texts["queries"]
    else:
        files = _texts_files(qrels.parent.parent if qrels.parent.name == "qrels" else qrels.parent)
    return _read(name, split, qrels, *files, place=found.place, licence=licence)


def _folder(path: str | Path) -> Path:
    folder = Path(path)
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder} is not a folder: give one with corpus.jsonl, queries.jsonl and qrels/")
    return folder


def _qrels_file(folder: Path, split: str) -> Path:
    there = {}
    for each in SPLITS:
        names = (f"qrels/{each}.tsv", f"qrels/{each}.tsv.gz", f"{each}.tsv", f"{each}.tsv.gz")
        files = [folder / name for name in names if (folder / name).is_file()]
        if files:
            there[each] = files[0]
    if split not in there:
        raise FileNotFoundError(
            f"no qrels of split {split!r} in {folder}: looked for qrels/{split}.tsv (or .gz); "
            f"there are {' and '.join(there) or 'none of any split'}"
        )
    return there[split]


def _texts_files(folder: Path) -> tuple[tuple[Path, ...], tuple[Path, ...]]:
    """Return the files of the corpus and those of the queries."""
    return _texts_of(folder, "corpus"), _texts_of(folder, "queries")


def _texts_of(folder: Path, kind: str) -> tuple[Path, ...]:
    for file in (folder / f"{kind}.jsonl", folder / f"{kind}.jsonl.gz"):
        if file.is_file():
            return (file,)
    files = tuple(sorted((folder / kind).glob("*.parquet")))
    if not files:
        raise FileNotFoundError(
            f"no {kind}.jsonl (or .gz, or {kind}/*.parquet) in {folder}: it must stand in the folder of the qrels"
        )
    return files


def _read(
    name: str,
    split: str,
    qrels_file: Path,
    corpus_files: Sequence[Path],
    query_files: Sequence[Path],
    *,
    place: str,
    licence: str = "",
) -> RetrievalDataset:
    dropped: dict[str, Counter[str]] = {what: Counter() for what in ("questions", "judgments", "passages")}
    qrels = _read_qrels(qrels_file, dropped["judgments"])
    corpus = _read_corpus(corpus_files, dropped["passages"])
    questions = _read_questions(query_files, qrels, corpus, dropped["questions"], dropped["judgments"])
    for what, reasons in dropped.items():
        report_dropped(name, split, tuple(reasons.items()), what)
    counts = {
        reason if what == "questions" else f"{what} {reason}": count
        for what, reasons in dropped.items()
        for reason, count in reasons.items()
    }
    if not questions:
        raise ValueError(f"{qrels_file}: no question of split {split!r} is left (dropped: {counts})")
    return RetrievalDataset(name, split, corpus, questions, dropped=counts, source=place, licence=licence)


def _read_corpus(files: Sequence[Path], dropped: Counter[str]) -> Corpus:
    def rows() -> Rows:
        for where, record in (pair for file in files for pair in read_records(file)):
            key, title = get_key(record.get("_id"), "_id", where), get_field(record, "title", str, where, default="")
            yield where, key, title, get_field(record, "text", str, where)

    corpus, blank = corpus_of_files(files, rows, drop_blank=True)
    if blank:
        dropped["with neither title nor text"] += blank
    return corpus


def _read_questions(
    files: Sequence[Path], qrels: Qrels, corpus: Corpus, dropped: Counter[str], judgments: Counter[str]
) -> list[Question]:
    questions: list[Question] = []
    seen: set[str] = set()
    for where, record in (pair for file in files for pair in read_records(file)):
        key = get_key(record.get("_id"), "_id", where)
        if key in seen:
            raise ValueError(f"{where}: query _id {key!r} occurs twice: make them unique")
        seen.add(key)
        text = get_text(record, "text", where)
        if key not in qrels:
            dropped["that this split does not ask"] += 1
            continue
        known = {passage: grade for passage, grade in qrels[key].items() if passage in corpus.ids}
        if len(known) < len(qrels[key]):
            judgments["of passages that are not in the corpus"] += len(qrels[key]) - len(known)
        gold = {corpus.ids[passage]: grade for passage, grade in known.items() if grade >= 1}
        if gold:
            grades = tuple(gold.values())
            graded = grades if max(grades) > 1 else ()
            questions.append(Question(key, text, tuple(gold), hops=1, ordered=False, grades=graded))
        elif max(qrels[key].values()) >= 1:
            dropped["whose relevant passages are all missing from the corpus"] += 1
        else:
            dropped["that have no relevant passage"] += 1
    unknown = sum(len(passages) for key, passages in qrels.items() if key not in seen)
    if unknown:
        judgments["of questions that are not among the queries"] += unknown
    return questions


def _read_qrels(path: Path, dropped: Counter[str]) -> Qrels:
    qrels: Qrels = defaultdict(dict)
    width = 0
    for where, fields in _rows(path):
        if width == 0:
            width = _width(where, fields)
            if fields == HEADER:
                continue
        if len(fields) != width:
            raise ValueError(f"{where}: has {len(fields)} columns where the first line has {width}: {fields!r:.80}")
        if width == 4 and fields[1] not in ("0", "Q0"):
            raise ValueError(f"{where}: the second of TREC's four columns must be 0 or Q0, got {fields[1]!r:.80}")
        question, passage, score = fields[0], fields[-2], fields[-1]
        if not (question and passage and re.fullmatch(r"-?[0-9]{1,9}", score)):
            raise ValueError(
                f"{where}: must be a question, a passage and a grade that is a whole number of at most 9 digits, "
                f"got {fields!r:.80}"
            )
        grade = int(score)
        before = qrels[question].get(passage)
        if before is not None and before != grade:
            raise ValueError(
                f"{where}: passage {passage!r} of question {question!r} has grade {grade}, further up it has {before}: "
                "keep one"
            )
        if before == grade:
            dropped["given twice"] += 1
        qrels[question][passage] = grade
    if not qrels:
        raise ValueError(f"{path} holds no judgment: it needs a line of query-id, corpus-id and score each")
    return dict(qrels)


def _width(where: str, fields: list[str]) -> int:
    """Return the number of columns that a file with this first line has."""
    if fields == HEADER or (len(fields) in (3, 4) and re.fullmatch(r"-?[0-9]+", fields[-1])):
        return len(fields)
    raise ValueError(
        f"{where}: must be the header {' '.join(HEADER)!r}, or a judgment of three columns (query-id, corpus-id, "
        f"score) or of TREC's four (question, 0, passage, grade), got {fields!r:.80}"
    )


def _rows(path: Path) -> Iterator[tuple[str, list[str]]]:
    """Yield the fields of each line that is not blank, split at tabs or, where it has none, at blanks."""
    opener = gzip.open if path.suffix == ".gz" else open
    try:
        # A byte that is not UTF-8 becomes a surrogate, so that the line it stands in can be named.
        with opener(path, "rt", encoding="utf-8-sig", errors="surrogateescape") as file:
            for number, line in enumerate(file, start=1):
                where = f"{path}, line {number}"
                if re.search("[\udc80-\udcff]", line):
                    raise ValueError(f"{where}: not UTF-8: convert the file to UTF-8")
                if line.strip():
                    yield where, [part.strip() for part in line.split("\t")] if "\t" in line else line.split()
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ValueError(f"{path} is not a whole gzip file ({error}): fetch it again") from error
