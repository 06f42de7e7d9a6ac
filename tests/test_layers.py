"""`MultiHeadAttention`: against PyTorch's module on a grid of its options, and against its parts."""

from __future__ import annotations

from functools import partial

import ml_dtypes
import numpy as np
import pytest

import fastattn
from fastattn import masks
from fastattn.layers import MultiHeadAttention, _side_by_side
from tests import naive
from tests.cases import MEMORY_LAYOUTS
from tests.refusals import assert_named
from tests.tolerances import assert_same_bits

FLOATS = ["float32", "float64"]


def numbers(*shape, seed=0, dtype="float32"):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def weights(*, query_dim=24, key_dim=24, value_dim=24, heads=4, kv_heads=4, head_dim=8, out_dim=20,
            per_value=8, dtype="float32", biases=True):  # fmt: skip
    """Arguments of a layer."""
    sizes = {"q": (query_dim, heads * head_dim), "k": (key_dim, kv_heads * head_dim),
             "v": (value_dim, kv_heads * per_value), "o": (heads * per_value, out_dim)}  # fmt: skip
    given = {f"w_{n}": numbers(*s, seed=i, dtype=dtype) / 4 for i, (n, s) in enumerate(sizes.items())}
    if biases:
        given |= {f"b_{n}": numbers(s[1], seed=9 + i, dtype=dtype) for i, (n, s) in enumerate(sizes.items())}
    return given | {"num_heads": heads, "num_kv_heads": kv_heads}


def by_hand(given, query, key, value, **options):
    """The layer in extended precision, but for attention, which is the tests' oracle: out, lse, weights."""
    wide = {n: np.asarray(x).astype(np.longdouble) for n, x in given.items() if n[1] == "_"}

    def project(x, name, heads):
        y = np.asarray(x).astype(np.longdouble) @ wide[f"w_{name}"] + wide.get(f"b_{name}", 0)
        return y.reshape(*y.shape[:-1], heads, -1)

    H, K = given["num_heads"], given["num_kv_heads"]
    parts = [project(x, n, h) for x, n, h in ((query, "q", H), (key, "k", K), (value, "v", K))]
    answer = naive.attention(*parts, layout="bshd", **options)
    out = answer.out.reshape(*answer.out.shape[:-2], -1) @ wide["w_o"] + wide.get("b_o", 0)
    return out, answer.lse, answer.weights


def assert_near(got, exact, roundings=60):
    """Sums of some 30 products of numbers of size 1, one after another."""
    assert got.shape == exact.shape
    np.testing.assert_allclose(got, exact.astype(float), rtol=0, atol=roundings * np.finfo(got.dtype).eps)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("biases", [False, True])
@pytest.mark.parametrize("lead", [(), (3,), (2, 2)])
def test_the_definition(dtype, kv_heads, biases, lead):
    """Every size is another."""
    given = weights(query_dim=24, key_dim=18, value_dim=10, kv_heads=kv_heads, head_dim=8, per_value=6,
                    dtype=dtype, biases=biases)  # fmt: skip
    query, key, value = (numbers(*lead, n, d, dtype=dtype) for n, d in ((5, 24), (7, 18), (7, 10)))
    layer = MultiHeadAttention(**given)
    results = layer(query, key, value, return_lse=True, return_weights=True)
    for got, exact in zip(results, by_hand(given, query, key, value), strict=True):
        assert got.dtype == dtype and got.flags.c_contiguous
        assert_near(got, exact)
    averaged = layer(query, key, value, return_weights="mean")[1]
    assert_near(averaged, results[2].astype(float).mean(axis=-3))
    out = np.full((*lead, 5, 40), 7, dtype)[..., ::2]
    assert layer(query, key, value, out=out) is out
    assert_same_bits(out.copy(), results[0])


OPTIONS = {
    "causal": {"causal": True},
    "bottom_right": {"causal": "bottom_right", "window": (3, 0), "key_lengths": np.array([6, 3])},
    "lengths": {"key_lengths": np.array([6, 0])},
    "mask": {"mask": np.random.default_rng(1).random((2, 4, 6, 6)) < 0.6},
    "bias": {"bias": numbers(4, 6, 6), "softcap": 3.0},
    "sinks": {"sinks": numbers(4), "scale": 0.1},
    "dropout": {"dropout": 0.3, "seed": 4},
}


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("backend", ["cython", "reference"])
def test_options_of_attention(name, backend):
    given, x = weights(kv_heads=2), numbers(2, 6, 24)
    got = MultiHeadAttention(**given)(
        x, **OPTIONS[name], return_lse=True, return_weights=True, backend=backend, num_threads=1
    )
    for one, exact in zip(got, by_hand(given, x, x, x, **OPTIONS[name]), strict=True):
        assert_near(one, exact)


