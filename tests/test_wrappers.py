import warnings

import gymnasium as gym
import numpy as np
import pytest
from conftest import PASSAGES, POOLS
from gymnasium.utils.env_checker import check_env
from gymnasium.vector.utils import batch_space, concatenate, create_empty_array, iterate

from retrieval_gym.spaces import Utf8Text
from retrieval_gym.wrappers import CandidateTexts


@pytest.mark.parametrize("observation", ["text", "ids"])
def test_candidates_are_the_pool_in_order(pool_dataset, observation):
    env = CandidateTexts(gym.make("ChainRetrieval-v0", dataset=pool_dataset, observation=observation))
    seen, info = env.reset(options={"question": 2})
    titled = [f"{title}\n{text}" if title else text for title, text in PASSAGES]
    assert seen["candidates"] == tuple(titled[i] for i in POOLS[2])
    assert seen in env.observation_space
    for action in (1, 1, 4):
        seen, *_ = env.step(action)
        assert seen["candidates"] == tuple(titled[i] for i in POOLS[2]) and seen in env.observation_space
    assert env.reset(options={"question": 3})[0]["candidates"] == (titled[3], titled[6])


def test_a_corpus_is_refused(corpus_dataset):
    with pytest.raises(ValueError, match="whole corpus of 10 passages"):
        CandidateTexts(gym.make("ChainRetrieval-v0", dataset=corpus_dataset))


def test_the_spec_makes_the_wrapped_environment_again(pool_dataset):
    env = CandidateTexts(gym.make("ChainRetrieval-v0", dataset=pool_dataset))
    again = gym.make(env.spec)
    assert isinstance(again, CandidateTexts) and again.observation_space == env.observation_space
    first, second = env.reset(seed=3)[0], again.reset(seed=3)[0]
    assert first["candidates"] == second["candidates"] and first["question"] == second["question"]


def test_check_env_has_no_warning_but_that_it_is_wrapped(pool_dataset):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        check_env(CandidateTexts(gym.make("ChainRetrieval-v0", dataset=pool_dataset).unwrapped), skip_render_check=True)
    assert all("different from the unwrapped version" in str(warning.message) for warning in caught)


def test_wrapped_environments_in_a_sync_vector(pool_dataset):
    envs = gym.make_vec(
        "ChainRetrieval-v0", num_envs=2, vectorization_mode="sync", wrappers=[CandidateTexts], dataset=pool_dataset
    )
    observation, infos = envs.reset(seed=0)
    assert observation in envs.observation_space
    lengths = [len(candidates) for candidates in observation["candidates"]]
    assert lengths == (infos["candidates"] >= 0).sum(axis=1).tolist()


def test_text_space_holds_any_unicode_up_to_its_length():
    space = Utf8Text()
    for text in ("", "a", "Wisła 🌊 \n\t\0 \U0010ffff", "x" * 100_000):
        assert text in space
    for other in (b"a", 1, None, ["a"], "\ud800"):
        assert other not in space
    assert "abc" in Utf8Text(3) and "abcd" not in Utf8Text(3) and "" in Utf8Text(0)
    assert repr(space) == "Utf8Text()" and repr(Utf8Text(3)) == "Utf8Text(3)"
    assert Utf8Text(3) == Utf8Text(3) != Utf8Text(4) and Utf8Text() != gym.spaces.Text(3)


def test_text_space_samples():
    space, again = Utf8Text(seed=1), Utf8Text(seed=1)
    samples = [space.sample() for _ in range(300)]
    assert samples == [again.sample() for _ in range(300)] and len(set(samples)) > 250
    assert all(sample in space for sample in samples)
    assert {len(sample) for sample in samples} == set(range(33))
    assert max(map(ord, "".join(samples))) > 0x10000
    assert {len(Utf8Text(2, seed=i).sample()) for i in range(40)} == {0, 1, 2}
    assert space.from_jsonable(space.to_jsonable(samples)) == samples
    with pytest.raises(ValueError, match="no mask"):
        space.sample(mask=(1, None))


@pytest.mark.parametrize("length", [-1, 1.5, "3"])
def test_text_space_rejects_bad_lengths(length):
    with pytest.raises(ValueError, match=f"got {length!r}"):
        Utf8Text(length)


def test_text_space_works_with_gymnasiums_batching_and_flattening():
    space = gym.spaces.Dict({"a": Utf8Text(), "b": gym.spaces.Discrete(3)}, seed=0)
    batch = batch_space(space, 2)
    items = [space.sample() for _ in range(2)]
    joined = concatenate(space, items, create_empty_array(space, 2))
    assert joined in batch and joined["a"] == (items[0]["a"], items[1]["a"])
    assert list(iterate(batch["a"], joined["a"])) == [items[0]["a"], items[1]["a"]]
    flat = gym.spaces.utils.flatten(space, items[0])
    assert flat["a"] == items[0]["a"] and np.argmax(flat["b"]) == items[0]["b"]
    assert flat in gym.spaces.utils.flatten_space(space)
    assert gym.spaces.utils.unflatten(space, flat) == items[0]
    with pytest.raises(ValueError, match="no flat dimension"):
        gym.spaces.utils.flatdim(Utf8Text())
    differing = gym.vector.utils.batch_differing_spaces([Utf8Text(3), Utf8Text(5)])
    assert ("abc", "abcde") in differing and ("abcd", "") not in differing
    assert gym.spaces.utils.is_space_dtype_shape_equiv(Utf8Text(3), Utf8Text(5))
