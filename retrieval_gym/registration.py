"""The table of environment ids: one row an environment."""

from __future__ import annotations

from typing import Any

import gymnasium as gym

from retrieval_gym import mdp
from retrieval_gym.datasets import RetrievalDataset, load_dataset

ONE_STEP = {"max_steps": 1, "reward": "gold", "allow_unreachable": True}
ENVIRONMENTS: dict[str, dict[str, Any]] = {
    "ChainRetrieval-v0": {"max_steps": 4},
    "ChainRetrieval-Synthetic-v0": {"dataset": "synthetic", "max_steps": 4},
    "ChainRetrieval-SyntheticOpen-v0": {"dataset": "synthetic", "form": "corpus", "max_steps": 4},
    "ChainRetrieval-MuSiQue-v0": {"dataset": "musique", "max_steps": 4},
    "ChainRetrieval-MuSiQueOpen-v0": {"dataset": "musique", "form": "corpus", "max_steps": 4},
    "ChainRetrieval-HotpotQA-v0": {"dataset": "hotpotqa", "max_steps": 2},
    "ChainRetrieval-HotpotQAOpen-v0": {"dataset": "hotpotqa", "form": "corpus", "max_steps": 2},
    "ChainRetrieval-HotpotQALong-v0": {"dataset": "hotpotqa-long", "max_steps": 6},
    "ChainRetrieval-2Wiki-v0": {"dataset": "2wiki", "max_steps": 4},
    "ChainRetrieval-2WikiOpen-v0": {"dataset": "2wiki", "form": "corpus", "max_steps": 4},
    "ChainRetrieval-2WikiLong-v0": {"dataset": "2wiki-long", "max_steps": 6},
    # One search: a question may have several relevant passages, of which one pick finds any.
    "ChainRetrieval-SciFact-v0": {"dataset": "scifact", **ONE_STEP},
    "ChainRetrieval-MSMARCO-v0": {"dataset": "msmarco", **ONE_STEP},
    "ChainRetrieval-BEIR-v0": {"dataset": "beir", **ONE_STEP},
    # A document of its own for each question, mixed anew for each episode.
    "ChainRetrieval-BabiLongQA1-v0": {"dataset": "babilong-qa1", "max_steps": 4},
    "ChainRetrieval-BabiLongQA2-v0": {"dataset": "babilong-qa2", "max_steps": 4},
    "ChainRetrieval-BabiLongQA3-v0": {"dataset": "babilong-qa3", "max_steps": 4},
    "ChainRetrieval-BabiLongQA4-v0": {"dataset": "babilong-qa4", "max_steps": 4},
    "ChainRetrieval-BabiLongQA5-v0": {"dataset": "babilong-qa5", "max_steps": 4},
    "ChainRetrieval-NIAHSingle-v0": {"dataset": "niah-single", "max_steps": 4},
    "ChainRetrieval-NIAHMultiKey-v0": {"dataset": "niah-multikey", "max_steps": 4},
    "ChainRetrieval-NIAHMultiValue-v0": {"dataset": "niah-multivalue", "max_steps": 4},
    "ChainRetrieval-NIAHMultiQuery-v0": {"dataset": "niah-multiquery", "max_steps": 4},
    "ChainRetrieval-RulerQA1-v0": {"dataset": "ruler-qa1", "max_steps": 4},
    "ChainRetrieval-RulerQA2-v0": {"dataset": "ruler-qa2", "max_steps": 4},
    "ChainRetrieval-Custom-v0": {"dataset": "custom", "max_steps": 4},
}

ENVIRONMENT_KWARGS = frozenset(
    {"max_steps", "reward", "observation", "stop_when_complete", "render_mode", "allow_unreachable"}
)


def register_environments() -> None:
    """Register every id of ``ENVIRONMENTS`` with Gymnasium."""
    for env_id, kwargs in ENVIRONMENTS.items():
        gym.register(
            id=env_id,
            entry_point="retrieval_gym.envs.chain_retrieval:ChainRetrievalEnv",
            vector_entry_point="retrieval_gym.envs.chain_retrieval_vector:ChainRetrievalVectorEnv",
            kwargs=dict(kwargs),
        )


def environment_dataset(env_id: str, split: str = "train", **kwargs: Any) -> tuple[RetrievalDataset, int]:
    """Load the dataset that ``gym.make(env_id, split=split, **kwargs)`` plays, without making the environment.

    Returns:
        The dataset and the number of steps of an episode.

    Raises:
        ValueError: when the id is unknown or not one of this package, ``max_steps`` is out of range, or the dataset
            cannot be loaded.
        FileNotFoundError: when the data are nowhere.
    """
    env_id = env_id.removeprefix("retrieval_gym:")
    if env_id not in ENVIRONMENTS:
        raise ValueError(f"unknown environment id {env_id!r}: choose one of {', '.join(ENVIRONMENTS)}")
    merged = {**ENVIRONMENTS[env_id], **kwargs}
    max_steps = mdp.check_max_steps(merged["max_steps"])
    options = {key: value for key, value in merged.items() if key not in ENVIRONMENT_KWARGS}
    if "dataset" not in options:
        raise ValueError(f"{env_id} needs a dataset: pass dataset='musique+2wiki', say")
    return load_dataset(options.pop("dataset"), split, **options), max_steps
