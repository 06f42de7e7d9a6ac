"""The C entry: the bits of `fastattn.attention`, its checks, and no GIL where the call is known."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import fastattn
from fastattn._api import c_entry as _capi
from fastattn.backends.cython import backend as cython_backend
from tests import c_entry
from tests.cases import MEMORY_LAYOUTS, random_arrays
from tests.conftest import ISAS
from tests.process import ROOT, python
from tests.tolerances import assert_same_bits

pytestmark = pytest.mark.skipif(
    bool(cython_backend.backend.unavailable_reasons()), reason="the C entry is part of the compiled kernels"
)
OPTIONS = c_entry.OPTIONS


@pytest.fixture
def asked() -> Iterator[list[str]]:
    """Gets "solve" and "limit" each time that the C entry calls these in Python."""
    calls: list[str] = []

    def noting(name: str) -> Any:
        def note(*arguments: Any) -> Any:
            calls.append(name)
            return getattr(_capi, name)(*arguments)

        return note

    driver = _capi._driver()
    driver.install_entry(noting("solve"), noting("limit"), _capi.code_of)
    yield calls
    driver.install_entry(_capi.solve, _capi.limit, _capi.code_of)


def arrays_of(dtype: str = "float32", **sizes: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    sizes = {"lead": (2,), "heads": 4, "kv_heads": 2, "value_dim": 12} | sizes
    if dtype == "bfloat16":
        dtype = pytest.importorskip("ml_dtypes").bfloat16
    return random_arrays(dtype=dtype, **sizes)


def check(arrays: tuple[np.ndarray, ...], options: dict[str, Any], out: np.ndarray | None = None) -> None:
    """A first and a second call give the bits of Python's."""
    wanted, wanted_lse = fastattn.attention(*arrays, **options, return_lse=True)
    for _ in range(2):
        got = np.full_like(wanted, 7) if out is None else out
        lse = np.full_like(wanted_lse, 7)
        assert c_entry.attend(*arrays, got, lse=lse, **options) == (_capi.OK, "")
        assert_same_bits(np.ascontiguousarray(got), wanted, "out")
        assert_same_bits(lse, wanted_lse, "lse")


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
@pytest.mark.parametrize("name", OPTIONS)
def test_bits_are_those_of_python(name: str, dtype: str) -> None:
    check(arrays_of(dtype), OPTIONS[name])


@pytest.mark.parametrize("isa", ISAS)
def test_bits_on_each_instruction_set(isa: str) -> None:
    """The same call, one after another on each: kept calls are those of one instruction set."""
    with cython_backend.use_isa(isa):
        check(arrays_of(), OPTIONS["all"])


@pytest.mark.parametrize(
    "sizes",
    [
        {"len_q": 1, "len_k": 300},
        {"len_q": 1, "len_k": 1, "lead": (1,), "heads": 1, "kv_heads": 1},
        {"len_q": 200, "len_k": 257, "head_dim": 64},
        {"len_q": 3, "len_k": 0},
        {"len_q": 0},
        {"lead": (0,)},
        {"value_dim": 0},
        {"lead": (100,), "len_q": 2, "len_k": 3},
    ],
    ids=lambda sizes: ",".join(f"{name}={n}" for name, n in sizes.items()),
)
def test_sizes(sizes: dict[str, Any]) -> None:
    arrays = arrays_of(**sizes)
    check(arrays, {"causal": "bottom_right"})
    batch, len_k = len(arrays[0]), arrays[1].shape[2]
    check(arrays, {"key_lengths": np.arange(batch) % (len_k + 1)})


@pytest.mark.parametrize("name", [name for name in MEMORY_LAYOUTS if name not in ("byte_swapped",)])
def test_strides(name: str) -> None:
    query, key, value = (MEMORY_LAYOUTS[name](array) for array in arrays_of())
    mask = MEMORY_LAYOUTS[name](np.where(OPTIONS["mask"]["mask"], True, False))
    out = MEMORY_LAYOUTS[name](np.zeros((2, 4, 17, 12), "f4"))
    if not out.flags.writeable:
        out = None
    check((query, key, value), {"mask": mask}, out)


def test_a_known_call_asks_python_nothing(asked: list[str]) -> None:
    arrays = arrays_of(len_q=211, len_k=223)
    out = np.empty((2, 4, 211, 12), "f4")
    for _ in range(3):
        assert c_entry.attend(*arrays, out, causal="top_left") == (_capi.OK, "")
    assert asked.count("solve") == 1
    assert asked.count("limit") <= 1
    asked.clear()
    assert c_entry.attend(*(array.copy() for array in arrays), out, causal="top_left")[0] == _capi.OK
    assert not asked