def test_what_is_not_given():
    given = weights(key_dim=24, value_dim=24)
    layer, x, y = MultiHeadAttention(**given), numbers(2, 6, 24), numbers(2, 4, 24, seed=1)
    assert_same_bits(layer(x), layer(x, x, x))
    assert_same_bits(layer(x, y), layer(x, y, y))
    lead = layer(x, y[:1])  # which broadcasts
    assert_same_bits(lead, layer(x, np.broadcast_to(y[:1], y.shape)))


@pytest.mark.parametrize("layout", MEMORY_LAYOUTS)
def test_strides_change_no_bit(layout):
    given, x = weights(), numbers(2, 6, 24)
    expected = MultiHeadAttention(**given)(x)
    moved = {n: MEMORY_LAYOUTS[layout](w) if n[1] == "_" else w for n, w in given.items()}
    got = MultiHeadAttention(**moved)(MEMORY_LAYOUTS[layout](x))
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)  # BLAS may take transposed ones otherwise
    assert_same_bits(MultiHeadAttention(**given)(MEMORY_LAYOUTS[layout](x)), expected)


def test_weights_are_kept_as_they_are():
    given = weights()
    layer = MultiHeadAttention(**given)
    for name, array in given.items():
        if name[1] == "_":
            assert getattr(layer, name) is array
    columns = np.ascontiguousarray(numbers(24, 96).T).T  # transposed, and a part of it
    layer = MultiHeadAttention(**(given | {"w_q": columns[:, 32:64]}))
    assert np.shares_memory(layer.w_q, columns)
    x = numbers(3, 24)
    before = layer(x)
    columns[:, 32:64] *= 2
    assert not np.allclose(layer(x), before)


def test_padding_is_not_seen():
    layer, x = MultiHeadAttention(**weights()), numbers(2, 6, 24)
    expected = layer(x, key_lengths=[6, 4], causal=True)
    for junk in (np.nan, np.inf, 1e38):
        other = x.copy()
        other[1, 4:] = junk
        got = layer(other, key_lengths=[6, 4], causal=True)
        assert_same_bits(got[0], expected[0])
        assert_same_bits(got[1, :4], expected[1, :4])
    empty = layer(x, key_lengths=[6, 0])
    assert_same_bits(empty[1], np.broadcast_to(layer.b_o, (6, 20)))


@pytest.mark.parametrize("L, S, lead", [(0, 5, (2,)), (5, 0, (2,)), (0, 0, ()), (5, 5, (0,)), (0, 5, (0, 2))])
def test_empty_sizes(L, S, lead):
    layer = MultiHeadAttention(**weights())
    out, w = layer(numbers(*lead, L, 24), numbers(*lead, S, 24), return_weights="mean")
    assert out.shape == (*lead, L, 20) and w.shape == (*lead, L, S)
    assert S or np.array_equal(out, np.broadcast_to(layer.b_o, out.shape))


@pytest.mark.parametrize("stored", [np.float16, ml_dtypes.bfloat16])
def test_16_bits_are_rounded_once(stored):
    given = {n: x.astype(stored) if n[1] == "_" else x for n, x in weights().items()}
    wide = {n: x.astype(np.float32) if n[1] == "_" else x for n, x in given.items()}
    x = numbers(2, 6, 24).astype(stored)
    narrow, full = MultiHeadAttention(**given), MultiHeadAttention(**wide)
    results = narrow(x, return_lse=True, return_weights=True)
    expected = full(x.astype(np.float32), return_lse=True, return_weights=True)
    assert_same_bits(results[0], expected[0].astype(stored))
    assert_same_bits(results[1], expected[1])
    assert_same_bits(results[2], expected[2].astype(stored))
    assert_same_bits(full(x), full(x.astype(np.float32)))
    assert_same_bits(narrow(x.astype(np.float32)), full(x.astype(np.float32)))
    out = np.empty((2, 6, 20), np.float32)
    assert_same_bits(narrow(x, out=out), expected[0])


