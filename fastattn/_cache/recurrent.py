"""`RecurrentState`: the state of gated linear attention between calls, and rows of the last tokens."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import numpy as np

from fastattn._api.recurrent import checked_call, gated_linear_attention
from fastattn._cache import container
from fastattn._cache.state import Sizes
from fastattn._call.arguments import check_bool, count, host_numbers
from fastattn._call.options import refusing
from fastattn._call.problem import FLOAT32, FLOAT64
from fastattn._call.storage import REAL, storage_of
from fastattn._machine.device import in_library_of
from fastattn._machine.host import check_threads_of_call
from fastattn.backends.registry import function

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator, Sequence

    from numpy.typing import ArrayLike, DTypeLike

    from fastattn._call.options import BackendName, LayoutName
    from fastattn._call.recurrent import RecurrentCall

_APART = 64  #: the least number of tokens between two states that are kept, so that they move seldom
_PER_TOKEN = ("query", "key", "value", "decay", "beta", "out")  #: arrays of a call
_PARTS = ("keys", "values", "decay", "beta")  #: of the columns of a row


@dataclass(frozen=True)
class _Settings(Sizes):
    dtype: np.dtype
    #: Columns of `decay` and `beta`, 0 where there is none; None before the first call.
    gates: tuple[int, int] | None

    @classmethod
    def checked(cls, *sizes: Any, dtype: Any, gates: Any = None, **named: Any) -> _Settings:
        try:
            known = None if dtype is None else np.dtype(dtype).newbyteorder("=")
        except TypeError:
            known = None
        if known is None or known not in (FLOAT32, FLOAT64):
            raise TypeError(f"dtype must be float32 or float64, got {dtype!r}")
        settings = cls(**cls.of(*sizes, **named), dtype=known, gates=None)
        if gates is None:
            return settings
        decay, beta = (count(n, "gates", 0, settings.head_dim) for n in gates)
        if decay not in (0, 1, settings.head_dim) or beta > 1:
            raise ValueError(f"there are no such gates, {gates}")
        return replace(settings, gates=(decay, beta))

    @property
    def base_dim(self) -> int:
        """Rows of a base."""
        return self.head_dim if self.rollback else 0

    @property
    def columns(self) -> dict[str, slice]:
        """Of the parts of a row."""
        ends = np.cumsum((0, self.head_dim, self.value_dim, *(self.gates or (0, 0)))).tolist()
        return {name: slice(*pair) for name, pair in zip(_PARTS, pairwise(ends), strict=True)}


class _Held(NamedTuple):
    """The tokens of all items. Only rows past those of an item are written to, all else is replaced.

    Two earlier states are kept. When all that may be taken back comes after the middle one, that becomes the
    base, and the state at hand the middle one: no token is ever worked on again but by `truncate`.
    """

    lengths: np.ndarray  #: (batch,) int64
    greatest: np.ndarray  #: the greatest length that an item has had
    starts: np.ndarray  #: the length that the base is of
    middles: np.ndarray  #: the length that the middle state is of; `starts` where there is none
    state: np.ndarray  #: (batch, K, D, E): after the last token
    base: np.ndarray  #: likewise, or without rows if there is no rollback
    middle: np.ndarray  #: as the base
    rows: np.ndarray  #: (batch, K, n, columns): the tokens since the base, and room


class RecurrentState:
    """The state of `gated_linear_attention` between calls: what a `KVCache` is to `attention`.

    For models that have layers of both kinds. Letters: ``H`` query heads, ``K`` key/value heads, ``T`` new
    tokens, ``D`` head_dim, ``E`` value_dim.

    Parameters
    ----------
    batch : int
        Items, each a sequence of its own length.
    num_kv_heads, head_dim : int
        ``K`` and ``D``.
    value_dim : int, optional
        ``E``; ``D`` when not given.
    dtype : {"float32", "float64"}, default "float32"
        Of the computation and of the state.
    rollback : int, default 64
        How many tokens `truncate` can take back from the greatest length that an item has had. With 0 the
        state alone is kept.
    layout : {"bhsd", "bshd"}, default "bhsd"
        Of what `append` and `step` take and return, as in `gated_linear_attention`.

    Attributes
    ----------
    lengths : ndarray, shape (batch,), int64
        Tokens of each item so far. A copy.
    retained : ndarray, shape (batch,), int64
        The least length that `truncate` can go back to. A copy.
    state : ndarray, shape (batch, K, D, E)
        After the last token of each item. A copy.
    nbytes : int
        Memory of the state, and of what `truncate` needs: two earlier states, and rows of past tokens.
    dtype : dtype
        Of the computation.

    Raises
    ------
    TypeError
        A dtype that is not one of these, a size that is not an integer.
    ValueError
        A size out of range, an unknown `layout`.

    Notes
    -----
    The first call of `append` or `step` decides which gates all tokens have: whether there is a `beta`, and a
    `decay` of each token, of each column, or none.

    `truncate` goes back to an earlier state and adds the tokens after it again: to rounding, the state is the
    one that these tokens had. A token that is taken back leaves no trace, not even NaN. The bits of an item
    do not depend on other items.

    Several threads may use different states at a time, forks of one another or not; what changes a state
    needs it alone. A state is not pickled: `save` and `load` it.

    Examples
    --------
    >>> import numpy as np
    >>> import fastattn
    >>> rng = np.random.default_rng(0)
    >>> def tokens(n):
    ...     query, key, value = rng.standard_normal((3, 1, 4, n, 16), dtype=np.float32)
    ...     key /= np.linalg.norm(key, axis=-1, keepdims=True)
    ...     decay, beta = rng.random((2, 1, 4, n), dtype=np.float32)
    ...     return (query, key, value), {"decay": -decay, "beta": beta}
    >>> state = fastattn.RecurrentState(batch=1, num_kv_heads=4, head_dim=16)
    >>> arrays, gates = tokens(100)
    >>> state.step(*arrays, **gates).shape  # the prompt
    (1, 4, 100, 16)
    >>> arrays, gates = tokens(1)
    >>> state.step(*arrays, **gates).shape  # a token
    (1, 4, 1, 16)

    Speculative decoding: five tokens at once, of which two are accepted.

    >>> arrays, gates = tokens(5)
    >>> out = state.step(*arrays, **gates)
    >>> state.truncate(state.lengths - 3)
    >>> state.lengths, state.retained
    (array([103]), array([42]))
    """

    @refusing
    def __init__(
        self,
        batch: int,
        num_kv_heads: int,
        head_dim: int,
        value_dim: int | None = None,
        *,
        dtype: DTypeLike = "float32",
        rollback: int = 64,
        layout: LayoutName = "bhsd",
    ) -> None:
        s = _Settings.checked(batch, num_kv_heads, head_dim, value_dim, rollback, layout, dtype=dtype)
        none = np.zeros(s.batch, np.int64)
        state = np.zeros((s.batch, s.num_kv_heads, s.head_dim, s.value_dim), s.dtype)
        base, rows = state[:, :, : s.base_dim], np.empty((s.batch, s.num_kv_heads, 0, 0), s.dtype)
        self._begin(s, _Held(none, none, none, none, state, base, base, rows))

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a RecurrentState is not copied or pickled: fork() it, or save() and RecurrentState.load() it"
        )

    def __repr__(self) -> str:
        s = self._settings
        return (
            f"RecurrentState(batch={s.batch}, num_kv_heads={s.num_kv_heads}, head_dim={s.head_dim}, "
            f"value_dim={s.value_dim}, dtype={s.dtype.name}, rollback={s.rollback}, layout={s.layout!r})"
        )

    @property
    def lengths(self) -> np.ndarray:
        return self._held.lengths.copy()

    @property
    def retained(self) -> np.ndarray:
        return np.maximum(self._held.greatest - self._settings.rollback, 0)

    @property
    def state(self) -> np.ndarray:
        return self._held.state.copy()

    @property
    def dtype(self) -> np.dtype:
        return self._settings.dtype

    @property
    def nbytes(self) -> int:
        return sum({id(array): array.nbytes for array in self._held[4:]}.values())

    @refusing
    def append(
        self,
        key: ArrayLike,
        value: ArrayLike,
        *,
        decay: ArrayLike | None = None,
        beta: ArrayLike | None = None,
        lengths: ArrayLike | None = None,
    ) -> None:
        """Adds new tokens at the end of each item, all or nothing: a prompt whose results nobody reads.

        Parameters
        ----------
        key : array_like, shape (batch, K, T, D)
            ``(batch, T, K, D)`` in the layout "bshd", and so for `value`. Converted to the dtype of the
            state.
        value : array_like, shape (batch, K, T, E)
        decay, beta : array_like, optional
            As in `gated_linear_attention`.
        lengths : array_like of int, optional
            Broadcasts to ``(batch,)``: so many of the T rows are tokens, from the first on; the others are
            padding, never looked at.

        Raises
        ------
        TypeError, ValueError
            Arrays of other shapes or kinds, `lengths` outside ``0..T``, other gates than the tokens before
            have. The state is then as it was, as after a MemoryError.
        """
        self._advance(None, key, value, {"decay": decay, "beta": beta}, lengths)

    @refusing
    def step(
        self,
        query: ArrayLike,
        key: ArrayLike,
        value: ArrayLike,
        *,
        decay: ArrayLike | None = None,
        beta: ArrayLike | None = None,
        scale: float | None = None,
        lengths: ArrayLike | None = None,
        num_threads: int | None = None,
        backend: BackendName | None = None,
    ) -> np.ndarray:
        """`append`, and what each query reads of the state after its own token.

        Parameters
        ----------
        query : array_like, shape (batch, H, T, D)
            ``(batch, T, H, D)`` in the layout "bshd".
        key, value, decay, beta, lengths
            As in `append`.
        scale, num_threads, backend
            As in `gated_linear_attention`.

        Returns
        -------
        ndarray, shape (batch, H, T, E)
            In the dtype of the state; in 16 bits where query, key and value are and the state is float32.
            The results of padding are 0.

        Raises
        ------
        TypeError, ValueError, BackendError
            As `append` and `gated_linear_attention` do. Nothing is appended then.
        """
        options = {"decay": decay, "beta": beta, "scale": scale}
        return self._advance(query, key, value, options, lengths, check_threads_of_call(num_threads), backend)

    @refusing
    def truncate(self, lengths: ArrayLike) -> None:
        """Takes tokens back from the end of each item.

        Parameters
        ----------
        lengths : array_like of int
            Broadcasts to ``(batch,)``: the new length of each item, at most its present one. Below `retained`
            it is a ValueError.
        """
        s, held, retained = self._settings, self._held, self.retained
        new = s.truncated(lengths, held.lengths)
        if (wrong := np.flatnonzero(new < retained)).size:
            b = wrong[0]
            raise ValueError(
                f"lengths: item {b} can be truncated to {retained[b]} at least, got {new[b]}: earlier tokens "
                f"are in its state alone (rollback={s.rollback})"
            )
        if not s.rollback:
            return
        from_middle = new >= held.middles
        first = np.where(from_middle, held.middles, held.starts)
        middle = np.where(from_middle[:, None, None, None], held.middle, held.base)
        state = np.where((new == first)[:, None, None, None], middle, held.state)
        counts = np.where(new < held.lengths, new - first, 0)
        for n in np.unique(counts[counts > 0]).tolist():  # a call for each: no bit depends on other items
            items = np.flatnonzero(counts == n)
            at = items[:, None], (first - held.starts)[items, None] + np.arange(n)
            rows = held.rows.swapaxes(1, 2)[at]
            key, value, *gates = (rows[..., part] for part in s.columns.values())
            decay, beta = (None if not x.shape[-1] else x[..., 0] if x.shape[-1] == 1 else x for x in gates)
            query = np.broadcast_to(rows.dtype.type(0), key.shape)
            options: Any = {"decay": decay, "beta": beta, "state": middle[items], "layout": "bshd"}
            state[items] = gated_linear_attention(query, key, value, **options, return_state=True)[1]
        self._begin(s, held._replace(lengths=new, middles=first, state=state, middle=middle))

    def fork(self) -> RecurrentState:
        """A state that holds the same, and goes its own way. A copy."""
        return self.select(np.arange(self._settings.batch))

    @refusing
    def select(self, items: Sequence[int] | np.ndarray) -> RecurrentState:
        """A new state of some items of this one, in any order, once or several times, as beam search needs.

        `items` are integers in ``0 .. batch - 1``, of shape ``(n,)``: else TypeError or ValueError.
        """
        chosen = self._settings.chosen(items)
        other = object.__new__(type(self))
        held = _Held(*(array[chosen] for array in self._held))
        other._begin(replace(self._settings, batch=len(chosen)), held)
        return other

    # Files ---------------------------------------------------------------------------------------

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the state to a file in the safetensors layout, as `KVCache.save` does.

        It holds all that this does: a state that is loaded gives the same bits.

        Raises
        ------
        OSError
            The file cannot be written.
        """
        held, columns = self._held, self._settings.columns

        def blocks(tensor: container.Tensor) -> Iterator[np.ndarray]:
            if tensor.name not in columns:
                yield getattr(held, tensor.name)
                return
            for rows, n in zip(held.rows, (held.lengths - held.starts).tolist(), strict=True):
                yield np.ascontiguousarray(rows[:, :n, columns[tensor.name]].swapaxes(0, 1))

        container.write(path, _content(self._settings, held[:4]), blocks)

    @classmethod
    @refusing
    def load(cls, path: str | os.PathLike[str], *, mmap: bool = False) -> RecurrentState:
        """What `save` wrote.

        With `mmap` the file is mapped instead of read, and its numbers are not checked: it must stay as it
        is.

        Raises
        ------
        OSError
            The file cannot be read.
        ValueError
            It is not such a file, or it is damaged, as `KVCache.load` finds out.
        """
        check_bool(mmap, "mmap")
        (s, counters), arrays = container.read(path, "RecurrentState", _parse, mmap)
        counts = (counters[0] - counters[2]).tolist()
        tokens = np.concatenate([arrays[name] for name in _PARTS], axis=-1)
        rows = np.empty((s.batch, s.num_kv_heads, max(counts, default=0), tokens.shape[-1]), s.dtype)
        at = 0
        for item, n in enumerate(counts):
            rows[item, :, :n] = tokens[at : at + n].swapaxes(0, 1)
            at += n
        state = object.__new__(cls)
        states = (arrays[name] for name in ("state", "base", "middle"))
        state._begin(s, _Held._make((*counters, *states, rows)))
        return state

    # How it is done ------------------------------------------------------------------------------

    def _begin(self, settings: _Settings, held: _Held) -> None:
        self._settings, self._held = settings, held
        self._quiet = 0  # so many tokens can be added before a state has to move, or rows need room

    def _advance(
        self,
        query: Any,
        key: Any,
        value: Any,
        options: dict[str, Any],
        lengths: Any,
        num_threads: int | None = None,
        backend: BackendName | None = None,
    ) -> Any:
        """`step`; without queries `append`."""
        s, held = self._settings, self._held
        T = self._few_tokens(query, key, value, options) if lengths is None else 0
        if T:
            given: Any = {"state": held.state, "layout": s.layout, "num_threads": num_threads} | options
            out, state = gated_linear_attention(
                query, key, value, **given, return_state=True, backend=backend
            )
            self._keep_few(T, state, (key, value, options["decay"], options["beta"]))
            return out
        keys, values = (self._computed(x) for x in s.rows(key, value))
        counts = None if lengths is None else s.counts(lengths, key, value, keys.shape[2])
        if s.layout == "bshd":
            keys, values = keys.swapaxes(1, 2), values.swapaxes(1, 2)
        if query is None:
            queries = np.broadcast_to(keys.dtype.type(0), keys.shape)
        else:
            queries = self._computed(host_numbers(query, "query"))
            s.check_query(queries)
        options |= {"key_lengths": counts, "state": held.state, "return_state": True, "layout": s.layout}
        options.setdefault("scale", None)
        call, _ = checked_call(queries, keys, values, options)
        if call.lengths is None:
            call = call._replace(lengths=np.full(s.batch, call.key.shape[2], dtype=np.int64))
        n_decay, n_beta = (0 if x is None else x.shape[-1] for x in (call.decay, call.beta))
        gates = n_decay, n_beta
        for name, n, first in zip(("decay", "beta"), gates, s.gates or gates, strict=True):
            if n != first:
                said = {0: "none", 1: "one for each token"}
                raise ValueError(
                    f"{name} must be as with the first tokens, {said.get(first, 'one for each column')}, "
                    f"got {said.get(n, 'one for each column')}"
                )
        self._add(call, num_threads, backend)
        if s.gates is None:
            self._settings = replace(s, gates=gates)
        if counts is not None:
            call.out.swapaxes(1, 2)[np.arange(call.out.shape[2]) >= counts[:, None]] = 0
        return None if query is None else in_library_of(query, call.result)

    def _few_tokens(self, query: Any, key: Any, value: Any, options: dict[str, Any]) -> int:
        """How many tokens plain arrays are of, where only rows have to be added for them; else 0.

        A decoder's step: it takes less time than the checks, most of which the function does, too.
        """
        s, held = self._settings, self._held
        if any(type(x) is not np.ndarray or x.dtype != s.dtype or x.ndim != 4 for x in (query, key, value)):
            return 0
        swapped = s.layout == "bshd"
        T: int = key.shape[1 if swapped else 2]
        shape = (s.batch, T, s.num_kv_heads) if swapped else (s.batch, s.num_kv_heads, T)
        if key.shape != (*shape, s.head_dim) or value.shape != (*shape, s.value_dim) or s.gates is None:
            return 0
        for x, columns in zip((options["decay"], options["beta"]), s.gates, strict=True):
            wanted = (*shape, columns) if columns > 1 else shape
            if getattr(x, "shape", None) != (wanted if columns else None):
                return 0
        if s.rollback and (
            min(self._quiet, s.rollback) < T or len({*(held.lengths - held.starts).tolist()}) > 1
        ):
            return 0
        return T if s.batch else 0

    def _keep_few(self, T: int, state: np.ndarray, tokens: tuple[Any, ...]) -> None:
        held, s = self._held, self._settings
        ends = held.lengths + T
        held = held._replace(lengths=ends, greatest=np.maximum(held.greatest, ends), state=state)
        if s.rollback:
            n = int(held.lengths[0] - held.starts[0]) - T
            rows = held.rows[:, :, n : n + T]
            rows = rows.swapaxes(1, 2) if s.layout == "bshd" else rows
            for x, part in zip(tokens, s.columns.values(), strict=True):
                if x is not None:
                    rows[..., part] = x if x.ndim == 4 else x[..., None]
            self._quiet -= T
            self._held = held
        else:
            self._held = held._replace(starts=ends, middles=ends)

    def _computed(self, array: np.ndarray) -> np.ndarray:
        """In the dtype of the state; 16 bits stay, as they are computed in float32."""
        dtype = self._settings.dtype
        if array.dtype == dtype or (dtype == FLOAT32 and storage_of(array.dtype) != REAL):
            return array
        with np.errstate(all="ignore"):
            return array.astype(dtype)

    def _add(self, call: RecurrentCall, num_threads: int | None, backend: BackendName | None) -> None:
        """Runs the call, from the state on, and keeps the last of its tokens."""
        lengths, greatest, starts, middles, before, base, middle, rows = self._held
        added: Any = call.lengths
        rollback, run = self._settings.rollback, function("gated_linear_attention", call, backend)
        ends, T = lengths + added, call.key.shape[2]
        greatest = np.maximum(greatest, ends)
        if not rollback or not T:
            state = run(call, num_threads)
            starts, middles = (starts, middles) if rollback else (ends, ends)
            self._held = _Held(ends, greatest, starts, middles, state, base, middle, rows)
            return
        has_many = rollback < T  # whatever their number in each item: no bit depends on that of others
        if has_many:
            cut = np.maximum(added - rollback, 0)
            state = run(call._replace(lengths=cut), num_threads)
            is_cut, lengths = cut > 0, lengths + cut
            starts, middles = (np.where(is_cut, lengths, x) for x in (starts, middles))
            before, base, middle = (
                np.where(is_cut[:, None, None, None], state, x) for x in (before, base, middle)
            )
            last = np.arange(len(cut))[:, None], cut[:, None] + np.arange(rollback)
            parts: dict[str, Any] = {name: getattr(call, name) for name in _PER_TOKEN}
            for name, x in parts.items():
                parts[name] = None if x is None else x.swapaxes(1, 2)[last].swapaxes(1, 2)
            whole, T = call, rollback
            call = call._replace(**parts, lengths=added - cut, earlier=before)
            added = added - cut
        state = run(call, num_threads)
        if has_many:
            whole.out.swapaxes(1, 2)[last] = call.out.swapaxes(1, 2)

        given = (call.key, call.value, call.decay, call.beta)
        new = np.concatenate([x for x in given if x is not None], axis=-1, dtype=call.dtype)
        quiet = self._quiet
        if has_many or quiet < T:
            rows, first = rows if rows.size else new[:, :, :0], self._held.starts
            is_passed = (middles > starts) & (middles + rollback <= greatest)
            if is_passed.any():
                base = np.where(is_passed[:, None, None, None], middle, base)
                starts = np.where(is_passed, middles, starts)
            is_new = (middles == starts) & (lengths - starts >= _APART)
            if is_new.any():
                middle = np.where(is_new[:, None, None, None], before, middle)
                middles = np.where(is_new, lengths, middles)
            needed, room, old = int((ends - starts).max(initial=0)), rows.shape[2], rows
            if needed > room or starts is not first:
                room = room if needed <= room else 2 * needed
                rows = np.empty((*new.shape[:2], room, new.shape[3]), new.dtype)
                spans = zip((starts - first).tolist(), (lengths - starts).tolist(), strict=True)
                for item, (at, n) in enumerate(spans):
                    rows[item, :, :n] = old[item, :, at : at + n]
            to_pass, to_begin = middles + rollback - 1 - greatest, starts + _APART - ends
            quiet = np.where(middles > starts, to_pass, to_begin).min(initial=room - needed) + T
        counts = lengths - starts
        if len(of_all := {*zip(counts.tolist(), added.tolist(), strict=True)}) == 1:
            ((n, more),) = of_all
            rows[:, :, n : n + more] = new[:, :, :more]
        else:
            items, tokens = np.nonzero(np.arange(T) < added[:, None])
            rows[items, :, counts[items] + tokens] = new[items, :, tokens]
        self._held = _Held(ends, greatest, starts, middles, state, base, middle, rows)
        self._quiet = quiet - T


