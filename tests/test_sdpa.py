"""`scaled_dot_product_attention` means what PyTorch's function of that name means.

Two comparisons: the definition (with our reading of the arguments) against PyTorch shows that the
*meaning* is PyTorch's, and our result against the definition shows that the *numbers* are right.
"""

from __future__ import annotations

import numpy as np
import pytest

import fastattn
from tests import naive
from tests.cases import FLOATS, random_arrays
from tests.tolerances import assert_answer

torch = pytest.importorskip("torch", reason="parity with PyTorch needs torch")


def torch_sdpa(query, key, value, attn_mask=None, **options):
    tensors = [torch.from_numpy(np.ascontiguousarray(array)) for array in (query, key, value)]
    mask = None if attn_mask is None else torch.from_numpy(np.ascontiguousarray(attn_mask))
    return torch.nn.functional.scaled_dot_product_attention(*tensors, attn_mask=mask, **options).numpy()


def definition(query, key, value, attn_mask=None, is_causal=False, scale=None):
    """The exact and the plain answer, with the arguments read as PyTorch's documentation has them."""
    options = {"scale": scale, "causal": "top_left" if is_causal else False}
    if attn_mask is not None:
        options["mask" if attn_mask.dtype == bool else "bias"] = attn_mask
    return naive.attention(query, key, value, **options), naive.formula(query, key, value, **options)


def assert_parity(
    query, key, value, attn_mask=None, *, is_causal=False, scale=None, enable_gqa=False, theirs=None
):
    ours = fastattn.scaled_dot_product_attention(
        query, key, value, attn_mask=attn_mask, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa
    )
    if theirs is None:
        theirs = torch_sdpa(
            query, key, value, attn_mask, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa
        )
    exact, plain = definition(query, key, value, attn_mask, is_causal, scale)
    reached = np.isfinite(exact.lse)  # rows with no key: PyTorch's answer varies, ours is 0
    tolerance = 1e-4 if ours.dtype == np.float32 else 1e-10
    np.testing.assert_allclose(theirs[reached], exact.out[reached].astype(theirs.dtype), atol=tolerance)
    assert ours.dtype == theirs.dtype
    assert_answer((ours,), exact, plain)


def mask_of(kind, shape, dtype):
    rng = np.random.default_rng(5)
    if kind == "none":
        return None
    if kind == "bool":
        mask = rng.random(shape) < 0.7
        mask[..., 0] = True
        return mask
    return rng.standard_normal(shape).astype(dtype)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("sizes", [(16, 16), (7, 33), (33, 7), (1, 40), (40, 1)], ids=str)
@pytest.mark.parametrize("rank", [2, 3, 4, 5])
def test_ranks_and_lengths(rank, sizes, is_causal, dtype):
    lead = {2: (), 3: (), 4: (2,), 5: (2, 3)}[rank]
    arrays = random_arrays(
        lead=lead, heads=1 if rank == 2 else 3, len_q=sizes[0], len_k=sizes[1], dtype=dtype
    )
    if rank == 2:
        arrays = tuple(array[0] for array in arrays)
    assert_parity(*arrays, is_causal=is_causal)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("kind", ["bool", "float"])
@pytest.mark.parametrize(
    "shape",
    [
        (9, 21),
        (1, 21),
        (9, 1),
        (1, 1),
        (3, 9, 21),
        (1, 9, 21),
        (3, 1, 21),
        (2, 3, 9, 21),
        (2, 1, 9, 21),
        (1, 3, 9, 21),
        (2, 1, 1, 21),
        (1, 1, 1, 1),
    ],
    ids=str,
)
def test_masks_of_every_broadcast_shape(shape, kind, dtype):
    arrays = random_arrays(lead=(2,), heads=3, len_q=9, len_k=21, dtype=dtype)
    assert_parity(*arrays, mask_of(kind, shape, dtype))


@pytest.mark.parametrize("kind", ["bool", "float"])
@pytest.mark.parametrize("shape", [(9, 21), (3, 9, 21), (3, 1, 21)], ids=str)
def test_masks_on_rank_three(shape, kind):
    arrays = random_arrays(heads=3, len_q=9, len_k=21)
    assert_parity(*arrays, mask_of(kind, shape, "float32"))


@pytest.mark.parametrize("kind", ["bool", "float"])
@pytest.mark.parametrize("sizes", [(16, 16), (7, 33), (33, 7)], ids=str)
def test_mask_and_causal_are_both_applied(kind, sizes):
    len_q, len_k = sizes
    arrays = random_arrays(lead=(2,), heads=3, len_q=len_q, len_k=len_k)
    mask = mask_of(kind, (len_q, len_k), "float32")
    lower = np.tri(len_q, len_k, dtype=bool)
    # PyTorch refuses the two together, so it gets them as one mask.
    as_one = mask & lower if kind == "bool" else np.where(lower, mask, -np.inf).astype(np.float32)
    assert_parity(*arrays, mask, is_causal=True, theirs=torch_sdpa(*arrays, as_one))


@pytest.mark.parametrize("kind", ["bool", "float"])
def test_rows_with_no_key_are_zero(kind):
    query, key, value = random_arrays(lead=(2,), heads=3, len_q=9, len_k=21)
    allowed = np.ones((9, 21), bool)
    allowed[4] = False
    mask = allowed if kind == "bool" else np.where(allowed, 0, -np.inf).astype(np.float32)
    assert_parity(query, key, value, mask)
    out = fastattn.scaled_dot_product_attention(query, key, value, mask)
    np.testing.assert_array_equal(out[:, :, 4], 0)


