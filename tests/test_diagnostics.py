"""State mismatch on hand-made chains, and against a plain-Python walk."""

import itertools
import json

import numpy as np
import pytest
from conftest import make_dataset
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal

from retrieval_gym import mdp, metrics
from retrieval_gym.chains import greedy_chain
from retrieval_gym.datasets import Corpus, Question, RetrievalDataset
from retrieval_gym.diagnostics import (
    Asked,
    Walk,
    ask,
    delete_wrong,
    deleted_success,
    next_step_success,
    reach,
    reached_states,
)
from retrieval_gym.mismatch import MismatchReport, estimate
from retrieval_gym.ranking import rank
from retrieval_gym.retrieval import OracleRetriever, RandomRetriever


def walk(questions, picks):
    """One pick a step, as long as each list is."""
    taken = np.array([len(row) for row in picks])
    picked = np.full((len(picks), taken.max(), 1), -1)
    for row, ids in zip(picked, picks, strict=True):
        row[: len(ids), 0] = ids
    return Walk(np.array(questions), picked, taken)


def picks(states):
    return [[int(i) for i in row if i >= 0] for row in states.picked]


# Question 1 needs passages 0, 1 and 2, and passage 7 reads the same as 1; question 3 needs passage 3.
BY_HAND = ([1, 3], [[8, 7, 1, 0], [3, 6]])


def test_states_by_hand(dataset):
    own = reach("hand", walk(*BY_HAND), dataset)
    states = own.visits
    assert states.states.question.tolist() == [1, 3, 1, 1, 1]  # step by step; question 3 is complete after its first
    assert picks(states.states) == [[], [], [8], [8, 7], [8, 7, 1]]
    assert states.step.tolist() == [1, 1, 2, 3, 4]
    assert states.states.steps_left.tolist() == [4, 4, 3, 2, 1]
    assert states.wrong.tolist() == [0, 0, 1, 1, 1]  # a copy of gold is not wrong
    # Passage 7 stands in for 1, so picking 1 after it finds nothing that is missing.
    assert own.success.tolist() == [False, True, True, False, True]
    if dataset.pools is not None:
        assert [set(row[row >= 0]) for row in states.states.pool[:2]] == [{0, 1, 2, 6, 7, 8, 9}, {3, 6}]


def test_deleting_wrong_passages_closes_the_gap_and_keeps_all_else(dataset):
    states = reached_states(walk([1, 2], [[8, 0, 9, 7], [3, 9, 1, 5]]), dataset).states
    last = states[states.count == 3]
    assert picks(last) == [[8, 0, 9], [3, 9, 1]]
    without = delete_wrong(last, dataset)
    assert without.picked.tolist() == [[0, -1, -1, -1], [3, -1, -1, -1]]
    assert_array_equal(without.steps_left, last.steps_left)
    assert_array_equal(without.question, last.question)
    if last.pool is not None:
        assert_array_equal(without.pool, last.pool)
    assert picks(delete_wrong(states[states.count == 0], dataset)) == [[], []]


def test_a_step_can_add_several_passages_or_none(dataset):
    several = Walk(np.array([1]), np.array([[[8, 0], [-1, -1], [6, 7], [2, -1]]]), np.array([4]))
    own = reach("several", several, dataset)
    assert picks(own.visits.states) == [[], [8, 0], [8, 0], [8, 0, 6, 7]]
    assert own.visits.wrong.tolist() == [0, 1, 1, 2]
    assert own.success.tolist() == [True, False, True, True]
    fixed, success = own.distinct()
    assert picks(fixed.states) == [[], [8, 0], [8, 0, 6, 7]] and fixed.step.tolist() == [1, 2, 4]
    assert success.tolist() == [True, False, True]


def test_equal_states_of_several_chains_are_one(dataset):
    fixed = reached_states(walk([1, 1, 2], [[8, 7], [8, 0], [9, 3]]), dataset)
    assert fixed.states.question.tolist() == [1, 2, 1, 2]
    assert picks(fixed.states) == [[], [], [8], [9]]


