"""Makes a failing case small: simpler records, as long as they fail in the same manner."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator

from tests.fuzz import trees
from tests.fuzz.records import Record

#: What a record cannot be without.
_NEEDED = {
    "kind", "engine", "heads", "kv_heads", "len_q", "len_k", "head_dim", "value_dim", "steps", "stored",
    "lead", "spoil", "of", "axes", "by", "beyond", "bounds", "align", "index", "ids", "share",
    "flex", "function", "linear", "rope", "kernels", "map", "pairs", "layer", "dims", "chunks", "positions",
    "recurrent", "rule", "reach", "reduction", "k", "entries", "offset", "width",
}  # fmt: skip
_SIZES = ("len_q", "len_k", "head_dim", "value_dim")


def shrink(record: Record, manner: str, fails: Callable[[Record], str | None], most: int = 2000) -> Record:
    """The smallest record found that `fails` in this manner, in at most so many attempts."""
    attempts = 0
    changed = True
    while changed and attempts < most:
        changed = False
        for candidate in candidates(record):
            attempts += 1
            if attempts > most:
                break
            if fails(candidate) == manner:
                record, changed = candidate, True
                break
    return record


def candidates(record: Record) -> Iterator[Record]:
    """Records that are simpler by one step, the largest steps first."""
    for changed in _simpler(record):
        if _is_legal(changed):
            yield changed


def _simpler(record: Record) -> Iterator[Record]:
    for name in record:
        if name not in _NEEDED:
            yield {key: value for key, value in record.items() if key != name}
    if record.get("variants"):
        for variant in record["variants"]:
            yield record | {"variants": [name for name in record["variants"] if name != variant]}
    for name in _SIZES:
        n = record.get(name, 0)
        for smaller in dict.fromkeys((1, n // 2, n - 8, n - 1)):
            if 0 <= smaller < n:
                yield record | {name: smaller}
    lead = record.get("lead", [])
    if lead and record["kind"] != "cache":
        yield {key: value for key, value in record.items() if key != "leads"} | {"lead": lead[1:]}
    for at, n in enumerate(lead):
        if n > 1:
            yield record | {"lead": [*lead[:at], n - 1, *lead[at + 1 :]]}
    if record.get("kv_heads", 0) > 1:
        yield record | {"kv_heads": 1, "heads": record["heads"] // record["kv_heads"]}
    if record.get("heads", 0) > record.get("kv_heads", 0) > 0:
        yield record | {"heads": record["kv_heads"]}
    if record.get("dtypes") and set(record["dtypes"]) != {"float32"}:
        for at in range(3):
            dtypes = [*record["dtypes"]]
            dtypes[at] = "float32"
            if dtypes != record["dtypes"] and not {"float16", "bfloat16"} <= set(dtypes):
                yield record | {"dtypes": dtypes}
    if "steps" in record:
        steps = record["steps"]
        for at in range(len(steps)):
            yield record | {"steps": steps[:at] + steps[at + 1 :]}
        for at, step in enumerate(steps):
            if step.get("n", 0) > 1:
                yield record | {"steps": [*steps[:at], step | {"n": step["n"] // 2}, *steps[at + 1 :]]}
    for name in ("places", "leads", "styles", "nonfinite"):
        for key in record.get(name, {}):
            rest = {other: value for other, value in record[name].items() if other != key}
            yield record | {name: rest}
    for name in (
        "bias",
        "sinks",
        "key_lengths",
        "out",
        "flex",
        "linear",
        "rope",
        "kernels",
        "layer",
        "recurrent",
        "reduction",
    ):
        for key in record.get(name, {}):
            if key not in _NEEDED and key != "place":
                yield record | {name: {other: value for other, value in record[name].items() if other != key}}
    function = record.get("flex", {}).get("function", {})
    for of in ("score", "mask"):
        for simpler in trees.simpler(function.get(of)):
            yield record | {"flex": {"function": function | {of: simpler}}}
    if {"score", "mask"} <= set(function):
        for of in ("score", "mask"):
            rest = {name: part for name, part in function.items() if name != of}
            yield record | {"flex": {"function": rest}}
    if record.get("window"):
        for at in range(2):
            if record["window"][at] is not None:
                window = [*record["window"]]
                window[at] = None
                yield record | {"window": window}
    if "mask" in record:
        for mask in _simpler_masks(record["mask"]):
            yield record | {"mask": mask}
    if record.get("data"):
        yield record | {"data": 0}


def _simpler_masks(node: Record) -> Iterator[Record]:
    for at, part in enumerate(node.get("of", ())):
        yield part
        for simpler in _simpler_masks(part):
            changed = copy.deepcopy(node)
            changed["of"][at] = simpler
            yield changed
    for name in node:
        if name not in _NEEDED:
            yield {key: value for key, value in node.items() if key != name}
    for at in range(2):
        if node.get("by", [0, 0])[at]:
            changed = copy.deepcopy(node)
            changed["by"][at] //= 2
            yield changed


def _is_legal(record: Record) -> bool:
    """Whether a record is one of a call that is to be answered."""
    if record.get("causal") == "true" and record["len_q"] != record["len_k"] and record["kind"] != "cache":
        return False
    if record.get("flat") and (record["heads"] != 1 or record["kv_heads"] != 1 or record["lead"]):
        return False
    if record.get("linear", {}).get("causal") and record["len_q"] != record["len_k"]:
        return False
    is_self = "layer" in record and record["layer"].get("given", "self") == "self"
    if is_self and record["len_q"] != record["len_k"]:
        return False
    dtypes = record.get("dtypes", ())
    if any(style for style in record.get("styles", {}).values()) and {"int8", "int64"} & set(dtypes):
        return False
    return record.get("head_dim", 1) >= 1
