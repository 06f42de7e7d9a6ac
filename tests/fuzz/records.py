"""A case as a record: a small dict that JSON can hold, drawn from a seed.

A record says everything but the numbers in the arrays, which `tests.fuzz.build` makes from its ``data``. What
is absent has the plainest value (`get` with a default), so that deleting an entry simplifies a case, which is
how `tests.fuzz.shrink` works. Nothing here imports the package under test.

Letters: ``H`` query heads, ``K`` key/value heads, ``L`` queries, ``S`` keys, ``D`` head_dim, ``E`` value
head_dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from random import Random
from typing import Any

from tests.fuzz import trees

Record = dict[str, Any]

FLOATS = ("float32", "float64", "float16", "bfloat16")
#: Below, at and above the sizes of vectors, register tiles and key tiles.
LENGTHS = (0, 1, 1, 1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 47, 48, 49, 63, 64, 65)
LONG = (127, 128, 129, 191, 193, 255, 256, 257, 320, 513)
#: Several query blocks over many key tiles, of which a mask leaves out any.
SOME_BLOCKS = (33, 64, 65, 100)
MANY_TILES = (700, 1023, 1025, 1500, 2050)
DIMS = (1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 24, 31, 32, 33, 40, 63, 64, 65)
PLACES = (
    "fortran", "reversed", "padded", "every_other", "last_axis_slow", "heads_inside", "unaligned",
    "read_only", "byte_swapped", "zero_stride",
)  # fmt: skip
OUT_PLACES = ("contiguous", "fortran", "reversed", "padded", "every_other", "last_axis_slow", "unaligned")
#: What else must have the same bits as the call of a case.
VARIANTS = (
    "again",
    "threads",
    "contiguous",
    "item",
    "layout",
    "parts",
    "out",
    "overlap",
    "upcast",
    "poison",
    "written",
)
#: The same of a call of `reduce_scores` or `key_weights`.
REDUCTION_VARIANTS = ("again", "threads", "contiguous", "item", "layout", "poison", "stored")
#: Of a call of `max_similarity`.
SIMILARITY_VARIANTS = ("again", "threads", "contiguous", "pair", "packed", "unread", "quantized")
#: Of a call of `gated_linear_attention`, and what else must hold of it.
RECURRENT_VARIANTS = ("again", "threads", "contiguous", "item", "layout", "parts", "hidden", "cut", "poison")
#: Multiplications of a case at most, and how many times that some cases have: the mean decides how many cases
#: a second has.
MOST_WORK = (60_000, 8, 200)


#: What is drawn, and how often.
KINDS = {
    "attention": 72, "backward": 3, "varlen": 3, "merge": 3, "stored": 4, "cache": 2, "sdpa": 1, "error": 7,
    "flex": 1, "linear": 2, "rope": 1.5, "kernels": 0.5, "layers": 1, "recurrent": 2, "reductions": 3,
    "biases": 2,
}  # fmt: skip


def draw(seed: int, engines: Sequence[str], kinds: Sequence[str] = tuple(KINDS)) -> Record:
    """The case of a seed, for one of these engines (names of backends, with an instruction set or not)."""
    r = Random(seed)
    engine = _engine(r, engines)
    kind = r.choices(kinds, [KINDS[name] for name in kinds])[0]
    if engine == "numba" and kind in ("backward", "stored", "cache", "recurrent", "reductions"):
        kind = "attention"  # it says that it cannot, and tests/test_numba_usable.py that it says so
    record: Record = {"seed": seed, "kind": kind, "engine": engine, "data": r.randrange(1 << 30)}
    if r.random() < 0.3:
        record["num_threads"] = r.choice((1, 1, 2, 3, 5))
        if r.random() < 0.3:
            record["threaded"] = True  # also where the work is less than what threads are worth
    _sizes(r, record)
    if kind == "cache":
        _cache(r, record)
        return record
    _values(r, record)
    _options(r, record)
    if kind in _BESIDE:
        _BESIDE[kind](r, record)
    if kind in ("attention", "error"):
        _results(r, record)
    if kind == "error":
        record["spoil"] = r.randrange(1 << 16)
    if kind == "attention" and set(record["dtypes"]) == {"bfloat16"} and r.random() < 0.4:
        record["precision"] = "storage"
    if kind == "attention":
        record["variants"] = sorted({r.choice(VARIANTS) for _ in range(r.choice((1, 1, 2)))})
    if kind == "varlen":
        record["documents"] = r.randint(1, 4)
    if kind == "merge":
        record["pieces"] = r.randint(1, 4)
    if kind == "stored":
        record["stored"] = [r.choice(("int8", "float32", "float16", "bfloat16")) for _ in range(2)]
        record["pages"] = [r.choice((0, 1, 3, 16, 32, 64)) for _ in range(2)]
    return record


def _engine(r: Random, engines: Sequence[str]) -> str:
    """The first is this machine's best; the slow ones come rarely."""
    weights = [{"reference": 4, "numba": 6}.get(name, 45 if n == 0 else 18) for n, name in enumerate(engines)]
    return r.choices(engines, weights)[0]


