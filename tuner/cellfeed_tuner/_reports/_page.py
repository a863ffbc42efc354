"""The HTML page of a result, which needs neither network nor scripts."""

import re
from io import StringIO

import matplotlib as mpl
from matplotlib.figure import Figure

from cellfeed_tuner._reports._text import cells_of, fastest_below_floor, rendered
from cellfeed_tuner._result import AutotuneResult
from cellfeed_tuner._results import MEANINGS, ConfigurationResult
from cellfeed_tuner.plots import autotune_figure

# From the file that Matplotlib writes to an element of a page: without prolog, namespaces and
# comments, and with titles that are shown on pointing.
_FOR_HTML = {
    r"^.*?(?=<svg)": "",
    r"<metadata>.*?</metadata>|<!--.*?-->": "",
    r'<svg .*?(viewBox="\S+ \S+ (\S+) \S+").*?>': r"<svg \1 role='img' style='max-width: "
    r"calc(1.3 * \2pt)' aria-label='Throughput and entropy of all configurations'>",
    "xlink:href": "href",
    r'<g id="hover: (.*?)">': r"<g><title>\1</title>",
}


def html_report(result: AutotuneResult, *, code: str) -> str:
    """Return the page."""

    def rank(each: ConfigurationResult) -> tuple[bool, float]:
        return each is result.chosen, each.cells_per_second.value if each.cells_per_second else 0.0

    kinds = {True: "timed", False: "absent"}
    return rendered(
        "page.html.jinja",
        result,
        title=f"autotune: {result.dataset.n_visited:,} cells mixed by "
        + " and ".join(result.dataset.labels),
        code=code,
        picture=_inline_svg(autotune_figure(result)),
        meanings=MEANINGS,
        fastest=fastest_below_floor(result),
        rows=[
            (
                "chosen" if each is result.chosen else kinds[each.cells_per_second is not None],
                cells_of(result, each),
            )
            for each in sorted(result.configurations, key=rank, reverse=True)
        ],
    )


def _inline_svg(figure: Figure) -> str:
    """Return a figure as an SVG element that scales to the page, with text as text."""
    file = StringIO()
    # The salt makes ids, which are otherwise random, the same for the same figure.
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "autotune"}):
        figure.savefig(file, format="svg", metadata={"Date": None})
    svg = file.getvalue()
    for pattern, instead in _FOR_HTML.items():
        svg = re.sub(pattern, instead, svg, flags=re.DOTALL)
    return svg
