"""Stories of our own in the style of bAbI's first five tasks: a small world, what happens in it, and questions.

The wording is bAbI's, so that what is learned here can be tried on the official stories; the stories, the code and the
distribution are our own.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field

from retrieval_gym.datasets.babi import Story, StoryQuestion
from retrieval_gym.datasets.synthetic.draws import Draws
from retrieval_gym.datasets.synthetic.names import SPLITS

PLACES = ("bathroom", "bedroom", "garden", "hallway", "kitchen", "office")
OBJECTS = ("apple", "football", "milk")
MOVES = ("moved to", "went to", "went back to", "journeyed to", "travelled to")
GETS = ("got", "grabbed", "picked up", "took")
DROPS = ("discarded", "dropped", "left", "put down")
GIVES = ("gave", "handed", "passed")
OPPOSITE = {"north": "south", "south": "north", "east": "west", "west": "east"}

QUESTIONS_PER_STORY = 5
MAX_REPEATS = 1_000  # stories in a row that were known already


@dataclass
class _World:
    """What happened so far; sentences are told by their position.

    Attributes:
        draws: where chance comes from.
        people: who acts.
        lines: the sentences so far.
        place: where each person is, known or not.
        moved: the sentence that brought each person there; absent where no sentence did.
        holder: who holds each object; absent where nobody does.
        rests: where each object lies that nobody holds.
        handled: the last sentence in which each object was got, dropped or given.
        brought: the sentence that brought each object's last handler, or who carries it, to where it is.
        path: each object's places in order, with the sentence that first brought it, or its finder, there.
        given: (giver, object, receiver, sentence) in order.
    """

    draws: Draws
    people: tuple[str, ...]
    lines: list[str] = field(default_factory=list)
    place: dict[str, str] = field(default_factory=dict)
    moved: dict[str, int] = field(default_factory=dict)
    holder: dict[str, str] = field(default_factory=dict)
    rests: dict[str, str] = field(default_factory=dict)
    handled: dict[str, int] = field(default_factory=dict)
    brought: dict[str, int] = field(default_factory=dict)
    path: dict[str, list[tuple[str, int]]] = field(default_factory=dict)
    given: list[tuple[str, str, str, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.place = {person: self.draws.choice(PLACES) for person in self.people}
        self.rests = {thing: self.draws.choice(PLACES) for thing in OBJECTS}

    def move(self) -> None:
        """Somebody goes to another place."""
        person = self.draws.choice(self.people)
        where = self.draws.choice([place for place in PLACES if place != self.place[person]])
        self.place[person], self.moved[person] = where, len(self.lines)
        for thing, holder in self.holder.items():
            if holder == person:
                self.path[thing].append((where, len(self.lines)))
                self.brought[thing] = len(self.lines)
        self.lines.append(f"{person} {self.draws.choice(MOVES)} the {where}.")

    def can_get(self) -> list[tuple[str, str]]:
        """Who can get what: objects that lie where a person is whose place a sentence told."""
        return [(p, thing) for thing, place in self.rests.items() for p in self.moved if self.place[p] == place]

    def get(self) -> None:
        """Somebody picks up an object."""
        person, thing = self.draws.choice(self.can_get())
        del self.rests[thing]
        self.holder[thing], self.handled[thing], self.brought[thing] = person, len(self.lines), self.moved[person]
        path = self.path.setdefault(thing, [])
        if not path or path[-1][0] != self.place[person]:
            path.append((self.place[person], self.moved[person]))
        self.lines.append(f"{person} {self.draws.choice(GETS)} the {thing}{self._there()}.")

    def drop(self) -> None:
        """Somebody puts an object down."""
        thing = self.draws.choice(list(self.holder))
        person = self.holder.pop(thing)
        self.rests[thing], self.handled[thing] = self.place[person], len(self.lines)
        self.lines.append(f"{person} {self.draws.choice(DROPS)} the {thing}{self._there()}.")

    def can_give(self) -> list[tuple[str, str, str]]:
        """Who can give what to whom: people in one place."""
        return [
            (giver, thing, other)
            for thing, giver in self.holder.items()
            for other in self.people
            if other != giver and self.place[other] == self.place[giver]
        ]

    def give(self) -> None:
        """Somebody gives an object to somebody else."""
        giver, thing, other = self.draws.choice(self.can_give())
        self.holder[thing], self.handled[thing] = other, len(self.lines)
        self.given.append((giver, thing, other, len(self.lines)))
        self.lines.append(f"{giver} {self.draws.choice(GIVES)} the {thing} to {other}.")

    def _there(self) -> str:
        return self.draws.choice(("", " there"))

    def happen(self, giving: bool) -> None:
        """Let one thing happen: a move half of the time, else what else is possible."""
        others: list[Callable[[], None]] = []
        if self.can_get():
            others.append(self.get)
        if self.holder:
            others.append(self.drop)
        if giving and self.can_give():
            others += [self.give] * 3  # givings are what the fifth task asks about
        self.draws.choice([self.move] * max(1, len(others)) + others)()


def _ask_person(world: _World) -> StoryQuestion | None:
    """Where is X?"""
    if not world.moved:
        return None
    person = world.draws.choice(list(world.moved))
    return _asked(world, f"Where is {person}?", world.place[person], world.moved[person])


def _ask_object(world: _World) -> StoryQuestion | None:
    """Where is the object? The last handling of it says who had it, that person's last move says where."""
    if not world.path:
        return None
    thing = world.draws.choice(list(world.path))
    place, _ = world.path[thing][-1]
    return _asked(world, f"Where is the {thing}?", place, world.handled[thing], world.brought[thing])


