"""`varlen_attention`: packed documents attend within themselves."""

from __future__ import annotations

import numpy as np
import pytest

import fastattn
from tests import naive
from tests.cases import FLOATS
from tests.refusals import assert_named
from tests.tolerances import assert_attention, assert_same_bits

LENGTHS_Q = (5, 0, 17, 1, 40)
LENGTHS_K = (9, 3, 17, 1, 0)


def packed(
    lengths_q=LENGTHS_Q,
    lengths_k=LENGTHS_K,
    *,
    heads=4,
    kv_heads=2,
    head_dim=16,
    value_dim=12,
    dtype="float32",
):
    rng = np.random.default_rng(3)
    cu_q, cu_k = (np.cumsum([0, *lengths]) for lengths in (lengths_q, lengths_k))
    query = rng.standard_normal((cu_q[-1], heads, head_dim)).astype(dtype)
    key = rng.standard_normal((cu_k[-1], kv_heads, head_dim)).astype(dtype)
    value = rng.standard_normal((cu_k[-1], kv_heads, value_dim)).astype(dtype)
    return query, key, value, cu_q, cu_k


def documents(query, key, value, cu_q, cu_k):
    """Each document's arrays as ``(H, L, D)``, beside the slice of its queries."""
    for n in range(len(cu_q) - 1):
        rows, keys = slice(cu_q[n], cu_q[n + 1]), slice(cu_k[n], cu_k[n + 1])
        yield rows, query[rows].swapaxes(0, 1), key[keys].swapaxes(0, 1), value[keys].swapaxes(0, 1)


def assert_documents(out, lse, arrays, **options):
    query, _, value = arrays[:3]
    assert out.shape == (len(query), query.shape[1], value.shape[-1])
    assert lse.shape == (query.shape[1], len(query))
    for rows, q, k, v in documents(*arrays):
        assert_attention((out[rows].swapaxes(0, 1), lse[:, rows]), q, k, v, **options)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": "top_left"},
        {"causal": "bottom_right"},
        {"scale": 0.3},
        {"softcap": 2.0},
        {"window": (4, 1)},
        {"window": (3, 0), "causal": "top_left"},
        {"window": (3, None), "causal": "bottom_right"},
    ],
    ids=str,
)
def test_each_document_by_itself(engine, options, dtype):
    arrays = packed(dtype=dtype)
    results = fastattn.varlen_attention(*arrays, return_lse=True, backend=engine.backend, **options)
    assert_documents(*results, arrays, **options)


def test_sinks(engine):
    arrays = packed()
    sinks = np.array([0.5, -1.0, 3.0, 0.0], np.float32)
    results = fastattn.varlen_attention(*arrays, sinks=sinks, return_lse=True, backend=engine.backend)
    assert_documents(*results, arrays, sinks=sinks)


def test_self_attention_needs_one_set_of_lengths(engine):
    arrays = packed(LENGTHS_Q, LENGTHS_Q)
    for causal in (False, True, "top_left"):
        options = {"causal": causal, "backend": engine.backend, "return_lse": True}
        out, lse = fastattn.varlen_attention(*arrays[:4], **options)
        assert_documents(out, lse, arrays, causal=causal)
        again = fastattn.varlen_attention(*arrays, **options)
        assert_same_bits(out, again[0])
        assert_same_bits(lse, again[1])


def test_many_documents_of_odd_lengths(engine):
    lengths = [1, 2, 3, 15, 16, 17, 31, 33, 47, 48, 49, 129]
    arrays = packed(lengths, lengths, heads=2, head_dim=24)
    results = fastattn.varlen_attention(*arrays, causal=True, return_lse=True, backend=engine.backend)
    assert_documents(*results, arrays, causal=True)


