"""PAO: positive-advantage-only policy gradient on the lists that a query encoder retrieves.

The query encoder is the policy, the passages' embeddings are frozen. A query, here a state s (a question and the
passages picked so far), retrieves the list L of its K best passages, with scores s_i = <E_q(s), E_p(d_i)> and

    P(d_i | s) = exp(s_i / t) / sum_{j in L} exp(s_j / t),    A_i = (r_i - mean r) / std r,

where r_i is what a reward model says of the passage, and the mean and std are those of the list. The loss is

    L(s) = - sum_i 1[A_i > 0] A_i log P(d_i | s) + beta KL(P || P_ref),

P_ref by the frozen encoder on the same list, the gradient through P alone. Compared with: RL-All, -sum_i A_i log P_i
over all i; KL-Distill, KL(softmax(r) || P); InfoNCE on gold passages against the rest of the list.

    python agents/pao.py --env ChainRetrieval-SyntheticOpen-v0 --objective pao --reward-model gold

With one step an episode this is the paper's setting. With more, a pick from the list moves the episode on, and the same
loss is taken at every state on the way.
"""

from __future__ import annotations

from retrieval_gym.nn.script import run_script, tell_in_one_line, tell_resume
from retrieval_gym.threads import let_threads_sleep

if __name__ == "__main__":
    let_threads_sleep()
    tell_in_one_line("pao")  # loading torch takes seconds, in which Ctrl-C is likely

import math
import time
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import gymnasium as gym
import numpy as np
import torch
import tyro
from numpy.typing import NDArray
from torch import Tensor

import retrieval_gym  # noqa: F401 - registers the environments
from retrieval_gym import RetrievalDataset, mdp
from retrieval_gym.commands.common import parse_env_kwargs
from retrieval_gym.datasets import Corpus
from retrieval_gym.evaluation import Evaluation, evaluate
from retrieval_gym.ir_metrics import parse_measures
from retrieval_gym.nn.arguments import (
    check_betas,
    check_counts,
    check_env_kwargs,
    check_positive,
    check_shares,
    check_sizes,
    parse_args,
)
from retrieval_gym.nn.contrastive import allowed_negatives
from retrieval_gym.nn.dense import DenseRetriever
from retrieval_gym.nn.embeddings import EmbeddingTable
from retrieval_gym.nn.encoder import TextEncoder
from retrieval_gym.nn.index import ExactIndex
from retrieval_gym.nn.lora import merge_lora
from retrieval_gym.nn.objectives import info_nce
from retrieval_gym.nn.query_side import (
    make_optimizer,
    make_query_encoder,
    normalizes,
    trained_state,
    trains_adapters,
    with_normalization,
)
from retrieval_gym.nn.reporting import (
    check_fingerprints,
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
)
from retrieval_gym.nn.reward_models import make_list_rewards
from retrieval_gym.nn.rollout import states_from
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
from retrieval_gym.nn.scoring import EMPTY, boltzmann_sample
from retrieval_gym.nn.tokens import TokenStore
from retrieval_gym.ranking import SCORE_DECIMALS, rank
from retrieval_gym.registration import environment_dataset

CHAIN_METRICS = ("complete@5", "complete@10", "all_gold_picked", "support_f1")
MEASURES = ("nDCG@10", "R@5", "R@50", "RR@10")  # of one search, by ir_measures
Ids = NDArray[np.int64]


