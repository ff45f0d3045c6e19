"""How do I train over a whole corpus? DQN chooses among the passages that a retriever finds.

python examples/sb3_dqn_topk.py

A corpus has too many passages for a discrete action set, so TopKCandidates searches in every state and action j picks
the j-th passage found. The retriever here follows names, as a reader follows links: it returns the articles whose
titles the state mentions. The agent learns which of them to read next. A gold passage that is not among them cannot be
picked, so the share of states in which one is found is printed beside the success rate.
"""

import argparse
import re
import shlex
import sys
from collections import defaultdict
from importlib.metadata import version

import gymnasium as gym
import numpy as np
import torch
from stable_baselines3 import DQN
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.dqn.policies import DQNPolicy
from torch import nn

import retrieval_gym  # noqa: F401 - registers the environments
from retrieval_gym.commands.common import parse_env_kwargs
from retrieval_gym.progress import Progress
from retrieval_gym.ranking import rank
from retrieval_gym.registration import environment_dataset
from retrieval_gym.retrieval import make_retriever
from retrieval_gym.wrappers import CachedEncode, EmbeddingObservation, HashingEncoder, TopKCandidates


class NamedArticles:
    """Scores a passage by the share of its title's words that the question and the picked passages hold."""

    def __init__(self, dataset):
        self.dataset = dataset
        self.holders = defaultdict(list)  # word -> (passage, share of its title)
        for passage, title in enumerate(dataset.corpus.titles):
            words = self.words(title)
            for word in words:
                self.holders[word].append((passage, 1 / len(words)))

    @staticmethod
    def words(text):
        """Return the set of words of a text."""
        return set(re.findall(r"\w+", text.lower()))

    def search(self, states, k):
        """Return corpus ids int64 (B, k) and scores float32 (B, k), best first; ``rank`` leaves out what is picked."""
        scores = np.zeros((len(states), len(self.dataset.corpus)), np.float32)
        for row, question, picked in zip(scores, states.question, states.picked, strict=True):
            texts = self.dataset.corpus.texts(picked[picked >= 0])
            for word in self.words(" ".join([self.dataset.questions[question].text, *texts])):
                for passage, share in self.holders.get(word, ()):
                    row[passage] += share
        return rank(states, scores, k)


