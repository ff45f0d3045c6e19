"""``retrieval_gym embed``: what is kept is what others open, and what was interrupted goes on."""

import json
import os
import re
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
from small_runs import TOKENS, lora_run, save_data  # noqa: E402
from tiny import save_encoder  # noqa: E402

from retrieval_gym import load_dataset, progress  # noqa: E402
from retrieval_gym.cli import main  # noqa: E402
from retrieval_gym.nn import embeddings  # noqa: E402
from retrieval_gym.nn.embeddings import EmbeddingTable  # noqa: E402
from retrieval_gym.nn.encoder import TextEncoder  # noqa: E402


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return save_data(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def corpus(data):
    return load_dataset("custom", "train", data).corpus


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    return save_encoder(tmp_path_factory.mktemp("models") / "tiny")


def embed(capsys, *arguments):
    status = main(["embed", *map(str, arguments), "--device", "cpu"])
    return status, capsys.readouterr()


def count(monkeypatch):
    """Count the inputs that go through an encoder from here on."""
    seen, real = [], TextEncoder.embed

    def counted(self, sequences, **kwargs):
        seen.append(len(sequences))
        return real(self, sequences, **kwargs)

    monkeypatch.setattr(TextEncoder, "embed", counted)
    return seen


def test_the_vectors_are_the_encoder_s_and_their_place_is_printed(encoder, data, corpus, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_LINES", -1.0)
    arguments = ["--path", data, "--encoder", encoder, "--max-passage-tokens", 24, "--cache-dir", tmp_path / "cache"]
    status, shown = embed(capsys, *arguments)
    assert status == 0, shown.err
    assert "11 passages, 10 distinct texts, 1 of them cut" in shown.out
    file = Path(re.search(r"^(.*vectors\.npy): float32 \(11, 32\)", shown.out, re.MULTILINE).group(1))
    alone = TextEncoder.load(encoder)
    expected = torch.cat([alone.encode([str(passage)], "passage", max_tokens=24) for passage in corpus])
    np.testing.assert_allclose(np.load(file), expected.numpy(), atol=1e-6)
    assert f"weights     SHA-256 {alone.weights_hash()}" in shown.out
    assert f"corpus      SHA-256 {corpus.fingerprint}" in shown.out
    assert "max_tokens  24" in shown.out and 'pooling     "mean"' in shown.out
    assert shown.err.splitlines()[-1] == "embedding passages: 10 of 10 texts"


def test_agents_and_other_commands_open_what_was_embedded(encoder, data, corpus, tmp_path, capsys, monkeypatch):
    cache = tmp_path / "cache"
    assert embed(capsys, "--path", data, "--encoder", encoder, "--max-passage-tokens", 24, "--cache-dir", cache)[0] == 0
    seen = count(monkeypatch)
    EmbeddingTable.build(TextEncoder.load(encoder), corpus, max_tokens=24, cache_dir=cache)
    assert embed(capsys, "--path", data, "--encoder", encoder, "--max-passage-tokens", 24, "--cache-dir", cache)[0] == 0
    assert seen == []
    environment = ["--env", "ChainRetrieval-Custom-v0", "--env-kwargs", f"path={data}", "--encoder", str(encoder)]
    assert embed(capsys, *environment, "--max-passage-tokens", 24, "--cache-dir", cache)[0] == 0
    search = ["search", "Which river?", "--path", str(data), "--encoder", str(encoder), "--steps", "1"]
    assert main([*search, "--max-passage-tokens", "24", "--cache-dir", str(cache), "--device", "cpu"]) == 0
    assert seen == [1]


def test_a_run_s_passages_are_embedded_as_its_retriever_reads_them(data, tmp_path, capsys, monkeypatch):
    run = lora_run(tmp_path)
    assert embed(capsys, "--path", data, "--run", run, "--cache-dir", tmp_path / "cache")[0] == 0
    seen = count(monkeypatch)
    search = ["search", "Which river?", "--path", str(data), "--run", str(run), "--steps", "1", "--device", "cpu"]
    assert main([*search, "--cache-dir", str(tmp_path / "cache")]) == 0
    assert seen == [1]
    (folder,) = (path for path in (tmp_path / "cache").iterdir() if path.is_dir())
    assert json.loads((folder / "meta.json").read_text())["max_tokens"] == TOKENS


def test_what_was_interrupted_goes_on(encoder, data, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(embeddings, "CHUNK", 4)
    command = ["--path", data, "--encoder", encoder, "--cache-dir", tmp_path / "cache"]
    real, calls = TextEncoder.embed, []

    def interrupt(self, sequences, **kwargs):
        calls.append(len(sequences))
        if len(calls) == 3:
            raise KeyboardInterrupt
        return real(self, sequences, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(TextEncoder, "embed", interrupt)
        status, shown = embed(capsys, *command)
    assert status == 130 and "the same command goes on where this one stopped" in shown.err
    assert any(name.endswith(".partial") for name in os.listdir(tmp_path / "cache"))
    seen = count(monkeypatch)
    status, shown = embed(capsys, *command)
    assert status == 0 and seen == [2]
    embed(capsys, *command[:-1], tmp_path / "whole")
    interrupted, whole = (next((tmp_path / name).glob("*/vectors.npy")) for name in ("cache", "whole"))
    assert interrupted.read_bytes() == whole.read_bytes()
    assert interrupted.parent.name == whole.parent.name


def test_right_to_left_text_and_emoji_need_no_questions(encoder, tmp_path, capsys):
    lines = '{"id": "a", "text": "نهر الدانوب"}\r\n{"id": "b", "text": "🌊🌊"}\r\n'
    (tmp_path / "corpus.jsonl").write_bytes(b"\xef\xbb\xbf" + lines.encode())
    status, shown = embed(capsys, "--path", tmp_path, "--encoder", encoder, "--cache-dir", tmp_path / "cache")
    assert status == 0 and "2 passages, 2 distinct texts, 0 of them cut" in shown.out


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "no corpus at"),
        (b"", "corpus.jsonl is empty"),
        (b'{"id": "a", "text": "\xff"}\n', "corpus.jsonl, line 1: not UTF-8"),
        (b'{"id": "a", "text": "' + b"x" * 10_000_000, "corpus.jsonl, line 1: not JSON"),
        (b'{"id": "a", "text": "x"}\n' * 2, "line 2: passage id 'a' occurs twice"),
    ],
)
def test_a_hostile_corpus_is_one_line(content, message, encoder, tmp_path, capsys):
    if content is not None:
        (tmp_path / "corpus.jsonl").write_bytes(content)
    status, shown = embed(capsys, "--path", tmp_path, "--encoder", encoder, "--cache-dir", tmp_path / "cache")
    assert status == 2 and message in shown.err and shown.err.count("\n") == 1 and len(shown.err) < 600
    assert not (tmp_path / "cache").exists()


def test_a_cache_that_cannot_be_written_is_one_line(encoder, data, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    for cache, message in ((tmp_path / "file", "is a file: name a folder"), (tmp_path / "file" / "in", "cannot write")):
        status, shown = embed(capsys, "--path", data, "--encoder", encoder, "--cache-dir", cache)
        assert status == 2 and message in shown.err and shown.err.count("\n") == 1, shown.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--run", "r", "--encoder", "e"], "--encoder is not for --run"),
        (["--run", "r", "--autocast"], "--autocast is not for --run"),
        (["--max-passage-tokens", "0"], "--max-passage-tokens must be at least 1"),
        (["--env-kwargs", "a=1"], "--env-kwargs is for --env"),
        (["--encoder", "no/such/model/here"], "no model at 'no/such/model/here'"),
    ],
)
def test_bad_input_is_one_line(arguments, message, data, tmp_path, capsys):
    status, shown = embed(capsys, "--path", data, "--cache-dir", tmp_path / "cache", *arguments)
    assert status == 2 and message in shown.err and shown.err.count("\n") == 1
