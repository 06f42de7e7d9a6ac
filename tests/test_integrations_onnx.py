"""`fastattn.integrations.onnx`: ONNX's own cases of each operator, and random ones against its reference."""

from __future__ import annotations

from importlib import import_module

import numpy as np
import pytest

onnx = pytest.importorskip("onnx", minversion="1.23")

from onnx.backend.test.case import node as node_cases  # noqa: E402
from onnx.helper import make_graph, make_model, make_node, make_opsetid, make_tensor_value_info  # noqa: E402
from onnx.reference import ReferenceEvaluator  # noqa: E402

from fastattn.integrations.onnx import operators  # noqa: E402
from tests.tolerances import assert_same_bits  # noqa: E402

#: How many cases onnx 1.23 has, so that none is lost unseen.
COUNTS = {
    "Attention": 93,
    "RotaryEmbedding": 8,
    "TensorScatter": 3,
    "FlexAttention": 11,
    "LinearAttention": 14,
    "CausalConvWithState": 13,
}
#: Where onnx keeps the cases whose module has another name.
MODULES = {"LinearAttention": "linear_attention", "CausalConvWithState": "causal_conv_with_state"}


def cases_of(operator):
    import_module(f"onnx.backend.test.case.node.{MODULES.get(operator, operator.lower())}")
    return [
        case
        for case in node_cases._NodeTestCases
        if any(node.op_type == operator for node in case.model.graph.node)
    ]


def run(model, inputs, new_ops=operators):
    names = [it.name for it in model.graph.input]
    return ReferenceEvaluator(model, new_ops=new_ops).run(None, dict(zip(names, inputs, strict=True)))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of onnx's own code, as it makes its cases
@pytest.mark.parametrize("operator", COUNTS)
def test_cases_of_onnx(operator):
    cases = cases_of(operator)
    assert len(cases) >= COUNTS[operator]
    for case in cases:
        for inputs, expected in case.data_sets:
            is_bfloat16 = inputs[0].dtype.name == "bfloat16"
            if is_bfloat16:
                # onnx rounds every step. Ours is the result in float32, rounded once.
                wide = [x.astype(np.float32) if x.dtype.name == "bfloat16" else x for x in inputs]
                expected = run(case.model, wide, new_ops=None)
            for got, wanted in zip(run(case.model, inputs), expected, strict=True):
                if is_bfloat16:
                    assert got.dtype == inputs[0].dtype
                    np.testing.assert_allclose(got.astype(float), wanted, rtol=2**-8, err_msg=case.name)
                else:
                    assert got.dtype == wanted.dtype
                    np.testing.assert_allclose(got, wanted, rtol=case.rtol, atol=1e-6, err_msg=case.name)


