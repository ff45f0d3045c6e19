"""Early stopping: AUC against scikit-learn, thresholds by brute force, stopped chains against ``evaluate``."""

import json
from dataclasses import replace

import numpy as np
import pytest
from conftest import make_dataset

from retrieval_gym import load_dataset, mdp, progress
from retrieval_gym.chains import Chains, greedy_chain
from retrieval_gym.cli import main
from retrieval_gym.evaluation import evaluate
from retrieval_gym.metrics import support_f1
from retrieval_gym.ranking import rank
from retrieval_gym.retrieval import make_retriever
from retrieval_gym.stopping import (
    Scored,
    Stopping,
    StoppingReport,
    choose_threshold,
    completion_auc,
    rank_auc,
    score_states,
)

STEPS = 3


class Scripted:
    """Scores by question, picks and passage, drawn once; higher for gold, and all higher while gold is missing."""

    def __init__(self, dataset, seed=0, signal=0.6):
        rng = np.random.default_rng(seed)
        shape = (len(dataset), STEPS + 2, len(dataset.corpus))
        self.scores = np.round(rng.normal(size=shape), 1)
        for question, gold in enumerate(dataset.questions):
            self.scores[question][:, list(gold.gold)] += 1.5
        self.dataset, self.signal = dataset, signal

    def search(self, states, k):
        scores = self.scores[states.question, states.count]
        if states.pool is not None:
            scores = np.take_along_axis(scores, np.maximum(states.pool, 0), axis=1)
        missing = ~mdp.is_complete(states, self.dataset)
        return rank(states, (scores + self.signal * missing[:, None]).astype(np.float32), k)


@pytest.fixture(scope="module")
def world():
    return load_dataset("synthetic", "dev", num_questions=60, pool_size=8, hops=[2])


@pytest.fixture(scope="module")
def scored(world):
    return score_states(Scripted(world), world, np.arange(0, 60, 2), STEPS, batch_size=7)


@pytest.fixture(scope="module")
def held_out(world):
    return score_states(Scripted(world), world, np.arange(1, 60, 2), STEPS, batch_size=7)


# Scores of states


@pytest.mark.parametrize("form", ["pool", "corpus"])
def test_each_state_has_the_score_of_its_best_candidate_after_the_last_pick_too(form):
    """Question 3 has a pool of two, where nothing is left after two picks."""
    dataset = make_dataset(form)
    retriever, questions = Scripted(dataset), np.array([4, 3, 0])
    scored = score_states(retriever, dataset, questions, STEPS)
    plain = greedy_chain(retriever, dataset, questions, STEPS)
    np.testing.assert_array_equal(scored.chains.picked, plain.picked)
    np.testing.assert_array_equal(scored.chains.scores, plain.scores)
    assert scored.best.shape == (3, STEPS + 1)
    states = mdp.dataset_states(dataset, questions, STEPS)
    for n in range(STEPS + 1):
        _, best = retriever.search(states, 1)
        np.testing.assert_array_equal(scored.best[:, n], best[:, 0])
        np.testing.assert_array_equal(scored.complete[:, n], mdp.is_complete(states, dataset))
        if n < STEPS:
            states = mdp.step(states, plain.picked[:, n])
    assert (scored.best[1] == -np.inf).tolist() == ([False] * 2 + [True] * 2 if form == "pool" else [False] * 4)


def test_a_chain_stops_where_evaluate_stops_it(world, scored):
    for threshold in (-3.0, 1.55, 2.05, 2.6, 9.0):
        expected = evaluate(Scripted(world), world, steps=STEPS, threshold=threshold, questions=np.arange(0, 60, 2))
        stopped = scored.stopped(threshold)
        for name, values in stopped.items():
            np.testing.assert_array_equal(values, expected.metrics[f"stopped_{name}"])
    assert len({scored.stopped(t)["picks"].mean() for t in (-3.0, 1.55, 2.05, 2.6, 9.0)}) == 5


# AUC


