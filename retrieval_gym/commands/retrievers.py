"""The arguments that name retrievers, questions and output files, for every subcommand that plays retrievers."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from retrieval_gym.bm25 import QUERIES
from retrieval_gym.commands.common import LARGEST_SEED, check_number, parse_env_kwargs
from retrieval_gym.commands.folders import check_cache, check_encoder, check_run
from retrieval_gym.datasets import RetrievalDataset
from retrieval_gym.kept_searches import SearchLog
from retrieval_gym.ranking import Retriever
from retrieval_gym.registration import ENVIRONMENT_KWARGS, environment_dataset
from retrieval_gym.retrieval import RETRIEVERS, make_retriever

SEED, BATCH_SIZE = 0, 256
RUN_OPTIONS = ("device", "cache_dir")
KEPT = "; all: where searches are kept until the command has ended, so that the same command goes on where it stopped"
WHERE = {"run", "device", "cache_dir", "out", "picture", "per_question", "run_file"}  # where, not what, is searched
DENSE_ONLY = ("encoder", "device", "layers", "max_passage_tokens", "cache_dir")


def add_question_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that say what is asked."""
    add = parser.add_argument
    add("--env", required=True, metavar="ID", help="environment id, such as ChainRetrieval-MuSiQue-v0")
    add("--split", default="dev", help="train, dev or test (default: dev)")
    add("--env-kwargs", nargs="+", default=[], metavar="KEY=VALUE", help="what gym.make would take, such as path=DIR")


def add_retriever_arguments(parser: argparse.ArgumentParser, *, required: bool, keeps_searches: bool = False) -> None:
    """Add the arguments that say who is played, and on how many questions.

    Args:
        parser: gets them.
        required: whether a retriever has to be named.
        keeps_searches: whether the command keeps its searches in a ``search_log``.
    """
    add = parser.add_argument
    add(
        "--retriever",
        nargs="+",
        default=[],
        required=required,
        metavar="NAME",
        help=f"{', '.join(RETRIEVERS)}, dense:ENCODER (a Hub id or directory), run:FOLDER (a finished run), or "
        "package.module:factory, a function that takes the dataset; one or several",
    )
    add("--steps", type=int, help="picks a question (default: the environment's max_steps)")
    add("--limit", type=int, help="ask a random sample of this many questions")
    add("--seed", type=int, default=SEED, help="of the sample and of the random retriever (default: 0)")
    add("--batch-size", type=int, default=BATCH_SIZE, help="questions searched at once (default: 256)")
    add("--query", choices=QUERIES, help="bm25: search with the state, the default, or with the question at every step")
    add("--encoder", metavar="NAME_OR_PATH", help="dense: Hub id or directory (default: the package's own)")
    add("--device", help="dense: auto, cpu, cuda or mps (default: auto)")
    add("--layers", type=int, nargs="+", help="dense: transformer layers to keep, such as 0 2 5")
    add("--max-passage-tokens", type=int, help="dense: where passages are cut (default: the encoder's limit)")
    add("--cache-dir", metavar="DIR", help=f"dense: where corpus embeddings are kept{KEPT if keeps_searches else ''}")


def load_questions(args: argparse.Namespace) -> tuple[RetrievalDataset, int]:
    """Load what is asked; return it with the environment's number of steps.

    Raises:
        ValueError: when the environment or its arguments are unknown, or would mean nothing without an environment.
        FileNotFoundError: when the data are nowhere.
    """
    kwargs = parse_env_kwargs(args.env_kwargs)
    if "split" in kwargs:
        raise ValueError(f"--env-kwargs cannot set 'split': use --split {kwargs['split']}")
    unused = sorted(kwargs.keys() & ENVIRONMENT_KWARGS - {"max_steps"})
    if unused:
        raise ValueError(
            f"--env-kwargs {unused[0]}={kwargs[unused[0]]} would change nothing: chains are scored by their picks and "
            "spend their whole budget; leave it out"
        )
    return environment_dataset(args.env, args.split, **kwargs)


def named_retriever(name: str, args: argparse.Namespace, dataset: RetrievalDataset) -> Retriever:
    """Make one of ``args.retriever``, and say on stderr what that takes.

    Raises:
        ValueError: when the name is unknown or its factory takes no dataset.
        ImportError: when a package that the retriever needs is not installed.
    """
    given: dict[str, Any] = {key: getattr(args, key) for key in DENSE_ONLY if getattr(args, key) is not None}
    options: dict[str, Any] = {}
    kind, _, encoder = name.partition(":")
    if kind == "dense":
        options = given | ({"encoder": encoder} if encoder else {})
    elif kind == "run":
        options = {key: given[key] for key in RUN_OPTIONS if key in given}
    elif name == "bm25" and args.query is not None:
        options = {"query": args.query}
    if kind in ("dense", "run"):
        size = len(dataset.corpus)
        kept = "--cache-dir DIR would keep them" if args.cache_dir is None else "but for those in --cache-dir"
        print(f"{name}: embeds the corpus of {size} passages first, {kept}", file=sys.stderr, flush=True)
    try:
        return make_retriever("dense" if kind == "dense" else name, dataset, seed=args.seed, **options)
    except TypeError as error:
        raise ValueError(f"retriever {name!r} cannot be made from a dataset: {error}") from error


