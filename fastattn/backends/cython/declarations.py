"""Writes down for Cython and C what is stated elsewhere: the record, headers, instruction sets, dtypes.

``setup.py`` runs this file before anything is compiled. The record is stated in ``cpu/fields.py``, kernels
and helpers in their headers, instruction sets and dtypes in ``_machine/constants.py``, and nowhere else.
"""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
GENERATED = HERE / "generated"
HEADERS = (
    "kernels/pairs.h", "kernels/fused.h", "kernels/kernels.h", "blas.h", "convert.h", "encode.h", "pool.h",
    "turns.h",
)  # fmt: skip

_POINTER = re.compile(r"([\w *]+?) ?\(\*(\w+)(\[\w+\])?\)\((.*)\)")
_DECLARATIONS = re.compile(
    r"^(?:typedef struct \{(?P<fields>[^{}]*)\} (?P<struct>\w+);"
    r"|enum \{(?P<numbers>[^}]*)\};"
    r"|typedef (?P<pointer>[^;{}]*);"
    r"|(?:static inline )?(?P<returns>\w[\w ]*[ *]+)(?P<function>fastattn_\w+)"
    r"\((?P<arguments>[^;{}]*)\)\s*[;{])",
    re.MULTILINE,
)


def write() -> None:
    """Writes the files; one that would not change is left alone, so that nothing is compiled again."""
    fields = runpy.run_path(str(HERE.parent / "cpu" / "fields.py"))
    constants = runpy.run_path(str(HERE.parents[1] / "_machine" / "constants.py"))
    headers = [declarations(Path(name).name, (HERE / name).read_text()) for name in HEADERS]
    GENERATED.mkdir(exist_ok=True)
    texts = {"headers.pxi": "\n".join(headers), "job.pxi": record(fields)}
    texts["isas.h"] = instruction_sets(constants["VECTORS"], constants["EXTENDED"])
    texts["floats.h"] = float_types(constants)
    for name, text in texts.items():
        path = GENERATED / name
        if not path.exists() or path.read_text() != text:
            path.write_text(text)


def record(fields: dict[str, Any]) -> str:
    """The record of a call, a thread's tiles, and the constants beside them."""
    constants = [f"{name} = {value}" for name, value in fields.items() if isinstance(value, int)]
    tiles = {name: f"{kind} *".replace("* *", "**") for name, kind in fields["SCRATCH"].items()}
    views = fields["VIEWS"]
    state = ["char *base", *(f"{kind}{name}" for name, kind in tiles.items()), "Seen seen"]
    blocks = {
        "cdef enum": [*constants, f"N_VIEWS = {len(views)}"],
        "cdef struct Job": [
            *(f"int64_t {name}" for name in (*fields["COUNTS"], *fields["OFFSETS"])),
            *(f"double {name}" for name in fields["REALS"]),
            *(f"View {name}" for name in views),
        ],
        "cdef struct BiasTerm": [f"int64_t {name}" for name in fields["TERM"]],
        "cdef struct Scratch": state,
        "cdef inline void find_scratch_tiles(const Job *job, char *base, Scratch *w) noexcept nogil": [
            "w.base = base",
            *(f"w.{name} = <{kind}>(base + job.to_{name})" for name, kind in tiles.items()),
        ],
    }
    text = "\n\n".join(f"{head}:\n    " + "\n    ".join(lines) for head, lines in blocks.items())
    return f'{text}\n\nRECORD = "{" ".join((*fields["FIELDS"], *views))}"\n'


