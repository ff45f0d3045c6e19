"""``retrieval_gym diagnose``: how often chains carry wrong passages, and what these cost."""

from __future__ import annotations

import argparse
import json

from retrieval_gym import mdp
from retrieval_gym.chain_logs import read_chain_logs
from retrieval_gym.chains import greedy_chain
from retrieval_gym.commands.retrievers import (
    BATCH_SIZE,
    SEED,
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
from retrieval_gym.diagnostics import Asked, Reached, Walk, ask, reach
from retrieval_gym.evaluation import sample_questions
from retrieval_gym.files import write_text
from retrieval_gym.kept_searches import SearchLog
from retrieval_gym.mismatch import MismatchReport
from retrieval_gym.plots import check_picture, mismatch_figure, save_figure
from retrieval_gym.progress import Progress, Watched
from retrieval_gym.ranking import Ids


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Add the subcommand and its arguments."""
    parser = subparsers.add_parser(
        "diagnose",
        help="measure the state mismatch of retrievers and of logged chains",
        description="Measure how often chains hold wrong passages while gold is missing, how the next step fares by "
        "their number, and what deleting them gains.",
    )
    add_question_arguments(parser)
    add = parser.add_argument
    add(
        "--chains",
        nargs="+",
        default=[],
        metavar="FILE.jsonl",
        help="logged chains: one object a line with the question's id and the picked passages' ids, "
        '{"id": "q7", "picked": ["p3", "p41"]}, or what evaluate --per-question wrote; one or several files',
    )
    add_retriever_arguments(parser, required=False, keeps_searches=True)
    add(
        "--states-from",
        metavar="NAME",
        help="whose states every retriever is asked about: one of --retriever, or log:NAME, where NAME is the field "
        "'retriever' or else the file's name (default: the first log, else the first retriever)",
    )
    add("--out", metavar="FILE.json", help="write every figure and assumption as JSON")
    add("--picture", metavar="FILE.png|svg", help="draw the mismatch by step and the success by wrong passages")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Walk, ask, write and print; return the exit status."""
    _check(args)
    dataset, max_steps = load_questions(args)
    logs = read_chain_logs(args.chains, dataset) if args.chains else {}
    names = [*logs, *args.retriever]
    source = names[0] if args.states_from is None else args.states_from
    if source not in names:
        raise ValueError(f"--states-from {source!r} is not among the systems: choose one of {', '.join(names)}")
    questions = next(iter(logs.values())).questions if logs else sample_questions(dataset, args.limit, args.seed)
    steps = mdp.check_max_steps(max_steps if args.steps is None else args.steps, "steps")
    with search_log(args) as log:
        reached, asked = _play(args, dataset, logs, source, questions, steps, log)
        sampled = not logs and len(questions) < len(dataset)
        report = MismatchReport(
            dataset=dataset,
            reached=tuple(reached[name] for name in names),
            source=source,
            fixed=reached[source].distinct()[0],
            asked=tuple(asked[name] for name in sorted(asked, key=lambda name: (name != source, names.index(name)))),
            sample_seed=args.seed if sampled else None,
        )
        try:  # files first, which a closed stdout must not cost; the table also where a file cannot be written
            _write(args, report)
        finally:
            print(f"environment: {args.env}")
            print(report.table())
    return 0


def _write(args: argparse.Namespace, report: MismatchReport) -> None:
    if args.out is not None:
        text = json.dumps({"environment": args.env} | report.to_json(), indent=2, allow_nan=False, ensure_ascii=False)
        write_text(args.out, text + "\n")
    if args.picture is not None:
        save_figure(mismatch_figure(report), args.picture)


def _check(args: argparse.Namespace) -> None:
    """Refuse, before any work, what could not be done and options that would do nothing."""
    if not args.retriever and not args.chains:
        raise ValueError("there is nothing to diagnose: name a --retriever, give logged --chains, or both")
    check_retriever_arguments(args, keeps_searches=True)
    if args.chains and args.limit is not None:
        raise ValueError(f"--limit {args.limit} would do nothing: the logged --chains say which questions are asked")
    if not args.retriever and args.steps is not None:
        raise ValueError(f"--steps {args.steps} would do nothing: logged chains have the steps that they have")
    if not args.retriever:
        for flag, value, default in (("--seed", args.seed, SEED), ("--batch-size", args.batch_size, BATCH_SIZE)):
            if value != default:
                raise ValueError(f"{flag} {value} would do nothing: nothing is drawn or searched for logged chains")
    check_outputs({"--out": args.out, "--picture": args.picture}, [*args.chains, *input_paths(args)])
    if args.picture is not None:
        check_picture(args.picture)


def _play(
    args: argparse.Namespace,
    dataset: RetrievalDataset,
    logs: dict[str, Walk],
    source: str,
    questions: Ids,
    steps: int,
    log: SearchLog,
) -> tuple[dict[str, Reached], dict[str, Asked]]:
    """Return each system's own chains, and what the retrievers and the source do in the source's states."""
    reached = {name: reach(name, walk, dataset) for name, walk in logs.items()}
    asked = {}
    if source in logs:
        asked[source] = Asked(source, reached[source].distinct()[1], None)
    # The source goes first, since the others are asked about its states; one retriever at a time is held in memory.
    for name in sorted(args.retriever, key=lambda name: name != source):
        retriever = log.keep(name, named_retriever(name, args, dataset), dataset)
        task = f"{name}, {steps} steps of {len(questions)} questions"
        with Progress(task, steps * len(questions), "searches") as progress:
            chains = greedy_chain(Watched(retriever, progress), dataset, questions, steps, batch_size=args.batch_size)
        reached[name] = reach(name, chains, dataset)
        fixed, success = reached[source].distinct()
        known = success if name == source else None
        total = int((fixed.wrong > 0).sum()) + (0 if name == source else len(fixed))
        task = f"{name}, {total} states that {source} reached, wrong passages deleted or not"
        with Progress(task, total, "searches") as progress:
            watched = Watched(retriever, progress)
            asked[name] = ask(name, watched, fixed, dataset, batch_size=args.batch_size, success=known)
        tell_truncated(name, retriever)
    return reached, asked
