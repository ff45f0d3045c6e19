import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from retrieval_gym.nn import index as index_module  # noqa: E402
from retrieval_gym.nn.index import ExactIndex  # noqa: E402

BACKENDS = ["torch", "faiss"]


def oracle(vectors, queries, k, exclude):
    """Rank by (rounded score descending, id ascending) with plain sorting in float64."""
    ids, scores = np.full((len(queries), k), -1), np.full((len(queries), k), -np.inf, np.float32)
    exact = np.round(queries.astype(np.float64) @ vectors.astype(np.float64).T, 6)
    for row, banned in enumerate(exclude):
        order = sorted((i for i in range(len(vectors)) if i not in banned), key=lambda i: (-exact[row, i], i))[:k]
        ids[row, : len(order)], scores[row, : len(order)] = order, exact[row, order]
    return ids, scores


def needs(backend):
    if backend == "faiss":
        pytest.importorskip("faiss")


@pytest.mark.parametrize("backend", BACKENDS)
@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10_000), n=st.integers(1, 60), k=st.integers(1, 70), levels=st.integers(1, 4))
def test_search_equals_sorting_with_many_ties(backend, seed, n, k, levels):
    needs(backend)
    rng = np.random.default_rng(seed)
    vectors = rng.integers(0, levels, (n, 3)).astype(np.float32)
    queries = rng.integers(-1, 2, (4, 3)).astype(np.float32)
    exclude = rng.integers(-1, n, (4, 3))
    ids, scores = ExactIndex(vectors, backend).search(queries, k, exclude)
    expected_ids, expected_scores = oracle(vectors, queries, k, exclude)
    assert ids.dtype == torch.int64 and scores.dtype == torch.float32
    np.testing.assert_array_equal(ids.numpy(), expected_ids)
    np.testing.assert_array_equal(scores.numpy(), expected_scores)


@pytest.mark.parametrize("backend", BACKENDS)
def test_search_over_several_blocks_with_near_ties(backend, monkeypatch):
    needs(backend)
    rng = np.random.default_rng(0)
    vectors = rng.normal(size=(3000, 16)).astype(np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    vectors[100:400] = vectors[50] + rng.normal(size=(300, 16)).astype(np.float32) * 1e-8
    queries = np.concatenate([vectors[50:51], rng.normal(size=(20, 16)).astype(np.float32)])
    exclude = np.full((21, 2), -1)
    exclude[0] = [50, 103]
    expected = oracle(vectors, queries, 9, exclude)
    whole = ExactIndex(vectors, backend).search(queries, 9, exclude)
    monkeypatch.setattr(index_module, "CELLS", 2000)
    pieces = ExactIndex(vectors, backend).search(queries, 9, exclude)
    for ids, scores in (whole, pieces):
        np.testing.assert_array_equal(ids.numpy(), expected[0])
        np.testing.assert_allclose(scores.numpy(), expected[1], atol=1e-7, rtol=0)


def test_no_exclusion_and_tensors_on_device():
    vectors = torch.eye(3)
    ids, scores = ExactIndex(vectors).search(torch.tensor([[0.0, 2.0, 1.0]]), 2)
    assert ids.tolist() == [[1, 2]] and scores.tolist() == [[2.0, 1.0]]


def test_clear_errors(monkeypatch):
    index = ExactIndex(np.eye(3, dtype=np.float32))
    with pytest.raises(ValueError, match="k is 0"):
        index.search(np.eye(3), 0)
    with pytest.raises(ValueError, match=r"give \(B, 3\)"):
        index.search(np.ones((2, 4)), 1)
    with pytest.raises(ValueError, match="exclude has shape"):
        index.search(np.ones((2, 3)), 1, np.zeros((3, 1), np.int64))
    with pytest.raises(ValueError, match="not finite"):
        ExactIndex(np.array([[np.nan, 1.0]]))
    with pytest.raises(ValueError, match="N at least 1"):
        ExactIndex(np.zeros((0, 3)))
    with pytest.raises(ValueError, match="annoy"):
        ExactIndex(np.eye(3), "annoy")
    monkeypatch.setitem(sys.modules, "faiss", None)
    with pytest.raises(ValueError, match=r"retrieval-gym\[cpu\].*retrieval-gym\[gpu\]"):
        ExactIndex(np.eye(3), "faiss")
