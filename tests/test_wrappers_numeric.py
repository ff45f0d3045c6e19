"""EmbeddingObservation, TopKCandidates and what they embed with, against loops over the unwrapped environment."""

import copy
import math
import pickle
import subprocess
import sys
import warnings
from collections import Counter
from zlib import crc32

import gymnasium as gym
import numpy as np
import pytest
from conftest import PASSAGES, POOLS, QUESTIONS, make_dataset
from gymnasium.utils.env_checker import check_env

from retrieval_gym.retrieval import OracleRetriever, RandomRetriever
from retrieval_gym.wrappers import CachedEncode, CandidateTexts, EmbeddingObservation, HashingEncoder, TopKCandidates

TITLED = [f"{title}\n{text}" if title else text for title, text in PASSAGES]
DIM = 5


def vector(text, salt=0):
    """A vector that depends on nothing but the text, of any length."""
    return np.random.default_rng([crc32(text.encode()), salt]).normal(size=DIM) * 3


def encode(texts):
    return np.stack([vector(text) for text in texts])


def encode_other(texts):
    return np.stack([vector(text, salt=1) for text in texts])


def make(dataset, **kwargs):
    return gym.make("ChainRetrieval-v0", dataset=dataset, **kwargs)


class Some:
    """A retriever that finds the passages of its list alone."""

    def __init__(self, found):
        self.found = found

    def search(self, states, k):
        ids = [i for i in self.found if i not in states.picked[0]][:k]
        row = np.array([ids + [-1] * (k - len(ids))], np.int64)
        return row, np.where(row >= 0, 0, -np.inf).astype(np.float32)


# --- encoders


def test_hashing_encoder_has_the_inner_products_of_tfidf():
    text = pytest.importorskip("sklearn.feature_extraction.text")
    tfidf = text.TfidfVectorizer(token_pattern=r"(?u)\w+").fit(TITLED)
    expected = (tfidf.transform(TITLED) @ tfidf.transform(TITLED).T).toarray()
    vectors = HashingEncoder(TITLED, dim=2**18)(TITLED)
    assert vectors.dtype == np.float32 and vectors.shape == (10, 2**18)
    np.testing.assert_allclose(vectors @ vectors.T, expected, atol=1e-6)
    small = HashingEncoder(TITLED, dim=256)(TITLED)
    assert np.abs(small @ small.T - expected).max() < 0.25, "collisions add noise only"


def test_collisions_cancel_on_average():
    """Texts without a common word: the mean inner product is 0 within its standard error, dim**-0.5 / 2,000**0.5."""
    vectors = HashingEncoder([], dim=16)([f"word{i}" for i in range(4_000)])
    products = (vectors[:2_000] * vectors[2_000:]).sum(axis=1)
    assert products.any() and abs(products.mean()) < 4 * 16**-0.5 / 2_000**0.5


def test_hashing_encoder_weighs_an_unknown_word_most():
    first, second = HashingEncoder(["a b", "a c", "a"], dim=2**18)(["A unknown", "unknown"])
    unseen = math.log(4) + 1  # no text of three holds it; all hold "a", whose weight is 1
    assert first @ second == pytest.approx(unseen / math.hypot(unseen, 1), abs=1e-6)
    assert not HashingEncoder(["a"], dim=4)(["?!"]).any()
    with pytest.raises(ValueError, match="dim is 0"):
        HashingEncoder(["a"], dim=0)


def test_hashing_encoder_is_the_same_in_another_process():
    code = (
        "from retrieval_gym.wrappers import HashingEncoder\n"
        "print(HashingEncoder(['one two', 'three'], dim=8)(['one three four']).tobytes().hex())"
    )
    here = HashingEncoder(["one two", "three"], dim=8)(["one three four"]).tobytes().hex()
    for seed in "12":
        run = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True, env={"PYTHONHASHSEED": seed}
        )
        assert run.stdout.strip() == here


