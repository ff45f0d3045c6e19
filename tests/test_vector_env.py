import json
from dataclasses import replace

import gymnasium as gym
import numpy as np
import pytest
from conftest import make_dataset, skip_without_data
from gymnasium.utils.env_checker import data_equivalence
from gymnasium.utils.passive_env_checker import data_shares_objects
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from hypothesis import given, settings
from hypothesis import strategies as st

from retrieval_gym import RetrievalDataset
from retrieval_gym.datasets import Corpus
from retrieval_gym.envs import ChainRetrievalEnv, ChainRetrievalVectorEnv
from retrieval_gym.registration import ENVIRONMENTS
from retrieval_gym.rewards import REWARDS

MODES = list(AutoresetMode)


def assert_equal(a, b, where: str = "") -> None:
    """Deep equality of values, types, shapes and dtypes."""
    assert type(a) is type(b), f"{where}: {type(a)} and {type(b)}"
    if isinstance(a, dict):
        assert a.keys() == b.keys(), where
        for key in a:
            assert_equal(a[key], b[key], f"{where}.{key}")
    elif isinstance(a, (tuple, list)):
        assert len(a) == len(b), where
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            assert_equal(x, y, f"{where}[{i}]")
    elif isinstance(a, np.ndarray):
        assert a.dtype == b.dtype and a.shape == b.shape, f"{where}: {a.dtype}{a.shape} and {b.dtype}{b.shape}"
        if a.dtype == object:
            assert_equal(a.tolist(), b.tolist(), where)
        else:
            np.testing.assert_array_equal(a, b, err_msg=where)
    else:
        assert a == b, f"{where}: {a!r} and {b!r}"


def make_pair(num_envs: int, mode: AutoresetMode, **kwargs) -> tuple[ChainRetrievalVectorEnv, SyncVectorEnv]:
    native = ChainRetrievalVectorEnv(num_envs, autoreset_mode=mode, **kwargs)
    return native, SyncVectorEnv([lambda: ChainRetrievalEnv(**kwargs)] * num_envs, autoreset_mode=mode)


def play_both(native, sync, rng, steps: int, seed) -> int:
    """Step both with random actions, compare all they return, and return how many episodes ended."""
    assert_equal(native.reset(seed=seed), sync.reset(seed=seed), "reset")
    finished, ended = 0, np.zeros(native.num_envs, bool)
    for t in range(steps):
        if native.autoreset_mode == AutoresetMode.DISABLED and ended.any():
            options = {"reset_mask": ended}
            given = dict(options)
            assert_equal(native.reset(options=given), sync.reset(options=dict(options)), f"masked reset {t}")
            assert given.keys() == options.keys()
        actions = rng.integers(0, native.single_action_space.n, native.num_envs)
        ours, theirs = native.step(actions), sync.step(actions)
        assert_equal(ours, theirs, f"step {t}")
        assert ours[0] in native.observation_space
        ended = ours[2]
        finished += ended.sum()
    return finished


@pytest.mark.parametrize("stop_when_complete", [True, False])
@pytest.mark.parametrize("form", ["pool", "corpus"])
@pytest.mark.parametrize("observation", ["text", "ids"])
@pytest.mark.parametrize("mode", MODES)
def test_equals_sync_vector_env(mode, observation, form, stop_when_complete):
    native, sync = make_pair(
        5,
        mode,
        dataset=make_dataset(form),
        max_steps=4,
        observation=observation,
        stop_when_complete=stop_when_complete,
        reward="recall",
    )
    assert native.observation_space == sync.observation_space and native.action_space == sync.action_space
    assert native.single_observation_space == sync.single_observation_space
    assert native.metadata == sync.metadata
    rng = np.random.default_rng(0)
    assert play_both(native, sync, rng, 40, seed=7) >= 30
    play_both(native, sync, rng, 10, seed=None)
    play_both(native, sync, rng, 10, seed=[3, None, 5, 3, None])
    states = [generator.bit_generator.state for generator in native.np_random]
    assert states == [generator.bit_generator.state for generator in sync.np_random]
    assert native.np_random_seed == sync.np_random_seed


