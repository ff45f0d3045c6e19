import numpy as np
import pytest
from conftest import make_dataset
from hypothesis import given
from hypothesis import strategies as st

from retrieval_gym import mdp, rewards
from retrieval_gym.datasets import RetrievalDataset

MAX_STEPS = 4


@st.composite
def games(draw: st.DrawFn) -> tuple[RetrievalDataset, int, list[int]]:
    """A dataset, a question and the actions of one full episode, valid or not."""
    data = make_dataset(draw(st.sampled_from(["pool", "corpus"])))
    question = draw(st.integers(0, len(data) - 1))
    actions = st.integers(0, (data.max_pool or len(data.corpus)) - 1)
    return data, question, draw(st.lists(actions, min_size=MAX_STEPS, max_size=MAX_STEPS))


def first_states(data: RetrievalDataset, questions: list[int], max_steps: int = MAX_STEPS) -> mdp.States:
    """Pools as wide as the dataset's widest, as the environment pads them."""
    pools = None if data.pools is None else mdp.pad_pools([data.pools[i] for i in questions], data.max_pool)
    return mdp.initial_states(np.array(questions), pools, max_steps)


def text_oracle(data: RetrievalDataset, question: int, picked: list[int]) -> set[tuple[str, str]]:
    """Gold passages still missing, told apart by their text and nothing else."""

    def text(i: int) -> tuple[str, str]:
        return data.corpus[i].title, data.corpus[i].text

    return {text(g) for g in data.questions[question].gold} - {text(p) for p in picked}


@given(games())
def test_an_episode_against_a_brute_force_player(game):
    data, question, actions = game
    states = first_states(data, [question])
    candidates = list(range(len(data.corpus))) if data.pools is None else data.pools[question].tolist()
    picked: list[int] = []
    total = 0.0
    for t, action in enumerate(actions):
        ids = mdp.action_ids(states, np.array([action]))
        before = states.picked.copy()
        mask = mdp.action_mask(states, len(data.corpus))
        expected = candidates[action] if action < len(candidates) else -1
        valid = expected >= 0 and expected not in picked
        assert ids[0] == expected
        assert mdp.is_legal(states, ids)[0] == valid == mask[0, action]
        missing = text_oracle(data, question, picked)
        if valid:
            picked.append(expected)
        still = text_oracle(data, question, picked)

        reward = rewards.complete(states, np.where(mdp.is_legal(states, ids), ids, -1), data)
        after = mdp.step(states, ids)
        assert reward.dtype == np.float64 and reward.tolist() == [float(bool(missing) and not still)]
        total += reward[0]
        np.testing.assert_array_equal(states.picked, before)
        assert after.picked[0].tolist() == picked + [-1] * (MAX_STEPS - len(picked))
        assert after.steps_left.tolist() == [MAX_STEPS - t - 1]
        assert mdp.is_complete(after, data)[0] == (not still)
        gold = data.gold[question][data.gold[question] >= 0]
        assert mdp.found_gold(after, data)[0, : len(gold)].sum() == len(gold) - len(still)
        new_mask = mdp.action_mask(after, len(data.corpus))
        assert mask.sum() - new_mask.sum() == valid
        states = after
    assert total in (0.0, 1.0)
    assert total == float(not text_oracle(data, question, picked))


@given(st.integers(0, 4), st.randoms(use_true_random=False), st.sampled_from(["pool", "corpus"]))
def test_gold_in_any_order_succeeds_at_the_last_one(question, random, form):
    data = make_dataset(form)
    gold = list(data.questions[question].gold)
    random.shuffle(gold)
    states = first_states(data, [question])
    paid = []
    for passage in gold:
        paid.append(rewards.complete(states, np.array([passage]), data)[0])
        states = mdp.step(states, np.array([passage]))
    assert paid == [0.0] * (len(gold) - 1) + [1.0]


def test_a_copy_of_a_gold_passage_counts_once():
    data = make_dataset()
    states = first_states(data, [0])
    for passage, found in ((7, 1), (1, 1), (0, 2)):
        states = mdp.step(states, np.array([passage]))
        assert mdp.found_gold(states, data).sum() == found
    assert mdp.is_complete(states, data)[0]


def test_batches_are_independent_rows():
    data = make_dataset()
    rng = np.random.default_rng(0)
    states = first_states(data, [0, 1, 2, 3, 4])
    alone = [first_states(data, [i]) for i in range(5)]
    for _ in range(MAX_STEPS):
        actions = rng.integers(0, data.max_pool, 5)
        states = mdp.step(states, mdp.action_ids(states, actions))
        alone = [mdp.step(s, mdp.action_ids(s, actions[[i]])) for i, s in enumerate(alone)]
    for name in ("question", "pool", "picked", "steps_left"):
        rows = np.concatenate([getattr(s, name) for s in alone])
        np.testing.assert_array_equal(getattr(states, name), rows)
    np.testing.assert_array_equal(states.count, (states.picked != -1).sum(axis=1))
    assert len(states[[1, 3]]) == 2


