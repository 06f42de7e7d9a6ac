"""Publish a result: ``python -m benchmarks.publish [RESULTS.json --machine NAME [--note TEXT]] [--check]``.

The newest result of each machine is kept, in a file of its own in `benchmarks/results`. The README's speed
section and the pictures beside those files are written from them and from nothing else: the whole of the
newest, and a column for each of the others. ``--check`` tells whether they still say what the files say. With
RESULTS.json, what ``python -m fastattn bench --json RESULTS.json`` wrote becomes the file of the machine NAME
first.
"""

from __future__ import annotations

import argparse
import json
import re
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

#: The folder of the kept files and the pictures, and the file that holds the section, below the root.
RESULTS, README = Path("benchmarks/results"), Path("README.md")

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


def file_of(document: Mapping[str, Any]) -> Path:
    """Where the result of a machine of this name is kept, below the root."""
    words = re.findall("[a-z0-9]+", document["machine"]["name"].lower())
    return RESULTS / f"{'-'.join(words)}.json"


def kept(root: Path) -> list[dict[str, Any]]:
    """The kept results, the newest first."""
    documents = [json.loads(path.read_text("utf-8")) for path in (root / RESULTS).glob("*.json")]
    return sorted(documents, key=lambda document: document["date"], reverse=True)


def section(documents: Sequence[Mapping[str, Any]], drawn: Sequence[Picture]) -> str:
    """The README's speed section, from `BEGIN` to `END`; `documents` are the kept ones, the newest first."""
    newest, *others = documents
    rows = [
        (*_row(name, newest["cases"][name]), *(_best_ratio(other["cases"].get(name)) for other in others))
        for name in TELLING
        if name in newest["cases"]
    ]
    header = (
        "case",
        "B,H,L,S,D",
        "options",
        "fastattn",
        "fastest peer / ours",
        "PyTorch / ours",
        "of the limit",
        *(f"{other['machine']['name']}: fastest peer / ours" for other in others),
    )
    table = [header, ("---",) * len(header), *rows]
    return "\n\n".join(
        (
            BEGIN,
            f"{_provenance(newest)}:",
            "\n".join(f"| {' | '.join(row)} |" for row in table),
            *(f"{_provenance(other)}." for other in others),
            *(f"![{picture.title}]({RESULTS / picture.name}.png)" for picture in drawn),
            END,
        )
    )


def _provenance(document: Mapping[str, Any]) -> str:
    """Where, when and with what, in one sentence."""
    machine, cases = document["machine"], document["cases"]
    where = (
        f"{machine['name']} ({machine['cpu']}), "
        f"{_count(document['threads'], 'thread')} on {_count(machine['cores'], 'core')}"
    )
    versions = ", ".join(
        f"{name} {version.split('-')[0]}"
        for name, version in document["versions"].items()
        if name not in OURS[1:]
    )
    rounds = [run["rounds"] for run in cases.values()]
    fewest = "" if min(rounds) == max(rounds) else f"{min(rounds)} to "
    medians = f"Medians of {fewest}{_count(max(rounds), 'interleaved round')}"
    file = file_of(document)
    figures = f"some of {_count(len(cases), 'case')}, all in [{file.name}]({file})"
    note = f"**{document['note']}** " if "note" in document else ""
    return f"{note}{where}, {document['date'][:10]}; {versions}. {medians}; {figures}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _row(name: str, run: Mapping[str, Any]) -> tuple[str, ...]:
    summary = run["summary"]
    seconds, limit = summary["seconds"], summary.get("limit")
    share = "-"
    if limit and limit["share"]:
        share = f"{100 * limit['share']['median']:.0f} %" + (" (memory)" if limit["kind"] == "memory" else "")
    return (
        f"`{name}`",
        run["case"]["shape"],
        run["case"]["options"],
        time_text(seconds[OURS[0]]) if OURS[0] in seconds else "-",
        _best_ratio(run),
        _ratio(summary, "torch"),
        share,
    )


def _best_ratio(run: Mapping[str, Any] | None) -> str:
    best = run and run["summary"]["best"]
    return f"{_ratio(run['summary'], best)} ({best})" if run and best else "-"


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


def publish(root: Path, document: Mapping[str, Any] | None = None) -> list[Path]:
    """Keep `document` below `root`, and write the section and the pictures; the files that were written."""
    (root / RESULTS).mkdir(parents=True, exist_ok=True)
    paths = []
    if document is not None:
        paths.append(root / file_of(document))
        paths[0].write_text(as_text(document), encoding="utf-8")
    documents, readme = kept(root), root / README
    drawn = pictures(documents[0])
    readme.write_text(replaced(readme.read_text("utf-8"), section(documents, drawn)), "utf-8")
    images = draw_all(documents[0], root / RESULTS)
    for stale in set((root / RESULTS).glob("*.png")) - set(images):
        stale.unlink()
    return [*paths, readme, *images]


def disagreements(root: Path) -> Iterator[str]:
    """What below `root` does not say what the kept file says."""
    documents = kept(root)
    for document in documents:
        file = file_of(document)
        if not (root / file).exists():
            yield f"{file}: is kept under another name"
        for name, run in document["cases"].items():
            if name not in CASES:
                yield f"{file}: there is no case {name} any more"
            elif (run["case"]["shape"], run["case"]["options"]) != (CASES[name].shape, CASES[name].options):
                yield f"{file}: the case {name} is another one now"
    drawn = pictures(documents[0])
    text = (root / README).read_text("utf-8")
    if replaced(text, section(documents, drawn)) != text:
        yield f"{README}: the speed section"
    wanted = {f"{picture.name}.png" for picture in drawn}
    there = {path.name for path in (root / RESULTS).glob("*.png")}
    for name in sorted(wanted | there):
        if name not in there:
            yield f"{RESULTS / name}: is missing"
        elif name not in wanted:
            yield f"{RESULTS / name}: the results have no such picture"
        else:
            with Image.open(root / RESULTS / name) as image:
                if image.info.get(DIGEST_KEY) != digest(documents[0]):
                    yield f"{RESULTS / name}: was drawn from other results"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; 1 when ``--check`` found a disagreement."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.publish", description="Publish what was measured."
    )
    parser.add_argument("results", nargs="?", type=Path, metavar="RESULTS.json", help="publish this result")
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit status 1 if anything disagrees"
    )
    parser.add_argument("--machine", metavar="NAME", help="what RESULTS.json was measured on, such as Zen 5")
    parser.add_argument("--note", help="what a reader of RESULTS.json has to know: kept with it, shown first")
    options = parser.parse_args(argv)
    if options.check and options.results is not None:
        parser.error("--check compares what is published; it takes no RESULTS.json")
    if options.results is None and (options.note is not None or options.machine is not None):
        parser.error("--machine and --note are about RESULTS.json, which is not given")
    if options.results is not None and not options.machine:
        parser.error("--machine NAME says what RESULTS.json was measured on")
    if options.check:
        found = list(disagreements(ROOT))
        print("\n".join(found) if found else "README and pictures say what the results say.")
        return 1 if found else 0
    document = None
    if options.results is not None:
        measured = json.loads(options.results.read_text("utf-8"))
        if not measured["cases"]:
            parser.error("the result has no case that was timed")
        measured["machine"]["name"] = options.machine
        if options.note is not None:
            measured["note"] = options.note
        document = compact(measured)
    for path in publish(ROOT, document):
        print(path.relative_to(ROOT))
    return 0


if __name__ == "__main__":
    sys.exit(main())
