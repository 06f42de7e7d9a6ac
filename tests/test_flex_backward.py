"""`flex_attention_backward`: derivatives of functions, gradients of what they read, and the rules."""

from __future__ import annotations

import math
import operator
import sys
from random import Random
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import fastattn
from fastattn._call.gradients import Gradients
from tests.cases import random_arrays
from tests.conftest import FLOAT32_FIRST
from tests.flex_gallery import GALLERY, SCORES, aux_of
from tests.fuzz import trees
from tests.process import python
from tests.test_memory import MEASURE
from tests.tolerances import (
    assert_all_same,
    assert_close,
    assert_gradients,
    assert_same_bits,
    solve_gradients,
)

pytest.importorskip("numba")
pytestmark = pytest.mark.usefixtures("compiled")

ALL = ("query", "key", "value", "bias", "sinks", "aux")
SIZES: dict[str, Any] = {"lead": (2,), "heads": 4, "kv_heads": 2, "len_q": 37, "len_k": 70, "value_dim": 9}


def arriving(arrays, heads_at=-3, seed=5):
    query, _, value = arrays
    rng = np.random.default_rng(seed)
    dtype = np.float64 if query.dtype == np.float64 else np.float32
    return rng.standard_normal((*query.shape[:-1], value.shape[-1])).astype(dtype)


def flex(arrays, options, wrt=("query", "key", "value"), **of_gradients):
    """The gradients of random ones of both outputs, and those."""
    of_forward = {name: x for name, x in options.items() if name != "score_grad"}
    out, lse = fastattn.flex_attention(*arrays, return_lse=True, **of_forward)
    rng = np.random.default_rng(5)
    grad_out = rng.standard_normal(out.shape).astype(lse.dtype)
    grad_lse = rng.standard_normal(lse.shape).astype(lse.dtype)
    found = fastattn.flex_attention_backward(
        grad_out, *arrays, out, lse, grad_lse=grad_lse, wrt=wrt, **options, **of_gradients
    )
    return found, grad_out, grad_lse


def check(arrays, options, theirs):
    """All gradients are within the budget. theirs: what `attention` or the oracle calls these options."""
    names = [n for n in ALL[:5] if n in ("query", "key", "value") or n in options]
    found, grad_out, grad_lse = flex(arrays, options, names)
    theirs = {"grad_lse": grad_lse, **theirs}
    assert_gradients(Gradients(*found[:5]), grad_out, *arrays, wrt=names, **theirs)


# ---------------------------------------------------------------- what attention has, too


@pytest.mark.parametrize("dtype", FLOAT32_FIRST)
@pytest.mark.parametrize("others", [{}, {"causal": "bottom_right"}, {"softcap": 2.0}], ids=str)
def test_a_bias(dtype, others):
    arrays = random_arrays(0, **SIZES, dtype=dtype)
    bias = np.random.default_rng(1).standard_normal((4, 37, 70)).astype(dtype)

    def plus(score, b, h, q_idx, kv_idx, table):
        return score + table[h, q_idx, kv_idx]

    options = {"score_mod": plus, "aux": (bias,)} | others
    found, grad_out, grad_lse = flex(arrays, options, ("query", "key", "value", "aux"))
    theirs = {"bias": bias, "grad_lse": grad_lse} | others
    assert_gradients(Gradients(*found[:5]), grad_out, *arrays, wrt=("query", "key", "value"), **theirs)
    exact, reach, plain = solve_gradients(grad_out, *arrays, **theirs)
    assert found.aux[0].dtype == bias.dtype
    assert_close("aux", found.aux[0], exact.bias, reach.bias, plain.bias)


@pytest.mark.parametrize("dtype", FLOAT32_FIRST)
def test_a_soft_cap(dtype):
    arrays = random_arrays(0, **SIZES, dtype=dtype, spread=3.0)
    cap = 1.5

    def capped(score, b, h, q_idx, kv_idx):
        return cap * np.tanh(score / cap)

    check(arrays, {"score_mod": capped, "window": (9, 3)}, {"softcap": cap, "window": (9, 3)})


@pytest.mark.parametrize("dtype", FLOAT32_FIRST)
def test_a_scale(dtype):
    arrays = random_arrays(0, **SIZES, dtype=dtype)

    def scaled(score, b, h, q_idx, kv_idx, factor):
        return score * factor

    factor = np.dtype(dtype).type(-1.75)
    scale = float(factor) / math.sqrt(16)
    check(arrays, {"score_mod": scaled, "aux": (factor,)}, {"scale": scale})


