"""A fictional encyclopaedia: entities, the facts that join them, and one article each."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import NamedTuple, TypeVar

from retrieval_gym.datasets.synthetic.draws import Draws
from retrieval_gym.datasets.synthetic.names import SPLITS, capacity, draw_names
from retrieval_gym.datasets.synthetic.schema import MAX_WORDING, RELATIONS, SHARES, YEAR, Relation

K = TypeVar("K")
V = TypeVar("V")

MIN_ENTITIES = 200  # below this the rarer types have too few members to ask about
FACTS = (2, 3, 4, 5, 6)  # facts of an article, each equally likely
FIRST_YEAR, YEARS = 1700, 300

RELATIONS_OF = {kind: tuple(r for r in RELATIONS if r.subject == kind) for kind in SHARES}


class Fact(NamedTuple):
    """One triple: the subject is the entity that owns it. ``object`` is an entity, or -1 where ``value`` is a year."""

    relation: Relation
    object: int
    value: str


@dataclass(frozen=True, slots=True)
class Entity:
    """One entity and its article; ``stem`` is the part of the name that its look-alikes share."""

    name: str
    kind: str
    stem: str
    facts: tuple[Fact, ...]
    text: str


@dataclass(frozen=True, eq=False)
class World:
    """All entities of one world; an entity's number is its position."""

    entities: Sequence[Entity]

    def __len__(self) -> int:
        return len(self.entities)

    @cached_property
    def by_kind(self) -> dict[str, list[int]]:
        """Entities of each type."""
        return _group((entity.kind, i) for i, entity in enumerate(self.entities))

    @cached_property
    def by_stem(self) -> dict[tuple[str, str], list[int]]:
        """Entities of each type and stem: the look-alikes."""
        return _group(((entity.kind, entity.stem), i) for i, entity in enumerate(self.entities))

    @cached_property
    def stating(self) -> dict[Relation, list[int]]:
        """Entities whose article states each relation."""
        return _group((fact.relation, i) for i, entity in enumerate(self.entities) for fact in entity.facts)

    @cached_property
    def mentioning(self) -> dict[int, list[int]]:
        """Entities whose article names each entity."""
        return _group((fact.object, i) for i, entity in enumerate(self.entities) for fact in entity.facts)

    def follow(self, entity: int, relation: Relation) -> Fact | None:
        """Return the fact that this entity's article states about a relation, or None."""
        return next((fact for fact in self.entities[entity].facts if fact.relation is relation), None)


def _group(pairs: Iterable[tuple[K, V]]) -> dict[K, list[V]]:
    groups: dict[K, list[V]] = {}
    for key, member in pairs:
        groups.setdefault(key, []).append(member)
    return groups


def generate_world(num_entities: int, split: str = "train", seed: int = 0, wording: int = MAX_WORDING) -> World:
    """Generate the world of one split.

    Args:
        num_entities: how many entities, and so articles.
        split: ``"train"``, ``"dev"`` or ``"test"``; worlds of different splits share no name, whatever their seeds.
        seed: non-negative.
        wording: how many paraphrases each kind of sentence has, 1 to ``MAX_WORDING``.

    Raises:
        ValueError: when an argument is out of range or the split has too few names for a world of this size.
    """
    if split not in SPLITS:
        raise ValueError(f"unknown split {split!r}: choose one of {', '.join(SPLITS)}")
    if num_entities < MIN_ENTITIES:
        raise ValueError(f"a world of {num_entities} entities is too small: it needs at least {MIN_ENTITIES}")
    if num_entities > max_entities():
        raise ValueError(f"a world of {num_entities} entities has too few names: it holds at most {max_entities()}")
    if seed < 0:
        raise ValueError(f"seed {seed} is negative: choose 0 or more")
    if not 1 <= wording <= MAX_WORDING:
        raise ValueError(f"wording={wording}: choose 1 to {MAX_WORDING} paraphrases")
    draws = Draws(seed, SPLITS.index(split), 0)
    kinds = _draw_kinds(num_entities, draws)
    members = _group((kind, i) for i, kind in enumerate(kinds))
    names = [("", "")] * num_entities
    for kind in SHARES:
        # The members are in random order already, so families do not lie side by side in the world.
        for i, named in zip(members[kind], draw_names(kind, len(members[kind]), split, draws), strict=True):
            names[i] = named
    facts = _FactSource(kinds, members, names, draws)
    entities = []
    for i, (kind, (name, stem)) in enumerate(zip(kinds, names, strict=True)):
        own = tuple(facts.draw(i))
        entities.append(Entity(name, kind, stem, own, _article(name, kind, own, wording, draws)))
    return World(entities)


