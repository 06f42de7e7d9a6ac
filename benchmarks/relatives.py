"""``python -m benchmarks.relatives``: layers, relatives of attention and integrations, each against what is
used instead.

Each pair runs in a process of its own, with the other library as it comes. The results are compared first;
then both run once in every round, in an order that changes. Times are medians over the rounds, and so are
ratios, each of them taken within its round. Before each run the cores rest until idle threads no longer spin.

Pairs whose library is missing are left out with a reason. The exit status is 1 where a result is wrong. Needs
rich.
"""

from __future__ import annotations

import argparse
import ast
import multiprocessing
import os
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple, TypeVar

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

import fastattn
from fastattn._machine import host
from fastattn.bench.quiet import SETTLE_SECONDS, CoreProbes

#: Seconds for one pair beside the first call of each, and bounds on its rounds.
SECONDS, MIN_ROUNDS, MAX_ROUNDS = 8.0, 3, 25

Found = TypeVar("Found")

#: Largest difference allowed, relative to the largest number of the result.
TOLERANCE = 1e-4


class Pair(NamedTuple):
    theirs: Callable[[], Any]
    ours: Callable[[], Any]
    exact: Callable[[], Any] | None = None  #: what ours must be, where theirs is not exact enough


def _normal(*shape: int, seed: int = 0, dtype: str = "float32") -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


# ---- layers and relatives


def _layer(batch: int, length: int) -> Pair:
    import torch

    module = torch.nn.MultiheadAttention(768, 12, batch_first=True).eval().requires_grad_(False)
    layer = fastattn.layers.MultiHeadAttention.from_torch(module.state_dict(), 12)
    fastattn.share_threads_with_blas()
    x = _normal(batch, length, 768)
    tensor = torch.from_numpy(x)
    return Pair(lambda: module(tensor, tensor, tensor, need_weights=False)[0], lambda: layer(x))


def layer_512() -> Pair:
    return _layer(1, 512)


def layer_8x128() -> Pair:
    return _layer(8, 128)


def layer_products() -> Pair:
    """What a layer cannot do without."""
    weights = [_normal(768, 768, seed=seed) / 28 for seed in range(4)]
    layer = fastattn.layers.MultiHeadAttention(*weights, num_heads=12)
    fastattn.share_threads_with_blas()
    x = _normal(8, 128, 768)

    def parts() -> np.ndarray:
        q, k, v = ((x.reshape(-1, 768) @ w).reshape(8, 128, 12, 64) for w in weights[:3])
        return (fastattn.attention(q, k, v, layout="bshd").reshape(-1, 768) @ weights[3]).reshape(x.shape)

    return Pair(parts, lambda: layer(x))


def _linear(causal: bool) -> Pair:
    query, key, value = _normal(3, 1, 8, 4096, 64)

    def features(x: np.ndarray) -> np.ndarray:
        return np.where(x > 0, x + 1, np.exp(np.minimum(x, 0)))

    def formula() -> np.ndarray:
        phi_q, phi_k = features(query), features(key)
        if causal:  # as it is written most often: its L x S weights
            weights = np.tril(phi_q @ phi_k.swapaxes(-1, -2))
            return weights @ value / weights.sum(-1, keepdims=True)
        numerator = phi_q @ (phi_k.swapaxes(-1, -2) @ value)
        return numerator / (phi_q @ phi_k.sum(-2)[..., None])

    return Pair(formula, lambda: fastattn.linear_attention(query, key, value, causal=causal))


def linear_attention() -> Pair:
    return _linear(False)


def linear_attention_causal() -> Pair:
    return _linear(True)


def _density(features: int) -> Pair:
    from sklearn.neighbors import KernelDensity as Theirs

    from fastattn.integrations.sklearn import KernelDensity as Ours

    x, points = _normal(20_000, features, dtype="float64"), _normal(2_000, features, seed=1, dtype="float64")
    theirs, ours = (kind(bandwidth=0.5).fit(x) for kind in (Theirs, Ours))

    def exact() -> np.ndarray:
        scores = np.array([-2 * np.square(x - point).sum(-1) for point in points])
        largest = scores.max(-1)
        total = np.log(np.exp(scores - largest[:, None]).sum(-1)) + largest
        return total - np.log(len(x)) - features / 2 * np.log(2 * np.pi * 0.5**2)

    return Pair(lambda: theirs.score_samples(points), lambda: ours.score_samples(points), exact)


