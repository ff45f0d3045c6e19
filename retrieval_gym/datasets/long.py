"""Chains of 3 to 5 hops: questions of HotpotQA or 2WikiMultihopQA linked through passages and entities that they share.

On-policy state training (see ``docs/long.md``) is measured on HotpotQA-Long and 2Wiki-Long, but how they were built is
not told. The rule here is our own.
"""

from __future__ import annotations

import html
import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path

from retrieval_gym.datasets.base import Passage, Question, RetrievalDataset
from retrieval_gym.datasets.jsonl import corpus_path, questions_beside
from retrieval_gym.datasets.pooled import DropQuestion, Layout, load_pooled, wiki_paragraphs, wiki_question
from retrieval_gym.datasets.readers import Record, get_field, get_strings
from retrieval_gym.datasets.sources import report_dropped
from retrieval_gym.datasets.synthetic.draws import Draws

HOPS = (3, 4, 5)
MAX_USES = 4  # composed questions of one number of hops that a source question takes part in

WORD = re.compile(r"\w+")

# How "the ... of X" reads where the relation's own name does not fit.
RELATIONS = {
    "award received": "award received by",
    "educated at": "place of education of",
    "founded by": "founder of",
    "has part": "part of",
    "student of": "teacher of",
}


@dataclass(frozen=True, slots=True)
class Leg:
    """A source question as a leg of a chain: it needs two passages and names only the first.

    Attributes:
        before: the question's text up to the first passage's name.
        name: that name, as the question has it.
        after: the text behind it.
        titles: of both passages.
        names: everything that either passage's entity is called, plain (see ``plain``).
        relations: what the second entity is to the first and the answer to the second, where the source says.
        answer: a name to find the next passage by, compared with titles; empty where neither passage has the answer.
    """

    before: str
    name: str
    after: str
    titles: tuple[str, str]
    names: tuple[frozenset[str], frozenset[str]]
    relations: tuple[str, str] | None
    answer: str

    def ask(self, name: str) -> str:
        """Return the question with this name in place of the first passage's."""
        return self.before + name + self.after

    def describe(self, name: str, question: str, shared: bool) -> str:
        """Return what the next leg starts from: this leg's second entity when it is ``shared``, else its answer."""
        if self.relations is None:
            return f"the answer to: {question.strip()}"
        second, answer = (f"the {RELATIONS.get(relation, f'{relation} of')}" for relation in self.relations)
        return f"{second} {name}" if shared else f"{answer} {second} {name}"


def load_hotpotqa_long(
    split: str = "train",
    path: str | Path | None = None,
    corpus: str | Path | None = None,
    hops: Iterable[int] = HOPS,
    num_questions: int | None = None,
    seed: int = 0,
) -> RetrievalDataset:
    """Compose chains from HotpotQA's questions, see ``load_2wiki_long``.

    A question leads on through its answer: ``... [the answer to: QUESTION] ...``. The next one starts from the passage
    that the answer names, which is the second gold passage or a new one.
    """
    return _load("hotpotqa", _read_hotpotqa, split, path, corpus, hops, num_questions, seed)


def load_2wiki_long(
    split: str = "train",
    path: str | Path | None = None,
    corpus: str | Path | None = None,
    hops: Iterable[int] = HOPS,
    num_questions: int | None = None,
    seed: int = 0,
) -> RetrievalDataset:
    """Compose chains from 2WikiMultihopQA's compositional and inference questions of one split.

    A question leads on through its second gold passage or through its answer, described by its ``evidences``:
    ``... [the mother of the director of FILM] ...`` takes the place of the name from which the next question starts.

    Guaranteed, up to case, accents and punctuation: the composed text names the first gold passage and no later one, by
    no name that the source has for it, nor the last answer; each later passage is named in one before it. Gold
    passages are distinct, as many as hops, and in chain order; no two questions have the same text, or the same gold
    and answers. The wording is mechanical. A source question serves in at most ``MAX_USES`` composed ones of the same
    number of hops.

    Args:
        split: ``"train"``, ``"dev"`` or ``"test"``; only questions of this split are linked.
        path: a file or folder; by default ``$RETRIEVAL_GYM_DATA``, the cache and the Hub are searched.
        corpus: a ``corpus.jsonl`` or its folder, in which the gold is looked up by title and text; by default the
            union of all paragraphs of every split.
        hops: numbers of gold passages, some of 3, 4 and 5.
        num_questions: how many, about equally many of each number of hops; by default all.
        seed: non-negative; decides which of the possible chains are taken, and their order. What is composed for one
            number of hops does not depend on the others.

    Raises:
        ValueError: when an argument is wrong, the data are malformed, or fewer questions than ``num_questions`` (by
            default: none) can be composed; the message counts what was tried.
        FileNotFoundError: when the data are nowhere.
    """
    return _load("2wiki", _read_2wiki, split, path, corpus, hops, num_questions, seed)


