"""A finished run as files that other software reads: encoders, an adapter, and the vectors of a corpus.

The folder that ``export_run`` writes holds, where it is asked for:

- ``query_encoder/``, ``passage_encoder/``: folders that ``SentenceTransformer(folder)`` opens, prompts, pooling and
  normalisation included, adapters merged. Questions and states are encoded with the prompt ``query``, passages with the
  prompt ``document``. A state is the question and the picked passages' title and text, a line break between all of
  them. The passage encoder cuts where the run did; the query encoder cuts only what the model cannot take, while the
  run cut questions and passages inside a state after ``question_tokens`` and ``passage_tokens``.
- ``adapter/``: the LoRA adapter as peft writes it, to be put on ``passage_encoder/``.
- ``passages.jsonl``: one ``{"id", "title", "text"}`` a line; line i and row i of the vectors are one passage.
- ``vectors.npy``: float32 ``(N, D)``, in C order.
- ``vectors.faiss``: a flat inner-product index of the same rows; its ids are the rows.
- ``vectors.arrow``: an Arrow IPC file of the columns ``id``, ``title``, ``text`` (strings) and ``vector`` (a fixed-size
  list of D float32).
- ``export.json``: what the run was, its token limits, and the files.

Scores are inner products of query and passage vectors. A Q-value of the dueling form adds to them what is the same for
all passages of a state.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError

from retrieval_gym.files import writing
from retrieval_gym.nn.embeddings import EmbeddingTable
from retrieval_gym.nn.encoder import KINDS, Kind, TextEncoder
from retrieval_gym.nn.index import faiss_index
from retrieval_gym.nn.model_files import quiet_transformers, replace_folder, write_json
from retrieval_gym.nn.query_side import normalizes
from retrieval_gym.nn.run import Run
from retrieval_gym.nn.trained import encoder_names, run_encoder_folder

if TYPE_CHECKING:
    from retrieval_gym.datasets.base import Corpus

FORMATS = ("npy", "faiss", "arrow")
PROMPT_NAMES = {"query": "query", "passage": "document"}
WRITE_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS)
ARROW_ROWS = 65_536  # passages in one record batch


@dataclass(frozen=True)
class Exported:
    """What ``export_run`` wrote.

    Attributes:
        directory: the folder.
        files: names in it, folders with a slash.
        query_encoder: as it was saved.
        passage_encoder: as it was saved.
        truncated: number of distinct passages that were cut; 0 where none were embedded.
    """

    directory: Path
    files: tuple[str, ...]
    query_encoder: TextEncoder
    passage_encoder: TextEncoder
    truncated: int = 0


def export_run(
    run_dir: str | Path,
    target: str | Path,
    *,
    corpus: Corpus | None = None,
    formats: Sequence[str] = (),
    adapter: bool = False,
    device: str | torch.device = "cpu",
    cache_dir: str | Path | None = None,
    progress: bool = False,
) -> Exported:
    """Write a finished run to a new folder; the module says what is in it.

    Vectors are computed in float32 even where the run used bfloat16 autocast, so that they are those of
    ``passage_encoder/`` in any other software.

    Args:
        run_dir: a run folder of ``agents/infonce.py``, ``agents/pao.py`` or ``agents/pqn.py``.
        target: the folder to make; it appears when it is whole.
        corpus: passages to embed, needed for ``formats``.
        formats: any of ``FORMATS``.
        adapter: write the LoRA adapter too.
        device: where passages are embedded.
        cache_dir: where their embeddings are kept; None is nowhere.
        progress: show a progress bar.

    Raises:
        FileNotFoundError: when there is no such run, or it has not finished.
        ValueError: when it is no run of an agent, has no adapter, scores by places in a document where vectors are
            asked for, a format is unknown, or the target holds something already.
        ImportError: when a format needs a package that is not installed.
        OSError: when the folder cannot be written.
    """
    run, path = Run.open(run_dir), Path(target)
    names = encoder_names(run)
    _check(run, path, corpus, formats)
    query = TextEncoder.load(run_encoder_folder(run, names[0]), device=device)
    whole = TextEncoder.load(run_encoder_folder(run, names[1]), device=device)
    limit: int = run.config["passage_tokens"]
    room, passage = whole.room("passage"), whole
    if limit < room:
        length = whole.max_length - room + limit
        passage = TextEncoder.load(run_encoder_folder(run, names[1]), device=device, max_length=length)
    lora = _lora_state(run) if adapter else {}
    table = None
    if corpus is not None and formats:
        # Embedded by the encoder and the limit of the run, whose table may lie in the cache.
        table = EmbeddingTable.build(whole, corpus, max_tokens=limit, cache_dir=cache_dir, progress=progress)

    def write(folder: Path) -> None:
        query.save(folder / "query_encoder")
        passage.save(folder / "passage_encoder")
        if adapter:
            _save_adapter(run, whole, lora, folder / "adapter")
        if table is not None and corpus is not None:
            _write_passages(folder / "passages.jsonl", corpus)
            for name in formats:
                WRITERS[name](folder / f"vectors.{name}", table.vectors, corpus)
        write_json(folder / "export.json", _description(run, query, passage, corpus if table else None, formats))

    with writing(target), _full_disk():
        if path.exists():
            path.rmdir()  # empty, or _check had refused it
        replace_folder(path, write)
    files = tuple(sorted(f"{each.name}/" if each.is_dir() else each.name for each in path.iterdir()))
    return Exported(path, files, query, passage, 0 if table is None else table.truncated)


@contextmanager
def _full_disk() -> Iterator[None]:
    """Turn what safetensors and FAISS raise where a file cannot be written into an OSError."""
    try:
        yield
    except (SafetensorError, RuntimeError) as error:
        number = next((number for number in WRITE_ERRORS if os.strerror(number) in str(error)), None)
        if number is None:
            raise
        raise OSError(number, os.strerror(number)) from error


def largest_difference(encoder: TextEncoder, folder: str | Path, texts: Sequence[str], kind: Kind) -> float:
    """Return how far the vectors of an encoder and of its folder in sentence-transformers are apart, at most.

    Args:
        encoder: as it was saved.
        folder: where.
        texts: N texts, at least one.
        kind: whose prompt to use.
    """
    from sentence_transformers import SentenceTransformer

    with quiet_transformers():
        model = SentenceTransformer(str(folder), device="cpu")
    theirs = model.encode(list(texts), prompt_name=PROMPT_NAMES[kind], convert_to_numpy=True)
    return float(np.abs(encoder.encode(texts, kind).cpu().numpy() - np.asarray(theirs, np.float32)).max())


def _check(run: Run, target: Path, corpus: Corpus | None, formats: Sequence[str]) -> None:
    unknown = [name for name in formats if name not in FORMATS]
    if unknown:
        raise ValueError(f"unknown format {unknown[0]!r}: choose among {', '.join(FORMATS)}")
    if formats and corpus is None:
        raise ValueError(f"format {formats[0]!r} needs a corpus, whose passages are embedded")
    positions = run.config.get("positions", "none")
    if formats and positions != "none":
        raise ValueError(
            f"{run.directory} was trained with positions={positions!r}: a passage's vector depends on its place in the "
            "question's document, so there is no index of them; export the encoders alone"
        )
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        raise ValueError(f"{target} is there already: name a new folder, or an empty one")
    if "arrow" in formats:
        _arrow()
    if "faiss" in formats:
        _faiss()


def _faiss() -> Any:
    try:
        return import_module("faiss")
    except ModuleNotFoundError as error:
        raise ImportError("the format faiss needs FAISS: pip install 'retrieval-gym[cpu]'") from error


def _arrow() -> Any:
    try:
        return import_module("pyarrow")
    except ModuleNotFoundError as error:
        raise ImportError("the format arrow needs pyarrow: pip install 'retrieval-gym[data]'") from error


def _lora_state(run: Run) -> dict[str, torch.Tensor]:
    """Return the adapter's weights that the selected checkpoint holds.

    Raises:
        ValueError: when it holds none.
        FileNotFoundError: when there is no checkpoint any more.
    """
    state = {name: w for name, w in run.load("best").get("query", {}).items() if ".lora_" in name}
    if not state:
        raise ValueError(
            f"{run.directory} trained whole encoders, so there is no adapter: take query_encoder/, or train with --lora"
        )
    return state


def _save_adapter(run: Run, base: TextEncoder, state: dict[str, torch.Tensor], folder: Path) -> None:
    from peft import LoraConfig, TaskType, get_peft_model

    config = run.config
    targets = config["lora_targets"]
    lora = LoraConfig(
        r=config["lora_rank"],
        lora_alpha=config["lora_alpha"],
        target_modules="all-linear" if targets is None else [*targets],
        task_type=TaskType.FEATURE_EXTRACTION,
    )
    model = get_peft_model(base.model, lora)  # type: ignore[arg-type]
    try:
        names = {f"base_model.model.{name.removeprefix('model.')}": weight for name, weight in state.items()}
        missed = model.load_state_dict(names, strict=False)
        lost = [name for name in missed.missing_keys if ".lora_" in name]
        if lost or missed.unexpected_keys:
            raise ValueError(
                f"the adapter of {run.directory} does not fit its encoder: {[*lost, *missed.unexpected_keys][:2]}"
            )
        # A model whose layers were dropped has no name but the folder beside the adapter.
        model.peft_config["default"].base_model_name_or_path = (
            config["encoder"] if config.get("layers") is None else "../passage_encoder"
        )
        model.save_pretrained(str(folder), save_embedding_layers=False)  # "auto" would ask the Hub
    finally:
        model.unload()


def _write_passages(path: Path, corpus: Corpus) -> None:
    with open(path, "w", encoding="utf-8", newline="\n") as file:
        for key, passage in zip(corpus.keys, corpus, strict=True):
            record = {"id": key, "title": passage.title, "text": passage.text}
            file.write(json.dumps(record, ensure_ascii=False) + "\n")


def _write_npy(path: Path, vectors: NDArray[np.float32], corpus: Corpus) -> None:
    np.save(path, vectors)


def _write_faiss(path: Path, vectors: NDArray[np.float32], corpus: Corpus) -> None:
    _faiss().write_index(faiss_index(torch.as_tensor(vectors)), str(path))


def _write_arrow(path: Path, vectors: NDArray[np.float32], corpus: Corpus) -> None:
    arrow = _arrow()
    width = vectors.shape[1]
    schema = arrow.schema(
        [(name, arrow.string()) for name in ("id", "title", "text")] + [("vector", arrow.list_(arrow.float32(), width))]
    )
    keys = corpus.keys
    with arrow.OSFile(str(path), "wb") as file, arrow.ipc.new_file(file, schema) as writer:
        for start in range(0, len(corpus), ARROW_ROWS):
            passages = corpus[start : start + ARROW_ROWS]
            flat = arrow.array(np.asarray(vectors[start : start + ARROW_ROWS]).ravel(), arrow.float32())
            columns = [
                arrow.array(list(keys[start : start + ARROW_ROWS]), arrow.string()),
                arrow.array([passage.title for passage in passages], arrow.string()),
                arrow.array([passage.text for passage in passages], arrow.string()),
                arrow.FixedSizeListArray.from_arrays(flat, width),
            ]
            writer.write_batch(arrow.record_batch(columns, schema=schema))


WRITERS = {"npy": _write_npy, "faiss": _write_faiss, "arrow": _write_arrow}


def _description(
    run: Run, query: TextEncoder, passage: TextEncoder, corpus: Corpus | None, formats: Sequence[str]
) -> dict[str, Any]:
    config = run.config
    described: dict[str, Any] = {
        "run": run.directory.name,
        "trained_on": {"env": config.get("env"), "env_kwargs": config.get("env_kwargs")},
        "score": "inner product",
        "unit_length": {kind: normalizes(each) for kind, each in zip(KINDS, (query, passage), strict=True)},
        "dim": passage.dim,
        "prompts": {"query": query.prompts["query"], "document": passage.prompts["passage"]},
        "state": "the question, then title and text of each picked passage, joined by line breaks",
        "order": config.get("order", "pick"),
        "question_tokens": config["question_tokens"],
        "passage_tokens": config["passage_tokens"],
        "positions": config.get("positions", "none"),
        "trained_with_autocast": config["autocast"],
    }
    if corpus is not None:
        described |= {
            "passages": len(corpus),
            "corpus": corpus.fingerprint,
            "vectors": [f"vectors.{name}" for name in formats],
        }
    return described
