"""Validation of arrays on a GPU, which needs no GPU: only their shapes, strides and dtypes matter."""

from __future__ import annotations

import sys
from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import fastattn
from fastattn._machine.device import DeviceArray, as_device_array, broadcast_to, place
from tests.fake_gpu import FakeArray


def on_device(array: np.ndarray) -> DeviceArray:
    found = as_device_array(FakeArray(array), "array")
    assert found is not None
    return found


def assert_same_elements(ours: DeviceArray, theirs: np.ndarray) -> None:
    assert (ours.shape, ours.ndim, ours.size) == (theirs.shape, theirs.ndim, theirs.size)
    assert ours.dtype == theirs.dtype
    steps = [step for n, step in zip(theirs.shape, theirs.strides, strict=True) if n > 1]
    assert [step for n, step in zip(ours.shape, ours.strides, strict=True) if n > 1] == steps
    assert ours.memory.address == theirs.ctypes.data


SLICES = st.sampled_from([slice(None), slice(1, None), slice(None, None, 2), slice(None, None, -1)])


@given(st.tuples(SLICES, SLICES, SLICES), st.permutations(range(3)), st.sampled_from(["f4", "f8", "?", "i2"]))
def test_views_are_those_of_numpy(slices, axes, dtype):
    array = np.zeros((2, 3, 4), dtype)[slices].transpose(axes)
    ours = on_device(array)
    assert_same_elements(ours, array)
    assert_same_elements(ours.swapaxes(-3, -2), array.swapaxes(-3, -2))
    assert_same_elements(ours[None], array[None])
    shape = (2, 5, *array.shape)
    assert_same_elements(broadcast_to(ours[None], shape, "array"), np.broadcast_to(array[None], shape))
    assert np.shares_memory(ours.addresses(), array) == bool(array.size)
    assert place(ours) == "cuda:0" and place(array) == "the host"


def test_broadcast_of_an_axis_of_one():
    array = np.zeros((3, 1, 4))
    assert_same_elements(on_device(array).broadcast_to((3, 7, 4)), np.broadcast_to(array, (3, 7, 4)))


def test_what_is_not_on_a_gpu():
    for value in (1.5, [1, 2], None, np.ones(2), np.float32(1), "text", object()):
        assert as_device_array(value, "x") is None
    torch = pytest.importorskip("torch")
    assert as_device_array(torch.ones(2), "x") is None


def bad(array=None, **interface):
    fake = FakeArray(np.zeros((2, 3, 4), np.float32) if array is None else array)

    class Bad:
        __cuda_array_interface__ = fake.__cuda_array_interface__ | interface
        shape = fake.shape
        keep = fake

    return Bad()


@pytest.mark.parametrize(
    ("array", "error", "message"),
    [
        (bad(mask=object()), TypeError, "query does not convert to an array: it has a mask"),
        (bad(typestr="what"), TypeError, "query does not convert to an array"),
        (
            bad(typestr=">f4"),
            TypeError,
            "query has dtype >f4: a GPU does not read numbers with swapped bytes",
        ),
        (bad(typestr="<c8", strides=None), TypeError, "query has dtype complex64; supported are"),
        (
            bad(data=(6, False)),
            ValueError,
            "query is not aligned: a GPU reads float32 at multiples of 4 bytes",
        ),
        (bad(strides=(50, 16, 4)), ValueError, "query is not aligned"),
    ],
)
def test_what_cannot_be_read(array, error, message):
    with pytest.raises(error, match=f"^{message}.*; query \\(2, 3, 4\\), key"):
        fastattn.attention(array, array, array)


def test_different_gpus():
    arrays = [FakeArray(np.zeros((1, 2, 3)), device) for device in (0, 0, 1)]
    with pytest.raises(ValueError, match="got query on cuda:0, key on cuda:0, value on cuda:1"):
        fastattn.attention(*arrays)


def test_out_is_checked():
    arrays = [FakeArray(np.zeros((1, 2, 3), np.float32)) for _ in range(3)]
    read_only = bad(np.zeros((1, 2, 3), np.float32), data=(0x1000, True))
    spread = bad(np.zeros((1, 2, 3), np.float32), strides=(24, 0, 4))
    for out, message in (
        (read_only, "out must be writeable"),
        (spread, "out has elements that share memory"),
        (FakeArray(np.zeros((1, 2, 4), np.float32)), "out must have shape"),
    ):
        with pytest.raises(ValueError, match=message):
            fastattn.attention(*arrays, out=out)


