"""Multi-step retrieval as a Gymnasium environment; importing this package registers its ids."""

from importlib import import_module
from types import ModuleType

from retrieval_gym.datasets import Corpus, Passage, Question, RetrievalDataset, load_dataset
from retrieval_gym.registration import register_environments

__version__ = "0.1.0"
__all__ = ["Corpus", "Passage", "Question", "RetrievalDataset", "__version__", "load_dataset"]

register_environments()


def __getattr__(name: str) -> ModuleType:
    """Import ``retrieval_gym.envs`` when it is first asked for."""
    if name == "envs":
        return import_module("retrieval_gym.envs")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
