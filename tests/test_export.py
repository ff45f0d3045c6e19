"""``retrieval_gym export``: what leaves a run is, in other software, what the run was."""

import errno
import importlib.util
import json
import os
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
from small_runs import LONG, TOKENS, lora_run, save_data  # noqa: E402
from tiny import bert, save_encoder  # noqa: E402

from retrieval_gym import load_dataset  # noqa: E402
from retrieval_gym.cli import main  # noqa: E402
from retrieval_gym.nn import export  # noqa: E402
from retrieval_gym.nn.export import export_run, largest_difference  # noqa: E402
from retrieval_gym.nn.index import ExactIndex  # noqa: E402
from retrieval_gym.nn.run import Run  # noqa: E402
from retrieval_gym.nn.text_retriever import Hit, load_retriever  # noqa: E402
from retrieval_gym.nn.trained import load_run  # noqa: E402

EXAMPLES = Path(__file__).parents[1] / "examples"
QUESTIONS = ["Where was Curie born?", "Into which sea? 🌊", "إلى أي بحر يصب النهر؟"]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return save_data(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def corpus(data):
    return load_dataset("custom", "train", data).corpus


@pytest.fixture(scope="module")
def run(tmp_path_factory, data):
    return lora_run(tmp_path_factory.mktemp("runs"), env_kwargs=[f"path={data}"])


@pytest.fixture(scope="module")
def exported(run, corpus, tmp_path_factory):
    pytest.importorskip("faiss")
    pytest.importorskip("pyarrow")
    target = tmp_path_factory.mktemp("exported") / "export"
    return export_run(run, target, corpus=corpus, formats=["npy", "faiss", "arrow"], adapter=True)


def theirs(folder, texts, prompt):
    model = pytest.importorskip("sentence_transformers").SentenceTransformer(str(folder), device="cpu")
    return model.encode(texts, prompt_name=prompt)


def test_sentence_transformers_gives_the_run_s_own_vectors(exported, run, data, corpus):
    """Of questions and states by the run's query side, and of passages, of which the run cuts one."""
    dataset = load_dataset("custom", "train", data)
    played = load_run(run, dataset)
    passages = theirs(exported.directory / "passage_encoder", corpus.texts(range(len(corpus))), "document")
    np.testing.assert_allclose(passages, played._index.vectors.numpy(), atol=1e-5)
    assert len(LONG.split()) > TOKENS and exported.truncated == 1
    states = played.encode_states(_states(dataset, [[], [0], [3, 1]]))
    texts = ["\n".join([dataset.questions[0].text, *corpus.texts(picked)]) for picked in ([], [0], [3, 1])]
    queries = theirs(exported.directory / "query_encoder", texts, "query")
    np.testing.assert_allclose(queries, states.numpy(), atol=1e-5)
    assert np.abs(theirs(exported.directory / "passage_encoder", texts, "query") - queries).max() > 1e-2


def _states(dataset, picks):
    from retrieval_gym import mdp

    states = mdp.dataset_states(dataset, np.zeros(len(picks), np.int64), 2)
    for row, picked in enumerate(picks):
        states.picked[row, : len(picked)] = picked
    return states


def test_the_difference_is_measured(exported, tmp_path):
    folder = exported.directory / "query_encoder"
    assert largest_difference(exported.query_encoder, folder, QUESTIONS, "query") < 1e-5
    assert largest_difference(exported.query_encoder, save_encoder(tmp_path / "other"), QUESTIONS, "query") > 1e-2


def test_the_adapter_on_the_passage_encoder_is_the_query_encoder(exported):
    transformers = pytest.importorskip("sentence_transformers")
    model = transformers.SentenceTransformer(str(exported.directory / "passage_encoder"), device="cpu")
    before = model.encode(QUESTIONS, prompt_name="query")
    model.load_adapter(str(exported.directory / "adapter"))
    after = model.encode(QUESTIONS, prompt_name="query")
    np.testing.assert_allclose(after, theirs(exported.directory / "query_encoder", QUESTIONS, "query"), atol=1e-5)
    assert np.abs(after - before).max() > 1e-2


def test_vectors_and_ids_stand_in_one_order_in_every_format(exported, corpus):
    faiss, arrow = pytest.importorskip("faiss"), pytest.importorskip("pyarrow")
    folder = exported.directory
    records = [json.loads(line) for line in (folder / "passages.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [r["id"] for r in records] == list(corpus.keys)
    assert [(r["title"], r["text"]) for r in records] == [(p.title, p.text) for p in corpus]
    vectors = np.load(folder / "vectors.npy")
    texts = corpus.texts(range(len(corpus)))
    np.testing.assert_allclose(vectors, theirs(folder / "passage_encoder", texts, "document"), atol=1e-5)
    index = faiss.read_index(str(folder / "vectors.faiss"))
    np.testing.assert_array_equal(index.reconstruct_n(0, index.ntotal), vectors)
    queries = exported.query_encoder.encode(QUESTIONS).numpy()
    scores, _ = index.search(queries, 3)
    _, expected = ExactIndex(vectors).search(queries, 3)
    np.testing.assert_allclose(scores, expected.numpy(), atol=1e-5)
    with arrow.ipc.open_file(str(folder / "vectors.arrow")) as file:
        table = file.read_all()
    assert [table[name].to_pylist() for name in ("id", "title", "text")] == [
        [r[name] for r in records] for name in ("id", "title", "text")
    ]
    np.testing.assert_array_equal(np.array(table["vector"].to_pylist(), np.float32), vectors)
    assert table.schema.field("vector").type == arrow.list_(arrow.float32(), vectors.shape[1])


def test_batches_of_an_arrow_file_join(exported, corpus, tmp_path, monkeypatch):
    arrow = pytest.importorskip("pyarrow")
    monkeypatch.setattr(export, "ARROW_ROWS", 4)
    vectors = np.load(exported.directory / "vectors.npy")
    export._write_arrow(tmp_path / "v.arrow", vectors, corpus)
    with arrow.ipc.open_file(str(tmp_path / "v.arrow")) as file:
        assert file.num_record_batches == 3 and file.read_all()["id"].to_pylist() == list(corpus.keys)


def test_the_description_names_what_a_reader_needs(exported, run, corpus):
    described = json.loads((exported.directory / "export.json").read_text())
    assert described["run"] == run.name and described["corpus"] == corpus.fingerprint
    assert described["prompts"] == {"query": "query: ", "document": "passage: "}
    assert described["unit_length"] == {"query": True, "passage": True} and described["dim"] == 32
    assert described["passage_tokens"] == described["question_tokens"] == TOKENS
    assert described["vectors"] == ["vectors.npy", "vectors.faiss", "vectors.arrow"]
    assert set(exported.files) == {
        "adapter/", "query_encoder/", "passage_encoder/", "export.json", "passages.jsonl", "vectors.npy",
        "vectors.faiss", "vectors.arrow",
    }  # fmt: skip


@pytest.fixture(scope="module")
def q_run(tmp_path_factory):
    """A finished run as pqn.py leaves it, as far as its encoders go."""
    config = dict(
        env="ChainRetrieval-Custom-v0", env_kwargs=[], positions="none", order="pick", autocast=True,
        question_tokens=TOKENS, passage_tokens=100,
    )  # fmt: skip
    made = Run.create(tmp_path_factory.mktemp("q"), "ChainRetrieval-Custom-v0", "pqn", 1, config)
    bert("cls", hidden=32, heads=()).save(made.directory / "state_encoder")
    bert("mean", hidden=32, heads=(), seed=1).save(made.directory / "action_encoder")
    made.save("best", {"q": {}, "update": 1})
    return made.directory


def test_both_encoders_of_a_q_run_are_exported(q_run, corpus, tmp_path):
    exported = export_run(q_run, tmp_path / "out", corpus=corpus, formats=["npy"])
    assert largest_difference(exported.query_encoder, tmp_path / "out" / "query_encoder", QUESTIONS, "query") < 1e-5
    texts = corpus.texts(range(len(corpus)))
    vectors = np.load(tmp_path / "out" / "vectors.npy")
    np.testing.assert_allclose(vectors, theirs(tmp_path / "out" / "passage_encoder", texts, "document"), atol=1e-5)
    described = json.loads((tmp_path / "out" / "export.json").read_text())
    assert described["trained_with_autocast"] and described["unit_length"] == {"query": False, "passage": False}
    with pytest.raises(ValueError, match="trained whole encoders, so there is no adapter"):
        export_run(q_run, tmp_path / "two", adapter=True)
    assert not (tmp_path / "two").exists()


def command(capsys, *arguments):
    status = main(["export", *map(str, arguments), "--device", "cpu"])
    return status, capsys.readouterr()


def test_the_command_exports_what_the_run_was_trained_on(run, corpus, tmp_path, capsys):
    status, shown = command(capsys, run, tmp_path / "out", "--npy")
    assert status == 0, shown.err
    assert f"{len(corpus)} passages, 1 distinct ones cut after {TOKENS} tokens" in shown.out
    assert f"{tmp_path / 'out'}/vectors.npy" in shown.out and "gives the same vectors within" in shown.out
    small = tmp_path / "small.jsonl"
    small.write_text('{"id": "x", "text": "one"}\n')
    (tmp_path / "other").mkdir()
    assert command(capsys, run, tmp_path / "other", "--npy", "--path", small)[0] == 0
    assert np.load(tmp_path / "other" / "vectors.npy").shape == (1, 32)
    status, shown = command(capsys, run, tmp_path / "bare")
    assert status == 0 and sorted(os.listdir(tmp_path / "bare")) == ["export.json", "passage_encoder", "query_encoder"]


def test_a_missing_package_is_named(run, corpus, tmp_path, monkeypatch):
    for name, extra in (("faiss", "cpu"), ("pyarrow", "data")):
        monkeypatch.setitem(sys.modules, name, None)
        with pytest.raises(ImportError, match=rf"pip install 'retrieval-gym\[{extra}\]'"):
            export_run(run, tmp_path / "out", corpus=corpus, formats=["faiss" if name == "faiss" else "arrow"])
    assert os.listdir(tmp_path) == []


def test_nothing_is_left_of_an_export_that_failed(run, corpus, tmp_path, monkeypatch):
    def full(*args):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setitem(export.WRITERS, "npy", full)
    with pytest.raises(OSError, match=r"cannot write .*out: No space left on device"):
        export_run(run, tmp_path / "out", corpus=corpus, formats=["npy"])
    assert os.listdir(tmp_path) == []


def test_what_cannot_be_exported_is_one_line(run, q_run, corpus, tmp_path, capsys):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").write_text("")
    (tmp_path / "file").write_text("")
    unfinished = Path(shutil.copytree(run, tmp_path / "unfinished"))
    shutil.rmtree(unfinished / "query_encoder")
    placed = lora_run(tmp_path / "placed", positions="relative")
    for arguments, message in (
        ([run, tmp_path / "full"], "full is there already: name a new folder"),
        ([run, tmp_path / "file"], "file is there already"),
        ([run, tmp_path / "file" / "out"], "cannot write"),
        ([tmp_path / "none", tmp_path / "out"], "no run folder"),
        ([tmp_path / "full", tmp_path / "out"], "is not a run folder"),
        ([unfinished, tmp_path / "out"], "has no query_encoder: finish the run first"),
        ([q_run, tmp_path / "out", "--adapter"], "trained whole encoders"),
        ([run, tmp_path / "out", "--path", tmp_path], "--path and --env name the passages of --npy"),
        ([run, tmp_path / "out", "--npy", "--split", "dev"], "--split and --env-kwargs are for --env"),
        ([run, tmp_path / "out", "--npy", "--path", tmp_path / "gone"], "no corpus at"),
    ):
        status, shown = command(capsys, *arguments)
        assert status == 2 and message in shown.err and shown.err.count("\n") == 1, shown.err
        assert not (tmp_path / "out").exists()
    with pytest.raises(ValueError, match="positions='relative': a passage's vector depends on its place"):
        export_run(placed, tmp_path / "out", corpus=corpus, formats=["npy"])
    with pytest.raises(ValueError, match="format 'npy' needs a corpus"):
        export_run(run, tmp_path / "out", formats=["npy"])
    with pytest.raises(ValueError, match="unknown format 'csv'"):
        export_run(run, tmp_path / "out", corpus=corpus, formats=["csv"])


def example(name):
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_langchain_gets_the_chain_as_documents(run, data):
    pytest.importorskip("langchain_core")
    found = load_retriever(run, data, device="cpu").chain(QUESTIONS[0], 3).hits
    retriever = example("langchain_retriever").ChainRetriever(
        retriever=load_retriever(run, data, device="cpu"), steps=3
    )
    documents = retriever.invoke(QUESTIONS[0])
    assert [document.id for document in documents] == [hit.id for hit in found]
    assert [document.page_content for document in documents] == [hit.text for hit in found]
    assert [document.metadata["score"] for document in documents] == [hit.score for hit in found]


def test_qdrant_walks_the_same_chain(run, data, tmp_path, capsys):
    pytest.importorskip("qdrant_client")
    module = example("qdrant_search")
    # Without the passage that the run cuts inside a state.
    short = [line for line in (data / "corpus.jsonl").read_text(encoding="utf-8").splitlines() if LONG not in line]
    (tmp_path / "corpus.jsonl").write_text("\n".join(short), encoding="utf-8")
    assert main(["export", str(run), str(tmp_path / "out"), "--npy", "--path", str(tmp_path), "--device", "cpu"]) == 0
    arguments = [str(tmp_path / "out"), *QUESTIONS, "--run", str(run), "--path", str(tmp_path)]
    assert module.main(module.parse(arguments)) == 0
    assert capsys.readouterr().out.count("the same chain as ours") == len(QUESTIONS)
    hit = Hit("a", "", "", 0.5)
    assert module.agree([({}, 0.5)], [hit]) and not module.agree([({}, 0.501)], [hit]) and not module.agree([], [hit])
