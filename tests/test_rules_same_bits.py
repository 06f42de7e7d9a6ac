"""Rule 7: the bits depend on the problem alone.

Not on `num_threads`, on the other items of the batch, on the layout or the strides (`test_rules_strides`),
nor on what lies outside the arrays.
"""

from __future__ import annotations

import numpy as np
import pytest

from fastattn import masks
from fastattn._machine.constants import FUSED_ROWS
from tests.cases import FLOATS, few_rows, random_arrays
from tests.conftest import on_compiled
from tests.tolerances import assert_all_same, assert_same_bits

#: Many tasks, few tasks, one task that can only be split over its keys, and ragged ones.
SHAPES = {
    "many_heads": {"lead": (2,), "heads": 6, "len_q": 70, "len_k": 150},
    "one_head": {"heads": 1, "len_q": 300, "len_k": 300},
    "grouped": {"lead": (2,), "heads": 8, "kv_heads": 2, "len_q": 33, "len_k": 129},
    "decode": {"lead": (3,), "heads": 4, "kv_heads": 2, "len_q": 1, "len_k": 3000},
    "decode_one_head": {"heads": 1, "len_q": 1, "len_k": 20000, "head_dim": 8},
    "tall": {"heads": 1, "len_q": 1000, "len_k": 3},
    "small": {"lead": (16,), "heads": 4, "len_q": 4, "len_k": 4},
}


def options_for(shape):
    len_q, len_k = shape["len_q"], shape["len_k"]
    lead = shape.get("lead", ())
    rng = np.random.default_rng(0)
    return {
        "plain": {},
        "causal": {"causal": "bottom_right"},
        "window": {"window": (40, 3)},
        "lengths": {"key_lengths": rng.integers(0, len_k + 1, lead)},
        "mask": {"mask": rng.random((len_q, len_k)) < 0.7},
        "tiles": {"mask": masks.Window(20, 1) | masks.GlobalTokens([0])},
        "bias": {"bias": rng.standard_normal((len_q, len_k)).astype(np.float32)},
        "sinks": {"sinks": rng.standard_normal(shape["heads"]), "softcap": 5.0},
    }


OPTION_NAMES = tuple(options_for(SHAPES["small"]))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("option", OPTION_NAMES)
@pytest.mark.parametrize("shape", SHAPES)
def test_number_of_threads(engine, shape, option, dtype):
    arrays = random_arrays(**SHAPES[shape], dtype=dtype)
    options = options_for(SHAPES[shape])[option]
    one = engine.everything(*arrays, num_threads=1, **options)
    for num_threads in (2, 3, 7, None):
        assert_all_same(engine.everything(*arrays, num_threads=num_threads, **options), one)


@pytest.mark.parametrize("shape", ["one_head", "decode_one_head"])
def test_again_and_again(engine, shape):
    """A race shows as a run that differs."""
    arrays = random_arrays(**SHAPES[shape])
    first = engine.everything(*arrays, num_threads=3)
    for _ in range(30):
        assert_all_same(engine.everything(*arrays, num_threads=3), first)


def only(options, item):
    """The options of one batch item."""
    return {name: part[item : item + 1] if name == "key_lengths" else part for name, part in options.items()}


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("option", OPTION_NAMES)
@pytest.mark.parametrize("shape", [name for name in SHAPES if "lead" in SHAPES[name]])
def test_other_items_of_the_batch(engine, shape, option, dtype):
    arrays = random_arrays(**SHAPES[shape], dtype=dtype)
    options = options_for(SHAPES[shape])[option]
    together = engine.everything(*arrays, **options)
    for item in range(min(SHAPES[shape]["lead"][0], 3)):
        alone = engine.everything(*(array[item : item + 1] for array in arrays), **only(options, item))
        assert_all_same([got[item : item + 1] for got in together], alone)


def test_other_items_full_of_nan(engine):
    arrays = random_arrays(**SHAPES["grouped"])
    clean = engine.everything(*arrays)
    spoilt = [array.copy() for array in arrays]
    for array in spoilt:
        array[0] = np.nan
    results = engine.everything(*spoilt)
    assert_all_same([got[1] for got in results], [wanted[1] for wanted in clean])
    assert np.isnan(results[0][0]).all()


def test_a_batch_item_without_its_axis(engine):
    arrays = random_arrays(**SHAPES["many_heads"])
    together = engine.everything(*arrays)
    alone = engine.everything(*(array[1] for array in arrays))
    assert_all_same([got[1] for got in together], alone)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("poison", [np.nan, np.inf, 1e30])
@pytest.mark.parametrize("head_dim", [1, 7, 16, 37, 64])
def test_what_lies_around_the_arrays(engine, head_dim, poison, dtype):
    """Each array in the middle of a poisoned one, which has elements before and after it in the same rows."""
    arrays = random_arrays(
        heads=3, len_q=19, len_k=37, head_dim=head_dim, value_dim=head_dim + 2, dtype=dtype
    )
    expected = engine.everything(*arrays)
    inside = []
    for array in arrays:
        block = np.full([n + 6 for n in array.shape], poison, dtype)
        view = block[3:-3, 3:-3, 3:-3]
        view[...] = array
        inside.append(view)
    assert_all_same(engine.everything(*inside), expected)


@pytest.mark.parametrize("offset", range(0, 64, 4))
def test_alignment_in_memory(engine, offset):
    arrays = random_arrays(heads=3, len_q=19, len_k=37)
    expected = engine.everything(*arrays)
    moved = []
    for array in arrays:
        raw = np.zeros(array.nbytes + 128, np.uint8)
        start = -raw.ctypes.data % 64 + offset
        view = raw[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
        view[...] = array
        moved.append(view)
    assert_all_same(engine.everything(*moved), expected)


def test_what_out_held_before(engine):
    arrays = random_arrays(lead=(2,), len_q=70, len_k=150)
    expected = engine.attention(*arrays, causal="top_left")
    for number in (np.nan, np.inf, -0.0):
        out = np.full(expected.shape, number, np.float32)
        assert_same_bits(engine.attention(*arrays, causal="top_left", out=out), expected)


@on_compiled
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(
    ("most", "few"),
    [(700, FUSED_ROWS), (FUSED_ROWS - 1, 17), (None, 1)],
    ids=["many_rows", "some_rows", "few_rows"],
)
def test_other_rows_of_the_window(engine, most, few, dtype):
    """The boundaries of a row's partial sums must not depend on the other rows of its query block, nor on
    their windows.

    Split-KV, the sweep and the fused sweep each add in another order: each is compared with itself.
    """
    is_few = most is None
    most = few_rows(dtype, engine.backend) if is_few else most
    query, key, value = random_arrays(7, heads=1, len_q=most, len_k=700, head_dim=16, dtype=dtype)
    together = engine.attention(query, key, value, mask=masks.Window(250, 0))
    for stop in range(few, most + 1) if is_few else range(min(most, 300), most + 1, 13):
        rows, upto = slice(stop - few, stop), slice(0, 700 - most + stop)
        alone = engine.attention(
            query[..., rows, :], key[..., upto, :], value[..., upto, :], mask=masks.Window(250, 0)
        )
        assert_same_bits(together[..., rows, :], alone)
