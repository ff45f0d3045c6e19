"""Multi-step retrieval as a Gymnasium environment; importing this package registers its ids."""

from retrieval_gym.datasets import Corpus, Passage, Question, RetrievalDataset, load_dataset
from retrieval_gym.registration import register_environments

__version__ = "0.1.0"
__all__ = ["Corpus", "Passage", "Question", "RetrievalDataset", "__version__", "load_dataset"]

register_environments()
