"""Damaged files of models: a message of one line and the status 2, in seconds and little memory."""

from __future__ import annotations

import json
import sys

import pytest

from tests.process import python

if not sys.platform.startswith("linux"):
    pytest.skip("limits of a process are Linux's", allow_module_level=True)
for extra in (
    "gguf",
    "jinja2",
    "matplotlib",
    "ml_dtypes",
    "onnx",
    "PIL",
    "rich",
    "safetensors",
    "tokenizers",
):
    pytest.importorskip(extra, reason="the demo extra is not installed")


@pytest.mark.parametrize(
    ("demo", "count"),
    [
        ("generate", 6),
        ("embed", 40),
        pytest.param("generate", 400, marks=pytest.mark.slow),
        pytest.param("embed", 150, marks=pytest.mark.slow),
        pytest.param("image", 80, marks=pytest.mark.slow),
    ],
)
def test_each_is_refused_in_one_line_or_is_whole_again(demo: str, count: int) -> None:
    code = f"import json; from tests.demo_damage import main; print(json.dumps(main({demo!r}, 0, {count})))"
    result = json.loads(python(code, timeout=3600))
    assert not result["mistakes"]
    outcomes = result["outcomes"].items()
    assert sum(number for _, number in outcomes) == count
    # Most damages can be told, so that a demo that takes everything, or nothing, is none of this.
    told = sum(number for name, number in outcomes if name.endswith("status 2"))
    assert count / 2 < told < count or demo == "image"
