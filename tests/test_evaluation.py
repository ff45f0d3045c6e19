import json
import os
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal

from retrieval_gym import progress
from retrieval_gym.datasets import Corpus, Question, RetrievalDataset
from retrieval_gym.evaluation import evaluate, sample_questions, table
from retrieval_gym.files import write_text
from retrieval_gym.retrieval import OracleRetriever, RandomRetriever, rank


class Fixed:
    """Ranks passages in one fixed order, whatever the question; the first of ``order`` is best."""

    def __init__(self, order, size):
        self.scores = np.zeros(size)
        self.scores[order] = np.linspace(1, 0.1, len(order))

    def search(self, states, k):
        if states.pool is None:
            return rank(states, np.broadcast_to(self.scores, (len(states), len(self.scores))), k)
        return rank(states, self.scores[states.pool], k)


def hand_made():
    """Ten passages, of which 9 is a copy of 0; a question of one, two and three hops."""
    corpus = Corpus([""] * 10, [*map(str, range(9)), "0"])
    questions = [Question("a", "?", (0,)), Question("b", "?", (1, 2)), Question("c", "?", (3, 4, 5), hops=3)]
    return RetrievalDataset("hand", "dev", corpus, questions, dropped={"no gold": 2}, source="by hand")


def test_every_metric_by_hand():
    result = evaluate(Fixed([9, 1, 3, 2, 4, 5], 10), hand_made(), steps=2, ks=(5, 2, 5), threshold=0.9)
    assert result.ks == (2, 5)
    # Each chain picks 9, then 1; the ranking goes on with 3, 2, 4. The second pick scores 0.82, so stopping keeps one.
    assert_array_equal(result.chains.picked, [[9, 1]] * 3)
    assert_array_equal(result.ranking, [[9, 1, 3, 2, 4]] * 3)
    expected = {
        "complete@2": [1, 0, 0],
        "recall@2": [1, 1 / 2, 0],
        "any@2": [1, 1, 0],
        "complete@5": [1, 1, 0],
        "recall@5": [1, 1, 2 / 3],
        "any@5": [1, 1, 1],
        "support_precision": [1 / 2, 1 / 2, 0],
        "support_recall": [1, 1 / 2, 0],
        "support_f1": [2 / 3, 1 / 2, 0],
        "support_em": [0, 0, 0],
        "all_gold_picked": [1, 0, 0],
        "episodic_return": [1, 0, 0],
        "stopped_support_precision": [1, 0, 0],
        "stopped_support_recall": [1, 0, 0],
        "stopped_support_f1": [1, 0, 0],
        "stopped_support_em": [1, 0, 0],
        "stopped_all_gold_picked": [1, 0, 0],
        "stopped_picks": [1, 1, 1],
    }
    assert result.metrics.keys() == expected.keys()
    for name, values in expected.items():
        assert_allclose(result.metrics[name], values, atol=1e-15, err_msg=name)
    assert result.mean("recall@2") == pytest.approx(0.5)


@pytest.mark.parametrize(("search", "done"), [("greedy", [2, 4, 5, 6]), ("single", [2, 3]), ("beam", [2, 6, 7, 9])])
def test_progress_counts_searches_on_stderr_and_changes_nothing(search, done, monkeypatch, capsys):
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_LINES", -1.0)
    asked = {"steps": 2, "search": search, "beams": 2, "batch_size": 2, "name": "r"}
    shown = evaluate(RandomRetriever(hand_made()), hand_made(), **asked, progress="asking")
    told = capsys.readouterr().err.splitlines()
    assert told == [f"asking: {count} of {done[-1]} searches" for count in done]
    silent = evaluate(RandomRetriever(hand_made()), hand_made(), **asked)
    assert not capsys.readouterr().err and silent.retriever == shown.retriever
    assert_array_equal(shown.ranking, silent.ranking)
    assert shown.to_json()["metrics"] == silent.to_json()["metrics"]


def test_groups_split_by_hops_and_add_up():
    result = evaluate(RandomRetriever(hand_made()), hand_made(), steps=2)
    cells = result.summary()["recall@5"]
    assert list(cells) == ["all", "1", "2", "3"]
    assert [cell["questions"] for cell in cells.values()] == [3, 1, 1, 1]
    assert cells["all"]["mean"] == pytest.approx(np.mean([cells[h]["mean"] for h in "123"]))
    assert all(cell["low"] <= cell["mean"] <= cell["high"] for cell in cells.values())