def test_types_promote():
    given, x = weights(), numbers(2, 6, 24)
    layer = MultiHeadAttention(**given)
    assert layer(x.astype(float)).dtype == layer((4 * x).astype(int)).dtype == np.float64
    mixed = MultiHeadAttention(**(given | {"b_o": given["b_o"].astype(float)}))
    assert mixed.w_q.dtype == np.float64 and mixed(x).dtype == np.float64
    wide = {n: np.asarray(w, float) if n[1] == "_" else w for n, w in given.items()}
    np.testing.assert_allclose(mixed(x), MultiHeadAttention(**wide)(x.astype(float)), rtol=1e-12)


def test_out_may_be_what_is_read():
    layer = MultiHeadAttention(**weights(out_dim=24))
    x = numbers(2, 6, 24)
    expected = layer(x)
    layer(x, out=x)
    assert_same_bits(x, expected)


# RoPE and caches -----------------------------------------------------------------------------------


def test_rope():
    given, x = weights(kv_heads=2), numbers(2, 6, 24)
    tables = fastattn.rope_tables(10, 6)
    layer = MultiHeadAttention(**given, rope=tables)
    q, k, v = ((x @ given[f"w_{n}"] + given[f"b_{n}"]).reshape(2, 6, -1, 8) for n in "qkv")
    q, k = (fastattn.rope(rows, *tables, layout="bshd") for rows in (q, k))
    heads = fastattn.attention(q, k, v, causal=True, layout="bshd")
    expected = heads.reshape(2, 6, -1) @ given["w_o"] + given["b_o"]
    np.testing.assert_allclose(layer(x, causal=True), expected, atol=1e-5)
    last = layer(x[:, 4:], x, causal="bottom_right")  # at positions 4 and 5
    np.testing.assert_allclose(last, expected[:, 4:], atol=1e-5)
    lengths = [6, 5]
    last = layer(x[:, 3:5], x, causal="bottom_right", key_lengths=lengths)
    np.testing.assert_allclose(last[1], expected[1, 3:5], atol=1e-5)
    wide = MultiHeadAttention(**given, rope=[table.astype(float) for table in tables])
    np.testing.assert_allclose(wide(x, causal=True), expected, atol=1e-5)
    assert wide(x).dtype == np.float32


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("rope", [False, True])
@pytest.mark.parametrize("window", [None, 4])
def test_a_cache_is_causal_attention(layout, rope, window):
    tables = fastattn.rope_tables(12, 8) if rope else None
    layer = MultiHeadAttention(**weights(kv_heads=2), rope=tables)
    x = numbers(3, 12, 24)
    limits = {} if window is None else {"window": (window - 1, 0)}
    whole, w = layer(x, causal=True, return_weights=True, **limits)
    cache = fastattn.KVCache(3, 2, 8, layout=layout, window=window)
    pieces, start = [], 0
    for stop in (5, 6, 7, 7, 12):
        out, part = layer(x[:, start:stop], cache=cache, return_weights=True)
        pieces.append(out)
        np.testing.assert_allclose(part, w[..., start:stop, :stop], atol=1e-6)
        start = stop
    np.testing.assert_allclose(np.concatenate(pieces, axis=1), whole, atol=1e-5)


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("rope", [False, True])
def test_prompts_of_different_lengths(layout, rope):
    """Padded at their ends, with anything; twice, and then a token each."""
    tables = fastattn.rope_tables(13, 8) if rope else None
    layer = MultiHeadAttention(**weights(kv_heads=2), rope=tables)
    texts = [numbers(n, 24, seed=n) for n in (13, 9, 5)]
    cache = fastattn.KVCache(3, 2, 8, layout=layout)
    mask = np.random.default_rng(3).random((1, 13, 13)) < 0.7  # by the rows of this call and all keys
    starts = [0, 0, 0]
    for counts, masked in (([7, 7, 0], False), ([5, 1, 4], True), ([1, 1, 1], False)):
        T = max(counts)
        x = np.full((3, T, 24), np.nan, np.float32)
        for row, text, start, count in zip(x, texts, starts, counts, strict=True):
            row[:count] = text[start : start + count]
        ends = [start + count for start, count in zip(starts, counts, strict=True)]
        options = {"mask": mask[:, :T, : max(ends)]} if masked else {}
        out = layer(x, cache=cache, key_lengths=counts, **options)
        for item, (start, end) in enumerate(zip(starts, ends, strict=True)):
            rows = np.tril(np.ones((end, end), bool))
            if masked:
                rows[start:end] &= mask[0, : end - start, :end]
            alone = layer(texts[item][:end], mask=rows)
            np.testing.assert_allclose(out[item, : end - start], alone[start:end], atol=1e-5)
        starts = ends
    assert cache.lengths.tolist() == [13, 9, 5]


