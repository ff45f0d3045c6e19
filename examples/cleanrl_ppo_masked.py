"""How do I use a single-file loop in CleanRL's style? PPO with action masks, where only --env-id changes.

python examples/cleanrl_ppo_masked.py --env-id ChainRetrieval-Synthetic-v0
python examples/cleanrl_ppo_masked.py --env-id ChainRetrieval-SyntheticOpen-v0 --env-kwargs corpus_size=2000
python examples/cleanrl_ppo_masked.py --env-id CartPole-v1

The loop knows nothing of retrieval: it reads vectors and, where the environment has one, info["action_mask"].
make_dataset and make_envs are all that is special about this package: a pool is observed as it is, a whole corpus
through the k passages that BM25 finds. Returns are those of the sampling policy in training; for retrieval the greedy
policy's success on dev questions, where gold never stops a chain, is printed before and after.
"""

import argparse
import time

import gymnasium as gym
import numpy as np
import torch
from gymnasium.vector import AutoresetMode
from torch import nn
from torch.distributions import Categorical

import retrieval_gym  # noqa: F401 - registers the environments
from retrieval_gym.commands.common import parse_env_kwargs
from retrieval_gym.registration import ENVIRONMENTS, environment_dataset
from retrieval_gym.wrappers import CachedEncode, EmbeddingObservation, HashingEncoder, TopKCandidates


