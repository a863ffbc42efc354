"""Every configuration, in a table."""

from math import isfinite

from cellfeed.console import format_bytes
from cellfeed_tuner._interval import Estimate
from cellfeed_tuner._reports._html_report._elements import Html, element, table
from cellfeed_tuner._reports._wording import interval
from cellfeed_tuner._result import AutotuneResult, ConfigurationResult

__all__ = ["configurations"]

_HEADINGS = (
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
    "remark",
)


def configurations(result: AutotuneResult) -> Html:
    """Return each configuration with its status, why it has that, and its verdict."""
    chosen = result.recommended and result.recommended.configuration
    rows = [
        _row(each, result.read_amplification(each), is_chosen=each.configuration == chosen)
        for each in result.configurations
    ]
    return element("div", table(_HEADINGS, rows), class_="scroll", tabindex="0")


def _row(each: ConfigurationResult, read_amplification: float | None, *, is_chosen: bool) -> Html:
    settings, entropy, speed = each.configuration, each.entropy_bits, each.cells_per_second
    verdict = each.verdict
    cells = [
        settings.block_size,
        settings.fetch_factor,
        settings.num_workers,
        each.status,
        verdict.kind if verdict else "",
        interval(speed) if speed else "",
        each.n_rounds or "",
        _bits(entropy.measured),
        f"{entropy.expected.value:.3f}",
        f"{entropy.share_of_random:.1%}",
        f"{entropy.lower_bound:.3f} to {entropy.upper_bound:.3f}",
        entropy.verdict,
        format_bytes(each.peak_memory_bytes) if each.peak_memory_bytes else "",
        f"{read_amplification:.1f}" if read_amplification is not None else "",
    ]
    remark = " ".join(filter(None, [each.note, verdict.sentence if verdict else ""]))
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
