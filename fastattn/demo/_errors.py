"""The one exception of the demo: something its user can put right."""

from __future__ import annotations


class DemoError(Exception):
    """A mistake in the input or the installation; shown as a short message, never as a traceback."""