def test_cross_attention_with_a_cache():
    layer = MultiHeadAttention(**weights(kv_heads=2))
    memory, x = numbers(2, 9, 24), numbers(2, 5, 24, seed=1)
    cache = fastattn.KVCache(2, 2, 8)
    expected = layer(x, memory, key_lengths=[9, 4])
    first = layer(x[:, :2], memory, cache=cache, causal=False, key_lengths=[9, 4])
    rest = [layer(x[:, i : i + 1], memory[:, :0], cache=cache, causal=False) for i in (2, 3, 4)]
    np.testing.assert_allclose(np.concatenate([first, *rest], axis=1), expected, atol=1e-5)
    assert cache.lengths.tolist() == [9, 4]


@pytest.mark.parametrize("storage", ["float64", "float16", "int8"])
def test_storage_of_a_cache_does_not_change_the_type(storage):
    layer, x = MultiHeadAttention(**weights()), numbers(2, 6, 24)
    cache = fastattn.KVCache(2, 4, 8, dtype=storage)
    out = layer(x, cache=cache)
    assert out.dtype == np.float32
    np.testing.assert_allclose(out, layer(x, causal=True), atol=0.1 if storage == "int8" else 1e-2)


def test_nothing_is_appended_where_something_is_raised():
    layer = MultiHeadAttention(**weights(), rope=fastattn.rope_tables(8, 8))
    cache, x = fastattn.KVCache(2, 4, 8, window=100), numbers(2, 6, 24)
    layer(x, cache=cache)
    for message, options in (
        ("positions", {}),  # 6 .. 11, of 8
        ("causal must be", {"query": x[:, :1], "causal": "top_left"}),
        ("causal must be", {"key_lengths": [6, 2], "causal": "top_left"}),
        ("causal must be", {"key_lengths": [6, 2], "causal": 1}),
        ("no dropout", {"dropout": 0.1, "seed": 1}),
        ("batch=2", {"query": x[:1]}),
        ("batch=2", {"query": x[0]}),
        ("in self-attention without a window", {"key_lengths": [6, 2]}),
        ("key_lengths must be in", {"key_lengths": [7, 2]}),
        ("mask", {"query": x[:, :1], "mask": np.ones((3, 3), bool)}),
    ):
        with pytest.raises(ValueError, match=message):
            layer(**({"query": x, "cache": cache} | options))
        assert cache.lengths.tolist() == [6, 6]
    with pytest.raises(TypeError, match="cache must be a KVCache, got dict"):
        layer(x, cache={})
    with pytest.raises(TypeError, match="dropout must be a finite number, got None"):
        layer(x, cache=cache, dropout=None)


def test_causal_may_be_a_bool_of_numpy():
    layer, x = MultiHeadAttention(**weights()), numbers(2, 6, 24)
    for causal in (True, False):
        given = [fastattn.KVCache(2, 4, 8) for _ in range(2)]
        expected, out = (
            layer(x, cache=cache, key_lengths=[6, 2], causal=flag)
            for cache, flag in zip(given, (causal, np.bool_(causal)), strict=True)
        )
        np.testing.assert_array_equal(out, expected)


# Errors --------------------------------------------------------------------------------------------

GIVEN = weights(kv_heads=2)


