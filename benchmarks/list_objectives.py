r"""What the objectives of agents/pao.py make of one search: untrained, InfoNCE, KL-Distill, RL-All and PAO.

Every objective is trained with every seed, those that need a reward with every reward model, and all are asked the same
dev questions. Reported: nDCG and recall at 5, 10, 20 and 50 by ir_measures, each with the paired difference to the
untrained encoder, intervals over questions and the seeds' figures pooled by question; and what the last tenth of each
training logged of its policy: entropy of the list, KL to the reference, length and drift of the query vectors, share of
lists with any signal. Scored are the selected weights, which are the untrained ones where none were better, or with
--last those that training ended with. A run that is there is not trained again; one that stopped goes on.

    python benchmarks/list_objectives.py --runs runs/objectives --out list_objectives.json \
        --flags "--temperature 0.05 --epochs 4 --warmup-updates 20"
"""

from __future__ import annotations

import argparse
import json
import shlex
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from retrieval_gym.evaluation import evaluate
from retrieval_gym.nn.campaign import Pool, threads_of, train_once, untrained_retriever
from retrieval_gym.nn.dense import DenseRetriever
from retrieval_gym.nn.encoder import TextEncoder
from retrieval_gym.nn.reporting import load_reported
from retrieval_gym.nn.run import Run
from retrieval_gym.nn.trained import load_run
from retrieval_gym.protocol import align

AGENT = Path(__file__).resolve().parents[1] / "agents" / "pao.py"
OBJECTIVES = ("infonce", "kl-distill", "rl-all", "pao")
CUTOFFS = (5, 10, 20, 50)
MEASURES = tuple(f"{name}@{k}" for name in ("nDCG", "R") for k in CUTOFFS)
LOGGED = ("losses/entropy", "losses/kl", "losses/query_norm", "charts/drift", "charts/signal_share")


def arms(args: argparse.Namespace) -> dict[str, list[str]]:
    """Return the flags of every arm: an objective, with a reward model where it needs one, and its variants."""
    found: dict[str, list[str]] = {}
    for objective in args.objectives:
        models = [""] if objective == "infonce" else args.reward_models
        variants = [""] if objective == "infonce" or not args.variants else args.variants
        for model in models:
            for variant in variants:
                flags = ["--objective", objective, *(["--reward-model", model] if model else []), *shlex.split(variant)]
                found[" ".join([objective, model.partition(":")[0], variant]).strip()] = flags
    return found


def folder(arm: str, seed: int, runs: Path) -> Path:
    """Return where the run of an arm and a seed is kept."""
    return runs / f"{arm.replace('--', '').replace(' ', '_')}-{seed}"


def logged(directory: Path) -> dict[str, float]:
    """Return the means over the last tenth of a run's updates."""
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    lines = [line for line in lines if LOGGED[0] in line]
    return {name: float(np.mean([line[name] for line in lines[-max(1, len(lines) // 10) :]])) for name in LOGGED}


def take_last(encoder: TextEncoder, directory: Path) -> None:
    """Give a run's query encoder the weights that training ended with, whatever was selected."""
    weights = Run.open(directory).load("last")["query"]
    if encoder.load_state_dict(weights, strict=False).unexpected_keys:
        raise ValueError(f"{directory} trained adapters, whose last weights fit no merged encoder: leave --last out")


def measure(runs: dict[tuple[str, int], Path], args: argparse.Namespace) -> Pool:
    """Ask every run, and the untrained encoder, the dev questions."""
    dataset, steps = load_reported(args.eval_env or args.env, "dev")
    cache, pool = args.runs / "embeddings", Pool()
    first = next(iter(runs.values()))
    base = evaluate(untrained_retriever(first, dataset, cache), dataset, steps=steps, measures=MEASURES)
    for seed in args.seeds:
        found = {"untrained": base}
        for (arm, of), directory in runs.items():
            if of == seed:
                retriever = load_run(directory, dataset, cache_dir=cache)
                assert isinstance(retriever, DenseRetriever)  # pao.py made it
                if args.last:
                    take_last(retriever.encoder, directory)
                found[arm] = evaluate(retriever, dataset, steps=steps, measures=MEASURES)
        for arm, result in found.items():
            for name in MEASURES:
                pool.add(arm, name, result.metrics[name], result.chains.questions)
    return pool


def main() -> None:
    """Train, measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--env", default="ChainRetrieval-SciFact-v0", help="of one step, over a corpus")
    add("--eval-env", metavar="ID?KEY=VALUE", help="reported; default: the trained one")
    add("--objectives", nargs="+", default=list(OBJECTIVES), choices=OBJECTIVES)
    add("--reward-models", nargs="+", default=["gold"], help="for all but infonce, as agents/pao.py takes it")
    add("--variants", nargs="+", metavar="FLAGS", help='of all but infonce: "--beta 0" " --no-normalize"')
    add("--seeds", nargs="+", type=int, default=[1, 101, 201])
    add("--runs", type=Path, required=True, help="folder of the runs; give each comparison its own")
    add("--flags", default="", help="of agents/pao.py, for all runs")
    add("--last", action="store_true", help="score the weights that training ended with, not the selected ones")
    add("--jobs", type=int, default=1, help="runs trained at the same time, which share the processor's cores")
    add("--out", type=Path, help="where to write the figures as JSON")
    args = parser.parse_args()
    keys = [(arm, seed) for seed in args.seeds for arm in arms(args)]
    shared = ["--env", args.env, *shlex.split(args.flags), "--cache-dir", str(args.runs / "embeddings")]
    shared += ["--eval-envs", args.eval_env] if args.eval_env else []
    threads = threads_of(args.jobs)

    def train(key: tuple[str, int]) -> Path:
        arm, seed = key
        flags = [*shared, "--seed", str(seed), *arms(args)[arm]]
        return train_once(AGENT, flags, folder(arm, seed, args.runs), threads)

    with ThreadPoolExecutor(args.jobs) as workers:
        runs = dict(zip(keys, workers.map(train, keys), strict=True))
    text, values = measure(runs, args).report("untrained", MEASURES, args.seeds)
    print(f"{args.eval_env or args.env}, dev, {'last' if args.last else 'selected'} weights\n{text}\n")
    rows = [["arm, last tenth of training", *(name.rpartition("/")[2] for name in LOGGED)]]
    policies = {}
    for arm in arms(args):
        each = [logged(runs[arm, seed]) for seed in args.seeds]
        policies[arm] = {name: [one[name] for one in each] for name in LOGGED}
        rows.append([arm, *(f"{np.mean(policies[arm][name]):.4g}" for name in LOGGED)])
    print("\n".join(align(rows)))
    if args.out:
        figures = {"flags": args.flags, "seeds": args.seeds, "measures": values, "policies": policies}
        args.out.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
