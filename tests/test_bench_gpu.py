"""``python -m benchmarks.gpu`` with stages of a second or less in the place of those that need a GPU."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks import gpu
from benchmarks.gpu import Stage
from fastattn.bench.gpu.cases import GPU_CASES
from tests.process import ROOT

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="GPUs are on Linux")

NAMES = ["info", "twelve", "benchmark", "real-sizes", "other-tests"]

#: What prints what it has when it is interrupted, as pytest does, and what does not listen.
WAITS = """
import time
try:
    print("begun", flush=True)
    time.sleep(60)
except KeyboardInterrupt:
    print("one failed so far")
    raise SystemExit(2)
"""
DEAF = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGINT, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
print(os.getpid(), child.pid, flush=True)
time.sleep(60)
"""


def stub(name: str, code: str = "print('done')", seconds: float = 30) -> Stage:
    return Stage(name, [sys.executable, "-S", "-c", code], seconds)


def run(monkeypatch, folder: Path, *stages: Stage, budget: float = 100) -> tuple[int, dict[str, str]]:
    monkeypatch.setattr(gpu, "stages", lambda jobs, folder: list(stages))
    status = gpu.main(["--out", str(folder), "--budget", str(budget)])
    lines = (folder / "summary.txt").read_text().splitlines()
    return status, dict(line.split(": ", 1) for line in lines)


def test_runs_to_the_end(monkeypatch, tmp_path, capsys):
    folder = tmp_path / "new" / "results"
    status, said = run(monkeypatch, folder, stub("info"), stub("bad", "print('no'); 1/0"), stub("last"))
    assert status == 1 and list(said) == ["info", "bad", "last"]
    assert said["info"].startswith("passed (") and said["last"].startswith("passed (")
    assert said["bad"].startswith("FAILED, exit status 1 (")
    log = (folder / "bad.log").read_text()
    assert log.startswith("no\nTraceback") and "ZeroDivisionError" in log
    assert (folder / "last.log").read_text() == "done\n"
    printed = capsys.readouterr().out
    assert log in printed and printed.endswith((folder / "summary.txt").read_text())
    status, _ = run(monkeypatch, folder, stub("info"), stub("last"))
    assert status == 0


@pytest.mark.parametrize("overruns", range(1, len(NAMES)))
def test_what_overruns_is_interrupted(monkeypatch, tmp_path, overruns):
    stages = [stub(name) for name in NAMES]
    stages[overruns] = stub(NAMES[overruns], WAITS, 2)
    status, said = run(monkeypatch, tmp_path, *stages)
    assert status == 1 and list(said) == NAMES
    assert [name for name in NAMES if not said[name].startswith("passed (")] == [NAMES[overruns]]
    assert said[NAMES[overruns]].startswith("FAILED, not done in 2 s (")
    assert (tmp_path / f"{NAMES[overruns]}.log").read_text() == "begun\none failed so far\n"


def test_what_does_not_listen_is_killed(monkeypatch, tmp_path):
    monkeypatch.setattr(gpu, "GRACE", 0.5)
    start = time.monotonic()
    status, said = run(monkeypatch, tmp_path, stub("deaf", DEAF, 2), stub("last"))
    assert time.monotonic() - start < 40  # it sleeps for 60
    assert status == 1 and said["deaf"].startswith("FAILED, not done in 2 s")
    assert said["last"].startswith("passed")
    for number in map(int, (tmp_path / "deaf.log").read_text().split()):
        for _ in range(100):  # until the system has taken it away
            stat = Path(f"/proc/{number}/stat")
            if not stat.exists() or stat.read_text().split()[2] == "Z":
                break
            time.sleep(0.1)
        else:
            pytest.fail(f"process {number} is left")


def test_the_budget_is_for_all(monkeypatch, tmp_path):
    monkeypatch.setattr(gpu, "GRACE", 1)
    start = time.monotonic()
    status, said = run(monkeypatch, tmp_path, stub("info"), stub("long", WAITS), stub("none"), budget=5)
    assert status == 1 and time.monotonic() - start < 20
    assert said["long"].startswith("FAILED, not done in") and said["none"].startswith(
        "FAILED, no time was left"
    )


@pytest.mark.parametrize("at", [0, 1])
def test_it_ends_where_nothing_can_run(monkeypatch, tmp_path, at):
    stages = [stub(name) for name in NAMES]
    stages[at] = stub(NAMES[at], f"raise SystemExit({gpu.NOTHING_RUNS})")
    status, said = run(monkeypatch, tmp_path, *stages)
    assert status == 1 and list(said) == NAMES[: at + 1]


