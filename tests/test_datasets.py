import gzip
import json
import re
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from retrieval_gym import cli
from retrieval_gym.datasets import RetrievalDataset, load_dataset
from retrieval_gym.datasets.pooled import join_sentences
from retrieval_gym.datasets.readers import read_json, read_jsonl, read_parquet
from retrieval_gym.datasets.sources import report_dropped
from retrieval_gym.registration import ENVIRONMENTS

DATA = Path(__file__).parent / "data"
LOADERS = ["musique", "hotpotqa", "2wiki"]


@pytest.fixture(autouse=True)
def fresh_report() -> None:
    report_dropped.cache_clear()


def titles(dataset: RetrievalDataset, ids: object) -> list[str]:
    return [dataset.corpus[int(i)].title for i in ids]  # type: ignore[attr-defined]


def write_lines(file: Path, records: list[object]) -> Path:
    file.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return file


# MuSiQue


def test_musique_gold_follows_the_chain_by_idx(capsys: pytest.CaptureFixture[str]) -> None:
    dataset = load_dataset("musique", "dev", path=DATA)
    (question,) = dataset.questions
    assert question.id == "3hop1__d1" and question.ordered and question.answers == ("Black Sea",)
    assert titles(dataset, question.gold) == ["Einstein", "Ulm", "Danube"]  # support idx 9, 5, 4, 9
    assert question.hops == 3
    assert titles(dataset, dataset.pool(0)) == ["Ulm", "Warsaw", "Einstein", "Danube"]
    assert dataset.dropped == {"with a hop whose gold paragraph is absent": 1, "that are unanswerable": 1}
    assert capsys.readouterr().err == (
        "retrieval_gym: musique dev: left out 2 questions: "
        "1 with a hop whose gold paragraph is absent, 1 that are unanswerable\n"
    )
    load_dataset("musique", "dev", path=DATA)
    assert capsys.readouterr().err == ""  # said once


def test_musique_equal_paragraphs_are_one_and_aliases_are_answers() -> None:
    dataset = load_dataset("musique", "train", path=DATA)
    assert len(dataset.corpus) == 3 and dataset.pool(0).tolist() == [0, 1, 2]  # type: ignore[union-attr]
    assert dataset.questions[0].gold == (2, 0)
    assert dataset.questions[0].answers == ("Danube", "Donau")
    assert dataset.licence == "CC BY 4.0" and not dataset.dropped


def test_musique_unanswerable() -> None:
    dataset = load_dataset("musique", "dev", path=DATA, unanswerable=True)
    assert [q.id for q in dataset.questions] == ["3hop1__d1", "2hop__d3", "2hop__d5"]
    assert [titles(dataset, q.gold) for q in dataset.questions] == [
        ["Einstein", "Ulm", "Danube"],
        ["Warsaw"],
        ["Warsaw", "Curie"],  # the chain names Warsaw; Curie is only marked as supporting
    ]
    assert dataset.dropped == {"that are unanswerable and have no supporting paragraph": 1}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"question": None}, "line 1: field 'question' is missing"),
        ({"paragraphs": "text"}, "line 1: field 'paragraphs' must be a list, got 'text'"),
        ({"paragraphs": [{"idx": 0, "title": "T"}]}, r"line 1, paragraphs\[0\]: field 'paragraph_text' is missing"),
        ({"paragraphs": [3]}, "line 1: field 'paragraphs' must hold objects, got 3"),
        ({"question_decomposition": None}, "line 1: field 'question_decomposition' is missing"),
        *(
            ({"question_decomposition": [{"paragraph_support_idx": idx}]}, "'paragraph_support_idx' must be a int, got")
            for idx in ("0", True, [0])
        ),
        ({"answer_aliases": [1]}, "line 1: field 'answer_aliases' must hold strings, got 1"),
        ({"answerable": "yes"}, "line 1: field 'answerable' must be a bool, got 'yes'"),
        ({"paragraphs": [{"idx": 0, "title": "", "paragraph_text": ""}] * 2}, "line 1: .* the same 'idx'"),
    ],
)
def test_musique_malformed(tmp_path: Path, change: dict, message: str) -> None:
    record = json.loads((DATA / "musique/musique_ans_v1.0_train.jsonl").read_text(encoding="utf-8"))
    file = write_lines(tmp_path / "train.jsonl", [record | change])
    with pytest.raises(ValueError, match=message) as error:
        load_dataset("musique", "train", path=file)
    assert str(file) in str(error.value)


# HotpotQA and 2WikiMultihopQA


