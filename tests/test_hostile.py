"""Every command on input that a person gives by mistake or on purpose: one line on stderr, and nothing half done."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
from small_runs import lora_run, save_data, write_jsonl  # noqa: E402
from tiny import save_encoder  # noqa: E402

from retrieval_gym.answer_log import AnswerLog  # noqa: E402
from retrieval_gym.cli import main  # noqa: E402
from retrieval_gym.report.runs import read_runs  # noqa: E402
from retrieval_gym.validation import validate  # noqa: E402
from retrieval_gym.validation_report import ERROR  # noqa: E402

GOOD = b'{"id": "a", "title": "Ulm", "text": "Ulm lies on the Danube."}\n{"id": "b", "text": "A mill."}\n'
ASKED = b'{"id": "q", "question": "Where is Ulm?", "gold_ids": ["a"], "answers": ["Danube"]}\n'


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return save_data(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    return save_encoder(tmp_path_factory.mktemp("encoder") / "tiny")


@pytest.fixture(scope="module")
def lora(tmp_path_factory):
    return lora_run(tmp_path_factory.mktemp("lora"))


@pytest.fixture(scope="module")
def finished(tmp_path_factory, lora):
    """A run with what a report reads of it, beside what it is played with."""
    pytest.importorskip("jinja2")
    run = tmp_path_factory.mktemp("finished") / "run"
    shutil.copytree(lora, run)
    configured(run, eval_envs=[], eval_split="dev", seed=1)
    (run / "metrics.jsonl").write_text('{"step": 1, "losses/info_nce": 0.5}\n{"step": 2, "losses/info_nce": 0.25}\n')
    figures = {"trained": {"protocol": {"questions": 1}, "metrics": {"support_f1": {"all": {"mean": 0.5}}}}}
    figures |= {"untrained": {"support_f1": 0.25}, "difference": {"support_f1": {"mean": 0.25, "low": 0, "high": 0.5}}}
    (run / "eval.json").write_text(json.dumps({"ChainRetrieval-Custom-v0": figures}))
    (record,) = read_runs([str(run)])
    assert record.last_step == 2 and record.reported["ChainRetrieval-Custom-v0"] == figures
    return run


@pytest.fixture
def reader(tmp_path, monkeypatch):
    (tmp_path / "first_reader.py").write_text("def first(q, p):\n    return [x[0] if x else '' for x in p]\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    return "first_reader:first"


def folder_of(path, corpus=GOOD, questions=ASKED):
    path.mkdir(exist_ok=True)
    (path / "corpus.jsonl").write_bytes(corpus)
    (path / "questions_dev.jsonl").write_bytes(questions)
    return path


def custom(folder):
    return ["--env", "ChainRetrieval-Custom-v0", "--env-kwargs", f"path={folder}"]


def call(capsys, *arguments):
    """Run a command in this process; return its exit status and what it said."""
    capsys.readouterr()
    try:
        status = main([str(argument) for argument in arguments])
    except SystemExit as error:  # argparse
        status = error.code
    return status, capsys.readouterr()


def refused(capsys, message, *arguments, status=2):
    """Run a command that must say one line with ``message``, and print nothing."""
    found, shown = call(capsys, *arguments)
    assert found == status and shown.out == "", shown
    assert message in shown.err and shown.err.count("\n") == 1 and len(shown.err) < 1_200, shown.err


def reading(folder, encoder, run, out, reader):
    """Every command that reads a corpus and questions of one's own."""
    return {
        "validate": ["validate", folder],
        "evaluate": ["evaluate", *custom(folder), "--retriever", "random", "--out", out / "eval.json"],
        "diagnose": ["diagnose", *custom(folder), "--retriever", "random", "--out", out / "mismatch.json"],
        "play": ["play", *custom(folder)[1:], "--split", "dev", "--agent", "random", "--question", "0"],
        "embed": ["embed", "--path", folder, "--encoder", encoder, "--device", "cpu", "--cache-dir", out / "cache"],
        "search": ["search", "where?", "--path", folder, "--encoder", encoder, "--device", "cpu"],
        "export": ["export", run, out / "export", "--npy", "--path", folder, "--device", "cpu"],
        "answer": ["answer", *custom(folder), "--retriever", "random", "--reader", reader, "--out", out / "a.jsonl"],
    }


