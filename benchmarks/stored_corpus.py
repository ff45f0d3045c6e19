"""What a corpus costs in memory and on disk: seconds to load, private memory, and passages read a second at random.

Writes a folder of ``--passages`` generated passages and loads it in a process of its own each time: in memory, from
disk for the first time (which writes the Arrow file), and again. Private memory is what the process cannot give back to
the system, read when the dataset is loaded and its fingerprint and copies are known.

    python benchmarks/stored_corpus.py --passages 1000000
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from retrieval_gym import load_dataset


def write_folder(folder: Path, passages: int) -> None:
    """Write ``corpus.jsonl``, 60 random words a passage, and one question."""
    rng = np.random.default_rng(0)
    words = np.array([f"word{i}" for i in range(20_000)])
    with open(folder / "corpus.jsonl", "w", encoding="utf-8") as file:
        for i in range(passages):
            text = " ".join(words[rng.integers(0, len(words), 60)])
            file.write(json.dumps({"id": f"passage-{i}", "title": f"title {i}", "text": text}) + "\n")
    question = {"id": "q", "question": "?", "gold_ids": [f"passage-{passages - 1}"]}
    (folder / "questions.jsonl").write_text(json.dumps(question) + "\n")


def private_mib() -> float:
    """Return the process's anonymous resident memory in MiB (Linux)."""
    found = re.search(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) / 1024


def measure(folder: Path) -> dict[str, float]:
    """Load the folder in this process."""
    before, began = private_mib(), time.perf_counter()
    corpus = load_dataset("custom", path=folder).corpus
    corpus.fingerprint, corpus.canonical  # noqa: B018 - both are kept once known
    seconds, memory = time.perf_counter() - began, private_mib() - before
    ids = np.random.default_rng(1).integers(0, len(corpus), 20_000)
    began = time.perf_counter()
    corpus.texts(ids)
    return {"seconds": seconds, "private_mib": memory, "reads_per_second": len(ids) / (time.perf_counter() - began)}


def main() -> None:
    """Write the folder, load it three times and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--passages", type=int, default=1_000_000)
    parser.add_argument("--load", type=Path, help=argparse.SUPPRESS)  # the process that measures
    args = parser.parse_args()
    if args.load is not None:
        print(json.dumps(measure(args.load)))
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_folder(folder, args.passages)
        print(f"{args.passages:,d} passages, {(folder / 'corpus.jsonl').stat().st_size / 2**20:.0f} MiB of JSON lines")
        print(f"{'':22} {'seconds':>8} {'private MiB':>12} {'reads/s':>10}")
        for title, limit in (("in memory", 2**60), ("from disk, first time", 0), ("from disk, again", 0)):
            environment = {
                **os.environ,
                "RETRIEVAL_GYM_IN_MEMORY_MAX_SIZE": str(limit),
                "RETRIEVAL_GYM_CACHE": str(folder / "cache"),
            }
            command = [sys.executable, __file__, "--load", name]
            run = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True)
            row = json.loads(run.stdout)
            print(f"{title:22} {row['seconds']:8.1f} {row['private_mib']:12.0f} {row['reads_per_second']:10,.0f}")


if __name__ == "__main__":
    main()
