"""What `python -m fastattn` does with its output, whichever command it is."""

from __future__ import annotations

import contextlib
import importlib
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

import fastattn
from fastattn.__main__ import main
from fastattn.bench.outputs import new_table, why_not_writable
from tests.demos import call_demo, complaint, go_to_empty_folder
from tests.process import ROOT

#: A name that is too long for every file system, whoever the user is.
TOO_LONG = "x" * 300


@pytest.mark.parametrize(
    "command",
    [
        "info", "bench --list",
        *(pytest.param(it, marks=pytest.mark.slow) for it in ("--help", "demo --help", "demo train --help")),
    ],
)  # fmt: skip
def test_a_closed_pipe_is_no_error(command: str, tmp_path: Path) -> None:
    """As in ``python -m fastattn info | head -1``."""
    if command.startswith("bench"):
        pytest.importorskip("rich")
    arguments = [sys.executable, "-m", "fastattn", *command.split()]
    with subprocess.Popen(arguments, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode in (0, 1)  # 0 where argparse itself takes no notice


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no full disk to write to")
@pytest.mark.parametrize("command", ["info", "--version", "demo --help"])
def test_a_full_disk_is_told_in_one_line(command: str, tmp_path: Path) -> None:
    with open("/dev/full", "w") as full:
        arguments = [sys.executable, "-m", "fastattn", *command.split()]
        done = subprocess.run(arguments, cwd=tmp_path, stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 2
    assert done.stderr == "python -m fastattn: the output cannot be written: No space left on device\n"


@pytest.mark.skipif(sys.platform == "win32", reason="the shell is POSIX's")
@pytest.mark.parametrize(
    "closed", ["<&-", *(pytest.param(it, marks=pytest.mark.slow) for it in (">&-", ">&- 2>&-"))]
)
def test_closed_streams_are_no_traceback(closed: str, tmp_path: Path) -> None:
    pytest.importorskip("gguf", reason="the demo extra is not installed")
    from tests.demo_generate_models import write_gguf

    path = write_gguf(tmp_path / "it.gguf")
    command = f"{sys.executable} -m fastattn demo --chat --model {path} {closed}"
    done = subprocess.run(command, shell=True, cwd=tmp_path, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL)
    assert (done.returncode, done.stderr) == (0, b"")


def test_an_interrupt_before_a_command_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(fastattn, "show_config", interrupt)
    assert main(["info"]) == 130
    assert capsys.readouterr().err == "\npython -m fastattn: interrupted\n"


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["--version"])
    assert stop.value.code == 0
    assert capsys.readouterr().out == f"fastattn {fastattn.__version__}\n"


@pytest.mark.parametrize("demo", ["generate", "embed", "train", "image"])
def test_a_picture_that_cannot_be_written_ends_a_demo_at_once(
    demo: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cli = importlib.import_module(f"fastattn.demo.{demo}.cli")
    monkeypatch.setattr(cli, "check_extras", lambda names: None)
    pytest.importorskip("matplotlib")
    go_to_empty_folder(tmp_path, monkeypatch)
    for path in (f"{TOO_LONG}.png", "/proc/x.png" if Path("/proc").is_dir() else "absent/x.png"):
        message = complaint(call_demo(cli.main, ["--picture", path], capsys))
        assert f"--picture {path} cannot be written: " in message
        assert message.count("\n") == 1
    assert not list(Path().iterdir())


def test_the_check_of_a_file_leaves_no_trace(tmp_path: Path) -> None:
    old, new, link = tmp_path / "old", tmp_path / "new", tmp_path / "link"
    old.write_text("text")
    link.symlink_to(new)
    before = old.stat()
    for path in (old, new, link):
        assert why_not_writable(path) == ""
    after = old.stat()
    assert (after.st_mtime_ns, after.st_size) == (before.st_mtime_ns, 4)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "old"]
    assert "long" in why_not_writable(tmp_path / TOO_LONG)
    link.unlink()
    link.symlink_to(link)
    assert why_not_writable(link)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes")
def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.png")
    assert why_not_writable(tmp_path / "pipe.png") == "it is a pipe"


@pytest.mark.parametrize("arguments", [["--help"], ["--gpu", "--help"], ["--cases", "tiny-4"], ["--gpu"]])
def test_the_benchmark_without_its_extra(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from fastattn.bench import cli

    for name in [name for name in sys.modules if name.split(".")[0] in ("numba", "rich")]:
        monkeypatch.delitem(sys.modules, name)
    for name in ("numba", "rich"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(SystemExit) as stop:
        cli.main(arguments)
    printed = capsys.readouterr()
    if "--help" in arguments:
        assert stop.value.code == 0 and printed.out.startswith("usage: python -m fastattn bench")
    else:
        assert stop.value.code == 2
        assert printed.err == "The benchmark needs rich and the peers: pip install 'fastattn[bench]'\n"


@pytest.mark.parametrize("width", [40, 60, 110])
def test_a_narrow_table_loses_nothing(width: int) -> None:
    console = pytest.importorskip("rich.console", reason="rich is not installed").Console
    heads = ("part [1]", "tokens", "plain NumPy", "times as fast")
    row = ("gradients of attention", "2012", "12345.67 ms", "25.45 (24.01-26.70)")
    table = new_table(heads, left=heads[:1])
    table.add_row(*row)
    with open(os.devnull, "w") as nowhere:
        there = console(file=nowhere, width=width, record=True)
        there.print(table)
    shown = there.export_text()
    assert max(map(len, shown.splitlines())) <= width
    assert Counter("".join((*heads, *row)).replace(" ", "")) == Counter(re.sub(r"[\s─]", "", shown))
    if width > 40:  # wide enough for whole words
        assert set(" ".join((*heads, *row)).split()) <= set(shown.split())


@pytest.mark.skipif(not hasattr(os, "openpty"), reason="no terminals")
@pytest.mark.parametrize("term", ["xterm", "dumb", None])
def test_bars_are_for_terminals(term: str | None) -> None:
    pytest.importorskip("rich")
    code = "from fastattn.demo._command import track\nfor step in track(range(3), 'counting'): print(step)"
    arguments, env = [sys.executable, "-c", code], os.environ | {"PYTHONPATH": str(ROOT), "TERM": str(term)}
    if term is None:
        done = subprocess.run(arguments, env=env, capture_output=True, text=True)
        assert (done.stdout, done.stderr) == ("0\n1\n2\n", "")
        return
    ours, theirs = os.openpty()
    with subprocess.Popen(arguments, env=env, stdout=theirs, stderr=theirs) as process:
        os.close(theirs)
        shown = b""
        with contextlib.suppress(OSError):  # its end, on Linux
            while got := os.read(ours, 4096):
                shown += got
    os.close(ours)
    assert process.returncode == 0
    assert (b"counting" in shown) == (b"\x1b[" in shown) == (term == "xterm")
