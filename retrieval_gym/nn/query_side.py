"""The query side of a retriever over frozen passages: it starts as the frozen encoder, and it alone trains."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import fields
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from retrieval_gym.nn.encoder import TextEncoder
from retrieval_gym.nn.lora import add_lora
from retrieval_gym.nn.pooling import Normalize

FULL_LIMIT = 100_000_000  # weights up to which an encoder is trained in full, unless a flag says otherwise


class QuerySideArgs(Protocol):
    """What a script's arguments, a dataclass, say about the query side; all that begin with ``lora_`` need LoRA."""

    full: bool
    lora: bool
    lora_rank: int
    lora_alpha: int
    lora_targets: Sequence[str] | None
    train_embeddings: bool


class OptimizerArgs(Protocol):
    """What a script's arguments say about AdamW."""

    betas: tuple[float, float]
    weight_decay: float


def trains_adapters(args: QuerySideArgs, encoder: TextEncoder, limit: int = FULL_LIMIT) -> bool:
    """Say whether the query side trains LoRA adapters rather than all weights.

    Args:
        args: the script's arguments.
        encoder: where the query side starts.
        limit: number of weights beyond which adapters are the default.

    Raises:
        ValueError: for a flag that is of no use to the one or the other.
    """
    if args.full and args.lora:
        raise ValueError("--full and --lora are both given: choose one")
    lora = args.lora or (not args.full and sum(p.numel() for p in encoder.parameters()) > limit)
    for field in fields(args):  # type: ignore[arg-type]
        value: Any = getattr(args, field.name)
        if field.name.startswith("lora_") and not lora and value != field.default:
            raise ValueError(f"{field.name} is {value}, but all weights are trained: pass --lora")
    if lora and not args.train_embeddings:
        raise ValueError("--no-train-embeddings is for --full: LoRA leaves the word embeddings as they are anyway")
    return lora


def make_query_encoder(args: QuerySideArgs, frozen: TextEncoder, *, lora: bool, dropout: float = 0.0) -> TextEncoder:
    """Return a query side that starts as the frozen encoder.

    Args:
        args: the script's arguments.
        frozen: left as it is.
        lora: train adapters, which share the frozen encoder's weights, rather than a copy of all weights.
        dropout: of the adapters' inputs; off until ``lora.adapter_dropout`` switches it on.

    Raises:
        ValueError: when an argument of LoRA does not suit the model.
    """
    if lora:
        encoder = shared_copy(frozen)
        add_lora(encoder, rank=args.lora_rank, alpha=args.lora_alpha, dropout=dropout, targets=args.lora_targets)
        return encoder.eval()
    encoder = copy.deepcopy(frozen).requires_grad_(True)
    if not args.train_embeddings:
        encoder.model.get_input_embeddings().requires_grad_(False)  # type: ignore[operator]
    return encoder.eval()


def make_optimizer(args: OptimizerArgs, encoder: TextEncoder) -> torch.optim.AdamW:
    """Return AdamW over what trains."""
    return torch.optim.AdamW(
        [weight for weight in encoder.parameters() if weight.requires_grad],
        betas=args.betas,
        weight_decay=args.weight_decay,
        fused=encoder.device.type != "mps",
    )


def trained_state(encoder: TextEncoder) -> dict[str, Tensor]:
    """Return the weights that training changes, by name."""
    return {name: weight.detach() for name, weight in encoder.named_parameters() if weight.requires_grad}


def shared_copy(encoder: TextEncoder) -> TextEncoder:
    """Return a copy whose weights are the very tensors of ``encoder``: what trains one trains the other."""
    return copy.deepcopy(encoder, {id(weight): weight for weight in encoder.parameters()})


def normalizes(encoder: TextEncoder) -> bool:
    """Say whether an encoder scales its vectors to unit length in the end."""
    return len(encoder.heads) > 0 and isinstance(encoder.heads[-1], Normalize)


def with_normalization(encoder: TextEncoder, on: bool) -> TextEncoder:
    """Return an encoder over the same weights that does, or does not, scale its vectors to unit length in the end."""
    view = shared_copy(encoder)
    heads = list(view.heads)[:-1] if normalizes(encoder) else list(view.heads)
    view.heads = nn.ModuleList([*heads, Normalize()] if on else heads)
    return view
