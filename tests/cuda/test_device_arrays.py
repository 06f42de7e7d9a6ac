"""Arrays on a GPU: taken where they are, and answered with arrays of their library."""

from __future__ import annotations

import numpy as np
import pytest

import fastattn
from fastattn.backends.cuda import engine as cuda_engine
from fastattn.masks import Causal, Dense, Window
from tests.cases import FLOATS, random_arrays, solve
from tests.cuda.libraries import LIBRARIES, SIMULATED
from tests.cuda.test_contract import CASES
from tests.tolerances import assert_same_bits

EVERYTHING = {"return_lse": True, "return_weights": True}


def put_options(library, options):
    return {name: library.put(x) if isinstance(x, np.ndarray) else x for name, x in options.items()}


@pytest.mark.parametrize("library", list(LIBRARIES)[:1] if SIMULATED else LIBRARIES, indirect=True)
@pytest.mark.parametrize("case", CASES[::2], ids=lambda case: case.name)
def test_cases_as_from_the_host(engine, library, case):
    """The same bits as those of arrays that are moved there and back, which are tested elsewhere."""
    if case.bias_dtype == ">f8":
        pytest.skip("no library has such arrays on a GPU")
    solved = solve(case.as_dtype("float32"))
    options = dict(solved.keywords)
    lengths = options.pop("key_lengths", None)
    on_gpu = put_options(library, options)
    if lengths is not None:
        options["key_lengths"] = on_gpu["key_lengths"] = lengths
    expected = engine.everything(*solved.arrays, **options)
    results = fastattn.attention(*map(library.put, solved.arrays), **on_gpu, **EVERYTHING)
    for name, result, host in zip(("out", "lse", "weights"), results, expected, strict=True):
        assert isinstance(result, library.result)
        assert_same_bits(library.get(result), host, name)


VIEWS = {
    "steps": lambda x: x[..., ::2, 1::2],
    "every other": lambda x: x[..., ::2],
    "offset": lambda x: x[..., 3:, 1:],
    "backwards": lambda x: x[..., ::-1, ::-1],
}


@pytest.mark.parametrize("view", VIEWS)
def test_strides(engine, library, view):
    if view == "backwards" and library.name == "torch":
        pytest.skip("it has no negative strides")
    arrays = random_arrays(heads=2, len_q=10, len_k=12, head_dim=8)
    views = [VIEWS[view](library.put(x)) for x in arrays]
    expected = engine.attention(*(np.ascontiguousarray(VIEWS[view](x)) for x in arrays), causal="top_left")
    assert_same_bits(library.get(fastattn.attention(*views, causal="top_left")), expected)


@pytest.mark.parametrize("library", list(LIBRARIES)[:1] if SIMULATED else LIBRARIES, indirect=True)
def test_calls_that_differ_in_one_thing(library):
    """A plan serves no call but those that it fits: in turns, all give what each gives without one."""
    rng = np.random.default_rng(3)
    query, key, value = random_arrays(lead=(1,), heads=2, len_q=3, len_k=9, head_dim=4)
    bias, sinks, mask = rng.standard_normal((3, 9)), rng.standard_normal(2), rng.random((3, 9)) < 0.5
    bias, sinks, mask = map(library.put, (bias.astype(np.float32), sinks.astype(np.float32), mask))
    on_gpu = [library.put(x) for x in (query, key, value)]

    def call(change=lambda x: x, arrays=on_gpu, **options):
        arrays = [change(x) for x in arrays]
        return lambda: fastattn.attention(*arrays, **options)

    calls = [
        call(), call(arrays=(query, key, value), backend="cuda"), call(scale=0.3), call(scale=2.0),
        call(softcap=3.0), call(softcap=4.0), call(causal="top_left"), call(causal="bottom_right"),
        call(window=(2, 0)), call(window=(1, 0)), call(window=(2, 1)), call(key_lengths=[7]),
        call(key_lengths=[8]), call(bias=bias), call(mask=mask), call(sinks=sinks), call(return_lse=True),
        call(return_weights=True), call(**EVERYTHING), call(lambda x: x[..., ::2]),
        call(lambda x: x[..., :2]), call(lambda x: x[..., 1:3]), call(lambda x: x[:, :1]),
        call(lambda x: x[:, 1:]), call(lambda x: x[0]),
        call(arrays=[on_gpu[0], *(x[:, :, :8] for x in on_gpu[1:])]),
        call(mask=Window(2, 0) | Causal("top_left")),
        call(mask=Window(1, 0) | Causal("top_left")),
        call(arrays=[library.put(x.astype(np.float64)) for x in (query, key, value)]),
        call(arrays=[library.put(x) for x in (query, key[:, :1].copy(), value[:, :1].copy())]),
    ]  # fmt: skip

    def results(call):
        found = call()
        arrays = found if isinstance(found, tuple) else (found,)
        return [x if isinstance(x, np.ndarray) else library.get(x) for x in arrays]

    plans, expected = {}, []
    for call in calls:
        cuda_engine._plans.clear()
        expected.append(results(call))
        plans |= cuda_engine._plans
    cuda_engine._plans |= plans
    for call, those in zip(calls, expected, strict=True):
        for got, one in zip(results(call), those, strict=True):
            assert_same_bits(got, one)
    assert cuda_engine._plans.keys() == plans.keys() and len(plans) > 20


