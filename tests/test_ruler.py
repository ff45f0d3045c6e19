import hashlib
import json
import re
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env
from gymnasium.vector import AutoresetMode
from test_babilong import count
from test_vector_env import make_pair, play_both

from retrieval_gym import RetrievalDataset, cli, load_dataset
from retrieval_gym.datasets.background import load_background
from retrieval_gym.datasets.ruler_needles import KINDS, ROLES, draw_key
from retrieval_gym.datasets.synthetic.draws import Draws
from retrieval_gym.registration import ENVIRONMENTS

NIAH = {
    "single": "ChainRetrieval-NIAHSingle-v0",
    "multikey": "ChainRetrieval-NIAHMultiKey-v0",
    "multivalue": "ChainRetrieval-NIAHMultiValue-v0",
    "multiquery": "ChainRetrieval-NIAHMultiQuery-v0",
}
NEEDLE = re.compile(r"One of the special magic (words|numbers|uuids) for (\S+) is: (\S+)\.")
ONE = re.compile(r"What is the special magic (word|number|uuid) for (\S+) mentioned in the provided text\?")
ALL = re.compile(r"What are all the special magic (words|numbers|uuids) for (.+) mentioned in the provided text\?")
SMALL = {"context_tokens": 1_000, "num_questions": 8}


def needles(texts: list[str]) -> list[list[tuple[str, str, str]]]:
    return [NEEDLE.findall(text) for text in texts]


@pytest.fixture
def squad(tmp_path: Path) -> Path:
    """Three articles of four paragraphs, each asked about once or twice; one question has no answer."""
    articles = []
    for a in "ABC":
        paragraphs = []
        for p in range(4):
            qas = [
                {"id": f"{a}{p}", "question": f" What of {a}{p}? ", "answers": [{"text": f"x{p}", "answer_start": 0}]}
            ]
            if p == 0:
                qas.append({"id": f"{a}none", "question": "What else?", "answers": [], "is_impossible": True})
            paragraphs.append({"context": f"Paragraph {p} of {a} " + "and so on " * (p + 3), "qas": qas})
        articles.append({"title": f"The_{a}", "paragraphs": paragraphs})
    path = tmp_path / "squad.json"
    path.write_text(json.dumps({"version": "1", "data": articles}, indent=1))
    return path


@pytest.fixture
def hotpot(tmp_path: Path) -> Path:
    """Six questions with five paragraphs each, two of them gold."""
    records = []
    for q in range(6):
        context = [[f"Title {q} {p}", [f"Text {p} of {q}.", " More of it."]] for p in range(5)]
        facts = [[f"Title {q} 3", 0], [f"Title {q} 1", 1]]
        records.append(
            {"_id": f"q{q}", "question": f"Which {q}?", "answer": "x", "context": context, "supporting_facts": facts}
        )
    path = tmp_path / "hotpot.json"
    path.write_text(json.dumps(records))
    return path


# Environments


def settings_of(env_id: str, squad: Path, hotpot: Path) -> dict:
    if "RulerQA" in env_id:
        return {"context_tokens": 120, "path": str(squad if "QA1" in env_id else hotpot)}
    return dict(SMALL)


RULER = [*NIAH.values(), "ChainRetrieval-RulerQA1-v0", "ChainRetrieval-RulerQA2-v0"]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("env_id", RULER)
def test_check_env(env_id: str, squad: Path, hotpot: Path) -> None:
    check_env(gym.make(env_id, **settings_of(env_id, squad, hotpot)).unwrapped)


@pytest.mark.parametrize("env_id", RULER)
def test_the_vector_environment_equals_single_ones(env_id: str, squad: Path, hotpot: Path) -> None:
    kwargs = {**ENVIRONMENTS[env_id], **settings_of(env_id, squad, hotpot)}
    native, sync = make_pair(3, AutoresetMode.SAME_STEP, **kwargs)
    assert play_both(native, sync, np.random.default_rng(1), 10, seed=5) > 4
    assert gym.make_vec(env_id, num_envs=2, **settings_of(env_id, squad, hotpot)).num_envs == 2


