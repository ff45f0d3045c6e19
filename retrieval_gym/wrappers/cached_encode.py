"""``CachedEncode``: any text encoder as a function to numpy that embeds each text once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Vectors = NDArray[np.float32]
Encode = Callable[[list[str]], Any]


class CachedEncode:
    """Remember what an encoder returned, and call it once for all texts that are new.

    Pass one ``CachedEncode`` to several environments of a process and they share what is embedded. Pickled or copied
    it takes along what it has embedded so far, so that a call with every text before ``SubprocVecEnv`` saves each
    worker the work.

    Args:
        encode: takes N texts and returns ``(N, D)`` numbers: an array, a torch tensor on any device, or a SciPy sparse
            matrix. ``SentenceTransformer.encode``, ``TextEncoder.encode``, ``HashingEncoder(...)`` are such functions.
    """

    def __init__(self, encode: Encode) -> None:
        self.encode = encode
        self._rows: dict[str, Vectors] = {}
        self._dim: int | None = None

    def __len__(self) -> int:
        """Return the number of texts embedded so far."""
        return len(self._rows)

    @classmethod
    def of(cls, encode: Encode | CachedEncode) -> CachedEncode:
        """Return ``encode`` itself where it remembers already."""
        return encode if isinstance(encode, CachedEncode) else cls(encode)

    def __call__(self, texts: Sequence[str]) -> Vectors:
        """Return float32 ``(N, D)`` in new memory, D 0 where no text was ever given.

        Raises:
            ValueError: when the encoder does not return one row of finite numbers a text, always of the same length.
        """
        new = list(dict.fromkeys(text for text in texts if text not in self._rows))
        if new:
            self._rows.update(zip(new, self._embed(new), strict=True))
        if not texts:
            return np.zeros((0, self._dim or 0), np.float32)
        return np.stack([self._rows[text] for text in texts])

    def _embed(self, texts: list[str]) -> Vectors:
        given = self.encode(texts)
        if hasattr(given, "detach"):  # a torch tensor: numpy reads neither other devices' memory nor bfloat16
            given = given.detach().float().cpu()
        elif hasattr(given, "toarray"):
            given = given.toarray()
        vectors = np.asarray(given, np.float32)
        dim = vectors.shape[-1] if self._dim is None and vectors.ndim == 2 else self._dim
        if vectors.shape != (len(texts), dim):
            raise ValueError(
                f"the encoder returned shape {vectors.shape} for {len(texts)} texts: it must return one row of "
                f"{'D' if dim is None else dim} numbers a text"
            )
        finite = np.isfinite(vectors).all(axis=1)
        if not finite.all():
            raise ValueError(
                f"the encoder returned a number that is not finite for {texts[int(finite.argmin())]!r:.80}"
            )
        self._dim = dim
        return vectors
