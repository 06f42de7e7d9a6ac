"""The gradients of every backend that computes them: the definition, finite differences, types and errors."""

from __future__ import annotations

import re
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
from hypothesis import strategies as st

import fastattn
from fastattn import masks
from tests import naive
from tests.cases import Case, mask_pairs, random_arrays
from tests.conftest import FLOAT32_FIRST, computes_gradients, drawn
from tests.tolerances import assert_all_same, assert_gradients, assert_same_bits

ALL = ("query", "key", "value", "bias", "sinks")
STORAGES = [np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)]


def wrt_of(options):
    """Everything that there is a gradient of."""
    return tuple(name for name in ALL if name in ("query", "key", "value") or name in options)


def arriving(out, lse, seed=5):
    """Gradients of both outputs, in their shapes and in the dtype of `lse`."""
    rng = np.random.default_rng(seed)
    return rng.standard_normal(out.shape).astype(lse.dtype), rng.standard_normal(lse.shape).astype(lse.dtype)


def check(engine, arrays, ours, theirs=None, *, with_lse=True):
    """All gradients of these arrays are within the budget. `theirs`: the options, the mask as an array."""
    theirs = ours if theirs is None else theirs
    out, lse = engine.attention(*arrays, return_lse=True, **ours)
    grad_out, grad_lse = arriving(out, lse)
    extra = {"grad_lse": grad_lse} if with_lse else {}
    wrt = wrt_of(ours)
    got = engine.backward(grad_out, *arrays, out, lse, wrt=wrt, **extra, **ours)
    assert_gradients(got, grad_out, *arrays, wrt=wrt, **extra, **theirs)


# ---------------------------------------------------------------- parity

SIZES = [
    (1, 1), (1, 2), (2, 1), (15, 17), (17, 15), (1, 129), (129, 1), (47, 49), (49, 95), (95, 97), (97, 47),
    (127, 129), (129, 127), (200, 2), (2, 200), (200, 200), (257, 128), (127, 257),
]  # fmt: skip


@computes_gradients
@pytest.mark.parametrize("dtype", FLOAT32_FIRST)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_sizes(engine, sizes, dtype):
    len_q, len_k = sizes
    arrays = random_arrays(1, heads=1, len_q=len_q, len_k=len_k, head_dim=20, value_dim=24, dtype=dtype)
    check(engine, arrays, {}, with_lse=False)


@computes_gradients
@pytest.mark.parametrize("dtype", FLOAT32_FIRST)
@pytest.mark.parametrize("value_dim", [0, 7, 24, 80])
@pytest.mark.parametrize("head_dim", [1, 8, 20, 64, 80, 130])
def test_dims(engine, head_dim, value_dim, dtype):
    sizes = {"heads": 2, "kv_heads": 1, "len_q": 33, "len_k": 50}
    arrays = random_arrays(2, **sizes, head_dim=head_dim, value_dim=value_dim, dtype=dtype)
    check(engine, arrays, {})


@computes_gradients
@pytest.mark.parametrize("dtype", FLOAT32_FIRST)
@pytest.mark.parametrize("lead", [(), (2,), (2, 3)], ids=str)
@pytest.mark.parametrize("heads", [(1, 1), (3, 3), (6, 2), (4, 1)], ids=str)
@pytest.mark.parametrize("causal", [False, "bottom_right"])
def test_heads(engine, heads, lead, causal, dtype):
    arrays = random_arrays(
        3, lead=lead, heads=heads[0], kv_heads=heads[1], len_q=19, len_k=35, head_dim=8, dtype=dtype
    )
    check(engine, arrays, {"causal": causal})


