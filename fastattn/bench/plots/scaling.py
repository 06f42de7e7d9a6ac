"""Curves: time and memory against the length, FLOP/s against head_dim, batch and threads."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from fastattn.bench.peers import OURS
from fastattn.bench.plots._page import (
    GREY,
    Measured,
    Picture,
    compared,
    headline,
    line_style,
    mark,
    measured,
    named,
    page,
    plain_ticks,
    shown,
    times_text,
)

#: What may differ along one curve is the sizes; these may not.
OPTIONS = (
    "dtype",
    "causal",
    "mask",
    "bias",
    "window",
    "document_length",
    "key_lengths",
    "softcap",
    "layout",
    "rank",
    "strided",
    "cold",
)

#: MiB. Peaks of resident memory are whole pages and vary by a few; smaller ones are drawn as this.
LEAST_MEMORY = 0.1

#: Panels of `draw_sizes`: the group of the cases, which size varies, its name on the axis.
SIZES = (
    ("scaling-dim", "head_dim", "head_dim D"),
    ("scaling-batch", "batch", "batch B"),
    ("scaling-threads", "threads", "threads"),
)

SIZES_NOTE = "FLOPs are those of the two products; the exponentials are not counted."

#: The letters of the sizes.
LETTERS = {"B": "batch", "H": "heads", "L": "len_q", "S": "len_k", "D": "head_dim"}

#: How the machine's limit and the memory of the scores are drawn, which are no library's.
REFERENCE: dict[str, Any] = {"color": GREY, "linestyle": ":", "linewidth": 1.3, "zorder": 2}

#: About how many labels an axis has at most.
TICKS = 6


def draw_time(document: Mapping[str, Any]) -> Picture | None:
    """Time against the length, and times over ours; None where fewer than two lengths were timed."""
    cases = _curve([it for it in measured(document) if it.case["group"] == "scaling-length"], "len_k")
    if len(cases) < 2:
        return None
    title = headline(document, _time_title(cases[-1]))
    figure = page(document, title, 4.0, named(_libraries(cases)), _note(cases))
    times, ratios = figure.subplots(1, 2, width_ratios=(1.1, 1))
    for name in _libraries(cases):
        _line(times, name, [(it.case["len_k"], it.seconds[name] * 1e3) for it in cases if name in it.seconds])
        slower = [(it.case["len_k"], it.ratios[name]["median"]) for it in cases if name in it.ratios]
        _line(ratios, name, slower)
    for axes in (times, ratios):
        _size_axis(axes, [it.case["len_k"] for it in cases])
        axes.set_xlabel("queries and keys, L = S")
    times.set_yscale("log")
    times.set_title("time of one call, ms")
    ratios.set_title("the same over fastattn's time")
    ratios.axhline(1, color=mark(OURS[0])[0], linewidth=2.0, zorder=4)
    slowest = [it.ratios[name]["median"] for it in cases for name in _libraries([it]) if name in it.ratios]
    _power_axis(ratios, [1, *slowest])
    return Picture("time", title, figure)


def _time_title(last: Measured) -> str:
    text = f"{last.case['len_k']} tokens take fastattn {_time(last.seconds[OURS[0]])}"
    if last.best is not None:
        text += f", the fastest peer ({last.best}) {_time(last.seconds[last.best])}"
    return text


def _time(seconds: float) -> str:
    return f"{seconds:.2g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


def _note(cases: Sequence[Measured]) -> str:
    """What all of `cases` have, in words."""
    case = cases[0].case
    words = [_same_sizes(cases), case["dtype"], *(["causal"] if case["causal"] else [])]
    tokens = {it.case["batch"] * it.case["len_q"] for it in cases}
    words += [f"the batch has {tokens.pop()} tokens at every length"] if len(tokens) == 1 else []
    return ", ".join(filter(None, words)) + "."


def draw_memory(document: Mapping[str, Any]) -> Picture | None:
    """Peak memory over inputs and output against the length; None where fewer than two were measured."""
    memory, sizes = document.get("memory") or {}, document.get("memory_cases") or {}
    cases = _curve(
        [Measured(name, sizes[name], {}, {}, None, None) for name in memory if name in sizes], "len_k"
    )
    extra: dict[str, list[tuple[int, float]]] = {}
    for it in cases:
        for name in shown(memory[it.name]):
            found = memory[it.name][name]["warm"]
            if "extra" in found:
                extra.setdefault(name, []).append(
                    (it.case["len_k"], max(found["extra"] / 2**20, LEAST_MEMORY))
                )
    if len(extra.get(OURS[0], ())) < 2:
        return None
    handles = [*named(shown(extra)), Line2D([], [], label="all scores at once", **REFERENCE)]
    note = f"{_note(cases)} Less than {LEAST_MEMORY:g} MiB is drawn as {LEAST_MEMORY:g}."
    figure = page(document, title := headline(document, _memory_title(extra)), 4.0, handles, note)
    axes = figure.subplots()
    for name, points in extra.items():
        _line(axes, name, points)
    scores = [(it.case["len_k"], _score_bytes(it.case) / 2**20) for it in cases]
    axes.plot(*_columns(scores), **REFERENCE)
    axes.set_yscale("log")
    _size_axis(axes, [it.case["len_k"] for it in cases])
    plain_ticks(axes.yaxis, [10.0**power for power in range(-1, 6)], lambda value: f"{value:g}")
    most = max(value for points in [scores, *extra.values()] for _, value in points)
    axes.set_ylim(LEAST_MEMORY * 0.8, most * 1.6)
    axes.set_xlabel("queries and keys, L = S")
    axes.set_title("peak memory over inputs and output, MiB")
    return Picture("memory", title, figure)


def _score_bytes(case: Mapping[str, Any]) -> int:
    size = 8 if case["dtype"] == "float64" else 4
    return int(case["batch"] * case["heads"] * case["len_q"] * case["len_k"] * size)


def _memory_title(extra: Mapping[str, Sequence[tuple[int, float]]]) -> str:
    length, ours = extra[OURS[0]][-1]
    text = f"{length} tokens need {_mebibytes(ours)} in fastattn"
    others = [points[-1][1] for name, points in extra.items() if name != OURS[0] and points[-1][0] == length]
    if others:
        ends = dict.fromkeys(_mebibytes(value) for value in (min(others), max(others)))
        text += f", {' to '.join(ends)} in its peers"
    return text


def _mebibytes(value: float) -> str:
    if value <= LEAST_MEMORY:
        return f"less than {LEAST_MEMORY:g} MiB"
    return f"{value / 1024:.1f} GiB" if value >= 1000 else f"{value:.{1 if value < 10 else 0}f} MiB"


def draw_sizes(document: Mapping[str, Any]) -> Picture | None:
    """FLOP/s against head_dim, batch and threads, side by side; None where none of them was measured."""
    panels = []
    for group, size, label in SIZES:
        found = [it for it in measured(document) if it.case["group"] == group and it.case.get(size)]
        if len(cases := _curve(found, size)) > 1:
            panels.append((size, label, cases))
    if not panels:
        return None
    everything = [it for *_, cases in panels for it in cases]
    handles = named(_libraries(everything))
    if any(it.limit for it in everything):
        handles.append(Line2D([], [], label="float32 multiply-add peak", **REFERENCE))
    title = headline(document, _sizes_title(everything))
    figure = page(document, title, 3.4, handles, SIZES_NOTE)
    row = figure.subplots(1, len(panels), squeeze=False)[0]
    for axes, (size, label, cases) in zip(row, panels, strict=True):
        for name in _libraries(cases):
            points = [(it.case[size], it.flops_per_second(name) / 1e9) for it in cases if name in it.seconds]
            _line(axes, name, points)
        limits = [(it.case[size], it.case["flops"] / it.limit["seconds"] / 1e9) for it in cases if it.limit]
        axes.plot(*_columns(limits), **REFERENCE)
        _size_axis(axes, [it.case[size] for it in cases])
        axes.set_ylim(0, None)
        axes.set_xlabel(label)
        axes.set_title(_same_sizes(cases), color=GREY, fontsize=7.5)
    row[0].set_ylabel("GFLOP/s")
    return Picture("sizes", title, figure)


def _same_sizes(cases: Sequence[Measured]) -> str:
    """The sizes that all of `cases` have."""
    sizes = {letter: {it.case[name] for it in cases} for letter, name in LETTERS.items()}
    return ", ".join(f"{letter}={values.pop()}" for letter, values in sizes.items() if len(values) == 1)


def _sizes_title(cases: Sequence[Measured]) -> str:
    return compared(cases) if any(it.best for it in cases) else "GFLOP/s of fastattn at several sizes"


def _curve(cases: Sequence[Measured], size: str) -> list[Measured]:
    """The cases that differ in their sizes alone, most of them there are, from the smallest `size` on."""
    kinds: dict[tuple[str, ...], list[Measured]] = {}
    for it in cases:
        kinds.setdefault(tuple(repr(it.case.get(option)) for option in OPTIONS), []).append(it)
    longest = max((len(kind) for kind in kinds.values()), default=0)
    return next((sorted(it, key=lambda it: it.case[size]) for it in kinds.values() if len(it) == longest), [])


def _libraries(cases: Iterable[Measured]) -> list[str]:
    return shown(name for it in cases for name in it.seconds)


def _columns(points: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    return [x for x, _ in points], [y for _, y in points]


def _line(axes: Axes, name: str, points: Sequence[tuple[float, float]]) -> None:
    axes.plot(*_columns(points), **line_style(name))


def _size_axis(axes: Axes, sizes: Sequence[int]) -> None:
    """A log axis with ticks at the sizes that were measured; where they are many, at some of them."""
    axes.set_xscale("log", base=2)
    ticks = sorted(set(sizes))
    if len(ticks) > TICKS:
        ticks = [size for size in ticks if size.bit_count() == 1]
    if len(ticks) > TICKS:
        ticks = ticks[::-2][::-1]
    plain_ticks(axes.xaxis, ticks, lambda value: f"{value:.0f}")


def _power_axis(axes: Axes, ratios: Sequence[float]) -> None:
    """A log axis of ratios with ticks at powers of two."""
    axes.set_yscale("log", base=2)
    plain_ticks(axes.yaxis, [2.0**power for power in range(-3, 11)], times_text)
    axes.set_ylim(min(0.8, min(ratios) / 1.2), max(2.2, max(ratios) * 1.2))
