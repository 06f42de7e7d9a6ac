"""The demo's model: the right embeddings, on tiny random weights and on the real ones.

The tiny models are checked against the formula for one text at a time in float64, written out here without
any of the demo's code.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("safetensors", reason="the demo extra is not installed")
pytest.importorskip("tokenizers", reason="the demo extra is not installed")
pytest.importorskip("matplotlib", reason="the demo extra is not installed")
pytest.importorskip("rich", reason="the demo extra is not installed")

from safetensors.numpy import load_file
from tokenizers import Tokenizer, normalizers

from fastattn.demo._errors import DemoError
from fastattn.demo._layers import gelu
from fastattn.demo.embed import cli, loading, model
from fastattn.demo.embed.attention import fast_attention, plain_attention
from fastattn.demo.embed.corpus import PASSAGES, QUERIES, SENTENCES
from fastattn.demo.embed.picture import MAX_TOKENS as MAX_PICTURE_TOKENS
from tests.demo_embed_models import (
    EPS,
    HEADS,
    HIDDEN,
    LAYERS,
    MAX_TOKENS,
    POSITIONS,
    TEXTS,
    VOCABULARY,
    WORDS,
    demo_embeddings,
    needs_real_model,
    random_tensors,
    token_ids,
    word_piece_tokenizer,
    write_json,
    write_model,
)


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    return write_model(tmp_path / "tiny")


# ---- the formula, one text at a time


def formula(
    tensors: dict[str, np.ndarray],
    text: str,
    dtype: type = np.float64,
    activation: str = "gelu",
    pooling: str = "mean_tokens",
    first_position: int = 0,
) -> np.ndarray:
    """The embedding of one text: no batch, no padding, one head after the other."""
    get = {name: values.astype(dtype) for name, values in tensors.items()}

    def linear(x: np.ndarray, name: str) -> np.ndarray:
        return x @ get[f"{name}.weight"].T + get[f"{name}.bias"]

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        scaled = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + dtype(EPS))
        return scaled * get[f"{name}.weight"] + get[f"{name}.bias"]

    def activate(x: np.ndarray) -> np.ndarray:
        if activation == "gelu":
            return (x * np.vectorize(lambda v: 0.5 * (1 + math.erf(v / math.sqrt(2))))(x)).astype(dtype)
        if activation == "gelu_new":
            return (0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))).astype(dtype)
        return np.where(x > 0, x, dtype(0))

    ids = token_ids(text)
    x = get["embeddings.word_embeddings.weight"][ids]
    x = x + get["embeddings.position_embeddings.weight"][first_position : first_position + len(ids)]
    x = norm(x + get["embeddings.token_type_embeddings.weight"][0], "embeddings.LayerNorm")
    for number in range(LAYERS):
        prefix = f"encoder.layer.{number}"
        query, key, value = (
            linear(x, f"{prefix}.attention.self.{part}") for part in ("query", "key", "value")
        )
        heads = []
        for head in np.split(np.arange(HIDDEN), HEADS):
            scores = query[:, head] @ key[:, head].T / dtype(math.sqrt(HIDDEN // HEADS))
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            heads.append(weights / weights.sum(-1, keepdims=True) @ value[:, head])
        context = np.concatenate(heads, axis=-1)
        x = norm(
            x + linear(context, f"{prefix}.attention.output.dense"), f"{prefix}.attention.output.LayerNorm"
        )
        inner = activate(linear(x, f"{prefix}.intermediate.dense"))
        x = norm(x + linear(inner, f"{prefix}.output.dense"), f"{prefix}.output.LayerNorm")
    pooled = x[0] if pooling == "cls_token" else x.mean(axis=0)
    return pooled / np.sqrt((pooled**2).sum())


def check_against_formula(folder: Path, tensors: dict[str, np.ndarray], **options: object) -> None:
    expected = np.array([formula(tensors, text, **options) for text in TEXTS])
    in_float32 = np.array([formula(tensors, text, np.float32, **options) for text in TEXTS])
    assert in_float32.dtype == np.float32
    # Twice the error of the same formula in float32, as a root mean square: the largest of some hundred
    # errors is a matter of luck, and of the processor. And the demo's gelu is only good to 1e-6.
    own = 1e-6 if options.get("activation", "gelu") == "gelu" else 0
    error, plain_error = (
        np.sqrt(((got - expected) ** 2).mean()) for got in (demo_embeddings(folder, TEXTS), in_float32)
    )
    assert error <= 2 * plain_error + own


class TestModelAgreesWithTheFormula:
    @pytest.mark.parametrize("pooling", ["mean_tokens", "cls_token"])
    @pytest.mark.parametrize("activation", ["gelu", "gelu_new", "relu"])
    def test_bert(self, tmp_path: Path, activation: str, pooling: str) -> None:
        folder = write_model(tmp_path, hidden_act=activation, pooling=pooling)
        check_against_formula(folder, random_tensors(), activation=activation, pooling=pooling)

    @pytest.mark.parametrize("model_type", ["roberta", "xlm-roberta", "camembert"])
    def test_roberta_positions_start_after_the_padding_id(self, tmp_path: Path, model_type: str) -> None:
        tensors = random_tensors(type_vocab_size=1)
        folder = write_model(
            tmp_path, tensors=tensors, model_type=model_type, pad_token_id=1, type_vocab_size=1
        )
        check_against_formula(folder, tensors, first_position=2)
        (folder / "sentence_bert_config.json").unlink()
        assert loading.load_model(folder).max_tokens == POSITIONS - 2

    def test_weights_in_float16(self, tmp_path: Path) -> None:
        tensors = {name: values.astype(np.float16) for name, values in random_tensors().items()}
        check_against_formula(write_model(tmp_path, tensors=tensors), tensors)

    def test_weights_in_bfloat16(self, tmp_path: Path) -> None:
        upper_halves = {
            name: (values.view(np.uint32) >> 16).astype(np.uint16)
            for name, values in random_tensors().items()
        }
        write_model(tmp_path)
        header, body = {}, b""
        for name, half in upper_halves.items():
            span = [len(body), len(body) + half.nbytes]
            header[name] = {"dtype": "BF16", "shape": half.shape, "data_offsets": span}
            body += half.tobytes()
        head = json.dumps(header).encode()
        (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(head)) + head + body)
        tensors = {
            name: (half.astype(np.uint32) << 16).view(np.float32) for name, half in upper_halves.items()
        }
        check_against_formula(tmp_path, tensors)

    def test_names_behind_a_prefix(self, tmp_path: Path) -> None:
        prefixed = {f"bert.{name}": values for name, values in random_tensors().items()}
        check_against_formula(write_model(tmp_path, tensors=prefixed), random_tensors())

    def test_vocabulary_file_instead_of_a_tokenizer_file(self, tiny: Path) -> None:
        (tiny / "tokenizer.json").unlink()
        (tiny / "vocab.txt").write_text("\n".join(VOCABULARY), encoding="utf-8")
        check_against_formula(tiny, random_tensors())

    def test_transformer_and_pooling_in_folders_of_their_own(self, tiny: Path) -> None:
        (tiny / "0_BERT").mkdir()
        for name in ("config.json", "tokenizer.json", "model.safetensors", "sentence_bert_config.json"):
            (tiny / name).rename(tiny / "0_BERT" / name)
        write_json(tiny / "other" / "config.json", {"pooling_mode_cls_token": True})
        modules = [{"type": "x.Transformer", "path": "0_BERT"}, {"type": "x.Pooling", "path": "other"}]
        write_json(tiny / "modules.json", modules)
        check_against_formula(tiny, random_tensors(), pooling="cls_token")

    def test_bare_folder_pools_by_the_mean(self, tiny: Path) -> None:
        (tiny / "modules.json").unlink()
        (tiny / "1_Pooling" / "config.json").unlink()
        check_against_formula(tiny, random_tensors())

    def test_lower_case_setting(self, tiny: Path) -> None:
        tokenizer = word_piece_tokenizer()
        tokenizer.normalizer = normalizers.BertNormalizer(lowercase=False)
        tokenizer.save(str(tiny / "tokenizer.json"))
        loud, quiet = [text.upper() for text in TEXTS], TEXTS
        assert not np.array_equal(demo_embeddings(tiny, loud), demo_embeddings(tiny, quiet))
        write_json(tiny / "sentence_bert_config.json", {"max_seq_length": MAX_TOKENS, "do_lower_case": True})
        np.testing.assert_array_equal(demo_embeddings(tiny, loud), demo_embeddings(tiny, quiet))


@pytest.mark.parametrize("pooling", ["mean", "cls"])
def test_folder_as_sentence_transformers_6_writes_it(tiny: Path, pooling: str) -> None:
    write_json(
        tiny / "1_Pooling" / "config.json",
        {"embedding_dimension": HIDDEN, "pooling_mode": pooling, "include_prompt": True},
    )
    inner = {"method": "forward", "method_output_name": "last_hidden_state"}
    settings = {
        "transformer_task": "feature-extraction",
        "modality_config": {"text": inner},
        "module_output_name": "token_embeddings",
    }
    write_json(tiny / "sentence_bert_config.json", settings)
    write_json(tiny / "tokenizer_config.json", {"model_max_length": MAX_TOKENS, "padding_side": "right"})
    named = ["module_input_name", "module_output_name"]
    write_json(tiny / "2_Normalize" / "config.json", dict.fromkeys(named, "sentence_embedding"))
    whole = {"model_type": "SentenceTransformer", "similarity_fn_name": "cosine", "default_prompt_name": None}
    write_json(tiny / "config_sentence_transformers.json", whole | {"prompts": {"query": "", "document": ""}})
    check_against_formula(tiny, random_tensors(), pooling=f"{pooling}_token{'s' * (pooling == 'mean')}")


@pytest.mark.slow
class TestSavedBySentenceTransformers:
    """What the library computes from the folders that it writes, the demo computes."""

    @staticmethod
    def save(folder: Path, pooling: str, *, normalize: bool = True, **options: object) -> Any:
        library = pytest.importorskip("sentence_transformers")
        from sentence_transformers.base.modules import Normalize, Transformer
        from sentence_transformers.sentence_transformer.modules import Pooling

        transformer = Transformer(str(write_model(folder / "by hand")), max_seq_length=MAX_TOKENS - 4)
        modules = [transformer, Pooling(HIDDEN, pooling), *([Normalize()] if normalize else [])]
        model = library.SentenceTransformer(modules=modules, device="cpu", **options)
        model.save(str(folder / "saved"), create_model_card=False)
        return model

    @pytest.mark.parametrize(("pooling", "normalize"), [("mean", False), ("cls", True)])
    def test_pooling_and_length(self, tmp_path: Path, pooling: str, normalize: bool) -> None:
        model = self.save(tmp_path, pooling, normalize=normalize)
        assert loading.load_model(tmp_path / "saved").max_tokens == MAX_TOKENS - 4
        expected = model.encode(TEXTS, normalize_embeddings=True)
        np.testing.assert_allclose(demo_embeddings(tmp_path / "saved", TEXTS), expected, atol=2e-6)

    def test_prompts(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Before queries and before what is searched: not the same embeddings as without."""
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(cli, "_print_timing", lambda *given: None)
        monkeypatch.setattr(cli, "_save_picture", lambda *given: None)
        shown: list[np.ndarray] = []
        monkeypatch.setattr(cli, "_print_matches", lambda *given, **options: shown.append(given[2]))
        model = self.save(tmp_path, "mean", prompts={"query": "the cat ", "document": "it rains "})
        Path("texts.txt").write_text("\n".join(TEXTS), encoding="utf-8")
        words = ["--model", "saved", "--file", "texts.txt", "--query", "a dog"]
        assert cli.main(words) == 0
        expected = model.encode_query(["a dog"]) @ model.encode_document(TEXTS).T
        np.testing.assert_allclose(shown[0], expected, atol=5e-6)
        assert np.abs(expected - model.encode(["a dog"]) @ model.encode(TEXTS).T).max() > 0.01

    @pytest.mark.parametrize(
        ("pooling", "options", "said"),
        [
            ("max", {}, "pooling by ['max']"),
            (("mean", "cls"), {}, "pooling by ['mean', 'cls']"),
            ("mean", {"prompts": {"a": "the "}}, "prompts have 'a'"),
            ("mean", {"prompts": {"query": "the "}, "default_prompt_name": "query"}, "default_prompt_name"),
            ("mean", {"similarity_fn_name": "euclidean"}, "similarity_fn_name is 'euclidean'"),
            ("mean", {"truncate_dim": 8}, "'truncate_dim' is 8"),
        ],
    )
    def test_what_the_demo_does_not_do(
        self, tmp_path: Path, pooling: Any, options: dict[str, Any], said: str
    ) -> None:
        self.save(tmp_path, pooling, **options)
        with pytest.raises(DemoError, match=re.escape(said)):
            loading.load_model(tmp_path / "saved")


