"""Types of entity, the relations between them, and the wording of both.

A template of ``says`` is one sentence of an article. ``{S}`` is the subject (its name, or a pronoun), ``{s}`` the same
inside a sentence, ``{P}`` and ``{p}`` the possessive, ``{m}`` the object form; ``{o}`` is the other entity or the year.
``phrases`` name the other entity inside a question, ``asks`` end a question, ``compares`` ask which of two comes first.
All of them keep the relation's own words, so that a question tells which of an article's names to follow.
"""

from __future__ import annotations

from dataclasses import dataclass

MAX_WORDING = 4
NESTING = 2
YEAR = "year"

# Entities of each type in a hundred. People are the hub: most relations lead to one.
SHARES = {
    "person": 40,
    "city": 14,
    "country": 3,
    "company": 9,
    "college": 6,
    "film": 7,
    "novel": 6,
    "orchestra": 4,
    "museum": 4,
    "festival": 4,
    "expedition": 3,
}


@dataclass(frozen=True, slots=True, eq=False)
class Relation:
    """A functional relation: a subject has at most one object.

    Attributes:
        name: short name, unique among the relations of ``subject``.
        subject: type of the subject.
        object: type of the object, or ``YEAR``.
        says: sentences of the subject's article.
        phrases: noun phrases for the object, empty when ``object`` is ``YEAR``. The first ``NESTING`` end in ``{x}``
            and nest; the others stand next to a name alone.
        asks: questions for the object.
        compares: questions which of two subjects has the earlier year, empty unless ``object`` is ``YEAR``.
    """

    name: str
    subject: str
    object: str
    says: tuple[str, ...]
    phrases: tuple[str, ...] = ()
    asks: tuple[str, ...] = ()
    compares: tuple[str, ...] = ()


def _role(subject: str, name: str, done: str, noun: str, object: str = "person", did: str = "") -> Relation:
    """Return a relation to whoever did something once: "was written by", "wrote", "the author of"."""
    did = did or done
    who, which = ("Who", "the person who") if object == "person" else (f"Which {object}", f"the {object} which")
    return Relation(
        name,
        subject,
        object,
        says=(
            f"{{S}} was {done} by {{o}}.",
            f"{{P}} {noun} was {{o}}.",
            f"{{o}} {did} {{m}}.",
            f"{{o}} was {{p}} {noun}.",
        ),
        phrases=(f"the {noun} of {{x}}", f"{which} {did} {{x}}", f"the {object} by whom {{x}} was {done}"),
        asks=(
            f"{who} {did} {{x}}?",
            f"{who} was the {noun} of {{x}}?",
            f"Name the {noun} of {{x}}.",
            f"By whom was {{x}} {done}?",
        ),
    )


def _office(subject: str, noun: str) -> Relation:
    """Return a relation to the person who holds an office: "its conductor is"."""
    return Relation(
        noun,
        subject,
        "person",
        says=(
            f"{{P}} {noun} is {{o}}.",
            f"{{o}} is the {noun} of {{m}}.",
            f"{{S}} has {{o}} as {noun}.",
            f"{{o}} serves as {{p}} {noun}.",
        ),
        phrases=(f"the {noun} of {{x}}", f"the person who is {noun} of {{x}}", f"the current {noun} of {{x}}"),
        asks=(
            f"Who is the {noun} of {{x}}?",
            f"Who serves as {noun} of {{x}}?",
            f"Name the {noun} of {{x}}.",
            f"Which person is {noun} of {{x}}?",
        ),
    )


def _place(subject: str, name: str, verb: str, noun: str, place: str = "city") -> Relation:
    """Return a relation to the place of something: "was born in", "the birthplace of"."""
    return Relation(
        name,
        subject,
        place,
        says=(
            f"{{S}} {verb} in {{o}}.",
            f"{{P}} {noun} is {{o}}.",
            f"{{S}} {verb} in the {place} of {{o}}.",
            f"{{o}} is the {place} where {{s}} {verb}.",
        ),
        phrases=(
            f"the {noun} of {{x}}",
            f"the {place} that is the {noun} of {{x}}",
            f"the {place} where {{x}} {verb}",
        ),
        asks=(
            f"What is the {noun} of {{x}}?",
            f"Which {place} is the {noun} of {{x}}?",
            f"Name the {place} where {{x}} {verb}.",
            f"What is the name of the {place} where {{x}} {verb}?",
        ),
    )


def _year(subject: str, done: str, which: str = "Which") -> Relation:
    """Return the relation to the year in which something was founded, opened, published."""
    return Relation(
        "year",
        subject,
        YEAR,
        says=(
            f"{{S}} was {done} in {{o}}.",
            f"{{S}} was {done} in the year {{o}}.",
            f"It was in {{o}} that {{s}} was {done}.",
            f"In {{o}}, {{s}} was {done}.",
        ),
        asks=(
            f"In which year was {{x}} {done}?",
            f"When was {{x}} {done}?",
            f"What is the year in which {{x}} was {done}?",
            f"Name the year when {{x}} was {done}.",
        ),
        compares=(
            f"{which} was {done} first, {{a}} or {{b}}?",
            f"{which} was {done} earlier: {{a}} or {{b}}?",
            f"Of {{a}} and {{b}}, {which.lower()} was {done} first?",
            f"Was {{a}} or {{b}} {done} earlier?",
        ),
    )


