"""Pictures of reports; matplotlib is imported when one is drawn."""

from __future__ import annotations

import io
import itertools
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from retrieval_gym.files import write_atomically
from retrieval_gym.geometry import Floats
from retrieval_gym.geometry_report import GeometryReport
from retrieval_gym.mismatch import WRONG, Estimate, MismatchReport
from retrieval_gym.stopping import StoppingReport

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ENDINGS = (".png", ".svg")
# Okabe and Ito's colours, which most colour-blind readers can tell apart.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
COLOURED = 6  # classes with a colour of their own
REST = "#BBBBBB"
LONGEST_NAME = 48  # characters above a panel; the end of a path says more than its beginning


def check_picture(path: str | Path) -> None:
    """Refuse a picture that could not be drawn.

    Raises:
        ValueError: when the ending of the file's name is not that of a format.
        ImportError: when matplotlib is not installed.
    """
    if Path(path).suffix not in ENDINGS:
        raise ValueError(f"cannot tell the format of the picture {path}: name it {' or '.join(ENDINGS)}")
    if find_spec("matplotlib") is None:
        raise ImportError("a picture needs matplotlib: pip install 'retrieval-gym[plot]'")


def mismatch_figure(report: MismatchReport) -> Figure:
    """Draw the share of states with wrong passages by step, and next-step success by their number, one colour a system.

    Success stands in one panel for each system's own states, and in another for the same states where at least two
    systems were asked about them.
    """
    from matplotlib.figure import Figure

    names = list(report.own_cells)
    colours = {name: COLOURS[i % len(COLOURS)] for i, name in enumerate(names)}
    panels = 2 + (len(report.asked) > 1)
    figure = Figure(figsize=(4.4 * panels, 4.0), layout="constrained")
    axes = figure.subplots(1, panels, sharey=True)
    steps = [str(step) for step in range(2, max(own.walk.picked.shape[1] for own in report.reached) + 1)]
    groups = WRONG[1:]

    share = {
        n: [cells["holds_wrong"].get(step, {}).get("all") for step in steps] for n, cells in report.own_cells.items()
    }
    _draw(axes[0], share, steps, colours)
    axes[0].set(title="Missing gold and holding wrong passages", xlabel="before step", ylabel="share of states")
    own = {n: [cells["success"][wrong]["all"] for wrong in groups] for n, cells in report.own_cells.items()}
    _draw(axes[1], own, groups, colours)
    axes[1].set(title="Next-step success, own states", xlabel="wrong passages held")
    if panels > 2:
        same = {n: [cells["success"][wrong]["all"] for wrong in groups] for n, cells in report.same_cells.items()}
        _draw(axes[2], same, groups, colours)
        axes[2].set(title=f"The same, states of {report.source}", xlabel="wrong passages held")
    axes[0].set_ylim(-0.03, 1.03)
    handles, labels = axes[1].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)
    protocol = report.protocol
    figure.suptitle(
        f"{protocol['dataset']} {protocol['split']}, questions: {protocol['questions']}; 95% intervals",
        fontsize="medium",
    )
    return figure


def geometry_figure(report: GeometryReport, points: Sequence[Floats], method: str) -> Figure:
    """Draw each system's query embeddings in the plane, one panel a system on the same axes, coloured by class.

    The largest classes have colours; smaller ones and questions that are in none are grey, behind the others.

    Args:
        report: the figures.
        points: of each system in the report's order, float64 ``(N, 2)``; see ``geometry.project``.
        method: how they were projected, ``"pca"`` or ``"tsne"``.
    """
    from matplotlib.figure import Figure

    labels, names = report.classes.labels, report.classes.names
    figure = Figure(figsize=(4.4 * len(points), 4.6), layout="constrained")
    panels = figure.subplots(1, len(points), sharex=True, sharey=True, squeeze=False)[0]
    groups = [(labels == i, names[i], COLOURS[i]) for i in range(min(COLOURED, len(names)))]
    rest = (labels < 0) | (labels >= COLOURED)
    if rest.any():
        groups.insert(0, (rest, "other questions", REST))
    for axes, cloud, places in zip(panels, report.clouds, points, strict=True):
        for rows, label, colour in groups:
            axes.scatter(*places[rows].T, s=12, color=colour, alpha=0.8, linewidths=0, label=label)
        axes.set_title("\n".join([_short(cloud.name), *_geometry_lines(report, cloud.name)]), fontsize="small")
        axes.set(xticks=[], yticks=[], aspect="equal")
    handles, shown = panels[0].get_legend_handles_labels()
    figure.legend(handles, shown, loc="outside lower center", ncols=4, frameon=False, fontsize="small")
    protocol = report.protocol
    how = {"pca": "principal components of the reference", "tsne": "t-SNE of all together"}[method]
    figure.suptitle(
        f"{protocol['dataset']} {protocol['split']}, questions: {protocol['questions']}; {how}", fontsize="medium"
    )
    return figure


