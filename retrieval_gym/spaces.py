"""``Utf8Text``: a space of any Unicode text, registered with Gymnasium's batching and flattening functions."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import numpy as np
from gymnasium.spaces import Space, Tuple
from gymnasium.spaces.utils import flatdim, flatten, flatten_space, is_space_dtype_shape_equiv, unflatten
from gymnasium.vector.utils import batch_differing_spaces

_SAMPLE_LENGTH = 32
_SURROGATES = range(0xD800, 0xE000)
_UNICODE_END = 0x110000


class Utf8Text(Space[str]):
    """Strings that encode to UTF-8, of any alphabet, the empty one included.

    ``gymnasium.spaces.Text`` enumerates its character set and needs a maximum length, so it cannot hold the text of a
    real corpus. This space has neither limit. Its samples are not flat arrays: flattening leaves them as they are.

    Args:
        max_length: largest number of characters (code points); None sets no limit.
        seed: seed or generator of ``sample``.

    Raises:
        ValueError: when ``max_length`` is negative or not a whole number.
    """

    def __init__(self, max_length: int | None = None, seed: int | np.random.Generator | None = None) -> None:
        if max_length is not None and (not isinstance(max_length, (int, np.integer)) or max_length < 0):
            raise ValueError(f"max_length must be None or a whole number of at least 0, got {max_length!r}")
        self.max_length = None if max_length is None else int(max_length)
        super().__init__(dtype=str, seed=seed)

    @property
    def is_np_flattenable(self) -> bool:
        """False: texts have no fixed length."""
        return False

    def sample(self, mask: None = None, probability: None = None) -> str:
        """Draw up to 32 characters (fewer if ``max_length`` is less), uniformly from all of Unicode.

        Raises:
            ValueError: when a mask or probability is given; there is no finite alphabet to mask.
        """
        if mask is not None or probability is not None:
            raise ValueError(f"Utf8Text.sample takes no mask and no probability, got {mask!r} and {probability!r}")
        longest = _SAMPLE_LENGTH if self.max_length is None else min(self.max_length, _SAMPLE_LENGTH)
        codes = self.np_random.integers(_UNICODE_END - len(_SURROGATES), size=self.np_random.integers(longest + 1))
        codes[codes >= _SURROGATES.start] += len(_SURROGATES)
        return "".join(map(chr, codes.tolist()))

    def contains(self, x: Any) -> bool:
        """Say whether ``x`` is a string, not too long, without lone surrogates."""
        if not isinstance(x, str) or (self.max_length is not None and len(x) > self.max_length):
            return False
        try:
            x.encode()
        except UnicodeEncodeError:
            return False
        return True

    def __repr__(self) -> str:
        return "Utf8Text()" if self.max_length is None else f"Utf8Text({self.max_length})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Utf8Text) and self.max_length == other.max_length


@batch_differing_spaces.register(Utf8Text)
def _batch_differing(spaces: list[Utf8Text]) -> Tuple:  # type: ignore[misc]
    return Tuple([deepcopy(space) for space in spaces], seed=deepcopy(spaces[0].np_random))


@is_space_dtype_shape_equiv.register(Utf8Text)
def _is_equivalent(space_1: Utf8Text, space_2: Space) -> bool:
    return isinstance(space_2, Utf8Text)


@flatdim.register(Utf8Text)
def _flatdim(space: Utf8Text) -> int:
    raise ValueError(f"{space} has no flat dimension: texts have no fixed length")


@flatten_space.register(Utf8Text)
def _flatten_space(space: Utf8Text) -> Utf8Text:
    return space


@flatten.register(Utf8Text)
def _flatten(space: Utf8Text, x: str) -> str:  # type: ignore[misc]
    return x


@unflatten.register(Utf8Text)
def _unflatten(space: Utf8Text, x: str) -> str:  # type: ignore[misc]
    return x
