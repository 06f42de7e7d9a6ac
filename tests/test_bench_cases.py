"""The benchmark's cases: their arithmetic against counting one by one, the right answers, every adapter."""

from __future__ import annotations

import importlib
import importlib.util
import json
import math
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fastattn
from fastattn.bench import oracle, peers
from fastattn.bench.case import PADDING_KEPT, SHORTEST, Case, Inputs, make_inputs, make_layer
from fastattn.bench.cases import CASES, GROUPS, MEMORY_CASES, possible_cases
from fastattn.bench.oracle import checked_rows, expected_output, oracle_dtype
from fastattn.bench.peers import DEFAULT_PEERS, OURS, PEERS, Redundant, Unable, _base
from fastattn.bench.peers.numpy_formula import NumPyFormula
from tests.process import python

SMALL = replace(
    CASES["square-512-64"],
    name="small",
    batch=2,
    heads=4,
    kv_heads=4,
    len_q=7,
    len_k=7,
    head_dim=8,
    value_dim=8,
)
DECODE = replace(SMALL, kv_heads=2, len_q=1, len_k=16)

#: One small case for each option that the real ones use, and for options that meet.
KINDS = {
    name: replace(case, name=name)
    for name, case in {
        "plain": SMALL,
        "causal": replace(SMALL, causal=True),
        "random": replace(SMALL, mask="random", len_k=40),
        "padding": replace(SMALL, mask="padding"),
        "shared": replace(SMALL, bias="shared"),
        "per-head": replace(SMALL, bias="per_head"),
        "per-head-causal": replace(SMALL, bias="per_head", causal=True),
        "window": replace(SMALL, window=(2, 1)),
        "window-causal": replace(SMALL, window=(2, 0), causal=True),
        "window-decode": replace(DECODE, window=(4, 0), causal=True),
        "documents": replace(SMALL, document_length=3),
        "documents-causal": replace(SMALL, document_length=3, causal=True),
        "ragged": replace(SMALL, key_lengths="ragged", len_k=16),
        "ragged-causal": replace(SMALL, key_lengths="ragged", causal=True, len_q=1, len_k=16),
        "ragged-decode": replace(DECODE, key_lengths="ragged"),
        "decode": DECODE,
        "decode-some": replace(DECODE, len_q=4, causal=True),
        "float64": replace(SMALL, dtype="float64"),
        "float64-causal": replace(SMALL, dtype="float64", causal=True),
        "rank3": replace(SMALL, batch=1, rank=3),
        "wide-value": replace(SMALL, value_dim=16),
        "narrow-value": replace(SMALL, value_dim=4, causal=True),
        "bshd": replace(SMALL, layout="bshd"),
        "strided": replace(SMALL, strided=True),
        "grouped": replace(SMALL, kv_heads=2, causal=True),
        "cross": replace(SMALL, len_k=3),
        "softcap": replace(SMALL, softcap=2.0, causal=True),
        "in-model": replace(SMALL, kv_heads=2, value_dim=16, model_dim=24),
    }.items()
}


def in_interval(case: Case, b: int, i: int, j: int) -> bool:
    """Whether query i of item b may attend key j, as far as no array says otherwise."""
    end = case.len_k if case.lengths is None else int(case.lengths[b])
    position = i + end - case.len_q
    allowed = j < end
    if case.causal:
        allowed = allowed and j <= position
    if case.window is not None:
        allowed = allowed and position - case.window[0] <= j <= position + case.window[1]
    if case.document_length is not None:
        allowed = allowed and i // case.document_length == j // case.document_length
    return allowed


def in_padding(case: Case, j: int) -> bool:
    return case.mask == "padding" and j >= int(case.len_k * PADDING_KEPT)


def loop_attention(case: Case) -> np.ndarray:
    """Attention one score at a time, straight from the options of `case`."""
    inputs = make_inputs(case)
    query, key, value = inputs.bhsd(case)
    out = np.zeros((case.batch, case.heads, case.len_q, case.value_dim))
    for b, h, i in np.ndindex(case.batch, case.heads, case.len_q):
        kv = h // (case.heads // case.kv_heads)
        total = 0.0
        for j in range(case.len_k):
            if not in_interval(case, b, i, j) or in_padding(case, j):
                continue
            if case.mask == "random" and not inputs.mask[i, j]:
                continue
            score = sum(float(x) * float(y) for x, y in zip(query[b, h, i], key[b, kv, j], strict=True))
            score /= math.sqrt(case.head_dim)
            if case.softcap is not None:
                score = case.softcap * math.tanh(score / case.softcap)
            if case.bias is not None:
                score += float(inputs.bias[h, i, j] if case.bias == "per_head" else inputs.bias[i, j])
            total += math.exp(score)
            out[b, h, i] += math.exp(score) * value[b, kv, j].astype(float)
        out[b, h, i] /= total
    return out