# What is odd and can be read, and what cannot.

ODD = (
    b"\xef\xbb\xbf"
    + (GOOD + b'{"id": -7, "title": null, "text": "x"}\n\n').replace(b"\n", b"\r\n")
    + ('{"id": "👩‍🔬", "text": "نهر \u202eالدانوب\u202c é́ 🏳️‍🌈 \u2028\\u0000\\ud83d\\ude00"}'.encode())
)
UNREADABLE = {
    "empty": (b"", "corpus.jsonl is empty"),
    "UTF-16": (GOOD.decode().encode("utf-16"), "corpus.jsonl, line 1: not UTF-8"),
    "latin-1": (GOOD + b'{"id": "c", "text": "caf\xe9"}\n', "corpus.jsonl, line 3: not UTF-8"),
    "raw surrogate": (GOOD + b'{"id": "c", "text": "\xed\xa0\xbd"}\n', "corpus.jsonl, line 3: not UTF-8"),
    "surrogate": (GOOD + b'{"id": "c", "text": "\\ud83d"}\n', "line 3: the text has half of a surrogate pair"),
    "no JSON": (GOOD + b"hello\n", "corpus.jsonl, line 3: not JSON"),
    "a long line": (GOOD + b"x" * 10_000_000, "corpus.jsonl, line 3: not JSON"),
    "no object": (GOOD + b"[1]\n", "line 3: must be a JSON object, got [1]"),
    "a wrong type": (GOOD + b'{"id": "c", "text": 5}\n', "line 3: field 'text' must be a str, got 5"),
    "an id twice": (GOOD + GOOD, "line 3: passage id 'a' occurs twice"),
    "a long id twice": (2 * (b'{"id": "' + b"z" * 1_000_000 + b'", "text": "x"}\n'), "line 2: passage id 'zzz"),
}


def test_an_odd_corpus_is_read_by_every_command(encoder, lora, reader, tmp_path, capsys):
    """A mark, Windows line ends, a blank line, numbers as ids, every script, and no last line end."""
    folder = folder_of(tmp_path / "data", ODD)
    for command, arguments in reading(folder, encoder, lora, tmp_path, reader).items():
        status, shown = call(capsys, *arguments)
        assert status == 0, (command, shown.err)
    kept = [json.loads(line)["id"] for line in (tmp_path / "export/passages.jsonl").read_text().split("\n")[:-1]]
    assert kept == ["a", "b", "-7", "👩‍🔬"]


@pytest.mark.parametrize("name", UNREADABLE)
def test_a_corpus_that_cannot_be_read_is_one_line(name, encoder, lora, reader, tmp_path, capsys):
    content, message = UNREADABLE[name]
    folder, out = folder_of(tmp_path / "data", content), tmp_path / "out"
    out.mkdir()
    for command, arguments in reading(folder, encoder, lora, out, reader).items():
        if command == "validate":
            status, shown = call(capsys, *arguments)
            assert status == 1 and shown.err == "" and "error" in shown.out and len(shown.out) < 5_000
        else:
            refused(capsys, message, *arguments)
    assert os.listdir(out) == []


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"", "questions_dev.jsonl is empty"),
        (b'{"id": "q", "question": null, "gold_ids": ["a"]}', "line 1: field 'question' is missing"),
        (b'{"id": "q", "question": 5, "gold_ids": ["a"]}', "field 'question' must be a str, got 5"),
        (b'{"id": "q", "question": " ", "gold_ids": ["a"]}', "field 'question' is empty"),
        (b'{"id": "q", "question": "?"}', "field 'gold_ids' is missing"),
        (b'{"id": "q", "question": "?", "gold_ids": []}', "field 'gold_ids' is empty"),
        (b'{"id": "q", "question": "?", "gold_ids": ["a", "a"]}', "gold_ids 'a' occurs twice"),
        (b'{"id": "q", "question": "?", "gold_ids": ["z"]}', "gold_ids 'z' is not in"),
        (b'{"id": "q", "question": "?", "gold_ids": ["' + b"z" * 1_000_000 + b'"]}', "add that passage or correct"),
        (b'{"id": "q", "question": "?", "gold_ids": "a"}', "field 'gold_ids' must be a list, got 'a'"),
        (b'{"id": "q", "question": "?", "gold_ids": [["a"]]}', "field 'gold_ids' must be a string or an integer"),
        (b'{"id": "q", "question": "?", "gold_ids": ["a"], "answers": [5]}', "field 'answers' must hold strings"),
        (ASKED + ASKED, "line 2: question id 'q' occurs twice"),
    ],
)
def test_questions_that_cannot_be_read_are_one_line(line, message, reader, tmp_path, capsys):
    folder, out = folder_of(tmp_path / "data", questions=line), tmp_path / "out"
    out.mkdir()
    for command, arguments in reading(folder, "", "", out, reader).items():
        if command in ("evaluate", "diagnose", "play", "answer"):
            refused(capsys, message, *arguments)
    assert validate(folder).count(ERROR) > 0 and os.listdir(out) == []


