"""``retrieval_gym evaluate``: score one or several retrievers on one environment and print them in one table."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from retrieval_gym.bm25 import QUERIES
from retrieval_gym.commands.common import parse_env_kwargs
from retrieval_gym.evaluation import evaluate, table
from retrieval_gym.files import write_text
from retrieval_gym.registration import environment_dataset
from retrieval_gym.retrieval import RETRIEVERS, make_retriever

RUN_OPTIONS = ("device", "cache_dir")
DENSE_ONLY = ("encoder", "device", "layers", "max_passage_tokens", "cache_dir")


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Add the subcommand and its arguments."""
    parser = subparsers.add_parser(
        "evaluate",
        help="score retrievers on an environment",
        description="Score retrievers on the questions of an environment. Chains always spend their whole budget.",
    )
    add = parser.add_argument
    add("--env", required=True, metavar="ID", help="environment id, such as ChainRetrieval-MuSiQue-v0")
    add("--split", default="dev", help="train, dev or test (default: dev)")
    add("--env-kwargs", nargs="+", default=[], metavar="KEY=VALUE", help="what gym.make would take, such as path=DIR")
    add(
        "--retriever",
        nargs="+",
        required=True,
        metavar="NAME",
        help=f"{', '.join(RETRIEVERS)}, run:FOLDER (a finished run), or package.module:factory, a function that takes "
        "the dataset; one or several",
    )
    add("--single", action="store_true", help="also score one search with the question alone, per retriever")
    add("--steps", type=int, help="picks a question (default: the environment's max_steps)")
    add("--ks", type=int, nargs="+", default=[2, 5, 10], help="ranks at which rankings are scored (default: 2 5 10)")
    add("--threshold", type=float, help="add the metrics of stopping before the first pick scored below this")
    add("--limit", type=int, help="ask a random sample of this many questions")
    add("--seed", type=int, default=0, help="of the sample and of the random retriever (default: 0)")
    add("--batch-size", type=int, default=256, help="questions searched at once (default: 256)")
    add("--query", choices=QUERIES, help="bm25: search with the state, the default, or with the question at every step")
    add("--encoder", metavar="NAME_OR_PATH", help="dense: Hub id or directory (default: the package's own)")
    add("--device", help="dense: auto, cpu, cuda or mps (default: auto)")
    add("--layers", type=int, nargs="+", help="dense: transformer layers to keep, such as 0 2 5")
    add("--max-passage-tokens", type=int, help="dense: where passages are cut (default: the encoder's limit)")
    add("--cache-dir", metavar="DIR", help="dense: where corpus embeddings are kept")
    add("--out", metavar="FILE.json", help="write every figure and assumption as JSON")
    add("--per-question", metavar="FILE.jsonl", help="write every question's chain, one JSON object a line")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Score, print and write; return the exit status."""
    _check(args)
    # A factory of the user's own is looked up in the working directory too, as `python -m` would.
    if any(":" in name for name in args.retriever) and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    dataset, max_steps = environment_dataset(args.env, args.split, **parse_env_kwargs(args.env_kwargs))
    dense = {name: getattr(args, name) for name in DENSE_ONLY if getattr(args, name) is not None}
    evaluations = []
    for name in args.retriever:
        options = dense if name == "dense" else {}
        if name.startswith("run:"):
            options = {key: dense[key] for key in RUN_OPTIONS if key in dense}
        if name == "bm25" and args.query is not None:
            options = {"query": args.query}
        retriever = make_retriever(name, dataset, seed=args.seed, **options)
        for single in (False, True) if args.single else (False,):
            evaluations.append(
                evaluate(
                    retriever,
                    dataset,
                    steps=max_steps if args.steps is None else args.steps,
                    ks=args.ks,
                    threshold=args.threshold,
                    single=single,
                    limit=args.limit,
                    seed=args.seed,
                    batch_size=args.batch_size,
                    name=f"{name} (single)" if single else name,
                )
            )
    print(f"environment: {args.env}")
    print(table(evaluations))
    if args.out:
        report = {"environment": args.env, "evaluations": [evaluation.to_json() for evaluation in evaluations]}
        write_text(args.out, json.dumps(report, indent=2, allow_nan=False, ensure_ascii=False) + "\n")
    if args.per_question:
        records = (record for evaluation in evaluations for record in evaluation.records())
        lines = [json.dumps(record, allow_nan=False, ensure_ascii=False) + "\n" for record in records]
        write_text(args.per_question, "".join(lines))
    return 0


def _check(args: argparse.Namespace) -> None:
    """Refuse, before any work, options that would do nothing and files that could not be written.

    Raises:
        ValueError: for an option of a retriever that is not asked for, or a retriever named twice.
        FileNotFoundError: when the folder of an output file does not exist.
    """
    runs = any(name.startswith("run:") for name in args.retriever)
    given = [name for name in DENSE_ONLY if getattr(args, name) is not None and not (runs and name in RUN_OPTIONS)]
    if given and "dense" not in args.retriever:
        raise ValueError(f"--{given[0].replace('_', '-')} is for the retriever dense, which is not asked for")
    if args.query is not None and "bm25" not in args.retriever:
        raise ValueError("--query is for the retriever bm25, which is not asked for")
    if len(set(args.retriever)) < len(args.retriever):
        raise ValueError(f"retrievers {args.retriever}: name each once")
    for path in (args.out, args.per_question):
        if path and not Path(path).parent.is_dir():
            raise FileNotFoundError(f"cannot write {path}: there is no folder {Path(path).parent}; make it first")
