"""`varlen_attention_backward`: the gradients of packed documents are those of each document by itself."""

from __future__ import annotations

import re
import sys

import ml_dtypes
import numpy as np
import pytest

import fastattn
from fastattn import masks
from tests.cases import FLOATS
from tests.conftest import FLOAT32_FIRST, computes_gradients
from tests.naive import allowed_keys
from tests.process import python
from tests.test_memory import SCRIPT
from tests.test_varlen import ALIGNED, LENGTHS_K, LENGTHS_Q, documents, packed, segments_of
from tests.tolerances import assert_all_same, assert_gradients, assert_same_bits

NAMES = ("query", "key", "value")
ALL = (*NAMES, "bias", "sinks")
#: Of several query blocks and key tiles: most tiles have several documents, and some documents several tiles.
LONG_Q, LONG_K = (70, 1, 0, 130, 33, 4), (64, 3, 2, 200, 0, 31)


def wrt_of(options):
    return tuple(name for name in ALL if name in NAMES or name in options)


def forward(engine, arrays, **options):
    return fastattn.varlen_attention(*arrays, return_lse=True, backend=engine.backend, **options)


def arriving(out, lse):
    """Gradients of both outputs."""
    rng = np.random.default_rng(6)
    return rng.standard_normal(out.shape).astype(lse.dtype), rng.standard_normal(lse.shape).astype(lse.dtype)


def backward(engine, arrays, *, results=None, wrt=None, **options):
    """All gradients that there are, from random ones of both outputs."""
    results = forward(engine, arrays, **options) if results is None else results
    grad_out, grad_lse = arriving(*results)
    return fastattn.varlen_attention_backward(
        grad_out, *arrays[:3], *results, *arrays[3:], grad_lse=grad_lse, backend=engine.backend,
        wrt=wrt_of(options) if wrt is None else wrt, **options,
    )  # fmt: skip


def allowed_of(arrays, *, mask=None, causal=False, window=None, **_):
    """Bool ``(H, T, T_k)``: the rule of the documents, and in each what `attention` would allow."""
    query, key, _, cu_q, cu_k = arrays
    scores = (query.shape[1], len(query), len(key))
    allowed = np.zeros(scores, bool)
    for d in range(len(cu_q) - 1):
        rows, keys = slice(cu_q[d], cu_q[d + 1]), slice(cu_k[d], cu_k[d + 1])
        size = scores[0], cu_q[d + 1] - cu_q[d], cu_k[d + 1] - cu_k[d]
        if not size[1] * size[2]:
            continue
        own = mask
        if isinstance(mask, masks.Mask):
            own = mask.materialize(1, *size[1:])
        elif mask is not None:
            own = np.broadcast_to(mask, scores)[:, rows, keys]
        allowed[:, rows, keys] = allowed_keys((), *size, mask=own, causal=causal, window=window)
    return allowed


def check(engine, arrays, **options):
    """Against the oracle: one problem, whose mask is an array made document by document."""
    got = backward(engine, arrays, **options)
    grad_out, grad_lse = arriving(*forward(engine, arrays, **options))
    theirs = {name: x for name, x in options.items() if name not in ("causal", "window")}
    theirs |= {"mask": allowed_of(arrays, **options), "layout": "bshd", "grad_lse": grad_lse}
    assert_gradients(got, grad_out, *arrays[:3], wrt=wrt_of(options), **theirs)


# ---------------------------------------------------------------- against the oracle

OPTIONS = {
    "none": {},
    "top_left": {"causal": "top_left"},
    "bottom_right": {"causal": "bottom_right"},
    "window": {"window": (4, 1)},
    "causal_window": {"window": (3, None), "causal": "bottom_right"},
    "scale": {"scale": -0.3},
    "softcap": {"softcap": 2.0, "causal": "bottom_right"},
    "sinks": {"sinks": np.array([0.5, -1.0, 3.0, 0.0])},
    "dropout": {"dropout": 0.3, "seed": 5, "causal": "top_left"},
    "together": {"dropout": 0.1, "seed": 2**70, "softcap": 3.0, "window": (9, 4), "sinks": np.ones(4)},
}


