"""Hard distractors: which other articles stand beside the gold ones in a question's pool."""

from __future__ import annotations

from retrieval_gym.datasets.synthetic.draws import Draws
from retrieval_gym.datasets.synthetic.questions import Plan
from retrieval_gym.datasets.synthetic.world import World

TRIES = 8  # random members looked at for each distractor, so that large groups are never copied


def draw_pool(world: World, plan: Plan, size: int, hard: int, draws: Draws) -> list[int]:
    """Return ``size`` distinct entities in random order: the gold ones of a question, hard distractors, any others.

    Each gold article in turn brings three distractors: an article that it names beside the chain (or where the chain
    ends), one of its own type that states the same relation, and one of these: an article that names the same entity
    (a reversed relation), a look-alike name, another of its type. When there are ``hard`` of them, or all run out, any
    article will do.
    """
    pool = dict.fromkeys(plan.gold)
    steps = [pair for chain in plan.chains for pair in zip(chain.entities, chain.facts, strict=True)]
    limit = min(size, len(pool) + hard)
    while len(pool) < limit:
        before = len(pool)
        for entity, followed in draws.shuffled(steps):
            own = world.entities[entity]
            neighbours = (world.mentioning.get(entity, []), world.by_stem[own.kind, own.stem], world.by_kind[own.kind])
            groups = (
                [fact.object for fact in own.facts if fact.object >= 0],
                world.stating[followed.relation],
                draws.choice(neighbours),
            )
            for group in groups:
                fresh = _draw_outside(pool, group, draws)
                if fresh is not None and len(pool) < limit:
                    pool[fresh] = None
        if len(pool) == before:
            pool[draws.below(len(world))] = None
    while len(pool) < size:
        pool[draws.below(len(world))] = None
    return draws.shuffled(list(pool))


def _draw_outside(pool: dict[int, None], group: list[int], draws: Draws) -> int | None:
    """Return a member of the group that is not in the pool, or None when none was met."""
    for _ in range(TRIES if group else 0):
        member = draws.choice(group)
        if member not in pool:
            return member
    return None