@pytest.mark.parametrize("env_id", RULER)
def test_episodes_differ_and_evaluation_does_not(env_id: str, squad: Path, hotpot: Path) -> None:
    env = gym.make(env_id, **settings_of(env_id, squad, hotpot))
    dataset, options = env.get_wrapper_attr("dataset"), {"question": 3}
    mixed = [env.reset(seed=seed, options=options)[1]["candidates"] for seed in (0, 1, 0)]
    assert np.array_equal(mixed[0], mixed[2]) and not np.array_equal(mixed[0], mixed[1])
    again = gym.make(env_id, **settings_of(env_id, squad, hotpot)).get_wrapper_attr("dataset")
    assert np.array_equal(dataset.pool(3), dataset.pool(3)) and np.array_equal(dataset.pool(3), again.pool(3))
    assert dataset.fingerprint == again.fingerprint


def test_the_same_seed_makes_the_same_documents_on_every_machine() -> None:
    digest = hashlib.sha256()
    for task in NIAH:
        dataset = load_dataset(f"niah-{task}", "dev", **SMALL)
        for i in range(len(dataset)):
            digest.update("\n".join([dataset.questions[i].text, *dataset.corpus.texts(dataset.pool(i))]).encode())
    assert digest.hexdigest() == "302b114609c2d5dd3f9d071af0447da06741f632bc5d1552270e8cd64927c746"


# Needles


@pytest.mark.parametrize("haystack", ["generated", "noise", "needles"])
@pytest.mark.parametrize("task", NIAH)
def test_gold_passages_hold_the_needles_asked_for_and_no_others_do(task: str, haystack: str) -> None:
    dataset = load_dataset(f"niah-{task}", "train", haystack=haystack, **SMALL)
    count_of = {"single": 1, "multikey": 4, "multivalue": 4, "multiquery": 4}[task]
    for i, question in enumerate(dataset.questions):
        single, many = ONE.fullmatch(question.text), ALL.fullmatch(question.text)
        assert (many if task in ("multivalue", "multiquery") else single) is not None
        asked = single[2].split() if single else re.split(", and |, ", many[2])  # type: ignore[index]
        assert len(set(asked)) == len(asked) == (4 if task == "multiquery" else 1)
        assert not question.ordered or len(question.gold) == 1
        for pool in (dataset.pool(i), dataset.pool(i, np.random.default_rng(i))):
            found = needles(dataset.corpus.texts(pool))
            holding = {int(p) for p, told in zip(pool, found, strict=True) if any(key in asked for _, key, _ in told)}
            assert holding == set(question.gold)
            values = {value for told in found for _, key, value in told if key in asked}
            assert values == set(question.answers) and len(values) == (4 if task in ("multivalue", "multiquery") else 1)
            if haystack != "needles":
                assert sum(map(len, found)) == count_of
                keys = {key for told in found for _, key, _ in told}
                assert len(keys) == (1 if task in ("single", "multivalue") else 4)


def test_needle_chunks_read_like_the_haystack() -> None:
    dataset = load_dataset("niah-single", "train", **SMALL)
    hidden = set(load_background("generated", "train", 0, 64).sentences)
    places = set()
    for question in dataset.questions:
        text = dataset.corpus[question.gold[0]].text
        before, told, after = re.split(f"({NEEDLE.pattern.replace('(', '(?:')})", text)
        assert told and count([told], 123) <= 64
        around = [part.strip() for part in (before, after) if part.strip()]
        assert around and all(any(part.startswith(s) for s in hidden) for part in around)
        places.add((bool(before), bool(after)))
    assert len(places) > 1


@pytest.mark.parametrize("keys", KINDS)
@pytest.mark.parametrize("values", KINDS)
def test_keys_and_values_are_what_is_asked_for(keys: str, values: str) -> None:
    forms = {
        "words": r"[a-z]+-[a-z]+",
        "numbers": r"[1-9]\d{6}",
        "uuids": r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}",
    }
    dataset = load_dataset("niah-multikey", keys=keys, values=values, haystack="noise", chunk_tokens=96, **SMALL)
    told = [needle for found in needles(dataset.corpus.texts(dataset.pool(0))) for needle in found]
    assert len(told) == 4
    for kind, key, value in told:
        assert kind == values and re.fullmatch(forms[keys], key) and re.fullmatch(forms[values], value)


@pytest.mark.parametrize("kind", ["words", "numbers"])
def test_no_key_has_two_roles(kind: str) -> None:
    drawn = [{draw_key(kind, role, Draws(i)) for i in range(400)} for role in ROLES]
    assert sum(map(len, drawn)) == len(set().union(*drawn)) > 1_000


