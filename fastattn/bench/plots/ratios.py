"""How many times as long as fastattn each peer takes: `draw` of most cases; the others have pictures of their
own."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator
from matplotlib.transforms import blended_transform_factory

from fastattn.bench.peers import OURS
from fastattn.bench.plots._page import (
    GREY,
    LIGHT,
    Measured,
    Picture,
    compared,
    headline,
    is_scaling,
    mark,
    measured,
    named,
    page,
    plain_ticks,
    shown,
    times_text,
)

#: Ratios above this are drawn at the edge: the eye is to see what happens around 1.
LARGEST = 16.0

#: Inches per row, and of what stands above and below the rows.
ROW, FRAME = 0.165, 1.5

NOTE = (
    "Shaded: the peer is faster. Line: 95 % interval; equal where it holds 1. "
    f"Large mark: the fastest peer, its ratio on the right. Arrowhead: above {LARGEST:g}."
)

#: The peers of a row stand over this part of its height, so that one interval does not hide another.
SPREAD = 0.5

#: More rows than this make two columns.
ONE_COLUMN = 24

#: Pictures of some groups alone: the groups, and what the title says of their cases.
OF_GROUPS = {
    "storages": (("decode-storage",), " of decoding"),
    "gradients": (("backward", "flex-backward"), " of gradients"),
    "recurrent": (("recurrent",), " of recurrent attention"),
}


def draw(document: Mapping[str, Any]) -> Picture | None:
    """Dots with the 95 % intervals of the median; None where no peer was timed."""
    alone = {group for groups, _ in OF_GROUPS.values() for group in groups}
    return _drawn(document, "ratios", [it for it in _compared(document) if it.case["group"] not in alone], "")


def draw_groups(document: Mapping[str, Any], name: str) -> Picture | None:
    """The same of the groups of one picture of `OF_GROUPS`."""
    groups, kind = OF_GROUPS[name]
    return _drawn(document, name, [it for it in _compared(document) if it.case["group"] in groups], kind)


def _compared(document: Mapping[str, Any]) -> list[Measured]:
    return [it for it in measured(document) if not is_scaling(it.case) and it.best is not None]


def _drawn(document: Mapping[str, Any], name: str, cases: Sequence[Measured], kind: str) -> Picture | None:
    if not cases:
        return None
    columns = _columns(_rows(cases))
    height = FRAME + ROW * max(map(len, columns))
    peers = [name for name in shown(name for it in cases for name in it.ratios) if name not in OURS]
    title = headline(document, compared(cases) + kind)
    figure = page(document, title, height, named(peers, linestyle="none"), NOTE)
    panels = figure.subplots(1, len(columns), squeeze=False)[0]
    lowest = _lowest(cases)
    for axes, rows in zip(panels, columns, strict=True):
        _draw_column(axes, rows, peers, lowest, max(map(len, columns)))
    return Picture(name, title, figure)


def _rows(cases: Sequence[Measured]) -> list[list[Measured | str]]:
    """The groups, each a list of its name and its cases."""
    groups: dict[str, list[Measured | str]] = {}
    for it in cases:
        groups.setdefault(it.case["group"], [it.case["group"]]).append(it)
    return list(groups.values())


def _columns(groups: Sequence[list[Measured | str]]) -> list[list[Measured | str]]:
    """The groups one below the other, in two columns of about the same height where they are many."""
    total = sum(map(len, groups))
    if total <= ONE_COLUMN or len(groups) == 1:
        return [list(chain(*groups))]
    above = [sum(map(len, groups[:cut])) for cut in range(len(groups))]
    cut = min(range(1, len(groups)), key=lambda cut: abs(2 * above[cut] - total))
    return [list(chain(*groups[:cut])), list(chain(*groups[cut:]))]


def _lowest(cases: Sequence[Measured]) -> float:
    """The left end of the axis: a power of two below every interval, at most a half."""
    low = min(ratio["low"] for it in cases for ratio in it.ratios.values())
    return 2.0 ** min(-1, math.floor(math.log2(low) - 0.1))


def _draw_column(
    axes: Axes, rows: Sequence[Measured | str], peers: Sequence[str], lowest: float, height: int
) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xlim(lowest, LARGEST * 1.15)
    axes.set_ylim(height - 0.4, -0.6)
    axes.axvspan(lowest, 1, color="#F4EEE6", zorder=0, linewidth=0)
    axes.axvline(1, color=mark(OURS[0])[0], linewidth=1.6, zorder=2)
    powers = [2.0**power for power in range(int(math.log2(lowest)), int(math.log2(LARGEST)) + 1)]
    plain_ticks(axes.xaxis, powers, times_text)
    axes.grid(axis="y", visible=False)
    axes.spines["left"].set_visible(False)
    axes.tick_params(axis="y", length=0, labelsize=7.5)
    axes.set_xlabel("time of the peer over the time of fastattn")

    places = [number for number, row in enumerate(rows) if not isinstance(row, str)]
    axes.yaxis.set_major_locator(FixedLocator(places))
    axes.set_yticklabels([row.name for row in rows if not isinstance(row, str)])
    beside = blended_transform_factory(axes.transAxes, axes.transData)
    axes.text(1.01, -0.85, "fastest", transform=beside, ha="left", fontsize=7, color=GREY)
    for number, row in enumerate(rows):
        if isinstance(row, str):
            axes.text(-0.02, number + 0.1, row, transform=beside, ha="right", va="center", weight="bold")
            continue
        axes.axhline(number, color=LIGHT, linewidth=0.5, zorder=1)
        for rank, peer in enumerate(peers):
            if peer in row.ratios:
                beside_others = number + SPREAD * (rank / max(len(peers) - 1, 1) - 0.5)
                _draw_dot(axes, beside_others, row.ratios[peer], peer, best=peer == row.best)
        if row.best is not None:
            text = f"{row.ratios[row.best]['median']:.2f}"
            axes.text(1.01, number, text, transform=beside, va="center", fontsize=7, color=GREY)


def _draw_dot(axes: Axes, height: float, ratio: Mapping[str, float], peer: str, *, best: bool) -> None:
    """The median as a mark, the interval as a line through it; both at the edge where they are beyond it."""
    colour, marker = mark(peer)
    low, median, high = (min(ratio[name], LARGEST) for name in ("low", "median", "high"))
    axes.plot([low, high], [height, height], color=colour, linewidth=1.0, zorder=3)
    axes.plot(
        median,
        height,
        color=colour,
        marker=">" if ratio["median"] > LARGEST else marker,
        markersize=5 if best else 3.6,
        markeredgecolor="white",
        markeredgewidth=0.4,
        zorder=5 if best else 4,
    )