def _ask_before(world: _World) -> StoryQuestion | None:
    """Where was the object before the place? Its last stay there counts, and the place it was in just before."""
    things = [thing for thing, path in world.path.items() if len(path) > 1]
    if not things:
        return None
    thing = world.draws.choice(things)
    path = world.path[thing]
    place = world.draws.choice([where for where, _ in path[1:]])
    last = max(i for i, (where, _) in enumerate(path) if where == place)
    text = f"Where was the {thing} before the {place}?"
    return _asked(world, text, path[last - 1][0], world.handled[thing], path[last][1], path[last - 1][1])


def _ask_giving(world: _World) -> StoryQuestion | None:
    """Who gave what to whom? The last giving that the question fits counts."""
    if not world.given:
        return None
    giver, thing, other, _ = world.draws.choice(world.given)
    kinds: dict[str, tuple[tuple[int, str], ...]] = {
        f"What did {giver} give to {other}?": ((0, giver), (2, other)),
        f"Who gave the {thing} to {other}?": ((1, thing), (2, other)),
        f"Who did {giver} give the {thing} to?": ((0, giver), (1, thing)),
        f"Who gave the {thing}?": ((1, thing),),
        f"Who received the {thing}?": ((1, thing),),
    }
    text = world.draws.choice(list(kinds))
    last = next(each for each in reversed(world.given) if all(each[i] == word for i, word in kinds[text]))
    answer = last[1] if text.startswith("What") else last[0] if text.startswith("Who gave") else last[2]
    return _asked(world, text, answer, last[3])


def _asked(world: _World, text: str, answer: str, *facts: int) -> StoryQuestion:
    return StoryQuestion(text, answer, facts, len(world.lines))


@dataclass(frozen=True)
class _Plot:
    """How stories of a task run.

    Attributes:
        people: who acts.
        ask: what is asked; None while nothing can be.
        max_sentences: how long they get.
        ask_one_in: how many pairs of sentences there are to a question, on average.
        things: whether there are objects.
        giving: whether people give them to one another.
    """

    people: tuple[str, ...]
    ask: Callable[[_World], StoryQuestion | None]
    max_sentences: int
    ask_one_in: int
    things: bool = True
    giving: bool = False


