"""Memory does not grow with L * S."""

from __future__ import annotations

import sys

import pytest

from tests.conftest import on_compiled_backends, on_storage_backends, quick_on_cython
from tests.process import python

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc/self/status")

MEASURE = """
import numpy as np
import fastattn
from fastattn import masks

LENGTH, DIM = 32768, 64

def resident(field):
    for line in open("/proc/self/status"):
        if line.startswith(field):
            return int(line.split()[1]) * 1024

def extra(call):
    '''Peak of the memory in use during a call, above what was in use before it.'''
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # forget the peak of the past
    before = resident("VmRSS:")
    call()
    return resident("VmHWM:") - before
"""

SCRIPT = (
    MEASURE
    + """
rng = np.random.default_rng(0)
query, key, value = (rng.standard_normal((1, 1, LENGTH, DIM), dtype=np.float32) for _ in range(3))
query = query[:, :, :{len_q}]
out = np.zeros_like(query)  # its pages are touched here, so they do not count below
out += 1
few = slice(0, 64)
fastattn.attention(query[..., few, :], key[..., few, :], value[..., few, :])  # imports and thread stacks

options = {options}
key, value = ({stored} for x in (key, value))
print(extra(lambda: fastattn.attention(query, key, value, out=out, **options)))
"""
)

LIMIT = 8 * 2**20


STORED = {
    "float32": "x",
    "float16": "x.astype(np.float16)",
    "int8": "fastattn.Quantized.encode(x)",
    "pages": "fastattn.Paged(x.reshape(-1, 1, 128, DIM), np.arange(LENGTH // 128))",
    "small pages": "fastattn.Paged(x.reshape(-1, 1, 16, DIM), np.arange(LENGTH // 16))",
}


def measure(backend, options, storage="float32"):
    # The reference takes its query rows in blocks one after another, so the first few hundred show it all.
    queries = "512" if backend.backend == "reference" else "LENGTH"
    script = (
        SCRIPT.replace("{len_q}", queries).replace("{options}", options).replace("{stored}", STORED[storage])
    )
    return int(python(script, env={"FASTATTN_BACKEND": backend.backend}))


@quick_on_cython
@pytest.mark.parametrize(
    "options",
    [
        "dict(window=(256, 0))",
        *(
            pytest.param(options, marks=pytest.mark.slow)
            for options in (
                "{}",
                "dict(causal='bottom_right')",
                "dict(mask=masks.Segments(np.arange(query.shape[2]) // 512, np.arange(LENGTH) // 512))",
                "dict(bias=np.linspace(0, 1, LENGTH, dtype=np.float32))",
                "dict(mask=np.arange(LENGTH) % 3 > 0)",
                "dict(num_threads=4)",
            )
        ),
    ],
)
def test_long_sequence(backend, options):
    extra = measure(backend, options)
    assert extra < LIMIT, f"{extra / 2**20:.1f} MiB"


@on_storage_backends
def test_biases_that_are_added_up(backend):
    arrays = "(np.ones((query.shape[2], n), np.float32) for n in (128, 256))"
    objects = f"fastattn.biases.Grid(*{arrays}) + fastattn.biases.Relative([0.0, 1.0, 2.0])"
    extra = measure(backend, f"dict(bias=(np.linspace(0, 1, LENGTH), {objects}), window=(256, 0))")
    assert extra < LIMIT, f"{extra / 2**20:.1f} MiB"


RECURRENT = (
    MEASURE
    + """
rng = np.random.default_rng(0)
query, key, value, grad = (rng.standard_normal((1, LENGTH, DIM), dtype=np.float32) for _ in range(4))
key /= np.linalg.norm(key, axis=-1, keepdims=True)
beta, decay = rng.random((1, LENGTH)), -rng.random((1, LENGTH))

def gradients(n):
    given = dict(beta=beta[:, :n], decay=decay[:, :n], backend="{backend}")
    return fastattn.gated_linear_attention_backward(*(x[:, :n] for x in (grad, query, key, value)), **given)

gradients(64)
print(extra(lambda: gradients(LENGTH)) - query.nbytes - key.nbytes - value.nbytes)
"""
)


@pytest.mark.parametrize("backend", ["cython", pytest.param("reference", marks=pytest.mark.slow)])
def test_states_of_a_long_sequence(backend):
    """Of 683 chunks, or 512, about two for each root: each is 32 KB."""
    extra = int(python(RECURRENT.replace("{backend}", backend)))
    assert extra < LIMIT, f"{extra / 2**20:.1f} MiB"


@on_storage_backends
@pytest.mark.parametrize(
    "storage",
    ["int8", "small pages", *(pytest.param(name, marks=pytest.mark.slow) for name in ("float16", "pages"))],
)
def test_stored_keys_are_not_copied(backend, storage):
    """In float32 and one after another they would take 8 MiB each."""
    extra = measure(backend, "dict(window=(256, 0))", storage)
    assert extra < LIMIT, f"{extra / 2**20:.1f} MiB"