def as_dtype(options, dtype):
    return {name: x.astype(dtype) if name in ("sinks", "bias") else x for name, x in options.items()}


@computes_gradients
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("lengths", [(LENGTHS_Q, LENGTHS_K), (LONG_Q, LONG_K)], ids=["short", "long"])
@pytest.mark.parametrize("name", OPTIONS)
def test_options(engine, name, lengths, dtype):
    check(engine, packed(*lengths, dtype=dtype), **as_dtype(OPTIONS[name], dtype))


@computes_gradients
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", [(30,), (63, 1), (63, 30), (4, 1, 30), (4, 63, 30)], ids=str)
@pytest.mark.parametrize("causal", [False, "bottom_right"])
def test_a_mask_or_bias_is_that_of_all_scores(engine, shape, causal, dtype):
    """The gradient of a bias is summed over the documents that share it: all, for a bias of keys."""
    arrays = packed(dtype=dtype)
    rng = np.random.default_rng(4)
    allowed, bias = rng.random(shape) < 0.7, rng.standard_normal(shape).astype(dtype)
    hiding = np.where(rng.random(shape) < 0.2, -np.inf, bias).astype(dtype)
    for given in ({"mask": allowed}, {"bias": bias}, {"mask": allowed.astype(np.int32), "bias": hiding}):
        check(engine, arrays, causal=causal, **given)


@computes_gradients
@pytest.mark.parametrize("mask", ALIGNED, ids=str)
def test_an_object_aligns_each_document(engine, mask):
    check(engine, packed(LONG_Q, LONG_K, heads=2, kv_heads=1), mask=mask)


@computes_gradients
def test_numbers_of_keys_are_those_of_all(engine):
    arrays = packed(LONG_Q, LONG_K, heads=2, kv_heads=1)
    first = arrays[4][:-1][np.diff(arrays[4]) > 0]  # of each document
    got = backward(engine, arrays, mask=masks.Window(1, 1) | masks.GlobalTokens(first))
    wanted = allowed_of(arrays, mask=masks.Window(1, 1) | masks.GlobalTokens([0]))
    grad_out, grad_lse = arriving(*forward(engine, arrays, mask=wanted))
    theirs = {"mask": wanted, "layout": "bshd", "grad_lse": grad_lse}
    assert_gradients(got, grad_out, *arrays[:3], wrt=NAMES, **theirs)


@computes_gradients
@pytest.mark.parametrize("dtype", FLOAT32_FIRST)
@pytest.mark.parametrize("heads", [(1, 1), (3, 3), (6, 2), (4, 1)], ids=str)
@pytest.mark.parametrize("dims", [(16, 16), (1, 0), (24, 40)], ids=str)
def test_heads_and_dims(engine, heads, dims, dtype):
    sizes = dict(zip(("heads", "kv_heads", "head_dim", "value_dim"), (*heads, *dims), strict=True))
    check(engine, packed(LONG_Q, LONG_K, **sizes, dtype=dtype), causal="bottom_right")


# ---------------------------------------------------------------- against the other functions


@computes_gradients
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", ["none", "bottom_right", "causal_window", "softcap"])
def test_each_document_by_itself(engine, name, dtype):
    """To rounding: where a document begins within a block of queries or a tile of keys decides the order of
    the sums."""
    arrays, options = packed(LONG_Q, LONG_K, dtype=dtype), OPTIONS[name]
    out, lse = forward(engine, arrays, **options)
    grad_out, grad_lse = arriving(out, lse)
    got = backward(engine, arrays, results=(out, lse), **options)
    for (rows, keys), q, k, v in documents(*arrays):
        cuts = got.query[rows], got.key[keys], got.value[keys]
        own = [np.ascontiguousarray(cut.swapaxes(0, 1)) for cut in cuts]
        theirs = {"grad_lse": grad_lse[:, rows], **options}
        of_document = got._replace(**dict(zip(NAMES, own, strict=True)))
        assert_gradients(of_document, grad_out[rows].swapaxes(0, 1), q, k, v, wrt=NAMES, **theirs)


