"""Q-RAG: soft Q-learning over text embeddings, trained with PQN.

A state is a question and the passages picked so far, an action one more passage, and

    Q(s, a) = <E_s(s), E_a(a, i)>,    pi(a|s) ~ exp(Q(s, a) / alpha),    V(s) = alpha log sum_a exp(Q'(s, a) / alpha).

Each update plays a segment with the current encoders, without a replay buffer, forms lambda-returns from the values of
the target encoders (an exponential moving average of the current ones), and moves Q(s, a) towards them.

    python agents/pqn.py --env ChainRetrieval-MuSiQue-v0 --preset minilm

Without a preset the hyperparameters are those of the paper (appendix F).
"""

from __future__ import annotations

from retrieval_gym.nn.script import run_script, tell_in_one_line, tell_resume
from retrieval_gym.threads import let_threads_sleep

if __name__ == "__main__":
    let_threads_sleep()
    tell_in_one_line("pqn")  # loading torch takes seconds, in which Ctrl-C is likely

import copy
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import gymnasium as gym
import numpy as np
import torch
import tyro

import retrieval_gym  # noqa: F401 - registers the environments
from retrieval_gym import RetrievalDataset, mdp
from retrieval_gym.commands.common import parse_env_kwargs
from retrieval_gym.evaluation import Evaluation, evaluate
from retrieval_gym.nn.action_vectors import ActionVectors, worth_a_table
from retrieval_gym.nn.arguments import (
    check_betas,
    check_counts,
    check_env_kwargs,
    check_positive,
    check_shares,
    check_sizes,
    parse_args,
)
from retrieval_gym.nn.encoder import TextEncoder
from retrieval_gym.nn.q_function import QConfig, QFunction, QRetriever
from retrieval_gym.nn.reporting import (
    check_fingerprints,
    check_reachable,
    environment_spec,
    fingerprints,
    hold_out,
    load_reported,
    refuse_overlap,
    report_difference,
    tell_long_warmup,
    tell_run,
    tell_selected,
    untrained_values,
    with_lengths,
)
from retrieval_gym.nn.rollout import Lookahead, Rollout, states_from
from retrieval_gym.nn.run import (
    Run,
    check_finite,
    earlier_run,
    keep_freed_memory,
    resolve_device,
    rng_state,
    seed_everything,
    set_rng_state,
)
from retrieval_gym.nn.schedule import schedule_factor, warmup_factor
from retrieval_gym.nn.scoring import (
    EMPTY,
    available,
    boltzmann_sample,
    boltzmann_sample_distinct,
    ema_update,
    lambda_returns,
    policy_entropy,
    soft_value,
)
from retrieval_gym.registration import environment_dataset

HEAD_PACE = 20.0  # the dueling head starts from nothing, so it learns this many times faster than the encoders
METRICS = ("all_gold_picked", "support_f1")

PRESETS: dict[str, dict[str, Any]] = {
    # The released configurations: encoder, alpha, lambda, tau, learning rate, weight decay, schedule.
    "q-rag-contriever": dict(
        encoder="facebook/contriever", alpha=0.01, lam=0.65, tau=0.1, learning_rate=5e-5, weight_decay=0.01
    ),
    "q-rag-e5-hotpotqa": dict(
        encoder="intfloat/multilingual-e5-large", alpha=0.05, lam=0.5, tau=0.02, learning_rate=1.5e-5,
        weight_decay=5e-4, schedule="cosine", final_learning_rate=0.1, passage_tokens=220, num_steps=2,
    ),
    "q-rag-e5-musique": dict(
        encoder="intfloat/multilingual-e5-large", alpha=0.005, lam=0.6, tau=0.02, learning_rate=1e-5,
        weight_decay=1e-3, final_learning_rate=0.1,
    ),
    "q-rag-gte": dict(
        encoder="Alibaba-NLP/gte-multilingual-base", alpha=0.005, lam=0.6, tau=0.02, learning_rate=5e-6,
        weight_decay=1e-3,
    ),
    # Ours, for two CPU cores and the default encoder: encoding costs most, so each state serves several actions.
    "minilm": dict(
        action_encoder="frozen", train_embeddings=False, autocast=True, dueling=True, reward="gold", gamma=0.0,
        alpha=0.05, tries=8, num_envs=12, accumulation=1, learning_rate=6e-5, warmup_updates=10,
        total_timesteps=115_200, eval_every=40,
    ),
    # Two-hop questions and two picks, where every pick counts: minutes on two cores.
    "demo": dict(
        env_kwargs=("hops=[2]", "max_steps=2"), layers=(0, 2, 5), action_encoder="frozen", train_embeddings=False,
        autocast=True, dueling=True, reward="recall", gamma=0.5, alpha=0.05, num_envs=24, num_steps=2, accumulation=1,
        learning_rate=2e-4, warmup_updates=10, total_timesteps=9_600, eval_every=50,
    ),
}  # fmt: skip


