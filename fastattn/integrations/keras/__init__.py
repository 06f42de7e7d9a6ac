"""Attention of Keras 3 on its NumPy backend, computed by fastattn: layers and models stay as they are."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from fastattn.integrations._common import extra

with extra("keras", "; and KERAS_BACKEND=numpy in the environment"):
    import keras
    from keras.src.backend.numpy import nn

from fastattn.integrations.keras import _attention

LAYERS = (keras.layers.MultiHeadAttention, keras.layers.GroupQueryAttention)
#: What Keras had under each owner and name that is replaced at present.
_own: dict[tuple[Any, str], Any] = {}


def install(models: bool = False) -> Callable[..., Any]:
    """Let ``keras.ops.dot_product_attention`` of the NumPy backend call `fastattn.attention`.

    ``keras.layers.MultiHeadAttention`` and ``GroupQueryAttention`` use it, and so does every model of them.
    It holds for the process, until `uninstall`. Results are Keras's up to rounding. So a query without any
    allowed key gets the mean of all values, or 0 in layers with dropout and in most models.

    Parameters
    ----------
    models : bool, default False
        Models of KerasHub that compute attention themselves, too: Llama, Gemma, Mistral, Qwen and others.

    Returns
    -------
    callable
        The function that it replaced.

    Raises
    ------
    RuntimeError
        Keras runs on another backend: ``KERAS_BACKEND=numpy`` chooses this one before Keras is imported.
    ImportError
        ``models=True``, and keras_hub is missing or has other classes than version 0.32.

    Notes
    -----
    Layers compute scores themselves in training, and for ``return_attention_scores=True``. The models of
    KerasHub, and the few whose attention stays their own, are listed in docs/coming-from.md.

    Examples
    --------
    >>> import keras  # with KERAS_BACKEND=numpy
    >>> import numpy as np
    >>> from fastattn.integrations.keras import installed
    >>> layer = keras.layers.MultiHeadAttention(num_heads=4, key_dim=8)
    >>> x = np.random.default_rng(0).standard_normal((2, 9, 16), dtype=np.float32)
    >>> with installed():
    ...     out = layer(x, x, use_causal_mask=True)
    >>> np.allclose(out, layer(x, x, use_causal_mask=True), atol=1e-5)
    True
    """
    if keras.config.backend() != "numpy":
        raise RuntimeError(f"Keras's backend must be numpy, got {keras.config.backend()}")
    before: Callable[..., Any] = nn.dot_product_attention
    replaced: list[tuple[Any, str, Any]] = [(nn, "dot_product_attention", _attention.dot_product_attention)]
    replaced += [
        (layer, "_compute_attention", _attention.inference(layer._compute_attention, _attention.of_layer))
        for layer in LAYERS
    ]
    if models:
        with extra("keras", " keras-hub"):
            from fastattn.integrations.keras._models import replaced_of_models

            replaced += replaced_of_models()
    for owner, name, new in replaced:
        if (owner, name) not in _own:
            _own[owner, name] = getattr(owner, name)
            setattr(owner, name, new)
    return before


def uninstall() -> None:
    """Give Keras's NumPy backend its own attention back, and KerasHub's models theirs."""
    for (owner, name), own in _own.items():
        setattr(owner, name, own)
    _own.clear()


@contextmanager
def installed(models: bool = False) -> Iterator[None]:
    """`install` for the length of a ``with``, in all threads. What was there before is restored after it."""
    before = set(_own)
    install(models)
    try:
        yield
    finally:
        for owner, name in _own.keys() - before:
            setattr(owner, name, _own.pop((owner, name)))
