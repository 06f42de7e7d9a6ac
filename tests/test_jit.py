"""Functions of the caller's: which are equal, what is compiled, what may be read, what is cached."""

from __future__ import annotations

import functools
import gc
import math
import threading
import time
import types
import weakref
from collections import namedtuple

import numpy as np
import pytest

import fastattn
from fastattn._api import prepared
from tests.process import python
from tests.tolerances import assert_all_same, assert_same_bits

numba = pytest.importorskip("numba")

from fastattn.backends.jit import frontend, functions  # noqa: E402  (behind the question about Numba)

BACKENDS = ["cython", "numba"]


def arrays(dtype=np.float64, length=40, heads=2):
    return np.random.default_rng(0).standard_normal((1, heads, length, 8)).astype(dtype)


def attend(function, x=None, backend=None, **options):
    x = arrays() if x is None else x
    return fastattn.flex_attention(x, x, x, score_mod=function, backend=backend, **options)


def scaled(x, factor):
    return fastattn.attention(x, x, x, scale=factor / math.sqrt(x.shape[-1]))


@pytest.fixture
def compiled(monkeypatch):
    """How many loops have been compiled since."""
    counted = []
    typed = functions._typed
    monkeypatch.setattr(
        functions, "_typed", lambda *given, **named: counted.append(given) or typed(*given, **named)
    )
    return counted


class TestWhichBackend:
    def test_the_compiled_one_takes_them(self):
        """Without a kernel of Numba's."""
        code = """
import sys
import numpy as np, fastattn
x = np.ones((1, 2, 30, 8), np.float32)
fastattn.flex_attention(x, x, x, score_mod=lambda s, b, h, i, j: s, mask_mod=lambda b, h, i, j: j <= i)
print([name for name in sys.modules if name.startswith("fastattn.backends.numba.")
       and "codegen" not in name], "fastattn.backends.cython.driver" in sys.modules)
"""
        assert python(code).strip() == "[] True"

    @pytest.mark.parametrize(
        "options",
        [
            {},
            {"softcap": 2.0},
            {"window": (9, 3)},
            {"bias": np.ones(40)},
            {"sinks": np.ones(4)},
            {"causal": True, "bias": np.ones(40)},
        ],
        ids=str,
    )
    @pytest.mark.parametrize("len_q", [3, 40])
    @pytest.mark.parametrize("kv_heads", [1, 4])
    def test_backends_agree(self, kv_heads, len_q, options):
        rng = np.random.default_rng(1)
        query, key = rng.standard_normal((2, 4, len_q, 8)), rng.standard_normal((2, kv_heads, 40, 8))
        options = options if len_q == 40 else {**options, "causal": "bottom_right"}

        def some(score, b, h, q_idx, kv_idx):
            return score * 0.5 + h - 0.125 * abs(q_idx - kv_idx) if (kv_idx + b) % 5 else -math.inf

        one, two = (
            fastattn.flex_attention(query, key, key, score_mod=some, return_lse=True, return_weights=True,
                                    backend=name, **options) for name in BACKENDS
        )  # fmt: skip
        for a, b in zip(one, two, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-13)

    @pytest.mark.parametrize("backend", BACKENDS)
    @pytest.mark.parametrize("len_q", [2, 40])
    def test_nan_that_a_score_masks_is_not_seen(self, backend, len_q):
        x = arrays(length=40)
        poisoned = x.copy()
        poisoned[:, :, 30:] = np.nan
        options = {"score_mod": lambda s, b, h, i, j: s if j < 30 else -math.inf, "return_weights": True}
        expected = fastattn.flex_attention(x[:, :, :len_q], x, x, backend=backend, **options)
        got = fastattn.flex_attention(x[:, :, :len_q], poisoned, poisoned, backend=backend, **options)
        assert_all_same(got, expected)