def attention_model(inputs, n_outputs=4, **attributes):
    """One Attention node of opset 25 over float64."""
    names = ["Q", "K", "V", "attn_mask", "past_key", "past_value", "nonpad_kv_seqlen"]
    outputs = ["Y", "present_key", "present_value", "qk_matmul_output"][:n_outputs]
    node = make_node(
        "Attention", [name if name in inputs else "" for name in names], outputs, **attributes
    )  # fmt: skip
    described = [
        make_tensor_value_info(
            name, onnx.helper.np_dtype_to_tensor_dtype(inputs[name].dtype), inputs[name].shape
        )
        for name in names
        if name in inputs
    ]
    results = [make_tensor_value_info(name, onnx.TensorProto.DOUBLE, None) for name in outputs]
    graph = make_graph([node], "attention", described, results)
    return make_model(graph, opset_imports=[make_opsetid("", 25)])


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("seed", range(60))
def test_random_attention(seed):
    rng = np.random.default_rng(seed)

    def maybe(make):
        return make() if rng.random() < 0.5 else None

    B, K, G, L, S, D, E = (int(rng.integers(1, n)) for n in (3, 3, 3, 7, 9, 9, 9))
    flat, H = rng.random() < 0.5, K * G
    shapes = {"Q": (B, H, L, D), "K": (B, K, S, D), "V": (B, K, S, E)}
    inputs = {name: rng.standard_normal(shape) for name, shape in shapes.items()}
    past = 0
    if rng.random() < 0.4:
        past = int(rng.integers(0, 6))
        inputs["past_key"] = rng.standard_normal((B, K, past, D))
        inputs["past_value"] = rng.standard_normal((B, K, past, E))
    elif rng.random() < 0.5:
        inputs["nonpad_kv_seqlen"] = rng.integers(0, S + 1, B)
    if rng.random() < 0.6:
        shape = [(L, past + S), (H, L, past + S), (B, 1, L, past + S)][rng.integers(3)]
        shape = (*shape[:-1], int(rng.integers(1, shape[-1] + 1)) if rng.random() < 0.3 else shape[-1])
        numbers = rng.standard_normal(shape)
        inputs["attn_mask"] = (
            numbers > -0.5 if rng.random() < 0.5 else np.where(numbers < -1, -np.inf, numbers)
        )
    attributes = {
        "is_causal": maybe(lambda: 1),
        "scale": maybe(lambda: 0.3),
        "softcap": maybe(lambda: 2.0),
        "left_window_size": maybe(lambda: int(rng.integers(-1, 5))),
        "right_window_size": maybe(lambda: int(rng.integers(-1, 5))),
        "qk_matmul_output_mode": int(rng.integers(0, 4)),
    }
    if flat:
        for name in ("Q", "K", "V"):
            inputs[name] = inputs[name].swapaxes(1, 2).reshape(B, shapes[name][2], -1)
        attributes |= {"q_num_heads": H, "kv_num_heads": K}
    attributes = {name: value for name, value in attributes.items() if value is not None}
    model = attention_model(inputs, **attributes)
    given = [inputs[it.name] for it in model.graph.input]
    before = [x.tobytes() for x in given]
    results = run(model, given)
    assert [x.tobytes() for x in given] == before
    names = ["Y", "present_key", "present_value", "qk_matmul_output"]
    for name, got, wanted in zip(names, results, run(model, given, new_ops=None), strict=True):
        if (
            name == "qk_matmul_output"
            and attributes["qk_matmul_output_mode"] == 0
            and "softcap" in attributes
        ):
            continue  # which onnx's reference gives with the soft-cap, and its text without
        np.testing.assert_allclose(got, wanted, rtol=1e-6, atol=1e-7, err_msg=f"{name} {attributes}")
    assert_same_bits(run(attention_model(inputs, 1, **attributes), given)[0], results[0])


@pytest.mark.parametrize("kind", ["int64", "int8", "uint16"])
def test_a_mask_of_integers_is_added(kind):
    rng = np.random.default_rng(0)
    inputs = {name: rng.standard_normal((2, 3, 4, 5)) for name in ("Q", "K", "V")}
    inputs["attn_mask"] = rng.integers(0, 5, (4, 4)).astype(kind)
    model = attention_model(inputs, 1)
    given = list(inputs.values())
    np.testing.assert_allclose(run(model, given)[0], run(model, given, new_ops=None)[0], rtol=1e-6)


@pytest.mark.parametrize(
    "of_q, of_v", [("float32", "float64"), ("float16", "float32"), ("float64", "float16")]
)
def test_results_are_of_the_type_of_q(of_q, of_v):
    rng = np.random.default_rng(0)
    inputs = {name: rng.standard_normal((1, 2, 4, 5)).astype(of_v if name == "V" else of_q) for name in "QKV"}
    model = attention_model(inputs, 4, qk_matmul_output_mode=3)
    for got, wanted in zip(
        run(model, list(inputs.values())), run(model, list(inputs.values()), new_ops=None), strict=True
    ):
        assert got.dtype == wanted.dtype
        np.testing.assert_allclose(got, wanted, atol=4e-3)


