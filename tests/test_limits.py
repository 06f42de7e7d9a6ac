"""The probes of what the machine can do at most."""

from __future__ import annotations

import numpy as np
import pytest

from fastattn._machine.constants import VECTORS
from fastattn.backends.cython import backend as cython_backend
from fastattn.bench import probes
from tests.conftest import ISAS

if probes.driver is None:
    pytest.skip("the compiled backend is not here", allow_module_level=True)


VECTOR_ISAS = [isa for isa in ISAS if isa in VECTORS]


@pytest.fixture
def small_buffer(monkeypatch):
    """Memory for two steps of reading, of this test alone."""
    nbytes = 2 * probes.READ_STEP_PIECES * probes.driver.READ_PIECE_NBYTES
    monkeypatch.setattr(probes, "READ_NBYTES", nbytes)
    monkeypatch.setattr(probes, "_read_position", 0)
    probes._read_buffer.cache_clear()
    yield probes._read_buffer()
    probes._read_buffer.cache_clear()


def test_memory_is_read_from_a_line_of_the_cache_on(small_buffer):
    """As the kernel promises to be called; NumPy's arrays begin 16 bytes into one."""
    assert small_buffer.ctypes.data % 64 == 0
    assert small_buffer.nbytes == probes.READ_NBYTES


@pytest.mark.parametrize("isa", VECTOR_ISAS)
def test_every_byte_is_read(small_buffer, isa):
    """One that is changed changes what came out, wherever it lies."""

    def read():
        return probes.driver.read_memory(isa, small_buffer.ctypes.data, 2, 2 * probes.READ_STEP_PIECES)

    before = read()
    some = np.random.default_rng(0).integers(small_buffer.nbytes, size=60)
    for at in (0, small_buffer.nbytes - 1, *some):
        small_buffer[at] ^= 2
        assert read() != before
        small_buffer[at] ^= 2
    assert read() == before


def test_the_probe_starts_again_at_the_end(small_buffer):
    for _ in range(5):
        assert 0 < probes.read_bandwidth(2, 0.0) < 1e13
        assert probes._read_position in (0, small_buffer.nbytes // 2)


@pytest.mark.parametrize("itemsize", [4, 8])
@pytest.mark.parametrize("isa", VECTOR_ISAS)
def test_as_many_sums_as_a_register_tile_has(isa, itemsize):
    blocking = VECTORS[isa]["blocking"]
    sums = blocking["tile_rows"] * blocking["tile_vectors"]
    flops_of_a_step = 2 * sums * blocking["vector_bytes"] // itemsize
    assert probes.driver.peak_operations(isa, itemsize, 1, 0) == 32 * flops_of_a_step  # a step of each piece


@pytest.mark.parametrize("isa", ISAS)
def test_probes_are_of_the_instruction_set_in_use(isa, monkeypatch):
    asked = []

    class Driver:
        READ_PIECE_NBYTES = 1

        @staticmethod
        def peak_operations(isa, *_):
            return asked.append(isa) or 1.0

        @staticmethod
        def read_memory(isa, *_):
            asked.append(isa)

    monkeypatch.setattr(probes, "driver", Driver)
    monkeypatch.setattr(probes, "READ_NBYTES", 64)
    probes._read_buffer.cache_clear()
    with cython_backend.use_isa(isa):
        vectors = cython_backend.vectors()
        probes.fma_peak("float32", 1, 0.0)
        probes.integer_peak(1, 0.0)
        probes.read_bandwidth(1, 0.0)
    probes._read_buffer.cache_clear()
    assert asked == [vectors] * 3


def test_an_instruction_set_without_probes_is_refused():
    with pytest.raises(ValueError, match="no probes for instruction set 'sse2'"):
        probes.driver.peak_operations("sse2", 4, 1, 1)
