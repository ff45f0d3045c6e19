"""``retrieval_gym embed``: a corpus into vectors on disk, once, for every later command that reads the same cache."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from retrieval_gym.commands.corpora import (
    add_corpus_arguments,
    add_encoder_arguments,
    check_encoder_arguments,
    load_corpus,
)
from retrieval_gym.commands.folders import check_cache

if TYPE_CHECKING:
    from retrieval_gym.nn.encoder import TextEncoder


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Add the subcommand and its arguments."""
    parser = subparsers.add_parser(
        "embed",
        help="embed a corpus into a folder that other commands read",
        description="Embed a corpus and keep the vectors under everything that changes them: other commands and agents "
        "with the same encoder, limit and --cache-dir open them. An interrupted embedding goes on "
        "where it stopped.",
    )
    add_corpus_arguments(parser)
    add_encoder_arguments(parser)
    add = parser.add_argument
    add("--autocast", action="store_true", help="bfloat16 autocast, for agents that train with --autocast")
    add("--cache-dir", required=True, metavar="DIR", help="where embeddings are kept")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Embed and say where the vectors lie; return the exit status."""
    check_encoder_arguments(args, "autocast", passages_only=True)
    check_cache(args.cache_dir)
    corpus, _ = load_corpus(args)

    from retrieval_gym.nn.embeddings import META, VECTORS, EmbeddingTable

    encoder, limit = _encoder(args)
    try:
        table = EmbeddingTable.build(encoder, corpus, max_tokens=limit, cache_dir=args.cache_dir, progress=True)
    except KeyboardInterrupt:
        print("\nthe same command goes on where this one stopped", file=sys.stderr)
        raise
    assert table.key is not None
    folder = Path(args.cache_dir) / table.key
    meta = json.loads((folder / META).read_text(encoding="utf-8"))
    size = folder.joinpath(VECTORS).stat().st_size
    print(f"{meta['passages']:,} passages, {meta['texts']:,} distinct texts, {meta['truncated']:,} of them cut")
    print(
        f"{folder / VECTORS}: float32 ({meta['passages']}, {meta['dim']}), {size / 2**20:,.1f} MiB, row i is passage i"
    )
    print("keyed by, so that any other value makes another table:")
    print(f"  weights     SHA-256 {meta['weights']}")
    print(f"  corpus      SHA-256 {meta['corpus']}, of titles and texts in order")
    print(f"  max_tokens  {meta['max_tokens'] or 'what the encoder reads'}")
    print(f"  kind        {meta['kind']}")
    for name, value in meta["settings"].items():
        print(f"  {name:11} {json.dumps(value, ensure_ascii=False)}")
    return 0


def _encoder(args: argparse.Namespace) -> tuple[TextEncoder, int | None]:
    """Return what embeds the passages, and after how many tokens it cuts them."""
    from retrieval_gym.nn.encoder import TextEncoder
    from retrieval_gym.nn.model_files import DEFAULT_MODEL
    from retrieval_gym.nn.run import Run, resolve_device
    from retrieval_gym.nn.trained import encoder_names, load_run_encoder

    device = resolve_device(args.device)
    if args.run_folder is not None:
        run = Run.open(args.run_folder)
        return load_run_encoder(run, encoder_names(run)[1], device), run.config["passage_tokens"]
    name = args.encoder or DEFAULT_MODEL
    encoder = TextEncoder.load(name, device=device, layers=args.layers, autocast=args.autocast)
    return encoder, args.max_passage_tokens
