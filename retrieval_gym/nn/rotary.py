"""Rotary positions of passages: absolute, or relative to the passages picked so far (Q-RAG, section 3.3)."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

Positions = Literal["none", "absolute", "relative"]


def relative_positions(
    picked: Tensor, length: Tensor, width: int, *, start: int = 0, delta: float = 10.0, span: float = 9.0
) -> Tensor:
    """Position of every candidate relative to the picked ones.

    The picked indices b_1 < ... < b_k cut the document 0..m into k + 1 intervals, with b_0 = 0 and b_{k+1} = m. For i
    in interval j, b_j <= i < b_{j+1}::

        rho(i) = j * delta + span * (i - b_j) / (b_{j+1} - b_j)

    Args:
        picked: positions in the document in any order, -1 = none, int64 ``(B, T)``.
        length: number m of passages of each document, int64 ``(B,)``.
        width: number of columns to compute.
        start: place in the document of the first of them.
        delta: distance between the starts of two intervals.
        span: range of positions inside an interval.

    Returns:
        Real-valued positions, float32 ``(B, width)``; columns past ``length`` mean nothing.
    """
    size = picked.shape[0]
    end = length[:, None]
    ordered = torch.where(picked >= 0, picked, end).sort(dim=1).values
    bounds = torch.cat([torch.zeros(size, 1, dtype=torch.int64, device=picked.device), ordered, end], dim=1)
    index = torch.arange(start, start + width, device=picked.device).expand(size, width).contiguous()
    interval = torch.searchsorted(ordered, index, right=True)
    low, high = bounds.gather(1, interval), bounds.gather(1, (interval + 1).clamp(max=bounds.shape[1] - 1))
    return interval * delta + span * (index - low) / (high - low).clamp(min=1)


def candidate_positions(
    mode: Positions,
    picked: Tensor,
    length: Tensor,
    width: int,
    *,
    start: int = 0,
    delta: float = 10.0,
    span: float = 9.0,
) -> Tensor | None:
    """Positions of ``width`` candidates from place ``start`` of the document on, ``(B, width)`` or ``(1, width)``.

    None when positions play no part; other arguments as of ``relative_positions``.
    """
    if mode == "none":
        return None
    if mode == "absolute":
        return torch.arange(start, start + width, device=picked.device, dtype=torch.float64)[None]
    return relative_positions(picked, length, width, start=start, delta=delta, span=span)


def rotate(vectors: Tensor, positions: Tensor, *, base: float = 10_000.0, halves: bool = False) -> Tensor:
    """Rotate vectors by their positions (RoPE; Su et al. 2021).

    Coordinates k and k + d/2 form a plane that turns by ``position * base ** (-2k / d)``. Positions stay real numbers.

    Args:
        vectors: ``(..., D)``.
        positions: broadcastable to ``(...)``.
        base: the frequencies' base.
        halves: rotate the two halves of a vector each as a vector of its own, as the released Q-RAG code does, so that
            the inner product of each half is a position-aware Q.

    Raises:
        ValueError: when D cannot be split into planes.
    """
    parts = 2 if halves else 1
    dim = vectors.shape[-1]
    if dim % (2 * parts):
        raise ValueError(f"cannot rotate vectors of dimension {dim}: it must be divisible by {2 * parts}")
    exact = torch.float32 if vectors.device.type == "mps" else torch.float64
    planes = dim // parts // 2
    frequency = base ** (-torch.arange(planes, device=vectors.device, dtype=exact) / planes)
    # Whole turns go in double precision; what is left is small, so that cos and sin may be those of the vectors' type.
    turns = positions.to(exact)[..., None] * (frequency / math.tau)
    angle = ((turns - turns.round()) * math.tau).to(vectors.dtype)[..., None, :]
    cos, sin = angle.cos(), angle.sin()
    first, second = vectors.unflatten(-1, (parts, 2, planes)).unbind(-2)
    turned = torch.stack([first * cos - second * sin, first * sin + second * cos], dim=-2)
    return turned.flatten(-3)
