"""The retriever that a run started from, as the run's own report scored it before training."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from retrieval_gym.ranking import Retriever

if TYPE_CHECKING:
    from retrieval_gym.datasets.base import RetrievalDataset
    from retrieval_gym.nn.run import Run


@dataclass(frozen=True)
class Untrained:
    """An untrained retriever that can be made for any dataset.

    Attributes:
        identity: equal for two runs that started from the same retriever.
        make: makes it for a dataset; embeddings of a corpus are kept in the folder.
    """

    identity: tuple[Any, ...]
    make: Callable[[RetrievalDataset, str | Path], Retriever]


def find_untrained(directory: str | Path, device: str) -> Untrained:
    """Return what a finished run started from.

    The saved passage encoder is it, where training left that alone; else the encoder is loaded by the name that the
    run's configuration gives.

    Args:
        directory: a run folder of any agent.
        device: where it runs; ``"auto"`` is allowed.

    Raises:
        FileNotFoundError: when there is no such folder, or the run has not finished.
        ValueError: when the folder is not that of a run, or the named encoder is no longer what the run started from.
    """
    from retrieval_gym.nn.run import Run, resolve_device
    from retrieval_gym.nn.trained import is_dense

    run, place = Run.open(directory), str(resolve_device(device))
    return _dense(run, place) if is_dense(run) else _q(run, place)


def _q(run: Run, device: str) -> Untrained:
    from retrieval_gym.nn.encoder import TextEncoder
    from retrieval_gym.nn.q_function import QConfig, QFunction, QRetriever
    from retrieval_gym.nn.trained import load_run_encoder

    config = run.config
    missing = [name for name in (*(field.name for field in fields(QConfig)), "action_encoder") if name not in config]
    if missing:
        raise ValueError(f"{run.directory} is no run of pqn.py: its configuration has no {missing[0]!r}")
    settings = QConfig(**{field.name: config[field.name] for field in fields(QConfig)})
    if config["action_encoder"] == "frozen":
        encoder = load_run_encoder(run, "action_encoder", device)
    else:
        encoder = TextEncoder.load(
            config["encoder"], device=device, layers=config["layers"], autocast=config["autocast"]
        )
        if encoder.weights_hash() != run.load("last")["fingerprints"]["the encoder"]:
            raise ValueError(
                f"{config['encoder']} is not what {run.directory} was started with: put it back, or leave the "
                "untrained encoder out with --no-untrained"
            )

    def make(dataset: RetrievalDataset, cache_dir: str | Path) -> Retriever:
        return QRetriever(QFunction(encoder, encoder, settings).eval(), dataset, cache_dir)

    return Untrained(("q", encoder.weights_hash(), encoder.autocast, settings), make)


def _dense(run: Run, device: str) -> Untrained:
    from retrieval_gym.nn.dense import DenseRetriever
    from retrieval_gym.nn.embeddings import EmbeddingTable
    from retrieval_gym.nn.query_side import normalizes, with_normalization
    from retrieval_gym.nn.trained import load_run_encoder

    config = run.config
    passages = load_run_encoder(run, "passage_encoder", device)
    queries = passages
    if config.get("normalize") or config.get("no_normalize"):  # pao.py
        queries = with_normalization(passages, bool(config["normalize"]))

    def make(dataset: RetrievalDataset, cache_dir: str | Path) -> Retriever:
        table = EmbeddingTable.build(
            passages, dataset.corpus, max_tokens=config["passage_tokens"], cache_dir=cache_dir, progress=True
        )
        return DenseRetriever(
            dataset,
            queries,
            max_passage_tokens=config["passage_tokens"],
            max_question_tokens=config["question_tokens"],
            vectors=table.vectors,
        )

    limits = (config["passage_tokens"], config["question_tokens"])
    return Untrained(("dense", passages.weights_hash(), passages.autocast, normalizes(queries), limits), make)
