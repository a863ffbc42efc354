"""The HTML page of a result, which needs neither network nor scripts."""

import re
from io import BytesIO
from math import isfinite
from typing import NamedTuple
from xml.etree import ElementTree as ET

import matplotlib as mpl
from matplotlib.figure import Figure

from cellfeed_tuner._interval import Estimate, interval, times
from cellfeed_tuner._reports._text import floor_cost, in_words, megabytes, rendered
from cellfeed_tuner._result import AutotuneResult
from cellfeed_tuner._results import (
    MEANINGS,
    STATUS_WORDS,
    ConditionalEntropyBits,
    ConfigurationResult,
    EntropyBits,
    Verdict,
)
from cellfeed_tuner.plots import bounds_figure, heat_map_figure, hover, trade_off_figure

_NOT_OF_XML = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\ufffe\uffff]")
_HOVER = hover("")
HEADINGS = {"num_workers": "workers"}


class _Cell(NamedTuple):
    """A cell of a table, and what is shown when it is pointed at."""

    text: object
    title: str = ""


def html_report(result: AutotuneResult, *, code: str) -> str:
    """Return the page."""
    labels, chosen, cost = " and ".join(result.dataset.labels), result.chosen, floor_cost(result)
    configurations = sorted(result.configurations, key=_speed, reverse=True)
    rows = [
        (_kind(each, chosen), _cells(each, result), _remark(each))
        for each in sorted(configurations, key=lambda each: each is not chosen)
    ]
    return rendered(
        "page.html.jinja",
        result,
        title=f"autotune: {result.dataset.n_visited:,} cells mixed by {labels}",
        code=code,
        pictures=_pictures(result),
        meanings=MEANINGS,
        floor_cost=cost,
        timed=[
            (_kind(each, chosen), _compared(each, result))
            for each in configurations
            if _speed(each)
        ],
        rows=rows,
    )


def _pictures(result: AutotuneResult) -> dict[str, str]:
    """Return the figures as SVG elements, without those that would be empty."""
    pictures = dict[str, str]()
    if any(each.cells_per_second for each in result.configurations):
        pictures["trade_off"] = _inline_svg(
            trade_off_figure(result),
            name="trade-off",
            description="Throughput against label entropy of each timed configuration",
        )
    if result.ranges is None:
        for quantity in ("throughput", "entropy"):
            pictures[quantity] = _inline_svg(
                heat_map_figure(result, (quantity,)),
                name=quantity,
                description=f"{quantity.capitalize()} over block sizes and fetch factors",
            )
    if result.ranges is None and not result.dataset.loader:
        pictures["bounds"] = _inline_svg(
            bounds_figure(result),
            name="bounds",
            description="Label entropy over the fetch factor for each block size: planned, "
            "measured, and the paper's bounds",
        )
    return pictures


def _speed(each: ConfigurationResult) -> float:
    return each.cells_per_second.value if each.cells_per_second else 0.0


def _kind(each: ConfigurationResult, chosen: ConfigurationResult | None) -> str:
    if each is chosen:
        return "chosen"
    return "timed" if each.cells_per_second else "absent"


def _settings(each: ConfigurationResult, result: AutotuneResult) -> dict[str, _Cell]:
    """Return the cells of the settings that any configuration has."""
    names = dict.fromkeys(name for one in result.configurations for name in one.configuration)
    return {
        HEADINGS.get(name, name.replace("_", " ")): _Cell(_shown(each.configuration.get(name)))
        for name in names
    }


def _shown(value: object) -> object:
    if value is None:
        return ""
    return ("no", "yes")[value] if isinstance(value, bool) else value


def _compared(each: ConfigurationResult, result: AutotuneResult) -> dict[str, _Cell]:
    """Return the cells of a timed configuration beside the recommended one."""
    ratio, bits = each.relative, each.least_mixed
    return _settings(each, result) | {
        "cells/s [95 % interval]": _throughput(each),
        "times recommended": _Cell(
            "1x" if each is result.chosen else times(ratio) if ratio else ""
        ),
        "entropy / random": _Cell(
            f"{bits.share_of_random:.1%}",
            f"{bits.expected.value:.3f} bits of {bits.random_alike:.3f}",
        ),
        "memory": _Cell(megabytes(each.peak_memory_bytes or 0)),
        "outcome": _Cell(in_words("why_not", result, each)[0]),
    }