def parse_args(argv=None):
    """Return the command line's arguments."""
    parser = argparse.ArgumentParser(
        description="PPO with action masks.", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--env-id", default="ChainRetrieval-Synthetic-v0", help="discrete actions")
    parser.add_argument("--env-kwargs", nargs="*", default=[], metavar="KEY=VALUE", help="of the environment")
    parser.add_argument("--k", type=int, default=16, help="passages to choose among in a whole corpus")
    parser.add_argument("--retriever", default="bm25", help="what finds them; any name that make_retriever takes")
    parser.add_argument("--dev-questions", type=int, help="report on the first so many; default all")
    parser.add_argument("--total-timesteps", type=int, default=30_000, help="transitions")
    parser.add_argument("--num-envs", type=int, default=8, help="parallel environments")
    parser.add_argument("--num-steps", type=int, default=64, help="steps of each environment between updates")
    parser.add_argument("--num-minibatches", type=int, default=2, help="minibatches an epoch")
    parser.add_argument("--update-epochs", type=int, default=8, help="passes over what was collected")
    parser.add_argument("--learning-rate", type=float, default=1e-3, help="of Adam, falling to 0")
    parser.add_argument("--gamma", type=float, help="discount; default 0.5, and 0.99 outside retrieval")
    parser.add_argument("--gae-lambda", type=float, default=0.95, help="of the advantages")
    parser.add_argument("--clip-coef", type=float, default=0.2, help="of the policy ratio")
    parser.add_argument("--ent-coef", type=float, default=0.01, help="of the entropy")
    parser.add_argument("--vf-coef", type=float, default=0.5, help="of the value loss")
    parser.add_argument("--max-grad-norm", type=float, default=0.5, help="gradient clipping")
    parser.add_argument("--seed", type=int, default=1, help="of everything")
    args = parser.parse_args(argv)
    if args.gamma is None:
        args.gamma = 0.5 if args.env_id in ENVIRONMENTS else 0.99
    return args


def make_envs(args, num_envs, dataset=None, max_steps=None, encoders=(), **kwargs):
    """Return a vector environment of vectors; without a dataset any other Gymnasium environment."""
    same_step = {"autoreset_mode": AutoresetMode.SAME_STEP}
    if dataset is None:
        return gym.make_vec(
            args.env_id, num_envs=num_envs, vectorization_mode="sync", vector_kwargs=same_step,
            **parse_env_kwargs(args.env_kwargs),
        )  # fmt: skip
    wrappers = [lambda env: EmbeddingObservation(env, *encoders)]
    if dataset.max_pool is None:
        wrappers.insert(0, lambda env: TopKCandidates(env, args.k, args.retriever))
    return gym.make_vec(
        "ChainRetrieval-v0", num_envs=num_envs, vectorization_mode="sync", vector_kwargs=same_step, wrappers=wrappers,
        dataset=dataset, max_steps=max_steps, observation="ids", **kwargs,
    )  # fmt: skip


def network(inputs, outputs):
    """Return a small network."""
    return nn.Sequential(nn.Linear(inputs, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, outputs))


class Agent(nn.Module):
    """Actor and critic; ``rows`` (n, F) is how to fold the end of an observation into one row an action, if it can be.

    With rows, one network scores each of them beside what comes before, so that the order of the actions means nothing.
    """

    def __init__(self, size, num_actions, rows=None):
        super().__init__()
        self.rows, self.before = rows, 0 if rows is None else size - rows[0] * rows[1]
        self.actor = network(size, num_actions) if rows is None else network(self.before + rows[1], 1)
        self.critic = network(size, 1)

    def policy(self, obs, mask):
        """Return the distribution over the actions of each observation, none of which the mask excludes."""
        if self.rows is None:
            logits = self.actor(obs)
        else:
            rows = obs[:, self.before :].reshape(-1, *self.rows)
            before = obs[:, None, : self.before].expand(-1, self.rows[0], -1)
            logits = self.actor(torch.cat([before, rows], dim=2)).squeeze(2)
        return Categorical(logits=logits.masked_fill(~mask, torch.finfo(logits.dtype).min))

    def value(self, obs):
        """Return ``(B,)``."""
        return self.critic(obs).squeeze(-1)


def read_mask(info, envs):
    """Return the valid actions, bool (B, n): all of them where the environment says nothing."""
    shape = (envs.num_envs, envs.single_action_space.n)
    return torch.from_numpy(np.asarray(info.get("action_mask", np.ones(shape)), bool))


@torch.no_grad()
def success(agent, envs, questions):
    """Return for each dev question whether the greedy policy picks every gold passage; ``envs`` is a batch of one."""
    complete = []
    for question in range(questions):
        obs, info = envs.reset(options={"question": question})
        done = np.zeros(1, bool)
        while not done[0]:
            action = agent.policy(torch.from_numpy(obs), read_mask(info, envs)).probs.argmax(dim=1)
            obs, _, done, _, info = envs.step(action.numpy())
        complete.append(bool(info["final_info"]["complete"][0]))
    return np.array(complete)


def main(argv=None):
    """Train; return the mean return of the last 100 episodes, or for retrieval success before and after."""
    args = parse_args(argv)
    torch.manual_seed(args.seed)
    torch.set_num_threads(1)  # the networks are tiny
    datasets, evaluation = {}, None
    if args.env_id in ENVIRONMENTS:
        env_kwargs = parse_env_kwargs(args.env_kwargs)
        train, max_steps = environment_dataset(args.env_id, "train", **env_kwargs)
        dev, _ = environment_dataset(args.env_id, "dev", **env_kwargs)
        encoder = HashingEncoder(train.corpus.texts(range(len(train.corpus))))
        # A candidate by its title, the first line, so that the policy sees which candidates a state names.
        titles = CachedEncode(lambda texts: encoder([text.split("\n", 1)[0] for text in texts]))
        datasets = {"max_steps": max_steps, "encoders": (CachedEncode(encoder), titles)}
        evaluation = make_envs(args, 1, dev, **datasets, stop_when_complete=False)
        questions = min(args.dev_questions or len(dev), len(dev))
        datasets |= {"dataset": train, "reward": "gold"}
    envs = make_envs(args, args.num_envs, **datasets)
    size, num_actions = int(np.prod(envs.single_observation_space.shape)), int(envs.single_action_space.n)
    rows = envs.envs[0].get_wrapper_attr("shapes")["scores"] if evaluation else None
    agent = Agent(size, num_actions, rows)
    optimizer = torch.optim.Adam(agent.parameters(), lr=args.learning_rate, eps=1e-5)
    if evaluation:
        untrained = success(agent, evaluation, questions)
        print(f"untrained: {untrained.sum()} of {questions} dev questions complete ({untrained.mean():.3f})")

    shape = (args.num_steps, args.num_envs)
    obs, masks = torch.zeros(*shape, size), torch.zeros(*shape, num_actions, dtype=torch.bool)
    actions, logprobs, rewards, dones, values = torch.zeros(5, *shape)
    updates = max(1, args.total_timesteps // (args.num_steps * args.num_envs))
    seen, info = envs.reset(seed=args.seed)
    next_obs, next_mask = torch.from_numpy(seen).float(), read_mask(info, envs)
    episode_returns, finished, started = np.zeros(args.num_envs), [], time.monotonic()
    for update in range(updates):
        optimizer.param_groups[0]["lr"] = args.learning_rate * (1 - update / updates)

        # Collect.
        for step in range(args.num_steps):
            obs[step], masks[step] = next_obs, next_mask
            with torch.no_grad():
                policy = agent.policy(next_obs, next_mask)
                action = policy.sample()
                actions[step], logprobs[step], values[step] = action, policy.log_prob(action), agent.value(next_obs)
            seen, reward, terminated, truncated, info = envs.step(action.numpy())
            done = terminated | truncated
            episode_returns += reward
            finished += episode_returns[done].tolist()
            episode_returns[done] = 0.0
            rewards[step], dones[step] = torch.from_numpy(reward), torch.from_numpy(done)
            if truncated.any():  # a cut is no end: the value of where it was cut stands for the rest
                last = torch.from_numpy(np.stack(info["final_obs"][truncated]).astype(np.float32))
                with torch.no_grad():
                    rewards[step][torch.from_numpy(truncated)] += args.gamma * agent.value(last)
            next_obs, next_mask = torch.from_numpy(seen).float(), read_mask(info, envs)

        # Generalised advantage estimation (Schulman et al. 2016).
        with torch.no_grad():
            advantages, following, carry = torch.zeros(shape), agent.value(next_obs), torch.zeros(args.num_envs)
            for step in reversed(range(args.num_steps)):
                goes_on = 1 - dones[step]
                delta = rewards[step] + args.gamma * following * goes_on - values[step]
                carry = delta + args.gamma * args.gae_lambda * goes_on * carry
                advantages[step], following = carry, values[step]
            returns = advantages + values

        # Learn: the clipped objective (Schulman et al. 2017).
        flat = [x.flatten(0, 1) for x in (obs, masks, actions, logprobs, advantages, returns)]
        for _ in range(args.update_epochs):
            for batch in torch.randperm(len(flat[0])).chunk(args.num_minibatches):
                b_obs, b_mask, b_action, b_logprob, b_advantage, b_return = (x[batch] for x in flat)
                policy = agent.policy(b_obs, b_mask)
                ratio = (policy.log_prob(b_action) - b_logprob).exp()
                b_advantage = (b_advantage - b_advantage.mean()) / (b_advantage.std() + 1e-8)
                clipped = ratio.clamp(1 - args.clip_coef, 1 + args.clip_coef)
                policy_loss = -torch.min(b_advantage * ratio, b_advantage * clipped).mean()
                value_loss = 0.5 * (agent.value(b_obs) - b_return).square().mean()
                loss = policy_loss - args.ent_coef * policy.entropy().mean() + args.vf_coef * value_loss
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)
                optimizer.step()
        if finished and ((update + 1) % max(1, updates // 10) == 0 or update + 1 == updates):
            global_step = (update + 1) * args.num_steps * args.num_envs
            speed = global_step / (time.monotonic() - started)
            print(f"global_step {global_step}: return {np.mean(finished[-100:]):.3f}, SPS {speed:.0f}", flush=True)
    envs.close()
    if not evaluation:
        return float(np.mean(finished[-100:]))
    trained = success(agent, evaluation, questions)
    print(f"trained:   {trained.sum()} of {questions} dev questions complete ({trained.mean():.3f}), seed {args.seed}")
    return untrained.mean(), trained.mean()


if __name__ == "__main__":
    main()