@pytest.mark.parametrize("levels", [2, 5, 1000])
def test_rank_auc_equals_scikit_learns(levels):
    sklearn = pytest.importorskip("sklearn.metrics")
    rng = np.random.default_rng(levels)
    label = rng.random(80) < 0.3
    score = rng.integers(levels, size=80) + label * (levels // 2)
    expected = sklearn.roc_auc_score(label, score)
    assert rank_auc(score[label], score[~label]) == pytest.approx(expected, abs=1e-12)
    assert 0.5 < expected < 1


def test_rank_auc_at_its_ends():
    assert rank_auc(np.array([2.0, 3.0]), np.array([0.0, 1.0])) == 1
    assert rank_auc(np.array([1.0]), np.array([1.0, 1.0])) == 0.5
    assert rank_auc(np.array([]), np.array([1.0])) is None and rank_auc(np.array([1.0]), np.array([])) is None


@pytest.mark.parametrize("picks", [None, 2])
def test_the_auc_of_states_and_its_interval_by_brute_force(scored, picks):
    sklearn = pytest.importorskip("sklearn.metrics")
    columns = range(STEPS + 1) if picks is None else [picks]
    states = [(i, -float(scored.best[i, n]), bool(scored.complete[i, n])) for i in range(30) for n in columns]
    question, score, label = map(np.array, zip(*states, strict=True))
    result = completion_auc(scored, picks, samples=300, seed=4)
    assert result["auc"] == pytest.approx(sklearn.roc_auc_score(label, score.round(6)), abs=1e-12)
    assert (result["states"], result["complete"]) == (len(label), label.sum())
    draws = np.random.default_rng(4).multinomial(30, np.full(30, 1 / 30), size=300)
    values = []
    for draw in draws:
        drawn = np.repeat(np.arange(len(question)), draw[question])
        if 0 < label[drawn].sum() < len(drawn):
            values.append(sklearn.roc_auc_score(label[drawn], score[drawn].round(6)))
    low, high = np.quantile(values, [0.025, 0.975])
    assert (result["low"], result["high"]) == (pytest.approx(low, abs=1e-12), pytest.approx(high, abs=1e-12))
    assert result["low"] < result["auc"] < result["high"]


def test_states_with_nothing_left_to_pick_have_no_score():
    dataset = make_dataset("pool")
    scored = score_states(Scripted(dataset), dataset, np.array([3, 0]), STEPS)
    assert completion_auc(scored)["states"] == 2 + 4
    after_three = completion_auc(scored, 3)
    assert after_three == {"auc": None, "low": None, "high": None, "states": 1, "complete": after_three["complete"]}


def test_the_oracle_knows_when_it_is_done(world):
    scored = score_states(make_retriever("oracle", world), world, np.arange(30), STEPS)
    assert completion_auc(scored)["auc"] == 1
    stopped = scored.stopped(choose_threshold(scored))
    assert stopped["support_em"].min() == 1 and stopped["picks"].max() == 2


# The threshold


def test_no_threshold_does_better_than_the_chosen_one(world, scored):
    """F1 of chains cut by hand at every threshold on a fine grid."""
    chains = scored.chains
    gold = world.gold[chains.questions]

    def f1_and_picks(threshold):
        cut = chains.picked.copy()
        for row in range(30):
            below = [n for n in range(STEPS) if chains.scores[row, n] < threshold]
            cut[row, below[0] if below else STEPS :] = -1
        return support_f1(cut, gold).mean(), (cut >= 0).sum(axis=1).mean()

    best, picks = f1_and_picks(choose_threshold(scored))
    grid = [f1_and_picks(threshold) for threshold in np.arange(-4, 6, 0.01)]
    assert best == pytest.approx(max(f1 for f1, _ in grid), abs=1e-12)
    assert picks == pytest.approx(min(p for f1, p in grid if f1 >= best - 1e-12))
    assert best > f1_and_picks(-9)[0] + 0.01


def test_of_equally_good_thresholds_the_one_with_the_fewest_picks_is_chosen():
    """Gold, wrong, wrong, gold: F1 is 2/3 after one pick and after four."""
    picked, best = np.array([[0, 3, 8, 1]]), np.array([[4, 3, 2, 1, 0]], np.float32)
    scores = best[:, :4]
    chains = Chains(np.array([0]), picked, scores, picked[..., None], scores[..., None], np.array([4]), 0.0)
    scored = Scored(make_dataset(), chains, best)
    assert scored.by_picks["support_f1"][0].tolist() == pytest.approx([0, 2 / 3, 1 / 2, 2 / 5, 2 / 3])
    assert choose_threshold(scored) == 3.5


def test_chains_without_a_pick_have_no_threshold(scored):
    chains = replace(scored.chains, scores=np.full_like(scored.chains.scores, -np.inf))
    with pytest.raises(ValueError, match="no chain has picked a passage"):
        choose_threshold(Scored(scored.dataset, chains, scored.best))


# The report


def test_the_figures_are_those_of_the_questions_that_nothing_was_chosen_on(world, scored, held_out):
    stopping = Stopping("scripted", scored, held_out)
    questions = np.arange(1, 60, 2)

    def mean(name, threshold):
        result = evaluate(Scripted(world), world, steps=STEPS, threshold=threshold, questions=questions)
        return result.mean(f"stopped_{name}")

    assert stopping.threshold == choose_threshold(scored) != choose_threshold(held_out)
    budget = evaluate(Scripted(world), world, steps=STEPS, questions=questions)
    for name, ways in stopping.measures.items():
        assert ways["stopped"]["mean"] == pytest.approx(mean(name, stopping.threshold))
        assert ways["stopped"]["low"] <= ways["stopped"]["mean"] <= ways["stopped"]["high"]
        before = STEPS if name == "picks" else budget.mean(name)
        assert ways["budget"]["mean"] == pytest.approx(before)
        assert ways["difference"]["mean"] == pytest.approx(ways["stopped"]["mean"] - before)
    f1 = [support_f1(np.where(np.arange(STEPS) < n, budget.chains.picked, -1), world.gold[questions]) for n in range(4)]
    assert stopping.measures["support_f1"]["hindsight"]["mean"] == pytest.approx(np.max(f1, axis=0).mean())
    points = stopping.curve
    assert [p["threshold"] for p in points] == sorted(p["threshold"] for p in points) and len(points) > 20
    for point in points[::7]:
        for name in ("support_f1", "picks"):
            assert point[name]["mean"] == pytest.approx(mean(name, point["threshold"]))
    assert stopping.threshold in [p["threshold"] for p in points]
    assert (points[0]["picks"]["mean"], points[-1]["picks"]["mean"]) == (STEPS, 0)


def test_a_threshold_is_never_reported_where_it_was_chosen(world, scored, held_out):
    both = score_states(Scripted(world), world, np.array([1, 2]), STEPS)
    with pytest.raises(ValueError, match="1 of the 2 questions reported.*choose it on others"):
        StoppingReport([Stopping("a", scored, both)], "one half")
    with pytest.raises(ValueError, match="a and b were not asked the same questions"):
        StoppingReport([Stopping("a", scored, held_out), Stopping("b", scored, both)], "one half")
    with pytest.raises(ValueError, match="no retriever"):
        StoppingReport([], "one half")


# The command

ENV = ["--env", "ChainRetrieval-Synthetic-v0", "--env-kwargs", "num_questions=40", "pool_size=8", "hops=[2]"]


def test_the_command_chooses_on_one_half_and_reports_on_the_other(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    out, picture = tmp_path / "stopping.json", tmp_path / "stopping.png"
    flags = ["--retriever", "bm25", "oracle", "--out", str(out), "--picture", str(picture)]
    assert main(["stopping", *ENV, *flags]) == 0
    printed = capsys.readouterr().out
    assert "chosen on: 20 other questions: a random half, with seed 0, of those asked" in printed
    assert "questions: 20 of 40" in printed and picture.read_bytes().startswith(b"\x89PNG")
    report = json.loads(out.read_text(), parse_constant=pytest.fail)
    bm25, oracle = report["systems"]
    assert oracle["auc"]["all"]["auc"] == 1 and oracle["measures"]["support_f1"]["stopped"]["mean"] == 1
    dataset = load_dataset("synthetic", "dev", num_questions=40, pool_size=8, hops=[2])
    order = np.random.default_rng(0).permutation(40)
    choosing, reported = np.sort(order[:20]), np.sort(order[20:])
    retriever = make_retriever("bm25", dataset)
    assert bm25["threshold"] == choose_threshold(score_states(retriever, dataset, choosing, 4))
    result = evaluate(retriever, dataset, steps=4, threshold=bm25["threshold"], questions=reported)
    for name in ("support_f1", "support_em", "picks"):
        assert bm25["measures"][name]["stopped"]["mean"] == pytest.approx(result.mean(f"stopped_{name}"))


def test_the_command_says_how_far_it_is(monkeypatch, capsys):
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_LINES", -1.0)
    assert main(["stopping", *ENV, "--retriever", "bm25"]) == 0
    assert "bm25, 5 searches a question: 200 of 200 searches" in capsys.readouterr().err  # 40 questions


def test_the_command_chooses_on_another_split(tmp_path, capsys):
    out = tmp_path / "stopping.json"
    flags = ["--choose-on", "train", "--limit", "30", "--out", str(out)]
    assert main(["stopping", *ENV, "--retriever", "bm25", *flags]) == 0
    assert "chosen on: 30 questions of the split train" in capsys.readouterr().out
    train = load_dataset("synthetic", "train", num_questions=40, pool_size=8, hops=[2])
    asked = np.sort(np.random.default_rng(0).choice(40, 30, replace=False))
    (bm25,) = json.loads(out.read_text())["systems"]
    assert bm25["threshold"] == choose_threshold(score_states(make_retriever("bm25", train), train, asked, 4))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--choose-on", "dev"], "--choose-on dev is the split that is reported"),
        (["--limit", "1"], "cannot be halved"),
        (["--batch-size", "0"], "--batch-size must be at least 1"),
        (["--steps", "0"], "steps must be a whole number from 1"),
        (["--picture", "curve.gif"], "cannot tell the format"),
        (["--out", "missing/stopping.json"], "there is no folder missing"),
    ],
)
def test_bad_input_is_one_line(flags, message, capsys, monkeypatch, tmp_path):
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    assert main(["stopping", *ENV, "--retriever", "bm25", *flags]) == 2
    error = capsys.readouterr().err.splitlines()
    assert message in error[-1] and error[-1].startswith("retrieval_gym stopping: ")
