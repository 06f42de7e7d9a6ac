"""Wrong arguments: of each, the type of its error, and that the message names it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any

import pytest


def one_at_a_time(wrong: dict[str, Iterable[Any]]) -> list[dict[str, Any]]:
    """Keywords for calls with one wrong argument each, from the wrong values of each name."""
    return [{name: value} for name, values in wrong.items() for value in values]


def assert_named(call: Callable[..., Any], error: type[Exception], wrong: Any) -> list[str]:
    """Call with each of the wrong keywords, a dict of values by name or a list of keywords; the messages."""
    messages = []
    for keywords in one_at_a_time(wrong) if isinstance(wrong, dict) else wrong:
        with pytest.raises(error) as caught:
            call(**keywords)
        message = str(caught.value)
        assert all(re.search(rf"\b{name}\b", message) for name in keywords), (keywords, message)
        messages.append(message)
    return messages
