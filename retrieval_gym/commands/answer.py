"""``retrieval_gym answer``: let a reader answer from what a retriever found, and score its answers."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from retrieval_gym import mdp
from retrieval_gym.answer_log import AnswerLog
from retrieval_gym.answering import AnswerReport, answerable, ask
from retrieval_gym.chains import BEAMS, SEARCHES
from retrieval_gym.commands.common import MOST_BEAMS, MOST_RANKS, check_number
from retrieval_gym.commands.retrievers import (
    DENSE_ONLY,
    add_question_arguments,
    add_retriever_arguments,
    check_outputs,
    check_retriever_arguments,
    input_paths,
    load_questions,
    named_retriever,
    tell_truncated,
)
from retrieval_gym.datasets import RetrievalDataset
from retrieval_gym.evaluation import Evaluation, evaluate
from retrieval_gym.files import write_text
from retrieval_gym.protocol import describe_questions
from retrieval_gym.ranking import Ids
from retrieval_gym.readers.base import Reader
from retrieval_gym.readers.chat import MAX_TOKENS, RETRIES, TIMEOUT, WORKERS
from retrieval_gym.readers.names import (
    API_KEY_VARIABLE,
    BATCH_SIZE,
    describe_reader,
    is_function,
    is_url,
    make_reader,
    read_api_key,
)
from retrieval_gym.readers.prompts import prompt

PASSAGES = 5
BOUNDS = ("no passages", "gold passages")
MOST_WORKERS, MOST_RETRIES, LONGEST_TIMEOUT = 1_000, 1_000, 86_400
ENDPOINT_ONLY = ("model", "api_key_env", "workers", "timeout", "retries", "request")
LOCAL_ONLY = ("reader_batch_size", "reader_device")


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Add the subcommand and its arguments."""
    parser = subparsers.add_parser(
        "answer",
        help="let a reader answer from what a retriever found",
        description="Give the first passages of each question's final ranking to a reader and score its answers. The "
        "same command goes on where an interrupted one stopped.",
    )
    add_question_arguments(parser)
    add_retriever_arguments(parser, required=False)
    add = parser.add_argument
    add("--run", dest="run_folder", metavar="FOLDER", help="a finished run; the same as --retriever run:FOLDER")
    add("--search", choices=SEARCHES, default="greedy", help="how the retriever is played (default: greedy)")
    add("--beams", type=int, help=f"beam: how many chains a question keeps (default: {BEAMS})")
    add("--passages", type=int, default=PASSAGES, help=f"how many passages the reader gets (default: {PASSAGES})")
    add(
        "--bounds",
        action="store_true",
        help="ask the same questions without passages and with the gold passages too; their answers go to files beside "
        "--out",
    )
    add(
        "--reader",
        metavar="URL|PATH|ID",
        help="the URL of an OpenAI-compatible chat endpoint, the folder or Hub id of a transformers model (decoder, "
        "encoder-decoder or extractive), or package.module:function",
    )
    add("--out", metavar="FILE.jsonl", help="where answers go, one a line; a file that is there goes on")
    add("--report", metavar="FILE.json", help="write every figure and assumption as JSON")
    add("--show-prompt", action="store_true", help="print what a reader is asked about the first question, and stop")
    add("--max-tokens", type=int, help=f"most tokens of an answer (default: {MAX_TOKENS})")
    add("--model", help="endpoint: the model's name there; or URL#MODEL")
    add(
        "--api-key-env",
        metavar="NAME",
        help=f"endpoint: the environment variable with its key (default: {API_KEY_VARIABLE}, where it is set)",
    )
    add("--workers", type=int, help=f"endpoint: requests at a time (default: {WORKERS})")
    add("--timeout", type=float, help=f"endpoint: seconds to wait for it (default: {TIMEOUT:g})")
    add("--retries", type=int, help=f"endpoint: how often a request is repeated (default: {RETRIES})")
    add(
        "--request",
        metavar="JSON",
        help='endpoint: fields to add to each request, or to leave out where null: \'{"max_tokens": null, '
        '"max_completion_tokens": 256}\'; they are written to --out, so no secrets',
    )
    add("--reader-batch-size", type=int, help=f"local model: questions at once (default: {BATCH_SIZE})")
    add("--reader-device", help="local model: auto, cpu, cuda or mps (default: auto)")
    parser.set_defaults(run=run)


@dataclass(frozen=True)
class _Asked:
    """One run of the reader over the questions: its name, its file, and the passages that it gives."""

    name: str
    path: Path
    passages: list[list[int]]


