"""What no mask is made of, and what does not fit a problem; integers beyond int64."""

from __future__ import annotations

from functools import partial

import ml_dtypes
import numpy as np
import pytest

import fastattn
from fastattn import masks
from fastattn.layers import MultiHeadAttention
from fastattn.masks import (
    Causal,
    Dense,
    GlobalTokens,
    KeyLengths,
    Neighborhood,
    PrefixLM,
    Segments,
    Window,
)
from tests.cases import random_arrays
from tests.refusals import assert_named


class TestRefused:
    @pytest.mark.parametrize(
        ("make", "error", "wrong"),
        [
            (Causal, ValueError, [{"align": "left"}, {"align": True}, {"align": "top_left", "offset": 3}]),
            (Causal, TypeError, {"offset": [1.5]}),
            (partial(Window, right=0), ValueError, {"left": [-1]}),
            (partial(Window, left=0), ValueError, {"right": [-2]}),
            (partial(Window, right=0), TypeError, {"left": [1.0]}),
            (partial(Window, 0, 0), ValueError, {"align": ["middle"]}),
            (KeyLengths, ValueError, {"lengths": [-1]}),
            (KeyLengths, TypeError, {"lengths": [[1.5]]}),
            (
                Segments,
                ValueError,
                [{"q_ids": 3}, {"q_ids": np.eye(2, 3, dtype=int), "k_ids": np.eye(3, dtype=int)}],
            ),
            (Segments, TypeError, {"q_ids": [[0.5]]}),
            (partial(Segments, [1]), TypeError, {"k_ids": [[0.5]]}),
            (PrefixLM, ValueError, {"prefix_lengths": [-3]}),
            (PrefixLM, TypeError, {"prefix_lengths": ["a"]}),
            (GlobalTokens, ValueError, {"index": [[-1], 0]}),
            (GlobalTokens, TypeError, {"index": [[0.0]]}),
            (
                partial(Neighborhood, kernel=1),
                ValueError,
                {"shape": [0, (), (2,) * 4, (2**30, 2**30), 2**60, (3, -1), np.zeros(0, int)]},
            ),
            (partial(Neighborhood, kernel=1), TypeError, {"shape": [None, 2.0, "3", (3, 2.0), True, [[2]]]}),
            (partial(Neighborhood, (4, 6)), ValueError, {"kernel": [0, 5, (4, 7), (3,), (3, 3, 3), -1]}),
            (partial(Neighborhood, (4, 6)), TypeError, {"kernel": [None, 3.0, (3, None), "33"]}),
            (
                partial(Neighborhood, (4, 6), 2),
                ValueError,
                {"dilation": [0, 3, (2, 4), (2,)], "causal": [(True,), [True] * 3]},
            ),
            (
                partial(Neighborhood, (4, 6), 2),
                TypeError,
                {"dilation": [None, True], "causal": [None, 1, "yes", (0, 1)]},
            ),
            (partial(Causal().materialize, L=2, S=2), ValueError, {"H": [-1]}),
            (partial(Causal().materialize, H=1, S=2), ValueError, {"L": [2**60]}),
            (partial(Causal().materialize, H=1, L=2), TypeError, {"S": [2.0]}),
        ],
        ids=lambda it: getattr(it, "__name__", ""),
    )
    def test_when_built(self, make, error, wrong):
        assert_named(make, error, wrong)

    @pytest.mark.parametrize(
        ("array", "said"),
        [
            (
                np.full((2, 2), 0.5, np.float32),
                "float32; for numbers added to the scores use bias=, else .astype(bool)",
            ),
            # A bias that changes nothing, or a mask that hides all.
            (np.zeros((2, 2)), "float64; for numbers added to the scores use bias=, else .astype(bool)"),
            (np.tri(3), "float64; a mask of zeros and ones is mask.astype(bool)"),
            ([[1.0, 0.0]], "float64; a mask of zeros and ones is mask.astype(bool)"),
            (np.tri(3, dtype=ml_dtypes.bfloat16), "bfloat16; a mask of zeros and ones is mask.astype(bool)"),
            (np.ones((2, 2), complex), "complex128"),
            ([["a"]], "<U1"),
        ],
        ids=lambda it: it if isinstance(it, str) else "",
    )
    def test_arrays_of_numbers(self, array, said):
        with pytest.raises(TypeError) as caught:
            Dense(array)
        kinds = "mask must be a fastattn.masks object or a bool or integer array, got dtype "
        assert str(caught.value) == kinds + said

    def test_when_it_does_not_fit(self, backend):
        """The message has the mask that does not, or its shape, among those that are combined."""
        arrays = random_arrays(lead=(2,), heads=2)
        shapes = "; query (2, 2, 17, 16), key (2, 2, 33, 16), value (2, 2, 33, 16)"
        for mask in [
            Causal(),
            Causal(offset=[1, 2, 3]),
            KeyLengths([1, 2, 3]),
            KeyLengths([1, 34]),
            PrefixLM([1, 2, 3]),
            Segments(np.zeros(17, int)),
            Segments(np.zeros(17, int), np.zeros(32, int)),
            Segments(np.zeros((3, 17), int), np.zeros(33, int)),
            GlobalTokens([0, 33]),
            Neighborhood((3, 11), 3),
            Neighborhood(17, 3),
            Dense(np.ones((17, 32), bool)),
            Dense(np.ones((1, 2, 2, 17, 33), bool)),
        ]:
            named = f"mask of shape {mask.array.shape} " if isinstance(mask, Dense) else f"mask {mask!r}"
            for whole in (mask, Window(1, 1) | mask):
                with pytest.raises(ValueError) as caught:
                    fastattn.attention(*arrays, mask=whole, backend=backend.backend)
                assert str(caught.value).startswith(named) and str(caught.value).endswith(shapes)