def test_settings_of_threads_are_asked_for_again(asked: list[str]) -> None:
    threadpoolctl = pytest.importorskip("threadpoolctl")
    arrays, out = arrays_of(len_q=201, len_k=223), np.empty((2, 4, 201, 12), "f4")

    def call() -> list[str]:
        asked.clear()
        for _ in range(2):
            assert c_entry.attend(*arrays, out)[0] == _capi.OK
        return list(asked)

    before = fastattn.get_num_threads()
    call()
    assert call() == []
    try:
        fastattn.set_num_threads(before + 1)
        assert "limit" in call()
        assert call() == []
        with threadpoolctl.threadpool_limits(1):
            assert call()[0] == "limit"
        assert call()[0] == "limit"
    finally:
        fastattn.set_num_threads(before)


def test_numbers_and_addresses_are_checked_on_a_known_call() -> None:
    query, key, value = arrays_of(value_dim=16)
    out, lse = np.empty_like(query), np.empty(query.shape[:3], "f4")
    lengths = np.array([33, 4])
    for _ in range(2):
        assert c_entry.attend(query, key, value, out, lse=lse, key_lengths=lengths)[0] == _capi.OK
    out[:] = 7
    for wrong in ([34, 4], [33, -1]):
        code, message = c_entry.attend(query, key, value, out, lse=lse, key_lengths=np.array(wrong))
        assert code == _capi.VALUE_ERROR
        assert message.startswith("key_lengths must be in 0..S=33, got")
    assert (out == 7).all()
    wanted, wanted_lse = fastattn.attention(query, key, value, key_lengths=lengths, return_lse=True)
    shared = query.copy()
    assert c_entry.attend(shared, key, value, shared, lse=lse, key_lengths=lengths)[0] == _capi.OK
    assert_same_bits(shared, wanted, "out over query")
    assert_same_bits(lse, wanted_lse, "lse")
    code, message = c_entry.attend(query, key, value, out, lse=out[..., 0], key_lengths=lengths)
    assert (code, message.split(";")[0]) == (_capi.VALUE_ERROR, "lse must not share memory with out")
    of_query = np.lib.stride_tricks.as_strided(query, lse.shape, lse.strides)
    code, message = c_entry.attend(query, key, value, out, lse=of_query, key_lengths=lengths)
    assert (code, message.split(";")[0]) == (_capi.VALUE_ERROR, "lse must not share memory with query")
    room = np.empty_like(lse)
    shared_lengths = room.reshape(-1)[:4].view("i8")
    shared_lengths[:] = lengths
    code, message = c_entry.attend(query, key, value, out, lse=room, key_lengths=shared_lengths)
    assert (code, message.split(";")[0]) == (_capi.VALUE_ERROR, "lse must not share memory with key_lengths")
    assert (shared_lengths == lengths).all()


