"""How do I train with Stable-Baselines3? MaskablePPO picks from each question's pool of candidates.

python examples/sb3_maskable_ppo.py

EmbeddingObservation turns states into numbers, MaskablePPO asks the environment for its masks by itself, and everything
else is Stable-Baselines3 as it comes, except that the policy treats all candidates alike: one small network scores each
row of the observation, since what stands at position 3 of one pool has nothing to do with position 3 of the next.
The default encoder weighs words (HashingEncoder, no model needed): a state by its texts, a candidate by its title, so
that the policy sees which articles a state names. --encoder takes any sentence-transformers model instead:

python examples/sb3_maskable_ppo.py --encoder sentence-transformers/all-MiniLM-L6-v2
"""

import argparse
import shlex
import sys
from functools import partial
from importlib.metadata import version

import gymnasium as gym
import numpy as np
import torch
from sb3_contrib import MaskablePPO
from sb3_contrib.common.maskable.policies import MaskableActorCriticPolicy
from stable_baselines3.common.env_util import make_vec_env
from torch import nn

import retrieval_gym  # noqa: F401 - registers the environments
from retrieval_gym.commands.common import parse_env_kwargs
from retrieval_gym.progress import Progress
from retrieval_gym.registration import environment_dataset
from retrieval_gym.wrappers import CachedEncode, EmbeddingObservation, HashingEncoder


class ActorCritic(nn.Module):
    """Scores each candidate's row by one network (actor); reads the whole observation (critic)."""

    def __init__(self, size: int, num_candidates: int) -> None:
        super().__init__()
        self.num_candidates = self.latent_dim_pi = num_candidates
        self.latent_dim_vf = 64
        width = (size - 1) // num_candidates  # the observation: steps left, then one row a candidate
        self.actor = nn.Sequential(
            nn.Linear(1 + width, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1)
        )  # fmt: skip
        self.critic = nn.Sequential(nn.Linear(size, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU())

    def forward(self, obs):
        """Return logits ``(B, n)`` and what the value is read from, ``(B, 64)``."""
        return self.forward_actor(obs), self.forward_critic(obs)

    def forward_actor(self, obs):
        """Return one logit a candidate, ``(B, n)``."""
        rows = obs[:, 1:].reshape(len(obs), self.num_candidates, -1)
        steps_left = obs[:, :1, None].expand(-1, self.num_candidates, 1)
        return self.actor(torch.cat([steps_left, rows], dim=2)).squeeze(2)

    def forward_critic(self, obs):
        """Return ``(B, 64)``."""
        return self.critic(obs)


class CandidatePolicy(MaskableActorCriticPolicy):
    """MaskablePPO's policy with ``ActorCritic`` in place of a network over positions."""

    def _build_mlp_extractor(self):
        self.mlp_extractor = ActorCritic(self.observation_space.shape[0], int(self.action_space.n))

    def _build(self, lr_schedule):
        super()._build(lr_schedule)
        self.action_net = nn.Identity()  # the actor's scores are the logits
        self.optimizer = self.optimizer_class(self.parameters(), lr=lr_schedule(1), **self.optimizer_kwargs)


def title(passage):
    """Return the first line of a passage that has a title."""
    return passage.split("\n", 1)[0]


def make_encoders(name, dataset):
    """Return a function that embeds questions and picked passages, and one for candidates; both remember."""
    if name == "hash":
        encoder = HashingEncoder(dataset.corpus.texts(range(len(dataset.corpus))))
        return CachedEncode(encoder), CachedEncode(lambda texts: encoder([title(text) for text in texts]))
    from retrieval_gym.nn.encoder import TextEncoder

    encoder = TextEncoder.load(name)
    return CachedEncode(partial(encoder.encode, kind="query")), CachedEncode(partial(encoder.encode, kind="passage"))


def successes(model, env, questions):
    """Play questions greedily over the whole budget; return for each whether every gold passage was picked."""
    complete = []
    for question in range(questions):
        observation, info = env.reset(options={"question": question})
        terminated = False
        while not terminated:
            action, _ = model.predict(observation, action_masks=info["action_mask"].astype(bool), deterministic=True)
            observation, _, terminated, _, info = env.step(action)
        complete.append(info["complete"])
    return np.array(complete)


def main(argv=None):
    """Train and return the share of dev questions that succeed, before and after."""
    parser = argparse.ArgumentParser(
        description="MaskablePPO on an environment with pools.", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--env-id", default="ChainRetrieval-Synthetic-v0", help="any environment with pools")
    parser.add_argument("--env-kwargs", nargs="*", default=[], metavar="KEY=VALUE", help="of the environment")
    parser.add_argument("--encoder", default="hash", help="'hash', or a sentence-transformers model's Hub id or path")
    parser.add_argument("--policy", choices=["candidate", "mlp"], default="candidate", help="mlp: SB3's own MlpPolicy")
    parser.add_argument("--total-timesteps", type=int, default=30_000, help="transitions to train for")
    parser.add_argument("--num-envs", type=int, default=8, help="environments")
    parser.add_argument("--dev-questions", type=int, help="report on the first so many; default all")
    parser.add_argument("--seed", type=int, default=1, help="of the networks and the environments")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)  # the networks are tiny

    env_kwargs = parse_env_kwargs(args.env_kwargs)
    train, max_steps = environment_dataset(args.env_id, "train", **env_kwargs)
    dev, _ = environment_dataset(args.env_id, "dev", **env_kwargs)
    if train.max_pool is None:
        parser.error(f"{args.env_id} picks from a whole corpus: wrap it in TopKCandidates, as sb3_dqn_topk.py does")
    encode, encode_candidates = make_encoders(args.encoder, train)

    def make_env(dataset, **kwargs):
        env = gym.make("ChainRetrieval-v0", dataset=dataset, max_steps=max_steps, observation="ids", **kwargs)
        return EmbeddingObservation(env, encode, encode_candidates)

    envs = make_vec_env(lambda: make_env(train, reward="gold"), args.num_envs, seed=args.seed)
    policy = CandidatePolicy if args.policy == "candidate" else "MlpPolicy"
    model = MaskablePPO(
        policy, envs, n_steps=64, batch_size=256, n_epochs=8, learning_rate=1e-3, gamma=0.5, ent_coef=0.01,
        seed=args.seed,
    )  # fmt: skip
    dev_env, questions = make_env(dev, stop_when_complete=False), min(args.dev_questions or len(dev), len(dev))
    untrained = successes(model, dev_env, questions)
    print(f"untrained: {untrained.sum()} of {questions} dev questions complete ({untrained.mean():.3f})", flush=True)
    with Progress("training", args.total_timesteps, "steps") as progress:
        model.learn(args.total_timesteps, callback=lambda *_: not progress.update(model.n_envs))  # True goes on
    trained = successes(model, dev_env, questions)
    print(f"trained:   {trained.sum()} of {questions} dev questions complete ({trained.mean():.3f})")
    given = shlex.join(sys.argv[1:] if argv is None else argv)
    print(
        f"cite as: share of {args.env_id} dev questions with every gold passage among {max_steps} greedy picks, gold "
        f"never stops a chain; MaskablePPO (sb3-contrib {version('sb3-contrib')}, retrieval_gym "
        f"{retrieval_gym.__version__}), seed {args.seed}, {model.num_timesteps:,} transitions on {len(train)} train "
        f"questions: python examples/sb3_maskable_ppo.py {given}".rstrip()
    )
    return untrained.mean(), trained.mean()


if __name__ == "__main__":
    main()