def _cells(each: ConfigurationResult, result: AutotuneResult) -> dict[str, _Cell]:
    """Return the cells of the table of all configurations, by heading."""
    amplification = result.read_amplification(each)
    status = STATUS_WORDS[each.status]
    cells = _settings(each, result) | {
        "status": _Cell("recommended" if each is result.chosen else status.listed, each.note),
        "cells/s [95 % interval]": _throughput(each),
        "rounds": _Cell(each.n_rounds or ""),
        **_bits_of(each.entropy_bits),
        "bounds (bits)": _bounds(each.entropy_bits),
        "verdict": _verdict(each.verdict),
        "memory": _Cell(megabytes(each.peak_memory_bytes) if each.peak_memory_bytes else ""),
        "read / stored": _Cell("" if amplification is None else f"{amplification:.1f}"),
    }
    for name, label in each.further_labels.items():
        cells[f"{name}: verdict"] = _verdict(label.verdict)
        cells |= _bits_of(label.entropy_bits, f"{name}: ")
    within = each.conditional_entropy_bits
    if within is not None:
        cells |= _bits_of(within, f"{result.dataset.label} within {within.given}: ")
    return cells


def _remark(each: ConfigurationResult) -> str:
    proof = each.verdict.sentence if each.verdict else ""
    return "; ".join(filter(None, [each.note, proof]))


def _throughput(each: ConfigurationResult) -> _Cell:
    speed = each.cells_per_second
    return _Cell(
        f"{interval(speed)}" if speed else "",
        f"{each.n_rounds} rounds of whole fetches" if speed else "",
    )


def _verdict(verdict: Verdict | None) -> _Cell:
    return _Cell(verdict.kind, MEANINGS[verdict.kind]) if verdict else _Cell("")


def _bits_of(bits: EntropyBits | ConditionalEntropyBits, of: str = "") -> dict[str, _Cell]:
    return {
        f"{of}measured bits [95 % interval]": _Cell(_bits(bits.measured)),
        f"{of}expected bits": _Cell(f"{bits.expected.value:.3f}"),
        f"{of}share of random": _Cell(f"{bits.share_of_random:.1%}"),
    }


def _bounds(bits: EntropyBits) -> _Cell:
    if not bits.upper_bound:
        return _Cell("")
    low, high = bits.bounds
    why = "" if low else "0 says nothing: a minibatch may lie within one block"
    return _Cell(f"{low:.3f} to {high:.3f}" if low else f"0 to {high:.3f}", why)


def _bits(bits: Estimate | None) -> str:
    if bits is None:
        return ""
    if not (isfinite(bits.low) and isfinite(bits.high)):
        return f"{bits.value:.3f}"
    return f"{bits.value:.3f} [{bits.low:.3f}, {bits.high:.3f}]"


def _inline_svg(figure: Figure, *, name: str, description: str) -> str:
    """Return a figure as an SVG element that scales to the page, with text as text.

    Ids begin with the name, so that figures on one page do not share them. What an artist's
    `hover` says becomes its title.
    """
    file = BytesIO()
    # The salt makes ids, which are otherwise random, the same for the same figure.
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
        figure.savefig(file, format="svg", metadata={"Date": None})
    # Labels may contain characters that XML does not allow.
    svg = _NOT_OF_XML.sub("\N{REPLACEMENT CHARACTER}", file.getvalue().decode())
    root = ET.fromstring(svg)  # noqa: S314 - our own
    for number, element in enumerate(root.iter()):
        # HTML has these elements without their namespaces.
        element.tag = _local(element.tag)
        said = element.get("id", "")
        if said.startswith(_HOVER):
            ET.SubElement(element, "title").text = said.removeprefix(_HOVER)
            element.set("id", f"hover-{number}")
        element.attrib = {
            _local(key): _renamed(_local(key), value, name) for key, value in element.items()
        }
    for metadata in root.findall("metadata"):
        root.remove(metadata)
    width = root.attrib.pop("width")
    del root.attrib["height"]
    root.attrib |= {
        "role": "img",
        "aria-label": description,
        "style": f"max-width: calc(1.3 * {width})",
    }
    return ET.tostring(root, encoding="unicode")


def _local(name: str) -> str:
    return name.rpartition("}")[2]


def _renamed(key: str, value: str, name: str) -> str:
    """Return an attribute's value with the figure's name before any id in it."""
    if key == "id":
        return f"{name}-{value}"
    if key == "href":
        return value.replace("#", f"#{name}-", 1)
    return value.replace("url(#", f"url(#{name}-")