class Slow:
    """Plain Python: what the arrays must say, one question and one step at a time."""

    def __init__(self, dataset, retriever):
        self.dataset, self.retriever = dataset, retriever

    def texts(self, ids):
        return {str(self.dataset.corpus[int(i)]) for i in ids}

    def order(self, question, picked, steps):
        states = mdp.dataset_states(self.dataset, np.array([question]), steps)
        states.picked[0, : len(picked)] = picked
        ids, _ = self.retriever.search(states, 20)
        return [int(i) for i in ids[0] if i >= 0]

    def visits(self, question, steps):
        """Yield picks, number of wrong passages, next pick's success, and the two of the deleted state."""
        gold = self.texts(self.dataset.questions[question].gold)
        picked = []
        for _ in range(steps):
            missing = gold - self.texts(picked)
            ranked = self.order(question, picked, steps)
            if missing:
                kept = [i for i in picked if str(self.dataset.corpus[i]) in gold]
                again = self.order(question, kept, steps)
                unseen = [i for i in again if i not in picked]
                succeeds = [bool(self.texts(found[:1]) & missing) for found in (ranked, unseen, again)]
                yield (question, tuple(picked), len(picked) - len(kept), *succeeds)
            picked = picked + ranked[:1]


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 6), st.booleans(), st.sampled_from(["pool", "corpus"]))
def test_every_number_agrees_with_plain_python(seed, steps, chatty, form):
    dataset = make_dataset(form)
    retriever = RandomRetriever(dataset, seed)
    questions = np.arange(5) if chatty else np.array([4, 1])
    chains = greedy_chain(retriever, dataset, questions, steps)
    own = reach("random", chains, dataset)
    fixed = reached_states(chains, dataset)
    asked = ask("random", retriever, fixed, dataset, batch_size=3)
    kept_out, free = iter(asked.deleted[0]), iter(asked.deleted[1])
    found = {
        (q, tuple(ids), wrong, success, *((next(kept_out), next(free)) if wrong else (success, success)))
        for q, ids, wrong, success in zip(
            fixed.states.question.tolist(), picks(fixed.states), fixed.wrong, asked.success, strict=True
        )
    }
    slow = Slow(dataset, retriever)
    assert found == {visit for question in questions for visit in slow.visits(int(question), steps)}
    assert_array_equal(next_step_success(retriever, own.visits.states, dataset), own.success)


class Descending:
    """Picks the highest id that is left, but passage 0 before all where 9 is not in the state."""

    def search(self, states, k):
        scores = np.tile(np.arange(10.0), (len(states), 1))
        scores[(states.picked != 9).all(axis=1), 0] = 20
        return rank(states, scores, k)


def test_what_was_deleted_stays_out_of_the_candidates(corpus_dataset):
    states = reached_states(walk([1, 1], [[9, 0, 8, 7], [0, 9, 8, 7]]), corpus_dataset).states
    held = states[(states.picked == 9).any(axis=1)]
    assert picks(held) == [[9], [9, 0], [0, 9], [9, 0, 8], [0, 9, 8]]
    # Without 9 in the query, passage 0 comes first; where 0 is picked too, 9 comes next, and if it stays out 8, and if
    # that stays out 7, a copy of the missing 1.
    kept_out, free = deleted_success(Descending(), held, corpus_dataset)
    assert kept_out.tolist() == [True, False, False, True, True]
    assert free.tolist() == [True, False, False, False, False]
    assert next_step_success(Descending(), held, corpus_dataset).tolist() == [False, False, False, True, True]


def test_more_picks_than_a_search_is_deep():
    corpus = Corpus([""] * 160, [str(i) for i in range(160)])
    dataset = RetrievalDataset("long", "dev", corpus, [Question("q", "?", (120,))])

    class Ascending:
        def search(self, states, k):
            return rank(states, np.broadcast_to(-np.arange(160.0), (len(states), 160)), k)

    fixed = reached_states(greedy_chain(Ascending(), dataset, np.array([0]), 130), dataset)
    asked = ask("up", Ascending(), fixed, dataset)
    assert_array_equal(asked.success, fixed.wrong == 120)
    assert_array_equal(asked.deleted[0], fixed.wrong[1:] == 120)


@pytest.mark.parametrize("values", [[0, 1, 1, 0, 1, 1, 0], [1, -1, 0, 0, 2, 1, 3]])
def test_intervals_agree_with_every_possible_resample(values):
    questions = np.array([5, 5, 5, 7, 7, 9, 2])
    cell = estimate(np.array(values), questions)
    groups = [np.array(values)[questions == q] for q in np.unique(questions)]
    means = [np.concatenate(drawn).mean() for drawn in itertools.product(groups, repeat=4)]
    assert (cell.states, cell.questions, cell.mean) == (7, 4, pytest.approx(np.mean(values)))
    # Between neighbours of the exact quantile, since 256 equally likely resamples have gaps.
    ordered = np.sort(means)
    for got, share in ((cell.low, 0.025), (cell.high, 0.975)):
        place = share * len(ordered)
        assert ordered[int(place) - 3] - 1e-12 <= got <= ordered[min(int(place) + 3, 255)] + 1e-12


def test_one_state_a_question_is_the_usual_bootstrap():
    values = np.random.default_rng(0).integers(0, 2, 200)
    cell = estimate(values, np.arange(200))
    assert_allclose([cell.mean, cell.low, cell.high], metrics.bootstrap_interval(values), atol=1e-12)


