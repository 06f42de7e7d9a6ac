"""Sizes beyond the range of the backends, which axes of stride 0 reach without memory: errors, never a
crash."""

from __future__ import annotations

import numpy as np
import pytest

import fastattn
from fastattn._call.problem import MAX_DIM, MAX_ROWS
from tests.conftest import on_compiled_backends, quick_on_cython
from tests.process import python
from tests.tolerances import assert_same_bits

pytestmark = pytest.mark.skipif(np.iinfo(np.intp).max < 2**62, reason="needs addresses of 64 bits")


def wide(*shape, dtype="float32"):
    """An array of that shape in the memory of one number."""
    return np.broadcast_to(np.ones((), dtype), shape)


HUGE = {
    "head_dim": (wide(1, 1, 2**58), wide(1, 1, 2**58), wide(1, 1, 4)),
    "head_dim, batch": (wide(3, 2, 1, 2**57), wide(3, 2, 1, 2**57), wide(3, 2, 1, 4)),
    "head_dim, just": (wide(1, 1, MAX_DIM + 1), wide(1, 1, MAX_DIM + 1), wide(1, 1, 4)),
    "value head_dim": (wide(1, 1, 4), wide(1, 1, 4), wide(1, 1, 2**58)),
    "value head_dim, no keys": (wide(1, 1, 4), wide(1, 0, 4), wide(1, 0, 2**58)),
    "keys": (wide(1, 2000, 1), wide(1, 2**59 + 1, 1), wide(1, 2**59 + 1, 1)),
    "keys, few queries": (wide(1, 1, 1), wide(1, 2**59 + 1, 1), wide(1, 2**59 + 1, 1)),
    "keys, just": (wide(1, 1, 1), wide(1, MAX_ROWS + 1, 1), wide(1, MAX_ROWS + 1, 1)),
    "keys, no queries": (wide(1, 0, 1), wide(1, 2**59, 1), wide(1, 2**59, 1)),
    "keys of all items": (wide(2**30, 1, 1, 1), wide(2**30, 1, 2**20, 1), wide(2**30, 1, 2**20, 1)),
    "queries": (wide(1, 2**59, 1), wide(1, 3, 1), wide(1, 3, 1)),
    "queries, empty result": (wide(1, 2**59, 1), wide(1, 3, 1), wide(1, 3, 0)),
    "heads": (wide(2**59, 1, 1), wide(1, 3, 1), wide(1, 3, 0)),
    "items": (wide(2**59, 1, 1, 1), wide(1, 3, 1), wide(1, 3, 0)),
}
#: What the message names, and the number that it says is too large.
NAMED = {
    "head_dim": ("head_dim of query and key", 2**58, MAX_DIM),
    "head_dim, batch": ("head_dim of query and key", 2**57, MAX_DIM),
    "head_dim, just": ("head_dim of query and key", MAX_DIM + 1, MAX_DIM),
    "value head_dim": ("head_dim of value", 2**58, MAX_DIM),
    "value head_dim, no keys": ("head_dim of value", 2**58, MAX_DIM),
    "keys": ("key", 2**59 + 1, MAX_ROWS),
    "keys, few queries": ("key", 2**59 + 1, MAX_ROWS),
    "keys, just": ("key", MAX_ROWS + 1, MAX_ROWS),
    "keys, no queries": ("key", 2**59, MAX_ROWS),
    "keys of all items": ("key", 2**50, MAX_ROWS),
    "queries": ("query", 2**59, MAX_ROWS),
    "queries, empty result": ("query", 2**59, MAX_ROWS),
    "heads": ("query", 2**59, MAX_ROWS),
    "items": ("query", 2**59, MAX_ROWS),
}

EACH = """
import fastattn
from tests.test_sizes import HUGE
for name in ("head_dim", "keys"):
    for options in ({{}}, {{"key_lengths": 0}}, {{"key_lengths": 200, "num_threads": 1}}):
        try:
            fastattn.attention(*HUGE[name], backend={backend!r}, **options)
        except ValueError as error:
            print(error)
"""


@pytest.mark.parametrize("name", HUGE)
@pytest.mark.parametrize(
    "options", [{}, {"backend": True}, {"key_lengths": 0}, {"causal": "top_left"}], ids=str
)
def test_sizes_beyond_the_bounds(backend, name, options, monkeypatch):
    """In this process: the errors come before any work."""
    monkeypatch.setenv("FASTATTN_BACKEND", backend.backend)
    options = {key: backend.backend if value is True else value for key, value in options.items()}
    what, got, bound = NAMED[name]
    with pytest.raises(ValueError, match=rf"^{what} must .*\b{bound}\b.* got {got}; query \("):
        fastattn.attention(*HUGE[name], **options)


@quick_on_cython
def test_they_end_no_process(backend):
    """Both crashed the compiled backend."""
    printed = python(EACH.format(backend=backend.backend)).splitlines()
    for line, name in zip(printed, ["head_dim"] * 3 + ["keys"] * 3, strict=True):
        assert line.startswith(NAMED[name][0])


