import gzip
import json
import re

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env
from test_sources import hub  # noqa: F401  (a fixture)

from retrieval_gym.cli import main
from retrieval_gym.datasets import Corpus, Question, RetrievalDataset, load_dataset
from retrieval_gym.datasets.load import join_datasets
from retrieval_gym.datasets.sources import SOURCES, report_dropped

CORPUS = [
    {"_id": "d1", "title": "Ulm", "text": "Ulm lies on the Danube."},
    {"_id": "d2", "title": "", "text": "Warsaw lies on the Vistula."},
    {"_id": 3, "text": "The Nile ends in the Mediterranean.", "metadata": {"url": "x"}},
    {"_id": "d4", "title": "", "text": " "},
    {"_id": "d5", "title": "Ulm", "text": "Ulm lies on the Danube."},
]
QUERIES = [
    {"_id": "q1", "text": "Where is Ulm?"},
    {"_id": "q2", "text": "Where is Warsaw?"},
    {"_id": "q3", "text": "Which rivers?"},
    {"_id": "q4", "text": "Nothing relevant?"},
    {"_id": "q5", "text": "All missing?"},
    {"_id": "q6", "text": "Not asked here?"},
]
JUDGMENTS = [
    ("q3", "3", 1), ("q3", "d1", 2), ("q3", "d2", 0), ("q3", "d9", 3), ("q2", "d2", 1), ("q1", "d5", 1),
    ("q4", "d1", 0), ("q4", "d2", -1), ("q5", "d9", 1), ("q9", "d1", 1), ("q1", "d5", 1),
]  # fmt: skip