@dataclass
class Args:
    """PAO: positive-advantage-only policy gradient on retrieved lists, query encoder trained, passages frozen."""

    env: str = "ChainRetrieval-SyntheticOpen-v0"
    """environment to train in, over a corpus or with pools, of one step (paper) or several; its train split is used,
    less a share for selection"""
    env_kwargs: tuple[str, ...] = ()
    """keyword arguments of the environment as key=value, e.g. dataset=musique+2wiki"""
    eval_envs: tuple[str, ...] = ()
    """environments to report on, by id or as id?key=value&key=value; default: the dev split of the trained one"""
    eval_split: Literal["dev", "test"] = "dev"
    """split to report on"""
    cache_dir: str = "runs/embeddings"
    """folder that keeps the passages' embeddings from run to run"""
    eval_questions: int | None = None
    """report on a seeded sample of this many questions; default all"""
    seed: int = 1
    """seed of everything"""
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    """where to run"""
    runs: str = "runs"
    """folder of all runs"""
    resume: str | None = None
    """run folder to go on with; its configuration is taken over"""

    encoder: str = "sentence-transformers/all-MiniLM-L6-v2"
    """sentence-transformers or transformers model, Hub id or path: embeds passages, is the reference policy, and is
    where the query side starts (paper: GTE-Base)"""
    layers: tuple[int, ...] | None = None
    """keep only these transformer layers"""
    autocast: bool = False
    """bfloat16 autocast in the encoders"""
    question_tokens: int = 64
    """longest question"""
    passage_tokens: int = 110
    """longest passage, embedded and inside a state"""
    normalize: tyro.conf.FlagCreatePairsOff[bool] = False
    """scale query vectors to unit length; default: what the encoder does (ours)"""
    no_normalize: tyro.conf.FlagCreatePairsOff[bool] = False
    """leave query vectors as long as they are; RL-All is linear in them, and so without a bound (ours)"""
    full: tyro.conf.FlagCreatePairsOff[bool] = False
    """train all weights of the query side; the default up to 100 million of them, so for the default encoder"""
    train_embeddings: bool = True
    """no: word embeddings stay as they are; with LoRA they do so anyway"""
    lora: tyro.conf.FlagCreatePairsOff[bool] = False
    """train LoRA adapters beside the query side's weights; the default beyond 100 million weights (ours)"""
    lora_rank: int = 16
    """rank of the adapters (ours)"""
    lora_alpha: int = 32
    """the adapters' output is scaled by alpha / rank (ours)"""
    lora_targets: tuple[str, ...] | None = None
    """ends of the names of the layers to adapt; default: all linear layers of attention and MLP (ours)"""

    objective: Literal["pao", "rl-all", "kl-distill", "infonce"] = "pao"
    """what is minimised; of the paper's four, infonce takes gold passages in place of a reward model"""
    reward_model: str = "gold"
    """gold: 1 for a missing gold passage, else 0 (ours); reranker:NAME_OR_PATH: a sentence-transformers CrossEncoder on
    the state's text and the passage (paper); package.module:function: f(questions, histories, passages) -> rewards.
    A gold passage outside the list is not put into it, the policy learns from what it retrieves; infonce, which is no
    policy gradient, learns from it all the same"""
    reranker_output: Literal["logits", "sigmoid"] = "logits"
    """rewards are the reranker's logits, or their sigmoid (ours)"""
    reward_cache: str | None = None
    """folder that hands a reranker's scores of pairs from run to run, which may then differ in the last bits"""
    list_size: int = 100
    """K, passages of a list; fewer where the candidates are fewer (paper: 100)"""
    temperature: float = 1.0
    """of the list's distribution, in every objective (paper: 1.0). Scores of unit vectors differ little, so 1.0 leaves
    it nearly uniform: look at losses/entropy"""
    beta: float = 0.3
    """weight of the KL to the reference in pao (paper: .3)"""
    teacher_temperature: float = 1.0
    """kl-distill: temperature of the softmax over the rewards (ours)"""
    act: Literal["greedy", "sample"] = "greedy"
    """which passage of the list is picked: the best, or one drawn from P (ours)"""

    epochs: int = 2
    """times that every training question is played (paper: 2)"""
    batch_size: int = 16
    """episodes an update, all their states together (paper: 16 queries)"""
    learning_rate: float = 2e-5
    """AdamW (paper: 2e-5; its optimiser is not told)"""
    betas: tuple[float, float] = (0.9, 0.999)
    """AdamW (ours)"""
    weight_decay: float = 0.01
    """AdamW (ours)"""
    warmup_updates: int = 100
    """updates of linear warm-up (paper: 100)"""
    schedule: Literal["linear", "cosine", "constant"] = "linear"
    """course of the learning rate after the warm-up (ours)"""
    final_learning_rate: float = 0.0
    """where the schedule ends, as a share of the learning rate (ours)"""
    max_grad_norm: float = 1.0
    """gradient clipping, L2 (ours)"""

    selection_share: float = 0.1
    """share of the train questions kept apart to select the checkpoint, by nDCG@10 where an episode has one step, else
    by complete@5, in pools by all_gold_picked (ours)"""
    eval_every: int = 100
    """updates between two selections; checkpoints come with these, and once a minute (ours)"""