@pytest.mark.parametrize("sizes", [(1, 1), (1, 129), (129, 1), (257, 128), (300, 260)], ids=str)
def test_no_function_is_attention_backward(sizes):
    arrays = random_arrays(0, len_q=sizes[0], len_k=sizes[1])
    dropout = {"dropout": 0.25, "seed": 3}
    found, grad_out, grad_lse = flex(arrays, dropout | {"mask_mod": lambda b, h, i, j: j <= i + 40})
    mask = np.tri(*sizes, 40, dtype=bool)
    out, lse = fastattn.attention(*arrays, mask=mask, return_lse=True, **dropout)
    wanted = fastattn.attention_backward(grad_out, *arrays, out, lse, grad_lse=grad_lse, mask=mask, **dropout)
    assert_all_same(found[:3], wanted[:3])
    assert found.aux is None


# ---------------------------------------------------------------- beside every option


def mixed(score, b, h, q_idx, kv_idx):
    """Of slope and curvature below 1."""
    x = 0.5 * score + 0.25 * math.sin(score + h) - 0.02 * abs(q_idx - kv_idx) + 0.1 * b
    return x if kv_idx % 3 else 0.5 * math.tanh(x)


def of_mixed(score, b, h, q_idx, kv_idx):
    """Its derivative, by hand."""
    x = 0.5 * score + 0.25 * np.sin(score + h) - 0.02 * abs(q_idx - kv_idx) + 0.1 * b
    slope = 0.5 + 0.25 * np.cos(score + h)
    return slope if kv_idx % 3 else 0.5 * slope * (1 - np.tanh(x) ** 2)


def in_wide(score, b, h, q_idx, kv_idx):
    """`mixed` in the type of the score."""
    x = 0.5 * score + 0.25 * np.sin(score + h) - 0.02 * abs(q_idx - kv_idx) + 0.1 * b
    return x if kv_idx % 3 else 0.5 * np.tanh(x)


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": "bottom_right"},
    "window": {"window": (5, 0)},
    "lengths": {"key_lengths": np.array([0, 41])},
    "softcap": {"softcap": 1.5},
    "scale": {"scale": -0.4},
    "sinks": {"sinks": np.array([0.5, -np.inf, 3.0, -1.0])},
    "bias": {"bias": np.random.default_rng(2).standard_normal((4, 1, 70))},
    "bias and softcap": {"bias": np.random.default_rng(2).standard_normal((37, 70)), "softcap": 2.0},
    "dropout": {"dropout": 0.3, "seed": 11},
    "all": {"dropout": 0.3, "seed": 1, "softcap": 3.0, "sinks": np.ones(4), "causal": "top_left"},
}


@pytest.mark.parametrize("dtype", FLOAT32_FIRST)
@pytest.mark.parametrize("given", [False, True], ids=["found", "score_grad"])
@pytest.mark.parametrize("name", OPTIONS)
def test_options(name, given, dtype):
    arrays = random_arrays(0, **SIZES, dtype=dtype)
    options = {n: x.astype(dtype) if n in ("bias", "sinks") else x for n, x in OPTIONS[name].items()}
    ours = options | {"score_mod": mixed} | ({"score_grad": of_mixed} if given else {})
    check(arrays, ours, options | {"score_mod": in_wide, "score_grad": of_mixed})


@pytest.mark.parametrize(
    "sizes",
    [(1, 1), (2, 300), (15, 17), (97, 129), (200, 1), pytest.param((257, 260), marks=pytest.mark.slow)],
    ids=str,
)
@pytest.mark.parametrize("heads", [(1, 1), (6, 2)], ids=str)
def test_sizes(sizes, heads):
    arrays = random_arrays(1, heads=heads[0], kv_heads=heads[1], len_q=sizes[0], len_k=sizes[1], head_dim=20)
    check(arrays, {"score_mod": mixed}, {"score_mod": in_wide, "score_grad": of_mixed})


def test_layout_and_strides():
    """The same bits in either layout and from any memory."""
    arrays = random_arrays(0, **SIZES)
    table = np.random.default_rng(2).standard_normal((4, 70)).astype(np.float32)

    def plus(score, b, h, q_idx, kv_idx, table):
        return score * 0.5 + table[h, kv_idx]

    out, lse = fastattn.flex_attention(*arrays, score_mod=plus, aux=(table,), return_lse=True)
    grad_out = arriving(arrays)
    names = ("query", "key", "value", "aux")
    wanted = fastattn.flex_attention_backward(
        grad_out, *arrays, out, lse, score_mod=plus, aux=(table,), wrt=names
    )
    swapped = [x.swapaxes(-2, -3) for x in (grad_out, *arrays, out)]
    spaced = np.empty((70, 8), np.float32)[:, ::2].T[::-1]
    spaced[...] = table
    found = fastattn.flex_attention_backward(
        *swapped, lse, score_mod=plus, aux=(spaced,), wrt=names, layout="bshd"
    )
    assert_all_same([x.swapaxes(-2, -3).copy() for x in found[:3]], wanted[:3])
    assert_same_bits(found.aux[0], wanted.aux[0])


