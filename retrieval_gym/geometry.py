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
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from retrieval_gym import mdp
from retrieval_gym.ceilings import count_candidates
from retrieval_gym.datasets.base import RetrievalDataset
from retrieval_gym.evaluation import CONFIDENCE, SAMPLES
from retrieval_gym.mismatch import Estimate, estimate
from retrieval_gym.protocol import align, describe_questions, protocol_lines
from retrieval_gym.ranking import CELLS, Ids, Retriever, top_k

Floats = NDArray[np.float64]
Figure: TypeAlias = "Estimate | float | None"

CLUSTERS = 6  # the paper draws six categories of items
NEIGHBOURS = 10
PROJECTIONS = ("pca", "tsne")
LABELS = {
    "norm": "norm",
    "intra_class_variance": "intra-class variance",
    "intra_class_variance_difference": "minus {}'s",
    "dispersion": "cluster dispersion",
    "separation": "separation",
    "anisotropy": "anisotropy",
    "effective_rank": "effective rank",
    "drift": "drift from {}",
    "passage_overlap": "passage overlap with {}",
    "query_overlap": "query overlap with {}",
}
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


@dataclass(frozen=True, eq=False)
class GeometryReport:
    """The geometry of one or several encoders' query embeddings; see the module for every definition.

    Attributes:
        dataset: what is asked and picked.
        questions: indices of the questions, int64 ``(N,)``, N at least 3.
        clouds: one for each system, the reference first.
        classes: of the questions.
        sample_seed: of the sample of questions, None where all or the caller's own were asked.

    Raises:
        ValueError: when there are fewer than 3 questions, or clouds differ in shape or fit the classes badly.
    """

    dataset: RetrievalDataset
    questions: Ids
    clouds: tuple[Cloud, ...]
    classes: Classes
    sample_seed: int | None = None

    def __post_init__(self) -> None:
        """Check that everything is about the same questions."""
        size, first = len(self.questions), self.clouds[0]
        if size < 3:
            raise ValueError(f"{size} questions make no cloud: ask at least 3")
        labels, classes = self.classes.labels, len(self.classes.names)
        if labels.shape != (size,) or set(labels.tolist()) - {-1} != set(range(classes)):
            raise ValueError(
                f"labels {labels.shape} of {classes} classes: give each of {size} questions one from 0 to "
                f"{classes - 1} or -1, and every class a question"
            )
        for cloud in self.clouds:
            if cloud.vectors.shape != (size, first.vectors.shape[1]):
                raise ValueError(
                    f"{cloud.name} has embeddings {cloud.vectors.shape} and the reference {first.name} "
                    f"{first.vectors.shape} of {size} questions: compare encoders with one dimension on the same ones"
                )
            if cloud.passages.shape != first.passages.shape:
                raise ValueError(
                    f"{cloud.name} has {cloud.passages.shape[1]} passages a question and the reference {first.name} "
                    f"{first.passages.shape[1]}: search for as many"
                )

    @property
    def reference(self) -> Cloud:
        """What the others are compared with."""
        return self.clouds[0]

    @property
    def neighbours(self) -> tuple[int, int]:
        """How many passages and how many questions are a neighbourhood."""
        k = self.reference.passages.shape[1]
        return k, min(k, len(self.questions) - 1)

    @cached_property
    def figures(self) -> dict[str, dict[str, Figure]]:
        """System, measure: an estimate where it is a mean over questions, else a number; None where it is undefined.

        The reference has no figure that compares it with itself.
        """
        return {cloud.name: self._figures(cloud) for cloud in self.clouds}

    def _figures(self, cloud: Cloud) -> dict[str, Figure]:
        directions, labels, reference = cloud.directions, self.classes.labels, self.reference
        asked, classed = self.questions, self.questions[labels >= 0]
        distances = intra_class_distances(directions, labels)
        figures: dict[str, Figure] = {
            "norm": estimate(np.linalg.norm(cloud.vectors, axis=1), asked),
            "intra_class_variance": estimate(distances, classed),
            "dispersion": dispersion(directions, labels),
            "separation": separation(directions, labels),
            "anisotropy": anisotropy(directions),
            "effective_rank": effective_rank(directions),
        }
        if cloud is reference:
            return figures
        before = intra_class_distances(reference.directions, labels)
        passages, questions = self.neighbours
        many = count_candidates(self.dataset, asked) > passages
        near = nearest_rows(reference.directions, questions), nearest_rows(directions, questions)
        return figures | {
            "intra_class_variance_difference": estimate(distances - before, classed),
            "drift": estimate(1 - (directions * reference.directions).sum(axis=1), asked),
            "passage_overlap": estimate(overlap(reference.passages[many], cloud.passages[many]), asked[many]),
            "query_overlap": estimate(overlap(*near), asked),
        }

    @property
    def protocol(self) -> dict[str, Any]:
        """Every assumption behind the figures, JSON-able."""
        passages, questions = self.neighbours
        return describe_questions(self.dataset, self.questions, self.sample_seed) | {
            "embeddings": f"of the questions alone, {self.reference.vectors.shape[1]} dimensions, at length 1 but for "
            "the norm",
            "reference": self.reference.name,
            "classes": self.classes.rule,
            "neighbourhoods": f"the {passages} best passages by the system's own search, of the questions with more "
            f"candidates, and the {questions} nearest questions by cosine; ties by lowest id after rounding to 1e-6",
            "intervals": f"{CONFIDENCE:.0%} percentile bootstrap over questions, {SAMPLES:,} resamples, centroids and "
            "neighbourhoods kept; differences are paired by question",
        }

    def to_json(self) -> dict[str, Any]:
        """Return protocol and figures as one dict that strict JSON can hold."""
        systems = [
            {"name": name} | {key: asdict(f) if isinstance(f, Estimate) else f for key, f in figures.items()}
            for name, figures in self.figures.items()
        ]
        return {"protocol": self.protocol, "class_names": list(self.classes.names), "systems": systems}

    def table(self) -> str:
        """Return a plain-text table with the assumptions above it."""
        rows = [["measure", *self.figures]]
        for key, label in LABELS.items():
            if any(key in figures for figures in self.figures.values()):
                sign = "+" if key.endswith("difference") else ""
                cells = [_text(figures[key], sign) if key in figures else "" for figures in self.figures.values()]
                rows.append([label.format(self.reference.name), *cells])
        lead = "Mean [interval] number of questions; figures without an interval are of the whole cloud"
        return "\n".join([*protocol_lines(self.protocol), "", lead, "", *align(rows)])


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


def _text(figure: Figure, sign: str) -> str:
    if isinstance(figure, Estimate):
        return figure.text(sign)
    return "-" if figure is None else f"{figure:.3f}"


def _needs_scikit_learn(what: str) -> ImportError:
    return ImportError(f"{what} needs scikit-learn: pip install 'retrieval-gym[plot]'")
