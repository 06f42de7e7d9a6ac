"""Publish a result: ``python -m benchmarks.publish [RESULTS.json --machine NAME [--note TEXT]] [--check]``.

The newest result of each machine is kept, in a file of its own in `benchmarks/results`. The figures of the
README and of the page of benchmarks, and the pictures beside those files, are written from them and from
nothing else: the whole of the newest, and a column for each of the others. ``--check`` tells whether they
still say what the files say. With RESULTS.json, what ``python -m fastattn bench --json RESULTS.json`` wrote
becomes the file of the machine NAME first.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import geometric_mean
from typing import Any

from PIL import Image

from fastattn.bench.cases import CASES
from fastattn.bench.peers import OURS
from fastattn.bench.plots import DIGEST_KEY, Picture, compared, digest, draw_all, measured, pictures, shown
from fastattn.bench.report import time_text

ROOT = Path(__file__).resolve().parent.parent

#: The folder of the kept files and the pictures, and the files that hold figures, below the root.
RESULTS, README, PAGE = Path("benchmarks/results"), Path("README.md"), Path("docs/benchmarks.md")

#: The folder of results for a link in the page.
FROM_PAGE = Path("..") / RESULTS

#: The rows of the README's table, as far as they were measured, in words.
SHORT = {
    "square-2048-64": "8 heads of 64, 2048 tokens",
    "causal-2048-64": "the same, causal",
    "window-8192": "2 heads, 8192 tokens, window of 256",
    "bert-batch": "BERT, 32 texts of 128 tokens",
    "bert-ragged": "the same, padded texts",
    "llama-decode": "Llama, one token after 4096",
    "backward-2048-64": "gradients, 8 heads, 2048 tokens",
    "tiny-16": "2 items of 4 heads, 16 tokens",
}

#: The rows of the page's tables, as far as they were measured: one or two of each kind of work.
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


def figure(documents: Sequence[Mapping[str, Any]]) -> str:
    """The README's one figure: the fastest peer's time over ours on each machine."""
    runs = [run for document in documents for run in document["cases"].values()]
    peers = shown(name for run in runs for name in run["summary"]["ratios"])
    if not peers:
        return "No other library was timed."
    *others, last = peers
    fastest = f"The fastest of {', '.join(others)} and {last}" if others else last
    first, *rest = (f"{_mean_ratio(it)} times" for it in documents)
    names = [document["machine"]["name"] for document in documents]
    times = [f"{first} as long as fastattn", *rest]
    where = ", ".join(f"{time} on {name}" for time, name in zip(times, names, strict=True))
    counts = [len(document["cases"]) for document in documents]
    over = _count(counts[0], "case")
    if len(set(counts)) > 1:
        over = f"{', '.join(map(str, counts[:-1]))} and {counts[-1]} cases, in this order"
    return f"**{fastest} takes {where}** (geometric means over {over}: [Speed](#speed))."


def _mean_ratio(document: Mapping[str, Any]) -> str:
    """The geometric mean of the fastest peer's time over ours."""
    ratios = [it.ratios[it.best]["median"] for it in measured(document) if it.best is not None]
    return f"{geometric_mean(ratios):.2f}" if ratios else "-"


def summary(documents: Sequence[Mapping[str, Any]], drawn: Sequence[Picture]) -> str:
    """The README's speed section: a short table, what was not faster, and the first picture."""
    names = [document["machine"]["name"] for document in documents]
    cells = [
        (label, *(_best_ratio(document["cases"].get(name)) for document in documents))
        for name, label in SHORT.items()
        if name in documents[0]["cases"]
    ]
    return "\n\n".join(
        (
            _table(("fastest peer's time / ours", *names), cells),
            "\n".join(f"* {_outcome(document)}" for document in documents),
            *(f"![{picture.title}]({RESULTS / picture.name}.png)" for picture in drawn[:1]),
        )
    )


def _outcome(document: Mapping[str, Any]) -> str:
    """How often fastattn is faster on a machine, and each case that is not, with its ratio."""
    cases = [it for it in measured(document) if it.best is not None]
    worst = [it for it in cases if it.best is not None and it.ratios[it.best]["high"] < 1]
    losses = ", ".join(f"`{it.name}` {_best_ratio(document['cases'][it.name])}" for it in worst)
    where = f"{document['machine']['name']}, {_count(document['threads'], 'thread')}, {document['date'][:10]}"
    return f"{where}: {compared(cases)}{f'. Slower: {losses}' if losses else ''}"