def _sizes(r: Random, record: Record) -> None:
    rank = r.choices((2, 3, 4, 5), (1, 2, 5, 1))[0]
    lead = [r.choice((1, 2, 2, 3, 0) if r.random() < 0.1 else (1, 2, 3)) for _ in range(max(0, rank - 3))]
    record["lead"] = lead
    if rank == 2:
        record["flat"] = True
    kv_heads = 1 if rank == 2 else r.choice((1, 1, 2, 3))
    record["kv_heads"] = kv_heads
    record["heads"] = kv_heads * (1 if rank == 2 else r.choice((1, 1, 1, 2, 3, 4, 8)))
    if rank > 2 and r.random() < 0.01:
        record["heads"] = record["kv_heads"] = 0
    record["len_q"] = r.choice(LONG if r.random() < 0.04 else LENGTHS)
    record["len_k"] = (
        record["len_q"] if r.random() < 0.2 else r.choice(LONG if r.random() < 0.06 else LENGTHS)
    )
    goes_far = r.random() < 0.004
    if goes_far:
        record["len_q"] = r.choice(SOME_BLOCKS)
    if goes_far or (record["len_q"] <= 2 and r.random() < 0.1):
        record["len_k"] = r.choice(MANY_TILES)
    record["head_dim"] = r.choice(DIMS) if r.random() < 0.98 else r.choice((96, 128, 129, 256))
    record["value_dim"] = record["head_dim"]
    if r.random() < 0.4:
        record["value_dim"] = r.choice((0, *DIMS)) if r.random() < 0.98 else r.choice((96, 128, 130))
    most = MOST_WORK[0] * (1 if r.random() < 0.9 else MOST_WORK[1] if r.random() < 0.95 else MOST_WORK[2])
    if goes_far:
        most = MOST_WORK[0] * MOST_WORK[2]
    lead = record["lead"]
    while _work(record) > most:
        if max(lead, default=0) > 1:
            lead[lead.index(max(lead))] = 1
        elif record["heads"] > 4:
            record["heads"] = record["kv_heads"] = 1
        elif record["head_dim"] + record["value_dim"] > 20:
            record["head_dim"], record["value_dim"] = (
                min(record[name], 9) for name in ("head_dim", "value_dim")
            )
        elif record["heads"] > 1:
            record["heads"] = record["kv_heads"] = 1
        else:
            name = max(("len_q", "len_k"), key=record.__getitem__)
            record[name] = record[name] // 2 + 1
    # Leading axes that the arrays do not have, or have once.
    if lead and r.random() < 0.2:
        record["leads"] = {
            name: [n if r.random() < 0.5 else 1 for n in record["lead"]][r.choice((0, 0, 0, 1)) :]
            for name in r.sample(("query", "key", "value"), r.randint(1, 2))
        }


def _work(record: Record) -> int:
    return prod(max(n, 1) for n in record["lead"]) * record["heads"] * record["len_q"] * record["len_k"] * (
        record["head_dim"] + record["value_dim"] + 10
    )  # fmt: skip


def _goes_far(record: Record) -> bool:
    return record["len_k"] >= min(MANY_TILES)