@pytest.mark.parametrize("function", ["varlen", "sdpa", "flex"])
def test_every_function_checks_them(function):
    query, key, value = HUGE["keys, few queries"]
    with pytest.raises(ValueError, match=f"^key must have at most {MAX_ROWS} rows"):
        if function == "varlen":
            arrays = (array.swapaxes(0, 1) for array in (query, key, value))
            fastattn.varlen_attention(*arrays, [0, 1], [0, 3])
        elif function == "sdpa":
            fastattn.scaled_dot_product_attention(query, key, value)
        else:
            fastattn.flex_attention(query, key, value)


def test_views_larger_than_numpy_has():
    with pytest.raises(ValueError, match=r"^query broadcast to \(1073741824, .* 2\*\*63 bytes"):
        fastattn.attention(wide(1, 1, 2**30, 2**18), wide(2**30, 1, 1, 2**18), wide(2**30, 1, 1, 1))
    with pytest.raises(ValueError, match=r"^key broadcast to"):
        fastattn.attention(
            wide(1, 1, 1), wide(1, 1, 2**60, 1, dtype=np.int8), wide(1, 1, 2**60, 1, dtype=np.int8)
        )
    queries = wide(1, 2**34, 1)
    keys = wide(1, 2**34, 1)
    values = wide(1, 2**34, 0)
    for name, array in (("mask", np.ones((1, 1), bool)), ("bias", np.ones((1, 1), np.float32))):
        with pytest.raises(ValueError, match=rf"^{name} broadcast to .* 2\*\*63 bytes"):
            fastattn.attention(queries, keys, values, **{name: array})
    with pytest.raises(ValueError, match=r"^the weights would have shape .* 2\*\*63 bytes"):
        fastattn.attention(queries, keys, values, return_weights=True)


class TestWithinTheBounds:
    """Large sizes that are right, where few keys or rows are to be read."""

    @pytest.mark.parametrize("len_q", [1, 3, 100])
    @pytest.mark.parametrize("len_k", [2**33, MAX_ROWS])
    def test_keys(self, engine, len_q, len_k):
        query = np.random.default_rng(0).standard_normal((1, len_q, 8)).astype(np.float32)
        key = np.broadcast_to(np.float32(0.5), (1, len_k, 8))
        value = np.broadcast_to(np.arange(5, dtype=np.float32), (1, len_k, 5))
        out, lse = engine.attention(query, key, value, key_lengths=300, return_lse=True)
        wanted = engine.attention(query, key[:, :300], value[:, :300], return_lse=True)
        np.testing.assert_allclose(out, wanted[0], rtol=1e-6)
        np.testing.assert_allclose(lse, wanted[1], rtol=1e-6)

    def test_head_dim(self, engine):
        query = wide(1, 1, MAX_DIM, dtype="float64") / MAX_DIM
        out = engine.attention(query, wide(1, 2, MAX_DIM, dtype="float64"), np.float64([[[1, 2], [3, 4]]]))
        np.testing.assert_allclose(out, [[[2, 3]]], rtol=1e-15)

    def test_value_dim(self, engine):
        value = np.random.default_rng(0).standard_normal((1, 1, MAX_DIM)).astype(np.float32)
        out = engine.attention(np.ones((1, 20, 4), np.float32), np.ones((1, 1, 4), np.float32), value)
        assert_same_bits(out, np.broadcast_to(value, (1, 20, MAX_DIM)).copy())

    @pytest.mark.parametrize("shape", [(1, MAX_ROWS, 1), (MAX_ROWS, 1, 1), (2**20, 4, 2**18, 1)])
    def test_results_without_elements_take_no_time(self, backend, shape):
        """Whatever number of rows they have."""
        query, key = wide(*shape), wide(*(1,) * (len(shape) - 3), 1, 3, 1)
        out = backend.attention(query, key, key[..., :0])
        assert out.shape == (*shape[:-1], 0)


@on_compiled_backends  # NumPy's own products want memory in between
def test_no_memory_is_an_error_before_anything_is_written(backend):
    """Enough for the result, not for a thread's tiles."""
    code = f"""
import resource
import numpy as np
import fastattn
def arrays(dim):
    return (np.broadcast_to(np.float32(1), (1, 64, dim)), np.broadcast_to(np.float32(1), (1, 600, dim)),
            np.ones((1, 600, 4), np.float32))
options = dict(backend={backend.backend!r}, num_threads=1, mask=np.ones((64, 600), bool))
fastattn.attention(*arrays(8), **options)
with open("/proc/self/statm") as file:
    used = int(file.read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (20 << 20), -1))
out = np.full((1, 64, 4), 7, np.float32)
try:
    fastattn.attention(*arrays({MAX_DIM}), out=out, **options)
except MemoryError:
    print((out == 7).all())
"""
    assert python(code).strip() == "True"
