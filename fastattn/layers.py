"""Layers of neural networks: weights in, arrays out.

`MultiHeadAttention` is projections by NumPy's BLAS around `fastattn.attention`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from math import prod
from typing import TYPE_CHECKING, Any, overload

import numpy as np
from numpy.lib.stride_tricks import as_strided

from fastattn._api.attention import attention
from fastattn._api.rope import rope as rotate
from fastattn._cache.cache import KVCache, causal_rule
from fastattn._call.arguments import (
    as_mask,
    check_causal,
    check_finite,
    check_key_lengths,
    check_out,
    computed_in,
    count,
    host_numbers,
    promote,
)
from fastattn._call.options import complete, public, refusing
from fastattn._call.problem import MAX_DIM
from fastattn._machine.device import host_array, in_library_of
from fastattn.masks import Causal

if TYPE_CHECKING:
    from typing import Generic, Unpack

    from numpy.typing import ArrayLike

    from fastattn._call.options import LayerOptions, Lse, Mean, No, Pair, Triple, Weights, Yes

    class _Options(LayerOptions[Lse, Weights], Generic[Lse, Weights], total=False):
        cache: KVCache | None


__all__ = ["MultiHeadAttention"]

_FIRST_NAME = r"(?<![^.])(in_proj_weight|q_proj_weight)$"  # of a `torch.nn.MultiheadAttention`


class MultiHeadAttention:
    """Multi-head attention with its projections: ``concat(heads of attention(x w_q, x w_k, x w_v)) w_o``.

    Letters as in `fastattn.attention`.

    Parameters
    ----------
    w_q : array_like, shape (query_dim, H * D)
        Weights are ``(in, out)``, as in ``x @ w``; head ``h`` has the columns from ``h * D`` on. The dtypes
        are those of `attention`.
    w_k : array_like, shape (key_dim, K * D)
    w_v : array_like, shape (value_dim, K * E)
    w_o : array_like, shape (H * E, out_dim)
    b_q, b_k, b_v, b_o : array_like, shape (out,), optional
        Biases, added to the products.
    num_heads : int
        ``H``.
    num_kv_heads : int, optional
        ``K``, of which ``H`` is a multiple (grouped-query and multi-query attention); ``H`` when not given.
    rope : (array_like, array_like), optional
        ``(cos, sin)`` as `fastattn.rope_tables` gives them, each ``(positions, r / 2)``. Queries and keys are
        rotated by their positions, in pairs ``(i, i + r / 2)``. `fastattn.rope` says how to permute weights
        for interleaved pairs.

    Attributes
    ----------
    w_q, w_k, w_v, w_o, b_q, b_k, b_v, b_o, rope : arrays or None
        What was given, in the dtype of the computation. An array that has it already is not copied: the next
        call sees changes made in place.
    num_heads, num_kv_heads : int

    Raises
    ------
    TypeError
        An unsupported dtype, float16 together with bfloat16, a size that is not an integer, arrays on a GPU.
    ValueError
        Shapes that do not fit each other, or the numbers of heads.

    Notes
    -----
    The same in NumPy, for ``K = H``::

        q, k, v = (
            (x @ w + b).reshape(*x.shape[:-1], H, -1)
            for x, w, b in ((query, w_q, b_q), (key, w_k, b_k), (value, w_v, b_v))
        )
        heads = fastattn.attention(q, k, v, layout="bshd")
        out = heads.reshape(*query.shape[:-1], -1) @ w_o + b_o

    A projection is one BLAS product over all items and rows. In self-attention the projections are one, where
    the weights are side by side in memory, as `from_torch` has them. Nothing is transposed or copied.

    Dtypes: as in `attention`, of the arguments and the weights. 16-bit weights are widened to float32 once;
    the result is rounded once. float32 weights are converted at each call with float64 arguments.

    Masks, determinism, memory: docs/promises.md. Rows of padding may hold NaN, which reaches no other row.
    NumPy's BLAS may round a product differently with other sizes or another number of threads.

    References
    ----------
    .. [1] Vaswani et al., "Attention Is All You Need", NeurIPS 2017, section 3.2.2.
    .. [2] Ainslie et al., "GQA: Training Generalized Multi-Query Transformer Models from Multi-Head
       Checkpoints", EMNLP 2023.

    Examples
    --------
    An encoder, as in BERT or ViT: a padded batch of 2 sequences, of 7 and 5 tokens.

    >>> import numpy as np
    >>> import fastattn
    >>> from fastattn.layers import MultiHeadAttention
    >>> rng = np.random.default_rng(0)
    >>> weights = rng.standard_normal((4, 32, 32), dtype=np.float32) / 6
    >>> layer = MultiHeadAttention(*weights, num_heads=4)
    >>> x = rng.standard_normal((2, 7, 32), dtype=np.float32)
    >>> out = x + layer(x, key_lengths=[7, 5])
    >>> out.shape
    (2, 7, 32)

    Which tokens the first one of an image, the class token, attends to, over all heads:

    >>> out, weights = layer(x, return_weights="mean")
    >>> weights[:, 0].shape
    (2, 7)

    A decoder, as in GPT or LLaMA: grouped heads, rotary positions, and a cache to which each call appends.
    First a prompt, then one token at a time:

    >>> shapes = [(32, 32), (32, 16), (32, 16), (32, 32)]
    >>> weights = [rng.standard_normal(shape, dtype=np.float32) / 6 for shape in shapes]
    >>> tables = fastattn.rope_tables(100, 8)
    >>> layer = MultiHeadAttention(*weights, num_heads=4, num_kv_heads=2, rope=tables)
    >>> cache = fastattn.KVCache(batch=2, num_kv_heads=2, head_dim=8, layout="bshd")
    >>> steps = [layer(x[:, :4], cache=cache), *(layer(x[:, i : i + 1], cache=cache) for i in (4, 5, 6))]
    >>> cache.lengths
    array([7, 7])
    >>> np.allclose(np.concatenate(steps, axis=1), layer(x, causal=True), atol=1e-5)
    True

    Cross attention: queries of a decoder, keys and values of an encoder.

    >>> layer(x, out[:1]).shape
    (2, 7, 32)
    """

    __slots__ = (
        "_head_dim", "_like", "_value_dim", "b_k", "b_o", "b_q", "b_v", "num_heads", "num_kv_heads", "rope",
        "w_k", "w_o", "w_q", "w_v",
    )  # fmt: skip

    w_q: np.ndarray
    w_k: np.ndarray
    w_v: np.ndarray
    w_o: np.ndarray
    b_q: np.ndarray | None
    b_k: np.ndarray | None
    b_v: np.ndarray | None
    b_o: np.ndarray | None
    num_heads: int
    num_kv_heads: int
    rope: tuple[np.ndarray, np.ndarray] | None
    _head_dim: int
    _value_dim: int
    _like: np.ndarray  # empty, of the dtype that the weights as given promote to

    @refusing
    def __init__(
        self,
        w_q: ArrayLike,
        w_k: ArrayLike,
        w_v: ArrayLike,
        w_o: ArrayLike,
        *,
        b_q: ArrayLike | None = None,
        b_k: ArrayLike | None = None,
        b_v: ArrayLike | None = None,
        b_o: ArrayLike | None = None,
        num_heads: int,
        num_kv_heads: int | None = None,
        rope: tuple[ArrayLike, ArrayLike] | None = None,
    ) -> None:
        self.num_heads = H = count(num_heads, "num_heads", 1, MAX_DIM)
        self.num_kv_heads = K = H if num_kv_heads is None else count(num_kv_heads, "num_kv_heads", 1, MAX_DIM)
        if H % K:
            raise ValueError(f"num_heads must be a multiple of num_kv_heads, got {H} and {K}")
        named = {"w_q": w_q, "w_k": w_k, "w_v": w_v, "w_o": w_o,
                 "b_q": b_q, "b_k": b_k, "b_v": b_v, "b_o": b_o}  # fmt: skip
        given = {name: host_numbers(x, name) for name, x in named.items() if x is not None or name[0] == "w"}
        for name, array in given.items():
            if name.startswith("w") and array.ndim != 2:
                raise ValueError(f"{name} must have shape (in, out), got {array.shape}")
        self._head_dim = _divided(given["w_q"].shape[1], H, "w_q", "num_heads")
        self._value_dim = _divided(given["w_v"].shape[1], K, "w_v", "num_kv_heads")
        _check_size(given["w_k"], 1, "w_k", K * self._head_dim, "num_kv_heads times the head_dim of w_q")
        _check_size(given["w_o"], 0, "w_o", H * self._value_dim, "num_heads times the head_dim of w_v")
        for name, array in given.items():
            if name.startswith("b"):
                size = given[f"w_{name[-1]}"].shape[1]
                if array.shape != (size,):
                    raise ValueError(
                        f"{name} must have shape ({size},), as w_{name[-1]} has {size} columns, "
                        f"got {array.shape}"
                    )
        self._like = np.empty(0, promote(**given))
        dtype = computed_in(self._like.dtype)
        for name in named:
            setattr(self, name, _for_blas(given[name], dtype) if name in given else None)
        self.rope = None if rope is None else _tables(rope, self._head_dim, dtype)

    @classmethod
    @refusing
    def from_torch(
        cls, state_dict: Mapping[str, ArrayLike], num_heads: int, *, prefix: str = ""
    ) -> MultiHeadAttention:
        """The layer of a ``torch.nn.MultiheadAttention``, by the names of its weights.

        Parameters
        ----------
        state_dict : mapping of str to tensors or arrays
            ``module.state_dict()``, or what a file has under these names: ``in_proj_weight``, or
            ``q_proj_weight``, ``k_proj_weight`` and ``v_proj_weight`` (of a module with `kdim` or `vdim`);
            ``in_proj_bias`` if there is one; ``out_proj.weight``, and ``out_proj.bias`` if there is one.
            Tensors are of the CPU; those in bfloat16 become float32. Memory is shared where it can be.
        num_heads : int
        prefix : str, default ""
            What stands before these names in the state dict of a whole model, as
            ``"encoder.layers.0.self_attn."``, its last dot included. Other names are ignored.

        Raises
        ------
        TypeError
            A module in the place of its ``state_dict()``; a `prefix` that is no str.
        ValueError
            A missing or an unknown name, or a `prefix` without such names: the message lists those that there
            are; ``bias_k`` and ``bias_v`` (``add_bias_kv=True``), which add a key
            that is no row of `key`; shapes that do not fit.

        Notes
        -----
        Arrays are ``(batch, length, dim)``, as with ``batch_first=True``. A bool mask is the opposite of
        torch's: True = may attend. With torch's arguments::

            layer(query, key, value, mask=~attn_mask)  # bool, (L, S)
            layer(query, key, value, bias=attn_mask)  # float, (L, S)
            layer(query, key, value, mask=~attn_mask.reshape(batch, num_heads, L, S))  # bool, of three axes
            layer(query, key, value, mask=~key_padding_mask[:, None, None, :])
            layer(query, key, value, causal="top_left")  # is_causal=True
            layer(query, key, value, return_weights="mean")  # need_weights=True
            layer(query, key, value, return_weights=True)  # and average_attn_weights=False
            layer(query, key, value, sinks=np.zeros(num_heads))  # of a module with add_zero_attn=True

        A query without any allowed key is NaN there. Here attention gives 0 for it, and the result is `b_o`.

        Examples
        --------
        >>> import numpy as np
        >>> from fastattn.layers import MultiHeadAttention
        >>> rng = np.random.default_rng(0)
        >>> state = {  # of nn.MultiheadAttention(16, 4, bias=False)
        ...     "in_proj_weight": rng.standard_normal((48, 16), dtype=np.float32),
        ...     "out_proj.weight": rng.standard_normal((16, 16), dtype=np.float32),
        ... }
        >>> layer = MultiHeadAttention.from_torch(state, num_heads=4)
        >>> layer(np.ones((2, 5, 16), np.float32)).shape
        (2, 5, 16)
        """
        if not hasattr(state_dict, "items"):
            got = type(state_dict).__name__
            raise TypeError(f"state_dict must be a mapping, as module.state_dict() gives, got {got}")
        if not isinstance(prefix, str):
            raise TypeError(f"prefix must be a str, got {prefix!r}")
        present = [name for name, x in state_dict.items() if x is not None]
        state = {name.removeprefix(prefix): state_dict[name] for name in present if name.startswith(prefix)}
        if not state.keys() & {"in_proj_weight", "q_proj_weight"}:
            found = [name[: it.start()] for name in present if (it := re.search(_FIRST_NAME, name))]
            if prefix or found:
                others = f"prefix may be {', '.join(map(repr, found))}" if found else "and no other has"
                raise ValueError(
                    f"state_dict has no in_proj_weight or q_proj_weight at prefix={prefix!r}; {others}"
                )
        if refused := [name for name in ("bias_k", "bias_v") if name in state]:
            raise ValueError(
                f"state_dict has {' and '.join(prefix + name for name in refused)}: one more key and value "
                f"for each sequence (add_bias_kv=True) are not supported"
            )
        arrays = {name: _from_tensor(x, prefix + name) for name, x in state.items()}

        def take(name: str) -> np.ndarray:
            if name not in arrays:
                names = ", ".join(prefix + other for other in state)
                raise ValueError(f"state_dict has no {prefix}{name}, but {names or 'nothing'}")
            return arrays.pop(name)

        def thirds(name: str) -> list[np.ndarray]:
            array = take(name)
            _divided(array.shape[0] if array.ndim else 1, 3, name, "the rows of queries, keys and values")
            return np.split(array, 3)

        if "in_proj_weight" in arrays:
            w_q, w_k, w_v = thirds("in_proj_weight")
        else:
            w_q, w_k, w_v = (take(f"{x}_proj_weight") for x in "qkv")
        w_o = take("out_proj.weight")
        biases = thirds("in_proj_bias") if "in_proj_bias" in arrays else [None] * 3
        b_o = arrays.pop("out_proj.bias", None)
        if arrays:
            names = ", ".join(prefix + name for name in arrays)
            raise ValueError(f"state_dict has {names}, which nn.MultiheadAttention has not")
        named: Any = zip(("b_q", "b_k", "b_v", "b_o"), (*biases, b_o), strict=True)
        return cls(w_q.T, w_k.T, w_v.T, w_o.T, **dict(named), num_heads=num_heads)

    def __repr__(self) -> str:
        (query_dim, _), (_, out_dim) = self.w_q.shape, self.w_o.shape
        return (
            f"MultiHeadAttention({query_dim} -> {out_dim}, num_heads={self.num_heads}, "
            f"num_kv_heads={self.num_kv_heads}, head_dim={self._head_dim}, dtype={self._like.dtype.name})"
        )

    @overload
    def __call__(
        self,
        query: ArrayLike,
        key: ArrayLike | None = None,
        value: ArrayLike | None = None,
        **options: Unpack[_Options[No, No]],
    ) -> np.ndarray: ...
    @overload
    def __call__(
        self,
        query: ArrayLike,
        key: ArrayLike | None = None,
        value: ArrayLike | None = None,
        **options: Unpack[_Options[Yes, No]],
    ) -> Pair: ...
    @overload
    def __call__(
        self,
        query: ArrayLike,
        key: ArrayLike | None = None,
        value: ArrayLike | None = None,
        **options: Unpack[_Options[No, Yes | Mean]],
    ) -> Pair: ...
    @overload
    def __call__(
        self,
        query: ArrayLike,
        key: ArrayLike | None = None,
        value: ArrayLike | None = None,
        **options: Unpack[_Options[Yes, Yes | Mean]],
    ) -> Triple: ...
    @overload
    def __call__(
        self,
        query: ArrayLike,
        key: ArrayLike | None = None,
        value: ArrayLike | None = None,
        **options: Unpack[_Options[bool, bool | Mean]],
    ) -> np.ndarray | tuple[np.ndarray, ...]: ...
    @public("L")
    def __call__(
        self,
        query: ArrayLike,
        key: ArrayLike | None = None,
        value: ArrayLike | None = None,
        *extra: Any,
        cache: KVCache | None = None,
        **options: Any,
    ) -> np.ndarray | tuple[np.ndarray, ...]:
        """The layer on arrays.

        Parameters
        ----------
        query : array_like, shape (..., L, query_dim)
        key : array_like, shape (..., S, key_dim), optional
            `query` when not given: self-attention. The leading axes broadcast.
        value : array_like, shape (..., S, value_dim), optional
            `key` when not given.
        cache : KVCache, optional
            The projected `key` and `value` are appended to it. The queries then read all that it holds, the
            last query at the last position. Arrays are ``(batch, length, dim)``. A cache of layout "bshd"
            needs no transpose.
        other options
            As in `fastattn.attention`: a mask and a bias broadcast to ``(..., H, L, S)``, True = may attend.
            With a cache, ``S`` is its longest length.
        causal : {None, False, True, "top_left", "bottom_right"}, optional
            As in `attention`. Not given: False without a cache, ``"bottom_right"`` with one. With a cache
            False means that every query sees all keys, as in cross attention; ``"top_left"`` is an error.
        key_lengths : array_like of int, optional
            How many of the S keys of each item are read; the others are padding. With a cache: how many of
            the new rows of each item are appended, for prompts of different lengths. In self-attention
            queries are then padded as keys are, at the end, and no window is possible.
        dropout, seed
            As in `attention`; not with a cache.
        out : ndarray, shape (..., L, out_dim), optional
            Where to write the result; its dtype, any strides.
        return_lse : bool, default False
            Also return the log-sum-exp of each query and head.
        return_weights : bool or "mean", default False
            As in `attention`: also return the attention weights, of each head or their mean.

        Returns
        -------
        out : ndarray, shape (..., L, out_dim)
            Of query's library, as `lse` and `weights` are.
        lse : ndarray, shape (..., H, L)
        weights : ndarray, shape (..., H, L, S), or (..., L, S) for their mean
            What is asked for comes back as one tuple, in this order.

        Raises
        ------
        TypeError, ValueError, BackendError
            As in `attention` and `fastattn.KVCache`; for arrays whose last axis does not fit the weights; for
            positions beyond the tables of `rope`. After an error nothing was appended to the cache.

        Notes
        -----
        Positions for `rope`: keys are at ``0 .. S - 1``, or follow those of the cache. Queries are at
        ``0 .. L - 1``; with a cache or ``causal="bottom_right"`` they are the last positions of their item.

        In cross attention the first call fills the cache. The others read it, and give no keys::

            layer(query, memory, cache=cache, causal=False)
            layer(query, memory[:, :0], cache=cache, causal=False)
        """
        given = complete("L", MultiHeadAttention.__call__, options, extra)
        causal, out = given.pop("causal"), given.pop("out")
        key_lengths, dropout, seed = (given.pop(name) for name in ("key_lengths", "dropout", "seed"))
        if key is None and value is not None:
            raise ValueError("value is given without key")
        key = query if key is None else key
        x_q, x_k = _rows(query, "query", self.w_q, "w_q"), _rows(key, "key", self.w_k, "w_k")
        x_v = _rows(key if value is None else value, "value", self.w_v, "w_v")
        if x_k.shape[-2] != x_v.shape[-2]:
            raise ValueError(f"key and value must have the same length, got {x_k.shape} and {x_v.shape}")
        result = promote(query=x_q, key=x_k, value=x_v, weights=self._like)
        dtype = computed_in(result)
        lead = _common_lead(query=x_q, key=x_k, value=x_v)
        target = None
        if out is not None:
            target = check_out(out, (*lead, x_q.shape[-2], self.w_o.shape[1]), result, dtype)
            target = host_array(target, "out")
        if cache is None:
            given |= {"key_lengths": key_lengths, "dropout": dropout, "seed": seed, "layout": "bshd"}
            given["causal"] = check_causal(False if causal is None else causal)
            positions: tuple[Any, Any] = None, None  # from 0 on
            if self.rope is not None and given["causal"] == "bottom_right":
                S = x_k.shape[-2]
                ends = np.array(S) if key_lengths is None else check_key_lengths(key_lengths, lead, S)
                positions = _last(x_q.shape[-2], ends), None
        else:
            if check_finite(dropout, "dropout") or seed is not None:
                raise ValueError(f"a cache takes no dropout, got dropout={dropout!r} and seed={seed!r}")
            given["causal"] = causal_rule(True if causal is None else causal)
            positions = _positions_in(cache, x_q, x_k, x_v, key_lengths, given)

        q, k, v = self._inputs_of_heads(x_q, x_k, x_v, dtype)
        if self.rope is not None:
            for rows, at in zip((q, k), positions, strict=True):
                rotate(
                    rows, *self.rope, positions=at, layout="bshd", out=rows, num_threads=given["num_threads"]
                )
        results = attention(q, k, v, **given) if cache is None else _step(cache, q, k, v, given)
        heads, *others = results if isinstance(results, tuple) else (results,)
        if given["return_weights"]:
            others[-1] = _rounded(others[-1], result)
        joined = heads.reshape(*heads.shape[:-2], self.w_o.shape[0])
        projected = _added(_product(joined, self.w_o, dtype), self.b_o)
        if target is None:
            out = in_library_of(query, _rounded(projected, result))
        else:
            with np.errstate(all="ignore"):
                target[...] = projected
        return (out, *(in_library_of(query, other) for other in others)) if others else out

    def _inputs_of_heads(
        self, x_q: np.ndarray, x_k: np.ndarray, x_v: np.ndarray, dtype: np.dtype
    ) -> list[np.ndarray]:
        """Queries, keys and values, ``(..., length, heads, dim)``."""
        weights, biases = (self.w_q, self.w_k, self.w_v), (self.b_q, self.b_k, self.b_v)
        K = self.num_kv_heads
        splits = (self.num_heads, self._head_dim), (K, self._head_dim), (K, self._value_dim)
        if x_q is x_k is x_v and (stacked := _side_by_side(weights)) is not None:
            ends = np.cumsum([w.shape[1] for w in weights])
            parts = np.split(_product(x_q, stacked, dtype), ends[:-1], axis=-1)
        else:
            parts = [_product(x, w, dtype) for x, w in zip((x_q, x_k, x_v), weights, strict=True)]
        return [
            _added(part, b).reshape(*part.shape[:-1], *split)
            for part, b, split in zip(parts, biases, splits, strict=True)
        ]


# The edge ------------------------------------------------------------------------------------------


def _divided(size: int, parts: int, name: str, what: str) -> int:
    if size % parts:
        raise ValueError(f"{name}: {what}, {parts}, must divide its {size} columns")
    return size // parts


def _check_size(array: np.ndarray, axis: int, name: str, size: int, what: str) -> None:
    if array.shape[axis] != size:
        where = "columns" if axis else "rows"
        raise ValueError(f"{name} must have {size} {where}, {what}, got shape {array.shape}")


def _from_tensor(value: Any, name: str) -> np.ndarray:
    """An array, or a tensor on the CPU as an array. torch's bfloat16, which NumPy lacks, becomes float32."""
    if hasattr(value, "detach"):
        value = value.detach()
        if str(value.dtype) == "torch.bfloat16":
            value = value.float()
    return host_numbers(value, name)


