"""Every mask object of `tests.cases.mask_pairs` under every rule: the matrix of the two stands here alone.

What is true of some masks only, their errors and their repr are in the files ``test_masks*.py``.
"""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest

from fastattn import masks
from fastattn.masks import base
from fastattn.masks.map import EMPTY, FULL
from tests import test_backward_rules, test_rules_nan
from tests.cases import MASK_NAMES, MASK_SIZES, mask_pair, mask_pairs, random_arrays
from tests.conftest import ISAS, computes_gradients, without
from tests.masks_as_arrays import BLOCKS, as_array, block_mask, part_of, parts_of
from tests.test_backward import check
from tests.test_dropout import DROP, drops_weights
from tests.tolerances import assert_attention

every_mask = pytest.mark.parametrize("name", MASK_NAMES)
#: Of each kind, where all would take long.
OF_EACH_KIND = ("segments_sorted", "segments_any_order_per_item", "prefix", "longformer", "and_of_or",
                "not_longformer", "not_and_nothing", "dense_integer_per_head")  # fmt: skip
#: Kernels know intervals, arrays and tiles: the other instruction sets need no more than these.
few_on_other_isas = without(
    lambda engine, name: engine.isa not in (None, *ISAS[:1]) and name not in OF_EACH_KIND
)


def slow(*sizes):
    return [pytest.param(it, marks=pytest.mark.slow) for it in sizes]


# ---------------------------------------------------------------- the objects


@pytest.mark.parametrize("sizes", [*MASK_SIZES, (0, 0), (0, 5), (5, 0)], ids=str)
def test_materialize_and_lower_are_the_definition(sizes):
    for name in MASK_NAMES if 0 not in sizes else [pair.name for pair in mask_pairs(2, 3, *sizes)]:
        for seed in range(3):
            pair = mask_pair(name, 2, 3, *sizes, seed)
            got = pair.mask.materialize(3, *sizes)
            assert got.dtype == bool
            assert got.shape[-3:] == (3, *sizes)
            np.testing.assert_array_equal(np.broadcast_to(got, pair.allowed.shape), pair.allowed, name)
            lowered = base.lower(pair.mask, (2,), 3, *sizes)
            np.testing.assert_array_equal(as_array(lowered, pair.allowed.shape), pair.allowed, name)


def test_each_mask_is_among_the_pairs():
    """Alone, beside what it is combined to. A `BlockMask` is a map of tiles, of which some tests make one."""
    alone = {type(pair.mask).__name__ for pair in mask_pairs(1, 1, 2, 2)}
    assert not set(masks.__all__) - alone - {"Mask", "BlockMask"}


@every_mask
def test_is_a_value(name):
    mask = mask_pair(name, 2, 2, 5, 9).mask
    assert pickle.loads(pickle.dumps(mask)) == copy.deepcopy(mask) == mask
    assert ~~mask == mask and repr(~~mask) == repr(mask)
    for attribute in (*getattr(mask, "__dataclass_fields__", ()), "other"):
        with pytest.raises((AttributeError, TypeError)):
            setattr(mask, attribute, 1)


@every_mask
@pytest.mark.parametrize("whole", BLOCKS, ids=str)
def test_a_block_and_a_block_of_a_block(name, whole):
    pair = mask_pair(name, 2, 2, *whole)
    for block in BLOCKS[whole]:
        wanted = part_of(pair.allowed, block)
        part = pair.mask.shifted(*block[:2], size=whole)
        np.testing.assert_array_equal(np.broadcast_to(part.materialize(2, *block[2:]), wanted.shape), wanted)
        row, key = block[0] // 2, block[1] // 2
        half = pair.mask.shifted(row, key, size=whole)
        part = half.shifted(block[0] - row, block[1] - key, size=(whole[0] - row, whole[1] - key))
        np.testing.assert_array_equal(np.broadcast_to(part.materialize(2, *block[2:]), wanted.shape), wanted)


