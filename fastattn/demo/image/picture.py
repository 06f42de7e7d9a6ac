"""A photograph, its patches in the colours of their features, and what each head attends to."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke
from PIL import Image

from fastattn.demo._figures import any_glyphs, save_figure
from fastattn.demo.image.attention import Floats

BACKGROUND, INK, FAINT_INK = "#111418", "#f4f4f4", "#a9b1ba"
HEAT = "inferno"

#: Under a head's weights the photograph is grey and so bright. Weights from this percentile on have the
#: brightest colour: a few patches would leave the others dark.
UNDER_HEAT, BRIGHTEST = 0.4, 99.5

#: The most rows of heads beside the photograph, or columns below it: smaller pictures cannot be read.
MOST_ROWS, MOST_COLUMNS = 3, 6
#: The area of all panels in square inches, and the shape, width over height, that they approximate.
AREA, SHAPE = 130.0, 1.8
#: Inches between panels and around them; above panels, for captions; above all, for titles; below all.
GAP, MARGIN, CAPTION, TITLES, FOOT = 0.08, 0.3, 0.34, 0.95, 0.45


class Text(NamedTuple):
    """What is written around the panels."""

    title: str
    times: str  #: below the title
    photograph: str  #: above the panels
    colours: str
    heads: str
    foot: str


class Box(NamedTuple):
    """A rectangle in inches, from the left and from above."""

    left: float
    top: float
    width: float
    height: float


@dataclass(frozen=True)
class Layout:
    """Where everything stands."""

    width: float
    height: float
    photograph: Box
    colours: Box
    heads: tuple[Box, ...]


def arrange(shape: float, num_heads: int) -> Layout:
    """Photograph and colours side by side, the heads in rows beside or below them, whichever fits a screen.

    Parameters
    ----------
    shape : float
        Width over height of the photograph.
    num_heads : int
    """
    # With photographs of height 1: whether the heads stand beside them, in how many columns, and the whole.
    choices = []
    for columns in (number for number in range(1, num_heads + 1) if num_heads % number == 0):
        rows = num_heads // columns
        if rows <= MOST_ROWS:
            choices.append((True, columns, shape * (2 + columns / rows), 1.0))
        if columns <= MOST_COLUMNS:
            choices.append((False, columns, 2 * shape, 1 + 2 * rows / columns))
    beside, columns, width, height = min(choices, key=lambda it: abs(math.log(it[2] / it[3] / SHAPE)))
    rows = num_heads // columns
    tall = math.sqrt(AREA / (width * height))
    wide = tall * shape

    top = MARGIN + TITLES + CAPTION
    photograph = Box(MARGIN, top, wide, tall)
    colours = Box(MARGIN + wide + GAP, top, wide, tall)
    if beside:
        left, head_height = MARGIN + 2 * (wide + GAP), (tall - (rows - 1) * GAP) / rows
        head_width = head_height * shape
    else:
        left, top = MARGIN, top + tall + CAPTION + GAP
        head_width = (2 * wide + GAP - (columns - 1) * GAP) / columns
        head_height = head_width / shape
    heads = tuple(
        Box(left + column * (head_width + GAP), top + row * (head_height + GAP), head_width, head_height)
        for row, column in (divmod(number, columns) for number in range(num_heads))
    )
    boxes = (photograph, colours, *heads)
    return Layout(
        width=max(box.left + box.width for box in boxes) + MARGIN,
        height=max(box.top + box.height for box in boxes) + FOOT,
        photograph=photograph,
        colours=colours,
        heads=heads,
    )


def draw(image: Image.Image, colours: Floats, weights: Floats, text: Text, path: Path) -> None:
    """Draw all of it.

    Parameters
    ----------
    image : PIL image
    colours : ndarray of shape ``(R, C, 3)``
        The colour of each patch, from 0 to 1.
    weights : ndarray of shape ``(H, R, C)``
        How much each head attends to each patch.
    text : Text
    path : Path
        Where to save the picture; its ending names the format.

    Raises
    ------
    DemoError
        If the file cannot be written.
    """
    layout = arrange(image.width / image.height, len(weights))
    figure = Figure(figsize=(layout.width, layout.height), facecolor=BACKGROUND)
    _show(figure, layout.photograph, np.asarray(image))
    smooth = Image.fromarray((255 * colours).astype(np.uint8)).resize(image.size, Image.Resampling.BICUBIC)
    _show(figure, layout.colours, np.asarray(smooth))
    for number, (box, head) in enumerate(zip(layout.heads, weights, strict=True), 1):
        _show(figure, box, heat(image, head))
        _write(figure, Box(box.left + 0.08, box.top + 0.06, box.width - 0.16, 0.2), f"head {number}", 10, INK)

    across = layout.width - 2 * MARGIN
    _write(figure, Box(MARGIN, MARGIN, across, 0.4), text.title, 20, INK, weight="bold")
    _write(figure, Box(MARGIN, MARGIN + 0.46, across, 0.3), text.times, 13, INK)
    first = layout.heads[0]
    beside = first.top == layout.photograph.top
    for box, caption in (
        (layout.photograph, text.photograph),
        (layout.colours, text.colours),
        (first._replace(width=layout.width - MARGIN - first.left if beside else across), text.heads),
    ):
        _write(figure, Box(box.left, box.top - 0.28, box.width, 0.2), caption, 11, FAINT_INK)
    _write(figure, Box(MARGIN, layout.height - FOOT + 0.12, across, 0.2), text.foot, 9, FAINT_INK)
    save_figure(figure, path)


def heat(image: Image.Image, weights: Floats) -> Floats:
    """The photograph in dark grey under the weights ``(R, C)`` in colours, ``(height, width, 3)``."""
    top = max(float(np.percentile(weights, BRIGHTEST)), float(np.finfo(np.float32).tiny))
    small = Image.fromarray((weights / top).astype(np.float32))
    large = np.clip(np.asarray(small.resize(image.size, Image.Resampling.BICUBIC)), 0, 1)
    grey = UNDER_HEAT * np.asarray(image.convert("L"), np.float32)[..., None] / 255
    opacity = np.sqrt(large)[..., None]
    mixed: Floats = (1 - opacity) * grey + opacity * matplotlib.colormaps[HEAT](large)[..., :3]
    return mixed.astype(np.float32)


def _show(figure: Figure, box: Box, pixels: Floats) -> None:
    width, height = figure.get_size_inches()
    bottom = height - box.top - box.height
    axes = figure.add_axes((box.left / width, bottom / height, box.width / width, box.height / height))
    axes.imshow(pixels, aspect="auto", interpolation="nearest")
    axes.set_axis_off()


def _write(figure: Figure, box: Box, words: str, size: float, colour: str, *, weight: str = "normal") -> None:
    """One line in the height of `box`, of this size in points, or of one with which it is no wider."""
    width, height = figure.get_size_inches()
    text = figure.text(
        box.left / width,
        1 - (box.top + box.height / 2) / height,
        words,
        fontsize=size,
        color=colour,
        weight=weight,
        va="center",
        parse_math=False,
        path_effects=[withStroke(linewidth=3, foreground=BACKGROUND)],
    )
    with any_glyphs():
        needed = text.get_window_extent().width / figure.dpi
    text.set_fontsize(size * min(1, 0.98 * box.width / max(needed, box.width / 2)))
