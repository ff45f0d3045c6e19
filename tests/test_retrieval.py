import sys
from math import comb

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal

from retrieval_gym import mdp
from retrieval_gym.chains import Chains, final_ranking, greedy_chain, single_search, stop_by_threshold
from retrieval_gym.datasets import Corpus, Question, RetrievalDataset
from retrieval_gym.retrieval import (
    BM25Retriever,
    OracleRetriever,
    RandomRetriever,
    Retriever,
    make_retriever,
    rank,
    top_k,
)

WORDS = "amber birch cedar delta ember fjord grove heath islet jetty knoll ledge marsh north ocean plain".split()


def world(num_questions=12, num_passages=60, pool_size=10, seed=0):
    """Random passages of five words, questions of three, two gold passages each; every seventh passage is a copy."""
    rng = np.random.default_rng(seed)
    texts = [" ".join(rng.choice(WORDS, 5)) for _ in range(num_passages)]
    for i in range(7, num_passages, 7):
        texts[i] = texts[i - 7]
    questions, pools = [], []
    for i in range(num_questions):
        pool = rng.permutation(num_passages)[: pool_size - i % 3]
        gold = tuple(int(g) for g in pool[:2])
        questions.append(Question(f"q{i}", " ".join(rng.choice(WORDS, 3)), gold))
        pools.append(np.sort(pool))
    corpus = Corpus([""] * num_passages, texts)
    pooled = RetrievalDataset("hand", "dev", corpus, questions, pools)
    return pooled, RetrievalDataset("hand", "dev", corpus, questions)


POOLED, OPEN = world()
DATASETS = pytest.mark.parametrize("dataset", [POOLED, OPEN], ids=["pool", "corpus"])


def states_of(dataset, steps=4, picks=2, seed=0):
    """States in which each question has a random number of legal picks, up to ``picks``."""
    rng = np.random.default_rng(seed)
    states = mdp.dataset_states(dataset, np.arange(len(dataset)), steps)
    for _ in range(picks):
        mask = mdp.action_mask(states, len(dataset.corpus))
        actions = np.array([rng.choice(np.flatnonzero(row)) for row in mask])
        ids = np.where(rng.random(len(actions)) < 0.7, mdp.action_ids(states, actions), -1)
        states = mdp.step(states, ids)
    return states


def brute_force(scores, ids, k):
    rows = []
    for row, names in zip(scores, ids, strict=True):
        live = [(-round(float(s), 6), int(n)) for s, n in zip(row, names, strict=True) if n >= 0 and s > -np.inf]
        rows.append([name for _, name in sorted(live)][:k])
    return [row + [-1] * (k - len(row)) for row in rows]


@settings(deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 12), st.integers(1, 9), st.booleans())
def test_top_k_equals_sorting_by_rounded_score_and_id(seed, k, width, shared):
    rng = np.random.default_rng(seed)
    scores = rng.choice([0.5, 0.5 + 2e-7, 0.25, -1.0, -np.inf], (4, width))
    ids = np.stack([rng.permutation(20)[:width] for _ in range(4)])
    ids[rng.random(ids.shape) < 0.2] = -1
    if shared:
        ids[:] = np.sort(np.abs(ids[0]) + np.arange(width) * 20)
    found, values = top_k(scores, ids[0] if shared else ids, k)
    assert found.dtype == np.int64 and values.dtype == np.float32
    assert_array_equal(found, brute_force(scores, ids, k))
    assert_array_equal(values == -np.inf, found == -1)


def test_top_k_ties_go_to_the_lowest_id_after_rounding():
    scores = np.array([[0.3, 0.3000004, 0.9, 0.3]])
    assert_array_equal(top_k(scores, np.array([7, 9, 2, 5]), 3)[0], [[2, 5, 7]])
    assert_array_equal(top_k(scores, np.array([7, 9, 2, 5]), 2)[0], [[2, 5]])
    assert_array_equal(top_k(scores + np.array([[0, 1e-6, 0, 0]]), np.array([7, 9, 2, 5]), 2)[0], [[2, 9]])


def test_top_k_refuses_bad_input():
    with pytest.raises(ValueError, match="k is 0"):
        top_k(np.zeros((1, 2)), np.arange(2), 0)
    with pytest.raises(ValueError, match="1 of 2 scores are NaN"):
        top_k(np.array([[0, np.nan]]), np.arange(2), 1)
    with pytest.raises(ValueError, match="same or one row's shape"):
        top_k(np.zeros((1, 2)), np.arange(3), 1)
    with pytest.raises(ValueError, match="one score a candidate"):
        rank(states_of(POOLED), np.zeros((2, 3)), 1)