def test_hotpotqa() -> None:
    dataset = load_dataset("hotpotqa", "dev", path=DATA)
    assert [q.id for q in dataset.questions] == ["h1", "h4"]
    assert [titles(dataset, q.gold) for q in dataset.questions] == [["Einstein", "Ulm"], ["Danube", "Einstein"]]
    assert not any(q.ordered for q in dataset.questions)
    assert dataset.corpus[dataset.questions[0].gold[1]].text == "Ulm is a city. It lies on the Danube."
    assert titles(dataset, dataset.pool(1)) == ["Ulm", "Ulm", "Danube", "Einstein"]  # the second Danube is the first
    assert dataset.dropped == {
        "with a gold title that names two different paragraphs": 1,
        "with a gold title that is not among the paragraphs": 1,
    }


def test_hotpotqa_paragraph_as_one_string(tmp_path: Path) -> None:
    record = json.loads((DATA / "hotpotqa/hotpot_train_v1.1.json").read_text(encoding="utf-8"))[0]
    record["context"] = [[title, "".join(sentences)] for title, sentences in record["context"]]
    (tmp_path / "file.json").write_text(json.dumps([record]), encoding="utf-8")
    dataset = load_dataset("hotpotqa", "train", path=tmp_path / "file.json")
    assert dataset.corpus.fingerprint == load_dataset("hotpotqa", "train", path=DATA).corpus.fingerprint


def test_2wiki_order_depends_on_the_type() -> None:
    dataset = load_dataset("2wiki", "dev", path=DATA)
    assert [(titles(dataset, q.gold), q.ordered) for q in dataset.questions] == [
        (["Film", "Director"], True),
        (["Child", "Parent"], True),
        (["Film", "Other"], False),
        (["Film", "Other", "Director", "Second"], False),
    ]
    assert dataset.corpus[0].text == "Director is first. Director is second."
    assert dataset.max_gold == 4 and dataset.hops.tolist() == [2, 2, 2, 4]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"type": "riddle"}, "field 'type' must be one of .* got 'riddle'"),
        ({"supporting_facts": []}, "field 'supporting_facts' must name titles"),
        ({"supporting_facts": [[["Film"], 0]]}, "field 'supporting_facts' must name titles"),
        ({"supporting_facts": None}, "field 'supporting_facts' is missing"),
        ({"supporting_facts": ["Film"]}, "field 'supporting_facts' must be a list of pairs"),
        ({"context": {"title": ["Film"], "sentences": []}}, "field 'context' has 1 titles and 0 sentences"),
        ({"context": {"title": ["Film"]}}, "context: field 'sentences' is missing"),
        ({"context": [["Film", 3]]}, "field 'context' must hold titles and sentences"),
        ({"answer": 3}, "field 'answer' must be a str, got 3"),
        ({"_id": ""}, "field '_id' is empty"),
        ({"question": " "}, "field 'question' is empty"),
    ],
)
def test_2wiki_malformed(tmp_path: Path, change: dict, message: str) -> None:
    records = json.loads((DATA / "2wiki/dev.json").read_text(encoding="utf-8"))
    file = tmp_path / "dev.json"
    file.write_text(json.dumps([records[1], records[0] | change]), encoding="utf-8")
    with pytest.raises(ValueError, match=f"record 2.*{message}"):
        load_dataset("2wiki", "dev", path=tmp_path)


@given(st.lists(st.text(st.sampled_from("ab. \n"), max_size=6), max_size=6))
def test_join_sentences_keeps_the_words(sentences: list[str]) -> None:
    joined = join_sentences(sentences)
    assert joined.split() == " ".join(sentences).split()
    assert joined == joined.strip()


def test_join_sentences_in_both_layouts() -> None:
    assert (
        join_sentences(["One.", " Two.", " Three."]) == join_sentences(["One.", "Two.", "Three."]) == "One. Two. Three."
    )
    assert join_sentences([]) == "" and join_sentences(["", "One."]) == "One."


# The form "corpus"


@pytest.mark.parametrize("name", ["musique", "hotpotqa"])
def test_every_split_has_the_same_union(name: str) -> None:
    train, dev = (load_dataset(name, split, path=DATA, form="corpus") for split in ("train", "dev"))
    assert train.corpus.fingerprint == dev.corpus.fingerprint
    assert train.pools is None and train.pool(0) is None
    assert len(train.corpus) == len({(p.title, p.text) for p in train.corpus})


