import argparse
import io

import pytest

from retrieval_gym import cli, rendering
from retrieval_gym.commands import common, play
from retrieval_gym.envs import ChainRetrievalEnv

SYNTHETIC = "ChainRetrieval-Synthetic-v0"
SMALL = ("num_questions=20", "corpus_size=500")


def test_transcript_of_a_full_episode(pool_dataset):
    env = ChainRetrievalEnv(pool_dataset, max_steps=5, render_mode="ansi")
    env.reset(options={"question": 1})
    assert env.render() == (
        "Question 1: Into which sea flows the river of Einstein's birthplace?\n     5 of 5 steps left"
    )
    for action in (0, 5, 5, 1, 3):
        env.step(action)
    assert env.render().splitlines() == [
        "Question 1: Into which sea flows the river of Einstein's birthplace?",
        "  1. gold  [0] Einstein: Albert Einstein was born in Ulm.",
        "  2. wrong [5] Nile: The Nile ends in the Mediterranean.",
        "  3. gold  [1] Ulm: Ulm lies on the Danube.",
        "  4. wrong [3] A passage without a title.",
        "     0 of 5 steps left, 1 spent on invalid actions",
        "     missed Danube: The Danube ends in the Black Sea.",
        "Incomplete: 2 of 3 gold passages in 4 picks.",
    ]


def test_copies_are_marked(pool_dataset):
    env = ChainRetrievalEnv(pool_dataset, render_mode="ansi", stop_when_complete=False)
    env.reset(options={"question": 0})
    for action in (3, 1, 0, 2):
        env.step(action)
    marks = [line.split()[1] for line in env.render().splitlines()[1:5]]
    assert marks == ["gold", "copy", "gold", "wrong"]
    assert env.render().endswith("Complete: 2 of 2 gold passages in 4 picks.")


def test_human_mode_prints_as_it_goes(pool_dataset, capsys):
    env = ChainRetrievalEnv(pool_dataset, render_mode="human")
    env.reset(options={"question": 0})
    assert capsys.readouterr().out == "Question 0: Which river flows through Einstein's birthplace?\n"
    env.step(2)
    assert capsys.readouterr().out == "  1. wrong [2] Curie: Marie Curie was born in Warsaw.\n"
    env.step(2)
    assert "invalid action" in capsys.readouterr().out
    env.step(0)
    env.step(1)
    assert capsys.readouterr().out.endswith("Complete: 2 of 2 gold passages in 3 picks.\n")
    assert env.render() is None and "Question 0" in capsys.readouterr().out


def test_render_without_a_mode_warns(pool_dataset):
    env = ChainRetrievalEnv(pool_dataset)
    env.reset()
    with pytest.warns(UserWarning, match="render_mode"):
        assert env.render() is None


