"""The documentation site: ``python -m sphinx -W --keep-going docs docs/_build/html``."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from docutils import nodes
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx.application import Sphinx

import fastattn

project = "fastattn"
author = "the fastattn authors"
project_copyright = "MIT license"
version = release = fastattn.__version__

extensions = [
    "myst_nb",
    "numpydoc",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.intersphinx",
    "sphinx_copybutton",
    "sphinx_design",
]
exclude_patterns = ["_build"]
nitpicky = True
# Names of other libraries are links on Read the Docs alone: a build elsewhere needs no network.
intersphinx_mapping = {
    name: (f"https://{address}/", None)
    for name, address in {
        "jax": "docs.jax.dev/en/latest",
        "numpy": "numpy.org/doc/stable",
        "python": "docs.python.org/3",
        "scipy": "docs.scipy.org/doc/scipy",
        "torch": "docs.pytorch.org/docs/stable",
    }.items()
    if "READTHEDOCS" in os.environ
}
nitpick_ignore_regex = [
    ("py:obj", r"(functools|jax|math|ml_dtypes|numba|numpy|scipy|torch)(\..*)?"),
    ("py:obj", r"[a-z_]+"),  # arguments of a class, which are attributes of it as well
]
default_role = "autolink"  # `name` in a docstring is a link where it names something public, else emphasis

# Pages. Their cells run at each build; what one prints on stderr, and an exception, are errors.
myst_enable_extensions = ["colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 3
nb_execution_mode = "force"
nb_execution_raise_on_error = True
nb_execution_timeout = 60
nb_output_stderr = "warn"
nb_render_markdown_format = "myst"  # of what a cell shows
nb_code_prompt_show = "The code of the figure"
nb_code_prompt_hide = "The code of the figure"
# Kernels import the package that this process imported, installed or not.
os.environ["PYTHONPATH"] = os.pathsep.join(
    [str(Path(fastattn.__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
)

# Docstrings.
autodoc_typehints = "none"  # types are in the docstrings
autodoc_member_order = "bysource"
# Of `fastattn.integrations`; a build needs none of them.
autodoc_mock_imports = [
    "autograd", "dask", "jax", "keras", "llvmlite", "numba", "onnx", "scipy", "sklearn", "statsmodels",
    "tabpfn", "tokamax", "torch", "transformers",
]  # fmt: skip
autosummary_generate = False
numpydoc_show_class_members = False
suppress_warnings = ["ref.citation"]  # References of a docstring need not be cited in its text

html_theme = "furo"
html_math_renderer = "mathml"  # which every browser shows, without scripts from elsewhere
html_title = "fastattn"
html_static_path = ["_static"]
html_css_files = ["fastattn.css"]
html_show_copyright = False
html_copy_source = False
html_show_sourcelink = False
pygments_style, pygments_dark_style = "friendly", "native"
html_theme_options = {
    "light_css_variables": {
        "color-brand-primary": "#1d5fb4",
        "color-brand-content": "#1d5fb4",
        "font-stack": "Inter, system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', sans-serif",
        "font-stack--monospace": "'JetBrains Mono', ui-monospace, 'SF Mono', Menlo, Consolas, monospace",
    },
    "dark_css_variables": {"color-brand-primary": "#6fb1ff", "color-brand-content": "#6fb1ff"},
}


def show_short_citations(app: Sphinx, page: nodes.document, name: str) -> None:
    """[1] for numpydoc's names of references, which are unique among all docstrings."""
    for text in list(page.findall(nodes.Text)):
        text.parent.replace(text, nodes.Text(re.sub(r"\[R[0-9a-f]{12}-(\w+)\]", r"[\1]", text)))


def setup(app: Sphinx) -> None:
    """Formulas as MathML, by docutils; references by their numbers."""

    def visit(translator: Any, node: nodes.math | nodes.math_block) -> None:
        is_block = isinstance(node, nodes.math_block)
        formula = tex2mathml(node.astext(), as_block=is_block)
        translator.body.append(f'<div class="math">{formula}</div>' if is_block else str(formula))
        raise nodes.SkipNode

    app.add_html_math_renderer("mathml", inline_renderers=(visit, None), block_renderers=(visit, None))
    app.connect("doctree-resolved", show_short_citations)