def test_union_is_every_paragraph() -> None:
    files = [DATA / f"musique/musique_ans_v1.0_{split}.jsonl" for split in ("train", "dev")]
    records = [json.loads(line) for file in files for line in file.read_text(encoding="utf-8").splitlines()]
    expected = dict.fromkeys((p["title"], p["paragraph_text"]) for r in records for p in r["paragraphs"])
    dataset = load_dataset("musique", "dev", path=DATA, form="corpus")
    assert [(p.title, p.text) for p in dataset.corpus] == list(expected)
    assert titles(dataset, dataset.questions[0].gold) == ["Einstein", "Ulm", "Danube"]


@pytest.mark.parametrize("corpus", [DATA / "custom", DATA / "custom/corpus.jsonl"])
def test_questions_beside_the_corpus(corpus: Path) -> None:
    dataset = load_dataset("2wiki", "dev", form="corpus", corpus=corpus)
    assert [(q.id, q.ordered, q.hops) for q in dataset.questions] == [("o1", True, 2), ("o2", False, 2)]
    assert [[dataset.corpus.keys[i] for i in q.gold] for q in dataset.questions] == [
        ["einstein", "ulm"],
        ["ulm", "danube"],
    ]
    assert dataset.pools is None and len(dataset.corpus) == 4 and dataset.licence == "Apache-2.0"


def test_own_questions_matched_into_another_corpus(tmp_path: Path) -> None:
    dataset = load_dataset("musique", "dev", path=DATA, form="corpus", corpus=DATA / "custom")
    (question,) = dataset.questions
    assert [dataset.corpus.keys[i] for i in question.gold] == ["einstein", "ulm", "danube"]  # white space differs
    records = [json.loads(line) for line in (DATA / "custom/corpus.jsonl").read_text(encoding="utf-8").splitlines()]
    with gzip.open(tmp_path / "corpus.jsonl.gz", "wt", encoding="utf-8") as file:
        file.writelines(json.dumps(r) + "\n" for r in records if r["id"] != "danube")
    unmatched = load_dataset("musique", "train", path=DATA, form="corpus", corpus=tmp_path)
    assert not unmatched.dropped  # its gold is Einstein and Ulm
    with pytest.raises(ValueError, match="no question is left.*with a gold paragraph that is not in the corpus': 1"):
        load_dataset("musique", "dev", path=DATA, form="corpus", corpus=tmp_path)


@pytest.mark.parametrize("name", LOADERS)
def test_bad_arguments(name: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="unknown form 'graph'"):
        load_dataset(name, "dev", path=DATA, form="graph")
    with pytest.raises(ValueError, match="needs form='corpus', got form='pool'"):
        load_dataset(name, "dev", path=DATA, corpus=DATA / "custom")
    with pytest.raises(FileNotFoundError, match="no corpus at"):
        load_dataset(name, "dev", path=DATA, form="corpus", corpus=tmp_path)


def test_joined_datasets_share_equal_passages() -> None:
    joined = load_dataset("musique+2wiki", "dev", path=DATA)
    assert len(joined) == 5 and joined.licence == "CC BY 4.0 + Apache-2.0"
    assert titles(joined, joined.questions[0].gold) == ["Einstein", "Ulm", "Danube"]


# A folder of one's own


def test_a_dataset_is_joined_once() -> None:
    with pytest.raises(ValueError, match="names 'synthetic' twice"):
        load_dataset("synthetic+synthetic")


@pytest.mark.parametrize(("name", "file"), [("musique", "musique_ans_v1.0_train.jsonl"), ("hotpotqa", None)])
def test_a_question_id_that_occurs_twice_is_refused(tmp_path: Path, name: str, file: str | None) -> None:
    source = next((DATA / name).glob(file or "*train*"))
    lines = source.read_text(encoding="utf-8")
    records = [json.loads(line) for line in lines.splitlines()] if file else json.loads(lines)
    twice = write_lines(tmp_path / "twice.jsonl", [records[0], records[0]])
    with pytest.raises(ValueError, match=r"twice.jsonl, line 2: question id .* first at .*twice.jsonl, line 1"):
        load_dataset(name, "train", path=twice)


