"""Figures that stand inside an HTML page."""

import re
from io import BytesIO
from xml.etree import ElementTree as ET

import matplotlib as mpl
from matplotlib.figure import Figure

__all__ = ["inline_svg"]

_NOT_OF_XML = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\ufffe\uffff]")


def inline_svg(figure: Figure, *, name: str, description: str) -> str:
    """Return a figure as an element of an HTML page, with its text as text.

    It is as wide as the page allows, up to its own size.

    Parameters
    ----------
    figure
        What is drawn.
    name
        Begins every id, so that figures of one page do not refer to each other's parts.
    description
        What it shows, for those who do not see it.
    """
    file = BytesIO()
    # The salt makes ids, which are random otherwise, the same for the same figure.
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
        figure.savefig(file, format="svg", metadata={"Date": None})
    # Labels may have characters that XML has not.
    svg = _NOT_OF_XML.sub("\N{REPLACEMENT CHARACTER}", file.getvalue().decode())
    root = ET.fromstring(svg)  # noqa: S314 - our own
    for element in root.iter():
        # HTML knows these elements without their namespaces.
        element.tag = _local(element.tag)
        element.attrib = {
            _local(key): _renamed(_local(key), value, name) for key, value in element.items()
        }
    for metadata in root.findall("metadata"):
        root.remove(metadata)
    width = root.attrib.pop("width")
    del root.attrib["height"]
    root.attrib |= {"role": "img", "aria-label": description, "style": f"max-width: {width}"}
    return ET.tostring(root, encoding="unicode")


def _local(name: str) -> str:
    return name.rpartition("}")[2]


def _renamed(key: str, value: str, name: str) -> str:
    """Return an attribute's value with the figure's name before the ids in it."""
    if key == "id":
        return f"{name}-{value}"
    if key == "href":
        return value.replace("#", f"#{name}-", 1)
    return value.replace("url(#", f"url(#{name}-")
