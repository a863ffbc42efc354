"""Writing HTML that is escaped unless it says otherwise."""

from collections.abc import Iterable
from html import escape

__all__ = ["Html", "definitions", "element", "join", "table"]


class Html(str):
    """Text that is HTML already; all other text is escaped where it is put into HTML."""

    __slots__ = ()


def element(tag: str, *content: object, **attributes: str) -> Html:
    """Return an element around some content.

    Parameters
    ----------
    tag
        Its name.
    content
        `Html` as it is, anything else as escaped text.
    attributes
        Their values are escaped; an underscore behind a name (``class_``) is left out.

    Examples
    --------
    >>> element("p", "a < b", Html("<br>"), class_="note")
    '<p class="note">a &lt; b<br></p>'
    """
    written = "".join(
        f' {name.rstrip("_")}="{_escaped(value)}"' for name, value in attributes.items()
    )
    return Html(f"<{tag}{written}>{join(content)}</{tag}>")


def join(content: Iterable[object]) -> Html:
    """Return one piece of HTML from several, of which those that are not `Html` are escaped."""
    return Html("".join(each if isinstance(each, Html) else _escaped(each) for each in content))


def table(headings: Iterable[object], rows: Iterable[Html]) -> Html:
    """Return a table of rows that are elements ``tr``."""
    head = element("tr", *(element("th", each, scope="col") for each in headings))
    return element("table", element("thead", head), element("tbody", *rows))


def definitions(pairs: Iterable[tuple[str, object]]) -> Html:
    """Return a list of names and what they stand for.

    Examples
    --------
    >>> definitions([("cells", 28_000)])
    '<dl><dt>cells</dt><dd>28000</dd></dl>'
    """
    return element(
        "dl", *(join([element("dt", name), element("dd", value)]) for name, value in pairs)
    )


def _escaped(value: object) -> str:
    # Names of files need not be UTF-8, which a page has to be.
    return escape(str(value).encode("utf-8", "replace").decode())