def test_pools_must_be_arrays(pool_dataset: RetrievalDataset) -> None:
    with pytest.raises(ValueError, match=r"pool of question 'q0' must be an int64 array.*got \[0, 1, 3"):
        replace(pool_dataset, pools=[pool.tolist() for pool in pool_dataset.pools or ()])


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (r'{"id": "p9", "text": "bad \ud800 text"}', "line 1: the text has half of a surrogate pair"),
        ('{"id": ' + "9" * 5000 + ', "text": "x"}', "line 1: not readable .*4300 digits"),
    ],
)
def test_text_and_numbers_that_cannot_be_kept_are_refused(custom: Path, line: str, message: str) -> None:
    (custom / "corpus.jsonl").write_text(line + "\n", encoding="utf-8")
    with pytest.raises(ValueError, match=rf"corpus.jsonl, {message}"):
        load_dataset("custom", path=custom)


def test_half_of_a_surrogate_pair_in_an_array_is_found(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    file.write_text(r'[{"a": "\ud83c\udf0a"}, {"a": {"\uDC00": 1}}]')
    with pytest.raises(ValueError, match="a.json, record 2: the text has half of a surrogate pair"):
        list(read_json(file))


def test_a_whole_surrogate_pair_is_a_character(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text(r'{"a": "\ud83c\udf0a"}')
    assert [record for _, record in read_jsonl(file)] == [{"a": "🌊"}]


def test_a_damaged_parquet_file_is_named(tmp_path: Path) -> None:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    file = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.table({"text": [f"text {i}" for i in range(1000)]}), file)
    whole = file.read_bytes()
    footer = int.from_bytes(whole[-8:-4], "little")
    for start, stop in ((4, len(whole) - 8 - footer), (len(whole) - 8 - footer, len(whole) - 8)):
        file.write_bytes(whole[:start] + b"\xff" * (stop - start) + whole[stop:])
        with pytest.raises(ValueError, match="a.parquet is not a parquet file, or a damaged one"):
            list(read_parquet(file))


@pytest.fixture
def custom(tmp_path: Path) -> Path:
    for name in ("corpus.jsonl", "questions.jsonl"):
        shutil.copy(DATA / "custom" / name, tmp_path / name)
    return tmp_path


def test_custom_pool(custom: Path) -> None:
    dataset = load_dataset("custom", "train", path=custom)
    first, second = dataset.questions
    assert (first.id, first.gold, first.answers, first.ordered) == ("1", (0, 1), ("Danube",), True)
    assert (second.id, second.gold, second.answers, second.ordered) == ("two", (2,), (), False)
    assert [dataset.pool(i).tolist() for i in range(2)] == [[1, 2, 0], [2, 3]]  # type: ignore[union-attr]
    assert dataset.pool(0).dtype == np.int64  # type: ignore[union-attr]
    assert dataset.corpus[2].title == "" and dataset.corpus.keys == ["einstein", "ulm", "3", "danube"]


def test_custom_forms(custom: Path) -> None:
    assert load_dataset("custom", path=custom, form="corpus").pools is None
    records = [json.loads(line) for line in (custom / "questions.jsonl").read_text().splitlines()]
    del records[1]["pool_ids"]
    write_lines(custom / "questions.jsonl", records)
    for form in (None, "pool"):
        with pytest.raises(ValueError, match="question 'two' has no pool_ids"):
            load_dataset("custom", path=custom, form=form)
    del records[0]["pool_ids"]
    write_lines(custom / "questions.jsonl", records)
    assert load_dataset("custom", path=custom).pools is None
    with pytest.raises(ValueError, match="unknown form 'graph'"):
        load_dataset("custom", path=custom, form="graph")


def test_custom_which_file_serves_which_split(custom: Path) -> None:
    question = {"id": "q", "question": "?", "gold_ids": ["ulm"]}
    for split in ("train", "dev", "test"):
        assert len(load_dataset("custom", split, path=custom)) == 2  # questions.jsonl serves all
    write_lines(custom / "dev.jsonl", [question | {"id": "short name"}])
    assert load_dataset("custom", "dev", path=custom).questions[0].id == "short name"
    with pytest.raises(FileNotFoundError, match=r"train.*questions\.jsonl is not read because dev\.jsonl"):
        load_dataset("custom", "train", path=custom)
    file = write_lines(custom / "questions_dev.jsonl", [question | {"id": "long name"}])
    assert load_dataset("custom", "dev", path=custom).questions[0].id == "long name"
    (custom / "questions_train.jsonl.gz").write_bytes(gzip.compress(file.read_bytes()))
    assert load_dataset("custom", "train", path=custom).questions[0].id == "long name"


def test_custom_missing(tmp_path: Path, custom: Path) -> None:
    with pytest.raises(ValueError, match="needs path="):
        load_dataset("custom")
    with pytest.raises(FileNotFoundError, match="is not a folder"):
        load_dataset("custom", path=tmp_path / "absent")
    (custom / "questions.jsonl").unlink()
    with pytest.raises(FileNotFoundError, match="no questions for split 'dev'"):
        load_dataset("custom", "dev", path=custom)
    (custom / "corpus.jsonl").unlink()
    with pytest.raises(FileNotFoundError, match="no corpus at"):
        load_dataset("custom", path=custom)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"gold_ids": ["rome"]}, "gold_ids 'rome' is not in .*corpus.jsonl"),
        ({"pool_ids": ["rome"]}, "pool_ids 'rome' is not in .*corpus.jsonl"),
        ({"gold_ids": []}, "field 'gold_ids' is empty"),
        ({"gold_ids": None}, "field 'gold_ids' is missing"),
        ({"gold_ids": "ulm"}, "field 'gold_ids' must be a list, got 'ulm'"),
        ({"gold_ids": [True]}, "field 'gold_ids' must be a string or an integer, got True"),
        ({"gold_ids": ["ulm", "ulm"]}, "gold_ids 'ulm' occurs twice"),
        ({"pool_ids": [3, "3"]}, "pool_ids '3' occurs twice"),
        ({"gold_ids": ["danube"], "pool_ids": ["ulm"]}, "gold id 'danube' is not in pool_ids"),
        ({"id": None}, "field 'id' must be a string or an integer, got None"),
        ({"id": 1}, "question id '1' occurs twice, first at .*line 1"),
        ({"question": None}, "field 'question' is missing"),
        ({"question": "  "}, "field 'question' is empty"),
        ({"answers": "Danube"}, "field 'answers' must be a list, got 'Danube'"),
        ({"ordered": 1}, "field 'ordered' must be a bool, got 1"),
    ],
)
def test_custom_malformed_question(custom: Path, change: dict, message: str) -> None:
    records = [json.loads(line) for line in (custom / "questions.jsonl").read_text().splitlines()]
    write_lines(custom / "questions.jsonl", [records[0], records[1] | change])
    with pytest.raises(ValueError, match=rf"questions\.jsonl, line 2: {message}"):
        load_dataset("custom", path=custom)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"id": "ulm"}, "passage id 'ulm' occurs twice, first at .*line 2"),
        ({"id": 1.5}, "field 'id' must be a string or an integer, got 1.5"),
        ({"text": None}, "field 'text' is missing"),
        ({"title": 3}, "field 'title' must be a str, got 3"),
        ({"text": " "}, "passage '3' has neither title nor text"),
    ],
)
def test_custom_malformed_passage(custom: Path, change: dict, message: str) -> None:
    records = [json.loads(line) for line in (custom / "corpus.jsonl").read_text().splitlines()]
    write_lines(custom / "corpus.jsonl", [*records[:2], records[2] | change])
    with pytest.raises(ValueError, match=rf"corpus\.jsonl, line 3: {message}"):
        load_dataset("custom", path=custom)


