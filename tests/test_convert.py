"""``retrieval_gym convert``: what comes out holds what went in, passes ``validate``, and is whole or not there."""

import errno
import json
import os
import sys

import pytest

from retrieval_gym import load_dataset
from retrieval_gym.cli import main
from retrieval_gym.conversion import Collection, collection, from_hf, write_collection
from retrieval_gym.validation import validate
from retrieval_gym.validation_report import ERROR

RTL, EMOJI = "نهر الدانوب", "Wisła 🌊"


def convert(capsys, kind, source, target, *arguments):
    """Run the command; return its status and what it printed."""
    status = main(["convert", "--from", kind, str(source), str(target), *map(str, arguments)])
    return status, capsys.readouterr()


def read(file):
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def played(dataset):
    """Every question with its gold, pool and answers spelt out in texts, ids left out."""
    texts = [str(passage) for passage in dataset.corpus]
    return [
        (
            question.id,
            question.text,
            [texts[g] for g in question.gold],
            question.answers,
            question.ordered,
            None if dataset.pools is None else [texts[g] for g in dataset.pools[i]],
        )
        for i, question in enumerate(dataset.questions)
    ]


@pytest.fixture
def wiki(tmp_path):
    """HotpotQA's layout: two splits that share a paragraph; one question cannot be played, one is asked twice."""
    folder = tmp_path / "hotpotqa"
    folder.mkdir()
    shared = ["Danube", ["The Danube ends ", "in the Black Sea."]]
    ulm, einstein, arabic = ["Ulm", ["Ulm lies on the Danube."]], ["Einstein", ["Born in Ulm."]], [EMOJI, [RTL]]

    def record(key, question, gold, context):
        return {
            "_id": key, "question": question, "answer": "an answer", "context": context,
            "supporting_facts": [[title, 0] for title in gold],
        }  # fmt: skip

    train = [
        record("t0", "Where does the river of Ulm end?", ["Ulm", "Danube"], [arabic, ulm, shared]),
        record("t1", "Where was he born?", ["Nowhere"], [einstein]),
        record("t2", "Asked in both?", ["Ulm", "Einstein"], [ulm, einstein]),
    ]
    dev = [
        record("d0", "asked  in both?", ["Einstein", "Ulm"], [einstein, ulm]),
        record("d1", RTL, [EMOJI, "Danube"], [shared, arabic]),
    ]
    (folder / "hotpot_train_v1.1.json").write_text(json.dumps(train))
    (folder / "hotpot_dev_distractor_v1.json").write_text(json.dumps(dev))
    return folder


def test_a_pooled_dataset_comes_out_as_it_is_played(wiki, tmp_path, capsys):
    target = tmp_path / "out"
    status, shown = convert(capsys, "hotpotqa", wiki, target)
    assert status == 0, shown.err
    assert f"{target}: 2 questions in questions_dev.jsonl" in shown.out
    assert "left out 1 questions with a gold title that is not among the paragraphs, train" in shown.out
    assert "left out 1 questions of train that another split asks too" in shown.out
    assert validate(target).findings == []
    for split in ("train", "dev"):
        theirs = [q for q in played(load_dataset("hotpotqa", split, wiki)) if q[0] != "t2"]
        assert played(load_dataset("custom", split, target)) == theirs
    assert len(read(target / "corpus.jsonl")) == 4


def test_the_whole_corpus_is_kept_without_pools(wiki, tmp_path, capsys):
    target = tmp_path / "out"
    assert convert(capsys, "hotpotqa", wiki, target, "--form", "corpus")[0] == 0
    assert load_dataset("custom", "dev", target).pools is None
    assert {p.title for p in load_dataset("custom", "dev", target).corpus} == {"Danube", "Ulm", "Einstein", EMOJI}


def test_one_file_is_the_split_that_is_named(wiki, tmp_path, capsys):
    file = wiki / "hotpot_dev_distractor_v1.json"
    status, shown = convert(capsys, "hotpotqa", file, tmp_path / "out")
    assert status == 2 and "is the file of one split: name it" in shown.err and not (tmp_path / "out").exists()
    assert convert(capsys, "hotpotqa", file, tmp_path / "out", "--split", "test")[0] == 0
    assert sorted(os.listdir(tmp_path / "out")) == ["corpus.jsonl", "questions_test.jsonl"]