def test_chunks_cut_the_haystack_and_documents_have_the_tokens_asked_for(tmp_path: Path) -> None:
    sentences = [f"Sentence {'x ' * (i % 7)}number {i}." for i in range(60)]
    (tmp_path / "a.txt").write_text(" ".join(sentences))
    for chunk_tokens in (24, 40):
        dataset = load_dataset(
            "niah-multivalue", haystack=str(tmp_path / "a.txt"), chunk_tokens=chunk_tokens, context_tokens=600
        )
        texts = [passage.text for passage in dataset.corpus]
        base = texts.index(texts[0], 1) if texts.count(texts[0]) > 1 else len(texts) - 4 * len(dataset)
        assert " ".join(texts[:base]) == " ".join(sentences)
        sizes = [count(re.findall(r"Sentence [^.]*\.", text), 106) for text in texts[:base]]
        assert max(sizes) <= chunk_tokens
        # A chunk ends where the next sentence does not fit.
        firsts = [count([re.findall(r"Sentence [^.]*\.", text)[0]], 106) for text in texts[1:base]]
        assert all(size + first > chunk_tokens for size, first in zip(sizes[:-1], firsts, strict=True))
        for i in range(5):
            told = [NEEDLE.sub("", text) for text in dataset.corpus.texts(dataset.pool(i))]
            used = sum(count(re.findall(r"Sentence [^.]*\.", text), 106) for text in told) + 4 * 17
            assert 600 - chunk_tokens < used <= 600


def test_noise_is_the_five_sentences_over_and_over() -> None:
    dataset = load_dataset("niah-single", haystack="noise", **SMALL)
    five = ["The grass is green.", "The sky is blue.", "The sun is yellow.", "Here we go.", "There and back again."]
    pool = [i for i in dataset.pool(0) if i not in dataset.questions[0].gold]
    said = re.findall(r"[A-Z][^.]*\.", " ".join(dataset.corpus.texts(pool)))
    first = five.index(said[0])
    assert said == [five[(first + i) % 5] for i in range(len(said))] and len(said) > 100


# Questions over documents


@pytest.mark.parametrize("context", [60, 120, 250, 2_000])
def test_ruler_qa1_asks_one_paragraph_among_its_article_and_others(squad: Path, context: int) -> None:
    dataset = load_dataset("ruler-qa1", path=squad, context_tokens=context)
    assert len(dataset) == 12 and dataset.dropped == {"without an answer": 3}
    for i, question in enumerate(dataset.questions):
        letter, number = question.text[8], question.text[9]
        assert question.text == f"What of {letter}{number}?" and question.answers == (f"x{number}",)
        for pool in (dataset.pool(i), dataset.pool(i, np.random.default_rng(i))):
            assert len(np.unique(pool)) == len(pool) <= dataset.max_pool
            texts = dataset.corpus.texts(pool)
            gold = [f"Paragraph {number} of {letter} " in text for text in texts]
            assert [int(p) for p, g in zip(pool, gold, strict=True) if g] == list(question.gold) and sum(gold) == 1
            sizes = [count([text], 110) for text in texts]
            assert context - 45 < sum(sizes) <= context
            if context >= 250:
                assert sum(f" of {letter} " in text for text in texts) == 4  # the whole article fits


def test_ruler_qa2_holds_the_questions_paragraphs_and_others(hotpot: Path) -> None:
    for context in (70, 150, 900):
        dataset = load_dataset("ruler-qa2", path=hotpot, context_tokens=context)
        for i, question in enumerate(dataset.questions):
            pool = dataset.pool(i)
            titles = [dataset.corpus[j].title for j in pool]
            assert len(np.unique(pool)) == len(pool)
            assert [t for t in sorted(titles) if t.startswith(f"Title {i} ")] == [f"Title {i} {p}" for p in range(5)]
            assert [dataset.corpus[g].title for g in question.gold] == [f"Title {i} 3", f"Title {i} 1"]
            assert not question.ordered and question.hops == 2
            assert context - 12 < count(dataset.corpus.texts(pool), 110) <= context
            if context == 900:
                assert len(pool) > 30 and len({t for t in titles if not t.startswith(f"Title {i}")}) == 25


def test_where_gold_stands_says_nothing(hotpot: Path) -> None:
    dataset = load_dataset("ruler-qa2", path=hotpot, context_tokens=150)
    rng = np.random.default_rng(0)
    orders, places = set(), []
    for _ in range(300):
        pool = dataset.pool(0, rng)
        at = [int(np.flatnonzero(pool == g)[0]) for g in dataset.questions[0].gold]
        orders.add(at[0] < at[1])
        places += [(p + 0.5) / len(pool) for p in at]
    assert orders == {True, False} and abs(np.mean(places) - 0.5) < 0.06


