"""How do I score a retriever of my own? Give it ``search`` and hand it to ``evaluate``.

python examples/evaluate_retriever.py
"""

import re

import numpy as np

from retrieval_gym import load_dataset
from retrieval_gym.evaluation import evaluate, table
from retrieval_gym.retrieval import RandomRetriever, rank


class WordOverlap:
    """Scores a passage by the share of its words that the question or a picked passage holds."""

    def __init__(self, dataset):
        self.dataset = dataset
        self.questions = [self.words(question.text) for question in dataset.questions]
        self.passages = [self.words(str(passage)) for passage in dataset.corpus]

    @staticmethod
    def words(text):
        """Return the set of words of a text."""
        return set(re.findall(r"\w+", text.lower()))

    def search(self, states, k):
        """Return corpus ids int64 (B, k) and scores float32 (B, k), best first; ``rank`` leaves out what is picked."""
        everything = np.arange(len(self.passages))[None].repeat(len(states), axis=0)
        candidates = everything if states.pool is None else states.pool
        scores = np.zeros(candidates.shape, np.float32)
        for b, (question, picked) in enumerate(zip(states.question, states.picked, strict=True)):
            known = self.questions[question].union(*(self.passages[i] for i in picked[picked >= 0]))
            shares = (len(self.passages[i] & known) / max(1, len(self.passages[i])) for i in candidates[b])
            scores[b] = np.fromiter(shares, np.float32)  # padding (-1) gets a score too; rank leaves it out
        return rank(states, scores, k)


dataset = load_dataset("synthetic", "dev")
retrievers = [RandomRetriever(dataset), WordOverlap(dataset)]
print(table([evaluate(retriever, dataset, steps=4, limit=200) for retriever in retrievers]))
