"""MuSiQue: 2 to 4 hops, 20 paragraphs a question (Trivedi et al., TACL 2022, https://arxiv.org/abs/2108.00573)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from retrieval_gym.datasets.base import Passage, Question, RetrievalDataset
from retrieval_gym.datasets.pooled import DropQuestion, Layout, load_pooled
from retrieval_gym.datasets.readers import Record, get_field, get_strings, get_text


def load_musique(
    split: str = "train",
    path: str | Path | None = None,
    form: str = "pool",
    corpus: str | Path | None = None,
    unanswerable: bool = False,
) -> RetrievalDataset:
    """Load MuSiQue: MuSiQue-Ans, or MuSiQue-Full when unanswerable questions are asked for.

    Gold passages come in chain order from ``question_decomposition[].paragraph_support_idx``; ``hops`` is the number
    of distinct ones. ``answers`` holds the answer and its aliases. No labelled test split is published.

    Args:
        split: ``"train"``, ``"dev"`` (the official one) or ``"test"`` (only with a labelled file of your own).
        path: a file or folder; by default ``$RETRIEVAL_GYM_DATA``, the cache and the Hub are searched.
        form: ``"pool"`` or ``"corpus"``, see ``pooled.load_pooled``.
        corpus: with ``form="corpus"`` a ``corpus.jsonl`` or its folder; by default the union of all paragraphs.
        unanswerable: whether to keep unanswerable questions. Their gold is what supporting paragraphs are left: first
            those that the chain names, in its order, then any other marked ``is_supporting``. One without any is
            dropped.

    Raises:
        ValueError: when an argument is wrong or the data are malformed.
        FileNotFoundError: when the data are nowhere.
    """
    layout = Layout(_paragraphs, _parser(unanswerable), lambda record: True)
    return load_pooled("musique", layout, split, path, form, corpus, "musique_full" if unanswerable else "musique")


def _paragraphs(record: Record, where: str) -> list[Passage]:
    paragraphs = get_field(record, "paragraphs", list, where)
    return [
        Passage(get_field(p, "title", str, at), get_field(p, "paragraph_text", str, at))
        for at, p in _objects(paragraphs, where, "paragraphs")
    ]


def _parser(unanswerable: bool) -> Callable[[Record, str, Sequence[Passage]], Question]:
    def question(record: Record, where: str, passages: Sequence[Passage]) -> Question:
        answerable = get_field(record, "answerable", bool, where, default=True)
        if not answerable and not unanswerable:
            raise DropQuestion("that are unanswerable")
        paragraphs = _objects(record["paragraphs"], where, "paragraphs")
        position = {get_field(p, "idx", int, at): i for i, (at, p) in enumerate(paragraphs)}
        if len(position) < len(paragraphs):
            raise ValueError(f"{where}: two of the paragraphs have the same 'idx': {[p['idx'] for _, p in paragraphs]}")
        steps = get_field(record, "question_decomposition", list, where)
        support = [
            get_field(step, "paragraph_support_idx", int, at, default=None)
            for at, step in _objects(steps, where, "question_decomposition")
        ]
        gold = [position[idx] for idx in support if idx in position]
        if not answerable:
            gold += [position[p["idx"]] for _, p in paragraphs if p.get("is_supporting")]
            if not gold:
                raise DropQuestion("that are unanswerable and have no supporting paragraph")
        elif len(gold) < len(support) or not gold:
            raise DropQuestion("with a hop whose gold paragraph is absent")
        answers = [get_field(record, "answer", str, where), *get_strings(record, "answer_aliases", where, default=[])]
        return Question(
            id=get_text(record, "id", where),
            text=get_text(record, "question", where),
            gold=tuple(dict.fromkeys(gold)),
            answers=tuple(dict.fromkeys(answers)),
            ordered=True,
        )

    return question


def _objects(values: list, where: str, name: str) -> list[tuple[str, Record]]:
    for value in values:
        if not isinstance(value, dict):
            raise ValueError(f"{where}: field {name!r} must hold objects, got {value!r:.80}")
    return [(f"{where}, {name}[{i}]", value) for i, value in enumerate(values)]
