"""The constants that both the compiled kernels and the package define are equal."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from fastattn._machine import constants

ROOT = Path(__file__).parents[1]
KERNELS = ROOT / "fastattn" / "backends" / "cython" / "kernels"

#: What a compiler defines for each instruction set.
MACROS = {"__AVX512F__": "avx512", "__AVX2__": "avx2", "__aarch64__": "neon", None: "portable"}


def source(path: Path) -> str:
    if not path.exists():
        pytest.skip("the sources are not here")
    return path.read_text()


def defines(code: str) -> dict[str, str]:
    return dict(re.findall(r"^#define (\w+) (\S+)", code, re.MULTILINE))


def blocks() -> dict[str, dict[str, str]]:
    """The defines of blocking.h for each instruction set, and those for all."""
    code = source(KERNELS / "blocking.h")
    chain = code[code.index("#if defined(__AVX512F__)") :]
    chain, rest = chain.split("\n#endif", 1)
    parts = re.split(r"^#(?:if|elif|else)(?: defined\((\w+)\))?$", chain, flags=re.MULTILINE)[1:]
    common = defines(rest)
    return {
        MACROS[macro]: common | defines(body) for macro, body in zip(parts[::2], parts[1::2], strict=True)
    }


def number(table: dict[str, str], name: str) -> int:
    """The value of a name: a number, or that of another name."""
    text = table[name]
    return int(text) if text.isdigit() else number(table, text)


def test_tiles_of_each_instruction_set():
    found = blocks()
    assert tuple(found) == constants.VECTOR_ISAS == tuple(constants.REGISTER_BLOCKING)
    for isa, table in found.items():
        for name, wanted in constants.REGISTER_BLOCKING[isa].items():
            assert number(table, name.upper()) == wanted, f"{name} of {isa}"
        assert number(table, "SCORE_KEYS") == constants.SCORE_KEYS
        for name in ("PREFETCH_KEYS", "PREFETCH_VALUES", "PREFETCH_PACKED"):
            assert number(table, name) == getattr(constants, name)
        if isa != "portable":  # blocking.h says why it has others there
            assert number(table, "SCORE_COLUMNS") == constants.SCORE_COLUMNS
            assert number(table, "EXP2_KEYS") == constants.EXP2_KEYS
    shared = defines(source(KERNELS / "kernels.h"))
    assert int(shared["FASTATTN_KEY_CHUNK"]) == constants.KEY_CHUNK
    assert int(shared["FASTATTN_GRADIENT_ROW"]) == constants.BACKWARD_ROW_NBYTES


def test_polynomials_and_logarithms():
    code = source(KERNELS / "vec.h")
    arrays = re.findall(r"exp2_coefficients\)\[\] = \{(.*?)\};", code, re.DOTALL)
    for itemsize, array in zip((4, 8), arrays, strict=True):
        coefficients = tuple(float(x.strip().rstrip("f")) for x in array.split(","))
        assert coefficients == constants.EXP2_COEFFICIENTS[itemsize]
    of_floats = re.findall(r"#define (MANTISSA_BITS|EXPONENT_MIN) \(?(-?\d+)", code)
    wanted = [("MANTISSA_BITS", constants.MANTISSA_BITS), ("EXPONENT_MIN", constants.EXPONENT_MIN)]
    assert of_floats == [(name, str(table[itemsize])) for itemsize in (4, 8) for name, table in wanted]
    logarithms = defines(source(KERNELS / "base.h"))
    assert (float(logarithms["LOG2E"]), float(logarithms["LN2"])) == (constants.LOG2E, constants.LN2)


def test_instruction_sets_are_built_and_detected():
    """setup.py has the flags of each, dispatch.c tests the CPU for its features."""
    setup, dispatch = source(ROOT / "setup.py"), source(KERNELS / "dispatch.c")
    entries = dict(re.findall(r"^    ENTRY\((\w+), (.*?)\)$", dispatch, re.MULTILINE | re.DOTALL))
    assert tuple(entries) == constants.VECTOR_ISAS == tuple(constants.CPU_FEATURES)
    for isa, features in constants.CPU_FEATURES.items():
        tested = re.findall(r"has_(\w+)\(\)", entries[isa])
        assert tuple(tested) == features
        flags = re.search(rf'"{isa}": \[(.*?)\]', setup)
        assert {f"-m{name}" for name in features} <= set(re.findall(r"-m\w+", flags[1] if flags else ""))
    extended = dict(re.findall(r'^    EXTENDED\((\w+), [^"]*"(\w+)", ', dispatch, re.MULTILINE))
    assert extended == constants.EXTENDED_ISAS
    for isa, vectors in extended.items():
        source_file = "fused.c" if isa in constants.FUSED_ISAS else "pairs.c"
        assert f'"{isa}": ("{source_file}", [*X86["{vectors}"], ' in setup


def test_sizes_of_the_fused_sweep():
    shared = defines(source(KERNELS / "fused.h"))
    assert int(shared["FASTATTN_FUSED_LANES"]) == constants.FUSED_LANES
    assert int(shared["FASTATTN_FUSED_KEYS"]) == constants.BLOCK_K
    driver = source(KERNELS.parent / "fused.pxi")
    assert f"MAX_TASK_BLOCKS = {constants.FUSED_TASK_BLOCKS}\n" in driver