def test_each_text_is_embedded_once_and_new_ones_together():
    calls = []

    def counting(texts):
        calls.append(list(texts))
        return encode(texts)

    cached = CachedEncode(counting)
    first = cached(["a", "b", "a"])
    second = cached(["c", "b", "d"])
    assert calls == [["a", "b"], ["c", "d"]] and len(cached) == 4
    assert first.dtype == np.float32
    np.testing.assert_array_equal(first, encode(["a", "b", "a"]).astype(np.float32))
    np.testing.assert_array_equal(second, encode(["c", "b", "d"]).astype(np.float32))
    first[:] = 0
    assert cached(["a"]).any() and cached([]).shape == (0, DIM) and CachedEncode(encode)([]).shape == (0, 0)
    assert CachedEncode.of(cached) is cached and CachedEncode.of(encode).encode is encode


def test_torch_and_sparse_results_are_read():
    torch = pytest.importorskip("torch")
    sparse = pytest.importorskip("scipy.sparse")
    expected = encode(["a", "b"]).astype(np.float32)
    with torch.inference_mode():
        tensor = torch.tensor(expected)
    for given in (tensor, torch.tensor(expected, requires_grad=True), sparse.csr_matrix(expected)):
        np.testing.assert_array_equal(CachedEncode(lambda texts, given=given: given)(["a", "b"]), expected)
    half = torch.tensor(expected).bfloat16()
    np.testing.assert_allclose(CachedEncode(lambda texts: half)(["a", "b"]), expected, rtol=0.01)


def test_an_encoder_that_returns_something_else_is_refused():
    with pytest.raises(ValueError, match=r"shape \(5,\) for 2 texts"):
        CachedEncode(lambda texts: np.zeros(5))(["a", "b"])
    with pytest.raises(ValueError, match="not finite for 'b'"):
        CachedEncode(lambda texts: np.array([[1.0], [np.nan]]))(["a", "b"])
    sizes = iter([2, 3])
    growing = CachedEncode(lambda texts: np.zeros((1, next(sizes))))
    growing(["a"])
    with pytest.raises(ValueError, match=r"\(1, 3\) for 1 texts: it must return one row of 2"):
        growing(["b"])


# --- EmbeddingObservation


def expected_parts(question, picked, candidates, mask, steps_left, *, max_steps=4, other=None, unit=True):
    """The parts of an observation, worked out in plain loops; ``picked`` and ``candidates`` are corpus ids."""

    def scaled(vector):
        return vector / math.sqrt(sum(x * x for x in vector)) if unit else vector

    q = scaled(vector(QUESTIONS[question].text))
    history = [scaled(vector(TITLED[i])) for i in picked]
    rows, vectors = [], []
    for place, i in enumerate(candidates):
        c = np.zeros(DIM) if i < 0 else scaled(vector(TITLED[i], *([] if other is None else [other])))
        products = [sum(x * y for x, y in zip(c, p, strict=True)) for p in [q, *history]]
        rows.append([float(mask[place]), *products] + [0.0] * (max_steps - len(picked)))
        vectors.append(c)
    mean = np.zeros(DIM) if not history else sum(history) / len(history)
    return {
        "steps_left": [steps_left / max_steps],
        "scores": rows,
        "question": q,
        "picked": mean,
        "candidates": vectors,
    }


ALL = ("candidates", "picked", "steps_left", "question", "scores")


@pytest.mark.parametrize("unit", [True, False])
@pytest.mark.parametrize("other", [None, 1])
@pytest.mark.parametrize("inner", ["text", "ids"])
def test_observation_by_hand_in_pools(unit, other, inner):
    env = EmbeddingObservation(
        make(make_dataset(), observation=inner),
        encode,
        None if other is None else encode_other,
        parts=ALL,
        normalize=unit,
    )
    width = 7
    assert env.shapes == {
        "candidates": (width, DIM), "picked": (DIM,), "steps_left": (1,), "question": (DIM,), "scores": (width, 6)
    }  # fmt: skip
    assert env.observation_space.shape == (width * DIM + DIM + 1 + DIM + width * 6,)
    observation, info = env.reset(options={"question": 2})
    pool = POOLS[2] + [-1, -1]
    picked, steps_left = [], 4
    # 2 and 3 are gold; 6 is padding; 3 again is invalid
    for action in (None, 3, 6, 3, 2):
        if action is not None:
            observation, _, terminated, _, info = env.step(action)
            steps_left -= 1
            if 0 <= pool[action] and pool[action] not in picked:
                picked.append(pool[action])
        mask = [i >= 0 and i not in picked for i in pool]
        expected = expected_parts(2, picked, pool, mask, steps_left, other=other, unit=unit)
        assert observation in env.observation_space and observation.dtype == np.float32
        for part in ALL:
            seen = observation[env.slices[part]].reshape(env.shapes[part])
            np.testing.assert_allclose(seen, np.array(expected[part]), atol=1e-5, err_msg=part)
        np.testing.assert_array_equal(info["action_mask"], mask)
    assert terminated and picked == [5, 4] and steps_left == 0


