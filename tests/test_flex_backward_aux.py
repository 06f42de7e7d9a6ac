"""Gradients of `aux` of `flex_attention_backward`: each way to read elements, sums of them, roundings."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

import fastattn
from tests.cases import random_arrays
from tests.conftest import FLOAT32_FIRST
from tests.test_flex_backward import SIZES, flex
from tests.tolerances import assert_all_same, assert_same_bits

pytest.importorskip("numba")
pytestmark = pytest.mark.usefixtures("compiled")


def of_aux(function, aux, arrays=None, **options):
    """The gradients of aux, and those of the modified scores: those of a bias for each pair."""
    arrays = random_arrays(3, **SIZES, dtype="float64") if arrays is None else arrays
    bias = np.zeros((*arrays[0].shape[:-1], arrays[1].shape[-2]))
    options = {"score_mod": function, "aux": aux, "bias": bias} | options
    found, _, _ = flex(arrays, options, ("aux", "bias"))
    return found.aux, found.bias


def test_how_elements_are_read():
    """Views of an array, flat and negative indices, loops: the element that is read has the gradient."""
    rng = np.random.default_rng(0)
    table = rng.standard_normal((4, 70))

    def one(score, b, h, q_idx, kv_idx, table):
        return score + table[h, kv_idx]

    (wanted,), _ = of_aux(one, (table,))
    assert abs(wanted).min() > 0

    def views(score, b, h, q_idx, kv_idx, table):
        row = table[h]
        last = row[: kv_idx + 1]
        x = table.T[kv_idx, h] + row[kv_idx] + table[h][kv_idx] + last[-1] + table.flat[h * 70 + kv_idx]
        return (
            score + x + table[h - 4, kv_idx - 70] + table[:, kv_idx][h] + table.reshape(-1)[h * 70 + kv_idx]
        )

    (found,), _ = of_aux(views, (table,))
    # Eight reads, each with the gradient of `one` at a score that is 7 times the element larger.
    shifted = of_aux(lambda score, b, h, i, j, t, u: score + t[h, j] + u[h, j], (table, 7 * table))[0]
    np.testing.assert_allclose(found, 8 * shifted[0], rtol=1e-9, atol=1e-11)
    assert_same_bits(*shifted)

    def loop(score, b, h, q_idx, kv_idx, table, n):
        total = 0.0
        for step in range(n):
            total += (step + 1) * table[h, (kv_idx + step) % 70]
        return score + total

    (found, none), change = of_aux(loop, (table, 3))
    assert none is None
    columns = change.sum((0, 2))
    wanted = sum((step + 1) * np.roll(columns, step, axis=-1) for step in range(3))
    np.testing.assert_allclose(found, wanted, rtol=1e-9, atol=1e-11)


def test_constant_indices():
    def function(score, b, h, q_idx, kv_idx, pair, table):
        row = table[h % 2]
        first, second = pair[0], row[1]
        return score * first + pair[-1] * second

    pair, table = np.array([0.5, 2.0]), np.array([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    arrays = random_arrays(3, **SIZES, dtype="float64")
    (of_pair, of_table), change = of_aux(function, (pair, table), arrays)
    keys = np.repeat(arrays[1], 2, axis=1)
    scores = arrays[0] @ keys.swapaxes(-1, -2) / 4
    by_head = change.sum((0, 2, 3))
    np.testing.assert_allclose(
        of_pair, [(change * scores).sum(), (by_head * table[[0, 1, 0, 1], 1]).sum()], rtol=1e-9, atol=1e-11
    )
    wanted = np.zeros((2, 3))
    wanted[:, 1] = 2 * (by_head[:2] + by_head[2:])
    np.testing.assert_allclose(of_table, wanted, rtol=1e-9, atol=1e-11)


def test_what_has_a_gradient():
    """Floating arrays and numbers, in their shapes and types."""
    aux = (
        np.float32(2), 0.5, 3, True, np.arange(4), [0.25, 0.5, 1.0, 2.0], np.ones((1, 4), ">f4"),
        np.ones(4, np.float16), np.ones((4, 0)), np.array(1.5), np.broadcast_to(np.float64(1), (4,)),
    )  # fmt: skip

    def function(score, b, h, q_idx, kv_idx, f, x, n, flag, whole, listed, swapped, half, empty, one, same):
        x = f * x * n * flag * whole[h] * listed[h] * swapped[0, h] * half[h] * one * same[h]
        return score + 0.01 * x

    found, change = of_aux(function, aux)
    assert [x is None for x in found] == [type(x) in (int, bool) or n == 4 for n, x in enumerate(aux)]
    for x, given in zip(found, aux, strict=True):
        if x is not None:
            assert x.shape == np.shape(given)
            assert x.dtype == np.asarray(given).dtype.newbyteorder("=")
            assert x.flags.c_contiguous
    by_head = 0.03 * change.sum((0, 2, 3)) * np.arange(4) * aux[5] * 1.5
    np.testing.assert_allclose(found[1], 2 * by_head.sum(), rtol=1e-9, atol=1e-11)
    np.testing.assert_allclose(found[-1], by_head, rtol=1e-9, atol=1e-11)
    np.testing.assert_allclose(found[6], by_head[None].astype(np.float32), rtol=1e-6)
    np.testing.assert_allclose(found[7], by_head.astype(np.float16), rtol=2e-3)


def test_a_derivative_of_0_stays_0():
    """Beside an element whose derivative is inf, the others have theirs."""
    first, second = np.zeros(4), np.ones(4)
    found, change = of_aux(
        lambda score, b, h, q_idx, kv_idx, s, t: score + math.sqrt(s[h]) * t[h] + t[h], (first, second)
    )
    np.testing.assert_allclose(found[1], change.sum((0, 2, 3)), rtol=1e-9, atol=1e-11)
    assert np.isinf(found[0]).all() or np.isnan(found[0]).any()


@pytest.mark.parametrize("n", [1, 300, 1 << 22], ids=["small", "larger", "two copies"])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_same_bits_on_any_number_of_threads(dtype, n):
    arrays = random_arrays(0, lead=(2,), heads=4, kv_heads=2, len_q=150, len_k=700, dtype=dtype)
    table = np.random.default_rng(1).standard_normal(n).astype(dtype)

    def function(score, b, h, q_idx, kv_idx, table, number):
        return score * number + table[(q_idx * 7 + kv_idx * h) % n]

    options = {"score_mod": function, "aux": (table, 0.5), "causal": "bottom_right"}
    results = [
        flex(arrays, options, ("query", "key", "value", "aux"), num_threads=threads)[0]
        for threads in (1, 2, 3, 8)
    ]
    for other in results[1:]:
        assert_all_same(other[:3], results[0][:3])
        assert_all_same(other.aux, results[0].aux)


@pytest.mark.parametrize("rows", [300, 7000], ids=["many sums", "two sums"])
def test_gradients_of_aux_are_rounded_once_and_may_overflow(rows):
    """In float32 and float16 from sums in float64, without a warning. Of 90,000 sums some are so close to the
    middle between two numbers of float16 that in float32 they are there."""
    query, key, value = random_arrays(heads=8, len_q=300, len_k=300, value_dim=9, dtype=np.float32)
    grad_out = np.random.default_rng(0).standard_normal((*query.shape[:-1], 9), dtype=np.float32)

    def shifted(score, b, h, i, j, table):
        return score * (1 + table[i, j])

    def gradient(dtype, factor=1):
        table = np.zeros((rows, 300), dtype)
        options = {"score_mod": shifted, "aux": (table,)}
        out, lse = fastattn.flex_attention(query, key, value, return_lse=True, **options)
        found = fastattn.flex_attention_backward(
            grad_out * np.float32(factor), query, key, value, out, lse, wrt=("aux",), **options
        )
        assert found.aux[0].dtype == dtype
        return found.aux[0][:300]

    exact = gradient(np.float64)
    assert (exact.astype(np.float16) != exact.astype(np.float32).astype(np.float16)).any()
    for dtype in (np.float32, np.float16):
        assert_same_bits(gradient(dtype), exact.astype(dtype))
    with np.errstate(all="raise"):
        assert np.isinf(gradient(np.float16, 1e6)).any()
        assert np.isinf(gradient(np.float32, 2e37)).any()


# ---------------------------------------------------------------- elements that one score reads alone


class Dual:
    """A number and its derivatives in elements of an array, by their place in it."""

    def __init__(self, value: float, slopes: dict[int, float]) -> None:
        self.value, self.slopes = value, slopes

    def __add__(self, other: Any) -> Dual:
        other = other if isinstance(other, Dual) else Dual(other, {})
        places = self.slopes.keys() | other.slopes.keys()
        return Dual(
            self.value + other.value, {at: self.slopes.get(at, 0) + other.slopes.get(at, 0) for at in places}
        )

    def __mul__(self, other: Any) -> Dual:
        other = other if isinstance(other, Dual) else Dual(other, {})
        of_other = Dual(0, {at: slope * self.value for at, slope in other.slopes.items()})
        return (
            Dual(self.value * other.value, {at: x * other.value for at, x in self.slopes.items()}) + of_other
        )

    __radd__, __rmul__ = __add__, __mul__


def summed(function, table, change):
    """The gradient of `table`: `change`, that of the function's values, times the derivatives in elements."""
    numbers = np.array([Dual(x, {at: 1.0}) for at, x in enumerate(table.reshape(-1).tolist())])
    gradient = np.zeros(table.size)
    for indices in np.ndindex(change.shape):
        for at, slope in function(Dual(0, {}), *indices, numbers.reshape(table.shape)).slopes.items():
            gradient[at] += slope * change[indices]
    return gradient.reshape(table.shape)


