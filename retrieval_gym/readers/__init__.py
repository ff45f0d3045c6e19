"""Readers: what answers a question from passages, behind one call, ``reader(questions, passages) -> answers``."""

from retrieval_gym.readers.base import CachedReader, Reader, answers_as_they_come
from retrieval_gym.readers.chat import ChatReader, Endpoint
from retrieval_gym.readers.names import make_reader
from retrieval_gym.readers.prompts import prompt

__all__ = ["CachedReader", "ChatReader", "Endpoint", "Reader", "answers_as_they_come", "make_reader", "prompt"]