def test_errors_of_weights():
    def call(**wrong):
        MultiHeadAttention(**(GIVEN | wrong))

    types = {"w_k": [None], "num_heads": [4.0], "w_v": [np.ones((24, 16), complex)]}
    assert_named(call, TypeError, types)
    half, brain = np.ones((24, 16), np.float16), np.ones(20, ml_dtypes.bfloat16)
    assert_named(call, TypeError, [{"w_v": half, "b_o": brain}])
    values = {
        "w_q": [np.ones(24)],
        "w_k": [np.ones((24, 32))],
        "w_o": [np.ones((30, 20))],
        "b_k": [np.ones(32)],
        "num_heads": [0],
        "num_kv_heads": [3],
        "rope": [np.ones((3, 2))],
    }
    assert_named(call, ValueError, values)
    for wrong, said in [
        ({"num_heads": 5, "num_kv_heads": 5}, "w_q: num_heads, 5, must divide its 32 columns"),
        ({"num_kv_heads": None}, "w_k must have 32 columns"),
        ({"rope": np.ones((2, 3, 8)).tolist()}, r"rotate 2 \* 8 columns, and head_dim of x is 8"),
    ]:
        with pytest.raises(ValueError, match=said):
            call(**wrong)


def test_errors_of_calls():
    x = numbers(2, 6, 24)
    call = partial(MultiHeadAttention(**GIVEN), query=x)
    values = {
        "query": [x[..., 1:], np.concatenate([x, x[..., :1]], axis=-1)],
        "key": [x[0, 0], np.concatenate([x, x])[:3]],
        "value": [x],
        "return_weights": ["max"],
        "causal": ["bottom"],
        "out": [np.empty((2, 6, 21), np.float32)],
    }
    assert_named(call, ValueError, values)
    assert_named(call, ValueError, [{"key": x, "value": x[:, 1:]}])
    types = {
        "query": [x.astype(complex)],
        "out": [np.empty((2, 6, 20))],
        "mask": [np.ones((6, 6))],
        "return_weights": [None],
        "layout": ["bhsd"],
    }
    assert_named(call, TypeError, types)
    with pytest.raises(ValueError, match="causal=True needs L == S"):
        call(key=x[:, 1:], causal=True)
    for name, hint in [("key_padding_mask", "say key_lengths="), ("attn_mask", "say mask=")]:
        with pytest.raises(TypeError, match=f"'{name}': {hint}"):
            call(**{name: None})
    with pytest.raises(TypeError, match="positional"):
        MultiHeadAttention(**GIVEN)(x, x, x, None)


def test_repr():
    layer = MultiHeadAttention(**GIVEN)
    assert (
        repr(layer) == "MultiHeadAttention(24 -> 20, num_heads=4, num_kv_heads=2, head_dim=8, dtype=float32)"
    )


# PyTorch -------------------------------------------------------------------------------------------


def modules(torch, *, dtype, bias, dims, batch_first=True, add_zero_attn=False, heads=4):
    torch.manual_seed(0)
    key_dim, value_dim = dims
    module = torch.nn.MultiheadAttention(
        32, heads, bias=bias, kdim=key_dim, vdim=value_dim, batch_first=batch_first,
        add_zero_attn=add_zero_attn, dtype=getattr(torch, dtype),
    ).eval()  # fmt: skip
    if bias:  # which are 0 at first
        torch.nn.init.normal_(module.in_proj_bias)
        torch.nn.init.normal_(module.out_proj.bias)
    return module


MASKS = ["none", "bool", "float", "bool of heads", "padding", "both", "causal", "causal and padding"]


