"""Functions for `flex_attention`, drawn at random: trees that JSON can hold, and their Python source.

A node is a list of its operation and its operands; a leaf is a string or a number. Numbers are multiples of
1/8, so that float32 holds them. Each read of a table is of one of its own, which stands wherever functions
may have theirs. Nothing here imports the package under test.
"""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from typing import Any

Node = Any

INDICES = ("b", "h", "q_idx", "kv_idx")
PLACES = ("aux", "aux", "global", "tuple", "named", "closure", "default")
FLOATS = ("float32", "float64", "float64", "float16", ">f8", ">f2")
INTEGERS = ("int64", "int32", ">i4")
#: Not for arithmetic: NumPy's functions give few digits for such integers, and unsigned ones have no minus.
SMALL = (*INTEGERS, "int8", "uint16")

_UNARY = ("-{}", "abs({})", "np.tanh({})", "math.tanh({})", "math.exp(-abs({}))", "np.exp2(-abs({}))",
          "math.sqrt(abs({}))", "np.log1p(abs({}))", "math.sin({})", "np.cos({})", "helper({}, kv_idx)",
          "np.exp(-abs({})) * 4.0", "(lambda z: z * 0.5 + 1)({})")  # fmt: skip
_BINARY = ("({} + {})", "({} - {})", "({} * math.tanh({}))", "({} / (1 + abs({})))", "min({}, {})",
           "max({}, {})", "np.minimum({}, {})", "np.maximum({}, {})")  # fmt: skip
_INTEGER = ("({} + {})", "({} - {})", "min({}, {})", "max({}, {})")
_CONDITION = ("({} < {})", "({} >= {})", "({} != {})", "(0 <= {} < {})")
_LOGIC = ("({} and {})", "({} or {})")
_ITEM = (
    "{table}[{}]",
    "{table}[{}]",
    "{table}.flat[{}]",
    "{table}[{}, {}]",
    "{table}[{}][{}]",
    "{table}.T[{}, {}]",
)


def draw(r: Random) -> dict[str, Any]:
    """A score_mod, a mask_mod, or both, and the tables that they read."""
    tables: list[dict[str, Any]] = []
    found: dict[str, Any] = {"tables": tables, "short": r.random() < 0.1}
    kinds = r.choice((("score",), ("score",), ("score", "mask"), ("mask",)))
    if "score" in kinds:
        found["score"] = _statement(r, tables)
    if "mask" in kinds:
        found["mask"] = ["return {}", _condition(r, tables, 3, "mask")]
    return found


def _statement(r: Random, tables: list[Any]) -> Node:
    one = _number(r, tables, r.randint(1, 4))
    form = r.random()
    if form < 0.5:
        return ["return {}", one]
    if form < 0.65:
        return ["return {} if {} else {}", one, _condition(r, tables, 2), _masked_or(r, tables)]
    if form < 0.75:
        return [
            "if {}:\n        return {}\n    return {}",
            _condition(r, tables, 2),
            _masked_or(r, tables),
            one,
        ]
    if form < 0.85:
        return ["return np.where({}, {}, {})", _condition(r, tables, 2), one, _masked_or(r, tables)]
    n = r.randint(1, 4)
    more = _number(r, tables, 2)
    loop = (
        f"total = {{}}\n    for step in range({n}):\n        total += 0.125 * ({{}} + step)\n    return total"
    )
    return [loop, one, more]


def _masked_or(r: Random, tables: list[Any]) -> Node:
    return r.choice(("-math.inf", "-np.inf", _number(r, tables, 2)))