class TestIdentity:
    def test_of_one_source_in_two_namespaces(self):
        """What a nested function reads is part of its identity."""
        source = "def mod(score, b, h, q, k):\n    cap = lambda z: z * ALPHA\n    return cap(score)\n"
        code, x = compile(source, "mods.py", "exec"), arrays()
        for alpha in (1.0, 3.0, 2):
            namespace = {"ALPHA": alpha}
            exec(code, namespace)
            np.testing.assert_allclose(attend(namespace["mod"], x), scaled(x, alpha), rtol=1e-12, atol=1e-13)

    @pytest.mark.parametrize("kind", ["global", "nested", "called", "compiled", "module"])
    def test_a_change_is_followed(self, kind):
        source = """
import numba, types
G, WHOLE = 1.0, 1
module = types.ModuleType("somewhere")
module.G = 1.0
def called(x): return x * G * WHOLE
compiled = numba.njit(called)
def of_global(score, b, h, q, k): return score * G * WHOLE
def of_nested(score, b, h, q, k):
    f = lambda z: z * G * WHOLE
    return f(score)
def of_called(score, b, h, q, k): return called(score)
def of_compiled(score, b, h, q, k): return compiled(score)
def of_module(score, b, h, q, k): return score * module.G * WHOLE
"""
        namespace, x = {}, arrays()
        exec(source, namespace)
        function = namespace[f"of_{kind}"]
        for factor, whole in ((1.0, 1), (3.0, 1), (3.0, 2)):
            namespace["G"] = namespace["module"].G = factor
            namespace["WHOLE"] = whole
            expected = scaled(x, factor * whole)
            np.testing.assert_allclose(attend(function, x), expected, rtol=1e-12, atol=1e-13)

    def test_a_literal_is_not_a_variable_of_its_value(self):
        source = "FACTOR = 0.5\ndef mod(score, b, h, q, k): return score * FACTOR + 0.5 * score"
        namespace, x = {}, arrays()
        exec(source, namespace)
        np.testing.assert_allclose(attend(namespace["mod"], x), scaled(x, 1), rtol=1e-12, atol=1e-13)
        namespace["FACTOR"] = 1.5
        np.testing.assert_allclose(attend(namespace["mod"], x), scaled(x, 2), rtol=1e-12, atol=1e-13)

    def test_two_variables_that_were_one_object(self):
        def with_both(first, second):
            return lambda score, b, h, q, k: score * first + score * second

        x, half = arrays(), 0.5
        for first, second in ((half, half), (0.25, 1.75), (1.75, 0.25)):
            expected = scaled(x, first + second)
            np.testing.assert_allclose(attend(with_both(first, second), x), expected, rtol=1e-12, atol=1e-13)
        tables = np.full(40, 0.5), np.full(40, 1.5)

        def with_tables(first, second):
            return lambda score, b, h, q, k: score * first[k] + score * second[q]

        for a, b in ((0, 0), (0, 1), (1, 1)):
            expected = scaled(x, tables[a][0] + tables[b][0])
            got = attend(with_tables(tables[a], tables[b]), x)
            np.testing.assert_allclose(got, expected, rtol=1e-12, atol=1e-13)

    def test_arrays_in_a_tuple(self):
        def over(pair):
            return lambda score, b, h, q, k: score * pair[0][k] * pair[1][q]

        x = arrays()
        for factor in (1.0, 2.0):
            got = attend(over((np.full(40, factor), np.full(40, 2.0))), x)
            np.testing.assert_allclose(got, scaled(x, 2 * factor), rtol=1e-12, atol=1e-13)


Pair = namedtuple("Pair", "n table")
OWN = types.ModuleType("own")
RATE = 0.75


