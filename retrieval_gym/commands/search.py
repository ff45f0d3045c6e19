"""``retrieval_gym search``: ask a corpus in plain words and see the chain step by step."""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from retrieval_gym import mdp
from retrieval_gym.commands.common import MOST_RANKS, check_number
from retrieval_gym.commands.corpora import (
    add_corpus_arguments,
    add_encoder_arguments,
    check_encoder_arguments,
    load_corpus,
)
from retrieval_gym.commands.retrievers import tell_truncated
from retrieval_gym.datasets.readers import get_key, get_text, read_lines, read_records
from retrieval_gym.rendering import SNIPPET

if TYPE_CHECKING:
    from retrieval_gym.nn.text_retriever import Chain, Hit


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Add the subcommand and its arguments."""
    parser = subparsers.add_parser(
        "search",
        help="ask a corpus in plain words",
        description="Walk a chain through a corpus for each question: pick the best passage, search again with it in "
        "the query, and so on.",
    )
    add = parser.add_argument
    add("question", nargs="*", help="what to ask; one or several, each in quotes")
    add(
        "--questions",
        metavar="FILE",
        help="more questions: one a line, or a .jsonl of objects with 'question' and optionally 'id' (each also .gz)",
    )
    add_corpus_arguments(parser)
    add_encoder_arguments(parser)
    add("--cache-dir", metavar="DIR", help="where corpus embeddings are kept")
    add("--steps", type=int, help="most passages to pick (default: the environment's max_steps, 4 with --path)")
    add("--threshold", type=float, help="stop before the first pick scored below this")
    add("-k", type=int, help="print a ranking of this many passages too: the picks, then all others by best score")
    add("--json", action="store_true", help="print one JSON object a question, a line each")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Search and print; return the exit status."""
    _check(args)
    asked: list[tuple[str | None, str]] = [(None, question) for question in args.question]
    if args.questions is not None:
        asked += read_questions(args.questions)
    corpus, max_steps = load_corpus(args)

    from retrieval_gym.nn.model_files import DEFAULT_MODEL
    from retrieval_gym.nn.text_retriever import TextRetriever, load_retriever

    if args.run_folder is not None:
        retriever = load_retriever(args.run_folder, corpus, device=args.device, cache_dir=args.cache_dir)
    else:
        retriever = TextRetriever.from_encoder(
            args.encoder or DEFAULT_MODEL,
            corpus,
            layers=args.layers,
            max_passage_tokens=args.max_passage_tokens,
            device=args.device,
            cache_dir=args.cache_dir,
            progress=True,
        )
    steps = max_steps if args.steps is None else args.steps
    chains = retriever.chains([question for _, question in asked], steps, args.threshold, k=args.k or 0)
    tell_truncated(args.run_folder or args.encoder or DEFAULT_MODEL, retriever)  # type: ignore[arg-type]
    for (key, _), chain in zip(asked, chains, strict=True):
        if args.json:
            print(json.dumps(to_json(key, chain), ensure_ascii=False, allow_nan=False))
        else:
            print("\n".join(lines(chain, args.threshold)) + "\n")
    return 0


def _check(args: argparse.Namespace) -> None:
    """Refuse, before any work, what could not be done."""
    check_encoder_arguments(args)
    if not args.question and args.questions is None:
        raise ValueError("there is nothing to ask: give a question in quotes, or --questions FILE")
    if any(not question.strip() for question in args.question):
        raise ValueError("a question is blank: ask something")
    if args.steps is not None:
        mdp.check_max_steps(args.steps, "--steps")
    if args.threshold is not None and not math.isfinite(args.threshold):
        raise ValueError(f"--threshold is {args.threshold}: give a finite number, or leave it out")
    check_number("-k", args.k, MOST_RANKS)


def read_questions(path: str) -> list[tuple[str | None, str]]:
    """Read questions, each with its id where it has one: lines of text, or of JSON in a ``.jsonl`` or ``.json``.

    Raises:
        FileNotFoundError: when there is no such file.
        ValueError: when it is not UTF-8, malformed, or holds no question.
    """
    if Path(path).name.removesuffix(".gz").endswith((".jsonl", ".json")):
        return [
            (
                None if record.get("id") is None else get_key(record["id"], "id", where),
                get_text(record, "question", where),
            )
            for where, record in read_records(path)
        ]
    questions: list[tuple[str | None, str]] = []
    for number, line in enumerate(read_lines(Path(path)), start=1):
        try:
            text = line.decode("utf-8-sig").strip()
        except UnicodeDecodeError as error:
            raise ValueError(f"{path}, line {number}: not UTF-8 ({error}): convert the file to UTF-8") from error
        if text:
            questions.append((None, text))
    if not questions:
        raise ValueError(f"{path} is empty: it needs one question a line")
    return questions


def lines(chain: Chain, threshold: float | None) -> list[str]:
    """Return what is printed of one chain."""
    text = [" ".join(chain.question.split()), *_numbered(chain.hits)]
    if chain.stopped_at is not None:
        text.append(f"  stopped: the next pick scores {chain.stopped_at:.4f}, below the threshold {threshold}")
    if chain.ranking:
        text += [f"  ranking, the first {len(chain.ranking)}:", *_numbered(chain.ranking)]
    return text


def _numbered(hits: tuple[Hit, ...]) -> list[str]:
    numbered = []
    for number, hit in enumerate(hits, start=1):
        line = " ".join((f"{hit.title}: {hit.text}" if hit.title else hit.text).split())
        shown = line if len(line) <= SNIPPET else line[: SNIPPET - 3].rstrip() + "..."
        numbered.append(f"{number:3d}. {hit.score:8.4f}  [{hit.id}] {shown}")
    return numbered


def to_json(key: str | None, chain: Chain) -> dict[str, Any]:
    """Return a chain as JSON-able values; with ids, ``retrieval_gym diagnose --chains`` reads it too."""
    record: dict[str, Any] = {} if key is None else {"id": key}
    record |= {"question": chain.question, "picked": [hit.id for hit in chain.hits]}
    record["passages"] = [vars(hit) for hit in chain.hits]
    if chain.stopped_at is not None:
        record["stopped_at"] = chain.stopped_at
    if chain.ranking:
        record["ranking"] = [vars(hit) for hit in chain.ranking]
    return record
