"""The synthetic world: unique chains that a reader of the text can follow and one search cannot."""

import hashlib
import re
import time
from collections import Counter

import numpy as np
import pytest

from retrieval_gym.datasets import Passage, load_dataset
from retrieval_gym.datasets.synthetic import generate_world, load_synthetic
from retrieval_gym.datasets.synthetic.draws import Draws
from retrieval_gym.datasets.synthetic.names import STYLES, capacity, draw_names, stems
from retrieval_gym.datasets.synthetic.schema import NESTING, RELATIONS, SHARES, YEAR
from retrieval_gym.datasets.synthetic.world import max_entities

FINGERPRINT = "66a896272c0e1bc3d0211f8ac4a03244d866d06e5173f2eede1978cac5613462"


@pytest.fixture(scope="module")
def train():
    return load_synthetic("train", num_questions=300)


@pytest.fixture(scope="module")
def world():
    return generate_world(1_200, "train")


def names_in(text, titles):
    """Return the titles that stand in a text as whole words, by brute force."""
    return {title for title in titles if title in text and re.search(rf"\b{re.escape(title)}\b", text)}


def pattern_of(template, **slots):
    """Turn a template into a regular expression whose slots capture text."""
    parts = re.split(r"\{(\w)\}", template)
    fixed = [re.escape(part) if i % 2 == 0 else slots[part] for i, part in enumerate(parts)]
    return re.compile("".join(fixed) + "$", re.IGNORECASE)


def parse_question(text, kind_of, relations=RELATIONS):
    """Peel templates off a question: returns start, relations from the start on; tries every template."""
    readings = []
    for relation in relations:
        for ask in relation.asks:
            match = pattern_of(ask, x="(.+)").match(text)
            if match:
                readings += [(start, [*path, relation]) for start, path in parse_phrase(match[1], kind_of)]
    return [(s, p) for s, p in readings if follows(kind_of[s], p)]


def parse_phrase(phrase, kind_of):
    if phrase in kind_of:
        return [(phrase, [])]
    readings = []
    for relation in RELATIONS:
        for template in relation.phrases:
            match = pattern_of(template, x="(.+)").match(phrase)
            if match:
                readings += [(start, [*path, relation]) for start, path in parse_phrase(match[1], kind_of)]
    return readings


def follows(kind, path):
    """Say whether relations fit together from an entity of this type on."""
    for relation in path:
        if relation.subject != kind:
            return False
        kind = relation.object
    return True


def read_fact(passage, relation, names=()):
    """Read what an article's text says about a relation, from the sentences alone; None where it says nothing."""
    found = set()
    refer = "(?:" + re.escape(passage.title) + "(?:'s)?|it|its|he|his|him|she|her)"
    for sentence in re.split(r"(?<=\.) ", passage.text):
        for template in relation.says:
            match = pattern_of(template, S=refer, s=refer, P=refer, p=refer, m=refer, o="(.+)").match(sentence)
            # "in the city of Falhurst Bay" also fits "in ...", and so does "in 1880": only a whole name or year counts.
            if match and (re.fullmatch(r"\d{4}", match[1]) if relation.object == YEAR else match[1] in names):
                found.add(match[1])
    return found


def test_a_reader_of_the_text_solves_every_chain_question_and_only_one_way(train):
    by_title = {p.title: (i, p) for i, p in enumerate(train.corpus)}
    kinds = {entity.name: entity.kind for entity in generate_world(1_200, "train").entities}
    solved = 0
    for question in train.questions:
        if not question.ordered:
            continue
        readings = parse_question(question.text, kinds)
        solutions = set()
        for start, path in readings:
            at, read = start, []
            for relation in path:
                if at not in by_title:
                    break
                read.append(by_title[at][0])
                values = read_fact(by_title[at][1], relation, kinds)
                if len(values) != 1:
                    break
                at = values.pop()
            else:
                solutions.add((tuple(read), at))
        assert solutions == {(question.gold, question.answers[0])}, question.text
        solved += 1
    assert solved == sum(q.ordered for q in train.questions) > 200


