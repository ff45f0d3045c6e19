from itertools import permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_array_equal

from retrieval_gym import mdp
from retrieval_gym.chains import beam_chain, final_ranking, greedy_chain
from retrieval_gym.datasets import Corpus, Question, RetrievalDataset
from retrieval_gym.ranking import rank
from retrieval_gym.retrieval import BM25Retriever, OracleRetriever, RandomRetriever

GRIDS = {
    "coarse": [0.5, 0.5 + 2e-7, 0.25, 0, -1],
    "negative": [-0.1, -0.2, -0.3, -3],
    "fine": np.linspace(-1, 1, 401),
}


def world(seed, pool):
    """Up to three questions over at most seven passages, copies among them, with pools of one to six or none."""
    rng = np.random.default_rng(seed)
    size = int(rng.integers(1, 8))
    corpus = Corpus([""] * size, [str(i) for i in rng.integers(0, 6, size)])
    pools = [np.sort(rng.permutation(size)[: rng.integers(1, 7)]) for _ in range(rng.integers(1, 4))]
    questions = [Question(str(i), "?", (int(ids[0]),)) for i, ids in enumerate(pools)]
    return RetrievalDataset("small", "dev", corpus, questions, pools if pool else None)


class Drawn:
    """Scores drawn for each question, order of picks and passage; some states find only a part, or nothing."""

    def __init__(self, dataset, grid, seed, gaps=0.0):
        self.size, self.grid, self.seed, self.gaps = len(dataset.corpus), grid, seed, gaps
        self.calls, self.asked = [], []

    def scores(self, question, picked):
        rng = np.random.default_rng([self.seed, question, *(p + 1 for p in picked)])
        scores = rng.choice(self.grid, self.size)
        return np.where(rng.random(self.size) < self.gaps * rng.integers(0, 3) / 2, -np.inf, scores)

    def search(self, states, k):
        self.calls.append(len(states))
        self.asked += [(int(q), tuple(p[p >= 0].tolist())) for q, p in zip(states.question, states.picked, strict=True)]
        scores = np.stack([self.scores(q, p) for q, p in self.asked[-len(states) :]])
        return rank(states, scores if states.pool is None else np.take_along_axis(scores, states.pool, axis=1), k)


def micro(score):
    """The score in whole millionths, so that sums are exact."""
    return round(float(np.float32(score)) * 1e6)


def play_by_hand(retriever, dataset, question, steps, beams):
    """The beam procedure in plain Python: every longer chain is written down, sorted and cut."""
    pool = dataset.pool(question)
    candidates = range(len(dataset.corpus)) if pool is None else pool.tolist()
    canonical = dataset.corpus.canonical.tolist()
    chains, best, searches = [(0, ())], {}, 0
    for _ in range(steps):
        longer = []
        for total, picks in chains:
            searches += 1
            scores = retriever.scores(question, picks)
            for i in candidates:
                if i not in picks and scores[i] > -np.inf:
                    longer.append((total + micro(scores[i]), (*picks, i)))
                    best[i] = max(best.get(i, -(10**12)), micro(scores[i]))
        if longer:
            chains, sets = [], []
            for total, picks in sorted(longer, key=lambda chain: (-chain[0], chain[1])):
                texts = {canonical[i] for i in picks}
                if texts not in sets and len(chains) < beams:
                    chains.append((total, picks))
                    sets.append(texts)
    picks = chains[0][1]
    return picks, [*picks, *sorted(best.keys() - set(picks), key=lambda i: (-best[i], i))], searches


