"""Checkpoints that a kill cannot lose, and the states of every random number generator in them."""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Collection
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch

from retrieval_gym.files import write_atomically

FORMAT = 1
FORMAT_KEY = "retrieval_gym_checkpoint"
PLAIN_TYPES = (type(None), bool, int, float, str, bytes)


def save_checkpoint(path: str | Path, state: dict[str, Any]) -> None:
    """Write a checkpoint atomically and keep the one that stood there as ``{stem}.previous{suffix}``.

    The new file is complete and on disk before it takes the name, and the old one has its second name by then, so that
    a kill at any moment leaves at least one whole checkpoint.

    Args:
        path: the file, ``checkpoints/last.pt`` say; its folder must exist.
        state: dictionaries, lists and tuples of tensors, numbers, strings and None, such as ``state_dict()`` gives.

    Raises:
        ValueError: when the state holds something that ``torch.load(weights_only=True)`` would refuse to read.
        OSError: when the file cannot be written; the checkpoint that stood there is untouched.
    """
    _check_plain(state, "state")
    payload = {FORMAT_KEY: FORMAT, "state": state}

    def write(file: IO[bytes]) -> None:
        try:
            torch.save(payload, file)
        except RuntimeError as error:  # what torch makes of a full disk
            if isinstance(error.__context__, OSError):
                raise error.__context__ from None
            raise

    write_atomically(path, write, keep_previous=True)


def load_checkpoint(path: str | Path, map_location: str | torch.device = "cpu") -> dict[str, Any]:
    """Read what ``save_checkpoint`` wrote, with ``weights_only=True``: no code in the file is run.

    Raises:
        FileNotFoundError: when there is no such file.
        ValueError: when the file is empty, truncated, not one of this package or of a newer format.
    """
    path = Path(path)
    others = sorted(other.name for other in path.parent.glob("*.pt") if other.name != path.name)
    remedy = f"use another checkpoint of {path.parent}: {', '.join(others)}" if others else "start a new run"
    if not path.is_file():
        raise FileNotFoundError(f"no checkpoint {path}: {remedy}")
    try:
        with open(path, "rb") as file:
            payload = torch.load(file, map_location=map_location, weights_only=True)
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # a damaged file can raise nearly anything
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ValueError(f"cannot read checkpoint {path} ({path.stat().st_size} bytes; {reason}): {remedy}") from error
    if not isinstance(payload, dict) or FORMAT_KEY not in payload:
        raise ValueError(f"{path} is not a checkpoint of retrieval_gym: {remedy}")
    if payload[FORMAT_KEY] != FORMAT:
        raise ValueError(
            f"{path} has checkpoint format {payload[FORMAT_KEY]}, this version reads {FORMAT}: install the version "
            f"of retrieval_gym that wrote it, or {remedy}"
        )
    return payload["state"]


def _check_plain(value: Any, where: str) -> None:
    if isinstance(value, torch.Tensor) or type(value) in PLAIN_TYPES:
        return
    if type(value) in (dict, OrderedDict):
        for key, item in value.items():
            _check_plain(key, f"a key of {where}")
            _check_plain(item, f"{where}[{key!r}]")
    elif type(value) in (list, tuple):
        for i, item in enumerate(value):
            _check_plain(item, f"{where}[{i}]")
    else:
        raise ValueError(
            f"{where} is a {type(value).__module__}.{type(value).__qualname__}, which a checkpoint cannot hold: "
            "give tensors, Python numbers, strings, lists and dictionaries"
        )


def generator_state(generator: np.random.Generator) -> dict[str, Any]:
    """Return the state of a numpy generator, of any bit generator, in a form that a checkpoint holds."""
    return _encode(generator.bit_generator.state)


def set_generator_state(generator: np.random.Generator, state: dict[str, Any]) -> None:
    """Put a numpy generator into a state that ``generator_state`` gave.

    Raises:
        ValueError: when the state is that of another bit generator.
    """
    name = type(generator.bit_generator).__name__
    if state["bit_generator"] != name:
        raise ValueError(f"the state is of a {state['bit_generator']} and the generator a {name}: give the same kind")
    generator.bit_generator.state = _decode(state)


def rng_state() -> dict[str, Any]:
    """Return the states of the global generators: Python, numpy, torch and every CUDA device."""
    version, words, gauss = random.getstate()
    return {
        "python": [version, list(words), gauss],
        "numpy": _encode(np.random.get_state(legacy=False)),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


def set_rng_state(state: dict[str, Any]) -> None:
    """Put the global generators into the states that ``rng_state`` gave.

    Says so in one line when this machine has another number of CUDA devices; their draws then differ.
    """
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    np.random.set_state(_decode(state["numpy"]))
    torch.set_rng_state(state["torch"].cpu())
    devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if devices != len(state["cuda"]):
        print(
            f"random states of {len(state['cuda'])} CUDA devices were saved and {devices} are here: CUDA draws differ"
        )
    for device, cuda_state in zip(range(devices), state["cuda"], strict=False):
        torch.cuda.set_rng_state(cuda_state.cpu(), device)


def _encode(value: Any) -> Any:
    """Turn arrays into lists and integers beyond 63 bits into strings."""
    if isinstance(value, dict):
        return {key: _encode(item) for key, item in value.items()}
    if isinstance(value, np.ndarray):
        return {"dtype": value.dtype.name, "array": [_encode(item) for item in value.tolist()]}
    if type(value) is int and value.bit_length() > 63:
        return {"integer": str(value)}
    return value


def _decode(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    if "integer" in value:
        return int(value["integer"])
    if "array" in value:
        return np.array([_decode(item) for item in value["array"]], value["dtype"])
    return {key: _decode(item) for key, item in value.items()}


def check_config(saved: dict[str, Any], current: dict[str, Any], ignore: Collection[str] = ()) -> None:
    """Check that a run is resumed with the configuration it was started with.

    Args:
        saved: the configuration of the run, from its ``config.json``.
        current: the configuration now; paths and tuples count as the strings and lists that JSON makes of them.
        ignore: keys that may differ.

    Raises:
        ValueError: when they differ; it names every differing key with both values.
    """
    saved, current = _as_json(saved), _as_json(current)
    absent = "(absent)"
    differences = [
        f"{key}: {saved.get(key, absent)!r} in the run, {current.get(key, absent)!r} now"
        for key in sorted(saved.keys() | current.keys())
        if key not in ignore and (key not in saved or key not in current or saved[key] != current[key])
    ]
    if differences:
        raise ValueError(
            "cannot resume with another configuration (" + "; ".join(differences) + "): "
            "give the values of the run, or start a new run"
        )


def _as_json(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _as_json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_as_json(item) for item in value]
    return str(value) if isinstance(value, Path) else value