def _tables(rope: Any, head_dim: int, dtype: np.dtype) -> tuple[np.ndarray, np.ndarray]:
    if not isinstance(rope, (tuple, list)) or len(rope) != 2:
        raise ValueError(f"rope must be a pair (cos, sin), got {type(rope).__name__}")
    rotate(np.empty((0, head_dim), dtype), *rope)  # raises unless these are tables
    cos, sin = (np.ascontiguousarray(table, dtype) for table in rope)
    return cos, sin


def _rows(value: Any, name: str, weights: np.ndarray, of: str) -> np.ndarray:
    array = host_numbers(value, name)
    if array.ndim < 2 or array.shape[-1] != weights.shape[0]:
        raise ValueError(
            f"{name} must have shape (..., length, {weights.shape[0]}), as {of} is {weights.shape}, "
            f"got {array.shape}"
        )
    return array


def _common_lead(**arrays: np.ndarray) -> tuple[int, ...]:
    try:
        return np.broadcast_shapes(*(array.shape[:-2] for array in arrays.values()))
    except ValueError:
        shapes = ", ".join(f"{name} {array.shape}" for name, array in arrays.items())
        raise ValueError(
            f"the leading batch axes of query, key and value do not broadcast; {shapes}"
        ) from None


# Caches --------------------------------------------------------------------------------------------