@pytest.mark.parametrize("kind", KINDS)
def test_oracle_and_numpy_agree_with_a_loop(kind: str) -> None:
    case = KINDS[kind]
    inputs = make_inputs(case)
    expected = loop_attention(case)
    answer = expected_output(case, inputs)
    assert answer.dtype == oracle_dtype(case)
    np.testing.assert_allclose(answer.astype(float), expected, rtol=1e-12, atol=1e-14)
    tolerance = 16 * np.finfo(case.dtype).eps * np.abs(inputs.value).max()
    tried = 0
    for make in NumPyFormula().ways.values():
        try:
            result = make(case, inputs).result()
        except Redundant:
            continue
        np.testing.assert_allclose(result, expected, rtol=0, atol=tolerance)
        tried += 1
    in_blocks = kind.startswith(("documents", "ragged")) or kind == "window-decode"
    assert tried == (2 if in_blocks else 1)


def test_oracle_does_not_depend_on_its_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = expected_output(KINDS["grouped"], make_inputs(KINDS["grouped"]))
    monkeypatch.setattr(oracle, "ROWS", 2)
    blocks = expected_output(KINDS["grouped"], make_inputs(KINDS["grouped"]))
    np.testing.assert_allclose(blocks, whole, rtol=1e-14)


def test_oracle_of_a_sample_is_the_sample_of_the_oracle(monkeypatch: pytest.MonkeyPatch) -> None:
    case = replace(KINDS["window-causal"], len_q=90, len_k=90)
    whole = expected_output(case, make_inputs(case))
    monkeypatch.setattr(oracle, "MOST_SCORES", {"float32": 0})
    rows = checked_rows(case)
    assert len(rows) == oracle.FEWEST_ROWS
    np.testing.assert_allclose(expected_output(case, make_inputs(case)), whole[:, :, rows], rtol=1e-14)


@pytest.mark.parametrize("name", CASES)
def test_checked_rows_are_all_or_an_even_sample(name: str) -> None:
    case = CASES[name]
    rows = checked_rows(case)
    assert (rows[0], rows[-1]) == (0, case.len_q - 1)
    steps = np.diff(rows)
    if len(rows) == case.len_q:
        assert np.all(steps == 1)
    else:
        assert oracle.FEWEST_ROWS <= len(rows) <= oracle.MOST_ROWS
        assert 1 <= steps.min() <= steps.max() <= steps.min() + 1
    scores = case.batch * case.heads * case.len_k * len(rows)
    assert scores <= oracle.MOST_SCORES[case.dtype] or len(rows) <= oracle.FEWEST_ROWS


def test_flops_follow_the_formula() -> None:
    case = replace(SMALL, batch=3, heads=4, len_q=10, len_k=20, head_dim=8, value_dim=8)
    assert case.flops == 4 * 3 * 4 * 10 * 20 * 8
    assert replace(case, value_dim=16).flops == 2 * 3 * 4 * 10 * 20 * (8 + 16)
    assert replace(case, kv_heads=2, mask="random", bias="shared").flops == case.flops
    square = replace(case, len_k=10)
    assert replace(square, causal=True).flops == square.flops / 2 * (10 + 1) / 10


@pytest.mark.parametrize("kind", KINDS)
def test_pairs_and_bytes_are_what_counting_gives(kind: str) -> None:
    case = KINDS[kind]
    inputs = make_inputs(case)
    allowed = np.array(
        [
            [[in_interval(case, b, i, j) for j in range(case.len_k)] for i in range(case.len_q)]
            for b in range(case.batch)
        ]
    )
    assert case.pairs == np.count_nonzero(allowed)

    query, key, value = inputs.bhsd(case)
    read = query.size * query.itemsize
    for b, j in np.ndindex(case.batch, case.len_k):
        if allowed[b, :, j].any() and not in_padding(case, j):
            read += key[b, :, j].size * key.itemsize + value[b, :, j].size * value.itemsize
    read += sum(array.nbytes for array in (inputs.mask, inputs.bias) if array is not None)
    written = case.batch * case.heads * case.len_q * case.value_dim * query.itemsize
    assert case.nbytes == read + written
    assert case.intensity == case.flops / case.nbytes


