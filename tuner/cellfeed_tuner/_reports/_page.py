"""What ``autotune`` found, as one page that needs neither network nor scripts."""

import re
from io import BytesIO
from math import isfinite
from xml.etree import ElementTree as ET

import matplotlib as mpl
from matplotlib.figure import Figure

from cellfeed.console import format_bytes
from cellfeed_tuner._interval import Estimate, interval
from cellfeed_tuner._reports._words import rendered
from cellfeed_tuner._result import AutotuneResult
from cellfeed_tuner._results._configuration_result import (
    MEANINGS,
    STATUS_WORDS,
    ConditionalEntropyBits,
    ConfigurationResult,
    EntropyBits,
)
from cellfeed_tuner.plots import bounds_figure, heat_map_figure, trade_off_figure

__all__ = ["html_report"]

_NOT_OF_XML = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\ufffe\uffff]")


def html_report(result: AutotuneResult, *, code: str) -> str:
    """Return the page."""
    labels, chosen = " and ".join(result.dataset.labels), result.chosen
    rows = [
        (_kind(each, chosen), _cells(each, result))
        for each in sorted(result.configurations, key=lambda each: each is not chosen)
    ]
    return rendered(
        "page.html.jinja",
        result,
        title=f"autotune: {result.dataset.n_visited:,} cells mixed by {labels}",
        code=code,
        pictures=_pictures(result),
        meanings=MEANINGS,
        headings=list(rows[0][1]),
        rows=rows,
    )


def _pictures(result: AutotuneResult) -> dict[str, str]:
    """Return the figures as elements, of which some have nothing to draw."""
    pictures = dict[str, str]()
    if any(each.cells_per_second for each in result.configurations):
        pictures["trade_off"] = _inline_svg(
            trade_off_figure(result),
            name="trade-off",
            description="Throughput against label entropy of each measured configuration",
        )
    if result.ranges is None:
        pictures["heat_maps"] = _inline_svg(
            heat_map_figure(result),
            name="heat-maps",
            description="Throughput and label entropy over block sizes and fetch factors",
        )
    if result.ranges is None and not result.dataset.loader:
        pictures["bounds"] = _inline_svg(
            bounds_figure(result),
            name="bounds",
            description="Label entropy over the fetch factor for each block size, as planned, as "
            "measured, and between the paper's bounds",
        )
    return pictures


def _kind(each: ConfigurationResult, chosen: ConfigurationResult | None) -> str:
    if each is chosen:
        return "chosen"
    return "measured" if each.cells_per_second else "absent"


def _cells(each: ConfigurationResult, result: AutotuneResult) -> dict[str, object]:
    """Return what the table says of a configuration, by heading."""
    settings, speed = each.configuration, each.cells_per_second
    amplification = result.read_amplification(each)
    cells: dict[str, object] = {
        "block size": settings.block_size,
        "fetch factor": settings.fetch_factor,
        "workers": settings.num_workers,
    }
    if any(one.configuration.others for one in result.configurations):
        cells["other settings"] = settings.others_in_words
    cells |= {
        "status": "recommended" if each is result.chosen else STATUS_WORDS[each.status].listed,
        "cells/s [95 % interval]": f"{interval(speed)}{'*' * each.has_few_rounds}" if speed else "",
        "rounds": each.n_rounds or "",
        "verdict": each.verdict.kind if each.verdict else "",
        **_bits_of(each.entropy_bits),
        "bounds (bits)": "{:.3f} to {:.3f}".format(*each.entropy_bits.bounds),
        "memory": format_bytes(each.peak_memory_bytes) if each.peak_memory_bytes else "",
        "read / stored": "" if amplification is None else f"{amplification:.1f}",
    }
    for name, label in each.further_labels.items():
        cells[f"{name}: verdict"] = label.verdict.kind if label.verdict else ""
        cells |= _bits_of(label.entropy_bits, f"{name}: ")
    within = each.conditional_entropy_bits
    if within is not None:
        cells |= _bits_of(within, f"{result.dataset.label} within {within.given}: ")
    proof = each.verdict.sentence if each.verdict else ""
    return cells | {"remark": "; ".join(filter(None, [each.note, proof]))}


def _bits_of(bits: EntropyBits | ConditionalEntropyBits, of: str = "") -> dict[str, str]:
    return {
        f"{of}measured bits [95 % interval]": _bits(bits.measured),
        f"{of}expected bits": f"{bits.expected.value:.3f}",
        f"{of}share of random": f"{bits.share_of_random:.1%}",
    }


def _bits(bits: Estimate | None) -> str:
    if bits is None:
        return ""
    if not (isfinite(bits.low) and isfinite(bits.high)):
        return f"{bits.value:.3f}"
    return f"{bits.value:.3f} [{bits.low:.3f}, {bits.high:.3f}]"


def _inline_svg(figure: Figure, *, name: str, description: str) -> str:
    """Return a figure as an element as wide as the page allows, with its text as text.

    The name begins every id, so that figures of one page do not refer to each other's parts.
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