def test_what_is_not_utf_8_is_told_as_such(tmp_path, capsys):
    folder = folder_of(tmp_path / "data", GOOD.decode().encode("utf-16"))
    line = next(
        line for line in call(capsys, "validate", folder)[1].out.splitlines() if line.startswith("corpus.jsonl")
    )
    assert line.split(None, 2)[2] == "not UTF-8"


# Arguments.


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["evaluate", *custom("{data}"), "--retriever", "random", "--steps", "two"], "invalid int value: 'two'; see"),
        (["evaluate", *custom("{data}"), "--retriever", "random", "--steps", "1.5"], "invalid int value: '1.5'"),
        (["evaluate", *custom("{data}"), "--retriever", "random", "--ks", "9" * 9], "--ks must be at most 100,000"),
        (
            ["evaluate", *custom("{data}"), "--retriever", "random", "--search", "beam", "--beams", "99999999999"],
            "--beams must be at most 1,000, got 99999999999",
        ),
        (["evaluate", *custom("{data}"), "--retriever", "random", "--batch-size", "0"], "--batch-size must be at"),
        (["evaluate", *custom("{data}"), "--retriever", "random", "--seed", "9" * 20], "--seed must be at most"),
        (["evaluate", *custom(""), "--retriever", "random"], "environment argument 'path=' is empty"),
        (["evaluate", "--env", "Nope-v0", "--retriever", "random"], "unknown environment id 'Nope-v0'"),
        (["evaluate", *custom("{data}"), "--retriever", "dense:"], "retriever 'dense:' names nothing behind the colon"),
        (["evaluate", *custom("{data}"), "--retriever", "random", "run:{data}"], "is not a run folder"),
        (["geometry", *custom("{data}"), "--retriever", "dense:a/b/c"], "no model at 'a/b/c'"),
        (["geometry", *custom("{data}"), "--retriever", "dense", "--neighbours", "9" * 9], "--neighbours must be"),
        (["play", *custom("{data}")[1:], "--agent", "random", "--question", "-1"], "--question must be at least 0"),
        (["play", *custom("{data}")[1:], "--agent", "random", "--question", "9"], "--question must be at most 3"),
        (["search", "q", "--path", "{data}", "-k", "99999999999"], "-k must be at most 100,000, got 99999999999"),
        (["search", "q", "--path", ""], "--path is empty: give it a value"),
        (["search", "q", "--path", "{data}", "--encoder", ""], "--encoder is empty"),
        (["search", "q", "--path", "{data}", "--run", "{data}/corpus.jsonl"], "no run folder"),
        (["search", "\udcff", "--path", "{data}", "--encoder", "{encoder}"], "half of a surrogate pair ('\\udcff')"),
        (["search", "--questions", "none.txt", "--path", "{data}"], "cannot open none.txt: No such file or directory"),
        (["convert", "--from", "beir", "", "out"], "SOURCE is empty"),
        (["validate", "{data}", "--show", "x"], "retrieval_gym validate: argument --show: invalid int value: 'x'"),
        (["export"], "the following arguments are required: RUN, TARGET; see retrieval_gym export --help"),
        (["unknown"], "invalid choice: 'unknown'"),
        (["report", "{data}", "--out", "out.html"], "is not a run folder"),
    ],
)  # fmt: skip
def test_arguments_that_cannot_be_are_one_line(arguments, message, data, encoder, capsys):
    filled = [argument.replace("{data}", str(data)).replace("{encoder}", str(encoder)) for argument in arguments]
    refused(capsys, message, *filled)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        (["--timeout", "1e23"], "--timeout must be above 0 and at most 86,400 seconds"),
        (["--timeout", "nan"], "--timeout must be above 0"),
        (["--retries", "99999"], "--retries must be at most 1,000"),
        (["--workers", "99999"], "--workers must be at most 1,000"),
        (["--passages", "99999999999"], "--passages must be at most 100,000"),
    ],
)
def test_numbers_of_an_endpoint_are_checked_before_any_work(option, message, data, tmp_path, capsys):
    out = tmp_path / "a.jsonl"
    named = ["--retriever", "random", "--reader", "http://127.0.0.1:9/v1#m", "--out", out]
    refused(capsys, message, "answer", *custom(data), *named, *option)
    assert not out.exists()