@pytest.mark.parametrize("storage", [np.float16, ml_dtypes.bfloat16], ids=["float16", "bfloat16"])
def test_16_bits_are_rounded_once(storage):
    arrays = [x.astype(storage) for x in random_arrays(0, **SIZES)]
    wide = [x.astype(np.float32) for x in arrays]
    out, lse = fastattn.flex_attention(*wide, score_mod=mixed, return_lse=True)
    grad_out = arriving(wide)
    wanted = fastattn.flex_attention_backward(grad_out, *wide, out, lse, score_mod=mixed)
    found = fastattn.flex_attention_backward(grad_out, *arrays, out, lse, score_mod=mixed)
    for one, other in zip(found[:3], wanted[:3], strict=True):
        assert one.dtype == storage
        assert_same_bits(one.view(np.int16), other.astype(storage).view(np.int16))


# ---------------------------------------------------------------- derivatives

#: Each is taken at scores between 0.2 and 0.8, and beside them y = 0.3, or as written.
EXPRESSIONS = [
    "score + y", "y - score", "score * y", "y / score", "score / y", "-score", "+score", "score % y",
    "y % score", "score // y + score", "score ** 2", "score ** -3", "score ** 0", "score ** 1",
    "score ** 2.5", "y ** score", "score ** score", "2 ** score", "score ** 20", "pow(score, y)",
    "abs(score - 0.5)", "abs(y - score)", "max(score, y)", "min(y, score)", "max(score, y, 0.9 * score)",
    "min(0.5, score, y + 0.25)",
    "math.exp(score)", "np.exp2(score)", "math.expm1(score)", "math.log(score)", "np.log2(score)",
    "math.log10(score)", "np.log1p(score)", "math.sqrt(score)", "np.cbrt(score)", "np.square(score)",
    "np.reciprocal(score)", "math.sin(score)", "np.cos(score)", "math.tan(score)", "np.arcsin(score)",
    "math.acos(score)", "np.arctan(score)", "math.sinh(score)", "np.cosh(score)", "np.tanh(score)",
    "math.asinh(score)", "math.acosh(score + 1)", "np.arctanh(score)", "math.erf(score)", "math.erfc(score)",
    "math.degrees(score)", "np.radians(score)", "np.hypot(score, y)", "math.hypot(y, score)",
    "np.arctan2(score, y)", "math.atan2(y, score)", "np.logaddexp(score, y)", "np.fmod(score, y)",
    "np.fmod(y, score)", "math.copysign(score, -y)", "np.copysign(y, score) + score", "np.maximum(score, y)",
    "np.fmin(score, y)", "np.where(score > y, score * score, y)", "np.where(y, score, 0)",
    "float(score) * 2", "np.float64(score) * score", "int(4 * score) * score",
    "round(score) + score", "math.floor(score * 3) + score", "np.ceil(score * 3) * score",
    "np.sign(score - 0.5) * score", "score if score > 0.5 and score < 0.7 else 2 * score",
    "score * (not score > 0.5)", "(score > 0.5) + score", "np.add(score, np.multiply(score, y))",
    "helper(score, y)", "(lambda z: z * z)(score)", "(score, y)[0] * (y, score)[1]",
    "np.fabs(score) + np.isnan(score)", "math.pow(score, y)", "np.power(score, 3)", "np.negative(score)",
]  # fmt: skip


def helper(x, y):
    total = 0
    for step in range(3):
        total += x * step
    total -= y
    return total


def _function(expressions):
    """One of which each key has its own expression."""
    names = {"math": math, "np": np, "helper": helper, "y": 0.3}
    lines = [f"    if kv_idx == {i}:\n        return {text}\n" for i, text in enumerate(expressions)]
    code = f"def function(score, b, h, q_idx, kv_idx):\n{''.join(lines)}    return score * 0\n"
    exec(compile(code, "<expressions>", "exec"), names)
    return names["function"]


#: Of a product divided by one of its factors.
OF_A_QUOTIENT = 2 * np.finfo(np.float64).eps


def slopes_of(function, scores, **options):
    """Its derivative for one query and these scores, as the gradients of keys and of a bias hold it."""
    dtype = scores.dtype
    query, key = np.ones((1, 1, 1), dtype), scores.reshape(1, -1, 1)
    value = np.random.default_rng(0).standard_normal((1, len(scores), 3)).astype(dtype)
    options = {"score_mod": function, "bias": np.zeros(len(scores), dtype)} | options
    found, _, _ = flex((query, key, value), options, ("key", "bias"))
    return found.key.ravel() / found.bias


@pytest.mark.parametrize("dtype", [pytest.param(np.float32, marks=pytest.mark.slow), np.float64])
@pytest.mark.parametrize("part", range(4))
def test_rules(part, dtype):
    """Each against a difference of its values in extended precision, or in float64."""
    expressions = EXPRESSIONS[part::4]
    scores = np.random.default_rng(part).uniform(0.2, 0.8, len(expressions)).astype(dtype)
    function = _function(expressions)
    step = 1e-6
    wanted = [
        (function(float(x) + step, 0, 0, 0, i) - function(float(x) - step, 0, 0, 0, i)) / (2 * step)
        for i, x in enumerate(scores)
    ]
    found = slopes_of(function, scores)
    # Differences have an error of eps / step, slopes those of a dozen roundings, also of 1e3.
    allowed = 1e-8 + 60 * np.finfo(dtype).eps
    for text, x, one, other in zip(expressions, scores, found, wanted, strict=True):
        assert abs(one - other) <= allowed * max(1, abs(other)), (text, x, one, other)


