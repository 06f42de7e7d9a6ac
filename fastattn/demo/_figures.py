"""Pictures that are saved under a name of the user's."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from fastattn.bench.outputs import why_not_writable
from fastattn.demo._errors import DemoError


def check_picture_path(path: Path) -> None:
    """Complain about a path that no picture can be written to, before any time is spent.

    Raises
    ------
    DemoError
        If the file name's ending is not a known format, or no file can be written there.
    """
    formats = set(FigureCanvasAgg.get_supported_filetypes()) - {"pgf"}  # which takes LaTeX
    if path.suffix.lower().removeprefix(".") not in formats:
        raise DemoError(f"--picture {path} must end in one of .{', .'.join(sorted(formats))}")
    if not os.path.isdir(path.absolute().parent):
        raise DemoError(f"--picture {path} cannot be written: there is no folder {path.absolute().parent}")
    if os.path.isdir(path):  # False for a name that is too long, where Path.is_dir raises
        raise DemoError(f"--picture {path} cannot be written: it is a folder")
    if reason := why_not_writable(path):
        raise DemoError(f"--picture {path} cannot be written: {reason}")


@contextmanager
def any_glyphs() -> Iterator[None]:
    """Within it nothing is said of letters that the font lacks: a user's text may have any."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from")
        yield


def save_figure(figure: Figure, path: Path) -> None:
    """Write `figure` to `path`, whose ending names the format.

    Raises
    ------
    DemoError
        If the file cannot be written.
    """
    try:
        with any_glyphs():
            figure.savefig(path, dpi=110)
    except OSError as error:
        raise DemoError(f"--picture {path} cannot be written: {error.strerror}") from None