def test_memory_that_torch_does_not_get_is_one_line(data, capsys, monkeypatch):
    def fill(*args, **kwargs):
        raise RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory")

    monkeypatch.setattr("retrieval_gym.commands.evaluate.evaluate", fill)
    refused(capsys, "out of memory; take a smaller --batch-size", "evaluate", *custom(data), "--retriever", "random")


def test_text_that_the_terminal_cannot_show_says_what_to_set(data):
    command = [sys.executable, "-m", "retrieval_gym.cli", "play", *custom(data)[1:], "--agent", "random"]
    plain = {**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}
    done = subprocess.run([*command, "--question", "2"], capture_output=True, text=True, env=plain, check=False)
    wise = subprocess.run(
        [*command, "--question", "2"], capture_output=True, check=False, env={**plain, "PYTHONIOENCODING": "utf-8"}
    )
    assert done.returncode == 2 and "as ascii: set PYTHONIOENCODING=utf-8" in done.stderr, done.stderr
    assert "Traceback" not in done.stderr and wise.returncode == 0


# Runs that are damaged are named before anything is embedded.


def cut(path, size):
    path.write_bytes(path.read_bytes()[:size])


def configured(run, **changes):
    config = json.loads((run / "config.json").read_text()) | changes
    (run / "config.json").write_text(json.dumps(config))


