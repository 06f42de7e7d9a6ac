"""`varlen_attention`: packed documents attend within themselves."""

from __future__ import annotations

import numpy as np
import pytest

import fastattn
from fastattn import masks
from tests import naive
from tests.cases import FLOATS
from tests.conftest import computes_gradients
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
    """Each document's arrays as ``(H, L, D)``, beside the slices of its queries and keys."""
    for n in range(len(cu_q) - 1):
        rows, keys = slice(cu_q[n], cu_q[n + 1]), slice(cu_k[n], cu_k[n + 1])
        yield (
            (rows, keys),
            query[rows].swapaxes(0, 1),
            key[keys].swapaxes(0, 1),
            value[keys].swapaxes(0, 1),
        )


def within(arrays):
    """Bool ``(T, T_k)``: whether the key is of the query's document."""
    ids_q, ids_k = (np.repeat(np.arange(len(cu) - 1), np.diff(cu)) for cu in arrays[3:])
    return ids_q[:, None] == ids_k


def assert_documents(out, lse, arrays, weights=None, **options):
    """`options` that are arrays of scores are cut to each document; an object is asked for it."""
    query, key, value = arrays[:3]
    scores = (query.shape[1], len(query), len(key))
    assert out.shape == (len(query), query.shape[1], value.shape[-1])
    assert lse.shape == scores[:2]
    for (rows, keys), q, k, v in documents(*arrays):
        own = dict(options)
        for name in {"mask", "bias"} & options.keys():
            if isinstance(own[name], masks.Mask):
                own[name] = own[name].materialize(1, q.shape[1], k.shape[1])
            else:
                own[name] = np.broadcast_to(own[name], scores)[:, rows, keys]
        more = () if weights is None else (weights[:, rows, keys],)
        assert_attention((out[rows].swapaxes(0, 1), lse[:, rows], *more), q, k, v, **own)
    if weights is not None:
        assert weights.shape == scores
        np.testing.assert_array_equal(weights[:, ~within(arrays)], 0)


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


def test_the_oracle_agrees_that_documents_are_a_block_mask(monkeypatch):
    """Ties the helper above to the definition: documents one by one equal one masked problem."""
    monkeypatch.setattr(naive, "TOGETHER", 1)  # no key of another document is in a sum
    arrays = packed()
    whole = naive.attention(*(a.swapaxes(0, 1) for a in arrays[:3]), mask=within(arrays))
    for (rows, _), q, k, v in documents(*arrays):
        np.testing.assert_array_equal(whole.out[:, rows], naive.attention(q, k, v).out)


# ---------------------------------------------------------------- masks, biases and weights

EVERYTHING = {"return_lse": True, "return_weights": True}


def everything(engine, arrays, **options):
    """Out, lse and weights."""
    return fastattn.varlen_attention(*arrays, backend=engine.backend, **EVERYTHING, **options)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", [(30,), (63, 1), (63, 30), (4, 1, 30), (4, 63, 30)], ids=str)
@pytest.mark.parametrize("causal", [False, "bottom_right"])
def test_a_mask_or_bias_is_that_of_all_scores(engine, shape, causal, dtype):
    arrays = packed(dtype=dtype)
    rng = np.random.default_rng(4)
    allowed, bias = rng.random(shape) < 0.7, rng.standard_normal(shape).astype(dtype)
    hiding = np.where(rng.random(shape) < 0.2, -np.inf, 4 * bias)  # float64, beside float32, too
    for given in (
        {"mask": allowed}, {"mask": allowed.astype(np.int32)}, {"mask": masks.Dense(allowed)},
        {"bias": bias}, {"bias": hiding}, {"mask": allowed, "bias": bias},
    ):  # fmt: skip
        out, lse, weights = everything(engine, arrays, causal=causal, **given)
        as_array = {"mask": allowed} if "mask" in given else {}
        assert_documents(out, lse, arrays, weights, causal=causal, **(given | as_array))


#: Those that align queries with keys, as `attention` does in each document.
ALIGNED = [
    masks.Causal("top_left"),
    masks.Causal("bottom_right"),
    masks.Causal(offset=2),
    masks.Window(3, 1),
    masks.Window(None, 0, "top_left"),
    masks.NotSelf(),
    masks.Causal("bottom_right") & masks.NotSelf(),
    ~masks.Window(1, 1) | masks.Causal("top_left"),
]


