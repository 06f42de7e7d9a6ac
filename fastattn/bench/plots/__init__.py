"""Pictures of what `document.write` wrote, for a README or a paper.

They need matplotlib and nothing of what was measured: each module draws one kind of picture from the document
alone, and leaves out what the document does not have.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from fastattn.bench.plots import ratios, roofline, scaling
from fastattn.bench.plots._page import (
    DIGEST_KEY,
    Picture,
    compared,
    digest,
    house_style,
    measured,
    save,
    shown,
)

__all__ = ["DIGEST_KEY", "Picture", "compared", "digest", "draw_all", "measured", "pictures", "shown"]

#: In the order in which they are shown.
_DRAWN: tuple[Callable[[Mapping[str, Any]], Picture | None], ...] = (
    ratios.draw,
    *(partial(ratios.draw_groups, name=name) for name in ratios.OF_GROUPS),
    roofline.draw,
    scaling.draw_time,
    scaling.draw_memory,
    scaling.draw_sizes,
)


def pictures(document: Mapping[str, Any]) -> list[Picture]:
    """Every picture that `document` has the figures for."""
    with house_style():
        return [picture for draw in _DRAWN if (picture := draw(document)) is not None]


def draw_all(document: Mapping[str, Any], folder: Path) -> list[Path]:
    """Draw every picture that `document` has the figures for.

    Parameters
    ----------
    document
        What ``python -m fastattn bench --json`` wrote.
    folder
        Where the PNGs go; it exists.

    Returns
    -------
    list of Path
        The files, in the order in which they are to be shown. The same document gives the same bytes with the
        same matplotlib. Each holds `digest` of the document as text under `DIGEST_KEY`.
    """
    results = digest(document)
    with house_style():
        return [save(picture, folder, results) for picture in pictures(document)]
