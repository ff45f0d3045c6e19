"""The builder of datasets whose questions bring their own paragraphs: MuSiQue, HotpotQA, 2WikiMultihopQA."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from retrieval_gym.datasets.base import Corpus, Ids, Passage, Question, RetrievalDataset
from retrieval_gym.datasets.jsonl import corpus_path, questions_beside, read_corpus, read_questions
from retrieval_gym.datasets.readers import Record, get_field, get_strings, get_text, read_records
from retrieval_gym.datasets.sources import SOURCES, Found, find, report_dropped


class DropQuestion(Exception):
    """A question that cannot be played; its message is the reason to count."""


@dataclass(frozen=True)
class Layout:
    """How one source's records read.

    Attributes:
        paragraphs: a record and where it stands to its paragraphs in file order.
        question: a record, where it stands and its paragraphs to its question, whose ``gold`` holds positions in the
            list of paragraphs; raises ``DropQuestion``.
        ordered: a record to whether the order of its gold passages means anything.
    """

    paragraphs: Callable[[Record, str], list[Passage]]
    question: Callable[[Record, str, Sequence[Passage]], Question]
    ordered: Callable[[Record], bool]


def load_pooled(
    name: str,
    layout: Layout,
    split: str,
    path: str | Path | None,
    form: str,
    corpus: str | Path | None,
    source_name: str | None = None,
) -> RetrievalDataset:
    """Load a dataset of questions with paragraphs.

    Paragraphs equal in title and text are one passage. Questions left out are counted in ``dropped`` and reported on
    stderr.

    Args:
        name: the dataset's name.
        layout: how its records read.
        split: ``"train"``, ``"dev"`` or ``"test"``.
        path: the only file or folder to look at, see ``sources.find``.
        form: ``"pool"``: each question picks from its own paragraphs, in file order. ``"corpus"``: from one corpus.
        corpus: with ``form="corpus"`` a ``corpus.jsonl`` or its folder. The questions then come from
            ``{name}_{split}.jsonl`` beside it when there is one, else they are the dataset's own and their gold is
            looked up by title and text, whatever the white space. By default the corpus is the union of the paragraphs
            of every split at the place where this split is found, so each split gets the same corpus and ids.
        source_name: key of ``sources.SOURCES``; by default ``name``.

    Raises:
        ValueError: when ``form`` is unknown, ``corpus`` is given without ``form="corpus"``, the data are malformed or
            no question is left.
        FileNotFoundError: when the data are nowhere.
    """
    if form not in ("pool", "corpus"):
        raise ValueError(f"unknown form {form!r}: choose 'pool' or 'corpus'")
    if corpus is not None and form != "corpus":
        raise ValueError(f"corpus={str(corpus)!r} needs form='corpus', got form={form!r}")
    source = SOURCES[source_name or name]
    corpus_file = None if corpus is None else corpus_path(corpus)
    if corpus_file is not None and (file := questions_beside(corpus_file, name, split)):
        shared = read_corpus(corpus_file)
        asked, _ = read_questions(file, shared, corpus_file, layout.ordered)
        return RetrievalDataset(name, split, shared, asked, source=_over(file, corpus_file), licence=source.licence)

    union = form == "corpus" and corpus is None
    found = find(source_name or name, split, path, siblings=union)
    dropped: Counter[str] = Counter()
    questions, pools, index = _read(found, split, layout, union, dropped)
    if corpus_file is not None:
        shared = read_corpus(corpus_file)
        questions = _rematch(questions, list(index), shared, dropped)
    elif not index:
        raise ValueError(f"{found.place}: no question of split {split!r} is left (dropped: {dict(dropped)})")
    else:
        shared = Corpus([p.title for p in index], [p.text for p in index])
    report_dropped(name, split, tuple(dropped.items()))
    return RetrievalDataset(
        name=name,
        split=split,
        corpus=shared,
        questions=questions,
        pools=pools if form == "pool" else None,
        dropped=dict(dropped),
        source=found.place if corpus_file is None else _over(found.place, corpus_file),
        licence=source.licence,
    )


def _read(
    found: Found, split: str, layout: Layout, union: bool, dropped: Counter[str]
) -> tuple[list[Question], list[Ids], dict[Passage, int]]:
    """Return the questions of a split, their pools, and the id of every passage.

    The passages are those of the questions kept; with ``union`` those of every record of every split at this place.
    """
    questions: list[Question] = []
    pools: list[Ids] = []
    index: dict[Passage, int] = {}
    places: dict[tuple[str, bool], str] = {}
    for each, files in found.siblings.items() if union else [(split, found.files)]:
        for where, record in (pair for file in files for pair in read_records(file)):
            passages = layout.paragraphs(record, where)
            question = None
            if each == split:
                try:
                    question = layout.question(record, where, passages)
                except DropQuestion as reason:
                    dropped[str(reason)] += 1
            if question is None and not union:
                continue
            ids = [index.setdefault(passage, len(index)) for passage in passages]
            if question is not None:
                # MuSiQue-Full asks each question twice under one id, with and without the paragraphs that answer it.
                first = places.setdefault((question.id, record.get("answerable") is False), where)
                if first != where:
                    raise ValueError(
                        f"{where}: question id {question.id!r} occurs twice, first at {first}: make ids unique"
                    )
                gold = tuple(dict.fromkeys(ids[i] for i in question.gold))
                questions.append(replace(question, gold=gold, hops=len(gold)))
                pools.append(np.array(list(dict.fromkeys(ids)), np.int64))
    return questions, pools, index


def _rematch(
    questions: list[Question], passages: list[Passage], corpus: Corpus, dropped: Counter[str]
) -> list[Question]:
    """Return the questions with their gold looked up in another corpus by title and text, whatever the white space."""
    index: dict[Passage, int] = {}
    for i, passage in enumerate(corpus):
        index.setdefault(_squeezed(passage), i)
    matched = []
    for question in questions:
        gold = tuple(dict.fromkeys(index.get(_squeezed(passages[i]), -1) for i in question.gold))
        if -1 in gold:
            dropped["with a gold paragraph that is not in the corpus"] += 1
        else:
            matched.append(replace(question, gold=gold, hops=len(gold)))
    return matched


def wiki_paragraphs(record: Record, where: str) -> list[Passage]:
    """Return the paragraphs of a HotpotQA or 2WikiMultihopQA record.

    ``context`` is a list of ``[title, sentences]`` (official) or ``{"title": [...], "sentences": [...]}`` (Hub). A
    paragraph's sentences are a list, joined by one space where they do not bring their own, or one string.

    Raises:
        ValueError: when the record has another shape.
    """
    pairs = _pairs(record, "context", "sentences", where)
    passages = []
    for title, sentences in pairs:
        parts = [sentences] if isinstance(sentences, str) else sentences
        if not isinstance(title, str) or not isinstance(parts, list) or not all(isinstance(p, str) for p in parts):
            raise ValueError(f"{where}: field 'context' must hold titles and sentences, got {[title, sentences]!r:.80}")
        passages.append(Passage(title, join_sentences(parts)))
    return passages


def supporting_titles(record: Record, where: str) -> list[str]:
    """Return the distinct titles of ``supporting_facts`` in order; the official and the Hub's layout both read.

    Raises:
        ValueError: when the field is missing, empty or has another shape.
    """
    titles = [title for title, _ in _pairs(record, "supporting_facts", "sent_id", where)]
    if not titles or not all(isinstance(title, str) for title in titles):
        raise ValueError(
            f"{where}: field 'supporting_facts' must name titles (an unlabelled file has none), got {titles!r:.80}"
        )
    return list(dict.fromkeys(titles))


def titled_gold(record: Record, where: str, passages: Sequence[Passage]) -> tuple[int, ...]:
    """Return the positions of the paragraphs that ``supporting_facts`` names, in its order.

    A title names a paragraph; two paragraphs of one title and different texts leave open which is meant, so such a
    question is dropped.

    Raises:
        DropQuestion: when a title names no paragraph or several different ones.
        ValueError: when ``supporting_facts`` is malformed.
    """
    gold: list[int] = []
    for title in supporting_titles(record, where):
        named = {passage: i for i, passage in reversed(list(enumerate(passages))) if passage.title == title}
        if not named:
            raise DropQuestion("with a gold title that is not among the paragraphs")
        if len(named) > 1:
            raise DropQuestion("with a gold title that names two different paragraphs")
        gold.extend(named.values())
    return tuple(gold)


def wiki_question(record: Record, where: str, passages: Sequence[Passage], ordered: bool) -> Question:
    """Return the question of a HotpotQA or 2WikiMultihopQA record (``_id`` official, ``id`` on the Hub)."""
    return Question(
        id=get_text(record, "_id" if "_id" in record else "id", where),
        text=get_text(record, "question", where),
        gold=titled_gold(record, where, passages),
        answers=(get_field(record, "answer", str, where),),
        ordered=ordered,
    )


def join_sentences(sentences: Iterable[str]) -> str:
    """Join sentences with one space where neither side brings white space, and strip the ends.

    HotpotQA's sentences start with their own space, 2WikiMultihopQA's do not.
    """
    text = ""
    for sentence in sentences:
        gap = "" if not text or text[-1].isspace() or sentence[:1].isspace() else " "
        text += gap + sentence
    return text.strip()


def _pairs(record: Record, name: str, second: str, where: str) -> list[tuple]:
    value = get_field(record, name, object, where)
    if isinstance(value, dict):
        titles = get_strings(value, "title", f"{where}, {name}")
        others = get_field(value, second, list, f"{where}, {name}")
        if len(titles) != len(others):
            raise ValueError(f"{where}: field {name!r} has {len(titles)} titles and {len(others)} {second}")
        return list(zip(titles, others, strict=True))
    if not isinstance(value, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in value):
        raise ValueError(f"{where}: field {name!r} must be a list of pairs or an object of lists, got {value!r:.80}")
    return [tuple(pair) for pair in value]


def _squeezed(passage: Passage) -> Passage:
    return Passage(" ".join(passage.title.split()), " ".join(passage.text.split()))


def _over(questions: object, corpus_file: Path) -> str:
    return f"{questions} over {corpus_file}"
