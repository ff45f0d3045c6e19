"""Searches that outlive an interruption: what was searched is not searched again, and nothing else changes."""

import json

import numpy as np
import pytest

from retrieval_gym import kept_searches
from retrieval_gym.bm25 import BM25Retriever
from retrieval_gym.cli import main
from retrieval_gym.datasets import load_dataset
from retrieval_gym.evaluation import evaluate
from retrieval_gym.kept_searches import SearchLog

ENV = "ChainRetrieval-Synthetic-v0"
STEPS, BATCH = 3, 8


class Counting:
    """BM25 that counts, and that is interrupted before a search."""

    def __init__(self, dataset, interrupted_at=None, shift=0.0, shift_picked=0.0):
        self.inner, self.interrupted_at = BM25Retriever(dataset), interrupted_at
        self.shift, self.shift_picked = shift, shift_picked
        self.calls = self.encoder_calls = self.truncated = 0

    def search(self, states, k):
        if self.calls == self.interrupted_at:
            raise KeyboardInterrupt
        self.calls += 1
        self.encoder_calls += len(states)
        self.truncated += 1
        ids, scores = self.inner.search(states, k)
        return ids, scores + np.float32(self.shift + self.shift_picked * states.count.any())


@pytest.fixture(scope="module")
def dataset():
    return load_dataset("synthetic", "dev", num_questions=20)


def play(dataset, retriever, folder):
    with SearchLog(folder) as log:
        return evaluate(log.keep("it", retriever, dataset), dataset, steps=STEPS, batch_size=BATCH)


def interrupt(dataset, folder, after):
    stopped = Counting(dataset, interrupted_at=after)
    with pytest.raises(KeyboardInterrupt):
        play(dataset, stopped, folder)
    return stopped


def kept_files(folder):
    return sorted(folder.rglob("*.search"))


def test_what_was_searched_is_not_searched_again(dataset, tmp_path, capsys):
    whole = play(dataset, Counting(dataset), None)
    interrupt(dataset, tmp_path / "kept", after=5)
    assert len(kept_files(tmp_path)) == 5
    again = Counting(dataset)
    result = play(dataset, again, tmp_path / "kept")
    assert again.calls == 9 - 5 + 2  # of three batches of three steps; one search with picks and one without again
    assert "it: goes on with the searches that were kept" in capsys.readouterr().err
    for name in ("picked", "scores", "step_ids", "step_scores"):
        np.testing.assert_array_equal(getattr(result.chains, name), getattr(whole.chains, name))
    assert result.encoder_calls == whole.encoder_calls == STEPS * len(dataset)
    assert not (tmp_path / "kept").exists()


def test_counters_and_time_include_what_was_read(dataset, tmp_path):
    interrupt(dataset, tmp_path / "kept", after=5)
    log = SearchLog(tmp_path / "kept")
    kept = log.keep("it", Counting(dataset), dataset)
    result = evaluate(kept, dataset, steps=STEPS, batch_size=BATCH)
    assert kept.truncated == 9
    assert 0 < kept.kept_seconds < result.chains.seconds
    assert not hasattr(log.keep("other", BM25Retriever(dataset), dataset), "encoder_calls")


@pytest.mark.parametrize("change", [dict(shift=0.01), dict(shift_picked=0.01)], ids=["all", "with picks"])
def test_another_retriever_drops_what_was_kept(dataset, tmp_path, capsys, change):
    interrupt(dataset, tmp_path / "kept", after=5)
    result = play(dataset, Counting(dataset, **change), tmp_path / "kept")
    assert "it finds other passages than before: all is searched anew" in capsys.readouterr().err
    expected = play(dataset, Counting(dataset, **change), None)
    if "shift" in change:
        np.testing.assert_array_equal(result.chains.scores, expected.chains.scores)
    np.testing.assert_array_equal(result.chains.scores[:, 1:], expected.chains.scores[:, 1:])


@pytest.mark.parametrize("damage", [lambda content: content[:100], lambda content: b"", lambda content: b"x" * 999])
def test_a_damaged_file_is_searched_again(dataset, tmp_path, capsys, damage):
    interrupt(dataset, tmp_path / "kept", after=5)
    for path in kept_files(tmp_path):
        path.write_bytes(damage(path.read_bytes()))
    again = Counting(dataset)
    result = play(dataset, again, tmp_path / "kept")
    assert again.calls == 9 and "is damaged" in capsys.readouterr().err
    np.testing.assert_array_equal(result.chains.picked, play(dataset, Counting(dataset), None).chains.picked)


def test_every_flipped_bit_is_noticed(dataset, tmp_path):
    interrupt(dataset, tmp_path / "kept", after=1)
    (path,) = kept_files(tmp_path)
    whole = path.read_bytes()
    for place in range(0, len(whole), 37):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 4]) + whole[place + 1 :])
        assert kept_searches._read(path) is None


def test_what_breaks_the_contract_is_not_kept(dataset, tmp_path):
    class Broken(Counting):
        def search(self, states, k):
            ids, scores = super().search(states, k)
            return (ids.astype(np.int32) if self.calls == 5 else ids), scores

    with pytest.raises(ValueError, match="ids of type int32"):
        play(dataset, Broken(dataset), tmp_path / "kept")
    assert len(kept_files(tmp_path)) == 4
    mended = Counting(dataset)
    play(dataset, mended, tmp_path / "kept")
    assert mended.calls == 9 - 4 + 2


