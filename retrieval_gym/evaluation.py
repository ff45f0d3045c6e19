"""The scorer: plays every question to the end of the budget and states the assumptions of each figure."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from retrieval_gym import ir_metrics, mdp, metrics, rewards
from retrieval_gym.ceilings import count_candidates, metric_ceilings
from retrieval_gym.chains import BEAMS, SEARCHES, Chains, final_ranking, stop_by_threshold
from retrieval_gym.datasets.base import RetrievalDataset
from retrieval_gym.files import write_text
from retrieval_gym.metrics import paired_bootstrap
from retrieval_gym.progress import Progress, Watched
from retrieval_gym.protocol import align, describe_questions, protocol_lines
from retrieval_gym.ranking import Retriever

Ids = NDArray[np.int64]
Floats = NDArray[np.float64]

__all__ = ["Evaluation", "evaluate", "paired_bootstrap", "sample_questions", "table"]

CONFIDENCE, SAMPLES, BOOTSTRAP_SEED = 0.95, 10_000, 0


@dataclass(frozen=True, eq=False)
class Evaluation:
    """What one retriever reached on N questions with one kind of search.

    Attributes:
        retriever: its name in tables, with the search in brackets where that is not greedy.
        search: ``"greedy"``, ``"single"`` or ``"beam"``.
        beams: how many chains of a question were kept at each step; 1 where ``search`` is not ``"beam"``.
        dataset: what was asked.
        chains: every pick and search.
        ranking: the final ranking, corpus ids int64 ``(N, K)``, as deep as ``ks`` and ``measures`` look.
        ks: the ranks at which rankings are scored, ascending.
        measures: names of further metrics of rankings, see ``ir_metrics``.
        threshold: of early stopping, or None.
        metrics: one float64 ``(N,)`` array a metric; those that begin with ``stopped_`` are after early stopping.
        ceilings: the largest value each metric can take on each question under this budget, ``(N,)``.
        batch_size: how many questions were searched at once.
        encoder_calls: how many states the retriever encoded, None where it does not count them.
        sample_seed: of the sample of questions, None where all or the caller's own were asked.
    """

    retriever: str
    search: str
    beams: int
    dataset: RetrievalDataset
    chains: Chains
    ranking: Ids
    ks: tuple[int, ...]
    measures: tuple[str, ...]
    threshold: float | None
    metrics: dict[str, Floats]
    ceilings: dict[str, Floats]
    batch_size: int
    encoder_calls: int | None
    sample_seed: int | None

    def mean(self, metric: str) -> float:
        """Return the mean of a metric over the questions.

        Raises:
            ValueError: when there is no such metric.
        """
        if metric not in self.metrics:
            raise ValueError(f"unknown metric {metric!r}: choose one of {', '.join(self.metrics)}")
        return float(self.metrics[metric].mean())

    @property
    def protocol(self) -> dict[str, Any]:
        """Every assumption behind the figures, JSON-able; two that differ in ``search`` alone can be compared."""
        early = None if self.threshold is None else f"before the first pick scored below {self.threshold:g}"
        return {
            **describe_questions(self.dataset, self.chains.questions, self.sample_seed),
            "steps": self.chains.picked.shape[1],
            "search": _describe_search(self.search, self.beams),
            "stopping": "the whole budget is spent, gold never stops a chain",
            "early_stopping": early,
            "ranking": "picked passages in pick order, then all others by their best score in any search",
            "ties": "lowest passage id after rounding scores to 1e-6",
            "ranks": list(self.ks),
            **({"measures": _describe_measures(self.measures)} if self.measures else {}),
            "exact_match": "support_em: set of picked = set of gold; all_gold_picked: every gold passage is picked",
            "episodic_return": "reward 'complete', undiscounted, over the whole budget",
            "intervals": f"{CONFIDENCE:.0%} percentile bootstrap over questions, {SAMPLES:,} resamples",
        }

    @cached_property
    def groups(self) -> dict[str, NDArray[np.bool_]]:
        """Rows of all questions and of each number of hops, bool ``(N,)``."""
        hops = self.dataset.hops[self.chains.questions]
        found = np.unique(hops)
        groups = {"all": np.ones(len(hops), bool)}
        return groups | ({str(n): hops == n for n in found} if len(found) > 1 else {})

    @cached_property
    def _summary(self) -> dict[str, dict[str, dict[str, float | int]]]:
        table: dict[str, dict[str, dict[str, float | int]]] = {}
        for name, values in self.metrics.items():
            table[name] = {}
            for group, rows in self.groups.items():
                mean, low, high = metrics.bootstrap_interval(
                    values[rows], confidence=CONFIDENCE, samples=SAMPLES, seed=BOOTSTRAP_SEED
                )
                cell: dict[str, float | int] = {"mean": mean, "low": low, "high": high, "questions": int(rows.sum())}
                if name in self.ceilings:
                    cell["ceiling"] = float(self.ceilings[name][rows].mean())
                table[name][group] = cell
        return table

    @property
    def cost(self) -> dict[str, float | int]:
        """Searches, encoder calls and time a question; the time is that of ``search`` alone at this batch size.

        A search is one state that is searched with, a call of the encoder one state that it encodes: equal states of a
        batch may share one. ``encoder_calls_per_question`` is there where the retriever counts ``encoder_calls``.
        """
        size = len(self.chains)
        cost: dict[str, float | int] = {"searches_per_question": int(self.chains.searches.sum()) / size}
        if self.encoder_calls is not None:
            cost["encoder_calls_per_question"] = self.encoder_calls / size
        cost |= {"milliseconds_per_question": 1000 * self.chains.seconds / size, "batch_size": self.batch_size}
        return cost

    def summary(self) -> dict[str, dict[str, dict[str, float | int]]]:
        """Return mean, 95% interval, ceiling and number of questions of each metric and group.

        Groups are ``"all"`` and, where questions differ in it, the number of hops, as text:
        ``summary()["recall@5"]["2"]["mean"]``.
        """
        return self._summary

    def to_json(self) -> dict[str, Any]:
        """Return retriever, protocol, metrics and cost as one dict that strict JSON can hold (no NaN)."""
        return {"retriever": self.retriever, "protocol": self.protocol, "metrics": self.summary(), "cost": self.cost}

    def save(self, path: str | Path) -> None:
        """Write ``to_json()`` to a file, whole or not at all."""
        write_text(path, json.dumps(self.to_json(), indent=2, allow_nan=False, ensure_ascii=False) + "\n")

    def records(self) -> Iterator[dict[str, Any]]:
        """Yield each question's chain as a JSON-able dict: its id, what was picked with which score, gold, found."""
        keys, canonical = self.dataset.corpus.keys, self.dataset.corpus.canonical
        kept = None if self.threshold is None else stop_by_threshold(self.chains, self.threshold)
        for row, i in enumerate(self.chains.questions):
            question = self.dataset.questions[i]
            picked = self.chains.picked[row][self.chains.picked[row] >= 0]
            gold = {int(canonical[g]) for g in question.gold}
            record: dict[str, Any] = {
                "retriever": self.retriever,
                "search": self.search,
                "id": question.id,
                "question": question.text,
                "hops": question.hops,
                "picked": [keys[p] for p in picked],
                "scores": [float(score) for score in self.chains.scores[row][: len(picked)]],
                "picked_is_gold": [int(canonical[p]) in gold for p in picked],
                "gold": [keys[g] for g in question.gold],
                "found": [keys[g] for g in question.gold if canonical[g] in canonical[picked]],
                "ranking": [keys[p] for p in self.ranking[row] if p >= 0],
            }
            if kept is not None:
                record["kept"] = int(kept[row])
            yield record


