"""What pages say of the repository is so; nothing of them is run."""

import ast
import importlib
import importlib.util
import itertools
import os
import re
import shlex
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path
from types import ModuleType

import pytest
from tests.commands import autotune, cellfeed
from tests.loader import extensions

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
MADE = {"_build", "api", "jupyter_execute"}
BLOCK = re.compile(r"^```(\S*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def documents():
    """README.md, its like, and the pages; not what `make docs` may be writing meanwhile."""
    yield from sorted(ROOT.glob("*.md"))
    for folder, folders, files in os.walk(DOCS):
        folders[:] = sorted(set(folders) - MADE)
        yield from (Path(folder, each) for each in sorted(files) if each.endswith(".md"))


@cache
def prose(document):
    """A document without its code blocks, where # begins a comment."""
    return BLOCK.sub("", document.read_text())


def anchors(document):
    """What GitHub calls the headings of a document."""
    headings = re.findall(r"^#+ (.+)$", prose(document), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", each.lower()).replace(" ", "-") for each in headings}


def test_links_lead_somewhere():
    links = [
        (document, link)
        for document in documents()
        for link in dict.fromkeys(re.findall(r"\]\(([^)\s]+)\)", prose(document)))
        if "://" not in link
    ]

    def leads_somewhere(document, link):
        path, _, anchor = link.partition("#")
        target = document.parent / path if path else document
        return target.exists() and (not anchor or anchor in anchors(target))

    assert len(links) > 100
    assert [f"{each.name}: {link}" for each, link in links if not leads_somewhere(each, link)] == []


def is_as_shown(line, makefile, extras):
    """Whether a command has the options that are shown."""
    words = [word for word in shlex.split(line, comments=True) if not re.match(r"[A-Z_]+=", word)]
    if words[0] == "make":
        return all(re.search(rf"^{each}:", makefile, re.MULTILINE) for each in words[1:])
    if words[0] in ("bash", "python"):
        return (ROOT / words[1]).is_file()
    if words[0] == "pip":
        wanted = re.findall(r"\[(\w+)\]", line)
        return all(re.search(rf"^{each} = ", extras, re.MULTILINE) for each in wanted)
    command = {"cellfeed": cellfeed, "autotune": autotune}[words[0]]
    return command(*words[1:], "--help").exit_code == 0


def test_commands_have_the_options_that_are_shown():
    pages = [
        path
        for name in ("how-to", "explanation", "reference")
        for path in (DOCS / name).glob("*.md")
    ]
    lines = [
        (path.name, line)
        for path in [*pages, ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
        for language, block in BLOCK.findall(path.read_text())
        if language in ("sh", "bash")
        for line in block.splitlines()
        if not line.startswith("#")
    ]
    makefile = (ROOT / "Makefile").read_text()
    extras = (ROOT / "pyproject.toml").read_text().partition("[project.optional-dep")[2]
    assert len(lines) > 20
    assert [each for each in lines if not is_as_shown(each[1], makefile, extras)] == []


MODULES = [
    *("cellfeed", "cellfeed.machine", "cellfeed.sampling", "cellfeed.sources", "cellfeed.stages"),
    *("cellfeed.extending", "cellfeed.spatial"),
    pytest.param("cellfeed.frameworks.lightning", marks=pytest.mark.slow),  # Lightning takes 2 s
    "cellfeed.frameworks.scvi",
    "cellfeed.frameworks.transformers",
    "cellfeed.frameworks.state",
    *("cellfeed.scdataset", "cellfeed.synthetic", "cellfeed.testing", "cellfeed.tokenizers"),
    "cellfeed.transforms",
    *("cellfeed_tuner", "cellfeed_tuner.plots", "cellfeed_tuner.theory"),
]
LISTED = re.compile(r"\.\. autosummary::\n   :toctree: api\n   :nosignatures:\n\n((?:   \w+\n)+)")
WRITTEN = re.compile(r"\.\. py:data:: (\w+)")  # aliases of types, which have no docstring


@pytest.mark.parametrize("module", MODULES)
def test_the_reference_lists_all_public_names_once(module):
    imported, package = (importlib.import_module(each) for each in (module, "cellfeed"))
    public = {
        name
        for name in imported.__all__
        if not name.startswith("__") and not isinstance(getattr(imported, name), ModuleType)
    }
    if module != "cellfeed":  # those of the package are on its page
        public -= {
            name
            for name in public & set(package.__all__)
            if getattr(imported, name) is getattr(package, name)
        }
    page = (DOCS / "reference" / f"{module.rpartition('.')[2]}.md").read_text()
    listed = [name for each in LISTED.findall(page) for name in each.split()]
    assert sorted(listed + WRITTEN.findall(page)) == sorted(public)


def test_tests_and_examples_that_are_named_are_there():
    page = (DOCS / "how-to" / "training.md").read_text()
    named = set(re.findall(r"`([a-z]+/test_\w+\.py)`", page))
    assert named
    assert [each for each in named if not (ROOT / "tests" / "loader" / each).is_file()] == []
    gallery = (DOCS / "how-to" / "examples.md").read_text()
    shown = set(re.findall(r"literalinclude} \.\./\.\./examples/(\w+\.py)", gallery))
    assert shown == {each.name for each in (ROOT / "examples").glob("*.py")}


def rows_of_map(package):
    """The folders and modules of each row of the map of the code, the topmost first."""
    page = (DOCS / "explanation" / "rooms.md").read_text()
    _, _, table = page.partition(f"| `{package}/` | answers |\n|---|---|\n")
    rows = itertools.takewhile(bool, table.splitlines())
    return [re.findall(r"`(\w+)(?:/|\.py)`", row.split("|")[1]) for row in rows]


def extensions_of_map():
    """The folders in the table of the loader's extensions."""
    page = (DOCS / "explanation" / "rooms.md").read_text()
    _, _, table = page.partition("| extension | gives |\n|---|---|\n")
    return set(re.findall(r"`(\w+)/`", "".join(itertools.takewhile(bool, table.splitlines()))))


def test_all_extensions_are_on_the_map():
    assert {folder.name for folder in extensions.folders()} | extensions.GROUPS == (
        extensions_of_map()
    )


def statements(node):
    """All statements within a node; looking at expressions takes most of the time."""
    for each in ast.iter_child_nodes(node):
        if isinstance(each, ast.stmt | ast.ExceptHandler | ast.match_case):
            yield each
            yield from statements(each)


def imports_of(package):
    """What each module of a package imports, also in functions and for types alone."""
    path, modules = ROOT / package, dict[str, Path]()
    for each in path.rglob("*.py"):
        parts = [path.name, *each.relative_to(path).with_suffix("").parts]
        modules[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = each
    imports = {name: set[str]() for name in modules}
    for name, each in modules.items():
        for node in statements(ast.parse(each.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module in modules:
                among = {f"{node.module}.{alias.name}" for alias in node.names} & set(modules)
                imports[name] |= among or {str(node.module)}
            if isinstance(node, ast.Import):
                imports[name] |= {alias.name for alias in node.names} & set(modules)
        imports[name] -= {name}
    return imports


@pytest.mark.parametrize("package", ["loader/cellfeed", "tuner/cellfeed_tuner"])
def test_the_map_of_the_code_is_that_of_the_code(package):
    """Each folder is on it once, imports only what is below it, and nothing in a circle."""
    rows = rows_of_map(package)
    height = {name: -k for k, row in enumerate(rows) for name in row}
    assert len(height) == sum(map(len, rows))
    path = ROOT / package
    there = {each.stem for each in path.iterdir() if each.suffix == ".py" or each.is_dir()}
    there -= {"__init__", "__pycache__"}
    others = extensions_of_map() & there if path.name == "cellfeed" else set()
    assert set(height) == there - others
    imports = imports_of(package)
    for module, imported in imports.items():
        importer = module.split(".")[1:2]
        for each in imported:
            (name,) = each.split(".")[1:2] or [""]
            if importer and name and importer != [name] and not {name, *importer} & others:
                assert height[name] <= height[importer[0]], f"{module} imports {each}"
    TopologicalSorter(imports).prepare()  # raises an error that names a circle


def test_lines_that_a_diff_adds_are_in_the_file():
    diffs = [
        (name, line.removeprefix("+"))
        for document in documents()
        for language, text in BLOCK.findall(document.read_text())
        if language == "diff"
        for name, *lines in (each.splitlines() for each in text.split("--- ") if each)
        for line in lines
    ]
    assert diffs
    for name, line in diffs:
        assert f"\n{line}" in (ROOT / name).read_text(), line
