"""The fused sweep, on the tile unit or on its model: what its pipeline, groups and permission add."""

from __future__ import annotations

import sys

import numpy as np
import pytest

import fastattn
from fastattn import masks
from fastattn._machine.constants import BLOCK_K, EXTENDED, FUSED_KEYS, FUSED_LANES, FUSED_ROWS
from tests.cases import random_arrays
from tests.conftest import ENGINES, ISAS
from tests.process import python
from tests.tolerances import assert_all_same, assert_attention, assert_same_bits

FUSED_ISAS = [isa for isa, own in EXTENDED.items() if own["source"] == "fused.c"]
FUSED = [engine for engine in ENGINES if engine.isa in FUSED_ISAS]
pytestmark = [
    pytest.mark.skipif(not FUSED, reason="no fused kernels here"),
    pytest.mark.parametrize("engine", FUSED, ids=lambda engine: engine.name, indirect=True),
]

TILES = 5


def many_tiles(seed=0, **sizes):
    """Few query blocks over several key tiles: units of the pipeline are of different tiles."""
    return random_arrays(
        seed, **({"len_q": FUSED_ROWS + 3, "len_k": TILES * BLOCK_K + 17, "head_dim": 20} | sizes)
    )


SPARSE = {
    "every key": {},
    "causal": {"causal": "bottom_right"},
    "window": {"window": (300, 0)},
    "far tiles": {"mask": np.arange(TILES * BLOCK_K + 17) // BLOCK_K % 2 == 0},
    # A head's tile may not take the place of one that a unit in the pipeline still reads.
    **{
        f"tiles {tiles}": {"mask": np.isin(np.arange(TILES * BLOCK_K + 17) // BLOCK_K, tiles)}
        for tiles in ((0, 3), (1, 4), (0, 1, 4), (0, 2, 5), (0, 3, 4))
    },
    "one key of each tile": {"mask": np.arange(TILES * BLOCK_K + 17) % BLOCK_K == 77},
    "first keys": {"mask": masks.Window(40, 0) | masks.GlobalTokens([0])},
    "ends within a group": {"key_lengths": 2 * BLOCK_K + FUSED_LANES + 7},
}


@pytest.mark.parametrize("name", SPARSE)
def test_units_of_different_key_tiles(engine, name):
    """Whatever a task is: one block, whose consecutive units are of consecutive tiles, or many blocks."""
    arrays = many_tiles()
    alone = engine.attention(*arrays, **SPARSE[name], num_threads=1, return_lse=True)
    options = dict(SPARSE[name])
    if isinstance(options.get("mask"), masks.Mask):
        options["mask"] = options["mask"].materialize(2, FUSED_ROWS + 3, TILES * BLOCK_K + 17)
    assert_attention(alone, *arrays, **options)
    for num_threads in (2, 3, 7):
        together = engine.attention(*arrays, **SPARSE[name], num_threads=num_threads, return_lse=True)
        for got, expected in zip(together, alone, strict=True):
            assert_same_bits(got, expected, f"{num_threads} threads")


def test_blocks_of_several_heads(engine):
    """A task has the blocks of several heads, the first and the last of which it may share."""
    arrays = random_arrays(
        1, lead=(3,), heads=5, len_q=FUSED_ROWS + 40, len_k=FUSED_KEYS + 5, head_dim=33, value_dim=7
    )
    together = engine.attention(*arrays, num_threads=2)
    assert_attention((together,), *arrays)
    for item in range(3):
        alone = engine.attention(*(array[item, 2:4] for array in arrays))
        assert_same_bits(together[item, 2:4], alone)


def test_lengths_of_the_other_items(engine):
    """What decides for the fused sweep is not how many keys the longest item has."""
    len_q, few = FUSED_ROWS + 5, FUSED_KEYS - 9
    query, key, value = random_arrays(3, lead=(2,), len_q=len_q, len_k=700, head_dim=24)
    together = engine.attention(query, key, value, key_lengths=[few, 700])
    cut = key[:1, :, :few], value[:1, :, :few]
    assert_same_bits(engine.attention(query[:1], *cut, key_lengths=[few]), together[:1])


def test_lengths_of_no_keys_at_all(engine):
    query, key, value = random_arrays(3, lead=(2,), len_q=FUSED_ROWS, len_k=0)
    out, lse = engine.attention(query, key, value, key_lengths=[0, 0], return_lse=True)
    np.testing.assert_array_equal(out, 0)
    np.testing.assert_array_equal(lse, -np.inf)


@pytest.mark.parametrize("len_k", [2, FUSED_KEYS - 1, FUSED_KEYS])
def test_pages_decide_as_the_array_does(engine, len_k):
    """A few keys in pages, or in int8, have no lengths of their own: the bits are those of the array."""
    query, key, value = random_arrays(3, lead=(2,), len_q=FUSED_ROWS, len_k=len_k)
    expected = engine.attention(query, key, value)
    pages = (fastattn.Paged(array, np.arange(2)[:, None]) for array in (key, value))
    assert_same_bits(engine.attention(query, *pages), expected)
    rows = [fastattn.Quantized.encode(array) for array in (key, value)]
    expected = engine.attention(query, *(array.decode() for array in rows))
    assert_same_bits(engine.attention(query, *rows), expected)


def test_a_group_that_blocks_split_differently(engine):
    """Documents end within a group of 32 keys, in any order of the blocks."""
    ids = np.repeat([3, 1, 2, 0], [50, 30, 45, 75])
    arrays = random_arrays(2, len_q=200, len_k=200, head_dim=16)
    for order in (ids, ids[::-1]):
        out = engine.attention(*arrays, mask=masks.Segments(order, ids))
        assert_attention((out,), *arrays, mask=order[:, None] == ids)


def exact(query, key, value):
    query, key, value = (np.asarray(array, np.longdouble) for array in (query, key, value))
    scores = query @ np.swapaxes(key, -1, -2) / np.sqrt(np.longdouble(query.shape[-1]))
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return weights @ value / weights.sum(-1, keepdims=True)


@pytest.mark.parametrize("which", ["query", "key"])
@pytest.mark.parametrize("number", [2.0**59, 2.0**61, -3e30, 1e-38, 1e-45, np.inf, -np.inf, np.nan])
def test_a_number_that_has_no_parts(engine, which, number):
    """A score of it is what the other kernels give; all other rows keep their bits."""
    arrays = dict(
        zip(("query", "key", "value"), random_arrays(3, heads=1, len_q=100, len_k=300), strict=True)
    )
    before = engine.attention(*arrays.values())
    arrays[which][0, 41, 5] = number
    got = engine.attention(*arrays.values())
    with np.errstate(all="ignore"):
        expected = exact(*arrays.values())
    np.testing.assert_array_equal(np.isnan(got), np.isnan(expected))
    finite = np.isfinite(expected)
    if abs(number) < 1 or not np.isfinite(number):
        np.testing.assert_allclose(got[finite], expected[finite].astype(np.float32), atol=2e-6)
    if which == "query":
        others = np.arange(100) != 41
        assert_same_bits(got[:, others], before[:, others])


@pytest.mark.parametrize("number", [1e-25, -1e-38, 1e-45, 2.0**121, 3e38, np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("masked", [False, True])
def test_a_value_that_has_no_parts(engine, number, masked):
    query, key, value = random_arrays(4, heads=1, len_q=100, len_k=300, value_dim=20)
    allowed = np.random.default_rng(5).random((100, 300)) < 0.7
    bias = np.where(allowed, 0, -np.inf).astype(np.float32)
    before = {
        name: engine.attention(query, key, value, **{name: x})
        for name, x in [("mask", allowed), ("bias", bias)]
    }
    if masked:
        allowed[:, 123] = False
        bias[:, 123] = -np.inf
        before = {
            name: engine.attention(query, key, value, **{name: x})
            for name, x in [("mask", allowed), ("bias", bias)]
        }
    value[0, 123, 9] = number
    for name, x in [("mask", allowed), ("bias", bias)]:
        got = engine.attention(query, key, value, **{name: x})
        reads = allowed[:, 123]
        assert_same_bits(got[0][~reads], before[name][0][~reads])
        others = np.arange(20) != 9
        assert_same_bits(got[..., others], before[name][..., others])
        if not masked:
            assert_attention((got,), query, key, value, **{name: x})


@pytest.mark.parametrize("power", [-130, -100, -66, 62, 100, 119])
def test_values_keep_float32s_relative_accuracy(engine, power):
    """Tiny or huge throughout: products of their parts would lose bits, or overflow."""
    query, key, value = random_arrays(6, heads=1, len_q=70, len_k=90)
    usual = engine.attention(query, key, value)
    scaled = engine.attention(query, key, np.ldexp(value, power))
    tiny = np.finfo(np.float32).smallest_subnormal
    np.testing.assert_allclose(
        scaled, np.ldexp(usual, power), rtol=2e-5, atol=max(4 * tiny, 2.0 ** (power - 23))
    )


@pytest.mark.parametrize(("of_query", "of_key"), [(-120, 100), (-60, 59), (100, -110), (70, -80)])
def test_scores_of_unlike_factors(engine, of_query, of_key):
    """Where one is tiny and the other huge their product is not."""
    query, key, value = random_arrays(7, heads=1, len_q=70, len_k=90)
    query, key = np.ldexp(query, of_query), np.ldexp(key, of_key)
    assert_attention((engine.attention(query, key, value),), query, key, value)


def test_weights_belong_to_the_output(engine):
    arrays = many_tiles(8, heads=1)
    out, lse, weights = engine.everything(*arrays, causal="bottom_right")
    np.testing.assert_allclose(weights.sum(-1), 1, atol=1e-5)
    plain = engine.attention(*arrays, causal="bottom_right", return_lse=True)
    assert_all_same(plain, (out, lse))


@pytest.mark.parametrize("head_dim", [1, 20])
def test_weights_in_16_bits_have_room(engine, head_dim):
    """A block's rows of weights on their way to 16 bits are more than a tile of narrow keys."""
    arrays = random_arrays(3, len_q=FUSED_ROWS, len_k=2 * BLOCK_K, head_dim=head_dim, value_dim=8)
    halves = [array.astype(np.float16) for array in arrays]
    expected = engine.everything(*(array.astype(np.float32) for array in halves))
    for got, wanted in zip(engine.everything(*halves), expected, strict=True):
        assert_same_bits(got, wanted.astype(got.dtype))


def test_dropout_keeps_the_lse(engine):
    arrays = many_tiles(9, heads=1)
    _, lse = engine.attention(*arrays, return_lse=True)
    out, dropped_lse, weights = engine.everything(*arrays, dropout=0.3, seed=5)
    assert_same_bits(dropped_lse, lse)
    keep = fastattn.dropout_mask(weights.shape, 0.3, 5)
    assert not weights[~keep].any() and weights[keep].all()
    np.testing.assert_allclose(out, weights @ arrays[2], atol=2e-6)


class TestPermission:
    """Linux gives a process the tile unit's state where it asks for it."""

    @pytest.fixture(autouse=True)
    def hardware(self, engine):
        if engine.isa != "amx" or not sys.platform.startswith("linux"):
            pytest.skip("it is about the hardware")

    def test_refused_for_a_small_signal_stack(self):
        """Then the next instruction set is used, and nobody is told but who asks."""
        code = """
import ctypes, mmap
class Stack(ctypes.Structure):
    _fields_ = [("at", ctypes.c_void_p), ("flags", ctypes.c_int), ("size", ctypes.c_size_t)]
room = ctypes.create_string_buffer(8192)
stack = Stack(ctypes.cast(room, ctypes.c_void_p), 0, 8192)
libc = ctypes.CDLL(None, use_errno=True)
assert libc.sigaltstack(ctypes.byref(stack), None) == 0, ctypes.get_errno()
import numpy as np
import fastattn
from fastattn.backends.cython import backend as cython_cpu
x = np.ones((2, 300, 64), np.float32)
fastattn.attention(x, x, x)
print(cython_cpu.isa(), *cython_cpu.available_isas())
"""
        chosen, *available = python(code).split()
        assert chosen == next(isa for isa in ISAS if isa not in FUSED_ISAS)
        assert "amx" not in available

    def test_threads_that_began_before(self):
        """The permission holds for them, too; and in a child, and its threads."""
        code = """
import os, threading
import numpy as np
gate, found = threading.Event(), []
def wait_and_attend():
    gate.wait()
    found.append(fastattn.attention(x, x, x, num_threads=2))
threads = [threading.Thread(target=wait_and_attend) for _ in range(8)]
for thread in threads: thread.start()
import fastattn
x = np.random.default_rng(0).standard_normal((2, 600, 64)).astype(np.float32)
expected = fastattn.attention(x, x, x)
gate.set()
for thread in threads: thread.join()
assert all((out == expected).all() for out in found) and len(found) == 8
child = os.fork()
if not child:
    os._exit(not (fastattn.attention(x, x, x) == expected).all())
assert os.waitpid(child, 0)[1] == 0
print("done")
"""
        assert python(code).split() == ["done"]
