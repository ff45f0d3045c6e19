"""Questions about a world: chains of facts that only name where the chain starts."""

from __future__ import annotations

from dataclasses import dataclass

from retrieval_gym.datasets.synthetic.draws import Draws
from retrieval_gym.datasets.synthetic.schema import NESTING, YEAR, Relation
from retrieval_gym.datasets.synthetic.world import Fact, World

ATTEMPTS = (
    2_000  # one draw in fifteen succeeds at worst (4-hop comparisons), so this many failures mean too small a world
)


@dataclass(frozen=True, slots=True)
class Chain:
    """Entities whose articles are read in order, and the facts that lead from each to the next and to the answer."""

    entities: tuple[int, ...]
    facts: tuple[Fact, ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """A question, its answer, and the one chain (or the two compared chains) that lead to it."""

    text: str
    answer: str
    chains: tuple[Chain, ...]

    @property
    def gold(self) -> tuple[int, ...]:
        """Entities whose articles answer the question, in reading order."""
        return tuple(entity for chain in self.chains for entity in chain.entities)


def draw_plan(world: World, hops: int, comparison: bool, wording: int, draws: Draws) -> Plan:
    """Draw one question.

    Args:
        world: what to ask about.
        hops: how many articles must be read, 2 to 4; 2 or 4 for a comparison.
        comparison: whether to compare the years of two entities (2 hops) or of what they lead to (4 hops).
        wording: how many paraphrases of each template to use.
        draws: where the random integers come from.

    Raises:
        ValueError: when the world is too small to hold such a question.
    """
    draw = _comparison if comparison else _chain
    for _ in range(ATTEMPTS):
        plan = draw(world, hops, wording, draws)
        if plan is not None and _is_sound(world, plan):
            return plan
    raise ValueError(f"a world of {len(world)} entities is too small for {hops}-hop questions: make it larger")


def _walk(world: World, start: int, relations: list[Relation] | None, length: int, draws: Draws) -> Chain | None:
    """Follow ``length - 1`` facts from an entity, the given ones or any, and one more to the answer."""
    entities, facts = [start], []
    for step in range(length):
        if relations is not None:
            fact = world.follow(entities[-1], relations[step])
        else:
            last = step == length - 1
            options = [f for f in world.entities[entities[-1]].facts if last or f.relation.object != YEAR]
            fact = draws.choice(options) if options else None
        if fact is None:
            return None
        facts.append(fact)
        entities.append(fact.object)
    return Chain(tuple(entities[:length]), tuple(facts))


def _phrase(world: World, chain: Chain, wording: int, draws: Draws) -> str:
    """Describe the last entity of a chain by the name of the first and the relations between them."""
    phrase = world.entities[chain.entities[0]].name
    for step, fact in enumerate(chain.facts[:-1]):
        usable = fact.relation.phrases[: min(wording, NESTING) if step else wording]
        phrase = draws.choice(usable).format(x=phrase)
    return phrase


def _chain(world: World, hops: int, wording: int, draws: Draws) -> Plan | None:
    start = draws.choice(world.by_kind[draws.choice(list(world.by_kind))])
    chain = _walk(world, start, None, hops, draws)
    if chain is None:
        return None
    ask = draws.choice(chain.facts[-1].relation.asks[:wording])
    text = ask.format(x=_phrase(world, chain, wording, draws))
    return Plan(text[0].upper() + text[1:], chain.facts[-1].value, (chain,))


def _comparison(world: World, hops: int, wording: int, draws: Draws) -> Plan | None:
    length = hops // 2
    first = draws.choice(world.by_kind[draws.choice(list(world.by_kind))])
    a = _walk(world, first, None, length, draws)
    if a is None or a.facts[-1].relation.object != YEAR:
        return None
    relations = [fact.relation for fact in a.facts]
    b = _walk(world, draws.choice(world.stating[relations[0]]), relations, length, draws)
    if b is None or a.facts[-1].value == b.facts[-1].value:
        return None
    ask = draws.choice(relations[-1].compares[:wording])
    text = ask.format(a=_phrase(world, a, wording, draws), b=_phrase(world, b, wording, draws))
    earlier = min((a, b), key=lambda chain: int(chain.facts[-1].value))
    return Plan(text[0].upper() + text[1:], world.entities[earlier.entities[-1]].name, (a, b))


def _is_sound(world: World, plan: Plan) -> bool:
    """Say whether each gold article is named by the gold article before it and by no other, nor the answer early."""
    gold = set(plan.gold)
    if len(gold) < len(plan.gold):
        return False
    for chain in plan.chains:
        for entity, followed in zip(chain.entities, chain.facts, strict=True):
            # The object followed counts only once: in the facts of the article that is meant to state it.
            last = entity == chain.entities[-1]
            ahead = gold | {chain.facts[-1].object} - {-1}
            for fact in world.entities[entity].facts:
                if fact is not followed and fact.object in ahead:
                    return False
            if last and followed.object in gold:
                return False
    return True