def test_broadcast_and_layouts(engine, library):
    query, key, value = random_arrays(lead=(2,), heads=2, len_q=5, len_k=4, head_dim=6)
    one = fastattn.attention(library.put(query), library.put(key[0]), library.put(value[0]))
    assert_same_bits(library.get(one), engine.attention(query, key[0], value[0]))
    swapped = [library.put(np.ascontiguousarray(x.swapaxes(1, 2))) for x in (query, key, value)]
    out, lse = fastattn.attention(*swapped, layout="bshd", return_lse=True)
    expected = engine.attention(query, key, value, return_lse=True)
    assert_same_bits(library.get(out).swapaxes(1, 2).copy(), expected[0])
    assert_same_bits(library.get(lse), expected[1])
    matrices = [x[0, 0] for x in (query, key, value)]
    results = fastattn.attention(*map(library.put, matrices), **EVERYTHING)
    for result, host in zip(results, engine.everything(*matrices), strict=True):
        assert_same_bits(library.get(result), host)


@pytest.mark.parametrize(
    "dtypes", [("f4", "f8", "f4"), ("i8", "f4", "?"), ("f4", "f4", "i2"), ("i4",) * 3], ids=str
)
def test_dtypes(engine, library, dtypes):
    """Elements are converted as they are read."""
    arrays = [
        (3 * x).astype(dtype)
        for x, dtype in zip(random_arrays(heads=1, len_q=3, len_k=5, head_dim=4), dtypes, strict=True)
    ]
    out = library.get(fastattn.attention(*map(library.put, arrays)))
    assert_same_bits(out, engine.attention(*arrays))


@pytest.mark.parametrize("bias_dtype", ["f2", "f4", "f8"])
@pytest.mark.parametrize("dtype", FLOATS)
def test_bias_and_sinks_are_read_in_the_dtype(engine, library, dtype, bias_dtype):
    arrays = random_arrays(heads=2, len_q=3, len_k=5, head_dim=4, dtype=dtype)
    rng = np.random.default_rng(0)
    options = {"bias": rng.standard_normal((3, 5)).astype(bias_dtype), "sinks": rng.standard_normal(2)}
    results = fastattn.attention(*map(library.put, arrays), **put_options(library, options), **EVERYTHING)
    for result, host in zip(results, engine.everything(*arrays, **options), strict=True):
        assert_same_bits(library.get(result), host)


@pytest.mark.parametrize("mask_dtype", ["?", "i1", "u2", "i8"])
def test_mask_arrays(engine, library, mask_dtype):
    arrays = random_arrays(heads=2, len_q=5, len_k=9, head_dim=4)
    allowed = np.random.default_rng(0).random((2, 5, 9)) < 0.5
    mask = np.where(allowed, 256 if np.dtype(mask_dtype).itemsize > 1 else 1, 0).astype(mask_dtype)
    expected = engine.attention(*arrays, mask=allowed, causal="bottom_right")
    assert_same_bits(engine.attention(*arrays, mask=mask, causal="bottom_right"), expected)
    on_gpu = [library.put(x) for x in arrays]
    out = fastattn.attention(*on_gpu, mask=library.put(mask), causal="bottom_right")
    assert_same_bits(library.get(out), expected)
    out = fastattn.attention(*on_gpu, mask=Dense(library.put(mask)) & Causal("bottom_right"))
    assert_same_bits(library.get(out), expected)


