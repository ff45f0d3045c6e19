"""Learning curves as lines in the unit square, with ticks, ready to be drawn."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from retrieval_gym.report.runs import RunRecord

Floats = NDArray[np.float64]

MOST_POINTS = 400  # of a drawn line; more become means of neighbours
FEW_POINTS = 60  # a line of no more than these shows its points and needs no running mean
HEADLINES = ("eval/all_gold_picked", "eval/nDCG@10", "eval/complete@5")


def draw_curves(runs: Sequence[RunRecord]) -> list[dict[str, Any]]:
    """Return one figure for each logged number, the one to show first in front.

    Returns:
        Figures, JSON-able: ``name``; ``x_ticks`` and ``y_ticks``, each of ``place``, from 0 (left, bottom) to 1, and
        ``text``; and ``lines``, one a run that logged it. A line has ``run`` (its position), ``steps`` and ``values``
        as drawn; ``path`` and ``mean_path``, empty where points are few, both SVG path data with y downwards in a
        square of 1,000; ``points`` in that square where they are few; ``pooled``, of how many logged numbers each drawn
        one is a mean; ``window`` of the running mean in drawn numbers; ``last``, ``lowest`` and ``highest``.
    """
    names = dict.fromkeys(name for run in runs for name in run.curves)
    order = {"eval": 0, "losses": 1, "charts": 2}
    ranked = sorted(names, key=lambda name: (order.get(name.partition("/")[0], 3), name))
    headline = next((name for name in HEADLINES if name in names), None)
    ranked.sort(key=lambda name: name != headline)  # stable
    return [
        _figure(name, [(i, *run.curves[name]) for i, run in enumerate(runs) if name in run.curves]) for name in ranked
    ]


def ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Return round numbers, a 1, 2 or 5 times a power of ten apart, the first and last of which enclose the range.

    Args:
        low: smallest value, finite; where it is the largest too, the range is from there to 0.
        high: largest value, not below ``low``.
        about: how many intervals are wanted; there may be fewer.
    """
    if high - low <= 1e-12 * max(abs(low), abs(high), 1e-300):  # a constant stands beside 0: a share stays below 1
        low, high = (min(low, 0.0), max(high, 0.0)) if high else (0.0, 1.0)
    raw = (high - low) / about
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [float(f"{i * step:.12g}") for i in range(first, last + 1)]


def tick_text(value: float) -> str:
    """Return a tick's number as a label."""
    if value != 0 and abs(value) < 1e-3:
        mantissa, _, exponent = f"{value:.2e}".partition("e")
        return f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent)}"
    return f"{value:,.6g}" if abs(value) < 1e6 else f"{value / 1e6:,.6g}M"


def _figure(name: str, series: list[tuple[int, list[int], list[float]]]) -> dict[str, Any]:
    pooled = [(run, *_pool(np.array(steps, np.float64), np.array(values))) for run, steps, values in series]
    everything = np.concatenate([values for _, _, values, _ in pooled])
    y_ticks = ticks(float(everything.min()), float(everything.max()))
    x_end = max(1.0, *(float(steps[-1]) for _, steps, _, _ in pooled))
    x_ticks = ticks(0.0, x_end)
    bottom, height = y_ticks[0], y_ticks[-1] - y_ticks[0]
    lines = []
    for (run, steps, values, size), (_, _, logged) in zip(pooled, series, strict=True):
        x, y = 1000 * steps / x_end, 1000 * (1 - (values - bottom) / height)
        line: dict[str, Any] = {
            "run": run,
            "steps": [int(step) for step in steps],
            "values": [float(f"{value:.5g}") for value in values],
            "path": _path(x, y),
            "mean_path": "",
            "points": [],
            "pooled": size,
            "window": 1,
            "last": float(logged[-1]),
            "lowest": float(min(logged)),
            "highest": float(max(logged)),
        }
        if len(x) <= FEW_POINTS:
            line["points"] = [[round(float(a), 1), round(float(b), 1)] for a, b in zip(x, y, strict=True)]
        else:
            line["window"] = max(3, len(x) // 20) | 1
            line["mean_path"] = _path(x, running_mean(y, line["window"]))
        lines.append(line)
    return {
        "name": name,
        "x_ticks": [{"place": tick / x_end, "text": tick_text(tick)} for tick in x_ticks if tick <= x_end],
        "y_ticks": [{"place": (tick - bottom) / height, "text": tick_text(tick)} for tick in y_ticks],
        "lines": lines,
    }


def _pool(steps: Floats, values: Floats) -> tuple[Floats, Floats, int]:
    """Replace runs of neighbours by their mean, at the last one's step, so that ``MOST_POINTS`` are left at most."""
    size = math.ceil(len(values) / MOST_POINTS)
    starts = np.arange(0, len(values), size)
    ends = np.minimum(starts + size, len(values))
    return steps[ends - 1], np.add.reduceat(values, starts) / (ends - starts), size


def running_mean(values: Floats, window: int) -> Floats:
    """Return the mean of the ``window`` values around each, an odd number, of fewer at both ends; float64 ``(N,)``."""
    sums = np.concatenate([[0.0], np.cumsum(values)])
    places = np.arange(len(values))
    starts, ends = np.maximum(places - window // 2, 0), np.minimum(places + window // 2 + 1, len(values))
    return (sums[ends] - sums[starts]) / (ends - starts)


def _path(x: Floats, y: Floats) -> str:
    return "M" + "L".join(f"{a:.1f} {b:.1f}" for a, b in zip(x, y, strict=True))