def torch_options(torch, name, dtype, L, S):
    """Of torch's module, and of the layer, its conventions converted as `from_torch` says."""
    rng = np.random.default_rng(7)
    hidden = rng.random((L, S)) < 0.4
    hidden[:, 0] = False  # torch's result is NaN for a row without keys
    of_heads = rng.random((3 * 4, L, S)) < 0.4
    of_heads[:, :, 0] = False
    added = rng.standard_normal((L, S)).astype(dtype)
    padding = np.arange(S) >= np.array([S, S - 2, 1])[:, None]
    future = ~np.tri(L, S, dtype=bool)
    theirs, ours = {}, {}
    if name in ("bool", "both"):
        theirs["attn_mask"], ours["mask"] = torch.from_numpy(hidden), ~hidden
    if name == "float":
        theirs["attn_mask"], ours["bias"] = torch.from_numpy(added), added
    if name == "bool of heads":
        theirs["attn_mask"] = torch.from_numpy(of_heads)
        ours["mask"] = ~of_heads.reshape(3, 4, L, S)
    if "causal" in name:
        theirs |= {"attn_mask": torch.from_numpy(future), "is_causal": True}
        ours["causal"] = "top_left"
    if name in ("padding", "both", "causal and padding"):
        theirs["key_padding_mask"] = torch.from_numpy(padding)
        if name == "both":
            ours["mask"] = ours["mask"] & ~padding[:, None, None, :]
        else:
            ours["key_lengths"] = [S, S - 2, 1]
    return theirs, ours


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dims", [(32, 32), (20, 32), (12, 28)], ids=str)
@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("wanted", [False, "mean", True])
def test_torch(dtype, bias, dims, batch_first, mask, wanted):
    torch = pytest.importorskip("torch")
    module = modules(torch, dtype=dtype, bias=bias, dims=dims, batch_first=batch_first)
    L, S = 7, 9
    arrays = [
        numbers(3, n, d, seed=i, dtype=dtype) for i, (n, d) in enumerate(((L, 32), *((S, d) for d in dims)))
    ]
    theirs, ours = torch_options(torch, mask, dtype, L, S)
    tensors = [torch.from_numpy(x) for x in arrays]
    if dims == (32, 32):
        tensors[2] = tensors[1]
        arrays[2] = arrays[1]
    if not batch_first:
        tensors = [x.transpose(0, 1) for x in tensors]
    with torch.no_grad():
        out, w = module(*tensors, need_weights=bool(wanted), average_attn_weights=wanted == "mean", **theirs)
    layer = MultiHeadAttention.from_torch(module.state_dict(), 4)
    got = layer(*arrays, **ours, return_weights=wanted)
    if wanted:
        got, got_weights = got
        np.testing.assert_allclose(got_weights, w.numpy(), rtol=0, atol=8 * np.finfo(dtype).eps)
    expected = (out if batch_first else out.transpose(0, 1)).numpy()
    assert got.dtype == expected.dtype
    np.testing.assert_allclose(got, expected, rtol=0, atol=20 * np.finfo(dtype).eps)


@pytest.mark.parametrize("wanted", [False, "mean", True])
def test_torch_unbatched(wanted):
    torch = pytest.importorskip("torch")
    module = modules(torch, dtype="float32", bias=True, dims=(32, 32))
    x, mask = numbers(6, 32), np.tri(6, dtype=bool)
    with torch.no_grad():
        out, w = module(*[torch.from_numpy(x)] * 3, attn_mask=torch.from_numpy(~mask),
                        need_weights=bool(wanted), average_attn_weights=wanted == "mean")  # fmt: skip
    got = MultiHeadAttention.from_torch(module.state_dict(), 4)(x, mask=masks.Causal(), return_weights=wanted)
    if wanted:
        got, got_weights = got
        np.testing.assert_allclose(got_weights, w.numpy(), atol=1e-6)
    np.testing.assert_allclose(got, out.numpy(), atol=2e-6)


def test_torch_add_zero_attn():
    torch = pytest.importorskip("torch")
    module = modules(torch, dtype="float32", bias=True, dims=(32, 32), add_zero_attn=True)
    x = numbers(3, 6, 32)
    with torch.no_grad():
        out, w = module(*[torch.from_numpy(x)] * 3, average_attn_weights=False)
    layer = MultiHeadAttention.from_torch(module.state_dict(), 4)
    got, got_weights = layer(x, sinks=np.zeros(4), return_weights=True)
    np.testing.assert_allclose(got, out.numpy(), atol=2e-6)
    np.testing.assert_allclose(got_weights, w.numpy()[..., :-1], atol=1e-6)