@pytest.mark.parametrize("sizes", [(0, 4, 3), (2, 0, 3), (2, 4, 0)], ids=str)
def test_three_axes_of_size_0(sizes):
    B, L, S = sizes
    inputs = {"Q": np.ones((B, L, 6)), "K": np.ones((B, S, 6)), "V": np.ones((B, S, 4))}
    if not S:  # ONNX's own takes no mean of nothing
        inputs |= {"past_key": np.ones((B, 2, 3, 3)), "past_value": np.ones((B, 2, 3, 2))}
    model = attention_model(inputs, 1, q_num_heads=2, kv_num_heads=2)
    assert run(model, [inputs[it.name] for it in model.graph.input])[0].shape == (B, L, 4)


#: The inputs of operators, in their order.
INPUTS = {
    "Attention": ["Q", "K", "V", "attn_mask", "past_key", "past_value", "nonpad_kv_seqlen"],
    "RotaryEmbedding": ["X", "cos_cache", "sin_cache", "position_ids"],
    "TensorScatter": ["past_cache", "update", "write_indices"],
}
#: Inputs that fit each other.
POSITIONS = np.arange(8).reshape(2, 4)
FITTING = {
    "Attention": {"Q": (2, 4, 5, 8), "K": (2, 2, 7, 8), "V": (2, 2, 7, 6)},
    "RotaryEmbedding": {
        "X": (2, 3, 4, 8), "cos_cache": (9, 4), "sin_cache": (9, 4), "position_ids": POSITIONS
    },
    "TensorScatter": {"past_cache": (2, 3, 5, 4), "update": (2, 3, 2, 4)},
}  # fmt: skip
FLAT = {"Q": (2, 5, 32), "K": (2, 7, 16), "V": (2, 7, 12), "q_num_heads": 4, "kv_num_heads": 2}
PAST = {"past_key": (2, 2, 3, 8), "past_value": (2, 2, 3, 6)}


def run_operator(operator, new_ops=operators, **given):
    """The first output of one node; shapes among its inputs stand for zeros."""
    names = INPUTS[operator]
    inputs = {name: given[name] for name in names if name in given}
    inputs = {name: np.zeros(x, "f4") if isinstance(x, tuple) else x for name, x in inputs.items()}
    attributes = {name: x for name, x in given.items() if name not in names}
    node = make_node(operator, [name if name in inputs else "" for name in names], ["y"], **attributes)
    described = [
        make_tensor_value_info(name, onnx.helper.np_dtype_to_tensor_dtype(x.dtype), x.shape)
        for name, x in inputs.items()
    ]
    graph = make_graph([node], "g", described, [make_tensor_value_info("y", onnx.TensorProto.FLOAT, None)])
    model = make_model(graph, opset_imports=[make_opsetid("", 25)])
    return run(model, list(inputs.values()), new_ops)[0]


