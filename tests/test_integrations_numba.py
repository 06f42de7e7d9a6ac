"""`attention` inside compiled functions: the bits of `fastattn.attention`, its errors, threads and caches."""

from __future__ import annotations

import tomllib
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fastattn
from fastattn.backends.cython import backend as cython_backend
from tests import c_entry
from tests.cases import MEMORY_LAYOUTS, random_arrays
from tests.process import ROOT, python
from tests.tolerances import assert_same_bits

numba = pytest.importorskip("numba")
pytestmark = pytest.mark.skipif(
    bool(cython_backend.backend.unavailable_reasons()), reason="the C entry is part of the compiled kernels"
)
integration = import_module("fastattn.integrations.numba")
attention = integration.attention

CAUSAL = numba.njit(lambda q, k, v, causal, scale: attention(q, k, v, causal, scale))
PLAIN = numba.njit(nogil=True)(lambda query, key, value: fastattn.attention(query, key, value))


def arrays_of(*, lead: tuple[int, ...] = (), dtype: str = "float32", **sizes: Any) -> tuple[np.ndarray, ...]:
    return random_arrays(lead=lead, dtype=dtype, **({"heads": 4, "kv_heads": 2, "value_dim": 12} | sizes))


@pytest.mark.parametrize("len_q", [1, 17, 33, 150])
def test_bits_are_those_of_python(len_q: int) -> None:
    arrays = arrays_of(len_q=len_q)
    for causal in (False, len_q == 33):
        wanted = fastattn.attention(*arrays, causal=causal, scale=0.3)
        for _ in range(2):
            assert_same_bits(CAUSAL(*arrays, causal, 0.3), wanted)


@pytest.mark.slow
@pytest.mark.parametrize("causal", ["top_left", "bottom_right"])
def test_words_for_causal(causal: str) -> None:
    """As an argument, and as a literal."""
    arrays = arrays_of()
    wanted = fastattn.attention(*arrays, causal=causal, scale=-1)
    assert_same_bits(CAUSAL(*arrays, causal, -1), wanted)
    literal = numba.njit(lambda query, key, value: fastattn.attention(query, key, value, causal="top_left"))
    assert_same_bits(literal(*arrays), fastattn.attention(*arrays, causal="top_left"))
    with pytest.raises(ValueError, match=r"causal must be False, True, .* got 'left'"):
        CAUSAL(*arrays, "left", -1)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("ranks", [(2, 2, 2), (3, 3, 3), (4, 4, 4), (4, 3, 3), (3, 4, 4)])
def test_ranks_and_dtypes(ranks: tuple[int, ...], dtype: str) -> None:
    arrays = arrays_of(lead=(3,), dtype=dtype)
    given = tuple(array[(1,) * (4 - rank)] for array, rank in zip(arrays, ranks, strict=True))
    assert_same_bits(PLAIN(*given), fastattn.attention(*given))
    if ranks == (4, 4, 4):  # a batch axis of 1 is broadcast
        assert_same_bits(
            PLAIN(given[0], given[1][:1], given[2]), fastattn.attention(given[0], given[1][:1], given[2])
        )
    if ranks == (2, 2, 2):
        mixed = (given[0], given[1].astype("f8"), given[2])
        assert_same_bits(PLAIN(*mixed), fastattn.attention(*mixed))


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in MEMORY_LAYOUTS if name != "byte_swapped"])
def test_strides(name: str) -> None:
    arrays = tuple(MEMORY_LAYOUTS[name](array) for array in arrays_of())
    assert_same_bits(PLAIN(*arrays), fastattn.attention(*arrays))


@pytest.mark.parametrize(("len_q", "len_k"), [(0, 3), (3, 0)])
def test_empty(len_q: int, len_k: int) -> None:
    arrays = arrays_of(len_q=len_q, len_k=len_k)
    assert_same_bits(CAUSAL(*arrays, False, 0.3), fastattn.attention(*arrays, scale=0.3))


def test_errors() -> None:
    query, key, value = arrays_of()
    wrong = {
        "K 2 and 1, S 33 and 33": (query, key, value[:1]),
        "the heads of query must be a multiple of those of key and value, got 3 and 2": (
            query[:3],
            key,
            value,
        ),
        "got D 16 and 15": (query, key[..., 1:].copy(), value),  # another layout is compiled again
        "S 33 and 32": (query, key, value[:, 1:].copy()),
    }
    for message, arrays in wrong.items():
        with pytest.raises(ValueError, match=message):
            CAUSAL(*arrays, False, 1.0)
    with pytest.raises(ValueError, match="scale must be finite"):
        CAUSAL(query, key, value, False, np.nan)
    with pytest.raises(ValueError, match="causal=True needs L == S, got L=17 and S=33"):
        CAUSAL(query, key, value, True, 1.0)


