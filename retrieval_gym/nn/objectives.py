"""The contrastive loss that more than one agent learns from."""

from __future__ import annotations

import torch
from torch import Tensor


def info_nce(queries: Tensor, passages: Tensor, listed: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Return the InfoNCE loss of each list, and whether its positive is ranked first; float and bool, both ``(B,)``.

    The loss is ``-log exp(s_0 / t) / sum_j exp(s_j / t)`` with the inner products ``s`` (van den Oord et al. 2018).

    Args:
        queries: float ``(B, D)``.
        passages: the lists, the positive in the first column, ``(B, 1 + N, D)``.
        listed: False where a list has ended, bool ``(B, 1 + N)``.
        temperature: t, above 0.
    """
    scores = torch.einsum("bd,bnd->bn", queries, passages) / temperature
    scores = scores.masked_fill(~listed, -torch.inf)
    first = (scores[:, :1] > scores[:, 1:]).all(dim=1)
    return -scores.log_softmax(dim=1)[:, 0], first
