"""What the pictures share: who has which colour, the page with its title and footer, the saved file.

A page is as wide as a README's column on GitHub, so that its letters are shown at their own size.
"""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib import style
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, NullLocator
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from fastattn.bench.peers import OURS, PEERS

#: Inches; a README shows 100 pixels for each. Drawn with twice as many, for sharp screens.
WIDTH, DPI = 8.3, 200

#: Key of the PNG's text that holds `digest` of the results drawn.
DIGEST_KEY = "fastattn-results"

#: Colours that colour-blind readers can tell apart, each with its own marker; ours first. They are Okabe and
#: Ito's, without the yellow that fades on white, and the last two Paul Tol's.
MARKS = (
    ("#0072B2", "o"),
    ("#7F7F7F", "s"),
    ("#D55E00", "^"),
    ("#009E73", "D"),
    ("#CC79A7", "v"),
    ("#E69F00", "P"),
    ("#56B4E9", "X"),
    ("#000000", "p"),
    ("#882255", "*"),
    ("#999933", "h"),
)

#: Inches above the panels for the title and for each row of the legend, and below them for the footer.
HEADER, LEGEND_ROW, FOOTER = 0.34, 0.18, 0.48

#: How many entries of a legend fit side by side.
LEGEND_COLUMNS = 7

GREY, LIGHT = "#555555", "#DDDDDD"

#: Over matplotlib's own defaults, so that nobody's settings change a picture.
STYLE = {
    "figure.facecolor": "white",
    "savefig.facecolor": "white",
    "font.size": 8,
    "axes.titlesize": 8,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "grid.color": LIGHT,
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "legend.handletextpad": 0.4,
    "legend.columnspacing": 1.4,
    "xtick.minor.visible": False,
    "ytick.minor.visible": False,
}


@dataclass(frozen=True, slots=True)
class Picture:
    """One picture and what is seen in it."""

    name: str  #: of its file, without the ending
    title: str
    figure: Figure


@dataclass(frozen=True, slots=True)
class Measured:
    """What the pictures need of one case."""

    name: str
    case: Mapping[str, Any]
    seconds: Mapping[str, float]
    ratios: Mapping[str, Mapping[str, float]]
    best: str | None
    limit: Mapping[str, Any] | None

    def flops_per_second(self, library: str) -> float:
        """FLOP/s of `library`."""
        return float(self.case["flops"]) / self.seconds[library]


def measured(document: Mapping[str, Any]) -> list[Measured]:
    """The cases of `document` that fastattn was timed on, in its order."""
    return [
        Measured(
            name,
            run["case"],
            summary["seconds"],
            summary["ratios"],
            summary["best"],
            summary.get("limit"),
        )
        for name, run in document["cases"].items()
        if OURS[0] in (summary := run["summary"])["seconds"]
    ]


def compared(cases: Iterable[Measured]) -> str:
    """In how many of `cases` fastattn is faster than the fastest peer; also equal and slower, if in any.

    Equal are cases whose 95 % interval holds 1.
    """
    best = [it.ratios[it.best] for it in cases if it.best is not None]
    faster, slower = sum(it["low"] > 1 for it in best), sum(it["high"] < 1 for it in best)
    counts = {"faster than the fastest peer": faster, "equal": len(best) - faster - slower, "slower": slower}
    words = [f"{word} in {n}" for place, (word, n) in enumerate(counts.items()) if n or place == 0]
    return f"{', '.join(words)} of {len(best)} cases"


def headline(document: Mapping[str, Any], text: str) -> str:
    """`text` after the name of the machine, where the result has one."""
    name = document["machine"].get("name")
    return f"{name}: {text}" if name else text


def is_scaling(case: Mapping[str, Any]) -> bool:
    """Whether the case is a point of a curve rather than one of the catalogue."""
    return str(case["group"]).startswith("scaling-")


def shown(libraries: Iterable[str]) -> list[str]:
    """fastattn and its peers among `libraries`, in the order of the tables; not fastattn's other ISAs."""
    given = dict.fromkeys(libraries)
    order = [*(name for name in PEERS if name in given), *(name for name in given if name not in PEERS)]
    return [name for name in order if name == OURS[0] or name not in OURS]


