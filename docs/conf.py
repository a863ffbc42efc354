"""The pages of cellfeed: `make docs` builds them, with warnings as errors."""

import json
import os
import re
import shutil
import sys
from html import escape
from html.parser import HTMLParser
from pathlib import Path
from typing import NewType
from urllib.parse import unquote, urlsplit

import numpy.typing as npt
from docutils import nodes
from latex2mathml.converter import convert
from sphinx.errors import ExtensionError
from sphinx.ext.napoleon import NumpyDocstring

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "docs"), str(ROOT / "loader"), str(ROOT / "tuner")]
# The tutorial runs `autotune` as a reader would.
os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])

# A name in signatures, instead of the union of ten types that it stands for.
npt.ArrayLike = NewType("ArrayLike", object)
npt.ArrayLike.__module__ = "numpy.typing"

from autotune_schema import result_schema  # noqa: E402
from links import url_of  # noqa: E402
from speed import times_as_fast  # noqa: E402

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

# A checkout does not know where it is hosted; what publishes the pages does.
repository = os.environ.get("CELLFEED_REPOSITORY", "").removesuffix(".git")
versions = os.environ.get("CELLFEED_VERSIONS", "")  # the address of a versions.json

html_theme = "sphinx_book_theme"
html_title = "cellfeed"
html_logo = html_favicon = "_static/logo.svg"
html_sidebars = {
    "**": [
        "navbar-logo.html",
        *(["version-switcher.html"] if versions else []),
        *(["icon-links.html"] if repository else []),
        "search-button-field.html",
        "sbt-sidebar-nav.html",
    ]
}
html_theme_options = {
    "use_download_button": False,
    "use_fullscreen_button": False,
    "show_toc_level": 2,
    "collapse_navbar": True,
    "navbar_persistent": [],
    "logo": {"text": "cellfeed", "alt_text": "cellfeed: start page"},
    "extra_footer": f"cellfeed {version}",
    "repository_url": repository,
    "use_repository_button": bool(repository),
}
if versions:
    html_theme_options["switcher"] = {"json_url": versions, "version_match": version}
    html_theme_options["check_switcher"] = False
html_static_path = ["_static"]
html_css_files = ["cellfeed.css"]
html_js_files = [("enlarge.js", {"defer": "defer"})]
html_math_renderer = "mathml"

myst_enable_extensions = ["colon_fence", "dollarmath", "substitution"]
myst_substitutions = {"times_as_fast": times_as_fast()}
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
    raise nodes.SkipNode


def first_paragraph(doctree):
    """Return the first sentences of a page as one line of text."""
    found = (each for each in doctree.findall(nodes.paragraph) if each.astext().strip())
    sentences = (each for each in found if isinstance(each.parent, nodes.section))
    return " ".join(next((each.astext() for each in sentences), "").split())


def describe_page(_app, _name, _template, context, doctree):
    """Describe a page to search engines, and to whoever shows a link to it."""
    said = doctree and first_paragraph(doctree)
    if said:
        said = escape(said if len(said) <= 160 else said[:157].rsplit(" ", 1)[0] + " ...")  # noqa: PLR2004
        title = escape(re.sub("<[^>]+>", "", context.get("title", project)))
        context["metatags"] += (
            f'<meta name="description" content="{said}">\n'
            f'<meta property="og:title" content="{title}">\n'
            f'<meta property="og:description" content="{said}">\n'
        )


def link_sources(_app, page, _template, context, _doctree):
    """Link source code to the page of its name; of names in two modules, viewcode mixes anchors."""
    if page.startswith("_modules/"):
        context["body"] = re.sub(
            r'/(?P<name>[\w.]+)\.html#(?P<anchor>[\w.]+)"', anchored, context["body"]
        )


def anchored(link):
    """Return the end of a link to a page of reference/api, with an anchor that the page has."""
    name = link["name"]
    _, found, member = f".{link['anchor']}.".partition(f".{name.rpartition('.')[2]}.")
    anchor = ".".join(filter(None, (name, member.rstrip(".")))) if found else link["anchor"]
    return f'/{name}.html#{anchor}"'


def write_llms_txt(app, error):
    """List the pages, with what each says, as `llms.txt` (llmstxt.org); sources lie beside."""
    if error or app.builder.name != "html":
        return
    lines = [f"# {project}", ""]
    for name in [app.config.root_doc, *app.env.toctree_includes[app.config.root_doc]]:
        said = first_paragraph(app.env.get_doctree(name))
        if name == app.config.root_doc:
            lines += [f"> {said}", "", "## Pages", ""]
            continue
        for page in [name, *app.env.toctree_includes.get(name, [])]:
            title, said = (
                app.env.titles[page].astext(),
                first_paragraph(app.env.get_doctree(page)),
            )
            lines.append(f"- [{title}]({source_of(app, page)}): {said}".removesuffix(": "))
    Path(app.outdir, "llms.txt").write_text("\n".join(lines) + "\n")


class Links(HTMLParser):
    """Collects where a page links to, and the anchors that it has."""

    def __init__(self, page):
        super().__init__()
        self.links, self.anchors = set(), {""}
        self.feed(page.read_text())

    def handle_starttag(self, tag, attrs):
        """Take what a tag has of either."""
        attributes = dict(attrs)
        self.anchors.add(attributes.get("id"))
        if tag == "a" and "href" in attributes:
            self.links.add(attributes["href"])


def check_links(app, error):
    """Fail if a page links to a page or an anchor of the site that is not there."""
    if error or app.builder.name != "html":
        return
    pages = {path.resolve(): Links(path) for path in Path(app.outdir).rglob("*.html")}
    for path, page in pages.items():
        for link in sorted(page.links):
            target, _, anchor = link.partition("#")
            target = (path.parent / unquote(target)).resolve() if target else path
            is_there = anchor in pages[target].anchors if target in pages else target.exists()
            if not is_there and not urlsplit(link).scheme:
                raise ExtensionError(f"{path.name} links to {link}, which is not there")


def source_of(app, page):
    """Return where the source of a page lies in the site."""
    suffix = Path(app.env.doc2path(page)).suffix
    return f"_sources/{page}{suffix}{'' if suffix == '.txt' else '.txt'}"


def link_elsewhere(_app, _env, node, content):
    """Link names of Python, NumPy, anndata, PyTorch and others to their reference."""
    url = url_of(node.get("reftarget", ""))
    return nodes.reference("", "", content, internal=False, refuri=url) if url else None


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
    app.connect("missing-reference", link_elsewhere)
    app.connect("html-page-context", describe_page)
    app.connect("html-page-context", link_sources)
    app.connect("build-finished", write_llms_txt)
    app.connect("build-finished", check_links)