@pytest.mark.slow
def test_a_tile_mask_costs_its_partial_tiles(backend):
    options = "dict(mask=masks.Window(256, 0) | masks.GlobalTokens([0]))"
    extra = measure(backend, options)
    one_bit_per_score = 32768**2 // 8
    assert extra < one_bit_per_score // 4, f"{extra / 2**20:.1f} MiB"


@quick_on_cython
def test_options_of_packed_documents(backend):
    """In float32 the scores would take 256 MiB, and the keys of one document for every query 16 MiB."""
    dropout = "" if backend.backend == "numba" else "dropout=0.1, seed=1, "  # which it cannot
    script = SCRIPT.split("rng = ")[0] + (
        "query, key, value = np.random.default_rng(0).standard_normal((3, 8192, 1, DIM), dtype=np.float32)\n"
        "starts, out = np.arange(0, 8193, 512), np.ones_like(query)\n"
        "fastattn.varlen_attention(query[:64], key[:64], value[:64], [0, 64])\n"
        f"options = dict(mask=masks.NotSelf(), bias=np.linspace(0, 1, 8192), {dropout}out=out)\n"
        "print(extra(lambda: fastattn.varlen_attention(query, key, value, starts, **options)))\n"
    )
    extra = int(python(script, env={"FASTATTN_BACKEND": backend.backend}))
    assert extra < LIMIT, f"{extra / 2**20:.1f} MiB"


@pytest.mark.slow
@pytest.mark.parametrize("length", [4096, 16384])
def test_rows_far_apart(backend, length):
    """Where threads copy one head of keys and values, and where that would be too much."""
    script = SCRIPT.split("rng = ")[0] + (
        "rng = np.random.default_rng(0)\n"
        f"query, key, value = rng.standard_normal((3, {length}, 8, 64), dtype=np.float32)\n"
        "query = query[:512]\n"
        "out = np.ones_like(query)\n"
        "fastattn.attention(query[:64], key[:64], value[:64], layout='bshd')\n"
        "print(extra(lambda: fastattn.attention(query, key, value, layout='bshd', out=out)))\n"
    )
    extra = int(python(script, env={"FASTATTN_BACKEND": backend.backend}))
    assert extra < LIMIT, f"{extra / 2**20:.1f} MiB"


@pytest.mark.slow
@on_compiled_backends  # the reference's blocks of query rows hold whole rows of scores
@pytest.mark.parametrize(
    ("length", "options"),
    [
        (65536, "dict(bias=half)"),
        (65536, "dict(mask=half > 0)"),
        (262144, "{}"),
        (262144, "dict(num_threads=4)"),
    ],
)
@pytest.mark.parametrize("place", ["contiguous", "columns_apart"])
def test_few_queries(backend, length, place, options):
    """A thread holds the scores of one key tile, and partial results: some KB per key tile at most."""
    script = SCRIPT.split("rng = ")[0] + (
        "rng = np.random.default_rng(0)\n"
        f"key, value = rng.standard_normal((2, 1, 64, {length}), dtype=np.float32).swapaxes(-1, -2)\n"
        f"key, value = (key, value) if {place == 'columns_apart'} else (key.copy(), value.copy())\n"
        "query = rng.standard_normal((4, 4, 64), dtype=np.float32)\n"
        f"whole = rng.standard_normal({length}).astype(np.float16)\n"
        "out = np.ones_like(query)\n"
        # First with few keys: thread stacks, and code that is loaded on first use.
        "for keys in (slice(0, 5000), slice(None)):\n"
        "    half = whole[keys]\n"
        f"    options = {options}\n"
        "    call = lambda: fastattn.attention(query, key[:, keys], value[:, keys], out=out, **options)\n"
        "    used = extra(call)\n"
        "print(used)\n"
    )
    extra = int(python(script, env={"FASTATTN_BACKEND": backend.backend}))
    assert extra < LIMIT / 8, f"{extra / 2**20:.2f} MiB"


@pytest.mark.slow
def test_the_measure_works():
    """It detects the L * S array of the plain formula."""
    script = SCRIPT.split("options = ")[0].replace("{len_q}", "LENGTH")
    script += "print(extra(lambda: query[0, 0, :2048] @ key[0, 0].T))"
    assert int(python(script)) > 2048 * 32768 * 4 * 0.9


BROADCAST = """
import numpy as np
import fastattn
rng = np.random.default_rng(0)
key, value = rng.standard_normal((2, 1, 1, 4096, 64), dtype=np.float32)
query = rng.standard_normal((64, 8, 2, 64), dtype=np.float32)
"""


@quick_on_cython
def test_broadcast_axes_are_never_expanded(backend):
    """64 x 8 views of one pair of keys and values, 1 GB if it were written out."""
    script = (
        SCRIPT.split("rng = ")[0]
        + BROADCAST
        + (
            "fastattn.attention(query[:1, :1], key, value)\n"
            "spread = [np.broadcast_to(array, (64, 8, 4096, 64)) for array in (key, value)]\n"
            "print(extra(lambda: fastattn.attention(query, *spread)))\n"
        )
    )
    extra = int(python(script, env={"FASTATTN_BACKEND": backend.backend}))
    assert extra < 2 * LIMIT, f"{extra / 2**20:.1f} MiB"
