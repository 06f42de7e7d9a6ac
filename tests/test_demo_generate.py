"""The demo of generation as a command: streamed text, a comparison, chats, pictures, clear complaints."""

from __future__ import annotations

import io
import math
import os
import re
import struct
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from time import perf_counter

import numpy as np
import pytest

pytest.importorskip("gguf", reason="the demo extra is not installed")
pytest.importorskip("jinja2", reason="the demo extra is not installed")
pytest.importorskip("matplotlib", reason="the demo extra is not installed")
pytest.importorskip("ml_dtypes", reason="the demo extra is not installed")
pytest.importorskip("rich", reason="the demo extra is not installed")
pytest.importorskip("tokenizers", reason="the demo extra is not installed")

import gguf
from matplotlib.image import imread

import fastattn
from fastattn.backends.cython import backend as cython_backend
from fastattn.bench import quiet
from fastattn.demo import main
from fastattn.demo._decoding import LibraryAttention
from fastattn.demo.generate import cli, comparison, generation, template
from fastattn.demo.generate.attention import PlainAttention
from fastattn.demo.generate.clock import Clock
from fastattn.demo.generate.corpus import REQUEST, TEXT
from fastattn.demo.generate.heads import MAX_ROWS
from fastattn.demo.generate.loading import GGUFFile, find_model, load_model
from fastattn.demo.generate.model import Llama
from fastattn.demo.generate.tokenizer import TextTokenizer
from tests.cases import once
from tests.demo_generate_models import (
    BEGIN,
    BYTE_LEVEL,
    END,
    IDS,
    SIZES,
    byte_level_vocabulary,
    needs_real_model,
    random_tensors,
    sentence_piece_vocabulary,
    write_gguf,
)
from tests.demos import call_demo, complaint, go_to_empty_folder, one_line
from tests.gguf_bytes import Writer, contents, whole

#: The probes of the cores are switched off, and with them the compiled backend.
pytestmark = pytest.mark.filterwarnings("ignore:attention runs on the NumPy backend")

