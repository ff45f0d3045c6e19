"""``retrieval_gym validate``: each fault is found at its line, and what has no error loads."""

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from retrieval_gym import load_dataset, progress
from retrieval_gym.cli import main
from retrieval_gym.validation import validate
from retrieval_gym.validation_report import CHECKS, ERROR

PASSAGES = [
    {"id": "a", "title": "Ulm", "text": "Ulm lies on the Danube."},
    {"id": "b", "title": "Danube", "text": "The Danube ends in the Black Sea."},
    {"id": 3, "text": "نهر الدانوب 🌊"},
]
TRAIN = [{"id": "q0", "question": "Into which sea?", "gold_ids": ["a", "b"], "answers": ["Black Sea"]}]
DEV = [{"id": "q1", "question": "إلى أي بحر؟", "gold_ids": ["3"], "ordered": False}]


def dump(records):
    return "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records).encode()


def save(folder, **files):
    """Write the folder above, with these files in place of its own; None leaves one out."""
    whole = {"corpus": dump(PASSAGES), "questions_train": dump(TRAIN), "questions_dev": dump(DEV), **files}
    for name, content in whole.items():
        if content is not None:
            (folder / f"{name}.jsonl").write_bytes(content if isinstance(content, bytes) else dump(content))
    return folder


def found(report):
    """Every place by check, as (file, line)."""
    return {finding.check: [(place.file, place.line) for place in finding.first] for finding in report.findings}


def test_a_sound_folder_has_no_fault_and_is_summed_up(tmp_path, capsys):
    report = validate(save(tmp_path))
    assert report.findings == [] and report.gold == {"train": {2: 1}, "dev": {1: 1}}
    assert [(f.name, f.records) for f in report.files] == [
        ("corpus.jsonl", 3),
        ("questions_train.jsonl", 1),
        ("questions_dev.jsonl", 1),
    ]
    words = sorted(len(f"{p.get('title', '')} {p['text']}".split()) for p in PASSAGES)
    assert report.lengths["words"] == (words[1], words[2])
    assert main(["validate", str(tmp_path)]) == 0
    assert "errors: 0, warnings: 0" in capsys.readouterr().out


Q = TRAIN[0]
FAULTS = {
    "line": dict(corpus=dump(PASSAGES) + b"[1]\n\n{not json\n" + b'{"id": "z", "text": "\xff"}\n'),
    "field": dict(corpus=[*PASSAGES, {"id": "z", "text": 7}, {"text": "no id"}, {"id": "y", "title": [], "text": "t"}]),
    "duplicate passage id": dict(corpus=[*PASSAGES, {"id": "a", "text": "another"}, {"id": "3", "text": "third"}]),
    "empty passage": dict(corpus=[*PASSAGES, {"id": "z", "text": " \n"}]),
    "duplicate question id": dict(questions_train=[Q, {**Q, "question": "Another?"}]),
    "missing gold": dict(
        questions_train=[Q, {"id": "x", "question": "x?"}, {"id": "y", "question": "y?", "gold_ids": []}]
    ),
    "unknown passage": dict(questions_train=[Q, {**Q, "id": "x", "question": "x?", "gold_ids": ["a", "none"]}]),
    "repeated id": dict(questions_train=[Q, {**Q, "id": "x", "question": "x?", "gold_ids": ["a", "a"]}]),
    "gold outside pool": dict(questions_train=[{**Q, "pool_ids": ["a", 3]}]),
    "missing pool": dict(questions_train=[{**Q, "pool_ids": ["a", "b"]}, {**Q, "id": "x", "question": "x?"}]),
    "shared question": dict(questions_dev=[{**Q, "id": "x", "question": " into  WHICH sea? "}]),
    "identical passages": dict(corpus=[*PASSAGES, {**PASSAGES[1], "id": "z"}, {"id": "y", "text": "new"}]),
    "no text": dict(corpus=[*PASSAGES, {"id": "z", "title": "A title", "text": ""}]),
    "long passage": dict(corpus=[*PASSAGES, {"id": "z", "text": "word " * 201}, {"id": "y", "text": "w" * 2001}]),
    "duplicate question": dict(questions_train=[Q, {**Q, "id": "x"}]),
    "damaged text": dict(corpus=[*PASSAGES, {"id": "z", "text": "caf\ufffd"}]),
    "one split": dict(questions_train=None, questions_dev=None, questions=TRAIN),
    "no questions": dict(questions_train=None, questions_dev=None),
    "unread file": dict(questions_val=DEV),
    "file": dict(corpus=b""),
}  # fmt: skip
LINES = {
    "line": [("corpus.jsonl", 4), ("corpus.jsonl", 6), ("corpus.jsonl", 7)],
    "field": [("corpus.jsonl", 4), ("corpus.jsonl", 5), ("corpus.jsonl", 6)],
    "duplicate passage id": [("corpus.jsonl", 4), ("corpus.jsonl", 5)],
    "missing gold": [("questions_train.jsonl", 2), ("questions_train.jsonl", 3)],
    "gold outside pool": [("questions_train.jsonl", 1)],
    "shared question": [("questions_dev.jsonl", 1)],
    "long passage": [("corpus.jsonl", 4), ("corpus.jsonl", 5)],
    "one split": [("questions.jsonl", None)],
    "no questions": [("questions.jsonl", None)],
    "unread file": [("questions_val.jsonl", None)],
    "file": [("corpus.jsonl", None)],
}


