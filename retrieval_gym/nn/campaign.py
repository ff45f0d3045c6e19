"""Comparisons of several trainings over several seeds: run each once, pool their figures by question."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from retrieval_gym.datasets import RetrievalDataset
from retrieval_gym.mismatch import Estimate, estimate
from retrieval_gym.nn.dense import DenseRetriever
from retrieval_gym.nn.encoder import TextEncoder
from retrieval_gym.nn.run import Run
from retrieval_gym.protocol import align

SECONDS_BETWEEN_LOOKS = 0.5  # at the memory of a training; what it holds for less may go unseen


def threads_of(jobs: int) -> int:
    """Return how many threads each of ``jobs`` processes gets, of the cores that this process may use.

    ``taskset`` or a scheduler may have limited these. More threads than cores wait for each other, spinning: several
    times as slow.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // jobs)


def train_once(agent: Path, flags: Sequence[str], folder: Path, threads: int) -> Path:
    """Return a finished run in ``folder``: the one that is there, gone on with if it stopped, or a new one.

    What it prints goes to ``folder/log.txt``, its peak memory to ``folder/memory.json``.

    Args:
        agent: the agent's script.
        flags: its flags, without ``--runs``; not looked at where a run is there.
        folder: of this training alone.
        threads: of the processor, for this run.

    Raises:
        RuntimeError: when the agent stops with an error.
    """
    folder.mkdir(parents=True, exist_ok=True)
    found = [path.parent for path in folder.glob("*/config.json")]
    if found and (found[0] / "eval.json").is_file():
        return found[0]
    command = [sys.executable, str(agent)]
    command += ["--resume", str(found[0])] if found else [*flags, "--runs", str(folder)]
    with (folder / "log.txt").open("a") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=os.environ | {"OMP_NUM_THREADS": str(threads)})
        peak = _peak_gigabytes(process)
    if process.returncode:
        raise RuntimeError(f"{agent.name} stopped in {folder}: see {folder / 'log.txt'}")
    (folder / "memory.json").write_text(json.dumps({"peak_gigabytes": peak}) + "\n")
    print(f"trained: {folder.name}", file=sys.stderr, flush=True)
    return next(folder.glob("*/config.json")).parent


def _peak_gigabytes(process: subprocess.Popen) -> float:
    """Wait for a process; return its own peak memory in GiB, 0 where there is no ``/proc`` to see it in.

    ``ru_maxrss`` would also count what this process held when it started the other.
    """
    status, peak = Path(f"/proc/{process.pid}/status"), 0.0
    while True:
        lines = status.read_text().splitlines() if status.is_file() else []
        found = [int(line.split()[1]) for line in lines if line.startswith("VmHWM:")]  # in KiB; none in a zombie
        peak = found[0] / 2**20 if found else peak
        try:
            process.wait(SECONDS_BETWEEN_LOOKS)
            return peak
        except subprocess.TimeoutExpired:
            continue


def untrained_retriever(directory: Path, dataset: RetrievalDataset, cache_dir: Path) -> DenseRetriever:
    """Return the retriever from which a run of ``agents/infonce.py`` or ``agents/pao.py`` set out."""
    config = Run.open(directory).config
    return DenseRetriever(
        dataset,
        TextEncoder.load(directory / "passage_encoder", autocast=config["autocast"]),
        max_passage_tokens=config["passage_tokens"],
        max_question_tokens=config["question_tokens"],
        cache_dir=cache_dir,
    )


class Pool:
    """Figures of several arms and seeds by arm and measure: values, and the questions that they belong to."""

    def __init__(self) -> None:
        self._values: dict[tuple[str, str], list[NDArray]] = defaultdict(list)
        self._questions: dict[tuple[str, str], list[NDArray]] = defaultdict(list)

    def add(self, arm: str, measure: str, values: NDArray, questions: NDArray) -> None:
        """Add the figures of one more seed, each array ``(N,)``."""
        self._values[arm, measure].append(np.asarray(values, np.float64))
        self._questions[arm, measure].append(questions)

    def estimate(self, arm: str, measure: str, minus: str | None = None) -> Estimate:
        """Return the mean over seeds, or that of the paired differences to another arm; intervals over questions."""
        values = np.concatenate(self._values[arm, measure])
        if minus is not None:
            values = values - np.concatenate(self._values[minus, measure])
        return estimate(values, np.concatenate(self._questions[arm, measure]))

    def keys(self) -> list[tuple[str, str]]:
        """Return every pair of arm and measure, in the order in which they were added."""
        return list(self._values)

    def by_seed(self, arm: str, measure: str) -> list[float]:
        """Return the mean of each seed."""
        return [float(values.mean()) if len(values) else float("nan") for values in self._values[arm, measure]]

    def report(self, baseline: str, measures: Sequence[str], seeds: Sequence[int]) -> tuple[str, dict[str, Any]]:
        """Return every figure beside its paired difference to one arm: as a table, and as JSON-able values.

        Args:
            baseline: the arm that the others are compared with.
            measures: what is reported, in order.
            seeds: names of the columns that hold each seed's mean.
        """
        rows = [["measure", "arm", "mean [interval] number", f"minus {baseline}, paired", *map(str, seeds)]]
        values: dict[str, Any] = {}
        for arm, measure in sorted(
            (key for key in self.keys() if key[1] in measures), key=lambda key: measures.index(key[1])
        ):
            plain, each = self.estimate(arm, measure), self.by_seed(arm, measure)
            paired = None if arm == baseline else self.estimate(arm, measure, minus=baseline)
            values.setdefault(measure, {})[arm] = {
                "mean": asdict(plain), f"minus_{baseline}": paired and asdict(paired), "by_seed": each
            }  # fmt: skip
            rows.append([measure, arm, plain.text(), paired.text("+") if paired else "", *(f"{x:.3f}" for x in each)])
        return "\n".join(align(rows)), values
