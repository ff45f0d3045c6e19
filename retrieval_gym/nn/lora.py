"""LoRA on a ``TextEncoder``: low-rank adapters beside weights that stay as they are (Hu et al. 2021), through peft."""

from __future__ import annotations

import copy
from collections.abc import Sequence

from retrieval_gym.nn.encoder import TextEncoder


def add_lora(
    encoder: TextEncoder, *, rank: int, alpha: int, dropout: float = 0.0, targets: Sequence[str] | None = None
) -> None:
    """Put adapters beside linear layers of an encoder; from then on they alone train.

    An adapter adds ``alpha / rank * B A x`` to its layer. B starts at 0, so the vectors stay the same until it trains.

    Args:
        encoder: changed in place; its own weights get no gradient any more.
        rank: rows of A and columns of B.
        alpha: scale of what the adapters add.
        dropout: share of the adapters' inputs that is dropped while ``adapter_dropout`` is on.
        targets: ends of the names of the layers to adapt, such as ``["q_proj", "v_proj"]``; None is every linear layer
            of the transformer, which is all of attention and MLP.

    Raises:
        ValueError: when a number is out of range or no layer has such a name.
    """
    from peft import LoraConfig, inject_adapter_in_model

    if not 0 <= dropout < 1:
        raise ValueError(f"LoRA dropout is {dropout}: it must be at least 0 and below 1")
    encoder.requires_grad_(False)
    config = LoraConfig(
        r=rank, lora_alpha=alpha, lora_dropout=dropout, target_modules="all-linear" if targets is None else [*targets]
    )
    inject_adapter_in_model(config, encoder.model)


def adapter_dropout(encoder: TextEncoder, on: bool) -> None:
    """Switch the adapters' dropout; the model's own dropout is left as it is."""
    from peft.tuners.lora import LoraLayer

    for module in encoder.modules():
        if isinstance(module, LoraLayer):
            module.lora_dropout.train(on)


def merge_lora(encoder: TextEncoder) -> TextEncoder:
    """Return a copy of an encoder with its adapters added to the weights: an encoder like any other, to be saved."""
    from peft.tuners.lora import LoraLayer

    plain = copy.deepcopy(encoder)
    for name, layer in list(plain.model.named_modules()):
        if isinstance(layer, LoraLayer):
            layer.merge(safe_merge=True)
            parent, _, child = name.rpartition(".")
            setattr(plain.model.get_submodule(parent), child, layer.get_base_layer())
    return plain
