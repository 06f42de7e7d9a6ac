"""A picture of where the time goes, both ways, and of what one head reads."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure

from fastattn.demo._decoding import Floats
from fastattn.demo._figures import save_figure
from fastattn.demo.generate.clock import PARTS, Clock
from fastattn.demo.generate.comparison import WAYS, Comparison
from fastattn.demo.generate.heads import Head

COLOURS = dict(zip(PARTS, ("#d1495b", "#edae49", "#30638e", "#7fb3d5", "#9aa5b1", "#4f6d7a"), strict=True))

#: The prompt is drawn in so many columns at most, each the largest weight of its tokens.
MAX_COLUMNS = 500
#: So many characters of the prompt stand around the token that a row reads most.
AROUND = 14


def draw(result: Comparison, title: str, prompt: Sequence[str], written: Sequence[str], path: Path) -> None:
    """Draw the times of `result` and its head, and save them to `path`.

    Parameters
    ----------
    result : Comparison
    title : str
    prompt, written : sequence of str
        The text of each token of the prompt, and of each that was generated.
    path : Path
        Where to save the picture; its ending names the format.

    Raises
    ------
    DemoError
        If the file cannot be written.
    """
    figure = Figure(figsize=(16, 9.2), layout="constrained")
    figure.suptitle(title, fontsize=14, parse_math=False)
    left, right = figure.subfigures(1, 2, width_ratios=(1, 1.75), squeeze=False)[0]

    prefill, decode = left.subplots(2, 1)
    fast, plain = result.fast, result.plain
    _draw_times(
        prefill, (fast.prefill, plain.prefill), 1.0, f"Prefill: {fast.prefill.tokens} tokens", "seconds"
    )
    _draw_times(
        decode,
        (fast.decode, plain.decode),
        1000.0,
        "Decode: each further token",
        "milliseconds per token",
        per_token=True,
    )
    handles, labels = prefill.get_legend_handles_labels()
    left.legend(handles[::-1], labels[::-1], loc="outside lower center", ncols=3, frameon=False)

    if result.head is None:
        right.text(
            0.5, 0.5, "one token was generated:\nthere is no attention of a second to draw", ha="center"
        )
    else:
        _draw_head(right.subplots(), result.head, prompt, written[1:])
    save_figure(figure, path)


def _draw_times(
    axes: Axes,
    clocks: tuple[Clock, Clock],
    unit: float,
    title: str,
    label: str,
    *,
    per_token: bool = False,
) -> None:
    """One stacked bar for each way, in the order of `PARTS` from below."""
    scales = [unit / max(clock.tokens, 1) if per_token else unit for clock in clocks]
    below = np.zeros(2)
    top = max(clock.total * scale for clock, scale in zip(clocks, scales, strict=True))
    for part in PARTS:
        heights = np.array([clock.seconds[part] * scale for clock, scale in zip(clocks, scales, strict=True)])
        axes.bar(WAYS, heights, 0.6, bottom=below, color=COLOURS[part], label=part)
        for place, (height, base) in enumerate(zip(heights, below, strict=True)):
            if height > 0.05 * top:
                axes.text(
                    place,
                    base + height / 2,
                    f"{height:.3g}",
                    ha="center",
                    va="center",
                    color="white",
                    fontsize=9,
                )
        below += heights
    for place, (height, clock) in enumerate(zip(below, clocks, strict=True)):
        note = f"{clock.tokens_per_second:.0f} tokens/s"
        axes.text(place, height, note, ha="center", va="bottom", fontweight="bold")
    axes.set_title(title)
    axes.set_ylabel(label)
    axes.set_ylim(0, 1.12 * top or 1)
    axes.spines[["top", "right"]].set_visible(False)


def _draw_head(axes: Axes, head: Head, prompt: Sequence[str], written: Sequence[str]) -> None:
    """Rows of tokens that were written, columns of the prompt; beside each row what it reads most."""
    weights = head.weights[: len(written)]
    rows, length = weights.shape
    step = -(-length // MAX_COLUMNS)
    columns = -(-length // step)
    padded = np.zeros((rows, columns * step), np.float32)
    padded[:, :length] = weights
    image = axes.imshow(
        padded.reshape(rows, columns, step).max(axis=-1),
        cmap="magma_r",
        norm=PowerNorm(0.5, vmin=0, vmax=1),
        aspect="auto",
        interpolation="nearest",
        extent=(0, columns * step, rows - 0.5, -0.5),
    )
    axes.set_title(f"What layer {head.layer}, head {head.number} reads in the prompt while it writes")
    axes.set_xlabel("position in the prompt (tokens)")
    axes.set_ylabel("written token")
    size = min(9.0, 340 / rows)
    places = range(rows)
    axes.set_yticks(places, [_visible(text) for text in written[:rows]], fontsize=size, parse_math=False)
    beside = axes.secondary_yaxis("right")
    beside.set_yticks(
        places, [_reads(row, prompt) for row in weights], fontsize=size, family="monospace", parse_math=False
    )
    beside.tick_params(length=0)
    axes.figure.colorbar(
        image,
        ax=axes,
        location="bottom",
        shrink=0.6,
        aspect=40,
        label="attention weight (colour by its square root)",
    )


def _reads(weights: Floats, prompt: Sequence[str]) -> str:
    """The token with the largest weight in brackets, within the text around it."""
    place = int(weights.argmax())
    before = _visible("".join(prompt[max(0, place - AROUND) : place]))[-AROUND:]
    after = _visible("".join(prompt[place + 1 : place + 1 + AROUND]))[:AROUND]
    return f"{weights[place]:4.0%} {before:>{AROUND}}[{_visible(prompt[place])}]{after}"


def _visible(text: str) -> str:
    return "".join("↵" if c == "\n" else c if c.isprintable() else "�" for c in text)
