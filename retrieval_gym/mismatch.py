"""The state-mismatch report: figures by step, number of wrong passages and hops, with intervals over questions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from retrieval_gym.datasets.base import RetrievalDataset
from retrieval_gym.diagnostics import Asked, Bools, Reached, StateSet
from retrieval_gym.evaluation import BOOTSTRAP_SEED, CONFIDENCE, SAMPLES
from retrieval_gym.protocol import align, describe_questions, protocol_lines
from retrieval_gym.ranking import Ids

WRONG = ("all", "0", "1", "2+")  # groups of states by number of wrong passages
DELETION = {
    "before": "success as it is",
    "after": "wrong ones deleted",
    "gain": "gain by deletion",
    "gain_difference": "gain, minus {}'s",
    "after_free": "deleted, free to be picked",
}
_CHUNK = 2**22  # numbers drawn at once by the bootstrap: 32 MB


@dataclass(frozen=True)
class Estimate:
    """A mean over states with its interval over questions; None where there is no state."""

    mean: float | None
    low: float | None
    high: float | None
    states: int
    questions: int

    def text(self, sign: str = "") -> str:
        """Return mean, interval and number of states for a table; ``sign`` is ``"+"`` for differences."""
        if self.mean is None:
            return "-"
        return f"{self.mean:{sign}.3f} [{self.low:{sign}.3f}, {self.high:{sign}.3f}] {self.states}"


ByHops: TypeAlias = "dict[str, Estimate]"
Cells: TypeAlias = "dict[str, dict[str, ByHops]]"  # measure; step, number of wrong passages or kind of deletion; hops


def estimate(values: NDArray, questions: Ids) -> Estimate:
    """Return the mean over states and its percentile bootstrap interval over questions.

    States of one question depend on each other, so whole questions are drawn with replacement (the cluster bootstrap:
    Davison and Hinkley 1997, section 3.8), from those that have a state here.

    Args:
        values: one finite number a state, ``(N,)``.
        questions: the question of each state, int64 ``(N,)``.
    """
    if len(values) == 0:
        return Estimate(None, None, None, 0, 0)
    _, owners = np.unique(questions, return_inverse=True)
    sums, counts = np.bincount(owners, np.asarray(values, np.float64)), np.bincount(owners)
    # Few questions differ in both sum and number of states, so a resample is told by how often it draws each pair.
    pairs, frequency = np.unique(np.stack([sums, counts], axis=1), axis=0, return_counts=True)
    rng, size = np.random.default_rng(BOOTSTRAP_SEED), max(1, _CHUNK // len(pairs))
    means = []
    for start in range(0, SAMPLES, size):
        drawn = rng.multinomial(len(sums), frequency / len(sums), size=min(size, SAMPLES - start)) @ pairs
        means.append(drawn[:, 0] / drawn[:, 1])
    low, high = np.quantile(np.concatenate(means), [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return Estimate(float(np.mean(values)), float(low), float(high), len(values), len(sums))


@dataclass(frozen=True, eq=False)
class MismatchReport:
    """The state mismatch of one or several systems, on their own chains and on one fixed set of states.

    Attributes:
        dataset: what was asked and picked.
        reached: each system's own chains, at least one.
        source: name of the system that reached the fixed states.
        fixed: the states that every one of ``asked`` was asked about.
        asked: what each did there, at least one; the first of them that is no log is what the others are compared with.
        sample_seed: of the sample of questions, None where all or the caller's own were asked.
    """

    dataset: RetrievalDataset
    reached: tuple[Reached, ...]
    source: str
    fixed: StateSet
    asked: tuple[Asked, ...]
    sample_seed: int | None = None

    @property
    def protocol(self) -> dict[str, Any]:
        """Every assumption behind the figures, JSON-able."""
        shapes = {own.name: own.walk.picked.shape for own in self.reached}
        several = ", ".join(f"{name} up to {shape[2]}" for name, shape in shapes.items() if shape[2] > 1)
        states, questions = len(self.fixed), len(np.unique(self.fixed.states.question))
        return describe_questions(self.dataset, self._questions, self.sample_seed) | {
            "steps": {name: shape[1] for name, shape in shapes.items()},
            "several_passages_a_step": f"{several}; a success is one of them" if several else None,
            "states": "those before each step taken that still miss a gold passage; gold never stops a chain, and a "
            "logged one takes the steps of its log",
            "wrong_passage": "a picked one that is neither gold nor a text-identical copy of gold",
            "success": "the next pick is a missing gold passage or a copy of one",
            "deletion": "the wrong passages leave the query, all else stays, and the same retriever picks again, with "
            "them out of the candidates too; in the last row they are candidates, and picking one is no success",
            "same_states": f"{states} distinct states of {questions} questions, reached by {self.source}",
            "ties": "lowest passage id after rounding scores to 1e-6",
            "intervals": f"{CONFIDENCE:.0%} percentile bootstrap, {SAMPLES:,} resamples of the questions that have "
            "such a state, each with all its states; differences are paired by state",
        }

    @cached_property
    def own_cells(self) -> dict[str, Cells]:
        """Figures of each system on its own chains: system, measure, group of states, hops.

        ``holds_wrong`` is the share of states that hold a wrong passage and ``wrong_passages`` their mean number, by
        step from 2; ``success`` is that of the next step by number of wrong passages.
        """
        return {own.name: self._own(own) for own in self.reached}

    @cached_property
    def same_cells(self) -> dict[str, Cells]:
        """Figures of each system on the fixed states: system, measure, group of states, hops.

        ``success`` and its ``difference`` to that of ``base`` are by number of wrong passages; ``deletion`` holds, of
        the states with wrong passages, the success ``before`` and ``after`` they are deleted, the ``gain`` and its
        ``gain_difference`` to that of ``base``, and success ``after_free``, where what was deleted may be picked again.
        """
        return {asked.name: self._same(asked) for asked in self.asked}

    def _own(self, own: Reached) -> Cells:
        visits = own.visits
        steps = {str(step): visits.step == step for step in range(2, own.walk.picked.shape[1] + 1)}
        return {
            "holds_wrong": self._cells(visits.wrong > 0, visits, steps),
            "wrong_passages": self._cells(visits.wrong, visits, steps),
            "success": self._cells(own.success, visits, _by_wrong(visits)),
        }

    def _same(self, asked: Asked) -> Cells:
        base, fixed, holds = self.base, self.fixed, self.fixed.wrong > 0
        cells = {"success": self._cells(asked.success, fixed, _by_wrong(fixed))}
        if asked is not base:
            cells["difference"] = self._cells(_minus(asked.success, base.success), fixed, _by_wrong(fixed))
        if asked.deleted is not None:
            after, after_free = asked.deleted
            gain = _minus(after, asked.success[holds])
            values = {"before": asked.success[holds], "after": after, "gain": gain}
            if asked is not base and base.deleted is not None:
                values["gain_difference"] = gain - _minus(base.deleted[0], base.success[holds])
            values["after_free"] = after_free
            questions = fixed.states.question[holds]
            cells["deletion"] = {key: self._by_hops(value, questions) for key, value in values.items()}
        return cells

    @property
    def base(self) -> Asked:
        """The system that the others are compared with on the fixed states."""
        return next((asked for asked in self.asked if asked.deleted is not None), self.asked[0])

    @cached_property
    def _questions(self) -> Ids:
        return np.unique(np.concatenate([own.walk.questions for own in self.reached]))

    def _cells(self, values: NDArray, states: StateSet, groups: Mapping[str, Bools]) -> dict[str, ByHops]:
        questions = states.states.question
        return {group: self._by_hops(values[rows], questions[rows]) for group, rows in groups.items()}

    def _by_hops(self, values: NDArray, questions: Ids) -> ByHops:
        cells = {"all": estimate(values, questions)}
        found = np.unique(self.dataset.hops[self._questions])
        for hops in found if len(found) > 1 else ():
            rows = self.dataset.hops[questions] == hops
            cells[str(hops)] = estimate(values[rows], questions[rows])
        return cells

    def to_json(self) -> dict[str, Any]:
        """Return protocol and figures as one dict that strict JSON can hold (None where there is no state)."""
        return {
            "protocol": self.protocol,
            "own_chains": [
                {"name": own.name, "chains": len(own.walk), "states": len(own.visits)}
                | _plain(self.own_cells[own.name])
                for own in self.reached
            ],
            "same_states": {
                "reached_by": self.source,
                "states": len(self.fixed),
                "compared_with": self.base.name,
                "systems": [{"name": asked.name} | _plain(self.same_cells[asked.name]) for asked in self.asked],
            },
        }

    def table(self) -> str:
        """Return two plain-text tables with the assumptions above them."""
        lines = [*protocol_lines(self.protocol), "", "Own chains: mean [interval] number of states", ""]
        own, same = list(self.own_cells.values()), list(self.same_cells.values())
        steps = [str(step) for step in range(2, max(each.walk.picked.shape[1] for each in self.reached) + 1)]
        rows = [["measure", "states", "hops", *self.own_cells]]
        for measure, label in (("holds_wrong", "share with wrong passages"), ("wrong_passages", "wrong passages")):
            for step in steps:
                rows += _rows(label, f"before step {step}", [cells[measure].get(step) for cells in own])
        for wrong in WRONG:
            rows += _rows("next-step success", _with_wrong(wrong), [cells["success"][wrong] for cells in own])
        lines += align(rows)

        base = self.base.name
        lines += [
            "",
            f"The same states, {len(self.fixed)} reached by {self.source}: mean [interval] number of states",
            "",
        ]
        rows = [["measure", "states", "hops", *self.same_cells]]
        for measure, label, sign in (("success", "next-step success", ""), ("difference", f"minus {base}'s", "+")):
            for wrong in WRONG:
                rows += _rows(label, _with_wrong(wrong), [cells.get(measure, {}).get(wrong) for cells in same], sign)
        for key, label in DELETION.items():
            by_system = [cells.get("deletion", {}).get(key) for cells in same]
            rows += _rows(label.format(base), _with_wrong("1+"), by_system, "+" if key.startswith("gain") else "")
        lines += align(rows)
        logs = [asked.name for asked in self.asked if asked.deleted is None]
        if logs:
            lines += ["", f"no deletion for {', '.join(logs)}: a log cannot be asked again; name a retriever beside it"]
        return "\n".join(lines)


def _by_wrong(states: StateSet) -> dict[str, Bools]:
    wrong = states.wrong
    return dict(zip(WRONG, (wrong >= 0, wrong == 0, wrong == 1, wrong >= 2), strict=True))


def _minus(ours: Bools, theirs: Bools) -> Ids:
    return ours.astype(np.int64) - theirs.astype(np.int64)


def _plain(cells: Cells) -> dict[str, Any]:
    return {
        measure: {group: {hops: asdict(cell) for hops, cell in by_hops.items()} for group, by_hops in groups.items()}
        for measure, groups in cells.items()
    }


def _with_wrong(wrong: str) -> str:
    return "all" if wrong == "all" else f"{wrong} wrong"


def _rows(label: str, states: str, by_system: Sequence[ByHops | None], sign: str = "") -> list[list[str]]:
    """Return a row for each number of hops with a column for each system; none where no system has the figure."""
    hops = next((list(cells) for cells in by_system if cells), [])
    rows = [["", "", n, *(cells[n].text(sign) if cells else "" for cells in by_system)] for n in hops]
    for row in rows[:1]:
        row[:2] = label, states
    return rows