def test_musique_keeps_its_chains(tmp_path, capsys):
    folder = tmp_path / "musique"
    folder.mkdir()
    record = {
        "id": "2hop__1", "question": "Who?", "answer": "she", "answer_aliases": ["her"], "answerable": True,
        "paragraphs": [
            {"idx": i, "title": f"T{i}", "paragraph_text": f"Text {i}.", "is_supporting": i in (1, 3)} for i in range(4)
        ],
        "question_decomposition": [{"paragraph_support_idx": 3}, {"paragraph_support_idx": 1}],
    }  # fmt: skip
    (folder / "musique_ans_v1.0_dev.jsonl").write_text(json.dumps(record))
    assert convert(capsys, "musique", tmp_path, tmp_path / "out")[0] == 0
    (question,) = read(tmp_path / "out" / "questions_dev.jsonl")
    titles = {r["id"]: r["title"] for r in read(tmp_path / "out" / "corpus.jsonl")}
    assert [titles[key] for key in question["gold_ids"]] == ["T3", "T1"] and "ordered" not in question
    assert [titles[key] for key in question["pool_ids"]] == ["T0", "T1", "T2", "T3"]
    assert question["answers"] == ["she", "her"]


@pytest.fixture
def beir(tmp_path):
    folder = tmp_path / "beir"
    (folder / "qrels").mkdir(parents=True)
    corpus = [{"_id": f"d{i}", "title": "", "text": f"{EMOJI} {i}"} for i in range(7)] + [{"_id": "e", "text": " "}]
    (folder / "corpus.jsonl").write_text("".join(json.dumps(r) + "\n" for r in corpus))
    queries = [{"_id": "q0", "text": "zero"}, {"_id": "q1", "text": "one"}]
    (folder / "queries.jsonl").write_text("".join(json.dumps(r) + "\n" for r in queries))
    (folder / "qrels" / "test.tsv").write_text(
        "query-id\tcorpus-id\tscore\n" + "".join(f"q0\td{i}\t1\n" for i in range(5)) + "q1\td6\t2\nq1\td5\t0\n"
    )
    return folder


def test_beir_keeps_its_ids_and_says_what_budget_it_needs(beir, tmp_path, capsys):
    target = tmp_path / "out"
    status, shown = convert(capsys, "beir", beir, target)
    assert status == 0 and f"retrieval_gym validate {target} --steps 5" in shown.out
    assert "left out 1 passages with neither title nor text, test" in shown.out
    assert "left out 1 grades of questions" in shown.out
    assert validate(target, steps=4).count(ERROR) == 1 and validate(target, steps=5).count(ERROR) == 0
    assert [r["id"] for r in read(target / "corpus.jsonl")] == [f"d{i}" for i in range(7)]
    gold = {r["id"]: r["gold_ids"] for r in read(target / "questions_test.jsonl")}
    assert gold == {"q0": [f"d{i}" for i in range(5)], "q1": ["d6"]}


HIPPO_CORPUS = [
    {"title": "Python", "text": "Made by Guido."},
    {"title": "Guido", "text": "He studied in Amsterdam."},
    {"title": "Guido", "text": "Another Guido."},
    {"title": "Oslo", "text": f"{RTL}\nnext line"},
]


def hippo(folder, questions, name="sample"):
    folder.mkdir(exist_ok=True)
    (folder / f"{name}_corpus.json").write_text(json.dumps(HIPPO_CORPUS))
    (folder / f"{name}.json").write_text(json.dumps(questions))
    return folder


def paragraphs(*gold, text="paragraph_text"):
    return [
        {"title": p["title"], text: p["text"], "is_supporting": i in gold, "idx": i} for i, p in enumerate(HIPPO_CORPUS)
    ]


