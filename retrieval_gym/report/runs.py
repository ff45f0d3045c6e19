"""What the folder of a finished run says by itself: settings, dates, versions, curves and its own report."""

from __future__ import annotations

import ast
import json
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import retrieval_gym
from retrieval_gym.datasets.readers import read_jsonl

if TYPE_CHECKING:
    from retrieval_gym.nn.run import Run

READ = ("config.json", "versions.json", "metrics.jsonl", "eval.json")  # of each run folder, beside checkpoints
CONFIGURED: dict[str, type] = {
    "env": str,
    "env_kwargs": list,
    "eval_envs": list,
    "eval_split": str,
    "seed": int,
    "encoder": str,
}
LARGEST = 1e300  # of a logged number: differences of two still are numbers
LAST_STEP = 2**53  # the largest whole number up to which a float64 holds each
STAMP = re.compile(r"__(\d{8}-\d{6})(-\d+)?$")  # how the name of a run folder ends: its start, in UTC


@dataclass(frozen=True)
class RunRecord:
    """A finished run.

    Attributes:
        folder: as the caller named it.
        label: what tables call it.
        agent: ``"pqn"``, ``"infonce"`` or ``"pao"``.
        config: every flag.
        versions: of the packages that it ran with.
        started: by the folder's name, UTC, None where the folder has another name.
        finished: date of ``eval.json``, UTC.
        last_step: the x-axis' last value: environment transitions, or states learned from (infonce).
        selected: what the report took from training, such as ``"update 280"``.
        curves: steps and values of each logged number, by name, without those that were not finite.
        reported: ``eval.json``.
        specs: the environments that it reports on, each ``id`` or ``id?key=value&key=value``.
    """

    folder: str
    label: str
    agent: str
    config: dict[str, Any]
    versions: dict[str, str]
    started: str | None
    finished: str
    last_step: int
    selected: str
    curves: dict[str, tuple[list[int], list[float]]]
    reported: dict[str, Any]
    specs: tuple[str, ...]


def read_runs(folders: Sequence[str]) -> list[RunRecord]:
    """Read the folders of finished runs.

    Labels are agent and seed where these tell the runs apart, else the folders' names.

    Raises:
        FileNotFoundError: when a folder does not exist, or its run has not finished.
        ValueError: when a folder is that of no run or is named twice, or a file in it is damaged.
    """
    resolved = [Path(folder).resolve() for folder in folders]
    for folder, path in zip(folders, resolved, strict=True):
        if resolved.count(path) > 1:
            raise ValueError(f"run {folder} is named twice: name each run once")
    opened = [_open(folder) for folder in folders]
    short = [f"{_agent(run)}, seed {run.config['seed']}" for run in opened]
    names = [path.name for path in resolved]
    for labels in (short, names, list(folders)):
        if len(set(labels)) == len(labels):
            break
    return [_read(folder, label, run) for folder, label, run in zip(folders, labels, opened, strict=True)]


def _open(folder: str) -> Run:
    from retrieval_gym.nn.run import Run
    from retrieval_gym.nn.trained import encoder_names, run_encoder_folder

    run = Run.open(folder)
    for name in encoder_names(run):
        run_encoder_folder(run, name)
    for key in (*CONFIGURED, "layers"):
        if key not in run.config:
            raise ValueError(f"{folder} is no run of an agent: its configuration has no {key!r}")
    for key, kind in CONFIGURED.items():
        value = run.config[key]
        wrong = [each for each in value if not isinstance(each, str)] if isinstance(value, list) else []
        if type(value) is not kind or wrong:
            raise ValueError(f"{folder}/config.json: {key} is {value!r:.80}: restore the file")
    for name in READ:
        if not (run.directory / name).is_file():
            raise FileNotFoundError(f"{folder} has no {name}: finish the run first, with --resume")
    return run


def _agent(run: Run) -> str:
    from retrieval_gym.nn.trained import is_dense

    if not is_dense(run):
        return "pqn"
    return "pao" if "objective" in run.config else "infonce"


