"""The demo's language model: the right logits, tokens and draws, on tiny random weights.

The logits are compared with the formula in float64, one token and one head at a time, written out here
without any of the demo's code.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("gguf", reason="the demo extra is not installed")
pytest.importorskip("jinja2", reason="the demo extra is not installed")
pytest.importorskip("matplotlib", reason="the demo extra is not installed")
pytest.importorskip("ml_dtypes", reason="the demo extra is not installed")
pytest.importorskip("rich", reason="the demo extra is not installed")
pytest.importorskip("tokenizers", reason="the demo extra is not installed")

import gguf
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

from fastattn.demo._decoding import Sampler
from fastattn.demo._errors import DemoError
from fastattn.demo.generate import generation
from fastattn.demo.generate.attention import PlainAttention
from fastattn.demo.generate.clock import Clock
from fastattn.demo.generate.generation import Clocks, generate, new_cache
from fastattn.demo.generate.loading import GGUFFile, load_model
from fastattn.demo.generate.model import Llama, gate
from fastattn.demo.generate.perplexity import log_likelihoods, perplexity
from fastattn.demo.generate.tokenizer import TextTokenizer
from tests.demo_generate_models import (
    BEGIN,
    BYTE_LEVEL,
    CONTROL,
    END,
    IDS,
    MERGES,
    SIZES,
    USER_DEFINED,
    byte_level_vocabulary,
    random_tensors,
    sentence_piece_vocabulary,
    write_gguf,
)

KV_DTYPES = ("float32", "float16", "bfloat16", "int8")
PROMPT = [int(number) for number in np.random.default_rng(8).integers(0, 256, 37)]


# ---- the formula


def formula(
    tensors: Mapping[str, np.ndarray],
    sizes: Mapping[str, Any],
    ids: list[int],
    divisors: np.ndarray | float = 1.0,
    magnitude: float = 1.0,
) -> np.ndarray:
    """Logits after each of `ids`; each pair of numbers of a rotated head is one complex number."""
    weights = {name.removesuffix(".weight"): tensor.astype(np.float64) for name, tensor in tensors.items()}
    hidden = sizes["embedding_length"]
    heads, kv_heads = sizes["attention.head_count"], sizes["attention.head_count_kv"]
    head_dim = sizes.get("attention.key_length", hidden // heads)
    value_dim = sizes.get("attention.value_length", hidden // heads)
    rotary = sizes.get("rope.dimension_count", head_dim)
    frequencies = sizes["rope.freq_base"] ** (-np.arange(0, rotary, 2) / rotary) / divisors

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        return x / np.sqrt((x**2).mean() + sizes["attention.layer_norm_rms_epsilon"]) * weights[name]

    def rotate(x: np.ndarray, position: int) -> np.ndarray:
        turned = (x[:rotary:2] + 1j * x[1:rotary:2]) * magnitude * np.exp(1j * position * frequencies)
        return np.concatenate([np.stack([turned.real, turned.imag], axis=-1).ravel(), x[rotary:]])

    states = [weights["token_embd"][number] for number in ids]
    for layer in range(sizes["block_count"]):
        at = f"blk.{layer}."
        keys: list[list[np.ndarray]] = []
        values: list[list[np.ndarray]] = []
        for position, x in enumerate(states):
            y = norm(x, at + "attn_norm")
            key = (weights[at + "attn_k"] @ y).reshape(kv_heads, head_dim)
            keys.append([rotate(one, position) for one in key])
            values.append(list((weights[at + "attn_v"] @ y).reshape(kv_heads, value_dim)))
            outputs = []
            for head, query in enumerate((weights[at + "attn_q"] @ y).reshape(heads, head_dim)):
                group = head // (heads // kv_heads)
                rotated = rotate(query, position)
                scores = np.array([rotated @ key[group] for key in keys]) / math.sqrt(head_dim)
                probabilities = np.exp(scores - scores.max())
                probabilities /= probabilities.sum()
                outputs.append(sum(p * value[group] for p, value in zip(probabilities, values, strict=True)))
            x = x + weights[at + "attn_output"] @ np.concatenate(outputs)
            y = norm(x, at + "ffn_norm")
            gate = weights[at + "ffn_gate"] @ y
            inner = gate / (1 + np.exp(-gate)) * (weights[at + "ffn_up"] @ y)
            states[position] = x + weights[at + "ffn_down"] @ inner
    output = weights.get("output", weights["token_embd"])
    return np.array([output @ norm(x, "output_norm") for x in states])


def all_logits(model: Llama, attention: Any, ids: list[int], chunk: int = 16) -> np.ndarray:
    clock = Clock()
    return np.concatenate(
        [
            model.logits(model(ids[start : start + chunk], attention, clock), clock)
            for start in range(0, len(ids), chunk)
        ]
    )


def close(found: np.ndarray, expected: np.ndarray) -> bool:
    """To float32's rounding over two layers of sums."""
    return bool(np.abs(found - expected).max() <= 2e-5 * np.abs(expected).max())