@computes_gradients
@pytest.mark.parametrize("name", OPTIONS)
def test_one_document_is_a_call_of_attention_backward(engine, name):
    arrays, options = packed((150,), (210,)), as_dtype(OPTIONS[name], "float32")
    results = forward(engine, arrays, **options)
    grad_out, grad_lse = arriving(*results)
    wrt = wrt_of(options)
    got = backward(engine, arrays, results=results, **options)
    extra = {"grad_lse": grad_lse, "layout": "bshd", "wrt": wrt}
    wanted = engine.backward(grad_out, *arrays[:3], *results, **extra, **options)
    for one in wrt:
        assert_same_bits(getattr(got, one), getattr(wanted, one), one)


@computes_gradients
@pytest.mark.parametrize("options", [{}, {"dropout": 0.3, "seed": 5}, {"causal": True}], ids=str)
def test_segments_are_the_same_call(engine, options):
    """Bit for bit: both are one problem with the same keys for each query."""
    arrays = packed(LONG_Q, LONG_Q if options.get("causal") else LONG_K)
    results = forward(engine, arrays, **options)
    grad_out, grad_lse = arriving(*results)
    extra = {"grad_lse": grad_lse, "mask": segments_of(arrays), "layout": "bshd"}
    wanted = engine.backward(grad_out, *arrays[:3], *results, **extra, **options)
    assert_all_same(backward(engine, arrays, results=results, **options)[:3], wanted[:3])