@pytest.mark.parametrize("name", ["key_lengths", "Segments", "cu_seqlens_q"])
def test_lengths_and_ids_are_read_on_the_host(name):
    x, numbers = FakeArray(np.zeros((2, 1, 3))), FakeArray(np.array([0, 2]))
    with pytest.raises(
        TypeError, match=rf"{name}.* is on cuda:0, and is read on the host: pass a NumPy array"
    ):
        if name == "key_lengths":
            fastattn.attention(x, x, x, key_lengths=numbers)
        elif name == "Segments":
            fastattn.masks.Segments(numbers)
        else:
            fastattn.varlen_attention(x, x, x, numbers)


def test_scales_of_heads_are_for_queries_on_the_host():
    x = FakeArray(np.zeros((2, 1, 3)))
    with pytest.raises(TypeError, match="scale must be one number where query is on cuda:0: multiply query"):
        fastattn.attention(x, x, x, scale=[1.0, 2.0])


def test_a_mask_on_a_gpu_is_not_materialized():
    mask = fastattn.masks.Dense(FakeArray(np.ones((2, 3), bool)))
    assert repr(mask) == "Dense(array=<bool (2, 3) on cuda:0>)"
    with pytest.raises(TypeError, match="the mask's array is on cuda:0, and is read on the host"):
        mask.materialize(1, 2, 3)


@pytest.mark.parametrize("combine", ["|", "~"])
def test_a_mask_on_a_gpu_does_not_become_tiles(combine):
    x, mask = FakeArray(np.zeros((1, 2, 3))), fastattn.masks.Dense(FakeArray(np.ones((2, 2), bool)))
    mask = ~mask if combine == "~" else mask | fastattn.masks.Causal()
    with pytest.raises(ValueError) as caught:
        fastattn.attention(x, x, x, mask=mask)
    assert str(caught.value).startswith(
        "a mask array on cuda:0 stays there: it combines by & with masks that are not arrays, not by | or ~; "
    )


def test_without_a_gpu_the_reason_is_said():
    if not fastattn.backends.registry.load("cuda").unavailable_reasons():
        pytest.skip("a GPU is here")
    x = FakeArray(np.zeros((1, 2, 3)))
    with pytest.raises(fastattn.BackendError, match="no backend can take this problem:\n  cuda: ") as error:
        fastattn.attention(x, x, x)
    assert "numba-cuda" in str(error.value) or "no NVIDIA GPU" in str(error.value)
    with pytest.raises(fastattn.BackendError, match=r"^the arrays are on cuda:0, and "):
        fastattn.merge_attention([x], [FakeArray(np.zeros((1, 2)))])


def test_reasons_say_what_is_missing(monkeypatch):
    cuda = pytest.importorskip("numba.cuda")
    from fastattn.backends.cuda import backend as cuda_backend

    missing = cuda_backend._missing.__wrapped__
    monkeypatch.setattr(cuda_backend, "find_spec", lambda name: None)
    assert missing() == ["numba-cuda is not installed: pip install 'fastattn[cuda]'"]
    monkeypatch.setattr(cuda_backend, "find_spec", lambda name: object())
    monkeypatch.setattr(cuda, "is_available", lambda: False)
    monkeypatch.setattr(cuda, "cuda_error", lambda: "no driver\n at all", raising=False)
    assert missing() == ["no NVIDIA GPU can be used: no driver at all"]
    monkeypatch.setattr(cuda, "is_available", lambda: True)
    monkeypatch.setattr(cuda_backend, "_loads", lambda library: library != "nvvm")
    assert missing() == [
        "NVIDIA's compiler is not here (nvvm): "
        "pip install 'fastattn[cuda]', or 'numba-cuda[cu12]' for older drivers"
    ]
    monkeypatch.setattr(cuda_backend, "_loads", lambda library: library != "nvJitLink")
    assert "(nvJitLink)" in missing()[0]
    monkeypatch.setattr(cuda_backend, "_loads", lambda library: True)
    device = SimpleNamespace(compute_capability=(9, 0))
    monkeypatch.setattr(cuda, "get_current_device", lambda: device, raising=False)
    monkeypatch.setattr(cuda_backend, "_unlinkable", lambda capability: [f"not for {capability}"])
    assert missing() == ["not for (9, 0)"]


