"""``EmbeddingTable``: a corpus embedded once, in memory or on disk, keyed by everything that changes a vector."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.lib.format import open_memmap
from numpy.typing import NDArray

from retrieval_gym.files import lock
from retrieval_gym.nn.encoder import Kind, TextEncoder
from retrieval_gym.nn.model_files import read_json, write_json

if TYPE_CHECKING:
    from retrieval_gym.datasets.base import Corpus

CHUNK = 4096  # texts between two marks on disk: what an interruption can cost


@dataclass(frozen=True)
class EmbeddingTable:
    """The vectors of a corpus.

    Attributes:
        vectors: float32 ``(N, D)``, row i for passage i; memory-mapped when built with ``cache_dir``.
        truncated: number of distinct passages that were cut to fit.
        key: hash of the weights, the encoder's settings, the token limit and the corpus; None without ``cache_dir``.
    """

    vectors: NDArray[np.float32]
    truncated: int
    key: str | None = None

    def __len__(self) -> int:
        return len(self.vectors)

    @classmethod
    def build(
        cls,
        encoder: TextEncoder,
        corpus: Corpus,
        *,
        max_tokens: int | None = None,
        kind: Kind = "passage",
        cache_dir: str | Path | None = None,
        progress: bool = False,
        token_budget: int | None = None,
    ) -> EmbeddingTable:
        """Embed every passage of a corpus; passages with the same text are embedded once.

        With ``cache_dir`` the table is written to ``cache_dir/KEY`` as it grows: a build that was interrupted goes on
        where it stopped, and a table that is complete is opened, not built. The folder has its name only when it is
        complete. Of two processes that want the same table, one builds it and the other waits.

        Args:
            encoder: what embeds.
            corpus: N passages.
            max_tokens: cut each passage after so many tokens, the prompt and special tokens not counted.
            kind: whose prompt to use.
            cache_dir: where tables are kept; None keeps the table in memory.
            progress: show a progress bar.
            token_budget: most tokens in one forward pass; see ``TextEncoder.embed``.
        """
        first: dict[str, int] = {}
        rows = np.array([first.setdefault(str(passage), len(first)) for passage in corpus], np.int64)
        texts = list(first)
        shape = (len(rows), encoder.dim)
        if cache_dir is None:
            table = np.empty(shape, np.float32)
            done = sum(fill(table, rows, texts, encoder, kind, max_tokens, token_budget, progress, start=0))
            return cls(table, done)
        key = table_key(encoder, corpus, max_tokens, kind)
        final, partial = Path(cache_dir) / key, Path(cache_dir) / f"{key}.partial"
        final.parent.mkdir(parents=True, exist_ok=True)
        held = lock(final.with_name(f"{key}.lock"), wait=True)
        try:
            if not (final / "meta.json").is_file():
                mark = read_json(partial / "progress.json")
                start, truncated = mark.get("texts", 0), mark.get("truncated", 0)
                partial.mkdir(exist_ok=True)
                target = open_memmap(
                    partial / "vectors.npy",
                    mode="r+" if mark else "w+",
                    dtype=np.float32,
                    shape=None if mark else shape,
                )
                for cut in fill(target, rows, texts, encoder, kind, max_tokens, token_budget, progress, start=start):
                    start, truncated = min(start + CHUNK, len(texts)), truncated + cut
                    target.flush()
                    _write_mark(partial / "progress.json", {"texts": start, "truncated": truncated})
                del target
                meta = {"passages": len(rows), "texts": len(texts), "dim": encoder.dim, "truncated": truncated}
                write_json(partial / "meta.json", {**meta, **_identity(encoder, corpus, max_tokens, kind)})
                (partial / "progress.json").unlink(missing_ok=True)
                shutil.rmtree(final, ignore_errors=True)
                os.replace(partial, final)
        finally:
            if held is not None:
                held.close()
        # Copy on write: torch takes a read-only array only with a warning.
        vectors = np.load(final / "vectors.npy", mmap_mode="c")
        if vectors.shape != shape:
            raise ValueError(f"{final} holds vectors of shape {vectors.shape}, expected {shape}: delete it")
        return cls(vectors, read_json(final / "meta.json")["truncated"], key)


def fill(
    table: NDArray[np.float32],
    rows: NDArray[np.int64],
    texts: Sequence[str],
    encoder: TextEncoder,
    kind: Kind,
    max_tokens: int | None,
    token_budget: int | None,
    progress: bool,
    start: int,
) -> Iterator[int]:
    """Embed ``texts[start:]`` by chunks into their rows of ``table``; yield how many of each chunk were cut."""
    from tqdm.auto import tqdm

    order = np.argsort(rows, kind="stable")
    bounds = np.searchsorted(rows[order], np.arange(0, len(texts) + CHUNK, CHUNK))
    with tqdm(total=len(texts), initial=start, unit="text", desc="embedding passages", disable=not progress) as bar:
        for begin in range(start, len(texts), CHUNK):
            part = texts[begin : begin + CHUNK]
            before = encoder.truncated
            vectors = encoder.encode(part, kind, max_tokens=max_tokens, token_budget=token_budget).cpu().numpy()
            places = order[bounds[begin // CHUNK] : bounds[begin // CHUNK + 1]]
            table[places] = vectors[rows[places] - begin]
            bar.update(len(part))
            yield encoder.truncated - before


def table_key(encoder: TextEncoder, corpus: Corpus, max_tokens: int | None, kind: Kind) -> str:
    """Return the SHA-256 of everything that changes a vector of the table, 64 hexadecimal digits."""
    identity = json.dumps(_identity(encoder, corpus, max_tokens, kind), sort_keys=True)
    return hashlib.sha256(identity.encode()).hexdigest()


def _identity(encoder: TextEncoder, corpus: Corpus, max_tokens: int | None, kind: Kind) -> dict[str, Any]:
    return {
        "weights": encoder.weights_hash(),
        "settings": encoder.settings(),
        "max_tokens": max_tokens,
        "kind": kind,
        "corpus": corpus.fingerprint,
    }


def _write_mark(path: Path, content: dict[str, int]) -> None:
    new = path.with_suffix(".new")
    write_json(new, content)
    os.replace(new, path)