def test_evaluation_never_stops_on_gold():
    result = evaluate(OracleRetriever(hand_made()), hand_made(), steps=4)
    assert (result.chains.picked >= 0).all()
    assert result.mean("all_gold_picked") == result.mean("episodic_return") == result.mean("complete@5") == 1
    assert result.mean("support_em") == 0  # four picks are more than any question's gold


def test_oracle_with_its_threshold_is_exact_and_reaches_every_ceiling():
    result = evaluate(OracleRetriever(hand_made()), hand_made(), steps=3, threshold=0.5)
    assert result.mean("stopped_support_em") == 1
    assert_array_equal(result.metrics["stopped_picks"], [1, 2, 3])
    assert_array_equal(result.metrics["support_em"], result.ceilings["support_em"] * [0, 0, 1])


def small_dataset(seed):
    """One question over up to five passages with copies among them, as a pool or the corpus."""
    rng = np.random.default_rng(seed)
    size = int(rng.integers(2, 6))
    corpus = Corpus([""] * size, [str(i) for i in rng.integers(0, 4, size)])
    gold = tuple(int(g) for g in rng.permutation(size)[: rng.integers(1, size + 1)])
    pools = [np.arange(size)] if rng.random() < 0.5 else None
    return RetrievalDataset("small", "dev", corpus, [Question("q", "?", gold)], pools)


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 5))
def test_ceilings_of_picked_sets_are_the_best_of_all_choices(seed, steps):
    dataset = small_dataset(seed)
    size = len(dataset.corpus)
    result = evaluate(RandomRetriever(dataset, 0), dataset, steps=steps, ks=(1, 2), threshold=0)
    canonical, gold = dataset.corpus.canonical, {int(g) for g in dataset.gold[0] if g >= 0}
    chosen = [{int(canonical[i]) for i in picks} for picks in combinations(range(size), min(steps, size))]
    precision = [len(c & gold) / len(c) for c in chosen]
    recall = [len(c & gold) / len(gold) for c in chosen]
    f1 = [2 * len(c & gold) / (len(c) + len(gold)) for c in chosen]
    best = {
        "support_precision": max(precision),
        "support_recall": max(recall),
        "support_f1": max(f1),
        "support_em": max(c == gold for c in chosen),
        "all_gold_picked": max(gold <= c for c in chosen),
        "episodic_return": max(gold <= c for c in chosen),
        "complete@1": len(gold) <= 1,
        "recall@2": min(2, len(gold)) / len(gold),
        "stopped_support_em": len(gold) <= steps,
    }
    for name, value in best.items():
        assert result.ceilings[name][0] == pytest.approx(float(value)), name
    for name, ceiling in result.ceilings.items():
        assert result.metrics[name][0] <= ceiling[0] + 1e-12, name


def test_random_recall_is_the_share_of_the_pool_that_is_ranked():
    rng = np.random.default_rng(0)
    corpus = Corpus([""] * 20, [str(i) for i in range(20)])
    questions = [Question(str(i), "?", tuple(int(g) for g in rng.permutation(20)[:2])) for i in range(2000)]
    dataset = RetrievalDataset("hand", "dev", corpus, questions, [np.arange(20)] * 2000)
    retriever = RandomRetriever(dataset, 1)
    for search in ("greedy", "single"):
        result = evaluate(retriever, dataset, steps=4, ks=(5, 10), search=search)
        for k in (5, 10):
            cell = result.summary()[f"recall@{k}"]["all"]
            assert cell["mean"] == pytest.approx(k / 20, abs=0.03)
            assert cell["low"] < k / 20 + 0.01 and cell["high"] > k / 20 - 0.01
        assert result.summary()["complete@10"]["all"]["mean"] == pytest.approx(10 * 9 / (20 * 19), abs=0.04)
        assert result.summary()["complete@10"]["all"]["questions"] == 2000


class Counting(RandomRetriever):
    """Counts each state as one that was encoded, from a number that is not 0."""

    encoder_calls = 100

    def search(self, states, k):
        self.encoder_calls += len(states)
        return super().search(states, k)


def test_each_search_has_its_cost():
    dataset = hand_made()
    retriever = Counting(dataset)
    searches = {"greedy": 4, "single": 1, "beam": 1 + 4 + 4 + 4}
    for search, count in searches.items():
        result = evaluate(retriever, dataset, steps=4, search=search)
        assert result.chains.picked.shape == (3, 4)
        assert result.cost["searches_per_question"] == result.cost["encoder_calls_per_question"] == count
        assert result.cost["milliseconds_per_question"] > 0 and result.cost["batch_size"] == 256
    cost = evaluate(retriever, dataset, steps=3, search="beam", beams=2).cost
    assert cost["searches_per_question"] == cost["encoder_calls_per_question"] == 1 + 2 + 2
    assert "encoder_calls_per_question" not in evaluate(RandomRetriever(dataset), dataset, steps=3).cost


