"""One training run: seeds, device, run folder, logs, progress, checkpoints and resume."""

from __future__ import annotations

import ctypes
import json
import math
import os
import random
import re
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from importlib import metadata
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Literal

import numpy as np
import torch

from retrieval_gym.files import lock, write_text, writing
from retrieval_gym.nn.checkpoint import (
    check_config,
    generator_state,
    load_checkpoint,
    rng_state,
    save_checkpoint,
    set_generator_state,
    set_rng_state,
)
from retrieval_gym.nn.events import EventFile

if TYPE_CHECKING:
    from tqdm import tqdm

    from retrieval_gym.nn.encoder import TextEncoder

__all__ = [
    "Run",
    "check_config",
    "check_finite",
    "earlier_run",
    "keep_freed_memory",
    "generator_state",
    "load_checkpoint",
    "resolve_device",
    "rng_state",
    "save_checkpoint",
    "seed_everything",
    "set_generator_state",
    "set_rng_state",
]

CHECKPOINTS = ("last", "best")
SECONDS_BETWEEN_LINES = 5.0
MOST_BESIDE_A_BAR = 2  # numbers: a line of a terminal holds no more
SECONDS_BETWEEN_CHECKPOINTS = 60.0
VERSIONED = ("retrieval-gym", "torch", "numpy", "gymnasium", "transformers", "sentence-transformers", "peft")


def seed_everything(seed: int) -> None:
    """Seed the global generators of Python, numpy and torch, CUDA included.

    Raises:
        ValueError: when the seed is not an integer from 0 to 2**32 - 1, the range that numpy takes.
    """
    if not 0 <= seed < 2**32:
        raise ValueError(f"seed {seed} is out of range: give an integer from 0 to {2**32 - 1}")
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def keep_freed_memory() -> None:
    """Tell glibc to keep freed memory for the next tensors instead of handing it back to the kernel.

    Tensors of a training step are allocated and freed by the megabyte; by default each comes from the kernel anew,
    whose page faults can take a quarter of the time on a CPU. Other C libraries are left as they are.
    """
    if sys.platform != "linux" or not hasattr(libc := ctypes.CDLL(None), "mallopt"):
        return
    trim_threshold, top_pad, mmap_threshold = -1, -2, -3  # names of malloc.h
    libc.mallopt(mmap_threshold, 2**25)  # the largest that glibc takes
    libc.mallopt(trim_threshold, 2**31 - 1)
    libc.mallopt(top_pad, 2**26)


def resolve_device(name: str) -> torch.device:
    """Return the device of this name; ``"auto"`` takes CUDA, else MPS, else the CPU.

    Raises:
        ValueError: when the name is unknown, or the device is not there.
    """
    present = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if name == "auto":
        return torch.device(next(device for device, here in present.items() if here))
    if name not in present:
        raise ValueError(f"unknown device {name!r}: choose one of auto, cpu, cuda, mps")
    if not present[name]:
        here = ", ".join(device for device, is_here in present.items() if is_here)
        raise ValueError(
            f"device {name!r} is not available here (torch {torch.__version__} sees: {here}); use one of these"
        )
    return torch.device(name)


def check_finite(loss: float, batch: str) -> None:
    """Stop a run whose loss is not a number before it spoils the weights.

    Args:
        loss: the loss of one batch.
        batch: what names the batch: the update, the questions.

    Raises:
        FloatingPointError: when the loss is not finite.
    """
    if not math.isfinite(loss):
        raise FloatingPointError(
            f"the loss is {loss} at {batch}: the last good checkpoint was kept; start again with a lower learning rate"
        )


