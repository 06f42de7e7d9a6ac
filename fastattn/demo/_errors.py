"""The one exception of the demo: something its user can put right."""

from __future__ import annotations


class DemoError(Exception):
    """A mistake in the input or the installation; shown as a short message, never as a traceback.

    Parameters
    ----------
    message : str
        One line. It may quote files and paths: what is shown has no characters that command the terminal.
    hint : str, default ""
        What to do about it, on lines of its own if need be.
    """

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint
