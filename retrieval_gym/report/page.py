"""Lay out what ``data.collect`` returned as one HTML page that loads nothing."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from importlib import resources
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from retrieval_gym.mismatch import WRONG
from retrieval_gym.protocol import protocol_lines

if TYPE_CHECKING:
    from markupsafe import Markup

CHAIN_METRICS = ("all_gold_picked", "support_f1", "complete@2", "complete@5", "complete@10")
ONE_STEP_METRICS = ("nDCG@10", "R@5", "R@50", "RR@10", "complete@10")
OPEN_METRICS = 2  # so many stand open; a reader unfolds the others


def check_installed() -> None:
    """Raise ImportError when jinja2 is not installed."""
    if find_spec("jinja2") is None:
        raise ImportError("the report needs jinja2: pip install 'retrieval-gym[agents]'")


def render(model: Mapping[str, Any], *, command: str, made: str) -> str:
    """Return the page.

    Texts of the data reach it in two ways, both of which leave no markup standing: the template escapes what it
    prints, and what is browsed lies as JSON, without a single ``<``, in a block that is never run; the script puts it
    on the page as text. A policy on the page allows its own style and script, and no request.

    Args:
        model: what ``data.collect`` returned.
        command: what made the page.
        made: when, for people.

    Raises:
        ImportError: when jinja2 is not installed.
    """
    check_installed()
    from jinja2 import Environment, PackageLoader, StrictUndefined
    from markupsafe import Markup

    folder = resources.files("retrieval_gym.report")
    style, script = ((folder / name).read_text(encoding="utf-8") for name in ("page.css", "page.js"))
    environment = Environment(
        loader=PackageLoader("retrieval_gym", "report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"number": number, "signed": signed, "thousands": thousands, "percent": percent}
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return environment.get_template("page.html").render(
        model=model,
        command=command,
        made=made,
        style=Markup(style),
        script=Markup(script),
        policy=f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'",
        data=embedded_json(_browsed(model)),
        environments=[_view(each, model["systems"]) for each in model["environments"]],
        x_axis=_x_axis(model["runs"]),
    )


def embedded_json(content: Any) -> Markup:
    """Return JSON that can stand in a script element whatever texts it holds: without ``<``, ``>`` and ``&``."""
    from markupsafe import Markup

    text = json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return Markup(text)


def number(value: float) -> str:
    """Return a rate with three decimals."""
    return f"{value:.3f}"


def signed(value: float) -> str:
    """Return a difference with three decimals and a sign that is as wide as a digit."""
    return f"{value:+.3f}".replace("-", "\N{MINUS SIGN}")


def thousands(value: float) -> str:
    """Return a number with separators, at most four digits behind the point."""
    return f"{value:,.4g}" if isinstance(value, float) and abs(value) < 10_000 else f"{value:,.0f}"


def percent(value: float) -> str:
    """Return a share as a CSS percentage, kept between 0 and 100."""
    return f"{100 * min(1.0, max(0.0, value)):.2f}%"


def _browsed(model: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the script needs."""
    lines = [
        [{"run": line["run"], "steps": line["steps"], "values": line["values"]} for line in figure["lines"]]
        for figure in model["curves"]
    ]
    return {
        "systems": model["systems"],
        "runs": [run["label"] for run in model["runs"]],
        "curves": lines,
        "environments": [
            {"steps": each["steps"], "passages": each["chains"]["passages"], "questions": each["chains"]["questions"]}
            for each in model["environments"]
        ],
    }