class Run:
    """The folder of one training run and everything written to it.

    The folder holds ``config.json``, ``versions.json``, ``metrics.jsonl``, TensorBoard events and
    ``checkpoints/{last,last.previous,best,best.previous}.pt``. Make one with ``Run.create`` or ``Run.open``.

    Attributes:
        directory: the run folder.
        config: the configuration, as ``config.json`` holds it.
    """

    def __init__(self, directory: Path, config: dict[str, Any]) -> None:
        self.directory = directory
        self.config = config
        self._metrics_path = directory / "metrics.jsonl"
        self._metrics_bytes = 0
        self._events: EventFile | None = None
        self._bar: tqdm | None = None
        self._last_line = -math.inf
        self._paced: tuple[int, float] | None = None  # step and time of the first progress shown
        self._saved = time.monotonic()
        self._lock: IO[str] | None = None

    @classmethod
    def create(cls, root: str | Path, env: str, agent: str, seed: int, config: Mapping[str, Any]) -> Run:
        """Make the folder ``{root}/{env}__{agent}__{seed}__{time}`` of a new run and write its configuration.

        Args:
            root: folder of all runs; made when missing.
            env: environment id; characters that do not belong in a file name become ``-``.
            agent: name of the agent.
            seed: seed of the run.
            config: what JSON can hold; paths become strings.

        Raises:
            ValueError: when JSON cannot hold the configuration.
            OSError: when the folder cannot be written.
        """
        content = _strict_json(dict(config), "the configuration")
        safe = [re.sub(r"[^A-Za-z0-9._+-]+", "-", part).lstrip(".") for part in (env, agent)]
        name = f"{safe[0]}__{safe[1]}__{seed}__{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}"
        directory = _make_unique(Path(root), name)
        with writing(directory):
            (directory / "checkpoints").mkdir()
        write_text(directory / "config.json", content)
        run = cls(directory, json.loads(content))
        run.write_json("versions.json", _versions())
        return run

    @classmethod
    def open(cls, directory: str | Path) -> Run:
        """Open the folder of an earlier run, to resume or evaluate it; nothing in it changes until something is logged.

        Raises:
            FileNotFoundError: when there is no such folder.
            ValueError: when the folder is not that of a run.
        """
        directory = Path(directory)
        if not directory.is_dir():
            raise FileNotFoundError(f"no run folder {directory}: give the folder that a run printed when it started")
        path = directory / "config.json"
        if not path.is_file() or not (directory / "checkpoints").is_dir():
            raise ValueError(
                f"{directory} is not a run folder (it needs config.json and checkpoints/): "
                "give the folder that a run printed when it started"
            )
        try:
            config = json.loads(path.read_text(encoding="utf-8"))
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path} is not JSON ({error}): restore it or start a new run") from error
        if not isinstance(config, dict):
            raise ValueError(f"{path} must hold an object, got {type(config).__name__}: restore it or start a new run")
        run = cls(directory, config)
        if run._metrics_path.exists():
            run._metrics_bytes = run._metrics_path.stat().st_size
        return run

    def lock(self) -> None:
        """Keep other processes from writing to this run until this one ends, where the system can; once is enough.

        Raises:
            ValueError: when another process writes to it.
            OSError: when the folder cannot be written.
        """
        if self._lock is not None:
            return
        try:
            self._lock = lock(self.directory / ".lock", wait=False)
        except BlockingIOError as error:
            raise ValueError(f"{self.directory} is being written by another process: wait for it, or end it") from error

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Write scalars to TensorBoard and as one line ``{"step": ..., name: value, ...}`` of ``metrics.jsonl``.

        After ``load("last")`` the first line replaces all that was logged after that checkpoint, so that a resumed run
        leaves the file of an uninterrupted one, except for what a clock measured (``charts/SPS``). A value that is not
        finite is ``null`` in the file.

        Args:
            values: name to number; one-element tensors and arrays are fine.
            step: number of environment transitions so far.

        Raises:
            OSError: when the folder cannot be written.
        """
        numbers = {name: float(value) for name, value in values.items()}
        record = {"step": int(step), **{name: x if math.isfinite(x) else None for name, x in numbers.items()}}
        line = (json.dumps(record) + "\n").encode()
        with writing(self._metrics_path):
            if self._events is None:
                self._cut_metrics()
                self._events = EventFile(self.directory, purge_step=int(step))
            with open(self._metrics_path, "ab") as file:
                file.write(line)
            self._metrics_bytes += len(line)
            self._events.add(numbers, int(step))

    def _cut_metrics(self) -> None:
        """Cut ``metrics.jsonl`` to its length at the checkpoint that was loaded."""
        size = self._metrics_path.stat().st_size if self._metrics_path.exists() else 0
        if size < self._metrics_bytes:
            print(f"{self._metrics_path} lost {self._metrics_bytes - size} bytes since the checkpoint; appending to it")
            self._metrics_bytes = size
        if size > self._metrics_bytes:
            os.truncate(self._metrics_path, self._metrics_bytes)

    def progress(self, step: int, total: int, values: Mapping[str, float]) -> None:
        """Show how far the run is: one bar in a terminal, else a plain line every few seconds and at the end.

        Args:
            step: transitions so far.
            total: transitions of the whole run.
            values: name to number, shown beside it.
        """
        shown = [f"{name.rsplit('/')[-1]} {value:.4g}" for name, value in values.items()]
        if sys.stdout.isatty():
            if self._bar is None:
                from tqdm import tqdm

                self._bar = tqdm(total=total, initial=step, unit="step", file=sys.stdout, dynamic_ncols=True)
            self._bar.set_postfix_str("  ".join(shown[:MOST_BESIDE_A_BAR]), refresh=False)
            self._bar.update(step - self._bar.n)
        elif step >= total or time.monotonic() - self._last_line >= SECONDS_BETWEEN_LINES:
            self._last_line = time.monotonic()
            print(f"step {step:,}/{total:,}{self._time_left(step, total)}  {'  '.join(shown)}", flush=True)

    def _time_left(self, step: int, total: int) -> str:
        """Say how long the rest takes at the pace since the first call; nothing at that call and at the end."""
        if self._paced is None:
            self._paced = step, time.monotonic()
        first, began = self._paced
        if not first < step < total:
            return ""
        seconds = (time.monotonic() - began) * (total - step) / (step - first)
        return f"  {timedelta(seconds=round(seconds))} left"

    def save(self, name: Literal["last", "best"], state: dict[str, Any]) -> None:
        """Write ``checkpoints/{name}.pt`` atomically; the one before is kept as ``{name}.previous.pt``.

        Args:
            name: ``"last"`` or ``"best"``.
            state: see ``save_checkpoint``; ``metrics_bytes`` is added, the length of ``metrics.jsonl`` now.

        Raises:
            ValueError: when the name is neither, or the state holds what a checkpoint cannot.
            OSError: when the file cannot be written; the checkpoint that stood there is untouched.
        """
        path = self._checkpoint(name)
        if self._metrics_path.exists():
            with writing(self._metrics_path), open(self._metrics_path, "rb+") as file:
                os.fsync(file.fileno())
        save_checkpoint(path, {**state, "metrics_bytes": self._metrics_bytes})
        if name == "last":
            self._saved = time.monotonic()

    @property
    def is_due(self) -> bool:
        """Whether the last checkpoint is a minute old, so that an interruption would cost more."""
        return time.monotonic() - self._saved > SECONDS_BETWEEN_CHECKPOINTS

    def load(self, name: Literal["last", "best"], map_location: str | torch.device = "cpu") -> dict[str, Any]:
        """Read ``checkpoints/{name}.pt``, or ``{name}.previous.pt`` when it is missing or damaged, and say so.

        Raises:
            FileNotFoundError: when there is neither.
            ValueError: when the name is unknown or both are damaged.
        """
        path = self._checkpoint(name)
        previous = path.with_name(f"{name}.previous.pt")
        try:
            state = load_checkpoint(path, map_location)
        except (FileNotFoundError, ValueError) as error:
            if not previous.exists():
                raise
            state = load_checkpoint(previous, map_location)
            print(f"{error}\nloaded {previous} in place of {path}", flush=True)
        metrics_bytes = state.pop("metrics_bytes", self._metrics_bytes)
        if name == "last" and self._events is None:
            self._metrics_bytes = metrics_bytes
        return state

    def has_begun(self) -> bool:
        """Say whether there is anything to go on with; not in a run that ended before its first checkpoint."""
        return self._metrics_path.exists() or any((self.directory / "checkpoints").glob("last*.pt"))

    @contextmanager
    def taking_over(self, name: Literal["last", "best"]) -> Iterator[None]:
        """Say of a checkpoint that can be read but is not one of this run, a copy of another say, that it is not.

        Raises:
            ValueError: in place of what the code inside raises where a checkpoint lacks a part or a part does not fit.
        """
        try:
            yield
        except torch.OutOfMemoryError:
            raise
        except (AttributeError, IndexError, KeyError, RuntimeError, TypeError) as error:
            raise ValueError(
                f"{self._checkpoint(name)} does not fit this run ({type(error).__name__}: {error}): restore it, or "
                "start a new run"
            ) from error

    def save_encoder(self, name: str, encoder: TextEncoder) -> None:
        """Write an encoder into a folder of the run, whole or not at all.

        Raises:
            OSError: when it cannot be written.
        """
        path = self.directory / name
        with writing(path):
            try:
                encoder.save(path)
            except Exception as error:  # safetensors and tokenizers have their own for a full disk
                found = re.search(r"\(os error (\d+)\)", str(error))
                if found is None:
                    raise
                raise OSError(int(found[1]), os.strerror(int(found[1]))) from error

    def _checkpoint(self, name: str) -> Path:
        if name not in CHECKPOINTS:
            raise ValueError(f"unknown checkpoint {name!r}: choose one of {', '.join(CHECKPOINTS)}")
        return self.directory / "checkpoints" / f"{name}.pt"

    def write_json(self, name: str, content: Any) -> None:
        """Write a file of the run folder atomically, as strict JSON (no NaN, no infinity).

        Raises:
            ValueError: when JSON cannot hold the content.
            OSError: when the file cannot be written.
        """
        path = self.directory / name
        text = _strict_json(content, str(path))
        write_text(path, text)

    def finish(self) -> None:
        """Close a run that has reported its results; the checkpoints before the last ones have served, and go."""
        for path in (self.directory / "checkpoints").glob("*.previous.pt"):
            with writing(path):
                path.unlink()
        self.close()

    def close(self) -> None:
        """Finish the progress bar, flush the TensorBoard events and let go of the lock."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None
        if self._events is not None:
            self._events.close()
        if self._lock is not None:
            self._lock.close()
            self._lock = None