KINKS = {
    "abs(score)": 0, "np.fabs(score)": 0, "max(score, 0)": 0.5, "np.minimum(0, score)": 0.5,
    "max(score, score)": 1, "min(-score, score)": 0, "math.sqrt(score)": math.inf, "np.sign(score)": 0,
    "np.where(score == 0, 2 * score, math.sqrt(score))": 2, "score if score >= 0 else 3 * score": 1,
    "2 * score if score != 0 else 0.5 * score": 0.5, "np.where(score < 1, score, np.log(score))": 1,
    "np.float32(score)": 1, "0 * score + 3": 0, "5": 0, "kv_idx": 0, "score ** 0": 0, "score ** 1": 1,
    "score ** 2": 0, "score ** (kv_idx - kv_idx)": 0, "max(1, math.sqrt(score))": 0,
    "min(math.sqrt(score), 2 + score, 5)": math.inf, "math.sqrt(abs(score))": 0,
}  # fmt: skip


def test_kinks():
    found = slopes_of(_function(KINKS), np.zeros(len(KINKS)))
    for (text, wanted), one in zip(KINKS.items(), found, strict=True):
        np.testing.assert_allclose(one, wanted, rtol=OF_A_QUOTIENT, err_msg=text)


def test_what_is_constant_on_a_branch():
    """A variable that is a number on one path, and depends on the score on another."""

    def function(score, b, h, q_idx, kv_idx):
        x = 0.0
        if kv_idx % 2:
            x = score * 3
        n = 1
        while n < 3:
            x = x + score
            n += 1
        return x if kv_idx < 6 else -math.inf

    found = slopes_of(function, np.linspace(-1, 1, 6))
    np.testing.assert_allclose(found, [2, 5, 2, 5, 2, 5], rtol=OF_A_QUOTIENT)


# ---------------------------------------------------------------- random functions


