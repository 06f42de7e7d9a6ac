"""The benchmark's peers: who takes part, what each cannot do, and every adapter on every kind of case."""

from __future__ import annotations

import importlib
import importlib.util
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fastattn
from fastattn.backends.cython import backend as cython_backend
from fastattn.bench import peers
from fastattn.bench.case import Inputs
from fastattn.bench.cases import CASES, MEMORY_CASES
from fastattn.bench.peers import DEFAULT_PEERS, OURS, PEERS, Unable, _base
from fastattn.bench.peers.numpy_formula import NumPyFormula
from tests.process import python
from tests.test_bench_cases import BACKWARD, KINDS, RECURRENT, REDUCTIONS, SMALL


def test_peers_have_their_places() -> None:
    assert tuple(name for name in PEERS if name.startswith("fastattn")) == OURS
    assert OURS[:2] == ("fastattn", "fastattn-avx2")
    assert set(DEFAULT_PEERS) & set(OURS) == {"fastattn", "fastattn-shared"}
    assert set(PEERS) - set(DEFAULT_PEERS) == {*OURS, "torch-flex"} - {"fastattn", "fastattn-shared"}


def test_some_take_part_beside_products_or_in_bfloat16_alone() -> None:
    in_model, bfloat16 = KINDS["in-model"], replace(SMALL, dtype="bfloat16")
    assert set(PEERS) - set(peers.taking_part([*PEERS], in_model)) == {"fastattn-storage"}
    assert set(PEERS) - set(peers.taking_part([*PEERS], bfloat16)) == {"fastattn-shared"}
    assert set(PEERS) - set(peers.taking_part([*PEERS], SMALL)) == {"fastattn-shared", "fastattn-storage"}
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

#: Kinds that are stored in another type than is computed in, or in pages.
STORED = tuple(
    kind
    for kind, case in KINDS.items()
    if case.storage is not None or case.page_size is not None or case.dtype != case.compute_dtype
)

#: Kinds that a library cannot do, with what it says.
UNABLE = {
    "fastattn-numba": {
        **dict.fromkeys((*STORED, *BACKWARD), "cannot take this problem"),
        **dict.fromkeys(RECURRENT, "cannot run gated_linear_attention"),
        **dict.fromkeys(REDUCTIONS, "cannot"),
        "grid": "reads one array as a bias",
    },
    # Both compute float64 in float32.
    "onnxruntime": {
        **dict.fromkeys(REDUCTIONS, "no scores without values"),
        **dict.fromkeys(BACKWARD, "no gradients"),
        "float64": "wrong",
        "float64-causal": "wrong",
        **dict.fromkeys(
            ("bfloat16-causal", "bfloat16-ragged", "step-bfloat16-some"), "no bfloat16 operators"
        ),
        "pages-bfloat16": "no pages",
        "stored-float16": "no float32 queries over float16",
        "pages": "no pages",
        "pages-int8": "no float32 queries over int8",
        **dict.fromkeys(("rule-float64", "rule-float16"), "Type"),
    },
    "openvino": {
        **dict.fromkeys(REDUCTIONS, "no scores without values"),
        **dict.fromkeys(RECURRENT, "GatedDeltaNet is the delta rule with a decay of each token"),
        **dict.fromkeys(BACKWARD, "no gradients"),
        "float64": "wrong",
        "float64-causal": "wrong",
        "softcap": "no soft-cap",
        **dict.fromkeys(("pages-bfloat16", "step-bfloat16-some"), "has a bfloat16 cache only where"),
    },
    "torch": {
        "step-int8": "no step over int8",
        "backward-softcap": "no soft-cap",
        **dict.fromkeys(("rule-grouped", "rule-float16"), "written for float32 and float64"),
    },
    "numpy": {
        "step-int8": "no step over int8",
        **dict.fromkeys(BACKWARD, "no gradients"),
        **dict.fromkeys(("rule-grouped", "rule-float16"), "written for float32 and float64"),
    },
    "jax": {
        **dict.fromkeys(REDUCTIONS, "no scores without values"),
        **dict.fromkeys(RECURRENT, "no gated linear attention"),
        **dict.fromkeys(("step", "step-float16", "step-bfloat16-some"), "no cache to append to"),
        **dict.fromkeys(("pages", "pages-bfloat16"), "no pages"),
        **dict.fromkeys(("int8", "int8-some", "pages-int8", "step-int8"), "no float32 queries over int8"),
        "stored-float16": "no float32 queries over float16",
    },
    "torch-flex": {
        "float64": "no float64",
        "float64-causal": "no float64",
        "pages": "no pages",
        "backward": "no gradients",
        "rule-kimi": "no gated linear attention",
    },
}
#: The delta rule of a token's decay, or of none, which OpenVINO has.
for kind in RECURRENT:
    if KINDS[kind].rule in ("delta", "gated_delta") and KINDS[kind].dtype == "float32":
        del UNABLE["openvino"][kind]