#: What each operator says, and what is changed in what fits it.
MISTAKES = {
    "Attention": [
        ("past_key and past_value must be given together", {"past_key": (2, 2, 3, 8)}),
        ("nonpad_kv_seqlen and past_key must not", PAST | {"nonpad_kv_seqlen": np.array([3, 3])}),
        ("left_window_size must be -1 or nonnegative, got -2", {"left_window_size": -2}),
        ("q_num_heads and kv_num_heads must be given for", FLAT | {"q_num_heads": 0}),
        ("q_num_heads must divide the last axis of Q, got 5 and 32", FLAT | {"q_num_heads": 5}),
        ("kv_num_heads must divide the last axis of V, got 2 and 13", FLAT | {"V": (2, 7, 13)}),
        ("q_num_heads must divide the last axis of Q, got -4 and 32", FLAT | {"q_num_heads": -4}),
        ("q_num_heads is 3, and Q has 4 heads", {"q_num_heads": 3}),
        ("Q, K and V must have as many axes, got (2, 4, 5, 8), (2, 7, 16)", {"K": (2, 7, 16)}),
        ("Q must have three axes or four, got (5, 8)", dict.fromkeys("QKV", (5, 8))),
        ("the heads of Q must be a multiple of those of K and V", {"Q": (2, 3, 5, 8)}),
        ("K and V must have the same length, got 7 and 6; Q (2, 4, 5, 8)", {"V": (2, 2, 6, 6)}),
        ("axes of Q, K and V do not broadcast", {"K": (3, 2, 7, 8), "V": (3, 2, 7, 6)}),
        ("attn_mask of shape (5, 9) does not broadcast", {"attn_mask": (5, 9)}),
        ("attn_mask of shape (3, 7) does not", {"attn_mask": np.ones((3, 7), bool)}),
        ("attn_mask", {"attn_mask": np.ones((3, 7), bool), "is_causal": 1}),
        ("attn_mask must have an axis at least", {"attn_mask": np.float32(1).reshape(())}),
        ("attn_mask must be a float16", {"attn_mask": np.ones((5, 7), "c8")}),
        ("nonpad_kv_seqlen must be in 0..S=7, got 8; Q", {"nonpad_kv_seqlen": np.array([3, 8])}),
        ("nonpad_kv_seqlen must be in 0..S=7, got -1; Q", {"nonpad_kv_seqlen": np.array([3, -1])}),
        ("nonpad_kv_seqlen must have shape (2,), got (1,)", {"nonpad_kv_seqlen": np.array([3])}),
        ("nonpad_kv_seqlen must be integers", {"nonpad_kv_seqlen": np.array([3.0, 4.0])}),
        ("past_key must have shape (2, 2, 3, 8), got", PAST | {"past_key": (2, 1, 3, 8)}),
        ("past_value must have shape (2, 2, 3, 6), got", PAST | {"past_value": (2, 2, 4, 6)}),
        ("qk_matmul_output_mode must be one of 0, 1, 2, 3, got 7", {"qk_matmul_output_mode": 7}),
        ("softmax_precision must be one of 1, 10, 11, 16, got 2", {"softmax_precision": 2}),
    ],
    "RotaryEmbedding": [
        ("num_heads must be given for", {"X": (2, 4, 24)}),
        ("num_heads must divide the last axis of X, got 5 and 24", {"X": (2, 4, 24), "num_heads": 5}),
        ("num_heads is 2, and X has 3 heads", {"num_heads": 2}),
        ("X must have three axes or four", {"X": (1, 2, 3, 4, 8)}),
        ("or 0 where that is even; got 0 and a head size of 7", {"X": (2, 3, 4, 7)}),
        ("got 5 and a head size of 8", {"rotary_embedding_dim": 5}),
        ("got 12 and a head size of 8", {"rotary_embedding_dim": 12}),
        ("got -4 and a head size of 8", {"rotary_embedding_dim": -4}),
        ("for rotary_embedding_dim 4, got (9, 4)", {"rotary_embedding_dim": 4}),
        ("for rotary_embedding_dim 8, got (9, 2)", {"cos_cache": (9, 2), "sin_cache": (9, 2)}),
        ("sin_cache must have shape (9, 4), got (9, 1)", {"sin_cache": (9, 1)}),
        ("cos_cache must have shape (2, 4) with position_ids", {"cos_cache": (2, 4, 4)}),
        ("(2, 4, 4) or (1, 4, 4) without position_ids", {"position_ids": None}),
        ("position_ids must have shape (2, 4) or (1, 4), got (4,)", {"position_ids": np.arange(4)}),
        ("position_ids must be in 0..8, the rows of cos_cache", {"position_ids": POSITIONS + 2}),
        ("position_ids must be in 0..8, the rows of cos_cache", {"position_ids": POSITIONS - 1}),
    ],
    "TensorScatter": [
        ("write_indices must be in 0..3 in linear mode", {"write_indices": np.array([0, 4])}),
        ("write_indices must be in 0..3 in linear mode", {"write_indices": np.array([2**63 - 1, 0])}),
        ("write_indices must be in 0..3 in linear mode", {"write_indices": np.array([-1, 0])}),
        ("write_indices must have shape (2,), got (1,)", {"write_indices": np.array([1])}),
        ("write_indices must be integers", {"write_indices": np.array([1.0, 2.0])}),
        ("axis must be one of past_cache's behind the first, got 0", {"axis": 0}),
        ("axis must be one of past_cache's behind the first, got 5", {"axis": 5}),
        ("update must fit past_cache (2, 3, 5, 4) on axis 2, got (3, 2, 4)", {"update": (3, 2, 4)}),
        ("on axis 2, got (2, 3, 6, 4)", {"update": (2, 3, 6, 4)}),
        ("mode must be one of linear, circular, got 'ring'", {"mode": "ring"}),
        ("update must have past_cache's dtype float32, got float64", {"update": np.zeros((2, 3, 2, 4))}),
        ("update must have past_cache's dtype float16", {"past_cache": np.zeros((2, 3, 5, 4), "f2")}),
    ],
}


