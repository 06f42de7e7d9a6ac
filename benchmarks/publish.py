"""Publish a result: ``python -m benchmarks.publish [RESULTS.json [--note TEXT]] [--check]``.

One file is kept, `benchmarks/results/latest.json`. The README's speed section and the pictures beside that
file are written from it and from nothing else; ``--check`` tells whether they still say what it says. With
RESULTS.json, what ``python -m fastattn bench --json RESULTS.json`` wrote becomes the kept file first.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from PIL import Image

from fastattn.bench.cases import CASES
from fastattn.bench.peers import OURS
from fastattn.bench.plots import DIGEST_KEY, Picture, digest, draw_all, pictures
from fastattn.bench.report import time_text

ROOT = Path(__file__).resolve().parent.parent

#: The kept file and the folder of the pictures, and the file that holds the section, below the root.
RESULTS, README = Path("benchmarks/results/latest.json"), Path("README.md")

#: What is between these lines in the README is written here.
BEGIN = "<!-- Speed: written by python -m benchmarks.publish; changes belong there. -->"
END = "<!-- End of what python -m benchmarks.publish wrote. -->"

#: The rows of the table, as far as they were measured: one or two of each kind of work.
TELLING = (
    "square-512-64",
    "square-2048-64",
    "square-2048-128",
    "causal-2048-64",
    "causal-2048-128",
    "bert-batch",
    "bert-ragged",
    "vit-197",
    "tiny-16",
    "dim-40-cross",
    "mask-random",
    "bias-per-head",
    "window-8192",
    "documents-8192",
    "float64-1024",
    "rank3",
    "bshd",
    "gqa-causal",
    "whisper-cross",
    "llama-decode",
    "one-head-decode",
    "long-32k",
)

#: Kept of each case and of each library on it. The samples behind a share of the limit are hundreds, and the
#: ways that were not chosen say nothing about speed.
CASE_FIELDS = (
    "threads",
    "rounds",
    "interrupted",
    "oracle",
    "tolerance",
    "kind",
    "errors_over_torch",
    "summary",
)
LIBRARY_FIELDS = (
    "reason",
    "wrong",
    "version",
    "chosen",
    "error",
    "rms_error",
    "copies",
    "medians",
    "products",
)

#: Digits of every kept figure: a hundred times finer than what one run repeats of another.
DIGITS = 5


def compact(document: Mapping[str, Any]) -> dict[str, Any]:
    """What is kept of a result: everything but the samples, rounded."""
    kept = dict(document) | {"cases": {name: _compact_case(run) for name, run in document["cases"].items()}}
    return _rounded(kept)


def _compact_case(run: Mapping[str, Any]) -> dict[str, Any]:
    libraries = {
        # The empty list stands for the samples: it lets ``--compare`` read the kept file.
        name: {field: it[field] for field in LIBRARY_FIELDS if field in it} | {"limit_shares": []}
        for name, it in run["libraries"].items()
    }
    fields = {field: run[field] for field in CASE_FIELDS if field in run}
    return {"case": run["case"], **fields, "libraries": libraries}


def _rounded(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _rounded(it) for key, it in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(it) for it in value]
    return float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value


def as_text(document: Mapping[str, Any]) -> str:
    """`document` as JSON with a line for each case, so that a change of one is a change of one line."""
    lines = []
    for key, value in document.items():
        if key == "cases":
            rows = ",\n".join(f"  {json.dumps(name)}: {_dumps(run)}" for name, run in value.items())
            lines.append(f' "cases": {{\n{rows}\n }}')
        else:
            lines.append(f" {json.dumps(key)}: {_dumps(value)}")
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _dumps(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))


def section(document: Mapping[str, Any], drawn: Sequence[Picture]) -> str:
    """The README's speed section, from `BEGIN` to `END`."""
    rows = [_row(name, document["cases"][name]) for name in TELLING if name in document["cases"]]
    header = (
        "case",
        "B,H,L,S,D",
        "options",
        "fastattn",
        "fastest peer / ours",
        "PyTorch / ours",
        "of the limit",
    )
    table = [header, ("---",) * len(header), *rows]
    folder = RESULTS.parent
    return "\n\n".join(
        (
            BEGIN,
            _provenance(document),
            "\n".join(f"| {' | '.join(row)} |" for row in table),
            *(f"![{picture.title}]({folder / picture.name}.png)" for picture in drawn),
            END,
        )
    )


