"""``HashingEncoder``: TF-IDF vectors of a fixed length, without a vocabulary or a model."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from math import log

import numpy as np
from numpy.typing import NDArray

_WORD = re.compile(r"\w+")


class HashingEncoder:
    """Embed texts by their words: TF-IDF with feature hashing (Weinberger et al. 2009), thousands of texts a second.

    A word adds or subtracts (by one bit of its hash) count times idf in one of ``dim`` places, so that the inner
    product of two texts is that of their TF-IDF vectors up to collisions, whose expectation is zero. Vectors have
    length 1; a text without words is 0. A word that no text of ``texts`` holds weighs the most: in multi-hop questions
    that is a name. The hash does not depend on the process.

    Args:
        texts: what document frequencies are counted in, such as the passages of the train split.
        dim: length of the vectors.

    Raises:
        ValueError: when ``dim`` is below 1.
    """

    def __init__(self, texts: Iterable[str], dim: int = 1024) -> None:
        if dim < 1:
            raise ValueError(f"dim is {dim}: it must be at least 1")
        self.dim = dim
        frequencies: Counter[str] = Counter()
        size = 0
        for text in texts:
            frequencies.update(set(_words(text)))
            size += 1
        # Smoothed as in scikit-learn's TfidfVectorizer.
        self._idf = {word: log((1 + size) / (1 + count)) + 1 for word, count in frequencies.items()}
        self._unseen = log(1 + size) + 1

    def __call__(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """Return float32 ``(N, dim)``."""
        vectors = np.zeros((len(texts), self.dim))
        for vector, text in zip(vectors, texts, strict=True):
            for word, count in Counter(_words(text)).items():
                place, negative = divmod(_hash(word), 2)
                vector[place % self.dim] += (1 - 2 * negative) * count * self._idf.get(word, self._unseen)
        norms = np.linalg.norm(vectors, axis=1, keepdims=True)
        return (vectors / np.where(norms > 0, norms, 1)).astype(np.float32)


def _words(text: str) -> list[str]:
    return _WORD.findall(text.lower())


def _hash(word: str) -> int:
    # Checksums such as CRC-32 would be faster, but are linear: alike words would collide with equal signs, or never.
    return int.from_bytes(blake2b(word.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "little")