def test_out_is_written_where_it_is(engine, library):
    arrays = random_arrays(heads=1, len_q=3, len_k=5, head_dim=4)
    expected = engine.attention(*arrays)
    room = library.put(np.full((1, 3, 8), 7, np.float32))
    out = room[..., ::2]
    assert fastattn.attention(*map(library.put, arrays), out=out) is out
    whole = library.get(room)
    assert_same_bits(whole[..., ::2].copy(), expected)
    assert (whole[..., 1::2] == 7).all()


@pytest.mark.parametrize("sizes", [(0, 2, 3, 4), (2, 0, 3, 4), (2, 2, 0, 4), (2, 2, 3, 0)], ids=str)
def test_empty(library, sizes):
    B, H, L, S = sizes
    query, key, value = np.ones((B, H, L, 5)), np.ones((B, H, S, 5)), np.ones((B, H, S, 6))
    out, lse, weights = fastattn.attention(*map(library.put, (query, key, value)), **EVERYTHING)
    assert library.get(out).shape == (B, H, L, 6) and not library.get(out).any()
    assert library.get(lse).shape == (B, H, L) and (library.get(lse) == -np.inf).all()
    assert library.get(weights).shape == (B, H, L, S)
    out = fastattn.attention(library.put(np.ones((3, 2))), library.put(np.ones((4, 2))),
                             library.put(np.ones((4, 0))))  # fmt: skip
    assert library.get(out).shape == (3, 0)


def test_more_than_one_leading_axis(library):
    arrays = random_arrays(lead=(2, 2, 2), heads=1, len_q=2, len_k=3, head_dim=4)
    results = fastattn.attention(*map(library.put, arrays), **EVERYTHING)
    for result, expected in zip(results, fastattn.attention(*arrays, **EVERYTHING), strict=True):
        np.testing.assert_allclose(library.get(result), expected, atol=1e-6)


def test_scaled_dot_product_attention(library):
    query, key, value = random_arrays(lead=(2,), heads=2, len_q=4, len_k=4, head_dim=3)
    mask = np.random.default_rng(0).standard_normal((4, 4)).astype(np.float32)
    expected = fastattn.scaled_dot_product_attention(query, key[:, :1], value, mask, is_causal=True)
    arrays = [library.put(x) for x in (query, key[:, :1], value, mask)]
    out = fastattn.scaled_dot_product_attention(*arrays, is_causal=True)
    assert isinstance(out, library.result)
    np.testing.assert_allclose(library.get(out), expected, atol=1e-6)


def test_varlen_attention(library):
    x = np.random.default_rng(0).standard_normal((7, 2, 4))
    on_gpu = library.put(x)
    results = fastattn.varlen_attention(on_gpu, on_gpu, on_gpu, [0, 3, 7], causal=True, return_lse=True)
    expected = fastattn.varlen_attention(x, x, x, [0, 3, 7], causal=True, return_lse=True)
    for result, host in zip(results, expected, strict=True):
        assert isinstance(result, library.result)
        np.testing.assert_allclose(library.get(result), host, atol=1e-14)


@pytest.mark.parametrize("dtypes", [("f4", "f4"), ("f8", "f8"), ("f4", "f8"), ("i4", "f4")], ids=str)
@pytest.mark.parametrize("lead", [(), (3,), (2, 2), (2, 1, 2, 2)], ids=str)
@pytest.mark.parametrize("count", [1, 2, 4])
def test_merge_attention(library, count, lead, dtypes):
    rng = np.random.default_rng(0)
    outs = [(3 * rng.standard_normal((*lead, 5))).astype(dtypes[0]) for _ in range(count)]
    lses = [rng.standard_normal(lead).astype(dtypes[1]) for _ in range(count)]
    lses[0].reshape(-1)[:1] = -np.inf
    outs[0].reshape(-1)[:1] = 3 if dtypes[0] == "i4" else np.nan  # never read
    results = fastattn.merge_attention([*map(library.put, outs)], [*map(library.put, lses)])
    for result, host in zip(results, fastattn.merge_attention(outs, lses), strict=True):
        array = library.get(result)
        assert isinstance(result, library.result)
        assert array.dtype == host.dtype
        np.testing.assert_allclose(array, host, atol=20 * np.finfo(host.dtype).eps)