VARIANTS: dict[str, dict[str, Any]] = {
    "grouped heads": {},
    "one key head": {"attention.head_count_kv": 1},
    "as many key heads": {"attention.head_count_kv": 4},
    "rotated in part": {"rope.dimension_count": 4},
    "head sizes of its own": {
        "attention.key_length": 16,
        "attention.value_length": 24,
        "rope.dimension_count": 16,
    },
}


@pytest.fixture
def tiny(tmp_path: Path) -> GGUFFile:
    return GGUFFile(write_gguf(tmp_path / "tiny.gguf"))


class TestLogits:
    @pytest.mark.parametrize("variant", VARIANTS)
    @pytest.mark.parametrize("tied", [True, False])
    def test_are_those_of_the_formula_both_ways(self, tmp_path: Path, variant: str, tied: bool) -> None:
        sizes = SIZES | VARIANTS[variant]
        tensors = random_tensors(sizes, len(BYTE_LEVEL), tied=tied)
        model = load_model(GGUFFile(write_gguf(tmp_path / "it.gguf", sizes=sizes, tensors=tensors)))
        expected = formula(tensors, sizes, PROMPT)
        for attention in (new_cache(model, "float32"), PlainAttention(len(model.layers))):
            found = all_logits(model, attention, PROMPT)
            assert found.dtype == np.float32
            assert close(found, expected)
            assert attention.length == len(PROMPT)

    def test_do_not_depend_on_the_pieces_of_the_prompt(self, tiny: GGUFFile) -> None:
        model = load_model(tiny)
        whole = all_logits(model, new_cache(model, "float32"), PROMPT, chunk=100)
        for chunk in (1, 2, 7, 36):
            assert close(all_logits(model, new_cache(model, "float32"), PROMPT, chunk), whole)
            assert close(all_logits(model, PlainAttention(2), PROMPT, chunk), whole)

    def test_with_frequencies_divided(self, tmp_path: Path) -> None:
        """As Llama 3.1 and later store it."""
        divisors = np.array([1, 2, 5, 8], np.float32)
        tensors = random_tensors(SIZES, len(BYTE_LEVEL))
        path = write_gguf(tmp_path / "it.gguf", tensors=tensors | {"rope_freqs.weight": divisors})
        model = load_model(GGUFFile(path))
        found = all_logits(model, new_cache(model, "float32"), PROMPT)
        assert close(found, formula(tensors, SIZES, PROMPT, divisors))
        assert not close(found, formula(tensors, SIZES, PROMPT))

    @pytest.mark.parametrize(
        "scaled",
        [
            {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0},
            {"rope.scaling.factor": 4.0},
            {"rope.scale_linear": 4.0},
            {
                "rope.scale_linear": 4.0,
                "rope.scaling.factor": 4.0,
                "rope.scaling.original_context_length": 99,
            },
        ],
    )
    def test_with_positions_scaled(self, tmp_path: Path, scaled: dict[str, Any]) -> None:
        """Also by the older key, and without the type: as llama.cpp reads them."""
        tensors = random_tensors(SIZES, len(BYTE_LEVEL))
        model = load_model(GGUFFile(write_gguf(tmp_path / "it.gguf", sizes=SIZES | scaled, tensors=tensors)))
        found = all_logits(model, new_cache(model, "float32"), PROMPT)
        assert close(found, formula(tensors, SIZES, PROMPT, 4.0))

    @pytest.mark.parametrize("betas", [(32.0, 1.0), (3.0, 0.5)])
    @pytest.mark.parametrize("original", [None, 64])
    def test_with_yarn(self, tmp_path: Path, betas: tuple[float, float], original: int | None) -> None:
        """By llama.cpp's ``rope_yarn``, whose original length is the context's where none is named."""
        factor, rotary, base = 8.0, 8, SIZES["rope.freq_base"]
        scaled: dict[str, Any] = {"rope.scaling.type": "yarn", "rope.scaling.factor": factor}
        if original is not None:
            scaled["rope.scaling.original_context_length"] = original
        if betas != (32.0, 1.0):
            scaled |= dict(
                zip(("rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow"), betas, strict=True)
            )
        length = SIZES["context_length"] if original is None else original
        start, stop = (
            rotary * math.log(length / (beta * 2 * math.pi)) / (2 * math.log(base)) for beta in betas
        )
        low, high = max(0, math.floor(start)), min(rotary - 1, math.ceil(stop))
        kept = 1 - np.clip((np.arange(rotary // 2) - low) / max(0.001, high - low), 0, 1)
        divisors = 1 / (kept + (1 - kept) / factor)
        assert 1 < divisors.max() <= factor and len(set(divisors)) > 1

        tensors = random_tensors(SIZES, len(BYTE_LEVEL))
        model = load_model(GGUFFile(write_gguf(tmp_path / "it.gguf", sizes=SIZES | scaled, tensors=tensors)))
        found = all_logits(model, new_cache(model, "float32"), PROMPT)
        assert close(found, formula(tensors, SIZES, PROMPT, divisors, 1 + 0.1 * math.log(factor)))

    @pytest.mark.parametrize("divided", [False, True])
    def test_with_tables_that_grow(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, divided: bool
    ) -> None:
        """They are no longer than what is read, whatever the model says that it can read."""
        monkeypatch.setattr("fastattn.demo.generate.model.FIRST_POSITIONS", 5)
        tensors = random_tensors(SIZES, len(BYTE_LEVEL))
        divisors = np.array([1, 2, 5, 8] if divided else [1, 1, 1, 1], np.float32)
        path = write_gguf(
            tmp_path / "it.gguf",
            sizes=SIZES | {"context_length": 2**32 - 1},
            tensors=tensors | ({"rope_freqs.weight": divisors} if divided else {}),
        )
        model = load_model(GGUFFile(path))
        assert model.context_length == 2**32 - 1
        found = all_logits(model, new_cache(model, "float32"), PROMPT, chunk=7)
        assert close(found, formula(tensors, SIZES, PROMPT, divisors))
        assert len(model.rope.up_to(1)[0]) < 4 * len(PROMPT)

    def test_scaled_twice(self, tmp_path: Path) -> None:
        tensors = random_tensors(SIZES, len(BYTE_LEVEL)) | {"rope_freqs.weight": np.ones(4, np.float32)}
        for scaled in ({"rope.scale_linear": 4.0}, {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0}):
            path = write_gguf(tmp_path / "it.gguf", sizes=SIZES | scaled, tensors=tensors)
            with pytest.raises(DemoError, match=r"rope_freqs.weight and by llama.rope.scal\w+"):
                load_model(GGUFFile(path))

    @pytest.mark.parametrize("stored", ["F16", "BF16", "Q8_0", "Q4_1"])
    def test_of_quantised_matrices(self, tmp_path: Path, stored: str) -> None:
        kind = gguf.GGMLQuantizationType[stored]
        tensors = random_tensors(SIZES, len(BYTE_LEVEL))
        model = load_model(GGUFFile(write_gguf(tmp_path / "it.gguf", tensors=tensors, stored=kind)))
        read = {
            name: tensor
            if tensor.ndim == 1
            else DECODERS[stored](gguf.quantize(tensor, kind)).reshape(tensor.shape)
            for name, tensor in tensors.items()
        }
        found = all_logits(model, new_cache(model, "float32"), PROMPT)
        assert close(found, formula(read, SIZES, PROMPT))
        assert not close(found, formula(tensors, SIZES, PROMPT))

    def test_of_a_cache_in_fewer_bits(self, tiny: GGUFFile) -> None:
        """The fewer bits, the further from float32, and never far; the cache is as much smaller."""
        model = load_model(tiny)
        found, nbytes = {}, {}
        for kv_dtype in KV_DTYPES:
            attention = new_cache(model, kv_dtype)
            found[kv_dtype] = all_logits(model, attention, PROMPT)
            nbytes[kv_dtype] = attention.nbytes
        largest = np.abs(found["float32"]).max()
        errors = {name: float(np.abs(it - found["float32"]).max() / largest) for name, it in found.items()}
        rounding = {"float16": 2**-11, "bfloat16": 2**-8, "int8": 1 / 254}  # relative to a group's largest
        for name, one in rounding.items():
            # Scores of about 10 turn a key's relative error into an absolute one that is ten times as large.
            assert one / 10 < errors[name] < 30 * one
        assert errors["float16"] < min(errors["bfloat16"], errors["int8"])
        assert nbytes["int8"] < nbytes["float16"] == nbytes["bfloat16"] < nbytes["float32"]

    def test_after_truncation(self, tiny: GGUFFile) -> None:
        model = load_model(tiny)
        attention = new_cache(model, "float32")
        first = all_logits(model, attention, PROMPT)
        attention.truncate(20)
        assert attention.length == 20
        assert close(all_logits(model, attention, PROMPT[20:]), first[20:])


def _half(data: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(data).view(np.float16).astype(np.float32)


def _decode_q8_0(data: np.ndarray) -> np.ndarray:
    """Blocks of 32: a scale in float16, and 32 int8."""
    blocks = data.reshape(-1, 34)
    return _half(blocks[:, :2]) * np.ascontiguousarray(blocks[:, 2:]).view(np.int8)


def _decode_q4_1(data: np.ndarray) -> np.ndarray:
    """Blocks of 32: a scale and a minimum in float16, then 16 bytes of the low halves and the high ones."""
    blocks = data.reshape(-1, 20)
    nibbles = np.concatenate([blocks[:, 4:] & 15, blocks[:, 4:] >> 4], axis=-1)
    return _half(blocks[:, :2]) * nibbles + _half(blocks[:, 2:4])


DECODERS = {
    "F16": _half,
    "BF16": lambda data: (np.ascontiguousarray(data).view(np.uint16).astype(np.uint32) << 16).view(
        np.float32
    ),
    "Q8_0": _decode_q8_0,
    "Q4_1": _decode_q4_1,
}


@pytest.mark.parametrize("rows", [1, 16, 37])
def test_gate_of_any_size(rows: int) -> None:
    x = np.array([-1e30, -200, -1, 0, 1, 200, 1e30], np.float32)
    given = np.array([np.roll(x, row) for row in range(rows)])
    up = np.random.default_rng(0).standard_normal(given.shape, np.float32)
    with np.errstate(over="ignore"):
        expected = up * (given.astype(np.float64) / (1 + np.exp(-given.astype(np.float64))))
    with np.errstate(all="raise", under="ignore"):
        gate(up, given)
    np.testing.assert_allclose(up, expected, rtol=1e-6, atol=1e-6)


# ---- generation


class TestGeneration:
    def test_each_token_is_the_likeliest_after_all_before(self, tmp_path: Path) -> None:
        tensors = random_tensors(SIZES, len(BYTE_LEVEL))
        model = load_model(GGUFFile(write_gguf(tmp_path / "it.gguf", tensors=tensors)))
        clocks = Clocks()
        attention = new_cache(model, "float32")
        tokens = list(islice(generate(model, PROMPT, attention, Sampler(0, 1, 0), clocks), 6))
        logits = formula(tensors, SIZES, PROMPT + tokens)
        assert tokens == logits[len(PROMPT) - 1 : -1].argmax(axis=-1).tolist()
        # The last token has not been through the model.
        assert (clocks.prefill.tokens, clocks.decode.tokens) == (len(PROMPT), 5)

    def test_ends_where_the_context_is_full(self, tmp_path: Path) -> None:
        path = write_gguf(tmp_path / "it.gguf", sizes=SIZES | {"context_length": 40})
        model = load_model(GGUFFile(path))
        attention = new_cache(model, "float32")
        assert len(list(generate(model, PROMPT, attention, Sampler(0, 1, 0), Clocks()))) == 40 - 37 + 1
        assert attention.length == 40

    def test_clock_counts_every_part(self, tiny: GGUFFile, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(generation, "CHUNK", 10)
        model = load_model(tiny)
        clocks = Clocks()
        list(islice(generate(model, PROMPT, PlainAttention(2), Sampler(0, 1, 0), clocks), 3))
        for clock in (clocks.prefill, clocks.decode):
            assert all(seconds > 0 for seconds in clock.seconds.values())
            assert clock.total == pytest.approx(sum(clock.seconds.values()))
            assert clock.tokens_per_second == pytest.approx(clock.tokens / clock.total)
            assert 0 < clock.attention_share < 1


class TestSampler:
    LOGITS = np.log(np.array([0.1, 0.4, 0.05, 0.3, 0.15], np.float32))

    def draws(self, temperature: float, top_p: float, seed: int = 0, count: int = 4000) -> list[int]:
        sampler = Sampler(temperature, top_p, seed)
        return [sampler(self.LOGITS) for _ in range(count)]

    def test_zero_temperature_takes_the_likeliest(self) -> None:
        assert set(self.draws(0, 0.5, count=20)) == {1}

    @pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
    def test_frequencies(self, temperature: float) -> None:
        expected = np.exp(self.LOGITS.astype(np.float64) / temperature)
        expected /= expected.sum()
        found = np.bincount(self.draws(temperature, 1.0), minlength=5) / 4000
        assert np.abs(found - expected).max() < 4 * math.sqrt(0.25 / 4000)

    @pytest.mark.parametrize(
        ("top_p", "kept"), [(0.01, {1}), (0.41, {1, 3}), (0.84, {1, 3, 4}), (1.0, {0, 1, 2, 3, 4})]
    )
    def test_fewest_that_make_up_the_probability(self, top_p: float, kept: set[int]) -> None:
        assert set(self.draws(1.0, top_p)) == kept

    def test_same_seed_same_draws(self) -> None:
        assert self.draws(1.0, 1.0, seed=7) == self.draws(1.0, 1.0, seed=7)
        assert self.draws(1.0, 1.0, seed=7) != self.draws(1.0, 1.0, seed=8)

    def test_logits_of_any_size(self) -> None:
        sampler = Sampler(0.01, 1.0, 0)
        assert sampler(np.array([-3e38, 3e38, 0], np.float32)) == 1
        assert sampler(np.array([-np.inf, 1, -np.inf], np.float32)) == 1


# ---- perplexity


def test_perplexity_is_that_of_the_formula(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fastattn.demo.generate.perplexity.CHUNK", 11)
    monkeypatch.setattr("fastattn.demo.generate.perplexity.ROWS", 4)
    tensors = random_tensors(SIZES, len(BYTE_LEVEL))
    model = load_model(GGUFFile(write_gguf(tmp_path / "it.gguf", tensors=tensors)))
    logits = formula(tensors, SIZES, PROMPT)[:-1]
    chosen = logits[np.arange(len(logits)), PROMPT[1:]]
    expected = chosen - np.log(np.exp(logits).sum(axis=-1))
    found = log_likelihoods(model, PROMPT, new_cache(model, "float32"), Clock())
    np.testing.assert_allclose(found, expected, atol=2e-4)
    assert perplexity([found[:10], found[10:]]) == pytest.approx(math.exp(-expected.mean()), rel=1e-4)


# ---- tokens


TEXTS = [
    "",
    "the end on a line",
    "In 2024 the cat sat, and 1,234.5 more: ½ of ٣٤!",
    "it's he'll WE'RE don't\n\n  two\t tabs   \n",
    " naïve café 東京 🙂👨‍👩‍👧 \u200b\u0301",
    f"{BEGIN}user\nhi{END}\n",
    "a\r\nb \u00a0 c\u3000d",
]


class TestByteLevelTokens:
    @pytest.mark.parametrize("text", TEXTS)
    def test_are_those_of_the_published_settings(self, tiny: GGUFFile, text: str) -> None:
        """SmolLM2's own tokenizer.json: digits apart, then GPT-2's byte level as the library knows it."""
        merges = [tuple(pair.split()) for pair in MERGES]
        expected = Tokenizer(models.BPE(dict(IDS), merges))
        expected.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
        expected.add_tokens([AddedToken(name, special=True, normalized=False) for name in (BEGIN, END)])
        assert TextTokenizer(tiny).encode(text) == expected.encode(text).ids

    @pytest.mark.parametrize("text", TEXTS)
    def test_give_the_text_back(self, tiny: GGUFFile, text: str) -> None:
        tokenizer = TextTokenizer(tiny)
        ids = tokenizer.encode(text)
        whole = b"".join(tokenizer.bytes_of(number) for number in ids).decode()
        assert whole == text.replace(BEGIN, "").replace(END, "")
        assert "".join(tokenizer.texts_of(ids)).count(BEGIN) == text.count(BEGIN)

    def test_digits_stand_alone_by_smollm_and_not_by_gpt2(self, tmp_path: Path) -> None:
        found = {}
        for kind in ("smollm", "gpt-2", "llama-bpe"):
            vocabulary = byte_level_vocabulary() | {"pre": kind}
            path = write_gguf(tmp_path / f"{kind}.gguf", vocabulary=vocabulary)
            found[kind] = TextTokenizer(GGUFFile(path)).encode("20")
        assert found["smollm"] == [IDS["2"], IDS["0"]]
        assert found["gpt-2"] == found["llama-bpe"] == [IDS["20"]]

    def test_text_begins_with_a_token_where_the_file_says_so(self, tmp_path: Path) -> None:
        vocabulary = byte_level_vocabulary() | {"add_bos_token": True}
        tokenizer = TextTokenizer(GGUFFile(write_gguf(tmp_path / "it.gguf", vocabulary=vocabulary)))
        assert tokenizer.encode("a") == [IDS[BEGIN], IDS["a"]]
        assert tokenizer.encode(f"{BEGIN}a") == [IDS[BEGIN], IDS["a"]]

    def test_stream_holds_characters_back_until_they_are_whole(self, tiny: GGUFFile) -> None:
        tokenizer = TextTokenizer(tiny)
        ids = tokenizer.encode("é🙂!")
        assert len(ids) == 7
        assert list(tokenizer.stream(iter(ids))) == ["", "é", "", "", "", "🙂", "!", ""]
        assert list(tokenizer.stream(iter(ids[:4]))) == ["", "é", "", "", "\ufffd"]

    def test_conversation(self, tiny: GGUFFile) -> None:
        messages = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}]
        expected = f"{BEGIN}user\none{END}\n{BEGIN}assistant\ntwo{END}\n{BEGIN}assistant\n"
        assert TextTokenizer(tiny).conversation(messages) == expected

    def test_without_a_template_the_text_is_continued(self, tmp_path: Path) -> None:
        path = write_gguf(tmp_path / "it.gguf", without=["tokenizer.chat_template"])
        assert TextTokenizer(GGUFFile(path)).conversation([{"role": "user", "content": "one"}]) == "one"

    def test_words_that_a_user_added(self, tmp_path: Path) -> None:
        vocabulary = byte_level_vocabulary()
        vocabulary |= {
            "tokens": [*BYTE_LEVEL, "é 2"],
            "token_type": [*vocabulary["token_type"], USER_DEFINED],
        }
        tokenizer = TextTokenizer(GGUFFile(write_gguf(tmp_path / "it.gguf", vocabulary=vocabulary)))
        assert tokenizer.encode("aé 20") == [IDS["a"], len(BYTE_LEVEL), IDS["0"]]
        assert tokenizer.texts_of(tokenizer.encode("aé 20")) == ["a", "é 2", "0"]

    def test_turns_end_with_what_the_file_and_custom_name(self, tmp_path: Path) -> None:
        tokens = [*BYTE_LEVEL, "<|eot_id|>", "<|endoftext|>"]
        vocabulary = byte_level_vocabulary()
        vocabulary |= {"tokens": tokens, "token_type": vocabulary["token_type"] + [CONTROL, CONTROL]}
        tokenizer = TextTokenizer(GGUFFile(write_gguf(tmp_path / "it.gguf", vocabulary=vocabulary)))
        assert tokenizer.ends == {IDS[END], len(BYTE_LEVEL), len(BYTE_LEVEL) + 1}


class TestSentencePieceTokens:
    @pytest.fixture
    def tokenizer(self, tmp_path: Path) -> TextTokenizer:
        return TextTokenizer(
            GGUFFile(write_gguf(tmp_path / "it.gguf", vocabulary=sentence_piece_vocabulary()))
        )

    @pytest.mark.parametrize(
        ("text", "pieces"),
        [
            ("a", ["▁a"]),
            ("abc", ["▁a", "bc"]),  # ▁a scores above ab
            ("b", ["▁", "b"]),
            ("cab", ["▁", "c", "ab"]),
            ("aabc", ["▁a", "ab", "c"]),  # ab scores above bc
            ("a a", ["▁a", "▁a"]),
            ("d", ["▁", "<0x64>"]),
            ("é", ["▁", "<0xC3>", "<0xA9>"]),
            ("</s>a", ["</s>", "▁a"]),
        ],
    )
    def test_best_score_first(self, tokenizer: TextTokenizer, text: str, pieces: list[str]) -> None:
        ids = tokenizer.encode(text)
        assert [tokenizer.tokens[number] for number in ids] == ["<s>", *pieces]
        whole = b"".join(tokenizer.bytes_of(number) for number in ids).decode()
        assert whole == f" {text.replace('</s>', '')}"

    def test_no_space_before_where_the_file_says_so(self, tmp_path: Path) -> None:
        vocabulary = sentence_piece_vocabulary() | {"add_space_prefix": False, "add_bos_token": False}
        tokenizer = TextTokenizer(GGUFFile(write_gguf(tmp_path / "it.gguf", vocabulary=vocabulary)))
        assert [tokenizer.tokens[number] for number in tokenizer.encode("ab a")] == ["ab", "▁a"]

    def test_ends(self, tokenizer: TextTokenizer) -> None:
        assert tokenizer.ends == {2}