def test_a_beam_is_scored_by_its_best_chain_and_every_search():
    """The first pick pays .9 or .8, the second .1 or .6: two beams find the gold that the greedy chain misses."""

    class Late:
        def search(self, states, k):
            scores = np.tile(np.linspace(0.02, 0.01, 10), (len(states), 1))
            scores[:, [1, 2]] = np.where(states.count[:, None] == 0, [[0.8, 0.1]], [[0.1, 0.05]])
            scores[states.count == 0, 0] = 0.9
            scores[(states.picked == 1).any(axis=1), 2] = 0.6
            return rank(states, scores, k)

    for search, ranking, recall in (("greedy", [0, 1, 2], 0.5), ("beam", [1, 2, 0], 1)):
        result = evaluate(Late(), hand_made(), steps=2, ks=(2, 3), search=search, beams=2, questions=[1])
        assert_array_equal(result.chains.picked, [ranking[:2]])
        assert_array_equal(result.ranking, [ranking])
        assert result.mean("support_recall") == result.mean("recall@2") == recall


def test_searches_stand_in_one_table_under_one_protocol():
    dataset = hand_made()
    results = [
        evaluate(retriever, dataset, steps=2, search=search, beams=3)
        for retriever in (Counting(dataset), OracleRetriever(dataset))
        for search in ("greedy", "single", "beam")
    ]
    first, *others = [result.protocol for result in results]
    for protocol in others:
        assert {key for key in first if protocol[key] != first[key]} <= {"search"}
    lines = table(results).splitlines()
    assert [line.split(":")[1].strip() for line in lines if line.startswith("search:")] == ["greedy", "single", "beam"]
    assert any(line.startswith("search: beam: each step searches with the 3 best chains") for line in lines)
    start = next(i for i, line in enumerate(lines) if line.startswith("cost a question"))
    assert lines[start].split("  ")[0] == "cost a question" and len(lines) == start + 1 + len(results)
    names = ["Counting", "Counting (single)", "Counting (beam 3)"]
    for line, name, searches in zip(lines[start + 1 :], names, ("2", "1", "4"), strict=False):
        cells = line.removeprefix(name).split()
        assert line.startswith(name) and (cells[0], cells[1], cells[3]) == (searches, searches, "256")
    assert lines[-1].startswith("OracleRetriever (beam 3)") and len(lines[-1].split()) == 6  # it encodes nothing
    assert [result.retriever for result in results[:3]] == names
    assert [next(result.records())["search"] for result in results[:3]] == ["greedy", "single", "beam"]


def test_the_protocol_states_every_assumption():
    result = evaluate(RandomRetriever(hand_made()), hand_made(), steps=2, threshold=0.25, limit=2, seed=4)
    protocol = result.protocol
    assert protocol["questions"] == "2 of 3, a random sample with seed 4"
    assert protocol["candidates"] == "10 passages, the whole corpus"
    assert protocol["dropped"] == {"no gold": 2} and protocol["source"] == "by hand" and protocol["steps"] == 2
    assert protocol["early_stopping"] == "before the first pick scored below 0.25"
    assert protocol["copies"].startswith("1 passages")
    text = table(result)
    for key, value in protocol.items():
        assert key.replace("_", " ") in text
        if isinstance(value, str):
            assert value in text


def test_table_holds_each_retriever_and_the_ceiling_where_there_is_one():
    dataset = hand_made()
    results = [
        evaluate(RandomRetriever(dataset), dataset, steps=2, name="chance"),
        evaluate(OracleRetriever(dataset), dataset, steps=2, name="oracle"),
    ]
    text = table(results)
    header = next(line for line in text.splitlines() if line.startswith("metric"))
    assert header.split() == ["metric", "hops", "questions", "chance", "oracle", "ceiling"]
    row = next(line for line in text.splitlines() if line.startswith("all_gold_picked"))
    assert row.endswith("0.667") and "0.667 [0.000, 1.000]" in row
    assert "note: 10 places hold every candidate" in text
    assert "ceiling" not in table(evaluate(OracleRetriever(dataset), dataset, steps=3, ks=(3,), questions=[2]))
    with pytest.raises(ValueError, match="not scored alike"):
        table([results[0], evaluate(OracleRetriever(dataset), dataset, steps=3)])
    with pytest.raises(ValueError, match="no evaluation"):
        table([])


