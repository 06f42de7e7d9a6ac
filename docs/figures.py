"""How figures look on the site: drawings in the page itself, whose text has the colour of the page's text.

``figures.use()`` in the first cell of a page; the cells after it are plain matplotlib.
"""

from __future__ import annotations

import io
import re
from itertools import count

import matplotlib as mpl
import matplotlib.pyplot as plt
from IPython import get_ipython
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib_inline.config import InlineBackend

INK = "#010203"  #: stands for the colour of the page's text
BLUE, ORANGE, GREEN, GREY, VIOLET = "#3b82d6", "#e8833a", "#2fa37c", "#8b93a1", "#9a6bd8"

#: Of weights from 0 up: nothing is drawn where there is nothing, so that it suits light and dark pages.
WEIGHTS = LinearSegmentedColormap.from_list("weights", [(*mpl.colors.to_rgb(BLUE), a) for a in (0.04, 1.0)])
#: Of numbers of either sign.
SIGNED = LinearSegmentedColormap.from_list(
    "signed", [(*mpl.colors.to_rgb(c), a) for c, a in ((ORANGE, 1.0), (GREY, 0.04), (BLUE, 1.0))]
)

_number = count()


def use() -> None:
    """From here on figures are shown so."""
    mpl.rcParams.update(
        {
            "axes.axisbelow": True,
            "axes.edgecolor": INK,
            "axes.facecolor": "none",
            "axes.grid": False,
            "axes.labelcolor": INK,
            "axes.linewidth": 0.6,
            "axes.prop_cycle": mpl.cycler(color=[BLUE, ORANGE, GREEN, GREY, VIOLET]),
            "axes.spines.right": False,
            "axes.spines.top": False,
            "axes.titlecolor": INK,
            "axes.titlesize": 10,
            "figure.constrained_layout.use": True,
            "figure.facecolor": "none",
            "figure.figsize": (7.2, 2.6),
            "font.size": 9,
            "grid.alpha": 0.15,
            "grid.color": INK,
            "image.cmap": "weights",
            "image.interpolation": "none",
            "legend.frameon": False,
            "savefig.facecolor": "none",
            "svg.fonttype": "none",
            "text.color": INK,
            "xtick.color": INK,
            "ytick.color": INK,
        }
    )
    if "weights" not in mpl.colormaps:
        mpl.colormaps.register(WEIGHTS)
        mpl.colormaps.register(SIGNED)
    shell = get_ipython()
    InlineBackend.instance(parent=shell).figure_formats = set()  # no pictures of another kind beside these
    formatters = shell.display_formatter.formatters
    formatters["text/html"].for_type(Figure, as_html)
    formatters["text/plain"].for_type(Figure, lambda figure, printer, cycle: printer.text(described(figure)))


def described(figure: Figure) -> str:
    """What it shows, for those who do not see it."""
    titles = (axes.get_title() or axes.get_title(loc="left") for axes in figure.axes)
    return "Figure: " + "; ".join(title for title in titles if title).replace("\n", " ")


def as_html(figure: Figure) -> str:
    """The figure as an element of the page."""
    text = io.StringIO()
    figure.savefig(text, format="svg", bbox_inches="tight", metadata={"Date": None})
    svg = text.getvalue()[text.getvalue().index("<svg") :].replace(INK, "currentColor")
    prefix = f"figure{next(_number)}-"  # several figures of a page must not share ids
    svg = re.sub(r'\bid="', f'id="{prefix}', svg)
    svg = re.sub(r'href="#', f'href="#{prefix}', svg).replace("url(#", f"url(#{prefix}")
    svg = re.sub(r"font: ([^;\"]*?)'[^\";]*(?=[;\"])", r"font: \1sans-serif", svg)
    label = described(figure).replace("&", "&amp;").replace('"', "&quot;")
    return f'<div class="figure" role="img" aria-label="{label}">{svg}</div>'


def grid(
    axes: plt.Axes,
    array: object,
    rows: object = None,
    columns: object = None,
    title: str = "",
    **options: object,
) -> None:
    """A matrix as squares with a thin line around each, and names of its rows and columns."""
    axes.pcolormesh(array, edgecolors=(0.5, 0.5, 0.5, 0.25), linewidth=0.4, **options)
    axes.invert_yaxis()
    axes.set_aspect("equal")
    axes.set_title(title)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    n_rows, n_columns = len(array), len(array[0])
    axes.set_yticks([i + 0.5 for i in range(n_rows)] if rows is not None else [], rows)
    turned = columns is not None and max(map(len, map(str, columns))) > 2
    axes.set_xticks([j + 0.5 for j in range(n_columns)] if columns is not None else [], columns)
    if turned:
        axes.tick_params(axis="x", rotation=60)