@settings(deadline=None, max_examples=30)
@given(
    st.integers(1, 6),
    st.integers(1, 6),
    st.sampled_from(MODES),
    st.sampled_from(sorted(REWARDS)),
    st.integers(0, 2**31),
)
def test_equals_sync_vector_env_for_any_size_budget_and_reward(num_envs, max_steps, mode, reward, seed):
    dataset = make_dataset("pool" if seed % 2 else "corpus")
    native, sync = make_pair(
        num_envs, mode, dataset=dataset, max_steps=max_steps, reward=reward, allow_unreachable=True
    )
    play_both(native, sync, np.random.default_rng(seed), 8, seed=seed)


@pytest.mark.parametrize("mode", MODES)
def test_equals_sync_vector_env_with_pools_made_anew(mode, pool_dataset):
    class Shuffled(RetrievalDataset):
        def pool(self, i, rng=None):
            return super().pool(i) if rng is None else rng.permutation(super().pool(i))

    data = Shuffled("shuffled", "train", pool_dataset.corpus, pool_dataset.questions, pool_dataset.pools)
    native, sync = make_pair(4, mode, dataset=data)
    assert play_both(native, sync, np.random.default_rng(1), 25, seed=11) > 10


def test_row_i_plays_what_a_single_environment_seeded_with_seed_plus_i_plays(dataset):
    native = ChainRetrievalVectorEnv(3, dataset)
    rng = np.random.default_rng(2)
    single = [ChainRetrievalEnv(dataset) for _ in range(3)]
    native.reset(seed=40)
    for i, env in enumerate(single):
        env.reset(seed=40 + i)
    for _ in range(30):
        actions = rng.integers(0, native.single_action_space.n, 3)
        _, rewards, terminations, _, infos = native.step(actions)
        for i, env in enumerate(single):
            _, reward, terminated, _, info = env.step(actions[i])
            assert (reward, terminated) == (rewards[i], terminations[i])
            if terminated:
                assert infos["final_info"]["question_index"][i] == info["question_index"]
                _, info = env.reset()
            assert infos["question_index"][i] == info["question_index"]


def test_make_vec_uses_the_native_environment_by_default(dataset):
    native = gym.make_vec("ChainRetrieval-v0", num_envs=3, dataset=dataset)
    assert type(native) is ChainRetrievalVectorEnv
    assert native.metadata["autoreset_mode"] is AutoresetMode.SAME_STEP
    later = gym.make_vec("ChainRetrieval-v0", num_envs=3, dataset=dataset, autoreset_mode="NextStep")
    assert later.metadata["autoreset_mode"] is AutoresetMode.NEXT_STEP
    sync = gym.make_vec(
        "ChainRetrieval-v0",
        num_envs=3,
        vectorization_mode="sync",
        vector_kwargs={"autoreset_mode": AutoresetMode.SAME_STEP},
        dataset=dataset,
    )
    assert type(sync) is SyncVectorEnv
    assert play_both(native, sync, np.random.default_rng(0), 20, seed=0) > 10


@pytest.mark.parametrize("env_id", sorted(ENVIRONMENTS))
def test_make_vec_of_every_id_whose_data_are_present(env_id, recwarn):
    with skip_without_data(env_id):
        envs = gym.make_vec(env_id, num_envs=2)
    first = envs.reset(seed=1)
    assert first[0] in envs.observation_space
    for _ in range(2 * envs.max_steps):
        actions = envs.action_space.sample()
        observation, rewards, terminations, truncations, _ = envs.step(actions)
        assert observation in envs.observation_space
        assert rewards.dtype == np.float64 and terminations.dtype == truncations.dtype == np.bool_
    assert data_equivalence(envs.reset(seed=1), first, exact=True)
    assert not [str(warning.message) for warning in recwarn]


