"""From one vector a token to one vector a text: pooling that never reads padding, and the modules after it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from retrieval_gym.nn.model_files import read_json

POOLING_MODES = ("mean", "cls", "lasttoken", "max")
_LEGACY_KEYS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}


def pool(hidden: Tensor, lengths: Tensor, mode: str) -> Tensor:
    """Pool right-padded token vectors.

    Right padding is the only layout: position ids then start at 0 for every text, and causal attention never reaches
    the padding, so a model trained with left padding gives the same vectors.

    Args:
        hidden: float ``(B, L, H)``.
        lengths: number of tokens of each text, at least 1, int64 ``(B,)``.
        mode: one of ``POOLING_MODES``.

    Returns:
        float32 ``(B, H)``.
    """
    if mode == "cls":
        return hidden[:, 0].float()
    if mode == "lasttoken":
        return hidden[torch.arange(len(hidden), device=hidden.device), lengths - 1].float()
    padding = torch.arange(hidden.shape[1], device=hidden.device) >= lengths[:, None]
    if mode == "max":
        return hidden.float().masked_fill(padding[:, :, None], -torch.inf).amax(dim=1)
    if mode == "mean":
        return hidden.float().masked_fill(padding[:, :, None], 0.0).sum(dim=1) / lengths[:, None]
    raise ValueError(f"unknown pooling mode {mode!r}: choose one of {', '.join(POOLING_MODES)}")


def pooling_mode(config: Mapping[str, Any]) -> str:
    """Read the mode from a sentence-transformers ``1_Pooling/config.json``, in the old layout or the new.

    Raises:
        ValueError: when the mode is not one of ``POOLING_MODES``, several are concatenated, or prompt tokens are left
            out of pooling.
    """
    modes = config.get("pooling_mode", [mode for key, mode in _LEGACY_KEYS.items() if config.get(key)] or ["mean"])
    modes = [modes] if isinstance(modes, str) else list(modes)
    if len(modes) != 1 or modes[0] not in POOLING_MODES:
        raise ValueError(
            f"pooling {'+'.join(modes)!r} is not supported: use a model that pools by one of {POOLING_MODES}"
        )
    if not config.get("include_prompt", True):
        raise ValueError("pooling with include_prompt=false is not supported: use a model that pools prompt tokens too")
    return modes[0]


class Dense(nn.Module):
    """The Dense module of sentence-transformers: a linear layer and an activation out of ``torch.nn``."""

    def __init__(self, in_features: int, out_features: int, bias: bool, activation_function: str) -> None:
        super().__init__()
        module, _, name = activation_function.rpartition(".")
        if not (module == "torch.nn" or module.startswith("torch.nn.modules.")) or not hasattr(nn, name):
            raise ValueError(f"Dense activation {activation_function!r} is not supported: use a module of torch.nn")
        self.config = {
            "in_features": in_features,
            "out_features": out_features,
            "bias": bias,
            "activation_function": activation_function,
        }
        self.linear = nn.Linear(in_features, out_features, bias=bias)
        self.activation = getattr(nn, name)()

    @classmethod
    def load(cls, folder: Path) -> Dense:
        """Read ``config.json`` and the weights of a Dense module."""
        config = read_json(folder / "config.json")
        if config.get("use_residual") or config.get("module_input_name", "sentence_embedding") != "sentence_embedding":
            raise ValueError(f"{folder / 'config.json'}: only a plain Dense on the sentence embedding is supported")
        keys = ("in_features", "out_features", "bias", "activation_function")
        dense = cls(*(config[key] for key in keys))
        if (folder / "model.safetensors").is_file():
            from safetensors.torch import load_file

            dense.load_state_dict(load_file(folder / "model.safetensors"))
        else:
            dense.load_state_dict(torch.load(folder / "pytorch_model.bin", map_location="cpu", weights_only=True))
        return dense

    def forward(self, vectors: Tensor) -> Tensor:
        """Map ``(B, in_features)`` to ``(B, out_features)``."""
        return self.activation(self.linear(vectors))


class Normalize(nn.Module):
    """Scale vectors to unit length."""

    def forward(self, vectors: Tensor) -> Tensor:
        """Map ``(B, D)`` to ``(B, D)``."""
        return nn.functional.normalize(vectors, dim=-1)