def instruction_sets(vectors: dict[str, Any], extended: dict[str, Any]) -> str:
    """EACH_ISA(DO), which is DO(name, whether the CPU has it) for those that are built, best first. And the
    numbers of FASTATTN_ISA, the one that a file is compiled for."""
    lines = ["#ifndef FASTATTN_ISAS_H", "#define FASTATTN_ISAS_H", ""]
    for name, isa in vectors.items():
        supported = " && ".join(f"has_{feature}()" for feature in isa["features"]) or "1"
        lines += [
            f"#if defined(FASTATTN_HAVE_{name.upper()})",
            f"#define IF_{name}(DO) DO({name}, {supported})",
        ]
        lines += ["#else", f"#define IF_{name}(DO)", "#endif"]
    lines += [f"#define EACH_ISA(DO) {' '.join(f'IF_{name}(DO)' for name in vectors)}", ""]
    names = {name: name for name in vectors} | {name: isa["vectors"] for name, isa in extended.items()}
    lines += [f"#define NUMBER_{name} {list(vectors).index(of)}" for name, of in names.items()]
    lines += ["#define OF_ISA__(name, isa) name##_##isa", "#define OF_ISA_(name, isa) OF_ISA__(name, isa)"]
    lines += ["#define OF_ISA(name) OF_ISA_(name, FASTATTN_ISA)", "", "#if defined(FASTATTN_ISA)"]
    for number, isa in enumerate(vectors.values()):
        lines.append(f"#{'elif' if number else 'if'} OF_ISA(NUMBER) == {number}")
        lines += [
            f"#define {n.upper()} {value}" for n, value in (isa["blocking"] | isa.get("other", {})).items()
        ]
    return "\n".join([*lines, "#endif", "#endif", "", "#endif", ""])


def float_types(constants: dict[str, Any]) -> str:
    """The numbers of the dtype of REAL_BITS."""
    lines = []
    for itemsize, coefficients in constants["EXP2_COEFFICIENTS"].items():
        lines += [
            f"#if REAL_BITS == {8 * itemsize}",
            f"#define MANTISSA_BITS {constants['MANTISSA_BITS'][itemsize]}",
            f"#define EXPONENT_MIN ({constants['EXPONENT_MIN'][itemsize]})",
            f"#define EXP2_COEFFICIENTS {', '.join(map(repr, coefficients))}",
            "#endif",
        ]
    return "\n".join([*lines, ""])


def declarations(name: str, header: str) -> str:
    """A header as a ``cdef extern`` block; numbers lose the prefix FASTATTN_."""
    code = re.sub(r"/\*.*?\*/", "", header, flags=re.DOTALL)
    numbers = re.findall(r"^#define FASTATTN_(\w+) \S", code, re.MULTILINE)
    lines = []
    for found in _DECLARATIONS.finditer(re.sub(r"^#(.*\\\n)*.*\n", "", code, flags=re.MULTILINE)):
        if found["struct"]:
            fields = [line for text in found["fields"].split(";")[:-1] for line in _fields(text)]
            lines += [f"ctypedef struct {found['struct']}:", *(f"    {line}" for line in fields)]
        elif found["numbers"]:
            numbers += re.findall(r"FASTATTN_(\w+)", found["numbers"])
        elif found["pointer"]:
            lines += [f"ctypedef {line}" for line in _fields(found["pointer"])]
        else:
            lines.append(f"{_type(found['returns'])}{found['function']}({_types(found['arguments'])})")
    lines = [f'enum: {number} "FASTATTN_{number}"' for number in numbers] + lines
    return f'cdef extern from "{name}" nogil:\n    ' + "\n    ".join(lines) + "\n"


def _fields(statement: str) -> list[str]:
    """What one statement declares, each by itself."""
    statement = " ".join(statement.split())
    if pointer := _POINTER.fullmatch(statement):
        returns, name, size, arguments = pointer.groups()
        return [f"{_type(returns)} (*{name}{_size(size)})({_types(arguments)}) noexcept nogil"]
    ((kind, names),) = re.findall(r"^((?:const )?\w+) (.*)", statement)
    return [f"{_type(kind)} {_size(name)}" for name in names.split(", ")]


def _type(text: str) -> str:
    return text.replace("ptrdiff_t", "Py_ssize_t")


def _types(arguments: str) -> str:
    """The types of arguments, whose names Cython may not know as such."""
    kinds = [re.sub(r"(?<=[ *])\w+$", "", argument.strip()).strip() for argument in arguments.split(",")]
    return _type(", ".join(kinds)) if kinds != ["void"] else ""


def _size(text: str | None) -> str:
    return (text or "").replace("FASTATTN_", "")


if __name__ == "__main__":
    write()