def density_3() -> Pair:
    return _density(3)


def density_16() -> Pair:
    return _density(16)


def density_64() -> Pair:
    return _density(64)


# ---- integrations


def scipy() -> Pair:
    from scipy.stats import gaussian_kde as theirs

    from fastattn.integrations.scipy import gaussian_kde as ours

    x, points = _normal(2, 10_000, dtype="float64"), _normal(2, 10_000, seed=1, dtype="float64")
    densities = [kind(x) for kind in (theirs, ours)]
    return Pair(lambda: densities[0](points), lambda: densities[1](points))


def seaborn() -> Pair:
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt
    import seaborn

    from fastattn.integrations.scipy import installed

    x = _normal(100_000, dtype="float64")

    def plot() -> np.ndarray:
        figure = plt.figure()
        line: np.ndarray = seaborn.kdeplot(x=x, ax=figure.subplots()).lines[0].get_ydata()
        plt.close(figure)
        return line

    def ours() -> np.ndarray:
        with installed():
            return plot()

    return Pair(plot, ours)


def _labels(name: str, steps: int) -> Pair:
    from sklearn import semi_supervised

    from fastattn.integrations import sklearn

    groups = np.arange(8_000) % 4
    x = _normal(8_000, 10, dtype="float64") + 4 * np.eye(10)[groups]
    y = np.where(np.random.default_rng(0).random(8_000) < 0.01, groups, -1)

    def fit(module: Any) -> Any:
        model = getattr(module, name)(gamma=0.5, max_iter=steps, tol=0)
        with warnings.catch_warnings(action="ignore"):  # of the steps
            return model.fit(x, y).label_distributions_

    return Pair(lambda: fit(semi_supervised), lambda: fit(sklearn))


def label_propagation() -> Pair:
    return _labels("LabelPropagation", 20)


def label_spreading() -> Pair:
    return _labels("LabelSpreading", 6)


def statsmodels() -> Pair:
    from statsmodels.nonparametric.kernel_regression import KernelReg as Theirs

    from fastattn.integrations.statsmodels import KernelReg as Ours

    x, points = _normal(5_000, 2, dtype="float64"), _normal(5_000, 2, seed=1, dtype="float64")
    y = np.sin(x.sum(axis=1))
    models = [kind(y, x, "cc", "ll", [0.3, 0.3], rng=0) for kind in (Theirs, Ours)]
    return Pair(lambda: models[0].fit(points)[0], lambda: models[1].fit(points)[0])


def tabpfn() -> Pair:
    """A model of TabPFN 2.5's sizes, with random weights."""
    import torch
    from tabpfn.architectures import tabpfn_v2_5

    from fastattn.integrations.tabpfn import register, unregister

    config, _ = tabpfn_v2_5.parse_config({"max_num_classes": 10, "num_buckets": 100})
    torch.manual_seed(0)
    model = tabpfn_v2_5.get_architecture(config).eval()
    with torch.no_grad():  # some start at 0, so that attention would change nothing
        for parameter in model.parameters():
            parameter.copy_(0.02 * torch.randn_like(parameter) + (parameter.ndim == 1))
    x, y = torch.randn(1200, 1, 12), torch.randint(0, 3, (1000, 1)).float()

    def theirs() -> Any:
        with torch.no_grad():
            return model(x, y)

    def ours() -> Any:
        register()
        try:
            return theirs()
        finally:
            unregister()

    return Pair(theirs, ours)


def onnx() -> Pair:
    from onnx import parser
    from onnx.reference import ReferenceEvaluator

    from fastattn.integrations.onnx import operators

    graph = "g (float[1,8,512,64] x) => (float y) { y = Attention<is_causal=1>(x, x, x) }"
    model = parser.parse_model('<ir_version: 10, opset_import: ["": 23]> ' + graph)
    feed = {"x": _normal(1, 8, 512, 64)}
    theirs, ours = ReferenceEvaluator(model), ReferenceEvaluator(model, new_ops=operators)
    return Pair(lambda: theirs.run(None, feed)[0], lambda: ours.run(None, feed)[0])