def test_each_gold_title_stands_in_the_gold_passage_before_it_and_in_no_other_nor_in_the_question(train):
    titles = list(train.corpus.titles)
    for question in train.questions:
        mentioned = names_in(question.text, titles)
        gold = [train.corpus[g] for g in question.gold]
        if question.ordered:
            chains = [gold]
        else:
            half = len(gold) // 2
            chains = [gold[:half], gold[half:]]
        assert mentioned == {chain[0].title for chain in chains}, question.text
        for chain in chains:
            for previous, following in zip(chain, chain[1:], strict=False):
                naming = [p.title for p in gold if names_in(p.text, [following.title]) and p is not following]
                assert naming == [previous.title], question.text
        answer = question.answers[0]
        if question.ordered:
            assert [p.title for p in gold if names_in(p.text, [answer])][-1:] == [gold[-1].title]


def test_comparisons_answer_with_the_earlier_of_two_years(train):
    by_title = {p.title: p for p in train.corpus}
    years = [relation for relation in RELATIONS if relation.object == YEAR]
    checked = Counter()
    for question in train.questions:
        if question.ordered:
            continue
        half = len(question.gold) // 2
        ends = [train.corpus[question.gold[half - 1]], train.corpus[question.gold[-1]]]
        told = [{v for relation in years for v in read_fact(p, relation)} for p in ends]
        assert all(len(values) == 1 for values in told)
        earlier = min(zip(told, ends, strict=True), key=lambda pair: int(next(iter(pair[0]))))[1]
        assert question.answers == (earlier.title,) and question.answers[0] in by_title
        assert told[0] != told[1]
        checked[len(question.gold)] += 1
    assert checked[2] > 10 and checked[4] > 10


def test_counts_of_hops_gold_and_comparisons(train):
    assert Counter(train.hops.tolist()) == {2: 100, 3: 100, 4: 100}
    assert all(len(q.gold) == q.hops for q in train.questions)
    assert Counter((q.hops, q.ordered) for q in train.questions if not q.ordered) == {(2, False): 25, (4, False): 25}
    assert len({q.text for q in train.questions}) == 300


def test_pools_are_the_corpus_and_are_shuffled(train):
    assert {len(pool) for pool in train.pools} == {16}
    assert np.array_equal(np.unique(np.concatenate(train.pools)), np.arange(len(train.corpus)))
    places = np.concatenate(
        [np.flatnonzero(np.isin(p, q.gold)) for p, q in zip(train.pools, train.questions, strict=True)]
    )
    shares = np.bincount(places, minlength=16) / len(places)
    assert np.abs(shares - 1 / 16).max() < 4 * np.sqrt(1 / 16 / len(places))  # four standard errors


def rivalry(data, world):
    """Rivals in type of each later gold passage; look-alikes and reversed relations of each pool."""
    entity = {e.name: e for e in world.entities}
    rivals, lookalikes, reversed_ = [], [], []
    for question, pool in zip(data.questions, data.pools, strict=True):
        others = [entity[data.corpus[i].title] for i in pool if i not in question.gold]
        gold = [entity[data.corpus[i].title] for i in question.gold]
        rivals += [sum(o.kind == g.kind for o in others) for g in gold[1:]]
        lookalikes.append(sum((o.kind, o.stem) in {(g.kind, g.stem) for g in gold} for o in others))
        reversed_.append(sum(any(f.value in {g.name for g in gold} for f in o.facts) for o in others))
    return np.array(rivals), np.mean(lookalikes), np.mean(reversed_)


def test_hard_distractors_are_rivals_lookalikes_and_reversed_relations(train, world):
    hard = load_synthetic("train", num_questions=300, hard_distractors=12)
    assert [q.text for q in hard.questions] == [q.text for q in train.questions]
    rivals, lookalikes, reversed_ = rivalry(hard, world)
    assert np.mean(rivals >= 2) > 0.85 and lookalikes > 0.8 and reversed_ > 0.8
    _, few_lookalikes, few_reversed = rivalry(train, world)
    _, no_lookalikes, no_reversed = rivalry(load_synthetic("train", num_questions=300, hard_distractors=0), world)
    assert lookalikes > few_lookalikes > no_lookalikes and reversed_ > few_reversed > no_reversed


def test_word_overlap_with_the_question_finds_the_start_but_not_the_chain(train):
    """Ranks by shared words, rare ones first: a lexical search without any library."""
    first, complete = [], []
    for question, pool in zip(train.questions, train.pools, strict=True):
        words = [set(re.findall(r"\w+", text.lower())) for text in train.corpus.texts(pool)]
        asked = set(re.findall(r"\w+", question.text.lower()))
        rarity = {word: 1 / sum(word in other for other in words) for article in words for word in article}
        overlap = [-sum(rarity[word] for word in asked & article) for article in words]
        top = pool[np.argsort(overlap, kind="stable")][:4].tolist()
        if question.ordered:
            first.append(question.gold[0] in top)
            complete.append(set(question.gold) <= set(top))
    assert np.mean(first) > 0.95 and np.mean(complete) < 0.25