def test_a_question_can_be_chosen_for_each_row(pool_dataset):
    envs = ChainRetrievalVectorEnv(3, pool_dataset)
    assert envs.reset(options={"question": 2})[1]["question_index"].tolist() == [2, 2, 2]
    assert envs.reset(options={"question": np.array([4, 0, 1])})[1]["question_index"].tolist() == [4, 0, 1]
    options = {"question": np.array([3, 3, 3]), "reset_mask": np.array([True, False, True])}
    observation, infos = envs.reset(options=options)
    assert infos["question_index"].tolist() == [3, 0, 3] and infos["_question_index"].tolist() == [True, False, True]
    assert observation["question"][1] == pool_dataset.questions[0].text
    assert envs.states.question.tolist() == [3, 0, 3]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("observation", ["text", "ids"])
def test_what_was_returned_can_be_written_to(mode, observation, dataset):
    """Filling every returned array with nonsense does not change what follows."""

    def scribble(value) -> None:
        if isinstance(value, dict):
            for part in value.values():
                scribble(part)
        elif isinstance(value, np.ndarray) and value.dtype == object:
            for part in value:
                scribble(part)
            value.fill(None)
        elif isinstance(value, np.ndarray):
            value.fill(1)

    kwargs = {"dataset": dataset, "observation": observation, "autoreset_mode": mode}
    written, clean = ChainRetrievalVectorEnv(4, **kwargs), ChainRetrievalVectorEnv(4, **kwargs)
    rng = np.random.default_rng(0)
    results = [written.reset(seed=0)]
    clean.reset(seed=0)
    for t in range(12):
        for part in results[-1]:
            scribble(part)
        scribble(written.action_masks())
        for array in (written.states.picked, written.states.question, written.states.steps_left):
            scribble(array)
        actions = rng.integers(0, written.single_action_space.n, 4)
        results.append(written.step(actions.copy()))
        expected = clean.step(actions)
        assert_equal(results[-1], expected, f"step {t}")
        assert not any(data_shares_objects(results[-1][i], results[-2][-1 if i == 4 else i]) for i in (0, 4))
        if mode == AutoresetMode.DISABLED and expected[2].any():
            results.append(written.reset(options={"reset_mask": expected[2].copy()}))
            clean.reset(options={"reset_mask": expected[2]})


def test_action_masks_agree_with_infos(pool_dataset):
    envs = ChainRetrievalVectorEnv(4, pool_dataset)
    envs.reset(seed=0)
    *_, infos = envs.step(np.array([0, 1, 0, 1]))
    np.testing.assert_array_equal(envs.action_masks(), infos["action_mask"].astype(bool))


def test_wrong_actions_are_rejected_before_any_row_moves(pool_dataset):
    envs = ChainRetrievalVectorEnv(2, pool_dataset)
    envs.reset(seed=0)
    for actions in ([0, 7], [-1, 0], [0.0, 1.0], [0], [[0, 1]], 0):
        with pytest.raises(ValueError, match="action"):
            envs.step(np.array(actions))
    assert envs.states.steps_left.tolist() == [4, 4]


def test_rows_that_reset_ignore_their_action_in_next_step_mode(pool_dataset):
    envs = ChainRetrievalVectorEnv(2, pool_dataset, autoreset_mode="NextStep", max_steps=5)
    envs.reset(options={"question": np.array([3, 0])})
    assert envs.step(np.array([0, 0]))[2].tolist() == [True, False]
    observation, rewards, terminations, *_ = envs.step(np.array([99, 1]))
    assert rewards.tolist() == [0.0, 1.0] and observation["steps_left"].tolist() == [5, 3]
    assert terminations.tolist() == [False, True]