@settings(max_examples=300, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    pool=st.booleans(),
    grid=st.sampled_from(sorted(GRIDS)),
    steps=st.integers(1, 5),
    beams=st.integers(1, 5),
    gaps=st.sampled_from([0.0, 0.7]),
)
def test_beams_equal_writing_down_every_chain(seed, pool, grid, steps, beams, gaps):
    dataset = world(seed, pool)
    retriever = Drawn(dataset, GRIDS[grid], seed, gaps)
    chains = beam_chain(retriever, dataset, np.arange(len(dataset)), steps, beams, depth=7, batch_size=2)
    for row, ranking in enumerate(final_ranking(chains, 7).tolist()):
        picks, expected, searches = play_by_hand(retriever, dataset, row, steps, beams)
        assert chains.picked[row].tolist() == [*picks, *[-1] * steps][:steps]
        assert ranking == [*expected, *[-1] * 7][:7]
        assert chains.searches[row] == searches
        scores = [retriever.scores(row, picks[:i])[p] for i, p in enumerate(picks)]
        assert_array_equal(chains.scores[row], np.float32([*scores, *[-np.inf] * steps][:steps]))


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 4))
def test_enough_beams_find_the_best_set_of_all(seed, steps):
    """Where a pick pays by its set alone, the order never matters, and the best chain is the best combination."""
    rng = np.random.default_rng(seed)
    dataset = RetrievalDataset("six", "dev", Corpus([""] * 6, list("abcdef")), [Question("q", "?", (0,))])
    worth, together = rng.normal(size=6).round(3), rng.normal(size=(6, 6)).round(3)
    together += together.T

    class Pairs:
        def search(self, states, k):
            bonus = [worth + together[p[p >= 0]].sum(axis=0) for p in states.picked]
            return rank(states, np.stack(bonus), k)

    def value(picks):
        return sum(worth[p] + together[list(picks[:i]), p].sum() for i, p in enumerate(picks))

    chains = beam_chain(Pairs(), dataset, np.arange(1), steps, 20)
    best = max(permutations(range(6), steps), key=value)
    assert value(tuple(chains.picked[0])) == pytest.approx(value(best), abs=1e-5)
    assert chains.scores.sum() == pytest.approx(value(best), abs=1e-5)


def large(pool):
    """Fifty questions over 40 passages, every fifth a copy, in the corpus or in pools of three to twelve."""
    rng = np.random.default_rng(0)
    words = "amber birch cedar delta ember fjord grove heath".split()
    texts = [" ".join(rng.choice(words, 4)) for _ in range(40)]
    texts[5::5] = texts[:-5:5]
    pools = [np.sort(rng.permutation(40)[: 3 + i % 10]) for i in range(50)]
    gold = [tuple(rng.permutation(ids)[:2].tolist()) for ids in pools]
    questions = [Question(str(i), " ".join(rng.choice(words, 2)), gold[i]) for i in range(50)]
    return RetrievalDataset("large", "dev", Corpus([""] * 40, texts), questions, pools if pool else None)


@pytest.mark.parametrize("pool", [True, False], ids=["pool", "corpus"])
@pytest.mark.parametrize("make", [RandomRetriever, BM25Retriever, OracleRetriever, "drawn", "gaps"])
@pytest.mark.parametrize("steps", [1, 4, 6])
def test_one_beam_is_the_greedy_chain(pool, make, steps):
    dataset = large(pool)
    if make is BM25Retriever:
        pytest.importorskip("bm25s")
    if isinstance(make, str):
        retriever = Drawn(dataset, GRIDS["coarse"], 3, gaps=0.9 * (make == "gaps"))
    else:
        retriever = make(dataset)
    beam = beam_chain(retriever, dataset, np.arange(50), steps, 1, depth=9, batch_size=17)
    greedy = greedy_chain(retriever, dataset, np.arange(50), steps, depth=9, batch_size=17)
    for name in ("questions", "picked", "scores", "step_ids", "step_scores", "searches"):
        first, second = getattr(beam, name), getattr(greedy, name)
        assert first.dtype == second.dtype
        assert_array_equal(first, second, err_msg=name)


def test_four_beams_and_four_steps_make_thirteen_searches_in_four_calls():
    dataset = large(pool=False)
    retriever = Drawn(dataset, GRIDS["fine"], 0)
    chains = beam_chain(retriever, dataset, np.arange(50), 4)
    assert_array_equal(chains.searches, 1 + 4 + 4 + 4)
    assert retriever.calls == [50, 200, 200, 200]
    assert len({(q, frozenset(p)) for q, p in retriever.asked}) == 50 * 13
    assert chains.step_ids.shape == (50, 4, 100)