def test_default_parts_and_bounds():
    env = EmbeddingObservation(make(make_dataset()), encode)
    assert list(env.shapes) == ["steps_left", "scores"] and env.observation_space.shape == (1 + 7 * 6,)
    low = env.observation_space.low[1:].reshape(7, 6)
    assert not low[:, 0].any() and (low[:, 1:] == -1).all() and (env.observation_space.high == 1).all()
    corpus = EmbeddingObservation(make(make_dataset("corpus")), encode)
    assert list(corpus.shapes) == ["steps_left", "question", "picked"]
    assert corpus.observation_space.shape == (1 + 2 * DIM,)
    free = EmbeddingObservation(make(make_dataset("corpus")), encode, normalize=False)
    assert np.isinf(free.observation_space.high[1:]).all() and free.observation_space.high[0] == 1


def test_observation_by_hand_over_a_corpus():
    env = EmbeddingObservation(make(make_dataset("corpus")), encode)
    observation, _ = env.reset(options={"question": 1})
    for picked in ([], [8], [8, 3]):
        if picked:
            observation, *_ = env.step(picked[-1])
        expected = expected_parts(1, picked, [], [], 4 - len(picked))
        np.testing.assert_allclose(
            observation, np.concatenate([expected[part] for part in ("steps_left", "question", "picked")]), atol=1e-6
        )


def test_environments_share_an_encoder_and_embed_a_passage_once():
    texts = Counter()

    def counting(batch):
        texts.update(batch)
        return encode(batch)

    shared = CachedEncode(counting)
    envs = [EmbeddingObservation(make(make_dataset()), shared) for _ in range(2)]
    for env in envs:
        for question in range(5):
            _, info = env.reset(options={"question": question})
            env.step(int(info["action_mask"].argmax()))
    assert set(texts.values()) == {1}
    assert set(texts) == {*TITLED, *(question.text for question in QUESTIONS)}


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        (("scores", "colour"), "distinct ones of steps_left, scores"),
        ((), "distinct ones"),
        (("scores", "scores"), "distinct ones"),
    ],
)
def test_parts_are_checked(parts, message):
    with pytest.raises(ValueError, match=message):
        EmbeddingObservation(make(make_dataset()), encode, parts=parts)


def test_what_needs_candidates_is_refused_over_a_corpus():
    with pytest.raises(ValueError, match="'scores' needs candidates.*whole corpus of 10 passages.*TopKCandidates"):
        EmbeddingObservation(make(make_dataset("corpus")), encode, parts=("scores",))


def test_two_encoders_must_agree_on_the_length():
    env = EmbeddingObservation(make(make_dataset()), encode, lambda texts: np.ones((len(texts), 3)))
    with pytest.raises(ValueError, match="length 5, encode_candidates of length 3"):
        env.reset(seed=0)


# --- TopKCandidates


