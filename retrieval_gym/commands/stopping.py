"""``retrieval_gym stopping``: choose the score below which a chain stops, and say what stopping there does."""

from __future__ import annotations

import argparse
import json

import numpy as np

from retrieval_gym import mdp
from retrieval_gym.commands.common import parse_env_kwargs
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
from retrieval_gym.evaluation import sample_questions
from retrieval_gym.files import write_text
from retrieval_gym.plots import check_picture, save_figure, stopping_figure
from retrieval_gym.progress import Progress, Watched
from retrieval_gym.ranking import Ids
from retrieval_gym.registration import environment_dataset
from retrieval_gym.stopping import Stopping, StoppingReport, score_states


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Add the subcommand and its arguments."""
    parser = subparsers.add_parser(
        "stopping",
        help="choose a threshold for early stopping and report what it does",
        description="Choose, on one half of the questions or on another split, the threshold on the best candidate's "
        "score below which a chain stops, and report on the others what that does to F1 and the number of picks, and "
        "how well a low score tells that all gold is found. evaluate --threshold applies it.",
    )
    add_question_arguments(parser)
    add_retriever_arguments(parser, required=True, keeps_searches=True)
    add = parser.add_argument
    add(
        "--choose-on",
        metavar="SPLIT",
        help="split whose questions the threshold is chosen on (default: a random half of those asked; the other half "
        "is reported)",
    )
    add("--out", metavar="FILE.json", help="write every figure, curve and assumption as JSON")
    add("--picture", metavar="FILE.png|svg", help="draw F1 and picks by threshold")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Play, choose, report, write and print; return the exit status."""
    _check(args)
    dataset, max_steps = load_questions(args)
    steps = mdp.check_max_steps(max_steps if args.steps is None else args.steps, "steps")
    reported = sample_questions(dataset, args.limit, args.seed)
    if args.choose_on is None:
        other = dataset
        chosen, reported = _halves(reported, args.seed)
        choice = f"{len(chosen)} other questions: a random half, with seed {args.seed}, of those asked"
    else:
        kwargs = parse_env_kwargs(args.env_kwargs)
        other, _ = environment_dataset(args.env, args.choose_on, **kwargs)
        chosen = sample_questions(other, args.limit, args.seed)
        choice = f"{len(chosen)} questions of the split {args.choose_on}"
    systems = []
    with search_log(args) as log:
        for name in args.retriever:
            retriever = log.keep(name, named_retriever(name, args, dataset), dataset)
            choosing = retriever
            if other is not dataset:
                choosing = log.keep(name, named_retriever(name, args, other), other)
            task, total = f"{name}, {steps + 1} searches a question", (steps + 1) * (len(chosen) + len(reported))
            with Progress(task, total, "searches") as progress:
                scored = [
                    score_states(Watched(player, progress), each, questions, steps, batch_size=args.batch_size)
                    for player, each, questions in ((choosing, other, chosen), (retriever, dataset, reported))
                ]
            tell_truncated(name, retriever)
            systems.append(Stopping(name, *scored))
        sampled = args.limit is not None and args.limit < max(len(dataset), len(other))
        report = StoppingReport(systems, choice, args.seed if sampled else None)
        try:  # files first, which a closed stdout must not cost; the table also where a file cannot be written
            _write(args, report)
        finally:
            print(f"environment: {args.env}")
            print(report.table())
    return 0


def _halves(questions: Ids, seed: int) -> tuple[Ids, Ids]:
    """Part the questions at random into two halves, each ascending.

    Raises:
        ValueError: when there is only one.
    """
    if len(questions) < 2:
        raise ValueError(
            f"{len(questions)} question cannot be halved: ask at least 2, or choose on a --choose-on split"
        )
    order = np.random.default_rng(seed).permutation(questions)
    return np.sort(order[: len(order) // 2]), np.sort(order[len(order) // 2 :])


def _write(args: argparse.Namespace, report: StoppingReport) -> None:
    if args.out is not None:
        text = json.dumps({"environment": args.env} | report.to_json(), indent=2, allow_nan=False, ensure_ascii=False)
        write_text(args.out, text + "\n")
    if args.picture is not None:
        save_figure(stopping_figure(report), args.picture)


def _check(args: argparse.Namespace) -> None:
    """Refuse, before any work, what could not be done."""
    check_retriever_arguments(args, keeps_searches=True)
    if args.choose_on == args.split:
        raise ValueError(
            f"--choose-on {args.choose_on} is the split that is reported: name another, or leave it out, which chooses "
            "on one half of the questions and reports on the other"
        )
    if args.batch_size < 1:
        raise ValueError(f"--batch-size must be at least 1, got {args.batch_size}")
    check_outputs({"--out": args.out, "--picture": args.picture}, input_paths(args))
    if args.picture is not None:
        check_picture(args.picture)