@cache
def max_entities() -> int:
    """Return how many entities the largest world has, which the names of a split limit."""
    size = min(((capacity(kind) + 1) * 100 - 1) // share for kind, share in SHARES.items())
    # Rounding the shares down leaves a few more people than their share.
    while _shares(size)["person"] + size - sum(_shares(size).values()) > capacity("person"):
        size -= 1
    return size


def _shares(num_entities: int) -> dict[str, int]:
    """Return how many entities of each type a world has, before people fill what rounding down leaves."""
    return {kind: num_entities * share // 100 for kind, share in SHARES.items()}


def _draw_kinds(num_entities: int, draws: Draws) -> list[str]:
    """Return the type of each entity: exact shares, in random order."""
    kinds = [kind for kind, count in _shares(num_entities).items() for _ in range(count)]
    return draws.shuffled(kinds + ["person"] * (num_entities - len(kinds)))


class _FactSource:
    """Draws the facts of entities, kept from contradicting each other where a reader would notice."""

    def __init__(
        self, kinds: list[str], members: dict[str, list[int]], names: list[tuple[str, str]], draws: Draws
    ) -> None:
        self._kinds = kinds
        self._members = members
        self._names = names
        self._draws = draws
        self._rank = {i: rank for kind in SHARES for rank, i in enumerate(members[kind])}
        self._country = {city: draws.choice(members["country"]) for city in members["city"]}
        self._cities = _group((country, city) for city, country in self._country.items())

    def draw(self, subject: int) -> list[Fact]:
        """Return two to six facts of an entity, in the order of its article."""
        kind = self._kinds[subject]
        wanted = self._draws.choice(FACTS)
        facts: list[Fact] = []
        for relation in self._draws.shuffled(RELATIONS_OF[kind]):
            if relation.object == YEAR:
                facts.append(Fact(relation, -1, str(FIRST_YEAR + self._draws.below(YEARS))))
            else:
                target = self._target(subject, relation)
                if target is not None and all(target != fact.object for fact in facts):
                    facts.append(Fact(relation, target, self._names[target][0]))
            if len(facts) == wanted:
                break
        return facts

    def _target(self, subject: int, relation: Relation) -> int | None:
        """Return the object of a relation, or None when this subject has none."""
        if relation.name == "country":
            return self._country[subject]
        if relation.subject == "country" and relation.object == "city":
            cities = self._cities.get(subject)
            return self._draws.choice(cities) if cities else None
        rank, pool = self._rank[subject], self._members[relation.object]
        if relation.name == "spouse":
            # People are married in pairs, and one article of the two says so: nobody is the spouse of two others.
            return pool[rank + 1] if rank % 2 == 0 and rank + 1 < len(pool) else None
        if relation.subject == relation.object:
            # Only earlier members, so that nobody is taught by a pupil and no company owns its owner.
            return pool[self._draws.below(rank)] if rank else None
        return self._draws.choice(pool)


def _article(name: str, kind: str, facts: Sequence[Fact], wording: int, draws: Draws) -> str:
    """Word the facts: the first sentence names the entity, the others refer to it."""
    subject, possessive, form = name, f"{name}'s", name
    later = ("he", "his", "him") if kind == "person" and draws.below(2) else ("she", "her", "her")
    if kind != "person":
        later = ("it", "its", "it")
    sentences = []
    for fact in facts:
        template = draws.choice(fact.relation.says[:wording])
        sentences.append(
            template.format(
                S=subject[0].upper() + subject[1:],
                s=subject,
                P=possessive[0].upper() + possessive[1:],
                p=possessive,
                m=form,
                o=fact.value,
            )
        )
        subject, possessive, form = later
    return " ".join(sentences)