def test_tokens_past_the_end_are_refused_wherever_a_mask_meets_sizes():
    """Materialised, in a block of a larger problem, in a cache of fewer tokens, and without keys at all."""
    mask = Window(1, 1) | GlobalTokens([0, 7])
    assert mask.materialize(1, 8, 8)[0, 7].all()
    assert mask.shifted(4, 4, size=(8, 8)).materialize(1, 4, 4)[0, 3].all()
    x = np.ones((1, 1, 7, 4), np.float32)
    cache = fastattn.KVCache(1, 1, 4)
    cache.append(x, x)
    calls = [
        lambda: mask.materialize(1, 7, 7),
        lambda: (~mask).materialize(1, 7, 7),
        lambda: mask.shifted(4, 3, size=(8, 7)).materialize(1, 4, 4),
        lambda: fastattn.flex_attention(x, x, x, block_mask=mask),
        lambda: fastattn.attention_backward(x, x, x, x, x, x[..., 0], mask=mask),
        lambda: cache.attend(x, mask=mask),
    ]
    for call in calls:
        with pytest.raises(ValueError, match=r"index=\[0, 7\]\): index must be below S=7, got 7"):
            call()
    with pytest.raises(ValueError, match="index must be below S=0, got 7"):
        fastattn.attention(x, x[:, :, :0], x[:, :, :0], mask=mask)


def doors(mask, bias):
    """The functions that take a mask, a bias or both, each with the name of what it is given."""
    rng = np.random.default_rng(0)
    q, k, v = rng.standard_normal((3, 3, 2, 5, 4)).astype(np.float32)
    results = fastattn.attention(q, k, v, return_lse=True)
    cache = fastattn.KVCache(3, 2, 4)
    cache.append(k, v)
    layer = MultiHeadAttention(*[np.eye(8, dtype=np.float32)] * 4, num_heads=2)
    x = rng.standard_normal((3, 5, 8)).astype(np.float32)
    sdpa = fastattn.scaled_dot_product_attention
    yield "mask", lambda: fastattn.attention(q, k, v, mask=mask)
    yield "bias", lambda: fastattn.attention(q, k, v, bias=bias)
    yield "mask", lambda: fastattn.attention(q, k, v, mask=Causal() & Dense(mask))
    yield "mask", lambda: fastattn.attention(q, k, v, mask=Causal() | ~Dense(mask))
    yield "mask", lambda: fastattn.attention_backward(q, q, k, v, *results, mask=mask)
    yield "bias", lambda: fastattn.attention_backward(q, q, k, v, *results, bias=bias)
    yield "mask", lambda: fastattn.flex_attention(q, k, v, block_mask=Dense(mask))
    yield "bias", lambda: fastattn.flex_attention(q, k, v, bias=bias)
    yield "attn_mask", lambda: sdpa(q, k, v, mask)
    yield "attn_mask", lambda: sdpa(q, k, v, bias)
    yield "mask", lambda: cache.attend(q, mask=mask)
    yield "bias", lambda: cache.attend(q, bias=bias)
    yield "mask", lambda: layer(x, mask=mask)
    yield "bias", lambda: layer(x, bias=bias)


@pytest.mark.parametrize("flag", [True, False])
def test_a_flag_is_no_mask(flag):
    """True would broadcast and mask nothing, whatever it is meant to say."""
    said = rf"got {flag}; for causal attention say causal=True; query"
    for name, call in doors(flag, None):
        if name == "mask" and "Dense" not in call.__code__.co_names:
            with pytest.raises(TypeError, match=said):
                call()


