"""The custom call of `fastattn.integrations.jax`: the bits of `fastattn.attention`, however transformed.

Gradients, and what both ways of the forward pass share, are in `test_integrations`.
"""

from __future__ import annotations

import shutil
import subprocess
import sysconfig
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fastattn
from fastattn import masks
from fastattn.backends.cython import backend as cython_backend
from tests.c_entry import OPTIONS
from tests.cases import random_arrays
from tests.process import ROOT
from tests.tolerances import assert_same_bits

jax = pytest.importorskip("jax")
pytestmark = pytest.mark.skipif(
    bool(cython_backend.backend.unavailable_reasons()), reason="the C entry is part of the compiled kernels"
)
DTYPES = ("float32", "float64", "float16", "bfloat16")


@pytest.fixture(autouse=True)
def wide() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


def attention(*arrays: Any, **options: Any) -> Any:
    from fastattn.integrations.jax import attention

    return attention(*arrays, **options)


def arrays_of(dtype: str = "float32", **sizes: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    arrays = random_arrays(**({"lead": (2,), "heads": 4, "kv_heads": 2, "value_dim": 12} | sizes))
    return tuple(array.astype(jax.numpy.dtype(dtype)) for array in arrays)


def options_of(name: str) -> dict[str, Any]:
    return {option: given for option, given in OPTIONS[name].items() if option != "num_threads"}


def is_custom_call(function: Any, *arrays: Any) -> bool:
    text = jax.jit(function).lower(*arrays).as_text()
    assert ("fastattn_attention" in text) != ("callback" in text)
    return "fastattn_attention" in text


def test_which_calls_are_custom_calls() -> None:

    arrays = arrays_of()
    for name in OPTIONS:
        assert is_custom_call(partial(attention, **options_of(name)), *arrays)
    assert not is_custom_call(lambda *x: attention(*x, mask=masks.GlobalTokens([1])), *arrays)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", OPTIONS)
def test_bits(name: str, dtype: str) -> None:
    arrays, options = arrays_of(dtype), options_of(name)
    wanted = fastattn.attention(*arrays, **options)
    assert_same_bits(np.asarray(attention(*arrays, **options)), wanted)


def test_bits_under_jit() -> None:
    """A first and a second time, with other numbers."""
    options = options_of("all")
    arrays = ("mask", "bias", "key_lengths", "sinks")
    static = {name: given for name, given in options.items() if name not in arrays}
    compiled = jax.jit(lambda x, given: attention(*x, **given, **static))
    for sign in (1, -1):
        given = {name: options[name] for name in arrays}
        x = tuple(sign * array for array in arrays_of())
        assert_same_bits(np.asarray(compiled(x, given)), fastattn.attention(*x, **options))


@pytest.mark.parametrize(
    "leads",
    [((), (), ()), ((2, 3), (3,), (2, 1)), ((1, 3), (2, 1), (2, 3)), ((3,), (2, 3), ()), ((2, 0), (1,), ())],
)
def test_leading_axes(leads: tuple[tuple[int, ...], ...]) -> None:
    rng = np.random.default_rng(0)
    query, key, value = (rng.standard_normal((*lead, 2, 5, 8)).astype("f4") for lead in leads)
    wanted = fastattn.attention(query, key, value)
    assert_same_bits(np.asarray(attention(query, key, value)), wanted)


NAMES = ("query", "key", "value", "mask", "bias", "key_lengths", "sinks")


@pytest.mark.parametrize(
    "mapped",
    [
        pytest.param(mapped, marks=() if sum(mapped) in (1, 7) else pytest.mark.slow)
        for mapped in product((False, True), repeat=len(NAMES))
        if any(mapped)
    ],
    ids=lambda mapped: ",".join(name for name, is_mapped in zip(NAMES, mapped, strict=True) if is_mapped),
)
def test_vmap_over_any_arguments(mapped: tuple[bool, ...]) -> None:
    arrays = dict(zip(NAMES, arrays_of(), strict=False)) | {
        name: OPTIONS["all"][name] for name in ("mask", "bias", "key_lengths", "sinks")
    }
    several = {name: np.stack([x, x[..., ::-1], x]) for name, x in arrays.items()}
    given = {name: several[name] if m else arrays[name] for name, m in zip(NAMES, mapped, strict=True)}
    axes = {name: 0 if m else None for name, m in zip(NAMES, mapped, strict=True)}

    def call(given: dict[str, Any]) -> Any:
        return attention(given["query"], given["key"], given["value"], causal="bottom_right", **others(given))

    def others(given: dict[str, Any]) -> dict[str, Any]:
        return {name: given[name] for name in NAMES[3:]}

    got = jax.vmap(call, in_axes=(axes,))(given)
    for number in range(3):
        one = {
            name: np.ascontiguousarray(given[name][number]) if axes[name] == 0 else given[name]
            for name in NAMES
        }
        wanted = fastattn.attention(
            one["query"], one["key"], one["value"], causal="bottom_right", **others(one)
        )
        assert_same_bits(np.asarray(got[number]), wanted)


def test_vmap_of_vmap() -> None:
    query, key, value = arrays_of(lead=(2, 3, 2))
    sinks = np.random.default_rng(0).standard_normal((3, 4)).astype("f4")
    inner = jax.vmap(lambda q, k, v, sinks: attention(q, k, v, sinks=sinks))
    got = jax.jit(jax.vmap(inner, in_axes=(0, 0, None, None)))(query, key, value[0], sinks)
    for i, j in product(range(2), range(3)):
        wanted = fastattn.attention(query[i, j], key[i, j], value[0, j], sinks=sinks[j])
        assert_same_bits(np.asarray(got[i, j]), wanted)


@pytest.mark.parametrize("dtype", ["int32", "uint8", "int64"])
def test_key_lengths_of_any_integers(dtype: str) -> None:
    arrays, lengths = arrays_of(), np.array([3, 30], dtype)
    wanted = fastattn.attention(*arrays, key_lengths=lengths)
    assert_same_bits(np.asarray(attention(*arrays, key_lengths=lengths)), wanted)
    assert_same_bits(
        np.asarray(attention(*arrays, key_lengths=7)), fastattn.attention(*arrays, key_lengths=7)
    )


def test_a_mask_of_integers_and_sinks_of_other_floats() -> None:
    arrays = arrays_of()
    options = {"mask": OPTIONS["mask"]["mask"] * 3, "sinks": np.linspace(-1, 1, 4)}
    assert_same_bits(np.asarray(attention(*arrays, **options)), fastattn.attention(*arrays, **options))


@pytest.mark.parametrize("by", ["custom call", "callback"])
def test_errors_when_it_is_traced(by: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything runs, with the shapes that the caller gave."""
    from fastattn.integrations import jax as integration

    monkeypatch.setattr(integration, "_has_custom_call", by == "custom call")
    query, key, value = arrays_of()
    wrong: list[tuple[type[Exception], str, tuple[Any, ...], dict[str, Any]]] = [
        (ValueError, "same length, got 33 and 32", (query, key, value[:, :, 1:]), {}),
        (ValueError, "softcap must be positive", (query, key, value), {"softcap": -1.0}),
        (ValueError, "scale must be", (query, key, value), {"scale": np.nan}),
        (TypeError, "bias must be one array here, got tuple", (query, key, value), {"bias": (query, query)}),
        (TypeError, "bias must be one array here, got Relative", (query, key, value),
         {"bias": fastattn.biases.Relative([1.0])}),
        (ValueError, r"or have shape \(H,\) = \(4,\)", (query, key, value), {"scale": np.ones(3)}),
        (ValueError, "causal=True needs L == S", (query, key, value), {"causal": True}),
        (TypeError, "use bias=", (query, key, value), {"mask": np.zeros((17, 33))}),
        (ValueError, "bias of shape", (query, key, value), {"bias": np.zeros((3, 1, 17, 33))}),
        # Arrays with an axis for the items and none for heads: in the shape that they were given.
        (ValueError, r"mask of shape \(2, 17, 33\) .* say mask\[:, None\]; query", (query, key, value),
         {"mask": np.ones((2, 17, 33), bool)}),
        (ValueError, r"bias of shape \(2, 17, 33\) .* say bias\[:, None\]; query", (query, key, value),
         {"bias": np.zeros((2, 17, 33), np.float32)}),
        (ValueError, r"mask of shape \(2, 33\) .* say mask\[:, None, None, :\]", (query, key, value),
         {"mask": np.ones((2, 33), bool)}),
        (ValueError, r"mask of shape \(8, 17, 33\) .* say mask.reshape\(2, 4, 17, 33\)", (query, key, value),
         {"mask": np.ones((8, 17, 33), bool)}),
        (ValueError, "index must be below S=33, got 33; query", (query, key, value),
         {"mask": masks.GlobalTokens([33])}),
        (TypeError, "got True; for causal attention say causal=True", (query, key, value), {"mask": True}),
        (ValueError, "does not broadcast to the leading batch axes", (query, key, value),
         {"mask": masks.KeyLengths([1, 2, 3])}),
        (
            ValueError,
            r"mask of shape \(2, 17, 33\).* say mask\[:, None\]",
            (query, key, value),
            {"mask": np.ones((2, 17, 33), bool)},
        ),
        (
            ValueError,
            r"batch axes of .* do not broadcast; query \(3, 4, 17, 16\)",
            (np.ones((3, 4, 17, 16)), key, value),
            {},
        ),
        (ValueError, "two axes stand for one head", (query[0, 0], key[0, :1], value[0, :1]), {}),
        (ValueError, "at least 2 axes", (np.float32(1), key, value), {}),
        (
            ValueError,
            r"sinks must have shape \(H,\) = \(4,\), got \(2, 4\)",
            (query, key, value),
            {"sinks": np.zeros((2, 4))},
        ),
        (TypeError, "two 16-bit types", (query.astype("f2"), key.astype(jax.numpy.bfloat16), value), {}),
        (ValueError, r"mask Causal\(\) needs L == S", (query, key, value), {"mask": masks.Causal()}),
        (ValueError, "index must be below S=33", (query, key, value), {"mask": masks.GlobalTokens([40])}),
        (
            ValueError,
            r"got \(2, 4\)",
            (query, key, value),
            {"mask": masks.NotSelf(), "sinks": np.zeros((2, 4))},
        ),
    ]  # fmt: skip
    for kind, message, arrays, options in wrong:
        for call in (lambda way: way(), jax.eval_shape):
            with pytest.raises(kind, match=message):
                call(partial(attention, *arrays, **options))


@pytest.mark.parametrize(
    ("name", "x"),
    [("softcap", 2.0), ("causal", True), ("window", (2, 0)), ("window", (2, None))],
)
def test_options_that_are_traced_are_named(name: str, x: Any) -> None:
    arrays = arrays_of(len_k=17)

    def call(x: Any) -> Any:
        return attention(*arrays, **{name: x})

    several = jax.tree.map(lambda x: np.array([x, x]), x)
    ways = [jax.jit(call), lambda x: jax.vmap(call)(several)]
    if isinstance(x, float):
        ways.append(jax.grad(lambda x: call(x).sum()))
    for way in ways:
        with pytest.raises(TypeError, match=f"^{name} must be known when attention is traced, got .*Tracer"):
            way(x)
    wanted = fastattn.attention(*arrays, **{name: x})
    assert_same_bits(np.asarray(jax.jit(lambda: call(x))()), wanted)
    known_ways = (jax.numpy.asarray(x), np.asarray(x)[()]) if isinstance(x, float) else ()
    known_ways = (np.array(x), list(x)) if x == (2, 0) else known_ways
    for known in known_ways:
        assert_same_bits(np.asarray(jax.jit(lambda known=known: call(known))()), wanted)


@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
@pytest.mark.parametrize("scale", [0.3, np.array([0.3, -1.0, 0.0, 2.0])], ids=["a number", "of heads"])
def test_a_learned_scale(scale: Any, dtype: str) -> None:
    """Traced, mapped and differentiated: the derivative is that of differences."""
    arrays = arrays_of(dtype, len_k=17)
    wanted = fastattn.attention(*arrays, scale=scale)

    def call(scale: Any) -> Any:
        return attention(*arrays, scale=scale)

    tolerance = (
        2.0**-7 if dtype == "bfloat16" else 1e-13
    )  # a number that is known is a factor of the exponent
    for got in (jax.jit(call)(scale), jax.vmap(call)(np.array([scale, scale]))[1], call(scale)):
        assert got.dtype == wanted.dtype
        np.testing.assert_allclose(np.asarray(got, float), wanted.astype(float), rtol=tolerance, atol=1e-13)
    if dtype == "float64":
        loss = jax.jit(lambda scale: (call(scale) ** 2).sum())
        along = np.random.default_rng(0).standard_normal(np.shape(scale))
        slope = (loss(scale + 1e-5 * along) - loss(scale - 1e-5 * along)) / 2e-5
        np.testing.assert_allclose((jax.grad(loss)(scale) * along).sum(), slope, rtol=1e-6)


def test_export() -> None:
    """Of known sizes; others are refused, by name."""
    from jax import export

    check = export.DisabledSafetyCheck.custom_call("fastattn_attention")
    (n,) = export.symbolic_shape("n")
    query, key, value = arrays_of()
    for name, shape in {"query": (n, 4, 17, 16), "key": (2, 2, n, 16), "mask": (n, 33)}.items():
        given = dict(zip(NAMES, (query, key, value, np.ones((17, 33), bool)), strict=False))
        described = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in given.items()}
        described[name] = jax.ShapeDtypeStruct(shape, given[name].dtype)
        with pytest.raises(NotImplementedError, match=f"sizes that are numbers, got {name} "):
            export.export(jax.jit(lambda given: attention(**given)), disabled_checks=[check])(described)
    exported = export.export(jax.jit(attention), disabled_checks=[check])(query, key, value)
    again = export.deserialize(exported.serialize())
    assert_same_bits(np.asarray(again.call(query, key, value)), fastattn.attention(query, key, value))


@pytest.mark.parametrize("flag", ["jax_debug_infs", pytest.param("jax_debug_nans", marks=pytest.mark.slow)])
@pytest.mark.parametrize("by", ["custom call", "callback"])
def test_a_query_without_keys_is_nothing_to_debug(by: str, flag: str) -> None:
    """Eager or not, and with lse saved for gradients beyond a `jit` or a loop, where JAX looks at it."""

    query, key, value = map(jax.numpy.asarray, arrays_of(value_dim=16))
    lengths = np.array([0, 3])
    options: dict[str, Any] = {"key_lengths": lengths}
    if by == "callback":
        options = {"mask": masks.KeyLengths(lengths)}

    def loss(query: Any) -> Any:
        return attention(query, key, value, **options).sum()

    def in_loop(query: Any) -> Any:
        return jax.lax.scan(lambda x, _: (x + loss(query), None), 0.0, None, length=2)[0]

    def several(query: Any) -> Any:
        return jax.vmap(loss)(query[None]).sum()

    jax.config.update(flag, True)
    try:
        out = attention(query, key, value, **options)
        gradients = [jax.grad(way)(query) for way in (loss, jax.jit(loss), several, in_loop)]
    finally:
        jax.config.update(flag, False)
    assert_same_bits(np.asarray(out), fastattn.attention(*map(np.asarray, (query, key, value)), **options))
    expected = np.asarray(jax.grad(loss)(query))
    assert (expected[0] == 0).all()
    assert (expected[1] != 0).any()
    for gradient, times in zip(gradients, (1, 1, 1, 2), strict=True):
        assert_same_bits(np.asarray(gradient), times * expected)


def test_errors_when_it_runs() -> None:
    arrays = arrays_of()
    compiled = jax.jit(lambda lengths: attention(*arrays, key_lengths=lengths))
    for _ in range(2):
        with pytest.raises(jax.errors.JaxRuntimeError, match=r"INVALID_ARGUMENT.*must be in 0..S=33, got 34"):
            compiled(np.array([3, 34])).block_until_ready()
        compiled(np.array([3, 33])).block_until_ready()


def test_donated_buffers() -> None:
    query, key, value = arrays_of(value_dim=16)
    wanted = fastattn.attention(query, key, value)
    compiled = jax.jit(attention, donate_argnums=0)
    given = jax.numpy.asarray(query.copy())
    assert_same_bits(np.asarray(compiled(given, key, value)), wanted)
    assert given.is_deleted()


def test_many_threads_at_once() -> None:
    problems = [arrays_of(len_q=20 + n) for n in range(6)]
    compiled = jax.jit(attention)
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda n: np.asarray(compiled(*problems[n % 6])), range(24)))
    for n, out in enumerate(found):
        assert_same_bits(out, fastattn.attention(*problems[n % 6]))


def test_inside_of_a_loop() -> None:
    """One call in a compiled loop that feeds it with its result."""
    query, key, value = arrays_of(value_dim=16)
    got = jax.lax.fori_loop(0, 3, lambda _, x: attention(x, key, value), jax.numpy.asarray(query))
    wanted = query
    for _ in range(3):
        wanted = fastattn.attention(wanted, key, value)
    assert_same_bits(np.asarray(got), wanted)


def test_without_the_custom_call(monkeypatch: pytest.MonkeyPatch) -> None:
    from fastattn.integrations import jax as integration

    monkeypatch.setattr(integration, "_has_custom_call", False)
    arrays, options = arrays_of(), options_of("all")
    assert not is_custom_call(lambda *x: attention(*x, **options), *arrays)
    assert_same_bits(np.asarray(attention(*arrays, **options)), fastattn.attention(*arrays, **options))


#: The structs of ``_xla.c``, and what the header of JAX calls them and their fields.
STRUCTS = {
    "xla_extension": ("XLA_FFI_Extension_Base", "struct_size kind=type next"),
    "xla_version": (
        "XLA_FFI_Api_Version",
        "struct_size extensions=extension_start major=major_version minor=minor_version",
    ),
    "xla_metadata": ("XLA_FFI_Metadata", "struct_size version=api_version traits"),
    "xla_question": ("XLA_FFI_Metadata_Extension", "head=extension_base metadata"),
    "xla_new_error": (
        "XLA_FFI_Error_Create_Args",
        "struct_size extensions=extension_start message code=errc",
    ),
    "xla_api": (
        "XLA_FFI_Api",
        "struct_size extensions=extension_start version=api_version internal=internal_api "
        "new_error=XLA_FFI_Error_Create",
    ),
    "xla_buffer": ("XLA_FFI_Buffer", "struct_size extensions=extension_start dtype data rank shape=dims"),
    "xla_buffers": ("XLA_FFI_Args", "struct_size extensions=extension_start n=size kinds=types buffers=args"),
    "xla_name": ("XLA_FFI_ByteSpan", "text=ptr n=len"),
    "xla_scalar": ("XLA_FFI_Scalar", "dtype number=value"),
    "xla_attributes": (
        "XLA_FFI_Attrs",
        "struct_size extensions=extension_start n=size kinds=types names attributes=attrs",
    ),
    "xla_frame": (
        "XLA_FFI_CallFrame",
        "struct_size extensions=extension_start api context=ctx stage arguments=args results=rets "
        "attributes=attrs",
    ),
}
CODES = {
    "XLA_QUESTION": "XLA_FFI_Extension_Metadata",
    "XLA_EXECUTE": "XLA_FFI_ExecutionStage_EXECUTE",
    "XLA_SCALAR": "XLA_FFI_AttrType_SCALAR",
    "XLA_INVALID_ARGUMENT": "XLA_FFI_Error_Code_INVALID_ARGUMENT",
    "XLA_RESOURCE_EXHAUSTED": "XLA_FFI_Error_Code_RESOURCE_EXHAUSTED",
    "XLA_INTERNAL": "XLA_FFI_Error_Code_INTERNAL",
} | {
    f"XLA_{name}": f"XLA_FFI_DataType_{name}" for name in ("PRED", "S32", "S64", "F16", "F32", "F64", "BF16")
}


def test_the_structs_are_those_of_xla(tmp_path: Path) -> None:
    """As the header of the JAX that is installed has them."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        pytest.skip("no C compiler")
    checks = []
    for own, (theirs, fields) in STRUCTS.items():
        for field in fields.split():
            name, _, their_name = field.partition("=")
            their_name = their_name or name
            checks += [
                f"offsetof({own}, {name}) == offsetof({theirs}, {their_name})",
                f"sizeof((({own} *)0)->{name}) <= sizeof((({theirs} *)0)->{their_name})",
            ]
    checks += [f"(int){own} == (int){theirs}" for own, theirs in CODES.items()]
    checks += ["sizeof(XLA_FFI_Rets) == sizeof(xla_buffers)", "XLA_FFI_API_MAJOR == 0"]
    source = tmp_path / "structs.c"
    asserts = "\n".join(f'_Static_assert({check}, "{check}");' for check in checks)
    source.write_text(
        f'#include "{ROOT}/fastattn/integrations/_xla.c"\n#include <xla/ffi/api/c_api.h>\n{asserts}\n'
    )
    folders = (fastattn.get_include(), jax.ffi.include_dir(), sysconfig.get_path("include"))
    command = [compiler, "-std=gnu11", "-fsyntax-only", str(source), *(f"-I{folder}" for folder in folders)]
    subprocess.run(command, check=True, timeout=60)
