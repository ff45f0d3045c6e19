"""2WikiMultihopQA: 2 or 4 gold of 10 paragraphs a question (Ho et al., COLING 2020, https://arxiv.org/abs/2011.01060)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from retrieval_gym.datasets.base import Passage, Question, RetrievalDataset
from retrieval_gym.datasets.pooled import Layout, load_pooled, wiki_paragraphs, wiki_question
from retrieval_gym.datasets.readers import Record, get_field

TYPES = {"compositional": True, "inference": True, "comparison": False, "bridge_comparison": False}


def load_2wiki(
    split: str = "train", path: str | Path | None = None, form: str = "pool", corpus: str | Path | None = None
) -> RetrievalDataset:
    """Load 2WikiMultihopQA.

    Gold passages are the paragraphs whose titles ``supporting_facts`` names. Their order is the chain's for
    compositional and inference questions, where ``supporting_facts`` runs along ``evidences``; for comparison and
    bridge_comparison it means nothing. A question whose gold title is absent, or names two different paragraphs, is
    dropped. No labelled test split is published.

    Args:
        split: ``"train"``, ``"dev"`` (the official one) or ``"test"`` (only with a labelled file of your own).
        path: a file or folder; by default ``$RETRIEVAL_GYM_DATA``, the cache and the Hub are searched.
        form: ``"pool"`` or ``"corpus"``, see ``pooled.load_pooled``.
        corpus: with ``form="corpus"`` a ``corpus.jsonl`` or its folder; by default the union of all paragraphs. The
            questions beside it are ordered by their ``type``; without one they are not.

    Raises:
        ValueError: when an argument is wrong or the data are malformed.
        FileNotFoundError: when the data are nowhere.
    """
    layout = Layout(wiki_paragraphs, _question, lambda record: TYPES.get(str(record.get("type")), False))
    return load_pooled("2wiki", layout, split, path, form, corpus)


def _question(record: Record, where: str, passages: Sequence[Passage]) -> Question:
    kind = get_field(record, "type", str, where)
    if kind not in TYPES:
        raise ValueError(f"{where}: field 'type' must be one of {', '.join(TYPES)}, got {kind!r}")
    return wiki_question(record, where, passages, ordered=TYPES[kind])
