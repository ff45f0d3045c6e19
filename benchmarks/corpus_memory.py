"""Peak memory of loading, embedding and searching a corpus, and what search adds to the encoding of its queries.

The open corpus (40,026 passages) is used where RETRIEVAL_GYM_DATA is set, else synthetic passages. Peak resident memory
is read after each stage, so the figures only grow; the table is written to a folder and searched from there. The
queries are texts of passages, so no longer than a state with one picked passage.

    python benchmarks/corpus_memory.py --out corpus_memory.json
    python benchmarks/corpus_memory.py --limit 500 --layers 0      # a quick run
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import resource
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from retrieval_gym import Corpus, load_dataset
from retrieval_gym.nn.embeddings import EmbeddingTable
from retrieval_gym.nn.encoder import TextEncoder
from retrieval_gym.nn.index import ExactIndex
from retrieval_gym.nn.model_files import DEFAULT_MODEL


def read_corpus(limit: int) -> tuple[Corpus, str]:
    """Return a corpus of at most ``limit`` passages and where it comes from."""
    data = os.environ.get("RETRIEVAL_GYM_DATA")
    if data:
        with gzip.open(Path(data) / "open" / "corpus.jsonl.gz", "rt", encoding="utf-8") as lines:
            rows = [json.loads(line) for _, line in zip(range(limit), lines, strict=False)]
        return Corpus([row["title"] for row in rows], [row["text"] for row in rows]), "open/corpus.jsonl.gz"
    passages = load_dataset("synthetic", form="corpus", corpus_size=max(20_000, limit)).corpus[:limit]
    return Corpus([passage.title for passage in passages], [passage.text for passage in passages]), "synthetic"


def peak_mib() -> float:
    """Return the process's peak resident memory in MiB."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 2**20 if sys.platform == "darwin" else peak / 2**10


def main() -> None:
    """Load, embed and search, and print the peak after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--limit", type=int, default=40_026, help="number of passages")
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--layers", type=int, nargs="+", help="transformer layers to keep; all by default")
    parser.add_argument("--autocast", action="store_true", help="embed in bfloat16")
    parser.add_argument("--queries", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=5, help="of encoding and searching the queries")
    parser.add_argument("--backend", choices=["torch", "faiss"], default="torch")
    parser.add_argument("--out", type=Path, help="where to write the figures as JSON")
    args = parser.parse_args()
    stages: dict[str, Any] = {"imports": {"peak_mib": peak_mib()}}
    began = time.perf_counter()

    def stage(name: str) -> None:
        nonlocal began
        stages[name] = {"peak_mib": peak_mib(), "seconds": time.perf_counter() - began}
        began = time.perf_counter()

    corpus, source = read_corpus(args.limit)
    stage("load")
    encoder = TextEncoder.load(args.model, layers=args.layers, autocast=args.autocast)
    stage("encoder")
    with tempfile.TemporaryDirectory() as folder:
        table = EmbeddingTable.build(encoder, corpus, cache_dir=folder, progress=sys.stderr.isatty())
        stage("embed")
        index = ExactIndex(table.vectors, args.backend)
        asked = corpus.texts(np.random.default_rng(0).choice(len(corpus), args.queries, replace=False))
        times: dict[str, list[float]] = {"encode": [], "search": []}
        for _ in range(args.repeats):
            start = time.perf_counter()
            queries = encoder.encode(asked, "query")
            encoded = time.perf_counter()
            index.search(queries, 100)
            times["encode"].append(encoded - start)
            times["search"].append(time.perf_counter() - encoded)
        stage("search")
    vectors = len(corpus) * encoder.dim * 4 / 2**20
    report = {
        "passages": len(corpus),
        "source": source,
        "vectors_mib": vectors,
        "backend": args.backend,
        "stages": stages,
        "queries": args.queries,
        "seconds": {name: statistics.median(values) for name, values in times.items()},
        "search_over_encoding": statistics.median(
            search / encode for encode, search in zip(times["encode"], times["search"], strict=True)
        ),
    }
    print(json.dumps(report, indent=2))
    if args.out:
        args.out.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
