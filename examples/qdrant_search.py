"""How do I search in a vector database with a trained run? Upsert the exported vectors, and query once a step.

python examples/qdrant_search.py EXPORT "question" --run RUN --path FOLDER

EXPORT is what `retrieval_gym export RUN EXPORT --npy` wrote. Qdrant runs in memory here; QdrantClient(url=...) takes
its place. Nothing but EXPORT is needed to search: sentence-transformers encodes the question and what was picked, and
Qdrant leaves out what was picked. With --run and --path the chain is compared with retrieval_gym's own, which cuts long
questions and passages inside the query where this script does not. It needs qdrant-client.
"""

import argparse
import json
import sys
from pathlib import Path

import numpy as np
from qdrant_client import QdrantClient, models
from sentence_transformers import SentenceTransformer

from retrieval_gym.nn.text_retriever import load_retriever

BATCH = 256  # points in one request
TOLERANCE = 1e-5  # float32, and another order of summing


def upsert(client, folder):
    """Put every exported passage into a collection, under its row as the point's id."""
    vectors = np.load(folder / "vectors.npy")
    params = models.VectorParams(size=vectors.shape[1], distance=models.Distance.DOT)
    client.create_collection("passages", vectors_config=params)
    with open(folder / "passages.jsonl", encoding="utf-8") as file:
        passages = [json.loads(line) for line in file]
    for start in range(0, len(passages), BATCH):
        points = [
            models.PointStruct(id=row, vector=vectors[row].tolist(), payload=passages[row])
            for row in range(start, min(start + BATCH, len(passages)))
        ]
        client.upsert("passages", points)


def walk(client, encoder, question, steps):
    """Return the payloads and scores of a greedy chain."""
    state, found = question, []
    for _ in range(steps):
        picked = models.Filter(must_not=[models.HasIdCondition(has_id=[point.id for point in found])])
        vector = encoder.encode(state, prompt_name="query").tolist()
        points = client.query_points("passages", vector, query_filter=picked if found else None, limit=1).points
        if not points:
            break
        found += points
        title, text = points[0].payload["title"], points[0].payload["text"]
        state += f"\n{title}\n{text}" if title else f"\n{text}"
    return [(point.payload, point.score) for point in found]


def agree(found, hits):
    """Say whether two chains score alike at every step; passages that tie may stand for each other."""
    return len(found) == len(hits) and all(
        abs(score - hit.score) <= TOLERANCE for (_, score), hit in zip(found, hits, strict=True)
    )


def parse(arguments=None):
    """Return the arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("export", help="folder that `retrieval_gym export --npy` wrote")
    parser.add_argument("question", nargs="+")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--run", help="the run's folder, to compare with")
    parser.add_argument("--path", help="folder of the corpus, to compare with")
    return parser.parse_args(arguments)


def main(args):
    """Search, print and compare; return 1 where a chain differs."""
    folder = Path(args.export)
    client, encoder = QdrantClient(":memory:"), SentenceTransformer(str(folder / "query_encoder"))
    upsert(client, folder)
    ours = load_retriever(args.run, args.path) if args.run and args.path else None
    differ = 0
    for question in args.question:
        print(question)
        found = walk(client, encoder, question, args.steps)
        for step, (payload, score) in enumerate(found, start=1):
            print(f"{step:3d}. {score:8.4f}  [{payload['id']}] {payload['title']}: {payload['text'][:80]}")
        if ours is not None:
            same = agree(found, ours.chain(question, args.steps).hits)
            differ += not same
            print("  the same chain as ours" if same else "  NOT the chain that retrieval_gym walks")
    return 1 if differ else 0


if __name__ == "__main__":
    sys.exit(main(parse()))