class CandidateQ(nn.Module):
    """Q of each candidate, from its row of the observation alone: one network for all of them."""

    def __init__(self, size, num_candidates):
        super().__init__()
        self.num_candidates = num_candidates
        width = (size - 1) // num_candidates  # the observation: steps left, then one row a candidate
        self.q = nn.Sequential(nn.Linear(1 + width, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, obs):
        """Return ``(B, n)``."""
        rows = obs[:, 1:].reshape(len(obs), self.num_candidates, -1)
        steps_left = obs[:, :1, None].expand(-1, self.num_candidates, 1)
        return self.q(torch.cat([steps_left, rows], dim=2)).squeeze(2)


class CandidatePolicy(DQNPolicy):
    """DQN's policy with ``CandidateQ`` in place of a network over positions."""

    def make_q_net(self):
        """Return the network that SB3 makes, with other layers."""
        q_net = super().make_q_net()
        q_net.q_net = CandidateQ(self.observation_space.shape[0], int(self.action_space.n)).to(self.device)
        return q_net


def successes(model, env, questions):
    """Play questions greedily over the whole budget.

    Returns:
        For each question whether every gold passage was picked, and the share of the states missing a gold passage in
        which one could be picked.
    """
    complete, reachable = [], []
    for question in range(questions):
        observation, info = env.reset(options={"question": question})
        terminated = False
        while not terminated:
            if not info["complete"]:
                reachable.append(info["gold_in_reach"] > 0)
            action, _ = model.predict(observation, deterministic=True)
            observation, _, terminated, _, info = env.step(action)
        complete.append(info["complete"])
    return np.array(complete), np.mean(reachable)


def main(argv=None):
    """Train and return the share of dev questions that succeed, before and after."""
    parser = argparse.ArgumentParser(
        description="DQN on a whole corpus.", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--env-id", default="ChainRetrieval-SyntheticOpen-v0", help="any environment over a corpus")
    parser.add_argument(
        "--env-kwargs", nargs="*", default=["corpus_size=2000"], metavar="KEY=VALUE", help="of the environment"
    )
    parser.add_argument("--k", type=int, default=12, help="passages to choose among")
    parser.add_argument(
        "--retriever",
        default="names",
        help="'names', or what make_retriever takes: bm25, dense, module:factory",
    )
    parser.add_argument("--policy", choices=["candidate", "mlp"], default="candidate", help="mlp: SB3's own MlpPolicy")
    parser.add_argument("--total-timesteps", type=int, default=20_000, help="transitions to train for")
    parser.add_argument("--num-envs", type=int, default=4, help="environments")
    parser.add_argument("--dev-questions", type=int, help="report on the first so many; default all")
    parser.add_argument("--seed", type=int, default=1, help="of the networks and the environments")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)  # the networks are tiny

    env_kwargs = parse_env_kwargs(args.env_kwargs)
    train, max_steps = environment_dataset(args.env_id, "train", **env_kwargs)
    dev, _ = environment_dataset(args.env_id, "dev", **env_kwargs)
    retrievers = {}
    for dataset in (train, dev):
        named = NamedArticles(dataset) if args.retriever == "names" else make_retriever(args.retriever, dataset)
        retrievers[dataset.split] = named
    encode = CachedEncode(HashingEncoder(train.corpus.texts(range(len(train.corpus)))))

    def make_env(dataset, **kwargs):
        env = gym.make("ChainRetrieval-v0", dataset=dataset, max_steps=max_steps, observation="ids", **kwargs)
        return EmbeddingObservation(TopKCandidates(env, args.k, retrievers[dataset.split]), encode)

    envs = make_vec_env(lambda: make_env(train, reward="gold"), args.num_envs, seed=args.seed)
    model = DQN(
        CandidatePolicy if args.policy == "candidate" else "MlpPolicy", envs, learning_rate=1e-3, gamma=0.5,
        batch_size=128, buffer_size=50_000, learning_starts=1_000, train_freq=4, gradient_steps=2,
        target_update_interval=500, exploration_fraction=0.5, exploration_final_eps=0.05, seed=args.seed,
    )  # fmt: skip
    dev_env, questions = make_env(dev, stop_when_complete=False), min(args.dev_questions or len(dev), len(dev))
    untrained, _ = successes(model, dev_env, questions)
    print(f"untrained: {untrained.sum()} of {questions} dev questions complete ({untrained.mean():.3f})", flush=True)
    with Progress("training", args.total_timesteps, "steps") as progress:
        model.learn(args.total_timesteps, callback=lambda *_: not progress.update(model.n_envs))  # True goes on
    trained, reachable = successes(model, dev_env, questions)
    print(f"trained:   {trained.sum()} of {questions} dev questions complete ({trained.mean():.3f})")
    print(f"a missing gold passage was among the {args.k} found in {reachable:.3f} of the states that missed one")
    given = shlex.join(sys.argv[1:] if argv is None else argv)
    print(
        f"cite as: share of {args.env_id} dev questions with every gold passage among {max_steps} greedy picks out of "
        f"{args.k} found by {args.retriever} in {len(dev.corpus):,} passages, gold never stops a chain; DQN "
        f"(stable-baselines3 {version('stable-baselines3')}, retrieval_gym {retrieval_gym.__version__}), seed "
        f"{args.seed}, {model.num_timesteps:,} transitions on {len(train)} train questions: "
        f"python examples/sb3_dqn_topk.py {given}".rstrip()
    )
    return untrained.mean(), trained.mean()


if __name__ == "__main__":
    main()
