"""``python -m fastattn``: what is installed, a demonstration, and the benchmark."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from fastattn._version import __version__


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand; returns the exit status.

    It is 1 where whoever read the output has closed it, 2 where the output cannot be written, as on a full
    disk, and 130 after Ctrl-C.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # closed from the start
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115
    try:
        try:
            return _run(argv)
        finally:
            print(end="", flush=True)  # here, where a closed pipe and a full disk are no traceback
    except BrokenPipeError:
        status = 1
    except KeyboardInterrupt:
        print("\npython -m fastattn: interrupted", file=sys.stderr)
        return 130
    except OSError as error:
        if error.filename is not None:  # not of the output
            raise
        print(f"python -m fastattn: the output cannot be written: {error.strerror}", file=sys.stderr)
        status = 2
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what is left when Python ends
    return status


def _run(argv: Sequence[str] | None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m fastattn", description="Exact attention for NumPy arrays."
    )
    parser.add_argument("--version", action="version", version=f"fastattn {__version__}")
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