@pytest.mark.parametrize("form", ["pool", "corpus"])
@pytest.mark.parametrize("k", [1, 3, 7])
def test_episodes_equal_those_of_the_unwrapped_environment(form, k):
    dataset = make_dataset(form)
    retriever = RandomRetriever(dataset, seed=k)
    env = TopKCandidates(make(dataset, reward="recall"), k, retriever)
    raw = make(dataset, reward="recall")
    assert env.action_space == gym.spaces.Discrete(k)
    rng, invalid, returns = np.random.default_rng(0), 0, []
    for episode in range(60):
        observation, info = env.reset(seed=episode)
        below, _ = raw.reset(seed=episode)
        terminated, total = False, 0.0
        while True:
            states = raw.unwrapped.states
            found = retriever.search(states, k)[0][0]
            np.testing.assert_array_equal(info["candidates"], found)
            np.testing.assert_array_equal(info["action_mask"], found >= 0)
            np.testing.assert_array_equal(env.action_masks(), found >= 0)
            assert info["action_mask"].dtype == np.int8 and env.action_masks().dtype == bool
            # Passage 7 reads as passage 1, so either of them is that gold passage.
            picked = {1 if i == 7 else i for i in states.picked[0].tolist()}
            missing = {i for i in QUESTIONS[states.question[0]].gold if i not in picked}
            reach = missing & {1 if i == 7 else i for i in found.tolist()}
            assert (info["gold_in_reach"], info["gold_out_of_reach"]) == (len(reach), len(missing - reach))
            assert observation["picked"].tolist() == below["picked"].tolist()
            assert observation["passages"] == below["passages"] and observation in env.observation_space
            if terminated:
                break
            action = int(rng.integers(k))
            if found[action] >= 0:
                pool = states.pool
                picks = int(found[action]) if pool is None else pool[0].tolist().index(found[action])
            else:  # any action that picks nothing
                picks = int((~raw.unwrapped.action_masks()).argmax())
                invalid += 1
            observation, reward, terminated, truncated, info = env.step(action)
            below, expected, ended, _, raw_info = raw.step(picks)
            assert (reward, terminated, truncated) == (expected, ended, False)
            for key in ("invalid_action", "gold_found", "complete", "question_index"):
                assert info[key] == raw_info[key]
            total += reward
        returns.append(total)
    assert len(set(returns)) > 1 and (invalid > 0) == (form == "pool" and k > 1)


def test_where_fewer_passages_are_left_the_rest_is_padding():
    env = TopKCandidates(make(make_dataset("corpus"), max_steps=10, stop_when_complete=False), 10, Some(range(10)))
    _, info = env.reset(options={"question": 3})
    for left in (9, 8):
        _, _, _, _, info = env.step(1)
        assert (info["candidates"] >= 0).sum() == info["action_mask"].sum() == env.action_masks().sum() == left
    observation, reward, _, _, info = env.step(9)
    assert info["invalid_action"] and reward == 0 and observation["steps_left"] == 7
    assert info["candidates"].tolist() == [0, 3, 4, 5, 6, 7, 8, 9, -1, -1]


def test_a_short_list_is_filled_with_the_lowest_ids_left():
    env = TopKCandidates(make(make_dataset("corpus")), 5, Some([8, 2]))
    _, info = env.reset(options={"question": 1})
    assert info["candidates"].tolist() == [8, 2, 0, 1, 3] and info["gold_in_reach"] == 3
    _, _, _, _, info = env.step(0)
    assert info["candidates"].tolist() == [2, 0, 1, 3, 4] and not info["invalid_action"]
    pools = TopKCandidates(make(make_dataset()), 4, Some([8]))
    _, info = pools.reset(options={"question": 1})
    assert info["candidates"].tolist() == [8, 0, 1, 2]
    small = TopKCandidates(make(make_dataset()), 4, Some([6]))
    _, info = small.reset(options={"question": 3})  # a pool of two
    assert info["candidates"].tolist() == [6, 3, -1, -1] and info["action_mask"].tolist() == [1, 1, 0, 0]
    observation, reward, _, _, info = small.step(2)
    assert info["invalid_action"] and reward == 0 and observation["steps_left"] == 3
    assert small.step(1)[4]["complete"]


def test_gold_out_of_reach_is_counted():
    env = TopKCandidates(make(make_dataset("corpus")), 1, Some([9, 8, 0]))
    _, info = env.reset(options={"question": 0})
    assert (info["gold_in_reach"], info["gold_out_of_reach"]) == (0, 2)
    env.step(0)
    _, _, _, _, info = env.step(0)
    assert (info["gold_in_reach"], info["gold_out_of_reach"]) == (1, 1)


def test_a_name_makes_the_retriever_for_the_environment():
    env = TopKCandidates(make(make_dataset("corpus")), 4, "oracle")
    assert isinstance(env.retriever, OracleRetriever)
    _, info = env.reset(options={"question": 2})
    assert info["candidates"].tolist() == [3, 4, 5, 0]
    assert [env.step(0)[1] for _ in range(3)] == [0, 0, 1]