def plain(score, b, h, i, j, t):
    return score + t[h, i, j]


def of_items(score, b, h, i, j, t):
    return score + 2 * t[b, h, i, j]


def other_order(score, b, h, i, j, t):
    return score + t[j, 0, i, h]


def on_a_branch(score, b, h, i, j, t):
    if i > j:
        return score + t[h, i, j]
    return score


def renamed(score, b, h, i, j, t):
    bias = t
    row, key = i, j
    return score + bias[h, row, key] * 3


def squared(score, b, h, i, j, t):
    return score + t[h, i, j] * t[h, i, j]


def squared_by_name(score, b, h, i, j, t):
    x = t[h, i, j]
    return score + x * x


def mirrored(score, b, h, i, j, t):
    return score + t[h, i, j] + t[h, j, i]


def of_a_row(score, b, h, i, j, t):
    row = t[h, i]
    return score + row[j] * row[j]


def of_a_pair(score, b, h, i, j, t):
    pair = t[h, i, j]
    return score + pair[0] * pair[0] + pair[-1]


def twice(score, b, h, i, j, t):
    return plain(plain(score, b, h, i, j, t), b, h, i, j, t)


def in_a_loop(score, b, h, i, j, t):
    for n in range(3):
        score = score + t[h, i, j] * (n + 1)
    return score


