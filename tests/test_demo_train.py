"""The demo of training: its gradients, what it reads and how it learns, and the command."""

from __future__ import annotations

import math
import re
import subprocess
import sys
from collections import Counter
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("matplotlib", reason="the demo extra is not installed")
pytest.importorskip("rich", reason="the demo extra is not installed")

import fastattn
from fastattn.backends.cython import backend as cython_backend
from fastattn.demo import main
from fastattn.demo._decoding import Sampler
from fastattn.demo.train import cli, timing, training
from fastattn.demo.train import text as texts
from fastattn.demo.train.attention import Attention, FastAttention, PlainAttention
from fastattn.demo.train.model import Model, Sizes, Tensors, gelu
from fastattn.demo.train.optimizer import AdamW, Settings
from fastattn.demo.train.text import HELD_OUT, MAX_VOCABULARY, OTHER, built_in_text, count, load_text
from fastattn.demo.train.training import TEMPERATURE, TOP_P, Trainer, write
from tests.demos import call_demo, complaint, go_to_empty_folder

#: The probes of the cores are switched off, and with them the compiled backend.
pytestmark = pytest.mark.filterwarnings("ignore:attention runs on the NumPy backend")

ATTENTIONS = (FastAttention, PlainAttention)
TINY = Sizes(vocabulary=7, context=6, num_layers=2, num_heads=2, head_dim=4)
SENTENCES = ("the cat sleeps on the mat. ", "a dog runs in the rain! ", "why does it rain? ")


def a_text(length: int = 3000) -> str:
    rng = np.random.default_rng(0)
    words = "".join(SENTENCES[number] for number in rng.integers(0, len(SENTENCES), length))
    return words[:length]


@pytest.fixture
def notes(tmp_path: Path) -> Path:
    path = tmp_path / "notes.txt"
    path.write_text(a_text(), encoding="utf-8")
    return path


def trainer_of(path: Path, *, steps: int, seed: int = 0, context: int = 16) -> Trainer:
    text = load_text(path, context)
    sizes = Sizes(len(text.vocabulary), context, num_layers=2, num_heads=2, head_dim=8)
    return Trainer(Model(sizes, seed), text, steps, seed)


def losses_of(trainer: Trainer) -> list[float]:
    trainer.run(range(trainer.steps), lambda done: None)
    return trainer.progress.losses