@pytest.mark.parametrize(
    ("linker", "line"),
    [
        ((13, 5), None),
        ((13, 0), "pip install 'cuda-toolkit[nvjitlink,nvrtc,nvvm]==13.0.*'"),
        ((12, 9), "pip install 'fastattn[cuda]'"),
    ],
)
def test_a_linker_older_than_the_compiler(monkeypatch, linker, line):
    """Stand-ins for NVVM 13.5 and some nvJitLink, beside any Numba."""
    cuda = pytest.importorskip("numba.cuda")
    from fastattn.backends.cuda import backend as cuda_backend
    from fastattn.backends.cuda.backend import _unlinkable

    class Linker:
        def __init__(self, code, options):
            assert code == b".version 9.5\n.target sm_90" and options == {"arch": "sm_90"}

        def link(self, kind):
            assert kind == "cubin"
            if linker < (13, 5):
                raise RuntimeError("Unsupported .version 9.5;\n too old\0")

    core = SimpleNamespace(
        Linker=Linker, LinkerOptions=dict, ObjectCode=SimpleNamespace(from_ptx=lambda ptx: ptx)
    )
    monkeypatch.setitem(sys.modules, "cuda.core", core)
    bindings = SimpleNamespace(nvjitlink=SimpleNamespace(version=lambda: linker))
    monkeypatch.setitem(sys.modules, "cuda.bindings", bindings)

    def compile_ptx(function, arguments, cc):
        return ".version 9.5\n.target sm_{}{}".format(*cc), None

    monkeypatch.setattr(cuda, "compile_ptx", compile_ptx, raising=False)
    name = ".".join(map(str, linker))
    why = f"NVVM makes PTX 9.5, which nvJitLink {name} does not link (Unsupported .version 9.5; too old): "
    assert _unlinkable((9, 0)) == ([] if line is None else [why + line])

    def unable(function, arguments, cc):
        raise ValueError("not\nsupported")

    monkeypatch.setattr(cuda, "compile_ptx", unable, raising=False)
    assert _unlinkable((7, 0)) == ["NVVM does not compile for this GPU, sm_70 (not supported)"]

    def too_new(function, arguments, cc):
        return np.no_such_name

    monkeypatch.setattr(cuda, "compile_ptx", too_new, raising=False)
    monkeypatch.setattr(cuda_backend, "version", lambda name: f"of {name}")
    (reason,) = _unlinkable((9, 0))
    assert reason.startswith("numba-cuda of numba-cuda ")
    assert reason.endswith(": pip install 'fastattn[cuda]'")
    assert f" does not fit NumPy {np.__version__} (module 'numpy' has no attribute" in reason


def test_shapes_fit():
    """Static shared memory is 48 KB, and loads of several elements must meet no edge."""
    pytest.importorskip("numba")
    from fastattn.backends.cuda import form

    for problem in product(form.FEW_SHAPES, (*range(1, 11), 33), (64, 128), [False], *[[False, True]] * 2):
        assert_fits(form.choose_shape(*problem), np.dtype(problem[0]).itemsize)
    for value_dim, changes_scores, pairs in product((64, 128), (False, True), ("float16", "bfloat16")):
        shape = form.choose_shape("float32", 33, value_dim, False, True, changes_scores, pairs)
        assert shape.pairs == pairs
        assert_fits(shape, 4)


def test_shapes_that_are_tried_fit(monkeypatch):
    pytest.importorskip("numba")
    pytest.importorskip("torch")
    from benchmarks import gpu_shapes
    from fastattn.backends.cuda import form

    monkeypatch.setitem(form.PAIR_SHAPES, 64, form.PAIR_SHAPES[64])  # as it is again after this
    tried = gpu_shapes.shapes("float16", 64)
    gpu_shapes.use("bfloat16", 64, form.PAIR_SHAPES[64]._replace(threads_q=64))
    assert gpu_shapes.shapes("float16", 64) == tried
    for dtype, columns in gpu_shapes.CANDIDATES:
        for shape in gpu_shapes.shapes(dtype, columns).values():
            assert_fits(shape._replace(pairs="" if dtype == "float32" else dtype), 4)
            assert shape.tile_columns == columns


