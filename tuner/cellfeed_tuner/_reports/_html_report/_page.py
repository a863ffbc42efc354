"""The page and its sections."""

from collections import Counter
from collections.abc import Iterable
from importlib import resources

from cellfeed_tuner._reports._html_report._bottleneck import bottleneck
from cellfeed_tuner._reports._html_report._conditions import conditions
from cellfeed_tuner._reports._html_report._configurations import configurations
from cellfeed_tuner._reports._html_report._elements import Html, definitions, element
from cellfeed_tuner._reports._html_report._svg import inline_svg
from cellfeed_tuner._reports._wording import (
    busy_in_words,
    drifts_in_words,
    interruption_in_words,
    key_figures,
    missing_in_words,
    mixing_in_words,
    prefetch_in_words,
    proof_of_choice,
    ranges_in_words,
    untimed_in_words,
    use_in_words,
    why_no_choice,
    why_nothing,
)
from cellfeed_tuner._results._autotune_result import AutotuneResult
from cellfeed_tuner._results._configuration_result import ConfigurationResult
from cellfeed_tuner._verdicts._verdict import VerdictKind
from cellfeed_tuner.plots import bounds_figure, epoch_figure, heat_map_figure, trade_off_figure

__all__ = ["html_report"]

# A browser is told to load nothing at all, from anywhere.
_HEAD = Html(
    '<meta charset="utf-8">'
    '<meta name="viewport" content="width=device-width">'
    '<meta http-equiv="Content-Security-Policy" '
    "content=\"default-src 'none'; style-src 'unsafe-inline'\">"
)
_VERDICTS: dict[VerdictKind, str] = {
    "inside": "as planned, and inside the paper's bounds.",
    "outside": "as planned, but outside the bounds or off the exact expectation, though theory "
    "should apply.",
    "assumptions": "as planned, but this collection is not as theory assumes.",
    "loader": "not as planned: something is wrong with the loader.",
}


def html_report(result: AutotuneResult, *, code: str) -> str:
    """Return one page that needs nothing beside it: neither network nor scripts.

    Parameters
    ----------
    result
        What ``autotune`` found.
    code
        The lines that train with the recommendation; left out if there is none.
    """
    labels = " and ".join(result.dataset.labels)
    title = f"autotune: {result.dataset.n_visited:,} cells mixed by {labels}"
    chosen = result.chosen if result.entropy_over_epoch else None
    sections = [
        _section("recommendation", "Recommendation", _recommendation(result)),
        *([_section("code", "To train with it", _code(code))] if result.recommended else []),
        _section("bottleneck", "Where the time goes", bottleneck(result)),
        _section("trade-off", "Throughput against entropy", _trade_off(result)),
        _section("grid", "Over the grid", [_over_the_grid(result)]),
        _section("bounds", "Entropy against theory", [*_bounds(result), *_verdicts(result)]),
        *([_section("epoch", "Over an epoch", [_epoch(result, chosen)])] if chosen else []),
        _section("configurations", "All configurations", [configurations(result)]),
        _section("conditions", "What this was measured on", [conditions(result)]),
    ]
    style = Html(resources.files(__package__).joinpath("report.css").read_text("utf-8"))
    head = element("head", _HEAD, element("title", title), element("style", style))
    body = element("body", element("main", element("h1", title), *sections))
    return f"<!doctype html>\n{element('html', head, body, lang='en')}\n"


def _section(name: str, heading: str, content: Iterable[Html]) -> Html:
    return element("section", element("h2", heading), *content, id=name)


def _paragraphs(lines: Iterable[str], **attributes: str) -> list[Html]:
    return [element("p", line, **attributes) for line in lines]


