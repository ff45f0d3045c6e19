"""Passages per second of TextEncoder.encode against SentenceTransformer.encode at its best batch size.

Both embed the same passages with the same default model in one process, in turns, so that a busy machine slows both;
the median of the repeats' ratios is reported, by wall clock and by processor time. SentenceTransformer is tried at
several batch sizes and its fastest counts. Ours runs in float32, and again under bfloat16 autocast.

    python benchmarks/encode_speed.py --out encode_speed.json
    python benchmarks/encode_speed.py --limit 200 --repeats 2      # a quick run
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sentence_transformers import SentenceTransformer

from retrieval_gym import Passage, __version__, load_dataset
from retrieval_gym.nn.encoder import TextEncoder
from retrieval_gym.nn.model_files import DEFAULT_MODEL, find_model
from retrieval_gym.nn.precision import use_bfloat16

TARGETS = {"float32": 1.2, "bfloat16": 1.8}


def read_texts(path: Path | None, limit: int) -> tuple[list[str], str]:
    """Return distinct passages and where they come from: a file, the open corpus, or a synthetic world."""
    data = os.environ.get("RETRIEVAL_GYM_DATA")
    if path is not None:
        texts = path.read_text(encoding="utf-8").splitlines()
        source = path.name
    elif data:
        source = "open/corpus.jsonl.gz"
        with gzip.open(Path(data) / source, "rt", encoding="utf-8") as lines:
            texts = [str(Passage(row["title"], row["text"])) for row in map(json.loads, lines)]
    else:
        source = "synthetic"
        corpus = load_dataset("synthetic", form="corpus").corpus
        texts = corpus.texts(range(len(corpus)))
    texts = list(dict.fromkeys(texts))
    np.random.default_rng(0).shuffle(texts)
    return texts[:limit], source


def spent(run: Callable[[], Any]) -> tuple[float, float]:
    """Return wall and processor seconds of one call."""
    wall, processor = time.perf_counter(), time.process_time()
    run()
    return time.perf_counter() - wall, time.process_time() - processor


def main() -> None:
    """Measure, print and write the comparison."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--texts", type=Path, help="a file with one passage a line")
    parser.add_argument("--limit", type=int, default=5000, help="number of passages")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[32, 64, 128], help="of SentenceTransformer")
    parser.add_argument("--token-budget", type=int, help="of TextEncoder; its own default when left out")
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, help="torch threads; all by default")
    parser.add_argument("--out", type=Path, help="where to write the figures as JSON")
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    texts, source = read_texts(args.texts, args.limit)
    encoder = TextEncoder.load(args.model, device=args.device)
    theirs = SentenceTransformer(str(find_model(args.model)), device=args.device)

    def ours(autocast: bool) -> torch.Tensor:
        encoder.autocast = autocast
        return encoder.encode(texts, "passage", token_budget=args.token_budget).cpu()

    targets = {name: target for name, target in TARGETS.items() if name == "float32" or use_bfloat16(args.device)}
    runs: dict[str, Callable[[], Any]] = {name: lambda name=name: ours(name != "float32") for name in targets}
    for size in args.batch_sizes:
        runs[f"sentence-transformers {size}"] = lambda size=size: theirs.encode(
            texts, batch_size=size, convert_to_tensor=True, show_progress_bar=False
        ).cpu()
    warm = texts[:32]
    encoder.encode(warm)
    theirs.encode(warm)
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in runs}
    for _ in range(args.repeats):
        for name, run in runs.items():
            times[name].append(spent(run))
    medians = {name: statistics.median(wall for wall, _ in values) for name, values in times.items()}
    best = min((name for name in runs if name not in targets), key=lambda name: medians[name])
    figures: dict[str, Any] = {name: {"passages_per_second": len(texts) / seconds} for name, seconds in medians.items()}
    for name, target in targets.items():
        pairs = list(zip(times[best], times[name], strict=True))
        figures[name] |= {
            "ratio": statistics.median(theirs[0] / ours[0] for theirs, ours in pairs),
            "processor_ratio": statistics.median(theirs[1] / ours[1] for theirs, ours in pairs),
            "target": target,
        }
    reference = theirs.encode(texts[:256], convert_to_tensor=True).cpu()
    encoder.autocast = False
    difference = (encoder.encode(texts[:256], "passage").cpu() - reference).abs().max().item()
    report = {
        "passages": len(texts),
        "source": source,
        "mean_tokens": float(np.mean([len(ids) for ids in encoder.tokenize(texts[:500])])),
        "token_budget": args.token_budget,
        "repeats": args.repeats,
        "compared_with": best,
        "largest_difference": difference,
        "figures": figures,
        "threads": torch.get_num_threads(),
        "device": args.device,
        "machine": platform.processor() or platform.machine(),
        "torch": torch.__version__,
        "retrieval_gym": __version__,
    }
    print(json.dumps(report, indent=2))
    if args.out:
        args.out.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