def jax() -> Pair:
    import jax

    from fastattn.integrations.jax import attention

    x = jax.numpy.asarray(_normal(1, 8, 1024, 64))
    ours = jax.jit(lambda x: attention(x, x, x, causal=True))
    theirs = jax.jit(
        lambda x: jax.nn.dot_product_attention(*[x.swapaxes(1, 2)] * 3, is_causal=True).swapaxes(1, 2)
    )
    return Pair(lambda: theirs(x).block_until_ready(), lambda: ours(x).block_until_ready())


def tokamax() -> Pair:
    import jax
    import tokamax
    from absl import flags

    from fastattn.integrations.tokamax import register

    flags.FLAGS.mark_as_parsed()  # else it reads this program's command line
    register()
    x = jax.numpy.asarray(_normal(1, 1024, 8, 64))

    def attend(name: str) -> Callable[[], Any]:
        call = jax.jit(lambda x: tokamax.dot_product_attention(x, x, x, is_causal=True, implementation=name))
        return lambda: call(x).block_until_ready()

    return Pair(attend("xla"), attend("fastattn"))


def keras() -> Pair:
    os.environ["KERAS_BACKEND"] = "numpy"
    import keras

    from fastattn.integrations.keras import installed

    x = _normal(1, 512, 8, 64)

    def ours() -> Any:
        with installed():
            return keras.ops.dot_product_attention(x, x, x, is_causal=True)

    return Pair(lambda: keras.ops.dot_product_attention(x, x, x, is_causal=True), ours)


def _keras_hub(name: str, **sizes: int) -> Pair:
    """A model with random weights, of 512 tokens."""
    os.environ["KERAS_BACKEND"] = "numpy"
    import keras

    from fastattn.integrations.keras import installed

    with installed(models=True):  # an ImportError has the line for pip
        import keras_hub
    keras.utils.set_random_seed(0)
    model = getattr(keras_hub.models, name)(**sizes)
    ids = np.random.default_rng(0).integers(0, sizes["vocabulary_size"], (1, 512))
    inputs = {"token_ids": ids, "padding_mask": np.ones(ids.shape, bool)}

    def ours() -> Any:
        with installed(models=True):
            return model(inputs)

    return Pair(lambda: model(inputs), ours)


def keras_hub_distilbert() -> Pair:
    """Of the sizes of DistilBERT base."""
    return _keras_hub(
        "DistilBertBackbone", vocabulary_size=30522, num_layers=6, num_heads=12, hidden_dim=768,
        intermediate_dim=3072, max_sequence_length=512,
    )  # fmt: skip


def keras_hub_llama() -> Pair:
    """Of the sizes of SmolLM 135M, but for its layers and vocabulary."""
    return _keras_hub(
        "LlamaBackbone", vocabulary_size=1000, num_layers=2, num_query_heads=9, num_key_value_heads=3,
        hidden_dim=576, intermediate_dim=1536,
    )  # fmt: skip


def torch() -> Pair:
    import torch

    from fastattn.integrations.torch import attention

    x = torch.from_numpy(_normal(1, 8, 1024, 64))
    theirs = torch.nn.functional.scaled_dot_product_attention
    return Pair(lambda: theirs(x, x, x, is_causal=True), lambda: attention(x, x, x, causal=True))


def transformers() -> Pair:
    import torch
    from transformers import LlamaConfig, LlamaModel

    from fastattn.integrations.transformers import register

    register()
    sizes: dict[str, Any] = {
        "vocab_size": 1000, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 2,
        "num_attention_heads": 9, "num_key_value_heads": 3,
    }  # fmt: skip
    models = {
        name: LlamaModel._from_config(LlamaConfig(**sizes), attn_implementation=name).eval()
        for name in ("sdpa", "fastattn")
    }
    models["fastattn"].load_state_dict(models["sdpa"].state_dict())
    ids = torch.arange(1000)[None]

    def run(name: str) -> Any:
        with torch.no_grad():
            return models[name](ids).last_hidden_state

    return Pair(lambda: run("sdpa"), lambda: run("fastattn"))