class TestWhatIsCaptured:
    """Arrays are read at each call, wherever they stand."""

    @pytest.mark.parametrize("backend", BACKENDS)
    @pytest.mark.parametrize(
        "kind",
        ["closure", "nested", "named", "named_item", "by_number", "default", "partial", "keyword", "called",
         "inner", "module", "unpacked", "looped"],
    )  # fmt: skip
    def test_arrays_in_tuples_are_read_at_each_call(self, kind, backend, compiled):
        a = np.ones(40)
        pair, deep, named = (a, 2), (3, ((a,), 0.5)), Pair((1, 2), a)
        two, OWN.held = (a, a), (a, 1)

        def called(x, k):
            return x * deep[1][0][0][k]

        def inner(score, b, h, q, k):
            def read(i):
                return pair[0][i]

            return score * read(k)

        def unpacked(score, b, h, q, k):
            first, n = pair
            return score * first[k] + 0.0 * n

        def looped(score, b, h, q, k):
            total = 0.0
            for table in two:
                total += table[k] / 2
            return score * total

        function = {
            "closure": lambda score, b, h, q, k: score * pair[0][k],
            "nested": lambda score, b, h, q, k: score * deep[1][0][0][k],
            "named": lambda score, b, h, q, k: score * named.table[k] * named.n[0],
            "named_item": lambda score, b, h, q, k: score * named[1][k],
            "by_number": lambda score, b, h, q, k: score * two[k % 2][k],
            "default": lambda score, b, h, q, k, held=(a,): score * held[0][k],
            "partial": functools.partial(lambda held, score, b, h, q, k: score * held[0][k], (a,)),
            "keyword": functools.partial(lambda score, b, h, q, k, held: score * held.table[k], held=named),
            "called": lambda score, b, h, q, k: called(score, k),
            "inner": inner,
            "module": lambda score, b, h, q, k: score * OWN.held[0][k],
            "unpacked": unpacked,
            "looped": looped,
        }[kind]
        x = arrays()
        for factor in (1.0, 3.0, -0.5):
            a[:] = factor
            got = attend(function, x, backend)
            np.testing.assert_allclose(got, scaled(x, factor), rtol=1e-12, atol=1e-13)
        assert len(compiled) <= 1  # the other driver may have had the same loop

    @pytest.mark.parametrize("dtype", [np.float16, ">f2", ">f8", ">i4", bool, "strided"])
    def test_of_any_dtype(self, dtype):
        a = np.ones(80)[::2] if dtype == "strided" else np.ones(40, dtype)
        x = arrays()
        for factor in (1.0, 0.0):
            a[:] = factor
            got = attend(lambda score, b, h, q, k: score * a[k] * (a, 1)[0][k], x)
            np.testing.assert_allclose(got, scaled(x, factor), rtol=1e-12, atol=1e-13)

    def test_arrays_without_axes_and_numbers(self):
        a, half, x = np.array(1.0), np.float16(0.5), arrays()
        for factor in (1.0, 3.0):
            a[...] = factor
            for function in (lambda score, b, h, q, k: score * a * half,
                             lambda score, b, h, q, k: score * a[()] * half):  # fmt: skip
                np.testing.assert_allclose(attend(function, x), scaled(x, factor / 2), rtol=1e-12, atol=1e-13)
        held = (a, 1)
        got = attend(lambda score, b, h, q, k: score * held[0][()], x)
        np.testing.assert_allclose(got, scaled(x, 3.0), rtol=1e-12, atol=1e-13)

    @pytest.mark.parametrize(
        "kind",
        ["compared", "equal", "true", "while", "array", "called", "njit", "inner", "closure", "partial"],
    )
    def test_branches_on_what_is_captured(self, kind, compiled):
        """Are decided at each call, not when the function is compiled."""
        array, x = np.array(True), arrays()

        def looped(score, b, h, q, k):
            n = 2.0
            while RATE and n > 1.0:
                n -= 1.0
            return score * n

        def callee(score):
            if RATE > 0.5:
                return score
            return score * 2

        njitted = numba.njit(callee)

        def inner(score, b, h, q, k):
            def factor():
                return 1.0 if RATE else 2.0

            return score * factor()

        def of(rate):
            return {
                "compared": lambda score, b, h, q, k: score * (1.0 if RATE > 0.5 else 2.0),
                "equal": lambda score, b, h, q, k: score * (2.0 if RATE != 0.75 else 1.0),
                "true": lambda score, b, h, q, k: score * (1.0 if RATE else 2.0),
                "while": looped,
                "array": lambda score, b, h, q, k: score * (1.0 if array else 2.0),
                "called": lambda score, b, h, q, k: callee(score),
                "njit": lambda score, b, h, q, k: njitted(score),
                "inner": inner,
                "closure": lambda score, b, h, q, k: score * (1.0 if rate > 0.5 else 2.0),
                "partial": functools.partial(
                    lambda rate, score, b, h, q, k: score * (1.0 if rate else 2.0), rate
                ),
            }[kind]

        global RATE
        for RATE, factor in ((0.75, 1.0), (0.0, 2.0), (0.75, 1.0)):
            array[...] = bool(RATE)
            np.testing.assert_allclose(attend(of(RATE), x), scaled(x, factor), rtol=1e-12, atol=1e-13)
        assert len(compiled) == 1