def _number(r: Random, tables: list[Any], depth: int) -> Node:
    if depth == 0 or r.random() < 0.1:
        return r.choice((
            lambda: "score", lambda: "score", lambda: r.randint(-16, 16) / 8, lambda: _index(r, 1),
            lambda: _read(r, tables, r.choice(FLOATS)), lambda: _read(r, tables, r.choice(FLOATS)),
            lambda: _read(r, tables, r.choice(INTEGERS)),
            lambda: "number", lambda: "captured", lambda: "whole",
        ))()  # fmt: skip
    if r.random() < 0.35:
        return [r.choice(_UNARY), _number(r, tables, depth - 1)]
    if r.random() < 0.15:
        template = r.choice(("({} if {} else {})", "np.where({1}, {0}, {2})"))
        return [
            template,
            _number(r, tables, depth - 1),
            _condition(r, tables, 1),
            _number(r, tables, depth - 1),
        ]
    return [r.choice(_BINARY), _number(r, tables, depth - 1), _number(r, tables, depth - 1)]


def _index(r: Random, depth: int) -> Node:
    if depth == 0:
        return r.choice((*INDICES, "q_idx", "kv_idx", "whole", r.randint(-3, 9)))
    if r.random() < 0.3:
        return [f"{{}} {r.choice(('//', '%'))} {r.randint(2, 7)}", ["({})", _index(r, depth - 1)]]
    if r.random() < 0.15:
        return ["abs({})", _index(r, depth - 1)]
    return [r.choice(_INTEGER), _index(r, depth - 1), _index(r, depth - 1)]


def _condition(r: Random, tables: list[Any], depth: int, of: str = "score") -> Node:
    if depth > 1 and r.random() < 0.6:
        return [r.choice(_LOGIC), _condition(r, tables, depth - 1, of), _condition(r, tables, depth - 1, of)]
    form = r.random()
    if form < 0.15:
        return _read(r, tables, "bool", of)
    if form < 0.25:
        return "flag"
    if form < 0.35:
        return ["not {}", _condition(r, tables, 1, of)]
    if form < 0.5 and of == "score":
        return ["(score > {})", r.randint(-8, 8) / 8]
    if form < 0.6:
        return ["({} < {})", _read(r, tables, r.choice(SMALL), of), _index(r, 1)]
    return [r.choice(_CONDITION), _index(r, 1), _index(r, 1)]


def _read(r: Random, tables: list[Any], dtype: str, of: str = "score") -> Node:
    item = r.choice(_ITEM)
    number = len(tables)
    tables.append({"dtype": dtype, "place": r.choice(PLACES), "of": of, "strided": r.random() < 0.2})
    return [item.replace("{table}", f"{{table{number}}}"), *(_index(r, 1) for _ in range(item.count("{}")))]


def source(node: Node, names: dict[str, str]) -> str:
    """The Python of a node. names: of tables, ``table0`` and so on."""
    if not isinstance(node, list):
        return str(node)
    operands = [source(operand, names) for operand in node[1:]]
    return node[0].format(*operands, **names)


def reads(node: Node) -> Iterator[tuple[int, str, list[Node]]]:
    """Each read of a table: its number, its template and its indices."""
    if isinstance(node, list):
        if "{table" in node[0]:
            yield int(node[0].split("{table")[1].split("}")[0]), node[0], node[1:]
        for operand in node[1:]:
            yield from reads(operand)


def simpler(node: Node) -> Iterator[Node]:
    """Nodes with a part of it replaced by a part of that."""
    if not isinstance(node, list):
        return
    for at in range(1, len(node)):
        operand = node[at]
        if isinstance(operand, list):
            if "{table" not in node[0]:
                for inner in operand[1:]:
                    if _kind(inner) == _kind(operand):
                        yield [*node[:at], inner, *node[at + 1 :]]
            for changed in simpler(operand):
                yield [*node[:at], changed, *node[at + 1 :]]


def _kind(node: Node) -> str:
    text = node[0] if isinstance(node, list) else str(node)
    is_condition = text == "flag" or text.startswith("not ") or any(
        sign in text for sign in (" < ", " >= ", " != ", " and ", " or ", " > ")
    )  # fmt: skip
    return "condition" if is_condition else "number"
