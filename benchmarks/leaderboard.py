"""Write README's table of results from leaderboard.yaml, where each result stands beside the command that makes it.

python benchmarks/leaderboard.py            # writes the table into README.md
python benchmarks/leaderboard.py --check    # says whether it is there as it should be
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[1]
BEGIN, END = "<!-- leaderboard: made by benchmarks/leaderboard.py -->\n", "<!-- end of leaderboard -->\n"


def load(path: Path = ROOT / "benchmarks" / "leaderboard.yaml") -> list[dict[str, Any]]:
    """Return the boards, one an environment."""
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def table(boards: list[dict[str, Any]]) -> str:
    """Return the boards as one Markdown table, the best of each last."""
    lines = ["| environment | questions | metric | agent | score, by seed | cost |", "|---|---|---|---|---|---|"]
    for board in boards:
        rows = sorted(board["rows"], key=lambda row: sum(row["scores"].values()) / len(row["scores"]))
        for row in rows:
            shown = {name: board[name] if row is rows[0] else "" for name in ("environment", "reported", "metric")}
            environment = f"`{shown['environment']}`" if shown["environment"] else ""
            scores = ", ".join(f"{score:.3f}" for score in row["scores"].values())
            cells = (environment, shown["reported"], shown["metric"], row["agent"], scores, row.get("cost", ""))
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def placed(readme: str, board: str) -> str:
    """Return the text of README with the table between its two marks.

    Raises:
        ValueError: when the marks are not there once each, in order.
    """
    before, begin, rest = readme.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end) or BEGIN in rest or END in after:
        raise ValueError(f"README.md must hold one {BEGIN.strip()} and behind it one {END.strip()}: put them back")
    return before + begin + board + end + after


def main() -> int:
    """Write or check; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="exit with status 1 where README has another table")
    args = parser.parse_args()
    path = ROOT / "README.md"
    old = path.read_text(encoding="utf-8")
    new = placed(old, table(load()))
    if args.check:
        if new != old:
            print("README.md has another table: run python benchmarks/leaderboard.py", file=sys.stderr)
        return int(new != old)
    path.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
