"""Exact inner-product search behind one call, in torch or FAISS, with one answer from both."""

from __future__ import annotations

from importlib import import_module
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from retrieval_gym.ranking import SCORE_DECIMALS

CELLS = 2**24  # scores held at once, 64 MiB in float32
FAISS_GPU_LIMIT = 2048  # FAISS refuses a larger k on a GPU


class ExactIndex:
    """All-pairs search over N vectors.

    A backend proposes the best candidates by its float32 scores; they are scored again in float64 and ranked by the
    score rounded to 1e-6, ties by lowest id. Where candidates just out of reach could still tie, more are fetched.
    So batch size, hardware and backend do not change the answer.

    Args:
        vectors: float ``(N, D)``, N at least 1; held as float32 on ``device``, not copied where they already are so.
        backend: ``"torch"``, or ``"faiss"`` (extra ``cpu`` or ``gpu``).
        device: where torch searches; FAISS uses its GPUs when this is a CUDA device.

    Raises:
        ValueError: when the vectors are not two-dimensional, none, or not finite, or the backend is unknown or lacks
            its package or a GPU.
    """

    def __init__(
        self,
        vectors: Tensor | NDArray[np.floating],
        backend: Literal["torch", "faiss"] = "torch",
        device: str | torch.device = "cpu",
    ) -> None:
        self.vectors = torch.as_tensor(vectors).detach().to(device, torch.float32)
        self.device = self.vectors.device
        if self.vectors.ndim != 2 or len(self.vectors) == 0:
            raise ValueError(f"an index needs vectors of shape (N, D), N at least 1; got {tuple(self.vectors.shape)}")
        norms = torch.cat([part.norm(dim=1) for part in self.vectors.split(CELLS // self.vectors.shape[1] + 1)])
        if not norms.isfinite().all():
            raise ValueError(f"{int((~norms.isfinite()).sum())} of {len(norms)} vectors are not finite")
        self._largest_norm = float(norms.max())
        if backend not in ("torch", "faiss"):
            raise ValueError(f"unknown backend {backend!r}: choose torch or faiss")
        self._faiss = faiss_index(self.vectors) if backend == "faiss" else None

    def __len__(self) -> int:
        return len(self.vectors)

    @torch.inference_mode()
    def search(
        self, queries: Tensor | NDArray[np.floating], k: int, exclude: Tensor | NDArray[np.int64] | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the ``k`` best vectors of each query.

        Args:
            queries: float ``(B, D)``.
            k: at least 1; may exceed N.
            exclude: ids that may not be returned, int64 ``(B, T)``, padded with -1.

        Returns:
            Ids int64 ``(B, k)`` and scores float32 ``(B, k)`` on the index's device, best first, -1 and -inf past the
            end.

        Raises:
            ValueError: when ``k`` is below 1, or a shape does not fit.
        """
        queries = torch.as_tensor(queries).detach().to(self.device, torch.float32)
        if k < 1:
            raise ValueError(f"k is {k}: ask for at least 1 passage")
        if queries.ndim != 2 or queries.shape[1] != self.vectors.shape[1]:
            raise ValueError(f"queries have shape {tuple(queries.shape)}: give (B, {self.vectors.shape[1]})")
        if not queries.isfinite().all():
            raise ValueError("some queries are not finite")
        if exclude is None:
            exclude = torch.full((len(queries), 1), -1)
        excluded = torch.as_tensor(exclude).to(self.device)
        if excluded.ndim != 2 or len(excluded) != len(queries):
            raise ValueError(f"exclude has shape {tuple(excluded.shape)}: give ({len(queries)}, T)")
        ids = torch.full((len(queries), k), -1, dtype=torch.int64, device=self.device)
        scores = torch.full((len(queries), k), -torch.inf, device=self.device)
        # float32 sums of D products err by less than this; rounding adds half a unit on either side.
        error = 1e-6 * queries.norm(dim=1) * self._largest_norm + 10.0**-SCORE_DECIMALS
        rows = torch.arange(len(queries), device=self.device)
        fetch = min(len(self), k + excluded.shape[1] + 8)
        while len(rows):
            unsure = []
            for part in rows.split(max(1, CELLS // max(fetch, 2**16))):
                found, rough = self._candidates(queries[part], fetch)
                exact = self._rescore(queries[part], found, excluded[part])
                kept = min(k, fetch)
                ids[part, :kept], scores[part, :kept] = rank_rounded(found, exact, kept)
                reachable = rough[:, -1] >= scores[part, -1] - 2 * error[part]
                unsure.append(part[reachable] if fetch < len(self) else part[:0])
            rows = torch.cat(unsure)
            fetch = min(len(self), 4 * fetch)
        return ids, scores

    def _candidates(self, queries: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Return the k best by float32 score, ids and scores ``(B, k)`` in descending order of score."""
        if self._faiss is not None and (self.device.type != "cuda" or k <= FAISS_GPU_LIMIT):
            rough, found = self._faiss.search(queries.cpu().numpy(), k)
            return torch.from_numpy(found).to(self.device), torch.from_numpy(rough).to(self.device)
        best_ids, best = None, None
        width = max(1, CELLS // len(queries))
        for start in range(0, len(self), width):
            part = queries @ self.vectors[start : start + width].T
            values, places = part.topk(min(k, part.shape[1]), dim=1)
            places += start
            if best is not None and best_ids is not None:
                values, order = torch.cat([best, values], dim=1).topk(min(k, best.shape[1] + values.shape[1]), dim=1)
                places = torch.cat([best_ids, places], dim=1).gather(1, order)
            best_ids, best = places, values
        assert best_ids is not None and best is not None
        return best_ids, best

    def _rescore(self, queries: Tensor, found: Tensor, excluded: Tensor) -> Tensor:
        """Return exact scores ``(B, C)``, -inf for excluded ids."""
        precise = torch.float32 if self.device.type == "mps" else torch.float64  # MPS has no float64
        width = max(1, CELLS // (len(queries) * queries.shape[1]))
        columns = [
            torch.einsum("bd,bcd->bc", queries.to(precise), self.vectors[part].to(precise))
            for part in found.split(width, dim=1)
        ]
        banned = torch.zeros_like(found, dtype=torch.bool)
        for column in excluded.T:
            banned |= found == column[:, None]
        return torch.cat(columns, dim=1).masked_fill(banned, -torch.inf)


def rank_rounded(ids: Tensor, scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the k best of each row, ids and float32 scores ``(B, k)``; ties after rounding to 1e-6 by lowest id."""
    ids, order = ids.sort(dim=1)
    rounded = scores.gather(1, order).round(decimals=SCORE_DECIMALS)
    rounded, order = rounded.sort(dim=1, descending=True, stable=True)
    ids, rounded = ids.gather(1, order)[:, :k], rounded[:, :k]
    return ids.masked_fill(rounded == -torch.inf, -1), rounded.float()


def faiss_index(vectors: Tensor) -> Any:
    """Return a flat inner-product FAISS index of the vectors, on all GPUs when they are on one.

    Raises:
        ValueError: when FAISS is not installed, or has no GPU where the vectors are on one.
    """
    try:
        faiss = import_module("faiss")
    except ModuleNotFoundError as error:
        raise ValueError(
            "backend='faiss' needs FAISS: pip install 'retrieval-gym[cpu]' or 'retrieval-gym[gpu]', or use 'torch'"
        ) from error
    index = faiss.IndexFlatIP(vectors.shape[1])
    if vectors.device.type == "cuda":
        if not hasattr(faiss, "get_num_gpus") or faiss.get_num_gpus() == 0:
            raise ValueError(
                "device='cuda' with backend='faiss' needs FAISS for GPUs: pip install 'retrieval-gym[gpu]'"
            )
        index = faiss.index_cpu_to_all_gpus(index)
    index.add(vectors.cpu().numpy())
    return index