@pytest.mark.parametrize("check", FAULTS)
def test_a_fault_is_found_at_its_line(check, tmp_path, capsys):
    report = validate(save(tmp_path, **FAULTS[check]))
    expected = LINES.get(check, [("corpus.jsonl" if "corpus" in FAULTS[check] else "questions_train.jsonl", None)])
    places = found(report)[check]
    assert [file for file, _ in places] == [file for file, _ in expected]
    if check in LINES:
        assert places == expected
    else:
        assert places[0][1] == (2 if "questions_train" in FAULTS[check] else 4)
    serious = CHECKS[check][0] == ERROR
    assert main(["validate", str(tmp_path)]) == (1 if serious else 0)
    shown = capsys.readouterr().out
    assert CHECKS[check][1] in shown and str(report.findings[0].first[0]) in shown
    if not serious:
        assert {finding.check for finding in report.findings} == {check}


def test_every_check_is_tested():
    assert set(FAULTS) | {"gold beyond budget"} == set(CHECKS)


@pytest.mark.parametrize("check", FAULTS)
def test_what_has_no_error_loads_and_what_does_not_load_has_one(check, tmp_path):
    errors = validate(save(tmp_path, **FAULTS[check])).count(ERROR)
    splits = [s for s in ("train", "dev") if (tmp_path / f"questions_{s}.jsonl").exists()]
    try:
        for split in splits or (["dev"] if (tmp_path / "questions.jsonl").exists() else []):
            load_dataset("custom", split, tmp_path)
        loads = True
    except ValueError:
        loads = False
    # A question in two splits loads, as each split is read alone.
    assert loads == (errors == 0) or check == "shared question"


def test_gold_is_held_against_the_budget_and_copies_count_once(tmp_path, capsys):
    copy = {**PASSAGES[1], "id": "copy"}
    save(tmp_path, corpus=[*PASSAGES, copy], questions_train=[{**Q, "gold_ids": ["a", "b", "copy"]}])
    assert validate(tmp_path, steps=2).count(ERROR) == 0
    assert found(validate(tmp_path, steps=1))["gold beyond budget"] == [("questions_train.jsonl", 1)]
    assert main(["validate", str(tmp_path), "--steps", "1"]) == 1
    assert "2 gold passages, 1 steps" in capsys.readouterr().out


def test_marks_and_line_ends_of_windows_are_accepted_and_told(tmp_path, capsys):
    windows = b"\xef\xbb\xbf" + dump(PASSAGES).replace(b"\n", b"\r\n")
    report = validate(save(tmp_path, corpus=windows))
    assert report.findings == [] and report.files[0].records == 3
    assert list(report.files[0].notes) == ["UTF-8 with a byte order mark", "Windows line ends"]
    assert main(["validate", str(tmp_path)]) == 0
    assert "UTF-8 with a byte order mark, Windows line ends" in capsys.readouterr().out
    assert [p.title for p in load_dataset("custom", "train", tmp_path).corpus] == ["Ulm", "Danube", ""]


def test_compressed_files_are_read_and_a_broken_one_is_named(tmp_path):
    save(tmp_path, corpus=None)
    (tmp_path / "corpus.jsonl.gz").write_bytes(gzip.compress(dump(PASSAGES)))
    assert validate(tmp_path).findings == []
    (tmp_path / "corpus.jsonl.gz").write_bytes(gzip.compress(dump(PASSAGES * 99))[:-20])
    (finding, *_) = validate(tmp_path).findings
    assert finding.check == "file" and "not a whole gzip file" in finding.first[0].detail


@pytest.mark.parametrize("whole", [True, False], ids=["whole", "cut off"])
def test_a_line_of_ten_megabytes_is_one_short_line_of_the_report(whole, tmp_path):
    text = b"x" * 10_000_000
    end = b'"}\n' if whole else b""
    report = validate(save(tmp_path, corpus=dump(PASSAGES) + b'{"id": "z", "text": "' + text + end))
    (finding,) = report.findings
    assert finding.check == ("long passage" if whole else "line")
    assert finding.first[0].line == 4 and len(str(finding.first[0])) < 300


