"""Folders of runs and encoders, looked at before any work, so that what is damaged is named and costs nothing."""

from __future__ import annotations

import json
import os
from pathlib import Path

from retrieval_gym.readers.names import check_model_name

LIMITS = ("question_tokens", "passage_tokens")


def check_run(folder: str | Path, *, passages_only: bool = False) -> None:
    """Refuse the folder of a run that is none, has not finished or is damaged.

    Args:
        folder: as the caller named it.
        passages_only: whether only its encoder of passages is needed.

    Raises:
        FileNotFoundError: when there is no such folder, or the run has not finished.
        ValueError: when it is no run of an agent, or a file in it is damaged.
    """
    from retrieval_gym.nn.run import Run
    from retrieval_gym.nn.trained import encoder_names, run_encoder_folder

    settings = Path(folder) / "config.json"
    if settings.is_file():
        _check_json(settings)
    run = Run.open(folder)
    names = encoder_names(run)
    for name in LIMITS:
        if type(run.config[name]) is not int or run.config[name] < 1:
            raise ValueError(
                f"{settings}: {name} is {run.config[name]!r:.80}, no whole number from 1: restore the file"
            )
    for name in names[1:] if passages_only else names:
        check_encoder(run_encoder_folder(run, name))


def check_encoder(name_or_path: str | Path) -> None:
    """Refuse an encoder that can be nowhere, or whose folder holds a damaged file; a Hub id passes.

    Raises:
        FileNotFoundError: when the name is that of no folder and cannot be a Hub id.
        ValueError: when a file in the folder is damaged.
    """
    check_model_name(str(name_or_path), "model")
    folder = Path(name_or_path).expanduser()
    if not folder.is_dir():
        return
    from safetensors import SafetensorError, safe_open

    from retrieval_gym.nn.model_files import find_model

    find_model(folder)
    for path in _files(folder, "*.json"):
        _check_json(path)
    if not _files(folder, "*.safetensors") and not _files(folder, "*.bin"):
        raise ValueError(f"no weights in {folder}: {_remedy(folder / 'model.safetensors')}")
    for path in _files(folder, "*.safetensors"):
        try:
            with safe_open(path, "numpy"):
                pass  # opening it compares the header with the length of the file
        except SafetensorError as error:
            raise ValueError(f"{path} is damaged ({error}): {_remedy(path)}") from error


def check_cache(folder: str | None) -> None:
    """Refuse a ``--cache-dir`` that is a file, or a link to nothing.

    Raises:
        ValueError: when it is one.
    """
    if folder is not None and os.path.lexists(folder) and not Path(folder).is_dir():
        what = "is a file" if Path(folder).exists() else "leads nowhere"
        raise ValueError(f"--cache-dir {folder} {what}: name a folder")


def _files(folder: Path, pattern: str) -> list[Path]:
    """Return files of a model's folder and of the folders of its modules."""
    return sorted([*folder.glob(pattern), *folder.glob(f"*/{pattern}")])


def _check_json(path: Path) -> None:
    try:
        json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON ({error}): {_remedy(path)}") from error


def _remedy(path: Path) -> str:
    return f"restore it, or name another folder than {path.parent}"
