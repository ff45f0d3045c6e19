"""README's results are those of leaderboard.yaml, and every command there is one that can be given."""

import importlib.util
import re
import shlex
import sys
from pathlib import Path

import gymnasium as gym
import pytest

import retrieval_gym  # noqa: F401 - registers the environments

pytest.importorskip("yaml")
pytest.importorskip("tyro")

ROOT = Path(__file__).resolve().parents[1]


def load_script(path: Path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


leaderboard = load_script(ROOT / "benchmarks" / "leaderboard.py")
ROWS = [(board, row) for board in leaderboard.load() for row in board["rows"]]


def test_readme_has_the_table():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert leaderboard.placed(readme, leaderboard.table(leaderboard.load())) == readme


def test_the_table_is_made_of_the_rows():
    boards = [
        {
            "environment": "A-v0",
            "reported": "7, dev",
            "metric": "m",
            "rows": [
                {"agent": "good", "command": "x", "scores": {1: 0.5, 2: 0.75}, "cost": "a day"},
                {"agent": "bad", "command": "y", "scores": {0: 0.1}},
            ],
        }
    ]
    head = "| environment | questions | metric | agent | score, by seed | cost |\n|---|---|---|---|---|---|\n"
    rows = "| `A-v0` | 7, dev | m | bad | 0.100 |  |\n|  |  |  | good | 0.500, 0.750 | a day |\n"
    assert leaderboard.table(boards) == head + rows


@pytest.mark.parametrize("readme", ["nothing", leaderboard.END + leaderboard.BEGIN, 2 * leaderboard.BEGIN])
def test_readme_without_the_marks_is_refused(readme):
    with pytest.raises(ValueError, match="must hold one <!-- leaderboard"):
        leaderboard.placed(readme, "table")


@pytest.mark.parametrize(("board", "row"), ROWS, ids=[f"{board['environment']}, {row['agent']}" for board, row in ROWS])
def test_a_command_can_be_given(board, row, monkeypatch):
    assert board["environment"] in gym.registry
    seeds = list(row["scores"])
    assert ("{seed}" in row["command"]) == (seeds != [0])
    assert all(0 <= score <= 1 for score in row["scores"].values())
    words = shlex.split(row["command"].format(seed=seeds[0]))
    if words[0] == "retrieval_gym":
        assert words[1] == "evaluate" and words[words.index("--env") + 1] == board["environment"]
        return
    agent = load_script(ROOT / words[1])
    monkeypatch.setattr(sys, "argv", words[1:])
    args = agent.parse_args(agent.Args, *([agent.PRESETS] if hasattr(agent, "PRESETS") else []))
    assert args.seed == seeds[0]
    reported = args.eval_envs or (args.env,)
    assert board["environment"] in reported
    if re.search("all-MiniLM-L6-v2", row["agent"]):
        assert args.encoder.endswith("all-MiniLM-L6-v2")