def test_real_hotpotqa(real_file) -> None:
    real_file("hotpotqa")
    dataset = load_dataset("ruler-qa2", "dev", context_tokens=16_000, num_questions=20)
    for i in range(0, 20, 5):
        pool = dataset.pool(i)
        assert set(dataset.questions[i].gold) <= set(pool.tolist())
        assert 15_000 < count(dataset.corpus.texts(pool), 110) <= 16_000


# Arguments


@pytest.mark.parametrize(
    ("name", "kwargs", "message"),
    [
        ("niah-single", {"path": "x"}, "path='x': needles are generated; give .* haystack=PATH"),
        ("niah-single", {"keys": "colours"}, "keys='colours': choose one of words, numbers, uuids"),
        ("niah-single", {"values": 3}, "values=3: choose one of"),
        ("niah-single", {"num_needles": 2}, "num_needles=2: give a whole number from 1 to 1"),
        ("niah-multikey", {"chunk_tokens": 0}, "chunk_tokens=0"),
        ("niah-multikey", {"chunk_tokens": 8, "haystack": "noise"}, "chunk_tokens=8: a needle has up to 17 tokens"),
        ("niah-multikey", {"context_tokens": 100.5}, "context_tokens=100.5"),
        ("niah-multikey", {"task": "single"}, "takes no option 'task'"),
        ("ruler-qa1", {"num_questions": 0}, "num_questions=0"),
    ],
)
def test_arguments_that_mean_nothing_are_refused(name: str, kwargs: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_dataset(name, **kwargs)


@pytest.mark.parametrize("name", ["niah-multiquery", "ruler-qa1", "ruler-qa2"])
def test_a_context_too_small_names_the_smallest_that_fits(name: str, squad: Path, hotpot: Path) -> None:
    def load(context: int) -> RetrievalDataset:
        if name == "niah-multiquery":
            return load_dataset(name, haystack="noise", num_questions=8, context_tokens=context)
        return load_dataset(name, path=squad if name == "ruler-qa1" else hotpot, context_tokens=context)

    with pytest.raises(ValueError, match=f"context_tokens=3 is too small for {name}") as error:
        load(3)
    one, every = (int(n) for n in re.findall(r"question (?:is )?(\d+)", str(error.value)))
    with pytest.raises(ValueError, match="too small"):
        load(one - 1)
    assert 0 < len(load(one)) <= len(load(every))
    if one < every:
        assert len(load(one)) < len(load(every))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("x", "not JSON"),
        ("[]", "must be a JSON object with 'data'"),
        ("{}", "field 'data' is missing"),
        ('{"data": [3]}', "field 'data' must hold objects"),
        ('{"data": [{"paragraphs": [{"qas": []}]}]}', "article 1, paragraph 1: field 'context' is missing"),
        ('{"data": []}', "holds no question"),
        (
            '{"data": [{"paragraphs": [{"context": "c", "qas": [{"id": "a", "question": "", '
            '"answers": [{"text": "c"}]}]}]}]}',
            "field 'question' is empty",
        ),
    ],
)
def test_a_malformed_squad_file_is_named(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "s.json").write_text(content)
    with pytest.raises(ValueError, match=message) as error:
        load_dataset("ruler-qa1", path=tmp_path / "s.json")
    assert "s.json" in str(error.value)


def test_official_squad_files_are_found(squad: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "squad").mkdir()
    squad.rename(tmp_path / "squad/dev-v1.1.json")
    monkeypatch.setenv("RETRIEVAL_GYM_DATA", str(tmp_path))
    assert len(load_dataset("ruler-qa1", "dev", context_tokens=200)) == 12
    assert len(load_dataset("ruler-qa1", "dev", path=tmp_path / "squad", context_tokens=200)) == 12
    with pytest.raises(FileNotFoundError, match="squad/train-v1.1.json or train-v2.0.json was not found; searched"):
        load_dataset("ruler-qa1", "train")
    with pytest.raises(FileNotFoundError, match="a test file was not found"):
        load_dataset("ruler-qa1", "test")


def test_the_command_lists_the_ids(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["datasets"]) == 0
    listed = [line.split()[0] for line in capsys.readouterr().out.splitlines() if line]
    assert set(RULER) <= set(listed)
