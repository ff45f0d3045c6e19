"""``retrieval_gym convert``: other layouts into a corpus and questions of your own."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from retrieval_gym.commands.corpora import CUSTOM_STEPS, check_new_folder
from retrieval_gym.conversion import Collection, from_datasets, from_hf, from_hipporag, write_collection
from retrieval_gym.conversion.hub import CORPUS_COLUMNS, QUESTION_COLUMNS
from retrieval_gym.conversion.loaded import POOLED
from retrieval_gym.datasets.load import SPLITS

FORMATS = ("beir", *POOLED, "hipporag", "hf")
HF_ONLY = ("columns", "config", "hf_split", "questions", "question_columns", "question_config")


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Add the subcommand and its arguments."""
    parser = subparsers.add_parser(
        "convert",
        help="turn other layouts into corpus.jsonl and questions",
        description="Write a new folder with corpus.jsonl and questions_{split}.jsonl, whole or not at all.",
    )
    add = parser.add_argument
    add("--from", dest="format", required=True, choices=FORMATS, help="what the source is")
    add("source", metavar="SOURCE", help="a folder or file; with hf also a Hub id")
    add("target", metavar="TARGET", help="the folder to make")
    add(
        "--split",
        nargs="+",
        choices=SPLITS,
        default=[],
        help="which splits (default: all that are there); with hipporag and hf what the questions are (default: a "
        "questions.jsonl that serves every split)",
    )
    add(
        "--form",
        choices=("pool", "corpus"),
        help=f"{', '.join(POOLED)}: pool, each question picks from its own paragraphs (default); corpus, from all",
    )
    add("--columns", nargs="+", default=[], metavar="NAME=COLUMN", help=f"hf: columns of {', '.join(CORPUS_COLUMNS)}")
    add("--config", help="hf: configuration of a dataset that has several")
    add("--hf-split", help="hf: split of the passages, where there are several")
    add("--questions", metavar="SOURCE", help="hf: the questions, a file, folder or Hub id")
    add(
        "--question-columns",
        nargs="+",
        default=[],
        metavar="NAME=COLUMN",
        help=f"hf: columns of {', '.join(QUESTION_COLUMNS)}",
    )
    add("--question-config", help="hf: configuration of --questions")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Read, write and say what was left out; return the exit status."""
    _check(args)
    collection = _read(args)
    files = write_collection(collection, args.target)
    print(f"{args.target}: {len(collection.passages):,} passages in {files[0]}")
    for name, records in zip(files[1:], collection.questions.values(), strict=True):
        print(f"{args.target}: {len(records):,} questions in {name}")
    for reason, count in collection.dropped.items():
        print(f"left out {count:,} {reason}")
    steps = f" --steps {collection.most_gold}" if collection.most_gold > CUSTOM_STEPS else ""
    print(f"check it with: retrieval_gym validate {args.target}{steps}")
    return 0


def _read(args: argparse.Namespace) -> Collection:
    if args.format == "hipporag":
        return from_hipporag(args.source, args.split[0] if args.split else "")
    if args.format == "hf":
        return from_hf(
            args.source,
            _pairs("--columns", args.columns),
            config=args.config,
            part=args.hf_split,
            questions=args.questions,
            question_columns=_pairs("--question-columns", args.question_columns),
            question_config=args.question_config,
            split=args.split[0] if args.split else "",
        )
    return from_datasets(args.format, args.source, args.split, args.form)


def _check(args: argparse.Namespace) -> None:
    """Refuse, before any work, options that would do nothing and a target that is there."""
    check_new_folder(args.target)
    for option in HF_ONLY:
        if getattr(args, option) and args.format != "hf":
            raise ValueError(f"--{option.replace('_', '-')} is for --from hf: leave it out")
    if args.form is not None and args.format not in POOLED:
        raise ValueError(f"--form is for --from {', '.join(POOLED)}: leave it out")
    if args.format in ("hipporag", "hf") and len(args.split) > 1:
        raise ValueError(f"--split {' '.join(args.split)}: {args.format} questions are one split; name it")
    for option in ("question_columns", "question_config"):
        if getattr(args, option) and args.questions is None:
            raise ValueError(f"--{option.replace('_', '-')} is for --questions, which is not given")


def _pairs(flag: str, pairs: Sequence[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for pair in pairs:
        name, equals, column = pair.partition("=")
        if not equals or not name or not column:
            raise ValueError(f"{flag} {pair!r} is not of the form name=column, such as text=body")
        if name in found:
            raise ValueError(f"{flag} names {name!r} twice")
        found[name] = column
    return found
