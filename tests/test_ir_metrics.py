import json
import math
import re
import subprocess
import sys

import numpy as np
import pytest
from conftest import make_dataset

from retrieval_gym import metrics
from retrieval_gym.chains import final_ranking
from retrieval_gym.cli import main
from retrieval_gym.datasets import Corpus, Question, RetrievalDataset
from retrieval_gym.evaluation import evaluate, table
from retrieval_gym.ir_metrics import ideal_ranking, measured_depth, parse_measures, score_measures, write_run
from retrieval_gym.retrieval import make_retriever

ir_measures = pytest.importorskip("ir_measures")

NAMES = ["nDCG@10", "nDCG@3", "R@5", "RR@10", "AP@20", "P@5", "Success@1", "R(rel=2)@5", "AP(rel=3)@20"]


def graded(seed=0, questions=40, passages=30):
    """Questions with one to five relevant passages of grade 1 to 3; no copies."""
    rng = np.random.default_rng(seed)
    asked = []
    for i in range(questions):
        gold = rng.choice(passages, rng.integers(1, 6), replace=False).tolist()
        grades = tuple(rng.integers(1, 4, len(gold)).tolist())
        asked.append(Question(f"q{i}", f"{i}?", tuple(gold), hops=1, ordered=False, grades=grades))
    texts = [f"text {i}" for i in range(passages)]
    return RetrievalDataset("graded", "dev", Corpus([""] * passages, texts, [f"d{i}" for i in range(passages)]), asked)


def rankings(dataset, seed=1, depth=20):
    """Random rankings of which some end early and one is empty."""
    rng = np.random.default_rng(seed)
    ranking = np.stack([rng.permutation(len(dataset.corpus))[:depth] for _ in dataset.questions])
    ends = rng.integers(1, depth + 1, len(ranking))
    ends[3] = 0
    return np.where(np.arange(depth) < ends[:, None], ranking, -1).astype(np.int64)


def dictionaries(dataset, ranking):
    keys = dataset.corpus.keys
    qrels = {q.id: {keys[g]: n for g, n in zip(q.gold, q.grades, strict=True)} for q in dataset.questions}
    run = {
        q.id: {keys[p]: 1 / (i + 1) for i, p in enumerate(row) if p >= 0}
        for q, row in zip(dataset.questions, ranking, strict=True)
    }
    return qrels, run


def test_ndcg_with_grades_by_hand():
    question = Question("q", "?", (4, 2, 0), hops=1, ordered=False, grades=(1, 3, 2))
    dataset = RetrievalDataset("one", "dev", Corpus([""] * 6, list("abcdef")), [question])
    scores = score_measures(["nDCG@3", "AP@3", "RR@3"], np.array([[0, 5, 2]]), dataset, np.array([0]))
    gain, ideal = 2 / math.log2(2) + 3 / math.log2(4), 3 / math.log2(2) + 2 / math.log2(3) + 1 / math.log2(4)
    assert scores["nDCG@3"][0] == pytest.approx(gain / ideal)
    assert scores["AP@3"][0] == pytest.approx((1 + 2 / 3) / 3) and scores["RR@3"][0] == 1
    assert all(values.dtype == np.float64 and values.shape == (1,) for values in scores.values())


def test_providers_called_directly_agree():
    dataset = graded()
    ranking, questions = rankings(dataset), np.arange(40)
    scores = score_measures(NAMES, ranking, dataset, questions)
    assert list(scores) == NAMES
    qrels, run = dictionaries(dataset, ranking)
    compared = set()
    for provider in (ir_measures.pytrec_eval, ir_measures.msmarco):
        for name in NAMES:
            measure = ir_measures.parse_measure(name)
            if not provider.supports(measure):
                continue
            compared.add(name)
            direct = dict.fromkeys(qrels, 0.0)
            for metric in provider.iter_calc([measure], qrels, run):
                direct[metric.query_id] = metric.value
            np.testing.assert_allclose(scores[name], list(direct.values()), atol=1e-9, err_msg=name)
    assert compared == set(NAMES)
    assert all(scores[name][3] == 0 for name in NAMES)  # the empty ranking
    assert all(0 < scores[name].mean() < 1 for name in NAMES)


def test_a_part_of_the_questions_in_any_order():
    dataset = graded()
    ranking = rankings(dataset)
    rows = np.array([7, 2, 7, 30])
    every, part = (
        score_measures(NAMES, ranking, dataset, np.arange(40)),
        score_measures(NAMES, ranking[rows], dataset, rows),
    )
    for name in NAMES:
        np.testing.assert_array_equal(part[name], every[name][rows])


