"""``retrieval_gym evaluate``: score one or several retrievers on one environment and print them in one table."""

from __future__ import annotations

import argparse
import json

from retrieval_gym import ir_metrics
from retrieval_gym.chains import BEAMS, SEARCHES, final_ranking
from retrieval_gym.commands.common import MOST_BEAMS, MOST_RANKS, check_number
from retrieval_gym.commands.retrievers import (
    add_question_arguments,
    add_retriever_arguments,
    check_outputs,
    check_retriever_arguments,
    input_paths,
    load_questions,
    named_retriever,
    search_log,
    tell_truncated,
)
from retrieval_gym.datasets import RetrievalDataset
from retrieval_gym.evaluation import Evaluation, evaluate, table
from retrieval_gym.files import write_text
from retrieval_gym.kept_searches import SearchLog


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Add the subcommand and its arguments."""
    parser = subparsers.add_parser(
        "evaluate",
        help="score retrievers on an environment",
        description="Score retrievers on the questions of an environment. Chains always spend their whole budget.",
    )
    add_question_arguments(parser)
    add_retriever_arguments(parser, required=True, keeps_searches=True)
    add = parser.add_argument
    add(
        "--search",
        nargs="+",
        choices=SEARCHES,
        default=["greedy"],
        help="how each retriever is played: greedy, one search a step (default); single, one search with the question "
        "alone; beam, several chains at once; one or several",
    )
    add("--beams", type=int, help=f"beam: how many chains a question keeps (default: {BEAMS})")
    add("--ks", type=int, nargs="+", default=[2, 5, 10], help="ranks at which rankings are scored (default: 2 5 10)")
    add(
        "--measures",
        nargs="+",
        default=[],
        metavar="NAME",
        help="more metrics of the rankings, as ir_measures names them: nDCG@10 R@20 RR@10 AP@100 P@5 Success@1, ...",
    )
    add("--threshold", type=float, help="add the metrics of stopping before the first pick scored below this")
    add("--out", metavar="FILE.json", help="write every figure and assumption as JSON")
    add("--per-question", metavar="FILE.jsonl", help="write every question's chain, one JSON object a line")
    add(
        "--run-file",
        metavar="FILE.trec",
        help="write the final rankings as a TREC run, as deep as the searches: 100 passages, or more where --measures "
        "or --ks ask for them; for one retriever and one search",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Score, write and print; return the exit status."""
    _check(args)
    dataset, max_steps = load_questions(args)
    with search_log(args) as log:
        evaluations = [
            evaluation for name in args.retriever for evaluation in _play(name, args, dataset, max_steps, log)
        ]
        try:  # files first, which a closed stdout must not cost; the table also where a file cannot be written
            _write(args, dataset, evaluations)
        finally:
            print(f"environment: {args.env}")
            print(table(evaluations))
    return 0


def _play(
    name: str, args: argparse.Namespace, dataset: RetrievalDataset, max_steps: int, log: SearchLog
) -> list[Evaluation]:
    """Score one retriever in every kind of search."""
    retriever = log.keep(name, named_retriever(name, args, dataset), dataset)
    evaluations = [
        evaluate(
            retriever,
            dataset,
            steps=max_steps if args.steps is None else args.steps,
            ks=args.ks,
            measures=args.measures,
            threshold=args.threshold,
            search=search,
            beams=BEAMS if args.beams is None else args.beams,
            limit=args.limit,
            seed=args.seed,
            batch_size=args.batch_size,
            name=name,
            progress=f"{name}, {search}",
        )
        for search in args.search
    ]
    tell_truncated(name, retriever)
    return evaluations


def _write(args: argparse.Namespace, dataset: RetrievalDataset, evaluations: list[Evaluation]) -> None:
    if args.out is not None:
        report = {"environment": args.env, "evaluations": [evaluation.to_json() for evaluation in evaluations]}
        write_text(args.out, json.dumps(report, indent=2, allow_nan=False, ensure_ascii=False) + "\n")
    if args.per_question is not None:
        records = (record for evaluation in evaluations for record in evaluation.records())
        lines = [json.dumps(record, allow_nan=False, ensure_ascii=False) + "\n" for record in records]
        write_text(args.per_question, "".join(lines))
    if args.run_file is not None:
        (only,) = evaluations
        ranking = final_ranking(only.chains, only.chains.step_ids.shape[2])
        ir_metrics.write_run(args.run_file, ranking, dataset, only.chains.questions, only.retriever)


def _check(args: argparse.Namespace) -> None:
    """Refuse, before any work, options that would do nothing and files that could not be written."""
    check_retriever_arguments(args, keeps_searches=True)
    if len(set(args.search)) < len(args.search):
        raise ValueError(f"searches {args.search}: name each once")
    if args.beams is not None and "beam" not in args.search:
        raise ValueError("--beams is for the search beam, which is not asked for")
    check_number("--beams", args.beams, MOST_BEAMS)
    for k in args.ks:
        check_number("--ks", k, MOST_RANKS)
    if args.measures:
        ir_metrics.parse_measures(args.measures)
    if args.run_file is not None and len(args.retriever) * len(args.search) > 1:
        raise ValueError("--run-file holds one run: ask for one retriever and one search, and for the others again")
    outputs = {"--out": args.out, "--per-question": args.per_question, "--run-file": args.run_file}
    check_outputs(outputs, input_paths(args))
