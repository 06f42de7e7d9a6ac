"""`KVCache`: keys and values of past tokens. Bookkeeping over pages, which `attention` reads."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn, overload

import numpy as np

from fastattn._api.attention import attend
from fastattn._api.prepared import ATTENTION, known, signature, signature_of, token_of
from fastattn._cache.pages import KEYS, MIN_SLAB, NO_PAGE, VALUES, PagePool, read_rows
from fastattn._cache.state import Settings, State, rounded_length
from fastattn._cache.store import PageStore, Undo
from fastattn._call.arguments import (
    as_array,
    check_bool,
    check_window,
    count,
    promote,
)
from fastattn._call.options import MISSING, complete, public, refuse_arguments, refusing
from fastattn._call.problem import FLOAT64, MAX_ROWS
from fastattn._call.storage import Rows
from fastattn._machine.device import in_library_of
from fastattn._machine.host import default_backend
from fastattn.backends.registry import load as load_backend

if TYPE_CHECKING:
    import os
    from collections.abc import Sequence
    from typing import Never, Unpack

    from numpy.typing import ArrayLike, DTypeLike

    from fastattn._call.options import (
        AttendOptions,
        LayoutName,
        Mean,
        No,
        Pair,
        StepOptions,
        Triple,
        WindowBounds,
        Yes,
    )


class KVCache(PageStore):
    """Keys and values of past tokens, to which each step of a decoder appends and attends.

    Letters: ``H`` query heads, ``K`` key/value heads, ``T`` new tokens, ``L`` queries, ``D`` head_dim, ``E``
    value_dim.

    Parameters
    ----------
    batch : int
        Items, each a sequence of its own length.
    num_kv_heads, head_dim : int
        ``K`` and ``D``.
    value_dim : int, optional
        ``E``; ``D`` when not given.
    dtype : dtype or str, or a (key, value) pair of them, default "float32"
        How rows are stored: float64, float32, float16, bfloat16 (of the package `ml_dtypes`, which a name
        imports) or int8, see Notes. Two different 16-bit types do not go together.
    window : int, optional
        Each query sees the last `window` keys up to its own, and rows further back are dropped as the
        sequence grows: memory stays bounded, but for some bytes a page. Not given: nothing is dropped.
    keep_first : int, default 0
        Beside the `window` every query sees the first `keep_first` keys up to its own, which are never
        dropped (attention sinks). Without a `window` it changes nothing.
    rollback : int, default 64
        How many tokens `truncate` can take back from the greatest length that an item has had, on a cache
        with a `window`; without one it can take back all.
    page_size : int, optional
        Tokens of a page; 256 when not given. It changes no result. A multiple of 64 is fastest.
    layout : {"bhsd", "bshd"}, default "bhsd"
        Of what `append`, `attend` and `step` take and return: ``(batch, heads, tokens, dim)`` or
        ``(batch, tokens, heads, dim)``.

    Attributes
    ----------
    lengths : ndarray, shape (batch,), int64
        Tokens of each item so far; item ``b`` holds the positions ``0 .. lengths[b] - 1``. A copy.
    retained : ndarray, shape (batch,), int64
        The first position still held, beside the first `keep_first`; 0 where all are. A copy.
    nbytes : int
        Memory of the pages that hold its rows. A page that a `fork` shares counts in each cache.
    dtype : dtype, or a (key, value) pair where they differ
        The storage.

    Raises
    ------
    TypeError
        A dtype that is not one of these, a size that is not an integer.
    ValueError
        A size out of range, two 16-bit storages that differ, an unknown `layout`.
    ImportError
        ``"bfloat16"`` where `ml_dtypes` is not installed.

    Notes
    -----
    Rows are kept in pages, as in PagedAttention [1]_: growth copies nothing. `keep_first` with a `window` is
    StreamingLLM's pattern [2]_, except that positions are absolute: rotate keys before `append`, and do not
    rotate again.

    The same queries over the same tokens give the same bits, however those were appended, truncated, forked,
    paged or loaded, and whatever the other items hold. Nothing past an item's length is ever read.

    16-bit storage rounds each number once, to nearest even. int8 has one float32 scale for each 64 elements
    of a row, see `Quantized`: an error of at most 1/254 of the largest magnitude of the 64, if that is a
    normal number of float32.

    Several threads may use different caches at a time, forks of one another or not, or attend on one; what
    changes a cache needs it alone. A cache is not pickled: `save` and `load` it.

    References
    ----------
    .. [1] Kwon et al., "Efficient Memory Management for Large Language Model Serving with PagedAttention",
       SOSP 2023.
    .. [2] Xiao et al., "Efficient Streaming Language Models with Attention Sinks", ICLR 2024.

    Examples
    --------
    >>> import numpy as np
    >>> import fastattn
    >>> rng = np.random.default_rng(0)
    >>> cache = fastattn.KVCache(batch=2, num_kv_heads=2, head_dim=16)
    >>> key, value = rng.standard_normal((2, 2, 2, 5, 16), dtype=np.float32)
    >>> cache.append(key, value, lengths=[5, 3])  # prompts of 5 and 3 tokens
    >>> query = rng.standard_normal((2, 8, 1, 16), dtype=np.float32)
    >>> key, value = rng.standard_normal((2, 2, 2, 1, 16), dtype=np.float32)
    >>> cache.step(query, key, value).shape
    (2, 8, 1, 16)
    >>> cache.lengths
    array([6, 4])
    """

    @refusing
    def __init__(
        self,
        batch: int,
        num_kv_heads: int,
        head_dim: int,
        value_dim: int | None = None,
        *,
        dtype: DTypeLike | tuple[DTypeLike, DTypeLike] = "float32",
        window: int | None = None,
        keep_first: int = 0,
        rollback: int = 64,
        page_size: int | None = None,
        layout: LayoutName = "bhsd",
    ) -> None:
        settings = Settings.checked(
            batch, num_kv_heads, head_dim, value_dim, dtype, window, keep_first, rollback, page_size, layout
        )
        pool, none = PagePool(settings), np.zeros(settings.batch, np.int64)
        ids = np.full((settings.batch, 1), NO_PAGE, np.int64)
        if settings.batch <= MIN_SLAB:  # what the first append would take in any case
            ids[:, 0] = pool.take(settings.batch)
        self._begin(settings, State(none, none, none), pool, ids)

    def __reduce__(self) -> NoReturn:
        raise TypeError("a KVCache is not copied or pickled: fork() it, or save() and KVCache.load() it")

    def __repr__(self) -> str:
        s = self._settings
        dtype = self.dtype
        shown = f"({dtype[0].name}, {dtype[1].name})" if isinstance(dtype, tuple) else dtype.name
        window = "" if s.window is None else f", window={s.window}, keep_first={s.keep_first}"
        return (
            f"KVCache(batch={s.batch}, num_kv_heads={s.num_kv_heads}, head_dim={s.head_dim}, "
            f"value_dim={s.value_dim}, dtype={shown}{window}, layout={s.layout!r})"
        )

    @property
    def lengths(self) -> np.ndarray:
        return self._state.lengths.copy()

    @property
    def retained(self) -> np.ndarray:
        return self._settle().retained.copy()

    @property
    def dtype(self) -> np.dtype | tuple[np.dtype, np.dtype]:
        key, value = self._settings.key_dtype, self._settings.value_dtype
        return key if key == value else (key, value)

    @property
    def nbytes(self) -> int:
        starts = self._settings.page_size * np.arange(self._ids.shape[1])
        pages = np.unique(self._ids[starts < self._state.lengths[:, None]])
        return int(np.count_nonzero(pages)) * self._pool.page_nbytes

    # Adding and taking back ----------------------------------------------------------------------

    @public()
    def append(
        self,
        key: ArrayLike,
        value: ArrayLike,
        *extra: Never,
        lengths: ArrayLike | None = None,
        **unknown: Never,
    ) -> None:
        """Adds new tokens at the end of each item, all or nothing.

        Parameters
        ----------
        key : array_like, shape (batch, K, T, D)
            ``(batch, T, K, D)`` in the layout "bshd", and so for `value`. Floats of any precision, integers
            or bools; converted to the storage. Already rotated, where positions are rotary.
        value : array_like, shape (batch, K, T, E)
        lengths : array_like of int, optional
            Broadcasts to ``(batch,)``: so many of the T rows are tokens, from the first on; the others are
            padding, never looked at.

        Raises
        ------
        TypeError, ValueError
            Arrays of other shapes or kinds, `lengths` outside ``0..T``. The cache is then as it was, as after
            a MemoryError.
        """
        if extra or unknown:
            refuse_arguments(KVCache.append, extra, unknown)
        if lengths is not None or not self._append_in_place(key, value):
            self._keep(self._extend(key, value, lengths))

    @overload
    def step(
        self, query: ArrayLike, key: ArrayLike, value: ArrayLike, **options: Unpack[StepOptions[No, No]]
    ) -> np.ndarray: ...
    @overload
    def step(
        self, query: ArrayLike, key: ArrayLike, value: ArrayLike, **options: Unpack[StepOptions[Yes, No]]
    ) -> Pair: ...
    @overload
    def step(
        self,
        query: ArrayLike,
        key: ArrayLike,
        value: ArrayLike,
        **options: Unpack[StepOptions[No, Yes | Mean]],
    ) -> Pair: ...
    @overload
    def step(
        self,
        query: ArrayLike,
        key: ArrayLike,
        value: ArrayLike,
        **options: Unpack[StepOptions[Yes, Yes | Mean]],
    ) -> Triple: ...
    @overload
    def step(
        self,
        query: ArrayLike,
        key: ArrayLike,
        value: ArrayLike,
        **options: Unpack[StepOptions[bool, bool | Mean]],
    ) -> np.ndarray | tuple[np.ndarray, ...]: ...
    @public("C")
    def step(
        self,
        query: ArrayLike,
        key: ArrayLike,
        value: ArrayLike,
        *extra: Any,
        lengths: ArrayLike | None = None,
        **options: Any,
    ) -> np.ndarray | tuple[np.ndarray, ...]:
        """`append`, then `attend` with the `options`. Where either raises, nothing is appended.

        As there, an item's last query stands at its last position. Where `lengths` differ and queries are
        padded at the end, as keys are, say ``causal=False, mask=Causal(offset=starts)``, where `starts` are
        the `lengths` of the cache before.
        """
        if extra:
            refuse_arguments(KVCache.step, extra, ())
        state, last, undo = self._state, self._last, None
        if lengths is not None or not self._append_in_place(key, value):
            if key is MISSING or value is MISSING:
                complete("C", KVCache.step, options)  # which may say what stands in its place
            undo = self._extend(key, value, lengths)
        try:
            results = self.attend(query, **options)
        except BaseException:
            self._take_back(undo or Undo(state, last, []))
            raise
        if undo is not None:
            self._keep(undo)
        return results

    @refusing
    def truncate(self, lengths: ArrayLike) -> None:
        """Takes tokens back from the end of each item.

        Parameters
        ----------
        lengths : array_like of int
            Broadcasts to ``(batch,)``: the new length of each item, at most its present one. A cache with a
            `window` can always go back `rollback` tokens from the greatest length that the item has had.
            Further back is a ValueError, unless all rows that the next query would see are still held.
        """
        state, settings = self._settle(), self._settings
        new = settings.truncated(lengths, state.lengths)
        if settings.window is not None:
            least = np.where(state.retained > 0, state.retained + settings.window, 0)
            if (wrong := np.flatnonzero((new < least) & (new < state.lengths))).size:
                b = wrong[0]
                raise ValueError(
                    f"lengths: item {b} can be truncated to {least[b]} at least, got {new[b]}: rows before "
                    f"position {state.retained[b]} are gone (rollback={settings.rollback})"
                )
        self._cut_off(new)

    def _extend(self, key: Any, value: Any, lengths: Any) -> Undo:
        """`append`, but that nothing is given up yet."""
        settings = self._settings
        keys, values = settings.rows(key, value)
        T = keys.shape[2]
        counts = (
            np.full(settings.batch, T, dtype=np.int64)
            if lengths is None
            else settings.counts(lengths, key, value, T)
        )
        most = int((self._state.lengths + counts).max(initial=0))
        if settings.batch * settings.num_kv_heads * rounded_length(most) > MAX_ROWS:
            raise ValueError(
                f"batch * num_kv_heads * length must be at most {MAX_ROWS}, got a length of {most}"
            )
        return self._add(keys, values, counts)

    # Reading -------------------------------------------------------------------------------------

    @overload
    def attend(self, query: ArrayLike, **options: Unpack[AttendOptions[No, No]]) -> np.ndarray: ...
    @overload
    def attend(self, query: ArrayLike, **options: Unpack[AttendOptions[Yes, No]]) -> Pair: ...
    @overload
    def attend(self, query: ArrayLike, **options: Unpack[AttendOptions[No, Yes | Mean]]) -> Pair: ...
    @overload
    def attend(self, query: ArrayLike, **options: Unpack[AttendOptions[Yes, Yes | Mean]]) -> Triple: ...
    @overload
    def attend(
        self, query: ArrayLike, **options: Unpack[AttendOptions[bool, bool | Mean]]
    ) -> np.ndarray | tuple[np.ndarray, ...]: ...
    @public("C")
    def attend(self, query: ArrayLike, *extra: Any, **options: Any) -> np.ndarray | tuple[np.ndarray, ...]:
        """Attention of queries at the end of each item over its keys and values.

        Parameters
        ----------
        query : array_like, shape (batch, H, L, D)
            ``(batch, L, H, D)`` in the layout "bshd". The last query stands at the item's last position.
        causal : bool, default True
            Whether query ``i`` sees the keys up to its own position ``lengths[b] - L + i``
            (``"bottom_right"`` says the same); False: all keys, for cross attention. A `window` of the cache
            ends at the query's position in either case.
        window : (int or None, int or None), optional
            As in `attention`; of it and the cache's own the narrower holds.
        mask, bias
            As in `attention`, over ``S = max(lengths)`` keys by their positions.
        other options
            As in `attention`. Weights are ``(batch, H, L, S)``, their mean is ``(batch, L, S)``.

        Returns
        -------
        ndarray, or a tuple of them
            As `attention`.

        Raises
        ------
        TypeError, ValueError, BackendError
            As `attention` does; ValueError also where the cache is empty, where no item has L tokens (unless
            ``causal=False``), and where, on a cache with a `window`, the first query would see rows that are
            no longer held. Queries of each item's own tokens of the last `append` are always taken, and those
            at most `rollback` back from the greatest length that the item has had.

        Notes
        -----
        The bits of the result are those, on the same backend, of ::

            attention(query, keys, values, causal="bottom_right", key_lengths=cache.lengths)

        on all tokens as arrays, decoded. On a cache with a `window` there is ``window=(window - 1, 0)`` as
        well, and it is the same to rounding: some rows are gone, and the others still give the same bits
        whatever the history. Tokens count by their positions: an item's last query is at its last position.
        Where other items are longer, an item of fewer tokens than L has rows of queries before its first
        token, which see nothing and give 0.

        A float64 query on float32 storage, and a pair of those, convert all rows at each call.
        """
        completed = complete("C", KVCache.attend, options, extra) if options or extra else {}
        given, get = query, completed.get
        query = given if type(given) is np.ndarray else as_array(given, "query")
        settings, lengths = self._settings, self._state.lengths
        settings.check_query(query)
        rule = causal_rule(get("causal", True))
        len_q = query.shape[2 if settings.layout == "bhsd" else 1]
        if len_q > self._longest and 0 not in query.shape:
            self._check_tokens(len_q, rule, query.shape)
        if settings.window is not None:
            completed["window"] = self._within(get("window"), len_q)
        completed["causal"], completed["key_lengths"], completed["layout"] = rule, lengths, settings.layout
        described, length, out = None, self._longest, get("out")
        if get("mask") is get("bias") is None and get("return_weights", False) is False:
            if out is None:
                described = signature(ATTENTION, query, None, None, completed, default_backend(), self._token)
                call = known(described)
                results = None if call is None else call.on_rows(query, self._rows, lengths, get("sinks"))
                if results is not None:
                    return results if query is given else _in_library_of(given, results, None)
            if _is_compiled(get("backend")):
                length = self._capacity
        key, value = self._view(length)
        if promote(query=query) == FLOAT64 or FLOAT64 in (key.dtype, value.dtype):
            key, value = self._in_float64(key, KEYS), self._in_float64(value, VALUES)
            described = None
        if described is None or length != self._capacity:
            token = token_of((key.signature(), value.signature(), self._keep_first))
            described = signature_of(ATTENTION, query, None, None, completed, token=token)
        results = attend(
            ATTENTION, query, key, value, completed, signature=described or False, keep_first=self._keep_first
        )
        return results if query is given else _in_library_of(given, results, out)

    def keys(self, item: int) -> np.ndarray:
        """A copy of the keys that an item holds, decoded: ``(K, n, D)`` in order of position.

        Those are all ``lengths[item]`` of them, or where ``retained[item]`` is not 0 the first `keep_first`
        and those from there on. int8 is decoded to float32.
        """
        return self._held(item, KEYS)

    def values(self, item: int) -> np.ndarray:
        """A copy of the values that an item holds, decoded: ``(K, n, E)``, of the positions of `keys`."""
        return self._held(item, VALUES)

    def _held(self, item: int, part: int) -> np.ndarray:
        item = count(item, "item", 0, self._settings.batch - 1)
        held = self._settle().held(item, self._settings.keep_first)
        parts = [read_rows(self._pool, self._ids[item], start, stop, part) for start, stop in held]
        return parts[0] if len(parts) == 1 else np.concatenate(parts, axis=1)

    def _check_tokens(self, len_q: int, rule: Any, shape: tuple[int, ...]) -> None:
        """ValueError where no item has keys, or as many tokens as there are queries of them."""
        if not self._longest:
            raise ValueError(
                f"the cache is empty: append keys and values first, or call step, which does both; "
                f"query {shape}"
            )
        if rule:
            lengths = self._state.lengths
            b = lengths.argmax()
            raise ValueError(
                f"query must have at most as many rows as there are tokens: item {b}, the longest, has "
                f"{lengths[b]}, got L={len_q}; append the tokens of all queries first, or say causal=False "
                f"where they are none of the cache's; query {shape}"
            )

    def _within(self, window: WindowBounds | None, len_q: int) -> WindowBounds:
        """The narrower of the cache's window and of one given; ValueError where its rows are gone."""
        settings = self._settings
        left, right = (settings.window or 1) - 1, 0
        if window is not None and (given := check_window(window)) is not None and given[0] is not None:
            left = min(left, given[0])
        if len_q <= 1:
            return left, right  # which the window of the last position always has
        lengths, _, retained = self._settle()
        first = np.maximum(lengths - len_q, 0) - left
        if (wrong := np.flatnonzero((retained > 0) & (first < retained))).size:
            b = wrong[0]
            raise ValueError(
                f"query: the first of {len_q} queries would see rows of item {b} before position "
                f"{retained[b]}, which are gone; L can be {lengths[b] - left - retained[b]} at most"
            )
        return left, right

    def _in_float64(self, rows: Rows, part: int) -> Rows:
        """float32 rows converted; others as they are."""
        if rows.dtype != np.float32:
            return rows
        numbers, entries = np.unique(self._ids, return_inverse=True)
        pages = np.zeros((len(numbers), *self._pool.shape.like[part].shape[1:]), FLOAT64)
        with np.errstate(all="ignore"):
            for page, number in zip(pages, numbers.tolist(), strict=True):
                if number != NO_PAGE:
                    page[...] = self._pool.page(number)[part]
        table = pages.ctypes.data + pages.strides[0] * entries.reshape(self._ids.shape).astype(np.int64)
        return Rows(pages, None, table=table, length=rows.shape[-2], owner=pages)

    # Other caches --------------------------------------------------------------------------------

    def fork(self) -> KVCache:
        """A cache that holds the same, and goes its own way. Pages are shared until one of them writes."""
        return self._of_items(np.arange(self._settings.batch))

    @refusing
    def select(self, items: Sequence[int] | np.ndarray) -> KVCache:
        """A new cache of some items of this one, in any order, once or several times, as beam search needs.

        `items` are integers in ``0 .. batch - 1``, of shape ``(n,)``: else TypeError or ValueError. Pages are
        shared until one of the caches writes.
        """
        return self._of_items(self._settings.chosen(items))

    # Files ---------------------------------------------------------------------------------------

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the cache to a file in the safetensors layout.

        The file holds the pages of each item in order of position, and in its header the settings, the
        lengths and checksums. Caches that hold the same give the same file. It is written under another name
        and then moved to `path`, so that a file there is replaced as a whole or not at all.

        Raises
        ------
        OSError
            The file cannot be written.
        ValueError
            The items' lengths are so different that 2**24 entries of its page tables name no page: `select`
            the long items into a cache of their own.
        """
        from fastattn._cache.files import write

        write(path, self._settings, self._settle(), self._pool, self._ids)

    @classmethod
    @refusing
    def load(cls, path: str | os.PathLike[str], *, mmap: bool = False) -> KVCache:
        """A cache that `save` wrote.

        With `mmap` the file is mapped instead of read: its pages are read from disk as `attend` needs them,
        and never written; a page that is appended to is copied first. The file must stay as it is.

        Raises
        ------
        OSError
            The file cannot be read.
        ValueError
            It is not such a file, or it is damaged. Each field of the header is checked, by itself and by a
            checksum, before memory is taken by it; keys and values are checked where the file is not mapped.
        ImportError
            It holds bfloat16, and `ml_dtypes` is not installed.
        """
        from fastattn._cache.files import read

        check_bool(mmap, "mmap")
        settings, state, pool, ids = read(path, mmap)
        cache = object.__new__(cls)
        if state.retained.any():
            pool.need_zeros()
        cache._begin(settings, state, pool, ids)
        cache._freed = np.maximum(cache._freed, state.retained // settings.page_size)
        return cache


def _in_library_of(query: Any, results: Any, out: Any) -> Any:
    """What `attend` returns where the query is no ndarray."""
    if type(results) is tuple:
        return tuple(_in_library_of(query, result, out) for result in results)
    return results if results is out else in_library_of(query, results)


def causal_rule(causal: Any) -> Any:
    """`causal` as `attention` has it."""
    if isinstance(causal, (bool, np.bool_)):
        return "bottom_right" if causal else False
    if isinstance(causal, str) and causal == "bottom_right":
        return causal
    raise ValueError(f"causal must be True or False, got {causal!r}")


def _is_compiled(backend: Any) -> bool:
    """Whether calls of this `backend` go to compiled code, of whose results a greater S changes no bit."""
    name = default_backend() if backend is None else backend
    return name == "cython" or (name is None and not load_backend("cython").unavailable_reasons())
