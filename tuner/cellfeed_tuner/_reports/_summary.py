"""A result in a few lines, as a notebook shows it."""

from collections.abc import Iterable

from cellfeed_tuner._reports._html_report._elements import Html, element
from cellfeed_tuner._reports._speed_interval import interval
from cellfeed_tuner._reports._wording import (
    drifts_in_words,
    from_few_rounds,
    interruption_in_words,
    key_figures,
    missing_in_words,
    mixing_in_words,
    proof_of_choice,
    why_no_choice,
    why_nothing,
)
from cellfeed_tuner._results._autotune_result import AutotuneResult

__all__ = ["html_summary", "text_summary"]

_TO_TRAIN = "dataset = CellDataset.from_autotune(collection, result, seed=0)"


def text_summary(result: AutotuneResult) -> str:
    """Return the recommendation in one line."""
    chosen = result.recommended
    if chosen is None:
        if result.loader_fault is not None:
            return f"THE LOADER IS WRONG: {result.loader_fault}"
        return "no configuration is feasible"
    speed = f"{interval(chosen.cells_per_second)} cells/s"
    return ", ".join(filter(None, [f"{chosen.settings}; {speed}", from_few_rounds(result)]))


def html_summary(result: AutotuneResult) -> Html:
    """Return the recommendation as an element that needs no style: figures, proof and code."""
    chosen = result.recommended
    warnings = _paragraphs(
        [*interruption_in_words(result), *missing_in_words(result), *drifts_in_words(result)],
        "strong",
    )
    if chosen is None:
        headline = element("p", element("strong", why_no_choice(result)))
        return element("div", headline, *warnings, *_paragraphs([why_nothing(result)]))
    return element(
        "div",
        element("p", element("strong", f"Recommended: {chosen.settings}")),
        element(
            "table",
            *(
                element("tr", element("th", name), element("td", value))
                for name, value in key_figures(result).items()
            ),
        ),
        *warnings,
        *_paragraphs([chosen.reason, *mixing_in_words(result), *proof_of_choice(result)]),
        element("pre", _TO_TRAIN),
    )


def _paragraphs(lines: Iterable[str], tag: str = "span") -> list[Html]:
    return [element("p", element(tag, line)) for line in lines]
