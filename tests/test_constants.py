"""The constants that both the compiled kernels and the package define are equal."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from fastattn._call import storage
from fastattn._machine import constants

ROOT = Path(__file__).parents[1]
KERNELS = ROOT / "fastattn" / "backends" / "cython" / "kernels"


def source(path: Path) -> str:
    if not path.exists():
        pytest.skip("the sources are not here")
    return path.read_text()


def defines(code: str) -> dict[str, str]:
    return dict(re.findall(r"^#define (\w+) (\S+)", code, re.MULTILINE))


def test_block_sizes():
    blocking = defines(source(KERNELS / "blocking.h"))
    assert int(blocking["SCORE_COLUMNS"]) == constants.SCORE_COLUMNS
    shared = defines(source(KERNELS / "kernels.h"))
    assert int(shared["FASTATTN_KEY_CHUNK"]) == constants.KEY_CHUNK
    assert int(shared["FASTATTN_GRADIENT_ROW"]) == constants.BACKWARD_ROW_NBYTES
    of_pairs = defines(source(KERNELS / "pairs.h"))
    assert int(of_pairs["FASTATTN_PAIR_COLUMNS"]) == constants.PAIR_COLUMNS
    assert int(of_pairs["FASTATTN_PAIR_LANES"]) == constants.BACKWARD_PAIR_LANES


def test_storages():
    code = source(KERNELS / "kernels.h")
    (names,) = re.findall(r"enum \{ (FASTATTN_REAL, .*), FASTATTN_STORAGES \};", code)
    for number, name in enumerate(names.split(", ")):
        assert getattr(storage, name.removeprefix("FASTATTN_")) == number


def test_logarithms():
    logarithms = defines(source(KERNELS / "base.h"))
    assert (float(logarithms["LOG2E"]), float(logarithms["LN2"])) == (constants.LOG2E, constants.LN2)


def test_instruction_sets_are_detected():
    """``dispatch.c`` tests the CPU for whatever the compiler may use, and has kernels beside the vectors'."""
    dispatch = source(KERNELS / "dispatch.c")
    features = set(re.findall(r"^FEATURE\((\w+), ", dispatch, re.MULTILINE))
    for isa, own in constants.VECTORS.items():
        assert set(own["features"]) <= features
        for machine, flags in own["flags"].items():
            used = {name for name in re.findall(r"-m(\w+)", flags) if name in features}
            implied = {"fma"} if isa == "avx512" else set()  # every CPU with AVX-512 has it
            assert used - implied == set(own["features"]), (isa, machine)
    extended = dict(re.findall(r'^    EXTENDED\((\w+), [^"]*"(\w+)", ', dispatch, re.MULTILINE))
    assert extended == {isa: own["vectors"] for isa, own in constants.EXTENDED.items()}


def test_sizes_of_the_fused_sweep():
    shared = defines(source(KERNELS / "fused.h"))
    assert int(shared["FASTATTN_FUSED_LANES"]) == constants.FUSED_LANES
    assert int(shared["FASTATTN_FUSED_KEYS"]) == constants.BLOCK_K
    driver = source(KERNELS.parent / "fused.pxi")
    assert f"MAX_TASK_BLOCKS = {constants.FUSED_TASK_BLOCKS}\n" in driver
