"""A finished run as a retriever, whichever agent trained it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from retrieval_gym.nn.dense import DenseRetriever
from retrieval_gym.nn.embeddings import EmbeddingTable
from retrieval_gym.nn.encoder import TextEncoder
from retrieval_gym.nn.q_function import QRetriever, load_q
from retrieval_gym.nn.run import Run
from retrieval_gym.ranking import Retriever

if TYPE_CHECKING:
    from retrieval_gym.datasets.base import RetrievalDataset

DENSE_AGENTS = ("states", "objective")  # what the configuration of infonce.py has, or of pao.py, and no other
DENSE_SETTINGS = ("autocast", "question_tokens", "passage_tokens")


def load_run(
    directory: str | Path,
    dataset: RetrievalDataset,
    *,
    device: str | torch.device = "cpu",
    cache_dir: str | Path | None = None,
) -> Retriever:
    """Return the retriever that a finished run trained, as its report scored it.

    Args:
        directory: a run folder of ``agents/pqn.py``, ``agents/infonce.py`` or ``agents/pao.py``, told apart by their
            configuration.
        dataset: what is asked and picked.
        device: where it runs.
        cache_dir: where embeddings of a corpus are kept; None is nowhere.

    Raises:
        FileNotFoundError: when there is no such folder, or the run has not finished.
        ValueError: when the folder is not that of such a run.
    """
    run = Run.open(directory)
    if not is_dense(run):
        return QRetriever(load_q(directory, device), dataset, cache_dir)
    table = EmbeddingTable.build(
        load_run_encoder(run, "passage_encoder", device),
        dataset.corpus,
        max_tokens=run.config["passage_tokens"],
        cache_dir=cache_dir,
        progress=True,
    )
    return DenseRetriever(
        dataset,
        load_run_encoder(run, "query_encoder", device),
        max_passage_tokens=run.config["passage_tokens"],
        max_question_tokens=run.config["question_tokens"],
        vectors=table.vectors,
    )


def is_dense(run: Run) -> bool:
    """Say whether ``agents/infonce.py`` or ``agents/pao.py`` made a run, rather than ``agents/pqn.py``."""
    return any(name in run.config for name in DENSE_AGENTS) and all(name in run.config for name in DENSE_SETTINGS)


def encoder_names(run: Run) -> tuple[str, str]:
    """Return the names of the encoder of questions and states, and of that of passages, in the folder of a run.

    Raises:
        ValueError: when the folder is not that of a run of an agent.
    """
    missing = [name for name in DENSE_SETTINGS if name not in run.config]
    if missing:
        raise ValueError(f"{run.directory} is no run of an agent: its configuration has no {missing[0]!r}")
    return ("query_encoder", "passage_encoder") if is_dense(run) else ("state_encoder", "action_encoder")


def run_encoder_folder(run: Run, name: str) -> Path:
    """Return the folder of an encoder that a finished run has saved.

    Raises:
        FileNotFoundError: when the run has not finished.
    """
    folder = run.directory / name
    if not folder.is_dir():
        raise FileNotFoundError(f"{run.directory} has no {name}: finish the run first, with --resume")
    return folder


def load_run_encoder(run: Run, name: str, device: str | torch.device) -> TextEncoder:
    """Load an encoder that a finished run has saved; see ``run_encoder_folder`` for what it raises."""
    return TextEncoder.load(run_encoder_folder(run, name), device=device, autocast=run.config["autocast"])
