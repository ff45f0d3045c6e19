"""The arguments that name a corpus and an encoder, for the subcommands that need no questions."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from retrieval_gym.commands.folders import check_encoder, check_run
from retrieval_gym.commands.retrievers import load_questions
from retrieval_gym.datasets import Corpus
from retrieval_gym.datasets.jsonl import corpus_path, read_corpus
from retrieval_gym.registration import ENVIRONMENTS

CUSTOM_STEPS = int(ENVIRONMENTS["ChainRetrieval-Custom-v0"]["max_steps"])


def add_corpus_arguments(parser: argparse.ArgumentParser, *, required: bool = True) -> None:
    """Add the arguments that say which passages."""
    group = parser.add_mutually_exclusive_group(required=required)
    group.add_argument("--path", metavar="FOLDER", help="a folder with a corpus.jsonl (or .gz), or such a file")
    group.add_argument(
        "--env", metavar="ID", help="the corpus of an environment, such as ChainRetrieval-MuSiQueOpen-v0"
    )
    add = parser.add_argument
    add("--split", help="with --env: train, dev or test (default: dev)")
    add("--env-kwargs", nargs="+", default=[], metavar="KEY=VALUE", help="with --env: what gym.make would take")


def load_corpus(args: argparse.Namespace) -> tuple[Corpus, int]:
    """Load the passages; return them with the environment's number of steps, or that of a custom one.

    Raises:
        ValueError: when an argument would mean nothing, or the data are malformed.
        FileNotFoundError: when the data are nowhere.
    """
    if args.env is None:
        for flag, value in (("--split", args.split), ("--env-kwargs", args.env_kwargs or None)):
            if value is not None:
                raise ValueError(f"{flag} is for --env, and --path names a corpus: leave it out")
        return read_corpus(corpus_path(args.path)), CUSTOM_STEPS
    asked = argparse.Namespace(env=args.env, split=args.split or "dev", env_kwargs=args.env_kwargs)
    dataset, steps = load_questions(asked)
    return dataset.corpus, steps


def add_encoder_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that say which encoder, or which run's, and where it runs."""
    add = parser.add_argument
    add("--encoder", metavar="NAME_OR_PATH", help="Hub id or directory (default: the package's own)")
    add("--run", dest="run_folder", metavar="FOLDER", help="a finished run instead: its encoders and its token limits")
    add("--layers", type=int, nargs="+", help="transformer layers of --encoder to keep, such as 0 2 5")
    add("--max-passage-tokens", type=int, help="where passages are cut (default: the encoder's limit, or the run's)")
    add("--device", default="auto", help="auto, cpu, cuda or mps (default: auto)")


def check_encoder_arguments(args: argparse.Namespace, *more: str, passages_only: bool = False) -> None:
    """Refuse, before any work, options that a run has settled, numbers out of range, and folders.

    Args:
        args: as ``add_encoder_arguments`` fills them in.
        more: names of further options that a run settles.
        passages_only: whether only the encoder of passages is needed.

    Raises:
        ValueError: for these, and for a run or an encoder that is damaged.
        FileNotFoundError: for a run or an encoder that is not there, or a run that has not finished.
    """
    if args.run_folder is not None:
        for option in ("encoder", "layers", "max_passage_tokens", *more):
            if getattr(args, option):
                raise ValueError(f"--{option.replace('_', '-')} is not for --run, which has its own: leave it out")
    if args.max_passage_tokens is not None and args.max_passage_tokens < 1:
        raise ValueError(f"--max-passage-tokens must be at least 1, got {args.max_passage_tokens}")
    if args.run_folder is not None:
        check_run(args.run_folder, passages_only=passages_only)
    elif args.encoder is not None:
        check_encoder(args.encoder)


def check_new_folder(target: str) -> None:
    """Refuse, before any work, a folder that is there and holds something, is a file, or could not be made.

    Raises:
        ValueError: for one that is there.
        PermissionError: when the folder above it, or the nearest that is there, cannot be written to.
    """
    path = Path(target)
    if path.exists() and not (path.is_dir() and not any(path.iterdir())):
        raise ValueError(f"{target} is there already: name a new folder, or an empty one")
    above = next(each for each in path.absolute().parents if each.exists())
    if above.is_dir() and not os.access(above, os.W_OK):
        raise PermissionError(f"cannot write {target}: {above} is read-only for you; choose another folder")