def slope(score, b, h, q, k, factor=0.5):
    return score * factor


class TestWhatMayBeGiven:
    def test_partial(self):
        x = arrays()
        for factor in (0.25, 0.75):
            for function in (
                functools.partial(slope, factor=factor),
                functools.partial(lambda factor, score, b, h, q, k: score * factor, factor),
                functools.partial(functools.partial(slope, factor=9.0), factor=factor),
                functools.partial(numba.njit(slope), factor=factor),
            ):
                np.testing.assert_allclose(attend(function, x), scaled(x, factor), rtol=1e-12, atol=1e-13)
        near = fastattn.create_block_mask(functools.partial(lambda w, b, h, q, k: q - k < w, 3), 1, 1, 20, 20)
        assert near.materialize(1, 20, 20).sum() == sum(
            min(20, i + 1 + 19 - i) - max(0, i - 2) for i in range(20)
        )

    def test_methods_and_objects_are_refused(self):
        class Decay:
            rate = 0.5

            def mod(self, score, b, h, q, k):
                return score - self.rate

            __call__ = mod

        for function, said in (
            (Decay().mod, "the method 'mod' of a Decay"),
            (Decay(), "a callable Decay"),
            (functools.lru_cache(slope), "a callable _lru_cache_wrapper"),
            (functools.partial(Decay().mod), "the method 'mod' of a Decay"),
            (max, "a callable builtin_function_or_method"),
            (Decay, "type"),
        ):
            with pytest.raises(TypeError, match=rf"^score_mod must be a function, got {said}\b"):
                attend(function)
            with pytest.raises(TypeError, match=rf"^mask_mod must be a function, got {said}\b"):
                fastattn.create_block_mask(function, 1, 1, 5, 5)

    def test_functions_without_njit_may_be_called(self):
        def half(x, by=2.0):
            if x > 0:
                return x / by
            return x / by

        def halved(score, b, h, q, k):
            return half(score)

        np.testing.assert_allclose(attend(halved), scaled(arrays(), 0.5), rtol=1e-12, atol=1e-13)

    def test_recursion_is_refused(self, monkeypatch):
        assert frontend.MAX_INLINED >= 100
        monkeypatch.setattr(frontend, "MAX_INLINED", 10)  # each takes longer than the one before

        def down(score, b, h, q, k):
            return down(score - 1, b, h, q, k) if score > 0 else score

        with pytest.raises(
            TypeError, match=r"^score_mod 'down' cannot be compiled.*\n.*\n'down' calls itself"
        ):
            attend(down)


class TestLiterals:
    @pytest.mark.parametrize("where", ["code", "closure", "nested", "default", "called"])
    def test_float32_stays_float32(self, where):
        """0.1 is then the float32 nearest to it, as beside an array of NumPy's."""
        factor = 0.1

        @numba.njit
        def called(x):
            return x * 0.1

        def nested(score, b, h, q, k):
            return (lambda z: z * 0.1)(score)

        function = {
            "code": lambda score, b, h, q, k: score * 0.1,
            "closure": lambda score, b, h, q, k: score * factor,
            "nested": nested,
            "default": lambda score, b, h, q, k, factor=0.1: score * factor,
            "called": lambda score, b, h, q, k: called(score),
        }[where]
        exact = np.float32(0.1)
        expected = attend(lambda score, b, h, q, k: score * exact, arrays(np.float32))
        assert_same_bits(attend(function, arrays(np.float32)), expected)


