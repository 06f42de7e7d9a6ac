"""The demo as a command: what it reads, shows and draws, and clear complaints."""

from __future__ import annotations

import itertools
import os
import re
import warnings
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("matplotlib", reason="the demo extra is not installed")
pytest.importorskip("onnx", reason="the demo extra is not installed")
pytest.importorskip("PIL", reason="the demo extra is not installed")
pytest.importorskip("rich", reason="the demo extra is not installed")

import onnx
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from onnx import numpy_helper
from PIL import Image

import fastattn
from fastattn.backends.cython import backend as cython_backend
from fastattn.demo import _timing, main
from fastattn.demo.image import photograph
from fastattn.demo.image.photograph import MAX_PATCHES, MIN_PATCHES, SAMPLE, fit, pixels_of, read_photograph
from fastattn.demo.image.picture import Box, Text, arrange, draw, heat
from tests.demo_image_models import HEADS, HIDDEN, LAYERS, PATCH, make_model, needs_real_model, write_model
from tests.demos import call_demo, complaint, go_to_empty_folder, one_line

#: The probes of the cores are switched off, and with them the compiled backend.
pytestmark = pytest.mark.filterwarnings("ignore:attention runs on the NumPy backend")

RED, GREEN, BLUE, WHITE = (255, 0, 0), (0, 255, 0), (0, 0, 255), (255, 255, 255)


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    return write_model(tmp_path / "tiny.onnx")


