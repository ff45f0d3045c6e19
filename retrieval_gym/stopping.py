"""When a chain should stop: a threshold on the score of the best candidate, chosen on some questions for others.

Q-RAG stops a chain when max Q falls below a threshold (its early stopping, figure 4 and tables 5 and 6). How the paper
draws its states and chooses the threshold is not told; the rules here are ours, and ``StoppingReport.protocol`` states
them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from retrieval_gym import mdp, metrics
from retrieval_gym.chains import Chains, greedy_chain, stop_by_threshold
from retrieval_gym.datasets.base import RetrievalDataset
from retrieval_gym.evaluation import BOOTSTRAP_SEED, CONFIDENCE, SAMPLES
from retrieval_gym.metrics import bootstrap_interval, paired_bootstrap
from retrieval_gym.protocol import align, describe_questions, protocol_lines
from retrieval_gym.ranking import Retriever, round_scores

Ids = NDArray[np.int64]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

MEASURES = (
    metrics.support_f1,
    metrics.support_precision,
    metrics.support_recall,
    metrics.support_em,
    metrics.all_gold_picked,
)
PICKS = "picks"
CURVE = ("support_f1", PICKS)
POINTS = 61  # thresholds of a curve
_CHUNK = 2**22  # numbers held at once by the bootstrap: 32 MB


@dataclass(frozen=True, eq=False)
class Scored:
    """N chains of T picks and the score of the best candidate in each of their T + 1 states.

    Attributes:
        dataset: what was asked and picked.
        chains: the chains.
        best: max Q after 0 to T picks, float32 ``(N, T + 1)``; -inf where no candidate was left.
    """

    dataset: RetrievalDataset
    chains: Chains
    best: NDArray[np.float32]

    @cached_property
    def complete(self) -> Bools:
        """Whether every gold passage is picked after 0 to T picks, bool ``(N, T + 1)``."""
        return self._by_picks(metrics.all_gold_picked) > 0

    @cached_property
    def by_picks(self) -> dict[str, Floats]:
        """Each measure of the first n picks, n from 0 to T, float64 ``(N, T + 1)``; and n itself, as ``"picks"``."""
        values = {measure.__name__: self._by_picks(measure) for measure in MEASURES}
        return values | {PICKS: np.broadcast_to(np.arange(self.best.shape[1], dtype=np.float64), self.best.shape)}

    def _by_picks(self, measure: Any) -> Floats:
        picked = metrics.canonical_ids(self.chains.picked, self.dataset.corpus.canonical)
        gold, places = self.dataset.gold[self.chains.questions], np.arange(picked.shape[1])
        columns = [measure(np.where(places < n, picked, -1), gold) for n in range(picked.shape[1] + 1)]
        return np.stack(columns, axis=1)

    def stopped(self, threshold: float) -> dict[str, Floats]:
        """Return each measure, and the number of picks, of every chain stopped by ``threshold``, float64 ``(N,)``."""
        return self.at(stop_by_threshold(self.chains, threshold))

    def at(self, picks: Ids) -> dict[str, Floats]:
        """Return each measure of the first ``picks`` passages of every chain, int64 ``(N,)`` to float64 ``(N,)``."""
        return {name: np.take_along_axis(v, picks[:, None], axis=1)[:, 0] for name, v in self.by_picks.items()}


def score_states(
    retriever: Retriever, dataset: RetrievalDataset, questions: Ids, steps: int, *, batch_size: int = 256
) -> Scored:
    """Play greedy chains of ``steps`` picks and ask once more, so that the state after the last pick has a score too.

    It is the chain of ``steps + 1`` searches without its last pick, so a retriever is told of one step more than is
    picked; the package's own retrievers do not look at ``steps_left``.

    Args:
        retriever: who is asked.
        dataset: what is asked and picked.
        questions: indices of the questions, int64 ``(N,)``.
        steps: the budget T.
        batch_size: how many questions are searched at once.

    Raises:
        ValueError: when there is no question, a number is out of range, or the retriever breaks its contract.
    """
    steps = mdp.check_max_steps(steps, "steps")
    longer = greedy_chain(retriever, dataset, questions, steps + 1, batch_size=batch_size, depth=1)
    chains = replace(
        longer,
        picked=longer.picked[:, :steps],
        scores=longer.scores[:, :steps],
        step_ids=longer.step_ids[:, :steps],
        step_scores=longer.step_scores[:, :steps],
        searches=np.full(len(longer), steps, np.int64),
    )
    return Scored(dataset, chains, longer.scores)


def choose_threshold(scored: Scored) -> float:
    """Return the threshold with the highest mean support F1; of equally good ones that of the fewest picks.

    Thresholds half way between two neighbouring scores are tried, and one below and one above all of them: every way
    of stopping these chains that a threshold can bring about.

    Raises:
        ValueError: when no chain has picked anything.
    """
    candidates = _between(scored.chains.scores)
    values = [scored.stopped(threshold) for threshold in candidates]
    f1 = np.array([value["support_f1"].mean() for value in values])
    picks = np.array([value[PICKS].mean() for value in values])
    best = np.flatnonzero(f1 >= f1.max() - 1e-12)
    return float(candidates[best[picks[best].argmin()]])


def _between(scores: NDArray[np.floating]) -> Floats:
    """Numbers between the distinct finite scores, ascending, and one beyond either end; rounded to 1e-7."""
    distinct = np.unique(round_scores(scores[np.isfinite(scores)]))
    if not len(distinct):
        raise ValueError("no chain has picked a passage: there is no score to stop by")
    middle = (distinct[1:] + distinct[:-1]) / 2
    margin = 1e-3 * max(1.0, float(np.abs(distinct).max()))
    return np.round(np.concatenate([[distinct[0] - margin], middle, [distinct[-1] + margin]]), 7)


def rank_auc(positive: Floats, negative: Floats) -> float | None:
    """ROC AUC: how often a positive has the higher score than a negative, ties counted half; None without either.

    Equal to the Mann-Whitney U statistic over the number of pairs (Hanley and McNeil 1982).
    """
    if not len(positive) or not len(negative):
        return None
    ordered = np.sort(negative)
    below, up_to = np.searchsorted(ordered, positive, "left"), np.searchsorted(ordered, positive, "right")
    return float((below + up_to).mean() / 2 / len(negative))


def completion_auc(
    scored: Scored, picks: int | None = None, *, samples: int = SAMPLES, seed: int = BOOTSTRAP_SEED
) -> dict[str, float | int | None]:
    """Return the ROC AUC of a low max Q as the sign that every gold passage is found, with its 95% interval.

    Every state of the chains counts, after the last gold passage too, but for those with nothing left to pick, where
    there is no max Q. States of one question depend on each other, so the bootstrap draws whole questions.

    Args:
        scored: the chains.
        picks: only the states after so many picks; None is all.
        samples: number of resamples; those that hold one kind of state alone do not count.
        seed: of the resampling.

    Returns:
        ``auc``, ``low`` and ``high``, None where all states are of one kind; ``states``, ``complete``: how many.
    """
    columns = slice(None) if picks is None else slice(picks, picks + 1)
    best, complete = scored.best[:, columns], scored.complete[:, columns]
    rows, places = np.nonzero(np.isfinite(best))
    score, label = -round_scores(best[rows, places]), complete[rows, places]
    auc = rank_auc(score[label], score[~label])
    result: dict[str, float | int | None] = {"auc": auc, "low": None, "high": None}
    if auc is not None:
        low, high = _auc_interval(score, label, rows, len(best), samples, seed)
        result |= {"low": low, "high": high}
    return result | {"states": len(score), "complete": int(label.sum())}


def _auc_interval(
    score: Floats, label: Bools, question: Ids, questions: int, samples: int, seed: int
) -> tuple[float, float]:
    """Percentile interval of the AUC over resampled questions; a resample weighs each state by its question's draws."""
    order = np.argsort(score, kind="stable")
    score, label, question = score[order], label[order], question[order]
    first = np.flatnonzero(np.concatenate([[True], score[1:] != score[:-1]]))  # of each distinct score
    rng, size, values = np.random.default_rng(seed), max(1, _CHUNK // len(score)), []
    for start in range(0, samples, size):
        count = min(size, samples - start)
        weight = rng.multinomial(questions, np.full(questions, 1 / questions), size=count)[:, question].astype(float)
        positive = np.add.reduceat(weight * label, first, axis=1)
        negative = np.add.reduceat(weight * ~label, first, axis=1)
        below = np.cumsum(negative, axis=1) - negative / 2
        pairs = positive.sum(axis=1) * negative.sum(axis=1)
        values.append((positive * below).sum(axis=1)[pairs > 0] / pairs[pairs > 0])
    low, high = np.quantile(np.concatenate(values), [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return float(low), float(high)


@dataclass(frozen=True, eq=False)
class Stopping:
    """One retriever: a threshold chosen on some questions, and what it does to the chains of others.

    Attributes:
        name: of the retriever.
        chosen_on: the chains that the threshold is chosen on.
        reported: the chains that it is reported on.
    """

    name: str
    chosen_on: Scored
    reported: Scored

    @cached_property
    def threshold(self) -> float:
        """The threshold; see ``choose_threshold``."""
        return choose_threshold(self.chosen_on)

    @cached_property
    def auc(self) -> dict[str, dict[str, float | int | None]]:
        """``completion_auc`` of the reported chains, of all states and by the number of picks before them."""
        steps = self.reported.chains.picked.shape[1]
        return {"all": completion_auc(self.reported)} | {
            str(n): completion_auc(self.reported, n) for n in range(1, steps + 1)
        }

    @cached_property
    def measures(self) -> dict[str, dict[str, dict[str, float]]]:
        """Each measure, and the number of picks, of the reported chains with intervals over questions.

        ``"budget"`` spends all picks, ``"stopped"`` stops by the threshold, ``"difference"`` is stopped less budget,
        question by question; ``"hindsight"`` stops each chain where its F1 is highest, which no rule can beat.
        """
        scored = self.reported
        size, steps = scored.chains.picked.shape
        ways = {
            "budget": scored.at(np.full(size, steps)),
            "stopped": scored.stopped(self.threshold),
            "hindsight": scored.at(scored.by_picks["support_f1"].argmax(axis=1)),
        }
        table: dict[str, dict[str, dict[str, float]]] = {}
        for name in scored.by_picks:
            table[name] = {way: _interval(values[name]) for way, values in ways.items()}
            mean, low, high, p = paired_bootstrap(ways["budget"][name], ways["stopped"][name])
            table[name]["difference"] = {"mean": mean, "low": low, "high": high, "p": p}
        return table

    @cached_property
    def curve(self) -> list[dict[str, Any]]:
        """Mean F1 and picks of the reported chains, with intervals, at thresholds ascending.

        The thresholds are quantiles of the scores of the chains that the threshold is chosen on, and the threshold.
        """
        candidates = _between(self.chosen_on.chains.scores)
        places = np.unique(np.linspace(0, len(candidates) - 1, POINTS).round().astype(int))
        points = []
        for threshold in np.unique([*candidates[places], self.threshold]):
            values = self.reported.stopped(threshold)
            points.append({"threshold": float(threshold), **{name: _interval(values[name]) for name in CURVE}})
        return points

    def to_json(self) -> dict[str, Any]:
        """Return every figure as values that strict JSON can hold."""
        return {
            "retriever": self.name,
            "threshold": self.threshold,
            "auc": self.auc,
            "measures": self.measures,
            "curve": self.curve,
        }


def _interval(values: Floats) -> dict[str, float]:
    mean, low, high = bootstrap_interval(values, confidence=CONFIDENCE, samples=SAMPLES, seed=BOOTSTRAP_SEED)
    return {"mean": mean, "low": low, "high": high}


@dataclass(frozen=True, eq=False)
class StoppingReport:
    """Early stopping of one or several retrievers on the same questions.

    Attributes:
        systems: at least one, all asked the same.
        choice: how the questions that thresholds are chosen on were taken, for people.
        sample_seed: of the random sample that the questions are, None where all were asked.

    Raises:
        ValueError: when there is no system, they were asked differently, or a question is both chosen and reported on.
    """

    systems: Sequence[Stopping]
    choice: str
    sample_seed: int | None = None

    def __post_init__(self) -> None:
        """Check that systems can be compared and that no threshold is reported where it was chosen."""
        if not self.systems:
            raise ValueError("there is no retriever to report: give at least one")
        first = self.systems[0]
        for system in self.systems:
            for ours, theirs in ((system.chosen_on, first.chosen_on), (system.reported, first.reported)):
                if ours.dataset is not theirs.dataset or not np.array_equal(
                    ours.chains.questions, theirs.chains.questions
                ):
                    raise ValueError(f"{first.name} and {system.name} were not asked the same questions")
        refuse_shared(first.chosen_on, first.reported)

    @property
    def protocol(self) -> dict[str, Any]:
        """Every assumption behind the figures, JSON-able."""
        reported = self.systems[0].reported
        return {
            **describe_questions(reported.dataset, reported.chains.questions, None),
            "chosen_on": self.choice,
            **({} if self.sample_seed is None else {"sample": f"drawn at random with seed {self.sample_seed}"}),
            "steps": reported.chains.picked.shape[1],
            "search": "greedy: each step searches with the state and picks the best passage",
            "stopping": "before the first pick scored below the threshold, as evaluate --threshold; gold never stops",
            "threshold": "the highest mean support F1 on the questions chosen on; of equal ones the fewest picks",
            "auc": "a low score of the best candidate as the sign that all gold is picked, over all states after 0 to "
            f"{reported.chains.picked.shape[1]} picks that have a candidate left, ties counted half",
            "hindsight": "each chain stopped where its F1 is highest",
            "intervals": f"{CONFIDENCE:.0%} percentile bootstrap over questions, {SAMPLES:,} resamples",
        }

    def to_json(self) -> dict[str, Any]:
        """Return protocol and figures as one dict that strict JSON can hold."""
        return {"protocol": self.protocol, "systems": [system.to_json() for system in self.systems]}

    def table(self) -> str:
        """Return plain-text tables with the assumptions above them."""
        rows = [["retriever", "threshold", "measure", "whole budget", "stopped", "difference", "hindsight"]]
        for system in self.systems:
            head = [system.name, f"{system.threshold:.7g}"]
            for name, ways in system.measures.items():
                cells = [_text(ways[way]) for way in ("budget", "stopped")]
                rows.append([*head, name, *cells, _text(ways["difference"], "+"), f"{ways['hindsight']['mean']:.3f}"])
                head = ["", ""]
        heads = [*self.systems[0].auc]
        titles = ["all states" if head == "all" else f"after {head}" for head in heads]
        scores = [["ROC AUC of a low max Q for all gold picked", *titles]]
        for system in self.systems:
            scores.append([system.name, *(_text(system.auc[head], mean="auc") for head in heads)])
        return "\n".join([*protocol_lines(self.protocol), "", *align(rows), "", *align(scores)])


def _text(cell: Mapping[str, Any], sign: str = "", mean: str = "mean") -> str:
    if cell[mean] is None:
        return "-"
    return f"{cell[mean]:{sign}.3f} [{cell['low']:{sign}.3f}, {cell['high']:{sign}.3f}]"


def refuse_shared(chosen_on: Scored, reported: Scored) -> None:
    """Raise ValueError when a question is among those that a threshold is chosen on and those it is reported on."""
    known = {(q.id, q.text) for q in (chosen_on.dataset.questions[i] for i in chosen_on.chains.questions)}
    asked = [reported.dataset.questions[i] for i in reported.chains.questions]
    shared = [question.id for question in asked if (question.id, question.text) in known]
    if shared:
        raise ValueError(
            f"{len(shared)} of the {len(asked)} questions reported, {shared[0]!r} say, are those that the threshold is "
            "chosen on: choose it on others"
        )