def check_args(args: Args) -> None:
    """Raise ValueError for a number out of range, or a flag that would do nothing."""
    check_counts(
        args, "epochs", "batch_size", "list_size", "eval_every", "eval_questions", "question_tokens", "passage_tokens",
        "lora_rank", "lora_alpha",
    )  # fmt: skip
    check_shares(args, "final_learning_rate")
    check_sizes(args, "beta", "learning_rate", "weight_decay", "warmup_updates")
    check_positive(args, "max_grad_norm")
    for name in ("temperature", "teacher_temperature"):
        if not 0 < getattr(args, name) < math.inf:
            raise ValueError(f"{name} is {getattr(args, name)}: it must be finite and above 0")
    if args.list_size < 2 and args.objective != "infonce":
        raise ValueError("list_size is 1: advantages compare passages of a list, so it needs at least 2")
    if args.normalize and args.no_normalize:
        raise ValueError("--normalize and --no-normalize are both given: choose one")
    for name, objective in (("beta", "pao"), ("teacher_temperature", "kl-distill")):
        if getattr(args, name) != getattr(Args, name) and args.objective != objective:
            raise ValueError(f"{name} is {getattr(args, name)}: only --objective {objective} has one; leave it out")
    if args.objective == "infonce" and args.reward_model != "gold":
        raise ValueError(f"reward_model is {args.reward_model}: --objective infonce learns from gold; leave it out")
    if args.reranker_output != "logits" and not args.reward_model.startswith("reranker:"):
        raise ValueError(f"reranker_output is {args.reranker_output}: pass --reward-model reranker:NAME_OR_PATH")
    if args.reward_cache is not None and not args.reward_model.startswith("reranker:"):
        raise ValueError(f"reward_cache is {args.reward_cache}: pass --reward-model reranker:NAME_OR_PATH")
    check_betas(args.betas)
    check_env_kwargs(args.env_kwargs)


# The objectives. Lists are (B, K), ``listed`` False past their ends; every row holds at least one passage.


def log_policy(scores: Tensor, listed: Tensor, temperature: float) -> Tensor:
    """The log of P(d_i | s) within the list (equation 1), ``(B, K)``; 0 past the end, where it adds nothing to sums."""
    logits = (scores / temperature).masked_fill(~listed, -torch.inf)
    return logits.log_softmax(dim=1).masked_fill(~listed, 0.0)


def advantages(rewards: Tensor, listed: Tensor) -> Tensor:
    """A_i = (r_i - mean) / std over the list, ``(B, K)``; 0 past the end, and where no two rewards differ by 1e-6.

    The std is that of the K numbers, not an estimate from a sample. It would blow up what only rounding tells apart.
    """
    size = listed.sum(dim=1, keepdim=True)
    centred = (rewards - (rewards * listed).sum(dim=1, keepdim=True) / size).masked_fill(~listed, 0.0)
    spread = rewards.masked_fill(~listed, -torch.inf).amax(1) - rewards.masked_fill(~listed, torch.inf).amin(1)
    std = (centred.square().sum(dim=1, keepdim=True) / size).sqrt()
    return torch.where((spread > 10.0**-SCORE_DECIMALS)[:, None], centred / std, 0.0)


def divergence(log_p: Tensor, log_q: Tensor) -> Tensor:
    """KL(P || Q) of distributions over the same lists, both by ``log_policy``, ``(B,)``."""
    return (log_p.exp() * (log_p - log_q)).sum(dim=1)


def rl_all(log_p: Tensor, advantage: Tensor) -> Tensor:
    """-sum_i A_i log P_i (equation 2), ``(B,)``."""
    return -(advantage * log_p).sum(dim=1)


def pao(log_p: Tensor, log_ref: Tensor, advantage: Tensor, beta: float) -> Tensor:
    """-sum_i 1[A_i > 0] A_i log P_i + beta KL(P || P_ref) (equation 3), ``(B,)``."""
    return -(advantage.clamp(min=0) * log_p).sum(dim=1) + beta * divergence(log_p, log_ref)


def kl_distill(log_p: Tensor, rewards: Tensor, listed: Tensor, temperature: float) -> Tensor:
    """KL(softmax(r / temperature) || P), ``(B,)`` (section 4.6, which does not tell the temperature)."""
    return divergence(log_policy(rewards, listed, temperature), log_p)


