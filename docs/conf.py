"""The pages of cellfeed: `make docs` builds them, with warnings as errors."""

import json
import shutil
import sys
from pathlib import Path
from typing import NewType

import numpy.typing as npt
from docutils.nodes import SkipNode
from latex2mathml.converter import convert
from sphinx.ext.napoleon import NumpyDocstring

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "docs"), str(ROOT / "loader"), str(ROOT / "tuner")]

# A name in signatures, instead of the union of ten types that it stands for.
npt.ArrayLike = NewType("ArrayLike", object)
npt.ArrayLike.__module__ = "numpy.typing"

from autotune_schema import result_schema  # noqa: E402

from cellfeed import __version__  # noqa: E402

project = "cellfeed"
author = "the cellfeed developers"
copyright = author  # noqa: A001 - its name here
release = version = __version__

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_click",
    "sphinx_copybutton",
    "sphinx_design",
]
exclude_patterns = ["_build", "jupyter_execute"]
templates_path = ["_templates"]

smartquotes_action = "D"  # only dashes: quotes and dots in help texts are what to type

html_theme = "sphinx_book_theme"
html_title = "cellfeed"
html_theme_options = {
    "use_download_button": False,
    "use_fullscreen_button": False,
    "show_toc_level": 2,
    "collapse_navbar": True,
    "navbar_persistent": [],
}
html_static_path = ["_static"]
html_css_files = ["cellfeed.css"]
html_math_renderer = "mathml"

myst_enable_extensions = ["colon_fence", "dollarmath"]
myst_heading_anchors = 3
suppress_warnings = ["mystnb.unknown_mime_type"]

# The tutorial runs in its own folder; notebooks are shown as stored.
nb_execution_mode = "force"
nb_execution_in_temp = True
nb_execution_raise_on_error = True
nb_execution_show_tb = True
nb_execution_timeout = 300
nb_execution_excludepatterns = ["benchmarks/notebooks/*"]
nb_merge_streams = True

autosummary_generate = True
autosummary_ignore_module_all = False
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
toc_object_entries_show_parents = "hide"
autodoc_default_options = {"show-inheritance": True}
napoleon_google_docstring = False
napoleon_use_rtype = False
default_role = "py:obj"
python_use_unqualified_type_names = True

# latex2mathml puts no space around \ln and \log, and writes \sim as an ASCII tilde.
SPACED = {
    r"\ln": r"\operatorname{ln}",
    r"\log": r"\operatorname{log}",
    r"\sim": r"\thicksim",
}


def copy_notebooks(_app):
    """Copy the notebooks, with their outputs, to the pages."""
    target = ROOT / "docs" / "benchmarks" / "notebooks"
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir()
    for path in (ROOT / "notebooks").glob("*.ipynb"):
        shutil.copy(path, target)


def write_schema(_app):
    """Write the JSON Schema of results to where its page links it."""
    target = ROOT / "docs" / "reference" / "api" / "autotune.schema.json"
    target.parent.mkdir(exist_ok=True)
    target.write_text(json.dumps(result_schema(), indent=1) + "\n")


def link_notebooks(_app, _page, source):
    """Link the copied notebooks where pages in a checkout link the folder's."""
    source[0] = source[0].replace("](../../notebooks/", "](notebooks/")


def returns_section(docstring, _section):
    """Show what is under Returns as text; napoleon would make an item of each of its lines."""
    lines = docstring._dedent(docstring._consume_to_next_section())  # noqa: SLF001 - no public way
    return docstring._format_block(":returns: ", lines)  # noqa: SLF001


NumpyDocstring._parse_returns_section = returns_section  # noqa: SLF001
# In the docstring of a property, what comes before a colon is not its type.
NumpyDocstring._parse_attribute_docstring = NumpyDocstring._consume_to_end  # noqa: SLF001


def write_math(translator, node, display):
    """Write a formula as MathML, which browsers show without scripts or fonts from a network."""
    tex = node.astext()
    for name, spaced in SPACED.items():
        tex = tex.replace(name, spaced)
    tag = translator.starttag(node, "div", "", CLASS="formula") if display == "block" else ""
    translator.body.append(f"{tag}{convert(tex, display=display)}{tag and '</div>'}")
    raise SkipNode


def setup(app):
    """Register what Sphinx does first, and with each page and formula."""
    app.add_html_math_renderer(
        "mathml",
        (lambda translator, node: write_math(translator, node, "inline"), None),
        (lambda translator, node: write_math(translator, node, "block"), None),
    )
    app.connect("config-inited", lambda app, _config: copy_notebooks(app))
    app.connect("config-inited", lambda app, _config: write_schema(app))
    app.connect("source-read", link_notebooks)