@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("at", [0, 2])
def test_an_interrupt_ends_it_with_what_is_there(tmp_path, stop, at):
    code = f"""
import runpy, signal, sys
from benchmarks import gpu
from tests.test_bench_gpu import NAMES, WAITS, stub
signal.signal(signal.SIGTERM, signal.default_int_handler)
gpu.stages = lambda jobs, folder: [stub(name, *(WAITS,) * (n == {at})) for n, name in enumerate(NAMES)]
sys.exit(gpu.main(["--out", {str(tmp_path)!r}]))
"""
    with subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        for line in process.stdout:
            if line == "begun\n":
                process.send_signal(stop)
                break
        printed = process.stdout.read()
    assert process.returncode == 130
    summary = (tmp_path / "summary.txt").read_text()
    assert printed.startswith("one failed so far\n") and printed.endswith(summary)
    said = dict(line.split(": ", 1) for line in summary.splitlines())
    assert list(said) == NAMES[: at + 1]
    assert said.pop(NAMES[at]).startswith("interrupted (")
    assert all(verdict.startswith("passed (") for verdict in said.values())


def test_the_stages(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu, "SIMULATED", False)
    monkeypatch.setattr(gpu, "_tool", lambda name: None)
    monkeypatch.setattr(gpu, "find_spec", lambda name: None)
    assert [stage.name for stage in gpu.stages(2, tmp_path)] == NAMES
    monkeypatch.setattr(gpu, "find_spec", lambda name: name)
    monkeypatch.setattr(gpu, "_tool", lambda name: f"/bin/{name}")
    stages = gpu.stages(2, tmp_path)
    assert [stage.name for stage in stages] == [*NAMES[:3], "shapes", *NAMES[3:], "memcheck", "racecheck"]
    for stage in stages:
        for word in stage.command:
            assert not word.startswith("tests") or (ROOT / word).exists()
    assert set(gpu.CASES) <= set(GPU_CASES)
    assert len(gpu.TWELVE) == 12 and gpu.BUDGET + gpu.GRACE < 600


@pytest.mark.parametrize("where", ["set", "nvcc", "none"])
def test_where_cuda_is(monkeypatch, tmp_path, where):
    """Stages find the toolkit of nvcc, unless the environment names one."""
    for name in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    expected = None
    if where != "none":
        (tmp_path / "cuda" / "nvvm" / "lib64").mkdir(parents=True)
        (tmp_path / "cuda" / "nvvm" / "lib64" / "libnvvm.so.4").touch()
        expected = str(tmp_path / "cuda")
    if where == "set":
        expected = "/elsewhere"
        monkeypatch.setenv("CUDA_HOME", expected)
    monkeypatch.setattr(gpu, "_tool", lambda name: str(tmp_path / "cuda" / "bin" / name))
    assert gpu.run(stub("asks", "import os; print(os.environ.get('CUDA_HOME'))"), 30, tmp_path) == "passed"
    assert (tmp_path / "asks.log").read_text() == f"{expected}\n"


def test_a_case_that_crashes_or_hangs_is_one_of_twelve(monkeypatch, tmp_path, capsys):
    codes = {"right": "print('out 1e-7')", "wrong": "print('out 1'); raise SystemExit(1)",
             "crash": "import os; os.abort()", "error": "raise MemoryError('here')",
             "hang": "import time; time.sleep(60)", "last": "print('out 0')"}  # fmt: skip
    monkeypatch.setattr(gpu, "TWELVE", codes)
    monkeypatch.setattr(gpu, "CASE_SECONDS", 3)
    monkeypatch.setattr(gpu, "_call", lambda function, name: [sys.executable, "-S", "-c", codes[name]])
    with pytest.raises(SystemExit) as ended:
        gpu.twelve(str(tmp_path))
    assert ended.value.code == 1
    found = json.loads((tmp_path / "twelve.json").read_text())
    assert list(found) == list(codes)
    assert {name for name, case in found.items() if not case["failed"]} == {"right", "last"}
    assert found["wrong"]["said"] == "out 1" and found["hang"]["failed"] == "FAILED, not done in 3 s"
    assert found["crash"]["failed"] == f"FAILED, exit status {-signal.SIGABRT}"
    assert found["error"]["said"].endswith("MemoryError: here")
    assert "right: out 1e-7" in capsys.readouterr().out
    monkeypatch.setattr(gpu, "TWELVE", ["wrong", "crash"])
    with pytest.raises(SystemExit) as ended:
        gpu.twelve(str(tmp_path))
    assert ended.value.code == gpu.NOTHING_RUNS


def test_info_says_what_is_here(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(gpu.cuda_backend.backend, "unavailable_reasons", lambda: ["not here"], raising=False)
    with pytest.raises(SystemExit) as ended:
        gpu.info(str(tmp_path))
    found = json.loads((tmp_path / "info.json").read_text())
    assert ended.value.code == gpu.NOTHING_RUNS and found["reasons"] == ["not here"]
    assert {"CUDA_HOME", "GPU", "capability", "CUDA of the driver", "nvvm", "nvrtc", "nvJitLink"} <= set(
        found
    )
    assert json.dumps(found, indent=1) in capsys.readouterr().out