class Drawn:
    """A random function, with its tables, as `fuzz.trees` draws it, on a small problem in float64."""

    sizes = (2, 2, 3, 4)

    def __init__(self, seed):
        r = Random(seed)
        while "score" not in (chosen := trees.draw(r)):
            pass
        rng = np.random.default_rng(seed)
        places = dict(zip(trees.INDICES, map(np.ravel, np.indices(self.sizes)), strict=True))
        values = places | {"whole": 3, "min": np.minimum, "max": np.maximum}
        self.tables: list[np.ndarray] = []
        names, aux = {}, []
        own: dict[str, Any] = {"math": math, "np": np, "captured": 0.375, "helper_table": np.arange(4.0)}
        for number, template, indices in trees.reads(chosen["score"]):
            shape = []
            for index in indices:
                at = np.asarray(eval(trees.source(index, {}), values))
                shape.append(int(max(1, at.max() + 1, -at.min())))
            shape = shape[::-1] if ".T[" in template else shape
            kind = chosen["tables"][number]["dtype"]
            table = np.round(2 * rng.standard_normal(shape), 2)
            table = table > 0 if kind == "bool" else table.astype(np.float64 if "f" in kind else np.int64)
            names[f"table{number}"] = f"t{number}"
            if chosen["tables"][number]["place"] == "aux":
                aux.append(f"t{number}")
                self.tables.append(table)
            else:
                own[f"t{number}"] = table
        self.aux = [*self.tables, np.float64(rng.uniform(-1, 1)), 3, bool(seed % 2)]
        text = (
            "def helper(x, i):\n    return x + helper_table[i % 4] * 0.25\n"
            f"def function(score, {', '.join([*trees.INDICES, *aux, 'number', 'whole', 'flag'])}):\n"
            f"    {trees.source(chosen['score'], names)}\n"
        )
        exec(compile(text, f"<drawn {seed}>", "exec"), own)
        self.function, self.text = own["function"], text
        B, H, L, S = self.sizes
        self.arrays = random_arrays(seed, lead=(B,), heads=H, kv_heads=1, len_q=L, len_k=S, head_dim=3,
                                    dtype="float64")  # fmt: skip
        self.weights = rng.standard_normal((B, H, L, 3))

    def modified(self, scores, aux):
        with np.errstate(all="ignore"):
            found = [self.function(float(scores[at]), *at, *aux) for at in np.ndindex(*self.sizes)]
        return np.array(found, float).reshape(self.sizes)

    def wanted(self, step):
        """The gradients of query, key and value from the definition, the slopes from differences."""
        query, key, value = self.arrays
        scores = query @ key.swapaxes(-1, -2) / math.sqrt(3)
        new = self.modified(scores, self.aux)
        top = new.max(-1, keepdims=True)
        top = np.where(np.isfinite(top), top, 0)
        raised = np.exp(new - top)
        total = raised.sum(-1, keepdims=True)
        p = raised / np.where(total > 0, total, 1)
        products = self.weights @ value.swapaxes(-1, -2)
        change = p * (products - (p * products).sum(-1, keepdims=True))

        def slope(ahead, behind):
            return np.where(new > -np.inf, (ahead - behind) / (2 * step), 0)

        with np.errstate(all="ignore"):
            slopes = slope(self.modified(scores + step, self.aux), self.modified(scores - step, self.aux))
            of_score = change * slopes / math.sqrt(3)
            found = [of_score @ key, (of_score.swapaxes(-1, -2) @ query).sum(1, keepdims=True)]
            found.append((p.swapaxes(-1, -2) @ self.weights).sum(1, keepdims=True))
            for n, x in enumerate(self.aux[: len(self.tables) + 1]):
                if x.dtype.kind != "f":
                    found.append(None)
                    continue
                of_table = np.zeros(x.shape)
                for at in np.ndindex(*x.shape):
                    both = []
                    for sign in (1, -1):
                        moved = np.array(x)
                        moved[at] += sign * step
                        aux = [*self.aux]
                        aux[n] = moved if x.ndim else moved[()]
                        both.append(self.modified(scores, aux))
                    of_table[at] = (change * slope(*both)).sum()
                found.append(of_table)
        return found, np.abs(new[np.isfinite(new)]).max(initial=0)

    def check(self):
        options = {"score_mod": self.function, "aux": self.aux}
        out, lse = fastattn.flex_attention(*self.arrays, return_lse=True, **options)
        got = fastattn.flex_attention_backward(
            self.weights, *self.arrays, out, lse, wrt=("query", "key", "value", "aux"), **options
        )
        assert got.aux[-2:] == (None, None)
        (near, largest), (far, _) = self.wanted(1e-6), self.wanted(4e-6)
        checked = 0
        for one, x, y in zip([*got[:3], *got.aux[:-2]], near, far, strict=True):
            if x is None:
                assert one is None
                continue
            # A difference rounds by eps / step of the values; a kink between two of them leaves it unclear.
            unclear = ~(abs(x - y) <= 1e-6 * (1 + largest + abs(x)))
            error = np.where(unclear, 0, abs(one - x))
            assert (error <= 1e-5 * (1 + largest + abs(x))).all(), self.text
            checked += np.count_nonzero(~unclear)
        return checked


def _check_drawn(seeds):
    return sum(Drawn(seed).check() > 0 for seed in seeds)


def test_random_functions():
    assert _check_drawn(range(8)) >= 7


@pytest.mark.slow
@pytest.mark.parametrize("part", range(6))
def test_many_random_functions(part):
    assert _check_drawn(range(8 + 50 * part, 58 + 50 * part)) >= 45


# ---------------------------------------------------------------- masked keys


@pytest.mark.parametrize("dtype", FLOAT32_FIRST)
@pytest.mark.parametrize("by", ["mask", "key_lengths", "mask_mod", "bias", "score_mod"])
def test_masked_keys_are_never_seen(by, dtype):
    """NaN in them, in what the functions return for them, and reads outside of arrays change no bit."""
    query, key, value = random_arrays(0, **SIZES, dtype=dtype)
    allowed = np.ones((37, 70), bool)
    allowed[:, 41:] = False
    options = {
        "mask": {"mask": allowed},
        "key_lengths": {"key_lengths": 41},
        "mask_mod": {"mask_mod": lambda b, h, i, j, t: j < 41},
        "bias": {"bias": np.where(allowed, 0, -np.inf).astype(dtype)},
        "score_mod": {},
    }[by]
    if by == "score_mod":

        def function(score, b, h, q_idx, kv_idx, t):
            return score * t[kv_idx] if kv_idx < 41 else -math.inf

    else:

        def function(score, b, h, q_idx, kv_idx, t):
            return score * t[kv_idx] if kv_idx < 41 else math.sqrt(score - 1e9) * t[kv_idx]

    table = np.random.default_rng(1).standard_normal(41).astype(dtype)
    options |= {"score_mod": function, "aux": (table,)}
    wrt = ("query", "key", "value", "aux")
    clean, _, _ = flex((query, key, value), options, wrt)
    spoiled = [x.copy() for x in (key, value)]
    for x in spoiled:
        x[..., 41::2, :], x[..., 42::4, :] = np.nan, np.inf
    found, _, _ = flex((query, *spoiled), options, wrt)
    assert_all_same(found[:3], clean[:3])
    assert_all_same(found.aux, clean.aux)
    assert (found.key[..., 41:, :] == 0).all()
    assert (found.value[..., 41:, :] == 0).all()
    assert np.isfinite(found.aux[0]).all()


