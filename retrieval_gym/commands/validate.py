"""``retrieval_gym validate``: what is wrong with a folder of your own, line by line."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence

from retrieval_gym import mdp
from retrieval_gym.commands.corpora import CUSTOM_STEPS
from retrieval_gym.validation import MAX_CHARACTERS, MAX_WORDS, validate
from retrieval_gym.validation_report import ERROR


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Add the subcommand and its arguments."""
    parser = subparsers.add_parser(
        "validate",
        help="check a corpus and questions of your own",
        description="Check a folder with corpus.jsonl and questions, and name the lines at fault. Exit status: 0 "
        "without errors, 1 with errors, 2 when there is nothing to check.",
    )
    add = parser.add_argument
    add("path", metavar="PATH", help="the folder")
    add("--steps", type=int, default=CUSTOM_STEPS, help=f"picks a question (default: {CUSTOM_STEPS})")
    add("--max-words", type=int, default=MAX_WORDS, help=f"of a passage and its title (default: {MAX_WORDS})")
    add("--max-characters", type=int, default=MAX_CHARACTERS, help=f"of both (default: {MAX_CHARACTERS})")
    add("--encoder", metavar="NAME_OR_PATH", help="count the tokens of this encoder too: Hub id or directory")
    add("--max-tokens", type=int, help="with --encoder: tokens of a passage (default: what the encoder reads)")
    add("--show", type=int, default=5, help="lines to name for each fault (default: 5)")
    add("--json", action="store_true", help="print the report as JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Check and print; return the exit status."""
    mdp.check_max_steps(args.steps, "--steps")
    for name in ("max_words", "max_characters", "max_tokens", "show"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be at least 1, got {getattr(args, name)}")
    if args.max_tokens is not None and args.encoder is None:
        raise ValueError(f"--max-tokens {args.max_tokens} is for --encoder, which is not given")
    count_tokens, room = (None, None) if args.encoder is None else _counter(args.encoder)
    report = validate(
        args.path,
        steps=args.steps,
        max_words=args.max_words,
        max_characters=args.max_characters,
        count_tokens=count_tokens,
        max_tokens=room if args.max_tokens is None else args.max_tokens,
        show=args.show,
        progress=True,
    )
    print(json.dumps(report.to_json(), indent=2, ensure_ascii=False) if args.json else report.table())
    return 1 if report.count(ERROR) else 0


def _counter(name_or_path: str) -> tuple[Callable[[Sequence[str]], list[int]], int]:
    """Return what counts the tokens of passages, and how many of them the encoder reads."""
    import numpy as np

    from retrieval_gym.nn.encoder import TextEncoder

    encoder = TextEncoder.load(name_or_path)
    frame = len(encoder.sequence([np.zeros(0, np.int32)], "passage"))  # special tokens and prompt
    return lambda texts: [len(ids) for ids in encoder.tokenize(texts, opens="passage")], encoder.max_length - frame
