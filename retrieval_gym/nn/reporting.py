"""What an agent trains, selects and reports on, and how it tells what training changed."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from shutil import which
from typing import Any

import numpy as np

from retrieval_gym.commands.common import parse_env_kwargs
from retrieval_gym.datasets import RetrievalDataset
from retrieval_gym.datasets.background_pools import DocumentDataset
from retrieval_gym.evaluation import Evaluation, paired_bootstrap
from retrieval_gym.nn.encoder import TextEncoder
from retrieval_gym.nn.script import shown_path
from retrieval_gym.registration import ENVIRONMENT_KWARGS, environment_dataset

FEW_QUESTIONS = 20


def hold_out(dataset: RetrievalDataset, share: float, seed: int) -> tuple[RetrievalDataset, RetrievalDataset]:
    """Part the questions at random: those to select a checkpoint on, at least one, and those to train on.

    Raises:
        ValueError: when no question is left to train on, or ``share`` is not between 0 and 1.
    """
    if not 0 < share < 1:
        raise ValueError(f"selection_share is {share}: it must lie between 0 and 1")
    held_out = max(1, round(share * len(dataset)))
    if held_out >= len(dataset):
        raise ValueError(f"selection_share is {share}: of {len(dataset)} questions none is left to train on; lower it")
    order = np.random.default_rng(seed).permutation(len(dataset))
    return dataset.select(order[:held_out]), dataset.select(order[held_out:])


def check_reachable(dataset: RetrievalDataset, max_steps: int) -> None:
    """Raise ValueError where a question, trained on or kept apart, has more gold passages than an episode has steps."""
    most = int(dataset.num_gold.argmax())
    number = int(dataset.num_gold[most])
    if number > max_steps:
        raise ValueError(
            f"question {dataset.questions[most].id!r} has {number} gold passages, but an episode has max_steps="
            f"{max_steps}: raise max_steps to {number} with --env-kwargs, or remove the question"
        )


def environment_spec(env_id: str, env_kwargs: Sequence[str]) -> str:
    """Return an environment as one word, ``id`` or ``id?key=value&key=value``."""
    return "?".join([env_id, "&".join(env_kwargs)]) if env_kwargs else env_id


def with_lengths(specs: Sequence[str], context_tokens: Sequence[int]) -> tuple[str, ...]:
    """Return every environment once for each length of its documents, which takes the place of its own.

    Args:
        specs: environments as ``environment_spec`` writes them.
        context_tokens: lengths in tokens.
    """
    found: dict[str, None] = {}
    for spec in specs:
        env_id, _, options = spec.partition("?")
        others = [option for option in options.split("&") if option and not option.startswith("context_tokens=")]
        for tokens in context_tokens:
            found[environment_spec(env_id, [*others, f"context_tokens={tokens}"])] = None
    return tuple(found)


def load_reported(spec: str, split: str) -> tuple[RetrievalDataset, int]:
    """Load what ``id`` or ``id?key=value&key=value`` names, and its number of steps."""
    env_id, _, options = spec.partition("?")
    kwargs = parse_env_kwargs(options.split("&") if options else [])
    for key in sorted(kwargs.keys() & {"split", *ENVIRONMENT_KWARGS} - {"max_steps"}):
        remedy = "use --eval-split" if key == "split" else "chains are scored by their picks; leave it out"
        raise ValueError(f"{spec}: {key}={kwargs[key]} is not for reporting: {remedy}")
    return environment_dataset(env_id, split, **kwargs)


def fingerprints(
    encoder: TextEncoder, trained: RetrievalDataset, reported: Mapping[str, tuple[RetrievalDataset, int]]
) -> dict[str, str]:
    """Return digests of what a configuration only names: the encoder's weights, the questions and their passages.

    Args:
        encoder: as it was loaded.
        trained: what is trained and selected on.
        reported: what is reported, with its number of steps, by environment.
    """
    datasets = {"the train split": trained, **{spec: dataset for spec, (dataset, _) in reported.items()}}
    return {"the encoder": encoder.weights_hash(), **{name: each.fingerprint for name, each in datasets.items()}}


def check_fingerprints(saved: Mapping[str, str], now: Mapping[str, str]) -> None:
    """Raise ValueError when something is no longer what a run was started with."""
    for name, digest in now.items():
        if saved.get(name) != digest:
            raise ValueError(f"{name} is not what this run was started with: put it back, or start a new run")


def refuse_overlap(trained: RetrievalDataset, spec: str, reported: RetrievalDataset) -> None:
    """Raise ValueError when questions, or stories of long documents, that are trained on would be reported."""
    known = {(question.id, question.text) for question in trained.questions}
    shared = [question for question in reported.questions if (question.id, question.text) in known]
    if shared:
        raise ValueError(
            f"{len(shared)} of the {len(reported)} questions reported for {spec} are trained on, {shared[0].id!r} say: "
            "give the splits files of their own, or report another environment with --eval-envs"
        )
    if isinstance(trained, DocumentDataset) and isinstance(reported, DocumentDataset):
        told = own_texts(trained).keys()
        twice = [numbers for texts, numbers in own_texts(reported).items() if texts in told]
        if twice:
            raise ValueError(
                f"{sum(map(len, twice))} of the {len(reported)} questions reported for {spec} ask about stories that "
                f"are trained on, {reported.questions[twice[0][0]].id!r} say: give the splits stories of their own"
            )


def own_texts(dataset: DocumentDataset) -> dict[tuple[str, ...], list[int]]:
    """Return the texts that each story, or set of needles or paragraphs, adds to its documents, and its questions.

    Questions of one story have its beginnings up to where they are asked, of which the longest stands for it.
    """
    stories: dict[int, list[int]] = {}
    for i in range(len(dataset)):
        stories.setdefault(int(dataset.mixed.own(i)[0]), []).append(i)
    texts: dict[tuple[str, ...], list[int]] = {}
    for numbers in stories.values():
        longest = max((dataset.mixed.own(i) for i in numbers), key=len)
        texts.setdefault(tuple(dataset.corpus.texts(longest)), []).extend(numbers)
    return texts


def tell_long_warmup(args: Any, updates: int) -> None:
    """Print a line where most of a training is warm-up, so that it hardly learns."""
    if 2 * args.warmup_updates > updates:
        print(f"warm-up takes {args.warmup_updates} of {updates} updates: train longer, or lower --warmup-updates")


def tell_selected(what: str, metric: str, value: float, selection: RetrievalDataset) -> None:
    """Print which checkpoint is reported; ``update 0`` is the untrained encoder."""
    note = ", the untrained encoder: no later one was better" if what.endswith(" 0") else ""
    kept = "1 train question" if len(selection) == 1 else f"{len(selection)} train questions"
    print(f"\nselected {what}{note}; {metric} {value:.3f} on {kept} kept apart")
    if note and len(selection) < FEW_QUESTIONS:
        print(f"{len(selection)} questions hardly tell checkpoints apart: raise --selection-share, or add questions")


def tell_run(directory: Path, env_id: str, env_kwargs: Sequence[str]) -> None:
    """Print where a finished run is, and what scores it again."""
    program = "retrieval_gym" if which("retrieval_gym") else shown_path(Path(sys.executable).with_name("retrieval_gym"))
    command = [program, "evaluate", "--env", env_id, "--retriever", f"run:{directory}"]
    command += ["--env-kwargs", *env_kwargs] if env_kwargs else []
    report = [program, "report", str(directory), "--out", "report.html"]
    print(f"\nrun {directory}; look at its chains with: {shlex.join(report)}")
    print(f"score it with: {shlex.join(command)}")


def untrained_values(spec: str, result: Evaluation, metrics: Sequence[str]) -> dict[str, list[float]]:
    """Print what the untrained agent reached and return each metric question by question, for a checkpoint to hold."""
    print(f"untrained on {spec}: " + ", ".join(f"{metric} {result.mean(metric):.3f}" for metric in metrics))
    return {metric: result.metrics[metric].tolist() for metric in metrics}


def report_difference(
    spec: str, split: str, steps: int, untrained: dict[str, list[float]], result: Evaluation
) -> dict[str, Any]:
    """Print the trained agent beside the untrained one, with paired intervals, and return both as JSON-able values.

    Args:
        spec: the environment.
        split: the split.
        steps: picks a question.
        untrained: what ``untrained_values`` returned, for the same questions.
        result: of the trained agent.
    """
    entry: dict[str, Any] = {"trained": result.to_json(), "untrained": {}, "difference": {}}
    print(f"\n{spec}, {split}, {len(result.chains)} questions, {steps} steps")
    for metric, values in untrained.items():
        before, after = np.array(values), result.metrics[metric]
        difference, low, high, p = paired_bootstrap(before, after)
        entry["untrained"][metric] = float(before.mean())
        entry["difference"][metric] = {"mean": difference, "low": low, "high": high, "p": p}
        print(
            f"  {metric:16} untrained {before.mean():.3f}  trained {after.mean():.3f}  "
            f"difference {difference:+.3f} [{low:+.3f}, {high:+.3f}]"
        )
    return entry