@pytest.mark.parametrize("by", ["causal", "score_mod"])
def test_nan_in_a_row_reaches_what_the_row_reads(by):
    """Of a query or of grad_out: keys that the row does not read have the gradients of the other rows."""
    query, key, value = random_arrays(0, heads=1, len_q=40, len_k=40, dtype="float64")
    out, lse = np.zeros((1, 40, 16)), np.zeros((1, 40))

    def half(score, b, h, q_idx, kv_idx):
        return 0.5 * score if by == "causal" or kv_idx <= q_idx else -math.inf

    options = {"score_mod": half} | ({"causal": True} if by == "causal" else {})
    wide = random_arrays(1, heads=1, len_q=40, len_k=40, dtype="float64")[0]
    for of_query in (False, True):
        spoiled = [x.copy() for x in (wide, query)]
        spoiled[of_query][:, 20] = np.nan
        results = []
        for grad_out, q in ((wide, query), tuple(spoiled)):
            with np.errstate(all="ignore"):
                out, lse = fastattn.flex_attention(q, key, value, return_lse=True, **options)
            results.append(fastattn.flex_attention_backward(grad_out, q, key, value, out, lse, **options))
        clean, found = results
        for name in ("key", "value"):
            one, other = getattr(found, name), getattr(clean, name)
            assert_same_bits(one[:, 21:], other[:, 21:], name)
            assert np.isnan(one[:, :21]).any()
        others = np.arange(40) != 20
        assert_same_bits(found.query[:, others], clean.query[:, others])


def test_rows_without_keys():
    arrays = random_arrays(0, **SIZES)
    mask = np.ones((37, 70), bool)
    mask[::3] = False
    options = {"score_mod": lambda score, b, h, i, j, t: score * t[h], "aux": (np.ones(4, np.float32),)}
    options |= {"mask": mask, "sinks": np.ones(4, np.float32)}
    found, grad_out, grad_lse = flex(arrays, options, ALL[:3] + ALL[4:])
    assert (found.query[..., ::3, :] == 0).all()
    out, lse = fastattn.flex_attention(*arrays, return_lse=True, **options)
    spoiled = grad_out.copy(), grad_lse.copy()
    for x in spoiled:
        (x if x.ndim < 4 else x.swapaxes(-1, -2))[..., ::3] = np.nan
    again = fastattn.flex_attention_backward(
        spoiled[0], *arrays, out, lse, grad_lse=spoiled[1], wrt=ALL[:3] + ALL[4:], **options
    )
    for name in ("query", "key", "value", "sinks"):
        assert_same_bits(getattr(again, name), getattr(found, name), name)
    assert_all_same(again.aux, found.aux)


# ---------------------------------------------------------------- large scores


@pytest.mark.parametrize("factor", [40.0, 400.0])
def test_large_scores(factor):
    """The weights of scores in the thousands are those of a scale, which has its own lse."""
    arrays = random_arrays(0, heads=2, len_q=100, len_k=300, head_dim=64)

    def scaled(score, b, h, q_idx, kv_idx, t):
        return score * t

    _, lse = fastattn.flex_attention(*arrays, score_mod=scaled, aux=(np.float32(factor),), return_lse=True)
    assert abs(lse).max() > 100
    check(arrays, {"score_mod": scaled, "aux": (np.float32(factor),)}, {"scale": factor / 8})


# ---------------------------------------------------------------- an oracle of another house


def _torch_scores():
    torch = pytest.importorskip("torch")
    i, j = torch.arange(70)[:, None], torch.arange(70)[None, :]
    h = torch.arange(3)[:, None, None]

    def t5_bias(score, buckets, table, offset):
        return score + table[buckets[i - j + offset], h]

    return {
        "alibi": lambda score, slopes: score - slopes[h] * abs(i - j),
        "t5_bias": t5_bias,
        "soft_cap": lambda score, cap: cap * torch.tanh(score / cap),
        "distance_decay": None,
        "additive": None,
    }


def own_functions():
    """Functions of numbers, and the same of tensors."""
    torch = pytest.importorskip("torch")
    i, j = torch.arange(70)[:, None], torch.arange(70)[None, :]

    def gated(score, b, h, q_idx, kv_idx, gate, shift):
        return score / (1 + math.exp(-gate[h, q_idx])) + max(shift[h, kv_idx], -0.5) * abs(score)

    def of_gated(score, gate, shift):
        most = torch.maximum(shift[:, None], torch.tensor(-0.5, dtype=shift.dtype))
        return score * torch.sigmoid(gate[..., None]) + most * abs(score)

    def powers(score, b, h, q_idx, kv_idx, table, number):
        x = abs(score) + 0.1
        return np.where(
            q_idx > kv_idx, -(x ** (1.5 + number)), table[h, 0] * math.log1p(x) + table[h, 1] ** 2
        )

    def of_powers(score, table, number):
        x = abs(score) + 0.1
        other = table[:, 0, None, None] * torch.log1p(x) + table[:, 1, None, None] ** 2
        return torch.where(i > j, -(x ** (1.5 + number)), other)

    rng = np.random.default_rng(0)
    return {
        "gated": (gated, of_gated, (rng.standard_normal((3, 70)), rng.standard_normal((3, 70)))),
        "powers": (powers, of_powers, (rng.standard_normal((3, 2)), 0.25)),
    }


