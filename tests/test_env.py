import json
import warnings
from collections.abc import Iterator

import gymnasium as gym
import numpy as np
import pytest
from conftest import make_dataset, skip_without_data
from gymnasium.utils.env_checker import check_env, data_equivalence
from hypothesis import given, settings
from hypothesis import strategies as st

from retrieval_gym import RetrievalDataset, mdp
from retrieval_gym.envs import ChainRetrievalEnv
from retrieval_gym.registration import ENVIRONMENTS

ENV_ID = "ChainRetrieval-v0"


@pytest.fixture
def quiet() -> Iterator[None]:
    """Any warning is an error."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


@pytest.mark.parametrize("observation", ["text", "ids"])
def test_check_env_has_no_warning(dataset, observation, quiet):
    check_env(gym.make(ENV_ID, dataset=dataset, observation=observation).unwrapped)


def test_check_env_of_the_custom_id(tmp_path, quiet):
    passages = [{"id": f"p{i}", "title": f"Title {i}", "text": f"Text {i}."} for i in range(5)]
    questions = [{"id": "a", "question": "Which?", "gold_ids": ["p1", "p3"]}]
    for name, rows in (("corpus", passages), ("questions", questions)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    env = gym.make("ChainRetrieval-Custom-v0", path=str(tmp_path))
    check_env(env.unwrapped)
    env.reset()
    assert [env.step(action)[1] for action in (3, 1)] == [0.0, 1.0]


@pytest.mark.parametrize("env_id", sorted(set(ENVIRONMENTS) - {ENV_ID}))
def test_check_env_of_every_id_whose_data_are_present(env_id, quiet):
    with skip_without_data(env_id):
        env = gym.make(env_id)
    check_env(env.unwrapped)


def test_spaces_and_first_observation(dataset):
    env = ChainRetrievalEnv(dataset, max_steps=4)
    observation, info = env.reset(options={"question": 3})
    assert env.action_space == gym.spaces.Discrete(7 if dataset.max_pool else 10)
    assert observation["question"] == "Where was Curie born?" and observation["passages"] == ()
    assert observation["picked"].tolist() == [-1] * 4 and observation["picked"].dtype == np.int64
    assert observation["steps_left"] == 4 and type(observation["steps_left"]) is np.int64
    assert info["question_index"] == 3 and type(info["question_index"]) is int
    assert info["gold_found"] == 0 and info["complete"] is False and info["invalid_action"] is False
    if dataset.max_pool:
        assert info["candidates"].tolist() == [3, 6, -1, -1, -1, -1, -1]
        assert info["action_mask"].tolist() == [1, 1, 0, 0, 0, 0, 0] and info["action_mask"].dtype == np.int8
    else:
        assert info.keys() == {"question_index", "gold_found", "complete", "invalid_action"}


def test_one_episode_by_hand(pool_dataset):
    env = ChainRetrievalEnv(pool_dataset, max_steps=4)
    env.reset(options={"question": 0})
    observation, reward, terminated, truncated, info = env.step(3)  # the copy of "Ulm"
    assert observation["passages"] == ("Ulm\nUlm lies on the Danube.",)
    assert (reward, terminated, truncated, info["gold_found"]) == (0.0, False, False, 1)
    observation, reward, terminated, _, info = env.step(3)
    assert info["invalid_action"] and observation["picked"].tolist() == [3, -1, -1, -1] and reward == 0.0
    observation, reward, terminated, _, info = env.step(6)  # padding
    assert info["invalid_action"] and observation["steps_left"] == 1 and not terminated
    observation, reward, terminated, _, info = env.step(np.int64(0))
    assert observation["picked"].tolist() == [3, 0, -1, -1] and type(reward) is float
    assert (reward, terminated, info["complete"], info["gold_found"]) == (1.0, True, True, 2)
    with pytest.raises(gym.error.ResetNeeded, match="ended"):
        env.step(1)


def test_ids_observation_names_the_question_and_holds_no_text(corpus_dataset):
    env = ChainRetrievalEnv(corpus_dataset, observation="ids")
    observation, _ = env.reset(options={"question": 2})
    assert observation.keys() == {"question", "picked", "steps_left"}
    assert observation["question"] == 2 and type(observation["question"]) is np.int64
    observation, *_ = env.step(9)
    assert observation["picked"].tolist() == [9, -1, -1, -1]


@settings(deadline=None)
@given(st.data(), st.sampled_from(["pool", "corpus"]), st.booleans())
def test_an_episode_ends_when_it_should(data, form, stop_when_complete):
    dataset = make_dataset(form)
    env = ChainRetrievalEnv(dataset, max_steps=5, stop_when_complete=stop_when_complete)
    _, info = env.reset(seed=data.draw(st.integers(0, 10_000)))
    total, steps, terminated = 0.0, 0, False
    while not terminated:
        mask = env.action_masks()
        if "action_mask" in info:
            np.testing.assert_array_equal(mask, info["action_mask"].astype(bool))
        action = data.draw(st.integers(0, int(env.action_space.n) - 1))
        observation, reward, terminated, truncated, info = env.step(action)
        steps += 1
        total += reward
        assert info["invalid_action"] == (not mask[action])
        assert mask.sum() - env.action_masks().sum() == mask[action]
        assert not truncated and (reward == 0.0 or mask[action])
        assert terminated == (steps == 5 or (stop_when_complete and info["complete"]))
        assert observation in env.observation_space
        assert env.states.picked.shape == (1, 5)
    assert total == float(info["complete"])


def test_masked_samples_are_always_valid(pool_dataset):
    env = ChainRetrievalEnv(pool_dataset, max_steps=4)
    env.action_space.seed(0)
    for seed in range(20):
        _, info = env.reset(seed=seed, options={"question": 4})
        terminated = False
        while not terminated:
            _, _, terminated, _, info = env.step(env.action_space.sample(info["action_mask"]))
            assert not info["invalid_action"]


def test_questions_are_drawn_uniformly_from_the_seed(dataset):
    env = ChainRetrievalEnv(dataset)

    def draw(seed: int, count: int) -> list[int]:
        return [env.reset(seed=seed if i == 0 else None)[1]["question_index"] for i in range(count)]

    assert draw(3, 20) == draw(3, 20) != draw(4, 20)
    counts = np.bincount(draw(0, 2000), minlength=5)
    assert ((counts - 400) ** 2 / 400).sum() < 18.5  # chi-squared with 4 degrees of freedom, p = 0.001


def test_a_chosen_question_leaves_the_generator_alone(dataset):
    env = ChainRetrievalEnv(dataset)
    env.reset(seed=5)
    expected = env.reset()[1]["question_index"]
    env.reset(seed=5)
    assert env.reset(options={"question": np.int32(2)})[1]["question_index"] == 2
    assert env.reset()[1]["question_index"] == expected


def test_what_was_returned_can_be_written_to(dataset):
    written, clean = ChainRetrievalEnv(dataset), ChainRetrievalEnv(dataset)
    options = {"question": 2}
    result, expected = written.reset(options=options), clean.reset(options=options)
    for action in (0, 1, 1, 2):
        assert data_equivalence(result, expected, exact=True)
        states = written.states
        arrays = [*result[0].values(), *result[-1].values(), states.picked, states.question, states.steps_left]
        for array in arrays:
            if isinstance(array, np.ndarray):
                array[...] = 1
        result, expected = written.step(action), clean.step(action)
    assert data_equivalence(result, expected, exact=True)


def test_a_dataset_that_makes_pools_anew_uses_the_environments_generator(pool_dataset):
    class Shuffled(RetrievalDataset):
        def pool(self, i, rng=None):
            pool = super().pool(i)
            return pool if rng is None else rng.permutation(pool)

    data = Shuffled("shuffled", "train", pool_dataset.corpus, pool_dataset.questions, pool_dataset.pools)
    env = ChainRetrievalEnv(data)
    pools = [tuple(env.reset(seed=seed, options={"question": 1})[1]["candidates"]) for seed in range(8)]
    assert len(set(pools)) > 4 and {tuple(sorted(pool)) for pool in pools} == {(0, 1, 2, 6, 7, 8, 9)}
    assert tuple(env.reset(seed=3, options={"question": 1})[1]["candidates"]) == pools[3]


def test_a_reward_function_sees_states_and_picks(pool_dataset):
    def first_pick(states, picks, dataset):
        return (picks == 1) & (states.count == 0)

    env = ChainRetrievalEnv(pool_dataset, reward=first_pick)
    env.reset(options={"question": 0})
    assert env.step(1)[1] == 1.0
    with pytest.raises(ValueError, match="shape"):
        bad = ChainRetrievalEnv(pool_dataset, reward=lambda *_: np.zeros(3))
        bad.reset()
        bad.step(0)


@pytest.mark.parametrize("flag", ["stop_when_complete", "allow_unreachable"])
def test_flags_are_true_or_false(flag):
    with pytest.raises(ValueError, match=f"{flag} must be True or False, got 'yes'"):
        ChainRetrievalEnv("synthetic", **{flag: "yes"})


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"max_steps": 0}, "max_steps.*got 0"),
        ({"max_steps": 2.0}, "max_steps.*got 2.0"),
        ({"max_steps": True}, "max_steps.*got True"),
        ({"max_steps": 3}, "'q4' has 4 gold passages.*allow_unreachable"),
        ({"observation": "pixels"}, "observation 'pixels'.*text, ids"),
        ({"reward": "dense"}, "reward 'dense'"),
        ({"render_mode": "rgb_array"}, "render_mode 'rgb_array'"),
        ({"path": "somewhere"}, "'path'.*already a RetrievalDataset"),
        ({"pool_size": 3}, "'pool_size'.*already a RetrievalDataset"),
        ({"dataset": 7}, "dataset.*got 7"),
        ({"dataset": "nothing"}, "unknown dataset 'nothing'"),
    ],
)
def test_bad_arguments_name_themselves(pool_dataset, kwargs, message):
    with pytest.raises(ValueError, match=message):
        ChainRetrievalEnv(**{"dataset": pool_dataset, **kwargs})


def test_unreachable_questions_can_be_allowed(pool_dataset):
    env = ChainRetrievalEnv(pool_dataset, max_steps=1, allow_unreachable=True)
    env.reset(options={"question": 0})
    assert env.step(0)[1:3] == (0.0, True)


@pytest.mark.parametrize("action", [-1, 7, 1.0, "0", None, np.array([1])])
def test_an_action_outside_the_space_raises(pool_dataset, action):
    env = ChainRetrievalEnv(pool_dataset)
    env.reset()
    with pytest.raises(ValueError, match=r"Discrete\(7\)"):
        env.step(action)


@pytest.mark.parametrize(
    "options", [{"question": 5}, {"question": -1}, {"question": 1.0}, {"question": [1, 2]}, {"q": 1}]
)
def test_bad_options_name_themselves(pool_dataset, options):
    with pytest.raises(ValueError, match="question"):
        ChainRetrievalEnv(pool_dataset).reset(options=options)


def test_stepping_before_the_first_reset_raises(pool_dataset):
    env = ChainRetrievalEnv(pool_dataset)
    for call in (lambda: env.step(0), env.action_masks, lambda: env.states):
        with pytest.raises(gym.error.ResetNeeded):
            call()


def test_make_needs_no_import_and_no_time_limit(dataset):
    env = gym.make(f"retrieval_gym:{ENV_ID}", dataset=dataset)
    assert env.spec.max_episode_steps is None
    assert env.get_wrapper_attr("dataset") is dataset
    assert env.get_wrapper_attr("action_masks") is not None


def test_maskable_ppo_learns_from_action_masks_without_an_invalid_pick(pool_dataset):
    sb3_contrib = pytest.importorskip("sb3_contrib")

    class Counter(gym.Wrapper):
        invalid = 0

        def step(self, action):
            result = self.env.step(action)
            self.invalid += result[-1]["invalid_action"]
            return result

        def action_masks(self):
            return self.env.get_wrapper_attr("action_masks")()

    env = Counter(gym.make(ENV_ID, dataset=pool_dataset, observation="ids"))
    model = sb3_contrib.MaskablePPO("MultiInputPolicy", env, n_steps=64, batch_size=32, n_epochs=1, seed=0)
    model.learn(128)
    assert env.invalid == 0 and model.num_timesteps == 128


def test_what_an_episode_keeps_beside_its_state_is_what_follows_from_it(dataset):
    """The masks and counts that steps keep up to date, against those that mdp works out from the state alone."""
    env = ChainRetrievalEnv(dataset, max_steps=4, stop_when_complete=False)
    rng = np.random.default_rng(0)
    for question in [*range(len(dataset))] * 8:
        env.reset(options={"question": question})
        replayed = env.states
        for _ in range(4):
            action = rng.integers(env.action_space.n)
            replayed = mdp.step(replayed, mdp.action_ids(replayed, np.array([action])))
            observation, _, _, _, info = env.step(action)
            for mine, theirs in zip(vars(env.states).values(), vars(replayed).values(), strict=True):
                np.testing.assert_array_equal(mine, theirs)
            found = mdp.found_gold(replayed, dataset)
            assert info["gold_found"] == found.sum() and info["complete"] == mdp.is_complete(replayed, dataset)[0]
            np.testing.assert_array_equal(env.action_masks(), mdp.action_mask(replayed, env.action_space.n)[0])
            assert (observation["picked"] >= 0).sum() == replayed.count[0]


def test_a_reward_function_may_keep_the_states_that_it_saw(pool_dataset):
    seen = []

    def reward(states, picks, dataset):
        seen.append(states)
        return np.zeros(len(picks))

    env = ChainRetrievalEnv(pool_dataset, reward=reward, stop_when_complete=False)
    env.reset(options={"question": 0})
    for action in (0, 1, 2):
        env.step(action)
    assert [states.count[0] for states in seen] == [0, 1, 2] and [states.steps_left[0] for states in seen] == [4, 3, 2]