def _values(r: Random, record: Record) -> None:
    dtype = r.choices(FLOATS, (50, 25, 13, 12))[0]
    if record["engine"] == "numba" and dtype in ("float16", "bfloat16"):
        dtype = "float32"
    dtypes = [dtype] * 3
    if r.random() < 0.1:
        others = [name for name in (*FLOATS, "int8", "int64", "uint16", "bool") if record["engine"] != "numba"
                  or name not in ("float16", "bfloat16")]  # fmt: skip
        dtypes = [r.choice(others) if r.random() < 0.5 else name for name in dtypes]
        if {"float16", "bfloat16"} <= set(dtypes):  # an error of its own
            dtypes = ["float16" if name == "bfloat16" else name for name in dtypes]
    record["dtypes"] = dtypes
    if r.random() < 0.3:
        record["spread"] = r.choice((0.0, 0.01, 4.0, 30.0, 1000.0, 1e5, 1e9, 1e20))
    if r.random() < 0.1:
        record["styles"] = {
            r.choice(("query", "key", "value")): r.choice(
                ("tiny", "huge", "subnormal", "steps", "mixed", "large")
            )
        }
    if r.random() < 0.03:
        record.setdefault("styles", {})["value"] = "largest"
    if r.random() < 0.35:
        record["places"] = {
            name: r.choice(PLACES)
            for name in ("query", "key", "value", "mask", "bias", "sinks", "key_lengths")
            if r.random() < 0.4
        }
    if r.random() < 0.08:
        record["nonfinite"] = {r.choice(("query", "key", "value")): [r.choice(("nan", "inf", "-inf", "all")),
                               r.choice((0.01, 0.1))]}  # fmt: skip
    if r.random() < 0.15:
        record["hidden"] = r.choice(("nan", "inf", "-inf", "all"))


def _options(r: Random, record: Record) -> None:
    S, L = record["len_k"], record["len_q"]
    if r.random() < 0.35:
        record["causal"] = r.choice(("top_left", "bottom_right", *(("true",) if L == S else ())))
    if r.random() < 0.2:
        record["window"] = [r.choice((None, 0, 1, 3, 16, 70, r.randint(0, S + 2))) for _ in range(2)]
    if r.random() < 0.2:
        record["key_lengths"] = {"lead": r.choice(("", "all", "last", "first")), "dtype": r.choice(
            ("int64", "int32", "uint8", "list")), "full": r.random() < 0.1}  # fmt: skip
        if record["key_lengths"]["dtype"] == "uint8" and S > 255:
            record["key_lengths"]["dtype"] = "int16"
    if r.random() < 0.3:
        record["scale"] = r.choice((0.0, 1.0, -0.5, 0.125, 3.0, -1e-3, 0.3))
    if r.random() < 0.15:
        record["softcap"] = r.choice((0.5, 5.0, 50.0, 1e-3, 1e4))
    if r.random() < 0.15:
        record["sinks"] = {"dtype": r.choice(("float32", "float64", "float16", "int64")), "style": r.choices(
            ("normal", "large", "nonfinite"), (8, 2, 1))[0]}  # fmt: skip
    if r.random() < 0.25:
        record["bias"] = {
            "axes": _axes(r, record),
            "dtype": r.choices(FLOATS, (4, 4, 1, 0 if record["engine"] == "numba" else 1))[0],
            "style": r.choices(("normal", "masks", "lowest", "large", "nan", "inf"), (6, 6, 1, 1, 1, 1))[0],
        }
    # Other functions have it as an array.
    if record["kind"] == "biases" or (
        "bias" in record and record["kind"] in ("attention", "stored", "reductions") and r.random() < 0.2
    ):
        record.setdefault("bias", {"axes": [], "dtype": r.choice(("float32", "float64"))})
        record["bias"]["object"] = _bias_object(r, record)
    if r.random() < (0.9 if _goes_far(record) else 0.4):
        record["mask"] = _mask(r, record, depth=r.choices((0, 1, 2), (6, 3, 1))[0])
    if r.random() < 0.3 and not record.get("flat"):
        record["layout"] = "bshd"
    if (
        record["kind"] in ("attention", "backward", "varlen", "error", "biases")
        and record["engine"] != "numba"
        and r.random() < 0.08
    ):
        record["dropout"] = r.choice((0.1, 0.5, 0.9, 1e-5, 0.999))
        record["dropout_seed"] = r.choice((0, 1, 12345, 2**64 + 1, 2**128 - 1))


