"""The rules of the package for gradients: what is masked, which bits, which strides, how much memory."""

from __future__ import annotations

import sys

import numpy as np
import pytest
from hypothesis import strategies as st

from fastattn import masks
from tests.cases import FLOATS, MASK_NAMES, MEMORY_LAYOUTS, mask_pair, random_arrays
from tests.conftest import FLOAT32_FIRST, OF_ONE_ISA, Engine, computes_gradients, drawn, on_cython, without
from tests.naive import allowed_keys
from tests.process import python
from tests.test_memory import SCRIPT
from tests.tolerances import assert_all_same, assert_same_bits

ALL = ("query", "key", "value", "bias", "sinks")
BATCH, HEADS, KV_HEADS = 2, 4, 2
GROUP = HEADS // KV_HEADS
SIZES = [(5, 9), (70, 150), (130, 100)]
POISONS = [(np.nan, np.nan), (np.inf, -np.inf), (0.0, np.inf), (-np.inf, 0.0)]


def problem(len_q, len_k, dtype="float32", *, with_bias=True, with_sinks=True, lead=(BATCH,)):
    """Everything but the options of a call, by its name."""
    rng = np.random.default_rng(3)
    arrays = random_arrays(
        2, lead=lead, heads=HEADS, kv_heads=KV_HEADS, len_q=len_q, len_k=len_k, head_dim=12, value_dim=9,
        dtype=dtype,
    )  # fmt: skip
    arrays = dict(zip(("query", "key", "value"), arrays, strict=True))
    if with_bias:
        arrays["bias"] = rng.standard_normal((*lead, HEADS, len_q, len_k)).astype(dtype)
    if with_sinks:
        arrays["sinks"] = rng.standard_normal(HEADS).astype(dtype)
    return arrays


def backward(engine, arrays, *, grad_out=None, grad_lse=None, num_threads=None, **options):
    """All gradients that there are, by name; the gradients of the outputs are random where none are given."""
    out, lse = engine.attention(**arrays, **options, return_lse=True, num_threads=num_threads)
    rng = np.random.default_rng(4)
    given = {"grad_out": rng.standard_normal(out.shape).astype(lse.dtype)}
    given["grad_lse"] = rng.standard_normal(lse.shape).astype(lse.dtype)
    given |= {name: x for name, x in (("grad_out", grad_out), ("grad_lse", grad_lse)) if x is not None}
    return again(engine, arrays | given | {"out": out, "lse": lse}, num_threads=num_threads, **options)


def again(engine, arrays, **options):
    """The gradients from all arrays, the outputs among them."""
    wrt = tuple(name for name in ALL if name in arrays)
    found = engine.backward(**arrays, **options, wrt=wrt)._asdict()
    return {name: found[name] for name in wrt}


def outputs(engine, arrays, **options):
    """The arrays, with the outputs of the forward call and random gradients of them."""
    out, lse = engine.attention(**arrays, **options, return_lse=True)
    rng = np.random.default_rng(4)
    grad_out, grad_lse = (rng.standard_normal(x.shape).astype(lse.dtype) for x in (out, lse))
    return arrays | {"out": out, "lse": lse, "grad_out": grad_out, "grad_lse": grad_lse}


