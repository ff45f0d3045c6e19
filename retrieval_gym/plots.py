"""Pictures of reports; matplotlib is imported when one is drawn."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from retrieval_gym.files import write_atomically
from retrieval_gym.mismatch import WRONG, Estimate, MismatchReport

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ENDINGS = (".png", ".svg")
# Okabe and Ito's colours, which most colour-blind readers can tell apart.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")


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
