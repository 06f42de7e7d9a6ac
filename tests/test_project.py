"""The project's papers agree with the package, and name what is there."""

from __future__ import annotations

import re
import tomllib
from importlib.util import find_spec
from pathlib import Path

import pytest

import fastattn
from tests.process import ROOT

GITHUB = ROOT / ".github"
WORKFLOWS = sorted((GITHUB / "workflows").glob("*.yml"))
CONTRIBUTING = ROOT / "CONTRIBUTING.md"

#: What `.github` lacks in a source distribution.
in_a_clone = pytest.mark.skipif(not GITHUB.exists(), reason="a source distribution has no .github")


def test_versions_agree():
    citation = re.findall(r"(?m)^version: (.+)$", (ROOT / "CITATION.cff").read_text())
    newest = re.findall(r"(?m)^## \[(\d[^]]*)\]", (ROOT / "CHANGELOG.md").read_text())
    assert citation == newest[:1] == [fastattn.__version__]


def test_the_abi_version_of_the_papers_is_that_of_the_header():
    header = Path(fastattn.get_include(), "fastattn.h").read_text()
    (version,) = re.findall(r"#define FASTATTN_ABI_VERSION (\d+)", header)
    assert f"`FASTATTN_ABI_VERSION`, {version} " in (ROOT / "docs" / "versioning.md").read_text()
    assert f"ABI version {version}," in (ROOT / "CHANGELOG.md").read_text()


def test_the_changelog_names_each_public_name():
    text = (ROOT / "CHANGELOG.md").read_text()
    names = [name for name in fastattn.__all__ if not name.startswith("_")]
    assert names and not [name for name in names if not re.search(rf"`(fastattn\.)?{name}`", text)]


def test_contributing_names_files_that_are_there():
    text = CONTRIBUTING.read_text()
    named = {
        name for name in re.findall(r"(?:tests|docs|benchmarks)/[\w*./-]*\w", text) if "_build" not in name
    }
    assert len(named) > 25
    assert not [name for name in sorted(named) if not list(ROOT.glob(name))]
    links = re.findall(r"\]\((?!https?://|#)([^)#]+)", text)
    assert links and not [link for link in links if not (ROOT / link).exists()]


def test_contributing_runs_modules_and_extras_that_are_there():
    text = CONTRIBUTING.read_text()
    modules = set(re.findall(r"python -m ([a-z]\w*)", text))
    assert {"pytest", "fastattn", "benchmarks"} <= modules
    own = {"fastattn", "benchmarks", "pytest"}
    assert modules - own <= {"sphinx"} and all(find_spec(name) for name in own)
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    wanted = {name for group in re.findall(r"\.\[([\w,-]+)\]", text) for name in group.split(",")}
    assert wanted and wanted <= set(extras)


@in_a_clone
@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_actions_are_pinned(path):
    used = re.findall(r"(?m)\buses:\s*(.+)$", path.read_text())
    assert used
    assert not [line for line in used if not re.fullmatch(r"[\w./-]+@[0-9a-f]{40} # v\d+(\.\d+)*", line)]


@in_a_clone
def test_yaml_is_valid():
    yaml = pytest.importorskip("yaml")
    forms = sorted((GITHUB / "ISSUE_TEMPLATE").glob("*.yml"))
    assert len(forms) == 4 and len(WORKFLOWS) == 2
    for form in forms:
        fields = yaml.safe_load(form.read_text())
        assert {"name", "description", "body"} <= set(fields)
        ids = [field["id"] for field in fields["body"] if field["type"] != "markdown"]
        assert len(set(ids)) == len(ids)
    for workflow in WORKFLOWS:
        jobs = yaml.safe_load(workflow.read_text())["jobs"]
        assert all("runs-on" in job and job["steps"] for job in jobs.values())
    for other in (GITHUB / "dependabot.yml", ROOT / ".pre-commit-config.yaml"):
        assert yaml.safe_load(other.read_text())
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert {"cff-version", "message", "title", "authors"} <= set(citation)
