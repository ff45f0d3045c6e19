"""``EmbeddingTable``: a corpus embedded once, in memory or on disk, keyed by everything that changes a vector."""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np
from numpy.lib.format import write_array_header_1_0
from numpy.typing import NDArray

from retrieval_gym.files import lock, write_text, writing
from retrieval_gym.nn.encoder import Kind, TextEncoder
from retrieval_gym.progress import Progress

if TYPE_CHECKING:
    from retrieval_gym.datasets.base import Corpus

META, PROGRESS, VECTORS = "meta.json", "progress.json", "vectors.npy"
CHUNK = 1024  # texts between two marks on disk: what an interruption can cost


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

        With ``cache_dir`` the table is written to ``cache_dir/KEY.partial`` as it grows, and gets the name
        ``cache_dir/KEY`` when it is complete. A build that was interrupted goes on where it stopped, or starts over
        where what it left does not fit. A complete table is checked against its SHA-256 and opened; that needs no
        right to write. Of two processes that want to build the same table, one does and the other waits.

        Args:
            encoder: what embeds.
            corpus: N passages.
            max_tokens: cut each passage after so many tokens, the prompt and special tokens not counted; None cuts
                only what the model cannot take.
            kind: whose prompt to use.
            cache_dir: where tables are kept; None keeps the table in memory.
            progress: show a progress bar.
            token_budget: most tokens in one forward pass; see ``TextEncoder.embed``.

        Raises:
            ValueError: when ``max_tokens`` is below 1, or when the complete table on disk is damaged.
            OSError: when the table cannot be written, such as on a full disk.
        """
        if max_tokens is not None and max_tokens < 1:
            raise ValueError(f"max_tokens={max_tokens} must be at least 1; None cuts only what the model cannot take")
        if max_tokens is not None and max_tokens >= encoder.room(kind):
            max_tokens = None  # one table for all limits that change nothing
        first: dict[str, int] = {}
        rows = np.array([first.setdefault(str(passage), len(first)) for passage in corpus], np.int64)
        texts = list(first)
        shape = (len(rows), encoder.dim)
        if cache_dir is None:
            table = np.empty(shape, np.float32)
            done = sum(fill(table, rows, texts, encoder, kind, max_tokens, token_budget, progress, start=0))
            return cls(table, done)
        identity = _identity(encoder, corpus, max_tokens, kind)
        key = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()
        final, partial = Path(cache_dir) / key, Path(cache_dir) / f"{key}.partial"
        if not final.exists():
            with writing(cache_dir):
                final.parent.mkdir(parents=True, exist_ok=True)
            held = _lock(final)
            try:
                if not final.exists():  # else the process that held the lock has built it
                    target, start, truncated = _start(partial, shape, len(texts))
                    cuts = fill(target, rows, texts, encoder, kind, max_tokens, token_budget, progress, start=start)
                    for cut in cuts:
                        start, truncated = min(start + CHUNK, len(texts)), truncated + cut
                        _sync(target, partial / VECTORS)
                        _write_json(partial / PROGRESS, {"texts": start, "truncated": truncated})
                    del target  # Windows renames no folder with an open file
                    meta = {"passages": len(rows), "texts": len(texts), "dim": encoder.dim, "truncated": truncated}
                    _write_json(partial / META, {**meta, "sha256": _file_hash(partial / VECTORS), **identity})
                    with writing(final):
                        os.replace(partial, final)
                        (final / PROGRESS).unlink()
            finally:
                if held is not None:
                    held.close()
        vectors, truncated = _open(final, shape)
        return cls(vectors, truncated, key)


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
    order = np.argsort(rows, kind="stable")
    bounds = np.searchsorted(rows[order], np.arange(0, len(texts) + CHUNK, CHUNK))
    with Progress("embedding passages", len(texts), "texts", start, shown=progress) as shown:
        for begin in range(start, len(texts), CHUNK):
            part = texts[begin : begin + CHUNK]
            before = encoder.truncated
            vectors = encoder.encode(part, kind, max_tokens=max_tokens, token_budget=token_budget, told=shown.update)
            places = order[bounds[begin // CHUNK] : bounds[begin // CHUNK + 1]]
            table[places] = vectors.cpu().numpy()[rows[places] - begin]
            yield encoder.truncated - before


def _identity(encoder: TextEncoder, corpus: Corpus, max_tokens: int | None, kind: Kind) -> dict[str, Any]:
    """Return everything that changes a vector of the table."""
    return {
        "weights": encoder.weights_hash(),
        "settings": encoder.settings(),
        "max_tokens": max_tokens,
        "kind": kind,
        "corpus": corpus.fingerprint,
    }


def _lock(final: Path) -> IO[str] | None:
    """Take the lock of a table; say so on stderr when another process holds it, and wait."""
    path = final.with_name(f"{final.name}.lock")
    try:
        return lock(path, wait=False)
    except BlockingIOError:
        print(f"waiting for another process that builds the embedding table {final}", file=sys.stderr, flush=True)
        return lock(path, wait=True)


def _start(partial: Path, shape: tuple[int, int], texts: int) -> tuple[np.memmap[Any, Any], int, int]:
    """Return the table to fill, how many texts are done and how many of them were cut; start over where need be."""
    mark = _read_mark(partial, shape, texts)
    if mark is None:
        with writing(partial):
            if partial.exists():
                shutil.rmtree(partial)
            partial.mkdir()
        _reserve(partial / VECTORS, shape)
        mark = 0, 0
        _write_json(partial / PROGRESS, {"texts": 0, "truncated": 0})
    with writing(partial / VECTORS):
        table = np.memmap(partial / VECTORS, np.float32, mode="r+", offset=len(_header(shape)), shape=shape)
    return table, *mark


def _read_mark(partial: Path, shape: tuple[int, int], texts: int) -> tuple[int, int] | None:
    """Return how many texts a partial build has done and how many were cut; None where anything of it does not fit."""
    header = _header(shape)
    try:
        mark = json.loads((partial / PROGRESS).read_text(encoding="utf-8"))
        with open(partial / VECTORS, "rb") as file:
            fits = file.read(len(header)) == header and file.seek(0, os.SEEK_END) == len(header) + _bytes(shape)
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError, ValueError):
        return None
    if not fits or not isinstance(mark, dict):
        return None
    done, cut = mark.get("texts"), mark.get("truncated")
    if type(done) is not int or type(cut) is not int or not 0 <= cut <= done <= texts:
        return None
    return (done, cut) if done % CHUNK == 0 or done == texts else None


def _reserve(path: Path, shape: tuple[int, int]) -> None:
    """Write a table of zeros whose space is the file's own: a full disk kills who writes to the map of a sparse one."""
    header = _header(shape)
    with writing(path), open(path, "wb") as file:
        file.write(header)
        if hasattr(os, "posix_fallocate"):
            file.flush()
            os.posix_fallocate(file.fileno(), 0, len(header) + _bytes(shape))
        else:
            for begin in range(0, _bytes(shape), 1 << 20):
                file.write(bytes(min(1 << 20, _bytes(shape) - begin)))


