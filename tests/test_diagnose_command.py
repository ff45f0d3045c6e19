import json
import subprocess
import sys

import numpy as np
import pytest

from retrieval_gym import progress
from retrieval_gym.chain_logs import read_chain_logs
from retrieval_gym.cli import main
from retrieval_gym.commands import diagnose
from retrieval_gym.datasets import load_dataset

ENV = "ChainRetrieval-Custom-v0"
PASSAGES = ["amber birch", "birch cedar", "cedar delta", "ember fjord", "grove heath", "amber islet", "jetty knoll"]
QUESTIONS = [("q0", "amber", [0, 1, 2]), ("q1", "ember", [3, 4]), ("q2", "jetty", [6, 0])]


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture
def folder(tmp_path):
    data = tmp_path / "data"
    data.mkdir()
    write(data / "corpus.jsonl", [{"id": f"p{i}", "text": text} for i, text in enumerate(PASSAGES)])
    rows = [{"id": key, "question": text, "gold_ids": [f"p{i}" for i in gold]} for key, text, gold in QUESTIONS]
    for split in ("train", "dev"):
        write(data / f"questions_{split}.jsonl", rows)
    return data


@pytest.fixture
def log(tmp_path):
    """One question that goes astray at its second step, one at its first, and one that adds several a step."""
    return write(
        tmp_path / "ours.jsonl",
        [
            {"id": "q0", "picked": ["p0", "p5", "p1"]},
            {"id": "q1", "picked": ["p4", "p3"], "retriever": None},
            {"id": "q2", "picked": [["p1", "p6"], [], "p2"]},
        ],
    )


def call(folder, *arguments):
    return main(["diagnose", "--env", ENV, "--env-kwargs", f"path={folder}", *map(str, arguments)])


def test_a_log_alone(folder, log, tmp_path, capsys):
    out = tmp_path / "report.json"
    assert call(folder, "--chains", log, "--out", out) == 0
    text = capsys.readouterr().out
    assert "3 of 3" in text and "no deletion for log:ours" in text and "log:ours up to 2" in text
    report = json.loads(out.read_text())
    (own,) = report["own_chains"]
    # States that miss gold: [], [p0], [p0 p5]; [], [p4]; [], [p1 p6] twice, at its second and third step.
    assert own["states"] == 8 and report["same_states"]["states"] == 7
    assert own["holds_wrong"]["2"]["all"]["mean"] == pytest.approx(1 / 3)
    assert own["holds_wrong"]["3"]["all"] == {"mean": 1.0, "low": 1.0, "high": 1.0, "states": 2, "questions": 2}
    assert own["success"]["0"]["all"]["mean"] == pytest.approx(4 / 5)
    assert own["success"]["1"]["all"]["mean"] == pytest.approx(1 / 3)
    (system,) = report["same_states"]["systems"]
    assert system.keys() == {"name", "success"}


def test_what_evaluate_writes_gives_the_same_figures(folder, tmp_path):
    lines = tmp_path / "chains.jsonl"
    environment = ["--env", ENV, "--env-kwargs", f"path={folder}"]
    assert main(["evaluate", *environment, "--retriever", "oracle", "random", "--per-question", str(lines)]) == 0
    reports = []
    for number, arguments in enumerate((["--retriever", "oracle", "random"], ["--chains", lines])):
        assert call(folder, *arguments, "--out", tmp_path / f"{number}.json") == 0
        reports.append(json.loads((tmp_path / f"{number}.json").read_text())["own_chains"])
    assert [own.pop("name") for own in reports[0]] == ["oracle", "random"]
    assert [own.pop("name") for own in reports[1]] == ["log:oracle", "log:random"]
    assert reports[0] == reports[1]


def test_retrievers_are_asked_on_the_logged_states(folder, log, tmp_path, capsys):
    out = tmp_path / "report.json"
    assert call(folder, "--chains", log, "--retriever", "oracle", "random", "--out", out) == 0
    text = capsys.readouterr().out
    same = json.loads(out.read_text())["same_states"]
    assert same["reached_by"] == "log:ours" and same["compared_with"] == "oracle"
    systems = {system["name"]: system for system in same["systems"]}
    assert list(systems) == ["log:ours", "oracle", "random"]
    assert systems["oracle"]["success"]["all"]["all"] == {
        "mean": 1.0,
        "low": 1.0,
        "high": 1.0,
        "states": 7,
        "questions": 3,
    }
    assert systems["oracle"]["deletion"]["after"]["all"]["mean"] == 1
    assert systems["log:ours"]["difference"]["all"]["all"]["mean"] == pytest.approx(5 / 7 - 1)
    assert "7 reached by log:ours" in text and "minus oracle's" in text


