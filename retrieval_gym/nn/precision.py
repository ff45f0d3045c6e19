"""Where bfloat16 saves time."""

from __future__ import annotations

import sys
from functools import cache

import torch


@cache
def use_bfloat16(device_type: str) -> bool:
    """Say whether this kind of device computes in bfloat16; where not, say so once on stderr.

    A processor without instructions for it imitates them, many times slower than float32.
    """
    if device_type != "cpu" or not hasattr(torch.cpu, "get_capabilities"):
        return True
    found = torch.cpu.get_capabilities()
    if found.get("architecture") != "x86_64" or found["avx512_bf16"] or found["amx_bf16"]:
        return True
    print("retrieval_gym: this processor has no bfloat16: autocast stays off, in float32", file=sys.stderr, flush=True)
    return False
