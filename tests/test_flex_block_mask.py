"""`create_block_mask`: it says what its function says, in tiles or intervals, alone and with other masks."""

from __future__ import annotations

import functools

import numpy as np
import pytest

import fastattn
from fastattn import masks
from fastattn._api import known_masks
from fastattn.masks import base
from tests.flex_gallery import GALLERY, B, H, L, S, arrays, aux_of, in_python
from tests.tolerances import assert_same_bits

pytest.importorskip("numba")


class TestBlockMask:
    @pytest.mark.parametrize("shape", [(1, 1), (5, 3), (64, 128), (65, 129), (200, 300), (130, 31)])
    def test_says_what_the_function_says(self, shape):
        def odd(b, h, q_idx, kv_idx, far):
            return ((q_idx * 7 + kv_idx * 3 + h) % 5 < 2) & (abs(q_idx - kv_idx) < far) | (b == 1)

        block_mask = fastattn.create_block_mask(odd, 2, 3, *shape, aux=(40,))
        expected = in_python(odd, (40,), 2, 3, *shape)
        np.testing.assert_array_equal(block_mask.materialize(3, *shape), expected)
        np.testing.assert_array_equal((~block_mask).materialize(3, *shape), ~expected)
        tiles = block_mask.mask_map
        assert (tiles.index[1] == -1).all()

    def test_of_no_batch_size_does_not_depend_on_the_item(self):
        """Nor on the head: else it is refused, however the index comes to be read."""

        def causal(b, h, q_idx, kv_idx):
            return kv_idx <= q_idx

        def by_item(b, h, q_idx, kv_idx):
            return kv_idx <= q_idx + 5 * b

        def unpacked(*indices):
            _, _, q_idx, kv_idx = indices
            return kv_idx <= q_idx

        def by_branch(b, h, q_idx, kv_idx):
            if h > 0:
                return True
            return kv_idx <= q_idx

        def both(f, g):
            return lambda b, h, q_idx, kv_idx: f(b, h, q_idx, kv_idx) & g(b, h, q_idx, kv_idx)

        lengths = np.array([3, 5])
        said = {
            "b": "depends on b, and B is None: pass B, the number of items",
            "h": "depends on h, and H is None",
        }
        for function, name in (
            (by_item, "b"),
            (by_branch, "h"),
            (both(causal, by_item), "b"),
            (lambda b, h, i, j: j < lengths[b], "b"),
            (lambda b, h, i, j: (lambda x: j <= x)(i + h), "h"),
            (functools.partial(lambda n, b, h, i, j: j <= i + n * b, 3), "b"),
            (lambda *indices: indices[3] <= indices[2] + indices[1], "h"),
        ):
            with pytest.raises(ValueError, match=f"^mask_mod .* {said[name]}"):
                fastattn.create_block_mask(function, None, None, 9, 9)
            sizes = (2, None) if name == "b" else (None, 2)
            found = fastattn.create_block_mask(function, *sizes, 9, 9)
            tiles = np.broadcast_to(in_python(function, (), 2, 2, 9, 9), (2, 2, 9, 9))
            expected = tiles[:, :1] if name == "b" else tiles[:1]
            np.testing.assert_array_equal(
                found.materialize(sizes[1] or 1, 9, 9).reshape(expected.shape), expected
            )
        for function in (causal, both(causal, causal), lambda *indices: indices[3] <= indices[2], unpacked):
            found = fastattn.create_block_mask(function, None, None, 9, 9)
            np.testing.assert_array_equal(np.squeeze(found.materialize(1, 9, 9)), np.tri(9, dtype=bool))

    @pytest.mark.parametrize("shape", [(1, 1), (70, 70), (65, 129), (300, 500), (500, 300)])
    @pytest.mark.parametrize("name", ["causal", "window", "documents", "nothing", "all", "by_item"])
    def test_one_interval_for_each_query_is_as_cheap_as_the_mask(self, name, shape):
        """Then it is one, and the bits are those of the mask object."""
        len_q, len_k = shape
        ids = np.arange(max(shape)) // 90
        function, mask = {
            "causal": (lambda b, h, i, j, ids: j <= i, masks.Causal("top_left")),
            "window": (lambda b, h, i, j, ids: abs(i - j) <= 20, masks.Window(20, 20, align="top_left")),
            "documents": (lambda b, h, i, j, ids: ids[i] == ids[j], masks.Segments(ids[:len_q], ids[:len_k])),
            "nothing": (lambda b, h, i, j, ids: False, masks.KeyLengths(0)),
            "all": (lambda b, h, i, j, ids: True, masks.KeyLengths(len_k)),
            "by_item": (lambda b, h, i, j, ids: j <= i + 3 * b, masks.Causal(offset=[0, 3])),
        }[name]
        block_mask = fastattn.create_block_mask(function, 2, 3, *shape, aux=(ids,))
        lowered = base.lower(block_mask, (2,), 3, *shape)
        assert lowered.mask_map is None
        rng = np.random.default_rng(0)
        query, key = rng.standard_normal((2, 3, len_q, 8)), rng.standard_normal((2, 3, len_k, 8))
        got = fastattn.attention(query, key, key, mask=block_mask)
        assert_same_bits(got, fastattn.attention(query, key, key, mask=mask))

    def test_more_than_one_interval_stays_a_map(self):
        for function in (
            lambda b, h, i, j: (j < 3) | (j == i),
            lambda b, h, i, j: (j < 128) | (j >= 256),
            lambda b, h, i, j: j <= i + h,
        ):
            block_mask = fastattn.create_block_mask(function, None, 2, 400, 400)
            assert base.lower(block_mask, (), 2, 400, 400).mask_map is not None

    def test_same_for_any_number_of_threads(self):
        options = {"aux": aux_of("big_bird")}
        one, three = (
            fastattn.create_block_mask(GALLERY["big_bird"], None, None, L, S, num_threads=n, **options)
            for n in (1, 3)
        )
        assert_same_bits(one.mask_map.index, three.mask_map.index)
        assert_same_bits(one.mask_map.bits, three.mask_map.bits)

    def test_one_plane_for_what_the_function_does_not_look_at(self):
        block_mask = fastattn.create_block_mask(GALLERY["sliding_window"], 4, 8, 300, 300, aux=(9,))
        assert block_mask.mask_map.index.shape[:2] == (1, 1)
        by_item = fastattn.create_block_mask(GALLERY["prefix_lm"], 2, 8, 300, 300, aux=(np.array([1, 2]),))
        assert by_item.mask_map.index.shape[:2] == (2, 1)

    def test_combines(self, backend):
        """With mask objects, and with what else masks, on every backend."""
        window = fastattn.create_block_mask(GALLERY["sliding_window"], None, None, L, S, aux=(9,))
        documents = fastattn.create_block_mask(GALLERY["documents"], B, H, L, S, aux=aux_of("documents"))
        allowed = {
            "window": in_python(GALLERY["sliding_window"], (9,), 1, 1, L, S)[0],
            "documents": in_python(GALLERY["documents"], aux_of("documents"), 1, 1, L, S)[0],
            "tokens": masks.GlobalTokens([0, 3]).materialize(1, L, S),
        }
        query, key, value = arrays()
        for mask, wanted in (
            (window & documents, allowed["window"] & allowed["documents"]),
            (window | masks.GlobalTokens([0, 3]), allowed["window"] | allowed["tokens"]),
            (~(window & documents), ~(allowed["window"] & allowed["documents"])),
            (documents & masks.KeyLengths([30, 60]), None),
        ):
            if wanted is None:
                wanted = allowed["documents"] & (np.arange(S) < np.array([30, 60])[:, None, None, None])
            expected = fastattn.attention(
                query, key, value, mask=wanted, bias=np.zeros(S), backend="reference"
            )
            got = backend.attention(query, key, value, mask=mask, bias=np.zeros(S))
            np.testing.assert_allclose(got, expected, rtol=1e-12, atol=1e-13)
            again = fastattn.flex_attention(query, key, value, block_mask=mask, backend=backend.backend)
            np.testing.assert_allclose(again, expected, rtol=1e-12, atol=1e-13)

    def test_with_a_mask_function_beside(self):
        block_mask = fastattn.create_block_mask(
            GALLERY["documents"], None, None, L, S, aux=aux_of("documents")
        )
        got = fastattn.flex_attention(
            *arrays(), mask_mod=GALLERY["sliding_window"], aux=(9,), block_mask=block_mask, causal=True
        )
        mask = in_python(GALLERY["documents"], aux_of("documents"), 1, 1, L, S)
        expected = fastattn.attention(*arrays(), mask=mask, window=(9, None), causal=True)
        np.testing.assert_allclose(got, expected, rtol=1e-12, atol=1e-13)

    @pytest.mark.parametrize("kind", ["object", "array", "dense"])
    def test_with_a_mask_beside(self, backend, kind):
        """All hold together, each may be missing, and a second call is as the first."""
        query, key, value = arrays(np.float64)
        random = np.random.default_rng(0).random((H, L, S)) < 0.5
        window = masks.Window(20, 20)
        mask = {"object": window, "array": random, "dense": masks.Dense(random)}[kind]
        array = window.materialize(1, L, S) if kind == "object" else random
        block_mask = masks.Causal("bottom_right")
        causal = block_mask.materialize(1, L, S)
        odd = in_python(GALLERY["sliding_window"], (9,), 1, 1, L, S)
        some = {"mask_mod": GALLERY["sliding_window"], "aux": (9,)}
        for given, wanted in [
            ({"mask": mask}, array),
            ({"mask": mask, "block_mask": block_mask}, array & causal),
            ({"mask": mask, **some}, array & odd),
            ({"mask": mask, "block_mask": block_mask, **some}, array & odd & causal),
        ]:
            expected = fastattn.attention(query, key, value, mask=wanted, backend="reference")
            for _ in range(2):
                got = fastattn.flex_attention(query, key, value, backend=backend.backend, **given)
                np.testing.assert_allclose(got, expected, rtol=1e-12, atol=1e-13)
        one = [array[0, 0] for array in (query, key, value)]
        two = {"mask": random[0], "block_mask": block_mask}
        expected = fastattn.attention(*one, mask=random[0] & causal[0], backend="reference")
        np.testing.assert_allclose(
            fastattn.flex_attention(*one, backend=backend.backend, **two), expected, rtol=1e-12, atol=1e-13
        )

    def test_a_wrong_mask_beside_is_named(self):
        for wrong, error in [
            (np.ones((L, S)), TypeError),
            (lambda b, h, i, j: True, TypeError),
            (np.ones((L, S + 1), bool), ValueError),
        ]:
            for block_mask in (None, masks.Causal("top_left")):
                with pytest.raises(error, match=r"mask.*; query \(") as caught:
                    fastattn.flex_attention(*arrays(), mask=wrong, block_mask=block_mask)
                assert str(np.shape(arrays()[1])) in str(caught.value)

    def test_drawing(self):
        block_mask = fastattn.create_block_mask(lambda b, h, i, j: j <= i, None, None, 256, 256)
        assert str(block_mask).splitlines() == [repr(block_mask), "+.", "+.", "#+", "#+"]
        assert "25.0 %" in repr(block_mask)
        large = fastattn.create_block_mask(lambda b, h, i, j: j <= i, None, None, 20000, 20000)
        lines = str(large).splitlines()[1:]
        assert len(lines) <= 32
        assert max(map(len, lines)) <= 64

    def test_other_sizes_are_refused(self):
        block_mask = fastattn.create_block_mask(lambda b, h, i, j: j <= i, 3, None, L, S)
        with pytest.raises(ValueError, match=r"BlockMask\(B=3, .*B=2 batch items"):
            fastattn.attention(*arrays(), mask=block_mask)
        block_mask = fastattn.create_block_mask(lambda b, h, i, j: j <= i, None, None, L, S + 1)
        with pytest.raises(ValueError, match=f"S={S + 1}.*does not fit.*S={S}"):
            fastattn.attention(*arrays(), mask=block_mask)

    @pytest.mark.parametrize("shape", [(0, 5), (5, 0), (0, 0)])
    def test_empty(self, shape):
        block_mask = fastattn.create_block_mask(lambda b, h, i, j: j <= i, None, None, *shape)
        query, key = np.ones((1, 1, shape[0], 4)), np.ones((1, 1, shape[1], 4))
        assert fastattn.attention(query, key, key, mask=block_mask).shape == (1, 1, shape[0], 4)
        assert str(block_mask)