def halved(score, b, h, i, j, t):
    j = j // 2
    return score + t[h, i, j]


def one_of_two(score, b, h, i, j, t):
    k = j if i > 9 else 0
    return score + t[h, i, k]


def by_another_name(score, b, h, i, j, t):
    x = t
    if i > j:
        x = t
    return score + t[h, i, j] * x[h, i, j]


def by_a_choice(score, b, h, i, j, t):
    return score + t[h, i, j] * (t if i > j else t)[h, i, j]  # noqa: RUF034


def either(t, condition):
    if condition:
        return t
    return t


def by_a_helper(score, b, h, i, j, t):
    return score + t[h, i, j] * either(t, i > j)[h, i, j]


def by_a_default(score, b, h, i, j, t, other=None):
    x = t
    if other is None:
        x = t
    return score + t[h, i, j] * x[h, i, j]


def assigned_again(score, b, h, i, j, t):
    x = t[h, i, j]
    if i > j:
        t = t
    return score + x * t[h, i, j]


def in_a_tuple(score, b, h, i, j, t):
    pair = (t, t)
    return score + pair[0][h, i, j] * pair[1][h, i, j]


def without_heads(score, b, h, i, j, t):
    return score + t[i, j]


def without_rows(score, b, h, i, j, t):
    return score + t[h, j]


def without_keys(score, b, h, i, j, t):
    return score + t[h, i]


def flat(score, b, h, i, j, t):
    return score + t.flat[j + 70 * i] * t.flat[j + 70 * i]


#: For heads, rows and keys, and one item.
OWN = [plain, of_items, other_order, on_a_branch, renamed, squared_by_name]
SHARED = [
    squared, mirrored, of_a_row, of_a_pair, twice, in_a_loop, halved, one_of_two, by_another_name,
    by_a_choice, by_a_helper, by_a_default, assigned_again, in_a_tuple, without_heads, without_rows,
    without_keys, flat,
]  # fmt: skip
SHAPES = {
    "of_items": (2, 4, 37, 70), "other_order": (70, 1, 37, 4), "mirrored": (4, 70, 70),
    "of_a_pair": (4, 37, 70, 2), "without_heads": (37, 70), "without_rows": (4, 70), "without_keys": (4, 37),
}  # fmt: skip


@pytest.fixture
def are_own(monkeypatch):
    """Filled in: whether the elements of each of `aux` are read by one score alone."""
    functions = pytest.importorskip("fastattn.backends.jit.functions")
    found, is_own = [], functions.GradientLoops._is_own

    def noted(self, *given):
        found.append(is_own(self, *given))
        return found[-1]

    monkeypatch.setattr(functions.GradientLoops, "_is_own", noted)
    return found