def test_what_is_picked_is_told_apart_from_what_is_not_a_retriever():
    corpus = make_dataset("corpus")
    for k in (0, 11, 2.0, True):
        with pytest.raises(ValueError, match="k must be a whole number from 1 to 10"):
            TopKCandidates(make(corpus), k, RandomRetriever(corpus))
    with pytest.raises(ValueError, match="object, which has no method search"):
        TopKCandidates(make(corpus), 2, object())
    with pytest.raises(ValueError, match="unknown retriever 'colour'"):
        TopKCandidates(make(corpus), 2, "colour")
    with pytest.raises(ValueError, match=r"made for 'hand-made', split 'train'.*make one for"):
        TopKCandidates(make(corpus), 2, OracleRetriever(corpus.select([1, 0])))
    TopKCandidates(make(corpus), 2, OracleRetriever(make_dataset("corpus")))  # equal, though not the same object


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ([[1, 1]], "passage twice"),
        ([[10, 1]], "passage 10 for question 0"),
        ([[1]], r"shape \(1, 1\) for one state and k=2"),
        ([[0.0, 1.0]], "float64 of shape"),
    ],
)
def test_a_retriever_that_breaks_the_protocol_is_refused(row, message):
    class Broken:
        def search(self, states, k):
            return np.array(row), np.zeros((1, 2), np.float32)

    env = TopKCandidates(make(make_dataset("corpus")), 2, Broken())
    with pytest.raises(ValueError, match=message):
        env.reset(options={"question": 0})


def test_a_retriever_that_returns_what_is_picked_or_outside_the_pool_is_refused():
    class Stubborn:
        def search(self, states, k):
            return np.array([[3, 4]]), np.zeros((1, 2), np.float32)

    env = TopKCandidates(make(make_dataset("corpus")), 2, Stubborn())
    env.reset(options={"question": 2})
    with pytest.raises(ValueError, match="passage 3 for question 2, which is picked already"):
        env.step(0)
    with pytest.raises(ValueError, match="passage 4 for question 0"):
        TopKCandidates(make(make_dataset()), 2, Stubborn()).reset(options={"question": 0})


def test_actions_outside_and_steps_before_or_after_an_episode_raise():
    env = TopKCandidates(make(make_dataset("corpus"), max_steps=1, allow_unreachable=True), 2, Some(range(10)))
    for call in (lambda: env.step(0), env.action_masks):
        with pytest.raises(gym.error.ResetNeeded):
            call()
    env.reset(seed=0)
    with pytest.raises(ValueError, match=r"action 2 is outside Discrete\(2\)"):
        env.step(2)
    env.step(1)
    with pytest.raises(gym.error.ResetNeeded):
        env.step(1)


def test_info_shares_no_memory_with_the_wrapper():
    env = TopKCandidates(make(make_dataset("corpus")), 3, Some(range(10)))
    _, info = env.reset(options={"question": 0})
    info["candidates"][:], info["action_mask"][:] = -1, 0
    assert env.action_masks().all()
    assert env.step(2)[0]["picked"].tolist() == [2, -1, -1, -1]


# --- together


def stacks():
    return {
        "pool": EmbeddingObservation(make(make_dataset()).unwrapped, encode),
        "top-k": EmbeddingObservation(
            TopKCandidates(make(make_dataset("corpus")).unwrapped, 4, RandomRetriever(make_dataset("corpus"))), encode
        ),
        "corpus": EmbeddingObservation(make(make_dataset("corpus")).unwrapped, encode),
        "texts of top-k": CandidateTexts(
            TopKCandidates(make(make_dataset("corpus")).unwrapped, 4, RandomRetriever(make_dataset("corpus")))
        ),
    }


def test_candidate_texts_follow_the_top_k():
    for env in (
        CandidateTexts(TopKCandidates(make(make_dataset("corpus")), 3, Some([5, 0, 9, 2]))),
        CandidateTexts(TopKCandidates(make(make_dataset()), 3, Some([3, 9, 5, 1, 4]))),
    ):
        observation, info = env.reset(options={"question": 2})
        for _ in range(3):
            assert observation["candidates"] == tuple(TITLED[i] for i in info["candidates"])
            assert observation in env.observation_space
            before, ids = observation["candidates"], info["candidates"]
            observation, _, _, _, info = env.step(1)
            assert observation["passages"][-1] == before[1] and ids[1] not in info["candidates"]