@pytest.fixture
def empty(monkeypatch, tmp_path):
    """No data folder and an empty cache."""
    for name in ("RETRIEVAL_GYM_DATA", "RETRIEVAL_GYM_HUB_REVISION"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RETRIEVAL_GYM_CACHE", str(tmp_path / "cache"))


def jsonl(rows):
    return "".join(json.dumps(row) + "\n" for row in rows)


def tsv(judgments, header=True):
    lines = ["query-id\tcorpus-id\tscore"] if header else []
    return "\n".join([*lines, *("\t".join(map(str, judgment)) for judgment in judgments)]) + "\n"


def write(folder, **files):
    """Write the three files, or what is given in place of one; names ending in _gz are compressed."""
    (folder / "qrels").mkdir(parents=True, exist_ok=True)
    contents = {"corpus": jsonl(CORPUS), "queries": jsonl(QUERIES), "dev": tsv(JUDGMENTS)} | files
    for name, text in contents.items():
        if text is None:
            continue
        kind = name.removesuffix("_gz")
        file = folder / (f"{kind}.jsonl" if kind in ("corpus", "queries") else f"qrels/{kind}.tsv")
        data = text if isinstance(text, bytes) else text.encode()
        if name.endswith("_gz"):
            file, data = file.with_name(file.name + ".gz"), gzip.compress(data)
        file.write_bytes(data)
    return folder


def test_a_folder_by_hand(tmp_path, capsys):
    report_dropped.cache_clear()
    dataset = load_dataset("beir", "dev", path=write(tmp_path / "rivers"))
    assert (dataset.name, dataset.split, dataset.pools) == ("rivers", "dev", None)
    assert list(dataset.corpus.keys) == ["d1", "d2", "3", "d5"]
    assert [(p.title, p.text) for p in dataset.corpus][2] == ("", "The Nile ends in the Mediterranean.")
    assert dataset.questions == [
        Question("q1", "Where is Ulm?", (3,), hops=1, ordered=False),
        Question("q2", "Where is Warsaw?", (1,), hops=1, ordered=False),
        Question("q3", "Which rivers?", (2, 0), hops=1, ordered=False, grades=(1, 2)),
    ]
    assert dataset.dropped == {
        "that have no relevant passage": 1,
        "whose relevant passages are all missing from the corpus": 1,
        "that this split does not ask": 1,
        "judgments given twice": 1,
        "judgments of passages that are not in the corpus": 2,
        "judgments of questions that are not among the queries": 1,
        "passages with neither title nor text": 1,
    }
    assert dataset.gold.tolist() == [[0, -1], [1, -1], [2, 0]]  # d5 reads as d1
    assert dataset.grades.tolist() == [[1, 0], [1, 0], [1, 2]]
    err = capsys.readouterr().err
    assert "rivers dev: left out 3 questions: " in err and "1 that have no relevant passage" in err
    assert "left out 4 judgments: 1 given twice" in err and "left out 1 passages: 1 with neither title nor text" in err


@pytest.mark.parametrize(
    "files",
    [
        {"dev": tsv(JUDGMENTS, header=False)},
        {"dev": "".join(f"{q} 0 {d} {grade}\n" for q, d, grade in JUDGMENTS)},
        {"dev": "\ufeff" + tsv(JUDGMENTS).replace("\n", "\r\n") + "\r\n"},
        {"corpus": None, "queries": None, "dev": None, "corpus_gz": jsonl(CORPUS), "queries_gz": jsonl(QUERIES),
         "dev_gz": tsv(JUDGMENTS)},
    ],
    ids=["no header", "trec", "bom and crlf", "gz"],
)  # fmt: skip
def test_other_forms_read_alike(tmp_path, files):
    plain = load_dataset("beir", "dev", path=write(tmp_path / "plain"))
    other = load_dataset("beir", "dev", path=write(tmp_path / "other", **files))
    assert other.questions == plain.questions and other.dropped == plain.dropped
    assert other.corpus.fingerprint == plain.corpus.fingerprint


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"dev": "qid\tpid\trel\nq1\td1\t1\n"}, "dev.tsv, line 1: must be the header 'query-id corpus-id score'"),
        ({"dev": "query-id\tcorpus-id\n"}, "dev.tsv, line 1: must be the header"),
        ({"dev": "q1\t0\td1\tx\t1\n"}, "dev.tsv, line 1: must be the header"),
        ({"dev": tsv([("q1", "d1", 1), ("q1", "d2")])}, "dev.tsv, line 3: has 2 columns where the first line has 3"),
        ({"dev": tsv([("q1", "d1", "1.5")])}, "dev.tsv, line 2: must be a question, a passage and a grade"),
        ({"dev": tsv([("q1", "d1", "١")])}, "dev.tsv, line 2: must be a question, a passage and a grade"),
        ({"dev": tsv([("", "d1", 1)])}, "dev.tsv, line 2: must be a question"),
        ({"dev": "q1 0 d1 1\nq1 7 d2 1\n"}, "dev.tsv, line 2: the second of TREC's four columns must be 0 or Q0"),
        ({"dev": "q1 d1 7 1\n"}, "dev.tsv, line 1: the second of TREC's four columns"),
        ({"dev": tsv([("q1", "d1", 1), ("q1", "d1", 2)])}, "line 3: passage 'd1' of question 'q1' has grade 2"),
        ({"dev": tsv([])}, "dev.tsv holds no judgment"),
        ({"dev": ""}, "dev.tsv holds no judgment"),
        ({"dev": tsv([("q1", "d1", 1)]).encode() + b"q\xff2\td1\t1\n"}, "dev.tsv, line 3: not UTF-8"),
        ({"dev": tsv([("q1", "d1", 0)])}, "dev.tsv: no question of split 'dev' is left"),
        ({"corpus": jsonl([{"title": "x", "text": "y"}])}, "corpus.jsonl, line 1: field '_id' must be"),
        ({"corpus": jsonl([*CORPUS, {"_id": "d1", "text": "y"}])}, "line 6: passage id 'd1' occurs twice, first at "),
        ({"corpus": jsonl([{"_id": "d1"}])}, "corpus.jsonl, line 1: field 'text' is missing"),
        ({"corpus": jsonl([{"_id": "d1", "text": ""}])}, "corpus.jsonl: no passage has a title or a text"),
        ({"corpus": "{]\n"}, "corpus.jsonl, line 1: not JSON"),
        ({"queries": jsonl([*QUERIES, QUERIES[0]])}, "queries.jsonl, line 7: query _id 'q1' occurs twice"),
        ({"queries": jsonl([{"_id": "q1", "text": " "}])}, "queries.jsonl, line 1: field 'text' is empty"),
    ],
)  # fmt: skip
def test_malformed_files_are_named(tmp_path, files, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        load_dataset("beir", "dev", path=write(tmp_path, **files))


def test_a_broken_gzip_is_named(tmp_path):
    write(tmp_path, dev=None)
    (tmp_path / "qrels/dev.tsv.gz").write_bytes(gzip.compress(tsv(JUDGMENTS).encode())[:-9])
    with pytest.raises(ValueError, match=r"dev\.tsv\.gz is not a whole gzip file"):
        load_dataset("beir", "dev", path=tmp_path)


def test_missing_files_say_what_is_there(tmp_path):
    with pytest.raises(ValueError, match="'beir' needs path="):
        load_dataset("beir", "dev")
    with pytest.raises(FileNotFoundError, match="absent is not a folder"):
        load_dataset("beir", "dev", path=tmp_path / "absent")
    write(tmp_path, dev=None, train=tsv(JUDGMENTS), test=tsv(JUDGMENTS))
    for name in ("beir", "scifact"):
        with pytest.raises(FileNotFoundError, match="no qrels of split 'dev'.* there are train and test"):
            load_dataset(name, "dev", path=tmp_path)
    (tmp_path / "corpus.jsonl").unlink()
    with pytest.raises(FileNotFoundError, match=r"no corpus\.jsonl"):
        load_dataset("beir", "test", path=tmp_path)
    with pytest.raises(FileNotFoundError, match="none of any split"):
        load_dataset("beir", "test", path=write(tmp_path / "bare", dev=None))


def test_named_sources_are_searched_in_order(tmp_path, monkeypatch, empty):
    write(tmp_path / "data" / "scifact")
    monkeypatch.setenv("RETRIEVAL_GYM_DATA", str(tmp_path / "data"))
    expected = load_dataset("beir", "dev", path=tmp_path / "data" / "scifact")
    for path in (None, tmp_path / "data", tmp_path / "data" / "scifact"):
        dataset = load_dataset("scifact", "dev", path=path)
        assert dataset.name == "scifact" and dataset.questions == expected.questions
        assert dataset.licence == SOURCES["scifact"].licence
    with pytest.raises(FileNotFoundError) as error:
        load_dataset("scifact", "test")
    for part in ("scifact/qrels/test.tsv", f"{tmp_path / 'data'} (has dev)", "hf download BeIR/scifact-qrels test.tsv"):
        assert part in str(error.value)
    monkeypatch.delenv("RETRIEVAL_GYM_DATA")
    with pytest.raises(FileNotFoundError, match="No labelled dev split is published.*split='train' or split='test'"):
        load_dataset("scifact", "dev")
    with pytest.raises(FileNotFoundError, match=r"msmarco/qrels/dev\.tsv.*BeIR/msmarco-qrels"):
        load_dataset("msmarco", "dev")


def test_the_hub_gives_qrels_and_texts_from_two_repositories(hub, empty, tmp_path, monkeypatch):  # noqa: F811
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    local = write(tmp_path / "data" / "scifact")  # another split's texts must not be mixed with the Hub's qrels
    (local / "queries.jsonl").write_text(jsonl(QUERIES[:1]))
    monkeypatch.setenv("RETRIEVAL_GYM_DATA", str(tmp_path / "data"))
    hub.put("scifact", "test.tsv", tsv(JUDGMENTS).encode())
    columns = {"_id": "", "title": "", "text": ""}
    for kind, rows in (("corpus", CORPUS), ("queries", QUERIES)):
        table = [{key: str(row.get(key, default)) for key, default in columns.items()} for row in rows]
        parquet.write_table(pyarrow.Table.from_pylist(table), tmp_path / kind)
        hub.put("scifact_texts", f"{kind}/{kind}-00000-of-00001.parquet", (tmp_path / kind).read_bytes())
    fetched = load_dataset("scifact", "test")
    expected = load_dataset("beir", "dev", path=write(tmp_path / "official"))
    assert fetched.questions == expected.questions and fetched.dropped == expected.dropped
    assert fetched.corpus.fingerprint == expected.corpus.fingerprint
    assert fetched.source == f"hf://datasets/BeIR/scifact-qrels@{SOURCES['scifact'].hub_revision}"
    assert len(hub.fetched) == 3
    assert load_dataset("scifact", "test").questions == expected.questions and len(hub.fetched) == 3


def test_files_of_the_hub_in_one_folder(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    folder = tmp_path / "scifact"
    for kind, rows in (("corpus", CORPUS), ("queries", QUERIES)):
        (folder / kind).mkdir(parents=True)
        table = [{key: str(row.get(key, "")) for key in ("_id", "title", "text")} for row in rows]
        parquet.write_table(pyarrow.Table.from_pylist(table), folder / kind / f"{kind}-00000-of-00001.parquet")
    (folder / "test.tsv").write_text(tsv(JUDGMENTS))
    expected = load_dataset("beir", "dev", path=write(tmp_path / "official"))
    for path in (folder, tmp_path):
        assert load_dataset("scifact", "test", path=path).questions == expected.questions


def test_grades_are_checked():
    with pytest.raises(ValueError, match="'q' has 1 grades for 2 gold passages"):
        Question("q", "?", (0, 1), grades=(1,))
    for bad in (0, -1, 1.0, True):
        with pytest.raises(ValueError, match="is not a whole number from 1"):
            Question("q", "?", (0,), grades=(bad,))


def test_joining_keeps_grades_and_the_largest_of_copies():
    def part(name, texts, *questions):
        return RetrievalDataset(name, "dev", Corpus([""] * len(texts), texts), list(questions))

    a = part("a", ["x", "y"], Question("a", "?", (1, 0), hops=1, ordered=False, grades=(1, 3)))
    copies = Question("b", "?", (0, 1, 2), hops=1, ordered=False, grades=(3, 2, 1))
    b = part("b", ["y", "z", "y"], copies, Question("c", "?", (0, 2)))
    joined = join_datasets([a, b])
    assert [(q.gold, q.grades, q.hops) for q in joined.questions] == [
        ((1, 0), (1, 3), 1), ((1, 2), (3, 2), 1), ((1,), (), 2),
    ]  # fmt: skip
    assert b.grades.tolist() == [[3, 2], [1, 0]] and joined.grades.tolist() == [[1, 3], [3, 2], [1, 0]]
    later = part("later", ["y", "y"], Question("d", "?", (0, 1), hops=1, ordered=False, grades=(1, 2)))
    assert later.grades.tolist() == [[2]] and join_datasets([a, later]).questions[1].grades == (2,)
    with pytest.raises(ValueError):
        joined.grades[0, 0] = 9


def test_the_beir_environment(tmp_path, recwarn):
    path = str(write(tmp_path, train=tsv(JUDGMENTS)))
    env = gym.make("ChainRetrieval-BEIR-v0", path=path)
    check_env(env.unwrapped)
    for action, reward in ((0, 1.0), (2, 1.0), (1, 0.0), (3, 1.0)):  # passage 3 reads as passage 0
        env.reset(options={"question": 2})
        _, got, terminated, _, _ = env.step(action)
        assert (got, terminated) == (reward, True)
    envs = gym.make_vec("ChainRetrieval-BEIR-v0", num_envs=3, path=path, split="dev")
    assert envs.reset(seed=0)[0] in envs.observation_space
    assert not [str(warning.message) for warning in recwarn]
    with pytest.raises(ValueError, match="'beir' needs path="):
        gym.make("ChainRetrieval-BEIR-v0")


def test_commands_play_one_step(tmp_path, capsys):
    path = write(tmp_path / "rivers")
    arguments = ["--env", "ChainRetrieval-BEIR-v0", "--env-kwargs", f"path={path}", "--retriever", "oracle"]
    assert main(["evaluate", *arguments]) == 0
    out = capsys.readouterr().out
    assert "dataset: rivers" in out and "steps: 1" in out and "that have no relevant passage: 1" in out
    assert main(["diagnose", *arguments]) == 0
    assert "rivers" in capsys.readouterr().out
    play = ["play", "ChainRetrieval-BEIR-v0", "--split", "dev", "--agent", "random"]
    assert main([*play, "--env-kwargs", f"path={path}"]) == 0
    assert "Question" in capsys.readouterr().out


@pytest.mark.parametrize(("split", "questions", "most"), [("train", 809, 5), ("dev", 150, 4)])
def test_real_scifact(real_file, split, questions, most):
    dataset = load_dataset("scifact", split, path=real_file("scifact"))
    assert (len(dataset), len(dataset.corpus), dataset.max_gold) == (questions, 5183, most)
    assert set(dataset.hops) == {1} and dataset.grades.max() == 1
    assert dataset.dropped["that this split does not ask"] == 959 - questions
    lines = (real_file("scifact") / "qrels" / f"{split}.tsv").read_text().splitlines()[1:]
    assert (dataset.gold >= 0).sum() == len(set(lines))
    question = dataset.questions[0]
    assert f"{question.id}\t{dataset.corpus.keys[question.gold[0]]}\t1" in lines


def test_the_scifact_environment_on_real_data(real_file, recwarn):
    env = gym.make("ChainRetrieval-SciFact-v0", path=str(real_file("scifact")))
    check_env(env.unwrapped)
    dataset = env.get_wrapper_attr("dataset")
    several = int(np.argmax((dataset.gold >= 0).sum(axis=1)))
    env.reset(options={"question": several})
    assert env.step(int(dataset.gold[several, 1]))[1:3] == (1.0, True)
    assert not [str(warning.message) for warning in recwarn]


def test_the_datasets_command_counts_scifact(tmp_path, empty, monkeypatch, capsys):
    write(tmp_path / "data" / "scifact", train=tsv(JUDGMENTS[:1]))
    monkeypatch.setenv("RETRIEVAL_GYM_DATA", str(tmp_path / "data"))
    assert main(["datasets", "--json"]) == 0
    captured = capsys.readouterr()
    rows = {row["id"]: row for row in json.loads(captured.out)}
    assert rows["ChainRetrieval-SciFact-v0"] == {
        "id": "ChainRetrieval-SciFact-v0",
        "dataset": "scifact",
        "steps": 1,
        "pool": None,
        "questions": {"train": 1, "dev": 3},
        "passages": {"train": 4, "dev": 4},
        "licence": SOURCES["scifact"].licence,
        "found": str(tmp_path / "data"),
    }
    assert rows["ChainRetrieval-MSMARCO-v0"]["found"] is None and "does not load" not in captured.err
    assert rows["ChainRetrieval-BEIR-v0"]["found"] == "where path= says"
