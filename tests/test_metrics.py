import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal

from retrieval_gym import metrics

K = 6


@st.composite
def rankings_and_gold(draw):
    """A few rows of distinct ids below 12 (padded) with 1 to 4 gold ids, as lists."""
    rows = draw(st.integers(1, 5))
    ids = st.integers(0, 11)
    rankings = [draw(st.lists(ids, max_size=K, unique=True)) for _ in range(rows)]
    gold = [draw(st.lists(ids, min_size=1, max_size=4, unique=True)) for _ in range(rows)]
    return rankings, gold


def padded(rows, width):
    return np.array([row + [-1] * (width - len(row)) for row in rows], np.int64).reshape(len(rows), width)


@given(rankings_and_gold(), st.integers(1, K))
def test_ranking_metrics_equal_a_set_oracle(case, k):
    rankings, gold = case
    a, b = padded(rankings, K), padded(gold, 4)
    tops = [set(row[:k]) for row in rankings]
    assert_array_equal(metrics.complete_at_k(a, b, k), [set(g) <= top for top, g in zip(tops, gold, strict=True)])
    assert_array_equal(metrics.any_at_k(a, b, k), [bool(set(g) & top) for top, g in zip(tops, gold, strict=True)])
    expected = [len(set(g) & top) / len(g) for top, g in zip(tops, gold, strict=True)]
    assert_allclose(metrics.recall_at_k(a, b, k), expected, rtol=0, atol=1e-15)


@given(rankings_and_gold(), st.lists(st.integers(0, 11), min_size=12, max_size=12))
def test_support_metrics_equal_a_set_oracle_with_text_identical_copies(case, parents):
    rows, gold = case
    canonical = np.minimum(parents, np.arange(12))
    canonical = canonical[canonical]
    while not np.array_equal(canonical[canonical], canonical):
        canonical = canonical[canonical]
    gold = [list(dict.fromkeys(canonical[g].tolist())) for g in gold]
    a, b = metrics.canonical_ids(padded(rows, K), canonical), padded(gold, 4)
    pairs = [({int(canonical[p]) for p in row}, set(g)) for row, g in zip(rows, gold, strict=True)]
    precision = np.array([len(p & g) / len(p) if p else 0.0 for p, g in pairs])
    recall = np.array([len(p & g) / len(g) for p, g in pairs])
    total = np.where(precision + recall > 0, precision + recall, 1)
    assert_allclose(metrics.support_precision(a, b), precision, rtol=0, atol=1e-15)
    assert_allclose(metrics.support_recall(a, b), recall, rtol=0, atol=1e-15)
    assert_allclose(metrics.support_f1(a, b), 2 * precision * recall / total, rtol=0, atol=1e-15)
    assert_array_equal(metrics.support_em(a, b), [p == g for p, g in pairs])
    assert_array_equal(metrics.all_gold_picked(a, b), [g <= p for p, g in pairs])


def test_metrics_by_hand():
    gold = np.array([[3, 7], [5, -1]])
    picked = np.array([[3, 1, 7, 2], [5, -1, -1, -1]])
    assert_array_equal(metrics.complete_at_k(picked, gold, 2), [0, 1])
    assert_array_equal(metrics.complete_at_k(picked, gold, 3), [1, 1])
    assert_array_equal(metrics.recall_at_k(picked, gold, 1), [0.5, 1])
    assert_allclose(metrics.support_f1(picked, gold), [2 / 3, 1])
    assert_array_equal(metrics.support_em(picked, gold), [0, 1])
    assert_array_equal(metrics.all_gold_picked(picked, gold), [1, 1])


def test_a_picked_copy_of_gold_costs_no_precision():
    canonical = np.array([0, 1, 0, 3])
    picked = metrics.canonical_ids(np.array([[2, 0, -1]]), canonical)
    assert_array_equal(picked, [[0, 0, -1]])
    assert metrics.support_precision(picked, np.array([[0]])) == 1
    assert metrics.support_em(picked, np.array([[0]])) == 1