def test_errors_say_what_to_do(pool_dataset):
    with pytest.raises(ValueError, match="num_envs.*got 0"):
        ChainRetrievalVectorEnv(0, pool_dataset)
    with pytest.raises(ValueError, match="Sometimes"):
        ChainRetrievalVectorEnv(1, pool_dataset, autoreset_mode="Sometimes")
    envs = ChainRetrievalVectorEnv(2, pool_dataset, autoreset_mode="Disabled")
    with pytest.raises(gym.error.ResetNeeded):
        envs.step(np.array([0, 0]))
    with pytest.raises(gym.error.ResetNeeded, match="every row"):
        envs.reset(options={"reset_mask": np.array([True, False])})
    envs.reset(options={"question": np.array([3, 0])})
    envs.step(np.array([0, 0]))
    with pytest.raises(gym.error.ResetNeeded, match=r"\[0\].*reset_mask"):
        envs.step(np.array([0, 0]))
    for mask in ([True, False], np.array([1, 0]), np.array([True]), np.array([False, False])):
        with pytest.raises(ValueError, match="reset_mask"):
            envs.reset(options={"reset_mask": mask})
    with pytest.raises(ValueError, match="3 seeds"):
        envs.reset(seed=[1, 2, 3])
    for question in (9, np.array([0, 9]), np.array([0, 1, 2])):
        with pytest.raises(ValueError, match="question"):
            envs.reset(options={"question": question})


def test_render_gives_one_transcript_a_row(pool_dataset):
    native, sync = make_pair(3, AutoresetMode.SAME_STEP, dataset=pool_dataset, render_mode="ansi")
    native.reset(seed=0)
    sync.reset(seed=0)
    for actions in ([0, 1, 0], [1, 1, 0]):
        native.step(np.array(actions))
        sync.step(np.array(actions))
        assert native.render() == sync.render()


def test_human_mode_prints_the_episode_that_just_ended(pool_dataset, capsys):
    envs = ChainRetrievalVectorEnv(1, pool_dataset, render_mode="human")
    envs.reset(options={"question": 3})
    capsys.readouterr()
    envs.step(np.array([0]))
    assert "Question 3" in (printed := capsys.readouterr().out) and "Complete: 1 of 1" in printed


class Reshuffled(RetrievalDataset):
    """Makes each pool anew, from the row's generator."""

    def pool(self, i, rng=None):
        return super().pool(i) if rng is None else rng.permutation(super().pool(i))


def go_on(envs, rng, steps: int, ended) -> list:
    """Step with random actions, reset by hand where the mode asks for it, and return all that came back."""
    returned = []
    for _ in range(steps):
        if envs.autoreset_mode == AutoresetMode.DISABLED and ended.any():
            returned.append(envs.reset(options={"reset_mask": ended.copy()}))
        returned.append(envs.step(rng.integers(0, envs.single_action_space.n, envs.num_envs)))
        ended = returned[-1][2]
    return returned


@pytest.mark.parametrize("form", ["pool", "corpus", "pools made anew"])
def test_rows_with_one_seed_play_the_same_questions_in_step_whatever_they_pick(form):
    """Without stopping on gold every episode takes the whole budget, so equal generators draw at the same time."""
    dataset = make_dataset("corpus" if form == "corpus" else "pool")
    if form == "pools made anew":
        dataset = Reshuffled("reshuffled", "train", dataset.corpus, dataset.questions, dataset.pools)
    envs = ChainRetrievalVectorEnv(6, dataset, stop_when_complete=False)
    rng, questions, apart = np.random.default_rng(0), [], 0
    envs.reset(seed=[5, 5, 5, 6, 6, 6])
    for t in range(60):
        states = envs.states
        assert np.unique(states.steps_left).tolist() == [4 - t % 4]
        groups = states.question.reshape(2, 3)
        assert (groups == groups[:, :1]).all()
        if states.pool is not None:
            pools = states.pool.reshape(2, 3, -1)
            assert (pools == pools[:, :1]).all()
        questions.append(groups[:, 0].tolist())
        apart += (states.picked[0] != states.picked[1]).any()
        envs.step(rng.integers(0, envs.single_action_space.n, 6))
    assert apart > 20 and any(a != b for a, b in questions) and len({a for a, _ in questions}) > 2


