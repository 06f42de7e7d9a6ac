"""A transformer in NumPy with its gradients: everything between characters and the derivative of the loss.

The model is a stack of equal layers over ``x``, one row per character::

    x = x + attention(rms_norm(x)) @ w_o.T
    x = x + gelu(rms_norm(x) @ w_up.T) @ w_down.T

and the logits are ``rms_norm(x) @ output.T``. Queries and keys are rotated by their positions. The way back
goes through the same lines in reverse: each function here stands beside the one that gives its gradients.

Letters: ``B`` texts in a batch, ``L`` characters per text, ``R = B L`` rows, ``N`` numbers per character,
``H`` heads, ``D`` head_dim, ``V`` characters in the vocabulary.

References
----------
Radford et al., "Language Models are Unsupervised Multitask Learners" (2019).
Zhang and Sennrich, "Root Mean Square Layer Normalization" (2019).
Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding" (2021).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import DTypeLike

import fastattn
from fastattn.demo.train.attention import Attention, Floats

Ints = np.ndarray  # of int64

EPS = 1e-5  #: of the norms

# ---- functions, each beside its gradients


class Norm(NamedTuple):
    """What `rms_norm` computed."""

    x: Floats  #: scaled to a mean square of 1
    factor: Floats  #: by which each row was multiplied, ``(R, 1)``
    out: Floats


def rms_norm(x: Floats, weight: Floats) -> Norm:
    """Scale each row to a mean square of 1, then by the learned ``weight``."""
    mean_square = np.einsum("ij,ij->i", x, x) / x.shape[-1]
    factor = 1 / np.sqrt(mean_square + EPS)[:, None]
    scaled = x * factor
    return Norm(scaled, factor, scaled * weight)


def rms_norm_gradients(grad: Floats, norm: Norm, weight: Floats, grad_weight: Floats) -> Floats:
    """The gradient of the rows; that of the weight goes to `grad_weight`."""
    np.einsum("ij,ij->j", grad, norm.x, out=grad_weight)
    grad = grad * weight
    along = np.einsum("ij,ij->i", grad, norm.x)[:, None] / grad.shape[-1]
    grad -= norm.x * along
    grad *= norm.factor
    return grad


def linear_gradients(grad: Floats, x: Floats, weight: Floats, grad_weight: Floats) -> Floats:
    """Of ``x @ weight.T``: the gradient of `x`; that of the weight goes to `grad_weight`."""
    np.matmul(grad.T, x, out=grad_weight)
    grad_x: Floats = grad @ weight
    return grad_x


#: GELU through tanh is ``x / 2 * (1 + tanh(x * (LINEAR + CUBIC * x**2)))``.
LINEAR = math.sqrt(2 / math.pi)
CUBIC = 0.044715 * LINEAR

#: GELU takes so many rows at a time: what lies between its steps then stays in the cache.
GELU_ROWS = 32


def gelu(x: Floats) -> tuple[Floats, Floats]:
    """The function, and its derivative."""
    out, slope = np.empty_like(x), np.empty_like(x)
    for start in range(0, len(x), GELU_ROWS):
        rows = slice(start, start + GELU_ROWS)
        part = x[rows]
        square = part * part
        tanh = np.tanh(part * (LINEAR + CUBIC * square))
        half = 0.5 * (1 + tanh)
        np.multiply(part, half, out=out[rows])
        np.add(half, out[rows] * (1 - tanh) * (LINEAR + 3 * CUBIC * square), out=slope[rows])
    return out, slope


def cross_entropy(logits: Floats, targets: Ints) -> tuple[float, Floats]:
    """The mean over rows of ``-log(probability of the target)``, and its gradient in place of `logits`."""
    rows = np.arange(len(logits))
    logits -= logits.max(axis=-1, keepdims=True)
    of_targets = logits[rows, targets]
    np.exp(logits, out=logits)
    sums = logits.sum(axis=-1)
    loss = float(np.mean(np.log(sums) - of_targets, dtype=np.float64))
    logits /= sums[:, None]
    logits[rows, targets] -= 1
    logits /= len(logits)
    return loss, logits


# ---- the model


@dataclass(frozen=True)
class Sizes:
    """How large a model is."""

    vocabulary: int
    context: int
    num_layers: int = 4
    num_heads: int = 4
    head_dim: int = 32

    @property
    def width(self) -> int:
        return self.num_heads * self.head_dim

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of each weight by its name, matrices ``(outputs, inputs)`` before vectors."""
        n = self.width
        matrices: dict[str, tuple[int, ...]] = {"embedding": (self.vocabulary, n)}
        vectors: dict[str, tuple[int, ...]] = {"norm": (n,)}
        for layer in range(self.num_layers):
            matrices |= {
                f"{layer}.query_key_value": (3 * n, n),
                f"{layer}.attention_output": (n, n),
                f"{layer}.up": (4 * n, n),
                f"{layer}.down": (n, 4 * n),
            }
            vectors |= {f"{layer}.attention_norm": (n,), f"{layer}.feed_forward_norm": (n,)}
        return matrices | {"output": (self.vocabulary, n)} | vectors


