"""A picture of the loss as the model learns, and of where the time of a step goes, both ways."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fastattn.demo._figures import save_figure
from fastattn.demo.train.text import Baselines
from fastattn.demo.train.timing import Comparison
from fastattn.demo.train.training import Progress

PARTS = {"forward": "attention", "backward": "its gradients", "rest": "everything else"}
COLOURS = dict(zip(PARTS, ("#d1495b", "#edae49", "#9aa5b1"), strict=True))


def draw(progress: Progress, baselines: Baselines, comparison: Comparison, title: str, path: Path) -> None:
    """Draw what was noted, and save it to `path`, whose ending names the format.

    Raises
    ------
    DemoError
        If the file cannot be written.
    """
    figure = Figure(figsize=(14, 6.5), layout="constrained")
    figure.suptitle(title, fontsize=14, parse_math=False)
    left, right = figure.subplots(1, 2, width_ratios=(2.2, 1))
    _draw_losses(left, progress, baselines)
    _draw_times(right, comparison)
    save_figure(figure, path)


def _draw_losses(axes: Axes, progress: Progress, baselines: Baselines) -> None:
    numbers = np.arange(1, len(progress.losses) + 1)
    axes.plot(numbers, progress.losses, color="#7fb3d5", linewidth=0.8, label="training, each batch")
    steps, losses = zip(*progress.held_out, strict=True)
    axes.plot(steps, losses, color="#30638e", marker="o", label="held out")
    for name, loss, style in (
        ("counts of single characters", baselines.unigram, ":"),
        ("counts of pairs", baselines.bigram, "--"),
    ):
        axes.axhline(loss, color="black", linestyle=style, linewidth=1, label=f"{name}, held out: {loss:.2f}")
    axes.set_xlabel("step")
    axes.set_ylabel("loss per character (nats)")
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)


def _draw_times(axes: Axes, comparison: Comparison) -> None:
    ways = {"fastattn": comparison.fast, "plain NumPy": comparison.plain}
    below = np.zeros(2)
    for part, label in PARTS.items():
        heights = np.array([1000 * getattr(times, part) for times in ways.values()])
        axes.bar(list(ways), heights, 0.6, bottom=below, color=COLOURS[part], label=label)
        below += heights
    for place, (height, times) in enumerate(zip(below, ways.values(), strict=True)):
        share = f"attention: {times.attention_share:.0%}"
        axes.text(place, height, share, ha="center", va="bottom", fontweight="bold")
    axes.set_title("One training step")
    axes.set_ylabel("milliseconds")
    axes.set_ylim(0, 1.25 * below.max())
    handles, labels = axes.get_legend_handles_labels()
    axes.legend(handles[::-1], labels[::-1], loc="upper left", frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
