"""The command ``python -m fastattn demo train``: a language model of characters, trained on a text."""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Sequence
from pathlib import Path

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
from fastattn.demo.train.model import Model, Sizes
from fastattn.demo.train.text import Baselines, count, load_text
from fastattn.demo.train.timing import Comparison, compare
from fastattn.demo.train.training import Trainer, write

# What the demo needs beyond NumPy; imported only after all have been looked for.
EXTRAS = ("matplotlib", "rich")

#: How often the held-out loss and a sample of the model's writing are shown.
TOLD, SAMPLED = 12, 3

#: How many characters of the held-out text a sample begins with, and how many the model adds.
PROMPT, SAMPLE = 24, 200

#: The plain formula keeps all weights of such a context in 1.1 GB.
MAX_CONTEXT = 4096

EPILOG = """\
examples:
  python -m fastattn demo train                            on Python's own documentation
  python -m fastattn demo train book.txt --steps 1000
  python -m fastattn demo train --context 1024             the longer, the more attention there is

It takes two to three minutes on two free cores. The last tenth of the text is held out: the model does
not learn from it.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo with the given command-line arguments, and return the exit status."""
    return run_command(_parser(), _run, argv)


def _parser() -> argparse.ArgumentParser:
    parser = new_parser(
        "train",
        "Train a small language model of characters in NumPy with fastattn.attention and\n"
        "fastattn.attention_backward; time some steps with the plain formula too; draw the loss.",
        EPILOG,
    )
    add = parser.add_argument
    add(
        "file",
        nargs="?",
        type=Path,
        metavar="FILE",
        help="a UTF-8 text file to learn from (default: Python's documentation)",
    )
    add("--steps", type=positive, default=600, metavar="N", help="training steps (default: 600)")
    add(
        "--context",
        type=_context,
        default=256,
        metavar="N",
        help="characters that the model reads at a time (default: 256)",
    )
    add("--seed", type=natural, default=0, metavar="N", help="of the random numbers (default: 0)")
    add_picture_option(parser, "the loss")
    add_thread_options(parser, share=True)
    return parser


def _context(text: str) -> int:
    number = positive(text)
    if number > MAX_CONTEXT:
        raise argparse.ArgumentTypeError(f"{text!r} is more than {MAX_CONTEXT}")
    return number


def _run(args: argparse.Namespace) -> None:
    check_extras(EXTRAS)
    from fastattn.demo._figures import check_picture_path

    check_picture_path(args.picture)
    text = load_text(args.file, args.context)
    set_threads(args)
    model = Model(Sizes(len(text.vocabulary), args.context), args.seed)
    trainer = Trainer(model, text, args.steps, args.seed)
    counted = count(text)
    _print_beginning(trainer, counted)
    _train(trainer, args.seed)
    loss = trainer.held_out_loss(whole=True, track=lambda parts: track(parts, "held-out loss"))
    print(
        f"Loss on all of the held-out text: {loss:.3f}; counting gives {counted.bigram:.3f} (pairs) and "
        f"{counted.unigram:.3f} (single characters)."
    )
    comparison = compare(trainer, lambda rounds: track(rounds, "timing"))
    _print_comparison(comparison, trainer)

    from fastattn.demo.train.picture import draw

    title = f"{_millions(model)} weights learn from {printable(text.name)}: loss {loss:.3f} in the end"
    draw(trainer.progress, counted, comparison, title, args.picture)
    print(f"Picture of the loss and the times saved to {printable(args.picture)}")


def _millions(model: Model) -> str:
    return f"{model.weights.flat.size / 1e6:.2f} million"


def _print_beginning(trainer: Trainer, counted: Baselines) -> None:
    text, sizes = trainer.text, trainer.model.sizes
    print(
        f"Text: {printable(text.name)}\n"
        f"{len(text.training)} characters to learn from and {len(text.held_out)} held out, "
        f"{len(text.vocabulary)} different ones\n"
        f"Model: {_millions(trainer.model)} weights, {sizes.num_layers} layers, "
        f"{sizes.num_heads} heads of {sizes.head_dim}, context {sizes.context}\n"
        "The loss is the mean of -log(probability of the next character). On the held-out text, counts of "
        f"single\ncharacters give {counted.unigram:.3f}, counts of pairs {counted.bigram:.3f}.\n",
        flush=True,
    )


def _train(trainer: Trainer, seed: int) -> None:
    """All steps, with the loss and samples as they go."""
    steps, progress = trainer.steps, trainer.progress
    told = {round(part * steps / TOLD) for part in range(TOLD + 1)}
    sampled = {round(part * steps / SAMPLED) for part in range(1, SAMPLED + 1)}

    def watch(done: int) -> None:
        if done in told:
            before = progress.held_out[-1][0] if progress.held_out else 0
            loss = trainer.held_out_loss(whole=False)
            progress.held_out.append((done, loss))
            line = f"step {done:{len(str(steps))}} of {steps}: loss {loss:.3f} held out"
            if new := progress.losses[before:]:
                speed = progress.characters_per_second
                line += f", {sum(new) / len(new):.3f} in training; {speed:.0f} characters per second"
            print(line, flush=True)
        if done in sampled:
            _print_sample(trainer, seed)

    trainer.run(track(range(steps), "training"), watch)


def _print_sample(trainer: Trainer, seed: int) -> None:
    """The beginning of the held-out text, and how the model goes on."""
    context = trainer.model.sizes.context
    prompt = trainer.text.held_out[: min(PROMPT, -(-context // 2))]
    written = write(trainer.model, prompt, min(SAMPLE, context - len(prompt)), seed)
    shown = f"[{trainer.text.decode(prompt)}]{trainer.text.decode(written)}"
    print(f"\n{textwrap.indent(harmless(shown), '    ', lambda line: True)}\n", flush=True)


def _print_comparison(result: Comparison, trainer: Trainer) -> None:
    print(
        f"\nOne step of {trainer.batch_size} pieces of {trainer.model.sizes.context} characters; times "
        f"are medians of {result.rounds} steps of each, in turns\n"
        f"(threads of fastattn: {fastattn.get_num_threads()}):"
    )
    fast, plain = result.fast, result.plain
    table = new_table(("in one step", "fastattn", "plain NumPy", "times as fast"), left=("in one step",))
    for name, seconds in (
        ("attention", (fast.forward, plain.forward)),
        ("gradients of attention", (fast.backward, plain.backward)),
        ("everything else", (fast.rest, plain.rest)),
        ("the whole step", (fast.step, plain.step)),
    ):
        table.add_row(name, *(f"{1000 * it:.1f} ms" for it in seconds), f"{seconds[1] / seconds[0]:.2f}")
    table.add_section()
    table.add_row("share of attention", *(f"{it.attention_share:.0%}" for it in (fast, plain)), "")
    table.add_row("kept for its gradients", *(f"{it.nbytes_kept / 1e6:.2f} MB" for it in (fast, plain)), "")
    print_table(table)
    if result.warning is not None:
        print(result.warning)
    print(
        "Largest difference between the two, in any number of any gradient: "
        f"{result.largest_difference:.1e} (gradients are up to {result.largest_gradient:.1e})"
    )