def test_arrays_side_by_side_do_not_overlap(asked: list[str]) -> None:
    """Unless by their outermost bytes, where rows take turns: such a call is right, and is kept once."""
    query, key, value = arrays_of(value_dim=16)
    room = np.empty(2 * query.size + query.size // 16, "f4")
    placed, out, lse = np.split(room, [query.size, 2 * query.size])
    placed, out, lse = placed.reshape(query.shape), out.reshape(query.shape), lse.reshape(query.shape[:3])
    placed[...] = query
    for _ in range(3):
        assert c_entry.attend(placed, key, value, out, lse=lse)[0] == _capi.OK
    assert asked.count("solve") == 1
    room = np.empty((*query.shape[:3], 2, 16), "f4")
    room[..., 0, :] = query
    asked.clear()
    kept = _capi._driver().kept_count()
    for _ in range(3):
        assert c_entry.attend(room[..., 0, :], key, value, room[..., 1, :], lse=lse)[0] == _capi.OK
        assert_same_bits(room[..., 1, :].copy(), fastattn.attention(query, key, value))
    assert asked.count("solve") == 3
    assert _capi._driver().kept_count() == min(kept + 1, 512)


def test_a_bad_setting_is_told_and_forgotten(monkeypatch: pytest.MonkeyPatch, asked: list[str]) -> None:
    arrays, out = arrays_of(len_q=203, len_k=223), np.empty((2, 4, 203, 12), "f4")
    assert c_entry.attend(*arrays, out)[0] == _capi.OK
    monkeypatch.setenv("FASTATTN_NUM_THREADS", "none")
    _capi._driver().threads_changed()
    if fastattn._machine.host._num_threads is None:
        code, message = c_entry.attend(*arrays, out)
        assert (code, message.startswith("FASTATTN_NUM_THREADS must be")) == (_capi.VALUE_ERROR, True)
    monkeypatch.undo()
    for _ in range(2):
        assert c_entry.attend(*arrays, out)[0] == _capi.OK
    asked.clear()
    assert c_entry.attend(*arrays, out)[0] == _capi.OK
    assert not asked


def test_the_capsule() -> None:
    """By PyCapsule_Import, as NumPy's own is found, by the header, and by ctypes as docs/c-api.md has it."""
    namespace: dict[str, Any] = {}
    exec((ROOT / "docs" / "c-api.md").read_text().split("```python\n")[1].split("```")[0], namespace)
    assert namespace["address"] == _capi.address()
    load = ctypes.pythonapi.PyCapsule_Import
    load.restype, load.argtypes = ctypes.c_void_p, (ctypes.c_char_p, ctypes.c_int)
    assert load(b"fastattn._capi.attention", 0) == _capi.address()
    with pytest.raises(AttributeError, match="no attribute 'attend'"):
        _capi.attend  # noqa: B018


def test_what_must_be_converted_is_not_kept(asked: list[str]) -> None:
    query, key, value = arrays_of()
    key = key.astype("f8")
    out = np.empty((2, 4, 17, 12))
    for _ in range(2):
        assert c_entry.attend(query, key, value, out)[0] == _capi.OK
        assert_same_bits(out, fastattn.attention(query, key, value))
    assert asked.count("solve") == 2


def test_the_oldest_call_goes(asked: list[str]) -> None:
    """More kinds of calls than are kept: all are right, and the first is asked for again."""
    query, key, value = arrays_of(len_q=2, len_k=3)
    wanted = fastattn.attention(query, key, value)
    out = np.empty_like(wanted)
    first = {"scale": 1 / 1024}
    for number in range(1, 601):
        assert c_entry.attend(query, key, value, out, scale=number / 1024)[0] == _capi.OK
    assert len(asked) == 600
    assert _capi._driver().kept_count() == 512
    asked.clear()
    assert c_entry.attend(query, key, value, out, scale=600 / 1024)[0] == _capi.OK
    assert not asked
    assert c_entry.attend(query, key, value, out, **first)[0] == _capi.OK
    assert asked == ["solve"]
    assert_same_bits(out, fastattn.attention(query, key, value, **first))


def test_errors() -> None:
    query, key, value = arrays_of()
    out = np.full((2, 4, 17, 12), 7, "f4")
    wrong: list[tuple[tuple[np.ndarray, ...], dict[str, Any], int, str]] = [
        ((query, key, value, out), {"softcap": -1.0}, _capi.VALUE_ERROR, "softcap must be positive"),
        ((query, key, value, out), {"scale": np.inf}, _capi.VALUE_ERROR, "scale must be"),
        ((query, key, value, out), {"window": (-2, 0)}, _capi.VALUE_ERROR, "window"),
        ((query, key, value, out), {"num_threads": -1}, _capi.VALUE_ERROR, "num_threads must be"),
        ((query[:, :3], key, value, out), {}, _capi.VALUE_ERROR, "the heads of query must be a multiple"),
        ((query, key, value, out.astype("f2")), {}, _capi.TYPE_ERROR, "out must have the result's dtype"),
        ((query.astype(bool), key, value, out), {}, _capi.TYPE_ERROR, "query must have one of the float"),
        ((query, key, value, out), {"mask": query}, _capi.TYPE_ERROR, "mask must have dtype 5"),
        ((query, key, value, out), {"lse": np.empty((2, 4, 17))}, _capi.TYPE_ERROR, "lse must have"),
    ]
    for arrays, options, code, message in wrong:
        got, text = c_entry.attend(*arrays, **options)
        assert (got, text[: len(message)]) == (code, message)
    overlapping = np.lib.stride_tricks.as_strided(out, out.shape, (*out.strides[:2], 4, 4))
    got, text = c_entry.attend(query, key, value, overlapping)
    assert (got, text.startswith("out has elements that share memory")) == (_capi.VALUE_ERROR, True)
    assert (out == 7).all()


def test_wrong_structs() -> None:
    query, key, value = arrays_of()
    out = np.full((2, 4, 17, 12), 7, "f4")
    function = c_entry.function()

    def change(**fields: Any) -> tuple[int, bytes]:
        call = c_entry.make_call(query, key, value, out)
        message = ctypes.create_string_buffer(40)
        call.message, call.message_size = ctypes.cast(message, ctypes.c_char_p), len(message)
        for name, field in fields.items():
            setattr(call, name, field)
        return function(ctypes.byref(call)), message.value

    assert change(abi_version=2) == change(struct_size=8) == (_capi.ABI_ERROR, b"")
    assert change(causal=3) == (_capi.VALUE_ERROR, b"causal must be 0, 1 or 2, got 3")
    assert change(batch=-1)[0] == _capi.VALUE_ERROR
    code, message = change(key=c_entry.Array())
    assert (code, message) == (_capi.VALUE_ERROR, b"key must be an address, got NULL")
    code, message = change(num_heads=3)  # longer than the buffer, so cut off
    assert (code, message) == (_capi.VALUE_ERROR, b"the heads of query must be a multiple o")
    assert change(num_heads=3, message=None)[0] == _capi.VALUE_ERROR
    assert (out == 7).all()
    assert change() == (_capi.OK, b"")


#: The axes of each array of the struct that it has.
AXES = dict.fromkeys(c_entry.ARRAYS, (0, 1, 2, 3)) | {"lse": (0, 1, 2), "key_lengths": (0,), "sinks": (1,)}
#: What ends up outside of int64, or of all addresses, once it is multiplied by a size of 2 or more.
WILD = st.one_of(st.integers(2**62, 2**63 - 1), st.integers(-(2**63), -(2**60)))


def full_call(**sizes: Any) -> tuple[c_entry.Call, np.ndarray]:
    """A call with every array there is, and its `out`."""
    query, key, value = arrays_of(**sizes)
    batch, heads, len_q, _ = query.shape
    scores = (batch, heads, len_q, key.shape[2])
    out = np.full((*query.shape[:3], value.shape[3]), 7, "f4")
    others = {
        "lse": np.zeros(query.shape[:3], "f4"),
        "mask": np.ones(scores, bool),
        "bias": np.zeros(scores, "f4"),
        "key_lengths": np.full(batch, key.shape[2]),
        "sinks": np.zeros(heads, "f4"),
    }
    call = c_entry.make_call(query, key, value, out, **others)
    call.arrays = (query, key, value, others)  # which the struct keeps alive by their addresses alone
    return call, out


@given(st.sampled_from([(name, axis) for name, axes in AXES.items() for axis in axes]), WILD)
def test_strides_that_lead_out_of_the_address_space(place: tuple[str, int], stride: int) -> None:
    name, axis = place
    call, out = full_call(len_q=3, len_k=3)
    message = ctypes.create_string_buffer(200)
    call.message, call.message_size = ctypes.cast(message, ctypes.c_char_p), len(message)
    getattr(call, name).strides[axis] = stride
    for _ in range(2):
        assert c_entry.function()(ctypes.byref(call)) == _capi.VALUE_ERROR
        assert message.value.decode().startswith(f"{name} must lie within the address space, got sizes (")
    assert (out == 7).all()


@given(
    st.sampled_from(["batch", "num_heads", "num_kv_heads", "len_q", "len_k", "head_dim", "value_dim"]),
    st.one_of(st.integers(2**59, 2**63 - 1), st.integers(-(2**63), -1)),
)
def test_sizes_that_lead_out_of_the_address_space(name: str, size: int) -> None:
    call, out = full_call(len_q=3, len_k=3)
    message = ctypes.create_string_buffer(200)
    call.message, call.message_size = ctypes.cast(message, ctypes.c_char_p), len(message)
    setattr(call, name, size)
    assert c_entry.function()(ctypes.byref(call)) == _capi.VALUE_ERROR
    reason = "sizes must not be negative" if size < 0 else " must lie within the address space"
    assert reason in message.value.decode()
    assert (out == 7).all()


@pytest.mark.parametrize(
    "sizes", [{"batch": 2**62, "num_heads": 0, "num_kv_heads": 0}, {"batch": 0, "len_q": 2**62}], ids=str
)
def test_empty_arrays_of_sizes_that_no_array_has(sizes: dict[str, int]) -> None:
    """Which are in no address space either, and the message says whose they are."""
    call, out = full_call(len_q=3, len_k=3)
    message = ctypes.create_string_buffer(200)
    call.message, call.message_size = ctypes.cast(message, ctypes.c_char_p), len(message)
    for name, size in sizes.items():
        setattr(call, name, size)
    assert c_entry.function()(ctypes.byref(call)) == _capi.VALUE_ERROR
    assert " must lie within the address space, got sizes (" in message.value.decode()
    assert (out == 7).all()


@given(st.data())
def test_a_step_that_is_not_taken_may_be_any(data: st.DataObject) -> None:
    """Along an axis of one element, in an empty array, and of an axis that the array does not have."""
    sizes = data.draw(st.sampled_from([{"lead": (1,), "len_q": 1, "len_k": 1}, {"len_q": 0}, {"len_k": 0}]))
    expected, wanted = full_call(**sizes)
    call, out = full_call(**sizes)
    assert c_entry.function()(ctypes.byref(expected)) == _capi.OK
    shapes = dict(zip(c_entry.ARRAYS, (x.shape for x in (*call.arrays[:3], out)), strict=False))
    shapes |= {name: x.shape for name, x in call.arrays[3].items()}
    for name, axes in AXES.items():
        for axis in range(4):
            if axis not in axes or 0 in shapes[name] or shapes[name][axes.index(axis)] == 1:
                getattr(call, name).strides[axis] = data.draw(WILD)
    for _ in range(2):
        out[:] = 7
        assert c_entry.function()(ctypes.byref(call)) == _capi.OK
        assert_same_bits(out, wanted)


def test_codes_of_errors() -> None:
    assert _capi.code_of(MemoryError()) == _capi.NO_MEMORY
    assert _capi.code_of(fastattn.BackendError()) == _capi.NO_BACKEND
    assert _capi.code_of(KeyboardInterrupt()) == _capi.FAILED


def test_another_backend(monkeypatch: pytest.MonkeyPatch, asked: list[str]) -> None:
    """FASTATTN_BACKEND holds for calls that are new; nothing is kept of one that another backend did."""
    monkeypatch.setenv("FASTATTN_BACKEND", "reference")
    arrays, out = arrays_of(len_q=19), np.empty((2, 4, 19, 12), "f4")
    for _ in range(2):
        assert c_entry.attend(*arrays, out)[0] == _capi.OK
        assert_same_bits(out, fastattn.attention(*arrays, backend="reference"))
    assert asked == ["solve"] * 2
    monkeypatch.setenv("FASTATTN_BACKEND", "cuda")
    code, message = c_entry.attend(*arrays, out)
    assert code == _capi.NO_BACKEND
    assert "backend 'cuda' cannot take this problem" in message


def test_without_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cython_backend, "driver", None)
    monkeypatch.setattr(cython_backend, "_missing", "nothing was built", raising=False)
    _capi._driver.cache_clear()
    try:
        with pytest.raises(
            fastattn.BackendError, match="C entry is part of the compiled kernels, and nothing"
        ):
            _capi.address()
    finally:
        monkeypatch.undo()
        _capi._driver()