@pytest.mark.parametrize("kind", KINDS)
def test_allowed_is_what_the_options_say(kind: str) -> None:
    case = KINDS[kind]
    inputs = make_inputs(case)
    full = (case.batch, case.heads, case.len_q, case.len_k)
    expected = np.empty(full, bool)
    for b, h, i, j in np.ndindex(full):
        expected[b, h, i, j] = in_interval(case, b, i, j) and not in_padding(case, j)
    if case.mask == "random":
        expected &= inputs.mask
    allowed = inputs.allowed(case)
    assert np.array_equal(np.broadcast_to(True if allowed is None else allowed, full), expected)
    assert allowed is None or (allowed.ndim == 4 and not allowed.all())

    added = inputs.score_mask(case)
    if case.bias is None:
        assert (added is None) == (allowed is None)
    else:
        bias = np.broadcast_to(inputs.bias, full)
        assert np.array_equal(np.broadcast_to(added, full), np.where(expected, bias, -np.inf))


def test_a_case_survives_the_pipe_to_a_worker() -> None:
    for case in CASES.values():
        sent = Case.from_json(json.loads(json.dumps(asdict(case))))
        assert sent == case
        assert hash(sent) == hash(case)


def test_ragged_lengths_reach_from_the_shortest_to_all_keys() -> None:
    lengths = CASES["bert-ragged"].lengths
    assert lengths is not None
    assert (lengths.min(), lengths.max()) == (int(SHORTEST * 128), 128)
    assert np.any(np.diff(lengths) > 0)
    assert np.any(np.diff(lengths) < 0)
    assert CASES["bert-batch"].lengths is None


def test_inputs_depend_on_the_name_alone() -> None:
    first, again = make_inputs(SMALL), make_inputs(SMALL)
    assert first.query.tobytes() == again.query.tobytes()
    assert first.query.tobytes() != make_inputs(replace(SMALL, name="other")).query.tobytes()


def test_strided_inputs_are_slices_of_the_wide_ones() -> None:
    case = KINDS["strided"]
    inputs = make_inputs(case)
    for array, wide in zip((inputs.query, inputs.key, inputs.value), inputs.wide(case), strict=True):
        assert array.strides[-1] == 2 * array.itemsize
        assert np.shares_memory(array, wide)
        assert np.array_equal(array, wide[..., ::2])


def test_cases_are_consistent() -> None:
    for name, case in CASES.items():
        assert case.name == name
        assert case.group in GROUPS
        assert case.baseline is None or CASES[case.baseline].shape == case.shape
        assert case.heads % case.kv_heads == 0
        assert case.nbytes < 1e9, "several libraries hold the inputs at the same time"
        start, stop = case.intervals()
        assert np.all(start < stop), "a query without keys is divided by zero in most libraries"
        assert case.document_length is None or (case.len_q == case.len_k and case.lengths is None)
        assert not case.strided or (case.layout == "bhsd" and case.rank == 4)
        assert case.rank == 4 or (case.batch == 1 and case.layout == "bhsd")


def test_a_case_in_a_model_differs_from_its_baseline_in_the_products_alone() -> None:
    in_model = [case for case in CASES.values() if case.model_dim is not None]
    assert in_model == [case for case in CASES.values() if case.group == "in-model"]
    for case in in_model:
        alone = CASES[case.baseline or ""]
        named = {field: getattr(case, field) for field in ("name", "group", "origin", "baseline")}
        assert replace(alone, **named, model_dim=case.model_dim) == case
        assert alone.model_dim is None
        assert case.model_dim == case.heads * case.head_dim
        assert (case.flops, case.nbytes) == (alone.flops, alone.nbytes)


def test_a_layer_has_the_shapes_of_the_attention_that_it_is_around() -> None:
    case = KINDS["in-model"]
    layer, again = make_layer(case), make_layer(case)
    assert layer is not None
    assert again is not None
    query, key, value = make_inputs(case).bhsd(case)
    assert (layer.rows @ layer.w_qkv).size == query.size + key.size + value.size
    out = expected_output(case, make_inputs(case))
    assert layer.attended.size == out.size
    assert (layer.attended @ layer.w_o).shape == layer.rows.shape == (case.batch * case.len_q, case.model_dim)
    assert {it.dtype for it in (layer.rows, layer.w_qkv, layer.attended, layer.w_o)} == {np.dtype(case.dtype)}
    assert layer.w_qkv.tobytes() == again.w_qkv.tobytes()
    assert make_layer(KINDS["plain"]) is None


def test_groups_stand_together() -> None:
    """A table by groups shows each once."""
    seen = [case.group for case in CASES.values()]
    changes = [group for group, before in zip(seen, [None, *seen], strict=False) if group != before]
    assert changes == list(GROUPS)