def sample_questions(dataset: RetrievalDataset, limit: int | None, seed: int = 0) -> Ids:
    """Return ``limit`` questions drawn at random without repetition, ascending; all of them when it is None or larger.

    Raises:
        ValueError: when ``limit`` is below 1.
    """
    if limit is not None and limit < 1:
        raise ValueError(f"limit is {limit}: ask at least 1 question")
    if limit is None or limit >= len(dataset):
        return np.arange(len(dataset))
    return np.sort(np.random.default_rng(seed).choice(len(dataset), limit, replace=False))


def evaluate(
    retriever: Retriever,
    dataset: RetrievalDataset,
    *,
    steps: int,
    ks: Sequence[int] = (2, 5, 10),
    measures: Sequence[str] = (),
    threshold: float | None = None,
    search: str = "greedy",
    beams: int = BEAMS,
    questions: Ids | None = None,
    limit: int | None = None,
    seed: int = 0,
    batch_size: int = 256,
    depth: int = 100,
    name: str | None = None,
    progress: str | None = None,
) -> Evaluation:
    """Score a retriever. Chains never stop on gold: each spends its whole budget.

    Args:
        retriever: who is scored.
        dataset: what is asked and picked.
        steps: the budget T, picks a question.
        ks: ranks at which the final ranking is scored.
        measures: adds metrics of the final ranking from ``ir_measures``, such as ``("nDCG@10", "R@20")``; see
            ``ir_metrics``.
        threshold: adds the metrics of chains that stop before the first pick scored below it.
        search: ``"greedy"``: T searches, each with the passages picked before; ``"single"``: one search with the
            question alone, whose first T passages are the picked set; ``"beam"``: see ``beam_chain``.
        beams: how many chains of a question ``"beam"`` keeps; the others keep one.
        questions: indices of the questions to ask, int64; all by default.
        limit: asks a random sample of this size instead.
        seed: of that sample.
        batch_size: how many questions are searched at once; the latency is measured at it.
        depth: how many passages each search returns, at least as many as ``ks`` and
            ``measures`` look at.
        name: in tables; the class's name by default. A search that is not greedy is added in brackets.
        progress: shows on stderr how many searches are done, under this name; None shows nothing.

    Raises:
        ValueError: when a number is out of range, ``search`` or a measure is unknown, ``questions`` and ``limit`` are
            both given, or the retriever breaks its contract.
        ImportError: when there are measures and ``ir_measures`` (extra ``ir``) is not installed.
    """
    if not ks or min(ks) < 1:
        raise ValueError(f"ks is {list(ks)}: give at least one rank, each from 1")
    mdp.check_max_steps(steps, "steps")
    if threshold is not None and not np.isfinite(threshold):
        raise ValueError(f"threshold is {threshold}: give a finite number, or None to spend the whole budget")
    if search not in SEARCHES:
        raise ValueError(f"unknown search {search!r}: choose one of {', '.join(SEARCHES)}")
    if questions is not None and limit is not None:
        raise ValueError("questions and limit are both given: choose one")
    sampled = limit is not None and limit < len(dataset)
    asked = sample_questions(dataset, limit, seed) if questions is None else np.asarray(questions, np.int64)
    if len(asked) and not (0 <= asked.min() and asked.max() < len(dataset)):
        raise ValueError(f"questions run from {asked.min()} to {asked.max()}: there are {len(dataset)}")
    ks, measures = tuple(sorted(set(ks))), tuple(dict.fromkeys(measures))
    places = max(ks[-1], ir_metrics.measured_depth(measures))
    play = partial(SEARCHES[search], beams=beams) if search == "beam" else SEARCHES[search]
    suffix = {"greedy": "", "single": " (single)", "beam": f" (beam {beams})"}[search]
    calls, kept = getattr(retriever, "encoder_calls", None), getattr(retriever, "kept_seconds", 0.0)
    searches = len(asked) * (1 if search == "single" else steps if search == "greedy" else 1 + beams * (steps - 1))
    with Progress(progress or "", searches, "searches", shown=progress is not None) as shown:
        player = Watched(retriever, shown)
        chains = play(player, dataset, asked, steps, batch_size=batch_size, depth=max(depth, places))
    seconds = chains.seconds + getattr(retriever, "kept_seconds", 0.0) - kept  # see ``KeptSearches``
    chains = replace(chains, seconds=seconds)
    ranking = final_ranking(chains, places)
    return Evaluation(
        retriever=(name or type(retriever).__name__) + suffix,
        search=search,
        beams=beams if search == "beam" else 1,
        dataset=dataset,
        chains=chains,
        ranking=ranking,
        ks=ks,
        measures=measures,
        threshold=threshold,
        metrics=_score(dataset, chains, ranking, ks, measures, threshold),
        ceilings=metric_ceilings(dataset, asked, steps, ks, stopped=threshold is not None)
        | _measured(measures, ir_metrics.ideal_ranking(dataset, asked, places), dataset, asked),
        batch_size=batch_size,
        encoder_calls=None if calls is None else int(retriever.encoder_calls - calls),  # type: ignore[attr-defined]
        sample_seed=seed if sampled else None,
    )