def _load(
    source: str,
    read: Callable[[Record, str, Sequence[Passage]], tuple[Question, Leg]],
    split: str,
    path: str | Path | None,
    corpus: str | Path | None,
    hops: Iterable[int],
    num_questions: int | None,
    seed: int,
) -> RetrievalDataset:
    name = f"{source}-long"
    lengths = _check(hops, num_questions, seed)
    if corpus is not None and (file := questions_beside(corpus_path(corpus), name, split)):
        raise ValueError(f"{file}: {name} composes its questions itself; rename the file, or load it as 'custom'")
    legs: dict[str, Leg] = {}

    def question(record: Record, where: str, passages: Sequence[Passage]) -> Question:
        asked, leg = read(record, where, passages)
        legs[asked.id] = leg
        return asked

    layout = Layout(wiki_paragraphs, question, lambda record: True)
    parts = load_pooled(name, layout, split, path, "corpus", corpus, source)
    composer = _Composer(parts, [legs[part.id] for part in parts.questions])
    by_hops = [composer.compose(length, Draws(seed, length)) for length in lengths]
    composed = [each for turn in zip_longest(*by_hops) for each in turn if each is not None]
    if len(composed) < (num_questions or 1):
        asked = "" if num_questions is None else f", fewer than num_questions={num_questions}"
        raise ValueError(
            f"dataset {name!r}, split {split!r}: {len(composed)} questions of {lengths} hops can be composed{asked}. "
            f"Of {len(parts) + sum(parts.dropped.values())} questions in {parts.source}, {len(parts)} are chains that "
            f"name their start (dropped: {dict(parts.dropped)}), and {composer.count_links()} pairs of these link "
            f"(dropped after that: {dict(composer.dropped) or 'none'}). A part of a dataset holds few links: give the "
            "whole one, or ask for other hops or fewer questions"
        )
    report_dropped(name, split, tuple(composer.dropped.items()))
    return replace(
        parts,
        questions=composed[:num_questions],
        dropped={**parts.dropped, **composer.dropped},
        source=f"composed from {parts.source}",
    )


def _check(hops: Iterable[int], num_questions: int | None, seed: int) -> list[int]:
    """Return the numbers of hops, in order.

    Raises:
        ValueError: when an argument is out of range.
    """
    chosen = list(hops) if isinstance(hops, Iterable) else [hops]
    if not chosen or not all(type(length) is int and length in HOPS for length in chosen):
        raise ValueError(f"hops={hops!r}: choose some of {HOPS} as a list, such as [3, 4]")
    if num_questions is not None and (type(num_questions) is not int or num_questions < 1):
        raise ValueError(f"num_questions={num_questions!r}: ask for at least 1, or None for all")
    if type(seed) is not int or seed < 0:
        raise ValueError(f"seed={seed!r}: give a whole number, at least 0")
    return sorted(set(chosen))


# What a source question gives


def _read_hotpotqa(record: Record, where: str, passages: Sequence[Passage]) -> tuple[Question, Leg]:
    if record.get("type") == "comparison":
        raise DropQuestion("that compare")
    return _read(wiki_question(record, where, passages, ordered=True), passages)


def _read_2wiki(record: Record, where: str, passages: Sequence[Passage]) -> tuple[Question, Leg]:
    if get_field(record, "type", str, where) not in ("compositional", "inference"):
        raise DropQuestion("that compare")
    facts = _facts(record, where)
    if len(facts) != 2:
        raise DropQuestion("with other than two facts")
    (first, relation, second), (again, next_relation, _) = facts
    question = wiki_question(record, where, passages, ordered=True)
    return _read(question, passages, ((first,), (second, again)), (relation, next_relation))


