"""The demo's model: the right features, on tiny random weights and on the real ones.

The tiny models are checked against PyTorch's functions in float64, put together here without any of the
demo's code, and, like the real one, against the ONNX graph itself, run by onnxruntime.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("matplotlib", reason="the demo extra is not installed")
pytest.importorskip("onnx", reason="the demo extra is not installed")
pytest.importorskip("PIL", reason="the demo extra is not installed")
pytest.importorskip("rich", reason="the demo extra is not installed")

import onnx
from onnx import helper

from fastattn.demo.image import loading
from fastattn.demo.image.attention import ClassRecorder, fast_attention, plain_attention
from fastattn.demo.image.components import component_colours
from fastattn.demo.image.model import VisionTransformer, interpolate
from fastattn.demo.image.photograph import fit, pixels_of, read_photograph
from tests.demo_image_models import (
    EPS,
    HEADS,
    HIDDEN,
    LAYERS,
    PATCH,
    SIDE,
    make_model,
    needs_real_model,
    random_tensors,
    run_graph,
    write_model,
)

#: Rows and columns of patches: as in training, more, fewer, and a strip.
GRIDS = [(SIDE, SIDE), (3, 8), (11, 4), (1, 17)]


def random_pixels(rows: int, columns: int) -> np.ndarray:
    rng = np.random.default_rng(rows * 100 + columns)
    return rng.standard_normal((rows * PATCH, columns * PATCH, 3), dtype=np.float32)


def load(path: Path, tensors: dict[str, np.ndarray] | None = None, prefix: str = "x.") -> VisionTransformer:
    return loading.load_model(write_model(path / "tiny.onnx", tensors, prefix))


def formula(tensors: dict[str, np.ndarray], pixels: np.ndarray, dtype: str = "float64") -> np.ndarray:
    """The features by PyTorch's functions, with its own interpolation."""
    torch = pytest.importorskip("torch")
    functional = torch.nn.functional
    get = {name: torch.from_numpy(values).to(getattr(torch, dtype)) for name, values in tensors.items()}

    def linear(x, name):
        return functional.linear(x, get[f"{name}.weight"], get[f"{name}.bias"])

    def norm(x, name):
        return functional.layer_norm(x, (HIDDEN,), get[f"{name}.weight"], get[f"{name}.bias"], EPS)

    name = "embeddings.patch_embeddings.projection"
    picture = torch.from_numpy(pixels).to(getattr(torch, dtype)).permute(2, 0, 1)[None]
    patches = functional.conv2d(picture, get[f"{name}.weight"], get[f"{name}.bias"], stride=PATCH)
    positions = get["embeddings.position_embeddings"]
    grid = positions[:, 1:].reshape(1, SIDE, SIDE, HIDDEN).permute(0, 3, 1, 2)
    grid = functional.interpolate(grid, size=patches.shape[2:], mode="bicubic", align_corners=False)
    x = torch.cat([get["embeddings.cls_token"] + positions[:, :1], (patches + grid).flatten(2).mT], 1)
    for number in range(LAYERS):
        layer = f"encoder.layer.{number}"
        y = norm(x, f"{layer}.norm1")
        query, key, value = (
            linear(y, f"{layer}.attention.attention.{part}").unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for part in ("query", "key", "value")
        )
        y = functional.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2)
        y = linear(y, f"{layer}.attention.output.dense")
        x = x + get[f"{layer}.layer_scale1.lambda1"] * y
        y = functional.gelu(linear(norm(x, f"{layer}.norm2"), f"{layer}.mlp.fc1"))
        x = x + get[f"{layer}.layer_scale2.lambda1"] * linear(y, f"{layer}.mlp.fc2")
    return norm(x, "layernorm")[0].numpy()


def check_against_formula(model: VisionTransformer, tensors: dict[str, np.ndarray], *grid: int) -> None:
    pixels = random_pixels(*grid)
    expected, in_float32 = formula(tensors, pixels), formula(tensors, pixels, "float32")
    got = model(pixels, fast_attention)
    assert got.dtype == np.float32
    # Twice the error of PyTorch in float32, as a root mean square, and the demo's gelu is only good to 1e-6.
    error, float32_error = (np.sqrt(((it - expected) ** 2).mean()) for it in (got, in_float32))
    assert error <= 2 * float32_error + 1e-6
    assert np.sqrt((expected**2).mean()) > 0.5