def test_copies_count_once(corpus_dataset):
    # Passages 1 and 7 read the same. Question 0 has gold 0 and 1.
    ranking = np.array([[7, 1, 0, 4], [1, 7, 0, 4], [7, 0, 4, 5], [4, 1, 7, 5]])
    rows = np.zeros(4, np.int64)
    scores = score_measures(["R@2", "R@4", "P@4", "RR@4", "nDCG@4"], ranking, corpus_dataset, rows)
    assert scores["R@2"].tolist() == [0.5, 0.5, 1, 0.5] and scores["R@4"].tolist() == [1, 1, 1, 0.5]
    assert scores["P@4"].tolist() == [0.5, 0.5, 0.5, 0.25] and scores["RR@4"].tolist() == [1, 1, 1, 0.5]
    ideal = 1 + 1 / math.log2(3)
    assert scores["nDCG@4"] == pytest.approx([1.5 / ideal, 1.5 / ideal, 1, 1 / math.log2(3) / ideal])


@pytest.mark.parametrize("k", [1, 3, 5])
def test_recall_equals_our_own(dataset, k):
    rng = np.random.default_rng(k)
    ranking = np.stack([rng.permutation(10)[:6] for _ in range(5)])
    rows = np.arange(5)
    ours = metrics.recall_at_k(metrics.canonical_ids(ranking, dataset.corpus.canonical), dataset.gold, k)
    np.testing.assert_allclose(score_measures([f"R@{k}"], ranking, dataset, rows)[f"R@{k}"], ours)


def test_the_ideal_ranking_cannot_be_beaten():
    dataset = graded(seed=5, questions=30)
    rows = np.arange(30)
    best = score_measures(NAMES, ideal_ranking(dataset, rows, 20), dataset, rows)
    assert (best["nDCG@10"] > 1 - 1e-9).all() and (best["RR@10"] == 1).all()
    np.testing.assert_allclose(best["P@5"], (dataset.gold >= 0).sum(axis=1) / 5)
    for seed in range(5):
        scores = score_measures(NAMES, rankings(dataset, seed), dataset, rows)
        assert all((scores[name] <= best[name] + 1e-9).all() for name in NAMES)
    assert ideal_ranking(dataset, rows[:2], 1).shape == (2, 1)


def test_names():
    assert measured_depth([]) == 0 and measured_depth(["R@5", "AP(rel=2)@100"]) == 100
    assert str(parse_measures(["MRR@10"])["MRR@10"]) == "RR@10"  # the library's own aliases
    for name, message in (
        ("foo@3", "unknown measure 'foo@3'"),
        ("recall@5", "unknown measure 'recall@5'"),
        ("nDCG@x", "unknown measure 'nDCG@x'"),
        ("", "unknown measure ''"),
        ("nDCG(bogus=1)@10", "is not supported"),
        ("nDCG", "'nDCG' needs a rank from 1"),
        ("R@0", "'R@0' needs a rank from 1"),
        ("AP(rel=0)@5", "needs a rank from 1, and rel from 1"),
        ("Judged@10", "'Judged@10' is not supported"),
        ("Bpref", "'Bpref' is not supported"),
        ("P(judged_only=True)@5", "is not supported"),
        ("nDCG(dcg='exp-log2')@10", "is not supported"),
    ):
        with pytest.raises(ValueError, match=re.escape(message)) as error:
            parse_measures(["R@5", name])
        assert "such as nDCG@10" in str(error.value)


def test_rankings_that_do_not_fit(corpus_dataset):
    ranking = np.zeros((2, 3), np.int64)
    with pytest.raises(ValueError, match="'R@4' looks deeper than the ranking, which has 3 places"):
        score_measures(["R@4"], ranking, corpus_dataset, np.arange(2))
    with pytest.raises(ValueError, match="3 questions and a ranking of shape"):
        score_measures(["R@3"], ranking, corpus_dataset, np.arange(3))


def test_the_extra_is_named_and_nothing_else_needs_it(monkeypatch, corpus_dataset):
    monkeypatch.setitem(sys.modules, "ir_measures", None)
    with pytest.raises(ImportError, match=r"retrieval-gym\[ir\]"):
        parse_measures(["R@5"])
    evaluate(make_retriever("oracle", corpus_dataset), corpus_dataset, steps=1)