DAMAGES = {
    "config.json is empty": (lambda run: cut(run / "config.json", 0), "config.json is not JSON"),
    "config.json is deep": (lambda run: (run / "config.json").write_text("[" * 200_000), "config.json is not JSON"),
    "a limit is text": (lambda run: configured(run, passage_tokens="x"), "config.json: passage_tokens is 'x'"),
    "a limit is null": (lambda run: configured(run, question_tokens=None), "config.json: question_tokens is None"),
    "no encoder": (lambda run: shutil.rmtree(run / "query_encoder"), "has no query_encoder: finish the run first"),
    "weights are cut": (lambda run: cut(run / "query_encoder/model.safetensors", 100), "model.safetensors is damaged"),
    "weights lack bytes": (
        lambda run: cut(run / "query_encoder/model.safetensors", -50),
        "model.safetensors is damaged",
    ),
    "no weights": (lambda run: (run / "query_encoder/model.safetensors").unlink(), "no weights in"),
    "a module is cut": (lambda run: cut(run / "query_encoder/1_Pooling/config.json", 5), "config.json is not JSON"),
    "the tokenizer is cut": (lambda run: cut(run / "query_encoder/tokenizer.json", 99), "tokenizer.json is not JSON"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_run_is_named_before_any_work(name, lora, data, reader, tmp_path, capsys):
    damage, message = DAMAGES[name]
    run, out = tmp_path / "run", tmp_path / "out"
    shutil.copytree(lora, run)
    out.mkdir()
    damage(run)
    named = ["--retriever", f"run:{run}"]
    for arguments in (
        ["evaluate", *custom(data), *named],
        ["diagnose", *custom(data), *named],
        ["geometry", *custom(data), *named],
        ["answer", *custom(data), *named, "--reader", reader, "--out", out / "a.jsonl"],
        ["search", "q", "--path", data, "--run", run],
        ["export", run, out / "x", "--npy"],
        ["report", run, "--out", out / "r.html"],
    ):
        refused(capsys, message, *arguments)
    assert os.listdir(out) == []


def replaced(name, old, new):
    def damage(run):
        (run / name).write_text((run / name).read_text().replace(old, new, 1))

    return damage


REPORTED = {
    "eval.json is cut": (lambda run: cut(run / "eval.json", 20), "eval.json is not JSON"),
    "eval.json lacks a figure": (replaced("eval.json", '"untrained"', '"before"'), "eval.json is damaged at"),
    "eval.json has text": (replaced("eval.json", '"trained": {', '"trained": {"protocol": 5, "x": {'), "not JSON"),
    "a protocol is a number": (
        lambda run: (run / "eval.json").write_text(
            json.dumps({key: {"trained": {"protocol": 5}} for key in json.loads((run / "eval.json").read_text())})
        ),
        "eval.json is damaged at",
    ),
    "metrics are cut": (lambda run: cut(run / "metrics.jsonl", -5), "metrics.jsonl, line "),
    "a value is infinite": (
        lambda run: (run / "metrics.jsonl").write_text('{"step": 1, "a": Infinity}\n'),
        "metrics.jsonl, line 1: a is inf, not a number that can be drawn",
    ),
    "a value is too large": (
        lambda run: (run / "metrics.jsonl").write_text('{"step": 1, "a": 1' + "0" * 400 + "}\n"),
        "metrics.jsonl, line 1: a is 1000",
    ),
    "a step is negative": (
        lambda run: (run / "metrics.jsonl").write_text('{"step": -1, "a": 1}\n'),
        "metrics.jsonl, line 1: step is -1",
    ),
    "environments are a number": (lambda run: configured(run, eval_envs=5), "config.json: eval_envs is 5"),
    "an argument is a number": (lambda run: configured(run, env_kwargs=[5]), "config.json: env_kwargs is [5]"),
    "a checkpoint is cut": (
        lambda run: [cut(path, 500) for path in (run / "checkpoints").glob("best*.pt")],
        "cannot read checkpoint",
    ),
}


@pytest.mark.parametrize("name", REPORTED)
def test_a_damaged_report_of_a_run_is_named_before_any_play(name, finished, tmp_path, capsys):
    damage, message = REPORTED[name]
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    damage(run)
    refused(capsys, message, "report", run, "--out", tmp_path / "r.html", "--device", "cpu")
    assert not (tmp_path / "r.html").exists()


# Conversion never makes a folder that does not validate.

PASSAGES = '{"id": "a", "title": "T", "text": "x"}\n{"id": "b", "text": "yy"}\n'
HF = {
    "csv, more cells": ("p.csv", "id,text\n1,A,x\n", None, "p.csv, line 2: 3 cells where the header has 2"),
    "csv, open quote": ("p.csv", 'id,text\n1,"x\n', None, "p.csv, line 2: not a row of a table"),
    "csv, a column twice": ("p.csv", "id,text,text\n1,x,y\n", None, "line 1: the column 'text' occurs twice"),
    "csv, latin-1": ("p.csv", b"id,text\n1,\xe9\n", None, "p.csv, line 2: not UTF-8"),
    "csv, empty": ("p.csv", "", None, "p.csv is empty"),
    "no JSON": ("p.jsonl", PASSAGES + "x\n", None, "p.jsonl, line 3: not JSON"),
    "an id twice": ("p.jsonl", PASSAGES + PASSAGES, None, "line 3: passage id 'a' occurs twice"),
    "cut gzip": ("p.jsonl.gz", b"\x1f\x8bxx", None, "p.jsonl.gz is not a whole gzip file"),
    "no arrow": ("p.arrow", "x", None, "p.arrow cannot be read as a dataset"),
    "a question twice": ("p.jsonl", PASSAGES, 2 * '{"id": 1, "question": "?", "gold_ids": ["a"]}\n', "'1' occurs"),
    "answers in an object": (
        "p.jsonl",
        PASSAGES,
        '{"question": "?", "gold_ids": ["a"], "answers": {"x": 1}}\n',
        "q.jsonl, line 1: field 'answers' must hold strings",
    ),
    "gold outside the pool": (
        "p.jsonl",
        PASSAGES,
        '{"question": "?", "gold_ids": ["a"], "pool_ids": ["b"]}\n',
        "'questions with gold that is not in their pool': 1",
    ),
    "an unknown pool": (
        "p.jsonl",
        PASSAGES,
        '{"question": "?", "gold_ids": ["a"], "pool_ids": ["a", "z"]}\n',
        "'questions with a pool that is not among the passages': 1",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", HF)
def test_tables_that_cannot_be_converted_are_one_line(name, tmp_path, capsys):
    if name == "no arrow":
        pytest.importorskip("datasets")
    file, passages, questions, message = HF[name]
    (tmp_path / file).write_bytes(passages if isinstance(passages, bytes) else passages.encode())
    more = []
    if questions is not None:
        (tmp_path / "q.jsonl").write_text(questions)
        more = ["--questions", tmp_path / "q.jsonl"]
    refused(capsys, message, "convert", "--from", "hf", tmp_path / file, tmp_path / "out", *more)
    assert not (tmp_path / "out").exists()


def test_cells_of_a_table_stay_the_text_that_they_are(tmp_path, capsys):
    rows = 'id,title,text\r\n007,1984,"NA, or\n""none"""\r\n\r\n8,,12\r\n'
    (tmp_path / "p.csv").write_bytes(b"\xef\xbb\xbf" + rows.encode())
    (tmp_path / "q.csv").write_text("id,question,gold_ids,answers\n1,when?,007,1949\n2,what?,,x\n")
    command = ["convert", "--from", "hf", tmp_path / "p.csv", tmp_path / "out", "--questions", tmp_path / "q.csv"]
    status, shown = call(capsys, *command)
    assert status == 0 and "left out 1 questions without gold" in shown.out, shown.err
    passages = [json.loads(line) for line in (tmp_path / "out/corpus.jsonl").read_text().splitlines()]
    assert passages == [
        {"id": "007", "title": "1984", "text": 'NA, or\n"none"'},
        {"id": "8", "title": "", "text": "12"},
    ]
    (asked,) = [json.loads(line) for line in (tmp_path / "out/questions_train.jsonl").read_text().splitlines()]
    assert asked == {"id": "1", "question": "when?", "gold_ids": ["007"], "answers": ["1949"]}


def test_converted_pools_validate_or_are_left_out(tmp_path, capsys):
    write_jsonl(tmp_path / "p.jsonl", [{"id": "a", "text": "x"}, {"id": "b", "text": "y"}])
    asked = [
        {"question": "one?", "gold_ids": ["a"], "pool_ids": ["a", "b", "a"], "answers": [7, None, "x"]},
        {"question": "two?", "gold_ids": ["a"], "pool_ids": []},
        {"question": "three?", "gold_ids": ["a"], "pool_ids": None},
    ]
    write_jsonl(tmp_path / "q.jsonl", asked)
    command = ["convert", "--from", "hf", tmp_path / "p.jsonl", tmp_path / "out", "--questions", tmp_path / "q.jsonl"]
    status, shown = call(capsys, *command)
    assert status == 0 and "left out 2 questions without a pool, where others have one" in shown.out
    (kept,) = [json.loads(line) for line in (tmp_path / "out/questions_train.jsonl").read_text().splitlines()]
    assert kept["pool_ids"] == ["a", "b"] and kept["answers"] == ["7", "x"]
    assert validate(tmp_path / "out").count(ERROR) == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"answer": 5}, "field 'answer' must be a list, got 5"),
        ({"answer": [5]}, "field 'answer' must hold strings, got 5"),
        ({"paragraphs": [{"idx": [1], "title": "A", "text": "aa"}]}, "field 'idx' must be a string or an integer"),
        ({"question_decomposition": "x"}, "field 'question_decomposition' must be a list"),
    ],
)
def test_questions_of_hipporag_with_odd_fields_are_one_line(change, message, tmp_path, capsys):
    (tmp_path / "n_corpus.json").write_text('[{"title": "A", "text": "aa"}]')
    question = {"id": 1, "question": "?", "answer": "x", "paragraphs": [{"title": "A", "text": "aa"}]}
    (tmp_path / "n.json").write_text(json.dumps([question | change]))
    command = ["convert", "--from", "hipporag", tmp_path / "n.json", tmp_path / "out"]
    refused(capsys, message, *command)
    (tmp_path / "n.json").write_text(json.dumps([question, question]))
    refused(capsys, "record 2: question id '1' occurs twice, first at", *command)
    (tmp_path / "n.json").write_text(
        json.dumps([{**question, "question_decomposition": [{"paragraph_support_idx": [0]}]}])
    )
    assert call(capsys, *command)[0] == 0