@pytest.mark.parametrize("mask", ALIGNED, ids=str)
def test_an_object_aligns_each_document(engine, mask):
    arrays = packed()
    assert_documents(*everything(engine, arrays, mask=mask)[:2], arrays, mask=mask)
    lengths = (70, 1, 0, 130, 33)
    arrays = packed(lengths, (64, 3, 2, 200, 33), heads=2)
    options = {"window": (40, 20), "softcap": 3.0}
    out, lse, weights = everything(engine, arrays, mask=mask, **options)
    assert_documents(out, lse, arrays, weights, mask=mask, **options)


@pytest.mark.parametrize(
    ("mask", "options"),
    [
        (masks.Causal("top_left"), {"causal": "top_left"}),
        (masks.Causal("bottom_right"), {"causal": "bottom_right"}),
        (masks.Window(4, 1), {"window": (4, 1)}),
    ],
    ids=str,
)
def test_an_object_is_the_option_of_its_name(engine, mask, options):
    arrays = packed()
    for x, y in zip(
        everything(engine, arrays, mask=mask), everything(engine, arrays, **options), strict=True
    ):
        assert_same_bits(x, y)


def test_numbers_of_keys_are_those_of_all(engine):
    """The first key of each document is global; rows before the keys of their document see no other's."""
    lengths_q, lengths_k = (20, 9, 30, 0, 70), (10, 12, 30, 3, 66)
    arrays = packed(lengths_q, lengths_k)
    mask = masks.Window(1, 1) | masks.GlobalTokens(arrays[4][:-1])
    of_each = masks.Window(1, 1) | masks.GlobalTokens([0])
    out, lse, weights = everything(engine, arrays, mask=mask)
    assert_documents(out, lse, arrays, weights, mask=of_each)

    parts = masks.Segments(np.arange(129) // 7, np.arange(121) // 5)
    array = parts.materialize(1, 129, 121)
    for same in (parts, masks.Dense(array) | masks.Dense(array), parts & masks.Window(None, None)):
        out, lse, weights = everything(engine, arrays, mask=same)
        assert_documents(out, lse, arrays, weights, mask=array)


def test_a_mask_of_functions(backend):
    pytest.importorskip("numba")
    arrays = packed()
    block_mask = fastattn.create_block_mask(lambda b, h, i, j: (i + j + h) % 3 > 0, None, 4, 63, 30)
    i, j, h = np.arange(63)[:, None], np.arange(30), np.arange(4)[:, None, None]
    out, lse, weights = everything(backend, arrays, mask=block_mask)
    assert_documents(out, lse, arrays, weights, mask=(i + j + h) % 3 > 0)


def test_what_the_options_change_not(engine):
    """A mask and a bias that change nothing, and results beside, leave the bits of `out` and lse."""
    arrays = packed((150, 0, 200, 90), (150, 4, 200, 90))
    options = {"causal": "bottom_right", "backend": engine.backend}
    out, lse = fastattn.varlen_attention(*arrays, return_lse=True, **options)
    assert_same_bits(fastattn.varlen_attention(*arrays, **options), out)
    got, weights = fastattn.varlen_attention(*arrays, return_weights=True, **options)
    assert_same_bits(got, out)
    _, mean = fastattn.varlen_attention(*arrays, return_weights="mean", **options)
    np.testing.assert_allclose(mean, weights.mean(0), atol=1e-6)
    room = np.empty_like(out)
    assert fastattn.varlen_attention(*arrays, mask=masks.Window(None, None), out=room, **options) is room
    assert_same_bits(room, out)
    for given in ({"mask": np.ones(444, bool)}, {"bias": np.zeros(444, np.float32)}):
        again, same = fastattn.varlen_attention(*arrays, return_weights=True, **given, **options)
        assert_documents(again, lse, arrays, same, causal="bottom_right")
    assert_documents(out, lse, arrays, weights, causal="bottom_right")


def test_same_bits_on_any_number_of_threads(engine):
    arrays = packed((150, 0, 200, 90), (130, 4, 200, 99))
    mask = masks.Window(50, 50) | masks.GlobalTokens([0, 134])
    bias = np.random.default_rng(5).standard_normal(433).astype(np.float32)
    options = {"mask": mask, "bias": bias, "causal": "bottom_right"}
    one, *others = (everything(engine, arrays, num_threads=n, **options) for n in (1, 2, 3))
    for other in others:
        for x, y in zip(one, other, strict=True):
            assert_same_bits(x, y)


def test_no_documents_with_options(backend):
    query, key, value, *_ = packed((), ())
    options = {"mask": np.ones((4, 0, 0), bool), "bias": np.zeros((0, 0), np.float32)}
    out, lse, weights = everything(backend, (query, key, value, [0], [0]), **options)
    assert (out.shape, lse.shape, weights.shape) == ((0, 4, 12), (4, 0), (4, 0, 0))


def test_refused_options(backend):
    arrays = packed()
    refused = {
        "mask": [
            (ValueError, np.ones((5, 63, 30), bool), r"^mask of shape \(5, 63, 30\) does not broadcast to"),
            (ValueError, np.ones((1, 4, 63, 30), bool), r"^mask of shape \(1, 4, 63, 30\) does not"),
            (
                ValueError,
                masks.Causal(),
                r"^mask Causal\(\) needs L == S in each document, got S - L = 4 in one; say",
            ),
            (
                ValueError,
                masks.KeyLengths([9] * 5),
                r"^mask KeyLengths\(.*not of a document: .* Dense\(array",
            ),
            (
                ValueError,
                masks.Causal("top_left") & masks.PrefixLM(3),
                r"^mask PrefixLM\(.*not of a document",
            ),
            (
                ValueError,
                masks.Window(1, 1) | masks.Neighborhood(30, 3),
                r"^mask Neighborhood\(.*not of packed documents: .* Dense\(array",
            ),
            (ValueError, masks.Causal(offset=[1] * 5), "does not broadcast to the leading batch axes"),
            (ValueError, masks.Segments(np.arange(30)), "is for L=30 and S=30, got L=63 and S=30"),
            (
                TypeError,
                np.ones((63, 30)),
                r"^mask must be a fastattn.masks object or a bool or integer array",
            ),
        ],
        "bias": [
            (ValueError, np.ones((63, 31)), r"^bias of shape \(63, 31\) does not broadcast"),
            (TypeError, np.ones((63, 30), int), r"^bias must be a float16"),
        ],
        "dropout": [
            (ValueError, 0.1, "^dropout needs a seed"),
            (ValueError, 1.0, "^dropout must be at least 0"),
        ],
        "return_weights": [(ValueError, "max", '^return_weights must be False, True or "mean"')],
        "key_lengths": [(TypeError, [3], "unexpected keyword argument 'key_lengths': leave it out")],
        "layout": [(TypeError, "bshd", r"'layout': leave it out: packed arrays are \(T, H, D\)")],
    }
    for name, cases in refused.items():
        for kind, value, said in cases:
            room = np.full((63, 4, 12), 7, np.float32)
            with pytest.raises(kind, match=said):
                fastattn.varlen_attention(*arrays, out=room, backend=backend.backend, **{name: value})
            np.testing.assert_array_equal(room, 7)


# ---------------------------------------------------------------- dropout


@computes_gradients
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("options", [{}, {"causal": "bottom_right"}, {"window": (5, 2)}], ids=str)
def test_dropout_counts_packed_queries_and_keys(engine, options, dtype):
    arrays = packed(dtype=dtype)
    drop = {"dropout": 0.3, "seed": 5}
    undropped = everything(engine, arrays, **options)
    out, lse, weights = everything(engine, arrays, **options, **drop)
    keep = fastattn.dropout_mask(weights.shape, 0.3, 5)
    np.testing.assert_array_equal(weights != 0, keep & (undropped[2] != 0))
    assert_same_bits(lse, undropped[1])
    whole = [array.swapaxes(0, 1) for array in arrays[:3]]
    assert_attention((out.swapaxes(0, 1), lse, weights), *whole, mask=undropped[2][0] != 0, **drop)
    reference = fastattn.varlen_attention(*arrays, backend="reference", **EVERYTHING, **options, **drop)
    np.testing.assert_array_equal(reference[2] != 0, weights != 0)


@computes_gradients
def test_dropout_on_any_number_of_threads(engine):
    arrays = packed((150, 0, 200, 90), (130, 4, 200, 99))
    options = {"dropout": 0.4, "seed": 2**70, "causal": "bottom_right"}
    one, *others = (everything(engine, arrays, num_threads=n, **options) for n in (1, 2, 3))
    for other in others:
        for x, y in zip(one, other, strict=True):
            assert_same_bits(x, y)


def segments_of(arrays):
    return masks.Segments(*(np.repeat(np.arange(len(cu) - 1), np.diff(cu)) for cu in arrays[3:]))


@computes_gradients
def test_dropout_is_that_of_segments(engine):
    arrays = packed()
    drop = {"dropout": 0.3, "seed": 5}
    out, lse = fastattn.varlen_attention(*arrays, return_lse=True, backend=engine.backend, **drop)
    whole = {"mask": segments_of(arrays), "layout": "bshd", "return_lse": True, **drop}
    for x, y in zip((out, lse), engine.attention(*arrays[:3], **whole), strict=True):
        assert_same_bits(x, y)