def test_gelu_is_accurate_to_its_promise() -> None:
    x = np.linspace(-14, 14, 20001, dtype=np.float32)
    exact = [v * 0.5 * math.erfc(-v / math.sqrt(2)) for v in x.tolist()]
    assert np.abs(gelu(x) - exact).max() < 1e-6


class TestPadding:
    def test_embedding_does_not_depend_on_the_batch(self, tiny: Path) -> None:
        alone = demo_embeddings(tiny, TEXTS, batch_size=1)
        # Not the same bits: the matrix products of NumPy round differently for other numbers of rows.
        for batch_size in (2, 3, len(TEXTS)):
            np.testing.assert_allclose(demo_embeddings(tiny, TEXTS, batch_size), alone, rtol=0, atol=2e-6)

    def test_padding_is_never_seen(self, tmp_path: Path) -> None:
        tensors = random_tensors()
        expected = demo_embeddings(write_model(tmp_path / "clean", tensors=tensors), TEXTS)
        tensors["embeddings.word_embeddings.weight"][VOCABULARY["[PAD]"]] = np.nan
        poisoned = demo_embeddings(write_model(tmp_path / "poisoned", tensors=tensors), TEXTS)
        np.testing.assert_array_equal(poisoned, expected)

    def test_batches_hold_every_text_once_and_neighbours_in_length(self) -> None:
        lengths = np.random.default_rng(1).integers(1, 40, 53)
        batches = model.batches_by_length([np.zeros(length, np.int64) for length in lengths], 8)
        np.testing.assert_array_equal(np.sort(np.concatenate(batches)), np.arange(53))
        assert max(map(len, batches)) == 8
        for longer, shorter in itertools.pairwise(batches):
            assert lengths[longer].min() >= lengths[shorter].max()

    def test_both_kinds_of_attention_agree(self) -> None:
        rng = np.random.default_rng(2)
        query, key, value = rng.standard_normal((3, 4, 9, 3, 8), dtype=np.float32)
        lengths = np.array([9, 1, 4, 8])
        fast = fast_attention(query, key, value, lengths)
        plain = plain_attention(query, key, value, lengths)
        assert fast.shape == plain.shape == query.shape
        np.testing.assert_allclose(fast, plain, rtol=0, atol=1e-6)