@pytest.mark.parametrize(
    "operator, message, changed", [(name, *mistake) for name, of in MISTAKES.items() for mistake in of]
)
def test_errors_name_the_inputs_and_attributes_of_onnx(operator, message, changed):
    """As ValueErrors: ONNX's evaluator hides what a TypeError says."""
    given = {name: x for name, x in (FITTING[operator] | changed).items() if x is not None}
    with pytest.raises(ValueError) as error:
        run_operator(operator, **given)
    assert message in str(error.value)


@pytest.mark.parametrize("operator", FITTING)
def test_what_the_mistakes_are_made_in_fits(operator):
    assert_same_bits(*(run_operator(operator, ops, **FITTING[operator]) for ops in (operators, None)))


@pytest.mark.parametrize("mode", ["linear", "circular"])
@pytest.mark.parametrize("axis", [1, 2, 3, -1])
def test_rows_go_around_the_end_in_circular_mode_alone(axis, mode):
    """Also from indices beyond the cache, as far as int64 goes."""
    rng = np.random.default_rng(0)
    cache = rng.standard_normal((2, 3, 5, 4)).astype("f4")
    n = cache.shape[axis]
    update = np.take(rng.standard_normal(cache.shape), range(n - 1), axis).astype("f4")
    starts = [[0, 1], [1, 1]] if mode == "linear" else [[0, n - 1], [2, 5 * n + 3], [2**62, -1]]
    for write_indices in map(np.array, starts):
        given = {
            "past_cache": cache,
            "update": update,
            "write_indices": write_indices,
            "axis": axis,
            "mode": mode,
        }
        got, wanted = (run_operator("TensorScatter", ops, **given) for ops in (operators, None))
        assert_same_bits(got, wanted)
    if mode == "circular":
        far = {"write_indices": np.array([2**63 - 1, 0]), "axis": axis, "mode": mode}
        near = far | {"write_indices": np.array([(2**63 - 1) % n, 0])}
        got, wanted = (
            run_operator("TensorScatter", past_cache=cache, update=update, **it) for it in (far, near)
        )
        assert_same_bits(got, wanted)


@pytest.mark.parametrize("sizes", [(2, 0), (0, 4), (0, 0)], ids=str)
@pytest.mark.parametrize("has_ids", [False, True])
def test_rotary_embedding_of_nothing(has_ids, sizes):
    B, L = sizes
    caches = dict.fromkeys(("cos_cache", "sin_cache"), (9, 4) if has_ids else (B, L, 4))
    given = {"X": (B, 3, L, 8)} | caches | ({"position_ids": np.zeros(sizes, int)} if has_ids else {})
    assert run_operator("RotaryEmbedding", **given).shape == (B, 3, L, 8)


def test_write_indices_of_few_bits():
    """Whose sums with the length, and remainders by it, are beyond their type."""
    cache, update = np.zeros((2, 1, 200, 1), "f4"), np.ones((2, 1, 3, 1), "f4")
    given = {"past_cache": cache, "update": update, "write_indices": np.array([126, -1], "i1")}
    got = run_operator("TensorScatter", mode="circular", **given)
    assert [np.flatnonzero(item).tolist() for item in got] == [[126, 127, 128], [0, 1, 199]]


RULES = ["linear", "gated", "delta", "gated_delta"]
LINEAR_INPUTS = ["query", "key", "value", "past_state", "decay", "beta"]