def numba() -> Pair:
    from numba import njit

    import fastattn.integrations.numba as integration

    attention = integration.attention
    x = _normal(8, 1024, 64)

    @njit
    def theirs(x: Any) -> Any:
        out = np.empty_like(x)
        for h in range(len(x)):
            scores = x[h] @ x[h].T / np.float32(np.sqrt(x.shape[2]))
            for i in range(len(scores)):
                weights = np.exp(scores[i, : i + 1] - scores[i, : i + 1].max())
                scores[i, : i + 1] = weights / weights.sum()
                scores[i, i + 1 :] = 0
            out[h] = scores @ x[h]
        return out

    @njit
    def ours(x: Any) -> Any:
        return attention(x, x, x, True, None)

    return Pair(lambda: theirs(x), lambda: ours(x))


def dask() -> Pair:
    import dask.array as da

    from fastattn.integrations.dask import attention

    x = da.from_array(_normal(8, 2048, 64), chunks=(4, 512, 64))
    above = da.triu(da.ones((2048, 2048), chunks=(512, 512), dtype=bool), 1)
    scores = da.einsum("hld,hsd->hls", x, x) / 8
    scores = da.where(above, -np.inf, scores)
    weights = da.exp(scores - scores.max(-1, keepdims=True))
    theirs = da.einsum("hls,hsd->hld", weights / weights.sum(-1, keepdims=True), x).astype("float32")
    ours = attention(x, x, x, causal=True)
    return Pair(theirs.compute, ours.compute)


class Row(NamedTuple):
    """A line of the table; module: of `fastattn.integrations`, whose lines are counted."""

    make: Callable[[], Pair]
    what: str
    instead_of: str
    module: str | None = None


ROWS = [
    Row(layer_512, "MultiHeadAttention, 1,512,768", "torch.nn"),
    Row(layer_8x128, "MultiHeadAttention, 8,128,768", "torch.nn"),
    Row(layer_products, "the same", "its products and attention"),
    Row(linear_attention, "linear_attention, 1,8,4096,64", "the formula"),
    Row(linear_attention_causal, "the same, causal", "the formula, L x S"),
    Row(density_3, "KernelDensity, 20000 x 2000, D 3", "scikit-learn", "sklearn"),
    Row(density_16, "the same, D 16", "scikit-learn", "sklearn"),
    Row(density_64, "the same, D 64", "scikit-learn", "sklearn"),
    Row(scipy, "gaussian_kde, 10000 x 10000, D 2", "SciPy", "scipy"),
    Row(seaborn, "seaborn's kdeplot of 100000", "SciPy", "scipy"),
    Row(label_propagation, "LabelPropagation, 8000 x 10, 20 steps", "scikit-learn", "sklearn"),
    Row(label_spreading, "LabelSpreading, the same, 6 steps", "scikit-learn", "sklearn"),
    Row(statsmodels, "KernelReg, 5000 x 5000, D 2, local linear", "statsmodels", "statsmodels"),
    Row(tabpfn, "TabPFN 2.5, 1000 + 200 rows of 12", "PyTorch", "tabpfn"),
    Row(onnx, "Attention, 1,8,512,64 causal", "onnx's reference", "onnx"),
    Row(jax, "attention, 1,8,1024,64 causal", "jax.nn", "jax"),
    Row(tokamax, "dot_product_attention, 1,1024,8,64 causal", 'Tokamax\'s "xla"', "tokamax"),
    Row(numba, "the same, 8,1024,64 in @njit", "the formula in @njit", "numba"),
    Row(dask, "attention, 8,2048,64 causal, 2 x 4 chunks", "the formula on Dask", "dask"),
    Row(keras, "dot_product_attention, 1,8,512,64 causal", "Keras on NumPy", "keras"),
    Row(keras_hub_distilbert, "KerasHub's DistilBERT base, 1,512", "Keras on NumPy", "keras"),
    Row(keras_hub_llama, "KerasHub's LLaMA, 2 layers, 1,512", "Keras on NumPy", "keras"),
    Row(torch, "attention, 1,8,1024,64 causal", "PyTorch", "torch"),
    Row(transformers, "a LLaMA, 2 layers, 1000 tokens", 'transformers\' "sdpa"', "transformers"),
]


