"""Keras's attention on its NumPy backend, by fastattn and by Keras."""

from __future__ import annotations

import numpy as np
import pytest

import fastattn
from tests.cases import random_arrays

keras = pytest.importorskip("keras")

from fastattn.integrations.keras import install, installed, uninstall  # noqa: E402

RNG = np.random.default_rng(0)
MASK = RNG.random((2, 1, 7, 9)) < 0.6
MASK[0, 0, 3] = False  # a query without keys

#: Of 2 items, 7 queries, 9 keys and 4 heads.
OPTIONS = {
    "plain": {},
    "causal": {"is_causal": True},
    "mask": {"mask": MASK},
    "mask_of_numbers_and_causal": {"mask": MASK.astype(np.int8) * 2, "is_causal": True},
    "bias": {"bias": RNG.standard_normal((1, 4, 7, 9)), "scale": 0.3},
    "bias_of_a_list": {"bias": [0.0, 1, 2, 3, 4, 5, 6, 7, 8]},
}


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Gets the shape of the query of each call that Keras makes of fastattn."""
    shapes: list[tuple[int, ...]] = []
    attention = fastattn.attention

    def noting(query, *args, **options):
        shapes.append(query.shape)
        return attention(query, *args, **options)

    monkeypatch.setattr(fastattn, "attention", noting)
    return shapes


def both(call):
    """What Keras computes, and what fastattn does."""
    expected = call()
    with installed():
        return np.asarray(expected), np.asarray(call())


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
@pytest.mark.parametrize("name", OPTIONS)
def test_dot_product_attention(name: str, dtype: str, calls: list) -> None:
    arrays = random_arrays(lead=(2,), heads=4, len_q=7, len_k=9, head_dim=8, dtype=np.float64)
    query, key, value = (keras.ops.convert_to_tensor(x.swapaxes(1, 2), dtype) for x in arrays)
    expected, out = both(lambda: keras.ops.dot_product_attention(query, key, value, **OPTIONS[name]))
    assert calls == [(2, 7, 4, 8)]
    assert out.dtype == expected.dtype and out.shape == expected.shape
    eps = {"float16": 2**-10, "bfloat16": 2**-7}.get(dtype, 2**-22)  # Keras's softmax has float32
    np.testing.assert_allclose(out.astype(float), expected.astype(float), rtol=4 * eps, atol=4 * eps)


def test_mixed_dtypes_promote_as_there(calls: list) -> None:
    query, key, value = random_arrays(lead=(2,), heads=4, len_q=7, len_k=9, head_dim=8)
    query, value = query.astype(np.float16), value.astype(keras.ops.zeros(1, "bfloat16").dtype)
    arrays = [x.swapaxes(1, 2) for x in (query, key, value)]
    expected, out = both(lambda: keras.ops.dot_product_attention(*arrays))
    assert out.dtype == expected.dtype == np.float32
    np.testing.assert_allclose(out, expected, atol=1e-6)


def test_what_keras_refuses_stays_refused(calls: list) -> None:
    query = np.ones((2, 3, 4, 8), np.float32)
    with installed():
        with pytest.raises(ValueError, match="Flash attention is not supported"):
            keras.ops.dot_product_attention(query, query, query, flash_attention=True)
        with pytest.raises(ValueError, match="only supports 4D inputs"):
            keras.ops.dot_product_attention(query[0], query[0], query[0])
    assert calls == []


def test_install_and_uninstall(calls: list) -> None:
    query = np.ones((1, 3, 4, 8), np.float32)

    def is_ours() -> bool:
        calls.clear()
        keras.ops.dot_product_attention(query, query, query)
        return bool(calls)

    keras_own = install()
    try:
        assert install() is not keras_own
        with installed():
            assert is_ours()
        assert is_ours()
    finally:
        uninstall()
    assert not is_ours()
    assert install() is keras_own
    uninstall()
    with pytest.raises(ZeroDivisionError), installed():
        raise ZeroDivisionError
    assert not is_ours()


def test_another_backend_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keras.config, "backend", lambda: "jax")
    with pytest.raises(RuntimeError, match="must be numpy, got jax"):
        install()


@pytest.mark.parametrize(
    "options",
    [{}, {"use_causal_mask": True}, {"attention_mask": RNG.random((2, 9, 9)) < 0.7, "use_causal_mask": True}],
)
@pytest.mark.parametrize("kind", ["heads", "grouped", "window", "heads_with_dropout", "grouped_with_dropout"])
def test_layers(kind: str, options: dict, calls: list) -> None:
    layer = {
        "heads": lambda: keras.layers.MultiHeadAttention(num_heads=4, key_dim=8, value_dim=5),
        "grouped": lambda: keras.layers.GroupQueryAttention(8, num_query_heads=4, num_key_value_heads=2),
        "heads_with_dropout": lambda: keras.layers.MultiHeadAttention(num_heads=4, key_dim=8, dropout=0.1),
        "grouped_with_dropout": lambda: keras.layers.GroupQueryAttention(8, 4, 2, dropout=0.1),
        "window": lambda: keras.layers.MultiHeadAttention(num_heads=4, key_dim=8, sliding_window=3),
    }[kind]()
    x = RNG.standard_normal((2, 9, 16)).astype(np.float32)
    layer(x, x)
    expected, out = both(lambda: layer(x, x, **options))
    assert len(calls) == 1
    np.testing.assert_allclose(out, expected, atol=1e-5)


@pytest.mark.parametrize("options", [{"training": True}, {"return_attention_scores": True}])
def test_training_and_scores_stay_keras_own(options: dict, calls: list) -> None:
    layer = keras.layers.MultiHeadAttention(num_heads=4, key_dim=8, dropout=0.5, seed=0)
    x = RNG.standard_normal((2, 9, 16)).astype(np.float32)
    with installed():
        out = layer(x, x, **options)
        assert calls == []
        inference = layer(x, x)
    assert len(calls) == 1
    if "training" in options:
        assert np.abs(out - inference).max() > 0.01
    else:
        assert out[1].shape == (2, 4, 9, 9)
        np.testing.assert_allclose(out[0], inference, atol=1e-5)


def test_model_with_padding(calls: list) -> None:
    """Also where a padded query has no key: nothing is left out before the values are averaged."""
    tokens = keras.Input((11,), dtype="int32")
    x = keras.layers.Embedding(50, 16, mask_zero=True)(tokens)
    for _ in range(2):
        x = x + keras.layers.MultiHeadAttention(num_heads=2, key_dim=8)(x, x)
    model = keras.Model(tokens, keras.ops.mean(x, axis=1))
    ids = RNG.integers(1, 50, (3, 11))
    ids[1, 6:] = 0
    expected, out = both(lambda: model.predict(ids, verbose=0))
    assert len(calls) == 2
    np.testing.assert_allclose(out, expected, atol=1e-5)