def _facts(record: Record, where: str) -> list[tuple[str, str, str]]:
    """Return ``evidences``, triples (official) or an object of three lists (Hub)."""
    value = get_field(record, "evidences", object, where)
    if isinstance(value, dict):
        columns = [get_strings(value, key, f"{where}, evidences") for key in ("fact", "relation", "entity")]
        value = [list(fact) for fact in zip_longest(*columns)]
    if not isinstance(value, list) or not all(
        isinstance(fact, list) and len(fact) == 3 and all(isinstance(part, str) for part in fact) for fact in value
    ):
        raise ValueError(f"{where}: field 'evidences' must hold triples of strings, got {value!r:.80}")
    return [(subject, relation, entity) for subject, relation, entity in value]


def _read(
    question: Question,
    passages: Sequence[Passage],
    aliases: tuple[tuple[str, ...], tuple[str, ...]] = ((), ()),
    relations: tuple[str, str] | None = None,
) -> tuple[Question, Leg]:
    """Return the question with its gold in chain order, and the leg that it is.

    Raises:
        DropQuestion: when it is none.
    """
    if len(question.gold) != 2:
        raise DropQuestion("with other than two gold passages")
    text = unicodedata.normalize("NFC", question.text)
    named = [i for i in question.gold if plain(bare(passages[i].title)) in plain(text)]
    if len(named) != 1 or (relations is not None and named[0] != question.gold[0]):
        raise DropQuestion("that do not name their first passage alone")
    gold = (named[0], sum(question.gold) - named[0])
    titles = (passages[gold[0]].title, passages[gold[1]].title)
    span = _span(text, titles[0])
    if span is None:
        raise DropQuestion("that name their first passage twice, or as a part of a longer name")
    names = [{plain(title), plain(bare(title))} for title in titles]
    for known, more in zip(names, aliases, strict=True):
        known.update(map(plain, more))
    answer = question.answers[0]
    if plain(answer) in plain(text) or any(name in plain(text) for name in names[1]):
        raise DropQuestion("whose answer or second passage stands in the question")
    first, second = (plain(str(passages[i])) for i in gold)
    if not any(name in first for name in names[1]):
        raise DropQuestion("whose second passage is not named in the first")
    start, end = span
    leg = Leg(
        before=text[:start],
        name=text[start:end],
        after=text[end:],
        titles=titles,
        names=(frozenset(names[0]), frozenset(names[1])),
        relations=relations,
        answer=bare(answer) if plain(answer) in first or plain(answer) in second else "",
    )
    return replace(question, gold=gold), leg


# Names


def plain(text: str) -> str:
    """Return the words in lower case without accents and punctuation, one space around each.

    So a name stands in a text when its plain form is a substring of the text's.
    """
    text = unicodedata.normalize("NFKD", html.unescape(text)).casefold()
    if not text.isascii():
        text = "".join(character for character in text if not unicodedata.combining(character))
    return f" {' '.join(WORD.findall(text))} "


def bare(title: str) -> str:
    """Return a Wikipedia title without the parentheses that tell it from others, HTML entities decoded."""
    title = unicodedata.normalize("NFC", " ".join(html.unescape(title).split()))
    return re.sub(r"\s*\([^()]*\)$", "", title) or title


def _span(text: str, title: str) -> tuple[int, int] | None:
    """Return where the text names the title, its parentheses included if they are there.

    None when it does so more than once, or when a capitalised word beside the name says that it is a part of another.
    """
    tokens = list(WORD.finditer(text))
    words = [plain(token.group()).strip() for token in tokens]

    def places(name: str) -> list[tuple[int, int]]:
        parts = plain(name).split()
        return [(i, i + len(parts)) for i in range(len(words)) if words[i : i + len(parts)] == parts]

    found = places(bare(title))
    if len(found) != 1:
        return None
    first, last = (places(html.unescape(title)) or found)[0]
    start, end = tokens[first].start(), tokens[last - 1].end()
    beside = re.compile(r"[ -]")
    if first > 1 and tokens[first - 1].group()[0].isupper() and beside.fullmatch(text[tokens[first - 1].end() : start]):
        return None
    if last < len(tokens) and beside.fullmatch(text[end : tokens[last].start()]):
        if tokens[last].group()[0].isupper() or tokens[last].group()[0].isdigit():
            return None
    inside = text[start:end]
    return start, end + (inside.count("(") > inside.count(")") and text[end : end + 1] == ")")


# Links

Onward = dict[int | str | None, list[int]]  # legs by their first passage and by its title
Chain = list[tuple[int, bool]]  # legs, and whether each starts from the second passage of the one before


