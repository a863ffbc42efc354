"""Every configuration, in a table."""

from math import isfinite

from cellfeed.console import format_bytes
from cellfeed_tuner._interval import Estimate
from cellfeed_tuner._reports._html_report._elements import Html, element, table
from cellfeed_tuner._reports._wording import few_rounds_in_words, throughput
from cellfeed_tuner._results._autotune_result import AutotuneResult
from cellfeed_tuner._results._configuration_result import ConfigurationResult

__all__ = ["configurations"]

_BEFORE = (
    "block size",
    "fetch factor",
    "workers",
    "status",
    "verdict",
    "cells/s [95 % interval]",
    "rounds",
    "measured bits [95 % interval]",
    "expected bits",
    "share of random",
    "bounds (bits)",
    "within them",
    "memory",
    "read / stored",
)


def configurations(result: AutotuneResult) -> Html:
    """Return each configuration with its status, why it has that, and its verdict."""
    chosen = result.recommended and result.recommended.configuration
    rows = [
        _row(each, result, is_chosen=each.configuration == chosen) for each in result.configurations
    ]
    first = result.configurations[0]
    headings = [*_BEFORE, *(heading for heading, _ in _further(first, result)), "remark"]
    notes = (element("p", each) for each in few_rounds_in_words(result.configurations))
    return element("div", table(headings, rows), *notes, class_="scroll", tabindex="0")


def _further(each: ConfigurationResult, result: AutotuneResult) -> list[tuple[str, str]]:
    """Return what is said of further labels, and of the first within another, with headings."""
    said = list[tuple[str, str]]()
    for name, label in each.further_labels.items():
        bits, verdict = label.entropy_bits, label.verdict
        said += [
            (f"{name}: verdict", verdict.kind if verdict else ""),
            (f"{name}: measured bits", _bits(bits.measured)),
            (f"{name}: expected bits", f"{bits.expected.value:.3f}"),
            (f"{name}: share of random", f"{bits.share_of_random:.1%}"),
        ]
    within = each.conditional_entropy_bits
    if within is not None:
        heading = f"{result.dataset.label} within {within.given}"
        said += [
            (f"{heading}: measured bits", _bits(within.measured)),
            (f"{heading}: expected bits", f"{within.expected.value:.3f}"),
            (f"{heading}: share of random", f"{within.share_of_random:.1%}"),
        ]
    return said


def _row(each: ConfigurationResult, result: AutotuneResult, *, is_chosen: bool) -> Html:
    settings, entropy, speed = each.configuration, each.entropy_bits, each.cells_per_second
    verdict, amplification = each.verdict, result.read_amplification(each)
    cells = [
        settings.block_size,
        settings.fetch_factor,
        settings.num_workers,
        each.status,
        verdict.kind if verdict else "",
        throughput(each),
        each.n_rounds or "",
        _bits(entropy.measured),
        f"{entropy.expected.value:.3f}",
        f"{entropy.share_of_random:.1%}",
        "{:.3f} to {:.3f}".format(*entropy.bounds),
        entropy.verdict,
        format_bytes(each.peak_memory_bytes) if each.peak_memory_bytes else "",
        "" if amplification is None else f"{amplification:.1f}",
        *(text for _, text in _further(each, result)),
    ]
    remark = "; ".join(filter(None, [each.note, verdict.sentence if verdict else ""]))
    return element(
        "tr",
        *(element("td", cell) for cell in cells),
        element("td", remark, class_="remark"),
        class_="chosen" if is_chosen else "measured" if speed else "absent",
    )


def _bits(bits: Estimate | None) -> str:
    if bits is None:
        return ""
    if not (isfinite(bits.low) and isfinite(bits.high)):
        return f"{bits.value:.3f}"
    return f"{bits.value:.3f} [{bits.low:.3f}, {bits.high:.3f}]"