MEDIUM = Case("medium", lead=(2,), heads=3, kv_heads=1, len_q=35, len_k=70, head_dim=12, value_dim=9)
OPTIONS = {
    "top_left": {"causal": "top_left"},
    "bottom_right": {"causal": "bottom_right"},
    "window": {"window": (9, 3)},
    "window_causal": {"window": (20, None), "causal": "top_left"},
    "lengths": {"key_lengths": (0, 41)},
    "lengths_causal": {"key_lengths": (55, 13), "causal": "bottom_right"},
    "softcap": {"softcap": 1.5},
    "softcap_causal": {"softcap": 20.0, "causal": "bottom_right"},
    "scale_0": {"scale": 0.0},
    "scale_negative": {"scale": -0.4},
    "scale_large": {"scale": 25.0},
    "scale_large_softcap": {"scale": 25.0, "softcap": 4.0},
}


@computes_gradients
@pytest.mark.parametrize("dtype", FLOAT32_FIRST)
@pytest.mark.parametrize("sinks", [False, True], ids=["", "sinks"])
@pytest.mark.parametrize("name", OPTIONS)
def test_options(engine, name, sinks, dtype):
    case = replace(MEDIUM, dtype=dtype, sinks=sinks, options=tuple(OPTIONS[name].items()))
    check(engine, case.arrays(), case.keywords())


BIASES = [
    (35, 70), (3, 35, 70), (2, 1, 35, 70), (1, 3, 35, 70), (2, 3, 35, 70), (3, 1, 70), (2, 3, 1, 70), (70,),
    (1, 70), (35, 1), (3, 1, 1), (2, 1, 1, 1), (1, 1), (1,), (),
]  # fmt: skip


@computes_gradients
@pytest.mark.parametrize("dtype", FLOAT32_FIRST)
@pytest.mark.parametrize("shape", BIASES, ids=str)
@pytest.mark.parametrize("others", ["", "softcap", "causal", "mask"])
def test_bias(engine, shape, others, dtype):
    """With elements of -inf, which mask: their gradient is 0."""
    rng = np.random.default_rng(1)
    bias = np.asarray(rng.standard_normal(shape))
    if bias.size > 4:
        bias[rng.random(shape) < 0.3] = -np.inf
    options = {
        "": {},
        "softcap": {"softcap": 2.0},
        "causal": {"causal": "bottom_right"},
        "mask": {"mask": rng.random((35, 70)) < 0.7},
    }[others]
    check(engine, MEDIUM.as_dtype(dtype).arrays(), {"bias": np.asarray(bias, dtype)} | options)