def _link(subject: str, name: str, object: str, verb: str, noun: str, be: str = "was") -> Relation:
    """Return a relation that the subject acts out: "studied at", with the noun that names the object."""
    have = "had" if be == "was" else "has"
    which, what = ("who", "Who") if object == "person" else ("which", "What")
    return Relation(
        name,
        subject,
        object,
        says=(
            f"{{S}} {verb} {{o}}.",
            f"{{P}} {noun} {be} {{o}}.",
            f"{{o}} {be} {{p}} {noun}.",
            f"{{S}} {have} {{o}} as {noun}.",
        ),
        phrases=(
            f"the {noun} of {{x}}",
            f"the {object} {which} {be} the {noun} of {{x}}",
            f"the {object} that {{x}} {verb}",
        ),
        asks=(
            f"{what} {be} the {noun} of {{x}}?",
            f"Which {object} {be} the {noun} of {{x}}?",
            f"Name the {object} that {{x}} {verb}.",
            f"Which is the {object} that {{x}} {verb}?",
        ),
    )


RELATIONS: tuple[Relation, ...] = (
    _place("person", "birthplace", "was born", "birthplace"),
    _link("person", "college", "college", "studied at", "place of study"),
    _link("person", "employer", "company", "worked for", "employer"),
    _link("person", "mentor", "person", "was taught by", "mentor"),
    _link("person", "spouse", "person", "was married to", "spouse"),
    _link("person", "debut film", "film", "first acted in", "debut film"),
    _link("person", "favourite novel", "novel", "was inspired by", "favourite novel"),
    _link("person", "orchestra", "orchestra", "first played with", "first orchestra"),
    _link("person", "expedition", "expedition", "took part in", "only expedition"),
    _year("person", "born", "Who"),
    _place("city", "country", "is located", "home country", "country"),
    _office("city", "mayor"),
    _role("city", "founder", "founded", "founder"),
    _link("city", "museum", "museum", "is best known for", "main museum", "is"),
    _link("city", "festival", "festival", "invites its guests to", "annual festival", "is"),
    _year("city", "founded"),
    _link("country", "capital", "city", "is governed from", "capital city", "is"),
    _link("country", "port", "city", "trades mainly through", "main port", "is"),
    _office("country", "president"),
    _role("country", "liberator", "liberated", "liberator"),
    _link("country", "college", "college", "trains its judges at", "national university", "is"),
    _year("country", "proclaimed"),
    _role("company", "founder", "founded", "founder"),
    _office("company", "chairman"),
    _place("company", "headquarters", "has its headquarters", "headquarters city"),
    _role("company", "owner", "acquired", "parent company", "company"),
    _year("company", "founded"),
    _role("college", "founder", "founded", "founder"),
    _office("college", "rector"),
    _place("college", "city", "is located", "location"),
    _year("college", "founded"),
    _role("film", "director", "directed", "director"),
    _office("film", "leading actor"),
    _role("film", "producer", "produced", "producer"),
    _link("film", "novel", "novel", "was adapted from", "source novel"),
    _role("film", "studio", "distributed", "distributor", "company"),
    _place("film", "location", "was filmed", "filming location"),
    _year("film", "released"),
    _role("novel", "author", "written", "author", did="wrote"),
    _role("novel", "publisher", "published", "publisher", "company"),
    _role("novel", "translator", "translated", "translator"),
    _place("novel", "setting", "is set", "setting"),
    _year("novel", "published"),
    _office("orchestra", "conductor"),
    _role("orchestra", "founder", "founded", "founder"),
    _place("orchestra", "home", "is based", "home city"),
    _role("orchestra", "sponsor", "sponsored", "sponsor", "company"),
    _year("orchestra", "founded"),
    _role("museum", "architect", "designed", "architect"),
    _office("museum", "curator"),
    _place("museum", "city", "is located", "location"),
    _role("museum", "owner", "restored", "restorer", "company"),
    _year("museum", "opened"),
    _role("festival", "founder", "founded", "founder"),
    _office("festival", "artistic director"),
    _place("festival", "city", "takes place", "host city"),
    _role("festival", "sponsor", "sponsored", "sponsor", "company"),
    _year("festival", "launched"),
    _role("expedition", "leader", "led", "leader"),
    _role("expedition", "patron", "financed", "patron"),
    _place("expedition", "harbour", "set out", "port of departure"),
    _role("expedition", "supplier", "equipped", "supplier", "company"),
    _year("expedition", "launched"),
)
