"""What stands on the page: settings and curves of runs, and what they and the untrained encoder do on questions."""

from __future__ import annotations

import shlex
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from retrieval_gym import __version__
from retrieval_gym.ceilings import count_candidates
from retrieval_gym.datasets.base import RetrievalDataset
from retrieval_gym.diagnostics import ask, reach
from retrieval_gym.evaluation import Evaluation, evaluate, table
from retrieval_gym.metrics import paired_bootstrap
from retrieval_gym.mismatch import MismatchReport
from retrieval_gym.ranking import Retriever
from retrieval_gym.report.chains import collect_chains
from retrieval_gym.report.curves import draw_curves
from retrieval_gym.report.runs import RunRecord, flag_table, read_runs
from retrieval_gym.report.untrained import find_untrained

MEASURES = ("nDCG@10", "R@5", "R@50", "RR@10")  # of environments of one step, as pao.py reports them
CHAINS = 500
CHAIN_BYTES = 16 * 2**20  # of all environments together; what else is on a page takes well below 4 MB


@dataclass(frozen=True)
class System:
    """A retriever of the page.

    Attributes:
        name: in tables.
        run: position of the run, None for an untrained encoder.
        start: position, among the systems, of the untrained encoder that a run started from, where it is shown.
        make: makes it for a dataset; embeddings of a corpus are kept in the folder.
    """

    name: str
    run: int | None
    start: int | None
    make: Callable[[RetrievalDataset, str], Retriever]


def collect(
    folders: Sequence[str],
    *,
    split: str = "dev",
    limit: int | None = None,
    seed: int = 0,
    chains: int = CHAINS,
    batch_size: int = 256,
    device: str = "auto",
    cache_dir: str | None = None,
    untrained: bool = True,
) -> dict[str, Any]:
    """Play finished runs, and the encoders that they started from, and return everything that the page shows.

    Environments are those that every run reports on; figures of different environments are never mixed.

    Args:
        folders: run folders of any agents, one or more.
        split: what is asked: ``"train"``, ``"dev"`` or ``"test"``.
        limit: asks a random sample of so many questions of each environment.
        seed: of that sample, and of the sample of chains.
        chains: at most so many questions of each environment can be browsed.
        batch_size: how many questions are searched at once.
        device: where retrievers run.
        cache_dir: where embeddings of a corpus are kept; by default for the time of this call.
        untrained: whether to play the untrained encoders too.

    Returns:
        A dict that strict JSON can hold.

    Raises:
        FileNotFoundError: when a folder does not exist, its run has not finished, or the data are nowhere.
        ValueError: when a folder is that of no run, the runs have no environment in common, or a number is out of
            range.
        ImportError: when a package is missing: the extra ``agents``, or ``ir`` for environments of one step.
    """
    if not folders:
        raise ValueError("there is no run to report on: name at least one run folder")
    for name, number in (("chains", chains), ("batch_size", batch_size), ("limit", limit)):
        if number is not None and number < 1:
            raise ValueError(f"{name} is {number}: it must be at least 1")
    runs = read_runs(folders)
    specs, left_out = common_environments(runs)
    told, curves = [_run(run) for run in runs], draw_curves(runs)  # what is damaged costs no play
    systems = list_systems(runs, device, untrained)
    with _cache(cache_dir) as cache:
        environments = [
            _environment(
                spec, runs, systems, cache, split=split, limit=limit, seed=seed, chains=chains,
                batch_size=batch_size, budget=CHAIN_BYTES // len(specs),
            )
            for spec in specs
        ]  # fmt: skip
    return {
        "version": __version__,
        "split": split,
        "limit": limit,
        "seed": seed,
        "runs": told,
        "left_out": left_out,
        "flags": flag_table(runs),
        "curves": curves,
        "systems": [{"name": system.name, "run": system.run, "start": system.start} for system in systems],
        "environments": environments,
    }