def test_cut_keeps_the_start_and_the_special_tokens(tiny: Path) -> None:
    encoder = loading.load_model(tiny)
    words = WORDS[:11]
    short, exact, long = (
        encoder.cut(encoder.tokenize([" ".join(some)])[0]) for some in (words[:3], words[:10], words)
    )
    assert len(short) == 5
    assert len(exact) == MAX_TOKENS
    np.testing.assert_array_equal(long, exact)
    assert [long[0], long[-1]] == [VOCABULARY["[CLS]"], VOCABULARY["[SEP]"]]


# ---- the real model


@pytest.fixture(scope="module")
def embed() -> Callable[[list[str]], np.ndarray]:
    encoder = loading.load_model(loading.find_model(None))
    return lambda texts: cli._encode(encoder, [encoder.cut(text) for text in encoder.tokenize(texts)], 16)


@pytest.fixture(scope="module")
def nearest(embed) -> Callable[[tuple[str, ...], str], str]:
    """Of `texts`, which are embedded once, the one that is nearest in meaning to a query."""
    embedded = functools.cache(embed)
    return lambda texts, query: texts[int(np.argmax(embedded(texts) @ embed([query])[0]))]


@needs_real_model
class TestRealModel:
    @pytest.mark.parametrize(
        ("query", "expected"),
        [
            (QUERIES[0], "leaves turn water"),
            (QUERIES[1], "plays the violin"),
            (QUERIES[2], "inflation"),
            (QUERIES[3], "good for the heart"),
            ("the first men on the Moon", "two astronauts"),
            ("How can I protect my data?", "backup"),
            ("famous paintings in museums", "Mona Lisa"),
            ("a river in South America", "Amazon"),
            ("sea mammals", "blue whale"),
            ("How do you cook noodles?", "pasta"),
            ("deep learning", "Neural networks"),
            ("desert climate", "Sahara"),
        ],
    )
    def test_the_sensible_sentence_wins(self, nearest, query: str, expected: str) -> None:
        assert expected in nearest(SENTENCES, query)

    @pytest.mark.slow
    @pytest.mark.parametrize(
        ("query", "expected"),
        [
            (QUERIES[0], "Green plants"),
            (QUERIES[1], "A violin"),
            (QUERIES[2], "Inflation"),
            (QUERIES[3], "There is no secret to good health"),
            (QUERIES[4], "A refrigerator"),
            ("How do I make bread?", "To bake a simple loaf"),
            ("the stolen painting", "Leonardo da Vinci"),
            ("What makes the ground shake?", "The surface of the Earth"),
            ("an epidemic caused by dirty water", "In the summer of 1854"),
            ("dreams", "During sleep"),
        ],
    )
    def test_the_sensible_passage_wins(self, nearest, query: str, expected: str) -> None:
        assert nearest(PASSAGES, query).startswith(expected)

    def test_passages_are_as_long_as_what_people_embed(self) -> None:
        encoder = loading.load_model(loading.find_model(None))
        counts = [len(encoding.ids) for encoding in encoder.tokenize(PASSAGES)]
        assert 24 <= len(counts) <= 32
        assert 100 <= min(counts) <= max(counts) <= 250 < encoder.max_tokens
        assert sum(counts) <= cli.TIMED_TOKENS  # all of them are timed
        longest_sentence = max(len(encoding.ids) for encoding in encoder.tokenize(SENTENCES))
        assert longest_sentence < MAX_PICTURE_TOKENS

    def test_same_meaning_is_nearer_than_same_words(self, embed) -> None:
        anchor, paraphrase, lookalike = embed(
            ["The man is eating lunch.", "A guy has his midday meal.", "The man is painting the bench."]
        )
        assert anchor @ paraphrase > anchor @ lookalike

    @pytest.mark.slow
    def test_agrees_with_torch(self, embed) -> None:
        """With PyTorch's linear, layer_norm, gelu and attention in float64, on one padded batch."""
        torch = pytest.importorskip("torch")
        functional = torch.nn.functional
        folder = loading.find_model(None)
        tensors = {
            name: torch.from_numpy(values).to(torch.float64 if values.dtype == np.float32 else torch.int64)
            for name, values in load_file(folder / "model.safetensors").items()
        }
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        tokenizer.enable_truncation(256)
        tokenizer.enable_padding()
        texts = [
            *SENTENCES[::4],
            *PASSAGES[::9],
            "",
            "na\u00efve \u6771\u4eac 12,345.67 $ [SEP] \U0001f642",
            " ".join(SENTENCES),
        ]
        encodings = tokenizer.encode_batch(texts)
        ids = torch.tensor([encoding.ids for encoding in encodings])
        real = torch.tensor([encoding.attention_mask for encoding in encodings]).bool()
        assert ids.shape[1] == 256

        def linear(x, name):
            return functional.linear(x, tensors[f"{name}.weight"], tensors[f"{name}.bias"])

        def norm(x, name):
            return functional.layer_norm(
                x, x.shape[-1:], tensors[f"{name}.weight"], tensors[f"{name}.bias"], 1e-12
            )

        x = tensors["embeddings.word_embeddings.weight"][ids]
        x = x + tensors["embeddings.position_embeddings.weight"][: ids.shape[1]]
        x = norm(x + tensors["embeddings.token_type_embeddings.weight"][0], "embeddings.LayerNorm")
        for number in range(6):
            prefix = f"encoder.layer.{number}"
            query, key, value = (
                linear(x, f"{prefix}.attention.self.{part}").unflatten(-1, (12, 32)).transpose(1, 2)
                for part in ("query", "key", "value")
            )
            context = functional.scaled_dot_product_attention(
                query, key, value, attn_mask=real[:, None, None, :]
            )
            context = linear(context.transpose(1, 2).flatten(2), f"{prefix}.attention.output.dense")
            x = norm(x + context, f"{prefix}.attention.output.LayerNorm")
            inner = functional.gelu(linear(x, f"{prefix}.intermediate.dense"))
            x = norm(x + linear(inner, f"{prefix}.output.dense"), f"{prefix}.output.LayerNorm")
        pooled = (x * real[..., None]).sum(1) / real.sum(1, keepdim=True)
        expected = functional.normalize(pooled, dim=1).numpy()
        assert np.abs(embed(texts) - expected).max() < 1e-6
