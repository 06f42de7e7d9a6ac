"""The demo as a command: sensible answers, files, pictures and times, and clear complaints."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from itertools import cycle
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("safetensors", reason="the demo extra is not installed")
pytest.importorskip("tokenizers", reason="the demo extra is not installed")
pytest.importorskip("matplotlib", reason="the demo extra is not installed")
pytest.importorskip("rich", reason="the demo extra is not installed")

from matplotlib.image import imread
from tokenizers import Tokenizer, processors

import fastattn
from fastattn._machine import host
from fastattn.backends.cython import backend as cython_backend
from fastattn.bench import probes, quiet
from fastattn.demo import _command, _timing
from fastattn.demo._errors import DemoError
from fastattn.demo.embed import cli, loading, main
from fastattn.demo.embed.corpus import PASSAGES, QUERIES, SENTENCES
from fastattn.demo.embed.model import SentenceEncoder
from fastattn.demo.embed.picture import MAX_TOKENS as MAX_PICTURE_TOKENS
from fastattn.demo.embed.picture import draw_attention
from fastattn.demo.embed.text import Line, read_lines
from tests.demo_embed_models import (
    MAX_TOKENS,
    POSITIONS,
    TEXTS,
    needs_real_model,
    random_tensors,
    token_ids,
    word_piece_tokenizer,
    write_json,
    write_model,
)
from tests.demos import call_demo, complaint, go_to_empty_folder, one_line


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    return write_model(tmp_path / "tiny")


@pytest.fixture
def run_and_draw(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """Call the demo on the tiny model in an empty folder; gives the exit status, stdout and stderr."""
    go_to_empty_folder(tmp_path, monkeypatch)
    monkeypatch.setattr(_timing, "SECONDS", 0.0)
    probe(monkeypatch, [100.0])

    def call(*arguments: str, model_folder: Path | None = tiny) -> tuple[int, str, str]:
        return call_demo(
            main, [*arguments, *(["--model", str(model_folder)] if model_folder else [])], capsys
        )

    return call


@pytest.fixture
def run(run_and_draw, monkeypatch: pytest.MonkeyPatch):
    """The same without the picture, which takes longer than all the rest."""
    monkeypatch.setattr("fastattn.demo.embed.picture.draw_attention", lambda *given: None)
    return run_and_draw


def probe(monkeypatch: pytest.MonkeyPatch, peaks: list[float]) -> list[int]:
    """Have the probes of the cores find `peaks`, over and over; gives the list of the threads they run on."""
    threads: list[int] = []
    turn = cycle(np.repeat(peaks, quiet.PROBE_TRIES).tolist())

    def integer_peak(num_threads: int, seconds: float) -> float:
        threads.append(num_threads)
        return next(turn)

    monkeypatch.setattr(cython_backend.backend, "unavailable_reasons", list)
    monkeypatch.setattr(probes, "integer_peak", integer_peak)
    monkeypatch.setattr(quiet, "SETTLE_SECONDS", 0.0)
    return threads


class TestCommand:
    def test_file_and_queries(self, run_and_draw, tmp_path: Path) -> None:
        Path("notes.txt").write_text("\n\n".join(TEXTS) + "\n", encoding="utf-8")
        status, out, _ = run_and_draw(
            "--file", "notes.txt", "--query", TEXTS[4], "--query", TEXTS[0], "--top", "2"
        )
        assert status == 0
        lines = out.splitlines()
        for query, number in ((TEXTS[4], 9), (TEXTS[0], 1)):
            first, second = lines[lines.index(query) + 1 :][:2]
            assert first.split(maxsplit=1) == ["1.000", f"line {number} of notes.txt: {query}"]
            assert float(second.split()[0]) < 1
        assert "attention alone" in out and "the whole model" in out
        assert Path("fastattn-demo.png").read_bytes().startswith(b"\x89PNG")

    def test_built_in_texts_and_queries(self, run) -> None:
        status, out, _ = run()
        assert status == 0
        for query in QUERIES:
            assert f"\n{query}\n" in out
        for kind, texts in (("sentences", SENTENCES), ("passages", PASSAGES)):
            assert f"\n{len(texts)} {kind} of " in out

    def test_query_with_the_built_in_texts(self, run) -> None:
        status, out, _ = run("--query", "the dog sleeps")
        assert status == 0
        assert "\nthe dog sleeps\n" in out
        assert QUERIES[0] not in out

    def test_each_kind_of_text_is_timed(self, run) -> None:
        _, out, _ = run()
        table = out[out.index("Times are medians") :].splitlines()
        tokenizer = word_piece_tokenizer()
        tokenizer.no_truncation()
        tokenizer.no_padding()
        for kind, texts in (("sentences", SENTENCES), ("passages", PASSAGES)):
            number = next(n for n, line in enumerate(table) if f"{len(texts)} {kind}" in line)
            tokens = sum(min(len(it.ids), MAX_TOKENS) for it in tokenizer.encode_batch(texts))
            assert table[number].split()[2] == str(tokens)
            for line, name in zip(table[number:], ("attention alone", "the whole model"), strict=False):
                assert re.search(rf"{name} +\d+\.\d\d ms +\d+\.\d\d ms +\d+\.\d\d *$", line)

    def test_a_long_text_is_shown_by_its_beginning(self, run) -> None:
        long = " ".join(TEXTS * 9)
        Path("notes.txt").write_text(f"{long}\nit rains\n", encoding="utf-8")
        _, out, _ = run("--file", "notes.txt", "--query", "a dog")
        (shown,) = (line for line in out.splitlines() if "line 1 of" in line)
        assert len(shown) == _command.COLUMNS and shown.endswith("...")
        assert f"notes.txt: {long[:60]}" in shown

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
        assert f"{math.ceil(len(lines) / step)} of the {len(lines)} lines" in out

    def test_picture_is_of_the_best_of_the_sentences(self, run, monkeypatch: pytest.MonkeyPatch) -> None:
        drawn: list[str] = []
        monkeypatch.setattr("fastattn.demo.embed.picture.draw_attention", lambda *args: drawn.append(args[2]))
        _, out, _ = run("--query", PASSAGES[0], "--top", "1")
        assert f"1.000  {PASSAGES[0][:60]}" in out
        assert len(drawn) == 1 and drawn[0] in SENTENCES

    @pytest.mark.parametrize(
        "ending", ["png", *(pytest.param(it, marks=pytest.mark.slow) for it in ("pdf", "svg"))]
    )
    def test_picture_of_awkward_tokens(self, run_and_draw, tiny: Path, ending: str) -> None:
        write_json(tiny / "sentence_bert_config.json", {"max_seq_length": POSITIONS})
        Path("notes.txt").write_text("a $x_{$ ^\\frac $ 東京 🙂 dog\x1b[31m\nit rains", encoding="utf-8")
        given = ["--file", "notes.txt", "--query", "$ $ dog", "--picture", f"p.{ending}"]
        status, out, err = run_and_draw(*given)
        assert (status, err) == (0, "")
        assert "\x1b" not in out
        assert Path(f"p.{ending}").stat().st_size > 1000

    @pytest.mark.slow
    def test_survives_a_closed_pipe(self, tiny: Path, tmp_path: Path) -> None:
        (tmp_path / "notes.txt").write_text("the dog runs\nit rains", encoding="utf-8")
        command = [sys.executable, "-m", "fastattn", "demo", "embed", "--model", str(tiny)]
        command += ["--file", "notes.txt", "--query", "a dog", "--query", "rains"]
        with subprocess.Popen(
            command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        ) as process:
            process.stdout.close()
            assert process.stderr.read() == b""


class TestBusyMachine:
    """A warning stands beside the times where the probes of the cores differ, and only there."""

    WARNING = "times are disturbed and the ratios may be off"

    @pytest.mark.parametrize(
        ("peaks", "disturbed"),
        [
            pytest.param([100.0], 0, marks=pytest.mark.slow),
            ([100.0, 91.0], 0),
            ([100.0, 100.0, 100.0, 89.0], 1),
            pytest.param([50.0, 100.0], 2, marks=pytest.mark.slow),
        ],
    )
    def test_warning(self, run, monkeypatch: pytest.MonkeyPatch, peaks: list[float], disturbed: int) -> None:
        threads = probe(monkeypatch, peaks)
        monkeypatch.setattr(host, "_num_threads", 1)  # what --threads sets
        status, out, err = run("--query", "the dog sleeps")
        assert status == 0
        # Before each round and after the last; on all cores, which NumPy uses whatever --threads says.
        assert threads == [host.available_cores()] * quiet.PROBE_TRIES * (_timing.MIN_ROUNDS + 1)
        assert (self.WARNING in out) == bool(disturbed)
        assert "None" not in out
        if disturbed:
            assert f"{disturbed} of {_timing.MIN_ROUNDS + 1} probes" in out
        assert "disturbed" not in err

    @pytest.mark.parametrize("threads", [pytest.param(1, marks=pytest.mark.slow), 2])
    def test_one_thread_is_advised(self, run, monkeypatch: pytest.MonkeyPatch, threads: int) -> None:
        probe(monkeypatch, [50.0, 100.0])
        monkeypatch.setattr(host, "_num_threads", threads)
        assert ("try --threads 1." in run("--query", "the dog sleeps")[1]) == (threads > 1)

    def test_one_short_interruption_is_no_neighbour(self, run, monkeypatch: pytest.MonkeyPatch) -> None:
        probe(monkeypatch, [100.0])
        once = iter([10.0])
        monkeypatch.setattr(probes, "integer_peak", lambda *_: next(once, 100.0))
        assert self.WARNING not in run("--query", "the dog sleeps")[1]

    def test_no_probe_without_the_compiled_backend(self, run, monkeypatch: pytest.MonkeyPatch) -> None:
        threads = probe(monkeypatch, [100.0, 10.0])
        monkeypatch.setattr(cython_backend.backend, "unavailable_reasons", lambda: ["not built"])
        status, out, _ = run("--query", "the dog sleeps")
        assert (status, threads) == (0, [])
        assert self.WARNING not in out


class TestShareThreads:
    @pytest.fixture
    def calls(self, monkeypatch: pytest.MonkeyPatch) -> list[str]:
        """In order: each call of `share_threads_with_blas`, which is not possible here, and of the model."""
        calls: list[str] = []
        encode = SentenceEncoder.encode

        def share_threads_with_blas(enable: bool = True) -> bool:
            calls.append(f"share {enable}")
            return False

        def noted(*args: object) -> np.ndarray:
            calls.append("encode")
            return encode(*args)

        monkeypatch.setattr(fastattn, "share_threads_with_blas", share_threads_with_blas)
        monkeypatch.setattr(SentenceEncoder, "encode", noted)
        return calls

    def test_before_the_model_runs_and_told_where_impossible(self, run, calls: list[str]) -> None:
        status, out, err = run("--share-threads", "--query", "dog")
        assert status == 0 and "the whole model" in out
        assert calls[:2] == ["share True", "encode"] and calls.count("share True") == 1
        assert "threads of their own" in err and "python -m fastattn info" in err

    def test_nothing_is_told_where_possible(self, run, calls, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(fastattn, "share_threads_with_blas", lambda: True)
        assert "threads of their own" not in run("--share-threads", "--query", "dog")[2]

    def test_not_unless_asked_for(self, run, calls: list[str]) -> None:
        run("--query", "dog")
        assert set(calls) == {"encode"}


class TestComplaints:
    @pytest.mark.parametrize(
        ("content", "said"),
        [
            (None, ["No such file"]),
            (b"", ["no text in it"]),
            (b"\n \r\n\t\n", ["no text in it"]),
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

    @pytest.mark.slow
    def test_picture_that_cannot_be_written_in_the_end(
        self, run_and_draw, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def full(*args: object, **kwargs: object) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr("matplotlib.figure.Figure.savefig", full)
        status, _, err = run_and_draw()
        assert status == 2
        assert "--picture fastattn-demo.png" in err and "No space left" in err

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
            ({"num_hidden_layers": 10**9}, ["no tensor", "encoder.layer.2."]),
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
        assert name in one_line(run())

    def test_cut_off_weights(self, run, tiny: Path) -> None:
        path = tiny / "model.safetensors"
        path.write_bytes(path.read_bytes()[:-100])
        assert "model.safetensors" in one_line(run())

    def test_weights_of_another_type(self, run, tmp_path: Path) -> None:
        tensors = random_tensors()
        name = "encoder.layer.1.output.dense.bias"
        tensors[name] = tensors[name].astype(np.int32)
        message = complaint(run(model_folder=write_model(tmp_path / "integers", tensors=tensors)))
        assert name in message and "I32" in message

    @pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json", "modules.json"])
    def test_pipe_instead_of_a_file(self, run, tiny: Path, name: str) -> None:
        (tiny / name).unlink()
        os.mkfifo(tiny / name)
        assert f"{name} cannot be read: it is not a file" in one_line(run())

    @pytest.mark.parametrize("number", [np.nan, np.inf])
    def test_weights_that_are_not_finite(self, run, tmp_path: Path, number: float) -> None:
        tensors = random_tensors()
        tensors["encoder.layer.1.output.dense.bias"][3] = number
        message = one_line(run(model_folder=write_model(tmp_path / "nan", tensors=tensors)))
        assert "encoder.layer.1.output.dense.bias has numbers that are not finite" in message

    def test_weights_that_overflow(self, run, tmp_path: Path) -> None:
        tensors = random_tensors()
        tensors["encoder.layer.1.output.dense.weight"] *= np.float32(1e38)
        folder = write_model(tmp_path / "large", tensors=tensors)
        status, _, err = run("--query", "dog", "--file", write_lines(), model_folder=folder)
        assert status == 2
        assert err.splitlines()[-1].startswith("fastattn demo: the model's weights are")
        assert err.count("\n") == 1 + err.count("warning")

    @pytest.mark.parametrize(
        ("file", "changes", "said"),
        [
            ("config.json", {"is_decoder": True}, "is_decoder is True"),
            ("config.json", {"layer_norm_eps": "small"}, "layer_norm_eps is 'small'"),
            ("config.json", {"layer_norm_eps": -1}, "layer_norm_eps is -1"),
            ("config.json", {"hidden_size": True}, "hidden_size is True"),
            ("config.json", {"model_type": ["bert"]}, "model_type is ['bert']"),
            ("sentence_bert_config.json", {"max_seq_length": "long"}, "max_seq_length is 'long'"),
            ("sentence_bert_config.json", {"max_seq_length": 0}, "max_seq_length is 0"),
            ("sentence_bert_config.json", {"max_seq_length": 2}, "reads 2 tokens"),
            ("sentence_bert_config.json", {"do_lower_case": "no"}, "do_lower_case is 'no'"),
            ("sentence_bert_config.json", {"query_length": 8}, "'query_length' is 8"),
            ("sentence_bert_config.json", {"transformer_task": "fill-mask"}, "'fill-mask'"),
            ("tokenizer_config.json", {"model_max_length": 0}, "model_max_length is 0"),
            ("1_Pooling/config.json", {"pooling_mode": "lasttoken"}, "lasttoken"),
            ("1_Pooling/config.json", {"pooling_mode": {}}, "pooling by {}"),
            ("1_Pooling/config.json", {"pooling_mode_cls_token": True}, "pooling_mode_cls_token"),
            ("1_Pooling/config.json", {"word_embedding_dimension": 7}, "word_embedding_dimension is 7"),
            ("2_Normalize/config.json", {"module_input_name": "token_embeddings"}, "token_embeddings"),
            ("config_sentence_transformers.json", {"model_type": "SparseEncoder"}, "'SparseEncoder'"),
            ("config_sentence_transformers.json", {"prompts": ["query: "]}, "prompts are"),
            ("config_sentence_transformers.json", {"prompts": {"query": 7}}, "prompts are"),
            ("config_sentence_transformers.json", {"default_prompt_name": "a\x1b"}, "'a\\x1b'"),
        ],
    )
    def test_settings(self, run, tiny: Path, file: str, changes: dict[str, object], said: str) -> None:
        path = tiny / file
        write_json(path, (json.loads(path.read_text()) if path.exists() else {}) | changes)
        message = one_line(run())
        assert file in message or "max_seq_length" in changes
        assert said in message.replace("\\\\", "\\")

    @pytest.mark.parametrize(
        "name",
        ["modules.json", "sentence_bert_config.json", "config_sentence_transformers.json", "tokenizer.json"],
    )
    def test_a_link_to_nowhere_is_not_left_out(self, run, tiny: Path, name: str) -> None:
        (tiny / name).unlink(missing_ok=True)
        (tiny / name).symlink_to("nowhere")
        assert f"{name} cannot be read: No such file" in one_line(run("--query", "a", model_folder=tiny))

    @pytest.mark.parametrize("name", ["config.json", "modules.json", "tokenizer.json"])
    def test_a_file_that_is_far_too_long(self, run, tiny: Path, name: str) -> None:
        os.truncate(tiny / name, 10**11)
        assert "100000000000 bytes" in one_line(run("--query", "a", model_folder=tiny))

    def test_shards(self, run, tiny: Path) -> None:
        (tiny / "model.safetensors").rename(tiny / "model-00001-of-00002.safetensors")
        assert "not in shards" in one_line(run(model_folder=tiny))

    def test_texts_cut_on_the_left(self, run, tiny: Path) -> None:
        tokenizer = Tokenizer.from_file(str(tiny / "tokenizer.json"))
        tokenizer.enable_truncation(5, direction="left")
        tokenizer.save(str(tiny / "tokenizer.json"))
        assert "cuts long texts on the left" in one_line(run(model_folder=tiny))

    @pytest.mark.parametrize(
        ("part", "value"),
        [
            ("normalizer", {"type": "Precompiled", "precompiled_charsmap": "!!"}),
            ("normalizer", {"type": "Precompiled", "precompiled_charsmap": "BAAAAP////8="}),
            ("pre_tokenizer", {"type": "FixedLength", "length": 0}),
        ],
    )
    def test_a_tokenizer_that_panics(
        self, tiny: Path, capfd: pytest.CaptureFixture[str], part: str, value: dict[str, object]
    ) -> None:
        path = tiny / "tokenizer.json"
        write_json(path, json.loads(path.read_text(encoding="utf-8")) | {part: value})
        with pytest.raises(DemoError, match="tokenizer"):
            loading.load_model(tiny).tokenize(["dog"])
        assert capfd.readouterr().err == ""

    def test_prompt_that_is_not_to_be_pooled(self, run, tiny: Path) -> None:
        write_json(tiny / "1_Pooling" / "config.json", {"pooling_mode": "mean", "include_prompt": False})
        given = ["--query", "dog", "--file", write_lines()]
        assert run(*given)[0] == 0
        write_json(tiny / "config_sentence_transformers.json", {"prompts": {"query": "a "}})
        assert "include_prompt is False" in one_line(run(*given))

    @pytest.mark.parametrize("modules", [["Transformer"], ["Pooling", "Transformer"], ["Transformer"] * 2])
    def test_modules_of_another_order(self, run, tiny: Path, modules: list[str]) -> None:
        write_json(tiny / "modules.json", [{"type": f"x.{kind}", "path": ""} for kind in modules])
        assert f"asks for the modules {', '.join(modules)}" in one_line(run())

    def test_tokens_beyond_the_vocabulary(self, run, tiny: Path) -> None:
        settings = json.loads((tiny / "tokenizer.json").read_text())
        settings["post_processor"]["special_tokens"]["[CLS]"]["ids"] = [10**6]
        write_json(tiny / "tokenizer.json", settings)
        assert "the id 1000000, and it has" in one_line(run())

    def test_paths_command_no_terminal(self, run, tmp_path: Path) -> None:
        folder = write_model(tmp_path / "a\x1b[31m\n")
        given = ["--query", "dog", "--file", write_lines("a\x1b[31m.txt"), "--picture", "\x1b.png"]
        status, out, err = run(*given, model_folder=folder)
        assert status == 0 and (out + err).replace("\n", "").isprintable()
        assert "a\\x1b[31m\\n" in out
        write_json(folder / "modules.json", [{"type": "x.\x1b[2J", "path": ""}])
        assert "\\x1b[2J" in one_line(run(model_folder=folder))

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


@pytest.mark.slow
@needs_real_model
def test_whole_run(run_and_draw, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "TIMED_TOKENS", 600)  # or it takes a minute on a busy machine
    status, out, err = run_and_draw("--top", "1", model_folder=None)
    assert (status, err) == (0, "")
    assert "6 layers of 12 heads, 384 numbers" in out
    difference = float(out.split("any embedding: ")[1].split()[0])
    # The embeddings have length 1; six layers of float32 keep their entries apart by some 1e-7.
    assert difference < 2e-6
    assert Path("fastattn-demo.png").stat().st_size > 20_000


def write_lines(name: str = "notes.txt") -> str:
    Path(name).write_text("\n".join(TEXTS), encoding="utf-8")
    return name


class TestReadLines:
    def test_numbers_blank_lines_endings_and_byte_order_mark(self, tmp_path: Path) -> None:
        path = tmp_path / "notes.txt"
        path.write_bytes("\ufeffone\r\n\r\n  two  \n\t\n\nthrée\u2028still three".encode())
        assert read_lines(path) == [
            Line("one", "line 1 of notes.txt"),
            Line("two", "line 3 of notes.txt"),
            Line("thrée\u2028still three", "line 6 of notes.txt"),
        ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("heads", "count"),
    [
        (1, 1),
        (5, 2),
        (16, MAX_PICTURE_TOKENS + 30),
    ],
)
def test_picture_of_any_size(tmp_path: Path, heads: int, count: int) -> None:
    weights = np.full((heads, count, count), 1 / count, np.float32)
    path = tmp_path / "picture.png"
    draw_attention(weights, ["$x_{$", *["word"] * (count - 1)], "$\\frac $", 1, path)
    height, width = imread(path).shape[:2]
    assert height > 500 and width > 1000