@dataclass
class Args:
    """PQN soft-Q over text embeddings (Q-RAG)."""

    env: str = "ChainRetrieval-Synthetic-v0"
    """environment to train in; its train split is used, less a share for selection"""
    env_kwargs: tuple[str, ...] = ()
    """keyword arguments of the environment as key=value, e.g. dataset=musique+2wiki"""
    eval_envs: tuple[str, ...] = ()
    """environments to report on, by id or as id?key=value&key=value; default: the dev split of the trained one"""
    eval_context_tokens: tuple[int, ...] = ()
    """report on each of them with documents of these lengths, in tokens: environments that take context_tokens"""
    eval_split: Literal["dev", "test"] = "dev"
    """split to report on"""
    cache_dir: str = "runs/embeddings"
    """folder that keeps the embeddings of a whole corpus, or of what long documents are made of"""
    eval_questions: int | None = None
    """report on a seeded sample of this many questions; default all"""
    preset: Literal[
        "none", "q-rag-contriever", "q-rag-e5-hotpotqa", "q-rag-e5-musique", "q-rag-gte", "minilm", "demo"
    ] = "none"
    """named hyperparameters; flags given beside it win"""
    seed: int = 1
    """seed of everything"""
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    """where to run"""
    runs: str = "runs"
    """folder of all runs"""
    resume: str | None = None
    """run folder to go on with; its configuration is taken over"""

    encoder: str = "sentence-transformers/all-MiniLM-L6-v2"
    """sentence-transformers or transformers model, Hub id or path; both encoders start from it"""
    layers: tuple[int, ...] | None = None
    """keep only these transformer layers"""
    action_encoder: Literal["train", "frozen"] = "train"
    """frozen: every passage is embedded once"""
    train_embeddings: bool = True
    """no: word embeddings stay as they are (most of a small encoder's weights)"""
    autocast: bool = False
    """bfloat16 autocast in the encoders"""
    positions: Literal["none", "absolute", "relative"] = "none"
    """how the passage's place in its document enters E_a (pools only)"""
    delta: float = 10.0
    """relative positions: distance between two intervals"""
    span: float = 9.0
    """relative positions: range inside an interval"""
    order: Literal["pick", "document"] = "pick"
    """order of the passages in the state text"""
    question_tokens: int = 64
    """longest question"""
    passage_tokens: int = 110
    """longest passage (paper: MuSiQue 110, HotpotQA 220, BabiLong and RULER 64)"""
    halves: bool = False
    """two Q functions, one a half of the vector, each regressed on the return (released code)"""
    dueling: bool = False
    """Q = v(s) + alpha log pi(a|s), with a learned v that starts at the first segment's mean return (ours)"""

    total_timesteps: int = 100_000
    """environment transitions, tried ones included"""
    num_envs: int = 12
    """environments played side by side"""
    tries: int = 1
    """different actions tried in each state, which is embedded once; play goes on with the first (ours)"""
    num_steps: int = 4
    """steps of a segment"""
    accumulation: int = 2
    """segments an update; num_envs * num_steps * accumulation * tries transitions (paper: 96)"""
    reward: str = "complete"
    """reward of the environment"""
    play_on: bool = False
    """spend the whole budget, also after the last gold passage, so that Q learns from states that miss nothing, which a
    threshold on max Q has to tell (ours)"""
    gamma: float = 0.99
    """discount"""
    alpha: float = 0.05
    """temperature of policy and soft value"""
    anneal_alpha: bool = False
    """let alpha follow the learning rate's schedule (released code)"""
    alpha_floor: float = 1e-3
    """lowest annealed alpha: at 0 the soft value is not defined"""
    soft_q: bool = True
    """no: hard maximum as value and epsilon-greedy actions"""
    epsilon: float = 0.1
    """share of random actions without soft Q"""
    lam: Annotated[float, tyro.conf.arg(name="lambda")] = 0.5
    """mixture of one-step and longer returns"""
    target_network: bool = True
    """no: values come from the current encoders"""
    tau: float = 0.02
    """step of the target encoders towards the current ones, an update"""
    score_target: bool = False
    """select and report the target encoders, an average over updates, in place of the current ones (ours)"""
    top_k_actions: int | None = None
    """policy and value see only this many best available actions (released code: 5)"""
    random_timesteps: int = 0
    """transitions with uniform actions at first (released code)"""

    learning_rate: float = 1.5e-5
    """AdamW"""
    betas: tuple[float, float] = (0.9, 0.98)
    """AdamW"""
    weight_decay: float = 5e-4
    """AdamW"""
    warmup_updates: int = 1000
    """updates of linear warm-up"""
    schedule: Literal["linear", "cosine", "constant"] = "linear"
    """course of the learning rate after the warm-up"""
    final_learning_rate: float = 0.0
    """where the schedule ends, as a share of the learning rate"""
    max_grad_norm: float = 2.0
    """gradient clipping of the encoders, L2"""

    selection_share: float = 0.1
    """share of the train questions kept apart to select the checkpoint"""
    eval_every: int = 100
    """updates between two selections; checkpoints come with these, and once a minute"""