def _provenance(document: Mapping[str, Any]) -> str:
    """Where, when and with what, in one sentence."""
    machine, cases = document["machine"], document["cases"]
    where = f"{machine['cpu']}, {_count(document['threads'], 'thread')} on {_count(machine['cores'], 'core')}"
    versions = ", ".join(
        f"{name} {version.split('-')[0]}"
        for name, version in document["versions"].items()
        if name not in OURS[1:]
    )
    rounds = [run["rounds"] for run in cases.values()]
    fewest = "" if min(rounds) == max(rounds) else f"{min(rounds)} to "
    medians = f"Medians of {fewest}{_count(max(rounds), 'interleaved round')}"
    figures = f"some of {_count(len(cases), 'case')}, all in [{RESULTS.name}]({RESULTS})"
    note = f"**{document['note']}** " if "note" in document else ""
    return f"{note}{where}, {document['date'][:10]}; {versions}. {medians}; {figures}:"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _row(name: str, run: Mapping[str, Any]) -> tuple[str, ...]:
    summary = run["summary"]
    seconds, best, limit = summary["seconds"], summary["best"], summary.get("limit")
    share = "-"
    if limit and limit["share"]:
        share = f"{100 * limit['share']['median']:.0f} %" + (" (memory)" if limit["kind"] == "memory" else "")
    return (
        f"`{name}`",
        run["case"]["shape"],
        run["case"]["options"],
        time_text(seconds[OURS[0]]) if OURS[0] in seconds else "-",
        f"{_ratio(summary, best)} ({best})" if best else "-",
        _ratio(summary, "torch"),
        share,
    )


def _ratio(summary: Mapping[str, Any], library: str) -> str:
    found = summary["ratios"].get(library)
    return "-" if found is None else f"{found['median']:.2f}"


def replaced(text: str, new: str) -> str:
    """`text` with what is between `BEGIN` and `END` replaced.

    Raises
    ------
    ValueError
        `text` does not have each of them once, in this order.
    """
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end) or BEGIN in rest or END in after:
        raise ValueError(f"{README} must have these lines once, in this order:\n{BEGIN}\n{END}")
    return f"{before}{new}{after}"


def publish(root: Path, document: Mapping[str, Any]) -> list[Path]:
    """Keep `document` below `root`, and write the section and the pictures; the files that were written."""
    folder = (root / RESULTS).parent
    folder.mkdir(parents=True, exist_ok=True)
    (root / RESULTS).write_text(as_text(document), encoding="utf-8")
    readme = root / README
    readme.write_text(replaced(readme.read_text("utf-8"), section(document, pictures(document))), "utf-8")
    paths = draw_all(document, folder)
    for stale in set(folder.glob("*.png")) - set(paths):
        stale.unlink()
    return [root / RESULTS, readme, *paths]


def disagreements(root: Path) -> Iterator[str]:
    """What below `root` does not say what the kept file says."""
    document = json.loads((root / RESULTS).read_text("utf-8"))
    for name, run in document["cases"].items():
        if name not in CASES:
            yield f"{RESULTS}: there is no case {name} any more"
        elif (run["case"]["shape"], run["case"]["options"]) != (CASES[name].shape, CASES[name].options):
            yield f"{RESULTS}: the case {name} is another one now"
    drawn = pictures(document)
    text = (root / README).read_text("utf-8")
    if replaced(text, section(document, drawn)) != text:
        yield f"{README}: the speed section"
    folder = RESULTS.parent
    wanted = {f"{picture.name}.png" for picture in drawn}
    there = {path.name for path in (root / folder).glob("*.png")}
    for name in sorted(wanted | there):
        if name not in there:
            yield f"{folder / name}: is missing"
        elif name not in wanted:
            yield f"{folder / name}: the results have no such picture"
        else:
            with Image.open(root / folder / name) as image:
                if image.info.get(DIGEST_KEY) != digest(document):
                    yield f"{folder / name}: was drawn from other results"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; 1 when ``--check`` found a disagreement."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.publish", description="Publish what was measured."
    )
    parser.add_argument("results", nargs="?", type=Path, metavar="RESULTS.json", help="publish this result")
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit status 1 if anything disagrees"
    )
    parser.add_argument("--note", help="what a reader of RESULTS.json has to know: kept with it, shown first")
    options = parser.parse_args(argv)
    if options.check and options.results is not None:
        parser.error("--check compares what is published; it takes no RESULTS.json")
    if options.note is not None and options.results is None:
        parser.error("--note is about RESULTS.json, which is not given")
    if options.check:
        found = list(disagreements(ROOT))
        print("\n".join(found) if found else "README and pictures say what the results say.")
        return 1 if found else 0
    document = json.loads((options.results or ROOT / RESULTS).read_text("utf-8"))
    if not document["cases"]:
        parser.error("the result has no case that was timed")
    if options.note is not None:
        document["note"] = options.note
    for path in publish(ROOT, compact(document)):
        print(path.relative_to(ROOT))
    return 0


if __name__ == "__main__":
    sys.exit(main())
