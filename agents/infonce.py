"""On-policy supervised InfoNCE: a chain retriever trained on the states that it reaches itself.

A state s is a question and the passages picked so far, wrong ones included. Its positive a* is the earliest gold
passage in chain order that it still misses, and

    loss(s) = -log exp(<E_q(s), E_p(a*)> / t) / sum_d exp(<E_q(s), E_p(d)> / t),

where d runs over a* and negatives, never over another gold passage. E_p and the passages' embeddings are frozen; only
E_q learns. Each epoch the current model walks T greedy steps on the training questions; the distinct states on the way
that still miss a gold passage are sampled uniformly, as many as there are gold histories, and stand beside these. In
the first epoch an encoder that was trained on gold histories alone does the walk; it supplies states and nothing else.

    python agents/infonce.py --env ChainRetrieval-SyntheticOpen-v0

--states chooses what stands beside the gold histories; the number of states in an epoch is the same for every choice.
"""

from __future__ import annotations

from retrieval_gym.nn.script import run_script, tell_in_one_line, tell_resume
from retrieval_gym.threads import let_threads_sleep

if __name__ == "__main__":
    let_threads_sleep()
    tell_in_one_line("infonce")  # loading torch takes seconds, in which Ctrl-C is likely

import math
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
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
from retrieval_gym.nn.arguments import (
    check_betas,
    check_counts,
    check_env_kwargs,
    check_positive,
    check_shares,
    check_sizes,
    parse_args,
)
from retrieval_gym.nn.contrastive import allowed_negatives, draw, gold_states, noise_states, room_for_wrong, spread
from retrieval_gym.nn.dense import DenseRetriever
from retrieval_gym.nn.embeddings import EmbeddingTable
from retrieval_gym.nn.encoder import TextEncoder
from retrieval_gym.nn.lessons import Examples, Lesson
from retrieval_gym.nn.lora import adapter_dropout, merge_lora
from retrieval_gym.nn.objectives import info_nce
from retrieval_gym.nn.query_side import (
    FULL_LIMIT,
    make_optimizer,
    make_query_encoder,
    trained_state,
    trains_adapters,
)
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
)
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
from retrieval_gym.nn.tokens import TokenStore
from retrieval_gym.nn.trained import load_run_encoder, run_encoder_folder
from retrieval_gym.progress import Progress
from retrieval_gym.ranking import Retriever
from retrieval_gym.registration import environment_dataset

METRICS = ("complete@5", "complete@10", "all_gold_picked", "support_f1")
WALKED = ("once", "once-resampled", "on-policy")
RESAMPLED = ("noise-resampled", "once-resampled", "on-policy")
LEARNING_RATE = {"full": 3e-5, "lora": 2e-4}
Ids = NDArray[np.int64]


