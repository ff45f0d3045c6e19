"""``retrieval_gym export``: take a trained encoder, and the vectors of a corpus, home."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from retrieval_gym.commands.common import parse_env_kwargs
from retrieval_gym.commands.corpora import add_corpus_arguments, check_new_folder, load_corpus
from retrieval_gym.commands.folders import check_run
from retrieval_gym.registration import environment_dataset

if TYPE_CHECKING:
    from retrieval_gym.datasets import Corpus
    from retrieval_gym.nn.export import Exported

SAMPLE = 8  # passages on which sentence-transformers is compared
EXAMPLES = ("Which river flows through the town?", "A passage, for lack of a corpus.")


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Add the subcommand and its arguments."""
    parser = subparsers.add_parser(
        "export",
        help="write a trained encoder for sentence-transformers, and vectors for other software",
        description="Write a finished run to a new folder: its encoders for sentence-transformers and, if asked for, "
        "the passages' vectors with their ids. docs/own_corpus.md describes each file.",
    )
    add = parser.add_argument
    add("run_folder", metavar="RUN", help="the folder of a finished run")
    add("target", metavar="TARGET", help="the folder to make")
    add("--npy", action="store_true", help="passage vectors as vectors.npy")
    add("--faiss", action="store_true", help="passage vectors as a FAISS index, vectors.faiss")
    add("--arrow", action="store_true", help="passage vectors, ids and texts as an Arrow file, vectors.arrow")
    add("--adapter", action="store_true", help="the LoRA adapter for peft, of a run with --lora")
    add_corpus_arguments(parser, required=False)
    add("--device", default="auto", help="auto, cpu, cuda or mps (default: auto)")
    add("--cache-dir", metavar="DIR", help="where corpus embeddings are kept")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Export, compare with sentence-transformers and print; return the exit status."""
    check_new_folder(args.target)
    formats = [name for name in ("npy", "faiss", "arrow") if getattr(args, name)]
    named = args.path is not None or args.env is not None
    if named and not formats:
        raise ValueError("--path and --env name the passages of --npy, --faiss and --arrow: ask for one of these")

    check_run(args.run_folder)

    from retrieval_gym.nn.export import export_run
    from retrieval_gym.nn.run import Run, resolve_device

    device = resolve_device(args.device)
    config = Run.open(args.run_folder).config
    corpus = None if not formats else load_corpus(args)[0] if named else _own_corpus(args, config)
    exported = export_run(
        args.run_folder,
        args.target,
        corpus=corpus,
        formats=formats,
        adapter=args.adapter,
        device=device,
        cache_dir=args.cache_dir,
        progress=True,
    )
    for name in exported.files:
        print(f"{args.target}/{name}")
    if corpus is not None:
        limit = config["passage_tokens"]
        print(f"{len(corpus):,} passages, {exported.truncated:,} distinct ones cut after {limit} tokens")
    print(_compared(exported, corpus))
    return 0


def _own_corpus(args: argparse.Namespace, config: dict[str, Any]) -> Corpus:
    """Return the passages that a run was trained on."""
    if args.split is not None or args.env_kwargs:
        raise ValueError("--split and --env-kwargs are for --env: name it too, or leave them out")
    if config.get("env") is None:
        raise ValueError(f"the configuration of {args.run_folder} names no environment: name the passages with --path")
    kwargs = parse_env_kwargs(config.get("env_kwargs") or [])
    return environment_dataset(config["env"], "train", **kwargs)[0].corpus


def _compared(exported: Exported, corpus: Corpus | None) -> str:
    """Say how far the vectors in sentence-transformers are from ours."""
    from retrieval_gym.nn.export import largest_difference

    passages = [EXAMPLES[1]] if corpus is None else corpus.texts(range(min(SAMPLE, len(corpus))))
    difference = max(
        largest_difference(exported.query_encoder, exported.directory / "query_encoder", EXAMPLES[:1], "query"),
        largest_difference(exported.passage_encoder, exported.directory / "passage_encoder", passages, "passage"),
    )
    size = len(passages)
    return f"sentence-transformers gives the same vectors within {difference:.1e} (1 question, {size} passages)"