def test_many_threads_at_once() -> None:
    """Of shapes that all of them use, new ones among them, on several threads each."""
    problems = [arrays_of(len_q=60 + n % 7, len_k=90, heads=4) for n in range(14)]
    wanted = [fastattn.attention(*arrays) for arrays in problems]

    def work(thread: int) -> int:
        for turn in range(20):
            number = (thread * 3 + turn) % len(problems)
            out = np.full_like(wanted[number], 7)
            options = {"num_threads": 1 + turn % 2} if turn % 3 else {}
            assert c_entry.attend(*problems[number], out, **options) == (_capi.OK, "")
            assert_same_bits(out, wanted[number])
        return 1

    with ThreadPoolExecutor(6) as pool:
        assert sum(pool.map(work, range(6))) == 6


@pytest.mark.slow
def test_calls_that_go_while_they_are_read() -> None:
    """More kinds than are kept, on several threads: a record that is overwritten meanwhile is not used."""
    query, key, value = arrays_of(len_q=6, len_k=6, lead=(1,))
    scales = [(n + 1) / 64 for n in range(700)]
    wanted = [fastattn.attention(query, key, value, scale=scale) for scale in scales]

    def work(thread: int) -> int:
        rng, function, out = np.random.default_rng(thread), c_entry.function(), np.empty_like(wanted[0])
        calls = [c_entry.make_call(query, key, value, out, scale=scale) for scale in scales]
        for turn in range(10_000):
            number = int(rng.integers(700)) if thread % 2 else int(rng.integers(20)) + turn // 20
            assert function(ctypes.byref(calls[number])) == _capi.OK
            assert (out == wanted[number]).all()
        return 1

    with ThreadPoolExecutor(6) as pool:
        assert sum(pool.map(work, range(6))) == 6


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_in_a_forked_child() -> None:
    code = """
import os, signal
import numpy as np
import fastattn
from tests import c_entry
query, key, value = np.random.default_rng(0).standard_normal((3, 1, 4, 300, 16)).astype("f4")
wanted = fastattn.attention(query, key, value)
out = np.empty_like(query)
for _ in range(2):
    assert c_entry.attend(query, key, value, out)[0] == 0
pid = os.fork()
if pid == 0:
    signal.alarm(60)
    for _ in range(2):
        out[:] = 0
        assert c_entry.attend(query, key, value, out)[0] == 0
        assert (out == wanted).all()
    assert c_entry.attend(query[:, :2], key[:, :2], value[:, :2], out[:, :2])[0] == 0
    os._exit(7)
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""
    assert python(code, env={"PYTHONWARNINGS": "ignore", "FASTATTN_NUM_THREADS": "2"}).split() == ["7"]


# From C --------------------------------------------------------------------------------------------

COMPILER = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="no C compiler")
INCLUDE = ["-I", fastattn.get_include()]


def compile_c(source: str, out: Path, *flags: str) -> Path:
    path = out.with_suffix(".c")
    path.write_text(source)
    subprocess.run(
        [str(COMPILER), *flags, *INCLUDE, str(path), "-o", str(out), "-lm"], check=True, timeout=60
    )
    return out


@needs_compiler
def test_the_struct_is_that_of_the_header(tmp_path: Path) -> None:
    """Of C99 and of C++, without warnings; and as tests, Numba and Python know it."""
    fields = [name for name, _ in c_entry.Call._fields_]
    offsets = "".join(f'printf("%zu ", offsetof(fastattn_call, {name}));' for name in fields)
    source = f"""#include <fastattn.h>
