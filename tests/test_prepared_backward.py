"""Prepared calls of `attention_backward`: the second of a signature differs in its time alone."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest

import fastattn
from fastattn import masks
from fastattn._api import backward as _api
from fastattn._api import prepared
from tests.cases import random_arrays
from tests.conftest import ISAS, OF_ONE_ISA, computes_gradients, on_cython
from tests.test_prepared import LEFT_TO_PYTHON, L, S
from tests.test_prepared import OPTIONS as OF_ATTENTION
from tests.tolerances import assert_all_same, assert_same_bits

engines = OF_ONE_ISA  # no kernel knows how its call was prepared

NUMBERS = np.random.default_rng(0)
OF_RESULTS = {"return_lse", "return_weights"}
OPTIONS = {
    name: {key: x for key, x in options.items() if key not in OF_RESULTS}
    for name, options in OF_ATTENTION.items()
    if name not in ("lse", "weights", "mean_weights")
}
OPTIONS |= {
    "dropout": {"dropout": 0.25, "seed": 3},
    "grad_lse": {"grad_lse": NUMBERS.standard_normal((2, 3, L), np.float32)},
    "of_values": {"wrt": ("value",)},
    "list_of_names": {"wrt": ["key", "query"]},
}
assert set(LEFT_TO_PYTHON) - {"mean_weights"} <= set(OPTIONS)


@pytest.fixture
def no_general_path(monkeypatch):
    """From now on a call that is not prepared fails."""

    def refuse():
        monkeypatch.setattr(_api, "select", lambda *_, **__: pytest.fail("this call took the general path"))

    return refuse


def call_of(seed, options, dtype=np.float32, **sizes):
    """The arguments of a call for gradients, in the layout of its options."""
    sizes = {"lead": (2,), "heads": 3, "len_q": L, "len_k": S} | sizes
    query, key, value = (x.astype(dtype) for x in random_arrays(seed, **sizes))
    grad_out = random_arrays(seed + 100, **(sizes | {"head_dim": value.shape[-1]}))[0].astype(dtype)
    arrays = grad_out, query, key, value
    if options.get("layout") == "bshd":
        arrays = tuple(x.swapaxes(-3, -2) for x in arrays)
    forward = {name: x for name, x in options.items() if name not in ("wrt", "grad_lse")}
    return *arrays, *fastattn.attention(*arrays[1:], **forward, return_lse=True)


def renewed(name, option):
    """Other numbers of the same signature."""
    if isinstance(option, np.ndarray):
        return option[::-1].copy()
    return option + 1 if name == "seed" else option[::-1] if name == "key_lengths" and option != 9 else option


def copied(arrays):
    return [array.copy(order="K") for array in arrays]


@computes_gradients
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_a_call_is_prepared_once(engine, no_general_path, name, layout):
    """The next call of a signature, on other numbers, uses the prepared call, with the bits of the general
    path."""
    options = OPTIONS[name] | {"layout": layout}
    fresh = {key: renewed(key, x) for key, x in options.items()}
    first, second = (call_of(seed, given) for seed, given in enumerate((options, fresh)))
    # As the general path has it: a list of what is a tuple has no signature.
    expected = engine.backward(*copied(second), **fresh | {"wrt": iter(fresh.get("wrt", ROWS))})
    engine.backward(*first, **options)
    if engine.backend == "cython":
        no_general_path()
    got = engine.backward(*second, **fresh)
    for x, y in zip(got, expected, strict=True):
        assert (x is None) == (y is None)
        if x is not None:
            assert_same_bits(x, y)
    assert all(x is None or (x.flags.c_contiguous and x.flags.writeable) for x in got)


ROWS = ("query", "key", "value")
SIZES = {
    "grouped": {"heads": 6, "kv_heads": 2},
    "padded": {"head_dim": 5, "value_dim": 3},
    "no_values": {"value_dim": 0},
    "several_tiles": {"len_q": 300, "len_k": 700, "head_dim": 40},
    "one_of_each": {"lead": (), "heads": 1, "len_q": 1, "len_k": 1, "head_dim": 1},
    "six_axes": {"lead": (2, 1, 3), "heads": 2},
    "no_queries": {"len_q": 0},
    "no_keys": {"len_k": 0},
}


@computes_gradients
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16])
@pytest.mark.parametrize("name", SIZES)
def test_sizes_and_dtypes(engine, dtype, name):
    """The second and the third call have the bits of one that the general path took."""
    first, second = (call_of(seed, {}, dtype, **SIZES[name]) for seed in range(2))
    expected = engine.backward(*second, wrt=iter(ROWS))
    for arrays in (first, second, copied(second)):
        got = engine.backward(*arrays)
    assert_all_same(got[:3], expected[:3])
    assert [x.dtype for x in got[:3]] == [np.dtype(dtype)] * 3


@computes_gradients
def test_large_scores_are_found_in_each_call(engine):
    """Scores that are large where no lse is are found during the computation, which then starts again: in a
    prepared call as in the first."""
    ordinary = call_of(0, {})
    large = [x.copy() for x in call_of(1, {})]
    large[1][..., 0, :] *= 300.0
    large[4:] = fastattn.attention(*large[1:4], return_lse=True)
    expected = engine.backward(*large, wrt=iter(ROWS))
    for arrays in (ordinary, large):
        got = engine.backward(*arrays)
    assert_all_same(got[:3], expected[:3])
    expected = engine.backward(*ordinary, wrt=iter(ROWS))
    assert_all_same(engine.backward(*ordinary)[:3], expected[:3])


@pytest.mark.parametrize("place", range(6))
def test_each_array_is_part_of_the_signature(place):
    """A call after one whose array differs in dtype or strides alone."""
    arrays = call_of(0, {})
    expected = fastattn.attention_backward(*arrays, wrt=iter(ROWS))
    fastattn.attention_backward(*arrays)
    for change in (reversed_memory, in_float64, in_other_bytes, unaligned):
        given = list(arrays)
        given[place] = change(given[place])
        for _ in range(2):
            got = fastattn.attention_backward(*given)
        for x, y in zip(got[:3], expected[:3], strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5)


def reversed_memory(array):
    return array[..., ::-1].copy()[..., ::-1]


def in_float64(array):
    return array.astype(np.float64)


def in_other_bytes(array):
    return array.astype(array.dtype.newbyteorder())


def unaligned(array):
    memory = np.empty(array.nbytes + 1, np.uint8)[1:]
    moved = memory.view(array.dtype).reshape(array.shape)
    moved[...] = array
    return moved


def test_grad_lse_is_part_of_the_signature():
    arrays, grad_lse = call_of(0, {}), np.full((2, 3, L), 0.5, np.float32)
    given = [None, grad_lse, grad_lse.astype(np.float64), grad_lse[..., ::-1]]
    expected = [fastattn.attention_backward(*arrays, grad_lse=x, wrt=iter(ROWS)) for x in given]
    for _ in range(2):
        for x, wanted in zip(given, expected, strict=True):
            assert_all_same(fastattn.attention_backward(*arrays, grad_lse=x)[:3], wanted[:3])
    assert not np.array_equal(expected[0].query, expected[1].query)


@pytest.mark.parametrize("lengths", [[21, 0], [-1, 3]])
def test_wrong_lengths_are_refused_in_each_call(lengths):
    options = {"key_lengths": np.array([5, 20])}
    arrays = call_of(0, options)
    for _ in range(2):
        fastattn.attention_backward(*arrays, **options)
    with pytest.raises(ValueError, match="key_lengths"):
        fastattn.attention_backward(*arrays, key_lengths=np.array(lengths))


@pytest.mark.parametrize(
    "wrong",
    [
        {"wrt": ("query", "bias")},
        {"wrt": [["query"]]},
        {"wrt": ("querry",)},
        {"grad_lse": np.ones(3)},
        {"scale": "1"},
        {"backend": "no such", "num_threads": -1},
    ],
    ids=str,
)
def test_a_repeated_call_is_judged_as_the_first(wrong):
    arrays = call_of(0, {}, len_q=L + 1)  # sizes of no other test

    def complaint():
        with pytest.raises((TypeError, ValueError)) as raised:
            fastattn.attention_backward(*arrays, **wrong)
        return raised.type, str(raised.value)

    first = complaint()
    for _ in range(2):
        fastattn.attention_backward(*arrays)
    assert complaint() == complaint() == first


@computes_gradients
def test_many_threads_at_once(engine):
    from concurrent.futures import ThreadPoolExecutor

    calls = [call_of(seed, {}, len_q=60) for seed in range(8)]
    expected = [engine.backward(*arrays, wrt=iter(ROWS)) for arrays in calls]
    engine.backward(*calls[0])
    with ThreadPoolExecutor(8) as pool:
        for _ in range(10):
            found = pool.map(lambda arrays: engine.backward(*arrays), calls)
            for got, wanted in zip(found, expected, strict=True):
                assert_all_same(got[:3], wanted[:3])


@pytest.mark.skipif(len(ISAS) < 2, reason="one instruction set")
def test_each_instruction_set_has_calls_of_its_own():
    from fastattn.backends.cython import backend as cython_backend

    arrays, found = call_of(0, {}, len_q=L + 2), {}
    for _ in range(3):
        for isa in ISAS:
            with cython_backend.use_isa(isa):
                general = fastattn.attention_backward(*arrays, wrt=iter(ROWS), backend="cython")
                got = fastattn.attention_backward(*arrays, backend="cython")
            assert_all_same(got[:3], general[:3])
            assert_all_same(got[:3], found.setdefault(isa, got)[:3])


def test_a_large_mask_is_not_kept():
    arrays = call_of(0, {}, lead=(), len_q=800, len_k=800)
    before = len(prepared._calls)
    mask = masks.Dense(np.random.default_rng(0).random((3, 800, 800)) < 0.5) & masks.Window(700, 700)
    for _ in range(2):
        fastattn.attention_backward(*arrays, mask=mask)
    assert len(prepared._calls) == before and mask not in prepared._tokens


def test_no_array_of_a_call_is_held():
    arrays = call_of(0, {"mask": masks.Window(2, 1)})
    fastattn.attention_backward(*arrays, mask=masks.Window(2, 1))
    held = [weakref.ref(x) for x in arrays]
    del arrays
    gc.collect()
    assert [ref() for ref in held] == [None] * 6


@on_cython
def test_other_numbers_of_threads(engine, no_general_path):
    arrays = call_of(0, {}, len_q=200, len_k=300, heads=8, head_dim=32)
    expected = {n: engine.backward(*arrays, num_threads=n) for n in (1, 2, 3)}
    no_general_path()
    for n, wanted in expected.items():
        assert_all_same(engine.backward(*arrays, num_threads=n)[:3], wanted[:3])
        assert_all_same(wanted[:3], expected[1][:3])