def run(args: argparse.Namespace) -> int:
    """Retrieve, ask, score and print; return the exit status."""
    if args.show_prompt:
        dataset, _ = load_questions(args)
        print(_shown_prompt(dataset))
        return 0
    _check(args)
    dataset, max_steps = load_questions(args)
    answered = answerable(dataset)
    questions = _sample(answered, args.limit, args.seed)
    steps = mdp.check_max_steps(max_steps if args.steps is None else args.steps, "--steps")
    of = _identity(args, dataset, questions, steps)
    for name, path in _files(args).items():  # a file of something else is refused before any work
        AnswerLog(path, of | {"passages": name or f"the first {args.passages}"}).close()

    evaluation = _retrieve(args, dataset, questions, steps)
    runs = _runs(args, dataset, questions, evaluation)
    reader: Reader | None = None
    answers: dict[str, list[str]] = {}
    for asked in runs:
        bound = asked.name if asked.name in BOUNDS else ""
        with AnswerLog(asked.path, of | {"passages": bound or f"the first {args.passages}"}) as log:
            keys = dataset.corpus.keys
            for i, passages in zip(questions.tolist(), asked.passages, strict=True):
                log.check_passages(i, [keys[p] for p in passages])
            if any(i not in log.answers for i in questions.tolist()):
                reader = _reader(args) if reader is None else reader
                try:
                    ask(reader, dataset, questions, asked.passages, log, asked.name)
                except (Exception, KeyboardInterrupt):
                    if log.answers:
                        print(
                            f"{len(log.answers)} of {len(questions)} answers ({asked.name}) are in {asked.path}; the "
                            "same command goes on from there",
                            file=sys.stderr,
                        )
                    raise
            answers[asked.name] = [log.answers[i] for i in questions.tolist()]
    report = AnswerReport(
        dataset=dataset,
        questions=questions,
        answers=answers,
        more={f"complete@{args.passages}": evaluation.metrics[f"complete@{args.passages}"]},
        protocol=_protocol(args, evaluation, len(dataset) - len(answered), len(questions) < len(answered), of),
    )
    cut = getattr(reader, "truncated", 0)
    if cut:
        print(f"{cut} prompts were longer than the reader takes, and their passages were cut", file=sys.stderr)
    try:  # the file first, which a closed stdout must not cost; the table also where it cannot be written
        if args.report is not None:
            content = {"environment": args.env} | report.to_json()
            write_text(args.report, json.dumps(content, indent=2, allow_nan=False, ensure_ascii=False) + "\n")
    finally:
        print(f"environment: {args.env}")
        print(report.table())
    return 0


def _sample(answered: Ids, limit: int | None, seed: int) -> Ids:
    """Return ``limit`` of the questions drawn at random without repetition, ascending; all where there are no more."""
    if limit is None or limit >= len(answered):
        return answered
    return np.sort(np.random.default_rng(seed).choice(answered, limit, replace=False))


def _retrieve(args: argparse.Namespace, dataset: RetrievalDataset, questions: Ids, steps: int) -> Evaluation:
    (name,) = args.retriever
    retriever = named_retriever(name, args, dataset)
    evaluation = evaluate(
        retriever,
        dataset,
        steps=steps,
        ks=[args.passages],
        search=args.search,
        beams=BEAMS if args.beams is None else args.beams,
        questions=questions,
        batch_size=args.batch_size,
        name=name,
        progress=name,
    )
    tell_truncated(name, retriever)
    return evaluation


def _runs(args: argparse.Namespace, dataset: RetrievalDataset, questions: Ids, evaluation: Evaluation) -> list[_Asked]:
    """Return what the reader is asked: from the retriever's passages, and the bounds where they are wanted."""
    found = [[p for p in row if p >= 0] for row in evaluation.ranking.tolist()]
    given = {
        "": found,
        "no passages": [[] for _ in found],
        "gold passages": [list(dataset.questions[i].gold) for i in questions.tolist()],
    }
    return [_Asked(name or evaluation.retriever, path, given[name]) for name, path in _files(args).items()]


def _files(args: argparse.Namespace) -> dict[str, Path]:
    """Return the file of each run of the reader, by its bound, ``""`` for the retriever's passages."""
    out = Path(args.out)
    stem = out.name.removesuffix(".jsonl")
    bounds = {name: out.with_name(f"{stem}.{name.replace(' ', '-')}.jsonl") for name in BOUNDS}
    return {"": out} | (bounds if args.bounds else {})


def _identity(args: argparse.Namespace, dataset: RetrievalDataset, questions: Ids, steps: int) -> dict[str, Any]:
    """Return everything that the answers depend on."""
    (name,) = args.retriever
    given = {key: getattr(args, key) for key in ("query", *DENSE_ONLY) if getattr(args, key) is not None}
    return {
        "environment": args.env.removeprefix("retrieval_gym:"),
        "split": args.split,
        "data": dataset.fingerprint,
        "questions": len(questions),
        "limit": args.limit,
        "seed": args.seed,
        "retriever": _whole_name(name),
        "retriever_options": {key: value for key, value in given.items() if key not in ("device", "cache_dir")},
        "search": args.search,
        "beams": BEAMS if args.search == "beam" and args.beams is None else args.beams,
        "steps": steps,
        "reader": describe_reader(args.reader, **_reader_settings(args)),
        "prompt": prompt("QUESTION", ["PASSAGE"]) + "\n" + prompt("QUESTION", []),
    }


def _whole_name(retriever: str) -> str:
    """Spell the folder in a retriever's name out, so that it means the same from everywhere."""
    kind, colon, rest = retriever.partition(":")
    folder = Path(rest).expanduser()
    return f"{kind}:{folder.resolve()}" if colon and kind in ("run", "dense") and folder.is_dir() else retriever