class TestAxesInBetween:
    """Arrays with an axis for the items and none for heads, or for heads and queries."""

    @pytest.mark.parametrize(
        ("shape", "written", "mended"),
        [
            ((3, 5, 5), "[:, None]", np.s_[:, None]),
            ((3, 1, 5), "[:, None]", np.s_[:, None]),
            ((3, 5), "[:, None, None, :]", np.s_[:, None, None, :]),
            ((6, 5, 5), ".reshape(3, 2, 5, 5)", None),
        ],
        ids=str,
    )
    def test_the_message_says_what_to_write(self, shape, written, mended):
        """And that is then taken, at each door."""
        mask = np.random.default_rng(1).random(shape) < 0.5
        bias = np.where(mask, 0, -np.inf)
        for name, call in doors(mask, bias):
            with pytest.raises(ValueError) as caught:
                call()
            said = f"{name} of shape {shape} does not broadcast to (..., H, L, S) = (3, 2, 5, 5); where its "
            assert str(caught.value).startswith(said)
            assert f", say {name}{written}; query" in str(caught.value)
        mask, bias = (x[mended] if mended else x.reshape(3, 2, 5, 5) for x in (mask, bias))
        for _, call in doors(mask, bias):
            call()

    def test_several_leading_axes(self):
        arrays = random_arrays(lead=(3, 7), heads=2, len_q=4, len_k=5)
        for shape, written in (((3, 7, 4, 5), "[:, :, None]"), ((3, 7, 5), "[:, :, None, None, :]")):
            with pytest.raises(ValueError) as caught:
                fastattn.attention(*arrays, mask=np.ones(shape, bool))
            assert f"those of the items, say mask{written}; query" in str(caught.value)

    @pytest.mark.parametrize(
        "shape", [(4, 5), (3, 4), (4, 4, 5), (3, 2, 5), (7, 4, 5), (3, 2, 2, 4, 5), (8, 4, 5)]
    )
    def test_no_hint_where_none_is_right(self, shape):
        arrays = random_arrays(lead=(3,), heads=2, len_q=5, len_k=4)
        if shape == (3, 4):
            arrays = [x[:, :, :3] for x in arrays]  # (L, S) = (3, 3)
        with pytest.raises(ValueError, match=r"= \(3, 2, \d, \d\); query"):
            fastattn.attention(*arrays, mask=np.ones(shape, bool))

    def test_with_as_many_items_as_heads_it_is_numpys_rule(self):
        """It broadcasts to (H, L, S), and nothing tells what is meant."""
        q, k, v = random_arrays(lead=(2,), heads=2, len_q=5, len_k=5)
        mask = np.random.default_rng(2).random((2, 5, 5)) < 0.5
        expected = fastattn.attention(q, k, v, mask=np.broadcast_to(mask, (2, 2, 5, 5)))
        np.testing.assert_array_equal(fastattn.attention(q, k, v, mask=mask), expected)


class TestMaskedArrays:
    """Their mask says what is missing: as an argument they are refused, and so they are inside of a mask."""

    @pytest.mark.parametrize(
        ("make", "name"),
        [
            (masks.Dense, "mask"),
            (masks.KeyLengths, "KeyLengths: lengths"),
            (masks.PrefixLM, "PrefixLM: prefix_lengths"),
            (masks.GlobalTokens, "GlobalTokens: index"),
            (masks.Segments, "Segments: q_ids"),
            (lambda array: masks.Segments([0, 1], array), "Segments: k_ids"),
            (lambda array: masks.Causal(offset=array), "Causal: offset"),
        ],
        ids=lambda item: item if isinstance(item, str) else "",
    )
    def test_in_a_mask(self, make, name):
        with pytest.raises(TypeError, match=f"^{name} is a masked array, whose mask would be lost"):
            make(np.ma.masked_array([1, 0], [True, False]))

    def test_among_what_functions_read(self):
        x = np.ones((1, 2, 3, 4), np.float32)
        array = np.ma.masked_array([1.0, 2.0], [True, False])
        with pytest.raises(TypeError, match=r"^aux\[0\] is a masked array"):
            fastattn.flex_attention(x, x, x, score_mod=lambda s, b, h, q, k, a: s * a[h], aux=(array,))


class TestIntegersBeyondInt64:
    @pytest.mark.parametrize("offset", [2**63 - 1, np.uint64(2**63), 2**63, 2**64, 2**100, [2**64]], ids=str)
    def test_an_offset_that_allows_all(self, offset):
        assert masks.Causal(offset=offset).materialize(1, 3, 4).all()
        assert not masks.Causal(offset=-np.array(offset).astype(object)).materialize(1, 3, 4).any()

    def test_a_prefix_and_tokens(self):
        assert masks.PrefixLM(np.uint64(2**64 - 1)).materialize(1, 3, 4).all()
        with pytest.raises(
            ValueError, match=r"^GlobalTokens: index must be in .*, got 18446744073709551616$"
        ):
            masks.GlobalTokens([2**64, 1])

    @pytest.mark.parametrize("number", [np.uint64(2**63), 2**64, -(2**64)], ids=str)
    def test_where_no_such_number_has_a_meaning(self, number):
        for make, name in (
            (masks.KeyLengths, "KeyLengths: lengths"),
            (lambda n: masks.Segments(np.array([0, int(n)], object)), "Segments: q_ids"),
        ):
            said = rf"^{name} must be in -2\*\*63\.\.2\*\*63 - 1, got {number}$"
            with pytest.raises(ValueError, match=said):
                make(number)

    def test_objects_are_no_integers(self):
        with pytest.raises(TypeError, match=r"^KeyLengths: lengths must be integers, got dtype object$"):
            masks.KeyLengths(np.array([1, 2], object))