@computes_gradients
@pytest.mark.parametrize("name", OPTIONS)
def test_finite_differences(engine, name):
    """Central differences of fourth order, as in tests/test_backward.py: with a step of 1e-3 their error is
    some 1e-10 of the sum's terms."""
    rng = np.random.default_rng(8)
    *rows, cu_q, cu_k = packed((5, 0, 3, 1, 4), (9, 3, 3, 1, 0), dtype="float64")
    options = {x: y for x, y in OPTIONS[name].items() if x != "sinks"}
    given = dict(zip(NAMES, rows, strict=True)) | {"bias": rng.standard_normal(16)}
    if "sinks" in OPTIONS[name]:
        given["sinks"] = OPTIONS[name]["sinks"]
    options |= {"backend": engine.backend, "cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k}
    out, lse = fastattn.varlen_attention(**given, **options, return_lse=True)
    grad_out, grad_lse = arriving(out, lse)
    read = allowed_of((*rows, cu_q, cu_k), **options).any(axis=-1)
    grad_lse = np.where(read, grad_lse, 0)  # a row without keys contributes nothing, also where it has a sink

    def total(**moved):
        out, lse = fastattn.varlen_attention(**moved, **options, return_lse=True)
        return (grad_out * out).sum() + (grad_lse * np.where(read, lse, 0)).sum()

    extra = {"grad_lse": grad_lse, "wrt": tuple(given)}
    found = fastattn.varlen_attention_backward(
        grad_out, out=out, lse=lse, **given, **options, **extra
    )._asdict()
    size = np.abs(grad_out * out).sum() + np.abs(grad_lse * np.where(read, lse, 0)).sum()
    for argument, array in given.items():
        direction = rng.standard_normal(array.shape)

        def at(step, argument=argument, array=array, direction=direction):
            return total(**given | {argument: array + step * direction})

        h = 1e-3
        wanted = (8 * (at(h) - at(-h)) - (at(2 * h) - at(-2 * h))) / (12 * h)
        terms = found[argument] * direction
        assert abs(terms.sum() - wanted) <= 1e-5 * np.abs(terms).sum() + 1e-9 * (1 + size), argument


# ---------------------------------------------------------------- rules


@computes_gradients
@pytest.mark.parametrize("name", ["none", "bottom_right", "softcap", "together"])
@pytest.mark.parametrize("poison", [(np.nan, np.inf), (1e18, 1e18)], ids=["nonfinite", "large"])
def test_a_document_does_not_see_another(engine, poison, name):
    """Whatever the others hold, also in rows of `grad_out` and `grad_lse`: bit for bit."""
    arrays, options = packed(LONG_Q, LONG_K), as_dtype(OPTIONS[name], "float32")
    out, lse = forward(engine, arrays, **options)
    clean = backward(engine, arrays, results=(out, lse), wrt=NAMES, **options)
    query, key, value, cu_q, cu_k = arrays
    rows, keys = slice(cu_q[3], cu_q[4]), slice(cu_k[3], cu_k[4])
    query, key, value = query.copy(), key.copy(), value.copy()
    query[rows], key[keys], value[keys] = poison[0], poison[0], poison[1]
    spoilt = query, key, value, cu_q, cu_k
    results = forward(engine, spoilt, **options)
    grad_out, grad_lse = arriving(out, lse)
    grad_out[rows], grad_lse[:, rows] = poison
    got = fastattn.varlen_attention_backward(
        grad_out, *spoilt[:3], *results, cu_q, cu_k, grad_lse=grad_lse, backend=engine.backend, **options
    )
    for one, own in (("query", rows), ("key", keys), ("value", keys)):
        others = np.ones(len(getattr(clean, one)), bool)
        others[own] = False
        assert_same_bits(getattr(got, one)[others], getattr(clean, one)[others], one)
        if np.isnan(poison[0]):
            assert np.isnan(getattr(got, one)[own]).any(), one


@computes_gradients
def test_pairs_of_different_documents_have_no_gradient(engine):
    arrays = packed(dtype="float32")
    bias = np.random.default_rng(4).standard_normal((4, 63, 30)).astype(np.float32)
    got = backward(engine, arrays, bias=bias)
    apart = ~allowed_of(arrays)
    np.testing.assert_array_equal(got.bias[apart], 0)
    assert (got.bias[~apart] != 0).any()
    for name, cu, other in (("query", arrays[3], arrays[4]), ("key", arrays[4], arrays[3])):
        alone = np.repeat(np.diff(other) == 0, np.diff(cu))  # of documents without the other
        assert alone.any()
        np.testing.assert_array_equal(getattr(got, name)[alone], 0)
        assert getattr(got, name)[~alone].any()


@computes_gradients
@pytest.mark.parametrize("name", ["none", "together", "bias", "shared_bias", "mask"])
def test_same_bits_on_any_number_of_threads(engine, name):
    arrays = packed((150, 0, 200, 90), (130, 4, 200, 99))
    rng = np.random.default_rng(5)
    options = {
        "bias": {"bias": rng.standard_normal((4, 440, 433)).astype(np.float32)},
        "shared_bias": {"bias": rng.standard_normal((440, 433)).astype(np.float32)},
        "mask": {"mask": masks.Window(50, 50) | masks.GlobalTokens([0, 134]), "causal": "bottom_right"},
    }.get(name) or as_dtype(OPTIONS[name], "float32")
    one, *others = (backward(engine, arrays, num_threads=n, **options) for n in (1, 2, 3))
    for other in others:
        for x, y in zip(one, other, strict=True):
            assert (x is None and y is None) or assert_same_bits(x, y) is None


@computes_gradients
def test_same_bits_of_any_strides(engine):
    arrays = packed(LONG_Q, LONG_K)
    results = forward(engine, arrays)
    wanted = backward(engine, arrays, results=results)
    apart = [np.asfortranarray(x) for x in arrays[:3]]
    got = backward(engine, (*apart, *arrays[3:]), results=[np.asfortranarray(x) for x in results])
    assert_all_same(got[:3], wanted[:3])
    assert all(x.flags.c_contiguous for x in got[:3])


@computes_gradients
@pytest.mark.parametrize("storage", [np.float16, ml_dtypes.bfloat16], ids=["float16", "bfloat16"])
def test_gradients_of_16_bits_are_those_of_upcast_arrays_rounded_once(engine, storage):
    arrays = packed(LONG_Q, LONG_K)
    sinks = np.array([0.5, -1.0, 3.0, 0.0], storage)
    small = (*(x.astype(storage) for x in arrays[:3]), *arrays[3:])
    big = (*(x.astype(np.float32) for x in small[:3]), *arrays[3:])
    results = forward(engine, small, sinks=sinks)
    exact = backward(engine, big, results=[x.astype(np.float32) for x in results], sinks=sinks)
    got = backward(engine, small, results=results, sinks=sinks)
    for name in (*NAMES, "sinks"):
        mine, theirs = getattr(got, name), getattr(exact, name).astype(np.float32)
        assert mine.dtype == storage, name
        # A unit of the stored type, and sums of float32 in another order.
        allowed = float(ml_dtypes.finfo(storage).eps) * np.abs(theirs) + 2.0**-17 * np.abs(theirs).max()
        assert (np.abs(mine.astype(np.float32) - theirs) <= allowed).all(), name


@computes_gradients
@pytest.mark.parametrize("wrt", [("query",), ("key", "value"), ("value",), ("sinks",), ()], ids=str)
def test_some_gradients_alone(engine, wrt):
    arrays = packed()
    sinks = np.ones(4, np.float32)
    results = forward(engine, arrays, sinks=sinks)
    every = backward(engine, arrays, results=results, sinks=sinks)._asdict()
    for name, gradient in backward(engine, arrays, results=results, sinks=sinks, wrt=wrt)._asdict().items():
        assert (gradient is None) == (name not in wrt)
        if name in wrt:
            assert_same_bits(gradient, every[name], name)


@computes_gradients
def test_no_documents(engine):
    query, key, value, *_ = packed((), ())
    options = {"mask": np.ones((4, 0, 0), bool), "bias": np.zeros((0, 0), np.float32)}
    options["sinks"] = np.ones(4, np.float32)
    got = backward(engine, (query, key, value, [0], [0]), **options)
    shapes = [(0, 4, 16), (0, 2, 16), (0, 2, 12), (0, 0), (4,)]
    assert [gradient.shape for gradient in got] == shapes
    np.testing.assert_array_equal(got.sinks, 0)


@computes_gradients
def test_documents_without_keys_alone(engine):
    got = backward(engine, packed((3, 2), (0, 0)), sinks=np.ones(4, np.float32))
    np.testing.assert_array_equal(got.query, np.zeros((5, 4, 16), np.float32))
    np.testing.assert_array_equal(got.sinks, np.zeros(4, np.float32))


@computes_gradients
@pytest.mark.parametrize("dtype", [np.int32, np.uint16, list])
def test_lists_and_integers(engine, dtype):
    arrays = packed((5, 0, 7), (5, 0, 7))
    results = forward(engine, arrays, causal=True)
    wanted = backward(engine, arrays, results=results, causal=True)
    boundaries = list(map(int, arrays[3])) if dtype is list else arrays[3].astype(dtype)
    got = backward(engine, (*arrays[:3], boundaries), results=results, causal=True)  # one for both
    assert_all_same(got[:3], wanted[:3])
    whole = [np.rint(3 * x).astype(np.int64) for x in arrays[:3]]
    assert {x.dtype for x in backward(engine, (*whole, boundaries))[:3]} == {np.dtype(np.float64)}


MEASURE = (
    SCRIPT.split("rng = ")[0]
    + """
def call(length):
    rng = np.random.default_rng(0)
    query, key, value, grad_out = rng.standard_normal((4, length, 1, DIM), dtype=np.float32)
    starts = np.arange(0, length + 1, 256)
    options = dict(bias=np.linspace(0, 1, length, dtype=np.float32), dropout=0.1, seed=1, causal=True)
    out, lse = fastattn.varlen_attention(query, key, value, starts, return_lse=True, **options)
    given, options["wrt"] = (grad_out, query, key, value, out, lse, starts), ("query", "key", "value", "bias")
    made = []
    used = extra(lambda: made.append(fastattn.varlen_attention_backward(*given, **options)))
    return used - sum(gradient.nbytes for gradient in made[0] if gradient is not None)

call(256)  # imports and thread stacks
print(call(8192))
"""
)


@computes_gradients
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc/self/status")
def test_memory_does_not_grow_with_the_scores(engine):
    """In float32 they would take 256 MB. What the backends hold, as in tests/test_backward_rules.py, is some
    arrays of the size of the gradients, 2 MB each."""
    extra = int(python(MEASURE, env=engine.environment() | {"FASTATTN_NUM_THREADS": "1"}, timeout=240))
    assert extra < 24 * 2**20, f"{extra / 2**20:.1f} MiB"


# ---------------------------------------------------------------- errors


def call(**changed):
    """A call that is right but for what is changed."""
    query, key, value, cu_q, cu_k = packed()
    given = {"query": query, "key": key, "value": value, "cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k}
    outs = {"grad_out": np.ones((63, 4, 12)), "out": np.ones((63, 4, 12)), "lse": np.ones((4, 63))}
    return fastattn.varlen_attention_backward(**given | outs | changed)


@pytest.mark.parametrize(
    ("changed", "error"),
    [
        ({"cu_seqlens_q": [0, 5, 3, 22, 23, 63]}, ValueError),
        ({"cu_seqlens_q": [0, 5, 5, 22, 23, 62]}, ValueError),
        ({"cu_seqlens_q": np.arange(6.0)}, TypeError),
        ({"cu_seqlens_q": []}, ValueError),
        ({"cu_seqlens_k": None}, ValueError),
        ({"cu_seqlens_k": [0, 9, 30]}, ValueError),
        ({"causal": True}, ValueError),
        ({"causal": "diagonal"}, ValueError),
        ({"window": (-1, 0)}, ValueError),
        ({"mask": masks.Causal()}, ValueError),
        ({"mask": masks.KeyLengths([9] * 5)}, ValueError),
        ({"mask": np.ones((63, 30))}, TypeError),
        ({"mask": np.ones((5, 63, 30), bool)}, ValueError),
        ({"bias": np.ones((63, 31))}, ValueError),
        ({"sinks": np.ones(3)}, ValueError),
        ({"dropout": 0.1}, ValueError),
        ({"softcap": 0.0}, ValueError),
        ({"num_threads": 0}, ValueError),
        ({"backend": "gpu"}, ValueError),
        ({"query": np.zeros((63, 16))}, ValueError),
        ({"query": np.zeros((63, 3, 16))}, ValueError),
        ({"key": np.zeros((30, 2, 8))}, ValueError),
        ({"value": np.zeros((30, 2, 16), complex)}, TypeError),
    ],
    ids=str,
)
def test_errors_of_the_forward_call(changed, error):
    """The same message, word for word."""
    arrays = dict(zip((*NAMES, "cu_seqlens_q", "cu_seqlens_k"), packed(), strict=True))
    with pytest.raises(error) as theirs:
        fastattn.varlen_attention(**arrays | changed)
    with pytest.raises(error, match=f"^{re.escape(str(theirs.value))}$"):
        call(**changed)


@pytest.mark.parametrize(
    ("changed", "error", "said"),
    [
        ({"grad_out": np.ones((4, 63, 12))}, ValueError, r"^grad_out must have shape \(63, 4, 12\)"),
        ({"out": np.ones((63, 4, 16))}, ValueError, r"^out must have shape \(63, 4, 12\)"),
        ({"lse": np.ones((63, 4))}, ValueError, r"^lse must have shape \(4, 63\)"),
        ({"grad_lse": np.ones(63)}, ValueError, r"^grad_lse must have shape \(4, 63\)"),
        ({"wrt": ("query", "sinks")}, ValueError, "^wrt names sinks, which is not given"),
        ({"wrt": ("mask",)}, ValueError, "^wrt must name some of query, key, value, bias, sinks"),
        ({"wrt": 3}, TypeError, "^wrt must name some of"),
        ({"backend": "numba"}, fastattn.BackendError, "^backend 'numba' cannot"),
        ({"key_lengths": [3]}, TypeError, "unexpected keyword argument 'key_lengths': leave it out"),
        ({"layout": "bshd"}, TypeError, r"'layout': leave it out: packed arrays are \(T, H, D\)"),
        ({"return_lse": True}, TypeError, "unexpected keyword argument 'return_lse'"),
        ({"max_seqlen_q": 40}, TypeError, "'max_seqlen_q': leave it out"),
        ({"dout": np.ones((63, 4, 12))}, TypeError, "'dout': say grad_out="),
        ({"key": fastattn.Quantized.encode(np.ones((30, 2, 16), np.float32))}, TypeError, "key.*Quantized"),
    ],
)  # fmt: skip
def test_what_it_refuses(changed, error, said):
    with pytest.raises(error, match=said):
        call(**changed)