def gold_info_nce(
    queries: Tensor, states: mdp.States, lists: Ids, dataset: RetrievalDataset, vectors: Tensor, temperature: float
) -> Tensor:
    """InfoNCE of each missing gold passage against the list less all gold and copies, a mean over these, ``(B,)``.

    The gold passages need not be in the list. A state that misses none has loss 0.
    """
    gold = dataset.gold[states.question]
    missing = (gold >= 0) & ~mdp.found_gold(states, dataset)
    rows, places = np.nonzero(missing)
    negatives = allowed_negatives(states, lists, dataset)[rows]
    ids = torch.from_numpy(np.concatenate([gold[rows, places][:, None], negatives], axis=1)).to(vectors.device)
    row = torch.from_numpy(rows).to(vectors.device)
    loss, _ = info_nce(queries[row], vectors[ids.clamp(min=0)], ids >= 0, temperature)
    shares = torch.from_numpy(1 / missing.sum(axis=1)[rows]).to(loss)
    return loss.new_zeros(len(states)).index_add(0, row, shares * loss)


def retrieve(queries: Tensor, states: mdp.States, index: ExactIndex, k: int) -> Ids:
    """The macro-action: the K best passages that a state has not picked, int64 ``(B, K)``, padded with -1."""
    queries = queries.detach()
    if states.pool is None:
        return index.search(queries, k, states.picked)[0].cpu().numpy()
    pool = torch.from_numpy(states.pool).to(index.device)
    scores = torch.einsum("bd,bpd->bp", queries, index.vectors[pool.clamp(min=0)])
    return rank(states, scores.cpu().numpy(), min(k, pool.shape[1]))[0]


def metrics_of(steps: int) -> tuple[str, ...]:
    """What is reported: measures of one ranking where an episode is one search, else of chains."""
    return MEASURES if steps == 1 else CHAIN_METRICS


def score(retriever: DenseRetriever, asked: RetrievalDataset, steps: int, limit: int | None = None) -> Evaluation:
    """Play greedily to the end of the budget; gold never stops an evaluation."""
    measures = MEASURES if steps == 1 else ()
    return evaluate(retriever, asked, steps=steps, limit=limit, measures=measures, progress=asked.name)


