"""What several subcommands share."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from retrieval_gym.registration import ENVIRONMENTS


def parse_env_kwargs(pairs: Sequence[str]) -> dict[str, Any]:
    """Read ``key=value`` pairs; a value is JSON where it parses as such (``4``, ``true``, ``null``), else text.

    Raises:
        ValueError: when a pair has no ``=``, its key is no Python name, or a key occurs twice.
    """
    kwargs: dict[str, Any] = {}
    for pair in pairs:
        key, equals, text = pair.partition("=")
        if not equals or not key.isidentifier():
            raise ValueError(f"environment argument {pair!r} is not of the form key=value, such as max_steps=3")
        if key in kwargs:
            raise ValueError(f"environment argument {key!r} is given twice: {kwargs[key]!r} and {text!r}")
        try:
            kwargs[key] = json.loads(text)
        except json.JSONDecodeError:
            kwargs[key] = text
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
