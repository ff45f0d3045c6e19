r"""What training a chain retriever on states that it reaches itself is worth: agents/infonce.py under several regimes.

For each seed, ``--states gold`` is trained first: its run is the first walker of the regimes that walk, and the states
that it reaches on the reported questions are the fixed ones on which all regimes of that seed are asked for their next
step. Reported: complete@5 and complete@10 of greedy chains; next-step success on the fixed states by number of wrong
passages; what deleting these gains; complete@5 by number of gold passages; each with the paired difference to gold,
intervals over questions and the seeds' figures pooled by question; the untrained encoder in a chain and in one search,
gold in a search with 4 beams; minutes, share of rollouts, and peak memory of each regime. A run that is there is not
trained again; one that stopped goes on; what was measured of a seed is kept in a file and read from there.

    python benchmarks/state_regimes.py --seeds 1 101 201 --runs runs/regimes --out state_regimes.json \
        --flags "--layers 0 2 5 --no-train-embeddings --autocast"
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shlex
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from itertools import repeat
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from retrieval_gym.diagnostics import ask, reached_states
from retrieval_gym.evaluation import Evaluation, evaluate
from retrieval_gym.files import write_atomically
from retrieval_gym.nn.campaign import Pool, threads_of, train_once, untrained_retriever
from retrieval_gym.nn.reporting import environment_spec, load_reported
from retrieval_gym.nn.trained import load_run
from retrieval_gym.protocol import align

AGENT = Path(__file__).resolve().parents[1] / "agents" / "infonce.py"
REGIMES = ("gold", "noise", "noise-resampled", "once", "once-resampled", "on-policy")
WALKED = ("once", "once-resampled", "on-policy")
Figures = dict[tuple[str, str], tuple[NDArray[Any], NDArray[np.int64]]]
METRICS = ("complete@5", "complete@10", "all_gold_picked")
WRONG: dict[str, Callable[[NDArray[np.int64]], NDArray[np.bool_]]] = {
    "0": lambda wrong: wrong == 0,
    "1": lambda wrong: wrong == 1,
    "2+": lambda wrong: wrong >= 2,
}


def train(args: argparse.Namespace, regime: str, seed: int) -> Path:
    """Return the folder of a finished run of this regime and seed, trained here where there is none yet."""
    flags = ["--env", args.env, "--states", regime, "--seed", str(seed), *shlex.split(args.flags)]
    flags += ["--cache-dir", str(args.runs / "embeddings")]
    flags += ["--env-kwargs", *args.env_kwargs] if args.env_kwargs else []
    flags += ["--eval-envs", *args.eval_envs] if args.eval_envs else []
    if regime in WALKED:
        flags += ["--first-walker", str(train(args, "gold", seed))]
    return train_once(AGENT, flags, args.runs / f"{regime}-{seed}", threads_of(args.jobs))


def cost(directory: Path) -> dict[str, float]:
    """Return the minutes of a run's epochs, the share of walks in them, of mining, and its peak memory."""
    epochs = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    epochs = [line for line in epochs if "charts/epoch_seconds" in line]
    seconds = np.array([line["charts/epoch_seconds"] for line in epochs])
    shares = {name: np.array([line[f"charts/{name}_share"] for line in epochs]) for name in ("rollout", "mining")}
    memory = json.loads((directory.parent / "memory.json").read_text())
    return {
        "minutes": seconds.sum() / 60,
        **{k: float(v @ seconds / seconds.sum()) for k, v in shares.items()},
    } | memory


def measure(spec: str, seed: int, runs: dict[str, Path], cache: Path) -> Figures:
    """Ask the runs of one seed, the untrained encoder, and gold with beams, the dev questions of one environment.

    Args:
        spec: the environment.
        seed: of the runs.
        runs: by regime, gold first.
        cache: where embeddings are kept.

    Returns:
        By name and measure, the values and the questions that they belong to.
    """
    dataset, steps = load_reported(spec, "dev")
    figures: Figures = {}

    def add(name: str, result: Evaluation) -> Evaluation:
        for metric in METRICS:
            figures[name, metric] = result.metrics[metric], result.chains.questions
        return result

    base = untrained_retriever(runs["gold"], dataset, cache)
    add("untrained", evaluate(base, dataset, steps=steps))
    add("untrained, single", evaluate(base, dataset, steps=steps, search="single"))
    retriever = load_run(runs["gold"], dataset, cache_dir=cache)
    add("gold, beam 4", evaluate(retriever, dataset, steps=steps, search="beam", beams=4))
    fixed = None
    for regime, run in runs.items():
        retriever = load_run(run, dataset, cache_dir=cache)
        result = add(regime, evaluate(retriever, dataset, steps=steps))
        if fixed is None:  # gold is the first regime
            fixed = reached_states(result.chains, dataset)
        asked = ask(regime, retriever, fixed, dataset)
        questions = fixed.states.question
        for group, chosen in WRONG.items():
            rows = chosen(fixed.wrong)
            figures[regime, f"next step, {group} wrong"] = asked.success[rows], questions[rows]
        wrong = fixed.wrong > 0
        assert asked.deleted is not None
        gain = asked.deleted[0].astype(np.float64) - asked.success[wrong]
        figures[regime, "deletion gain"] = gain, questions[wrong]
        print(f"measured: {spec}, {regime}, seed {seed}", file=sys.stderr, flush=True)
    return figures