def test_hipporag_s_three_forms_of_evidence(tmp_path, capsys):
    """Gold by ids that were written down by hand; a title alone decides where only one passage has it."""
    questions = [
        {"question": "paragraphs?", "answer": "A", "paragraphs": paragraphs(0, 1)},
        {"id": "m", "question": "chain?", "answer": "A", "answer_aliases": ["B"], "paragraphs": paragraphs(0, 1),
         "question_decomposition": [{"paragraph_support_idx": 1}, {"paragraph_support_idx": 0}]},
        {"id": "c", "question": "contexts?", "gold_ans": ["C"], "contexts": paragraphs(3, text="text")},
        {"_id": "w", "question": "facts?", "answer": "A", "supporting_facts": [["Oslo", 0], ["Python", 0]],
         "context": [["Python", ["Made ", "by Guido."]], ["Oslo", ["Other words."]]]},
        {"_id": "x", "question": "ambiguous?", "answer": "A", "supporting_facts": [["Guido", 0]],
         "context": [["Guido", ["Not in the corpus."]]]},
        {"_id": "y", "question": "no evidence?", "answer": "A"},
    ]  # fmt: skip
    source = hippo(tmp_path / "hippo", questions)
    status, shown = convert(capsys, "hipporag", source, tmp_path / "out", "--split", "dev")
    assert status == 0, shown.err
    assert "left out 1 questions with a gold paragraph that is not in the corpus" in shown.out
    assert "left out 1 questions without supporting_facts, paragraphs or contexts" in shown.out
    asked = {r["id"]: r for r in read(tmp_path / "out" / "questions_dev.jsonl")}
    assert {key: r["gold_ids"] for key, r in asked.items()} == {
        "0": ["0", "1"], "m": ["1", "0"], "c": ["3"], "w": ["3", "0"],
    }  # fmt: skip
    assert [key for key, r in asked.items() if r.get("ordered", True)] == ["m"]
    assert asked["m"]["answers"] == ["A", "B"] and asked["c"]["answers"] == ["C"]
    assert validate(tmp_path / "out").findings == []


def test_hipporag_s_files_are_found_or_named(tmp_path, capsys):
    question = {"question": "q?", "answer": "A", "paragraphs": paragraphs(0)}
    source = hippo(tmp_path / "hippo", [question])
    assert convert(capsys, "hipporag", source / "sample.json", tmp_path / "one")[0] == 0
    assert os.listdir(tmp_path / "one").count("questions.jsonl") == 1
    hippo(source, [question], "second")
    status, shown = convert(capsys, "hipporag", source, tmp_path / "two")
    assert status == 2 and "give one of sample.json, second.json as SOURCE" in shown.err
    status, shown = convert(capsys, "hipporag", tmp_path, tmp_path / "two")
    assert status == 2 and "no NAME_corpus.json" in shown.err and not (tmp_path / "two").exists()


@pytest.fixture
def tables(tmp_path):
    pytest.importorskip("datasets")
    folder = tmp_path / "tables"
    folder.mkdir()
    rows = [("10", "Ulm", "Ulm lies on the Danube."), ("11", EMOJI, RTL), ("12", "", "")]
    (folder / "passages.csv").write_text("key,heading,body\n" + "".join(f"{a},{b},{c}\n" for a, b, c in rows))
    asked = [
        {"q": "where?", "support": [10, 11], "reply": "there"},
        {"q": "gone?", "support": [99], "reply": "no"},
        {"q": "none?", "support": [], "reply": "no"},
    ]
    (folder / "asked.jsonl").write_text("".join(json.dumps(r) + "\n" for r in asked))
    return folder


COLUMNS = ["--columns", "id=key", "title=heading", "text=body"]
ASKED = ["--question-columns", "question=q", "gold_ids=support", "answers=reply"]


def test_columns_of_a_table_are_named(tables, tmp_path, capsys):
    target = tmp_path / "out"
    arguments = [*COLUMNS, "--questions", tables / "asked.jsonl", *ASKED, "--split", "train"]
    status, shown = convert(capsys, "hf", tables / "passages.csv", target, *arguments)
    assert status == 0, shown.err
    assert "left out 1 passages with neither title nor text" in shown.out
    assert "left out 1 questions with gold that is not among the passages" in shown.out
    assert "left out 1 questions without gold" in shown.out
    assert read(target / "corpus.jsonl")[1] == {"id": "11", "title": EMOJI, "text": RTL}
    expected = [{"id": "0", "question": "where?", "gold_ids": ["10", "11"], "answers": ["there"]}]
    assert read(target / "questions_train.jsonl") == expected
    assert validate(target).count(ERROR) == 0


