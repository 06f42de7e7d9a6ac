"""Where each case stands below the machine's two limits."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.transforms import Bbox

from fastattn.bench.limits import ON_TILES
from fastattn.bench.peers import OURS
from fastattn.bench.plots._page import GREY, Measured, Picture, headline, is_scaling, mark, measured, page

#: The line of the roof of each dtype that is computed in; its cases are filled marks where the line is whole.
ROOFS = {"float32": "-", "float64": "--", ON_TILES: "-."}

#: Where a label may stand: offset from its mark in points, and which of its sides is there.
PLACES = (
    ((5, -2), "left", "top"),
    ((5, 2), "left", "bottom"),
    ((-5, -2), "right", "top"),
    ((-5, 2), "right", "bottom"),
)

#: The axis begins at this fraction of the peak. Calls below it, mere overhead, are drawn at its end.
DEPTH = 100

NOTE = (
    "Shares are of float64's peak in float64, of the bandwidth where keys and values come from memory. "
    "Arrays in caches may be read faster."
)

#: Labels per group: they show where its kind of cases lies, and do not name each case.
LABELS = 2


def draw(document: Mapping[str, Any]) -> Picture | None:
    """FLOP/s against FLOPs per byte; None where the machine's limits were not measured."""
    limits, threads = document.get("limits") or {}, str(document["threads"])
    peaks = {dtype: it[threads] for dtype, it in limits.get("fma", {}).items() if threads in it}
    bandwidth = limits.get("read_bandwidth", {}).get(threads)
    cases = [
        it for it in measured(document) if _belongs(it.case, document["threads"]) and _roof(it.case) in peaks
    ]
    if not cases or bandwidth is None:
        return None

    figure = page(document, title := headline(document, _title(cases)), 5.0, _handles(cases), NOTE)
    axes = figure.subplots()
    axes.set(xscale="log", yscale="log", ylabel="GFLOP/s", xlabel="FLOPs per byte of inputs and output")
    intensities = [_intensity(it) for it in cases]
    top = max(peaks.values()) / 1e9
    axes.set_xlim(min(*intensities, 1) / 1.5, max(*intensities, 100) * 2)
    axes.set_ylim(top / DEPTH, top * 1.6)
    for dtype in dict.fromkeys((*(_roof(it.case) for it in cases), ON_TILES)):
        if dtype in peaks:
            _draw_roof(axes, dtype, peaks[dtype], bandwidth)
    for it in cases:
        _draw_case(axes, it)
    figure.draw_without_rendering()  # settles where everything stands, for the labels to keep clear of it
    _label(axes, cases, _roof_boxes(axes, peaks.values(), bandwidth))
    return Picture("roofline", title, figure)


def _belongs(case: Mapping[str, Any], threads: int) -> bool:
    """Whether the case ran on as many threads as the limits are those of."""
    return "nbytes" in case and case.get("threads") in (None, threads)


def _roof(case: Mapping[str, Any]) -> str:
    """What is computed in: 16-bit types are only stored."""
    return "float64" if case["dtype"] == "float64" else "float32"


def _intensity(it: Measured) -> float:
    return float(it.case["flops"]) / float(it.case["nbytes"])


def _title(cases: Sequence[Measured]) -> str:
    shares = [it.limit["share"]["median"] for it in cases if it.limit and it.limit["share"]]
    if not shares:
        return "fastattn and the fastest peer below the machine's limits"
    share = f"{100 * np.median(shares):.0f} % of the float32 multiply-add peak or the bandwidth"
    return f"half of {len(shares)} cases reach {share}"


def _dot(*, cold: bool, dtype: str) -> dict[str, Any]:
    """How a case of fastattn is drawn."""
    colour, marker = mark(OURS[0])
    filled = ROOFS[dtype] == "-"
    return {
        "linestyle": "none",
        "marker": "D" if cold else marker,
        "markersize": 4.5 if cold else 5.5,
        "markerfacecolor": colour if filled else "white",
        "markeredgecolor": "white" if filled else colour,
        "markeredgewidth": 0.5 if filled else 1.2,
    }


