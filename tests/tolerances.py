"""How much error is allowed, and why. No test passes a tolerance of its own.

A result is right when, element by element,

    |result - exact| <= 2 * (worst error of the plain NumPy formula)  +  ROUNDINGS * eps * reach

*exact* is `tests.naive.attention` in extended precision and the *formula* is `tests.naive.formula` in
the result's own precision, on the same data. The factor of two is the usual one: a blocked sum is in
another order than the formula's, so its error is of the same size but not the same number.

The second term covers problems so small that the formula is right by luck. A row takes up to eight
roundings that the formula may not: the scale applied to the query, the change to base two, the
bias, the subtraction of the maximum, exp2 (1 ULP), the rescaling by an older maximum, the product with
the value and the division. Each is at most ``eps / 2``: four ``eps`` in all. ``reach`` says how far
one such relative error moves this element: for an output,

    sum_j p_j (1 + m_j) |v_j|  +  (sum_j p_j m_j) (sum_j p_j |v_j|)

with ``p`` the weights and ``m_j`` the size of what is rounded on the way to score ``j`` (the score,
the bias and the norm of the products in the dot product), which is the first-order effect of a score
error ``m_j * eps`` on a softmax-weighted mean. Data that grows grows the budget with it, and nothing
else does.

Gradients have the same budget, with `tests.naive.gradients` and `tests.naive.gradient_formula`. A term of one
takes no more roundings: those of the score and of the lse as above, then ``dP - delta``, the product with
the weight, that with the soft-cap's slope, the scale and the product with the row. Their reach says how far
each moves the element; `out` and `lse`, which are given to the package as the forward call rounded them, are
part of it.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from fastattn._machine.constants import EXTENDED
from tests.cases import once
from tests.naive import Answer, Baseline, Gradients, attention, formula, gradient_formula, gradients

ROUNDINGS = 4


def computes_as_upcast(isa: str | None, dtype: Any) -> bool:
    """Whether calls in this 16-bit type throughout have the bits of those on upcast arrays: not where there
    are products of the type, which are added up in another order."""
    return np.dtype(dtype).name != "bfloat16" or isa not in EXTENDED


def assert_close(name: str, got: np.ndarray, exact: np.ndarray, reach: np.ndarray, plain: np.ndarray) -> None:
    """Assert that `got` is within the budget of the module docstring; NaN and infinities must agree."""
    assert got.shape == exact.shape, f"{name}: shape {got.shape}, expected {exact.shape}"
    if got.size == 0:
        return
    limits = np.finfo(got.dtype)
    finite = np.isfinite(exact)
    np.testing.assert_array_equal(np.isnan(got), np.isnan(exact), err_msg=f"{name}: where it is NaN")
    infinite = np.isinf(exact)
    np.testing.assert_array_equal(
        got[infinite], exact[infinite].astype(got.dtype), err_msg=f"{name}: infinities"
    )
    error = np.zeros(exact.shape)
    error[finite] = np.abs(got[finite] - exact[finite])
    judged = finite & np.isfinite(plain)
    plain_error = float(np.abs(plain[judged] - exact[judged]).max(initial=0))
    budget = np.array(2 * plain_error + ROUNDINGS * (float(limits.eps) * reach + float(limits.tiny)))
    budget = np.where(finite, budget, 0)
    worst = np.unravel_index(np.argmax(np.where(finite, error - budget, -np.inf)), error.shape)
    assert np.all(error[finite] <= budget[finite]), (
        f"{name} ({got.dtype}) at {tuple(map(int, worst))}: got {got[worst]!r}, exact {exact[worst]!r}, "
        f"error {error[worst]:.3g} over the budget {budget[worst]:.3g}, formula's worst {plain_error:.3g}"
    )


def assert_answer(results: tuple[np.ndarray, ...], exact: Answer, plain: Baseline) -> None:
    """Assert that ``(out, lse, weights)``, or a beginning of it, is within budget."""
    assert isinstance(results, tuple)
    assert 1 <= len(results) <= 3
    for name, got in zip(("out", "lse", "weights"), results, strict=False):
        assert_close(name, got, getattr(exact, name), getattr(exact, f"{name}_reach"), getattr(plain, name))


@once
def solve(*arrays: Any, **options: Any) -> tuple[Answer, Baseline]:
    """The exact answer and the formula's."""
    return attention(*arrays, **options), formula(*arrays, **options)


def assert_attention(
    results: tuple[np.ndarray, ...], query: Any, key: Any, value: Any, **options: Any
) -> None:
    """Compute the exact answer for these arrays and options, and hold ``(out, lse, weights)`` to it."""
    assert_answer(results, *solve(query, key, value, **options))


@once
def solve_gradients(*arrays: Any, **options: Any) -> tuple[Gradients, Gradients, Gradients]:
    """The exact gradients, their reach and the formula's."""
    return (*gradients(*arrays, **options), gradient_formula(*arrays, **options))


def assert_gradients(
    got: Any, grad_out: Any, query: Any, key: Any, value: Any, *, wrt: Any, **options: Any
) -> None:
    """Hold the gradients that `wrt` names to the budget, and the others to None; see also what they are."""
    arrays = (array.astype(float) if array.dtype.kind in "biu" else array for array in (query, key, value))
    exact, reach, plain = solve_gradients(grad_out, *arrays, **options)
    given = {"query": query, "key": key, "value": value} | options
    assert got._fields == ("query", "key", "value", "bias", "sinks")
    for name, gradient in got._asdict().items():
        if name not in wrt:
            assert gradient is None, name
            continue
        dtype = np.asarray(given[name]).dtype.newbyteorder("=")
        assert type(gradient) is np.ndarray, name
        assert gradient.dtype == (np.float64 if dtype.kind in "biu" else dtype), name
        assert gradient.flags.c_contiguous, name
        assert gradient.flags.writeable, name
        assert_close(f"gradient of {name}", gradient, *(getattr(of, name) for of in (exact, reach, plain)))


def assert_same_bits(got: np.ndarray, expected: np.ndarray, what: str = "result") -> None:
    """Assert equality of every bit (so -0.0 differs from 0.0), of the shape and of the type."""
    assert got.shape == expected.shape, f"{what}: shape {got.shape}, expected {expected.shape}"
    assert got.dtype == expected.dtype, f"{what}: dtype {got.dtype}, expected {expected.dtype}"
    if got.tobytes() == expected.tobytes():
        return
    unsigned = np.dtype(f"u{got.dtype.itemsize}")
    left, right = (np.ascontiguousarray(array).view(unsigned) for array in (got, expected))
    differ = np.argwhere(left != right)
    first = tuple(int(n) for n in differ[0])
    raise AssertionError(
        f"{what}: {len(differ)} of {got.size} elements differ, first at {first}: "
        f"{got[first]!r} and {expected[first]!r}"
    )


def assert_all_same(got: Any, expected: Any, what: str = "result") -> None:
    """The same of arrays one after another, or of two dicts of arrays."""
    if isinstance(expected, dict):
        assert got.keys() == expected.keys()
        triples = [(name, got[name], expected[name]) for name in expected]
    else:
        triples = [(n, one, other) for n, (one, other) in enumerate(zip(got, expected, strict=True))]
    for name, one, other in triples:
        assert_same_bits(one, other, f"{what} {name}")
