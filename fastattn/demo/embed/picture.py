"""A picture of who attends to whom in one sentence."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from fastattn.demo._figures import save_figure
from fastattn.demo.embed.attention import Floats

# More tokens than this cannot be told apart on one page.
MAX_TOKENS = 48
COLOURS = "Blues"


def draw_attention(weights: Floats, tokens: Sequence[str], sentence: str, layer: int, path: Path) -> None:
    """Draw the attention of one layer: its mean over the heads, and each head beside it.

    Parameters
    ----------
    weights : ndarray of shape ``(H, L, L)``
        ``weights[h, i, j]`` is how much of token ``j`` head ``h`` takes into token ``i``.
    tokens : sequence of ``L`` str
    sentence : str
        For the title.
    layer : int
        The number of the layer, counted from 1, for the title.
    path : Path
        Where to save the picture; its ending names the format.

    Raises
    ------
    DemoError
        If the file cannot be written.
    """
    num_heads, _, num_tokens = weights.shape
    cut = f"; the first {MAX_TOKENS} of {num_tokens} tokens" if num_tokens > MAX_TOKENS else ""
    weights, tokens = weights[:, :MAX_TOKENS, :MAX_TOKENS], tokens[:MAX_TOKENS]
    mean = weights.mean(axis=0)
    columns = math.ceil(math.sqrt(num_heads))
    rows = math.ceil(num_heads / columns)
    places = np.arange(len(tokens))
    label_size = min(11, 380 / len(tokens))

    # parse_math=False: a dollar sign in the text is a dollar sign.
    figure = Figure(figsize=(15, 7.4), layout="constrained")
    figure.suptitle(textwrap.shorten(sentence, 150), fontsize=14, parse_math=False)
    left, right = figure.subfigures(1, 2, width_ratios=(1.1, 1), squeeze=False)[0]

    axes = left.subplots()
    image = axes.imshow(mean, cmap=COLOURS, vmin=0, vmax=_top_of_scale(mean))
    axes.set_title(f"layer {layer}, mean of its {num_heads} heads{cut}", fontsize=11)
    axes.set_xticks(places, tokens, rotation=90, fontsize=label_size, parse_math=False)
    axes.set_yticks(places, tokens, fontsize=label_size, parse_math=False)
    axes.set_ylabel("this token ...")
    axes.set_xlabel("... draws on that token")
    left.colorbar(image, ax=axes, shrink=0.8, extend="max", label="attention weight; each row adds up to 1")

    top = _top_of_scale(weights)
    right.suptitle(f"each head, on the same axes; the darkest stands for {top:.2f} and more", fontsize=11)
    panels = right.subplots(rows, columns, squeeze=False).ravel()
    for panel in panels:
        panel.set(xticks=[], yticks=[], visible=False)
    for head, (panel, head_weights) in enumerate(zip(panels, weights, strict=False), 1):
        panel.set_visible(True)
        panel.imshow(head_weights, cmap=COLOURS, vmin=0, vmax=top)
        panel.set_title(f"head {head}", fontsize=9)

    save_figure(figure, path)


def _top_of_scale(weights: Floats) -> float:
    """The weight that gets the darkest colour: the largest on a word.

    Much of the attention goes to the special tokens at both ends, which would leave the words pale.
    """
    words = weights[..., 1:-1]
    return float(words.max()) if words.size else 1.0