def test_worlds_of_different_splits_share_no_name_whatever_the_seed():
    worlds = [generate_world(3_000, split, seed) for split, seed in [("train", 0), ("dev", 1), ("test", 0)]]
    names = [{entity.name for entity in w.entities} for w in worlds]
    assert [len(n) for n in names] == [3_000] * 3
    assert not (names[0] & names[1] or names[0] & names[2] or names[1] & names[2])
    assert {e.name for e in generate_world(3_000, "train", 1).entities} != names[0]


def test_facts_are_functional_typed_and_not_mutual(world):
    for i, entity in enumerate(world.entities):
        relations = [fact.relation for fact in entity.facts]
        assert len(set(relations)) == len(relations) and 2 <= len(relations) <= 6
        for fact in entity.facts:
            assert fact.relation.subject == entity.kind
            if fact.object >= 0:
                other = world.entities[fact.object]
                assert (other.kind, other.name) == (fact.relation.object, fact.value) and fact.object != i
                if fact.relation.subject == fact.relation.object:
                    assert all(back.object != i for back in other.facts if back.relation is fact.relation)
            if i >= 300:
                continue  # reading the text is slow
            assert names_in(entity.text, [fact.value])
            assert fact.value in read_fact(Passage(entity.name, entity.text), fact.relation, [fact.value])
    spouses = [f.object for e in world.entities for f in e.facts if f.relation.name == "spouse"]
    assert len(spouses) == len(set(spouses)) > 20


def test_a_capital_lies_in_its_country(world):
    country = RELATIONS[[(r.subject, r.name) for r in RELATIONS].index(("city", "country"))]
    capital = RELATIONS[[(r.subject, r.name) for r in RELATIONS].index(("country", "capital"))]
    pairs = [(i, f.object) for i, e in enumerate(world.entities) for f in e.facts if f.relation is capital]
    located = [(world.follow(city, country), i) for i, city in pairs]
    told = [(fact.object, i) for fact, i in located if fact is not None]
    assert told and all(stated == i for stated, i in told)


def test_the_relation_table_is_consistent():
    assert set(STYLES) == set(SHARES) and sum(SHARES.values()) == 100
    keys = [(r.subject, r.name) for r in RELATIONS]
    assert len(keys) == len(set(keys))
    for relation in RELATIONS:
        assert relation.subject in SHARES and relation.object in {*SHARES, YEAR}
        assert bool(relation.compares) == (relation.object == YEAR) != bool(relation.phrases)
        assert all(template.count("{o}") == 1 for template in relation.says)
        assert all(template.count("{x}") == 1 for template in relation.phrases + relation.asks)
        assert all(phrase.endswith("{x}") for phrase in relation.phrases[:NESTING])
        assert len(set(relation.says)) == 4 and len(set(relation.asks)) == 4


@pytest.mark.parametrize("kind", sorted(STYLES))
def test_a_split_yields_every_name_of_its_capacity_once_and_no_more(kind):
    count = min(capacity(kind), 40_000)
    names = [name for name, _ in draw_names(kind, count, "dev", Draws(0))]
    assert len(set(names)) == count
    assert len(set(stems(kind))) == len(stems(kind))
    with pytest.raises(ValueError, match=rf"at most {capacity(kind)} names of type '{kind}'"):
        draw_names(kind, capacity(kind) + 1, "dev", Draws(0))