class TestGradients:
    @pytest.mark.parametrize("kind", ATTENTIONS)
    def test_are_those_of_finite_differences(self, kind: type[Attention]) -> None:
        """Of every weight: along a random direction, which has all its numbers, and of some numbers alone."""
        model = Model(TINY, 0, np.float64)
        rng = np.random.default_rng(1)
        for weight in model.weights.named.values():  # norms away from 1, logits away from 0
            weight += 0.3 * rng.standard_normal(weight.shape)
        ids = rng.integers(0, TINY.vocabulary - 1, (3, TINY.context + 1))  # one character never comes
        attention, gradients = kind(TINY.num_layers), Tensors(TINY.shapes(), np.float64)
        model.loss_and_gradients(ids, attention, gradients)

        def difference(weight: np.ndarray, direction: np.ndarray, h: float = 1e-5) -> float:
            before = weight.copy()
            losses = []
            for sign in (1, -1):
                weight[...] = before + sign * h * direction
                losses.append(model.loss(ids, attention))
            weight[...] = before
            return (losses[0] - losses[1]) / (2 * h)

        for name, weight in model.weights.named.items():
            direction = rng.standard_normal(weight.shape)
            expected = float((gradients[name] * direction).sum())
            assert difference(weight, direction) == pytest.approx(expected, rel=1e-6, abs=1e-8), name
            for place in rng.integers(0, weight.size, 5):
                one = np.zeros(weight.shape)
                one.flat[place] = 1
                expected = float(gradients[name].flat[place])
                assert difference(weight, one) == pytest.approx(expected, rel=1e-5, abs=1e-8), (name, place)
        assert not gradients["embedding"][-1].any()

    @pytest.mark.parametrize("dtype", [np.float32, np.float64])
    def test_of_both_attentions(self, dtype: type) -> None:
        sizes = Sizes(vocabulary=20, context=70)
        model = Model(sizes, 0, dtype)
        ids = np.random.default_rng(0).integers(0, 20, (2, 71))
        flat = []
        for kind in ATTENTIONS:
            gradients = Tensors(sizes.shapes(), dtype)
            model.loss_and_gradients(ids, kind(sizes.num_layers), gradients)
            flat.append(gradients.flat.copy())
        np.testing.assert_allclose(*flat, rtol=0, atol=100 * np.finfo(dtype).eps * np.abs(flat[0]).max())

    def test_loss_is_the_same_with_and_without(self) -> None:
        model = Model(TINY, 0)
        ids = np.random.default_rng(0).integers(0, TINY.vocabulary, (3, TINY.context + 1))
        attention = FastAttention(TINY.num_layers)
        gradients = Tensors(TINY.shapes(), np.float32)
        assert model.loss(ids, attention) == model.loss_and_gradients(ids, attention, gradients)

    def test_what_is_kept(self) -> None:
        """Of fastattn a number for each query and head, of the plain formula one for each key as well."""
        model = Model(TINY, 0)
        ids = np.zeros((3, TINY.context + 1), int)
        fast, plain = (kind(TINY.num_layers) for kind in ATTENTIONS)
        for attention in (fast, plain):
            model.loss(ids, attention)
        assert fast.nbytes_kept == 4 * 3 * TINY.num_layers * TINY.num_heads * TINY.context
        assert plain.nbytes_kept == TINY.context * fast.nbytes_kept

    def test_gelu(self) -> None:
        x = np.linspace(-6, 6, 4001)[:, None]
        out, slope = gelu(x)
        exact = x[:, 0] / 2 * (1 + np.array([math.erf(it) for it in x[:, 0] / math.sqrt(2)]))
        np.testing.assert_allclose(out[:, 0], exact, atol=5e-4)  # how far that through tanh is off
        np.testing.assert_allclose(
            slope[1:-1], (gelu(x + 1e-5)[0] - gelu(x - 1e-5)[0])[1:-1] / 2e-5, atol=1e-9
        )


class TestModel:
    def test_sees_no_later_character(self) -> None:
        model = Model(TINY, 0)
        ids = np.random.default_rng(0).integers(0, 6, (1, TINY.context))
        other = ids.copy()
        other[0, 4] = 6
        one, two = (model.logits(it, FastAttention(TINY.num_layers).forward) for it in (ids, other))
        assert np.array_equal(one[:4], two[:4])
        assert (one[4:] != two[4:]).any(axis=1).all()

    def test_sees_the_order(self) -> None:
        model = Model(TINY, 0)
        attend = FastAttention(TINY.num_layers).forward
        one, two = (model.logits(np.array([ids]), attend)[-1] for ids in ([1, 2, 3, 4], [2, 1, 3, 4]))
        assert np.abs(one - two).max() > 1e-4

    def test_first_guess_is_about_uniform(self) -> None:
        sizes = Sizes(vocabulary=50, context=32)
        ids = np.random.default_rng(0).integers(0, 50, (4, 33))
        assert Model(sizes, 0).loss(ids, FastAttention(sizes.num_layers)) == pytest.approx(
            math.log(50), abs=0.1
        )

    def test_writes_what_it_would_without_a_cache(self) -> None:
        sizes = Sizes(vocabulary=30, context=40, num_layers=2)
        model = Model(sizes, 0)
        model.weights["output"][...] *= 20  # far from uniform
        prompt = np.array([3, 1, 4, 1, 5])
        sampler = Sampler(TEMPERATURE, TOP_P, 7)
        ids = list(prompt)
        for _ in range(30):
            ids.append(sampler(model.logits(np.array([ids]), FastAttention(2).forward)[-1]))
        written = write(model, prompt, 30, 7)
        assert written == ids[5:]
        assert len(set(written)) > 5
        assert written != write(model, prompt, 30, 8)