def measure_once(spec: str, seed: int, runs: dict[str, Path], args: argparse.Namespace) -> Figures:
    """Return what ``measure`` found, from the file that an earlier call has left where there is one."""
    asked = hashlib.sha256(json.dumps([spec, {regime: run.name for regime, run in runs.items()}]).encode()).hexdigest()
    file = args.runs / "figures" / f"{asked[:16]}-{seed}.npz"
    if not file.is_file():
        torch.set_num_threads(threads_of(args.jobs))
        found = measure(spec, seed, runs, args.runs / "embeddings")
        arrays = {f"{name}|{what}|{i}": pair[i] for (name, what), pair in found.items() for i in range(2)}
        file.parent.mkdir(exist_ok=True)
        write_atomically(file, lambda stream: np.savez(stream, **arrays))  # type: ignore[arg-type]
    with np.load(file) as kept:
        keys = dict.fromkeys(tuple(key.split("|")[:2]) for key in kept.files)
        return {(name, what): (kept[f"{name}|{what}|0"], kept[f"{name}|{what}|1"]) for name, what in keys}


def main() -> None:
    """Train, measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--env", default="ChainRetrieval-SyntheticOpen-v0")
    add("--env-kwargs", nargs="+", default=[], metavar="KEY=VALUE", help="of training")
    add("--eval-envs", nargs="+", default=[], metavar="ID?KEY=VALUE", help="reported; default: the trained one")
    add("--regimes", nargs="+", default=list(REGIMES), choices=REGIMES, help="gold is always among them")
    add("--seeds", nargs="+", type=int, default=[1, 101, 201])
    add("--runs", type=Path, required=True, help="folder of the runs; give each comparison its own")
    add("--flags", default="", help="of agents/infonce.py, for all runs")
    add(
        "--jobs",
        type=int,
        default=1,
        help="seeds trained or measured at the same time, which share the processor's cores",
    )
    add("--out", type=Path, help="where to write the figures as JSON")
    args = parser.parse_args()
    args.regimes = ["gold", *(regime for regime in REGIMES if regime in args.regimes and regime != "gold")]
    with ThreadPoolExecutor(args.jobs) as workers:
        trained = workers.map(lambda seed: {(r, seed): train(args, r, seed) for r in args.regimes}, args.seeds)
        runs = {key: run for found in trained for key, run in found.items()}
    figures: dict[str, Any] = {"flags": args.flags, "seeds": args.seeds, "cost": {}, "environments": {}}
    for spec in args.eval_envs or [environment_spec(args.env, args.env_kwargs)]:
        pool, num_gold = Pool(), load_reported(spec, "dev")[0].num_gold
        seeds = [{regime: runs[regime, seed] for regime in args.regimes} for seed in args.seeds]
        with ProcessPoolExecutor(args.jobs, get_context("spawn")) as workers:
            for found in workers.map(measure_once, repeat(spec), args.seeds, seeds, repeat(args)):
                for (name, what), (values, questions) in found.items():
                    pool.add(name, what, values, questions)
                    for number in np.unique(num_gold[questions]) if what == METRICS[0] else ():
                        rows = num_gold[questions] == number
                        pool.add(name, f"{what}, {number} gold", values[rows], questions[rows])
        measures = sorted({measure for _, measure in pool.keys()})
        text, figures["environments"][spec] = pool.report("gold", measures, args.seeds)
        print(f"\n{spec}, dev\n{text}", flush=True)
    rows = [["regime", "minutes", "in rollouts", "in mining", "peak memory, GB"]]
    for regime in args.regimes:
        costs = [cost(runs[regime, seed]) for seed in args.seeds]
        mean = {name: float(np.mean([each[name] for each in costs])) for name in costs[0]}
        figures["cost"][regime] = mean
        rows.append([regime, f"{mean['minutes']:.1f}", f"{mean['rollout']:.0%}", f"{mean['mining']:.0%}",
                     f"{mean['peak_gigabytes']:.1f}"])  # fmt: skip
    print("\n" + "\n".join(align(rows)))
    if args.out:
        args.out.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