def _axes(r: Random, record: Record) -> list[bool]:
    """For the last axes of ``(*lead, H, L, S)``, whether an array has them or is broadcast along them."""
    full = 2 if record.get("flat") else len(record["lead"]) + 3
    return [r.random() < 0.6 for _ in range(r.choice((full, full, 2, r.randint(0, full))))]


def _bias_object(r: Random, record: Record, may_add: bool = True) -> Record:
    """A kind of `fastattn.biases`, and what it is made of but numbers: another is one more kind."""
    longest = record["len_q"] + record["len_k"]
    kinds = ("relative", "grid", "sum")[: 2 + may_add if record["engine"] != "numba" else 1]
    kind = r.choices(kinds, (3, 3, 2)[: len(kinds)])[0]
    if kind == "sum":
        return {"kind": kind, "of": [_bias_object(r, record, False) for _ in range(r.choice((2, 2, 3)))]}
    if kind == "grid":
        width = r.choice((1, 2, 3, 4, 8, 14, 16, 32, 64, 128, 1000))
        return {"kind": kind, "width": width, "per_head": r.random() < 0.6}
    entries = r.choice((1, 2, 3, 9, 32, max(1, longest - 1), longest + 5))
    offset = r.choice(
        (0, entries // 2, entries - 1, record["len_q"], -3, r.randint(-longest, longest), 10**30)
    )
    return {"kind": "relative", "entries": entries, "offset": offset, "per_head": r.random() < 0.6}


def _mask(r: Random, record: Record, depth: int) -> Record:
    if depth:
        kind = r.choice(("and", "or", "not"))
        return {"kind": kind, "of": [_mask(r, record, depth - 1) for _ in range(1 if kind == "not" else 2)]}
    S = record["len_k"]
    kinds = [
        "array",
        "array",
        "causal",
        "offset",
        "window",
        "key_lengths",
        "segments",
        "prefix",
        "dense",
        "not_self",
        "neighborhood",
    ]
    if S:
        kinds.append("global")
    if _goes_far(record):
        kinds += ["array", "dense"] * 3
    node: Record = {"kind": r.choice(kinds), "data": r.randrange(1 << 20)}
    if r.random() < 0.5:
        node["per_item"] = r.choice(("all", "last", "first"))
    if node["kind"] in ("array", "dense"):
        node["axes"] = _axes(r, record)
        node["dtype"] = r.choice(("bool", "bool", "int8", "int64", "uint16"))
        node["share"] = r.choice((0.0, 0.05, 0.5, 0.9, 1.0))
        if r.random() < (0.8 if _goes_far(record) else 0.1):
            node["block"] = [r.choice((1, 8, 16, 32, 100)), r.choice((1, 32, 64, 128, 256))]
    if node["kind"] in ("causal", "window"):
        node["align"] = r.choice(("top_left", "bottom_right"))
    if node["kind"] == "window":
        node["bounds"] = [r.choice((None, 0, 1, 3, 17, r.randint(0, S + 2))) for _ in range(2)]
    if node["kind"] == "segments":
        node["sorted"] = r.random() < 0.5
        node["ids"] = r.choice((1, 2, 5))
    if node["kind"] == "global":
        node["index"] = sorted({r.randrange(S) for _ in range(r.randint(0, 3))})
    if node["kind"] == "neighborhood":
        n_axes = r.randint(1, 3)
        node["inner"] = [r.choice((1, 2, 3, 5, 8, 16, 40)) for _ in range(n_axes - 1)]
        node["kernel"] = [r.choice((1, 2, 3, 4, 7, 13)) for _ in range(n_axes)]
        node["dilation"] = [r.choice((1, 1, 2, 3, 9)) for _ in range(n_axes)]
        node["causal"] = [r.random() < 0.3 for _ in range(n_axes)]
    if node["kind"] not in ("array", "dense") and r.random() < 0.1:
        node = {"kind": "shifted", "of": [node], "by": [r.randint(0, 5), r.randint(0, 70)],
                "beyond": [r.randint(0, 5), r.randint(0, 5)]}  # fmt: skip
    return node


def _results(r: Random, record: Record) -> None:
    if r.random() < 0.6:
        record["return_lse"] = True
    if r.random() < 0.4:
        record["return_weights"] = True
    if r.random() < 0.25 or record["kind"] == "error":
        record["out"] = {"place": r.choice(OUT_PLACES), "wide": r.random() < 0.3}


def _cache(r: Random, record: Record) -> None:
    record["lead"] = [r.choice((1, 2, 3))]
    record["kv_heads"] = r.choice((1, 2))
    record["heads"] = record["kv_heads"] * r.choice((1, 2, 4))
    for name in ("flat", "leads"):
        record.pop(name, None)
    for name in ("len_q", "len_k"):
        record.pop(name)
    record["value_dim"] = max(1, record["value_dim"])
    alike = [[name] * 2 for name in (*FLOATS, "int8")]
    record["stored"] = r.choice([*alike, ["float32", "int8"], ["int8", "bfloat16"]])
    record["page_size"] = r.choice((None, 1, 3, 16, 64, 100))
    record["query_dtype"] = r.choice(("float32", "float64"))
    if r.random() < 0.3:
        record["layout"] = "bshd"
    if r.random() < 0.4:
        record["cache_window"] = r.choice((1, 2, 5, 17, 64))
        record["rollback"] = r.choice((0, 3, 64))
        if r.random() < 0.5:
            record["keep_first"] = r.choice((1, 3, 20))
    steps: list[Record] = []
    for _ in range(r.randint(2, 9)):
        do = r.choices(
            ("append", "step", "attend", "truncate", "fork", "select", "refused", "reload", "rows"),
            (4, 4, 3, 1.5, 1, 0.7, 0.7, 0.7, 0.4),
        )[0]
        step: Record = {"do": do, "data": r.randrange(1 << 20), "n": r.choice((0, 1, 1, 2, 3, 17, 40))}
        steps.append(step)
        # The last n positions of an item to which fewer are added may be gone from a window.
        chance = {"append": 0.5, "step": 0.0 if "cache_window" in record else 0.2}.get(do, 0.0)
        if r.random() < chance:
            step["ragged"] = True
        if do in ("append", "step") and r.random() < 0.3:
            step["place"] = r.choice(("reversed", "padded", "every_other", "unaligned", "fortran"))
        if do in ("append", "step") and "int8" not in record["stored"] and r.random() < 0.2:
            step["dtype"] = "float64"  # of the same numbers; int8 takes quotients in the type that is given
        if do == "reload" and r.random() < 0.5:
            step["mmap"] = True
        if do in ("attend", "step") and r.random() < 0.4:
            step["options"] = _attend_options(r, "cache_window" in record)
    record["steps"] = steps


def _attend_options(r: Random, is_windowed: bool) -> Record:
    drawn: Record = {
        "scale": r.choice((0.0, -0.5, 1.0)), "softcap": r.choice((0.5, 30.0)), "sinks": True, "bias": True,
        "mask": r.choice((0.1, 0.5, 0.9)), "lse": True, "weights": True, "num_threads": r.choice((1, 2, 3)),
    }  # fmt: skip
    if not is_windowed:  # beside the cache's own window each of these means something else
        drawn |= {"causal": False, "window": [r.choice((None, 0, 3, 20)), r.choice((None, 0, 2))]}
    return {name: drawn[name] for name in r.sample(sorted(drawn), r.randint(1, 3))}


# ---- what stands beside attention; each leaves out of a record what it has not


def _without(record: Record, *names: str) -> None:
    for name in names:
        record.pop(name, None)


def _flex(r: Random, record: Record) -> None:
    if r.random() < 0.8:
        _function(r, record)
        return
    _without(record, "dropout", "dropout_seed")
    record["flex"] = {"score": r.random() < 0.7, "mask": r.random() < 0.6}
    if "bias" not in record:
        record["bias"] = {"axes": _axes(r, record), "dtype": r.choice(("float32", "float64"))}
    # A function that adds -inf to NaN masks nothing, and one that is given -inf masks.
    _without(record, "nonfinite", *(() if record["flex"]["mask"] else ("hidden",)))
    for name in ("lse", "weights"):
        if r.random() < 0.4:
            record[f"return_{name}"] = True


def _linear(r: Random, record: Record) -> None:
    _without(record, "nonfinite", "hidden", "styles", "causal", "window", "scale", "softcap", "sinks", "bias",
             "mask", "layout", "dropout", "dropout_seed")  # fmt: skip
    record["linear"] = {"map": r.choice(("elu+1", "elu+1", "squares", "favor"))}
    if record["linear"]["map"] != "elu+1":
        record["head_dim"] = 16
    if record["linear"]["map"] == "squares" and r.random() < 0.4:
        record["linear"]["power"] = r.choice((-100, -60, 60, 100))
    if record["linear"]["map"] == "elu+1" and r.random() < 0.4:
        record["styles"] = {
            name: r.choice(("low", "low_rows")) for name in r.sample(("query", "key"), r.randint(1, 2))
        }
    if "spread" in record:
        record["spread"] = min(record["spread"], 4.0)
    record["heads"], record["kv_heads"] = max(1, record["heads"]), max(1, record["kv_heads"])
    if r.random() < 0.5:
        record["linear"]["causal"] = True
        record["len_k"] = record["len_q"]


def _rope(r: Random, record: Record) -> None:
    _without(record, "causal", "window", "key_lengths", "scale", "softcap", "sinks", "bias", "mask", "hidden",
             "dropout", "dropout_seed", "leads")  # fmt: skip
    record["kv_heads"] = record["heads"]
    most = record["head_dim"] // 2
    record["rope"] = {
        "pairs": r.choice((most, most, r.randint(0, most))),
        "dtype": r.choice(("float32", "float64")),
        "spare": r.choice((0, 0, 1, 50)),
        "out": r.choice(OUT_PLACES),
    }
    for name in ("interleaved", "inverse"):
        if r.random() < 0.4:
            record["rope"][name] = True
    if r.random() < 0.5:
        record["rope"]["lead"] = [r.random() < 0.6 for _ in range(r.randint(0, len(record["lead"])))]


def _kernels(r: Random, record: Record) -> None:
    for name in ("len_q", "len_k", "value_dim"):
        record[name] = max(1, record[name])
    record["len_k"] = min(record["len_k"], 200)
    record["len_q"] = min(record["len_q"], max(1, 2000 // record["len_k"]))
    record["kernels"] = {"bandwidth": r.choice((30.0, 1.0, 0.3, 0.05, 1e-3, 10.0 ** -r.randint(4, 14)))}
    for name, values, chance in (
        ("per_dim", (True,), 0.4), ("weights", (1, 20), 0.4), ("leave_one_out", (True,), 0.3),
        ("shift", (5.0, -1e4, 1e8), 0.3), ("away", (0.0, 3.0, 100.0), 0.4), ("pairs", (True,), 0.5),
    ):  # fmt: skip
        if r.random() < chance:
            record["kernels"][name] = r.choice(values)
    if "leave_one_out" in record["kernels"]:
        record["len_k"] = min(record["len_k"], 40)


def _recurrent(r: Random, record: Record) -> None:
    _without(record, "styles", "nonfinite", "hidden", "causal", "window", "softcap", "sinks", "bias", "mask",
             "dropout", "dropout_seed")  # fmt: skip
    if "spread" in record:
        record["spread"] = min(record["spread"], 1000.0)
    for name in ("head_dim", "value_dim"):
        record[name] = min(record[name], 129)
    rule = r.choice(("linear", "gated", "gla", "delta", "gated_delta", "kimi"))
    chosen: Record = {"rule": rule, "reach": r.choice((1e-3, 0.1, 0.1, 1.0, 1.0, 10.0, 300.0, 1e4))}
    record["recurrent"] = chosen
    for name, values, chance in (
        ("breaks", (True,), 0.3), ("none", (0.1, 0.5, 1.0), 0.3), ("rate", (1.9, 2.0, 2.2), 0.5),
        ("gates", FLOATS, 0.4), ("state", FLOATS, 0.6), ("hidden", ("nan", "inf", "-inf"), 0.3),
    ):  # fmt: skip
        if r.random() < chance:
            chosen[name] = r.choice(values)
    if "delta" in rule or rule == "kimi" or r.random() < 0.3:
        chosen["size"] = r.choices((1.0, 0.3, 1.3, 3.0), (6, 1, 1, 1))[0]
        record["dtypes"] = [name if name in FLOATS else "float32" for name in record["dtypes"]]
    if {"float16", "bfloat16"} <= set(record["dtypes"]):
        record["dtypes"] = ["float32"] * 3
    if r.random() < 0.3:
        chosen["once"] = {name: [r.random() < 0.4 for _ in range(5)] for name in ("decay", "beta")}
    if r.random() < 0.3:
        record.setdefault("places", {})[r.choice(("decay", "beta", "state"))] = r.choice(PLACES)
    most = 200_000 if r.random() < 0.9 else 3_000_000
    length = r.choices(
        (r.randint(1, 4), r.randint(46, 50), r.randint(95, 97), r.randint(0, 300)), (4, 3, 1, 3)
    )[0]
    record["len_q"] = record["len_k"] = length
    if length <= 4 and r.random() < 0.2:  # enough work for several threads
        record["head_dim"], record["value_dim"] = (r.choice((64, 92, 95, 96, 128)) for _ in range(2))
        most = 3_000_000
    while _updates(record) > most:
        record.pop("leads", None)
        if max(record["lead"], default=0) > 1:
            record["lead"][record["lead"].index(max(record["lead"]))] = 1
        elif record["kv_heads"] > 1:
            record["heads"], record["kv_heads"] = record["heads"] // record["kv_heads"], 1
        else:
            name = max(("head_dim", "value_dim"), key=record.__getitem__)
            record[name] //= 2
    if record.get("key_lengths", {}).get("dtype") == "uint8" and length > 255:
        record["key_lengths"]["dtype"] = "int16"
    record["variants"] = sorted({r.choice(RECURRENT_VARIANTS) for _ in range(2)})


def _reductions(r: Random, record: Record) -> None:
    _without(record, "dropout", "dropout_seed")
    record["styles"] = {name: style for name, style in record.get("styles", {}).items() if name != "value"}
    record.get("nonfinite", {}).pop("value", None)
    record["value_dim"] = 1
    record["dtypes"][2] = record["dtypes"][0]
    of = r.choices(("max", "topk", "logsumexp", "key_weights", "similarity"), (3, 6, 1, 4, 5))[0]
    record["reduction"] = {"of": of}
    if "leads" in record:  # one of the arrays has all axes
        record["leads"] = {"key": record["leads"].get("key", record["lead"])}
    if of == "topk":
        record["reduction"]["k"] = r.choice((1, 2, 3, 5, 8, 17, 64, 2000))
    if of in ("max", "topk"):
        _without(record, "sinks")
        if r.random() < 0.4:  # whole numbers: scores are exact, and many are equal
            _without(record, "softcap", "spread", "nonfinite")
            record["styles"] = {"query": "whole", "key": "whole"}
            record["scale"] = r.choice((1.0, 0.25, -2.0))
            if "bias" in record:
                record["bias"]["style"] = "whole"
    variants = REDUCTION_VARIANTS
    if of == "similarity":
        _similarity(r, record)
        variants = SIMILARITY_VARIANTS
    record["variants"] = sorted({r.choice(variants) for _ in range(2)})


def _similarity(r: Random, record: Record) -> None:
    """Queries are the heads of a query, and documents those of a key."""
    _without(record, "causal", "window", "key_lengths", "scale", "softcap", "sinks", "bias", "mask", "layout",
             "hidden", "leads", "flat")  # fmt: skip
    record["lead"] = []
    record["heads"], record["kv_heads"] = (r.choice((0, 1, 1, 2, 3, 5, 8)) for _ in range(2))
    chosen = record["reduction"]
    for name in ("query_lengths", "document_lengths"):
        if r.random() < 0.4:
            chosen[name] = True
    if r.random() < 0.2:
        record["dtypes"][:2] = r.choice((["int8", "int8"], ["float32", "int8"], ["int8", "float64"]))
    if r.random() < 0.2:  # on both sides of the most columns whose products are exact
        record["head_dim"] = r.choice((128, 300, 1024, 1025))
        record["len_q"], record["len_k"] = (min(record[name], 9) for name in ("len_q", "len_k"))
    while prod(record[name] for name in ("heads", "kv_heads", "len_q", "len_k", "head_dim")) > 1_000_000:
        name = max(("heads", "kv_heads", "len_q", "len_k"), key=record.__getitem__)
        record[name] //= 2
    record["dtypes"][2] = record["dtypes"][0]


def _biases(r: Random, record: Record) -> None:
    if r.random() < 0.6:
        record["bias"]["style"] = r.choice(("normal", "masks"))
    _results(r, record)
    record["variants"] = sorted({r.choice(VARIANTS) for _ in range(r.choice((0, 1)))})


def _updates(record: Record) -> int:
    return prod(max(n, 1) for n in record["lead"]) * max(1, record["kv_heads"]) * prod(
        max(1, record[name]) for name in ("len_q", "head_dim", "value_dim")
    )  # fmt: skip


def _function(r: Random, record: Record) -> None:
    _without(record, "dropout", "dropout_seed", "nonfinite", "styles")
    record["spread"] = min(record.get("spread", 1.0), 4.0)
    if "bias" in record:
        record["bias"]["style"] = r.choice(("normal", "masks", "masks"))
    if "sinks" in record:
        record["sinks"]["style"] = "normal"
    record["flex"] = {"function": trees.draw(r)}
    # The loop is one of Python's.
    record["lead"] = [min(n, 2) for n in record["lead"][-1:]]
    record.pop("leads", None)
    if record["heads"] > 4:
        record["heads"] = record["kv_heads"] = min(record["kv_heads"], 2)
    while (
        prod(max(n, 1) for n in record["lead"]) * record["heads"] * record["len_q"] * record["len_k"] > 1500
    ):
        name = max(("len_q", "len_k"), key=record.__getitem__)
        record[name] = record[name] // 2 + 1
    if record.get("causal") == "true" and record["len_q"] != record["len_k"]:
        record["causal"] = "bottom_right"
    if "mask" in record:
        record["mask"] = _mask(r, record, depth=r.choice((0, 0, 1)))


def _layers(r: Random, record: Record) -> None:
    _without(record, "nonfinite", "hidden", "styles", "spread", "places", "leads", "layout", "flat")
    for name in ("heads", "kv_heads", "value_dim"):
        record[name] = max(1, record[name])
    dtype = record["dtypes"][0] if record["dtypes"][0] in FLOATS else "float32"
    record["dtypes"] = [dtype] * 3
    if record.get("sinks"):
        record["sinks"] = {"dtype": "float32"}
    if record.get("bias"):
        record["bias"] |= {"style": r.choice(("normal", "masks")), "dtype": r.choice(("float32", "float64"))}
    layer: Record = {
        "dims": [r.choice((1, 3, 8, 16, 33)) for _ in range(4)],
        "biases": "".join(name for name in "qkvo" if r.random() < 0.5),
        "dtype": r.choice((dtype, dtype, "float32", "float64")),
        "given": r.choice(("self", "self", "key", "value")),
        "out": r.choice(OUT_PLACES),
    }
    record["layer"] = layer
    if r.random() < 0.4:
        layer["place"] = r.choice([place for place in PLACES if place != "zero_stride"])
    if r.random() < 0.4:
        layer["lse"] = True
    if r.random() < 0.5:
        layer["weights"] = r.choice((True, "mean"))
    if layer["given"] == "self":
        record["len_k"] = record["len_q"]
        if r.random() < 0.5 and record["engine"] != "numba":
            _layer_cache(r, record)
    if r.random() < 0.5:
        layer["rope"] = r.randint(0, record["head_dim"] // 2)
        longest = sum(layer["cache"]["chunks"]) if "cache" in layer else max(record["len_q"], record["len_k"])
        layer["positions"] = longest + r.choice((0, 1, 50))


def _layer_cache(r: Random, record: Record) -> None:
    _without(record, "causal", "window", "key_lengths", "mask", "bias", "dropout", "dropout_seed")
    record["lead"] = [r.choice((1, 2, 3))]
    chunks = [r.choice((1, 2, 17)), *(r.choice((0, 1, 1, 2, 5, 17)) for _ in range(r.randint(0, 5)))]
    program: Record = {"chunks": chunks}
    if r.random() < 0.4:
        program["ragged"] = True
    elif r.random() < 0.5:
        program["window"] = r.choice((1, 2, 5, 17))
        program["keep_first"] = r.choice((0, 0, 1, 3))
    if r.random() < 0.5:
        program["page_size"] = r.choice((1, 3, 16, 100))
    if r.random() < 0.5:
        program["layout"] = "bshd"
    record["layer"]["cache"] = program


_BESIDE = {"flex": _flex, "linear": _linear, "rope": _rope, "kernels": _kernels, "layers": _layers,
           "recurrent": _recurrent, "reductions": _reductions, "biases": _biases}  # fmt: skip