@pytest.mark.parametrize("function", [*OWN, *SHARED], ids=lambda function: function.__name__)
def test_elements_that_one_score_reads(function, are_own):
    """Their gradients are stored without sums, if nothing else reads them, and only then."""
    lead = (2,) if function is of_items else ()
    arrays = random_arrays(3, **(SIZES | {"lead": lead}), dtype="float64")
    table = np.random.default_rng(0).standard_normal(SHAPES.get(function.__name__, (4, 37, 70)))
    (found,), change = of_aux(function, (table,), arrays, causal="bottom_right")
    wanted = summed(function, table, change.reshape(-1, 4, 37, 70))
    np.testing.assert_allclose(found, wanted, rtol=1e-9, atol=1e-12)
    assert are_own == [function in OWN]


def test_elements_of_several_items_are_summed(are_own):
    arrays = random_arrays(3, **SIZES, dtype="float64")
    table = np.random.default_rng(0).standard_normal((4, 37, 70))
    (found,), change = of_aux(plain, (table,), arrays)
    np.testing.assert_allclose(found, change.sum(0), rtol=1e-9, atol=1e-12)
    assert are_own == [False]


@pytest.mark.parametrize("dtype", FLOAT32_FIRST)
def test_elements_of_several_arrays(dtype, are_own):
    """Of those that a score has alone, in each dtype and order in memory, beside a sum and a number."""
    arrays = random_arrays(3, **(SIZES | {"lead": ()}), dtype=dtype)
    rng = np.random.default_rng(0)
    whole, other = rng.standard_normal((2, 4, 37, 70))
    aux = (
        whole.astype(np.float32), np.float64(0.5), other[:, ::-1], rng.standard_normal(70),
        np.asfortranarray(whole), other.astype(np.float16), np.broadcast_to(np.float32(1), (4, 37, 70)),
    )  # fmt: skip

    def function(score, b, h, i, j, first, number, second, shared, third, half, same):
        return (
            score + first[h, i, j] + number * second[h, i, j] + shared[j] - third[h, i, j] + half[h, i, j]
            + same[h, i, j]
        )  # fmt: skip

    found, change = of_aux(function, aux, arrays)
    assert are_own == [True, False, True, False, True, False, True]
    for n, sign in ((0, 1), (4, -1), (5, 1), (6, 1)):
        assert_same_bits(found[n], (sign * change).astype(aux[n].dtype))
    np.testing.assert_allclose(found[2], 0.5 * change, rtol=1e-6)
    np.testing.assert_allclose(found[3], change.sum((0, 1)), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(found[1], (change * aux[2]).sum(), rtol=1e-4, atol=1e-4)


def test_one_score(are_own):
    """No index tells it apart from others, and none need do so: what it reads twice is summed still."""
    arrays = random_arrays(3, heads=1, len_q=1, len_k=1, dtype="float64")
    value = arrays[2] + 1

    def gradients(function, table):
        (found,), change = of_aux(function, (table,), (*arrays[:2], value), causal=False, sinks=np.zeros(1))
        np.testing.assert_allclose(found, summed(function, table, change[None]), rtol=1e-12)
        assert abs(found).max() > 0

    table = np.full(1, 2.0)
    gradients(lambda score, b, h, i, j, t: score + t[j], table)
    gradients(lambda score, b, h, i, j, t: score + t[0] * t[0], table)
    gradients(lambda score, b, h, i, j, t: score + t.flat[j] * t.flat[j], table)
    gradients(lambda score, b, h, i, j, t: score + t[h, i, j], table.reshape(1, 1, 1))
    assert are_own == [True, False, False, True]


def test_a_second_attempt_leaves_nothing_of_the_first(monkeypatch):
    """Where the lse is not exact enough, gradients are found twice: those stored first are not left."""
    functions = pytest.importorskip("fastattn.backends.jit.functions")
    make_sums = functions.GradientLoops._make_sums

    def after_another(self, n_tasks):
        for room in self._backward.grad_aux:
            room[...] = np.nan
        make_sums(self, n_tasks)

    monkeypatch.setattr(functions.GradientLoops, "_make_sums", after_another)
    arrays = random_arrays(3, heads=4, len_q=37, len_k=70, dtype="float64")
    (own, shared), change = of_aux(
        lambda score, b, h, i, j, t, u: score + t[h, i, j] + u[h, j],
        (np.zeros((4, 37, 70)), np.zeros((4, 70))), arrays, causal="top_left",
    )  # fmt: skip
    assert_same_bits(own, change)
    np.testing.assert_allclose(shared, change.sum(1), rtol=1e-9, atol=1e-12)
