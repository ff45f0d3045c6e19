"""Steps per second of the native vector environment against Gymnasium's SyncVectorEnv over single environments.

Both play the same random actions on the same dataset (2,000 synthetic questions, pools of 16) in one process, in turns,
so that a busy machine slows both; the median of the repeats is reported. A step is one transition of one row.

    python benchmarks/env_speed.py --out env_speed.json
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np

from retrieval_gym import RetrievalDataset, __version__, load_dataset


def make(mode: str, num_envs: int, observation: str, dataset: RetrievalDataset) -> gym.vector.VectorEnv:
    """Make and seed the vector environment that ``gym.make_vec`` gives in this mode, with SAME_STEP autoreset."""
    vector_kwargs = {"autoreset_mode": "SameStep"} if mode == "sync" else {}
    envs = gym.make_vec(
        "retrieval_gym:ChainRetrieval-v0",
        num_envs=num_envs,
        vectorization_mode=mode,
        vector_kwargs=vector_kwargs,
        dataset=dataset,
        observation=observation,
    )
    envs.reset(seed=0)
    return envs


def steps_per_second(envs: gym.vector.VectorEnv, actions: np.ndarray) -> float:
    """Step through ``actions``, int64 ``(steps, num_envs)``, and return transitions a second."""
    began = time.perf_counter()
    for row in actions:
        envs.step(row)
    return actions.size / (time.perf_counter() - began)


def compare(num_envs: int, observation: str, dataset: RetrievalDataset, repeats: int, seconds: float) -> dict[str, Any]:
    """Measure both environments in turns, each for about ``seconds`` a repeat."""
    rng = np.random.default_rng(0)
    modes = {"native": "vector_entry_point", "sync": "sync"}
    envs = {name: make(mode, num_envs, observation, dataset) for name, mode in modes.items()}

    def draw(steps: int) -> np.ndarray:
        return rng.integers(0, dataset.max_pool, (steps, num_envs))

    lengths = {}
    for name, env in envs.items():
        speed = steps_per_second(env, draw(4))  # also the warm-up
        lengths[name] = max(2, round(seconds * speed / num_envs))
    speeds: dict[str, list[float]] = {name: [] for name in envs}
    for _ in range(repeats):
        for name, env in envs.items():
            speeds[name].append(steps_per_second(env, draw(lengths[name])))
    for env in envs.values():
        env.close()
    medians = {name: statistics.median(values) for name, values in speeds.items()}
    return {
        "observation": observation,
        "num_envs": num_envs,
        "native_steps_per_second": round(medians["native"]),
        "sync_steps_per_second": round(medians["sync"]),
        "ratio": round(medians["native"] / medians["sync"], 1),
        "repeats": {name: [round(value) for value in values] for name, values in speeds.items()},
    }


def main() -> None:
    """Measure, print a table and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-envs", type=int, nargs="+", default=[64, 1024])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0.7, help="about how long one repeat of one side takes")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    args = parser.parse_args()
    dataset = load_dataset("synthetic")
    results = []
    print(f"{'observation':11} {'envs':>5} {'native steps/s':>15} {'sync steps/s':>13} {'ratio':>7}")
    for observation in ("ids", "text"):
        for num_envs in args.num_envs:
            row = compare(num_envs, observation, dataset, args.repeats, args.seconds)
            results.append(row)
            native, sync = row["native_steps_per_second"], row["sync_steps_per_second"]
            print(f"{observation:11} {num_envs:5d} {native:15,d} {sync:13,d} {row['ratio']:6.1f}x", flush=True)
    if args.out is not None:
        versions = {
            "retrieval_gym": __version__,
            "gymnasium": gym.__version__,
            "numpy": np.__version__,
            "python": platform.python_version(),
        }
        machine = {"processor": platform.processor() or platform.machine(), "cores": os.cpu_count()}
        args.out.write_text(json.dumps({"versions": versions, "machine": machine, "results": results}, indent=2) + "\n")


if __name__ == "__main__":
    main()
