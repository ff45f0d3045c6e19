"""``retrieval_gym evaluate``: score one or several retrievers on one environment and print them in one table."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

from retrieval_gym.bm25 import QUERIES
from retrieval_gym.commands.common import parse_env_kwargs
from retrieval_gym.evaluation import evaluate, table
from retrieval_gym.files import write_text
from retrieval_gym.registration import ENVIRONMENT_KWARGS, environment_dataset
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
    env_kwargs = parse_env_kwargs(args.env_kwargs)
    _check_env_kwargs(env_kwargs)
    dataset, max_steps = environment_dataset(args.env, args.split, **env_kwargs)
    dense = {name: getattr(args, name) for name in DENSE_ONLY if getattr(args, name) is not None}
    evaluations = []
    for name in args.retriever:
        options = dense if name == "dense" else {}
        if name.startswith("run:"):
            options = {key: dense[key] for key in RUN_OPTIONS if key in dense}
        if name == "bm25" and args.query is not None:
            options = {"query": args.query}
        try:
            retriever = make_retriever(name, dataset, seed=args.seed, **options)
        except TypeError as error:
            raise ValueError(f"retriever {name!r} cannot be made from a dataset: {error}") from error
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
    if args.out is not None:
        report = {"environment": args.env, "evaluations": [evaluation.to_json() for evaluation in evaluations]}
        write_text(args.out, json.dumps(report, indent=2, allow_nan=False, ensure_ascii=False) + "\n")
    if args.per_question is not None:
        records = (record for evaluation in evaluations for record in evaluation.records())
        lines = [json.dumps(record, allow_nan=False, ensure_ascii=False) + "\n" for record in records]
        write_text(args.per_question, "".join(lines))
    return 0


def _check(args: argparse.Namespace) -> None:
    """Refuse, before any work, options that would do nothing and files that could not be written.

    Raises:
        ValueError: for an option of a retriever that is not asked for, a retriever named twice, a number out of range,
            or an output that is no name of a file.
        FileNotFoundError: when the folder of an output file does not exist.
        PermissionError: when it cannot be written to.
    """
    runs = any(name.startswith("run:") for name in args.retriever)
    given = [name for name in DENSE_ONLY if getattr(args, name) is not None and not (runs and name in RUN_OPTIONS)]
    if given and "dense" not in args.retriever:
        raise ValueError(f"--{given[0].replace('_', '-')} is for the retriever dense, which is not asked for")
    if args.query is not None and "bm25" not in args.retriever:
        raise ValueError("--query is for the retriever bm25, which is not asked for")
    if len(set(args.retriever)) < len(args.retriever):
        raise ValueError(f"retrievers {args.retriever}: name each once")
    if args.seed < 0:
        raise ValueError(f"--seed must be at least 0, got {args.seed}")
    if args.max_passage_tokens is not None and args.max_passage_tokens < 1:
        raise ValueError(f"--max-passage-tokens must be at least 1, got {args.max_passage_tokens}")
    outputs = {"--out": args.out, "--per-question": args.per_question}
    for flag, path in outputs.items():
        if path is None:
            continue
        if not Path(path).name or path.endswith(("/", os.sep)) or Path(path).is_dir():
            raise ValueError(f"{flag} {path!r} is not the name of a file: give one, such as eval.json")
        folder = Path(path).parent
        if not folder.is_dir():
            raise FileNotFoundError(f"cannot write {path}: there is no folder {folder}; make it first")
        if not os.access(folder, os.W_OK):
            raise PermissionError(f"cannot write {path}: {folder} is read-only for you; choose another folder")
    if args.out is not None and args.per_question is not None and Path(args.out) == Path(args.per_question):
        raise ValueError(f"--out and --per-question are both {args.out}: give each a file of its own")


def _check_env_kwargs(kwargs: dict[str, Any]) -> None:
    """Refuse environment arguments that mean nothing to the scorer.

    Raises:
        ValueError: for ``split``, which has its own flag, and for what changes rewards, observations or the end of an
            episode.
    """
    if "split" in kwargs:
        raise ValueError(f"--env-kwargs cannot set 'split': use --split {kwargs['split']}")
    unused = sorted(kwargs.keys() & ENVIRONMENT_KWARGS - {"max_steps"})
    if unused:
        raise ValueError(
            f"--env-kwargs {unused[0]}={kwargs[unused[0]]} would change nothing: chains are scored by their picks and "
            "spend their whole budget; leave it out"
        )