class TestOptimizer:
    def test_rates(self) -> None:
        settings = Settings()
        for steps in (1, 2, 7, 100):
            rates = [settings.rate(step, steps) for step in range(steps)]
            top = rates.index(max(rates))
            assert max(rates) == settings.peak
            assert rates[: top + 1] == sorted(rates[: top + 1]) and rates[top:] == sorted(rates[top:])[::-1]
            assert all(rate > 0 for rate in rates)
            assert steps == 1 or rates[-1] == pytest.approx(settings.last)

    def test_long_gradients_are_clipped_together(self) -> None:
        after = []
        for factor in (1.0, 1000.0):
            model = Model(TINY, 0, np.float64)
            optimizer = AdamW(model.weights, Settings(eps=1e-3))
            gradients = Tensors(TINY.shapes(), np.float64)
            gradients.flat[...] = factor * np.random.default_rng(0).standard_normal(gradients.flat.size)
            optimizer.step(gradients, 0.01)
            after.append(model.weights.flat.copy())
        np.testing.assert_allclose(*after, rtol=1e-6)

    def test_only_matrices_decay(self) -> None:
        model = Model(TINY, 0, np.float64)
        before = model.weights.flat.copy()
        AdamW(model.weights, Settings(decay=0.5)).step(Tensors(TINY.shapes(), np.float64), 0.1)
        for name, weight in model.weights.named.items():
            was = before[: weight.size].reshape(weight.shape)
            before = before[weight.size :]
            np.testing.assert_allclose(weight, was * (0.95 if weight.ndim > 1 else 1.0), err_msg=name)