def test_the_quick_cases_are_few_small_and_of_many_kinds() -> None:
    quick = [case for case in CASES.values() if case.quick]
    assert 8 <= len(quick) <= 12
    assert len({case.group for case in quick}) == len(quick)
    assert all(case.threads is None for case in quick)
    assert max(case.batch * case.heads * case.len_q * case.len_k for case in quick) <= 1 << 26


def test_families_vary_one_thing() -> None:
    def values(group: str, field: str) -> list[int]:
        return [getattr(case, field) for case in CASES.values() if case.group == group]

    assert values("scaling-length", "len_k") == [128 << n for n in range(9)]
    assert values("scaling-batch", "batch") == [1 << n for n in range(7)]
    assert values("scaling-threads", "threads") == [1 << n for n in range(7)]
    assert values("scaling-dim", "head_dim") == [16, 32, 64, 96, 128, 192, 256]
    for group in ("scaling-batch", "scaling-threads", "scaling-dim"):
        assert len(set(values(group, "len_q"))) == len(set(values(group, "heads"))) == 1


def test_cases_for_more_threads_than_cores_are_left_out() -> None:
    names = {case.name for case in possible_cases(2)}
    assert {"threads-1", "threads-2", "long-64k"} <= names
    assert not names & {"threads-4", "threads-64"}
    assert len(possible_cases(64)) == len(CASES)


def test_peers_have_their_places() -> None:
    assert tuple(name for name in PEERS if name.startswith("fastattn")) == OURS
    assert OURS[:2] == ("fastattn", "fastattn-avx2")
    assert set(DEFAULT_PEERS) & set(OURS) == {"fastattn", "fastattn-shared"}
    assert set(PEERS) - set(DEFAULT_PEERS) == {*OURS, "torch-flex"} - {"fastattn", "fastattn-shared"}


def test_shared_threads_take_part_beside_products_alone() -> None:
    assert peers.taking_part([*PEERS], KINDS["in-model"]) == [*PEERS]
    assert set(PEERS) - set(peers.taking_part([*PEERS], SMALL)) == {"fastattn-shared"}
    assert peers.taking_part(["torch", "fastattn"], SMALL) == ["torch", "fastattn"]


def test_shared_threads_are_shared_or_say_why_not(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "share_threads_with_blas"
    loaded, shared = object(), []
    monkeypatch.setattr("fastattn.bench.peers.fastattn_api.load", lambda num_threads: loaded)
    monkeypatch.setattr(fastattn, name, lambda: shared.append(True) or True)
    assert peers.load_peer("fastattn-shared", 1) is loaded
    assert shared == [True]
    monkeypatch.setattr(fastattn, name, lambda: False)
    with pytest.raises(Unable, match="not possible here"):
        peers.load_peer("fastattn-shared", 1)


def test_scores_that_would_fill_the_memory_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = {"MemTotal": 16 * 10**9, "MemAvailable": 15 * 10**9}
    monkeypatch.setattr(_base, "_meminfo", memory.__getitem__)
    _base.check_scores_fit(CASES["long-8k"])  # 1.1 GB
    for name, needed in (("long-32k", "4.3"), ("long-64k", "17.2")):
        with pytest.raises(Unable, match=rf"needs {needed} GB for the scores; they may take 2\.0 GB here"):
            _base.check_scores_fit(CASES[name])
    memory["MemAvailable"] = 4 * 10**9
    with pytest.raises(Unable, match=r"needs 1\.1 GB for the scores; they may take 1\.0 GB here"):
        _base.check_scores_fit(CASES["long-8k"])
    _base.check_scores_fit(MEMORY_CASES["memory-32768"])  # they run alone, and the question is what they need

    def unknown(field: str) -> int:
        raise OSError

    monkeypatch.setattr(_base, "_meminfo", unknown)
    _base.check_scores_fit(CASES["long-64k"])


def test_numpy_refuses_before_it_makes_a_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_base, "_meminfo", lambda field: 10**9)
    case = CASES["long-64k"]
    empty = np.empty((1, 1, 0, 64), np.float32)
    make = NumPyFormula().ways["formula"]
    with pytest.raises(Unable, match=r"needs 17\.2 GB for the scores"):
        make(case, Inputs(empty, empty, empty, None, None))


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise ModuleNotFoundError(f"No module named '{absent}'", name=absent)

    monkeypatch.setattr(importlib, "import_module", missing)
    absent = "jax"
    with pytest.raises(Unable, match=r"^jax is not installed: pip install jax$"):
        peers.load_peer("jax", 1)
    absent = "torch.nn.attention.flex_attention"  # an old torch is not a missing one
    with pytest.raises(ModuleNotFoundError, match=f"'{absent}'"):
        peers.load_peer("torch-flex", 1)


