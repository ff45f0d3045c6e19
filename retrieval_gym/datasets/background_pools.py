"""Documents made on demand: a question's own passages scattered among background ones, as an array of ids."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import cast

import numpy as np
from numpy.typing import NDArray

from retrieval_gym.datasets.base import Corpus, Question, RetrievalDataset
from retrieval_gym.datasets.sources import report_dropped

Ids = NDArray[np.int64]


def longest_windows(tokens: Ids, budgets: Ids) -> Ids:
    """Return how many consecutive passages fit into each budget at most, wherever they begin.

    Args:
        tokens: tokens of each passage, which follow one another in a circle, int64 ``(N,)``, all at least 1.
        budgets: non-negative, int64 ``(M,)``.

    Returns:
        int64 ``(M,)``; more than N where the budget takes the whole circle.
    """
    starts, ends = np.arange(len(tokens)), np.concatenate([[0], np.cumsum(np.tile(tokens, 2))])
    rounds, rest = np.divmod(budgets, ends[len(tokens)])
    distinct, places = np.unique(rest, return_inverse=True)
    longest = [(np.searchsorted(ends, ends[starts] + budget, "right") - 1 - starts).max() for budget in distinct]
    return rounds * len(tokens) + np.array(longest, np.int64)[places]


class MixedPools(Sequence[Ids]):
    """One pool a question, made when it is asked for: ``pools[i]`` is always the same, ``draw`` makes another.

    The background is a circle of N passages, stored once, of which a pool takes consecutive ones from a random place
    on, as many as keep the whole pool within ``context_tokens``. Where the circle is too short it is gone round again:
    copy ``c`` of passage ``b`` has an id of its own, ``c * N + b``, so that no id stands in a pool twice and each
    place in the pool can be picked. Own passages have ids from ``copies * N`` on, or are themselves background
    passages, which are then left out of that question's circle.

    Each own passage goes into one of the gaps before, between and behind the background passages of the pool, drawn
    independently and uniformly, as in BABILong; those of one gap follow one another.

    Args:
        tokens: tokens of each background passage, int64 ``(N,)``, all at least 1.
        own: each question's own passages: below N background passages, from N on others.
        own_tokens: their tokens in all, int64, one a question, none above ``context_tokens``.
        context_tokens: tokens of a pool at most; it falls short of that by less than one background passage.
        keep_order: whether own passages stand in the pool in their order; else in random order.
        seed: of ``pools[i]``.

    Attributes:
        copies: how often the background is repeated in the corpus.
        max_size: passages in a pool at most.

    Raises:
        ValueError: when a question's own passages are more than ``context_tokens``, or all the background there is.
    """

    def __init__(
        self,
        tokens: Ids,
        own: Sequence[Ids],
        own_tokens: Ids,
        context_tokens: int,
        *,
        keep_order: bool,
        seed: int,
    ) -> None:
        if (own_tokens > context_tokens).any():
            raise ValueError(
                f"context_tokens={context_tokens:,} is too small: the passages of a question alone have "
                f"{own_tokens.max():,} tokens; {own_tokens.max():,} fit all"
            )
        self.context_tokens, self.keep_order, self.seed = context_tokens, keep_order, seed
        self._tokens, self._ends = tokens, np.concatenate([[0], np.cumsum(np.tile(tokens, 2))])
        self._excluded = [ids[ids < len(tokens)] for ids in own]
        left = [int(tokens.sum() - tokens[ids].sum()) for ids in self._excluded]
        if min(left) < 1:
            raise ValueError("a question's own passages are all the background there is: give it more texts")
        # The circle without own passages fits no more in a budget than the whole one in the budget and their tokens.
        budgets = context_tokens - own_tokens
        inside = tokens.sum() - np.array(left, np.int64)
        longest = longest_windows(tokens, budgets + (1 + budgets // np.array(left)) * inside)
        sizes = np.array([len(ids) for ids in own], np.int64)
        self.max_size = int((longest + sizes).max())
        circles = len(tokens) - np.array([len(ids) for ids in self._excluded], np.int64)
        self.copies = int(np.maximum(1, -(-longest // circles)).max())
        shift = (self.copies - 1) * len(tokens)
        self._own = [np.where(ids < len(tokens), ids, ids + shift) for ids in own]
        self._own_tokens = own_tokens
        self._numbers = np.arange(len(own))

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, i):  # type: ignore[no-untyped-def, override]
        """Return the one pool of question ``i`` that ``seed`` makes, int64."""
        if isinstance(i, slice):
            return [self[row] for row in range(*i.indices(len(self)))]
        if not -len(self) <= i < len(self):
            raise IndexError(f"pool {i} of {len(self)}")
        number = int(self._numbers[i])
        return self.draw(i, np.random.Generator(np.random.PCG64(np.random.SeedSequence((self.seed, number)))))

    def own(self, i: int) -> Ids:
        """Return the corpus ids of question ``i``'s own passages, in their order."""
        return self._own[self._numbers[i]]

    def select(self, questions: Sequence[int]) -> MixedPools:
        """Return the pools of these questions, which stay what they are."""
        chosen = object.__new__(MixedPools)
        chosen.__dict__.update(self.__dict__)
        chosen._numbers = self._numbers[np.asarray(questions, np.int64)]
        return chosen

    def draw(self, i: int, rng: np.random.Generator) -> Ids:
        """Mix a pool of question ``i``: distinct corpus ids in document order, int64.

        Only ``rng.random`` is used, whose floats follow from the bits of the generator, so that equal generators make
        equal pools on every machine.
        """
        number = self._numbers[i]
        own = self._own[number]
        background = self._window(number, rng.random())
        if not self.keep_order:
            own = own[np.argsort(rng.random(len(own)), kind="stable")]
        gaps = np.sort((rng.random(len(own)) * (len(background) + 1)).astype(np.int64))
        pool = np.empty(len(background) + len(own), np.int64)
        places = gaps + np.arange(len(own))
        free = np.ones(len(pool), bool)
        free[places] = False
        pool[places], pool[free] = own, background
        return pool

    def _window(self, number: int, uniform: float) -> Ids:
        """Return consecutive background passages from the place ``uniform`` (in [0, 1)) of the circle on."""
        excluded, size, ends, kept = self._excluded[number], len(self._tokens), self._ends, None
        if len(excluded):
            kept = np.delete(np.arange(size), excluded)
            ends = np.concatenate([[0], np.cumsum(np.tile(self._tokens[kept], 2))])
        circle = size if kept is None else len(kept)
        rounds, rest = divmod(self.context_tokens - int(self._own_tokens[number]), int(ends[circle]))
        start = int(uniform * circle)
        end = int(np.searchsorted(ends, ends[start] + rest, "right")) - 1 + rounds * circle
        walk = np.arange(start, end, dtype=np.int64)
        # The window is no longer than all copies together, so going round them never meets the same id again.
        walk[circle * self.copies - start :] -= circle * self.copies
        if kept is None:
            return walk
        copy, place = np.divmod(walk, circle)
        return copy * size + kept[place]

    @property
    def fingerprint(self) -> str:
        """SHA-256 of all that the pools depend on but the corpus, 64 hexadecimal digits."""
        digest = hashlib.sha256(repr((self.context_tokens, self.keep_order, self.seed)).encode())
        digest.update(self._tokens.tobytes())
        for number in self._numbers:
            digest.update(repr((int(number), int(self._own_tokens[number]), self._own[number].tolist())).encode())
        return digest.hexdigest()


