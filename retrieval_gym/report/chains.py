"""The chains of several systems side by side, question by question, small enough for one page."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from retrieval_gym.evaluation import Evaluation

TEXT_LIMIT = 2_000  # characters of a passage
GOLD_LIMIT = 20  # gold passages that are told in full; relevance judgements can be hundreds
ONE_STEP_DEPTH = 10  # where an episode is one search, this much of its ranking is shown


def collect_chains(evaluations: Sequence[Evaluation], *, limit: int, budget: int, seed: int = 0) -> dict[str, Any]:
    """Return what each system picked on the same questions, JSON-able.

    In an environment of one step the first ``ONE_STEP_DEPTH`` passages of the search stand in place of the picks.

    Args:
        evaluations: greedy ones of the same questions.
        limit: shows a random sample of so many questions.
        budget: most bytes as JSON; fewer questions are shown where ``limit`` needs more.
        seed: of that sample.

    Returns:
        ``passages``, each ``[title, text, whether the text was cut]``; ``questions``, each of ``id``, ``text``,
        ``hops``, ``ordered``, ``answers``, ``golds`` (how many), ``gold`` (positions in ``passages``, at most
        ``GOLD_LIMIT``) and ``picks``, for each system a list of ``[passage, score, place in gold from 1, or 0]``;
        ``total``, how many questions were asked, and ``limit``.
    """
    first = evaluations[0]
    dataset, asked = first.dataset, first.chains.questions
    corpus, canonical = dataset.corpus, dataset.corpus.canonical
    passages: dict[int, int] = {}
    texts: list[list[Any]] = []
    used = 0

    def place(passage: int) -> int:
        nonlocal used
        if passage not in passages:
            title, text = corpus[passage].title, corpus[passage].text
            passages[passage] = len(texts)
            texts.append([title, text[:TEXT_LIMIT], len(text) > TEXT_LIMIT])
            used += _size(texts[-1])
        return passages[passage]

    shown: dict[int, dict[str, Any]] = {}
    for row in np.random.default_rng(seed).permutation(len(asked))[:limit].tolist():
        i = int(asked[row])
        question = dataset.questions[i]
        gold = dataset.gold[i][dataset.gold[i] >= 0].tolist()
        places = {passage: n for n, passage in enumerate(gold, start=1)}
        shown[row] = {
            "id": question.id,
            "text": question.text,
            "hops": question.hops,
            "ordered": question.ordered,
            "answers": list(question.answers),
            "golds": len(gold),
            "gold": [place(passage) for passage in gold[:GOLD_LIMIT]],
            "picks": [
                [[place(p), round(score, 4), places.get(int(canonical[p]), 0)] for p, score in _picks(each, row)]
                for each in evaluations
            ],
        }
        used += _size(shown[row])
        if used > budget and len(shown) > 1:
            del shown[row]
            break
    return {
        "passages": texts,
        "questions": [shown[row] for row in sorted(shown)],
        "total": len(asked),
        "limit": limit,
    }


def _picks(evaluation: Evaluation, row: int) -> list[tuple[int, float]]:
    """Return what is shown of a chain, corpus ids with their scores."""
    chains = evaluation.chains
    ids, scores = chains.picked[row], chains.scores[row]
    if chains.picked.shape[1] == 1:
        ids, scores = chains.step_ids[row, 0, :ONE_STEP_DEPTH], chains.step_scores[row, 0, :ONE_STEP_DEPTH]
    return [(int(p), float(score)) for p, score in zip(ids, scores, strict=True) if p >= 0]


def _size(content: Any) -> int:
    return len(json.dumps(content, ensure_ascii=False).encode()) + 1