@pytest.mark.parametrize("name", [*MASK_NAMES, "map_of_tiles"])
@pytest.mark.parametrize("whole", BLOCKS, ids=str)
def test_parts(name, whole):
    states_of_keys = pytest.importorskip("fastattn.integrations.dask")._states_of_keys
    pair = mask_pair("and_of_or" if name == "map_of_tiles" else name, 2, 2, *whole)
    mask = block_mask(pair.allowed) if name == "map_of_tiles" else pair.mask
    for part, blocks in parts_of(whole):
        for keys, state in zip(blocks, states_of_keys(mask, part, blocks), strict=True):
            wanted = pair.allowed[part.items[0], part.heads, part.queries, keys]
            own = base.lower(mask._cut(part._replace(keys=keys)), wanted.shape[:1], *wanted.shape[1:])
            np.testing.assert_array_equal(as_array(own, wanted.shape), wanted)
            assert (state == EMPTY) == (not wanted.any())
            assert state != FULL or wanted.all()


# ---------------------------------------------------------------- attention


@every_mask
@few_on_other_isas
@pytest.mark.parametrize("sizes", [(5, 9), (70, 150), *slow((129, 129), (150, 70))], ids=str)
def test_attention_is_the_definition(engine, name, sizes):
    heads, kv_heads = {5: (4, 2), 70: (2, 1)}.get(sizes[0], (1, 1))  # it takes long over many rows
    pair = mask_pair(name, 2, heads, *sizes)
    arrays = random_arrays(
        lead=(2,), heads=heads, kv_heads=kv_heads, len_q=sizes[0], len_k=sizes[1], head_dim=8
    )
    assert_attention(engine.everything(*arrays, mask=pair.mask), *arrays, mask=pair.allowed)


@every_mask
@few_on_other_isas
@pytest.mark.parametrize("sizes", [*test_rules_nan.SIZES[:2], *slow(*test_rules_nan.SIZES[2:])], ids=str)
def test_a_row_sees_nothing_that_is_masked(engine, name, sizes):
    pair = mask_pair(name, test_rules_nan.BATCH, test_rules_nan.HEADS, *sizes)
    arrays, poisons = test_rules_nan.problem(*sizes), test_rules_nan.POISONS[:2]
    test_rules_nan.assert_row_sees_nothing_masked(engine, arrays, pair.allowed, {"mask": pair.mask}, poisons)


@drops_weights
@every_mask
@few_on_other_isas
def test_dropout(engine, name):
    pair = mask_pair(name, 2, 3, 40, 130)
    arrays = random_arrays(2, lead=(2,), heads=3, len_q=40, len_k=130, head_dim=8)
    options = DROP | {"sinks": np.ones(3, np.float32)}
    assert_attention(
        engine.everything(*arrays, mask=pair.mask, **options), *arrays, mask=pair.allowed, **options
    )


@computes_gradients
@every_mask
@few_on_other_isas
@pytest.mark.parametrize("sizes", [(20, 35), (65, 33), (130, 260)], ids=str)
@without(lambda name, sizes: sizes != (20, 35) and name not in OF_EACH_KIND)
def test_gradients(engine, name, sizes):
    batch, heads = (2, 4) if sizes == (20, 35) else (1, 1)
    pair = mask_pair(name, batch, heads, *sizes)
    arrays = random_arrays(4, lead=(batch,), heads=heads, len_q=sizes[0], len_k=sizes[1])
    sinks = {"sinks": np.linspace(-1, 1, heads, dtype=np.float32)} if heads > 1 else {}
    check(engine, arrays, {"mask": pair.mask} | sinks, {"mask": pair.allowed} | sinks)


@computes_gradients
@every_mask
@few_on_other_isas
@pytest.mark.parametrize(
    "sizes", [*test_backward_rules.SIZES[:2], *slow(*test_backward_rules.SIZES[2:])], ids=str
)
def test_gradients_of_masked_keys_are_0_whatever_they_hold(engine, name, sizes):
    pair = mask_pair(name, test_backward_rules.BATCH, test_backward_rules.HEADS, *sizes)
    arrays, options = test_backward_rules.problem(*sizes), {"mask": pair.mask}
    test_backward_rules.assert_masked_keys_are_never_seen(engine, arrays, options, pair.allowed)


@every_mask
def test_dask(name):
    pytest.importorskip("dask")
    from tests import test_integrations_dask as dask

    pair = mask_pair(name, 2, dask.HEADS, dask.LEN_Q, dask.LEN_K)
    arrays, _ = dask.problem()
    for chunks in ((1, 2, 2, -1), (2, 4, 3, -1)):
        results = dask.attention(*dask.divided(*arrays, chunks=chunks), mask=pair.mask, return_lse=True)
        assert_attention(dask.computed(results), *arrays, mask=pair.allowed)