def test_json_is_strict_and_whole(tmp_path):
    result = evaluate(RandomRetriever(hand_made()), hand_made(), steps=12, threshold=0)
    path = tmp_path / "eval.json"
    path.write_text("old")
    result.save(path)

    def refuse(token):
        raise AssertionError(f"{token} is not JSON")

    read = json.loads(path.read_text(), parse_constant=refuse)
    assert read == result.to_json()
    assert read["metrics"]["recall@5"]["all"]["mean"] == result.mean("recall@5")
    assert os.listdir(tmp_path) == ["eval.json"]


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "eval.json"
    path.write_text("old")

    def fail(source, target):
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        write_text(path, "new")
    assert path.read_text() == "old" and os.listdir(tmp_path) == ["eval.json"]
    with pytest.raises(FileNotFoundError, match="make it first"):
        write_text(tmp_path / "absent" / "eval.json", "new")


def test_a_write_follows_a_link_and_leaves_other_files_alone(tmp_path):
    target, link, other = tmp_path / "target.json", tmp_path / "eval.json", tmp_path / "target.json.tmp"
    target.write_text("old")
    other.write_text("mine")
    link.symlink_to(target.name)
    write_text(link, "new")
    assert link.is_symlink() and target.read_text() == "new" and other.read_text() == "mine"
    assert sorted(os.listdir(tmp_path)) == ["eval.json", "target.json", "target.json.tmp"]


def test_records_show_each_chain():
    records = list(evaluate(Fixed([9, 1, 3], 10), hand_made(), steps=2, ks=(3,), threshold=0.9).records())
    first, second, _ = records
    assert first["picked"] == ["9", "1"] and first["picked_is_gold"] == [True, False]
    assert first["gold"] == first["found"] == ["0"]
    assert first["scores"] == pytest.approx([1, 0.55]) and first["kept"] == 1 and first["ranking"] == ["9", "1", "3"]
    assert (second["id"], second["found"], second["hops"]) == ("b", ["1"], 2)
    json.dumps(records, allow_nan=False)


def test_an_unknown_metric_is_refused():
    with pytest.raises(ValueError, match="unknown metric 'f1'"):
        evaluate(RandomRetriever(hand_made()), hand_made(), steps=2).mean("f1")


def test_samples_are_seeded_distinct_and_part_of_the_whole():
    dataset = RetrievalDataset("hand", "dev", Corpus([""], ["x"]), [Question(str(i), "?", (0,)) for i in range(50)])
    sample = sample_questions(dataset, 10, 1)
    assert_array_equal(sample, sample_questions(dataset, 10, 1))
    assert (sample != sample_questions(dataset, 10, 2)).any()
    assert len(set(sample.tolist())) == 10 and sample.min() >= 0 and sample.max() < 50
    for limit in (None, 50, 99):
        assert_array_equal(sample_questions(dataset, limit), np.arange(50))


def test_bad_arguments_are_refused():
    dataset = hand_made()
    retriever = RandomRetriever(dataset)
    for message, arguments in [
        ("ks is", {"ks": ()}),
        ("ks is", {"ks": (0, 2)}),
        ("limit is 0", {"limit": 0}),
        ("choose one", {"limit": 1, "questions": [0]}),
        ("there are 3", {"questions": [3]}),
        ("0 questions", {"questions": []}),
        ("each must be at least 1", {"batch_size": 0}),
        ("unknown search 'wide': choose one of greedy, single, beam", {"search": "wide"}),
        ("beams is 0", {"search": "beam", "beams": 0}),
    ]:
        with pytest.raises(ValueError, match=message):
            evaluate(retriever, dataset, steps=2, **arguments)


def test_bm25_beats_chance_and_stays_below_the_oracle_on_real_questions(real_data):
    pytest.importorskip("bm25s")
    from retrieval_gym.registration import environment_dataset
    from retrieval_gym.retrieval import BM25Retriever

    dataset, steps = environment_dataset("ChainRetrieval-MuSiQue-v0", "dev")
    chance, bm25, oracle = (
        evaluate(retriever, dataset, steps=steps).summary()["recall@5"]["all"]
        for retriever in (RandomRetriever(dataset), BM25Retriever(dataset), OracleRetriever(dataset))
    )
    assert chance["high"] < bm25["low"] and bm25["high"] < oracle["mean"] == 1