@pytest.mark.parametrize("through_json", [False, True], ids=["as is", "through JSON"])
@pytest.mark.parametrize("form", ["pool", "corpus", "pools made anew"])
@pytest.mark.parametrize("observation", ["text", "ids"])
@pytest.mark.parametrize("mode", MODES)
def test_going_on_from_a_saved_state_equals_going_on(mode, observation, form, through_json):
    dataset = make_dataset("corpus" if form == "corpus" else "pool")
    if form == "pools made anew":
        dataset = Reshuffled("reshuffled", "train", dataset.corpus, dataset.questions, dataset.pools)

    def make():
        return ChainRetrievalVectorEnv(
            5, dataset, observation=observation, autoreset_mode=mode, reward="recall", render_mode="ansi"
        )

    for steps in (0, 1, 3, 4, 6):
        envs = make()
        first, ended = envs.reset(seed=steps), np.zeros(5, bool)
        played = go_on(envs, np.random.default_rng(steps), steps, ended)
        last_obs, last_info = (played[-1][0], played[-1][-1]) if played else first
        ended = played[-1][2] if played else ended
        state = envs.get_state()
        if through_json:
            state = json.loads(json.dumps(state))
        written = json.dumps(state)
        other = make()
        other.reset(seed=99)
        obs, info = other.set_state(state)
        assert_equal(obs, last_obs, f"observation after {steps}")
        current = {key: value for key, value in last_info.items() if not key.lstrip("_").startswith("final")}
        assert_equal(info, current, f"info after {steps}")
        assert other.render() == envs.render()
        expected = go_on(envs, np.random.default_rng(7), 9, ended)
        assert_equal(go_on(other, np.random.default_rng(7), 9, ended), expected, f"continued after {steps}")
        assert_equal(other.get_state(), envs.get_state(), "state")
        assert json.dumps(state) == written
        assert sum(part[2].sum() for part in expected if len(part) == 5) >= 3


def test_a_saved_state_needs_the_rows_the_budget_and_the_questions_it_was_saved_with(dataset):
    envs = ChainRetrievalVectorEnv(3, dataset)
    with pytest.raises(gym.error.ResetNeeded):
        envs.get_state()
    envs.reset(options={"question": np.array([0, 4, 1])})
    state = envs.get_state()
    with pytest.raises(ValueError, match="3 rows and num_envs is 2"):
        ChainRetrievalVectorEnv(2, dataset).set_state(state)
    with pytest.raises(ValueError, match="budget 4, here is 5"):
        ChainRetrievalVectorEnv(3, dataset, max_steps=5).set_state(state)
    with pytest.raises(ValueError, match="number of questions 5, here is 3: go on with the dataset"):
        ChainRetrievalVectorEnv(3, dataset.select([0, 1, 2])).set_state(state)
    others = [
        replace(dataset, corpus=Corpus(dataset.corpus.titles, [f"{p.text}!" for p in dataset.corpus])),
        replace(dataset, questions=[replace(q, id=f"{q.id}!") for q in dataset.questions]),
        replace(dataset, questions=[replace(q, gold=q.gold[::-1]) for q in dataset.questions]),
    ]
    if dataset.pools is not None:
        others.append(replace(dataset, pools=[pool[::-1] for pool in dataset.pools]))
    for other in others:
        with pytest.raises(ValueError, match="fingerprint.*go on with the dataset"):
            ChainRetrievalVectorEnv(3, other).set_state(state)
    ChainRetrievalVectorEnv(3, replace(dataset)).set_state(state)


@pytest.mark.parametrize(
    ("part", "value", "message"),
    [
        ("question", [-5, 0, 0], "'question'.*between 0 and 4, got -5"),
        ("question", [0, 0], r"'question'.*shape \(3,\)"),
        ("steps_left", [9, 4, 4], "'steps_left'.*between 0 and 4, got 9"),
        ("steps_left", [0, 4, 4], "'ended'.*row 0"),
        ("picked", [[0, 0, -1, -1]] + [[-1] * 4] * 2, "which no episode has"),
        ("picked", [[-1, 0, -1, -1]] + [[-1] * 4] * 2, "which no episode has"),
        ("picked", [[0, -1, -1, -1]] + [[-1] * 4] * 2, "4 steps left in row 0, which no episode has"),
        ("picked", [[0, -1], [0]], "'picked'"),
        ("invalid_action", [0, 1, 2], "'invalid_action'.*3 bools"),
        ("ended", [True, False, False], "'ended'.*row 0"),
        ("generators", [], "0 generators for 3 rows"),
        ("generators", [{}, {}, {}], "holds no generator"),
        ("generators", [5, 5, 5], "holds no generator"),
    ],
)
def test_a_damaged_state_is_refused_and_changes_nothing(dataset, part, value, message):
    envs = ChainRetrievalVectorEnv(3, dataset)
    envs.reset(seed=0)
    state = envs.get_state()
    envs.step(np.zeros(3, np.int64))
    before = envs.get_state()
    (state if part in state else state["episodes"])[part] = value
    with pytest.raises(ValueError, match=message):
        envs.set_state(state)
    assert_equal(envs.get_state(), before)