def search_log(args: argparse.Namespace) -> SearchLog:
    """Return where the command keeps its searches: in ``--cache-dir``, apart from those of other commands."""
    if args.cache_dir is None:
        return SearchLog(None)
    asked = {name: value for name, value in vars(args).items() if name not in WHERE}
    text = json.dumps(asked, sort_keys=True, ensure_ascii=False)
    return SearchLog(Path(args.cache_dir) / "searches" / hashlib.sha256(text.encode()).hexdigest()[:32])


def check_retriever_arguments(args: argparse.Namespace, *, keeps_searches: bool = False) -> None:
    """Refuse, before any work, options of retrievers that are not asked for, numbers out of range, and folders.

    Args:
        args: of the command.
        keeps_searches: as in ``add_retriever_arguments``.

    Raises:
        ValueError: for these, for a retriever named twice, and for a run or an encoder that is damaged.
        FileNotFoundError: for a run or an encoder that is not there, or a run that has not finished.
    """
    kinds = {name.partition(":")[0] for name in args.retriever}
    for option in DENSE_ONLY:
        if getattr(args, option) is None or ("run" in kinds and option in RUN_OPTIONS):
            continue
        if option == "cache_dir" and keeps_searches and args.retriever:
            continue
        flag = f"--{option.replace('_', '-')}"
        if option == "encoder" and "dense" in kinds and "dense" not in args.retriever:
            raise ValueError(f"{flag} is for the retriever dense, and dense:ENCODER names its own: leave it out")
        if "dense" not in kinds:
            raise ValueError(f"{flag} is for the retriever dense, which is not asked for")
    if args.query is not None and "bm25" not in args.retriever:
        raise ValueError("--query is for the retriever bm25, which is not asked for")
    if len(set(args.retriever)) < len(args.retriever):
        raise ValueError(f"retrievers {args.retriever}: name each once")
    check_number("--seed", args.seed, LARGEST_SEED, 0)
    if args.max_passage_tokens is not None and args.max_passage_tokens < 1:
        raise ValueError(f"--max-passage-tokens must be at least 1, got {args.max_passage_tokens}")
    if args.batch_size < 1:
        raise ValueError(f"--batch-size must be at least 1, got {args.batch_size}")
    check_cache(args.cache_dir)
    for name in args.retriever:
        kind, colon, folder = name.partition(":")
        if colon and not folder:
            raise ValueError(f"retriever {name!r} names nothing behind the colon: give a folder")
        if kind == "run":
            check_run(folder)
        elif kind == "dense" and (folder or args.encoder is not None):
            check_encoder(folder or args.encoder)


def tell_truncated(name: str, retriever: Retriever) -> None:
    """Tell on stderr how many texts a retriever has cut, where it counts them in an attribute ``truncated``."""
    cut = getattr(retriever, "truncated", 0)
    if isinstance(cut, int) and cut > 0:
        print(
            f"{name}: {cut} texts (passages, questions, states) were longer than it reads and were cut; name an "
            "encoder with a higher limit, leave --max-passage-tokens out or raise it, or take fewer --steps",
            file=sys.stderr,
        )


def input_paths(args: argparse.Namespace) -> list[str]:
    """Return the folders and files that the environment arguments name.

    Raises:
        ValueError: when an argument is malformed.
    """
    path = parse_env_kwargs(args.env_kwargs).get("path")
    return [] if path is None else [path]


def check_outputs(outputs: Mapping[str, str | None], inputs: Iterable[str] = ()) -> None:
    """Refuse, before any work, files that could not be written or are already something else.

    Args:
        outputs: a file, or None where it is not asked for, by its flag.
        inputs: files that are read, and folders whose files are.

    Raises:
        ValueError: when one is no name of a file, a special file such as a device, or an input, or two are the same.
        FileNotFoundError: when the folder of one does not exist.
        PermissionError: when it cannot be written to.
    """
    given: dict[Path, str] = {}
    read = {Path(os.path.realpath(name)) for name in inputs}
    for flag, name in outputs.items():
        if name is None:
            continue
        path = Path(name)
        if not path.name or name.endswith(("/", os.sep)) or path.is_dir():
            raise ValueError(f"{flag} {name!r} is not the name of a file: give one, such as eval.json")
        if path.exists() and not path.is_file():
            raise ValueError(f"{flag} {name!r} is a device, a pipe or a socket: give the name of a regular file")
        target = Path(os.path.realpath(path))
        folder = target.parent if path.is_symlink() else path.parent
        if not folder.is_dir():
            raise FileNotFoundError(f"cannot write {name}: there is no folder {folder}; make it first")
        if not os.access(folder, os.W_OK):
            raise PermissionError(f"cannot write {name}: {folder} is read-only for you; choose another folder")
        if target.exists() and not read.isdisjoint([target, *target.parents]):
            raise ValueError(f"{flag} {name!r} would replace a file that is read: choose another name")
        if target in given:
            raise ValueError(f"{given[target]} and {flag} are both {name}: give each a file of its own")
        given[target] = flag