@pytest.mark.parametrize("scale", [0.0, 1.0, -0.3, 7.5])
def test_scale(scale):
    assert_parity(*random_arrays(lead=(2,)), scale=scale)


@pytest.mark.parametrize("heads", [(8, 2), (6, 1), (4, 4), (9, 3)], ids=str)
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
def test_grouped_heads(heads, is_causal):
    arrays = random_arrays(lead=(2,), heads=heads[0], kv_heads=heads[1])
    assert_parity(*arrays, is_causal=is_causal, enable_gqa=True)


@pytest.mark.parametrize("heads", [(4, 1, 1), (1, 4, 4), (4, 4, 1), (4, 1, 4), (1, 1, 4), (1, 4, 1)], ids=str)
@pytest.mark.parametrize("lead", [(), (2,)], ids=["rank3", "rank4"])
def test_a_head_axis_of_one_broadcasts_without_enable_gqa(heads, lead):
    query, _, _ = random_arrays(1, lead=lead, heads=heads[0])
    _, key, _ = random_arrays(2, lead=lead, heads=heads[1])
    _, _, value = random_arrays(3, lead=lead, heads=heads[2])
    ours = fastattn.scaled_dot_product_attention(query, key, value)
    spread = [np.repeat(a, 4 // a.shape[-3], axis=-3) for a in (query, key, value)]
    np.testing.assert_allclose(torch_sdpa(query, key, value), torch_sdpa(*spread), atol=1e-5)
    assert_answer((ours,), *definition(*spread))


@pytest.mark.parametrize("dims", [(8, 24), (24, 8), (64, 1), (1, 64)], ids=str)
def test_value_dim_of_its_own(dims):
    assert_parity(*random_arrays(lead=(2,), head_dim=dims[0], value_dim=dims[1]))


@pytest.mark.parametrize("dtype", FLOATS)
def test_transposed_inputs(dtype):
    arrays = random_arrays(lead=(2,), heads=3, dtype=dtype)
    heads_inside = [np.ascontiguousarray(array.swapaxes(1, 2)).swapaxes(1, 2) for array in arrays]
    last_slow = [np.ascontiguousarray(array.swapaxes(2, 3)).swapaxes(2, 3) for array in arrays]
    for variant in (heads_inside, last_slow):
        assert not any(array.flags.c_contiguous for array in variant)
        assert_parity(*variant)


def test_leading_axes_broadcast():
    query, _, _ = random_arrays(1, lead=(3, 2))
    _, key, value = random_arrays(2, lead=(1, 2))
    assert_parity(query, key, value)


def test_signature_is_pytorchs():
    import inspect

    parameters = inspect.signature(fastattn.scaled_dot_product_attention).parameters
    assert [(name, p.default) for name, p in parameters.items()] == [
        ("query", inspect.Parameter.empty),
        ("key", inspect.Parameter.empty),
        ("value", inspect.Parameter.empty),
        ("attn_mask", None),
        ("dropout_p", 0.0),
        ("is_causal", False),
        ("scale", None),
        ("enable_gqa", False),
    ]
    query, key, value = random_arrays()
    mask = np.ones((17, 33), bool)
    fastattn.scaled_dot_product_attention(query, key, value, mask, 0.0, False)


class TestRefused:
    def test_dropout(self):
        with pytest.raises(ValueError, match=r"^dropout_p must be 0, got 0\.1: "):
            fastattn.scaled_dot_product_attention(*random_arrays(), dropout_p=0.1)

    @pytest.mark.parametrize("dtype", [np.int64, np.uint8])
    def test_integer_mask(self, dtype):
        with pytest.raises(
            TypeError, match=rf"^attn_mask must be bool .* got dtype {np.dtype(dtype)}; query"
        ):
            fastattn.scaled_dot_product_attention(*random_arrays(), np.ones((17, 33), dtype))

    @pytest.mark.parametrize("heads", [(4, 2), (6, 3)], ids=str)
    def test_unequal_heads_without_enable_gqa(self, heads):
        arrays = random_arrays(heads=heads[0], kv_heads=heads[1])
        with pytest.raises(
            ValueError, match="the same number of heads, or 1, unless enable_gqa=True; query"
        ) as caught:
            fastattn.scaled_dot_product_attention(*arrays)
        for array in arrays:
            assert str(array.shape) in str(caught.value)

    def test_heads_that_do_not_divide(self):
        with pytest.raises(
            ValueError, match=r"^the heads of query must be a multiple .*, got 5 and 2; query \(5, 17, 16\)"
        ):
            fastattn.scaled_dot_product_attention(*random_arrays(heads=5, kv_heads=2), enable_gqa=True)

    @pytest.mark.parametrize("given", [True, 0.0, 1, "causal"])
    def test_an_argument_one_place_too_early(self, given):
        """PyTorch takes nothing but a tensor there; NumPy would broadcast these."""
        with pytest.raises(
            TypeError, match=rf"^attn_mask must be an array, got {given!r}; is_causal and scale"
        ):
            fastattn.scaled_dot_product_attention(*random_arrays(), given)

    def test_mask_that_does_not_broadcast(self):
        with pytest.raises(ValueError, match=r"^attn_mask of shape \(17, 32\) does not broadcast to "):
            fastattn.scaled_dot_product_attention(*random_arrays(), np.ones((17, 32), bool))