def linear_attention(inputs, **attributes):
    """Output and state of one LinearAttention node."""
    names = [name if name in inputs else "" for name in LINEAR_INPUTS]
    node = make_node("LinearAttention", names, ["output", "present_state"], **attributes)
    described = [
        make_tensor_value_info(name, onnx.helper.np_dtype_to_tensor_dtype(x.dtype), x.shape)
        for name, x in inputs.items()
    ]
    results = [make_tensor_value_info(name, onnx.TensorProto.FLOAT, None) for name in node.output]
    graph = make_graph([node], "linear_attention", described, results)
    model = make_model(graph, opset_imports=[make_opsetid("", 27)])
    return run(model, [inputs[it.name] for it in model.graph.input])


def recurrence(inputs, H, K, rule, scale):
    """The text of the operator, token by token in float64."""
    wide = {name: x.astype(np.float64) for name, x in inputs.items()}
    B, T, _ = wide["query"].shape
    q, k, v = (wide[name].reshape(B, T, n, -1) for name, n in (("query", H), ("key", K), ("value", K)))
    state = wide.get("past_state", np.zeros((B, K, k.shape[-1], v.shape[-1])))
    out = np.empty((B, T, H, v.shape[-1]))
    for t in range(T):
        if "gated" in rule:
            state = state * np.exp(wide["decay"][:, t].reshape(B, K, -1, 1))
        written = v[:, t]
        if "delta" in rule:
            known = np.einsum("bkde,bkd->bke", state, k[:, t])
            written = wide["beta"][:, t, :, None] * (written - known)
        state = state + k[:, t, :, :, None] * written[:, :, None]
        out[:, t] = np.einsum("bhde,bhd->bhe", state.repeat(H // K, axis=1), q[:, t]) * scale
    return out.reshape(B, T, -1), state


def linear_inputs(rng, rule, B, T, H, K, D, E, by_columns):
    inputs = {
        name: rng.standard_normal((B, T, n)).astype(np.float32)
        for name, n in (("query", H * D), ("key", K * D), ("value", K * E))
    }
    rows = inputs["key"].reshape(B, T, K, D)
    rows /= np.linalg.norm(rows, axis=-1, keepdims=True)
    if "gated" in rule:
        columns = K * D if by_columns else K
        inputs["decay"] = -rng.exponential(0.3, (B, T, columns)).astype(np.float32)
    if "delta" in rule:
        inputs["beta"] = rng.random((B, T, K if by_columns else 1)).astype(np.float32)
    return inputs


@pytest.mark.filterwarnings("error::RuntimeWarning")  # decays between tokens overflow backwards in time
@pytest.mark.parametrize("by_columns", [False, True])
@pytest.mark.parametrize("T", [1, 16, 130])
@pytest.mark.parametrize("rule", RULES)
def test_linear_attention_is_the_recurrence(rule, T, by_columns):
    rng = np.random.default_rng(T)
    B, H, K, D, E = 2, 4, 2, 6, 5
    inputs = linear_inputs(rng, rule, B, T, H, K, D, E, by_columns)
    if T > 1:
        inputs["past_state"] = rng.standard_normal((B, K, D, E)).astype(np.float32)
    if "decay" in inputs:
        inputs["decay"][:, T // 2] = -1e30  # from which on nothing is left of what was before
    attributes = {"q_num_heads": H, "kv_num_heads": K, "update_rule": rule}
    for scale in (None, 0.3):
        given = attributes if scale is None else attributes | {"scale": scale}
        got = linear_attention(inputs, **given)
        wanted = recurrence(inputs, H, K, rule, D**-0.5 if scale is None else scale)
        for x, expected in zip(got, wanted, strict=True):
            np.testing.assert_allclose(x, expected, atol=2e-6 * np.abs(expected).max())


@pytest.mark.parametrize("rule", RULES)
def test_linear_attention_sees_nothing_of_later_tokens(rule):
    rng = np.random.default_rng(0)
    inputs = linear_inputs(rng, rule, 1, 40, 2, 2, 8, 8, by_columns=True)
    attributes = {"q_num_heads": 2, "kv_num_heads": 2, "update_rule": rule}
    expected, _ = linear_attention(inputs, **attributes)
    for name in inputs:
        spoiled = inputs[name].copy()
        spoiled[:, 20:] = np.nan
        got, _ = linear_attention(inputs | {name: spoiled}, **attributes)
        np.testing.assert_allclose(got[:, :20], expected[:, :20], atol=1e-6, err_msg=name)
        assert np.isnan(got[:, 20]).any()


@pytest.mark.parametrize(
    "message, changed, attributes",
    [
        (r"update_rule must be one of linear, .*, got 'gate'", {}, {"update_rule": "gate"}),
        ("update_rule 'delta' needs beta", {"decay": None, "beta": None}, {"update_rule": "delta"}),
        ("update_rule 'gated' takes no beta", {}, {"update_rule": "gated"}),
        (r"q_num_heads must be a multiple of kv_num_heads, got 3 and 2", {}, {"q_num_heads": 3}),
        (r"beta must have shape \(1, 3, 1\) or \(1, 3, 2\), got \(1, 3, 4\)", {"beta": (1, 3, 4)}, {}),
        (r"past_state must have shape \(1, 2, 4, 4\), got \(1, 2, 4, 5\)", {"past_state": (1, 2, 4, 5)}, {}),
        (r"key must have shape \(1, 3, 8\), got \(1, 4, 8\)", {"key": (1, 4, 8)}, {}),
        (r"query must have shape \(1, 3, 8\), got \(1, 3, 6\)", {"query": (1, 3, 6)}, {}),
        (r"query must have shape .* got \(3, 8\)", {"query": (3, 8)}, {}),
        ("kv_num_heads must divide the last axis of value, got 2 and 7", {"value": (1, 3, 7)}, {}),
    ],
)
def test_errors_of_linear_attention(message, changed, attributes):
    shapes = dict.fromkeys(("query", "key", "value"), (1, 3, 8)) | dict.fromkeys(("decay", "beta"), (1, 3, 2))
    shapes = {name: shape for name, shape in (shapes | changed).items() if shape is not None}
    arrays = {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}
    with pytest.raises(ValueError, match=message):
        linear_attention(arrays, **{"q_num_heads": 2, "kv_num_heads": 2} | attributes)


def causal_conv(inputs, **attributes):
    """Output and state of one CausalConvWithState node."""
    names = [name if name in inputs else "" for name in ("input", "weight", "bias", "past_state")]
    node = make_node("CausalConvWithState", names, ["output", "present_state"], **attributes)
    described = [make_tensor_value_info(name, onnx.TensorProto.FLOAT, x.shape) for name, x in inputs.items()]
    results = [make_tensor_value_info(name, onnx.TensorProto.FLOAT, None) for name in node.output]
    model = make_model(
        make_graph([node], "causal_conv", described, results), opset_imports=[make_opsetid("", 27)]
    )
    return run(model, [inputs[it.name] for it in model.graph.input])


@pytest.mark.parametrize(
    "message, changed, attributes",
    [
        ("activation must be one of none, silu, swish, got 'relu'", {}, {"activation": "relu"}),
        (r"input and weight must have three axes, got \(2, 3\) and \(3, 1, 4\)", {"input": (2, 3)}, {}),
        (r"weight must have shape \(3, 1, 4\), got \(3, 2, 4\)", {"weight": (3, 2, 4)}, {}),
        (r"bias must have shape \(3,\), got \(4,\)", {"bias": (4,)}, {}),
        (r"past_state must have shape \(2, 3, 3\), got \(2, 3, 4\)", {"past_state": (2, 3, 4)}, {}),
    ],
)
def test_errors_of_causal_conv(message, changed, attributes):
    shapes = {"input": (2, 3, 5), "weight": (3, 1, 4)} | changed
    with pytest.raises(ValueError, match=message):
        causal_conv({name: np.zeros(shape, np.float32) for name, shape in shapes.items()}, **attributes)