def common_environments(runs: Sequence[RunRecord]) -> tuple[list[str], dict[str, list[str]]]:
    """Return the environments that every run reports on, and by label what else a run reports on.

    Raises:
        ValueError: when there is none.
    """
    common = [spec for spec in runs[0].specs if all(spec in run.specs for run in runs)]
    if not common:
        told = "; ".join(f"{run.label} on {', '.join(run.specs)}" for run in runs)
        raise ValueError(f"the runs report on no environment in common ({told}): make a page of each")
    others = {run.label: [spec for spec in run.specs if spec not in common] for run in runs}
    return common, {label: specs for label, specs in others.items() if specs}


def list_systems(runs: Sequence[RunRecord], device: str, untrained: bool) -> list[System]:
    """Return the untrained encoders, one for all runs that started from the same, and then the runs."""
    from retrieval_gym.nn.run import resolve_device
    from retrieval_gym.nn.trained import load_run

    place = resolve_device(device)
    found = [find_untrained(run.folder, device) for run in runs] if untrained else []
    starts = {each.identity: each for each in found}
    identities = list(starts)
    systems = []
    for identity, start in starts.items():
        of = ", ".join(run.label for run, each in zip(runs, found, strict=True) if each.identity == identity)
        systems.append(System("untrained" if len(starts) == 1 else f"untrained ({of})", None, None, start.make))
    for position, run in enumerate(runs):
        systems.append(
            System(
                run.label,
                position,
                identities.index(found[position].identity) if untrained else None,
                lambda dataset, cache, folder=run.folder: load_run(  # type: ignore[misc]
                    folder, dataset, device=place, cache_dir=cache
                ),
            )
        )
    return systems


@contextmanager
def _cache(cache_dir: str | None) -> Iterator[str]:
    """Give a folder for embeddings: runs over frozen passages share them with the untrained encoder."""
    if cache_dir is not None:
        yield cache_dir
        return
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        yield folder


def _environment(
    spec: str,
    runs: Sequence[RunRecord],
    systems: Sequence[System],
    cache: str,
    *,
    split: str,
    limit: int | None,
    seed: int,
    chains: int,
    batch_size: int,
    budget: int,
) -> dict[str, Any]:
    """Play every system in one environment; of the runs one at a time is held in memory."""
    from retrieval_gym.nn.reporting import load_reported

    dataset, steps = load_reported(spec, split)
    evaluations: list[Evaluation] = []
    reached, asked, notes = [], [], []
    for system in systems:
        print(f"{spec}, {split}: {system.name}", file=sys.stderr, flush=True)
        retriever = system.make(dataset, cache)
        evaluations.append(
            evaluate(
                retriever,
                dataset,
                steps=steps,
                measures=MEASURES if steps == 1 else (),
                limit=limit,
                seed=seed,
                batch_size=batch_size,
                name=system.name,
                progress=f"{system.name} on {spec}",
            )
        )
        if steps > 1:
            reached.append(reach(system.name, evaluations[-1].chains, dataset))
            fixed, success = reached[0].distinct()
            known = success if len(reached) == 1 else None
            asked.append(ask(system.name, retriever, fixed, dataset, batch_size=batch_size, success=known))
        if cut := int(getattr(retriever, "truncated", 0)):
            notes.append(f"{system.name} cut {cut:,} texts (passages, questions, states) at its own limits of tokens")
        del retriever
    mismatch = None
    if steps > 1:
        mismatch = MismatchReport(
            dataset, tuple(reached), systems[0].name, fixed, tuple(asked), sample_seed=evaluations[0].sample_seed
        )
    return {
        "spec": spec,
        "steps": steps,
        "protocol": evaluations[0].protocol,
        "notes": [*_notes(evaluations[0]), *notes],
        "groups": list(evaluations[0].groups),
        "evaluations": [evaluation.to_json() for evaluation in evaluations],
        "differences": _differences(systems, evaluations),
        "mismatch": None if mismatch is None else mismatch.to_json(),
        "tables": {"evaluation": table(evaluations), "mismatch": None if mismatch is None else mismatch.table()},
        "score_again": _score_again(spec, runs, split, limit, seed, steps),
        "chains": collect_chains(evaluations, limit=chains, budget=budget, seed=seed),
    }


