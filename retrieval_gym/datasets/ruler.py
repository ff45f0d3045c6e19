"""RULER's retrieval tasks as chains: needles in a haystack, and questions over many documents.

Tasks, templates and their settings are those of RULER (Hsieh et al. 2024, https://arxiv.org/abs/2404.06654); texts,
words and code are our own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from retrieval_gym.datasets.background import Background, TokenCounter, check_count, cut_long, load_background
from retrieval_gym.datasets.background_pools import Asked, DocumentDataset, build_documents
from retrieval_gym.datasets.base import Passage, Question
from retrieval_gym.datasets.hotpotqa import load_hotpotqa
from retrieval_gym.datasets.ruler_needles import KINDS, NOISE, ask, draw_distinct, draw_key, draw_value, needle
from retrieval_gym.datasets.sources import SPLITS
from retrieval_gym.datasets.squad import find_squad, read_squad
from retrieval_gym.datasets.synthetic.draws import Draws

Ids = NDArray[np.int64]

NUM_QUESTIONS = {"train": 2_000, "dev": 500, "test": 500}
NUM_NEEDLES = {"single": 1, "multikey": 4, "multivalue": 4, "multiquery": 4}
MAX_CONTEXT = 100_000_000
NUM_DISTRACTORS = 20_000  # needles in the haystack that consists of needles

# Wordpieces of bert-base-uncased in a hundred words and punctuation marks, measured as background.BOOK_RATIO was; of
# needles by what their keys and values are.
NEEDLE_RATIO = {
    "words": {"words": 102, "numbers": 123, "uuids": 192},
    "numbers": {"words": 123, "numbers": 150, "uuids": 215},
    "uuids": {"words": 183, "numbers": 206, "uuids": 236},
}
WIKIPEDIA_RATIO = 110


def load_niah(
    task: str,
    split: str = "train",
    path: str | Path | None = None,
    context_tokens: int = 4_000,
    haystack: str = "generated",
    keys: str = "words",
    values: str = "numbers",
    num_needles: int | None = None,
    chunk_tokens: int = 64,
    seed: int = 0,
    num_questions: int | None = None,
    tokenizer: str | None = None,
) -> DocumentDataset:
    """Load a needle-in-a-haystack task: sentences of the form "One of the special magic numbers for KEY is: VALUE.".

    The haystack is cut into chunks of whole sentences, which are the passages. Each needle stands in a chunk of its
    own, at a random place among sentences of the same haystack, as many as fit. A question's document holds its needle
    chunks among consecutive chunks of the haystack from a random place on (``background_pools.MixedPools``): an
    environment mixes it anew for each episode, the scorer reads the one that ``seed`` makes. Gold passages are the
    chunks with the needles that are asked for, in no order.

    Tokens are estimated as in ``load_babilong``, in needles as ``NEEDLE_RATIO``.

    Args:
        task: ``"single"``: one needle; ``"multikey"``: one needle among others with other keys; ``"multivalue"``:
            several values of one key, all asked for; ``"multiquery"``: several keys, all asked for.
        split: ``"train"``, ``"dev"`` or ``"test"``; splits share no key, and no text as in ``load_background``.
        path: None; there is nothing to read. ``haystack`` may be a path.
        context_tokens: tokens of a document; it falls short by less than a chunk.
        haystack: ``"generated"``, ``"books"`` or a path (see ``background.load_background``; RULER takes essays);
            ``"noise"``: RULER's five sentences over and over; ``"needles"``: needles with other keys.
        keys: ``"words"``, ``"numbers"`` or ``"uuids"``.
        values: the same.
        num_needles: needles in a document, 1 for single, else 4 by default.
        chunk_tokens: tokens of a chunk at most.
        seed: of what is generated, and of the scorer's documents.
        num_questions: by default 2,000 in train and 500 in dev and test.
        tokenizer: a ``tokenizer.json``, or a folder with one, that counts tokens exactly.

    Raises:
        ValueError: when an argument is unknown or out of range, or the context or the chunks are too small.
        FileNotFoundError: when the texts are nowhere.
    """
    if path is not None:
        raise ValueError(f"path={str(path)!r}: needles are generated; give the haystack's texts as haystack=PATH")
    _check_common(split, context_tokens, seed, num_questions)
    for name, kind in (("keys", keys), ("values", values)):
        if kind not in KINDS:
            raise ValueError(f"{name}={kind!r}: choose one of {', '.join(KINDS)}")
    check_count("chunk_tokens", chunk_tokens, 1, 100_000)
    most = 1 if task == "single" else 1_000
    count = check_count("num_needles", NUM_NEEDLES[task] if num_needles is None else num_needles, 1, most)
    counter = TokenCounter(NEEDLE_RATIO[keys][values], tokenizer)
    hidden = _haystack(haystack, split, seed, chunk_tokens, keys, values, counter)
    draws = Draws(seed, SPLITS.index(split), 11 + list(NUM_NEEDLES).index(task))
    questions, sentences = [], []
    for i in range(num_questions or NUM_QUESTIONS[split]):
        question, told = _draw_question(f"{task}-{split}-{i}", task, split, keys, values, count, draws)
        questions.append(question)
        sentences += told
    background, others = _chunks(hidden, chunk_tokens), _hide(sentences, hidden, chunk_tokens, counter, draws)
    first = len(background[1])
    return build_documents(
        f"niah-{task}",
        split,
        background,
        others,
        [Asked(each, np.arange(first + i * count, first + (i + 1) * count)) for i, each in enumerate(questions)],
        context_tokens,
        keep_order=False,
        seed=seed,
        dropped={},
        source=f"{count} needles, {keys} to {values}; haystack {hidden.source}, chunks of {chunk_tokens} tokens, "
        f"{hidden.counter}",
        licence=hidden.licence,
    )


def load_ruler_qa1(
    split: str = "train",
    path: str | Path | None = None,
    context_tokens: int = 4_000,
    seed: int = 0,
    num_questions: int | None = None,
    tokenizer: str | None = None,
) -> DocumentDataset:
    """Load RULER's single-hop questions: SQuAD's, over documents of many paragraphs.

    Passages are the distinct paragraphs of the file. A document holds the question's own paragraph, which is gold,
    others of the same article, as many as fit, in random order, and paragraphs of other articles as far as there is
    room. Questions without an answer are left out.

    Args:
        split: ``"train"`` or ``"dev"``.
        path: any file in SQuAD's format, which serves every split, or a folder that holds the official files; by
            default ``squad`` in ``$RETRIEVAL_GYM_DATA``, then in the cache.
        context_tokens: tokens of a document, ``WIKIPEDIA_RATIO / 100`` a word or mark; it falls short by less than a
            passage.
        seed: of the choice and order of the passages.
        num_questions: the first so many; by default all.
        tokenizer: a ``tokenizer.json``, or a folder with one, that counts tokens exactly.

    Raises:
        ValueError: when an argument is out of range, the file is malformed or no question fits.
        FileNotFoundError: when the file is nowhere; the message names every place searched.
    """
    _check_common(split, context_tokens, seed, num_questions)
    file = find_squad(split, path)
    passages, articles, questions, unanswered = read_squad(file)
    counter = TokenCounter(WIKIPEDIA_RATIO, tokenizer)
    tokens = counter(map(str, passages))
    draws = Draws(seed, SPLITS.index(split), 16)
    asked = []
    for question in questions[:num_questions]:
        gold = question.gold[0]
        own, room = [gold], context_tokens - int(tokens[gold])
        for other in draws.shuffled([i for i in articles[gold] if i != gold]):
            if tokens[other] <= room:
                own.append(other)
                room -= int(tokens[other])
        asked.append(Asked(replace(question, gold=(0,)), np.array(own, np.int64)))
    dropped = {"without an answer": unanswered} if unanswered else {}
    return _over_documents(
        "ruler-qa1", split, passages, tokens, asked, context_tokens, seed, dropped, f"{file}, {counter}", "CC BY-SA 4.0"
    )


def load_ruler_qa2(
    split: str = "train",
    path: str | Path | None = None,
    context_tokens: int = 4_000,
    seed: int = 0,
    num_questions: int | None = None,
    tokenizer: str | None = None,
) -> DocumentDataset:
    """Load RULER's multi-hop questions: HotpotQA's, over documents of many paragraphs.

    A document holds the question's ten paragraphs, two of them gold in no order, and the paragraphs of other questions
    as far as there is room, all in random order.

    Args:
        split: as in ``load_hotpotqa``, which reads the questions.
        path: as there.
        context_tokens: as in ``load_ruler_qa1``, as for the other arguments.
        seed: as there.
        num_questions: as there.
        tokenizer: as there.

    Raises:
        ValueError: when an argument is out of range, the file is malformed or no question fits.
        FileNotFoundError: when the file is nowhere.
    """
    _check_common(split, context_tokens, seed, num_questions)
    source = load_hotpotqa(split, path)
    assert source.pools is not None
    passages = list(source.corpus)
    counter = TokenCounter(WIKIPEDIA_RATIO, tokenizer)
    asked = []
    for question, pool in zip(source.questions[:num_questions], source.pools, strict=False):
        own = pool.tolist()
        asked.append(Asked(replace(question, gold=tuple(own.index(g) for g in question.gold)), pool))
    return _over_documents(
        "ruler-qa2",
        split,
        passages,
        counter(map(str, passages)),
        asked,
        context_tokens,
        seed,
        source.dropped,
        f"{source.source}, {counter}",
        source.licence,
    )


def _check_common(split: str, context_tokens: int, seed: int, num_questions: int | None) -> None:
    if split not in SPLITS:
        raise ValueError(f"unknown split {split!r}: choose one of {', '.join(SPLITS)}")
    check_count("context_tokens", context_tokens, 1, MAX_CONTEXT)
    check_count("seed", seed, 0, 2**63)
    if num_questions is not None:
        check_count("num_questions", num_questions, 1, 1_000_000)


def _draw_question(
    name: str, task: str, split: str, keys: str, values: str, count: int, draws: Draws
) -> tuple[Question, list[str]]:
    """Return a question, its gold counted among its needles, and the needles."""
    num_keys = 1 if task == "multivalue" else count
    drawn = draw_distinct(partial(draw_key, keys, split, draws), num_keys)
    told = draw_distinct(partial(draw_value, values, draws), count)
    gold = (0,) if task == "multikey" else tuple(range(count))
    question = Question(
        name,
        ask(drawn[: 1 if task == "multikey" else None], values, plural=len(gold) > 1),
        gold,
        tuple(told[i] for i in gold),
        ordered=len(gold) == 1,
    )
    return question, [needle(drawn[i % num_keys], value, values) for i, value in enumerate(told)]


def _haystack(
    haystack: str, split: str, seed: int, chunk_tokens: int, keys: str, values: str, counter: TokenCounter
) -> Background:
    if haystack == "noise":
        exact = counter.as_ratio(100)
        return Background(NOISE, exact(NOISE), "noise", "MIT", exact)
    if haystack == "needles":
        draws = Draws(seed, SPLITS.index(split), 17)
        sentences = [
            needle(draw_key(keys, "haystack", draws), draw_value(values, draws), values) for _ in range(NUM_DISTRACTORS)
        ]
        parts, tokens = cut_long(sentences, counter, chunk_tokens)
        return Background(tuple(parts), tokens, f"of {NUM_DISTRACTORS:,} needles (seed {seed})", "MIT", counter)
    return load_background(haystack, split, seed, chunk_tokens, counter.tokenizer)


@lru_cache(maxsize=4)
def _chunks(hidden: Background, chunk_tokens: int) -> tuple[list[str], list[str], Ids]:
    """Cut a haystack into chunks of whole sentences, as many as fit each; return titles, texts and tokens.

    Fewer sentences than make three chunks, as noise has, go round until a chunk begins where one began before.
    """
    size = len(hidden.sentences)
    around = int(hidden.tokens.sum()) < 3 * chunk_tokens
    repeats = 1 + chunk_tokens // int(hidden.tokens.sum()) if around else 1
    ends = np.concatenate([[0], np.cumsum(np.tile(hidden.tokens, repeats + 1))])
    texts, tokens, begun, start = [], [], set(), 0
    while start < size and start not in begun:
        begun.add(start)
        end = int(np.searchsorted(ends, ends[start] + chunk_tokens, "right")) - 1
        end = max(start + 1, end if around else min(end, size))
        texts.append(" ".join(hidden.sentences[i % size] for i in range(start, end)))
        tokens.append(int(ends[end] - ends[start]))
        start = end % size if around else end
    return [""] * len(texts), texts, np.array(tokens, np.int64)


def _hide(
    sentences: Sequence[str], hidden: Background, chunk_tokens: int, counter: TokenCounter, draws: Draws
) -> tuple[list[str], list[str], Ids]:
    """Return one chunk a needle as titles, texts and tokens: the needle among sentences of the haystack."""
    sizes = counter(sentences)
    if (sizes > chunk_tokens).any():
        raise ValueError(
            f"chunk_tokens={chunk_tokens}: a needle has up to {sizes.max()} tokens; give at least {sizes.max()}"
        )
    shortest = int(hidden.tokens.min())
    texts, tokens = [], []
    for sentence, own in zip(sentences, sizes.tolist(), strict=True):
        around: list[str] = []
        place = draws.below(len(hidden.sentences))
        while own + shortest <= chunk_tokens:
            size = int(hidden.tokens[place])
            if own + size > chunk_tokens and around:
                break
            if own + size <= chunk_tokens:
                around.append(hidden.sentences[place])
                own += size
            place = (place + 1) % len(hidden.sentences)
        around.insert(draws.below(len(around) + 1), sentence)
        texts.append(" ".join(around))
        tokens.append(own)
    return [""] * len(texts), texts, np.array(tokens, np.int64)


def _over_documents(
    name: str,
    split: str,
    passages: Sequence[Passage],
    tokens: Ids,
    asked: list[Asked],
    context_tokens: int,
    seed: int,
    dropped: Mapping[str, int],
    source: str,
    licence: str,
) -> DocumentDataset:
    """Build documents out of whole passages; in a random circle, consecutive passages are a random choice."""
    order = np.array(Draws(seed, SPLITS.index(split), 18).shuffled(range(len(passages))), np.int64)
    place = np.empty(len(order), np.int64)
    place[order] = np.arange(len(order))
    titles, texts = [passages[i].title for i in order], [passages[i].text for i in order]
    return build_documents(
        name,
        split,
        (titles, texts, tokens[order]),
        ([], [], np.zeros(0, np.int64)),
        [replace(each, own=place[each.own]) for each in asked],
        context_tokens,
        keep_order=False,
        seed=seed,
        dropped=dropped,
        source=source,
        licence=licence,
    )


load_niah_single, load_niah_multikey, load_niah_multivalue, load_niah_multiquery = (
    partial(load_niah, task) for task in NUM_NEEDLES
)
