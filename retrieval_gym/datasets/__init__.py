"""Questions and corpora: what is asked and what can be picked."""

from retrieval_gym.datasets.base import Corpus, Passage, Question, RetrievalDataset
from retrieval_gym.datasets.load import load_dataset

__all__ = ["Corpus", "Passage", "Question", "RetrievalDataset", "load_dataset"]