def test_a_document_does_not_see_another(engine):
    query, key, value, cu_q, cu_k = packed()
    clean = fastattn.varlen_attention(query, key, value, cu_q, cu_k, backend=engine.backend)
    spoilt_key, spoilt_value = key.copy(), value.copy()
    spoilt = slice(cu_k[2], cu_k[3])
    spoilt_key[spoilt], spoilt_value[spoilt] = np.nan, np.inf
    out = fastattn.varlen_attention(query, spoilt_key, spoilt_value, cu_q, cu_k, backend=engine.backend)
    rows = np.ones(len(query), bool)
    rows[cu_q[2] : cu_q[3]] = False
    assert_same_bits(out[rows], clean[rows])
    assert np.isnan(out[~rows]).all()


def test_document_without_keys_is_zero(engine):
    query, key, value, cu_q, cu_k = packed()
    out, lse = fastattn.varlen_attention(
        query, key, value, cu_q, cu_k, return_lse=True, backend=engine.backend
    )
    np.testing.assert_array_equal(out[cu_q[4] :], 0)
    np.testing.assert_array_equal(lse[:, cu_q[4] :], -np.inf)


@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.uint16, list])
def test_boundaries_may_be_any_integers(backend, dtype):
    arrays = packed()
    boundaries = [list(map(int, cu)) if dtype is list else cu.astype(dtype) for cu in arrays[3:]]
    out = fastattn.varlen_attention(*arrays[:3], *boundaries, backend=backend.backend)
    assert_same_bits(out, fastattn.varlen_attention(*arrays, backend=backend.backend))


def test_no_documents(backend):
    query, key, value, _, _ = packed((), ())
    out, lse = fastattn.varlen_attention(
        query, key, value, [0], [0], return_lse=True, backend=backend.backend
    )
    assert out.shape == (0, 4, 12)
    assert lse.shape == (4, 0)


def test_refused_values(backend):
    names = ("query", "key", "value", "cu_seqlens_q", "cu_seqlens_k")
    given = dict(zip(names, packed(), strict=True))
    rising = [[0, 5, 3, 22, 23, 63], [1, 5, 5, 22, 23, 63], [0, 5, 5, 22, 23, 62]]
    values = {
        "cu_seqlens_q": [*rising, [], [[0, 63]]],
        "cu_seqlens_k": [[0, 9, 12, 29, 30, 31], [0, 9, 30], None],
        "query": [np.zeros((63, 16), np.float32), np.zeros((63, 3, 16), np.float32)],
        "key": [np.zeros((30, 2, 8), np.float32)],
    }

    def call(**wrong):
        arguments = given | wrong
        with pytest.raises(ValueError) as caught:
            fastattn.varlen_attention(**arguments, backend=backend.backend)
        shapes = ", ".join(f"{name} {arguments[name].shape}" for name in names[:3])
        assert str(caught.value).endswith(f"; {shapes}")
        raise ValueError(str(caught.value).removesuffix(shapes))

    assert_named(call, ValueError, values)
    said = (
        "^causal=True needs as many keys as queries in each document, got 5 queries and 9 keys in document 0"
    )
    with pytest.raises(ValueError, match=f'{said}; say causal="top_left" or causal="bottom_right"'):
        call(causal=True)


def test_boundaries_must_be_integers(backend):
    query, key, value, cu_q, cu_k = packed()
    with pytest.raises(TypeError, match=r"^cu_seqlens_q must be integers, got dtype float64; "):
        fastattn.varlen_attention(query, key, value, cu_q.astype(float), cu_k, backend=backend.backend)


def test_the_oracle_agrees_that_documents_are_a_block_mask():
    """Ties the helper above to the definition: documents one by one equal one masked problem."""
    query, key, value, cu_q, cu_k = packed(LENGTHS_Q, LENGTHS_K)
    ids_q, ids_k = (np.repeat(np.arange(len(cu) - 1), np.diff(cu)) for cu in (cu_q, cu_k))
    whole = naive.attention(*(a.swapaxes(0, 1) for a in (query, key, value)), mask=ids_q[:, None] == ids_k)
    for rows, q, k, v in documents(query, key, value, cu_q, cu_k):
        np.testing.assert_array_equal(whole.out[:, rows], naive.attention(q, k, v).out)