def test_fewer_candidates_than_beams():
    """Three passages make three chains of one, three of two and one of all; then nothing is left."""
    corpus = Corpus([""] * 5, list("abcde"))
    dataset = RetrievalDataset("three", "dev", corpus, [Question("q", "?", (1,))], [np.array([1, 2, 4])])
    retriever = Drawn(dataset, GRIDS["fine"], 1)
    chains = beam_chain(retriever, dataset, np.arange(1), 5, 4)
    assert retriever.calls == [1, 3, 3, 1, 1] and chains.searches == [9]
    assert sorted(chains.picked[0].tolist()) == [-1, -1, 1, 2, 4] and (chains.picked[0, 3:] == -1).all()
    assert_array_equal(chains.scores[0, 3:], -np.inf)
    assert_array_equal(chains.step_ids[0, 3:], -1)


class ByHand:
    """Scores by the passages picked, as text; what is not named is not found."""

    def __init__(self, table):
        self.table = table

    def search(self, states, k):
        scores = np.full((len(states), 4), -np.inf)
        for row, picked in zip(scores, states.picked, strict=True):
            for passage, score in self.table.get("".join("abcd"[p] for p in picked[picked >= 0]), {}).items():
                row["abcd".index(passage)] = score
        return rank(states, scores, k)


FOUR = RetrievalDataset("four", "dev", Corpus([""] * 4, list("abcd")), [Question("q", "?", (0,))])


def test_a_beam_finds_what_the_greedy_chain_misses_and_ranks_by_every_search():
    table = {
        "": {"a": 0.9, "b": 0.8, "c": 0.1, "d": 0.2},
        "a": {"b": 0.1, "c": 0.2, "d": 0.1},
        "b": {"a": 0.3, "c": 0.4, "d": 0.6},
    }
    greedy = greedy_chain(ByHand(table), FOUR, np.arange(1), 2, depth=4)
    assert_array_equal(greedy.picked, [[0, 2]])  # .9 + .2
    beam = beam_chain(ByHand(table), FOUR, np.arange(1), 2, 2, depth=4)
    assert_array_equal(beam.picked, [[1, 3]])  # .8 + .6; behind it a with .9, then c with .4, its best of .1, .2 and .4
    assert_array_equal(final_ranking(beam, 4), [[1, 3, 0, 2]])
    assert_array_equal(beam.step_ids[0, 1], [3, 2, 0, 1])  # d .6 and c .4 after b, a .3 after b, b .1 after a


def test_orders_of_one_set_are_one_chain_and_the_better_one_stays():
    table = {
        "": {"a": 0.5, "b": 0.5, "c": 0.1},
        "a": {"b": 0.5, "c": 0.1},
        "b": {"a": 0.6, "c": 0.2},  # b, a scores 1.1 and a, b only 1.0: one chain, so that b, c is the second
        "ba": {"c": 0.1},
        "bc": {"d": 0.9},
    }
    retriever = ByHand(table)
    assert_array_equal(beam_chain(retriever, FOUR, np.arange(1), 2, 2).picked, [[1, 0]])
    assert_array_equal(beam_chain(retriever, FOUR, np.arange(1), 3, 2).picked, [[1, 2, 3]])


def test_equal_scores_go_to_the_lowest_ids_in_pick_order():
    flat = {key: dict.fromkeys(set("abcd") - set(key), 0.5) for key in ("", *"abcd", "ab", "ac", "ad", "bc")}
    chains = beam_chain(ByHand(flat), FOUR, np.arange(1), 3, 4)
    assert_array_equal(chains.picked, [[0, 1, 2]])
    # b, a is 3e-7 ahead of a, b, which rounding takes away.
    near = {"": {"a": 0.5, "b": 0.5 + 3e-7}, "a": {"b": 0.5}, "b": {"a": 0.5}}
    assert_array_equal(beam_chain(ByHand(near), FOUR, np.arange(1), 2, 2).picked, [[0, 1]])


def test_a_chain_that_finds_nothing_is_given_up_while_another_goes_on():
    table = {"": {"a": 0.9, "b": 0.1}, "b": {"c": 0.1}}
    assert_array_equal(beam_chain(ByHand(table), FOUR, np.arange(1), 2, 2).picked, [[1, 2]])
    assert_array_equal(beam_chain(ByHand(table), FOUR, np.arange(1), 2, 1).picked, [[0, -1]])
    chains = beam_chain(ByHand({}), FOUR, np.arange(1), 2, 2, depth=3)
    assert_array_equal(chains.picked, [[-1, -1]])
    assert_array_equal(final_ranking(chains, 3), [[-1, -1, -1]])