def earlier_run(resume: str | None, root: str | Path) -> Run | None:
    """Look at the folder of a run before any work: return the run to go on with, locked, or None for a new one.

    Args:
        resume: its folder, or None.
        root: folder of all runs, in which a new one is made later.

    Raises:
        FileNotFoundError: when there is no run to go on with.
        ValueError: when it is no run, or another process writes to it.
        OSError: when the folder cannot be written.
    """
    if resume is not None:
        run = Run.open(resume)
        run.lock()
        return run
    above = next(path for path in (Path(root).absolute(), *Path(root).absolute().parents) if path.exists())
    if not above.is_dir():
        raise NotADirectoryError(f"cannot write {root}: {above} is no folder; choose another one")
    if not os.access(above, os.W_OK):
        raise PermissionError(f"cannot write {root}: {above} is read-only for you; choose another folder")
    return None


def _make_unique(root: Path, name: str) -> Path:
    """Make a new folder in ``root``: ``name``, or ``name-2``, ``name-3`` and so on when it is taken."""
    with writing(root):
        root.mkdir(parents=True, exist_ok=True)
        count = 1
        while True:
            directory = root / (name if count == 1 else f"{name}-{count}")
            try:
                directory.mkdir()
                return directory
            except FileExistsError:
                count += 1


def _strict_json(content: Any, what: str) -> str:
    try:
        return json.dumps(content, indent=2, allow_nan=False, ensure_ascii=False, default=_jsonable) + "\n"
    except (TypeError, ValueError) as error:
        raise ValueError(f"{what} is not JSON: {error}") from error


def _jsonable(value: Any) -> Any:
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, (np.generic, np.ndarray)):
        return value.tolist()
    raise TypeError(f"{value!r} is a {type(value).__name__}: give numbers, strings, lists or dictionaries")


def _versions() -> dict[str, str]:
    """Return what the figures of a run depend on, besides its configuration."""
    versions = {"python": sys.version.split()[0]}
    for package in VERSIONED:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = "absent"
    return versions