def test_evaluate_adds_measures(dataset):
    retriever = make_retriever("random", dataset, seed=3)
    result = evaluate(retriever, dataset, steps=2, ks=(2,), measures=("nDCG@5", "R@2", "nDCG@5", "P@4"))
    assert result.measures == ("nDCG@5", "R@2", "P@4") and result.ranking.shape == (5, 5)
    np.testing.assert_allclose(result.metrics["R@2"], result.metrics["recall@2"])
    direct = score_measures(["nDCG@5"], result.ranking, dataset, np.arange(5))
    np.testing.assert_array_equal(result.metrics["nDCG@5"], direct["nDCG@5"])
    np.testing.assert_allclose(result.ceilings["P@4"], (dataset.gold >= 0).sum(axis=1) / 4)
    cells = result.to_json()["metrics"]["nDCG@5"]
    assert set(cells) == {"all", "1", "2", "3", "4"} and cells["all"]["ceiling"] == pytest.approx(1)
    assert cells["all"]["low"] <= cells["all"]["mean"] <= cells["all"]["high"]
    text = table(result)
    assert "nDCG@5" in text and "measures: nDCG@5, R@2, P@4 by ir_measures" in text
    json.dumps(result.to_json(), allow_nan=False)
    plain = evaluate(make_retriever("random", dataset, seed=3), dataset, steps=2, ks=(2,))
    assert plain.ranking.shape == (5, 2) and "measures" not in table(plain)
    assert plain.metrics.keys() == result.metrics.keys() - set(result.measures)
    with pytest.raises(ValueError, match="were not scored alike"):
        table([plain, result])
    with pytest.raises(ValueError, match="unknown measure 'x'"):
        evaluate(retriever, dataset, steps=2, measures=("x",))


def test_depth_follows_the_measures():
    dataset = graded(passages=200)
    result = evaluate(make_retriever("oracle", dataset), dataset, steps=1, depth=10, measures=("R@150",))
    assert result.ranking.shape == (40, 150) and result.chains.step_ids.shape[2] == 150
    assert result.mean("R@150") == 1


def test_a_run_file_gives_the_same_figures(tmp_path):
    dataset = graded()
    ranking, rows = rankings(dataset), np.arange(40)
    write_run(tmp_path / "run.trec", ranking, dataset, rows, "our run")
    qrels, run = dictionaries(dataset, ranking)
    read = list(ir_measures.read_trec_run(str(tmp_path / "run.trec")))
    assert [(d.query_id, d.doc_id) for d in read] == [(q, d) for q, found in run.items() for d in found]
    first = (tmp_path / "run.trec").read_text().splitlines()[0].split()
    assert first == ["q0", "Q0", f"d{ranking[0, 0]}", "1", "20", "our_run"]
    lines = [f"{q} 0 {d} {n}\n" for q, judged in qrels.items() for d, n in judged.items()]
    (tmp_path / "qrels").write_text("".join(lines))
    command = [
        sys.executable,
        "-m",
        "ir_measures",
        "--places",
        "9",
        str(tmp_path / "qrels"),
        str(tmp_path / "run.trec"),
    ]
    done = subprocess.run([*command, *NAMES], capture_output=True, text=True, check=True)
    printed = dict(line.split("\t") for line in done.stdout.splitlines())
    scores = score_measures(NAMES, ranking, dataset, rows)
    for name in NAMES:
        assert float(printed[name]) == pytest.approx(scores[name].mean(), abs=1e-8)


def test_scores_fall_strictly_so_that_ties_cannot_reorder(tmp_path, corpus_dataset):
    ranking = np.array([[9, 0, 5, -1], [-1, -1, -1, -1]])
    write_run(tmp_path / "run", ranking, corpus_dataset, np.array([2, 0]), "x")
    assert (tmp_path / "run").read_text() == "q2 Q0 9 1 4 x\nq2 Q0 0 2 3 x\nq2 Q0 5 3 2 x\n"