@pytest.mark.parametrize("name", ["corpus.jsonl", "questions.jsonl"])
def test_custom_empty_file(custom: Path, name: str) -> None:
    (custom / name).write_text("\n")
    with pytest.raises(ValueError, match=f"{name} is empty"):
        load_dataset("custom", path=custom)


# Real data


def test_real_musique_gold_is_what_is_marked_supporting(real_file: Callable[[str], Path]) -> None:
    file = real_file("musique/musique_ans_v1.0_dev.jsonl")
    records = {r["id"]: r for r in map(json.loads, file.read_text(encoding="utf-8").splitlines())}
    dataset = load_dataset("musique", "dev", path=file)
    assert len(dataset) + sum(dataset.dropped.values()) == len(records)
    for i, question in enumerate(dataset.questions):
        record = records[question.id]
        marked = {(p["title"], p["paragraph_text"]) for p in record["paragraphs"] if p["is_supporting"]}
        assert {(p.title, p.text) for p in map(dataset.corpus.__getitem__, question.gold)} == marked
        assert question.hops == int(re.match(r"\d", question.id).group())  # type: ignore[union-attr]
        pool = [(p.title, p.text) for p in map(dataset.corpus.__getitem__, dataset.pool(i))]  # type: ignore[arg-type]
        assert pool == list(dict.fromkeys((p["title"], p["paragraph_text"]) for p in record["paragraphs"]))


