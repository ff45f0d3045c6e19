"""BabiLong: bAbI's stories scattered in order among the sentences of long texts.

The task is that of BABILong (Kuratov et al. 2024, https://arxiv.org/abs/2406.10149), as Q-RAG plays it: the passages
are the document's sentences, the gold passages are the facts that support the answer.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np

from retrieval_gym.datasets.babi import LICENCE, TASKS, Story, load_official
from retrieval_gym.datasets.babi_world import generate_stories
from retrieval_gym.datasets.background import STORY_RATIO, check_count, load_background
from retrieval_gym.datasets.background_pools import Asked, DocumentDataset, build_documents
from retrieval_gym.datasets.base import Question
from retrieval_gym.datasets.sources import SPLITS

NUM_QUESTIONS = {"train": 2_000, "dev": 500, "test": 500}
STORIES = ("generated", "official")
MAX_CONTEXT = 100_000_000
MAX_SENTENCE = 64  # tokens of a passage that Q-RAG reads in long documents


def load_babilong(
    task: int,
    split: str = "train",
    path: str | Path | None = None,
    context_tokens: int = 4_000,
    stories: str | None = None,
    background: str = "generated",
    seed: int = 0,
    num_questions: int | None = None,
    tokenizer: str | None = None,
) -> DocumentDataset:
    """Load one of the tasks QA1 to QA5 in documents of ``context_tokens`` tokens.

    A question's document holds the sentences of its story that precede the question, and consecutive background
    sentences from a random place on; ``background_pools.MixedPools`` has the rule. Environments mix a document anew
    for each episode; the scorer reads the one that ``seed`` makes for each question. Gold passages are told by their
    position in the story, since a story may say the same twice. They are in the order in which bAbI lists them, that of
    the reasoning.

    The defaults are generated, so that they are the same on every machine; what was used is printed.
    ``stories="official", background="books"`` is BABILong's own mixture.

    Tokens are estimated: words and punctuation marks times the wordpieces that bert-base-uncased makes of them (1.06 in
    books, 1.42 in generated text, 1.02 in stories). A document falls short of ``context_tokens`` by less than the 64
    tokens that a background sentence has at most; longer ones are divided.

    Args:
        task: 1 to 5.
        split: ``"train"``, ``"dev"`` or ``"test"``.
        path: the official files; see ``babi.load_official``. Only for official stories, which it implies.
        context_tokens: tokens of a document. Questions whose story alone is longer are left out.
        stories: ``"generated"`` (see ``babi_world``; the default without ``path``) or ``"official"``.
        background: ``"generated"``, ``"books"`` or a path; see ``background.load_background``. Splits share no text.
        seed: of what is generated, and of the scorer's documents.
        num_questions: of generated stories, by default 2,000 in train and 500 in dev and test; of official ones the
            first so many, by default all.
        tokenizer: a ``tokenizer.json``, or a folder with one, that counts tokens exactly.

    Raises:
        ValueError: when an argument is unknown or out of range, a file is malformed, or no story fits.
        FileNotFoundError: when a file is nowhere; the message names every place searched.
    """
    if split not in SPLITS:
        raise ValueError(f"unknown split {split!r}: choose one of {', '.join(SPLITS)}")
    stories = stories or ("generated" if path is None else "official")
    if stories not in STORIES:
        raise ValueError(f"stories={stories!r}: choose one of {', '.join(STORIES)}")
    if path is not None and stories == "generated":
        raise ValueError(f"path={str(path)!r}: generated stories read no file; leave path or stories='generated' out")
    check_count("context_tokens", context_tokens, 1, MAX_CONTEXT)
    check_count("seed", seed, 0, 2**63)
    if num_questions is not None:
        check_count("num_questions", num_questions, 1, 1_000_000)
    dropped: dict[str, int] = {}
    if stories == "official":
        official = load_official(task, split, path)
        told, origin, licence = official.stories, f"official ({official.source})", LICENCE
        if official.removed:
            dropped["of stories that are in the dev file as well"] = official.removed
    else:
        told = generate_stories(task, split, seed, num_questions or NUM_QUESTIONS[split])
        origin, licence = f"generated (seed {seed})", "MIT"
    hidden = load_background(background, split, seed, MAX_SENTENCE, tokenizer)
    asked = _ask(told, f"qa{task}-{split}", len(hidden.sentences))[:num_questions]
    lines = [line for story in told for line in story.sentences]
    return build_documents(
        f"babilong-qa{task}",
        split,
        ([""] * len(hidden.sentences), hidden.sentences, hidden.tokens),
        ([""] * len(lines), lines, hidden.counter.as_ratio(STORY_RATIO)(lines)),
        asked,
        context_tokens,
        keep_order=True,
        seed=seed,
        dropped=dropped,
        source=f"stories {origin}; background {hidden.source}, {hidden.counter}",
        licence=" + ".join(dict.fromkeys((licence, hidden.licence))),
    )


def _ask(told: list[Story], prefix: str, first: int) -> list[Asked]:
    """Return every question with the sentences that precede it, which are numbered from ``first`` on."""
    asked: list[Asked] = []
    for story in told:
        for each in story.questions:
            question = Question(f"{prefix}-{len(asked)}", each.text, each.facts, (each.answer,))
            asked.append(Asked(question, np.arange(first, first + each.asked_after)))
        first += len(story.sentences)
    return asked


load_qa1, load_qa2, load_qa3, load_qa4, load_qa5 = (partial(load_babilong, task) for task in TASKS)
