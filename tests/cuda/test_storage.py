"""16-bit storage without tensor cores: float16 and bfloat16 are read and written, not computed with.

Every result is that of the same call on upcast arrays, rounded once: where the result is not in 16 bits, its
bits are the same.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from numba import cuda

import fastattn
from fastattn import masks
from fastattn.backends.cuda.intrinsics import U, memory, read_as, write_as
from fastattn.backends.cuda.launch import launch_of
from fastattn.backends.cuda.stream import caller_stream
from tests.cases import MEMORY_LAYOUTS, random_arrays, stored, upcast
from tests.conftest import without
from tests.tolerances import assert_attention, assert_same_bits

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
STORAGES = [np.dtype(np.float16), BFLOAT16]
SHAPES = {
    "ragged": {"heads": 1, "len_q": 5, "len_k": 7, "head_dim": 6, "value_dim": 11},
    "whole_spans": {"heads": 2, "kv_heads": 1, "len_q": 3, "len_k": 8, "head_dim": 8, "value_dim": 8},
    "split_kv": {"heads": 2, "len_q": 1, "len_k": 14, "head_dim": 4, "value_dim": 5},
}
OPTIONS = {
    "plain": {},
    "causal": {"causal": "bottom_right"},
    "window": {"window": (2, 9), "softcap": 4.0},
    "mask": {"mask": masks.Window(3, 1) | masks.GlobalTokens([0])},
    "dense": {"mask": "mask"},
    "bias": {"bias": "bias"},
    "sinks": {"sinks": "sinks"},
}
EVERYTHING = {"return_lse": True, "return_weights": True}


def options_of(name, arrays, dtype):
    """The options of a name, with operands in this dtype, and the same with operands in float32."""
    options = dict(OPTIONS[name])
    rng = np.random.default_rng(9)
    shape = (arrays[0].shape[-3], arrays[0].shape[-2], arrays[1].shape[-2])
    if name == "dense":
        options["mask"] = rng.random(shape) < 0.6
    if name in ("bias", "sinks"):
        options[name] = rng.standard_normal(shape if name == "bias" else shape[0]).astype(dtype)
    wide = {key: x.astype(np.float32) if key in ("bias", "sinks") else x for key, x in options.items()}
    return options, wide


def assert_rounded_once(got, wanted, name="result"):
    assert_same_bits(got.view(np.uint16), wanted.astype(got.dtype).view(np.uint16), name)


@pytest.mark.parametrize("storage", STORAGES, ids=str)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", OPTIONS)
def test_a_result_is_that_of_upcast_arrays_rounded_once(engine, shape, storage, name):
    arrays = stored(random_arrays(**SHAPES[shape]), [storage] * 3)
    options, wide = options_of(name, arrays, storage)
    out, lse, weights = engine.everything(*arrays, **options)
    assert out.dtype == weights.dtype == storage
    assert lse.dtype == np.float32
    # Not rounded, for partial results that are to be merged.
    unrounded = np.empty(out.shape, np.float32)
    engine.attention(*arrays, **options, out=unrounded)
    expected = engine.everything(*upcast(arrays), **wide)
    assert_same_bits(unrounded, expected[0])
    assert_same_bits(lse, expected[1])
    assert_rounded_once(out, expected[0])
    assert_rounded_once(weights, expected[2])
    if isinstance(mask := wide.get("mask"), masks.Mask):
        wide["mask"] = mask.materialize(*expected[2].shape[-3:])
    assert_attention((unrounded, lse), *upcast(arrays), **wide)


@pytest.mark.parametrize(
    "storages", [(2, 0, 0), (2, 1, 1), (0, 2, 0), (1, 1, 2), (3, 0, 0), (1, 3, 3)], ids=str
)
@pytest.mark.parametrize("shape", SHAPES)
def test_beside_wider_arrays(engine, shape, storages):
    """The decoder's case: keys and values in 16 bits, the query in 32."""
    dtypes = [np.dtype(np.float16), BFLOAT16, np.dtype(np.float32), np.dtype(np.float64)]
    arrays = stored(random_arrays(**SHAPES[shape]), [dtypes[n] for n in storages])
    wide = dtypes[max(storages)]
    expected = engine.everything(*upcast(arrays, wide), causal="bottom_right")
    for got, wanted in zip(engine.everything(*arrays, causal="bottom_right"), expected, strict=True):
        assert_same_bits(got, wanted)