@dataclass(frozen=True, eq=False)
class DocumentDataset(RetrievalDataset):
    """Questions over long documents: ``pools`` are ``MixedPools``.

    ``pool(i)`` is the document of question ``i`` that the scorer reads, ``pool(i, rng)`` one mixed anew, as an
    environment does for each episode. A passage is told by its id, never by its text: the corpus must not merge
    duplicates.

    Raises:
        ValueError: as in ``RetrievalDataset``, and when a gold passage is none of its question's own.
    """

    @property
    def mixed(self) -> MixedPools:
        """The pools."""
        return cast(MixedPools, self.pools)

    def _check_pools(self, pools: Sequence[Ids], where: str) -> None:
        for i, question in enumerate(self.questions):
            own = set(self.mixed.own(i).tolist())
            outside = [g for g in question.gold if g not in own]
            if outside or max(own) >= len(self.corpus):
                raise ValueError(
                    f"{where}: question {question.id!r} has gold {question.gold} and own passages {sorted(own)[:8]} "
                    f"in a corpus of {len(self.corpus)}: gold must be among its own passages, and these in the corpus"
                )

    def pool(self, i: int, rng: np.random.Generator | None = None) -> Ids:
        """Return the document of question ``i`` as int64 corpus ids in order; with ``rng`` one that is mixed anew."""
        return self.mixed[i] if rng is None else self.mixed.draw(i, rng)

    def select(self, questions: Iterable[int]) -> DocumentDataset:
        """Return the dataset of these questions alone, each with the document that it has here."""
        chosen = [int(i) for i in questions]
        return replace(self, questions=[self.questions[i] for i in chosen], pools=self.mixed.select(chosen))

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of everything that is asked and can be picked, 64 hexadecimal digits."""
        digest = hashlib.sha256((self.corpus.fingerprint + self.mixed.fingerprint).encode())
        for question in self.questions:
            digest.update(repr(question).encode("utf-8", "surrogatepass"))
        return digest.hexdigest()

    @property
    def max_pool(self) -> int:  # type: ignore[override]
        """Bound on the size of a document, in passages; also of those that are mixed anew."""
        return self.mixed.max_size


@dataclass(frozen=True)
class Asked:
    """A question about a document that has yet to be mixed.

    Attributes:
        question: with gold that counts ``own``: 0 is the first of its own passages.
        own: its own passages: a number below N is that background passage, N + j is the j-th of the other passages.
    """

    question: Question
    own: Ids


def build_documents(
    name: str,
    split: str,
    background: tuple[Sequence[str], Sequence[str], Ids],
    others: tuple[Sequence[str], Sequence[str], Ids],
    asked: Sequence[Asked],
    context_tokens: int,
    *,
    keep_order: bool,
    seed: int,
    dropped: Mapping[str, int],
    source: str,
    licence: str,
) -> DocumentDataset:
    """Build the dataset, without the questions whose own passages do not fit.

    Args:
        name: of the dataset.
        split: ``"train"``, ``"dev"`` or ``"test"``.
        background: titles, texts and tokens of N passages.
        others: titles, texts and tokens of the passages that are in documents only where they are a question's own.
        asked: what is asked.
        context_tokens: see ``MixedPools``, as for ``keep_order`` and ``seed``.
        keep_order: as there.
        seed: as there.
        dropped: what was left out before.
        source: where the data came from, for people.
        licence: under which terms.

    Raises:
        ValueError: when no question fits; the message names the smallest context that holds one, and all.
    """
    titles, texts, tokens = background
    sizes = np.concatenate([tokens, others[2]])
    needed = np.array([sizes[each.own].sum() for each in asked], np.int64)
    fits = needed <= context_tokens
    if not fits.any():
        raise ValueError(
            f"context_tokens={context_tokens:,} is too small for {name}, split {split}: the smallest that holds the "
            f"passages of a question is {needed.min():,}, those of every question {needed.max():,}"
        )
    dropped = dict(dropped)
    if not fits.all():
        dropped[f"with more than {context_tokens:,} tokens of their own (all fit {needed.max():,})"] = int(
            (~fits).sum()
        )
    report_dropped(name, split, tuple(dropped.items()))
    kept = [each for each, fit in zip(asked, fits, strict=True) if fit]
    pools = MixedPools(
        tokens, [each.own for each in kept], needed[fits], context_tokens, keep_order=keep_order, seed=seed
    )
    source = f"{source}; {context_tokens:,} tokens of context"
    _announce(name, split, len(kept), source)
    return DocumentDataset(
        name=name,
        split=split,
        corpus=Corpus(
            list(titles) * pools.copies + list(others[0]),
            list(texts) * pools.copies + list(others[1]),
            merge_duplicates=False,
        ),
        questions=[
            replace(each.question, gold=tuple(pools.own(i)[list(each.question.gold)].tolist()))
            for i, each in enumerate(kept)
        ],
        pools=pools,
        dropped=dropped,
        source=source,
        licence=licence,
    )


@cache
def _announce(name: str, split: str, questions: int, source: str) -> None:
    """Say on stderr, once a process, what a dataset was made of."""
    print(f"retrieval_gym: {name} {split}: {questions:,} questions; {source}", file=sys.stderr)
