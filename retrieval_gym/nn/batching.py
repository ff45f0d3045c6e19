"""Inputs of different lengths, cut into batches for one forward pass each."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

# Tokens in one forward pass. On a CPU the activations of a small batch stay in the cache: about 1.2 times as fast.
CPU_TOKEN_BUDGET, TOKEN_BUDGET = 2048, 8192
# Tokens of padding that cost as much as one more forward pass. On a CPU the optimum is flat from 128 to 512.
CPU_PASS_COST = 256


def batch_limits(device: torch.device, token_budget: int | None = None) -> tuple[int, int]:
    """Return the budget and the cost of a pass for ``cut_batches``; elsewhere than on a CPU no batch is cut in two."""
    if device.type == "cpu":
        return token_budget or CPU_TOKEN_BUDGET, CPU_PASS_COST
    return token_budget or TOKEN_BUDGET, token_budget or TOKEN_BUDGET


def cut_batches(
    lengths: NDArray[np.int64], order: NDArray[np.int64], token_budget: int, pass_cost: int
) -> list[NDArray[np.int64]]:
    """Cut rows into batches of at most ``token_budget`` tokens, padding included, and again where that saves time.

    Args:
        lengths: tokens of each row, int64 ``(N,)``.
        order: the rows in descending order of their lengths, int64 ``(N,)``.
        token_budget: a row that is longer has a batch of its own.
        pass_cost: a batch is cut in two where that saves more tokens of padding than this.
    """
    batches, start = [], 0
    sizes = lengths[order]
    while start < len(order):
        size = max(1, token_budget // int(sizes[start]))
        while (saved := _saved_padding(sizes[start : start + size])).max() > pass_cost:
            size = int(saved.argmax())
        batches.append(order[start : start + size])
        start += size
    return batches


def _saved_padding(sizes: NDArray[np.int64]) -> NDArray[np.int64]:
    """Tokens of padding that a cut before each row of a batch saves; ``sizes`` descend, int64 ``(B,)``."""
    return np.arange(len(sizes), 0, -1) * (sizes[0] - sizes)