def runs(*lengths, start=-3):
    return np.repeat(np.arange(start, start + len(lengths)), lengths)


#: Ids of packed documents: in any order, of any integers, longer than the scores.
IDS = {
    "runs": runs(100, 1, 250, 0, 49),
    "falling": runs(300, 100)[::-1].astype(np.int8),
    "longer": np.concatenate([runs(64, 128, 208), [7] * 100]).astype(np.uint16),
    "one": np.zeros(400, np.int64),
    "each": np.arange(400, dtype=np.int32),
    "scattered": np.arange(400) % 3,
    "twice": np.r_[runs(50), 5 + runs(50), runs(300)],
    "floats": runs(100, 300) + 0.5,
    "nan": np.where(np.arange(400) < 200, np.nan, 1.0),
    "large": np.where(np.arange(400) < 200, 2**63, 2**64 - 1).astype(np.uint64),
}


def forms_of(ids):
    """Functions that are known, and others that are not, all with their definition in NumPy."""

    def same(b, h, q_idx, kv_idx):
        return ids[q_idx] == ids[kv_idx]

    def causal(b, h, q_idx, kv_idx):
        document = ids[kv_idx]
        return (kv_idx <= q_idx) & (document == ids[q_idx])

    def causal_of_aux(b, h, q_idx, kv_idx, array):
        return (array[q_idx] == array[kv_idx]) & (q_idx >= kv_idx)

    def later(b, h, q_idx, kv_idx):
        return (ids[q_idx] == ids[kv_idx]) & (q_idx <= kv_idx)

    def strictly(b, h, q_idx, kv_idx):
        return (ids[q_idx] == ids[kv_idx]) & (q_idx > kv_idx)

    def other(b, h, q_idx, kv_idx):
        return ids[q_idx] != ids[kv_idx]

    def either(b, h, q_idx, kv_idx):
        return (ids[q_idx] == ids[kv_idx]) | (q_idx >= kv_idx)

    def ordered(b, h, q_idx, kv_idx):
        return (ids[q_idx] <= ids[kv_idx]) & (ids[q_idx] == ids[kv_idx])

    def of_one(b, h, q_idx, kv_idx):
        return (ids[q_idx] == ids[q_idx]) & (ids[0] == ids[kv_idx])

    known = [(same, ()), (causal, ()), (causal_of_aux, (ids,))]
    return known, [(function, ()) for function in (later, strictly, other, either, ordered, of_one)]


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name in ("runs", "twice") else [pytest.mark.slow]) for name in IDS],
)
def test_documents_are_known_by_their_form(name, monkeypatch):
    """The map is that of all pairs, whether a function is known or not."""
    ids, asked = IDS[name], []
    is_run = name not in ("scattered", "twice", "floats", "nan", "large")
    documents = known_masks.documents

    def watched(*arguments):
        asked.append(documents(*arguments))
        return asked[-1]

    monkeypatch.setattr(known_masks, "documents", watched)
    known, others = forms_of(ids)
    for function, aux in known + others:
        for sizes in ((400, 400), (130, 257)):
            q_idx, kv_idx = np.arange(sizes[0])[:, None], np.arange(sizes[1])
            got = fastattn.create_block_mask(function, None, 2, *sizes, aux=aux)
            wanted = np.broadcast_to(function(0, 0, q_idx, kv_idx, *aux), sizes)
            np.testing.assert_array_equal(got.materialize(2, *sizes), np.stack([wanted] * 2))
            assert (asked[-1] is not None) == (is_run and (function, aux) in known), function.__name__
            monkeypatch.setattr(known_masks, "documents", lambda *arguments: None)
            assert got == fastattn.create_block_mask(function, None, 2, *sizes, aux=aux)
            monkeypatch.setattr(known_masks, "documents", watched)


def test_known_functions_read_nothing_outside():
    ids = runs(30, 20)

    def same(b, h, q_idx, kv_idx):
        return ids[q_idx] == ids[kv_idx]

    assert fastattn.create_block_mask(same, 0, 3, 50, 50).materialize(3, 50, 50).shape == (0, 3, 50, 50)
    assert fastattn.create_block_mask(same, None, None, 0, 50).mask_map.index.shape == (1, 1, 0, 1)
    with pytest.raises(IndexError, match="same"):
        fastattn.create_block_mask(same, None, None, 50, 51)
    x = np.random.default_rng(0).standard_normal((2, 50, 8))
    wanted = fastattn.attention(x, x, x, mask=masks.Segments(ids))
    assert_same_bits(fastattn.flex_attention(x, x, x, mask_mod=same), wanted)