def _positions_in(
    cache: Any, x_q: np.ndarray, x_k: np.ndarray, x_v: np.ndarray, key_lengths: Any, options: dict[str, Any]
) -> tuple[np.ndarray, np.ndarray]:
    """Positions of queries and new keys in a cache. Adds to `options` what `KVCache.step` takes."""
    if not isinstance(cache, KVCache):
        raise TypeError(f"cache must be a KVCache, got {type(cache).__name__}")
    starts = cache.lengths
    for name, x in (("query", x_q), ("key", x_k), ("value", x_v)):
        if x.ndim != 3 or len(x) != len(starts):
            raise ValueError(
                f"with a cache {name} must have shape (batch, length, dim), with batch={len(starts)}, "
                f"got {x.shape}"
            )
    L, T = x_q.shape[1], x_k.shape[1]
    if key_lengths is None:
        return _last(L, starts + T), _last(T, starts + T)
    counts = np.broadcast_to(check_key_lengths(key_lengths, starts.shape, T), starts.shape)
    options["lengths"] = counts
    at_k = starts[:, None] + np.minimum(np.arange(T), np.maximum(counts - 1, 0)[:, None])
    if options["causal"] is False or np.all(counts == T):
        return _last(L, starts + counts), at_k
    # Query i is at the position of key i. `KVCache.attend` would put the queries at the last L positions.
    if L != T or options["window"] is not None or cache._settings.window is not None:
        raise ValueError(
            f"key_lengths less than the length of key go with a cache only in self-attention without a "
            f"window, got {counts.tolist()}; query {x_q.shape}, key {x_k.shape}, window={options['window']}, "
            f"{cache}"
        )
    causal, mask = Causal(offset=starts), options["mask"]
    options |= {"causal": False, "mask": causal if mask is None else causal & as_mask(mask, False)}
    return at_k, at_k