@DATASETS
@pytest.mark.parametrize("name", ["random", "bm25", "oracle"])
@pytest.mark.parametrize("k", [1, 5, 100])
def test_search_keeps_its_contract(dataset, name, k):
    retriever = make_retriever(name, dataset)
    assert isinstance(retriever, Retriever)
    states = states_of(dataset)
    ids, scores = retriever.search(states, k)
    assert ids.shape == scores.shape == (len(states), k)
    assert ids.dtype == np.int64 and scores.dtype == np.float32
    mask = mdp.action_mask(states, len(dataset.corpus))
    candidates = [np.flatnonzero(row) if states.pool is None else p[row] for row, p in _rows(mask, states)]
    for found, values, allowed in zip(ids, scores, candidates, strict=True):
        live = found[found >= 0]
        assert len(live) == min(k, len(allowed)) == len(set(live.tolist()))
        assert set(live.tolist()) <= set(allowed.tolist())
        assert (found[len(live) :] == -1).all() and (values[len(live) :] == -np.inf).all()
        assert (np.diff(values[: len(live)]) <= 1e-6).all()


def _rows(mask, states):
    return zip(mask, mask if states.pool is None else states.pool, strict=True)


@DATASETS
@pytest.mark.parametrize("name", ["random", "bm25", "oracle"])
def test_search_does_not_depend_on_the_batch(dataset, name):
    retriever = make_retriever(name, dataset, seed=3)
    states = states_of(dataset)
    ids, scores = retriever.search(states, 6)
    for i in range(len(states)):
        alone, values = retriever.search(states[[i]], 6)
        assert_array_equal(alone[0], ids[i])
        assert_array_equal(values[0], scores[i])


def test_random_seeds_and_states_give_other_orders():
    states = states_of(OPEN)
    first = RandomRetriever(OPEN, 0).search(states, 5)[0]
    assert (RandomRetriever(OPEN, 1).search(states, 5)[0] != first).any()
    assert_array_equal(RandomRetriever(OPEN, -1).search(states, 5)[0], RandomRetriever(OPEN, -1).search(states, 5)[0])
    later = RandomRetriever(OPEN, 0).search(mdp.step(states, first[:, 0]), 5)[0]
    assert (later[:, :4] != first[:, 1:]).any()


@pytest.mark.parametrize("form", [0, 1], ids=["pool", "corpus"])
def test_random_chain_finds_gold_as_often_as_the_hypergeometric_law_says(form):
    dataset = world(num_questions=3000, num_passages=12, pool_size=12, seed=5)[form]
    dataset = RetrievalDataset("hand", "dev", Corpus([""] * 12, [str(i) for i in range(12)]), dataset.questions, None)
    if form == 0:
        pools = [np.arange(12)] * 3000
        dataset = RetrievalDataset("hand", "dev", dataset.corpus, dataset.questions, pools)
    chains = greedy_chain(RandomRetriever(dataset, 7), dataset, np.arange(3000), 4)
    complete = (dataset.gold[:, :, None] == chains.picked[:, None, :]).any(axis=2).all(axis=1)
    expected = comb(10, 2) / comb(12, 4)
    assert complete.mean() == pytest.approx(expected, abs=4 * np.sqrt(expected * (1 - expected) / 3000))
    counts = np.bincount(chains.picked.ravel(), minlength=12)
    assert ((counts - 1000) ** 2 / 1000).sum() < 40  # chi-square with 11 degrees of freedom: p below 1e-4


@DATASETS
@pytest.mark.parametrize("query", ["state", "question"])
def test_bm25_scores_equal_bm25s(dataset, query):
    bm25s = pytest.importorskip("bm25s")
    texts = dataset.corpus.texts(range(len(dataset.corpus)))
    index = bm25s.BM25()
    index.index(bm25s.tokenize(texts, show_progress=False), show_progress=False)
    states = states_of(dataset, picks=2)
    ids, scores = BM25Retriever(dataset, query).search(states, 60)
    for i in range(len(states)):
        picked = states.picked[i][states.picked[i] >= 0]
        text = dataset.questions[i].text + (" " + " ".join(texts[p] for p in picked) if query == "state" else "")
        words = bm25s.tokenize([text], return_ids=False, show_progress=False)[0]
        expected = index.get_scores(words).astype(np.float64)
        allowed = set(range(60)) if states.pool is None else set(states.pool[i].tolist()) - {-1}
        found = ids[i][ids[i] >= 0]
        assert set(found.tolist()) == allowed - set(picked.tolist())
        assert_allclose(scores[i][: len(found)], expected[found], atol=2e-5)
        assert (np.diff(expected[found]) <= 2e-5).all()