class TestText:
    def test_pieces(self, notes: Path) -> None:
        text = load_text(notes, 16)
        whole = a_text()
        assert text.decode(text.training) + text.decode(text.held_out) == whole
        assert len(text.held_out) == int(HELD_OUT * len(whole))
        assert text.vocabulary == "".join(sorted(set(whole)))
        batch = text.batch(50, 17, np.random.default_rng(0))
        assert batch.shape == (50, 17)
        assert all(text.decode(row) in text.decode(text.training) for row in batch)

    def test_every_held_out_character_is_predicted_once(self, notes: Path) -> None:
        text = load_text(notes, 16)
        windows = text.held_out_windows(17)
        predicted = windows[:, 1:].ravel()
        assert np.array_equal(predicted, text.held_out[1 : 1 + len(predicted)])
        assert len(text.held_out) - 1 - len(predicted) < 16

    def test_counts(self, notes: Path) -> None:
        text = load_text(notes, 16)
        training, held_out = text.decode(text.training), text.decode(text.held_out)
        size = len(text.vocabulary)
        singles, firsts = Counter(training), Counter(training[:-1])
        pairs = Counter(pairwise(training))
        of_single = [(singles[it] + 1) / (len(training) + size) for it in held_out[1:]]
        of_pair = [(pairs[it] + 1) / (firsts[it[0]] + size) for it in pairwise(held_out)]
        counted = count(text)
        assert counted.unigram == pytest.approx(-np.log(of_single).mean())
        assert counted.bigram == pytest.approx(-np.log(of_pair).mean())

    def test_rare_characters_are_read_as_one(self, tmp_path: Path) -> None:
        common = "".join(map(chr, range(0x4E00, 0x4E00 + MAX_VOCABULARY - 1))) * 2
        rare = "".join(map(chr, range(0x3041, 0x3061)))
        path = tmp_path / "text"
        path.write_text(rare + common, encoding="utf-8")
        text = load_text(path, 8)
        assert len(text.vocabulary) == MAX_VOCABULARY
        assert set(text.vocabulary) == {*common, OTHER}
        assert text.decode(text.training).startswith(OTHER * len(rare) + common[:9])

    def test_built_in(self) -> None:
        text = built_in_text()
        assert len(text) > 300_000
        paragraphs = [it for it in text.split("\n\n") if it]
        assert len(paragraphs) == len(set(paragraphs))
        assert len(load_text(None, 256).vocabulary) < MAX_VOCABULARY

    def test_a_long_text_holds_out_no_more_than_is_read(
        self, notes: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(texts, "MAX_HELD_OUT", 50)
        assert len(load_text(notes, 16).held_out) == 50


class TestTraining:
    @pytest.fixture(autouse=True)
    def small_steps(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(training, "CHARACTERS_PER_STEP", 256)

    def test_learns_more_than_counts(self, notes: Path) -> None:
        trainer = trainer_of(notes, steps=150)
        losses = losses_of(trainer)
        assert np.mean(losses[-10:]) < 0.3 * losses[0]
        counted = count(trainer.text)
        assert trainer.held_out_loss(whole=True) < 0.8 * counted.bigram < counted.unigram

    def test_same_seed_same_losses(self, notes: Path) -> None:
        one, same, other = (losses_of(trainer_of(notes, steps=6, seed=seed)) for seed in (3, 3, 4))
        assert one == same
        assert one != other

    def test_watching_changes_nothing(self, notes: Path) -> None:
        trainer = trainer_of(notes, steps=4)
        done: list[int] = []

        def watch(number: int) -> None:
            done.append(number)
            trainer.held_out_loss(whole=False)
            write(trainer.model, trainer.text.held_out[:4], 5, 0)

        trainer.run(range(4), watch)
        assert done == [0, 1, 2, 3, 4]
        assert trainer.progress.losses == losses_of(trainer_of(notes, steps=4))
        assert trainer.progress.characters == 4 * 256

    def test_held_out_loss_is_the_mean_of_its_pieces(
        self, notes: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        trainer = trainer_of(notes, steps=1)
        windows = trainer.text.held_out_windows(17)
        assert len(windows) % trainer.batch_size  # the last part is smaller
        losses = [trainer.model.loss(it[None], FastAttention(2)) for it in windows]
        assert trainer.held_out_loss(whole=True) == pytest.approx(np.mean(losses), rel=1e-5)
        monkeypatch.setattr(training, "WATCHED", 5)
        assert trainer.held_out_loss(whole=False) == pytest.approx(np.mean(losses[::4]), rel=1e-5)

    def test_comparison_leaves_the_model_as_it_is(self, notes: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(cython_backend.backend, "unavailable_reasons", lambda: ["no probes in tests"])
        trainer = trainer_of(notes, steps=2)
        losses_of(trainer)
        before = trainer.model.weights.flat.copy()
        result = timing.compare(trainer, list)
        assert np.array_equal(trainer.model.weights.flat, before)
        assert result.largest_difference < 1e-6 < result.largest_gradient
        for times in (result.fast, result.plain):
            assert min(times.forward, times.backward) > 0
            assert times.forward + times.backward < times.step
            assert 0 < times.attention_share < 1
        assert result.fast.nbytes_kept < result.plain.nbytes_kept


@pytest.fixture
def run_and_draw(
    notes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """Call the demo with a small model in an empty folder; gives the exit status, stdout and stderr."""
    go_to_empty_folder(tmp_path, monkeypatch)
    monkeypatch.setattr(cython_backend.backend, "unavailable_reasons", lambda: ["no probes in tests"])
    monkeypatch.setattr(fastattn, "share_threads_with_blas", lambda: False)  # it would outlast the test
    monkeypatch.setattr(training, "CHARACTERS_PER_STEP", 128)
    monkeypatch.setattr(cli, "Sizes", partial(Sizes, num_layers=1, num_heads=2, head_dim=8))
    monkeypatch.setattr(timing, "ROUNDS", 1)

    def call(*arguments: str, file: Path | None = notes) -> tuple[int, str, str]:
        given = ["train", *([str(file)] if file else []), "--context", "16", "--steps", "4", *arguments]
        return call_demo(main, given, capsys)

    return call


@pytest.fixture
def run(run_and_draw, monkeypatch: pytest.MonkeyPatch):
    """The same without the picture, which takes longer than all the rest."""
    monkeypatch.setattr("fastattn.demo.train.picture.draw", lambda *given: None)
    return run_and_draw


class TestCommand:
    def test_output_and_picture(self, run_and_draw, notes: Path) -> None:
        status, out, err = run_and_draw("--steps", "30")
        assert (status, err) == (0, "")
        assert f"Text: {notes}" in out
        counted = count(load_text(notes, 16))
        assert f"{counted.unigram:.3f}" in out and f"{counted.bigram:.3f}" in out
        told = re.findall(r"^step +(\d+) of 30: loss (\d\.\d{3}) held out", out, re.MULTILINE)
        assert (int(told[0][0]), int(told[-1][0]), len(told)) == (0, 30, cli.TOLD + 1)
        assert float(told[-1][1]) < float(told[0][1])
        assert (
            len(re.findall(r", \d\.\d{3} in training; \d+ characters per second$", out, re.MULTILINE))
            == cli.TOLD
        )
        prompt = load_text(notes, 16).held_out[:8]
        assert out.count(f"\n    [{load_text(notes, 16).decode(prompt)}]") == cli.SAMPLED
        for name in ("attention", "gradients of attention", "everything else", "the whole step"):
            assert re.search(rf"^ *{name} +\d+\.\d ms +\d+\.\d ms +\d+\.\d\d *$", out, re.MULTILINE)
        assert re.search(r"share of attention +\d+% +\d+%", out)
        assert float(out.split("any gradient: ")[1].split()[0]) < 1e-5
        assert Path("fastattn-demo.png").read_bytes().startswith(b"\x89PNG")

    def test_built_in_text(self, run, monkeypatch: pytest.MonkeyPatch) -> None:
        status, out, _ = run("--steps", "1", file=None)
        assert status == 0
        assert "Text: Python's own documentation" in out

    def test_seed_decides_all_but_times(self, run) -> None:
        def of(seed: int) -> str:
            out = run("--seed", str(seed))[1]
            return re.sub(r"\d+ characters per second", "", out[: out.index("\nOne step of")])

        assert of(1) == of(1)
        assert of(1) != of(2)

    @pytest.mark.parametrize("options", [["--steps", "1"], ["--context", "1"], ["--context", "2"]])
    def test_smallest(self, run, options: list[str]) -> None:
        status, out, err = run(*options)
        assert (status, err) == (0, "")
        assert "Loss on all of the held-out text" in out

    @pytest.mark.slow
    @pytest.mark.parametrize("ending", ["pdf", "svg"])
    def test_pictures(self, run_and_draw, ending: str, tmp_path: Path) -> None:
        awkward = tmp_path / "a$x_{$.txt"
        awkward.write_text(a_text() + "\x1b[31m東京", encoding="utf-8")
        status, out, err = run_and_draw("--picture", f"p.{ending}", file=awkward)
        assert (status, err) == (0, "")
        assert "\x1b" not in out
        assert Path(f"p.{ending}").stat().st_size > 1000

    @pytest.mark.slow
    def test_as_a_module_does_not_load_torch(self, notes: Path, tmp_path: Path) -> None:
        code = """
import atexit, runpy, sys
from fastattn.demo.train import timing, training
timing.ROUNDS, training.CHARACTERS_PER_STEP = 1, 64
foreign = {"torch", "numba", "tokenizers", "gguf", "safetensors"}
atexit.register(lambda: print(sorted(foreign & set(sys.modules))))
runpy.run_module("fastattn", run_name="__main__")
"""
        words = ["demo", "train", str(notes), "--steps", "2", "--context", "16"]
        done = subprocess.run(
            [sys.executable, "-c", code, *words], cwd=tmp_path, capture_output=True, text=True, timeout=120
        )
        assert (done.returncode, done.stderr) == (0, "")
        assert "step 2 of 2" in done.stdout
        assert done.stdout.splitlines()[-1] == "[]"
        assert (tmp_path / "fastattn-demo.png").exists()


class TestComplaints:
    def test_missing_file(self, run) -> None:
        message = complaint(run(file=Path("nowhere.txt")))
        assert "nowhere.txt cannot be read: No such file" in message

    def test_folder(self, run, tmp_path: Path) -> None:
        assert "cannot be read" in complaint(run(file=tmp_path))

    @pytest.mark.parametrize(
        ("content", "said"),
        [
            (b"caf\xe9 " * 100, "not UTF-8 text: byte 0xe9 at position 3"),
            (b"\0\1\2" * 100, "NUL"),
            (b"", "no text in it"),
            (b" \n\n", "no text in it"),
            (b"short", "too short: 5 characters, expected 170 or more with --context 16"),
            (b"x" * 169, "too short: 169 characters"),
        ],
    )
    def test_content(self, run, notes: Path, content: bytes, said: str) -> None:
        notes.write_bytes(content)
        message = complaint(run())
        assert said in message and "notes.txt" in message

    def test_shortest_that_is_enough(self, run, notes: Path) -> None:
        notes.write_text("x" * 170, encoding="utf-8")
        assert run()[0] == 0
