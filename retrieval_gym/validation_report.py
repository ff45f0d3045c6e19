"""What a check of one's own data can find, how grave each fault is, and the report of it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from retrieval_gym.protocol import align

ERROR, WARNING = "error", "warning"
# Every check: how grave, and what it finds with the remedy. Errors are what loading, training or honest scores fail on.
CHECKS: dict[str, tuple[str, str]] = {
    "file": (ERROR, "files that are missing, empty or damaged"),
    "line": (ERROR, "lines that cannot be read: they need one JSON object in UTF-8 each"),
    "field": (ERROR, "fields that are missing or of the wrong type"),
    "duplicate passage id": (ERROR, "passage ids that occur again: make ids unique"),
    "empty passage": (ERROR, "passages with neither title nor text: remove them"),
    "duplicate question id": (ERROR, "question ids that occur again in their file: make ids unique"),
    "missing gold": (ERROR, "questions without gold_ids: name their passages, or remove the questions"),
    "unknown passage": (ERROR, "ids that are not in the corpus: add the passages or correct the ids"),
    "repeated id": (ERROR, "lists of ids that name a passage twice: name it once"),
    "gold outside pool": (ERROR, "gold passages that are not in pool_ids: add them there"),
    "missing pool": (ERROR, "questions without pool_ids where others of the file have them: give all or none"),
    "gold beyond budget": (ERROR, "questions with more gold passages than steps: raise --steps, and max_steps of runs"),
    "shared question": (ERROR, "questions that another split asks too: ask each in one split, or scores mean nothing"),
    "identical passages": (WARNING, "passages that repeat title and text of another: they count as one"),
    "no text": (WARNING, "passages with a title alone"),
    "long passage": (WARNING, "passages over the limit: encoders and agents cut them, so split them"),
    "duplicate question": (WARNING, "questions asked again in the same file"),
    "damaged text": (WARNING, "texts with U+FFFD, where an earlier conversion lost a character"),
    "one split": (WARNING, "files that serve every split: to train, part them into questions_train.jsonl, _dev.jsonl"),
    "no questions": (WARNING, "folders without questions: enough to embed and search, not to evaluate or train"),
    "unread file": (WARNING, "files of questions that no split reads: name them questions_{train,dev,test}.jsonl"),
}  # fmt: skip


@dataclass(frozen=True)
class Place:
    """Where something was found, and what; ``line`` is None where a whole file is meant."""

    file: str
    line: int | None
    detail: str

    def __str__(self) -> str:
        where = self.file if self.line is None else f"{self.file}, line {self.line}"
        return f"{where}: {self.detail}"


@dataclass
class Finding:
    """What one check has found: how often, and the first places."""

    check: str
    count: int = 0
    first: list[Place] = field(default_factory=list)

    @property
    def severity(self) -> str:
        """``"error"`` or ``"warning"``."""
        return CHECKS[self.check][0]


@dataclass
class FileSummary:
    """What one file holds."""

    name: str
    split: str
    records: int = 0
    notes: dict[str, None] = field(default_factory=dict)


@dataclass
class Report:
    """What ``validate`` found in a folder.

    Attributes:
        folder: as it was given.
        steps: the budget that gold was held against.
        files: one summary a file that was read, the corpus first.
        lengths: words, characters and, where they were counted, tokens of the passages: median and largest.
        gold: number of questions by their number of gold passages, by split.
        findings: by check, errors first.
    """

    folder: str
    steps: int
    files: list[FileSummary] = field(default_factory=list)
    lengths: dict[str, tuple[int, int]] = field(default_factory=dict)
    gold: dict[str, Counter[int]] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)

    def count(self, severity: str) -> int:
        """Return how many faults of this severity there are."""
        return sum(finding.count for finding in self.findings if finding.severity == severity)

    def table(self) -> str:
        """Return the report as text."""
        rows = [("file", "split", "records", "encoding")]
        rows += [(f.name, f.split, f"{f.records:,}", ", ".join(f.notes) or "UTF-8") for f in self.files]
        lines = [self.folder, "", *align(rows), ""]
        if self.lengths:
            each = (f"{name} {middle:,} (at most {most:,})" for name, (middle, most) in self.lengths.items())
            lines.append(f"a passage has, median: {', '.join(each)}")
        for split, sizes in self.gold.items():
            each = (f"{size}: {count:,}" for size, count in sorted(sizes.items()))
            lines.append(f"gold passages a question, {split}: {', '.join(each)}")
        for finding in self.findings:
            lines += ["", f"{finding.severity:8}{finding.count:,} {CHECKS[finding.check][1]}"]
            lines += [f"    {place}" for place in finding.first]
            if finding.count > len(finding.first):
                lines.append(f"    and {finding.count - len(finding.first):,} more")
        lines += ["", f"errors: {self.count(ERROR):,}, warnings: {self.count(WARNING):,}"]
        return "\n".join(lines)

    def to_json(self) -> dict[str, Any]:
        """Return the report as JSON-able values."""
        return {
            "folder": self.folder,
            "steps": self.steps,
            "files": [
                {"file": f.name, "split": f.split, "records": f.records, "notes": list(f.notes)} for f in self.files
            ],
            "lengths": {name: {"median": middle, "max": most} for name, (middle, most) in self.lengths.items()},
            "gold": {split: {str(n): c for n, c in sorted(sizes.items())} for split, sizes in self.gold.items()},
            "findings": [
                {
                    "check": finding.check,
                    "severity": finding.severity,
                    "meaning": CHECKS[finding.check][1],
                    "count": finding.count,
                    "first": [vars(place) for place in finding.first],
                }
                for finding in self.findings
            ],
            "errors": self.count(ERROR),
            "warnings": self.count(WARNING),
        }
