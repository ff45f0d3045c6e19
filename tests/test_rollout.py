"""Segments of experience, against the environment's own states."""

import gymnasium as gym
import numpy as np
import pytest

pytest.importorskip("torch")

from conftest import make_dataset  # noqa: E402

from retrieval_gym import mdp  # noqa: E402
from retrieval_gym.nn.rollout import Rollout, states_from  # noqa: E402


def assert_states(found: mdp.States, expected: mdp.States) -> None:
    for name in ("question", "pool", "picked", "steps_left"):
        a, b = getattr(found, name), getattr(expected, name)
        assert (a is None) == (b is None), name
        if a is not None:
            assert a.dtype == b.dtype == np.int64
            np.testing.assert_array_equal(a, b, err_msg=name)


def make_envs(form):
    return gym.make_vec("ChainRetrieval-v0", num_envs=5, dataset=make_dataset(form), observation="ids", max_steps=4)


@pytest.mark.parametrize("form", ["pool", "corpus"])
def test_states_are_those_of_the_environment(form):
    envs, rng = make_envs(form), np.random.default_rng(0)
    obs, info = envs.reset(seed=3)
    for _ in range(20):
        assert_states(states_from(obs, info), envs.unwrapped.states)
        obs, *_, info = envs.step(rng.integers(0, envs.single_action_space.n, 5))


@pytest.mark.parametrize("form", ["pool", "corpus"])
def test_a_segment_holds_what_was_played_and_only_states_that_follow_within_an_episode(form):
    envs, rng = make_envs(form), np.random.default_rng(1)
    obs, info = envs.reset(seed=0)
    ends = 0
    for _ in range(6):
        rollout, followed = Rollout(), []
        for t in range(3):
            states = states_from(obs, info)
            actions = rng.integers(0, envs.single_action_space.n, 5)
            obs, rewards, terminated, truncated, info = envs.step(actions)
            rollout.add(states, actions, rewards, terminated | truncated)
            # By the rules: an episode that goes on has one step less and the pick at its end.
            after = envs.unwrapped.states
            for b in np.flatnonzero(~terminated):
                assert after.steps_left[b] == states.steps_left[b] - 1
                followed.append((t * 5 + b, after[[b]]))
            ends += terminated.sum()
        found, rows = rollout.successors(states_from(obs, info))
        assert rows.tolist() == [row for row, _ in followed] and rows.dtype == np.int64
        if followed:
            assert_states(found, mdp.concatenate([state for _, state in followed]))
        picks = rollout.picks().reshape(3, 5)
        for t, (states, actions) in enumerate(zip(rollout.states, rollout.actions, strict=True)):
            for b in range(5):
                expected = actions[b] if states.pool is None else states.pool[b, actions[b]]
                assert picks[t, b] == expected
    assert ends > 10


def test_a_segment_that_only_ends_episodes_has_no_states_to_value():
    envs = gym.make_vec(
        "ChainRetrieval-v0", num_envs=2, dataset=make_dataset(), observation="ids", max_steps=1, allow_unreachable=True
    )
    obs, info = envs.reset(seed=0)
    states, actions = states_from(obs, info), np.zeros(2, np.int64)
    obs, rewards, terminated, truncated, info = envs.step(actions)
    rollout = Rollout()
    rollout.add(states, actions, rewards, terminated | truncated)
    found, rows = rollout.successors(states_from(obs, info))
    assert len(found) == len(rows) == 0