def section(documents: Sequence[Mapping[str, Any]], drawn: Sequence[Picture]) -> str:
    """The speed section of the page of benchmarks; `documents` are the kept ones, the newest first."""
    newest, *others = documents
    names = [name for name in TELLING if name in newest["cases"]]
    header = ("case", "B,H,L,S,D", "options", "fastattn", "PyTorch / ours", "of the multiply-add peak")
    beside = ("fastest peer / ours", *(document["machine"]["name"] for document in documents))
    ratios = [
        (f"`{name}`", *(_best_ratio(document["cases"].get(name)) for document in documents)) for name in names
    ]
    return "\n\n".join(
        (
            f"{_provenance(newest)}:",
            _table(header, [_row(name, newest["cases"][name]) for name in names]),
            "The fastest peer on each machine:",
            _table(beside, ratios),
            *(f"{_provenance(other)}." for other in others),
            "\n".join(f"* {_outcome(document)}" for document in documents),
            *(f"![{picture.title}]({FROM_PAGE / picture.name}.png)" for picture in drawn),
        )
    )


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in (header, ("---",) * len(header), *rows))


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
    file = FROM_PAGE / file_of(document).name
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
        _ratio(summary, "torch"),
        share,
    )


def _best_ratio(run: Mapping[str, Any] | None) -> str:
    """The fastest peer's time over ours, and which peer it is; "equal" where the 95 % interval holds 1."""
    best = run and run["summary"]["best"]
    if not (run and best):
        return "-"
    ratio = run["summary"]["ratios"][best]
    equal = ", equal" if ratio["low"] <= 1 <= ratio["high"] else ""
    return f"{ratio['median']:.2f} ({best}{equal})"


def _ratio(summary: Mapping[str, Any], library: str) -> str:
    found = summary["ratios"].get(library)
    return "-" if found is None else f"{found['median']:.2f}"


def marks(name: str) -> tuple[str, str]:
    """The lines around what is written here under `name`."""
    begin = f"<!-- {name}: written by python -m benchmarks.publish; changes belong there. -->"
    return begin, f"<!-- End of {name}, as python -m benchmarks.publish wrote it. -->"


def replaced(text: str, name: str, new: str) -> str:
    """`text` with what is between the marks of `name` replaced.

    Raises
    ------
    ValueError
        `text` does not have each of them once, in this order.
    """
    begin, end = marks(name)
    before, found, rest = text.partition(begin)
    _, ended, after = rest.partition(end)
    if not (found and ended) or begin in rest or end in after:
        raise ValueError(f"a text with {name} must have these lines once, in this order:\n{begin}\n{end}")
    return f"{before}{begin}\n\n{new}\n\n{end}{after}"


def texts(
    root: Path, documents: Sequence[Mapping[str, Any]], drawn: Sequence[Picture]
) -> Iterator[tuple[Path, str]]:
    """The files that hold figures, below `root`, each with what it has to say."""
    written = {
        README: {"Figure": figure(documents), "Speed": summary(documents, drawn)},
        PAGE: {"Speed": section(documents, drawn)},
    }
    for file, parts in written.items():
        text = (root / file).read_text("utf-8")
        for name, new in parts.items():
            text = replaced(text, name, new)
        yield file, text


def publish(root: Path, document: Mapping[str, Any] | None = None) -> list[Path]:
    """Keep `document` below `root`, and write the figures and the pictures; the files that were written."""
    (root / RESULTS).mkdir(parents=True, exist_ok=True)
    paths = []
    if document is not None:
        paths.append(root / file_of(document))
        paths[0].write_text(as_text(document), encoding="utf-8")
    documents = kept(root)
    for file, text in texts(root, documents, pictures(documents[0])):
        (root / file).write_text(text, "utf-8")
        paths.append(root / file)
    images = draw_all(documents[0], root / RESULTS)
    for stale in set((root / RESULTS).glob("*.png")) - set(images):
        stale.unlink()
    return [*paths, *images]


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
    for file, text in texts(root, documents, drawn):
        if (root / file).read_text("utf-8") != text:
            yield f"{file}: the figures"
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
        print("\n".join(found) if found else "Pages and pictures say what the results say.")
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