@pytest.mark.parametrize("storage", STORAGES, ids=str)
@pytest.mark.parametrize("layout", MEMORY_LAYOUTS)
@without(lambda layout, storage: layout == "byte_swapped" and storage == BFLOAT16)  # it has one byte order
def test_any_memory_layout(engine, storage, layout):
    arrays = stored(random_arrays(**SHAPES["whole_spans"]), [storage] * 3)
    moved = [MEMORY_LAYOUTS[layout](array) for array in arrays]
    expected = engine.attention(*arrays).view(np.uint16)
    assert_same_bits(engine.attention(*moved).view(np.uint16), expected)
    room = np.zeros((*arrays[0].shape[:-1], 2 * arrays[2].shape[-1]), storage)[..., ::-2]
    engine.attention(*arrays, out=room)
    assert_same_bits(np.ascontiguousarray(room).view(np.uint16), expected)


def convert(convert_one, source, result):
    """`convert_one(source, n, result)` for each element n, on the device; both arrays have one axis."""
    of_source, of_result = memory(str(source.dtype)), memory(str(result.dtype))

    @cuda.jit
    def kernel(source_view, result_view, count):
        read, written = of_source(source_view), of_result(result_view)
        for n in range(cuda.threadIdx.x, count, cuda.blockDim.x):
            convert_one(read, U(n), written)

    with caller_stream(source) as stream:
        read, written = stream.upload(source, source.dtype), stream.room(result.shape, result.dtype)
        launch_of(kernel, 1, 4, read.words(), written.words(), len(source))(stream)
        stream.download(written, result)
    return result


@pytest.mark.parametrize("storage", STORAGES, ids=str)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_every_pattern_is_read(storage, dtype):
    """Subnormals, infinities and NaN included."""
    read = read_as(np.dtype(dtype).name, storage.name)

    @cuda.jit(device=True)
    def read_one(source, n, result):
        result[n] = read(source, n)

    patterns = np.arange(2**16, dtype=np.uint16).view(storage)
    with np.errstate(invalid="ignore"):  # of signalling NaN
        expected = patterns.astype(dtype)
    np.testing.assert_array_equal(convert(read_one, patterns, np.empty(2**16, dtype)), expected)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of overflow, and of signalling NaN
@pytest.mark.parametrize("storage", STORAGES, ids=str)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_numbers_are_written_to_nearest_even(storage, dtype):
    """Those of 16 bits, halfway between two, and just beside; what is too large, infinite and NaN."""
    write = write_as(storage.name)

    @cuda.jit(device=True)
    def write_one(source, n, result):
        write(result, n, source[n])

    exact = np.arange(0, 2**16, 5, dtype=np.uint16).view(storage).astype(np.float32)
    halfway = exact + (np.nextafter(exact.astype(storage), storage.type(np.inf)) - exact.astype(storage)) / 2
    near = [np.nextafter(halfway, np.float32(side)) for side in (-np.inf, np.inf)]
    quiet = np.uint32([0x7F800001, 0xFF800001, 0x7FFFFFFF, 0xFFFFFFFF]).view(np.float32)
    limits = np.float32([np.inf, -np.inf, 3.4028235e38, -3.4028235e38, 65519.996, 65520, 2.0**-25, 1e-45])
    source = np.concatenate([exact, halfway, *near, quiet, limits]).astype(np.float32).astype(dtype)
    got = convert(write_one, source, np.empty(len(source), storage))
    expected = source.astype(storage)
    np.testing.assert_array_equal(np.isnan(got), np.isnan(source))
    a_number = ~np.isnan(source)
    assert_same_bits(got[a_number].view(np.uint16), expected[a_number].view(np.uint16))


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # the simulator computes with NumPy
@pytest.mark.parametrize("storage", STORAGES, ids=str)
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_masked_keys_are_never_seen(engine, storage, bad):
    arrays = stored(random_arrays(heads=1, len_q=5, len_k=9, head_dim=4), [storage] * 3)
    mask = np.arange(9) % 3 > 0
    clean = engine.everything(*arrays, mask=mask)
    arrays[1][:, ~mask], arrays[2][:, ~mask] = bad, bad
    for got, wanted in zip(engine.everything(*arrays, mask=mask), clean, strict=True):
        assert_same_bits(got.astype(np.float32), wanted.astype(np.float32))


@pytest.mark.parametrize("storage", STORAGES, ids=str)
def test_functions_see_float32(storage):
    def mod(score, b, h, q_idx, kv_idx):
        return score * 3.0 + 0.1 * (q_idx - kv_idx)

    arrays = stored(random_arrays(heads=2, len_q=3, len_k=7, head_dim=4), [storage] * 3)
    got = fastattn.flex_attention(*arrays, score_mod=mod, backend="cuda")
    assert_rounded_once(got, fastattn.flex_attention(*upcast(arrays), score_mod=mod, backend="cuda"))