def test_what_cannot_be(library):
    arrays = random_arrays(lead=(2,), heads=1, len_q=4, len_k=4, head_dim=4)
    query, key, value = map(library.put, arrays)
    with pytest.raises(
        ValueError, match=r"on one GPU; got query on cuda:0, key on the host, value on cuda:0"
    ):
        fastattn.attention(query, arrays[1], value)
    for option in ("bias", "mask", "sinks", "out"):
        given = {"bias": np.zeros((4, 4)), "mask": np.ones((4, 4), bool), "sinks": np.zeros(1),
                 "out": np.empty_like(arrays[0])}[option]  # fmt: skip
        with pytest.raises(ValueError, match=rf"on one GPU; got query on cuda:0, {option} on the host"):
            fastattn.attention(query, key, value, **{option: given})
        with pytest.raises(ValueError, match=rf"got query on the host, {option} on cuda:0"):
            fastattn.attention(*arrays, **{option: library.put(given)})
    lengths = library.put(np.array([3, 4]))
    with pytest.raises(TypeError, match=r"key_lengths is on cuda:0, and is read on the host"):
        fastattn.attention(query, key, value, key_lengths=lengths)
    with pytest.raises(ValueError, match=r"a mask array on cuda:0 stays there: it combines by &"):
        fastattn.attention(query, key, value, mask=Dense(library.put(np.ones((4, 4), bool))) | Window(1, 1))
    with pytest.raises(ValueError, match=r"out must not share memory with what is read on cuda:0"):
        fastattn.attention(query, key, value, out=query)
    with pytest.raises(TypeError, match=r"out must have the result's dtype float32, got float64"):
        fastattn.attention(query, key, value, out=library.put(np.empty((2, 1, 4, 4))))
    with pytest.raises(
        fastattn.BackendError, match="cython: the arrays are on cuda:0, and it computes on the"
    ):
        fastattn.attention(query, key, value, backend="cython")
    with pytest.raises(ValueError, match=r"got outs\[0\] on cuda:0, lses\[0\] on the host"):
        fastattn.merge_attention([query], [arrays[0][..., 0]])


def test_elements_of_an_unknown_dtype_are_refused(library):
    """By the CUDA array interface they are bytes, as those of bfloat16, but have another name."""
    ones = np.ones((1, 4, 4), np.float32)
    if library.name not in ("fake", "lone"):
        pytest.skip("it has none")
    x, narrow = library.put(ones), library.put(ones.astype(np.float16).view("V2"))
    for name in ("query", "key", "value", "bias", "mask", "sinks", "out"):
        arrays = {"query": x, "key": x, "value": x, name: narrow}
        said = rf"^{name} has elements of \|V2 on cuda:0; those read there are float16, bfloat16, "
        with pytest.raises(TypeError, match=said):
            fastattn.attention(**arrays)
    with pytest.raises(TypeError, match=r"outs\[1\] has elements of \|V2 on cuda:0; "):
        fastattn.merge_attention([x, narrow], [x[..., 0], x[..., 0]])


def test_gradients_are_refused(library):
    shapes = {name: (1, 4, 4) for name in ("query", "key", "value", "grad_out", "out")}
    shapes |= {"lse": (1, 4), "grad_lse": (1, 4), "bias": (4, 4), "sinks": (1,)}
    on_host = {name: np.ones(shape, np.float32) for name, shape in shapes.items()}
    on_host["mask"] = np.ones((4, 4), bool)
    for name, array in on_host.items():
        given = on_host | {name: library.put(array)}
        message = rf"^{name} is on cuda:0, and gradients are computed on the host: copy it there"
        with pytest.raises(TypeError, match=message):
            fastattn.attention_backward(**given)


def test_tensors_that_record_gradients_are_refused(library):
    x = library.put(np.ones((1, 4, 4), np.float32))
    try:
        x.requires_grad = True
    except AttributeError:
        pytest.skip("it has no gradients")
    with pytest.raises(TypeError, match=r"^query requires grad, .*: pass query\.detach\(\)"):
        fastattn.attention(x, x, x)