@pytest.fixture
def run_and_draw(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """Call the demo on the tiny model in an empty folder; gives the exit status, stdout and stderr."""
    go_to_empty_folder(tmp_path, monkeypatch)
    monkeypatch.setattr(_timing, "SECONDS", 0.0)
    monkeypatch.setattr(cython_backend.backend, "unavailable_reasons", lambda: ["no probes in tests"])
    monkeypatch.setattr(fastattn, "share_threads_with_blas", lambda: False)  # it would outlast the test

    def call(*arguments: str, model: Path | None = tiny) -> tuple[int, str, str]:
        given = ["image", "--size", "32", *arguments, *(["--model", str(model)] if model else [])]
        return call_demo(main, given, capsys)

    return call


@pytest.fixture
def run(run_and_draw, monkeypatch: pytest.MonkeyPatch):
    """The same without the picture, which takes longer than all the rest."""
    monkeypatch.setattr("fastattn.demo.image.picture.draw", lambda *given: None)
    return run_and_draw


def a_picture(width: int = 40, height: int = 30, mode: str = "RGB") -> Image.Image:
    noise = np.random.default_rng(0).integers(0, 256, (height, width, 3), np.uint8)
    return Image.fromarray(noise).convert(mode)


class TestCommand:
    def test_sample_picture(self, run_and_draw) -> None:
        status, out, err = run_and_draw()
        assert (status, err) == (0, "")
        assert "Grace Hopper, by the U.S. Navy, public domain" in out
        assert "512 x 600 pixels, resized to 32 x 36: 8 x 9 patches, 73 tokens" in out
        assert f"{LAYERS} layers of {HEADS} heads, {HIDDEN} numbers per token" in out
        for name in (f"attention, {LAYERS} layers", "the whole model"):
            assert re.search(rf"{name} +\d+\.\d ms +\d+\.\d ms +\d+\.\d\d *$", out, re.MULTILINE)
        assert re.search(r"share of attention +\d+% +\d+% *$", out, re.MULTILINE)
        assert float(out.split("any patch: ")[1].split()[0]) < 1e-4
        assert Path("fastattn-demo.png").read_bytes().startswith(b"\x89PNG")

    @pytest.mark.parametrize("ending", ["png", pytest.param("pdf", marks=pytest.mark.slow)])
    def test_picture_of_the_users(self, run_and_draw, ending: str) -> None:
        name = "a $x_{$ \x1b[31m \u6771\u4eac.jpg"
        a_picture().save(name)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            status, out, err = run_and_draw(name, "--picture", f"seen.{ending}")
        assert (status, err) == (0, "")
        assert "\x1b" not in out
        assert "40 x 30 pixels, resized to 44 x 32: 11 x 8 patches, 89 tokens" in out
        assert Path(f"seen.{ending}").stat().st_size > 1000

    def test_what_is_drawn(self, run, monkeypatch: pytest.MonkeyPatch) -> None:
        drawn: list[tuple] = []
        monkeypatch.setattr("fastattn.demo.image.picture.draw", lambda *given: drawn.append(given))
        a_picture().save("noise.png")
        assert run("noise.png")[0] == 0
        ((image, colours, weights, text, path),) = drawn
        assert image.size == (44, 32)
        assert colours.shape == (8, 11, 3) and 0 <= colours.min() < colours.max() <= 1
        assert weights.shape == (HEADS, 8, 11) and weights.min() >= 0
        # The class token attends to itself as well.
        assert (weights.sum(axis=(1, 2)) < 1 + 1e-5).all() and weights.sum() > 0.5
        assert "89 tokens" in text.title and "11 x 8 patches" in text.photograph and "noise.png" in text.foot
        assert str(path) == "fastattn-demo.png"

    def test_size(self, run) -> None:
        a_picture().save("noise.png")
        assert "resized to 80 x 60: 20 x 15 patches" in run("noise.png", "--size", "61")[1]

    @pytest.mark.parametrize(("option", "shared"), [("--share-threads", 1), ("--no-share-threads", 0)])
    def test_sharing_threads(self, run, monkeypatch: pytest.MonkeyPatch, option: str, shared: int) -> None:
        calls: list[bool] = []
        monkeypatch.setattr(fastattn, "share_threads_with_blas", lambda: calls.append(True) or True)
        assert run(option)[0] == 0 and len(calls) == shared

    def test_threads_are_shared_where_nothing_is_said(self, run, monkeypatch: pytest.MonkeyPatch) -> None:
        calls: list[bool] = []
        monkeypatch.setattr(fastattn, "share_threads_with_blas", lambda: calls.append(True) or True)
        assert run()[0] == 0 and calls == [True]


class TestReading:
    def colours(self, path: str) -> list[tuple[int, ...]]:
        """Of the four corners: top left, top right, bottom left, bottom right."""
        image = read_photograph(Path(path)).image
        assert image.mode == "RGB"
        right, bottom = image.width - 1, image.height - 1
        return [image.getpixel(place) for place in ((0, 0), (right, 0), (0, bottom), (right, bottom))]

    @pytest.fixture(autouse=True)
    def four(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Image.Image:
        """Red and green above blue and white, 20 x 30 pixels each."""
        monkeypatch.chdir(tmp_path)
        corners = np.array([[RED, GREEN], [BLUE, WHITE]], np.uint8)
        return Image.fromarray(corners.repeat(30, axis=0).repeat(20, axis=1))

    @pytest.mark.parametrize("mode", ["RGB", "RGBA", "P", "CMYK"])
    def test_modes(self, four: Image.Image, mode: str) -> None:
        four.convert(mode).save("four.tiff")
        assert self.colours("four.tiff") == [RED, GREEN, BLUE, WHITE]

    def test_transparent_is_white(self, four: Image.Image) -> None:
        four.putalpha(Image.new("L", four.size))
        four.putalpha(Image.fromarray(np.repeat([[255], [0]], 30, 0).repeat(40, 1).astype(np.uint8)))
        four.save("four.png")
        assert self.colours("four.png") == [RED, GREEN, WHITE, WHITE]

    def test_turned_upright(self, four: Image.Image) -> None:
        exif = Image.Exif()
        exif[0x0112] = 6  # the camera was held so that what is left here was below
        four.save("four.png", exif=exif)
        assert read_photograph(Path("four.png")).image.size == (60, 40)
        assert self.colours("four.png") == [BLUE, RED, WHITE, GREEN]

    def test_grey_of_16_bits(self) -> None:
        grey = np.array([[0, 0x1234], [0x80FF, 0xFFFF]], np.uint16)
        Image.fromarray(grey).save("grey.png")
        assert self.colours("grey.png") == [(0,) * 3, (0x12,) * 3, (0x80,) * 3, (0xFF,) * 3]

    def test_grey(self) -> None:
        Image.fromarray(np.array([[0, 18], [200, 255]], np.uint8)).save("grey.png")
        assert self.colours("grey.png") == [(it,) * 3 for it in (0, 18, 200, 255)]

    def test_pixels_are_scaled_as_in_imagenet(self) -> None:
        pixels = pixels_of(Image.new("RGB", (2, 3), (255, 0, 51)))
        assert pixels.shape == (3, 2, 3) and pixels.dtype == np.float32
        expected = (1 - 0.485) / 0.229, -0.456 / 0.224, (0.2 - 0.406) / 0.225
        np.testing.assert_allclose(pixels, np.broadcast_to(expected, (3, 2, 3)), rtol=1e-6)

    @pytest.mark.parametrize("size", [(40, 30), (30, 40), (14, 400), (500, 30), (999, 1001)])
    @pytest.mark.parametrize("shorter", [70, 100, 217])
    def test_fit_keeps_the_shape(self, size: tuple[int, int], shorter: int) -> None:
        given = photograph.Photograph(Image.new("RGB", size), "a", "a")
        width, height = fit(given, shorter, 14).size
        assert width % 14 == height % 14 == 0
        assert abs(min(width, height) - shorter) <= 7
        scale = shorter / min(size)
        assert abs(width - size[0] * scale) <= 7 + 1e-9 and abs(height - size[1] * scale) <= 7 + 1e-9


class TestComplaints:
    @pytest.mark.parametrize(
        ("content", "said"),
        [
            (None, "No such file"),
            (b"", "not a picture"),
            (b"hello\n", "not a picture"),
            (b"\x89PNG\r\n\x1a\n", "not a picture"),
            (b"II*\0\x08\0\0\0", "a.png"),
        ],
    )
    def test_file(self, run, content: bytes | None, said: str) -> None:
        if content is not None:
            Path("a.png").write_bytes(content)
        message = complaint(run("a.png"))
        assert "FILE a.png" in message and said in message

    @pytest.mark.parametrize("ending", ["png", "jpg", "tiff", "gif"])
    def test_cut_off_file(self, run, ending: str) -> None:
        a_picture(80, 80).save(f"a.{ending}")
        content = Path(f"a.{ending}").read_bytes()
        Path(f"a.{ending}").write_bytes(content[: len(content) // 2])
        assert f"FILE a.{ending}" in complaint(run(f"a.{ending}"))

    def test_folder(self, run) -> None:
        Path("folder").mkdir()
        assert "FILE folder cannot be read" in complaint(run("folder"))

    def test_pixels_of_32_bits(self, run) -> None:
        Image.fromarray(np.ones((30, 30), np.float32)).save("a.tiff")
        message = complaint(run("a.tiff"))
        assert "FILE a.tiff" in message and "mode F" in message

    def test_bomb(self, run, monkeypatch: pytest.MonkeyPatch) -> None:
        a_picture().save("a.png")
        monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 500)
        message = complaint(run("a.png"))
        assert "FILE a.png is too large" in message and "1200 pixels" in message

    def test_too_small(self, run) -> None:
        a_picture(PATCH - 1, 50).save("a.png")
        message = complaint(run("a.png"))
        assert f"a.png is too small: it has {PATCH - 1} x 50 pixels" in message
        assert f"{PATCH} x {PATCH} or more" in message

    @pytest.mark.parametrize(
        ("size", "patches", "many"), [("1", "1 x 1", "few"), ("1000", "333 x 250", "many")]
    )
    def test_number_of_patches(self, run, size: str, patches: str, many: str) -> None:
        a_picture().save("a.png")
        message = complaint(run("a.png", "--size", size))
        assert f"--size {size} gives {patches} patches" in message and f"too {many}" in message
        assert f"{MIN_PATCHES} to {MAX_PATCHES}" in message

    def test_too_long_a_strip(self, run) -> None:
        Image.new("RGB", (20000, 4)).save("a.png")
        assert "too many" in complaint(run("a.png"))

    def test_no_sample_data(self, run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setattr(photograph.matplotlib, "get_data_path", lambda: str(tmp_path))
        message = complaint(run())
        assert SAMPLE in message and "FILE" in message

    @pytest.mark.parametrize("content", [b"", b"\xff\xfe{", b"hello, this is no model\n"])
    def test_no_model(self, run, tmp_path: Path, content: bytes) -> None:
        path = tmp_path / "other.onnx"
        path.write_bytes(content)
        assert "other.onnx" in complaint(run(model=path))

    def test_cut_off_model(self, run, tiny: Path) -> None:
        tiny.write_bytes(tiny.read_bytes()[:-1000])
        assert "tiny.onnx is not an ONNX file, or is damaged" in complaint(run())


class TestOtherArchitectures:
    """Each says which tensor or node is there, or is not."""

    def check(self, run, tmp_path: Path, change: Callable[[onnx.ModelProto], object], *said: str) -> None:
        model = make_model()
        change(model)
        path = tmp_path / "other.onnx"
        path.write_bytes(model.SerializeToString())
        message = one_line(run(model=path))
        for words in ("other.onnx", *said):
            assert words in message

    @staticmethod
    def replace(model: onnx.ModelProto, name: str, values: np.ndarray | None) -> None:
        tensors = model.graph.initializer
        number = [tensor.name for tensor in tensors].index(name)
        del tensors[number]
        if values is not None:
            tensors.append(numpy_helper.from_array(values, name))

    @pytest.mark.parametrize(
        "name",
        [
            "backbone.embeddings.patch_embeddings.projection.weight",
            "backbone.embeddings.cls_token",
            "backbone.encoder.layer.1.layer_scale2.lambda1",
            "backbone.encoder.layer.0.attention.attention.key.bias",
            "backbone.encoder.layer.1.mlp.fc1.bias",
            "backbone.layernorm.bias",
        ],
    )
    def test_no_such_tensor(self, run, tmp_path: Path, name: str) -> None:
        what = name.removeprefix("backbone.") if "patch_embeddings" in name else name
        self.check(run, tmp_path, lambda model: self.replace(model, name, None), "no tensor", what)

    @pytest.mark.parametrize(
        ("name", "shape", "said"),
        [
            ("embeddings.patch_embeddings.projection.weight", (HIDDEN, 1, PATCH, PATCH), "1 channels"),
            ("embeddings.patch_embeddings.projection.weight", (HIDDEN, 3, PATCH, 7), "4 x 7 pixels"),
            ("embeddings.patch_embeddings.projection.weight", (HIDDEN, 48), "expected 4 axes"),
            ("embeddings.patch_embeddings.projection.weight", (100, 3, PATCH, PATCH), "heads of 64"),
            ("embeddings.cls_token", (1, 2, HIDDEN), f"(1, 2, {HIDDEN})"),
            ("encoder.layer.1.mlp.fc1.bias", (7,), "(128, 80)"),
        ],
    )
    def test_another_shape(self, run, tmp_path: Path, name: str, shape: tuple[int, ...], said: str) -> None:
        values = np.ones(shape, np.float32)
        self.check(run, tmp_path, lambda model: self.replace(model, f"backbone.{name}", values), said)

    def test_weights_that_are_no_floats(self, run, tmp_path: Path) -> None:
        name = "backbone.layernorm.weight"
        values = np.ones(HIDDEN, np.int8)
        self.check(run, tmp_path, lambda model: self.replace(model, name, values), name, "INT8")

    def test_weights_cut_short(self, run, tmp_path: Path) -> None:
        def cut(model: onnx.ModelProto) -> None:
            for tensor in model.graph.initializer:
                if tensor.name == "backbone.layernorm.weight":
                    tensor.raw_data = tensor.raw_data[:-4]

        self.check(run, tmp_path, cut, "backbone.layernorm.weight is damaged")

    def test_register_tokens(self, run, tmp_path: Path) -> None:
        registers = numpy_helper.from_array(
            np.ones((1, 4, HIDDEN), np.float32), "backbone.embeddings.register_tokens"
        )
        self.check(
            run,
            tmp_path,
            lambda model: model.graph.initializer.append(registers),
            "register_tokens",
            "1 tensors",
        )

    def test_places_that_are_not_resized(self, run, tmp_path: Path) -> None:
        def rename(model: onnx.ModelProto) -> None:
            (resize,) = (node for node in model.graph.node if node.op_type == "Resize")
            resize.op_type = "Upsample"

        self.check(run, tmp_path, rename, "embeddings of places")

    def test_no_matrix_before_a_bias(self, run, tmp_path: Path) -> None:
        def rename(model: onnx.ModelProto) -> None:
            for node in model.graph.node:
                if node.op_type == "MatMul":
                    node.op_type = "Gemm"

        self.check(run, tmp_path, rename, "query.bias is not added to a product")

    @pytest.mark.parametrize("number", [np.nan, np.inf])
    def test_weights_that_are_not_finite(self, run, tmp_path: Path, number: float) -> None:
        name = "backbone.encoder.layer.1.norm2.weight"
        values = np.full(HIDDEN, number, np.float32)
        self.check(run, tmp_path, lambda model: self.replace(model, name, values), name, "not finite")

    def test_weights_that_overflow(self, run, tmp_path: Path) -> None:
        model = make_model()
        name = "backbone.encoder.layer.1.layer_scale2.lambda1"
        self.replace(model, name, np.full(HIDDEN, 3e38, np.float32))
        (tmp_path / "large.onnx").write_bytes(model.SerializeToString())
        status, _, err = run(model=tmp_path / "large.onnx")
        assert status == 2
        assert err.startswith("fastattn demo: the model's weights are so large") and err.count("\n") == 1

    @pytest.mark.parametrize("kind", ["Resize", "Reshape", "MatMul"])
    def test_a_node_without_inputs(self, run, tmp_path: Path, kind: str) -> None:
        def remove(model: onnx.ModelProto) -> None:
            node = next(node for node in model.graph.node if node.op_type == kind)
            del node.input[:]

        self.check(run, tmp_path, remove, repr(kind), "lacks its inputs")

    def test_a_circle(self, run, tmp_path: Path) -> None:
        """What the resized embeddings are made of is themselves."""

        def close(model: onnx.ModelProto) -> None:
            (resize,) = (node for node in model.graph.node if node.op_type == "Resize")
            (before,) = (node for node in model.graph.node if list(node.output) == [resize.input[0]])
            before.input[0] = before.output[0]

        self.check(run, tmp_path, close, "is read before it is computed")

    @pytest.mark.parametrize(("count", "inputs"), [(3000, 1), (60, 2)])
    def test_long_ways_to_the_places(self, run, tmp_path: Path, count: int, inputs: int) -> None:
        """Behind the resized embeddings stands what changes nothing, very often, or told twice."""
        model = make_model()
        (place,) = (n for n, node in enumerate(model.graph.node) if node.op_type == "Resize")
        nodes, name = list(model.graph.node), model.graph.node[place].output[0]
        names = [name, *(f"same {number}" for number in range(count))]
        same = [onnx.helper.make_node("Identity", [a] * inputs, [b]) for a, b in pairwise(names)]
        del model.graph.node[:]
        model.graph.node.extend([*nodes[: place + 1], *same, *nodes[place + 1 :]])
        (tmp_path / "long.onnx").write_bytes(model.SerializeToString())
        assert run("--size", "32", model=tmp_path / "long.onnx")[0] in (0, 2)

    def test_sizes_below_one(self, run, tmp_path: Path) -> None:
        def lie(model: onnx.ModelProto) -> None:
            for tensor in model.graph.initializer:
                if len(tensor.dims) == 3:
                    tensor.dims[1] = -tensor.dims[1]

        self.check(run, tmp_path, lie, "expected 1 or more")

    def test_no_layers(self, run, tmp_path: Path) -> None:
        def remove(model: onnx.ModelProto) -> None:
            kept = [it for it in model.graph.initializer if "encoder.layer" not in it.name]
            del model.graph.initializer[:]
            model.graph.initializer.extend(kept)

        self.check(run, tmp_path, remove, "no tensor 'backbone.encoder.layer.0.")

    @pytest.mark.parametrize("ending", ["onnx", "json", "textproto"])
    def test_other_files(self, run, tmp_path: Path, ending: str) -> None:
        path = tmp_path / f"it.{ending}"
        for content in (b"", b"{}", b"\xff" * 99):
            path.write_bytes(content)
            assert f"it.{ending}" in one_line(run(model=path))
        os.mkfifo(tmp_path / "pipe")
        for name in (".", "pipe"):
            assert "cannot be read: it is not a file" in one_line(run(model=tmp_path / name))

    def test_names_command_no_terminal(self, run, tmp_path: Path) -> None:
        path = write_model(tmp_path / "a\x1b[31m.onnx")
        a_picture(64, 48).save("\x1b.png")
        status, out, err = run("\x1b.png", "--picture", "b\n.png", model=path)
        assert (status, err) == (0, "") and out.replace("\n", "").isprintable()
        assert "a\\x1b[31m.onnx" in out and "\\x1b.png" in out and "b\\n.png" in out
        self.check(
            run,
            tmp_path,
            lambda model: setattr(model.graph.initializer[0], "name", "backbone.encoder.\x1b[2J"),
        )

    @pytest.mark.parametrize("location", ["../x", "/dev/zero", "x" * 5000, "", "pipe", "it.onnx"])
    def test_weights_elsewhere(self, run, tmp_path: Path, location: str) -> None:
        """Outside of the folder, or in no file; with a key that only makes the library warn."""

        def move_out(model: onnx.ModelProto) -> None:
            for tensor in model.graph.initializer:
                tensor.ClearField("raw_data")
                tensor.data_location = onnx.TensorProto.EXTERNAL
                for key, value in (("location", location), ("\x1b[2J", "")):
                    tensor.external_data.add(key=key, value=value)

        os.mkfifo(tmp_path / "pipe")
        (tmp_path / "it.onnx").write_bytes(bytes(7))
        self.check(run, tmp_path, move_out, "backbone.")

    def test_a_model_larger_than_the_format(self, run, tmp_path: Path) -> None:
        (tmp_path / "it.onnx").touch()
        os.truncate(tmp_path / "it.onnx", 10**11)
        assert "it has 100000000000 bytes" in one_line(run(model=tmp_path / "it.onnx"))

    def test_a_picture_that_is_a_pipe(self, run) -> None:
        os.mkfifo("a.png")
        assert "FILE a.png cannot be read: it is not a file" in one_line(run("a.png"))

    def test_weights_beside_the_file_that_are_not_there(self, run, tmp_path: Path) -> None:
        def move_out(model: onnx.ModelProto) -> None:
            onnx.external_data_helper.convert_model_to_external_data(
                model, location="weights.bin", size_threshold=0
            )

        self.check(run, tmp_path, move_out, "weights.bin")


class TestPicture:
    @pytest.mark.parametrize("shape", [0.05, 0.4, 0.75, 0.86, 1.0, 1.5, 16 / 9, 3.0, 20.0])
    @pytest.mark.parametrize("num_heads", [1, 2, 5, 6, 12, 16, 24])
    def test_panels_are_apart_and_within_and_undistorted(self, shape: float, num_heads: int) -> None:
        layout = arrange(shape, num_heads)
        assert len(layout.heads) == num_heads
        boxes = [layout.photograph, layout.colours, *layout.heads]
        for box in boxes:
            assert box.width / box.height == pytest.approx(shape)
            assert box.left > 0.2 and box.left + box.width < layout.width - 0.2
            assert box.top > 1 and box.top + box.height < layout.height - 0.2
        for one, other in itertools.combinations(boxes, 2):
            assert not overlapping(one, other)
        assert len({(round(box.width, 6), round(box.height, 6)) for box in layout.heads}) == 1

    @pytest.mark.parametrize(
        "size", [(560, 420), (420, 560), pytest.param((900, 90), marks=pytest.mark.slow)]
    )
    @pytest.mark.parametrize("num_heads", [6, pytest.param(16, marks=pytest.mark.slow)])
    def test_words_are_apart_and_within(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: tuple[int, int], num_heads: int
    ) -> None:
        figures: list[Figure] = []
        monkeypatch.setattr(
            "fastattn.demo.image.picture.save_figure", lambda figure, path: figures.append(figure)
        )
        words = Text(
            title="DINOv2 in NumPy: 8193 tokens, 40 layers of 24 heads",
            times="attention 12.34 s with fastattn, 123.45 s with the plain formula; "
            "the whole model 12.34 s and 123.45 s",
            photograph="164 x 155 patches",
            colours="their features: three principal components, 100% of the variance",
            heads="what the heads of layer 40 attend to",
            foot="Photograph: " + "W" * 110,
        )
        rng = np.random.default_rng(0)
        draw(
            a_picture(*size),
            rng.uniform(0, 1, (6, 8, 3)).astype(np.float32),
            rng.uniform(0, 1, (num_heads, 6, 8)).astype(np.float32),
            words,
            tmp_path / "a.png",
        )
        (figure,) = figures
        renderer = FigureCanvasAgg(figure).get_renderer()
        width, height = figure.bbox.size
        places = [text.get_window_extent(renderer) for text in figure.texts]
        assert len(places) == num_heads + len(words)
        for place in places:
            assert place.x0 >= 0 and place.x1 <= width and place.y0 >= 0 and place.y1 <= height
        for one, other in itertools.combinations(places, 2):
            assert not one.overlaps(other)
        panels = [axes.get_window_extent(renderer) for axes in figure.axes]
        for text, place in zip(figure.texts, places, strict=True):
            inside = [panel for panel in panels if panel.overlaps(place)]
            assert len(inside) == text.get_text().startswith("head ")

    def test_heat_is_where_the_weights_are(self) -> None:
        """Above, brighter where the weights are larger; below, where there are none, dark grey."""
        weights = np.zeros((8, 8), np.float32)
        weights[:4] = np.linspace(0.25, 1, 8)
        seen = heat(Image.new("RGB", (80, 80), (200, 100, 50)), weights)
        assert seen.shape == (80, 80, 3) and seen.min() >= 0 and seen.max() <= 1
        below = seen[60:]
        assert np.ptp(below, axis=2).max() < 0.02 and below.max() < 0.3
        brightness = seen[20].sum(axis=1)
        assert (np.diff(brightness[8:72]) > 0).all()

    def test_heat_of_no_weights(self) -> None:
        seen = heat(Image.new("RGB", (30, 20)), np.zeros((4, 6), np.float32))
        assert np.isfinite(seen).all() and seen.max() == 0


def overlapping(one: Box, other: Box) -> bool:
    return (
        one.left < other.left + other.width
        and other.left < one.left + one.width
        and one.top < other.top + other.height
        and other.top < one.top + one.height
    )


@pytest.mark.slow
@needs_real_model
def test_whole_run(run_and_draw) -> None:
    status, out, err = run_and_draw("--size", "518", model=None)
    assert (status, err) == (0, "")
    assert "22.1 million weights, 12 layers of 6 heads, 384 numbers per token" in out
    assert "37 x 43 patches, 1592 tokens" in out
    # Features are up to 11; twelve layers of float32 keep them apart by some 3e-5.
    assert float(out.split("any patch: ")[1].split()[0]) < 1e-4
    assert Path("fastattn-demo.png").stat().st_size > 300_000
