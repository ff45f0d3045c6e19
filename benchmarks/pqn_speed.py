"""Transitions per second of agents/pqn.py, and the share of an update that one bare forward and backward pass takes.

Part 1 trains both encoders, with a target network, on MuSiQue pools of 20 (passages cut at 110 tokens, 4 steps, the
whole default encoder), in float32 and under bfloat16 autocast. Where MuSiQue is not found, on the synthetic world.
Part 2 runs the ``minilm`` preset, whose passages are frozen, and compares an update's wall time with one bare forward
and backward pass over the states that the update learned from, sorted by length and batched as ``TextEncoder`` does.

    python benchmarks/pqn_speed.py --updates 3 --out pqn_speed.json
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import platform
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import torch

from retrieval_gym import __version__
from retrieval_gym.nn.encoder import TextEncoder
from retrieval_gym.nn.precision import use_bfloat16
from retrieval_gym.registration import environment_dataset

PQN = Path(__file__).resolve().parents[1] / "agents" / "pqn.py"


def load_pqn() -> ModuleType:
    """Import the script, which is not part of the package."""
    spec = importlib.util.spec_from_file_location("pqn", PQN)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["pqn"] = module
    spec.loader.exec_module(module)
    return module


def seconds_of_updates(pqn: ModuleType, args: Any) -> list[float]:
    """Train and return the wall time of each update but the first; the log's clock stops before evaluations."""
    with tempfile.TemporaryDirectory() as folder:
        run = pqn.main(replace(args, runs=folder))
        records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    clock = [record["step"] / record["charts/SPS"] for record in records]
    return [after - before for before, after in zip(clock, clock[1:], strict=False)]


def train_both(pqn: ModuleType, env: str, updates: int, autocast: bool) -> dict[str, Any]:
    """Measure transitions per second with both encoders trained."""
    per_update = 12 * 4 * 2
    args = pqn.Args(
        env=env,
        autocast=autocast,
        total_timesteps=per_update * (updates + 1),
        eval_every=updates + 10,
        eval_questions=2,
        selection_share=0.01,
        device="cpu",
    )
    seconds = seconds_of_updates(pqn, args)
    return {
        "env": env,
        "dtype": "bfloat16 autocast" if autocast else "float32",
        "transitions_per_second": per_update / statistics.median(seconds),
        "updates": updates,
    }


def share_of_bare_pass(pqn: ModuleType, updates: int) -> dict[str, Any]:
    """Measure an update of the minilm preset and the bare pass over its states, in the same process."""
    learned: list[Any] = []
    embed = TextEncoder.embed

    def recording(self: TextEncoder, sequences: Any, **kwargs: Any) -> torch.Tensor:
        if torch.is_grad_enabled():
            learned.append((self, list(sequences)))
        return embed(self, sequences, **kwargs)

    preset = pqn.PRESETS["minilm"]
    per_update = preset["num_envs"] * 4 * preset["accumulation"] * preset["tries"]
    args = replace(
        pqn.Args(**preset),
        total_timesteps=per_update * (updates + 1),
        eval_every=updates + 10,
        eval_questions=2,
        selection_share=0.01,
        env_kwargs=("num_questions=60",),
        device="cpu",
    )
    with mock.patch.object(TextEncoder, "embed", recording):
        seconds = seconds_of_updates(pqn, args)
    encoder = learned[-1][0]
    passes = len(learned) // (updates + 1)
    states = [sequences for _, sequences in learned]
    bare = []
    for update in range(1, updates + 1):
        batch = [s for sequences in states[update * passes : (update + 1) * passes] for s in sequences]
        started = time.perf_counter()
        encoder.embed(batch).sum().backward()
        bare.append(time.perf_counter() - started)
        encoder.zero_grad()
    return {
        "preset": "minilm",
        "update_seconds": statistics.median(seconds),
        "bare_pass_seconds": statistics.median(bare),
        "share": statistics.median(b / s for b, s in zip(bare, seconds, strict=True)),
        "transitions_per_second": per_update / statistics.median(seconds),
    }


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--updates", type=int, default=3, help="updates to time, after one to warm up")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    options = parser.parse_args()
    pqn = load_pqn()
    try:
        environment_dataset("ChainRetrieval-MuSiQue-v0")
        env = "ChainRetrieval-MuSiQue-v0"
    except FileNotFoundError:
        env = "ChainRetrieval-Synthetic-v0"
    result: dict[str, Any] = {
        "version": __version__,
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "processor": platform.processor() or platform.machine(),
        "both_trained": [
            train_both(pqn, env, options.updates, autocast) for autocast in sorted({False, use_bfloat16("cpu")})
        ],
        "frozen_actions": share_of_bare_pass(pqn, 8 * options.updates),
    }
    print(json.dumps(result, indent=2))
    if options.out:
        options.out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
