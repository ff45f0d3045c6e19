"""HippoRAG's layout, as a collection: ``NAME_corpus.json`` and ``NAME.json``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from retrieval_gym.conversion.collection import Collection, add_id, question_record
from retrieval_gym.datasets.base import Passage
from retrieval_gym.datasets.pooled import DropQuestion, supporting_titles, wiki_paragraphs
from retrieval_gym.datasets.readers import Record, get_field, get_key, get_strings, get_text, read_json


def from_hipporag(source: str | Path, split: str = "") -> Collection:
    """Read HippoRAG's layout: ``NAME_corpus.json``, a list of ``{title, text}``, and ``NAME.json``, the questions.

    A question has ``question``, usually ``answer`` and ``id`` or ``_id``, and its evidence in one of three forms:
    ``context`` and ``supporting_facts`` as HotpotQA has them, or ``paragraphs`` or ``contexts``, a list of
    ``{title, text or paragraph_text, is_supporting}``; gold comes in the order of MuSiQue's ``question_decomposition``
    where there is one. Gold is looked up in the corpus by title and text, whatever the white space, and else by a title
    that only one passage has. A question with gold that is not there is left out and counted.

    Args:
        source: the questions' file, or a folder with one pair of such files.
        split: what the questions are; ``""`` lets them serve every split.

    Raises:
        FileNotFoundError: when a file is missing.
        ValueError: when the folder holds several pairs, the data are malformed or no question is left.
    """
    questions_file, corpus_file = _hipporag_files(Path(source))
    collection = Collection([])
    by_text: dict[Passage, str] = {}
    by_title: dict[str, list[str]] = {}
    for place, (where, record) in enumerate(read_json(corpus_file)):
        passage = Passage(get_field(record, "title", str, where, default=""), get_field(record, "text", str, where))
        if not str(passage).strip():
            collection.dropped["passages with neither title nor text"] += 1
            continue
        key = str(place)
        collection.passages.append({"id": key, "title": passage.title, "text": passage.text})
        if _squeezed(passage) not in by_text:
            by_text[_squeezed(passage)] = key
            by_title.setdefault(_squeezed(passage).title, []).append(key)
    asked = collection.questions.setdefault(split, [])
    places: dict[str, str] = {}
    for number, (where, record) in enumerate(read_json(questions_file)):
        name = next((name for name in ("id", "_id") if record.get(name) is not None), None)
        key = str(number) if name is None else get_key(record[name], name, where)
        add_id(places, key, "question", where)
        try:
            gold = [_find(passage, by_text, by_title) for passage in _evidence(record, where)]
        except DropQuestion as reason:
            collection.dropped[f"questions {reason}"] += 1
            continue
        answers = _answers(record, where)
        text = get_text(record, "question", where)
        ordered = bool(record.get("question_decomposition"))
        asked.append(question_record(key, text, list(dict.fromkeys(gold)), list(dict.fromkeys(answers)), ordered))
    if not asked:
        raise ValueError(f"{questions_file}: no question is left (dropped: {dict(collection.dropped)})")
    return collection


def _answers(record: Record, where: str) -> list[str]:
    """Return the answer, which is a string or a list of them under one of two names, and its aliases."""
    name = next((name for name in ("answer", "gold_ans") if record.get(name) is not None), "answer")
    own = [record[name]] if isinstance(record.get(name), str) else get_strings(record, name, where, default=[])
    return [*own, *get_strings(record, "answer_aliases", where, default=[])]


def _hipporag_files(source: Path) -> tuple[Path, Path]:
    """Return the file of the questions and that of the corpus."""
    if source.is_dir():
        pairs = [
            (questions, corpus)
            for corpus in sorted(source.glob("*_corpus.json"))
            if (questions := corpus.with_name(corpus.name.replace("_corpus.json", ".json"))).is_file()
        ]
        if not pairs:
            raise FileNotFoundError(f"no NAME_corpus.json with a NAME.json beside it in {source}")
        if len(pairs) > 1:
            names = ", ".join(questions.name for questions, _ in pairs)
            raise ValueError(f"{source} holds several sets of questions: give one of {names} as SOURCE")
        return pairs[0]
    corpus = source.with_name(f"{source.stem}_corpus.json")
    for file in (source, corpus):
        if not file.is_file():
            raise FileNotFoundError(f"{file} is not there: HippoRAG's layout is NAME.json and NAME_corpus.json")
    return source, corpus


def _evidence(record: Record, where: str) -> list[Passage]:
    """Return the gold passages of one of HippoRAG's questions, in chain order where it has one."""
    if record.get("supporting_facts") is not None:
        passages = wiki_paragraphs(record, where)
        titles = supporting_titles(record, where)
        gold = [passage for title in titles for passage in passages if passage.title == title]
        if {passage.title for passage in gold} < set(titles):
            raise DropQuestion("with a gold title that is not among the paragraphs")
        return gold
    name = next((name for name in ("paragraphs", "contexts") if record.get(name) is not None), None)
    if name is None:
        raise DropQuestion("without supporting_facts, paragraphs or contexts")
    paragraphs: dict[str, tuple[Passage, bool]] = {}
    for i, paragraph in enumerate(get_field(record, name, list, where)):
        if not isinstance(paragraph, dict):
            raise ValueError(f"{where}: field {name!r} must hold objects, got {paragraph!r:.80}")
        body = "text" if "text" in paragraph else "paragraph_text"
        passage = Passage(get_field(paragraph, "title", str, where), get_field(paragraph, body, str, where))
        paragraphs[get_key(paragraph.get("idx", i), "idx", where)] = passage, bool(paragraph.get("is_supporting", True))
    steps = get_field(record, "question_decomposition", list, where, default=[])
    chain = [str(step.get("paragraph_support_idx")) for step in steps if isinstance(step, dict)]
    order = [idx for idx in chain if idx in paragraphs] + [idx for idx, (_, gold) in paragraphs.items() if gold]
    if not order:
        raise DropQuestion("without a supporting paragraph")
    return [paragraphs[idx][0] for idx in dict.fromkeys(order)]


def _find(passage: Passage, by_text: Mapping[Passage, str], by_title: Mapping[str, list[str]]) -> str:
    """Return the id of a passage in the corpus."""
    squeezed = _squeezed(passage)
    if squeezed in by_text:
        return by_text[squeezed]
    titled = by_title.get(squeezed.title, [])
    if len(titled) != 1:
        raise DropQuestion("with a gold paragraph that is not in the corpus")
    return titled[0]


def _squeezed(passage: Passage) -> Passage:
    return Passage(" ".join(passage.title.split()), " ".join(passage.text.split()))
