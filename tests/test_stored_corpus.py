"""Corpora on disk against the same ones in memory."""

import gzip
import json
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from retrieval_gym import Corpus, load_dataset
from retrieval_gym.bm25 import BM25Retriever
from retrieval_gym.datasets import corpus_files, jsonl, stored_corpus
from retrieval_gym.datasets.stored_corpus import StoredCorpus, write_stored_corpus
from retrieval_gym.evaluation import evaluate

pytest.importorskip("pyarrow", reason="corpora on disk need pyarrow")

WORDS = st.sampled_from(["", "a", "b", "ab", "naïve 😀", "שלום\n", "\x00"])


def store(folder: Path, corpus: Corpus) -> StoredCorpus:
    passages = ((key, p.title, p.text) for key, p in zip(corpus.keys, corpus, strict=True))
    assert write_stored_corpus(folder, passages) is None
    return StoredCorpus(folder)


@pytest.fixture
def on_disk(monkeypatch, tmp_path) -> Path:
    """Keep every corpus on disk; the cache's folder of them."""
    monkeypatch.setenv("RETRIEVAL_GYM_IN_MEMORY_MAX_SIZE", "0")
    monkeypatch.setenv("RETRIEVAL_GYM_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "corpora"


def write_folder(folder: Path, passages: list[dict]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "corpus.jsonl").write_text("".join(json.dumps(each) + "\n" for each in passages))
    first = {"id": "q", "question": "who?", "gold_ids": [passages[-1]["id"], passages[0]["id"]]}
    (folder / "questions.jsonl").write_text(json.dumps(first) + "\n")
    return folder


PASSAGES = [{"id": f"p{i}", "title": f"title {i % 7}", "text": f"text {i % 5}"} for i in range(40)]


@settings(max_examples=40, deadline=None)
@given(rows=st.lists(st.tuples(WORDS, WORDS), min_size=1, max_size=30), batch=st.integers(1, 9))
def test_it_is_the_corpus_in_memory(tmp_path_factory, rows, batch):
    titles, texts = map(list, zip(*rows, strict=True))
    memory = Corpus(titles, texts, [f"key {i * 7919 % 1000}" for i in range(len(rows))])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stored_corpus, "_BATCH_PASSAGES", batch)
        disk = store(tmp_path_factory.mktemp("corpora") / "c", memory)
    for corpus in (disk, pickle.loads(pickle.dumps(disk))):
        assert list(corpus) == list(memory) and corpus[:] == memory[:] and corpus[-1] == memory[-1]
        assert corpus[2:20:3] == memory[2:20:3] and list(corpus.keys) == list(memory.keys)
        assert dict(corpus.ids) == memory.ids and corpus.fingerprint == memory.fingerprint
        assert np.array_equal(corpus.first_copies, memory.first_copies)
        assert np.array_equal(corpus.canonical, memory.canonical) and corpus.canonical.dtype == np.int64
        assert corpus.texts(np.arange(len(rows))[::-1]) == memory.texts(range(len(rows))[::-1])
        with pytest.raises(IndexError):
            corpus[len(rows)]
    assert "key" not in disk.ids and 3 not in disk.ids


def test_keys_whose_hashes_collide_are_told_apart(monkeypatch, tmp_path):
    monkeypatch.setattr(stored_corpus, "_key_hash", lambda key: bytes([len(key)] * 8))
    keys = ["b", "a", "ccc", "c", "aa"]
    disk = store(tmp_path / "c", Corpus([""] * 5, list("vwxyz"), keys))
    assert [disk.ids[key] for key in keys] == [0, 1, 2, 3, 4] and "d" not in disk.ids
    assert write_stored_corpus(tmp_path / "d", [(key, "", "x") for key in ["a", "b", "c", "b"]]) == "b"
    assert not list(tmp_path.glob("d*"))


def test_a_dataset_is_the_same_from_disk_and_is_written_once(on_disk, monkeypatch, tmp_path, capsys):
    folder = write_folder(tmp_path / "own", PASSAGES)
    first = load_dataset("custom", path=folder)
    assert isinstance(first.corpus, StoredCorpus) and "once" in capsys.readouterr().err
    monkeypatch.setattr(jsonl, "read_jsonl", only_questions(jsonl.read_jsonl))
    again = load_dataset("custom", path=folder)
    assert capsys.readouterr().err == ""
    monkeypatch.undo()
    memory = load_dataset("custom", path=folder)
    assert type(memory.corpus) is Corpus
    for disk in (first, again):
        assert disk.fingerprint == memory.fingerprint and disk.questions == memory.questions
        there, here = (list(evaluate(BM25Retriever(each), each, steps=2).records()) for each in (disk, memory))
        assert there == here


def only_questions(read):
    def wrapped(path):
        assert path.name != "corpus.jsonl", "the corpus was read again"
        return read(path)

    return wrapped


def test_beir_counts_what_it_leaves_out_each_time(on_disk, tmp_path, capsys):
    (tmp_path / "qrels").mkdir()
    (tmp_path / "qrels/test.tsv").write_text("query-id\tcorpus-id\tscore\nq\td\t1\n")
    (tmp_path / "queries.jsonl").write_text('{"_id": "q", "text": "?"}\n')
    (tmp_path / "corpus.jsonl").write_text('{"_id": "d", "text": "x"}\n{"_id": "e", "text": " "}\n')
    for _ in range(2):
        dataset = load_dataset("beir", "test", path=tmp_path)
        assert len(dataset.corpus) == 1 and dataset.dropped == {"passages with neither title nor text": 1}


