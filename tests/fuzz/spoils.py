"""Calls with one thing wrong, which must be refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tests.fuzz.build import Case

Call = dict[str, Any]
Spoil = Callable[[Case, Call], Call | None]


def _set(**values: Any) -> Spoil:
    return lambda case, call: call | values


def _changed(name: str, change: Callable[[np.ndarray], Any]) -> Spoil:
    return lambda case, call: call | {name: change(np.asarray(call[name]))}


def _lengths(case: Case, call: Call) -> Call:
    return call | {"key_lengths": case.S + 1}


def _mask_shape(case: Case, call: Call) -> Call:
    return call | {"mask": np.ones((case.L + 2, case.S + 2), bool)}


def _bias_shape(case: Case, call: Call) -> Call:
    return call | {"bias": np.zeros((case.L + 2, case.S + 2), np.float32)}


def _out_of(dtype: Any) -> Spoil:
    return lambda case, call: call | {"out": np.empty(case.results_shape(), dtype)}


def _out_shape(case: Case, call: Call) -> Call:
    return call | {"out": np.empty((*case.results_shape()[:-1], case.E + 1), case.dtypes[1])}


def _out_read_only(case: Case, call: Call) -> Call:
    out = np.empty(case.results_shape(), case.dtypes[1])
    out.flags.writeable = False
    return call | {"out": out}


def _out_overlaps_itself(case: Case, call: Call) -> Call | None:
    shape = case.results_shape()
    if min(shape, default=0) < 1 or max(shape) < 2:
        return None
    out = np.empty(shape, case.dtypes[1])
    return call | {"out": np.lib.stride_tricks.as_strided(out, shape, (0,) * len(shape))}


def _causal(case: Case, call: Call) -> Call | None:
    return None if case.L == case.S else call | {"causal": True}


def _heads(case: Case, call: Call) -> Call | None:
    if case.is_flat or case.K < 2:
        return None
    return call | {"value": case.given("value", case.naturals["value"][..., :1, :, :])}


def _empty_dim(case: Case, call: Call) -> Call:
    return call | {name: np.asarray(call[name])[..., :0] for name in ("query", "key")}


def _value_length(case: Case, call: Call) -> Call | None:
    if not case.S:
        return None
    return call | {"value": case.given("value", case.naturals["value"][..., :-1, :])}


SPOILS: dict[str, Spoil] = {
    "scale nan": _set(scale=float("nan")),
    "scale inf": _set(scale=-np.inf),
    "scale text": _set(scale="1"),
    "scale shape": lambda case, call: call | {"scale": np.ones(case.H + 1)},
    "scale axes": lambda case, call: call | {"scale": np.ones((case.H, 1))},
    "softcap 0": _set(softcap=0.0),
    "softcap negative": _set(softcap=-1.0),
    "softcap nan": _set(softcap=float("nan")),
    "softcap bool": _set(softcap=True),
    "window negative": _set(window=(-1, 0)),
    "window short": _set(window=(1,)),
    "window number": _set(window=5),
    "window float": _set(window=(1.5, 0)),
    "causal text": _set(causal="left"),
    "causal number": _set(causal=2),
    "causal true": _causal,
    "key_lengths large": _lengths,
    "key_lengths negative": _set(key_lengths=-1),
    "key_lengths float": _set(key_lengths=1.5),
    "key_lengths shape": _set(key_lengths=np.zeros((7, 11, 13, 2, 5), int)),
    "key_lengths text": _set(key_lengths="all"),
    "mask float": _set(mask=np.ones((1, 1))),
    "mask text": _set(mask="causal"),
    "mask object": _set(mask=object()),
    "mask shape": _mask_shape,
    "bias int": _set(bias=np.zeros((1, 1), int)),
    "bias bool": _set(bias=np.zeros((1, 1), bool)),
    "bias complex": _set(bias=np.zeros((1, 1), complex)),
    "bias shape": _bias_shape,
    "sinks shape": lambda case, call: call | {"sinks": np.zeros(case.H + 1)},
    "sinks axes": lambda case, call: call | {"sinks": np.zeros((case.H, 1))},
    "sinks complex": lambda case, call: call | {"sinks": np.zeros(case.H, complex)},
    "dropout 1": _set(dropout=1.0, seed=0),
    "dropout negative": _set(dropout=-0.1, seed=0),
    "dropout nan": _set(dropout=float("nan"), seed=0),
    "dropout no seed": _set(dropout=0.1, seed=None),
    "seed negative": _set(dropout=0.1, seed=-1),
    "seed float": _set(dropout=0.1, seed=1.0),
    "seed large": _set(dropout=0.1, seed=1 << 128),
    "layout": _set(layout="sbhd"),
    "layout number": _set(layout=1),
    "threads 0": _set(num_threads=0),
    "threads negative": _set(num_threads=-3),
    "threads float": _set(num_threads=1.5),
    "backend": _set(backend="blas"),
    "unknown": _set(is_causal=True),
    "query complex": _changed("query", lambda x: x.astype(np.float64).astype(complex)),
    "key object": _changed("key", lambda x: x.astype(object)),
    "value longdouble": _changed("value", lambda x: x.astype(np.longdouble)),
    "value text": _changed("value", lambda x: np.full(x.shape, "x")),
    "query one axis": _changed("query", lambda x: x.reshape(-1)),
    "key dates": _changed("key", lambda x: np.zeros(x.shape, "M8[s]")),
    "query number": _set(query=1.0),
    "key none": _set(key=None),
    "key wider": _changed("key", lambda x: np.concatenate([x, x], axis=-1)),
    "value heads": _heads,
    "value length": _value_length,
    "head_dim 0": _empty_dim,
    "query masked": _changed("query", lambda x: np.ma.masked_array(x.astype(np.float64), mask=True)),
    "out int": _out_of(int),
    "out complex": _out_of(complex),
    "out list": _set(out=[[0.0]]),
    "out shape": _out_shape,
    "out read-only": _out_read_only,
    "out overlaps itself": _out_overlaps_itself,
}
_NAMES = sorted(SPOILS)


def spoil(case: Case, call: Call, number: int) -> tuple[str, Call | None]:
    """A call that must be refused, and what is wrong with it; None where the case has no such thing."""
    name = _NAMES[number % len(_NAMES)]
    return name, SPOILS[name](case, call)