def test_counters_that_are_none_are_left_alone(dataset, tmp_path):
    again = BM25Retriever(dataset)
    again.truncated = None
    with SearchLog(tmp_path / "kept") as log:
        kept = log.keep("it", again, dataset)
        evaluate(kept, dataset, steps=STEPS, batch_size=BATCH)
        assert kept.truncated is None


def test_what_a_command_searched_itself_was_not_kept_before(tmp_path, capsys):
    """The first step of a greedy chain is the single search; nothing was interrupted."""
    searches = ["--search", "greedy", "single", "--limit", "9", "--cache-dir", str(tmp_path / "cache")]
    assert main(["evaluate", "--env", ENV, "--retriever", "bm25", *searches]) == 0
    assert "kept" not in capsys.readouterr().err


def test_what_could_not_be_written_loses_no_search(tmp_path, monkeypatch, capsys):
    def full(path, text):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("retrieval_gym.commands.evaluate.write_text", full)
    places = ["--cache-dir", str(tmp_path / "cache"), "--out", str(tmp_path / "out.json")]
    assert main(["evaluate", "--env", ENV, "--retriever", "bm25", "--limit", "9", *places]) == 2
    assert kept_files(tmp_path / "cache")


def test_questions_that_changed_are_searched_anew(tmp_path):
    """Searches are told apart by questions' indices, and so kept for one dataset."""
    first, other = (load_dataset("synthetic", "dev", num_questions=20, seed=seed) for seed in (0, 1))
    interrupt(first, tmp_path / "kept", after=5)
    again = Counting(other)
    play(other, again, tmp_path / "kept")
    assert again.calls == 9


def test_searches_of_another_depth_are_others(dataset, tmp_path):
    interrupt(dataset, tmp_path / "kept", after=5)
    again = Counting(dataset)
    with SearchLog(tmp_path / "kept") as log:
        evaluate(log.keep("it", again, dataset), dataset, steps=STEPS, batch_size=BATCH, depth=50)
    assert again.calls == 9


MODULE = """
from pathlib import Path
from retrieval_gym.bm25 import BM25Retriever

class Stopping:
    def __init__(self, dataset):
        self.inner = BM25Retriever(dataset)

    def search(self, states, k):
        calls = Path("calls").read_text() if Path("calls").exists() else ""
        if len(calls) == int(Path("stop_at").read_text()):
            raise OSError("the service is down")
        Path("calls").write_text(calls + "x")
        return self.inner.search(states, k)
"""


@pytest.mark.parametrize("command", ["evaluate", "diagnose", "stopping"])
def test_a_command_goes_on_where_it_was_stopped(command, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / f"stops_{command}.py").write_text(MODULE)
    arguments = [
        command, "--env", ENV, "--retriever", "bm25", f"stops_{command}:Stopping", "--limit", "20", "--steps", "3",
        "--batch-size", "8", "--cache-dir", "cache",
    ]  # fmt: skip
    (tmp_path / "stop_at").write_text("-1")
    assert main([*arguments, "--out", "whole.json"]) == 0
    total = len((tmp_path / "calls").read_text())
    (tmp_path / "calls").unlink()

    (tmp_path / "stop_at").write_text("5")
    assert main([*arguments, "--out", "again.json"]) == 2
    assert "the service is down" in capsys.readouterr().err
    assert kept_files(tmp_path / "cache" / "searches")
    (tmp_path / "stop_at").write_text("-1")
    assert main([*arguments, "--out", "again.json"]) == 0
    assert len((tmp_path / "calls").read_text()) == total + 2  # one search with picks and one without are made again
    assert not kept_files(tmp_path / "cache")
    whole, again = (json.loads((tmp_path / f"{name}.json").read_text()) for name in ("whole", "again"))
    for report in (whole, again):
        for evaluation in report.get("evaluations", []):
            del evaluation["cost"]["milliseconds_per_question"]
    assert again == whole


def test_nothing_is_kept_without_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["evaluate", "--env", ENV, "--retriever", "bm25", "--limit", "9"]) == 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("cache", "message"), [("file", "is a file: name a folder"), ("file/in", "Not a directory")])
def test_a_folder_that_cannot_be_one_is_refused(tmp_path, capsys, cache, message):
    (tmp_path / "file").write_text("")
    arguments = ["evaluate", "--env", ENV, "--retriever", "bm25", "--limit", "9", "--cache-dir", str(tmp_path / cache)]
    assert main(arguments) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "evaluate:" in line]
    assert message in line


def test_ctrl_c_says_how_to_go_on(tmp_path, monkeypatch, capsys):
    def interrupt(*given, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr("retrieval_gym.commands.evaluate.evaluate", interrupt)
    arguments = ["evaluate", "--env", ENV, "--retriever", "bm25", "--limit", "9"]
    assert main([*arguments, "--cache-dir", str(tmp_path)]) == main(arguments) == 130
    with_cache, without = [line for line in capsys.readouterr().err.splitlines() if "interrupted" in line]
    assert with_cache == "retrieval_gym evaluate: interrupted; the same command goes on with what --cache-dir holds"
    assert without == "retrieval_gym evaluate: interrupted"