Write = Callable[..., Path]


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    return write_gguf(tmp_path / "tiny.gguf")


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Write a tiny model with some keys changed, added, or, with None, left out; and with other tensors."""

    def call(
        changes: Mapping[str, object], tensors: Mapping[str, np.ndarray] | None = None, kind: str = "bytes"
    ) -> Path:
        values, own = contents(kind)
        values = {key: it for key, it in (values | changes).items() if it is not None}
        path = tmp_path / "written.gguf"
        path.write_bytes(Writer().file(values, own if tensors is None else tensors))
        return path

    return call


#: Each conversation is a process.
RENDER = once(template.render)


@pytest.fixture(autouse=True)
def rendered_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fastattn.demo.generate.tokenizer.render", RENDER)


@pytest.fixture
def run_and_draw(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """Call the demo on the tiny model in an empty folder; gives the exit status, stdout and stderr."""
    go_to_empty_folder(tmp_path, monkeypatch)
    monkeypatch.setattr(cython_backend.backend, "unavailable_reasons", lambda: ["no probes in tests"])
    monkeypatch.setattr(fastattn, "share_threads_with_blas", lambda: False)  # it would outlast the test

    def call(*arguments: str, model_file: Path | None = tiny) -> tuple[int, str, str]:
        return call_demo(main, [*arguments, *(["--model", str(model_file)] if model_file else [])], capsys)

    return call


@pytest.fixture
def run(run_and_draw, monkeypatch: pytest.MonkeyPatch):
    """The same without the picture, which takes longer than all the rest."""
    monkeypatch.setattr("fastattn.demo.generate.picture.draw", lambda *given: None)
    monkeypatch.setattr(comparison, "MAX_ROUNDS", 2)
    return run_and_draw


def answer(out: str) -> str:
    """What the model wrote: between the line about the prompt and that about the tokens."""
    return out[out.index("\n\n") + 2 : out.index("\n\nTokens generated")]


def prompt_ids(path: Path, prompt: str) -> list[int]:
    tokenizer = TextTokenizer(GGUFFile(path))
    return tokenizer.encode(tokenizer.conversation([{"role": "user", "content": prompt}]))


class TestCommand:
    def test_prompt(self, run_and_draw, tiny: Path) -> None:
        status, out, err = run_and_draw("generate", "--prompt", "the end", "--max-tokens", "12")
        assert (status, err) == (0, "")
        assert f"Prompt: {len(prompt_ids(tiny, 'the end'))} tokens, beginning 'the end'" in out
        assert "Tokens generated: 12;" in out
        assert "The plain formula chooses the same tokens, all 12." in out
        for part in ("prefill", "decode"):
            assert re.search(rf"{part} +\d+ +tokens per second +\d+\.\d +\d+\.\d +\d+\.\d\d", out)
        assert out.count("attention, per token") == out.count("share of attention") == 2
        assert re.search(r"both +\d+ +seconds +\d+\.\d\d +\d+\.\d\d +\d+\.\d\d", out)
        difference = float(out.split("any token: ")[1].split()[0])
        assert 0 < difference < 1e-3
        assert Path("fastattn-demo.png").read_bytes().startswith(b"\x89PNG")

    def test_times_as_fast(self, run) -> None:
        """The median of the rounds between the least and the greatest; of a single round, itself."""
        assert cli._times_as_fast([(2.0, 3.0)]) == "1.50"
        assert cli._times_as_fast([(2.0, 3.0), (1.0, 4.0), (1.0, 1.0)]) == "1.50 (1.00-4.00)"
        out = run("--prompt", "the end", "--max-tokens", "3")[1]
        assert "(rounds: 2, " in out
        assert re.search(r"prefill .* \d+\.\d\d \(\d+\.\d\d-\d+\.\d\d\)", out)

    def test_is_the_demo_without_a_name(self, run) -> None:
        given = ["--prompt", "the end", "--max-tokens", "4"]
        assert answer(run(*given)[1]) == answer(run("generate", *given)[1])

    def test_text_is_the_model_s(self, run, tiny: Path) -> None:
        file = GGUFFile(tiny)
        model, tokenizer = load_model(file), TextTokenizer(file)
        ids = prompt_ids(tiny, "the end")
        attention = PlainAttention(2)
        generated = generation.generate(model, ids, attention, np.argmax, generation.Clocks())
        tokens = list(generation.until_end(generated, 20, tokenizer.ends, []))
        expected = b"".join(map(tokenizer.bytes_of, tokens)).decode(errors="replace").lstrip()
        expected = "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in expected)
        _, out, _ = run("--prompt", "the end", "--max-tokens", "20")
        assert expected in out

    def test_file_is_summarised(self, run, monkeypatch: pytest.MonkeyPatch) -> None:
        prompts = noted_prompts(monkeypatch)
        Path("notes.txt").write_text("the line\n", encoding="utf-8")
        assert run("--file", "notes.txt", "--max-tokens", "2")[0] == 0
        assert prompts == [f"{REQUEST}\n\nthe line\n"]

    def test_built_in_text(self, run, monkeypatch: pytest.MonkeyPatch) -> None:
        prompts = noted_prompts(monkeypatch)
        monkeypatch.setattr(cli, "compare", interrupt)
        monkeypatch.setattr(TextTokenizer, "encode", lambda self, text: [1, 2])
        assert run()[0] == 130
        assert prompts == [f"{REQUEST}\n\n{TEXT}"]

    @pytest.mark.parametrize("kv_dtype", cli.KV_DTYPES)
    def test_types_of_the_cache(self, run, monkeypatch: pytest.MonkeyPatch, kv_dtype: str) -> None:
        made: list[str] = []
        init = LibraryAttention.__init__

        def noted(self: LibraryAttention, *given: object) -> None:
            made.append(str(given[-1]))
            init(self, *given)

        monkeypatch.setattr(LibraryAttention, "__init__", noted)
        status, out, _ = run("--prompt", "the end", "--max-tokens", "6", "--kv-dtype", kv_dtype)
        assert status == 0
        assert set(made) == {kv_dtype}
        assert f"MB in {kv_dtype}." in out

    def test_seeds(self, run) -> None:
        def text(seed: int) -> str:
            words = ["--prompt", "the end", "--max-tokens", "15", "--temperature", "3", "--top-p", "1"]
            return answer(run(*words, "--seed", str(seed))[1])

        first = text(1)
        assert text(1) == first
        assert len({first, text(2), text(3)}) == 3

    def test_ends_with_the_turn(self, run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(Llama, "logits", endings(Llama.logits, after=3))
        status, out, _ = run("--prompt", "the end", "--max-tokens", "50")
        assert status == 0
        assert "Tokens generated: 3;" in out
        assert END not in answer(out)

    def test_one_token(self, run_and_draw) -> None:
        status, out, _ = run_and_draw("--prompt", "the end", "--max-tokens", "1")
        assert status == 0
        assert "Tokens generated: 1;" in out and "decode" not in out
        assert Path("fastattn-demo.png").exists()

    def test_difference_is_told(self, run, monkeypatch: pytest.MonkeyPatch) -> None:
        step = PlainAttention.step

        def wrong(self: PlainAttention, layer: int, *arrays: np.ndarray) -> np.ndarray:
            return step(self, layer, *arrays) + (np.float32(100) if self.length > 32 else np.float32(0))

        monkeypatch.setattr(comparison.PlainAttention, "step", wrong)
        _, out, _ = run("--prompt", "the end", "--max-tokens", "12")
        assert re.search(r"The plain formula chooses another token after the first \d of 12\.", out)
        assert float(out.split("any token: ")[1].split()[0]) > 0.1

    def test_long_answers_are_compared_in_part(self, run, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(comparison, "COMPARED", 5)
        _, out, _ = run("--prompt", "the end", "--max-tokens", "12")
        assert "Tokens generated: 12;" in out
        assert "chooses the same tokens, all 5." in out

    def test_sentence_piece_model(self, run, tmp_path: Path) -> None:
        path = write_gguf(tmp_path / "piece.gguf", vocabulary=sentence_piece_vocabulary())
        status, out, _ = run("--prompt", "abc", "--max-tokens", "5", model_file=path)
        assert status == 0
        assert "Prompt: 3 tokens" in out  # <s>, ▁a, bc

    def test_a_neighbour_on_the_cores_is_told(self, run, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(quiet.CoreProbes, "warning", lambda self: "Something else used the cores")
        assert "\nSomething else used the cores\n" in run("--prompt", "the end", "--max-tokens", "3")[1]

    @pytest.mark.parametrize(
        ("options", "expected", "told"),
        [
            ([], ["shared"], False),
            (["--threads", "1"], [1, "shared"], False),
            (["--share-threads"], ["shared"], True),
            (["--no-share-threads"], [], False),
        ],
    )
    def test_threads(
        self, run, monkeypatch: pytest.MonkeyPatch, options: list[str], expected: list[object], told: bool
    ) -> None:
        """Shared where possible; that it is not is told to those alone who asked for it."""
        calls: list[object] = []
        monkeypatch.setattr(fastattn, "set_num_threads", calls.append)
        monkeypatch.setattr(fastattn, "share_threads_with_blas", lambda: calls.append("shared"))
        _, _, err = run("--prompt", "the end", "--max-tokens", "2", *options)
        assert calls == expected
        assert ("threads of their own" in err) == told


def interrupt(*args: object) -> None:
    raise KeyboardInterrupt


def noted_prompts(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What users say in conversations from now on."""
    prompts: list[str] = []
    conversation = TextTokenizer.conversation

    def noted(self: TextTokenizer, messages: list[dict[str, str]]) -> str:
        prompts.append(messages[-1]["content"])
        return conversation(self, messages)

    monkeypatch.setattr(TextTokenizer, "conversation", noted)
    return prompts


