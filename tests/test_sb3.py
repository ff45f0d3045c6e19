"""The environments under Stable-Baselines3 and in a loop of CleanRL's style, and the examples that show it."""

import importlib.util
import os
import re
import warnings
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
from conftest import make_dataset

torch = pytest.importorskip("torch")
ROOT = Path(__file__).resolve().parents[1]

from retrieval_gym.retrieval import RandomRetriever  # noqa: E402
from retrieval_gym.wrappers import EmbeddingObservation, HashingEncoder, TopKCandidates  # noqa: E402


def load_example(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def sb3():
    """Stable-Baselines3 with sb3-contrib; tests that need them skip, with the reason, where they are absent."""
    pytest.importorskip("sb3_contrib", reason="sb3-contrib is not installed: pip install 'retrieval-gym[sb3]'")
    return pytest.importorskip("stable_baselines3", reason="stable-baselines3 is not installed: the extra sb3")


@pytest.fixture(scope="module")
def ppo_example(sb3):
    return load_example("sb3_maskable_ppo")


@pytest.fixture(scope="module")
def dqn_example(sb3):
    return load_example("sb3_dqn_topk")


@pytest.fixture(scope="module")
def cleanrl_example():
    return load_example("cleanrl_ppo_masked")


def make_env(form="pool", **kwargs):
    dataset = make_dataset(form)
    env = gym.make("ChainRetrieval-v0", dataset=dataset, reward="recall", observation="ids", **kwargs)
    if form == "corpus":
        env = TopKCandidates(env, 4, RandomRetriever(dataset))
    return EmbeddingObservation(env, HashingEncoder(dataset.corpus.texts(range(10)), dim=64))


# --- the wrappers under SB3


@pytest.mark.parametrize("form", ["pool", "corpus"])
def test_sb3_checks_the_numeric_environment_without_a_warning(sb3, form):
    from stable_baselines3.common.env_checker import check_env

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_env(make_env(form), warn=True)


def test_sb3_checks_vectors_over_a_whole_corpus_without_a_warning(sb3):
    from stable_baselines3.common.env_checker import check_env

    env = gym.make("ChainRetrieval-v0", dataset=make_dataset("corpus"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_env(EmbeddingObservation(env, HashingEncoder(["a"], dim=8)), warn=True)


def play_beside_single(venv, form, episodes):
    """Play a vector of SB3 beside environments that it does not know; return how many episodes ended."""
    from sb3_contrib.common.maskable.utils import get_action_masks, is_masking_supported

    assert is_masking_supported(venv)
    singles = [make_env(form) for _ in range(venv.num_envs)]
    venv.seed(7)
    observations, rng, ended = venv.reset(), np.random.default_rng(0), 0
    expected = [env.reset(seed=7 + i)[0] for i, env in enumerate(singles)]
    while ended < episodes:
        np.testing.assert_array_equal(observations, np.stack(expected))
        masks = get_action_masks(venv)
        np.testing.assert_array_equal(masks, [env.get_wrapper_attr("action_masks")() for env in singles])
        actions = np.array([rng.choice(np.flatnonzero(mask)) for mask in masks])
        observations, rewards, dones, infos = venv.step(actions)
        for i, env in enumerate(singles):
            expected[i], reward, terminated, _, info = env.step(actions[i])
            assert (float(rewards[i]), dones[i]) == (pytest.approx(reward), terminated)
            assert infos[i]["gold_found"] == info["gold_found"] and not infos[i]["TimeLimit.truncated"]
            if terminated:
                np.testing.assert_array_equal(infos[i]["terminal_observation"], expected[i])
                expected[i], ended = env.reset()[0], ended + 1
    venv.close()


@pytest.mark.parametrize("form", ["pool", "corpus"])
def test_dummy_vec_env_plays_the_same_episodes(sb3, form):
    from stable_baselines3.common.vec_env import DummyVecEnv

    play_beside_single(DummyVecEnv([lambda: make_env(form)] * 3), form, episodes=12)


def test_subproc_vec_env_plays_the_same_episodes(sb3):
    from stable_baselines3.common.vec_env import SubprocVecEnv

    env = make_env("corpus")  # sent to the workers whole: dataset, retriever, encoder and what it remembers
    play_beside_single(SubprocVecEnv([lambda: env] * 2), "corpus", episodes=4)


@pytest.mark.parametrize("policy", ["MlpPolicy", "candidate"])
def test_maskable_ppo_takes_no_masked_action(ppo_example, policy):
    from sb3_contrib import MaskablePPO

    class Counting(gym.Wrapper):
        invalid = steps = 0

        def step(self, action):
            result = self.env.step(action)
            Counting.invalid += result[4]["invalid_action"]
            Counting.steps += 1
            return result

    policy = ppo_example.CandidatePolicy if policy == "candidate" else policy
    model = MaskablePPO(policy, Counting(make_env(stop_when_complete=False)), n_steps=64, batch_size=32, seed=0)
    model.learn(128)
    # Pools of 2 in an episode of 4 steps leave nothing to pick, whatever the mask says; there are 5 questions.
    assert Counting.steps == 128 and Counting.invalid <= 0.25 * 128
    env = make_env(stop_when_complete=False)
    for question in (0, 1, 2, 4):
        observation, info = env.reset(options={"question": question})
        terminated = False
        while not terminated:
            action, _ = model.predict(observation, action_masks=env.get_wrapper_attr("action_masks")())
            observation, _, terminated, _, info = env.step(action)
            assert not info["invalid_action"]


# --- the policies of the examples


def permuted(observation, order, width=6):
    rows = observation[:, 1:].reshape(len(observation), -1, width)[:, order]
    return torch.cat([observation[:, :1], rows.reshape(len(observation), -1)], dim=1)


def networks(ppo_example, dqn_example, cleanrl_example):
    mask = torch.ones(1, 5, dtype=torch.bool)
    agent = cleanrl_example.Agent(1 + 5 * 6, 5, rows=(5, 6))
    return {
        "MaskablePPO": ppo_example.ActorCritic(1 + 5 * 6, 5).forward_actor,
        "DQN": dqn_example.CandidateQ(1 + 5 * 6, 5),
        "CleanRL": lambda obs: agent.policy(obs, mask.expand(len(obs), -1)).logits,
    }


@pytest.mark.parametrize("name", ["MaskablePPO", "DQN", "CleanRL"])
def test_moving_a_candidate_moves_its_score(ppo_example, dqn_example, cleanrl_example, name):
    torch.manual_seed(0)
    score = networks(ppo_example, dqn_example, cleanrl_example)[name]
    observation, order = torch.randn(3, 1 + 5 * 6), [4, 2, 0, 1, 3]
    before, after = score(observation), score(permuted(observation, order))
    torch.testing.assert_close(after, before[:, order])
    changed = observation.clone()
    changed[:, 0] += 1
    assert not torch.allclose(score(changed), before), "the steps left are read"


def test_the_ppo_policy_trains_all_its_weights_and_loads_again(ppo_example, tmp_path):
    from sb3_contrib import MaskablePPO

    model = MaskablePPO(ppo_example.CandidatePolicy, make_env(), n_steps=32, batch_size=16, seed=0)
    before = {name: weight.clone() for name, weight in model.policy.named_parameters()}
    trained = {id(weight) for group in model.policy.optimizer.param_groups for weight in group["params"]}
    assert trained == {id(weight) for weight in model.policy.parameters()}
    model.learn(64)
    assert all(not torch.equal(weight, before[name]) for name, weight in model.policy.named_parameters())
    model.save(tmp_path / "model")
    again = MaskablePPO.load(tmp_path / "model")
    observation, _ = make_env().reset(seed=0)
    for mask in (np.ones(7, bool), np.arange(7) == 3):
        actions = [m.predict(observation, deterministic=True, action_masks=mask)[0] for m in (model, again)]
        assert actions[0] == actions[1] and mask[actions[0]]


def test_the_dqn_policy_has_a_target_of_its_own(dqn_example):
    from stable_baselines3 import DQN

    model = DQN(dqn_example.CandidatePolicy, make_env("corpus"), learning_starts=10, batch_size=8, seed=0)
    online, target = model.q_net.q_net, model.q_net_target.q_net
    assert isinstance(online, dqn_example.CandidateQ) and isinstance(target, dqn_example.CandidateQ)
    trained = {id(weight) for group in model.policy.optimizer.param_groups for weight in group["params"]}
    assert trained == {id(weight) for weight in online.parameters()}
    before = [weight.clone() for weight in target.parameters()]
    model.learn(100)
    assert all(torch.equal(a, b) for a, b in zip(before, target.parameters(), strict=True))
    assert any(not torch.equal(a, b) for a, b in zip(before, online.parameters(), strict=True))


def test_named_articles_come_first(dqn_example):
    dataset = make_dataset("corpus")
    env = TopKCandidates(gym.make("ChainRetrieval-v0", dataset=dataset), 3, dqn_example.NamedArticles(dataset))
    _, info = env.reset(options={"question": 0})  # names Einstein, not as a title's whole word: "einstein", "s"
    assert info["candidates"][0] == 0
    _, _, _, _, info = env.step(0)  # Einstein's article names Ulm, whose two copies tie: lowest id first
    assert info["candidates"].tolist()[:2] == [1, 7]


# --- the masked loop


def test_the_loop_never_samples_what_the_mask_excludes(cleanrl_example):
    torch.manual_seed(0)
    for agent in (cleanrl_example.Agent(31, 5, rows=(5, 6)), cleanrl_example.Agent(31, 5)):
        mask = torch.tensor([[True, False, True, False, False], [False, False, False, False, True]])
        policy = agent.policy(torch.randn(2, 31), mask)
        assert not policy.probs[~mask].any() and torch.isfinite(policy.entropy()).all()
        logits = policy.logits[0][mask[0]]
        p = logits.softmax(0)
        assert policy.entropy()[0].item() == pytest.approx(-(p * p.log()).sum().item(), rel=1e-5)
        assert policy.entropy()[1].item() == pytest.approx(0, abs=1e-6)


# --- the examples run

ONE_LINE = r"{}: +(\d+) of {} dev questions complete \((\d\.\d+)\)"


def read_counts(text, questions):
    counts = []
    for word in ("untrained", "trained"):
        found = re.search(rf"^{ONE_LINE.format(word, questions)}", text, re.MULTILINE)
        assert found and float(found[2]) == pytest.approx(int(found[1]) / questions, abs=5e-4), text
        counts.append(int(found[1]) / questions)
    return counts


def run_tiny(example, argv, questions, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    threads = torch.get_num_threads()
    try:
        returned = example.main(argv)
    finally:
        torch.set_num_threads(threads)
    text = capsys.readouterr().out
    assert list(returned) == pytest.approx(read_counts(text, questions))
    assert not os.listdir(tmp_path), "an example leaves no files"
    return text


def test_the_maskable_ppo_example(ppo_example, tmp_path, monkeypatch, capsys):
    argv = ["--env-kwargs", "num_questions=12", "--total-timesteps", "512", "--num-envs", "2", "--dev-questions", "8"]
    text = run_tiny(ppo_example, argv, 8, tmp_path, monkeypatch, capsys)
    assert "seed 1, 512 transitions on 12 train questions: python examples/sb3_maskable_ppo.py --env-kwargs" in text
    text = run_tiny(ppo_example, [*argv, "--policy", "mlp", "--seed", "2"], 8, tmp_path, monkeypatch, capsys)
    assert "seed 2" in text


def test_the_maskable_ppo_example_takes_an_encoder(ppo_example, tmp_path_factory, tmp_path, monkeypatch, capsys):
    from tiny import save_encoder

    encoder = save_encoder(tmp_path_factory.mktemp("encoder"))
    argv = ["--env-kwargs", "num_questions=4", "--total-timesteps", "128", "--num-envs", "2", "--encoder", str(encoder)]
    run_tiny(ppo_example, argv, 4, tmp_path, monkeypatch, capsys)


def test_the_dqn_example(dqn_example, tmp_path, monkeypatch, capsys):
    argv = ["--env-kwargs", "corpus_size=200", "num_questions=12", "--total-timesteps", "1200", "--dev-questions", "8"]
    text = run_tiny(dqn_example, argv, 8, tmp_path, monkeypatch, capsys)
    assert re.search(r"among the 12 found in [01]\.\d+ of the states", text)
    assert "found by names in 200 passages" in text and "1,200 transitions on 12 train questions" in text


@pytest.mark.parametrize("env_id", ["ChainRetrieval-Synthetic-v0", "ChainRetrieval-SyntheticOpen-v0"])
def test_the_loop_runs_on_pools_and_corpora(cleanrl_example, env_id, tmp_path, monkeypatch, capsys):
    size = ["corpus_size=200"] if "Open" in env_id else []
    argv = ["--env-id", env_id, "--env-kwargs", "num_questions=12", *size, "--dev-questions", "6"]
    argv += ["--num-envs", "2", "--num-steps", "32", "--total-timesteps", "256", "--retriever", "random"]
    assert "global_step 256: return" in run_tiny(cleanrl_example, argv, 6, tmp_path, monkeypatch, capsys)


def test_the_loop_runs_where_episodes_are_cut(cleanrl_example, capsys):
    """MountainCar has no mask, pays -1 a step and is cut after 200 of them."""
    argv = ["--env-id", "MountainCar-v0", "--num-envs", "2", "--num-steps", "128", "--total-timesteps", "512"]
    assert cleanrl_example.main(argv) == -200


# --- the examples learn


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_the_maskable_ppo_example_learns(ppo_example, seed, capsys):
    """On 200 dev questions a random player completes .02, BM25 .4; the untrained network between 0 and .25."""
    argv = ["--env-kwargs", "num_questions=200", "--total-timesteps", "10000", "--seed", str(seed)]
    untrained, trained = ppo_example.main(argv)
    assert trained > 0.5 and trained > untrained + 0.2


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_the_dqn_example_learns(dqn_example, seed, capsys):
    untrained, trained = dqn_example.main(
        ["--env-kwargs", "corpus_size=1000", "num_questions=200", "--total-timesteps", "10000", "--seed", str(seed)]
    )
    assert trained > untrained + 0.1


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_the_loop_learns(cleanrl_example, seed, capsys):
    argv = ["--env-kwargs", "num_questions=200", "--total-timesteps", "20000", "--seed", str(seed)]
    untrained, trained = cleanrl_example.main(argv)
    assert trained > 0.5 and trained > untrained + 0.1


@pytest.mark.slow
def test_the_loop_learns_another_environment(cleanrl_example, capsys):
    """CartPole under a random policy stands for about 22 steps."""
    argv = ["--env-id", "CartPole-v1", "--num-envs", "4", "--num-steps", "128", "--total-timesteps", "15000"]
    assert cleanrl_example.main(argv) > 60