# Answers.


def test_a_question_file_is_read_line_by_line(data, encoder, tmp_path, capsys):
    import gzip

    (tmp_path / "q.txt.gz").write_bytes(gzip.compress("\ufeffone\u2028line?\r\ntwo?\n".encode()))
    (tmp_path / "q.json").write_text('[{"id": 1, "question": "one?"}]')
    search = ["search", "--path", data, "--encoder", encoder, "--device", "cpu", "--json", "--questions"]
    status, shown = call(capsys, *search, tmp_path / "q.txt.gz")
    assert [json.loads(line)["question"] for line in shown.out.split("\n")[:-1]] == ["one\u2028line?", "two?"]
    assert json.loads(call(capsys, *search, tmp_path / "q.json")[1].out)["id"] == "1"
    (tmp_path / "q.txt").write_bytes(b"one?\n\xe9\n")
    refused(capsys, "q.txt, line 2: not UTF-8", *search, tmp_path / "q.txt")


def test_a_mistake_leaves_no_file_of_answers_in_the_way(reader, tmp_path, capsys):
    folder, out = folder_of(tmp_path / "data"), tmp_path / "a.jsonl"
    command = ["answer", *custom(folder), "--out", out, "--bounds", "--reader", reader]
    (tmp_path / "failing.py").write_text("def fail(q, p):\n    raise ValueError('the reader is down')\n")
    refused(capsys, "the reader is down", *command[:-1], "failing:fail", "--retriever", "random")
    assert not list(tmp_path.glob("a.*"))
    assert call(capsys, *command, "--retriever", "random")[0] == 0
    assert len(list(tmp_path.glob("a*.jsonl"))) == 3
    refused(capsys, "holds answers of something else: retriever", *command, "--retriever", "bm25")