@pytest.mark.parametrize("dims", [(2, 64, 64), (3, 128, 192), (1, 300, 256)], ids=str)
def test_the_error_is_at_most_that_of_torch(dims):
    """The mean square, of 4 modules, against float64; of small ones as far as so many numbers tell.

    The products of both are NumPy's: where MKL sums 192 terms at a time and OpenBLAS all of them, PyTorch's
    own are more exact by a factor of 1.4.
    """
    torch = pytest.importorskip("torch")
    batch, length, model_dim = dims
    ours, theirs = [], []
    for seed in range(4):
        torch.manual_seed(seed)
        module = torch.nn.MultiheadAttention(model_dim, 4, batch_first=True).eval()
        x = numbers(batch, length, model_dim, seed=seed)
        layer = MultiHeadAttention.from_torch(module.state_dict(), 4)
        rows = x.reshape(-1, model_dim)
        heads = [
            torch.from_numpy((rows @ w + b).reshape(batch, length, 4, -1)).transpose(1, 2)
            for w, b in ((layer.w_q, layer.b_q), (layer.w_k, layer.b_k), (layer.w_v, layer.b_v))
        ]
        joined = torch.nn.functional.scaled_dot_product_attention(*heads).transpose(1, 2).numpy()
        found = (joined.reshape(-1, model_dim) @ layer.w_o + layer.b_o).reshape(x.shape)
        with torch.no_grad():
            exact = module.double()(*[torch.from_numpy(x).double()] * 3, need_weights=False)[0].numpy()
        ours.append(layer(x) - exact)
        theirs.append(found - exact)
    excess = np.square(ours) - np.square(theirs)
    chance = excess.std() / np.sqrt(excess.size)
    assert excess.mean() < (3 * chance if model_dim == 64 else 0)


def test_weights_side_by_side_are_one_product():
    """Those of `from_torch` are, and copies of them are not: the same results, to the rounding of BLAS."""
    state = {
        "in_proj_weight": numbers(72, 24),
        "in_proj_bias": numbers(72),
        "out_proj.weight": numbers(24, 24),
    }
    layer = MultiHeadAttention.from_torch(state, 3)
    stacked = _side_by_side((layer.w_q, layer.w_k, layer.w_v))
    np.testing.assert_array_equal(stacked, state["in_proj_weight"].T)
    copies = {name: getattr(layer, name).copy() for name in ("w_q", "w_k", "w_v", "w_o", "b_q", "b_k", "b_v")}
    apart = MultiHeadAttention(**copies, num_heads=3)
    assert _side_by_side((apart.w_q, apart.w_k, apart.w_v)) is None
    assert _side_by_side((layer.w_q, layer.w_v, layer.w_k)) is None
    x = numbers(2, 7, 24, seed=1)
    np.testing.assert_allclose(layer(x), apart(x), rtol=1e-5, atol=1e-5)
    layer.w_v = layer.w_v.copy()
    np.testing.assert_allclose(layer(x), apart(x), rtol=1e-5, atol=1e-5)


def test_state_dicts():
    """Tensors and arrays, in bfloat16 as well, whose memory is shared where it can be."""
    torch = pytest.importorskip("torch")
    module = modules(torch, dtype="float32", bias=True, dims=(32, 32))
    state, x = module.state_dict(), numbers(2, 5, 32)
    expected = MultiHeadAttention.from_torch(state, 4)
    assert np.shares_memory(expected.w_k, state["in_proj_weight"].numpy())
    assert_same_bits(
        MultiHeadAttention.from_torch({n: t.numpy() for n, t in state.items()}, 4)(x), expected(x)
    )
    parameters = dict(module.named_parameters())  # which require gradients
    assert_same_bits(MultiHeadAttention.from_torch(parameters, 4)(x), expected(x))
    narrow = MultiHeadAttention.from_torch({n: t.bfloat16() for n, t in state.items()}, 4)
    assert narrow.w_q.dtype == np.float32 and narrow(x).dtype == np.float32
    np.testing.assert_allclose(narrow(x), expected(x), atol=2e-2)
    half = MultiHeadAttention.from_torch({n: t.half() for n, t in state.items()}, 4)
    assert half(x.astype(np.float16)).dtype == np.float16


STATE = {
    "in_proj_weight": np.ones((96, 32)),
    "out_proj.weight": np.ones((32, 32)),
    "in_proj_bias": np.ones(96),
}
WRONG_STATES = [
    ("no out_proj.weight, but in_proj_weight, in_proj_bias", {"out_proj.weight": None}),
    ("no q_proj_weight, but", {"in_proj_weight": None}),
    ("bias_k and bias_v: .*add_bias_kv", {"bias_k": np.ones((1, 1, 32)), "bias_v": np.ones((1, 1, 32))}),
    ("has fc.weight, which nn.MultiheadAttention has not", {"fc.weight": np.ones((3, 3))}),
    ("in_proj_weight: .*, 3, must divide", {"in_proj_weight": np.ones((97, 32))}),
    ("b_q must have shape", {"in_proj_bias": np.ones(93)}),
]