def _last(count: int, ends: np.ndarray) -> np.ndarray:
    """The last `count` positions of each item. Before its first: 0, for queries that read nothing."""
    return np.maximum(ends[..., None] + np.arange(-count, 0), 0)


def _step(cache: KVCache, q: np.ndarray, k: np.ndarray, v: np.ndarray, options: dict[str, Any]) -> Any:
    """`KVCache.step` on arrays in the layout "bshd"."""
    if cache._settings.layout == "bshd":
        return cache.step(q, k, v, **options)
    results = cache.step(*(x.swapaxes(1, 2) for x in (q, k, v)), **options)
    if isinstance(results, tuple):
        return (results[0].swapaxes(1, 2), *results[1:])
    return results.swapaxes(1, 2)


# Products ------------------------------------------------------------------------------------------


def _for_blas(array: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """The array in this dtype, copied only where BLAS could not read it in place."""
    array = array.astype(dtype, copy=False)
    if array.ndim == 2:
        rows = array if array.strides[1] == array.itemsize else array.T
        if not (
            array.flags.aligned
            and rows.strides[1] == array.itemsize
            and rows.strides[0] >= rows.shape[1] * array.itemsize
        ):
            array = np.ascontiguousarray(array)
    return array


def _product(x: np.ndarray, w: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """``x @ w``, computed in `dtype` as one product of matrices."""
    rows = np.require(x, dtype, ["C", "A"]).reshape(prod(x.shape[:-1]), x.shape[-1])
    with np.errstate(all="ignore"):  # rows of padding may hold anything
        y = rows @ w.astype(dtype, copy=False)
    return y.reshape(*x.shape[:-1], w.shape[1])


def _added(rows: np.ndarray, bias: np.ndarray | None) -> np.ndarray:
    """The rows, to which the bias is added in place."""
    if bias is not None:
        with np.errstate(all="ignore"):
            rows += bias.astype(rows.dtype, copy=False)
    return rows


def _side_by_side(weights: tuple[np.ndarray, ...]) -> np.ndarray | None:
    """One matrix of all columns where they follow each other in memory, as in PyTorch's ``in_proj_weight``.

    One product is faster than three with a third of the columns each.
    """
    first, columns = weights[0], 0
    for w in weights:
        if w.strides != first.strides or w.ctypes.data != first.ctypes.data + columns * first.strides[1]:
            return None
        columns += w.shape[1]
    return as_strided(first, (first.shape[0], columns), writeable=False)


def _rounded(array: np.ndarray, dtype: np.dtype) -> np.ndarray:
    with np.errstate(all="ignore"):
        return array.astype(dtype, copy=False)