class TestCompiledOnce:
    def test_for_all_sizes(self, compiled):
        def alibi(score, b, h, q, k, slopes, table):
            return score - slopes[h] * abs(q - k) + table[k]

        for heads, length in ((1, 30), (2, 30), (3, 55), (5, 31)):
            x = arrays(np.float32, length, heads)
            for n in (len(x), 2):
                many = np.repeat(x, n, axis=0)
                aux = (np.ones(heads, np.float32), np.zeros(length + n))
                fastattn.flex_attention(many, many, many, score_mod=alibi, aux=aux)
                fastattn.create_block_mask(lambda b, h, q, k, ids: ids[q] <= ids[k], n, heads, length, length,
                                           aux=(np.arange(length),))  # fmt: skip
        assert len(compiled) == 2

    def test_for_what_is_captured(self, compiled):
        """Floats and arrays are read at each call."""

        def over(table, factor):
            return lambda score, b, h, q, k: score * table[k] * factor

        for factor in (1.0, 2.0, 3.0):
            x = arrays()
            got = attend(over(np.full(40, factor), factor), x)
            np.testing.assert_allclose(got, scaled(x, factor**2), rtol=1e-12, atol=1e-13)
        assert len(compiled) == 1


def features(score, b, h, q, k, of_query, of_key, weights):
    total = score
    for f in range(len(weights)):
        total += weights[f] * np.tanh(of_query[q, f] - of_key[k, f])
    return total


def power(score, b, h, q, k, n):
    total = 1.0
    for _ in range(n):
        total *= 1.0 + score * 0.125
    return total


def banded(b, h, q, k, offsets):
    allowed = False
    for i in range(len(offsets)):
        allowed |= k - q == offsets[i]
    return allowed


class TestSmallLoops:
    """Sizes at the first call are compiled in as well: calls with other sizes get what they get without."""

    @pytest.mark.parametrize("dtype", [np.float32, pytest.param(np.float64, marks=pytest.mark.slow)])
    @pytest.mark.parametrize("len_q", [1, 40])  # split-KV, the sweep
    def test_any_number_of_rounds(self, dtype, len_q, compiled):
        x, rng = arrays(dtype), np.random.default_rng(3)
        query, tolerance = x[..., :len_q, :], {np.float32: 2e-5, np.float64: 1e-12}[dtype]
        for n in (4, 7, 1, 20, 4):
            aux = tuple(rng.standard_normal(shape).astype(dtype) for shape in ((len_q, n), (40, n), n))
            got = fastattn.flex_attention(query, x, x, score_mod=features, aux=aux)
            of_query, of_key, weights = (value.astype(np.float64) for value in aux)
            bias = np.tanh(of_query[:, None] - of_key) @ weights
            expected = fastattn.attention(*(it.astype(np.float64) for it in (query, x, x)), bias=bias)
            np.testing.assert_allclose(got, expected, rtol=tolerance, atol=tolerance)
        assert len(compiled) == 1

    @pytest.mark.parametrize("dtype", [np.float32, pytest.param(np.float64, marks=pytest.mark.slow)])
    def test_the_same_bits_whatever_came_first(self, dtype, monkeypatch):
        x, results = arrays(dtype), []
        aux = {n: (np.linspace(-1, 1, 40 * n).reshape(40, n).astype(dtype),) * 2 for n in (4, 5, 6)}
        for first in (4, 5):
            monkeypatch.setattr(functions, "loops", functions.Kept(9))
            prepared._calls.clear()
            results.append([])
            for n in (first, 4, 5, 6):
                weights = np.linspace(0.1, 0.7, n).astype(dtype)
                results[-1] += [attend(power, x, aux=(n,)), attend(features, x, aux=(*aux[n], weights))]
        assert_all_same(results[0][2:], results[1][2:])

    def test_of_a_mask(self, compiled):
        x = arrays()
        for offsets in ([0, 3], [0, -1, 2], [1], [0, 5]):
            allowed = np.isin(np.arange(40) - np.arange(40)[:, None], offsets)
            got = fastattn.flex_attention(x, x, x, mask_mod=banded, aux=(np.array(offsets),))
            np.testing.assert_array_equal(got, fastattn.attention(x, x, x, mask=allowed))
        assert len(compiled) == 1