def _notes(evaluation: Evaluation) -> list[str]:
    """Say what would be misread."""
    notes = []
    if evaluation.dataset.split == "train":
        notes.append("these are questions that the runs trained on, but for the share that they selected on")
    most = int(count_candidates(evaluation.dataset, evaluation.chains.questions).max())
    full = [k for k in evaluation.ks if k >= most]
    if full:
        notes.append(f"{full[0]} places hold every candidate (at most {most}), so @{full[0]} says nothing here")
    return notes


def _differences(systems: Sequence[System], evaluations: Sequence[Evaluation]) -> list[dict[str, Any]]:
    """Compare each run with what it started from, and each later run with the first, question by question."""
    first = next(i for i, system in enumerate(systems) if system.run is not None)
    pairs = [(i, system.start) for i, system in enumerate(systems) if system.start is not None]
    pairs += [(i, first) for i in range(first + 1, len(systems))]
    found = []
    for of, minus in pairs:
        after, before = evaluations[of], evaluations[minus]
        metrics: dict[str, dict[str, Any]] = {}
        for name, values in after.metrics.items():
            metrics[name] = {}
            for group, rows in after.groups.items():
                mean, low, high, p = paired_bootstrap(before.metrics[name][rows], values[rows])
                metrics[name][group] = {"mean": mean, "low": low, "high": high, "p": p}
        found.append({"of": of, "minus": minus, "metrics": metrics})
    return found


def _score_again(spec: str, runs: Sequence[RunRecord], split: str, limit: int | None, seed: int, steps: int) -> str:
    """Return the command that scores the runs again."""
    env_id, _, options = spec.partition("?")
    command = ["retrieval_gym", "evaluate", "--env", env_id]
    command += ["--env-kwargs", *options.split("&")] if options else []
    command += ["--split", split, "--retriever", *(f"run:{run.folder}" for run in runs)]
    command += ["--measures", *MEASURES] if steps == 1 else []
    command += ["--limit", str(limit), "--seed", str(seed)] if limit is not None else []
    return shlex.join(command)


def _run(run: RunRecord) -> dict[str, Any]:
    """Return what is told of a run by itself."""
    return {
        "label": run.label,
        "folder": run.folder,
        "name": Path(run.folder).resolve().name,
        "agent": run.agent,
        "env": run.config["env"],
        "env_kwargs": list(run.config["env_kwargs"]),
        "seed": run.config["seed"],
        "encoder": run.config["encoder"],
        "layers": run.config["layers"],
        "eval_split": run.config["eval_split"],
        "started": run.started,
        "finished": run.finished,
        "last_step": run.last_step,
        "selected": run.selected,
        "versions": run.versions,
        "reported": _reported(run),
    }


def _reported(run: RunRecord) -> dict[str, Any]:
    """Return what a run reported itself, by environment.

    Raises:
        ValueError: when its ``eval.json`` is damaged.
    """
    reported: dict[str, Any] = {}
    try:
        for spec in run.specs:
            entry = run.reported.get(spec, {})
            if "trained" in entry and "protocol" in entry["trained"]:
                reported[spec] = {
                    "questions": entry["trained"]["protocol"]["questions"],
                    "metrics": {
                        name: {
                            "untrained": float(entry["untrained"][name]),
                            "trained": float(entry["trained"]["metrics"][name]["all"]["mean"]),
                            "difference": {key: float(difference[key]) for key in ("mean", "low", "high")},
                        }
                        for name, difference in entry["difference"].items()
                    },
                }
    except (LookupError, TypeError, AttributeError, ValueError) as error:
        detail = f"{type(error).__name__}: {error}"
        raise ValueError(f"{run.folder}/eval.json is damaged at {spec} ({detail}): restore it") from error
    return reported
