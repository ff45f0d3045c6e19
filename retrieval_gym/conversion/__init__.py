"""Other layouts into the one of ``datasets/jsonl.py``."""

from retrieval_gym.conversion.collection import Collection, write_collection
from retrieval_gym.conversion.hipporag import from_hipporag
from retrieval_gym.conversion.hub import from_hf
from retrieval_gym.conversion.loaded import from_datasets

__all__ = ["Collection", "from_datasets", "from_hf", "from_hipporag", "write_collection"]
