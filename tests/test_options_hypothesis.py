"""All options together: random sizes, types, layouts, strides, masks and numbers.

`test_forward.py` holds what is computed to the definition.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from tests import cases
from tests.conftest import drawn
from tests.tolerances import assert_all_same, assert_same_bits

LENGTHS = st.one_of(st.integers(0, 12), st.sampled_from([31, 32, 33, 47, 48, 49, 65, 127, 129, 130]))
DIMS = st.one_of(st.integers(1, 20), st.sampled_from([31, 33, 40, 53, 64, 65, 270, 300]))
LEADS = st.one_of(st.tuples(st.integers(0, 3)), st.sampled_from([(), (2, 2), (2, 1, 3), (40,)]))
PLACES = st.sampled_from(tuple(cases.MEMORY_LAYOUTS))
MAX_ROWS = 1500  #: of queries in all: the definition takes them one by one


@st.composite
def sizes(draw):
    kv_heads = draw(st.integers(1, 3))
    lead, heads = draw(LEADS), kv_heads * draw(st.integers(1, 3))
    return {
        "lead": lead,
        "heads": heads,
        "kv_heads": kv_heads,
        "len_q": min(draw(LENGTHS), MAX_ROWS // max(1, heads * math.prod(lead))),
        "len_k": draw(LENGTHS),
        "head_dim": draw(DIMS),
        "value_dim": draw(st.one_of(st.just(0), DIMS)),
    }


@st.composite
def score_shape(draw, full):
    """A shape that broadcasts to `full` = (..., H, L, S)."""
    dropped = draw(st.integers(0, len(full)))
    return tuple(draw(st.sampled_from([n, 1])) for n in full[dropped:])


def place(draw, array):
    return cases.MEMORY_LAYOUTS[draw(PLACES)](array) if array.ndim else array


@st.composite
def problems(draw, any_size=None):
    """Arrays, options for the package, and the same options with the mask as an array for the definition."""
    size = draw(sizes() if any_size is None else any_size)
    dtype = draw(st.sampled_from(cases.FLOATS))
    seed = draw(st.integers(0, 2**16))
    spread = draw(st.sampled_from([1.0, 0.1, 6.0, 30.0]))
    arrays = cases.random_arrays(seed, **size, dtype=dtype, spread=spread)
    rng = np.random.default_rng(seed + 1)
    lead, heads = size["lead"], size["heads"]
    len_q, len_k = size["len_q"], size["len_k"]
    full = (*lead, heads, len_q, len_k)

    given_to_both = {}
    causal = draw(st.sampled_from([False, "top_left", "bottom_right"] + [True] * (len_q == len_k)))
    if causal:
        given_to_both["causal"] = causal
    bound = st.one_of(st.none(), st.integers(0, len_k + 2))
    if draw(st.booleans()):
        given_to_both["window"] = (draw(bound), draw(bound))
    if draw(st.booleans()):
        given_to_both["key_lengths"] = rng.integers(
            0, len_k + 1, draw(st.sampled_from([(), lead, (1,) * len(lead)]))
        )
    if draw(st.booleans()):
        given_to_both["scale"] = draw(st.sampled_from([0.0, 1.0, -0.7, 0.125, 5.0, 1e-30]))
    if draw(st.booleans()):
        given_to_both["softcap"] = draw(st.sampled_from([0.01, 0.5, 5.0, 50.0]))
    if draw(st.booleans()):
        given_to_both["sinks"] = place(
            draw, rng.standard_normal(heads).astype(draw(st.sampled_from(cases.FLOATS)))
        )
    if draw(st.booleans()):
        bias = rng.standard_normal(draw(score_shape(full)))
        bias[rng.random(bias.shape) < draw(st.sampled_from([0.0, 0.3]))] = -np.inf
        bias_dtype = draw(st.sampled_from(["float16", *cases.FLOATS]))
        given_to_both["bias"] = place(draw, bias.astype(bias_dtype))

    ours, theirs = dict(given_to_both), dict(given_to_both)
    kind = draw(st.sampled_from(["none", "array", "object"] if len(lead) == 1 else ["none", "array"]))
    if kind == "array":
        mask = rng.random(draw(score_shape(full))) < draw(st.sampled_from([0.1, 0.7]))
        mask = mask.astype(draw(st.sampled_from([bool, np.int8, np.int64])))
        ours["mask"] = theirs["mask"] = place(draw, mask)
    elif kind == "object":
        pair = draw(st.sampled_from(cases.mask_pairs(*lead, heads, len_q, len_k, seed)))
        event(pair.name)
        ours["mask"], theirs["mask"] = pair.mask, pair.allowed
    return tuple(place(draw, array) for array in arrays), ours, theirs


@drawn(
    20, 80,
    problem=problems(), place_of_out=st.sampled_from(["contiguous", "fortran", "reversed", "every_other"]),
)  # fmt: skip
def test_out_and_repetition(engine, problem, place_of_out):
    """The same bits once more, with one thread, alone, and into an `out` of any strides."""
    arrays, ours, _ = problem
    out, _, _ = engine.everything(*arrays, num_threads=3, **ours)
    target = cases.MEMORY_LAYOUTS[place_of_out](np.full(out.shape, 7.0, out.dtype))
    engine.attention(*arrays, num_threads=1, out=target, **ours)
    assert_same_bits(np.ascontiguousarray(target), out)


@pytest.mark.slow
@settings(max_examples=100)
@given(problem=problems())
def test_poison_in_all_that_is_masked(engine, problem):
    """NaN in keys and values that no query of the batch item's heads may read changes no bit."""
    arrays, ours, theirs = problem
    query, key, value = (np.array(array.astype(array.dtype.newbyteorder("="))) for array in arrays)
    rules = {name: theirs.get(name) for name in ("mask", "bias", "window", "key_lengths")}
    lead, (heads, len_q), (kv_heads, len_k) = query.shape[:-3], query.shape[-3:-1], key.shape[-3:-1]
    allowed = cases.naive.allowed_keys(lead, heads, len_q, len_k, causal=theirs.get("causal", False), **rules)
    unread = ~allowed.reshape(*lead, kv_heads, heads // kv_heads, len_q, len_k).any(axis=(-3, -2))
    clean = engine.everything(query, key, value, **ours)
    key[unread], value[unread] = np.nan, np.nan
    assert_all_same(engine.everything(query, key, value, **ours), clean)
