"""The arrays and options of a record, for the package and, as plain arrays, for the oracle."""

from __future__ import annotations

from itertools import islice
from typing import Any

import ml_dtypes
import numpy as np

from fastattn import biases, masks
from tests.cases import MEMORY_LAYOUTS, neighborhood
from tests.fuzz.records import Record
from tests.naive import allowed_keys, kept_weights

Array = np.ndarray

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
HALVES = (np.dtype(np.float16), BFLOAT16)

# Random numbers that all arrays are slices of: a generator for each would take longer than most calls.
_POOL = 1 << 18
_NORMAL = np.random.default_rng(20).standard_normal(_POOL)
_UNIFORM = np.random.default_rng(21).random(_POOL)
_NAMES = (
    "query",
    "key",
    "value",
    "bias",
    "sinks",
    "key_lengths",
    "nonfinite",
    "grad_out",
    "grad_lse",
    "other",
)

_TINY = {"float32": 1e-30, "bfloat16": 1e-30, "float64": 1e-200, "float16": 1e-5}
_HUGE = {"float32": 1e30, "bfloat16": 1e30, "float64": 1e200, "float16": 1e4}
_LARGE = {"float32": 1e18, "bfloat16": 1e18, "float64": 1e150, "float16": 200.0}


class once:
    """`functools.cached_property` without its lock: a thread may hold that which a forked child lacks."""

    def __init__(self, function: Any) -> None:
        self._function = function
        self.__doc__ = function.__doc__

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, case: Any, owner: type | None = None) -> Any:
        found = case.__dict__[self._name] = self._function(case)
        return found


def dtype_of(name: str) -> np.dtype:
    return BFLOAT16 if name == "bfloat16" else np.dtype(name)