#: What the adapter of each needs; each runs in a process of its own, as in the benchmark.
NEEDS = {
    "torch": ["torch"],
    "torch-flex": ["torch"],
    "onnxruntime": ["onnx", "onnxruntime"],
    "openvino": ["openvino"],
    "jax": ["jax"],
}

#: Kinds that a library cannot do, with what it says.
UNABLE = {
    # Both compute float64 in float32.
    "onnxruntime": {"float64": "wrong", "float64-causal": "wrong"},
    "openvino": {"float64": "wrong", "float64-causal": "wrong", "softcap": "no soft-cap"},
    "torch-flex": {"float64": "no float64", "float64-causal": "no float64"},
}

#: Kinds where one way of a library is wrong and another right.
PARTLY_WRONG = {
    "jax": ("float64", "float64-causal"),  # dot_product_attention takes the softmax in float32
}

#: Compiling takes half a minute per kind, so only what flex_attention is for.
FLEX_KINDS = ("window-causal", "ragged", "softcap", "float64")

RUN_KINDS = """
import json
from fastattn.bench import worker
from fastattn.bench.case import make_inputs
from dataclasses import asdict
from fastattn.bench.oracle import expected_output
import numpy as np
from pathlib import Path
from tests.test_bench_cases import KINDS

worker.SETTLE_SECONDS = worker.WARM_UP_SECONDS = 0.0
held = worker.LibraryWorker({name!r}, 2)
found = {{}}
for kind in {kinds!r}:
    file = str(Path({folder!r}) / kind) + ".npy"
    np.save(file, expected_output(KINDS[kind], make_inputs(KINDS[kind])))
    found[kind] = held.prepare(json.loads(json.dumps(asdict(KINDS[kind]))), file)
    held.release()
print("ANSWER" + json.dumps(found))
"""


def shares_threads() -> bool:
    """Whether `fastattn.share_threads_with_blas` is possible, in a process of its own."""
    code = "import fastattn; print(fastattn.share_threads_with_blas())"
    return python(code).strip() == "True"


#: They compile for seconds; and AVX2 has the adapter of the best instruction set.
SLOW_PEERS = ("torch", "torch-flex", "onnxruntime", "openvino", "jax", "fastattn-numba", "fastattn-avx2")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in SLOW_PEERS else ()) for name in PEERS]
)
def test_every_adapter_is_right_on_every_kind(name: str, tmp_path: Path) -> None:
    for module in NEEDS.get(name, []):
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"{module} is not installed")
    kinds = [*FLEX_KINDS] if name == "torch-flex" else [*KINDS]
    code = RUN_KINDS.format(name=name, kinds=kinds, folder=str(tmp_path))
    if "avx2" in name:
        from fastattn.backends import cython_cpu

        if "avx2" not in cython_cpu.available_isas():
            pytest.skip("no AVX2 here")
    if name == "fastattn-shared" and not shares_threads():
        pytest.skip("NumPy's threads cannot be shared here")
    printed = python(code, env=PEERS[name].environment, timeout=600)
    found: dict[str, dict[str, Any]] = json.loads(printed.rpartition("ANSWER")[2])
    assert list(found) == kinds
    for kind, answer in found.items():
        reasons = "; ".join(f"{label}: {way.get('reason')}" for label, way in answer["ways"].items())
        expected = UNABLE.get(name, {}).get(kind)
        if expected is None:
            assert answer["chosen"] is not None, f"{kind}: {reasons}"
            assert ("wrong" in reasons) == (kind in PARTLY_WRONG.get(name, ())), f"{kind}: {reasons}"
        else:
            assert answer["chosen"] is None, kind
            assert expected in reasons


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="reads /proc")
@pytest.mark.skipif(importlib.util.find_spec("jax") is None, reason="jax is not installed")
@pytest.mark.parametrize("threads", [1, 2])
def test_xla_has_the_threads_it_was_given(threads: int) -> None:
    code = """
from pathlib import Path
from fastattn.bench.case import make_inputs
from fastattn.bench.cases import CASES
from fastattn.bench.peers import load_peer
case = CASES["square-512-64"]
load_peer("jax", 0).ways["formula"](case, make_inputs(case)).run()
names = [it.joinpath("comm").read_text() for it in Path("/proc/self/task").iterdir()]
print(sum("XLAEigen" in name for name in names))
"""
    assert int(python(code, env={"NPROC": str(threads)})) == threads