class TestBounded:
    def test_loops(self, monkeypatch):
        monkeypatch.setattr(functions, "loops", functions.Kept(3))
        prepared._calls.clear()
        monkeypatch.setattr(prepared, "MAX_CALLS", 3)
        machines = weakref.WeakSet()
        for n in range(5):
            namespace = {"N": n}
            exec("def mod(score, b, h, q, k): return score * N", namespace)
            attend(namespace["mod"])
            machines |= weakref.WeakSet(functions.loops._values.values())
        gc.collect()
        assert len(functions.loops) == 3 == len(machines)

    def test_the_last_used_stay(self):
        kept = functions.Kept(2)
        for key in (1, 2, 1, 3):
            kept.get(key, lambda key=key: key)
        assert kept.get(1, lambda: "again") == 1
        assert kept.get(2, lambda: "again") == "again"

    def test_captured_arrays_are_let_go(self):
        def over(table):
            return lambda score, b, h, q, k: score * table[k]

        table = np.ones(40)
        gone = weakref.ref(table)
        attend(over(table))
        del table
        gc.collect()
        assert gone() is None

    def test_a_running_call_keeps_its_code(self, monkeypatch):
        """Another thread's loops evict it from the cache."""
        monkeypatch.setattr(functions, "loops", functions.Kept(1))
        x, done = arrays(length=400), []

        def slow(score, b, h, q, k):
            for _ in range(100):
                score = score * 1.0000001 - math.sin(score) * 1e-9
            return score

        expected = attend(slow, x)
        thread = threading.Thread(target=lambda: done.append(attend(slow, x, num_threads=1)))
        thread.start()
        time.sleep(0.05)
        for n in range(2):
            attend(functools.partial(lambda n, score, b, h, q, k: score * n, n))
            gc.collect()
        thread.join()
        assert_same_bits(done[0], expected)


TABLE = np.zeros(10)


