"""What is asked and what can be picked: passages, corpora, questions, and the dataset that joins them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Passage:
    """One retrievable unit of text."""

    title: str
    text: str

    def __str__(self) -> str:
        """Title and text on two lines, the form that encoders, BM25 and transcripts see."""
        return f"{self.title}\n{self.text}" if self.title else self.text


@dataclass(frozen=True, slots=True)
class Question:
    """A question and the passages that answer it.

    Attributes:
        id: the source's own identifier.
        text: the question.
        gold: corpus ids of the evidence, in chain order where the source gives one.
        answers: accepted answers; empty when the source has none.
        hops: length of the reasoning chain; 0 means ``len(gold)``.
        ordered: whether the order of ``gold`` means anything.
        grades: how relevant each passage of ``gold`` is, whole numbers from 1; empty when all are 1.

    Raises:
        ValueError: when ``grades`` is neither empty nor as long as ``gold``, or holds other than whole numbers from 1.
    """

    id: str
    text: str
    gold: tuple[int, ...]
    answers: tuple[str, ...] = ()
    hops: int = 0
    ordered: bool = True
    grades: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        """Fill in the number of hops and check the grades."""
        if self.hops == 0:
            object.__setattr__(self, "hops", len(self.gold))
        if self.grades and len(self.grades) != len(self.gold):
            raise ValueError(
                f"question {self.id!r} has {len(self.grades)} grades for {len(self.gold)} gold passages: give one "
                "each, or none"
            )
        bad = [grade for grade in self.grades if type(grade) is not int or grade < 1]
        if bad:
            raise ValueError(
                f"question {self.id!r}: grade {bad[0]!r} is not a whole number from 1: leave passages that are not "
                "relevant out of gold"
            )


class Corpus(Sequence[Passage]):
    """An immutable, list-like collection of passages; a passage's id is its position.

    Args:
        titles: one title a passage, ``""`` for none.
        texts: one text a passage.
        keys: the source's own identifiers, unique; ``"0"``, ``"1"``, ... when omitted.
        merge_duplicates: whether passages equal in title and text count as one when gold passages are looked for.
            Long documents, where a sentence is told by its position, say False.

    Raises:
        ValueError: when the corpus is empty, the lengths differ or a key occurs twice.
    """

    def __init__(
        self,
        titles: Sequence[str],
        texts: Sequence[str],
        keys: Sequence[str] | None = None,
        *,
        merge_duplicates: bool = True,
    ) -> None:
        if not texts:
            raise ValueError("the corpus is empty: give it at least one passage")
        if len(titles) != len(texts) or (keys is not None and len(keys) != len(texts)):
            raise ValueError(
                f"{len(titles)} titles, {len(texts)} texts and "
                f"{len(keys) if keys is not None else 'no'} keys: a corpus needs one of each a passage"
            )
        self.titles = titles
        self._texts = texts
        self._keys = keys
        self._merge_duplicates = merge_duplicates
        if keys is not None and len(self.ids) != len(keys):
            seen: set[str] = set()
            twice = next(key for key in keys if key in seen or seen.add(key))  # type: ignore[func-returns-value]
            raise ValueError(f"passage id {twice!r} occurs twice: passage ids must be unique")

    def __len__(self) -> int:
        return len(self._texts)

    def __getitem__(self, index):  # type: ignore[no-untyped-def, override]
        """Return the passage with this id, or a list of passages for a slice."""
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        return Passage(self.titles[index], self._texts[index])

    def __iter__(self) -> Iterator[Passage]:
        return map(Passage, self.titles, self._texts)

    @property
    def keys(self) -> Sequence[str]:
        """The source's identifiers, one a passage."""
        return self._keys if self._keys is not None else [str(i) for i in range(len(self))]

    @cached_property
    def ids(self) -> Mapping[str, int]:
        """Corpus id of each key."""
        return {key: i for i, key in enumerate(self.keys)}

    def texts(self, ids: Iterable[int]) -> list[str]:
        """Return title and text of each passage as one string, in the order of ``ids``."""
        return [str(self[int(i)]) for i in ids]

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of the content (titles and texts in order, not the keys), 64 hexadecimal digits."""
        digest = hashlib.sha256()
        for passage in self:
            digest.update(passage_bytes(passage.title, passage.text))
        return digest.hexdigest()

    @cached_property
    def canonical(self) -> Ids:
        """For each id the lowest id of a passage that counts as the same one, int64 of shape ``(len(self),)``.

        That is the first of its copies, or the id itself where the corpus does not merge duplicates.
        """
        return self.first_copies if self._merge_duplicates else np.arange(len(self), dtype=np.int64)

    @cached_property
    def first_copies(self) -> Ids:
        """For each id the lowest id of a passage with the same title and text, int64 of shape ``(len(self),)``.

        Copies have one embedding, also where they count as different passages.
        """
        first: dict[Passage, int] = {}
        return np.fromiter((first.setdefault(p, i) for i, p in enumerate(self)), np.int64, len(self))


def passage_bytes(title: str, text: str) -> bytes:
    """Return the content of a passage as bytes that no other content has: each part after its length."""
    parts = [part.encode("utf-8", "surrogatepass") for part in (title, text)]
    return b"".join(len(part).to_bytes(8, "little") + part for part in parts)


def merge_gold(gold: Sequence[int], grades: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the distinct ids in the order of their first mention, each with its largest grade.

    Args:
        gold: corpus ids, some of which may have become equal.
        grades: one grade an id, or none where all are 1; stays empty then.
    """
    if not grades:
        return tuple(dict.fromkeys(gold)), ()
    best: dict[int, int] = {}
    for passage, grade in zip(gold, grades, strict=True):
        best[passage] = max(grade, best.get(passage, grade))
    return tuple(best), tuple(best.values())