@pytest.mark.parametrize("source", [None, "random", "oracle"])
def test_states_come_from_whom_they_should(folder, tmp_path, source):
    out = tmp_path / "report.json"
    arguments = [] if source is None else ["--states-from", source]
    assert call(folder, "--retriever", "oracle", "random", "--steps", "2", *arguments, "--out", out) == 0
    report = json.loads(out.read_text())
    assert report["same_states"]["reached_by"] == (source or "oracle") == report["same_states"]["systems"][0]["name"]
    own = next(own for own in report["own_chains"] if own["name"] == (source or "oracle"))
    assert own["success"] == report["same_states"]["systems"][0]["success"]


def test_two_encoders_by_name(folder, tmp_path, capsys):
    tiny = pytest.importorskip("tiny")
    encoders = [f"dense:{tiny.save_encoder(tmp_path / str(seed), seed=seed)}" for seed in (0, 1)]
    assert call(folder, "--retriever", *encoders, "--device", "cpu", "--limit", "2", "--seed", "4") == 0
    text, told = capsys.readouterr()
    assert f"{encoders[1]}: embeds the corpus of 7 passages first" in told
    assert "2 of 3, a random sample with seed 4" in text and f"minus {encoders[0]}'s" in text


@pytest.mark.parametrize("ending", ["png", "svg"])
def test_the_picture_shows_every_system(folder, log, tmp_path, ending):
    pytest.importorskip("matplotlib")
    picture = tmp_path / f"mismatch.{ending}"
    assert call(folder, "--chains", log, "--retriever", "random", "--picture", picture) == 0
    start = picture.read_bytes()[:200]
    assert start.startswith(b"\x89PNG") if ending == "png" else b"<svg" in picture.read_bytes()


def test_the_points_of_the_picture_are_the_figures(folder, log, monkeypatch):
    pytest.importorskip("matplotlib")
    figures = []
    draw = diagnose.mismatch_figure
    monkeypatch.setattr(diagnose, "mismatch_figure", lambda report: figures.append((report, draw(report))) or figures)
    monkeypatch.setattr(diagnose, "save_figure", lambda figure, path: None)
    assert call(folder, "--chains", log, "--retriever", "oracle", "--picture", "a.png") == 0
    (report, figure), panels = figures[0], figures[0][1].axes
    assert len(panels) == 3
    cells = report.own_cells["log:ours"]
    line = panels[0].get_lines()[0]
    assert line.get_label() == "log:ours"
    np.testing.assert_allclose(line.get_ydata(), [cells["holds_wrong"][step]["all"].mean for step in "23"])
    success = {line.get_label(): line.get_ydata().tolist() for line in panels[2].get_lines()}
    assert success["oracle"] == [1, 1]  # there is no state with two wrong passages
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["log:ours", "oracle"]


def test_progress_is_told_on_stderr(folder, monkeypatch, capsys):
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_LINES", -1.0)
    assert call(folder, "--retriever", "oracle", "--batch-size", "2", "--steps", "1") == 0
    captured = capsys.readouterr()
    assert captured.err.splitlines() == [
        "oracle, 1 steps of 3 questions: 2 of 3 searches",
        "oracle, 1 steps of 3 questions: 3 of 3 searches",
    ]
    assert "searches" not in captured.out


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("[1]", "must be a JSON object"),
        ("{", "not JSON"),
        ('{"picked": ["p0"]}', "field 'id'"),
        ('{"id": "q9", "picked": ["p0"]}', "question 'q9' is not in custom, split dev"),
        ('{"id": "q1"}', "field 'picked' is missing"),
        ('{"id": "q1", "picked": "p0"}', "field 'picked' must be a list"),
        ('{"id": "q1", "picked": [["p0", null]]}', "field 'picked' must be a string or an integer, got None"),
        ('{"id": "q1", "picked": ["p0", "p77"]}', "passage 'p77' is not in the corpus"),
        ('{"id": "q1", "picked": ["p0", ["p1", "p0"]]}', "passage 'p0' is picked twice"),
        ('{"id": "q1", "picked": ["p0"], "retriever": " "}', "field 'retriever' is empty"),
        ('{"id": "q0", "picked": ["p0"]}', "question 'q0' occurs twice for bad, first at"),
        ('{"id": "q1", "picked": ["p0"], "retriever": "other"}', "log:bad was asked this question and log:other was"),
    ],
)
def test_a_bad_line_is_named(folder, tmp_path, capsys, line, message):
    path = tmp_path / "bad.jsonl"
    path.write_text('{"id": "q0", "picked": ["p0"]}\n\n' + line + "\n")
    assert call(folder, "--chains", path) == 2
    error = capsys.readouterr().err
    place = "line 1" if "was asked" in message else "line 3"
    assert f"{path}, {place}" in error and message in error and error.count("\n") == 1