#include <stddef.h>
#include <stdio.h>
int main(void) {{
    fastattn_call call;
    fastattn_init(&call);
    fastattn_set(&call.query, &call, FASTATTN_DTYPE_FLOAT64, 3, 5, 7);
    {offsets}
    printf("%zu %d %d\\n", sizeof(call), (int)call.query.strides[0], call.scale != call.scale);
    return 0;
}}
"""
    strict = ("-Wall", "-Wextra", "-Werror", "-pedantic")
    for number, flags in enumerate([("-std=c99",), ("-x", "c++", "-std=c++11")]):
        if "c++" in flags and shutil.which("g++") is None:
            continue
        program = compile_c(source, tmp_path / f"offsets{number}", *flags, *strict)
        printed = subprocess.run([program], capture_output=True, check=True, timeout=60).stdout.split()
        wanted = [getattr(c_entry.Call, name).offset for name in fields]
        assert [int(word) for word in printed] == [*wanted, ctypes.sizeof(c_entry.Call), 3 * 5 * 7 * 8, 1]


@needs_compiler
def test_codes_are_those_of_the_header() -> None:
    text = Path(fastattn.get_include(), "fastattn.h").read_text()
    for number, name in enumerate(
        ["OK", "VALUE_ERROR", "TYPE_ERROR", "NO_BACKEND", "NO_MEMORY", "ABI_ERROR"]
    ):
        assert f"FASTATTN_{name} = {number}," in text
        assert getattr(_capi, name) == number
    for name in ("FLOAT32", "FLOAT64", "FLOAT16", "BFLOAT16", "BOOL", "INT64"):
        assert f"FASTATTN_DTYPE_{name} = {getattr(_capi, name)}" in text


THREAD = """
#include <fastattn.h>
#include <pthread.h>
#include <stdlib.h>
#include <time.h>
typedef struct { fastattn_attention_function attend; fastattn_call *call; long times; } Work;
static void *work(void *p) {
    Work *w = (Work *)p;
    int code = 0;
    for (long n = 0; n < w->times && code == 0; n++) code = w->attend(w->call);
    return (void *)(long)code;
}
/* Calls on another thread, and waits for it. */
int on_thread(fastattn_attention_function attend, fastattn_call *call, long times) {
    Work w = {attend, call, times};
    pthread_t thread;
    void *code = NULL;
    if (pthread_create(&thread, NULL, work, &w) != 0) return -1;
    pthread_join(thread, &code);
    return (int)(long)code;
}
"""


@needs_compiler
@pytest.mark.skipif(sysconfig.get_platform().startswith("win"), reason="needs POSIX threads")
def test_a_known_call_needs_no_gil(tmp_path: Path) -> None:
    """It runs on another thread while this one holds the GIL and waits for it."""
    library = compile_c(THREAD, tmp_path / "thread.so", "-shared", "-fPIC", "-pthread")
    code = f"""