@pytest.mark.parametrize("message, wrong", WRONG_STATES, ids=[it[0] for it in WRONG_STATES])
def test_errors_of_state_dicts(message, wrong):
    with pytest.raises(ValueError, match=message):
        MultiHeadAttention.from_torch(STATE | wrong, 4)


def test_a_layer_of_a_model():
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)
    one = torch.nn.TransformerDecoderLayer(32, 4, dim_feedforward=16, batch_first=True)
    model = torch.nn.ModuleDict(
        {"decoder": torch.nn.TransformerDecoder(one, 2), "head": torch.nn.Linear(32, 3)}
    )
    torch.nn.init.normal_(model["decoder"].layers[1].multihead_attn.in_proj_bias)
    state, prefix = model.state_dict(), "decoder.layers.1.multihead_attn."
    alone = model["decoder"].layers[1].multihead_attn.state_dict()
    x = numbers(2, 5, 32)
    assert_same_bits(
        MultiHeadAttention.from_torch(state, 4, prefix=prefix)(x),
        MultiHeadAttention.from_torch(alone, 4)(x),
    )
    prefixes = [f"decoder.layers.{n}.{name}." for n in (0, 1) for name in ("self_attn", "multihead_attn")]
    for wrong in ("", "decoder.layers.1.multihead_attn", "encoder.", "head."):
        with pytest.raises(ValueError, match=f"q_proj_weight at prefix={wrong!r}; prefix may be") as caught:
            MultiHeadAttention.from_torch(state, 4, prefix=wrong)
        assert str(caught.value).endswith(", ".join(map(repr, prefixes)))
    with pytest.raises(ValueError, match=r"at prefix='a\.'; and no other has$"):
        MultiHeadAttention.from_torch(model["head"].state_dict(), 4, prefix="a.")
    with pytest.raises(ValueError, match=r"at prefix='a\.'; prefix may be ''$"):
        MultiHeadAttention.from_torch(alone, 4, prefix="a.")
    del state[f"{prefix}out_proj.weight"]
    with pytest.raises(ValueError, match=f"has no {prefix}out_proj.weight, but {prefix}in_proj_weight, "):
        MultiHeadAttention.from_torch(state, 4, prefix=prefix)
    with pytest.raises(TypeError, match="prefix must be a str, got None"):
        MultiHeadAttention.from_torch(state, 4, prefix=None)


def as_tuple(results):
    return results if isinstance(results, tuple) else (results,)


def test_tensors_in_tensors_out():
    torch = pytest.importorskip("torch")
    layer, x = MultiHeadAttention(**weights()), numbers(2, 6, 24)
    tensor = torch.from_numpy(x)
    for options in (
        {},
        {"return_lse": True, "return_weights": True},
        {"return_weights": "mean", "causal": True},
        {"mask": masks.Causal(), "return_lse": True},
    ):
        given = {n: torch.tensor(w) if isinstance(w, np.ndarray) else w for n, w in weights().items()}
        for of_tensors in (layer, MultiHeadAttention(**given)):
            results, expected = of_tensors(tensor, **options), layer(x, **options)
            assert type(results) is (tuple if isinstance(expected, tuple) else torch.Tensor)
            for got, wanted in zip(as_tuple(results), as_tuple(expected), strict=True):
                assert type(got) is torch.Tensor
                assert_same_bits(got.numpy(), wanted)
    assert type(layer(x, tensor)) is np.ndarray and type(layer(tensor, x)) is torch.Tensor
    own = torch.empty(2, 6, 20)
    assert layer(tensor, out=own) is own
    assert_same_bits(own.numpy(), layer(x))
    half = layer(tensor.bfloat16())
    assert half.dtype == torch.float32  # as the weights are
    with pytest.raises(TypeError, match=r"query requires grad"):
        layer(torch.nn.Parameter(tensor))


def test_from_torch_of_a_module():
    module = type("MultiheadAttention", (), {"state_dict": lambda self: STATE})()
    with pytest.raises(
        TypeError, match=r"^state_dict must be a mapping, as module\.state_dict\(\) gives, got Mul"
    ):
        MultiHeadAttention.from_torch(module, 4)
