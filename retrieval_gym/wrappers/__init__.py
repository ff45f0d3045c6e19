"""Wrappers that change what a learner observes, or what it chooses from."""

from retrieval_gym.wrappers.cached_encode import CachedEncode
from retrieval_gym.wrappers.candidate_texts import CandidateTexts
from retrieval_gym.wrappers.embedding_observation import EmbeddingObservation
from retrieval_gym.wrappers.hashing_encoder import HashingEncoder
from retrieval_gym.wrappers.top_k_candidates import TopKCandidates

__all__ = ["CachedEncode", "CandidateTexts", "EmbeddingObservation", "HashingEncoder", "TopKCandidates"]