def test_nothing_picked_scores_zero():
    nothing, gold = np.full((1, 3), -1), np.array([[2, 4]])
    for metric in (metrics.support_precision, metrics.support_recall, metrics.support_f1, metrics.support_em):
        assert metric(nothing, gold) == 0


def test_bad_input_is_refused():
    ranking, gold = np.array([[1, 2]]), np.array([[1]])
    with pytest.raises(ValueError, match="k is 3"):
        metrics.recall_at_k(ranking, gold, 3)
    with pytest.raises(ValueError, match="row 1 has no gold"):
        metrics.complete_at_k(np.array([[1], [1]]), np.array([[1], [-1]]), 1)
    for values in ([], [0.5, np.nan]):
        with pytest.raises(ValueError, match="finite number"):
            metrics.bootstrap_interval(np.array(values))
    with pytest.raises(ValueError, match="confidence is 95"):
        metrics.bootstrap_interval(np.ones(3), confidence=95)
    with pytest.raises(ValueError, match="samples is 0"):
        metrics.bootstrap_interval(np.ones(3), samples=0)
    with pytest.raises(ValueError, match="before and"):
        metrics.paired_bootstrap(np.ones(3), np.ones(4))


@pytest.mark.parametrize(("successes", "count"), [(120, 400), (900, 1000), (50, 100)])
def test_bootstrap_of_a_proportion_equals_the_normal_approximation(successes, count):
    values = np.repeat([1.0, 0.0], [successes, count - successes])
    p = successes / count
    half = 1.959964 * np.sqrt(p * (1 - p) / count)
    mean, low, high = metrics.bootstrap_interval(values)
    assert mean == pytest.approx(p)
    assert_allclose([low, high], [p - half, p + half], atol=1.5 / count)


@pytest.mark.parametrize("kind", ["few values", "many values"])
def test_bootstrap_equals_scipy(kind):
    stats = pytest.importorskip("scipy.stats")
    rng = np.random.default_rng(1)
    values = rng.choice([0, 0.25, 0.5, 1], 300) if kind == "few values" else rng.gamma(2, size=300)
    theirs = stats.bootstrap((values,), np.mean, n_resamples=10_000, method="percentile", rng=2).confidence_interval
    _, low, high = metrics.bootstrap_interval(values)
    assert_allclose([low, high], [theirs.low, theirs.high], atol=0.06 * (theirs.high - theirs.low))


def test_bootstrap_repeats_with_its_seed_and_covers_more_with_more_confidence():
    values = np.random.default_rng(0).random(50)
    assert metrics.bootstrap_interval(values) == metrics.bootstrap_interval(values)
    assert metrics.bootstrap_interval(values) != metrics.bootstrap_interval(values, seed=1)
    _, low, high = metrics.bootstrap_interval(values, confidence=0.5)
    _, lower, higher = metrics.bootstrap_interval(values, confidence=0.99)
    assert lower < low < high < higher


def test_paired_bootstrap_p_equals_the_normal_approximation():
    rng = np.random.default_rng(3)
    before = rng.random(400)
    after = before + rng.normal(0.02, 0.2, 400)
    difference = after - before
    z = difference.mean() / (difference.std() / 20)
    mean, low, high, p = metrics.paired_bootstrap(before, after)
    stats = pytest.importorskip("scipy.stats")
    assert mean == pytest.approx(difference.mean())
    assert low < mean < high
    assert p == pytest.approx(2 * stats.norm.sf(abs(z)), abs=0.02)


def test_paired_bootstrap_of_equal_and_of_far_systems():
    values = np.random.default_rng(0).random(30)
    assert metrics.paired_bootstrap(values, values) == (0, 0, 0, 1)
    assert metrics.paired_bootstrap(values, values + 1)[3] == pytest.approx(2 / 10_001)
    assert metrics.paired_bootstrap(np.zeros(30), np.r_[np.ones(9), np.zeros(21)])[1] > 0


@settings(max_examples=20)
@given(st.lists(st.floats(-5, 5), min_size=1, max_size=40))
def test_interval_stays_within_the_values(values):
    _, low, high = metrics.bootstrap_interval(np.array(values), samples=200)
    assert min(values) - 1e-9 <= low <= high <= max(values) + 1e-9
