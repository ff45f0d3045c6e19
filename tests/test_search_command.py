"""``retrieval_gym search`` and the retriever of plain strings below it."""

import json
import os

import numpy as np
import pytest

torch = pytest.importorskip("torch")
from small_runs import TOKENS, lora_run, save_data, train  # noqa: E402

from retrieval_gym import load_dataset  # noqa: E402
from retrieval_gym.chains import final_ranking, greedy_chain, single_search  # noqa: E402
from retrieval_gym.cli import main  # noqa: E402
from retrieval_gym.datasets import Corpus  # noqa: E402
from retrieval_gym.nn.encoder import TextEncoder  # noqa: E402
from retrieval_gym.nn.text_retriever import TextRetriever, load_retriever  # noqa: E402
from retrieval_gym.nn.trained import load_run  # noqa: E402
from retrieval_gym.ranking import rank  # noqa: E402


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return save_data(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return lora_run(tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module")
def retriever(run, data):
    return load_retriever(run, data, device="cpu")


def by_hand(run, corpus, question, steps, cut=TOKENS):
    """A greedy chain by argmax over whole texts; ids and scores."""
    query, passage = TextEncoder.load(run / "query_encoder"), TextEncoder.load(run / "passage_encoder")
    vectors = torch.cat([passage.encode([str(p)], "passage", max_tokens=cut) for p in corpus])
    state, ids, scores = question, [], []
    for _ in range(steps):
        values = (query.encode([state])[0] @ vectors.T).numpy()
        values[ids] = -np.inf
        ids.append(int(values.argmax()))
        scores.append(float(values.max()))
        state += "\n" + str(corpus[ids[-1]])
    return [corpus.keys[i] for i in ids], scores


@pytest.mark.parametrize("question", ["Where was Curie born?", "Into which sea? 🌊", "إلى أي بحر يصب النهر؟"])
def test_a_chain_is_that_of_the_whole_texts(question, retriever, run):
    chain = retriever.chain(question, steps=2)
    ids, scores = by_hand(run, retriever.corpus, question, 2)
    assert [hit.id for hit in chain.hits] == ids and chain.question == question
    np.testing.assert_allclose([hit.score for hit in chain.hits], scores, atol=1e-5)
    place = retriever.corpus.ids[ids[0]]
    assert (chain.hits[0].title, chain.hits[0].text) == (
        retriever.corpus[place].title,
        retriever.corpus[place].text,
    )


def test_a_search_ranks_the_corpus_and_stops_at_its_end(retriever, run):
    found, again = retriever.search(["Where was Curie born?", "Which river?"], k=50)
    assert sorted(hit.id for hit in found) == sorted(retriever.corpus.keys) and len(again) == len(found)
    scores = [hit.score for hit in found]
    assert scores == sorted(scores, reverse=True)
    ids, best = by_hand(run, retriever.corpus, "Where was Curie born?", 1)
    assert found[0].id == ids[0] and found[0].score == pytest.approx(best[0], abs=1e-5)
    assert retriever.search([]) == [] and retriever.chains([]) == []


def test_the_ranking_is_that_of_the_scorer(retriever, run, data):
    dataset = load_dataset("custom", "train", data)
    chains = greedy_chain(load_run(run, dataset), dataset, np.arange(len(dataset)), 2, depth=6)
    expected = final_ranking(chains, 6)
    found = retriever.chains([question.text for question in dataset.questions], 2, k=6)
    for row, chain in enumerate(found):
        assert [hit.id for hit in chain.ranking] == [dataset.corpus.keys[i] for i in expected[row]]
        assert chain.ranking[:2] == chain.hits
        for hit in chain.ranking[2:]:
            places = chains.step_ids[row] == dataset.corpus.ids[hit.id]
            assert hit.score == pytest.approx(chains.step_scores[row][places].max(), abs=1e-6)


class Falling:
    """Scores passage i by -i / 8, and every passage 1 less for each pick; the fourth search likes passage 4."""

    def __init__(self, dataset):
        self.places = np.arange(len(dataset.corpus))

    def search(self, states, k):
        liked = 10 * ((self.places == 4) & (states.count[:, None] == 3))
        return rank(states, liked - self.places / 8 - states.count[:, None], k)


def test_a_threshold_ends_the_chain_before_the_first_pick_below_it():
    falling = TextRetriever(Corpus([""] * 5, list("abcde")), Falling)
    chain = falling.chain("q", 4, threshold=-1.5, k=9)
    assert [(hit.id, hit.text, hit.score) for hit in chain.hits] == [("0", "a", 0), ("1", "b", -1.125)]
    assert chain.stopped_at == -2.25
    # Three searches were made; the fourth, which would have liked passage 4, was not.
    assert [(hit.id, hit.score) for hit in chain.ranking[2:]] == [("2", -0.25), ("3", -0.375), ("4", -0.5)]
    assert chain.ranking[:2] == chain.hits
    whole = falling.chain("q", 4)
    assert [hit.id for hit in whole.hits] == ["0", "1", "2", "4"] and whole.stopped_at is None
    nothing = falling.chain("q", 4, threshold=1)
    assert nothing.hits == () and nothing.stopped_at == 0


def test_a_chain_ends_with_the_corpus(run):
    small = load_retriever(run, Corpus(["", ""], ["one", "two"]), device="cpu")
    chain = small.chain("which?", steps=5, k=9)
    assert sorted(hit.id for hit in chain.hits) == ["0", "1"] and chain.stopped_at is None
    assert chain.ranking == chain.hits


def test_a_question_asked_again_is_tokenised_once(retriever, monkeypatch):
    retriever.search(["asked before"])
    calls = []
    monkeypatch.setattr(TextEncoder, "tokenize", lambda *args, **kwargs: calls.append(args))
    assert len(retriever.search(["asked before"], 3)[0]) == 3 and calls == []


@pytest.mark.parametrize("agent", ["infonce", "pao", "pqn"])
def test_every_agent_s_run_answers_strings_as_the_scorer_played_it(agent, tmp_path, data, capsys):
    finished = train(agent, tmp_path, data)
    dataset = load_dataset("custom", "train", data)
    asked = np.arange(len(dataset))
    played = load_run(finished, dataset)
    chains, singles = greedy_chain(played, dataset, asked, 3), single_search(played, dataset, asked, 1, depth=4)
    answering = load_retriever(finished, dataset, device="cpu", cache_dir=tmp_path / "embeddings")
    questions = [question.text for question in dataset.questions]
    for row, chain in enumerate(answering.chains(questions, 3)):
        assert [hit.id for hit in chain.hits] == [dataset.corpus.keys[i] for i in chains.picked[row]]
        np.testing.assert_allclose([hit.score for hit in chain.hits], chains.scores[row], atol=1e-5)
    for row, found in enumerate(answering.search(questions, 4)):
        assert [hit.id for hit in found] == [dataset.corpus.keys[i] for i in singles.step_ids[row, 0]]
    capsys.readouterr()
    command = ["search", questions[0], "--path", str(data), "--run", str(finished), "--device", "cpu"]
    assert main([*command, "--steps", "3", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["picked"] == [dataset.corpus.keys[i] for i in chains.picked[0]]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda r: r.search("one string"), "must be a list of strings, got 'one string'"),
        (lambda r: r.search([3]), "must be a list of strings"),
        (lambda r: r.search(["  "]), "a question is blank"),
        (lambda r: r.search(["q"], 0), "k is 0: ask for at least 1 passage"),
        (lambda r: r.chain("q", 0), "steps must be a whole number from 1"),
        (lambda r: r.chain("q", 2, float("nan")), "threshold is NaN"),
        (lambda r: r.chain("q", 2, k=-1), "k is -1"),
    ],
)
def test_what_cannot_be_asked_is_said(call, message, retriever):
    with pytest.raises(ValueError, match=message):
        call(retriever)


def test_a_run_that_scores_by_positions_is_refused(tmp_path, data):
    with pytest.raises(ValueError, match="positions='relative'.*a corpus does not have"):
        load_retriever(lora_run(tmp_path, positions="relative"), data)


def ask(capsys, *arguments):
    status = main(["search", *map(str, arguments), "--device", "cpu"])
    return status, capsys.readouterr()


def test_steps_scores_and_the_ranking_are_printed(run, data, retriever, capsys):
    status, shown = ask(capsys, "Which river?", "--path", data, "--run", run, "--steps", 2, "-k", 4)
    chain = retriever.chain("Which river?", 2, k=4)
    lines = shown.out.splitlines()
    assert status == 0 and lines[0] == "Which river?" and lines[3] == "  ranking, the first 4:"
    for line, hit in zip(lines[1:3] + lines[4:8], [*chain.hits, *chain.ranking], strict=True):
        assert line.split()[1:3] == [f"{hit.score:.4f}", f"[{hit.id}]"]
    status, shown = ask(capsys, "Which river?", "--path", data, "--run", run, "--threshold", 1e9)
    assert "stopped: the next pick scores" in shown.out and "below the threshold 1000000000.0" in shown.out


def test_questions_come_from_text_and_from_json_lines(run, data, tmp_path, capsys):
    text, table = tmp_path / "asked.txt", tmp_path / "asked.jsonl"
    text.write_bytes("\ufeffWhere was Curie born?\r\n\r\nאיזה נהר? 🌊\r\n".encode())
    table.write_text('{"id": "q3", "question": "Where was Curie born?"}\n{"question": "Which river?"}\n')
    where = ["--path", data / "corpus.jsonl", "--run", run, "--json"]
    status, shown = ask(capsys, "First?", "--questions", text, *where)
    records = [json.loads(line) for line in shown.out.splitlines()]
    assert status == 0 and [r["question"] for r in records] == ["First?", "Where was Curie born?", "איזה נהר? 🌊"]
    assert all(len(r["picked"]) == 4 and "ranking" not in r for r in records)
    assert [p["id"] for p in records[1]["passages"]] == records[1]["picked"]
    log = tmp_path / "log.jsonl"
    _, shown = ask(capsys, "--questions", table, *where)
    log.write_text(shown.out.splitlines()[0] + "\n")
    assert json.loads(shown.out.splitlines()[1]).get("id") is None
    diagnosed = ["diagnose", "--env", "ChainRetrieval-Custom-v0", "--env-kwargs", f"path={data}", "--chains", str(log)]
    assert main(diagnosed) == 0


def test_an_encoder_answers_as_the_retriever_dense_does(run, data, capsys):
    passage = str(run / "passage_encoder")
    status, shown = ask(capsys, "Where was Curie born?", "--path", data, "--encoder", passage, "--json", "--steps", 2)
    retriever = TextRetriever.from_encoder(passage, data, device="cpu")
    assert status == 0
    assert json.loads(shown.out)["picked"] == [h.id for h in retriever.chain("Where was Curie born?", 2).hits]
    env = ["--env", "ChainRetrieval-Custom-v0", "--env-kwargs", f"path={data}", "max_steps=3", "--encoder", passage]
    status, shown = ask(capsys, "Where was Curie born?", *env, "--json")
    assert status == 0 and len(json.loads(shown.out)["picked"]) == 3


def hostile(folder):
    files = {"empty.txt": b"", "latin.txt": "Où?\n".encode("latin-1"), "broken.jsonl": b'{"question": "a"}\n{"que\n'}
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return folder


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "there is nothing to ask"),
        ([" "], "a question is blank"),
        (["q", "--steps", "0"], "--steps must be a whole number from 1"),
        (["q", "--threshold", "nan"], "--threshold is nan"),
        (["q", "-k", "0"], "-k must be at least 1"),
        (["q", "--encoder", "e"], "--encoder is not for --run"),
        (["q", "--split", "dev"], "--split is for --env"),
        (["--questions", "{folder}/none.txt"], "none.txt"),
        (["--questions", "{folder}/empty.txt"], "is empty: it needs one question a line"),
        (["--questions", "{folder}/latin.txt"], "not UTF-8"),
        (["--questions", "{folder}/broken.jsonl"], "broken.jsonl, line 2: not JSON"),
        (["--questions", "{folder}"], "is a folder: give a file"),
    ],
)
def test_bad_input_is_one_line(arguments, message, run, data, tmp_path, capsys):
    hostile(tmp_path)
    arguments = [argument.format(folder=tmp_path) for argument in arguments]
    status, shown = ask(capsys, *arguments, "--path", data, "--run", run)
    assert status == 2 and message in shown.err and shown.err.count("\n") == 1, shown.err


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "no corpus at"),
        (b"", "corpus.jsonl is empty"),
        (b'{"id": "a", "text": "caf\xe9"}\n', "corpus.jsonl, line 1: not UTF-8"),
        (b'{"id": "a", "text": "' + b"x" * 10_000_000, "corpus.jsonl, line 1: not JSON"),
        (b'{"id": "a", "text": "x"}\n{"id": "a", "text": "y"}\n', "line 2: passage id 'a' occurs twice, first at"),
    ],
)
def test_a_hostile_corpus_is_one_line(content, message, run, tmp_path, capsys):
    if content is not None:
        (tmp_path / "corpus.jsonl").write_bytes(content)
    status, shown = ask(capsys, "q", "--path", tmp_path, "--run", run)
    assert status == 2 and message in shown.err and shown.err.count("\n") == 1 and len(shown.err) < 600


def test_no_run_and_an_unfinished_one_are_named(run, data, tmp_path, capsys):
    status, shown = ask(capsys, "q", "--path", data, "--run", tmp_path / "none")
    assert status == 2 and f"no run folder {tmp_path / 'none'}" in shown.err
    unfinished = lora_run(tmp_path)
    os.rename(unfinished / "query_encoder", tmp_path / "away")
    status, shown = ask(capsys, "q", "--path", data, "--run", unfinished)
    assert status == 2 and "has no query_encoder: finish the run first" in shown.err