import ctypes
import numpy as np
from fastattn._api import c_entry as _capi
from tests import c_entry
arrays = np.random.default_rng(0).standard_normal((3, 1, 4, 200, 16)).astype("f4")
out, lengths = np.empty((1, 4, 200, 16), "f4"), np.array([190])
call = c_entry.make_call(*arrays, out, num_threads=1, key_lengths=lengths)
holding = ctypes.PyDLL({str(library)!r}).on_thread
assert c_entry.function()(ctypes.byref(call)) == 0
small = c_entry.make_call(*(a[:, :, :4] for a in arrays), out[:, :, :4])
assert c_entry.function()(ctypes.byref(small)) == 0
for known in (small, call):
    assert holding(ctypes.c_void_p(_capi.address()), ctypes.byref(known), ctypes.c_long(20)) == 0
print("done")
"""
    assert python(code, timeout=60).split() == ["done"]


EXAMPLES = ROOT / "docs" / "examples" / "c_entry"
SUFFIX = sysconfig.get_config_var("EXT_SUFFIX")


def load(path: Path) -> Any:
    """An extension module from its file."""
    spec = importlib.util.spec_from_file_location(path.name.split(".")[0], path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def build_module(source: str, out: Path) -> Any:
    return load(
        compile_c(source, out, "-shared", "-fPIC", "-O1", "-I", sysconfig.get_path("include"), "-Wall")
    )


@needs_compiler
def test_the_example_in_c(tmp_path: Path) -> None:
    module = build_module((EXAMPLES / "attend_c.c").read_text(), tmp_path / f"attend_c{SUFFIX}")
    query, key, value = random_arrays(heads=4, kv_heads=2, value_dim=6)
    out = np.empty((17, 4, 6), "f4").swapaxes(0, 1)
    for _ in range(2):
        out[:] = 7
        module.attend(query, key, value, out)
        assert_same_bits(
            np.ascontiguousarray(out), fastattn.attention(query, key, value, causal="bottom_right")
        )
    with pytest.raises(ValueError, match="a multiple of those of key and value, got 4 and 3"):
        module.attend(query, *(np.concatenate([x, x[:1]]) for x in (key, value)), out)
    with pytest.raises(ValueError, match="shapes must be"):
        module.attend(query, key, value[:, 1:], out)
    with pytest.raises(TypeError, match="argument 1 must have three axes of float32"):
        module.attend(query.astype("f8"), key, value, out)


@needs_compiler
@pytest.mark.slow
def test_the_example_in_cython(tmp_path: Path) -> None:
    """Some seconds of Cython and of the compiler."""
    pytest.importorskip("Cython")
    source = EXAMPLES / "attend_cython.pyx"
    command = [sys.executable, "-m", "cython", "-I", str(ROOT), str(source), "-o", str(tmp_path / "cython.c")]
    subprocess.run(command, check=True, timeout=60)
    module = build_module((tmp_path / "cython.c").read_text(), tmp_path / f"attend_cython{SUFFIX}")
    query, key, value = random_arrays(heads=5, value_dim=6)
    out = np.empty((5, 17, 6), "f4")
    module.attend_each(query, key, value, out)
    assert_same_bits(out, fastattn.attention(query, key, value))
    with pytest.raises(ValueError, match="head_dim of query and key must be at least 1"):
        module.attend_each(query[..., :0].copy(), key[..., :0].copy(), value, out)


def test_the_folder_of_headers_is_in_the_package() -> None:
    assert Path(fastattn.get_include()) == ROOT / "fastattn" / "include"