@dataclass
class Args:
    """On-policy supervised InfoNCE: train the query side on gold histories and on the states that it reaches itself."""

    env: str = "ChainRetrieval-SyntheticOpen-v0"
    """environment to train in, over a corpus or with pools; its train split is used, less a share for selection"""
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
    """sentence-transformers or transformers model, Hub id or path: embeds passages, and is where the query side starts
    (paper: Qwen/Qwen3-Embedding-0.6B)"""
    layers: tuple[int, ...] | None = None
    """keep only these transformer layers"""
    autocast: bool = False
    """bfloat16 autocast in the encoders"""
    question_tokens: int = 64
    """longest question"""
    passage_tokens: int = 110
    """longest passage, embedded and inside a state"""
    full: tyro.conf.FlagCreatePairsOff[bool] = False
    """train all weights of the query side; the default up to 100 million of them, so for the default encoder"""
    train_embeddings: bool = True
    """no: word embeddings stay as they are; with LoRA they do so anyway"""
    lora: tyro.conf.FlagCreatePairsOff[bool] = False
    """train LoRA adapters beside the query side's weights (paper); the default beyond 100 million weights"""
    lora_rank: int = 16
    """rank of the adapters (ours)"""
    lora_alpha: int = 32
    """the adapters' output is scaled by alpha / rank (ours)"""
    lora_dropout: float = 0.0
    """dropout on the adapters' inputs in updates (ours); the encoder's own dropout is always off"""
    lora_targets: tuple[str, ...] | None = None
    """ends of the names of the layers to adapt; default: all linear layers of attention and MLP (ours)"""

    states: Literal["gold", "noise", "noise-resampled", "once", "once-resampled", "on-policy"] = "on-policy"
    """what stands beside the gold histories. gold: nothing, each history comes twice; noise: gold histories with random
    wrong passages out of the negatives' candidates, drawn once; once: one sample of the first walker's states;
    -resampled: drawn anew each epoch; on-policy: each epoch's states come from a walk of the current model"""
    mix: float = 0.5
    """share of those states in an epoch, which has twice as many states as there are gold histories (1: no gold)"""
    first_walker: str | None = None
    """folder of a finished run with --states gold, whose encoder does the first walk; default: one is trained first"""
    first_walker_epochs: int | None = None
    """epochs of that training; default: as many as --epochs"""
    negatives: Literal["per-state", "per-question"] = "per-state"
    """candidates: the frozen encoder's best passages for the text of the state, or of the question alone; where
    questions have pools, it is the rest of the pool"""
    negative_depth: int = 100
    """how many of the frozen encoder's best passages are candidates (paper: 100)"""
    num_negatives: int = 32
    """negatives of a state, drawn from its candidates each time that it is used (ours)"""
    temperature: float = 0.05
    """of the loss (paper: .05)"""

    epochs: int = 3
    """epochs (ours)"""
    rounds: int = 1
    """rounds an epoch: its questions are dealt into so many, and the current model walks those of a round before it
    learns from them; with one epoch it then walks over questions that it has not learned from (ours)"""
    batch_size: int = 32
    """states an update (ours)"""
    learning_rate: float | None = None
    """AdamW; default 3e-5 in full, 2e-4 with LoRA (ours)"""
    betas: tuple[float, float] = (0.9, 0.999)
    """AdamW (ours)"""
    weight_decay: float = 0.01
    """AdamW (ours)"""
    warmup_updates: int = 20
    """updates of linear warm-up (ours)"""
    schedule: Literal["linear", "cosine", "constant"] = "linear"
    """course of the learning rate after the warm-up (ours)"""
    final_learning_rate: float = 0.0
    """where the schedule ends, as a share of the learning rate (ours)"""
    max_grad_norm: float = 1.0
    """gradient clipping, L2 (ours)"""

    selection_share: float = 0.1
    """share of the train questions kept apart to select the best epoch: by complete@5, in pools by all_gold_picked; of
    equals, by support_f1"""


def check_args(args: Args) -> None:
    """Raise ValueError for a number out of range, or a flag that would do nothing."""
    check_counts(
        args, "epochs", "rounds", "batch_size", "num_negatives", "negative_depth", "first_walker_epochs",
        "eval_questions", "question_tokens", "passage_tokens", "lora_rank", "lora_alpha",
    )  # fmt: skip
    check_shares(args, "final_learning_rate", "mix")
    check_sizes(args, "learning_rate", "weight_decay", "warmup_updates")
    check_positive(args, "max_grad_norm")
    if not 0 < args.temperature < math.inf:
        raise ValueError(f"temperature is {args.temperature}: it must be finite and above 0")
    if args.states == "gold" and args.mix != 0.5:
        raise ValueError(f"mix is {args.mix}: --states gold has nothing to mix in; leave --mix out")
    if args.mix == 0:
        raise ValueError("mix is 0: for gold histories alone pass --states gold")
    for name in ("first_walker", "first_walker_epochs"):
        if getattr(args, name) is not None and args.states not in WALKED:
            raise ValueError(f"{name} is {getattr(args, name)}: --states {args.states} has no walk; leave it out")
    if args.first_walker is not None and args.first_walker_epochs is not None:
        raise ValueError("--first-walker and --first-walker-epochs are both given: that walker is trained already")
    check_betas(args.betas)
    check_env_kwargs(args.env_kwargs)


def walk(
    retriever: Retriever, envs: gym.vector.VectorEnv, dataset: RetrievalDataset, questions: Ids, seed: int
) -> mdp.States:
    """Take greedy steps on ``questions``, one a row; return the distinct states that still miss a gold passage."""
    obs, info = envs.reset(seed=seed, options={"question": questions})
    visited, ended = [], np.zeros(1, bool)
    while not ended.any():
        states = states_from(obs, info)
        visited.append(states)
        picks = retriever.search(states, 1)[0][:, 0]
        actions = picks if states.pool is None else (states.pool == picks[:, None]).argmax(axis=1)
        obs, _, ended, _, info = envs.step(np.maximum(actions, 0))
    reached = mdp.concatenate(visited)
    reached = reached[~mdp.is_complete(reached, dataset)]
    return reached[reached.distinct()[0]]