def test_states_of_one_question_widen_the_interval():
    values = np.repeat(np.random.default_rng(0).integers(0, 2, 100), 4)
    together, apart = estimate(values, np.repeat(np.arange(100), 4)), estimate(values, np.arange(400))
    assert together.high - together.low == pytest.approx(2 * (apart.high - apart.low), rel=0.1)  # sqrt(4)


def test_no_state_has_no_mean():
    cell = estimate(np.array([]), np.array([], np.int64))
    assert (cell.mean, cell.low, cell.high, cell.states, cell.questions) == (None, None, None, 0, 0)
    assert cell.text() == "-"


def report(dataset):
    """Two chains by hand, with what two retrievers and the log itself do in their states."""
    own = reach("log:hand", walk(*BY_HAND), dataset)
    fixed, success = own.distinct()
    asked = (
        Asked("log:hand", success, None),
        ask("oracle", OracleRetriever(dataset), fixed, dataset),
        ask("random", RandomRetriever(dataset), fixed, dataset),
    )
    return MismatchReport(dataset, (own,), "log:hand", fixed, asked)


def test_figures_by_hand(dataset):
    result = report(dataset)
    own = result.own_cells["log:hand"]
    assert list(own["holds_wrong"]) == ["2", "3", "4"]
    for measure in ("holds_wrong", "wrong_passages"):
        for step in "234":
            assert own[measure][step]["all"].mean == own[measure][step]["3"].mean == 1
            assert own[measure][step]["1"].states == 0
    success = {key: (cells["all"].mean, cells["all"].states) for key, cells in own["success"].items()}
    assert success == {"all": (3 / 5, 5), "0": (1 / 2, 2), "1": (pytest.approx(2 / 3), 3), "2+": (None, 0)}
    assert own["success"]["0"]["3"].mean == 0 and own["success"]["0"]["1"].mean == 1

    assert result.base.name == "oracle"  # the first that can be asked
    same = result.same_cells
    assert same["log:hand"].keys() == {"success", "difference"} and "difference" not in same["oracle"]
    assert same["oracle"]["success"]["all"]["all"].mean == 1
    assert same["log:hand"]["difference"]["all"]["all"].mean == pytest.approx(-2 / 5)
    deletion = {key: cells["all"].mean for key, cells in same["oracle"]["deletion"].items()}
    assert deletion == {"before": 1, "after": 1, "gain": 0, "after_free": 1}
    other = {key: cells["all"].mean for key, cells in same["random"]["deletion"].items()}
    assert other["gain"] == pytest.approx(other["after"] - other["before"])
    assert other["gain_difference"] == pytest.approx(other["gain"])


def test_json_is_strict_and_the_table_holds_every_figure(dataset):
    result = report(dataset)
    content = json.loads(json.dumps(result.to_json(), allow_nan=False))
    (own,) = content["own_chains"]
    assert (own["name"], own["chains"], own["states"]) == ("log:hand", 2, 5)
    assert own["success"]["2+"]["all"] == {"mean": None, "low": None, "high": None, "states": 0, "questions": 0}
    assert content["same_states"]["reached_by"] == "log:hand" and content["same_states"]["compared_with"] == "oracle"
    assert [system["name"] for system in content["same_states"]["systems"]] == ["log:hand", "oracle", "random"]
    text = result.table()
    for value in content["protocol"].values():
        if isinstance(value, str):
            assert value in text
    for cells in [*result.own_cells.values(), *result.same_cells.values()]:
        for measure, groups in cells.items():
            for key, by_hops in groups.items():
                sign = "+" if measure == "difference" or key.startswith("gain") else ""
                assert all(cell.text(sign) in text for cell in by_hops.values())
    assert "no deletion for log:hand" in text and "minus oracle's" in text


def test_hops_are_told_apart_only_where_they_differ(dataset):
    own = reach("hand", walk([1, 2], [[8, 0], [3, 9]]), dataset)
    fixed, success = own.distinct()
    result = MismatchReport(dataset, (own,), "hand", fixed, (Asked("hand", success, None),))
    assert list(result.own_cells["hand"]["success"]["0"]) == ["all"]
    assert result.own_cells["hand"]["holds_wrong"]["2"]["all"].mean == 0.5


def test_bad_input_is_named(dataset):
    states = mdp.dataset_states(dataset, np.array([0]), 2)
    with pytest.raises(ValueError, match="batch_size is 0"):
        next_step_success(RandomRetriever(dataset), states, dataset, 0)

    class Repeating:
        def search(self, states, k):
            return np.zeros((len(states), k), np.int64), np.zeros((len(states), k), np.float32)

    with pytest.raises(ValueError, match="a passage twice"):
        next_step_success(Repeating(), states, dataset)