@pytest.mark.parametrize("part", ["episodes", "ended", "generators", "of", "picked"])
def test_a_state_without_a_part_is_refused(dataset, part):
    envs = ChainRetrievalVectorEnv(3, dataset)
    envs.reset(seed=0)
    state = envs.get_state()
    del (state if part in state else state["episodes"])[part]
    with pytest.raises(ValueError, match=f"lacks '{part}'"):
        envs.set_state(state)


@pytest.mark.parametrize("seed", [1.5, "12", [0, 1.5], [0, -1], -1])
def test_a_bad_seed_is_named_and_changes_nothing(dataset, seed):
    envs = ChainRetrievalVectorEnv(2, dataset)
    envs.reset(seed=3)
    before = envs.get_state()
    with pytest.raises(ValueError, match="seed must"):
        envs.reset(seed=seed)
    assert_equal(envs.get_state(), before)


def test_options_must_be_a_dictionary(dataset):
    for envs in (ChainRetrievalVectorEnv(2, dataset), ChainRetrievalEnv(dataset)):
        with pytest.raises(TypeError, match="options must be a dictionary.*got 5"):
            envs.reset(options=5)


def test_a_reward_that_is_no_number_is_refused(dataset):
    envs = ChainRetrievalVectorEnv(2, dataset, reward=lambda states, picks, dataset: np.array([0.0, np.nan]))
    envs.reset(seed=0)
    with pytest.raises(ValueError, match="reward function returned nan"):
        envs.step(np.zeros(2, np.int64))


@pytest.mark.parametrize("form", ["pool", "corpus"])
@pytest.mark.parametrize("reward", sorted(REWARDS))
def test_lookahead_says_what_each_action_would_do_and_moves_nothing(form, reward):
    envs = ChainRetrievalVectorEnv(4, make_dataset(form), observation="ids", reward=reward, max_steps=4)
    rng = np.random.default_rng(0)
    with pytest.raises(gym.error.ResetNeeded):
        envs.lookahead(np.zeros((4, 1), np.int64))
    envs.reset(seed=0)
    for _ in range(12):
        before = json.dumps(envs.get_state())
        actions = rng.integers(0, envs.single_action_space.n, (4, 3))
        following, rewards, ended = envs.lookahead(actions)
        assert json.dumps(envs.get_state()) == before
        assert rewards.dtype == np.float64 and ended.dtype == np.bool_ and rewards.shape == ended.shape == (4, 3)
        for column in range(3):
            envs.set_state(json.loads(before))
            _, paid, terminated, _, infos = envs.step(actions[:, column])
            np.testing.assert_array_equal(rewards[:, column], paid)
            np.testing.assert_array_equal(ended[:, column], terminated)
            rows = np.flatnonzero(~terminated)
            found = following[np.arange(4) * 3 + column]
            for name in ("question", "picked", "steps_left"):
                np.testing.assert_array_equal(getattr(found, name)[rows], getattr(envs.states, name)[rows])
    for bad in (np.zeros(4, np.int64), np.zeros((3, 2), np.int64), np.zeros((4, 2))):
        with pytest.raises(ValueError, match=r"actions must be whole numbers of shape \(4, n\)"):
            envs.lookahead(bad)
    with pytest.raises(ValueError, match="is outside Discrete"):
        envs.lookahead(np.full((4, 2), 99))