def endings(logits, after: int):
    """`Llama.logits` that end the turn with the `after`-th token, of those timed by the clock of decode."""

    def changed(self: Llama, x: np.ndarray, clock: Clock) -> np.ndarray:
        result = logits(self, x, clock)
        if clock.tokens == after - 1:  # the first token is of prefill
            result[:, IDS[END]] = 1e9
        return result

    return changed


class TestStream:
    def test_each_token_is_shown_before_the_next_is_asked_for(
        self, tiny: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        tokenizer = TextTokenizer(GGUFFile(tiny))
        ids = tokenizer.encode("a théb\x1b🙂")
        shown: list[str] = []

        def tokens() -> Iterator[int]:
            for number in ids:
                yield number
                shown.append(capsys.readouterr().out)

        assert cli._print_stream(tokenizer, tokens()) == "a théb\x1b🙂"
        pieces = [piece for piece in shown if piece]
        assert "".join(pieces) == "a théb\ufffd🙂"
        assert len(pieces) == len("a théb\ufffd🙂") - 1  # a character each, but "th", which is one token

    def test_white_space_before_the_text_is_left_out(
        self, tiny: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        tokenizer = TextTokenizer(GGUFFile(tiny))
        assert cli._print_stream(tokenizer, iter(tokenizer.encode("\n  a\n b"))) == "a\n b"
        assert capsys.readouterr().out == "a\n b\n"


class TestChat:
    @pytest.fixture
    def say(self, run, monkeypatch: pytest.MonkeyPatch):
        def call(*turns: str, options: tuple[str, ...] = ()) -> tuple[int, str, str]:
            monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{turn}\n" for turn in turns)))
            return run("--chat", "--max-tokens", "5", *options)

        return call

    def test_each_turn_reads_only_what_is_new(self, say, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        read: list[tuple[int, int]] = []  # where a piece begins, and how many tokens it has
        forward = Llama.__call__

        def noted(self: Llama, ids: list[int], attention: LibraryAttention, clock: object) -> np.ndarray:
            read.append((attention.length, len(ids)))
            return forward(self, ids, attention, clock)

        monkeypatch.setattr(Llama, "__call__", noted)
        status, out, err = say("the end", "and on")
        assert (status, err) == (0, "")
        prompts = [(start, count) for start, count in read if count > 1]
        assert len(prompts) == 2
        first, second = prompts
        assert first == (0, len(prompt_ids(tiny, "the end")))
        assert second[0] >= first[1] and second[1] < 2 * first[1]
        assert out.count("> ") == 3
        assert "tokens per second: prefill" in out

    def test_answers_do_not_depend_on_the_cache(self, say, monkeypatch: pytest.MonkeyPatch) -> None:
        _, out, _ = say("the end", "and on", "so")
        monkeypatch.setattr(cli, "_common", lambda one, other: 0)
        _, again, _ = say("the end", "and on", "so")
        assert out.rpartition("\n\n")[0] == again.rpartition("\n\n")[0]

    def test_the_model_is_told_the_whole_conversation(self, say, monkeypatch: pytest.MonkeyPatch) -> None:
        conversations: list[list[str]] = []
        conversation = TextTokenizer.conversation

        def noted(self: TextTokenizer, messages: list[dict[str, str]]) -> str:
            conversations.append([message["role"] for message in messages])
            return conversation(self, messages)

        monkeypatch.setattr(TextTokenizer, "conversation", noted)
        say("one", "two")
        assert conversations == [["user"], ["user", "assistant", "user"]]

    def test_empty_line_ends_it(self, say) -> None:
        status, out, _ = say("the end", "", "never said")
        assert status == 0
        assert out.count("> ") == 2

    def test_over_the_context(self, say) -> None:
        status, _, err = say("the end", "long " * 100)
        assert status == 2
        assert "400" in err and "tokens" in err and "Traceback" not in err


class TestPerplexity:
    def test_table(self, run) -> None:
        Path("notes.txt").write_text("the end on the line in 2024\n" * 5, encoding="utf-8")
        status, out, err = run("--perplexity", "notes.txt")
        assert (status, err) == (0, "")
        rows = re.findall(r"^ (\w+) +([\d.]+) +([-+][\d.]+)% +([\d.]+) MB +\d+ *$", out, re.MULTILINE)
        assert [row[0] for row in rows] == list(cli.KV_DTYPES)
        values = [float(row[1]) for row in rows]
        assert rows[0][2] == "+0.0000"
        assert all(abs(value / values[0] - 1) < 0.1 for value in values)
        assert float(rows[3][1]) > 1

    def test_longer_than_the_context(self, run, monkeypatch: pytest.MonkeyPatch) -> None:
        lengths: list[int] = []
        original = cli.log_likelihoods

        def noted(model: Llama, ids: list[int], *rest: object) -> np.ndarray:
            lengths.append(len(ids))
            return original(model, ids, *rest)

        monkeypatch.setattr(cli, "log_likelihoods", noted)
        Path("notes.txt").write_text("x" * 801, encoding="utf-8")
        assert run("--perplexity", "notes.txt")[0] == 0
        assert lengths == [400, 400] * len(cli.KV_DTYPES)  # nothing is predicted by the last token alone

    def test_of_one_token(self, run) -> None:
        Path("notes.txt").write_text("x", encoding="utf-8")
        status, _, err = run("--perplexity", "notes.txt")
        assert status == 2
        assert "notes.txt is too short: tokens 1" in err


class TestComplaints:
    @pytest.mark.parametrize("option", ["--file", "--perplexity"])
    @pytest.mark.parametrize(
        ("content", "said"),
        [
            (None, "No such file"),
            (b"\n \r\n", "no text in it"),
            (b"caf\xe9\n", "not UTF-8"),
            (b"a\0b\n", "NUL"),
        ],
    )
    def test_text_file(self, run, option: str, content: bytes | None, said: str) -> None:
        if content is not None:
            Path("notes.txt").write_bytes(content)
        message = complaint(run(option, "notes.txt"))
        assert f"{option} notes.txt" in message and said in message

    def test_two_kinds_of_prompt(self, run) -> None:
        status, _, err = run("--prompt", "a", "--chat")
        assert status == 2
        assert "--chat" in err and "--prompt" in err

    def test_empty_prompt(self, run) -> None:
        assert "--prompt is empty" in complaint(run("--prompt", " "))

    def test_prompt_over_the_context(self, run, tiny: Path) -> None:
        status, out, err = run("--prompt", "x" * 500)
        assert status == 2
        assert f"{len(prompt_ids(tiny, 'x' * 500))} tokens" in err and "400" in err
        assert "generated" not in out

    @pytest.mark.skipif(not Path("/dev/zero").exists(), reason="no file without an end")
    def test_a_text_without_an_end(self, run) -> None:
        assert "/dev/zero is too long" in one_line(run("--file", "/dev/zero"))

    @pytest.mark.parametrize("content", [b"", b"GG", b"\x89PNG rather another kind of file"])
    def test_not_gguf(self, run, tmp_path: Path, content: bytes) -> None:
        path = tmp_path / "it.gguf"
        path.write_bytes(content)
        assert "it.gguf is not a GGUF file" in one_line(run(model_file=path))

    def test_folder_or_pipe_instead_of_a_file(self, run, tmp_path: Path) -> None:
        os.mkfifo(tmp_path / "pipe.gguf")
        (tmp_path / "folder.gguf").mkdir()
        for name in ("pipe.gguf", "folder.gguf"):
            assert f"{name} cannot be read" in one_line(run(model_file=tmp_path / name))
        assert "cannot be read: File name too long" in one_line(run(model_file=tmp_path / ("x" * 300)))

    @pytest.mark.parametrize("share", [0.001, 0.1, 0.5, 0.99])
    def test_cut_off(self, run, tiny: Path, share: float) -> None:
        content = tiny.read_bytes()
        tiny.write_bytes(content[: int(share * len(content))])
        assert "tiny.gguf is damaged" in one_line(run("--prompt", "a"))

    def test_architecture(self, run, tmp_path: Path) -> None:
        path = write_gguf(tmp_path / "other.gguf", architecture="mamba")
        message = complaint(run("--prompt", "a", model_file=path))
        assert "'mamba'" in message and "'llama'" in message

    @pytest.mark.parametrize(
        ("changes", "said"),
        [
            ({"attention.head_count_kv": 3}, ["4 heads", "3"]),
            ({"block_count": 3}, ["blk.2.", "no tensor"]),
            ({"block_count": 0}, ["block_count is 0"]),
            ({"block_count": 1}, ["blk.1.", "does not know"]),
            ({"block_count": "two"}, ["block_count is 'two'", "int"]),
            ({"feed_forward_length": 65}, ["(64, 32)", "(65, 32)"]),
            ({"rope.dimension_count": 7}, ["dimension_count is 7"]),
            ({"rope.scaling.type": "spiral"}, ["'spiral'", "linear"]),
        ],
    )
    def test_sizes(self, run, tmp_path: Path, changes: dict[str, object], said: list[str]) -> None:
        tensors = random_tensors(SIZES, len(BYTE_LEVEL))
        path = write_gguf(tmp_path / "other.gguf", sizes=SIZES | changes, tensors=tensors)
        message = complaint(run("--prompt", "a", model_file=path))
        assert "other.gguf" in message
        for words in said:
            assert words in message

    @pytest.mark.parametrize(
        "key",
        [
            "llama.context_length",
            "llama.attention.layer_norm_rms_epsilon",
            "tokenizer.ggml.tokens",
            "tokenizer.ggml.model",
            "tokenizer.ggml.merges",
        ],
    )
    def test_missing_metadata(self, run, tmp_path: Path, key: str) -> None:
        path = write_gguf(tmp_path / "other.gguf", without=[key])
        assert f"{key} is missing" in complaint(run("--prompt", "a", model_file=path))

    @pytest.mark.parametrize(
        ("changes", "said"),
        [
            ({"model": "bert"}, "'bert'"),
            ({"pre": "tekken"}, "'tekken'"),
            ({"merges": ["q zz"]}, "do not fit"),
            ({"eos_token_id": 9999}, "9999"),
            ({"chat_template": "{% for"}, "chat template"),
            ({"chat_template": "{{ raise_exception('no system') }}"}, "no system"),
            ({"chat_template": "{{ messages.append(1) }}"}, "chat template"),
            ({"chat_template": "{{ 1 + 'a' }}"}, "chat template"),
        ],
    )
    def test_vocabulary(self, run, tmp_path: Path, changes: dict[str, object], said: str) -> None:
        path = write_gguf(tmp_path / "other.gguf", vocabulary=byte_level_vocabulary() | changes)
        status, _, err = run("--prompt", "a", model_file=path)
        assert status == 2
        assert said in err and "other.gguf" in err and "Traceback" not in err

    @pytest.mark.parametrize(
        ("key", "value", "said"),
        [
            ("llama.attention.sliding_window", 128, "128"),
            ("llama.attention.clamp_kqv", 8.0, "8.0"),
            ("llama.attention.scale", 0.5, "0.5"),
            ("llama.attention.causal", False, "False"),
            ("llama.logit_scale", 0.5, "0.5"),
            ("llama.expert_count", 8, "8"),
            ("llama.use_parallel_residual", True, "True"),
            ("llama.tensor_data_layout", "reference", "reference"),
            ("llama.rope.scaling.attn_factor", 2.0, "2.0"),
            ("llama.rope.scaling.alpha", 2.0, "2.0"),
            ("llbma.rope.freq_base", 2.0, "2.0"),
            ("general.type", "adapter", "'adapter'"),
            ("general.type", [1, 2], "expected str"),
            ("tokenizer.ggml.add_eos_token", True, "True"),
            ("tokenizer.ggml.normalizer", "lower", "'lower'"),
            ("llama.\x1b[2Jscale", "\x1b[2J", "\\x1b[2J"),
        ],
    )
    def test_what_the_demo_does_not_do_or_know(
        self, run, write: Write, key: str, value: object, said: str
    ) -> None:
        message = one_line(run("--prompt", "a", model_file=write({key: value})))
        assert repr(key)[1:-1] in message.replace("\\\\", "\\") and said in message

    def test_keys_that_ask_for_nothing(self, run, write: Write) -> None:
        path = write(
            {
                "general.type": "model",
                "general.tags": ["a", "b"],
                "llama.expert_count": 0,
                "llama.attention.causal": True,
                "llama.rope.scaling.finetuned": False,
                "llama.rope.scaling.type": "none",
                "llama.tensor_data_layout": "Meta AI original pth",
                "llama.vocab_size": len(BYTE_LEVEL),
                "tokenizer.ggml.padding_token_id": 0,
                "tokenizer.chat_template.tool_use": "{% for",
                "quantize.imatrix.file": "it.dat",
            }
        )
        expected = run("--prompt", "a", "--max-tokens", "5")
        found = run("--prompt", "a", "--max-tokens", "5", model_file=path)
        assert found[0] == 0 and answer(found[1]) == answer(expected[1])

    @pytest.mark.parametrize(
        ("changes", "said"),
        [
            ({"llama.block_count": 2**32 - 1}, "no tensor 'blk.2."),
            ({"llama.block_count": 2**63}, "no tensor 'blk.2."),
            ({"llama.embedding_length": 2**40}, "the metadata says"),
            ({"llama.attention.head_count": 2**31}, "key_length is 0"),
            ({"llama.attention.key_length": 2**31}, "the metadata says"),
            ({"llama.context_length": 1}, "context_length is 1"),
            ({"llama.vocab_size": 7}, "vocab_size"),
            ({"llama.attention.layer_norm_rms_epsilon": -1.0}, "epsilon is -1.0"),
            ({"llama.attention.layer_norm_rms_epsilon": math.nan}, "epsilon is nan"),
            ({"llama.rope.freq_base": 0.0}, "base must be"),
            ({"llama.rope.freq_base": math.inf}, "base must be"),
            ({"llama.rope.scaling.factor": 0.0}, "finite and positive"),
            ({"llama.rope.scaling.type": "yarn", "llama.rope.scaling.yarn_beta_fast": 0.5}, "beta_fast >="),
            ({"llama.rope.scaling.factor": 4.0, "llama.rope.scale_linear": 2.0}, "one scaling only"),
            ({"llama.rope.scaling.factor": 4.0, "llama.rope.scaling.type": "none"}, "'none'"),
            ({"llama.rope.scaling.type": "\x1b[31m"}, "\\x1b[31m"),
            ({"tokenizer.ggml.eos_token_id": -1}, "is -1"),
            ({"tokenizer.ggml.token_type": [1, 2]}, "has 2 numbers"),
            ({"tokenizer.ggml.token_type": [77] * len(BYTE_LEVEL)}, "has 77"),
            ({"tokenizer.ggml.token_type": "normal"}, "an array of int"),
            ({"tokenizer.ggml.tokens": [1, 2]}, "an array of str"),
            ({"tokenizer.ggml.tokens": []}, "the metadata says"),
            ({"general.alignment": 0}, "a power of 2"),
            ({"general.alignment": 48}, "a power of 2"),
            ({"general.alignment": 4096}, "begins at"),
            ({"general.quantization_version": 1}, "1, and the demo can do 2"),
            ({"split.count": 3}, "one of 3 parts"),
        ],
    )
    def test_metadata(self, run, write: Write, changes: dict[str, object], said: str) -> None:
        assert said in one_line(run("--prompt", "a", model_file=write(changes)))

    @pytest.mark.skipif(sys.platform == "win32", reason="limits of a process are POSIX's")
    @pytest.mark.parametrize(
        ("template", "said"),
        [
            pytest.param(
                "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
                "takes more",
                marks=pytest.mark.slow,
            ),
            ("{{ 'a' * 10**11 }}", "MemoryError"),
            ("{{ 'a' * 10**7 }}", "its text has 10000000 characters"),
            ("{{ raise_exception('\x1b[31m\n') }}", "\\x1b[31m\\n"),
        ],
    )
    def test_templates_that_take_all_time_or_memory(
        self, run, write: Write, template: str, said: str
    ) -> None:
        status, _, err = run("--prompt", "a", model_file=write({"tokenizer.chat_template": template}))
        assert status == 2 and err.count("\n") == 1
        assert "the chat template does not work: " in err and said in err

    @pytest.mark.parametrize(
        ("kind", "changes", "said"),
        [
            ("bytes", {"tokens": [*BYTE_LEVEL[:-1], "a" * 10**6]}, "a token has 1000000 characters"),
            ("pieces", {"tokens": ["a" * 10**6, *map(str, range(266))]}, "a token has 1000000 characters"),
            ("bytes", {"tokens": [*BYTE_LEVEL[:-1], "the"]}, "has 'the' twice"),
            ("pieces", {"bos_token_id": None}, "bos_token_id is missing"),
            ("bytes", {"bos_token_id": None, "add_bos_token": True}, "bos_token_id is missing"),
        ],
    )
    def test_tokens(self, run, write: Write, kind: str, changes: dict[str, object], said: str) -> None:
        path = write({f"tokenizer.ggml.{key}": it for key, it in changes.items()}, kind=kind)
        start = perf_counter()
        assert said in one_line(run("--prompt", "a", model_file=path))
        assert perf_counter() - start < 5

    def test_many_tokens_that_a_user_added(self, write: Write) -> None:
        """Each for itself, so many took twenty seconds."""
        tokens = [*BYTE_LEVEL, *(f"<extra {n}>" for n in range(10_000))]
        kinds = {"tokenizer.ggml.token_type": [1] * len(BYTE_LEVEL) + [3] * 10_000}
        path = write({"tokenizer.ggml.tokens": tokens} | kinds)
        start = perf_counter()
        assert TextTokenizer(GGUFFile(path)).encode("a<extra 7>") == [IDS["a"], len(BYTE_LEVEL) + 7]
        assert perf_counter() - start < 5

    @pytest.mark.parametrize(
        ("kind", "factor", "refused"),
        [("linear", 1.0, True), ("linear", 0.0, False), ("yarn", 0.0, True), ("yarn", -1.0, False)],
    )
    def test_extrapolation_that_the_type_does_not_mean(
        self, run, write: Write, kind: str, factor: float, refused: bool
    ) -> None:
        scaling = {"type": kind, "factor": 4.0, "yarn_ext_factor": factor}
        path = write({f"llama.rope.scaling.{key}": it for key, it in scaling.items()})
        status, _, err = run("--prompt", "a", "--max-tokens", "2", model_file=path)
        assert (status, "yarn_ext_factor" in err) == ((2, True) if refused else (0, False))

    @pytest.mark.parametrize(
        ("scores", "said"),
        [([1.0, 2.0], "has 2 numbers"), ([math.nan] * 267, "not finite"), (None, "scores is missing")],
    )
    def test_scores(self, run, write: Write, scores: list[float] | None, said: str) -> None:
        path = write({"tokenizer.ggml.scores": scores}, kind="pieces")
        assert said in one_line(run("--prompt", "a", model_file=path))

    def test_a_part_by_its_name(self, run, tmp_path: Path) -> None:
        path = tmp_path / "it-00002-of-00005.gguf"
        path.write_bytes(Writer().file({}, {}))
        assert "one of 5 parts" in one_line(run(model_file=path))

    def test_big_endian(self, run, tmp_path: Path) -> None:
        path = tmp_path / "it.gguf"
        path.write_bytes(Writer(order=">").file(*contents()))
        assert "big-endian" in one_line(run("--prompt", "a", model_file=path))

    @pytest.mark.parametrize("version", [0, 1, 4, 2**32 - 1])
    def test_version(self, run, tmp_path: Path, version: int) -> None:
        path = tmp_path / "it.gguf"
        path.write_bytes(Writer(version=version).file(*contents()))
        assert f"version {version}" in one_line(run("--prompt", "a", model_file=path))

    @pytest.mark.parametrize("count", [2**22, 2**40, 2**64 - 1])
    @pytest.mark.parametrize("of", ["tensors", "keys", "strings", "numbers", "bytes"])
    def test_counts_that_lie(self, run, tmp_path: Path, of: str, count: int) -> None:
        """Whatever the file says, it is refused at once: it is no longer than it is."""
        path = tmp_path / "it.gguf"
        writer = Writer()
        values, tensors = contents("pieces")
        writer.file(values | {"general.flags": [True, False]}, tensors)
        after = {
            "tensors": 0,
            "keys": 8 + writer.fields[1].at,
            "strings": writer.content.find(b"ggml.tokens"),
            "numbers": writer.content.find(b"ggml.token_type"),
            "bytes": writer.content.find(b"general.flags"),
        }
        at = next(field.at for field in writer.fields if field.means == "count" and field.at >= after[of])
        struct.pack_into("<Q", writer.content, at, count)
        path.write_bytes(writer.content)
        start = perf_counter()
        assert "it.gguf is damaged" in one_line(run("--prompt", "a", model_file=path))
        assert perf_counter() - start < 5

    def test_a_tensor_twice_or_a_key(self, run, tmp_path: Path) -> None:
        path = tmp_path / "it.gguf"
        for one, other in ((b"blk.0.attn_k", b"blk.0.attn_q"), (b"eos_token_id", b"bos_token_id")):
            path.write_bytes(whole().content.replace(one, other))
            assert f"{other.decode()}" in (message := one_line(run("--prompt", "a", model_file=path)))
            assert "twice" in message

    @pytest.mark.parametrize("name", ["token_embd", "blk.1.attn_k", "blk.0.ffn_norm", "output_norm"])
    @pytest.mark.parametrize("number", [math.nan, math.inf])
    def test_weights_that_are_not_finite(self, run, write: Write, name: str, number: float) -> None:
        tensors = contents()[1]
        tensors[f"{name}.weight"][..., 3] = number
        message = one_line(run("--prompt", "a", model_file=write({}, tensors)))
        assert f"{name}.weight has numbers that are not finite" in message

    @pytest.mark.parametrize("name", ["token_embd", "blk.1.ffn_up", "blk.0.attn_v", "blk.1.attn_q"])
    @pytest.mark.parametrize("what", ["--prompt", "--perplexity"])
    def test_weights_that_overflow(self, run, write: Write, name: str, what: str) -> None:
        tensors = contents()[1]
        tensors[f"{name}.weight"] *= np.float32(1e38)
        Path("text.txt").write_text("the end")
        status, _, err = run(what, "text.txt", model_file=write({}, tensors))
        assert status == 2
        assert err.startswith("fastattn demo: the weights of tiny are too large") and err.count("\n") == 1

    @pytest.mark.parametrize("text", [b"tokenizer.ggml.pre", b"smollm", BEGIN.encode(), b"blk.0.attn_q"])
    def test_not_utf_8(self, run, tmp_path: Path, text: bytes) -> None:
        path = tmp_path / "it.gguf"
        path.write_bytes(whole().content.replace(text, b"\xff" + text[1:], 1))
        assert "not UTF-8: byte 0xff" in one_line(run("--prompt", "a", model_file=path))

    def test_biases(self, run, tmp_path: Path) -> None:
        tensors = random_tensors(SIZES, len(BYTE_LEVEL)) | {"blk.0.attn_q.bias": np.zeros(32, np.float32)}
        path = write_gguf(tmp_path / "other.gguf", tensors=tensors)
        assert "blk.0.attn_q.bias" in complaint(run("--prompt", "a", model_file=path))

    def test_more_than_the_memory(self, run, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("os.sysconf", lambda name: 1)
        assert "GB as float32" in complaint(run("--prompt", "a"))

    def test_unreadable_storage(self, run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def refuse(*given: object) -> None:
            raise NotImplementedError

        path = write_gguf(tmp_path / "other.gguf", stored=gguf.GGMLQuantizationType.Q8_0)
        monkeypatch.setattr(gguf, "dequantize", refuse)
        assert "stored as Q8_0" in complaint(run("--prompt", "a", model_file=path))


class TestTerminal:
    """What stands in a file or a path commands no terminal, wherever it is told."""

    NAME = "a\x1b[31m\n\u202e"

    def test_names(self, run, write: Write, tmp_path: Path) -> None:
        path = write({"general.name": self.NAME}).rename(tmp_path / f"{self.NAME}.gguf")
        text = tmp_path / f"{self.NAME}.txt"
        text.write_text("the end on the line")
        given = ["--picture", f"{self.NAME}.png"]
        for what in (["--prompt", "a", "--max-tokens", "2"], ["--perplexity", str(text)]):
            status, out, err = run(*what, *given, model_file=path)
            assert (status, err) == (0, "")
            assert out.replace("\n", "").isprintable()
            assert out.count(repr(self.NAME)[1:-1]) == 3

    def test_paths_in_complaints(self, run) -> None:
        path = f"{self.NAME}/x.png"
        for option in ("--file", "--perplexity", "--picture"):
            assert repr(path)[1:-1] in one_line(run(option, path))
        message = complaint(run(model_file=Path(path)))
        assert repr(path)[1:-1] in message and message.replace("\n", "").isprintable()


class TestPicture:
    @pytest.mark.slow
    @pytest.mark.parametrize(
        "ending", ["png", *(pytest.param(x, marks=pytest.mark.slow) for x in ("pdf", "svg"))]
    )
    def test_of_awkward_tokens(self, run_and_draw, ending: str) -> None:
        given = ["--prompt", "$x_{$ ^\\frac $ 東京 🙂\x1b[31m", "--max-tokens", "50"]
        status, _, err = run_and_draw(*given, "--picture", f"p.{ending}", "--temperature", "5")
        assert (status, err) == (0, "")
        assert Path(f"p.{ending}").stat().st_size > 1000

    @pytest.mark.slow
    def test_size(self, run_and_draw) -> None:
        run_and_draw("--prompt", "the end " * 20, "--max-tokens", str(MAX_ROWS + 9))
        height, width = imread("fastattn-demo.png").shape[:2]
        assert height > 800 and width > 1500


def test_head_is_the_one_that_copies_most(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load_model(GGUFFile(tiny))
    prompt = [5, 6, 7, 8] * 9
    queries: list[list[np.ndarray]] = [[], []]
    step = PlainAttention.step

    def noted(self: PlainAttention, layer: int, query: np.ndarray, *rest: np.ndarray) -> np.ndarray:
        queries[layer].append(query.copy())
        return step(self, layer, query, *rest)

    def make_sampler():
        tokens = iter([5, 6, 7, 8, 6, 5, 8, 9, 7])
        return lambda logits: next(tokens)

    result = comparison.compare(model, prompt, 9, set(), "float32", make_sampler, list)
    assert result.tokens == [5, 6, 7, 8, 6, 5, 8, 9, 7]
    monkeypatch.setattr(PlainAttention, "step", noted)
    attention = PlainAttention(2)
    clock = Clock()
    model(prompt, attention, clock)
    for token in result.tokens[:-1]:
        model([token], attention, clock)

    scores, all_weights = {}, {}
    for layer in range(2):
        for head in range(4):
            rows = []
            for number, query in enumerate(queries[layer][1:], len(prompt) + 1):
                keys = attention.keys[layer][head // 2, :number]
                row = np.exp(keys @ query[0, head] / np.sqrt(8))
                rows.append((row / row.sum())[: len(prompt)])
            weights = np.array(rows)
            copied = np.equal(prompt, np.array(result.tokens[1:])[:, None])
            copied = copied - copied.mean(axis=0)
            all_weights[layer + 1, head + 1] = weights
            scores[layer + 1, head + 1] = (weights * copied).sum()
    assert result.head is not None
    best = max(scores, key=scores.__getitem__)
    assert (result.head.layer, result.head.number) == best
    np.testing.assert_allclose(result.head.weights, all_weights[best], atol=1e-5)


@pytest.mark.slow
@needs_real_model
def test_whole_run(run_and_draw) -> None:
    status, out, err = run_and_draw(
        "--prompt", "What is the capital of France?", "--max-tokens", "30", model_file=None
    )
    assert (status, err) == (0, "")
    assert "Paris" in answer(out)
    assert "30 layers" in out and "9 heads on 3 key/value heads of 64" in out
    assert "The plain formula chooses the same" in out
    assert float(out.split("any token: ")[1].split()[0]) < 1e-3


@needs_real_model
def test_the_model_package_holds_one_file() -> None:
    assert find_model(None).suffix == ".gguf"
