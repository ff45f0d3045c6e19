"""The course of the learning rate over a run."""

from __future__ import annotations

import math
from typing import Literal, Protocol

Schedule = Literal["linear", "cosine", "constant"]


class ScheduleArgs(Protocol):
    """What a script's arguments say about the learning rate."""

    warmup_updates: int
    schedule: Schedule
    final_learning_rate: float


def schedule_factor(args: ScheduleArgs, update: int, updates: int) -> float:
    """Share of the full learning rate after the warm-up: 1 at first, ``final_learning_rate`` at the end."""
    progress = min(1.0, max(0, update - args.warmup_updates) / max(1, updates - args.warmup_updates))
    decay = {"linear": 1 - progress, "cosine": 0.5 + 0.5 * math.cos(math.pi * progress), "constant": 1.0}[args.schedule]
    return args.final_learning_rate + (1 - args.final_learning_rate) * decay


def warmup_factor(args: ScheduleArgs, update: int) -> float:
    """Share of the learning rate that the linear warm-up allows: 1 from its last update on."""
    return min(1.0, (update + 1) / max(1, args.warmup_updates))