def test_copies_of_a_passage_are_one_chain():
    corpus = Corpus([""] * 4, ["same", "same", "other", "third"])
    dataset = RetrievalDataset("copies", "dev", corpus, [Question("q", "?", (0,))])
    retriever = ByHand({"": {"a": 0.9, "b": 0.9, "c": 0.8, "d": 0.1}, "a": {"b": 0.1, "c": 0.1}, "c": {"d": 0.9}})
    chains = beam_chain(retriever, dataset, np.arange(1), 2, 2)
    assert_array_equal(chains.picked, [[2, 3]])
    assert chains.searches == [3]


def test_the_batch_and_the_depth_change_nothing():
    dataset = large(pool=True)
    retriever = RandomRetriever(dataset, 5)
    whole = beam_chain(retriever, dataset, np.arange(50), 4, 3)
    for options in ({"batch_size": 7}, {"depth": 12}, {"depth": 4}):
        other = beam_chain(retriever, dataset, np.arange(50), 4, 3, **options)
        assert_array_equal(whole.picked, other.picked)
        assert_array_equal(whole.scores, other.scores)
        assert_array_equal(whole.searches, other.searches)
        depth = other.step_ids.shape[2]
        assert_array_equal(final_ranking(whole, depth), final_ranking(other, depth))


@pytest.mark.parametrize(("most", "batches"), [(2.5, [2] * 5), (0.5, [1] * 10)])
def test_large_pools_make_small_batches(most, batches, monkeypatch):
    dataset = large(pool=True).select(range(10))
    whole = greedy_chain(Drawn(dataset, GRIDS["fine"], 1), dataset, np.arange(10), 1)
    monkeypatch.setattr("retrieval_gym.chains.MOST_CANDIDATES", int(most * dataset.max_pool))
    retriever = Drawn(dataset, GRIDS["fine"], 1)
    assert_array_equal(greedy_chain(retriever, dataset, np.arange(10), 1).picked, whole.picked)
    assert retriever.calls == batches


def test_bad_numbers_are_refused():
    retriever = RandomRetriever(FOUR)
    with pytest.raises(ValueError, match="beams is 0: keep at least 1 chain"):
        beam_chain(retriever, FOUR, np.arange(1), 2, 0)
    with pytest.raises(ValueError, match="0 steps"):
        beam_chain(retriever, FOUR, np.arange(1), 0)
    with pytest.raises(ValueError, match="0 questions"):
        beam_chain(retriever, FOUR, np.arange(0), 2)


IDS = np.array([[0, 1]])


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (None, "search returned NoneType: Retriever.search returns a pair of arrays"),
        (IDS, "search returned ndarray"),
        ((IDS, IDS, IDS), "search returned 3 values"),
        ((IDS, np.array([[np.inf, 1]], np.float32)), "a score of inf or beyond float32"),
        ((IDS, np.array([[1e300, 1]])), "a score of inf or beyond float32"),
        ((IDS, np.array([[1, -1e300]])), "a score of inf or beyond float32"),
        ((IDS, np.array([[1j, 1]])), "scores of type complex128"),
        ((IDS, np.array([["2", "1"]])), "scores of type <U1"),
        ((IDS, np.array([[np.nan, 1]])), "scores are NaN"),
    ],
)
@pytest.mark.parametrize("play", [greedy_chain, beam_chain])
def test_an_answer_that_breaks_the_contract_is_refused(play, answer, message):
    class Broken:
        def search(self, states, k):
            return answer

    with pytest.raises(ValueError, match=message):
        play(Broken(), FOUR, np.arange(1), 2, depth=2)


def test_a_search_with_what_is_already_picked_is_refused():
    class Again:
        def search(self, states, k):
            return rank(mdp.initial_states(states.question, None, 2), np.ones((len(states), 4)), k)

    with pytest.raises(ValueError, match="already picked"):
        beam_chain(Again(), FOUR, np.arange(1), 2)