@computes_gradients
@pytest.mark.parametrize("dtype", FLOAT32_FIRST)
@pytest.mark.parametrize("bias_dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("shape", [(35, 70), (70,), (3, 35, 1)], ids=str)
def test_bias_of_another_dtype(engine, shape, bias_dtype, dtype):
    case = replace(MEDIUM, dtype=dtype, bias=shape, bias_dtype=bias_dtype, sinks=True)
    check(engine, case.arrays(), case.keywords())


@computes_gradients
@pytest.mark.parametrize("dtype", FLOAT32_FIRST)
@pytest.mark.parametrize("shape", [(35, 70), (2, 3, 35, 70), (3, 1, 70), (2, 1, 35, 1), (70,)], ids=str)
@pytest.mark.parametrize("others", ["", "softcap", "causal", "sinks"])
def test_bool_masks(engine, shape, others, dtype):
    options = {"softcap": {"softcap": 3.0}, "causal": {"causal": "bottom_right"}}.get(others, {})
    case = replace(MEDIUM, dtype=dtype, mask=shape, sinks=others == "sinks", options=tuple(options.items()))
    check(engine, case.arrays(), case.keywords())


@computes_gradients
@pytest.mark.parametrize("dtype", FLOAT32_FIRST)
def test_sinks_of_minus_infinity(engine, dtype):
    """Such a sink is none, and has the gradient 0."""
    sinks = np.array([-np.inf, 0.5, 40.0], dtype)
    check(engine, MEDIUM.as_dtype(dtype).arrays(), {"sinks": sinks, "causal": "bottom_right"})


@computes_gradients
@pytest.mark.parametrize("dtype", FLOAT32_FIRST)
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("rank", [2, 3, 4, 5])
def test_ranks_and_layouts(engine, rank, layout, dtype):
    lead = {2: (), 3: (), 4: (2,), 5: (2, 3)}[rank]
    query, key, value = random_arrays(
        5, lead=lead, heads=2 if rank > 2 else 1, kv_heads=1, len_q=18, len_k=33, value_dim=5, dtype=dtype
    )
    if rank == 2:
        query, key, value = query[0], key[0], value[0]
    elif layout == "bshd":
        query, key, value = (array.swapaxes(-2, -3).copy() for array in (query, key, value))
    bias = np.random.default_rng(6).standard_normal((18, 33)).astype(dtype)
    sinks = np.ones(2 if rank > 2 else 1, dtype)
    check(engine, (query, key, value), {"layout": layout, "bias": bias, "sinks": sinks, "window": (9, 4)})


BROADCAST = {
    "query": ((1,), (3,), (3,)),
    "key": ((3,), (1,), (3,)),
    "value": ((3,), (3,), (1,)),
    "key_and_value": ((2, 3), (1, 3), (2, 1)),
    "crossed": ((2, 1), (1, 3), (2, 3)),
}


@computes_gradients
@pytest.mark.parametrize("dtype", FLOAT32_FIRST)
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("name", BROADCAST)
@pytest.mark.parametrize("bias_shape", [None, (21, 30), (3, 1, 21, 30), (1, 2, 21, 1)], ids=str)
def test_broadcast_leading_axes(engine, name, bias_shape, layout, dtype):
    """Their gradients are sums: those of arrays that are written out, added up."""
    rng = np.random.default_rng(7)
    tails = (2, 21, 6), (1, 30, 6), (1, 30, 8)
    arrays = [
        rng.standard_normal((*lead, *tail)).astype(dtype)
        for lead, tail in zip(BROADCAST[name], tails, strict=True)
    ]
    if layout == "bshd":
        arrays = [array.swapaxes(-2, -3).copy() for array in arrays]
    options = {} if bias_shape is None else {"bias": rng.standard_normal(bias_shape).astype(dtype)}
    check(engine, arrays, {"layout": layout, "causal": "bottom_right"} | options)


@computes_gradients
@pytest.mark.parametrize("dtype", FLOAT32_FIRST)
@pytest.mark.parametrize(
    "wrt", [(name,) for name in ALL] + [("sinks", "key"), ("value", "bias"), ()], ids=str
)
@pytest.mark.parametrize("bias_shape", [(35, 70), (2, 3, 35, 70), (70,)], ids=str)
def test_some_gradients_alone(engine, wrt, bias_shape, dtype):
    case = replace(MEDIUM, dtype=dtype, bias=bias_shape, sinks=True, options=(("softcap", 5.0),))
    arrays, options = case.arrays(), case.keywords()
    out, lse = engine.attention(*arrays, return_lse=True, **options)
    grad_out, grad_lse = arriving(out, lse)
    got = engine.backward(grad_out, *arrays, out, lse, grad_lse=grad_lse, wrt=wrt, **options)
    assert_gradients(got, grad_out, *arrays, grad_lse=grad_lse, wrt=wrt, **options)


@computes_gradients
def test_wrt_is_any_iterable(engine):
    arrays = random_arrays()
    out, lse = engine.attention(*arrays, return_lse=True)
    wanted = engine.backward(out, *arrays, out, lse, wrt=("key", "value"))
    for wrt in (["value", "key"], {"key", "value"}, iter(("key", "value")), ("key", "key", "value")):
        got = engine.backward(out, *arrays, out, lse, wrt=wrt)
        assert got.query is None
        assert_same_bits(got.key, wanted.key)
        assert_same_bits(got.value, wanted.value)


EMPTY = {
    "no_queries": {"len_q": 0},
    "no_keys": {"len_k": 0},
    "neither": {"len_q": 0, "len_k": 0},
    "no_items": {"lead": (0,)},
    "no_heads": {"heads": 0, "kv_heads": 0},
    "no_columns": {"value_dim": 0},
}


@computes_gradients
@pytest.mark.parametrize("dtype", FLOAT32_FIRST)
@pytest.mark.parametrize("name", EMPTY)
@pytest.mark.parametrize("with_options", [False, True])
def test_empty_sizes(engine, name, with_options, dtype):
    size = {"lead": (2,), "heads": 2, "len_q": 5, "len_k": 7, "head_dim": 4} | EMPTY[name]
    arrays = random_arrays(8, **size, dtype=dtype)
    options = {}
    if with_options:
        options["bias"] = np.ones((size["len_q"], size["len_k"]), dtype)
        options["sinks"] = np.ones(size["heads"], dtype)
    check(engine, arrays, options)


# ---------------------------------------------------------------- finite differences


@st.composite
def small_problems(draw):
    """Arrays of float64 and options of all kinds, small enough to be differentiated by differences."""
    kv_heads = draw(st.integers(1, 2))
    lead, heads = draw(st.sampled_from([(), (1,), (2,)])), kv_heads * draw(st.integers(1, 3))
    len_q, len_k = draw(st.integers(1, 20)), draw(st.integers(1, 20))
    seed = draw(st.integers(0, 2**16))
    rng = np.random.default_rng(seed)
    arrays = random_arrays(
        seed,
        lead=lead,
        heads=heads,
        kv_heads=kv_heads,
        len_q=len_q,
        len_k=len_k,
        head_dim=draw(st.integers(1, 9)),
        value_dim=draw(st.integers(1, 9)),
        dtype="float64",
    )
    arrays = dict(zip(("query", "key", "value"), arrays, strict=True))
    options = {}
    if draw(st.booleans()):
        options["causal"] = draw(st.sampled_from(["top_left", "bottom_right"]))
    if draw(st.booleans()):
        options["window"] = (draw(st.integers(0, 20)), draw(st.integers(0, 20)))
    if draw(st.booleans()):
        options["key_lengths"] = rng.integers(0, len_k + 1, lead)
    if draw(st.booleans()):
        options["scale"] = draw(st.sampled_from([0.0, 0.7, -0.5]))
    if draw(st.booleans()):
        options["softcap"] = draw(st.sampled_from([0.5, 5.0]))
    kind = draw(st.sampled_from(["none", "array", "object"]))
    if kind == "array":
        options["mask"] = rng.random((heads, len_q, len_k)) < 0.6
    elif kind == "object" and len(lead) == 1:
        options["mask"] = draw(st.sampled_from(mask_pairs(lead[0], heads, len_q, len_k, seed))).mask
    if draw(st.booleans()):
        full = (*lead, heads, len_q, len_k)
        shape = tuple(draw(st.sampled_from([n, 1])) for n in full[draw(st.integers(0, len(full))) :])
        bias = np.asarray(rng.standard_normal(shape))
        bias[rng.random(shape) < draw(st.sampled_from([0.0, 0.3]))] = -np.inf
        arrays["bias"] = bias
    if draw(st.booleans()):
        arrays["sinks"] = rng.standard_normal(heads)
    if draw(st.booleans()):
        options |= {"dropout": draw(st.sampled_from([1e-4, 0.3, 0.9])), "seed": seed}
    return arrays, options, seed


@computes_gradients
@drawn(
    15, 60,
    problem=small_problems(), layout=st.sampled_from(["bhsd", "bshd"]), with_lse=st.booleans(),
)  # fmt: skip
def test_gradients_are_those_of_the_forward_call(engine, problem, layout, with_lse):
    """Central differences of fourth order, along a random direction of each argument and of all together.

    With a step of 1e-3 their error is some 1e-10 of the sum's terms. A row without keys and with a sink is
    left out of the sum: its lse is the sink, and the contract has it contribute nothing.
    """
    arrays, options, seed = problem
    if layout == "bshd":
        arrays = arrays | {name: arrays[name].swapaxes(-2, -3) for name in ("query", "key", "value")}
    options = options | {"layout": layout}
    rng = np.random.default_rng(seed + 1)
    out, lse = engine.attention(**arrays, **options, return_lse=True)
    unsunk = {name: array for name, array in arrays.items() if name != "sinks"}
    _, lse_without = engine.attention(**unsunk, **options, return_lse=True)
    grad_out = rng.standard_normal(out.shape)
    grad_lse = np.where(np.isneginf(lse_without), 0, rng.standard_normal(lse.shape)) * with_lse

    def total(moved):
        out, lse = engine.attention(**moved, **options, return_lse=True)
        return (grad_out * out).sum() + (grad_lse * np.where(grad_lse == 0, 0, lse)).sum()

    extra = {"grad_lse": grad_lse} if with_lse else {}
    found = engine.backward(
        grad_out, out=out, lse=lse, wrt=wrt_of(arrays), **arrays, **options, **extra
    )._asdict()
    directions = {name: rng.standard_normal(array.shape) for name, array in arrays.items()}
    size = np.abs(grad_out * out).sum() + np.abs(grad_lse * np.where(grad_lse == 0, 0, lse)).sum()
    for names in [(name,) for name in arrays] + [tuple(arrays)]:

        def at(step, names=names):
            return total(arrays | {name: arrays[name] + step * directions[name] for name in names})

        step = 1e-3
        slope = (8 * (at(step) - at(-step)) - (at(2 * step) - at(-2 * step))) / (12 * step)
        terms = np.concatenate([(found[name] * directions[name]).ravel() for name in names])
        assert abs(terms.sum() - slope) <= 1e-5 * np.abs(terms).sum() + 1e-9 * (1 + size), names


# ---------------------------------------------------------------- types


@computes_gradients
@pytest.mark.parametrize("double", ["query", "key", "value", "bias", "sinks"])
def test_each_gradient_has_the_dtype_of_its_argument(engine, double):
    case = replace(MEDIUM, bias=(35, 70), sinks=True)
    options = case.keywords()
    arrays = dict(zip(("query", "key", "value"), case.arrays(), strict=True))
    for of in (arrays, options):
        if double in of:
            of[double] = of[double].astype(np.float64)
    check(engine, tuple(arrays.values()), options)


@computes_gradients
@pytest.mark.parametrize("dtype", [np.bool_, np.int8, np.uint16, np.int64, ">i4"], ids=str)
@pytest.mark.parametrize("which", ["query", "key", "value", "all"])
def test_gradients_of_integers_are_double(engine, which, dtype):
    rng = np.random.default_rng(0)
    arrays = dict(zip(("query", "key", "value"), random_arrays(dtype="float32"), strict=True))
    for name in arrays:
        if which in (name, "all"):
            arrays[name] = rng.integers(0, 2, arrays[name].shape).astype(dtype)
    check(engine, tuple(arrays.values()), {"causal": "bottom_right"})


@computes_gradients
def test_nested_lists(engine):
    query, key, value = [[1.0, 2.0]], [[0.5, -1.0], [2.0, 0.0]], [[1.0], [3.0]]
    out, lse = engine.attention(query, key, value, return_lse=True)
    options = {"bias": [[0.5, 1.0]], "sinks": [0.0]}
    out, lse = engine.attention(query, key, value, return_lse=True, **options)
    got = engine.backward([[2.0]], query, key, value, out.tolist(), lse.tolist(), wrt=ALL, **options)
    arrays = [np.array(rows) for rows in ([[2.0]], query, key, value)]
    options = {name: np.array(rows) for name, rows in options.items()}
    assert_gradients(got, *arrays, wrt=ALL, **options)


@computes_gradients
@pytest.mark.parametrize("given", ["grad_out", "out", "lse", "grad_lse"])
def test_outputs_of_another_dtype(engine, given):
    """They are read as they are, in the precision of the computation."""
    arrays = random_arrays(dtype="float32")
    out, lse = engine.attention(*arrays, return_lse=True)
    grad_out, grad_lse = arriving(out, lse)
    outputs = {"grad_out": grad_out, "out": out, "lse": lse, "grad_lse": grad_lse}
    query, key, value = arrays
    wanted = engine.backward(query=query, key=key, value=value, **outputs)
    outputs[given] = outputs[given].astype(np.float64)
    got = engine.backward(query=query, key=key, value=value, **outputs)
    assert_all_same(got[:3], wanted[:3])


ulps = {np.dtype(np.float16): 2.0**-10, np.dtype(ml_dtypes.bfloat16): 2.0**-7}


@computes_gradients
@pytest.mark.parametrize("storage", STORAGES, ids=str)
@pytest.mark.parametrize("given", ["all", "query", "key", "value", "grad_out"])
@pytest.mark.parametrize(
    "size",
    [
        {"lead": (2,), "heads": 4, "kv_heads": 2, "len_q": 40, "len_k": 70, "head_dim": 24, "value_dim": 40},
        {"heads": 1, "len_q": 129, "len_k": 300, "head_dim": 33},
    ],
    ids=["grouped", "one_head"],
)
@pytest.mark.parametrize("option", ["plain", "causal", "bias", "sinks"])
def test_gradients_of_16_bits_are_those_of_upcast_arrays_rounded_once(engine, option, size, given, storage):
    rng = np.random.default_rng(9)
    query, key, value = random_arrays(**size)
    arrays = {"query": query, "key": key, "value": value}
    arrays["grad_out"] = rng.standard_normal((*query.shape[:-1], value.shape[-1])).astype(np.float32)
    options = {"plain": {}, "causal": {"causal": "bottom_right"}}.get(option, {})
    operands = {
        "bias": {"bias": rng.standard_normal((query.shape[-3], query.shape[-2], key.shape[-2]))},
        "sinks": {"sinks": rng.standard_normal(query.shape[-3])},
    }.get(option, {})
    small = {name: x.astype(storage if given in (name, "all") else np.float32) for name, x in arrays.items()}
    small |= {name: x.astype(storage) for name, x in operands.items()}
    forward = {name: x for name, x in small.items() if name != "grad_out"}
    out, lse = engine.attention(**forward, **options, return_lse=True)
    small |= {"out": out.astype(storage), "lse": lse.astype(storage)}
    big = {name: x.astype(np.float32) for name, x in small.items()}
    wrt = ("query", "key", "value", *operands)
    got = engine.backward(**small, **options, wrt=wrt)
    wanted = engine.backward(**big, **options, wrt=wrt)
    for name in wrt:
        mine, exact = getattr(got, name), getattr(wanted, name)
        assert mine.dtype == small[name].dtype, name
        assert mine.shape == small[name].shape, name
        assert mine.flags.c_contiguous, name
        mine = mine.astype(np.float32)
        # One unit of the stored type, its smallest number, and sums of float32 in another order.
        ulp = ulps[storage] * np.abs(exact) + (2.0**-24 if storage == np.float16 else 0)
        allowed = (ulp if small[name].dtype == storage else 0) + 2.0**-17 * np.abs(exact).max()
        assert (np.abs(mine - exact) <= allowed).all(), name


@computes_gradients
def test_inputs_are_never_written(engine):
    case = replace(MEDIUM, bias=(35, 70), mask=(35, 70), sinks=True)
    arrays = dict(zip(("query", "key", "value"), case.arrays(), strict=True)) | case.keywords()
    out, lse = engine.attention(**arrays, return_lse=True)
    grad_out, grad_lse = arriving(out, lse)
    arrays |= {"out": out, "lse": lse, "grad_out": grad_out, "grad_lse": grad_lse}
    before = {name: array.copy() for name, array in arrays.items()}
    for array in arrays.values():
        array.flags.writeable = False
    got = engine.backward(**arrays, wrt=ALL)
    for name, array in arrays.items():
        assert_same_bits(array, before[name], name)
        for gradient in got:
            assert not np.shares_memory(gradient, array)


# ---------------------------------------------------------------- errors


def call(backend="cython", **changed):
    """A call that is right but for what is changed."""
    rng = np.random.default_rng(0)
    arrays = {
        name: rng.standard_normal((2, 3, 5, 4)) for name in ("query", "key", "value", "out", "grad_out")
    }
    arrays["lse"] = rng.standard_normal((2, 3, 5))
    return fastattn.attention_backward(**arrays | {"backend": backend} | changed)


def test_the_default_backend_computes_gradients():
    assert call(None).query.shape == (2, 3, 5, 4)


@pytest.mark.parametrize("backend", ["numba", "cuda"])
def test_other_backends_refuse(backend):
    from fastattn.backends.registry import load

    unusable = load(backend).unavailable_reasons()
    with pytest.raises(fastattn.BackendError, match=f"^backend '{backend}' cannot") as caught:
        call(backend)
    assert load(backend).gradient_reasons() == ["it computes no gradients"]
    if not unusable:
        assert "it computes no gradients" in str(caught.value)


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("name", ["grad_out", "out"])
@pytest.mark.parametrize("shape", [(2, 3, 5, 3), (2, 5, 3, 4), (3, 5, 4), (1, 3, 5, 4), (4,), ()], ids=str)
def test_outputs_of_a_wrong_shape(name, shape, layout):
    changed = {"layout": layout}
    if layout == "bshd":
        right = np.ones((2, 5, 3, 4))
        changed |= dict.fromkeys(("query", "key", "value", "grad_out", "out"), right)
        shape = {(2, 5, 3, 4): (2, 3, 5, 4)}.get(shape, shape)
    with pytest.raises(ValueError, match=rf"^{name} must have shape"):
        call(**changed | {name: np.ones(shape)})


@pytest.mark.parametrize("name", ["lse", "grad_lse"])
@pytest.mark.parametrize("shape", [(2, 5, 3), (2, 3, 5, 1), (3, 5), (1, 3, 5), (5,), ()], ids=str)
def test_sums_of_a_wrong_shape(name, shape):
    with pytest.raises(ValueError, match=rf"^{name} must have shape \(2, 3, 5\)"):
        call(**{name: np.ones(shape)})


def test_sums_have_the_heads_first_in_either_layout():
    right = np.ones((2, 5, 3, 4))
    changed = dict.fromkeys(("query", "key", "value", "grad_out", "out"), right)
    call(**changed, layout="bshd")
    with pytest.raises(ValueError, match=r"^lse must have shape \(2, 3, 5\)"):
        call(**changed, layout="bshd", lse=np.ones((2, 5, 3)))


@pytest.mark.parametrize("wrt, kind", [
    (None, TypeError), (3, TypeError), (True, TypeError),
    (["query", None], ValueError), ([np.array(["query", "key"])], ValueError),
])  # fmt: skip
def test_wrt_of_what_is_no_name(wrt, kind):
    said = "wrt must name some of query, key, value, bias, sinks, got "
    got = wrt[-1] if isinstance(wrt, list) else wrt
    with pytest.raises(kind, match="^" + re.escape(f"{said}{got!r}; query (2, 3, 5, 4)")):
        call(wrt=wrt)


@pytest.mark.parametrize("name", ["grad_out", "out", "lse", "grad_lse"])
@pytest.mark.parametrize("kind", ["complex", "text", "ragged"])
def test_outputs_that_are_no_numbers(name, kind):
    shape = (2, 3, 5) if "lse" in name else (2, 3, 5, 4)
    bad = {"complex": np.ones(shape, complex), "text": np.full(shape, "x"), "ragged": [[1.0], [1.0, 2.0]]}
    with pytest.raises((TypeError, ValueError), match=rf"^{name}\b"):
        call(**{name: bad[kind]})


@pytest.mark.parametrize("name", ["bias", "sinks"])
def test_wrt_what_is_not_given(name):
    with pytest.raises(ValueError, match=rf"^wrt .*{name}"):
        call(wrt=(name,))
    with pytest.raises(ValueError, match=rf"^wrt .*{name}"):
        call(wrt=("query", name))


@pytest.mark.parametrize("wrt", [("quary",), ("query", "mask"), ("scale",), ("Query",), ("",), (3,), (None,)])
def test_wrt_unknown_names(wrt):
    with pytest.raises(ValueError, match=r"^wrt "):
        call(wrt=wrt)


@pytest.mark.parametrize("name", ["key", "value"])
def test_caches_are_refused(name):
    rows = np.ones((2, 3, 5, 4), np.float32)
    stored = {
        "Quantized": fastattn.Quantized.encode(rows),
        "Paged": fastattn.Paged(np.ones((4, 3, 8, 4), np.float32), np.zeros((2, 1), np.int64)),
    }
    for kind, array in stored.items():
        with pytest.raises(TypeError, match=rf"(?s){name}.*{kind}|{kind}.*{name}"):
            call(**{name: array})


@pytest.mark.parametrize("name", ["scale", "return_lse", "gradient"])
def test_arguments_that_it_does_not_have(name):
    if name == "scale":
        with pytest.raises(TypeError):
            call(scale="x")
    else:
        with pytest.raises(TypeError, match=name):
            call(**{name: True})


@pytest.mark.parametrize(
    ("changed", "error"),
    [
        ({"layout": "sbhd"}, ValueError),
        ({"causal": "diagonal"}, ValueError),
        ({"num_threads": 0}, ValueError),
        ({"backend": "gpu"}, ValueError),
        ({"mask": np.ones((7, 7), bool)}, ValueError),
        ({"bias": np.ones((7, 7))}, ValueError),
        ({"sinks": np.ones(7)}, ValueError),
        ({"key": np.ones((2, 3, 5, 7))}, ValueError),
        ({"softcap": -1.0}, ValueError),
        ({"mask": masks.Causal("top_left"), "query": np.ones((2, 3, 5), complex)}, TypeError),
    ],
    ids=lambda it: next(iter(it)) if isinstance(it, dict) else it.__name__,
)
def test_other_errors_are_those_of_attention(changed, error):
    with pytest.raises(error) as ours:
        call(**changed)
    arrays = {name: np.ones((2, 3, 5, 4)) for name in ("query", "key", "value")}
    with pytest.raises(error) as theirs:
        fastattn.attention(**arrays | changed)
    assert str(ours.value).split()[0] == str(theirs.value).split()[0]


@pytest.mark.parametrize("others", [{}, {"dropout": 0.3, "seed": 5}], ids=["", "dropout"])
def test_rows_of_the_oracle_do_not_depend_on_their_neighbours(monkeypatch, others):
    """It works on some of them at a time: each sum has a rounding more for each key that only others read."""
    case = replace(MEDIUM, dtype="float64", bias=(35, 70), mask=(2, 3, 35, 70), sinks=True)
    arrays, options = case.arrays(), case.keywords() | {"softcap": 2.0, "causal": "bottom_right"} | others
    out, grad_lse = np.random.default_rng(3).standard_normal((2, 2, 3, 35, 9))
    results = []
    for together in (1, naive.TOGETHER):
        monkeypatch.setattr(naive, "TOGETHER", together)
        found = naive.gradients(out, *arrays, grad_lse=grad_lse[..., 0], **options)
        results.append([vars(it) for it in (naive.attention(*arrays, **options), *found)])
    for which, alone, together in zip(("answer", "gradients", "reach"), *results, strict=True):
        for name, expected in alone.items():
            eps = np.finfo(float if "reach" in which + name else naive.WIDE).eps
            assert np.abs(together[name] - expected).max() <= 2 * 70 * eps * np.abs(expected).max(), name