class TestTinyModel:
    @pytest.mark.parametrize("grid", GRIDS)
    def test_agrees_with_the_formula(self, tmp_path: Path, grid: tuple[int, int]) -> None:
        check_against_formula(load(tmp_path), random_tensors(), *grid)

    @pytest.mark.parametrize("grid", GRIDS)
    def test_agrees_with_its_graph(self, tmp_path: Path, grid: tuple[int, int]) -> None:
        pixels = random_pixels(*grid)
        (expected,) = run_graph(make_model(), pixels, "features")
        np.testing.assert_allclose(load(tmp_path)(pixels, fast_attention), expected[0], rtol=0, atol=2e-5)

    def test_agrees_with_its_graph_where_norms_have_another_epsilon(self, tmp_path: Path) -> None:
        model = make_model()
        for number, node in enumerate(
            node for node in model.graph.node if node.op_type == "LayerNormalization"
        ):
            (epsilon,) = (it for it in node.attribute if it.name == "epsilon")
            if number == 0:
                node.attribute.remove(epsilon)
            else:
                epsilon.f = 0.1
        (tmp_path / "it.onnx").write_bytes(model.SerializeToString())
        pixels = random_pixels(3, 6)
        (expected,) = run_graph(model, pixels, "features")
        found = loading.load_model(tmp_path / "it.onnx")(pixels, fast_attention)
        np.testing.assert_allclose(found, expected[0], rtol=0, atol=2e-5)

    @pytest.mark.parametrize("prefix", ["", "backbone.", "model.encoder.vit."])
    def test_names_behind_a_prefix(self, tmp_path: Path, prefix: str) -> None:
        check_against_formula(load(tmp_path, prefix=prefix), random_tensors(), 3, 6)

    @pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
    def test_weights_of_other_types(self, tmp_path: Path, dtype: str) -> None:
        stored = np.dtype(dtype) if dtype != "bfloat16" else pytest.importorskip("ml_dtypes").bfloat16
        tensors = {name: values.astype(stored) for name, values in random_tensors().items()}
        model = load(tmp_path, tensors)
        assert model.positions.dtype == model.layers[0].up.weight.dtype == np.float32
        check_against_formula(model, {name: it.astype(np.float32) for name, it in tensors.items()}, 3, 6)

    def test_number_of_weights(self, tmp_path: Path) -> None:
        # The class token and the embedding of its place are one, once they are added.
        expected = sum(values.size for values in random_tensors().values()) - HIDDEN
        assert load(tmp_path).num_weights == expected


class TestAttention:
    def test_both_kinds_agree(self) -> None:
        query, key, value = np.random.default_rng(2).standard_normal((3, 37, 3, 64), dtype=np.float32)
        fast, plain = fast_attention(query, key, value), plain_attention(query, key, value)
        assert fast.shape == plain.shape == query.shape
        np.testing.assert_allclose(fast, plain, rtol=0, atol=1e-6)

    def test_recorder_keeps_the_weights_of_the_first_token(self) -> None:
        query, key, value = np.random.default_rng(3).standard_normal((3, 21, 2, 64)).astype(np.float32)
        recorder = ClassRecorder()
        recorder(value, query, key)  # forgotten
        np.testing.assert_array_equal(recorder(query, key, value), fast_attention(query, key, value))
        scores = np.einsum("hd,lhd->hl", query[0].astype(np.float64), key) / 8
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        weights /= weights.sum(axis=1, keepdims=True)
        np.testing.assert_allclose(recorder.weights, weights, rtol=0, atol=1e-6)


class TestInterpolate:
    @pytest.mark.parametrize("size", [(1, 1), (4, 9), (7, 6), (13, 2), (40, 41)])
    def test_is_pytorchs(self, size: tuple[int, int]) -> None:
        torch = pytest.importorskip("torch")
        grid = np.random.default_rng(4).standard_normal((7, 6, 5)).astype(np.float32)
        expected = torch.nn.functional.interpolate(
            torch.from_numpy(grid).double().permute(2, 0, 1)[None], size=size, mode="bicubic"
        )
        got = interpolate(grid, *size)
        assert got.dtype == np.float32
        np.testing.assert_allclose(got, expected[0].permute(1, 2, 0), rtol=0, atol=3e-6)

    def test_to_the_same_size_changes_nothing(self) -> None:
        grid = np.random.default_rng(5).standard_normal((7, 6, 5)).astype(np.float32)
        np.testing.assert_array_equal(interpolate(grid, 7, 6), grid)