def test_observation_over_top_k_by_hand():
    env = EmbeddingObservation(
        CandidateTexts(TopKCandidates(make(make_dataset("corpus")), 3, Some([5, 0, 9, 2]))), encode
    )
    observation, _ = env.reset(options={"question": 0})
    for picked, candidates in (([], [5, 0, 9]), ([0], [5, 9, 2]), ([0, 2], [5, 9, 1])):
        if picked:
            action = {1: 1, 2: 2}[len(picked)]
            observation, *_ = env.step(action)
        expected = expected_parts(0, picked, candidates, [1, 1, 1], 4 - len(picked))
        np.testing.assert_allclose(observation[0], expected["steps_left"][0])
        np.testing.assert_allclose(observation[1:].reshape(3, 6), np.array(expected["scores"]), atol=1e-6)


def test_what_observes_no_candidates_may_come_inside_top_k():
    env = TopKCandidates(EmbeddingObservation(make(make_dataset("corpus")), encode), 3, Some([5, 0, 9, 2]))
    observation, info = env.reset(options={"question": 0})
    assert observation in env.observation_space and info["candidates"].tolist() == [5, 0, 9]
    assert env.step(1)[4]["gold_found"] == 1
    pools = EmbeddingObservation(make(make_dataset()), encode, parts=["question"])
    assert TopKCandidates(pools, 3, Some([3])).reset(options={"question": 3})[1]["candidates"].tolist() == [3, 6, -1]


@pytest.mark.parametrize(
    "inner",
    [
        lambda env: CandidateTexts(env),
        lambda env: EmbeddingObservation(env, encode),
        lambda env: TopKCandidates(env, 4, "random"),
    ],
)
def test_what_observes_other_candidates_may_not(inner):
    with pytest.raises(ValueError, match="wrap in TopKCandidates once, and first"):
        TopKCandidates(inner(make(make_dataset())), 3, "random")


@pytest.mark.parametrize("name", ["pool", "top-k", "corpus", "texts of top-k"])
def test_gymnasiums_checker_has_no_warning_but_that_it_is_wrapped(name):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        check_env(stacks()[name], skip_render_check=True)
    assert all("different from the unwrapped version" in str(warning.message) for warning in caught), caught


def play(env, seed):
    """Play three episodes with a fixed generator; return all that was seen."""
    rng, seen = np.random.default_rng(seed), []
    for episode in range(3):
        observation, info = env.reset(seed=seed + episode)
        seen.append(observation)
        terminated = False
        while not terminated:
            actions = np.flatnonzero(env.get_wrapper_attr("action_masks")())
            observation, reward, terminated, _, info = env.step(int(rng.choice(actions)))
            seen += [observation, reward, info["gold_found"]]
    return seen


@pytest.mark.parametrize("name", ["pool", "top-k", "corpus"])
def test_copies_go_on_where_the_original_stood(name):
    env = stacks()[name]
    env.reset(seed=5)
    env.step(int(np.flatnonzero(env.get_wrapper_attr("action_masks")())[0]))
    twins = [copy.deepcopy(env), pickle.loads(pickle.dumps(env))]
    action = int(np.flatnonzero(env.get_wrapper_attr("action_masks")())[-1])
    expected = env.step(action)
    for twin in twins:
        observation, reward, *_ = twin.step(action)
        np.testing.assert_array_equal(observation, expected[0])
        assert reward == expected[1]
    for original, twin in zip(play(env, 3), play(twins[1], 3), strict=True):
        np.testing.assert_array_equal(original, twin)


def test_the_spec_makes_the_wrapped_environment_again():
    dataset = make_dataset("corpus")
    env = EmbeddingObservation(TopKCandidates(make(dataset), 4, "random"), encode, parts=("scores",))
    again = gym.make(env.spec)
    assert isinstance(again, EmbeddingObservation) and again.observation_space == env.observation_space
    for original, twin in zip(play(env, 1), play(again, 1), strict=True):
        np.testing.assert_array_equal(original, twin)


def test_in_a_sync_vector_the_masks_are_stacked():
    envs = gym.make_vec(
        "ChainRetrieval-v0", num_envs=3, vectorization_mode="sync", dataset=make_dataset("corpus"),
        wrappers=[lambda env: TopKCandidates(env, 4, "random"), lambda env: EmbeddingObservation(env, encode)],
    )  # fmt: skip
    observation, info = envs.reset(seed=0)
    assert observation.shape == (3, 1 + 4 * 6) and observation in envs.observation_space
    assert info["action_mask"].shape == info["candidates"].shape == (3, 4)
