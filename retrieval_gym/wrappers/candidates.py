"""What wrappers must know of an environment's candidates."""

from __future__ import annotations

import gymnasium as gym


def num_candidates(env: gym.Env) -> int | None:
    """Return the length of ``info["candidates"]``, or None where a whole corpus is picked from and it is missing."""
    if env.has_wrapper_attr("top_k"):
        return int(env.get_wrapper_attr("top_k"))
    return env.get_wrapper_attr("dataset").max_pool