def assert_fits(shape, itemsize):
    from fastattn.backends.cuda import form
    from fastattn.backends.cuda.tensor import COLUMNS, LANES, STEP
    from fastattn.backends.cuda.tiles import layout
    from fastattn.masks.map import TILE_K

    where, words_of_rows = layout(shape), 4 * 4 + 8  # head, query, start and stop, and where its line begins
    assert where.size * itemsize + shape.tile_q * words_of_rows <= 48 * 1024
    assert shape.span * itemsize == 16
    assert shape.rows * shape.keys <= 64  # their bits are one word
    assert shape.keys % shape.vector == shape.columns % shape.column_vector == 0
    assert shape.rows % shape.row_vector == 0
    assert shape.tile_q <= shape.num_threads and TILE_K % shape.tile_k == 0
    assert shape.num_threads * shape.span % shape.depth == 0
    columns = shape.tile_columns // shape.pair
    assert shape.num_threads * shape.span % columns == 0
    assert shape.depth % shape.span == columns % shape.span == 0
    assert shape.tile_k * shape.depth % (shape.span * shape.num_threads) == 0
    assert shape.value_keys * columns % (shape.span * shape.num_threads) == 0
    assert shape.tile_k % shape.value_keys == 0 and form.SPLIT_KEYS % shape.tile_k == 0
    assert where.q_line % shape.row_vector == where.half % shape.row_vector == 0
    assert where.to_values * itemsize % 16 == 0
    if shape.vector * itemsize == 16:
        assert not any(at * itemsize % 16 for at in (where.k_line, where.to_keys, where.half))
    if shape.is_tensor:
        assert shape.threads_k == LANES and shape.threads_q % COLUMNS == 0 and shape.buffers == 2
        assert shape.rows % 2 == 0 and (shape.row_vector, shape.vector) == (1, 2)
        assert shape.threads_q == shape.num_threads * shape.span // shape.depth  # who puts a row has the next
        assert shape.keys % (2 * shape.group) == shape.columns % (2 * shape.group) == 0
        assert shape.depth % (2 * STEP) == shape.value_keys % (STEP * shape.pair) == 0
        # Threads that read values meet in no bank.
        if shape.pairs:
            assert where.v_line % 8 == 4 and where.values_half % 4 == shape.group % 2 == 0
        else:
            assert 2 * where.v_line % 32 == 8
        assert shape.column_vector == (2 if shape.pairs else 2 * shape.group)


@pytest.mark.parametrize("head_rows", [1, 8, 9, 16, 64, 128, 512, 4096])
def test_long_keys_fill_a_gpu(head_rows):
    """One head of 65,536 keys has blocks for half of the 132 multiprocessors of an H100 or more; partial
    results stay small beside the keys and values."""
    pytest.importorskip("numba")
    from fastattn.backends.cuda import form

    len_k, columns = 65536, 128
    shape = form.choose_shape("float32", head_rows, columns, False)
    splits = -(-len_k // form.keys_of_a_split(head_rows, False))
    assert 64 <= -(-head_rows // shape.tile_q) * splits <= 256
    assert splits == 1 or splits * head_rows * columns <= len_k * 2 * columns / 10
    assert -(-head_rows // form.keys_of_a_split(head_rows, False)) == 1  # as many keys as rows: no splits


@pytest.mark.parametrize("interface", [3, "shape", (1, 2), object()], ids=["int", "str", "tuple", "object"])
@pytest.mark.parametrize("argument", ["query", "mask", "bias", "key_lengths", "sinks"])
def test_an_interface_that_is_no_dict(interface, argument):
    """As of a mock object; its entries were read."""

    class Mock:
        __cuda_array_interface__ = interface

    x = np.ones((1, 2, 3, 4), np.float32)
    arguments = {"query": x, "key": x, "value": x} | {argument: Mock()}
    with pytest.raises(
        TypeError, match=f"^{argument} does not convert to an array: its __cuda_array_interface__"
    ):
        fastattn.attention(**arguments)
