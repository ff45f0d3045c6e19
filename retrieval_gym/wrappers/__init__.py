"""Wrappers that change what a learner observes."""

from retrieval_gym.wrappers.candidate_texts import CandidateTexts

__all__ = ["CandidateTexts"]