def test_bm25_ranks_the_matching_passage_first_and_ties_by_id():
    corpus = Corpus(["Birch", "", "", ""], ["a tree", "fjord", "cedar birch", "fjord"])
    dataset = RetrievalDataset("hand", "dev", corpus, [Question("q", "fjord?", (1,)), Question("r", "the of", (0,))])
    ids, scores = BM25Retriever(dataset).search(mdp.initial_states(np.arange(2), None, 2), 4)
    assert_array_equal(ids, [[1, 3, 0, 2], [0, 1, 2, 3]])
    assert scores[0, 0] == scores[0, 1] > 0
    assert_array_equal(scores[1], 0)


def test_bm25_refuses_what_it_cannot_index():
    with pytest.raises(ValueError, match="unknown BM25 query 'both'"):
        BM25Retriever(OPEN, "both")
    empty = RetrievalDataset("hand", "dev", Corpus([""], ["the"]), [Question("q", "x", (0,))])
    with pytest.raises(ValueError, match="no passage holds a term"):
        BM25Retriever(empty)


def test_bm25_names_its_extra_when_the_library_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "bm25s", None)
    with pytest.raises(ImportError, match=r"retrieval-gym\[bm25\]"):
        BM25Retriever(OPEN)


@DATASETS
def test_oracle_walks_the_gold_chain(dataset):
    chains = greedy_chain(OracleRetriever(dataset), dataset, np.arange(len(dataset)), 4)
    canonical = dataset.corpus.canonical
    for i, question in enumerate(dataset.questions):
        chain = list(dict.fromkeys(canonical[list(question.gold)].tolist()))
        assert canonical[chains.picked[i]].tolist()[: len(chain)] == chain
        assert (chains.scores[i][: len(chain)] > 0).all() and (chains.scores[i][len(chain) :] == 0).all()


def test_greedy_chain_with_batches_of_any_size_is_the_same():
    for dataset in (POOLED, OPEN):
        retriever = BM25Retriever(dataset)
        whole = greedy_chain(retriever, dataset, np.arange(12), 4, depth=20)
        parts = greedy_chain(retriever, dataset, np.arange(12), 4, depth=20, batch_size=5)
        assert_array_equal(whole.picked, parts.picked)
        assert_array_equal(whole.step_ids, parts.step_ids)
        assert_array_equal(whole.picked, whole.step_ids[:, :, 0])
        assert_array_equal(whole.searches, 4)


def test_chain_goes_on_with_nothing_when_the_pool_runs_out():
    pools = [np.array([0, 3]), np.array([1, 2, 3])]
    questions = [Question("a", "x", (0,)), Question("b", "y", (1,))]
    dataset = RetrievalDataset("hand", "dev", Corpus([""] * 4, ["a", "b", "c", "d"]), questions, pools)
    chains = greedy_chain(OracleRetriever(dataset), dataset, np.arange(2), 4, depth=5)
    assert_array_equal(chains.picked, [[0, 3, -1, -1], [1, 2, 3, -1]])
    assert_array_equal(chains.scores, [[1, 0, -np.inf, -np.inf], [1, 0, 0, -np.inf]])
    assert_array_equal(final_ranking(chains, 5), [[0, 3, -1, -1, -1], [1, 2, 3, -1, -1]])
    assert_array_equal(stop_by_threshold(chains, -5), [2, 3])


def test_final_ranking_by_hand():
    nothing = -np.inf
    chains = Chains(
        questions=np.array([0]),
        picked=np.array([[9, 4]]),
        scores=np.array([[0.9, 0.2]], np.float32),
        step_ids=np.array([[[9, 5, 2, 4], [4, 7, 2, -1]]]),
        step_scores=np.array([[[0.9, 0.5, 0.3, 0.1], [0.8, 0.5, 0.4, nothing]]], np.float32),
        searches=np.array([2]),
        seconds=0.0,
    )
    # Picked 9 and 4; then 5 and 7 tie at .5 (lowest id first), and 2 counts with its best score, .4.
    assert_array_equal(final_ranking(chains, 4), [[9, 4, 5, 7]])
    with pytest.raises(ValueError, match="k is 5"):
        final_ranking(chains, 5)


@settings(deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 12))
def test_final_ranking_equals_a_dictionary_of_best_scores(seed, k):
    rng = np.random.default_rng(seed)

    class Noise:
        def search(self, states, k):
            return rank(states, rng.choice([0.1, 0.2, 0.2 + 3e-7, 0.9], states.pool.shape), k)

    chains = greedy_chain(Noise(), POOLED, np.arange(12), 3, depth=12, batch_size=12)
    for row, ranking in enumerate(final_ranking(chains, k)):
        picked = [int(p) for p in chains.picked[row]]
        best: dict[int, float] = {}
        for i, score in zip(chains.step_ids[row].ravel(), chains.step_scores[row].ravel(), strict=True):
            if i >= 0 and i not in picked:
                best[int(i)] = max(best.get(int(i), -np.inf), round(float(score), 6))
        expected = picked + sorted(best, key=lambda i: (-best[i], i))
        assert ranking.tolist() == (expected + [-1] * k)[:k]


