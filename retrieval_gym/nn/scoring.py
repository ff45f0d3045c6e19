"""Soft values, the Boltzmann policy and lambda-returns, over the available actions only."""

from __future__ import annotations

import torch
from torch import Tensor

EMPTY = float("-inf")


def available(q: Tensor, mask: Tensor, top_k: int | None = None) -> Tensor:
    """Mask first, then keep the ``top_k`` best: what is not available becomes -inf, ``(B, P)`` to ``(B, P)``.

    Args:
        q: action values, ``(B, P)``.
        mask: True where the action can be picked, bool ``(B, P)``.
        top_k: how many of the available actions to keep; None keeps all.
    """
    q = q.masked_fill(~mask, EMPTY)
    if top_k is None or top_k >= q.shape[1]:
        return q
    best = q.topk(top_k, dim=1)
    return torch.full_like(q, EMPTY).scatter(1, best.indices, best.values)


def soft_value(q: Tensor, alpha: float) -> Tensor:
    """V(s) = alpha log sum_a exp(Q(s, a) / alpha) over finite entries; the maximum at alpha 0; 0 where nothing is left.

    Args:
        q: action values with -inf where not available, ``(B, P)``.
        alpha: temperature, at least 0.

    Returns:
        Values, ``(B,)``.
    """
    value = alpha * torch.logsumexp(q / alpha, dim=1) if alpha > 0 else q.amax(dim=1)
    return value.masked_fill(value == EMPTY, 0.0)


def boltzmann_sample(q: Tensor, alpha: float, generator: torch.Generator | None = None) -> Tensor:
    """Sample pi(a|s) ~ exp(Q(s, a) / alpha) over finite entries (Gumbel-max); the greedy action at alpha 0.

    Args:
        q: action values with -inf where not available, ``(B, P)``.
        alpha: temperature, at least 0.
        generator: where the noise comes from, on the device of ``q``.

    Returns:
        Actions, int64 ``(B,)``. A row with nothing available gives an action that the environment calls invalid.
    """
    return boltzmann_sample_distinct(q, alpha, 1, generator)[:, 0]


def boltzmann_sample_distinct(q: Tensor, alpha: float, count: int, generator: torch.Generator | None = None) -> Tensor:
    """Sample ``count`` different actions of each row one after the other, int64 ``(B, count)`` (Gumbel-top-k).

    Arguments as of ``boltzmann_sample``. Past the last available action stand actions that are not.
    """
    if alpha == 0:
        return q.topk(count, dim=1).indices
    uniform = torch.rand(q.shape, device=q.device, generator=generator).clamp_min(torch.finfo(torch.float32).tiny)
    return (q.float() / alpha - torch.log(-torch.log(uniform))).topk(count, dim=1).indices


def policy_entropy(q: Tensor, alpha: float) -> Tensor:
    """Entropy of the Boltzmann policy in nats, ``(B,)``; 0 at alpha 0 and where nothing is available."""
    if alpha == 0:
        return q.new_zeros(q.shape[0])
    log_p = torch.log_softmax(q / alpha, dim=1)
    return -torch.where(q == EMPTY, 0.0, log_p.exp() * log_p).nan_to_num().sum(dim=1)


def lambda_returns(rewards: Tensor, dones: Tensor, next_values: Tensor, gamma: float, lam: float) -> Tensor:
    """G_t = r_t + gamma (1 - d_t) [lam G_{t+1} + (1 - lam) V(s_{t+1})], and r + gamma (1 - d) V(s_next) at the tail.

    Args:
        rewards: ``(T, B)``.
        dones: 1 where the episode ended at this step, ``(T, B)``.
        next_values: V of the state that follows each step, ``(T, B)``; read only where the episode goes on.
        gamma: discount.
        lam: the mixture of one-step and longer returns.

    Returns:
        Returns, ``(T, B)``.
    """
    returns = torch.empty_like(rewards)
    discount = gamma * (1 - dones)
    returns[-1] = rewards[-1] + discount[-1] * next_values[-1]
    for t in range(len(rewards) - 2, -1, -1):
        returns[t] = rewards[t] + discount[t] * (lam * returns[t + 1] + (1 - lam) * next_values[t])
    return returns


def ema_update(target: torch.nn.Module, online: torch.nn.Module, tau: float) -> None:
    """Move the target's parameters: theta' <- tau theta + (1 - tau) theta'."""
    with torch.no_grad():
        torch._foreach_lerp_(list(target.parameters()), list(online.parameters()), tau)