@dataclass(frozen=True, eq=False)
class RetrievalDataset:
    """Questions over one corpus, served alike to the environment, the agents and the scorer.

    Attributes:
        name: the dataset's name, as ``load_dataset`` takes it.
        split: ``"train"``, ``"dev"`` or ``"test"``.
        corpus: what can be picked.
        questions: what is asked.
        pools: one int64 array of distinct corpus ids in document order a question, or None when every question
            picks from the whole corpus.
        dropped: what loading left out, reason to count.
        source: where the data came from, for people.
        licence: under which terms.

    Raises:
        ValueError: when there is no question, a question has no gold passage, a gold id is not in the corpus or not
            in its question's pool, or a pool is no array of whole numbers, is empty, holds an id twice or one outside
            the corpus.
    """

    name: str
    split: str
    corpus: Corpus
    questions: Sequence[Question]
    pools: Sequence[Ids] | None = None
    dropped: Mapping[str, int] = field(default_factory=dict)
    source: str = ""
    licence: str = ""

    def __post_init__(self) -> None:
        """Check that every reference between questions, pools and corpus holds."""
        where = f"dataset {self.name!r}, split {self.split!r}"
        if not self.questions:
            raise ValueError(f"{where}: no question is left (dropped: {dict(self.dropped) or 'none'})")
        if self.pools is not None and len(self.pools) != len(self.questions):
            raise ValueError(f"{where}: {len(self.pools)} pools for {len(self.questions)} questions")
        for question in self.questions:
            if not question.gold:
                raise ValueError(f"{where}: question {question.id!r} has no gold passage; leave it out or add its gold")
            bad = [g for g in question.gold if not 0 <= g < len(self.corpus)]
            if bad:
                raise ValueError(
                    f"{where}: gold id {bad[0]} of question {question.id!r} is not in the corpus "
                    f"of {len(self.corpus)} passages"
                )
        if self.pools is not None:
            self._check_pools(self.pools, where)

    def _check_pools(self, pools: Sequence[Ids], where: str) -> None:
        for question, pool in zip(self.questions, pools, strict=True):
            self._check_pool(question, pool, where)

    def _check_pool(self, question: Question, pool: Ids, where: str) -> None:
        if not isinstance(pool, np.ndarray) or pool.ndim != 1 or pool.dtype.kind not in "iu":
            raise ValueError(
                f"{where}: the pool of question {question.id!r} must be an int64 array of corpus ids, got "
                f"{pool!r:.80}: make it np.array(ids, np.int64)"
            )
        members = set(pool.tolist())
        if not members or len(members) != len(pool) or min(members) < 0 or max(members) >= len(self.corpus):
            raise ValueError(
                f"{where}: the pool of question {question.id!r} must hold distinct ids "
                f"from 0 to {len(self.corpus) - 1}, at least one; got {pool.tolist()[:8]}"
            )
        outside = [g for g in question.gold if g not in members]
        if outside:
            raise ValueError(f"{where}: gold id {outside[0]} of question {question.id!r} is not in its pool")

    def __len__(self) -> int:
        """Return the number of questions."""
        return len(self.questions)

    def pool(self, i: int, rng: np.random.Generator | None = None) -> Ids | None:
        """Return the candidates of question ``i`` as int64 corpus ids in document order; None is the whole corpus.

        ``rng`` serves datasets that mix a fresh document at every call.
        """
        return None if self.pools is None else self.pools[i]

    def select(self, questions: Iterable[int]) -> RetrievalDataset:
        """Return the dataset of these questions alone, over the same corpus."""
        chosen = [int(i) for i in questions]
        pools = None if self.pools is None else [self.pools[i] for i in chosen]
        return replace(self, questions=[self.questions[i] for i in chosen], pools=pools)

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of everything that is asked and can be picked, 64 hexadecimal digits."""
        digest = hashlib.sha256(self.corpus.fingerprint.encode())
        for i, question in enumerate(self.questions):
            pool = None if self.pools is None else self.pools[i].tolist()
            digest.update(repr((question, pool)).encode("utf-8", "surrogatepass"))
        return digest.hexdigest()

    @cached_property
    def max_pool(self) -> int | None:
        """Size of the largest pool, or None when there are no pools."""
        return None if self.pools is None else max(map(len, self.pools))

    @cached_property
    def gold(self) -> Ids:
        """Canonical gold ids in chain order, int64 of shape ``(len(self), max_gold)``, padded with -1."""
        return self._gold_and_grades[0]

    @cached_property
    def num_gold(self) -> Ids:
        """Number of distinct gold passages of each question, int64 of shape ``(len(self),)``."""
        return (self.gold >= 0).sum(axis=1)

    @cached_property
    def grades(self) -> Ids:
        """Grade of each passage of ``gold``, int64 of the same shape, padded with 0; of copies the largest counts."""
        return self._gold_and_grades[1]

    @cached_property
    def _gold_and_grades(self) -> tuple[Ids, Ids]:
        canonical = self.corpus.canonical
        rows = [merge_gold(canonical[list(q.gold)].tolist(), q.grades) for q in self.questions]
        shape = (len(rows), max(len(gold) for gold, _ in rows))
        golds, grades = np.full(shape, -1, np.int64), np.zeros(shape, np.int64)
        for i, (gold, grade) in enumerate(rows):
            golds[i, : len(gold)], grades[i, : len(gold)] = gold, grade or 1
        golds.flags.writeable = grades.flags.writeable = False
        return golds, grades

    @cached_property
    def hops(self) -> Ids:
        """Number of hops of each question, int64 of shape ``(len(self),)``."""
        return np.array([q.hops for q in self.questions], np.int64)

    @property
    def max_gold(self) -> int:
        """Largest number of distinct gold passages of a question."""
        return self.gold.shape[1]
