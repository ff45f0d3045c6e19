"""``load_synthetic``: a world, questions about it, and their pools, as a dataset."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np

from retrieval_gym.datasets.base import Corpus, Question, RetrievalDataset
from retrieval_gym.datasets.synthetic.draws import Draws
from retrieval_gym.datasets.synthetic.names import SPLITS
from retrieval_gym.datasets.synthetic.pools import draw_pool
from retrieval_gym.datasets.synthetic.questions import Plan, draw_plan
from retrieval_gym.datasets.synthetic.schema import MAX_WORDING
from retrieval_gym.datasets.synthetic.world import MIN_ENTITIES, World, generate_world, max_entities

NUM_QUESTIONS = {"train": 2_000, "dev": 500, "test": 500}
FORMS = ("pool", "corpus")
HOPS = (2, 3, 4)
MAX_REPEATS = 100  # draws in a row that gave a known question
COMPARISON_EVERY = 4  # of the questions with 2 or 4 hops


def load_synthetic(
    split: str = "train",
    path: str | Path | None = None,
    form: str = "pool",
    seed: int = 0,
    hops: Iterable[int] = HOPS,
    pool_size: int = 16,
    hard_distractors: int = 4,
    num_questions: int | None = None,
    corpus_size: int = 20_000,
    wording: int = MAX_WORDING,
) -> RetrievalDataset:
    """Generate the synthetic dataset.

    A world is a fictional encyclopaedia: each passage is the article of one entity with an invented name, and states
    two to six facts. A question names only the start of a chain of facts; every further gold passage is named by the
    gold passage before it, so one search finds the first and a reader who follows the names finds them all. A quarter
    of the questions with 2 or 4 hops are comparisons of two entities (2) or of what two entities lead to (4); their
    gold has no order.

    All facts are functional and all names unique, so a question has one answer. Draws use integers from
    ``PCG64.random_raw`` alone: equal arguments give equal datasets under any numpy version and on any machine. Splits
    share no entity name.

    Args:
        split: ``"train"`` (2,000 questions), ``"dev"`` or ``"test"`` (500 each).
        path: None; there is nothing to read.
        form: ``"pool"`` gives each question ``pool_size`` candidates in random order, from a corpus that is the union
            of the pools; ``"corpus"`` lets every question pick from one world of ``corpus_size`` passages.
        seed: non-negative; another seed is another world.
        hops: numbers of passages to read, some of 2, 3 and 4; about equally many questions have each.
        pool_size: candidates of a question in pool form: the gold passages, hard distractors (other articles that
            the gold ones name, that name the gold ones, that look alike in name, that state the same relation), and
            any others.
        hard_distractors: how many of a pool's other articles are hard; the rest are any. More is harder.
        num_questions: overrides the number of questions.
        corpus_size: passages in corpus form.
        wording: paraphrases of each sentence and question in use, 1 to 4.

    Raises:
        ValueError: when an argument is unknown or out of range, or the world cannot hold what is asked for.
    """
    if path is not None:
        raise ValueError(f"path={str(path)!r}: the synthetic dataset is generated and reads no file; leave path out")
    if split not in SPLITS:
        raise ValueError(f"unknown split {split!r}: choose one of {', '.join(SPLITS)}")
    if form not in FORMS:
        raise ValueError(f"unknown form {form!r}: choose one of {', '.join(FORMS)}")
    for name, value in (
        ("seed", seed),
        ("pool_size", pool_size),
        ("hard_distractors", hard_distractors),
        ("num_questions", 1 if num_questions is None else num_questions),
        ("corpus_size", corpus_size),
        ("wording", wording),
    ):
        if not _is_whole(value):
            raise ValueError(f"{name}={value!r}: give a whole number")
    chosen = list(hops) if isinstance(hops, Iterable) else [hops]
    if not chosen or not all(_is_whole(length) and length in HOPS for length in chosen):
        raise ValueError(f"hops={hops!r}: choose some of {HOPS} as a list, such as [2, 3]")
    lengths = sorted(set(chosen))
    count = NUM_QUESTIONS[split] if num_questions is None else num_questions
    if count < 1:
        raise ValueError(f"num_questions={count}: ask for at least 1")
    if form == "pool" and pool_size < max(lengths):
        raise ValueError(
            f"pool_size={pool_size} cannot hold {max(lengths)} gold passages: make it larger or hops fewer"
        )
    if hard_distractors < 0:
        raise ValueError(f"hard_distractors={hard_distractors}: ask for at least 0")
    largest = max_entities()
    sizes = {"corpus_size": (corpus_size, largest)}
    if form == "pool":
        sizes = {"num_questions": (count, largest // 4), "pool_size": (pool_size, largest // 4)}
    for name, (value, limit) in sizes.items():
        if value > limit:
            raise ValueError(f"{name}={value}: the names of a split last for at most {limit}; make it smaller")
    size = corpus_size if form == "corpus" else max(MIN_ENTITIES, 4 * count, 4 * pool_size)
    world = generate_world(size, split, seed, wording)
    plans = _draw_plans(world, lengths, count, wording, Draws(seed, SPLITS.index(split), 1))
    pools = None
    kept = np.arange(size)
    if form == "pool":
        draws = Draws(seed, SPLITS.index(split), 2)
        drawn = np.array([draw_pool(world, plan, pool_size, hard_distractors, draws) for plan in plans])
        kept, places = np.unique(drawn, return_inverse=True)
        pools = list(places.reshape(drawn.shape).astype(np.int64))
    entities = [world.entities[i] for i in kept.tolist()]
    return RetrievalDataset(
        name="synthetic",
        split=split,
        corpus=Corpus([entity.name for entity in entities], [entity.text for entity in entities]),
        questions=[
            Question(
                id=f"{split}-{seed}-{i}",
                text=plan.text,
                gold=tuple(np.searchsorted(kept, plan.gold).tolist()),
                answers=(plan.answer,),
                ordered=len(plan.chains) == 1,
            )
            for i, plan in enumerate(plans)
        ],
        pools=pools,
        source=f"generated: seed {seed}, {size} entities",
        licence="MIT",
    )


def _is_whole(value: object) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def _draw_plans(world: World, lengths: list[int], count: int, wording: int, draws: Draws) -> list[Plan]:
    """Draw ``count`` questions of different texts, the numbers of hops in turn and then shuffled."""
    plans: dict[str, Plan] = {}
    repeats = 0
    while len(plans) < count:
        turn, place = divmod(len(plans), len(lengths))
        hops = lengths[place]
        plan = draw_plan(world, hops, hops != 3 and turn % COMPARISON_EVERY == COMPARISON_EVERY - 1, wording, draws)
        repeats = repeats + 1 if plan.text in plans else 0
        if repeats == MAX_REPEATS:
            raise ValueError(
                f"num_questions={count}: a world of {len(world)} entities has hardly more than {len(plans)} different "
                f"questions with hops {tuple(lengths)}; ask for fewer or make it larger"
            )
        plans.setdefault(plan.text, plan)
    return draws.shuffled(list(plans.values()))