def mark(library: str) -> tuple[str, str]:
    """Colour and marker of a library: the same in every picture."""
    order = shown([*PEERS, library])
    return MARKS[order.index(library) % len(MARKS)]


def line_style(library: str) -> dict[str, Any]:
    """How the curve of a library is drawn: ours heavier, on top."""
    colour, marker = mark(library)
    ours = library == OURS[0]
    return {
        "color": colour,
        "marker": marker,
        "markersize": 4.5 if ours else 4,
        "markeredgecolor": "white",
        "markeredgewidth": 0.4,
        "linewidth": 2.0 if ours else 1.2,
        "zorder": 4 if ours else 3,
        "label": library,
    }


@contextmanager
def house_style() -> Iterator[None]:
    """Matplotlib's defaults with `STYLE` over them, whatever the user has set."""
    with style.context(["default", STYLE]):
        yield


def page(
    document: Mapping[str, Any], title: str, height: float, handles: Sequence[Line2D], note: str
) -> Figure:
    """An empty page.

    Parameters
    ----------
    document
        Its machine, date and versions stand at the foot.
    title
        What is seen.
    height
        Inches.
    handles
        The legend, in rows below the title.
    note
        One line at the foot about how to read it.
    """
    rows = -(-len(handles) // LEGEND_COLUMNS)
    bottom, top = FOOTER / height, 1 - (HEADER + LEGEND_ROW * rows) / height
    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    figure.set_layout_engine(
        "constrained", rect=(0.005, bottom, 0.99, top - bottom), w_pad=0.05, h_pad=0.03, wspace=0.03
    )
    figure.text(0.012, 1 - 0.08 / height, title, va="top", fontsize=10, weight="bold")
    figure.legend(
        handles=handles,
        loc="lower left",
        bbox_to_anchor=(0.003, top),
        ncols=min(len(handles), LEGEND_COLUMNS),
        borderpad=0.3,
    )
    text = f"{note}\n{footer(document)}"
    figure.text(0.012, 0.06 / height, text, va="bottom", fontsize=6.5, color=GREY, linespacing=1.4)
    return figure


def footer(document: Mapping[str, Any]) -> str:
    """Machine, threads, date and versions, in two lines."""
    versions = {
        name: version.split("-")[0] for name, version in document["versions"].items() if name not in OURS[1:]
    }
    threads = document["threads"]
    lines = (
        (document["machine"]["cpu"], f"{threads} thread{'s' if threads != 1 else ''}", document["date"][:10]),
        (f"{name} {version}" for name, version in versions.items()),
    )
    return "\n".join(" · ".join(parts) for parts in lines)


def named(libraries: Iterable[str], **options: Any) -> list[Line2D]:
    """The entries of `libraries` in a legend."""
    return [Line2D([], [], **{**line_style(name), **options}) for name in libraries]


def plain_ticks(axis: Axis, ticks: Sequence[float], text: Callable[[float], str]) -> None:
    """`ticks` and no others, each labelled by `text(tick)`."""
    axis.set_ticks(ticks)
    axis.set_major_formatter(FuncFormatter(lambda value, _: text(value)))
    axis.set_minor_locator(NullLocator())


def times_text(value: float) -> str:
    """A power of two as a ratio."""
    number = f"{value:g}" if value >= 1 else f"1/{1 / value:g}"
    return f"{number}\N{MULTIPLICATION SIGN}"


def digest(document: Mapping[str, Any]) -> str:
    """The results in 64 characters, the same however the JSON was laid out."""
    text = json.dumps(document, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def save(picture: Picture, folder: Path, results: str) -> Path:
    """Write `picture` as PNG with `results`, their digest, in its text; no date and no software version.

    64 colours are enough for lines and letters and make the file a third as large.
    """
    drawn = io.BytesIO()
    picture.figure.savefig(drawn, format="png", dpi=DPI)
    image = Image.open(drawn).convert("RGB")
    text = PngInfo()
    text.add_text(DIGEST_KEY, results)
    path = folder / f"{picture.name}.png"
    image.quantize(64, Image.Quantize.MAXCOVERAGE).save(path, optimize=True, pnginfo=text, dpi=(DPI, DPI))
    return path
