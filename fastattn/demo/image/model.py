"""DINOv2 in NumPy: everything between the pixels of a picture and the features of its patches.

The picture is cut into square patches, which a linear layer turns into tokens; a learned class token stands
before them, and each token gets the embedding of its place. The encoder is a stack of equal layers over
``x``, one row per token::

    x = x + scale_1 * attention(layer_norm(x))
    x = x + scale_2 * linear(gelu(linear(layer_norm(x))))

and the features are the rows of the last layer's ``x`` after one more norm. The attention is passed in as a
function, so that the same model runs with `fastattn` and without it.

Letters: ``P`` pixels on a patch's side, ``R`` rows and ``C`` columns of patches, ``L = 1 + R C`` tokens,
``H`` heads, ``D`` head_dim, ``N = H D`` numbers per token.

References
----------
Dosovitskiy et al., "An Image is Worth 16x16 Words: Transformers for Image Recognition at Scale" (2021).
Touvron et al., "Going Deeper with Image Transformers" (2021): the scales of layers.
Oquab et al., "DINOv2: Learning Robust Visual Features without Supervision" (2023).
Keys, "Cubic Convolution Interpolation for Digital Image Processing" (1981).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fastattn.demo._errors import DemoError
from fastattn.demo._layers import LayerNorm, Linear, gelu
from fastattn.demo.image.attention import Attend, Floats

#: The free parameter of cubic convolution, as PyTorch has it.
CUBIC = -0.75


@dataclass(frozen=True)
class Layer:
    """One encoder layer."""

    attention_norm: LayerNorm
    query_key_value: Linear  #: the three projections side by side, ``(3 * N, N)``
    attention_output: Linear
    attention_scale: Floats  #: ``(N,)``
    feed_forward_norm: LayerNorm
    up: Linear
    down: Linear
    feed_forward_scale: Floats  #: ``(N,)``

    def __call__(self, x: Floats, num_heads: int, attend: Attend) -> Floats:
        """The next state of ``x``, ``(L, N)``."""
        # Query, key and value are views into one product: (L, H, D) each, and no copy is made of them.
        together = self.query_key_value(self.attention_norm(x))
        query, key, value = np.moveaxis(together.reshape(len(x), 3, num_heads, -1), 1, 0)
        context = attend(query, key, value).reshape(x.shape)
        x = x + self.attention_scale * self.attention_output(context)
        return x + self.feed_forward_scale * self.down(gelu(self.up(self.feed_forward_norm(x))))


@dataclass(frozen=True)
class VisionTransformer:
    """A transformer that turns a picture into features: of the whole, and of each of its patches."""

    patch_size: int
    num_heads: int
    patches: Linear  #: ``(N, 3 * P * P)``: channels, then rows, then columns of pixels
    class_token: Floats  #: ``(N,)``, with the embedding of its place
    positions: Floats  #: ``(rows, columns, N)`` of the pictures that the model was trained on
    layers: tuple[Layer, ...]
    norm: LayerNorm

    @property
    def num_weights(self) -> int:
        arrays = [self.class_token, self.positions, *self.patches, self.norm.weight, self.norm.bias]
        for layer in self.layers:
            arrays += [layer.attention_scale, layer.feed_forward_scale]
            for linear in (layer.query_key_value, layer.attention_output, layer.up, layer.down):
                arrays += linear
            for norm in (layer.attention_norm, layer.feed_forward_norm):
                arrays += [norm.weight, norm.bias]
        return sum(array.size for array in arrays)

    def __call__(self, pixels: Floats, attend: Attend) -> Floats:
        """The features ``(1 + R * C, N)`` of a picture ``(R * P, C * P, 3)``, the class token's first."""
        rows, columns = pixels.shape[0] // self.patch_size, pixels.shape[1] // self.patch_size
        patches = pixels.reshape(rows, self.patch_size, columns, self.patch_size, 3)
        tokens = self.patches(patches.transpose(0, 2, 4, 1, 3).reshape(rows * columns, -1))
        tokens += interpolate(self.positions, rows, columns).reshape(tokens.shape)
        x = np.concatenate([self.class_token[None], tokens])
        for layer in self.layers:
            x = layer(x, self.num_heads, attend)
        features = self.norm(x)
        if not np.isfinite(features).all():
            raise DemoError("the model's weights are so large that what is computed overflows float32")
        return features


def interpolate(grid: Floats, rows: int, columns: int) -> Floats:
    """A grid ``(old rows, old columns, N)`` with another number of rows and columns."""
    down = _cubic_weights(rows, grid.shape[0])
    across = _cubic_weights(columns, grid.shape[1])
    out: Floats = across @ np.tensordot(down, grid, axes=1)
    return out


def _cubic_weights(new: int, old: int) -> Floats:
    """``(new, old)``: how much each of `new` points, evenly spread, takes of each of `old` ones.

    A point takes of the four nearest; beyond the ends stand copies of the last.
    """
    places = (np.arange(new) + 0.5) * (old / new) - 0.5
    before = np.floor(places).astype(np.int64)
    weights = np.zeros((new, old))
    for neighbour in range(-1, 3):
        distance = np.abs(places - before - neighbour)
        near = ((CUBIC + 2) * distance - (CUBIC + 3)) * distance * distance + 1
        far = CUBIC * (((distance - 5) * distance + 8) * distance - 4)
        clamped = np.clip(before + neighbour, 0, old - 1)
        np.add.at(weights, (np.arange(new), clamped), np.where(distance <= 1, near, far))
    return weights.astype(np.float32)
