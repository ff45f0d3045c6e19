"""Readers by name: what a name may be, what it stands for, and the reader itself."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from retrieval_gym.readers.base import Reader
from retrieval_gym.readers.chat import MAX_TOKENS, RETRIES, TIMEOUT, WORKERS, ChatReader, Endpoint
from retrieval_gym.retrieval import import_callable

KINDS = "the URL of a chat endpoint, the folder or Hub id of a transformers model, or package.module:function"
BATCH_SIZE = 8
API_KEY_VARIABLE = "RETRIEVAL_GYM_API_KEY"  # where a key is looked for when no other variable is named


def is_url(name: str) -> bool:
    """Say whether a reader's name is the URL of an endpoint."""
    return name.startswith(("http://", "https://"))


def is_function(name: str) -> bool:
    """Say whether a reader's name is that of a function to import."""
    return re.fullmatch(r"[\w.]+:\w+", name) is not None and not Path(name).is_dir()


def check_model_name(name: str, what: str) -> None:
    """Raise a FileNotFoundError when ``name`` is neither a folder nor spelled like a Hub id."""
    if not Path(name).expanduser().is_dir() and not re.fullmatch(r"\w[\w.-]*(/[\w.-]+)?", name):
        raise FileNotFoundError(f"no {what} at {name!r}: there is no such folder, and it cannot be a Hub id")


def check_reader_name(name: str) -> None:
    """Refuse, without loading or asking anything, what cannot be a reader's name.

    Raises:
        ValueError: when it is a URL without a host or a model, or holds a password.
        FileNotFoundError: when it can only be a folder, and there is none.
    """
    if is_url(name):
        Endpoint.parse(name)
    elif not is_function(name):
        check_model_name(name, "reader")


def describe_reader(
    name: str, *, model: str | None = None, max_tokens: int = MAX_TOKENS, request: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return everything that a reader's answers depend on, JSON-able and without any key; loads nothing.

    Raises:
        ValueError, FileNotFoundError: as ``check_reader_name``.
    """
    if is_url(name):
        endpoint = Endpoint.parse(name, model)
        described: dict[str, Any] = {"endpoint": endpoint.shown, "model": endpoint.model, "max_tokens": max_tokens}
        return described | ({"request": dict(request)} if request else {})
    check_reader_name(name)
    if is_function(name):
        return {"function": name}
    folder = Path(name).expanduser()
    return {"model": str(folder.resolve()) if folder.is_dir() else name, "max_tokens": max_tokens}


def read_api_key(variable: str | None = None) -> str | None:
    """Return an endpoint's key out of the environment.

    Args:
        variable: the environment variable; by default ``RETRIEVAL_GYM_API_KEY``, which need not be set.

    Raises:
        ValueError: when the variable that is named is not set.
    """
    key = os.environ.get(API_KEY_VARIABLE if variable is None else variable, "").strip()
    if not key and variable is not None:
        # The name is not shown: it may be the key itself, given by mistake.
        raise ValueError("--api-key-env names an environment variable that is not set: give the name of one that is")
    return key or None


def make_reader(
    name: str,
    *,
    model: str | None = None,
    api_key: str | None = None,
    request: Mapping[str, Any] | None = None,
    max_tokens: int = MAX_TOKENS,
    workers: int = WORKERS,
    timeout: float = TIMEOUT,
    retries: int = RETRIES,
    batch_size: int = BATCH_SIZE,
    device: str = "auto",
) -> Reader:
    """Return a reader by name.

    Args:
        name: the URL of an OpenAI-compatible chat endpoint, with the model behind ``#`` where ``model`` does not give
            it; the folder or Hub id of a transformers model (decoder, encoder-decoder or extractive head); or
            ``package.module:function``, a ``Reader`` that is imported.
        model: of an endpoint.
        api_key: of an endpoint that wants one.
        request: of an endpoint: fields to add to each request or, where None, to leave out of it.
        max_tokens: most tokens of an answer; an extractive model's, too.
        workers: of an endpoint: requests at a time.
        timeout: of an endpoint: seconds to wait for it.
        retries: of an endpoint: how often a request is repeated.
        batch_size: of a local model: questions in one forward pass.
        device: of a local model: ``"auto"``, ``"cpu"``, ``"cuda"`` or ``"mps"``.

    Raises:
        ValueError: when the name or an argument cannot be, or the model is of another kind.
        FileNotFoundError: when there is no such model.
        ImportError: when a local model's packages (extra ``agents``) are not installed.
    """
    if is_url(name):
        return ChatReader(
            Endpoint.parse(name, model),
            api_key=api_key,
            request=request,
            max_tokens=max_tokens,
            workers=workers,
            timeout=timeout,
            retries=retries,
        )
    if is_function(name):
        return import_callable(name, "reader", f"give {KINDS}")
    check_reader_name(name)
    from retrieval_gym.nn.local_reader import load_reader
    from retrieval_gym.nn.run import resolve_device

    return load_reader(name, device=resolve_device(device), max_tokens=max_tokens, batch_size=batch_size)