def earliest_missing(states: mdp.States, dataset: RetrievalDataset) -> Ids:
    """The target: the first gold passage in chain order that is not picked, nor a copy of it; canonical, ``(B,)``."""
    gold = dataset.gold[states.question]
    missing = (gold >= 0) & ~mdp.found_gold(states, dataset)
    return gold[np.arange(len(gold)), missing.argmax(axis=1)]


@dataclass
class Learner:
    """A query side under training."""

    args: Args
    encoder: TextEncoder
    optimizer: torch.optim.Optimizer
    store: TokenStore
    vectors: Tensor
    peak: float

    def learn(
        self, lesson: Lesson, first_update: int, updates: int, progress: Callable[[int, dict[str, float]], None]
    ) -> dict[str, float]:
        """Learn what is left of a lesson, with fresh negatives; return what to log of all of it.

        Args:
            lesson: the states of this round.
            first_update: number of updates before the lesson.
            updates: number of updates of the whole training.
            progress: called after each update with the number of states learned and the last loss and accuracy.
        """
        args, device, weights = self.args, self.vectors.device, self.optimizer.param_groups[0]["params"]
        adapter_dropout(self.encoder, on=True)
        while lesson.learned < len(lesson.order):
            began, update = time.monotonic(), first_update + lesson.learned // args.batch_size
            learning_rate = self.peak * schedule_factor(args, update, updates) * warmup_factor(args, update)
            self.optimizer.param_groups[0]["lr"] = learning_rate
            batch = lesson.next_batch(args.batch_size)
            negatives = draw(batch.candidates, min(args.num_negatives, batch.candidates.shape[1]), lesson.rng)
            lists = torch.from_numpy(np.concatenate([batch.positives[:, None], negatives], axis=1)).to(device)
            queries = self.store.embed(batch.states, self.encoder)
            loss, first = info_nce(queries, self.vectors[lists.clamp(min=0)], lists >= 0, args.temperature)
            mean = loss.mean()
            check_finite(mean.item(), f"update {update}, questions {np.unique(batch.states.question).tolist()}")
            self.optimizer.zero_grad(set_to_none=True)
            mean.backward()
            norm = float(torch.nn.utils.clip_grad_norm_(weights, args.max_grad_norm))
            self.optimizer.step()
            lesson.note(loss.tolist(), first.float().tolist(), norm, time.monotonic() - began)
            progress(lesson.learned, {"loss": mean.item(), "accuracy": float(first.float().mean())})
        adapter_dropout(self.encoder, on=False)
        return {
            "losses/info_nce": float(np.mean(lesson.losses)), "losses/grad_norm": float(np.mean(lesson.norms)),
            "charts/accuracy": float(np.mean(lesson.firsts)),
            "charts/learning_rate": self.optimizer.param_groups[0]["lr"],
        }  # fmt: skip


def train_first_walker(args: Args, learner: Learner, gold: Examples) -> None:
    """Train a query side the usual way: on gold histories alone, as many states an epoch as any regime."""
    epochs = args.first_walker_epochs or args.epochs
    size = 2 * len(gold)
    batches = math.ceil(size / args.batch_size)
    with Progress("first walker", epochs * size, "states") as shown:
        for epoch in range(epochs):
            rng = np.random.default_rng((args.seed, epoch))
            lesson = Lesson.begin(gold[spread(len(gold), size, rng)], rng)
            values = learner.learn(
                lesson, epoch * batches, epochs * batches,
                lambda states, values, epoch=epoch: shown.update(epoch * size + states - shown.done),
            )  # fmt: skip
            print(
                f"first walker, epoch {epoch + 1} of {epochs}: loss {values['losses/info_nce']:.4g}, "
                f"accuracy {values['charts/accuracy']:.3f}",
                flush=True,
            )


def open_first_walker(args: Args) -> Run:
    """Open the run of ``--first-walker``.

    Raises:
        FileNotFoundError: when there is no such run, or it has not finished.
        ValueError: when it was not trained on gold histories, or over other passage embeddings.
    """
    assert args.first_walker is not None
    run = Run.open(args.first_walker)
    for name, wanted in (("states", "gold"), ("encoder", args.encoder), ("layers", args.layers)):
        found = run.config.get(name)
        if (tuple(found) if isinstance(found, list) else found) != wanted:
            raise ValueError(f"{args.first_walker} has {name}={found!r}: give a walker with {name}={wanted!r}")
    run_encoder_folder(run, "query_encoder")
    return run