def test_colour_is_for_terminals_only(pool_dataset, monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.delenv("NO_COLOR", raising=False)
    assert rendering.use_colour(Terminal()) and not rendering.use_colour(io.StringIO())
    monkeypatch.setenv("NO_COLOR", "1")
    assert not rendering.use_colour(Terminal())
    env = ChainRetrievalEnv(pool_dataset)
    env.reset(options={"question": 0})
    env.step(0)
    plain, coloured = (
        "\n".join(rendering.pick_lines(env.states, env.states.picked[0], pool_dataset, colour))
        for colour in (False, True)
    )
    assert "\x1b" not in plain and plain == coloured.replace("\x1b[32m", "").replace("\x1b[0m", "")


def test_snippets_are_one_short_line(pool_dataset):
    assert rendering.snippet(pool_dataset, 0, width=20) == "Einstein: Albert..."
    assert len(rendering.snippet(pool_dataset, 0, width=20)) <= 20


def type_in(monkeypatch: pytest.MonkeyPatch, *lines: str) -> None:
    """Answer each prompt with the next line, then end of file."""
    answers = iter(lines)

    def answer(prompt: str) -> str:
        try:
            return next(answers)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr("builtins.input", answer)


def parse_play(*argv: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    play.add_parser(parser.add_subparsers())
    return parser.parse_args(["play", *argv])


def run_play(*argv: str) -> int:
    args = parse_play(*argv)
    return args.run(args)


def test_a_person_plays_until_the_budget_is_spent(monkeypatch, capsys):
    type_in(monkeypatch, "x", "999", "", "0", "1", "0", "2", "3", "4", "5")
    assert run_play(SYNTHETIC, "--seed", "0", "--env-kwargs", "stop_when_complete=false", *SMALL) == 0
    out = capsys.readouterr().out
    assert out.count("Type the number of a passage") == 2 and "There is no passage 999" in out
    assert "invalid action" in out and "Return: " in out and "  [0] " in out and "  [15] " in out


@pytest.mark.parametrize("lines", [["q"], ["0", "Q"], [], ["1"]])
def test_leaving_early_is_no_error(monkeypatch, capsys, lines):
    type_in(monkeypatch, *lines)
    assert run_play(SYNTHETIC, "--question", "0", "--env-kwargs", "stop_when_complete=false", *SMALL) == 0
    assert "Goodbye." in capsys.readouterr().out


def test_a_person_searches_a_corpus_by_words(monkeypatch, capsys):
    pytest.importorskip("bm25s")
    env = ChainRetrievalEnv("synthetic", form="corpus", num_questions=20, corpus_size=500)
    title = env.dataset.corpus[5].title
    type_in(monkeypatch, title, "qqqqxxxx", "5", "q")
    assert run_play("ChainRetrieval-SyntheticOpen-v0", "--question", "0", "--env-kwargs", *SMALL) == 0
    out = capsys.readouterr().out
    assert f"[5] {title}" in out and "No passage holds any of these words." in out and "1. " in out


def test_the_oracle_completes_and_the_same_seed_plays_the_same(capsys):
    argv = (SYNTHETIC, "--agent", "oracle", "--episodes", "3", "--seed", "2", "--env-kwargs", *SMALL)
    assert run_play(*argv) == 0
    first = capsys.readouterr().out
    assert first.count("Return: 1\n") == 3 and "Mean return of 3 episodes: 1.000" in first
    run_play(*argv)
    assert capsys.readouterr().out == first


@pytest.mark.parametrize("agent", ["random", "bm25"])
@pytest.mark.parametrize("env_id", [SYNTHETIC, "ChainRetrieval-SyntheticOpen-v0"])
def test_agents_make_only_valid_picks(agent, env_id, capsys):
    if agent == "bm25":
        pytest.importorskip("bm25s")
    assert run_play(env_id, "--agent", agent, "--seed", "1", "--episodes", "2", "--env-kwargs", *SMALL) == 0
    out = capsys.readouterr().out
    assert out.count("Return: ") == 2 and "invalid" not in out


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["ChainRetrieval-v0"], "needs a dataset"),
        (["Nothing-v0"], "unknown environment id 'Nothing-v0'"),
        ([SYNTHETIC, "--split", "all"], "split 'all'"),
        ([SYNTHETIC, "--question", "-1"], "got -1"),
        ([SYNTHETIC, "--episodes", "0"], "at least 1, got 0"),
        ([SYNTHETIC, "--env-kwargs", "max_steps"], "'max_steps' is not of the form key=value"),
        ([SYNTHETIC, "--env-kwargs", "render_mode=ansi"], "cannot set 'render_mode'"),
        ([SYNTHETIC, "--env-kwargs", "no_such_option=1"], "no_such_option"),
        ([SYNTHETIC, "--env-kwargs", "max_steps=0"], "max_steps.*got 0"),
    ],
)
def test_bad_arguments_name_themselves(argv, message):
    with pytest.raises(ValueError, match=message):
        run_play(*argv)


def test_the_command_line_prints_one_line_and_returns_2(capsys, monkeypatch):
    monkeypatch.setattr(cli, "COMMANDS", ("play",))
    assert cli.main(["play", "Nothing-v0"]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("retrieval_gym play: unknown environment id") and captured.err.count("\n") == 1


def test_env_kwargs_are_json_or_text():
    pairs = ["max_steps=3", "stop_when_complete=false", "path=data/my corpus", "seed=null", "b=", "c=a=b", 'd="4"']
    assert common.parse_env_kwargs(pairs) == {
        "max_steps": 3,
        "stop_when_complete": False,
        "path": "data/my corpus",
        "seed": None,
        "b": "",
        "c": "a=b",
        "d": "4",
    }
    for bad, message in (
        (["x"], "'x'"),
        (["=1"], "'=1'"),
        (["a b=1"], "'a b=1'"),
        (["a=1", "a=2"], "'a' is given twice"),
    ):
        with pytest.raises(ValueError, match=message):
            common.parse_env_kwargs(bad)
