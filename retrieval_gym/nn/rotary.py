"""Rotary positions of passages: absolute, or relative to the passages picked so far (Q-RAG, section 3.3)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise
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
        exact = torch.float32 if picked.device.type == "mps" else torch.float64
        return torch.arange(start, start + width, device=picked.device, dtype=exact)[None]
    return relative_positions(picked, length, width, start=start, delta=delta, span=span)


def rotate(vectors: Tensor, positions: Tensor, *, base: float = 10_000.0, halves: bool = False) -> Tensor:
    """Rotate vectors by their positions (RoPE; Su et al. 2021).

    Coordinates k and k + d/2 form a plane that turns by ``position * base ** (-2k / d)``. Positions stay real numbers.

    Args:
        vectors: ``(..., D)``.
        positions: broadcastable to ``(...)``; float32 ones are taken for small, others may be large.
        base: the frequencies' base.
        halves: rotate the two halves of a vector each as a vector of its own, as the released Q-RAG code does, so that
            the inner product of each half is a position-aware Q.

    Raises:
        ValueError: when D cannot be split into planes.
    """
    parts, planes = _planes(vectors.shape[-1], halves)
    cos, sin = _turns(positions, planes, base, vectors)
    first, second = vectors.unflatten(-1, (parts, 2, planes)).unbind(-2)
    cos, sin = cos[..., None, :], sin[..., None, :]
    turned = torch.stack([first * cos - second * sin, first * sin + second * cos], dim=-2)
    return turned.flatten(-3)


def rotated_products(
    query: Tensor, vectors: Tensor, positions: Tensor, *, base: float = 10_000.0, halves: bool = False
) -> Tensor:
    """Return ``<query, rotate(vectors, positions)>`` several times faster than by rotating.

    In each plane the product with a turned vector is cos times the inner product plus sin times the cross product, so
    that no turned vector is made.

    Args:
        query: ``(B, D)``.
        vectors: ``(B, P, D)``.
        positions: ``(B, P)`` or ``(1, P)``, as of ``rotate``.
        base: as of ``rotate``.
        halves: as of ``rotate``.

    Returns:
        Inner products ``(B, P)``.

    Raises:
        ValueError: when D cannot be split into planes.
    """
    parts, planes = _planes(vectors.shape[-1], halves)
    cos, sin = _turns(positions, planes, base, vectors)
    a, b = query[:, None].unflatten(-1, (parts, 2, planes)).unbind(-2)
    c, d = vectors.unflatten(-1, (parts, 2, planes)).unbind(-2)
    inner, cross = (a * c + b * d).sum(dim=-2), (b * c - a * d).sum(dim=-2)
    return (cos * inner + sin * cross).sum(dim=-1)


class RelativeProducts:
    """Products of one query with the candidates of a long document at their relative positions.

    They are those of ``rotated_products`` at ``relative_positions``, to some 1e-7 of the vectors' lengths and several
    times faster on a processor. The product with a turned vector is that of the query turned back. Along an interval of
    the document, where positions run evenly over ``span``, a query that turns is a sum of waves of at most one radian a
    position, and so a Chebyshev series of a few terms. An interval's vectors are multiplied with these, as one matrix,
    and none is turned. Where the candidates are far more than their distinct vectors, each of these is multiplied once
    (``terms_of``, ``from_terms``). Without gradients.

    Args:
        query: ``(D,)``.
        picked: positions in the document in any order, -1 = none, int64 ``(T,)``.
        length: number m of passages of the document.
        delta: as of ``relative_positions``.
        span: as of ``relative_positions``.
        base: as of ``rotate``.
        halves: as of ``rotate``.

    Raises:
        ValueError: when D cannot be split into planes.
    """

    def __init__(
        self,
        query: Tensor,
        picked: Tensor,
        length: int,
        *,
        delta: float = 10.0,
        span: float = 9.0,
        base: float = 10_000.0,
        halves: bool = False,
    ) -> None:
        self._bounds = [0, *sorted(place for place in picked.tolist() if place >= 0), length]
        terms = _terms(span)
        order = torch.arange(terms, dtype=torch.float64)
        nodes = (order + 0.5) * (math.pi / terms)
        series = (order[:, None] * nodes).cos() * (2 / terms)
        series[0] /= 2
        starts = torch.arange(len(self._bounds) - 1, dtype=torch.float64)[:, None] * delta
        back = -(starts + span * (nodes.cos() + 1) / 2)
        turned = rotate(query.double().expand(*back.shape, -1), back, base=base, halves=halves)
        self._coefficients = (series @ turned).to(query)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Number of intervals between picked passages, of terms of a series, and of coordinates: I, K and D."""
        intervals, terms, dim = self._coefficients.shape
        return intervals, terms, dim

    def __call__(self, vectors: Tensor, start: int = 0) -> Tensor:
        """Return the products ``(n,)`` with consecutive candidates ``(n, D)``, the first of which is at ``start``.

        Those past the document's end mean nothing.
        """
        products = vectors.new_zeros(len(vectors))
        for i, part, polynomials in self._parts(start, products):
            products[part] = ((vectors[part] @ self._coefficients[i].T) * polynomials).sum(dim=1)
        return products

    def terms_of(self, vectors: Tensor) -> Tensor:
        """Return what vectors ``(U, D)`` have to do with each term of each interval, ``(U, I, K)``."""
        return (vectors @ self._coefficients.flatten(0, 1).T).unflatten(1, self.shape[:2])

    def from_terms(self, terms: Tensor, rows: Tensor, start: int = 0) -> Tensor:
        """Return what ``__call__`` does for candidates whose vectors have these rows in ``terms_of``, ``(n,)``."""
        products = terms.new_zeros(len(rows))
        for i, part, polynomials in self._parts(start, products):
            products[part] = (terms[rows[part], i] * polynomials).sum(dim=1)
        return products

    def _parts(self, start: int, products: Tensor) -> Iterator[tuple[int, slice, Tensor]]:
        """Yield each interval's number, its part of the candidates from ``start`` on, and their polynomials."""
        for i, (low, high) in enumerate(pairwise(self._bounds)):
            first, end = max(low, start), min(high, start + len(products))
            if first < end:
                place = (torch.arange(first, end, dtype=torch.float64) - low) * (2 / (high - low)) - 1
                yield i, slice(first - start, end - start), _chebyshev(place, self.shape[1]).to(products)