class Result(NamedTuple):
    theirs: float  #: seconds
    ours: float
    ratio: float
    rounds: int
    difference: float  #: relative
    warning: str | None


def _made(make: Callable[[], Pair]) -> Pair | str:
    """One pair, or why there is none."""
    try:
        return make()
    except ImportError as error:
        return str(error)


def _difference(pair: Pair) -> float:
    expected, got = np.asarray((pair.exact or pair.theirs)()), np.asarray(pair.ours())
    return float(np.abs(got - expected).max() / np.abs(expected).max())


def compare(make: Callable[[], Pair]) -> float | str:
    """The difference of one pair's results, in this process; or why there is none."""
    pair = _made(make)
    return pair if isinstance(pair, str) else _difference(pair)


def measure(make: Callable[[], Pair], seconds: float = SECONDS) -> Result | str:
    """Results and times of one pair, in this process; or why there are none."""
    pair = _made(make)
    if isinstance(pair, str):
        return pair
    difference = _difference(pair)
    pair.theirs()
    start = time.perf_counter()
    for call in pair[:2]:
        call()
    rounds = int(seconds / (time.perf_counter() - start + 2 * SETTLE_SECONDS))
    rounds = max(MIN_ROUNDS, min(MAX_ROUNDS, rounds))
    times: tuple[list[float], list[float]] = ([], [])
    probes = CoreProbes()
    for number in range(rounds):
        probes.take()
        for side in (0, 1) if number % 2 else (1, 0):
            time.sleep(SETTLE_SECONDS)
            start = time.perf_counter()
            pair[side]()
            times[side].append(time.perf_counter() - start)
    probes.take()
    ratio = median(theirs / ours for theirs, ours in zip(*times, strict=True))
    return Result(*map(median, times), ratio, rounds, difference, probes.warning())


def apart(work: Callable[[Callable[[], Pair]], Found], make: Callable[[], Pair]) -> Found:
    """`measure` or `compare` in a process of its own."""
    context = multiprocessing.get_context("spawn")  # a forked child of a process with threads has but one
    with ProcessPoolExecutor(1, mp_context=context) as process:
        return process.submit(work, make).result()


def lines_of_code(module: str) -> int:
    """Of an integration, a file or a folder, without comments and docstrings."""
    place = Path(fastattn.__file__).with_name("integrations") / module
    return sum(map(_lines_of_file, place.glob("*.py") if place.is_dir() else [place.with_suffix(".py")]))


def _lines_of_file(path: Path) -> int:
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            node.body = [it for it in body if not _is_text(it)]  # type: ignore[attr-defined]
    return sum(bool(line.strip()) for line in ast.unparse(tree).splitlines())


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.relatives",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument("--only", nargs="*", metavar="NAME", help="some of " + ", ".join(_names()))
    options = parser.parse_args(argv)
    if unknown := set(options.only or ()) - set(_names()):
        parser.error(f"--only: no {', '.join(sorted(unknown))}; there are {', '.join(_names())}")
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 2, 0, 0))
    for column in ("what", "instead of", "theirs", "ours", "ratio", "difference", "lines"):
        table.add_column(column, justify="left" if column in ("what", "instead of") else "right")
    notes, is_wrong = [], False
    for name, row in zip(_names(), ROWS, strict=True):
        if options.only and name not in options.only:
            continue
        found = apart(measure, row.make)
        if isinstance(found, str):
            notes.append(f"{name} is left out: {found}")
            continue
        if found.warning:
            notes.append(f"{name}: {found.warning}")
        if found.difference > TOLERANCE:
            is_wrong = True
            notes.append(f"{name} is wrong")
        table.add_row(
            row.what, row.instead_of, f"{1000 * found.theirs:.2f} ms", f"{1000 * found.ours:.2f} ms",
            f"{found.ratio:.2f}", f"{found.difference:.0e}",
            "" if row.module is None else str(lines_of_code(row.module)),
        )  # fmt: skip
    print(f"{host.cpu_name()}, {fastattn.get_num_threads()} threads; a ratio is their time over ours.")
    Console(width=140).print(table)
    for note in notes:
        print(note)
    return int(is_wrong)


def _names() -> list[str]:
    return [row.make.__name__ for row in ROWS]


if __name__ == "__main__":
    sys.exit(main())