_FOUR = ("Daniel", "John", "Mary", "Sandra")
_PLOTS = {
    1: _Plot(_FOUR, _ask_person, 10, 1, things=False),
    2: _Plot(_FOUR, _ask_object, 40, 2),
    3: _Plot(_FOUR, _ask_before, 64, 3),
    5: _Plot(("Bill", "Fred", "Jeff", "Mary"), _ask_giving, 40, 2, giving=True),
}


def generate_stories(task: int, split: str, seed: int, num_questions: int) -> list[Story]:
    """Generate stories with ``num_questions`` questions in all, in bAbI's wording.

    Draws use integers from ``PCG64.random_raw`` alone, so equal arguments give equal stories on every machine. A story
    belongs to one split by a hash of its sentences (train 8 parts of 10, dev and test 1 each), so splits share no
    story, whatever their seeds. No story with the same questions occurs twice.

    Args:
        task: 1, one fact: where is X; 2, two facts: where is the object; 3, three facts: where was the object before
            the place; 4, relations of two places; 5, who gave what to whom.
        split: ``"train"``, ``"dev"`` or ``"test"``.
        seed: non-negative.
        num_questions: at least 1; up to five share a story (one in task 4), each asked after what precedes it.

    Raises:
        ValueError: when there are not as many questions; task 4 has about 12,000 in train and 1,500 in dev.
    """
    draws = Draws(seed, SPLITS.index(split), task)
    stories: dict[Story, None] = {}
    count = repeats = 0
    while count < num_questions:
        story = _places_story(draws) if task == 4 else _acted_story(_PLOTS[task], draws)
        if not story.questions or story in stories or _split_of(story) != split:
            repeats += 1
            if repeats == MAX_REPEATS:
                raise ValueError(
                    f"num_questions={num_questions}: task {task} has hardly more than {count} different questions in "
                    f"{split}; ask for fewer"
                )
            continue
        repeats = 0
        kept = story.questions[: num_questions - count]
        stories[Story(story.sentences, kept)] = None
        count += len(kept)
    return list(stories)


def _split_of(story: Story) -> str:
    part = hashlib.sha256("\n".join(story.sentences).encode()).digest()[0] % 10
    return "train" if part < 8 else "dev" if part == 8 else "test"


def _acted_story(plot: _Plot, draws: Draws) -> Story:
    """Let things happen until five questions were asked or the story is long enough."""
    world = _World(draws, plot.people)
    questions: list[StoryQuestion] = []
    while len(world.lines) < plot.max_sentences and len(questions) < QUESTIONS_PER_STORY:
        if plot.things:
            world.happen(plot.giving)
        else:
            world.move()
        due = len(world.lines) % 2 == 0 and draws.below(plot.ask_one_in) == 0
        question = plot.ask(world) if due else None
        if question is not None:
            questions.append(question)
    return Story(tuple(world.lines), tuple(questions))


def _places_story(draws: Draws) -> Story:
    """Three places in a row, two sentences about neighbours, and a question about one of these pairs."""
    one, two, three = draws.sample(PLACES, 3)
    direction = draws.choice(("north", "west"))
    pairs = draws.shuffled([(one, two), (two, three)])  # the first is ``direction`` of the second
    lines = tuple(_relation(*pair, direction, draws) for pair in pairs)
    fact = draws.below(2)
    first, second = pairs[fact]
    if draws.below(2):
        first, second, direction = second, first, OPPOSITE[direction]
    if draws.below(2):
        question = StoryQuestion(f"What is {direction} of the {second}?", first, (fact,), 2)
    else:
        question = StoryQuestion(f"What is the {first} {direction} of?", second, (fact,), 2)
    return Story(lines, (question,))


def _relation(first: str, second: str, direction: str, draws: Draws) -> str:
    if draws.below(2):
        first, second, direction = second, first, OPPOSITE[direction]
    return f"The {first} is {direction} of the {second}."