def test_single_search_ranks_by_the_question_alone():
    retriever = BM25Retriever(OPEN)
    chains = single_search(retriever, OPEN, np.arange(12), 4, depth=10)
    ids, scores = retriever.search(mdp.initial_states(np.arange(12), None, 4), 10)
    assert_array_equal(final_ranking(chains, 10), ids)
    assert_array_equal(chains.picked, ids[:, :4])
    assert_array_equal(chains.scores, scores[:, :4])
    assert_array_equal(chains.searches, 1)


def test_stop_by_threshold_stops_at_the_first_low_score():
    scores = np.array([[0.9, 0.1, 0.8], [0.2, 0.2, 0.2], [0.1, 0.9, 0.9]], np.float32)
    ids, values = np.zeros((3, 3, 1), int), np.zeros((3, 3, 1), np.float32)
    chains = Chains(np.arange(3), np.zeros((3, 3), int), scores, ids, values, np.full(3, 3), 0.0)
    assert_array_equal(stop_by_threshold(chains, 0.15), [1, 3, 0])


class Broken:
    """Breaks the contract in one chosen way."""

    def __init__(self, fault):
        self.fault = fault

    def search(self, states, k):
        ids, scores = rank(states, np.zeros(states.pool.shape), k)
        if self.fault == "shape":
            return ids[:, :1], scores
        if self.fault == "type":
            return ids.astype(np.int32), scores
        if self.fault == "range":
            ids[0, 0] = 10**6
        if self.fault == "twice":
            ids[0, 1] = ids[0, 0]
        if self.fault == "picked" and states.count[0]:
            ids[0, 0] = states.picked[0, 0]
        if self.fault == "pool":
            ids[0, 0] = np.setdiff1d(np.arange(60), states.pool[0])[0]
        if self.fault == "nan":
            scores[0, 0] = np.nan
        return ids, scores


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("shape", "both must have shape"),
        ("type", "must be int64"),
        ("range", "the corpus has 60 passages"),
        ("twice", "twice for one state"),
        ("picked", "already picked"),
        ("pool", "outside the question's pool"),
        ("nan", "NaN"),
    ],
)
def test_a_retriever_that_breaks_its_contract_is_refused(fault, message):
    with pytest.raises(ValueError, match=message):
        greedy_chain(Broken(fault), POOLED, np.arange(12), 2, depth=5)


def test_a_retriever_that_breaks_ties_otherwise_is_put_in_order():
    class Backwards:
        def search(self, states, k):
            ids, scores = rank(states, np.zeros(states.pool.shape), states.pool.shape[1])
            return np.where(scores == 0, ids, -1)[:, ::-1][:, :k], scores[:, ::-1][:, :k]

    chains = greedy_chain(Backwards(), POOLED, np.arange(12), 2, depth=POOLED.max_pool)
    lowest = np.array([np.sort(pool)[:2] for pool in POOLED.pools])
    assert_array_equal(chains.picked, lowest)


def test_numbers_below_one_are_refused():
    for steps, size, depth in ((0, 1, 1), (1, 0, 1), (1, 1, 0)):
        with pytest.raises(ValueError, match="each must be at least 1"):
            greedy_chain(RandomRetriever(OPEN), OPEN, np.arange(3), steps, batch_size=size, depth=depth)
    with pytest.raises(ValueError, match="0 questions"):
        greedy_chain(RandomRetriever(OPEN), OPEN, np.arange(0), 1)


def test_make_retriever_imports_a_factory(tmp_path, monkeypatch):
    (tmp_path / "my_retriever.py").write_text(
        "from retrieval_gym.retrieval import RandomRetriever\n"
        "def make(dataset):\n    return RandomRetriever(dataset, 5)\n"
        "def nothing(dataset):\n    return dataset.name\n"
    )
    (tmp_path / "needs_more.py").write_text("import a_package_that_is_not_there\n")
    monkeypatch.syspath_prepend(tmp_path)
    states = states_of(OPEN)
    expected = RandomRetriever(OPEN, 5).search(states, 3)[0]
    assert_array_equal(make_retriever("my_retriever:make", OPEN).search(states, 3)[0], expected)
    for name, message in [
        ("tfidf", "unknown retriever 'tfidf'"),
        ("absent.module:make", "no module 'absent.module'"),
        ("my_retriever:other", "has no callable 'other'"),
        ("my_retriever:nothing", "which has no method search"),
    ]:
        with pytest.raises(ValueError, match=message):
            make_retriever(name, OPEN)
    with pytest.raises(ModuleNotFoundError, match="a_package_that_is_not_there"):
        make_retriever("needs_more:make", OPEN)