#: Those that it can do after all on some CPUs, or once its backend does.
UNABLE_HERE = {"openvino": ("pages-bfloat16", "step-bfloat16-some"), "fastattn-numba": (*STORED, *BACKWARD)}

#: Kinds where one way of a library is wrong and another right.
PARTLY_WRONG = {
    "jax": ("float64", "float64-causal", "backward-float64")  # dot_product_attention: float32 softmax
}

#: Those that may be where AVX-512 multiplies bfloat16, and no tile unit does: OpenVINO's float16 with open
#: lengths has 1.2 times the error that is allowed there (Zen 5, 2026-11-29).
PARTLY_WRONG_WITH_PAIRS = {"openvino": ("float16", "float16-decode")}

#: Compiling takes half a minute per kind, so only what flex_attention is for.
FLEX_KINDS = ("window-causal", "ragged", "softcap", "float64", "pages", "backward", "rule-kimi")

RUN_KINDS = """
import json
from fastattn.bench import worker
from fastattn.bench.case import make_inputs
from dataclasses import asdict
from fastattn.bench.tasks import task_of
import numpy as np
from pathlib import Path
from tests.test_bench_cases import KINDS

worker.SETTLE_SECONDS = worker.WARM_UP_SECONDS = 0.0
held = worker.LibraryWorker({name!r}, 2)
found = {{}}
for kind in {kinds!r}:
    file = str(Path({folder!r}) / kind) + ".npy"
    np.save(file, task_of(KINDS[kind]).answer(KINDS[kind], make_inputs(KINDS[kind])))
    found[kind] = held.prepare(json.loads(json.dumps(asdict(KINDS[kind]))), file)
    held.release()
print("ANSWER" + json.dumps(found))
"""


def shares_threads() -> bool:
    """Whether `fastattn.share_threads_with_blas` is possible, in a process of its own."""
    code = "import fastattn; print(fastattn.share_threads_with_blas())"
    return python(code).strip() == "True"


@pytest.mark.slow
@pytest.mark.parametrize("name", PEERS)
def test_every_adapter_is_right_on_every_kind(name: str, tmp_path: Path) -> None:
    for module in NEEDS.get(name, []):
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"{module} is not installed")
    kinds = [*FLEX_KINDS] if name == "torch-flex" else [*KINDS]
    code = RUN_KINDS.format(name=name, kinds=kinds, folder=str(tmp_path))
    isas = cython_backend.available_isas()
    has_pairs = "avx512_bf16" in isas and "amx" not in isas
    if "avx2" in name and "avx2" not in isas:
        pytest.skip("no AVX2 here")
    if name == "fastattn-shared" and not shares_threads():
        pytest.skip("NumPy's threads cannot be shared here")
    printed = python(code, env=PEERS[name].environment, timeout=600)
    found: dict[str, dict[str, Any]] = json.loads(printed.rpartition("ANSWER")[2])
    assert list(found) == kinds
    for kind, answer in found.items():
        reasons = "; ".join(f"{label}: {way.get('reason')}" for label, way in answer["ways"].items())
        expected = UNABLE.get(name, {}).get(kind)
        able_here = kind in UNABLE_HERE.get(name, ()) and answer["chosen"] is not None
        if expected is None or able_here:
            assert answer["chosen"] is not None, f"{kind}: {reasons}"
            may_be_wrong = has_pairs and kind in PARTLY_WRONG_WITH_PAIRS.get(name, ())
            is_wrong = "wrong" in reasons
            assert may_be_wrong or is_wrong == (kind in PARTLY_WRONG.get(name, ())), f"{kind}: {reasons}"
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