def _recommendation(result: AutotuneResult) -> list[Html]:
    chosen = result.recommended
    if chosen is None:
        headline = element("p", why_no_choice(result), class_="choice alarm")
        alarm = {} if result.loader_fault is None else {"class_": "alarm"}
        said = [headline, element("p", why_nothing(result), **alarm)]
    else:
        headline = element("p", chosen.settings, class_="choice")
        figures = (definitions([each]) for each in key_figures(result).items())
        said = [
            headline,
            element("div", *figures, class_="figures"),
            element("p", chosen.reason),
        ]
        said += _paragraphs([*prefetch_in_words(result), *use_in_words(result)])
    return [
        *said,
        *_paragraphs(
            [
                *interruption_in_words(result),
                *missing_in_words(result),
                *drifts_in_words(result),
                *busy_in_words(result),
            ],
            class_="alarm",
        ),
        *_paragraphs(mixing_in_words(result)),
        *_paragraphs(proof_of_choice(result)),
        *_paragraphs([result.earlier.sentence] if result.earlier else []),
        *_paragraphs(ranges_in_words(result)),
        *_paragraphs(untimed_in_words(result)),
    ]


def _code(code: str) -> list[Html]:
    return [element("pre", element("code", code)), element("p", "One click selects all of it.")]


def _figure(svg: Html, caption: str) -> Html:
    return element("figure", svg, element("figcaption", caption))


def _trade_off(result: AutotuneResult) -> list[Html]:
    if all(each.cells_per_second is None for each in result.configurations):
        return [element("p", "No throughput could be measured, so there is nothing to trade.")]
    svg = inline_svg(
        trade_off_figure(result),
        name="trade-off",
        description="Throughput against label entropy of each measured configuration",
    )
    caption = (
        "Each point is a measured configuration with its 95 % intervals. On the Pareto front lies "
        "what nothing else beats in both respects. Left of the floor, minibatches are mixed less "
        "than was asked for."
    )
    return [_figure(svg, caption)]


def _over_the_grid(result: AutotuneResult) -> Html:
    svg = inline_svg(
        heat_map_figure(result),
        name="heat-maps",
        description="Throughput and label entropy over block sizes and fetch factors",
    )
    if result.ranges is not None:
        return _figure(svg, "Each point is a pair of sizes that was measured.")
    caption = (
        "Entropy is that of the plan over these labels, which takes no reading. Where there is "
        "no throughput, the reason stands in its place, and the table below says more."
    )
    return _figure(svg, caption)


def _bounds(result: AutotuneResult) -> list[Html]:
    if result.ranges is not None:
        said = (
            "Of ranges, hardly two configurations have a block size in common, over which theory "
            "could be drawn; each one's bounds and verdict are in the table below."
        )
        return [element("p", said)]
    svg = inline_svg(
        bounds_figure(result),
        name="bounds",
        description="Label entropy over the fetch factor for each block size, as planned, as "
        "measured, and between the paper's bounds",
    )
    caption = (
        "Measured entropies stand right of the plan's, one number of workers beside the other. "
        "The thick line is the exact expectation for blocks that hold one label each; thin lines "
        "are those of the other block sizes."
    )
    if result.dataset.further_labels:
        caption = f"Label {result.dataset.label}. {caption}"
    return [_figure(svg, caption)]


def _epoch(result: AutotuneResult, chosen: ConfigurationResult) -> Html:
    random = {name: each.random for name, each in result.entropies(chosen).items()}
    svg = inline_svg(
        epoch_figure(result.entropy_over_epoch, random),
        name="epoch",
        description="Label entropy of the recommended configuration in each tenth of an epoch",
    )
    caption = (
        "Minibatches of the recommended configuration from the first to the last tenth of an "
        "epoch, by its plan, with 95 % intervals."
    )
    return _figure(svg, caption)


def _verdicts(result: AutotuneResult) -> list[Html]:
    found = Counter(each.verdict.kind for each in result.configurations if each.verdict)
    if not found:
        return [element("p", "No measured configuration could be judged.")]
    lines = [
        element("li", f"{found[kind]} ", element("strong", kind), f": {meaning}")
        for kind, meaning in _VERDICTS.items()
        if found[kind]
    ]
    return [element("p", "Verdicts on the measured configurations:"), element("ul", *lines)]