def check_args(args: Args) -> None:
    """Raise ValueError for a number out of range, or an environment argument that has a flag of its own."""
    check_counts(
        args, "num_envs", "num_steps", "accumulation", "tries", "eval_every", "total_timesteps", "eval_questions",
        "top_k_actions", "question_tokens", "passage_tokens",
    )  # fmt: skip
    check_shares(args, "gamma", "lam", "tau", "epsilon", "final_learning_rate")
    check_sizes(
        args, "alpha", "alpha_floor", "weight_decay", "warmup_updates", "random_timesteps", "delta", "span",
        "learning_rate",
    )  # fmt: skip
    check_positive(args, "max_grad_norm")
    check_betas(args.betas)
    check_env_kwargs(args.env_kwargs)
    if args.anneal_alpha and args.alpha_floor == 0:
        raise ValueError("alpha_floor is 0: annealed, alpha would reach it, where the soft value is not defined")
    if args.anneal_alpha and args.alpha < args.alpha_floor:
        raise ValueError(f"alpha is {args.alpha}, below alpha_floor, {args.alpha_floor}: there is nothing to anneal")
    if args.soft_q and args.epsilon != Args.epsilon:
        raise ValueError(
            f"epsilon is {args.epsilon}: with soft Q the policy explores; pass --no-soft-q, or leave it out"
        )
    if args.score_target and not args.target_network:
        raise ValueError("--score-target scores the target encoders: leave out --no-target-network")


