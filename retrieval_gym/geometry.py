"""Geometry of query embeddings: whether training kept the shape that the reference encoder gave them.

The PAO paper ("Learning from What You Retrieve", section 4.4) says that policy gradients against a frozen index scatter
the clusters of queries and raise their intra-class variance. It shows a t-SNE picture and gives no formula, number of
neighbours or projection that could be repeated: every definition here is ours.

Of N questions, x_i is the embedding of question i alone, u_i = x_i / |x_i| its direction and r_i its direction under
the reference encoder. Directions carry everything but ``norm``, since the length of a query changes no inner-product
ranking. Of the N' questions that are in one of C classes, c(i) is the class and m_c the mean of the directions in c.

- ``norm``: mean of |x_i|; 1 where the encoder normalises.
- ``intra_class_variance``: V = 1/N' sum_i |u_i - m_c(i)|^2.
- ``dispersion``: mean over pairs of classes of |m_a - m_b|^2, from 0 to 4; classes count alike, whatever their size.
- ``separation``: 1 - V/T with the total variance T = 1/N' sum_i |u_i - m|^2 around the mean m of all in classes, the
  share of the variance that lies between classes: 1 for points, 0 for classes that lie on each other.
- ``anisotropy``: mean cosine of two different questions, (|sum_i u_i|^2 - N) / (N (N - 1)); 1 is a single direction.
- ``effective_rank``: exp(-sum_j p_j log p_j), p_j = s_j / sum s, of the singular values s of the (N, D) matrix of
  directions, not centred (Roy and Vetterli 2007); 1 is a single line, min(N, D) the most.
- ``drift``: mean of 1 - <u_i, r_i>.
- ``passage_overlap``: mean share of the reference's k best passages that are among the trained retriever's k best, over
  the questions with more than k candidates (with k or fewer, every retriever returns them all).
- ``query_overlap``: the same of the k questions nearest by cosine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from retrieval_gym import mdp
from retrieval_gym.datasets.base import RetrievalDataset
from retrieval_gym.ranking import CELLS, Ids, Retriever, top_k

Floats = NDArray[np.float64]

CLUSTERS = 6  # the paper draws six categories of items
NEIGHBOURS = 10
PROJECTIONS = ("pca", "tsne")
_POINT = 1e-12  # a variance of directions below this is that of one point


@dataclass(frozen=True, eq=False)
class Classes:
    """Which questions belong together.

    Attributes:
        labels: class of each question, int64 ``(N,)``, from 0 for the largest class; -1 where it is in none.
        names: of the classes, for people.
        rule: how they were formed, for people.
    """

    labels: Ids
    names: tuple[str, ...]
    rule: str


def gold_classes(dataset: RetrievalDataset, questions: Ids) -> Classes:
    """Form a class of the questions that share a gold passage; copies of a passage count as one.

    A question goes with that gold passage of its own which is gold of most of ``questions`` (of equal ones, the lowest
    id). One that is alone with its passage is in no class.

    Args:
        dataset: what is asked.
        questions: indices of the questions, int64 ``(N,)``.
    """
    gold = dataset.gold[questions]
    shared = np.bincount(gold[gold >= 0], minlength=len(dataset.corpus))
    counts = np.where(gold >= 0, shared[gold], -1)
    most = counts == counts.max(axis=1, keepdims=True)
    passage = np.where(most, gold, len(dataset.corpus)).min(axis=1)
    found, labels, sizes = np.unique(passage, return_inverse=True, return_counts=True)
    labels, largest = _by_size(labels, sizes, smallest=2)
    names = tuple(dataset.corpus[int(i)].title or f"passage {dataset.corpus.keys[int(i)]}" for i in found[largest])
    rule = f"{len(names)} of questions that share a gold passage; {int((labels < 0).sum())} questions are in none"
    return Classes(labels, names, rule)


def kmeans_classes(vectors: NDArray[np.floating], clusters: int = CLUSTERS, seed: int = 0) -> Classes:
    """Form classes by k-means (scikit-learn, best of 10 starts) of the directions of embeddings.

    The reference encoder's own embeddings belong here. Since k-means makes their variance small, whatever moves them
    raises it, noise too.

    Args:
        vectors: float ``(N, D)``.
        clusters: how many.
        seed: of the starts.

    Raises:
        ValueError: when there are fewer than 2 clusters, or more than distinct embeddings.
        ImportError: when scikit-learn is not installed.
    """
    directions = _directions(vectors)
    distinct = len(np.unique(directions.round(6), axis=0))
    if not 2 <= clusters <= distinct:
        raise ValueError(f"{clusters} clusters of {distinct} distinct embeddings: choose from 2 to {distinct}")
    try:
        from sklearn.cluster import KMeans
    except ImportError as error:
        raise _needs_scikit_learn("k-means") from error
    found = KMeans(clusters, n_init=10, random_state=seed).fit_predict(directions)
    labels, _ = _by_size(found, np.bincount(found, minlength=clusters), smallest=1)
    names = tuple(f"cluster {i + 1}" for i in range(clusters))
    return Classes(labels, names, f"{clusters} k-means clusters of the reference embeddings, seed {seed}")


@dataclass(frozen=True, eq=False)
class Cloud:
    """The embeddings that one retriever gives N questions, and what it finds with them.

    Attributes:
        name: the retriever's.
        vectors: float64 ``(N, D)``.
        passages: its best passages for each question, corpus ids int64 ``(N, k)``, -1 past the end.

    Raises:
        ValueError: when a shape does not fit, or an embedding is not finite or has no length.
    """

    name: str
    vectors: Floats
    passages: Ids

    def __post_init__(self) -> None:
        """Check the arrays."""
        if self.vectors.ndim != 2 or self.passages.ndim != 2 or len(self.vectors) != len(self.passages):
            raise ValueError(
                f"{self.name}: embeddings have shape {self.vectors.shape} and passages {self.passages.shape}: give "
                "(N, D) and (N, k)"
            )
        lengths = np.linalg.norm(self.vectors, axis=1)
        bad = np.flatnonzero(~np.isfinite(lengths) | (lengths == 0))
        if len(bad):
            raise ValueError(
                f"{self.name}: the embedding of question {bad[0]} has length {lengths[bad[0]]}, as {len(bad)} of "
                f"{len(lengths)} have none that is finite and above 0: training has diverged, or the encoder is broken"
            )

    @cached_property
    def directions(self) -> Floats:
        """The embeddings at length 1, ``(N, D)``."""
        return _directions(self.vectors)


def embed_questions(
    name: str,
    retriever: Retriever,
    dataset: RetrievalDataset,
    questions: Ids,
    *,
    steps: int,
    k: int = NEIGHBOURS,
    batch_size: int = 256,
) -> Cloud:
    """Embed questions alone, before anything is picked, and search with them.

    Args:
        name: of the retriever.
        retriever: with ``encode_states(states)``, which returns a tensor or an array ``(B, D)``, beside ``search``.
        dataset: what is asked and picked.
        questions: indices of the questions, int64 ``(N,)``.
        steps: the budget that the states have.
        k: how many passages to search for.
        batch_size: how many questions at once.

    Raises:
        ValueError: when the retriever has no embeddings, or as ``Cloud`` does.
    """
    encode = getattr(retriever, "encode_states", None)
    if not callable(encode):
        raise ValueError(
            f"retriever {name} ({type(retriever).__name__}) has no encode_states(states), so there are no query "
            "embeddings to look at: name dense, dense:ENCODER, or the run:FOLDER of an agent that trains an encoder"
        )
    vectors, passages = [], []
    for start in range(0, len(questions), batch_size):
        states = mdp.dataset_states(dataset, questions[start : start + batch_size], steps)
        encoded: Any = encode(states)
        vectors.append(np.asarray(encoded.cpu() if hasattr(encoded, "cpu") else encoded, np.float64))
        passages.append(retriever.search(states, k)[0])
    return Cloud(name, np.concatenate(vectors), np.concatenate(passages))


def intra_class_distances(directions: Floats, labels: Ids) -> Floats:
    """Return |u_i - m_c(i)|^2 of each question that is in a class, float64 ``(N',)``; its mean is the variance.

    Args:
        directions: float64 ``(N, D)``.
        labels: class of each question, int64 ``(N,)``, -1 where it is in none.
    """
    classed = labels >= 0
    return _squares(directions[classed] - _centroids(directions, labels)[labels[classed]])


def dispersion(directions: Floats, labels: Ids) -> float | None:
    """Return the mean squared distance between the centroids of two classes; None where there are fewer than two."""
    centroids = _centroids(directions, labels)
    if len(centroids) < 2:
        return None
    # The mean over pairs of |a - b|^2 is 2 / (C - 1) times the sum of squared distances to the mean of the centroids.
    return float(2 * _squares(centroids - centroids.mean(axis=0)).sum() / (len(centroids) - 1))


def separation(directions: Floats, labels: Ids) -> float | None:
    """Return the share of the variance that lies between classes; None where there is no variance, or one class."""
    classed = directions[labels >= 0]
    if len(np.unique(labels[labels >= 0])) < 2:
        return None
    total = _squares(classed - classed.mean(axis=0)).mean()
    return None if total < _POINT else float(1 - intra_class_distances(directions, labels).mean() / total)


def anisotropy(directions: Floats) -> float:
    """Return the mean cosine of two different rows of directions ``(N, D)``, N at least 2."""
    size = len(directions)
    return float((_squares(directions.sum(axis=0)) - size) / (size * (size - 1)))


def effective_rank(directions: Floats) -> float:
    """Return exp of the entropy of the singular values' shares, from 1 to min(N, D) (Roy and Vetterli 2007)."""
    values = np.linalg.svd(directions, compute_uv=False)
    shares = values[values > 0] / values.sum()
    return float(np.exp(-(shares * np.log(shares)).sum()))


def nearest_rows(directions: Floats, k: int) -> Ids:
    """Return the k nearest other rows of each row by cosine, int64 ``(N, k)``; ties as in ``ranking.top_k``."""
    ids, size = np.arange(len(directions), dtype=np.int64), max(1, CELLS // len(directions))
    found = []
    for start in range(0, len(ids), size):
        part = ids[start : start + size]
        cosines = directions[part] @ directions.T
        cosines[np.arange(len(part)), part] = -np.inf
        found.append(top_k(cosines, ids, k)[0])
    return np.concatenate(found)


def overlap(reference: Ids, other: Ids) -> Floats:
    """Return the share of each row's reference ids that the other's row has too, float64 ``(N,)``.

    Args:
        reference: distinct ids, int64 ``(N, k)``, -1 past the end, at least one a row.
        other: the same of the other system.
    """
    there = reference >= 0
    both = (reference[:, :, None] == other[:, None, :]).any(axis=2) & there
    return both.sum(axis=1) / there.sum(axis=1)


def project(clouds: Sequence[Cloud], method: str = "pca", seed: int = 0) -> list[Floats]:
    """Map the directions of each cloud to the plane, so that the same place means the same thing in all.

    ``"pca"`` has the axes of the first cloud's two principal components and maps the others on them: a cloud that left
    these directions shrinks. ``"tsne"`` knows no such map, so it is fitted on all clouds together: it keeps who is near
    whom, while distances between groups and their sizes mean nothing (van der Maaten and Hinton 2008).

    Args:
        clouds: of N questions each, the reference first.
        method: one of ``PROJECTIONS``.
        seed: of t-SNE.

    Returns:
        float64 ``(N, 2)`` for each cloud.

    Raises:
        ValueError: when the method is unknown, or the first cloud is one point or has one dimension.
        ImportError: when scikit-learn is not installed.
    """
    if method not in PROJECTIONS:
        raise ValueError(f"unknown projection {method!r}: choose one of {', '.join(PROJECTIONS)}")
    first = clouds[0].directions
    if min(first.shape) < 2 or _squares(first - first.mean(axis=0)).mean() < _POINT:
        raise ValueError(f"{clouds[0].name}: embeddings {first.shape} that are one point or line cannot be drawn")
    try:
        from sklearn.decomposition import PCA
        from sklearn.manifold import TSNE
    except ImportError as error:
        raise _needs_scikit_learn("a projection") from error
    if method == "pca":
        pca = PCA(2, svd_solver="full").fit(first)
        return [pca.transform(cloud.directions) for cloud in clouds]
    points = np.concatenate([cloud.directions for cloud in clouds])
    perplexity = min(30.0, (len(points) - 1) / 3)
    placed = TSNE(2, perplexity=perplexity, init="pca", random_state=seed).fit_transform(points)
    return np.split(placed.astype(np.float64), len(clouds))


def _directions(vectors: NDArray[np.floating]) -> Floats:
    exact = np.asarray(vectors, np.float64)
    return exact / np.linalg.norm(exact, axis=1, keepdims=True)


def _squares(vectors: Floats) -> Floats:
    """Squared length along the last axis."""
    return (vectors**2).sum(axis=-1)


def _centroids(directions: Floats, labels: Ids) -> Floats:
    """Mean direction of each class, float64 ``(C, D)``."""
    classed = labels >= 0
    sums = np.zeros((labels.max(initial=-1) + 1, directions.shape[1]))
    np.add.at(sums, labels[classed], directions[classed])
    return sums / np.bincount(labels[classed], minlength=len(sums))[:, None]


def _by_size(labels: NDArray[np.integer], sizes: Ids, smallest: int) -> tuple[Ids, Ids]:
    """Number classes by descending size, equal ones as before, -1 for those below ``smallest``.

    Returns:
        The new labels int64 ``(N,)``, and the old label of each new one.
    """
    order = np.argsort(-sizes, kind="stable")
    kept = order[sizes[order] >= smallest]
    new = np.full(len(sizes), -1, np.int64)
    new[kept] = np.arange(len(kept))
    return new[labels], kept


def _needs_scikit_learn(what: str) -> ImportError:
    return ImportError(f"{what} needs scikit-learn: pip install 'retrieval-gym[plot]'")
