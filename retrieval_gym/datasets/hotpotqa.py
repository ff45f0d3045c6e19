"""HotpotQA, distractor setting: 2 hops, 10 paragraphs a question (Yang et al., EMNLP 2018, https://arxiv.org/abs/1809.09600)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from retrieval_gym.datasets.base import Passage, Question, RetrievalDataset
from retrieval_gym.datasets.pooled import Layout, load_pooled, wiki_paragraphs, wiki_question
from retrieval_gym.datasets.readers import Record


def load_hotpotqa(
    split: str = "train", path: str | Path | None = None, form: str = "pool", corpus: str | Path | None = None
) -> RetrievalDataset:
    """Load HotpotQA.

    Gold passages are the paragraphs whose titles ``supporting_facts`` names; their order means nothing. A question
    whose gold title is absent, or names two different paragraphs, is dropped. No labelled test split is published.

    Args:
        split: ``"train"``, ``"dev"`` (the official one, distractor) or ``"test"`` (only with a labelled file of your
            own).
        path: a file or folder; by default ``$RETRIEVAL_GYM_DATA``, the cache and the Hub are searched.
        form: ``"pool"`` or ``"corpus"``, see ``pooled.load_pooled``.
        corpus: with ``form="corpus"`` a ``corpus.jsonl`` or its folder; by default the union of all paragraphs.

    Raises:
        ValueError: when an argument is wrong or the data are malformed.
        FileNotFoundError: when the data are nowhere.
    """
    return load_pooled("hotpotqa", Layout(wiki_paragraphs, _question, lambda record: False), split, path, form, corpus)


def _question(record: Record, where: str, passages: Sequence[Passage]) -> Question:
    return wiki_question(record, where, passages, ordered=False)