def _describe_search(search: str, beams: int) -> str:
    how = {
        "greedy": "each step searches with the state and picks the best passage",
        "single": "one search with the question alone, whose first passages are the picked ones",
        "beam": f"each step searches with the {beams} best chains so far, by the sum of their picks' scores; a set of "
        "passages is one chain in any order; the best chain's passages are the picked ones",
    }
    return f"{search}: {how[search]}"


def _describe_measures(measures: Sequence[str]) -> str:
    rule = "graded relevance; a later copy of a passage keeps its place and gains nothing"
    return f"{', '.join(measures)} by ir_measures, {rule}"


def _measured(measures: Sequence[str], ranking: Ids, dataset: RetrievalDataset, questions: Ids) -> dict[str, Floats]:
    """Return ``ir_metrics.score_measures``; nothing, and no need of the library, where there is no measure."""
    return ir_metrics.score_measures(measures, ranking, dataset, questions) if measures else {}


def _score(
    dataset: RetrievalDataset,
    chains: Chains,
    ranking: Ids,
    ks: tuple[int, ...],
    measures: Sequence[str],
    threshold: float | None,
) -> dict[str, Floats]:
    canonical, gold = dataset.corpus.canonical, dataset.gold[chains.questions]
    ranked = metrics.canonical_ids(ranking, canonical)
    picked = metrics.canonical_ids(chains.picked, canonical)
    values: dict[str, Floats] = {}
    for k in ks:
        values[f"complete@{k}"] = metrics.complete_at_k(ranked, gold, k)
        values[f"recall@{k}"] = metrics.recall_at_k(ranked, gold, k)
        values[f"any@{k}"] = metrics.any_at_k(ranked, gold, k)
    values |= _measured(measures, ranking, dataset, chains.questions)
    values |= _support(picked, gold)
    values["episodic_return"] = _returns(dataset, chains)

    if threshold is not None:
        kept = stop_by_threshold(chains, threshold)
        stopped = _support(np.where(np.arange(picked.shape[1]) < kept[:, None], picked, -1), gold)
        values |= {f"stopped_{name}": value for name, value in stopped.items()}
        values["stopped_picks"] = kept.astype(np.float64)
    return values