def test_ids_that_do_not_fit_into_a_run(tmp_path):
    def dataset(*ids, key="a"):
        return RetrievalDataset("x", "dev", Corpus([""], ["text"], [key]), [Question(i, "?", (0,)) for i in ids])

    ranking = np.zeros((2, 1), np.int64)
    for data, message in (
        (dataset("q", "q"), "two questions have the id 'q'"),
        (dataset("q", "q 1"), "question id 'q 1' does not fit"),
        (dataset("q", ""), "question id '' does not fit"),
        (dataset("q", "r", key="a\tb"), r"passage id 'a\tb' does not fit"),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            write_run(tmp_path / "run", ranking, data, np.arange(2), "x")
        assert not (tmp_path / "run").exists()


def write_beir(folder):
    (folder / "qrels").mkdir(parents=True)
    (folder / "corpus.jsonl").write_text(
        "".join(json.dumps({"_id": f"d{i}", "title": "", "text": f"word{i} word{i + 1}"}) + "\n" for i in range(130))
    )
    queries = [{"_id": f"q{i}", "text": f"word{7 * i}"} for i in range(6)]
    (folder / "queries.jsonl").write_text("".join(json.dumps(query) + "\n" for query in queries))
    judged = [(f"q{i}", f"d{7 * i + j}", 1 + (i + j) % 3) for i in range(6) for j in (0, 2)]
    lines = ["query-id\tcorpus-id\tscore", *("\t".join(map(str, judgment)) for judgment in judged)]
    (folder / "qrels" / "dev.tsv").write_text("\n".join(lines) + "\n")
    (folder / "trec").write_text("".join(f"{q} 0 {d} {n}\n" for q, d, n in judged))
    return folder


def test_the_command_writes_what_ir_measures_reads(tmp_path, capsys):
    folder = write_beir(tmp_path / "words")
    call = ["evaluate", "--env", "ChainRetrieval-BEIR-v0", "--env-kwargs", f"path={folder}", "--retriever", "random"]
    run, out = tmp_path / "out.trec", tmp_path / "out.json"
    names = ["nDCG@10", "R@100", "RR@10", "AP@120"]
    assert main([*call, "--measures", *names, "--run-file", str(run), "--out", str(out)]) == 0
    assert "nDCG@10" in capsys.readouterr().out
    cells = json.loads(out.read_text())["evaluations"][0]["metrics"]
    measures = [ir_measures.parse_measure(name) for name in names]
    outside = ir_measures.calc_aggregate(
        measures, ir_measures.read_trec_qrels(str(folder / "trec")), ir_measures.read_trec_run(str(run))
    )
    for name, measure in zip(names, measures, strict=True):
        assert cells[name]["all"]["mean"] == pytest.approx(outside[measure]) and cells[name]["all"]["mean"] > 0
    assert len(run.read_text().splitlines()) == 6 * 120
    assert main([*call, "--run-file", str(run), "--limit", "2"]) == 0
    assert len(run.read_text().splitlines()) == 2 * 100  # as deep as the searches


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--retriever", "random", "--measures", "foo@3"], "unknown measure 'foo@3'"),
        (["--retriever", "random", "--measures", "nDCG"], "measure 'nDCG' needs a rank"),
        (["--retriever", "random", "oracle", "--run-file", "x.trec"], "--run-file holds one run"),
        (["--retriever", "random", "--search", "single", "greedy", "--run-file", "x.trec"], "--run-file holds one run"),
        (["--retriever", "random", "--run-file", "absent/x.trec"], "there is no folder absent"),
        (["--retriever", "random", "--run-file", "x", "--out", "x"], "give each a file of its own"),
    ],
)
def test_bad_arguments_print_one_line(tmp_path, capsys, arguments, message):
    folder = write_beir(tmp_path / "words")
    assert main(["evaluate", "--env", "ChainRetrieval-BEIR-v0", "--env-kwargs", f"path={folder}", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and message in captured.err and captured.err.count("\n") == 1


def test_bm25_on_real_scifact(real_file):
    pytest.importorskip("bm25s")
    from retrieval_gym.datasets import load_dataset

    dataset = load_dataset("scifact", "dev", path=real_file("scifact"))
    result = evaluate(make_retriever("bm25", dataset), dataset, steps=1, measures=("nDCG@10", "R@100"))
    # BEIR reports nDCG@10 .665 and R@100 .908 for BM25 on the 300 claims of the test split.
    assert 0.55 < result.mean("nDCG@10") < 0.8 and 0.8 < result.mean("R@100") < 1
    assert np.array_equal(final_ranking(result.chains, 100), result.ranking)


def test_importing_needs_no_library():
    code = (
        "import sys, retrieval_gym.evaluation; print([m for m in ('ir_measures', 'pytrec_eval') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_pools_are_scored_alike():
    dataset = make_dataset("pool")
    result = evaluate(make_retriever("oracle", dataset), dataset, steps=4, measures=("nDCG@10",))
    assert result.mean("nDCG@10") == pytest.approx(1)