def make_q(args: Args, device: torch.device) -> QFunction:
    """Load both encoders from one pretrained model; dropout stays off while acting, in targets and in the loss."""
    encoders = [
        TextEncoder.load(args.encoder, device=device, layers=args.layers, autocast=args.autocast) for _ in range(2)
    ]
    config = QConfig(**{field.name: getattr(args, field.name) for field in fields(QConfig)})
    q = QFunction(*encoders, config).eval()
    q.action_encoder.requires_grad_(args.action_encoder == "train")
    if not args.train_embeddings:
        for encoder in encoders:
            encoder.model.get_input_embeddings().requires_grad_(False)
    return q


def q_loss(q_parts: torch.Tensor, returns: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Squared error between the return ``(N,)`` and Q, or 2 Q_h of each half (released code), ``(H, N)``; a mean.

    ``weights``, ``(N,)``, say how much each entry counts.
    """
    return (weights * (len(q_parts) * q_parts - returns) ** 2).mean(dim=0).sum() / weights.sum()


def policy_weights(q: torch.Tensor, alpha: float) -> torch.Tensor:
    """Share of the policy that each of some actions of a state has among them; equal shares at alpha 0; ``(B, N)``."""
    if alpha == 0:
        return torch.isfinite(q) / torch.isfinite(q).sum(dim=1, keepdim=True)
    return torch.softmax(q / alpha, dim=1)


def play_reported(
    q: QFunction, reported: Mapping[str, tuple[RetrievalDataset, int]], args: Args, known: ActionVectors | None
) -> dict[str, Evaluation]:
    """Score the greedy policy over the whole budget; gold never stops an evaluation.

    What documents of several lengths have in common is embedded once, and nothing that ``known`` holds, or held after
    an earlier call.
    """
    limit, results = args.eval_questions, {}
    keep = any(worth_a_table(each, len(each) if limit is None else limit) for each, _ in reported.values())
    vectors = None if keep else known
    for spec, (dataset, steps) in reported.items():
        retriever = QRetriever(q, dataset, args.cache_dir if keep else None, vectors)
        vectors = None if dataset.pools is None else retriever.vectors
        results[spec] = evaluate(retriever, dataset, steps=steps, limit=limit, progress=spec)
    return results


def trained_state(q: QFunction, frozen: bool) -> dict[str, torch.Tensor]:
    """The weights that training changes; a frozen action encoder comes from its own source again."""
    return {k: v for k, v in q.state_dict().items() if not (frozen and k.startswith("action_encoder."))}


def main(args: Args) -> Path:
    """Train, select, report; returns the run folder."""
    check_args(args)
    seed_everything(args.seed)
    keep_freed_memory()
    device = resolve_device(args.device)
    earlier = earlier_run(args.resume, args.runs)

    # Questions: train, a share of train to select on, and what is reported.
    env_kwargs = parse_env_kwargs(args.env_kwargs)
    dataset, max_steps = environment_dataset(args.env, "train", **env_kwargs)
    check_reachable(dataset, max_steps)
    selection, train = hold_out(dataset, args.selection_share, args.seed)
    specs = args.eval_envs or (environment_spec(args.env, args.env_kwargs),)
    if args.eval_context_tokens:
        specs = with_lengths(specs, args.eval_context_tokens)
        args = replace(args, eval_envs=specs)  # a run says what it reports
    reported = {spec: load_reported(spec, args.eval_split) for spec in specs}
    for spec, (reported_dataset, _) in reported.items():
        refuse_overlap(dataset, spec, reported_dataset)

    # Environment.
    envs = gym.make_vec(
        "ChainRetrieval-v0", num_envs=args.num_envs, dataset=train, max_steps=max_steps, observation="ids",
        reward=args.reward, stop_when_complete=not args.play_on,
    )  # fmt: skip
    num_actions = int(envs.single_action_space.n)
    if args.tries > num_actions:
        raise ValueError(f"tries is {args.tries}: a state of {args.env} has at most {num_actions} actions")
    obs, info = envs.reset(seed=args.seed)
    episode_return, episode_length = np.zeros(args.num_envs), np.zeros(args.num_envs, np.int64)
    transitions = args.num_envs * args.num_steps * args.accumulation * args.tries
    if transitions > args.total_timesteps:
        raise ValueError(
            f"total_timesteps is {args.total_timesteps}: one update takes {transitions}; raise it, or lower num_envs, "
            "num_steps, accumulation or tries"
        )
    updates = args.total_timesteps // transitions

    # Networks.
    online = make_q(args, device)
    # With gamma 0 nothing is valued, and a target network would only be kept up to date.
    has_target = args.target_network and (args.gamma > 0 or args.score_target)
    target = copy.deepcopy(online).requires_grad_(False) if has_target else online
    scored = target if args.score_target else online
    frozen = args.action_encoder == "frozen"
    if train.pools is None and not frozen:
        raise ValueError(f"{args.env} picks from {len(train.corpus)} passages: pass --action-encoder frozen")
    online.positions(states_from(obs, info))  # refuses positions over a corpus before the corpus is embedded
    store = online.store(train)
    keep = frozen and worth_a_table(train, args.total_timesteps // (args.tries * max_steps))
    vectors = online.action_vectors(store, args.cache_dir if keep else None)
    target_vectors = vectors if frozen or not has_target else target.action_vectors(store)
    head = list(online.value.parameters()) if online.value is not None else []
    weights = [p for name, p in online.named_parameters() if p.requires_grad and not name.startswith("value.")]
    groups = [{"params": weights, "pace": 1.0}, {"params": head, "pace": HEAD_PACE, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(
        groups, lr=args.learning_rate, betas=args.betas, weight_decay=args.weight_decay, fused=device.type != "mps"
    )

    known = fingerprints(online.action_encoder, dataset, reported)
    run = earlier or Run.create(args.runs, args.env, "pqn", args.seed, asdict(args))
    run.lock()
    print(f"run {run.directory} on {device}: {updates} updates of {transitions} transitions")
    tell_resume(run.directory)
    tell_long_warmup(args, updates)
    first_update, best = 0, -1.0

    def select(q: QFunction) -> Evaluation:
        retriever = QRetriever(q, selection, args.cache_dir if keep else None, vectors if frozen else None)
        return evaluate(retriever, selection, steps=max_steps, progress="selection")

    def checkpoint(update: int) -> dict[str, Any]:
        return {
            "update": update, "best": best, "q": trained_state(online, frozen), "target": trained_state(target, frozen),
            "optimizer": optimizer.state_dict(), "rng": rng_state(), "envs": envs.unwrapped.get_state(),
            "episode_return": episode_return.tolist(), "episode_length": episode_length.tolist(),
            "untrained": untrained, "fingerprints": known,
        }  # fmt: skip

    if run.has_begun():
        state = run.load("last", map_location=device)
        with run.taking_over("last"):
            check_fingerprints(state["fingerprints"], known)
            online.load_state_dict(state["q"], strict=False)
            target.load_state_dict(state["target"], strict=False)
            optimizer.load_state_dict(state["optimizer"])
            set_rng_state(state["rng"])
            obs, info = envs.unwrapped.set_state(state["envs"])
            episode_return, episode_length = np.array(state["episode_return"]), np.array(state["episode_length"])
            first_update, best, untrained = state["update"], state["best"], state["untrained"]
        print(f"goes on after update {first_update} of {updates}")
    else:
        untrained = {
            spec: untrained_values(spec, result, METRICS)
            for spec, result in play_reported(online, reported, args, vectors if frozen else None).items()
        }
        best = select(online).mean("all_gold_picked")
        run.save("best", {"q": trained_state(online, frozen), "update": 0})
        run.save("last", checkpoint(0))

    started, finished = time.monotonic(), []
    for update in range(first_update, updates):
        factor = schedule_factor(args, update, updates)
        learning_rate = args.learning_rate * factor * warmup_factor(args, update)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate * group["pace"]
        alpha = max(args.alpha_floor, args.alpha * factor) if args.anneal_alpha else args.alpha
        value_alpha = alpha if args.soft_q else 0.0
        online.alpha.fill_(value_alpha)
        target.alpha.fill_(value_alpha)

        logs = []
        for segment in range(args.accumulation):
            # Play. One forward pass of E_s serves acting and learning: no update comes between them.
            rollout, looks, embedded, baselines, entropy = Rollout(), [], [], [], []
            played_weights, tried_weights = [], []
            for step in range(args.num_steps):
                states = states_from(obs, info)
                mask = online.mask(states, vectors)
                embedded.append(online.embed_states(states, store))
                products = online.products(embedded[-1], states, vectors)
                baselines.append(online.baseline(embedded[-1], products, mask))
                with torch.no_grad():
                    q = available(products + baselines[-1][:, None], mask, args.top_k_actions)
                    played = ((update * args.accumulation + segment) * args.num_steps + step) * args.num_envs
                    uniform = available(torch.zeros_like(q), mask)
                    if played < args.random_timesteps:
                        action = boltzmann_sample(uniform, 1.0)
                    elif args.soft_q:
                        action = boltzmann_sample(q, alpha)
                    else:
                        explore = torch.rand(args.num_envs, device=device) < args.epsilon
                        action = torch.where(explore, boltzmann_sample(uniform, 1.0), q.argmax(dim=1))
                    entropy.append(policy_entropy(q, value_alpha).mean())
                    if args.tries > 1:
                        others = (uniform if played < args.random_timesteps else q).scatter(1, action[:, None], EMPTY)
                        tried = boltzmann_sample_distinct(others, value_alpha, args.tries - 1)
                        left = torch.isfinite(others.gather(1, tried))
                        looks.append(Lookahead.of(envs.unwrapped, tried.cpu().numpy(), left.cpu().numpy(), step))
                        chosen = torch.cat([action[:, None], tried], dim=1)
                        share = policy_weights(q.gather(1, chosen), value_alpha)
                        played_weights.append(share[:, 0])
                        tried_weights.append(share[:, 1:][left])
                actions = action.cpu().numpy()
                obs, reward, terminated, truncated, info = envs.step(actions)
                rollout.add(states, actions, reward, terminated | truncated)
                episode_return += reward
                episode_length += 1
                done = rollout.dones[-1]
                finished += zip(episode_return[done], episode_length[done], strict=True)
                episode_return[done], episode_length[done] = 0.0, 0

            rewards = torch.from_numpy(np.stack(rollout.rewards)).float().to(device)
            dones = torch.from_numpy(np.stack(rollout.dones)).float().to(device)

            # Q of the picked actions, and of those that were only tried.
            rows, places, picks = np.arange(dones.numel()), np.concatenate(rollout.actions), rollout.picks()
            if looks:
                look = Lookahead.concatenate(looks)
                rows, places = np.concatenate([rows, look.rows]), np.concatenate([places, look.actions])
                states = mdp.concatenate(rollout.states)[look.rows]
                picks = np.concatenate([picks, mdp.action_ids(states, look.actions)])
            picked = vectors(picks) if frozen else online.embed_actions(picks, store)
            if args.positions != "none":
                positions = torch.cat([online.positions(s).expand(args.num_envs, -1) for s in rollout.states])[rows]
                picked = online.place(picked, positions.gather(1, torch.from_numpy(places[:, None]).to(device))[:, 0])
            parts = 2 if args.halves else 1
            q_parts = (torch.cat(embedded)[rows] * picked).unflatten(1, (parts, -1)).sum(dim=2).T
            q_parts = q_parts + torch.cat(baselines)[rows] / parts
            q_played = q_parts.detach()[:, : dones.numel()].sum(dim=0).mean()
            if online.value is not None and update == segment == 0:
                first_returns = lambda_returns(rewards, dones, torch.zeros_like(rewards), args.gamma, 1.0)
                gap = first_returns.mean() - q_played
                for network in (online, target):
                    network.value.bias.data.fill_(gap.item())
                q_parts, q_played = q_parts + gap / parts, q_played + gap

            # Value the states that follow with the target encoders, form the returns, move Q towards them: the
            # lambda-return of what was played, the one-step return of what was only tried.
            with torch.no_grad():
                following, went_on = rollout.successors(states_from(obs, info))
                if looks:
                    following = mdp.concatenate([following, look.following[~look.dones]])
                    went_on = np.concatenate([went_on, dones.numel() + np.flatnonzero(~look.dones)])
                next_values = torch.zeros(len(rows), device=device)
                if len(went_on) and args.gamma > 0:
                    q = target.values(target.embed_states(following, store), following, target_vectors)
                    q = available(q, torch.isfinite(q), args.top_k_actions)
                    next_values[torch.from_numpy(went_on).to(device)] = soft_value(q, value_alpha)
                played_values = next_values[: dones.numel()].view_as(rewards)
                returns = lambda_returns(rewards, dones, played_values, args.gamma, args.lam).flatten()
                mean_return = returns.mean().item()
                if looks:
                    tried_rewards = torch.from_numpy(look.rewards).float().to(device)
                    returns = torch.cat([returns, tried_rewards + args.gamma * next_values[dones.numel() :]])
            shares = torch.cat([*played_weights, *tried_weights]) if looks else torch.ones_like(returns)
            loss = q_loss(q_parts, returns, shares)
            check_finite(loss.item(), f"update {update}, questions {np.unique(rollout.states[0].question).tolist()}")
            (loss / args.accumulation).backward()
            logs.append([loss.item(), q_played.item(), mean_return, torch.stack(entropy).mean().item()])

        grad_norm = torch.nn.utils.clip_grad_norm_(weights, args.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if has_target:
            ema_update(target, online, args.tau)
        if not frozen:
            vectors.clear()
            target_vectors.clear()

        # Log, select, keep.
        global_step = (update + 1) * transitions
        loss_mean, q_mean, return_mean, entropy_mean = np.mean(logs, axis=0)
        values = {
            "losses/td": loss_mean, "losses/q": q_mean, "losses/lambda_return": return_mean,
            "losses/entropy": entropy_mean, "losses/grad_norm": float(grad_norm),
            "charts/learning_rate": learning_rate, "charts/alpha": alpha,
            "charts/SPS": (update + 1 - first_update) * transitions / (time.monotonic() - started),
        }  # fmt: skip
        if finished:
            values["charts/episodic_return"], values["charts/episodic_length"] = np.mean(finished, axis=0)
            finished = []
        last = update + 1 == updates
        if last or (update + 1) % args.eval_every == 0:
            selected = select(scored)
            values |= {f"eval/{metric}": selected.mean(metric) for metric in METRICS}
            if values["eval/all_gold_picked"] > best:
                best = values["eval/all_gold_picked"]
                run.save("best", {"q": trained_state(scored, frozen), "update": update + 1})
        run.log(values, global_step)
        if last or run.is_due or (update + 1) % args.eval_every == 0:
            run.save("last", checkpoint(update + 1))
        run.progress(global_step, updates * transitions, values)
    envs.close()

    # Report the selected checkpoint beside the untrained encoders, question by question.
    kept = run.load("best", map_location=device)
    with run.taking_over("best"):
        online.load_state_dict(kept["q"], strict=False)
    tell_selected(f"update {kept['update']}", "all_gold_picked", best, selection)
    report = {
        spec: report_difference(spec, args.eval_split, reported[spec][1], untrained[spec], result)
        for spec, result in play_reported(online, reported, args, vectors if frozen else None).items()
    }
    run.save_encoder("state_encoder", online.state_encoder)
    run.save_encoder("action_encoder", online.action_encoder)
    run.write_json("eval.json", report)
    run.finish()
    tell_run(run.directory, args.env, args.env_kwargs)
    return run.directory


if __name__ == "__main__":
    run_script("pqn", lambda: parse_args(Args, PRESETS), main)