def test_a_header_without_answers_stands_in_nobodys_way(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"answers_of": {"retriever": "other"}}\n')
    with AnswerLog(path, {"retriever": "this"}) as log:
        log.append(0, "x", ["p"])
    assert path.read_text().splitlines()[0] == '{"answers_of": {"retriever": "this"}}'
    path.write_text("[" * 100_000 + "\n")
    with pytest.raises(ValueError, match="is no file of answers"):
        AnswerLog(path, {"retriever": "this"})


def test_answers_to_other_questions_are_asked_again_and_not_taken(reader, tmp_path, capsys):
    folder, out = folder_of(tmp_path / "data"), tmp_path / "a.jsonl"
    command = ["answer", *custom(folder), "--out", out, "--reader", reader, "--retriever", "random"]
    assert call(capsys, *command)[0] == 0
    lines = out.read_text().splitlines()
    out.write_text(lines[0] + "\n" + lines[1].replace('"index": 0', '"index": 7') + "\n")
    assert call(capsys, *command)[0] == 0
    assert [json.loads(line)["index"] for line in out.read_text().splitlines()[1:]] == [7, 0]


# Disks.


@pytest.fixture
def disk(tmp_path):
    """Mount a file system in memory: ``disk(name, options)`` returns its folder."""
    mounted = []

    def mount(name, options):
        folder = tmp_path / name
        folder.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", options, "none", str(folder)]
        if shutil.which("mount") is None or subprocess.run(command, capture_output=True, check=False).returncode:
            pytest.skip("file systems cannot be mounted here")
        mounted.append(folder)
        return folder

    yield mount
    for folder in mounted:
        subprocess.run(["umount", str(folder)], check=True)