@pytest.mark.parametrize("name", ["alibi", "t5_bias", "soft_cap", "gated", "powers"])
@pytest.mark.parametrize("causal", [False, True])
def test_pytorch(name, causal):
    """Its autograd on the plain formula in float64, with the same function of tensors."""
    torch = pytest.importorskip("torch")
    own = own_functions()
    function, of_tensors, aux = (
        own[name] if name in own else (GALLERY[name], _torch_scores()[name], aux_of(name))
    )
    arrays = random_arrays(0, lead=(2,), heads=3, len_q=70, len_k=70, dtype="float64")
    found, grad_out, grad_lse = flex(
        arrays, {"score_mod": function, "aux": aux, "causal": causal}, ("query", "key", "value", "aux")
    )
    given = map(np.asarray, (*arrays, *aux))
    leaves = [torch.tensor(x, requires_grad=x.dtype.kind == "f") for x in given]
    q, k, v, *others = leaves
    others = [x if torch.is_floating_point(x) or x.ndim else int(x) for x in others]
    scores = of_tensors(q @ k.mT / 4, *others)
    if causal:
        scores = scores.masked_fill(torch.ones(70, 70, dtype=torch.bool).triu(1), -torch.inf)
    lse = scores.logsumexp(-1)
    loss = (scores.softmax(-1) @ v * torch.tensor(grad_out)).sum() + (lse * torch.tensor(grad_lse)).sum()
    loss.backward()
    for got, leaf in zip([*found[:3], *found.aux], leaves, strict=True):
        assert (got is None) == (leaf.grad is None)
        if got is not None:
            size = float(abs(leaf.grad).max())
            np.testing.assert_allclose(got, leaf.grad.numpy(), rtol=1e-10, atol=1e-11 * size)


@pytest.mark.parametrize("name", SCORES)
def test_the_functions_of_the_recipes_have_derivatives(name):
    arrays = random_arrays(0, heads=3, len_q=70, len_k=70, dtype="float64")
    found, _, _ = flex(arrays, {"score_mod": GALLERY[name], "aux": aux_of(name)}, ("query", "aux"))
    assert np.isfinite(found.query).all()


# ---------------------------------------------------------------- memory


SCRIPT = (
    MEASURE
    + """
def function(score, b, h, i, j, t):
    return score * 0.5 + t[abs(i - j) % 64]
def call(length):
    rng = np.random.default_rng(0)
    query, key, value, grad_out = rng.standard_normal((4, 1, length, 16), dtype=np.float32)
    options = {"score_mod": function, "aux": (np.ones(64, np.float32),), "causal": True}
    out, lse = fastattn.flex_attention(query, key, value, return_lse=True, **options)
    def work():
        fastattn.flex_attention_backward(grad_out, query, key, value, out, lse,
                                         wrt=("query", "key", "value", "aux"), **options)
    return extra(work)
call(256)
print(call(4096))
"""
)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc/self/status")
def test_memory_does_not_grow_with_the_scores():
    """Those of 4096 queries and keys would take 64 MB."""
    assert int(python(SCRIPT, env={"FASTATTN_NUM_THREADS": "1"}, timeout=240)) < 24 * 2**20


# ---------------------------------------------------------------- errors


def raises(kind, text, function, aux=(), wrt=("query",), **options):
    arrays = random_arrays(0)
    out, lse = fastattn.attention(*arrays, return_lse=True)
    with pytest.raises(kind, match=text) as caught:
        fastattn.flex_attention_backward(
            out, *arrays, out, lse, score_mod=function, aux=aux, wrt=wrt, **options
        )
    return str(caught.value)


def test_functions_without_a_derivative():
    def gamma(score, b, h, q_idx, kv_idx):
        return math.lgamma(abs(score) + 1)

    text = raises(TypeError, r"score_grad=", gamma)
    line = gamma.__code__.co_firstlineno + 1
    assert "'gamma'" in text
    assert f"test_flex_backward.py, line {line}" in text
    # With it there is one.
    arrays = random_arrays(0)
    out, lse = fastattn.flex_attention(*arrays, score_mod=gamma, return_lse=True)
    found = fastattn.flex_attention_backward(
        out, *arrays, out, lse, score_mod=gamma, score_grad=lambda score, b, h, i, j: 0.0
    )
    assert (found.query == 0).all()


@pytest.mark.parametrize("text", ["np.sum(t)", "t.sum()", "(2 * t)[kv_idx]", "t.max()", "math.lgamma(t[0])",
                                  "np.dot(t, t)", "np.mean(t)"])  # fmt: skip