@pytest.mark.slow
def test_errors_of_types() -> None:
    query, key, value = arrays_of()
    wrong = {
        "query must be an array of float32 or float64": (query.astype("f2"), key, value),
        "value must be an array": (query, key, 3.0),
        "key must have 2, 3 or 4 axes": (query, key[None, None], value),
        "two axes stand for one head": (query[0], key, value),
    }
    for message, arrays in wrong.items():
        with pytest.raises(numba.TypingError, match=message):
            PLAIN(*arrays)
    holding = numba.njit(parallel=True)(lambda query, key, value: attention(query, key, value))
    with pytest.raises(numba.TypingError, match="parallel=True needs nogil=True"):
        holding(query, key, value)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("window=(2, 0)", r"'window': .* scale alone; a block `with numba.objmode"),
        ("False, query[0]", r"scale must be one number, got array\(float64.* `with numba.objmode"),
        ("return_lse=True", r"'return_lse': .* `with numba.objmode"),
        ("softmax_scale=1.0", "'softmax_scale': say scale=; "),
        ("False, 1.0, None", "takes 5 positional arguments .*, but 6 were given"),
    ],
)
def test_arguments_that_compiled_code_does_not_take(given: str, said: str) -> None:
    function = eval(f"lambda query: attention(query, query, query, {given})", {"attention": attention})
    with pytest.raises(numba.TypingError, match=said):
        numba.njit(function)(np.ones((2, 3)))


@pytest.mark.slow
def test_the_block_for_other_arguments() -> None:
    @numba.njit
    def windowed(query: Any, key: Any, value: Any) -> Any:
        with numba.objmode(out="float32[:,:,::1]"):
            out = fastattn.attention(query, key, value, window=(2, 0))
        return out

    arrays = arrays_of()
    assert_same_bits(windowed(*arrays), fastattn.attention(*arrays, window=(2, 0)))


def test_threads_without_the_gil() -> None:
    """New calls and known ones at once."""
    problems = [arrays_of(len_q=40 + n) for n in range(8)]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda n: PLAIN(*problems[n % 8]), range(40)))
    for n, out in enumerate(found):
        assert_same_bits(out, fastattn.attention(*problems[n % 8]))


PRANGE = """
import numba
import numpy as np
import fastattn

@numba.njit(parallel=True, nogil=True)
def each(query, key, value, out):
    for n in numba.prange(len(query)):
        out[n] = fastattn.attention(query[n], key[n], value[n, :, : 4 + n % 5])[..., :4]

query, key, value = np.random.default_rng(0).standard_normal((3, 40, 70, 9))
out = np.empty((40, 70, 4))
each(query, key, value, out)
for n in range(40):
    assert (out[n] == fastattn.attention(query[n], key[n], value[n])[..., :4]).all(), n
print("done")
"""


@pytest.mark.slow
def test_in_prange(tmp_path: Path) -> None:
    """New calls on all threads, where nobody but Numba, by the entry point, imports the integration."""
    entry_points = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    metadata = tmp_path / "of_tests-1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: of_tests\nVersion: 1\n")
    listed = "".join(f"{name} = {to}\n" for name, to in entry_points["numba_extensions"].items())
    (metadata / "entry_points.txt").write_text(f"[numba_extensions]\n{listed}")
    code = f"import sys; sys.path.append({str(tmp_path)!r})\n{PRANGE}"
    assert python(code, env={"NUMBA_NUM_THREADS": "2"}).split() == ["done"]


CACHED = """
import sys
import numba
import numpy as np
import fastattn
from fastattn.integrations.numba import attention

@numba.njit(cache=True)
def cached(query, key, value):
    return attention(query, key, value, causal=True)

query, key, value = np.random.default_rng(0).standard_normal((3, 4, 9, 8))
for _ in range(2):
    assert (cached(query, key, value) == fastattn.attention(query, key, value, causal=True)).all()
print(sum(cached.stats.cache_hits.values()), sum(cached.stats.cache_misses.values()))
"""


@pytest.mark.slow
def test_caches_on_disk(tmp_path: Path) -> None:
    """The next process finds the C entry where that is then."""
    (tmp_path / "cached.py").write_text(CACHED)
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import cached"
    env = {"NUMBA_CACHE_DIR": str(tmp_path / "cache")}
    assert [python(code, env=env).split() for _ in range(3)] == [["0", "1"], ["1", "0"], ["1", "0"]]


def test_the_struct_is_that_of_the_header() -> None:
    names = [name.removesuffix(".0") for name in integration._FIELDS]
    for name, _ in c_entry.Call._fields_:
        assert getattr(c_entry.Call, name).offset == 8 * names.index(name), name
    assert 8 * len(names) == c_entry.ctypes.sizeof(c_entry.Call)


def test_without_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(integration, "_missing", "nothing was built")
    with pytest.raises(numba.TypingError, match="nothing was built"):
        numba.njit(lambda query: attention(query, query, query))(np.ones((2, 3)))