def put(library, array):
    """The array in a library; of bfloat16 by its bits, as PyTorch takes none of NumPy's."""
    if array.dtype != BFLOAT16 or library.name in ("numba", "fake", "lone", "dlpack"):
        return library.put(array)
    if library.name != "torch":
        pytest.skip("it has no bfloat16")
    import torch

    return library.put(array.view(np.int16)).view(torch.bfloat16)


def get(library, array):
    if library.name == "torch" and str(array.dtype) == "torch.bfloat16":
        import torch

        return library.get(array.view(torch.int16)).view(BFLOAT16)
    return library.get(array)


@pytest.mark.parametrize("storage", STORAGES, ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_arrays_on_a_gpu_as_from_the_host(engine, library, shape, storage):
    """Results are arrays of their library, in 16 bits but for the lse."""
    arrays = stored(random_arrays(**SHAPES[shape]), [storage] * 3)
    options = {name: options_of(name, arrays, storage)[0][name] for name in ("bias", "sinks")}
    expected = engine.everything(*arrays, **options)
    on_gpu = {name: put(library, x) for name, x in options.items()}
    results = fastattn.attention(*(put(library, x) for x in arrays), **on_gpu, **EVERYTHING)
    for name, result, host in zip(("out", "lse", "weights"), results, expected, strict=True):
        assert isinstance(result, library.result)
        assert_same_bits(get(library, result), host, name)


@pytest.mark.parametrize("storage", STORAGES, ids=str)
def test_views_on_a_gpu_and_out(engine, library, storage):
    """Rows that do not begin at a whole span, and results in either dtype where they are."""
    arrays = stored(random_arrays(heads=2, len_q=6, len_k=7, head_dim=9), [storage] * 3)
    views = [put(library, x)[..., 1:, 1:] for x in arrays]
    expected = engine.everything(*(np.ascontiguousarray(x[..., 1:, 1:]) for x in arrays))[0]
    wide = engine.attention(*(np.ascontiguousarray(x[..., 1:, 1:]) for x in upcast(arrays)))
    assert_same_bits(get(library, fastattn.attention(*views)), expected)
    for dtype, wanted in ((storage, expected), (np.float32, wide)):
        room = put(library, np.full((2, 5, 16), 7, dtype))
        out = room[..., ::2]
        assert fastattn.attention(*views, out=out) is out
        whole = get(library, room)
        assert_same_bits(np.ascontiguousarray(whole[..., ::2]), wanted)
        assert (whole[..., 1::2] == 7).all()


@pytest.mark.parametrize("storage", STORAGES, ids=str)
@pytest.mark.parametrize("count", [1, 3])
def test_merge_attention(library, count, storage):
    rng = np.random.default_rng(0)
    outs = [rng.standard_normal((2, 4, 5)).astype(storage) for _ in range(count)]
    lses = [rng.standard_normal((2, 4)).astype(np.float32) for _ in range(count)]
    merged, lse = fastattn.merge_attention([put(library, x) for x in outs], [put(library, x) for x in lses])
    exact, _ = fastattn.merge_attention(upcast(outs, np.float64), lses)
    assert isinstance(merged, library.result)
    assert get(library, lse).dtype == np.float32
    assert_rounded_once(get(library, merged), exact)


def test_what_is_not_read(library):
    x = np.ones((1, 4, 4), np.float32)
    half, brain = put(library, x.astype(np.float16)), put(library, x.astype(BFLOAT16))
    with pytest.raises(TypeError, match=r"two 16-bit types do not promote: .*float16.*; cast one"):
        fastattn.attention(half, brain, brain)
    with pytest.raises(TypeError, match="out must have the result's dtype float16, or float32, got float64"):
        fastattn.attention(half, half, half, out=put(library, np.empty((1, 4, 4))))
    with pytest.raises(TypeError, match=r"mask must be .* a bool or integer array, got dtype bfloat16"):
        fastattn.attention(half, half, half, mask=brain)
    with pytest.raises(fastattn.BackendError, match=r"cuda: .* plain arrays of floats, and key is int8"):
        fastattn.attention(x, fastattn.Quantized.encode(x), x, backend="cuda")
    paged = fastattn.Paged(x[:, None].astype(np.float16), np.zeros((1, 1), np.int64))
    with pytest.raises(fastattn.BackendError, match=r"cuda: .* and key is in pages, value is in pages"):
        fastattn.attention(x[None], paged, paged, backend="cuda")
    with pytest.raises(TypeError, match="query is on cuda:0, and gradients are computed on the host"):
        fastattn.attention_backward(half, half, half, half, half, put(library, x[..., 0]))