def test_aux_that_is_read_as_a_whole(text):
    """No derivative gets lost: it is refused."""
    namespace = {"np": np, "math": math}
    exec(f"def function(score, b, h, q_idx, kv_idx, t):\n    return score * {text}", namespace)
    said = raises(TypeError, "cannot be derived in aux", namespace["function"], (np.ones(33),), ("aux",))
    assert "line 2" in said
    assert "score_grad" not in said
    arrays = random_arrays(0)
    out, lse = fastattn.flex_attention(
        *arrays, score_mod=namespace["function"], aux=(np.ones(33),), return_lse=True
    )
    found = fastattn.flex_attention_backward(
        out, *arrays, out, lse, score_mod=namespace["function"], aux=(np.ones(33),)
    )
    assert np.isfinite(found.key).all()


def test_reads_outside_of_arrays():
    table = np.ones(20)

    def function(score, b, h, q_idx, kv_idx, t):
        return score * t[kv_idx]

    def inside(score, b, h, q_idx, kv_idx, t):
        return score

    raises(IndexError, r"(?s)score_mod 'function' reads outside of aux\[0\].*kv_idx\) = \(0, 0, 0, 20\)",
           function, (table,), ("query", "aux"))  # fmt: skip
    raises(
        IndexError,
        r"(?s)score_grad 'function' reads outside of aux\[0\]",
        inside,
        (table,),
        score_grad=function,
    )
    arrays = random_arrays(0)
    out, lse = fastattn.attention(*arrays, key_lengths=20, return_lse=True)
    found = fastattn.flex_attention_backward(
        out, *arrays, out, lse, score_mod=inside, score_grad=function, aux=(table,), key_lengths=20
    )
    assert np.isfinite(found.query).all()


def test_arguments():
    def function(score, b, h, q_idx, kv_idx):
        return score

    raises(ValueError, "wrt names aux, which is not given", function, wrt=("aux",))
    raises(
        ValueError,
        "wrt names aux, which a score_mod reads, and there is none",
        None,
        (np.ones(3),),
        wrt=("aux",),
    )
    raises(
        ValueError, "score_grad is the derivative of score_mod, which is not given", None, score_grad=function
    )
    raises(ValueError, "wrt must name some of query, key, value, bias, sinks, aux", function, wrt=("mask",))
    raises(TypeError, "score_grad 'operator|score_grad must be a function", function, score_grad=operator.neg)
    raises(
        TypeError, r"score_grad '<lambda>'(?s:.*)called with 5 arguments", function, score_grad=lambda x: x
    )
    raises(TypeError, "score_grad '<lambda>' must return one real number", function,
           score_grad=lambda score, b, h, i, j: (score, score))  # fmt: skip
    raises(TypeError, "block_mask must be", function, block_mask=np.ones((17, 33), bool))
    raises(TypeError, "return_lse", function, return_lse=True)
    arrays = random_arrays(0)
    out, lse = fastattn.attention(*arrays, return_lse=True)
    with pytest.raises(ValueError, match="wrt must name some of query, key, value, bias, sinks, got 'aux'"):
        fastattn.attention_backward(out, *arrays, out, lse, wrt="aux")


def test_backends_that_run_no_derivatives_say_so():
    def function(score, b, h, q_idx, kv_idx):
        return score

    raises(fastattn.BackendError, "numba: it computes no gradients", function, backend="numba")
    raises(fastattn.BackendError, "reference: it runs no score_mod", function, backend="reference")


def test_masks_alone_run_on_the_reference():
    arrays = random_arrays(0, dtype="float64")
    options = {"mask_mod": lambda b, h, i, j: j <= i, "backend": "reference"}
    found, grad_out, grad_lse = flex(arrays, options)
    mask = np.tri(17, 33, dtype=bool)
    assert_gradients(Gradients(*found[:5]), grad_out, *arrays, wrt=ALL[:3], mask=mask, grad_lse=grad_lse)


def test_empty_sizes():
    for len_q, len_k in ((0, 5), (5, 0)):
        arrays = random_arrays(0, len_q=len_q, len_k=len_k)
        found, _, _ = flex(
            arrays,
            {"score_mod": lambda score, b, h, i, j, t: score * t[h], "aux": (np.ones(2),)},
            ("query", "aux"),
        )
        assert (found.query == 0).all()
        assert (found.aux[0] == 0).all()


def test_it_prints():
    arrays = random_arrays(0)
    options = {"score_mod": lambda score, b, h, i, j, t: score * t[h], "aux": (np.ones(2),)}
    found, _, _ = flex(arrays, options, ("query", "aux"))
    assert repr(found) == (
        "FlexGradients(query=<float32 (2, 17, 16)>, key=None, value=None, bias=None, sinks=None, "
        "aux=(<float64 (2,)>,))"
    )
