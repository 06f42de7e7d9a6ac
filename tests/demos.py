"""What the tests of the demos share: a call of a command, and what it says about a mistake."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest


def go_to_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a command writes what it was not told to write elsewhere."""
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)


def call_demo(
    main: Callable[[Sequence[str]], int], arguments: Sequence[str], capsys: pytest.CaptureFixture[str]
) -> tuple[int, str, str]:
    """The exit status of a command, stdout and stderr."""
    try:
        status = main(arguments)
    except SystemExit as stop:  # argparse
        status = int(stop.code or 0)
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def complaint(result: tuple[int, str, str]) -> str:
    """What the demo said about a mistake: status 2, a short message, nothing else."""
    status, out, err = result
    assert status == 2
    assert out == ""
    assert err.startswith("fastattn demo: ")
    assert 1 <= err.count("\n") <= 4
    assert "Traceback" not in err
    return err


def one_line(result: tuple[int, str, str]) -> str:
    """What the demo said about a file: a complaint of one line, which commands no terminal."""
    err = complaint(result)
    assert err.count("\n") == 1
    assert err.removesuffix("\n").isprintable()
    return err