def _header(shape: tuple[int, int]) -> bytes:
    file = io.BytesIO()
    write_array_header_1_0(file, {"descr": np.dtype(np.float32).str, "fortran_order": False, "shape": shape})
    return file.getvalue()


def _bytes(shape: tuple[int, int]) -> int:
    return shape[0] * shape[1] * np.dtype(np.float32).itemsize


def _sync(table: np.memmap[Any, Any], path: Path) -> None:
    """Return when the table is on the disk, so that no mark gets there before what it says is done."""
    with writing(path):
        table.flush()
        with open(path, "rb+") as file:
            os.fsync(file.fileno())


def _open(folder: Path, shape: tuple[int, int]) -> tuple[NDArray[np.float32], int]:
    """Return the vectors of a complete table and how many passages were cut.

    Raises:
        ValueError: when the table is not what its build has written.
    """
    path = folder / VECTORS
    try:
        meta = json.loads((folder / META).read_text(encoding="utf-8"))
        if not isinstance(meta, dict) or type(meta.get("truncated")) is not int or "sha256" not in meta:
            raise ValueError(f"{META} lacks sha256 or truncated")
        if _file_hash(path) != meta["sha256"]:
            raise ValueError(f"the SHA-256 of {VECTORS} is not the one in {META}")
        # Copy on write: torch takes a read-only array only with a warning.
        vectors = np.load(path, mmap_mode="c")
        if vectors.shape != shape or vectors.dtype != np.float32:
            raise ValueError(f"{VECTORS} is {vectors.dtype} {vectors.shape}, expected float32 {shape}")
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError, ValueError) as error:
        raise ValueError(f"the embedding table {folder} is damaged ({error}): delete that folder") from error
    return vectors, meta["truncated"]


def _file_hash(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _write_json(path: Path, content: dict[str, Any]) -> None:
    write_text(path, json.dumps(content, indent=2, ensure_ascii=False) + "\n")
