"""``python -m fastattn``: what is installed, a demonstration, and the benchmark."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m fastattn", description="Exact attention for NumPy arrays."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    commands.add_parser("info", help="version, CPU, threads, and which backends are usable")
    commands.add_parser(
        "demo", help="real transformers: generate, embed, train, image (demo --help)", add_help=False
    )
    commands.add_parser("bench", help="libraries side by side on this CPU (bench --help)", add_help=False)
    arguments, rest = parser.parse_known_args(argv)

    if arguments.command == "demo":
        from fastattn.demo import main as demo

        return demo(rest) or 0
    if arguments.command == "bench":
        from fastattn.bench.cli import main as bench

        return bench(rest)
    if rest:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    from fastattn import show_config

    show_config()
    return 0


if __name__ == "__main__":
    sys.exit(main())