def _chebyshev(place: Tensor, terms: int) -> Tensor:
    """Return the first Chebyshev polynomials at places in [-1, 1], ``(n, terms)``."""
    found = place.new_ones(terms, len(place))
    if terms > 1:
        found[1] = place
    for k in range(2, terms):
        torch.mul(found[k - 1], 2 * place, out=found[k])
        found[k] -= found[k - 2]
    return found.T


def _terms(span: float) -> int:
    """Return how many Chebyshev terms hold waves of at most one radian a position over ``span`` positions to 1e-8."""
    # The coefficients of exp(i a x) are 2 J_k(a) <= 2 (a / 2) ** k / k!, with a half of the span.
    terms, bound = 1, abs(span) / 2
    while bound > 1e-9 or terms < abs(span) / 4:
        terms += 1
        bound *= abs(span) / 4 / terms
    return terms


def _planes(dim: int, halves: bool) -> tuple[int, int]:
    """Return how many parts a vector has, and how many planes each part."""
    parts = 2 if halves else 1
    if dim % (2 * parts):
        raise ValueError(f"cannot rotate vectors of dimension {dim}: it must be divisible by {2 * parts}")
    return parts, dim // parts // 2


def _turns(positions: Tensor, planes: int, base: float, vectors: Tensor) -> tuple[Tensor, Tensor]:
    """Return cos and sin of each position's angle in each plane, ``(..., planes)``, in the vectors' type."""
    if positions.dtype == torch.float32 or vectors.device.type == "mps":
        exact = torch.promote_types(vectors.dtype, torch.float32)
        angle = positions.to(exact)[..., None] * _frequencies(planes, base, exact, vectors.device)
    else:
        # Whole turns go in double precision; what is left is small, so that cos and sin may be those of any type.
        turns = positions.double()[..., None] * _frequencies(planes, base, torch.float64, vectors.device) / math.tau
        angle = (turns - turns.round()) * math.tau
    angle = angle.to(vectors.dtype)
    return angle.cos(), angle.sin()


def _frequencies(planes: int, base: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    return base ** (-torch.arange(planes, device=device, dtype=dtype) / planes)