def _support(picked: Ids, gold: Ids) -> dict[str, Floats]:
    functions = (
        metrics.support_precision,
        metrics.support_recall,
        metrics.support_f1,
        metrics.support_em,
        metrics.all_gold_picked,
    )
    return {function.__name__: function(picked, gold) for function in functions}


def _returns(dataset: RetrievalDataset, chains: Chains) -> Floats:
    """Play the picks again under the reward ``complete``; float64 ``(N,)``."""
    states = mdp.initial_states(chains.questions, None, chains.picked.shape[1])
    total = np.zeros(len(chains))
    for picks in chains.picked.T:
        total += rewards.complete(states, picks, dataset)
        states = mdp.step(states, picks)
    return total


def table(evaluations: Evaluation | Sequence[Evaluation]) -> str:
    """Return a plain-text table of one or several retrievers and searches, assumptions above it, costs below.

    Raises:
        ValueError: when there is none, or they differ in more than retriever and search.
    """
    evaluations = [evaluations] if isinstance(evaluations, Evaluation) else list(evaluations)
    if not evaluations:
        raise ValueError("there is no evaluation to show: pass at least one")
    first = evaluations[0]
    for other in evaluations[1:]:
        same = {**other.protocol, "search": None} == {**first.protocol, "search": None}
        if not same or not np.array_equal(other.chains.questions, first.chains.questions):
            raise ValueError(
                f"{first.retriever} and {other.retriever} were not scored alike: one table cannot hold both"
            )
    ceiling = any(cell.get("ceiling", 1) < 1 for groups in first.summary().values() for cell in groups.values())
    rows = [["metric", "hops", "questions", *(e.retriever for e in evaluations), *(["ceiling"] if ceiling else [])]]
    for name, groups in first.summary().items():
        for group, cell in groups.items():
            cells = [e.summary()[name][group] for e in evaluations]
            row = [name if group == "all" else "", group, str(cell["questions"])]
            row += [f"{c['mean']:.3f} [{c['low']:.3f}, {c['high']:.3f}]" for c in cells]
            if ceiling:
                row.append(f"{cell['ceiling']:.3f}" if cell.get("ceiling", 1) < 1 else "")
            rows.append(row)
    return "\n".join([*_heading(evaluations), "", *align(rows), "", *align(_costs(evaluations))])


def _heading(evaluations: list[Evaluation]) -> list[str]:
    """State what the evaluations of one table assume, a line each."""
    first = evaluations[0]
    searches = list(dict.fromkeys(e.protocol["search"] for e in evaluations))
    lines = []
    for key, value in first.protocol.items():
        for item in searches if key == "search" else [value]:
            lines += protocol_lines({key: item})
    sizes = count_candidates(first.dataset, first.chains.questions)
    full = [k for k in first.ks if k >= sizes.max()]
    if full:
        lines.append(
            f"note: {full[0]} places hold every candidate (at most {sizes.max()}), so @{full[0]} says nothing here"
        )
    return lines


def _costs(evaluations: list[Evaluation]) -> list[list[str]]:
    rows = [["cost a question", "searches", "encoder calls", "milliseconds", "questions at once"]]
    for e in evaluations:
        searches, calls = e.cost["searches_per_question"], e.cost.get("encoder_calls_per_question")
        milliseconds = f"{e.cost['milliseconds_per_question']:.2f}"
        counted = "" if calls is None else f"{calls:.4g}"
        rows.append([e.retriever, f"{searches:.4g}", counted, milliseconds, str(e.batch_size)])
    return rows