class TestComponentColours:
    def features(self) -> tuple[np.ndarray, np.ndarray]:
        """Of 8 x 9 patches: three sources, each weaker than the last, along directions at right angles."""
        rng = np.random.default_rng(6)
        sources = rng.uniform(-1, 1, (72, 3)) * (9, 3, 1)
        sources -= sources.mean(axis=0)
        sources = np.linalg.svd(sources, full_matrices=False)[0] * (30, 10, 3)
        directions = np.linalg.qr(rng.standard_normal((20, 3)))[0]
        return sources, (sources @ directions.T).reshape(8, 9, 20).astype(np.float32)

    def test_are_the_sources(self) -> None:
        sources, features = self.features()
        weights = np.maximum(sources[:, 0], 0).reshape(8, 9)
        colours, share = component_colours(features, weights)
        assert colours.shape == (8, 9, 3) and colours.dtype == np.float32
        assert share == pytest.approx(1, abs=1e-6)
        for source, colour in zip(sources.T, colours.reshape(-1, 3).T, strict=True):
            source = source if weights.ravel() @ source > 0 else -source
            inside = (colour > 0) & (colour < 1)
            assert inside.mean() > 0.9
            # A straight line, but for the few percentiles at both ends.
            assert np.corrcoef(colour[inside], source[inside])[0, 1] > 1 - 1e-5
            assert (colour.min(), colour.max()) == (0, 1)
            assert np.median(source[colour == 1]) > np.median(source[colour == 0])

    def test_share_leaves_out_the_fourth(self) -> None:
        eigenvalues = np.array([4.0, 3.0, 2.0, 1.0])
        features = np.concatenate([np.diag(np.sqrt(eigenvalues)), -np.diag(np.sqrt(eigenvalues))])
        share = component_colours(features.reshape(2, 4, 4), np.ones((2, 4)))[1]
        assert share == pytest.approx(0.9)

    def test_do_not_depend_on_shifts_and_rotations(self) -> None:
        rng = np.random.default_rng(7)
        features = self.features()[1]
        weights = rng.uniform(0, 1, (8, 9))
        rotation = np.linalg.qr(rng.standard_normal((20, 20)))[0]
        other = (features @ rotation + rng.standard_normal(20)).astype(np.float32)
        expected, got = (component_colours(it, weights)[0] for it in (features, other))
        np.testing.assert_allclose(got, expected, rtol=0, atol=1e-4)

    def test_patches_that_are_all_alike(self) -> None:
        colours, share = component_colours(np.full((4, 5, 8), 0.5, np.float32), np.full((4, 5), 0.05))
        assert np.isfinite(colours).all() and share == 0


# ---- the real model


@pytest.fixture(scope="module")
def real() -> tuple[VisionTransformer, onnx.ModelProto]:
    """The model, and its graph with pictures of any size."""
    path = loading.find_model(None)
    graph = onnx.load(path)
    sides = graph.graph.input[0].type.tensor_type.shape.dim[2:]
    for side, name in zip(sides, ("height", "width"), strict=True):
        side.dim_param = name
    del graph.graph.output[:]
    for name in (FEATURES, WEIGHTS):
        graph.graph.output.append(helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None))
    return loading.load_model(path), graph


FEATURES = "/backbone/layernorm/Add_1_output_0"
WEIGHTS = "/backbone/encoder/layer.11/attention/attention/Softmax_output_0"


@needs_real_model
class TestRealModel:
    @pytest.mark.parametrize("shorter", [112, pytest.param(518, marks=pytest.mark.slow)])
    def test_agrees_with_its_graph(self, real: tuple, shorter: int) -> None:
        model, graph = real
        pixels = pixels_of(fit(read_photograph(None), shorter, model.patch_size))
        features, weights = run_graph(graph, pixels, FEATURES, WEIGHTS)
        recorder = ClassRecorder()
        np.testing.assert_allclose(model(pixels, recorder), features[0], rtol=0, atol=1e-4)
        np.testing.assert_allclose(recorder.weights, weights[0, :, 0], rtol=0, atol=1e-5)

    def test_sizes(self, real: tuple) -> None:
        model = real[0]
        assert (len(model.layers), model.num_heads, model.patch_size) == (12, 6, 14)
        assert model.positions.shape == (37, 37, 384)

    def test_heads_look_at_the_face_and_beside_it(self, real: tuple) -> None:
        """Of the sample picture: one gives the face over three times its share, another under half of it."""
        model = real[0]
        image = fit(read_photograph(None), 252, model.patch_size)
        recorder = ClassRecorder()
        model(pixels_of(image), recorder)
        columns, rows = image.width // 14, image.height // 14
        weights = recorder.weights[:, 1:].reshape(-1, rows, columns)
        face = weights[:, rows * 26 // 100 : rows * 54 // 100, columns * 32 // 100 : columns * 68 // 100]
        attention = face.sum(axis=(1, 2)) / weights.sum(axis=(1, 2))
        area = face[0].size / (rows * columns)
        assert attention.max() > 3 * area
        assert attention.min() < area / 2