def of_kv_heads(allowed):
    """Bool ``(B, K, L, S)``: whether any query head of the group reads the key, from ``(B, H, L, S)``."""
    batch, heads, len_q, len_k = allowed.shape
    return allowed.reshape(batch, KV_HEADS, heads // KV_HEADS, len_q, len_k).any(axis=2)


# ---------------------------------------------------------------- what is masked


def masked_options(len_q, len_k):
    """Options of every kind that masks, and what they allow as ``(B, H, L, S)``."""
    rng = np.random.default_rng(5)
    dense = rng.random((HEADS, len_q, len_k)) < 0.4
    dense[:, :, rng.random(len_k) < 0.3] = False
    dense[:, [0, len_q // 2]] = False
    lengths = np.array([0, len_k * 2 // 3])
    options = {
        "top_left": {"causal": "top_left"},
        "bottom_right": {"causal": "bottom_right", "softcap": 3.0},
        "window": {"window": (3, 1)},
        "window_top_left": {"window": (2, None), "causal": "top_left"},
        "lengths": {"key_lengths": lengths},
        "lengths_causal": {"key_lengths": lengths, "causal": "bottom_right"},
        "per_head": {"mask": dense},
        "per_key": {"mask": dense[0, 1:2]},
        "per_row": {"mask": dense.any(axis=-1, keepdims=True)},
        "nothing": {"mask": np.zeros((1, 1), bool)},
    }
    return {
        name: (
            its,
            allowed_keys((BATCH,), HEADS, len_q, len_k, **{a: b for a, b in its.items() if a != "softcap"}),
        )
        for name, its in options.items()
    }


def assert_masked_keys_are_never_seen(engine, arrays, options, allowed):
    """Keys that no row may read: whatever they hold changes no bit, and their gradients are 0."""
    unread = ~of_kv_heads(allowed).any(axis=2)
    clean = backward(engine, arrays, **options)
    for name in ("key", "value"):
        assert not clean[name][unread].any(), f"gradient of {name}"
    assert not clean["query"][~allowed.any(axis=-1)].any()
    if "bias" in clean:
        assert not clean["bias"][~allowed].any()
    for in_key, in_value in POISONS:
        bad = arrays | {"key": arrays["key"].copy(), "value": arrays["value"].copy()}
        bad["key"][unread], bad["value"][unread] = in_key, in_value
        if "bias" in bad:
            bad["bias"] = np.where(allowed, arrays["bias"], in_key)
        assert_all_same(backward(engine, bad, **options), clean, f"with {in_key} and {in_value}")


@computes_gradients
@pytest.mark.parametrize("dtype", FLOAT32_FIRST)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("with_bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("name", masked_options(5, 9))
def test_masked_keys(engine, name, with_bias, sizes, dtype):
    options, allowed = masked_options(*sizes)[name]
    arrays = problem(*sizes, dtype, with_bias=with_bias)
    assert_masked_keys_are_never_seen(engine, arrays, options, allowed)


@computes_gradients
@pytest.mark.parametrize("dtype", FLOAT32_FIRST)
@pytest.mark.parametrize("shape", ["scores", "keys"])
def test_keys_that_a_bias_of_minus_infinity_masks(engine, shape, dtype):
    arrays = problem(70, 150, dtype, with_bias=False)
    full = (BATCH, HEADS, 70, 150)
    bias = np.random.default_rng(5).standard_normal(full if shape == "scores" else (BATCH, 1, 1, 150))
    bias[..., 20:90] = -np.inf
    bias[np.random.default_rng(6).random(bias.shape) < 0.3] = -np.inf
    bias = bias.astype(dtype)
    allowed = np.broadcast_to(bias != -np.inf, full)
    unread = ~of_kv_heads(allowed).any(axis=2)
    clean = backward(engine, arrays | {"bias": bias})
    assert not clean["bias"][bias == -np.inf].any()
    assert not clean["key"][unread].any()
    assert not clean["value"][unread].any()
    bad = arrays | {"bias": bias, "key": arrays["key"].copy(), "value": arrays["value"].copy()}
    bad["key"][unread], bad["value"][unread] = np.nan, np.inf
    assert_all_same(backward(engine, bad), clean)


@computes_gradients
@pytest.mark.parametrize("dtype", FLOAT32_FIRST)
@pytest.mark.parametrize("name", ["top_left", "bottom_right", "window", "per_head"])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_a_row_sees_nothing_that_is_masked_for_it(engine, name, sizes, dtype):
    """Other rows do see the poison: the gradient of this one's query and bias keeps its bits."""
    options, allowed = masked_options(*sizes)[name]
    arrays = problem(*sizes, dtype)
    clean = backward(engine, arrays, **options)
    for row in sorted({0, sizes[0] // 3, sizes[0] - 1}):
        for head in (0, HEADS - 1):
            for in_key, in_value in POISONS:
                bad = arrays | {"key": arrays["key"].copy(), "value": arrays["value"].copy()}
                for item in range(BATCH):
                    hidden = ~allowed[item, head, row]
                    bad["key"][item, head // GROUP, hidden] = in_key
                    bad["value"][item, head // GROUP, hidden] = in_value
                got = backward(engine, bad, **options)
                for of in ("query", "bias"):
                    assert_same_bits(got[of][:, head, row], clean[of][:, head, row], f"{of} of row {row}")
                other = np.arange(KV_HEADS) != head // GROUP
                for of in ("key", "value"):
                    assert_same_bits(got[of][:, other], clean[of][:, other], of)


@computes_gradients
@pytest.mark.parametrize("dtype", FLOAT32_FIRST)
@pytest.mark.parametrize("where", ["query", "grad_out", "grad_lse"])
@pytest.mark.parametrize(
    "number", [np.nan, *(pytest.param(it, marks=pytest.mark.slow) for it in (np.inf, -np.inf))]
)
@pytest.mark.parametrize("name", ["top_left", "bottom_right", "window", "lengths", "per_head"])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_a_row_of_nan_reaches_only_the_keys_that_it_reads(engine, name, sizes, number, where, dtype):
    options, allowed = masked_options(*sizes)[name]
    arrays = outputs(engine, problem(*sizes, dtype), **options)
    clean = again(engine, arrays, **options)
    item, head = 1, 2
    for row in sorted({0, sizes[0] // 3, sizes[0] - 1}):
        bad = arrays | {where: arrays[where].copy()}
        bad[where][item, head, row] = number
        if where == "query":
            forward = {name: bad[name] for name in ALL}
            bad["out"], bad["lse"] = engine.attention(**forward, **options, return_lse=True)
        with np.errstate(all="ignore"):
            got = again(engine, bad, **options)
        reads = np.zeros((BATCH, KV_HEADS, sizes[1]), bool)
        reads[item, head // GROUP] = allowed[item, head, row]
        here = np.zeros((BATCH, HEADS, sizes[0]), bool)
        here[item, head, row] = True
        for of in ("key", "value"):
            assert_same_bits(got[of][~reads], clean[of][~reads], f"gradient of {of}")
        assert_same_bits(got["query"][~here], clean["query"][~here], "gradient of query")
        assert_same_bits(got["bias"][~here], clean["bias"][~here], "gradient of bias")
        hidden = ~allowed[item, head, row]
        assert not got["bias"][item, head, row][hidden].any()
        others = np.arange(HEADS) != head
        assert_same_bits(got["sinks"][others], clean["sinks"][others], "gradient of sinks")
        if not reads.any():
            assert_all_same(got, clean)
        elif np.isnan(number):
            assert np.isnan(got["key"][reads]).all()
            assert np.isnan(got["query"][here]).all()
            assert np.isnan(got["sinks"][head])
            assert np.isnan(got["value"][reads]).all() == (where != "grad_lse")


@computes_gradients
@pytest.mark.parametrize("dtype", FLOAT32_FIRST)
@pytest.mark.parametrize("with_sinks", [False, True], ids=["", "sinks"])
@pytest.mark.parametrize("way", ["bool", "bias", "causal", "lengths", "segments", "tiles"])
def test_rows_without_keys_contribute_nothing(engine, way, with_sinks, dtype):
    """Whatever their query and the gradients of their outputs hold; with a sink too."""
    len_q, len_k = 70, 140
    some = np.random.default_rng(0).random((len_q, len_k)) < 0.5
    some[[0, 5, 66, 69]] = False
    arrays = problem(len_q, len_k, dtype, with_bias=False, with_sinks=with_sinks)
    options = {
        "bool": {"mask": some},
        "bias": {},
        "causal": {"mask": masks.Causal(offset=-40)},
        "lengths": {"key_lengths": np.array([0, 20]), "causal": "bottom_right"},
        "segments": {"mask": masks.Segments(np.arange(len_q) % 3, np.arange(len_k) % 2)},
        "tiles": {"mask": masks.Dense(some) & (masks.Causal("top_left") | masks.Window(2, 2))},
    }[way]
    if way == "bias":
        arrays["bias"] = np.where(some, 0.5, -np.inf).astype(dtype)
    weights = engine.attention(**arrays, **options, return_weights=True)[1]
    empty = ~weights.any(axis=-1)
    assert empty.any()
    full = outputs(engine, arrays, **options)
    clean = again(engine, full, **options)
    assert not clean["query"][empty].any()
    for number in (np.nan, np.inf, 1e30, 0.0):
        bad = dict(full)
        for name in ("query", "grad_out", "grad_lse"):
            bad[name] = full[name].copy()
            bad[name][empty] = number
        with np.errstate(all="ignore"):
            assert_all_same(again(engine, bad, **options), clean, f"with {number} in empty rows")


@computes_gradients
@pytest.mark.parametrize("dtype", FLOAT32_FIRST)
def test_nothing_to_read_at_all(engine, dtype):
    arrays = problem(20, 30, dtype)
    for array in arrays.values():
        array[...] = np.nan
    arrays["sinks"][...] = 1.0
    got = backward(engine, arrays, mask=np.zeros((20, 30), bool), grad_out=np.full((2, 4, 20, 9), np.nan))
    for name, gradient in got.items():
        assert not gradient.any(), name


@computes_gradients
@drawn(
    15,
    60,
    seed=st.integers(0, 2**16),
    sizes=st.tuples(st.integers(1, 60), st.integers(1, 140)),
    data=st.data(),
    dtype=st.sampled_from(FLOATS),
)
def test_poison_anywhere(engine, seed, sizes, data, dtype):
    """NaN in any keys and any rows at once: what reads none of them keeps its bits."""
    pair = data.draw(st.sampled_from(mask_pairs_of(sizes, seed)))
    arrays = outputs(engine, problem(*sizes, dtype), mask=pair.mask)
    clean = again(engine, arrays, mask=pair.mask)
    rng = np.random.default_rng(seed)
    bad_rows = rng.random((BATCH, HEADS, sizes[0])) < 0.1
    bad = arrays | {name: arrays[name].copy() for name in ("query", "key", "value", "grad_out")}
    where = data.draw(st.sampled_from(["query", "grad_out", "none"]))
    if where != "none":
        bad[where][bad_rows] = np.nan
    else:
        bad_rows[...] = False
    bad_keys = rng.random((BATCH, KV_HEADS, sizes[1])) < 0.03
    bad["key"][bad_keys] = np.nan
    bad["value"][bad_keys] = -np.inf
    bad["out"], bad["lse"] = engine.attention(
        **{name: bad[name] for name in ALL}, mask=pair.mask, return_lse=True
    )
    with np.errstate(all="ignore"):
        got = again(engine, bad, mask=pair.mask)
    reads_bad = (pair.allowed & np.repeat(bad_keys, GROUP, axis=1)[:, :, None]).any(axis=-1)
    touched = bad_rows | reads_bad
    assert_same_bits(got["query"][~touched], clean["query"][~touched], "gradient of query")
    assert_same_bits(got["bias"][~touched], clean["bias"][~touched], "gradient of bias")
    read_by_touched = of_kv_heads(pair.allowed & touched[..., None]).any(axis=2)
    for name in ("key", "value"):
        kept = ~read_by_touched
        assert_same_bits(got[name][kept], clean[name][kept], f"gradient of {name}")


def mask_pairs_of(sizes, seed):
    return [mask_pair(name, BATCH, HEADS, *sizes, seed % 5) for name in MASK_NAMES]


# ---------------------------------------------------------------- which bits


SHAPES = {
    "many_heads": {"lead": (2,), "heads": 6, "len_q": 70, "len_k": 150},
    "one_head": {"heads": 1, "len_q": 300, "len_k": 300},
    "grouped": {"lead": (2,), "heads": 8, "kv_heads": 2, "len_q": 33, "len_k": 129},
    "one_row": {"lead": (2,), "heads": 4, "kv_heads": 2, "len_q": 1, "len_k": 700},
    "tall": {"lead": (2,), "heads": 1, "len_q": 500, "len_k": 3},
    # Of the rows of a query some are in one query block and some in the next.
    "groups_of_7": {"lead": (2,), "heads": 14, "kv_heads": 2, "len_q": 60, "len_k": 150},
    "small": {"lead": (9,), "heads": 4, "len_q": 4, "len_k": 4},
}


def options_for(shape):
    len_q, len_k, heads = shape["len_q"], shape["len_k"], shape["heads"]
    lead = shape.get("lead", ())
    rng = np.random.default_rng(0)

    def bias(*its):
        return {"bias": rng.standard_normal(its).astype(np.float32)}

    return {
        "plain": {},
        "causal": {"causal": "bottom_right"},
        "window": {"window": (40, 3)},
        "lengths": {"key_lengths": rng.integers(0, len_k + 1, lead)},
        "mask": {"mask": rng.random((len_q, len_k)) < 0.7},
        "tiles": {"mask": masks.Window(20, 1) | masks.GlobalTokens([0])},
        "bias_of_all": bias(len_q, len_k),
        "bias_of_heads": bias(heads, len_q, len_k),
        "bias_of_items": bias(*lead, 1, len_q, len_k),
        "bias_of_keys": bias(len_k),
        "bias_of_rows": bias(len_q, 1),
        "sinks": {"sinks": rng.standard_normal(heads).astype(np.float32), "softcap": 5.0},
        "dropout": {"dropout": 0.3, "seed": 1, "causal": "bottom_right"},
    }


OPTION_NAMES = tuple(options_for(SHAPES["small"]))


def bits_problem(shape, option, dtype):
    """Arrays with what has a gradient, and the options that have none."""
    arrays = random_arrays(**SHAPES[shape], dtype=dtype)
    arrays = dict(zip(("query", "key", "value"), arrays, strict=True))
    options = options_for(SHAPES[shape])[option]
    arrays |= {name: x for name, x in options.items() if name in ALL}
    return arrays, {name: x for name, x in options.items() if name not in ALL}


@computes_gradients
@pytest.mark.parametrize("dtype", FLOAT32_FIRST)
@pytest.mark.parametrize("option", OPTION_NAMES)
@pytest.mark.parametrize("shape", SHAPES)
def test_number_of_threads(engine, shape, option, dtype):
    arrays, options = bits_problem(shape, option, dtype)
    one = backward(engine, arrays, num_threads=1, **options)
    for num_threads in (2, 3, 7, None):
        got = backward(engine, arrays, num_threads=num_threads, **options)
        assert_all_same(got, one, f"with {num_threads} threads")


@computes_gradients
@pytest.mark.parametrize("option", ["plain", "bias_of_all", "bias_of_items", "bias_of_keys"])
@pytest.mark.parametrize("shape", ["one_head", "grouped", "groups_of_7"])
def test_again_and_again(engine, shape, option):
    """A race shows as a run that differs."""
    arrays, options = bits_problem(shape, option, "float32")
    arrays = outputs(engine, arrays, **options)
    first = again(engine, arrays, num_threads=3, **options)
    for _ in range(20 if engine.backend == "cython" else 2):
        assert_all_same(again(engine, arrays, num_threads=3, **options), first)


def of_item(arrays, item):
    """The arrays of one item, with its axis; sinks and a bias of all items as they are."""
    per_item = {"query", "key", "value", "out", "lse", "grad_out", "grad_lse", "key_lengths"}
    return {
        name: x[item : item + 1] if name in per_item or (name == "bias" and x.ndim == 4) else x
        for name, x in arrays.items()
    }


@computes_gradients
@pytest.mark.parametrize("dtype", FLOAT32_FIRST)
@pytest.mark.parametrize("option", OPTION_NAMES)
@pytest.mark.parametrize("shape", [name for name in SHAPES if "lead" in SHAPES[name]])
def test_other_items_of_the_batch(engine, shape, option, dtype):
    arrays, options = bits_problem(shape, option, dtype)
    arrays = outputs(engine, arrays, **options)
    together = again(engine, arrays, **options)
    for item in range(1 if "dropout" in options else 2):  # whose mask depends on the item's place
        alone = again(engine, of_item(arrays, item), **of_item(options, item))
        for name in ("query", "key", "value", *["bias"] * (option == "bias_of_items")):
            assert_same_bits(together[name][item : item + 1], alone[name], name)


@computes_gradients
def test_other_items_full_of_nan(engine):
    arrays, _ = bits_problem("grouped", "bias_of_items", "float32")
    arrays = outputs(engine, arrays)
    clean = again(engine, arrays)
    spoilt = {name: x.copy() for name, x in arrays.items()}
    for array in spoilt.values():
        array[0] = np.nan
    got = again(engine, spoilt)
    for name in clean:
        assert_same_bits(got[name][1], clean[name][1], name)
        assert np.isnan(got[name][0]).all()


@computes_gradients
@pytest.mark.parametrize("dtype", FLOAT32_FIRST)
@pytest.mark.parametrize("option", OPTION_NAMES)
@pytest.mark.parametrize("shape", SHAPES)
def test_layouts(engine, shape, option, dtype):
    arrays, options = bits_problem(shape, option, dtype)
    arrays = outputs(engine, arrays, **options)
    wanted = again(engine, arrays, **options)
    by_heads = ("query", "key", "value", "out", "grad_out")
    swapped = arrays | {name: arrays[name].swapaxes(-2, -3).copy() for name in by_heads}
    got = again(engine, swapped, layout="bshd", **options)
    for name in wanted:
        in_heads = got[name].swapaxes(-2, -3) if name in by_heads else got[name]
        assert_same_bits(np.ascontiguousarray(in_heads), wanted[name], name)


@computes_gradients
@pytest.mark.parametrize("dtype", FLOAT32_FIRST)
def test_ranks(engine, dtype):
    """One head as a matrix, as a stack of one and as a batch of one."""
    arrays = dict(
        zip(("query", "key", "value"), random_arrays(heads=1, len_q=70, len_k=90, dtype=dtype), strict=True)
    )
    arrays = outputs(engine, arrays)
    wanted = again(engine, arrays)
    for shaped in (lambda x: x[0], lambda x: x[None], lambda x: x[None, None]):
        got = again(engine, {name: shaped(x) for name, x in arrays.items()})
        for name in wanted:
            assert_same_bits(got[name], shaped(wanted[name]), name)


# ---------------------------------------------------------------- strides

ARRAYS = (*ALL, "out", "lse", "grad_out", "grad_lse")


@computes_gradients
@pytest.mark.parametrize("dtype", FLOAT32_FIRST)
@pytest.mark.parametrize("layout", MEMORY_LAYOUTS)
@pytest.mark.parametrize("argument", [*ARRAYS, "mask", "all"])
def test_arrays_anywhere_in_memory(engine, argument, layout, dtype):
    arrays = outputs(engine, problem(20, 37, dtype))
    options = {"mask": np.random.default_rng(2).random((HEADS, 20, 37)) < 0.8}
    expected = again(engine, arrays, **options)
    place = MEMORY_LAYOUTS[layout]
    moved = {name: place(x) if argument in (name, "all") else x for name, x in arrays.items()}
    moved_options = {name: place(x) if argument in (name, "all") else x for name, x in options.items()}
    got = again(engine, moved, **moved_options)
    assert_all_same(got, expected)
    for gradient in got.values():
        assert gradient.flags.c_contiguous
        assert gradient.dtype.isnative


@computes_gradients
@pytest.mark.parametrize("dtype", FLOAT32_FIRST)
@pytest.mark.parametrize("axes", [(0,), (1,), (2,), (3,), (0, 1), (2, 3), (0, 1, 2, 3)], ids=str)
@pytest.mark.parametrize("argument", ["query", "key", "value", "out", "lse", "grad_out", "grad_lse", "bias"])
def test_zero_strides(engine, argument, axes, dtype):
    """A gradient still has the shape of its argument: only axes that the call broadcasts are summed."""
    arrays = outputs(engine, problem(20, 37, dtype))
    array = arrays[argument]
    one = array[tuple(slice(0, 1) if axis in axes else slice(None) for axis in range(array.ndim))]
    broadcast = np.broadcast_to(one, array.shape)
    written_out = again(engine, arrays | {argument: broadcast.copy()}, causal="bottom_right")
    assert_all_same(again(engine, arrays | {argument: broadcast}, causal="bottom_right"), written_out)


@computes_gradients
@pytest.mark.parametrize("dtype", FLOAT32_FIRST)
@pytest.mark.parametrize("poison", [np.nan, np.inf, 1e30])
@pytest.mark.parametrize("head_dim", [1, 7, 16, 37, 64])
def test_what_lies_around_the_arrays(engine, head_dim, poison, dtype):
    arrays = random_arrays(
        heads=3, len_q=19, len_k=37, head_dim=head_dim, value_dim=head_dim + 2, dtype=dtype
    )
    arrays = outputs(engine, dict(zip(("query", "key", "value"), arrays, strict=True)))
    inside = {}
    for name, array in arrays.items():
        block = np.full([n + 6 for n in array.shape], poison, dtype)
        inside[name] = block[(slice(3, -3),) * array.ndim]
        inside[name][...] = array
    assert_all_same(again(engine, inside), again(engine, arrays))


# ---------------------------------------------------------------- memory

GUARDED = """
import faulthandler
import itertools

import numpy as np

import fastattn
from fastattn import masks
from tests.process import GuardedArrays

faulthandler.enable()
rng = np.random.default_rng(0)
sizes = [
    # H, K, L, S, D, E
    (1, 1, 1, 1, 1, 1), (2, 1, 3, 5, 7, 9), (1, 1, 17, 33, 16, 16), (4, 2, 33, 129, 24, 40),
    (1, 1, 49, 47, 64, 63), (2, 2, 1, 300, 64, 64), (1, 1, 130, 97, 37, 53), (3, 1, 16, 128, 80, 96),
]
calls = 0
for dtype, (H, K, L, S, D, E) in itertools.product(DTYPES, sizes):
    arrays = {
        "query": rng.standard_normal((H, L, D)).astype(dtype),
        "key": rng.standard_normal((K, S, D)).astype(dtype),
        "value": rng.standard_normal((K, S, E)).astype(dtype),
    }
    allowed = rng.random((H, L, S)) < 0.6
    extras = [
        {},
        {"mask": allowed},
        {"mask": allowed[:1, :1] * np.int32(3)},
        {"bias": rng.standard_normal((H, L, S)).astype(dtype)},
        {"bias": rng.standard_normal((L, S)).astype(np.float16)},
        {"bias": rng.standard_normal((1, S)).astype(np.float64)},
        {"sinks": rng.standard_normal(H).astype(dtype)},
        {"causal": "bottom_right"},
        {"key_lengths": S // 2, "window": (5, 5)},
        {"mask": masks.Window(3, 3) | masks.GlobalTokens([0])},
    ]
    for extra, at_end, slow_axis in itertools.product(extras, (False, True), (False, True)):
        given = arrays | extra
        out, lse = fastattn.attention(**given, return_lse=True)
        given |= {"out": out, "lse": lse, "grad_out": out * 2, "grad_lse": lse * 0 + 1}
        if "key_lengths" in extra:
            given["grad_lse"] = np.ones_like(lse)
        guarded = GuardedArrays()
        placed = {}
        for name, array in given.items():
            if not isinstance(array, np.ndarray):
                placed[name] = array
            elif slow_axis and array.ndim > 1:
                placed[name] = guarded.place(array.swapaxes(-1, -2).copy(), at_end=at_end).swapaxes(-1, -2)
            else:
                placed[name] = guarded.place(array, at_end=at_end)
        wrt = ["query", "key", "value", *(name for name in ("bias", "sinks") if name in extra)]
        with np.errstate(all="ignore"):
            expected = fastattn.attention_backward(**given, wrt=wrt)
            for num_threads in (1, 2):
                got = fastattn.attention_backward(**placed, wrt=wrt, num_threads=num_threads)
                for name in wrt:
                    same = getattr(got, name).tobytes() == getattr(expected, name).tobytes()
                    assert same, (name, dtype, H, K, L, S, D, E, list(extra))
        calls += 1
print(calls)
"""


@on_cython  # the reference reads memory by NumPy alone
@pytest.mark.skipif(sys.platform == "win32", reason="needs mprotect")
@pytest.mark.parametrize(
    "dtypes", [["float32"], pytest.param(["float16", "float64"], marks=pytest.mark.slow)], ids="+".join
)
def test_nothing_outside_the_arrays_is_touched(engine, dtypes):
    printed = python(f"DTYPES = {dtypes}\n{GUARDED}", env=engine.environment(), timeout=600)
    assert int(printed) == len(dtypes) * 8 * 10 * 2 * 2


MEASURE = (
    SCRIPT.split("rng = ")[0].replace("LENGTH, DIM = 32768, 64", "LENGTH, DIM = {length}, 64")
    + """
def call(length):
    rng = np.random.default_rng(0)
    query, key, value, grad_out = rng.standard_normal((4, 1, length, DIM), dtype=np.float32)
    options, wrt = {options}, ["query", "key", "value", *{more}]
    out, lse = fastattn.attention(query, key, value, return_lse=True, **options)
    made = []
    def work():
        made.append(fastattn.attention_backward(grad_out, query, key, value, out, lse, wrt=wrt, **options))
    used = extra(work)
    return used - sum(gradient.nbytes for gradient in made[0] if gradient is not None)

call(256)  # imports and thread stacks
print(call(LENGTH))
"""
)


def measure(engine, length, options="{}", more=(), threads="1"):
    """The most memory in use during a call, beyond its arrays and its gradients."""
    code = MEASURE.replace("{length}", str(length)).replace("{options}", options)
    environment = engine.environment() | {"FASTATTN_NUM_THREADS": threads}
    return int(python(code.replace("{more}", repr(more)), env=environment, timeout=240))


@pytest.mark.slow
@computes_gradients
@without(lambda engine, options: options != "{}" and engine not in OF_ONE_ISA)
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc/self/status")
@pytest.mark.parametrize(
    ("options", "more", "threads"),
    [
        ("{}", (), "1"),
        ("dict(causal=True)", (), "1"),
        ("dict(causal=True)", (), "3"),
        ("dict(window=(256, 0), sinks=np.ones(1, np.float32))", ("sinks",), "1"),
        ("dict(bias=rng.standard_normal(length, dtype=np.float32))", ("bias",), "1"),
        ("dict(bias=rng.standard_normal((length, 1), dtype=np.float32))", ("bias",), "1"),
        ("dict(mask=masks.Segments(np.arange(length) // 512, np.arange(length) // 512))", (), "1"),
    ],
)
def test_memory_does_not_grow_with_the_scores(engine, options, more, threads):
    """Those of 8192 queries and keys would take 256 MB, those of 4096 a quarter of it."""
    is_slow = engine.isa == "amx_model" or engine.backend == "reference"
    length, most = (4096, 24) if is_slow else (8192, 64)
    extra = measure(engine, length, options, more, threads)
    assert extra < most * 2**20, f"{extra / 2**20:.1f} MiB"


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc/self/status")
def test_memory_of_a_moderate_length():
    """The same in the default run."""
    extra = measure(Engine("cython"), 4096)
    assert extra < 24 * 2**20, f"{extra / 2**20:.1f} MiB"
