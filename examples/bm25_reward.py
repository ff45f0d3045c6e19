"""How do I give a reward of my own? BM25 scores on SciFact: graded, imperfect, and free.

python agents/pao.py --env ChainRetrieval-SciFact-v0 --temperature 0.05 --reward-model examples.bm25_reward:score

A reward model is any function of questions, histories (what was picked before, nothing in one step) and passages, three
lists of equal length, that returns one finite number a passage.
"""

from functools import cache

import bm25s
import numpy as np

from retrieval_gym import load_dataset


def score(questions: list[str], histories: list[list[str]], passages: list[str]) -> np.ndarray:
    """Return the BM25 score of each passage for its question, float64 ``(N,)``."""
    index, places = _index()
    scores = {question: _scores(index, question) for question in dict.fromkeys(questions)}
    return np.array([scores[question][places[passage]] for question, passage in zip(questions, passages, strict=True)])


@cache
def _index() -> tuple[bm25s.BM25, dict[str, int]]:
    corpus = load_dataset("scifact", "train").corpus
    texts = corpus.texts(range(len(corpus)))
    index = bm25s.BM25()
    index.index(bm25s.tokenize(texts, show_progress=False), show_progress=False)
    return index, dict(zip(texts, range(len(texts)), strict=True))


def _scores(index: bm25s.BM25, question: str) -> np.ndarray:
    (words,) = bm25s.tokenize([question], return_ids=False, show_progress=False)
    return index.get_scores(words).astype(np.float64)