def main(args: Args) -> Path:
    """Train, select, report; returns the run folder."""
    check_args(args)
    seed_everything(args.seed)
    keep_freed_memory()
    device = resolve_device(args.device)
    earlier = earlier_run(args.resume, args.runs)

    # Questions: train, a share of train to select on, and what is reported.
    dataset, max_steps = environment_dataset(args.env, "train", **parse_env_kwargs(args.env_kwargs))
    selection, train = hold_out(dataset, args.selection_share, args.seed)
    specs = args.eval_envs or (environment_spec(args.env, args.env_kwargs),)
    reported = {spec: load_reported(spec, args.eval_split) for spec in specs}
    for spec, (reported_dataset, _) in reported.items():
        refuse_overlap(dataset, spec, reported_dataset)
    if 1 in {max_steps, *(steps for _, steps in reported.values())}:
        parse_measures(MEASURES)  # raises before any work where ir_measures is missing
    select_by = "nDCG@10" if max_steps == 1 else "complete@5" if train.pools is None else "all_gold_picked"
    plays = args.epochs * len(train)
    updates = math.ceil(plays / args.batch_size)

    @lru_cache(maxsize=2)  # an update may lie in two epochs
    def order(epoch: int) -> Ids:
        return np.random.default_rng((args.seed, epoch)).permutation(len(train))

    def questions(update: int) -> Ids:
        """What is played in an update: every epoch plays all questions, each in an order of its own."""
        first, end = update * args.batch_size, min((update + 1) * args.batch_size, plays)
        epochs = range(first // len(train), math.ceil(end / len(train)))
        start = first % len(train)
        return np.concatenate([order(epoch) for epoch in epochs])[start : start + end - first]

    # Environment. A budget below the number of gold passages is no obstacle: no reward waits for all of them.
    num_envs = min(args.batch_size, plays)
    envs = gym.make_vec(
        "ChainRetrieval-v0", num_envs=num_envs, dataset=train, max_steps=max_steps, observation="ids", reward="recall",
        allow_unreachable=True,
    )  # fmt: skip

    # Networks: a frozen encoder of passages, embedded once; the reference policy, which is that encoder too; and the
    # query encoder, which starts from it. ``raw`` has the query encoder's weights and stops short of unit length.
    frozen = TextEncoder.load(args.encoder, device=device, layers=args.layers, autocast=args.autocast)
    frozen.requires_grad_(False)
    normalize = normalizes(frozen) if not (args.normalize or args.no_normalize) else args.normalize
    reference = with_normalization(frozen, normalize)
    lora = trains_adapters(args, frozen)
    encoder = make_query_encoder(args, reference, lora=lora)
    raw = with_normalization(encoder, False)
    optimizer = make_optimizer(args, encoder)
    weights = optimizer.param_groups[0]["params"]
    rewards_of = make_list_rewards(
        args.reward_model, train, device=device, output=args.reranker_output, cache_dir=args.reward_cache
    )
    tables: dict[str, Tensor] = {}

    def vectors_of(corpus: Corpus) -> Tensor:
        """E_p of a corpus, ``(N, D)``."""
        if corpus.fingerprint not in tables:
            table = EmbeddingTable.build(
                frozen, corpus, max_tokens=args.passage_tokens, cache_dir=args.cache_dir, progress=True
            )
            tables[corpus.fingerprint] = torch.as_tensor(table.vectors).to(device)
        return tables[corpus.fingerprint]

    def retriever(searcher: TextEncoder, asked: RetrievalDataset) -> DenseRetriever:
        return DenseRetriever(
            asked, searcher, vectors=vectors_of(asked.corpus), max_passage_tokens=args.passage_tokens,
            max_question_tokens=args.question_tokens,
        )  # fmt: skip

    store = TokenStore(
        train, frozen, question_tokens=args.question_tokens, passage_tokens=args.passage_tokens, order="pick"
    )
    vectors = vectors_of(train.corpus)
    index = ExactIndex(vectors, device=device)

    known = fingerprints(frozen, dataset, reported)
    run = earlier or Run.create(args.runs, args.env, "pao", args.seed, asdict(args))
    run.lock()
    print(
        f"run {run.directory} on {device}: {args.objective}, {'LoRA' if lora else 'all weights'}, {updates} updates of "
        f"{num_envs} episodes, unit queries: {normalize}"
    )
    tell_resume(run.directory)
    tell_long_warmup(args, updates)
    first_update, transitions, best = 0, 0, -1.0

    def checkpoint(update: int) -> dict[str, Any]:
        return {
            "update": update, "transitions": transitions, "best": best, "query": trained_state(encoder),
            "optimizer": optimizer.state_dict(), "rng": rng_state(), "rewards": rewards_of.state_dict(),
            "untrained": untrained, "fingerprints": known,
        }  # fmt: skip

    if run.has_begun():
        state = run.load("last", map_location=device)
        with run.taking_over("last"):
            check_fingerprints(state["fingerprints"], known)
            encoder.load_state_dict(state["query"], strict=False)
            optimizer.load_state_dict(state["optimizer"])
            rewards_of.load_state_dict(state["rewards"])
            set_rng_state(state["rng"])
            first_update, transitions, best = state["update"], state["transitions"], state["best"]
            untrained = state["untrained"]
        print(f"goes on after update {first_update} of {updates}")
    else:
        untrained = {
            spec: untrained_values(
                spec, score(retriever(reference, asked), asked, steps, args.eval_questions), metrics_of(steps)
            )
            for spec, (asked, steps) in reported.items()
        }
        best = score(retriever(reference, selection), selection, max_steps).mean(select_by)
        run.save("best", {"query": trained_state(encoder), "update": 0})
        run.save("last", checkpoint(0))

    started, played_before = time.monotonic(), transitions
    for update in range(first_update, updates):
        learning_rate = args.learning_rate * schedule_factor(args, update, updates) * warmup_factor(args, update)
        optimizer.param_groups[0]["lr"] = learning_rate
        asked = questions(update)
        where = f"update {update}, questions {np.unique(asked).tolist()}"

        # Play one episode of each question; rows past the last question, and those that have ended, are not looked at.
        # The pass that retrieves and picks is the one that is differentiated: no update comes between them.
        options = {"question": np.resize(asked, num_envs)}
        obs, info = envs.reset(seed=args.seed + update * num_envs, options=options)
        going = np.arange(num_envs) < len(asked)
        returns, lengths = np.zeros(num_envs), np.zeros(num_envs, np.int64)
        losses, logs = [], []
        while going.any():
            rows = np.flatnonzero(going)
            states = states_from(obs, info)[rows]
            unscaled = store.embed(states, raw)
            norms = unscaled.detach().norm(dim=1)
            check_finite(norms.sum().item(), where)
            queries = torch.nn.functional.normalize(unscaled, dim=1) if normalize else unscaled
            with torch.no_grad():
                anchors = store.embed(states, reference)

            # The list, what the policy and the reference make of it, and its rewards. While a gold passage is missing
            # there is one left to pick, so no list is empty.
            lists = retrieve(queries, states, index, min(args.list_size, len(train.corpus)))
            ids = torch.from_numpy(lists).to(device)
            listed, listing = ids >= 0, vectors[ids.clamp(min=0)]
            scores = torch.einsum("bd,bkd->bk", queries, listing)
            log_p = log_policy(scores, listed, args.temperature)
            log_ref = log_policy(torch.einsum("bd,bkd->bk", anchors, listing), listed, args.temperature)
            rewards = torch.from_numpy(rewards_of(states, lists)).float().to(device)
            advantage = advantages(rewards, listed)

            if args.objective == "pao":
                losses.append(pao(log_p, log_ref, advantage, args.beta))
            elif args.objective == "rl-all":
                losses.append(rl_all(log_p, advantage))
            elif args.objective == "kl-distill":
                losses.append(kl_distill(log_p, rewards, listed, args.teacher_temperature))
            else:
                losses.append(gold_info_nce(queries, states, lists, train, vectors, args.temperature))

            # Pick, and go on.
            place = torch.zeros(len(rows), dtype=torch.int64)
            if args.act == "sample":
                place = boltzmann_sample(scores.detach().masked_fill(~listed, EMPTY), args.temperature).cpu()
            picks = lists[np.arange(len(rows)), place.numpy()]
            actions = np.zeros(num_envs, np.int64)
            actions[rows] = picks if states.pool is None else (states.pool == picks[:, None]).argmax(axis=1)
            obs, reward, terminated, truncated, info = envs.step(actions)
            returns[rows] += reward[rows]
            lengths[rows] += 1
            going &= ~(terminated | truncated)
            with torch.no_grad():
                logs.append({
                    "losses/kl": divergence(log_p, log_ref), "losses/entropy": -(log_p.exp() * log_p).sum(dim=1),
                    "losses/query_norm": norms, "charts/drift": 1 - torch.cosine_similarity(queries, anchors, dim=1),
                    "charts/reward": rewards[:, 0],
                    "charts/positive_share": (advantage > 0).sum(dim=1) / listed.sum(dim=1),
                    "charts/signal_share": (advantage != 0).any(dim=1).float(),
                })  # fmt: skip

        # Learn from all states of the batch.
        objective = torch.cat(losses)
        loss = objective.mean()
        check_finite(loss.item(), where)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        grad_norm = torch.nn.utils.clip_grad_norm_(weights, args.max_grad_norm)
        optimizer.step()

        # Log, select, keep.
        transitions += len(objective)
        values = {"losses/objective": loss.item()}
        values |= {name: torch.cat([log[name] for log in logs]).mean().item() for name in logs[0]}
        values |= {
            "losses/grad_norm": float(grad_norm), "charts/learning_rate": learning_rate,
            "charts/episodic_return": returns[: len(asked)].mean(),
            "charts/episodic_length": lengths[: len(asked)].mean(),
            "charts/SPS": (transitions - played_before) / (time.monotonic() - started),
        }  # fmt: skip
        last = update + 1 == updates
        if last or (update + 1) % args.eval_every == 0:
            selected = score(retriever(encoder, selection), selection, max_steps)
            values |= {f"eval/{metric}": selected.mean(metric) for metric in metrics_of(max_steps)}
            if selected.mean(select_by) > best:
                best = selected.mean(select_by)
                run.save("best", {"query": trained_state(encoder), "update": update + 1})
        run.log(values, transitions)
        if last or run.is_due or (update + 1) % args.eval_every == 0:
            run.save("last", checkpoint(update + 1))
            rewards_of.keep()
        run.progress(update + 1, updates, values)
    envs.close()

    # Report the selected checkpoint beside the untrained encoder, question by question, with the encoder that is saved.
    kept = run.load("best", map_location=device)
    with run.taking_over("best"):
        encoder.load_state_dict(kept["query"], strict=False)
    query_encoder = merge_lora(encoder) if lora else encoder
    tell_selected(f"update {kept['update']}", select_by, best, selection)
    report = {
        spec: report_difference(
            spec, args.eval_split, steps, untrained[spec],
            score(retriever(query_encoder, asked), asked, steps, args.eval_questions),
        )
        for spec, (asked, steps) in reported.items()
    }  # fmt: skip
    run.save_encoder("query_encoder", query_encoder)
    run.save_encoder("passage_encoder", frozen)
    run.write_json("eval.json", report)
    run.finish()
    tell_run(run.directory, args.env, args.env_kwargs)
    return run.directory


if __name__ == "__main__":
    run_script("pao", lambda: parse_args(Args), main)