def _reader_settings(args: argparse.Namespace) -> dict[str, Any]:
    """Return the arguments of ``describe_reader`` that are given."""
    settings: dict[str, Any] = {"max_tokens": MAX_TOKENS if args.max_tokens is None else args.max_tokens}
    return settings | ({"model": args.model, "request": _request(args)} if is_url(args.reader) else {})


def _reader(args: argparse.Namespace) -> Reader:
    given = {key: getattr(args, key) for key in ("workers", "timeout", "retries") if getattr(args, key) is not None}
    if args.reader_batch_size is not None:
        given["batch_size"] = args.reader_batch_size
    if args.reader_device is not None:
        given["device"] = args.reader_device
    return make_reader(args.reader, api_key=_api_key(args), **_reader_settings(args), **given)


def _api_key(args: argparse.Namespace) -> str | None:
    """Return the endpoint's key, None where none is set or the reader is no endpoint."""
    return read_api_key(args.api_key_env) if is_url(args.reader) else None


def _request(args: argparse.Namespace) -> dict[str, Any]:
    """Read ``--request``.

    Raises:
        ValueError: when it is no JSON object.
    """
    if args.request is None:
        return {}
    try:
        fields = json.loads(args.request)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"--request is not JSON ({error}): {args.request!r:.80}") from error
    if not isinstance(fields, dict):
        raise ValueError(f'--request must be a JSON object such as {{"top_p": 1}}, got {args.request!r:.80}')
    return fields


def _protocol(
    args: argparse.Namespace, evaluation: Evaluation, without: int, sampled: bool, of: dict[str, Any]
) -> dict[str, Any]:
    kept = ("steps", "search", "stopping", "ranking", "ties")
    return {
        **describe_questions(evaluation.dataset, evaluation.chains.questions, args.seed if sampled else None),
        "left_out": f"{without} questions without an answer" if without else "",
        **{key: evaluation.protocol[key] for key in kept},
        "reader": of["reader"],
        "passages": f"the first {args.passages} of the final ranking, best first, in one prompt",
        "bounds": "the same reader on the same questions: without passages, and with the gold passages alone"
        if args.bounds
        else "",
        "em_and_f1": "after SQuAD's normalisation (case, punctuation, articles, white space), the best over the "
        "accepted answers",
        "intervals": evaluation.protocol["intervals"],
    }


def _shown_prompt(dataset: RetrievalDataset) -> str:
    question = dataset.questions[0]
    texts = dataset.corpus.texts(question.gold)
    parts: Sequence[tuple[str, str]] = (
        ("with passages, here the gold ones", prompt(question.text, texts)),
        ("without passages", prompt(question.text, [])),
    )
    return "\n\n".join(f"--- {title}\n{text}" for title, text in parts)


def _check(args: argparse.Namespace) -> None:
    """Refuse, before any work, what could not be done and options that would do nothing; settle the retriever."""
    if args.run_folder is not None:
        if args.retriever:
            raise ValueError("--run and --retriever both name a retriever: give one of them")
        args.retriever = [f"run:{args.run_folder}"]
    if len(args.retriever) != 1:
        raise ValueError(f"{len(args.retriever)} retrievers are named: give --run FOLDER or one --retriever NAME")
    check_retriever_arguments(args)
    for flag, value in (("--reader", args.reader), ("--out", args.out)):
        if value is None:
            raise ValueError(f"{flag} is missing: name it, or ask for --show-prompt alone")
    if args.beams is not None and args.search != "beam":
        raise ValueError("--beams is for the search beam, which is not asked for")
    for flag, value, most in (
        ("--beams", args.beams, MOST_BEAMS),
        ("--passages", args.passages, MOST_RANKS),
        ("--limit", args.limit, sys.maxsize),
        ("--max-tokens", args.max_tokens, sys.maxsize),
        ("--workers", args.workers, MOST_WORKERS),
        ("--reader-batch-size", args.reader_batch_size, sys.maxsize),
    ):
        check_number(flag, value, most)
    check_number("--retries", args.retries, MOST_RETRIES, 0)
    if args.timeout is not None and not 0 < args.timeout <= LONGEST_TIMEOUT:
        raise ValueError(f"--timeout must be above 0 and at most {LONGEST_TIMEOUT:,} seconds, got {args.timeout}")
    unused: tuple[str, ...] = LOCAL_ONLY if is_url(args.reader) else ENDPOINT_ONLY
    if is_function(args.reader):
        unused = (*LOCAL_ONLY, *ENDPOINT_ONLY, "max_tokens")
    for option in unused:
        if getattr(args, option) is not None:
            kind = "a local model" if option in LOCAL_ONLY else "an endpoint"
            kind = "a model or an endpoint" if option == "max_tokens" else kind
            raise ValueError(f"--{option.replace('_', '-')} is for {kind}, and --reader is none: leave it out")
    describe_reader(args.reader, **_reader_settings(args))
    _api_key(args)
    outputs = {"--out": args.out, "--report": args.report}
    outputs |= {f"--bounds ({name})": str(path) for name, path in _files(args).items() if name}
    check_outputs(outputs, input_paths(args))
