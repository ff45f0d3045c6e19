"""Every example runs as its docstring says and prints what it promises."""

import json
import os
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest

from retrieval_gym import load_dataset, mdp
from retrieval_gym.bm25 import BM25Retriever

ROOT = Path(__file__).resolve().parents[1]


def run_example(name, folder):
    script = ROOT / "examples" / name
    assert f"python examples/{name}" in script.read_text()
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "NO_COLOR": "1"}
    environment.pop("RETRIEVAL_GYM_DATA", None)
    command = [sys.executable, str(script)]
    result = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    assert not os.listdir(folder), "an example leaves no files"
    return result.stdout


def test_play_random(tmp_path):
    text = run_example("play_random.py", tmp_path)
    returns = re.findall(r"^episode \d: return (\d)$", text, re.MULTILINE)
    endings = re.findall(r"^(Complete|Incomplete)", text, re.MULTILINE)
    assert len(returns) == len(endings) == 3
    assert [value == "1" for value in returns] == [ending == "Complete" for ending in endings]
    assert run_example("play_random.py", tmp_path) == text


@pytest.fixture(scope="module")
def scores(tmp_path_factory):
    text = run_example("evaluate_retriever.py", tmp_path_factory.mktemp("example"))
    row = re.search(r"^recall@5 +all +200 +(\d\.\d+) \[.*?\] +(\d\.\d+) \[", text, re.MULTILINE)
    assert row, text
    return [float(score) for score in row.groups()]


def test_random_retriever_scores_as_chance(scores):
    """Of 16 candidates, 5 drawn at random hold 5/16 of the gold passages."""
    assert scores[0] == pytest.approx(5 / 16, abs=0.06)


def test_own_retriever_beats_chance(scores):
    assert scores[1] > scores[0] + 0.1


def test_a_reward_of_bm25_is_the_score_of_its_retriever(tmp_path, monkeypatch):
    pytest.importorskip("bm25s", reason="needs the extra bm25")
    folder = tmp_path / "scifact"
    (folder / "qrels").mkdir(parents=True)
    texts = ["red apples grow", "green apples fall", "stones do not grow", "nothing of this kind"]
    corpus = [{"_id": f"d{i}", "title": f"title {i}", "text": text} for i, text in enumerate(texts)]
    (folder / "corpus.jsonl").write_text("".join(json.dumps(each) + "\n" for each in corpus))
    (folder / "queries.jsonl").write_text(
        '{"_id": "a", "text": "Do apples grow?"}\n{"_id": "b", "text": "green stones"}\n'
    )
    (folder / "qrels/train.tsv").write_text("query-id\tcorpus-id\tscore\na\td0\t1\nb\td2\t1\n")
    monkeypatch.setenv("RETRIEVAL_GYM_DATA", str(tmp_path))
    monkeypatch.syspath_prepend(ROOT)
    reward = import_module("examples.bm25_reward").score
    dataset = load_dataset("scifact", "train")
    ids, scores = BM25Retriever(dataset).search(mdp.dataset_states(dataset, np.arange(2), 1), 4)
    assert len(set(scores[0].tolist())) == 4
    for question, row, expected in zip(dataset.questions, ids, scores, strict=True):
        got = reward([question.text] * 4, [[]] * 4, dataset.corpus.texts(row))
        assert got == pytest.approx(expected, abs=1e-5)