def test_a_changed_file_is_another_corpus(on_disk, tmp_path):
    folder = write_folder(tmp_path / "own", PASSAGES)
    before = load_dataset("custom", path=folder).corpus
    write_folder(folder, PASSAGES[:-1])
    assert len(load_dataset("custom", path=folder).corpus) == len(before) - 1 == 39
    assert len(list(on_disk.glob("corpus-*[0-9a-f]"))) == 2


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([*PASSAGES, {"id": "p3", "text": "x"}], r"line 41: passage id 'p3' occurs twice, first at .*line 4"),
        ([*PASSAGES, {"id": "q", "text": " "}], r"line 41: passage 'q' has neither title nor text"),
        ([*PASSAGES, {"id": "q"}], r"line 41: field 'text' is missing"),
    ],
)
def test_a_bad_passage_is_named_and_nothing_is_left(on_disk, tmp_path, lines, message):
    folder = write_folder(tmp_path / "own", lines)
    with pytest.raises(ValueError, match=message):
        load_dataset("custom", path=folder)
    assert not [each for each in on_disk.iterdir() if each.suffix != ".lock"]


def test_what_a_killed_writer_left_is_replaced(on_disk, tmp_path):
    folder = write_folder(tmp_path / "own", PASSAGES)
    program = (
        "import os, retrieval_gym as rg; from retrieval_gym.datasets import stored_corpus as s\n"
        "s._first_equal = lambda contents: os._exit(7)\n"
        f"rg.load_dataset('custom', path={str(folder)!r})"
    )
    assert subprocess.run([sys.executable, "-c", program], timeout=120).returncode == 7
    (unfinished,) = on_disk.glob("*.tmp")
    assert list(load_dataset("custom", path=folder).corpus.ids) == [each["id"] for each in PASSAGES]
    assert not unfinished.exists()


@pytest.mark.parametrize("name", ["passages.arrow", "key_hashes.npy", "first_copies.npy", "about.json"])
@pytest.mark.parametrize("share", [0.0, 0.7])
def test_a_damaged_one_says_what_to_delete(on_disk, tmp_path, name, share):
    folder = write_folder(tmp_path / "own", PASSAGES)
    stored = load_dataset("custom", path=folder).corpus.folder
    content = (stored / name).read_bytes()
    (stored / name).write_bytes(content[: int(len(content) * share)])
    with pytest.raises(ValueError, match=f"{stored} holds no whole corpus .*: delete it"):
        load_dataset("custom", path=folder)


def test_without_pyarrow_it_is_in_memory_and_says_so(on_disk, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(corpus_files, "find_spec", lambda name: None)
    assert type(load_dataset("custom", path=write_folder(tmp_path / "own", PASSAGES)).corpus) is Corpus
    assert "retrieval-gym[data]" in capsys.readouterr().err


def test_packed_text_counts_fourfold(monkeypatch, tmp_path):
    file = tmp_path / "corpus.jsonl.gz"
    file.write_bytes(gzip.compress(b'{"id": "a", "text": "x"}\n'))
    monkeypatch.setenv("RETRIEVAL_GYM_CACHE", str(tmp_path))
    for size, kind in ((4 * file.stat().st_size, Corpus), (4 * file.stat().st_size - 1, StoredCorpus)):
        monkeypatch.setenv("RETRIEVAL_GYM_IN_MEMORY_MAX_SIZE", str(size))
        assert type(jsonl.read_corpus(file)) is kind


@pytest.mark.parametrize("value", ["-1", "1e9", "many"])
def test_a_size_that_is_none_is_refused(monkeypatch, tmp_path, value):
    monkeypatch.setenv("RETRIEVAL_GYM_IN_MEMORY_MAX_SIZE", value)
    with pytest.raises(ValueError, match=f"RETRIEVAL_GYM_IN_MEMORY_MAX_SIZE is '{value}': give"):
        load_dataset("custom", path=write_folder(tmp_path / "own", PASSAGES))


@pytest.mark.skipif(sys.platform != "linux", reason="reads the peak from /proc")
def test_text_on_disk_takes_no_memory(on_disk, tmp_path):
    folder = write_folder(tmp_path / "own", [{"id": str(i), "text": f"{i} " * 2000} for i in range(10_000)])
    program = (
        "import re, sys, retrieval_gym as rg, pyarrow, pyarrow.ipc\n"
        "def anonymous(): return int(re.search(r'RssAnon:\\s+(\\d+)', open('/proc/self/status').read())[1]) / 1024\n"
        "before = anonymous()\n"
        f"dataset = rg.load_dataset('custom', path={str(folder)!r})\n"
        "assert dataset.corpus[9_999].text.startswith('9999 ')\n"
        "print(anonymous() - before)"
    )

    def mebibytes() -> float:
        run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
        return float(run.stdout)

    mebibytes()  # writes it
    assert mebibytes() < 20 < 80 < folder.joinpath("corpus.jsonl").stat().st_size / 2**20