class TestReadsOutside:
    @pytest.mark.parametrize("backend", BACKENDS)
    @pytest.mark.parametrize("len_q", [2, 300])
    @pytest.mark.parametrize("dtype", [np.float32, np.float64])
    @pytest.mark.parametrize("far", [10, -11, 10**12, -(10**12)])
    def test_anywhere(self, backend, len_q, dtype, far):
        """Not only at the corners."""

        def beyond(score, b, h, q, k, table):
            return score + table[far if k == 5 else 0]

        x = arrays(dtype, 300)
        with pytest.raises(
            IndexError, match=r"score_mod 'beyond' reads outside of aux\[0\] of shape \(10,\)"
        ):
            fastattn.flex_attention(
                x[:, :, :len_q], x, x, score_mod=beyond, aux=(np.zeros(10),), backend=backend
            )

    @pytest.mark.parametrize("backend", BACKENDS)
    @pytest.mark.parametrize("len_q", [2, 300])
    def test_out_is_untouched_whatever_is_read(self, backend, len_q):
        """Arrays in a tuple, whose elements are no arrays of the function's own."""
        rows = (np.ones(300), np.ones(300))

        def tuple_mod(score, b, h, q, k):
            return score + rows[h][k * 2 if q == len_q - 1 else k]

        x = arrays(np.float32, 300)
        out = np.full((1, 2, len_q, 8), 7.0, np.float32)
        with pytest.raises(IndexError, match="tuple_mod"):
            fastattn.flex_attention(x[:, :, :len_q], x, x, score_mod=tuple_mod, out=out, backend=backend)
        assert (out == 7).all()

    @pytest.mark.parametrize("backend", BACKENDS)
    @pytest.mark.parametrize("len_q", [2, 300])
    @pytest.mark.parametrize("layout", ["bhsd", "bshd"])
    def test_out_is_untouched(self, backend, len_q, layout):
        """At the first call and at one that is prepared; tasks before the one that fails are done."""

        def table_mod(score, b, h, q, k, table):
            return score + table[h, k]

        x = arrays(np.float32, 300)
        given = [x[:, :, :len_q], x, x]
        if layout == "bshd":
            given = [array.swapaxes(1, 2) for array in given]
        attend = functools.partial(
            fastattn.flex_attention, *given, score_mod=table_mod, layout=layout, backend=backend
        )
        table = np.random.default_rng(0).standard_normal((2, 300))
        expected = attend(aux=(table,))
        out = np.full_like(expected, 7.0)
        for _ in range(2):
            with pytest.raises(IndexError, match="table_mod"):
                attend(aux=(table[:1],), out=out)
            assert (out == 7).all()
            assert attend(aux=(table,), out=out) is out
            assert_same_bits(out, expected)
            out[...] = 7

    @pytest.mark.slow
    def test_names_all_kinds(self):
        local = np.zeros((3, 4))
        rows, empty = (np.zeros(4), np.zeros(5)), np.zeros((0, 3))

        def helper(x, k):
            return x + TABLE[k]

        for function, said in (
            (
                lambda score, b, h, q, k: score + TABLE[k],
                r"TABLE of shape \(10,\) for \(b, h, q_idx, kv_idx\) =",
            ),
            (lambda score, b, h, q, k: score + local[h, k], r"local of shape \(3, 4\)"),
            (lambda score, b, h, q, k: score + helper(score, k), "TABLE"),
            (lambda score, b, h, q, k: score + (lambda i: TABLE[i])(k), "TABLE"),
            (lambda score, b, h, q, k: score + rows[0][k], "an array"),
            (lambda score, b, h, q, k: score + empty[0, 2], r"empty of shape \(0, 3\)"),
            (lambda score, b, h, q, k: score + local[h][k], "an array|local"),
            (lambda score, b, h, q, k: score + local[k].sum(), "an array|local"),
        ):
            with pytest.raises(IndexError, match=f"reads outside of ({said})"):
                attend(function)
        with pytest.raises(IndexError, match=r"^mask_mod '<lambda>' reads outside of TABLE of "):
            fastattn.create_block_mask(lambda b, h, q, k: TABLE[k * 10**7] == 0, 1, 1, 300, 300)

    def test_of_flat(self):
        """Arrays in any order of memory, from the start and from the end."""
        rng = np.random.default_rng(0)
        x = arrays(length=24)
        for table in (
            rng.random((2, 3, 4)),
            np.asfortranarray(rng.random((2, 3, 4))),
            rng.random((2, 3, 8))[..., ::2],
        ):
            got = attend(lambda s, b, h, q, k, t: s + t.flat[k - 24] + t.flat[np.uint8(q)], x, aux=(table,))
            np.testing.assert_allclose(
                got, fastattn.attention(x, x, x, bias=table.ravel()), rtol=1e-12, atol=1e-13
            )
        table, empty = np.arange(100.0)[:12].reshape(3, 4), np.zeros((3, 0))
        for read in (table, table[:, ::2], empty):
            for far in (12, -13, 10**12):
                with pytest.raises(
                    IndexError, match=r"^score_mod '<lambda>' reads outside of aux\[0\] of shape"
                ):
                    attend(lambda s, b, h, q, k, t, far: s + t.flat[far if k == 5 else 0], x, aux=(read, far))
        for function in (lambda b, h, q, k, t: t.flat[12] > 0, lambda b, h, q, k, t: t.flat[q * 10**9] > 0):
            with pytest.raises(IndexError, match=r"aux\[0\] of shape \(3, 4\)"):
                fastattn.create_block_mask(function, 1, 1, 4, 4, aux=(table,))

    def test_negative_indices_count_from_the_end(self):
        table = np.arange(40.0)
        got = attend(lambda score, b, h, q, k: score + table[k - 40] + table[np.uint8(k)])
        x = arrays()
        np.testing.assert_allclose(got, fastattn.attention(x, x, x, bias=2 * table), rtol=1e-12, atol=1e-13)

    def test_where_it_is_not_called_nothing_is_read(self):
        """Keys that are masked otherwise may be out of the array's bounds."""
        x = arrays()
        got = fastattn.flex_attention(
            x, x, x, score_mod=lambda score, b, h, q, k: score + (TABLE[k] if k < 10 else 0.0), key_lengths=10
        )
        np.testing.assert_allclose(got, fastattn.attention(x, x, x, key_lengths=10), rtol=1e-12, atol=1e-13)

    @pytest.mark.slow
    def test_the_switch(self):
        """Without checks nothing is raised; here the reads out of bounds are still in the array's own
        memory."""
        code = """
import numpy as np, fastattn
whole = np.zeros(100)
part = whole[:10]
x = np.ones((1, 1, 40, 8))
out = fastattn.flex_attention(x, x, x, score_mod=lambda s, b, h, q, k: s + part[k])
print(np.allclose(out, 1))
"""
        assert python(code, env={"FASTATTN_CHECK_INDICES": "0"}).strip() == "True"
        with pytest.raises(IndexError, match=r"reads outside of part of shape \(10,\)"):
            exec(code, {})