def main(args: Args) -> Path:
    """Train, select, report; returns the run folder."""
    check_args(args)
    seed_everything(args.seed)
    keep_freed_memory()
    device = resolve_device(args.device)
    earlier = earlier_run(args.resume, args.runs)
    given_walker = open_first_walker(args) if args.first_walker is not None else None

    # Questions: train, a share of train to select on, and what is reported.
    dataset, max_steps = environment_dataset(args.env, "train", **parse_env_kwargs(args.env_kwargs))
    check_reachable(dataset, max_steps)
    selection, train = hold_out(dataset, args.selection_share, args.seed)
    specs = args.eval_envs or (environment_spec(args.env, args.env_kwargs),)
    reported = {spec: load_reported(spec, args.eval_split) for spec in specs}
    for spec, (reported_dataset, _) in reported.items():
        refuse_overlap(dataset, spec, reported_dataset)
    select_by = "complete@5" if train.pools is None else "all_gold_picked"
    if train.pools is not None and (args.negatives, args.negative_depth) != (Args.negatives, Args.negative_depth):
        raise ValueError(f"{args.env} has pools, whose rest are the negatives: leave --negatives and their depth out")

    # Environments: one row a question of a round, so that a walk is one episode of every row.
    if args.rounds > len(train):
        raise ValueError(f"rounds is {args.rounds}: {len(train)} training questions cannot be dealt into so many")
    order = np.random.default_rng(args.seed).permutation(len(train)) if args.rounds > 1 else np.arange(len(train))
    deal = [np.sort(questions) for questions in np.array_split(order, args.rounds)]
    envs = [
        gym.make_vec(
            "ChainRetrieval-v0", num_envs=len(questions), dataset=train, max_steps=max_steps, observation="ids",
            stop_when_complete=False, autoreset_mode=gym.vector.AutoresetMode.DISABLED,
        )
        for questions in deal
    ]  # fmt: skip

    # Networks: a frozen encoder of passages, embedded once, and a query side that starts from it.
    frozen = TextEncoder.load(args.encoder, device=device, layers=args.layers, autocast=args.autocast)
    frozen.requires_grad_(False)
    lora = trains_adapters(args, frozen, FULL_LIMIT)
    peak = LEARNING_RATE["lora" if lora else "full"] if args.learning_rate is None else args.learning_rate
    tables: dict[str, Tensor] = {}

    def vectors(corpus: Corpus) -> Tensor:
        """E_p of a corpus, ``(N, D)``."""
        if corpus.fingerprint not in tables:
            table = EmbeddingTable.build(
                frozen, corpus, max_tokens=args.passage_tokens, cache_dir=args.cache_dir, progress=True
            )
            tables[corpus.fingerprint] = torch.as_tensor(table.vectors).to(device)
        return tables[corpus.fingerprint]

    def retriever(encoder: TextEncoder, asked: RetrievalDataset) -> DenseRetriever:
        return DenseRetriever(
            asked, encoder, vectors=vectors(asked.corpus), max_passage_tokens=args.passage_tokens,
            max_question_tokens=args.question_tokens,
        )  # fmt: skip

    def score(encoder: TextEncoder, asked: RetrievalDataset, steps: int, limit: int | None = None) -> Evaluation:
        """Walk greedily to the end of the budget; gold never stops an evaluation."""
        return evaluate(retriever(encoder, asked), asked, steps=steps, limit=limit, progress=asked.name)

    def worth(result: Evaluation) -> list[float]:
        """What epochs are selected by: few questions tie often, so equals are told apart by a finer metric."""
        return [result.mean(select_by), result.mean("support_f1")]

    def make_learner() -> Learner:
        encoder = make_query_encoder(args, frozen, lora=lora, dropout=args.lora_dropout)
        store = TokenStore(
            train, encoder, question_tokens=args.question_tokens, passage_tokens=args.passage_tokens, order="pick"
        )
        return Learner(args, encoder, make_optimizer(args, encoder), store, vectors(train.corpus), peak)

    learner = make_learner()

    # Candidates for negatives: by the frozen encoder, by one rule for all states.
    miner = retriever(frozen, train)
    fresh = mdp.dataset_states(train, np.arange(len(train)), max_steps)
    depth = min(args.negative_depth, len(train.corpus))
    shared = None
    if train.pools is None and (args.negatives == "per-question" or args.states.startswith("noise")):
        shared, _ = miner.search(fresh, depth)

    def of_question(states: mdp.States) -> Ids:
        """Candidates by the question alone, int64 ``(B, C)``."""
        found = states.pool if shared is None else shared[states.question]
        return allowed_negatives(states, found, train)

    def examples(states: mdp.States) -> Examples:
        if train.pools is not None or args.negatives == "per-question":
            candidates = of_question(states)
        else:
            candidates = allowed_negatives(states, miner.search(states, depth)[0], train)
        return Examples(states, earliest_missing(states, train), candidates)

    # An epoch has twice as many states as there are gold histories, whatever stands beside them.
    gold = gold_states(train, max_steps)
    roomy = gold[room_for_wrong(gold) > 0]
    if args.states.startswith("noise") and len(roomy) == 0:
        raise ValueError(f"--states {args.states}: max_steps={max_steps} leaves no history room for a wrong passage")
    gold_rows = [np.flatnonzero(np.isin(gold.question, questions)) for questions in deal]
    sizes = [2 * len(rows) for rows in gold_rows]
    others = [0 if args.states == "gold" else round(args.mix * size) for size in sizes]
    if args.states != "gold" and min(others) == 0:
        raise ValueError(f"mix is {args.mix}: of the {min(sizes)} states of a round that is not one; raise it")
    batches = [math.ceil(size / args.batch_size) for size in sizes]
    gold_examples = examples(gold)

    known = fingerprints(frozen, dataset, reported)
    run = earlier or Run.create(args.runs, args.env, "infonce", args.seed, asdict(args))
    run.lock()
    print(
        f"run {run.directory} on {device}: {'LoRA' if lora else 'all weights'}, {args.epochs} epochs of {sum(sizes)} "
        f"states, {sum(others)} of them beside the gold histories"
    )
    tell_resume(run.directory)
    tell_long_warmup(args, args.epochs * sum(batches))
    first_part, best = 0, [-1.0, -1.0]
    lesson: Lesson | None = None

    def checkpoint(part: int) -> dict[str, Any]:
        return {
            "part": part, "lesson": None if lesson is None else lesson.state_dict(), "best": best,
            "query": trained_state(learner.encoder), "optimizer": learner.optimizer.state_dict(), "rng": rng_state(),
            "untrained": untrained, "fingerprints": known,
        }  # fmt: skip

    if run.has_begun():
        state = run.load("last", map_location=device)
        with run.taking_over("last"):
            check_fingerprints(state["fingerprints"], known)
            learner.encoder.load_state_dict(state["query"], strict=False)
            learner.optimizer.load_state_dict(state["optimizer"])
            set_rng_state(state["rng"])
            first_part, best, untrained = state["part"], state["best"], state["untrained"]
            if state["lesson"] is not None:
                lesson = Lesson.from_state(state["lesson"])
        and_states = "" if lesson is None else f" and {lesson.learned} states of the next one"
        print(f"goes on after epoch {first_part / args.rounds:.3g} of {args.epochs}{and_states}")
    else:
        untrained = {
            spec: untrained_values(spec, score(frozen, asked, steps, args.eval_questions), METRICS)
            for spec, (asked, steps) in reported.items()
        }
        best = worth(score(frozen, selection, max_steps))
        run.save("best", {"query": trained_state(learner.encoder), "epoch": 0})
        run.save("last", checkpoint(0))

    def first_walker() -> TextEncoder:
        """An encoder trained the usual way: the given one, or one trained here and kept in the run folder."""
        if given_walker is not None:
            return load_run_encoder(given_walker, "query_encoder", device)
        if not (run.directory / "first_walker").is_dir():
            with torch.random.fork_rng():  # the run's own draws are the same with and without it
                torch.manual_seed(args.seed)
                walker = make_learner()
                train_first_walker(args, walker, gold_examples)
            run.save_encoder("first_walker", merge_lora(walker.encoder) if lora else walker.encoder)
        # Read back even here: a resumed run then walks with the very same weights.
        return load_run_encoder(run, "first_walker", device)

    current = retriever(learner.encoder, train)
    reached: dict[int, mdp.States] = {}
    other: dict[int, Examples] = {}

    def prepare(part: int) -> Lesson:
        """Walk the questions of a round and sample what it learns from."""
        round_, began = part % args.rounds, time.monotonic()

        # Walk.
        if args.states == "on-policy" or (args.states in WALKED and round_ not in reached):
            first = part == 0 or args.states != "on-policy"
            guide = retriever(first_walker(), train) if first else current
            reached[round_] = walk(guide, envs[round_], train, deal[round_], args.seed)
        walked = time.monotonic()

        # Sample what stands beside the gold histories. A model that misses nothing leaves only these.
        own = gold_rows[round_]
        if others[round_] and (round_ not in other or args.states in RESAMPLED):
            rng = np.random.default_rng((args.seed, part if args.states in RESAMPLED else round_, 1))
            if args.states.startswith("noise"):
                base = roomy[np.isin(roomy.question, deal[round_])]
                base = base[spread(len(base), others[round_], rng)]
                sampled = noise_states(base, of_question(base), rng)
            else:
                source = reached[round_] if len(reached[round_]) else gold[own]
                sampled = source[spread(len(source), others[round_], rng)]
            other[round_] = examples(sampled)
        rng = np.random.default_rng((args.seed, part))
        chosen = gold_examples[own[spread(len(own), sizes[round_] - others[round_], rng)]]
        if round_ in other:
            chosen = chosen + other[round_]
        prepared = Lesson.begin(chosen, rng)
        prepared.reached = len(reached[round_]) if round_ in reached else None
        prepared.seconds |= {"walk": walked - began, "mine": time.monotonic() - walked}
        return prepared

    started, learned_here = time.monotonic(), 0
    for part in range(first_part, args.epochs * args.rounds):
        epoch, round_ = divmod(part, args.rounds)
        if lesson is None:
            lesson = prepare(part)

        # Learn.
        done, learned_before = epoch * sum(sizes) + sum(sizes[:round_]), lesson.learned

        def progress(states: int, shown: dict[str, float], part: int = part, done: int = done) -> None:
            run.progress(done + states, args.epochs * sum(sizes), shown)
            if run.is_due:
                run.save("last", checkpoint(part))

        values = learner.learn(
            lesson, epoch * sum(batches) + sum(batches[:round_]), args.epochs * sum(batches), progress
        )
        learned_here += lesson.learned - learned_before

        # Log, select, keep.
        selected = score(learner.encoder, selection, max_steps)
        states, seconds = lesson.examples.states, sum(lesson.seconds.values())
        wrong = states.count > mdp.found_gold(states, train).sum(axis=1)
        beside = others[round_]
        values |= {
            "charts/states": len(states), "charts/distinct_states": len(states.distinct()[0]),
            "charts/wrong_share": float(wrong[len(states) - beside :].mean()) if beside else 0.0,
            "charts/rollout_share": lesson.seconds["walk"] / seconds,
            "charts/mining_share": lesson.seconds["mine"] / seconds,
            "charts/epoch_seconds": seconds,
            "charts/SPS": learned_here / (time.monotonic() - started),
            **{f"eval/{metric}": selected.mean(metric) for metric in METRICS},
        }  # fmt: skip
        if lesson.reached is not None:
            values["charts/reached"] = lesson.reached
        if worth(selected) > best:
            best = worth(selected)
            run.save("best", {"query": trained_state(learner.encoder), "epoch": round((part + 1) / args.rounds, 3)})
        run.log(values, done + sizes[round_])
        lesson = None
        run.save("last", checkpoint(part + 1))
        print(
            "\n" * sys.stdout.isatty()
            + f"epoch {(part + 1) / args.rounds:.3g} of {args.epochs}: "
            + ", ".join(f"{name.rpartition('/')[2]} {value:.4g}" for name, value in values.items()),
            flush=True,
        )
    for each in envs:
        each.close()

    # Report the selected epoch beside the untrained encoder, question by question, with the encoder that is saved.
    kept = run.load("best", map_location=device)
    with run.taking_over("best"):
        learner.encoder.load_state_dict(kept["query"], strict=False)
    query_encoder = merge_lora(learner.encoder) if lora else learner.encoder
    tell_selected(f"epoch {kept['epoch']:.3g}", select_by, best[0], selection)
    report = {
        spec: report_difference(
            spec, args.eval_split, steps, untrained[spec], score(query_encoder, asked, steps, args.eval_questions)
        )
        for spec, (asked, steps) in reported.items()
    }
    run.save_encoder("query_encoder", query_encoder)
    run.save_encoder("passage_encoder", frozen)
    run.write_json("eval.json", report)
    run.finish()
    tell_run(run.directory, args.env, args.env_kwargs)
    return run.directory


if __name__ == "__main__":
    run_script("infonce", lambda: parse_args(Args), main)