def stopping_figure(report: StoppingReport) -> Figure:
    """Draw F1 and the number of picks by threshold, one column a system, since each has scores of its own.

    The dashed line is the whole budget, the dotted one the threshold that was chosen on other questions.
    """
    from matplotlib.figure import Figure

    systems = report.systems
    figure = Figure(figsize=(4.4 * len(systems), 5.4), layout="constrained")
    panels = figure.subplots(2, len(systems), sharex="col", sharey="row", squeeze=False)
    for column, system, colour in zip(panels.T, systems, itertools.cycle(COLOURS)):
        thresholds = [point["threshold"] for point in system.curve]
        for axes, measure in zip(column, ("support_f1", "picks"), strict=True):
            mean, low, high = np.array(
                [[point[measure][key] for key in ("mean", "low", "high")] for point in system.curve]
            ).T
            axes.fill_between(thresholds, low, high, color=colour, alpha=0.2, linewidth=0)
            axes.plot(thresholds, mean, color=colour)
            axes.axhline(system.measures[measure]["budget"]["mean"], color="black", linestyle="--", linewidth=1)
            axes.axvline(system.threshold, color="black", linestyle=":", linewidth=1)
            axes.grid(axis="y", alpha=0.3)
            axes.spines[["top", "right"]].set_visible(False)
        auc = system.auc["all"]["auc"]
        column[0].set_title(f"{_short(system.name)}\nAUC {'-' if auc is None else f'{auc:.3f}'}", fontsize="small")
        column[1].set_xlabel("stop before the first pick scored below")
    panels[0, 0].set_ylabel("support F1")
    panels[1, 0].set_ylabel("picks")
    panels[0, 0].set_ylim(-0.03, 1.03)
    protocol = report.protocol
    figure.suptitle(
        f"{protocol['dataset']} {protocol['split']}, questions: {protocol['questions']}; 95% intervals",
        fontsize="medium",
    )
    return figure


def _short(name: str) -> str:
    return name if len(name) <= LONGEST_NAME else f"...{name[3 - LONGEST_NAME :]}"


def _geometry_lines(report: GeometryReport, name: str) -> list[str]:
    """Return the figures that stand above a system's panel."""
    figures = report.figures[name]

    def text(key: str, label: str) -> str:
        figure = figures[key]
        value = figure.mean if isinstance(figure, Estimate) else figure
        return f"{label} -" if value is None else f"{label} {value:.3f}"

    lines = [
        f"{text('intra_class_variance', 'variance')}, {text('dispersion', 'dispersion')}",
        text("effective_rank", "effective rank"),
    ]
    if "drift" in figures:
        lines.append(f"{text('drift', 'drift')}, {text('query_overlap', 'query overlap')}")
    return lines


def save_figure(figure: Figure, path: str | Path) -> None:
    """Write a figure as the ending of its name says, whole or not at all.

    Raises:
        OSError: when it cannot be written.
    """
    picture = io.BytesIO()
    figure.savefig(picture, format=Path(path).suffix[1:], dpi=150)
    write_atomically(path, lambda file: file.writelines([picture.getvalue()]))


def _draw(
    axes: Axes, systems: Mapping[str, Sequence[Estimate | None]], places: Sequence[str], colours: Mapping[str, str]
) -> None:
    """Draw a point with its interval for each system and place, side by side."""
    shifts = np.linspace(-0.2, 0.2, len(systems)) if len(systems) > 1 else [0.0]
    for (name, cells), shift in zip(systems.items(), shifts, strict=True):
        known = [
            (i + shift, c.mean, c.low, c.high) for i, c in enumerate(cells) if c is not None and c.mean is not None
        ]
        x, mean, low, high = np.array(known, np.float64).reshape(-1, 4).T
        axes.vlines(x, low, high, color=colours[name], linewidth=2, alpha=0.6)
        axes.plot(x, mean, "o", color=colours[name], label=name)
    axes.set_xticks(range(len(places)), places)
    axes.set_xlim(-0.5, max(len(places), 1) - 0.5)
    axes.grid(axis="y", alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
