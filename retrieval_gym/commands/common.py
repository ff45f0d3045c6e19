"""What several subcommands share."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from retrieval_gym.registration import ENVIRONMENTS

TEXT_KEYS = frozenset(
    {"dataset", "path", "corpus", "revision", "background", "haystack", "tokenizer"}
)  # a folder may be called 123
MOST_RANKS = 100_000  # places of a ranking; they are held for every question
MOST_BEAMS = 1_000
LARGEST_SEED = 2**32 - 1  # that numpy's older generators take
# Parameters of gym.make and of the other functions that take the environment arguments.
RESERVED_KEYS = frozenset({"id", "env_id", "name", "max_episode_steps", "disable_env_checker"})


def check_number(flag: str, number: int | None, most: int, least: int = 1) -> None:
    """Refuse a number out of range; None passes.

    Raises:
        ValueError: for it.
    """
    if number is not None and number < least:
        raise ValueError(f"{flag} must be at least {least}, got {number}")
    if number is not None and number > most:
        raise ValueError(f"{flag} must be at most {most:,}, got {number}")


def parse_env_kwargs(pairs: Sequence[str]) -> dict[str, Any]:
    """Read ``key=value`` pairs; a value is JSON where it parses as such (``4``, ``true``, ``null``), else text.

    The values of ``dataset``, ``path``, ``corpus`` and ``revision`` are text or ``null``, whatever they look like.

    Raises:
        ValueError: when a pair has no ``=``, its key is no Python name or no environment argument, a key occurs twice,
            or a number is too long to read.
    """
    kwargs: dict[str, Any] = {}
    for pair in pairs:
        key, equals, text = pair.partition("=")
        if not equals or not key.isidentifier():
            raise ValueError(f"environment argument {pair!r} is not of the form key=value, such as max_steps=3")
        if key in kwargs:
            raise ValueError(f"environment argument {key!r} is given twice: {kwargs[key]!r} and {text!r}")
        if key in TEXT_KEYS and not text:
            raise ValueError(f"environment argument {pair!r} is empty: give it a value, or leave it out")
        if key in RESERVED_KEYS:
            raise ValueError(f"{key!r} is no environment argument: leave {pair!r:.80} out")
        try:
            value = json.loads(text)
        except (json.JSONDecodeError, RecursionError):
            value = text
        except ValueError as error:  # Python reads no whole number of thousands of digits
            raise ValueError(f"environment argument {key}={text:.20}... is too long a number: {error}") from error
        kwargs[key] = text if key in TEXT_KEYS and not isinstance(value, str | None) else value
    return kwargs


def check_env_id(env_id: str) -> str:
    """Return a registered id without its module prefix.

    Raises:
        ValueError: when this package registers no such id.
    """
    name = env_id.removeprefix("retrieval_gym:")
    if name not in ENVIRONMENTS:
        raise ValueError(f"unknown environment id {env_id!r}: choose one of {', '.join(ENVIRONMENTS)}")
    return name