class Tensors:
    """Named arrays one after another in `flat`, so that a step of the optimizer is a few operations."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], dtype: DTypeLike) -> None:
        ends = np.cumsum([math.prod(shape) for shape in shapes.values()])
        self.flat = np.zeros(ends[-1], dtype)
        pieces = np.split(self.flat, ends[:-1])
        self.named = {
            name: piece.reshape(shape) for (name, shape), piece in zip(shapes.items(), pieces, strict=True)
        }

    def __getitem__(self, name: str) -> Floats:
        return self.named[name]


class Layer(NamedTuple):
    """What one layer computed and its gradients need, in order."""

    attention_norm: Norm
    context: Floats  #: the output of the attention, ``(R, N)``
    feed_forward_norm: Norm
    activated: Floats  #: by GELU, ``(R, 4 N)``
    slope: Floats  #: its derivative


#: The attention of a layer: its number, and query, key and value ``(B, L, H, D)`` each; the output likewise.
Attend = Callable[[int, Floats, Floats, Floats], Floats]


class Model:
    """A language model of characters with random weights.

    Parameters
    ----------
    sizes : Sizes
    seed : int
    dtype : dtype, default float32
        Or float64, for tests.
    """

    def __init__(self, sizes: Sizes, seed: int, dtype: DTypeLike = np.float32) -> None:
        self.sizes = sizes
        self.weights = Tensors(sizes.shapes(), dtype)
        self._cos, self._sin = fastattn.rope_tables(sizes.context, sizes.head_dim, dtype=dtype)
        rng = np.random.default_rng(seed)
        for name, weight in self.weights.named.items():
            if weight.ndim == 1:
                weight[...] = 1
            else:
                # What is added to x grows with the number of layers if it is not made smaller with it.
                added = name.endswith(("attention_output", "down"))
                spread = 1 / math.sqrt(weight.shape[1] * (2 * sizes.num_layers if added else 1))
                if name == "output":
                    spread *= 0.1  # at first all characters are about equally likely
                weight[...] = rng.standard_normal(weight.shape) * spread

    def logits(self, ids: Ints, attend: Attend, start: int = 0) -> Floats:
        """Of the character after each, ``(B L, V)``, for ids ``(B, L)`` at the positions from `start` on."""
        _, norm = self._forward(ids, attend, start)
        logits: Floats = norm.out @ self.weights["output"].T
        return logits

    def loss(self, ids: Ints, attention: Attention) -> float:
        """The mean loss of predicting each id but the first of each row, ``(B, L + 1)``."""
        logits = self.logits(ids[:, :-1], attention.forward)
        return cross_entropy(logits, ids[:, 1:].ravel())[0]

    def loss_and_gradients(self, ids: Ints, attention: Attention, gradients: Tensors) -> float:
        """The same; the gradient of each weight goes to its place in `gradients`."""
        weights = self.weights
        layers, norm = self._forward(ids[:, :-1], attention.forward, 0)
        loss, grad = cross_entropy(norm.out @ weights["output"].T, ids[:, 1:].ravel())

        grad = linear_gradients(grad, norm.out, weights["output"], gradients["output"])
        grad = rms_norm_gradients(grad, norm, weights["norm"], gradients["norm"])
        for number, layer in reversed(list(enumerate(layers))):
            grad = self._layer_gradients(grad, number, layer, len(ids), attention, gradients)
        gradients["embedding"][...] = 0
        np.add.at(gradients["embedding"], ids[:, :-1].ravel(), grad)
        return loss

    def _forward(self, ids: Ints, attend: Attend, start: int) -> tuple[list[Layer], Norm]:
        """What each layer computed, and the norm at the end."""
        weights = self.weights
        batch, length = ids.shape
        positions = np.arange(start, start + length)
        x = weights["embedding"][ids.ravel()]
        layers = []
        for number in range(self.sizes.num_layers):
            attention_norm = rms_norm(x, weights[f"{number}.attention_norm"])
            together = attention_norm.out @ weights[f"{number}.query_key_value"].T
            query, key, value = self._heads(together, batch)
            for rotated in (query, key):
                fastattn.rope(rotated, self._cos, self._sin, positions=positions, layout="bshd", out=rotated)
            context = attend(number, query, key, value).reshape(x.shape)
            x = x + context @ weights[f"{number}.attention_output"].T

            feed_forward_norm = rms_norm(x, weights[f"{number}.feed_forward_norm"])
            activated, slope = gelu(feed_forward_norm.out @ weights[f"{number}.up"].T)
            x = x + activated @ weights[f"{number}.down"].T
            layers.append(Layer(attention_norm, context, feed_forward_norm, activated, slope))
        return layers, rms_norm(x, weights["norm"])

    def _layer_gradients(
        self, grad: Floats, number: int, layer: Layer, batch: int, attention: Attention, gradients: Tensors
    ) -> Floats:
        """The gradient of what went into a layer, from that of what came out, ``(R, N)`` each."""

        def linear(grad: Floats, x: Floats, name: str) -> Floats:
            name = f"{number}.{name}"
            return linear_gradients(grad, x, self.weights[name], gradients[name])

        def norm(grad: Floats, of: Norm, name: str) -> Floats:
            name = f"{number}.{name}"
            return rms_norm_gradients(grad, of, self.weights[name], gradients[name])

        inner = linear(grad, layer.activated, "down")
        inner *= layer.slope
        inner = linear(inner, layer.feed_forward_norm.out, "up")
        grad = grad + norm(inner, layer.feed_forward_norm, "feed_forward_norm")

        inner = linear(grad, layer.context, "attention_output")
        of_heads = attention.backward(number, inner.reshape(batch, -1, *self._head_shape))
        together = np.empty((len(grad), 3 * self.sizes.width), grad.dtype)
        for place, of_one in zip(self._heads(together, batch), of_heads, strict=True):
            place[...] = of_one
        for rotated in self._heads(together, batch)[:2]:
            # A rotation's gradient is turned back.
            fastattn.rope(rotated, self._cos, -self._sin, layout="bshd", out=rotated)
        inner = linear(together, layer.attention_norm.out, "query_key_value")
        return grad + norm(inner, layer.attention_norm, "attention_norm")

    @property
    def _head_shape(self) -> tuple[int, int]:
        return self.sizes.num_heads, self.sizes.head_dim

    def _heads(self, together: Floats, batch: int) -> Floats:
        """Query, key and value, or their gradients, as views of one product: ``(3, B, L, H, D)``."""
        return np.moveaxis(together.reshape(batch, -1, 3, *self._head_shape), 2, 0)