def _view(environment: Mapping[str, Any], systems: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Arrange the figures of one environment in the rows of its tables."""
    evaluations = environment["evaluations"]
    wanted = CHAIN_METRICS if environment["steps"] > 1 else ONE_STEP_METRICS
    names = [name for name in wanted if name in evaluations[0]["metrics"]]
    view = {
        "spec": environment["spec"],
        "steps": environment["steps"],
        "notes": environment["notes"],
        "protocol": [line.partition(": ")[::2] for line in protocol_lines(environment["protocol"])],
        "questions": evaluations[0]["metrics"][names[0]]["all"]["questions"],
        "metrics": [_metric_rows(environment, name) for name in names],
        "open": OPEN_METRICS,
        "headline": _headline(environment, systems, names[0]),
        "tables": environment["tables"],
        "score_again": environment["score_again"],
        "cost": [each["cost"] for each in evaluations],
        "mismatch": None if environment["mismatch"] is None else _mismatch_rows(environment["mismatch"]),
        "shown": len(environment["chains"]["questions"]),
        "asked": environment["chains"]["total"],
        "limit": environment["chains"]["limit"],
        "hops": sorted({question["hops"] for question in environment["chains"]["questions"]}),
    }
    return view


def _metric_rows(environment: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return one block of rows for each number of hops, one row a system, with its differences to others."""
    blocks = []
    for group in environment["groups"]:
        cells = [evaluation["metrics"][name][group] for evaluation in environment["evaluations"]]
        rows = [
            {
                "system": i,
                "cell": cell,
                "differences": [
                    {"minus": each["minus"], "cell": each["metrics"][name][group]}
                    for each in environment["differences"]
                    if each["of"] == i
                ],
            }
            for i, cell in enumerate(cells)
        ]
        blocks.append({
            "label": "all questions" if group == "all" else _hops(group),
            "count": f"{cells[0]['questions']:,}",
            "ceiling": cells[0].get("ceiling", 1.0),
            "rows": rows,
        })  # fmt: skip
    return {"name": name, "blocks": blocks}


def _hops(group: str) -> str:
    return f"{group} hop" if group == "1" else f"{group} hops"


def _headline(
    environment: Mapping[str, Any], systems: Sequence[Mapping[str, Any]], metric: str
) -> list[dict[str, Any]]:
    """Return, for each run, its first metric over all questions and the difference to where it started."""
    cells = [evaluation["metrics"][metric]["all"] for evaluation in environment["evaluations"]]
    told = []
    for i, system in enumerate(systems):
        if system["run"] is None:
            continue
        start = system["start"]
        difference = next(
            (
                each["metrics"][metric]["all"]
                for each in environment["differences"]
                if (each["of"], each["minus"]) == (i, start)
            ),
            None,
        )
        before = None if start is None else cells[start]
        told.append({"system": i, "metric": metric, "cell": cells[i], "before": before, "difference": difference})
    return told


def _mismatch_rows(mismatch: Mapping[str, Any]) -> dict[str, Any]:
    """Return the blocks of rows of the four tables of state mismatch; both lists are in the order of the systems."""
    own, same = mismatch["own_chains"], mismatch["same_states"]["systems"]
    deletions = (
        ("before", "success with the wrong passages"),
        ("after", "success once they are deleted"),
        ("gain", "gain by deletion"),
    )
    return {
        "reached_by": mismatch["same_states"]["reached_by"],
        "states": mismatch["same_states"]["states"],
        "protocol": [line.partition(": ")[::2] for line in protocol_lines(mismatch["protocol"])],
        "holds_wrong": [
            _block(f"before step {step}", [each["holds_wrong"][step]["all"] for each in own])
            for step in own[0]["holds_wrong"]
        ],
        "own_success": [_block(_wrong(wrong), [each["success"][wrong]["all"] for each in own]) for wrong in WRONG],
        "same_success": [_block(_wrong(wrong), [each["success"][wrong]["all"] for each in same]) for wrong in WRONG],
        "deletion": [
            _block(label, [each["deletion"][key]["all"] for each in same], signed=key == "gain")
            for key, label in deletions
        ],
    }


def _block(label: str, cells: Sequence[Mapping[str, Any]], *, signed: bool = False) -> dict[str, Any]:
    return {
        "label": label,
        "signed": signed,
        "rows": [{"system": i, "cell": cell} for i, cell in enumerate(cells)],
    }


def _wrong(wrong: str) -> str:
    return {"all": "all states", "1": "1 wrong passage"}.get(wrong, f"{wrong} wrong passages")


def _x_axis(runs: Sequence[Mapping[str, Any]]) -> str:
    """Say what the steps of the curves count."""
    agents = {run["agent"] for run in runs}
    if agents == {"infonce"}:
        return "states learned from"
    return "environment transitions" + (", for infonce states learned from" if "infonce" in agents else "")