def test_dataset_states_pads_to_the_widest_pool_asked_for():
    states = mdp.dataset_states(make_dataset(), np.array([3, 0]), 2)
    assert states.pool.tolist() == [[3, 6, -1, -1, -1], [0, 1, 3, 7, 8]]
    assert states.picked.tolist() == [[-1, -1]] * 2 and states.steps_left.tolist() == [2, 2]
    assert mdp.dataset_states(make_dataset("corpus"), np.array([3]), 2).pool is None


def test_other_rewards_by_hand():
    data = make_dataset()
    states = first_states(data, [1])
    recall, penalty, gold = [], [], []
    for passage in (0, 9, 7, 2):
        picks = np.array([passage])
        recall.append(rewards.recall(states, picks, data)[0])
        gold.append(rewards.gold(states, picks, data)[0])
        penalty.append(rewards.complete_with_length_penalty(states, picks, data)[0])
        states = mdp.step(states, picks)
    np.testing.assert_allclose(recall, [1 / 3, 0, 1 / 3, 1 / 3])
    assert gold == [1, 0, 1, 1]
    np.testing.assert_allclose(penalty, [0, 0, 0, 0.5 + 0.5 * 3 / 4])


def test_unknown_reward_names_itself():
    with pytest.raises(ValueError, match="unknown reward 'dense'.*complete"):
        rewards.get_reward("dense")


@st.composite
def batches(draw: st.DrawFn) -> mdp.States:
    """States of few questions with few picks, so that many are equal."""
    data = make_dataset(draw(st.sampled_from(["pool", "corpus"])))
    states = first_states(data, draw(st.lists(st.integers(0, 2), min_size=1, max_size=12)))
    size = len(states)
    for _ in range(draw(st.integers(0, 3))):
        states = mdp.step(states, np.array(draw(st.lists(st.sampled_from([-1, 1, 8]), min_size=size, max_size=size))))
    return states


@given(batches())
def test_distinct_states_against_a_dictionary(states):
    first, place = states.distinct()
    keys = [(int(q), tuple(p)) for q, p in zip(states.question, states.picked.tolist(), strict=True)]
    assert first.dtype == place.dtype == np.int64 and place.shape == (len(states),)
    assert len(first) == len(set(keys)) and {keys[row] for row in first} == set(keys)
    assert [keys[row] for row in first[place]] == keys
    assert first.tolist() == [keys.index(keys[row]) for row in first]


def test_distinct_states_by_hand():
    """The order of the picks tells states apart; the steps that an invalid action used up do not."""
    data = make_dataset()
    states = first_states(data, [1, 1, 1, 0, 1])
    for picks in ([0, 0, 2, 0, -1], [2, 2, 0, -1, 0], [-1, -1, -1, -1, 2]):
        states = mdp.step(states, np.array(picks))
    first, place = states.distinct()
    assert sorted(first.tolist()) == [0, 2, 3]
    assert place[0] == place[1] == place[4] and len({place[0], place[2], place[3]}) == 3
    nothing = states[[]].distinct()
    assert [len(part) for part in nothing] == [0, 0]


@pytest.mark.parametrize("form", ["pool", "corpus"])
def test_concatenated_states_are_the_rows_in_order(form):
    data = make_dataset(form)
    whole = first_states(data, [3, 0, 1, 4])
    whole = mdp.step(whole, np.array([6, 7, -1, 2]))
    joined = mdp.concatenate([whole[:1], whole[1:1], whole[1:3], whole[[3, 0]]])
    rows = [0, 1, 2, 3, 0]
    for name in ("question", "picked", "steps_left"):
        found = getattr(joined, name)
        assert found.dtype == np.int64
        np.testing.assert_array_equal(found, getattr(whole, name)[rows])
    if form == "corpus":
        assert joined.pool is None
    else:
        np.testing.assert_array_equal(joined.pool, whole.pool[rows])
    np.testing.assert_array_equal(mdp.action_mask(joined, 10), mdp.action_mask(whole, 10)[rows])


@pytest.mark.parametrize("form", ["pool", "corpus"])
def test_states_of_different_budgets_or_pools_do_not_concatenate(form):
    data = make_dataset(form)
    with pytest.raises(ValueError, match="dimension"):
        mdp.concatenate([first_states(data, [0], 4), first_states(data, [0], 3)])