def _content(settings: _Settings, counters: Sequence[np.ndarray]) -> container.Content:
    s, dtype = settings, settings.dtype
    tokens = int((counters[0] - counters[2]).sum())
    heads = (s.batch, s.num_kv_heads)
    tensors = container.tensors_of(
        [
            ("state", dtype, (*heads, s.head_dim, s.value_dim)),
            *((name, dtype, (*heads, s.base_dim, s.value_dim)) for name in ("base", "middle")),
            *((name, dtype, (tokens, s.num_kv_heads, x.stop - x.start)) for name, x in s.columns.items()),
        ]
    )
    given = vars(s) | {"dtype": dtype.name, "gates": s.gates and list(s.gates)}
    lists = dict(zip(_Held._fields, (x.tolist() for x in counters), strict=False))
    return container.Content("RecurrentState", given, lists, tensors)


def _parse(given: Any, lists: Any) -> tuple[container.Content, tuple[_Settings, list[np.ndarray]]]:
    """Settings, and lengths, greatest and starts, that a header gives, each in its range."""
    s = _Settings.checked(**given)
    lengths, greatest, starts, middles = counters = container.of_items(lists, _Held._fields[:4], s.batch)
    retained = np.maximum(greatest - s.rollback, 0)
    possible = (starts <= retained) & (retained <= lengths) & (lengths <= greatest)
    possible &= (starts <= middles) & (middles <= lengths) & (lengths - starts <= 4 * (s.rollback + _APART))
    if not possible.all() or (s.gates is None and greatest.any()):
        raise container.Damaged("lengths that no state has")
    return _content(s, counters), (s, counters)