class _Composer:
    """Links legs to chains.

    Attributes:
        dropped: what was left out after linking, reason to count.
    """

    def __init__(self, parts: RetrievalDataset, legs: Sequence[Leg]) -> None:
        self.dropped: Counter[str] = Counter()
        self._parts = parts
        self._legs = legs
        self._gold = [part.gold for part in parts.questions]
        titles: dict[str, set[str]] = {leg.answer: set() for leg in legs}
        for title in parts.corpus.titles:
            if (name := bare(title)) in titles:
                titles[name].add(title)
        # Where each leg leads: to its second passage, and to the title that its answer names. A name that several
        # titles share leaves open which of them is meant, and leads nowhere.
        self._second: list[int | None] = []
        self._other: list[str | None] = []
        for gold, leg in zip(self._gold, legs, strict=True):
            told = leg.relations is not None or leg.answer == bare(leg.titles[1])
            self._second.append(gold[1] if told else None)
            named = titles[leg.answer]
            self._other.append(next(iter(named)) if len(named) == 1 and not named & set(leg.titles) else None)

    def _onward(self, order: Iterable[int], rest: int) -> list[Onward]:
        """For 0 to ``rest`` more passages: the legs from which so many can follow, by first passage and its title."""
        order = list(order)
        onward: list[Onward] = []
        for more in range(rest + 1):
            starts: Onward = defaultdict(list)
            for i in order:
                if (
                    more == 0
                    or self._second[i] in onward[more - 1]
                    or (more > 1 and self._other[i] in onward[more - 2])
                ):
                    starts[self._gold[i][0]].append(i)
                    starts[self._legs[i].titles[0]].append(i)
            onward.append(dict(starts))
        return onward

    def count_links(self) -> int:
        """Return the number of ordered pairs of legs that link."""
        starts = self._onward(range(len(self._legs)), 0)[0]
        return sum(len(starts.get(key, ())) for key in (*self._second, *self._other))

    def compose(self, hops: int, draws: Draws) -> list[Question]:
        """Return composed questions with this number of hops in random order."""
        order = draws.shuffled(range(len(self._legs)))
        onward = self._onward(order, hops - 2)
        uses: Counter[int] = Counter()
        seen: set[object] = set()
        composed = []
        for head in order:
            for path in self._paths([(head, False)], self._gold[head], hops - 2, onward, uses):
                question = self._question(path)
                if question is None:
                    continue
                keys = {plain(question.text), (question.gold, question.answers)}
                if keys & seen:
                    self.dropped["composed ones that repeat another"] += 1
                    continue
                seen |= keys
                uses.update(i for i, _ in path)
                composed.append(question)
        return draws.shuffled(composed)

    def _paths(
        self,
        path: Chain,
        gold: tuple[int, ...],
        rest: int,
        onward: Sequence[Onward],
        uses: Counter[int],
    ) -> Iterator[Chain]:
        """Yield the ways to go on to ``rest`` more distinct passages over legs that are not used up."""
        if rest == 0:
            yield path
            return
        last = path[-1][0]
        for key, step in ((self._second[last], 1), (self._other[last], 2)):
            if key is None or step > rest:
                continue
            legs = onward[rest - step].get(key, [])
            while legs and uses[legs[-1]] >= MAX_USES:  # hubs would be walked through again and again
                legs.pop()
            for j in reversed(legs):
                if any(uses[i] >= MAX_USES for i, _ in path):
                    return
                new = self._gold[j][-step:]
                if uses[j] < MAX_USES and not set(new) & set(gold):
                    yield from self._paths([*path, (j, step == 1)], gold + new, rest - step, onward, uses)

    def _question(self, path: Chain) -> Question | None:
        """Return the composed question, or None when its text gives away more than the first passage."""
        name = self._legs[path[0][0]].name
        text = self._legs[path[0][0]].ask(name)
        gold = self._gold[path[0][0]]
        hidden = set(self._legs[path[0][0]].names[1])
        for (i, _), (j, shared) in zip(path, path[1:], strict=False):
            name = self._legs[i].describe(name, text, shared)
            text = self._legs[j].ask(f"[{name}]")
            gold += self._gold[j][1:] if shared else self._gold[j]
            hidden.update(*self._legs[j].names)
        parts = [self._parts.questions[i] for i, _ in path]
        hidden.update(map(plain, parts[-1].answers))
        asked = plain(text)
        if any(each in asked for each in hidden):
            self.dropped["composed ones that name a later passage or the answer"] += 1
            return None
        return Question("+".join(part.id for part in parts), text.strip(), gold, parts[-1].answers)