def _draw_case(axes: Axes, it: Measured) -> None:
    """Ours as a dot, and a faint line to a dash where the fastest peer is."""
    intensity, ours, floor = _intensity(it), it.flops_per_second(OURS[0]) / 1e9, axes.get_ylim()[0]
    dot = _dot(cold=it.case.get("cold", False), dtype=_roof(it.case))
    if ours < floor:
        dot["marker"] = "v"
    axes.plot(intensity, max(ours, floor), clip_on=False, zorder=5, **dot)
    if it.best is not None and it.best in it.seconds:
        theirs = it.flops_per_second(it.best) / 1e9
        axes.plot([intensity, intensity], [ours, theirs], color="#B8B8B8", linewidth=0.8, zorder=2)
        axes.plot(intensity, theirs, marker="_", markersize=6, color="#8C8C8C", zorder=3)


def _draw_roof(axes: Axes, dtype: str, peak: float, bandwidth: float) -> None:
    """The lower of the two limits, named."""
    left, right = axes.get_xlim()
    ridge = peak / bandwidth
    xs, ys = [left, ridge, right], [bandwidth * left / 1e9, peak / 1e9, peak / 1e9]
    axes.plot(xs, ys, color="black", linewidth=1.3, linestyle=ROOFS[dtype], zorder=4)
    over: dict[str, Any] = {"textcoords": "offset points", "fontsize": 7.5, "zorder": 6}
    axes.annotate(f"{dtype}\n{peak / 1e9:.0f} GFLOP/s", (right, ys[2]), (4, 0), va="center", **over)
    if ROOFS[dtype] == "-":
        axes.annotate(
            f"memory: {bandwidth / 1e9:.0f} GB/s",
            (ridge / 2, peak / 2e9),
            (-3, 3),
            ha="right",
            va="bottom",
            rotation=45,
            rotation_mode="anchor",
            transform_rotates_text=True,
            **over,
        )


def _handles(cases: Sequence[Measured]) -> list[Line2D]:
    kinds = {"fastattn": _dot(cold=False, dtype="float32")}
    if any(it.case.get("cold") for it in cases):
        kinds["fastattn, keys and values from memory"] = _dot(cold=True, dtype="float32")
    if any(it.case["dtype"] == "float64" for it in cases):
        kinds["fastattn, float64"] = _dot(cold=False, dtype="float64")
    if any(it.best for it in cases):
        kinds["the fastest peer"] = {"linestyle": "none", "marker": "_", "color": "#8C8C8C"}
    return [Line2D([], [], label=label, **kind) for label, kind in kinds.items()]


def _roof_boxes(axes: Axes, peaks: Collection[float], bandwidth: float) -> list[Bbox]:
    """Where the roofs are, in pixels: a box along each flat part, many along the slope and its name."""
    boxes = []
    for peak in peaks:
        _, y = axes.transData.transform((1, peak / 1e9))
        boxes.append(Bbox.from_extents(axes.bbox.x0, y - 2, axes.bbox.x1, y + 2))
    slope = np.geomspace(axes.get_xlim()[0], max(peaks) / bandwidth)
    for x, y in axes.transData.transform(np.column_stack([slope, slope * bandwidth / 1e9])):
        boxes.append(Bbox.from_extents(x - 14, y - 2, x + 2, y + 14))
    return boxes


def _label(axes: Axes, cases: Sequence[Measured], taken: list[Bbox]) -> None:
    """Name the first cases of each group, where there is room for a name beside dots and what is `taken`."""
    floor = axes.get_ylim()[0]
    dots = [(_intensity(it), max(it.flops_per_second(OURS[0]) / 1e9, floor)) for it in cases]
    taken += [Bbox.from_bounds(x - 5, y - 5, 10, 10) for x, y in axes.transData.transform(dots)]
    groups = dict.fromkeys((it.case["group"] for it in cases if not is_scaling(it.case)), LABELS)
    for it in cases:
        if not groups.get(it.case["group"]):
            continue
        ours = it.flops_per_second(OURS[0]) / 1e9
        name = it.name if ours >= floor else f"{it.name}: {ours:.1g} GFLOP/s"
        for offset, across, along in PLACES:
            text = axes.annotate(
                name,
                (_intensity(it), max(ours, floor)),
                offset,
                textcoords="offset points",
                ha=across,
                va=along,
                fontsize=7,
                color=GREY,
                zorder=6,
            )
            box = text.get_window_extent()
            inside = axes.bbox.contains(*box.min) and axes.bbox.contains(*box.max)
            if inside and not any(box.overlaps(other) for other in taken):
                taken.append(box)
                groups[it.case["group"]] -= 1
                break
            text.remove()