@pytest.mark.parametrize("content", [b"", b"\n \r\n", b"\xef\xbb\xbf"])
def test_a_file_without_a_line_is_empty(content, tmp_path):
    (finding, *_) = validate(save(tmp_path, questions_train=content)).findings
    assert finding.check == "file" and finding.first[0].detail.startswith("is empty")


def test_many_faults_are_counted_and_few_shown(tmp_path, capsys):
    save(tmp_path, corpus=[{"id": "a", "text": f"text {i}"} for i in range(30)])
    assert main(["validate", str(tmp_path), "--show", "2"]) == 1
    shown = capsys.readouterr().out
    assert "error   29 passage ids that occur again" in shown and "and 27 more" in shown
    assert shown.count("first in line 1") == 2


def test_the_report_is_json(tmp_path, capsys):
    save(tmp_path, **FAULTS["duplicate passage id"])
    assert main(["validate", str(tmp_path), "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    (finding,) = report["findings"]
    assert finding["check"] == "duplicate passage id" and finding["severity"] == "error" and finding["count"] == 2
    assert finding["first"][0] == {"file": "corpus.jsonl", "line": 4, "detail": "'a', first in line 1"}
    assert (report["errors"], report["warnings"], report["gold"]["train"]) == (2, 0, {"2": 1})


def test_progress_is_told_on_stderr(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_LINES", -1.0)
    assert main(["validate", str(save(tmp_path))]) == 0
    lines = [f"corpus.jsonl: {n} lines" for n in (1, 2, 3)]
    assert capsys.readouterr().err.splitlines() == [
        *lines,
        "questions_train.jsonl: 1 lines",
        "questions_dev.jsonl: 1 lines",
    ]
    validate(tmp_path)
    assert not capsys.readouterr().err


def test_tokens_are_those_that_are_counted(tmp_path):
    counted = []

    def count(texts):
        counted.extend(texts)
        return [len(text) for text in texts]

    report = validate(save(tmp_path), count_tokens=count, max_tokens=25)
    texts = [f"{p['title']}\n{p['text']}" if "title" in p else p["text"] for p in PASSAGES]
    assert counted == texts
    lengths = sorted(map(len, texts))
    assert report.lengths["tokens"] == (lengths[1], lengths[2])
    long = [(("corpus.jsonl"), i + 1) for i, text in enumerate(texts) if len(text) > 25]
    assert found(report) == {"long passage": long} and long


def test_an_encoder_counts_its_own_tokens(tmp_path, capsys):
    pytest.importorskip("torch")
    from tiny import save_encoder, tokenizer

    save(tmp_path, corpus=[*PASSAGES, {"id": "z", "text": "river " * 130}])
    encoder = save_encoder(tmp_path / "tiny", prompts={"query": "", "passage": "passage: "})
    assert main(["validate", str(tmp_path), "--encoder", str(encoder), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["lengths"]["tokens"]["max"] == len(tokenizer().tokenize("river " * 130)) == 130
    # Of 128 positions, two go to special tokens and two to the prompt.
    assert report["findings"][0]["first"] == [{"file": "corpus.jsonl", "line": 4, "detail": "has 130 tokens, over 124"}]


def test_the_example_s_files_are_what_its_script_writes_and_have_no_fault(tmp_path):
    script = Path(__file__).parents[1] / "examples" / "own_corpus" / "make_corpus.py"
    subprocess.run([sys.executable, str(script), str(tmp_path)], check=True, capture_output=True)
    for name in ("corpus.jsonl", "questions_train.jsonl", "questions_dev.jsonl"):
        assert (tmp_path / name).read_bytes() == (script.parent / name).read_bytes()
    report = validate(tmp_path)
    assert report.findings == [] and [file.records for file in report.files] == [60, 30, 10]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{folder}/none"], "none is not a folder: give one that holds corpus.jsonl"),
        (["{folder}/corpus.jsonl"], "is not a folder"),
        (["{folder}", "--steps", "0"], "--steps must be a whole number from 1"),
        (["{folder}", "--show", "0"], "--show must be at least 1"),
        (["{folder}", "--max-tokens", "9"], "--max-tokens 9 is for --encoder"),
    ],
)
def test_bad_input_is_one_line(arguments, message, tmp_path, capsys):
    save(tmp_path)
    assert main(["validate", *(argument.format(folder=tmp_path) for argument in arguments)]) == 2
    shown = capsys.readouterr().err
    assert message in shown and shown.count("\n") == 1


@pytest.mark.skipif(sys.platform == "win32" or os.geteuid() == 0, reason="everything is readable for root")
def test_a_file_that_may_not_be_read_is_named(tmp_path):
    save(tmp_path)
    (tmp_path / "corpus.jsonl").chmod(0)
    finding = validate(tmp_path).findings[0]
    assert finding.check == "file" and "Permission denied" in finding.first[0].detail
