"""Soft values, policy and returns against hand-made numbers, and against what public implementations get wrong."""

import itertools
import math

import pytest

torch = pytest.importorskip("torch")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from retrieval_gym.nn.scoring import (  # noqa: E402
    available,
    boltzmann_sample,
    boltzmann_sample_distinct,
    ema_update,
    lambda_returns,
    policy_entropy,
    soft_value,
)


def test_picked_and_padding_are_masked_before_the_top_k():
    q = torch.tensor([[9.0, 8.0, 1.0, 2.0, 3.0]])
    mask = torch.tensor([[False, False, True, True, True]])
    kept = available(q, mask, top_k=2)
    # Top-k first and mask second would leave nothing of the two best.
    assert kept.tolist() == [[-math.inf, -math.inf, -math.inf, 2.0, 3.0]]


def test_soft_value_by_hand_and_its_limits():
    q = torch.tensor([[0.2, 0.4, -math.inf]])
    by_hand = 0.1 * math.log(math.exp(2) + math.exp(4))
    assert soft_value(q, 0.1).item() == pytest.approx(by_hand, abs=1e-6)
    assert soft_value(q, 0.0).item() == pytest.approx(0.4)
    assert soft_value(q, 1e-4).item() == pytest.approx(0.4, abs=1e-3)
    assert soft_value(torch.full((1, 3), -math.inf), 0.1).tolist() == [0.0]


def test_masked_entries_do_not_change_the_soft_value():
    q = torch.randn(4, 6)
    mask = torch.ones(4, 6, dtype=torch.bool)
    wide = torch.cat([q, torch.full((4, 3), 50.0)], dim=1)
    wide_mask = torch.cat([mask, torch.zeros(4, 3, dtype=torch.bool)], dim=1)
    torch.testing.assert_close(soft_value(available(q, mask), 0.05), soft_value(available(wide, wide_mask), 0.05))


def test_the_policy_is_boltzmann_over_available_actions():
    q = torch.tensor([[0.1, 0.3, 0.2, 5.0]]).repeat(40_000, 1)
    mask = torch.tensor([[True, True, True, False]]).expand_as(q)
    actions = boltzmann_sample(available(q, mask), 0.1, torch.Generator().manual_seed(0))
    frequency = torch.bincount(actions, minlength=4) / len(actions)
    expected = torch.tensor([math.exp(1), math.exp(3), math.exp(2), 0.0])
    torch.testing.assert_close(frequency, expected / expected.sum(), atol=0.01, rtol=0)
    assert boltzmann_sample(available(q, mask), 0.0)[0] == 1


def test_distinct_samples_are_drawn_one_after_the_other_without_repetition():
    q = torch.tensor([[0.1, 0.3, 0.2, 5.0]]).repeat(40_000, 1)
    mask = torch.tensor([[True, True, True, False]]).expand_as(q)
    pairs = boltzmann_sample_distinct(available(q, mask), 0.1, 2, torch.Generator().manual_seed(0))
    weights = {0: math.exp(1), 1: math.exp(3), 2: math.exp(2)}
    total = sum(weights.values())
    for first, second in itertools.permutations(weights, 2):
        expected = weights[first] / total * weights[second] / (total - weights[first])
        share = ((pairs[:, 0] == first) & (pairs[:, 1] == second)).float().mean().item()
        assert share == pytest.approx(expected, abs=0.01)
    # Past the last available action stand those that are not; without a temperature the best come first.
    assert set(boltzmann_sample_distinct(available(q, mask), 0.1, 4)[:, 3].tolist()) == {3}
    assert boltzmann_sample_distinct(available(q, mask), 0.0, 3)[0].tolist() == [1, 2, 0]


def test_entropy_of_a_uniform_policy_is_log_n():
    q = available(torch.zeros(2, 5), torch.tensor([[True] * 5, [True] * 2 + [False] * 3]))
    assert policy_entropy(q, 0.3).tolist() == pytest.approx([math.log(5), math.log(2)], abs=1e-6)
    assert policy_entropy(q, 0.0).tolist() == [0.0, 0.0]


def naive_returns(rewards, dones, next_values, gamma, lam):
    """The definition as a weighted sum of n-step returns, cut at the segment's end and at episode ends."""
    steps = len(rewards)
    result = []
    for t in range(steps):
        n_step, discount, total = [], 1.0, 0.0
        for k in range(t, steps):
            total += discount * rewards[k]
            ended = dones[k]
            bootstrap = 0.0 if ended else discount * gamma * next_values[k]
            n_step.append(total + bootstrap)
            if ended:
                break
            discount *= gamma
        weights = [(1 - lam) * lam**i for i in range(len(n_step) - 1)] + [lam ** (len(n_step) - 1)]
        result.append(sum(w * g for w, g in zip(weights, n_step, strict=True)))
    return result


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_lambda_returns_are_the_mixture_of_n_step_returns(data):
    steps = data.draw(st.integers(1, 6))
    number = st.floats(-1, 1, width=32)
    rewards = data.draw(st.lists(number, min_size=steps, max_size=steps))
    values = data.draw(st.lists(number, min_size=steps, max_size=steps))
    dones = data.draw(st.lists(st.booleans(), min_size=steps, max_size=steps))
    gamma, lam = data.draw(st.floats(0, 1)), data.draw(st.floats(0, 1))
    ours = lambda_returns(
        torch.tensor(rewards)[:, None], torch.tensor(dones).float()[:, None], torch.tensor(values)[:, None], gamma, lam
    )
    assert ours[:, 0].tolist() == pytest.approx(naive_returns(rewards, dones, values, gamma, lam), abs=1e-5)


def test_every_step_bootstraps_from_its_own_successor():
    """By hand, three steps that end nothing: a version that reads V(s_t) or the tail's V twice gives other numbers."""
    rewards, dones = torch.zeros(3, 1), torch.zeros(3, 1)
    values = torch.tensor([[0.5], [0.25], [0.75]])
    g2 = 0.9 * 0.75
    g1 = 0.9 * (0.5 * g2 + 0.5 * 0.25)
    g0 = 0.9 * (0.5 * g1 + 0.5 * 0.5)
    assert lambda_returns(rewards, dones, values, 0.9, 0.5)[:, 0].tolist() == pytest.approx([g0, g1, g2])


def test_nothing_flows_over_an_episode_end():
    rewards = torch.tensor([[0.0], [1.0], [0.0]])
    dones = torch.tensor([[1.0], [1.0], [0.0]])
    values = torch.tensor([[99.0], [99.0], [0.5]])
    assert lambda_returns(rewards, dones, values, 0.9, 0.5)[:, 0].tolist() == pytest.approx([0.0, 1.0, 0.45])


def test_ema_moves_the_target_by_tau():
    online, target = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    expected = [0.9 * t + 0.1 * o for t, o in zip(target.parameters(), online.parameters(), strict=True)]
    ema_update(target, online, 0.1)
    for parameter, value in zip(target.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.detach(), value.detach())
