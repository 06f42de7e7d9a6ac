"""The probes of what the machine can do at most."""

from __future__ import annotations

import numpy as np
import pytest

from fastattn.backends import cython_cpu

if cython_cpu.driver is None:
    pytest.skip("the compiled backend is not here", allow_module_level=True)


@pytest.fixture
def small_buffer(monkeypatch):
    """Memory for two steps of reading, of this test alone."""
    nbytes = 2 * cython_cpu.READ_STEP_PIECES * cython_cpu.driver.READ_PIECE_NBYTES
    monkeypatch.setattr(cython_cpu, "READ_NBYTES", nbytes)
    monkeypatch.setattr(cython_cpu, "_read_position", 0)
    cython_cpu._read_buffer.cache_clear()
    yield cython_cpu._read_buffer()
    cython_cpu._read_buffer.cache_clear()


def test_memory_is_read_from_a_line_of_the_cache_on(small_buffer):
    """As the kernel promises to be called; NumPy's arrays begin 16 bytes into one."""
    assert small_buffer.ctypes.data % 64 == 0
    assert small_buffer.nbytes == cython_cpu.READ_NBYTES


@pytest.mark.parametrize("isa", cython_cpu.available_isas())
def test_every_byte_is_read(small_buffer, isa):
    """One that is changed changes what came out, wherever it lies."""
    pieces = 2 * cython_cpu.READ_STEP_PIECES
    with cython_cpu.use_isa(isa):
        before = cython_cpu.driver.read_memory(small_buffer, 0, 2, pieces)
        some = np.random.default_rng(0).integers(small_buffer.nbytes, size=60)
        for at in (0, small_buffer.nbytes - 1, *some):
            small_buffer[at] ^= 2
            assert cython_cpu.driver.read_memory(small_buffer, 0, 2, pieces) != before
            small_buffer[at] ^= 2
        assert cython_cpu.driver.read_memory(small_buffer, 0, 2, pieces) == before


def test_the_probe_starts_again_at_the_end(small_buffer):
    for _ in range(5):
        assert 0 < cython_cpu.read_bandwidth(2, 0.0) < 1e13
        assert cython_cpu._read_position in (0, small_buffer.nbytes // 2)