def test_draws_are_the_high_part_of_raw_64_bit_words():
    raw = np.random.PCG64(np.random.SeedSequence((5, 7))).random_raw(4096)[::-1]
    draws = Draws(5, 7)
    assert [draws.below(1000) for _ in range(50)] == [int(r) * 1000 // 2**64 for r in raw[:50]]
    counts = np.bincount([draws.below(6) for _ in range(60_000)])
    assert np.abs(counts - 10_000).max() < 500  # five standard errors
    orders = Counter(tuple(draws.shuffled("abc")) for _ in range(6_000))
    assert len(orders) == 6 and max(abs(n - 1000) for n in orders.values()) < 150
    sets = Counter(tuple(sorted(draws.sample_below(4, 2))) for _ in range(6_000))
    assert len(sets) == 6 and max(abs(n - 1000) for n in sets.values()) < 150


def test_a_seed_is_a_dataset():
    first, again, other = (load_synthetic("dev", seed=s, num_questions=20) for s in (3, 3, 4))
    assert first.questions == again.questions and first.corpus.fingerprint == again.corpus.fingerprint
    assert all(np.array_equal(a, b) for a, b in zip(first.pools, again.pools, strict=True))
    assert first.questions != other.questions and first.corpus.fingerprint != other.corpus.fingerprint


def test_the_content_of_a_small_world_is_pinned():
    data = load_synthetic("test", num_questions=30)
    digest = hashlib.sha256(data.corpus.fingerprint.encode())
    for question, pool in zip(data.questions, data.pools, strict=True):
        digest.update(repr((question, pool.tolist())).encode())
    assert digest.hexdigest() == FINGERPRINT


def test_corpus_form_has_the_size_asked_for_and_no_pools():
    data = load_dataset("synthetic", "dev", form="corpus", corpus_size=1_500, num_questions=40)
    assert len(data.corpus) == 1_500 and data.pools is None and len(data) == 40
    assert len(set(data.corpus.titles)) == 1_500
    for question in data.questions:
        assert len(names_in(question.text, data.corpus.titles)) == (1 if question.ordered else 2)


def test_default_numbers_of_questions():
    assert [len(load_synthetic(split)) for split in ("dev", "test")] == [500, 500]


def test_one_wording_uses_one_template_a_relation():
    world = generate_world(400, wording=1)
    sentences = [s for e in world.entities for s in re.split(r"(?<=\.) ", e.text)]
    founded = [s for s in sentences if "found" in s and re.search(r"\d", s)]
    assert founded and all(re.search(r" was founded in \d{4}\.$", s) for s in founded)
    assert any("It was in" in e.text for e in generate_world(400, wording=4).entities)


def test_a_hundred_thousand_passages_take_less_than_a_minute():
    start = time.process_time()
    world = generate_world(100_000, "test")
    assert time.process_time() - start < 60
    assert len({entity.name for entity in world.entities}) == 100_000


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"path": "x"}, "reads no file"),
        ({"split": "valid"}, "unknown split 'valid'"),
        ({"form": "open"}, "unknown form 'open'"),
        ({"hops": (2, 5)}, r"hops=\(2, 5\)"),
        ({"hops": ()}, r"hops=\(\)"),
        ({"pool_size": 3}, "pool_size=3 cannot hold 4"),
        ({"num_questions": 0}, "num_questions=0"),
        ({"form": "corpus", "corpus_size": 50}, "50 entities is too small"),
        ({"pool_size": 10**8}, "pool_size=100000000.*at most 91206"),
        ({"num_questions": 10**8}, "num_questions=100000000.*at most 91206"),
        ({"form": "corpus", "corpus_size": 10**8}, "corpus_size=100000000.*at most 364824"),
        ({"seed": -1}, "seed -1"),
        ({"wording": 5}, "wording=5"),
        ({"wording": 0}, "wording=0"),
        (
            {"hops": (2,), "wording": 1, "form": "corpus", "corpus_size": 200, "num_questions": 9_999},
            "hardly more than",
        ),
    ],
)
def test_bad_input_is_named(options, message):
    with pytest.raises(ValueError, match=message):
        load_synthetic(**{"num_questions": 5, **options})


def test_the_largest_world_has_as_many_names_as_it_needs():
    def fits(size):
        counts = Counter({kind: size * share // 100 for kind, share in SHARES.items()})
        counts["person"] += size - counts.total()
        return all(count <= capacity(kind) for kind, count in counts.items())

    assert [size for size in range(max_entities() - 200, max_entities() + 500) if fits(size)][-1] == max_entities()
    with pytest.raises(ValueError, match=f"at most {max_entities()}"):
        generate_world(max_entities() + 1)


@pytest.mark.parametrize("size", [4, 5, 64])
def test_pools_of_any_size_hold_the_gold(size):
    data = load_synthetic("dev", num_questions=15, pool_size=size)
    for question, pool in zip(data.questions, data.pools, strict=True):
        assert len(set(pool.tolist())) == size and set(question.gold) <= set(pool.tolist())


def test_hops_may_be_given_as_a_list_and_choose_the_chains():
    data = load_synthetic("dev", hops=[3], num_questions=12)
    assert set(data.hops.tolist()) == {3} and all(q.ordered for q in data.questions)