def _read(folder: str, label: str, run: Run) -> RunRecord:
    from retrieval_gym.nn.reporting import environment_spec

    config, path = run.config, run.directory
    best = run.load("best")
    unit = "epoch" if "epoch" in best else "update"
    stamp = STAMP.search(path.resolve().name)
    curves, last_step = _read_curves(path / "metrics.jsonl")
    return RunRecord(
        folder=folder,
        label=label,
        agent=_agent(run),
        config=config,
        versions=_read_object(path / "versions.json"),
        started=None if stamp is None else _utc(time.strptime(stamp.group(1), "%Y%m%d-%H%M%S")),
        finished=_utc(time.gmtime((path / "eval.json").stat().st_mtime)),
        last_step=last_step,
        selected=f"{unit} {best[unit]:.10g}",
        curves=curves,
        reported=_read_object(path / "eval.json"),
        specs=tuple(config["eval_envs"]) or (environment_spec(config["env"], config["env_kwargs"]),),
    )


def _utc(moment: time.struct_time) -> str:
    return time.strftime("%Y-%m-%d %H:%M UTC", moment)


def _read_object(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON ({error}): restore it or start a new run") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold an object, got {type(content).__name__}: restore it or start a new run")
    return content


def _read_curves(path: Path) -> tuple[dict[str, tuple[list[int], list[float]]], int]:
    curves: dict[str, tuple[list[int], list[float]]] = {}
    step = 0
    for where, record in read_jsonl(path):
        if type(record.get("step")) is not int or not 0 <= record["step"] <= LAST_STEP:
            raise ValueError(
                f"{where}: step is {record.get('step')!r:.40}, not a whole number from 0: restore the file"
            )
        step = record.pop("step")
        for name, value in record.items():
            if value is None:  # was not finite
                continue
            if type(value) not in (int, float) or not abs(value) <= LARGEST:  # also one that is no number
                raise ValueError(f"{where}: {name} is {value!r:.40}, not a number that can be drawn: restore the file")
            steps, values = curves.setdefault(name, ([], []))
            steps.append(step)
            values.append(float(value))
    return curves, step


@dataclass(frozen=True)
class Flag:
    """A flag of an agent script: how the command line spells it, and its default, as JSON holds it."""

    name: str
    default: Any


def agent_flags(agent: str) -> dict[str, Flag] | None:
    """Return the flags of an agent script by field name; None where the script is not here.

    The scripts are not part of the package: they are looked for beside it, as in a checkout, and in ``agents`` of the
    working directory. They are read, not run. A default that is no literal is left out.
    """
    for folder in (Path(retrieval_gym.__file__).parents[1] / "agents", Path("agents")):
        if (folder / f"{agent}.py").is_file():
            tree = ast.parse((folder / f"{agent}.py").read_text(encoding="utf-8"))
            break
    else:
        return None
    (args,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "Args")
    flags = {}
    for node in args.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value is not None:
            try:
                default = ast.literal_eval(node.value)
            except ValueError:
                continue
            renamed = [
                keyword.value.value
                for keyword in ast.walk(node.annotation)
                if isinstance(keyword, ast.keyword)
                and keyword.arg == "name"
                and isinstance(keyword.value, ast.Constant)
            ]
            name = str(renamed[0] if renamed else node.target.id).replace("_", "-")
            flags[node.target.id] = Flag(f"--{name}", json.loads(json.dumps(default)))
    return flags


def flag_table(runs: Sequence[RunRecord]) -> dict[str, Any]:
    """Return the flags that differ from their default or between runs.

    Returns:
        ``rows`` of ``flag``, ``defaults`` and ``values`` by run (None: the agent has no such flag), each a text, and
        ``unknown``, the agents whose defaults are not known here, of whose runs every flag is listed.
    """
    known = {run.agent: agent_flags(run.agent) for run in runs}
    rows = []
    for field in dict.fromkeys(name for run in runs for name in run.config):
        values = [_text(run.config[field]) if field in run.config else None for run in runs]
        flags = [(known[run.agent] or {}).get(field) for run in runs]
        defaults = [None if flag is None else _text(flag.default) for flag in flags]
        changed = any(v is not None and v != d for v, d in zip(values, defaults, strict=True))
        present = {value for value in values if value is not None}
        if changed or len(present) > 1:
            name = next((flag.name for flag in flags if flag is not None), f"--{field.replace('_', '-')}")
            rows.append({"flag": name, "values": values, "defaults": defaults})
    return {"rows": rows, "unknown": sorted(agent for agent, flags in known.items() if flags is None)}


def _text(value: Any) -> str:
    """Return a flag's value as a person reads it."""
    if isinstance(value, list):
        return " ".join(map(_text, value)) or "none"
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:,}" if isinstance(value, int) and abs(value) >= 10_000 else str(value)