def writing(data, encoder, run, out, reader, source):
    return {
        "convert": ["convert", "--from", "hf", source, out / "x"],
        "evaluate": ["evaluate", *custom(data), "--retriever", "random", "--per-question", out / "q.jsonl"],
        "answer": ["answer", *custom(data), "--retriever", "random", "--reader", reader, "--out", out / "a.jsonl"],
        "embed": ["embed", "--path", data, "--encoder", encoder, "--cache-dir", out / "c", "--device", "cpu"],
        "export": ["export", run, out / "x", "--npy", "--path", data, "--device", "cpu"],
    }


def test_a_read_only_disk_is_one_line_before_any_work(disk, data, encoder, lora, reader, tmp_path, capsys):
    out = disk("read-only", "size=1m,ro")
    source = write_jsonl(tmp_path / "p.jsonl", [{"id": "a", "text": "x"}])
    for arguments in writing(data, encoder, lora, out, reader, source).values():
        refused(capsys, "cannot write", *arguments)
    refused(capsys, "is read-only for you", "export", lora, out / "deep" / "x")


def test_a_full_disk_is_told_and_keeps_nothing_half_written(disk, data, encoder, lora, reader, tmp_path, capsys):
    folder, out = folder_of(tmp_path / "own", questions=ASKED.replace(b"Danube", b"D" * 9_000)), disk("full", "size=8k")
    source = write_jsonl(tmp_path / "p.jsonl", [{"id": i, "text": "word " * 200} for i in range(20)])
    for command, arguments in writing(folder, encoder, lora, out, reader, source).items():
        if command in ("convert", "answer", "export"):  # the others write little
            status, shown = call(capsys, *arguments)
            last = shown.err.splitlines()[-1]
            assert status == 2 and "cannot write" in last and "No space left on device" in last, shown.err
            assert "[Errno" not in last and list(out.iterdir()) == [], command


def test_a_full_disk_keeps_the_answers_before_it(disk):
    path = disk("full", "size=8k") / "a.jsonl"
    with pytest.raises(OSError, match="No space left"), AnswerLog(path, {"retriever": "r"}) as log:
        log.append(0, "x", ["p"])
        before = path.read_bytes()
        log.append(1, "y" * 20_000, ["p"])
    assert path.read_bytes() == before
    with AnswerLog(path, {"retriever": "r"}) as log:
        assert log.answers == {0: "x"}


# Interruptions.


def test_ctrl_c_while_the_commands_are_loaded_is_one_line(capsys, monkeypatch):
    def interrupt(name):
        raise KeyboardInterrupt

    monkeypatch.setattr("retrieval_gym.cli.import_module", interrupt)
    refused(capsys, "interrupted", "datasets", status=130)


@pytest.mark.skipif(os.name == "nt", reason="Windows sends no SIGINT to one process")
def test_ctrl_c_leaves_nothing_half_converted_and_the_same_command_begins_again(tmp_path):
    source = tmp_path / "p.jsonl"
    write_jsonl(source, [{"id": i, "text": "word " * 50} for i in range(50)])
    slow = tmp_path / "slow.py"
    slow.write_text(
        "import sys, time\n"
        "from retrieval_gym.conversion import collection\n"
        "write = collection._write_jsonl\n"
        "def hang(path, records):\n"
        "    path.write_text('half')\n"
        "    print('writing', flush=True)\n"
        "    time.sleep(60)\n"
        "collection._write_jsonl = hang if sys.argv.pop(1) == 'slow' else write\n"
        "from retrieval_gym.cli import main\n"
        "sys.exit(main())\n"
    )
    out = tmp_path / "out"
    command = ["convert", "--from", "hf", str(source), str(out)]
    with subprocess.Popen(
        [sys.executable, str(slow), "slow", *command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == "writing\n"
        process.send_signal(signal.SIGINT)
        told = process.communicate(timeout=30)[1]
    assert process.returncode == 130 and told == "retrieval_gym convert: interrupted\n"
    assert sorted(os.listdir(tmp_path)) == ["p.jsonl", "slow.py"]
    again = subprocess.run([sys.executable, str(slow), "fast", *command], capture_output=True, check=False)
    assert again.returncode == 0 and len(Path(out / "corpus.jsonl").read_text().splitlines()) == 50