def numbers(pool: Array, data: int, name: str | int, shape: tuple[int, ...]) -> Array:
    """A slice of the pool for an array of this name: not to be written to."""
    n = 1
    for length in shape:
        n *= length
    number = _NAMES.index(name) if isinstance(name, str) else name
    start = (data * 2654435761 + number * 40503) % (_POOL // 2)
    flat = pool[start : start + n] if n <= _POOL // 2 else np.resize(pool, n)
    return flat.reshape(shape)


def integers(data: int, name: str | int, shape: tuple[int, ...], least: int, most: int) -> Array:
    """From `least` to `most`, both included."""
    return (numbers(_UNIFORM, data, name, shape) * (most - least + 1)).astype(np.int64) + least


def broadcast_item(array: Array, lead: tuple[int, ...], item: tuple[int, ...], own: int) -> Array:
    """The part of an array that one item reads; the last `own` axes are not those of items."""
    axes = array.ndim - own
    if axes <= 0:
        return array
    places = item[len(lead) - axes :]
    return array[tuple(i if n != 1 else 0 for i, n in zip(places, array.shape, strict=False))]


class Case:
    """What a record stands for. `item` is one batch item alone, in arrays without leading axes."""

    def __init__(self, record: Record, item: tuple[int, ...] | None = None) -> None:
        self.record, self.item = record, item
        self.whole_lead = tuple(record.get("lead", ()))
        self.lead = self.whole_lead if item is None else ()
        self.H, self.K = record["heads"], record["kv_heads"]
        self.L, self.S = record["len_q"], record["len_k"]
        self.D, self.E = record["head_dim"], record["value_dim"]
        self.data = record.get("data", 0)
        self.is_flat = record.get("flat", False)
        self.places: dict[str, str] = record.get("places", {})
        self.causal: Any = record.get("causal", False)
        if self.causal == "true":
            self.causal = True
        window = record.get("window")
        self.window = None if window is None else tuple(window)
        self.scale, self.softcap = record.get("scale"), record.get("softcap")
        self.dropout = record.get("dropout", 0.0)
        self.swapped = record.get("layout") == "bshd" and not self.is_flat

    # ---- arrays

    @once
    def naturals(self) -> dict[str, Array]:
        """query, key and value as ``(*lead, heads, length, dim)``, with what is hidden in keys and values."""
        found = {name: self._natural(name) for name in ("query", "key", "value")}
        hidden = self.record.get("hidden")
        if hidden:
            for name in ("key", "value"):
                if self.places.get(name) != "zero_stride" and found[name].dtype.kind not in "biu":
                    found[name] = self.poisoned(name, found[name], hidden)
        return found

    def _natural(self, name: str) -> Array:
        heads, length, dim = {
            "query": (self.H, self.L, self.D),
            "key": (self.K, self.S, self.D),
            "value": (self.K, self.S, self.E),
        }[name]
        lead = tuple(self.record.get("leads", {}).get(name, self.whole_lead))
        shape = (*lead, heads, length, dim)
        dtype_name = self.record.get("dtypes", ("float32",) * 3)[("query", "key", "value").index(name)]
        x = numbers(_NORMAL, self.data, name, shape)
        if dtype_name in ("int8", "int64"):
            x = np.rint(2 * x)
        elif dtype_name == "uint16":
            x = np.rint(np.abs(2 * x))
        elif dtype_name == "bool":
            x = x > 0
        else:
            x = self._styled(x, name, dtype_name)
        array = (
            np.ascontiguousarray(x, dtype_of(dtype_name))
            if x.flags.writeable
            else x.astype(dtype_of(dtype_name))
        )
        if array is x or array.base is not None:
            array = array.copy()
        nonfinite = self.record.get("nonfinite", {}).get(name)
        if nonfinite and array.dtype.kind not in "biu":
            kind, share = nonfinite
            where = numbers(_UNIFORM, self.data, "nonfinite", shape) < share
            array[where] = self._poison(kind, shape)[where].astype(array.dtype)
        if self.places.get(name) == "zero_stride" and array.size:
            array[...] = array[self._one_of_axis(array)]
        if self.item is not None:
            array = np.ascontiguousarray(broadcast_item(array, self.whole_lead, self.item, 3))
        return array

    def _styled(self, x: Array, name: str, dtype: str) -> Array:
        style = self.record.get("styles", {}).get(name)
        spread = self.record.get("spread", 1.0) if name == "query" else 1.0
        if dtype == "float16":
            spread = min(spread, 30.0)
        if spread != 1.0:
            x = x * spread
        if style == "tiny":
            return x * _TINY[dtype]
        if style == "huge":
            return x * _HUGE[dtype]
        if style == "large":
            return x * _LARGE[dtype]
        if style == "largest":  # of one sign or of both, some beside ordinary numbers
            u = numbers(_UNIFORM, self.data, "other", x.shape)
            signs = np.sign(x) if self.data % 2 else 1.0
            most = float(ml_dtypes.finfo(dtype_of(dtype)).max)
            return np.where(u < (self.data // 2 % 3) / 4, x, signs * (0.5 + u / 2) * most)
        if style == "subnormal":
            return x * 8 * float(ml_dtypes.finfo(dtype_of(dtype)).smallest_subnormal)
        if style == "steps":
            return np.rint(2 * x) / 2
        if style == "whole":
            return np.rint(2 * x)
        if style == "low":
            return x - 300
        if style == "low_rows":  # some of them, by up to a thousand
            steps = np.maximum(0, np.rint(8 * numbers(_UNIFORM, self.data, "other", (*x.shape[:-1], 1))) - 3)
            return x - 200 * steps
        if style == "mixed":
            powers = np.log10(_LARGE[dtype]) * (2 * numbers(_UNIFORM, self.data, "other", x.shape) - 1)
            return x * 10**powers
        return x

    def _poison(self, kind: str, shape: tuple[int, ...]) -> Array:
        if kind == "all":
            choice = integers(self.data, 31, shape, 0, 2)
            return np.array([np.nan, np.inf, -np.inf], np.float32)[choice]
        return np.full(shape, float(kind), np.float32)

    def _one_of_axis(self, array: Array) -> tuple[slice, ...]:
        """The first along one axis: the others are to be as it is."""
        axis = self.data % array.ndim
        return tuple(slice(1) if a == axis else slice(None) for a in range(array.ndim))

    def poisoned(self, name: str, array: Array, kind: str) -> Array:
        """A copy with nonfinite numbers in all rows that no query may read."""
        group = self.H // max(self.K, 1)
        shape = (*self.lead, self.K, group, *self.allowed.shape[-2:])
        unread = ~self.allowed.reshape(shape).any(axis=(-3, -2))
        missing = unread.ndim + 1 - array.ndim
        if missing > 0:
            unread = unread.all(axis=tuple(range(missing)))
        spread = tuple(a for a, n in enumerate(array.shape[:-3]) if n == 1)
        if spread:
            unread = unread.all(axis=spread, keepdims=True)
        array = array.copy()
        array[unread] = self._poison(kind, array.shape)[unread].astype(array.dtype)
        return array

    def given(self, name: str, array: Array) -> Array:
        """The array of a caller: in the layout of the call, placed in memory as the record says."""
        if name in ("query", "key", "value"):
            if self.is_flat:
                array = array[0]
            elif self.swapped:
                array = array.swapaxes(-3, -2)
        place = self.places.get(name)
        if place is None or array.ndim == 0:
            return np.ascontiguousarray(array) if self.swapped and array.ndim > 2 else array
        if place == "zero_stride":
            if name not in ("query", "key", "value") or not array.size:
                return array
            # The axis of `_one_of_axis` counts from the left of the natural order.
            for axis in range(array.ndim):
                one = array[tuple(slice(1) if a == axis else slice(None) for a in range(array.ndim))]
                if array.shape[axis] > 1 and (array.tobytes() == np.broadcast_to(one, array.shape).tobytes()):
                    return np.broadcast_to(one, array.shape)
            return array
        if place == "byte_swapped" and array.dtype == BFLOAT16:
            return array
        return MEMORY_LAYOUTS[place](array)

    @once
    def arrays(self) -> dict[str, Array]:
        return {name: self.given(name, array) for name, array in self.naturals.items()}

    # ---- types

    @once
    def dtypes(self) -> tuple[np.dtype, np.dtype]:
        """Of the computation, and of the result."""
        given = [dtype_of(name) for name in self.record.get("dtypes", ("float32",) * 3)]
        wide = [np.dtype(np.float64) if d.kind in "biu" else d for d in given if d not in HALVES]
        if wide:
            return (result := max(wide, key=lambda d: d.itemsize)), result
        return np.dtype(np.float32), given[0]

    # ---- options

    @once
    def key_lengths(self) -> Any:
        chosen = self.record.get("key_lengths")
        if chosen is None:
            return None
        shape = _lead_of(chosen.get("lead", ""), self.whole_lead)
        lengths = integers(self.data, "key_lengths", shape, 0, self.S)
        if chosen.get("full"):
            lengths = np.full(shape, self.S)
        if self.item is not None:
            lengths = broadcast_item(lengths, self.whole_lead, self.item, 0)
        lengths = np.asarray(lengths)
        if chosen.get("dtype", "int64") == "list" and lengths.size:  # a list of none has one axis
            return lengths.tolist()
        return self.given(
            "key_lengths",
            lengths.astype(chosen["dtype"] if chosen.get("dtype", "list") != "list" else "int64"),
        )

    @once
    def sinks(self) -> Array | None:
        chosen = self.record.get("sinks")
        if chosen is None:
            return None
        x = numbers(_NORMAL, self.data, "sinks", (self.H,)) * (30 if chosen.get("style") == "large" else 1)
        if chosen.get("dtype") == "int64":
            x = np.rint(x)
        elif chosen.get("style") == "nonfinite":
            x = np.where(x > 0.8, np.inf, np.where(x > 0.3, np.nan, np.where(x < -0.3, -np.inf, x)))
        return self.given("sinks", x.astype(chosen.get("dtype", "float32")))

    @once
    def bias(self) -> Any:
        chosen = self.record.get("bias")
        if chosen is None:
            return None
        if "object" in chosen:
            return bias_object(chosen["object"], self.bias_arrays)
        return self.given("bias", self._of_item(self._bias_numbers(self._score_shape(chosen["axes"]))))

    @once
    def bias_arrays(self) -> list[Array]:
        """Those that the object is made of."""
        shapes = bias_shapes(self.record["bias"]["object"], self.H, self.L, self.S)
        return [self._bias_numbers(shape, self.data + number) for number, shape in enumerate(shapes)]

    def _bias_numbers(self, shape: tuple[int, ...], data: int | None = None) -> Array:
        chosen, data = self.record["bias"], self.data if data is None else data
        x = numbers(_NORMAL, data, "bias", shape)
        style, chance = chosen.get("style", "normal"), numbers(_UNIFORM, data, "bias", shape)
        dtype = dtype_of(chosen.get("dtype", "float32"))
        if style == "large":
            x = 50 * x
        elif style == "whole":
            x = np.rint(3 * x)
        elif style != "normal":
            lowest = float(ml_dtypes.finfo(dtype).min)
            number = {"masks": -np.inf, "lowest": lowest, "nan": np.nan, "inf": np.inf}[style]
            x = np.where(chance < (0.3 if style == "masks" else 0.03), number, x)
        return x.astype(dtype)

    def _score_shape(self, axes: list[bool]) -> tuple[int, ...]:
        full = (*self.whole_lead, self.H, self.L, self.S)
        if self.is_flat:
            full = full[-2:]
        axes = axes[-len(full) :] if axes else []
        return tuple(n if has else 1 for n, has in zip(full[len(full) - len(axes) :], axes, strict=True))

    def _of_item(self, array: Array) -> Array:
        if self.item is None or array.ndim <= 3:
            return array
        return np.ascontiguousarray(broadcast_item(array, self.whole_lead, self.item, 3))

    @once
    def mask(self) -> Any:
        node = self.record.get("mask")
        if node is None:
            return None
        if node["kind"] == "array":
            return self.given("mask", self._dense(node, self.L, self.S))
        return self._mask_object(node, self.L, self.S)

    def _dense(self, node: Record, L: int, S: int) -> Array:
        full = (*self.whole_lead, self.H, L, S)
        if self.is_flat:
            full = full[-2:]
        axes = node["axes"][-len(full) :] if node["axes"] else []
        shape = tuple(n if has else 1 for n, has in zip(full[len(full) - len(axes) :], axes, strict=True))
        rows, keys = node.get("block", (1, 1))  # that share an element
        *outer, n_rows, n_keys = (1, 1, *shape)[-max(2, len(shape)) :]
        cells = (*outer, -(-n_rows // rows), -(-n_keys // keys))
        chance = numbers(_UNIFORM, node.get("data", 0), 40, cells) < node["share"]
        if cells != (*outer, n_rows, n_keys):
            chance = chance.repeat(rows, -2)[..., :n_rows, :].repeat(keys, -1)[..., :n_keys]
        chance = chance.reshape(shape)
        dtype = np.dtype(node.get("dtype", "bool"))
        array = chance if dtype.kind == "b" else chance * dtype.type(3 if dtype.itemsize == 1 else 256)
        return self._of_item(array)

    def _per_item(
        self, node: Record, least: int, most: int, more: tuple[int, ...] = (), number: int = 41
    ) -> Array:
        shape = (*_lead_of(node.get("per_item", ""), self.whole_lead), *more)
        values = integers(node.get("data", 0), number, shape, least, most)
        if self.item is not None:
            values = broadcast_item(values, self.whole_lead, self.item, len(more))
        return np.asarray(values)

    def _ids(self, node: Record, L: int, S: int) -> tuple[Array, Array]:
        q_ids = self._per_item(node, 0, node["ids"] - 1, (L,), 42)
        k_ids = self._per_item(node, 0, node["ids"] - 1, (S,), 43)
        return (np.sort(q_ids), np.sort(k_ids)) if node.get("sorted") else (q_ids, k_ids)

    def _mask_object(self, node: Record, L: int, S: int) -> Any:
        kind = node["kind"]
        if kind in ("and", "or", "not"):
            parts = [self._mask_object(part, L, S) for part in node["of"]]
            return (
                ~parts[0] if kind == "not" else parts[0] & parts[1] if kind == "and" else parts[0] | parts[1]
            )
        if kind == "shifted":
            whole = _whole(node, L, S)
            return self._mask_object(node["of"][0], *whole).shifted(*node["by"], size=whole)
        if kind in ("array", "dense"):
            return masks.Dense(self._dense(node, L, S))
        if kind == "causal":
            return masks.Causal(node["align"])
        if kind == "offset":
            return masks.Causal(offset=self._per_item(node, -2, S + 1))
        if kind == "window":
            return masks.Window(*node["bounds"], align=node["align"])
        if kind == "key_lengths":
            return masks.KeyLengths(self._per_item(node, 0, S))
        if kind == "segments":
            return masks.Segments(*self._ids(node, L, S))
        if kind == "prefix":
            return masks.PrefixLM(self._per_item(node, 0, S + 1))
        if kind == "global":
            return masks.GlobalTokens(_tokens(node, S))
        if kind == "not_self":
            return masks.NotSelf()
        if kind == "neighborhood":
            return _neighborhood(node, L, S)[0]
        raise ValueError(f"no mask object for the kind {kind!r}")

    def _mask_array(self, node: Record, L: int, S: int) -> Array:
        """The mask by its definition."""
        kind = node["kind"]
        i, j = np.arange(L)[:, None], np.arange(S)
        if kind in ("and", "or", "not"):
            parts = [self._mask_array(part, L, S) for part in node["of"]]
            return (
                ~parts[0] if kind == "not" else parts[0] & parts[1] if kind == "and" else parts[0] | parts[1]
            )
        if kind == "shifted":
            whole, (down, right) = _whole(node, L, S), node["by"]
            array = np.broadcast_to(
                array := self._mask_array(node["of"][0], *whole), (*array.shape[:-2], *whole)
            )
            return array[..., down : down + L, right : right + S]
        if kind in ("array", "dense"):
            return self._dense(node, L, S) != 0
        if kind == "causal":
            return j <= i + (S - L if node["align"] == "bottom_right" else 0)
        if kind == "offset":
            return j <= i + self._per_item(node, -2, S + 1)[..., None, None, None]
        if kind == "window":
            at = i + (S - L if node["align"] == "bottom_right" else 0)
            left, right = (10**9 if bound is None else bound for bound in node["bounds"])
            return (at - left <= j) & (j <= at + right)
        if kind == "key_lengths":
            return j < self._per_item(node, 0, S)[..., None, None, None]
        if kind == "segments":
            q_ids, k_ids = self._ids(node, L, S)
            return q_ids[..., None, :, None] == k_ids[..., None, None, :]
        if kind == "prefix":
            return (j < self._per_item(node, 0, S + 1)[..., None, None, None]) | (j <= i + S - L)
        if kind == "global":
            return np.isin(j, _tokens(node, S)) | np.isin(i + S - L, _tokens(node, S))
        if kind == "not_self":
            return j != i
        if kind == "neighborhood":
            return _neighborhood(node, L, S)[1]
        raise ValueError(f"no mask array for the kind {kind!r}")

    @once
    def bias_read(self) -> Array | None:
        """The bias in the type of the computation, as an array by its definition."""
        if self.bias is None:
            return None
        chosen, array = self.record["bias"], self.bias
        if "object" in chosen:
            array = stored_bias(self)
        return np.asarray(array).astype(self.dtypes[0])

    @once
    def mask_read(self) -> Array | None:
        """The mask as an array, by its definition."""
        node = self.record.get("mask")
        if node is None:
            return None
        mask = self._mask_array(node, self.L, self.S)
        return mask.reshape(mask.shape[-3:]) if self.is_flat and mask.ndim > 3 else mask

    @once
    def allowed(self) -> Array:
        shape = (*self.lead, self.H, self.L, self.S)
        return allowed_keys(
            shape[:-3], *shape[-3:], mask=self.mask_read, bias=self.bias_read, causal=self.causal,
            window=self.window, key_lengths=self.key_lengths,
        )  # fmt: skip

    @once
    def keep(self) -> tuple[Array | None, float]:
        if not self.dropout:
            return None, 1.0
        return kept_weights(self.allowed.shape, self.dropout, self.record.get("dropout_seed", 0))

    @once
    def options(self) -> dict[str, Any]:
        """Of the call, without those for results and threads."""
        found: dict[str, Any] = {}
        for name in ("causal", "window", "scale", "softcap", "key_lengths", "sinks", "bias", "mask"):
            value = getattr(self, name)
            if value is not None and value is not False:
                found[name] = value
        if self.swapped:
            found["layout"] = "bshd"
        if self.dropout:
            found["dropout"] = self.dropout
            found["seed"] = self.record.get("dropout_seed", 0)
        if "precision" in self.record:
            found["precision"] = self.record["precision"]
        return found

    @property
    def weight_error(self) -> float:
        """What weights may be off by before they meet the values, as a share of each."""
        return 2.0**-8 if self.record.get("precision") == "storage" else 0.0

    def results_shape(self) -> tuple[int, ...]:
        """Of `out`."""
        if self.is_flat:
            return (self.L, self.E)
        return (*self.lead, self.L, self.H, self.E) if self.swapped else (*self.lead, self.H, self.L, self.E)


def _lead_of(spec: str, lead: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of one number per batch item, or of fewer that are broadcast."""
    if spec == "all":
        return lead
    if spec == "last":
        return lead[-1:]
    return (lead[0], *(1,) * (len(lead) - 1)) if spec == "first" and lead else ()


def _tokens(node: Record, S: int) -> Array:
    """The global tokens of a mask that are there: of a smaller problem than was drawn some are not."""
    index = np.array(node["index"], int)
    return index[index < S]


def _neighborhood(node: Record, L: int, S: int) -> tuple[masks.Mask, Array]:
    return neighborhood(L, S, *(tuple(node[name]) for name in ("inner", "kernel", "dilation", "causal")))


def bias_shapes(chosen: Record, H: int, L: int, S: int) -> list[tuple[int, ...]]:
    """Of the arrays that a bias object is made of."""
    if chosen["kind"] == "relative":
        return [(max(1, H) if chosen.get("per_head") else 1, chosen["entries"])]
    if chosen["kind"] == "grid":
        width = _width(chosen, S)
        heads = max(1, H) if chosen.get("per_head") else 1
        return [(heads, L, S // width), (heads, L, width)]
    if chosen["kind"] == "sum":
        return [shape for term in chosen["of"] for shape in bias_shapes(term, H, L, S)]
    raise ValueError(f"no arrays for the kind {chosen['kind']!r}")


def bias_object(chosen: Record, arrays: list[Array]) -> biases.Bias:
    if chosen["kind"] == "relative":
        return biases.Relative(*arrays, chosen["offset"])
    if chosen["kind"] == "grid":
        return biases.Grid(*arrays)
    if chosen["kind"] == "sum":
        rest = iter(arrays)
        terms = [
            bias_object(term, list(islice(rest, 2 if term["kind"] == "grid" else 1))) for term in chosen["of"]
        ]
        return biases.Sum(*terms)
    raise ValueError(f"no bias object for the kind {chosen['kind']!r}")


def _width(chosen: Record, S: int) -> int:
    """Columns of a grid of S keys: as many as were drawn, or the next smaller number that divides S."""
    return next(n for n in range(max(1, min(chosen["width"], S)), 0, -1) if S % n == 0)


def bias_entries(chosen: Record, H: int, L: int, S: int) -> list[tuple[Array, ...]]:
    """Of each array the place of the entry that is added to a score, ``(H, L, S)``, in Python's integers."""
    h = np.arange(H)[:, None, None]
    if chosen["kind"] == "relative":
        last, offset = chosen["entries"] - 1, chosen["offset"]
        rows = [[min(max(i + S - L - j + offset, 0), last) for j in range(S)] for i in range(L)]
        return [(h if chosen.get("per_head") else 0 * h, np.array(rows, np.int64).reshape(L, S))]
    if chosen["kind"] == "grid":
        heads, i, j = h if chosen.get("per_head") else 0 * h, np.arange(L)[:, None], np.arange(S)
        width = _width(chosen, S)
        return [(heads, i, j // width), (heads, i, j % width)]
    if chosen["kind"] == "sum":
        return [at for term in chosen["of"] for at in bias_entries(term, H, L, S)]
    raise ValueError(f"no entries for the kind {chosen['kind']!r}")


def stored_bias(case: Case) -> Array:
    """The bias that an object stands for, ``(H, L, S)``: its terms, added up in the type of a call."""
    chosen = case.record["bias"]["object"]
    entries = bias_entries(chosen, case.H, case.L, case.S)
    found = [array[at] for array, at in zip(case.bias_arrays, entries, strict=True)]
    if len(found) == 1:
        return found[0]
    rest = iter(x.astype(case.dtypes[0]) for x in found)
    total: Any = None
    for kind in (term["kind"] for term in chosen.get("of", [chosen])):
        term = next(rest) if kind != "grid" else next(rest) + next(rest)
        total = term if total is None else total + term
    return total


def _whole(node: Record, L: int, S: int) -> tuple[int, int]:
    """The sizes of the problem that a shifted mask is cut from."""
    (down, right), (below, beside) = node["by"], node["beyond"]
    return L + down + below, S + right + beside


class GuardedOut:
    """An array to write to, in a buffer of which nothing else may change."""

    PATTERN = 0xA5

    def __init__(self, shape: tuple[int, ...], dtype: np.dtype, place: str) -> None:
        self.buffer = np.full(_PLACED[place][0](shape) * dtype.itemsize + 129, self.PATTERN, np.uint8)
        start = 64 if place != "unaligned" else 65
        start += -self.buffer.ctypes.data % 64 if place != "unaligned" else 0
        whole = self.buffer[start : start + _PLACED[place][0](shape) * dtype.itemsize].view(dtype)
        self.array = _PLACED[place][1](whole, shape)

    def is_untouched(self) -> bool:
        return bool((self.buffer == self.PATTERN).all())

    def take(self) -> Array:
        """What was written, after which the buffer is as it was, unless other bytes were written to."""
        found = np.array(self.array, order="C")
        pattern = np.full(self.array.dtype.itemsize, self.PATTERN, np.uint8).view(self.array.dtype)
        self.array[...] = pattern[0]
        return found


def _size(shape: tuple[int, ...], spare: int = 0, times: int = 1) -> int:
    n = 1
    for length in shape:
        n *= times * length + spare
    return n


def _padded(whole: Array, shape: tuple[int, ...]) -> Array:
    return whole.reshape([n + 2 for n in shape])[tuple(slice(1, 1 + n) for n in shape)]


def _every_other(whole: Array, shape: tuple[int, ...]) -> Array:
    return whole.reshape([2 * n + 1 for n in shape])[tuple(slice(1, 1 + 2 * n, 2) for n in shape)]


def _last_axis_slow(whole: Array, shape: tuple[int, ...]) -> Array:
    return whole.reshape(*shape[:-2], shape[-1], shape[-2]).swapaxes(-1, -2)


_PLACED: dict[str, Any] = {
    "contiguous": (_size, lambda whole, shape: whole.reshape(shape)),
    "unaligned": (_size, lambda whole, shape: whole.reshape(shape)),
    "fortran": (_size, lambda whole, shape: whole.reshape(shape, order="F")),
    "reversed": (_size, lambda whole, shape: whole.reshape(shape)[(slice(None, None, -1),) * len(shape)]),
    "padded": (lambda shape: _size(shape, 2), _padded),
    "every_other": (lambda shape: _size(shape, 1, 2), _every_other),
    "last_axis_slow": (_size, _last_axis_slow),
}
