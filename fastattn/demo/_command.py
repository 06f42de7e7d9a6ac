"""What the demos share as commands: options, messages, the exit status and a progress bar."""

from __future__ import annotations

import argparse
import importlib.util
import io
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import fastattn
from fastattn.bench.outputs import printable
from fastattn.demo._errors import DemoError

if TYPE_CHECKING:
    from rich.table import Table

T = TypeVar("T")

# Text is shown on lines of so many columns; of fewer on a narrow terminal.
COLUMNS = 110

# A message may quote what a file says, which may be of any length.
LONGEST_MESSAGE = 1000

# Beyond it nothing that is counted can be held, or waited for.
LARGEST_COUNT = 10**9


def new_parser(name: str, description: str, epilog: str) -> argparse.ArgumentParser:
    """The parser of a demo's command, whose texts have the lines that they are given with."""
    return argparse.ArgumentParser(
        prog=f"python -m fastattn demo {name}",
        description=description,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def run_command(
    parser: argparse.ArgumentParser, run: Callable[[argparse.Namespace], None], argv: Sequence[str] | None
) -> int:
    """Parse `argv`, run the demo, and turn what its user can put right into a message and an exit status."""
    args = parser.parse_args(argv)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # the text may need more than the terminal can show
    try:
        run(args)
    except DemoError as error:
        message = printable(error)
        if len(message) > LONGEST_MESSAGE:
            message = f"{message[:LONGEST_MESSAGE]} ..."
        print(f"fastattn demo: {message}{error.hint and f'. {error.hint}'}", file=sys.stderr)
        return 2
    except fastattn.BackendError as error:
        print(f"fastattn demo: {error}", file=sys.stderr)
        return 2
    except MemoryError as error:
        print(f"fastattn demo: out of memory: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\nfastattn demo: interrupted", file=sys.stderr)
        return 130
    return 0


def positive(text: str) -> int:
    """The type of an option that counts something."""
    number = int(text) if text.strip().isdecimal() else 0
    if not 1 <= number <= LARGEST_COUNT:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive whole number up to {LARGEST_COUNT}")
    return number


def natural(text: str) -> int:
    """The type of an option that may be zero, such as a seed."""
    if not text.strip().isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 0 on")
    return int(text)


def add_picture_option(parser: argparse.ArgumentParser, of: str) -> None:
    parser.add_argument(
        "--picture",
        type=Path,
        default=Path("fastattn-demo.png"),
        metavar="PATH",
        help=f"where to save the picture of {of} (default: fastattn-demo.png)",
    )


def add_thread_options(parser: argparse.ArgumentParser, *, share: bool) -> None:
    """Options for `set_threads`; with `share`, NumPy's products share the threads unless the user says no."""
    parser.add_argument(
        "--threads", type=positive, metavar="N", help="threads for fastattn (default: all cores it may use)"
    )
    parser.add_argument(
        "--share-threads",
        action=argparse.BooleanOptionalAction,
        help="have NumPy's products run on fastattn's threads, with fastattn.share_threads_with_blas "
        f"(default: {'yes, where possible' if share else 'no'})",
    )
    parser.set_defaults(share_by_default=share)


def set_threads(args: argparse.Namespace) -> None:
    """Do what the options of `add_thread_options` say."""
    if args.threads is not None:
        fastattn.set_num_threads(args.threads)
    wanted = args.share_by_default if args.share_threads is None else args.share_threads
    if wanted and not fastattn.share_threads_with_blas() and args.share_threads:
        warn("NumPy's products keep threads of their own; python -m fastattn info says why")


def check_extras(names: Sequence[str]) -> None:
    """Complain about packages that are not installed, all at once; none is imported."""
    if missing := [name for name in names if importlib.util.find_spec(name) is None]:
        raise DemoError(
            f"the demo needs {', '.join(missing)}", 'Install with\n    pip install "fastattn[demo]"'
        )


def warn(message: str) -> None:
    print(f"fastattn demo: warning: {printable(message)}", file=sys.stderr)


def harmless(text: str) -> str:
    """Running text without characters that command the terminal."""
    return "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in text)


def track(steps: Sequence[T], description: str) -> Iterator[T]:
    """The same steps with a progress bar, on a terminal; what is printed meanwhile stands above it."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    if not console.is_terminal:
        yield from steps
        return
    # Redirected, what is printed goes where the bar is: to the terminal, and a file would get nothing.
    with Progress(
        *Progress.get_default_columns(),
        console=console,
        transient=True,
        redirect_stdout=sys.stdout.isatty(),
    ) as progress:
        yield from progress.track(steps, description=description)


def columns() -> int:
    return min(COLUMNS, shutil.get_terminal_size().columns) if sys.stdout.isatty() else COLUMNS


def print_table(table: Table) -> None:
    from rich.console import Console

    Console(width=columns()).print(table)