def test_real_hotpotqa_gold_titles(real_file: Callable[[str], Path]) -> None:
    file = real_file("hotpotqa/hotpot_dev_distractor_v1.json")
    records = {r["_id"]: r for r in json.loads(file.read_text(encoding="utf-8"))}
    dataset = load_dataset("hotpotqa", "dev", path=file)
    assert len(dataset) + sum(dataset.dropped.values()) == len(records)
    for question in dataset.questions:
        assert set(titles(dataset, question.gold)) == {t for t, _ in records[question.id]["supporting_facts"]}


def test_real_2wiki_order_is_that_of_the_evidence(real_file: Callable[[str], Path]) -> None:
    file = real_file("2wiki/dev.json")
    records = {r["_id"]: r for r in json.loads(file.read_text(encoding="utf-8"))}
    dataset = load_dataset("2wiki", "dev", path=file)
    compared = 0
    for question in dataset.questions:
        kind, evidences = records[question.id]["type"], records[question.id]["evidences"]
        assert question.ordered == (kind in {"compositional", "inference"})
        assert len(question.gold) == (4 if kind == "bridge_comparison" else 2)
        subjects, gold = [subject for subject, _, _ in evidences], titles(dataset, question.gold)
        if question.ordered and set(gold) <= set(subjects):
            assert gold == sorted(gold, key=subjects.index)
            compared += 1
    assert compared > 50


@pytest.mark.parametrize("name", ["musique", "2wiki"])
def test_real_open_corpus(real_file: Callable[[str], Path], name: str) -> None:
    corpus, file = real_file("open/corpus.jsonl.gz"), real_file(f"open/{name}_dev.jsonl")
    start = time.perf_counter()
    dataset = load_dataset(name, "dev", form="corpus", corpus=corpus.parent)
    seconds = time.perf_counter() - start
    records = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    assert [[dataset.corpus.keys[i] for i in q.gold] for q in dataset.questions] == [r["gold_ids"] for r in records]
    assert len(dataset.corpus) == 40_026
    assert seconds < 15


# The subcommand


def test_datasets_command_with_data(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("RETRIEVAL_GYM_DATA", str(DATA))
    assert cli.main(["datasets", "--json"]) == 0
    rows = {row["id"]: row for row in json.loads(capsys.readouterr().out)}
    assert list(rows) == list(ENVIRONMENTS)
    assert rows["ChainRetrieval-HotpotQA-v0"] == {
        "id": "ChainRetrieval-HotpotQA-v0",
        "dataset": "hotpotqa",
        "steps": 2,
        "pool": 4,
        "questions": {"train": 1, "dev": 2},
        "passages": {"train": 3, "dev": 4},
        "licence": "CC BY-SA 4.0",
        "found": str(DATA),
    }
    union = len(load_dataset("musique", "dev", path=DATA, form="corpus").corpus)
    assert rows["ChainRetrieval-MuSiQueOpen-v0"]["passages"] == {"train": union, "dev": union}
    assert rows["ChainRetrieval-2Wiki-v0"]["questions"] == {"dev": 4}
    assert cli.main(["datasets"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[1 : len(ENVIRONMENTS) + 1]] == list(ENVIRONMENTS)


def test_datasets_command_without_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("RETRIEVAL_GYM_DATA", raising=False)
    monkeypatch.setenv("RETRIEVAL_GYM_CACHE", str(tmp_path))
    assert cli.main(["datasets"]) == 0
    out = capsys.readouterr().out
    assert out.count("not found") == 11 and "ChainRetrieval-2WikiOpen-v0" in out  # ten ids and the remedy


def test_datasets_command_says_what_does_not_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(DATA / "2wiki", tmp_path / "2wiki")
    records = json.loads((DATA / "2wiki/dev.json").read_text(encoding="utf-8"))
    for record in records:  # the official test file has no labels
        record |= {"supporting_facts": [], "answer": ""}
    (tmp_path / "2wiki/test.json").write_text(json.dumps(records), encoding="utf-8")
    monkeypatch.setenv("RETRIEVAL_GYM_DATA", str(tmp_path))
    monkeypatch.setenv("RETRIEVAL_GYM_CACHE", str(tmp_path / "cache"))
    assert cli.main(["datasets", "--json"]) == 0
    captured = capsys.readouterr()
    rows = {row["id"]: row for row in json.loads(captured.out)}
    assert (
        rows["ChainRetrieval-2Wiki-v0"]["questions"] == rows["ChainRetrieval-2WikiOpen-v0"]["questions"] == {"dev": 4}
    )
    assert captured.err.count("2wiki test (pool) does not load") == 1 and "an unlabelled file has none" in captured.err
