"""The environments: one episode at a time, and many at once."""

from retrieval_gym.envs.chain_retrieval import ChainRetrievalEnv
from retrieval_gym.envs.chain_retrieval_vector import ChainRetrievalVectorEnv

__all__ = ["ChainRetrievalEnv", "ChainRetrievalVectorEnv"]
