"""Command lines of the agent scripts: presets, resuming, and checks that name the flag and the remedy."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields, replace
from typing import Any, TypeVar

import numpy as np
import tyro

from retrieval_gym.commands.common import parse_env_kwargs
from retrieval_gym.nn.run import Run, check_config

LARGEST = float(np.finfo(np.float32).max)

Args = TypeVar("Args", bound=Any)

# What the environment takes and training decides itself.
NOT_FOR_TRAINING = frozenset(
    {"split", "reward", "observation", "stop_when_complete", "allow_unreachable", "render_mode"}
)


def parse_args(args_class: type[Args], presets: Mapping[str, Mapping[str, Any]] | None = None) -> Args:
    """Read the command line; a preset sets defaults, a run to resume sets everything.

    Args:
        args_class: a dataclass with a field ``resume``, and ``preset`` where there are presets.
        presets: defaults by name.

    Raises:
        FileNotFoundError: when there is no run to resume.
        ValueError: when that run is of another version, or a flag differs from it.
    """
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--resume")
    if presets is not None:
        parser.add_argument("--preset")
    early, _ = parser.parse_known_args()
    if early.resume is not None:
        if not early.resume:
            raise ValueError("--resume is empty: give the folder of a run")
        saved = Run.open(early.resume).config
        unknown = sorted(saved.keys() ^ {field.name for field in fields(args_class)})
        if unknown:
            raise ValueError(
                f"{early.resume} was written by another script or version: {unknown[0]!r} is not in both; start anew"
            )
        default = args_class(**{k: tuple(v) if isinstance(v, list) else v for k, v in saved.items()})
        args = tyro.cli(args_class, default=replace(default, resume=early.resume))
        check_config(saved, {**asdict(args), "resume": None})
        return args
    preset = {} if presets is None else presets.get(early.preset, {})
    if preset:
        print(f"preset {early.preset}: " + ", ".join(f"{key}={value}" for key, value in preset.items()))
    return tyro.cli(args_class, default=replace(args_class(), **preset))


def check_betas(betas: Sequence[float]) -> None:
    """Raise ValueError for decay rates that AdamW does not take."""
    if not all(0 <= beta < 1 for beta in betas):
        raise ValueError(f"betas is {tuple(betas)}: each must be at least 0 and below 1")


def check_counts(args: Any, *names: str) -> None:
    """Raise ValueError for a number below 1; None is allowed."""
    for name in names:
        value = getattr(args, name)
        if value is not None and value < 1:
            raise ValueError(f"{name} is {value}: it must be at least 1")


def check_shares(args: Any, *names: str) -> None:
    """Raise ValueError for a number outside 0 to 1."""
    for name in names:
        if not 0 <= getattr(args, name) <= 1:
            raise ValueError(f"{name} is {getattr(args, name)}: it must be from 0 to 1")


def check_sizes(args: Any, *names: str) -> None:
    """Raise ValueError for a number that is negative or not finite in float32; None is allowed."""
    for name in names:
        value = getattr(args, name)
        if value is not None and not 0 <= value <= LARGEST:
            raise ValueError(f"{name} is {value}: it must be finite and not negative")


def check_positive(args: Any, *names: str) -> None:
    """Raise ValueError for a number with which nothing would be learned, 0, or one that ``check_sizes`` refuses."""
    check_sizes(args, *names)
    for name in names:
        if getattr(args, name) == 0:
            raise ValueError(f"{name} is 0: nothing would be learned; give a number above 0")


def check_env_kwargs(pairs: Sequence[str]) -> None:
    """Raise ValueError for an environment argument that is the script's own to decide."""
    for key in parse_env_kwargs(pairs).keys() & NOT_FOR_TRAINING:
        raise ValueError(f"--env-kwargs {key}=... is not for training: leave it out, or use a flag of the script")