def test_saved_datasets_and_their_splits(tables, tmp_path, capsys):
    datasets = pytest.importorskip("datasets")
    passages = datasets.Dataset.from_dict({"id": ["a", "b"], "text": ["one", "two"]})
    passages.save_to_disk(str(tmp_path / "passages"))
    splits = {
        name: datasets.Dataset.from_dict(
            {"id": [name, "s"], "question": [f"{name}?", "Shared?"], "gold_ids": [["b", "a"], ["a"]]}
        )
        for name in ("train", "validation", "extra")
    }
    datasets.DatasetDict(splits).save_to_disk(str(tmp_path / "asked"))
    arguments = ["--questions", tmp_path / "asked"]
    status, shown = convert(capsys, "hf", tmp_path / "passages", tmp_path / "out", *arguments)
    assert status == 0 and "left out 1 splits of other names than train, validation" in shown.out
    assert "left out 1 questions of train that another split asks too" in shown.out
    assert [q.gold for q in load_dataset("custom", "train", tmp_path / "out").questions] == [(1, 0)]
    assert [q.gold for q in load_dataset("custom", "dev", tmp_path / "out").questions] == [(1, 0), (0,)]
    status, shown = convert(capsys, "hf", tmp_path / "asked", tmp_path / "two", "--columns", "text=question")
    assert status == 2 and "name that of the passages, with --hf-split" in shown.err
    assert (
        convert(
            capsys, "hf", tmp_path / "asked", tmp_path / "two", "--columns", "text=question", "--hf-split", "extra"
        )[0]
        == 0
    )
    assert validate(tmp_path / "two").count(ERROR) == 0 and os.listdir(tmp_path / "two") == ["corpus.jsonl"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--columns", "body"], "--columns 'body' is not of the form name=column"),
        (["--columns", "body=text"], "--columns body=text: it names the columns of id, title, text"),
        (["--columns", "text=no"], "passages.csv, line 2: field 'no' is missing; it has 'key', 'heading'"),
        (["--columns", "text=body", "id=no"], "field 'no' must be a string or an integer, got None"),
        (["--question-columns", "id=i"], "--question-columns is for --questions"),
        ([*COLUMNS, "--questions", "{folder}/asked.jsonl"], "there is no column 'gold_ids'; it has 'q', 'support'"),
        ([*COLUMNS, "--split", "train", "dev"], "hf questions are one split"),
    ],
)  # fmt: skip
def test_columns_that_are_not_there_are_one_line(arguments, message, tables, tmp_path, capsys):
    arguments = [argument.format(folder=tables) for argument in arguments]
    status, shown = convert(capsys, "hf", tables / "passages.csv", tmp_path / "out", *arguments)
    assert status == 2 and message in shown.err and shown.err.count("\n") == 1, shown.err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("source", ["{folder}/none.csv", "nobody/nothing", "{folder}/notes.txt"])
def test_a_source_that_cannot_be_opened_is_one_line(source, tables, tmp_path, capsys):
    (tables / "notes.txt").write_text("no table")
    status, shown = convert(capsys, "hf", source.format(folder=tables), tmp_path / "out")
    assert status == 2 and shown.err.count("\n") == 1 and not (tmp_path / "out").exists()
    assert "cannot be opened" in shown.err or "cannot tell the format" in shown.err


HOSTILE = {
    "absent": (None, "is not there: give the folder or file of hotpotqa"),
    "empty": (b"", "holds no record"),
    "cut off": (b'[{"_id": "' + b"x" * 10_000_000, "not JSON"),
    "not UTF-8": (b'[{"_id": "caf\xe9"}]', "not UTF-8"),
    "mark and line ends": (b'\xef\xbb\xbf[\r\n{"_id": 3}]\r\n', "record 1"),
}