def test_a_passage_outside_the_pool_is_named(tmp_path, pool_dataset):
    path = write(tmp_path / "log.jsonl", [{"id": "q0", "picked": [9]}])
    with pytest.raises(ValueError, match="line 1: passage '9' is not in the question's pool"):
        read_chain_logs([path], pool_dataset)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "is empty"),
        ("\n\n", "is empty"),
        ('{"id": "q0", "picked": []}\n', "picks no passage in any of its 1 chains"),
    ],
)
def test_a_log_without_a_pick_is_refused(folder, tmp_path, capsys, content, message):
    path = tmp_path / "none.jsonl"
    path.write_text(content)
    assert call(folder, "--chains", path) == 2
    assert message in capsys.readouterr().err


def test_logs_of_one_name_are_refused(folder, log, tmp_path, capsys):
    (tmp_path / "again").mkdir()
    again = write(tmp_path / "again" / "ours.jsonl", [{"id": "q0", "picked": ["p0"]}])
    assert call(folder, "--chains", log, again) == 2
    assert "log:ours is in another file too" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "nothing to diagnose"),
        (["--retriever", "random", "--states-from", "bm25"], "--states-from 'bm25' is not among the systems"),
        (["--chains", "LOG", "--limit", "2"], "--limit 2 would do nothing"),
        (["--chains", "LOG", "--steps", "2"], "--steps 2 would do nothing"),
        (["--chains", "LOG", "--seed", "2"], "--seed 2 would do nothing"),
        (["--chains", "LOG", "--batch-size", "2"], "--batch-size 2 would do nothing"),
        (["--chains", "LOG", "--out", "LOG"], "would replace a file that is read"),
        (["--chains", "absent.jsonl"], "absent.jsonl"),
        (["--retriever", "random", "--batch-size", "0"], "--batch-size must be at least 1, got 0"),
        (["--retriever", "random", "--steps", "0"], "steps must be a whole number from 1 to 1000, got 0"),
        (["--retriever", "random", "random"], "name each once"),
        (["--retriever", "random", "--layers", "0"], "--layers is for the retriever dense"),
        (["--retriever", "dense:a", "--encoder", "b"], "dense:ENCODER names its own"),
        (["--retriever", "tfidf"], "unknown retriever 'tfidf'"),
        (["--retriever", "random", "--picture", "a.gif"], "cannot tell the format of the picture a.gif"),
        (["--retriever", "random", "--picture", "absent/a.png"], "there is no folder absent"),
        (["--retriever", "random", "--out", "a.png", "--picture", "a.png"], "give each a file of its own"),
        (["--retriever", "random", "--env-kwargs", "reward=recall"], "reward=recall would change nothing"),
    ],
)
def test_bad_input_prints_one_line_and_returns_2(folder, log, capsys, arguments, message):
    assert call(folder, *(log if argument == "LOG" else argument for argument in arguments)) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and message in captured.err and captured.err.count("\n") == 1


def test_a_missing_plotting_package_is_named_before_any_work(folder, capsys, monkeypatch):
    monkeypatch.setattr("retrieval_gym.plots.find_spec", lambda name: None)
    assert call(folder, "--retriever", "random", "--picture", "a.png") == 2
    assert "pip install 'retrieval-gym[plot]'" in capsys.readouterr().err


def test_the_command_imports_nothing_that_it_does_not_need():
    code = (
        "import sys; from retrieval_gym.cli import main\n"
        "main(['diagnose', '--env', 'ChainRetrieval-Synthetic-v0', '--retriever', 'random', '--limit', '3'])\n"
        "print([m for m in ('torch', 'matplotlib', 'transformers') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_picks_stand_step_by_step(folder, log):
    dataset = load_dataset("custom", "dev", folder)
    walk = read_chain_logs([log], dataset)["log:ours"]
    assert walk.questions.tolist() == [0, 1, 2] and walk.taken.tolist() == [3, 2, 3]
    expected = [[[0, -1], [5, -1], [1, -1]], [[4, -1], [3, -1], [-1, -1]], [[1, 6], [-1, -1], [2, -1]]]
    assert walk.picked.tolist() == expected