@pytest.mark.parametrize("content, message", HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_file_is_one_line_and_writes_nothing(content, message, tmp_path, capsys):
    file = tmp_path / "file.json"
    if content is not None:
        file.write_bytes(content)
    status, shown = convert(capsys, "hotpotqa", file, tmp_path / "out", "--split", "dev")
    assert status == 2 and message in shown.err and shown.err.count("\n") == 1 and len(shown.err) < 600
    assert not (tmp_path / "out").exists()


def test_a_folder_without_the_dataset_names_what_it_looked_for(tmp_path, capsys):
    for kind in ("hotpotqa", "beir"):
        status, shown = convert(capsys, kind, tmp_path, tmp_path / "out")
        assert status == 2 and str(tmp_path) in shown.err and shown.err.count("\n") == 1


@pytest.mark.parametrize(
    ("kind", "arguments", "message"),
    [
        ("beir", ["--form", "pool"], "--form is for --from hotpotqa, musique, 2wiki"),
        ("beir", ["--columns", "id=x"], "--columns is for --from hf"),
        ("hipporag", ["--split", "train", "dev"], "hipporag questions are one split"),
    ],
)
def test_options_that_would_do_nothing_are_refused(kind, arguments, message, tmp_path, capsys):
    status, shown = convert(capsys, kind, tmp_path, tmp_path / "out", *arguments)
    assert status == 2 and message in shown.err


def small():
    return Collection(
        [{"id": "a", "title": "", "text": "x"}], {"dev": [{"id": "q", "question": "?", "gold_ids": ["a"]}]}
    )


def test_a_target_that_holds_something_is_left_as_it_is(beir, tmp_path, capsys):
    for target, name in ((tmp_path / "full", "note"), (tmp_path, "file")):
        target.mkdir(exist_ok=True)
        (target / name).write_text("mine")
    for target in (tmp_path / "full", tmp_path / "file"):
        status, shown = convert(capsys, "beir", beir, target)
        assert status == 2 and f"{target} is there already" in shown.err
        with pytest.raises(ValueError, match="is there already"):
            write_collection(small(), target)
    assert (tmp_path / "full" / "note").read_text() == (tmp_path / "file").read_text() == "mine"
    (tmp_path / "empty").mkdir()
    assert convert(capsys, "beir", beir, tmp_path / "empty")[0] == 0


def test_files_are_whole_or_not_there(tmp_path, monkeypatch):
    written = []

    def fill_the_disk(path, records):
        written.append(path.name)
        path.write_text("half a li")
        if len(written) == 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(collection, "_write_jsonl", fill_the_disk)
        with pytest.raises(OSError, match=r"cannot write .*out: No space left on device"):
            write_collection(small(), tmp_path / "out")
    assert written == ["corpus.jsonl", "questions_dev.jsonl"] and os.listdir(tmp_path) == []
    write_collection(small(), tmp_path / "out")
    assert (tmp_path / "out").stat().st_mode & 0o777 == 0o777 & ~collection._umask()


def test_a_target_that_cannot_be_made_is_one_line(beir, tmp_path, capsys, monkeypatch):
    (tmp_path / "file").write_text("")
    status, shown = convert(capsys, "beir", beir, tmp_path / "file" / "out")
    assert status == 2 and "cannot write" in shown.err and shown.err.count("\n") == 1

    def read_only(*args, **kwargs):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(collection.tempfile, "mkdtemp", read_only)
    status, shown = convert(capsys, "beir", beir, tmp_path / "out")
    assert status == 2 and "Read-only file system; free some space or choose a folder" in shown.err


def test_a_missing_package_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ImportError, match=r"pip install 'retrieval-gym\[data\]'"):
        from_hf(str(tmp_path), {})


@pytest.mark.parametrize("kind", ["hotpotqa", "2wiki", "musique"])
def test_real_data_pass(kind, real_file, tmp_path, capsys):
    assert convert(capsys, kind, real_file(kind), tmp_path / "out")[0] == 0
    assert validate(tmp_path / "out").count(ERROR) == 0
